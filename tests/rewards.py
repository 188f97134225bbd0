"""Rewards and an environment for whole runs of ppo_loop.py, in a file that imports nothing."""


def right_digits(prompt, response, answer):
    """The fraction of right digits, so that an actor that has hardly learned earns something in most rows."""
    return sum(a == b for a, b in zip(response, answer, strict=False)) / max(len(response), len(answer))


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
