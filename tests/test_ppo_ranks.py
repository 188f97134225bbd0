"""What takes several ranks of ppo_loop.py, see ppo_scenarios.py; and a run one of whose ranks is killed."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, ended, run, scenarios, succeeded
from ppo_scenarios import NAMES

import common


@pytest.fixture(scope="module")
def launched():
    """What all of them print, from one process: most of the time would go into importing everything again and again."""
    return ended(scenarios(1, "ppo_scenarios.py")[0])


@pytest.mark.parametrize("name", NAMES)
def test_on_several_ranks(name, launched):
    assert f"ok {name}:" in launched.stdout, launched.stdout[-5000:] + launched.stderr


def processes_of(word):
    """pid -> (command line, environment) of all processes with this word in their command line."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command, env = ((folder / name).read_bytes().decode().split("\0") for name in ("cmdline", "environ"))
        except OSError:  # it has ended, or is somebody else's
            continue
        if any(word in part for part in command):
            found[int(folder.name)] = command, env
    return found


def newest(out):
    """The last complete checkpoint, None if there is none."""
    steps = [int(path.name[5:]) for path in out.glob("checkpoints/step_*") if path.name[5:].isdigit()]
    return out / "checkpoints" / f"step_{max(steps)}" if steps else None


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
def test_a_killed_rank_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path):
    out = tmp_path / "out"
    script = (
        ROOT / "ppo_loop.py", "--supervised-steps", 0, "--train-batch-size", 16, "--save-every", 1, "--eval-every", 0,
        "--critic.timeout-minutes", 0.2, "--out-dir", out,
    )  # fmt: skip
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    words, env = tmp_path / "words", {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(words, "w") as file:
        process = subprocess.Popen(
            [str(x) for x in (*launcher, *script, "--steps", 5000)], env=env, stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + 180
        while newest(out) is None:
            assert process.poll() is None and time.monotonic() < deadline, words.read_text()
            time.sleep(0.1)
        (victim,) = [pid for pid, (_, env) in processes_of(str(out)).items() if "RANK=1" in env]
        os.kill(victim, signal.SIGKILL)
        process.wait(timeout=60)
    finally:
        process.kill() if process.poll() is None else None
    said = words.read_text()
    assert process.returncode != 0 and "Signal 9 (SIGKILL)" in said and "rank      : 1 (local_rank: 1)" in said, said
    while left := processes_of(str(out)):
        assert time.monotonic() < deadline + 60, left
        time.sleep(0.1)

    step = int(newest(out).name[5:])
    succeeded(run(sys.executable, *script, "--steps", step + 2, "--resume", newest(out)))
    steps = [row["step"] for row in common.read_metrics(out / "metrics.jsonl") if "reward/mean" in row]
    assert steps == list(range(1, step + 3)), steps
    assert newest(out).name == f"step_{step + 2}" and (out / "hf").is_dir()
