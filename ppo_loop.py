"""PPO for language models, end to end, with the critic of your choice.

    python ppo_loop.py                                    a tiny actor learns to add, on a laptop CPU: two minutes
    torchrun --nproc-per-node 2 ppo_loop.py               the same on two ranks: the same numbers
    torchrun --nproc-per-node 4 ppo_loop.py --critic megatron --critic.tensor-model-parallel-size 2 \\
        --critic.pipeline-model-parallel-size 2           its critic on Megatron-Core, laid out as it likes
    torchrun --nproc-per-node 8 ppo_loop.py --actor.model Qwen/Qwen2.5-0.5B-Instruct --prompts gsm8k/train.jsonl \\
        --eval-prompts gsm8k/test.jsonl --prompt-key question --chat --reward gsm8k --max-response-length 512
    python ppo_loop.py --help                             every flag; the critic's own are under --critic.

Rollout, reward, reference, values, advantages, critic, actor, sync: main() at the end is the algorithm, the rest is
what it calls. Actor and reference are Hugging Face models on FSDP2; the critic is the CriticWorker of critic_fsdp.py
or critic_megatron.py, with its own model, layout and batches. Copy this file with those and common.py.

Shapes are in the names: T tokens, sequences end to end; A actions (tokens the policy chose); B sequences; V
vocabulary; D hidden features.
"""

import contextlib
import copy
import dataclasses
import datetime
import functools
import gc
import importlib
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import numpy
import pydantic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import tyro
from pydantic import Field
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

import common
from common import RANK, WORLD_SIZE, Dispatch, UserError, print0, register

# ---- Config ------------------------------------------------------------------------------------------

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class ActorConfig:
    """The policy that learns, and the frozen reference, which starts as the same model."""

    # model
    model: str = "tiny-qwen2"  # Hugging Face folder or hub name; tiny-qwen2, tiny-llama ...: random weights
    tokenizer: str | None = None  # Hugging Face folder or hub name (None: the model's own)
    override_config: str = "{}"  # JSON merged into the model's config, e.g. '{"num_hidden_layers": 4}'
    trust_remote_code: bool = False  # run model code that comes with the checkpoint

    # layout, precision
    fsdp_size: int = -1  # ranks that share one copy of the weights; others hold replicas (-1: all share one)
    param_dtype: Literal["auto", "float32", "bfloat16"] = (
        "auto"  # of matrix products (auto: bfloat16; float32 on CPU)
    )
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time

    # batches
    ppo_epochs: Positive = 1  # passes over the rows of one update
    ppo_mini_batch_size: Positive = 128  # rows of one optimizer step, over all ranks
    ppo_max_token_len_per_gpu: Positive = 16384  # tokens of a rank's micro-batch, a hard cap

    # loss
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 0.2  # PPO's clip range of the ratio, below 1
    clip_ratio_high: Rate = 0.2  # PPO's clip range of the ratio, above 1
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = (
        3.0  # dual clip: bad actions cost at most this (None: off)
    )
    entropy_coeff: Weight = 0.0  # weight of the entropy bonus
    kl_loss_coef: Weight = 0.0  # weight of the KL to the reference in the loss (0: none)
    kl_loss_type: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = (
        "k3"  # its estimate (+: with the gradient of k2)
    )
    tis_cap: Rate | None = None  # weigh a token by pi_actor / pi_engine, at most this (None: no weighing)
    loss_agg_mode: Literal[common.LOSS_AGG_MODES] = (
        "token-mean"  # how token losses become one loss of the mini-batch
    )

    # optimizer
    lr: Rate | None = None  # learning rate of AdamW (None: 5e-4 for the built-in task, 1e-6 otherwise)
    lr_warmup_steps: Count = 0  # optimizer steps of linear warm-up; the first is at lr / steps, not at 0
    weight_decay: Weight = 0.01  # decoupled, on every weight
    grad_clip: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the whole gradient (inf: no clipping)


@dataclass(frozen=True)
class VLLMConfig:
    """The engine of --rollout vllm."""

    tensor_parallel_size: Positive = 1  # ranks that share one engine and its copy of the actor
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = (
        0.5  # part of a device's memory it takes while awake
    )
    sleep_level: Literal[1, 2] = 1  # with --offload its weights wait on the host (1), or are dropped (2)


CriticConfig = TypeVar("CriticConfig")  # of the script that --critic names


@dataclass(frozen=True)
class Run(Generic[CriticConfig]):
    """Trains a policy by PPO, evaluates it, saves it as a checkpoint and a Hugging Face folder."""

    critic: Annotated[CriticConfig, tyro.conf.arg(name="critic")]
    actor: ActorConfig = ActorConfig()
    vllm: VLLMConfig = VLLMConfig()
    backend: Annotated[Literal["fsdp", "megatron"], tyro.conf.arg(name="critic")] = (
        "fsdp"  # whose flags are --critic.*
    )

    # task
    prompts: str | None = None  # JSONL (None: the built-in addition)
    eval_prompts: str | None = None  # JSONL to evaluate on (None: no evaluation; addition has its own)
    prompt_key: str = "prompt"  # where a row has its prompt: text, or a list of chat messages
    answer_key: str = "answer"  # where it has the reference answer, which reward functions get
    chat: bool = False  # send a text prompt through the tokenizer's chat template, as a user's message
    max_prompt_length: Positive = 1024  # longer prompts, in tokens, are left out and counted
    supervised_steps: Count = 250  # addition with a tiny-* actor: steps of supervised learning before PPO

    # reward
    reward: str | None = (
        None  # addition, gsm8k or FILE.py:FUNCTION, called as f(prompt, response, answer) -> number
    )
    reward_model: str | None = (
        None  # folder or hub name of a reward model instead (one label, on the last token)
    )
    reward_timeout: Annotated[float, Field(gt=0, le=1e6)] = (
        10.0  # seconds a reward or environment may take for a row
    )
    environment: str | None = (
        None  # FILE.py:FUNCTION, f(prompt, response, answer) -> what follows the turn, or None
    )
    max_turns: Positive = 8  # turns of the policy in one row, if there is an environment

    # rollout
    rollout: Literal["hf", "vllm"] = "hf"  # engine: transformers' cache on a whole copy of the actor, or vLLM
    train_batch_size: Positive = 256  # prompts of a step, over all ranks
    rollout_n: Positive = 1  # responses to each (torchrun would take --n for its own)
    max_response_length: Positive | None = None  # tokens, with observations (None: 8 for addition, else 256)
    temperature: Rate = 1.0  # of sampling, and of the log-probs that are learned from
    top_p: Annotated[float, Field(gt=0, le=1)] = (
        1.0  # sample only from the likeliest tokens with this probability
    )
    rollout_batch_size: Positive = 256  # rows generated at once by an engine
    dump_rollouts: bool = False  # write every step's rows as JSONL to out_dir/rollouts

    # advantages
    gamma: Fraction = 1.0  # discount of a reward per action
    lam: Fraction = 1.0  # GAE's lambda for the returns that the critic learns
    lam_policy: Fraction | None = None  # GAE's lambda for the advantages (None: as lam): decoupled GAE
    length_adaptive_alpha: Rate | None = None  # instead of lam_policy: lambda is 1 - 1 / (alpha actions)
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
    eval_samples: Count = 0  # responses sampled for each prompt there (0: one, greedy)
    save_every: Count = 0  # steps between checkpoints (0: only at the end)
    keep: Positive | None = None  # how many of the last checkpoints to keep (None: all)
    async_save: bool = False  # write checkpoints in the background, from a copy of the state on the host
    resume: str | None = None  # checkpoint folder to continue from; auto: the last complete one in out_dir
    offload: bool = (
        False  # keep actor, reference, critic, reward model and engine on the device in their phases only
    )
    seed: Count = 0  # of the order of prompts, of every shuffle and of every sampled token
    profile_steps: Annotated[str, Field(pattern=r"^\d+:\d+$")] | None = (
        None  # A:B, steps to record with torch.profiler
    )
    out_dir: str = "out/ppo_loop"  # for checkpoints, the Hugging Face folders, metrics and the report

    def evaluates(self, step):
        """Whether the run evaluates after this many steps."""
        return step in (0, self.steps) or bool(self.eval_every and step % self.eval_every == 0)


def parse(args):
    """Run from the command line. --critic is looked up first: it says which flags are behind --critic.*."""
    given = re.findall(r"--critic[ =](\w+)", " ".join(args)) or ["fsdp"]
    module = critic_module(given[-1] if given[-1] in ("fsdp", "megatron") else "fsdp")
    default = Run(critic=module.Config(model="actor", ppo_mini_batch_size=ActorConfig.ppo_mini_batch_size))
    return tyro.cli(
        Run[module.Config], default=default, description=__doc__, args=args, console_outputs=RANK == 0
    )


def critic_module(backend):
    """critic_fsdp or critic_megatron, imported only if it is asked for."""
    if backend == "megatron":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return importlib.import_module(f"critic_{backend}")


@contextlib.contextmanager
def flags_of(part):
    """A UserError from in here names flags as this script knows them: --lr of the actor is --actor.lr."""
    try:
        yield
    except UserError as error:
        raise UserError(
            re.sub(r"(?<!\S)--(?!resume|out-dir|nproc)(?=[a-z])", f"--{part}.", str(error))
        ) from None


