"""A baseline of least noise: the critic's values as far as they leave less of it.

    python tests/forks/fitted.py --out-dir out/fitted

Of all baselines beta_0 + beta_1 V(s), the one that leaves the least noise in the actor's gradient
is a least-squares fit of the returns with the weights of --whiten noise, a control variate as in
Greensmith, Bartlett and Baxter (2004). beta_1 is near 0 for a critic that knows nothing, and near 1
for one that foresees what the actor cannot change. It is fitted to earlier steps, each of which
counts 0.9 times the one after it, so no answer is in its own baseline; only the first step is
fitted to itself, also of a run that goes on. It is for batches of hundreds of answers: of eight, a
pretrained critic as it is earned more (tests/experiments/RESULTS.md). More flags are those of
ppo_loop.py.
"""

import fork
import torch

import common
import ppo_loop
from common import UserError

DECAY = 0.9
FLAGS = "--whiten noise"
sums = []  # of the steps so far: what the normal equations of the fit are made of


def advantages_of(batch, run):
    """(T,) returns minus the fitted baseline (a collective)."""
    if run.lam != 1 or run.lam_policy not in (None, 1) or run.bootstrap_truncated:
        raise UserError("fitted.py: excludes a lambda below 1, and --bootstrap-truncated")
    whole, index_T = common.end_to_end(batch)
    mask_T = whole.response_mask
    return_A = common.monte_carlo(whole, run.gamma)[mask_T].double()
    w_A = common.noise_weights(whole)[mask_T]
    value_A = whole.values[mask_T].double()
    X_A2 = torch.stack([torch.ones_like(value_A), value_A], 1)

    # X^T w X and X^T w G of all ranks' rows
    mine = (X_A2.T @ (w_A[:, None] * X_A2), X_A2.T @ (w_A * return_A))
    now = common.add_up(*torch.cat([x.flatten() for x in mine]).tolist())
    now = torch.tensor(now, dtype=torch.float64)
    known = sums[-1] if sums else now
    left, right = known[:4].view(2, 2), known[4:]
    beta = torch.linalg.pinv(left, rtol=1e-9, hermitian=True) @ right
    sums[:] = [DECAY * known + now if sums else now]

    less_T = torch.zeros(len(mask_T)).masked_scatter(mask_T, (return_A - X_A2 @ beta).float())
    return common.to_rows(less_T, index_T)


if __name__ == "__main__":
    ppo_loop.advantages_of = advantages_of
    fork.ppo(FLAGS)
