"""The first token of an answer gets a share Q of a reward at the end (JustRL-II).

    python tests/forks/first_token_credit.py --critic-warmup 30 --critic.value-head-init mean

The advantages of an answer of L actions have their own lambda, Q^(1 / (L - 1)); JustRL-II has
Q^(1 / L). More flags are those of ppo_loop.py. Four published rules, and about the Q of each:
    JustRL-II            Q^(1 / L)           0.5
    SAO (2607.07508)     1 - 1 / (1.5 L)     0.51
    BPCO (2608.23566)    1 - 1 / (0.4 L)     0.08
    VAPO (2504.05118)    1 - 1 / (0.05 L)    2e-9
"""

from dataclasses import replace

import fork

import common
import ppo_loop

Q = 0.5


def with_credit(batch, run, q):
    """(T,) advantages before they are whitened, if the first token's share is q."""
    if run.lam_policy is not None or run.gae_level == "turn":
        words = "a lambda for each answer excludes --lam-policy and --gae-level turn"
        raise common.UserError(f"first_token_credit.py: {words}")
    whole, _ = common.end_to_end(batch)
    lambdas = [q ** (1 / max(n - 1, 1)) for n in whole.actions.tolist()]
    credited = replace(batch)
    common.add_returns(credited, run.gamma, lambdas, run.bootstrap_truncated)
    return credited.advantages


if __name__ == "__main__":
    ppo_loop.advantages_of = lambda batch, run: with_credit(batch, run, Q)
    fork.ppo()
