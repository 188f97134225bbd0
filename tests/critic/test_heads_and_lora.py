"""Bounded heads, adapters, frozen weights and weighted losses: maths, layouts, checkpoints and
exports. test_forks.py has other heads and losses."""

import dataclasses
import functools
import itertools
import json

import pytest
import torch
import transformers
from forked import scenario
from helpers import (
    BINS,
    LAYOUTS,
    ROOT,
    VARIANTS,
    actions_of,
    assert_old_values_come_along,
    assert_same_weights,
    captured_gradients,
    full_weights,
    mine,
    names_with_moments,
    one_update,
    ran,
    random_batch,
    refused,
    succeeded,
    torchrun,
    worker,
)
from reference import (
    LOAD,
    MODELS,
    assert_agrees,
    check_export,
    clipped_loss,
    plain_loop,
    save_model,
    values_by_hand,
)
from safetensors.torch import load_file

import common
import critic_fsdp
from common import RANK, WORLD_SIZE, UserError
from critic_fsdp import Config, Run

LORA = {"lora_rank": 4}
HL_GAUSS = {**BINS, "value_range": (-1.5, 2.0)}


def one_gradient(model, start=None, **fields):
    """(worker, weights, values, metrics and gradient of one mini-batch). start: a checkpoint to
    load."""
    options = {"ppo_mini_batch_size": 256, "lr": 0.01, "ppo_max_token_len_per_gpu": 60}
    w = worker(model=str(model), **{**options, **fields})
    if start:
        w.load_checkpoint(start)

    weights = full_weights(w.critic)
    batch = mine(random_batch(12, seed=1))
    batch.values = w.compute_values(batch)
    result = one_update(w, batch)
    return w, {**result, "weights": weights, "after": full_weights(w.critic)}


@scenario(ranks=(1, 2), needs=("heads_and_adapters on 1",))
def heads_and_adapters(folder):
    """One rank saves a checkpoint of each variant after a first step, so that the adapters' B is no
    longer zero. From there, every variant makes an update on every layout of these ranks."""
    if WORLD_SIZE == 1:
        save_model(MODELS["qwen2"], folder / "model")
        for variant, fields in VARIANTS.items():
            first, _ = one_gradient(folder / "model", **fields)
            first.save_checkpoint(folder / variant)

    results = {}
    for variant, (layout, more) in itertools.product(VARIANTS, LAYOUTS.items()):
        if more.get("ulysses_size", 1) <= WORLD_SIZE:
            recompute = layout in ("fsdp1", "ulysses")
            fields = {**VARIANTS[variant], "gradient_checkpointing": recompute, **more}
            w, result = one_gradient(folder / "model", folder / variant, **fields)
            result["moments"] = sorted(names_with_moments(w.critic))
            results[variant, layout] = result
            if layout == "ulysses":
                w.save_checkpoint(folder / f"{variant} of 2")
            w.critic.peak_lr = 0.0
            assert_old_values_come_along(w, mine(random_batch(12, seed=1)))
    if RANK == 0:
        torch.save(results, folder / f"{WORLD_SIZE}.pt")


def left(ranks):
    """(folder, results of heads_and_adapters on these ranks)."""
    folder = ran(heads_and_adapters, ranks)
    return folder, torch.load(folder / f"{ranks}.pt", weights_only=True)


def reference(folder, result, variant):
    """(values, loss, gradients) in float64, from a result's weights (adapters merged) and old
    values."""
    model = LOAD(folder, dtype=torch.float64, attn_implementation="eager")
    leaves = {name: w.double().requires_grad_() for name, w in result["weights"].items()}
    merged = {}

    for name, w in leaves.items():
        if ".lora_" in name:
            continue
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            a, b = (leaves[f"{layer}.lora_{x}.default.weight"] for x in "AB")
            w = w + 2.0 * b @ a
        merged[name.replace(".base_layer", "")] = w

    call = functools.partial(torch.func.functional_call, model, merged, ())
    outputs_of = lambda _, ids: call({"input_ids": ids}).logits[0]
    batch = dataclasses.replace(random_batch(12, seed=1), values=result["values"])
    value_of = values_by_hand(variant, (-1.5, 2.0))
    loss_of = lambda output, old, target: clipped_loss(value_of(output), old, target)
    values, losses = plain_loop(batch, outputs_of, value_of, loss_of)
    if variant == "noise":  # (1 - p)^2 of each action
        weights_T = (1 - batch.rollout_log_probs.double().exp()) ** 2
        places = [of_row for of_row in actions_of(batch) if of_row]
        losses = [x * weights_T[of_row] for x, of_row in zip(losses, places, strict=True)]
    loss = torch.cat(losses).mean()
    loss.backward()
    return values, float(loss.detach()), {name: x.grad for name, x in leaves.items()}


