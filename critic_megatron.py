"""A PPO critic for language models on Megatron-Core: one value model, one update, any layout.

    python critic_megatron.py                             toy task, a tiny model, a laptop CPU
    torchrun --nproc-per-node 2 critic_megatron.py --tensor-model-parallel-size 2
    torchrun --nproc-per-node 8 critic_megatron.py --model Qwen/Qwen2.5-7B \\
        --rollouts train.jsonl --eval-rollouts eval.jsonl --tensor-model-parallel-size 4 \\
        --gradient-checkpointing --out-dir out/7b

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
from os.path import realpath
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
compiler_is_off = os.environ.get("TORCHDYNAMO_DISABLE", "")
if not torch.cuda.is_available():
    # torch.compile gives Megatron its small functions back as they are: it would take minutes
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # so that it overlaps communication
megatron_words = "(full scope|`torch.distributed.*|TypedStorage) is deprecated|The .grad attribute"
warnings.filterwarnings("ignore", f"{megatron_words}|moe_ffn_hidden_size is")  # of 0.16.1
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")

try:
    from megatron.core import parallel_state as mpu
except ImportError as error:  # there is no wheel of it for Python 3.14
    words = "no megatron-core here: pip install megatron-core==0.16.1 (Python 3.11 to 3.13)"
    if __name__ == "__main__":
        print(f"error: {words}; or use critic_fsdp.py" if speaks else "", file=sys.stderr)
        sys.exit(2)
    raise ImportError(words) from error

import json
import logging

from megatron.core import optimizer as megatron_optimizer
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
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

rotated = torch.compile(apply_rotary_pos_emb)  # on CUDA, like Megatron's own; it has 12 operations
os.environ["TORCHDYNAMO_DISABLE"] = compiler_is_off  # what others compile later is compiled
logging.getLogger("megatron.core").setLevel(logging.ERROR)  # advice for its own developers

import common
from common import RANK, WORLD_SIZE, Batch, Pack, UserError, blame, of_all_ranks, print0, published

transformers.logging.set_verbosity_error()  # the run prints one line about the weights
transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a rank that reads alone


# ---- Value model: a decoder and a value head in float32 ------------------------------------------


class ValueHead(nn.Linear):
    """v = w . h + b on the hidden state of every token, in float32, in place of GPTModel's head.
    Tensor-parallel ranks have a copy each. A head of N outputs, in a fork, gives N numbers."""

    def __init__(self, config, outputs):
        super().__init__(config.hidden_size, outputs)
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_SBD, **_):
        """(S, B, D) hidden states -> (S, B, N) float32, and None."""
        out_SBN = F.linear(hidden_SBD.float(), self.weight, self.bias)

        # all ranks compute the whole loss; the backward keeps each rank's own slice
        if self.weight.sequence_parallel:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            out_SBN = gather(out_SBN, tensor_parallel_output_grad=False)
        return out_SBN, None


class CoreAttention(nn.Module):
    """Causal attention within each sequence of a packed row, by the kernels of common.py.

    Rotary embedding is that of transformers, of all features or of some (Phi-3): Megatron's would
    restart at 0 where a row continues a shared prompt. With context parallelism, each rank has two
    pieces of the row, see share_context: keys and values are gathered, and each piece sees the keys
    up to its own end, so heads are not split."""

    def __init__(self, config, layer_number, **_):
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.window = None  # a query sees at most this many tokens
        if config.window_size and config.window_attn_skip_freq[layer_number - 1]:
            self.window = config.window_size[0] + 1  # Megatron counts those before it

        # gpt-oss has a sink for each head, which takes a part of its attention
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // mpu.get_tensor_model_parallel_world_size()
            sinks = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            tensor_parallel.set_tensor_model_parallel_attributes(sinks, True, dim=0, stride=1)
            self.softmax_offset = sinks

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **_):
        """(S, H, D), keys and values (S, K, D) -> (S, H D)."""
        reads = packed_seq_params  # see MicroBatch
        query, key = rotated(query, key, *reads.rotary)
        if mpu.get_context_parallel_world_size() > 1:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            key, value = (gather(x, group=mpu.get_context_parallel_group()) for x in (key, value))

        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        options = {"window": self.window, "sinks": self.softmax_offset}
        out_1HSD = common.attention(reads.pack, query, key, value, self.scale, **options)
        return out_1HSD[0].transpose(0, 1).flatten(1)


def build_skeleton(config, model_config):
    """transformers' model and the head on the meta device: names and sizes of the weights.

    A weight requires a gradient if --freeze-modules lets it train."""
    with torch.device("meta"):
        backbone = AutoModel.from_config(model_config, dtype=torch.float32)
        head = nn.Linear(model_config.hidden_size, model_config.num_labels)
    skeleton = nn.ModuleDict({"model": backbone, "score": head})
    for name, p in skeleton.named_parameters():
        p.requires_grad_(not freezes(config, name))
    return skeleton


def read_weights(config, model_config):
    """(tensors by their names in critic_fsdp.py, words on their origin, whether the head starts at
    the mean return).

    A rank reads only the tensors that it needs. Random weights are those of critic_fsdp.py, so
    every rank draws the whole model."""
    head = nn.Linear(model_config.hidden_size, model_config.num_labels)
    if config.model in common.TINY:
        torch.manual_seed(config.seed)
        backbone = AutoModel.from_config(model_config, dtype=torch.float32)
        tensors = {f"model.{name}": x for name, x in backbone.state_dict().items()}
        origin = f"random weights (seed {config.seed})"
    else:
        flag = f"{config.prefix}model"
        with blame(f"{flag} {config.model}: its weights do not load"):
            tensors = StoredTensors(common.local_folder(config.model), "model.", flag)
        common.refuse_scales(tensors, f"{flag} {config.model}")
        origin = f"{len(tensors)} tensors from {config.model} (no optimizer state)"

    words, at_mean = common.init_value_head(head, config, model_config)
    score = {f"score.{name}": x for name, x in head.state_dict().items()}
    return collections.ChainMap(score, tensors), f"{origin}; {words}", at_mean


def count_parameters(module):
    """(all parameters, trainable parameters)."""
    count = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return count, trained


# ---- Parallelism: which ranks share what, and the model spread over them -------------------------


class Layout(NamedTuple):
    """Ranks form a tp x cp x dp x pp grid.
    tp ranks split each matrix product, cp ranks each sequence, pp the layers, and dp groups the
    rows. Experts are spread over the same ranks in their own way (ep x etp)."""

    device: torch.device
    dtype: torch.dtype  # of matrix products, and of frozen weights; what trains is float32
    dp_rank: int
    dp_size: int
    tp_rank: int
    cp_rank: int
    dp_ranks: list  # the dp_rank of each rank
    gives_values: list  # for each rank, whether it gives values back: one of those that share a row


def make_layout(config, device):
    """The Layout of this rank, with its process groups (a collective).

    Groups of an earlier worker are used again if they fit. They are global: a worker of another
    layout cannot be used after this."""
    megatron_without_cuda()
    if not has_groups(config):
        end_groups()
        mpu.initialize_model_parallel(
            **parallel_sizes(config),
            distributed_timeout_minutes=config.timeout_minutes,
            create_gloo_process_groups=False,  # for optimizer checkpoints of a kind not used here
        )

    # Megatron requires a seed; unused, because all weights are filled in later and dropout is off
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


def build_value_model(skeleton, config, model_config, layout):
    """This rank's chunks of the model, one for each virtual stage; the weights are still empty."""
    modules = []
    tp = config.tensor_model_parallel_size
    with blame(f"{config.prefix}model {config.model}: cannot be built with these parallel sizes"):
        transformer = transformer_config(config, model_config, skeleton, layout.dtype)
        for vp_stage in range(config.virtual_pipeline_model_parallel_size):
            module = GPTModel(
                transformer,
                layer_spec(transformer, vp_stage),
                vocab_size=math.ceil(model_config.vocab_size / tp) * tp,
                max_sequence_length=model_config.max_position_embeddings,
                position_embedding_type="none",  # see CoreAttention
                pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                vp_stage=vp_stage,
            )
            module.family = model_config.model_type  # see hf_names
            modules.append(module)

    last = modules[-1]  # the head is in the last chunk of the last stage
    if last.post_process:
        last.output_layer = ValueHead(transformer, model_config.num_labels)
    freeze(modules, config)
    return modules


