"""A PPO critic for language models on PyTorch FSDP: one value model, one update, any layout.

    python critic_fsdp.py                        toy task, a tiny model, a laptop CPU: half a minute
    torchrun --nproc-per-node 2 critic_fsdp.py   the same on two ranks: the same numbers
    torchrun --nproc-per-node 8 critic_fsdp.py --model Qwen/Qwen2.5-7B --rollouts train.jsonl \\
        --eval-rollouts eval.jsonl --gradient-checkpointing --lr-warmup-steps 20 --out-dir out/7b

It learns V(s) from rollouts with rewards: value pretraining for PPO (VC-PPO, 2503.01491), or a
token-level verifier. A PPO loop drives the same CriticWorker. Copy this file and common.py, and
change them. Two scripts are the same critic, and their diff shows what parallelism costs:

                     critic_fsdp.py                     critic_megatron.py
    models           most decoders of transformers      some families, in Megatron's layers
    ranks split      weights; rows, by heads (Ulysses)  matrices, layers, experts; rows, by tokens
    only one has     images, LoRA, optimizer of choice  pipelines
    closed chapters  Ulysses, LoRA and frozen weights,  context parallelism, layers and groups,
    behind `learn`   images, compiled blocks, packing,  the map of weights, Megatron without CUDA
                     activations on the host, FSDP1

Shapes are in the names: T tokens, end to end; B sequences; L longest; S slots; D features.
"""

import collections
import io
import itertools
import math
import os
import re
import sys
import time
import warnings
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, replace
from functools import lru_cache, partial
from heapq import heapreplace
from os.path import exists, realpath
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import pydantic
import tyro
from pydantic import Field, PositiveFloat

# ---- Config --------------------------------------------------------------------------------------

Text = Annotated[str, Field(min_length=1)]  # a shell's unset variable gives ""
Files = Text | Annotated[tuple[Text, ...], Field(min_length=1)]  # one or several
Count = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(gt=0, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**62)]
Rate = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]  # float32 can hold it
Edge = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]  # and the square of this
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Auto = Annotated[str, Field(pattern=r"^auto(:[0-9]{1,6}(\.[0-9]{1,6})?)?$")]
SeqMode = Literal["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AggMode = Literal["token-mean", "token-sum", SeqMode]

os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")  # a mistake is told in one sentence
BRIEF = {"hide_input_in_errors": True}


@pydantic.dataclasses.dataclass(frozen=True, config=BRIEF)
class Config:
    """The critic: its model, its layout over ranks, its batches and its optimizer."""

    # what its flags begin with, in messages; "--critic." in ppo_loop.py
    prefix: ClassVar[str] = "--"

    # ---- model

    # Hugging Face folder or hub name; tiny-qwen2, tiny-llama ...: random weights
    model: Text = "tiny-qwen2"
    tokenizer: Text | None = None  # Hugging Face folder or hub name (None: the model's own)
    override_config: Text = "{}"  # JSON for the model's config, e.g. '{"num_hidden_layers": 4}'
    trust_remote_code: bool = False  # run the code that comes with the model or its tokenizer
    value_head: Literal["scalar", "bounded"] = "scalar"  # any number, or one within --value-range
    # how the value head starts (mean: at the mean return; auto: from the checkpoint, else mean)
    value_head_init: Literal["auto", "checkpoint", "normal", "zero", "mean"] = "auto"
    # LOW HIGH of a bounded head (None: the checkpoint's, else the data's; not in PPO)
    value_range: tuple[Edge, Edge] | None = None
    # regular expression; weights with a match in their name are frozen
    freeze_modules: Text | None = None
    lora_rank: Count = 0  # train only LoRA adapters of this rank and a value head (0: no LoRA)
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
    # keep activations on the host; without checkpointing, weights as well
    activation_offload: bool = False
    keep_gathered: bool = False  # gather weights once per mini-batch: less traffic, more memory
    defer_grad_sync: bool = False  # reduce gradients once per mini-batch: the same
    compile: Literal["auto", "on", "off"] = "auto"  # compile each block (auto: where it pays)
    # stop if a collective takes longer
    timeout_minutes: Annotated[float, Field(ge=0.01, le=1e6)] = 30.0

    # ---- precision and kernels

    # recompute activations in the backward pass: less memory, more time
    gradient_checkpointing: bool = False
    # dtype of products, and of frozen weights, exported too (auto: float32 on CPU, else bfloat16)
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    use_remove_padding: bool = True  # pack sequences end to end; otherwise pad each to the longest
    share_prompts: bool = True  # when packing, compute a prompt once for all its rows; same update

    # ---- batches

    # rows per optimizer step, over all ranks; an episode of several rows counts once
    ppo_mini_batch_size: Positive = 256
    # max tokens per micro-batch (auto[:GIB]: what fits; None: 16384, but auto on a GPU without PPO)
    ppo_max_token_len_per_gpu: Positive | Auto | None = None
    # the same where no backward needs activations (None: twice as many)
    forward_max_token_len_per_gpu: Positive | None = None
    ppo_epochs: Positive = 1  # passes over the rows of one update
    # cut mini-batches in random order (by seed, update, epoch), not in row order
    shuffle: bool = True

    # ---- loss

    # PPO clip range around the old value (None: off)
    cliprange_value: Rate | None = 0.5
    loss_agg_mode: AggMode = "token-mean"  # how to average token losses over a mini-batch
    response_length_limit: Positive | None = None  # divisor of seq-mean-token-sum-norm, in tokens
    # noise: weigh actions by the noise that they bring to the actor's gradient
    value_weights: Literal["equal", "noise"] = "equal"

    # ---- optimizer

    lr: Rate | None = None  # peak learning rate (None: 1e-3 for tiny-* and PPO's toy, else 1e-5)
    # linear warm-up, in optimizer steps; the first is at lr / steps, not at 0
    lr_warmup_steps: Count = 0
    # schedule after warm-up; cosine ends at 0
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    grad_clip: PositiveFloat = 1.0  # clip the norm of the whole gradient to this (inf: no clipping)
    weight_decay: Fraction = 0.01  # AdamW's decoupled decay, on every weight
    betas: tuple[Decay, Decay] = (0.9, 0.999)  # decay rates of AdamW's two moving averages

    def __post_init__(self):
        """ValueError names the flags that do not go together. See check_layout, too."""
        to = self.prefix

        # the value head
        if self.value_range:
            low, high = self.value_range
            flag = f"{to}value-range {low} {high}"
            if not low < high:
                raise ValueError(f"{flag}: LOW must be below HIGH")
            if high - low < 1e-15 + 1e-4 * max(abs(low), abs(high)):
                raise ValueError(f"{flag}: too narrow for float32; give numbers farther apart")

        # the loss
        limit = self.response_length_limit
        divides = self.loss_agg_mode == "seq-mean-token-sum-norm"
        if divides != (limit is not None):
            flag = f"{to}response-length-limit {limit}"
            mode = f"{to}loss-agg-mode seq-mean-token-sum-norm"
            raise ValueError(f"{flag}: belongs to {mode}; set both or neither")

        # the layout
        absent = (self.offload_policy, self.keep_gathered, self.defer_grad_sync)
        if self.strategy == "fsdp1" and any(absent):
            flags = f"{to}offload-policy, {to}keep-gathered and {to}defer-grad-sync"
            raise ValueError(f"{to}strategy fsdp1: has no {flags}; use fsdp2")


@pydantic.dataclasses.dataclass(frozen=True, config=BRIEF)
class Run:
    """Trains a value function on rollouts, evaluates it, saves checkpoints and an export."""

    critic: tyro.conf.OmitArgPrefixes[Config] = Config()

    # ---- rows

    # to train on: JSONL, parquet, a folder, a name on the hub, or several (None: the toy task)
    rollouts: Files | None = None
    eval_rollouts: Files | None = None  # to evaluate on (None: no evaluation; the toy has its own)
    # no training: writes these rows with values to out_dir/scored.jsonl
    score: Files | None = None
    # FILE.py:FUNCTION(row) -> a row with our keys, or a list of them; see tests/rows/shapes.py
    rows: Text | None = None
    prompt_key: Text | None = None  # key of text or chat messages (None: prompt, messages, ...)
    # key of the response; a.b is key b within key a, here and below
    response_key: Text | None = None
    reward_key: Text | None = None  # key of the reward
    privileged_key: Text | None = None  # key of text that only the critic reads, before the prompt
    # JSON for the chat template, e.g. '{"enable_thinking": false}'
    chat_template_kwargs: Text = "{}"
    last_turn_only: bool = False  # of a chat, only the assistant's last turn is an action

    # ---- run

    steps: Positive = 100  # critic updates, each on one train batch
    # most rows per update, over all ranks, counted likewise (None: one mini-batch)
    train_batch_size: Positive | None = None
    eval_every: Count = 20  # updates between evaluations (0: only at the start and the end)
    # folder for checkpoints, Hugging Face export, metrics and report
    out_dir: Text = f"out/{Path(__file__).stem}"
    # checkpoint folder to continue from (auto: the last complete one in out_dir)
    resume: Text | None = None
    # updates between checkpoints (None: at evaluations, in place of the last; 0: only at the end)
    save_every: Count | None = None
    # how many of the last checkpoints to keep (None: all, but see --save-every)
    keep: Positive | None = None
    async_save: bool = False  # write checkpoints in the background, from a copy in host memory
    profile_step: Positive | None = None  # profile this step of rank 0, with torch.profiler
    # FILE.py:FUNCTION, called with each line of metrics.jsonl as a dict
    logger: Text | None = None

    # ---- returns

    gamma: Fraction = 1.0  # discount factor per action
    lam: Fraction = 1.0  # GAE lambda of the returns (1: Monte Carlo, from rewards alone)
    # truncated rows bootstrap from the value of their last action
    bootstrap_truncated: bool = False

    def __post_init__(self):
        """ValueError if an export or older checkpoints would replace the model that is read."""
        theirs = f"{realpath(self.critic.model)}/"
        ours = [realpath(f"{self.out_dir}/{name}") for name in ("hf", "checkpoints")]
        if any(theirs.startswith(f"{path}/") for path in ours) and not self.score:
            words = "holds the --model, which the run would replace; give another"
            raise ValueError(f"--out-dir {self.out_dir}: {words}")


if __name__ == "__main__":  # here, because the imports below take ten seconds
    # a stream that is closed would be the next file that opens
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))

    speaks = os.environ.get("RANK", "") in ("", "0")  # one rank speaks for all
    with redirect_stderr(sys.stderr if speaks else io.StringIO()):  # tyro prints some boxes anyway
        RUN = tyro.cli(Run, description=__doc__, console_outputs=speaks)

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch.profiler import record_function
from transformers import AutoModel

