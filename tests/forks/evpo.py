"""EVPO (2604.19485): the critic's advantages only where its values explain something.

    python tests/forks/evpo.py --rollout-n 4

If they explain nothing, advantages are returns minus their mean over all actions of the answers to
a prompt (--rollout-n 1: of the batch). critic/helps says which of them a step has used.
"""

from collections import Counter
from itertools import chain

import fork
import torch

import common
import ppo_loop

gae = ppo_loop.advantages_of
learn = ppo_loop.update_critic


def helps(batch, run):
    """Whether values explain any of the returns of all ranks' rows (a collective)."""
    returns_T = common.monte_carlo(batch, run.gamma, run.gae_level)
    both = [x_T[batch.response_mask] for x_T in (batch.values, returns_T)]
    return common.explained_variance(*both, everywhere=True) > 1e-3  # above rounding errors


def advantages_of(batch, run):
    """(T,) advantages before they are whitened (a collective)."""
    if helps(batch, run):
        return gae(batch, run)

    # sums of each row on its rank; the row_ids of one prompt are consecutive
    returns_T = common.monte_carlo(batch, run.gamma, run.gae_level)
    row_T = batch.row_of_token
    sum_B = torch.zeros(len(batch), dtype=torch.float64).index_add(0, row_T, returns_T.double())
    prompts = [row_id // run.rollout_n for row_id in batch.row_id.tolist()]
    groups = prompts if run.rollout_n > 1 else [0] * len(batch)
    mine = list(zip(groups, sum_B.tolist(), batch.actions.tolist()))

    # sums of each group, over all ranks
    sums = Counter()
    actions = Counter()
    for group, row_sum, row_actions in chain(*common.of_all_ranks(mine)):
        sums[group] += row_sum
        actions[group] += row_actions

    mean_B = [sums[group] / max(actions[group], 1) for group in groups]
    return torch.where(batch.response_mask, returns_T - torch.tensor(mean_B)[row_T], 0.0)


def update_critic(loop, batch, replies):
    return learn(loop, batch, replies) | {"critic/helps": float(helps(batch, loop.run))}


if __name__ == "__main__":
    ppo_loop.advantages_of = advantages_of
    ppo_loop.update_critic = update_critic
    fork.ppo()
