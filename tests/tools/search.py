"""Answers prompts with a policy, and a critic helps to choose the tokens while they are written.

    python tests/tools/search.py --candidates 8 --actor.model out/ppo_loop/hf \\
        --critic.model out/ppo_loop/critic_hf             addition, after a run of ppo_loop.py
    torchrun --nproc-per-node 2 tests/tools/search.py --candidates 8 --block 4 \\
        --actor.model FOLDER --critic.model FOLDER --prompts FILE --reward FILE.py:FUNCTION
                                                          any task, on two ranks

Nothing is trained. The prompts are those of --eval-prompts, or else of --prompts; addition has its
held-out sums. The mean reward is printed next to that of greedy answers, and the answers are in
searched.jsonl in --out-dir, with values, as rows for critic_fsdp.py. With --reward none, prompts
need no reward.

More flags are those of ppo_loop.py. Those that train do nothing here.
"""

import random
import signal
import sys
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pydantic
import torch
import tyro
from pydantic import PositiveFloat

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import common
import ppo_loop
from common import RANK, WORLD_SIZE, UserError, of_all_ranks, print0
from ppo_loop import Positive, Prompt, Reply


@pydantic.dataclasses.dataclass(frozen=True)
class Search:
    """How an answer is written: block by block, and the best of some candidates goes on."""

    candidates: Positive  # how many the policy draws for each block of an answer
    block: Positive = 1  # tokens of a block
    # take the candidate with the highest log p + this x value (inf: with the highest value)
    beta: PositiveFloat = inf


def no_reward(turns, answer):
    """--reward none: any answer will do, and main does not ask for its reward."""
    return 1.0


ppo_loop.REWARDS["none"] = no_reward


# ---- The run -------------------------------------------------------------------------------------


def main(search, run):
    """Answers the prompts greedily and by a search, whose answers it writes (a collective)."""
    run, task = ppo_loop.set_up(with_trained_critic(run))
    device = common.setup_distributed(run.critic.timeout_minutes)
    reward = task.reward
    if run.reward_model:
        reward = ppo_loop.RewardModel(run, task.tokenizer)

    # the policy writes in an engine, and the critic reads what it has written
    policy = ppo_loop.PolicyWorker(run, task, device, trains=False)
    engine_kind = ppo_loop.HFRollout if run.rollout == "hf" else ppo_loop.VLLMRollout
    engine = engine_kind(run, task, device)
    engine.sync(policy.weights(engine.dtype))
    critic = ppo_loop.critic_module(run.backend).CriticWorker(run.critic)
    critic.init_model(1)
    critic.set_budget(task.longest, ppo_loop.LONGEST)

    # a search is an engine, too
    searching = engine_of(search, engine, critic, task)
    for name, its, temperature in ("greedy", engine, 0.0), ("searched", searching, run.temperature):
        replies = ppo_loop.rows_of_rank(task.held_out or task.prompts)
        ppo_loop.roll_out(its, task, replies, run, temperature, f"{run.seed}")
        if reward is not no_reward:
            _, mean, _ = ppo_loop.score(run, reward, ppo_loop.Phases(offload=False), replies)
            print0(f"{name:10} mean reward {mean:z.3f}")

    # the answers of the search, with their values
    batch = ppo_loop.to_batch(replies)
    batch.values = critic.compute_values(batch)
    batch.token_level_rewards = ppo_loop.rewards_of(replies)
    ppo_loop.write_jsonl(batch, f"{run.out_dir}/searched.jsonl", replies)
    print0(f"saved      {run.out_dir}: searched.jsonl")


def with_trained_critic(run):
    """The run with a critic whose head must have been trained. UserError: flags that a search would
    pass over, although they say which weights or texts the critic gets."""
    for flag, x in {"resume": run.resume, "privileged-key": run.privileged_key}.items():
        if x:
            raise UserError(f"--{flag} {x}: not for a search; its critic is that of --critic.model")
    return replace(run, critic=replace(run.critic, value_head_init="checkpoint"))


