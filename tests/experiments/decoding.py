"""Does a critic pay when answers are chosen? Ways to choose them, and what each costs.

python tests/experiments/decoding.py --policy out/ppo_loop/hf --critic FOLDER        addition
    --prompts FILE --eval-prompts FILE --reward FILE.py:FUNCTION                     any task

The search of tests/tools/search.py is compared with greedy answers and with choices among whole
answers to the same held-out prompts. The task is told by the flags of ppo_loop.py. --beta is chosen
on the first of the other prompts. +- is the standard error over prompts, of means over --seeds.
"""

import pathlib
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from time import process_time
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import numpy as np
import search
from helpers import common
from series import start, told

import ppo_loop


@dataclass(frozen=True)
class Decoding:
    """What to compare. More flags are those of ppo_loop.py."""

    policy: str  # its folder
    critic: str  # its folder
    n: tuple[int, ...] = (4, 8)  # answers, or candidates for each token
    betas: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # for --beta of the search
    blocks: tuple[int, ...] = (1,)  # for --block of the search
    seeds: int = 4
    most: int = 256  # prompts to choose a beta on


class Meter:
    """The policy's engine and the critic, and what they have done."""

    def __init__(self, run, task):
        device = common.setup_distributed()
        policy = ppo_loop.PolicyWorker(run, task, device, trains=False)
        self.engine = ppo_loop.HFRollout(run, task, device)
        self.engine.sync(policy.weights(self.engine.dtype))
        self.critic = ppo_loop.critic_module(run.backend).CriticWorker(run.critic)
        self.critic.init_model(1)
        self.critic.set_budget(task.longest, "the longest answer")
        self.done = np.zeros(2)  # tokens drawn; tokens that the critic has read

    def generate(self, *asked):
        replies = self.engine.generate(*asked)
        self.done[0] += sum(len(ids) for ids, _, _ in replies)
        return replies

    def compute_values(self, batch):
        self.done[1] += len(batch.input_ids)
        return self.critic.compute_values(batch)


class Way(NamedTuple):
    """How one way to choose answers went."""

    rewards: np.ndarray  # (P,) of each prompt
    cost: np.ndarray  # (3,) tokens drawn, tokens that the critic has read, seconds of CPU


def answers(engine, meter, run, task, prompts, n=1, temperature=None):
    """Replies to the prompts, n to each, with their rewards, and the cost."""
    replies = [ppo_loop.Reply(prompts[i // n], i) for i in range(len(prompts) * n)]
    meter.done[:] = 0
    began = process_time()
    heat = run.temperature if temperature is None else temperature
    ppo_loop.roll_out(engine, task, replies, run, heat, f"{run.seed}")
    cost = np.array([*meter.done, process_time() - began])
    ppo_loop.score(run, task.reward, ppo_loop.Phases(offload=False), replies)
    return replies, np.array([reply.score for reply in replies]).reshape(-1, n), cost


def searched(meter, run, task, prompts, n, block, beta):
    engine = search.engine_of(search.Search(n, block, beta), meter, meter, task)
    _, rewards_P1, cost = answers(engine, meter, run, task, prompts)
    return Way(rewards_P1[:, 0], cost)


def chosen(meter, run, task, prompts, n):
    """{name: Way} of what chooses among n whole answers."""
    replies, rewards_PN, cost = answers(meter, meter, run, task, prompts, n)
    log_p_PN = np.array([sum(reply.log_probs) for reply in replies]).reshape(-1, n)
    said = [(re.findall(r"\d+", reply.text) or [reply.text])[-1] for reply in replies]

    # how many of the answers to the prompt say the same
    votes_PN = np.array(
        [[Counter(said[i : i + n])[x] for x in said[i : i + n]] for i in range(0, len(said), n)]
    )

    meter.done[:] = 0
    began = process_time()
    batch = ppo_loop.to_batch(replies)
    value_PN = meter.compute_values(batch)[common.last_action(batch)].numpy().reshape(-1, n)
    with_critic = cost + [*meter.done, process_time() - began]

    def best(height_PN):
        tied_PN = height_PN == height_PN.max(1, keepdims=True)  # they share the choice
        return (rewards_PN * tied_PN).sum(1) / tied_PN.sum(1)

    return {
        "one sample": Way(rewards_PN.mean(1), cost / n),
        f"majority of {n}": Way(best(votes_PN), cost),
        f"most likely of {n}": Way(best(log_p_PN), cost),
        f"critic's best of {n}": Way(best(value_PN), with_critic),
    }


def mean(ways):
    """The Way that is the mean of these."""
    return Way(*(np.mean(column, 0) for column in zip(*ways)))


def compare(decoding, run):
    """{name: Way}, and the names of the ways to compare each with, or None."""
    run, task = ppo_loop.set_up(search.with_trained_critic(run))
    meter = Meter(run, task)
    some = task.prompts[: decoding.most]
    held_out = task.held_out
    _, rewards_P1, cost = answers(meter, meter, run, task, held_out, temperature=0.0)
    ways = {"greedy": Way(rewards_P1[:, 0], cost)}
    runs = [replace(run, seed=101 + i) for i in range(decoding.seeds)]
    for n in decoding.n:
        by_seed = [chosen(meter, one, task, held_out, n) for one in runs]
        ways |= {name: mean([seed[name] for seed in by_seed]) for name in by_seed[0]}
        for block in decoding.blocks:
            tried = {
                beta: searched(meter, run, task, some, n, block, beta).rewards.mean()
                for beta in (*decoding.betas, inf)
            }
            shown = ", ".join(f"{beta:g}: {x:.3f}" for beta, x in tried.items())
            print(f"--candidates {n} --block {block}, other prompts, by beta: {shown}")
            for beta in {inf, max(tried, key=tried.get)}:
                mine = [searched(meter, one, task, held_out, n, block, beta) for one in runs]
                ways[f"`--candidates {n} --block {block}`, beta {beta:g}"] = mean(mine)
    return ways


def tell(ways):
    """Prints the table."""
    print("\n| way | mean reward | more than greedy | tokens drawn | read by the critic | CPU |")
    print("|---" * 6 + "|")
    for name, (rewards_P, cost) in ways.items():
        drawn, read, seconds = cost / len(rewards_P)
        more = told(rewards_P - ways["greedy"].rewards)
        costs = f"{drawn:.1f} | {read:.1f} | {1000 * seconds:.1f} ms"
        print(f"| {name} | {told(rewards_P)} | {more} | {costs} |")


def main(decoding, flags):
    folders = ["--actor.model", decoding.policy, "--critic.model", decoding.critic]
    # it writes nothing, so its models may be in any other folder
    tell(compare(decoding, ppo_loop.parse(["--out-dir", "out/decoding", *flags, *folders])))


if __name__ == "__main__":
    start(Decoding, main, __doc__)
