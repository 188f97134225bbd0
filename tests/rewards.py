"""Rewards and an environment for whole runs of ppo_loop.py, in a file that imports little."""

import zlib


def right_digits(prompt, response, answer):
    """The fraction of right digits, so that an actor that has hardly learned earns something in most rows."""
    return sum(a == b for a, b in zip(response, answer, strict=False)) / max(len(response), len(answer))


def luck(prompt, response, answer, turns):
    """An environment that replies + or - to the first turn, a lot, at random."""
    return "+-"[zlib.crc32((prompt + turns[0]).encode()) % 2] if len(turns) == 1 else None


def points(prompt, response, answer, turns):
    """A quarter of a point for each right digit of the second turn, minus 2.5, plus or minus 1.5 for luck."""
    right = sum(a == b for a, b in zip(turns[-1], answer, strict=False)) if len(turns) == 3 else 0
    return (right - 10) / 4 + (1.5 if turns[1:2] == ["+"] else -1.5)


def spins(prompt, response, answer):
    """Never returns."""
    while True:
        pass


def faulty_reward(prompt, response, answer):
    """Raises on some rows, returns nonsense on others and never returns on a third kind; no run may end."""
    if prompt.startswith("1"):
        raise KeyError(prompt)
    while prompt.startswith("3"):
        pass
    return "much" if prompt.startswith("2") else float(len(response)) / 16


def faulty_environment(prompt, response, answer):
    """Tells the policy the length of its response, for one or two turns."""
    if prompt.startswith("4"):
        raise ValueError("no turn for this one")
    return f"[{len(response)}]" if response.count("[") < 2 - prompt.startswith("5") else None
