"""Injects faults into whole runs of the three scripts, and prints what came of each. Every outcome is asserted.

    python tests/faults.py                  all, some minutes on two cores
    python tests/faults.py NAME...          some of FAULTS, below
    python tests/faults.py --short          fewer of each, as test_faults.py runs them

What a fault must not change is the end of the run: each byte of the last checkpoint (weights, optimizer, counters),
of metrics.jsonl (but for times and memory) and of the samples, and what TensorBoard shows, against a run that nothing
has hit. Ranks are forks of this process, see forked.py; what is said of torchrun is tried with torchrun itself.
"""

import contextlib
import dataclasses
import functools
import hashlib
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
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = ROOT / "tests" / "rows.jsonl"
SCRIPTS = {  # ranks, flags: eight updates, a checkpoint after each
    "critic_fsdp": (2, ()),
    "critic_megatron": (2, ("--tensor-model-parallel-size", 2)),
    "ppo_loop": (1, ()),
}
STEPS = 8
CRITIC = (
    "--rollouts", ROWS, "--eval-rollouts", ROWS, "--train-batch-size", 16, "--ppo-mini-batch-size", 8,
    "--lr-scheduler-type", "cosine", "--lr-warmup-steps-ratio", 0.2,
)  # fmt: skip
PPO = (
    "--supervised-steps", 0, "--prompts", ROWS, "--eval-prompts", ROWS, "--prompt-key", "prompt", "--answer-key",
    "response", "--train-batch-size", 4, "--rollout-n", 2, "--max-response-length", 3, "--reward",
    f"{ROOT}/tests/ppo_scenarios.py:right_digits", "--kl-coef", 0.05, "--target-kl", 0.01, "--kl-horizon", 100,
    "--actor.lr", 1e-3, "--critic.lr", 1e-3, "--critic.ppo-mini-batch-size", 4, "--dump-rollouts",
)  # fmt: skip
PASSING = ("perf/", "time/", "memory/", "sync/")  # metrics that no two runs share


def flags_of(script, *flags):
    """The command line of a run of eight updates."""
    own = PPO if script == "ppo_loop" else CRITIC
    often = ("--steps", STEPS, "--save-every", 1, "--eval-every", 2)
    return [str(x) for x in (ROOT / f"{script}.py", *SCRIPTS[script][1], *own, *often, *flags)]


# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------


