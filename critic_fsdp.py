"""A PPO critic for language models on PyTorch FSDP: one value model, one update, any layout.

    python critic_fsdp.py                        toy task, a tiny model, a laptop CPU: half a minute
    torchrun --nproc-per-node 2 critic_fsdp.py   the same on two ranks: the same numbers
    torchrun --nproc-per-node 8 critic_fsdp.py --model Qwen/Qwen2.5-7B --rollouts train.jsonl \\
        --eval-rollouts eval.jsonl --gradient-checkpointing --lr-warmup-steps 20 --out-dir out/7b

It learns V(s) from rollouts with rewards: value pretraining for PPO (VC-PPO, 2503.01491), or a
token-level verifier. A PPO loop drives the same CriticWorker. Copy this file and common.py, and
change them. critic_megatron.py computes the same function on Megatron-Core.

Shapes are in the names: T tokens, end to end; B sequences; L longest; S slots; D features.
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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from heapq import heapreplace
from itertools import chain, groupby
from math import ceil, cos, gcd, inf, isfinite, isnan, nan, pi, tan
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
    lora_rank: Count = 0  # train only the value head and LoRA adapters of this rank (0: no LoRA)
    lora_alpha: Rate = 16.0  # LoRA adapters are scaled by alpha / rank
    seed: Seed = 0  # random seed of new weights, the value head, every shuffle and the toy's rows

    # ---- layout

    # how to shard weights (none: a full copy per rank)
    strategy: Literal["fsdp2", "fsdp1", "none"] = "fsdp2"
    # ranks that shard one copy of the weights; the others hold replicas (-1: all ranks)
    fsdp_size: int = -1
    ulysses_size: Positive = 1  # ranks that split each sequence, and attention by heads
    # keep weights, gradients and optimizer state on the host (not with fsdp1)
    offload_policy: bool = False
    # stop if a collective takes longer
    timeout_minutes: Annotated[float, Field(ge=0.01, le=1e6)] = 30.0

    # ---- precision and kernels

    # recompute activations in the backward pass: less memory, more time
    gradient_checkpointing: bool = False
    # keep activations on the host; without checkpointing, weights as well
    activation_offload: bool = False
    # dtype of matrix products (auto: float32 on CPU, else bfloat16)
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    use_remove_padding: bool = True  # pack sequences end to end; otherwise pad each to the longest
    share_prompts: bool = True  # when packing, compute a prompt once for all its rows; same update
    # reduce gradients once per mini-batch: less traffic, unsharded gradients
    defer_grad_sync: bool = False

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
    out_dir: Text = "out/critic_fsdp"
    # checkpoint folder to continue from (auto: the last complete one in out_dir)
    resume: Text | None = None
    # updates between checkpoints (None: at each evaluation, in place of the one before; 0: only at
    # the end)
    save_every: Count | None = None
    # how many of the last checkpoints to keep (None: all, but see --save-every)
    keep: Positive | None = None
    async_save: bool = False  # write checkpoints in the background, from a copy in host memory
    # print the memory of each of N ranks, host included, without activations
    plan: Positive | None = None
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
        return mistake_in_run(flags) or mistake_in(flags.critic, flags.plan or world_size)

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
    sp = c.ulysses_size
    if world_size % sp:
        return f"{to}ulysses-size {sp}: must divide the {world_size} ranks"
    if sp > 1 and not c.use_remove_padding:
        return f"{to}ulysses-size: needs packed rows; drop {to}no-use-remove-padding"
    shards = c.fsdp_size
    if shards == -1:
        shards = world_size
    if shards < 1 or world_size % shards:
        return f"{to}fsdp-size {c.fsdp_size}: must divide the {world_size} ranks, or be -1"
    if c.strategy == "fsdp1":
        if shards == 1 < world_size:  # FSDP1 would not average over them
            return f"{to}fsdp-size 1: fsdp1 cannot keep whole replicas; use {to}strategy none"
        if c.offload_policy or c.defer_grad_sync:
            return f"{to}offload-policy, {to}defer-grad-sync: fsdp1 has neither; use fsdp2"
    return None


def mistake_in_run(run):
    """What is wrong with the flags of a Run that are not the critic's, or None."""
    if run.eval_rollouts and not run.rollouts:
        return "--eval-rollouts: needs --rollouts; the toy has its own rows"

    # scores and plans neither export anything nor set anything aside
    theirs = realpath(run.critic.model)
    ours = [realpath(f"{run.out_dir}/{name}") for name in ("hf", "checkpoints")]
    writes = not (run.score or run.plan)
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
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch.distributed import _functional_collectives as collectives
from torch.distributed import fsdp
from torch.distributed.checkpoint import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    state_dict,
)
from torch.profiler import record_function
from transformers import AutoModel, Qwen2VLImageProcessorPil
from transformers.image_utils import load_image
from transformers.pytorch_utils import Conv1D

import common
from common import Batch, CurrentPack, Pack, UserError, blame, of_all_ranks, print0, published

