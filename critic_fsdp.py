"""A PPO critic for language models on PyTorch FSDP: one value model, one update, any layout.

    python critic_fsdp.py                                      toy task, a tiny model, a laptop CPU: a minute
    torchrun --nproc-per-node 2 critic_fsdp.py                 the same on two ranks: the same numbers
    torchrun --nproc-per-node 8 critic_fsdp.py --model Qwen/Qwen2.5-7B --rollouts train.jsonl \\
        --eval-rollouts eval.jsonl --gradient-checkpointing --lr-warmup-steps 20 --out-dir out/7b
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 critic_fsdp.py ...
    python critic_fsdp.py --help                               every flag

It learns V(s) from rollouts with rewards: value pretraining for PPO (VC-PPO, 2503.01491), or a token-level verifier.
A PPO loop drives the same CriticWorker. Copy this file and common.py, and change them.
What it leaves out: rollout and policy. critic_megatron.py is the same function on Megatron-Core.

Shapes are in the names: T tokens, sequences end to end; B sequences; L longest sequence; D hidden features.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import math
import os
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import tyro

# ---------------------------------------------------------------------------------------------------------------------
# Config
# ---------------------------------------------------------------------------------------------------------------------

DTYPES = ("auto", "float32", "bfloat16")
KERNELS = ("auto", "flash", "varlen", "sdpa", "eager")
BACKEND = "fsdp"  # as checkpoints name this script
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
    freeze_layers: int = 0  # lowest transformer blocks that do not train, nor do the embeddings then (0: all trains)
    lora_rank: int = 0  # train only the value head and low-rank adapters of this rank in the backbone (0: no adapters)
    lora_alpha: float = 16.0  # adapters count alpha / rank times
    lora_target_modules: tuple[str, ...] = ("all-linear",)  # linear layers that get one, e.g. q_proj v_proj
    trust_remote_code: bool = False  # run model code that comes with the checkpoint
    freeze_vision_tower: bool = False  # of a vision-language model: learn the language model and the head alone
    seed: int = 0  # of random weights, the value head and every shuffle

    # layout
    strategy: Literal["fsdp2", "fsdp1", "none"] = "fsdp2"  # how weights spread over ranks (none: a copy on each)
    fsdp_size: int = -1  # ranks that share one copy of the weights; the rest holds replicas (-1: all ranks share one)
    ulysses_size: int = 1  # ranks that share one sequence, each with a part of the attention heads
    reshard_after_forward: bool = True  # free a layer's gathered weights until its backward: less memory, more traffic
    forward_prefetch: bool = False  # gather the next layer's weights while this one computes
    offload_policy: bool = False  # fsdp2 keeps weights, gradients and optimizer on the host; layers visit the device
    timeout_minutes: float = 30.0  # a collective that takes longer ends the run

    # precision and kernels
    param_dtype: Literal[DTYPES] = "auto"  # of matrix products (auto: bfloat16, float32 on CPU)
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # in which FSDP adds gradients of the ranks up
    use_remove_padding: bool = True  # pack sequences end to end; otherwise pad them to the longest
    attn_implementation: Literal[KERNELS] = "auto"  # attention kernel (auto: the fastest that serves the model)
    compile: bool = False  # torch.compile each transformer block, attention left out: slow to begin, then less traffic
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    activation_offload: bool = False  # keep what checkpointing saves on the host until the backward pass
    defer_grad_sync: bool = False  # reduce gradients once a mini-batch: less traffic, but a whole gradient on each rank

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
    plan: int | None = None  # print what each of so many ranks would hold, and end
    out_dir: str = "out/critic_fsdp"  # for checkpoints, the Hugging Face folder, metrics and curves
    report: str = "auto"  # page on what the critic learned (auto: report.html in out_dir; none: no page)
    report_against: str | None = None  # report.html of another run, to stand beside this one's
    profile_steps: str | None = None  # A:B, steps that torch.profiler records into out_dir/profile (None: none)
    profile_ranks: tuple[int, ...] = (0,)  # ranks that it records on
    wandb_project: str | None = None  # log to Weights & Biases too, if it is installed


if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # at once: what is imported below takes ten seconds
    tyro.cli(Run, description=__doc__, console_outputs=os.environ.get("RANK", "0") == "0")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
import transformers
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModel

import common
from common import RANK, WORLD_SIZE, Dispatch, UserError, print0, register

transformers.logging.set_verbosity_error()  # what matters of a load is said below, in one line
transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing here writes into one
warnings.filterwarnings("ignore", message=".*`NO_SHARD`")  # FSDP1 on a single rank
warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft sees by itself what GPT-2 needs


def validate(config, world_size=WORLD_SIZE):
    """Raises UserError for flags that cannot work, before a process group or a model is built."""
    sp, shard = config.ulysses_size, config.fsdp_size
    common.validate_config(config)
    for name in ("ulysses_size", "lora_alpha"):
        common.check_flag(config, name, "must be above 0 and finite", lambda x: 0 < x < math.inf)
    for name in ("freeze_layers", "lora_rank"):
        common.check_flag(config, name, "must not be below 0", lambda x: x >= 0)
    common.check_flag(config, "lora_target_modules", "must name at least one layer, or all-linear", len)
    for name in ("lora_alpha", "lora_target_modules"):
        if not config.lora_rank and getattr(config, name) != getattr(Config, name):
            raise UserError(f"--{name.replace('_', '-')}: there are no adapters; add --lora-rank")
    if config.lora_rank and config.freeze_layers:
        raise UserError(f"--freeze-layers {config.freeze_layers}: --lora-rank freezes all layers already; drop one")
    if config.lora_rank and importlib.util.find_spec("peft") is None:
        raise UserError(f"--lora-rank {config.lora_rank}: peft is not installed; pip install peft")
    if world_size % sp:
        raise UserError(f"--ulysses-size {sp}: must divide the {world_size} ranks")
    if sequence_ranks(config) > 1 and not config.use_remove_padding:
        raise UserError(f"--ulysses-size {sp}: needs packed rows; drop --no-use-remove-padding")
    if shard != -1 and (shard < 1 or world_size % shard):
        raise UserError(f"--fsdp-size {shard}: must divide the {world_size} ranks, or be -1 for all of them")
    if shard != -1 and config.strategy == "none":
        raise UserError(f"--fsdp-size {shard}: --strategy none shards nothing; use fsdp2 or fsdp1")
    if shard == 1 and config.strategy == "fsdp1" and world_size > 1:  # it would not even average over the replicas
        raise UserError("--fsdp-size 1: fsdp1 cannot keep whole replicas; use --strategy fsdp2 or none")
    for name in ("offload_policy", "forward_prefetch", "reduce_dtype", "reshard_after_forward"):
        only = ("fsdp2",) if name == "offload_policy" else ("fsdp2", "fsdp1")
        if getattr(config, name) != getattr(Config, name) and config.strategy not in only:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag}: --strategy {config.strategy} has no such thing; use {' or '.join(only)}")
    if config.activation_offload and not config.gradient_checkpointing:
        raise UserError("--activation-offload: without --gradient-checkpointing it would copy gathered weights too")
    if config.compile and not config.use_remove_padding:  # each padded length would be compiled anew
        raise UserError("--compile: needs packed rows; drop --no-use-remove-padding")
    if config.attn_implementation == "varlen" and not config.use_remove_padding:
        raise UserError("--attn-implementation varlen: is for packed rows; drop --no-use-remove-padding")


def validate_for_model(config, model_config):
    """The same for flags that this model does not go with."""
    text = model_config.get_text_config()
    heads, layers = getattr(text, "num_attention_heads", 1), getattr(text, "num_hidden_layers", math.inf)
    common.check_divides("ulysses-size", config.ulysses_size, heads, "attention heads")
    if config.freeze_layers > layers:
        raise UserError(f"--freeze-layers {config.freeze_layers}: the model has {layers} layers")
    if config.ppo_max_token_len_per_gpu == "auto" and common.reads_images(model_config):
        raise UserError("--ppo-max-token-len-per-gpu auto: counts no images; give a number")
    if config.freeze_vision_tower and not common.reads_images(model_config):
        raise UserError(f"--freeze-vision-tower: {config.model} ({model_config.model_type}) reads text only")


# ---------------------------------------------------------------------------------------------------------------------
# Value model: a decoder and a value head in float32
# ---------------------------------------------------------------------------------------------------------------------


class ValueModel(nn.Module):
    """Backbone without its vocabulary head, and v = w . h + b on the hidden state of every token.

    With --value-head hl_gauss the head gives the N logits of a distribution instead, common.hl_gauss_values its mean.
    """

    def __init__(self, backbone, config):
        super().__init__()
        self.model = backbone
        outputs = config.value_bins if config.value_head == "hl_gauss" else 1
        self.score = nn.Linear(backbone.config.get_text_config().hidden_size, outputs)

    def forward(self, **inputs):
        """(B, L) ids -> (B, L) float32 values, or (B, L, N) logits, read *from* the hidden state of its position."""
        hidden_BLD = self.model(use_cache=False, **inputs).last_hidden_state
        with torch.autocast(hidden_BLD.device.type, enabled=False):
            return self.score(hidden_BLD.float()).squeeze(-1)


def read_weights(config, model_config):
    """A ValueModel on the host with its weights, and a sentence on where they come from. Runs on rank 0 alone."""
    if config.model in common.TINY or config.from_scratch:
        torch.manual_seed(config.seed)
        backbone = AutoModel.from_config(model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code)
        model = ValueModel(backbone, config)
        return model, f"random weights (seed {config.seed}); {common.init_value_head(model.score, None, config)}"
    folder = common.local_folder(config.model)
    backbone = common.load_pretrained(AutoModel, folder, config, model_config)
    model = ValueModel(backbone, config)
    head = common.init_value_head(model.score, folder, config)
    return model, f"{type(backbone).__name__} from {config.model}; {head}"


# ---------------------------------------------------------------------------------------------------------------------
# Parallelism: which ranks share what, and the model spread over them
# ---------------------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Ranks as dp x sp: sp neighbours share each sequence, dp groups split the rows. FSDP shards over all of them."""

    device: torch.device
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup  # ranks with the same place in their sequence-parallel group
    sp_size: int
    sp_group: dist.ProcessGroup | None
    fsdp_mesh: dist.DeviceMesh  # (world,), or (replicas, fsdp_size) for hybrid sharding


