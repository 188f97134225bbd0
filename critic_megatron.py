"""A PPO critic for language models on Megatron-Core: one value model, one update, any layout.

    python critic_megatron.py                             toy task, a tiny model, a laptop CPU
    torchrun --nproc-per-node 2 critic_megatron.py --tensor-model-parallel-size 2
    torchrun --nproc-per-node 8 critic_megatron.py --model Qwen/Qwen2.5-7B \\
        --rollouts train.jsonl --eval-rollouts eval.jsonl --tensor-model-parallel-size 4 \\
        --gradient-checkpointing --out-dir out/7b

It learns V(s) from rollouts with rewards: value pretraining for PPO (VC-PPO, 2503.01491), or a
token-level verifier. A PPO loop drives the same CriticWorker. Copy this file and common.py, and
change them. critic_fsdp.py computes the same function on PyTorch FSDP, with the same sections
and names: a diff of the two shows what parallelism costs. This script has no images, LoRA,
activation offload or --plan.

Shapes are in the names: T tokens, end to end; B sequences; L longest; S slots; D features. A slot
is a token or padding of a micro-batch on this rank.
"""

import inspect
import io
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import time
import warnings
from collections import ChainMap, Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from heapq import heapreplace
from itertools import chain, pairwise
from math import ceil, cos, inf, isfinite, isnan, nan, pi, sqrt, tan
from os.path import exists, isfile, realpath
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple


def interrupted(*_):
    """Ends the process with one line: Ctrl-C (SIGINT) finds nothing to save, or comes again."""
    line = b"Ctrl-C     ended at once\n"
    if os.isatty(2):
        line = b"\n" + line  # after ^C
    with suppress(OSError):
        if os.environ.get("RANK", "") in ("", "0"):
            os.write(2, line)
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":  # here, because the imports below take ten seconds
    signal.signal(signal.SIGINT, interrupted)

import tyro
from pydantic import Field, PositiveFloat, TypeAdapter, ValidationError

# all of them, or none
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def from_torchrun(name, default):
    """A number that torchrun sets; plain `python` is a world of one. common.py names what is
    wrong."""
    text = os.environ.get(name, "")
    if not all(os.environ.get(other) for other in TORCHRUN) or not re.fullmatch("[0-9]{1,9}", text):
        return default
    return int(text)


RANK = from_torchrun("RANK", 0)
WORLD_SIZE = max(1, from_torchrun("WORLD_SIZE", 1))
# Megatron needs it to overlap communication
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

# ---- Config --------------------------------------------------------------------------------------

Text = Annotated[str, Field(min_length=1)]  # a shell's unset variable gives ""
Count = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(gt=0, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**62)]
Rate = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]  # float32 can hold it
# float32 can hold its square
Edge = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Annotated[str, Field(pattern=r"^auto(:[0-9]{1,6}(\.[0-9]{1,6})?)?$")]
AggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True)
class Config:
    """The critic: its model, its layout over ranks, its batches and its optimizer."""

    # what its flags begin with, in messages; "--critic." in ppo_loop.py
    prefix: ClassVar[str] = "--"

    # ---- model

    # Hugging Face folder or hub name; tiny-qwen2, tiny-llama ...: random weights
    model: Text = "tiny-qwen2"
    tokenizer: Text | None = None  # Hugging Face folder or hub name (None: the model's own)
    # JSON merged into the model's config, e.g. '{"num_hidden_layers": 4}'
    override_config: Text = "{}"
    # value head: an unbounded number, one within --value-range, or the mean of a distribution over
    # 51 bins
    value_head: Literal["scalar", "bounded", "hl_gauss"] = "scalar"
    # how the value head starts (auto: from the checkpoint, else normal; mean: new, at the mean
    # return)
    value_head_init: Literal["auto", "checkpoint", "normal", "zero", "mean"] = "auto"
    # LOW HIGH of a bounded or hl_gauss head (None: the checkpoint's, else the data's, except in
    # PPO)
    value_range: tuple[Edge, Edge] | None = None
    # regular expression; weights with a match in their name are frozen
    freeze_modules: Text | None = None
    seed: Seed = 0  # random seed of new weights, the value head, every shuffle and the toy's rows

    # ---- layout

    tensor_model_parallel_size: Positive = 1  # ranks that split each matrix product
    # tensor-parallel ranks also split tokens, in norms and residuals
    sequence_parallel: bool = True
    pipeline_model_parallel_size: Positive = 1  # pipeline stages: ranks that split the layers
    # model chunks per stage; more reduce idle time
    virtual_pipeline_model_parallel_size: Positive = 1
    context_parallel_size: Positive = 1  # ranks that split the tokens of each sequence
    expert_model_parallel_size: Positive = 1  # ranks that split the experts of an MoE model
    # ranks that split each expert (None: tensor size)
    expert_tensor_parallel_size: Positive | None = None
    # stop if a collective takes longer
    timeout_minutes: Annotated[float, Field(ge=0.01, le=1e6)] = 30.0

    # ---- precision and kernels

    # recompute activations in the backward pass: less memory, more time
    gradient_checkpointing: bool = False
    # dtype of matrix products (auto: float32 on CPU, else bfloat16)
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    use_remove_padding: bool = True  # pack sequences end to end; otherwise pad each to the longest
    share_prompts: bool = True  # when packing, compute a prompt once for all its rows; same update

    # ---- batches

    ppo_mini_batch_size: Positive = 256  # rows per optimizer step, over all ranks
    # max tokens per micro-batch (auto[:GIB]: what fits)
    ppo_max_token_len_per_gpu: Positive | Auto = 16384
    ppo_epochs: Positive = 1  # passes over the rows of one update
    # cut mini-batches in random order (by seed, update, epoch), not in row order
    shuffle: bool = True

    # ---- loss

    # PPO clip range around the old value (None: off; unused by hl_gauss)
    cliprange_value: Rate | None = 0.5
    loss_agg_mode: AggMode = "token-mean"  # how to average token losses over a mini-batch
    response_length_limit: Positive | None = None  # divisor of seq-mean-token-sum-norm, in tokens
    # train only at these fractions of a response (none: all)
    value_places: tuple[Fraction, ...] = ()

    # ---- optimizer

    lr: Rate | None = None  # peak learning rate (None: 1e-3 for tiny-* and PPO's toy, else 1e-5)
    # linear warm-up, in optimizer steps; the first is at lr / steps, not at 0
    lr_warmup_steps: Count = 0
    # schedule after warm-up; cosine ends at 0
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    grad_clip: PositiveFloat = 1.0  # clip the norm of the whole gradient to this (inf: no clipping)
    weight_decay: Fraction = 0.01  # AdamW's decoupled decay, on every weight
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)  # decay rates of AdamW's two moving averages


@dataclass(frozen=True)
class Run:
    """Trains a value function on rollouts, evaluates it, and saves a checkpoint and a Hugging Face
    folder."""

    critic: tyro.conf.OmitArgPrefixes[Config] = Config()

    # ---- rows

    rollouts: Text | None = None  # JSONL file to train on (None: the built-in toy task)
    # JSONL file to evaluate on (None: no evaluation; the toy has its own)
    eval_rollouts: Text | None = None
    # no training: write this JSONL file with values to out_dir/scored.jsonl
    score: Text | None = None
    prompt_key: Text = "prompt"  # JSONL key of the prompt: text, or a list of chat messages
    # JSONL key of the response; a.b is key b within key a, here and below
    response_key: Text = "response"
    reward_key: Text = "reward"  # JSONL key of the reward
    # JSONL key of text that only the critic reads, before the prompt
    privileged_key: Text | None = None
    # JSON for the chat template, e.g. '{"enable_thinking": false}'
    chat_template_kwargs: Text = "{}"

    # ---- run

    steps: Positive = 100  # critic updates, each on one train batch
    # most rows per update, over all ranks (None: one mini-batch)
    train_batch_size: Positive | None = None
    eval_every: Count = 20  # updates between evaluations (0: only at the start and the end)
    # folder for checkpoints, Hugging Face export, metrics and report
    out_dir: Text = "out/critic_megatron"
    # checkpoint folder to continue from (auto: the last complete one in out_dir)
    resume: Text | None = None
    # updates between checkpoints (None: at each evaluation, in place of the one before; 0: only at
    # the end)
    save_every: Count | None = None
    # how many of the last checkpoints to keep (None: all, but see --save-every)
    keep: Positive | None = None
    async_save: bool = False  # write checkpoints in the background, from a copy in host memory
    profile_step: Positive | None = None  # profile this step of rank 0, with torch.profiler

    # ---- returns

    gamma: Fraction = 1.0  # discount factor per action
    lam: Fraction = 1.0  # GAE lambda of the returns (1: Monte Carlo, from rewards alone)
    # truncated rows bootstrap from the value of their last action
    bootstrap_truncated: bool = False


def section_titles(flags):
    """First flag of each section -> the section's title, from lines like `# ---- layout` in a
    dataclass."""
    titles = {}
    for holder in (flags, *filter(is_dataclass, vars(flags).values())):
        prefix = getattr(holder, "prefix", "--")
        for kind in type(holder).__mro__[:-1]:
            for title, name in re.findall(
                r"^    # ---- (.+)\n(?:\n|    # .*\n)*    (\w+)", inspect.getsource(kind), re.M
            ):
                titles[prefix + name.replace("_", "-")] = f"{prefix.strip('-.')} {title}".strip()
    return titles


def show_help(kind, **options):
    """Prints tyro's --help on fewer lines, with a title above each section, and ends the process.
    Returns if tyro has no help to show."""
    width = min(max(shutil.get_terminal_size().columns, 72), 160)
    os.environ["COLUMNS"] = "129"  # with more, tyro would put some flags next to others
    page = io.StringIO()
    with redirect_stdout(page), redirect_stderr(io.StringIO()), suppress(SystemExit):
        tyro.cli(kind, **options)
    if not page.getvalue():
        return

    # tyro writes a flag on one line, and what it means below it, farther to the right
    flags = []
    usage, *lines = page.getvalue().splitlines()
    for line in lines:
        if re.match("  --?[a-z]", line):
            flags.append([line.strip(), ""])
        elif flags and line.startswith(" " * 6):
            flags[-1][1] += f" {line.strip()}"

    text = [usage, "", options["description"]]
    titles = section_titles(options.get("default") or kind())
    margin = " " * 36
    wrapped = partial(textwrap.wrap, width=width, subsequent_indent=margin, break_on_hyphens=False)
    for flag, words in flags:
        if title := titles.get(flag.split()[0].rstrip(",")):
            text += ["", f"---- {title} ".ljust(width, "-")]
        flag = re.sub(r"^--([a-z]+\.)?(\S+), --.*", r"--\1[no-]\2", flag).replace("{None}|", "")
        start = f"  {flag}  ".ljust(len(margin))
        if len(start) > len(margin):
            text.append(start.rstrip())
            start = margin
        words = re.sub(r" \(default: (None|False)?\)$", "", words.strip())
        text += wrapped(words, initial_indent=start)
    print("\n".join(text))
    sys.exit(0)


