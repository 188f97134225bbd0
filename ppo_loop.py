"""PPO for language models, end to end, with the critic of your choice.

    python ppo_loop.py                                         a tiny actor learns to add, on a laptop CPU: two minutes
    torchrun --nproc-per-node 2 ppo_loop.py                    the same on two ranks: the same numbers
    torchrun --nproc-per-node 4 ppo_loop.py --critic megatron --critic.tensor-model-parallel-size 2 \\
        --critic.pipeline-model-parallel-size 2                its critic on Megatron-Core, laid out as it likes
    torchrun --nproc-per-node 8 ppo_loop.py --actor.model Qwen/Qwen2.5-0.5B-Instruct --prompts gsm8k/train.jsonl \\
        --eval-prompts gsm8k/test.jsonl --prompt-key question --chat --reward gsm8k --max-response-length 512
    python ppo_loop.py --help                                  every flag; the critic's own stand under --critic.

Rollout, reward, reference, values, advantages, critic, actor, sync: main() at the end is the algorithm, the rest is
what it calls. Actor and reference are Hugging Face models on FSDP2; the critic is the CriticWorker of critic_fsdp.py
or critic_megatron.py, with its own model, layout and batches. Copy this file with those and common.py, and change them.

Shapes are in the names: T tokens, sequences end to end; A actions (tokens the policy chose); B sequences; V vocabulary;
D hidden features.
"""

import contextlib
import copy
import dataclasses
import datetime
import functools
import gc
import importlib
import importlib.util
import json
import math
import numbers
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import numpy
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

import common
import critic_fsdp
from common import RANK, WORLD_SIZE, Dispatch, UserError, print0, register

# ---------------------------------------------------------------------------------------------------------------------
# Config
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActorConfig:
    """The policy that learns, and the frozen reference, which starts as the same model."""

    # model
    model: str = "tiny-qwen2"  # Hugging Face folder or hub name; tiny-qwen2, tiny-llama ...: random weights
    tokenizer: str | None = None  # Hugging Face folder or hub name (None: the model's own; characters for tiny-*)
    override_config: str = "{}"  # JSON laid over the model's config, e.g. '{"num_hidden_layers": 4}'
    from_scratch: bool = False  # random weights: of --actor.model take the architecture and the tokenizer only
    trust_remote_code: bool = False  # run model code that comes with the checkpoint
    seed: int = 0  # of random weights and of the order of mini-batches

    # layout, precision and kernels
    fsdp_size: int = -1  # ranks that share one copy of the weights; the rest holds replicas (-1: all ranks share one)
    reshard_after_forward: bool = True  # free a layer's gathered weights until its backward: less memory, more traffic
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products (auto: bfloat16, float32 on CPU)
    attn_implementation: Literal[common.KERNELS] = "auto"  # attention kernel (auto: the fastest that serves the model)
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time

    # batches
    ppo_epochs: int = 1  # passes over the rows of one update
    ppo_mini_batch_size: int = 128  # rows of one optimizer step, global: over all ranks
    shuffle: bool = True  # cut mini-batches in random order (from seed, update, epoch) instead of row order
    ppo_max_token_len_per_gpu: int = 16384  # most tokens of a micro-batch, per rank: a hard cap

    # loss
    clip_ratio_low: float = 0.2  # how far below 1 the ratio of a token's probabilities still earns
    clip_ratio_high: float = 0.2  # how far above
    clip_ratio_c: float | None = 3.0  # dual clip: the most a bad token costs, times its advantage (None: any)
    entropy_coeff: float = 0.0  # weight of the entropy that is added to what is maximised
    kl_loss_coef: float = 0.0  # weight of the KL to the reference in the loss (0: none)
    kl_loss_type: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3"  # its estimate (+: with the gradient of k2)
    tis_cap: float | None = None  # weigh a token by pi_actor / pi_engine, at most by this (None: not at all)
    loss_agg_mode: Literal[common.LOSS_AGG_MODES] = "token-mean"  # how token losses become one loss of the mini-batch
    response_length_limit: int | None = None  # the constant that seq-mean-token-sum-norm divides by

    # optimizer
    lr: float | None = None  # learning rate of AdamW (None: 5e-4 for the built-in task, 1e-6 otherwise)
    lr_warmup_steps: int = 0  # optimizer steps of linear warm-up; the first is at lr / steps, not at 0
    weight_decay: float = 0.01  # decoupled, on every weight
    betas: tuple[float, float] = (0.9, 0.999)  # decay of AdamW's two moving averages
    grad_clip: float = 1.0  # largest norm of the gradient of all weights (inf: no clipping)


@dataclass(frozen=True)
class VLLMConfig:
    """The engine of --rollout vllm."""

    tensor_parallel_size: int = 1  # ranks that share one engine and its copy of the actor
    gpu_memory_utilization: float = 0.5  # part of a device's memory that the engine takes while it is awake
    kv_cache_gib: float | None = None  # of keys and values (None: what the memory above leaves; on CPU what rows need)
    enforce_eager: bool = False  # no CUDA graphs: starts sooner, takes less memory, generates slower (always on CPU)
    sleep_level: Literal[1, 2] = 1  # with --offload its weights wait on the host (1), or are dropped (2)


CriticConfig = TypeVar("CriticConfig")  # of the script that --critic names


@dataclass(frozen=True)
class Run(Generic[CriticConfig]):
    """Trains a policy by PPO, evaluates it, saves it as a checkpoint and a Hugging Face folder."""

    critic: Annotated[CriticConfig, tyro.conf.arg(name="critic")]
    actor: ActorConfig = ActorConfig()
    vllm: VLLMConfig = VLLMConfig()
    backend: Annotated[Literal["fsdp", "megatron"], tyro.conf.arg(name="critic")] = "fsdp"  # whose flags are --critic.*

    # task
    prompts: str | None = None  # JSONL, or a hub dataset as NAME:CONFIG:SPLIT (None: the built-in addition)
    eval_prompts: str | None = None  # the same, to evaluate on (None: no evaluation; addition has its own)
    prompt_key: str = "prompt"  # where a row has its prompt: text, or a list of chat messages
    answer_key: str = "answer"  # where it has the reference answer, which reward functions get
    prompt_template: str = "{prompt}"  # around a prompt of text
    chat: bool = False  # a prompt of text is what a user says: it goes through the tokenizer's chat template
    max_prompt_length: int = 1024  # longer prompts, in tokens, are left out and counted
    skip_bad_rows: bool = False  # leave bad rows out, count and report them, instead of stopping at the first
    supervised_steps: int = 250  # addition with a tiny-* actor: steps of supervised learning before PPO

    # reward
    reward: str | None = None  # addition, gsm8k or FILE.py:FUNCTION, called as f(prompt, response, answer) -> number
    reward_model: str | None = None  # folder or hub name of a reward model instead (one label, on the last token)
    reward_timeout: float = 10.0  # seconds a reward function or environment may take for a row
    environment: str | None = None  # FILE.py:FUNCTION, f(prompt, response, answer) -> what follows the turn, or None
    max_turns: int = 8  # of the policy in one row, if there is an environment

    # rollout
    rollout: Literal["hf", "vllm"] = "hf"  # engine: transformers' cache on a whole copy of the actor, or vLLM
    train_batch_size: int = 256  # prompts of a step, global
    rollout_n: int = 1  # responses to each (torchrun would take --n for its own)
    max_response_length: int | None = None  # tokens of a response with its observations (None: 8; 256 with --prompts)
    temperature: float = 1.0  # of sampling, and of the log-probs that are learned from
    top_p: float = 1.0  # sample only from the likeliest tokens, as many as have this probability together
    rollout_batch_size: int = 256  # rows generated at once, per engine
    dump_rollouts: bool = False  # every step's rows (rewards less --kl-coef's cost) as JSONL in out_dir/rollouts

    # advantages
    gamma: float = 1.0  # discount of a reward per action
    lam: float = 1.0  # GAE's lambda for the returns that the critic learns
    lam_policy: float | None = None  # the same for the advantages (None: as lam): decoupled GAE
    length_adaptive_alpha: float | None = None  # in place of lam_policy: lambda is 1 - 1 / (alpha actions)
    whiten_advantages: bool = True  # mean 0 and deviation 1 over the actions of the global batch
    bootstrap_truncated: bool = False  # the last value stands for the future of a row cut off by the length limit

    # KL to the reference in the reward
    kl_coef: float = 0.0  # what a nat costs, token by token (0: nothing)
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = "k1"  # its estimate
    target_kl: float | None = None  # adapt kl_coef so that the KL of a token stays near this (None: fixed)
    kl_horizon: int = 10_000  # rows over which it adapts

    # run
    steps: int = 100  # PPO steps
    critic_warmup: int = 0  # first steps, in which the critic alone learns
    eval_every: int = 20  # steps between evaluations (0: only at the start and the end)
    eval_samples: int = 0  # responses sampled for each prompt there (0: one, greedy)
    save_every: int = 0  # steps between checkpoints (0: only at the end)
    keep: int | None = None  # checkpoints to keep, the last ones (None: all)
    async_save: bool = False  # write checkpoints beside the training, from a copy of the state on the host
    resume: str | None = None  # checkpoint folder to go on from; auto: the last complete one in out_dir, if any
    max_skipped_updates: int = 10  # so many updates of the critic in a row that are not finite end the run (0: never)
    offload: bool = False  # actor, reference, critic, reward model, engine: on the device in their own phases only
    seed: int = 0  # of the order of prompts and of every sampled token
    out_dir: str = "out/ppo_loop"  # for checkpoints, the Hugging Face folder, metrics and curves
    report: str = "auto"  # page on what the critic learned (auto: report.html in out_dir; none: no page)
    report_against: str | None = None  # report.html of another run, to stand beside this one's
    profile_steps: str | None = None  # A:B, steps that torch.profiler records into out_dir/profile (None: none)
    profile_ranks: tuple[int, ...] = (0,)  # ranks that it records on
    wandb_project: str | None = None  # log to Weights & Biases too, if it is installed


