"""SP3O (2609.18708): the critic learns at a few places of a response only.

    python tests/forks/sp3o.py --rollouts rows.jsonl
    python tests/forks/sp3o.py ppo_loop

For each p of `places`, one of a row's L actions is learned: number min(L - 1, floor(p L)), counted
from 0. Values, returns and evaluation still cover all actions; so does critic/vf_clipfrac.
"""

from dataclasses import replace

import fork
import torch


class Critic:
    places = (0.3, 0.6, 0.9)  # fractions of a response

    def chosen(self, n):
        """Which of a row's n actions stand at these places."""
        return sorted({min(n - 1, int(p * n)) for p in self.places if n})

    def weights_of(self, local, mini):
        """The weights of a mini-batch that has no other actions."""
        mask_T = torch.zeros_like(local.response_mask)
        action_A = local.response_mask.nonzero()[:, 0]
        for of_row in action_A.split(local.actions.tolist()):
            mask_T[of_row[self.chosen(len(of_row))]] = True

        # the other ranks' rows, too
        fewer = mini.copy()
        fewer.actions = [len(self.chosen(n)) for n in mini.actions.tolist()]
        return super().weights_of(replace(local, response_mask=mask_T), fewer)


if __name__ == "__main__":
    fork.run(Critic, __doc__)
