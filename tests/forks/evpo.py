"""EVPO (2604.19485): the critic's advantages only where its values explain something.

    python tests/forks/evpo.py --rollout-n 4

If they explain less than 0.001, advantages are returns minus their mean over all actions of the
answers to a prompt (--rollout-n 1: of the batch). critic/helps says which of them a step has used.
"""

from itertools import chain

import fork
import torch

import common
import ppo_loop

gae = ppo_loop.advantages_of
learn = ppo_loop.update_critic


def helps(batch, run):
    """Whether values explain any of the returns of all ranks' rows (a collective)."""
    returns_T = common.monte_carlo(batch, run.gamma)
    both = [x_T[batch.response_mask] for x_T in (batch.values, returns_T)]
    return common.explained_variance(*both, everywhere=True) > 1e-3  # above rounding errors


def advantages_of(batch, run):
    """(T,) advantages before they are whitened (a collective)."""
    if helps(batch, run):
        return gae(batch, run)

    # sums of each answer, over all ranks; those to one prompt follow each other
    whole, index_T = common.end_to_end(batch)
    returns_T = common.monte_carlo(whole, run.gamma)
    row_T = whole.row_of_token
    sum_B = torch.zeros(len(whole), dtype=torch.float64).index_add(0, row_T, returns_T.double())
    mine = list(zip(whole.row_id.tolist(), sum_B.tolist(), whole.actions.tolist()))
    answers = sorted(chain(*common.of_all_ranks(mine)))

    # the mean of each group
    mean_of = {}
    size = run.rollout_n if run.rollout_n > 1 else len(answers)
    for first in range(0, len(answers), size):
        row_ids, sums, actions = zip(*answers[first : first + size])
        mean_of |= dict.fromkeys(row_ids, sum(sums) / max(sum(actions), 1))

    mean_B = torch.tensor([mean_of[row_id] for row_id in whole.row_id.tolist()])
    less_T = torch.where(whole.response_mask, returns_T - mean_B[row_T], 0.0)
    return common.to_rows(less_T, index_T)


def update_critic(loop, batch, replies):
    return learn(loop, batch, replies) | {"critic/helps": float(helps(batch, loop.run))}


if __name__ == "__main__":
    ppo_loop.advantages_of = advantages_of
    ppo_loop.update_critic = update_critic
    fork.ppo()
