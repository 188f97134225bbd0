"""critic_fsdp.py on one process: verl's recorded run, checkpoints, packing, precision, schedule,
memory."""

import contextlib
import gc
import itertools
import json
import math
import re
import threading

import helpers
import pytest
import torch
import transformers
from helpers import (
    STRATEGIES,
    VARIANTS,
    assert_same_weights,
    batch_for,
    full_weights,
    of_critic,
    random_batch,
    refused,
    worker,
)
from safetensors.torch import load_file, save_file

import common
import critic_fsdp
from common import UserError


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("packed", [True, False])
def test_three_steps_equal_verl(strategy, packed, tmp_path):
    """Values, gradients before clipping, metrics, weights and Adam's moments of verl 0.6.1 in
    float32."""
    case = helpers.verl()["steps"]
    columns = dict(case["batch"])
    returns = columns.pop("returns")
    model = transformers.Qwen2ForTokenClassification(transformers.Qwen2Config(**case["model"]))
    model.load_state_dict(case["before"])
    model.save_pretrained(tmp_path)
    batch = common.from_padded(**columns, rewards=returns)
    batch.returns = batch.token_level_rewards
    fields = {"model": str(tmp_path), "shuffle": False, **case["critic"]}
    w = worker(strategy=strategy, use_remove_padding=packed, **fields)
    torch.testing.assert_close(w.compute_values(batch), batch.values, rtol=1e-5, atol=2e-6)

    for step, mini in enumerate(batch.split(4)):
        with helpers.captured_gradients(w.critic) as seen:
            metrics = w.update_critic(mini)
        for key, numbers in case["metrics"].items():
            assert metrics[key] == pytest.approx(numbers[step], rel=1e-5, abs=1e-6), (step, key)
        for name, gradient in case["gradients"][str(step)].items():
            atol = 1e-5 * float(gradient.abs().max())
            torch.testing.assert_close(seen[0][name], gradient, rtol=1e-5, atol=atol)

    torch.testing.assert_close(full_weights(w.critic), case["after"], rtol=1e-5, atol=1e-6)
    tensors, _, _ = critic_fsdp.checkpoint_tensors(w.critic.model, w.critic.optimizer)
    for name, key in itertools.product(case["after"], ("exp_avg", "exp_avg_sq")):
        expected = case[key][name]
        ours = helpers.full_tensor(tensors[f"optimizer.{name}.{key}"])
        atol = 1e-6 * float(expected.abs().max())
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=atol, msg=name)


# ---- Models of users, packing --------------------------------------------------------------------


def save_language_model(folder):
    """Saves a tied one in bfloat16 -> its backbone. test_model_folders.py has other kinds."""
    torch.manual_seed(7)
    config = transformers.Qwen2Config(**common.tiny_config("tiny-qwen2", 60))
    config.tie_word_embeddings = True
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(folder)
    return model.model


def change_weights(folder, change):
    """Stores what a function makes of the weights of a folder."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


@pytest.mark.parametrize("story", [
    "new, normal(0, 0.124), then at the mean", "from its v_head.summary.weight",
])  # fmt: skip
def test_weights_are_float32_and_a_head_is_new_unless_there_is_one(story, tmp_path, capsys):
    """TRL's is a linear layer named summary next to the model; its shape does not matter."""
    backbone = save_language_model(tmp_path)
    head = {"weight": torch.randn(8, 8), "bias": torch.randn(1)}
    stored = {f"v_head.summary.{name}": x for name, x in head.items() if "v_head" in story}
    change_weights(tmp_path, lambda weights: weights | stored)

    w = worker(model=str(tmp_path))
    assert f"; value head {story}\n" in capsys.readouterr().out
    weights = full_weights(w.critic)
    for name, expected in backbone.state_dict().items():
        ours = weights.pop(f"model.{name}")
        assert ours.dtype == torch.float32 and torch.equal(ours, expected.float()), name
    assert set(weights) == {"score.weight", "score.bias"}
    if stored:
        assert torch.equal(weights["score.weight"], head["weight"].view(1, 64))
        assert torch.equal(weights["score.bias"], head["bias"])
    else:
        assert weights["score.weight"].std() == pytest.approx(1 / math.sqrt(65), rel=0.3)
        assert weights["score.bias"] == 0


