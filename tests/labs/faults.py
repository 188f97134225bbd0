"""Injects faults into whole runs of the three scripts, asserts how each run ends, and prints a
table.

    python tests/labs/faults.py                  all of them, half an hour on two cores
    python tests/labs/faults.py NAME...          some of FAULTS, below
    python tests/labs/faults.py --short          fewer of each, as in test_faults.py

A fault must not change the end of a run: last checkpoint (weights, optimizer, counters), exported
weights, rollouts, samples, metrics.jsonl (except times and memory) and what TensorBoard shows must
equal those of a run without faults, bit for bit. Ranks are forks of this process, see forked.py;
only `torchrun` below uses torchrun itself."""

import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import math
import os
import pathlib
import pkgutil
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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import forked
import hypothesis
import hypothesis.strategies as st
import pydantic
import torch
from forked import processes, until
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = ROOT / "tests" / "rows.jsonl"
HELD_OUT = ROOT / "tests" / "rows_held_out.jsonl"
os.environ["HF_HUB_OFFLINE"] = "1"  # do not search the hub for models
SCRIPTS = {  # ranks, flags
    "critic_fsdp": (2, ()),
    "critic_megatron": (2, ("--tensor-model-parallel-size", 2)),
    "ppo_loop": (1, ()),
}
STEPS = 8
CRITIC = (
    "--rollouts", ROWS, "--eval-rollouts", HELD_OUT, "--train-batch-size", 16,
    "--ppo-mini-batch-size", 8,
    "--lr-scheduler-type", "cosine", "--lr-warmup-steps", 3,
)  # fmt: skip
PPO = (
    "--supervised-steps", 0, "--prompts", ROWS, "--eval-prompts", ROWS, "--prompt-key", "prompt",
    "--answer-key", "response", "--train-batch-size", 4, "--rollout-n", 2,
    "--max-response-length", 3,
    "--reward", f"{ROOT}/tests/loop/rewards.py:right_digits",
    "--kl-coef", 0.05, "--target-kl", 0.01,
    "--actor.lr", 1e-3, "--critic.lr", 1e-3, "--critic.ppo-mini-batch-size", 4, "--dump-rollouts",
    "--rollout-batch-size", 4, "--actor.ppo-max-token-len-per-gpu", 32,
    "--critic.ppo-max-token-len-per-gpu", 32,
)  # fmt: skip
PASSING = ("perf/", "time/")  # metrics that differ between equal runs


def flags_of(script, *flags):
    """The command line of a run of eight updates, with a checkpoint after each."""
    own = CRITIC
    if script == "ppo_loop":
        lines = open(ROWS).readlines()[::4]  # each prompt once, not with its four answers
        prompts = folder() / "prompts.jsonl"
        prompts.write_text("".join(lines))
        few = folder() / "few.jsonl"  # what is held out: all would take most of the time
        few.write_text("".join(lines[::21]))
        own = (*PPO, "--prompts", prompts, "--eval-prompts", few)
    often = ("--steps", STEPS, "--save-every", 1, "--eval-every", 2)
    return [str(x) for x in (ROOT / f"{script}.py", *SCRIPTS[script][1], *own, *often, *flags)]


# ---- Processes -----------------------------------------------------------------------------------


def run_script(
    arguments, said=None, slow=0.0, lax=False, memory=None, apart=None, slow_in=None, prepare=None
):
    """Runs a script in this process without its report, because matplotlib takes two seconds.

    said: prefix of files for this rank's output; the rank gets its own session. slow: seconds of
    delay before each save, flush and rename, so that a fault can hit them. lax: accept rewards of
    any size. memory: MiB that steps may allocate on top of what exists before them. apart: a
    checkpoint; each rank works in its own folder, and only rank 0 has the checkpoint there, as
    `there`. slow_in: (a function of PPO, steps after which each call of it takes a second and
    leaves a file). prepare: a function to call first."""
    import common

    if said:
        os.setsid()
        forked.print_to(f"{said}.{forked.NUMBERS['RANK']}")
    if prepare:
        prepare()
    if apart:
        os.makedirs(disk := f"{said}.{os.environ['RANK']}.disk")
        os.chdir(disk)
        if os.environ["RANK"] == "0":
            os.symlink(apart, "there")
    if slow:
        slowly = lambda function: lambda *args: (time.sleep(slow), function(*args))[1]
        common.published, common.flush_to_disk = (
            slowly(common.published),
            slowly(common.flush_to_disk),
        )
        os.rename, os.replace = slowly(os.rename), slowly(os.replace)
    if lax:
        fields = {"reward": (float | None, None), "rewards": (list[float] | None, None)}
        common.Rollout = pydantic.create_model("Rollout", __base__=common.Rollout, **fields)
    if memory:
        begin = common.Logger.__init__

        def begin_to_count(*args):
            begin(*args)
            # CUDA builds start a thread for each device at the first backward, with a stack each
            torch.ones(1, requires_grad=True).sum().backward()
            (kib,) = re.findall(
                r"VmData:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text()
            )
            resource.setrlimit(resource.RLIMIT_DATA, (int(kib) * 2**10 + memory * 2**20,) * 2)

        common.Logger.__init__ = begin_to_count
    common.write_report = lambda *_: None
    sys.argv = arguments
    if slow_in:
        import ppo_loop

        owner, _, name = slow_in[0].rpartition(".")
        owner = pkgutil.resolve_name(owner)
        work, out = getattr(owner, name), pathlib.Path(arguments[arguments.index("--out-dir") + 1])

        def slowly_in(*args, **more):
            if len(updates_of(out)) >= slow_in[1]:
                pathlib.Path(f"{said}.slow").touch()
                time.sleep(1)
            return work(*args, **more)

        setattr(owner, name, slowly_in)
        common.launch(lambda: ppo_loop.main(ppo_loop.parse(arguments[1:])))
    runpy.run_path(arguments[0], run_name="__main__")