def needs_grad(module, args, output):
    """A forward hook of the embedding: if it is frozen, the layers behind it still run their whole
    backward."""
    output.requires_grad_()


def wrap(module):
    """Wraps a chunk, to cast its inputs and to accumulate and reduce its gradients in float32."""
    # of experts; Megatron sets these for some layouts only, and does not split experts with biases
    for name, p in module.named_parameters():
        if ".experts." in name:
            p.allreduce = False  # reduced over the experts' replicas
            p.sequence_parallel = False  # and not again over tensor-parallel ranks
            p.tensor_model_parallel = True  # no copy of another rank's: it counts in the norm
    for part in module.modules():
        if getattr(part, "is_expert", False):
            part.explicit_expert_comm = True  # else a bias would be added in place, to a view

    if module.pre_process:
        module.embedding.register_forward_hook(needs_grad)

    # the head, and the correction of a router, stay in float32
    chunk = Float16Module(module.config, module) if module.config.bf16 else module
    if module.post_process:
        module.output_layer.float()
    for name, buffer in module.named_buffers():
        if name.endswith("expert_bias"):
            buffer.data = buffer.data.float()

    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(module.config, options, chunk)


def padding_row(module, model_config):
    """The padding token's row in this rank's part of the embedding, or None if it trains none."""
    if not module.pre_process or model_config.pad_token_id is None:
        return None
    embedding = module.embedding.word_embeddings
    token = model_config.pad_token_id % model_config.vocab_size  # a negative id counts from the end
    row = token - embedding.vocab_start_index
    return row if embedding.weight.requires_grad and 0 <= row < len(embedding.weight) else None


# ---- Batching: rows over ranks, a rank's rows over micro-batches ---------------------------------


class MicroBatch(NamedTuple):
    """Rows on the device, as the model reads them.

    Columns have N entries, or are None; where response_mask is false they may hold anything, even
    NaN. A slot is a token or padding of this rank. An entry is about a token whose value is read
    from a slot of this rank; without context parallelism, these are all T tokens of the rows."""

    ids_1S: torch.Tensor
    reads: PackedSeqParams  # what CoreAttention reads: pack, a common.Pack, and rotary, two tables
    index_N: torch.Tensor  # which of the T tokens
    slot_N: torch.Tensor  # where its value is read, see shift
    tokens: int  # T
    response_mask: torch.Tensor
    values: torch.Tensor | None
    returns: torch.Tensor | None
    weights: torch.Tensor | None  # see common.loss_weights
    rows: Batch  # the same rows on the host, with every column


def shift(x_T):
    """Moves the slots of tokens one place to the right, to the actions whose values are read there.

    The value of an action is read from the hidden state *before* it. The first token of a row is
    never an action, so nothing crosses into another row:

        token            p0   p1   a0   a1   o0   a2
        response_mask    0    0    1    1    0    1
        slots            0    1    2    3    4    5       where the hidden state after each token is
        result           .    0    1    2    3    4       . is never read"""
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
    # each of p context-parallel ranks has two of 2 p equal pieces
    ranks = config.context_parallel_size
    unit = 2 * ranks if ranks > 1 else 1
    if splits_sequence(config):
        unit *= config.tensor_model_parallel_size
    return ranks, unit


# ---- The critic: forward, loss, step -------------------------------------------------------------