def parse(args):
    """Run from the command line. --critic is looked up first: it says what stands behind --critic.*."""
    given = [b for a, b in zip(args, args[1:], strict=False) if a == "--critic"]
    given += [a.removeprefix("--critic=") for a in args if a.startswith("--critic=")]
    module = critic_module(given[-1] if given and given[-1] in ("fsdp", "megatron") else "fsdp")
    default = Run(critic=module.Config(model="actor", ppo_mini_batch_size=ActorConfig.ppo_mini_batch_size))
    return tyro.cli(Run[module.Config], default=default, description=__doc__, args=args, console_outputs=RANK == 0)


def critic_module(backend):
    """critic_fsdp or critic_megatron, imported only where it is asked for."""
    if backend == "megatron":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return importlib.import_module(f"critic_{backend}")


@contextlib.contextmanager
def flags_of(part):
    """A UserError from in here names flags as this script knows them: --lr of the actor is --actor.lr."""
    try:
        yield
    except UserError as error:
        ours = r"(?<!\S)--(?!resume|out-dir|nproc|actor\.|critic\.)(?=[a-z])"  # not in the middle of a path
        raise UserError(re.sub(ours, f"--{part}.", str(error))) from None


def validate(run):
    """Raises UserError for flags that cannot work, before a process group or a model is built."""
    common.check_choices(run)
    for name in (
        "train_batch_size", "rollout_n", "max_prompt_length", "max_response_length", "rollout_batch_size", "max_turns",
        "kl_horizon", "steps", "keep",
    ):  # fmt: skip
        common.check_flag(run, name, "must be at least 1", lambda x: x is None or x >= 1)
    for name in (
        "supervised_steps", "critic_warmup", "eval_every", "eval_samples", "save_every", "max_skipped_updates",
        "kl_coef",
    ):  # fmt: skip
        common.check_flag(run, name, "must be finite and not below 0", lambda x: 0 <= x < math.inf)
    for name in ("temperature", "reward_timeout", "target_kl", "length_adaptive_alpha"):
        common.check_flag(run, name, "must be above 0 and finite", lambda x: x is None or 0 < x < math.inf)
    for name in ("gamma", "lam", "lam_policy"):
        common.check_flag(run, name, "must be between 0 and 1", lambda x: x is None or 0 <= x <= 1)
    common.check_flag(run, "top_p", "must be above 0, and at most 1", lambda x: 0 < x <= 1)
    if run.lam_policy is not None and run.length_adaptive_alpha is not None:
        raise UserError("--lam-policy and --length-adaptive-alpha: give one of them")
    if run.target_kl is not None and not run.kl_coef:
        raise UserError(f"--target-kl {run.target_kl}: adapts --kl-coef, which is 0; give it a value to begin with")
    rows = run.train_batch_size * run.rollout_n
    if run.target_kl is not None and run.kl_horizon < rows:  # far below, --kl-coef would turn negative
        raise UserError(f"--kl-horizon {run.kl_horizon}: must be at least the {rows} rows of a step")
    if run.eval_prompts and not run.prompts:
        raise UserError(f"--eval-prompts {run.eval_prompts}: goes with --prompts; addition has its own")
    if run.prompts and not (run.reward or run.reward_model):
        raise UserError("--reward: is needed with --prompts: gsm8k, or FILE.py:FUNCTION; or give --reward-model")
    if run.reward and run.reward_model:
        raise UserError("--reward and --reward-model: give one of them")
    if "{prompt}" not in run.prompt_template:
        raise UserError(f"--prompt-template {run.prompt_template}: has no {{prompt}} in it")
    with flags_of("actor"):
        validate_actor(run.actor)
    with flags_of("vllm"):
        validate_vllm(run.vllm)
    with flags_of("critic"):
        critic_module(run.backend).validate(run.critic)
    if run.critic.ppo_max_token_len_per_gpu == "auto" and run.critic.memory_limit_gib is None and not run.offload:
        raise UserError(
            "--critic.ppo-max-token-len-per-gpu auto: would take what the actor needs; add --offload, or give "
            "--critic.memory-limit-gib"
        )
    common.check_outputs(run, "hf", "critic_hf", *["supervised"] * teaches(run))


def teaches(run):
    """Whether a new run begins with learn_to_add."""
    return run.prompts is None and run.supervised_steps > 0 and run.actor.model in common.TINY


def validate_actor(config):
    common.check_trainable(config)
    for name in ("ppo_epochs", "ppo_mini_batch_size", "ppo_max_token_len_per_gpu", "grad_clip"):
        common.check_flag(config, name, "must be above 0", lambda x: x > 0)
    for name in ("lr", "clip_ratio_high", "response_length_limit", "tis_cap"):
        common.check_flag(config, name, "must be above 0 and finite", lambda x: x is None or 0 < x < math.inf)
    for name in ("lr_warmup_steps", "weight_decay", "entropy_coeff", "kl_loss_coef", "seed"):
        common.check_flag(config, name, "must be finite and not below 0", lambda x: 0 <= x < 2**63)
    common.check_flag(config, "clip_ratio_low", "must be above 0, and at most 1", lambda x: 0 < x <= 1)
    common.check_flag(config, "clip_ratio_c", "must be above 1", lambda x: x is None or x > 1)
    shard = config.fsdp_size
    if shard != -1 and (shard < 1 or WORLD_SIZE % shard):
        raise UserError(f"--fsdp-size {shard}: must divide the {WORLD_SIZE} ranks, or be -1 for all of them")


def validate_vllm(config):
    common.check_choices(config)
    size = config.tensor_parallel_size
    if size < 1 or WORLD_SIZE % size:
        raise UserError(f"--tensor-parallel-size {size}: must divide the {WORLD_SIZE} ranks")
    common.check_flag(config, "gpu_memory_utilization", "must be above 0, and at most 1", lambda x: 0 < x <= 1)
    common.check_flag(config, "kv_cache_gib", "must be above 0 and finite", lambda x: x is None or 0 < x < math.inf)


# ---------------------------------------------------------------------------------------------------------------------
# Task: prompts, rewards, environment
# ---------------------------------------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    ids: list  # tokens the response is to follow
    text: str  # the same as functions of the user see it: as the row has it, chat messages as their last content
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
    """n additions of two numbers of two digits; the prompts of the toy, and held out are the same."""
    texts = dict.fromkeys(json.loads(row)["prompt"] for row in common.toy_rows(n, seed, held_out))
    answer = lambda text: str(sum(map(int, text.rstrip("=").split("+"))))
    return [Prompt(tokenizer(text)["input_ids"], text, answer(text)) for text in texts]


def hash_of(key):
    """A number of 63 bits that follows from a string alone, on every machine."""
    return random.Random(key).getrandbits(63)


def load_prompts(source, flag, run, tokenizer):
    """Prompts of a JSONL file or a hub dataset, too long ones left out. UserError names the first bad row."""
    prompts, faults, rows = [], {}, list(read_rows(source, flag))
    for number, row in enumerate(common.progress(rows, "prompts"), 1):
        if isinstance(row, bytes) and not row.strip():
            continue
        try:
            prompts.append(parse_prompt(row, run, tokenizer))
        except UserError as fault:
            faults[number] = str(fault)
    common.report_faults(faults, len(prompts) + len(faults), f"{flag} {source}", run.skip_bad_rows)
    short = [p for p in prompts if len(p.ids) <= run.max_prompt_length]
    if len(short) < len(prompts):
        print0(f"{flag} {source}: left out {len(prompts) - len(short)} prompts above --max-prompt-length")
    if not short:
        raise UserError(f"{flag} {source}: no usable prompt")
    return short


def read_rows(source, flag):
    """The rows of a JSONL file (as lines) or of a hub dataset (as dicts)."""
    if os.path.isfile(source):
        try:
            with open(source, "rb") as file:
                return list(file)
        except OSError as error:
            raise UserError(f"{flag} {source}: cannot be read ({error.strerror})") from None
    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    if source.endswith((".jsonl", ".json")) or not split:
        raise UserError(f"{flag} {source}: no such file (a hub dataset is given as NAME:CONFIG:SPLIT)")
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"{flag} {source}: is no file; to read it from the hub pip install datasets")
    from datasets import load_dataset

    try:
        return load_dataset(name, config or None, split=split)
    except Exception as error:  # a dozen kinds, of several libraries
        raise UserError(f"{flag} {source}: cannot be read ({common.one_line(error)})") from None


def parse_prompt(row, run, tokenizer):
    """A row, JSON or dict -> Prompt. UserError says what is wrong with it."""
    if isinstance(row, str | bytes):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise UserError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"a row is a JSON object, this is a {type(row).__name__}")
    if row.get(run.prompt_key) is None:
        raise UserError(f"has no {run.prompt_key!r}, only {', '.join(sorted(row)) or 'nothing'}; see --prompt-key")
    prompt, messages = row[run.prompt_key], None
    if isinstance(prompt, str):
        text = run.prompt_template.replace("{prompt}", prompt)
        if run.chat:
            messages = [{"role": "user", "content": text}]
    elif not isinstance(prompt, list):
        raise UserError(f"{run.prompt_key!r} must be text or a list of chat messages, not {prompt!r:.40}")
    else:
        messages = prompt
        common.check_messages(messages)
        text = messages[-1].get("content") or ""
        if isinstance(text, list):
            text = "".join(str(part.get("text") or "") for part in text if isinstance(part, dict))
    try:
        json.dumps([text, messages], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError("holds half a surrogate pair, which is not text") from None
    if messages is not None:
        try:
            whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs and raise what they like
            raise UserError(f"does not fit the tokenizer's chat template: {common.one_line(error)}") from None
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]  # a template writes special tokens itself
    else:
        ids = tokenizer(text)["input_ids"]
    if not ids:
        raise UserError("empty prompt")
    answer = row.get(run.answer_key)
    if run.reward in REWARDS and not isinstance(answer, str):
        raise UserError(f"{run.answer_key!r} must be text, --reward {run.reward} compares with it; see --answer-key")
    if run.reward == "gsm8k" and not gsm8k_reward(text, answer, answer):  # no response would ever be right
        raise UserError(f"{run.answer_key!r} has no number after ####, which --reward gsm8k compares with")
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
    if not path or not os.path.isfile(path):
        known = f"{', '.join(REWARDS)} or " if flag == "--reward" else ""
        raise UserError(f"{flag} {name}: must be {known}FILE.py:FUNCTION, and there is no such file")
    spec = importlib.util.spec_from_file_location(f"user_{hash_of(path)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        line = lines[-1] if lines else getattr(error, "lineno", "?")  # of a SyntaxError, which has no frame in there
        raise UserError(f"{flag} {name}: line {line}: {common.one_line(error)}") from None
    if not callable(getattr(module, function, None)):
        raise UserError(f"{flag} {name}: the file has no function {function}")
    return getattr(module, function)


class TookTooLong(BaseException):
    """Not an Exception: a function that catches those must not swallow it."""


def guarded(function, seconds, *args):
    """(its result, "") or (None, what went wrong). The alarm rings in Python code: a call into C is waited for."""

    def ring(*_):
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, min(seconds, 1e6))
            return function(*args), ""
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TookTooLong:
        return None, f"timeout: took longer than {seconds:g} s"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit, asyncio.CancelledError: the row's fault, not the run's
        return None, common.one_line(error)
    finally:
        signal.signal(signal.SIGALRM, before)