class Job:
    """A script on forked ranks. disturbance: options of run_script."""

    def __init__(self, script, out, *flags, ranks=None, **disturbance):
        self.said = tempfile.mktemp(prefix="said.", dir=folder())
        function = functools.partial(
            run_script, flags_of(script, "--out-dir", out, *flags), self.said
        )
        self.pids = forked.start(
            ranks or SCRIPTS[script][0], functools.partial(function, **disturbance)
        )
        self.codes = {}  # rank -> exit code, once it has ended

    def __str__(self):
        return f"{self.codes} {self.text(0)}"

    def poll(self):
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes and any(ended := os.waitpid(pid, os.WNOHANG)):
                self.codes[rank] = os.waitstatus_to_exitcode(ended[1])
        return len(self.codes) == len(self.pids)

    def wait(self, timeout=240):
        """Exit codes by rank. As with torchrun, one failed rank ends the others. No process may
        remain."""
        until(lambda: self.poll() or any(self.codes.values()), self, timeout)
        self.send(signal.SIGTERM)
        until(self.poll, self, timeout)
        until(
            lambda: not [pid for pid, session, _ in processes() if session in self.pids],
            "no rest",
            20,
        )
        return [self.codes[rank] for rank in range(len(self.pids))]

    def send(self, number, ranks=None):
        """Sends a signal to these ranks (None: to all), except those that have ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes and (ranks is None or rank in ranks):
                os.kill(pid, number)

    def text(self, rank):
        return [
            pathlib.Path(f"{self.said}.{rank}.{name}").read_text() for name in ("stdout", "stderr")
        ]

    def succeeds(self):
        """Asserts that all ranks succeed -> the standard output of rank 0."""
        assert not any(self.wait()), str(self)
        return self.text(0)[0]

    def ends_with(self, pattern):
        """Asserts that rank 0 exits with status 2 and one line, no traceback; others do so, or are
        ended."""
        codes, error = self.wait(), self.text(0)[1]
        assert codes[0] == 2 and set(codes[1:]) <= {2, -signal.SIGTERM}, (codes, error)
        assert (
            error.startswith("error: ") and error.count("\n") == 1 and re.search(pattern, error)
        ), error


# ---- What a run leaves ---------------------------------------------------------------------------


@functools.cache
def folder():
    return pathlib.Path(tempfile.mkdtemp(prefix="faults.", dir=os.environ.get("SCRATCH")))


@functools.cache
def golden(script):
    """The folder of a run without faults."""
    out = folder() / f"{script}.golden"
    Job(script, out).succeeds()
    return out


def checkpoint(out, step=STEPS):
    return out / "checkpoints" / f"step_{step}"


def copy_of_golden(script, name, steps=range(1, STEPS + 1)):
    """A copy of the run without faults, with only the checkpoints of these steps."""
    out = folder() / f"{script}.{name}"
    shutil.copytree(golden(script), out)
    for step in set(steps_of(out)) - set(steps):
        shutil.rmtree(checkpoint(out, step))
    return out


def rows_of(path):
    """The rows of a JSONL file, if it exists, without an incomplete last line."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def updates_of(out):
    return [row["step"] for row in rows_of(out / "metrics.jsonl") if "critic/vf_loss" in row]


def steps_of(out):
    """Steps of the complete checkpoints, the latest first."""
    names = [path.name for path in out.glob("checkpoints/step_*")]
    return sorted((int(name[5:]) for name in names if name[5:].isdigit()), reverse=True)


def metrics_of(out):
    """The rows of metrics.jsonl, with only those metrics that are equal in equal runs."""
    own = lambda row: {key: x for key, x in row.items() if not key.startswith(PASSING)}
    return [own(row) for row in rows_of(out / "metrics.jsonl")]


def end_of(out):
    """Everything that must be equal in two equal runs."""
    files = [
        *out.glob("*hf/*.safetensors"),
        *out.glob("rollouts/*.jsonl"),
        *out.glob("samples.json"),
    ]
    return {
        "checkpoint": state_of(checkpoint(out, steps_of(out)[0])),
        "files": {str(path.relative_to(out)): path.read_bytes() for path in files},
        "metrics": metrics_of(out),
        "board": board_of(out),
    }


def state_of(checkpoint):
    """name -> checksum of a tensor, or content of a JSON file; the order of tensors in a file may
    vary."""
    found = {}
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if path.name in ("trainer.json", "loop.json"):
            found[name] = json.loads(path.read_text())
        if path.suffix == ".safetensors":
            for key, x in load_file(path).items():
                assert x.isfinite().all(), (path, key)
                found[f"{name} {key}"] = hashlib.sha256(
                    x.reshape(-1).view(torch.uint8).numpy()
                ).hexdigest()
    return found


