"""How a run stops: by Ctrl-C, SIGTERM or a crash, on one rank and on two, and what it has saved by
then.

faults.py has more: signals and crashes at random times, under torchrun, and in each phase of a PPO
step."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from forked import processes, until
from helpers import ROOT, run, succeeded, torchrun, worker
from ppo_scenarios import metrics_of

import common

SCRIPTS = ("critic_fsdp", "critic_megatron", "ppo_loop")
ROWS = ROOT / "tests" / "rows.jsonl"
LINE = "Ctrl-C     ended at once\n"
LAYOUT = {"critic_megatron": ("--tensor-model-parallel-size", 2)}  # of two ranks
# runs a script, where the nth call of a function first does something else
SCRIPT = """
import os, pkgutil, runpy, signal, sys, time


def patch(what, nth, act):
    owner, _, name = what.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    work, calls = getattr(owner, name), []

    def first_acts(*args, **more):
        calls.append(1)
        if len(calls) == nth:
            exec(act)
        return work(*args, **more)

    setattr(owner, name, first_acts)


for row in {patches!r}:
    patch(*row)
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PRESS = "signal.raise_signal(signal.SIGINT)"
CRASH = "os.kill(os.getpid(), signal.SIGKILL)"


def flags_of(script, out, *more):
    """A command line with few rows, which does not evaluate."""
    own = ("--rollouts", ROWS)
    if script == "ppo_loop":
        own = ("--supervised-steps", 0, "--max-response-length", 3)
    flags = ("--train-batch-size", 8, "--eval-every", 0, "--out-dir", out)
    return [str(x) for x in (ROOT / f"{script}.py", *own, *flags, *more)]


def patched(path, patches, script, *flags):
    """Writes a program that runs the script with these patches: (function, nth call, what it does
    first)."""
    path.write_text(SCRIPT.format(patches=patches, argv=flags_of(script, *flags)))
    return path


def saved(out):
    """The steps of the checkpoints, in order."""
    return sorted(step for step, _ in common.steps_in(f"{out}/checkpoints"))


def weights(out):
    """The bytes of all weights that a run has exported."""
    return {p.relative_to(out): p.read_bytes() for p in out.glob("*hf/*.safetensors")}


def assert_goes_on(script, ranks, tmp_path, *flags):
    """The run in out continues, and ends as one in whole that has never stopped."""
    succeeded(torchrun(ranks, *flags_of(script, tmp_path / "out", *flags, "--resume", "auto")))
    succeeded(torchrun(ranks, *flags_of(script, tmp_path / "whole", *flags)))
    assert weights(tmp_path / "out") == weights(tmp_path / "whole") != {}


# ---- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize("script, what, flags", [
    ("critic_fsdp", "common.read_rows", ()),
    ("critic_fsdp", "common.describe_rows", ("on two ranks",)),
    ("critic_megatron", "common.init_value_head", ()),
    ("ppo_loop", "common.load_model", ()),
    ("critic_megatron", "common.write_scores", ("--score", ROWS)),
    ("critic_megatron", "common.write_report", ()),
    ("ppo_loop", "common.write_report", ()),
])  # fmt: skip
def test_ctrl_c_with_nothing_to_save_ends_in_one_line(script, what, flags, tmp_path):
    """Before the loop, after it, and where there is none."""
    out = tmp_path / "out"
    start = lambda program: run(sys.executable, program)
    if "on two ranks" in flags:
        start, flags = lambda program: torchrun(2, program), ()
    if "--score" in flags:
        worker(model="tiny-qwen2", value_head_init="normal").export_hf(tmp_path / "judge")
        flags += ("--model", tmp_path / "judge")
    program = patched(tmp_path / "run.py", [(what, 1, PRESS)], script, out, "--steps", 1, *flags)
    process = start(program)
    assert (process.returncode, process.stderr) == (130, LINE), process.stderr
    assert saved(out) == ([1] if "report" in what else [])