def make_layout(config, device):
    """Builds the process groups."""
    sp = config.ulysses_size  # rank = dp_rank * sp + sp_rank
    mesh = common.device_mesh(device, dp=WORLD_SIZE // sp, sp=sp)
    return Layout(
        device=device,
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=WORLD_SIZE // sp,
        dp_group=mesh.get_group("dp"),
        sp_size=sp,
        sp_group=mesh.get_group("sp") if sp > 1 else None,
        fsdp_mesh=common.sharding_mesh(device, config.fsdp_size),
    )


def compute_dtype(config, device):
    """The dtype of matrix products; master weights, gradients, optimizer and value head are float32."""
    if config.param_dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, config.param_dtype)


def build_skeleton(config, model_config, dtype=torch.float32):
    """A ValueModel on meta: no weights yet, but all that is settled without them. UserError: it cannot be built."""
    attention = common.decoder_attention(config, model_config)
    if config.compile:  # its lists of lengths would be compiled in, anew for each pack
        transformers.AttentionInterface.register("packed", torch.compiler.disable(common.packed_attention))
    try:
        with torch.device("meta"):
            backbone = AutoModel.from_config(
                model_config, dtype=dtype, attn_implementation=common.of_decoder(attention, model_config),
                trust_remote_code=config.trust_remote_code,
            )  # fmt: skip
            model = ValueModel(backbone, config)
    except Exception as error:
        padded = "; add --no-use-remove-padding" if attention == "packed" else ""
        raise UserError(f"--model {config.model}: cannot be built ({common.one_line(error)}){padded}") from None
    if attention == "packed" and not backbone._can_set_attn_implementation():
        raise UserError(
            f"--model {config.model}: {type(backbone).__name__} brings its own attention, which knows nothing of "
            "packed rows; add --no-use-remove-padding"
        )
    if config.freeze_vision_tower:
        backbone.visual.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    if config.lora_rank:
        with torch.device("meta"):
            common.add_lora(backbone, config)
    if config.freeze_layers:
        common.freeze(backbone, config.freeze_layers)
    for block in common.transformer_blocks(backbone) if config.compile else ():  # in place: names of weights stay
        block.compile(dynamic=True)
    if config.gradient_checkpointing:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def build_value_model(config, model_config, layout):
    """The sharded ValueModel, its FlopsModel, words on the number of its parameters and on its weights' origin.

    Every rank builds on meta; rank 0 alone reads the weights and sends each rank its shards.
    """
    model = build_skeleton(config, model_config)
    source, story = read_weights(config, model_config) if RANK == 0 else (None, None)
    if config.lora_rank and RANK == 0:
        torch.manual_seed(config.seed)
        common.add_lora(source.model, config)
    flops, (count, trained) = common.flops_model(model, model_config), common.count_parameters(model)
    size = f"{count:,} parameters" + (f", {trained:,} of them train" if trained < count else "")
    model = {"fsdp2": shard_fsdp2, "fsdp1": shard_fsdp1, "none": replicate}[config.strategy](model, config, layout)
    full = source.state_dict() if RANK == 0 else {}
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    buffers = dict(source.named_buffers()) if RANK == 0 else {}
    for name, buffer in sorted(model.named_buffers()):  # rotary tables are in no state dict
        if RANK == 0:
            buffer.copy_(buffers[name.replace("_fsdp_wrapped_module.", "")])
        dist.broadcast(buffer, src=0)
    return model, flops, size, story


