"""PPO for language models, end to end, with the critic of your choice.

    python ppo_loop.py                         a tiny actor learns to add, in a minute on a laptop
    torchrun --nproc-per-node 2 ppo_loop.py    the same on two ranks, with the same numbers
    torchrun --nproc-per-node 4 ppo_loop.py --critic megatron \\
        --critic.tensor-model-parallel-size 2 --critic.pipeline-model-parallel-size 2
                                               with the critic on Megatron-Core, in its own layout
    torchrun --nproc-per-node 8 ppo_loop.py --actor.model Qwen/Qwen2.5-0.5B-Instruct \\
        --prompts gsm8k/train.jsonl --eval-prompts gsm8k/test.jsonl --prompt-key question --chat \\
        --reward gsm8k --max-response-length 512

The flags come first, then main(), which is the algorithm. Actor and reference are Hugging Face
models on FSDP2; the critic is the CriticWorker of critic_fsdp.py or critic_megatron.py. Copy this
file with it and common.py.

Shapes are in the names: T tokens, sequences end to end; A actions (tokens the policy chose); C a
chunk of A; B sequences; L tokens of a padded row; R of a response; S slots of pack_rows; V
vocabulary; D features.
"""

import argparse
import asyncio
import collections
import ctypes
import inspect
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from importlib import import_module, util
from itertools import chain, groupby
from math import ceil, inf, log, nan
from os.path import exists, realpath
from time import perf_counter, sleep
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

if __name__ == "__main__":
    # a stream that is closed would be the next file that opens
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))
            os.set_inheritable(number, True)