# what only this script needs: its warnings, then its imports
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # only read
warnings.filterwarnings("ignore", ".*`NO_SHARD`")  # FSDP1 on one rank

from contextlib import nullcontext
from copy import deepcopy
from datetime import timedelta
from os.path import isdir
from shutil import which

from torch.distributed import _functional_collectives as collectives
from torch.distributed import checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint import HuggingFaceStorageReader, state_dict
from torch.utils._triton import has_triton
from transformers import Qwen2VLImageProcessorPil
from transformers.image_utils import load_image

import common
from common import RANK, WORLD_SIZE, Batch, Pack, UserError, blame, of_all_ranks, print0, published

transformers.logging.set_verbosity_error()  # the run prints one line about the weights
transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a rank that reads alone


# ---- Value model: a decoder and a value head in float32 ------------------------------------------


class ValueModel(nn.Module):
    """A backbone without its vocabulary head, and v = w . h + b on the hidden state of every token.
    A head of N outputs, in a fork, gives N numbers instead."""

    def __init__(self, backbone, outputs=None):
        super().__init__()
        self.model = backbone
        width = backbone.config.get_text_config().hidden_size
        self.score = nn.Linear(width, outputs or backbone.config.num_labels)

    def forward(self, **inputs):
        """(B, L) ids -> (B, L) or (B, L, N) float32, the head's outputs for each hidden state."""
        hidden_BLD = self.model(use_cache=False, **inputs).last_hidden_state
        with torch.autocast(hidden_BLD.device.type, enabled=False):
            return self.score(hidden_BLD.float()).squeeze(-1)


def build_skeleton(config, model_config):
    """A ValueModel on the meta device: everything but the weights. UserError: cannot be built."""
    return skeleton_of(AutoModel, ValueModel, config, model_config)


def skeleton_of(kind, wrap, config, model_config):
    """wrap(a model of this kind of transformers) on the meta device. The actor of ppo_loop.py is of
    another kind, in another module."""
    with blame(f"{config.prefix}model {config.model}: has no attention"):
        heads = model_config.get_text_config().num_attention_heads
    if heads % config.ulysses_size:
        flag = f"{config.prefix}ulysses-size {config.ulysses_size}"
        raise UserError(f"{flag}: must divide {heads} attention heads")

    # its module, then what of it trains
    model_config = deepcopy(model_config)  # another model of this config may want other attention
    name = f"{config.prefix}model {config.model} ({model_config.model_type})"
    with blame(f"{name}: cannot be built{padding_advice(config)}"), torch.device("meta"):
        backbone = kind.from_config(
            model_config,
            dtype=torch.float32,
            attn_implementation=attention_of(config, model_config),
        )
        if kind is AutoModel and backbone.get_output_embeddings() is not None:
            raise UserError("transformers has no such model without its head; give its text part")
        model = wrap(backbone)
        if config.use_remove_padding:
            common.pack_recurrent(backbone.get_decoder(), gather_slices, add_slices)
        common.add_lora(backbone.base_model, config, config.seed)
        if not reads_images(config, model_config):
            common.freeze_towers(backbone)
        freeze(model, config)

        if config.gradient_checkpointing:
            options = {"use_reentrant": False}
            backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def read_weights(config, model_config):
    """(a ValueModel on the host with its weights, words on their origin, whether the head starts at
    the mean return). Only rank 0 calls it."""
    if exists(f"{config.model}/trainer.json"):  # a checkpoint
        backbone = AutoModel.from_config(model_config, dtype=torch.float32)
        weights = {f"model.model.{name}": x for name, x in backbone.state_dict().items()}
        name = f"{config.prefix}model {config.model}"
        with blame(f"{name}: its weights do not load; give a folder made by an export"):
            dcp.load(weights, storage_reader=HuggingFaceStorageReader(config.model), no_dist=True)
        origin = f"weights of the checkpoint {config.model} (no optimizer state)"
    else:
        backbone, origin = common.load_model(AutoModel, config, model_config, config.seed)

    model = ValueModel(backbone)
    words, at_mean = common.init_value_head(model.score, config, model_config)
    common.add_lora(backbone, config, config.seed)
    return model, f"{origin}; {words}", at_mean


def count_parameters(module):
    """(all parameters, trainable parameters)."""
    count = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return count, trained


# ---- Parallelism: which ranks share what, and the model spread over them -------------------------


class Layout(NamedTuple):
    """Ranks form a dp x sp grid: rank = dp_rank * sp_size + sp_rank.
    sp neighbours share each sequence, and dp groups split the rows. FSDP shards the weights over
    all ranks, or over --fsdp-size of them."""

    device: torch.device
    dtype: torch.dtype  # of matrix products, and of frozen weights; what trains is float32
    dp_rank: int
    dp_size: int
    sp_rank: int
    sp_size: int
    sp_group: dist.ProcessGroup | None
    fsdp_mesh: dist.DeviceMesh  # (world,), or (replicas, fsdp_size) for hybrid sharding
    dp_ranks: list  # the dp_rank of each rank
    gives_values: list  # for each rank, whether it gives values back: one of those that share a row
    backbone: nn.Module | None = None  # of another model, which the critic shares


def make_layout(config, device):
    """The Layout of this rank, with its process groups (a collective)."""
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