def board_of(out):
    """(name, step) -> number, as in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # no messages about resumed runs
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith(PASSING)]
    return {(tag, event.step): event.value for tag in tags for event in board.Scalars(tag)}


def assert_same_end(out, script, absent=()):
    """Asserts that nothing is lost, duplicated or left over. The steps in `absent` have no
    checkpoint."""
    ours, theirs = end_of(out), end_of(golden(script))
    for part, expected in theirs.items():
        assert ours[part] == expected, (out, part, str(ours[part])[:2000], str(expected)[:2000])
    assert updates_of(out) == list(range(1, STEPS + 1)), updates_of(out)
    assert steps_of(out) == [step for step in range(STEPS, 0, -1) if step not in absent], steps_of(
        out
    )
    assert not (over := [path for path in out.rglob("*") if path.suffix in (".tmp", ".gone")]), over


# ---- Faults: each function tries some on a script -> (how many, what happened) -------------------


def kills(script, short):
    """kill -9 of all ranks or one at random moments, then --resume auto; some runs save in the
    background."""
    rng, out, times = random.Random(script), folder() / f"{script}.kills", 2 if short else 7
    saving = sum(kill_once(script, out, i, rng) for i in range(times))
    Job(script, out, "--resume", "auto", "--async-save").succeeds()
    assert_same_end(out, script)
    assert saving or short, "none in a save"
    return times, f"{saving} of them in a save; the same end"


def kill_once(script, out, i, rng):
    """Kills a run for the i-th time: at its start, after a step, or in a save -> whether it was in
    a save."""
    flags = ("--async-save",) if i % 4 in (1, 2) else ()
    before = steps_of(out)
    job = Job(script, out, "--resume", "auto", *flags, slow=0.03)
    saves = lambda: list(out.glob("checkpoints/step_*.tmp"))
    steps = lambda: steps_of(out) > before
    reached, longest = ((saves, 0.2), (steps, 0.6), (saves, 0.2), (lambda: True, 4.0))[i % 4]
    until(lambda: reached() or job.poll(), "the moment to kill it")
    time.sleep(rng.uniform(0, longest))
    one = i % 3 == 1 and len(job.pids) > 1  # the other rank must notice by itself
    job.send(signal.SIGKILL, [rng.randrange(len(job.pids))] if one else None)
    job.wait()
    return bool(saves())


def background(script, short):
    """--async-save, so slow that training continues during saves: each checkpoint is that of its
    step."""
    out = folder() / f"{script}.background"
    Job(script, out, "--async-save", slow=0.05 if short else 0.1).succeeds()
    assert_same_end(out, script)
    for step in range(1, STEPS + 1):
        assert state_of(checkpoint(out, step)) == state_of(checkpoint(golden(script), step)), step
    return STEPS, "no fault; each save the same as one that training waits for"


def logger(script, short):
    """kill -9 while the logs of earlier runs are rewritten: metrics.jsonl and TensorBoard's."""
    names = ["metrics.jsonl.tmp", "tensorboard/*"]
    out = copy_of_golden(script, "logger", steps=range(1, 5))
    # as after a crash
    os.truncate(out / "metrics.jsonl", (out / "metrics.jsonl").stat().st_size - 7)
    shutil.copytree(out / "hf", out / "hf.was.gone")  # as after a crash, too
    for name in names:
        kill_at(script, out, name)
    Job(script, out, "--resume", "auto").succeeds()
    assert_same_end(out, script)
    return len(names), "kill -9 while they are rewritten; the same end"


def kill_at(script, out, name):
    """kill -9 when a new file with this name appears."""
    seen = set(out.glob(name))
    job = Job(script, out, "--resume", "auto", slow=0.2)
    until(lambda: job.poll() or set(out.glob(name)) - seen, name)
    assert not job.poll(), str(job)
    job.send(signal.SIGKILL)
    job.wait()