def body(arguments, said, slow, lax, memory):
    """Of a rank: the script, with what it prints in a file of its own; slow: seconds that the beginning of a save, each
    flush and each rename take longer, so that faults find one at work; lax: rewards and values may be of any size;
    memory: MiB that the steps may take beside what is there before them."""
    os.setsid()
    said = f"{said}.{os.environ['RANK']}"
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.path.insert(0, str(ROOT))
    import common

    def slowly(function):
        return lambda *args: (time.sleep(slow), function(*args))[1]

    if slow:
        common.flush_to_disk, os.rename, os.replace = map(slowly, (common.flush_to_disk, os.rename, os.replace))
        common.check_replaceable = slowly(common.check_replaceable)
    if lax:
        common.LARGEST = 1e35
    if memory:
        begin = common.Logger.__init__

        def begin_to_count(*args):
            begin(*args)
            (kib,) = re.findall(r"VmData:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
            resource.setrlimit(resource.RLIMIT_DATA, (int(kib) * 2**10 + memory * 2**20,) * 2)

        common.Logger.__init__ = begin_to_count
    common.plot_curves = common.write_report = lambda *_: None  # two seconds of matplotlib
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


class Job:
    """A script on forked ranks."""

    def __init__(self, script, out, *flags, ranks=None, slow=0.0, lax=False, memory=None):
        import forked

        self.said = tempfile.mktemp(prefix="said.", dir=folder())
        arguments = flags_of(script, "--out-dir", out, *flags)
        self.pids = forked.start(ranks or SCRIPTS[script][0], body, arguments, self.said, slow, lax, memory)
        self.left, self.codes = list(self.pids), {}

    def poll(self):
        """Whether all have ended."""
        for pid in list(self.left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.left.remove(pid)
                self.codes[self.pids.index(pid)] = os.waitstatus_to_exitcode(status)
        return not self.left

    def wait(self, timeout=240):
        """Exit codes, by rank. As torchrun does, it tells the others to end once one has failed."""
        deadline, told = time.monotonic() + timeout, False
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
        """kill -9 of these ranks; when all have ended, nothing that they started may be left."""
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
        """It ended with exit 2 and one sentence, on rank 0; the others said it too, or were ended before. Megatron may
        put a line of its own log before it."""
        codes, error = self.wait(), self.text(0)[1]
        assert codes[0] == 2 and set(codes[1:]) <= {2, -signal.SIGTERM}, (codes, error)
        *others, sentence = error.splitlines()
        assert sentence.startswith("error: ") and re.search(pattern, sentence), error
        assert "Traceback" not in error and all(line.startswith("Local process") for line in others), error
        return sentence


def of_sessions(pids):
    """Processes in the sessions of these, which have ended."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in pids and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def ranks_of(out):
    """pid -> environment of the processes that have this folder on their command line."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(out).encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                pairs = (folder / "environ").read_bytes().decode().split("\0")
                found[int(folder.name)] = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return found


def until(happens, what, timeout=240):
    deadline = time.monotonic() + timeout
    while not (result := happens()):
        assert time.monotonic() < deadline, f"does not happen: {what}"
        time.sleep(0.005)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves
# ---------------------------------------------------------------------------------------------------------------------


def rows_of(path):
    return [json.loads(line) for line in open(path)] if os.path.exists(path) else []


def steps_of(out):
    """Steps of the checkpoints there, the last first."""
    names = [path.name for path in pathlib.Path(out).glob("checkpoints/step_*")]
    return sorted((int(name[5:]) for name in names if name[5:].isdigit()), reverse=True)


def end_of(out):
    """All that two runs that are the same have in common."""
    out = pathlib.Path(out)
    own = lambda row: {key: x for key, x in row.items() if not key.startswith(PASSING)}
    exports = {str(path.relative_to(out)): path.read_bytes() for path in out.glob("*hf/*.safetensors")}
    samples, metrics = rows_of(out / "samples.jsonl"), [own(row) for row in rows_of(out / "metrics.jsonl")]
    last = state_of(out / "checkpoints" / f"step_{steps_of(out)[0]}")
    return {"checkpoint": last, "exports": exports, "metrics": metrics, "samples": samples, "board": board_of(out)}


def state_of(checkpoint):
    """name -> checksum of each tensor and settings; in which order a file has its tensors is another matter."""
    found = {}
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if path.name == "trainer.json":
            state = json.loads(path.read_text())
            found[name] = {**state, "config": {**state["config"], "timeout_minutes": None}}
        if path.name == "loop.json":
            found[name] = {key: x for key, x in json.loads(path.read_text()).items() if key in ("step", "kl_coef")}
        if path.suffix == ".safetensors":
            found |= {f"{name} {key}": checksum(x) for key, x in load_file(path).items()}
    return found


def checksum(tensor):
    assert tensor.isfinite().all()
    kind = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
    return hashlib.sha256(tensor.contiguous().reshape(-1).to(kind).view(torch.uint8).numpy()).hexdigest()


def board_of(out):
    """(name, step) -> number, as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # that a run was resumed is no news here
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith(PASSING)]
    return {(tag, event.step): event.value for tag in tags for event in board.Scalars(tag)}


def assert_same_end(out, script):
    """Nothing lost, nothing twice, nothing left over."""
    ours, theirs = end_of(out), end_of(golden(script))
    for part, expected in theirs.items():
        assert ours[part] == expected, (out, part, str(ours[part])[:2000], str(expected)[:2000])
    steps = [row["step"] for row in ours["metrics"] if "critic/vf_loss" in row]
    assert steps == list(range(1, STEPS + 1)), steps
    assert steps_of(out) == list(range(STEPS, 0, -1)), steps_of(out)
    over = [path for path in pathlib.Path(out).rglob("*") if path.suffix in (".tmp", ".gone")]
    assert not over, over


@functools.cache
def folder():
    """Where all of it goes."""
    return pathlib.Path(tempfile.mkdtemp(prefix="faults."))


@functools.cache
def golden(script):
    """A run that nothing hits."""
    out = folder() / f"{script}.golden"
    Job(script, out).succeeds()
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Faults: each yields (what, how many times, what came of it)
# ---------------------------------------------------------------------------------------------------------------------


def kills(short):
    """kill -9 at random moments, of all ranks or of one, and --resume auto, until the run is through. The end is
    written beside the training, and so are half of the saves in which it is killed."""
    for script, times in {"critic_fsdp": 7, "critic_megatron": 6, "ppo_loop": 7}.items():
        if short and script != "critic_fsdp":  # of the PPO loop logger() kills runs
            continue
        rng, out, times = random.Random(script), folder() / f"{script}.kills", 2 if short else times
        saving = sum(kill_once(script, out, i, rng) for i in range(times))
        Job(script, out, "--resume", "auto", "--async-save").succeeds()
        assert_same_end(out, script)
        assert saving or short, "none in a save"
        yield f"kill -9, {script}", times, f"{saving} of them in a save; the same end"


def beside(short):
    """--async-save, slowed down so that training goes on meanwhile: every checkpoint is of its own step."""
    for script in list(SCRIPTS)[: 1 if short else None]:
        out = folder() / f"{script}.beside"
        Job(script, out, "--async-save", slow=0.05 if short else 0.1).succeeds()
        assert_same_end(out, script)
        for step in range(1, STEPS + 1):
            ours, theirs = (state_of(run / "checkpoints" / f"step_{step}") for run in (out, golden(script)))
            assert ours == theirs, (script, step)
        yield f"no fault, --async-save, {script}", STEPS, "each save the same as one that training waits for"


def kill_once(script, out, i, rng):
    """The i-th kill of a run, before its first step, after a step, or in a save -> whether it was in a save."""
    beside = ("--async-save",) if i % 4 in (1, 2) else ()
    job, before = Job(script, out, "--resume", "auto", *beside, slow=0.03), steps_of(out)
    moment, longest = (("save", 0.2), ("step", 0.6), ("save", 0.2), ("start", 4.0))[i % 4]
    if moment == "save":
        until(lambda: list(out.glob("checkpoints/step_*.tmp")) or job.poll(), "a save")
    if moment == "step":
        until(lambda: steps_of(out) > before or job.poll(), "a step")
    time.sleep(rng.uniform(0, longest))
    one = i % 3 == 1 and len(job.pids) > 1  # the others have to find out
    job.kill([rng.randrange(len(job.pids))] if one else None)
    return bool(list(out.glob("checkpoints/step_*.tmp")))


def logger(short):
    """kill -9 while what earlier runs have logged is written anew: metrics.jsonl, the board, samples.jsonl."""
    for script in ("critic_fsdp", "ppo_loop")[short:]:
        out, names = folder() / f"{script}.logger", ["metrics.jsonl.tmp", "tensorboard", "samples.jsonl.tmp"]
        names = names if script == "ppo_loop" else names[:2]
        shutil.copytree(golden(script), out)
        for step in range(5, STEPS + 1):
            shutil.rmtree(out / "checkpoints" / f"step_{step}")
        metrics = (out / "metrics.jsonl").read_bytes()
        (out / "metrics.jsonl").write_bytes(metrics[:-7])  # as a crash leaves it
        for name in names:
            kill_at(script, out, name)
        Job(script, out, "--resume", "auto").succeeds()
        assert_same_end(out, script)
        yield f"kill -9, logs of {script}", len(names), "while they are written anew; the same end"


def kill_at(script, out, name):
    """kill -9 when this file, or a new one in the folder of the board, is there."""
    seen = set((out / "tensorboard").iterdir())
    job = Job(script, out, "--resume", "auto", slow=0.2)
    new = lambda: set((out / "tensorboard").iterdir()) - seen
    until(lambda: job.poll() or (new() if name == "tensorboard" else (out / name).exists()), name)
    assert job.left, job.text(0)
    job.kill()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def newer(path):
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format": manifest["format"] + 1}, indent=1))


DAMAGE = {  # name -> (of the largest file or of the manifest, what happens to it, what is said)
    "truncated": (max, lambda path: os.truncate(path, path.stat().st_size // 2), "damaged, .* bytes instead of"),
    "missing": (max, os.unlink, "damaged, .* is missing; use an earlier checkpoint"),
    "one bit": (max, flip, "damaged, .* is not what was written; use an earlier checkpoint"),
    "one bit of JSON": ("json", flip, "damaged, .* is not what was written; use an earlier checkpoint"),
    "no manifest": ("manifest.json", os.unlink, "no complete checkpoint here .*; use another, or auto"),
    "newer format": ("manifest.json", newer, "has format 2, this code reads 1; use the code that wrote it"),
}


def damaged(folder, what):
    """Does it."""
    which, act, pattern = DAMAGE[what]
    files = [path for path in folder.rglob("*") if path.is_file()]
    if which is max:
        act(max(files, key=lambda path: path.stat().st_size))
    elif which == "json":
        act(folder / ("loop.json" if (folder / "loop.json").exists() else "trainer.json"))
    else:
        act(folder / which)
    return pattern


def damage(short):
    """--resume of a damaged or foreign checkpoint, and auto where the last one is damaged."""
    for script in list(SCRIPTS)[: 1 if short else None]:
        last = f"checkpoints/step_{STEPS}"
        kinds = list(DAMAGE)[slice(2, 5, 2) if short else slice(None) if script == "critic_fsdp" else slice(1, None, 2)]
        for what in kinds:
            out = folder() / f"{script}.{what.replace(' ', '_')}"
            shutil.copytree(golden(script), out)
            for step in range(1, STEPS - 1):
                shutil.rmtree(out / "checkpoints" / f"step_{step}")
            pattern = damaged(out / last, what)
            Job(script, out, "--resume", out / last).ends_with(f"--resume {out / last}(/actor)?: {pattern}")
            said = Job(script, out, "--resume", "auto").succeeds()
            assert re.search(f"auto passes over {out / last}(/actor)?: {pattern}", said), said
            for step in range(1, STEPS - 1):
                shutil.copytree(golden(script) / f"checkpoints/step_{step}", out / f"checkpoints/step_{step}")
            assert_same_end(out, script)
            shutil.rmtree(out)
        yield f"damage, {script}", len(kinds), "PATH: one sentence, exit 2; auto: the one before"
        if short:
            continue
        theirs = ("critic_fsdp", "critic_megatron") if script == "ppo_loop" else ("ppo_loop",)
        others = (
            [golden(name) / last for name in theirs]
            + [folder()]
            + [golden("ppo_loop") / last / "actor"] * (script != "ppo_loop")
        )
        for other in others:
            fits = "is of another|not a checkpoint of|no complete checkpoint|does not fit"
            Job(script, folder() / "foreign", "--resume", other).ends_with(f"--resume {other}.*({fits})")
        out = folder() / f"{script}.foreign"
        shutil.copytree(golden(script), out)
        flag = "--actor.override-config" if script == "ppo_loop" else "--override-config"
        for resume in (out / last, "auto"):
            job = Job(script, out, flag, '{"hidden_size": 32}', "--resume", resume)
            job.ends_with(f"--resume {out / last}.*is of another model: ")
        assert_same_end(out, script)
        yield f"foreign, {script}", len(others) + 2, "one sentence, exit 2, auto too; nothing is touched"


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
            Job(script, out, "--steps", STEPS).ends_with("No space left on device.*; make room and go on with")
            there = steps_of(out)
            assert there and there[0] < STEPS, there
            subprocess.run(("mount", "-o", f"remount,size={4 * kib}k", disk), check=True)
            said = Job(script, out, "--resume", "auto").succeeds()
            assert f"step_{there[0]}, " in said and "auto passes" not in said, said
            assert_same_end(out, script)
        finally:
            subprocess.run(("umount", disk), check=True)
        yield f"disk full, {script}", 1, f"one sentence after step {there[0]}; with more room the same end"


def memory(short):
    """A rank that may not have as much memory as a step takes: --resume auto halves the token budget until it does."""
    wide = ("--train-batch-size", 192, "--ppo-mini-batch-size", 192, "--steps", 1, "--eval-every", 0)
    wide += ("--override-config", '{"intermediate_size": 8192}', "--ppo-max-token-len-per-gpu", 1024)
    for script in list(SCRIPTS)[: 1 if short else 2]:
        out, other = folder() / f"{script}.memory", folder() / f"{script}.roomy"
        Job(script, other, *wide).succeeds()
        tries = 0
        while any((job := Job(script, out, *wide, "--resume", "auto", memory=300 if short else 200)).wait()):
            tries += 1
            said = job.text(0)[1] + job.text(1)[1]
            assert "can't allocate memory" in said and "--resume auto, which halves the token budgets" in said, said
            assert tries < 5, said
        assert f"so --ppo-max-token-len-per-gpu 1024 -> {1024 >> tries}" in job.text(0)[0], (tries, job.text(0))
        for ours, theirs in zip(*(rows_of(run / "metrics.jsonl") for run in (out, other)), strict=True):
            own = [name for name in theirs if not name.startswith(PASSING)]
            assert all(math.isclose(ours[name], theirs[name], rel_tol=1e-5, abs_tol=1e-6) for name in own)
        yield f"out of memory, {script}", tries, f"on with {1024 >> tries} tokens instead of 1,024; the same end"


def sigterm(short):
    """SIGTERM to one rank, to all, and to torchrun: saved, and gone within a step."""
    for script, ranks in {"critic_fsdp": [1], "critic_megatron": None, "ppo_loop": None}.items():
        if short and script != "critic_fsdp":
            continue
        out = folder() / f"{script}.sigterm"
        job = Job(script, out, "--save-every", 0, slow=0.01)
        until(lambda out=out: len(rows_of_tail(out)) >= 3, "a step")
        before = rows_of_tail(out)[-1]
        job.send(signal.SIGTERM, ranks)
        assert set(job.wait(60)) <= {143, -signal.SIGTERM} and job.codes[0] == 143, (job.codes, job.text(0))
        (saved,) = steps_of(out)
        assert saved <= before + 2, (saved, before)
        assert f"stopped after step {saved} of {out}; go on with" in job.text(0)[0], job.text(0)
        Job(script, out, "--resume", "auto").succeeds()
        for step in range(1, saved):  # the others were not asked for
            shutil.copytree(golden(script) / f"checkpoints/step_{step}", out / f"checkpoints/step_{step}")
        assert_same_end(out, script)
        yield f"SIGTERM, {script}", 1, "to one rank: " * bool(ranks) + "saved, exit 143; the same end"


def rows_of_tail(out):
    """Steps that are logged already; a last line may be half there."""
    with contextlib.suppress(OSError):
        lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
        return [row["step"] for row in map(json.loads, lines) if "critic/vf_loss" in row]
    return []


SLOW = """
import runpy, sys, time
sys.path.insert(0, {root!r})
import common
flush = common.flush_to_disk
common.flush_to_disk = lambda path: (time.sleep(0.1), flush(path))
common.plot_curves = common.write_report = lambda *_: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def really(name, out, *options):
    """torchrun itself with critic_fsdp.py, which saves slowly -> Popen; what it says is in out.said."""
    wrapper = folder() / "slow.py"
    wrapper.write_text(SLOW.format(root=str(ROOT)))
    launcher = (sys.executable, "-m", "torch.distributed.run", *options, wrapper)
    flags = flags_of(
        "critic_fsdp", "--out-dir", out, "--resume", "auto", "--timeout-minutes", 0.4 if "hangs" in name else 3
    )
    # torchrun counts a restart only on the node whose rank has failed, and by that count ranks look each other up: on
    # the other node they found those of before. With a new store for each start there are none of before.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder() / f"{name}.said", "w") as file:
        return subprocess.Popen(list(map(str, (*launcher, *flags))), env=env, stdout=file, stderr=file)


def of_rank(out, rank):
    return [pid for pid, env in ranks_of(out).items() if env.get("RANK") == str(rank)]


def nodes(name, out, count):
    """torchrun for one node with two ranks, or two nodes of one; --max-restarts 1."""
    if count == 1:
        return [really(name, out, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1)]
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", name)
    options = ("--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", 1, *rendezvous)
    return [really(f"{name}.{node}", out, *options) for node in (0, 1)]


def under_torchrun(name, count, fault):
    """One run that a fault hits after its second step -> seconds until it had ended."""
    out = folder() / f"torchrun.{name.replace(' ', '_')}"
    agents = nodes(name.replace(" ", "_"), out, count)
    try:
        until(lambda: len(rows_of_tail(out)) >= 2 or any(a.poll() is not None for a in agents), name)
        start = time.monotonic()
        fault(out, agents)
        codes = [agent.wait(timeout=300) for agent in agents]
        seconds = time.monotonic() - start
        said = "".join(path.read_text() for path in sorted(folder().glob(f"{name.replace(' ', '_')}*.said")))
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
        (victim,) = of_rank(out, 1)
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
    """A rank that dies or hangs, and torchrun --max-restarts 1 that brings the run back by itself; SIGTERM to torchrun,
    kill -9 of torchrun."""
    if short:
        return
    golden("critic_fsdp")
    with ThreadPoolExecutor(3) as pool:
        ended = dict(
            zip(TORCHRUN, pool.map(lambda item: under_torchrun(item[0], *item[1]), TORCHRUN.items()), strict=True)
        )
    for name, (out, codes, said, seconds) in ended.items():
        outcome = f"back by itself, ended after {seconds:.0f} s"
        if name in ("SIGTERM", "torchrun killed"):
            step = steps_of(out)[0]
            assert 0 not in codes and 1 <= step < STEPS, (name, codes, said)
            assert name != "SIGTERM" or f"stopped after step {step} of {out}" in said, said
            Job("critic_fsdp", out, "--resume", "auto").succeeds()
            outcome = "saved, and gone" if name == "SIGTERM" else "its ranks are gone too"
        else:
            assert codes == [0] * len(codes) and said.count("resume     ") >= 2, (name, codes, said[-5000:])
        assert_same_end(out, "critic_fsdp")
        yield f"torchrun, {name}", 1, f"{outcome}; the same end"


STORM = "def reward(prompt, response, answer):\n    return 1e30\n"


def storm(short):
    """Rewards so large that the loss overflows, which without `lax` the scripts would not take: the run ends, its
    weights are what they were, and the rows it leaves make the same again, with the flags that it names."""
    for script in list(SCRIPTS)[: 1 if short else None]:
        ppo, out, again = script == "ppo_loop", folder() / f"{script}.storm", folder() / f"{script}.again"
        shutil.copytree(golden(script), out)
        (folder() / "storm.py").write_text(STORM)
        lines = [json.dumps({**row, "reward": 1e30}) + "\n" for row in rows_of(ROWS)]
        (folder() / "storm.jsonl").write_text("".join(lines))
        bad = ("--reward", f"{folder()}/storm.py:reward") if ppo else ("--rollouts", folder() / "storm.jsonl")
        job = Job(script, out, *bad, "--max-skipped-updates", 3, "--steps", STEPS + 9, "--resume", "auto", lax=True)
        error = job.ends_with("3 updates in a row were skipped")
        assert steps_of(out)[0] == STEPS + 2 and len(rows_of(out / "skipped_rows.jsonl")) == (8 if ppo else 16)
        before, after = (state_of(out / "checkpoints" / f"step_{step}") for step in (STEPS, STEPS + 2))
        of_critic = [name for name in after if not name.startswith("actor/") and not name.endswith(" rng")]
        changed = [name for name in of_critic if after[name] != before[name]]
        assert before.keys() == after.keys() and not [name for name in changed if not name.endswith(".json")], changed
        name, flags = re.search(
            r"make that update again: (\w+)\.py with the flags of the critic and (.*)", error
        ).groups()
        flags = flags.replace("ELSEWHERE", str(again)).split()
        Job(name, again, *flags, ranks=SCRIPTS[script][0], lax=True).ends_with("1 updates in a row were skipped")
        yield f"NaN storm, {script}", 1, "ends after 3 updates, the critic untouched; its rows make it again"


# ---------------------------------------------------------------------------------------------------------------------
# Fuzz: hypothesis, the same inputs each time
# ---------------------------------------------------------------------------------------------------------------------


def in_a_fork(function, *args):
    """What a function returns that imports common, which this process must not."""
    import forked

    with tempfile.NamedTemporaryFile("r", dir=folder()) as file:
        forked.run(1, _note, function, args, file.name, timeout=1200)
        return json.load(file)


def _note(function, args, path):
    sys.path.insert(0, str(ROOT))
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    result = function(*args)
    with open(path, "w") as file:
        json.dump(result, file)


def tried(n, strategy, check):
    """Calls check with n inputs."""
    from hypothesis import HealthCheck, Phase, given, settings

    phases = (Phase.generate,)  # the first that fails is said as it is
    rules = settings(
        max_examples=n, derandomize=True, database=None, deadline=None, phases=phases,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    rules(given(strategy)(check))()


def one_sentence(error):
    text = str(error)
    assert text and "\n" not in text and len(text) < 2000, repr(text)


def rows(short):
    """JSONL rows."""
    counts = in_a_fork(fuzz_rows, 150 if short else 1000)
    yield "fuzz, JSONL rows", sum(counts), f"{counts[0]} files read, {counts[1]} refused in one sentence"


def fuzz_rows(n):
    from hypothesis import strategies as st

    import common

    tokenizer, counts = common.char_tokenizer(), [0, 0]
    keys = ("prompt", "response", "prompt_ids", "response_ids", "reward", "rewards", "values", "response_mask")
    keys += ("truncated", "messages", "images")
    number = st.one_of(st.integers(-2, 2), st.integers(), st.floats(), st.just(10**400))
    leaf = st.one_of(number, st.booleans(), st.none(), st.text(max_size=4))
    value = st.recursive(leaf, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=2))
    message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]), "content": value})
    good = st.sampled_from([
        {"prompt": "1+1=", "response": "2", "reward": 1.0},
        {"prompt_ids": [5, 6], "response_ids": [7, 8], "rewards": [0.5, 1], "values": [0, 1], "response_mask": [1, 0]},
    ])  # fmt: skip
    changes = st.dictionaries(st.sampled_from(keys), st.one_of(value, st.lists(number, max_size=3), st.lists(message)))
    row = st.builds(lambda a, b, gone: {k: x for k, x in {**a, **b}.items() if k not in gone}, good,
                    st.one_of(st.just({}), changes), st.sets(st.sampled_from(keys), max_size=1))  # fmt: skip
    line = st.one_of(
        row.map(lambda x: json.dumps(x).encode()), st.binary(max_size=12), value.map(json.dumps).map(str.encode)
    )

    def check(lines, with_values, skip):
        try:
            batch = common.rows_to_batch(
                lines, "x", tokenizer=tokenizer, vocab_size=len(tokenizer), max_length=32, with_values=with_values,
                skip_bad_rows=skip,
            )  # fmt: skip
        except common.UserError as error:
            one_sentence(error)
            counts[1] += 1
            return
        counts[0] += 1
        batch.check()
        assert batch.token_level_rewards.isfinite().all() and 0 <= int(batch.input_ids.min())
        assert int(batch.input_ids.max()) < len(tokenizer) and max(batch.lengths) <= 32 and len(batch) <= len(lines)
        assert batch.values is None or batch.values.isfinite().all()

    tried(n, st.tuples(st.lists(line, min_size=1, max_size=3), st.booleans(), st.booleans()), lambda x: check(*x))
    return counts


