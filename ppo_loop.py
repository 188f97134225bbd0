"""PPO for language models, end to end, with the critic of your choice.

    python ppo_loop.py                              a tiny actor learns to add, on a laptop CPU: two minutes
    torchrun --nproc-per-node 2 ppo_loop.py         the same on two ranks: the same numbers
    torchrun --nproc-per-node 4 ppo_loop.py --critic megatron --critic.tensor-model-parallel-size 2 \\
        --critic.pipeline-model-parallel-size 2     its critic on Megatron-Core, laid out as it likes
    torchrun --nproc-per-node 8 ppo_loop.py --actor.model Qwen/Qwen2.5-0.5B-Instruct \\
        --prompts gsm8k/train.jsonl --eval-prompts gsm8k/test.jsonl --prompt-key question --chat \\
        --reward gsm8k --max-response-length 512
    python ppo_loop.py --help                             every flag; the critic's own are under --critic.

Rollout, reward, reference, values, advantages, critic, actor, sync: main() at the end is the algorithm, the
rest is what it calls. Actor and reference are Hugging Face models on FSDP2; the critic is the CriticWorker of
critic_fsdp.py or critic_megatron.py, with its own model, layout and batches. Copy this file with those and
common.py.

Shapes are in the names: T tokens, sequences end to end; A actions (tokens the policy chose); B sequences; V
vocabulary; D hidden features; R responses' tokens.
"""

import contextlib
import copy
import dataclasses
import datetime
import functools
import importlib
import itertools
import json
import math
import os
import pathlib
import random
import re
import runpy
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import pydantic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import tyro
from pydantic import Field
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, TopPLogitsWarper
from transformers.core_model_loading import revert_weight_conversion

import common
from common import Dispatch, UserError, print0, register

RANK = int(os.environ.get("RANK", 0))  # torchrun sets these; plain `python` is a world of one
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# ---- Config ------------------------------------------------------------------------------------------------

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class ActorConfig:
    """The policy that learns, and the frozen reference, which starts as the same model."""

    # model
    model: str = "tiny-qwen2"  # Hugging Face folder or hub name; tiny-qwen2, tiny-llama ...: random weights
    tokenizer: str | None = None  # Hugging Face folder or hub name (None: the model's own)
    override_config: str = "{}"  # JSON merged into the model's config, e.g. '{"num_hidden_layers": 4}'

    # layout, precision
    fsdp_size: int = -1  # ranks that share one copy of the weights; others hold replicas (-1: all share one)
    # dtype of matrix products (auto: bfloat16, but float32 on CPU)
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time

    # batches
    ppo_epochs: Positive = 1  # passes over the rows of one update
    ppo_mini_batch_size: Positive = 128  # rows of one optimizer step, over all ranks
    ppo_max_token_len_per_gpu: Positive = 16384  # tokens of a rank's micro-batch, a hard cap

    # loss
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 0.2  # PPO's clip range of the ratio, below 1
    clip_ratio_high: Rate = 0.2  # PPO's clip range of the ratio, above 1
    # dual clip: the most a bad action costs (None: off)
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = 3.0
    entropy_coeff: Weight = 0.0  # weight of the entropy bonus
    kl_loss_coef: Weight = 0.0  # weight of the KL to the reference in the loss (0: none)
    # how that KL is estimated (+: with the gradient of k2)
    kl_loss_type: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3"
    tis_cap: Rate | None = None  # weigh a token by pi_actor / pi_engine, at most this (None: no weighing)
    loss_agg_mode: AggMode = "token-mean"  # how token losses become one loss of the mini-batch

    # optimizer
    lr: Rate | None = None  # learning rate of AdamW (None: 5e-4 for the built-in task, 1e-6 otherwise)
    lr_warmup_steps: Count = 0  # optimizer steps of linear warm-up; the first is at lr / steps, not at 0
    weight_decay: Weight = 0.01  # decoupled, on every weight
    grad_clip: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the whole gradient (inf: no clipping)


@dataclass(frozen=True)
class VLLMConfig:
    """The engine of --rollout vllm."""

    tensor_parallel_size: Positive = 1  # ranks that share one engine and its copy of the actor
    # part of a device's memory that it takes while awake
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    sleep_level: Literal[1, 2] = 1  # with --offload its weights wait on the host (1), or are dropped (2)


CriticConfig = TypeVar("CriticConfig")  # of the script that --critic names


@dataclass(frozen=True)
class Run(Generic[CriticConfig]):
    """Trains a policy by PPO, evaluates it, saves it as a checkpoint and a Hugging Face folder."""

    critic: Annotated[CriticConfig, tyro.conf.arg(name="critic")]
    actor: ActorConfig = ActorConfig()
    vllm: VLLMConfig = VLLMConfig()
    # whose flags are --critic.*
    backend: Annotated[Literal["fsdp", "megatron"], tyro.conf.arg(name="critic")] = "fsdp"

    # task
    prompts: str | None = None  # JSONL (None: the built-in addition)
    eval_prompts: str | None = None  # JSONL to evaluate on (None: no evaluation; addition has its own)
    prompt_key: str = "prompt"  # where a row has its prompt: text, or a list of chat messages
    answer_key: str = "answer"  # where it has the reference answer, which reward functions get
    chat: bool = False  # send a text prompt through the tokenizer's chat template, as a user's message
    max_prompt_length: Positive = 1024  # longer prompts, in tokens, are left out and counted
    supervised_steps: Count = 250  # addition with a tiny-* actor: steps of supervised learning before PPO

    # reward
    # addition, gsm8k or FILE.py:FUNCTION, called as f(prompt, response, answer) -> number
    reward: str | None = None
    # folder or hub name of a reward model instead (one label, on the last token)
    reward_model: str | None = None
    # seconds for the reward or environment of a row
    reward_timeout: Annotated[float, Field(gt=0, le=1e6)] = 10.0
    # FILE.py:FUNCTION, f(prompt, response, answer) -> what follows the turn, or None
    environment: str | None = None
    max_turns: Positive = 8  # turns of the policy in one row, if there is an environment

    # rollout
    # engine: transformers' generate on a whole copy of the actor, or vLLM
    rollout: Literal["hf", "vllm"] = "hf"
    train_batch_size: Positive = 256  # prompts of a step, over all ranks
    rollout_n: Positive = 1  # responses to each (torchrun would take --n for its own)
    max_response_length: Positive | None = None  # tokens, with observations (None: 8 for addition, else 256)
    temperature: Rate = 1.0  # of sampling, and of the log-probs that are learned from
    # sample only from the likeliest tokens with this probability
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    rollout_batch_size: Positive = 256  # rows generated at once by an engine
    dump_rollouts: bool = False  # write every step's rows as JSONL to out_dir/rollouts

    # advantages
    gamma: Fraction = 1.0  # discount of a reward per action
    lam: Fraction = 1.0  # GAE's lambda for the returns that the critic learns
    lam_policy: Fraction | None = None  # GAE's lambda for the advantages (None: as lam): decoupled GAE
    whiten_advantages: bool = True  # give advantages mean 0 and deviation 1 over the global batch
    bootstrap_truncated: bool = False  # the last value stands for the future of a row that was cut off

    # KL to the reference in the reward
    kl_coef: Weight = 0.0  # cost of a nat, token by token (0: nothing)
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = "k1"  # how it is estimated
    target_kl: Rate | None = None  # adapt kl_coef so that the KL of a token stays near this (None: fixed)

    # run
    steps: Positive = 100  # PPO steps
    critic_warmup: Count = 0  # first steps, in which the critic alone learns
    eval_every: Count = 20  # steps between evaluations (0: only at the start and the end)
    save_every: Count = 0  # steps between checkpoints (0: only at the end)
    keep: Positive | None = None  # how many of the last checkpoints to keep (None: all)
    async_save: bool = False  # write checkpoints in the background, from a copy of the state on the host
    resume: str | None = None  # checkpoint folder to continue from; auto: the last complete one in out_dir
    offload: bool = False  # keep every model on the device in its own phases only
    seed: Count = 0  # of the order of prompts, of every shuffle and of every sampled token
    profile_steps: Annotated[str, Field(pattern=r"^\d+:\d+$")] | None = None  # A:B, steps for torch.profiler
    out_dir: str = "out/ppo_loop"  # for checkpoints, the Hugging Face folders, metrics and the report

    def evaluates(self, step):
        """Whether the run evaluates after this many steps."""
        return step in (0, self.steps) or bool(self.eval_every and step % self.eval_every == 0)


