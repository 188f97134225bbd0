"""A PPO critic for language models on Megatron-Core: one value model, one update, any layout.

    python critic_megatron.py                                  toy task, a tiny model, a laptop CPU
    torchrun --nproc-per-node 4 critic_megatron.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    torchrun --nproc-per-node 8 critic_megatron.py --model Qwen/Qwen2.5-7B --rollouts train.jsonl \\
        --eval-rollouts eval.jsonl --tensor-model-parallel-size 4 --gradient-checkpointing --out-dir out/7b
    python critic_megatron.py --help                           every flag

It learns V(s) from rollouts with rewards: value pretraining for PPO (VC-PPO, 2503.01491), or a token-level verifier.
A PPO loop drives the same CriticWorker. Copy this file and common.py, and change them.
critic_fsdp.py is the same function on PyTorch FSDP: same sections, names, flags and numbers, so that a diff of the two
shows what parallelism costs. What this one leaves out: images, adapters, frozen layers, torch.compile, activations on
the host and a plan.

Shapes are in the names: T tokens, sequences end to end; B sequences; L longest sequence; D hidden features.
S slots: the tokens and the padding of a micro-batch that this rank holds.
"""

import contextlib
import dataclasses
import functools
import glob
import itertools
import json
import logging
import math
import os
import re
import sys
import time
import types
import warnings
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import tyro

# ---------------------------------------------------------------------------------------------------------------------
# Config
# ---------------------------------------------------------------------------------------------------------------------

DTYPES = ("auto", "float32", "bfloat16", "float16")
KERNELS = ("auto", "flash", "varlen", "sdpa", "eager")
BACKEND = "megatron"  # as checkpoints name this script
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Config:
    """The critic: its model, its layout over ranks, its batches and its optimizer."""

    # model
    model: str = "tiny-qwen2"  # Hugging Face folder or hub name; tiny-qwen2, tiny-llama ...: random weights
    tokenizer: str | None = None  # Hugging Face folder or hub name (None: the model's own; characters for tiny-*)
    override_config: str = "{}"  # JSON laid over the model's config, e.g. '{"num_hidden_layers": 4}'
    value_head_init: Literal["auto", "checkpoint", "normal", "zero"] = "auto"  # auto: the checkpoint's, else normal
    from_scratch: bool = False  # random weights: of --model take the architecture and the tokenizer only
    value_head: Literal["scalar", "hl_gauss"] = "scalar"  # the value: a number, or the mean of a distribution over bins
    value_bins: int = 51  # bins of hl_gauss
    value_range: tuple[float, float] | None = None  # hl_gauss: where they lie (None: the checkpoint's, else the data's)
    trust_remote_code: bool = False  # run model code that comes with the checkpoint
    seed: int = 0  # of random weights, the value head and every shuffle

    # layout
    tensor_model_parallel_size: int = 1  # ranks that share each matrix product, a part of its rows or columns each
    sequence_parallel: bool = True  # they also share the tokens of what lies between the products (norms, residuals)
    pipeline_model_parallel_size: int = 1  # ranks that share the layers: each runs some and hands its outputs on
    virtual_pipeline_model_parallel_size: int = 1  # pieces of the model on each of them, taken in turns: less idling
    num_layers_in_first_pipeline_stage: int | None = None  # layers of the first of them (None: as many as of others)
    num_layers_in_last_pipeline_stage: int | None = None  # the same for the last
    context_parallel_size: int = 1  # ranks that share each sequence, a part of its tokens each
    expert_model_parallel_size: int = 1  # ranks that share the experts of a mixture, some of them each
    expert_tensor_parallel_size: int | None = None  # ranks that share each expert (None: as tensor_model_parallel_size)
    overlap_grad_reduce: bool = False  # add gradients of the ranks up while the backward pass goes on
    overlap_param_gather: bool = False  # gather updated weights while the next forward pass begins
    timeout_minutes: float = 30.0  # a collective that takes longer ends the run

    # precision and kernels
    param_dtype: Literal[DTYPES] = "auto"  # of matrix products (auto: bfloat16, float32 on CPU)
    use_remove_padding: bool = True  # pack sequences end to end; otherwise pad them to the longest
    attn_implementation: Literal[KERNELS] = "auto"  # attention kernel (auto: the fastest that serves the model)
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe"], ...] = ()  # recompute only these parts of a layer

    # batches
    ppo_epochs: int = 1  # passes over the rows of one update
    ppo_mini_batch_size: int = 256  # rows of one optimizer step, global: over all ranks
    shuffle: bool = True  # cut mini-batches in random order (from seed, update, epoch) instead of row order
    ppo_max_token_len_per_gpu: int | Literal["auto"] = 16384  # most tokens of a rank in a micro-batch (auto: what fits)
    memory_limit_gib: float | None = None  # of a rank, for auto (None: what is free on the device; a CPU needs it)
    forward_max_token_len_per_gpu: int | None = None  # the same for compute_values (None: as in training)
    ppo_micro_batch_size_per_gpu: int | None = None  # rows of a training micro-batch, in place of the token cap
    forward_micro_batch_size_per_gpu: int | None = None  # the same for compute_values (None: as in training)

    # loss
    cliprange_value: float | None = 0.5  # how far a value may gain by moving (None: no clipping; hl_gauss: never any)
    loss_agg_mode: Literal[LOSS_AGG_MODES] = "token-mean"  # how token losses become one loss of the mini-batch
    response_length_limit: int | None = None  # the constant that seq-mean-token-sum-norm divides by

    # optimizer
    lr: float | None = None  # peak learning rate of AdamW (None: 1e-3 for tiny-*, 1e-5 for a checkpoint)
    weight_decay: float = 0.01  # decoupled, on every weight
    betas: tuple[float, float] = (0.9, 0.999)  # decay of AdamW's two moving averages
    grad_clip: float = 1.0  # largest norm of the gradient of all weights (inf: no clipping)
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # after the warm-up
    lr_warmup_steps: int = 0  # optimizer steps of linear warm-up; the first is at lr / steps, not at 0
    lr_warmup_steps_ratio: float = 0.0  # the same as a part of all optimizer steps
    min_lr_ratio: float = 0.0  # where cosine ends, as a part of lr
    total_training_steps: int | None = None  # optimizer steps of the whole run (None: this script works it out)


@dataclass(frozen=True)
class Run:
    """Learns a value function from rollouts, evaluates it, saves it as a checkpoint and a Hugging Face folder."""

    critic: Annotated[Config, tyro.conf.arg(name="")] = Config()  # its flags have no prefix
    rollouts: str | None = None  # JSONL to learn from (None: the built-in toy task)
    eval_rollouts: str | None = None  # JSONL to evaluate on (None: no evaluation; the toy has its own)
    skip_bad_rows: bool = False  # leave bad rows out, count and report them, instead of stopping at the first
    recorded_values: bool = False  # old values are the rows' "values" (of the critic that was there), not this critic's
    gamma: float = 1.0  # discount of a reward per action
    lam: float = 1.0  # GAE's lambda for the returns (1: Monte Carlo, the rewards alone)
    bootstrap_truncated: bool = False  # the last value stands for the future of a row cut off by the length limit
    steps: int = 200  # updates of the critic, each on one train batch
    train_batch_size: int | None = None  # rows of one update, global (None: one mini-batch)
    eval_every: int = 20  # updates between evaluations (0: only at the start and the end)
    save_every: int = 0  # updates between checkpoints (0: only at the end)
    keep: int | None = None  # checkpoints to keep, the last ones (None: all)
    async_save: bool = False  # write checkpoints beside the training, from a copy of the state on the host
    resume: str | None = None  # checkpoint folder to go on from; auto: the last complete one in out_dir, if any
    max_skipped_updates: int = 10  # so many updates in a row that are not finite end the run (0: never)
    out_dir: str = "out/critic_megatron"  # for checkpoints, the Hugging Face folder, metrics and curves
    report: str = "auto"  # page on what the critic learned (auto: report.html in out_dir; none: no page)
    report_against: str | None = None  # report.html of another run, to stand beside this one's
    profile_steps: str | None = None  # A:B, steps that torch.profiler records into out_dir/profile (None: none)
    profile_ranks: tuple[int, ...] = (0,)  # ranks that it records on
    wandb_project: str | None = None  # log to Weights & Biases too, if it is installed


if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # at once: what is imported below takes ten seconds
    tyro.cli(Run, description=__doc__, console_outputs=os.environ.get("RANK", "0") == "0")

warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")  # at import: unused

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import transformers

if not torch.cuda.is_available():  # else Megatron loads a compiler for its small functions, and none is used here
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import common
from common import RANK, WORLD_SIZE, Dispatch, UserError, print0, register

transformers.logging.set_verbosity_error()  # what matters of a load is said below, in one line
transformers.logging.disable_progress_bar()
for message in (  # of megatron-core 0.16.1 with this torch; nothing to be done about them here
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.* is deprecated",
):
    warnings.filterwarnings("ignore", message=message)