def test_seeds_learning_rates_value_heads_and_overrides(tmp_path):
    save_language_model(tmp_path)
    zero = worker(model=str(tmp_path), value_head_init="zero")
    assert not any(x.any() for n, x in full_weights(zero.critic).items() if n.startswith("score."))
    assert zero.critic.peak_lr == 1e-5
    assert worker().critic.peak_lr == 1e-3 and worker(lr=0.1).critic.peak_lr == 0.1

    drawn = {"score.weight": {"model": str(tmp_path), "value_head_init": "normal"}}
    for name, fields in (drawn | {"model.layers.0.mlp.up_proj.weight": {}}).items():
        one, same, other = (full_weights(worker(**fields, seed=s).critic)[name] for s in (0, 0, 1))
        assert torch.equal(one, same) and not torch.equal(one, other), name

    w = worker(override_config='{"num_hidden_layers": 3, "hidden_size": 32}')
    assert len(w.critic.model.model.layers) == 3 and w.critic.model.score.in_features == 32

    for key, value in {"model_type": "llama", "hidden_size": "wide"}.items():
        with pytest.raises(UserError, match=f"--override-config.*{key}"):
            worker(override_config=json.dumps({key: value}))


def test_weights_that_are_not_finite_are_named(tmp_path):
    save_language_model(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(tmp_path, lambda weights: weights | {name: weights[name] * math.nan})
    with refused("Qwen2Model has hidden states that are not finite", f"--model {tmp_path}: "):
        worker(model=str(tmp_path))


SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 1}
OPT = {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}
MIXTRAL = {**GROUPED, "num_local_experts": 4}


@pytest.mark.parametrize("config", [
    transformers.GPT2Config(**SMALL, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
    transformers.OPTConfig(**OPT, dropout=0.5, attention_dropout=0.5, layerdrop=0.5),
    transformers.MixtralConfig(**MIXTRAL, attention_dropout=0.5, router_jitter_noise=0.5),
], ids=lambda config: config.model_type)  # fmt: skip
@pytest.mark.parametrize("packed", [True, False])
def test_dropout_is_off_everywhere(config, packed, tmp_path):
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    w = worker(model=str(tmp_path), use_remove_padding=packed)
    micro = w.critic.micro_batch(batch_for(w, 6))
    w.critic.model.eval()
    quiet = w.critic.forward(micro)
    common.train_quietly(w.critic.model)
    for _ in range(3):
        torch.testing.assert_close(w.critic.forward(micro), quiet, rtol=1e-5, atol=1e-6)


def test_no_decoder_of_transformers_has_a_hidden_dropout():
    """All dropouts come from floats in the config that disable_dropout finds, whatever their
    values. Models are on meta, and have all dropouts on before."""
    models = []
    for kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        # some cannot be built from their defaults
        with contextlib.suppress(Exception), torch.device("meta"):
            config = kind()
            for part in (config, *vars(config).values()):
                if isinstance(part, transformers.PreTrainedConfig):
                    chances = [n for n, x in vars(part).items() if isinstance(x, float) and x < 1]
                    vars(part).update(dict.fromkeys(chances, 0.5))
            config.get_text_config().num_hidden_layers = 2
            common.disable_dropout(config)
            models.append(transformers.AutoModel.from_config(config))
    assert len(models) > 100

    for module in itertools.chain(*(model.modules() for model in models)):
        for name, x in vars(module).items():
            drops = isinstance(x, float) and re.search("^p$|drop", name)
            assert not drops or x <= 0, (type(module).__name__, name, x)


@pytest.mark.parametrize("config", [
    # has recurrent layers that are no modules of their own; the others have their own attention
    transformers.MiniMaxConfig(**GROUPED, num_local_experts=4, head_dim=16),
    transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=2),
    transformers.FalconConfig(**SMALL),
    # long rows are cut into chunks
    transformers.Llama4TextConfig(**GROUPED, intermediate_size_mlp=64),
    # here and below, only the mask has the window
    transformers.PhimoeConfig(**GROUPED, sliding_window=8),
    transformers.Qwen2MoeConfig(**GROUPED, use_sliding_window=True, sliding_window=8),
], ids=lambda config: config.model_type)  # fmt: skip
def test_a_model_that_packing_would_change_is_refused_and_runs_padded(config, tmp_path):
    """When padded, a row among others has the same values as alone."""
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):  # rounding hides small differences
        with refused(" --no-use-remove-padding", begin="--"):
            # 0 would not show a leak
            worker(model=str(tmp_path), value_head_init="zero", param_dtype=dtype)
    w = worker(model=str(tmp_path), use_remove_padding=False)
    batch = batch_for(w, 5)
    values = w.compute_values(batch)
    alone = torch.cat([w.compute_values(row) for row in batch.split(1)])
    torch.testing.assert_close(alone, values, rtol=1e-4, atol=1e-5)


