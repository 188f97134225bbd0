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


@pytest.mark.parametrize("name", NAMES)
def test_on_several_ranks(name):
    """All are started at once, from one process: to import everything again and again would take longest."""
    process = ended(scenarios(1, "ppo_scenarios.py")[0])
    assert f"ok {name}:" in process.stdout, process.stdout[-5000:] + process.stderr


def processes_of(word):
    """pid -> environment of all processes with this word in their command line."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "cmdline").read_text():
                found[int(folder.name)] = (folder / "environ").read_text().split("\0")
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
def test_a_killed_rank_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path):
    """It is resumed on one rank."""
    out, log = str(tmp_path / "out"), tmp_path / "log"
    flags = "--supervised-steps 0 --train-batch-size 16 --save-every 1 --eval-every 0"
    script = [str(ROOT / "ppo_loop.py"), *flags.split(), "--critic.timeout-minutes", "0.2", "--out-dir", out]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as file:
        process = subprocess.Popen([*launcher, *script, "--steps", "5000"], env=env, stdout=file, stderr=file)
    deadline = time.monotonic() + 180
    try:
        while not common.steps_in(f"{out}/checkpoints"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        [victim] = [pid for pid, env in processes_of(out).items() if "RANK=1" in env]
        os.kill(victim, signal.SIGKILL)
        process.wait(timeout=60)
    finally:
        process.kill()  # nothing, if it has ended
    said = log.read_text()
    assert process.returncode and "SIGKILL" in said and "rank      : 1 (local_rank: 1)" in said, said
    while left := processes_of(out):
        assert time.monotonic() < deadline + 60, left
        time.sleep(0.1)

    step, newest = common.steps_in(f"{out}/checkpoints")[0]
    succeeded(run(sys.executable, *script, "--steps", step + 2, "--resume", newest))
    steps = [row["step"] for row in common.read_lines(f"{out}/metrics.jsonl") if "reward/mean" in row]
    assert steps == list(range(1, step + 3)), steps
    assert common.steps_in(f"{out}/checkpoints")[0][0] == step + 2 and os.path.isdir(f"{out}/hf")