def checked(score):
    """(a reward as a float, "") or (0.0, what is wrong with it)."""
    try:
        x, said = float(score) if isinstance(score, numbers.Real | numpy.bool_) else math.nan, f"{score!r:.40}"
    except Exception as error:  # an integer without end, a repr that raises
        x, said = math.nan, common.one_line(error)
    return (x, "") if abs(x) <= common.LARGEST else (0.0, f"the reward must be a finite number, is {said}")


def rule_scores(function, prompts, texts, seconds):
    """(reward of each row, what went wrong in each: "" where nothing did). A row that has none gets 0."""
    scores, faults = [], []
    for prompt, text in zip(prompts, texts, strict=True):
        score, fault = guarded(function, seconds, prompt.text, text, prompt.answer)
        score, fault = (0.0, fault) if fault else checked(score)
        scores.append(score)
        faults.append(fault)
    return scores, faults


def reward_config(run):
    """Flags of the critic that is a reward model."""
    return critic_fsdp.Config(
        model=run.reward_model, value_head_init="checkpoint", param_dtype=run.actor.param_dtype,
        ppo_max_token_len_per_gpu=run.actor.ppo_max_token_len_per_gpu + 1,  # one more: see RewardModel.scores
        fsdp_size=run.actor.fsdp_size, trust_remote_code=run.actor.trust_remote_code,
    )  # fmt: skip


@contextlib.contextmanager
def named_reward_model(run):
    """A UserError from in here names --reward-model, not the flags of the critic that it is made of."""
    try:
        yield
    except UserError as error:
        words = str(error).removeprefix("--value-head-init checkpoint: ").removeprefix(f"--model {run.reward_model}: ")
        raise UserError(f"--reward-model {run.reward_model}: {words}") from None


def check_reward_model(run, tokenizer, known, longest):
    """UserError if the reward model is not there, or cannot take rows of so many tokens, of so many known ones."""
    config = reward_config(run)
    with named_reward_model(run):
        own = common.load_tokenizer(config) or tokenizer
        model_config = common.load_model_config(config, own)
        if own.get_vocab() == tokenizer.get_vocab():  # else it reads the text in tokens of its own
            words = f"the longest prompt with its response has {longest}, and one more marks its end"
            check_takes(config, model_config, longest + 1, words, known)


class RewardModel:
    """Scores whole rows: the one label of a sequence or token classifier, read on the last token.

    That is the value of the state after the last action, so critic_fsdp's worker does the work, packed and sharded.
    """

    def __init__(self, run, tokenizer):
        with named_reward_model(run):
            self.worker = critic_fsdp.CriticWorker(reward_config(run))
            self.worker.init_model()
        self.tokenizer = self.worker.tokenizer or tokenizer
        self.same_tokens = self.tokenizer.get_vocab() == tokenizer.get_vocab()
        self.offload, self.onload = self.worker.offload, self.worker.onload

    def ids(self, prompt, text, ids):
        """The row as this model reads it: the policy's tokens where both have the same, else its own of the text."""
        if self.same_tokens:
            return ids
        if prompt.messages and self.tokenizer.chat_template:
            messages = [*prompt.messages, {"role": "assistant", "content": text}]
            whole = self.tokenizer.apply_chat_template(messages, tokenize=False)
            return self.tokenizer(whole, add_special_tokens=False)["input_ids"]
        return self.tokenizer(prompt.text + text)["input_ids"]

    def scores(self, prompts, texts, batch):
        """Rewards of the caller's rows, a list (a collective)."""
        rows = [self.ids(*row) for row in zip(prompts, texts, (x.tolist() for x in rows_of(batch)), strict=True)]
        ends = torch.tensor([len(ids) + 1 for ids in rows], dtype=torch.int64).cumsum(0)
        mask_T = torch.zeros(int(ends[-1]) if rows else 0, dtype=torch.bool)
        mask_T[ends - 1] = True  # one more token, which nothing reads but its place: the action whose state is the end
        whole = dataclasses.replace(
            batch, input_ids=torch.tensor([i for ids in rows for i in [*ids, 0]], dtype=torch.int64),
            cu_seqlens=common.cumulative(torch.tensor([len(ids) + 1 for ids in rows], dtype=torch.int64)),
            response_mask=mask_T, **dict.fromkeys(common.Batch.FLOATS),
        )  # fmt: skip
        try:
            with flags_of("actor"):
                return self.worker.compute_values(whole)[mask_T].tolist()
        except (UserError, ValueError) as error:  # more tokens of the text than the actor's, or than it can take
            raise UserError(f"--reward-model, in tokens of its own: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Rollout: an engine makes tokens, a batch comes of them
# ---------------------------------------------------------------------------------------------------------------------


class HFRollout:
    """Generates with transformers' own cache on a whole copy of the policy, each rank for the rows it owns.

    Every row draws its own random numbers from its key alone, so it gives the same sample in any batch and on any
    number of ranks, up to rounding.
    """

    def __init__(self, run, task, device):
        config, model_config, self.top_p, self.rows = run.actor, task.model_config, run.top_p, run.rollout_batch_size
        self.device, self.dtype = device, critic_fsdp.compute_dtype(config, device)
        self.stop = torch.tensor(task.stop_ids, dtype=torch.int64, device=device)
        capped = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)  # which sdpa would leave out
        with device:
            self.model = AutoModelForCausalLM.from_config(
                copy.deepcopy(model_config),  # it keeps its attention in there, and the actor has another
                dtype=self.dtype, attn_implementation="eager" if capped else "sdpa",
                trust_remote_code=config.trust_remote_code,
            ).eval()  # fmt: skip
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
        parts = [order[i : i + self.rows] for i in range(0, len(order), self.rows)]  # like lengths: less padding
        for rows in common.progress(parts, "rollout"):
            pick = lambda column, rows=rows: [column[i] for i in rows]
            for i, reply in zip(rows, self.replies(*map(pick, (prompts, keys, room)), temperature), strict=True):
                out[i] = reply
        return out

    @torch.inference_mode()
    def replies(self, prompts, keys, room, temperature):
        """generate() of one batch, left-padded; rows that are done leave it."""
        uniform = lambda key, n: torch.rand(
            n, generator=torch.Generator().manual_seed(hash_of(key)), dtype=torch.float64
        )
        longest, dev = max(len(p) for p in prompts), self.device
        u_BR = torch.stack([uniform(key, max(room)) for key in keys]).to(dev)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=dev)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=dev)
        positions, room_B = (mask.cumsum(1) - 1).clamp(min=0), torch.tensor(room, device=dev)
        cache, rows = DynamicCache(config=self.model.config), torch.arange(len(prompts), device=dev)
        taken, ended = [], torch.zeros(len(prompts), dtype=torch.bool, device=dev)  # taken: (rows, ids, log-probs)
        for step in range(max(room)):
            logits_BV = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1].float()  # fmt: skip
            log_p_BV = (logits_BV / (temperature or 1.0)).log_softmax(-1)
            if temperature and self.top_p < 1:
                log_p_BV = nucleus(log_p_BV, self.top_p)
            if temperature:  # inverse of the distribution function: one number a token, the same on every device
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
        config, actor, self.stop, self.top_p = run.vllm, run.actor, task.stop_ids, run.top_p
        self.level, self.size, self.on_cpu = config.sleep_level, config.tensor_parallel_size, device.type == "cpu"
        self.dtype = critic_fsdp.compute_dtype(actor, device)
        self.group = None
        if self.size > 1:  # neighbours, as vLLM has it
            self.group, _ = dist.new_subgroups(self.size, timeout=common.TIMEOUT[0])
        with torch.device("meta"):
            self.skeleton = AutoModelForCausalLM.from_config(  # knows what a checkpoint calls its tensors
                copy.deepcopy(task.model_config), trust_remote_code=actor.trust_remote_code
            )
        with process_as_it_was(), tempfile.TemporaryDirectory() as folder:
            try:
                self.llm = self.start(run, task, folder)
            except Exception as error:  # a dozen kinds
                room = "" if config.kv_cache_gib is None else f" with --vllm.kv-cache-gib {config.kv_cache_gib:g}"
                words = f"cannot run {actor.model}{room} ({common.one_line(error)})"
                raise UserError(f"--rollout vllm: {words}") from None
        self.engines.append(self.llm)
        cache = self.llm.llm_engine.vllm_config.cache_config
        print0(
            f"vllm       {WORLD_SIZE // self.size} engines x {self.size} ranks; keys and values of each "
            f"{cache.num_gpu_blocks:,} blocks x {cache.block_size} = {cache.num_gpu_blocks * cache.block_size:,} tokens"
        )

    def start(self, run, task, folder):
        """vLLM's LLM, with random weights; folder: where it finds the model's config."""
        config, actor, model_config = run.vllm, run.actor, copy.deepcopy(task.model_config)
        model_config.architectures = [type(self.skeleton).__name__]
        model_config.save_pretrained(folder)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # without torchrun
        os.environ |= {key: x for key, x in (quiet | alone).items() if key not in os.environ}
        from vllm import LLM
        from vllm.distributed import parallel_state
        from vllm.platforms import current_platform

        if self.on_cpu and self.size > 1:  # its shared memory has one name in all runs of a machine, and stays
            from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

            CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False  # so it takes gloo
        sleeps = current_platform.is_sleep_mode_available()
        if run.offload and not sleeps:
            print0("vllm       has no sleep mode on this platform: what it holds stays while the others work")
        llm = LLM(
            model=actor.model if actor.trust_remote_code else folder,
            load_format="dummy",  # the first sync fills it
            skip_tokenizer_init=True,
            generation_config="vllm",  # defaults that are none, whatever comes with the model
            trust_remote_code=actor.trust_remote_code,
            dtype=str(self.dtype).removeprefix("torch."),
            max_model_len=task.longest,
            max_num_seqs=run.rollout_batch_size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_memory_bytes=self.kv_cache_bytes(run, task),
            enforce_eager=config.enforce_eager or self.on_cpu,
            enable_sleep_mode=run.offload and sleeps,
            tensor_parallel_size=self.size,
            distributed_executor_backend="external_launcher",  # each torchrun process runs its own part
            logprobs_mode="processed_logprobs",  # of what is sampled from: after temperature and top-p
            seed=0,  # of nothing: requests bring their own
        )
        if self.size > 1:  # more shared memory, which nobody removes when common.run ends the process
            parallel_state.get_tp_group().mq_broadcaster = None
        return llm

    def kv_cache_bytes(self, run, task):
        """Bytes of --vllm.kv-cache-gib. Without it None; on CPU, where vLLM would take its part of all memory, what as
        many of the longest rows take as run at once, at most 4 GiB."""
        if run.vllm.kv_cache_gib is not None:
            return int(run.vllm.kv_cache_gib * 2**30)
        if not self.on_cpu:
            return None
        c, block = task.model_config.get_text_config(), 128
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        token = 2 * c.num_hidden_layers * heads * head_dim * self.dtype.itemsize // self.size
        return min(token * block * (run.rollout_batch_size * math.ceil(task.longest / block) + 1), 4 * 2**30)

    def onload(self):
        """Wakes the weights. Only after a sync is there a cache, and something to generate with."""
        self.llm.wake_up(tags=["weights"])

    def offload(self):
        """Frees the device memory of the engine, where the platform can."""
        self.llm.sleep(level=self.level)

    def sync(self, weights):
        """Takes the actor's weights, (name, whole tensor) pairs in self.dtype, layer by layer; forgets cached keys and
        values, which were the old weights'. Every rank calls it, for gathering weights is a collective."""
        named = (
            pair for name, weight in weights for pair in revert_weight_conversion(self.skeleton, {name: weight}).items()
        )
        if self.on_cpu:
            self.llm.apply_model(forget_experts)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        if self.on_cpu:  # there a head that is tied to the embeddings is a packed copy, which nobody renews
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
        params = [
            SamplingParams(
                temperature=temperature, top_p=self.top_p if temperature else 1.0, seed=hash_of(key), max_tokens=most,
                stop_token_ids=self.stop, ignore_eos=True, logprobs=0, detokenize=False,
            )
            for _, key, most in rows
        ]  # fmt: skip
        eager = torch.compiler.set_stance("force_eager") if self.on_cpu else contextlib.nullcontext()
        # on CPU the compiler takes longer than the rollout, and needs one for C++; and it draws from torch's generator
        with eager, torch.random.fork_rng(devices=()):
            out = self.llm.generate(
                [{"prompt_token_ids": prompt} for prompt, _, _ in rows], params,
                use_tqdm=RANK == 0 and sys.stderr.isatty(),
            )  # fmt: skip
        replies = [reply.outputs[0] for reply in out[before : before + len(prompts)]]
        log_probs = lambda r: [at[token].logprob for at, token in zip(r.logprobs, r.token_ids, strict=True)]
        return [(list(r.token_ids), log_probs(r), r.finish_reason == "stop") for r in replies]