transformers.logging.set_verbosity_error()  # the run prints one line about the weights
transformers.logging.disable_progress_bar()
# harmless: views that are only read; FSDP1 on one rank; peft adapting to GPT-2; a rank that reads
# alone
warnings.filterwarnings(
    "ignore",
    "FSDP2-wrapped module .* returned a view|.*`NO_SHARD`|fan_in_fan_out is|torch.distributed is disabled",
)

# ---- Value model: a decoder and a value head in float32 ------------------------------------------


class ValueModel(nn.Module):
    """A backbone without its vocabulary head, and v = w . h + b on the hidden state of every token;
    with --value-head hl_gauss it gives the N logits of a distribution."""

    def __init__(self, backbone):
        super().__init__()
        self.model = backbone
        width = backbone.config.get_text_config().hidden_size
        self.score = nn.Linear(width, backbone.config.num_labels)

    def forward(self, **inputs):
        """(B, L) ids -> (B, L) float32 values, or (B, L, N) logits, each read from its own hidden
        state."""
        hidden_BLD = self.model(use_cache=False, **inputs).last_hidden_state
        with torch.autocast(hidden_BLD.device.type, enabled=False):
            return self.score(hidden_BLD.float()).squeeze(-1)


def read_weights(config, model_config):
    """A ValueModel on the host with its weights, and words on where they come from. Runs on rank 0
    only."""
    if exists(f"{config.model}/trainer.json"):
        backbone = AutoModel.from_config(model_config, dtype=torch.float32)
        weights = {f"model.model.{name}": x for name, x in backbone.state_dict().items()}
        name = f"{config.prefix}model {config.model}"
        with blame(f"{name}: its weights do not load; give a folder made by an export"):
            dcp.load(weights, storage_reader=HuggingFaceStorageReader(config.model), no_dist=True)
        story = f"weights of the checkpoint {config.model} (no optimizer state)"
    else:
        backbone, story = common.load_model(AutoModel, config, model_config, config.seed)
    model = ValueModel(backbone)
    words = common.init_value_head(model.score, config, model_config)
    add_lora(backbone, config)
    return model, f"{story}; {words}"


def build_skeleton(config, model_config):
    """A ValueModel on the meta device: everything but the weights. UserError if it cannot be
    built."""
    name = f"{config.prefix}model {config.model} ({model_config.model_type})"
    with blame(f"{name}: cannot be built{padding_advice(config)}"), torch.device("meta"):
        attention = attention_of(config, model_config)
        backbone = AutoModel.from_config(
            model_config, dtype=torch.float32, attn_implementation=attention
        )
        model = ValueModel(backbone)
        add_lora(backbone, config)
        freeze(model, config)
        if config.gradient_checkpointing:
            backbone.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
    return model


def padding_advice(config):
    """What may help a model that fails while its rows are packed; no advice if they are padded
    already."""
    if config.use_remove_padding:
        return f"; try {config.prefix}no-use-remove-padding"
    return ""


def freeze(model, config):
    """Freezes the weights in whose names --freeze-modules has a match. A checkpoint has the same
    names after a leading "model."; frozen weights get no gradient and no optimizer state."""
    pattern = config.freeze_modules
    if not pattern:
        return
    with blame(f"{config.prefix}freeze-modules {pattern}"):
        frozen = [p for name, p in model.named_parameters() if re.search(pattern, name)]
        if len(frozen) in (0, len(list(model.parameters()))):
            raise ValueError("must match some of the weights, but not all")
    for p in frozen:
        p.requires_grad_(False)


def attention_of(config, model_config):
    """The decoder's attn_implementation, or None: transformers chooses. A vision tower keeps its
    own."""
    if config.use_remove_padding:
        name = "ulysses" if config.ulysses_size > 1 else "packed"
    else:  # sdpa would ignore a soft cap
        name = (
            "eager"
            if getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
            else None
        )
    return {"": name, "text_config": name} if reads_images(model_config) else name


def count_parameters(module):
    """(all parameters, trainable parameters)."""
    count = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return count, trained


def add_lora(backbone, config):
    """With --lora-rank r, freezes the backbone and gives its linear layers adapters: W x + alpha /
    r B A x (LoRA, 2106.09685). A is random, B zero: values start unchanged. Experts stored as one
    tensor get none."""
    if config.lora_rank:
        from peft import LoraConfig, inject_adapter_in_model

        backbone = nn.ModuleList([backbone])  # peft would choose by its config
        linear = [n for n, m in backbone.named_modules() if isinstance(m, nn.Linear | Conv1D)]
        lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=linear)
        inject_adapter_in_model(lora, backbone)


def merge_lora(state, config, model_config):
    """Full state dict with adapters -> one without them of the same function: W + alpha / r B A."""
    model = build_skeleton(config, model_config).to_empty(device="cpu")
    model.load_state_dict(state)
    for module in model.modules():
        if hasattr(module, "merge"):
            module.merge()
    merged = model.state_dict()
    return {
        name.replace(".base_layer", ""): merged[name] for name in merged if ".lora_" not in name
    }


