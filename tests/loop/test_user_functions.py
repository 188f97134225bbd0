"""Rewards and environments of the user: their processes, faults, time-outs, what they return."""

import collections
import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import forked
import pebble
import pytest
import rewards
from helpers import ROOT, refused, run, succeeded
from ppo_helpers import TOKENIZER, a_run, a_task

import common
import ppo_loop
from common import UserError
from ppo_loop import Prompt, Reply

FUNCTIONS = """
import contextlib, json, os, signal, sys, time

def parse(text):
    os.chdir("/")
    return json.loads(text)

def odd(prompt, response, answer, turns):
    if prompt == "spins":  # it catches everything and switches alarms off
        signal.setitimer(signal.ITIMER_REAL, 0)
        while True:
            with contextlib.suppress(BaseException):
                sum(range(1000))
    return {"raises": lambda: {}["x"], "exits": lambda: sys.exit("enough"),
            "parses": lambda: parse("{"), "dies": lambda: os._exit(3),
            "sleeps": lambda: time.sleep(30),
            "closes": lambda: os.closerange(3, 100),
            "program": lambda: os.system("sleep 30"), "pid": os.getpid,
            "modules": lambda: " ".join(sys.modules), "stdin": lambda: sys.stdin.read(),
            "turns": lambda: "/".join(turns)}.get(prompt, lambda: prompt + response + answer)()

def meets(prompt, response, answer):
    open(prompt, "w").close()
    while len(os.listdir(os.path.dirname(prompt))) < 8:
        time.sleep(0.01)
    return 8

def together(rows, prompt):
    return [f"{x} of {len(rows)}" for x in prompt]
"""


def late(seconds):
    """The answer to a row whose process was killed."""
    return None, f"no answer within {seconds} s (--reward-timeout), or its process has died"


@pytest.fixture
def ask(tmp_path):
    """Runs ask_all with a function of this text on rows with these prompts and this answer."""

    def go(name, prompts, answer=None, seconds=20.0, text=FUNCTIONS):
        (tmp_path / "mine.py").write_text(text)
        function = ppo_loop.load_function(f"{tmp_path}/mine.py:{name}", "--reward", seconds)
        rows = [Prompt([1], prompt, answer) for prompt in prompts]
        replies = [Reply(row, i, text="r", turns=["r", "o"]) for i, row in enumerate(rows)]
        return ppo_loop.ask_all(function, replies)

    yield go
    ppo_loop.end_workers()


def test_a_users_function_runs_in_processes_that_are_killed_when_they_hang(ask):
    """Answers keep the order of the rows, also of those that wait for a new process. Nothing a
    function does switches the time-out off, workers import nothing slow, and child programs do not
    read the rows. A fault has the deepest line of the user's file."""
    rows = "raises spins pid sleeps dies closes exits program modules stdin turns parses".split()
    answers = ask("odd", rows := rows + ["pid"] * 9, seconds=1.5)
    pids = {made for row, (made, fault) in zip(rows, answers) if row == "pid" and fault == ""}

    assert 1 <= len(pids) <= 16 and os.getpid() not in pids
    named = dict(zip(rows, answers))
    assert {named[row] for row in ("spins", "sleeps", "dies", "closes", "program")} == {late(1.5)}
    line = 1 + FUNCTIONS.partition("{}[")[0].count("\n")
    assert named["raises"] == (None, f"KeyError: 'x' at mine.py:{line} in <lambda>")
    assert named["exits"] == (None, f"SystemExit: enough at mine.py:{line} in <lambda>")
    assert named["stdin"] == ("", "") and named["turns"] == ("r/o", "")
    made, fault = named["parses"]
    assert made is None and fault.startswith("JSONDecodeError: ")
    assert fault.endswith(" at mine.py:6 in parse")

    modules = named["modules"][0].split()
    assert "mine" in modules
    assert not {"torch", "numpy", "pydantic", "common", "ppo_loop"} & set(modules)
    assert ask("odd", [f"{n}" for n in range(40)], "!") == [(f"{n}r!", "") for n in range(40)]