def forget_experts(model):
    """Runs in vLLM: its experts will be packed again, which on CPU they are only where they have no kernel yet."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        if isinstance(module, UnquantizedFusedMoEMethod):
            module.moe_kernel = None


def repack_head(model):
    """Runs in vLLM: its head, if it has one beside the embeddings, takes their weights again."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def process_as_it_was():
    """Undoes what vLLM does to the process that starts it: random state, threads, environment, garbage collection; says
    nothing of its warnings.

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
    tokenizer, observe = task.tokenizer, task.observe
    ids, mask, log_probs, finished = ([[] for _ in prompts] for _ in range(4))
    faults, going = [""] * len(prompts), list(range(len(prompts)))
    for turn in range(run.max_turns if observe else 1):
        room = [run.max_response_length - len(ids[i]) for i in going]
        asked = [prompts[i].ids + ids[i] for i in going]
        out = engine.generate(asked, [f"{keys[i]} {turn}" for i in going], room, temperature)
        still = []
        for i, (tokens, chances, ended) in zip(going, out, strict=True):
            ids[i], mask[i], log_probs[i] = ids[i] + tokens, mask[i] + [True] * len(tokens), log_probs[i] + chances
            finished[i] = ended
            if not ended or observe is None or turn == run.max_turns - 1:
                continue
            text = tokenizer.decode(ids[i], skip_special_tokens=True)
            said, faults[i] = guarded(observe, run.reward_timeout, prompts[i].text, text, prompts[i].answer)
            if said is not None and not isinstance(said, str):
                said, faults[i] = None, f"an environment answers with text or None, not {said!r:.40}"
            if said is None:
                continue
            said = said.encode(errors="replace").decode()  # half a surrogate pair is no text: "?" for it
            seen = tokenizer(said, add_special_tokens=False)["input_ids"]
            finished[i] = len(ids[i]) + len(seen) < run.max_response_length
            if finished[i]:
                ids[i], mask[i] = ids[i] + seen, mask[i] + [False] * len(seen)
                log_probs[i] = log_probs[i] + [0.0] * len(seen)
                still.append(i)
        going = still
        if not engine.any_left(going):
            break
    replies = [Reply(*columns) for columns in zip(ids, mask, log_probs, finished, strict=True)]
    return replies, [tokenizer.decode(reply.ids, skip_special_tokens=True) for reply in replies], faults


def to_batch(prompts, replies, row_ids):
    """Batch of prompts and replies, with the log-probs as the engine has them."""
    rows = [prompt.ids + reply.ids for prompt, reply in zip(prompts, replies, strict=True)]
    before = lambda key, fill: [
        x for p, r in zip(prompts, replies, strict=True) for x in [fill] * len(p.ids) + getattr(r, key)
    ]
    return common.Batch(
        input_ids=torch.tensor([i for row in rows for i in row], dtype=torch.int64),
        cu_seqlens=common.cumulative(torch.tensor([len(row) for row in rows], dtype=torch.int64)),
        response_mask=torch.tensor(before("mask", False), dtype=torch.bool),
        row_id=torch.tensor(row_ids, dtype=torch.int64),
        truncated=torch.tensor([not reply.finished for reply in replies], dtype=torch.bool),
        rollout_log_probs=torch.tensor(before("log_probs", 0.0), dtype=torch.float32),
    )


def rows_of(batch):
    """Token ids of each row."""
    return batch.input_ids.split(batch.lengths)


# ---------------------------------------------------------------------------------------------------------------------
# Policy: the actor, which learns, and the reference, which does not
# ---------------------------------------------------------------------------------------------------------------------

LOGITS_AT_ONCE = 2**25  # 128 MiB in float32


def log_probs_and_entropy(logits_of, hidden_AD, targets_A, vocab_size):
    """-> (A,) log-probs of the targets, (A,) entropies of their distributions, float32.

    logits_of: (C, D) -> (C, V). Never more than a chunk of logits is held: the backward pass computes each again.
    """

    def piece(hidden_CD, targets_C):
        log_p_CV = logits_of(hidden_CD).float().log_softmax(-1)
        return log_p_CV.gather(1, targets_C[:, None])[:, 0], -(log_p_CV.exp() * log_p_CV).sum(-1)

    size = max(1, LOGITS_AT_ONCE // vocab_size)
    pieces = [
        checkpoint(piece, hidden_CD, targets_C, use_reentrant=False, preserve_rng_state=False)
        for hidden_CD, targets_C in zip(hidden_AD.split(size), targets_A.split(size), strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*pieces, strict=True))


class Policy(nn.Module):
    """A causal language model that says how likely the actions of a packed row were."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        self.softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self, input_ids, position_ids, response_mask_T, temperature):
        """(1, T) ids -> (A,) log-probs and entropies of the actions, each read from the hidden state before it."""
        hidden_TD = self.lm.get_decoder()(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state[0]
        action_A, head = response_mask_T.nonzero()[:, 0], self.lm.get_output_embeddings()

        def logits_of(hidden_CD):
            logits_CV = head(hidden_CD).float()
            if self.softcap:
                logits_CV = self.softcap * torch.tanh(logits_CV / self.softcap)
            return logits_CV / temperature

        return log_probs_and_entropy(logits_of, hidden_TD[action_A - 1], input_ids[0][action_A], head.weight.shape[0])


def read_lm(config, model_config, dtype):
    """The language model on the host with its weights, and words on where they come from. Runs on rank 0 alone."""
    if config.model in common.TINY or config.from_scratch:
        torch.manual_seed(config.seed)
        lm = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
        for p in lm.parameters():  # not lm.to(dtype), which would round the rotary tables too
            p.data = p.data.to(dtype)
        return lm, f"random weights (seed {config.seed})"
    folder = common.local_folder(config.model)
    lm = common.load_pretrained(AutoModelForCausalLM, folder, config, model_config, dtype=dtype)
    return lm, f"{type(lm).__name__} from {config.model}"


@flags_of("actor")
def build_policy(config, model_config, device, trains):
    """The Policy, sharded by FSDP2, and words on it. Every rank builds on meta; rank 0 alone reads the weights and
    sends each rank its shards. What trains has float32 weights, a reference those of the compute dtype."""
    compute = critic_fsdp.compute_dtype(config, device)
    dtype = torch.float32 if trains else compute
    try:
        with torch.device("meta"):
            model = Policy(
                AutoModelForCausalLM.from_config(
                    copy.deepcopy(model_config),
                    dtype=dtype,
                    attn_implementation="packed",
                    trust_remote_code=config.trust_remote_code,
                )
            )
    except Exception as error:
        raise UserError(f"--model {config.model}: cannot be built ({common.one_line(error)})") from None
    if not model.lm._can_set_attn_implementation():
        raise UserError(f"--model {config.model}: brings its own attention, which knows nothing of packed rows")
    model.requires_grad_(trains)
    if config.gradient_checkpointing and trains:
        model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    flops, count = common.flops_model(model, model_config), sum(p.numel() for p in model.parameters())
    options = {
        "mesh": common.sharding_mesh(device, config.fsdp_size),
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
    }
    for block in common.transformer_blocks(model.lm):
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.set_reduce_scatter_unused_params(True)  # as critic_fsdp.py does
    model.to_empty(device=device)
    model.lm.tie_weights()  # to_empty made two of what is one
    source, story = read_lm(config, model_config, dtype) if RANK == 0 else (None, "")
    full = {f"lm.{name}": x for name, x in source.state_dict().items()} if RANK == 0 else {}
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    buffers = dict(source.named_buffers()) if RANK == 0 else {}
    for name, buffer in sorted(model.lm.named_buffers()):  # rotary tables are in no state dict
        if RANK == 0:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, src=0)
    return model, flops, f"{config.model} ({model_config.model_type}), {count:,} parameters: {story}"