@lru_cache
def make_groups(device_type, shards, sp, timeout_minutes):
    """(mesh of replicas x shards, the ranks that share this rank's rows or None).

    A layout's groups are built once: their threads and sockets stay until the process ends."""
    names = ("replicate", "shard")
    mesh = dist.init_device_mesh(device_type, (WORLD_SIZE // shards, shards), mesh_dim_names=names)
    timeout = timedelta(minutes=timeout_minutes)
    for group in mesh.get_all_groups():  # otherwise they have torch's default
        common.set_timeout(timeout, group)
    sp_group = dist.new_subgroups(sp, timeout=timeout)[0] if sp > 1 else None
    return mesh, sp_group


def shards_of(config, ranks):
    """How many of the ranks shard one copy of the weights."""
    if config.strategy == "none":  # a copy on each rank is FSDP with one shard
        return 1
    return ranks if config.fsdp_size == -1 else config.fsdp_size


def build_value_model(skeleton, config, model_config, layout):
    """(the skeleton as a sharded ValueModel with its weights, and what read_weights says of them).
    Only rank 0 reads the weights, and it sends each rank its shards."""
    if layout.backbone:
        return share_backbone(layout.backbone, config, model_config)
    source = None
    told = None
    if RANK == 0:
        source, *told = read_weights(config, model_config)
    told = of_all_ranks(told)[0]
    return spread_model(skeleton, source, config, layout), *told


def spread_model(skeleton, source, config, layout):
    """The skeleton, sharded, with the weights of `source`, which only rank 0 has."""
    shard = shard_fsdp1 if config.strategy == "fsdp1" else shard_fsdp2
    model = shard(skeleton, config, layout)
    common.send_weights(model, source)
    for buffer in model.buffers():  # --offload-policy does not move buffers
        buffer.data = buffer.to(layout.device)
    model.model.get_decoder().register_forward_pre_hook(slice_row, with_kwargs=True)
    return model


def needs_grad(module, args, output):
    """A forward hook of the embedding: if it is frozen, the layers behind it still run their whole
    backward."""
    output.requires_grad_()


def shard_fsdp2(model, config, layout):
    """Shards a model on meta block by block; gradients are float32, the weights still empty."""
    common.hold_frozen(model, layout.dtype)
    offload = fsdp.OffloadPolicy()
    if config.offload_policy:
        offload = fsdp.CPUOffloadPolicy(pin_memory=layout.device.type == "cuda")
    for module in filter(None, (*units_of(model), model.score, model)):
        dtype = torch.float32 if module is model.score else layout.dtype
        policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fsdp.fully_shard(module, mesh=layout.fsdp_mesh, mp_policy=policy, offload_policy=offload)
    gathers_once, _ = stays_whole(config)
    if gathers_once:
        model.set_reshard_after_forward(False)
    common.let_ranks_skip_weights(model)
    return model.to_empty(device="cpu" if config.offload_policy else layout.device)


def units_of(model):
    """The blocks to shard one by one. Vision towers stay in the root: not every rank runs them."""
    return common.transformer_blocks(model.model.get_decoder())


# ---- Batching: rows over ranks, a rank's rows over micro-batches ---------------------------------


class MicroBatch(NamedTuple):
    """Rows on the device, as the model reads them.

    Columns have T entries, or are None; where response_mask is false they may hold anything, even
    NaN. A slot is a token or padding."""

    inputs: dict  # arguments of the model: ids and positions of the slots, images
    index_T: torch.Tensor  # each token's slot
    pack: Pack | None  # where sequences lie in the packed row, for attention
    response_mask: torch.Tensor
    values: torch.Tensor | None
    returns: torch.Tensor | None
    weights: torch.Tensor | None  # see common.loss_weights
    rows: Batch  # the same rows on the host, with every column


def shift(x_T):
    """Moves the head's outputs one place to the right, to the actions whose values they are.

    The value of an action is read from the hidden state *before* it. The first token of a row is
    never an action, so nothing crosses into another row:

        token            p0   p1   a0   a1   o0   a2
        response_mask    0    0    1    1    0    1
        outputs          v0   v1   v2   v3   v4   v5      from the hidden state after each token
        result           .    .    v1   v2   .    v4      . is never read"""
    return x_T.roll(1, 0)


def spread(costs, k):
    """Which of k lists each cost joins, so that their sums are nearly equal.

    Each next largest cost joins the emptiest list (Graham 1969)."""
    largest_first = np.argsort(-costs, kind="stable").tolist()
    costs = costs.tolist()
    joined = [0] * len(costs)
    loads = list(range(k))  # a heap of k times a list's sum, plus its number: the emptiest is first
    for i in largest_first:
        emptiest = loads[0] % k
        joined[i] = emptiest
        heapreplace(loads, loads[0] + k * costs[i])
    return joined


def micro_batches(rows, dp_size, max_tokens, share, padded=False):
    """A common.Table of micro-batches for each data-parallel rank, none above max_tokens.

    Every rank computes the same table, so all run equally many forwards without communicating
    (ranks that share weights must). A rank with fewer tokens gets smaller or empty micro-batches.
    Rows with equal prompts stay together unless they exceed a micro-batch or a rank's share of all
    tokens. share: whether a prompt counts once for all its rows."""
    bundles, sizes = common.bundles(rows, max_tokens, dp_size, share and not padded)

    def fullest(joined):
        tokens = np.bincount(joined, sizes)
        if padded:  # each row to the longest
            longest = np.zeros(len(tokens))
            np.maximum.at(longest, joined, sizes)
            tokens = np.bincount(joined) * longest
        return tokens.max(initial=0)

    # as few micro-batches as the cap allows; trying every count would be slow for long batches
    count = 1
    while sizes.sum() > max_tokens * dp_size * count:
        count += 1 + count // 20
    joined = spread(sizes, dp_size * count)
    while fullest(joined) > max_tokens:
        count += 1 + count // 20
        joined = spread(sizes, dp_size * count)

    # the largest bundles first
    parts = [[] for _ in range(dp_size * count)]
    for i in np.argsort(-sizes, kind="stable").tolist():
        parts[joined[i]] += bundles[i]
    return common.table_of(rows, [parts[rank::dp_size] for rank in range(dp_size)])


def pack_rows(batch, device, share, unit=1):
    """Packs rows end to end, see common.lay_out_once -> (slots_S, index_T, Pack).

    slots_S: the index of each slot's token, or T for padding to a multiple of `unit`. index_T: each
    token's slot, where later tokens of its row find its key. Both are on the host."""
    slots_S, index_T, sequences = common.lay_out_once(batch, share)
    total = len(batch.input_ids)
    lengths = batch.lengths
    queries = [own for own, _ in sequences]
    seen = [lengths[row] for _, row in sequences]

    # padding extends the last sequence, where no token sees it
    pad = -len(slots_S) % unit
    queries[-1] += pad
    seen[-1] += pad

    keys = None  # as queries
    if queries != seen:
        places = index_T.split(lengths)
        behind = len(slots_S) + torch.arange(pad)
        keys = torch.cat([*(places[row] for _, row in sequences), behind])
        keys = keys.to(device, non_blocking=True)
    slots_S = F.pad(slots_S, (0, pad), value=total)
    return slots_S, index_T, Pack(queries, device, seen, keys)


def row_sharing(config):
    """(how many ranks share the tokens of a row; a micro-batch is padded at its end to a multiple
    of this many slots, which they split)."""
    return config.ulysses_size, config.ulysses_size


# ---- The critic: forward, loss, step -------------------------------------------------------------


class DataParallelPPOCritic:
    """Values and updates of a value model.

    compute_values and update_critic take the rows that this rank has, and the Rows of all ranks;
    each rank fetches the rows that it computes. A fork overrides build, forward, values, weights_of
    or loss; the actor of ppo_loop.py is one, whose values are log-probs."""

    kind = "critic"  # its metrics begin with it
    says = "values"  # what it computes, in messages
    main_loss = "vf_loss"  # the one of the sums of `loss` that the weights are for
    between = staticmethod(lambda: None)  # called between forwards of compute_values; it may raise

    def __init__(self, config, model_config, layout, total_steps):
        self.config = config
        self.layout = layout
        self.peak_lr = config.lr or (1e-3 if config.model in common.TINY else 1e-5)
        self.total_steps = total_steps  # optimizer steps of the whole run, for cosine
        self.build(model_config)
        self.max_tokens = 0  # of a micro-batch, over the ranks that share it; see set_budget
        self.max_tokens_forward = 0  # the same without a backward
        self.optimizer_steps = 0  # steps taken, without skipped ones: the position in the schedule
        self.updates = 0  # calls of update_critic; with seed and epoch, the key of every shuffle
        self.steps_before = None  # optimizer_steps before an update in progress, see check_ready

        # the names of what `loss` sums: where nothing is summed, an update has them, too. A mistake
        # in `loss` shows here
        micro = self.micro_batch(Batch.blank())
        shape = (len(micro.response_mask), self.outputs)
        _, sums = self.loss(torch.zeros(shape, device=layout.device).squeeze(1), micro)
        self.no_sums = {name: torch.zeros_like(x) for name, x in sums.items()}

    def build(self, model_config):
        """Builds the model, spread over the ranks, and its optimizer."""
        config = self.config
        layout = self.layout
        self.value_range = model_config.value_range  # None: the head's outputs are the values
        self.outputs = model_config.num_labels  # numbers that the head gives for a token

        # what a forward costs, and an update in forwards: itself, input and weight gradients
        skeleton = build_skeleton(config, model_config)
        count, trained = count_parameters(skeleton)
        self.flops = common.flops_model(skeleton, model_config)  # of a row of this many tokens
        self.passes = 2 + trained / count

        # the model; blocks that it shares are not its own to compile
        more = (config, model_config, layout.device, self.total_steps)
        self.compiled = not layout.backbone and compile_blocks(skeleton, *more)
        made = build_value_model(skeleton, config, model_config, layout)
        self.model, origin, self.at_mean = made  # whether the head starts at the mean return
        self.image_processor = load_image_processor(config, model_config)  # None: reads text only
        if self.image_processor:
            self.model.model.get_input_embeddings().register_forward_hook(needs_grad)
        percent = f"{trained / count:.2%}"
        self.story = f"{count:,} parameters, {trained:,} of them ({percent}) train: {origin}"

        # the optimizer
        self.optimizer = build_optimizer(self.model, config, self.peak_lr)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def plan_micro_batches(self, rows, max_tokens):
        """Micro-batches of these Rows for each data-parallel rank, see micro_batches."""
        c = self.config
        padded = not c.use_remove_padding
        return micro_batches(rows, self.layout.dp_size, max_tokens, c.share_prompts, padded)

    def fetch(self, batch, table):
        """The rows that this rank computes, in the order of its micro-batches (a collective)."""
        wanted = [table.wanted[dp_rank] for dp_rank in self.layout.dp_ranks]
        return common.fetch(batch, table.rows, wanted)

    def cut(self, local, table):
        """The fetched rows in micro-batches; some may have no row."""
        return local.split(table.sizes[self.layout.dp_rank])

    def micro_batch(self, piece):
        """These rows on the device. Without rows: one masked token, to keep in step with others."""
        if not len(piece):
            piece = Batch.blank()
        inputs, index_T, pack = self.lay_out(piece)

        def to_device(x):
            return None if x is None else x.to(self.layout.device, non_blocking=True)

        return MicroBatch(
            inputs={name: to_device(x) for name, x in inputs.items()},
            index_T=to_device(index_T),
            pack=pack,
            response_mask=to_device(piece.response_mask),
            values=to_device(piece.values),
            returns=to_device(piece.returns),
            weights=to_device(piece.weights),
            rows=piece,
        )

    def lay_out(self, piece):
        """(the model's inputs, the slot of each token, Pack or None) of a micro-batch's rows."""
        inputs = {}
        positions_T = piece.positions
        if self.image_processor:
            positions_T, inputs = with_images(self.model.model, piece, self.image_processor)

        # which token is in each slot, T in those of padding
        total = len(piece.input_ids)
        if self.config.use_remove_padding:
            _, unit = row_sharing(self.config)
            share = self.config.share_prompts
            slots_S, index_T, pack = pack_rows(piece, self.layout.device, share, unit)
            slots = slots_S[None]
        else:
            slots = nn.utils.rnn.pad_sequence(torch.arange(total).split(piece.lengths), True, total)
            inputs["attention_mask"] = slots < total
            index_T = (slots.flatten() < total).nonzero()[:, 0]
            pack = None

        inputs["input_ids"] = F.pad(piece.input_ids, (0, 1))[slots]
        inputs["position_ids"] = F.pad(positions_T, (0, 1))[..., slots]
        return inputs, index_T, pack

    def forward(self, micro):
        """(T,) float32: the head's output for each action; (T, N) if it has N outputs."""
        group = self.layout.sp_group if micro.pack else None  # check_model runs rows alone
        common.CurrentPack.set(micro.pack, group)  # layers read it, until the backward ends
        out_S = self.model(**micro.inputs).flatten(0, 1)  # slice_row cuts a row that ranks share
        common.CurrentPack.check(micro.pack)
        if group:
            out_S = gather_slices(out_S, group)
        return shift(out_S[micro.index_T])

    def values(self, outputs, mask):
        """Turns the head's outputs into values of the actions; zero elsewhere."""
        if self.value_range:  # --value-head bounded: BPCO, 2608.23566
            low, high = self.value_range
            outputs = low + (high - low) * (0.5 + outputs.atan() / math.pi)
        return torch.where(mask, outputs, 0.0)

    @torch.no_grad()
    def compute_values(self, batch, rows):
        """(T,) float32 values of the batch's actions, zero elsewhere; on the host."""
        self.model.eval()
        table = self.plan_micro_batches(rows, self.max_tokens_forward)
        local = self.fetch(batch, table)
        pieces = self.cut(local, table)
        values = []

        # one forward after the other
        for piece in common.progress(pieces, self.says, "micro-batches"):
            self.between()
            micro = self.micro_batch(piece)
            values.append(self.values(self.forward(micro), micro.response_mask))
        self.free_gathered()

        values_T = self.give_back(values, local, table, batch)
        self.between()  # last chance to raise: an update may follow, which is not interrupted
        return values_T

    def give_back(self, values, local, table, batch):
        """Values of this rank's micro-batches -> (T,) those of the rows that it has, on the host (a
        collective). A stage without the head has none, and gives none."""
        values_T = torch.zeros(len(local.input_ids))
        if values:
            sizes = [len(piece.input_ids) for piece in self.cut(local, table)]
            kept = [v_T[:size] for v_T, size in zip(values, sizes, strict=True)]  # no blank rows
            values_T = torch.cat(kept).cpu()

        wanted = []
        for dp_rank, gives in zip(self.layout.dp_ranks, self.layout.gives_values):
            wanted.append(table.wanted[dp_rank] if gives else [])
        return common.give_back(values_T, local, table.rows, wanted, batch)

    def update_critic(self, batch, rows):
        """PPO epochs over mini-batches, one optimizer step each -> metrics.

        batch: the rows that this rank has; without old values, it gets those of the only step.
        rows: the Rows of all ranks, of which mini_batch fetches those that this rank computes."""
        config = self.config
        most = config.ppo_mini_batch_size
        groups = common.groups_of(rows)  # a shuffle keeps equal prompts together
        in_order = sorted(itertools.chain(*groups))  # the episodes
        minis = math.ceil(len(in_order) / most)
        steps = config.ppo_epochs * minis
        if batch.values is None and steps > 1:
            words = f"an update of {steps} optimizer steps needs the {self.says} from before it"
            raise UserError(f"{self.says}: is missing; {words}: compute them first")

        self.steps_before = self.optimizer_steps
        common.train_quietly(self.model)
        self.optimizer.zero_grad()  # what a trial backward has left
        totals = collections.Counter(self.no_sums)  # of the steps taken
        norms = []  # one per mini-batch, NaN where the step was skipped
        done = common.progress_of(config.ppo_epochs * len(rows), "update", "rows")

        for epoch in range(config.ppo_epochs):
            episodes = in_order
            if config.shuffle:
                episodes = common.shuffled(groups, most, config.seed, self.updates, epoch)

            # each mini-batch is one optimizer step
            for picked in common.cut_evenly(episodes, minis):
                mini = rows[list(itertools.chain(*picked))]
                norms.append(math.nan)
                if not mini.actions.any():
                    continue  # AdamW would move the weights even with zero gradients
                local, table = self.mini_batch(batch, mini)
                pieces = self.cut(local, table)
                with record_function("mini-batch"):
                    # each micro-batch is one forward and backward; their gradients add up
                    sums = collections.Counter()
                    values = []  # the old ones
                    for i, piece in enumerate(pieces, 1):
                        micro = self.micro_batch(piece)
                        part, old_T = self.forward_backward(micro, last=i == len(pieces))
                        sums.update(part)
                        values.append(old_T)
                        done(len(mini) / len(pieces))
                    norm = self.optimizer_step()
                if math.isfinite(norm):
                    norms[-1] = norm
                    totals.update(sums)

                # values of the only step are those from before it
                if batch.values is None:
                    batch.values = self.give_back(values, local, table, batch)

        if batch.values is None:  # no row has an action
            batch.values = torch.zeros(len(batch.input_ids))
        self.updates += 1
        self.steps_before = None
        lr = self.optimizer.param_groups[0]["lr"]
        return common.update_metrics(self.kind, self.main_loss, totals, norms, lr)

    def mini_batch(self, batch, mini):
        """This rank's rows of a mini-batch, with the weights of their losses, and the table of
        micro-batches."""
        table = self.plan_micro_batches(mini, self.max_tokens)
        local = self.fetch(batch, table)
        local.weights = self.weights_of(local, mini)
        return local, table

    def weights_of(self, local, mini):
        """(T,) what the loss of each token counts for. local: this rank's rows of a mini-batch.
        mini: the Rows of all ranks in it."""
        c = self.config
        weights_T = common.loss_weights(local, c.loss_agg_mode, c.response_length_limit, mini)
        if c.value_weights == "noise":
            weights_T = (weights_T * common.noise_weights(local)).float()
        return weights_T

    @record_function("micro-batch")
    def forward_backward(self, micro, last=True):
        """Accumulates the gradient of a micro-batch -> (its sums, as `loss` returns them; its old
        values, which are those of this forward if the batch has none).

        last: whether it is the last one of its mini-batch.

        FSDP averages over dp x sp ranks, but the loss is a sum: multiply by dp x sp. All sp ranks
        of a row compute the same loss, and gather_slices adds up their gradients: divide by sp.
        That leaves dp."""
        if self.config.strategy != "fsdp1":
            keep_whole(self.model, self.config, last)
        with activations_on_host(self.config):
            outputs = self.forward(micro)
            if micro.values is None:  # this is the only step: nothing has moved the weights before
                micro = micro._replace(values=self.values(outputs.detach(), micro.response_mask))
            loss, sums = self.loss(outputs, micro)
            (loss * self.layout.dp_size).backward()
            common.CurrentPack.check(micro.pack)  # a backward may rerun layers

        if self.config.strategy == "fsdp1" and WORLD_SIZE == 1:
            self.free_gathered()  # FSDP1 forgets units without a gradient
        if self.layout.sp_rank:  # ranks that share a row have equal sums
            sums = {}
        return sums, micro.values

    def loss(self, outputs, micro):
        """This micro-batch's part of the mini-batch loss, and its sums.

        sums: for each metric, the sum over the actions, of which only that of vf_loss has weights;
        see common.update_metrics."""
        vpreds = self.values(outputs, micro.response_mask)
        columns = (micro.returns, micro.response_mask, micro.weights)
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
        """Learning rate of the next step: linear warm-up, then constant or a cosine that ends at 0.

        The first step is at lr / steps of the warm-up. Skipped steps do not advance it."""
        warmup = self.config.lr_warmup_steps
        rate = self.peak_lr * min(1.0, (self.optimizer_steps + 1) / max(warmup, 1))
        if self.config.lr_scheduler_type == "cosine":
            done = (self.optimizer_steps - warmup) / max(self.total_steps - warmup, 1)
            rate *= 0.5 * (1 + math.cos(math.pi * min(max(done, 0.0), 1.0)))
        return rate

    @record_function("optimizer step")
    def optimizer_step(self):
        """Clips, then steps -> norm before clipping.

        All ranks skip a step whose norm is not finite."""
        most = self.config.grad_clip
        if self.config.strategy == "fsdp1":
            norm = float(self.model.clip_grad_norm_(most))
        else:
            norm = float(nn.utils.clip_grad_norm_(self.parameters, most).full_tensor())

        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer_steps += 1  # first, because a step that fails has moved some weights
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def start_at(self, value):
        """Sets the head so that every value is this one: the inverse of `values`. In the range of a
        bounded head, it stays within the inner 98 %."""
        if self.value_range:
            low, high = self.value_range
            fraction = min(max((value - low) / (high - low), 0.01), 0.99)
            value = math.tan(math.pi * (fraction - 0.5))
        self.free_gathered()  # what an interrupted forward has left would hide the new bias
        self.model.score.weight.zero_()
        self.model.score.bias.fill_(value)

    def free_gathered(self):
        """Frees the gathered weights that FSDP keeps after a forward, for a backward to come."""
        for module in self.model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
        if self.config.strategy == "fsdp1":
            free_gathered_by_fsdp1(self.model)


def build_optimizer(model, config, lr):
    """The optimizer of the weights that train, which are sharded. Its whole state is saved."""
    weights = [p for p in model.parameters() if p.requires_grad]
    decay = config.weight_decay
    return torch.optim.AdamW(weights, lr, config.betas, weight_decay=decay, fused=True)


# ---- The worker: life cycle, memory, metrics -----------------------------------------------------


class CriticWorker:
    """The critic of a PPO loop: every rank creates one and calls its methods in the same order."""

    def __init__(self, config):
        check_layout(config)
        self.config = config
        self.tokenizer, self.model_config = common.load_config(config)
        check_model_flags(config, self.model_config)

        self.device = common.setup_distributed(config.timeout_minutes)
        check_auto(config, self.device)
        self.layout = make_layout(config, self.device)

        self.critic = None  # see init_model
        self.offloaded = False
        self.away = []  # what is on the host meanwhile, see common.offload
        self.halvings = 0  # how often runs from here have run out of memory, see common.Checkpoints

    def init_model(self, total_steps=None, value_range=None):
        """Builds the model and its optimizer, and seeds torch, alike on all ranks.

        total_steps: optimizer steps of the whole run, which --lr-scheduler-type cosine needs.
        value_range: (LOW, HIGH) of the head if neither --value-range nor the checkpoint has one."""
        config = self.config
        layout = self.layout
        if config.lr_scheduler_type == "cosine" and not total_steps:
            flag = f"{config.prefix}lr-scheduler-type cosine"
            raise UserError(f"{flag}: init_model needs total_steps")
        common.configure_head(self.model_config, config, value_range)
        self.critic = DataParallelPPOCritic(config, self.model_config, layout, total_steps)
        sizes = f"dp {layout.dp_size} x sp {layout.sp_size};"
        sizes += f" weights in {shards_of(config, WORLD_SIZE)} shards ({config.strategy})"
        torch.manual_seed(config.seed)  # reset: new weights may have drawn from it

        name = f"{config.model} ({self.model_config.model_type})"
        threads = torch.get_num_threads()
        print0(f"model      {name}, {self.critic.story}")
        print0(f"layout     ranks {WORLD_SIZE} = {sizes}; CPU threads {threads} per rank")
        print0(f"precision  {layout.dtype} products on {self.device.type}; what trains is float32")
        has_tower = self.model_config.get_text_config() is not self.model_config
        if has_tower and not self.critic.image_processor:
            print0("images     are not read; the vision tower stays as it is")
        check_model(self)

    def set_budget(self, longest, row, halvings=None):
        """Sets the tokens per micro-batch, of updates and of values, which do not depend on it.
        UserError: a row is longer.

        longest: tokens of the longest row to expect; row: words that name it. halvings: how often
        memory has run out, see common.Checkpoints."""
        self.check_ready()
        if halvings is not None:
            self.halvings = halvings
        config = self.config
        flag = f"{config.prefix}ppo-max-token-len-per-gpu"
        least = check_budget(config, longest, row)
        budget = config.ppo_max_token_len_per_gpu or max(16384, least)
        together, unit = row_sharing(config)

        if isinstance(budget, str):  # auto, or auto:GIB
            state = self.state_bytes()
            budget = common.measure_budget(self.try_out, budget, longest, together, state)
            if budget < least:
                raise UserError(f"{flag} auto: {row} of {longest} tokens does not fit")

        forward = config.forward_max_token_len_per_gpu or 2 * budget

        # a row that is longer than announced comes here again, and must not undo this
        if self.halvings:
            budget = max(budget >> self.halvings, least)
            forward = max(forward >> self.halvings, least)
            print0(f"memory     ran out before, so {flag} is lowered to {budget}")
        self.critic.max_tokens = budget * together // unit * unit
        self.critic.max_tokens_forward = forward * together // unit * unit

    def state_bytes(self):
        """What weights, gradients and optimizer state will take in this rank's device memory."""
        total = 0
        if self.config.offload_policy:
            return 0
        for p in self.critic.model.parameters():
            held = getattr(p, "_local_tensor", p).nbytes  # float32
            copies = 4 if p.requires_grad else 1  # weight, gradient, two moments
            total += copies * held
            if p.requires_grad and self.config.defer_grad_sync:
                total += 4 * p.numel()  # a whole gradient
        return total

    def try_out(self, batch):
        """Runs the forward and backward of a batch, without a step."""
        common.train_quietly(self.critic.model)
        self.critic.forward_backward(self.critic.micro_batch(batch))
        self.critic.optimizer.zero_grad(set_to_none=False)  # gradients stay, as in an update

    def check_ready(self, saves=False):
        """RuntimeError unless the model is built, on its device, and not left by a failed update.
        saves: see check_whole."""
        critic = self.critic
        if critic is None:
            raise RuntimeError("the critic has no model yet: call init_model() first")
        if self.offloaded:
            raise RuntimeError("the critic is offloaded: call onload() first")
        self.check_whole(saves)

    def check_whole(self, saves=False):
        """RuntimeError if an update has failed halfway. saves: unless it has made no step."""
        # gradients remain, some of them where zero_grad does not reach
        critic = self.critic
        failed = critic.steps_before is not None
        if failed and not (saves and critic.steps_before == critic.optimizer_steps):
            words = "build a new worker and load a checkpoint"
            raise RuntimeError(f"an earlier update failed halfway: {words}")

    def check_batch(self, batch, rows):
        """Raises UserError or ValueError for rows that do not fit, RuntimeError while offloaded."""
        self.check_ready()
        longest, row = max(zip(rows.length.tolist(), rows.row_id.tolist()), default=(0, -1))
        if longest > min(self.critic.max_tokens, self.critic.max_tokens_forward):
            self.set_budget(longest, f"row {row}")
        common.check_rows(batch, self.model_config)
        if any(batch.multi_modal_inputs or ()) and not self.critic.image_processor:
            raise ValueError("multi_modal_inputs: this critic reads text only")

    @torch.no_grad()
    def start_at_mean(self, batch, gamma):
        """Before the first step, makes every value of a new head the mean return, if
        --value-head-init is auto or mean. A loop that does not call this starts at random values.
        It also says if some returns are outside the value range.

        That is the mean over all ranks' actions (a collective). A batch without an action changes
        nothing, and takes no step, so the next batch decides."""
        self.check_ready()
        critic = self.critic
        if critic.optimizer_steps:
            return
        common.check_range(batch, gamma, critic.value_range)
        if not critic.at_mean:
            return

        # at the mean itself, the bias has no gradient, and rounding would decide in which direction
        # Adam moves it first; so it is rounded to a tenth of the returns' spread, or finer
        by_noise = self.config.value_weights == "noise"
        mean, spread = batch.mean_return(gamma, by_noise)
        if spread > 0:
            mean = round(mean, 1 - math.floor(math.log10(spread)))
        if not math.isnan(mean):
            critic.start_at(mean)

    @common.dp_compute_proto()
    def compute_values(self, batch, rows):
        """Values of the caller's rows: (T,) float32, zero where response_mask is false."""
        self.check_batch(batch, rows)
        return self.critic.compute_values(batch, rows)

    @common.dp_compute_proto(needs=("returns",), may_have=("values", "rollout_log_probs"))
    def update_critic(self, batch, rows):
        """One PPO update on the rows of all ranks -> metrics, equal on each.

        batch: the caller's rows, with old values and returns. If the update is one optimizer step,
        its own forward computes the old values, too: the batch needs none."""
        self.check_batch(batch, rows)
        config = self.config
        start = time.perf_counter()
        metrics = self.critic.update_critic(batch, rows)

        # what it has cost
        share = config.share_prompts and config.use_remove_padding
        flops = self.critic.passes * common.cost_of(rows, share, self.critic.flops)
        return metrics | common.describe_update(
            batch, rows, start, config.ppo_epochs, flops, self.layout
        )

    def check_values(self, batch):
        """UserError if values are not finite: an update has ruined the weights. Tries one row."""
        first = batch.actions.nonzero()[:1, 0].tolist()  # the first with an action
        finite = bool(self.compute_values(batch.select(first)).isfinite().all())
        if not all(of_all_ranks(finite)):
            raise UserError(
                "the critic's values are not finite after the last update, which is not saved:"
                f" take an earlier checkpoint and a lower {self.config.prefix}lr"
            )

    def offload(self):
        """Frees the device memory of weights, gradients and optimizer state, until onload.

        Meanwhile only checkpoints and exports work: they bring it back for a while."""
        if self.critic is None:
            raise RuntimeError("the critic has no model yet: call init_model() first")
        self.offloaded = True
        self.move()

    def onload(self):
        """Undoes offload."""
        self.offloaded = False
        self.move()

    def move(self):
        """Moves weights and optimizer state to the host, or back. Gradients are not kept."""
        common.onload(self.away)
        if self.offloaded:
            self.critic.free_gathered()
            self.critic.model.zero_grad()
            if self.config.strategy == "fsdp1":
                free_gradients_of_fsdp1(self.critic.model)
            moments = common.optimizer_moments(self.critic.optimizer)
            self.away = common.offload([*self.critic.model.parameters(), *moments])

    @contextmanager
    def on_device(self):
        """Brings an offloaded critic back for a while: collectives need its weights there."""
        offloaded = self.offloaded
        if offloaded:
            self.onload()
        self.check_ready(saves=True)
        yield
        if offloaded:
            self.offload()

    # checkpoints and export

    def save_checkpoint(self, folder):
        """Writes model, optimizer, schedule, RNG and counters; a folder that is complete or absent.

        It holds safetensors with transformers' names, no pickle: any layout of either critic reads
        them."""
        with self.on_device(), published(folder) as tmp:
            self.checkpoint_writer()(tmp)

    def checkpoint_writer(self, copy=False):
        """A function write(tmp, group) that saves the current state.

        copy: a snapshot, so training can go on before it is called."""
        self.check_ready(saves=True)
        critic = self.critic
        tensors, _, _ = checkpoint_tensors(critic.model, critic.optimizer, self.own_weights)
        if copy:
            tensors = {name: x.to("cpu", copy=True) for name, x in tensors.items()}
        state = {
            "updates": critic.updates,
            "optimizer_steps": critic.optimizer_steps,
            "shape": self.shape(),
        }

        def write(tmp, group=None):
            common.write_tensors(tmp, tensors, group)
            common.write_json(f"{tmp}/trainer.json", state)

        return write

    def load_checkpoint(self, folder):
        """Restores a checkpoint of either critic, on any layout.

        UserError: it is damaged, or of another model."""
        self.check_ready()
        critic = self.critic
        saved = common.open_checkpoint(folder, self.shape())
        tensors, model_state, optimizer_state = checkpoint_tensors(
            critic.model, critic.optimizer, self.own_weights
        )
        with blame(f"--resume {folder}: does not fit this critic"):
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(folder))
        state_dict.set_state_dict(
            critic.model,
            critic.optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
            options=state_dict.StateDictOptions(strict=False),  # a shared backbone is no part of it
        )
        torch.set_rng_state(tensors["rng"])
        critic.updates = saved["updates"]
        critic.optimizer_steps = saved["optimizer_steps"]

    def own_weights(self, state):
        """Of the model's state dict, what a checkpoint holds."""
        return own_weights(state) if shares_backbone(self.critic.model) else state

    def shape(self):
        """What a checkpoint and the run that resumes it must have in common."""
        return common.shape_of(self.model_config, what_trains(self.config))

    def export_hf(self, folder):
        """Writes the value model as a folder that AutoModelForTokenClassification loads.

        config.json holds the value_range, if any. LoRA adapters are merged. For an architecture
        without that class, the folder holds the backbone, and value_head.safetensors the head;
        --model reads both kinds."""
        state = {}  # the library's full_state_dict would crash FSDP1 on a CPU
        with self.on_device():
            for name, x in state_dict.get_model_state_dict(self.critic.model).items():
                if isinstance(x, dist.tensor.DTensor):  # not a buffer, nor FSDP1 on a single rank
                    x = x.full_tensor()  # one at a time; only rank 0 keeps it, on the host
                if RANK == 0:
                    x = x.detach().cpu().contiguous()
                    state[name] = x.float() if x.is_floating_point() else x

        with published(folder) as tmp:
            if RANK == 0:
                if self.config.lora_rank:
                    state = merge_lora(state, self.config, self.model_config)
                save_hf(state, common.exported_config(self.model_config), tmp)
                for part in filter(None, (self.critic.image_processor, self.tokenizer)):
                    part.save_pretrained(tmp)


def check_layout(config, world_size=WORLD_SIZE):
    """UserError unless the ranks can share the work as the flags say."""
    to = config.prefix
    flag = f"{to}ulysses-size {config.ulysses_size}"
    if config.ulysses_size > 1 and not config.use_remove_padding:
        raise UserError(f"{flag}: needs packed rows; drop {to}no-use-remove-padding")
    if world_size % config.ulysses_size:
        raise UserError(f"{flag}: must divide the {world_size} ranks")

    shards = world_size if config.fsdp_size == -1 else config.fsdp_size
    if shards < 1 or world_size % shards:
        flag = f"{to}fsdp-size {config.fsdp_size}"
        raise UserError(f"{flag}: must divide the {world_size} ranks, or be -1")
    if config.strategy == "fsdp1" and shards == 1 < world_size:  # FSDP1 would not average over them
        words = f"fsdp1 cannot keep whole replicas; use {to}strategy none"
        raise UserError(f"{to}fsdp-size 1: {words}")


def check_model_flags(config, model_config):
    """UserError for flags that do not fit this model, or for a model that cannot be built."""
    skeleton = build_skeleton(config, model_config)
    if config.strategy != "fsdp1":
        common.check_skipped_weights(skeleton, f"{config.prefix}strategy {config.strategy}")


def check_budget(config, longest, row):
    """The smallest budget for the longest row; UserError if a flag gives less. row: words that name
    it."""
    together, unit = row_sharing(config)
    least = (longest + -longest % unit) // together
    for name in ("ppo", "forward"):
        given = getattr(config, f"{name}_max_token_len_per_gpu")
        if isinstance(given, int) and given < least:
            flag = f"{config.prefix}{name}-max-token-len-per-gpu {given}"
            raise UserError(f"{flag}: {row} has {longest} tokens; give {least}")
    return least


def check_auto(config, device):
    """UserError if a budget is to be measured where nothing says how much memory there is."""
    if config.ppo_max_token_len_per_gpu == "auto" and device.type == "cpu":
        flag = f"{config.prefix}ppo-max-token-len-per-gpu auto"
        raise UserError(f"{flag}: on a CPU, give the memory per rank: auto:GIB")


# ---- Checkpoints and export ----------------------------------------------------------------------


def checkpoint_tensors(model, optimizer, own_weights=dict):
    """All state as one flat dict of tensors, and the two state dicts that hold these tensors.
    own_weights: picks what is saved of the model's state dict (dict: all)."""
    fresh = not optimizer.state
    optimizer.zero_grad()  # with gradients, get_state_dict would create no state
    model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
    if fresh:  # get_state_dict took an empty step to create the state: undo its count
        for state in (*optimizer.state.values(), *optimizer_state["state"].values()):
            if "step" in state:  # not every optimizer counts steps
                state["step"].zero_()

    model_state = own_weights(model_state)
    tensors = {f"model.{name}": x for name, x in model_state.items()}
    for name, state in optimizer_state["state"].items():
        tensors |= {f"optimizer.{name}.{key}": x for key, x in state.items()}
    tensors["rng"] = torch.get_rng_state()
    return tensors, model_state, optimizer_state


def save_hf(state, model_config, folder):
    """Writes a full state dict ("model.*", "score.*") as transformers' save_pretrained does."""
    classifies = type(model_config) in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    with torch.device("meta"):
        kind = transformers.AutoModelForTokenClassification if classifies else AutoModel
        skeleton = kind.from_config(model_config, dtype=torch.float32)

    # our prefixes -> those of the class; what it has no head for is a file of its own
    prefixes = {"model": "", "score": "score."}
    if classifies:
        prefixes["model"] = f"{skeleton.base_model_prefix}."
        if not hasattr(skeleton, "score"):
            prefixes["score"] = "classifier."
    else:
        head = {name: state.pop(name) for name in ("score.weight", "score.bias")}
        save_file(head, f"{folder}/value_head.safetensors", metadata={"format": "pt"})

    theirs = {}
    for name, x in state.items():
        part, _, rest = name.partition(".")
        theirs[prefixes[part] + rest] = x
    skeleton.save_pretrained(folder, state_dict=theirs)


# ---- Main: value pretraining from rollouts -------------------------------------------------------


def main(run):
    """Trains a critic on a file's rollouts, or only scores them; see Run."""
    config = run.critic
    if run.score:
        config = replace(config, value_head_init="checkpoint")
    worker = CriticWorker(config)
    train, held_out = load_rows(run, worker)

    # what fits on a GPU, but for models with a vision tower, whose memory auto does not see
    is_text = worker.model_config.get_text_config() is worker.model_config
    given = config.ppo_max_token_len_per_gpu or run.score
    if worker.device.type == "cuda" and is_text and not given:
        config = replace(config, ppo_max_token_len_per_gpu="auto")
        worker.config = config

    # the longest row must fit into a micro-batch
    longest, row = max(train.longest, held_out.longest)
    check_budget(config, longest, f"row {row + 1} of the training or held-out rows")

    # each update takes equally many episodes (see rows_of_step), and as many optimizer steps
    episodes = len(train.episodes())
    most = run.train_batch_size or config.ppo_mini_batch_size
    size = math.ceil(episodes / math.ceil(episodes / most))
    total = run.steps * config.ppo_epochs * math.ceil(size / config.ppo_mini_batch_size)
    source = run.score or run.rollouts or "the toy"
    kind = "rows" if train.episode is None else "episodes"

    checkpoints = common.Checkpoints(
        run.out_dir,
        run.resume,
        eval_every=run.eval_every,
        save_every=run.save_every,
        keep=run.keep,
        async_save=run.async_save,
        timeout_minutes=config.timeout_minutes,
    )
    with checkpoints:
        ends = common.describe_rows(train, run.gamma, source, worker.tokenizer)
        worker.init_model(1 if run.score else total, ends)
        if checkpoints.folder:
            worker.load_checkpoint(checkpoints.folder)
        worker.set_budget(longest, "the longest row", checkpoints.halvings)

        if run.score:
            train.values = common.compute_together(worker, train)
            keys = {"response": run.response_key, "reward": run.reward_key}
            more = (worker.tokenizer, run.gamma, keys, run.rows)
            common.write_scores(run.score, run.out_dir, train, *more)
            return

        print0(
            f"steps      {run.steps} updates x {size} {kind},"
            f" mini-batches of at most {min(size, config.ppo_mini_batch_size)},"
            f" {total} optimizer steps, lr {worker.critic.peak_lr:g}"
        )
        shown, about = learn(run, worker, train, held_out, size, checkpoints)
        worker.export_hf(f"{run.out_dir}/hf")
        common.write_report(run.out_dir, shown, about, worker.tokenizer, run.gamma)
        files = f"checkpoints/step_{run.steps}, hf, report.html, metrics.jsonl, tensorboard"
        print0(f"saved      {run.out_dir}: {files}")


def row_reader(run, worker):
    """common.read_rows with what this run's flags and this critic's model say of rows."""
    options = {
        "tokenizer": worker.tokenizer,
        "model_config": worker.model_config,
        "hint_key": run.privileged_key,
        "keys": {"prompt": run.prompt_key, "response": run.response_key, "reward": run.reward_key},
        "chat": common.json_object("--chat-template-kwargs", run.chat_template_kwargs),
        "last_turn_only": run.last_turn_only,
        "convert": run.rows,
    }
    if processor := load_image_processor(run.critic, worker.model_config):
        token = worker.model_config.image_token_id
        options["place_images"] = partial(place_images, processor, token)
    return partial(common.read_rows, **options)


def load_rows(run, worker):
    """(rows to train on or to score, rows to evaluate on), from files or the toy task. There may be
    no rows to evaluate on."""
    read = row_reader(run, worker)
    if run.score:
        train = read(run.score, flag="--score")
        return train, train
    if run.rollouts:
        train = read(run.rollouts)
        held_out = run.eval_rollouts
    else:
        train = read(common.toy_rows(4096, run.critic.seed))
        tokenizer = worker.tokenizer
        toy = common.toy_rows(512, run.critic.seed, held_out=True, tokenizer=tokenizer)
        held_out = run.eval_rollouts or toy
    if run.critic.value_weights == "noise" and train.rollout_log_probs is None:
        raise UserError("--value-weights noise: some rows of --rollouts have no log_probs")
    if not held_out:
        return train, train.select([])
    return train, read(held_out, flag="--eval-rollouts")


def needs_values(run, size):
    """Whether values are computed before an update of `size` episodes.

    Returns may need them. So does an update of several steps; an update of one step computes them
    in its own forward."""
    c = run.critic
    one_step = c.ppo_epochs == 1 and size <= c.ppo_mini_batch_size
    return run.lam < 1 or run.bootstrap_truncated or not one_step


def learn(run, worker, train, held_out, size, checkpoints):
    """Trains from the checkpoint's step on, evaluates and saves -> (rows with values, words).

    The rows are for the report, and the words say which they are. size: episodes of an update."""
    first_step = worker.critic.updates
    if first_step > run.steps:
        words = f"{checkpoints.folder} has made {first_step} already; give more"
        raise UserError(f"--steps {run.steps}: {words}")
    logger = common.Logger(run.out_dir, asdict(run), first_step, checkpoints.folder, run.logger)
    groups = train.groups()
    picked = []  # those of an update, each a list of rows
    batch = None  # those of them that this rank has
    checkpoints.begin()

    for step in logger.profiled(range(first_step, run.steps + 1), run.profile_step):
        signal_number = max(of_all_ranks(common.Stop.signal))  # one of SIGNALS, or 0
        ends = step == run.steps or signal_number > 0

        # the rows of the next update; before the first one, a new head starts at their mean return
        if not ends:
            picked = common.rows_of_step(step, groups, size, run.critic.seed)
            batch = train.select(list(itertools.chain(*picked[RANK::WORLD_SIZE])))
            worker.start_at_mean(batch, run.gamma)

        # evaluate
        evaluates = step == run.steps or step % (run.eval_every or run.steps) == 0
        if len(held_out) and evaluates:
            held_out.values = common.compute_together(worker, held_out)
            logger.log_evaluation(step, held_out, run.gamma)

        # save
        saves = checkpoints.every and step % checkpoints.every == 0
        if step > first_step and (ends or saves):
            worker.check_values(batch)
            logger.flush()
            checkpoints.save(step, worker.checkpoint_writer(copy=run.async_save))
        checkpoints.wait(block=ends)

        # stop
        if ends:
            break

        # one update
        before = needs_values(run, len(picked))
        batch.values = worker.compute_values(batch) if before else None
        common.add_returns(batch, run.gamma, run.lam, run.bootstrap_truncated)
        metrics = worker.update_critic(batch)
        logger.check_progress(metrics)
        logger.log_update(step + 1, run.steps, metrics)

    if step < run.steps:
        checkpoints.leave(step, signal_number)
    common.listen_no_more()

    # what the report shows
    if len(held_out):
        return held_out, "held-out rows"
    rows = train.select(list(itertools.chain(*picked)))
    rows.values = common.compute_together(worker, rows)
    return rows, "rows of the last update"


# ---- Ulysses: ranks that share a row -------------------------------------------------------------
#
# A closed chapter behind --ulysses-size. It is called from attention_of (by the name "ulysses"),
# from build_value_model (slice_row), from DataParallelPPOCritic.forward (gather_slices), and from
# build_skeleton (gather_slices and add_slices, for recurrent layers).


def slice_row(decoder, args, kwargs):
    """A forward pre-hook: each rank of a group that shares a row continues with its slice.

    It runs at the decoder's input, after a vision tower, which every rank runs on all images."""
    group = common.CurrentPack.group
    if not group or kwargs.get("position_ids") is None:  # none: Policy.read asks for the head alone
        return None
    p = dist.get_world_size(group)
    rank = dist.get_rank(group)

    sliced = {"position_ids": kwargs["position_ids"].chunk(p, -1)[rank]}
    for key in ("input_ids", "inputs_embeds", "visual_pos_masks"):
        if kwargs.get(key) is not None:
            sliced[key] = kwargs[key].chunk(p, 1)[rank]

    # Qwen3-VL's deepstack: one row of features per image token
    if "visual_pos_masks" in sliced:
        counts = [int(mask.sum()) for mask in kwargs["visual_pos_masks"].chunk(p, 1)]
        features = kwargs["deepstack_visual_embeds"]
        sliced["deepstack_visual_embeds"] = [x.split(counts)[rank] for x in features]
    return args, kwargs | sliced


def gather_slices(x, group):
    """(T/p, ...) slices of a group's ranks -> (T, ...) on each; backward adds up gradients."""
    copies = torch.cat([x] * dist.get_world_size(group))  # one for each rank
    out = collectives.all_to_all_single_autograd(copies, None, None, group)
    return collectives.wait_tensor(out)


def add_slices(x, group):
    """(T, ...) on each of a group's ranks -> (T/p, ...) each rank's slice of their sum."""
    slices = collectives.all_to_all_single_autograd(x, None, None, group)
    return collectives.wait_tensor(slices).unflatten(0, (dist.get_world_size(group), -1)).sum(0)


@torch.compiler.disable
def ulysses_attention(module, query, key, value, attention_mask, s_aux=None, **options):
    """common.packed_attention for ranks that share the row (DeepSpeed-Ulysses, 2309.14509).

    Each rank enters with its slice of the row and all heads, computes the whole row for its slice
    of the heads, and returns its slice of the row: q (1, H, T/p, D) -> (1, T/p, H, D). Model code
    does not change."""
    group = common.CurrentPack.group
    if not group:  # the actor, whose backbone the critic shares
        return common.packed_attention(
            module, query, key, value, attention_mask, s_aux=s_aux, **options
        )
    p = dist.get_world_size(group)
    repeat = p // math.gcd(key.shape[1], p)  # fewer key heads than ranks: several get the same
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))

    # give heads, get tokens
    traded = [trade(x.to(value.dtype), group, 1, 2) for x in (query, key, value)]
    if s_aux is not None:  # attention sinks, one per head (gpt-oss)
        s_aux = s_aux.chunk(p)[dist.get_rank(group)]
    out_1THD, _ = common.packed_attention(module, *traded, attention_mask, s_aux=s_aux, **options)

    # give tokens, get heads
    return trade(out_1THD, group, 1, 2), None