@pytest.mark.parametrize(
    "script, ranks", [("critic_fsdp", 1), *((script, 2) for script in SCRIPTS)]
)
def test_ctrl_c_in_the_loop_saves_the_state(script, ranks, tmp_path):
    """All ranks end at the same step. The run continues from it, and ends as if it had not been
    stopped."""
    out = tmp_path / "out"
    flags = ("--steps", 3, *(LAYOUT.get(script, ()) if ranks == 2 else ()))
    presses = [("common.describe_update", 2, PRESS)]
    process = torchrun(ranks, patched(tmp_path / "run.py", presses, script, out, *flags))
    assert process.returncode == 130 and process.stderr == "", process.stderr
    said = f"Ctrl-C     stopped after step 2 of {out}; continue with --resume auto\n"
    assert process.stdout.endswith(said)
    assert process.stdout.count("Ctrl-C again ends it at once\n") == 1
    assert saved(out) == [2]
    assert_goes_on(script, ranks, tmp_path, *flags)


def test_a_closed_terminal_saves_the_state(tmp_path):
    """As Slurm's warnings do. Both may come, and what cannot be printed is no fault."""
    out = tmp_path / "out"
    hangs_up = "a, b = os.openpty(); os.dup2(b, 1); os.close(a); signal.raise_signal(signal.SIGHUP)"
    warned = [("common.checksum", 1, "signal.raise_signal(signal.SIGUSR1)")]
    patches = [("common.describe_update", 2, hangs_up), *warned]
    program = patched(tmp_path / "run.py", patches, "critic_fsdp", out, "--steps", 3)
    process = run(sys.executable, program)
    assert (process.returncode, process.stderr, saved(out)) == (129, "", [2]), process.stderr


@pytest.mark.parametrize("stdout, code, said", [
    ("a, b = os.pipe(); os.close(a)", 0, ""),
    ("b = os.open('/dev/full', os.O_WRONLY)", 1, "error: the disk is full (No space left"),
], ids=["reader", "disk"])  # fmt: skip
def test_a_run_goes_on_when_its_reader_has_gone_away(stdout, code, said, tmp_path):
    """As behind `| head -1`, whatever is printed then. A full disk still ends it, and is told."""
    out = tmp_path / "out"
    patches = [("common.describe_rows", 1, f"{stdout}; os.dup2(b, 1)")]
    patches += [("common.describe_update", 1, "print('x' * 10**5, flush=True)")]
    program = patched(tmp_path / "run.py", patches, "critic_fsdp", out, "--steps", 1)
    process = run(sys.executable, program)
    assert process.returncode == code and saved(out) == [1][code:], process.stderr
    assert said in process.stderr and bool(said) == bool(process.stderr)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_is_heard_unless_it_was_ignored_before(name, tmp_path, capsys):
    """As nohup ignores that of a closed terminal. The last line says which one it was."""
    number = signal.Signals[name]
    before = signal.getsignal(number)
    common.setup_distributed()
    try:
        for handler, heard in ((signal.SIG_IGN, 0), (signal.SIG_DFL, number)):
            signal.signal(number, handler)
            with common.Checkpoints(str(tmp_path)) as checkpoints:
                checkpoints.begin()
                signal.raise_signal(number)
                assert common.Stop.signal == heard
            assert signal.getsignal(number) == handler

        with pytest.raises(SystemExit, match=f"^{128 + number}$"):
            checkpoints.leave(7, number)
    finally:
        signal.signal(number, before)
        common.Stop.signal = 0
    assert f"\n{name:10s} stopped after step 7 of " in capsys.readouterr().out


TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
LAYOUTS = {4: (TENSOR, 2), 2: (PIPELINE, 2), 3: (), 8: (TENSOR, 2, PIPELINE, 2)}  # of Megatron


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_that_stops_on_four_ranks_goes_on_with_another_number(script, tmp_path):
    """With 2, 3 and 8 ranks, which have more or fewer than one row of a mini-batch each: the same
    learning rates, and up to rounding the same metrics, so the same rows in each mini-batch."""
    flags = ("--steps", 4, "--ppo-mini-batch-size", 4, "--lr-scheduler-type", "cosine")
    if script == "ppo_loop":
        flags = ("--steps", 4, "--critic.ppo-mini-batch-size", 4, "--actor.ppo-mini-batch-size", 4)
        flags += ("--critic.lr-scheduler-type", "cosine")
    layout = lambda ranks: LAYOUTS[ranks] if script == "critic_megatron" else ()
    presses = [("common.describe_update", 2, PRESS)]
    out = tmp_path / "out"
    program = patched(tmp_path / "run.py", presses, script, out, *flags, *layout(4))
    assert torchrun(4, program).returncode == 130 and saved(out) == [2]
    whole = tmp_path / "whole"
    succeeded(torchrun(4, *flags_of(script, whole, *flags, *layout(4))))
    numbers = lambda out: {key: x for key, x in metrics_of(out).items() if x is not None}
    expected = numbers(whole)

    for ranks in (2, 3, 8):
        other = shutil.copytree(out, tmp_path / f"on {ranks}")
        more = (*flags, *layout(ranks), "--resume", "auto")
        said = succeeded(torchrun(ranks, *flags_of(script, other, *more)))
        assert f"\nlayout     ranks {ranks} = " in said and saved(other)[-1] == 4, said
        ours = numbers(other)
        assert ours == pytest.approx(expected, rel=2e-4, abs=2e-5), ranks
        for key, x in expected.items():
            assert key[1] != "critic/lr" or ours[key] == x


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    """In the save that the first has asked for, which would take a minute."""
    out = tmp_path / "out"
    slowly = f"time.sleep(1.5); {PRESS}; time.sleep(60)"
    patches = [("common.describe_update", 2, PRESS), ("common.checksum", 1, slowly)]
    program = patched(tmp_path / "run.py", patches, "critic_fsdp", out)
    process = run(sys.executable, program, timeout=50)
    assert (process.returncode, process.stderr) == (130, LINE), process
    assert saved(out) == []