import cloudpickle
import pydantic
import torch
import torch.distributed as dist
import torch.nn as nn
import transformers
import tyro
from loky import wrap_non_picklable_objects
from loky.backend.context import LokyContext
from loky.backend.process import LokyProcess
from pebble import CONSTS, ProcessExpired, ProcessPool
from pydantic import Field, ValidationError
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import (
    GenerationConfig,
    StoppingCriteriaList,
    StopStringCriteria,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer
from transformers.core_model_loading import revert_weight_conversion
from transformers.image_utils import load_image
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

import common
import critic_fsdp
from common import RANK, WORLD_SIZE, Batch, Stop, UserError, blame, of_all_ranks, print0, progress
from critic_fsdp import Count, Files, Fraction, Positive, Rate, Seed, Text

# ---- Config --------------------------------------------------------------------------------------

Weight = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Heat = Annotated[float, Field(ge=0.01, le=100)]  # vLLM takes less for 0.01; logits stay finite
Share = Annotated[float, Field(gt=0, le=1)]
KL = Literal["k1", "k2", "k3", "abs"]  # see kl_penalty
# flags about a critic's own base, see --share-base
OF_A_BASE = (
    "override_config strategy fsdp_size offload_policy keep_gathered defer_grad_sync compile"
    " gradient_checkpointing param_dtype use_remove_padding freeze_modules"
)
BACKBONE = r"^model\."  # what --critic.freeze-modules takes to train the head alone
LOGITS_AT_ONCE = 2**25  # per chunk: 128 MiB in float32
TOKENS_AT_ONCE = {"cpu": 512, "cuda": 16384}  # of prompts: fewer would not keep it busy


@pydantic.dataclasses.dataclass(frozen=True, config=critic_fsdp.BRIEF)
class ActorConfig(critic_fsdp.Config):
    """The policy, and the frozen reference, which is the same model before training. Its model,
    layout, batches and optimizer are chosen as those of a critic on FSDP."""

    prefix: ClassVar[str] = "--actor."  # what its flags begin with, in messages

    # what only a critic has
    value_head: ClassVar[None] = None
    value_head_init: ClassVar[None] = None
    value_range: ClassVar[None] = None
    value_weights: ClassVar[None] = None
    cliprange_value: ClassVar[None] = None
    response_length_limit: ClassVar[None] = None  # here it is --max-response-length
    compile: ClassVar[None] = None
    lr_scheduler_type: ClassVar[str] = "constant"

    # what is the run's, see with_defaults
    seed: tyro.conf.Suppress[Seed] = 0
    timeout_minutes: tyro.conf.Suppress[float] = 30.0

    # ---- what has another default or choice

    strategy: Literal["fsdp2", "none"] = "fsdp2"  # how to shard weights (none: a copy per rank)
    # rows per optimizer step, over all ranks; an answer of several rows counts once
    ppo_mini_batch_size: Positive = 128
    lr: Rate | None = None  # peak learning rate (None: 5e-4 for addition, else 1e-6)

    # ---- loss

    clip_ratio_low: Share = 0.2  # PPO clips the probability ratio below 1 - this
    clip_ratio_high: Rate = 0.2  # PPO clips the probability ratio above 1 + this
    # dual clip for negative advantages (None: off)
    clip_ratio_c: Annotated[float, Field(gt=1, le=1e30)] | None = 3.0
    entropy_coeff: Weight = 0.0  # weight of the entropy bonus
    kl_loss_coef: Weight = 0.0  # coefficient of the KL to the reference in the loss (0: none)
    # estimator of the KL in the loss; on average, the gradient of k2 is that of KL(policy ||
    # reference), of k3 that of KL(reference || policy), and of k1 it is 0
    kl_loss_type: KL = "k3"
    # weigh each token by min(pi_old / pi_engine, this) (None: no weights)
    tis_cap: Rate | None = None

    def __post_init__(self):
        """The rules of a critic are about flags that an actor does not have."""


@pydantic.dataclasses.dataclass(frozen=True, config=critic_fsdp.BRIEF)
class VLLMConfig:
    """The vLLM engine of --rollout vllm."""

    prefix: ClassVar[str] = "--vllm."  # what its flags begin with, in messages

    # ---- engine, for --rollout vllm

    tensor_parallel_size: Positive = 1  # ranks that share one engine and its copy of the actor
    gpu_memory_utilization: Share = 0.5  # fraction of device memory that vLLM uses while awake


@pydantic.dataclasses.dataclass(frozen=True, config=critic_fsdp.BRIEF)
class Run:
    """Trains a policy with PPO, evaluates it, and saves checkpoints and Hugging Face folders."""

    critic: Any  # Config of the script chosen by --critic
    actor: ActorConfig = ActorConfig()
    vllm: VLLMConfig = VLLMConfig()
    # script that implements the critic; its own flags are --critic.*
    backend: Annotated[Literal["fsdp", "megatron"], tyro.conf.arg(name="critic")] = "fsdp"
    # the critic is a head on the actor's weights; if both have a --lora-rank, they train adapters
    # on one base
    share_base: bool = False

    # ---- task

    # to train on: JSONL, parquet, a folder, a name on the hub, or several (None: addition)
    prompts: Files | None = None
    eval_prompts: Files | None = None  # to evaluate on (None: no evaluation; addition has its own)
    # FILE.py:FUNCTION(row) -> a row with the keys below, or a list of them
    rows: Text | None = None
    prompt_key: Text = "prompt"  # JSONL key of the prompt: text, or a list of chat messages
    # JSONL key of the reference answer, which reward functions receive; in all keys, a.b is key b
    # within a
    answer_key: Text = "answer"
    # JSONL key of text that only the critic reads, before the prompt
    privileged_key: Text | None = None
    chat: bool = False  # wrap text prompts in the tokenizer's chat template, as a user message
    # JSON for the chat template, e.g. '{"enable_thinking": false}'
    chat_template_kwargs: Text = "{}"
    # drop prompts longer than this many tokens, and report how many
    max_prompt_length: Positive = 1024
    supervised_steps: Count = 250  # supervised steps before PPO, for addition with a tiny-* actor
    # addition, gsm8k, or FILE.py:FUNCTION(prompt, response, answer) -> number, list of one per turn
    # or per token, or dict with either as "score"
    reward: Text | None = None
    # or a reward model: folder or hub name (one label, at the last token)
    reward_model: Text | None = None
    # seconds that one call of the reward or environment may take; 0: no limit, it runs in this
    # process, where breakpoint() works
    reward_timeout: Seconds = 10.0
    # FILE.py:FUNCTION, same arguments -> next observation (text, or a message of a chat), or a new
    # context in its place ({"prompt": ...} or {"messages": ...}), or None to end; or (one of these,
    # reward of the turn)
    environment: Text | None = None
    max_turns: Positive = 8  # most turns of the policy in one answer, with --environment

    # ---- rollout

    rollout: Literal["hf", "vllm"] = "hf"  # hf: transformers' generate on a full copy of the actor
    # most prompts per step, over all ranks; a pass is cut into equal steps
    train_batch_size: Positive = 256
    # responses per prompt (torchrun would take --n for one of its own flags)
    rollout_n: Annotated[int, Field(gt=0, le=4096)] = 1
    # tokens behind a prompt, incl. observations (None: 8 for addition, else 256). Behind a new
    # context they count anew; both together have the room of the longest prompt with its response
    max_response_length: Positive | None = None
    # sampling temperature, also applied to all log-probs of actor and reference
    temperature: Heat = 1.0
    # nucleus sampling: draw from the likeliest tokens that reach this probability
    top_p: Share = 1.0
    # texts that end a turn, next to the end-of-sequence token, e.g. '</tool>'
    stop: tuple[Text, ...] = ()
    rollout_batch_size: Positive = 256  # rows that an engine generates at once
    # log-probs that PPO's ratios start from: the actor's, or the engine's: a forward pass less, and
    # no check that both agree
    old_log_probs: Literal["actor", "engine"] = "actor"
    dump_rollouts: bool = False  # write every step's rows as JSONL to out_dir/rollouts

    # ---- advantages

    gamma: Fraction = 1.0  # discount factor per action
    lam: Fraction = 1.0  # GAE lambda of the returns that the critic learns
    # decoupled GAE: lambda for the advantages (None: same as --lam)
    lam_policy: Fraction | None = None
    # what gamma and both lambdas count: tokens, or turns, all of whose tokens get one advantage
    gae_level: Literal["token", "turn"] = "token"
    # scale advantages over the global batch, around their mean or around the one with least noise,
    # whose weights OTB (2602.07078) has within each prompt
    whiten: Literal["mean", "noise", "none"] = "mean"
    # truncated rows bootstrap from the value of their last action
    bootstrap_truncated: bool = False

    # ---- KL to the reference in the reward

    # penalty on each action's reward per nat of KL to the reference (0: none)
    kl_coef: Weight = 0.0
    kl_penalty: KL = "k1"  # estimator of the KL in the reward
    # adapt --kl-coef to keep the mean KL per action near this (None: fixed)
    target_kl: Rate | None = None

    # ---- run

    steps: Positive = 60  # PPO steps
    critic_warmup: Count = 0  # first steps that update only the critic
    eval_every: Count = 20  # steps between evaluations (0: only at the start and the end)
    # steps between checkpoints (None: at evaluations, in place of the last; 0: only at the end)
    save_every: Count | None = None
    # how many of the last checkpoints to keep (None: all, but see --save-every)
    keep: Positive | None = None
    async_save: bool = False  # write checkpoints in the background, from a copy in host memory
    # checkpoint folder to continue from (auto: the last complete one in out_dir)
    resume: Text | None = None
    offload: bool = False  # keep each model on the host except in the phases that use it
    # seeds the actor's random weights, the prompt order, its shuffles and all sampling
    seed: Seed = 0
    profile_step: Positive | None = None  # profile this step of rank 0, with torch.profiler
    # FILE.py:FUNCTION, called with each line of metrics.jsonl as a dict
    logger: Text | None = None
    # folder for checkpoints, Hugging Face exports, metrics and report
    out_dir: Text = "out/ppo_loop"

    @property
    def uses_reference(self):
        """Whether a KL to the reference is part of the reward or of the actor's loss."""
        return self.kl_coef > 0 or self.actor.kl_loss_coef > 0

    def check_share_base(self):
        """ValueError unless the critic can live on the actor's base."""
        critic = self.critic
        if self.backend != "fsdp" or critic.model not in ("actor", self.actor.model):
            raise ValueError("--share-base: needs --critic fsdp and --critic.model actor")
        if bool(self.actor.lora_rank) != bool(critic.lora_rank):
            words = "needs both --actor.lora-rank and --critic.lora-rank, or none"
            raise ValueError(f"--share-base: {words}")
        probe = None if critic.lora_rank else BACKBONE  # what with_defaults freezes
        for name in OF_A_BASE.split():
            x = getattr(critic, name)
            usual = getattr(type(critic), name)
            if x not in (usual, getattr(self.actor, name, usual), probe):
                flag = f"--critic.{name.replace('_', '-')} {x}"
                raise ValueError(f"{flag}: is about a base of its own, so it excludes --share-base")

    def __post_init__(self):
        """ValueError names the flags that do not go together. See check_layout, too."""
        # the task
        if self.eval_prompts and not self.prompts:
            flag = f"--eval-prompts {self.eval_prompts}"
            raise ValueError(f"{flag}: needs --prompts; addition has its own")
        if self.prompts and not (self.reward or self.reward_model):
            raise ValueError(f"--prompts {self.prompts}: needs --reward or --reward-model")
        if self.reward and self.reward_model:
            words = f"--reward {self.reward}: excludes --reward-model"
            raise ValueError(f"{words} {self.reward_model}; give only one")

        # the algorithm
        if self.target_kl and not self.kl_coef:
            flag = f"--target-kl {self.target_kl}"
            raise ValueError(f"{flag}: adapts --kl-coef, which must be above 0")
        for flag, x in (
            ("--old-log-probs engine", self.old_log_probs),
            ("--whiten noise", self.whiten),
            ("--critic.value-weights noise", self.critic.value_weights),
        ):
            if self.top_p < 1 and x == flag.split()[1]:
                words = f"with --top-p {self.top_p} the engine's log-probs are of another policy"
                raise ValueError(f"{flag}: {words}")

        # memory
        if self.share_base:
            self.check_share_base()
        for config, other in ((self.actor, "critic"), (self.critic, "actor")):
            if config.ppo_max_token_len_per_gpu == "auto" and not self.offload:
                flag = f"{config.prefix}ppo-max-token-len-per-gpu auto"
                words = f"leaves the {other} no memory; add --offload or give auto:GIB"
                raise ValueError(f"{flag}: {words}")

        # a run sets aside its checkpoints and replaces its exports, so no model may come from them
        ours = [realpath(f"{self.out_dir}/{name}") for name in ("hf", "critic_hf", "checkpoints")]
        loaded = (self.actor.model, self.critic.model, self.reward_model)
        theirs = [f"{realpath(name)}/" for name in loaded if name]
        replaced = any(path.startswith(f"{own}/") for path in theirs for own in ours)
        if replaced:
            words = "the run would replace a model there that it loads; give another"
            raise ValueError(f"--out-dir {self.out_dir}: {words}")


# ---- The algorithm: PPO for language models, with a critic ---------------------------------------


def main(run):
    """PPO (1707.06347): the actor answers prompts, a reward rates the answers, the critic says how
    much better than expected each token was, and both models learn from that."""
    run, task = set_up(run)
    with training(run, task) as loop:
        for step in loop.steps():
            # save the state that the last step has left, as often as --save-every says
            save_if_due(loop, step)

            # roll out: the engine takes the actor's weights and answers each prompt n times
            replies, greedy = generate(loop, step)

            # evaluate the answers to held-out prompts, as often as --eval-every says
            evaluate_if_due(loop, step, greedy)

            # score: what each answer earns, from a function or a reward model
            rewards, mean, faults = score(loop.run, loop.reward, loop.phases, replies)
            batch = to_batch(replies)
            loop.batch = batch

            # log-probs of the answers: the actor's before it learns, and the reference's
            add_log_probs(loop, step, batch)

            # values and credit: how much better than expected each token was; the critic learns
            metrics = {"reward/mean": mean, "reward/errors": faults, "kl/coef": loop.kl_coef}
            metrics |= {"reward/min": min(rewards), "reward/max": max(rewards)}
            metrics |= update_critic(loop, batch, replies)

            # the actor learns to prefer what was better than expected
            metrics |= update_actor(loop, step, batch, len(rewards))

            # how it went
            metrics |= part_means(replies) | mean_turns(replies, task)
            report_step(loop, step, batch, replies, metrics)

        # save and evaluate what the last step has made
        save_if_due(loop, run.steps)
        _, greedy = generate(loop, run.steps)
        evaluate_if_due(loop, run.steps, greedy)


def generate(loop, step):
    """Rolls out -> (this rank's sampled replies to the prompts of the step, none after the last
    step; its greedy replies to the held-out prompts, or None if no evaluation is due)."""
    run = loop.run
    task = loop.task
    engine = loop.engine
    last = step == run.steps
    due = last or step % (run.eval_every or run.steps) == 0
    held_out = task.held_out if due else []

    with loop.phases("generation", engine):
        with loop.phases("sync", loop.actor):
            engine.sync(loop.actor.weights(engine.dtype))

        # held-out prompts, with the likeliest tokens
        greedy = rows_of_rank(held_out)
        roll_out(engine, task, greedy, run, temperature=0.0)

        # this step's prompts, with random tokens that depend on seed, step and row alone
        replies = []
        if not last:
            picked = common.rows_of_step(step, loop.groups, run.train_batch_size, run.seed)
            replies = rows_of_rank(picked, run.rollout_n)
            roll_out(engine, task, replies, run, run.temperature, f"{run.seed} {step}")
    return replies, greedy if held_out else None


class Unscored(UserError):
    """No row has a reward, which all ranks find before they change anything."""


def score(run, reward, phases, replies):
    """Scores the caller's rows -> (the rewards of all ranks, their mean, how many rows failed and
    have none). UserError: all failed."""
    with phases("reward", reward.worker if run.reward_model else None):
        answers = reward.ask_all(replies) if run.reward_model else ask_all(reward, replies)
    poll()

    # a reward is a number or a list, or a dict with either as "score" and more numbers
    for reply, (made, fault) in zip(replies, answers):
        reply.fault = reply.fault or fault or fault_of_reward(made, reply)
        if reply.fault:
            reply.earned.clear()
            continue
        if isinstance(made, dict):
            reply.parts = {name: x for name, x in made.items() if isinstance(x, float)}
            reply.parts.pop("score", None)
            made = made["score"]
        give_credit(reply, made)
        reply.score = float(reply.earned.total())

    # all ranks need the numbers and one fault to name, but no texts
    faults = [reply.fault for reply in replies if reply.fault]
    scores = [reply.score for reply in replies if not reply.fault]
    parts = of_all_ranks((scores, len(faults), faults[:1]))
    numbers, counts, named = zip(*parts)
    rewards = list(chain(*numbers))
    failed = sum(counts)
    first = next(chain(*named), "")
    if not rewards:
        flags = "--reward, --reward-model, --environment"
        raise Unscored(f"{flags}: all {failed} rows failed: {first}")
    if failed:
        words = f"{failed} of {failed + len(rewards)} rows failed and are left out"
        print0(f"{words}: {first.encode(errors='replace').decode()}")
    return rewards, sum(rewards) / len(rewards), failed


def add_log_probs(loop, step, batch):
    """Fills in the log-probs of the actions: the old ones, from which PPO's ratios start, and the
    reference's. Without a reference they are the same, and their KL is 0. If the actor makes one
    optimizer step, its own forward gives the old ones."""
    run = loop.run
    actor = run.actor
    answers = sum(of_all_ranks(len(batch.episodes())))
    one_step = actor.ppo_epochs == 1 and answers <= actor.ppo_mini_batch_size
    if run.old_log_probs == "engine":
        batch.old_log_probs = batch.rollout_log_probs
    elif run.kl_coef or step < run.critic_warmup or not one_step:
        with loop.phases("log_probs", loop.actor):
            batch.old_log_probs = loop.actor.compute_log_probs(batch)

    batch.ref_log_probs = batch.old_log_probs
    if loop.reference:
        with loop.phases("reference", loop.reference):
            batch.ref_log_probs = loop.reference.compute_log_probs_of_base(batch)


def update_critic(loop, batch, replies):
    """Values of the caller's rows, the credit of each action and the critic's update -> metrics."""
    run = loop.run
    critic = loop.critic
    with loop.phases("critic", *loop.of_critic()):
        # with --privileged-key the critic reads hints before the prompts, and the actor does not
        seen = to_batch(replies, hints=True) if run.privileged_key else batch
        assign_credit(batch, seen, rewards_of(replies), loop.kl_coef, run, critic)
        return critic.update_critic(seen)


def assign_credit(batch, seen, rewards_T, kl_coef, run, critic):
    """Fills in rewards, values, returns and advantages of the caller's rows (a collective). seen:
    the same rows as the critic reads them, which get the values and returns of its update; without
    --privileged-key they are the batch itself. rewards_T: see rewards_of."""
    # what gamma and lambda count
    if run.gae_level == "token":
        batch.turns = None

    # rewards: every action earns what it is given, and pays for its KL to the reference
    batch.token_level_rewards = rewards_T
    if kl_coef:
        kl_T = kl_penalty(batch.old_log_probs, batch.ref_log_probs, run.kl_penalty)
        batch.token_level_rewards = rewards_T - kl_coef * kl_T

    # values: what the critic expects before each action
    critic.start_at_mean(batch, run.gamma)
    seen.values = critic.compute_values(seen)
    batch.values = move_actions(seen.values, seen, batch)

    # returns: what the critic is to learn
    common.add_returns(batch, run.gamma, run.lam, run.bootstrap_truncated)
    seen.returns = move_actions(batch.returns, batch, seen)

    # advantages: how much better than expected each action was
    batch.advantages = advantages_of(batch, run)

    # whitening: their size is 1 over the global batch
    if run.whiten == "mean":
        batch.advantages = masked_whiten(batch.advantages, batch.response_mask)
    elif run.whiten == "noise":
        batch.advantages = whiten_by_noise(batch)


def advantages_of(batch, run):
    """(T,) advantages before they are whitened: those that came with the returns, or, by decoupled
    GAE, those of --lam-policy (2503.01491, section 4.2)."""
    if run.lam_policy is None:
        return batch.advantages
    lam = run.lam_policy
    decoupled = replace(batch)
    common.add_returns(decoupled, run.gamma, lam, run.bootstrap_truncated)
    return decoupled.advantages


def move_actions(x_T, source, target):
    """A column of `source` for `target`, which has the same actions after other prompts."""
    zeros_T = torch.zeros(len(target.input_ids))
    return zeros_T.masked_scatter(target.response_mask, x_T[source.response_mask])


def update_actor(loop, step, batch, n):
    """The actor's update -> its metrics, none during --critic-warmup, and those of the rollout.
    Adapts the KL coefficient to the mean KL of the step's n rows."""
    run = loop.run
    metrics = {}
    learns = step >= run.critic_warmup
    if learns:
        with loop.phases("actor", loop.actor):
            metrics = loop.actor.update_policy(batch)
        batch.old_log_probs = loop.actor.old_log_probs
        if batch.ref_log_probs is None:
            batch.ref_log_probs = batch.old_log_probs

    # whether engine and actor agree; the log-probs may come from the update
    metrics |= rollout_metrics(batch, run, loop.engine.dtype)
    if learns:
        loop.kl_coef = next_kl_coef(loop.kl_coef, metrics["kl/reference"], n, run.target_kl)
    return metrics


# ---- How a run begins, saves and ends ------------------------------------------------------------

LONGEST = "the longest prompt with its response"


class Models(NamedTuple):
    """What a run builds, see build."""

    actor: Any
    reference: Any  # None if nothing uses it
    critic: Any  # the worker of the critic's script
    reward: Any  # a function, see load_function, or a RewardModel
    engine: Any  # generates


@dataclass
class Loop:
    """A run in progress: what its steps use, and the state that they change."""

    run: Run  # with the defaults of its task
    task: "Task"
    actor: Any  # the fields of Models
    reference: Any
    critic: Any
    reward: Any
    engine: Any
    checkpoints: Any
    logger: Any
    phases: "Phases"
    groups: list  # each prompt as a group of its own, see common.rows_of_step
    step: int  # the step in progress, or the number of steps made
    saved: int  # the step whose start was saved last
    kl_coef: float
    batch: Batch | None = None  # this rank's newest rows

    def of_critic(self):
        """The workers that a phase of the critic needs; the last one leaves the device first."""
        return (self.critic, self.actor) if self.run.share_base else (self.critic,)

    def steps(self):
        """Yields the steps that are left to make."""
        run = self.run
        for step in self.logger.profiled(range(self.step, run.steps), run.profile_step):
            self.step = step
            yield step
        self.step = run.steps


@contextmanager
def training(run, task):
    """Yields a Loop with all models, new or from a checkpoint, to the block that trains them.

    After the block, it writes the report and both models. If a signal ends the block, it saves the
    state at the start of that step and exits."""
    device = common.setup_distributed(run.critic.timeout_minutes)
    checkpoints = common.Checkpoints(
        run.out_dir,
        run.resume,
        eval_every=run.eval_every,
        save_every=run.save_every,
        keep=run.keep,
        async_save=run.async_save,
        timeout_minutes=run.critic.timeout_minutes,
    )
    with checkpoints:
        # where to start, and with what
        run, step, kl_coef = start_from(run, task, checkpoints)
        models = build(run, task, device, checkpoints)
        loop = Loop(
            run=run,
            task=task,
            **models._asdict(),
            checkpoints=checkpoints,
            logger=common.Logger(run.out_dir, asdict(run), step, checkpoints.folder, run.logger),
            phases=Phases(run.offload),
            groups=[[prompt] for prompt in task.prompts],
            step=step,
            saved=step,
            kl_coef=kl_coef,
        )
        checkpoints.begin()

        # the block trains; poll ends it on all ranks
        try:
            yield loop
        except (SystemExit, Unscored) as stop:
            Stop.signal = 0  # else save would stop, too
            if loop.step > loop.saved:
                save(loop, loop.step)
            checkpoints.wait()
            if isinstance(stop, Unscored):
                words = f"; step {loop.step} is saved: --resume auto goes on" if loop.step else ""
                raise UserError(f"{stop}{words}") from None
            checkpoints.leave(loop.step, stop.code)

        common.listen_no_more()
        finish(loop)


def set_up(run):
    """-> (the run with the defaults of its task, Task). UserError: a mistake of the user."""
    check_layout(run)
    run = with_defaults(run)
    actor = run.actor
    tokenizer, model_config = common.load_config(actor)
    if tokenizer is None:
        wrong = f"{actor.model} has none, but prompts are text; give one"
        raise UserError(f"--actor.tokenizer: {wrong}")

    # read the prompts, and check that both models can take them
    images = images_of(run, actor, model_config)
    prompts, held_out = read_prompts(run, tokenizer, images)
    everything = prompts + held_out
    pictured = sum(bool(prompt.images) for prompt in everything)
    if not pictured:
        images = None
    longest = max(len(prompt.critic_ids or prompt.ids) for prompt in everything)
    longest += run.max_response_length
    known = max(tokenizer.get_vocab().values()) + 1
    check_models(run, tokenizer, model_config, longest, known)
    if images:
        check_images(run, tokenizer, images)

    # say what a step will be
    print0(
        f"prompts    {len(prompts):,}, {len(held_out):,} held out; {LONGEST} has {longest} tokens\n"
        f"rollout    at most {run.train_batch_size} prompts x {run.rollout_n} responses per step\n"
        f"update     mini-batch sizes: actor {actor.ppo_mini_batch_size},"
        f" critic {run.critic.ppo_mini_batch_size}"
    )
    if images:
        print0(f"images     {pictured:,} of {len(everything):,} prompts have some")
    missing = [prompt.answer for prompt in everything].count(None)
    if missing:
        print0(f"answers    {missing:,} of {len(everything):,} prompts have no {run.answer_key!r}")

    # the user's functions are tried last, because they may take long
    task = Task(
        tokenizer=tokenizer,
        model_config=model_config,
        prompts=prompts,
        held_out=held_out,
        reward=load_function(run.reward, "--reward", run.reward_timeout),
        observe=load_function(run.environment, "--environment", run.reward_timeout),
        stop_ids=stop_tokens(actor, tokenizer),
        stop_texts=stop_texts(run, tokenizer),
        longest=longest,
        known=known,
        media_ids=media_ids(model_config, known),
        images=images,
    )
    try_functions(run, task)
    return run, task


def with_defaults(run):
    """The run with what its flags leave open: defaults of its task and of the critic's model."""
    addition = not run.prompts
    lr = run.actor.lr or (5e-4 if addition else 1e-6)
    minutes = run.critic.timeout_minutes
    actor = replace(run.actor, lr=lr, seed=run.seed, timeout_minutes=minutes)

    # the critic starts as the actor does, unless it has a model of its own
    critic = replace(run.critic, lr=run.critic.lr or (1e-3 if addition else None))
    if critic.model == "actor":
        critic = replace(critic, model=actor.model, tokenizer=critic.tokenizer or actor.tokenizer)
        critic = replace(critic, trust_remote_code=actor.trust_remote_code)
        if critic.override_config == "{}":
            critic = replace(critic, override_config=actor.override_config)
    if run.share_base:
        critic = replace(critic, param_dtype=actor.param_dtype)
        if not critic.lora_rank:
            critic = replace(critic, freeze_modules=BACKBONE)

    reward = run.reward or (None if run.reward_model or run.prompts else "addition")
    limit = run.max_response_length or (8 if addition else 256)
    run = replace(run, actor=actor, critic=critic, reward=reward, max_response_length=limit)
    if addition:
        run = replace(run, prompt_key="prompt", answer_key="response")
    return run


def check_models(run, tokenizer, model_config, longest, known):
    """UserError unless actor and critic can be built and take such rows: their length and ids."""
    actor = run.actor
    critic = run.critic
    critic_tokenizer, critic_config = common.load_config(critic)

    # lengths and token ids
    ids = Batch.blank(2)
    ids.input_ids[0] = known - 1
    for config, model in ((actor, model_config), (critic, critic_config)):
        with blame(f"{config.prefix}model: does not fit these prompts"):
            common.check_length(longest, LONGEST, model)
            common.check_rows(ids, model)
    if critic_tokenizer and tokenizer.get_vocab().items() - critic_tokenizer.get_vocab().items():
        wrong = "has other token ids than the actor's; give both one tokenizer"
        raise UserError(f"--critic.tokenizer: {wrong}")

    # the models themselves, without weights, which takes no time
    critic_script = critic_module(run.backend)
    critic_script.check_model_flags(critic, critic_config)
    critic_script.check_budget(critic, longest, LONGEST)
    critic_fsdp.check_budget(actor, longest, LONGEST)
    skeleton = skeleton_of(run, None, model_config)
    common.check_skipped_weights(skeleton, f"--actor.model {actor.model}")


def check_images(run, tokenizer, images):
    """UserError unless the critic and the reward model read images as the actor does."""
    if run.share_base:
        raise UserError("--share-base: reads text only, but prompts have images")
    if run.rollout == "vllm" and not util.find_spec("torchvision"):
        raise UserError("--rollout vllm: reads images with torchvision, which is not installed")

    others = {"--critic.model": run.critic}
    if run.reward_model:
        others["--reward-model"] = reward_config(run)

    vocabulary = tokenizer.get_vocab()
    for flag, config in others.items():
        name = f"{flag} {config.model}"
        its_tokenizer, model_config = common.load_config(config)
        its = images_of(run, config, model_config)
        if its is None:
            raise UserError(f"{name}: reads text only, but prompts have images")
        if its.token != images.token or its.processor.to_dict() != images.processor.to_dict():
            wrong = "reads images in another way than the actor"
            raise UserError(f"{name}: {wrong}; both need one preprocessor_config.json")
        if config is not run.critic and its_tokenizer and its_tokenizer.get_vocab() != vocabulary:
            raise UserError(f"{name}: has other token ids than the actor; prompts have images")


def start_from(run, task, checkpoints):
    """-> (run, step, KL coefficient) to start from. A toy's actor begins as the supervised one."""
    folder = checkpoints.folder
    step = 0
    kl_coef = run.kl_coef
    if folder:
        common.verify(f"{folder}/loop.json")
        with open(f"{folder}/loop.json") as file:
            saved = json.load(file)
        step = saved["step"]
        if run.target_kl:
            # a run without a KL term saved 0, which would stay 0: start from --kl-coef
            kl_coef = saved["kl_coef"] or kl_coef
        if step > run.steps:
            raise UserError(f"--steps {run.steps}: {folder} has made {step} already; give more")

    # the toy's actor has been warmed up; a critic of the same model starts from it, too
    actor = run.actor
    critic = run.critic
    if run.supervised_steps and not run.prompts and actor.model in common.TINY:
        fresh = {"model": supervised_actor(run, task, folder), "override_config": "{}"}
        if (critic.model, critic.override_config) == (actor.model, actor.override_config):
            critic = replace(critic, **fresh)
        run = replace(run, actor=replace(actor, **fresh), critic=critic)
    return run, step, kl_coef


def supervised_actor(run, task, folder):
    """The folder of the supervised actor in out_dir: it is copied from that of the run whose
    checkpoint `folder` is, if there is one, else trained (a collective)."""
    start = realpath(f"{run.out_dir}/supervised")
    theirs = realpath(f"{folder}/../../supervised")
    if not folder or not exists(theirs):
        learn_to_add(run, task, start)
        return start

    # --resume auto must find it here later
    common.verify(theirs)
    if theirs != start:
        ignored = shutil.ignore_patterns(common.MANIFEST)
        with common.published(start) as tmp:
            if RANK == 0:
                shutil.copytree(theirs, tmp, dirs_exist_ok=True, ignore=ignored)
    return start


def learn_to_add(run, task, folder):
    """Supervised warm-up on a noisy adder (rank 0): PPO needs an actor that is sometimes right."""
    with common.published(folder) as tmp:
        if RANK == 0:
            lm, loss = supervised_adder(run, task)
            lm.save_pretrained(tmp)
            task.tokenizer.save_pretrained(tmp)
            print0(f"supervised {run.supervised_steps} steps x 256 rows, loss {loss:.3f}: {folder}")


def supervised_adder(run, task):
    """-> (model, its last loss) after --supervised-steps on sums of which many are wrong."""
    model_config = deepcopy(task.model_config)
    model_config.initializer_range = 0.1  # with the usual 0.02, so narrow a model hardly learns
    lm, _ = common.load_model(policy_class(model_config), run.actor, model_config, run.seed)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)

    # padded rows, whose loss counts on the answers alone
    sums = common.toy_rows(8192, run.seed, slips=(0.75, 0.6), answers=1, gives_up=False)
    rows = common.read_rows(sums, task.tokenizer)
    ids_BL = pad_sequence(rows.input_ids.split(rows.lengths), True)
    mask_BL = pad_sequence(rows.response_mask.split(rows.lengths), True)
    labels_BL = torch.where(mask_BL, ids_BL, -100)

    for _ in progress(range(run.supervised_steps), "supervised", "steps"):
        picked = torch.randperm(len(rows))[:256]
        loss = lm(ids_BL[picked], labels=labels_BL[picked]).loss
        loss.backward()
        nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return lm, loss