def test_a_signal_interrupts_a_users_function(ask, monkeypatch):
    """Rows that would take half a minute each are abandoned."""
    monkeypatch.setattr(common.Stop, "signal", 0)
    threading.Timer(1.0, lambda: setattr(common.Stop, "signal", signal.SIGTERM)).start()
    began = time.monotonic()
    assert ask("odd", ["sleeps"] * 20, seconds=60.0) == [] and time.monotonic() - began < 20


def test_rows_run_at_once_in_processes_and_built_in_rewards_here(ask, tmp_path, monkeypatch):
    """Eight rows that wait for each other run at once, on any number of cores. A function of lists
    gets all of them."""
    (tmp_path / "here").mkdir()
    assert ask("meets", [f"{tmp_path}/here/{n}" for n in range(8)]) == [(8, "")] * 8
    assert ask("together", ["a", "b"]) == [("a of 2", ""), ("b of 2", "")]
    replies = [Reply(Prompt([1], f"{i}"), i) for i in range(8)]
    monkeypatch.setitem(ppo_loop.REWARDS, "thread", lambda *_: threading.current_thread().name)
    assert ppo_loop.ask_all(ppo_loop.REWARDS["thread"], replies) == [("MainThread", "")] * 8


def test_a_function_that_cannot_be_loaded_is_named_by_its_flag(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_loop, "CALLS", 1)  # enough for an import
    file = tmp_path / "mine.py"
    load = lambda name: ppo_loop.load_function(name, "--environment", 10.0)
    good = "from os import path\nx = 3\n\ndef helper(): pass\n\n"
    good += "def good(prompt, response, answer):\n    return len(response) * x\n"
    file.write_text(good)
    [replied] = ppo_loop.ask_all(load(f"{file}:good"), [Reply(Prompt([1], ""), 0, text="abc")])
    assert replied == (9, "")
    assert load("gsm8k") is ppo_loop.gsm8k_reward and load(None) is None

    for text, name, words in (
        (good, f"{file}:god", "AttributeError: module 'mine' has no attribute 'god'"),
        (good, f"{file}", "must be FILE.py:FUNCTION"),
        (good, f"{tmp_path}/none.py:good", "No module named 'none'"),
        ("\nimport no_such_name", f"{file}:good", "'no_such_name' at mine.py:2 in <module>"),
        ("def good(:", f"{file}:good", "SyntaxError: invalid syntax (mine.py, line 1)"),
        ("import sys; sys.exit('no key')", f"{file}:good", "SystemExit: no key at mine.py:1"),
        ("import os; os.abort()", f"{file}:good", "a process that imports the file dies"),
    ):
        file.write_text(text)
        ppo_loop.end_workers()  # they have imported what the file was before
        with pytest.raises(UserError, match=re.escape(f"--environment {name}: ")) as caught:
            load(name)
        assert words in str(caught.value) and "\n" not in str(caught.value)


FORKS = """
import asyncio, ctypes, os, threading, time

async def forks(prompt, response, answer):
    await asyncio.sleep(0)
    child = ctypes.PyDLL(None).fork()  # which Python does not see
    if child == 0:
        return {}[answer]
    return 100 * int(prompt) + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def dies(prompt, response, answer):
    if os.fork() == 0:
        time.sleep(60)
    os._exit(1)

def dies_later(prompt, response, answer):
    threading.Timer(0.1, os._exit, [int(answer)]).start()
    return prompt
"""


def test_a_child_that_a_function_forks_answers_no_row(ask):
    """Every row gets its own answer, and the function sees that its child has failed. faults.py has
    a run whose reward forks children that end in other ways."""
    answers = ask("forks", [f"{n}" for n in range(24)], "x", text=FORKS)
    assert answers == [(100.0 * n + 1, "") for n in range(24)]


