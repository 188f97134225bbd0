"""Categorical value heads, adapters and frozen layers: the maths, every layout, checkpoints, exports, the script."""

import dataclasses
import json
import math

import pytest
import torch
import transformers
from helpers import ROOT, captured_gradients, full_weights, random_batch, rows_of, succeeded, torchrun
from scenarios import VARIANTS, one_gradient
from test_layouts import MODELS, save_model

import common
import critic_fsdp
from common import UserError
from critic_fsdp import Config, CriticWorker, Run


def worker(**fields):
    w = CriticWorker(Config(**fields))
    w.init_model()
    return w


# ---------------------------------------------------------------------------------------------------------------------
# HL-Gauss against plain loops
# ---------------------------------------------------------------------------------------------------------------------


def plain_targets(target, low, high, bins):
    """Gaussian mass of each bin over that of the range, with math.erf."""
    width = (high - low) / bins
    target = min(max(target, low), high)
    cdf = [0.5 * (1 + math.erf((low + i * width - target) / (0.75 * width * math.sqrt(2)))) for i in range(bins + 1)]
    return [(b - a) / (cdf[-1] - cdf[0]) for a, b in zip(cdf, cdf[1:], strict=False)]


def plain_value(logits, low, high):
    width = (high - low) / len(logits)
    return sum(p * (low + (i + 0.5) * width) for i, p in enumerate(logits.softmax(0)))


def plain_cross_entropy(logits, target, low, high):
    p = plain_targets(float(target), low, high, len(logits))
    return -sum(p_i * x for p_i, x in zip(p, logits.log_softmax(0), strict=True))


@pytest.mark.parametrize("low, high, bins", [(-1.0, 3.0, 51), (0.0, 1.0, 2), (-200.0, -190.0, 255)])
def test_targets_values_and_loss_equal_plain_loops(low, high, bins):
    g, t = torch.Generator().manual_seed(0), 40
    returns = low + (high - low) * (1.4 * torch.rand(t, generator=g) - 0.2)  # some outside
    returns[:2] = torch.tensor([low, high])
    p = common.hl_gauss_targets(returns, low, high, bins)
    expected = torch.tensor([plain_targets(float(r), low, high, bins) for r in returns], dtype=torch.float64)
    torch.testing.assert_close(p.double(), expected, rtol=1e-4, atol=2e-4 if low == -200 else 1e-6)
    torch.testing.assert_close(p.sum(1), torch.ones(t))
    logits = torch.randn(t, bins, generator=g)
    values = torch.stack([plain_value(x, low, high) for x in logits.double()])
    torch.testing.assert_close(common.hl_gauss_values(logits, low, high).double(), values, rtol=1e-6, atol=1e-5)
    mask, weights = torch.rand(t, generator=g) < 0.7, torch.rand(t, generator=g)
    weights = weights * mask
    exact = logits.double().requires_grad_()
    loss = sum(weights[i] * plain_cross_entropy(exact[i], returns[i], low, high) for i in range(t) if mask[i])
    loss.backward()
    ours, returns = logits.clone(), torch.where(mask, returns, math.nan)
    ours[~mask] = math.nan  # what is no action never enters
    ours.requires_grad_()
    our_loss = common.hl_gauss_loss(ours, returns, mask, weights, low, high)
    our_loss.backward()
    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-3, atol=1e-4 if low == -200 else 1e-6)


def test_the_value_of_a_target_is_its_return():
    """Logits that fit a target exactly give the return back, to a small part of a bin, away from the ends."""
    returns = torch.linspace(-0.9, 2.9, 100)
    p = common.hl_gauss_targets(returns, -1.2, 3.2, 51)
    values = common.hl_gauss_values(p.clamp(min=1e-30).log(), -1.2, 3.2)
    torch.testing.assert_close(values, returns, rtol=0, atol=0.01 * 4.4 / 51)