def build(run, task, device, checkpoints):
    """Builds the Models, the engine without weights, and loads the checkpoint of a resumed run.
    With --offload each is on the host while the next is built."""
    folder = checkpoints.folder
    halvings = checkpoints.halvings

    def away(worker):
        if run.offload:
            worker.offload()
        return worker

    # the actor, and the reference, which is the actor before training, or without its adapters
    actor = PolicyWorker(run, task, device)
    actor.set_budget(task.longest, LONGEST, halvings)
    if folder:
        actor.load_checkpoint(f"{folder}/actor")
    away(actor)
    reference = actor if run.uses_reference else None
    if reference and not run.actor.lora_rank:
        reference = away(PolicyWorker(run, task, device, trains=False))
        reference.critic.max_tokens = actor.critic.max_tokens
        reference.critic.max_tokens_forward = actor.critic.max_tokens_forward

    # the reward
    reward = task.reward
    if run.reward_model:
        reward = RewardModel(run, task.tokenizer, halvings)
        away(reward.worker).critic.between = poll

    # the rollout engine
    rows = max(run.rollout_batch_size >> halvings, 1)
    if halvings:
        print0(f"memory     ran out before, so --rollout-batch-size is lowered to {rows}")
    engine_kind = HFRollout if run.rollout == "hf" else VLLMRollout
    engine = away(engine_kind(replace(run, rollout_batch_size=rows), task, device))

    # the critic is built last, because it seeds or restores torch's RNG
    critic = critic_module(run.backend).CriticWorker(run.critic)
    if run.share_base:
        actor.onload()
        critic.layout = critic.layout._replace(backbone=actor.model.lm.base_model)
    n = len(task.prompts)
    size = ceil(n / ceil(n / run.train_batch_size))  # prompts per step: rows_of_step cuts evenly
    minis = ceil(size * run.rollout_n / run.critic.ppo_mini_batch_size)
    critic.init_model(run.steps * run.critic.ppo_epochs * minis)
    if folder:
        critic.load_checkpoint(f"{folder}/critic")
    critic.set_budget(task.longest, LONGEST, halvings)
    critic.critic.between = poll
    if run.share_base:
        actor.guest = critic
        away(actor)  # first, because it owns what they share
    away(critic)
    return Models(actor, reference, critic, reward, engine)


def poll(group=None):
    """Raises SystemExit on all ranks of the group (None: all ranks) if one of them is to stop (a
    collective). Generation and scoring look at Stop, too, and end early. The state at the start of
    the step is then saved, so never call this within an update."""
    number = max(of_all_ranks(Stop.signal, group))
    if number:
        common.told(number)
        raise SystemExit(number)


def save_if_due(loop, step):
    """Saves the state at the start of a step if --save-every says so, and after the last step. A
    signal ends the run here."""
    poll()
    every = loop.checkpoints.every  # steps; 0: only at the end
    last = step == loop.run.steps
    due = last or (every > 0 and step % every == 0)
    if due and step > loop.saved:
        save(loop, step)
        loop.saved = step
    loop.checkpoints.wait(last)


def save(loop, step):
    """Saves the whole state at the start of a step; prompts and samples follow from it and are not
    saved. UserError: the last update has ruined the weights."""
    actor = loop.actor
    critic = loop.critic

    # one row shows whether all is finite; these calls raise if it is not
    with loop.phases("log_probs", actor):
        actor.compute_log_probs(loop.batch.select(range(len(loop.batch))[:1]))
    with loop.phases("critic", *loop.of_critic()):
        critic.check_values(loop.batch)

    with loop.phases("checkpoint"):
        loop.logger.flush()
        state = {"step": step, "kl_coef": loop.kl_coef}
        workers = {"actor": (actor,), "critic": loop.of_critic()}

        # in the background, from a copy of both
        writers = {}
        if loop.run.async_save:
            for name, (worker, *others) in workers.items():
                with loop.phases.on_device(worker, *others):
                    writers[name] = worker.checkpoint_writer(copy=True)

        def write(tmp, group):
            for name, (worker, *others) in workers.items():
                os.makedirs(f"{tmp}/{name}", exist_ok=True)
                if writers:
                    writers[name](f"{tmp}/{name}", group)
                    continue
                with loop.phases.on_device(worker, *others):
                    worker.checkpoint_writer()(f"{tmp}/{name}", group)
            common.write_json(f"{tmp}/loop.json", state)

        loop.checkpoints.save(step, write)


def finish(loop):
    """Writes the report and both models."""
    run = loop.run
    tokenizer = loop.task.tokenizer

    # the report shows the rows of the last step; None: no step was left to do
    if loop.batch is not None:
        # select copies, because pickle would send a view's whole storage
        parts = on_rank_0(loop.batch.select(range(len(loop.batch))))
        if RANK == 0:
            rows = common.concat(parts)
            rows = rows.select(rows.row_id.argsort().tolist())
            rows.rollout_log_probs = rows.old_log_probs  # the policy's, whatever --top-p
            changed = what_changed(run.out_dir)
            about = "rows of the last step"
            if run.kl_coef:
                about += ", their rewards minus the KL penalty"
            common.write_report(run.out_dir, rows, about, tokenizer, run.gamma, CURVES, changed)

    with loop.phases("export", loop.critic, loop.actor):
        loop.actor.export_hf(f"{run.out_dir}/hf", tokenizer)
        loop.critic.export_hf(f"{run.out_dir}/critic_hf")
    print0(
        f"saved      {run.out_dir}: checkpoints/step_{run.steps}, hf, critic_hf, report.html,"
        " metrics.jsonl, tensorboard"
    )


# ---- What a run tells: evaluations, metrics, the line of a step, dumps, the report ---------------

CURVES = {  # panels of PPO's report -> {words: metric}
    "mean reward": {"training": "reward/mean", "held out": "eval/reward"},
    "entropy of the policy": {"training": "actor/entropy"},
    "KL to the reference": {"training": "kl/reference"},
    "explained variance": {"training": "critic/explained_var"},
}
SAMPLES_SHOWN = 4  # of each kind, in the report


def evaluate_if_due(loop, step, greedy):
    """Evaluates the greedy replies of this rank; None: no evaluation is due."""
    if greedy is not None:
        evaluate(greedy, loop.run, loop.reward, loop.phases, step, loop.logger)


def evaluate(replies, run, reward, phases, step, logger):
    """Logs the rewards of replies to held-out prompts, writes them to samples.json, those of a
    run's first evaluation also to samples_first.json, and prints two."""
    # rank 0 gets the rows, with their texts
    rewards, mean, faults = score(run, reward, phases, replies)
    mine = []
    for reply in replies:
        row = {"prompt": reply.prompt.text, "response": reply.text}
        mine.append((reply.row_id, row | {"reward": reply.score, "fault": reply.fault}))
    parts = on_rank_0(mine)
    if RANK:
        return

    # a resumed run goes on with its log, so its first evaluation is there already
    rows = [row for _, row in sorted(chain(*parts))]  # in the order of the file
    past = common.read_lines(f"{run.out_dir}/metrics.jsonl")
    if not any("eval/reward" in line for line in past):
        common.replace_lines(f"{run.out_dir}/samples_first.json", [rows])

    # a mean of zeros and ones is an accuracy
    name = "accuracy" if set(rewards) <= {0.0, 1.0} else "reward"
    logger.log(step, {"eval/reward": mean, f"eval/{name}": mean, "eval/errors": faults})
    common.replace_lines(f"{run.out_dir}/samples.json", [rows])
    print0(f"held out   {name} {mean:z.3f}")
    for row in rows[:2]:
        shown = f"{row['prompt'][-60:]!r} -> {row['response'][-60:]!r}  reward {row['reward']:zg}"
        print0(f"  {shown}  {row['fault'][:100]}".rstrip())


def rollout_metrics(batch, run, dtype):
    """Metrics of all ranks' rows. UserError: engine and actor have equal weights, but disagree on
    log-probs."""
    mask_T = batch.response_mask

    # top_p raises the engine's log-probs of the kept tokens by up to -log top_p, which is no error
    off_A = (batch.rollout_log_probs - batch.old_log_probs)[mask_T]
    off_A = (off_A - off_A.clamp(0, -log(run.top_p))).abs()
    kl_A = kl_penalty(batch.old_log_probs, batch.ref_log_probs, run.kl_penalty)[mask_T]

    # sums over all ranks, of answers with a reward
    acts_B = batch.actions > 0
    numbers_B = batch.row_id if batch.episode is None else batch.episode
    answers, rows, tokens, actions, truncated = common.add_up(
        len(numbers_B[acts_B].unique()),
        int(acts_B.sum()),
        len(mask_T),
        len(off_A),
        int(batch.truncated[acts_B].sum()),
    )
    off, kl = common.add_up(float(off_A.double().sum()), float(kl_A.double().sum()))
    most = max(of_all_ranks(max(off_A.tolist(), default=0.0)))

    mean_off = off / actions
    if run.old_log_probs == "engine":  # nothing was compared
        mean_off = most = nan
    elif not mean_off < (1e-3 if dtype == torch.float32 else 0.5):
        raise UserError(
            f"--actor.model {run.actor.model}:"
            f" the rollout is off the actor by {mean_off:.1e} nats a token:"
            " either Policy computes other logits than the model, or packed rows see each other"
        )
    several = {} if batch.episode is None else {"rollout/segments": rows / answers}
    return several | {
        "rollout/actions": actions / answers,
        "rollout/tokens": tokens,
        "rollout/truncated": truncated / answers,
        "rollout/log_prob_diff": mean_off,
        "rollout/log_prob_diff_max": most,
        "kl/reference": kl / actions if run.uses_reference else nan,
    }


def part_means(replies):
    """Metrics: means of the parts of rewards over all rows that have them (a collective)."""
    numbers = {}
    for parts in chain(*of_all_ranks([reply.parts for reply in replies if reply.parts])):
        for name, x in parts.items():
            numbers.setdefault(f"reward/{name}", []).append(x)
    return {name: sum(some) / len(some) for name, some in numbers.items()}


def mean_turns(replies, task):
    """Metrics: the policy's turns per answer, over all ranks, if there is an environment (a
    collective)."""
    if not task.observe:
        return {}
    whole = [reply.turns for reply in replies if not reply.fault]  # policy, environment, policy ...
    mine = [ceil(len(turns) / 2) for turns in whole]
    turns = list(chain(*of_all_ranks(mine)))
    return {"rollout/turns": sum(turns) / len(turns)}


def report_step(loop, step, batch, replies, metrics):
    """Logs and prints how a step went, and dumps its rows. UserError: it has ruined the critic."""
    run = loop.run
    loop.logger.check_progress(metrics, "--critic.lr")
    if run.dump_rollouts:
        write_jsonl(batch, f"{run.out_dir}/rollouts/step_{step + 1}.jsonl", replies)
    metrics |= loop.phases.take(metrics["rollout/tokens"])
    loop.logger.log(step + 1, metrics)
    print_step(step + 1, run.steps, metrics)


def print_step(step, steps, m):
    """Prints one aligned line on how a step went, in units a person reads."""
    n = common.number
    m = collections.defaultdict(lambda: nan, m)  # no actor metrics during --critic-warmup
    left = common.time_left(m["perf/time_step"], steps - step)
    failed = f"  failed {m['reward/errors']:.0f}" if m["reward/errors"] else ""
    print0(
        f"step {step:>{len(str(steps))}}/{steps}  reward {m['reward/mean']:z.3f}{failed}"
        f"  length {m['rollout/actions']:.1f}  kl {n(m['kl/reference'], '.3f')}"
        f"  entropy {n(m['actor/entropy'], '.3f')}  clipped {n(m['actor/pg_clipfrac'], '.3f')}"
        f"  |g| {n(m['actor/grad_norm'], '.2g'):>5}  skipped {n(m['actor/skipped_steps'], '.0f')}"
        f"  value loss {n(m['critic/vf_loss'], '.4f')}"
        f"  explained var {common.explained_number(m['critic/explained_var'], '.2f'):>5}"
        f"  {m['perf/rollout_tokens_per_second']:>6,.0f} tok/s  eta {left}"
    )


def on_rank_0(mine):
    """There a list with each rank's object, elsewhere None (a collective)."""
    if WORLD_SIZE == 1:
        return [mine]
    parts = [None] * WORLD_SIZE if RANK == 0 else None
    dist.gather_object(mine, parts)
    return parts


def write_jsonl(batch, path, replies=()):
    """Writes the rows of all ranks as JSONL for common.read_rows (a collective). replies: their
    texts and scores are for people and for --reward-key; of an episode, its last row has them."""
    # columns that are written, and what the replies add to them
    used = ("token_level_rewards", "values", "rollout_log_probs")
    unused = set(Batch.FLOATS).difference(used)
    few = replace(batch, **dict.fromkeys(unused))

    # an earlier row of an episode tells as little as a reply without text
    texts = [] if replies else [{}] * len(few)
    for reply in replies:
        for prompt, _, end in reply.segments():
            told = Reply(prompt, 0, parts=dict.fromkeys(reply.parts, 0.0))
            if end == len(reply.ids):
                told = reply
            text = {"prompt_text": prompt.text, "response_text": told.text}
            text |= {"score": told.score, "parts": told.parts, "fault": reply.fault}
            texts.append(text | {"answer": reply.prompt.answer, "prompt_ids": prompt.ids})

    # select copies, because pickle would send a view's whole storage
    parts = on_rank_0((few.select(range(len(few))), texts))
    if RANK:
        return
    rows = [pair for few, texts in parts for pair in zip(few.split(1), texts, strict=True)]
    rows.sort(key=lambda pair: int(pair[0].row_id))

    def lines():
        """One at a time, because numbers take more memory in Python's lists."""
        for row, text in rows:
            # without a reply, the response begins with the first action; or with the last token
            first = int(row.response_mask.int().argmax()) or len(row.response_mask) - 1
            first = len(text.get("prompt_ids", ())) or first
            columns = {
                "response_ids": row.input_ids,
                "response_mask": row.response_mask,
                "rewards": row.token_level_rewards,
                "values": row.values,
                "log_probs": row.rollout_log_probs,
            }
            line = {"prompt_ids": row.input_ids[:first].tolist(), "truncated": bool(row.truncated)}
            (images,) = row.multi_modal_inputs or [{}]
            if "images" in images:  # files or data URLs
                line |= images
            if row.episode is not None:
                line |= {"episode": int(row.episode), "segment": int(row.row_id - row.episode)}
            yield line | {name: x_T[first:].tolist() for name, x_T in columns.items()} | text

    common.replace_lines(path, lines())