CHANGED = "damaged, .* is missing or changed; use an earlier one"
UNREADABLE = "no complete checkpoint here, no readable manifest.json"
halve = lambda old: old[: len(old) // 2]
flip = lambda old: halve(old) + bytes([old[len(old) // 2] ^ 4]) + old[len(old) // 2 + 1 :]
DAMAGE = (  # name, file (None: the largest), new content (None: delete it), words of the error
    ("truncated", None, halve, CHANGED),
    ("missing", None, None, CHANGED),
    ("one_bit", None, flip, CHANGED),
    ("one_bit_of_JSON", "trainer.json", flip, CHANGED),
    ("no_manifest", "manifest.json", None, UNREADABLE),
    ("one_bit_of_the_manifest", "manifest.json", flip, f"damaged|{UNREADABLE}"),
)


def damage(script, short):
    """A damaged last checkpoint: --resume PATH refuses it, and --resume auto takes the one
    before."""
    kinds = DAMAGE[2:5:2] if short else DAMAGE if script == "critic_fsdp" else DAMAGE[1::2]
    for kind, name, act, pattern in kinds:
        out = copy_of_golden(script, kind, steps=(STEPS - 1, STEPS))
        file = max(checkpoint(out).rglob(name or "*.*"), key=lambda path: path.stat().st_size)
        file.write_bytes(act(file.read_bytes())) if act else file.unlink()
        pattern = rf"{checkpoint(out)}(/\S+)?: ({pattern})"
        Job(script, out, "--resume", checkpoint(out)).ends_with(f"--resume {pattern}")
        said = Job(script, out, "--resume", "auto").succeeds()
        assert re.search(f"auto passes over {pattern}", said), said
        assert_same_end(out, script, absent=range(1, STEPS - 1))
    return len(kinds), "PATH: one line, exit 2; auto: the one before"


def foreign(script, short):
    """--resume with a folder of another script or another model, or with no checkpoint at all."""
    others = [folder(), checkpoint(golden("ppo_loop")), checkpoint(golden("ppo_loop")) / "actor"]
    if script == "ppo_loop":
        others = [
            folder(),
            checkpoint(golden("critic_fsdp")),
            checkpoint(golden("critic_megatron")),
        ]

    words = "is of another model|not a checkpoint of|no complete checkpoint|does not fit"
    for other in others:
        Job(script, folder() / "foreign", "--resume", other).ends_with(
            f"--resume {other}.*({words})"
        )

    out = copy_of_golden(script, "foreign")
    flag = "--actor.override-config" if script == "ppo_loop" else "--override-config"
    for resume in (checkpoint(out), "auto"):
        job = Job(script, out, flag, '{"hidden_size": 32}', "--resume", resume)
        job.ends_with(f"--resume {checkpoint(out)}.*is of another model: ")

    assert_same_end(out, script)
    return len(others) + 2, "one line, exit 2, auto too; nothing is touched"


def apart(script, short):
    """Ranks of two machines that share no disk, or not the checkpoint to resume."""
    there, out = checkpoint(golden(script)), folder() / f"{script}.apart"
    job = Job(script, "out", ranks=2, apart=there)
    job.ends_with("--out-dir out: host .* cannot write there .*; use storage that all hosts share")
    assert not list(folder().glob(f"{pathlib.Path(job.said).name}.*.disk/out/checkpoints/*"))
    job = Job(script, out, "--resume", "there", ranks=2, apart=there)
    job.ends_with("--resume .*: no complete checkpoint")
    assert not steps_of(out)
    return 2, "one line, exit 2, before the first step"


def full(script, short):
    """A disk that is full during a save: a small tmpfs, which is enlarged later."""
    (disk := folder() / f"{script}.disk").mkdir()
    kib = sum(path.stat().st_size for path in golden(script).rglob("*") if path.is_file()) // 2048
    mount = ("mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", disk)
    if subprocess.run(mount, capture_output=True).returncode:
        return 0, "left out: no right to mount a tmpfs"

    try:
        out = disk / "out"
        job = Job(script, out)
        assert job.wait()[0] == 1 and "error: the disk is full (No space left" in job.text(0)[1], (
            job
        )
        assert (there := steps_of(out)) and there[0] < STEPS, there
        subprocess.run(("mount", "-o", f"remount,size={4 * kib}k", disk), check=True)
        said = Job(script, out, "--resume", "auto").succeeds()
        assert re.search(rf"resume .*/step_{there[0]}\b", said) and "auto passes" not in said, said
        assert_same_end(out, script)
    finally:
        subprocess.run(("umount", disk), check=True)
    return 1, f"says so after step {there[0]}; with more room the same end"


def memory(script, short):
    """Too little memory for a step: --resume auto halves the token budget until it fits; equal
    metrics."""
    wide = (
        "--train-batch-size",
        192,
        "--ppo-mini-batch-size",
        192,
        "--steps",
        1,
        "--eval-every",
        0,
    )
    wide += (
        "--override-config",
        '{"intermediate_size": 8192}',
        "--ppo-max-token-len-per-gpu",
        1024,
    )
    wide += ("--no-share-prompts",)  # else the tokens are too few for their budget
    out, other = folder() / f"{script}.memory", folder() / f"{script}.roomy"
    Job(script, other, *wide).succeeds()
    tries = 0

    while any((job := Job(script, out, *wide, "--resume", "auto", memory=170)).wait()):
        tries += 1
        said = job.text(0)[1] + job.text(1)[1]
        assert "can't allocate memory" in said and ": out of memory; --resume auto" in said, said
        assert tries < 5, said

    tokens = 1024 >> tries
    assert f"so --ppo-max-token-len-per-gpu is lowered to {tokens}" in job.text(0)[0], (tries, job)
    for ours, theirs in zip(metrics_of(out), metrics_of(other), strict=True):
        assert ours.keys() == theirs.keys()
        for name, x in theirs.items():
            assert math.isclose(ours[name], x, rel_tol=1e-5, abs_tol=1e-6), (name, ours[name], x)
    return tries, f"continues with {tokens} tokens, not 1,024; the same end"


def sigterm(script, short):
    """SIGTERM to one rank or to all: the run saves and ends within a step."""
    return stopped(script, signal.SIGTERM)


def ctrl_c(script, short):
    """SIGINT, likewise."""
    return stopped(script, signal.SIGINT)


def stopped(script, number):
    out, ranks = folder() / f"{script}.{number}", [1] if script == "critic_fsdp" else None
    status = 128 + number
    job = Job(script, out, "--save-every", 0, slow=0.01)
    until(lambda: len(updates_of(out)) >= 3, "a step")
    before = updates_of(out)[-1]
    job.send(number, ranks)
    assert set(job.wait(60)) <= {status, -signal.SIGTERM} and job.codes[0] == status, str(job)
    (saved,) = steps_of(out)
    assert saved <= before + 2, (saved, before)
    assert f"stopped after step {saved} of {out}; continue with" in job.text(0)[0], str(job)
    Job(script, out, "--resume", "auto").succeeds()
    assert_same_end(out, script, absent=range(1, saved))  # because of --save-every 0
    return 1, f"{'to one rank: ' if ranks else ''}saved, exit {status}; the same end"


# phase -> a function that it calls often, updates before that becomes slow, the saved step
SLOW_IN = {
    "rollout": ("ppo_loop.draw", 1, 1), "reward": ("ppo_loop.ask_all", 1, 1),
    "evaluation": ("ppo_loop.draw", 2, 2), "log-probs": ("ppo_loop:Policy.forward", 1, 1),
    "values": ("critic_fsdp:DataParallelPPOCritic.forward", 1, 1),
    "update": ("ppo_loop:DataParallelPPOActor.optimizer_step", 1, 2),
}  # fmt: skip


def phases(script, short):
    """SIGTERM in each phase of a step, whose calls take a second each, on one rank and on two. The
    run ends after one more call, or after its updates, and saves its state."""
    longest = 0.0
    for phase, (name, after, saved) in SLOW_IN.items():
        for ranks in (1, 2):
            out = folder() / f"{script}.{phase} on {ranks}"
            job = Job(script, out, "--save-every", 0, ranks=ranks, slow_in=(name, after))
            until(pathlib.Path(f"{job.said}.slow").exists, phase)
            start = time.monotonic()
            alone = phase in ("rollout", "reward", "evaluation")  # no communication, so all get it
            job.send(signal.SIGTERM, None if alone else [ranks - 1])
            assert set(job.wait(60)) <= {143, -signal.SIGTERM} and job.codes[0] == 143, str(job)
            longest = max(longest, time.monotonic() - start)
            assert steps_of(out) == [saved], (phase, job)
            said = Job(script, out, "--resume", "auto", ranks=ranks).succeeds()
            assert re.search(rf"resume .*/step_{saved}\b", said), said
            if ranks == 1:
                assert_same_end(out, script, absent=range(1, saved))
    return 2 * len(SLOW_IN), f"ended {longest:.1f} s later at most; the same end"


def workers(script, short):
    """kill -9 of ranks whose worker processes run a reward that never returns: the workers end,
    too."""
    out = copy_of_golden(script, "workers", steps=(STEPS - 1,))
    spins = ("--reward", f"{ROOT}/tests/loop/rewards.py:spins", "--reward-timeout", 600)
    job = Job(script, out, *spins, "--resume", "auto")
    mine = lambda: [
        pid
        for pid, session, words in processes()
        if session in job.pids and "loky.backend.popen_loky_posix" in words
    ]
    # start-up takes fewer
    ticks = lambda pid: int(pathlib.Path(f"/proc/{pid}/stat").read_text().split()[13])
    until(lambda: sum(ticks(pid) > 50 for pid in mine()) > 1, job)
    job.send(signal.SIGKILL)
    until(lambda: not mine(), "its workers end", 5)
    job.wait()
    Job(script, out, "--resume", "auto").succeeds()
    assert_same_end(out, script, absent=range(1, STEPS - 1))
    return 1, "no process left within 5 s; the same end"


REWARDS = f"{ROOT}/tests/loop/rewards.py"


def judge_down(script, short):
    """A judge that goes down: the run saves its state and ends in one line; when the judge is back,
    --resume auto goes on."""
    out = folder() / f"{script}.judge_down"
    os.environ["JUDGE"] = str(folder() / "down")
    flags = ("--reward", f"{REWARDS}:judge_that_goes_down", "--resume", "auto")
    job = Job(script, out, *flags, "--save-every", 0, slow=0.02)
    until(lambda: len(updates_of(out)) >= 3, "a step")
    pathlib.Path(os.environ["JUDGE"]).touch()
    job.ends_with("--reward.*all .* rows failed: .*ConnectionError: the judge is down")
    (saved,) = steps_of(out)
    Job(script, out, *flags).ends_with("the judge is down")
    assert steps_of(out) == [saved] and saved >= 3, steps_of(out)
    os.remove(os.environ["JUDGE"])
    Job(script, out, *flags).succeeds()
    assert_same_end(out, script, absent=range(1, saved))
    return 2, f"one line, exit 2, saved after step {saved}; the same end"


def judge_worse(script, short):
    """A judge that fails for a growing share of rows: they are left out and counted. No mean and no
    update has them."""
    out = folder() / f"{script}.judge_worse"
    os.environ["JUDGE"] = str(folder() / "calls")
    flags = ("--reward", f"{REWARDS}:judge_that_fails_more_and_more", "--eval-every", 0)
    said = Job(script, out, *flags, "--kl-coef", 0, "--target-kl", "None").succeeds()
    shares = []
    steps = [row for row in rows_of(out / "metrics.jsonl") if "reward/mean" in row]
    for step, row in enumerate(steps, 1):
        rated = rows_of(out / "rollouts" / f"step_{step}.jsonl")
        good = [x["score"] for x in rated if not x["fault"]]
        failed = len(rated) - len(good)
        shares.append(failed / len(rated))
        assert row["reward/errors"] == failed and f"failed {failed}" in said or not failed, row
        assert math.isclose(row["reward/mean"], sum(good) / len(good), abs_tol=1e-6), row
        for x in rated:
            assert not x["fault"] or not any(x["response_mask"]), x
    assert len(steps) == STEPS and sum(shares[4:]) > sum(shares[:4]), shares
    return len(shares), f"from {shares[0]:.0%} to {shares[-1]:.0%} of the rows: none learned from"


def bad_logger(script, short):
    """A logger of the user that raises: a line says so, and the run goes on."""
    out = folder() / f"{script}.bad_logger"
    said = Job(script, out, "--logger", f"{REWARDS}:log_that_raises").succeeds()
    assert "--logger   failed: ConnectionError('no service')" in said, said
    assert_same_end(out, script)
    return 1, "one line; the same end"


def diverges(script, short):
    """An actor whose log-probs are not finite after an update: a one-line error, and the last
    checkpoint, the only one with --keep 1, is from an earlier step."""
    out = copy_of_golden(script, "diverges", steps=(STEPS - 1,))
    for more in (("--save-every", 1), ("--save-every", 0)):
        flags = ("--resume", "auto", "--keep", 1, "--steps", STEPS + 3, "--actor.lr", 1e30, *more)
        Job(script, out, *flags).ends_with("--actor.model .*: its log-probs are not finite")
        assert steps_of(out) == [STEPS - 1], steps_of(out)
    Job(script, out, "--resume", "auto").succeeds()
    assert_same_end(out, script, absent=range(1, STEPS - 1))
    return 2, "one line, exit 2; what was good stays"


def two_runs(script, short):
    """A second run of each script in the folder of one that goes on ends in one line and takes
    nothing."""
    out = folder() / f"{script}.two_runs"
    job = Job(script, out, slow=0.05)
    until(lambda: steps_of(out), "a checkpoint")
    for second in SCRIPTS:
        job.send(signal.SIGSTOP)  # so that what is there cannot change
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        for flags in ((), ("--resume", "auto")):
            Job(second, out, *flags).ends_with(
                f"--out-dir {out}: another run, process .* is writing there"
            )
        assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        job.send(signal.SIGCONT)
    job.succeeds()
    assert_same_end(out, script)
    return 2 * len(SCRIPTS), "one line, exit 2; the first ends as if alone"


def forking(script, short):
    """A reward that forks children which return, raise, exit, are killed or live on: the same
    rewards."""
    out = folder() / f"{script}.forking"
    Job(script, out, "--reward", f"{ROOT}/tests/loop/rewards.py:forks").succeeds()
    assert_same_end(out, script)
    return len(
        rows_of(golden(script) / "rollouts" / "step_1.jsonl")
    ) * STEPS, "each row its own reward"


def odd_rewards(script, short):
    """Functions of users that return, raise, exit, hang, fork or print in odd ways."""
    import rewards

    rng, said = random.Random(script), []
    for i in range(4 if short else 60):
        # one for rows that begin with an even digit
        names = rng.choices([*rewards.ODD], k=rng.randint(1, 2))
        file = folder() / f"odd_{i}.py"
        bodies = [
            f"def f{n}(prompt, response, answer):\n    {rewards.ODD[name]}"
            for n, name in enumerate(names)
        ]
        choose = "def f(*row):\n    return [f0, f1][ord(row[0][0]) % 2](*row)"
        file.write_text("\n\n".join([*bodies, choose if len(names) == 2 else "f = f0"]))
        flags = ("--reward", f"{file}:f", "--reward-timeout", 0.5, "--steps", 1, "--eval-every", 0)
        job = Job(script, folder() / f"{script}.odd", *flags)
        said.append(ended_well(job, names))
    return len(said), f"{said.count(0)} ended well, {said.count(2)} in one line"


def ended_well(job, what):
    """Asserts that a run ended well, or with status 2 and one line -> its status."""
    codes, error = job.wait(120), job.text(0)[1]
    assert codes in ([0], [2]), (what, str(job))
    assert codes == [0] or re.fullmatch("error[^:\n]*: [^\n]*\n", error), (what, error)
    return codes[0]


def reference(script, short):
    """The model that a run started from has changed when it is resumed."""
    out = folder() / f"{script}.reference"
    model = golden(script) / "hf"
    started = shutil.copytree(model, folder() / "started")
    flags = ("--actor.model", started, "--steps", 2, "--resume", "auto")
    Job(script, out, *flags).succeeds()
    other = copy_of_golden(script, "other", steps=())
    Job(script, other, "--seed", 1, "--steps", 1).succeeds()
    shutil.copytree(other / "hf", started, dirs_exist_ok=True)
    Job(script, out, *flags, "--steps", 3).ends_with(
        f"--resume {out}/.* model: weights of the reference"
    )
    shutil.copytree(model, started, dirs_exist_ok=True)

    assert "step 3/3" in Job(script, out, *flags, "--steps", 3).succeeds()
    for flag, model in (("--actor.model", out / "hf"), ("--critic.model", out / "critic_hf")):
        job = Job(script, out, flag, model)
        assert job.wait() == [2], str(job)
        said = re.sub(r"[\s│]+", " ", job.text(0)[1])  # a box of tyro's
        assert "the run would replace a model there that it loads" in said, said
    return 3, "one line, exit 2"


TORCHRUN = {  # name -> nodes, signal, whether rank 1 gets it instead of torchrun
    "rank-killed": (1, signal.SIGKILL, True),
    "rank-hangs": (1, signal.SIGSTOP, True),
    "rank-killed-of-2-nodes": (2, signal.SIGKILL, True),
    "rank-hangs-of-2-nodes": (2, signal.SIGSTOP, True),
    "torchrun-ended": (1, signal.SIGTERM, False),
    "torchrun-interrupted": (1, signal.SIGINT, False),
    "torchrun-killed": (1, signal.SIGKILL, False),
}


def torchrun(script, short):
    """A rank dies or hangs, and torchrun restarts the run; torchrun ends or dies, and its ranks
    end, too."""
    golden(script)
    with ThreadPoolExecutor(3) as pool:
        waits = list(pool.map(under_torchrun, TORCHRUN))
    for name in TORCHRUN:
        if name.startswith("torchrun"):
            Job(script, folder() / name, "--resume", "auto").succeeds()
        assert_same_end(folder() / name, script)
    return len(TORCHRUN), f"ended {', '.join(waits)} s after {', '.join(TORCHRUN)}; the same ends"


def agents_of(name, out, nodes):
    """Starts critic_fsdp.py, with slow saves, on two ranks -> a torchrun for each of one or two
    nodes."""
    flags = (
        "--out-dir",
        out,
        "--resume",
        "auto",
        "--timeout-minutes",
        0.4 if "hangs" in name else 3,
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    meet = ("--standalone",)

    if nodes == 2:  # rendezvous in a file, which needs no port
        meet = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file")
        meet += ("--rdzv-endpoint", f"{out}.meet", "--rdzv-id", name)
        # torchrun counts a restart only on the node whose rank failed, and ranks look each other up
        # under that count: with one store for all starts, the other node's ranks would find those
        # of the first
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    command = (sys.executable, "-m", "torch.distributed.run", *meet, "--nproc-per-node", 2 // nodes)
    command += ("--max-restarts", 1, __file__, "--slowly", *flags_of("critic_fsdp", *flags))
    with open(f"{out}.said", "w") as file:
        start = lambda: subprocess.Popen([*map(str, command)], env=env, stdout=file, stderr=file)
        return [start() for _ in range(nodes)]


def under_torchrun(name):
    """A run with a fault after its second update -> after how many seconds it ended, as text."""
    nodes, number, to_rank = TORCHRUN[name]
    out = folder() / name
    ranks = lambda: [(pid, words) for pid, _, words in processes() if str(out) in words]
    agents = agents_of(name, out, nodes)

    try:
        until(lambda: len(updates_of(out)) >= 2 or any(a.poll() is not None for a in agents), name)
        start = time.monotonic()
        (victim,) = (
            [pid for pid, words in ranks() if "RANK=1" in words] if to_rank else [agents[0].pid]
        )
        os.kill(victim, number)
        codes = [agent.wait(timeout=300) for agent in agents]
        seconds = time.monotonic() - start
        until(lambda: not ranks(), f"all of {name} have ended", 60)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()

    said = pathlib.Path(f"{out}.said").read_text()
    if to_rank:
        assert not any(codes) and said.count("resume     ") >= 2, (name, codes, said[-5000:])
    else:
        assert 0 not in codes and 1 <= steps_of(out)[0] < STEPS, (name, codes, said)
        assert (
            number == signal.SIGKILL or f"stopped after step {steps_of(out)[0]} of {out}" in said
        ), said
    return f"{seconds:.0f}"


def storm(script, short):
    """Rewards (in PPO the KL penalty) so large that every gradient overflows. After ten skipped
    updates the run ends, and the critic is unchanged."""
    ppo, out = script == "ppo_loop", copy_of_golden(script, "storm")
    lines = [json.dumps({**row, "reward": 1e30}) + "\n" for row in rows_of(ROWS)]
    (folder() / "storm.jsonl").write_text("".join(lines))
    bad = (
        ("--kl-coef", 1e30, "--target-kl", "None")
        if ppo
        else ("--rollouts", folder() / "storm.jsonl")
    )
    job = Job(script, out, *bad, "--steps", STEPS + 12, "--resume", "auto", lax=True)
    flag = "--critic.lr" if ppo else "--lr"
    job.ends_with(f"10 updates in a row were skipped: gradients are not finite; use a lower {flag}")
    last = STEPS + 9

    assert steps_of(out)[0] == last
    before, after = (state_of(checkpoint(out, step)) for step in (STEPS, last))
    of_critic = [name for name in after if not name.startswith("actor/")]
    changed = [
        name for name in of_critic if after[name] != before[name] and not name.endswith(" rng")
    ]

    assert before.keys() == after.keys() and {name[-5:] for name in changed} == {".json"}, changed
    return 1, "ends after 10 updates, the critic untouched"


def power(script, short):
    """Power cuts, and the orders in which a disk may write; see power.py."""
    return importlib.import_module("power").try_all(script, short)


# ---- Fuzzing by hypothesis, with the same inputs every time --------------------------------------


def fuzz(function, script, short):
    """Tries a function -> (number of inputs, a strategy for them, a check of one) in a fork,
    because this process must not import common. If the check raises UserError, or pydantic's error
    for a Config, the input was refused."""
    path = golden(script) / "counts.json"
    counts = [0, 0]  # accepted, refused

    def try_inputs():
        import common

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        n, strategy, check = function(script, short)

        def count(case):
            try:
                check(case)
                counts[0] += 1
            except pydantic.ValidationError:
                counts[1] += 1
            except common.UserError as error:
                assert re.fullmatch("(toy:|.*--).{1,2000}", str(error)), error
                counts[1] += 1

        options = {"derandomize": True, "database": None, "deadline": None, "max_examples": n}
        options |= {
            "phases": [hypothesis.Phase.generate],
            "suppress_health_check": [*hypothesis.HealthCheck],
        }
        hypothesis.settings(**options)(hypothesis.given(strategy)(count))()
        path.write_text(json.dumps(counts))

    forked.run(1, try_inputs, timeout=1200)
    taken, refused = json.loads(path.read_text())
    return taken + refused, f"{taken} taken, {refused} refused in one line"


def rows(script, short):
    import common

    tokenizer = common.char_tokenizer()
    model_config = common.AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer), max_position_embeddings=32
    )
    keys = st.sampled_from([*common.Rollout.model_fields])
    number = st.one_of(st.integers(-2, 2), st.integers(), st.floats(), st.just(10**400))
    leaf = st.one_of(number, st.booleans(), st.none(), st.text(max_size=4))
    deeper = lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=2)
    value = st.recursive(leaf, deeper)
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "x"]), "content": value}
    )
    good = st.sampled_from([
        {"prompt": "1+1=", "response": "2", "reward": 1.0},
        {"prompt_ids": [5, 6], "response_ids": [7, 8], "rewards": [0.5, 1], "values": [0, 1],
         "response_mask": [1, 0]},
    ])  # fmt: skip
    changes = st.dictionaries(
        keys, st.one_of(value, st.lists(number, max_size=3), st.lists(message))
    )
    changed = st.builds(dict.__or__, good, st.one_of(st.just({}), changes))
    without = lambda row, gone: {key: x for key, x in row.items() if key not in gone}
    row = st.builds(without, changed, st.sets(keys, max_size=1))
    line = st.one_of(st.one_of(row, value).map(json.dumps).map(str.encode), st.binary(max_size=12))

    def check(lines):
        batch = common.check(common.read_rows(lines, tokenizer, model_config, "toy"))
        assert batch.token_level_rewards.isfinite().all()
        assert batch.values.isfinite().all()
        assert 0 <= int(batch.input_ids.min()) and int(batch.input_ids.max()) < len(tokenizer)
        assert max(batch.lengths) <= 32 and len(batch) <= len(lines)

    return 150 if short else 1000, st.lists(line, min_size=1, max_size=3), check