def check_flags(run):
    """Raises UserError for flags that cannot work, before a process group or a model is built."""
    try:
        pydantic.TypeAdapter(Run).validate_python(dataclasses.asdict(run))
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        names = fault["loc"][: 1 + (fault["loc"][0] in ("actor", "vllm"))]
        flag = "--" + ".".join(names).replace("_", "-")
        raise UserError(
            f"{flag} {fault['input']}: {fault['msg'].replace('Input should be', 'must be')}"
        ) from None
    rules = {
        "--lam-policy, --length-adaptive-alpha: give one of them": run.lam_policy is None or not run.length_adaptive_alpha,
        "--target-kl: adapts --kl-coef, which is 0; give it a value to begin with": not run.target_kl or run.kl_coef,
        "--eval-prompts: needs --prompts; addition has its own": run.prompts or not run.eval_prompts,
        "--reward: needed with --prompts, or --reward-model": not run.prompts or run.reward or run.reward_model,
        "--reward, --reward-model: give one of them": not (run.reward and run.reward_model),
        f"--actor.fsdp-size {run.actor.fsdp_size}: must divide the {WORLD_SIZE} ranks, or be -1":
            run.actor.fsdp_size == -1 or (run.actor.fsdp_size > 0 and WORLD_SIZE % run.actor.fsdp_size == 0),
        f"--vllm.tensor-parallel-size: must divide the {WORLD_SIZE} ranks": WORLD_SIZE % run.vllm.tensor_parallel_size == 0,
        "--critic.ppo-max-token-len-per-gpu auto: would take what the actor needs; add --offload, or give auto:GIB":
            run.offload or run.critic.ppo_max_token_len_per_gpu != "auto",
    }  # fmt: skip
    for words, holds in rules.items():
        if not holds:
            raise UserError(words)
    with flags_of("critic"):
        if mistake := critic_module(run.backend).mistake_in(run.critic):
            raise UserError(mistake)


# ---- Task: prompts, rewards, environment -------------------------------------------------------------


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
    answer = lambda text: str(sum(map(int, text.rstrip("=").split("+"))))
    return [Prompt(tokenizer(text)["input_ids"], text, answer(text)) for text in texts]


def load_prompts(path, flag, run, tokenizer):
    """Prompts of a JSONL file, without those that are too long. UserError names the first bad row."""
    prompts, skipped = [], 0
    with common.blame(f"{flag} {path}"), open(path, "rb") as file:
        lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    for number, line in common.progress(lines, "prompts"):
        with common.blame(f"{flag} {path}:{number}"):
            prompt = parse_prompt(json.loads(line), run, tokenizer)
        if len(prompt.ids) <= run.max_prompt_length:
            prompts.append(prompt)
    if len(prompts) < len(lines):
        print0(f"{flag} {path}: left out {len(lines) - len(prompts)} prompts above --max-prompt-length")
    if not prompts:
        raise UserError(f"{flag} {path}: no usable prompt")
    return prompts


def parse_prompt(row, run, tokenizer):
    """A row, a dict -> Prompt. An exception says what is wrong with it."""
    if run.prompt_key not in row:
        raise ValueError(f"has no {run.prompt_key!r}, only {', '.join(sorted(row))}; see --prompt-key")
    answer, prompt = row.get(run.answer_key), row[run.prompt_key]
    prompt = pydantic.TypeAdapter(common.Text | list[common.Message]).validate_python(prompt)
    messages = [message.model_dump() for message in prompt] if isinstance(prompt, list) else None
    if run.chat and messages is None:
        messages = [{"role": "user", "content": prompt}]
    text = prompt if messages is None else messages[-1]["content"] or ""
    if isinstance(text, list):  # parts of a message
        text = "".join(str(part.get("text") or "") for part in text)
    if messages is None:
        ids = tokenizer(text)["input_ids"]
    else:  # a chat template writes special tokens itself
        ids = tokenizer(common.chat_text(tokenizer, messages), add_special_tokens=False)["input_ids"]
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
    if name in REWARDS and flag == "--reward":
        return REWARDS[name]
    path, _, function = name.rpartition(":")
    if not os.path.isfile(path):
        raise UserError(
            f"{flag} {name}: must be FILE.py:FUNCTION" + f" or {', '.join(REWARDS)}" * (flag == "--reward")
        )
    spec = importlib.util.spec_from_file_location(f"user_{hash_of(path)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(
        spec
    )  # dataclasses look their module up
    with common.blame(f"{flag} {name}"):
        spec.loader.exec_module(module)
        return getattr(module, function)


def hash_of(key):
    """A number of 63 bits that follows from a string alone, on every machine."""
    return random.Random(key).getrandbits(63)


class TookTooLong(BaseException):
    """Not an Exception: a function that catches those must not swallow it."""


def guarded(function, seconds, *args):
    """(its result, "") or (None, what went wrong). The alarm rings in Python code: a call into C is waited for."""

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
        return None, str(UserError("", error))
    finally:
        signal.signal(signal.SIGALRM, before)


def checked(score):
    """(a reward as a float, "") or (0.0, what is wrong with it)."""
    try:
        x = float(score)
    except Exception:  # of any kind of object
        x = math.nan
    return (x, "") if abs(x) <= 1e15 else (0.0, "the reward must be a finite number")


class Scorer(nn.Module):
    """A backbone and the one label of a sequence or token classifier."""

    def __init__(self, backbone):
        super().__init__()
        self.lm = backbone
        self.score = nn.Linear(backbone.config.get_text_config().hidden_size, 1)

    def forward(self, input_ids, position_ids):
        """(1, T) ids -> (T,) float32 scores, read from the hidden state of each token."""
        hidden_TD = self.lm(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state[0]
        return self.score(hidden_TD.float())[:, 0]


class RewardModel:
    """Scores whole rows by a reward model, on their last token; packed, and sharded over all ranks."""

    def __init__(self, run, tokenizer, device):
        fields = {"model": run.reward_model, "tokenizer": None, "override_config": "{}"}
        self.config = dataclasses.replace(run.actor, **fields)
        self.device, self.optimizer = device, None
        own, model_config = common.load_config(self.config, run.actor.trust_remote_code)
        self.tokenizer = own or tokenizer
        self.same_tokens = self.tokenizer.get_vocab() == tokenizer.get_vocab()
        self.micro_batches = critic_module(run.backend).micro_batches
        source = None
        if RANK == 0:
            source = Scorer(common.load_pretrained(AutoModel, run.reward_model, model_config))
            stored, _ = common.stored_value_head(common.local_folder(run.reward_model), source.score, None)
            if not stored:
                raise UserError(f"--reward-model {run.reward_model}: has no head with one label")
            _, weight, bias = stored
            source.score.load_state_dict({"weight": weight, "bias": torch.zeros(1) if bias is None else bias})
        make = lambda: Scorer(
            AutoModel.from_config(copy.deepcopy(model_config), attn_implementation="packed")
        )
        self.model, self.flops = shard(self.config, make, source, device, trains=False)

    def ids(self, prompt, text, ids):
        """The row as this model reads it: the policy's tokens if both have the same, else its own of the text."""
        if self.same_tokens:
            return ids
        if prompt.messages and self.tokenizer.chat_template:
            messages = [*prompt.messages, {"role": "assistant", "content": text}]
            whole = self.tokenizer.apply_chat_template(messages, tokenize=False)
            return self.tokenizer(whole, add_special_tokens=False)["input_ids"]
        return self.tokenizer(prompt.text + text)["input_ids"]

    def scores(self, prompts, texts, batch):
        """Rewards of the caller's rows, a list (a collective)."""
        columns = (x.tolist() for x in batch.input_ids.split(batch.lengths))
        rows = [self.ids(*row) for row in zip(prompts, texts, columns, strict=True)]
        ends = torch.tensor([len(ids) for ids in rows], dtype=torch.int64)
        ids_T = torch.tensor([i for ids in rows for i in ids], dtype=torch.int64)
        none = dict.fromkeys(common.Batch.FLOATS)
        whole = dataclasses.replace(batch, input_ids=ids_T, cu_seqlens=common.cumulative(ends), **none)
        whole.response_mask = torch.zeros(len(ids_T), dtype=torch.bool)
        return self.compute_scores(whole)[ends.cumsum(0) - 1].tolist()

    @register(Dispatch.DP_COMPUTE_PROTO)
    @torch.no_grad()
    def compute_scores(self, batch):
        """(T,) what the head says of each token of the caller's rows."""
        self.model.eval()
        scores_T = torch.zeros(len(batch.input_ids), device=self.device)
        for rows in my_micro_batches(self, batch):
            micro = batch.select(rows) if rows else common.masked_token()
            micro_T = self.model(*pack(micro, self.device))
            if rows:
                scores_T[batch.token_index(rows).to(self.device)] = micro_T
        free_gathered(self.model)
        dist.all_reduce(scores_T)  # each row was scored by one rank; the rest added zeros
        return scores_T.cpu()

    def offload(self):
        move(self, torch.device("cpu"))

    def onload(self):
        move(self, self.device)


# ---- Policy maths ------------------------------------------------------------------------------------


def policy_loss(log_probs_T, old_log_probs_T, advantages_T, response_mask_T, weights_T, clip_low=0.2, clip_high=0.2,
                clip_dual=None):  # fmt: skip
    """PPO's clipped objective -> (loss, actions where clipping decided, where the dual clip did), 0-dim tensors.

        r_t = pi(a_t) / pi_old(a_t),  L_t = max( -r_t A_t, -clip(r_t, 1 - low, 1 + high) A_t ),  loss = sum_t w_t L_t

    1707.06347, eq. 7; low and high apart: DAPO, 2503.14476, eq. 10. clip_dual c > 1 bounds what a bad action can cost:
    where A_t < 0, L_t is at most -c A_t (1912.09729, eq. 5). log r is kept within +-20. What stands where
    response_mask is false never enters, not even a NaN.
    """
    clean = lambda x_T: torch.where(response_mask_T, x_T, 0.0)
    ratio_T = (clean(log_probs_T) - clean(old_log_probs_T)).clamp(-20, 20).exp()
    a_T = clean(advantages_T)
    free_T, clipped_T = -ratio_T * a_T, -ratio_T.clamp(1 - clip_low, 1 + clip_high) * a_T
    loss_T = torch.maximum(free_T, clipped_T)
    bound_T = torch.where(a_T < 0, -(clip_dual or math.inf) * a_T, math.inf)
    return (
        (weights_T * torch.minimum(loss_T, bound_T)).sum(),
        (clipped_T > free_T).sum(),
        (loss_T > bound_T).sum(),
    )


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
    """The KL coefficient after a batch of n rows with mean divergence kl (Ziegler et al. 1909.08593, sec. 2.2).

    target None keeps it fixed; otherwise coef *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon. The horizon is the
    paper's 10,000 rows, or the n rows of a step if those are more: else coef could turn negative.
    """
    if target is None:
        return coef
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * n / max(10_000, n))