def read_flags(kind, **options):
    """The dataclass `kind` from the command line, by tyro. A mistake ends the process with one
    line."""
    if {"-h", "--help"}.intersection(options.get("args", sys.argv)):
        show_help(kind, **options)
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(kind, **options)
    except SystemExit as stop:
        if not stop.code or not box.getvalue():  # a rank that is silent
            raise

        # tyro's box: what is wrong, then perhaps what was meant, then the flag's help
        lines = [line.strip("│╭╮╰╯─ ") for line in box.getvalue().splitlines()[1:]]
        text = "\n".join(lines)
        wrong = " ".join(text.split("\n\n")[0].split()).removeprefix("Error parsing ").rstrip(".")
        wrong = wrong.replace("invalid literal for int() with base 10:", "must be an integer, not")
        wrong = wrong.replace("could not convert string to float:", "must be a number, not")
        wrong = re.sub(
            r"no type matching (\S+) could .* from \[(.*)\]", r"must be \1, not \2", wrong
        )
        wrong = wrong.replace("{None}|", "None or ")
        if words := re.fullmatch("Unrecognized options: ([^,]*).*", wrong):
            wrong = f"{words[1]}: is no flag"
            if not words[1].startswith("-"):
                wrong = f"{words[1]}: belongs to no flag; a switch takes no value"
        if "Perhaps you meant" in text:
            meant = re.findall(r"^--[^\s,]+", text.split("Perhaps you meant")[1], flags=re.M)
            wrong += f"; perhaps you meant {' or '.join(dict.fromkeys(meant))}"
        print(f"error: {wrong}; --help explains all flags", file=sys.stderr)
        sys.exit(stop.code)


def out_of_range(flags):
    """One line about the first flag with a wrong type or range, or None. flags: a dataclass."""
    try:
        TypeAdapter(type(flags)).validate_python(asdict(flags))
    except ValidationError as error:
        fault = error.errors()[0]
        holder = flags
        name, *rest = fault["loc"]

        # a group of flags, such as the critic's; the rest may also be a branch of a union, or an
        # index
        if is_dataclass(getattr(flags, name)):
            holder = getattr(flags, name)
            name = rest[0]
        flag = getattr(holder, "prefix", "--") + name.replace("_", "-")
        return f"{flag} {fault['input']}: {fault['msg'].replace('Input should', 'must')}"


def mistake_in(flags, world_size=WORLD_SIZE):
    """What is wrong with a Config or a Run: one line that names the flag and the fix, or None."""
    if words := out_of_range(flags):
        return words
    if isinstance(flags, Run):
        return mistake_in_run(flags) or mistake_in(flags.critic, world_size)

    c = flags
    to = c.prefix

    # the value head
    if c.value_range:
        low, high = c.value_range
        if c.value_head == "scalar":
            return f"{to}value-range: needs {to}value-head bounded or hl_gauss"
        if not low < high:
            return f"{to}value-range {c.value_range}: LOW must be below HIGH"
        if high - low < 1e-15 + 1e-4 * max(abs(low), abs(high)):
            return f"{to}value-range {c.value_range}: is too narrow for float32; give numbers farther apart"
    if c.value_head == "hl_gauss" and c.value_head_init == "mean":
        return f"{to}value-head-init mean: not for hl_gauss"

    # the loss and the optimizer
    divides = c.loss_agg_mode == "seq-mean-token-sum-norm"
    if divides != (c.response_length_limit is not None):
        return (
            f"{to}response-length-limit: belongs to {to}loss-agg-mode seq-mean-token-sum-norm;"
            " set both or neither"
        )
    if max(c.betas) == 1:
        return f"{to}betas {c.betas}: must be below 1"

    # the layout
    tp = c.tensor_model_parallel_size
    pp = c.pipeline_model_parallel_size
    cp = c.context_parallel_size
    if world_size % (tp * pp * cp):
        return (
            f"{to}*-parallel-size: tensor {tp} x pipeline {pp} x context {cp}"
            f" must divide the {world_size} ranks"
        )
    experts = c.expert_model_parallel_size * (c.expert_tensor_parallel_size or tp) * pp
    if world_size % experts:
        return f"{to}expert-model-parallel-size: ep x etp x pp = {experts} must divide the {world_size} ranks"
    if c.virtual_pipeline_model_parallel_size > 1 and pp == 1:
        return f"{to}virtual-pipeline-model-parallel-size: needs {to}pipeline-model-parallel-size above 1"
    if cp > 1 and not c.use_remove_padding:
        return f"{to}context-parallel-size: needs packed rows; drop {to}no-use-remove-padding"
    return None


def mistake_in_run(run):
    """What is wrong with the flags of a Run that are not the critic's, or None."""
    if run.eval_rollouts and not run.rollouts:
        return "--eval-rollouts: needs --rollouts; the toy has its own rows"

    # scores neither export anything nor set anything aside
    theirs = realpath(run.critic.model)
    ours = [realpath(f"{run.out_dir}/{name}") for name in ("hf", "checkpoints")]
    writes = not run.score
    if writes and any(f"{theirs}/".startswith(f"{path}/") for path in ours):
        return (
            f"--out-dir {run.out_dir}: holds the --model, which the run would replace; give another"
        )
    if run.score and exists(run.score) and not isfile(run.score):
        return f"--score {run.score}: must be a file, because it is read twice"
    return None


if __name__ == "__main__":  # here, because the imports below take ten seconds
    speaks = not 0 < RANK < WORLD_SIZE  # one rank speaks for all
    RUN = read_flags(Run, description=__doc__, console_outputs=speaks)
    if mistake := mistake_in(RUN):
        said = "\\n".join(mistake.splitlines())  # a flag may hold several lines
        print(f"error: {said}" if speaks else "", file=sys.stderr)
        sys.exit(2)

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import transformers

# else Megatron loads a compiler for its small functions, which is not used here
if not torch.cuda.is_available():
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
# printed at import; neither is used
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")

from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from safetensors.torch import save_file
from torch.profiler import record_function
from transformers import AutoModel
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

import common
from common import Batch, Pack, UserError, blame, of_all_ranks, print0, published

transformers.logging.set_verbosity_error()  # the run prints one line about the weights
transformers.logging.disable_progress_bar()
# from megatron-core 0.16.1 with this torch, and from a rank that reads files without the others
warnings.filterwarnings(
    "ignore",
    "(full scope|`torch.distributed.*|TypedStorage) is deprecated|The .grad attribute|moe_ffn_hidden_size is"
    "|torch.distributed is disabled",
)

# ---- Megatron without CUDA, and without Transformer Engine ---------------------------------------


class CudaMeansCpu(torch.overrides.TorchFunctionMode):
    """Megatron-Core hard-codes device="cuda" in some places; without CUDA, this makes it mean the
    CPU."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        out = function(*args, **kwargs)
        # Megatron's optimizers test for "torch.cuda.FloatTensor"
        if function is torch.Tensor.type and isinstance(out, str):
            out = out.replace("torch.", "torch.cuda.")
        return out


def megatron_without_cuda():
    """Lets Megatron-Core 0.16.1 run on CPU and gloo; does nothing where CUDA is present. It
    replaces devices, streams, random states and two collectives that need equal sizes on gloo (for
    tokens of experts that tensor-parallel ranks share), but no computation."""
    # or it has run before
    if torch.cuda.is_available() or torch.cuda.manual_seed is torch.manual_seed:
        return
    CudaMeansCpu().__enter__()
    warnings.filterwarnings("ignore", message="When using sequence parallelism .*CUDA")
    torch._dynamo.config.disable = True  # compiling its small functions would take minutes
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.Tensor.pin_memory = lambda x: x.clone()  # offloading needs a copy
    # for recomputation
    tensor_parallel.random._get_cuda_rng_state = lambda **_: torch.get_rng_state()
    tensor_parallel.random._set_cuda_rng_state = lambda state, **_: torch.set_rng_state(state)

    def sizes_to_host(self, point, tokens_per_expert=None):
        """Megatron does this on a CUDA stream."""
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if torch.is_tensor(getattr(self, name)):
                setattr(self, name, getattr(self, name).numpy())
        return tokens_per_expert

    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = False  # else it creates one
    token_dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = sizes_to_host

    def all_gather(outputs, x, group):
        outputs[dist.get_rank(group)].copy_(x)
        for rank, out in enumerate(outputs):
            dist.broadcast(out, group=group, group_src=rank)

    def reduce_scatter(output, inputs, group):
        total = torch.cat(inputs)
        dist.all_reduce(total, group=group)
        output.copy_(total.split([len(x) for x in inputs])[dist.get_rank(group)])

    dist.all_gather = all_gather
    dist.reduce_scatter = reduce_scatter


# megatron-core reads it, but defines it only with Transformer Engine
moe_utils.te_general_gemm = None
megatron_optimizer.USING_PYTORCH_OPTIMIZER = True  # torch's AdamW, even if Apex is installed

# ---- Value model: a decoder and a value head in float32 ------------------------------------------


class RMSNorm(nn.RMSNorm):
    """With sequence parallelism, each rank sees some of the tokens, so its gradient is a partial
    sum."""

    def __init__(self, config, hidden_size, eps=1e-6, **_):
        super().__init__(hidden_size, eps=eps)
        # makes Megatron sum it over tensor-parallel ranks
        self.weight.sequence_parallel = config.sequence_parallel


class ValueHead(nn.Linear):
    """v = w . h + b on the hidden state of every token, in float32, replicated over tensor-parallel
    ranks. It replaces GPTModel's vocabulary head. With --value-head hl_gauss it gives N logits."""

    def __init__(self, config, outputs):
        super().__init__(config.hidden_size, outputs)
        self.weight.sequence_parallel = self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_SBD, **_):
        """(S, B, D) -> (S, B, N) float32; with sequence parallelism, all tokens' outputs on each
        rank."""
        out_SBN = F.linear(hidden_SBD.float(), self.weight, self.bias)
        # so that all ranks compute the whole loss; the backward keeps each rank's own slice
        if self.weight.sequence_parallel:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            out_SBN = gather(out_SBN, tensor_parallel_output_grad=False)
        return out_SBN, None


