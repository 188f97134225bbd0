"""How a run ends when one of its ranks fails, or has a disk of its own."""

import os
import re
import signal
import subprocess
import sys

import pytest
from forked import processes, until
from helpers import ROOT, begin, ended, run, succeeded, torchrun

import common

ROWS = str(ROOT / "tests" / "rows.jsonl")
ALONE = """
import os, runpy, sys
os.makedirs(os.environ["RANK"])
os.chdir(os.environ["RANK"])  # as on a machine with a disk of its own
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def on_disks_of_their_own(tmp_path_factory):
    """Runs whose ranks share no disk, which they notice after half a minute: all start at once."""
    begun = {}
    for script in ("critic_fsdp.py", "critic_megatron.py", "ppo_loop.py"):
        folder = tmp_path_factory.mktemp(script)
        (folder / "alone.py").write_text(ALONE)
        few = () if script == "ppo_loop.py" else ("--rollouts", ROWS)
        command = (folder / "alone.py", ROOT / script, "--steps=1", *few)
        begun[script] = (folder, begin(2, command, cwd=folder))
    return begun


FAILS = """
import time
import common, {module}
critic, layout = {module}.{critic}
step = critic.update_critic
def fails(self, batch, rows):
    if common.RANK == 1 and self.updates == 1:
        {act}
    return step(self, batch, rows)
critic.update_critic = fails
config = {module}.Config(timeout_minutes=0.1, **layout)
run = {module}.Run(critic=config, rollouts={rows!r}, steps=9, eval_every=0, out_dir={out!r})
common.launch(lambda: {module}.main(run))
"""
FSDP = "DataParallelPPOCritic, {}"
MEGATRON = "MegatronPPOCritic, {'%s_model_parallel_size': 2}"


@pytest.mark.parametrize("module, critic, act, line", [
    ("critic_fsdp", FSDP, "raise common.UserError('--x 1: no')", "error on rank 1: --x 1: no"),
    ("critic_megatron", MEGATRON % "pipeline", "raise KeyError('oops')", "'oops'"),
    ("critic_megatron", MEGATRON % "tensor", "time.sleep(1000)",
     "error: another rank died or hangs"),
])  # fmt: skip
def test_when_one_rank_fails_all_end_and_a_message_is_shown(module, critic, act, line, tmp_path):
    script, words = tmp_path / "fails.py", {"rows": ROWS, "out": str(tmp_path / "out")}
    script.write_text(FAILS.format(module=module, critic=critic, act=act, **words))
    process = torchrun(2, script, timeout=120)
    assert process.returncode in (1, 2) and line in process.stderr, process.stderr


@pytest.mark.parametrize("script", ["critic_fsdp.py", "critic_megatron.py", "ppo_loop.py"])
def test_ranks_that_share_no_disk_end_before_the_first_step(script, on_disks_of_their_own):
    folder, begun = on_disks_of_their_own[script]
    process = ended(begun)
    words = rf"error: --out-dir out/{script[:-3]}: host \S+ cannot write there \(No such file.*\n"
    assert process.returncode == 2 and re.search(words, process.stderr), process.stderr
    assert "step 1/1" not in process.stdout and not list(folder.glob("*/out/*/checkpoints/*"))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
def test_a_killed_rank_ends_a_ppo_run_which_continues_from_its_checkpoint(tmp_path):
    """The checkpoint is resumed on one rank."""
    out, log = str(tmp_path / "out"), tmp_path / "log"
    flags = "--supervised-steps 0 --train-batch-size 16 --save-every 1 --eval-every 0"
    flags += f" --critic.timeout-minutes 0.2 --out-dir {out}"
    script = [str(ROOT / "ppo_loop.py"), *flags.split()]
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as file:
        command = [sys.executable, *launcher, *script, "--steps", "5000"]
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)

    ranks = lambda: {pid: words for pid, _, words in processes() if out in words}
    try:
        until(lambda: common.steps_in(f"{out}/checkpoints") or process.poll() is not None, out, 180)
        assert process.poll() is None, log.read_text()
        [victim] = [pid for pid, words in ranks().items() if "RANK=1" in words]
        os.kill(victim, signal.SIGKILL)
        process.wait(timeout=60)
    finally:
        process.kill()  # does nothing if it has ended

    said = log.read_text()
    assert process.returncode and "SIGKILL" in said, said
    assert "rank      : 1 (local_rank: 1)" in said, said
    until(lambda: not ranks(), "the end of all ranks", 60)
    step, newest = common.steps_in(f"{out}/checkpoints")[0]
    succeeded(run(sys.executable, *script, "--steps", step + 2, "--resume", newest))
    rows = common.read_lines(f"{out}/metrics.jsonl")
    steps = [row["step"] for row in rows if "reward/mean" in row]
    assert steps == list(range(1, step + 3)), steps
    assert common.steps_in(f"{out}/checkpoints")[0][0] == step + 2 and os.path.isdir(f"{out}/hf")