def test_a_model_with_heads_of_several_sizes_learns(tmp_path):
    config = transformers.Gemma4TextConfig(**GROUPED, head_dim=8, global_head_dim=16)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    w = worker(model=str(tmp_path))
    assert w.update_critic(batch_for(w))["critic/skipped_steps"] == 0


def test_a_model_without_attention_or_that_sees_the_future_is_refused(tmp_path):
    transformers.MambaConfig().save_pretrained(tmp_path)
    with refused("has no attention", begin="--model "):
        worker(model=str(tmp_path))
    transformers.AutoModel.from_config(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path)
    with refused("asks for more than causal attention"):
        worker(model=str(tmp_path))
    with refused("BertModel lets tokens see later ones"):
        worker(model=str(tmp_path), use_remove_padding=False)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("forward", [None, 45, 70])
def test_a_row_above_a_token_budget_is_named_and_no_micro_batch_exceeds_it(packed, forward):
    """That of an update, or that of values, which is twice as large by default."""
    budgets = {"ppo_max_token_len_per_gpu": 50, "forward_max_token_len_per_gpu": forward}
    w = worker(**budgets, use_remove_padding=packed, share_prompts=False)
    batch = batch_for(w, 30)
    assert max(batch.lengths) < 45
    sizes = []
    note = lambda model, args, inputs: sizes.append(inputs["input_ids"].numel())
    w.critic.model.register_forward_pre_hook(note, with_kwargs=True)

    for method, most in ((w.compute_values, forward or 100), (w.update_critic, 50)):
        sizes.clear()
        method(batch)
        padding = sum(sizes) - len(batch.input_ids)
        assert 0.7 * most < max(sizes) <= most and (padding == 0 if packed else padding > 0)

    # rows of 51 tokens, and between two budgets
    refusals = {"ppo-max-token-len-per-gpu 50": 51}
    if forward == 45:
        refusals["forward-max-token-len-per-gpu 45"] = 46
    for flag, length in refusals.items():
        for method in (w.compute_values, w.update_critic):
            with refused(f"--{flag}: row -1 has {length} tokens; give {length}"):
                method(common.Batch.blank(length))


def test_a_worker_notices_another_one_meanwhile_and_other_attention():
    """The other one runs in a thread, in the middle of a forward, on rows of equal lengths: no
    kernel would complain. For a backward see test_policy.py."""
    w, other = (worker(seed=seed) for seed in (0, 1))
    batch = random_batch(12, vocab_size=60, prompts=3)  # transformers cannot share prompts
    values = w.compute_values(batch)

    def run_the_other(*_):
        thread = threading.Thread(target=other.compute_values, args=(batch,))
        thread.start()
        thread.join()

    hook = w.critic.model.model.layers[0].self_attn.register_forward_hook(run_the_other)
    with refused("another model has run meanwhile", kind=RuntimeError):
        w.compute_values(batch)
    hook.remove()

    # its config may be given to another model, but its own attention must stay
    transformers.AutoModel.from_config(w.model_config, attn_implementation="eager")
    assert torch.equal(w.compute_values(batch), values)
    w.critic.model.model.set_attn_implementation("eager")
    with refused("the attention of packed rows was not called: ", kind=RuntimeError):
        w.compute_values(batch)