def masked_whiten(x_T, mask_T, over_ranks=False):
    """(x - mean) / std over the masked entries, of this process or of all ranks together; zero elsewhere.

    The variance is the unbiased one, of n - 1, and 1e-8 is added to it; a single entry has variance 0.
    """
    total = lambda x: (dist.all_reduce(x), x)[1] if over_ranks else x
    x_T = torch.where(mask_T, x_T, 0.0)
    n, s = total(torch.stack([mask_T.sum().double(), x_T.double().sum()]))
    mean = s / n.clamp(min=1)
    var = total(torch.where(mask_T, x_T - mean, 0.0).double().square().sum()) / (n - 1).clamp(min=1)
    return torch.where(mask_T, (x_T - mean) * torch.rsqrt(var + 1e-8), 0.0).to(x_T.dtype)


def add_advantages(batch, scores, kl_coef, run):
    """Fills token_level_rewards, advantages and returns of the caller's rows (a collective).

    The score of a row is earned by its last action; each action pays kl_coef for its KL to the reference. The critic
    learns returns of run.lam, the actor may use another lambda (decoupled GAE of VC-PPO, 2503.01491, sec. 4.2), one
    for each row of l actions with length_adaptive_alpha: 1 - 1/(alpha l) (VAPO, 2504.05118, sec. 4.2).
    """
    mask_T, last_B = batch.response_mask, common.last_actions(batch.response_mask, batch.cu_seqlens)
    kl_T = kl_penalty(batch.old_log_probs, batch.ref_log_probs, run.kl_penalty)
    rewards_T = torch.zeros(len(mask_T)).index_add(0, last_B, torch.tensor(scores, dtype=torch.float32))
    batch.token_level_rewards = rewards_T - kl_coef * torch.where(mask_T, kl_T, 0.0)
    common.add_returns(batch, run.gamma, run.lam, run.bootstrap_truncated)
    lam = run.lam_policy
    if run.length_adaptive_alpha is not None:
        actions_B = common.actions_per_row(mask_T, batch.cu_seqlens).double().clamp(min=1)
        lam = (1 - 1 / (run.length_adaptive_alpha * actions_B)).clamp(min=0)
    if lam is not None:
        returns_T = batch.returns
        common.add_returns(batch, run.gamma, lam, run.bootstrap_truncated)
        batch.returns = returns_T
    if run.whiten_advantages:
        batch.advantages = masked_whiten(batch.advantages, mask_T, over_ranks=True)


# ---- Rollout: an engine makes tokens, a batch comes of them ------------------------------------------