def what_changed(out_dir):
    """What training made of the policy, for write_report, from what the run left in out_dir."""
    # the first and the last evaluation, or, if there are fewer than two, training step
    past = common.read_lines(f"{out_dir}/metrics.jsonl")
    key = "eval/reward"
    words = "of the answers to held-out prompts"
    rated = [row for row in past if key in row]
    if len(rated) < 2:
        key = "reward/mean"
        words = "of the sampled responses"
        rated = [row for row in past if key in row]
    if not rated:
        return None
    first = rated[0]
    last = rated[-1]
    name = "accuracy" if "eval/accuracy" in first and "eval/accuracy" in last else "mean reward"
    words += f", at step {first['step']} and at step {last['step']}"
    numbers = {name: (f"{first[key]:.3f} → {last[key]:.3f}", words)}

    # the answers of both evaluations, by what they earn
    pairs = answers_before_and_after(out_dir) if key == "eval/reward" else []
    kinds = {
        "earn more than before": [(x, y) for x, y in pairs if y["reward"] > x["reward"]],
        "earn less": [(x, y) for x, y in pairs if y["reward"] < x["reward"]],
        "earn the same": [(x, y) for x, y in pairs if y["reward"] == x["reward"]],
    }
    for kind, some in kinds.items():
        if pairs:
            numbers[kind] = (f"{len(some):,}", f"of {len(pairs):,} held-out answers")
    samples = {kind: some[:SAMPLES_SHOWN] for kind, some in kinds.items() if some}
    return {"numbers": numbers, "samples": samples}


def answers_before_and_after(out_dir):
    """Pairs of a held-out prompt's rows in samples_first.json and samples.json, if they are there
    and have a reward."""
    try:
        with open(f"{out_dir}/samples_first.json") as file:
            before = json.load(file)
        with open(f"{out_dir}/samples.json") as file:
            after = json.load(file)
    except (OSError, ValueError):
        return []
    pairs = [(x, y) for x, y in zip(before, after) if x["prompt"] == y["prompt"]]
    return [(x, y) for x, y in pairs if not (x["fault"] or y["fault"])]


# ---- Tasks: prompts, rewards, environment --------------------------------------------------------


class Prompt(NamedTuple):
    ids: list  # prompt tokens
    text: str = ""  # for the user's functions: the row's text, or the last message of a chat
    answer: Any = None  # the row's reference answer, if any
    messages: list | None = None  # of a chat; None: the prompt is plain text
    critic_ids: list | None = None  # prompt tokens as the critic reads them, with --privileged-key
    images: list | None = None  # absolute file names, or data URLs
    row: dict | None = None  # the whole JSON row


@dataclass
class Reply:
    """An answer: a prompt, then the policy's turns, with the environment's observations in between.
    Where the environment or the chat template gives a turn a new context, what follows is a new
    segment: a row of its own."""

    prompt: Prompt
    row_id: int  # unique over all ranks
    ids: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)  # the engine's; None on the environment's tokens
    finished: bool = False  # ended by the policy or the environment, not by the length limit
    text: str = ""
    turns: list = field(default_factory=list)  # texts: policy, environment, policy ...
    ends: list = field(default_factory=list)  # index in ids of the last action of each turn
    # index in ids of an action -> its reward
    earned: collections.Counter = field(default_factory=collections.Counter)
    score: float = 0.0  # the sum of these rewards
    parts: dict = field(default_factory=dict)  # other numbers of a reward that returns a dict
    fault: str = ""  # what went wrong in the environment or the reward
    shown: list = field(default_factory=list)  # ids of its text: without the ends of turns
    contexts: list = field(default_factory=list)  # of later segments: (index in ids, Prompt)
    chat: list | None = None  # the messages so far; None: those of the newest Prompt

    def segments(self):
        """[(Prompt, start, end)]: for each row, what the policy has read, and the part of ids that
        follows it."""
        starts = [0, *(start for start, _ in self.contexts), len(self.ids)]
        prompts = [self.prompt, *(prompt for _, prompt in self.contexts)]
        return list(zip(prompts, starts, starts[1:]))


class Task(NamedTuple):
    """What the policy learns."""

    tokenizer: Any  # of the actor
    model_config: Any
    prompts: list
    held_out: list  # prompts to evaluate on, may be empty
    reward: Any  # f(prompt, response, answer), or None with a reward model
    observe: Any  # the environment, or None
    stop_ids: list  # tokens that end a turn
    stop_texts: list  # transformers' criteria for texts that end a turn
    longest: int  # most tokens of a prompt and its response together
    known: int  # the tokenizer's ids are below this; a model may pad its vocabulary with more
    media_ids: list  # ids of images, video and audio, which are never sampled
    images: "Images | None"  # what reads the images of prompts; None: there are none