def trains(name, variant):
    if variant == "lora":
        return ".lora_" in name or name.startswith("score.")
    layer = "model.layers.0"
    frozen = ("model.embed_tokens.", f"{layer}.self_attn.", f"{layer}.mlp.up_proj.")
    return variant != "freeze" or not name.startswith(frozen)


def compare(result, expected, variant):
    """The result equals the reference and changed only what trains -> largest difference."""
    weights, (values, loss, gradients) = expected
    assert all(torch.equal(x, weights[name]) for name, x in result["weights"].items())
    gradients = {name: g for name, g in gradients.items() if trains(name, variant)}
    assert all(g.abs().max() > 0 for g in gradients.values())
    error = assert_agrees(variant, result, values, loss, gradients)
    for name, x in result["after"].items():
        assert torch.equal(x, result["weights"][name]) != trains(name, variant), name
    return error


@functools.cache
def expected_of(variant):
    """(weights, result of a plain loop)."""
    folder, results = left(1)
    result = results[variant, "fsdp2"]
    return result["weights"], reference(folder / "model", result, variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_layout_makes_the_gradient_of_a_plain_loop(ranks, variant):
    _, results = left(ranks)
    of_variant = {layout: x for (name, layout), x in results.items() if name == variant}
    assert len(of_variant) == 2 + ranks
    print(f"\n{variant}: largest relative difference of a gradient to float64, {ranks} ranks")
    for layout, result in of_variant.items():
        print(f"  {layout:10s} {compare(result, expected_of(variant), variant):.1e}")
        trained = {name for name in result["weights"] if trains(name, variant)}
        assert ranks > 1 or {*result["moments"]} == trained


# for each variant, a field that makes it another model
ANOTHER = {
    "lora": {"lora_alpha": 7.0},
    "freeze": {"freeze_modules": "norm"},
    "bounded": {"value_range": (0.0, 1.0)},
    "noise": {"freeze_modules": "up"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_loads_a_checkpoint_of_two_unless_it_is_of_another_model(variant):
    folder, results = left(2)
    fields = {"model": str(folder / "model"), **VARIANTS[variant]}
    back = worker(**fields)
    back.load_checkpoint(folder / f"{variant} of 2")
    assert_same_weights(back, results[variant, "ulysses"]["after"])

    other = worker(**fields | ANOTHER[variant])
    [name] = ANOTHER[variant]
    with pytest.raises(UserError, match=f"another model: {name} .* there, .* here"):
        other.load_checkpoint(folder / f"{variant} of 2")


def test_adapters_begin_at_zero_and_depend_on_the_seed():
    batch = random_batch(6, vocab_size=60)
    plain = worker(seed=0).compute_values(batch)
    adapters = {}
    for seed, strategy in ((0, "fsdp2"), (0, "fsdp1"), (1, "none")):
        w = worker(seed=seed, strategy=strategy, lora_rank=4)
        assert torch.equal(w.compute_values(batch), plain) == (seed == 0)
        adapters[strategy] = {n: x for n, x in full_weights(w.critic).items() if ".lora_" in n}
        assert all((x == 0).all() == (".lora_B." in name) for name, x in adapters[strategy].items())
        assert len(adapters[strategy]) == 2 * 2 * 7  # A and B x 2 layers x 7 matrices
    for name, x in adapters["fsdp2"].items():
        assert torch.equal(x, adapters["fsdp1"][name])
        assert ".lora_B." in name or not torch.equal(x, adapters["none"][name])


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_each_linear_layer_of_a_mixture_has_an_adapter_and_joint_experts_have_none(strategy):
    few = json.dumps({"mlp_only_layers": [0]})
    w = worker(model="tiny-qwen3-moe", override_config=few, strategy=strategy, lora_rank=4)
    names = {name.rpartition(".lora_A")[0] for name in full_weights(w.critic) if ".lora_A" in name}
    expected = [f"layers.{i}.self_attn.{x}_proj" for i in range(2) for x in "qkvo"]
    expected += [f"layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")]
    assert names == {f"model.{x}" for x in expected}


@pytest.mark.parametrize("variant", ["lora", "freeze"])
@pytest.mark.parametrize("strategy", ["fsdp2", "none"])
def test_frozen_weights_are_held_in_the_dtype_of_products(variant, strategy, tmp_path, monkeypatch):
    """They take half the memory and never change, and updates and values are the same bits as with
    float32 ones, which FSDP2 would cast for each forward."""
    fields = {**VARIANTS[variant], "strategy": strategy, "param_dtype": "bfloat16"}
    w = worker(**fields)
    monkeypatch.setattr(common, "hold_frozen", lambda *_: None)
    wide = worker(**fields)
    dtypes = {(p.requires_grad, p.dtype) for p in w.critic.model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    before = full_weights(w.critic)

    batch = random_batch(12, vocab_size=60)
    for one in (w, wide):
        one.updates = [one.update_critic(batch)["critic/vf_loss"] for _ in range(2)]
        one.values_T = one.compute_values(batch)
    assert w.updates == wide.updates and torch.equal(w.values_T, wide.values_T)
    after = full_weights(w.critic)
    for name, x in after.items():
        assert torch.equal(x, before[name]) == (not trains(name, variant)), name

    # an export is float32 whatever is held
    w.export_hf(tmp_path / "hf")
    stored = load_file(tmp_path / "hf/model.safetensors").values()
    assert {x.dtype for x in stored} == {torch.float32}


@pytest.mark.parametrize("variant, strategy", [
    *itertools.product(("lora", "freeze"), ("fsdp1", "none")), ("lora", "fsdp2"),
    ("bounded", "none"),
])  # fmt: skip
def test_bfloat16_trains_and_counts_its_flops(variant, strategy, monkeypatch):
    """Gradients are close to those in float32. MFU does not count gradients of frozen weights."""
    # the MFU of a CPU is unknown, so this looks at the FLOPs
    count = lambda batch, rows, start, epochs, flops, layout: {"flops": flops}
    monkeypatch.setattr(common, "describe_update", count)
    fields = {**VARIANTS[variant], "gradient_checkpointing": True}
    w = worker(strategy=strategy, param_dtype="bfloat16", **fields)
    exact = worker(**VARIANTS[variant])
    batch = random_batch(12, vocab_size=60)
    with captured_gradients(w.critic) as seen:
        metrics = w.update_critic(batch)
    passes = metrics["flops"] / sum(map(w.critic.flops, batch.lengths))
    sizes = {name: x.numel() for name, x in full_weights(w.critic).items()}
    trained = sum(n for name, n in sizes.items() if trains(name, variant))

    assert passes == pytest.approx(2 + trained / sum(sizes.values()), rel=1e-6)
    with captured_gradients(exact.critic) as whole:
        exact.update_critic(batch)
    assert all(g.dtype == torch.float32 for g in seen[0].values())
    assert seen[0].keys() == whole[0].keys()
    close, true = (torch.cat([g[name].flatten() for name in seen[0]]) for g in (seen[0], whole[0]))
    assert float((close - true).norm() / true.norm()) < 0.05


@pytest.mark.parametrize("model, fields", [
    ("tiny-qwen2", {}), ("tiny-qwen2", {"strategy": "fsdp1", **LORA}),
    ("tiny-qwen2", {**LORA, **HL_GAUSS}),
    ("tiny-qwen2", VARIANTS["bounded"]),
    ("tiny-gpt2", {}), ("tiny-gpt2", {"strategy": "fsdp1", **LORA}),
    ("tiny-qwen3-moe", {}), ("tiny-qwen3-moe", {"strategy": "none", **LORA}),
    ("gemma3", {}), ("opt", LORA),
])  # fmt: skip
def test_an_export_replaces_an_older_one_and_gives_the_same_values(model, fields, tmp_path):
    """Both this script and plain transformers compute them from a trained critic's folder. GPT-2
    stores its matrices transposed; Gemma 3 and OPT have no token-classification class."""
    hf, batch = tmp_path / "hf", random_batch(8, vocab_size=60)
    if model in MODELS:
        transformers.AutoModel.from_config(MODELS[model]).save_pretrained(tmp_path / "base")
    w = worker(model=str(tmp_path / "base") if model in MODELS else model, lr=0.02, **fields)
    w.export_hf(hf)
    (hf / "stale").write_text("")
    before = w.compute_values(batch)
    w.update_critic(batch)
    values = w.compute_values(batch)

    assert (values - before).abs().max() > 1e-2
    w.export_hf(hf)
    assert {p.name for p in tmp_path.iterdir()} <= {"base", "hf"} and not (hf / "stale").exists()
    head = {name: x for name, x in fields.items() if name in ("fork", "value_head")}
    again = worker(model=str(hf), value_head_init="checkpoint", **head)
    torch.testing.assert_close(again.compute_values(batch), values, rtol=0, atol=1e-5)
    if model in MODELS:
        assert (hf / "value_head.safetensors").exists()
        return

    assert again.tokenizer("1+1=")["input_ids"] == w.tokenizer("1+1=")["input_ids"]
    kind = fields.get("fork") or fields.get("value_head")
    check_export(hf, batch, values, kind, fields.get("value_range"))


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "none"])
def test_a_frozen_head_computes_as_one_that_trains(strategy):
    """In float32, also where the model's products are in bfloat16."""
    batch = random_batch(8, vocab_size=60, idle=False)
    fields = {"strategy": strategy, "param_dtype": "bfloat16", "value_head_init": "normal"}
    both = [worker(freeze_modules=frozen, **fields) for frozen in (None, "score")]
    values = [w.compute_values(batch) for w in both]
    assert torch.equal(*values) and values[0].abs().max() > 0.01


@pytest.mark.parametrize("ranks, command", [
    (2, "critic_fsdp.py --strategy fsdp1 --value-head bounded --value-range -1 3"),
    (2, "critic_fsdp.py --ulysses-size 2 --offload-policy --value-head-init mean"),
    (2, "critic_megatron.py --pipeline-model-parallel-size 2 --value-head bounded"
        " --value-range 0.7 1.1"),
])  # fmt: skip
def test_values_start_at_the_mean_return(ranks, command, tmp_path):
    """By default, too. Against two places of the mean, discounted by hand; a range that ends
    above it gives 0.704. The second update starts where the first has ended, also in a resumed
    run."""
    script, *flags = command.split()
    flags += "--gamma 0.9 --ppo-mini-batch-size 1024 --lr 1e-4 --save-every 1".split()
    flags += ["--rollouts", ROOT / "tests/rows.jsonl", "--out-dir", tmp_path, "--resume", "auto"]
    for steps in (1, 2) if "fsdp1" in flags else (2,):
        succeeded(torchrun(ranks, ROOT / script, *flags, "--steps", steps))
    rows = common.read_lines(ROOT / "tests/rows.jsonl")
    returns = [row["reward"] * 0.9**i for row in rows for i in range(len(row["response"]) + 1)]
    expected = float(f"{sum(returns) / len(returns):.2g}")
    expected = max(expected, 0.704 if "0.7" in flags else -1)
    first, second = common.read_lines(tmp_path / "metrics.jsonl")
    for x in ("min", "max"):
        assert first[f"critic/values_{x}"] == pytest.approx(expected, abs=1e-5)
        assert second[f"critic/values_{x}"] == pytest.approx(expected, abs=0.02)
    assert second["critic/values_max"] - second["critic/values_min"] > 1e-7


def test_the_script_finds_the_range_and_keeps_it(tmp_path):
    """It is the range of the returns, 0 to 1, plus a tenth on either side."""
    path, wider, out = (tmp_path / name for name in ("rows.jsonl", "wider.jsonl", "out"))
    lines = "\n".join(common.toy_rows(64, 0))
    path.write_text(lines)
    wider.write_text(lines.replace('"reward": 1.0', '"reward": 5.0'))
    critic = Config(value_head="bounded", lora_rank=2, ppo_mini_batch_size=32)
    run = Run(critic=critic, rollouts=str(path), steps=2, out_dir=str(out))
    critic_fsdp.main(run)
    span = lambda folder: json.loads((folder / "hf" / "config.json").read_text())["value_range"]

    assert span(out) == pytest.approx([-0.1, 1.1])
    with pytest.raises(UserError, match=r"value_range \[-0.1.* there, \[-0.5.* here"):
        critic_fsdp.main(dataclasses.replace(run, rollouts=str(wider), resume="auto", steps=3))
    exported = dataclasses.replace(critic, model=str(out / "hf"), value_head_init="checkpoint")
    options = {"critic": exported, "rollouts": str(wider), "out_dir": str(tmp_path / "more")}
    critic_fsdp.main(dataclasses.replace(run, **options))

    assert span(tmp_path / "more") == span(out)  # not the range of the wider rows
    for change in ({"value_range": (0.0, 1.0)}, {"value_head": "scalar"}):
        for start in ("auto", "checkpoint"):
            fix = "give --value-head bounded --value-range -0.1 1.1, or --value-head-init normal"
            with pytest.raises(UserError, match=f"--value-head: .*/hf has another; {fix}"):
                worker(**vars(exported) | change | {"value_head_init": start})

    w = worker(model=exported.model, value_head_init="normal")
    w.export_hf(tmp_path / "scalar" / "hf")  # with a new head
    assert span(tmp_path / "scalar") is None


def test_flags_that_do_not_fit_this_model_are_named():
    for pattern, words in {"(": "missing )", "nothing": "must match some", ".": "some"}.items():
        with refused(words, begin="--freeze-modules "):
            worker(freeze_modules=pattern)
    with refused("--value-range: this head needs it"):
        worker(value_head="bounded")