transformers.AttentionInterface.register("ulysses", ulysses_attention)


def trade(x, group, scatter, gather):
    """All-to-all: splits x along one axis over ranks, joins the pieces along another.

    The backward undoes it."""
    p = dist.get_world_size(group)
    pieces = torch.cat(x.chunk(p, scatter))
    out = collectives.wait_tensor(collectives.all_to_all_single_autograd(pieces, None, None, group))
    return torch.cat(out.chunk(p), gather)


# ---- LoRA and frozen weights ---------------------------------------------------------------------
#
# A closed chapter behind --lora-rank, --lora-alpha and --freeze-modules. It is called from
# build_skeleton (freeze), `shape` (what_trains) and export_hf (merge_lora). build_skeleton and
# read_weights call common.add_lora. In shard_fsdp1 both have units of their own (adapter, frozen).
# A critic on another model's backbone comes from build_value_model (share_backbone), and
# checkpoint_tensors leaves the rest of that model out (own_weights).


def freeze(model, config):
    """Freezes the weights in whose names --freeze-modules has a match.

    A checkpoint has the same names after a leading "model."; frozen weights get no gradient and no
    optimizer state."""
    pattern = config.freeze_modules
    if not pattern:
        return
    with blame(f"{config.prefix}freeze-modules {pattern}"):
        frozen = [p for name, p in model.named_parameters() if re.search(pattern, name)]
        if len(frozen) in (0, len(list(model.parameters()))):
            raise ValueError("must match some of the weights, but not all")
    for p in frozen:
        p.requires_grad_(False)