def test_a_worker_that_dies_is_noticed_though_its_child_holds_the_pipe(ask):
    """At once and not after the time of a row, and while the file is imported as well."""
    began = time.monotonic()
    assert ask("dies", ["x"], seconds=50.0, text=FORKS) == [late(50)]
    ppo_loop.end_workers()
    with pytest.raises(UserError, match="a process that imports the file dies"):
        ask("dies", ["x"], text=f"{FORKS}\ndies(1, 2, 3)\n")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("status", ["0", "1"])
def test_a_process_that_dies_between_two_rows_fails_none(status, ask):
    for prompt in "abc":
        assert ask("dies_later", [prompt], status, text=FORKS) == [(prompt, "")]
        time.sleep(2)


PROGRAM = """
import os, subprocess, time

def shell(answer):
    os.system(f"sleep {answer}")  # waits in C, and hears no signal

def background(answer):
    subprocess.Popen(["sleep", answer])
    time.sleep(60)

def dies(answer):
    subprocess.Popen(["sleep", answer])
    time.sleep(6)
    os._exit(1)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
@pytest.mark.parametrize("name", ["shell", "background", "dies"])
def test_the_programs_of_a_row_that_takes_too_long_or_dies_end_with_it(name, ask):
    seconds = f"{10**6 + os.getpid()}"  # to know them by

    def sleeping():
        return sum(words[:2] == ["sleep", seconds] for _, _, words in forked.processes())

    seen = []
    timer = threading.Timer(4.0, lambda: seen.append(sleeping()))
    timer.start()
    assert ask(name, [""], seconds, seconds=8.0, text=PROGRAM) == [late(8)]
    assert seen == [1] and sleeping() == 0


MODULE = """
import multiprocessing, pickle, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from common import double

@dataclass
class Number:
    value: int

def slow_imports(number):
    return number.value, {"torch", "transformers", "ppo_loop"} & set(sys.modules)

def uses(prompt, response, answer):
    number = pickle.loads(pickle.dumps(Number(int(prompt))))
    for method in ("fork", "spawn"):
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            assert list(pool.map(slow_imports, [number])) == [(number.value, set())], method
    return double(number.value)

def starts(response):
    with multiprocessing.Pool(2) as pool:  # whose end is a SIGTERM
        assert pool.map(len, [response] * 3) == [1] * 3
    child = multiprocessing.Process(target=sys.exit, args=[3])
    child.start()
    child.join()
    assert child.exitcode == 3
    return subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True).stdout
"""


def test_processes_that_are_still_being_started_end_in_silence(ask, capfd):
    """Some look for locks of their pool when the first have answered."""
    for _ in range(5):
        assert ask("odd", ["x"] * 8, "y") == [("xry", "")] * 8
        ppo_loop.end_workers()
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err


def test_a_users_file_is_a_module_whose_classes_reach_other_processes(ask, tmp_path):
    """Its neighbours come before the script's own common.py. Spawned processes import no torch.
    Others start by Python's own method, and end by its own signal."""
    (tmp_path / "common.py").write_text("def double(x):\n    return 2 * x\n")
    assert ask("uses", ["5", "6"], seconds=60.0, text=MODULE) == [(10.0, ""), (12.0, "")]
    assert ask("starts", ["a", "b"], seconds=60.0, text=MODULE) == [("3\n", "")] * 2


def test_a_users_file_does_not_replace_another_module(tmp_path):
    (tmp_path / "inspect.py").write_text("def score(*row):\n    return 1.0\n")
    with refused(f"--reward {tmp_path}/inspect.py:score: ImportError: inspect is the name of"):
        ppo_loop.load_function(f"{tmp_path}/inspect.py:score", "--reward", 20.0)