class PolicyWorker:
    """A policy spread over all ranks. Methods under DP_COMPUTE_PROTO take the rows a rank owns and work on the global
    batch, like the critic's; a reference has no optimizer."""

    def __init__(self, config, model_config, device, temperature, trains=True):
        self.config, self.model_config, self.device, self.temperature = config, model_config, device, temperature
        self.model, self.flops, self.story = build_policy(config, model_config, device, trains)
        self.optimizer = None
        if trains:
            options = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **options, fused=True)
        self.optimizer_steps = 0  # taken, skipped ones not counted
        self.updates = 0  # calls of update_policy: with seed and epoch the key of every shuffle

    def my_micro_batches(self, batch):
        """This rank's rows of a global batch as lists of row indices, one list a micro-batch; as many on every rank."""
        lengths = batch.lengths
        shares = common.balance([self.flops.forward_flops(n) for n in lengths], WORLD_SIZE)
        parts = common.micro_batches([[lengths[i] for i in s] for s in shares], self.config.ppo_max_token_len_per_gpu)
        return [[shares[RANK][j] for j in part] for part in parts[RANK]]

    @flags_of("actor")
    def forward_micro_batch(self, batch, rows):
        """-> (the rows on the device, (T,) log-probs and (T,) entropies of their actions, zero elsewhere)."""
        micro = batch.select(rows) if rows else common.masked_token()
        lengths, micro = micro.lengths, micro.to(self.device)
        position_ids = torch.cat([torch.arange(n) for n in lengths]).to(self.device, non_blocking=True)
        common.set_pack(lengths, self.device, kernel=self.config.attn_implementation)
        try:
            columns_A = self.model(micro.input_ids[None], position_ids[None], micro.response_mask, self.temperature)
        except UserError as error:
            if not str(error).startswith("--use-remove-padding: "):
                raise
            words = str(error).removeprefix("--use-remove-padding: ").rpartition(";")[0]
            raise UserError(f"--model {self.config.model}: {words}, and an actor learns from packed rows") from None
        to_tokens = lambda x_A: torch.zeros(len(position_ids), device=self.device).masked_scatter(
            micro.response_mask, x_A
        )
        return micro, *map(to_tokens, columns_A)

    @register(Dispatch.DP_COMPUTE_PROTO)
    @torch.no_grad()
    def compute_log_probs(self, batch):
        """Log-probs of the actions of the caller's rows at --temperature: (T,) float32, zero elsewhere."""
        self.model.eval()
        log_probs_T = torch.zeros(len(batch.input_ids), device=self.device)
        for rows in common.progress(self.my_micro_batches(batch), "log-probs"):
            _, micro_T, _ = self.forward_micro_batch(batch, rows)
            if rows:
                log_probs_T[batch.token_index(rows).to(self.device)] = micro_T
        self.free_gathered()
        dist.all_reduce(log_probs_T)  # each token was computed by one rank; the rest added zeros
        return log_probs_T.cpu()

    def free_gathered(self):
        """Frees the gathered weights that FSDP keeps after a forward, for a backward that may not come."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @register(Dispatch.DP_COMPUTE_PROTO, needs=("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages"))
    def update_policy(self, batch):
        """PPO epochs over mini-batches of the global batch, one optimizer step each -> metrics, equal on all ranks."""
        config = self.config
        totals, norms, lr, mini_batches = torch.zeros(7, dtype=torch.float64, device=self.device), [], math.nan, 0
        for epoch in range(config.ppo_epochs):
            order = range(len(batch))
            if config.shuffle:
                order = common.permutation(len(batch), config.seed, self.updates, epoch)
            for mini in batch.select(order).split(config.ppo_mini_batch_size):
                mini_batches += 1
                next_lr = self.learning_rate()
                norm, sums = self.step(mini, self.ppo_loss)
                if math.isfinite(norm):
                    lr = next_lr
                    norms.append(norm)
                    totals += sums
        self.updates += 1
        dist.all_reduce(totals)
        loss, clipped, dual, kl, ref_kl, entropy, actions = totals.tolist()
        mean = lambda x, n: x / n if n else math.nan
        return {
            "actor/pg_loss": mean(loss, len(norms)),
            "actor/pg_clipfrac": mean(clipped, actions),
            "actor/pg_clipfrac_lower": mean(dual, actions),
            "actor/ppo_kl": mean(kl, actions),
            "actor/kl_loss": mean(ref_kl, actions),
            "actor/entropy": mean(entropy, actions),
            "actor/grad_norm": mean(sum(norms), len(norms)),
            "actor/lr": lr,
            "actor/skipped_steps": mini_batches - len(norms),
        }

    def ppo_loss(self, micro, log_probs_T, entropy_T, weights_T):
        """-> (what is minimised, 0-dim; sums over the actions, see update_policy)."""
        c, mask_T, earned_T = self.config, micro.response_mask, weights_T
        if c.tis_cap is not None:
            earned_T = weights_T * common.truncated_ratio(micro.old_log_probs, micro.rollout_log_probs, c.tis_cap)
        loss, clipped, dual = common.policy_loss(
            log_probs_T, micro.old_log_probs, micro.advantages, mask_T, earned_T, c.clip_ratio_low, c.clip_ratio_high,
            c.clip_ratio_c,
        )  # fmt: skip
        ref_kl_T = common.kl_penalty(log_probs_T, micro.ref_log_probs, c.kl_loss_type)
        whole = loss + c.kl_loss_coef * (weights_T * ref_kl_T).sum() - c.entropy_coeff * (weights_T * entropy_T).sum()
        kl = (micro.old_log_probs - log_probs_T).sum()
        return whole, torch.stack([loss, clipped, dual, kl, ref_kl_T.sum(), entropy_T.sum(), mask_T.sum()])

    @register(Dispatch.DP_COMPUTE_PROTO)
    def imitate(self, batch):
        """One step of supervised learning of the actions of the rows of all ranks -> metrics, equal on all ranks."""
        norm, sums = self.step(batch, self.imitation_loss)
        dist.all_reduce(sums)
        return {"supervised/loss": sums[0].item(), "supervised/grad_norm": norm}

    def imitation_loss(self, micro, log_probs_T, entropy_T, weights_T):
        """Cross-entropy -> (what is minimised, 0-dim; the same for the sums)."""
        loss = -(weights_T * log_probs_T).sum()
        return loss, torch.stack([loss])

    def step(self, mini, loss_of):
        """One optimizer step on a global mini-batch -> (gradient norm before clipping, this rank's part of the sums).

        A norm that is not finite skips the step, on all ranks; so does a mini-batch without an action.
        """
        config, total = self.config, 0.0
        counts = common.loss_counts(mini.response_mask, mini.cu_seqlens)
        if counts.tokens == 0:
            return math.nan, torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.train()
        for rows in self.my_micro_batches(mini):
            micro, log_probs_T, entropy_T = self.forward_micro_batch(mini, rows)
            weights_T = common.loss_weights(
                micro.response_mask, micro.cu_seqlens, config.loss_agg_mode, counts, config.response_length_limit
            )
            loss, sums = loss_of(micro, log_probs_T, entropy_T, weights_T)
            (loss * WORLD_SIZE).backward()  # the loss is a sum over all ranks, but FSDP averages gradients over them
            total = total + sums.detach().double()
        norm = float(critic_fsdp.full_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)))
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
            yield name, critic_fsdp.full_tensor(p.detach().to(dtype or p.dtype))

    @register(Dispatch.ONE_TO_ALL)
    def offload(self):
        """Gives the device memory of weights and optimizer state to somebody else."""
        self.move(torch.device("cpu"))
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    @register(Dispatch.ONE_TO_ALL)
    def onload(self):
        """Takes it back."""
        self.move(self.device)

    def move(self, device):
        self.free_gathered()
        self.model.to(device)
        for state in self.optimizer.state.values() if self.optimizer else ():
            for name, value in state.items():
                if name != "step":  # a scalar, which stays
                    state[name] = value.to(device)

    def checkpoint_tensors(self):
        """critic_fsdp's, each tied weight under one name: safetensors writes no memory twice."""
        tensors, *states = critic_fsdp.checkpoint_tensors(self.model, self.optimizer)
        names = lambda **options: {f"model.{name}" for name, _ in self.model.named_parameters(**options)}
        for name in names(remove_duplicate=False) - names():
            del tensors[name]
        return tensors, *states

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder):
        """Writes model, optimizer and counters; the folder appears complete or not at all."""
        self.checkpoint_writer()(folder)

    def checkpoint_writer(self, copy=False):
        """write(folder, group): saves the state of now, which `copy` lets the training change meanwhile."""
        tensors, _, _ = self.checkpoint_tensors()
        counters = self.updates, self.optimizer_steps
        return critic_fsdp.tensor_writer(tensors, copy, "actor", self.config, self.model_config, *counters)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder):
        """Restores what save_checkpoint wrote, on any world size. UserError: damaged or foreign."""
        saved = common.open_checkpoint(folder, "actor", self.config, self.model_config)
        tensors, model_state, optimizer_state = self.checkpoint_tensors()
        critic_fsdp.read_tensors(tensors, folder, "actor")
        set_state_dict(self.model, self.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        self.updates, self.optimizer_steps = saved["updates"], saved["optimizer_steps"]

    @register(Dispatch.ONE_TO_ALL)
    def export_hf(self, folder, tokenizer):
        """Writes the language model as a Hugging Face folder that AutoModelForCausalLM loads."""
        state = {}
        for name, weight in self.weights():  # every rank takes part, rank 0 keeps them, on the host
            if RANK == 0:
                state[name] = weight.cpu()
        with common.complete_or_absent(folder) as tmp:
            if RANK == 0:
                with torch.device("meta"):
                    skeleton = AutoModelForCausalLM.from_config(
                        self.model_config, dtype=torch.float32, trust_remote_code=self.config.trust_remote_code
                    )
                skeleton.save_pretrained(tmp, state_dict=state)
                if self.config.model not in common.TINY:
                    with contextlib.suppress(OSError, ValueError):  # has none; not all stop tokens are in config.json
                        generation = GenerationConfig.from_pretrained(self.config.model)
                        generation.to_json_file(os.path.join(tmp, "generation_config.json"))
                tokenizer.save_pretrained(tmp)


def stop_tokens(config, tokenizer):
    """Ids that end a turn: the tokenizer's end of sequence, and those of the model's generation_config.json."""
    ids = {tokenizer.eos_token_id}
    if config.model not in common.TINY:
        with contextlib.suppress(OSError, ValueError):  # has none
            more = GenerationConfig.from_pretrained(config.model).eos_token_id
            ids |= set(more if isinstance(more, list) else [more])
    return sorted(ids - {None})


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


def settle(run):
    """(run with what follows from the task and the actor, its tokenizer, its transformers config)."""
    if run.rollout == "vllm" and importlib.util.find_spec("vllm") is None:
        print0("rollout    --rollout vllm: vllm is not installed (pip install vllm==0.32.0), so transformers generates")
        run = dataclasses.replace(run, rollout="hf")
    if run.rollout == "vllm":
        run = dataclasses.replace(run, actor=with_heads_for_vllm(run.actor))
    addition, actor, critic = run.prompts is None, run.actor, run.critic
    with flags_of("actor"):
        tokenizer = common.load_tokenizer(actor)
        model_config = common.load_model_config(actor, tokenizer)
    if tokenizer is None:
        raise UserError(f"--actor.tokenizer: {actor.model} has none, and prompts are text; give one")
    if critic.model == "actor":
        same = ("tokenizer", "override_config", "trust_remote_code", "from_scratch")
        unsaid = [key for key in same if getattr(critic, key) == getattr(type(critic), key)]
        critic = dataclasses.replace(critic, model=actor.model, **{key: getattr(actor, key) for key in unsaid})
    minis = math.ceil(run.train_batch_size * run.rollout_n / critic.ppo_mini_batch_size)
    critic = dataclasses.replace(
        critic,
        lr=critic.lr if critic.lr is not None or not addition else 1e-3,
        total_training_steps=critic.total_training_steps or run.steps * critic.ppo_epochs * minis,
    )
    lr = actor.lr if actor.lr is not None else (5e-4 if addition else 1e-6)
    length = run.max_response_length or (8 if addition else 256)
    run = dataclasses.replace(
        run, actor=dataclasses.replace(actor, lr=lr), critic=critic, max_response_length=length,
        reward=run.reward or ("addition" if addition and not run.reward_model else None),
    )  # fmt: skip
    return run, tokenizer, model_config


VLLM_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "n_head": 2}  # n_head: of tiny-gpt2