def values_of(kind):
    """A strategy for the values of a flag of this type, most of them odd."""
    numbers = [-1.0, 0.0, 1e-45, 1e-3, 0.5, 1.0, 2.0, 1e38, math.inf, math.nan]
    texts = ["", "x", "{", "{}", "[]", "null", '{"num_hidden_layers": 0}', "/", "é", str(ROWS)]
    plain = {bool: [False, True], int: [-1, 0, 1, 2, 3, 7, 1000], float: numbers, str: texts}
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from([*args, "x"])
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    return st.one_of(*map(values_of, args)) if args else st.sampled_from(plain.get(kind, [None]))


def flags(script, short):
    """Odd values of flags, in runs of one step."""
    import common

    common.write_report = lambda *_: None
    module = importlib.import_module(script)
    own = {"steps": 1, "eval_every": 0, "out_dir": str(folder() / f"{script}.flags")}
    small = {"override_config": '{"num_hidden_layers": 1}'}
    if script == "ppo_loop":
        run = module.parse([str(x) for x in PPO if x != "--dump-rollouts"])
        parts = {
            "": dataclasses.replace(run, **own),
            "critic": dataclasses.replace(run.critic, **small),
        }
        parts["actor"] = dataclasses.replace(run.actor, **small, ppo_mini_batch_size=4)
        parts["vllm"] = run.vllm
    else:
        parts = {"": module.Run(rollouts=str(ROWS), train_batch_size=4, **own)}
        parts["critic"] = module.Config(ppo_mini_batch_size=4, **small)
    fixed = "critic actor vllm backend rollout model steps train_batch_size plan supervised_steps"
    fixed += " out_dir prefix"  # no flag
    choices = []
    for part, config in parts.items():
        for name, kind in typing.get_type_hints(type(config)).items():
            if name not in fixed.split():
                choices.append(st.tuples(st.just(part), st.just(name), values_of(kind)))

    def check(changes):
        configs = dict(parts)
        for part, name, x in changes:
            configs[part] = dataclasses.replace(configs[part], **{name: x})
        run = dataclasses.replace(configs.pop(""), **configs)
        module.main(run)

    n = 15 if short or script == "ppo_loop" else 50
    return n, st.lists(st.one_of(choices), min_size=1, max_size=2), check


