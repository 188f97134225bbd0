"""The gradient of one update before clipping is the same on every layout of critic_fsdp.py, and
equals that of a plain loop."""

import dataclasses
import datetime

import helpers
import pytest
import torch
from forked import scenario
from helpers import one_update, part_of, ran
from reference import MODELS, MODES, ROWS, compare, references, save_results

from common import WORLD_SIZE

BUDGET = {"ppo_max_token_len_per_gpu": 60}
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
    "segments": ("segments", BUDGET),
    "segments, one micro-batch": ("segments", {}),
    "fewer rows than ranks": ("two rows", {}),
    **{mode: ("ragged", {**BUDGET, "loss_agg_mode": mode}) for mode in MODES[1:-1]},
    MODES[-1]: ("ragged", {**BUDGET, "loss_agg_mode": MODES[-1], "response_length_limit": 50}),
}
ON_HOST = {"gradient_checkpointing": True, "activation_offload": True}
MEMORY = {  # options that save memory, on two ranks
    "fsdp2, offload policy": {"offload_policy": True},
    "fsdp2, recompute, activations on the host": ON_HOST,
    "fsdp1, recompute, activations on the host": {"strategy": "fsdp1", **ON_HOST},
}
SOME = {  # layouts that run all models, and their cases
    "fsdp2, padded": ("shared",),
    "none, packed, recompute": ("shared", "shared, one micro-batch"),
    "fsdp1, ulysses 2": ("shared",),
    "fsdp2, ulysses 2": ("shared, one micro-batch", "segments, one micro-batch", "budget 40"),
}
WHOLE = {  # ranks -> layouts that run all cases
    2: ("fsdp2, packed", "fsdp1, padded"),
    4: ("fsdp2, 2 replicas, ulysses 2",),
}
RECOMPUTE = {  # strategy -> which rows it recomputes activations of
    "fsdp2": ("packed", "padded"),
    "fsdp1": ("padded",),
    "none": ("packed",),
}


def layouts():
    """name -> Config fields of every way to spread the model over WORLD_SIZE ranks."""
    ways = {"packed": {}, "padded": {"use_remove_padding": False}}
    ways |= {f"ulysses {sp}": {"ulysses_size": sp} for sp in (2, 4) if WORLD_SIZE % sp == 0}
    if WORLD_SIZE == 4:
        ways |= {f"2 replicas, ulysses {sp}": {"fsdp_size": 2, "ulysses_size": sp} for sp in (1, 2)}

    found = dict(MEMORY) if WORLD_SIZE == 2 else {}
    for strategy in ("fsdp2", "fsdp1", "none"):
        for way, fields in ways.items():
            # two ranks are enough to test a strategy
            told = WORLD_SIZE == 4 and strategy != "fsdp2" and way in ("packed", "padded")
            if told or (strategy == "none" and "fsdp_size" in fields):
                continue
            found[f"{strategy}, {way}"] = {"strategy": strategy, **fields}
            if WORLD_SIZE < 4 and way in RECOMPUTE[strategy]:
                again = {"strategy": strategy, "gradient_checkpointing": True, **fields}
                found[f"{strategy}, {way}, recompute"] = again
    return found


def cases_of(layout):
    """The cases that a layout runs. How rows are cut and weighed does not depend on the
    strategy."""
    cases = ["budget 60, deferred", "shared, one micro-batch", "segments", "fewer rows than ranks"]
    if layout in WHOLE.get(WORLD_SIZE, ()):
        cases = CASES
    elif layout in MEMORY or "recompute" in layout:
        cases = ["budget 60", "shared"]
    return dict.fromkeys(x.removesuffix(", deferred") if "fsdp1" in layout else x for x in cases)


@scenario(ranks=(1, 4))
@scenario(ranks=2)
def every_layout(folder):
    """Results of one model on all layouts of these ranks."""
    jobs = [("qwen2", layout, fields, cases_of(layout)) for layout, fields in layouts().items()]
    save_results(folder, f"{WORLD_SIZE}.pt", MODELS, results_of, jobs)


@scenario(ranks=2)
def every_model(folder):
    """Results of all models on three layouts."""
    some = [(layout, layouts()[layout], cases) for layout, cases in SOME.items()]
    jobs = [(model, *one) for model in MODELS for one in some]
    save_results(folder, "models.pt", MODELS, results_of, jobs)


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
        helpers.assert_old_values_come_along(worker, batch)
    return results


@pytest.mark.parametrize("ranks, cases", [(1, 32), (2, 71), (4, 59)])
def test_every_layout_makes_the_same_gradient(ranks, cases):
    folder = ran(every_layout, ranks)
    results = torch.load(folder / f"{ranks}.pt", weights_only=True)
    assert len(results) == cases

    print(f"\nlargest relative difference of a gradient to float64, {ranks} ranks, {cases} cases")
    for layout, error in compare(results, references(folder / "qwen2")).items():
        print(f"  {layout:42s} {error:.1e}")


@pytest.mark.parametrize("name", MODELS)
def test_every_model_makes_the_same_gradient_packed_padded_and_with_ulysses(name):
    folder = ran(every_model, 2)
    results = torch.load(folder / "models.pt", weights_only=True)
    of_model = {key: result for key, result in results.items() if key[0] == name}
    assert len(of_model) == sum(map(len, SOME.values()))

    worst = compare(of_model, references(folder / name))
    print(f"\n  {name:12s}", "  ".join(f"{layout} {error:.1e}" for layout, error in worst.items()))
