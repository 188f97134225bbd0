"""Injects faults into whole runs of the three scripts, asserts what comes of each, and prints a table.

    python tests/faults.py                  all of them: some minutes on two cores
    python tests/faults.py NAME...          some of FAULTS, below
    python tests/faults.py --short          fewer of each, as test_faults.py runs them

A fault must not change how a run ends. Its last checkpoint (weights, optimizer, counters), exported weights, rollouts,
samples, metrics.jsonl (except times and memory) and what TensorBoard shows are compared, bit for bit, with those of a
run without faults. Ranks are forks of this process, see forked.py; `torchrun` below uses torchrun itself.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import math
import os
import pathlib
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = ROOT / "tests" / "rows.jsonl"
SCRIPTS = {  # ranks, flags
    "critic_fsdp": (2, ()),
    "critic_megatron": (2, ("--tensor-model-parallel-size", 2)),
    "ppo_loop": (1, ()),
}
STEPS = 8
CRITIC = (
    "--rollouts", ROWS, "--eval-rollouts", ROWS, "--train-batch-size", 16, "--ppo-mini-batch-size", 8,
    "--lr-scheduler-type", "cosine", "--lr-warmup-steps", 3,
)  # fmt: skip
PPO = (
    "--supervised-steps", 0, "--prompts", ROWS, "--eval-prompts", ROWS, "--prompt-key", "prompt", "--answer-key",
    "response", "--train-batch-size", 4, "--rollout-n", 2, "--max-response-length", 3, "--reward",
    f"{ROOT}/tests/ppo_scenarios.py:right_digits", "--kl-coef", 0.05, "--target-kl", 0.01, "--actor.lr", 1e-3,
    "--critic.lr", 1e-3, "--critic.ppo-mini-batch-size", 4, "--dump-rollouts",
)  # fmt: skip
PASSING = ("perf/", "time/")  # metrics that differ between equal runs


def flags_of(script, *flags):
    """The command line of a run of eight updates, with a checkpoint after each."""
    own = PPO if script == "ppo_loop" else CRITIC
    often = ("--steps", STEPS, "--save-every", 1, "--eval-every", 2)
    return [str(x) for x in (ROOT / f"{script}.py", *SCRIPTS[script][1], *own, *often, *flags)]


# ---- Processes ---------------------------------------------------------------------------------------------


def body(arguments, said, slow, lax, memory):
    """Runs a script on one rank, with its output in files of its own.

    slow: seconds by which the start of a save, each flush and each rename are delayed, so that a fault can hit them.
    lax: rewards of a file may have any size. memory: MiB that the steps may take on top of what exists before them.
    """
    os.setsid()
    said = f"{said}.{os.environ['RANK']}"
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.path.insert(0, str(ROOT))
    import common

    def slowly(function):
        return lambda *args: (time.sleep(slow), function(*args))[1]

    if slow:
        common.published, common.flush_to_disk = slowly(common.published), slowly(common.flush_to_disk)
        os.rename, os.replace = slowly(os.rename), slowly(os.replace)
    if lax:

        class AnyReward(common.Rollout):
            reward: float | None = None
            rewards: list[float] | None = None

        common.Rollout = AnyReward
    if memory:
        begin = common.Logger.__init__

        def begin_to_count(*args):
            begin(*args)
            (kib,) = re.findall(r"VmData:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
            resource.setrlimit(resource.RLIMIT_DATA, (int(kib) * 2**10 + memory * 2**20,) * 2)

        common.Logger.__init__ = begin_to_count
    common.write_report = lambda *_: None  # two seconds of matplotlib
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


class Job:
    """A script on forked ranks."""

    def __init__(self, script, out, *flags, ranks=None, slow=0.0, lax=False, memory=None):
        import forked

        self.said = tempfile.mktemp(prefix="said.", dir=folder())
        arguments = flags_of(script, "--out-dir", out, *flags)
        self.pids = forked.start(ranks or SCRIPTS[script][0], body, arguments, self.said, slow, lax, memory)
        self.left = list(self.pids)
        self.codes = {}

    def poll(self):
        """Whether all ranks have ended."""
        for pid in list(self.left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.left.remove(pid)
                self.codes[self.pids.index(pid)] = os.waitstatus_to_exitcode(status)
        return not self.left

    def wait(self, timeout=240):
        """Exit codes by rank. Like torchrun, it sends SIGTERM to the other ranks once one has failed. No process that
        a rank started may outlive it."""
        deadline = time.monotonic() + timeout
        told = False
        while not self.poll():
            assert time.monotonic() < deadline, f"hangs: {self.text(0)}"
            if any(self.codes.values()) and not told:
                self.send(signal.SIGTERM)
                told = True
            time.sleep(0.02)
        assert not of_sessions(self.pids)
        return [self.codes[rank] for rank in range(len(self.pids))]

    def send(self, number, ranks=None):
        for rank, pid in enumerate(self.pids):
            if pid in self.left and (ranks is None or rank in ranks):
                os.kill(pid, number)

    def kill(self, ranks=None):
        """kill -9 of these ranks, or of all."""
        self.send(signal.SIGKILL, ranks)
        self.wait(60)

    def text(self, rank):
        """(stdout, stderr) of a rank."""
        return [pathlib.Path(f"{self.said}.{rank}.{name}").read_text() for name in ("stdout", "stderr")]

    def succeeds(self):
        codes = self.wait()
        assert codes == [0] * len(codes), (codes, self.text(0))
        return self.text(0)[0]

    def ends_with(self, pattern):
        """Rank 0 ends with exit status 2 and one line without a traceback; others do the same, or were ended first."""
        codes, error = self.wait(), self.text(0)[1]
        assert codes[0] == 2 and set(codes[1:]) <= {2, -signal.SIGTERM}, (codes, error)
        assert error.startswith("error: ") and error.count("\n") == 1 and re.search(pattern, error), error


def of_sessions(pids):
    """Processes in the sessions of these processes, which have ended."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in pids and fields[0] != "Z":
                found.append(int(path.name))
    return found