# ---- Precision, schedule, mini-batches -----------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_computes_in_bfloat16_but_keeps_weights_values_and_loss_in_float32(strategy):
    """Compared with the same critic in float32."""
    exact, w = worker(strategy=strategy), worker(strategy=strategy, param_dtype="bfloat16")
    batch = batch_for(w, 40)
    values = w.compute_values(batch)
    assert values.dtype == torch.float32
    actions = values[batch.response_mask]
    # values are not rounded to bfloat16
    assert (actions.bfloat16().float() != actions).float().mean() > 0.9

    difference = (values - exact.compute_values(batch)).abs().max()
    assert 1e-4 < difference < 0.1, difference  # the products are in bfloat16
    before = full_weights(w.critic)
    moved = []

    for one in (w, exact):
        one.update_critic(batch)
        after = full_weights(one.critic)
        assert all(x.dtype == torch.float32 for x in after.values())  # the master weights
        moved.append(torch.cat([(after[n] - before[n]).flatten() for n in after]))
    assert torch.nn.functional.cosine_similarity(*moved, dim=0) > 0.9


def rates(updates, **fields):
    """The learning rates of some updates, each on four rows."""
    w = worker(lr=1.0, grad_clip=1e-6, **fields)
    batch = random_batch(4, vocab_size=60, idle=False)
    return [w.update_critic(batch)["critic/lr"] for _ in range(updates)]


def test_learning_rate_schedules():
    assert rates(2) == [1.0, 1.0]
    assert rates(5, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]  # the first step is not at 0
    cosine = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    fields = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 1, "total_steps": 5}
    assert rates(7, **fields) == pytest.approx([1.0, *cosine, 0.0], abs=1e-12)
    fields |= {"lr_warmup_steps": 2, "total_steps": 3}  # one step after the warm-up
    assert rates(5, **fields) == pytest.approx([0.5, 1.0, 1.0, 0.0, 0.0], abs=1e-9)
    # every mini-batch of every epoch is a step, and the last rate is reported
    assert rates(2, ppo_mini_batch_size=2, ppo_epochs=2, lr_warmup_steps=8) == [4 / 8, 1.0]
    with refused("total_steps", begin="--lr-scheduler-type cosine: "):
        worker(lr_scheduler_type="cosine")


def test_tokens_that_are_no_action_do_no_harm():
    """A mini-batch without an action takes no step, and a NaN outside the actions changes no
    bit."""
    w, clean = worker(), worker()
    batch, dirty = batch_for(w), batch_for(w)
    for name in ("values", "returns"):
        setattr(dirty, name, torch.where(dirty.response_mask, getattr(dirty, name), math.nan))
    assert w.update_critic(dirty)["critic/vf_loss"] == clean.update_critic(batch)["critic/vf_loss"]
    assert_same_weights(w, clean)
    batch.response_mask = torch.zeros_like(batch.response_mask)
    metrics = w.update_critic(batch)
    assert metrics["critic/skipped_steps"] == 1 and math.isnan(metrics["critic/vf_loss"])
    assert_same_weights(w, clean)


def test_mini_batches_are_global_complete_and_shuffled_by_seed_update_and_epoch(monkeypatch):
    minis = []  # three for each epoch, of 4 rows, or 5
    make = critic_fsdp.DataParallelPPOCritic.mini_batch
    note = lambda critic, batch, mini: (
        minis.append([row.row_id for row in mini]) or make(critic, batch, mini)
    )
    monkeypatch.setattr(critic_fsdp.DataParallelPPOCritic, "mini_batch", note)
    batch = random_batch(13, vocab_size=60, idle=False, prompts=4)
    groups = [{row for [row] in rows} for rows in batch.groups() if len(rows) > 1]
    orders = []

    # neither the caller's order nor --share-prompts matters
    for first, share in ((range(13), True), ([5, 0, 11, 3, 8, 12, 1, 10, 2, 7, 4, 9, 6], False)):
        w = worker(ppo_mini_batch_size=5, ppo_epochs=2, share_prompts=share)
        w.update_critic(batch.select(first))
        w.update_critic(batch)
        assert w.critic.optimizer_steps == 12  # 5 + 4 + 4 rows, twice, twice
        assert [len(mini) for mini in minis] == [5, 4, 4] * 4
        orders.append([sum(minis[i : i + 3], []) for i in range(0, 12, 3)])
        minis.clear()

    assert orders[0] == orders[1] and all(sorted(order) == list(range(13)) for order in orders[0])
    assert len({tuple(order) for order in orders[0]}) == 4
    for order, group in itertools.product(orders[0], groups):
        assert any(group == {*order[i : i + len(group)]} for i in range(13)) and len(groups) > 1
    worker(ppo_mini_batch_size=5, shuffle=False).update_critic(batch)
    assert sum(minis, []) == list(range(13))