def parse(args):
    """Run from the command line. --critic is looked up first: it says which flags are behind --critic.*."""
    backend = "megatron" if re.search(r"--critic[ =]megatron", " ".join(args)) else "fsdp"
    config = critic_module(backend).Config
    default = Run(critic=config(model="actor", ppo_mini_batch_size=ActorConfig.ppo_mini_batch_size))
    return tyro.cli(Run[config], default=default, description=__doc__, args=args, console_outputs=RANK == 0)


def critic_module(backend):
    """critic_fsdp or critic_megatron, imported only if it is asked for."""
    return importlib.import_module(f"critic_{backend}")


@contextlib.contextmanager
def flags_of(part):
    """A UserError from in here names flags as this script knows them: --lr of the actor is --actor.lr."""
    try:
        yield
    except UserError as error:
        own = re.sub(r"(?<!\S)--(?!resume|out-dir|nproc)(?=[a-z])", f"--{part}.", str(error))
        raise UserError(own) from None


def check_flags(run):
    """Raises UserError for flags that cannot work, before a process group or a model is built."""
    try:
        pydantic.TypeAdapter(Run).validate_python(dataclasses.asdict(run))
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"])).replace("_", "-")
        message = fault["msg"].replace("Input should be", "must be")
        raise UserError(f"--{name} {fault['input']}: {message}") from None
    shards = run.actor.fsdp_size
    rules = {
        "--target-kl: adapts --kl-coef, so give it a value above 0": not run.target_kl or run.kl_coef,
        "--eval-prompts: needs --prompts; addition has its own": run.prompts or not run.eval_prompts,
        "--reward, --reward-model: --prompts needs one": not run.prompts or run.reward or run.reward_model,
        "--reward, --reward-model: give one of them": not (run.reward and run.reward_model),
        f"--actor.fsdp-size {shards}: must divide the {WORLD_SIZE} ranks, or be -1":
            shards == -1 or shards > 0 and WORLD_SIZE % shards == 0,
        f"--vllm.tensor-parallel-size: must divide the {WORLD_SIZE} ranks":
            WORLD_SIZE % run.vllm.tensor_parallel_size == 0,
        "--critic.ppo-max-token-len-per-gpu auto: leaves the actor nothing; add --offload, or give auto:GIB":
            run.offload or run.critic.ppo_max_token_len_per_gpu != "auto",
    }  # fmt: skip
    for words, holds in rules.items():
        if not holds:
            raise UserError(words)
    with flags_of("critic"):
        if mistake := critic_module(run.backend).mistake_in(run.critic):
            raise UserError(mistake)


# ---- Task: prompts, rewards, environment -------------------------------------------------------------------


class Prompt(NamedTuple):
    ids: list  # tokens that the response follows
    text: str  # for the user's functions: as the row has it, of chat messages the last content
    answer: Any  # the row's reference answer, None if it has none
    messages: list | None = None  # of a chat


class Task(NamedTuple):
    """What is to be learned."""

    tokenizer: Any  # of the actor
    model_config: Any
    prompts: list
    held_out: list  # prompts to evaluate on, may be none
    reward: Any  # f(prompt, response, answer), or None: there is a reward model
    observe: Any  # the environment, or None
    stop_ids: list  # tokens that end a turn
    longest: int  # most tokens of a prompt with its response


def addition_prompts(n, seed, tokenizer, held_out=False):
    """n additions of two numbers of two digits; the prompts of the toy, with the same ones held out."""
    texts = dict.fromkeys(json.loads(row)["prompt"] for row in common.toy_rows(n, seed, held_out))
    answers = [str(sum(map(int, text.rstrip("=").split("+")))) for text in texts]
    return [Prompt(tokenizer(text)["input_ids"], text, answer) for text, answer in zip(texts, answers)]


def load_prompts(path, flag, run, tokenizer):
    """Prompts of a JSONL file, without those that are too long. UserError names the first bad row."""
    prompts = []
    with common.blame(f"{flag} {path}"), open(path, "rb") as file:
        lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    for number, line in common.progress(lines, "prompts"):
        with common.blame(f"{flag} {path}:{number}"):
            prompts.append(parse_prompt(json.loads(line), run, tokenizer))
    short = [prompt for prompt in prompts if len(prompt.ids) <= run.max_prompt_length]
    if len(short) < len(prompts):
        print0(f"{flag} {path}: left out {len(prompts) - len(short)} prompts above --max-prompt-length")
    if not short:
        raise UserError(f"{flag} {path}: no usable prompt")
    return short


def parse_prompt(row, run, tokenizer):
    """A row, a dict -> Prompt. An exception says what is wrong with it."""
    if run.prompt_key not in row:
        raise ValueError(f"has no {run.prompt_key!r}, only {', '.join(sorted(row))}; see --prompt-key")
    prompt = row[run.prompt_key]
    answer = row.get(run.answer_key)
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    text = messages[-1]["content"]
    if isinstance(text, list):  # parts of a message
        text = "".join(part.get("text", "") for part in text)
    if run.chat or messages is prompt:
        ids = common.chat_ids(tokenizer, messages)
    else:
        ids = tokenizer(text)["input_ids"]
        messages = None
    if not ids:
        raise ValueError("empty prompt")
    if run.reward in REWARDS and not REWARDS[run.reward](text, answer, answer):
        raise ValueError(f"{run.answer_key!r} is not an answer that --reward {run.reward} can compare with")
    return Prompt(ids, text, answer, messages)


def addition_reward(prompt, response, answer):
    """1 for the right sum and nothing else."""
    return float(response == answer)


def gsm8k_reward(prompt, response, answer):
    """1 if the number after the last #### is the answer's (GSM8K's own rule, 2110.14168)."""
    found = [re.findall(r"####\s*(?:\$\s*)?(-?\$?[\d,]*\.?\d+)", text) for text in (response, answer)]
    ours, theirs = (float(re.sub("[$,]", "", numbers[-1])) if numbers else None for numbers in found)
    return float(ours is not None and ours == theirs)


REWARDS = {"addition": addition_reward, "gsm8k": gsm8k_reward}


def load_function(name, flag):
    """A built-in reward, or FUNCTION of FILE.py, whose code is run."""
    if name in REWARDS:
        return REWARDS[name]
    path, _, function = name.rpartition(":")
    with common.blame(f"{flag} {name}: must be FILE.py:FUNCTION, or one of {', '.join(REWARDS)}"):
        return runpy.run_path(path)[function]


class TookTooLong(BaseException):
    """Not an Exception: a function that catches those must not swallow it."""


def guarded(function, seconds, *args):
    """(its result, "") or (None, what went wrong). The alarm rings in Python code: a call into C is waited
    for."""

    def ring(*_):
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return function(*args), ""
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TookTooLong:
        return None, f"timeout: took longer than {seconds:g} s"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit, asyncio.CancelledError: the row's fault, not the run's
        return None, f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
    finally:
        signal.signal(signal.SIGALRM, before)


def reward_of(function, seconds, prompt, text):
    """(a reward by rule as a float, "") or (0.0, what went wrong)."""
    made, fault = guarded(lambda: float(function(prompt.text, text, prompt.answer)), seconds)
    if not fault and not abs(made) <= 1e15:
        fault = "the reward must be a finite number"
    return (0.0, fault) if fault else (made, "")