def ranks_of(out):
    """pid -> environment of the processes that have this folder on their command line."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(out).encode() in (path / "cmdline").read_bytes().split(b"\0"):
                pairs = (path / "environ").read_bytes().decode().split("\0")
                found[int(path.name)] = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return found


def until(happens, what, timeout=240):
    """Waits until happens() gives something true."""
    deadline = time.monotonic() + timeout
    while not happens():
        assert time.monotonic() < deadline, f"does not happen: {what}"
        time.sleep(0.005)


# ---- What a run leaves -------------------------------------------------------------------------------------


def rows_of(path):
    """The rows of a JSONL file, if it is there, without a last line that is not complete yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def updates_of(out):
    """Steps of the updates that a run has logged."""
    return [row["step"] for row in rows_of(out / "metrics.jsonl") if "critic/vf_loss" in row]


def steps_of(out):
    """Steps of the complete checkpoints, the last first."""
    names = [path.name for path in out.glob("checkpoints/step_*")]
    return sorted((int(name[5:]) for name in names if name[5:].isdigit()), reverse=True)


def end_of(out):
    """Everything that two equal runs have in common."""
    metrics = []
    for row in rows_of(out / "metrics.jsonl"):
        metrics.append({key: x for key, x in row.items() if not key.startswith(PASSING)})
    files = [*out.glob("*hf/*.safetensors"), *out.glob("rollouts/*")]
    return {
        "checkpoint": state_of(out / "checkpoints" / f"step_{steps_of(out)[0]}"),
        "files": {str(path.relative_to(out)): path.read_bytes() for path in files},
        "metrics": metrics,
        "samples": rows_of(out / "samples.jsonl"),
        "board": board_of(out),
    }


def state_of(checkpoint):
    """name -> checksum of each tensor, and content of each JSON file; the order of tensors in a file may differ."""
    found = {}
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if path.name in ("trainer.json", "loop.json"):
            found[name] = json.loads(path.read_text())
        if path.suffix == ".safetensors":
            found |= {f"{name} {key}": checksum(x) for key, x in load_file(path).items()}
    return found


