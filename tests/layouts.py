"""Puts one mini-batch through every layout of critic_fsdp.py on this many ranks -> gradients before clipping.

    torchrun --nproc-per-node 4 tests/layouts.py OUT_FOLDER           all layouts, one model
    torchrun --nproc-per-node 2 tests/layouts.py OUT_FOLDER models    three layouts, all models

Models and results go to OUT_FOLDER; test_layouts.py compares the results with a plain float64 loop.
"""

import dataclasses
import datetime
import pathlib
import sys
import typing

import torch
import torch.distributed as dist
from helpers import one_update, random_batch

import common
import critic_fsdp
from common import RANK, WORLD_SIZE

ROWS = {
    "ragged": random_batch(11, seed=3),
    "two rows": random_batch(2, seed=2),
}  # of two, some ranks have none
MODES = typing.get_args(critic_fsdp.AggMode)
BUDGET = {"ppo_max_token_len_per_gpu": 60}
NORM = {**BUDGET, "response_length_limit": 50}
CASES = {  # name -> which rows, and Config fields: how micro-batches are cut and losses averaged
    "one micro-batch": ("ragged", {}),
    "budget 60": ("ragged", BUDGET),
    "budget 60, deferred": ("ragged", {**BUDGET, "defer_grad_sync": True}),
    "budget 40": ("ragged", {"ppo_max_token_len_per_gpu": 40}),  # the longest row fills a micro-batch alone
    "rows on rank 0": ("ragged", BUDGET),
    "fewer rows than ranks": ("two rows", {}),
    **{mode: ("ragged", {**NORM, "loss_agg_mode": mode}) for mode in MODES[1:]},
}
ON_HOST = {"gradient_checkpointing": True, "activation_offload": True}
MEMORY = {  # what saves memory, on two ranks
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
        ways |= {f"{way}, recompute": {**ways[way], "gradient_checkpointing": True} for way in list(ways)}
    ways |= {f"ulysses {sp}": {"ulysses_size": sp} for sp in (2, 4) if WORLD_SIZE % sp == 0}
    if WORLD_SIZE == 4:
        ways |= {f"2 replicas, ulysses {sp}": {"fsdp_size": 2, "ulysses_size": sp} for sp in (1, 2)}
    found = dict(MEMORY) if WORLD_SIZE == 2 else {}
    for strategy in ("fsdp2", "fsdp1", "none"):
        for way, fields in ways.items():
            plain = way in ("packed", "padded")  # for them two ranks tell whether a strategy goes wrong
            if (
                WORLD_SIZE == 4
                and strategy != "fsdp2"
                and plain
                or strategy == "none"
                and "fsdp_size" in fields
            ):
                continue
            found[f"{strategy}, {way}"] = {"strategy": strategy, **fields}
    return found


def cases_of(layout):
    """The cases that a layout runs. How rows are cut and counted does not depend on the strategy."""
    if layout in WHOLE.get(WORLD_SIZE, ()):
        return CASES
    if layout in MEMORY or "recompute" in layout:
        return ["budget 60"]
    return ["budget 60, deferred", "fewer rows than ranks"]


def main(out, which="qwen2"):
    from test_layouts import MODELS, save_model

    out = pathlib.Path(out)
    names = list(MODELS) if which == "models" else [which]
    common.setup_distributed()
    if RANK == 0:
        for name in names:
            save_model(MODELS[name], out / name)
    dist.barrier()
    results = {}
    for model in names:
        for layout, fields in layouts().items():
            if which != "models":
                results |= results_of(model, layout, out, fields, cases_of(layout))
            elif layout in SOME:
                results |= results_of(model, layout, out, fields, ["budget 60"])
    if RANK == 0:
        torch.save(results, out / "out.pt")


def results_of(model, layout, out, fields, cases):
    """(model, layout, case, rows, way to average) -> gradients before clipping, values and metrics."""
    config = critic_fsdp.Config(model=str(out / model), weight_decay=0.0, timeout_minutes=15, **fields)
    worker = critic_fsdp.CriticWorker(config)
    worker.init_model()
    critic = worker.critic
    meshes = worker.layout
    for group in filter(None, (*meshes.fsdp_mesh.get_all_groups(), meshes.sp_group)):
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == datetime.timedelta(minutes=15), layout
    critic.peak_lr = 0.0  # every case starts from the same weights, because steps do not move them
    results = {}
    for case in cases:
        rows, changes = CASES[case]
        worker.config = critic.config = dataclasses.replace(config, **changes)
        critic.max_tokens = 0  # the worker sets the budget anew
        everything = range(len(ROWS[rows]))
        mine = everything[RANK::WORLD_SIZE]
        if case == "rows on rank 0":
            mine = everything if RANK == 0 else []
        batch = ROWS[rows].select(mine)
        results[model, layout, case, rows, critic.config.loss_agg_mode] = one_update(worker, batch)
    return results


if __name__ == "__main__":
    common.launch(lambda: main(*sys.argv[1:]))