def shard_fsdp2(model, config, layout):
    dtype, blocks = compute_dtype(config, layout.device), common.transformer_blocks(model)
    options = {"mesh": layout.fsdp_mesh, "reshard_after_forward": config.reshard_after_forward}
    if config.offload_policy:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=layout.device.type == "cuda")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=getattr(torch, config.reduce_dtype))
    head_policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mp_policy=policy, **options)
    fully_shard(model.score, mp_policy=head_policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    model.set_reduce_scatter_unused_params(True)  # an expert may have seen no token here, but some on another rank
    for block, following in zip(blocks, blocks[1:], strict=False) if config.forward_prefetch else ():
        block.set_modules_to_forward_prefetch([following])
    model.to_empty(device="cpu" if config.offload_policy else layout.device)
    for module in model.modules() if config.offload_policy else ():  # what is no weight stays on the device
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=layout.device)
    return model


def shard_fsdp1(model, config, layout):
    dtype, blocks = compute_dtype(config, layout.device), set(common.transformer_blocks(model))
    reduce_dtype = getattr(torch, config.reduce_dtype)
    policy = MixedPrecision(param_dtype=dtype, reduce_dtype=reduce_dtype, buffer_dtype=torch.float32)
    head_policy = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)
    apart_policy = MixedPrecision(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=True)
    # a unit of FSDP1 has a gradient or none: what is frozen stands apart from what trains
    adapters = (m for name, m in model.named_modules() if ".lora_" in name and isinstance(m, nn.Linear))
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
    apart = set(adapters if config.lora_rank else embeddings if config.freeze_layers else ())

    def unit(module):
        if module is model.score:
            return {"mixed_precision": head_policy}
        return {"mixed_precision": apart_policy} if module in apart else module in blocks

    strategies = {  # (hybrid, reshard after forward)
        (False, True): ShardingStrategy.FULL_SHARD,
        (False, False): ShardingStrategy.SHARD_GRAD_OP,
        (True, True): ShardingStrategy.HYBRID_SHARD,
        (True, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
    }
    return FSDP1(
        model,
        device_mesh=layout.fsdp_mesh,
        device_id=layout.device,  # a torch.device, or FSDP1 refuses to work on CPU
        sharding_strategy=strategies[layout.fsdp_mesh.ndim == 2, config.reshard_after_forward],
        forward_prefetch=config.forward_prefetch,
        auto_wrap_policy=CustomPolicy(unit),
        mixed_precision=policy,
        use_orig_params=True,
        param_init_fn=lambda m: m.to_empty(device=layout.device, recurse=False),
    )


def replicate(model, config, layout):
    return model.to_empty(device=layout.device)


def full_tensor(x):
    """The whole of a sharded tensor (a collective), or the tensor itself."""
    return x.full_tensor() if isinstance(x, DTensor) else x


# ---------------------------------------------------------------------------------------------------------------------
# The critic: forward, loss, step
# ---------------------------------------------------------------------------------------------------------------------


def sequence_ranks(config):
    """Ranks that share the tokens of each sequence."""
    return config.ulysses_size


def least_budget(config, tokens):
    """The smallest budget of a rank that takes a row of so many tokens."""
    return math.ceil(tokens / sequence_ranks(config))


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

    Columns are of its T tokens, and of the action that each of them is.
    """

    input_ids: torch.Tensor  # (T,)
    lengths: list  # of the sequences
    images: list  # B dicts, see common.read_images; empty for a model that reads text only
    mask: torch.Tensor  # bool: there is an action
    index: torch.Tensor | None = None  # int64: where it stands in the flat columns of the whole batch; without a loss
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    weights: torch.Tensor | None = None  # of the token losses


class DataParallelPPOCritic:
    """Values and updates of a value model. compute_values and update_critic take the *global* batch, the same on every
    rank, and work on this rank's share of it."""

    def __init__(self, config, model, flops, layout, image_processor=None):
        self.config, self.flops, self.layout = config, flops, layout
        self.model, self.image_processor, backbone = model, image_processor, model.model
        self.reads_images = common.reads_images(backbone.config)
        decoder = backbone.language_model if self.reads_images else backbone
        decoder.register_forward_pre_hook(common.slice_row, with_kwargs=True)
        lr = config.lr if config.lr is not None else (1e-3 if config.model in common.TINY else 1e-5)
        trainable = [p for p in model.parameters() if p.requires_grad]
        options = {"lr": lr, "betas": config.betas, "weight_decay": config.weight_decay}
        self.optimizer = torch.optim.AdamW(trainable, **options, fused=True)  # one kernel: a fifth of the time on CPU
        self.peak_lr = lr
        self.optimizer_steps = 0  # taken, skipped ones not counted: the position of the schedule
        self.updates = 0  # calls of update_critic: with seed and epoch the key of every shuffle

    def my_micro_batches(self, batch, max_tokens, size):
        """This rank's rows of a global batch as lists of row indices, one list a micro-batch.

        Rows go to data-parallel ranks by FLOPs, a rank's rows to micro-batches by size. Every rank works it out for
        all ranks, so that all make the same number of forwards without a word: ranks that share weights must.
        """
        config, layout = self.config, self.layout
        lengths = batch.lengths
        shares = common.balance([self.flops.forward_flops(n) for n in lengths], layout.dp_size)
        split = [[lengths[i] for i in share] for share in shares]
        parts = common.micro_batches(split, max_tokens, size, not config.use_remove_padding)
        mine = shares[layout.dp_rank]
        return [[mine[j] for j in part] for part in parts[layout.dp_rank]]

    def micro_batch(self, batch, rows, counts=None):
        """These rows as a MicroBatch on the device; no rows are one masked token, to keep in step with other ranks.

        counts: LossCounts of the mini-batch, if there is a loss.
        """
        config, micro = self.config, batch.select(rows) if rows else common.masked_token()
        fields = {"input_ids": micro.input_ids}
        fields["mask"] = micro.response_mask
        if counts is None:
            fields["index"] = batch.token_index(rows) if rows else torch.zeros(1, dtype=torch.int64)
        else:
            fields["values"], fields["returns"] = micro.values, micro.returns
            fields["weights"] = common.loss_weights(
                micro.response_mask, micro.cu_seqlens, config.loss_agg_mode, counts, config.response_length_limit
            )
        here, images = (lambda x: x.to(self.layout.device, non_blocking=True)), []
        for row in (micro.multi_modal_inputs or [{} for _ in micro.lengths]) if self.reads_images else ():
            images.append({key: here(x) for key, x in common.read_images(row, self.image_processor).items()})
        return MicroBatch(lengths=micro.lengths, images=images, **{name: here(x_T) for name, x_T in fields.items()})

    def values(self, outputs, mask):
        """Values of the actions from what the head gives, values or logits in a row each; zero elsewhere."""
        if self.config.value_head == "hl_gauss":
            outputs = common.hl_gauss_values(outputs, *self.config.value_range)
        return torch.where(mask, outputs, 0.0)

    def forward(self, micro):
        """What the head says of each action of a micro-batch: (T,) float32 values, or (T, N) logits; zero elsewhere."""
        ids_T, lengths, inputs = micro.input_ids, micro.lengths, {}
        if self.reads_images:
            ids_T, lengths, inputs = common.with_images(self.model.model, ids_T, lengths, micro.images)
        forward = self.forward_packed if self.config.use_remove_padding else self.forward_padded
        return common.values_of_actions(forward(ids_T, lengths, **inputs)[: len(micro.mask)], micro.mask)

    def forward_packed(self, ids_T, lengths, position_ids=None, **images):
        """(T,) ids, sequences end to end -> (T,) values by position; no padding is computed.

        position_ids: (T,), or (4, T) with time, height and width (None: from 0 in each sequence).
        """
        layout = self.layout
        pad = -len(ids_T) % layout.sp_size  # up to a multiple, as a sequence of its own
        if position_ids is None:
            position_ids = torch.cat([torch.arange(n) for n in lengths]).to(ids_T.device, non_blocking=True)
        common.set_pack(lengths + [pad] * (pad > 0), ids_T.device, layout.sp_group, self.config.attn_implementation)
        ids_T, position_ids = F.pad(ids_T, (0, pad)), F.pad(position_ids, (0, pad))
        # where the decoder begins, common.slice_row (a hook of __init__) leaves this rank its part of the row
        v_T = self.predict(input_ids=ids_T[None], position_ids=position_ids.unsqueeze(-2), **images)[0]
        if layout.sp_group is not None:
            v_T = common.GatherSlices.apply(v_T, layout.sp_group)
        return v_T[: len(v_T) - pad]

    def forward_padded(self, ids_T, lengths, position_ids=None, **images):
        """(T,) ids -> (T,) values by position, through a right-padded (B, L) batch."""
        common.Pack.group = None  # no rank takes a slice
        ids_BL = torch.nn.utils.rnn.pad_sequence(ids_T.split(lengths), batch_first=True)
        length_B = torch.tensor(lengths, device=ids_T.device)
        mask_BL = torch.arange(ids_BL.shape[1], device=ids_T.device) < length_B[:, None]
        if position_ids is None:
            position_ids = torch.arange(ids_BL.shape[1], device=ids_T.device).expand_as(ids_BL)
        else:  # (4, T) -> (4, B, L)
            rows = [x.T for x in position_ids.split(lengths, 1)]
            position_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).movedim(-1, 0)
        v_BL = self.predict(input_ids=ids_BL, attention_mask=mask_BL.long(), position_ids=position_ids, **images)
        return v_BL[mask_BL]

    def predict(self, **inputs):
        """The model's forward in the compute dtype: FSDP casts by itself, plain weights need autocast."""
        dtype = compute_dtype(self.config, self.layout.device)
        cast = self.config.strategy == "none" and dtype != torch.float32
        with torch.autocast(self.layout.device.type, dtype, enabled=cast):
            return self.model(**inputs)

    @torch.no_grad()
    def compute_values(self, batch):
        """Values of the actions of the global batch: (T,) float32 on the host, zero elsewhere, equal on all ranks."""
        if not len(batch):
            return torch.zeros(0)
        self.train(False)
        values_T = torch.zeros(len(batch.input_ids), device=self.layout.device)
        for rows in common.progress(self.my_micro_batches(batch, *forward_limits(self.config)), "values"):
            micro = self.micro_batch(batch, rows)
            values_T.index_add_(0, micro.index, self.values(self.forward(micro), micro.mask))
        self.free_gathered()
        dist.all_reduce(values_T, group=self.layout.dp_group)  # each token was computed by one group; others add 0
        return values_T.cpu()

    def train(self, mode):
        self.model.train(mode)

    def free_gathered(self):
        """Frees the gathered weights that FSDP keeps after a forward, for a backward that may not come."""
        if self.config.strategy == "fsdp2":
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        elif self.config.strategy == "fsdp1":
            for handle in self.model._all_handles:
                handle.reshard(handle.uses_sharded_strategy)  # on a single rank only its views go back

    def update_critic(self, batch):
        """PPO epochs over mini-batches of the global batch, one optimizer step each -> metrics, equal on all ranks."""
        config = self.config
        self.train(True)
        totals = torch.zeros(4, dtype=torch.float64, device=self.layout.device)  # see sums below
        norms, lr, mini_batches = [], math.nan, 0
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
                next_lr = self.learning_rate()
                norm = self.optimizer_step()
                if math.isfinite(norm):
                    lr = next_lr
                    norms.append(norm)
                    totals += sums
        self.updates += 1
        dist.all_reduce(totals, group=self.layout.dp_group)
        loss, clipped, vpreds, actions = totals.tolist()
        return {
            "critic/vf_loss": loss / len(norms) if norms else math.nan,
            "critic/vf_clipfrac": clipped / actions if norms else math.nan,
            "critic/vpred_mean": vpreds / actions if norms else math.nan,
            "critic/grad_norm": sum(norms) / len(norms) if norms else math.nan,
            "critic/lr": lr,
            "critic/skipped_steps": mini_batches - len(norms),
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

        FSDP, and optimizer_step without it, averages gradients over the ranks; the loss is a sum over them, so each
        rank's part counts as many times.
        """
        config, sums = self.config, torch.zeros(4, dtype=torch.float64, device=self.layout.device)
        for i, rows in enumerate(micros):
            micro = self.micro_batch(mini, rows, counts)
            with self.gradient_sync(i == len(micros) - 1 or not config.defer_grad_sync), self.saved_activations():
                loss, some = self.loss(self.forward(micro), micro)
                (loss * WORLD_SIZE).backward()
            if config.strategy == "fsdp1" and WORLD_SIZE == 1:  # there FSDP1 itself forgets units without a gradient
                self.free_gathered()
            sums += some
        return sums

    def gradient_sync(self, now):
        """Context of a forward and backward whose gradients are reduced `now`, or kept whole until a later one does."""
        if self.config.strategy == "fsdp2":
            self.model.set_requires_gradient_sync(now)
        elif self.config.strategy == "fsdp1" and not now:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def saved_activations(self):
        """Context of a forward and backward: where autograd keeps what it saves in between."""
        if self.config.activation_offload:
            return torch.autograd.graph.save_on_cpu(pin_memory=self.layout.device.type == "cuda")
        return contextlib.nullcontext()

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
        parameters = self.optimizer.param_groups[0]["params"]
        if self.config.strategy == "none":
            for p in parameters:  # an expert may have seen no token here, but some on another rank
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            for work in [dist.all_reduce(p.grad, async_op=True) for p in parameters if WORLD_SIZE > 1]:
                work.wait()
            torch._foreach_div_([p.grad for p in parameters], WORLD_SIZE)
        if self.config.strategy == "fsdp1":
            norm = self.model.clip_grad_norm_(self.config.grad_clip)
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.grad_clip)
        norm = float(full_tensor(norm))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step()
            self.optimizer_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm


# ---------------------------------------------------------------------------------------------------------------------
# The worker: life cycle, memory, metrics, checkpoints
# ---------------------------------------------------------------------------------------------------------------------


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
        self.image_processor = common.load_image_processor(config, self.model_config)
        self.config = config = common.with_value_range(config, self.model_config)
        self.vocab_size = self.model_config.get_text_config().vocab_size
        validate_for_model(config, self.model_config)
        self.device = common.setup_distributed(config.timeout_minutes)
        half = compute_dtype(config, self.device) != torch.float32
        adds_in_half = {"fsdp1": half, "fsdp2": config.reduce_dtype == "bfloat16"}.get(config.strategy)
        if config.defer_grad_sync and adds_in_half:
            raise UserError("--defer-grad-sync: would add gradients up in bfloat16; use fsdp2, --reduce-dtype float32")
        self.layout = make_layout(config, self.device)
        self.parked = False  # whether the critic is off the device

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self):
        """Builds the model and its optimizer, and refuses a model that cannot work as a critic here."""
        config, layout = self.config, self.layout
        model, flops, size, story = build_value_model(config, self.model_config, layout)
        self.critic = DataParallelPPOCritic(config, model, flops, layout, self.image_processor)
        torch.manual_seed(config.seed)  # random weights were drawn
        print0(f"model      {config.model} ({self.model_config.model_type}), {size}: {story}")
        shard = layout.fsdp_mesh.shape[-1]
        spread = f"{config.strategy}, {shard} shards x {WORLD_SIZE // shard} replicas"
        spread = "a copy on each rank" if config.strategy == "none" else spread
        print0(f"layout     ranks {WORLD_SIZE} = dp {layout.dp_size} x sp {layout.sp_size}; weights: {spread}")
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

        def probe(n):
            batch = common.probe_rows(n, longest)
            counts = common.loss_counts(batch.response_mask, batch.cu_seqlens)
            critic.forward_backward(batch, [range(n)], counts)

        critic.train(True)
        here = lambda x: 0 if self.config.offload_policy else getattr(x, "_local_tensor", x).nbytes
        weights = sum(here(p) for p in critic.model.parameters())
        learns = sum(here(p) for p in critic.model.parameters() if p.requires_grad)
        moments = sum(here(x) for state in critic.optimizer.state.values() for x in state.values())
        to_come = max(2 * learns - moments, 0)
        if self.config.defer_grad_sync:
            to_come += 4 * common.count_parameters(critic.model)[1]
        held = weights + learns + moments
        share = sequence_ranks(self.config)
        tokens = common.find_budget(self.config, probe, longest, row, held, to_come, share, self.device)
        critic.optimizer.zero_grad(set_to_none=True)
        critic.free_gathered()
        self.config = critic.config = dataclasses.replace(self.config, ppo_max_token_len_per_gpu=tokens)

    @torch.no_grad()
    def check_model(self):
        """UserError unless the model runs, is causal and keeps rows apart, tried on two short rows by all ranks.

        Packed rows must also give the hidden states of the model's own attention over padded ones.
        """
        config, critic, seen = self.config, self.critic, []
        float32 = compute_dtype(config, self.device) == torch.float32
        backbone, n = critic.model.model, 8 * self.layout.sp_size
        hook = critic.model.score.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))

        def hidden_states(ids_T, lengths, packed=config.use_remove_padding):
            (critic.forward_packed if packed else critic.forward_padded)(ids_T.to(self.device), lengths)
            sliced = packed and self.layout.sp_group is not None
            return common.GatherSlices.apply(seen.pop(), self.layout.sp_group) if sliced else seen.pop()

        def refuse(problem):
            remedy = "; add --no-use-remove-padding" if config.use_remove_padding else ""
            remedy = "; drop --compile" if config.compile else remedy
            raise UserError(f"--model {config.model}: {type(backbone).__name__} {problem}{remedy}") from None

        critic.train(False)
        with hook:
            try:
                leak = common.influence(hidden_states, self.vocab_size, n)
            except (UserError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                refuse(f"does not run: {common.one_line(error)} ({where.filename}:{where.lineno})")
            if leak == math.inf:
                raise UserError(f"--model {config.model}: gives hidden states that are not finite: are its weights?")
            if leak > (1e-5 if float32 else 2e-2):
                refuse(f"lets tokens see later ones or another row (hidden states move by {leak:.0e})")
            rows, kernel, off = "padded", backbone.config._attn_implementation, ""
            if config.use_remove_padding:
                if problem := common.packing_problem(backbone, critic.flops):
                    refuse(problem)
                rows, kernel, ids_T = "packed", common.Pack.used, torch.arange(2 * n) % self.vocab_size
                packed_TD = hidden_states(ids_T, [n, n])
                backbone.set_attn_implementation(common.of_decoder("eager", self.model_config))
                error = common.relative_error(packed_TD, hidden_states(ids_T, [n, n], packed=False))
                backbone.set_attn_implementation(common.of_decoder("packed", self.model_config))
                if error > (1e-4 if float32 else 1e-1):
                    refuse(f"gives other hidden states for packed rows than for padded ones, by {error:.0e}")
                off = f", off padded rows {error:.0e}"
        critic.free_gathered()
        print0(f"attention  {rows} rows, kernel {kernel}; leak from later tokens and other rows {leak:.0e}{off}")

    def check_batch(self, batch, training):
        """Raises UserError, ValueError or RuntimeError for rows that this critic cannot take, or not now."""
        self.check_here()
        if len(batch) and self.config.ppo_max_token_len_per_gpu == "auto":
            self.find_budget(*common.longest_row(batch))
        check_budget(self.config, batch, training)
        common.check_rows(batch, self.model_config, self.image_processor)

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
        frozen = self.config.freeze_layers / getattr(self.model_config.get_text_config(), "num_hidden_layers", 1)
        passes = 1 + (1 - frozen) * (1 if self.config.lora_rank else 2)  # forward, to inputs, to weights
        flops = passes * epochs * sum(self.critic.flops.forward_flops(n) for n in batch.lengths)
        return common.measured_update(self.critic.update_critic, batch, self.device, epochs, flops, peak)

    @register(Dispatch.ONE_TO_ALL)
    def offload(self):
        """Gives the device memory of weights, gradients and optimizer state to somebody else (a rollout engine)."""
        self.move(torch.device("cpu"))
        self.parked = True
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    @register(Dispatch.ONE_TO_ALL)
    def onload(self):
        """Takes it back."""
        self.move(self.device)
        self.parked = False

    def move(self, device):
        model, optimizer = self.critic.model, self.critic.optimizer
        if self.config.offload_policy:
            return  # lives on the host always
        self.critic.free_gathered()
        if self.config.strategy == "fsdp1":
            for handle in model._all_handles:  # .to() would leave the local shard behind in the old memory
                handle.flat_param_to(device)
                handle.flat_param._local_shard = handle.flat_param.data
                handle.flat_param._tensors = [None] * len(handle.flat_param._tensors)  # views of the last forward
        else:
            model.to(device)
        for state in optimizer.state.values():
            for name, value in state.items():
                if name != "step":  # a scalar, which stays
                    state[name] = value.to(device)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder):
        """Writes model, optimizer, schedule, RNG and counters; the folder appears complete or not at all.

        Sharded safetensors with the names of transformers: no pickle, any layout of either critic can read it.
        """
        self.checkpoint_writer()(folder)

    def checkpoint_writer(self, copy=False):
        """write(folder, group): saves the state of now, which `copy` lets the training change meanwhile."""
        self.check_here()
        tensors, _, _ = checkpoint_tensors(self.critic.model, self.critic.optimizer)
        counters = self.critic.updates, self.critic.optimizer_steps
        return tensor_writer(tensors, copy, BACKEND, self.config, self.model_config, *counters)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder):
        """Restores what save_checkpoint of either critic wrote, on any layout. UserError: damaged or foreign."""
        self.check_here()
        saved = common.open_checkpoint(folder, BACKEND, self.config, self.model_config)
        tensors, model_state, optimizer_state = checkpoint_tensors(self.critic.model, self.critic.optimizer)
        read_tensors(tensors, folder, "critic")
        set_state_dict(
            self.critic.model, self.critic.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )
        torch.set_rng_state(tensors["rng"])
        self.critic.updates, self.critic.optimizer_steps = saved["updates"], saved["optimizer_steps"]

    @register(Dispatch.ONE_TO_ALL)
    def export_hf(self, folder):
        """Writes the value model as a Hugging Face folder that AutoModelForTokenClassification loads: num_labels 1,
        or a label a bin for hl_gauss, whose value_range then stands in config.json.

        Adapters are merged in. An architecture without that class gets its backbone in the folder and the head in
        value_head.safetensors; --model reads both kinds.
        """
        self.check_here()
        state = {}
        for name, x in get_model_state_dict(self.critic.model).items():
            x = full_tensor(x)  # one tensor at a time; rank 0 keeps it on the host
            if RANK == 0:
                state[name] = x.detach().cpu().contiguous()
        if self.config.lora_rank:
            modules = {n.replace("_fsdp_wrapped_module.", ""): m for n, m in self.critic.model.named_modules()}
            state = common.merge_lora(state, self.config.lora_alpha / self.config.lora_rank, modules)
        with common.complete_or_absent(folder) as tmp:
            if RANK == 0:
                common.save_hf(state, self.model_config, self.config.value_range, tmp)
                if self.image_processor is not None:
                    self.image_processor.save_pretrained(tmp)
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(tmp)


def checkpoint_tensors(model, optimizer):
    """All state as one flat dict of tensors, and the model's and optimizer's state dicts that share them."""
    fresh = not optimizer.state
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if fresh:  # to have a state to show, torch has made a step of nothing and counted it
        for state in (*optimizer.state.values(), *optimizer_state["state"].values()):
            state["step"].zero_()
    tensors = {f"model.{name}": x for name, x in model_state.items()}
    for name, state in optimizer_state["state"].items():
        tensors |= {f"optimizer.{name}.{key}": x for key, x in state.items()}
    return {**tensors, "rng": torch.get_rng_state()}, model_state, optimizer_state


def tensor_writer(tensors, copy, *state):
    """write(folder, group): saves these tensors as sharded safetensors, and `state`, see common.write_trainer_state."""
    tensors = common.host_copy(tensors) if copy else tensors

    def write(folder, group=None):
        with common.complete_or_absent(folder, group=group) as tmp:
            writer = HuggingFaceStorageWriter(tmp, save_distributed=True)
            dcp.save(tensors, storage_writer=writer, process_group=group)
            common.write_trainer_state(tmp, *state)

    return write


def read_tensors(tensors, folder, what):
    """Fills tensors with what tensor_writer wrote, on any layout. UserError: they are not those of this `what`."""
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(folder))
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))  # of the first rank that has one
        raise UserError(f"--resume {folder}: does not fit this {what} ({common.one_line(cause)})") from None


# ---------------------------------------------------------------------------------------------------------------------
# Plan: what a layout takes, worked out without launching it
# ---------------------------------------------------------------------------------------------------------------------


def plan(config, model_config, lengths, ranks):
    """What each of `ranks` ranks holds while it trains on rows of these lengths -> (words on the layout,
    name -> (bytes, equation) of each part at its largest, the same on the host), without work space of operations."""
    if config.ppo_max_token_len_per_gpu == "auto":
        raise UserError("--ppo-max-token-len-per-gpu auto: only a run can measure it; give --plan a number")
    config = dataclasses.replace(config, compile=False)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    dtype, tokens, rows = compute_dtype(config, device), *training_limits(config)
    model = build_skeleton(config, model_config)
    count, trained = common.count_parameters(model)
    parts = [common.count_parameters(block) for block in common.transformer_blocks(model)]
    blocks, train = [n for n, _ in parts], [n for _, n in parts]
    shards = {"none": 1}.get(config.strategy, ranks if config.fsdp_size == -1 else config.fsdp_size)
    out = {
        "weights": (4 * count / shards, f"{count:,} x 4 bytes / {shards} shards"),
        "gradients": (4 * trained / shards, f"{trained:,} x 4 bytes / {shards} shards"),
        "optimizer": (8 * trained / shards, f"{trained:,} x 8 bytes / {shards} shards"),
    }
    host = {name: out.pop(name) for name in list(out)} if config.offload_policy else {}
    if config.strategy == "none" and dtype != torch.float32:
        out["cast"] = count * dtype.itemsize, f"{count:,} x {dtype.itemsize} bytes (what autocast keeps of the weights)"
    if shards > 1 or config.strategy == "fsdp2":
        n = min(2, len(blocks)) if config.reshard_after_forward else len(blocks)
        gathered, layers = count - sum(blocks) + sum(sorted(blocks)[-n:]), f"the root and {n} of {len(blocks)} layers"
        out["gathered"] = gathered * dtype.itemsize, f"{gathered:,} x {dtype.itemsize} bytes ({layers})"
        whole, kept = (trained, "the whole") if config.defer_grad_sync else (max(train), "one layer")
        out["unreduced"] = 4 * whole, f"{whole:,} x 4 bytes (gradients of {kept} before reduction)"
    mini = min(config.ppo_mini_batch_size, len(lengths))
    share = sorted(lengths, reverse=True)[: math.ceil(mini * config.ulysses_size / ranks)]  # the longest a rank can get
    if rows is None:
        sizes = share if config.use_remove_padding else share[:1] * len(share)
        share = [n for n, total in zip(share, itertools.accumulate(sizes), strict=True) if total <= tokens]
    micro = [math.ceil(n / config.ulysses_size) for n in share[:rows]]
    used = f"{sum(micro):,} tokens" + (f" of {len(micro)} padded rows" if not config.use_remove_padding else "")
    experts = any(".experts." in name for name, _ in model.named_parameters())
    counted = torch.bfloat16 if experts else dtype  # fakes know grouped products of no other
    scale, skeleton = dtype.itemsize / counted.itemsize, lambda config: build_skeleton(config, model_config, counted)
    saved = lambda config: scale * common.saved_bytes(skeleton(config), config, micro, device)
    held = saved(config)
    out["activations"] = held, f"{used}, what autograd saves"
    if config.gradient_checkpointing:
        plain = dataclasses.replace(config, gradient_checkpointing=False)
        text = common.transformer_blocks(model.model.get_decoder())
        layer = saved(plain) / max(sum(common.count_parameters(block)[1] > 0 for block in text), 1)
        held, where = (0, "layer inputs on the host") if config.activation_offload else (held, "layer inputs")
        out["activations"] = held + layer, f"{used}: {where}, and one layer of {layer / 2**20:,.1f} MiB computed again"
    return f"{ranks} ranks = dp {ranks // config.ulysses_size} x sp {config.ulysses_size}, {config.strategy}", out, host


# ---------------------------------------------------------------------------------------------------------------------
# Main: value pretraining from rollouts
# ---------------------------------------------------------------------------------------------------------------------


def main(run):
    common.check_flag(run, "plan", "must be at least 1", lambda x: x is None or x >= 1)
    validate(run.critic, run.plan or WORLD_SIZE)
    common.validate_run(run)
    tokenizer = common.load_tokenizer(run.critic)
    model_config = common.load_model_config(run.critic, tokenizer)
    validate_for_model(run.critic, model_config)
    train, held_out = common.load_rows(run, model_config, tokenizer, check_budget)
    if run.plan:
        return common.print_plan(run, train.lengths, *plan(run.critic, model_config, train.lengths, run.plan))
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
    common.run(lambda: main(tyro.cli(Run, description=__doc__, console_outputs=RANK == 0)))