def validate(config, world_size=WORLD_SIZE):
    """Raises UserError for flags that cannot work, before a process group or a model is built."""
    common.validate_config(config)
    sizes = [f.name for f in dataclasses.fields(config) if f.name.endswith("parallel_size")]
    for name in (*sizes, "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        common.check_flag(config, name, "must be at least 1", lambda x: x is None or x >= 1)
    tp, pp, vpp = (config.tensor_model_parallel_size, config.pipeline_model_parallel_size,
                   config.virtual_pipeline_model_parallel_size)  # fmt: skip
    cp, ep, etp = config.context_parallel_size, config.expert_model_parallel_size, expert_tensor_parallel_size(config)
    for part, name in ((tp, "tensor"), (tp * pp, "pipeline"), (tp * pp * cp, "context")):
        if world_size % part:
            product = f"tensor {tp} x pipeline {pp} x context {cp}"
            fits = [n for n in range(1, world_size + 1) if world_size % (part // size_of(config, name) * n) == 0]
            flag = "" if name == "context" else "-model"
            raise UserError(
                f"--{name}{flag}-parallel-size {size_of(config, name)}: {product} must divide the {world_size} ranks"
                + (f"; here it can be {common.one_of(fits)}" if fits else "")
            )
    if world_size % (etp * ep * pp):
        fits = [n for n in range(1, world_size + 1) if world_size % (etp * n * pp) == 0]
        raise UserError(
            f"--expert-model-parallel-size {ep}: expert tensor {etp} x expert {ep} x pipeline {pp} must divide the "
            f"{world_size} ranks" + (f"; here it can be {common.one_of(fits)}" if fits else "")
        )
    if vpp > 1 and pp == 1:
        raise UserError(f"--virtual-pipeline-model-parallel-size {vpp}: needs --pipeline-model-parallel-size above 1")
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if getattr(config, name) is not None and pp == 1:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {getattr(config, name)}: needs --pipeline-model-parallel-size above 1")
    if sequence_ranks(config) > 1 and not config.use_remove_padding:
        raise UserError(f"--context-parallel-size {cp}: needs packed rows; drop --no-use-remove-padding")
    if config.overlap_param_gather and not config.overlap_grad_reduce:
        raise UserError("--overlap-param-gather: goes with --overlap-grad-reduce only")
    if config.gradient_checkpointing and config.recompute_modules:
        raise UserError("--recompute-modules: --gradient-checkpointing recomputes whole layers already; drop one")
    if config.attn_implementation == "varlen" and not config.use_remove_padding:
        raise UserError("--attn-implementation varlen: is for packed rows; drop --no-use-remove-padding")


def size_of(config, name):
    """tensor, pipeline, context -> the size of that kind of parallelism."""
    return getattr(config, f"{name}_parallel_size" if name == "context" else f"{name}_model_parallel_size")


def expert_tensor_parallel_size(config):
    return config.expert_tensor_parallel_size or config.tensor_model_parallel_size


def splits_sequence(config):
    """Whether tensor-parallel ranks also share the tokens between the matrix products."""
    return config.sequence_parallel and config.tensor_model_parallel_size > 1


def validate_for_model(config, model_config):
    """The same for flags that this model does not go with, and for models that Megatron's layers do not compute."""
    c, kind, tp = model_config, model_config.model_type, config.tensor_model_parallel_size
    if kind not in MODELS:
        known = common.one_of(MODELS)
        raise UserError(
            f"--model {config.model}: {kind} is not mapped to Megatron; {known} are, critic_fsdp.py takes all"
        )
    odd = [f"{name} {getattr(c, name)}" for name in ("attention_bias", "mlp_bias") if getattr(c, name, False)]
    odd += [f"hidden_act {c.hidden_act}"] * (c.hidden_act != "silu")
    kinds = getattr(c, "layer_types", None) or ["sliding"] * bool(getattr(c, "sliding_window", None))
    odd += ["sliding windows"] * any("sliding" in kind for kind in kinds)
    odd += ["quantized weights"] * bool(getattr(c, "quantization_config", None))
    if getattr(c, "num_experts", None) and c.num_experts_per_tok == 1 and c.norm_topk_prob:
        odd.append("norm_topk_prob with one expert a token")
    rope = getattr(c, "rope_parameters", None) or {}
    odd += [f"rope_type {rope['rope_type']}"] * (
        rope.get("rope_type", "default") not in ("default", "linear", "llama3")
    )
    odd += ["partial_rotary_factor"] * (rope.get("partial_rotary_factor", 1.0) != 1.0)
    if odd:
        raise UserError(f"--model {config.model}: {', '.join(odd)} is not mapped to Megatron; use critic_fsdp.py")

    common.check_divides("tensor-model-parallel-size", tp, c.num_attention_heads, "attention heads")
    groups = c.num_key_value_heads
    if groups % tp and tp % groups:
        raise UserError(
            f"--tensor-model-parallel-size {tp}: must divide the model's {groups} key-value heads, or they it"
        )
    experts, etp = getattr(c, "num_experts", None), expert_tensor_parallel_size(config)
    if experts:
        common.check_divides("expert-model-parallel-size", config.expert_model_parallel_size, experts, "experts")
        common.check_divides("expert-tensor-parallel-size", etp, c.moe_intermediate_size, "features inside an expert")
        if tp > 1 and not config.sequence_parallel:
            raise UserError("--no-sequence-parallel: a mixture of experts needs it with tensor parallelism")
    elif config.expert_model_parallel_size > 1 or config.expert_tensor_parallel_size:
        flag = "expert-model" if config.expert_model_parallel_size > 1 else "expert-tensor"
        raise UserError(f"--{flag}-parallel-size: {config.model} ({kind}) has no experts")
    elif "moe" in config.recompute_modules:
        raise UserError(f"--recompute-modules moe: {config.model} ({kind}) has no experts")
    if not all(sparse_layers(c)):
        common.check_divides("tensor-model-parallel-size", tp, c.intermediate_size, "features inside an MLP")
    stage_layers(config, c)


def sparse_layers(model_config):
    """For each layer whether it is a mixture of experts."""
    c, dense = model_config, getattr(model_config, "mlp_only_layers", None) or ()
    every = getattr(c, "decoder_sparse_step", 1)
    mixture = bool(getattr(c, "num_experts", None))
    return [mixture and i not in dense and (i + 1) % every == 0 for i in range(c.num_hidden_layers)]


def stage_layers(config, model_config):
    """Layers of each pipeline stage, as a list. UserError: they do not go up."""
    layers, pp = model_config.num_hidden_layers, config.pipeline_model_parallel_size
    vpp, out = config.virtual_pipeline_model_parallel_size, [None] * pp
    if pp == 1:
        return [layers]
    out[0], out[-1] = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    rest, stages = layers - sum(n or 0 for n in out), out.count(None)
    flag = f"--pipeline-model-parallel-size {pp}"
    if rest < 0:
        raise UserError(f"{flag}: the first and the last stage ask for more than the model's {layers} layers")
    if rest < stages or rest % max(stages, 1) or (rest and not stages):
        given = " that the first and last stage leave" if stages < pp else ""
        raise UserError(
            f"{flag}: {rest} layers{given} do not make {stages} equal stages; give other sizes, or other "
            "--num-layers-in-first-pipeline-stage and --num-layers-in-last-pipeline-stage"
        )
    out = [rest // stages if n is None else n for n in out]
    for n in out:
        if n % vpp:
            fits = [k for k in range(1, n + 1) if all(m % k == 0 for m in out)]
            raise UserError(
                f"--virtual-pipeline-model-parallel-size {vpp}: does not divide the {n} layers of a stage; it can be "
                f"{common.one_of(fits)}"
            )
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Megatron without CUDA, and without Transformer Engine
# ---------------------------------------------------------------------------------------------------------------------


class CudaMeansCpu(TorchFunctionMode):
    """Megatron-Core writes device="cuda" in some places; on a machine without it they mean the CPU."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs and "cuda" in str(kwargs["device"]):
            kwargs = {**kwargs, "device": "cpu"}
        if function is torch.Tensor.cuda:  # its grad scaler, of what a checkpoint has
            return args[0]
        out = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(out, str):  # optimizers switch on "torch.cuda.FloatTensor"
            out = out.replace("torch.", "torch.cuda.")
        return out


def megatron_without_cuda():
    """Lets Megatron-Core 0.16.1 run on CPU and gloo. Does nothing, ever, where CUDA is present.

    What it stands in for are devices, streams, random states, and two collectives that gloo does not have for ranks of
    unequal size (of tokens for experts that tensor-parallel ranks share); never computation.
    """
    rng, moe = tensor_parallel.random, token_dispatcher.MoEAlltoAllTokenDispatcher
    if torch.cuda.is_available() or torch.cuda.manual_seed is torch.manual_seed:  # the latter: done before
        return
    CudaMeansCpu().__enter__()
    warnings.filterwarnings("ignore", message="When using sequence parallelism it is recommended to set .*CUDA")
    torch._dynamo.config.disable = True  # compiling its small functions would take minutes
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # of its tracker, and of recomputation
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(rng.__name__).setLevel(logging.ERROR)  # "CPU RNG state changed", at every recomputation

    def sizes_to_host(self, point, tokens_per_expert=None):  # which it does on a stream of its own, and only from CUDA
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if torch.is_tensor(getattr(self, name, None)):
                setattr(self, name, getattr(self, name).numpy())
        return tokens_per_expert

    moe.cuda_dtoh_stream, moe._maybe_dtoh_and_synchronize = types.SimpleNamespace(), sizes_to_host
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather_any(outputs, x, group=None, async_op=False):
        sizes, n = [len(out) for out in outputs], len(outputs)
        if len(set(sizes)) == 1:
            return all_gather(outputs, x, group=group, async_op=async_op)
        received = x.new_empty(sum(sizes), *x.shape[1:])
        dist.all_to_all_single(received, torch.cat([x] * n), sizes, [len(x)] * n, group=group)
        for out, piece in zip(outputs, received.split(sizes), strict=True):
            out.copy_(piece)

    def reduce_scatter_any(output, inputs, op=dist.ReduceOp.SUM, group=None, async_op=False):
        sizes, n = [len(x) for x in inputs], len(inputs)
        if len(set(sizes)) == 1:
            return reduce_scatter(output, inputs, op, group=group, async_op=async_op)
        received = output.new_empty(n, *output.shape)
        dist.all_to_all_single(received.flatten(0, 1), torch.cat(inputs), [len(output)] * n, sizes, group=group)
        output.copy_(received.sum(0))

    dist.all_gather, dist.reduce_scatter = all_gather_any, reduce_scatter_any


if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16.1 reads the name without having defined it

# ---------------------------------------------------------------------------------------------------------------------
# Value model: a decoder and a value head in float32
# ---------------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """With sequence parallelism each rank sees some of the tokens, so its gradient is a part of the sum."""

    def __init__(self, config, hidden_size, eps=1e-6, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # Megatron then adds it up over tensor-parallel ranks


class ValueHead(nn.Linear):
    """v = w . h + b on the hidden state of every token, in float32, whole on each tensor-parallel rank.

    Stands where GPTModel has its vocabulary head. With --value-head hl_gauss it gives N logits.
    """

    def __init__(self, config, outputs):
        super().__init__(config.hidden_size, outputs)
        self.sequence_parallel = config.sequence_parallel
        self.weight.sequence_parallel = self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_SBD, weight=None, runtime_gather_output=None):
        """(S, B, D) -> (S, B, N) float32; with sequence parallelism of all tokens, on each rank the same."""
        out_SBN = F.linear(hidden_SBD.float(), self.weight, self.bias)
        if self.sequence_parallel:  # every rank then computes the whole loss, and takes back its own gradient alone
            out_SBN = tensor_parallel.gather_from_sequence_parallel_region(out_SBN, tensor_parallel_output_grad=False)
        return out_SBN, None


class CoreAttention(nn.Module):
    """Causal attention within each sequence, by the kernels of common.py: packed rows, padded ones, context parallel.

    With context parallelism each rank has two pieces of every sequence (see lay_out). Keys and values are gathered, and
    each piece sees the keys up to its own end: no head is split, and all ranks have equal work.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, cp_comm_type=None,
                 pg_collection=None):  # fmt: skip
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.context_group = pg_collection.cp
        self.kernel = "auto"  # build_value_model sets it

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None,
                packed_seq_params=None):  # fmt: skip
        """(S,H,D), (S,K,D) of a packed row -> (S, H D); (L,B,H,D), (L,B,K,D) of padded rows -> (L, B, H D)."""
        rows, pack = query.shape[:2], packed_seq_params
        if pack is None:
            query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
            row = padded_row(*rows, query.device, self.kernel)
        else:
            row = pack.row
            if pack.key_index is not None:
                gather = tensor_parallel.gather_from_sequence_parallel_region  # of this group; backward: reduce-scatter
                key, value = (gather(x, group=self.context_group)[pack.key_index] for x in (key, value))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        common.Pack.used = common.choose_kernel(row.kernel, query, value)
        out_SHD = common.ATTENTION[common.Pack.used](row, query, key, value, self.scale)[0].transpose(0, 1)
        if pack is None:
            return out_SHD.unflatten(0, (rows[1], rows[0])).transpose(0, 1).flatten(2).contiguous()
        return out_SHD.flatten(1)


@functools.lru_cache(maxsize=16)
def padded_row(length, rows, device, kernel):
    """Row of so many rows padded to one length; causal attention needs to know no more of padding at the end."""
    return common.pack_row([length] * rows, device, kernel)


def build_skeleton(config, model_config):
    """The model as transformers has it, on meta: what there is to count, and the names of its weights."""
    outputs = config.value_bins if config.value_head == "hl_gauss" else 1
    with torch.device("meta"):
        backbone = AutoModel.from_config(model_config, dtype=torch.float32)
        return nn.ModuleDict({"model": backbone, "score": nn.Linear(model_config.hidden_size, outputs)})


def read_weights(config, model_config):
    """(read, head, words on their origin): read(name) gives a weight by its Hugging Face name, KeyError: not there.

    Files are mapped, not loaded: a rank reads the pages of what it takes. Random weights are those of critic_fsdp.py,
    so every rank draws the whole model.
    """
    outputs = config.value_bins if config.value_head == "hl_gauss" else 1
    head = nn.Linear(model_config.hidden_size, outputs)
    if config.model in common.TINY or config.from_scratch:
        torch.manual_seed(config.seed)
        tensors = AutoModel.from_config(model_config, dtype=torch.float32).state_dict()
        story = f"random weights (seed {config.seed}); {common.init_value_head(head, None, config)}"
        return (lambda name: take(tensors, name)), head, story
    folder = common.local_folder(config.model)
    tensors = StoredTensors(folder, f"--model {config.model}")
    story = f"{len(tensors)} tensors from {config.model}; {common.init_value_head(head, folder, config)}"
    return (lambda name: take(tensors, name)), head, story


class StoredTensors(dict):
    """name -> tensor of a folder, read when asked for; names as in the backbone, without "model.".

    A tensor of a checkpoint may lie in several files, some of its rows in each: first row -> (file, name there).
    """

    def __init__(self, folder, flag, prefix="model."):
        super().__init__()
        self.joined = functools.lru_cache(maxsize=2)(self.join)  # experts are asked for one by one
        try:
            for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
                file = safe_open(path, "pt")
                offsets = json.loads((file.metadata() or {}).get(SHARDING, "{}"))
                for name in file.keys():
                    first, *_ = [*offsets.get(name, {}).get("saved_offsets", ()), 0]
                    self.setdefault(name.removeprefix(prefix), {})[first] = file, name
            for path in [] if self else sorted(glob.glob(os.path.join(folder, "pytorch_model*.bin"))):
                file = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                self |= {name.removeprefix(prefix): {0: (file, name)} for name in file}
        except Exception as error:
            raise UserError(f"{flag}: its weights do not load ({common.one_line(error)})") from None

    def __getitem__(self, key):
        pieces = super().__getitem__(key)
        if pieces.keys() != {0}:
            return self.joined(key)
        file, name = pieces[0]
        return file[name] if isinstance(file, dict) else file.get_tensor(name)

    def join(self, key):
        """A tensor whose rows lie in several files."""
        pieces = {first: file.get_tensor(name) for first, (file, name) in sorted(super().__getitem__(key).items())}
        if list(pieces) != [0, *itertools.accumulate(len(x) for x in pieces.values())][:-1]:
            raise RuntimeError("some of its rows are missing")
        return torch.cat(list(pieces.values()))


def take(tensors, name, form="{}"):
    """A weight by its name on disk, which stands there in this form; transformers holds the experts of a layer in one
    tensor."""
    found = EXPERT.fullmatch(name)
    if form.format(name) in tensors or not found:
        return tensors[form.format(name)]
    experts, i, kind = found[1], int(found[2]), found[3]
    if kind == "down":
        return tensors[form.format(f"{experts}.down_proj")][i]
    return tensors[form.format(f"{experts}.gate_up_proj")][i].chunk(2)[kind == "up"]


SHARDING = "DCP_SHARDING_INFO"  # where torch.distributed.checkpoint notes which part of a tensor a safetensors file has
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")  # as on disk


# ---------------------------------------------------------------------------------------------------------------------
# Weights: megatron-core and Hugging Face
# ---------------------------------------------------------------------------------------------------------------------

MODELS = ("qwen2", "qwen3", "llama", "qwen3_moe")

# megatron-core's name -> how tensor-parallel ranks share it, and what it is made of in Hugging Face's names; the value
# head stands beside the backbone
WEIGHTS = {
    "embedding.word_embeddings.weight": ("vocabulary", "embed_tokens.weight"),
    "decoder.final_layernorm.weight": ("whole", "norm.weight"),
    "output_layer.weight": ("whole", "score.weight"),
    "output_layer.bias": ("whole", "score.bias"),
}
LAYER = {  # after decoder.layers.N. here and layers.N. there
    "input_layernorm.weight": ("whole", "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": ("heads", *(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": ("heads", *(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.q_layernorm.weight": ("whole", "self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": ("whole", "self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": ("inputs", "self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": ("whole", "post_attention_layernorm.weight"),
    "mlp.router.weight": ("whole", "mlp.gate.weight"),
    "mlp.linear_fc1.weight": ("outputs", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("inputs", "mlp.down_proj.weight"),
}


def hf_names(name):
    """(how ranks share it, its names in Hugging Face's backbone) of a weight by its global name."""
    if name in WEIGHTS:
        return WEIGHTS[name][0], list(WEIGHTS[name][1:])
    _, _, layer, rest = name.split(".", 3)
    expert = re.match(r"mlp\.experts\.local_experts\.(\d+)\.", rest)
    if expert:
        cut, *parts = LAYER[f"mlp.{rest[expert.end() :]}"]
        parts = [part.replace("mlp.", f"mlp.experts.{expert[1]}.") for part in parts]
    else:
        cut, *parts = LAYER[rest]
    return cut, [f"layers.{layer}.{part}" for part in parts]


def named_weights(modules):
    """(global name, parameter) of what this rank holds, value head left out; layers and experts counted over ranks."""
    for module in modules:
        for name, p in module.named_parameters():
            if name.startswith("output_layer."):
                continue
            if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
                number = module.decoder.layers[int(layer[1])].layer_number - 1
                name = f"decoder.layers.{number}.{name[layer.end() :]}"
            if expert := re.search(r"local_experts\.(\d+)", name):
                here = module.config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
                number = int(expert[1]) + mpu.get_expert_model_parallel_rank() * here
                name = f"{name[: expert.start(1)]}{number}{name[expert.end(1) :]}"
            yield name, p


def named_head(modules):
    """The same of the value head, where it is."""
    head = modules[-1].output_layer.named_parameters() if modules[-1].post_process else ()
    return [(f"output_layer.{name}", p) for name, p in head]


def value_model_name(part):
    """A Hugging Face name as critic_fsdp.py's value model has it, and every checkpoint."""
    return part if part.startswith("score.") else f"model.{part}"


def tensor_group(name):
    """(group, rank, size) of the ranks that share this weight by tensor parallelism."""
    if ".experts." in name:
        group = mpu.get_expert_tensor_parallel_group()
    else:
        group = mpu.get_tensor_model_parallel_group()
    return group, dist.get_rank(group), dist.get_world_size(group)


def shard(cut, parts, groups, rank, size):
    """What a tensor-parallel rank holds of a weight, from its whole parts in Hugging Face's form."""
    whole, *_ = parts
    if cut == "whole":
        return whole
    if cut == "inputs":
        return whole.chunk(size, 1)[rank]
    if cut == "outputs":  # gate and up projection, a part of either
        return torch.cat([part.chunk(size)[rank] for part in parts])
    if cut == "vocabulary":
        return F.pad(whole, (0, 0, 0, -len(whole) % size)).chunk(size)[rank]
    by_group = [part.unflatten(0, (groups, -1)) for part in parts]  # heads: each group's queries, its key, its value
    return torch.cat(by_group, 1).flatten(0, 1).chunk(size)[rank]


def unshard(cut, shards, groups, head_dim, vocab_size):
    """The whole parts in Hugging Face's form, from what all tensor-parallel ranks hold: the inverse of shard."""
    if cut == "whole":
        return shards[:1]
    if cut == "inputs":
        return [torch.cat(shards, 1)]
    if cut == "outputs":
        return [torch.cat(halves) for halves in zip(*(x.chunk(2) for x in shards), strict=True)]
    if cut == "vocabulary":
        return [torch.cat(shards)[:vocab_size]]
    by_group = torch.cat(shards).unflatten(0, (groups, -1))
    queries = by_group.shape[1] - 2 * head_dim
    return [part.flatten(0, 1) for part in by_group.split([queries, head_dim, head_dim], 1)]


def stored_shards(named, groups, read, flag):
    """(parameter, what this rank holds of it, on the host) of named weights; read(name) gives a Hugging Face tensor.

    After the last one comes a UserError on all ranks if some do not fit on any (a collective).
    """
    problems = []
    for name, p in named:
        cut, parts = hf_names(name)
        _, rank, size = tensor_group(name)
        try:
            x = shard(cut, [read(part) for part in parts], groups, rank, size)
        except KeyError as error:
            problems.append(f"{error.args[0]} is not in the checkpoint")
        except (RuntimeError, IndexError) as error:  # parts that do not fit together
            problems.append(f"{parts[0]}: {common.one_line(error)}")
        else:
            if x.shape == p.shape:
                yield p, x
            else:
                problems.append(f"{parts[0]} makes {tuple(x.shape)}, not {tuple(p.shape)}")
    if problems := sorted({problem for some in common.of_all_ranks(problems) for problem in some}):
        raise UserError(f"{flag}: {len(problems)} weights do not fit, e.g. {problems[0]}")


def load_weights(config, modules, read):
    """Copies each weight's shard into the modules -> the shards as they were stored, one dict a module."""
    groups, shards = modules[0].config.num_query_groups, {}
    for p, x in stored_shards(named_weights(modules), groups, read, f"--model {config.model}"):
        shards[p] = x.contiguous()
    with torch.no_grad():
        for p, stored in shards.items():
            p.copy_(stored)
    return [{n: shards.get(p, p.detach()) for n, p in module.named_parameters()} for module in modules]


def replicas(name=""):
    """Ranks that hold the same of a weight: those that differ in rows, or in a part of the same rows. The name tells
    whether it is an expert's."""
    if ".experts." in name:
        return mpu.get_expert_data_parallel_group()
    return mpu.get_data_parallel_group(with_context_parallel=True)


def whole_weights(modules, vocab_size, local=lambda name, p: p.detach()):
    """(Hugging Face name, tensor on the host) of the weights that this rank is to write; others only take part.

    local(name, p) gives what this rank holds of a weight. A collective: tensor-parallel ranks gather one weight at a
    time, and one rank keeps it. Those that hold the same layers take turns with them.
    """
    config = modules[0].config
    for name, p in (*named_weights(modules), *named_head(modules)):
        cut, parts = hf_names(name)
        group, rank, size = tensor_group(name)
        mine = local(name, p)
        shards = [mine]
        if cut != "whole" and size > 1:
            shards = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(shards, mine.contiguous(), group=group)
        layer = re.match(r"decoder\.layers\.(\d+)", name)
        replica, writer = divmod(int(layer[1]) if layer else 0, size)
        if (rank, dist.get_rank(replicas(name))) == (writer, replica % dist.get_world_size(replicas(name))):
            wholes = unshard(cut, shards, config.num_query_groups, config.kv_channels, vocab_size)
            for part, whole in zip(parts, wholes, strict=True):
                yield value_model_name(part), whole.float().cpu().contiguous().clone()


def join_experts(weights):
    """Weights with experts one by one -> name -> (first row, tensor), experts as transformers holds them: those of a
    layer in one tensor, whose rows from the first on these are."""
    out, layers = {}, {}
    for name, x in weights.items():
        if found := EXPERT.fullmatch(name):
            layers.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = x
        else:
            out[name] = 0, x
    for name, experts in layers.items():
        gate_up = [torch.cat([experts[i]["gate"], experts[i]["up"]]) for i in sorted(experts)]
        out[f"{name}.gate_up_proj"] = min(experts), torch.stack(gate_up)
        out[f"{name}.down_proj"] = min(experts), torch.stack([experts[i]["down"] for i in sorted(experts)])
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Parallelism: which ranks share what, and the model spread over them
# ---------------------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Ranks as tp x cp x dp x pp. tp ranks share each product, cp ranks each sequence, pp ranks the layers; dp groups
    split the rows. Experts are spread over the same ranks in their own way (ep x etp)."""

    device: torch.device
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    pp_size: int
    last_stage: bool  # this rank holds the value head


def make_layout(config, device):
    """Builds the process groups."""
    megatron_without_cuda()
    if mpu.is_initialized():  # they are global: a worker made before this one is now without its groups
        mpu.destroy_model_parallel()
    vpp = config.virtual_pipeline_model_parallel_size
    mpu.initialize_model_parallel(
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        vpp if vpp > 1 else None,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(config),
        distributed_timeout_minutes=config.timeout_minutes,
        create_gloo_process_groups=False,  # for ways to save optimizer state that are not used here
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.seed, force_reset_rng=True)
    return Layout(
        device=device,
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=mpu.get_context_parallel_world_size(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        last_stage=mpu.is_pipeline_last_stage(ignore_virtual=True),
    )


def compute_dtype(config, device):
    """The dtype of matrix products; master weights, gradients, optimizer and value head are float32."""
    if config.param_dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, config.param_dtype)


def transformer_config(config, model_config, dtype):
    """Megatron's description of the model and of how it is computed."""
    c, fields, vpp = model_config, {}, config.virtual_pipeline_model_parallel_size
    if getattr(c, "num_experts", None):
        fields |= dict(
            num_moe_experts=c.num_experts,
            moe_router_topk=c.num_experts_per_tok,
            moe_ffn_hidden_size=c.moe_intermediate_size,
            moe_layer_freq=[int(sparse) for sparse in sparse_layers(c)],
            moe_router_score_function="softmax",
            moe_router_pre_softmax=not c.norm_topk_prob,  # softmax over all experts, or over the chosen ones
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
        )
    if config.gradient_checkpointing:
        fields |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif config.recompute_modules:
        fields |= dict(recompute_granularity="selective", recompute_modules=list(config.recompute_modules))
    return TransformerConfig(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        ffn_hidden_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_query_groups=c.num_key_value_heads,
        kv_channels=head_dim(c),
        normalization="RMSNorm",
        layernorm_epsilon=c.rms_norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=c.model_type == "qwen2",
        qk_layernorm=c.model_type.startswith("qwen3"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        sequence_parallel=splits_sequence(config),
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=config.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=config.num_layers_in_last_pipeline_stage,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(config),
        variable_seq_lengths=True,  # stages tell each other the size of each micro-batch
        moe_token_dispatcher_type="alltoall",
        overlap_p2p_comm=vpp > 1,  # with turns, sends that wait for each other would hang
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,  # what has been sent on is not needed here
        calculate_per_token_loss=True,  # gradients are plain sums over micro-batches and ranks: see forward_backward
        gradient_accumulation_fusion=False,  # this and what follows: kernels of Apex and Transformer Engine
        persist_layer_norm=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **fields,
    )


def head_dim(model_config):
    """Features of an attention head."""
    c = model_config
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def rotary_frequencies(model_config):
    """(D/2,) angle of a position step for each pair of features, as transformers has it."""
    rope = model_config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        half = torch.arange(0, head_dim(model_config), 2, dtype=torch.float32)
        return 1.0 / rope["rope_theta"] ** (half / head_dim(model_config))
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](model_config, "cpu")
    return frequencies


def layer_spec(transformer, vp_stage):
    """The layers of one piece of the model: Megatron's own, with the norm and the attention above."""
    block = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    block.layer_norm = RMSNorm
    for spec in block.layer_specs:
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention.core_attention = CoreAttention
        if transformer.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block


def build_value_model(config, model_config, layout):
    """(the chunks of the model on this rank, the weights as they were stored, FlopsModel, words on the number of
    parameters and on their origin)."""
    transformer, tp = transformer_config(config, model_config, compute_dtype(config, layout.device)), layout.tp_size
    skeleton, modules = build_skeleton(config, model_config), []
    vpp = config.virtual_pipeline_model_parallel_size
    for vp_stage in range(vpp) if vpp > 1 else (None,):
        first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        module = GPTModel(
            transformer,
            layer_spec(transformer, vp_stage),
            vocab_size=math.ceil(model_config.vocab_size / tp) * tp,
            max_sequence_length=model_config.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        module.rotary_pos_emb.inv_freq = rotary_frequencies(model_config).to(layout.device)
        for attention in (m for m in module.modules() if isinstance(m, CoreAttention)):
            attention.kernel = config.attn_implementation
        modules.append(module)
    read, head, story = read_weights(config, model_config)
    if modules[-1].post_process:
        modules[-1].output_layer = ValueHead(transformer, head.out_features).to(layout.device)
        modules[-1].output_layer.load_state_dict(head.state_dict())
    stored = load_weights(config, modules, read)
    count = sum(p.numel() for p in skeleton.parameters())
    return modules, stored, common.flops_model(skeleton, model_config), f"{count:,} parameters", story


def padding_row(module, pad_token_id):
    """The row of the padding token in this rank's part of the embedding, or None."""
    if not module.pre_process or pad_token_id is None:
        return None
    embedding = module.embedding.word_embeddings
    here = embedding.vocab_start_index <= pad_token_id < embedding.vocab_end_index
    return pad_token_id - embedding.vocab_start_index if here else None


def wrap(config, modules):
    """The chunks with what casts their inputs, holds their gradients in one float32 buffer and adds those up."""
    transformer, chunks = modules[0].config, modules
    for name, p in (named for module in modules for named in module.named_parameters()):
        if ".experts." in name:
            p.allreduce = False  # but over the experts' own replicas; Megatron says so from two expert ranks on only
    head = modules[-1].output_layer if modules[-1].post_process else nn.Module()
    exact = head.state_dict()
    if transformer.bf16 or transformer.fp16:
        chunks = [Float16Module(transformer, module) for module in modules]
    head.float().load_state_dict(exact)  # rounded it would differ by rank: each has the masters of a part of it
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
    )
    return [DistributedDataParallel(transformer, options, chunk) for chunk in chunks]


# ---------------------------------------------------------------------------------------------------------------------
# The critic: forward, loss, step
# ---------------------------------------------------------------------------------------------------------------------


def row_unit(config):
    """A row takes a multiple of so many slots: two pieces a context-parallel rank, or padding to share out."""
    if config.use_remove_padding:
        return 2 * config.context_parallel_size if config.context_parallel_size > 1 else 1
    return config.tensor_model_parallel_size if splits_sequence(config) else 1


def pack_unit(config):
    """So does a micro-batch; with packed rows its end is padded."""
    shared = config.tensor_model_parallel_size if config.use_remove_padding and splits_sequence(config) else 1
    return row_unit(config) * shared


def sequence_ranks(config):
    """Ranks that share the tokens of each sequence."""
    return config.context_parallel_size


def least_budget(config, tokens):
    """The smallest budget of a rank that takes a row of so many tokens."""
    return math.ceil(math.ceil(tokens / pack_unit(config)) * pack_unit(config) / sequence_ranks(config))


def training_limits(config):
    """(most tokens, rows) of a training micro-batch of the ranks that share it; rows, if given, decide alone."""
    tokens, rows = config.ppo_max_token_len_per_gpu, config.ppo_micro_batch_size_per_gpu
    return 2**62 if tokens == "auto" else tokens * sequence_ranks(config), rows  # auto: until find_budget knows


def forward_limits(config):
    """The same for compute_values: as in training unless one of its own flags is given."""
    tokens, rows = config.forward_max_token_len_per_gpu, config.forward_micro_batch_size_per_gpu
    if tokens is None and rows is None:
        return training_limits(config)
    return tokens and tokens * sequence_ranks(config), rows


def check_budget(config, batch, training, path=None):
    """UserError naming the longest row if no micro-batch can hold it. path: the file that the rows come from."""
    least = least_budget(config, max(batch.lengths, default=0))
    tokens, rows = training_limits(config) if training else forward_limits(config)
    if rows is None and least * sequence_ranks(config) > tokens:
        flag = "forward" if not training and config.forward_max_token_len_per_gpu else "ppo"
        longest, where = common.longest_row(batch, path)
        given = getattr(config, f"{flag}_max_token_len_per_gpu")
        raise UserError(f"--{flag}-max-token-len-per-gpu {given}: {where} has {longest} tokens; give at least {least}")


class MicroBatch(NamedTuple):
    """What this rank computes of a micro-batch.

    Columns are of its S slots, and of the action that *follows* each.
    """

    input_ids: torch.Tensor  # (1, S) packed, or (B, L) padded, S = B L
    packed: PackedSeqParams | None
    mask: torch.Tensor  # bool: there is an action
    index: torch.Tensor | None = None  # int64: where it stands in the flat columns of the whole batch; without a loss
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    weights: torch.Tensor | None = None  # of the token losses


class MegatronPPOCritic:
    """Values and updates of a value model. compute_values and update_critic take the *global* batch, the same on every
    rank, and work on this rank's share of it."""

    def __init__(self, config, modules, stored, flops, layout, pad_token_id=None):
        self.config, self.flops, self.layout = config, flops, layout
        self.modules, self.transformer = modules, modules[0].config
        self.model = wrap(config, modules)  # the same chunks
        lr = config.lr if config.lr is not None else (1e-3 if config.model in common.TINY else 1e-5)
        options = OptimizerConfig(
            optimizer="adam",
            decoupled_weight_decay=True,
            lr=lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            clip_grad=config.grad_clip,
            params_dtype=self.transformer.params_dtype,
            bf16=self.transformer.bf16,
            fp16=self.transformer.fp16,
            initial_loss_scale=2.0**16,  # this and the next three: of float16 alone
            min_loss_scale=1.0,
            loss_scale_window=1000,
            hysteresis=1,
            use_distributed_optimizer=True,
            overlap_param_gather=config.overlap_param_gather,
        )
        # {}: Megatron would spare biases and norms the weight decay; here as in critic_fsdp.py every weight has it
        self.optimizer = get_megatron_optimizer(options, self.model, config_overrides={}, use_gloo_process_groups=False)
        for optimizer in self.optimizers():  # in each group it puts float32 weights first, but counts them as they came
            groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
            for i, (full, half) in enumerate(groups):
                optimizer.model_param_group_index_map |= {p: (i, j) for j, p in enumerate([*full, *half])}
        for optimizer in self.optimizers():
            for group in optimizer.optimizer.param_groups:
                group["fused"] = True  # of torch's AdamW: one kernel, a fifth of the time on CPU
        if self.transformer.params_dtype != torch.float32:  # master weights from the file, not rounded
            named = {f"model{i}": weights for i, weights in enumerate(stored)} if len(stored) > 1 else stored[0]
            for optimizer in self.optimizers():  # all of them give it to the first one alone
                optimizer.reload_model_params(named)
        self.transformer.finalize_model_grads_func = finalize_model_grads
        self.transformer.grad_scale_func = self.optimizer.scale_loss
        if config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.model]
            self.transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.padding_row = padding_row(modules[0], pad_token_id)
        self.peak_lr = lr
        self.optimizer_steps = 0  # taken, skipped ones not counted: the position of the schedule
        self.tries = 0  # of a mini-batch in float16, as yet in vain
        self.updates = 0  # calls of update_critic: with seed and epoch the key of every shuffle

    def my_micro_batches(self, batch, max_tokens, size):
        """This rank's rows of a global batch as lists of row indices, one list a micro-batch.

        Rows go to data-parallel ranks by FLOPs, a rank's rows to micro-batches by size. Every rank works it out for
        all ranks, so that all make the same number of forwards without a word: ranks that share weights must.
        With virtual stages the number is a multiple of the pipeline's, as their schedule wants.
        """
        config, layout = self.config, self.layout
        lengths = [math.ceil(n / row_unit(config)) * row_unit(config) for n in batch.lengths]
        shares = common.balance([self.flops.forward_flops(n) for n in batch.lengths], layout.dp_size)
        max_tokens = max_tokens and max_tokens // pack_unit(config) * pack_unit(config)
        multiple = layout.pp_size if config.virtual_pipeline_model_parallel_size > 1 else 1
        split = [[lengths[i] for i in share] for share in shares]
        parts = common.micro_batches(split, max_tokens, size, not config.use_remove_padding, multiple)
        mine = shares[layout.dp_rank]
        return [[mine[j] for j in part] for part in parts[layout.dp_rank]]

    def lay_out(self, lengths):
        """Where the tokens of a micro-batch go -> (slots, PackedSeqParams or None).

        slots: (1, S) or (B, L) indices into the flat tokens, their number T where there is padding. A context-parallel
        rank r of p has, of each row cut into 2 p pieces, piece r and piece 2 p - 1 - r: under a causal mask that is
        equal work for all (Megatron's rotary embedding counts on that order).

            p = 2        row: 0 1 2 3 4 5 6 7        rank 0: 0 1 . . . . 6 7        rank 1: . . 2 3 4 5 . .
        """
        config, layout, total, unit = self.config, self.layout, sum(lengths), row_unit(self.config)
        sizes = [math.ceil(n / unit) * unit for n in lengths]
        starts = list(itertools.accumulate(lengths, initial=0))[:-1]
        tokens = lambda start, n, size: F.pad(torch.arange(start, start + n), (0, size - n), value=total)
        if not config.use_remove_padding:
            rows = zip(starts, lengths, strict=True)
            return torch.stack([tokens(start, n, max(sizes)) for start, n in rows]), None
        if tail := -sum(sizes) % pack_unit(config):
            starts, lengths, sizes = [*starts, total], [*lengths, 0], [*sizes, tail]
        slots = torch.cat([tokens(*row) for row in zip(starts, lengths, sizes, strict=True)])
        packed = PackedSeqParams(qkv_format="thd", max_seqlen_q=max(sizes), max_seqlen_kv=max(sizes))
        ends = common.cumulative(torch.tensor(sizes))  # on the host: rotary embedding reads the numbers
        packed.cu_seqlens_q = packed.cu_seqlens_kv = ends
        if layout.cp_size > 1:
            slots, packed.row, packed.key_index = self.share_context(slots, sizes)
        else:
            packed.row, packed.key_index = common.pack_row(sizes, layout.device, config.attn_implementation), None
        return slots[None], packed

    def share_context(self, slots, sizes):
        """This rank's slots of packed rows, their Row, and where the keys that it sees lie among the gathered ones."""
        p, r, device = self.layout.cp_size, self.layout.cp_rank, self.layout.device
        ends = list(itertools.accumulate(sizes))
        places, key_places, piece_sizes, key_sizes = [[] for _ in range(p)], [], [], []
        for end, size in zip(ends, sizes, strict=True):
            start, piece = end - size, size // (2 * p)
            cut = lambda i, start=start, piece=piece: torch.arange(start + i * piece, start + (i + 1) * piece)
            for rank in range(p):
                places[rank] += [cut(rank), cut(2 * p - 1 - rank)]
            for i in (r, 2 * p - 1 - r):
                key_places.append(torch.arange(start, start + (i + 1) * piece))
                piece_sizes.append(piece)
                key_sizes.append((i + 1) * piece)
        gathered = torch.cat([torch.cat(some) for some in places])  # the place of each gathered key
        key_index = gathered.argsort()[torch.cat(key_places)].to(device, non_blocking=True)
        row = common.pack_row(piece_sizes, device, self.config.attn_implementation, key_sizes)
        return slots[torch.cat(places[r])], row, key_index

    def micro_batch(self, batch, rows, counts=None):
        """These rows as a MicroBatch on the device; no rows are one masked token, to keep in step with other ranks.

        counts: LossCounts of the mini-batch, if there is a loss.
        """
        config, micro = self.config, batch.select(rows) if rows else common.masked_token()
        fields, (slots, packed) = {}, self.lay_out(micro.lengths)
        column = lambda x_T: F.pad(x_T, (0, 1))[slots.flatten()]  # 0 where there is padding
        following = lambda x_T: column(x_T.roll(-1)).to(self.layout.device, non_blocking=True)  # the shift: to the left
        fields["mask"] = micro.response_mask  # of the first token it is false: nothing rolls from row to row
        if counts is None:
            fields["index"] = batch.token_index(rows) if rows else torch.zeros(1, dtype=torch.int64)
        else:
            fields["values"], fields["returns"] = micro.values, micro.returns
            fields["weights"] = common.loss_weights(
                micro.response_mask, micro.cu_seqlens, config.loss_agg_mode, counts, config.response_length_limit
            )
        input_ids = column(micro.input_ids).view(slots.shape).to(self.layout.device, non_blocking=True)
        return MicroBatch(input_ids, packed, **{name: following(x_T) for name, x_T in fields.items()})

    def values(self, outputs, mask):
        """Values of the actions from what the head gives, values or logits in a row each; zero elsewhere."""
        if self.config.value_head == "hl_gauss":
            outputs = common.hl_gauss_values(outputs, *self.config.value_range)
        return torch.where(mask, outputs, 0.0)

    def run_schedule(self, micros, reduce, forward_only=False):
        """Sends all micro-batches through Megatron's schedule: forward, and unless forward_only backward.

        On the last stage reduce(outputs_S, micro) gives a loss and anything to keep; a list of the latter is returned
        there, an empty one elsewhere.
        """

        def forward_step(micros, chunk):
            micro = next(micros)
            outputs = chunk(micro.input_ids, None, None, packed_seq_params=micro.packed)

            def loss_of(outputs_BLN):
                loss, kept = reduce(outputs_BLN.flatten(0, 1).squeeze(-1), micro)
                return loss, torch.tensor(0, dtype=torch.int), kept  # 0: no tokens to divide by, see forward_backward

            return outputs, loss_of

        several, iterators = len(self.model) > 1, [iter(micros) for _ in self.model]
        if forward_only:
            iterators[0] = iter(common.progress(micros, "values"))
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=self.model if several else self.model[0],
            num_microbatches=len(micros),
            seq_length=1,  # unused: each micro-batch has its own
            micro_batch_size=1,
            forward_only=forward_only,
        )

    @torch.no_grad()
    def compute_values(self, batch):
        """Values of the actions of the global batch: (T,) float32 on the host, zero elsewhere, equal on all ranks."""
        if not len(batch):
            return torch.zeros(0)
        self.train(False)
        values_T = torch.zeros(len(batch.input_ids), device=self.layout.device)
        micros = [self.micro_batch(batch, rows) for rows in self.my_micro_batches(batch, *forward_limits(self.config))]

        def reduce(outputs_S, micro):
            if self.layout.tp_rank == 0:
                values_T.index_add_(0, micro.index, self.values(outputs_S, micro.mask))
            return outputs_S.sum(), None

        self.run_schedule(micros, reduce, forward_only=True)
        dist.all_reduce(values_T)  # each token was computed by one rank of the last stages; others add 0
        return values_T.cpu()

    def train(self, mode):
        for chunk in self.model:
            chunk.train(mode)

    def update_critic(self, batch):
        """PPO epochs over mini-batches of the global batch, one optimizer step each -> metrics, equal on all ranks."""
        config = self.config
        self.train(True)
        totals = torch.zeros(4, dtype=torch.float64, device=self.layout.device)  # see sums below
        norms, lr, mini_batches = [], math.nan, 0
        bubbles = []
        for epoch in range(config.ppo_epochs):
            order = range(len(batch))
            if config.shuffle:
                order = common.permutation(len(batch), config.seed, self.updates, epoch)
            for mini in batch.select(order).split(config.ppo_mini_batch_size):
                mini_batches += 1
                counts = common.loss_counts(mini.response_mask, mini.cu_seqlens)
                finite = all(x_T[mini.response_mask].isfinite().all() for x_T in (mini.values, mini.returns))
                if counts.tokens == 0 or not finite:
                    continue  # nothing to learn; without an action AdamW would move the weights all the same
                micros = self.my_micro_batches(mini, *training_limits(config))
                sums = self.forward_backward(mini, micros, counts)
                bubbles.append(self.bubble(len(micros)))
                next_lr = self.learning_rate()
                norm = self.optimizer_step()
                while self.tries:  # float16: to skip would lose these rows, and only where the layout rounds so
                    sums = self.forward_backward(mini, micros, counts)
                    norm = self.optimizer_step()
                if math.isfinite(norm):
                    lr = next_lr
                    norms.append(norm)
                    totals += sums
        self.updates += 1
        dist.all_reduce(totals)
        loss, clipped, vpreds, actions = totals.tolist()
        return {
            "critic/vf_loss": loss / len(norms) if norms else math.nan,
            "critic/vf_clipfrac": clipped / actions if norms else math.nan,
            "critic/vpred_mean": vpreds / actions if norms else math.nan,
            "critic/grad_norm": sum(norms) / len(norms) if norms else math.nan,
            "critic/lr": lr,
            "critic/skipped_steps": mini_batches - len(norms),
            "perf/pipeline_bubble": sum(bubbles) / len(bubbles) if bubbles else math.nan,
        }

    def loss(self, outputs, micro):
        """These actions' part of the mini-batch loss, and of its sums (loss, clipped, vpreds, actions)."""
        config, vpreds = self.config, self.values(outputs, micro.mask)
        if config.value_head == "hl_gauss":
            loss = common.hl_gauss_loss(outputs, micro.returns, micro.mask, micro.weights, *config.value_range)
            clipped = torch.zeros_like(loss)
        else:
            loss, clipped = common.value_loss(
                vpreds, micro.values, micro.returns, micro.mask, micro.weights, config.cliprange_value
            )
        return loss, torch.stack([loss, clipped, vpreds.sum(), micro.mask.sum()]).detach()

    def forward_backward(self, mini, micros, counts):
        """Makes the gradient of the mini-batch loss, of all ranks -> this rank's sums (loss, clipped, vpreds, actions).

        Megatron would divide by micro-batches, tokens and ranks; with calculate_per_token_loss and a count of 0 tokens
        it divides by nothing. So each rank adds its own tokens' part of the loss, and the sum over all is the loss.
        """
        micros = [self.micro_batch(mini, rows, counts) for rows in micros]
        for chunk in self.model:  # here, for the buffer stays: after a step it would be cleared for nobody
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        kept = self.run_schedule(micros, self.loss)
        if self.padding_row is not None:  # as in transformers, where the padding token's embedding does not learn
            self.modules[0].embedding.word_embeddings.weight.main_grad[self.padding_row].zero_()
        if not kept or self.layout.tp_rank > 0:  # tensor-parallel ranks all have the same
            return torch.zeros(4, dtype=torch.float64, device=self.layout.device)
        return torch.stack(kept).double().sum(0)

    def bubble(self, micro_batches):
        """The part of the time that a stage waits for others to begin and end, (p-1) / (p-1 + v m), were all
        micro-batches of equal cost (interleaved 1F1B, Narayanan et al. 2104.04473, sec. 2.2)."""
        idle = self.layout.pp_size - 1
        return idle / (idle + self.config.virtual_pipeline_model_parallel_size * micro_batches)

    def learning_rate(self):
        """The rate of the next step: linear warm-up, then constant or cosine. Skipped steps do not move it."""
        c, step, total = self.config, self.optimizer_steps, self.config.total_training_steps
        warmup = c.lr_warmup_steps or (round(c.lr_warmup_steps_ratio * total) if c.lr_warmup_steps_ratio else 0)
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        if c.lr_scheduler_type == "constant":
            return self.peak_lr
        done = min((step - warmup) / max(total - warmup, 1), 1.0)
        return self.peak_lr * (c.min_lr_ratio + (1 - c.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)))

    def optimizer_step(self):
        """Clips and steps -> gradient norm before clipping. A norm that is not finite skips the step, on all ranks."""
        # what Megatron's own step() does, but that one would also step on a NaN
        scale = self.loss_scale()
        overflow = self.optimizer.prepare_grads()  # float16: the gradient is infinite, and the loss scale lower now
        if self.transformer.fp16:
            overflow = self.agree_on_overflow(overflow, scale)
        norm = math.nan if overflow else float(self.optimizer.get_grad_norm())
        if math.isfinite(norm):
            for optimizer in self.optimizers():
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self.config.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step_with_ready_grads()
            self.optimizer_steps += 1
        return norm

    def loss_scale(self):
        """Float16's, the lowest that this rank knows of: experts and the rest have one each, but the loss has one."""
        return min([float(x.grad_scaler.scale) for x in self.optimizers() if x.grad_scaler], default=math.inf)

    def agree_on_overflow(self, overflow, before):
        """Whether any rank's gradient is infinite; then tries counts up for as long as the loss scale can fall, on all
        ranks alike. A mini-batch that overflows at any scale leaves it as it was before."""
        told = torch.tensor([float(overflow), -before, -self.loss_scale()], device=self.layout.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        overflow, before, scale = bool(told[0]), -told[1:2], -told[2:]
        fell = overflow and bool(scale < before)
        if not fell:
            scale = scale * 2**self.tries
        self.tries = self.tries + 1 if fell else 0
        for optimizer in self.optimizers() if overflow else ():
            scaler = optimizer.grad_scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "growth_tracker": 0})
        return overflow

    def optimizers(self):
        """Megatron's distributed optimizers: one of the experts, where ranks share them, and one of the rest."""
        return [x for x in self.optimizer.chained_optimizers if not x.is_stub_optimizer and x.get_parameters()]

    def stepped(self, p):
        """(AdamW, its float32 tensor, the place of that in the flattened weight) of the part of a weight that this rank
        steps with; None if it has none."""
        for optimizer in self.optimizers():
            if p in optimizer.model_param_group_index_map:
                group, i = optimizer.model_param_group_index_map[p]
                place = optimizer._get_model_param_range_map(p)["param"]
                mine = optimizer.optimizer.param_groups[group]["params"][i]
                return optimizer.optimizer, mine, slice(place.start, place.end)
        return None

    def master(self, name, p, part=lambda adam, mine: mine):
        """The float32 weight behind p, or what part() takes for it, from the ranks that share its optimizer state (a
        collective of all that hold the weight)."""
        flat = torch.zeros(p.numel(), device=p.device)
        if found := self.stepped(p):
            adam, mine, place = found
            flat[place] = part(adam, mine).detach()
        dist.all_reduce(flat, group=replicas(name))
        return flat.view_as(p)

    @torch.no_grad()
    def restore(self, kind, p, x):
        """Takes what this rank holds of a whole weight or moment: the inverse of master, without a word to others."""
        if kind == "weight":
            p.copy_(x)
        if found := self.stepped(p):
            adam, mine, place = found
            state = adam.state[mine]
            if kind != "weight" and kind not in state:  # torch makes it at the first step
                state[kind] = torch.zeros_like(mine)
            (mine if kind == "weight" else state[kind]).copy_(x.flatten()[place])

    def finish_gather(self):
        """Waits for updated weights that --overlap-param-gather has left on their way."""
        for chunk in self.model if self.config.overlap_param_gather else ():
            chunk.start_param_sync(force_sync=True)


# ---------------------------------------------------------------------------------------------------------------------
# The worker: life cycle, memory, metrics, checkpoints
# ---------------------------------------------------------------------------------------------------------------------


STATE = {  # what a step changes -> how a checkpoint names it, of the weight with the name {}
    "weight": "model.{}",
    "exp_avg": "optimizer.{}.exp_avg",
    "exp_avg_sq": "optimizer.{}.exp_avg_sq",
}


class CriticWorker:
    """What a PPO loop holds: every rank makes one and calls its methods in the same order."""

    def __init__(self, config):
        validate(config)
        if config.total_training_steps is None and (
            config.lr_scheduler_type == "cosine" or config.lr_warmup_steps_ratio
        ):
            raise UserError("--total-training-steps: cosine and --lr-warmup-steps-ratio need it")
        self.tokenizer = common.load_tokenizer(config)
        self.model_config = common.load_model_config(config, self.tokenizer)
        self.config = config = common.with_value_range(config, self.model_config)
        self.vocab_size = self.model_config.get_text_config().vocab_size
        validate_for_model(config, self.model_config)
        self.device = common.setup_distributed(config.timeout_minutes)
        self.layout = make_layout(config, self.device)
        self.parked = []  # (storage, its bytes, its content on the host or None) while the critic is off the device

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self):
        """Builds the model and its optimizer, and refuses a model that cannot work as a critic here."""
        config, layout = self.config, self.layout
        modules, stored, flops, size, story = build_value_model(config, self.model_config, layout)
        pad = self.model_config.pad_token_id  # below 0 it counts from the end, in transformers
        pad = pad if pad is None else pad % self.vocab_size
        self.critic = MegatronPPOCritic(config, modules, stored, flops, layout, pad)
        torch.manual_seed(config.seed)  # random weights were drawn
        print0(f"model      {config.model} ({self.model_config.model_type}), {size}: {story}")
        tp, cp, dp, pp = layout.tp_size, layout.cp_size, layout.dp_size, layout.pp_size
        stages, vpp = stage_layers(config, self.model_config), config.virtual_pipeline_model_parallel_size
        turns = f", each in {vpp} turns" if vpp > 1 else ""
        layers = f"{sum(stages)} = {' + '.join(map(str, stages))}{turns}" if pp > 1 else str(sum(stages))
        print0(f"layout     ranks {WORLD_SIZE} = tp {tp} x cp {cp} x dp {dp} x pp {pp}; layers {layers}")
        if experts := getattr(self.model_config, "num_experts", None):
            ep, etp = config.expert_model_parallel_size, expert_tensor_parallel_size(config)
            ranks = f"ranks {WORLD_SIZE} = etp {etp} x ep {ep} x dp {WORLD_SIZE // (etp * ep * pp)} x pp {pp}"
            print0(f"experts    {experts} = ep {ep} x {experts // ep} a rank; {ranks}")
        dtype = str(compute_dtype(config, self.device)).removeprefix("torch.")
        print0(f"precision  {dtype} products on {self.device.type}; master weights, gradients, value head float32")
        self.check_model()

    @register(Dispatch.ONE_TO_ALL)
    def find_budget(self, longest, row):
        """Makes a number of --ppo-max-token-len-per-gpu auto, on which no update depends. UserError: no row would fit.

        longest: tokens of the longest row to come; row: words that name it.
        """
        if self.config.ppo_max_token_len_per_gpu != "auto":
            return
        self.check_here()
        critic = self.critic
        longest = math.ceil(longest / pack_unit(self.config)) * pack_unit(self.config)
        turns = self.layout.pp_size * (2 if self.config.virtual_pipeline_model_parallel_size > 1 else 1)

        def probe(n):  # as many micro-batches as a stage may hold at a time
            batch = common.probe_rows(n, longest)
            counts = common.loss_counts(batch.response_mask, batch.cu_seqlens)
            critic.forward_backward(batch, [range(n)] * turns, counts)

        critic.train(True)
        named = [*named_weights(critic.modules), *named_head(critic.modules)]
        spread = [(p, dist.get_world_size(replicas(name))) for name, p in named]
        states = [state for optimizer in critic.optimizers() for state in optimizer.optimizer.state.values()]
        moments = sum(x.nbytes for state in states for x in state.values())
        to_come = max(sum(8 * p.numel() / ranks for p, ranks in spread) - moments, 0)
        held = sum(p.nbytes + 4 * p.numel() + 4 * (p.itemsize < 4) * p.numel() / ranks for p, ranks in spread) + moments
        share = sequence_ranks(self.config)
        tokens = common.find_budget(self.config, probe, longest, row, held, to_come, share, self.device)
        self.config = critic.config = dataclasses.replace(self.config, ppo_max_token_len_per_gpu=tokens)

    @torch.no_grad()
    def check_model(self):
        """UserError unless the model runs, is causal and keeps rows apart, tried on two short rows by all ranks."""
        config, critic, seen = self.config, self.critic, []
        float32 = compute_dtype(config, self.device) == torch.float32
        n = 8 * max(pack_unit(config), 2)
        hook = contextlib.nullcontext()
        if self.layout.last_stage:
            head = critic.modules[-1].output_layer
            hook = head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))

        def hidden_states(ids_T, lengths):
            """Where a row goes on, after each token; zero on other stages."""
            mask_T = torch.ones(len(ids_T), dtype=torch.bool)
            mask_T[[0, n]] = False
            ends, none = common.cumulative(torch.tensor(lengths)), torch.zeros(2, dtype=torch.bool)
            micro = critic.micro_batch(common.Batch(ids_T, ends, mask_T, torch.arange(2), none), [0, 1])
            out_TD = torch.zeros(len(ids_T), self.model_config.hidden_size, device=self.device)

            def reduce(outputs_S, micro):
                hidden_SBD = seen.pop()
                if splits_sequence(config):
                    hidden_SBD = tensor_parallel.gather_from_sequence_parallel_region(hidden_SBD)
                out_TD[micro.index[micro.mask]] = hidden_SBD.transpose(0, 1).flatten(0, 1)[micro.mask].float()
                return outputs_S.sum(), None

            turns = self.layout.pp_size if config.virtual_pipeline_model_parallel_size > 1 else 1
            critic.run_schedule([micro] * turns, reduce, forward_only=True)
            dist.all_reduce(out_TD, group=mpu.get_context_parallel_group())  # each rank has pieces of the rows
            return out_TD

        critic.train(False)
        with hook:
            leak = torch.tensor(common.influence(hidden_states, self.vocab_size, n), device=self.device)
        dist.all_reduce(leak, dist.ReduceOp.MAX)
        if leak == math.inf:
            raise UserError(f"--model {config.model}: gives hidden states that are not finite: are its weights?")
        if leak > (1e-5 if float32 else 2e-2):
            raise UserError(
                f"--model {config.model}: lets tokens see later ones or another row (hidden states move by {leak:.0e})"
            )
        rows, kernel = "packed" if config.use_remove_padding else "padded", common.Pack.used
        print0(f"attention  {rows} rows, kernel {kernel}; leak from later tokens and other rows {leak:.0e}")

    def check_batch(self, batch, training):
        """Raises UserError, ValueError or RuntimeError for rows that this critic cannot take, or not now."""
        self.check_here()
        if len(batch) and self.config.ppo_max_token_len_per_gpu == "auto":
            self.find_budget(*common.longest_row(batch))
        check_budget(self.config, batch, training)
        common.check_rows(batch, self.model_config)

    def check_here(self):
        if self.parked:
            raise RuntimeError("the critic is offloaded: call onload() first")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch):
        """Values of the caller's rows: (T,) float32, zero where response_mask is false."""
        self.check_batch(batch, training=False)
        return self.critic.compute_values(batch)

    @register(Dispatch.DP_COMPUTE_PROTO, needs=("values", "returns"))
    def update_critic(self, batch):
        """One PPO update on the rows of all ranks, with their old values and returns -> metrics, equal on all ranks."""
        self.check_batch(batch, training=True)
        epochs, half = self.config.ppo_epochs, compute_dtype(self.config, self.device) != torch.float32
        peak = common.device_peak_flops(self.device) if half else None  # the table is of half precision
        passes = 3  # forward, to inputs, to weights
        flops = passes * epochs * sum(self.critic.flops.forward_flops(n) for n in batch.lengths)
        return common.measured_update(self.critic.update_critic, batch, self.device, epochs, flops, peak)

    @register(Dispatch.ONE_TO_ALL)
    def offload(self):
        """Gives the device memory of weights, gradients and optimizer state to somebody else (a rollout engine)."""
        if self.parked:
            return
        self.critic.finish_gather()
        for storage, kept in self.storages():
            host = None
            if kept:
                pinned = self.device.type == "cuda"
                host = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned
                ).untyped_storage()
                host.copy_(storage)
            self.parked.append((storage, storage.nbytes(), host))
            storage.resize_(0)
        mpu.get_global_memory_buffer().buffer.clear()  # what sequence parallelism gathers tokens into
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    @register(Dispatch.ONE_TO_ALL)
    def onload(self):
        """Takes it back."""
        for storage, size, host in self.parked:
            storage.resize_(size)
            if host is not None:
                storage.copy_(host)
        self.parked = []

    def storages(self):
        """(storage, whether its content is kept) of all that is offloaded, each once: many tensors are views of one.

        Gradients are not kept: the next mini-batch begins by setting them to zero.
        """
        critic, found = self.critic, {}
        kept = [p.data for module in critic.modules for p in module.parameters()]
        for optimizer in critic.optimizers():
            kept += optimizer.get_parameters()
            kept += [x for state in optimizer.optimizer.state.values() for x in state.values() if x.ndim]
        buffers = [buffer for chunk in critic.model for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        for tensor in kept:
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage(), True
        for buffer in buffers:
            found[buffer.grad_data.untyped_storage()._cdata] = buffer.grad_data.untyped_storage(), False
        return list(found.values())

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder):
        """Writes model, optimizer, schedule, RNG and counters; the folder appears complete or not at all.

        Sharded safetensors with the names of transformers: no pickle, any layout of either critic can read it.
        """
        self.checkpoint_writer()(folder)

    def checkpoint_writer(self, copy=False):
        """write(folder, group): saves the state of now. It is gathered, so a copy of it, whatever `copy` says."""
        self.check_here()
        self.critic.finish_gather()
        tensors = checkpoint_tensors(self.critic, self.vocab_size)
        scaler = self.critic.optimizers()[0].grad_scaler
        more = {"loss_scale": {**scaler.state_dict(), "scale": float(scaler.scale)}} if scaler else {}
        counters = self.critic.updates, self.critic.optimizer_steps
        return tensor_writer(tensors, BACKEND, self.config, self.model_config, *counters, **more)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder):
        """Restores what save_checkpoint of either critic wrote, on any layout. UserError: damaged or foreign."""
        self.check_here()
        saved = common.open_checkpoint(folder, BACKEND, self.config, self.model_config)
        critic = self.critic
        # mapped, not loaded: a rank reads the pages of what it takes, and holds one whole weight at a time
        tensors = StoredTensors(folder, f"--resume {folder}", prefix="")
        named = [*named_weights(critic.modules), *named_head(critic.modules)]
        for kind, form in STATE.items():
            read = lambda part, form=form: take(tensors, value_model_name(part), form)
            for p, x in stored_shards(named, critic.transformer.num_query_groups, read, f"--resume {folder}"):
                critic.restore(kind, p, x)
        for optimizer in critic.optimizers():
            for p, state in optimizer.optimizer.state.items():  # a tensor each: the step adds 1 in place
                state["step"] = torch.tensor(float(saved["optimizer_steps"]), device=p.device)
            for group in optimizer.optimizer.param_groups:
                group["step"] = saved["optimizer_steps"]  # where Apex and Transformer Engine look for it
            if optimizer.grad_scaler and "loss_scale" in saved:
                scale = torch.tensor([saved["loss_scale"]["scale"]], device=self.device)
                optimizer.grad_scaler.load_state_dict({**saved["loss_scale"], "scale": scale})
        torch.set_rng_state(tensors["rng"])
        self.critic.updates, self.critic.optimizer_steps = saved["updates"], saved["optimizer_steps"]

    @register(Dispatch.ONE_TO_ALL)
    def export_hf(self, folder):
        """Writes the value model as a Hugging Face folder that AutoModelForTokenClassification loads: num_labels 1,
        or a label a bin for hl_gauss, whose value_range then stands in config.json.

        Every rank writes what it is the first to hold, in a file of its own.
        """
        self.check_here()
        self.critic.finish_gather()
        state = dict(whole_weights(self.critic.modules, self.vocab_size, self.critic.master))
        file = f"model-{RANK:05d}.safetensors"
        parts = common.of_all_ranks({name: (file, x.nbytes) for name, x in state.items()})
        with common.complete_or_absent(folder) as tmp:
            if RANK == 0:
                where = {name: place for part in parts for name, place in part.items()}
                index = {"metadata": {"total_size": sum(size for _, size in where.values())}}
                index["weight_map"] = {name: its for name, (its, _) in sorted(where.items())}
                with open(os.path.join(tmp, "model.safetensors.index.json"), "w") as out:
                    json.dump(index, out, indent=1)
                outputs = self.config.value_bins if self.config.value_head == "hl_gauss" else 1
                model_config = common.config_of_export(self.model_config, outputs, self.config.value_range)
                kind = transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(model_config)]
                model_config.architectures = [kind.__name__]
                model_config.save_pretrained(tmp)
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(tmp)
            if state:
                save_file(state, os.path.join(tmp, file), metadata={"format": "pt"})