def with_heads_for_vllm(actor):
    """A tiny-* actor with fewer, wider heads of attention, unless its flags say something of them."""
    overrides = json.loads(actor.override_config)
    if actor.model not in common.TINY or overrides.keys() & VLLM_HEADS.keys():
        return actor
    heads = {key: VLLM_HEADS[key] for key in VLLM_HEADS if key in common.tiny_config(actor.model, 0)}
    print0(f"vllm       {actor.model} with 2 heads of 32 features, vLLM knows none of 16: {json.dumps(heads)}")
    return dataclasses.replace(actor, override_config=json.dumps(overrides | heads))


def check_vllm(run, model_config):
    """UserError if ranks that share an engine cannot share the heads of the actor."""
    size, c = run.vllm.tensor_parallel_size, model_config.get_text_config()
    if run.rollout == "vllm" and c.num_attention_heads % size:
        raise UserError(
            f"--vllm.tensor-parallel-size {size}: {run.actor.model} has {c.num_attention_heads} heads, which that many "
            "ranks cannot share"
        )


def known_tokens(model_config, tokenizer):
    """How many tokens an actor can say: vocabularies are often filled up to a round number of them."""
    return min(model_config.get_text_config().vocab_size, max(tokenizer.get_vocab().values()) + 1)


def check_takes(config, model_config, longest, words, known):
    """UserError if --model cannot take rows of so many tokens (words say whose), or not as many kinds as the actor."""
    most, knows = common.max_length(model_config), model_config.get_text_config().vocab_size
    if longest > most:
        raise UserError(f"--model {config.model}: takes {most} tokens, {words}")
    if knows < known:
        raise UserError(f"--model {config.model}: knows {knows} tokens, the actor {known}")


def check_critic(run, model_config, actor_tokenizer, longest):
    """UserError if the critic's flags, its model or its budget do not go with the actor and rows of so many tokens."""
    script = critic_module(run.backend)
    with flags_of("critic"):
        tokenizer = common.load_tokenizer(run.critic)
        critic_config = common.load_model_config(run.critic, tokenizer)
        theirs = tokenizer.get_vocab() if tokenizer else {}
        for token, i in actor_tokenizer.get_vocab().items():
            if theirs.get(token, i) != i:
                raise UserError(
                    f"--model {run.critic.model}: its token {theirs[token]} is {i} of the actor's: {token!r}"
                )
        script.validate_for_model(run.critic, critic_config)
        common.with_value_range(run.critic, critic_config)
        words = f"the longest prompt with its response has {longest} tokens"
        check_takes(run.critic, critic_config, longest, words, known_tokens(model_config, actor_tokenizer))
        row = common.masked_token()
        row.input_ids, row.cu_seqlens = torch.zeros(longest), torch.tensor([0, longest], dtype=torch.int32)
        for training in (False, True):
            try:
                script.check_budget(run.critic, row, training)
            except UserError as error:
                raise UserError(str(error).replace("row -1", "the longest prompt with its response")) from None


def check_lengths(run, model_config, longest):
    """UserError if prompt and response together are more than the actor can take."""
    most = common.max_length(model_config)
    what = f"the longest prompt and --max-response-length {run.max_response_length} make {longest} tokens"
    if longest > most:
        raise UserError(f"--max-response-length: {what}, {run.actor.model} takes {most}")
    if longest > run.actor.ppo_max_token_len_per_gpu:
        raise UserError(f"--actor.ppo-max-token-len-per-gpu {run.actor.ppo_max_token_len_per_gpu}: {what}; give more")


SLIPS = (0.75, 0.6)  # the supervised actor errs in three of four sums that carry, and in three of five others


def learn_to_add(run, model_config, tokenizer, device):
    """A folder with an actor that has read answers of an adder that errs more often than not, and is right as often as
    that one; then PPO begins. None of the prompts is held out."""
    config = dataclasses.replace(run.actor, lr=3e-3, lr_warmup_steps=0, loss_agg_mode="token-mean")
    model_config = copy.deepcopy(model_config)
    model_config.initializer_range = 0.1  # so narrow a model hardly moves away from the usual 0.02
    worker, size = PolicyWorker(config, model_config, device, temperature=1.0), 256
    rows = common.rows_to_batch(common.toy_rows(8192, run.seed, slips=SLIPS), "toy", tokenizer=tokenizer)
    for step in common.progress(range(run.supervised_steps), "supervised"):
        picked = indices_of_step(step, size, len(rows), run.seed, "supervised")
        batch = rows.select(picked[RANK::WORLD_SIZE])
        batch.row_id = torch.arange(RANK, size, WORLD_SIZE)  # a row may be picked twice, by two passes
        metrics = worker.imitate(batch)
    folder = os.path.abspath(os.path.join(run.out_dir, "supervised"))
    worker.export_hf(folder, tokenizer)
    print0(
        f"supervised {run.supervised_steps} steps x {size} rows = {run.supervised_steps * size:,} answers, "
        f"loss {metrics['supervised/loss']:.3f}: {folder}"
    )
    return folder


def taught_before(run, state):
    """The folder of the actor that a resumed run has started from, and that its KL refers to: as noted, or beside the
    checkpoints if all have been moved. UserError: it has gone, or is another one by now."""
    beside = os.path.abspath(os.path.join(run.resume, "..", "..", "supervised"))
    for folder in (state["start"], beside):
        if folder in common.TINY or same_weights(folder) == state["start_weights"]:
            return folder
    raise UserError(f"--resume {run.resume}: {beside} is not, or no longer, the actor that the run has started from")


def same_weights(folder):
    """What two folders share only if all their files are equal; None of one that this script has not written."""
    manifest = os.path.join(folder, common.MANIFEST)
    return common.checksum(manifest) if os.path.exists(manifest) else None


def start_from(run, folder):
    """run whose actor, and whose critic if it is as the actor, start from this folder."""
    if folder == run.actor.model:
        return run
    fresh = {"model": folder, "override_config": "{}", "from_scratch": False}
    same = all(getattr(run.critic, key) == getattr(run.actor, key) for key in fresh)
    critic = dataclasses.replace(run.critic, **fresh) if same else run.critic
    return dataclasses.replace(run, actor=dataclasses.replace(run.actor, **fresh), critic=critic)