def what_trains(config):
    """The flags that decide which weights train. A resumed run must have the same."""
    flags = {"freeze_modules": config.freeze_modules}
    if config.lora_rank:
        flags |= {"lora_rank": config.lora_rank, "lora_alpha": config.lora_alpha}
    return flags


ADAPTER = "critic"  # the name of the critic's adapters in a backbone that it shares


def share_backbone(backbone, config, model_config):
    """build_value_model, but with another model's backbone. Only the head is new, and spread over
    the same ranks. Without adapters, nothing else learns: it is a probe."""
    model = ValueModel(backbone, model_config.num_labels)
    take_turn = partial(common.use_adapter, backbone, ADAPTER if config.lora_rank else None)
    model.register_forward_pre_hook(lambda *_: take_turn())
    take_turn()
    words, at_mean = common.init_value_head(model.score, config, model_config)
    weight = next(backbone.parameters())
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    fsdp.fully_shard(model.score.to(weight.device), mesh=weight.device_mesh, mp_policy=policy)
    story = "with adapters of its own" if config.lora_rank else "which only the actor changes"
    return model, f"the actor's weights, {story}; {words}", at_mean


def shares_backbone(model):
    """Whether the backbone is another model's."""
    return not isinstance(model, fsdp.FSDPModule | fsdp.FullyShardedDataParallel)