@pytest.mark.parametrize("first, second, ends", [
    (signal.SIGINT, signal.SIGINT, True),
    (signal.SIGINT, signal.SIGTERM, True),  # as torchrun passes a second Ctrl-C on
    (signal.SIGTERM, signal.SIGINT, True),
    (signal.SIGTERM, signal.SIGTERM, False),  # schedulers send it more than once
])  # fmt: skip
def test_signals_within_a_second_are_one(first, second, ends, monkeypatch):
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    of_term = signal.getsignal(signal.SIGTERM)
    try:
        common.listen()
        for number in (first, first, second):
            signal.raise_signal(number)
        assert common.Stop.signal == first and not pressed
        monkeypatch.setattr(common.Stop, "time", common.Stop.time - 2)
        signal.raise_signal(second)
        assert bool(pressed) == ends and common.Stop.signal == first
        common.listen_no_more()
        signal.raise_signal(signal.SIGINT)
        assert len(pressed) == 1 + ends and signal.getsignal(signal.SIGTERM) == of_term
    finally:
        common.listen_no_more()
        signal.signal(signal.SIGINT, before)
        common.Stop.signal = 0


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_under_torchrun(again, tmp_path):
    """The terminal sends it to torchrun, which passes it on; here all ranks have it already, as
    from srun. A second one ends them at once, in a save that would take a minute."""
    out, log = tmp_path / "out", tmp_path / "log"
    slowly = [("common.checksum", 1, "time.sleep(60)")] if again else []
    program = patched(tmp_path / "run.py", slowly, "critic_fsdp", out, "--steps", 100000)
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as file:
        options = {"env": env, "stdout": file, "stderr": file, "process_group": 0}
        process = subprocess.Popen([sys.executable, *launcher, program], **options)
    mine = lambda words: str(program) in words and "RANK=" in str(words)
    ranks = lambda: [pid for pid, _, words in processes() if mine(words)]

    try:
        until(lambda: "step      2/" in log.read_text() or process.poll() is not None, log, 180)
        for pid in ranks():
            os.kill(pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGINT)
        if again:
            time.sleep(2)
            os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=25)  # after 30 s torchrun would kill its ranks
    finally:
        process.kill()

    until(lambda: not ranks(), "the end of all ranks", 20)
    said = log.read_text()
    assert said.count("Ctrl-C again ends it at once\n") == 1, said
    assert (said.count(LINE), len(saved(out))) == ((1, 0) if again else (0, 1)), said
    if not again:
        (step,) = saved(out)
        assert f"stopped after step {step} of {out}; continue with --resume auto\n" in said, said