def folders(script, short):
    """Changed, removed or added bytes in checkpoints, and removed or swapped files, are all
    noticed."""
    import common

    common.setup_distributed()
    path = checkpoint(golden(script))
    common.verify(str(path))
    files = st.sampled_from(sorted(p for p in path.rglob("*") if p.is_file()))

    def check(case):
        file, act, place, gone, added, other = case
        old = file.read_bytes()
        at = int(place * len(old))
        edited = old[:at] + added + old[at + gone :]
        new = {"edit": edited, "swap": other.read_bytes(), "remove": None}[act]
        hypothesis.assume(new != old)
        try:
            file.unlink() if new is None else file.write_bytes(new)
            common.verify(str(path))
            raise AssertionError("not noticed")
        except common.UserError as error:
            assert str(error).startswith("--resume /"), error
            raise
        finally:
            file.write_bytes(old)

    acts = st.sampled_from(["edit", "edit", "edit", "swap", "remove"])
    gone = st.sampled_from([0, 1, 2, 10**9])
    cases = st.tuples(files, acts, st.floats(0, 1), gone, st.binary(max_size=2), files)
    return 60 if short else 200, cases, check


FAULTS = {  # fault -> scripts to try it on; with --short only the first
    kills: SCRIPTS, background: SCRIPTS, logger: ("ppo_loop", "critic_fsdp"), damage: SCRIPTS,
    foreign: SCRIPTS, apart: SCRIPTS, full: SCRIPTS, memory: ("critic_fsdp", "critic_megatron"),
    sigterm: SCRIPTS, ctrl_c: SCRIPTS, phases: ("ppo_loop",), workers: ("ppo_loop",),
    judge_down: ("ppo_loop",), judge_worse: ("ppo_loop",), bad_logger: SCRIPTS,
    diverges: ("ppo_loop",),
    two_runs: SCRIPTS, forking: ("ppo_loop",), odd_rewards: ("ppo_loop",),
    reference: ("ppo_loop",), torchrun: ("critic_fsdp",), storm: SCRIPTS, rows: ("critic_fsdp",),
    flags: SCRIPTS, folders: SCRIPTS, power: SCRIPTS,
}  # fmt: skip