ASYNC = """
import asyncio, os, sys

SHARED = asyncio.Barrier(1)

async def f(prompt, response, answer, turns=None):
    await SHARED.wait()  # is bound to the first loop that it meets
    await asyncio.sleep(0.05)
    if prompt == "exits":
        sys.exit("enough")
    if prompt == "cancels":
        raise asyncio.CancelledError
    if prompt == "hangs":
        await asyncio.sleep(60)
    return f"{os.getpid()} {id(asyncio.get_running_loop())}"

class Judge:
    async def __call__(self, *row):
        return await f(*row)

judge = Judge()
"""


def test_all_async_rows_of_a_worker_are_awaited_on_one_loop(ask):
    assert ask("f", ["hangs"], seconds=1.5, text=ASYNC) == [late(1.5)]
    rows = [*"ab", "exits", "cancels", *"cdefghijklmnopqrstuvwxyz"]
    answers = dict(zip(rows, ask("judge", rows, text=ASYNC)))
    assert answers.pop("exits") == (None, "SystemExit: enough at mine.py:10 in f")
    assert answers.pop("cancels") == (None, "CancelledError:  at mine.py:12 in f")
    assert all(fault == "" for _, fault in answers.values()), answers
    loops = collections.defaultdict(set)
    for made, _ in answers.values():
        loops[made.split()[0]].add(made.split()[1])
    assert len(loops) < len(answers) and all(len(ids) == 1 for ids in loops.values())


def test_a_function_gets_what_it_names():
    """In any order, and under any name what it does not name of prompt, response and answer. It is
    sent nothing else."""
    prompt = Prompt([1], "q", "a", row={"n": 1})
    replies = [Reply(prompt, 0, [7, 8], finished=True, text="r", turns=["r", "o"])]
    replies.append(dataclasses.replace(replies[0], ids=[7], finished=False))
    ask = lambda function: ppo_loop.ask_all(function, replies)
    shows = lambda *row: str(row)
    for function, expected in (
        (lambda *row, turns: shows(*row, turns), ("q", "r", "a", ["r", "o"])),
        (lambda *row, answer, turns: shows(len(row), turns), (3, ["r", "o"])),
        (lambda p, r, a, turns=None: shows(p, r, a, turns), ("q", "r", "a", ["r", "o"])),
        (lambda *, question, reply, gold: shows(question, reply, gold), ("q", "r", "a")),
        (lambda response, k=3: shows(response, k), ("r", 3)),
        (lambda response, prompt, gold: shows(prompt, response, gold), ("q", "r", "a")),
        (lambda prompt, *more: shows(prompt, *more), ("q", "r", "a")),
        (lambda p, r, a, /, row: shows(p, r, a, row), ("q", "r", "a", {"n": 1})),
    ):
        assert ask(function) == [(str(expected), "")] * 2
    told = [("([7, 8], False)", ""), ("([7], True)", "")]
    assert ask(lambda tokens, truncated: shows(tokens, truncated)) == told
    [(made, fault), _] = ask(lambda completion, answer: 1.0)
    assert made is None and "missing 1 required positional argument: 'completion'" in fault

    calls = []
    assert ppo_loop.ask_all(lambda rows=(): calls.append(rows), []) == calls == []
    send = lambda function: ppo_loop.call_of(ppo_loop.plan_of(function), replies)
    assert send(lambda answer: 1.0) == ([], {"answer": "a"}, 0)
    assert send(lambda rows, answer: 1.0) == ([], {"rows": [{"n": 1}] * 2, "answer": ["a"] * 2}, 2)


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return f"{data_source} {solution_str} {ground_truth} {extra_info}"


def of_openrlhf(queries, prompts, labels, **more):
    said = [f"{q} {p} {x} {more}" for q, p, x in zip(queries, prompts, labels)]
    return {"rewards": said, "scores": [1.0, 0.0], "extra_logs": {"length": [1.0, 2.0]}}


def of_trl(prompts, completions, solution, log_extra=None, **more):
    rows = zip(prompts, completions, solution, more["method"], more["completion_ids"])
    return [f"{row} {log_extra} {len(more)}" for row in rows]