class HFRollout:
    """Generates with transformers' own cache on a whole copy of the policy, each rank for the rows it owns.

    Every row draws its own random numbers from its key alone, so it gives the same sample in any batch and on any
    number of ranks, up to rounding.
    """

    def __init__(self, run, task, device):
        self.top_p, self.rows, self.device = run.top_p, run.rollout_batch_size, device
        self.dtype = compute_dtype(run.actor, device)
        self.stop = torch.tensor(task.stop_ids, dtype=torch.int64, device=device)
        capped = getattr(
            task.model_config.get_text_config(), "attn_logit_softcapping", None
        )  # sdpa would drop it
        options = {"attn_implementation": "eager" if capped else "sdpa", "dtype": self.dtype}
        options["trust_remote_code"] = run.actor.trust_remote_code
        with device:
            self.model = AutoModelForCausalLM.from_config(copy.deepcopy(task.model_config), **options).eval()
        self.weights = dict(self.model.named_parameters())

    @torch.no_grad()
    def sync(self, weights):
        """Takes the actor's weights, (name, whole tensor) pairs in self.dtype."""
        for name, weight in weights:
            self.weights[name].copy_(weight)

    def any_left(self, rows):
        """Whether generate() has to be called again: each rank has an engine of its own, so if it has rows."""
        return bool(rows)

    def offload(self):
        self.model.to("cpu")

    def onload(self):
        self.model.to(self.device)

    def generate(self, prompts, keys, room, temperature):
        """Token ids of prompts, what each row's numbers are drawn from, the most tokens it may get -> for each (token
        ids, their log-probs as they were sampled, whether it ended by itself). temperature 0: greedy.
        """
        out, order = [None] * len(prompts), sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        parts = [
            order[i : i + self.rows] for i in range(0, len(order), self.rows)
        ]  # like lengths: less padding
        for rows in common.progress(parts, "rollout"):
            columns = [[column[i] for i in rows] for column in (prompts, keys, room)]
            for i, reply in zip(rows, self.replies(*columns, temperature), strict=True):
                out[i] = reply
        return out

    @torch.inference_mode()
    def replies(self, prompts, keys, room, temperature):
        """generate() of one batch, left-padded; rows that are done leave it."""
        longest, dev = max(len(p) for p in prompts), self.device
        u_BR = torch.stack([uniform(key, max(room)) for key in keys]).to(dev)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=dev)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=dev)
        positions, room_B = (mask.cumsum(1) - 1).clamp(min=0), torch.tensor(room, device=dev)
        cache, rows = DynamicCache(config=self.model.config), torch.arange(len(prompts), device=dev)
        taken, ended = (
            [],
            torch.zeros(len(prompts), dtype=torch.bool, device=dev),
        )  # taken: (rows, ids, log-probs)
        for step in range(max(room)):
            inputs = {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": positions,
                "past_key_values": cache,
            }
            logits_BV = self.model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].float()
            log_p_BV = (logits_BV / (temperature or 1.0)).log_softmax(-1)
            if temperature and self.top_p < 1:
                log_p_BV = nucleus(log_p_BV, self.top_p)
            if (
                temperature
            ):  # inverse of the distribution function: one number a token, the same on every device
                cdf_BV = log_p_BV.double().exp().cumsum(-1)
                chosen = torch.searchsorted(cdf_BV, u_BR[rows, step, None] * cdf_BV[:, -1:], right=True)[:, 0]
                chosen = chosen.clamp(max=cdf_BV.shape[1] - 1)
            else:
                chosen = logits_BV.argmax(-1)
            taken.append((rows, chosen, log_p_BV.gather(1, chosen[:, None])[:, 0]))
            stops = torch.isin(chosen, self.stop)
            ended[rows[stops]] = True
            keep = (~stops & (step + 1 < room_B[rows])).nonzero()[:, 0]
            if len(keep) == 0:
                break
            if len(keep) < len(rows):
                cache.batch_select_indices(keep)
                rows, mask, positions, chosen = rows[keep], mask[keep], positions[keep], chosen[keep]
            ids, positions = chosen[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        replies = [([], [], done) for done in ended.tolist()]
        for columns in taken:
            for row, token, log_p in zip(*(x.tolist() for x in columns), strict=True):
                replies[row][0].append(token)
                replies[row][1].append(log_p)
        return replies


def uniform(key, n):
    """(n,) float64 numbers of [0, 1) that follow from the key."""
    return torch.rand(n, generator=torch.Generator().manual_seed(hash_of(key)), dtype=torch.float64)


def nucleus(log_p_BV, top_p):
    """(B, V) log-probs of the likeliest tokens alone, the fewest that have the probability top_p together; -inf for
    the rest (top-p sampling, 1904.09751, section 3.1)."""
    sorted_BV, order_BV = log_p_BV.sort(-1, descending=True)
    before_BV = sorted_BV.exp().cumsum(-1) - sorted_BV.exp()  # what likelier tokens have
    outside_BV = torch.zeros_like(log_p_BV, dtype=torch.bool).scatter(-1, order_BV, before_BV >= top_p)
    return log_p_BV.masked_fill(outside_BV, -math.inf).log_softmax(-1)


class VLLMRollout:
    """Generates with vLLM in this process: an engine on each rank, or one on every --vllm.tensor-parallel-size ranks.

    It has the methods of HFRollout. vLLM finds the trainer's process group and makes its own groups of it; an engine
    that is deleted takes the trainer's group with it, so all live as long as the process.
    """

    engines = []

    def __init__(self, run, task, device):
        self.stop, self.top_p, self.level = task.stop_ids, run.top_p, run.vllm.sleep_level
        self.size, self.on_cpu, self.dtype = (
            run.vllm.tensor_parallel_size,
            device.type == "cpu",
            compute_dtype(run.actor, device),
        )
        self.group = None
        if self.size > 1:  # neighbours, as vLLM has it
            timeout = datetime.timedelta(minutes=run.critic.timeout_minutes)
            self.group, _ = dist.new_subgroups(self.size, timeout=timeout)
        options = {"trust_remote_code": run.actor.trust_remote_code}
        with torch.device("meta"):  # it knows what a checkpoint calls its tensors
            self.skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(task.model_config), **options)
        with process_as_it_was(), tempfile.TemporaryDirectory() as folder:
            with common.blame(f"--rollout vllm: cannot run {run.actor.model}"):
                self.llm = self.start(run, task, folder)
        self.engines.append(self.llm)
        cache = self.llm.llm_engine.vllm_config.cache_config
        blocks = f"{cache.num_gpu_blocks:,} blocks x {cache.block_size}"
        print0(
            f"vllm       {WORLD_SIZE // self.size} engines x {self.size} ranks; keys and values of each {blocks} tokens"
        )

    def start(self, run, task, folder):
        """vLLM's LLM, with random weights; folder: where it finds the model's config."""
        model_config = copy.deepcopy(task.model_config)
        model_config.architectures = [type(self.skeleton).__name__]
        model_config.save_pretrained(folder)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process
        defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        defaults |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }  # without torchrun
        os.environ |= {key: x for key, x in defaults.items() if key not in os.environ}
        from vllm import LLM
        from vllm.distributed import parallel_state
        from vllm.platforms import current_platform

        if (
            self.on_cpu and self.size > 1
        ):  # its shared memory has one name in all runs of a machine, and stays
            from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

            CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False  # so it takes gloo
        llm = LLM(
            model=run.actor.model if run.actor.trust_remote_code else folder,
            load_format="dummy",  # the first sync fills it
            skip_tokenizer_init=True,
            generation_config="vllm",  # no defaults of the model's own
            trust_remote_code=run.actor.trust_remote_code,
            dtype=str(self.dtype).removeprefix("torch."),
            max_model_len=task.longest,
            max_num_seqs=run.rollout_batch_size,
            gpu_memory_utilization=run.vllm.gpu_memory_utilization,
            kv_cache_memory_bytes=2**30
            if self.on_cpu
            else None,  # on CPU it would take its part of all memory
            enforce_eager=self.on_cpu,
            enable_sleep_mode=run.offload and current_platform.is_sleep_mode_available(),
            tensor_parallel_size=self.size,
            distributed_executor_backend="external_launcher",  # each torchrun process runs its own part
            logprobs_mode="processed_logprobs",  # of what is sampled from: after temperature and top-p
            seed=0,  # of nothing: requests bring their own
        )
        if self.size > 1:  # more shared memory, which nobody removes when common.launch ends the process
            parallel_state.get_tp_group().mq_broadcaster = None
        return llm

    def onload(self):
        """Wakes the weights. Only after a sync is there a cache, and something to generate with."""
        self.llm.wake_up(tags=["weights"])

    def offload(self):
        """Frees the device memory of the engine, where the platform can."""
        self.llm.sleep(level=self.level)

    def sync(self, weights):
        """Takes the actor's weights, (name, whole tensor) pairs in self.dtype, layer by layer; forgets cached keys and
        values, which were the old weights'. Every rank calls it, for gathering weights is a collective."""
        stored = (revert_weight_conversion(self.skeleton, {name: weight}) for name, weight in weights)
        if self.on_cpu:
            self.llm.apply_model(forget_experts)
        named = (pair for some in stored for pair in some.items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        if self.on_cpu:
            self.llm.apply_model(repack_head)
        if self.llm.llm_engine.is_sleeping():
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    def any_left(self, rows):
        """Whether generate() has to be called again: if any rank that shares this engine has rows."""
        return any(self.of_peers(bool(rows)))

    def of_peers(self, mine):
        """What each rank that shares this engine has, a list (a collective among them)."""
        return [mine] if self.size == 1 else common.of_all_ranks(mine, self.group)

    def generate(self, prompts, keys, room, temperature):
        """HFRollout's. Ranks that share an engine call it together; each gets the replies to its own prompts."""
        if self.llm.llm_engine.is_sleeping():  # it would wait forever
            raise RuntimeError("the engine is asleep: onload() and sync() come before generate()")
        from vllm import SamplingParams

        everyones = self.of_peers(list(zip(prompts, keys, room, strict=True)))
        before = sum(map(len, everyones[: RANK % self.size]))
        rows = [row for rows in everyones for row in rows]
        fields = {
            "temperature": temperature,
            "top_p": self.top_p if temperature else 1.0,
            "stop_token_ids": self.stop,
        }
        fields |= {"ignore_eos": True, "logprobs": 0, "detokenize": False}
        params = [SamplingParams(seed=hash_of(key), max_tokens=most, **fields) for _, key, most in rows]
        eager = torch.compiler.set_stance("force_eager") if self.on_cpu else contextlib.nullcontext()
        # on CPU the compiler takes longer than the rollout, and needs one for C++; and it draws from torch's generator
        with eager, torch.random.fork_rng(devices=()):
            asked = [{"prompt_token_ids": prompt} for prompt, _, _ in rows]
            out = self.llm.generate(asked, params, use_tqdm=RANK == 0 and sys.stderr.isatty())
        replies = [reply.outputs[0] for reply in out[before : before + len(prompts)]]
        log_probs = lambda r: [at[token].logprob for at, token in zip(r.logprobs, r.token_ids, strict=True)]
        return [(list(r.token_ids), log_probs(r), r.finish_reason == "stop") for r in replies]


def forget_experts(model):
    """Runs in vLLM's CPU build: experts are packed again only where they have no kernel yet."""
    for module in model.modules():
        if hasattr(module, "moe_kernel"):
            module.moe_kernel = None


def repack_head(model):
    """Runs in vLLM's CPU build: a head that is tied to the embeddings is a packed copy, and takes their weights again."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def process_as_it_was():
    """Undoes what vLLM does to the process that starts it: random state, threads, environment, garbage collection.

    On CPU it also replaces torch.cuda's streams and events by empty ones; that stays, vLLM needs them.
    """
    env, threads, set_threads = dict(os.environ), torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), numpy.random.get_state()
    devices = range(torch.accelerator.device_count()) if torch.accelerator.is_available() else ()
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        ours = {key: x for key, x in os.environ.items() if key.startswith("VLLM_")}  # it reads them again
        os.environ.clear()
        os.environ.update(env | ours)
        gc.unfreeze()


class Reply(NamedTuple):
    """What followed a prompt: the policy's turns, and an environment's in between."""

    ids: list
    mask: list  # true on what the policy chose
    log_probs: list  # of the engine; 0 elsewhere
    finished: bool  # by the policy or the environment, not by the length limit


def roll_out(engine, task, prompts, keys, run, temperature):
    """(a Reply to each prompt, its text, what went wrong in the environment). Every row depends on its key alone."""
    tokenizer, replies = task.tokenizer, [Reply([], [], [], False) for _ in prompts]
    faults, going = [""] * len(prompts), list(range(len(prompts)))
    for turn in range(run.max_turns if task.observe else 1):
        room = [run.max_response_length - len(replies[i].ids) for i in going]
        asked = [prompts[i].ids + replies[i].ids for i in going]
        out = engine.generate(asked, [f"{keys[i]} {turn}" for i in going], room, temperature)
        still = []
        for i, (tokens, log_probs, ended) in zip(going, out, strict=True):
            reply = replies[i] = extended(replies[i], tokens, True, log_probs, ended)
            if not ended or task.observe is None or turn == run.max_turns - 1:
                continue
            text = tokenizer.decode(reply.ids, skip_special_tokens=True)
            said, faults[i] = guarded(
                task.observe, run.reward_timeout, prompts[i].text, text, prompts[i].answer
            )
            if said is not None and not isinstance(said, str):
                said, faults[i] = None, f"an environment answers with text or None, not {said!r:.40}"
            if said is None:
                continue
            said = said.encode(errors="replace").decode()  # half a surrogate pair is no text: "?" for it
            seen = tokenizer(said, add_special_tokens=False)["input_ids"]
            if len(reply.ids) + len(seen) < run.max_response_length:
                replies[i] = extended(reply, seen, False, [0.0] * len(seen), True)
                still.append(i)
            else:
                replies[i] = reply._replace(finished=False)
        going = still
        if not engine.any_left(going):
            break
    return replies, [tokenizer.decode(reply.ids, skip_special_tokens=True) for reply in replies], faults


def extended(reply, ids, own, log_probs, finished):
    """A Reply with more tokens; own: whether the policy chose them."""
    return Reply(reply.ids + ids, reply.mask + [own] * len(ids), reply.log_probs + log_probs, finished)


def to_batch(prompts, replies, row_ids):
    """Batch of prompts and replies, with the log-probs as the engine has them."""
    pairs = list(zip(prompts, replies, strict=True))
    join = lambda parts, dtype: torch.tensor([x for part in parts for x in part], dtype=dtype)
    lengths = torch.tensor([len(p.ids) + len(r.ids) for p, r in pairs], dtype=torch.int64)
    return common.Batch(
        input_ids=join([p.ids + r.ids for p, r in pairs], torch.int64),
        cu_seqlens=common.cumulative(lengths),
        response_mask=join([[False] * len(p.ids) + r.mask for p, r in pairs], torch.bool),
        row_id=torch.tensor(row_ids, dtype=torch.int64),
        truncated=torch.tensor([not r.finished for r in replies], dtype=torch.bool),
        rollout_log_probs=join([[0.0] * len(p.ids) + r.log_probs for p, r in pairs], torch.float32),
    )


# ---- Actor and reference: a policy on FSDP2 ----------------------------------------------------------

LOGITS_AT_ONCE = 2**25  # 128 MiB in float32


def log_probs_and_entropy(logits_of, hidden_AD, targets_A, vocab_size):
    """-> (A,) log-probs of the targets, (A,) entropies of their distributions, float32.

    logits_of: (C, D) -> (C, V). Never more than a chunk of logits is held: the backward pass computes each again.
    """

    def piece(hidden_CD, targets_C):
        log_p_CV = logits_of(hidden_CD).float().log_softmax(-1)
        return log_p_CV.gather(1, targets_C[:, None])[:, 0], -(log_p_CV.exp() * log_p_CV).sum(-1)

    size = max(1, LOGITS_AT_ONCE // vocab_size)
    pieces = []
    for chunk in zip(hidden_AD.split(size), targets_A.split(size), strict=True):
        pieces.append(checkpoint(piece, *chunk, use_reentrant=False, preserve_rng_state=False))
    return tuple(torch.cat(column) for column in zip(*pieces, strict=True))


class Policy(nn.Module):
    """A causal language model that says how likely the actions of a packed row were."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        self.softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self, input_ids, position_ids, response_mask_T, temperature):
        """(1, T) ids -> (A,) log-probs and entropies of the actions, each read from the hidden state before it."""
        decoder, head = self.lm.get_decoder(), self.lm.get_output_embeddings()
        hidden_TD = decoder(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state[0]
        action_A = response_mask_T.nonzero()[:, 0]

        def logits_of(hidden_CD):
            logits_CV = head(hidden_CD).float()
            if self.softcap:
                logits_CV = self.softcap * torch.tanh(logits_CV / self.softcap)
            return logits_CV / temperature

        return log_probs_and_entropy(
            logits_of, hidden_TD[action_A - 1], input_ids[0][action_A], head.weight.shape[0]
        )


def compute_dtype(config, device):
    """The dtype of matrix products; master weights, gradients and optimizer are float32."""
    if config.param_dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, config.param_dtype)


def shard(config, make, source, device, trains):
    """(a model on FSDP2 over all ranks, its FlopsModel). make() builds it, which happens on meta; `source` is the same
    on rank 0's host with its weights, which every rank gets its shards of. What trains has float32 weights, the rest
    those of the compute dtype."""
    compute = compute_dtype(config, device)
    with common.blame(f"--model {config.model}: cannot be built"), torch.device("meta"):
        model = make().to(torch.float32 if trains else compute)
    if not model.lm._can_set_attn_implementation():
        raise UserError(
            f"--model {config.model}: brings its own attention, which knows nothing of packed rows"
        )
    model.requires_grad_(trains)
    if config.gradient_checkpointing and trains:
        model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    flops, size = common.flops_model(model, model.lm.config), config.fsdp_size
    mesh = init_device_mesh(
        device.type, (WORLD_SIZE,) if size in (-1, WORLD_SIZE) else (WORLD_SIZE // size, size)
    )
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    names = {n for m in model.modules() for n in (getattr(m, "_no_split_modules", None) or ())}
    for block in [m for m in model.modules() if type(m).__name__ in names]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.set_reduce_scatter_unused_params(
        True
    )  # an expert may have seen no token here, but some on another rank
    model.to_empty(device=device)
    model.lm.tie_weights()  # to_empty made two of what is one
    full = source.state_dict() if RANK == 0 else {}
    set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    buffers = dict(source.named_buffers()) if RANK == 0 else {}
    for name, buffer in sorted(model.named_buffers()):  # rotary tables are in no state dict
        if RANK == 0:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, src=0)
    return model, flops


def my_micro_batches(worker, batch):
    """This rank's rows of a global batch as lists of row indices, one list a micro-batch; as many on every rank."""
    costs = [worker.flops.forward_flops(n) for n in batch.lengths]
    most = worker.config.ppo_max_token_len_per_gpu
    return worker.micro_batches(batch.lengths, costs, WORLD_SIZE, most)[RANK]


def pack(micro, device):
    """(1, T) ids and positions of a micro-batch on the device, declared as the next forward's row."""
    position_ids = torch.cat([torch.arange(n) for n in micro.lengths])
    common.set_pack(micro.lengths, device)
    return [x.to(device, non_blocking=True)[None] for x in (micro.input_ids, position_ids)]


def free_gathered(model):
    """Frees the gathered weights that FSDP keeps after a forward, for a backward that may not come."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def move(worker, device):
    """Moves weights and optimizer state of a worker."""
    free_gathered(worker.model)
    worker.model.to(device)
    for state in worker.optimizer.state.values() if worker.optimizer else ():
        for name, value in state.items():
            if name != "step":  # a scalar, which stays
                state[name] = value.to(device)
    if device.type == "cpu" and torch.accelerator.is_available():
        torch.accelerator.empty_cache()


class PolicyWorker:
    """A policy spread over all ranks. Methods under DP_COMPUTE_PROTO take the rows a rank owns and work on the global
    batch, like the critic's; a reference has no optimizer."""

    def __init__(self, run, model_config, device, trains=True):
        self.config, self.model_config, self.device, self.temperature = (
            run.actor,
            model_config,
            device,
            run.temperature,
        )
        self.seed, self.response_length_limit = run.seed, run.max_response_length
        self.micro_batches, config = critic_module(run.backend).micro_batches, run.actor
        options, source = {"trust_remote_code": config.trust_remote_code}, None
        if RANK == 0:
            torch.manual_seed(run.seed)
            if config.model in common.TINY:
                source = Policy(AutoModelForCausalLM.from_config(model_config, dtype=torch.float32))
            else:
                lm = common.load_pretrained(AutoModelForCausalLM, config.model, model_config, **options)
                source = Policy(lm.float())
        options["attn_implementation"] = "packed"
        make = lambda: Policy(AutoModelForCausalLM.from_config(copy.deepcopy(model_config), **options))
        with flags_of("actor"):
            self.model, self.flops = shard(config, make, source, device, trains)
        count = sum(p.numel() for p in self.model.parameters())
        print0(
            f"{'actor     ' if trains else 'reference '} {config.model} ({model_config.model_type}), {count:,} parameters"
        )
        self.optimizer = None
        if trains:
            options = {"lr": config.lr, "weight_decay": config.weight_decay}
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **options, fused=True)
        self.optimizer_steps = 0  # taken, skipped ones not counted
        self.updates = 0  # calls of update_policy: with seed and epoch the key of every shuffle

    def forward(self, micro):
        """(T,) log-probs and (T,) entropies of the actions of a micro-batch, zero elsewhere."""
        mask_T = micro.response_mask.to(self.device)
        columns_A = self.model(*pack(micro, self.device), mask_T, self.temperature)
        zeros_T = torch.zeros(len(mask_T), device=self.device)
        return [zeros_T.masked_scatter(mask_T, x_A) for x_A in columns_A]

    @register(Dispatch.DP_COMPUTE_PROTO)
    @torch.no_grad()
    def compute_log_probs(self, batch):
        """Log-probs of the actions of the caller's rows at --temperature: (T,) float32, zero elsewhere."""
        self.model.eval()
        log_probs_T = torch.zeros(len(batch.input_ids), device=self.device)
        for rows in common.progress(my_micro_batches(self, batch), "log-probs"):
            micro_T, _ = self.forward(batch.select(rows) if rows else common.masked_token())
            if rows:
                log_probs_T[batch.token_index(rows).to(self.device)] = micro_T
        free_gathered(self.model)
        dist.all_reduce(log_probs_T)  # each token was computed by one rank; the rest added zeros
        return log_probs_T.cpu()

    @register(
        Dispatch.DP_COMPUTE_PROTO, needs=("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
    )
    def update_policy(self, batch):
        """PPO epochs over mini-batches of the global batch, one optimizer step each -> metrics, equal on all ranks."""
        lr, mini_batches, norms, totals = math.nan, 0, [], 0.0
        for epoch in range(self.config.ppo_epochs):
            order = common.permutation(len(batch), self.seed, self.updates, epoch)
            for mini in batch.select(order).split(self.config.ppo_mini_batch_size):
                mini_batches += 1
                next_lr = self.learning_rate()
                norm, sums = self.step(mini, self.ppo_loss)
                if math.isfinite(norm):
                    lr = next_lr
                    norms.append(norm)
                    totals = totals + sums
        self.updates += 1
        names = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss", "entropy")
        metrics = dict.fromkeys([f"actor/{name}" for name in (*names, "grad_norm")], math.nan)
        if norms:
            dist.all_reduce(totals)
            loss, *sums, actions = totals.tolist()
            means = [loss / len(norms), *(x / actions for x in sums), sum(norms) / len(norms)]
            metrics = dict(zip(metrics, means, strict=True))
        return metrics | {"actor/lr": lr, "actor/skipped_steps": mini_batches - len(norms)}

    def ppo_loss(self, micro, log_probs_T, entropy_T, weights_T):
        """-> (what is minimised, 0-dim; sums over the actions, see update_policy)."""
        c, mask_T, earned_T = self.config, micro["response_mask"], weights_T
        old_T = micro["old_log_probs"]
        if (
            c.tis_cap is not None
        ):  # tokens were drawn from the engine's mu: rho of IMPALA, 1802.01561, section 4.1
            earned_T = weights_T * (old_T - micro["rollout_log_probs"]).clamp(-20, 20).exp().clamp(
                max=c.tis_cap
            )
        clips = (c.clip_ratio_low, c.clip_ratio_high, c.clip_ratio_c)
        loss, clipped, dual = policy_loss(log_probs_T, old_T, micro["advantages"], mask_T, earned_T, *clips)
        ref_kl_T = kl_penalty(log_probs_T, micro["ref_log_probs"], c.kl_loss_type)
        whole = (
            loss
            + c.kl_loss_coef * (weights_T * ref_kl_T).sum()
            - c.entropy_coeff * (weights_T * entropy_T).sum()
        )
        kl = (old_T - log_probs_T).sum()
        return whole, torch.stack([loss, clipped, dual, kl, ref_kl_T.sum(), entropy_T.sum(), mask_T.sum()])

    @register(Dispatch.DP_COMPUTE_PROTO)
    def imitate(self, batch):
        """One step of supervised learning of the actions of the rows of all ranks -> their mean cross-entropy."""

        def loss_of(micro, log_probs_T, entropy_T, weights_T):
            loss = -(weights_T * log_probs_T).sum()
            return loss, loss[None]

        _, sums = self.step(batch, loss_of)
        dist.all_reduce(sums)
        return {"supervised/loss": sums[0].item()}

    def step(self, mini, loss_of):
        """One optimizer step on a global mini-batch -> (gradient norm before clipping, this rank's part of the sums).

        A norm that is not finite skips the step, on all ranks; so does a mini-batch without an action.
        """
        config, total, counts = self.config, 0.0, common.loss_counts(mini.response_mask, mini.cu_seqlens)
        if counts[0] == 0:
            return math.nan, 0.0
        self.model.train()
        for rows in my_micro_batches(self, mini):
            micro = mini.select(rows) if rows else common.masked_token()
            columns = (micro.response_mask, micro.cu_seqlens, config.loss_agg_mode, counts)
            weights_T = common.loss_weights(*columns, self.response_length_limit).to(self.device)
            named = {
                k: x.to(self.device)
                for k, x in vars(micro).items()
                if k == "response_mask" or k in micro.FLOATS and x is not None
            }
            with flags_of("actor"):
                loss, sums = loss_of(named, *self.forward(micro), weights_T)
            (
                loss * WORLD_SIZE
            ).backward()  # the loss is a sum over all ranks, but FSDP averages gradients over them
            total = total + sums.detach().double()
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip).full_tensor())
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step()
            self.optimizer_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm, total

    def learning_rate(self):
        """The rate of the next step: linear warm-up, then constant."""
        return self.config.lr * min(1.0, (self.optimizer_steps + 1) / max(self.config.lr_warmup_steps, 1))

    def weights(self, dtype=None):
        """(name, whole tensor) of each weight of the language model, one at a time, on every rank (a collective)."""
        for name, p in self.model.lm.named_parameters():
            yield name, p.detach().to(dtype or p.dtype).full_tensor()

    @register(Dispatch.ONE_TO_ALL)
    def offload(self):
        """Gives the device memory of weights and optimizer state to others."""
        move(self, torch.device("cpu"))

    @register(Dispatch.ONE_TO_ALL)
    def onload(self):
        """Takes it back."""
        move(self, self.device)

    def checkpoint_tensors(self):
        """All state as one flat dict of tensors, each tied weight under one name, and the state dicts they are from."""
        fresh = not self.optimizer.state
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        states = (*self.optimizer.state.values(), *optimizer_state["state"].values())
        for state in (
            states if fresh else ()
        ):  # get_state_dict took an empty step to create the state; undo its count
            state["step"].zero_()
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        tied -= {name for name, _ in self.model.named_parameters()}
        tensors = {f"model.{name}": x for name, x in model_state.items() if name not in tied}
        for name, state in optimizer_state["state"].items():
            tensors |= {f"optimizer.{name}.{key}": x for key, x in state.items()}
        return tensors, model_state, optimizer_state

    def checkpoint_writer(self, copy=False):
        """write(tmp, group): writes the state of now into a folder; with `copy` training may change it meanwhile."""
        tensors, _, _ = self.checkpoint_tensors()
        if copy:
            tensors = DefaultStager(StagingOptions(False, False, False, False)).stage(tensors)
        state = {"backend": "actor", "updates": self.updates, "optimizer_steps": self.optimizer_steps}
        state |= {
            "config": dataclasses.asdict(self.config),
            "model_config": common.architecture(self.model_config),
        }

        def write(tmp, group=None):
            writer = HuggingFaceStorageWriter(tmp, save_distributed=True)
            dcp.save(tensors, storage_writer=writer, process_group=group)
            if RANK == 0:
                with open(os.path.join(tmp, "trainer.json"), "w") as file:
                    json.dump(state, file, indent=1)

        return write

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder):
        """Restores what checkpoint_writer wrote, on any world size. UserError: damaged or foreign."""
        saved = common.open_checkpoint(folder, ("actor",), self.config, self.model_config)
        tensors, model_state, optimizer_state = self.checkpoint_tensors()
        with common.blame(f"--resume {folder}: does not fit this actor"):
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(folder))
        states = {"model_state_dict": model_state, "optim_state_dict": optimizer_state}
        set_state_dict(self.model, self.optimizer, **states)
        self.updates, self.optimizer_steps = (saved[key] for key in ("updates", "optimizer_steps"))

    @register(Dispatch.ONE_TO_ALL)
    def export_hf(self, folder, tokenizer):
        """Writes the language model as a Hugging Face folder that AutoModelForCausalLM loads."""
        state = {}
        for name, weight in self.weights():  # every rank takes part, rank 0 keeps them, on the host
            if RANK == 0:
                state[name] = weight.cpu()
        tmp = common.start_folder(folder)
        if RANK == 0:
            options = {"dtype": torch.float32, "trust_remote_code": self.config.trust_remote_code}
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(self.model_config, **options)
            skeleton.save_pretrained(tmp, state_dict=state)
            if generation := generation_config(self.config):
                generation.to_json_file(os.path.join(tmp, "generation_config.json"))
            tokenizer.save_pretrained(tmp)
        common.publish(tmp, folder)