class MegatronPPOCritic:
    """Values and updates of a value model.

    compute_values and update_critic take the rows that this rank has, and the Rows of all ranks;
    each rank fetches the rows that it computes. A fork overrides build, forward, values, weights_of
    or loss."""

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

        # the model
        self.modules = build_value_model(skeleton, config, model_config, layout)
        self.transformer = self.modules[0].config
        self.padding_row = padding_row(self.modules[0], model_config)
        self.rotary = type(skeleton["model"].rotary_emb)(model_config).to(layout.device)
        self.model = nn.ModuleList(map(wrap, self.modules)).to(layout.device)  # what trains
        self.image_processor = None  # this script reads text only
        tensors, origin, self.at_mean = read_weights(config, model_config)
        percent = f"{trained / count:.2%}"
        self.story = f"{count:,} parameters, {trained:,} of them ({percent}) train: {origin}"

        # the optimizer
        self.optimizer = build_optimizer(self.model, config, self.peak_lr)
        self.optimizers = self.optimizer.chained_optimizers  # one for experts, one for the rest
        self.masters = find_masters(self.optimizers)
        fill(self, tensors, f"{config.prefix}model {config.model}")

    def plan_micro_batches(self, rows, max_tokens):
        """Micro-batches of these Rows for each data-parallel rank, see micro_batches."""
        c = self.config
        padded = not c.use_remove_padding
        table = micro_batches(rows, self.layout.dp_size, max_tokens, c.share_prompts, padded)

        # virtual stages need a multiple of the number of stages
        multiple = c.pipeline_model_parallel_size if len(self.model) > 1 else 1
        return table._replace(sizes=[x + [0] * (-len(x) % multiple) for x in table.sizes])

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
        slots, slot_T, pack = self.lay_out(piece)

        def to_device(x):
            return None if x is None else x.to(self.layout.device, non_blocking=True)

        def to_slots(x_T):
            return to_device(F.pad(x_T, (0, 1))[slots])

        # what every layer's attention reads
        positions_S = to_slots(piece.positions)
        tables = self.rotary(positions_S.to(self.layout.dtype), positions_S[None])
        reads = PackedSeqParams(qkv_format="thd")
        reads.pack = pack
        reads.rotary = [x[0] for x in tables]  # cosines and sines
        if self.modules[0].family == "gpt_oss":  # it has one for both features of a pair
            reads.rotary = [torch.cat([x, x], -1) for x in reads.rotary]

        # the tokens whose values are read on this rank
        read_T = shift(slot_T)
        index_N = (read_T >= 0).nonzero()[:, 0]

        def to_values(x_T):
            return None if x_T is None else to_device(x_T[index_N])

        return MicroBatch(
            ids_1S=to_slots(piece.input_ids)[None],
            reads=reads,
            index_N=to_device(index_N),
            slot_N=to_values(read_T),
            tokens=len(piece.input_ids),
            response_mask=to_values(piece.response_mask),
            values=to_values(piece.values),
            returns=to_values(piece.returns),
            weights=to_values(piece.weights),
            rows=piece,
        )

    def lay_out(self, piece):
        """(slots, slot_T, Pack): which token of a micro-batch's rows is in each slot of this rank,
        and the slot of each token; -1 if it is on another rank. All but Pack on the host."""
        config = self.config
        _, unit = row_sharing(config)
        if config.context_parallel_size > 1:
            return share_context(piece, config, self.layout)
        if config.use_remove_padding:
            return pack_rows(piece, self.layout.device, config.share_prompts, unit)

        # rows padded to equal length; the last one also to a multiple of the unit
        total = len(piece.input_ids)
        by_row = torch.arange(total).split(piece.lengths)
        slots = nn.utils.rnn.pad_sequence(by_row, True, total).flatten()
        sizes = [len(slots) // len(piece)] * len(piece)
        tail = -len(slots) % unit
        sizes[-1] += tail
        slot_T = (slots < total).nonzero()[:, 0]
        return F.pad(slots, (0, tail), value=total), slot_T, Pack(sizes, self.layout.device)

    def run_schedule(self, micros, reduce, done, forward_only=False):
        """Runs all micro-batches through Megatron's schedule: forward and, unless forward_only,
        backward.

        On the last stage, reduce(outputs_N, micro) returns their loss. done() is called for each
        forward."""

        @record_function("micro-batch")  # its forward; the schedule itself runs the backward
        def forward_step(micros, chunk):
            micro = next(micros)
            done()

            def loss_of(outputs_1S):
                loss = reduce(outputs_1S[0].squeeze(-1)[micro.slot_N], micro)
                return loss, torch.tensor(0), None  # a token count that nothing reads

            return chunk(micro.ids_1S, None, None, packed_seq_params=micro.reads), loss_of

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

        def reduce(outputs_N, micro):
            values_N = self.values(outputs_N, micro.response_mask)
            values.append(self.to_tokens(values_N, micro))
            return outputs_N.sum()

        # several at once keep a pipeline busy; each virtual stage has its own forwards
        at_once = 4 * self.config.pipeline_model_parallel_size
        done = common.progress_of(len(pieces), "values", "micro-batches")
        done_one = partial(done, 1 / len(self.model))
        for first in range(0, len(pieces), at_once):
            self.between()
            micros = list(map(self.micro_batch, pieces[first : first + at_once]))
            self.run_schedule(micros, reduce, done_one, forward_only=True)

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

    def to_tokens(self, values_N, micro):
        """Values read on this rank -> (T,) of a micro-batch's tokens; 0 for those of others."""
        values_T = torch.zeros(micro.tokens, device=self.layout.device)
        return values_T.index_copy_(0, micro.index_N, values_N)

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
            words = f"an update of {steps} optimizer steps needs the values from before it"
            raise UserError(f"values: is missing; {words}: compute them first")

        self.steps_before = self.optimizer_steps
        self.model.train()
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
                    # each micro-batch is one forward and backward: Megatron's schedule is that loop
                    micros = list(map(self.micro_batch, pieces))
                    done_one = partial(done, len(mini) / len(pieces) / len(self.model))
                    sums, values = self.forward_backward_all(micros, done_one)
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
        return common.update_metrics("critic", "vf_loss", totals, norms, lr)

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

    def forward_backward_all(self, micros, done=lambda: None):
        """Computes the gradient of a mini-batch, over all ranks -> (this rank's sums, see `loss`;
        the old values of each micro-batch, which are those of its forward if the batch has none).

        Megatron would divide by micro-batches, tokens and ranks. With calculate_per_token_loss, and
        without a token count for finalize_model_grads, it divides by nothing: each rank adds its
        own tokens' loss, and the sum over ranks is the loss of the mini-batch."""
        for chunk in self.model:  # the layers of one stage, or of one virtual stage
            chunk.zero_grad_buffer()
        sums = collections.Counter()
        values = []

        def reduce(outputs_N, micro):
            if micro.values is None:
                old_N = self.values(outputs_N.detach(), micro.response_mask)
                micro = micro._replace(values=old_N)
            values.append(self.to_tokens(micro.values, micro))
            loss, part = self.loss(outputs_N, micro)
            if self.layout.tp_rank == 0:  # tensor-parallel ranks have equal sums
                sums.update(part)
            return loss

        self.run_schedule(micros, reduce, done)
        finalize_model_grads(self.model)

        # as in transformers, the padding token's embedding is not trained
        if self.padding_row is not None:
            embedding = self.modules[0].embedding.word_embeddings
            embedding.weight.main_grad[self.padding_row].zero_()
        return sums, values

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
        self.optimizer.prepare_grads()  # part of Megatron's own step(), which steps on a NaN, too

        # the norm over all ranks; get_grad_norm() would wait for the device at every weight
        grads = []
        for optimizer in self.optimizers:
            grads += grads_for_norm(optimizer)
        square = nn.utils.get_total_norm(grads).to(self.layout.device).square()
        dist.all_reduce(square)
        norm = math.sqrt(square)

        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            for optimizer in self.optimizers:
                weights = optimizer.get_parameters()
                clip_grads.clip_grad_by_total_norm_fp32(weights, most, norm)
            self.optimizer_steps += 1  # first, because a step that fails has moved some weights
            self.optimizer.step_with_ready_grads()
        self.optimizer.zero_grad()
        return norm

    def start_at(self, value):
        """Sets the head so that every value is this one: the inverse of `values`. In the range of a
        bounded head, it stays within the inner 98 %."""
        if self.value_range:
            low, high = self.value_range
            fraction = min(max((value - low) / (high - low), 0.01), 0.99)
            value = math.tan(math.pi * (fraction - 0.5))
        for module in self.modules:
            if module.post_process:
                module.output_layer.weight.zero_()
                module.output_layer.bias.fill_(value)


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
        self.critic = MegatronPPOCritic(config, self.model_config, layout, total_steps)
        sizes = f"tp {config.tensor_model_parallel_size} x cp {config.context_parallel_size}"
        sizes += f" x dp {layout.dp_size} x pp {config.pipeline_model_parallel_size}"
        torch.manual_seed(config.seed)  # reset: new weights may have drawn from it

        name = f"{config.model} ({self.model_config.model_type})"
        threads = torch.get_num_threads()
        print0(f"model      {name}, {self.critic.story}")
        print0(f"layout     ranks {WORLD_SIZE} = {sizes}; CPU threads {threads} per rank")
        print0(f"precision  {layout.dtype} products on {self.device.type}; what trains is float32")

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
        for name, p in named_weights(self.critic.modules):
            total += p.nbytes
            if p.requires_grad:  # gradient; replicas split the master and two moments
                _, replicas = groups_of(name)
                total += p.numel() * (4 + 12 / replicas.size())
        return total

    def try_out(self, batch):
        """Runs the forward and backward of a batch, without a step."""
        self.critic.model.train()
        # as many micro-batches as a stage may hold at once
        turns = self.config.pipeline_model_parallel_size * min(len(self.critic.model), 2)
        self.critic.forward_backward_all([self.critic.micro_batch(batch)] * turns)

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
        tensors = []
        for chunk in self.critic.model:
            tensors += chunk.parameters()
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                if self.offloaded:
                    buffer.offload_to_cpu(move_params=False)
                else:
                    buffer.reload_from_cpu(move_params=False)
        for optimizer in self.critic.optimizers:
            tensors += itertools.chain(*optimizer.shard_fp32_from_float16_groups)  # masters
            tensors += common.optimizer_moments(optimizer.optimizer)

        if self.offloaded:
            mpu.get_global_memory_buffer().buffer.clear()  # of sequence parallelism
            self.away = common.offload(tensors)

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
        gather = partial(checkpoint_tensors, critic, self.model_config.vocab_size)
        snapshot = {}
        if copy:
            snapshot = {kind: gather(kind) for kind in STATE}
        state = {
            "updates": critic.updates,
            "optimizer_steps": critic.optimizer_steps,
            "shape": self.shape(),
        }

        def write(tmp, group=None):
            # one kind at a time, because what is gathered is a copy
            for kind in STATE:
                write_shard(tmp, kind, snapshot[kind] if copy else gather(kind))
            common.write_json(f"{tmp}/trainer.json", state)

        return write

    def load_checkpoint(self, folder):
        """Restores a checkpoint of either critic, on any layout.

        UserError: it is damaged, or of another model."""
        self.check_ready()
        critic = self.critic
        saved = common.open_checkpoint(folder, self.shape())
        tensors = StoredTensors(folder, flag="--resume")
        for kind, form in STATE.items():
            fill(critic, tensors, f"--resume {folder}", kind, form)
        for part in critic.masters.values():  # one tensor each, because AdamW adds 1 in place
            step = torch.tensor(float(saved["optimizer_steps"]), device=part.master.device)
            part.adam.state[part.master]["step"] = step
        torch.set_rng_state(tensors["rng"])
        critic.updates = saved["updates"]
        critic.optimizer_steps = saved["optimizer_steps"]

    def shape(self):
        """What a checkpoint and the run that resumes it must have in common."""
        return common.shape_of(self.model_config, what_trains(self.config))

    def export_hf(self, folder):
        """Writes the value model as a folder that AutoModelForTokenClassification loads.

        config.json holds the value_range, if any. Every rank writes its share of the weights in a
        file of its own. For an architecture without that class, the folder holds the backbone, and
        value_head.safetensors the head."""
        critic = self.critic
        with self.on_device():
            local = partial(whole_master, critic)
            state = whole_weights(critic.modules, self.model_config.vocab_size, local)
        if self.model_config.model_type == "mixtral":
            state = {mixtral_name(name): x for name, x in state.items()}
        if self.model_config.model_type == "gpt_oss":
            state = gather_experts(state)

        # without transformers' class for it, the head is a file of its own, next to a backbone
        head = {}
        kinds = transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
        model_config = common.exported_config(self.model_config)
        if type(model_config) not in kinds:
            kinds = transformers.MODEL_MAPPING
            head = {name: state.pop(name) for name in list(state) if name.startswith("score.")}
            state = {name.removeprefix("model."): x for name, x in state.items()}
        model_config.architectures = [kinds[type(model_config)].__name__]

        # which file has which weight
        file = f"model-{RANK:05d}.safetensors"
        files = collections.ChainMap(*of_all_ranks(dict.fromkeys(state, file)))
        index = {"metadata": {}, "weight_map": dict(files)}

        with published(folder) as tmp:
            for path, weights in {file: state, "value_head.safetensors": head}.items():
                if weights:
                    save_file(weights, f"{tmp}/{path}", metadata={"format": "pt"})
            common.write_json(f"{tmp}/model.safetensors.index.json", index)
            if RANK == 0:
                for part in filter(None, (model_config, self.tokenizer)):
                    part.save_pretrained(tmp)


def check_layout(config, world_size=WORLD_SIZE):
    """UserError unless the ranks can share the work as the flags say."""
    to = config.prefix
    tp = config.tensor_model_parallel_size
    pp = config.pipeline_model_parallel_size
    cp = config.context_parallel_size
    if world_size % (tp * pp * cp):
        sizes = f"tensor {tp} x pipeline {pp} x context {cp}"
        raise UserError(f"{to}*-parallel-size: {sizes} must divide the {world_size} ranks")
    if cp > 1 and not config.use_remove_padding:
        words = f"needs packed rows; drop {to}no-use-remove-padding"
        raise UserError(f"{to}context-parallel-size {cp}: {words}")

    ep = config.expert_model_parallel_size
    etp = config.expert_tensor_parallel_size or tp
    if world_size % (ep * etp * pp):
        sizes = f"expert {ep} x expert-tensor {etp} x pipeline {pp}"
        raise UserError(f"{to}expert-*-parallel-size: {sizes} must divide the {world_size} ranks")


def check_model_flags(config, model_config):
    """UserError for flags that do not fit this model, or for a model that cannot be built."""
    c = model_config
    name = f"{config.prefix}model {config.model}"
    if c.model_type not in FAMILIES:
        words = f"{c.model_type} is not among {', '.join(FAMILIES)}"
        raise UserError(f"{name}: {words}; use critic_fsdp.py")

    cannot_be_built = f"{name}: cannot be built with these parallel sizes"
    with blame(cannot_be_built):
        skeleton = build_skeleton(config, c)
    if odd := computed_otherwise(c, skeleton["model"].state_dict()):
        raise UserError(f"{name}: {', '.join(odd)} is not supported here; use critic_fsdp.py")

    if c.num_attention_heads % c.num_key_value_heads:
        words = f"num_key_value_heads {c.num_key_value_heads} must divide num_attention_heads"
        raise UserError(f"{name}: {words} {c.num_attention_heads}")
    splits_matrices = config.tensor_model_parallel_size > 1
    if hasattr(c, "num_experts_per_tok") and splits_matrices and not config.sequence_parallel:
        words = "MoE with tensor parallelism needs sequence parallelism"
        raise UserError(f"{config.prefix}no-sequence-parallel: {words}")

    # Megatron's own rules, before any process group is built
    with blame(cannot_be_built):
        transformer_config(config, c, skeleton, torch.float32)


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


STATE = {  # what a step changes -> its name in a checkpoint, where {} is the name of the weight
    "weight": "model.{}",
    "exp_avg": "optimizer.{}.exp_avg",
    "exp_avg_sq": "optimizer.{}.exp_avg_sq",
}


def checkpoint_tensors(critic, vocab_size, kind):
    """name -> (first row, tensor on the host): what this rank writes of a kind (a collective).

    These are weights or moments, with torch's random state or AdamW's step counts, under the names
    of critic_fsdp.py."""
    local = partial(whole_master, critic, kind=kind)
    weights = join_experts(whole_weights(critic.modules, vocab_size, local))
    tensors = {STATE[kind].format(name): rows for name, rows in weights.items()}

    if kind == "weight" and RANK == 0:
        tensors["rng"] = 0, torch.get_rng_state()
    if kind == "exp_avg":  # only weights that train have it
        for name, (first, _) in weights.items():
            if first == 0:
                tensors[f"optimizer.{name}.step"] = 0, torch.tensor(float(critic.optimizer_steps))
    return tensors


def write_shard(folder, kind, tensors):
    """Writes this rank's tensors into one file, which torch.distributed.checkpoint can read."""
    if not tensors:
        return
    offsets = {}  # the part of a tensor that this file has begins here, in each dimension
    for name, (row, x) in tensors.items():
        offsets[name] = {"saved_offsets": [row, 0, 0][: x.ndim]}
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    mine = {name: x for name, (_, x) in tensors.items()}
    save_file(mine, f"{folder}/shard-{RANK:05d}-{kind}.safetensors", metadata=metadata)


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


# ---- Context parallelism: ranks that share a row -------------------------------------------------
#
# A closed chapter behind --context-parallel-size. It is called from lay_out; CoreAttention gathers
# keys and values. The flag is also read in a rule of Config, in row_sharing (1 without it), in
# check_layout, init_model and has_groups; cp_rank is in Layout, and groups_of asks for
# with_context_parallel. Only because of this chapter does lay_out say -1 for tokens of other ranks.


def share_context(rows, config, layout):
    """lay_out for this rank, which gets two of 2 p equal pieces of the packed row, r and
    2 p - 1 - r.

    Under a causal mask, this splits the work of one long row evenly, and of many nearly so. Queries
    see the keys of their own rows, gathered from all ranks, up to their own positions.

        p = 2      row: 0 1 2 3 4 5 6 7      rank 0: 0 1 . . . . 6 7      rank 1: . . 2 3 4 5 . ."""
    p = config.context_parallel_size
    _, unit = row_sharing(config)
    slots, slot_T, pack = pack_rows(rows, "cpu", config.share_prompts, unit)
    places = torch.arange(len(slots))
    seen = places if pack.keys is None else pack.keys
    ends_of_queries, ends_of_keys = (x.tolist() for x in pack.varlen[:2])

    # pieces[rank]: its two pieces
    halves = places.view(2 * p, -1)
    pieces = torch.stack([halves[:p], halves[p:].flip(0)], 1)
    mine = pieces[layout.cp_rank]

    # the part of each row that lies in each piece, and the keys up to its end
    queries = []
    keys = []
    for piece in mine:
        low = int(piece[0])
        high = low + len(piece)
        for row, (begin, end) in enumerate(itertools.pairwise(ends_of_queries)):
            behind = max(end - high, 0)  # how much of the row comes after the piece
            count = end - behind - max(begin, low)
            if count > 0:
                queries.append(count)
                keys.append(seen[ends_of_keys[row] : ends_of_keys[row + 1] - behind])

    # keys are gathered in the order of `pieces`; argsort is the inverse of that order
    place_when_gathered = pieces.flatten().argsort()
    index = place_when_gathered[torch.cat(keys)].to(layout.device, non_blocking=True)
    pack = Pack(queries, layout.device, list(map(len, keys)), index)

    # where the rank's slots are among its own; -1 for those of others
    places_here = torch.full((len(slots),), -1)
    places_here[mine.flatten()] = torch.arange(mine.numel())
    return slots[mine.flatten()], places_here[slot_T], pack


# ---- Layers and process groups of Megatron -------------------------------------------------------
#
# A closed chapter: how Megatron builds its model and its groups of ranks. It is called from
# build_value_model, check_model_flags (FAMILIES, computed_otherwise, transformer_config),
# make_layout, row_sharing (splits_sequence) and optimizer_step (grads_for_norm).

# the model_types of transformers that Megatron's layers can compute, with the options below
FAMILIES = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "mixtral",
    "ministral",
    "qwen2_moe",
    "qwen3_moe",
    "phi3",
    "seed_oss",
    "cwm",
    "glm4_moe",
    "dots1",
    "solar_open",
    "gpt_oss",
)


