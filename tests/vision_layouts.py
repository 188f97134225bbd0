"""Runs under torchrun: rows with and without images through layouts of a vision-language critic -> gradients.

    torchrun --nproc-per-node 2 tests/vision_layouts.py OUT.pt MODEL_FOLDER...

test_vision.py compares them with a plain float64 loop.
"""

import dataclasses
import sys

import torch
from helpers import captured_gradients

import common
import critic_fsdp
from common import RANK, WORLD_SIZE

START, IMAGE, END = range(99, 102)  # the ids of the presets


def image_rows(images, seed=1):
    """A Batch with one row for each entry of `images`: a list of the (t, h, w) grids of its images, in patches."""
    g, rows = torch.Generator().manual_seed(seed), []
    for i, grids in enumerate(images):
        ids = torch.randint(0, 99, (2 + i,), generator=g).tolist()
        for t, h, w in grids:
            ids += [START, *[IMAGE] * (t * h * w // 4), END]
        prompt, response = len(ids), 3 + 2 * i
        ids += torch.randint(0, 99, (response,), generator=g).tolist()
        mask = torch.cat([torch.zeros(prompt), torch.ones(response)]).bool()
        pixels = torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 14 * 14, generator=g)
        rows.append(
            common.Batch(
                input_ids=torch.tensor(ids),
                cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32),
                response_mask=mask,
                row_id=torch.tensor([i]),
                truncated=torch.tensor([False]),
                values=torch.randn(len(ids), generator=g) * mask,
                returns=torch.randn(len(ids), generator=g) * mask,
                multi_modal_inputs=[{"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)} if grids else {}],
            )
        )
    return common.concat(rows)


ROWS = image_rows([[(1, 4, 4)], [], [(1, 4, 8), (1, 6, 4)], [], [(1, 2, 2)]])
BATCHING = {
    "one micro-batch": {},
    "1 row": {"ppo_micro_batch_size_per_gpu": 1},  # micro-batches without an image, at one time on one rank alone
}
LAYOUTS = {  # name -> Config fields, ways to cut the rows into micro-batches
    "fsdp2": ({}, BATCHING),
    "fsdp2, frozen": ({"freeze_vision_tower": True}, ["1 row"]),
    "padded": ({"use_remove_padding": False}, BATCHING),
}
SPREAD = {  # over ranks
    "fsdp1": ({"strategy": "fsdp1", "gradient_checkpointing": True}, ["1 row"]),
    "fsdp1, frozen": ({"strategy": "fsdp1", "freeze_vision_tower": True}, ["1 row"]),
    "none": ({"strategy": "none"}, ["1 row"]),
    "none, frozen": ({"strategy": "none", "freeze_vision_tower": True}, ["1 row"]),
    "ulysses": ({"ulysses_size": 2, "gradient_checkpointing": True}, BATCHING),
    "ulysses, frozen": ({"ulysses_size": 2, "freeze_vision_tower": True}, ["1 row"]),
}


def results_of(model, layouts):
    """(layout, batching) -> gradients before clipping, values and loss."""
    results = {}
    for name, (fields, cases) in layouts.items():
        worker = critic_fsdp.CriticWorker(critic_fsdp.Config(model=str(model), shuffle=False, **fields))
        worker.init_model()
        worker.critic.peak_lr = 0.0  # every case starts from the same weights: steps do not move them
        for case in cases:
            worker.critic.config = dataclasses.replace(worker.config, weight_decay=0.0, **BATCHING[case])
            mine = ROWS.select(range(RANK, len(ROWS), WORLD_SIZE))
            if RANK == 1:  # rows 1 and 3: this rank owns no image and has no such column
                mine.multi_modal_inputs = None
            values = worker.compute_values(mine)
            with captured_gradients(worker.critic) as seen:
                metrics = worker.update_critic(mine)
            values = common.gather(dataclasses.replace(mine, values=values)).values
            results[name, case] = {"gradients": seen.pop(), "values": values, "loss": metrics["critic/vf_loss"]}
    return results


def main(out, model, *others):
    results = {model: results_of(model, LAYOUTS | SPREAD)}
    for other in others:  # what differs between models is the slicing of what their towers give
        results[other] = results_of(other, {name: SPREAD[name] for name in ("fsdp1", "ulysses", "ulysses, frozen")})
    if RANK == 0:
        torch.save(results, out)


if __name__ == "__main__":
    common.run(lambda: main(*sys.argv[1:]))