def own_weights(state):
    """Of the state dict of a critic that shares a backbone, its head and its adapters."""
    own = lambda name: name.startswith("score.") or f".{ADAPTER}." in name
    return {name: x for name, x in state.items() if own(name)}


def merge_lora(state, config, model_config):
    """Full state dict with adapters -> one of the same function without them: W + alpha / r B A."""
    own = own_weights(state)
    if any(".lora_" in name for name in own):  # next to those of another model
        state = {name: x for name, x in state.items() if ".lora_" not in name}
        state |= {name.replace(f".{ADAPTER}.", ".default."): x for name, x in own.items()}
    model = build_skeleton(config, model_config).to_empty(device="cpu")
    model.load_state_dict(state)
    for module in model.modules():
        if hasattr(module, "merge"):
            module.merge()

    merged = {}
    for name, x in model.state_dict().items():
        if ".lora_" not in name:
            merged[name.replace(".base_layer", "")] = x
    return merged


# ---- Images --------------------------------------------------------------------------------------
#
# A closed chapter for rows with images; it has no flag. It is called from build_skeleton and
# shard_fsdp1 (reads_images), DataParallelPPOCritic.build and load_rows (load_image_processor,
# place_images), and lay_out (with_images). critic.image_processor is also read in init_model, in
# check_batch, which must go on refusing images, and in export_hf. Only images need needs_grad with
# its hook, the visual keys in slice_row, and "visual" in shard_fsdp1. ppo_loop.py calls four of
# these functions, too.