def checksum(tensor):
    assert tensor.isfinite().all()
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def board_of(out):
    """(name, step) -> number, as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it would report that a run was resumed
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith(PASSING)]
    return {(tag, event.step): event.value for tag in tags for event in board.Scalars(tag)}


def assert_same_end(out, script):
    """Nothing is lost, nothing is there twice, nothing is left over."""
    ours, theirs = end_of(out), end_of(golden(script))
    for part, expected in theirs.items():
        assert ours[part] == expected, (out, part, str(ours[part])[:2000], str(expected)[:2000])
    assert updates_of(out) == list(range(1, STEPS + 1)), updates_of(out)
    assert steps_of(out) == list(range(STEPS, 0, -1)), steps_of(out)
    over = [path for path in out.rglob("*") if path.suffix in (".tmp", ".gone")]
    assert not over, over


def checkpoint(out, step=STEPS):
    return out / "checkpoints" / f"step_{step}"


def drop_steps(out, steps):
    for step in steps:
        shutil.rmtree(checkpoint(out, step))


def add_steps(out, script, steps):
    """Puts these checkpoints of the run without faults into a folder."""
    for step in steps:
        shutil.copytree(checkpoint(golden(script), step), checkpoint(out, step))


@functools.cache
def folder():
    """Where everything goes."""
    return pathlib.Path(tempfile.mkdtemp(prefix="faults."))


@functools.cache
def golden(script):
    """The folder of a run without faults."""
    out = folder() / f"{script}.golden"
    Job(script, out).succeeds()
    return out


# ---- Faults: each yields (what, how many times, what came of it) -------------------------------------------


def kills(short):
    """kill -9 of all ranks or of one at random moments, each time followed by --resume auto, until the run is through.
    The last run saves in the background, and so do half of those that are killed in a save."""
    for script, times in {"critic_fsdp": 7, "critic_megatron": 6, "ppo_loop": 7}.items():
        if short and script != "critic_fsdp":  # logger() kills runs of the PPO loop
            continue
        rng, out, times = random.Random(script), folder() / f"{script}.kills", 2 if short else times
        saving = sum(kill_once(script, out, i, rng) for i in range(times))
        Job(script, out, "--resume", "auto", "--async-save").succeeds()
        assert_same_end(out, script)
        assert saving or short, "none in a save"
        yield f"kill -9, {script}", times, f"{saving} of them in a save; the same end"


def kill_once(script, out, i, rng):
    """Kills a run for the i-th time: before its first step, after a step, or in a save -> whether it was in a save."""
    flags = ("--async-save",) if i % 4 in (1, 2) else ()
    before = steps_of(out)
    job = Job(script, out, "--resume", "auto", *flags, slow=0.03)
    moment, longest = (("save", 0.2), ("step", 0.6), ("save", 0.2), ("start", 4.0))[i % 4]
    if moment == "save":
        until(lambda: list(out.glob("checkpoints/step_*.tmp")) or job.poll(), "a save")
    if moment == "step":
        until(lambda: steps_of(out) > before or job.poll(), "a step")
    time.sleep(rng.uniform(0, longest))
    one = i % 3 == 1 and len(job.pids) > 1  # then the other rank has to find out
    job.kill([rng.randrange(len(job.pids))] if one else None)
    return bool(list(out.glob("checkpoints/step_*.tmp")))


def background(short):
    """--async-save, slowed down so that training goes on during a save: each checkpoint still is that of its step."""
    for script in list(SCRIPTS)[: 1 if short else None]:
        out = folder() / f"{script}.background"
        Job(script, out, "--async-save", slow=0.05 if short else 0.1).succeeds()
        assert_same_end(out, script)
        for step in range(1, STEPS + 1):
            ours, theirs = (state_of(checkpoint(run, step)) for run in (out, golden(script)))
            assert ours == theirs, (script, step)
        yield f"no fault, --async-save, {script}", STEPS, "each save the same as one that training waits for"


def logger(short):
    """kill -9 while the logs of earlier runs are rewritten: metrics.jsonl, TensorBoard's, samples.jsonl."""
    for script in ("critic_fsdp", "ppo_loop")[short:]:
        out, names = folder() / f"{script}.logger", ["metrics.jsonl.tmp", "tensorboard", "samples.jsonl.tmp"]
        names = names if script == "ppo_loop" else names[:2]
        shutil.copytree(golden(script), out)
        drop_steps(out, range(5, STEPS + 1))
        os.truncate(out / "metrics.jsonl", (out / "metrics.jsonl").stat().st_size - 7)  # as a crash leaves it
        for name in names:
            kill_at(script, out, name)
        Job(script, out, "--resume", "auto").succeeds()
        assert_same_end(out, script)
        yield f"kill -9, logs of {script}", len(names), "while they are rewritten; the same end"


def kill_at(script, out, name):
    """kill -9 when this file, or a new one in TensorBoard's folder, appears."""
    seen = set((out / "tensorboard").iterdir())
    job = Job(script, out, "--resume", "auto", slow=0.2)
    new = lambda: set((out / "tensorboard").iterdir()) - seen
    until(lambda: job.poll() or (new() if name == "tensorboard" else (out / name).exists()), name)
    assert job.left, job.text(0)
    job.kill()


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


CHANGED = "damaged, .* is not what was written; use an earlier checkpoint"
DAMAGE = {  # name -> file (None: the largest), what happens to it, what is said
    "truncated": (None, halve, CHANGED),
    "missing": (None, os.unlink, "damaged, .* is missing; use an earlier checkpoint"),
    "one bit": (None, flip, CHANGED),
    "one bit of JSON": ("trainer.json", flip, CHANGED),
    "no manifest": ("manifest.json", os.unlink, "no complete checkpoint here, no readable manifest.json"),
    "one bit of the manifest": (
        "manifest.json",
        flip,
        "damaged|no complete checkpoint here, no readable manifest",
    ),
}