def indices_of_step(step, size, n, *key):
    """Which of n things are in a step of `size`: passes in their own random orders follow each other without a gap. A
    function of the step alone: a resumed run needs to know nothing else."""
    places = (divmod(i, n) for i in range(step * size, (step + 1) * size))
    return [common.permutation(n, *key, a_pass)[place] for a_pass, place in places]


def prompts_of_step(step, prompts, run):
    """(prompts, ids, keys) of this rank's rows of a step; neighbours share a prompt. From a row's key follow all random
    numbers of its response."""
    picked = indices_of_step(step, run.train_batch_size, len(prompts), run.seed, "prompts")
    row_ids = list(range(RANK, run.train_batch_size * run.rollout_n, WORLD_SIZE))
    keys = [f"{run.seed} {step} {row}" for row in row_ids]
    return [prompts[picked[row // run.rollout_n]] for row in row_ids], row_ids, keys


class Phases:
    """`with phases("actor", actor):` times a phase, and with --offload has its workers, and no other, on the device."""

    def __init__(self, offload, device):
        self.offload, self.device, self.metrics, self.totals = offload, device, {}, {}

    @contextlib.contextmanager
    def __call__(self, name, *workers):
        start, workers = time.perf_counter(), [w for w in workers if w is not None]
        self.switch(name, "onload", workers)
        yield
        self.switch(name, "offload", reversed(workers))
        self.add(f"time/{name}", time.perf_counter() - start)

    def switch(self, name, way, workers):
        """Moves workers, and notes the seconds and the bytes of device memory that it took or gave."""
        if not self.offload:
            return
        start, held = time.perf_counter(), self.held()
        for worker in workers:
            getattr(worker, way)()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.add(f"time/{name}_{way}", time.perf_counter() - start)
        self.add(f"memory/{name}_{way}_gib", abs(self.held() - held) / 2**30)

    def held(self):
        if self.device.type == "cpu":
            return 0  # nothing moves there
        free, total = torch.accelerator.get_memory_info()  # vLLM's memory is not in torch's books
        return total - free

    def add(self, name, x):
        for sums in (self.metrics, self.totals):
            sums[name] = sums.get(name, 0.0) + x

    def take(self):
        """The metrics of the step so far, which a new step begins without."""
        taken, self.metrics = self.metrics, {}
        return taken

    def line(self):
        """Where the time of the run went, phases that are parts of others told apart."""
        seconds = {name.removeprefix("time/"): x for name, x in self.totals.items() if name.startswith("time/")}
        seconds["critic"] = seconds.get("critic", 0.0) - seconds.get("values", 0.0)
        order = ("sync", "rollout", "reward", "log_probs", "reference", "values", "critic", "actor", "evaluation")
        order += ("checkpoint", "export")
        return "seconds    " + "  ".join(f"{name} {seconds[name]:,.1f}" for name in order if seconds.get(name))


def sync(engine, actor, device):
    """Gives the engine the actor's weights -> metrics: how many, and the most memory that was taken meanwhile."""
    moved = []

    def counted():
        for name, weight in actor.weights(engine.dtype):
            moved.append(weight.nbytes)
            yield name, weight

    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    engine.sync(counted())
    return {"sync/gib": sum(moved) / 2**30, "sync/peak_memory_gib": common.peak_memory_gib(device)}


def score(run, reward, prompts, texts, batch, faults):
    """(rewards of the caller's rows by rule or by model, faults with what went wrong here) (a collective)."""
    if isinstance(reward, RewardModel):
        made = [checked(score) for score in reward.scores(prompts, texts, batch)]
        scores, more = [score for score, _ in made], [fault for _, fault in made]
    else:
        scores, more = rule_scores(reward, prompts, texts, run.reward_timeout)
    return scores, [a or b for a, b in zip(faults, more, strict=True)]


def add_advantages(batch, scores, kl_coef, run):
    """Fills token_level_rewards, advantages and returns of the caller's rows (a collective).

    The score of a row is earned by its last action; each action pays kl_coef for its KL to the reference.
    """
    mask_T, last_B = batch.response_mask, common.last_actions(batch.response_mask, batch.cu_seqlens)
    kl_T = common.kl_penalty(batch.old_log_probs, batch.ref_log_probs, run.kl_penalty)
    rewards_T = torch.zeros(len(mask_T)).index_add(0, last_B, torch.tensor(scores, dtype=torch.float32))
    batch.token_level_rewards = rewards_T - kl_coef * torch.where(mask_T, kl_T, 0.0)
    lam_policy, bootstrap_B = run.lam_policy, None
    if run.length_adaptive_alpha is not None:
        lam_policy = common.length_adaptive_lam(mask_T, batch.cu_seqlens, run.length_adaptive_alpha)
    if run.bootstrap_truncated:
        bootstrap_B = common.bootstrap_values(batch)
    batch.advantages, batch.returns = common.gae(
        batch.token_level_rewards, batch.values, mask_T, batch.cu_seqlens, run.gamma, run.lam, lam_policy, bootstrap_B
    )
    if run.whiten_advantages:
        batch.advantages = common.masked_whiten(batch.advantages, mask_T, over_ranks=True)


def rollout_metrics(batch, scores, faults, run):
    """What a step's rows are like, over all ranks (a collective)."""
    mask_T, actions = batch.response_mask, float(batch.response_mask.sum())
    late = sum(fault.startswith("timeout") for fault in faults)
    kl_T = common.kl_penalty(batch.old_log_probs, batch.ref_log_probs, run.kl_penalty)[mask_T]
    off_T = batch.rollout_log_probs - batch.old_log_probs
    if run.top_p < 1:  # what it left out made the rest likelier, by -log top_p at most; that much is no fault
        off_T = off_T - off_T.clamp(0, -math.log(run.top_p))
    off_T = off_T.abs()[mask_T]
    lengths = float(len(batch.input_ids))
    sums = torch.tensor(
        [
            len(batch), actions, lengths, sum(scores), sum(s * s for s in scores), float(batch.truncated.sum()),
            sum(map(bool, faults)) - late, late, kl_T.double().sum(), off_T.double().sum(),
        ], dtype=torch.float64,
    )  # fmt: skip
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
        "kl/reference": kl / actions if run.kl_coef or run.actor.kl_loss_coef else math.nan,  # nan: has no reference
    }


def show_fault(faults):
    """Prints the first of what went wrong with rows, on whichever rank (a collective)."""
    firsts = common.of_all_ranks(next(filter(None, faults), None))
    print0(f"a row failed and went on without: {next(filter(None, firsts))}")


def check_engine(run, metrics, device):
    """UserError if the engine and the actor, which have the same weights, do not make the same of the first rows: two
    ways through a model, one of them with a cache and padding, the other packed."""
    diff, half = metrics["rollout/log_prob_diff"], critic_fsdp.compute_dtype(run.actor, device) != torch.float32
    if not diff < (0.5 if half else 1e-3):
        raise UserError(
            f"--actor.model {run.actor.model}: log-probs of the rollout are off the actor's by {diff:.1e} a token; the "
            "model does something to its logits that Policy.forward does not know, or rows see each other in a pack"
        )


def evaluate(engine, task, run, reward):
    """Rewards of held-out prompts -> (metrics equal on all ranks, this rank's first transcripts)."""
    each, temperature = max(run.eval_samples, 1), run.temperature if run.eval_samples else 0.0
    rows = list(range(RANK, len(task.held_out) * each, WORLD_SIZE))
    mine, keys = [task.held_out[row // each] for row in rows], [f"evaluation {run.seed} {row}" for row in rows]
    replies, texts, faults = roll_out(engine, task, mine, keys, run, temperature)
    scores, faults = score(run, reward, mine, texts, to_batch(mine, replies, rows), faults)
    sums = torch.tensor(
        [len(rows), sum(scores), sum(s >= 1 for s in scores), sum(len(r.ids) for r in replies), sum(map(bool, faults))],
        dtype=torch.float64,
    )
    dist.all_reduce(sums)
    n, total, right, tokens, failed = sums.tolist()
    if failed:
        show_fault(faults)
    samples = [
        {"prompt": p.text, "response": text, "answer": p.answer, "reward": s}
        for p, text, s in zip(mine, texts, scores, strict=True)
    ]
    return {
        "eval/reward": total / n, "eval/accuracy": right / n, "eval/length": tokens / n, "eval/errors": failed,
    }, samples[:8]  # fmt: skip


def keep_samples(samples, step, out_dir):
    """Puts transcripts into samples.jsonl, after those of earlier steps, and shows two of them. What it has of this
    step and later ones is of another run, or of before --resume."""
    if RANK != 0:
        return
    path = os.path.join(out_dir, "samples.jsonl")
    rows = [row for row in common.read_metrics(path) if row["step"] < step]
    common.replace_lines(path, rows + [{"step": step, **sample} for sample in samples])
    for s in samples[:2]:
        print0(f"  {s['prompt'][-60:]!r} -> {s['response'][-60:]!r}  reward {s['reward']:g}")


def ppo_line(step, steps, m):
    """One aligned line that tells how a step went, in units a person reads."""
    n, eta = common.number, datetime.timedelta(seconds=round(m["perf/time_step"] * (steps - step)))
    odd = [f"{m[key]:.0f} {words}" for key, words in (
        ("reward/errors", "reward errors"), ("reward/timeouts", "timeouts"), ("actor/skipped_steps", "skipped")
    ) if m.get(key)]  # fmt: skip
    return (
        f"step {step:>{len(str(steps))}}/{steps}  reward {m['reward/mean']:.3f}  length {m['rollout/actions']:.1f}"
        f"  kl {n(m['kl/reference'], '.3f')}  entropy {n(m.get('actor/entropy'), '.3f')}"
        f"  clipped {n(m.get('actor/pg_clipfrac'), '.3f')}  |g| {n(m.get('actor/grad_norm'), '.2g'):>5}"
        f"  value loss {n(m['critic/vf_loss'], '.4f')}  explained var {n(m['critic/explained_var'], '.2f'):>5}"
        f"  {m['perf/rollout_tokens_per_second']:>6,.0f} tok/s  eta {eta}" + "".join(f"  {words}" for words in odd)
    )


CURVES = (  # for common.plot_curves
    ("reward", "linear", (("reward/mean", "rows of the step", "-"), ("eval/accuracy", "held-out accuracy", "o-"))),
    (
        "how far the policy has moved", "linear",
        (("actor/entropy", "entropy", "-"), ("kl/reference", "KL to the reference", "-")),
    ),
    ("explained variance of the critic", "linear", (("critic/explained_var", "rows of the step", "-"),)),
)  # fmt: skip


def read_loop_state(folder):
    """What save() wrote of the loop itself. UserError: damaged, or not a checkpoint of this script."""
    common.check_complete(folder, "--resume")
    try:
        with open(os.path.join(folder, "loop.json")) as file:
            state = json.load(file)
        return {key: state[key] for key in ("step", "kl_coef", "run", "start", "start_weights")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--resume {folder}: not a checkpoint of ppo_loop.py ({common.one_line(error)})") from None


def adapted_kl_coef(run, state):
    """The KL coefficient as it had adapted, unless --kl-coef asks for another one now."""
    goes_on = run.target_kl and state["run"].get("kl_coef") == run.kl_coef
    return state["kl_coef"] if goes_on else run.kl_coef


def print_resume(run, state):
    """Says where the run goes on, and which of its own flags have changed since; actor and critic say theirs."""
    now = json.loads(json.dumps(dataclasses.asdict(run)))  # tuples as lists
    own = {key: x for key, x in state["run"].items() if key not in ("actor", "critic", "resume")}
    print0(f"resume     {run.resume}, step {state['step']}{common.changes(own, now)}")


def checkpoint_writer(run, step, kl_coef, workers, copy):
    """write(folder, group) of everything. Prompts and samples follow from the step, and need no state."""
    state = {"step": step, "kl_coef": kl_coef, "run": dataclasses.asdict(run)}
    state |= {"start": run.actor.model, "start_weights": same_weights(run.actor.model)}
    write_actor, write_critic = [worker.checkpoint_writer(copy) for worker in workers]

    def write(folder, group=None):
        with common.complete_or_absent(folder, group=group) as tmp:
            write_actor(os.path.join(tmp, "actor"), group)
            write_critic(os.path.join(tmp, "critic"), group)
            if RANK == 0:
                with open(os.path.join(tmp, "loop.json"), "w") as file:
                    json.dump(state, file, indent=1)

    return write


def dump(batch, step, out_dir):
    """The rows of all ranks as out_dir/rollouts/step_N.jsonl (a collective)."""
    whole = common.gather(batch)
    if RANK == 0:
        os.makedirs(os.path.join(out_dir, "rollouts"), exist_ok=True)
        common.write_jsonl(whole, os.path.join(out_dir, "rollouts", f"step_{step + 1}.jsonl"))


def load_task(run):
    """(run with what follows from its task and its actor, the Task). What can be wrong with flags, files and functions
    is found here, before there is a process group."""
    run, tokenizer, model_config = settle(run)
    if run.prompts is None:
        prompts = addition_prompts(8192, run.seed, tokenizer)
        held_out = addition_prompts(512, run.seed, tokenizer, held_out=True)
    else:
        prompts = load_prompts(run.prompts, "--prompts", run, tokenizer)
        held_out = load_prompts(run.eval_prompts, "--eval-prompts", run, tokenizer) if run.eval_prompts else []
    longest = max(len(p.ids) for p in prompts + held_out) + run.max_response_length
    top, vocab_size = max(max(p.ids) for p in prompts + held_out), model_config.get_text_config().vocab_size
    if top >= vocab_size:
        raise UserError(
            f"--actor.tokenizer: makes token {top} of a prompt, {run.actor.model} knows {vocab_size} tokens"
        )
    check_lengths(run, model_config, longest)
    check_vllm(run, model_config)
    check_critic(run, model_config, tokenizer, longest)
    if run.reward_model:
        check_reward_model(run, tokenizer, known_tokens(model_config, tokenizer), longest)
    reward = load_function(run.reward, "--reward") if run.reward else None
    observe = load_function(run.environment, "--environment") if run.environment else None
    rows = run.train_batch_size * run.rollout_n
    print0(f"prompts    {len(prompts):,}, {len(held_out):,} held out; at most {longest} tokens with the response")
    print0(f"rollout    {run.train_batch_size} prompts x {run.rollout_n} responses = {rows} rows a step")
    for name, c in (("actor", run.actor), ("critic", run.critic)):
        minis = math.ceil(rows / c.ppo_mini_batch_size)
        print0(
            f"{name:11s}{c.ppo_epochs} epochs x {minis} mini-batches = {c.ppo_epochs * minis} optimizer steps a step"
        )
    stop_ids = stop_tokens(run.actor, tokenizer)
    return run, Task(tokenizer, model_config, prompts, held_out, reward, observe, stop_ids, longest)


def build(run, task, device):
    """(actor, reference or None, critic, reward model or None, rollout engine without weights yet) on all ranks, from
    the checkpoint if the run is resumed. With --offload they are made one after another."""
    away = lambda *workers: [worker.offload() for worker in workers if worker and run.offload]
    with flags_of("actor"):
        actor, reference, reward_model = PolicyWorker(run.actor, task.model_config, device, run.temperature), None, None
        print0(f"actor      {actor.story}")
        if run.resume:
            actor.load_checkpoint(os.path.join(run.resume, "actor"))
        away(actor)
        if run.kl_coef or run.actor.kl_loss_coef:
            reference = PolicyWorker(run.actor, task.model_config, device, run.temperature, trains=False)
            print0(f"reference  {reference.story}")
            away(reference)
    if run.reward_model:
        reward_model = RewardModel(run, task.tokenizer)
        away(reward_model)
    engine = {"hf": HFRollout, "vllm": VLLMRollout}[run.rollout](run, task, device)
    away(engine)
    with flags_of("critic"):  # the last, for it seeds torch's generator, or restores it
        critic = critic_module(run.backend).CriticWorker(run.critic)
        critic.init_model()
        if run.resume:
            critic.load_checkpoint(os.path.join(run.resume, "critic"))
        critic.find_budget(task.longest, "the longest prompt with its response")
        away(critic)
    return actor, reference, critic, reward_model, engine


def main(run):
    validate(run)
    run, task = load_task(run)
    least = critic_module(run.backend).least_budget(run.critic, task.longest)
    run = common.smaller_budgets(run, actor=task.longest, critic=least)
    run = common.find_resume(run, run.critic.timeout_minutes)
    state = read_loop_state(run.resume) if run.resume else {"step": 0, "run": {}}
    first_step, kl_coef = state["step"], adapted_kl_coef(run, state)
    if run.resume and first_step > run.steps:
        raise UserError(f"--steps {run.steps}: {run.resume} has made {first_step} already; give more")
    device = common.setup_distributed(run.critic.timeout_minutes)
    if run.resume:
        if run.actor.model in common.TINY:  # any other is where --actor.model says now
            run = start_from(run, taught_before(run, state))
        print_resume(run, state)
    elif teaches(run):
        run = start_from(run, learn_to_add(run, task.model_config, task.tokenizer, device))
    actor, reference, critic, reward_model, engine = build(run, task, device)
    phases, reward = Phases(run.offload, device), reward_model or task.reward
    logger = common.Logger(run, first_step)
    common.listen_for_sigterm()
    start, stuck, batch = time.perf_counter(), 0, None
    for step in common.profiled(run, range(first_step, run.steps + 1)):
        last, stop, began = step == run.steps, common.told_to_stop(), time.perf_counter()
        if step > first_step and (last or stop or (run.save_every and step % run.save_every == 0)):
            with phases("checkpoint", actor, critic):
                common.save(run, step, functools.partial(checkpoint_writer, run, step, kl_coef, (actor, critic)))
        common.join_saving(wait=last or stop)
        if stop and not last:
            logger.close()
            common.leave(run.out_dir, step)

        with phases("generation", engine):
            synced, learned = {}, step > run.critic_warmup  # in the step before
            if step == first_step or learned or run.offload:  # an engine that has slept may have lost its weights
                with phases("sync", actor):
                    synced = sync(engine, actor, device)
            if task.held_out and common.evaluates(run, step):
                with phases("evaluation", reward_model):
                    metrics, samples = evaluate(engine, task, run, reward)
                logger.log(step, metrics)
                print0(f"held out   accuracy {metrics['eval/accuracy']:.3f}   reward {metrics['eval/reward']:.3f}")
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
        metrics = synced | rollout_metrics(batch, scores, faults, run)
        if step == first_step:
            check_engine(run, metrics, device)
        with phases("critic", critic):
            with phases("values"):
                batch.values = critic.compute_values(batch)
            add_advantages(batch, scores, kl_coef, run)
            metrics |= critic.update_critic(batch)
        if step >= run.critic_warmup:
            with phases("actor", actor):
                metrics |= actor.update_policy(batch)
        stuck = common.count_stuck(stuck, metrics, run, batch, step)
        metrics["kl/coef"] = kl_coef
        if step >= run.critic_warmup:
            kl_coef = common.next_kl_coef(
                kl_coef, metrics["kl/reference"], run.train_batch_size * run.rollout_n, run.target_kl, run.kl_horizon
            )
        if run.dump_rollouts:
            dump(batch, step, run.out_dir)
        if metrics["reward/errors"] + metrics["reward/timeouts"]:
            show_fault(faults)
        metrics |= phases.take()
        metrics["perf/time_step"] = (time.perf_counter() - start) / (step + 1 - first_step)
        metrics["perf/rollout_tokens_per_second"] = metrics["rollout/tokens"] / (time.perf_counter() - began)
        logger.log(step + 1, metrics)
        print0(ppo_line(step + 1, run.steps, metrics))
    with phases("export", actor, critic):
        actor.export_hf(os.path.join(run.out_dir, "hf"), task.tokenizer)
        critic.export_hf(os.path.join(run.out_dir, "critic_hf"))
    logger.close()
    common.plot_curves(run.out_dir, CURVES)
    common.write_report(run, task.tokenizer, None, batch)
    print0(phases.line())
    samples = ["samples.jsonl"] * bool(task.held_out)
    print0(common.saved_line(run, first_step, "hf", "critic_hf", *samples))


if __name__ == "__main__":
    common.run(lambda: main(parse(sys.argv[1:])))
