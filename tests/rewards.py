"""Rewards and an environment for whole runs of ppo_loop.py, in a file that imports nothing."""


def right_digits(prompt, response, answer):
    """The part of the digits that is right: an actor that has hardly learned earns something in most rows."""
    return sum(a == b for a, b in zip(response, answer, strict=False)) / max(len(response), len(answer))


def spins(prompt, response, answer):
    """Never returns."""
    while True:
        pass


def faulty_reward(prompt, response, answer):
    """Raises on some rows, gives nonsense on others, never returns on a third kind: no run may end of it."""
    if prompt.startswith("1"):
        raise KeyError(prompt)
    while prompt.startswith("3"):
        pass
    return "much" if prompt.startswith("2") else float(len(response)) / 16


def faulty_environment(prompt, response, answer):
    """Tells the policy the length of what it has said, until it has had enough."""
    if prompt.startswith("4"):
        raise ValueError("no turn for this one")
    return f"[{len(response)}]" if response.count("[") < 2 - prompt.startswith("5") else None