def generation_config(config):
    """generation_config.json of the model's folder, or None; not all stop tokens are in config.json."""
    if config.model not in common.TINY:
        with contextlib.suppress(OSError, ValueError):
            return GenerationConfig.from_pretrained(config.model)


def stop_tokens(config, tokenizer):
    """Ids that end a turn: the tokenizer's end of sequence, and those of the model's generation_config.json."""
    more = getattr(generation_config(config), "eos_token_id", None)
    return sorted({tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None})


# ---- The loop ----------------------------------------------------------------------------------------


def teaches(run):
    """Whether the run begins with learn_to_add."""
    return run.prompts is None and run.supervised_steps > 0 and run.actor.model in common.TINY


def learn_to_add(run, task, device, folder):
    """Supervised warm-up on a noisy adder, so that PPO starts with an actor that is sometimes right, in this folder.

    The adder errs in three of four sums that carry and in three of five others; none of its prompts is held out.
    """
    actor = dataclasses.replace(run.actor, lr=3e-3, lr_warmup_steps=0, loss_agg_mode="token-mean")
    model_config = copy.deepcopy(task.model_config)
    model_config.initializer_range = 0.1  # so narrow a model hardly moves away from the usual 0.02
    worker = PolicyWorker(dataclasses.replace(run, actor=actor, temperature=1.0), model_config, device)
    rows = common.read_rows(common.toy_rows(8192, run.seed, slips=(0.75, 0.6)), task.tokenizer)
    size = 256
    for step in common.progress(range(run.supervised_steps), "supervised"):
        picked = indices_of_step(step, size, len(rows), run.seed, "supervised")
        batch = rows.select(picked[RANK::WORLD_SIZE])
        batch.row_id = torch.arange(RANK, size, WORLD_SIZE)  # a row may be picked twice, by two passes
        loss = worker.imitate(batch)["supervised/loss"]
    worker.export_hf(folder, task.tokenizer)
    print0(f"supervised {run.supervised_steps} steps x {size} rows, loss {loss:.3f}: {folder}")


