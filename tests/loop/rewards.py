"""Adapters for reward functions that are made for verl, OpenRLHF or TRL; then rewards and
environments for whole runs of ppo_loop.py. This file imports little.

A file with these lines, next to one of yours, has a reward for --reward FILE.py:score:

    from my_rewards import compute_score
    from tests.loop.rewards import verl

    score = verl(compute_score)

The adapters are short and import nothing of ours, so you may also copy one. An argument that the
rows have nothing for keeps its default; without one it is None, or a list of None.
"""

import inspect
import itertools
import os
import re
import signal
import sys
import time
import zlib

# ---- Adapters: functions of other tools ----------------------------------------------------------


def verl(function):
    """Of function(data_source, solution_str, ground_truth, extra_info), which gets the response as
    solution_str. A row without an answer has its ground truth at reward_model.ground_truth."""

    def score(response, answer, row):
        if answer is None:
            answer = (row.get("reward_model") or {}).get("ground_truth")
        facts = {x: row[x] for x in ("data_source", "extra_info") if x in row}
        facts |= {"solution_str": response, "ground_truth": answer}
        return function(**asked_for(function, facts, None))

    score.__module__ = function.__module__  # so that a fault is named with its line there
    return score


def openrlhf(function):
    """Of function(queries, prompts, labels), lists over rows, which returns a list, or a dict that
    has it as "rewards". A query is a prompt with its response."""

    def score(rows, prompt, response, answer):
        queries = [text + said for text, said in zip(prompt, response)]
        facts = {"queries": queries, "prompts": prompt, "labels": answer}
        made = function(**asked_for(function, facts, [None] * len(rows)))
        return made["rewards"] if isinstance(made, dict) else made

    score.__module__ = function.__module__
    return score


def trl(function):
    """Of function(prompts, completions, completion_ids, **columns), lists over rows. Prompts and
    completions are texts, and in a chat messages; columns are those of the rows. None as a result
    is a fault of its row."""

    def score(rows, prompt, messages, response, turns, tokens):
        prompts = []
        completions = []
        for i, chat in enumerate(messages):
            prompts.append(chat or prompt[i])
            said = zip(itertools.cycle(["assistant", "user"]), turns[i])
            said = [{"role": role, "content": text} for role, text in said]
            completions.append(said if chat else response[i])

        facts = {key: [row.get(key) for row in rows] for key in set().union(*rows)}
        facts |= {"prompts": prompts, "completions": completions, "completion_ids": tokens}
        return function(**asked_for(function, facts, [None] * len(rows)))

    score.__module__ = function.__module__
    return score


def asked_for(function, facts, nothing):
    """Of these facts, what the function has parameters for. Another parameter keeps its default;
    without one it gets nothing, which is None, or a list of None."""
    gets = {}
    for name, x in inspect.signature(function).parameters.items():
        if x.kind == x.VAR_KEYWORD:
            gets = facts | gets
        elif x.kind != x.VAR_POSITIONAL and (name in facts or x.default is x.empty):
            gets[name] = facts.get(name, nothing)
    return gets


# ---- Rewards and environments for tests ----------------------------------------------------------


def right_digits(prompt, response, answer):
    """The fraction of right digits, of which an actor that has hardly learned gets some."""
    right = sum(a == b for a, b in zip(response, answer, strict=False))
    return right / max(len(response), len(answer))


def share_of_letters(prompt, response, answer):
    """The fraction of letters among the characters."""
    return sum(map(str.isalpha, response)) / max(len(response), 1)


def distinct(prompt, response, answer):
    """The share of different words among all words."""
    words = response.split()
    return len(set(words)) / max(1, len(words))


def last_number(prompt, response, answer):
    """1 if the last number of the response is the answer, else 0."""
    return float(re.findall(r"\d+", response)[-1:] == [answer])


def luck(prompt, response, answer, turns):
    """An environment that replies + or - to the first turn, a lot, at random."""
    if len(turns) != 1:
        return None
    return "+-"[zlib.crc32((prompt + turns[0]).encode()) % 2]


def points(prompt, response, answer, turns):
    """A quarter of a point for each right digit of the second turn, minus 2.5; luck adds 1.5 or
    takes it."""
    right = 0
    if len(turns) == 3:
        right = sum(a == b for a, b in zip(turns[-1], answer, strict=False))
    return (right - 10) / 4 + (1.5 if turns[1:2] == ["+"] else -1.5)


def asks_later(turns, row):
    """An environment that shows the first turn, a note, with a question, and then ends."""
    return {"prompt": turns[0] + row["question"]} if len(turns) == 1 else None


def remembered(turns, answer):
    """1 if the second turn is the answer, else 0."""
    return float(turns[2:] == [answer])


def adds_on(turns, row):
    """An environment that shows the first turn, a sum, with a third number to add, after a solved
    one, and then ends."""
    if len(turns) > 1:
        return None
    return {"prompt": f"37 + 45 = 82\n{turns[0].strip()} + {row['third']} ="}