def reads_images(model_config):
    """Whether this script reads images for this model; all others read text only."""
    return model_config.model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def load_image_processor(config, model_config):
    """The Pillow processor that all these models share: equal pixels everywhere. None: reads text
    only."""
    if not reads_images(model_config):
        return None
    if config.model in common.TINY:
        return Qwen2VLImageProcessorPil(patch_size=model_config.vision_config.patch_size)
    with blame(
        f"{config.prefix}model {config.model}: reads images, but has no preprocessor_config.json"
    ):
        return Qwen2VLImageProcessorPil.from_pretrained(config.model)


def place_images(image_processor, image_token_id, rollout, folder):
    """Makes a row's image paths absolute and repeats each placeholder of a text prompt once per
    token of its image; this reads the images once. UserError: placeholders and images do not
    fit."""
    sizes = []
    if rollout.images:  # merge_size x merge_size patches are one token
        for i, name in enumerate(rollout.images):
            if not name.startswith("data:"):
                rollout.images[i] = f"{Path(folder, name).absolute()}"
        with blame(f"images {rollout.images!s:.200}"):
            grids = read_images({"images": rollout.images}, image_processor)["image_grid_thw"]
        sizes = (grids.prod(1) // image_processor.merge_size**2).tolist()
    if rollout.prompt or rollout.messages:
        count = iter(sizes)
        ids = []
        for i in rollout.prompt_ids:
            ids += [i] * (next(count, 1) if i == image_token_id else 1)
        rollout.prompt_ids = ids
    ids = rollout.prompt_ids + rollout.response_ids
    runs = [len(list(run)) for is_image, run in groupby(ids, image_token_id.__eq__) if is_image]
    if runs != sizes:
        raise UserError(
            f"placeholders come in runs of {runs or 0} tokens, but its images have {sizes or 0}"
        )


def read_images(row, image_processor):
    """One row's multi_modal_inputs -> {"pixel_values": (patches, features), "image_grid_thw":
    (images, 3)}. A JSONL row has {"images": [absolute file name or data URL]}; each forward reads
    them, to save memory."""
    if "images" not in row:
        return row
    return dict(image_processor(images=[load_image(x) for x in row["images"]], return_tensors="pt"))


def with_images(backbone, micro, image_processor):
    """((4, T) positions in text, time, height and width; pixels or {}) of rows with their
    images."""
    places = []
    images = [
        read_images(row, image_processor) for row in micro.multi_modal_inputs or [{}] * len(micro)
    ]
    for ids, row in zip(micro.input_ids.split(micro.lengths), images):
        is_image = (ids == backbone.config.image_token_id).int()[None]
        thw, _ = backbone.get_rope_index(
            ids[None], is_image, image_grid_thw=row.get("image_grid_thw")
        )
        places.append(torch.cat([torch.arange(len(ids))[None], thw[:, 0]]))
    keys = ("pixel_values", "image_grid_thw") if any(images) else ()
    return torch.cat(places, 1), {
        key: torch.cat([row[key] for row in images if row]) for key in keys
    }


# ---- Parallelism: which ranks share what, and the model spread over them -------------------------


class Layout(NamedTuple):
    """Ranks form a dp x sp grid (rank = dp_rank * sp_size + sp_rank): sp neighbours share each
    sequence, and dp groups split the rows. FSDP shards over all of them, or --fsdp-size."""

    device: torch.device
    # of matrix products; master weights, gradients, optimizer and value head are float32
    dtype: torch.dtype
    dp_rank: int
    dp_size: int
    sp_rank: int
    sp_size: int
    sp_group: dist.ProcessGroup | None
    dp_ranks: list  # the dp_rank of each rank
    gives_values: list  # for each rank, whether it gives values back: one of those that share a row
    fsdp_mesh: dist.DeviceMesh  # (world,), or (replicas, fsdp_size) for hybrid sharding


def shards_of(config, ranks):
    """How many of the ranks shard one copy of the weights."""
    if config.strategy == "none":  # a copy on each rank is FSDP with one shard
        return 1
    return ranks if config.fsdp_size == -1 else config.fsdp_size


@lru_cache
def make_groups(device_type, shards, sp, timeout_minutes):
    """(mesh of replicas x shards, the ranks that share this rank's rows or None). A layout's groups
    are built
    once: their threads and sockets stay until the process ends."""
    names = ("replicate", "shard")
    mesh = dist.init_device_mesh(device_type, (WORLD_SIZE // shards, shards), mesh_dim_names=names)
    timeout = timedelta(minutes=timeout_minutes)
    for group in mesh.get_all_groups():  # otherwise they have torch's default
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    sp_group = dist.new_subgroups(sp, timeout=timeout)[0] if sp > 1 else None
    return mesh, sp_group


def make_layout(config, device):
    """Which ranks share what."""
    sp = config.ulysses_size
    shards = shards_of(config, WORLD_SIZE)
    mesh, sp_group = make_groups(device.type, shards, sp, config.timeout_minutes)
    return Layout(
        device=device,
        dtype=common.compute_dtype(config.param_dtype, device),
        dp_rank=RANK // sp,
        dp_size=WORLD_SIZE // sp,
        sp_rank=RANK % sp,
        sp_size=sp,
        sp_group=sp_group,
        dp_ranks=[rank // sp for rank in range(WORLD_SIZE)],
        gives_values=[rank % sp == 0 for rank in range(WORLD_SIZE)],
        fsdp_mesh=mesh["shard"] if shards == WORLD_SIZE else mesh,
    )


def build_value_model(config, model_config, layout):
    """(the sharded ValueModel, FLOPs of its forward, cost of an update in forwards, words on its
    size and on where its weights come from). Every rank builds the model on meta; only rank 0 reads
    the weights, and it sends each rank its shards."""
    model = build_skeleton(config, model_config)
    source, story = read_weights(config, model_config) if RANK == 0 else (None, "")
    flops = common.flops_model(model, model_config)
    count, trained = count_parameters(model)
    model = (shard_fsdp1 if config.strategy == "fsdp1" else shard_fsdp2)(model, config, layout)
    common.send_weights(model, source)
    for buffer in model.buffers():  # --offload-policy does not move buffers
        buffer.data = buffer.to(layout.device)
    share = trained / count
    story = f"{count:,} parameters, {trained:,} of them ({share:.2%}) train: {story}"
    return model, flops, 2 + share, story  # forward, input gradients, weight gradients


def units_of(model):
    """The blocks to shard one by one. A vision tower stays in the root, because not every rank runs
    it."""
    return common.transformer_blocks(model.model.get_decoder())


def shard_fsdp2(model, config, layout):
    offload = fsdp.OffloadPolicy()
    if config.offload_policy:
        offload = fsdp.CPUOffloadPolicy(pin_memory=layout.device.type == "cuda")
    for module in (*units_of(model), model.score, model):
        dtype = torch.float32 if module is model.score else layout.dtype
        policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fsdp.fully_shard(module, mesh=layout.fsdp_mesh, mp_policy=policy, offload_policy=offload)
    model.set_reduce_scatter_unused_params(True)  # an expert may get its tokens on other ranks only
    return model.to_empty(device="cpu" if config.offload_policy else layout.device)


def shard_fsdp1(model, config, layout):
    mesh = layout.fsdp_mesh
    policy = partial(fsdp.MixedPrecision, reduce_dtype=torch.float32)
    units = dict.fromkeys(units_of(model), True)
    units[model.score] = {"mixed_precision": policy(param_dtype=torch.float32)}
    for name, module in model.named_modules():
        # all weights of an FSDP1 unit train or none, so adapters and frozen embeddings get units of
        # their own
        adapter = ".lora_" in name and isinstance(module, nn.Linear)
        if "visual" not in name and (
            adapter or config.freeze_modules and isinstance(module, nn.Embedding)
        ):
            units[module] = {
                "mixed_precision": policy(param_dtype=layout.dtype, cast_forward_inputs=True)
            }
    return fsdp.FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        device_id=layout.device,  # FSDP1 runs on CPU only if this is a torch.device
        sharding_strategy=fsdp.ShardingStrategy["HYBRID_SHARD" if mesh.ndim == 2 else "FULL_SHARD"],
        auto_wrap_policy=fsdp.wrap.CustomPolicy(lambda module: units.get(module, False)),
        mixed_precision=policy(param_dtype=layout.dtype, buffer_dtype=torch.float32),
        use_orig_params=True,
        param_init_fn=lambda m: m.to_empty(device=layout.device, recurse=False),
    )


def ulysses_attention(module, query, key, value, attention_mask, s_aux=None, **options):
    """common.packed_attention for ranks that share the row (DeepSpeed-Ulysses, 2309.14509). Each
    rank enters with its slice of the row and all heads, computes the whole row for its slice of the
    heads, and returns
    its slice of the row: q (1, H, T/p, D) -> (1, T/p, H, D). Model code does not change."""
    group = CurrentPack.group
    p = dist.get_world_size(group)
    repeat = p // gcd(key.shape[1], p)  # fewer key heads than ranks: several ranks get the same
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    # give heads, get tokens
    traded = [trade(x.to(value.dtype), group, 1, 2) for x in (query, key, value)]
    if s_aux is not None:  # attention sinks, one per head (gpt-oss)
        s_aux = s_aux.chunk(p)[dist.get_rank(group)]
    out_1THD, _ = common.packed_attention(module, *traded, attention_mask, s_aux=s_aux, **options)
    return trade(out_1THD, group, 1, 2), None  # give tokens, get heads


transformers.AttentionInterface.register("ulysses", ulysses_attention)


def trade(x, group, scatter, gather):
    """All-to-all: splits x along one axis over ranks, joins the pieces along another; backward
    undoes it."""
    p = dist.get_world_size(group)
    pieces = torch.cat(x.chunk(p, scatter))
    out = collectives.wait_tensor(collectives.all_to_all_single_autograd(pieces, None, None, group))
    return torch.cat(out.chunk(p), gather)


def gather_slices(x, group):
    """(T/p, ...) slices of a group's ranks -> (T, ...) on each; backward adds up the ranks'
    gradients."""
    return collectives.wait_tensor(collectives.all_gather_single_autograd(x.contiguous(), 0, group))


def slice_row(decoder, args, kwargs):
    """A forward pre-hook: each rank of a sequence-parallel group continues with its slice of the
    packed row. It runs at the decoder's input, after a vision tower, which every rank of the group
    runs on all images."""
    group = CurrentPack.group
    if not group:
        return None
    p = dist.get_world_size(group)
    rank = dist.get_rank(group)
    sliced = {"position_ids": kwargs["position_ids"].chunk(p, -1)[rank]}
    for key in ("input_ids", "inputs_embeds", "visual_pos_masks"):
        if kwargs.get(key) is not None:
            sliced[key] = kwargs[key].chunk(p, 1)[rank]
    if "visual_pos_masks" in sliced:  # Qwen3-VL's deepstack: one row of features per image token
        counts = [int(mask.sum()) for mask in kwargs["visual_pos_masks"].chunk(p, 1)]
        sliced["deepstack_visual_embeds"] = [
            x.split(counts)[rank] for x in kwargs["deepstack_visual_embeds"]
        ]
    return args, kwargs | sliced


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


def check_model_flags(config, model_config):
    """UserError for flags that do not fit this model, or for a model that cannot be built."""
    with blame(f"{config.prefix}model {config.model}: has no attention"):
        heads = model_config.get_text_config().num_attention_heads
    if heads % config.ulysses_size:
        raise UserError(
            f"{config.prefix}ulysses-size {config.ulysses_size}: must divide {heads} attention heads"
        )
    width = model_config.get_text_config().hidden_size
    if config.lora_rank > width:
        raise UserError(
            f"{config.prefix}lora-rank {config.lora_rank}: must be at most {width}, the model's hidden_size"
        )
    build_skeleton(config, model_config)


def check_budget(config, longest, row):
    """The smallest budget for the longest row; UserError if given less. row: words that name it."""
    least = ceil(longest / config.ulysses_size)
    given = config.ppo_max_token_len_per_gpu
    if isinstance(given, int) and given < least:
        raise UserError(
            f"{config.prefix}ppo-max-token-len-per-gpu {given}: {row} has {longest} tokens; give {least}"
        )
    return least


# ---- The critic: forward, loss, step -------------------------------------------------------------


def build_optimizer(model, config, lr):
    """The optimizer of the weights that train, which are sharded. Its state is saved, whatever it
    holds."""
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        weights, lr, config.betas, weight_decay=config.weight_decay, fused=True
    )


class DataParallelPPOCritic:
    """Values and updates of a value model. compute_values and update_critic take the rows that this
    rank has, and the Rows of all ranks; each rank fetches the rows that it computes."""

    # called between micro-batches of compute_values; it may raise
    between = staticmethod(lambda: None)

    def __init__(self, config, model_config, layout, total_steps):
        self.config = config
        self.layout = layout
        self.value_range = model_config.value_range  # None: the head's outputs are the values
        # None: the model reads text only
        self.image_processor = load_image_processor(config, model_config)
        self.total_steps = total_steps  # optimizer steps of the whole run, for cosine
        self.model, self.flops, self.passes, self.story = build_value_model(
            config, model_config, layout
        )
        self.model.model.get_decoder().register_forward_pre_hook(slice_row, with_kwargs=True)
        # every rank runs layer 0's backward, even above a frozen embedding
        if self.image_processor:
            self.model.model.get_input_embeddings().register_forward_hook(
                lambda *x: x[2].requires_grad_()
            )
        self.peak_lr = config.lr or (1e-3 if config.model in common.TINY else 1e-5)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.model, config, self.peak_lr)
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
        return micro_batches(
            rows, self.layout.dp_size, self.max_tokens, c.share_prompts, not c.use_remove_padding
        )

    def fetch(self, batch, table):
        """The rows that this rank computes, in the order of its micro-batches (a collective)."""
        wanted = [list(chain(*table[dp_rank])) for dp_rank in self.layout.dp_ranks]
        return common.fetch(batch, wanted)

    def cut(self, local, table):
        """The fetched rows in micro-batches; some may have no row."""
        return local.split(list(map(len, table[self.layout.dp_rank])))

    def micro_batch(self, micro):
        """These rows on the device. Without rows: one masked token, to keep in step with other
        ranks."""
        micro = replace(micro if len(micro) else Batch.blank())
        micro.packed = self.lay_out(micro)
        for name in ("response_mask", *micro.FLOATS):  # the rest stays on the host
            if (x := getattr(micro, name)) is not None:
                setattr(micro, name, x.to(self.layout.device, non_blocking=True))
        return micro

    def lay_out(self, micro):
        """(the model's inputs, where to find its outputs for the T tokens, Pack) of a
        micro-batch."""
        device = self.layout.device
        total = len(micro.input_ids)
        inputs = {}
        places_T = micro.positions
        if self.image_processor:
            places_T, inputs = with_images(self.model.model, micro, self.image_processor)
        slots, index_T, layout = pack_rows(
            micro, device, self.config.share_prompts, self.layout.sp_size
        )
        slots = slots[None]
        if not self.config.use_remove_padding:
            slots = nn.utils.rnn.pad_sequence(torch.arange(total).split(micro.lengths), True, total)
            inputs["attention_mask"] = slots < total
            index_T = (slots.flatten() < total).nonzero()[:, 0].to(device, non_blocking=True)
        inputs["input_ids"] = F.pad(micro.input_ids, (0, 1))[slots]
        inputs["position_ids"] = F.pad(places_T, (0, 1))[..., slots]
        return (
            {name: x.to(device, non_blocking=True) for name, x in inputs.items()},
            index_T,
            layout,
        )

    def forward(self, micro):
        """The head's output for each action of a micro-batch: (T,) float32 values, or (T, N)
        logits.

        The value of an action is read *before* it, so the head's outputs move one place to the
        right:

            v_T              v0   v1   v2   v3   v4   v5      from the hidden state after each token
            response_mask    0    0    1    1    0    1
            result           .    .    v1   v2   .    v4      . is never read

        The first token of a sequence is never an action, so nothing crosses into the next
        sequence."""
        inputs, index_T, pack = micro.packed
        group = self.layout.sp_group
        CurrentPack.set(pack, group)
        v_S = self.model(**inputs).flatten(0, 1)  # the hook slice_row cuts a row that ranks share
        if group:
            v_S = gather_slices(v_S, group)
        return v_S[index_T].roll(1, 0)

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
        values = []
        for piece in common.progress(self.cut(local, table), "values", "micro-batches"):
            self.between()
            micro = self.micro_batch(piece)
            v_T = self.values(self.forward(micro), micro.response_mask)
            values.append(v_T[: len(piece.input_ids)])  # nothing of a masked token
        self.free_gathered()
        values_T = self.give_back(torch.cat(values).cpu(), local, table, batch)
        self.between()  # last chance to raise: an update may follow, which is not interrupted
        return values_T

    def give_back(self, values_T, local, table, batch):
        """Values of the fetched rows -> values of the rows that this rank has."""
        ranks = zip(self.layout.dp_ranks, self.layout.gives_values)
        wanted = [list(chain(*table[dp_rank])) if gives else [] for dp_rank, gives in ranks]
        return common.give_back(values_T, local, wanted, batch)

    def free_gathered(self):
        """Frees the gathered weights that FSDP keeps after a forward, for a backward that may not
        come."""
        for module in self.model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
        if self.config.strategy == "fsdp1":
            for handle in self.model._all_handles:
                # on a single rank it only resets views
                handle.reshard(handle.uses_sharded_strategy)

    def update_critic(self, batch, rows):
        """PPO epochs over mini-batches, one optimizer step each -> metrics. batch: the rows that
        this rank has; rows: the Rows of all ranks, which are cut into mini-batches; mini_batch
        fetches ours."""
        config = self.config
        self.model.train()
        self.optimizer.zero_grad()  # an earlier update may have failed halfway
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
                sums = Counter()
                with record_function("mini-batch"):
                    for i, piece in enumerate(pieces, 1):
                        micro = self.micro_batch(piece)
                        sums.update(self.forward_backward(micro, last=i == len(pieces)))
                        done(len(mini) / len(pieces))
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

    @record_function("micro-batch")
    def forward_backward(self, micro, last=True):
        """Accumulates the gradient of a micro-batch -> its sums, as `loss` returns them.
        last: whether it is the last one of its mini-batch.
        The loss is a sum over all ranks, but FSDP averages gradients: multiply by dp x sp. All sp
        ranks of a
        row compute its loss, and gather_slices adds up their gradients: divide by sp."""
        if self.config.defer_grad_sync:
            self.model.set_requires_gradient_sync(last)
        pinned = self.layout.device.type == "cuda"
        saves = (
            torch.autograd.graph.save_on_cpu(pinned)
            if self.config.activation_offload
            else nullcontext()
        )
        with saves:
            loss, sums = self.loss(self.forward(micro), micro)
            (loss * self.layout.dp_size).backward()
        # FSDP1 forgets units without a gradient
        if self.config.strategy == "fsdp1" and WORLD_SIZE == 1:
            self.free_gathered()
        return sums if self.layout.sp_rank == 0 else {}  # ranks that share a row have equal ones

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
        if config.strategy == "fsdp1":
            norm = float(self.model.clip_grad_norm_(config.grad_clip))
        else:
            norm = float(nn.utils.clip_grad_norm_(self.parameters, config.grad_clip).full_tensor())
        if isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step()
            self.optimizer_steps += 1
        self.optimizer.zero_grad()
        return norm


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
        self.critic = DataParallelPPOCritic(config, self.model_config, self.layout, total_steps)
        torch.manual_seed(config.seed)  # reset: new weights may have drawn from it
        print0(
            f"model      {config.model} ({self.model_config.model_type}), {self.critic.story}\n"
            f"layout     ranks {WORLD_SIZE} = dp {self.layout.dp_size} x sp {self.layout.sp_size};"
            f" weights in {shards_of(config, WORLD_SIZE)} shards ({config.strategy});"
            f" CPU threads {torch.get_num_threads()} per rank\n"
            f"precision  {self.layout.dtype} products on {self.device.type}; the rest is float32"
        )
        self.check_model()

    @torch.no_grad()
    def check_model(self):
        """UserError unless a row that is packed after one with the same prompt gets the same hidden
        states as
        alone, cut short, with eager attention: no token may see later tokens or other rows."""
        config = self.config
        critic = self.critic
        decoder = critic.model.model.get_decoder()
        name = f"{config.prefix}model {config.model}: {type(critic.model.model).__name__}"
        n = 8 * self.layout.sp_size
        rows = Batch.blank(2 * n).select([0, 0])
        ids_T = rows.positions + (
            torch.arange(4 * n) >= 3 * n
        )  # the first n tokens of both are equal
        rows.input_ids = ids_T % self.model_config.get_text_config().vocab_size
        rows.response_mask = rows.positions >= n
        ids_1L = rows.input_ids[None, 2 * n : 3 * n + 4].to(self.device)
        CurrentPack.kernel = None
        critic.model.eval()  # the hook makes it return hidden states
        hook = critic.model.score.register_forward_hook(lambda head, args, out: args[0].float())
        with hook, blame(f"{name} does not run{padding_advice(config)}"):
            together_TD = critic.forward(critic.micro_batch(rows))[3 * n + 1 : 3 * n + 5]
            CurrentPack.group = None
            kernel = decoder.config._attn_implementation
            decoder.set_attn_implementation("eager")
            alone_TD = critic.model(input_ids=ids_1L)[0, n:]
            decoder.set_attn_implementation(kernel)
        critic.free_gathered()
        if not (together_TD.isfinite().all() and alone_TD.isfinite().all()):
            raise UserError(
                f"{name} has hidden states that are not finite: check its weights and its config"
            )

        off = float((together_TD - alone_TD).norm() / alone_TD.norm())
        most = 1e-4 if self.layout.dtype == torch.float32 else 1e-1
        if off > most:
            raise UserError(
                f"{name} lets tokens see later ones or other rows{padding_advice(config)}"
                f" (hidden states differ by {off:.0e})"
            )
        if config.use_remove_padding and not CurrentPack.kernel:
            raise UserError(
                f"{name} has an attention of its own, which cannot be packed{padding_advice(config)}"
            )
        print0(
            f"attention  {CurrentPack.kernel or 'padded'}; packed rows differ from rows alone by {off:.0e}"
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
        share = self.layout.sp_size
        least = check_budget(config, longest, row)
        if isinstance(budget, str):  # auto, or auto:GIB
            state = 0
            # float32; with --defer-grad-sync a whole gradient too
            for p in self.critic.model.parameters():
                whole = 4 * p.numel() if config.defer_grad_sync else 0
                held = getattr(p, "_local_tensor", p).nbytes
                state += 4 * held + whole if p.requires_grad else held
            state = 0 if config.offload_policy else state
            budget = common.measure_budget(self.try_out, budget, longest, share, state)
            if budget < least:
                raise UserError(f"{flag} auto: {row} of {longest} tokens does not fit")

        # a row that is longer than announced comes here again, and must not undo this
        if self.halvings:
            budget = max(budget >> self.halvings, least)
            print0(f"memory     ran out before, so {flag} is lowered to {budget}")
        self.critic.max_tokens = budget * share

    def try_out(self, batch):
        """Runs the forward and backward of a batch, without a step."""
        self.critic.model.train()
        self.critic.forward_backward(self.critic.micro_batch(batch))
        # gradients stay allocated, as in an update
        self.critic.optimizer.zero_grad(set_to_none=False)

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
        if any(batch.multi_modal_inputs or ()) and not self.critic.image_processor:
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
        critic.model.score.bias.fill_(bias)

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
        model = self.critic.model
        if self.config.offload_policy:
            return  # everything is on the host already
        self.critic.free_gathered()
        if self.config.strategy == "fsdp1":
            for handle in model._all_handles:  # .to() would leave the local shard in the old memory
                handle.flat_param.grad = None  # zero_grad() clears only views of it
                handle.flat_param_to(device)
                handle.flat_param._local_shard = handle.flat_param.data
                handle.flat_param._tensors = [None] * len(handle.flat_param._tensors)  # old views
        else:
            model.to(device)  # blocking, because FSDP2 reads the copies on the host
        common.move_state(self.critic.optimizer, device)

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
        tensors, _, _ = checkpoint_tensors(critic.model, critic.optimizer)
        if copy:
            tensors = {name: x.to("cpu", copy=True) for name, x in tensors.items()}
        state = {
            "updates": critic.updates,
            "optimizer_steps": critic.optimizer_steps,
            "shape": self.shape(),
        }

        def write(tmp, group=None):
            writer = HuggingFaceStorageWriter(tmp, save_distributed=True)
            dcp.save(tensors, storage_writer=writer, process_group=group)
            common.write_json(f"{tmp}/trainer.json", state)

        return write

    def load_checkpoint(self, folder):
        """Restores a checkpoint of either critic, on any layout. UserError: damaged, or of another
        model."""
        self.check_ready()
        critic = self.critic
        saved = open_checkpoint(folder, self.shape())
        tensors, model_state, optimizer_state = checkpoint_tensors(critic.model, critic.optimizer)
        with blame(f"--resume {folder}: does not fit this critic"):
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(folder))
        state_dict.set_state_dict(
            critic.model,
            critic.optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
        )
        torch.set_rng_state(tensors["rng"])
        critic.updates = saved["updates"]
        critic.optimizer_steps = saved["optimizer_steps"]

    def shape(self):
        """What a checkpoint and the run that resumes it must have in common."""
        c = self.config
        own = {"freeze_modules": c.freeze_modules}
        if c.lora_rank:
            own |= {"lora_rank": c.lora_rank, "lora_alpha": c.lora_alpha}
        return common.shape_of(self.model_config, own)

    def export_hf(self, folder):
        """Writes the value model as a Hugging Face folder that AutoModelForTokenClassification
        loads: num_labels is 1, or the number of bins for hl_gauss; config.json holds the
        value_range, if any. LoRA adapters are merged. For an architecture without that class, the
        folder holds the backbone and value_head.safetensors the head; --model reads both kinds."""
        state = {}  # the library's full_state_dict would crash FSDP1 on a CPU
        with self.on_device():
            for name, x in state_dict.get_model_state_dict(self.critic.model).items():
                # not buffers, nor FSDP1's weights on a single rank
                if isinstance(x, dist.tensor.DTensor):
                    x = x.full_tensor()  # one at a time; only rank 0 keeps it, on the host
                if RANK == 0:
                    state[name] = x.detach().cpu().contiguous()
        with published(folder) as tmp:
            if RANK == 0:
                if self.config.lora_rank:
                    state = merge_lora(state, self.config, self.model_config)
                save_hf(state, self.model_config, tmp)
                for part in filter(None, (self.critic.image_processor, self.tokenizer)):
                    part.save_pretrained(tmp)


def checkpoint_tensors(model, optimizer):
    """All state as one flat dict of tensors, and the model's and optimizer's state dicts of these
    tensors."""
    fresh = not optimizer.state
    optimizer.zero_grad()  # with gradients, get_state_dict would create no state
    model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
    if fresh:  # get_state_dict took an empty step to create the state: undo its count
        for state in (*optimizer.state.values(), *optimizer_state["state"].values()):
            if "step" in state:  # not every optimizer counts steps
                state["step"].zero_()
    tensors = {f"model.{name}": x for name, x in model_state.items()}
    for name, state in optimizer_state["state"].items():
        tensors |= {f"optimizer.{name}.{key}": x for key, x in state.items()}
    tensors["rng"] = torch.get_rng_state()
    return tensors, model_state, optimizer_state


def save_hf(state, model_config, folder):
    """Writes a value model's full state dict ("model.*", "score.*") with transformers'
    save_pretrained."""
    classifies = type(model_config) in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    with torch.device("meta"):
        kind = transformers.AutoModelForTokenClassification if classifies else AutoModel
        skeleton = kind.from_config(model_config, dtype=torch.float32)
    names = {"model": "", "score": "score."}
    if classifies:
        names["model"] = f"{skeleton.base_model_prefix}."
        names["score"] = "score." if hasattr(skeleton, "score") else "classifier."
    else:
        head = {name: state.pop(name) for name in ("score.weight", "score.bias")}
        save_file(head, f"{folder}/value_head.safetensors", metadata={"format": "pt"})
    theirs = {}
    for name, x in state.items():
        part, _, rest = name.partition(".")
        theirs[names[part] + rest] = x
    skeleton.save_pretrained(folder, state_dict=theirs)


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


# ---- Plan: the memory that a layout needs, computed without launching it -------------------------


def print_plan(run):
    """Prints, as equations, the most memory that each of run.plan ranks needs before any
    activations."""
    config = run.critic
    size = 4 if config.param_dtype == "float32" else 2  # bytes; auto is bfloat16 on GPUs
    _, model_config = common.load_config(config)
    check_model_flags(config, model_config)
    common.configure_head(model_config, config, (0.0, 1.0))
    model = build_skeleton(config, model_config)
    count, trained = count_parameters(model)
    blocks = sorted(count_parameters(block)[0] for block in units_of(model))
    gathered = count - sum(blocks[:-2])
    shards = shards_of(config, run.plan)
    total = 0.0
    for name, weights, each, parts in (
        ("weights", count, 4, shards),
        ("gradients", trained, 4, 1 if config.defer_grad_sync else shards),
        ("optimizer", trained, 8, shards),
        ("gathered", gathered, size, 1),  # the layers that are whole at the same time
    ):
        held = weights * each / parts / 2**20
        total += held
        print0(f"{name:12s} {held:12,.1f} MiB = {weights:,} x {each} bytes / {parts} shards")
    print0(f"{'together':12s} {total:12,.1f} MiB per rank; the rest is left for activations")


# ---- Main: value pretraining from rollouts -------------------------------------------------------


def main(run):
    config = run.critic
    if run.plan:
        return print_plan(run)
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
    processor = load_image_processor(run.critic, worker.model_config)
    read = partial(
        common.read_rows, tokenizer=worker.tokenizer, model_config=worker.model_config,
        place_images=processor and partial(place_images, processor, worker.model_config.image_token_id),
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