class RMSNorm(nn.RMSNorm):
    """A norm for Megatron's layers. With sequence parallelism it sees some of the tokens only."""

    def __init__(self, config, hidden_size, eps=1e-6, **_):
        super().__init__(hidden_size, eps=eps)
        # so Megatron sums its gradient over tensor-parallel ranks
        self.weight.sequence_parallel = config.sequence_parallel


def layer_spec(transformer, vp_stage):
    """The layers of a chunk of the model: Megatron's own, with the norm and attention above."""
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=False, vp_stage=vp_stage
    )
    block.layer_norm = RMSNorm
    for spec in block.layer_specs:
        layer = spec.submodules
        layer.input_layernorm = RMSNorm
        layer.pre_mlp_layernorm = RMSNorm

        attention = layer.self_attention.submodules
        attention.core_attention = CoreAttention
        if transformer.qk_layernorm:
            attention.q_layernorm = RMSNorm
            attention.k_layernorm = RMSNorm
    return block


def transformer_config(config, model_config, skeleton, dtype):
    """Megatron's config of the model and of how to compute it. skeleton: see build_skeleton."""
    c = model_config
    names = skeleton["model"].state_dict()

    return TransformerConfig(
        # the model
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        ffn_hidden_size=getattr(c, "intermediate_size", None),  # None: in no layer
        num_attention_heads=c.num_attention_heads,
        num_query_groups=c.num_key_value_heads,
        kv_channels=getattr(c, "head_dim", None),  # None: hidden_size / heads
        layernorm_epsilon=c.rms_norm_eps,
        gated_linear_unit=True,
        add_bias_linear="layers.0.self_attn.o_proj.bias" in names,
        add_qkv_bias="layers.0.self_attn.q_proj.bias" in names,
        qk_layernorm="layers.0.self_attn.q_norm.weight" in names,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        softmax_type="learnable" if "layers.0.self_attn.sinks" in names else "vanilla",
        **window_options(c),
        **activation_options(skeleton["model"].layers[0].mlp),
        **expert_options(c, names),
        # precision and memory
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        recompute_granularity="full" if config.gradient_checkpointing else None,
        recompute_method="uniform",
        recompute_num_layers=1,
        deallocate_pipeline_outputs=True,  # outputs already sent on are not needed here
        # ranks
        **parallel_sizes(config),
        sequence_parallel=splits_sequence(config),
        variable_seq_lengths=True,  # stages tell each other the size of each micro-batch
        overlap_p2p_comm=config.virtual_pipeline_model_parallel_size > 1,  # else they would hang
        batch_p2p_comm=False,
        calculate_per_token_loss=True,  # gradients are plain sums, see forward_backward_all
    )