def indices_of_step(step, size, n, *key):
    """Which of n things are in a step of `size`: passes in their own random orders follow each other without a gap. A
    function of the step alone: a resumed run needs no other state."""
    first, last = step * size // n, ((step + 1) * size - 1) // n
    passes = [i for a_pass in range(first, last + 1) for i in common.permutation(n, *key, a_pass)]
    return passes[step * size - first * n :][:size]


def prompts_of_step(step, prompts, run):
    """(prompts, ids, keys) of this rank's rows of a step; neighbours share a prompt. From a row's key follow all random
    numbers of its response."""
    picked = indices_of_step(step, run.train_batch_size, len(prompts), run.seed, "prompts")
    row_ids = list(range(RANK, run.train_batch_size * run.rollout_n, WORLD_SIZE))
    keys = [f"{run.seed} {step} {row}" for row in row_ids]
    return [prompts[picked[row // run.rollout_n]] for row in row_ids], row_ids, keys


class Phases:
    """`with phases("actor", actor):` times a phase, and with --offload has its workers, and no others, on the device."""

    def __init__(self, offload):
        self.offload, self.metrics, self.totals = offload, {}, {}

    @contextlib.contextmanager
    def __call__(self, name, *workers):
        start, workers = time.perf_counter(), [worker for worker in workers if worker and self.offload]
        for worker in workers:
            worker.onload()
        yield
        for worker in reversed(workers):
            worker.offload()
        for sums in (self.metrics, self.totals):
            sums[f"time/{name}"] = sums.get(f"time/{name}", 0.0) + time.perf_counter() - start

    def take(self):
        """The times of the step so far, which a new step begins without."""
        taken, self.metrics = self.metrics, {}
        return taken


def score(run, reward, prompts, texts, batch, faults):
    """(rewards of the caller's rows by rule or by model, faults with what went wrong here) (a collective)."""
    if isinstance(reward, RewardModel):
        made = [(x, "") for x in reward.scores(prompts, texts, batch)]
    else:
        made = [
            guarded(reward, run.reward_timeout, p.text, text, p.answer)
            for p, text in zip(prompts, texts, strict=True)
        ]
    made = [(0.0, fault) if fault else checked(x) for x, fault in made]
    return [x for x, _ in made], [before or fault for before, (_, fault) in zip(faults, made, strict=True)]


def show_fault(faults):
    """Prints the first of what went wrong with rows, on whichever rank (a collective)."""
    firsts = common.of_all_ranks(next(filter(None, faults), None))
    if any(firsts):
        print0(f"a row failed and counts as 0: {next(filter(None, firsts))}")


def rollout_metrics(batch, scores, faults, run):
    """What a step's rows are like, over all ranks (a collective)."""
    mask_T, late = batch.response_mask, sum(fault.startswith("timeout") for fault in faults)
    kl_T = kl_penalty(batch.old_log_probs, batch.ref_log_probs, run.kl_penalty)[mask_T]
    off_T = batch.rollout_log_probs - batch.old_log_probs
    if run.top_p < 1:  # what it left out made the rest likelier, by -log top_p at most; that much is no fault
        off_T = off_T - off_T.clamp(0, -math.log(run.top_p))
    off_T = off_T.abs()[mask_T]
    errors = sum(map(bool, faults)) - late
    sums = [
        len(batch),
        len(off_T),
        len(mask_T),
        sum(scores),
        sum(x * x for x in scores),
        batch.truncated.sum(),
    ]
    sums = torch.tensor([*sums, errors, late, kl_T.double().sum(), off_T.double().sum()], dtype=torch.float64)
    worst = torch.cat([off_T, torch.zeros(1)]).max()
    dist.all_reduce(sums)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    rows, actions, tokens, total, squares, truncated, errors, late, kl, off = sums.tolist()
    return {
        "reward/mean": total / rows,
        "reward/std": math.sqrt(max(squares / rows - (total / rows) ** 2, 0.0)),
        "reward/errors": errors,
        "reward/timeouts": late,
        "rollout/actions": actions / rows,
        "rollout/tokens": tokens,
        "rollout/truncated": truncated / rows,
        "rollout/log_prob_diff": off / actions,
        "rollout/log_prob_diff_max": worst.item(),
        "kl/reference": kl / actions
        if run.kl_coef or run.actor.kl_loss_coef
        else math.nan,  # nan: has no reference
    }


def evaluate(engine, task, run, reward):
    """Rewards of held-out prompts -> (metrics equal on all ranks, this rank's first transcripts)."""
    each, temperature = max(run.eval_samples, 1), run.temperature if run.eval_samples else 0.0
    rows = list(range(RANK, len(task.held_out) * each, WORLD_SIZE))
    mine, keys = (
        [task.held_out[row // each] for row in rows],
        [f"evaluation {run.seed} {row}" for row in rows],
    )
    replies, texts, faults = roll_out(engine, task, mine, keys, run, temperature)
    scores, faults = score(run, reward, mine, texts, to_batch(mine, replies, rows), faults)
    sums = [
        len(rows),
        sum(scores),
        sum(x >= 1 for x in scores),
        sum(len(r.ids) for r in replies),
        sum(map(bool, faults)),
    ]
    sums = torch.tensor(sums, dtype=torch.float64)
    dist.all_reduce(sums)
    n, total, right, tokens, failed = sums.tolist()
    show_fault(faults)
    metrics = {
        "eval/reward": total / n,
        "eval/accuracy": right / n,
        "eval/length": tokens / n,
        "eval/errors": failed,
    }
    columns = zip(mine[:8], texts, scores, strict=False)
    return metrics, [
        {"prompt": p.text, "response": text, "answer": p.answer, "reward": x} for p, text, x in columns
    ]


def keep_samples(samples, step, out_dir):
    """Adds transcripts to samples.jsonl, after those of earlier steps, and shows two of them."""
    if RANK == 0:
        path = os.path.join(out_dir, "samples.jsonl")
        rows = [row for row in common.read_lines(path) if row["step"] < step]
        common.replace_lines(path, rows + [{"step": step, **sample} for sample in samples])
        for x in samples[:2]:
            print0(f"  {x['prompt'][-60:]!r} -> {x['response'][-60:]!r}  reward {x['reward']:g}")


def ppo_line(step, steps, m):
    """One aligned line that tells how a step went, in units a person reads."""
    n, eta = common.number, datetime.timedelta(seconds=round(m["perf/time_step"] * (steps - step)))
    odd = {"reward errors": "reward/errors", "timeouts": "reward/timeouts", "skipped": "actor/skipped_steps"}
    odd = "".join(f"  {m[key]:.0f} {words}" for words, key in odd.items() if m.get(key))
    return (
        f"step {step:>{len(str(steps))}}/{steps}  reward {m['reward/mean']:.3f}  length {m['rollout/actions']:.1f}"
        f"  kl {n(m['kl/reference'], '.3f')}  entropy {n(m.get('actor/entropy'), '.3f')}"
        f"  clipped {n(m.get('actor/pg_clipfrac'), '.3f')}  |g| {n(m.get('actor/grad_norm'), '.2g'):>5}"
        f"  value loss {n(m['critic/vf_loss'], '.4f')}  explained var {n(m['critic/explained_var'], '.2f'):>5}"
        f"  {m['perf/rollout_tokens_per_second']:>6,.0f} tok/s  eta {eta}{odd}"
    )


CURVES = {  # panel -> metrics
    "reward": ("reward/mean", "eval/accuracy"),
    "how far the policy has moved": ("actor/entropy", "kl/reference"),
    "explained variance": ("critic/explained_var",),
}


def set_up(run):
    """(run with what follows from its task and its actor, the Task). UserError: flags, files or functions are wrong."""
    check_flags(run)
    addition, actor, critic = run.prompts is None, run.actor, run.critic
    with flags_of("actor"):
        tokenizer, model_config = common.load_config(actor, actor.trust_remote_code)
    if tokenizer is None:
        raise UserError(f"--actor.tokenizer: {actor.model} has none, and prompts are text; give one")
    if critic.model == "actor":
        names = {"model", "tokenizer", "override_config", "trust_remote_code"} & vars(critic).keys()
        unset = [
            name for name in names if name == "model" or getattr(critic, name) == getattr(type(critic), name)
        ]
        critic = dataclasses.replace(critic, **{name: getattr(actor, name) for name in unset})
    run = dataclasses.replace(
        run,
        actor=dataclasses.replace(actor, lr=actor.lr or (5e-4 if addition else 1e-6)),
        critic=dataclasses.replace(critic, lr=critic.lr or (1e-3 if addition else None)),
        max_response_length=run.max_response_length or (8 if addition else 256),
        reward=run.reward or ("addition" if addition and not run.reward_model else None),
    )
    if addition:
        prompts = addition_prompts(8192, run.seed, tokenizer)
        held_out = addition_prompts(512, run.seed, tokenizer, held_out=True)
    else:
        prompts = load_prompts(run.prompts, "--prompts", run, tokenizer)
        held_out = (
            load_prompts(run.eval_prompts, "--eval-prompts", run, tokenizer) if run.eval_prompts else []
        )
    longest = max(len(p.ids) for p in prompts + held_out) + run.max_response_length
    with flags_of("actor"):
        check_takes(run.actor.model, model_config, tokenizer, longest)
        if longest > run.actor.ppo_max_token_len_per_gpu:
            raise UserError(
                f"--ppo-max-token-len-per-gpu: the longest prompt with its response has {longest} tokens"
            )
    with flags_of("critic"):
        module = critic_module(run.backend)
        _, critic_config = common.load_config(run.critic)
        module.check_model_flags(run.critic, critic_config)
        check_takes(run.critic.model, critic_config, tokenizer, longest)
        module.check_budget(run.critic, longest, "the longest prompt with its response")
    reward = load_function(run.reward, "--reward") if run.reward else None
    observe = load_function(run.environment, "--environment") if run.environment else None
    rows = run.train_batch_size * run.rollout_n
    print0(
        f"prompts    {len(prompts):,}, {len(held_out):,} held out; at most {longest} tokens with the response"
    )
    print0(f"rollout    {run.train_batch_size} prompts x {run.rollout_n} responses = {rows} rows a step")
    stop_ids = stop_tokens(run.actor, tokenizer)
    return run, Task(tokenizer, model_config, prompts, held_out, reward, observe, stop_ids, longest)


def check_takes(model, model_config, tokenizer, longest):
    """UserError if a model cannot take rows of this many tokens, or does not know all of the actor's tokens."""
    vocab_size, most = common.limits(model_config)
    if longest > most:
        raise UserError(
            f"--model {model}: takes {most} tokens, the longest prompt with its response has {longest}"
        )
    if vocab_size <= max(tokenizer.get_vocab().values()):
        raise UserError(f"--model {model}: knows {vocab_size} tokens, the actor's tokenizer more")


def start_from(run, task, device, checkpoints):
    """(run whose actor starts from the supervised one, which a new run makes now; step and KL coefficient to go on
    with)."""
    folder, state = checkpoints.folder, {"step": 0, "kl_coef": run.kl_coef}
    start = os.path.abspath(
        os.path.join(folder, "..", "..", "supervised") if folder else f"{run.out_dir}/supervised"
    )
    if folder:
        loop = os.path.join(folder, "loop.json")
        common.verify(loop)
        with open(loop) as file:
            state = json.load(file)
        if state["step"] > run.steps:
            raise UserError(f"--steps {run.steps}: {folder} has made {state['step']} already; give more")
        if not run.target_kl or state["given_kl_coef"] != run.kl_coef:
            state["kl_coef"] = run.kl_coef
        if teaches(run) and fingerprint(start) != state["start"]:
            raise UserError(
                f"--resume {folder}: {start} is not, or no longer, the actor that the run started from"
            )
        print0(f"resume     {folder}, step {state['step']}")
    elif teaches(run):
        learn_to_add(run, task, device, start)
    if teaches(run):
        fresh = {"model": start, "override_config": "{}"}
        same = all(getattr(run.critic, name) == getattr(run.actor, name) for name in fresh)
        critic = dataclasses.replace(run.critic, **fresh) if same else run.critic
        run = dataclasses.replace(run, actor=dataclasses.replace(run.actor, **fresh), critic=critic)
    return run, state["step"], state["kl_coef"]


def fingerprint(folder):
    """What two published folders share only if all their files are equal; None of other folders."""
    manifest = os.path.join(folder, common.MANIFEST)
    return common.checksum(manifest) if os.path.exists(manifest) else None


def checkpoint_writer(run, step, kl_coef, actor, critic):
    """write(tmp, group) of the whole state. Prompts and samples follow from the step, and need none."""
    state = {
        "step": step,
        "kl_coef": kl_coef,
        "given_kl_coef": run.kl_coef,
        "start": fingerprint(run.actor.model),
    }
    writers = {
        "actor": actor.checkpoint_writer(run.async_save),
        "critic": critic.checkpoint_writer(run.async_save),
    }

    def write(tmp, group=None):
        for name, write_part in writers.items():
            os.makedirs(os.path.join(tmp, name), exist_ok=True)
            write_part(os.path.join(tmp, name), group)
        if RANK == 0:
            with open(os.path.join(tmp, "loop.json"), "w") as file:
                json.dump(state, file, indent=1)

    return write


def build(run, task, device, checkpoints):
    """(actor, reference or None, critic, reward model or None, rollout engine without weights yet) on all ranks, from
    the checkpoint if the run is resumed. With --offload they are made one after another."""
    folder, reference, reward_model = checkpoints.folder, None, None
    away = lambda worker: worker.offload() if run.offload else None
    actor = PolicyWorker(run, task.model_config, device)
    if folder:
        actor.load_checkpoint(os.path.join(folder, "actor"))
    away(actor)
    if run.kl_coef or run.actor.kl_loss_coef:
        reference = PolicyWorker(run, task.model_config, device, trains=False)
        away(reference)
    if run.reward_model:
        reward_model = RewardModel(run, task.tokenizer, device)
        away(reward_model)
    engine = {"hf": HFRollout, "vllm": VLLMRollout}[run.rollout](run, task, device)
    away(engine)
    with flags_of("critic"):  # the last, because it seeds torch's generator, or restores it
        critic = critic_module(run.backend).CriticWorker(run.critic)
        minis = math.ceil(run.train_batch_size * run.rollout_n / run.critic.ppo_mini_batch_size)
        critic.init_model(run.steps * run.critic.ppo_epochs * minis)
        if folder:
            critic.load_checkpoint(os.path.join(folder, "critic"))
        critic.set_budget(task.longest, "the longest prompt with its response", checkpoints.halvings)
        away(critic)
    return actor, reference, critic, reward_model, engine


def check_engine(run, metrics, device):
    """UserError if engine and actor, which have the same weights, do not make the same of the first rows: two ways
    through a model, one of them with a cache and padding, the other packed."""
    limit = 1e-3 if compute_dtype(run.actor, device) == torch.float32 else 0.5
    if not metrics["rollout/log_prob_diff"] < limit:
        raise UserError(
            f"--actor.model {run.actor.model}: log-probs of the rollout are off the actor's by "
            f"{metrics['rollout/log_prob_diff']:.1e} a token; the model does something to its logits that "
            "Policy.forward does not know, or rows see each other in a pack"
        )


def main(run):
    run, task = set_up(run)
    device = common.setup_distributed(run.critic.timeout_minutes)
    options = (run.out_dir, run.resume, run.keep, run.async_save, run.critic.timeout_minutes)
    with common.Checkpoints(*options) as checkpoints:
        run, first_step, kl_coef = start_from(run, task, device, checkpoints)
        actor, reference, critic, reward_model, engine = build(run, task, device, checkpoints)
        phases, reward = Phases(run.offload), reward_model or task.reward
        last_step = first_step if checkpoints.is_own else 0
        logger = common.Logger(run.out_dir, dataclasses.asdict(run), last_step, run.evaluates(first_step))
        start, skipped = time.perf_counter(), 0
        for step in common.profiled(range(first_step, run.steps + 1), run.profile_steps, run.out_dir):
            last, stop, began = step == run.steps, checkpoints.sigterm_received(), time.perf_counter()
            if step > first_step and (last or stop or (run.save_every and step % run.save_every == 0)):
                with phases("checkpoint", actor, critic):
                    checkpoints.save(step, checkpoint_writer(run, step, kl_coef, actor, critic))
            checkpoints.wait(block=last or stop)
            if stop and not last:
                logger.close()
                checkpoints.leave(step)

            with phases("generation", engine):
                learned = step > run.critic_warmup  # in the step before
                if (
                    step == first_step or learned or run.offload
                ):  # an engine that slept may have lost its weights
                    with phases("sync", actor):
                        engine.sync(actor.weights(engine.dtype))
                if task.held_out and run.evaluates(step):
                    with phases("evaluation", reward_model):
                        metrics, samples = evaluate(engine, task, run, reward)
                    logger.log(step, metrics)
                    print0(
                        f"held out   accuracy {metrics['eval/accuracy']:.3f}   reward {metrics['eval/reward']:.3f}"
                    )
                    keep_samples(samples, step, run.out_dir)
                if last:
                    break
                prompts, row_ids, keys = prompts_of_step(step, task.prompts, run)
                with phases("rollout"):
                    replies, texts, faults = roll_out(engine, task, prompts, keys, run, run.temperature)
                    batch = to_batch(prompts, replies, row_ids)
            with phases("reward", reward_model):
                scores, faults = score(run, reward, prompts, texts, batch, faults)
            with phases("log_probs", actor):
                batch.old_log_probs = batch.ref_log_probs = actor.compute_log_probs(batch)
            if reference is not None:
                with phases("reference", reference):
                    batch.ref_log_probs = reference.compute_log_probs(batch)
            metrics = rollout_metrics(batch, scores, faults, run)
            if step == first_step:
                check_engine(run, metrics, device)
            with phases("critic", critic):
                batch.values = critic.compute_values(batch)
                add_advantages(batch, scores, kl_coef, run)
                metrics |= critic.update_critic(batch)
            metrics["kl/coef"] = kl_coef
            if step >= run.critic_warmup:
                with phases("actor", actor):
                    metrics |= actor.update_policy(batch)
                kl_coef = next_kl_coef(
                    kl_coef, metrics["kl/reference"], run.train_batch_size * run.rollout_n, run.target_kl
                )
            skipped = common.count_skipped(skipped, metrics, batch, run.out_dir)
            if run.dump_rollouts:
                common.dump(batch, run.out_dir, step + 1)
            show_fault(faults)
            metrics |= phases.take()
            metrics["perf/time_step"] = (time.perf_counter() - start) / (step + 1 - first_step)
            metrics["perf/rollout_tokens_per_second"] = metrics["rollout/tokens"] / (
                time.perf_counter() - began
            )
            logger.log(step + 1, metrics)
            print0(ppo_line(step + 1, run.steps, metrics))
        with phases("export", actor, critic):
            actor.export_hf(os.path.join(run.out_dir, "hf"), task.tokenizer)
            critic.export_hf(os.path.join(run.out_dir, "critic_hf"))
    logger.close()
    if first_step < run.steps:
        common.write_report(
            run.out_dir, common.gather(batch), "rows of the last step", task.tokenizer, run.gamma, CURVES
        )
    print0("seconds    " + "  ".join(f"{name[5:]} {x:,.1f}" for name, x in phases.totals.items()))
    files = "hf, critic_hf, samples.jsonl, report.html, curves.png, metrics.jsonl, tensorboard"
    print0(f"saved      {run.out_dir}: checkpoints/step_{run.steps}, {files}")


if __name__ == "__main__":
    common.launch(lambda: main(parse(sys.argv[1:])))
