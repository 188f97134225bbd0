"""A head of 16 quantiles of the return, whose mean is the value (QR-DQN, 1710.10044).

    python tests/forks/quantiles.py --rollouts rows.jsonl
    python tests/forks/quantiles.py ppo_loop

Quantile i has the level tau = (i + 1/2) / 16; its loss is max(tau u, (tau - 1) u), u = R - q_i.
"""

import fork
import torch

QUANTILES = 16


class Critic:
    def build(self, model_config):
        model_config.num_labels = QUANTILES
        super().build(model_config)

    def values(self, outputs, mask):
        return super().values(outputs.mean(1), mask)

    def loss(self, outputs, micro):
        """The mean over quantiles of their losses; there is no clipping."""
        level_N = (torch.arange(QUANTILES, device=outputs.device) + 0.5) / QUANTILES
        mask_T1 = micro.response_mask[:, None]
        error_TN = torch.where(mask_T1, micro.returns[:, None] - outputs, 0.0)
        loss_T = torch.maximum(level_N * error_TN, (level_N - 1) * error_TN).mean(1)
        loss = (micro.weights * loss_T).sum()

        _, sums = super().loss(outputs, micro)
        more = {"vf_loss": loss.detach().double(), "vf_clipfrac": 0 * sums["vf_clipfrac"]}
        return loss, sums | more


if __name__ == "__main__":
    fork.run(Critic, __doc__)