def window_options(model_config):
    """TransformerConfig's options of a sliding window: its size, and which layers have it.

    A folder may have fields that the config's class does not, which transformers does not read."""
    c = model_config
    if not hasattr(type(c), "sliding_window") or not c.sliding_window:  # Qwen2-MoE has 0 for none
        return {}

    kinds = ["sliding_attention"] * c.num_hidden_layers
    if hasattr(type(c), "layer_types"):
        kinds = c.layer_types
    slides = [int(kind == "sliding_attention") for kind in kinds]
    return {"window_size": (c.sliding_window - 1, 0), "window_attn_skip_freq": slides}


def activation_options(mlp):
    """TransformerConfig's options of the function between the matrices of transformers' MLP."""
    experts = getattr(mlp, "experts", None)
    alpha = getattr(experts, "alpha", None)
    if alpha is None:
        # compiled on CUDA; on a CPU, where it is not, its backward would be slower
        return {"activation_func": F.silu, "bias_activation_fusion": torch.cuda.is_available()}
    return {  # gpt-oss
        "activation_func": lambda gate: gate * torch.sigmoid(alpha * gate),
        "activation_func_clamp_value": experts.limit,
        "glu_linear_offset": 1.0,
    }


def expert_options(model_config, names):
    """TransformerConfig's options of a mixture of experts. names: weights of its skeleton."""
    c = model_config
    layers = range(c.num_hidden_layers)
    has_experts = [f"layers.{i}.mlp.experts.down_proj" in names for i in layers]
    options = {
        "moe_layer_freq": list(map(int, has_experts)),
        "moe_token_dispatcher_type": "alltoall",
    }
    if not any(has_experts):
        return options

    first = f"layers.{has_experts.index(True)}.mlp"
    options |= {
        "num_moe_experts": len(names[f"{first}.experts.down_proj"]),
        "moe_router_topk": c.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(c, "moe_intermediate_size", None),  # None: intermediate_size
        "moe_router_pre_softmax": not getattr(c, "norm_topk_prob", True),  # over all, or the chosen
    }

    # an expert that all tokens share, and in Qwen2-MoE the gate of its output
    for shared in ("shared_expert", "shared_experts"):
        down = names.get(f"{first}.{shared}.down_proj.weight")
        if down is not None:
            options["moe_shared_expert_intermediate_size"] = down.shape[1]
    options["moe_shared_expert_gate"] = f"{first}.shared_expert_gate.weight" in names

    # experts with probabilities of their own, chosen by these plus a correction that is not trained
    if f"{first}.gate.e_score_correction_bias" in names:
        options |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # Megatron would move it towards equal loads
            "moe_router_topk_scaling_factor": c.routed_scaling_factor,
            "moe_router_dtype": "fp32",
        }
        if c.topk_group < c.n_group:
            options |= {"moe_router_num_groups": c.n_group, "moe_router_group_topk": c.topk_group}
    return options


