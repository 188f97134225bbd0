"""PPO with a critic that is never wrong: what the best critic could give.

python tests/experiments/oracle.py --baseline b --whiten noise --out-dir out/oracle         addition

At each step the true values of all places are computed from the policy's own chances to write the
only right answer, which earns 1. With --baseline progress, advantages are those that another run's
policy implies. More flags are those of ppo_loop.py.
"""

import pathlib
import sys
from dataclasses import dataclass, replace
from typing import Literal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import torch
from helpers import common
from series import start
from truth import next_log_probs, right_answer

import ppo_loop

# the learned critic is not asked
CRITIC = ["--critic.value-head-init", "zero", "--critic.lr", "1e-30"]


@dataclass(frozen=True)
class Oracle:
    """V: the true value of a state, with the lambda of --lam-policy. b: the baseline of a state
    that leaves the least noise. Q-b: the true value of the action, and that baseline. progress:
    instead of them, log(pi / pi_ref) of a policy that has learned this task (2606.26080)."""

    baseline: Literal["V", "b", "Q-b", "progress"] = "V"
    learned: str = ""  # for progress: --out-dir of the run on sums that has learned it
    exact: str = "{answer}"  # the text of the only right response, with the row's answer


def main(oracle, flags):
    """Runs PPO with its values replaced."""
    learn = ppo_loop.update_critic

    def update_critic(loop, batch, replies):
        if oracle.baseline == "progress":
            metrics = learn(loop, batch, replies)
            gain_T = progress(oracle.learned, loop, batch)
            batch.advantages = ppo_loop.masked_whiten(gain_T, batch.response_mask)
            return metrics

        values_T, b_T = true_values(oracle, loop, replies)
        loop.critic.compute_values = lambda rows: values_T
        metrics = learn(loop, batch, replies)
        if oracle.baseline != "V":
            # a Q is what the action earns at once, and the next place's value
            target_T = common.monte_carlo(batch, loop.run.gamma)
            if oracle.baseline == "Q-b":
                common.add_returns(batch, loop.run.gamma, 0.0)
                target_T = batch.returns
            batch.advantages = torch.where(batch.response_mask, target_T - b_T, 0.0).float()
            batch.advantages = ppo_loop.whiten_by_noise(batch)
        return metrics

    ppo_loop.update_critic = update_critic
    ppo_loop.main(ppo_loop.parse([*CRITIC, *flags]))


def progress(folder, loop, batch):
    """(T,) log-probs of the actions under a run's last policy, minus those under its first one."""
    log_probs = []
    for name in ("hf", "supervised"):
        model = {"model": f"{folder}/{name}", "override_config": "{}"}
        its = replace(loop.run, actor=replace(loop.run.actor, **model))
        reader = ppo_loop.PolicyWorker(its, loop.task, loop.actor.device, trains=False)
        log_probs.append(reader.compute_log_probs(batch))
    return log_probs[0] - log_probs[1]


def true_values(oracle, loop, replies):
    """(T,) true values, and (T,) baselines that leave the least noise, of the rows of replies."""
    task = loop.task
    prompts = {(*reply.prompt.ids, reply.prompt.answer): reply.prompt for reply in replies}
    rights = {
        key: right_answer(oracle, task.tokenizer, prompt.ids, prompt.answer)[1]
        for key, prompt in prompts.items()
    }
    rows = [prompts[key].ids + right + [0] for key, right in rights.items()]
    firsts = [len(prompt.ids) for prompt in prompts.values()]
    read = next_log_probs(loop.engine.model, loop.run, task, rows, firsts)

    # of the places of the right answer, the last of which is in front of its end
    places = {}
    for (key, right), log_p_RV in zip(rights.items(), read):
        p_RV = log_p_RV.double().exp()
        ends = p_RV[-1:, task.stop_ids].sum(-1)
        p_R = torch.cat([p_RV[range(len(right)), right], ends])
        squares_R = p_RV.square().sum(-1)
        v_R = p_R.flip(0).cumprod(0).flip(0)
        b_R = v_R * (1 - 2 * p_R + squares_R) / (1 - squares_R).clamp(min=1e-9)
        places[key] = right, v_R, b_R

    # an answer is worth nothing from its first wrong token on
    values_T = []
    b_T = []
    for reply in replies:
        right, v_R, b_R = places[(*reply.prompt.ids, reply.prompt.answer)]
        on_path = [reply.ids[:i] == right[:i] for i in range(len(reply.ids))]
        n = sum(on_path)
        before = [0.0] * len(reply.prompt.ids)
        behind = [0.0] * (len(reply.ids) - n)
        values_T += [*before, *v_R[:n].tolist(), *behind]
        b_T += [*before, *b_R[:n].tolist(), *behind]
    return torch.tensor(values_T), torch.tensor(b_T)


if __name__ == "__main__":
    start(Oracle, main, __doc__)