class RewardModel:
    """Scores whole rows: the one label of a sequence or token classifier, read on the last token.

    That is the value of the state after the last action, so a worker of the critic's script does the work.
    """

    def __init__(self, run, tokenizer):
        own = ("tokenizer", "override_config", "value_head", "value_range", "lora_rank", "freeze_layers")
        fields = {x.name: x.default for x in dataclasses.fields(run.critic) if x.name in own}
        fields |= {"model": run.reward_model, "value_head_init": "checkpoint"}
        try:
            self.worker = critic_module(run.backend).CriticWorker(dataclasses.replace(run.critic, **fields))
            self.worker.init_model(1)
        except UserError as error:
            words = str(error).removeprefix(f"--model {run.reward_model}: ")
            raise UserError(f"--reward-model {run.reward_model}: {words}") from None
        self.tokenizer = self.worker.tokenizer or tokenizer
        self.same_tokens = self.tokenizer.get_vocab() == tokenizer.get_vocab()
        self.offload = self.worker.offload
        self.onload = self.worker.onload

    def ids(self, prompt, text, ids):
        """The row as this model reads it: the policy's tokens if both have the same, else its own of the
        text."""
        if self.same_tokens:
            return ids
        if prompt.messages and self.tokenizer.chat_template:
            messages = [*prompt.messages, {"role": "assistant", "content": text}]
            return common.chat_ids(self.tokenizer, messages, add_generation_prompt=False)
        return self.tokenizer(prompt.text + text)["input_ids"]

    def scores(self, prompts, texts, batch):
        """Rewards of the caller's rows, a list (a collective)."""
        rows = zip(prompts, texts, batch.split(1))
        rows = [self.ids(prompt, text, row.input_ids.tolist()) for prompt, text, row in rows]
        lengths = torch.tensor([len(ids) + 1 for ids in rows], dtype=torch.int64)
        last = lengths.cumsum(0) - 1
        ids_T = torch.tensor([i for ids in rows for i in [*ids, 0]], dtype=torch.int64)
        mask_T = torch.zeros(len(ids_T), dtype=torch.bool)
        mask_T[last] = True  # one more token, whose place alone is read: the action whose state is the end
        whole = common.Batch(ids_T, common.cumulative(lengths), mask_T, batch.row_id, batch.truncated)
        with flags_of("critic"):  # the budget
            return self.worker.compute_values(whole)[last].tolist()


# ---- Policy maths ------------------------------------------------------------------------------------------


def policy_loss(log_probs_T, old_log_probs_T, advantages_T, response_mask_T, weights_T, clip_low=0.2,
                clip_high=0.2, clip_dual=None):  # fmt: skip
    """PPO's clipped objective -> (loss, actions where clipping decided, where the dual clip did), 0-dim
    tensors.

        r_t = pi(a_t) / pi_old(a_t),  L_t = max( -r_t A_t, -clip(r_t, 1 - low, 1 + high) A_t )
        loss = sum_t w_t L_t

    1707.06347, eq. 7; low and high apart: DAPO, 2503.14476, eq. 10. clip_dual c > 1 bounds what a bad action
    can cost: where A_t < 0, L_t is at most -c A_t (1912.09729, eq. 5). log r is kept within +-20. What stands
    where response_mask is false never enters, not even a NaN."""
    columns = (log_probs_T - old_log_probs_T, advantages_T)
    log_ratio_T, a_T = (torch.where(response_mask_T, x_T, 0.0) for x_T in columns)
    ratio_T = log_ratio_T.clamp(-20, 20).exp()
    free_T = -ratio_T * a_T
    clipped_T = -ratio_T.clamp(1 - clip_low, 1 + clip_high) * a_T
    loss_T = torch.maximum(free_T, clipped_T)
    bound_T = torch.where(a_T < 0, -(clip_dual or math.inf) * a_T, math.inf)
    loss = (weights_T * torch.minimum(loss_T, bound_T)).sum()
    return loss, (clipped_T > free_T).sum(), (loss_T > bound_T).sum()


def kl_penalty(log_probs_T, ref_log_probs_T, kind):
    """Per-token estimate of KL(policy || reference) from the log-probs of the chosen tokens.

        k1    log p - log q
        abs   |log p - log q|
        k2    (log p - log q)^2 / 2
        k3    q/p - 1 - log(q/p), with log(q/p) clamped to +-20 and the result to +-10
        k1+   and so on: that value, with the gradient of k2, which is the true gradient of the KL

    Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio_T = log_probs_T - ref_log_probs_T
    k2_T = 0.5 * log_ratio_T.square()
    if kind.endswith("+"):
        return kl_penalty(log_probs_T, ref_log_probs_T, kind[:-1]).detach() + k2_T - k2_T.detach()
    log_inverse_T = (-log_ratio_T).clamp(-20, 20)
    k3_T = (log_inverse_T.exp() - log_inverse_T - 1).clamp(-10, 10)
    return {"k1": log_ratio_T, "abs": log_ratio_T.abs(), "k2": k2_T, "k3": k3_T}[kind]


def next_kl_coef(coef, kl, n, target=None):
    """The KL coefficient after a batch of n rows with mean divergence kl (Ziegler et al. 1909.08593, sec.
    2.2).

    target None keeps it fixed; otherwise coef *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon. The
    horizon is the paper's 10,000 rows, or the n rows of a step if those are more: else coef could turn
    negative."""
    if target is None:
        return coef
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * n / max(10_000, n))


def masked_whiten(x_T, mask_T):
    """(x - mean) / std over the masked entries of all ranks together; zero elsewhere.

    The variance is the unbiased one, of n - 1, and 1e-8 is added to it; a single entry has variance 0.
    """

    def total(x):
        if dist.is_initialized():
            dist.all_reduce(x)
        return x

    x_T = torch.where(mask_T, x_T, 0.0).double()
    n = total(mask_T.sum()).clamp(min=1)
    centred_T = torch.where(mask_T, x_T - total(x_T.sum()) / n, 0.0)
    var = total(centred_T.square().sum()) / (n - 1).clamp(min=1)
    return (centred_T * torch.rsqrt(var + 1e-8)).float()


def add_advantages(batch, scores, kl_coef, run):
    """Fills token_level_rewards, advantages and returns of the caller's rows (a collective).

    The score of a row is earned by its last action; each action pays kl_coef for its KL to the reference. The
    critic learns returns of run.lam, the actor may use another lambda (decoupled GAE of VC-PPO, 2503.01491,
    sec. 4.2)."""
    kl_T = kl_penalty(batch.old_log_probs, batch.ref_log_probs, run.kl_penalty)
    rewards_T = -kl_coef * torch.where(batch.response_mask, kl_T, 0.0)
    batch.token_level_rewards = rewards_T.index_add(0, batch.last_action, torch.tensor(scores))
    common.add_returns(batch, run.gamma, run.lam, run.bootstrap_truncated)
    if run.lam_policy is not None:
        returns_T = batch.returns
        common.add_returns(batch, run.gamma, run.lam_policy, run.bootstrap_truncated)
        batch.returns = returns_T
    if run.whiten_advantages:
        batch.advantages = masked_whiten(batch.advantages, batch.response_mask)


# ---- Rollout: an engine makes tokens, a batch comes of them ------------------------------------------------


class Draw(LogitsProcessor):
    """Chooses each row's next token by its own random numbers u_BR, and leaves generate no other choice."""

    def __init__(self, u_BR, temperature, top_p):
        self.u_BR = u_BR
        self.temperature = temperature  # 0: greedy
        self.nucleus = TopPLogitsWarper(top_p)
        self.log_probs = []  # (B,) of each step's tokens, as they were drawn

    def __call__(self, ids_BL, logits_BV):
        log_p_BV = (logits_BV.float() / (self.temperature or 1.0)).log_softmax(-1)
        # inverse of the distribution function: one number a token, the same on every device
        if self.temperature:
            log_p_BV = self.nucleus(ids_BL, log_p_BV).log_softmax(-1)
            cdf_BV = log_p_BV.double().exp().cumsum(-1)
            u_B1 = self.u_BR[:, len(self.log_probs), None] * cdf_BV[:, -1:]
            chosen_B1 = torch.searchsorted(cdf_BV, u_B1, right=True).clamp(max=cdf_BV.shape[1] - 1)
        else:
            chosen_B1 = log_p_BV.argmax(-1, keepdim=True)
        self.log_probs.append(log_p_BV.gather(1, chosen_B1)[:, 0])
        return torch.full_like(logits_BV, -math.inf).scatter(1, chosen_B1, 0.0)