def computed_otherwise(model_config, names):
    """Words on what Megatron's layers would compute otherwise. names: weights of the skeleton."""
    c = model_config
    odd = []
    if getattr(c, "hidden_act", "silu") != "silu":
        odd.append(f"hidden_act {c.hidden_act}")

    # it has biases in all matrices, or in those of queries, keys and values, or in none
    of_matrices = ("q_proj.bias", "o_proj.bias", ("down_proj.bias", "down_proj_bias"))
    q, o, down = (any(name.endswith(end) for name in names) for end in of_matrices)
    if o != down or (o and not q):
        odd.append("a bias in some matrices only")

    # with probabilities of their own, it divides those of several experts by their sum, and ranks a
    # group of experts by its num_experts_per_tok / topk_group best; transformers by its 2 best
    if hasattr(c, "n_group"):
        if c.norm_topk_prob != (c.num_experts_per_tok > 1):
            odd.append(f"norm_topk_prob {c.norm_topk_prob}")
        if c.topk_group < c.n_group and c.num_experts_per_tok // c.topk_group != 2:
            odd.append(f"topk_group {c.topk_group} of n_group {c.n_group}")
    return odd


def grads_for_norm(optimizer):
    """This rank's gradients in float32, each weight once. megatron-core 0.19 renamed the method."""
    if hasattr(optimizer, "get_grads_for_grad_norm"):
        return optimizer.get_grads_for_grad_norm()
    return optimizer.get_main_grads_for_grad_norm()


def has_groups(config):
    """Whether Megatron's process groups are those of this layout, from an earlier worker."""
    if not mpu.model_parallel_is_initialized():
        return False
    wanted = parallel_sizes(config)
    tp = config.tensor_model_parallel_size
    wanted["expert_tensor_parallel_size"] = config.expert_tensor_parallel_size or tp
    found = {
        "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": mpu.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": (
            mpu.get_virtual_pipeline_model_parallel_world_size()
        ),
        "context_parallel_size": mpu.get_context_parallel_world_size(),
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": mpu.get_expert_tensor_parallel_world_size(),
    }
    return found == wanted and mpu.get_model_parallel_group() in dist.distributed_c10d._world.pg_map


def end_groups():
    """Ends Megatron's process groups: their threads and sockets would stay with the process."""
    kept = itertools.chain(*(x if isinstance(x, list) else [x] for x in vars(mpu).values()))
    groups = {group for group in kept if isinstance(group, dist.ProcessGroup)} - {dist.group.WORLD}
    dist.barrier()  # until all ranks are done with them
    for group in groups & dist.distributed_c10d._world.pg_map.keys():
        dist.destroy_process_group(group)
    mpu.destroy_model_parallel()


def parallel_sizes(config):
    """The flags that Megatron's process groups and its model config take under the same names."""
    sizes = {name: x for name, x in vars(config).items() if name.endswith("parallel_size")}
    if config.virtual_pipeline_model_parallel_size == 1:
        sizes["virtual_pipeline_model_parallel_size"] = None
    return sizes


def splits_sequence(config):
    """Whether tensor-parallel ranks also split the tokens between matrix products."""
    return config.sequence_parallel and config.tensor_model_parallel_size > 1


# ---- Weights: megatron-core and Hugging Face -----------------------------------------------------
#
# A closed chapter: names and parts of weights. It is called from MegatronPPOCritic.build (fill,
# find_masters), build_skeleton (freezes), build_value_model (freeze), read_weights and
# load_checkpoint (StoredTensors, fill), state_bytes (named_weights, groups_of), `shape`
# (what_trains), and from checkpoints and exports (whole_weights, whole_master, join_experts,
# gather_experts, mixtral_name).

LOCAL_EXPERT = "mlp.experts.local_experts.{}"

