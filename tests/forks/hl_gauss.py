"""HL-Gauss (2403.03950): the head gives a distribution over bins, and the value is its mean.

    python tests/forks/hl_gauss.py --rollouts rows.jsonl
    python tests/forks/hl_gauss.py ppo_loop --critic.value-range -0.1 1.1

The bins divide --value-range, without it the range of the returns. A new head starts at random.
The export has a logit for each bin, and the range in its config.json; only this file trains on.
"""

from math import sqrt

import fork
import torch

from common import UserError

BINS = 51


class Critic:
    def build(self, model_config):
        model_config.num_labels = BINS
        super().build(model_config)

    def values(self, outputs, mask):
        """The expected centre of a bin, sum_i softmax(logits)_i c_i."""
        low, high = self.value_range
        half = (high - low) / BINS / 2
        centre_N = torch.linspace(low + half, high - half, BINS, device=outputs.device)
        return torch.where(mask, (outputs.softmax(1) * centre_N).sum(1), 0.0)

    def loss(self, outputs, micro):
        """Cross-entropy between the predicted bins and a Gaussian around the return (1806.04613).

            L_t = -sum_i p_i(R_t) log softmax(logits_t)_i,    loss = sum_t w_t L_t
            p_i = (Phi(e_{i+1}) - Phi(e_i)) / (Phi(e_N) - Phi(e_0))

        e: edges of the bins. Phi: CDF of Normal(R, 0.75 bin widths). R is clamped to the range."""
        low, high = self.value_range
        edge_N = torch.linspace(low, high, BINS + 1, device=outputs.device)
        sigma = 0.75 * (high - low) / BINS
        returns_T = torch.where(micro.response_mask, micro.returns, low).clamp(low, high)
        cdf_TN = torch.erf((edge_N - returns_T[:, None]) / (sigma * sqrt(2)))
        p_TN = cdf_TN.diff() / (cdf_TN[:, -1:] - cdf_TN[:, :1])

        logits_TN = torch.where(micro.response_mask[:, None], outputs, 0.0)
        loss = -(micro.weights * (p_TN * logits_TN.log_softmax(1)).sum(1)).sum()
        _, sums = super().loss(outputs, micro)
        more = {"vf_loss": loss.detach().double(), "vf_clipfrac": 0 * sums["vf_clipfrac"]}
        return loss, sums | more

    def start_at(self, value):
        if self.config.value_head_init == "mean":
            raise UserError("--value-head-init mean: not for bins, which start at random")


if __name__ == "__main__":
    fork.run(Critic, __doc__, "--value-head bounded")