class HFRollout:
    """Generates with transformers on a whole copy of the policy, each rank for the rows it owns.

    Every row draws its own random numbers from its key alone, so it gives the same sample in any batch and on
    any number of ranks, up to rounding."""

    def __init__(self, run, task, device):
        self.run = run
        self.stop_ids = task.stop_ids
        self.device = device
        self.dtype = common.compute_dtype(run.actor.param_dtype, device)
        # sdpa would drop it
        capped = getattr(task.model_config.get_text_config(), "attn_logit_softcapping", None)
        options = {"attn_implementation": "eager" if capped else "sdpa", "dtype": self.dtype}
        with device:
            self.model = AutoModelForCausalLM.from_config(copy.deepcopy(task.model_config), **options).eval()
        self.weights = dict(self.model.named_parameters())
        self.model.generation_config = GenerationConfig(eos_token_id=task.stop_ids, pad_token_id=0)

    @torch.no_grad()
    def sync(self, weights):
        """Takes the actor's weights, (name, whole tensor) pairs in self.dtype."""
        for name, weight in weights:
            self.weights[name].copy_(weight)

    def offload(self):
        self.model.to("cpu")

    def onload(self):
        self.model.to(self.device)

    def generate(self, rows, temperature):
        """(token ids of a prompt, key of its random numbers, most new tokens) of each row -> for each (token
        ids, their log-probs as they were sampled, whether it ended by itself). temperature 0: greedy."""
        pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        size = self.run.rollout_batch_size
        replies = []
        for first in common.progress(range(0, len(rows), size), "rollout"):
            prompts, keys, room = zip(*rows[first : first + size])
            ids_BL = pad([torch.tensor(ids) for ids in prompts]).to(self.device)
            mask_BL = pad([torch.ones(len(ids)) for ids in prompts]).to(self.device)
            u_BR = torch.stack([uniform(key, max(room)) for key in keys]).to(self.device)
            draw = Draw(u_BR, temperature, self.run.top_p)
            options = {"max_new_tokens": max(room), "logits_processor": [draw]}
            out_BR = self.model.generate(ids_BL, attention_mask=mask_BL, **options)[:, ids_BL.shape[1] :]
            log_probs_BR = torch.stack(draw.log_probs, 1)
            for ids, log_probs, most in zip(out_BR.tolist(), log_probs_BR.tolist(), room):
                n = next((n for n, i in enumerate(ids[:most], 1) if i in self.stop_ids), None)
                replies.append((ids[: n or most], log_probs[: n or most], n is not None))
        return replies


def seed_of(key):
    """A number of 63 bits that follows from a string alone, on every machine."""
    return random.Random(key).getrandbits(63)


def uniform(key, n):
    """(n,) float64 numbers of [0, 1) that follow from the key."""
    return torch.rand(n, generator=torch.Generator().manual_seed(seed_of(key)), dtype=torch.float64)


class VLLMRollout:
    """Generates with vLLM in this process: an engine on each rank, or one on every
    --vllm.tensor-parallel-size ranks.

    It has the methods of HFRollout. vLLM finds the trainer's process group and makes its own groups of it; an
    engine that is deleted takes the trainer's group with it, so all live as long as the process."""

    engines = []

    def __init__(self, run, task, device):
        self.run = run
        self.stop_ids = task.stop_ids
        self.on_cpu = device.type == "cpu"
        self.dtype = common.compute_dtype(run.actor.param_dtype, device)
        size = run.vllm.tensor_parallel_size
        timeout = datetime.timedelta(minutes=run.critic.timeout_minutes)
        self.group, _ = dist.new_subgroups(size, timeout=timeout)  # neighbours, as vLLM has it
        with torch.device("meta"):  # it knows what a checkpoint calls its tensors
            self.skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(task.model_config))
        with as_before(), tempfile.TemporaryDirectory() as folder:
            model_config = copy.deepcopy(task.model_config)
            model_config.architectures = [type(self.skeleton).__name__]
            model_config.save_pretrained(folder)
            with common.blame(f"--rollout vllm: cannot run {run.actor.model}"):
                self.llm = self.start(folder, task.longest, size)
        self.engines.append(self.llm)
        print0(f"vllm       {WORLD_SIZE // size} engines x {size} ranks")

    def start(self, folder, longest, size):
        """vLLM's LLM, with random weights; folder: where it finds the model's config."""
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        for name, x in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, x)  # without torchrun
        from vllm import LLM
        from vllm.distributed import parallel_state
        from vllm.platforms import current_platform

        # its shared memory has one name in all runs of a machine, and stays: so it takes gloo
        if self.on_cpu:
            from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

            CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        llm = LLM(
            model=folder,
            load_format="dummy",  # the first sync fills it
            skip_tokenizer_init=True,
            generation_config="vllm",  # no defaults of the model's own
            dtype=self.dtype,
            max_model_len=longest,
            max_num_seqs=self.run.rollout_batch_size,
            gpu_memory_utilization=self.run.vllm.gpu_memory_utilization,
            kv_cache_memory_bytes=2**30
            if self.on_cpu
            else None,  # on CPU it would take its part of all memory
            enforce_eager=self.on_cpu,
            enable_sleep_mode=self.run.offload and current_platform.is_sleep_mode_available(),
            tensor_parallel_size=size,
            distributed_executor_backend="external_launcher",  # each torchrun process runs its own part
            logprobs_mode="processed_logprobs",  # of what is sampled from: after temperature and top-p
            seed=0,  # of nothing: requests bring their own
        )
        if size > 1:  # more shared memory, which nothing removes when common.launch ends the process
            parallel_state.get_tp_group().mq_broadcaster = None
        return llm

    def onload(self):
        """Wakes the weights. Only after a sync is there a cache, and something to generate with."""
        self.llm.wake_up(tags=["weights"])

    def offload(self):
        """Frees the device memory of the engine, where the platform can."""
        self.llm.sleep(level=self.run.vllm.sleep_level)

    def sync(self, weights):
        """Takes the actor's weights, (name, whole tensor) pairs in self.dtype, layer by layer; forgets cached
        keys and values, which were the old weights'. Every rank calls it, for gathering weights is a
        collective."""
        if self.on_cpu:
            self.llm.apply_model(forget_experts)
        stored = (revert_weight_conversion(self.skeleton, {name: weight}) for name, weight in weights)
        named = (pair for some in stored for pair in some.items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        if self.on_cpu:
            self.llm.apply_model(repack_head)
        if self.llm.llm_engine.is_sleeping():
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    def generate(self, rows, temperature):
        """HFRollout's. Ranks that share an engine call it together; each gets the replies to its own
        prompts."""
        from vllm import SamplingParams

        everyones = common.of_all_ranks(rows, self.group)
        before = sum(map(len, everyones[: dist.get_rank(self.group)]))
        asked = []
        params = []
        options = {"temperature": temperature, "top_p": self.run.top_p if temperature else 1.0, "logprobs": 0}
        options |= {"stop_token_ids": self.stop_ids, "ignore_eos": True, "detokenize": False}
        for ids, key, most in itertools.chain(*everyones):
            asked.append({"prompt_token_ids": ids})
            params.append(SamplingParams(seed=seed_of(key), max_tokens=most, **options))
        # on CPU the compiler takes longer than the rollout; and vLLM draws from torch's generator
        eager = torch.compiler.set_stance("force_eager") if self.on_cpu else contextlib.nullcontext()
        with eager, torch.random.fork_rng(devices=()):
            out = self.llm.generate(asked, params, use_tqdm=RANK == 0 and sys.stderr.isatty())
        replies = []
        for reply in [x.outputs[0] for x in out[before : before + len(rows)]]:
            log_probs = [at[token].logprob for at, token in zip(reply.logprobs, reply.token_ids)]
            replies.append((list(reply.token_ids), log_probs, reply.finish_reason == "stop"))
        return replies


def forget_experts(model):
    """Runs in vLLM's CPU build: experts are packed again only where they have no kernel yet."""
    for module in model.modules():
        if hasattr(module, "moe_kernel"):
            module.moe_kernel = None


def repack_head(model):
    """Runs in vLLM's CPU build: a head that is tied to the embeddings is a packed copy, and takes their
    weights again."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def as_before():
    """Undoes what vLLM does to torch's threads and random numbers when it starts."""
    threads = torch.get_num_threads()
    set_num_threads = torch.set_num_threads
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices), warnings.catch_warnings(action="ignore"):
        yield
    torch.set_num_threads = set_num_threads
    torch.set_num_threads(threads)


@dataclass
class Reply:
    """What followed a prompt: the policy's turns, and an environment's in between."""

    ids: list = field(default_factory=list)
    mask: list = field(default_factory=list)  # true on what the policy chose
    log_probs: list = field(default_factory=list)  # of the engine; 0 elsewhere
    finished: bool = False  # by the policy or the environment, not by the length limit
    text: str = ""
    fault: str = ""  # what went wrong in the environment

    def add(self, ids, log_probs=None):
        self.ids += ids
        self.mask += [log_probs is not None] * len(ids)
        self.log_probs += log_probs or [0.0] * len(ids)


