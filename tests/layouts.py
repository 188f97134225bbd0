"""Runs under torchrun: one mini-batch through every layout that so many ranks allow -> gradients before clipping.

    torchrun --nproc-per-node 4 tests/layouts.py OUT_FOLDER                of one model, which too goes there
    torchrun --nproc-per-node 2 tests/layouts.py OUT_FOLDER models         some layouts, all models of test_layouts.py

test_layouts.py compares them with a plain float64 loop.
"""

import dataclasses
import datetime
import itertools
import pathlib
import sys

import torch
import torch.distributed as dist
from helpers import captured_gradients, random_batch

import common
import critic_fsdp
from common import RANK, WORLD_SIZE

CPU = torch.device("cpu")
ROWS = {
    "ragged": random_batch(21, seed=1),
    "eleven": random_batch(11, seed=3),  # for megatron_layouts.py
    "two rows": random_batch(2, seed=2),  # there are ranks without any at W = 4
}

BATCHING = {  # how the same rows are cut into micro-batches
    "one micro-batch": {},
    "budget 60": {"ppo_max_token_len_per_gpu": 60},
    "budget 60, deferred": {"ppo_max_token_len_per_gpu": 60, "defer_grad_sync": True},
    "3 rows": {"ppo_micro_batch_size_per_gpu": 3},
    "1 row": {"ppo_micro_batch_size_per_gpu": 1},
}


MEMORY = {  # what saves memory or hides traffic, on two ranks
    "fsdp2, kept gathered, prefetch": {"reshard_after_forward": False, "forward_prefetch": True},
    "fsdp1, kept gathered, prefetch": {"strategy": "fsdp1", "reshard_after_forward": False, "forward_prefetch": True},
    "fsdp2, offload policy": {"offload_policy": True},
    "fsdp2, recompute, activations on the host": {"gradient_checkpointing": True, "activation_offload": True},
    "fsdp1, recompute, activations on the host": {
        "strategy": "fsdp1",
        "gradient_checkpointing": True,
        "activation_offload": True,
    },
}


def layouts():
    """(name, Config fields) of every way to spread the model over WORLD_SIZE ranks."""
    for strategy, packed in itertools.product(("fsdp2", "fsdp1", "none"), (True, False)):
        for checkpointing in (False, True) if WORLD_SIZE < 4 else (False,):
            name = f"{strategy}, {'packed' if packed else 'padded'}{', recompute' if checkpointing else ''}"
            yield name, dict(strategy=strategy, use_remove_padding=packed, gradient_checkpointing=checkpointing)
    for sp in (2, 4):
        if WORLD_SIZE % sp == 0:
            for strategy in ("fsdp2", "fsdp1", "none"):
                yield f"{strategy}, ulysses {sp}", dict(strategy=strategy, ulysses_size=sp)
    if WORLD_SIZE == 2:
        yield from MEMORY.items()
    if WORLD_SIZE == 4:
        for strategy, sp in itertools.product(("fsdp2", "fsdp1"), (1, 2)):
            yield f"{strategy}, 2 replicas, ulysses {sp}", dict(strategy=strategy, fsdp_size=2, ulysses_size=sp)


SOME = ("fsdp2, padded", "none, packed, recompute", "fsdp1, ulysses 2")
WHOLE = ("fsdp2, packed", "fsdp1, padded", "none, ulysses 2", "fsdp2, 2 replicas, ulysses 2")  # are put through all


def main(out, which="qwen2"):
    from test_layouts import MODELS, save_model

    results, some = {}, SOME if which == "models" else ()
    out, names = pathlib.Path(out), MODELS if some else (which,)
    common.setup_distributed(timeout_minutes=15)
    for name in names if RANK == 0 else ():
        save_model(MODELS[name], out / name)
    dist.barrier()
    for model, (name, fields) in itertools.product(names, layouts()):
        if some and name not in some:
            continue
        worker = critic_fsdp.CriticWorker(critic_fsdp.Config(model=str(out / model), **fields))
        worker.init_model()
        for group in (*worker.layout.fsdp_mesh.get_all_groups(), worker.layout.dp_group, worker.layout.sp_group):
            assert group is None or group._get_backend(CPU).options._timeout == datetime.timedelta(minutes=15), name
        worker.critic.peak_lr = 0.0  # every case starts from the same weights: steps do not move them
        worker.critic.config = dataclasses.replace(worker.config, weight_decay=0.0)

        def run(case, rows, mine, worker=worker, model=model, name=name, **changes):
            batch = ROWS[rows].select(mine)
            config = dataclasses.replace(worker.config, **changes)
            worker.critic.config = config
            values = worker.compute_values(batch)
            with captured_gradients(worker.critic) as seen:
                metrics = worker.update_critic(batch)
            assert metrics["critic/skipped_steps"] == 0 and len(seen) == 1
            whole = dataclasses.replace(batch, values=values)
            key = (model, name, case, rows, changes.get("loss_agg_mode", "token-mean"))
            results[key] = {"gradients": seen.pop(), "values": common.gather(whole).values, "metrics": metrics}

        if some or name in MEMORY or "recompute" in name:
            run("budget 60", "ragged", range(RANK, 21, WORLD_SIZE), **BATCHING["budget 60"])
            continue
        spread, rank0 = range(RANK, 21, WORLD_SIZE), range(21) if RANK == 0 else []
        few, whole = WORLD_SIZE == 4, name in WHOLE  # on two cores four ranks take their time
        batching = ("budget 60", "budget 60, deferred", "1 row") if few else BATCHING
        for case in batching if whole else ("budget 60, deferred",) if few else ("budget 60", "budget 60, deferred"):
            run(case, "ragged", spread, **BATCHING[case])
        if whole or WORLD_SIZE > 1:
            run("fewer rows than ranks", "two rows", range(RANK, 2, WORLD_SIZE))
        if not whole:  # how rows are cut and counted is the same with all strategies, each of which is there once
            continue
        for mode in common.LOSS_AGG_MODES[2:3] if few else common.LOSS_AGG_MODES[1:]:
            run("budget 60", "ragged", spread, **BATCHING["budget 60"], loss_agg_mode=mode, response_length_limit=50)
        run("rows on rank 0", "ragged", rank0, **BATCHING["budget 60"])
    if RANK == 0:
        torch.save(results, out / "out.pt")


if __name__ == "__main__":
    common.run(lambda: main(*sys.argv[1:]))
