"""Compares two runs that should have made the same updates: metrics of each step, exported weights.

    python tests/compare_runs.py OUT_DIR OTHER_OUT_DIR

Prints their numbers. Exits with 1 if any differ by more than 1e-5 (numbers relatively, weights absolutely).
"""

import glob
import json
import math
import os
import sys

from safetensors.torch import load_file


def metrics_of(out_dir):
    """(step, name) -> number, of what a batch and a critic determine."""
    rows = [json.loads(line) for line in open(os.path.join(out_dir, "metrics.jsonl"))]
    return {(row["step"], name): x for row in rows for name, x in row.items() if name != "step"}


def weights_of(out_dir):
    """name -> tensor of the Hugging Face folder of a run."""
    paths = glob.glob(f"{out_dir}/hf/*.safetensors")
    return {name: x for path in paths for name, x in load_file(path).items()}


def off(x, y):
    """Relative difference. Numbers below 1e-3 are divided by 1e-3, because some are nothing but rounding."""
    if x is None or y is None:  # null: not finite
        return 0.0 if x is y else math.inf
    return abs(x - y) / max(abs(x), abs(y), 1e-3)


def main(*out_dirs):
    a, b = map(metrics_of, out_dirs)
    weights, others = map(weights_of, out_dirs)
    assert a.keys() == b.keys() and a, "they log different metrics"
    compared = {key: off(a[key], b[key]) for key in a if not key[1].startswith("perf/")}
    for (step, name), error in compared.items():
        x, y = (math.nan if run[step, name] is None else run[step, name] for run in (a, b))  # null: undefined
        print(f"step {step}  {name:24s} {x:14.8g} {y:14.8g}   {error:.0e}")
    worst = max(compared.values())
    assert weights.keys() == others.keys() and weights, "they export different weights"
    gaps = [float((weights[name] - others[name]).abs().max()) for name in weights]
    size = max(float(x.abs().max()) for x in weights.values())
    print(f"metrics    {len(compared)} numbers, largest relative difference {worst:.1e}")
    count = sum(x.numel() for x in weights.values())
    print(f"weights    {count:,} of up to {size:.2f}, largest difference {max(gaps):.1e}")
    return int(not all(x < 1e-5 for x in (worst, *gaps)))  # a NaN is a difference


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
