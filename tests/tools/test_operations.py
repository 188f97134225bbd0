"""How many operations of the device one layer takes in one micro-batch, on the simulated device.

    python tests/tools/test_operations.py WHO    WHO: fsdp, megatron, or bare, the loop of gpu.py

Views and allocations do not count. A mini-batch has four micro-batches, over which it counts what
happens once, as the norm and the optimizer's step.
"""

import collections
import json
import sys

import forked  # noqa: F401  # imports torch and megatron, before a device is pretended
import pretend_device
import pytest
from helpers import run, succeeded

COUNTS = collections.Counter()  # operation -> calls
FREE = ("empty", "new_empty", "set_", "resize_", "_local_scalar_dense", "record_stream", "_pin")
FREE += ("is_pinned", "profiler::", "c10d::")

# WHO -> the most of (values, an update)
MOST = {"fsdp": (45, 160), "megatron": (41, 149)}


def counting(function, name=None):
    """A function of pretend_device that also counts. name: if it is no operation of its own."""

    def call(*args, **options):
        op = name
        if not name:
            op = "" if args[0].is_view else args[0]._schema.name.removeprefix("aten::")
        if op and not op.startswith(FREE):
            COUNTS[op] += 1
        return function(*args, **options)

    return call


def install():
    """The simulated device, which counts."""
    cast = pretend_device.to_copy
    copies = pretend_device.copy_

    def cast_once(*args, **options):
        COUNTS["copy_"] -= 1  # it calls copy_
        return cast(*args, **options)

    pretend_device.kernel = counting(pretend_device.kernel)
    pretend_device.copy_ = counting(copies, "copy_")
    pretend_device.to_copy = counting(cast_once, "_to_copy")
    pretend_device.flash_forward = counting(pretend_device.flash_forward, "flash")
    pretend_device.flash_backward = counting(pretend_device.flash_backward, "flash backward")
    pretend_device.install()


def count(who, layers):
    """The operations of (values, an update) of four micro-batches, for a model of this many
    layers."""
    import gpu_helpers as gpu
    import torch

    import common
    import critic_fsdp

    rows = gpu.rows_of(64, 2)
    rows = rows.select([*range(16)] * 4)
    rows.row_id = torch.arange(64)
    shape = gpu.qwen(hidden=64, inner=96, layers=layers, heads=4, key_heads=2, vocabulary=1000)
    flags = {"override_config": json.dumps(shape), "lr": 1e-5, "ppo_mini_batch_size": 64}
    flags |= {"ppo_max_token_len_per_gpu": 900, "forward_max_token_len_per_gpu": 900}
    if who == "bare":
        worker = gpu.BareLoop(16, critic_fsdp.Config(**flags))
    else:
        script = critic_fsdp
        if who == "megatron":
            import critic_megatron as script
        worker = gpu.new_critic(script, share_prompts=False, **flags)
        table = worker.critic.plan_micro_batches(common.describe(rows), 900)
        assert len(table.sizes[0]) == 4

    found = []
    for call in (worker.compute_values, worker.update_critic):
        call(rows)  # creates gradients and the optimizer's state
        COUNTS.clear()
        call(rows)
        found.append(COUNTS.total())
    return found


@pytest.mark.skipif(not pretend_device.RUNS_HERE, reason=pretend_device.REASON)
@pytest.mark.parametrize("who", MOST)
def test_a_layer_takes_no_more_operations_than_it_did(who):
    counts = json.loads(succeeded(run(sys.executable, __file__, who)))
    for found, most in zip(counts, MOST[who], strict=True):
        assert found <= most, counts


if __name__ == "__main__":
    install()
    import common

    common.setup_distributed()
    pretend_device.warm_up()
    few, many = (count(sys.argv[1], layers) for layers in (2, 6))
    print(json.dumps([(y - x) / 4 / 4 for x, y in zip(few, many, strict=True)]))