def roll_out(engine, task, prompts, keys, run, temperature):
    """A Reply to each prompt. Every row depends on its key alone."""
    replies = [Reply() for _ in prompts]
    going = list(zip(prompts, keys, replies))
    for turn in range(run.max_turns if task.observe else 1):
        rows = []
        for prompt, key, reply in going:
            rows.append((prompt.ids + reply.ids, f"{key} {turn}", run.max_response_length - len(reply.ids)))
        out = engine.generate(rows, temperature)
        for (_, _, reply), (ids, log_probs, ended) in zip(going, out):
            reply.add(ids, log_probs)
            reply.finished = ended
            reply.text = task.tokenizer.decode(reply.ids, skip_special_tokens=True)
        if not task.observe or turn == run.max_turns - 1:
            break
        going = [row for row in going if goes_on(*row[::2], task, run)]
        if not any(common.of_all_ranks(bool(going))):
            break
    return replies


def goes_on(prompt, reply, task, run):
    """Asks the environment what follows a turn, and adds it to the reply -> whether the policy speaks
    again."""
    if not reply.finished:
        return False
    said, reply.fault = guarded(task.observe, run.reward_timeout, prompt.text, reply.text, prompt.answer)
    if said is not None and not isinstance(said, str):
        reply.fault = f"an environment answers with text or None, not {said!r:.40}"
    if said is None or reply.fault:
        return False
    said = said.encode(errors="replace").decode()  # half a surrogate pair is no text: "?" for it
    ids = task.tokenizer(said, add_special_tokens=False)["input_ids"]
    reply.finished = len(reply.ids) + len(ids) < run.max_response_length
    if reply.finished:
        reply.add(ids)
    return reply.finished


def to_batch(prompts, replies, row_ids):
    """Batch of prompts and replies, with the log-probs as the engine has them."""
    rows = []
    blank = (Prompt([0], "", None), Reply(), -1)  # a rank may have no rows, but has the same columns
    for prompt, reply, row_id in [blank, *zip(prompts, replies, row_ids)]:
        n = len(prompt.ids)
        rows.append(common.Batch(
            input_ids=torch.tensor(prompt.ids + reply.ids),
            cu_seqlens=torch.tensor([0, n + len(reply.ids)], dtype=torch.int32),
            response_mask=torch.tensor([False] * n + reply.mask),
            row_id=torch.tensor([row_id]),
            truncated=torch.tensor([not reply.finished]),
            rollout_log_probs=torch.tensor([0.0] * n + reply.log_probs),
        ))  # fmt: skip
    return common.concat(rows).select(range(1, len(rows)))


# ---- Actor and reference: a policy on FSDP2 ----------------------------------------------------------------

LOGITS_AT_ONCE = 2**25  # 128 MiB in float32