# ---- The search ----------------------------------------------------------------------------------


def engine_of(search, engine, critic, task):
    """The search in place of a rollout engine."""
    return SimpleNamespace(generate=partial(generate, search, engine, critic, task))


def generate(search, engine, critic, task, rows, temperature, images=None):
    """HFRollout.generate with a critic: of the candidates for the next block of an answer, the best
    one goes on (a collective of all ranks)."""
    files = images or [None] * len(rows)
    best = [Reply(Prompt(row[0], images=x), i) for i, (row, x) in enumerate(zip(rows, files))]
    going = best
    over = lambda reply: reply.finished or len(reply.ids) == rows[reply.row_id][2]

    while any(of_all_ranks(bool(going))):
        candidates = next_blocks(search, engine, task, rows, going, temperature)
        values_B = values_behind(critic, candidates, over)

        # the best one by V + log p / beta; a row's candidates have all but the block in common
        log_p_B = torch.tensor([sum(reply.log_probs) for reply in candidates])
        heights = (values_B + log_p_B / search.beta).tolist()
        for i, some in groupby(zip(candidates, heights), key=lambda pair: pair[0].row_id):
            best[i], _ = max(some, key=lambda pair: pair[1])
        going = [reply for reply in best if not over(reply)]
    return [(reply.ids, reply.log_probs, reply.finished) for reply in best]


def next_blocks(search, engine, task, rows, going, temperature):
    """What the policy may say next: these replies with each a block more, in the order of rows.
    rows: see HFRollout.generate."""
    # a row's candidates have seeds of their own, in each block
    begun = [reply for reply in going for _ in range(search.candidates)]
    asked = []
    for n, reply in enumerate(begun):
        ids, seed, room = rows[reply.row_id]
        key = f"{seed} {len(reply.ids)} {n % search.candidates}"
        own = random.Random(key).getrandbits(63)
        asked.append((ids + reply.ids, own, min(search.block, room - len(reply.ids))))
    blocks = engine.generate(asked, temperature, [reply.prompt.images for reply in begun])

    # equal candidates are one; a text of --stop may have begun in an earlier block
    candidates = {}
    for reply, (ids, log_probs, ended) in zip(begun, blocks):
        for n in range(1, len(ids) + 1):
            if task.stop_texts(torch.tensor([reply.ids + ids[:n]]), None):
                ids = ids[:n]
                ended = True
                break
        said = reply.ids + ids
        log_probs = reply.log_probs + log_probs[: len(ids)]
        new = replace(reply, ids=said, log_probs=log_probs, finished=ended)
        candidates[reply.row_id, *said] = new
    return [*candidates.values()]


def values_behind(critic, candidates, over):
    """values_B: what the places behind these candidates are worth (a collective).

    The value of a place is read before an action there, whose id does not matter. A candidate that
    is over has no such place, and the critic has learned nothing of what would be there, so it gets
    the last value of its answer."""
    behind = []
    for reply in candidates:
        n = 0 if over(reply) else 1
        ids = reply.ids + [0] * n
        behind.append(replace(reply, ids=ids, log_probs=reply.log_probs + [0.0] * n))
    batch = ppo_loop.to_batch(behind)
    batch.row_id = RANK + WORLD_SIZE * torch.arange(len(batch))
    return critic.compute_values(batch)[common.last_action(batch)]


# ---- The command line ----------------------------------------------------------------------------


def start():
    """Runs main with the flags of the command line, and leaves no worker process behind."""
    signal.signal(signal.SIGINT, ppo_loop.interrupted)
    options = {"description": __doc__, "console_outputs": RANK == 0}
    search, flags = tyro.cli(Search, return_unknown_args=True, **options)
    try:
        main(search, ppo_loop.parse(["--out-dir", "out/searched", *flags]))
    finally:
        ppo_loop.end_workers()


if __name__ == "__main__":
    common.launch(start)