def checkpoint_tensors(critic, vocab_size):
    """name -> (first row, tensor on the host): what this rank writes of all state (a collective).

    Weights and moments are those of critic_fsdp.py, its AdamW's count of steps, for every weight the same, too.
    """
    out = {"rng": (0, torch.get_rng_state())} if RANK == 0 else {}
    for kind, form in STATE.items():
        part = lambda adam, mine, kind=kind: adam.state[mine].get(kind, torch.zeros_like(mine))
        local = functools.partial(critic.master, **({} if kind == "weight" else {"part": part}))
        weights = join_experts(dict(whole_weights(critic.modules, vocab_size, local)))
        out |= {form.format(name): rows for name, rows in weights.items()}
    steps = torch.tensor(float(critic.optimizer_steps))
    return out | {f"optimizer.{name}.step": (0, steps.clone()) for name, (first, _) in weights.items() if not first}


def tensor_writer(tensors, *state, **more):
    """write(folder, group): saves these tensors as sharded safetensors, and `state`, see common.write_trainer_state."""

    def write(folder, group=None):
        with common.complete_or_absent(folder, group=group) as tmp:
            if tensors:
                offsets = {name: {"saved_offsets": [first, 0, 0][: x.ndim]} for name, (first, x) in tensors.items()}
                file, metadata = f"shard-{RANK:05d}.safetensors", {"format": "pt", SHARDING: json.dumps(offsets)}
                save_file({name: x for name, (_, x) in tensors.items()}, os.path.join(tmp, file), metadata=metadata)
            common.write_trainer_state(tmp, *state, **more)

    return write