def rows_of_rank(prompts, n=1):
    """This rank's share of n empty replies to each prompt, whose row_ids are consecutive."""
    return [Reply(prompts[i // n], i) for i in range(RANK, len(prompts) * n, WORLD_SIZE)]


def to_batch(replies, hints=False):
    """A Batch of prompts and replies, with the engine's log-probs; a row for each segment (a
    collective). A reply without a reward has no action, so nothing is learned from it. hints: with
    prompts as the critic reads them, see --privileged-key."""
    # the rows of an episode follow one another; if all have one row, it has the reply's number
    most = max(of_all_ranks(max((len(reply.segments()) for reply in replies), default=1)))
    rows = []
    row_ids = []
    log_probs = []
    truncated = []
    turns = []
    images = []
    for reply in replies:
        ends = {-1, *reply.ends}
        for number, (prompt, start, end) in enumerate(reply.segments()):
            ids = prompt.critic_ids if hints else prompt.ids
            rows.append(ids + reply.ids[start:end])
            row_ids.append(reply.row_id * most + number)
            acted = [None] * (end - start) if reply.fault else reply.log_probs[start:end]
            log_probs += [None] * len(ids) + acted
            truncated.append(not reply.finished and end == len(reply.ids))
            # a turn begins behind the end of another, or behind what the environment said
            behind = [i - 1 in ends or reply.log_probs[i - 1] is None for i in range(start, end)]
            turns += [False] * len(ids) + behind
            images.append({"images": prompt.images} if prompt.images else {})

    # LongTensor and BoolTensor, because a rank may have no rows
    row_id = torch.LongTensor(row_ids)
    return Batch(
        input_ids=torch.LongTensor(list(chain(*rows))),
        cu_seqlens=common.cumulative(list(map(len, rows))),
        response_mask=torch.BoolTensor([x is not None for x in log_probs]),
        row_id=row_id,
        truncated=torch.BoolTensor(truncated),
        episode=row_id // most * most if most > 1 else None,
        turns=torch.BoolTensor(turns),
        rollout_log_probs=torch.tensor([x or 0.0 for x in log_probs]),
        multi_modal_inputs=images if any(images) else None,
    )


def read_prompts(run, tokenizer, images):
    """-> (Prompts to train on, Prompts to evaluate on), of the flags' files or of the toy task."""
    train = run.prompts
    held_out = run.eval_prompts
    if not run.prompts:
        train = addition_rows(8192, run.seed)
        held_out = addition_rows(512, run.seed, held_out=True)
    prompts = load_prompts(train, "--prompts", run, tokenizer, images)
    if common.writes_date(tokenizer) and any(prompt.messages for prompt in prompts):
        print0(f"note       {common.DATED}")
    first = prompts[0].ids
    print0(f"first row  {common.row_as_read(first, [False] * len(first), tokenizer)}")
    if not held_out:
        return prompts, []
    return prompts, load_prompts(held_out, "--eval-prompts", run, tokenizer, images)


def addition_rows(n, seed, held_out=False):
    """Distinct JSON lines of the toy task; with slips of 0 every response is right."""
    return dict.fromkeys(common.toy_rows(n, seed, held_out, slips=(0.0, 0.0), answers=1))


def load_prompts(source, flag, run, tokenizer, images=None):
    """Reads prompts from files or JSON lines, but no long ones. UserError: a bad row."""
    asked = f"--prompt-key {run.prompt_key}"
    if run.chat:
        asked += " --chat"

    prompts = []
    too_long = 0
    for place, folder, row in common.raw_rows(source, flag, run.rows):
        with blame(f"{place}: unusable, with {asked}"):
            prompt = read_prompt(row, run, tokenizer, images, folder)
        if len(prompt.ids) <= run.max_prompt_length:
            prompts.append(prompt)
        else:
            too_long += 1

    # say what is left
    if too_long:
        print0(f"{flag}: left out {too_long} prompts longer than --max-prompt-length")
    if not prompts:
        raise UserError(f"{flag}: no usable prompt")
    if run.privileged_key:
        start = tokenizer.decode(prompts[0].critic_ids)[:200]
        print0(f"hint       {start!r} is what the critic reads first")
    return prompts


def read_prompt(row, run, tokenizer, images=None, folder=""):
    """JSON object -> Prompt. ValueError, or an error of the tokenizer: it is unusable. folder: of
    files with images."""
    prompt = to_prompt(common.look_up(row, run.prompt_key), row, run, tokenizer, images, folder)

    # a built-in reward must accept the answer as a response
    answer = prompt.answer
    if run.reward in REWARDS and not REWARDS[run.reward]([str(answer)], answer):
        wrong = f"cannot check the answer {answer!r:.40}, see --answer-key"
        raise ValueError(f"--reward {run.reward} {wrong}")
    return prompt


def to_prompt(text, row, run, tokenizer, images=None, folder=""):
    """The Prompt of a text, or of a list of messages. row: what else there is to know. ValueError:
    it is unusable."""
    # a chat; its last message is what rewards and environments see
    messages = None
    if isinstance(text, list) or (run.chat and isinstance(text, str)):
        messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
        messages = common.text_messages(messages, images is not None)
        text = common.content_of(messages[-1])
    if not isinstance(text, str) or not (text or messages):
        there = f"the row has the keys {', '.join(row):.200}"
        raise ValueError(f"the prompt, or its last message, must be text and not empty; {there}")

    # token ids, and those that the critic reads
    shown = in_template(messages, row, run, tokenizer) if messages else text
    ids = common.encode_prompt(tokenizer, shown, is_chat=bool(messages))
    if not ids:
        raise ValueError("the prompt has no tokens")
    critic_ids = None
    if run.privileged_key:
        hint = common.hint_of(row, run.privileged_key)
        critic_ids = common.encode_prompt(tokenizer, shown, hint, is_chat=bool(messages))
        critic_ids, _ = with_placeholders(critic_ids, row, run, images, folder)
    ids, pictures = with_placeholders(ids, row, run, images, folder)
    answer = common.look_up(row, run.answer_key)
    return Prompt(ids, text, answer, messages, critic_ids, pictures, row)


def in_template(messages, row, run, tokenizer):
    """The chat template's text of messages, with the generation prompt."""
    options = common.json_object("--chat-template-kwargs", run.chat_template_kwargs)
    return common.chat_text(tokenizer, messages, tools=common.tools_of(row), **options)


def addition_reward(turns, answer):
    """1 if what the policy wrote is exactly the right sum, else 0. turns: see Reply."""
    return float("".join(turns[::2]) == answer)


def gsm8k_reward(turns, answer):
    """1 if the number after the policy's last #### is the answer's, else 0: GSM8K's rule
    (2110.14168)."""

    def last_number(text):
        found = re.findall(r"####\s*(?:\$\s*)?(-?\$?[\d,]*\.?\d+)", text)
        if not found:
            return nan  # is not even equal to itself
        return float(re.sub("[$,]", "", found[-1]))

    return float(last_number("\n".join(turns[::2])) == last_number(answer))


REWARDS = {"addition": addition_reward, "gsm8k": gsm8k_reward}


def is_number(x):
    """Whether x is a finite number, and not a huge one."""
    return isinstance(x, float) and abs(x) <= 1e15


def fault_of_reward(made, reply):
    """What is wrong with what a reward has returned for the row, or ""."""
    score = made.get("score") if isinstance(made, dict) else made
    numbers = score if isinstance(score, list) else [score]
    if not all(map(is_number, numbers)):
        what = "the 'score' in a dict of a reward" if isinstance(made, dict) else "a reward"
        return f"{what} must be a finite number, or a list of them, not {made!r:.40}"

    # the length of a list says what its numbers are for
    turns = len(reply.ends)
    tokens = len(reply.ids)
    if isinstance(score, list) and (len(score) not in (turns, tokens) or turns == tokens > 1):
        there = f"{len(score)} numbers for {turns} turns and {tokens} tokens"
        return f"the length of a reward's list must be that of the turns or of the tokens: {there}"
    return ""


def fault_of_observation(made, reply):
    """What is wrong with what an environment has returned, or ""."""
    pair = isinstance(made, list) and len(made) == 2 and is_number(made[1])
    text = made[0] if pair else made
    if isinstance(text, dict):
        # a message, or a new context, which have no other keys that would be lost
        context = text.keys() - {"tools"}
        if "role" in text:
            text = nan if "reward" in text else text["role"]
        else:
            text = text[context.pop()] if context in ({"messages"}, {"prompt"}) else nan
    if text is None or isinstance(text, str):
        return ""
    kinds = "text, a message, a new context or None, or (one of these, a reward)"
    return f"an environment must return {kinds}, not {made!r:.40}"


def give_credit(reply, score):
    """Adds what a reward has returned to what the row's actions earn: a number at the last one, one
    number per turn at the turns' last ones, or one per token."""
    if not isinstance(score, list):
        places = [len(reply.ids) - 1]
        score = [score]
    elif len(score) == len(reply.ends):
        places = reply.ends
    else:
        # the number of a token that the environment wrote goes to the action before it, as in gae
        places = []
        for i, log_prob in enumerate(reply.log_probs):
            places.append(i if log_prob is not None else places[-1])

    for place, x in zip(places, score, strict=True):
        reply.earned[place] += x


def rewards_of(replies):
    """(T,) the reward of each token of the rows, see to_batch. Only actions have one."""
    rewards = []
    for reply in replies:
        for prompt, start, end in reply.segments():
            rewards += [0.0] * len(prompt.ids)
            rewards += [reply.earned[i] for i in range(start, end)]
    return torch.tensor(rewards, dtype=torch.float32)


def try_functions(run, task):
    """Calls the user's functions with the first prompts before models load, as if the policy had
    answered right. They may fail on some rows by intent, so only a failure on all of these is a
    UserError."""
    # right answers to the first few prompts with different texts
    first = {}
    for prompt in task.prompts:
        first.setdefault(prompt.text, prompt)
    replies = []
    for prompt in list(first.values())[:4]:
        text = prompt.answer if isinstance(prompt.answer, str) else ""
        ids = task.tokenizer(text, add_special_tokens=False)["input_ids"]
        reply = Reply(prompt, 0, ids, finished=True, text=text, turns=[text])
        reply.ends.append(len(ids) - 1)
        replies.append(reply)

    # what the reward and the environment say to them
    for flag, name, function, fault_of in (
        ("--reward", run.reward, task.reward, fault_of_reward),
        ("--environment", run.environment, task.observe, fault_of_observation),
    ):
        if not name or name in REWARDS:
            continue
        answers = zip(replies, ask_all(function, replies))
        faults = [fault or fault_of(made, reply) for reply, (made, fault) in answers]
        faults = [fault.encode(errors="replace").decode() for fault in faults if fault]
        failed = (
            f"{flag} {name}: failed for {len(faults)} of the first {len(replies)} prompts,"
            " with their answers as responses"
        )
        if len(faults) == len(replies):
            raise UserError(f"{failed}: {faults[0]}")
        if faults:
            print0(f"{failed}, which is fine if some rows may: {faults[0]}")


def reward_config(run):
    """The Config of a reward model: the flags of the critic, but those about its own model."""
    own = "tokenizer override_config value_head value_range lora_rank lora_alpha"
    defaults = {x.name: x.default for x in fields(run.critic) if x.name in own.split()}
    config = replace(run.critic, **defaults, model=run.reward_model, value_head_init="checkpoint")
    # it never trains, and FSDP can hold it in the dtype of products
    return replace(config, freeze_modules=BACKBONE if run.backend == "fsdp" else None)


class RewardModel:
    """Scores whole rows by a classifier's label at their last token, in a worker of the critic."""

    def __init__(self, run, tokenizer, halvings=0):
        config = reward_config(run)
        with self.named(config):
            self.worker = critic_module(run.backend).CriticWorker(config)
            self.worker.init_model(1)
        self.worker.halvings = halvings
        self.tokenizer = self.worker.tokenizer or tokenizer
        self.same_tokens = self.tokenizer.get_vocab() == tokenizer.get_vocab()

    @contextmanager
    def named(self, config):
        """Lets a UserError in its block name --reward-model: the other flags are the critic's."""
        try:
            yield
        except UserError as error:
            fault = str(error).removeprefix(f"{config.prefix}model {config.model}: ")
            raise UserError(f"--reward-model {config.model}: {fault}") from None

    def ids(self, reply):
        """The reply's last row. In other token ids than the actor's, its first prompt and its text;
        without a chat template, only the last message of the prompt."""
        if self.same_tokens:
            prompt, start, _ = reply.segments()[-1]
            return prompt.ids + reply.ids[start:]
        prompt = reply.prompt
        if prompt.messages and self.tokenizer.chat_template:
            messages = [*prompt.messages, {"role": "assistant", "content": reply.text}]
            text = common.chat_text(self.tokenizer, messages, complete=True)
            return common.encode_prompt(self.tokenizer, text, is_chat=True)
        return self.tokenizer(prompt.text + reply.text)["input_ids"]

    def ask_all(self, replies):
        """Rewards of the caller's rows, in the format of ask_all (a collective)."""
        with self.named(self.worker.config):
            # a critic reads an action's value at the token before: one action behind the row's last
            # token, whose id does not matter, has the value at that token
            one_action_later = []
            for reply in replies:
                prompt = Prompt(self.ids(reply), images=reply.prompt.images)
                one_action_later.append(Reply(prompt, reply.row_id, [0], [0.0]))
            batch = to_batch(one_action_later)
            values_T = self.worker.compute_values(batch)
        return [(x, "") for x in values_T[common.last_action(batch)].tolist()]


# ---- Images in prompts ---------------------------------------------------------------------------
#
# The critic's script on FSDP reads images, gives them placeholders and lays them out, see its
# chapter on images; that on Megatron reads text only. Only prompts have images: observations of an
# environment are text, and ids of images are never sampled.


class Images(NamedTuple):
    """What reads the images of a model."""

    processor: Any  # makes pixels of them
    token: int  # id of the placeholder, one for each token of an image


def images_of(run, config, model_config):
    """The Images of a model that reads some, else None."""
    if run.backend == "megatron":
        return None
    processor = critic_fsdp.load_image_processor(config, model_config)
    if processor is None:
        return None
    return Images(processor, model_config.image_token_id)


def with_placeholders(ids, row, run, images, folder):
    """A prompt's ids with a placeholder for each token of its images -> (ids, absolute file names
    or data URLs, None without images). row: the JSON object. UserError: placeholders and images do
    not fit, or an image cannot be read."""
    if images is None:
        if row.get("images"):
            reader = "--critic megatron" if run.backend == "megatron" else "this model"
            raise UserError(f"it has images, but {reader} reads text only")
        return ids, None

    # a row of the critic, without its response
    line = {"prompt": "?", "response": "", "reward": 0.0, "images": row.get("images")}
    try:
        rollout = common.Rollout.model_validate(line)
    except ValidationError as error:
        raise UserError(common.fault_of_row(error, row)) from None
    rollout.prompt_ids = ids
    rollout.response_ids = []
    critic_fsdp.place_images(*images, rollout, folder)
    return rollout.prompt_ids, rollout.images or None


def pixels_of(images, run, reader):
    """The images of some rows -> arguments of a model: pixel_values and image_grid_thw of all of
    them, end to end; none without images. reader: the Images of the model."""
    names = list(chain(*filter(None, images)))
    if not names:
        return {}
    return critic_fsdp.read_images({"images": names}, reader.processor)


# ---- Policy maths --------------------------------------------------------------------------------


def policy_loss(
    log_probs_T, old_T, advantages_T, mask_T, weights_T, clip_low, clip_high, clip_dual
):
    """PPO's clipped objective -> (loss, how many actions are clipped, how many are dual-clipped),
    all 0-dim.

        r_t = pi(a_t) / pi_old(a_t)
        L_t = max( -r_t A_t, -clip(r_t, 1 - low, 1 + high) A_t )
        L_t <= -c A_t where A_t < 0, with clip_dual c > 1 (None: no bound)
        loss = sum_t w_t L_t

    1707.06347, eq. 7; separate low and high: 2503.14476, eq. 10; c: 1912.09729, eq. 5. log r is
    clamped to +-20. Masked entries never enter, not even a NaN."""
    log_ratio_T = torch.where(mask_T, log_probs_T - old_T, 0.0)
    ratio_T = log_ratio_T.clamp(-20, 20).exp()
    a_T = torch.where(mask_T, advantages_T, 0.0)

    # clipping never lowers a loss, so the ratio gains nothing by moving further
    free_T = -ratio_T * a_T
    clipped_T = -ratio_T.clamp(1 - clip_low, 1 + clip_high) * a_T
    loss_T = torch.maximum(free_T, clipped_T)

    # the dual clip bounds the loss of an action that has become far likelier, but is bad
    bound_T = torch.where(a_T < 0, -(clip_dual or inf) * a_T, inf)
    loss = (weights_T * torch.minimum(loss_T, bound_T)).sum()
    return loss, (clipped_T > free_T).sum(), (loss_T > bound_T).sum()


def kl_penalty(log_probs_T, ref_log_probs_T, kind):
    """Estimates KL(policy || reference) from log p and log q of the chosen tokens
    (joschu.net/blog/kl-approx).

        k1 = log p - log q, abs = |k1|, k2 = k1^2 / 2
        k3 = q/p - 1 - log(q/p), clamped to 10"""
    k1_T = log_probs_T - ref_log_probs_T
    log_inverse_T = (-k1_T).clamp(-20, 20)
    k3_T = (log_inverse_T.expm1() - log_inverse_T).clamp(-10, 10)
    return {"k1": k1_T, "abs": k1_T.abs(), "k2": 0.5 * k1_T.square(), "k3": k3_T}[kind]


def next_kl_coef(coef, kl, n, target):
    """The KL coefficient after a batch of n rows whose mean KL was kl (1909.08593, section 2.2).
    The horizon is 10,000 rows, but at least n: else the coefficient could turn negative."""
    if not target:
        return coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * n / max(10_000, n))


def masked_whiten(x_T, mask_T):
    """(x - mean) / sqrt(variance + 1e-8) over the entries of all ranks where the mask is true; zero
    elsewhere."""
    n, mean, variance = common.moments(x_T[mask_T], everywhere=True)
    unbiased = torch.tensor(variance * n / max(n - 1, 1), dtype=torch.float64)
    return torch.where(mask_T, (x_T - mean) * torch.rsqrt(unbiased + 1e-8), 0.0).float()


def whiten_by_noise(batch):
    """(T,) advantages minus a mean that weighs actions by their noise, scaled to a mean square of 1
    over all ranks; zero elsewhere. Of all constants, that mean leaves the least noise in the
    actor's gradient (Greensmith, Bartlett and Baxter 2004). It is of the other answers: with its
    own luck in it, an answer of great weight would count for less."""
    batch, index_T = common.end_to_end(batch)
    mask_T = batch.response_mask
    row_T = batch.row_of_token
    w_T = common.noise_weights(batch)
    x_T = torch.where(mask_T, batch.advantages.double(), 0.0)

    # sums of each answer, and of all the others
    zeros_2B = torch.zeros(2, len(batch), dtype=torch.float64)
    mine_2B = zeros_2B.index_add(1, row_T, torch.stack([w_T * x_T, w_T]))
    total, weight = common.add_up(*mine_2B.sum(1).tolist())
    mine_B, my_weight_B = mine_2B
    least = 1e-9 * max(weight, 1e-9)  # of an answer without others: their mean is 0
    mean_B = (total - mine_B) / (weight - my_weight_B).clamp(min=least)

    less_T = torch.where(mask_T, x_T - mean_B[row_T], 0.0)
    n, squares = common.add_up(int(mask_T.sum()), float(less_T.square().sum()))
    return common.to_rows((less_T * (squares / max(n, 1) + 1e-8) ** -0.5).float(), index_T)


# ---- Actor and reference: a policy on FSDP2 ------------------------------------------------------


def policy_class(model_config):
    """The class of models that write. Those that read images, too, keep their vision tower."""
    if type(model_config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def media_ids(model_config, known):
    """Token ids below `known` that stand for images, video and audio in a prompt."""
    pattern = r"(image|video|audio|vision|[be]o[ai])\w*_token_(id|index)"
    ids = {x for name, x in vars(model_config).items() if re.fullmatch(pattern, name)}
    return sorted(x for x in ids if isinstance(x, int) and x < known)


def of_ids_to_sample(logits_BV, task):
    """The float32 logits of ids with a token, -1e9 for those of images, which are never sampled."""
    logits_BV = logits_BV[:, : task.known].float()
    if task.media_ids:
        ids = torch.tensor(task.media_ids, device=logits_BV.device)
        logits_BV = logits_BV.index_fill(1, ids, -1e9)
    return logits_BV


def part_of_rank(action_A, group):
    """Of the indices of actions, this rank's part, padded to be as long as the parts of others."""
    p = dist.get_world_size(group)
    action_A = nn.functional.pad(action_A, (0, -len(action_A) % p), value=0)
    return action_A.chunk(p)[dist.get_rank(group)]


class Policy(nn.Module):
    """A causal language model: log-probs and entropies of the actions in a micro-batch."""

    def __init__(self, run, task, lm):
        super().__init__()
        self.lm = lm
        self.task = task
        self.temperature = run.temperature
        self.entropy_learns = run.actor.entropy_coeff > 0  # else it is detached from the graph

    @property
    def model(self):
        """The backbone, as a ValueModel has it."""
        return self.lm.base_model

    score = None  # its head is a part of lm

    def forward(self, micro):
        """(T, 2) log-probs and entropies of a micro-batch's actions, zero elsewhere."""
        out = self.model(**micro.inputs, use_cache=False)
        hidden_SD = out.last_hidden_state.flatten(0, 1)

        # the actions, found on the host: a GPU would wait. Ranks that share a row share them, too
        group = common.CurrentPack.group
        all_A = micro.rows.response_mask.nonzero()[:, 0]
        action_A = all_A
        if group:
            hidden_SD = critic_fsdp.gather_slices(hidden_SD, group)
            action_A = part_of_rank(all_A, group)

        # an action is predicted from the state before it
        target_A = micro.rows.input_ids[action_A].to(hidden_SD.device, non_blocking=True)
        action_A = action_A.to(hidden_SD.device, non_blocking=True)
        hidden_AD = hidden_SD[micro.index_T[action_A - 1]]

        # what else the decoder's outputs hold, for the model's head
        others = {name: x for name, x in out.items() if name != "last_hidden_state"}
        outputs = partial(type(out), **others)

        # logits are large: one chunk at a time, which the backward computes again
        size = LOGITS_AT_ONCE // len(self.lm.get_output_embeddings().weight)  # actions
        options = {"use_reentrant": False, "preserve_rng_state": False}
        out_A2 = torch.cat(
            [
                checkpoint(self.read, outputs, hidden_CD, target_C, **options)
                for hidden_CD, target_C in zip(hidden_AD.split(size), target_A.split(size))
            ]
        )
        if group:
            out_A2 = critic_fsdp.gather_slices(out_A2, group)[: len(all_A)]
        out_T2 = torch.zeros(len(micro.response_mask), 2, device=out_A2.device)
        return out_T2.index_copy(0, all_A.to(out_A2.device, non_blocking=True), out_A2)

    def read(self, outputs, hidden_CD, target_C):
        """(C, 2) float32: log-probs of the targets, and entropies of their distributions.

        The logits come from the model's own forward, which may scale or cap them. Its decoder gives
        these hidden states: outputs(last_hidden_state=...)."""
        given = outputs(last_hidden_state=hidden_CD[None])
        called = {self.model, self.model.get_decoder()}  # the one or the other
        for module in called:
            module.forward = lambda *args, **options: given
        try:
            logits_1CV = self.lm(input_ids=target_C[None], use_cache=False).logits
        finally:
            for module in called:
                del module.forward

        logits_CV = of_ids_to_sample(logits_1CV[0], self.task)
        log_p_CV = (logits_CV / self.temperature).log_softmax(-1)
        chosen_C = log_p_CV.gather(1, target_C[:, None])[:, 0]
        entropy_C = -(log_p_CV.exp() * log_p_CV).sum(-1)
        if not self.entropy_learns:
            entropy_C = entropy_C.detach()
        return torch.stack([chosen_C, entropy_C], 1)


def skeleton_of(run, task, model_config):
    """A Policy on the meta device: everything but the weights. UserError: cannot be built."""
    wrap = partial(Policy, run, task)
    return critic_fsdp.skeleton_of(policy_class(model_config), wrap, run.actor, model_config)


class DataParallelPPOActor(critic_fsdp.DataParallelPPOCritic):
    """Log-probs and updates of a policy, by the loops of the critic: its `values` are the log-probs
    of the actions, and it has another model and another loss."""

    kind = "actor"
    says = "log-probs"
    main_loss = "pg_loss"

    def __init__(self, run, task, layout, trains):
        self.run = run
        self.task = task
        self.trains = trains  # a reference does not
        config = run.actor if trains else replace(run.actor, lora_rank=0)
        super().__init__(config, task.model_config, layout, total_steps=None)

    def build(self, model_config):
        """Builds the policy, spread over the ranks, and its optimizer if it trains."""
        run = self.run
        config = self.config
        layout = self.layout
        images = self.task.images
        self.image_processor = images.processor if images else None
        self.outputs = 2  # log-probs and entropies
        self.checksum = 0.0  # of the weights that a resumed run must load again
        self.compiled = False

        # the model, and what of it trains
        policy = skeleton_of(replace(run, actor=config), self.task, model_config)
        self.add_adapters_of_critic(policy.lm)
        for name, p in policy.named_parameters():
            if not self.trains or (config.lora_rank and ".lora_" not in name):
                p.requires_grad_(False)
        has_tower = not images and common.freeze_towers(policy.lm)
        count, trained = critic_fsdp.count_parameters(policy)

        # spread it, with its weights
        source = None
        if RANK == 0:
            source = self.read_policy(model_config)
        self.model = critic_fsdp.spread_model(policy, source, config, layout)
        self.model.lm.tie_weights()  # spreading has untied them
        self.model.lm.generation_config = GenerationConfig(eos_token_id=self.task.stop_ids)
        self.checksum = of_all_ranks(self.checksum)[0]
        if run.share_base:
            self.prepare_base()

        # say so
        name = "actor    " if self.trains else "reference"
        size = f"{count:,} parameters, {trained:,} of them train"
        print0(f"{name}  {config.model} ({model_config.model_type}), {size}")
        if has_tower and self.trains:
            print0("images     are not read; the vision tower stays as it is")

        # the optimizer, with its state from the start: each update then takes the same memory
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = None
        if self.trains:
            self.optimizer = critic_fsdp.build_optimizer(self.model, config, self.peak_lr)
        for p in self.parameters:
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[p] = {"step": torch.zeros((), device=p.device), **moments}

    def read_policy(self, model_config):
        """The policy on the host, with its weights. Only rank 0 calls it."""
        config = self.config
        lm, _ = common.load_model(policy_class(model_config), config, model_config, config.seed)
        if self.run.uses_reference or config.lora_rank:
            self.checksum = sum(int(p.data.view(torch.int32).sum()) for p in lm.parameters())
        common.add_lora(lm.base_model, config, config.seed)
        self.add_adapters_of_critic(lm)
        return Policy(self.run, self.task, lm)

    def add_adapters_of_critic(self, lm):
        """Adapters for a critic that shares the base. They rest until it takes its turn."""
        critic = self.run.critic
        if self.run.share_base and critic.lora_rank:
            common.add_lora(lm.base_model, critic, critic.seed, critic_fsdp.ADAPTER)
            common.use_adapter(lm.base_model, "default")

    def prepare_base(self):
        """For a critic on this base, whose ranks may share a row. It calls the backbone alone,
        without the hooks of the rest."""
        if self.run.critic.ulysses_size > 1:
            self.model.lm.get_decoder().set_attn_implementation("ulysses")
        embedding = self.model.lm.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda *_: self.model.unshard())

    def forward(self, micro):
        """(T, 2) float32 log-probs and entropies of the actions, zero elsewhere."""
        group = self.layout.sp_group if micro.pack else None
        common.CurrentPack.set(micro.pack, group)  # layers read it, until the backward ends
        out_T2 = self.model(micro)
        common.CurrentPack.check(micro.pack)
        return out_T2

    def values(self, outputs, mask):
        """Of what forward gives, the log-probs."""
        return outputs[:, 0]

    def give_back(self, values, local, table, batch):
        """As of a critic. UserError: some log-probs are not finite."""
        log_probs_T = super().give_back(values, local, table, batch)
        if not all(of_all_ranks(bool(log_probs_T.isfinite().all()))):
            advice = "use a lower --actor.lr" if self.optimizer_steps else "check its weights"
            wrong = f"its log-probs are not finite; {advice}"
            raise UserError(f"--actor.model {self.config.model}: {wrong}")
        return log_probs_T

    def weights_of(self, local, mini):
        """(T,) what the loss of each token counts for, see the critic's."""
        mode = self.config.loss_agg_mode
        return common.loss_weights(local, mode, self.run.max_response_length, rows=mini)

    def policy_weights(self, log_probs_T, micro):
        """(T,) what each action counts for in PPO's objective. log_probs_T: those of now."""
        if self.config.tis_cap is None:
            return micro.weights

        # the engine's mu has sampled the tokens: rho of IMPALA, 1802.01561, section 4.1
        rho_T = (micro.values - engine_log_probs(micro)).exp()
        return micro.weights * rho_T.clamp(max=self.config.tis_cap)

    def loss(self, outputs, micro):
        """-> (the loss to minimise, 0-dim; for each metric, the sum over the actions)."""
        config = self.config
        mask_T = micro.response_mask
        log_probs_T, entropy_T = outputs.T.contiguous()

        # what was said before, by the actor and its reference, and what is learned
        old_T = micro.values
        ref_T = old_T
        if micro.rows.ref_log_probs is not None:
            ref_T = micro.rows.ref_log_probs.to(old_T.device, non_blocking=True)
        advantages_T = micro.rows.advantages.to(old_T.device, non_blocking=True)

        # PPO's objective
        loss, clipped, dual = policy_loss(
            log_probs_T,
            old_T,
            advantages_T,
            mask_T,
            self.policy_weights(log_probs_T.detach(), micro),
            config.clip_ratio_low,
            config.clip_ratio_high,
            config.clip_ratio_c,
        )

        # a term without a coefficient is left out, even if it is NaN
        ref_kl_T = kl_penalty(log_probs_T, ref_T, config.kl_loss_type)
        whole = loss
        if config.kl_loss_coef:
            whole = whole + config.kl_loss_coef * (micro.weights * ref_kl_T).sum()
        if config.entropy_coeff:
            whole = whole - config.entropy_coeff * (micro.weights * entropy_T).sum()

        sums = {
            "pg_loss": loss,
            "pg_clipfrac": clipped,
            "pg_clipfrac_lower": dual,
            "ppo_kl": (old_T - log_probs_T).sum(),
            "kl_loss": ref_kl_T.sum(),
            "entropy": entropy_T.sum(),
            "actions": mask_T.sum(),
        }
        return whole, {name: x.detach().double() for name, x in sums.items()}


def engine_log_probs(micro):
    """(T,) what the engine has said of the actions that it drew, on the device."""
    return micro.rows.rollout_log_probs.to(micro.weights.device, non_blocking=True)


class PolicyWorker(critic_fsdp.CriticWorker):
    """A policy as a worker like the critic's; the reference (trains=False) has no optimizer."""

    def __init__(self, run, task, device, trains=True):
        self.run = run
        self.config = run.actor
        self.model_config = task.model_config
        self.device = device
        critic_fsdp.check_auto(run.actor, device)
        self.layout = critic_fsdp.make_layout(run.actor, device)
        self.offloaded = False
        self.away = []  # what is on the host meanwhile, see common.offload
        self.moments_away = []
        self.halvings = 0
        self.guest = None  # a critic that shares the base
        self.old_log_probs = None  # (T,) of the newest update's batch, from before it

        self.critic = DataParallelPPOActor(run, task, self.layout, trains)  # in a critic's place
        self.critic.between = poll
        self.model = self.critic.model
        if trains:
            critic_fsdp.check_model(self)

    def check_ready(self, saves=False):
        """As of a critic. If one shares the base, it is the actor's turn from now on."""
        super().check_ready(saves)
        actor = self.critic
        if actor.steps_before is not None:
            self.model.state_dict()  # its hooks shard what the update has left gathered
        if self.guest:
            self.guest.check_whole(saves)
            actor.free_gathered()
            common.use_adapter(self.model, "default")
            for p in actor.parameters:
                p.requires_grad_()

    @common.dp_compute_proto()
    def compute_log_probs(self, batch, rows):
        """(T,) float32 log-probs of the actions in the caller's rows at --temperature, else 0.
        UserError: a row does not fit."""
        self.check_batch(batch, rows)
        return self.critic.compute_values(batch, rows)

    def compute_log_probs_of_base(self, batch):
        """compute_log_probs of the reference: the policy without its adapters, if it has any."""
        without = nullcontext()
        if self.config.lora_rank:
            from peft.helpers import rescale_adapter_scale

            without = rescale_adapter_scale(self.model, 0)
        with without:
            return self.compute_log_probs(batch)

    @common.dp_compute_proto(
        needs=("rollout_log_probs", "advantages"), may_have=("old_log_probs", "ref_log_probs")
    )
    def update_policy(self, batch, rows):
        """PPO epochs over mini-batches of all ranks' Rows, one optimizer step each -> metrics.

        A batch without old log-probs gets those of the only step; without the reference's, they are
        the old ones. UserError: a row does not fit."""
        self.check_batch(batch, rows)
        common.onload(self.moments_away)

        # what the model has said before the update is in `values`
        batch = replace(batch, values=batch.old_log_probs, old_log_probs=None)
        metrics = self.critic.update_critic(batch, rows)
        self.old_log_probs = batch.values
        return metrics

    def move(self):
        """As of a critic, but the optimizer's state stays on the host until an update or a
        checkpoint needs it."""
        if self.offloaded:
            self.moments_away += common.offload(common.optimizer_moments(self.critic.optimizer))
        super().move()

    # ---- weights and checkpoints

    @torch.no_grad()
    def weights(self, dtype=torch.float32):
        """Yields (name, full tensor) for each weight, one at a time and with its adapter (a
        collective); then what else is stored, such as the correction that some routers add."""
        self.check_ready(saves=True)
        lm = self.model.lm
        for name, x in lm.named_parameters():
            if ".lora_" in name:
                continue
            layer, adapted, _ = name.partition(".base_layer.weight")
            if adapted:
                x = x + lm.get_submodule(layer).get_delta_weight("default")
            yield name.replace(".base_layer", ""), x.to(dtype).full_tensor()
        stored = lm.state_dict()
        yield from ((name, x) for name, x in lm.named_buffers() if name in stored)

    def own_weights(self, state):
        """Of the model's state dict, what a checkpoint holds: each weight once, or the adapters."""
        own = {}
        for name, p in self.model.named_parameters():
            if p.requires_grad or not self.config.lora_rank:
                own[name] = state[name]
        return own

    def checkpoint_writer(self, copy=False):
        """As of a critic."""
        common.onload(self.moments_away)
        return super().checkpoint_writer(copy)

    def load_checkpoint(self, folder):
        """As of a critic."""
        common.onload(self.moments_away)
        super().load_checkpoint(folder)

    def shape(self):
        """What a checkpoint and the run that resumes it must have in common."""
        more = {"weights of the reference": self.critic.checksum}
        return common.shape_of(self.model_config, more | critic_fsdp.what_trains(self.config))

    def export_hf(self, folder, tokenizer):
        """Writes a Hugging Face folder (a collective); rank 0 gathers the weights."""
        state = {name: weight.cpu() for name, weight in self.weights() if RANK == 0}
        with common.published(folder) as tmp:
            if RANK == 0:
                self.model.lm.save_pretrained(tmp, state_dict=state)
                tokenizer.save_pretrained(tmp)
                if self.critic.image_processor:
                    self.critic.image_processor.save_pretrained(tmp)


# ---- Rollout: turns of the policy and the environment --------------------------------------------


def roll_out(engine, task, replies, run, temperature, key=""):
    """Adds turns to the replies. Random numbers depend only on the key, the row_id and the turn."""
    going = replies
    decode = partial(common.decode_behind, task.tokenizer)
    most = run.max_turns if task.observe else 1
    for turn in range(most):
        # what the engine continues, with a seed that is the same on every machine
        rows = []
        images = []
        for reply in going:
            seed = random.Random(f"{key} {reply.row_id} {turn}").getrandbits(63)
            prompt, start, end = reply.segments()[-1]
            room = room_behind(prompt, end - start, task, run)
            rows.append((prompt.ids + reply.ids[start:], seed, room))
            images.append(prompt.images)
        out = []
        with suppress(SystemExit):  # after a signal, which other ranks may not know of yet
            out = engine.generate(rows, temperature, images)

        for reply, (ids, log_probs, ended) in zip(going, out):
            reply.ids += ids
            reply.log_probs += log_probs
            reply.ends.append(len(reply.ids) - 1)
            reply.finished = ended

            # texts have special tokens, such as <think>, but no end of a turn
            if ids and ids[-1] in task.stop_ids:
                ids = ids[:-1]
            reply.turns.append(decode(reply.prompt.ids + reply.shown, ids))
            reply.shown += ids
            reply.text = decode(reply.prompt.ids, reply.shown)

        # the environment answers each turn; what it gives for the last one counts, too
        if task.observe:
            going = listen(going[: len(out)], task, run, last=turn + 1 == most)
            if not any(of_all_ranks(bool(going))):
                break


def room_behind(prompt, n, task, run):
    """How many tokens may follow a prompt and n more behind it. No row is longer than the longest
    prompt of the files with its response, for which memory is planned."""
    longest = task.longest - len(prompt.critic_ids or prompt.ids)
    return min(run.max_response_length, longest) - n


def listen(replies, task, run, last=False):
    """Asks the environment about the newest turn of each reply, adds what it gives for the turn,
    and appends what it says -> those that get another turn. Without one, as behind the last turn
    or one that was cut off, its text is ignored."""
    going = []
    for reply, (made, fault) in zip(replies, ask_all(task.observe, replies)):
        reply.fault = fault or fault_of_observation(made, reply)
        if reply.fault:
            continue

        # with a reward, it is that of the turn that it answers
        if isinstance(made, list):
            reply.earned[reply.ends[-1]] += made[1]
            made = made[0]
        if made is None or last or not reply.finished:
            continue

        # what the policy reads next, with "?" for a lone surrogate
        made = json.loads(json.dumps(made, ensure_ascii=False).encode(errors="replace"))
        prompt, start, end = reply.segments()[-1]
        try:
            with blame(f"an environment's {made!r:.40}"):
                text, ids, chat, new = hear(made, reply, task, run)
        except UserError as error:
            reply.fault = str(error)
            continue

        # its model would look for one more image
        if task.images and task.images.token in ids:
            reply.fault = "an environment must not return the placeholder of an image"
            continue

        # if it leaves no room for another turn, the row was cut off
        n = 0 if new else end - start + len(ids)
        reply.finished = room_behind(new or prompt, n, task, run) > 0
        if not reply.finished:
            continue
        if new:
            reply.contexts.append((end, new))
            reply.shown += common.encode_behind(task.tokenizer, reply.text, text)
        reply.ids += ids
        reply.shown += ids
        reply.log_probs += [None] * len(ids)
        reply.turns.append(text)
        reply.chat = chat
        going.append(reply)
    return going


def hear(made, reply, task, run):
    """What the policy reads behind its turn -> (its text, ids that go on from the turn, the chat so
    far or None, the Prompt of a new segment in their place or None). ValueError: it is unusable.

    The next prompt of a chat is the template's text of the messages so far. If it begins with what
    stands in the row, the row goes on; if not, as where a template drops thoughts, a new one
    begins."""
    tokenizer = task.tokenizer
    prompt, start, _ = reply.segments()[-1]
    row = prompt.row or {}
    known = dict(row, images=prompt.images)  # where they are, whatever the folder

    # a new context
    if isinstance(made, dict) and "role" not in made:
        asked = json.loads(made["messages"]) if "messages" in made else made["prompt"]
        if "tools" in made:
            known["tools"] = made["tools"]
        new = to_prompt(asked, known, run, tokenizer, task.images)
        return new.text, [], None, new

    # text, behind text
    before = common.decode(tokenizer, (prompt.ids + reply.ids[start:])[-16:])
    if not prompt.messages:
        if isinstance(made, dict):
            raise ValueError("a message goes with prompts that are chats, see --chat")
        return made, common.encode_behind(tokenizer, before, made), None, None

    # the messages so far: the policy's turn may go on from what the prompt has begun
    chat = reply.chat or prompt.messages
    so_far = in_template(chat, row, run, tokenizer)
    begun = common.THOUGHT.search(so_far)
    begun = begun[0] if begun else ""
    if chat[-1]["role"] == "assistant":
        begun = common.content_of(chat[-1])
        chat = chat[:-1]
    said = {"role": "assistant", "content": begun + reply.turns[-1]}
    heard = made if isinstance(made, dict) else {"role": "user", "content": made}
    chat = common.text_messages([*chat, said, heard], bool(task.images))
    text = common.content_of(heard)

    # what is new in the template's text of them
    whole = in_template(chat, row, run, tokenizer)
    rest = common.read_since(so_far + reply.turns[-1], whole)
    if rest is None:
        return text, [], None, to_prompt(chat, known, run, tokenizer, task.images)
    if reply.ids[-1] in task.stop_ids:  # the policy has ended the turn itself
        end = common.decode(tokenizer, reply.ids[-1:])
        if rest.lstrip().startswith(end):
            rest = rest.lstrip().removeprefix(end)
    return text, common.encode_behind(tokenizer, before, rest), chat, None


def stop_tokens(config, tokenizer):
    """Token ids that end a turn: the tokenizer's EOS, and those of generation_config.json."""
    more = None
    with suppress(OSError, ValueError):
        if config.model not in common.TINY:
            more = GenerationConfig.from_pretrained(config.model).eos_token_id
    if not isinstance(more, list):
        more = [more]
    return sorted({tokenizer.eos_token_id, *more} - {None})


def stop_texts(run, tokenizer):
    """transformers' criteria for the texts of --stop. UserError: the tokenizer cannot write one."""
    criteria = StoppingCriteriaList()
    for text in run.stop:
        with blame(f"--stop {text}: does not fit the tokenizer"):
            criteria.append(StopStringCriteria(tokenizer, text))
    return criteria


# ---- Rollout engine: transformers ----------------------------------------------------------------


def to_draw_from(logits_BV, temperature, top_p, task):
    """Logits -> (B, V) log-probs that the next token is drawn from. temperature 0: those of 1."""
    known_BV = of_ids_to_sample(logits_BV, task)
    log_p_BV = (known_BV / (temperature or 1.0)).log_softmax(-1)

    # a nucleus; finding it sorts the vocabulary, which takes longer than a small model
    if temperature and top_p < 1:
        log_p_BV = TopPLogitsWarper(top_p)(None, log_p_BV).log_softmax(-1)
    return log_p_BV


def draw(logits_BV, u_B1, temperature, top_p, task):
    """Samples each row's next token with the row's own random number -> (B, 1) ids, and their
    log-probs. temperature 0: greedy."""
    if Stop.signal:
        raise SystemExit
    log_p_BV = to_draw_from(logits_BV, temperature, top_p, task)

    # inverse transform sampling: one random number per token
    if temperature:
        cdf_BV = log_p_BV.double().exp().cumsum(-1)
        chosen_B1 = torch.searchsorted(cdf_BV, u_B1 * cdf_BV[:, -1:], right=True)
        chosen_B1 = chosen_B1.clamp(max=cdf_BV.shape[1] - 1)
    else:
        chosen_B1 = log_p_BV.argmax(-1, keepdim=True)
    return chosen_B1, log_p_BV.gather(1, chosen_B1)


def grouped_attention(module, query, key, value, attention_mask, **options):
    """transformers' sdpa, which copies keys and values for each head of a group. Here, the heads of
    a group are queries of one head, if each row has only one query."""
    sdpa = transformers.AttentionInterface()["sdpa"]
    B, heads, queries, D = query.shape
    if queries > 1:
        return sdpa(module, query, key, value, attention_mask, **options)

    options["is_causal"] = False
    query = query.view(B, key.shape[1], -1, D)
    out, _ = sdpa(nn.Identity(), query, key, value, attention_mask, **options)
    return out.transpose(1, 2).reshape(B, 1, heads, -1), None


transformers.AttentionInterface.register("grouped", grouped_attention)
transformers.AttentionMaskInterface.register("grouped", sdpa_mask)


class RoomyLayer(DynamicLayer):
    """Keys and values of some rows of a layer, (B,K,L,D) each, with room for more tokens: the layer
    of transformers would copy all of them for each new token."""

    room = 128  # tokens

    def __init__(self, layers, rows_B):
        """layers: a layer as several batches have it, whose rows end together."""
        super().__init__()
        self.lazy_initialization(layers[0].keys, layers[0].values)
        longest = max(layer.keys.shape[2] for layer in layers)

        def join(parts):
            padded = [nn.functional.pad(x, (0, 0, longest - x.shape[2], self.room)) for x in parts]
            return torch.cat(padded)[rows_B]

        self.wide = [
            join([layer.keys for layer in layers]),
            join([layer.values for layer in layers]),
        ]
        self.keys, self.values = (wide[:, :, :longest] for wide in self.wide)

    def update(self, keys, values, *args, **options):
        n = self.keys.shape[2]
        end = n + keys.shape[2]
        if end > self.wide[0].shape[2]:
            more = (0, 0, 0, end - n + self.room)
            self.wide = [nn.functional.pad(x, more) for x in (self.keys, self.values)]

        for wide, new in zip(self.wide, (keys, values)):
            wide[:, :, n:end] = new
        self.keys, self.values = (wide[:, :, :end] for wide in self.wide)
        return self.keys, self.values


# what transformers' generate has for each token: (B,L), or positions in several axes
PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def take_rows(rows_B, inputs):
    """Keeps these rows of the inputs that transformers' generate has between two tokens."""
    for name in PER_TOKEN:
        if inputs.get(name) is not None:
            inputs[name] = inputs[name][..., rows_B, :]

    # layers of windows and recurrent ones stay as they are: they hold little
    layers = inputs["past_key_values"].layers
    for i, layer in enumerate(layers):
        if type(layer) in (DynamicLayer, RoomyLayer) and layer.is_initialized:
            layers[i] = RoomyLayer([layer], rows_B)
        else:
            layer.reorder_cache(rows_B)


class HFRollout:
    """Generates with transformers: each rank holds a full copy of the policy and generates its own
    rows. A row's random numbers depend only on its seed, so up to rounding its sample is the same
    in any batch."""

    def __init__(self, run, task, device):
        self.run = run
        self.task = task
        self.device = device
        self.dtype = common.compute_dtype(run.actor.param_dtype, device)

        capped = getattr(task.model_config.get_text_config(), "attn_logit_softcapping", None)
        attention = "eager" if capped else None  # sdpa ignores the cap; None: transformers chooses
        with device:
            self.model = policy_class(task.model_config).from_config(
                deepcopy(task.model_config), dtype=self.dtype, attn_implementation=attention
            )

        # a model that chooses sdpa reads the keys of a group of heads once
        decoder = self.model.get_decoder()
        if decoder.config._attn_implementation == "sdpa":
            decoder.set_attn_implementation("grouped")
        self.model.eval()  # some routers draw experts, or add noise, while they train
        self.model.generation_config = GenerationConfig(eos_token_id=task.stop_ids, pad_token_id=0)
        self.away = []  # what is on the host, see common.offload

    @torch.no_grad()
    def sync(self, weights):
        """Copies the actor's weights into the engine: (name, full tensor) pairs in self.dtype."""
        held = self.model.state_dict()
        for name, weight in weights:
            held[name].copy_(weight)

    def offload(self):
        self.away += common.offload(self.model.parameters())

    def onload(self):
        common.onload(self.away)

    def generate(self, rows, temperature, images=None):
        """rows: (prompt ids, seed, most new tokens) each -> for each (new ids, their log-probs as
        sampled, whether a stop token or text ended it). temperature 0: greedy. images: those of
        each row, see Prompt (None: no row has any)."""
        rows = list(zip(rows, images or [None] * len(rows), strict=True))
        size = self.run.rollout_batch_size
        batches = [rows[first : first + size] for first in range(0, len(rows), size)]
        steps = [max(room for (_, _, room), _ in batch) for batch in batches]
        done = common.progress_of(sum(steps), "rollout", "forwards")

        replies = []
        for batch, most in zip(batches, steps):
            replies += self.generate_batch(*zip(*batch), temperature, most, done)
        return replies

    def generate_batch(self, rows, images, temperature, most, done):
        """generate for rows that run together. most: the most new tokens of a row."""
        prompts, seeds, rooms = zip(*rows)

        # the different prompts, and which one each row has
        places = {}
        keys = [(tuple(ids), tuple(files or ())) for ids, files in zip(prompts, images)]
        place_B = [places.setdefault(key, len(places)) for key in keys]

        # prompts end together, behind padding of -1
        ids_PL = pad_sequence([torch.tensor(ids) for ids, _ in places], True, -1, "left")
        ids_PL = ids_PL.to(self.device)

        # images, and which tokens are theirs, from which generate makes their positions
        pixels = pixels_of([files for _, files in places], self.run, self.task.images)
        if pixels:
            pixels = {name: x.to(self.device) for name, x in pixels.items()}
            pixels["mm_token_type_ids"] = (ids_PL == self.task.images.token).int()

        # each row's own random numbers, one per token
        g = torch.Generator()
        u_BR = [torch.rand(most, generator=g.manual_seed(x), dtype=torch.float64) for x in seeds]

        rows = (torch.tensor(place_B, device=self.device), torch.stack(u_BR).to(self.device), rooms)

        # generate makes the inputs of the model, and calls the loop
        replies = self.model.generate(
            ids_PL.clamp(min=0),
            attention_mask=ids_PL >= 0,
            max_new_tokens=most,
            custom_generate=partial(self.decode, rows, temperature, done),
            **pixels,
        )
        done(most - max(len(ids) for ids, _, _ in replies))  # all rows may have ended early
        return replies

    def decode(self, rows, temperature, done, model, ids_PL, **inputs):
        """The loop of transformers' generate for different prompts -> a reply to each row, as
        generate_batch returns it.

        rows: the prompt (B,), random numbers (B,R) and most new tokens of each. inputs: what
        generate gives the model, and its loop. done(): called after each token."""
        place_B, u_BR, rooms = rows
        for name in ("logits_processor", "stopping_criteria", "generation_config"):
            del inputs[name]  # they are in draw and below

        # each prompt is read once; then all of its rows begin
        logits_PV, inputs = self.read(ids_PL, inputs)
        logits_BV = logits_PV[place_B]
        ids_BL = ids_PL[place_B]
        take_rows(place_B, inputs)

        task = self.task
        start = ids_PL.shape[1]
        stop_ids = torch.tensor(task.stop_ids, dtype=torch.int64, device=self.device)
        said = [[] for _ in rooms]  # token, log-prob and whether it ends the row
        going = list(range(len(rooms)))  # rows in the batch
        ended = set()
        while True:
            # a token for each row
            u_B1 = u_BR[:, ids_BL.shape[1] - start, None]
            token_B1, log_p_B1 = draw(logits_BV, u_B1, temperature, self.run.top_p, task)
            ids_BL = torch.cat([ids_BL, token_B1], 1)
            ends_B1 = torch.isin(token_B1, stop_ids)
            if task.stop_texts:
                ends_B1 |= task.stop_texts(ids_BL[:, start:], None)[:, None]
            done()

            # only here does the host wait for the device
            told_B3 = torch.cat([token_B1.double(), log_p_B1.double(), ends_B1.double()], 1)
            for i, told in zip(going, told_B3.tolist()):
                if i not in ended:
                    said[i].append(told)
                    if told[2] or len(said[i]) == rooms[i]:
                        ended.add(i)

            # rows that have ended leave in numbers, because it copies the cache
            left = [n for n, i in enumerate(going) if i not in ended]
            if not left:
                break
            if len(left) <= 0.75 * len(going):
                going = [going[n] for n in left]
                left_B = torch.tensor(left, device=self.device)
                ids_BL = ids_BL[left_B]
                u_BR = u_BR[left_B]
                take_rows(left_B, inputs)
            logits_BV, inputs = self.forward(ids_BL, inputs, next_sequence_length=1)

        columns = [zip(*told) for told in said]
        return [
            ([*map(int, ids)], [*log_probs], bool(ends[-1])) for ids, log_probs, ends in columns
        ]

    def read(self, ids_PL, inputs):
        """Reads prompts -> (P,V) logits of what comes next, inputs. Those of like length are read
        together, without much padding. Models of images and caches of windows read all at once."""
        cache = inputs["past_key_values"]
        plain = {type(layer) for layer in cache.layers} == {DynamicLayer}
        text = self.model.config.get_text_config() is self.model.config
        if inputs["attention_mask"] is None or not plain or not text:
            return self.forward(ids_PL, inputs, is_first_iteration=True)

        # the shortest come first
        lengths = inputs["attention_mask"].sum(1).tolist()
        most = TOKENS_AT_ONCE[self.device.type]
        parts = [[]]
        for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
            if parts[-1] and lengths[i] * (len(parts[-1]) + 1) > most:
                parts.append([])
            parts[-1].append(i)

        # each part has a cache of its own
        logits = []
        caches = []
        for part in parts:
            n = lengths[part[-1]]
            some = dict(inputs, past_key_values=deepcopy(cache))
            for name in PER_TOKEN:
                if some.get(name) is not None:
                    some[name] = some[name][..., part, -n:]
            logits_BV, some = self.forward(ids_PL[part, -n:], some, is_first_iteration=True)
            logits.append(logits_BV)
            caches.append(some["past_key_values"].layers)

        # together, in the order of the prompts
        back_P = torch.tensor(list(chain(*parts)), device=self.device).argsort()
        for i, layers in enumerate(zip(*caches)):
            if layers[0].is_initialized:
                cache.layers[i] = RoomyLayer(layers, back_P)
        out = CausalLMOutputWithPast(past_key_values=cache)
        inputs = self.model._update_model_kwargs_for_generation(out, inputs, False)
        return torch.cat(logits)[back_P], inputs

    def forward(self, ids_BL, inputs, **options):
        """Reads the ids that are not in the cache -> (B,V) logits of what comes next, inputs."""
        step = self.model.prepare_inputs_for_generation(ids_BL, **options, **inputs)
        out = self.model(**step, return_dict=True)
        inputs = self.model._update_model_kwargs_for_generation(out, inputs, False)
        return out.logits[:, -1], inputs


# ---- Rollout engine: vLLM ------------------------------------------------------------------------


class VLLMRollout:
    """Like HFRollout, with vLLM inside the training processes: one engine per
    --vllm.tensor-parallel-size ranks. Deleting an engine would destroy the trainer's process group,
    so `engines` keeps them all alive."""

    engines = []

    def __init__(self, run, task, device):
        self.run = run
        self.task = task
        self.on_cpu = device.type == "cpu"
        self.dtype = common.compute_dtype(run.actor.param_dtype, device)

        # a model without weights knows the tensor names of a checkpoint
        model_config = deepcopy(task.model_config)
        with torch.device("meta"):
            self.skeleton = policy_class(model_config).from_config(model_config)
        model_config.architectures = [type(self.skeleton).__name__]

        # vLLM changes torch's threads and RNG, and warns a lot
        threads = torch.get_num_threads()
        set_num_threads = torch.set_num_threads
        with tempfile.TemporaryDirectory() as folder:
            model_config.save_pretrained(folder)
            if task.images:
                task.images.processor.save_pretrained(folder)
                task.tokenizer.save_pretrained(folder)
            with warnings.catch_warnings(action="ignore"), torch.random.fork_rng():
                with blame(f"--rollout vllm: cannot run {run.actor.model}"):
                    self.start(folder, run.vllm.tensor_parallel_size)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)

        # a signal ends generate between two tokens
        self.engines.append(self.llm)
        unfinished = self.llm.llm_engine.has_unfinished_requests
        self.llm.llm_engine.has_unfinished_requests = lambda: poll(self.group) or unfinished()
        size = run.vllm.tensor_parallel_size
        print0(f"vllm       {WORLD_SIZE // size} engines x {size} ranks")

    def start(self, folder, size):
        """Builds vLLM's LLM with random weights. folder: holds the model's config, and with images
        what reads them and the tokenizer, which vLLM needs only then."""
        defaults = {  # only for variables that are not set: torchrun's values win
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        os.environ |= defaults | os.environ
        from vllm import LLM
        from vllm.distributed.parallel_state import get_tp_group

        # use gloo: vLLM's shared memory has one name for all runs on a machine, and stays
        if self.on_cpu:
            from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

            CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False

        # without images, vLLM needs neither a tokenizer nor a vision tower
        media = {"skip_tokenizer_init": True, "language_model_only": True}
        if self.task.images:
            most = max(len(x.images or ()) for x in self.task.prompts + self.task.held_out)
            media = {"limit_mm_per_prompt": {"image": most, "video": 0}}
            # the random weights would replace the numbers with which a tower normalises pixels
            media["mm_device_do_normalize"] = False

        self.llm = LLM(
            model=folder,
            load_format="dummy",  # the first sync brings the weights
            generation_config="vllm",  # not the model's own sampling defaults
            dtype=self.dtype,
            trust_remote_code=self.run.actor.trust_remote_code,
            max_model_len=self.task.longest,
            max_num_seqs=self.run.rollout_batch_size,
            gpu_memory_utilization=self.run.vllm.gpu_memory_utilization,
            # instead of a share of the host's memory
            kv_cache_memory_bytes=2**30 if self.on_cpu else None,
            enforce_eager=self.on_cpu,
            enable_sleep_mode=self.run.offload and not self.on_cpu,
            tensor_parallel_size=size,
            # each torchrun process runs its own worker
            distributed_executor_backend="external_launcher",
            # of the sampling distribution: after temperature and top-p
            logprobs_mode="processed_logprobs",
            **media,
        )
        # for --stop the actor's own tokenizer, because vLLM would read a stored one by other rules
        tokenizer = self.task.tokenizer if self.run.stop else None
        self.llm.llm_engine.output_processor.tokenizer = tokenizer

        # the ranks of this engine; its shared memory would outlive the os._exit of common.launch
        self.group = get_tp_group().cpu_group
        get_tp_group().mq_broadcaster = None

    def onload(self):
        """Wakes the weights for a sync. generate wakes the KV cache, when the actor has left."""
        self.llm.wake_up(tags=["weights"])

    def offload(self):
        """Frees device memory, where the platform can. The next sync brings new weights."""
        self.llm.sleep(level=2)

    def sync(self, weights):
        """Loads the actor's weights: (name, full tensor) pairs in self.dtype (a collective)."""
        if self.on_cpu:
            self.llm.apply_model(forget_experts)

        # under the names of a checkpoint
        named = (
            pair
            for name, weight in weights
            for pair in revert_weight_conversion(self.skeleton, {name: weight}).items()
        )
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        self.llm.apply_model(self.adapt)

        # these hold keys and values of the old weights, and what the old tower made of images
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def adapt(self, model):
        """Runs inside vLLM after a sync: masks ids without a token; on CPU, packs a tied head."""
        for module in model.modules():
            kind = type(module).__name__
            if kind == "LogitsProcessor":
                module.org_vocab_size = self.task.known
            elif kind == "ParallelLMHead" and self.on_cpu:
                module.quant_method.process_weights_after_loading(module)

    def generate(self, rows, temperature, images=None):
        """Like HFRollout.generate; ranks that share an engine call it together."""
        from vllm import SamplingParams

        if self.llm.llm_engine.is_sleeping():
            self.llm.wake_up(tags=["kv_cache"])

        # the engine gets the rows of all its ranks
        rows = list(zip(rows, images or [None] * len(rows), strict=True))
        everyones = of_all_ranks(rows, self.group)
        before = sum(map(len, everyones[: dist.get_rank(self.group)]))
        shared = {
            "temperature": temperature,
            "top_p": self.run.top_p,
            "logprobs": 0,
            "stop_token_ids": self.task.stop_ids,
            "logit_bias": dict.fromkeys(self.task.media_ids, -100.0),
            "ignore_eos": True,
        }

        # special tokens are part of the text, as they are for transformers' criterion
        if self.run.stop:
            shared |= {"stop": list(self.run.stop), "include_stop_str_in_output": True}
            shared |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        asked = []
        params = []
        for (ids, seed, room), files in chain(*everyones):
            asked.append(self.ask(ids, files))
            params.append(SamplingParams(seed=seed, max_tokens=room, **shared))

        # on CPU, compiling takes longer than the rollout; vLLM draws from torch's RNG
        stance = "force_eager" if self.on_cpu else "default"
        with torch.compiler.set_stance(stance), torch.random.fork_rng(devices=()):
            out = self.llm.generate(asked, params, use_tqdm=RANK == 0 and sys.stderr.isatty())

        # this rank's part of the answers
        replies = []
        for mine, ((ids, _, _), _) in zip(out[before : before + len(rows)], rows):
            if mine.prompt_token_ids != ids:
                raise UserError("--rollout vllm: gives images other placeholders than the actor")
            reply = mine.outputs[0]
            log_probs = [at[token].logprob for at, token in zip(reply.logprobs, reply.token_ids)]
            replies.append((list(reply.token_ids), log_probs, reply.finish_reason == "stop"))
        return replies

    def ask(self, ids, files):
        """vLLM's prompt: the ids, and the images in files, if any. It gives an image its
        placeholders itself, so it gets one of them, and it resizes with another kernel, so it gets
        the image in its last size."""
        if not files:
            return {"prompt_token_ids": ids}

        # one placeholder for each image
        short = []
        for token, same in groupby(ids):
            if token == self.task.images.token:
                same = [token]
            short += same

        # their last sizes are multiples of a patch
        processor = self.task.images.processor
        grids = pixels_of([files], self.run, self.task.images)["image_grid_thw"]
        pictures = []
        for file, (_, height, width) in zip(files, (grids * processor.patch_size).tolist()):
            pictures.append(load_image(file).resize((width, height), processor.resample))
        return {"prompt_token_ids": short, "multi_modal_data": {"image": pictures}}


def forget_experts(model):
    """Runs inside vLLM's CPU build, which repacks expert weights only where moe_kernel is None."""
    for module in model.modules():
        module.moe_kernel = None


# ---- The switch between generating and training --------------------------------------------------


class Phases:
    """`with phases("actor", actor):` times a phase. With --offload, only its workers are on the
    device."""

    def __init__(self, offload):
        self.offload = offload
        self.ends = [perf_counter()]  # the start, then the end of each step
        self.seconds = collections.Counter()  # phase -> seconds of this step

    @contextmanager
    def __call__(self, name, *workers):
        start = perf_counter()
        with torch.profiler.record_function(name), self.on_device(*workers):
            yield
        self.seconds[name] += perf_counter() - start

    @contextmanager
    def on_device(self, *workers):
        """With --offload, brings these workers to the device for a while."""
        with ExitStack() as stack:
            for worker in workers:
                if worker and self.offload:
                    worker.onload()
                    stack.callback(worker.offload)
            yield

    def take(self, tokens):
        """Timing metrics: of the phases since the last call, and the mean time of a step.

        tokens: in the rows of the step, including prompts."""
        self.ends.append(perf_counter())
        *_, before, now = self.ends
        metrics = {f"time/{name}": x for name, x in self.seconds.items()}
        metrics["perf/time_step"] = (now - self.ends[0]) / (len(self.ends) - 1)
        metrics["perf/rollout_tokens_per_second"] = tokens / (now - before)
        self.seconds.clear()
        return metrics


# ---- The command line ----------------------------------------------------------------------------


def start():
    """Runs main with the flags of the command line, and leaves no worker process behind."""
    signal.signal(signal.SIGINT, interrupted)
    try:
        main(parse(sys.argv[1:]))
    finally:
        end_workers()


def parse(args):
    """The command line as a Run. --critic is read first, because --critic.* flags depend on it."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--critic", nargs="?")
    backend = first.parse_known_args(args)[0].critic
    if backend not in ("fsdp", "megatron"):
        backend = "fsdp"  # the default; tyro refuses another word below
    try:
        critic = critic_flags(backend)
    except ImportError as error:
        raise UserError(f"--critic {backend}: {error}") from None

    # two of the critic's flags have a default of their own here
    size = ActorConfig.ppo_mini_batch_size
    default = Run(critic=critic(model="actor", ppo_mini_batch_size=size))
    options = {"args": args, "default": default, "description": __doc__}
    speaks = RANK == 0  # one rank speaks for all
    with redirect_stderr(sys.stderr if speaks else io.StringIO()):  # tyro prints some boxes anyway
        return tyro.cli(Run, **options, console_outputs=speaks)


def critic_module(backend):
    """Imports critic_fsdp or critic_megatron, and only the one that is used."""
    return import_module(f"critic_{backend}")


@cache
def critic_flags(backend):
    """The critic's Config; in this script its flags begin with --critic."""

    class Config(critic_module(backend).Config):
        prefix = "--critic."

    return Config


def check_layout(run):
    """UserError unless this machine has the engine, and the ranks can share the work as the flags
    say. It is called before any process group or model is built."""
    if run.rollout == "vllm" and not util.find_spec("vllm"):
        raise UserError("--rollout vllm: needs vllm, see README.md")
    size = run.vllm.tensor_parallel_size
    if WORLD_SIZE % size:
        raise UserError(f"--vllm.tensor-parallel-size {size}: must divide the {WORLD_SIZE} ranks")
    critic_fsdp.check_layout(run.actor, WORLD_SIZE)
    critic_module(run.backend).check_layout(run.critic, WORLD_SIZE)


# ---- The user's functions: Pebble calls them in processes of their own ---------------------------

CALLS = 8  # at a time, on any number of cores: a row may wait for an answer from elsewhere
POOLS = {}  # a user's file -> the processes that call its functions

# what functions get by the names of their parameters, see facts_of; the first three by any name
MAIN_FACTS = ("prompt", "response", "answer")
FACTS = (*MAIN_FACTS, "messages", "turns", "truncated", "tokens", "row", "rows")


class Worker(LokyProcess):
    """A process that calls functions. The programs that they have started end with it, also if it
    dies by itself: they are one group, see begin_process."""

    def terminate(self):
        self.end_programs()
        super().terminate()

    def is_alive(self):
        alive = super().is_alive()
        if not alive:
            self.end_programs()
        return alive

    def end_programs(self):
        with suppress(OSError):  # the group has ended, or has not begun
            os.killpg(self.pid, signal.SIGKILL)


class Workers(LokyContext):
    """Starts them without an import of this file, which takes ten seconds."""

    Process = Worker


class UserFunction(NamedTuple):
    """FUNCTION of a user's file. A row that hangs or kills its process fails alone."""

    path: str  # of the file; "": the function is one of this process
    function: Any  # or its name in the file
    seconds: float  # that a call may take; 0: no limit, it runs in this process
    plan: tuple = ()  # see plan_of

    def schedule(self, use, *args, timeout=None):
        """attempt(path, function, use, *args) as a future."""
        if self.seconds == 0:
            future = Future()
            future.set_result(attempt(self.path, self.function, use, *args))
            return future

        # what they run of this file is sent by value
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        pool = POOLS.get(self.path)
        if pool is None or not pool.active:  # a process that dies between two rows may break it
            pool = ProcessPool(CALLS, 0, begin_process, (self.path,), Workers())
            POOLS[self.path] = pool
        wrapped = wrap_non_picklable_objects(partial(attempt, self.path, self.function, use))
        return pool.schedule(wrapped, args, timeout=timeout)


def load_function(name, flag, seconds):
    """A built-in reward, or FUNCTION of FILE.py as a UserFunction. UserError: the file or the name
    is wrong."""
    if not name or name in REWARDS:
        return REWARDS.get(name)
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        built_in = f", or {' or '.join(REWARDS)}" if flag == "--reward" else ""
        raise UserError(f"{flag} {name}: must be FILE.py:FUNCTION{built_in}")

    # absolute, because the user's code may change the directory
    loaded = UserFunction(os.path.abspath(path), function, seconds)
    with blame(f"{flag} {name}: a process that imports the file dies"):
        # ten minutes, because a process that ends with status 0 is started again and again
        plan, wrong = loaded.schedule(plan_of).result(600)
    if wrong:
        raise UserError(f"{flag} {name}: {wrong}")

    # in words, as in score(prompt, r=response)
    by_place, by_name = plan
    words = [*by_place, *(x if x == fact else f"{x}={fact}" for x, fact in by_name.items())]
    lists = ", lists over rows" if "rows" in by_name else ""
    print0(f"calls      {flag} {function}({', '.join(words)}){lists}")
    return loaded._replace(plan=plan)


def begin_process(path):
    """The first thing that a process does. The import of the user's file is not part of a row's
    time."""
    # it leads a group, to which the programs that a function starts belong; functions start and end
    # processes as anywhere else
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    multiprocessing.set_start_method(None, force=True)

    # if the rank is killed, its processes die even in a row that hangs
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    # what a function prints is not lost when the process is killed
    sys.stdout.reconfigure(line_buffering=True)
    with suppress(BaseException):  # load_function says what is wrong
        import_file(path)


def end_workers():
    """Ends the processes and the programs that they have started."""
    for pool in POOLS.values():
        pool.stop()
        sleep(2 * CONSTS.sleep_unit)  # until Pebble starts no process in place of one that ends

    # before its locks are gone, which a process that has just been started would look for
    for process in multiprocessing.active_children():
        if isinstance(process, Worker):
            process.terminate()
    for pool in POOLS.values():
        pool.join()


def interrupted(*_):
    """Ends this process, by Ctrl-C, and its worker processes."""
    end_workers()
    common.interrupted()


def plan_of(function):
    """How to call a function -> (FACTS that it gets by position, {parameter: FACT}). ValueError:
    it is made for another tool."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    if {"solution_str", "queries", "completions"} & signature.parameters.keys():
        raise ValueError(
            "made for verl, OpenRLHF or TRL: see the adapters in tests/loop/rewards.py"
        )

    # with *parameters, or some without a name, the first three are given by position
    by_place = []
    if any(x.kind in (x.POSITIONAL_ONLY, x.VAR_POSITIONAL) for x in parameters):
        by_place = [*MAIN_FACTS]
    free = [x for x in parameters if x.name not in signature.bind_partial(*by_place).arguments]

    # the others get what they name, or what is left of prompt, response and answer, in this order
    names = [x.name for x in free if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    by_name = {x: x for x in names if x in FACTS}
    left = [x for x in MAIN_FACTS if x not in by_place and x not in by_name]
    others = [x for x in names if x not in FACTS]
    if len(others) >= len(left):
        by_name |= zip(others, left)
    return by_place, by_name


def facts_of(reply):
    """What a function may get of a row, by name; with `rows`, it gets lists of all this, and is
    called once for all rows."""
    prompt = reply.prompt
    row = prompt.row or {}
    return {
        "prompt": prompt.text,
        "response": reply.text,
        "answer": prompt.answer,
        "messages": prompt.messages,
        "turns": reply.turns,
        "truncated": not reply.finished,
        "tokens": reply.ids,
        "row": row,
        "rows": row,
    }


def call_of(plan, replies):
    """One call for these rows -> (arguments by position, by name, number of rows of a batch)."""
    by_place, by_name = plan
    facts = [facts_of(reply) for reply in replies]
    rows = len(facts) if "rows" in by_name else 0

    gets = facts[0]
    if rows:
        gets = {name: [row[name] for row in facts] for name in FACTS}
    return [gets[x] for x in by_place], {x: gets[fact] for x, fact in by_name.items()}, rows


def ask_all(function, replies):
    """What the function says to each reply, in order, as (its result, "") or (None, what went
    wrong); once the run is to stop, only for some. A function without a file runs in this
    process."""
    if not isinstance(function, UserFunction):
        function = UserFunction("", function, 0.0, plan_of(function))
    batch = "rows" in function.plan[1]

    # one call for all rows, or one for each
    futures = []
    for group in [replies] if batch else [[reply] for reply in replies]:
        if group and not Stop.signal:
            call = call_of(function.plan, group)
            future = function.schedule(result_of, *call, timeout=function.seconds)
            futures.append((future, POOLS.get(function.path)))
    for future, pool in progress(futures, "functions", "rows"):
        while not future.done() and not Stop.signal:
            wait([future], 0.5)
            if not pool.active:  # a row that comes just as the pool breaks would wait for ever
                future.cancel()

    # a row that is cancelled ends together with its process
    answers = []
    for future, _ in futures:
        if Stop.signal and (future.cancel() or not future.done()):
            continue
        try:
            answers.append(future.result())
        except (CancelledError, TimeoutError, ProcessExpired, BrokenProcessPool):
            limit = f"{function.seconds:g} s (--reward-timeout)"
            answers.append((None, f"no answer within {limit}, or its process has died"))
    if batch:
        return [(x, fault) for made, fault in answers for x in made or [None] * len(replies)]
    return answers


def attempt(path, function, use, *args):
    """-> (use(function, *args), ""), or (None, what went wrong). With a path, the function is a
    name in this file."""
    process = os.getpid()
    try:
        if path:
            function = getattr(import_file(path), function)
        answer = use(function, *args), ""
    except BaseException as error:  # sys.exit, too, fails the row and not the run
        module = sys.modules.get(getattr(function, "__module__", None))
        answer = None, words_of(error, getattr(module, "__file__", path))

    # a child that the function forks may come here, too: it answers nothing
    if os.getpid() != process:
        os._exit(1 if answer[1] else 0)
    return answer


def result_of(function, args, named, rows):
    """Calls the function, and awaits it if it is async -> what it returns, see plain. rows: of how
    many it must return a list of results; 0: of one."""
    made = function(*args, **named)
    # all rows of a process share one loop, so a client may be made once
    if inspect.isawaitable(made):
        made = asyncio.get_event_loop().run_until_complete(made)

    if rows:
        made = list(made)
        if len(made) != rows:
            raise ValueError(f"{len(made)} results for {rows} rows")
    return plain(made)


def import_file(path):
    """The file as a module of its own name, next to its neighbours, as if Python ran it."""
    folder, file = os.path.split(path)
    name = file.removesuffix(".py")
    if name not in sys.modules:
        sys.path.insert(0, folder)
        asyncio.set_event_loop(asyncio.new_event_loop())

    module = import_module(name)
    if module.__file__ != path:
        raise ImportError(f"{name} is the name of another module, {module.__file__}")
    return module


def plain(made):
    """What a function has returned in exact str, float, None, list and dict: the rank cannot
    unpickle the user's classes."""
    if isinstance(made, dict):
        chat = partial(json.dumps, ensure_ascii=False)  # whose numbers stay as they are
        read = {"messages": chat, "tools": chat}
        return {str.__str__(name): read.get(name, plain)(x) for name, x in made.items()}
    if isinstance(made, str):
        return str.__str__(made)

    # an array or a tensor of one number counts as this number
    array = getattr(made, "ndim", 0) > 0
    if array and len(made) == 1:
        return plain(made[0])
    if array or isinstance(made, list | tuple):
        return [plain(x) for x in made]
    return None if made is None else float(made)


def words_of(error, file):
    """The error in one line, with the deepest line of the user's file: what it calls in libraries
    is rarely at fault."""
    told = traceback.TracebackException.from_exception(error)
    place = ""
    for frame in told.stack:
        if frame.filename == file:
            place = f" at {os.path.basename(file)}:{frame.lineno} in {frame.name}"
    return f"{type(error).__name__}: {' '.join(str(told).split()):.300}{place}"


if __name__ == "__main__":
    common.launch(start)