PLAIN = ("eval/vf_loss", "eval/constant_loss", "eval/explained_var", "eval/auc")


def test_evaluation_equals_plain_formulas():
    rows, gamma = random_batch(40), 0.9
    rows.values = (2 * rows.values).round() / 2  # ties count half in the AUC
    rows.token_level_rewards = torch.zeros(len(rows.input_ids))
    targets, scores = [], ([], [])

    for i, actions in enumerate(helpers.actions_of(rows)):
        right = float(i % 3 == 0)
        targets += [right * gamma**k for k in reversed(range(len(actions)))]
        if actions:
            rows.token_level_rewards[actions[-1]] = right
            scores[int(right)].append(float(rows.values[actions[-1]]))

    r = torch.tensor(targets, dtype=torch.float64)
    errors = r - rows.values[rows.response_mask].double()
    wins = [(p > n) + 0.5 * (p == n) for n, p in itertools.product(*scores)]
    assert 0.5 in wins
    found = common.evaluate(rows, gamma)
    assert {name: x for name, x in found.items() if name in PLAIN} == {
        "eval/vf_loss": pytest.approx(float(0.5 * (errors**2).mean()), rel=1e-6),
        "eval/constant_loss": pytest.approx(float(0.5 * ((r - r.mean()) ** 2).mean()), rel=1e-6),
        "eval/explained_var": pytest.approx(float(1 - errors.var() / r.var()), rel=1e-5),
        "eval/auc": pytest.approx(sum(wins) / len(wins)),
    }
    rows.token_level_rewards *= 2
    assert math.isnan(common.evaluate(rows, gamma)["eval/auc"])  # rewards of 0 and 2 are not labels


def test_batches_that_a_critic_cannot_process_are_refused():
    w = worker(ppo_max_token_len_per_gpu="auto:0.002")
    batch = batch_for(w)
    with pytest.raises(UserError, match="auto: row .* of .* tokens does not fit"):
        w.compute_values(batch)
    w = worker()
    assert len(w.compute_values(batch.select([]))) == 0

    for batch.input_ids[3] in (10**6, -100):
        with pytest.raises(ValueError, match="token id (1000000|-100) is outside .* of 99"):
            w.compute_values(batch)

    most = w.model_config.max_position_embeddings = max(batch.lengths) - 1
    with refused(f"max_position_embeddings, {most}", begin="row_id ", kind=ValueError):
        w.compute_values(batch)


def test_metrics_are_means_over_tokens_and_steps_not_over_micro_batches():
    """verl 0.6.1 divides its loss metric twice by the number of micro-batches."""
    everything, pieces = worker(), worker(ppo_max_token_len_per_gpu=40)
    batch = batch_for(everything, 24)
    whole, parts = everything.update_critic(batch), pieces.update_critic(batch)

    assert of_critic(whole) == pytest.approx(of_critic(parts), rel=1e-5, abs=1e-6)

    for name in ("values", "returns"):
        x = getattr(batch, name)[batch.response_mask].double()
        expected = {"mean": x.mean(), "min": x.min(), "max": x.max()}
        for key, value in expected.items():
            assert whole[f"critic/{name}_{key}"] == pytest.approx(float(value), rel=1e-6)

    sums = {"share": torch.tensor(3.0), "loss": torch.tensor(6.0), "actions": torch.tensor(12.0)}
    two_of_three = common.update_metrics("x", "loss", sums, [1.0, math.nan, 3.0], 0.1)
    assert two_of_three == {
        "x/loss": 3,
        "x/share": 0.25,
        "x/grad_norm": 2,
        "x/lr": 0.1,
        "x/skipped_steps": 1,
    }
    assert math.isnan(whole["perf/mfu"])  # the peak of a CPU is unknown


# ---- Memory: the automatic budget, offloading ----------------------------------------------------