# ---------------------------------------------------------------------------------------------------------------------
# Main: value pretraining from rollouts
# ---------------------------------------------------------------------------------------------------------------------


def main(run):
    validate(run.critic)
    common.validate_run(run)
    tokenizer = common.load_tokenizer(run.critic)
    model_config = common.load_model_config(run.critic, tokenizer)
    validate_for_model(run.critic, model_config)
    train, held_out = common.load_rows(run, model_config, tokenizer, check_budget)
    files = ((train, run.rollouts), (held_out, run.eval_rollouts))
    longest, row = max(common.longest_row(*rows) for rows in files if rows[0] is not None)
    run = common.smaller_budgets(run, critic=least_budget(run.critic, longest))
    run = common.find_resume(run, run.critic.timeout_minutes)
    config, first_step = common.settle(run, model_config, train)
    worker = CriticWorker(config)
    worker.init_model()
    if run.resume:
        worker.load_checkpoint(run.resume)
    worker.find_budget(longest, row)
    common.print_work(worker, run, train)
    common.print_data_check(run, train, held_out)
    logger = common.Logger(run, first_step)
    common.listen_for_sigterm()
    start, stuck, batch = time.perf_counter(), 0, None
    for step in common.profiled(run, range(first_step, run.steps + 1)):
        last, stop = step == run.steps, common.told_to_stop()
        if held_out is not None and common.evaluates(run, step):
            metrics = common.evaluate(worker, held_out, run.gamma)
            logger.log(step, metrics)
            print0(common.eval_line(metrics))
        if step > first_step and (last or stop or (run.save_every and step % run.save_every == 0)):
            common.save(run, step, worker.checkpoint_writer)
        common.join_saving(wait=last or stop)
        if last:
            break
        if stop:
            logger.close()
            common.leave(run.out_dir, step)
        rows = common.rows_of_step(step, len(train), run)
        batch = train.select(rows[RANK::WORLD_SIZE])
        if not run.recorded_values:
            batch.values = worker.compute_values(batch)
        common.add_returns(batch, run)
        metrics = worker.update_critic(batch)
        stuck = common.count_stuck(stuck, metrics, run, batch, step)
        metrics["perf/time_step"] = (time.perf_counter() - start) / (step + 1 - first_step)
        logger.log(step + 1, metrics)
        print0(common.step_line(step + 1, run.steps, metrics))
    worker.export_hf(os.path.join(run.out_dir, "hf"))
    logger.close()
    common.plot_curves(run.out_dir)
    common.write_report(run, tokenizer, held_out, batch)
    print0(common.saved_line(run, first_step, "hf"))


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # so that collectives of tensor parallelism go first
    common.run(lambda: main(tyro.cli(Run, description=__doc__, console_outputs=RANK == 0)))