class CoreAttention(nn.Module):
    """Causal attention within each sequence of a packed row, by the kernels of common.py, after
    transformers' rotary embedding (Megatron's would restart at 0 where a row continues a shared
    prompt). With context parallelism, each rank has two pieces of the row (see share_context). Keys
    and values are gathered, and each piece sees the keys up to its own end, so heads are not
    split."""

    def __init__(self, config, **_):
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **_):
        """(S, H, D), keys and values (S, K, D) -> (S, H D)."""
        pack = packed_seq_params
        query, key = apply_rotary_pos_emb(query, key, *pack.rotary)
        if mpu.get_context_parallel_world_size() > 1:
            # backward: reduce-scatter
            gather = tensor_parallel.gather_from_sequence_parallel_region
            key, value = (gather(x, group=mpu.get_context_parallel_group()) for x in (key, value))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        return (
            common.attention(pack.layout, query, key, value, self.scale)[0]
            .transpose(0, 1)
            .flatten(1)
        )


def read_weights(config, model_config):
    """(tensors by their names in critic_fsdp.py, words on their origin). A rank reads only the
    tensors that it needs. Random weights are those of critic_fsdp.py, so every rank draws the whole
    model."""
    head = nn.Linear(model_config.hidden_size, model_config.num_labels)
    if config.model in common.TINY:
        torch.manual_seed(config.seed)
        backbone = AutoModel.from_config(model_config, dtype=torch.float32)
        tensors = {f"model.{name}": x for name, x in backbone.state_dict().items()}
        story = f"random weights (seed {config.seed})"
    else:
        flag = f"{config.prefix}model"
        with blame(f"{flag} {config.model}: its weights do not load"):
            tensors = StoredTensors(common.local_folder(config.model), "model.", flag)
        story = f"{len(tensors)} tensors from {config.model} (no optimizer state)"
    words = common.init_value_head(head, config, model_config)
    score = {f"score.{name}": x for name, x in head.state_dict().items()}
    return ChainMap(score, tensors), f"{story}; {words}"


class StoredTensors(dict):
    """name -> tensor of a folder's weights, read when it is looked up. Every name then has the
    `prefix` once, whether it had none, one, or two as in a checkpoint."""

    def __init__(self, folder, prefix="", flag="--model"):
        with blame(f"{flag} {folder}: its weights do not load"):
            shapes, read = common.open_weights(folder)
        self.read_once = lru_cache(maxsize=2)(read)  # experts are looked up one by one
        for name in shapes:
            rest = name.removeprefix(prefix and "model.").removeprefix(prefix)
            self[prefix + rest] = name

    def __getitem__(self, name):
        return self.read_once(super().__getitem__(name))


EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
# transformers' tensors of all experts: one row per expert, gate above up
JOINED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


def mixtral_name(name):
    """A weight's name in a Mixtral's folder; transformers and our checkpoints name it as in other
    models."""
    name = name.replace("mlp", "block_sparse_moe").replace("gate_proj", "w1")
    return name.replace("up_proj", "w3").replace("down_proj", "w2")


def lookup_weight(tensors, name, form):
    """Looks up a weight, stored under form.format(name). A layer's experts may be stored as one
    tensor."""
    stored = form.format(mixtral_name(name))
    if stored not in tensors:
        stored = form.format(name)
    expert = EXPERT.fullmatch(name)
    if stored in tensors or not expert:
        return tensors[stored]
    experts, i, kind = expert.groups()
    x = tensors[form.format(f"{experts}.{JOINED[kind]}")][int(i)]
    return x if kind == "down" else x.chunk(2)[kind == "up"]


# ---- Weights: megatron-core and Hugging Face -----------------------------------------------------

