"""A second output of the head, which learns how many actions of the answer are left.

    python tests/forks/second_output.py --rollouts rows.jsonl
    python tests/forks/second_output.py ppo_loop

critic/left_error is the mean square of its errors. Both losses share the backbone and the clipped
gradient, so a large SHARE slows the values down.
"""

from dataclasses import replace

import fork
import torch

import common

SHARE = 0.05  # weight of the second loss


def actions_left(rows):
    """(T,) how many actions of its row are left, with this one."""
    ones = replace(rows, token_level_rewards=rows.response_mask.float())
    return common.monte_carlo(ones, gamma=1.0)


class Critic:
    def build(self, model_config):
        model_config.num_labels = 2
        super().build(model_config)

    def micro_batch(self, piece):
        """Its returns are (T, 2): the returns, and what the second output is to learn."""
        micro = super().micro_batch(piece)
        if micro.returns is None:  # only values are asked for
            return micro
        left = super().micro_batch(replace(piece, returns=actions_left(piece)))
        return micro._replace(returns=torch.stack([micro.returns, left.returns], 1))

    def values(self, outputs, mask):
        return super().values(outputs[:, 0], mask)

    def loss(self, outputs, micro):
        returns_T, left_T = micro.returns.unbind(1)
        loss, sums = super().loss(outputs, micro._replace(returns=returns_T))
        error_T = torch.where(micro.response_mask, outputs[:, 1] - left_T, 0.0)
        sums["left_error"] = error_T.detach().square().sum().double()
        return loss + SHARE * (micro.weights * error_T.square()).sum(), sums


if __name__ == "__main__":
    fork.run(Critic, __doc__)