def reads_images(config, model_config):
    """Whether this script reads images with this model; with all others it reads text only."""
    kinds = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    text_only = isdir(config.model) and not exists(f"{config.model}/preprocessor_config.json")
    return model_config.model_type in kinds and not text_only


def load_image_processor(config, model_config):
    """The Pillow processor that all these models share, for equal pixels; None: reads text only."""
    if not reads_images(config, model_config):
        return None
    if config.model in common.TINY:
        return Qwen2VLImageProcessorPil(patch_size=model_config.vision_config.patch_size)
    name = f"{config.prefix}model {config.model}"
    with blame(f"{name}: its preprocessor_config.json does not load"):
        return Qwen2VLImageProcessorPil.from_pretrained(config.model)


def place_images(image_processor, image_token_id, rollout, folder):
    """Prepares a row with images: absolute paths, and a placeholder for each token of an image.

    The placeholders of a text prompt, one for an image, are repeated; this reads the images once.
    UserError: placeholders and images do not fit."""
    sizes = []  # tokens of each image
    if rollout.images:
        for i, name in enumerate(rollout.images):
            if not name.startswith("data:"):
                rollout.images[i] = f"{Path(folder, name).absolute()}"
        with blame(f"images {rollout.images!s:.200}"):
            grids = read_images({"images": rollout.images}, image_processor)["image_grid_thw"]
        # merge_size x merge_size patches are one token
        sizes = (grids.prod(1) // image_processor.merge_size**2).tolist()

    if rollout.prompt or rollout.messages:
        count = iter(sizes)
        ids = []
        for i in rollout.prompt_ids:
            ids += [i] * (next(count, 1) if i == image_token_id else 1)
        rollout.prompt_ids = ids

    # now the runs of placeholders are as long as the images
    ids = rollout.prompt_ids + rollout.response_ids
    runs = []
    for is_image, run in itertools.groupby(ids, image_token_id.__eq__):
        if is_image:
            runs.append(len(list(run)))
    if runs != sizes:
        words = f"placeholders come in runs of {runs or 0} tokens, but its images have {sizes or 0}"
        raise UserError(words)


def with_images(backbone, rows, image_processor):
    """(positions, pixels or {}) of rows with their images.

    positions: (4, T), in text, time, height and width. pixels: arguments of the model."""
    images = rows.multi_modal_inputs or [{}] * len(rows)
    images = [read_images(row, image_processor) for row in images]
    positions = []
    for ids, row in zip(rows.input_ids.split(rows.lengths), images):
        is_image = (ids == backbone.config.image_token_id).int()[None]
        grid = row.get("image_grid_thw")
        thw, _ = backbone.get_rope_index(ids[None], is_image, image_grid_thw=grid)
        positions.append(torch.cat([torch.arange(len(ids))[None], thw[:, 0]]))

    pixels = {}
    if any(images):
        for key in ("pixel_values", "image_grid_thw"):
            pixels[key] = torch.cat([row[key] for row in images if row])
    return torch.cat(positions, 1), pixels


def read_images(row, image_processor):
    """One row's multi_modal_inputs -> its pixel_values and image_grid_thw.

    These are (patches, features) and (images, 3). A JSONL row has {"images": [absolute file name or
    data URL]}; each forward reads them, to save memory."""
    if "images" not in row:
        return row
    return dict(image_processor(images=[load_image(x) for x in row["images"]], return_tensors="pt"))


# ---- Whole weights and compiled blocks -----------------------------------------------------------
#
# A closed chapter behind --keep-gathered, --defer-grad-sync and --compile. It is called from
# shard_fsdp2 (stays_whole), forward_backward (keep_whole) and DataParallelPPOCritic.build
# (compile_blocks), and check_model tells how long that took.


def stays_whole(config):
    """Whether ranks keep (gathered weights, whole gradients) from one micro-batch to the next.

    If a rank's shard is the whole, it does: that saves copies, and takes no memory for gradients,
    and that of a copy in the dtype of products for weights."""
    if config.strategy == "fsdp1":
        return False, False
    one_shard = shards_of(config, WORLD_SIZE) == 1 and not config.offload_policy
    return config.keep_gathered or one_shard, config.defer_grad_sync or one_shard


def keep_whole(model, config, last):
    """Tells FSDP2 what to keep after the next backward.

    last: whether it is the last micro-batch before weights change. Then nothing is kept."""
    gathers_once, reduces_once = stays_whole(config)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_reshard_after_backward(last or not gathers_once, recurse=False)
            module.set_requires_gradient_sync(last or not reduces_once, recurse=False)


def compile_blocks(model, config, model_config, device, total_steps):
    """Compiles the forward of each block of a skeleton, for rows of any lengths -> whether it does.

    auto: if it is known to pay, and the run has time for it. In place, because the call of a
    compiled module would take FSDP's hooks in."""
    dense = not any(".experts." in name for name, _ in model.named_parameters())
    gains = dense and not reads_images(config, model_config) and config.ulysses_size == 1
    is_long = config.model not in common.TINY and (total_steps or 0) > 20
    can = has_triton() and any(map(which, (os.environ.get("CC", "cc"), "gcc", "clang")))
    pays = device.type == "cuda" and gains and is_long and can
    if config.compile == "off" or (config.compile == "auto" and not pays):
        return False

    torch.fx.experimental._config.use_duck_shape = False  # two lengths may be equal by chance
    torch._dynamo.config.recompile_limit = 64  # above it, blocks run uncompiled
    for block in units_of(model):
        block.forward = torch.compile(block.forward, dynamic=True)
    return True


# ---- Activations on the host ---------------------------------------------------------------------
#
# A closed chapter behind --activation-offload. It is called from forward_backward.


def activations_on_host(config):
    """With --activation-offload, what a forward saves for the backward is kept on the host."""
    if config.activation_offload:
        return torch.autograd.graph.saved_tensors_hooks(copy_to_host, copy_to_device)
    return nullcontext()


def copy_to_host(x):
    """(the memory of x on the host, what copy_to_device needs). Strides stay, because a kernel's
    backward may rely on them: that of attention wants a mask whose rows are aligned.

    save_on_cpu of torch forgets them, and that of torch 2.11 waits for each copy."""
    # numbers from its first to its last; of a narrow part of a large tensor only its own
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
    if not x.numel() or extent > 2 * x.numel() + 1024:
        x = x.contiguous()
        extent = x.numel()

    flat = x.detach().as_strided((extent,), (1,))
    on_host = torch.empty(extent, dtype=x.dtype, pin_memory=x.is_cuda)
    return on_host.copy_(flat, non_blocking=True), x.device, x.shape, x.stride()


def copy_to_device(saved):
    """Undoes copy_to_host."""
    on_host, device, shape, strides = saved
    return on_host.to(device, non_blocking=True).as_strided(shape, strides)


# ---- FSDP1 ---------------------------------------------------------------------------------------
#
# A closed chapter behind --strategy fsdp1. It is called from build_value_model (shard_fsdp1),
# free_gathered (free_gathered_by_fsdp1) and move (free_gradients_of_fsdp1). forward_backward,
# optimizer_step and check_model_flags have a branch each, Config and check_layout its rules, and a
# warnings filter is for it (NO_SHARD).


def shard_fsdp1(model, config, layout):
    """Shards a model on meta by the older FullyShardedDataParallel; the weights are still empty."""
    mesh = layout.fsdp_mesh
    policy = partial(fsdp.MixedPrecision, reduce_dtype=torch.float32)
    units = dict.fromkeys(units_of(model), True)
    units[model.score] = {"mixed_precision": policy(param_dtype=torch.float32)}

    # all weights of a unit train or none, so adapters and frozen embeddings get units of their own
    own = {"mixed_precision": policy(param_dtype=layout.dtype, cast_forward_inputs=True)}
    for name, module in model.named_modules():
        adapter = ".lora_" in name and isinstance(module, nn.Linear)
        frozen = config.freeze_modules and isinstance(module, nn.Embedding)
        if "visual" not in name and (adapter or frozen):
            units[module] = own
    if not reads_images(config, model.model.config):  # then a tower is frozen
        for child in model.model.children():
            weights = list(child.parameters())
            if weights and not any(p.requires_grad for p in weights):
                units[child] = own

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


def free_gathered_by_fsdp1(model):
    """Frees the weights that FSDP1 has gathered; on a single rank it only resets views."""
    for handle in model._all_handles:
        handle.reshard(handle.uses_sharded_strategy)


def free_gradients_of_fsdp1(model):
    """Frees the gradients; zero_grad() clears only views of them."""
    for handle in model._all_handles:
        handle.flat_param.grad = None


# ---- Packing: which attention a model gets, and a check that it works ----------------------------
#
# A closed chapter, because transformers has hundreds of models and no list of those whose rows can
# be packed. It is called from build_skeleton (attention_of, padding_advice) and from init_model
# (check_model, which calls common.check_rows_apart).


def attention_of(config, model_config):
    """The decoder's attn_implementation (None: transformers' choice). Vision towers keep theirs."""
    soft_cap = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    name = None
    if config.use_remove_padding:
        name = "ulysses" if config.ulysses_size > 1 else "packed"
    elif soft_cap:
        name = "eager"  # sdpa would ignore it

    if model_config.get_text_config() is not model_config:
        return {"": name, "text_config": name}
    return name


def padding_advice(config):
    """What may help a model that fails while its rows are packed; nothing if they are padded."""
    if config.use_remove_padding:
        return f"; try {config.prefix}no-use-remove-padding"
    return ""


@torch.no_grad()
def check_model(worker):
    """UserError unless rows have the hidden states together that they have alone."""
    start = time.perf_counter()
    config = worker.config
    critic = worker.critic
    decoder = critic.model.model.get_decoder()
    kernel = decoder.config._attn_implementation

    def states_of(rows, alone=False):
        micro = critic.micro_batch(rows)
        stance = "default"
        if alone:  # as it comes from transformers
            micro = micro._replace(pack=None)
            decoder.set_attn_implementation("eager")
            stance = "force_eager"

        # what the decoder gives to the head
        seen = []
        note = lambda module, args, out: seen.append(out.last_hidden_state.flatten(0, 1))
        with torch.compiler.set_stance(stance), decoder.register_forward_hook(note):
            critic.forward(micro)
        decoder.set_attn_implementation(kernel)

        states_SD = seen[0]  # to read its head, an actor calls the decoder again
        if common.CurrentPack.group:
            states_SD = gather_slices(states_SD, common.CurrentPack.group)
        return states_SD[micro.index_T].float()

    critic.model.eval()
    advice = padding_advice(config)
    if critic.compiled:
        advice = f"; try {config.prefix}compile off"
    off = common.check_rows_apart(
        f"{config.prefix}model {config.model}: {type(critic.model.model).__name__}",
        states_of,
        worker.layout.dtype,
        worker.model_config.get_text_config().vocab_size,
        advice=advice,
        unit=worker.layout.sp_size,
    )
    critic.free_gathered()
    name = common.CurrentPack.kernel or "padded"
    print0(f"attention  {name}; rows together differ from rows alone by {off:.0e}")

    # that was the first forward, and this is the first backward
    if critic.compiled:
        with torch.enable_grad():
            worker.try_out(Batch.blank(4).select([0, 0]))
        critic.optimizer.zero_grad()
        print0(f"compile    the blocks, in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    common.launch(lambda: main(RUN))
