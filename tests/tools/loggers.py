"""Loggers of other packages, for --logger of all three scripts.

    python critic_fsdp.py --logger tests/tools/loggers.py:wandb       also trackio and mlflow
    python tests/tools/loggers.py wandb out/my/metrics.jsonl          of a run that has ended

A function gets each line of metrics.jsonl as it is logged: a dict with the step, in which a number
that does not exist is None. For names and notes of the run, change a copy of this file.
"""

import json
import sys
from functools import cache
from importlib import import_module


@cache
def begun(package):
    """The package, of which a run has begun with the first line."""
    module = import_module(package)
    module.init(project="critic")
    return module


def wandb(row):
    begun("wandb").log(row, step=row["step"])


def trackio(row):
    begun("trackio").log(row, step=row["step"])


def mlflow(row):
    numbers = {name: x for name, x in row.items() if x is not None}
    import_module("mlflow").log_metrics(numbers, step=row["step"])


if __name__ == "__main__":
    name, file = sys.argv[1:]
    log = {"wandb": wandb, "trackio": trackio, "mlflow": mlflow}[name]
    for line in open(file):
        log(json.loads(line))