def judge(rows, response, k=3):
    return [f"{x['method']} {y} {len(rows)} {k}" for x, y in zip(rows, response)]


CHAT = [{"role": "user", "content": "hi"}]
SAID = [{"role": "assistant", "content": "r"}, {"role": "user", "content": "o"}]
# a function -> its results for a row of text and one of a chat
MEANT = {
    rewards.verl(of_verl): ["d r 4 {'i': 1}", "e r gold None"],
    rewards.openrlhf(of_openrlhf): ["pr p None {}", "hir hi gold {}"],
    rewards.trl(of_trl): [
        "('p', 'r', 's', 'm', [7]) None 6",
        f"({CHAT}, {SAID}, None, 'n', [8, 9]) None 6",
    ],
    judge: ["m r 2 3", "n r 2 3"],
    lambda rows: [1.0]: ["ValueError: 1 results for 2 rows"] * 2,
}


@pytest.mark.parametrize("function", MEANT)
def test_functions_of_other_tools_and_of_many_rows_get_what_they_mean(function):
    """Those of other tools need an adapter."""
    rows = [{"prompt": "p", "data_source": "d", "extra_info": {"i": 1}, "method": "m"}]
    rows += [{"prompt": CHAT, "data_source": "e", "method": "n"}]
    rows[0] |= {"solution": "s", "completion_ids": "?", "reward_model": {"ground_truth": "4"}}
    prompts = [Prompt([1], "p", row=rows[0]), Prompt([1], "hi", "gold", CHAT, row=rows[1])]
    replies = [Reply(prompt, 0, text="r", turns=["r", "o"]) for prompt in prompts]
    for reply, ids in zip(replies, ([7], [8, 9])):
        reply.ids += ids
    answers = ppo_loop.ask_all(function, replies)
    assert [fault or made for made, fault in answers] == MEANT[function]


def test_a_function_of_another_tool_without_an_adapter_is_refused():
    """It would get the prompt as its data_source, or texts where it expects lists."""
    for function in (of_verl, of_openrlhf, of_trl):
        words = "made for verl, OpenRLHF or TRL: see the adapters in tests/loop/rewards.py"
        with refused(words, kind=ValueError):
            ppo_loop.plan_of(function)


FOR_VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str != ground_truth:
        raise ValueError(f"{data_source} {extra_info}")
    return 1.0
"""


def test_a_function_of_verl_is_the_reward_of_a_run_by_the_lines_of_the_adapters(tmp_path):
    """From another folder. What rows lack is None, and a fault is named with the function's line,
    which stands in another file than the adapter."""
    lines = re.findall("^    (.*)", rewards.__doc__, flags=re.M)
    (tmp_path / "verl_reward.py").write_text("\n".join(lines))
    (tmp_path / "my_rewards.py").write_text(FOR_VERL)
    flags = ("--reward", "verl_reward.py:score", "--steps", "1", "--supervised-steps", "20")
    command = [sys.executable, ROOT / "ppo_loop.py", *flags, "--out-dir", "out"]
    said = succeeded(run(*command, cwd=tmp_path))
    assert "calls      --reward score(response, answer, row)\n" in said
    assert "left out: ValueError: None None at my_rewards.py:4 in compute_score\n" in said


HERE = """
import asyncio, os
from math import pi

class Points(float):
    pass

def score(prompt, response, answer):
    return Points(1 / int(prompt))

async def later(rows, question, response, gold):
    await asyncio.sleep(0)
    return [{"score": os.getpid()}] * len(question)

def stops(prompt, response, answer):
    breakpoint()
    return 1.0
