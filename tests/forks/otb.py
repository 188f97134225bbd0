"""The Optimal Token Baseline (2602.07078): at each token, a mean weighted by the noise so far.

    python tests/forks/otb.py --critic-warmup 0 --out-dir out/otb

At token t of an answer, b_t is the mean of the returns G_t of the prompt's answers that come so
far, weighted by W_t, the sum of the noise of their tokens up to t. As in the paper, an answer's own
return is among them. For the noise of a token, 1 - 2p + sum p^2, this takes (1 - p)^2, see
noise_weights in common.py. More flags are those of ppo_loop.py; the critic learns and is not used.
"""

from itertools import chain, zip_longest

import fork
import torch

import common
import ppo_loop

FLAGS = "--rollout-n 4 --whiten none"


def advantages_of(batch, run):
    """(T,) returns minus the baseline (a collective)."""
    whole, index_T = common.end_to_end(batch)
    mask_T = whole.response_mask
    return_T = common.monte_carlo(whole, run.gamma)

    # of each answer, its returns and its noise up to each token; those to one prompt follow each
    # other, over all ranks
    n = whole.actions.tolist()
    returns = [x_A.tolist() for x_A in return_T[mask_T].split(n)]
    noise = [x_A.cumsum(0).tolist() for x_A in common.noise_weights(whole)[mask_T].split(n)]
    mine = list(zip(whole.row_id.tolist(), returns, noise))
    answers = sorted(chain(*common.of_all_ranks(mine)))

    baselines = {}
    for first in range(0, len(answers), run.rollout_n):
        row_ids, returns, noise = zip(*answers[first : first + run.rollout_n])
        b = []
        for G, W in zip(zip_longest(*returns), zip_longest(*noise, fillvalue=0.0)):
            total = sum(g * w for g, w in zip(G, W) if g is not None)
            b.append(total / (sum(W) + 1e-8))
        baselines |= dict.fromkeys(row_ids, b)

    own = [baselines[row_id][:k] for row_id, k in zip(whole.row_id.tolist(), n)]
    b_T = torch.zeros(len(mask_T)).masked_scatter(mask_T, torch.tensor(list(chain(*own))))
    return common.to_rows(return_T - b_T, index_T)


if __name__ == "__main__":
    ppo_loop.advantages_of = advantages_of
    fork.ppo(FLAGS)
