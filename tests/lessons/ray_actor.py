"""The critic as actors of Ray, one for each rank: torchrun's five variables are all it needs.

python tests/lessons/ray_actor.py       two ranks on the CPU learn from rows.jsonl; needs Ray
"""

import os
import pathlib
import socket
import sys

import ray

ROOT = pathlib.Path(__file__).resolve().parents[2]


@ray.remote
class CriticRank:
    """One rank. Call each method on all ranks at once: a call waits for those of the others."""

    def address(self):
        """Where the ranks meet, if this one is the first: a free port of its machine."""
        with socket.create_server(("", 0)) as free:
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def join(self, rank, ranks, address, fields):
        """Builds the critic with these fields of critic_fsdp.Config."""
        # common reads these when it is imported; with num_gpus=1 a rank sees only its own GPU
        names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT"
        os.environ |= dict(zip(names.split(), map(str, (rank, ranks, 0, *address))))
        import critic_fsdp

        self.worker = critic_fsdp.CriticWorker(critic_fsdp.Config(**fields))
        self.worker.init_model()

    def compute_values(self, batch):
        return self.worker.compute_values(batch)

    def update_critic(self, batch):
        return self.worker.update_critic(batch)


def main():
    """Makes two updates as a trainer would, and prints their losses."""
    import common

    # the first rank says where all of them meet
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
    ranks = [CriticRank.remote() for _ in range(2)]
    address = ray.get(ranks[0].address.remote())
    fields = {"model": "tiny-qwen2", "lr": 1e-3}
    ray.get([actor.join.remote(i, 2, address, fields) for i, actor in enumerate(ranks)])

    # each rank gets half of the rows of an update
    rows = common.read_rows(f"{ROOT}/tests/rows.jsonl", common.char_tokenizer())
    for batch in rows.split(512):
        parts = batch.split(256)
        values = ray.get([x.compute_values.remote(part) for x, part in zip(ranks, parts)])
        for part, values_T in zip(parts, values):
            part.values = values_T
            common.add_returns(part, gamma=1.0, lam=0.95)
        metrics = ray.get([x.update_critic.remote(part) for x, part in zip(ranks, parts)])
        print("loss", [one["critic/vf_loss"] for one in metrics])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # of common
    main()