"""


def test_without_a_time_limit_a_function_runs_in_this_process(tmp_path, capsys):
    """The start prints what each parameter gets."""
    (tmp_path / "in_here.py").write_text(HERE)
    load = lambda name: ppo_loop.load_function(f"{tmp_path}/in_here.py:{name}", "--reward", 0.0)
    replies = [Reply(Prompt([1], text), 0) for text in "20"]
    half, fails = ppo_loop.ask_all(load("score"), replies)
    assert half == (0.5, "") and type(half[0]) is float
    assert fails == (None, "ZeroDivisionError: division by zero at in_here.py:9 in score")
    assert ppo_loop.ask_all(load("later"), replies) == [({"score": os.getpid()}, "")] * 2
    one, all_rows = capsys.readouterr().out.splitlines()
    assert one == "calls      --reward score(prompt, response, answer)"
    gets = "rows, response, question=prompt, gold=answer"
    assert all_rows == f"calls      --reward later({gets}), lists over rows"
    wrong = f"TypeError: {math.pi} is not a callable object"
    with refused(f"--reward {tmp_path}/in_here.py:pi: {wrong}"):
        load("pi")


def test_breakpoint_works_without_a_time_limit(tmp_path):
    (tmp_path / "in_here.py").write_text(HERE)
    flags = ("--reward", f"{tmp_path}/in_here.py:stops", "--reward-timeout", "0")
    command = [sys.executable, ROOT / "ppo_loop.py", *flags, "--out-dir", tmp_path / "out"]
    answers = {"input": "p prompt[-1] * 3\nq\n", "capture_output": True, "text": True}
    said = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **answers)
    assert "(Pdb) '==='\n" in said.stdout and "BdbQuit:  at in_here.py:17 in stops" in said.stderr
    assert said.returncode == 2


def tried(reward, observe=None):
    """Tries these functions with prompts of which some are there twice."""
    answers = {3: "4", 4: 5, 5: "6", 6: "7", 7: "8"}
    prompts = [Prompt([1], f"1+{i}=", answers[i]) for i in (3, 3, 4, 3, 5, 6, 7)]
    run = a_run(reward="mine.py:f", environment=observe and "mine.py:g")
    task = a_task(prompts=prompts, tokenizer=TOKENIZER, reward=reward, observe=observe)
    ppo_loop.try_functions(run, task)


def test_the_users_functions_are_tried_with_the_first_prompts(tmp_path):
    """With the right answer as the response, if it is text."""
    heard = []
    tried(lambda *row, turns, truncated, tokens: heard.append((*row, turns, len(tokens))) or 0.5)
    rows = [("1+3=", "4"), ("1+4=", 5), ("1+5=", "6"), ("1+6=", "7")]
    said = [answer if isinstance(answer, str) else "" for _, answer in rows]
    assert heard == [(p, r, a, [r], len(r)) for (p, a), r in zip(rows, said)]

    # at the start of each run
    (tmp_path / "mine.py").write_text("def f(row): return {}[0]")
    flags = f"--reward {tmp_path}/mine.py:f --reward-timeout 0"
    with refused("failed for 4 of the first 4 prompts", end="KeyError: 0 at mine.py:1 in f"):
        ppo_loop.set_up(ppo_loop.parse(flags.split()))


def test_some_trial_calls_may_fail(capsys):
    tried(lambda turns: [1.0 for _ in turns], lambda turns: "more")
    assert capsys.readouterr().out == ""
    tried(lambda prompt: {}["key"] if prompt == "1+3=" else 1)
    words = "failed for 1 of the first 4 prompts, with their answers as responses, which is fine if"
    said = f"--reward mine.py:f: {words} some rows may: KeyError: 'key' at test_user_functions.py:"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("functions, words", [
    ([lambda answer: "more"], "a reward must be a finite number, or a list of them, not 'more'"),
    ([lambda answer: 0.5, lambda answer: 0.5],
     "an environment must return text, a message, a new context or None, or (one of these,"
     " a reward), not 0.5"),
])  # fmt: skip
def test_a_function_that_fails_on_all_trial_calls_ends_the_run(functions, words):
    flag = "--environment mine.py:g" if len(functions) == 2 else "--reward mine.py:f"
    failed = "failed for 4 of the first 4 prompts, with their answers as responses"
    with refused(f"{flag}: {failed}: {words}"):
        tried(*functions)


VALUES = """
import enum, os
from decimal import Decimal
from fractions import Fraction
import numpy

