"""A run of ppo_loop.py one of whose ranks is killed; ppo_scenarios.py has the rest of what takes ranks."""

import os
import signal
import subprocess
import sys

import pytest
from faults import processes, until
from helpers import ROOT, run, succeeded

import common


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
    ranks = lambda: {pid: words for pid, _, words in processes() if out in words}
    try:
        until(lambda: common.steps_in(f"{out}/checkpoints") or process.poll() is not None, out, 180)
        assert process.poll() is None, log.read_text()
        [victim] = [pid for pid, words in ranks().items() if "RANK=1" in words]
        os.kill(victim, signal.SIGKILL)
        process.wait(timeout=60)
    finally:
        process.kill()  # nothing, if it has ended
    said = log.read_text()
    assert process.returncode and "SIGKILL" in said and "rank      : 1 (local_rank: 1)" in said, said
    until(lambda: not ranks(), "the end of all ranks", 60)

    step, newest = common.steps_in(f"{out}/checkpoints")[0]
    succeeded(run(sys.executable, *script, "--steps", step + 2, "--resume", newest))
    steps = [row["step"] for row in common.read_lines(f"{out}/metrics.jsonl") if "reward/mean" in row]
    assert steps == list(range(1, step + 3)), steps
    assert common.steps_in(f"{out}/checkpoints")[0][0] == step + 2 and os.path.isdir(f"{out}/hf")