def test_a_head_of_zeros_gives_the_centre_of_the_range():
    w = worker(**VARIANTS["hl_gauss"], value_head_init="zero")
    batch = random_batch(6, vocab_size=60)
    values = w.compute_values(batch)
    torch.testing.assert_close(values[batch.response_mask], torch.full((int(batch.response_mask.sum()),), 0.25))
    assert (values[~batch.response_mask] == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# Every layout makes the gradient of a plain loop
# ---------------------------------------------------------------------------------------------------------------------


def reference(folder, weights, values, variant):
    """(values, loss, gradients) of one sequence after another in float64, adapters merged by hand. values: old ones."""
    model = transformers.AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    leaves = {n: w.double().requires_grad_() for n, w in weights.items()}
    merged = {n: w for n, w in leaves.items() if ".lora_" not in n and ".base_layer." not in n}
    for n, w in leaves.items():
        if ".base_layer." in n:
            layer = n.partition(".base_layer")[0]
            delta = 2.0 * leaves[f"{layer}.lora_B.default.weight"] @ leaves[f"{layer}.lora_A.default.weight"]
            merged[n.replace(".base_layer", "")] = w + delta if n.endswith("weight") else w
    batch, ours, losses = random_batch(12, seed=1), torch.zeros(len(values)), []
    low, high = VARIANTS["hl_gauss"]["value_range"]
    for start, end in rows_of(batch):
        inputs = {"input_ids": batch.input_ids[start:end][None]}
        logits = torch.func.functional_call(model, merged, kwargs=inputs).logits[0]
        for t in range(start, end):
            if not batch.response_mask[t]:
                continue
            before, target = logits[t - start - 1], batch.returns[t].double()
            if variant == "hl_gauss":
                ours[t] = plain_value(before, low, high).detach()
                losses.append(plain_cross_entropy(before, target, low, high))
            else:
                ours[t] = before[0].detach()
                old = values[t].double()
                clipped = torch.minimum(torch.maximum(before[0], old - 0.5), old + 0.5)
                losses.append(0.5 * torch.maximum((before[0] - target) ** 2, (clipped - target) ** 2))
    loss = torch.stack(losses).mean()
    loss.backward()
    return ours, float(loss.detach()), {n: x.grad for n, x in leaves.items()}


def trains(name, variant):
    """Whether a weight should."""
    if variant == "lora":
        return ".lora_" in name or name.startswith("score.")
    return variant == "hl_gauss" or not name.startswith(("model.embed_tokens.", "model.layers.0."))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model and, of every variant, a checkpoint of one rank after a first step: B is no longer zero."""
    folder = tmp_path_factory.mktemp("trained")
    save_model(MODELS["qwen2"], folder / "model")
    for variant, fields in VARIANTS.items():
        w, _ = one_gradient(folder / "model", **fields)
        w.save_checkpoint(folder / variant)
    return folder


def compare(result, expected, variant):
    """Asserts that a result is the reference and moved nothing but what trains -> largest relative difference."""
    values, loss, gradients = expected
    assert set(result["gradients"]) == {n for n in gradients if trains(n, variant)}
    torch.testing.assert_close(result["values"], values, rtol=1e-5, atol=1e-5)
    assert result["metrics"]["critic/vf_loss"] == pytest.approx(loss, rel=1e-5)
    assert variant != "hl_gauss" or result["metrics"]["critic/vf_clipfrac"] == 0
    floor, errors = 1e-3 * max(gradients[n].abs().max() for n in result["gradients"]), []
    for n, ours in result["gradients"].items():
        exact = gradients[n]
        errors.append(float((ours - exact).abs().max() / torch.maximum(exact.abs().max(), floor)))
        assert exact.abs().max() > 0, n
    assert max(errors) < 1e-5, (variant, max(errors))
    for n, x in result["after"].items():
        assert torch.equal(x, result["weights"][n]) != trains(n, variant), n
    return max(errors)


@pytest.fixture(scope="module")
def references(trained):
    """Of every variant, from its checkpoint: the weights and what a plain loop makes of them, as fsdp2 does."""
    made = {}
    for variant, fields in VARIANTS.items():
        _, result = one_gradient(trained / "model", trained / variant, **fields)
        expected = reference(trained / "model", result["weights"], result["values"], variant)
        compare(result, expected, variant)
        made[variant] = result, expected
    return made


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("strategy", ["fsdp1", "none"])
def test_one_rank_makes_the_gradient_of_a_plain_loop(strategy, variant, trained, references):
    first, expected = references[variant]
    fields = dict(strategy=strategy, gradient_checkpointing=strategy == "fsdp1", **VARIANTS[variant])
    _, result = one_gradient(trained / "model", trained / variant, **fields)
    assert all(torch.equal(x, first["weights"][n]) for n, x in result["weights"].items())
    compare(result, expected, variant)


def test_two_ranks_make_it_on_every_layout_and_exchange_checkpoints(trained, references, tmp_path):
    out = tmp_path / "out.pt"
    scenario = ROOT / "tests" / "scenarios.py"
    assert "ok" in succeeded(torchrun(2, scenario, "heads_and_adapters", trained / "model", trained, out))
    results = torch.load(out, weights_only=True)
    assert len(results) == 12
    print("\nlargest relative difference of a gradient to float64, 2 ranks")
    for (variant, layout), result in results.items():
        first, expected = references[variant]
        assert all(torch.equal(x, first["weights"][n]) for n, x in result["weights"].items())
        print(f"  {variant:10s}{layout:10s} {compare(result, expected, variant):.1e}")
    for variant, fields in VARIANTS.items():
        _, back = one_gradient(trained / "model", trained / f"{variant} of 2", **fields)
        for n, x in results[variant, "ulysses"]["after"].items():
            assert torch.equal(back["weights"][n], x), (variant, n)


# ---------------------------------------------------------------------------------------------------------------------
# Adapters
# ---------------------------------------------------------------------------------------------------------------------


def test_adapters_begin_as_nothing_and_follow_the_seed():
    batch = random_batch(6, vocab_size=60)
    plain = worker(seed=0).compute_values(batch)
    adapters = {}
    for seed, strategy in ((0, "fsdp2"), (0, "fsdp1"), (1, "none")):
        w = worker(seed=seed, strategy=strategy, lora_rank=4)
        if seed == 0:
            assert torch.equal(w.compute_values(batch), plain)
        adapters[strategy] = {n: x for n, x in full_weights(w.critic).items() if ".lora_" in n}
        assert all((x == 0).all() == (".lora_B." in n) for n, x in adapters[strategy].items())
        assert len(adapters[strategy]) == 2 * 2 * 7  # A and B, layers, matrices of a layer
    for n, x in adapters["fsdp2"].items():
        assert torch.equal(x, adapters["fsdp1"][n])
        assert ".lora_B." in n or not torch.equal(x, adapters["none"][n])


def test_target_modules_choose_and_what_is_not_there_is_named():
    w = worker(lora_rank=2, lora_target_modules=("q_proj", "layers.1.mlp.up_proj"))
    names = {n.partition(".lora_A")[0] for n in full_weights(w.critic) if ".lora_A" in n}
    assert names == {f"model.layers.{x}" for x in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj")}
    with pytest.raises(UserError, match="--lora-target-modules query: is no linear layer .* there are down_proj, "):
        worker(lora_rank=2, lora_target_modules=("q_proj", "query"))
    with pytest.raises(UserError, match="--lora-target-modules embed_tokens: is no linear layer"):
        worker(lora_rank=2, lora_target_modules=("embed_tokens",))


@pytest.mark.parametrize(
    "variant, strategy",
    [
        ("lora", "fsdp2"),
        ("lora", "fsdp1"),
        ("lora", "none"),
        ("freeze", "fsdp1"),
        ("freeze", "none"),
        ("hl_gauss", "none"),
    ],
)
def test_resume_equals_going_on_bit_for_bit(variant, strategy, tmp_path, capsys):
    fields = dict(strategy=strategy, ppo_mini_batch_size=6, **VARIANTS[variant])
    w, again = worker(**fields), worker(**fields)
    batches = [random_batch(12, seed, vocab_size=60) for seed in range(2)]
    w.update_critic(batches[0])
    w.save_checkpoint(tmp_path / "c")
    again.load_checkpoint(tmp_path / "c")
    ours, theirs = (x.update_critic(batches[1]) for x in (w, again))
    assert all(ours[k] == theirs[k] for k in ours if k.startswith("critic/"))
    weights = full_weights(again.critic)
    assert all(torch.equal(x, weights[n]) for n, x in full_weights(w.critic).items())
    tensors, _, _ = critic_fsdp.checkpoint_tensors(w.critic.model, w.critic.optimizer)
    moments = {n.removeprefix("optimizer.").rpartition(".")[0] for n in tensors if n.startswith("optimizer.")}
    assert moments == {n for n in weights if trains(n, variant)}
    shown = capsys.readouterr().out
    assert (" of them train: " in shown) == (variant != "hl_gauss")
    if strategy == "none":
        change = {"lora": {"lora_alpha": 7.0}, "hl_gauss": {"value_range": (0.0, 1.0)}, "freeze": {"lora_rank": 2}}
        with pytest.raises(UserError, match=f"is of another model: {next(iter(change[variant]))} .* there, .* here"):
            plain = {} if variant == "freeze" else VARIANTS[variant]
            worker(**{**plain, **change[variant]}).load_checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    "variant, strategy",
    [("lora", "fsdp2"), ("lora", "fsdp1"), ("lora", "none"), ("freeze", "fsdp1"), ("hl_gauss", "fsdp2")],
)
def test_bfloat16_trains_and_counts_its_flops(variant, strategy, monkeypatch):
    """Adapters and frozen layers spare the backward pass what MFU must not count: 2 passes of 3 are left here."""
    w = worker(strategy=strategy, param_dtype="bfloat16", gradient_checkpointing=True, **VARIANTS[variant])
    batch = random_batch(12, vocab_size=60)
    monkeypatch.setattr(common, "device_peak_flops", lambda device: 1e12)
    with captured_gradients(w.critic) as seen:
        metrics = w.update_critic(batch)
    forward = sum(w.critic.flops.forward_flops(n) for n in batch.lengths)
    passes = metrics["perf/mfu"] * metrics["perf/time_update"] * 1e12 / forward
    assert passes == pytest.approx(3 if variant == "hl_gauss" else 2, rel=1e-3)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in seen[0].values())
    exact = worker(**VARIANTS[variant])
    with captured_gradients(exact.critic) as whole:
        exact.update_critic(batch)
    close = torch.cat([g.flatten() for g in seen[0].values()])
    true = torch.cat([whole[0][n].flatten() for n in seen[0]])
    assert float((close - true).norm() / true.norm()) < 0.05


# ---------------------------------------------------------------------------------------------------------------------
# Exports
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, strategy", [("qwen2", "fsdp1"), ("gpt2", "fsdp1"), ("qwen3-moe", "none"), ("opt", "fsdp2")]
)
def test_an_export_holds_merged_adapters(kind, strategy, tmp_path):
    """GPT-2 keeps its matrices transposed, OPT has no token-classification class."""
    model = f"tiny-{kind}"
    if kind == "opt":
        config = transformers.OPTConfig(
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=64,
            word_embed_proj_dim=32,
        )
        transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "base")
        model = str(tmp_path / "base")
    w, batch = worker(model=model, strategy=strategy, lora_rank=4, lr=0.02), random_batch(8, vocab_size=60)
    before = w.compute_values(batch)
    w.update_critic(batch)
    values = w.compute_values(batch)
    assert (values - before).abs().max() > 1e-2
    w.export_hf(tmp_path / "hf")
    again = worker(model=str(tmp_path / "hf"), value_head_init="checkpoint")
    torch.testing.assert_close(again.compute_values(batch), values, rtol=0, atol=1e-5)
    if kind == "opt":
        return
    plain, info = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(info.values()), info
    theirs = torch.cat([plain(input_ids=ids[None]).logits[0, :, 0] for ids in batch.input_ids.split(batch.lengths)])
    theirs = common.values_of_actions(theirs.detach(), batch.response_mask)
    torch.testing.assert_close(theirs, values, rtol=0, atol=1e-5)


def test_an_export_of_a_categorical_head_keeps_its_range(tmp_path):
    w, batch = worker(**VARIANTS["hl_gauss"], lr=0.02), random_batch(8, vocab_size=60)
    w.update_critic(batch)
    values = w.compute_values(batch)
    w.export_hf(tmp_path / "hf")
    kept = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert kept["value_head"] == "hl_gauss" and kept["value_range"] == [-1.5, 2.0]
    plain = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "hf")
    assert plain.num_labels == 11
    for (start, end), ids in zip(rows_of(batch), batch.input_ids.split(batch.lengths), strict=True):
        logits = plain(input_ids=ids[None]).logits[0].detach()
        for t in range(start, end):
            expected = plain_value(logits[t - start - 1], -1.5, 2.0) if batch.response_mask[t] else 0.0
            assert float(values[t]) == pytest.approx(float(expected), abs=1e-5)
    folder = {"model": str(tmp_path / "hf"), "value_head_init": "checkpoint"}
    again = worker(**folder, value_head="hl_gauss", value_bins=11)  # the range is the folder's
    torch.testing.assert_close(again.compute_values(batch), values, rtol=0, atol=1e-6)
    for change, words in (
        ({"value_head": "hl_gauss", "value_bins": 11, "value_range": (0.0, 1.0)}, "over (0.0, 1.0)"),
        ({"value_head": "hl_gauss"}, "not (51, 64) over (-1.5, 2.0)"),
        ({}, "not (1, 64)"),
    ):
        with pytest.raises(UserError, match="--value-head-init checkpoint: .* holds no value head") as error:
            worker(**folder, **change)
        assert words in str(error.value) and "is (11, 64) over (-1.5, 2.0)" in str(error.value)
    again.export_hf(tmp_path / "hf2")
    scalar = worker(model=str(tmp_path / "hf2"))  # a new head
    scalar.export_hf(tmp_path / "scalar")
    kept = json.loads((tmp_path / "scalar" / "config.json").read_text())
    assert kept["value_head"] == "scalar" and kept.get("value_range") is None
    with pytest.raises(UserError, match="--value-head-init checkpoint"):  # a scalar head is no categorical one
        worker(
            model=str(tmp_path / "scalar"), value_head_init="checkpoint", value_head="hl_gauss", value_range=(0.0, 1.0)
        )


# ---------------------------------------------------------------------------------------------------------------------
# The script
# ---------------------------------------------------------------------------------------------------------------------


def test_the_script_finds_the_range_and_a_resumed_run_keeps_it(tmp_path, capsys):
    rows = [json.loads(line) for line in common.toy_rows(64, 0)]
    path, wider = tmp_path / "rows.jsonl", tmp_path / "wider.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    wider.write_text("\n".join(json.dumps({**row, "reward": 5 * row["reward"]}) for row in rows))
    critic = Config(value_head="hl_gauss", value_bins=12, lora_rank=2, ppo_mini_batch_size=32)
    run = Run(critic=critic, rollouts=str(path), steps=2, out_dir=str(tmp_path / "out"))
    critic_fsdp.main(run)
    assert "value head 12 bins x 0.1 = [-0.1, 1.1]" in capsys.readouterr().out
    checkpoint, run = str(tmp_path / "out" / "checkpoints" / "step_2"), dataclasses.replace(run, report="none")
    critic_fsdp.main(dataclasses.replace(run, rollouts=str(wider), resume=checkpoint, steps=3))
    assert "value head 12 bins x 0.1 = [-0.1, 1.1]" in capsys.readouterr().out
    other = dataclasses.replace(critic, value_range=(0.0, 5.0))
    with pytest.raises(UserError, match=r"value_range \[-0.1.* there, \[0.0, 5.0\] here"):
        critic_fsdp.main(dataclasses.replace(run, critic=other, resume=checkpoint, steps=3))
    exported = dataclasses.replace(critic, model=str(tmp_path / "out" / "hf"), tokenizer=str(tmp_path / "out" / "hf"))
    critic_fsdp.main(dataclasses.replace(run, critic=exported, rollouts=str(wider), out_dir=str(tmp_path / "more")))
    shown = capsys.readouterr().out
    assert "value head 12 bins x 0.1 = [-0.1, 1.1]" in shown and "value head from its score.weight" in shown


@pytest.mark.parametrize(
    "message, fields",
    [
        ("--value-head gauss: must be one of scalar, hl_gauss", {"value_head": "gauss"}),
        ("--value-bins 1: must be at least 2", {"value_bins": 1}),
        ("--value-range (1.0, 0.0): must be LOW below HIGH", {"value_head": "hl_gauss", "value_range": (1.0, 0.0)}),
        ("--value-range (0.0, inf): must be LOW below", {"value_head": "hl_gauss", "value_range": (0.0, math.inf)}),
        ("--value-range (0.0, 1.0): a scalar has none", {"value_range": (0.0, 1.0)}),
        ("--lora-rank -1: must not be below 0", {"lora_rank": -1}),
        ("--lora-alpha 0: must be above 0", {"lora_alpha": 0}),
        ("--lora-target-modules (): must name at least one", {"lora_target_modules": ()}),
        ("--freeze-layers 1: --lora-rank freezes all", {"lora_rank": 2, "freeze_layers": 1}),
        ("--freeze-layers -1: must not", {"freeze_layers": -1}),
        ("--freeze-layers 3: the model has 2 layers", {"freeze_layers": 3}),
        ("--value-range: hl_gauss needs it", {"value_head": "hl_gauss"}),
    ],
)
def test_impossible_flags_are_named(message, fields):
    with pytest.raises(UserError) as error:
        CriticWorker(Config(**fields))
    assert message in str(error.value)


def test_peft_is_asked_for_only_where_it_is_needed(monkeypatch):
    monkeypatch.setattr(critic_fsdp.importlib.util, "find_spec", lambda name: None)
    critic_fsdp.validate(Config())
    with pytest.raises(UserError, match="--lora-rank 8: peft is not installed; pip install peft"):
        critic_fsdp.validate(Config(lora_rank=8))