class Text(str):
    def __reduce__(self):
        raise TypeError("not for other processes")
    __str__ = __repr__ = lambda self: "another text"

class Verdict(str, enum.Enum):
    GOOD = "good"

class Mute(Exception):
    def __str__(self):
        raise self

def raises(error):
    raise error

def f(prompt, response, answer):
    return eval(prompt)
"""


def test_a_value_of_any_class_reaches_the_rank_as_plain_text_or_number(ask):
    """Nothing that a row holds, returns or raises ends its worker, so that there are 8 at most."""
    cases = {
        "Text('text')": "text", "Verdict.GOOD": "good", "numpy.str_('s')": "s", "None": None,
        "numpy.float32(0.5)": 0.5, "numpy.array(2)": 2.0, "Decimal('0.25')": 0.25, "True": 1.0,
        "{Verdict.GOOD: True, Text('part'): numpy.float32(2)}": {"good": 1.0, "part": 2.0},
        "'\\udc80'": "\udc80", "answer": "\ud800", "'x' * 2**24": "x" * 2**24,
        "(Text('text'), Fraction(3, 2))": ["text", 1.5], "[1, None]": [1.0, None], "[]": [],
        "numpy.array([0.5, 2])": [0.5, 2.0], "numpy.array([2])": 2.0,
    }  # fmt: skip

    for row, (made, fault) in zip(cases, ask("f", cases, "\ud800", text=VALUES)):
        assert (made, type(made), fault) == (cases[row], type(cases[row]), ""), row[:40]
        if isinstance(made, dict):
            assert {*map(type, made)} == {str} and {*map(type, made.values())} == {float}
        if isinstance(made, list):
            assert {*map(type, made)} <= {str, float, type(None)}

    faults = {
        "raises(Mute())": "Mute: <exception str() failed>", "10**400": "OverflowError: ",
        "raises(ValueError('\\ud800'))": "ValueError: \ud800", "{1: 2.0}": "TypeError: ",
        "raises(KeyboardInterrupt())": "KeyboardInterrupt: ",
        "[1j]": "TypeError: float() argument must be",
    }  # fmt: skip
    for row, (made, fault) in zip(faults, ask("f", faults, text=VALUES)):
        assert made is None and fault.startswith(faults[row]), (row, fault)

    rows = ["os.getpid()", "raises(Mute())", "Text('x')"] * 20
    pids = {made for made, _ in ask("f", rows, text=VALUES)}
    assert len(pids - {None, "x"}) <= 8


def test_a_row_that_comes_as_the_pool_breaks_is_a_fault(tmp_path, monkeypatch):
    """Pebble would never answer it. Other rows have their rewards, and later ones a new pool."""
    (tmp_path / "mine.py").write_text("def f(prompt, response, answer):\n    return len(prompt)")
    function = ppo_loop.load_function(f"{tmp_path}/mine.py:f", "--reward", 30.0)
    replies = [Reply(Prompt([1], "abc"), i) for i in range(3)]
    schedule = ppo_loop.ProcessPool.schedule
    asked = []

    def breaks(pool, *args, **more):
        asked.append(schedule(pool, *args, **more))
        if len(asked) != 2:
            return asked[-1]
        futures.wait(asked)
        pool.stop()
        return pebble.ProcessFuture()  # of a row that no process has

    monkeypatch.setattr(ppo_loop.ProcessPool, "schedule", breaks)
    assert ppo_loop.ask_all(function, replies) == [(3.0, ""), late(30), (3.0, "")]
    assert ppo_loop.ask_all(function, replies) == [(3.0, "")] * 3