def damage(short):
    """--resume of a damaged or foreign checkpoint; --resume auto where the last one is damaged."""
    for script in list(SCRIPTS)[: 1 if short else None]:
        kinds = list(DAMAGE) if script == "critic_fsdp" else list(DAMAGE)[1::2]
        for kind in ("one bit", "no manifest") if short else kinds:
            resume_damaged(script, kind)
        yield f"damage, {script}", 2 if short else len(kinds), "PATH: one line, exit 2; auto: the one before"
        if short:
            continue
        theirs = ("critic_fsdp", "critic_megatron") if script == "ppo_loop" else ("ppo_loop",)
        others = [folder(), *(checkpoint(golden(name)) for name in theirs)]
        if script != "ppo_loop":
            others.append(checkpoint(golden("ppo_loop")) / "actor")
        fits = "is of another script|not a checkpoint of|no complete checkpoint|does not fit"
        for other in others:
            Job(script, folder() / "foreign", "--resume", other).ends_with(f"--resume {other}.*({fits})")
        out = folder() / f"{script}.foreign"
        shutil.copytree(golden(script), out)
        flag = "--actor.override-config" if script == "ppo_loop" else "--override-config"
        for resume in (checkpoint(out), "auto"):
            job = Job(script, out, flag, '{"hidden_size": 32}', "--resume", resume)
            job.ends_with(f"--resume {checkpoint(out)}.*is of another model: ")
        assert_same_end(out, script)
        yield f"foreign, {script}", len(others) + 2, "one line, exit 2, auto too; nothing is touched"


def resume_damaged(script, kind):
    """Continues a run whose last checkpoint has this damage: by its path it is refused, auto takes the one before."""
    out = folder() / f"{script}.{kind.replace(' ', '_')}"
    shutil.copytree(golden(script), out)
    drop_steps(out, range(1, STEPS - 1))
    name, act, pattern = DAMAGE[kind]
    files = [path for path in checkpoint(out).rglob(name or "*") if path.is_file()]
    act(max(files, key=lambda path: path.stat().st_size))
    pattern = rf"{checkpoint(out)}(/\S+)?: ({pattern})"
    Job(script, out, "--resume", checkpoint(out)).ends_with(f"--resume {pattern}")
    said = Job(script, out, "--resume", "auto").succeeds()
    assert re.search(f"auto passes over {pattern}", said), said
    add_steps(out, script, range(1, STEPS - 1))
    assert_same_end(out, script)
    shutil.rmtree(out)


def full(short):
    """A disk that is full in a save: a small tmpfs, which gets more room later."""
    for script in list(SCRIPTS)[: 1 if short else None]:
        disk = folder() / f"{script}.disk"
        disk.mkdir()
        kib = sum(path.stat().st_size for path in golden(script).rglob("*") if path.is_file()) // 2048
        mount = ("mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", disk)
        if subprocess.run(mount, capture_output=True).returncode:
            yield f"disk full, {script}", 0, "left out: no right to mount a tmpfs"
            return
        try:
            out = disk / "out"
            job = Job(script, out)
            codes, error = job.wait(), job.text(0)[1]
            assert codes[0] == 1 and "error: the disk is full (No space left" in error, (codes, error)
            there = steps_of(out)
            assert there and there[0] < STEPS, there
            subprocess.run(("mount", "-o", f"remount,size={4 * kib}k", disk), check=True)
            said = Job(script, out, "--resume", "auto").succeeds()
            assert f"step_{there[0]}, " in said and "auto passes" not in said, said
            assert_same_end(out, script)
        finally:
            subprocess.run(("umount", disk), check=True)
        yield f"disk full, {script}", 1, f"says so after step {there[0]}; with more room the same end"


def memory(short):
    """A rank that may not have as much memory as a step takes: --resume auto halves the token budget until it fits. The
    metrics are those of a run with enough memory, up to rounding."""
    wide = ("--train-batch-size", 192, "--ppo-mini-batch-size", 192, "--steps", 1, "--eval-every", 0)
    wide += ("--override-config", '{"intermediate_size": 8192}', "--ppo-max-token-len-per-gpu", 1024)
    for script in list(SCRIPTS)[: 1 if short else 2]:
        out, other = folder() / f"{script}.memory", folder() / f"{script}.roomy"
        Job(script, other, *wide).succeeds()
        tries = 0
        while any((job := Job(script, out, *wide, "--resume", "auto", memory=300 if short else 200)).wait()):
            tries += 1
            said = job.text(0)[1] + job.text(1)[1]
            assert "can't allocate memory" in said, said
            assert "out of memory; --resume auto continues with half the token budget" in said, said
            assert tries < 5, said
        assert f"so --ppo-max-token-len-per-gpu 1024 -> {1024 >> tries}" in job.text(0)[0], (
            tries,
            job.text(0),
        )
        for ours, theirs in zip(*(rows_of(run / "metrics.jsonl") for run in (out, other)), strict=True):
            own = [name for name in theirs if not name.startswith(PASSING)]
            assert all(math.isclose(ours[name], theirs[name], rel_tol=1e-5, abs_tol=1e-6) for name in own)
        yield (
            f"out of memory, {script}",
            tries,
            f"continues with {1024 >> tries} tokens, not 1,024; the same end",
        )