# not with --short: test_starts.py has a second run in one folder, test_user_functions.py odd
# rewards, test_power.py power cuts
LONG = (foreign, apart, torchrun, phases, workers, two_runs, reference, odd_rewards, power)


def main(names, short):
    forked.check_names(__doc__, names, [fault.__name__ for fault in FAULTS])
    warnings.filterwarnings("ignore")  # Megatron's, about packages that are not installed
    forked.warm_up()  # once here, because every run needs it
    total, start = 0, time.monotonic()

    try:
        for fault, scripts in FAULTS.items():
            long = fault in LONG
            if names and fault.__name__ not in names or short and long:
                continue
            for script in list(scripts)[: 1 if short else None]:
                began = time.monotonic()
                tried = (
                    fuzz if fault in (rows, flags, folders) else lambda fault, *args: fault(*args)
                )
                times, outcome = tried(fault, script, short)
                total += times
                seconds = f"{time.monotonic() - began:5.1f} s"
                print(
                    f"{fault.__name__ + ', ' + script:30}{times:5}  {seconds}  {outcome}",
                    flush=True,
                )
    finally:
        shutil.rmtree(folder(), ignore_errors=True)
    print(f"{'all':30}{total:5}  {time.monotonic() - start:5.1f} s  nothing lost")


@forked.scenario(ranks=0)
def shortest(folder):
    """Fewer of each fault, on one script each, for test_faults.py."""
    main(set(), short=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--slowly"]:  # a rank that torchrun starts
        run_script(sys.argv[2:], slow=0.1)
    sys.modules["faults"] = sys.modules["__main__"]  # power.py imports it
    main(set(sys.argv[1:]) - {"--short"}, "--short" in sys.argv)