def log_probs_and_entropy(logits_of, hidden_AD, targets_A, vocab_size):
    """-> (A,) log-probs of the targets, (A,) entropies of their distributions, float32.

    logits_of: (C, D) -> (C, V). Never more than a chunk of logits is held: the backward pass computes each
    again."""

    def piece(hidden_CD, targets_C):
        log_p_CV = logits_of(hidden_CD).float().log_softmax(-1)
        return torch.stack(
            [log_p_CV.gather(1, targets_C[:, None])[:, 0], -(log_p_CV.exp() * log_p_CV).sum(-1)]
        )

    size = max(1, LOGITS_AT_ONCE // vocab_size)
    pieces = []
    for chunk in zip(hidden_AD.split(size), targets_A.split(size)):
        pieces.append(checkpoint(piece, *chunk, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(pieces, 1)


class Policy(nn.Module):
    """A causal language model that says how likely the actions of a packed row were."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, micro, temperature):
        """A micro-batch of T tokens -> (2, T) log-probs and entropies of its actions, zero elsewhere; each is
        read from the hidden state before the action."""
        lm = self.lm
        mask_T = micro.response_mask
        softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
        position_ids = torch.cat([torch.arange(n) for n in micro.lengths]).to(
            mask_T.device, non_blocking=True
        )
        common.Pack.layout = common.PackLayout(micro.lengths, mask_T.device)
        inputs = {"input_ids": micro.input_ids[None], "position_ids": position_ids[None], "use_cache": False}
        hidden_TD = lm.get_decoder()(**inputs).last_hidden_state[0]
        head = lm.get_output_embeddings()

        def logits_of(hidden_CD):
            logits_CV = head(hidden_CD).float()
            if softcap:
                logits_CV = softcap * torch.tanh(logits_CV / softcap)
            return logits_CV / temperature

        action_A = mask_T.nonzero()[:, 0]
        out_2A = log_probs_and_entropy(
            logits_of, hidden_TD[action_A - 1], micro.input_ids[action_A], len(head.weight)
        )
        return torch.zeros(2, len(mask_T), device=mask_T.device).index_copy(1, action_A, out_2A)


def free_gathered(model):
    """Frees the gathered weights that FSDP keeps after a forward, for a backward that may not come."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class PolicyWorker:
    """A policy spread over all ranks by FSDP2. Methods under DP_COMPUTE_PROTO take the rows a rank owns and
    work on the global batch, like the critic's; a reference has no optimizer."""

    def __init__(self, run, model_config, device, trains=True):
        self.run = run
        self.config = config = run.actor
        self.model_config = model_config
        self.device = device
        self.dtype = common.compute_dtype(config.param_dtype, device)
        name = f"--actor.model {config.model}"
        source = None
        options = {"attn_implementation": "packed", "dtype": torch.float32 if trains else self.dtype}
        with flags_of("actor"), common.blame(f"--model {config.model}: cannot be built"):
            if RANK == 0:
                lm, _ = common.load_model(AutoModelForCausalLM, config.model, model_config, run.seed)
                source = Policy(lm)
            with torch.device("meta"):
                model = Policy(AutoModelForCausalLM.from_config(copy.deepcopy(model_config), **options))
        if not model.lm._can_set_attn_implementation():
            raise UserError(f"{name}: brings its own attention, which knows no packed rows")
        if config.gradient_checkpointing and trains:
            model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.flops = common.flops_model(model, model_config)
        count = sum(p.numel() for p in model.parameters())
        print0(
            f"{'actor     ' if trains else 'reference '} {config.model} ({model_config.model_type}), "
            f"{count:,} parameters"
        )
        self.model = self.shard(model.requires_grad_(trains))
        common.send_weights(self.model, source)
        self.optimizer = None
        if trains:
            options = {"lr": config.lr, "weight_decay": config.weight_decay}
            self.optimizer = torch.optim.AdamW(model.parameters(), **options, fused=True)
            # as AdamW makes it at its first step, so that a checkpoint always has it
            for p in model.parameters():
                moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[p] = {"step": torch.zeros((), device=p.device), **moments}
        self.optimizer_steps = 0  # taken, skipped ones not counted
        self.updates = 0  # calls of update_policy: with seed and epoch the key of every shuffle

    def shard(self, model):
        """The model, which is on meta, on FSDP2 over all ranks, still without weights."""
        size = self.config.fsdp_size
        shape = (WORLD_SIZE,) if size in (-1, WORLD_SIZE) else (WORLD_SIZE // size, size)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for module in (*common.transformer_blocks(model), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        # an expert may have seen no token here, but some on another rank
        model.set_reduce_scatter_unused_params(True)
        model.to_empty(device=self.device)
        model.lm.tie_weights()  # to_empty made two of what is one
        return model

    @register(Dispatch.DP_COMPUTE_PROTO)
    @torch.no_grad()
    def compute_log_probs(self, batch):
        """Log-probs of the actions of the caller's rows at --temperature: (T,) float32, zero elsewhere."""
        self.model.eval()
        log_probs_T = torch.zeros(len(batch.input_ids), device=self.device)
        for rows in common.progress(self.my_micro_batches(batch), "log-probs"):
            out_T, _ = self.model(self.micro_batch(batch, rows), self.run.temperature)
            if rows:
                log_probs_T[batch.token_index(rows).to(self.device)] = out_T
        free_gathered(self.model)
        dist.all_reduce(log_probs_T)  # one rank computed each token; others add 0
        return log_probs_T.cpu()

    def my_micro_batches(self, batch):
        """This rank's rows of a global batch as lists of row indices, one list a micro-batch."""
        costs = [self.flops(n) for n in batch.lengths]
        split = critic_module(self.run.backend).micro_batches
        return split(batch.lengths, costs, WORLD_SIZE, self.config.ppo_max_token_len_per_gpu)[RANK]

    def micro_batch(self, batch, rows):
        """These rows on the device; no rows are one masked token, to keep in step with other ranks."""
        return (batch.select(rows) if rows else common.Batch.blank()).to(self.device)

    @register(
        Dispatch.DP_COMPUTE_PROTO, needs=("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
    )
    def update_policy(self, batch):
        """PPO epochs over mini-batches of the global batch, one optimizer step each -> metrics, equal on all
        ranks."""
        names = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss", "entropy")
        totals = torch.zeros(len(names) + 1, dtype=torch.float64, device=self.device)
        norms = []  # of the mini-batches, NaN where the step was skipped
        for epoch in range(self.config.ppo_epochs):
            shuffled = batch.shuffled(self.run.seed, self.updates, epoch)
            for mini in shuffled.split(self.config.ppo_mini_batch_size):
                norm, sums = self.step(mini)
                norms.append(norm)
                if math.isfinite(norm):
                    totals += sums
        self.updates += 1
        dist.all_reduce(totals)
        return common.update_metrics("actor", names, totals, norms, self.optimizer.param_groups[0]["lr"])

    def loss(self, micro, log_probs_T, entropy_T):
        """-> (what is minimised, 0-dim; sums over the actions, see update_policy)."""
        c = self.config
        mask_T = micro.response_mask
        weights_T = micro.weights
        # tokens were drawn from the engine's mu: rho of IMPALA, 1802.01561, section 4.1
        if c.tis_cap is not None:
            rho_T = (micro.old_log_probs - micro.rollout_log_probs).clamp(-20, 20).exp()
            weights_T = weights_T * rho_T.clamp(max=c.tis_cap)
        columns = (log_probs_T, micro.old_log_probs, micro.advantages, mask_T, weights_T)
        loss, clipped, dual = policy_loss(*columns, c.clip_ratio_low, c.clip_ratio_high, c.clip_ratio_c)
        ref_kl_T = kl_penalty(log_probs_T, micro.ref_log_probs, c.kl_loss_type)
        whole = loss + (micro.weights * (c.kl_loss_coef * ref_kl_T - c.entropy_coeff * entropy_T)).sum()
        kl = (micro.old_log_probs - log_probs_T).sum()
        return whole, [loss, clipped, dual, kl, ref_kl_T.sum(), entropy_T.sum(), mask_T.sum()]

    def step(self, mini):
        """One optimizer step on a global mini-batch -> (gradient norm before clipping, this rank's part of
        the sums).

        A norm that is not finite skips the step, on all ranks; so does a mini-batch without an action.
        """
        if not mini.response_mask.any():
            return math.nan, 0.0
        config = self.config
        mini.weights = common.loss_weights(mini, config.loss_agg_mode, self.run.max_response_length)
        self.model.train()
        total = 0.0
        for rows in self.my_micro_batches(mini):
            micro = self.micro_batch(mini, rows)
            loss, sums = self.loss(micro, *self.model(micro, self.run.temperature))
            # the loss is a sum over all ranks, but FSDP averages gradients over them
            (loss * WORLD_SIZE).backward()
            total += torch.stack(sums).detach()
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip).full_tensor())
        if math.isfinite(norm):
            warm = min(1.0, (self.optimizer_steps + 1) / max(config.lr_warmup_steps, 1))
            self.optimizer.param_groups[0]["lr"] = config.lr * warm
            self.optimizer.step()
            self.optimizer_steps += 1
        self.optimizer.zero_grad()
        return norm, total

    def weights(self, dtype=torch.float32):
        """(name, whole tensor) of each weight of the language model, one at a time, on every rank (a
        collective)."""
        for name, p in self.model.lm.named_parameters():
            yield name, p.detach().to(dtype).full_tensor()

    @register(Dispatch.ONE_TO_ALL)
    def offload(self):
        """Gives the device memory of weights and optimizer state to others."""
        self.move(torch.device("cpu"))

    @register(Dispatch.ONE_TO_ALL)
    def onload(self):
        """Takes it back."""
        self.move(self.device)

    def move(self, device):
        free_gathered(self.model)
        self.model.to(device)
        if self.optimizer is not None:
            common.move_state(self.optimizer, device)

    def checkpoint_tensors(self):
        """All state as one flat dict of tensors, which share the memory of the model and the optimizer."""
        tensors = {}
        for name, p in self.model.named_parameters():
            tensors[f"model.{name}"] = p.detach()
            tensors |= {f"optimizer.{name}.{key}": x for key, x in self.optimizer.state[p].items()}
        return tensors

    def checkpoint_writer(self, copy=False):
        """write(tmp, group): writes the state of now into a folder; with `copy` training may change it
        meanwhile."""
        tensors = self.checkpoint_tensors()
        if copy:
            tensors = DefaultStager(StagingOptions(False, False, False, False)).stage(tensors)
        state = {"backend": "actor", "updates": self.updates, "optimizer_steps": self.optimizer_steps}
        state["shape"] = common.shape_of(self.model_config)

        def write(tmp, group=None):
            dcp.save(
                tensors,
                storage_writer=HuggingFaceStorageWriter(tmp, save_distributed=True),
                process_group=group,
            )
            common.write_json(f"{tmp}/trainer.json", state)

        return write

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder):
        """Restores what checkpoint_writer wrote, on any world size. UserError: damaged or foreign."""
        saved = common.open_checkpoint(folder, ("actor",), common.shape_of(self.model_config))
        with common.blame(f"--resume {folder}: does not fit this actor"):
            dcp.load(self.checkpoint_tensors(), storage_reader=HuggingFaceStorageReader(folder))
        self.updates = saved["updates"]
        self.optimizer_steps = saved["optimizer_steps"]

    @register(Dispatch.ONE_TO_ALL)
    def export_hf(self, folder, tokenizer):
        """Writes the language model as a Hugging Face folder that AutoModelForCausalLM loads."""
        state = {}
        for name, weight in self.weights():  # every rank takes part, rank 0 keeps them, on the host
            if RANK == 0:
                state[name] = weight.cpu()
        with common.published(folder) as tmp:
            if RANK == 0:
                with torch.device("meta"):
                    skeleton = AutoModelForCausalLM.from_config(self.model_config, dtype=torch.float32)
                skeleton.generation_config = generation_config(self.config) or skeleton.generation_config
                skeleton.save_pretrained(tmp, state_dict=state)
                tokenizer.save_pretrained(tmp)


def generation_config(config):
    """generation_config.json of the model's folder, or None; not all stop tokens are in config.json."""
    if config.model not in common.TINY:
        with contextlib.suppress(OSError, ValueError):
            return GenerationConfig.from_pretrained(config.model)


def stop_tokens(config, tokenizer):
    """Ids that end a turn: the tokenizer's end of sequence, and those of the model's
    generation_config.json."""
    more = getattr(generation_config(config), "eos_token_id", None)
    return sorted({tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None})


# ---- The loop ----------------------------------------------------------------------------------------------


def learn_to_add(run, task, folder):
    """Supervised warm-up on a noisy adder, by rank 0 alone, so that PPO starts with an actor that is
    sometimes right.

    The adder errs in three of four sums that carry and in three of five others; none of its prompts is held
    out."""
    with common.published(folder) as tmp:
        if RANK == 0:
            torch.manual_seed(run.seed)
            model_config = copy.deepcopy(task.model_config)
            model_config.initializer_range = 0.1  # so narrow a model hardly moves away from the usual 0.02
            lm = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
            optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
            rows = common.read_rows(common.toy_rows(8192, run.seed, slips=(0.75, 0.6)), task.tokenizer)
            pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_value=-100)
            for step in common.progress(range(run.supervised_steps), "supervised"):
                batch = rows.select(common.rows_of_step(step, len(rows), 256, run.seed))
                labels_T = torch.where(batch.response_mask, batch.input_ids, -100)
                ids_BL, labels_BL = (pad(x_T.split(batch.lengths)) for x_T in (batch.input_ids, labels_T))
                loss = lm(input_ids=ids_BL.clamp(min=0), labels=labels_BL).loss
                loss.backward()
                nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            lm.save_pretrained(tmp)
            task.tokenizer.save_pretrained(tmp)
            print0(f"supervised {run.supervised_steps} steps x 256 rows, loss {loss:.3f}: {folder}")


def prompts_of_step(step, prompts, run):
    """(prompts, ids, keys) of this rank's rows of a step; neighbours share a prompt. From a row's key follow
    all random numbers of its response."""
    picked = common.rows_of_step(step, len(prompts), run.train_batch_size, run.seed)
    row_ids = range(RANK, len(picked) * run.rollout_n, WORLD_SIZE)
    mine = [prompts[picked[row // run.rollout_n]] for row in row_ids]
    return mine, row_ids, [f"{run.seed} {step} {row}" for row in row_ids]


class Phases:
    """`with phases("actor", actor):` times a phase, and with --offload has its workers, and no others, on the
    device."""

    def __init__(self, offload):
        self.offload = offload
        self.start = self.last = time.perf_counter()
        self.steps = 0
        self.seconds = {}  # of this step, by phase

    @contextlib.contextmanager
    def __call__(self, name, *workers):
        start = time.perf_counter()
        workers = [worker for worker in workers if worker and self.offload]
        for worker in workers:
            worker.onload()
        yield
        for worker in reversed(workers):
            worker.offload()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self, tokens):
        """Metrics on the time of the step that ends now, which made this many tokens."""
        now = time.perf_counter()
        self.steps += 1
        metrics = {f"time/{name}": x for name, x in self.seconds.items()}
        metrics["perf/time_step"] = (now - self.start) / self.steps
        metrics["perf/rollout_tokens_per_second"] = tokens / (now - self.last)
        self.last = now
        self.seconds = {}
        return metrics


def score(run, reward, phases, prompts, replies, batch):
    """Rewards of the caller's rows by rule or by model, a list (a collective). What went wrong is noted in a
    reply."""
    if isinstance(reward, RewardModel):
        with phases("reward", reward):
            return reward.scores(prompts, [reply.text for reply in replies], batch)
    scores = []
    with phases("reward"):
        for prompt, reply in zip(prompts, replies):
            made, fault = reward_of(reward, run.reward_timeout, prompt, reply.text)
            reply.fault = reply.fault or fault
            scores.append(made)
    return scores


def of_all_rows(rows):
    """Objects, one for each of the caller's rows -> those of all ranks (a collective); prints the first
    fault."""
    rows = [row for part in common.of_all_ranks(rows) for row in part]
    for row in rows:
        if row["fault"]:
            print0(f"a row failed and counts as 0: {row['fault']}")
            break
    return rows


def rollout_metrics(batch, scores, replies, run):
    """What a step's rows are like, over all ranks (a collective)."""
    rows = of_all_rows([{"reward": x, "fault": reply.fault} for x, reply in zip(scores, replies)])
    late = sum(row["fault"].startswith("timeout") for row in rows)
    rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float64)
    whole = common.gather(batch)
    mask_T = whole.response_mask
    off_A = (whole.rollout_log_probs - whole.old_log_probs)[mask_T]
    # what top_p left out made the rest likelier, by -log top_p at most; that much is no fault
    off_A = (off_A - off_A.clamp(0, -math.log(run.top_p))).abs()
    kl_A = kl_penalty(whole.old_log_probs, whole.ref_log_probs, run.kl_penalty)[mask_T]
    return {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(correction=0),
        "reward/errors": sum(bool(row["fault"]) for row in rows) - late,
        "reward/timeouts": late,
        "rollout/actions": len(off_A) / len(rows),
        "rollout/tokens": len(mask_T),
        "rollout/truncated": whole.truncated.double().mean(),
        "rollout/log_prob_diff": off_A.double().mean(),
        "rollout/log_prob_diff_max": off_A.max(),
        "kl/reference": float(kl_A.double().mean()) if run.kl_coef or run.actor.kl_loss_coef else math.nan,
    }


def evaluate(engine, task, run, reward, phases, step, logger):
    """Logs the rewards of greedy replies to held-out prompts, keeps eight in samples.jsonl and shows two."""
    row_ids = range(RANK, len(task.held_out), WORLD_SIZE)
    prompts = [task.held_out[row] for row in row_ids]
    replies = roll_out(engine, task, prompts, map(str, row_ids), run, temperature=0.0)
    scores = score(run, reward, phases, prompts, replies, to_batch(prompts, replies, row_ids))
    rows = []
    for prompt, reply, x in zip(prompts, replies, scores):
        row = {"prompt": prompt.text, "response": reply.text, "answer": prompt.answer, "reward": x}
        rows.append({"step": step, **row, "fault": reply.fault, "tokens": len(reply.ids)})
    rows = of_all_rows(rows)
    logger.log_samples(step, rows[:8])
    metrics = {
        "eval/reward": sum(row["reward"] for row in rows) / len(rows),
        "eval/accuracy": sum(row["reward"] >= 1 for row in rows) / len(rows),
        "eval/length": sum(row["tokens"] for row in rows) / len(rows),
        "eval/errors": sum(bool(row["fault"]) for row in rows),
    }
    logger.log(step, metrics)
    print0(f"held out   accuracy {metrics['eval/accuracy']:.3f}   reward {metrics['eval/reward']:.3f}")
    for row in rows[:2]:
        print0(f"  {row['prompt'][-60:]!r} -> {row['response'][-60:]!r}  reward {row['reward']:g}")


def print_step(step, steps, m):
    """One aligned line that tells how a step went, in units a person reads."""
    n = common.number
    left = datetime.timedelta(seconds=round(m["perf/time_step"] * (steps - step)))
    odd = {"reward errors": "reward/errors", "timeouts": "reward/timeouts", "skipped": "actor/skipped_steps"}
    odd = "".join(f"  {m[key]:.0f} {words}" for words, key in odd.items() if m.get(key))
    print0(
        f"step {step:>{len(str(steps))}}/{steps}  reward {m['reward/mean']:.3f}"
        f"  length {m['rollout/actions']:.1f}"
        f"  kl {n(m['kl/reference'], '.3f')}  entropy {n(m.get('actor/entropy'), '.3f')}"
        f"  clipped {n(m.get('actor/pg_clipfrac'), '.3f')}  |g| {n(m.get('actor/grad_norm'), '.2g'):>5}"
        f"  value loss {n(m['critic/vf_loss'], '.4f')}"
        f"  explained var {n(m['critic/explained_var'], '.2f'):>5}"
        f"  {m['perf/rollout_tokens_per_second']:>6,.0f} tok/s  eta {left}{odd}"
    )


CURVES = {  # panel -> metrics
    "reward": ("reward/mean", "eval/accuracy"),
    "how far the policy has moved": ("actor/entropy", "kl/reference"),
    "explained variance": ("critic/explained_var",),
}


def set_up(run):
    """(run with what follows from its task and its actor, the Task). UserError: flags, files or functions are
    wrong."""
    check_flags(run)
    addition = run.prompts is None
    actor = dataclasses.replace(run.actor, lr=run.actor.lr or (5e-4 if addition else 1e-6))
    with flags_of("actor"):
        tokenizer, model_config = common.load_config(actor)
    if tokenizer is None:
        raise UserError(f"--actor.tokenizer: {actor.model} has none, and prompts are text; give one")
    inherited = {"lr": run.critic.lr or (1e-3 if addition else None)}
    if run.critic.model == "actor":
        inherited |= {"model": actor.model, "tokenizer": run.critic.tokenizer or actor.tokenizer}
        if run.critic.override_config == "{}":
            inherited["override_config"] = actor.override_config
    run = dataclasses.replace(
        run,
        actor=actor,
        critic=dataclasses.replace(run.critic, **inherited),
        max_response_length=run.max_response_length or (8 if addition else 256),
        reward=run.reward or ("addition" if addition and not run.reward_model else None),
    )
    held_out = []
    if addition:
        prompts = addition_prompts(8192, run.seed, tokenizer)
        held_out = addition_prompts(512, run.seed, tokenizer, held_out=True)
    else:
        prompts = load_prompts(run.prompts, "--prompts", run, tokenizer)
        if run.eval_prompts:
            held_out = load_prompts(run.eval_prompts, "--eval-prompts", run, tokenizer)
    longest = max(len(prompt.ids) for prompt in prompts + held_out) + run.max_response_length
    row = "the longest prompt with its response"
    module = critic_module(run.backend)
    with flags_of("actor"):
        check_takes(actor.model, model_config, tokenizer, longest)
        if longest > actor.ppo_max_token_len_per_gpu:
            raise UserError(f"--ppo-max-token-len-per-gpu: {row} has {longest} tokens")
    with flags_of("critic"):
        _, critic_config = common.load_config(run.critic)
        module.check_model_flags(run.critic, critic_config)
        check_takes(run.critic.model, critic_config, tokenizer, longest)
        module.check_budget(run.critic, longest, row)
    reward = load_function(run.reward, "--reward") if run.reward else None
    observe = load_function(run.environment, "--environment") if run.environment else None
    print0(
        f"prompts    {len(prompts):,}, {len(held_out):,} held out; at most {longest} tokens with the response"
    )
    rows = run.train_batch_size * run.rollout_n
    print0(f"rollout    {run.train_batch_size} prompts x {run.rollout_n} responses = {rows} rows a step")
    stop_ids = stop_tokens(actor, tokenizer)
    return run, Task(tokenizer, model_config, prompts, held_out, reward, observe, stop_ids, longest)


def check_takes(model, model_config, tokenizer, longest):
    """UserError if a model cannot take rows of this many tokens, or does not know all of the actor's
    tokens."""
    row = common.Batch.blank(longest)
    row.input_ids[0] = max(tokenizer.get_vocab().values())
    with common.blame(f"--model {model}: does not go with these prompts"):
        common.check_rows(row, model_config)


def start_from(run, task, checkpoints):
    """(run whose actor starts from the supervised one, which a new run makes now; step and KL coefficient to
    go on with)."""
    folder = checkpoints.folder
    state = {"step": 0, "kl_coef": run.kl_coef}
    if folder:
        common.verify(f"{folder}/loop.json")
        saved = json.loads(pathlib.Path(folder, "loop.json").read_text())
        state["step"] = saved["step"]
        if run.target_kl:
            state["kl_coef"] = saved["kl_coef"]
        if saved["step"] > run.steps:
            raise UserError(f"--steps {run.steps}: {folder} has made {saved['step']} already; give more")
        print0(f"resume     {folder}, step {saved['step']}")
    if run.prompts is None and run.supervised_steps and run.actor.model in common.TINY:
        start = os.path.abspath(f"{folder}/../../supervised" if folder else f"{run.out_dir}/supervised")
        if not folder:
            learn_to_add(run, task, start)
        common.verify(start)
        fresh = {"model": start, "override_config": "{}"}
        critic = run.critic
        if (critic.model, critic.override_config) == (run.actor.model, run.actor.override_config):
            critic = dataclasses.replace(critic, **fresh)
        run = dataclasses.replace(run, actor=dataclasses.replace(run.actor, **fresh), critic=critic)
    return run, state["step"], state["kl_coef"]


def checkpoint_writer(run, step, kl_coef, actor, critic):
    """write(tmp, group) of the whole state. Prompts and samples follow from the step, and need none."""
    state = {"step": step, "kl_coef": kl_coef}
    writers = {
        "actor": actor.checkpoint_writer(run.async_save),
        "critic": critic.checkpoint_writer(run.async_save),
    }

    def write(tmp, group=None):
        for name, write_part in writers.items():
            os.makedirs(f"{tmp}/{name}", exist_ok=True)
            write_part(f"{tmp}/{name}", group)
        common.write_json(f"{tmp}/loop.json", state)

    return write


def build(run, task, device, checkpoints):
    """(actor, reference or None, critic, reward function or model, rollout engine without weights yet) on all
    ranks, from the checkpoint if the run is resumed. With --offload they are made one after another."""
    folder = checkpoints.folder
    reference = None
    reward = task.reward
    away = lambda worker: worker.offload() if run.offload else None
    actor = PolicyWorker(run, task.model_config, device)
    if folder:
        actor.load_checkpoint(f"{folder}/actor")
    away(actor)
    if run.kl_coef or run.actor.kl_loss_coef:
        reference = PolicyWorker(run, task.model_config, device, trains=False)
        away(reference)
    if run.reward_model:
        reward = RewardModel(run, task.tokenizer)
        away(reward)
    engine = (HFRollout if run.rollout == "hf" else VLLMRollout)(run, task, device)
    away(engine)
    with flags_of("critic"):  # the last, because it seeds torch's generator, or restores it
        critic = critic_module(run.backend).CriticWorker(run.critic)
        minis = math.ceil(run.train_batch_size * run.rollout_n / run.critic.ppo_mini_batch_size)
        critic.init_model(run.steps * run.critic.ppo_epochs * minis)
        if folder:
            critic.load_checkpoint(f"{folder}/critic")
        critic.set_budget(task.longest, "the longest prompt with its response", checkpoints.halvings)
        away(critic)
    return actor, reference, critic, reward, engine


def check_engine(run, metrics, engine):
    """UserError if engine and actor, which have the same weights, do not make the same of the first rows: two
    ways through a model, one of them with a cache and padding, the other packed."""
    off = metrics["rollout/log_prob_diff"]
    if not off < (1e-3 if engine.dtype == torch.float32 else 0.5):
        raise UserError(
            f"--actor.model {run.actor.model}: log-probs of the rollout are off the actor's by {off:.1e} a "
            "token; the model changes its logits in a way that Policy does not know, or rows see each other"
        )


def main(run):
    run, task = set_up(run)
    device = common.setup_distributed(run.critic.timeout_minutes)
    options = (run.out_dir, run.resume, run.keep, run.async_save, run.critic.timeout_minutes)
    with critic_module(run.backend).Checkpoints(*options) as checkpoints:
        run, first_step, kl_coef = start_from(run, task, checkpoints)
        actor, reference, critic, reward, engine = build(run, task, device, checkpoints)
        last_step = first_step if checkpoints.is_own else 0
        logger = common.Logger(run.out_dir, dataclasses.asdict(run), last_step, run.evaluates(first_step))
        phases = Phases(run.offload)
        skipped = 0
        for step in common.profiled(range(first_step, run.steps + 1), run.profile_steps, run.out_dir):
            last = step == run.steps
            stop = checkpoints.sigterm_received()
            if step > first_step and (last or stop or (run.save_every and step % run.save_every == 0)):
                with phases("checkpoint", actor, critic):
                    checkpoints.save(step, checkpoint_writer(run, step, kl_coef, actor, critic))
            checkpoints.wait(block=last or stop)
            if stop and not last:
                logger.close()
                checkpoints.leave(step)
            with phases("generation", engine):
                with phases("sync", actor):
                    engine.sync(actor.weights(engine.dtype))
                if task.held_out and run.evaluates(step):
                    evaluate(engine, task, run, reward, phases, step, logger)
                if last:
                    break
                prompts, row_ids, keys = prompts_of_step(step, task.prompts, run)
                replies = roll_out(engine, task, prompts, keys, run, run.temperature)
                batch = to_batch(prompts, replies, row_ids)
            scores = score(run, reward, phases, prompts, replies, batch)
            with phases("log_probs", actor):
                batch.old_log_probs = batch.ref_log_probs = actor.compute_log_probs(batch)
            if reference is not None:
                with phases("reference", reference):
                    batch.ref_log_probs = reference.compute_log_probs(batch)
            metrics = rollout_metrics(batch, scores, replies, run)
            if step == first_step:
                check_engine(run, metrics, engine)
            with phases("critic", critic):
                batch.values = critic.compute_values(batch)
                add_advantages(batch, scores, kl_coef, run)
                metrics |= critic.update_critic(batch) | {"kl/coef": kl_coef}
            if step >= run.critic_warmup:
                with phases("actor", actor):
                    metrics |= actor.update_policy(batch)
                rows = run.train_batch_size * run.rollout_n
                kl_coef = next_kl_coef(kl_coef, metrics["kl/reference"], rows, run.target_kl)
            skipped = common.count_skipped(skipped, metrics, batch, run.out_dir)
            if run.dump_rollouts:
                common.write_jsonl(batch, f"{run.out_dir}/rollouts/step_{step + 1}.jsonl")
            metrics |= phases.take(metrics["rollout/tokens"])
            logger.log(step + 1, metrics)
            print_step(step + 1, run.steps, metrics)
        logger.close()
        if first_step < run.steps:
            about = "rows of the last step"
            common.write_report(run.out_dir, common.gather(batch), about, task.tokenizer, run.gamma, CURVES)
        export(run, task, phases, actor, critic)


def export(run, task, phases, actor, critic):
    """Writes the Hugging Face folders of actor and critic."""
    with phases("export", actor, critic):
        actor.export_hf(f"{run.out_dir}/hf", task.tokenizer)
        critic.export_hf(f"{run.out_dir}/critic_hf")
    files = "hf, critic_hf, samples.jsonl, report.html, curves.png, metrics.jsonl, tensorboard"
    print0(f"saved      {run.out_dir}: checkpoints/step_{run.steps}, {files}")


if __name__ == "__main__":
    common.launch(lambda: main(parse(sys.argv[1:])))
