"""BPCO (2608.23566): bounded values, advantages as they are, and DPPO's mask.

    python tests/forks/bpco.py --out-dir out/bpco

What the paper changes in PPO, with L actions in an answer and rewards from LOW to HIGH:
    values are LOW + (HIGH - LOW) (1/2 + atan(z) / pi) of the head's output z, and learn alone first
    lambda of the critic 1, of the policy max(0, 1 - 1 / (0.4 L)), about 0.08^(1 / (L - 1))
    advantages are not whitened
    the objective is r_t A_t without a clip, r_t = pi(a_t) / mu(a_t) to the engine's mu,
    and actions that the update would move further from mu do not count: those with
    (pi(a_t) - mu(a_t)) sign(A_t) above 0.2 (DPPO, 2602.04879, equation 12 with TV)
Its critic may also read the answer: --privileged-key answer. actor/pg_outside is the share of the
actions that do not count. More flags are those of ppo_loop.py.
"""

import first_token_credit
import fork
import sao

import ppo_loop

CREDIT = 0.08  # the first action's share of a reward at the end
FLAGS = """
    --critic-warmup 15 --critic.value-head bounded --critic.value-range 0 1 --whiten none
    --old-log-probs engine
    --actor.clip-ratio-low 1 --actor.clip-ratio-high 1e30 --actor.clip-ratio-c None
"""


class Actor(sao.Actor):  # with another mask
    band = 0.2  # of probabilities

    def outside(self, log_probs_T, micro):
        """(T,) whether an action has moved as far as it may, and would move on."""
        moved_T = log_probs_T.exp() - ppo_loop.engine_log_probs(micro).exp()
        advantages_T = micro.rows.advantages.to(moved_T.device)
        return micro.response_mask & (moved_T * advantages_T.sign() > self.band)


def advantages_of(batch, run):
    return first_token_credit.with_credit(batch, run, CREDIT)


if __name__ == "__main__":
    ppo_loop.DataParallelPPOActor = Actor
    ppo_loop.advantages_of = advantages_of
    fork.ppo(FLAGS)
