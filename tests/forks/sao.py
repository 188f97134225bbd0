"""SAO (2607.07508): one answer to a prompt, a critic that learns faster, and a band of ratios.

    python tests/forks/sao.py --out-dir out/sao

What the paper changes in PPO, with L actions in an answer:
    the critic learns twice an update, with its attention frozen, and first alone
    lambda of the critic 1, of the policy 1 - 1 / (1.5 L), about 0.51^(1 / (L - 1))
    the objective is r_t A_t without a clip, r_t = pi(a_t) / mu(a_t) to the engine's mu,
    and actions whose r_t is outside [0.7, 6], its band for mathematics, do not count
Its critic learns at five times the actor's rate, which is yours to set, and its answers may be of a
policy of some steps ago; here they are of the current one. actor/pg_outside is the share of the
actions outside. More flags are those of ppo_loop.py.
"""

import first_token_credit
import fork

import ppo_loop

CREDIT = 0.51  # the first action's share of a reward at the end
FLAGS = """
    --critic-warmup 10 --critic.ppo-epochs 2 --critic.freeze-modules self_attn
    --old-log-probs engine
    --actor.clip-ratio-low 1 --actor.clip-ratio-high 1e30 --actor.clip-ratio-c None
"""


class Actor(ppo_loop.DataParallelPPOActor):
    band = (0.7, 6.0)  # of ratios

    def outside(self, log_probs_T, micro):
        """(T,) whether an action's ratio is outside the band."""
        ratio_T = (log_probs_T - ppo_loop.engine_log_probs(micro)).exp()
        return micro.response_mask & (ratio_T != ratio_T.clamp(*self.band))

    def policy_weights(self, log_probs_T, micro):
        return super().policy_weights(log_probs_T, micro) * ~self.outside(log_probs_T, micro)

    def loss(self, outputs, micro):
        whole, sums = super().loss(outputs, micro)
        outside_T = self.outside(outputs[:, 0].detach(), micro)
        return whole, sums | {"pg_outside": outside_T.sum().double()}


def advantages_of(batch, run):
    return first_token_credit.with_credit(batch, run, CREDIT)


if __name__ == "__main__":
    ppo_loop.DataParallelPPOActor = Actor
    ppo_loop.advantages_of = advantages_of
    fork.ppo(FLAGS)