def sigterm(short):
    """SIGTERM to one rank or to all: the run saves, and ends within a step."""
    for script, ranks in {"critic_fsdp": [1], "critic_megatron": None, "ppo_loop": None}.items():
        if short and script != "critic_fsdp":
            continue
        out = folder() / f"{script}.sigterm"
        job = Job(script, out, "--save-every", 0, slow=0.01)
        until(lambda out=out: len(updates_of(out)) >= 3, "a step")
        before = updates_of(out)[-1]
        job.send(signal.SIGTERM, ranks)
        assert set(job.wait(60)) <= {143, -signal.SIGTERM} and job.codes[0] == 143, (job.codes, job.text(0))
        (saved,) = steps_of(out)
        assert saved <= before + 2, (saved, before)
        assert f"stopped after step {saved} of {out}; continue with" in job.text(0)[0], job.text(0)
        Job(script, out, "--resume", "auto").succeeds()
        add_steps(out, script, range(1, saved))  # which --save-every 0 has left out
        assert_same_end(out, script)
        yield f"SIGTERM, {script}", 1, f"{'to one rank: ' if ranks else ''}saved, exit 143; the same end"


SLOW = """
import runpy, sys, time
sys.path.insert(0, {root!r})
import common
flush = common.flush_to_disk
common.flush_to_disk = lambda path: (time.sleep(0.1), flush(path))
common.write_report = lambda *_: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def agents_of(name, out, nodes):
    """Starts critic_fsdp.py, with slow saves, on two ranks -> torchrun for one node, or one for each of two nodes."""
    flags = ("--out-dir", out, "--resume", "auto", "--timeout-minutes", 0.4 if "hangs" in name else 3)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    meet = ("--standalone",)
    if nodes == 2:  # they meet in a file, which needs no port
        meet = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file")
        meet += ("--rdzv-endpoint", folder() / f"{name}.meet", "--rdzv-id", name)
        # torchrun counts a restart on the node whose rank failed, and ranks look each other up under that count: with
        # one store for all starts, ranks of the other node would find those of the first start
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    wrapper = folder() / "slow.py"
    wrapper.write_text(SLOW.format(root=str(ROOT)))
    command = (sys.executable, "-m", "torch.distributed.run", *meet, "--nproc-per-node", 2 // nodes)
    command += ("--max-restarts", 1, wrapper, *flags_of("critic_fsdp", *flags))
    agents = []
    for node in range(nodes):
        with open(folder() / f"{name}.{node}.said", "w") as file:
            agents.append(subprocess.Popen(list(map(str, command)), env=env, stdout=file, stderr=file))
    return agents


def under_torchrun(name, nodes, fault):
    """One run that a fault hits after its second update -> (folder, exit codes, what was printed, seconds from the
    fault to its end)."""
    name = name.replace(" ", "_")
    out = folder() / f"torchrun.{name}"
    agents = agents_of(name, out, nodes)
    try:
        until(lambda: len(updates_of(out)) >= 2 or any(a.poll() is not None for a in agents), name)
        start = time.monotonic()
        fault(out, agents)
        codes = [agent.wait(timeout=300) for agent in agents]
        seconds = time.monotonic() - start
        said = "".join((folder() / f"{name}.{node}.said").read_text() for node in range(nodes))
        until(lambda: not ranks_of(out), f"all of {name} have ended", 60)
        return out, codes, said, seconds
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        for pid in ranks_of(out):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def to_rank(number):
    def fault(out, agents):
        (victim,) = [pid for pid, env in ranks_of(out).items() if env.get("RANK") == "1"]
        os.kill(victim, number)

    return fault


TORCHRUN = {  # name -> nodes, fault
    "rank killed": (1, to_rank(signal.SIGKILL)),
    "rank hangs": (1, to_rank(signal.SIGSTOP)),
    "rank killed, 2 nodes": (2, to_rank(signal.SIGKILL)),
    "rank hangs, 2 nodes": (2, to_rank(signal.SIGSTOP)),
    "SIGTERM": (1, lambda out, agents: agents[0].terminate()),
    "torchrun killed": (1, lambda out, agents: agents[0].kill()),
}


def torchrun(short):
    """A rank dies or hangs, and torchrun --max-restarts 1 brings the run back by itself; SIGTERM to torchrun, kill -9 of
    torchrun."""
    if short:
        return
    golden("critic_fsdp")
    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda name: under_torchrun(name, *TORCHRUN[name]), TORCHRUN))
    for name, (out, codes, said, seconds) in zip(TORCHRUN, ended, strict=True):
        if name in ("SIGTERM", "torchrun killed"):
            outcome = "saved, then ended" if name == "SIGTERM" else "its ranks end too"
            step = steps_of(out)[0]
            assert 0 not in codes and 1 <= step < STEPS, (name, codes, said)
            assert name != "SIGTERM" or f"stopped after step {step} of {out}" in said, said
            Job("critic_fsdp", out, "--resume", "auto").succeeds()
        else:
            outcome = f"back by itself, ended after {seconds:.0f} s"
            assert codes == [0] * len(codes) and said.count("resume     ") >= 2, (name, codes, said[-5000:])
        assert_same_end(out, "critic_fsdp")
        yield f"torchrun, {name}", 1, f"{outcome}; the same end"


def storm(short):
    """Rewards so large that each gradient overflows: of critics by a file that `lax` lets them read, of PPO by a cost of
    the KL. After ten skipped updates the run ends with a critic that is what it was, and the rows that it leaves make
    the skipped update again."""
    for script in list(SCRIPTS)[: 1 if short else None]:
        ppo, out, again = script == "ppo_loop", folder() / f"{script}.storm", folder() / f"{script}.again"
        shutil.copytree(golden(script), out)
        lines = [json.dumps({**row, "reward": 1e30}) + "\n" for row in rows_of(ROWS)]
        (folder() / "storm.jsonl").write_text("".join(lines))
        bad = ("--kl-coef", 1e30, "--target-kl", "None") if ppo else ("--rollouts", folder() / "storm.jsonl")
        job = Job(script, out, *bad, "--steps", STEPS + 12, "--resume", "auto", lax=True)
        rows = out / "skipped_rows.jsonl"
        job.ends_with(f"10 updates in a row were skipped.* {rows}, for --rollouts with --recorded-values")
        last = STEPS + 9
        assert steps_of(out)[0] == last and len(rows_of(rows)) == (8 if ppo else 16)
        before, after = (state_of(checkpoint(out, step)) for step in (STEPS, last))
        of_critic = [name for name in after if not name.startswith("actor/")]
        changed = [name for name in of_critic if after[name] != before[name] and not name.endswith(" rng")]
        assert before.keys() == after.keys() and {name[-5:] for name in changed} == {".json"}, changed
        resume = checkpoint(out, last) / ("critic" if ppo else "")
        flags = ("--rollouts", rows, "--recorded-values", "--resume", resume, "--steps", last + 1)
        name = "critic_fsdp" if ppo else script
        Job(name, again, *flags, ranks=SCRIPTS[script][0], lax=True).succeeds()
        (row,) = [row for row in rows_of(again / "metrics.jsonl") if "critic/vf_loss" in row]
        assert row["step"] == last + 1 and row["critic/skipped_steps"] and row["critic/grad_norm"] is None, (
            row
        )
        yield f"NaN storm, {script}", 1, "ends after 10 updates, the critic untouched; its rows make it again"


# ---- Fuzz: hypothesis, the same inputs each time -----------------------------------------------------------


def in_a_fork(function, *args):
    """What a function returns that imports common, which this process must not."""
    import forked

    with tempfile.NamedTemporaryFile("r", dir=folder()) as file:
        forked.run(1, note_result, function, args, file.name, timeout=1200)
        return json.load(file)


def note_result(function, args, path):
    sys.path.insert(0, str(ROOT))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    result = function(*args)
    with open(path, "w") as file:
        json.dump(result, file)


def tried(n, strategy, check):
    """Calls check with n inputs."""
    from hypothesis import HealthCheck, Phase, given, settings

    options = {"derandomize": True, "database": None, "deadline": None, "phases": (Phase.generate,)}
    settings(max_examples=n, suppress_health_check=list(HealthCheck), **options)(given(strategy)(check))()


def one_line(error):
    text = str(error)
    assert text and "\n" not in text and len(text) < 2000, repr(text)
    return text


def rows(short):
    """JSONL rows."""
    counts = in_a_fork(fuzz_rows, 150 if short else 1000)
    yield "fuzz, JSONL rows", sum(counts), f"{counts[0]} files read, {counts[1]} refused in one line"


def fuzz_rows(n):
    from hypothesis import strategies as st

    import common

    tokenizer, counts = common.char_tokenizer(), [0, 0]
    model_config = common.AutoConfig.for_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=32)
    keys = (
        "prompt",
        "response",
        "prompt_ids",
        "response_ids",
        "reward",
        "rewards",
        "values",
        "response_mask",
    )
    keys += ("truncated", "messages", "images")
    number = st.one_of(st.integers(-2, 2), st.integers(), st.floats(), st.just(10**400))
    leaf = st.one_of(number, st.booleans(), st.none(), st.text(max_size=4))
    value = st.recursive(
        leaf, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=2)
    )
    message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]), "content": value})
    good = st.sampled_from([
        {"prompt": "1+1=", "response": "2", "reward": 1.0},
        {"prompt_ids": [5, 6], "response_ids": [7, 8], "rewards": [0.5, 1], "values": [0, 1], "response_mask": [1, 0]},
    ])  # fmt: skip
    changes = st.dictionaries(
        st.sampled_from(keys), st.one_of(value, st.lists(number, max_size=3), st.lists(message))
    )
    row = st.builds(lambda a, b, gone: {k: x for k, x in {**a, **b}.items() if k not in gone}, good,
                    st.one_of(st.just({}), changes), st.sets(st.sampled_from(keys), max_size=1))  # fmt: skip
    text = st.one_of(row, value).map(json.dumps).map(str.encode)
    line = st.one_of(text, st.binary(max_size=12))

    def check(case):
        lines, with_values, skip = case
        options = {"with_values": with_values, "skip_bad_rows": skip}
        try:
            batch = common.read_rows(lines, tokenizer, model_config, **options)
        except common.UserError as error:
            one_line(error)
            counts[1] += 1
            return
        counts[0] += 1
        batch.check()
        assert batch.token_level_rewards.isfinite().all() and 0 <= int(batch.input_ids.min())
        assert (
            int(batch.input_ids.max()) < len(tokenizer)
            and max(batch.lengths) <= 32
            and len(batch) <= len(lines)
        )
        assert batch.values is None or batch.values.isfinite().all()

    tried(n, st.tuples(st.lists(line, min_size=1, max_size=3), st.booleans(), st.booleans()), check)
    return counts


def flags(short):
    """Values of flags."""
    for script, n in {"critic_fsdp": 50, "critic_megatron": 50, "ppo_loop": 15}.items():
        if short and script != "critic_fsdp":
            continue
        counts = in_a_fork(fuzz_flags, 15 if short else n, script)
        outcome = f"{counts[0]} runs of one step, {counts[1]} refused in one line"
        yield f"fuzz, flags of {script}", sum(counts), outcome


def fuzz_flags(n, script):
    import huggingface_hub
    from hypothesis import strategies as st

    huggingface_hub.constants.HF_HUB_OFFLINE = True  # else it would look for a model of that name
    import common

    module, counts = importlib.import_module(script), [0, 0]
    common.write_report = lambda *_: None
    numbers = {
        int: st.sampled_from([-1, 0, 1, 2, 3, 7, 1000]),
        float: st.sampled_from([-1.0, 0.0, 1e-45, 1e-3, 0.5, 1.0, 2.0, 1e38, float("inf"), float("nan")]),
        bool: st.booleans(),
        str: st.sampled_from(
            ["", "x", "{", "{}", "[]", "null", '{"num_hidden_layers": 0}', "/", "é", str(ROWS)]
        ),
        type(None): st.none(),
    }
    left_as_they_are = {
        "critic",
        "actor",
        "vllm",
        "backend",
        "rollout",
        "model",
        "steps",
        "train_batch_size",
        "plan",
    }
    left_as_they_are |= {"supervised_steps", "out_dir"}

    def of(kind):
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Literal:
            return st.sampled_from([*args, "x"])
        if origin is tuple:
            return st.lists(of(args[0]), min_size=len(args), max_size=len(args)).map(tuple)
        return st.one_of(*map(of, args)) if args else numbers[kind]

    own, small = (
        {"steps": 1, "eval_every": 0, "out_dir": str(folder() / f"{script}.flags")},
        '{"num_hidden_layers": 1}',
    )
    if script == "ppo_loop":
        run = module.parse([str(x) for x in PPO if x != "--dump-rollouts"])
        critic = dataclasses.replace(run.critic, override_config=small)
        actor = dataclasses.replace(run.actor, override_config=small, ppo_mini_batch_size=4)
        parts = {"": dataclasses.replace(run, **own), "critic": critic, "actor": actor, "vllm": run.vllm}
    else:
        run = module.Run(rollouts=str(ROWS), train_batch_size=4, **own)
        parts = {"": run, "critic": module.Config(ppo_mini_batch_size=4, override_config=small)}
    choices = []
    for part, config in parts.items():
        for name, kind in typing.get_type_hints(type(config)).items():
            if name not in left_as_they_are:
                choices.append((part, name, of(kind)))
    one = st.sampled_from(choices).flatmap(lambda x: st.tuples(st.just(x[0]), st.just(x[1]), x[2]))

    def check(changes):
        configs = dict(parts)
        for part, name, x in changes:
            configs[part] = dataclasses.replace(configs[part], **{name: x})
        run = dataclasses.replace(configs.pop(""), **configs)
        try:
            if script != "ppo_loop" and (mistake := module.mistake_in(run)):  # as the script's own start does
                raise common.UserError(mistake)
            module.main(run)
            counts[0] += 1
        except common.UserError as error:
            assert "--" in one_line(error), error
            counts[1] += 1
        except BaseException:
            print(script, changes, file=sys.stderr)
            raise

    tried(n, st.lists(one, min_size=1, max_size=2), check)
    return counts


def folders(short):
    """Bytes of checkpoints changed, removed or added, and files removed or swapped."""
    for script in list(SCRIPTS)[: 1 if short else None]:
        n = in_a_fork(fuzz_folders, 60 if short else 200, checkpoint(golden(script)))
        yield f"fuzz, a checkpoint of {script}", n, "each change is noticed, in one line"


def fuzz_folders(n, path):
    from hypothesis import strategies as st

    import common

    common.setup_distributed()
    files, count = sorted(p for p in path.rglob("*") if p.is_file()), [0]
    name = st.sampled_from(["flip", "set", "delete", "insert", "cut", "append", "unlink", "swap", "empty"])
    common.verify(str(path))

    def check(case):
        file, act, place, byte = case
        old = file.read_bytes()
        at, other = int(place * (len(old) - 1)), files[byte % len(files)].read_bytes()
        new = {
            "flip": old[:at] + bytes([old[at] ^ (1 << byte % 8)]) + old[at + 1 :],
            "set": old[:at] + bytes([byte]) + old[at + 1 :],
            "delete": old[:at] + old[at + 1 + byte % 3 :],
            "insert": old[:at] + bytes([byte]) + old[at:],
            "cut": old[:at],
            "append": old + bytes([byte]),
            "unlink": None,
            "swap": other,
            "empty": b"",
        }[act]
        if new == old:
            return
        count[0] += 1
        try:
            file.unlink() if new is None else file.write_bytes(new)
            common.verify(str(path))
        except common.UserError as error:
            assert one_line(error).startswith("--resume /"), error
        else:
            raise AssertionError(f"{file}: {act} at {at}, {byte}: not noticed")
        finally:
            file.write_bytes(old)

    tried(n, st.tuples(st.sampled_from(files), name, st.floats(0, 1), st.integers(0, 255)), check)
    common.verify(str(path))
    return count[0]


# ------------------------------------------------------------------------------------------------------------

FAULTS = (kills, background, logger, damage, full, memory, sigterm, torchrun, storm, rows, flags, folders)


def main(names, short):
    warnings.filterwarnings("ignore")  # of Megatron, about packages that are not installed
    # what every run imports, once for all of them
    import forked  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    import tyro  # noqa: F401

    table, start = [], time.monotonic()
    try:
        for fault in [fault for fault in FAULTS if not names or fault.__name__ in names]:
            began = time.monotonic()
            for what, times, outcome in fault(short):
                table.append((what, str(times), outcome, f"{time.monotonic() - began:.1f}"))
                print("ok", *table[-1], sep="  ", flush=True)
                began = time.monotonic()
    finally:
        shutil.rmtree(folder(), ignore_errors=True)
    total = str(sum(int(times) for _, times, *_ in table))
    table.append(("all", total, "nothing lost", f"{time.monotonic() - start:.1f}"))
    table.insert(0, ("fault", "times", "outcome", "seconds"))
    wide = [max(len(row[i]) for row in table) for i in range(4)]
    for what, times, outcome, seconds in table:
        print(f"{what:{wide[0]}}  {times:>{wide[1]}}  {outcome:{wide[2]}}  {seconds:>{wide[3]}}")


if __name__ == "__main__":
    given = [name for name in sys.argv[1:] if name != "--short"]
    if wrong := set(given) - {fault.__name__ for fault in FAULTS}:
        sys.exit(
            f"no such fault: {', '.join(wrong)}; there are {', '.join(fault.__name__ for fault in FAULTS)}"
        )
    main(given, "--short" in sys.argv)
