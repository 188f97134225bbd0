"""A loop of your own with a critic: padded tensors in, an update, padded advantages out.

    python tests/lessons/own_loop.py
    torchrun --nproc-per-node 2 tests/lessons/own_loop.py     the same metrics, up to rounding

Those of speed differ. `import critic_megatron as critic` takes the other critic. To start your own,
copy this file next to the scripts.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import common
import critic_fsdp as critic


def main():
    config = critic.Config(model="tiny-qwen2", lr=1e-5)
    worker = critic.CriticWorker(config)  # joins the other ranks
    worker.init_model()

    # the rows that this rank has made
    mine = torch.arange(16).chunk(common.WORLD_SIZE)[common.RANK]

    for _ in range(3):
        # made up, alike on all ranks: prompts of up to 4 tokens, padded on the left, and responses
        # of up to 6, padded on the right
        input_ids = torch.randint(5, 90, (16, 10))
        place = torch.arange(10)
        prompt = torch.randint(1, 5, (16, 1))
        response = torch.randint(1, 7, (16, 1))
        attention_mask = (place >= 4 - prompt) & (place < 4 + response)
        response_mask = attention_mask & (place >= 4)
        rewards = (input_ids[:, 4] % 2).float()  # one for each row, or one for each token

        # from padded tensors to flat rows, one update, and back
        padded = (x[mine] for x in (input_ids, attention_mask, response_mask, rewards))
        batch = common.from_padded(*padded)
        batch.values = worker.compute_values(batch)
        common.add_returns(batch, gamma=1.0, lam=0.95)
        metrics = worker.update_critic(batch)
        advantages = common.to_padded(batch.advantages, attention_mask[mine])  # for your actor
        common.print0(json.dumps(metrics), tuple(advantages.shape))

    worker.save_checkpoint("out/own/checkpoint")
    worker.export_hf("out/own/hf")


if __name__ == "__main__":
    common.launch(main)