# megatron-core's name -> how tensor-parallel ranks split it, then the names of its parts in
# critic_fsdp.py. In a layer, names follow decoder.layers.N here and model.layers.N there.
WEIGHTS = {
    "embedding.word_embeddings.weight": ("vocabulary", "model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": ("whole", "model.norm.weight"),
    "output_layer.weight": ("whole", "score.weight"),
    "output_layer.bias": ("whole", "score.bias"),
    "input_layernorm.weight": ("whole", "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": (
        "heads",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.linear_qkv.bias": (
        "heads",
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
    ),
    "self_attention.q_layernorm.weight": ("whole", "self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": ("whole", "self_attn.k_norm.weight"),
    "self_attention.core_attention.softmax_offset": ("inputs", "self_attn.sinks"),
    "self_attention.linear_proj.weight": ("inputs", "self_attn.o_proj.weight"),
    "self_attention.linear_proj.bias": ("whole", "self_attn.o_proj.bias"),
    "pre_mlp_layernorm.weight": ("whole", "post_attention_layernorm.weight"),
    # a layer's MLP
    "mlp.linear_fc1.weight": ("outputs", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc1.bias": ("outputs", "mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.linear_fc2.weight": ("inputs", "mlp.down_proj.weight"),
    "mlp.linear_fc2.bias": ("whole", "mlp.down_proj.bias"),
    # an expert
    "mlp.router.weight": ("whole", "mlp.gate.weight"),
    f"{LOCAL_EXPERT}.linear_fc1.weight": (
        "outputs",
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
    ),
    f"{LOCAL_EXPERT}.linear_fc2.weight": ("inputs", "mlp.experts.{}.down_proj.weight"),
    # an expert that all tokens share, and GLM's correction of the choice of the others
    "mlp.shared_experts.linear_fc1.weight": (
        "outputs",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("inputs", "mlp.shared_experts.down_proj.weight"),
    "mlp.router.expert_bias": ("whole", "mlp.gate.e_score_correction_bias"),
}

# model_type -> what its weights have instead; a single name stands for all parts, end to end
OTHER_WEIGHTS = {
    "qwen2_moe": {
        "mlp.shared_experts.gate_weight": ("whole", "mlp.shared_expert_gate.weight"),
        "mlp.shared_experts.linear_fc1.weight": (
            "outputs",
            "mlp.shared_expert.gate_proj.weight",
            "mlp.shared_expert.up_proj.weight",
        ),
        "mlp.shared_experts.linear_fc2.weight": ("inputs", "mlp.shared_expert.down_proj.weight"),
    },
    "phi3": {
        "self_attention.linear_qkv.weight": ("heads", "self_attn.qkv_proj.weight"),
        "mlp.linear_fc1.weight": ("outputs", "mlp.gate_up_proj.weight"),
    },
    "gpt_oss": {
        "mlp.router.weight": ("whole", "mlp.router.weight"),
        "mlp.router.bias": ("whole", "mlp.router.bias"),
        f"{LOCAL_EXPERT}.linear_fc1.weight": ("turns", "mlp.experts.{}.gate_up_proj"),
        f"{LOCAL_EXPERT}.linear_fc1.bias": ("turns", "mlp.experts.{}.gate_up_proj_bias"),
        f"{LOCAL_EXPERT}.linear_fc2.weight": ("transposed", "mlp.experts.{}.down_proj"),
        f"{LOCAL_EXPERT}.linear_fc2.bias": ("whole", "mlp.experts.{}.down_proj_bias"),
    },
}

# an expert's weight, and transformers' tensors of all experts, where these are not named alike: one
# row per expert, gate above up
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
JOINED = {
    "gate_proj.weight": "gate_up_proj",
    "up_proj.weight": "gate_up_proj",
    "down_proj.weight": "down_proj",
}


def joined(expert):
    """(name of the tensor of all experts, number of the expert) for a match of EXPERT."""
    experts, number, kind = expert.groups()
    return f"{experts}.{JOINED.get(kind, kind)}", int(number)


def hf_names(name, family):
    """A weight's global name -> (how ranks split it, the names of its parts in critic_fsdp.py)."""
    numbers = re.findall(r"\.(\d+)", name)
    form = re.sub(r"\.\d+", ".{}", name).removeprefix("decoder.layers.{}.")
    cut, *parts = (WEIGHTS | OTHER_WEIGHTS.get(family, {}))[form]
    prefix = "model.layers.{}." if numbers else ""
    return cut, [f"{prefix}{part}".format(*numbers) for part in parts]


def named_weights(modules):
    """(global name, weight) of what this rank stores: layers and experts have global numbers.

    All are parameters but the correction of a router, which is not trained."""
    for module in modules:
        stored = [*module.named_parameters(), *module.named_buffers()]
        for name, p in stored:
            if not isinstance(p, nn.Parameter) and not name.endswith("expert_bias"):
                continue  # a count that Megatron keeps
            words = name.split(".")
            if words[1] == "layers":
                layer = module.decoder.layers[int(words[2])]
                words[2] = f"{layer.layer_number - 1}"
                if "local_experts" in words:
                    words[6] = f"{layer.mlp.local_expert_indices[int(words[6])]}"
            yield ".".join(words), p


def what_trains(config):
    """The flags that decide which weights train. A resumed run must have the same."""
    return {"freeze_modules": config.freeze_modules}


def freezes(config, name):
    """Whether --freeze-modules has a match in a weight's name, which is that of critic_fsdp.py."""
    pattern = config.freeze_modules
    with blame(f"{config.prefix}freeze-modules {pattern}"):
        return bool(pattern and re.search(pattern, name))


def freeze(modules, config):
    """Freezes the weights whose names in critic_fsdp.py match --freeze-modules (a collective).

    They get no gradient, no optimizer state and no float32 master."""
    flag = f"{config.prefix}freeze-modules {config.freeze_modules}"
    trained = 0
    frozen = 0
    for name, p in named_weights(modules):
        if not isinstance(p, nn.Parameter):
            continue

        # which of its parts in critic_fsdp.py match
        _, parts = hf_names(name, modules[0].family)
        matches = []
        for part in parts:
            expert = EXPERT.fullmatch(part)
            if expert:  # the name of the experts' one tensor
                part, _ = joined(expert)
            matches.append(freezes(config, part))
        if any(matches) != all(matches):
            words = f"must match all or none of {', '.join(parts)}, which are one weight here"
            raise UserError(f"{flag} (ValueError: {words})")

        p.requires_grad_(not all(matches))
        if all(matches):
            frozen += p.numel()
        else:
            trained += p.numel()

    trained, frozen = zip(*of_all_ranks((trained, frozen)))
    if config.freeze_modules and (0 in trained or not any(frozen)):
        raise UserError(f"{flag}: must match some of the weights, but not all of a rank")


def groups_of(name):
    """(tensor-parallel ranks that split this weight, its replicas).

    Replicas are ranks with the same shard but other rows, or other tokens of the same rows."""
    if ".experts." in name:
        return mpu.get_expert_tensor_parallel_group(), mpu.get_expert_data_parallel_group()
    replicas = mpu.get_data_parallel_group(with_context_parallel=True)
    return mpu.get_tensor_model_parallel_group(), replicas


def taken_apart(cut, parts, groups, head_dim):
    """Parts of a weight as Megatron has them, where a family has them in one tensor, or turned."""
    if cut == "turns":  # gpt-oss: columns are those of gate and up in turn
        parts = [parts[0][..., ::2].movedim(0, -1), parts[0][..., 1::2].movedim(0, -1)]
    elif cut == "transposed":
        parts = [parts[0].T]
    elif cut == "outputs" and len(parts) == 1:  # Phi-3: they lie end to end
        parts = parts[0].chunk(2)
    elif cut == "heads" and len(parts) == 1:
        of_keys = groups * head_dim
        parts = parts[0].split([len(parts[0]) - 2 * of_keys, of_keys, of_keys])
    return parts


def put_together(cut, parts, count):
    """The inverse of taken_apart: `count` tensors."""
    if cut == "turns":
        gate_up = torch.stack(parts, 1).flatten(0, 1)
        parts = [gate_up.movedim(-1, 0)]
    elif cut == "transposed":
        parts = [parts[0].T]
    elif count < len(parts):
        parts = [torch.cat(parts)]
    return parts


def shard(cut, parts, groups, head_dim, rank, size):
    """A tensor-parallel rank's shard of a weight, from its whole parts in Hugging Face's form."""
    parts = taken_apart(cut, parts, groups, head_dim)
    if cut == "whole":
        return parts[0]
    if cut in ("inputs", "transposed"):
        return parts[0].chunk(size, -1)[rank]
    if cut == "vocabulary":
        return F.pad(parts[0], (0, 0, 0, -len(parts[0]) % size)).chunk(size)[rank]

    # heads: each group's queries, key and value; outputs: each rank's part of gate and of up
    pieces = groups if cut == "heads" else size
    by_piece = [part.unflatten(0, (pieces, -1)) for part in parts]
    return torch.cat(by_piece, 1).flatten(0, 1).chunk(size)[rank]


def unshard(cut, shards, groups, head_dim, vocab_size):
    """The whole parts in Hugging Face's form, from all ranks' shards: the inverse of shard."""
    if cut == "whole":
        return shards[:1]
    if cut in ("inputs", "transposed"):
        return [torch.cat(shards, -1)]
    if cut in ("outputs", "turns"):
        return [torch.cat(halves) for halves in zip(*(x.chunk(2) for x in shards))]
    if cut == "vocabulary":
        return [torch.cat(shards)[:vocab_size]]

    # heads
    by_group = torch.cat(shards).unflatten(0, (groups, -1))
    queries = by_group.shape[1] - 2 * head_dim
    return [part.flatten(0, 1) for part in by_group.split([queries, head_dim, head_dim], 1)]


def whole_weights(modules, vocab_size, local):
    """name -> whole tensor on the host, for the weights that this rank writes (a collective).

    local(name, p) gives this rank's shard of a weight, or None. Tensor-parallel ranks gather one
    weight at a time, and one rank keeps it."""
    config = modules[0].config
    kept = {}
    for name, p in named_weights(modules):
        cut, parts = hf_names(name, modules[0].family)
        group, replicas = groups_of(name)
        mine = local(name, p)
        if mine is None:
            continue
        shards = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(shards, mine.contiguous(), group=group)

        # ranks that have the same layers take turns
        layer = re.match(r"decoder\.layers\.(\d+)", name)
        turn = int(layer[1]) if layer else 0
        writer = turn % group.size()  # tensor-parallel rank
        replica = turn // group.size() % replicas.size()  # and which of its copies
        if group.rank() == writer and replicas.rank() == replica:
            wholes = unshard(cut, shards, config.num_query_groups, config.kv_channels, vocab_size)
            for part, whole in zip(parts, put_together(cut, wholes, len(parts))):
                kept[part] = whole.float().cpu().contiguous()
    return kept


def join_experts(weights):
    """name -> (first row, tensor), with a layer's experts in one tensor, as transformers has them.

    A rank with only some of the experts has their rows, from the first row on."""
    out = {}
    layers = {}  # the joint tensor's name -> expert -> its matrices, gate before up
    for name in list(weights):
        x = weights.pop(name)  # so that no more than one layer's experts are here twice
        if expert := EXPERT.fullmatch(name):
            joint, number = joined(expert)
            layers.setdefault(joint, {}).setdefault(number, []).append(x)
        else:
            out[name] = 0, x
    for name in list(layers):
        experts = layers.pop(name)
        out[name] = min(experts), torch.stack([torch.cat(experts[i]) for i in sorted(experts)])
    return out


def gather_experts(weights):
    """Puts all experts of a layer in one tensor, on one of the ranks, as gpt-oss's files have them.

    A collective."""
    out = {}
    rows = {}  # those that this rank has
    for name, (first, x) in join_experts(weights).items():
        if ".experts." in name:
            rows[name] = first, x
        else:
            out[name] = x

    # one tensor after another, which takes less memory
    names = sorted(set(itertools.chain(*of_all_ranks(list(rows)))))
    for i, name in enumerate(names):
        sent = [None] * WORLD_SIZE
        sent[i % WORLD_SIZE] = rows.pop(name, None)
        came = [part for part in common.exchange(sent) if part]
        if came:
            came.sort(key=lambda part: part[0])
            out[name] = torch.cat([x for _, x in came])
    return out


class OptimizerShard(NamedTuple):
    """What this rank's distributed optimizer holds of a weight that trains."""

    adam: torch.optim.Optimizer
    master: torch.Tensor  # its part of the weight, float32, one-dimensional
    place: slice  # which part of the flat weight that is


def find_masters(optimizers):
    """weight -> OptimizerShard, for the weights of which this rank has a part."""
    found = {}
    for optimizer in optimizers:
        weights = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
        masters = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
        for p, master in zip(itertools.chain(*weights), itertools.chain(*masters)):
            place = optimizer._get_model_param_range_map(p)["param"]
            part = slice(place.start, place.end)
            found[p] = OptimizerShard(optimizer.optimizer, master, part)
    return found


def whole_master(critic, name, p, kind="weight"):
    """The float32 weight behind p, or one of its moments; None if p is frozen and has none.

    A collective of all ranks that hold the weight."""
    if not p.requires_grad:
        return p.detach().float() if kind == "weight" else None
    flat = torch.zeros(p.numel(), device=p.device)
    if part := critic.masters.get(p):
        if kind == "weight":
            flat[part.place] = part.master.detach()
        else:
            flat[part.place] = part.adam.state[part.master].get(kind, 0.0)
    _, replicas = groups_of(name)
    dist.all_reduce(flat, group=replicas)
    return flat.view_as(p)


@torch.no_grad()
def fill(critic, tensors, flag, kind="weight", form="{}"):
    """Fills all weights, or one moment of each, from tensors stored under form.format(name).

    The inverse of whole_master. A collective; UserError on all ranks if a tensor does not fit on
    any of them."""
    problems = []
    config = critic.transformer
    for name, p in named_weights(critic.modules):
        if kind != "weight" and not p.requires_grad:
            continue
        cut, parts = hf_names(name, critic.modules[0].family)
        group, _ = groups_of(name)

        # this rank's shard; what does not fit is told below, when all ranks are here
        try:
            wholes = [lookup_weight(tensors, part, form) for part in parts]
            heads = config.num_query_groups
            x = shard(cut, wholes, heads, config.kv_channels, group.rank(), group.size())
            if x.shape != p.shape:
                raise RuntimeError(f"is {tuple(x.shape)} instead of {tuple(p.shape)}")
        except (KeyError, RuntimeError, IndexError) as error:
            problems.append(f"{parts[0]} ({type(error).__name__}: {error})")
            continue

        # into the weight, and into the part that the optimizer of this rank has
        if kind == "weight":
            p.copy_(x)
        if part := critic.masters.get(p):
            target = part.master
            if kind != "weight":  # torch creates it at the first step
                state = part.adam.state[part.master]
                target = state.setdefault(kind, torch.zeros_like(part.master))
            target.copy_(x.flatten()[part.place])

    if problems := sorted(itertools.chain(*of_all_ranks(problems))):
        raise UserError(f"{flag}: {len(problems)} weights do not fit, e.g. {problems[0]}")


def lookup_weight(tensors, name, form):
    """A weight stored under form.format(name). A layer's experts may be stored as one tensor."""
    for stored in (form.format(mixtral_name(name)), form.format(name)):
        if stored in tensors:
            return tensors[stored]
    expert = EXPERT.fullmatch(name)
    if not expert:
        raise KeyError(form.format(name))

    joint, number = joined(expert)
    x = tensors[form.format(joint)][number]
    if name.endswith("gate_proj.weight"):
        return x.chunk(2)[0]
    if name.endswith("up_proj.weight"):
        return x.chunk(2)[1]
    return x


def mixtral_name(name):
    """A weight's name in a Mixtral's folder; transformers and we name it as in other models."""
    name = name.replace("mlp", "block_sparse_moe").replace("gate_proj", "w1")
    return name.replace("up_proj", "w3").replace("down_proj", "w2")


class StoredTensors(dict):
    """name -> tensor of a folder's weights, read when it is looked up.

    Every name has the `prefix` once, whether it had none, one, or two as in a checkpoint."""

    def __init__(self, folder, prefix="", flag="--model"):
        with blame(f"{flag} {folder}: its weights do not load"):
            names, read = common.open_weights(folder)
        # experts are looked up one by one, in up to four tensors of all
        self.read_once = lru_cache(maxsize=4)(read)
        for name in names:
            rest = name.removeprefix(prefix and "model.").removeprefix(prefix)
            self[prefix + rest] = name

    def __getitem__(self, name):
        return self.read_once(super().__getitem__(name))


# ---- Megatron without CUDA, and without Transformer Engine ---------------------------------------
#
# A closed chapter: what lets Megatron-Core 0.16.1 run on a laptop. It is called from make_layout.

moe_utils.te_general_gemm = None  # Megatron reads it, but defines it only with Transformer Engine
megatron_optimizer.USING_PYTORCH_OPTIMIZER = True  # torch's AdamW, even if Apex is installed


def megatron_without_cuda():
    """Lets Megatron-Core run on CPU and gloo; does nothing where CUDA is present.

    It replaces devices, streams, random states and two collectives that need equal sizes on gloo
    (for tokens of experts that tensor-parallel ranks share), but no computation."""
    has_run = torch.cuda.manual_seed is torch.manual_seed
    if torch.cuda.is_available() or has_run:
        return
    CudaMeansCpu().__enter__()
    warnings.filterwarnings("ignore", message="When using sequence parallelism .*CUDA")
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *_: None  # 0.19 asks for it before it reduces gradients
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.Tensor.pin_memory = lambda x: x.clone()  # offloading needs a copy

    # recomputation saves and restores them
    tensor_parallel.random._get_cuda_rng_state = lambda **_: torch.get_rng_state()
    tensor_parallel.random._set_cuda_rng_state = lambda state, **_: torch.set_rng_state(state)

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = False  # else it creates one
    dispatcher._maybe_dtoh_and_synchronize = sizes_to_host
    dist.all_gather = all_gather_of_any_sizes
    dist.reduce_scatter = reduce_scatter_of_any_sizes


class CudaMeansCpu(torch.overrides.TorchFunctionMode):
    """Without CUDA, makes Megatron-Core's hard-coded device="cuda" mean the CPU."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        out = function(*args, **kwargs)

        # Megatron's optimizers test for "torch.cuda.FloatTensor"
        if function is torch.Tensor.type and isinstance(out, str):
            out = out.replace("torch.", "torch.cuda.")
        return out


def sizes_to_host(self, point, tokens_per_expert=None):
    """A method of Megatron's token dispatcher, which does this on a CUDA stream."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if torch.is_tensor(getattr(self, name)):
            setattr(self, name, getattr(self, name).numpy())
    return tokens_per_expert


def all_gather_of_any_sizes(outputs, x, group):
    """dist.all_gather, where ranks may have different sizes."""
    outputs[dist.get_rank(group)].copy_(x)
    for rank, out in enumerate(outputs):
        dist.broadcast(out, group=group, group_src=rank)


def reduce_scatter_of_any_sizes(output, inputs, group):
    """dist.reduce_scatter, where ranks may have different sizes."""
    total = torch.cat(inputs)
    dist.all_reduce(total, group=group)
    output.copy_(total.split([len(x) for x in inputs])[dist.get_rank(group)])


if __name__ == "__main__":
    common.launch(lambda: main(RUN))
