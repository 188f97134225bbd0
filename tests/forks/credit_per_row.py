"""Credit ends with each row: the rows of an episode are episodes of their own.

    python tests/forks/credit_per_row.py --environment FILE.py:FUNCTION ...

What the policy writes in a row earns the rewards of that row, and nothing of what comes of it in
later ones. This is for comparison: see `python tests/experiments/ablations.py --task notes`. More
flags are those of ppo_loop.py.
"""

from dataclasses import replace

import fork

import ppo_loop

together = ppo_loop.to_batch


def to_batch(replies, hints=False):
    """The rows of replies, each of which is an episode of its own (a collective)."""
    return replace(together(replies, hints), episode=None)


if __name__ == "__main__":
    ppo_loop.to_batch = to_batch
    fork.ppo()
