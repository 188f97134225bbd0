"""The gradient of one update before clipping is the same on every layout, and equals that of a
plain loop.

As a script, it runs one mini-batch on every layout of this number of ranks, for the tests to
compare:

    torchrun --nproc-per-node 2 tests/test_layouts.py OUT_FOLDER [models]
"""

import dataclasses
import datetime
import functools
import pathlib
import sys
import typing

import helpers
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import ended, mine, one_update, random_batch, rows_of, scenarios, succeeded
from safetensors.torch import load_file, save_file

import common
import critic_fsdp
from common import RANK, WORLD_SIZE

SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
SIZES["max_position_embeddings"] = 128
ROPE = dict(**SIZES, intermediate_size=64, pad_token_id=0, bos_token_id=0, eos_token_id=0)
GROUPED = dict(**ROPE, num_key_value_heads=2)
WINDOW = dict(**GROUPED, sliding_window=8)  # 8 tokens matter in rows of up to 40
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
MODELS = {
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=8),
    "llama": transformers.LlamaConfig(**GROUPED),
    "mistral": transformers.MistralConfig(**WINDOW),
    "gemma2": transformers.Gemma2Config(**WINDOW, head_dim=8, query_pre_attn_scalar=8),
    "gemma3": transformers.Gemma3TextConfig(**WINDOW, head_dim=8, query_pre_attn_scalar=8),
    "phi3": transformers.Phi3Config(**GROUPED),
    "gpt2": transformers.GPT2Config(**SIZES),
    "gpt-neox": transformers.GPTNeoXConfig(**ROPE, rotary_pct=0.5),
    "opt": transformers.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
    "qwen3-moe": transformers.Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=8, num_experts=4),
    "mixtral": transformers.MixtralConfig(**WINDOW, num_local_experts=4),
    "deepseek-v3": transformers.DeepseekV3Config(
        **ROPE, **EXPERTS, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1,
    ),
    "gpt-oss": transformers.GptOssConfig(**WINDOW, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip


def save_model(config, folder):
    """A backbone with weights large enough that no gradient is negligible, and a value head next to
    it."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    model.save_pretrained(folder)
    head = {"score.weight": torch.randn(1, 32), "score.bias": torch.randn(1)}
    save_file(head, folder / "value_head.safetensors")


def clipped_loss(before, old, target):
    """PPO's value loss of one action: `before` is its value now, `old` its value before the
    update."""
    clipped = torch.minimum(torch.maximum(before, old - 0.5), old + 0.5)
    return 0.5 * torch.maximum((before - target) ** 2, (clipped - target) ** 2)


def plain_loop(batch, outputs_of, value_of=lambda x: x, loss_of=clipped_loss):
    """(values, token losses of each row that has an action), action by action in float64.

    outputs_of(row, ids): the value head's outputs at each position of a row. value_of, loss_of: per
    action."""
    values, losses = torch.zeros(len(batch.input_ids)), []
    for row, (start, end) in enumerate(rows_of(batch)):
        outputs = outputs_of(row, batch.input_ids[start:end][None])
        of_row = []
        for t in range(start, end):
            if batch.response_mask[t]:
                before = outputs[t - start - 1]
                values[t] = value_of(before).detach()
                of_row.append(loss_of(before, batch.values[t].double(), batch.returns[t].double()))
        if of_row:
            losses.append(torch.stack(of_row))
    return values, losses


def reference_of(folder, batch, mode="token-mean", images_of=lambda row, ids: {}):
    """Values, loss and gradients by plain transformers, one sequence at a time, in float64."""
    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    model.set_experts_implementation("eager")  # grouped products do not support float64
    head = load_file(folder / "value_head.safetensors")
    head = {name: x.double().requires_grad_() for name, x in head.items()}

    def outputs_of(row, ids):
        model.rope_deltas = None  # forget the images of the previous row
        hidden = model(input_ids=ids, use_cache=False, **images_of(row, ids)).last_hidden_state[0]
        return hidden @ head["score.weight"][0] + head["score.bias"]

    values, losses = plain_loop(batch, outputs_of)
    if mode == "token-mean":
        loss = torch.cat(losses).mean()
    else:  # mean over rows of a row's sum, mean, or sum divided by a constant
        of_row = {"seq-mean-token-mean": torch.mean, "seq-mean-token-sum": torch.sum}
        of_row["seq-mean-token-sum-norm"] = lambda x: x.sum() / 50
        loss = torch.stack([of_row[mode](x) for x in losses]).mean()
    loss.backward()
    named = {f"model.{n}": p for n, p in model.named_parameters()} | head
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    return values, float(loss.detach()), gradients


def difference(ours, exact):
    """Largest difference of two dicts of gradients, relative to the largest entry of its tensor (or
    a thousandth of the largest of all, because the gradient of keys' biases is only rounding)."""
    assert ours.keys() == exact.keys()
    floor = 1e-3 * max(g.abs().max() for g in exact.values())
    scale = {n: torch.maximum(g.abs().max(), floor) for n, g in exact.items()}
    return max(float((ours[n] - g).abs().max() / scale[n]) for n, g in exact.items())


def assert_agrees(what, result, values, loss, gradients):
    """Asserts that a result of one_update equals the reference to 1e-5 -> largest gradient
    difference."""
    error = difference(result["gradients"], gradients)
    what = (what, error)
    assert error < 1e-5, what
    torch.testing.assert_close(result["values"], values, rtol=1e-5, atol=1e-5, msg=str(what))
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    for name, x in {"vf_loss": loss, "grad_norm": norm}.items():
        assert result["metrics"][f"critic/{name}"] == pytest.approx(x, rel=1e-5), what
    return error


@functools.cache
def references(folder):
    """(rows, mode) -> reference_of this model, computed when asked for."""
    return functools.cache(lambda rows, mode: reference_of(folder, ROWS[rows], mode))


def compare(results, reference):
    """Asserts that results of layouts agree with the reference -> {layout: largest difference}."""
    worst = {}
    for (_, layout, case, *of), result in results.items():
        error = assert_agrees((layout, case, *of), result, *reference(*of))
        worst[layout] = max(worst.get(layout, 0.0), error)
    return worst


# with two rows, some ranks have none
ROWS = {"ragged": random_batch(11, seed=3), "two rows": random_batch(2, seed=2)}
ROWS["equal prompts"] = random_batch(14, seed=5, longest=24, prompts=3)
MODES = typing.get_args(critic_fsdp.AggMode)
BUDGET = {"ppo_max_token_len_per_gpu": 60}
NORM = {**BUDGET, "response_length_limit": 50}
CASES = {  # name -> rows, and Config fields that say how micro-batches are cut and losses averaged
    "one micro-batch": ("ragged", {}),
    "budget 60": ("ragged", BUDGET),
    "budget 60, deferred": ("ragged", {**BUDGET, "defer_grad_sync": True}),
    # the longest row fills a micro-batch
    "budget 40": ("ragged", {"ppo_max_token_len_per_gpu": 40}),
    "rows on rank 0": ("ragged", BUDGET),
    "shared": ("equal prompts", {"ppo_max_token_len_per_gpu": 36}),  # some groups are larger
    "shared, one micro-batch": ("equal prompts", {}),
    "not shared": ("equal prompts", {**BUDGET, "share_prompts": False}),
    "fewer rows than ranks": ("two rows", {}),
    **{mode: ("ragged", {**NORM, "loss_agg_mode": mode}) for mode in MODES[1:]},
}
ON_HOST = {"gradient_checkpointing": True, "activation_offload": True}
MEMORY = {  # options that save memory, on two ranks
    "fsdp2, offload policy": {"offload_policy": True},
    "fsdp2, recompute, activations on the host": ON_HOST,
    "fsdp1, recompute, activations on the host": {"strategy": "fsdp1", **ON_HOST},
}
SOME = ("fsdp2, padded", "none, packed, recompute", "fsdp1, ulysses 2")  # these run all models
WHOLE = {  # ranks -> layouts that run all cases
    2: ("fsdp2, packed", "fsdp1, padded", "none, ulysses 2"),
    4: ("fsdp2, 2 replicas, ulysses 2",),
}


def layouts():
    """name -> Config fields of every way to spread the model over WORLD_SIZE ranks."""
    ways = {"packed": {}, "padded": {"use_remove_padding": False}}
    if WORLD_SIZE < 4:
        ways |= {
            f"{way}, recompute": {**ways[way], "gradient_checkpointing": True} for way in list(ways)
        }
    ways |= {f"ulysses {sp}": {"ulysses_size": sp} for sp in (2, 4) if WORLD_SIZE % sp == 0}
    if WORLD_SIZE == 4:
        ways |= {f"2 replicas, ulysses {sp}": {"fsdp_size": 2, "ulysses_size": sp} for sp in (1, 2)}
    found = dict(MEMORY) if WORLD_SIZE == 2 else {}
    for strategy in ("fsdp2", "fsdp1", "none"):
        for way, fields in ways.items():
            # two ranks are enough to test a strategy
            told = WORLD_SIZE == 4 and strategy != "fsdp2" and way in ("packed", "padded")
            if not told and not (strategy == "none" and "fsdp_size" in fields):
                found[f"{strategy}, {way}"] = {"strategy": strategy, **fields}
    return found


def cases_of(layout):
    """The cases that a layout runs. How rows are cut and weighed does not depend on the
    strategy."""
    cases = ["budget 60, deferred", "shared, one micro-batch", "fewer rows than ranks"]
    if layout in WHOLE.get(WORLD_SIZE, ()):
        cases = CASES
    elif layout in MEMORY or "recompute" in layout:
        cases = ["budget 60", "shared"]
    return dict.fromkeys(x.removesuffix(", deferred") if "fsdp1" in layout else x for x in cases)


def main(out, which="qwen2"):
    """`models`: three layouts of all models, otherwise all layouts of one."""
    jobs = [(which, layout, fields, cases_of(layout)) for layout, fields in layouts().items()]
    if which == "models":
        cases = ("shared", "shared, one micro-batch")
        jobs = [(model, layout, layouts()[layout], cases) for model in MODELS for layout in SOME]
    save_results(out, MODELS, results_of, jobs)


def save_results(out, models, results_of, jobs):
    """Saves results_of(*job, out) of all jobs, and before that the models that jobs begin with."""
    out = pathlib.Path(out)
    common.setup_distributed()
    if RANK == 0:
        for name in {model for model, *_ in jobs}:
            save_model(models[name], out / name)
    dist.barrier()
    results = {}
    for job in jobs:
        results |= results_of(*job, out)
    if RANK == 0:
        torch.save(results, out / "out.pt")


def results_of(model, layout, fields, cases, out):
    """(model, layout, case, rows, loss_agg_mode) -> gradients before clipping, values and
    metrics."""
    worker = helpers.worker(model=str(out / model), weight_decay=0.0, timeout_minutes=15, **fields)
    critic, config = worker.critic, worker.config
    meshes = worker.layout
    for group in filter(None, (*meshes.fsdp_mesh.get_all_groups(), meshes.sp_group)):
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == datetime.timedelta(minutes=15), layout
    critic.peak_lr = 0.0  # every case starts from the same weights, because steps do not move them
    results = {}
    for case in cases:
        rows, changes = CASES[case]
        worker.config = critic.config = dataclasses.replace(config, **changes)
        critic.max_tokens = 0  # the worker then sets the budget again
        batch = part_of(case, ROWS[rows])
        results[model, layout, case, rows, critic.config.loss_agg_mode] = one_update(worker, batch)
    return results


def part_of(case, batch):
    if case == "rows on rank 0":
        return batch if RANK == 0 else batch.select([])
    return mine(batch)


def launched(*job):
    """(folder of the models, results of this script)."""
    waits_for, out = scenarios(*job)
    succeeded(ended(waits_for))
    return out, torch.load(out / "out.pt", weights_only=True)


@pytest.mark.parametrize("ranks, cases", [(1, 30), (2, 71), (4, 45)])
def test_every_layout_makes_the_same_gradient(ranks, cases):
    folder, results = launched(ranks, "test_layouts.py")
    assert len(results) == cases
    print(f"\nlargest relative difference of a gradient to float64, {ranks} ranks, {cases} cases")
    for layout, error in compare(results, references(folder / "qwen2")).items():
        print(f"  {layout:42s} {error:.1e}")


@pytest.mark.parametrize("name", MODELS)
def test_every_model_makes_the_same_gradient_packed_padded_and_with_ulysses(name):
    folder, results = launched(2, "test_layouts.py", "models")
    of_model = {key: result for key, result in results.items() if key[0] == name}
    assert len(of_model) == 2 * len(SOME)
    worst = compare(of_model, references(folder / name))
    print(f"\n  {name:12s}", "  ".join(f"{layout} {error:.1e}" for layout, error in worst.items()))


if __name__ == "__main__":
    common.launch(lambda: main(*sys.argv[1:]))
