"""Compares two runs that should have made the same updates: their metrics step by step, their exported weights.

    python tests/compare_runs.py OUT_DIR OTHER_OUT_DIR

Prints both side by side; exits with 1 if anything differs by more than 1e-5 (relative, weights absolute).
"""

import glob
import json
import math
import os
import sys

import torch
from safetensors.torch import load_file

ONLY_HERE = {"perf/pipeline_bubble"}  # a metric of Megatron's alone


def metrics_of(out_dir):
    """(step, name) -> number, of what a batch and a critic determine."""
    rows = [json.loads(line) for line in open(os.path.join(out_dir, "metrics.jsonl"))]
    return {(row["step"], name): x for row in rows for name, x in row.items() if name != "step"}


def weights_of(out_dir):
    """name -> tensor of the Hugging Face folder of a run, experts of a layer in one tensor or one by one."""
    return {name: x for path in glob.glob(f"{out_dir}/hf/*.safetensors") for name, x in load_file(path).items()}


def off(x, y):
    """Relative difference; numbers below 1e-3 are measured by that, for some are nothing but rounding."""
    if x is None or y is None:  # null: not finite
        return 0.0 if x is y else math.inf
    return abs(x - y) / max(abs(x), abs(y), 1e-3)


def main(*out_dirs):
    (a, b), (weights, others) = map(metrics_of, out_dirs), map(weights_of, out_dirs)
    assert {name for _, name in a.keys() ^ b.keys()} <= ONLY_HERE, "they log different metrics"
    worst, compared = 0.0, [key for key in a if not key[1].startswith("perf/")]
    for step, name in compared:
        x, y = a[step, name], b[step, name]
        error = off(x, y)
        worst = max(worst, error)
        x, y = (math.nan if number is None else number for number in (x, y))  # null: not defined in this step
        print(f"step {step}  {name:24s} {x:14.8g} {y:14.8g}   {error:.0e}")
    assert weights.keys() == others.keys() and weights, "they export different weights"
    gap = max(float((weights[name] - others[name]).abs().max()) for name in weights)
    size = max(float(x.abs().max()) for x in weights.values())
    print(f"metrics    {len(compared)} numbers, largest relative difference {worst:.1e}")
    print(f"weights    {sum(x.numel() for x in weights.values()):,} of up to {size:.2f}, largest difference {gap:.1e}")
    return 0 if max(worst, gap) < 1e-5 and not torch.tensor([worst, gap]).isnan().any() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
