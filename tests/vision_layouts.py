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


def image_rows(images):
    """A Batch with one row for each list of grids (t, h, w) of images in patches; row i has 24 + i tokens."""
    g = torch.Generator().manual_seed(1)
    rows = []
    for i, grids in enumerate(images):
        batch = common.Batch.blank(24 + i)
        ids = torch.randint(0, 99, (2 + i,), generator=g).tolist()
        for t, h, w in grids:
            ids += [START, *[IMAGE] * (t * h * w // 4), END]
        batch.row_id = torch.tensor([i])
        batch.response_mask = torch.arange(24 + i) >= len(ids)
        batch.input_ids = torch.randint(0, 99, (24 + i,), generator=g)
        batch.input_ids[: len(ids)] = torch.tensor(ids)
        batch.values, batch.returns = torch.randn(2, 24 + i, generator=g) * batch.response_mask
        pixels = torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 14 * 14, generator=g)
        row = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
        batch.multi_modal_inputs = [row if grids else {}]
        rows.append(batch)
    return common.concat(rows)


ROWS = image_rows([[(1, 4, 4)], [], [(1, 4, 8), (1, 6, 4)], [], [(1, 2, 2)]])
FROZEN = {"freeze_vision_tower": True}
LAYOUTS = {
    "fsdp2": {},
    "fsdp2, frozen": FROZEN,
    "padded": {"use_remove_padding": False},
    "fsdp1": {"strategy": "fsdp1", "gradient_checkpointing": True},
    "fsdp1, frozen": {"strategy": "fsdp1", **FROZEN},
    "none": {"strategy": "none"},
    "none, frozen": {"strategy": "none", **FROZEN},
    "ulysses": {"ulysses_size": 2, "gradient_checkpointing": True},
    "ulysses, frozen": {"ulysses_size": 2, **FROZEN},
}


def results_of(model, layouts):
    """(layout, tokens of a micro-batch) -> gradients before clipping, values and loss."""
    results = {}
    for name in layouts:
        config = critic_fsdp.Config(model=str(model), shuffle=False, weight_decay=0.0, **LAYOUTS[name])
        worker = critic_fsdp.CriticWorker(config)
        worker.init_model()
        worker.critic.peak_lr = 0.0  # each case starts from the same weights, because steps do not move them
        # with 28, each row is a micro-batch, and at times only one rank has an image; with 1000 there is one
        for tokens in (28, 1000) if name in ("fsdp2", "padded", "ulysses") else (28,):
            budget = tokens // config.ulysses_size
            worker.config = dataclasses.replace(config, ppo_max_token_len_per_gpu=budget)
            worker.critic.max_tokens = 0  # the worker sets it anew
            mine = ROWS.select(range(RANK, len(ROWS), WORLD_SIZE))
            if RANK == 1:  # rows 1 and 3: this rank owns no image and has no such column
                mine.multi_modal_inputs = None
            found = dataclasses.replace(mine, values=worker.compute_values(mine))
            with captured_gradients(worker.critic) as seen:
                loss = worker.update_critic(mine)["critic/vf_loss"]
            values = common.gather(found).values
            results[name, tokens] = {"gradients": seen.pop(), "values": values, "loss": loss}
    return results


def main(out, model, *others):
    some = ("fsdp1", "ulysses", "ulysses, frozen")  # models differ in how the output of their tower is sliced
    results = {model: results_of(model, LAYOUTS)} | {other: results_of(other, some) for other in others}
    if RANK == 0:
        torch.save(results, out)


if __name__ == "__main__":
    common.launch(lambda: main(*sys.argv[1:]))