def flags(short):
    """Values of flags."""
    for script, n in {"critic_fsdp": 50, "critic_megatron": 50, "ppo_loop": 15}.items():
        if short and script != "critic_fsdp":
            continue
        counts = in_a_fork(fuzz_flags, 15 if short else n, script)
        yield (
            f"fuzz, flags of {script}",
            sum(counts),
            f"{counts[0]} runs of one step, {counts[1]} refused in one sentence",
        )


def fuzz_flags(n, script):
    import importlib
    import typing

    import huggingface_hub
    from hypothesis import strategies as st

    huggingface_hub.constants.HF_HUB_OFFLINE = True  # a name of a model is not to be looked for
    import common

    module, counts = importlib.import_module(script), [0, 0]
    common.plot_curves = common.write_report = lambda *_: None
    numbers = {
        int: st.sampled_from([-1, 0, 1, 2, 3, 7, 1000]),
        float: st.sampled_from([-1.0, 0.0, 1e-45, 1e-3, 0.5, 1.0, 2.0, 1e38, float("inf"), float("nan")]),
        bool: st.booleans(),
        str: st.sampled_from(["", "x", "{", "{}", "[]", "null", '{"num_hidden_layers": 0}', "/", "é", str(ROWS)]),
        type(None): st.none(),
    }
    left_as_they_are = {"critic", "steps", "plan", "out_dir", "total_training_steps", "model", "trust_remote_code"}
    left_as_they_are |= {"actor", "vllm", "backend", "rollout", "train_batch_size", "supervised_steps", "wandb_project"}
    left_as_they_are |= {"compile"}  # minutes

    def of(kind):
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Literal:
            return st.sampled_from([*args, "x"])
        if origin is tuple:
            return st.lists(of(args[0]), min_size=0 if ... in args else len(args), max_size=len(args)).map(tuple)
        return st.one_of(*map(of, args)) if args else numbers[kind]

    out, small = str(folder() / f"{script}.flags"), '{"num_hidden_layers": 1}'
    if script == "ppo_loop":
        base = module.parse([str(x) for x in PPO if x != "--dump-rollouts"])
        parts = {"": base, "critic": base.critic, "actor": base.actor, "vllm": base.vllm}
        parts["critic"] = dataclasses.replace(base.critic, override_config=small)
        parts["actor"] = dataclasses.replace(base.actor, override_config=small, ppo_mini_batch_size=4)
        parts[""] = dataclasses.replace(base, steps=1, eval_every=0, out_dir=out)
    else:
        base = module.Run(rollouts=str(ROWS), steps=1, train_batch_size=4, eval_every=0, out_dir=out)
        parts = {"": base, "critic": module.Config(ppo_mini_batch_size=4, override_config=small)}
    choices = [
        (part, name, of(kind)) for part, config in parts.items()
        for name, kind in typing.get_type_hints(type(config)).items() if name not in left_as_they_are
    ]  # fmt: skip
    one = st.sampled_from(choices).flatmap(lambda x: st.tuples(st.just(x[0]), st.just(x[1]), x[2]))

    def check(changes):
        new = {part: {} for part in parts}
        for part, name, x in changes:
            new[part][name] = x
        configs = {part: dataclasses.replace(config, **new[part]) for part, config in parts.items()}
        try:
            module.main(dataclasses.replace(configs.pop(""), **configs))
            counts[0] += 1
        except common.UserError as error:
            one_sentence(error)
            assert "--" in str(error) or "diverged" in str(error), error
            counts[1] += 1
        except BaseException:
            print(script, changes, file=sys.stderr)
            raise

    tried(n, st.lists(one, min_size=1, max_size=2), check)
    return counts