# keep different activations
KEPT = [{}, {"use_remove_padding": False}, {"gradient_checkpointing": True}]
# the gradient of this embedding takes more memory than many tokens
LARGE = {"gradient_checkpointing": True, "override_config": '{"vocab_size": 50000}'}


@pytest.mark.parametrize(
    "gib, fields", [*((0.02, fields) for fields in KEPT), (0.125, LARGE)], ids=str
)
def test_an_automatic_budget_fills_the_memory_and_changes_no_update(gib, fields, capsys):
    gc.collect()  # else what earlier tests have left may be freed while memory is measured
    auto, batch = worker(ppo_max_token_len_per_gpu=f"auto:{gib}", **fields), random_batch(40)
    metrics = auto.update_critic(batch)
    assert f" = {auto.critic.max_tokens:,} tokens" in capsys.readouterr().out
    expected = worker(ppo_max_token_len_per_gpu=41, **fields).update_critic(batch)
    assert of_critic(metrics) == pytest.approx(of_critic(expected), rel=1e-6)
    longest = max(batch.lengths)
    full = common.concat([common.Batch.blank(longest)] * (auto.critic.max_tokens // longest))
    micro = auto.critic.micro_batch(full)
    peak = helpers.peak_bytes(lambda: auto.critic.forward_backward(micro))
    double = full.select([0] * (2 * len(full)))
    double.row_id = torch.arange(len(double))
    assert helpers.peak_bytes(lambda: auto.compute_values(double)) < peak
    state = 16 * sum(p.numel() for p in auto.critic.model.parameters())
    assert 0.8 < (peak + state) / (gib * 2**30) < 0.91


@pytest.mark.parametrize("fields", [VARIANTS["lora"], {"param_dtype": "bfloat16"}])
def test_shared_prompts_change_no_update(fields):
    """Two steps with and without sharing. For windows, soft caps and experts see
    test_layouts.py."""
    batch = random_batch(20, prompts=4)
    assert common.cost_of(common.describe(batch)) < 0.85 * len(batch.input_ids)
    seen = []
    for share in (True, False):
        w = worker(
            share_prompts=share, ppo_mini_batch_size=10, ppo_max_token_len_per_gpu=200, **fields
        )
        metrics = w.update_critic(batch)
        numbers = [metrics["critic/grad_norm"], metrics["critic/vf_loss"]]
        seen.append(numbers + w.compute_values(batch).tolist())
    most = 0.05 if fields.get("param_dtype") else 2e-5  # bfloat16 rounds to 4e-3
    assert seen[0] == pytest.approx(seen[1], rel=most, abs=most)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offloading_on_a_host_frees_gradients_alone(strategy):
    """For a device see test_device.py."""
    w = worker(strategy=strategy)
    batch = batch_for(w)
    w.update_critic(batch)
    w.try_out(common.Batch.blank(9))  # leaves gradients
    weights = full_weights(w.critic)
    w.offload()
    assert all(p.grad is None for p in w.critic.parameters)
    assert_same_weights(w, weights)
    with pytest.raises(RuntimeError, match="offloaded"):
        w.update_critic(batch)
    w.onload()
    assert math.isfinite(w.update_critic(batch)["critic/grad_norm"])


SAVED = {  # what a kernel may keep for its backward: tensors with unusual strides
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "rows of 5 of 8, as in an aligned mask": lambda x: x[:, :5],
    "rows of 3 of 8": lambda x: x[:, :3],
    "the same for each of 3 heads": lambda x: x[:, :5].expand(3, 4, 5),
    "one number": lambda x: x[2, 3],
    "nothing": lambda x: x[:, :0],
}


@pytest.mark.parametrize("kind", SAVED)
def test_activations_on_the_host_keep_their_strides(kind):
    x = SAVED[kind](torch.randn(4, 8))
    saved = critic_fsdp.copy_to_host(x)
    back = critic_fsdp.copy_to_device(saved)
    assert torch.equal(back, x) and back.stride() == x.stride() and back is not x


def test_a_narrow_part_on_the_host_does_not_bring_the_rest():
    wide = torch.randn(64, 1000)
    saved, *_ = critic_fsdp.copy_to_host(wide[:, 3:5])
    assert saved.numel() == 128 and torch.equal(saved.view(64, 2), wide[:, 3:5])


# ---- Checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy, variant", [*itertools.product(("fsdp2", "none"), ("", "lora")), ("fsdp1", "lora")]
)
def test_resuming_equals_continuing_bit_for_bit(strategy, variant, tmp_path):
    """From checkpoints before the first step and after an update. Saving changes nothing."""
    fields = {"ppo_mini_batch_size": 6, "lr_warmup_steps": 9, **VARIANTS.get(variant, {})}
    w, untouched = (worker(strategy=strategy, **fields) for _ in range(2))
    batches = [batch_for(w, seed=s) for s in range(2)]
    metrics, random = [], []
    w.try_out(common.Batch.blank(9))  # gradients without state, as an automatic budget leaves them
    untouched.try_out(common.Batch.blank(9))
    for p in untouched.critic.parameters:  # as a trial backward may leave them
        p.grad.fill_(9.0)

    for step, batch in enumerate(batches):
        w.save_checkpoint(tmp_path / f"step_{step}")
        write = w.checkpoint_writer(copy=True)
        metrics.append(w.update_critic(batch))
        random.append(torch.rand(3))
        untouched.update_critic(batch)

    assert_same_weights(w, untouched)
    # again, from the copy made before the update
    with common.published(tmp_path / "step_1") as tmp:
        write(tmp)

    for first in (0, 1):
        again = worker(strategy=strategy, **fields)
        again.compute_values(batches[0])  # loading must free the gathered weights first
        again.try_out(common.Batch.blank(9))
        again.load_checkpoint(tmp_path / f"step_{first}")
        for step in range(first, 2):
            assert of_critic(again.update_critic(batches[step])) == of_critic(metrics[step])
            assert torch.equal(torch.rand(3), random[step])
        assert_same_weights(again, w)


def test_a_mixture_computes_in_bfloat16_under_every_strategy():
    fields = {"model": "tiny-qwen3-moe", "param_dtype": "bfloat16"}
    batch = random_batch(8, vocab_size=60)
    half, *others = (worker(strategy=name, **fields).compute_values(batch) for name in STRATEGIES)
    assert all(torch.equal(values, half) for values in others)
    whole = worker(**{**fields, "param_dtype": "float32"}).compute_values(batch)
    assert 1e-4 < (half - whole).abs().max() < 1e-1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_optimizer_is_saved_and_resumed(strategy, tmp_path):
    """As in a fork without AdamW. SGD counts no steps, and RMSprop names its moments
    differently."""
    for kind in (torch.optim.SGD, torch.optim.RMSprop):

        def forked(kind=kind):
            w = worker(strategy=strategy)
            w.critic.optimizer = kind(w.critic.parameters, momentum=0.9)
            return w

        w = forked()
        for step in range(2):
            folder = tmp_path / f"{kind.__name__}{step}"
            w.save_checkpoint(folder)
            again = forked()
            again.load_checkpoint(folder)
            for critic in (w, again):
                critic.update_critic(batch_for(w))
            assert_same_weights(again, w)


def test_a_checkpoint_has_no_pickle_and_foreign_ones_are_refused(tmp_path):
    """test_common.py, megatron_scenarios.py and faults.py test damaged ones."""
    w = worker()
    w.update_critic(batch_for(w))
    folder = tmp_path / "c"
    w.save_checkpoint(folder)
    names = {p.name for p in folder.iterdir()}
    shards = [name for name in names if name.endswith(".safetensors")]

    assert names == {*shards, "trainer.json", common.MANIFEST} and shards
    assert {p.name for p in tmp_path.iterdir()} == {"c"}
    other = worker(override_config='{"rms_norm_eps": 0.5}')
    with pytest.raises(UserError, match="is of another model: .*rms_norm_eps .* there, 0.5.* here"):
        other.load_checkpoint(folder)
    worker(seed=3, ppo_epochs=2).load_checkpoint(folder)  # these flags may change
    note = json.loads((folder / "trainer.json").read_text())
    note["shape"]["of_another_version"] = None  # the same as absent
    (folder / "trainer.json").write_text(json.dumps(note))
    helpers.write_manifest(folder)
    w.load_checkpoint(folder)