SLEEPS = """
import subprocess, time
def answer(*row):
    if row and row[1] == row[2]:  # right, as in the trial before the run
        return 1.0
    subprocess.Popen(["sleep", "{seconds}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(60)
    return 0.0
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
@pytest.mark.parametrize("number, imports, ended, said", [
    (signal.SIGINT, True, 130, LINE), (signal.SIGTERM, False, 143, ""),
    (signal.SIGKILL, False, -9, None),
])  # fmt: skip
def test_the_processes_of_a_reward_function_end_with_the_run(
    number, imports, ended, said, tmp_path
):
    """And the programs that they have started, in a row or in an import."""
    seconds = f"{10**6 + os.getpid()}"  # also in the environment of all, to know them by
    source = SLEEPS.format(seconds=seconds) + "answer()\n" * imports
    (tmp_path / "slow.py").write_text(source)
    flags = ("--reward", f"{tmp_path}/slow.py:answer", "--reward-timeout", 60)
    ours = lambda: [pid for pid, _, words in processes() if f"OURS={seconds}" in words]
    sleeping = lambda: [words for *_, words in processes() if seconds in words]
    process = subprocess.Popen(
        [sys.executable, *flags_of("ppo_loop", tmp_path / "out", *flags)],
        env={**os.environ, "OURS": seconds, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(sleeping()) >= 8 or process.poll() is not None, "a program of each row", 120)
    process.send_signal(number)

    # the processes of a rank that is killed die with it, but not their programs
    assert process.wait(timeout=30) == ended
    if number == signal.SIGKILL:
        until(lambda: len(ours()) == len(sleeping()), "the end of the rank's processes", 10)
        for pid in ours():
            os.kill(pid, signal.SIGKILL)
    until(lambda: not ours(), "the end of all processes", 10)
    if said is not None:
        assert process.stderr.read() == said


# ---- Checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, ranks", [("critic_fsdp", 2), ("critic_megatron", 1), ("ppo_loop", 1)]
)
def test_a_crash_loses_no_more_than_the_steps_since_the_last_evaluation(script, ranks, tmp_path):
    """Only the newest checkpoint is there; the run that continues ends as one that has never
    crashed."""
    flags = ("--steps", 6, "--eval-every", 2)
    crashes = [("common.describe_update", 6, CRASH)]
    out = tmp_path / "out"
    process = torchrun(ranks, patched(tmp_path / "run.py", crashes, script, out, *flags))
    at_each = f"saving     {out}/checkpoints at each evaluation, the newest is kept;"
    assert process.returncode == -9 and f"{at_each} Ctrl-C saves, too\n" in process.stdout, process
    assert saved(out) == [4]
    assert_goes_on(script, ranks, tmp_path, *flags)
    assert saved(tmp_path / "whole") == [6]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """The folder of a run with a checkpoint after each of its two steps."""
    out = tmp_path_factory.mktemp("two") / "steps"
    succeeded(run(sys.executable, *flags_of("critic_fsdp", out, "--steps", 2, "--save-every", 1)))
    return out


@pytest.mark.parametrize("more, kept", [
    ((), [1, 2, 6]),  # what the user has asked for before stays
    (("--keep", 2), [4, 6]),
    (("--save-every", 3), [1, 2, 3, 6]),
    (("--save-every", 0), [1, 2, 6]),
])  # fmt: skip
def test_which_checkpoints_a_run_keeps(more, kept, two_steps, tmp_path):
    out = shutil.copytree(two_steps, tmp_path / "out")
    flags = ("--steps", 6, "--resume", "auto", "--eval-every", 2, *more)
    succeeded(run(sys.executable, *flags_of("critic_fsdp", out, *flags)))
    assert saved(out) == kept


@pytest.mark.parametrize("flags, words", [
    ({}, "at each evaluation, the newest is kept"),
    ({"keep": 3}, "at each evaluation, the last 3 are kept"),
    ({"eval_every": 0}, "at the end"),
    ({"save_every": 0}, "at the end"),
    ({"save_every": 5}, "every 5 steps"),
    ({"save_every": 5, "keep": 1}, "every 5 steps, the newest is kept"),
])  # fmt: skip
def test_a_line_says_what_is_saved(flags, words, tmp_path, capsys):
    common.setup_distributed()
    with common.Checkpoints(str(tmp_path), **{"eval_every": 20, **flags}) as checkpoints:
        checkpoints.begin()
    said = capsys.readouterr().out
    assert said == f"saving     {tmp_path}/checkpoints {words}; Ctrl-C saves, too\n"


def test_help_has_the_same_words_in_all_scripts():
    """About checkpoints, but for the PPO loop's steps, which are updates of a critic."""
    found = []
    for script in SCRIPTS:
        text = (ROOT / f"{script}.py").read_text().replace("# steps between", "# updates between")
        found += re.findall(r"    # updates between checkpoints .*?\n    async_save", text, re.S)
    assert len(found) == 3 and len({*found}) == 1
    assert "save_every" in found[0] and "keep" in found[0]