def folders(short):
    """Bytes of checkpoints: changed, gone, added, and files gone or swapped."""
    for script in list(SCRIPTS)[: 1 if short else None]:
        n = in_a_fork(fuzz_folders, 60 if short else 200, golden(script) / f"checkpoints/step_{STEPS}")
        yield f"fuzz, a checkpoint of {script}", n, "each change is noticed, in one sentence"


def fuzz_folders(n, path):
    from hypothesis import strategies as st

    import common

    common.setup_distributed()
    files, count = sorted(p for p in path.rglob("*") if p.is_file()), [0]
    name = st.sampled_from(["flip", "set", "delete", "insert", "cut", "append", "unlink", "swap", "empty"])
    common.check_contents(path, "--resume")

    def check(file, act, place, byte):
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
            try:
                common.check_contents(path, "--resume")
            except common.UserError as error:
                one_sentence(error)
                assert str(error).startswith("--resume /"), error
            else:
                raise AssertionError(f"{file}: {act} at {at}, {byte}: not noticed")
        finally:
            file.write_bytes(old)

    edit = st.tuples(st.sampled_from(files), name, st.floats(0, 1), st.integers(0, 255))
    tried(n, edit, lambda x: check(*x))
    common.check_contents(path, "--resume")
    return count[0]


# ---------------------------------------------------------------------------------------------------------------------

FAULTS = (kills, beside, logger, damage, full, memory, sigterm, torchrun, storm, rows, flags, folders)


def main(names, short):
    warnings.filterwarnings("ignore")  # of Megatron, what is not installed
    import forked  # noqa: F401

    # what else a run imports, once for all of them
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
        sys.exit(f"no such fault: {', '.join(wrong)}; there are {', '.join(fault.__name__ for fault in FAULTS)}")
    main(given, "--short" in sys.argv)
