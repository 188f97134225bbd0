"""Says what a critic thinks of rows that come one by one: a line in, its values out.

    python tests/tools/serve.py --model out/my/hf < tests/rows.jsonl          critic_fsdp.py's
    python tests/tools/serve.py --critic megatron --model out/my/hf           critic_megatron.py's

The model is loaded once, and a pipe is a service. Each line of standard input is answered on
standard output with what --score writes for it, or with {"error": ...}; all else that is printed
goes to standard error. It runs on one rank until its input ends.

More flags are those of the critic's script. Those that train do nothing here. A client in Python:

    import json, subprocess

    command = ".venv/bin/python tests/tools/serve.py --model out/my/hf".split()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, **pipes) as service:
        for response in ("94", "142"):
            row = {"prompt": "94+48=", "response": response, "reward": 0}
            print(json.dumps(row), file=service.stdin)
            print(json.loads(service.stdout.readline())["values"])
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import common
from common import WORLD_SIZE, UserError


@dataclass(frozen=True)
class Serve:
    """Which critic answers."""

    critic: Literal["fsdp", "megatron"] = "fsdp"  # script that implements it


def main(script, run):
    """Answers the lines of standard input until they end. script: the critic's module."""
    if WORLD_SIZE > 1 or run.resume:
        words = "runs on one rank, and without --resume: give a folder as --model"
        raise UserError(f"serve.py: {words}")

    # all else that is printed goes to standard error
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    # the head must have been trained
    worker = script.CriticWorker(replace(run.critic, value_head_init="checkpoint"))
    worker.init_model(1)
    read = script.row_reader(run, worker)

    # a client may wait for each answer; when it reads no more, the service ends
    with suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            for row in answer(line, worker, read, run):
                answers.write(f"{common.as_json(row)}\n")
            answers.flush()


def answer(line, worker, read, run):
    """The rows of a line with their values, as JSON objects, or one that says what is wrong."""
    try:
        rows = read([line.strip()], flag="--score")
        rows.values = worker.compute_values(rows)
        keys = {"response": run.response_key, "reward": run.reward_key}
        lines = [row for *_, row in common.raw_rows([line], "--score", run.rows, keys)]
        return [*common.scored(lines, rows, keys)]
    except UserError as fault:
        return [{"error": str(fault).removeprefix("--score:1: ")}]
    except Exception as fault:  # a line must not end the service for those behind it
        return [{"error": f"{type(fault).__name__}: {fault}"}]


def start():
    """Runs main with the flags of the command line."""
    options = {"description": __doc__, "console_outputs": common.RANK == 0}
    serve, flags = tyro.cli(Serve, return_unknown_args=True, **options)
    script = import_module(f"critic_{serve.critic}")

    # it reads as --score does and trains nothing, so its model may come from any folder
    main(script, tyro.cli(script.Run, args=[*flags, "--score", "-"]))


if __name__ == "__main__":
    common.launch(start)