def total(turns, answer):
    """1 if the last number of the second turn is the answer, else 0."""
    return last_number("", "".join(turns[2:]), answer)


def judge_that_goes_down(prompt, response, answer):
    """right_digits, until the file JUDGE is there."""
    if os.path.exists(os.environ["JUDGE"]):
        raise ConnectionError("the judge is down")
    return right_digits(prompt, response, answer)


def judge_that_fails_more_and_more(prompt, response, answer):
    """right_digits, but after n calls it fails on about n / 2 % of them; the file JUDGE counts.

    Neighbours in this order of calls fail and succeed by turns (61 steps around a circle of 100),
    so that no step of eight answers fails as a whole, which would end the run."""
    with open(os.environ["JUDGE"], "ab") as file:
        file.write(b"x")
        n = file.tell()
    if n * 61 % 100 < n / 2:
        raise ConnectionError("the judge is busy")
    return right_digits(prompt, response, answer)


def log_that_raises(row):
    """A logger of a service that is gone after a while."""
    if row["step"] > 2:
        raise ConnectionError("no service")


def spins(prompt, response, answer):
    """Never returns."""
    while True:
        pass


def faulty_reward(prompt, response, answer):
    """Raises on some rows, returns nonsense on others, never returns on a third kind; no run may
    end of it."""
    if prompt.startswith("1"):
        raise KeyError(prompt)
    while prompt.startswith("3"):
        pass

    if prompt.startswith("2"):
        return "much"
    return {"score": len(response) / 16, "length": len(response)}


def faulty_environment(prompt, response, answer):
    """Tells the policy the length of its response, for one or two turns."""
    if prompt.startswith("4"):
        raise ValueError("no turn for this one")

    most = 1 if prompt.startswith("5") else 2
    return f"[{len(response)}]" if response.count("[") < most else None


def compacts(prompt, response, answer, turns):
    """An environment with some turns of other prompts, by what the policy has said: it shows a new
    prompt, or what the policy has said with one letter more, or ends. A turn earns its length."""
    if len(turns) > 4:
        return None
    said = turns[-1]
    kind = (zlib.crc32(prompt.encode()) + len(turns)) % 4
    new = {"prompt": f"{said[-3:]}+{len(turns)}="}
    return (new, f"+{len(said)}=", new, None)[kind], len(said) / 16


def forks(prompt, response, answer):
    """right_digits, after forking a child that returns, raises, exits, is killed or lives on."""
    kind = zlib.crc32((prompt + response).encode()) % 6
    child = os.fork() if kind else -1
    if child == 0:
        if kind == 5:
            time.sleep(0.02)
        if kind == 1:
            raise ValueError("a child")
        if kind == 2:
            sys.exit(3)
        if kind == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return -1e9  # which must reach no row

    return right_digits(prompt, response, answer)


# how a function of a user may behave -> its body; some end well, some fail their row
ODD = {
    "subclass": "class Points(float): pass\n    return Points(0.5)",
    "text": "return '0.5'",
    "nothing": "pass",
    "infinite": "return float('inf')",
    "huge": "return 10**400",
    "list": "return [1.0]",
    "raises": "raise ValueError(response * 1000)",
    "raises without text": "class Odd(Exception):\n        __str__ = None\n    raise Odd",
    "exits": "import sys; sys.exit(7)",
    "ends its process": "import os; os._exit(0)",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "interrupted": "raise KeyboardInterrupt",
    "hangs": "import time; time.sleep(60)",
    "reads": "import sys; return float(len(sys.stdin.read()))",
    "prints": "print('\\x00é中' * 9999); return 0.5",
    "closes": "import os; os.closerange(0, 64); return 0.5",
    "recurses": "def deeper(): return deeper() + 1\n    return deeper()",
    "forks": "import os; return os.fork() * 0 + 0.5",
    "forks and waits": (
        "import os; child = os.fork()\n    if child: os.waitpid(child, 0)\n    return 0.5"
    ),
    "pool": (
        "from concurrent.futures import ProcessPoolExecutor as P\n"
        "    return sum(P(1).map(abs, [0.5]))"
    ),
    "thread": "import threading; threading.Thread(target=lambda: 1 / 0).start(); return 0.5",
    "generator": "yield 0.5",
    "dict": "return {'score': 0.5}",
    "signals": "import os; os.kill(os.getppid(), 0); return 0.5",
}


def tosses(prompt, response, answer):
    """How often the response has the letter of the answer."""
    return float(response.count(answer))


def tosses_by_turn(prompt, response, answer, turns):
    """tosses of each turn of the policy."""
    return [float(text.count(answer)) for text in turns[::2]]


def says_more(prompt, response, answer, turns):
    """An environment that replies + or -- to the last letter of a turn, and gives a point for each
    letter of the turn, and of all; a turn without letters is the last one."""
    says = {"h": "+", "t": "--"}.get(turns[-1][-1:])
    return says, len(turns[-1]) + len(response)


def right_but_for_t(prompt, response, answer):
    """1 if the response is the answer, after which a t may stand."""
    return float(response.removesuffix("t") == answer)