# megatron-core's name -> how tensor-parallel ranks split it, then the names of its parts in
# critic_fsdp.py. In a layer, names follow decoder.layers.N here and model.layers.N there.
WEIGHTS = {
    "embedding.word_embeddings.weight": ("vocabulary", "model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": ("whole", "model.norm.weight"),
    "output_layer.weight": ("whole", "score.weight"),
    "output_layer.bias": ("whole", "score.bias"),
    "input_layernorm.weight": ("whole", "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": ("heads", *(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": ("heads", *(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.q_layernorm.weight": ("whole", "self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": ("whole", "self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": ("inputs", "self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": ("whole", "post_attention_layernorm.weight"),
    "mlp.router.weight": ("whole", "mlp.gate.weight"),
    "mlp.shared_experts.gate_weight": ("whole", "mlp.shared_expert_gate.weight"),
}
# a layer's MLP, an expert, and Qwen2-MoE's expert that all tokens share
MLPS = {"": "", ".experts.local_experts.{}": ".experts.{}", ".shared_experts": ".shared_expert"}
for ours, theirs in MLPS.items():
    gate = f"mlp{theirs}.gate_proj.weight"
    WEIGHTS[f"mlp{ours}.linear_fc1.weight"] = "outputs", gate, f"mlp{theirs}.up_proj.weight"
    WEIGHTS[f"mlp{ours}.linear_fc2.weight"] = "inputs", f"mlp{theirs}.down_proj.weight"


def hf_names(name):
    """A weight's global name -> (how ranks split it, the names of its parts in critic_fsdp.py)."""
    numbers = re.findall(r"\.(\d+)", name)
    form = re.sub(r"\.\d+", ".{}", name).removeprefix("decoder.layers.{}.")
    cut, *parts = WEIGHTS[form]
    prefix = "model.layers.{}." if numbers else ""
    return cut, [f"{prefix}{part}".format(*numbers) for part in parts]


def named_weights(modules):
    """(global name, parameter) of this rank's weights; layers and experts are numbered over all
    ranks."""
    for module in modules:
        for name, p in module.named_parameters():
            words = name.split(".")
            if words[1] == "layers":
                layer = module.decoder.layers[int(words[2])]
                words[2] = f"{layer.layer_number - 1}"
                if "local_experts" in words:
                    words[6] = f"{layer.mlp.local_expert_indices[int(words[6])]}"
            yield ".".join(words), p


def freeze(modules, config):
    """Freezes the weights whose names in critic_fsdp.py match --freeze-modules: they get no
    gradient, no optimizer state and no float32 master (a collective)."""
    pattern = config.freeze_modules
    flag = f"{config.prefix}freeze-modules {pattern}"
    trained = 0
    frozen = 0
    for name, p in named_weights(modules):
        _, parts = hf_names(name)
        # name of the experts' one tensor
        joined = partial(EXPERT.sub, lambda m: f"{m[1]}.{JOINED[m[3]]}")
        with blame(flag):
            matches = [bool(pattern and re.search(pattern, joined(part))) for part in parts]
            if any(matches) != all(matches):
                raise ValueError(
                    f"must match all or none of {', '.join(parts)}, which are one weight here"
                )
        p.requires_grad_(not all(matches))
        if all(matches):
            frozen += p.numel()
        else:
            trained += p.numel()

    trained, frozen = zip(*of_all_ranks((trained, frozen)))
    if pattern and (0 in trained or not any(frozen)):
        raise UserError(f"{flag}: must match some of the weights, but not all of a rank")


def count_parameters(model, config):
    """(all parameters, trainable parameters) of transformers' model, which has a head named
    score."""
    count = 0
    trained = 0
    for name, p in model.named_parameters():
        name = name if name.startswith("score.") else f"model.{name}"
        count += p.numel()
        if not (config.freeze_modules and re.search(config.freeze_modules, name)):
            trained += p.numel()
    return count, trained


def groups_of(name):
    """(tensor-parallel ranks that split this weight, its replicas: ranks with the same shard but
    other rows, or other tokens of the same rows)."""
    if ".experts." in name:
        return mpu.get_expert_tensor_parallel_group(), mpu.get_expert_data_parallel_group()
    return mpu.get_tensor_model_parallel_group(), mpu.get_data_parallel_group(
        with_context_parallel=True
    )


def shard(cut, parts, groups, rank, size):
    """A tensor-parallel rank's shard of a weight, from its whole parts in Hugging Face's form."""
    if cut == "whole":
        return parts[0]
    if cut == "inputs":
        return parts[0].chunk(size, 1)[rank]
    if cut == "vocabulary":
        return F.pad(parts[0], (0, 0, 0, -len(parts[0]) % size)).chunk(size)[rank]
    # heads: each group's queries, key and value; outputs: each rank's part of gate and of up
    pieces = groups if cut == "heads" else size
    by_piece = [part.unflatten(0, (pieces, -1)) for part in parts]
    return torch.cat(by_piece, 1).flatten(0, 1).chunk(size)[rank]


def unshard(cut, shards, groups, head_dim, vocab_size):
    """The whole parts in Hugging Face's form, from the shards of all ranks: the inverse of
    shard."""
    if cut == "whole":
        return shards[:1]
    if cut == "inputs":
        return [torch.cat(shards, 1)]
    if cut == "outputs":
        return [torch.cat(halves) for halves in zip(*(x.chunk(2) for x in shards))]
    if cut == "vocabulary":
        return [torch.cat(shards)[:vocab_size]]
    by_group = torch.cat(shards).unflatten(0, (groups, -1))
    queries = by_group.shape[1] - 2 * head_dim
    return [part.flatten(0, 1) for part in by_group.split([queries, head_dim, head_dim], 1)]


def whole_weights(modules, vocab_size, local):
    """name -> whole tensor on the host, for the weights that this rank writes (a collective).
    local(name, p) gives this rank's shard of a weight, or None. Tensor-parallel ranks gather one
    weight at a time, and one rank keeps it. Ranks with the same layers take turns."""
    config = modules[0].config
    kept = {}
    for name, p in named_weights(modules):
        cut, parts = hf_names(name)
        group, replicas = groups_of(name)
        mine = local(name, p)
        if mine is None:
            continue
        shards = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(shards, mine.contiguous(), group=group)
        layer = re.match(r"decoder\.layers\.(\d+)", name)
        replica, writer = divmod(int(layer[1]) if layer else 0, group.size())
        if group.rank() == writer and replicas.rank() == replica % replicas.size():
            wholes = unshard(cut, shards, config.num_query_groups, config.kv_channels, vocab_size)
            kept |= {part: whole.float().cpu().contiguous() for part, whole in zip(parts, wholes)}
    return kept


def join_experts(weights):
    """Joins a layer's experts into one tensor, as transformers has them -> name -> (first row,
    tensor). A rank with only some of the experts has their rows, from the first row on."""
    out = {}
    layers = {}  # the joint tensor's name -> expert -> its matrices, gate before up
    for name, x in weights.items():
        if expert := EXPERT.fullmatch(name):
            experts, i, kind = expert.groups()
            layers.setdefault(f"{experts}.{JOINED[kind]}", {}).setdefault(int(i), []).append(x)
        else:
            out[name] = 0, x
    for name, experts in layers.items():
        out[name] = min(experts), torch.stack([torch.cat(experts[i]) for i in sorted(experts)])
    return out


# ---- Parallelism: which ranks share what, and the model spread over them -------------------------


class Layout(NamedTuple):
    """Ranks form a tp x cp x dp x pp grid. tp ranks split each matrix product, cp ranks each
    sequence, pp the layers, and dp groups the rows. Experts are spread over the same ranks in their
    own way (ep x etp)."""

    device: torch.device
    # of matrix products; master weights, gradients, optimizer and value head are float32
    dtype: torch.dtype
    dp_rank: int
    dp_size: int
    tp_rank: int
    cp_rank: int
    dp_ranks: list  # the dp_rank of each rank
    gives_values: list  # for each rank, whether it gives values back: the last stage, once


def parallel_sizes(config):
    """The flags that Megatron's process groups and its model config take under the same names."""
    sizes = {name: x for name, x in vars(config).items() if name.endswith("parallel_size")}
    if config.virtual_pipeline_model_parallel_size == 1:
        sizes["virtual_pipeline_model_parallel_size"] = None
    return sizes


def has_groups(config):
    """Whether Megatron's process groups are those of this layout already, from an earlier
    worker."""
    if not mpu.model_parallel_is_initialized():
        return False
    found = {
        "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": mpu.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": mpu.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": mpu.get_context_parallel_world_size(),
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": mpu.get_expert_tensor_parallel_world_size(),
    }
    wanted = parallel_sizes(config)
    wanted["expert_tensor_parallel_size"] = (
        config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    )
    return found == wanted and mpu.get_model_parallel_group() in dist.distributed_c10d._world.pg_map


def end_groups():
    """Ends Megatron's process groups, whose threads and sockets would stay until the process
    ends."""
    kept = chain(*(x if isinstance(x, list) else [x] for x in vars(mpu).values()))
    groups = {group for group in kept if isinstance(group, dist.ProcessGroup)} - {dist.group.WORLD}
    dist.barrier()  # until all ranks are done with them
    for group in groups & dist.distributed_c10d._world.pg_map.keys():
        dist.destroy_process_group(group)
    mpu.destroy_model_parallel()


def make_layout(config, device):
    """Builds the process groups, unless an earlier worker has built the same. They are global: a
    worker of another layout cannot be used after this."""
    megatron_without_cuda()
    if not has_groups(config):
        end_groups()
        mpu.initialize_model_parallel(
            **parallel_sizes(config),
            distributed_timeout_minutes=config.timeout_minutes,
            create_gloo_process_groups=False,  # for optimizer checkpoints of a kind not used here
        )
    # Megatron requires it; unused, because all weights are filled in later and dropout is off
    tensor_parallel.model_parallel_cuda_manual_seed(config.seed, inference_rng_tracker=True)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    gives = tp_rank == 0 and mpu.is_pipeline_last_stage(ignore_virtual=True)
    dp_ranks, gives_values = zip(*of_all_ranks((mpu.get_data_parallel_rank(), gives)))
    return Layout(
        device=device,
        dtype=common.compute_dtype(config.param_dtype, device),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        tp_rank=tp_rank,
        cp_rank=mpu.get_context_parallel_rank(),
        dp_ranks=dp_ranks,
        gives_values=gives_values,
    )


def splits_sequence(config):
    """Whether tensor-parallel ranks also split the tokens between matrix products."""
    return config.sequence_parallel and config.tensor_model_parallel_size > 1


def transformer_config(config, model_config, names, dtype):
    """Megatron's config of the model and of how to compute it. names: those of transformers'
    weights."""
    c = model_config
    return TransformerConfig(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        ffn_hidden_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_query_groups=c.num_key_value_heads,
        kv_channels=getattr(c, "head_dim", None),  # None: hidden_size / heads
        layernorm_epsilon=c.rms_norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias="layers.0.self_attn.q_proj.bias" in names,
        qk_layernorm="layers.0.self_attn.q_norm.weight" in names,
        num_moe_experts=getattr(c, "num_experts", None),
        moe_router_topk=getattr(c, "num_experts_per_tok", 2),
        moe_ffn_hidden_size=getattr(c, "moe_intermediate_size", None),  # None: intermediate_size
        moe_layer_freq=[
            int(f"layers.{i}.mlp.gate.weight" in names) for i in range(c.num_hidden_layers)
        ],
        # softmax over all, or the chosen
        moe_router_pre_softmax=not getattr(c, "norm_topk_prob", True),
        moe_shared_expert_intermediate_size=getattr(c, "shared_expert_intermediate_size", None)
        or None,
        moe_shared_expert_gate=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        recompute_granularity="full" if config.gradient_checkpointing else None,
        recompute_method="uniform",
        recompute_num_layers=1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        sequence_parallel=splits_sequence(config),
        variable_seq_lengths=True,  # stages tell each other the size of each micro-batch
        moe_token_dispatcher_type="alltoall",
        # with virtual stages, blocking sends would wait for each other forever
        overlap_p2p_comm=config.virtual_pipeline_model_parallel_size > 1,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,  # outputs already sent on are not needed here
        calculate_per_token_loss=True,  # gradients are plain sums, see forward_backward
        **parallel_sizes(config),
    )


def layer_spec(transformer, names, vp_stage):
    """The layers of one chunk of the model: Megatron's own, with the norm and the attention
    above."""
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=False, vp_stage=vp_stage
    )
    block.layer_norm = RMSNorm
    for spec in block.layer_specs:
        layer = spec.submodules
        attention = layer.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention.core_attention = CoreAttention
        if transformer.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block


def build_value_model(config, model_config, layout):
    """(this rank's chunks of the model, the weights to fill them with, rotary embedding, FLOPs of a
    forward, cost of an update in forwards, words on its size and on where its weights come
    from)."""
    modules = []
    tp = config.tensor_model_parallel_size
    with torch.device("meta"):
        model = AutoModel.from_config(model_config, dtype=torch.float32)
        model.score = nn.Linear(model_config.hidden_size, model_config.num_labels)
    with blame(f"{config.prefix}model {config.model}: cannot be built with these parallel sizes"):
        names = model.state_dict()
        transformer = transformer_config(config, model_config, names, layout.dtype)
        for vp_stage in range(config.virtual_pipeline_model_parallel_size):
            module = GPTModel(
                transformer,
                layer_spec(transformer, names, vp_stage),
                vocab_size=ceil(model_config.vocab_size / tp) * tp,
                max_sequence_length=model_config.max_position_embeddings,
                position_embedding_type="none",  # see CoreAttention
                pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                vp_stage=vp_stage,
            )
            modules.append(module)
    if module.post_process:
        module.output_layer = ValueHead(transformer, model_config.num_labels)
    tensors, story = read_weights(config, model_config)
    rotary = type(model.rotary_emb)(model_config).to(layout.device)
    flops = common.flops_model(model, model_config)
    freeze(modules, config)
    count, trained = count_parameters(model, config)
    share = trained / count
    story = f"{count:,} parameters, {trained:,} of them ({share:.2%}) train: {story}"
    # forward, input gradients, weight gradients
    return modules, tensors, rotary, flops, 2 + share, story


def padding_row(module, model_config):
    """The padding token's row in this rank's part of the embedding, or None if it has no such
    trained row."""
    if not module.pre_process or model_config.pad_token_id is None:
        return None
    embedding = module.embedding.word_embeddings
    # a negative id counts from the end
    row = model_config.pad_token_id % model_config.vocab_size - embedding.vocab_start_index
    return row if embedding.weight.requires_grad and 0 <= row < len(embedding.weight) else None


def wrap(module):
    """Wraps a chunk, to cast its inputs and to accumulate and reduce its gradients in float32."""
    for name, p in module.named_parameters():
        if ".experts." in name:  # Megatron sets this only from two expert ranks on
            p.allreduce = False  # reduced over the experts' replicas
    # without this, recomputation after a frozen embedding gives no gradients
    if module.pre_process:
        module.embedding.register_forward_hook(lambda *x: x[2].requires_grad_())
    chunk = Float16Module(module.config, module) if module.config.bf16 else module
    if module.post_process:
        module.output_layer.float()
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(module.config, options, chunk)


# ---- Batching: rows over ranks, a rank's rows over micro-batches ---------------------------------


def spread(costs, k):
    """k lists of indices with nearly equal sums: each next largest joins the emptiest list (Graham
    1969)."""
    parts = [[] for _ in range(k)]
    loads = [(0, part) for part in range(k)]  # a heap: the emptiest is first
    largest_first = sorted(range(len(costs)), key=lambda i: -costs[i])
    for i in largest_first:
        load, emptiest = loads[0]
        heapreplace(loads, (load + costs[i], emptiest))
        parts[emptiest].append(i)
    return parts


def micro_batches(rows, dp_size, max_tokens, share, padded=False):
    """A list of micro-batches (lists of Rows) for each data-parallel rank, none above max_tokens.
    Every rank computes the same table, so all run equally many forwards without communicating
    (ranks that share weights must). A rank with fewer tokens gets smaller or empty micro-batches.
    Rows with equal prompts stay together unless they exceed a micro-batch or a rank's share of all
    tokens."""
    groups = common.by_prompt(rows, share and not padded)
    most = min(max_tokens, sum(common.costs(groups)) / dp_size)

    # groups, large ones in several pieces
    bundles = []
    for shared, same in groups:
        size = inf  # the first row begins a piece
        for row in same:
            size += row.length - shared
            if size > most:
                size = row.length
                bundles.append((shared, []))
            bundles[-1][1].append(row)

    # as few micro-batches as the cap allows
    sizes = common.costs(bundles)
    tokens = lambda part: max(part, default=0) * len(part) if padded else sum(part)
    count = 1
    while True:
        parts = spread(sizes, dp_size * count)
        if max(tokens([sizes[i] for i in part]) for part in parts) <= max_tokens:
            break
        count += 1 + count // 20
    table = [[row for i in part for row in bundles[i][1]] for part in parts]
    return [table[rank::dp_size] for rank in range(dp_size)]


def pack_rows(batch, device, share, unit=1):
    """Packs rows end to end -> (slots, index_T, Pack). slots: (S,) the index of each slot's
    token, or T for padding to a multiple of `unit`. A shared prompt has slots in its first row
    only, except for its last token, after which rows differ. index_T: each token's slot, where
    later tokens of its row find its key.

        rows       p0 p1 p2 a0 a1    p0 p1 p2 b0
        slots      p0 p1 p2 a0 a1    p2 b0
        index_T    0  1  2  3  4     0  1  5  6"""
    lengths = batch.lengths
    queries = batch.lengths  # a list of its own: both change below
    total = len(batch.input_ids)
    source = torch.arange(total + unit)  # source[t]: the token that is computed for token t
    rows = source[:total].split(lengths)  # views of source
    for shared, (first, *others) in batch.groups(share):
        for row in others:
            rows[row][:shared] = rows[first][:shared]
            queries[row] -= shared
    pad = -sum(queries) % unit
    queries[-1] += pad  # padding extends the last row, where no token sees it
    lengths[-1] += pad
    slots, keys = source[: total + pad].unique(return_inverse=True)
    keys = keys.to(device, non_blocking=True)
    layout = Pack(queries, device, lengths, keys if len(slots) < len(keys) else None)
    return slots.clamp(max=total), keys[:total], layout


def pack_unit(config):
    """A micro-batch is padded at its end to a multiple of this many slots, so that ranks can split
    it evenly; each of p context-parallel ranks has two of 2 p equal pieces."""
    cp = config.context_parallel_size
    return (2 * cp if cp > 1 else 1) * (
        config.tensor_model_parallel_size if splits_sequence(config) else 1
    )


def check_model_flags(config, model_config):
    """UserError for flags that do not fit this model."""
    c = model_config
    known = ("qwen2", "qwen3", "llama", "mistral", "mixtral", "qwen2_moe", "qwen3_moe")
    if c.model_type not in known:
        raise UserError(
            f"{config.prefix}model {config.model}: {c.model_type} is not among {', '.join(known)};"
            " use critic_fsdp.py"
        )
    fixed = {"mlp_bias": False, "attention_bias": False, "hidden_act": "silu",
             "quantization_config": None, "sliding_window": None}  # fmt: skip
    # a window of 0 is none (Qwen2-MoE)
    odd = [
        f"{name} {getattr(c, name)}"
        for name, x in fixed.items()
        if getattr(c, name, x) not in (x, 0)
    ]
    rope = c.rope_parameters
    if (
        rope["rope_type"] not in ("default", "linear", "llama3")
        or rope.get("partial_rotary_factor", 1) != 1
    ):
        odd.append(f"rope_parameters {rope}")
    if odd:
        raise UserError(
            f"{config.prefix}model {config.model}: {', '.join(odd)} is not supported here; use critic_fsdp.py"
        )
    if (
        hasattr(c, "num_experts")
        and config.tensor_model_parallel_size > 1
        and not config.sequence_parallel
    ):
        raise UserError(
            f"{config.prefix}no-sequence-parallel: MoE with tensor parallelism needs sequence parallelism"
        )

    # Megatron's own rules, before any process group is built
    with blame(f"{config.prefix}model {config.model}: cannot be built with these parallel sizes"):
        with torch.device("meta"):
            names = AutoModel.from_config(model_config, dtype=torch.float32).state_dict()
        transformer_config(config, model_config, names, torch.float32)


def check_budget(config, longest, row):
    """The smallest budget for the longest row; UserError if given less. row: words that name it."""
    least = (longest + -longest % pack_unit(config)) // config.context_parallel_size
    given = config.ppo_max_token_len_per_gpu
    if isinstance(given, int) and given < least:
        raise UserError(
            f"{config.prefix}ppo-max-token-len-per-gpu {given}: {row} has {longest} tokens; give {least}"
        )
    return least


# ---- The critic: forward, loss, step -------------------------------------------------------------


def build_optimizer(model, config, lr):
    """The optimizer of the weights that train, as Megatron shards them. It supports only Adam."""
    options = OptimizerConfig(
        lr=lr,
        weight_decay=config.weight_decay,
        bf16=model[0].config.bf16,
        use_distributed_optimizer=True,
    )
    # {}: by default biases and norms would form a group without weight decay
    optimizer = get_megatron_optimizer(
        options, list(model), config_overrides={}, use_gloo_process_groups=False
    )
    for group in optimizer.param_groups:
        group["fused"] = True  # one kernel
        group["betas"] = config.betas
    return optimizer


class MegatronPPOCritic:
    """Values and updates of a value model. compute_values and update_critic take the rows that this
    rank has, and the Rows of all ranks; each rank fetches the rows that it computes."""

    # called between micro-batches of compute_values; it may raise
    between = staticmethod(lambda: None)

    def __init__(self, config, model_config, layout, total_steps):
        self.config = config
        self.layout = layout
        self.value_range = model_config.value_range  # None: the head's outputs are the values
        self.total_steps = total_steps  # optimizer steps of the whole run, for cosine
        self.modules, tensors, self.rotary, self.flops, self.passes, self.story = build_value_model(
            config, model_config, layout
        )
        self.transformer = self.modules[0].config
        self.padding_row = padding_row(self.modules[0], model_config)
        # wrap moves only what trains
        self.model = nn.ModuleList(map(wrap, self.modules)).to(layout.device)
        self.peak_lr = config.lr or (1e-3 if config.model in common.TINY else 1e-5)
        self.optimizer = build_optimizer(self.model, config, self.peak_lr)
        # Megatron's distributed optimizers: one for experts and one for the rest
        self.optimizers = self.optimizer.chained_optimizers
        # weight -> (AdamW, float32 tensor of this rank's part, slice of the part)
        self.masters = {}
        for optimizer in self.optimizers:
            weights = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
            masters = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
            for p, master in zip(chain(*weights), chain(*masters)):
                place = optimizer._get_model_param_range_map(p)["param"]
                self.masters[p] = optimizer.optimizer, master, slice(place.start, place.end)
        self.restore(tensors, f"{config.prefix}model {config.model}")
        # the names of what `loss` sums: ranks without the head, and updates without a step, have
        # them, too
        _, sums = self.loss(torch.zeros(1, model_config.num_labels).squeeze(1), Batch.blank())
        self.no_sums = dict.fromkeys(
            sums, torch.zeros((), dtype=torch.float64, device=layout.device)
        )
        # per micro-batch, over the ranks that share it; see CriticWorker.set_budget
        self.max_tokens = 0
        self.optimizer_steps = 0  # steps taken, without skipped ones: the position in the schedule
        self.updates = 0  # calls of update_critic; with seed and epoch, the key of every shuffle

    def plan_micro_batches(self, rows):
        """Micro-batches of these Rows for each data-parallel rank, see micro_batches."""
        c = self.config
        table = micro_batches(
            rows, self.layout.dp_size, self.max_tokens, c.share_prompts, not c.use_remove_padding
        )
        multiple = c.pipeline_model_parallel_size if len(self.model) > 1 else 1
        # virtual stages need this multiple
        return [part + [[]] * (-len(part) % multiple) for part in table]

    def fetch(self, batch, table):
        """The rows that this rank computes, in the order of its micro-batches (a collective)."""
        wanted = [list(chain(*table[dp_rank])) for dp_rank in self.layout.dp_ranks]
        return common.fetch(batch, wanted)

    def cut(self, local, table):
        """The fetched rows in micro-batches; some may have no row."""
        return local.split(list(map(len, table[self.layout.dp_rank])))

    def micro_batch(self, micro):
        """These rows on the device. Without rows: one masked token, to keep in step with other
        ranks.
        Its columns have S entries: one for the action that *follows* each slot's token. packed: the
        ids, what attention reads, and the indices of these actions among the T tokens of these
        rows."""
        micro = replace(micro if len(micro) else Batch.blank())
        slots, layout = self.lay_out(micro)

        def to_slots(x_T):
            return F.pad(x_T, (0, 1))[slots].to(self.layout.device, non_blocking=True)

        pack = PackedSeqParams(qkv_format="thd")
        pack.layout = layout
        places_S = to_slots(micro.positions)
        pack.rotary = [x[0] for x in self.rotary(places_S.to(self.layout.dtype), places_S[None])]
        # shift to the left by one: the first token of a row is never an action, so nothing crosses
        # rows
        index_T = torch.arange(len(micro.input_ids))
        micro.packed = to_slots(micro.input_ids)[None], pack, to_slots(index_T.roll(-1))
        for name in ("response_mask", *micro.FLOATS):
            if (x := getattr(micro, name)) is not None:
                setattr(micro, name, to_slots(x.roll(-1)))
        return micro

    def lay_out(self, micro):
        """Where the tokens of a micro-batch go -> (slots, Pack), see pack_rows. Without
        packing, rows are padded to equal length."""
        config = self.config
        device = self.layout.device
        if config.context_parallel_size > 1:
            return self.share_context(micro)
        if config.use_remove_padding:
            slots, _, layout = pack_rows(micro, device, config.share_prompts, pack_unit(config))
            return slots, layout
        total = len(micro.input_ids)
        rows = torch.arange(total).split(micro.lengths)
        slots = nn.utils.rnn.pad_sequence(rows, True, total).flatten()
        sizes = [len(slots) // len(rows)] * len(rows)
        tail = -len(slots) % pack_unit(config)
        sizes[-1] += tail
        return F.pad(slots, (0, tail), value=total), Pack(sizes, device)

    def share_context(self, micro):
        """lay_out with context parallelism: a packed row is cut into 2 p pieces; rank r of p has
        pieces r and 2 p - 1 - r. Under a causal mask, this splits the work of one long row evenly,
        and of many nearly so. Queries see the keys of their own rows, gathered from all ranks, up
        to their own positions.

            p = 2        row: 0 1 2 3 4 5 6 7        rank 0: 0 1 . . . . 6 7        rank 1: . . 2 3 4 5 . ."""
        p = self.config.context_parallel_size
        device = self.layout.device
        slots, _, layout = pack_rows(
            micro, "cpu", self.config.share_prompts, pack_unit(self.config)
        )
        places = torch.arange(len(slots))
        seen = places if layout.keys is None else layout.keys
        # ends of each row's queries and keys
        ends = list(zip(*(cu.tolist() for cu in layout.varlen[:2])))
        pieces = places.view(2 * p, -1)
        pieces = torch.stack([pieces[:p], pieces[p:].flip(0)], 1)  # [rank]: its two pieces
        mine = pieces[self.layout.cp_rank]
        queries = []
        keys = []
        for piece in mine:
            low = int(piece[0])
            high = low + len(piece)
            for (begin, first_key), (end, end_of_keys) in pairwise(ends):
                behind = max(end - high, 0)
                n = end - behind - max(begin, low)
                if n > 0:
                    queries.append(n)
                    keys.append(seen[first_key : end_of_keys - behind])
        # once gathered
        index = pieces.flatten().argsort()[torch.cat(keys)].to(device, non_blocking=True)
        return slots[mine.flatten()], Pack(queries, device, list(map(len, keys)), index)

    def run_schedule(self, micros, reduce, done, forward_only=False):
        """Runs all micro-batches through Megatron's schedule: forward and, unless forward_only,
        backward. On the last stage, reduce(outputs_S, micro) returns their loss. done() is called
        for each forward."""

        @record_function("micro-batch")  # its forward; the schedule itself runs the backward
        def forward_step(micros, chunk):
            micro = next(micros)
            done()
            ids_1S, pack, _ = micro.packed

            def loss_of(outputs_1SN):
                loss = reduce(outputs_1SN[0].squeeze(-1), micro)
                return loss, torch.tensor(0), None  # a token count that nothing reads

            return chunk(ids_1S, None, None, packed_seq_params=pack), loss_of

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micros) for _ in self.model],
            model=list(self.model),
            num_microbatches=len(micros),
            seq_length=1,  # unused: each micro-batch has its own length
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def values(self, outputs, mask):
        """Turns the head's outputs into values of the actions; zero elsewhere."""
        if self.value_range:
            low, high = self.value_range
            if outputs.ndim == 1:  # --value-head bounded: BPCO, 2608.23566
                outputs = low + (high - low) * (0.5 + outputs.atan() / pi)
            else:
                outputs = common.hl_gauss_values(outputs, low, high)
        return torch.where(mask, outputs, 0.0)

    @torch.no_grad()
    def compute_values(self, batch, rows):
        """(T,) float32 values of the batch's actions, zero elsewhere; on the host."""
        self.model.eval()
        table = self.plan_micro_batches(rows)
        local = self.fetch(batch, table)
        pieces = self.cut(local, table)
        values = []

        def reduce(outputs_S, micro):
            *_, index_S = micro.packed
            v_T = torch.zeros(len(micro.input_ids), device=self.layout.device)
            v_T.index_add_(0, index_S, self.values(outputs_S, micro.response_mask))
            values.append(v_T[: len(pieces[len(values)].input_ids)])  # nothing of a masked token
            return outputs_S.sum()

        size = 4 * self.config.pipeline_model_parallel_size  # several at once keep a pipeline busy
        done = common.progress_of(len(pieces), "values", "micro-batches")
        done_one = partial(done, 1 / len(self.model))  # each virtual stage has its own forwards
        for first in range(0, len(pieces), size):
            self.between()
            micros = list(map(self.micro_batch, pieces[first : first + size]))
            self.run_schedule(micros, reduce, done_one, forward_only=True)
        values_T = torch.cat(values).cpu() if values else torch.zeros(len(local.input_ids))
        values_T = self.give_back(values_T, local, table, batch)
        self.between()  # last chance to raise: an update may follow, which is not interrupted
        return values_T

    def give_back(self, values_T, local, table, batch):
        """Values of the fetched rows -> values of the rows that this rank has."""
        ranks = zip(self.layout.dp_ranks, self.layout.gives_values)
        wanted = [list(chain(*table[dp_rank])) if gives else [] for dp_rank, gives in ranks]
        return common.give_back(values_T, local, wanted, batch)

    def update_critic(self, batch, rows):
        """PPO epochs over mini-batches, one optimizer step each -> metrics. batch: the rows that
        this rank has; rows: the Rows of all ranks, which are cut into mini-batches; mini_batch
        fetches ours."""
        config = self.config
        self.model.train()
        totals = Counter(self.no_sums)  # of the steps taken
        norms = []  # one per mini-batch, NaN where the step was skipped
        done = common.progress_of(config.ppo_epochs * len(rows), "update", "rows")
        groups = common.by_prompt(rows)  # a shuffle keeps equal prompts together
        for epoch in range(config.ppo_epochs):
            ordered = rows
            if config.shuffle:
                ordered = common.shuffled_rows(groups, config.seed, self.updates, epoch)
            for first in range(0, len(ordered), config.ppo_mini_batch_size):
                mini = ordered[first : first + config.ppo_mini_batch_size]
                norms.append(nan)
                if not any(row.actions for row in mini):
                    continue  # AdamW would move the weights even with zero gradients
                pieces = self.mini_batch(batch, mini)
                done_one = partial(done, len(mini) / len(pieces) / len(self.model))
                with record_function("mini-batch"):
                    # Megatron's schedule loops over them
                    sums = self.forward_backward(list(map(self.micro_batch, pieces)), done_one)
                    norm = self.optimizer_step()
                if isfinite(norm):
                    norms[-1] = norm
                    totals.update(sums)
        self.updates += 1
        lr = self.optimizer.param_groups[0]["lr"]
        return common.update_metrics("critic", "vf_loss", totals, norms, lr)

    def mini_batch(self, batch, mini):
        """This rank's rows of a mini-batch, with the weights of their losses, in micro-batches."""
        config = self.config
        table = self.plan_micro_batches(mini)
        local = self.fetch(batch, table)
        local.weights = common.loss_weights(
            local, config.loss_agg_mode, config.response_length_limit, config.value_places, mini
        )
        return self.cut(local, table)

    def forward_backward(self, micros, done=lambda: None):
        """Computes the gradient of a mini-batch, over all ranks -> this rank's sums, as `loss`
        returns them. Megatron would divide by micro-batches, tokens and ranks. With
        calculate_per_token_loss, and without a
        token count for finalize_model_grads, it divides by nothing: each rank adds its own tokens'
        loss, and the sum over ranks is the loss of the mini-batch."""
        for chunk in self.model:  # the layers of one stage, or of one virtual stage
            chunk.zero_grad_buffer()
        sums = Counter()

        def reduce(outputs_S, micro):
            loss, part = self.loss(outputs_S, micro)
            if self.layout.tp_rank == 0:  # tensor-parallel ranks have equal sums
                sums.update(part)
            return loss

        self.run_schedule(micros, reduce, done)
        finalize_model_grads(self.model)
        # as in transformers, the padding token's embedding is not trained
        if self.padding_row is not None:
            self.modules[0].embedding.word_embeddings.weight.main_grad[self.padding_row].zero_()
        return sums

    def loss(self, outputs, micro):
        """This micro-batch's part of the mini-batch loss, and its sums: for each metric, the sum
        over the actions. See common.update_metrics."""
        vpreds = self.values(outputs, micro.response_mask)
        columns = (micro.returns, micro.response_mask, micro.weights)
        if outputs.ndim == 2:
            loss = common.hl_gauss_loss(outputs, *columns, *self.value_range)
            clipped = torch.zeros_like(loss)
        else:
            cliprange = self.config.cliprange_value
            loss, clipped = common.value_loss(vpreds, micro.values, *columns, cliprange)
        sums = {
            "vf_loss": loss,
            "vf_clipfrac": clipped,
            "vpred_mean": vpreds.sum(),
            "actions": micro.response_mask.sum(),
        }
        return loss, {name: x.detach().double() for name, x in sums.items()}

    def learning_rate(self):
        """Learning rate of the next step: linear warm-up, whose first step is at lr / steps, then
        constant or a cosine that ends at 0. Skipped steps do not advance it."""
        warmup = self.config.lr_warmup_steps
        rate = self.peak_lr * min(1.0, (self.optimizer_steps + 1) / max(warmup, 1))
        if self.config.lr_scheduler_type == "cosine":
            done = (self.optimizer_steps - warmup) / max(self.total_steps - warmup, 1)
            rate *= 0.5 * (1 + cos(pi * min(max(done, 0.0), 1.0)))
        return rate

    @record_function("optimizer step")
    def optimizer_step(self):
        """Clips, then steps -> norm before clipping. All ranks skip the step if the norm is not
        finite."""
        config = self.config
        # part of Megatron's own step(), which would step on a NaN too
        self.optimizer.prepare_grads()
        # get_grad_norm() would wait for the device at every weight
        grads = [
            g for optimizer in self.optimizers for g in optimizer.get_main_grads_for_grad_norm()
        ]
        square = nn.utils.get_total_norm(grads).to(self.layout.device).square()
        dist.all_reduce(square)
        norm = sqrt(square)
        if isfinite(norm):
            for optimizer in self.optimizers:
                clip_grads.clip_grad_by_total_norm_fp32(
                    optimizer.get_parameters(), config.grad_clip, norm
                )
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step_with_ready_grads()
            self.optimizer_steps += 1
        self.optimizer.zero_grad()
        return norm

    def master(self, name, p, kind="weight"):
        """The float32 weight behind p, or one of its moments (None if p is frozen). A collective of
        all ranks that hold the weight."""
        if not p.requires_grad:
            return p.detach().float() if kind == "weight" else None
        flat = torch.zeros(p.numel(), device=p.device)
        if p in self.masters:
            adam, mine, place = self.masters[p]
            flat[place] = mine.detach() if kind == "weight" else adam.state[mine].get(kind, 0.0)
        _, replicas = groups_of(name)
        dist.all_reduce(flat, group=replicas)
        return flat.view_as(p)

    @torch.no_grad()
    def restore(self, tensors, flag, kind="weight", form="{}"):
        """Fills all weights, or one moment of each, from tensors stored under form.format(name):
        the inverse of master. A collective; UserError on all ranks if a tensor does not fit on any
        of them."""
        problems = []
        for name, p in named_weights(self.modules):
            if kind != "weight" and not p.requires_grad:
                continue
            cut, parts = hf_names(name)
            group, _ = groups_of(name)
            try:
                wholes = [lookup_weight(tensors, part, form) for part in parts]
                x = shard(
                    cut, wholes, self.transformer.num_query_groups, group.rank(), group.size()
                )
                if x.shape != p.shape:
                    raise RuntimeError(f"is {tuple(x.shape)} instead of {tuple(p.shape)}")
            except (KeyError, RuntimeError, IndexError) as error:
                problems.append(f"{parts[0]} ({type(error).__name__}: {error})")
                continue
            if kind == "weight":
                p.copy_(x)
            if p in self.masters:
                adam, mine, place = self.masters[p]
                if kind != "weight":  # torch creates it at the first step
                    mine = adam.state[mine].setdefault(kind, torch.zeros_like(mine))
                mine.copy_(x.flatten()[place])
        if problems := sorted(chain(*of_all_ranks(problems))):
            raise UserError(f"{flag}: {len(problems)} weights do not fit, e.g. {problems[0]}")


# ---- The worker: life cycle, memory, metrics -----------------------------------------------------


class CriticWorker:
    """The critic of a PPO loop: every rank creates one and calls its methods in the same order."""

    def __init__(self, config):
        if mistake := mistake_in(config):
            raise UserError(mistake)
        self.config = config
        self.tokenizer, self.model_config = common.load_config(config)
        check_model_flags(config, self.model_config)
        self.device = common.setup_distributed(config.timeout_minutes)
        if config.ppo_max_token_len_per_gpu == "auto" and self.device.type == "cpu":
            raise UserError(
                f"{config.prefix}ppo-max-token-len-per-gpu auto: on a CPU, give the memory per rank: auto:GIB"
            )
        self.layout = make_layout(config, self.device)
        self.critic = None  # see init_model
        self.offloaded = False
        self.halvings = 0  # how often runs from here have run out of memory, see Checkpoints

    def init_model(self, total_steps=None, value_range=None):
        """Builds the model and its optimizer, and seeds torch, alike on all ranks.
        total_steps: optimizer steps of the whole run, which --lr-scheduler-type cosine needs.
        value_range: (LOW, HIGH) of the head if neither --value-range nor the checkpoint gives
        one."""
        config = self.config
        if config.lr_scheduler_type == "cosine" and not total_steps:
            raise UserError(
                f"{config.prefix}lr-scheduler-type cosine: init_model needs total_steps"
            )
        common.configure_head(self.model_config, config, value_range)
        self.critic = MegatronPPOCritic(config, self.model_config, self.layout, total_steps)
        torch.manual_seed(config.seed)  # reset: new weights may have drawn from it
        print0(
            f"model      {config.model} ({self.model_config.model_type}), {self.critic.story}\n"
            f"layout     ranks {WORLD_SIZE} = tp {config.tensor_model_parallel_size} x"
            f" cp {config.context_parallel_size} x dp {self.layout.dp_size} x"
            f" pp {config.pipeline_model_parallel_size}; CPU threads {torch.get_num_threads()} per rank\n"
            f"precision  {self.layout.dtype} products on {self.device.type}; the rest is float32"
        )

    def set_budget(self, longest, row, halvings=None):
        """Sets the tokens per micro-batch; updates do not depend on it. UserError: a row does not
        fit.
        longest: tokens of the longest row to expect; row: words that name it. halvings: see
        Checkpoints."""
        self.check_ready()
        if halvings is not None:
            self.halvings = halvings
        config = self.config
        flag = f"{config.prefix}ppo-max-token-len-per-gpu"
        budget = config.ppo_max_token_len_per_gpu
        share = config.context_parallel_size
        least = check_budget(config, longest, row)
        if isinstance(budget, str):  # auto, or auto:GIB
            state = 0
            # float32; replicas split masters and moments
            for name, p in named_weights(self.critic.modules):
                _, replicas = groups_of(name)
                state += p.nbytes + p.requires_grad * p.numel() * (4 + 12 / replicas.size())
            budget = common.measure_budget(self.try_out, budget, longest, share, state)
            if budget < least:
                raise UserError(f"{flag} auto: {row} of {longest} tokens does not fit")

        # a row that is longer than announced comes here again, and must not undo this
        if self.halvings:
            budget = max(budget >> self.halvings, least)
            print0(f"memory     ran out before, so {flag} is lowered to {budget}")
        self.critic.max_tokens = budget * share // pack_unit(config) * pack_unit(config)

    def try_out(self, batch):
        """Runs the forward and backward of a batch, without a step."""
        self.critic.model.train()
        # as many micro-batches as a stage may hold at once
        turns = self.config.pipeline_model_parallel_size * min(len(self.critic.model), 2)
        self.critic.forward_backward([self.critic.micro_batch(batch)] * turns)

    def check_ready(self):
        """RuntimeError unless the model is built and on its device."""
        if self.critic is None:
            raise RuntimeError("the critic has no model yet: call init_model() first")
        if self.offloaded:
            raise RuntimeError("the critic is offloaded: call onload() first")

    @contextmanager
    def on_device(self):
        """Brings an offloaded critic back for a while: collectives need its weights on the
        device."""
        offloaded = self.offloaded
        if offloaded:
            self.onload()
        self.check_ready()
        yield
        if offloaded:
            self.offload()

    def check_batch(self, batch, rows):
        """Raises UserError or ValueError for rows that do not fit, RuntimeError while offloaded."""
        self.check_ready()
        longest, row = max(((row.length, row.row_id) for row in rows), default=(0, -1))
        if longest > self.critic.max_tokens:
            self.set_budget(longest, f"row {row}")
        common.check_rows(batch, self.model_config)
        if any(batch.multi_modal_inputs or ()):
            raise ValueError("multi_modal_inputs: this critic reads text only")

    @torch.no_grad()
    def start_at_mean(self, batch, gamma):
        """With --value-head-init mean and before the first step, makes every value the mean return
        of all ranks' actions, clamped to the inner 98 % of a bounded head's range (a collective). A
        batch without an action changes nothing, and takes no step, so the next batch decides."""
        self.check_ready()
        critic = self.critic
        if self.config.value_head_init != "mean" or critic.optimizer_steps:
            return
        bias = batch.mean_return(gamma)
        if isnan(bias):
            return
        if critic.value_range:  # the inverse of `values`
            low, high = critic.value_range
            bias = tan(pi * (min(max((bias - low) / (high - low), 0.01), 0.99) - 0.5))
        for module in critic.modules:
            if module.post_process:
                module.output_layer.bias.fill_(bias)

    @common.dp_compute_proto()
    def compute_values(self, batch, rows):
        """Values of the caller's rows: (T,) float32, zero where response_mask is false."""
        self.check_batch(batch, rows)
        return self.critic.compute_values(batch, rows)

    @common.dp_compute_proto(needs=("values", "returns"))
    def update_critic(self, batch, rows):
        """One PPO update on the rows of all ranks, with old values and returns -> metrics, equal on
        each."""
        self.check_batch(batch, rows)
        config = self.config
        start = time.perf_counter()
        metrics = self.critic.update_critic(batch, rows)
        groups = common.by_prompt(rows, config.share_prompts and config.use_remove_padding)
        flops = self.critic.passes * sum(common.costs(groups, self.critic.flops))
        return metrics | common.describe_update(
            batch, rows, start, config.ppo_epochs, flops, self.layout
        )

    def check_values(self, batch):
        """UserError if values of the caller's first row are not finite: an update has ruined the
        weights."""
        first = batch.actions.nonzero()[:1, 0].tolist()  # that has an action
        finite = bool(self.compute_values(batch.select(first)).isfinite().all())
        if not all(of_all_ranks(finite)):
            raise UserError(
                "the critic's values are not finite after the last update, which is not saved:"
                f" take an earlier checkpoint and a lower {self.config.prefix}lr"
            )

    def offload(self):
        """Frees the device memory of weights, gradients and optimizer state, until onload.
        Meanwhile only
        checkpoints and exports work: they bring it back for a while."""
        if self.critic is None:
            raise RuntimeError("the critic has no model yet: call init_model() first")
        self.offloaded = True
        self.move("cpu")

    def onload(self):
        """Undoes offload."""
        self.offloaded = False
        self.move(self.device)

    def move(self, device):
        for chunk in self.critic.model:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                (buffer.offload_to_cpu if self.offloaded else buffer.reload_from_cpu)()
            for p in chunk.parameters():
                if not p.requires_grad:  # frozen weights are in no buffer
                    p.data = p.data.to(device)
        mpu.get_global_memory_buffer().buffer.clear()  # here sequence parallelism gathers tokens
        for optimizer in self.critic.optimizers:
            # masters of bfloat16 weights
            for p in chain(*optimizer.shard_fp32_from_float16_groups):
                p.data = p.data.to(device)
            common.move_state(optimizer.optimizer, device)

    # ---- Checkpoints and export ----------------------------------------------------------------------------

    def save_checkpoint(self, folder):
        """Writes model, optimizer, schedule, RNG and counters; the folder appears complete or not
        at all. Sharded safetensors with transformers' names, no pickle: any layout of either critic
        reads them."""
        with self.on_device(), published(folder) as tmp:
            self.checkpoint_writer()(tmp)

    def checkpoint_writer(self, copy=False):
        """Returns write(tmp, group), which saves the current state. copy: a snapshot, so training
        goes on."""
        critic = self.critic
        # gathered, so always a copy
        tensors = checkpoint_tensors(critic, self.model_config.vocab_size)
        state = {
            "updates": critic.updates,
            "optimizer_steps": critic.optimizer_steps,
            "shape": self.shape(),
        }

        def write(tmp, group=None):
            offsets = {
                name: {"saved_offsets": [row, 0, 0][: x.ndim]} for name, (row, x) in tensors.items()
            }
            if tensors:
                mine = {name: x for name, (_, x) in tensors.items()}
                # tells torch.distributed.checkpoint which rows of a tensor this file has
                metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
                save_file(mine, f"{tmp}/shard-{RANK:05d}.safetensors", metadata=metadata)
            common.write_json(f"{tmp}/trainer.json", state)

        return write

    def load_checkpoint(self, folder):
        """Restores a checkpoint of either critic, on any layout. UserError: damaged, or of another
        model."""
        self.check_ready()
        critic = self.critic
        saved = open_checkpoint(folder, self.shape())
        tensors = StoredTensors(folder, flag="--resume")
        for kind, form in STATE.items():
            critic.restore(tensors, f"--resume {folder}", kind, form)
        # one tensor each, because AdamW adds 1 in place
        for adam, mine, _ in critic.masters.values():
            adam.state[mine]["step"] = torch.tensor(
                float(saved["optimizer_steps"]), device=mine.device
            )
        torch.set_rng_state(tensors["rng"])
        critic.updates = saved["updates"]
        critic.optimizer_steps = saved["optimizer_steps"]

    def shape(self):
        """What a checkpoint and the run that resumes it must have in common."""
        return common.shape_of(self.model_config, {"freeze_modules": self.config.freeze_modules})

    def export_hf(self, folder):
        """Writes the value model as a Hugging Face folder that AutoModelForTokenClassification
        loads: num_labels is 1, or the number of bins for hl_gauss; config.json holds the
        value_range, if any. Every rank writes its share of the weights in a file of its own."""
        with self.on_device():
            state = whole_weights(
                self.critic.modules, self.model_config.vocab_size, self.critic.master
            )
        if self.model_config.model_type == "mixtral":
            state = {mixtral_name(name): x for name, x in state.items()}
        file = f"model-{RANK:05d}.safetensors"
        files = ChainMap(*of_all_ranks(dict.fromkeys(state, file)))
        index = {"metadata": {}, "weight_map": dict(files)}
        kind = transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(self.model_config)]
        self.model_config.architectures = [kind.__name__]
        with published(folder) as tmp:
            if state:
                save_file(state, f"{tmp}/{file}", metadata={"format": "pt"})
            common.write_json(f"{tmp}/model.safetensors.index.json", index)
            if RANK == 0:
                for part in filter(None, (self.model_config, self.tokenizer)):
                    part.save_pretrained(tmp)


STATE = {  # what a step changes -> its name in a checkpoint, where {} is the name of the weight
    "weight": "model.{}",
    "exp_avg": "optimizer.{}.exp_avg",
    "exp_avg_sq": "optimizer.{}.exp_avg_sq",
}


def checkpoint_tensors(critic, vocab_size):
    """name -> (first row, tensor on the host): what this rank writes of the state (a collective):
    weights, moments and AdamW's step counts, under the names of critic_fsdp.py."""
    out = {"rng": (0, torch.get_rng_state())} if RANK == 0 else {}
    for kind, form in STATE.items():
        local = partial(critic.master, kind=kind)
        weights = join_experts(whole_weights(critic.modules, vocab_size, local))
        out |= {form.format(name): rows for name, rows in weights.items()}
    for name, (first, _) in weights.items():  # of the last kind, which only trained weights have
        if first == 0:
            out[f"optimizer.{name}.step"] = 0, torch.tensor(float(critic.optimizer_steps))
    return out


def open_checkpoint(folder, shape):
    """Returns trainer.json of a checkpoint whose model has this `shape` (common.shape_of). A
    collective;
    UserError on all ranks: damaged, or of another model."""
    common.verify(folder)
    with blame(f"--resume {folder}: not a checkpoint of this script"):
        saved = json.loads(Path(folder, "trainer.json").read_text())
        there = saved["shape"]
    words = [
        f"{key} {there.get(key)} there, {shape.get(key)} here"
        for key in sorted(there | shape)
        if there.get(key) != shape.get(key)
    ]
    if words:
        raise UserError(f"--resume {folder}: is of another model: {'; '.join(words):.500}")
    print0(f"resume     {folder}, update {saved['updates']}")
    return saved


class Checkpoints:
    """The checkpoints of a run, as a context manager around it. folder: the one to continue from,
    if any.
    halvings: how often the run has run out of memory; --resume auto halves the token budgets for
    each."""

    def __init__(self, run):
        self.run = run
        self.background = ThreadPoolExecutor(1) if run.async_save else None
        self.saving = None  # the Future of a save in the background
        self.every = run.eval_every if run.save_every is None else run.save_every  # steps, or 0
        self.newest = None  # the folder of this run's last checkpoint
        timeout = timedelta(minutes=run.critic.timeout_minutes)
        # a thread needs a group of its own
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.lock = common.claim(run.out_dir)  # the run holds it until it ends, even by a kill
        self.out_of_memory = Path(run.out_dir, "out_of_memory")  # holds how often
        self.halvings = 0
        self.folder = run.resume and realpath(run.resume)
        if run.resume == "auto":
            self.find_newest()
        elif RANK == 0:
            # a run that starts anew may have other flags
            self.out_of_memory.unlink(missing_ok=True)

    def find_newest(self):
        """Sets `folder` to the newest undamaged checkpoint of out_dir, and `halvings` (a
        collective)."""
        halvings = 0
        with suppress(OSError, ValueError):
            halvings = max(0, int(self.out_of_memory.read_text()))
        steps = common.steps_in(f"{self.run.out_dir}/checkpoints")

        # network file systems may show ranks different files: what rank 0 sees counts
        found, self.halvings = of_all_ranks((steps, halvings))[0]
        self.folder = None
        for _, path in found:
            try:
                common.verify(path)
                self.folder = realpath(path)
                return
            except UserError as error:
                print0(f"resume     auto passes over {str(error).removeprefix('--resume ')}")
        print0(
            f"resume     auto: no checkpoint to continue from in {self.run.out_dir}; starting anew"
        )

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """Records that memory ran out; after an error, waits up to a minute for a save in the
        background."""
        common.listen_no_more()
        with suppress(Exception):
            if re.search(common.OUT_OF_MEMORY, repr(error)) and not isinstance(error, UserError):
                self.out_of_memory.write_text(f"{self.halvings + 1}")
        with suppress(Exception):
            self.saving.result(timeout=60)
        if self.lock:
            self.lock.close()

    def begin(self):
        """Prints what the loop will save, and lets Ctrl-C and SIGTERM end it after a step."""
        run = self.run
        keep = run.keep
        when = f"every {self.every} steps"
        if run.save_every is None:
            keep = run.keep or 1
            when = "at each evaluation"
        if not self.every:
            when = "at the end"
        elif keep:
            when += ", the newest is kept" if keep == 1 else f", the last {keep} are kept"
        print0(f"saving     {run.out_dir}/checkpoints {when}; Ctrl-C saves, too")
        common.listen()

    def save(self, step, write):
        """Saves a step with write(tmp, group), after earlier saves; keeps the last `keep` (a
        collective)."""
        run = self.run

        def save():
            folder = f"{run.out_dir}/checkpoints/step_{step}"
            with record_function("save"), published(folder, self.group, run.keep) as tmp:
                write(tmp, self.group)

            # what the user has asked for, in this run or an earlier one, stays
            if self.newest and run.save_every is None and run.keep is None and RANK == 0:
                common.remove(self.newest)
            self.newest = folder

        self.wait()
        if self.background:
            self.saving = self.background.submit(save)
        else:
            save()

    def wait(self, block=True):
        """Waits for a save in the background (block=False: only checks it) and raises its error."""
        if self.saving and (block or self.saving.done()):
            self.saving.result()

    def leave(self, step, number):
        """Ends the run after the signal of this number, with the exit status of a process that it
        killed."""
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        print0(
            f"{name:10s} stopped after step {step} of {self.run.out_dir}; continue with --resume auto"
        )
        raise SystemExit(128 + number)


# ---- Main: value pretraining from rollouts -------------------------------------------------------


def main(run):
    config = run.critic
    worker = CriticWorker(replace(config, value_head_init="checkpoint") if run.score else config)
    train, held_out = load_rows(run, worker)

    # the longest row must fit into a micro-batch
    longest, line = max(train.longest, held_out.longest)
    check_budget(config, longest, f"line {line + 1} of the training or held-out rows")

    # each update takes equally many rows, and as many optimizer steps
    most = run.train_batch_size or config.ppo_mini_batch_size
    size = ceil(len(train) / ceil(len(train) / most))  # rows per update: rows_of_step cuts evenly
    total = run.steps * config.ppo_epochs * ceil(size / config.ppo_mini_batch_size)
    source = run.score or run.rollouts or "the toy"

    with Checkpoints(run) as checkpoints:
        worker.init_model(total, common.describe_rows(train, run.gamma, source))
        if checkpoints.folder:
            worker.load_checkpoint(checkpoints.folder)
        worker.set_budget(longest, "the longest row", checkpoints.halvings)

        if run.score:
            train.values = compute_together(worker, train)
            common.write_scores(run.score, run.out_dir, train, worker.tokenizer, run.gamma)
            return

        print0(
            f"steps      {run.steps} updates x {size} rows,"
            f" mini-batches of {min(size, config.ppo_mini_batch_size)} rows,"
            f" {total} optimizer steps, lr {worker.critic.peak_lr:g}"
        )
        shown, about = learn(run, worker, train, held_out, size, checkpoints)
        worker.export_hf(f"{run.out_dir}/hf")
        common.write_report(run.out_dir, shown, about, worker.tokenizer, run.gamma)
        print0(
            f"saved      {run.out_dir}: checkpoints/step_{run.steps}, hf, report.html,"
            " metrics.jsonl, tensorboard"
        )


def load_rows(run, worker):
    """(rows to train on or to score, rows to evaluate on, maybe none), from files or the toy
    task."""
    read = partial(
        common.read_rows, tokenizer=worker.tokenizer, model_config=worker.model_config,
        hint_key=run.privileged_key,
        keys={"prompt": run.prompt_key, "response": run.response_key, "reward": run.reward_key},
        chat=common.json_object("--chat-template-kwargs", run.chat_template_kwargs)
    )  # fmt: skip
    seed = run.critic.seed
    if run.score:
        train = read(run.score, flag="--score")
        return train, train
    train = read(run.rollouts or common.toy_rows(4096, seed))
    held_out = run.eval_rollouts if run.rollouts else common.toy_rows(512, seed, held_out=True)
    if not held_out:
        return train, train.select([])
    return train, read(held_out, flag="--eval-rollouts")


def compute_together(worker, batch):
    """(T,) values of a batch that every rank has read whole, on every rank; each computes a part of
    it."""
    parts = [range(rank, len(batch), WORLD_SIZE) for rank in range(WORLD_SIZE)]
    values = of_all_ranks(worker.compute_values(batch.select(parts[RANK])))
    values_T = torch.zeros(len(batch.input_ids))
    for part, x_T in zip(parts, values):
        values_T[batch.token_index(part)] = x_T
    return values_T


def learn(run, worker, train, held_out, size, checkpoints):
    """Trains from the checkpoint's step on, evaluates and saves -> (rows with values to report,
    words)."""
    first_step = worker.critic.updates
    if first_step > run.steps:
        raise UserError(
            f"--steps {run.steps}: {checkpoints.folder} has made {first_step} already; give more"
        )
    logger = common.Logger(run.out_dir, asdict(run), first_step, checkpoints.folder)
    picked = []
    batch = None  # this rank's rows of the last update
    groups = train.groups()
    checkpoints.begin()
    for step in logger.profiled(range(first_step, run.steps + 1), run.profile_step):
        told = max(of_all_ranks(common.Stop.signal))  # a signal's number, or 0
        ends = step == run.steps or told > 0
        evaluates = step == run.steps or step % (run.eval_every or run.steps) == 0
        if len(held_out) and evaluates:
            held_out.values = compute_together(worker, held_out)
            logger.log_evaluation(step, held_out, run.gamma)
        if step > first_step and (ends or checkpoints.every and step % checkpoints.every == 0):
            worker.check_values(batch)
            checkpoints.save(step, worker.checkpoint_writer(copy=run.async_save))
        checkpoints.wait(block=ends)
        if ends:
            break
        picked = common.rows_of_step(step, groups, size, run.critic.seed)
        batch = train.select(picked[RANK::WORLD_SIZE])
        worker.start_at_mean(batch, run.gamma)
        batch.values = worker.compute_values(batch)
        common.add_returns(batch, run.gamma, run.lam, run.bootstrap_truncated)
        metrics = worker.update_critic(batch)
        logger.check_progress(metrics)
        logger.log_update(step + 1, run.steps, metrics)
    if step < run.steps:
        checkpoints.leave(step, told)
    common.listen_no_more()
    if len(held_out):
        return held_out, "held-out rows"
    rows = train.select(picked)
    rows.values = compute_together(worker, rows)
    return rows, "rows of the last update"


if __name__ == "__main__":
    common.launch(lambda: main(RUN))
