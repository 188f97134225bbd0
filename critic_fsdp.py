"""A PPO critic for language models on PyTorch FSDP: one value model, one update, any layout.

    python critic_fsdp.py                                      toy task, a tiny model, a laptop CPU: half a minute
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
import inspect
import itertools
import math
import os
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import tyro

# ---------------------------------------------------------------------------------------------------------------------
# Config
# ---------------------------------------------------------------------------------------------------------------------

KERNELS = ("auto", "flash", "varlen", "sdpa", "eager")
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
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products (auto: bfloat16, float32 on CPU)
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
    ppo_max_token_len_per_gpu: int | Literal["auto"] = 16384  # most tokens of a training micro-batch, per rank: a hard
    # cap (auto: as many as the memory holds, which a probe measures)
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
from huggingface_hub import snapshot_download
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from transformers import AutoModel, Qwen2VLImageProcessorPil
from transformers.pytorch_utils import Conv1D

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
    if config.lora_rank and config.freeze_layers:
        raise UserError(f"--freeze-layers {config.freeze_layers}: --lora-rank freezes all layers already; drop one")
    if config.lora_rank and importlib.util.find_spec("peft") is None:
        raise UserError(f"--lora-rank {config.lora_rank}: peft is not installed; pip install peft")
    if world_size % sp:
        raise UserError(f"--ulysses-size {sp}: must divide the {world_size} ranks")
    if sp > 1 and not config.use_remove_padding:
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
    if heads % config.ulysses_size:
        raise UserError(f"--ulysses-size {config.ulysses_size}: must divide the model's {heads} attention heads")
    if config.freeze_layers > layers:
        raise UserError(f"--freeze-layers {config.freeze_layers}: the model has {layers} layers")
    if config.ppo_max_token_len_per_gpu == "auto" and model_config.model_type in VISION_MODELS:
        raise UserError("--ppo-max-token-len-per-gpu auto: counts no images; give a number")
    if config.freeze_vision_tower and model_config.model_type not in VISION_MODELS:
        raise UserError(f"--freeze-vision-tower: {config.model} ({model_config.model_type}) reads text only")


# ---------------------------------------------------------------------------------------------------------------------
# Value model: any decoder of transformers and a value head in float32
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
            return self.score(hidden_BLD.to(self.score.weight.dtype)).squeeze(-1).float()


VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # images are read; all others read text only


def load_image_processor(config, model_config):
    """What makes patches of images, or None: the model reads text only, or came without one.

    Pillow's, which all these models share: the same pixels on every machine, with torchvision or without.
    """
    if model_config.model_type not in VISION_MODELS:
        return None
    if config.model in common.TINY:
        return Qwen2VLImageProcessorPil(patch_size=model_config.vision_config.patch_size)
    for name in filter(None, (config.model, config.tokenizer)):
        with contextlib.suppress(OSError):  # no preprocessor_config.json
            return Qwen2VLImageProcessorPil.from_pretrained(name)
    print0(f"images     cannot be read from rows: no preprocessor_config.json in {config.model}")
    return None


def read_weights(config, model_config):
    """A ValueModel on the host with its weights, and a sentence on where they come from. Runs on rank 0 alone."""
    if config.model in common.TINY or config.from_scratch:
        torch.manual_seed(config.seed)
        backbone = AutoModel.from_config(model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code)
        model = ValueModel(backbone, config)
        return model, f"random weights (seed {config.seed}); {common.init_value_head(model.score, None, config)}"
    folder = config.model
    if not os.path.isdir(folder):  # a hub name, which its config came from already
        folder = snapshot_download(folder, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.py"])
    try:
        backbone, info = AutoModel.from_pretrained(
            folder, config=model_config, trust_remote_code=config.trust_remote_code, output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UserError(f"--model {config.model}: its weights do not load ({common.one_line(error)})") from None
    absent = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if absent:
        raise UserError(f"--model {config.model}: {len(absent)} weights are not in the checkpoint, e.g. {absent[0]}")
    model = ValueModel(backbone, config)
    head = common.init_value_head(model.score, folder, config)
    return model, f"{type(backbone).__name__} from {config.model}; {head}"


def freeze(backbone, layers):
    """Takes the embeddings and the lowest blocks out of training: they get no gradient and no optimizer state."""
    blocks = transformer_blocks(backbone.get_decoder())
    if len(blocks) < layers:
        raise UserError(f"--freeze-layers {layers}: {type(backbone).__name__} shows {len(blocks)} layers")
    for module in [m for m in backbone.modules() if isinstance(m, nn.Embedding)] + blocks[:layers]:
        module.requires_grad_(False)


def add_lora(backbone, config):
    """Freezes the backbone and gives its linear layers adapters: W x + alpha / r B A x (LoRA, 2106.09685).

    A is random, B zero: values are at first those without. Experts that a mixture keeps in one tensor get no adapter.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear, targets = [n for n, m in backbone.named_modules() if isinstance(m, nn.Linear | Conv1D)], []
    for target in config.lora_target_modules:
        named = [n for n in linear if target == "all-linear" or f".{n}".endswith(f".{target}")]
        if not named:
            there = ", ".join(sorted({n.rpartition(".")[2] for n in linear}))
            raise UserError(f"--lora-target-modules {target}: is no linear layer of {config.model}; there are {there}")
        targets += named
    inject_adapter_in_model(
        LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets), backbone
    )


def merge_lora(state, scale, transposed):
    """Full state dict with adapters -> that of the same function without them, W + scale B A.

    transposed: names of the layers that keep W as (in, out).
    """
    merged = {}
    for name, x in state.items():
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            delta = scale * state[f"{layer}.lora_B.default.weight"] @ state[f"{layer}.lora_A.default.weight"]
            x = x + (delta.T if layer in transposed else delta)
        if ".lora_" not in name:
            merged[name.replace(".base_layer.", ".")] = x
    return merged


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
    sp_rank: int
    sp_group: dist.ProcessGroup | None
    fsdp_mesh: DeviceMesh  # (world,), or (replicas, fsdp_size) for hybrid sharding


def make_layout(config, device):
    """Builds the process groups. Rank = dp_rank * sp_size + sp_rank."""
    sp = config.ulysses_size
    mesh = init_device_mesh(device.type, (WORLD_SIZE // sp, sp), mesh_dim_names=("dp", "sp"))
    if config.fsdp_size in (-1, WORLD_SIZE):
        fsdp_mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    else:
        sizes = (WORLD_SIZE // config.fsdp_size, config.fsdp_size)
        fsdp_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
    return Layout(
        device=device,
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=WORLD_SIZE // sp,
        dp_group=mesh.get_group("dp"),
        sp_size=sp,
        sp_rank=mesh.get_local_rank("sp"),
        sp_group=mesh.get_group("sp") if sp > 1 else None,
        fsdp_mesh=fsdp_mesh,
    )


def compute_dtype(config, device):
    """The dtype of matrix products; master weights, gradients, optimizer and value head are float32 always."""
    if config.param_dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, config.param_dtype)


def build_skeleton(config, model_config, dtype=torch.float32):
    """A ValueModel on meta: no weights yet, but all that is settled without them. UserError: it cannot be built."""
    attention = "packed"
    if config.compile:  # its lists of lengths would be compiled in, anew for each pack
        transformers.AttentionInterface.register("packed", torch.compiler.disable(common.packed_attention))
    if not config.use_remove_padding:
        capped = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
        if capped and config.attn_implementation == "sdpa":
            raise UserError(f"--attn-implementation sdpa: would drop the soft cap of {config.model}; auto takes eager")
        names = {"flash": "flash_attention_2", "auto": "eager" if capped else None}
        attention = names.get(config.attn_implementation, config.attn_implementation)
    try:
        with torch.device("meta"):
            backbone = AutoModel.from_config(
                model_config, dtype=dtype, attn_implementation=of_decoder(attention, model_config),
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
            add_lora(backbone, config)
    if config.freeze_layers:
        freeze(backbone, config.freeze_layers)
    for block in transformer_blocks(backbone) if config.compile else ():  # in place: names of weights stay
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
        add_lora(source.model, config)
    flops, (count, trained) = common.flops_model(model, model_config), count_parameters(model)
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


def count_parameters(module):
    """(all, those that train)."""
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def of_decoder(attention, model_config):
    """The attention of the decoder, as transformers takes it: a vision tower keeps its own."""
    return {"": attention, "text_config": attention} if model_config.model_type in VISION_MODELS else attention


def transformer_blocks(model):
    """The layers to shard one by one: classes the model's authors say must not be split."""
    names = {n for m in model.modules() for n in (getattr(m, "_no_split_modules", None) or ())}
    return [m for m in model.modules() if type(m).__name__ in names]


def shard_fsdp2(model, config, layout):
    dtype, blocks = compute_dtype(config, layout.device), transformer_blocks(model)
    options = {"mesh": layout.fsdp_mesh, "reshard_after_forward": config.reshard_after_forward}
    if config.offload_policy:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=layout.device.type == "cuda")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=getattr(torch, config.reduce_dtype))
    head_policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mp_policy=policy, **options)
    fully_shard(model.score, mp_policy=head_policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    for block, following in zip(blocks, blocks[1:], strict=False) if config.forward_prefetch else ():
        block.set_modules_to_forward_prefetch([following])
    model.to_empty(device="cpu" if config.offload_policy else layout.device)
    for module in model.modules() if config.offload_policy else ():  # what is no weight stays on the device
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=layout.device)
    return model


def shard_fsdp1(model, config, layout):
    dtype, blocks = compute_dtype(config, layout.device), set(transformer_blocks(model))
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


def training_limits(config):
    """(most tokens, rows) of a training micro-batch of one sequence-parallel group; rows, if given, decide alone."""
    tokens = config.ppo_max_token_len_per_gpu
    tokens = 2**62 if tokens == "auto" else tokens * config.ulysses_size  # auto: until find_budget knows
    return tokens, config.ppo_micro_batch_size_per_gpu


def forward_limits(config):
    """The same for compute_values: as in training unless one of its own flags is given."""
    tokens, rows = config.forward_max_token_len_per_gpu, config.forward_micro_batch_size_per_gpu
    if tokens is None and rows is None:
        return training_limits(config)
    return tokens and tokens * config.ulysses_size, rows


def check_budget(config, batch, training, path=None):
    """UserError naming the longest row if no micro-batch can hold it. path: the file that the rows come from."""
    longest, sp = max(batch.lengths, default=0), config.ulysses_size
    tokens, rows = training_limits(config) if training else forward_limits(config)
    if rows is None and longest > tokens:
        flag = "forward" if not training and config.forward_max_token_len_per_gpu else "ppo"
        row = int(batch.row_id[batch.lengths.index(longest)])
        where = f"{path}:{row + 1}" if path else f"row {row}"
        raise UserError(
            f"--{flag}-max-token-len-per-gpu {tokens // sp}: {where} has {longest} tokens; give at least "
            f"{-(-longest // sp)}"
        )


def slice_row(decoder, args, kwargs):
    """A forward pre-hook: each rank of a sequence-parallel group goes on with its slice of the packed row.

    It stands where the decoder begins, behind a vision tower, which all ranks of the group run on all images alike.
    """
    if common.Pack.group is None:
        return None
    size, rank = dist.get_world_size(common.Pack.group), dist.get_rank(common.Pack.group)
    whole = {key: kwargs.get(key) for key in ("input_ids", "inputs_embeds", "visual_pos_masks")}
    sliced = {key: x.chunk(size, 1)[rank] for key, x in whole.items() if x is not None}
    sliced["position_ids"] = kwargs["position_ids"].chunk(size, -1)[rank]
    if "visual_pos_masks" in sliced:  # Qwen3-VL's deepstack: a row of features for each token of an image
        counts = [int(mask.sum()) for mask in kwargs["visual_pos_masks"].chunk(size, 1)]
        sliced["deepstack_visual_embeds"] = [x.split(counts)[rank] for x in kwargs["deepstack_visual_embeds"]]
    return args, {**kwargs, **sliced}


class DataParallelPPOCritic:
    """Values and updates of a sharded value model. Both methods take the *global* batch, the same on every rank, and
    work on this rank's share of it."""

    def __init__(self, config, model, flops, layout, image_processor=None):
        self.config, self.model, self.flops, self.layout = config, model, flops, layout
        self.image_processor, backbone = image_processor, model.model
        self.reads_images = backbone.config.model_type in VISION_MODELS
        decoder = backbone.language_model if self.reads_images else backbone
        decoder.register_forward_pre_hook(slice_row, with_kwargs=True)
        lr = config.lr if config.lr is not None else (1e-3 if config.model in common.TINY else 1e-5)
        trainable = [p for p in model.parameters() if p.requires_grad]
        options = {"lr": lr, "betas": config.betas, "weight_decay": config.weight_decay}
        self.optimizer = torch.optim.AdamW(trainable, **options, fused=True)  # one kernel: a fifth of the time on CPU
        self.peak_lr = lr
        self.optimizer_steps = 0  # taken, skipped ones not counted: the position of the schedule
        self.updates = 0  # calls of update_critic: with seed and epoch the key of every shuffle

    def my_micro_batches(self, batch, max_tokens, size):
        """This rank's rows of a global batch as lists of row indices, one list a micro-batch.

        Rows go to data-parallel ranks by FLOPs, a rank's rows to micro-batches by tokens. Every rank works it out for
        all ranks, so that all make the same number of forwards without a word.
        """
        lengths, layout = batch.lengths, self.layout
        shares = common.balance([self.flops.forward_flops(n) for n in lengths], layout.dp_size)
        parts = common.micro_batches(
            [[lengths[i] for i in share] for share in shares], max_tokens, size, not self.config.use_remove_padding
        )
        mine = shares[layout.dp_rank]
        return [[mine[j] for j in part] for part in parts[layout.dp_rank]]

    def micro_batch(self, batch, rows):
        """These rows on the device, and their lengths; a rank without rows runs one masked token to keep in step."""
        micro = batch.select(rows) if rows else common.masked_token()
        if self.reads_images:
            images = micro.multi_modal_inputs or [{} for _ in micro.lengths]
            micro.multi_modal_inputs = [common.read_images(row, self.image_processor) for row in images]
        return micro.to(self.layout.device), micro.lengths

    def forward_micro_batch(self, micro, lengths):
        """What the head says of the actions of a micro-batch: (T,) float32 values, or (T, N) logits; zero elsewhere."""
        ids_T, inputs = micro.input_ids, {}
        if self.reads_images:
            ids_T, lengths, inputs = self.with_images(ids_T, lengths, micro.multi_modal_inputs)
        forward = self.forward_packed if self.config.use_remove_padding else self.forward_padded
        return common.values_of_actions(forward(ids_T, lengths, **inputs)[: len(micro.input_ids)], micro.response_mask)

    def values(self, outputs_T, response_mask_T):
        """(T,) values of the actions from what forward_micro_batch gives, zero elsewhere."""
        if self.config.value_head == "scalar":
            return outputs_T
        return torch.where(response_mask_T, common.hl_gauss_values(outputs_T, *self.config.value_range), 0.0)

    def with_images(self, ids_T, lengths, images):
        """(ids, lengths, inputs of the forward) of rows with these images, a list of B dicts.

        Ranks that share the weights of the vision tower must run it together, so rows without any image get a black
        one, whose one token ends the last row: no other token sees it, no value is read there, its gradient is zero.
        It is the only token ever above the cap of a micro-batch.
        """
        backbone = self.model.model
        image_token_id, tower = backbone.config.image_token_id, backbone.config.vision_config
        if not any(images):
            merge = tower.spatial_merge_size
            features = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
            black = {
                "pixel_values": torch.zeros(merge**2, features, device=ids_T.device),
                "image_grid_thw": torch.tensor([[1, merge, merge]], device=ids_T.device),
            }
            ids_T, lengths = F.pad(ids_T, (0, 1), value=image_token_id), [*lengths[:-1], lengths[-1] + 1]
            images = [*images[:-1], black]
        positions = []
        for ids, row in zip(ids_T.split(lengths), images, strict=True):
            thw, _ = backbone.get_rope_index(
                ids[None], (ids == image_token_id).int()[None], image_grid_thw=row.get("image_grid_thw")
            )
            positions.append(torch.cat([torch.arange(len(ids), device=ids.device)[None], thw[:, 0]]))
        inputs = {key: torch.cat([row[key] for row in images if row]) for key in ("pixel_values", "image_grid_thw")}
        return ids_T, lengths, {"position_ids": torch.cat(positions, 1), **inputs}

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
        config, layout = self.config, self.layout
        self.model.eval()
        values_T = torch.zeros(len(batch.input_ids), device=layout.device)
        for rows in common.progress(self.my_micro_batches(batch, *forward_limits(config)), "values"):
            micro, lengths = self.micro_batch(batch, rows)
            outputs_T = self.forward_micro_batch(micro, lengths)
            if rows:
                values_T[batch.token_index(rows).to(layout.device)] = self.values(outputs_T, micro.response_mask)
        self.free_gathered()
        dist.all_reduce(values_T, group=layout.dp_group)  # each token was computed by one group; the rest added zeros
        return values_T.cpu()

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
        self.model.train()
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
                micros, sums = self.my_micro_batches(mini, *training_limits(config)), torch.zeros_like(totals)
                for i, rows in enumerate(micros):
                    now = i == len(micros) - 1 or not config.defer_grad_sync
                    with self.gradient_sync(now), self.saved_activations():
                        sums += self.forward_backward(mini, rows, counts)
                lr = self.learning_rate()
                norm = self.optimizer_step()
                if math.isfinite(norm):
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

    def forward_backward(self, mini, rows, counts):
        """Adds the gradient of these rows' part of the mini-batch loss -> sums (loss, clipped, vpreds, actions)."""
        config = self.config
        micro, lengths = self.micro_batch(mini, rows)
        outputs_T, mask_T = self.forward_micro_batch(micro, lengths), micro.response_mask
        vpreds_T = self.values(outputs_T, mask_T)
        weights_T = common.loss_weights(
            mask_T, micro.cu_seqlens, config.loss_agg_mode, counts, config.response_length_limit
        )
        if config.value_head == "hl_gauss":
            loss = common.hl_gauss_loss(outputs_T, micro.returns, mask_T, weights_T, *config.value_range)
            clipped = torch.zeros_like(loss)
        else:
            loss, clipped = common.value_loss(
                vpreds_T, micro.values, micro.returns, mask_T, weights_T, config.cliprange_value
            )
        # the loss is a sum over all ranks, but FSDP (and optimizer_step without it) averages gradients over them
        (loss * WORLD_SIZE).backward()
        if config.strategy == "fsdp1" and WORLD_SIZE == 1:  # there FSDP1 itself forgets units without a gradient
            self.free_gathered()
        return torch.stack([loss, clipped, vpreds_T.sum(), mask_T.sum()]).detach()

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
        if self.config.strategy == "none" and WORLD_SIZE > 1:
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient  # an expert may have seen no token here, but some on another rank
            for work in [dist.all_reduce(g, async_op=True) for g in gradients]:
                work.wait()
            torch._foreach_div_(gradients, WORLD_SIZE)
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
        self.image_processor = load_image_processor(config, self.model_config)
        if config.value_head == "hl_gauss" and config.value_range is None:
            if not getattr(self.model_config, "value_range", None):
                raise UserError("--value-range: hl_gauss needs it, LOW and HIGH of the returns with a small margin")
            config = dataclasses.replace(config, value_range=tuple(self.model_config.value_range))
        self.config = config
        self.vocab_size = self.model_config.get_text_config().vocab_size
        validate_for_model(config, self.model_config)
        self.device = common.setup_distributed(config.timeout_minutes)
        half = compute_dtype(config, self.device) != torch.float32
        if config.strategy == "fsdp1" and config.defer_grad_sync and half:
            raise UserError("--defer-grad-sync: fsdp1 would add gradients up in bfloat16; use --strategy fsdp2")
        self.layout = make_layout(config, self.device)

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self):
        """Builds the sharded model and its optimizer, and refuses a model that cannot work as a critic here."""
        config, layout = self.config, self.layout
        model, flops, size, story = build_value_model(config, self.model_config, layout)
        self.critic = DataParallelPPOCritic(config, model, flops, layout, self.image_processor)
        torch.manual_seed(config.seed)  # building drew numbers on rank 0 alone
        print0(f"model      {config.model} ({self.model_config.model_type}), {size}: {story}")
        shard = layout.fsdp_mesh.shape[-1]
        spread = f"{config.strategy}, {shard} shards x {WORLD_SIZE // shard} replicas"
        spread = "a copy on each rank" if config.strategy == "none" else spread
        print0(f"layout     ranks {WORLD_SIZE} = dp {layout.dp_size} x sp {layout.sp_size}; weights: {spread}")
        dtype = str(compute_dtype(config, self.device)).removeprefix("torch.")
        print0(f"precision  {dtype} products on {self.device.type}; weights, gradients, value head float32")
        self.check_model(model.model)

    @register(Dispatch.ONE_TO_ALL)
    def find_budget(self, longest, row):
        """Makes a number of --ppo-max-token-len-per-gpu auto, on which no update depends. UserError: no row would fit.

        longest: tokens of the longest row to come; row: words that name it.
        """
        if self.config.ppo_max_token_len_per_gpu != "auto":
            return
        critic, (_, trained) = self.critic, count_parameters(self.critic.model)

        def probe(n):
            batch = common.probe_rows(n, longest)
            with critic.gradient_sync(True), critic.saved_activations():
                critic.forward_backward(batch, range(n), common.loss_counts(batch.response_mask, batch.cu_seqlens))

        critic.model.train()
        here = lambda x: 0 if self.config.offload_policy else getattr(x, "_local_tensor", x).nbytes
        weights = sum(here(p) for p in critic.model.parameters())
        learns = sum(here(p) for p in critic.model.parameters() if p.requires_grad)
        moments = sum(here(x) for state in critic.optimizer.state.values() for x in state.values())
        to_come = max(2 * learns - moments, 0) + 4 * trained * self.config.defer_grad_sync
        held = weights + learns + moments
        tokens = common.find_budget(self.config, probe, longest, row, held, to_come, self.layout.sp_size, self.device)
        critic.optimizer.zero_grad(set_to_none=True)
        critic.free_gathered()
        self.config = critic.config = dataclasses.replace(self.config, ppo_max_token_len_per_gpu=tokens)

    @torch.no_grad()
    def check_model(self, backbone):
        """UserError unless the model is causal, and packed rows give the hidden states of its own padded attention.

        Two short rows tell: a model that lets packed rows see each other, or whose attention has a part that the packed
        one does not know, shows it there. What shows only in long rows is looked up instead.
        """
        critic, packed, seen = self.critic, self.config.use_remove_padding, []
        hook = critic.model.score.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
        critic.model.eval()

        def hidden_states(ids_T, lengths, packed=packed):
            (critic.forward_packed if packed else critic.forward_padded)(ids_T.to(self.device), lengths)
            sliced = packed and self.layout.sp_group is not None
            return common.GatherSlices.apply(seen.pop(), self.layout.sp_group) if sliced else seen.pop()

        half, n = compute_dtype(self.config, self.device) != torch.float32, 8 * self.layout.sp_size
        most_leak, most_off = (2e-2, 1e-1) if half else (1e-5, 1e-4)
        problem, leak, off = "", math.inf, 0.0
        kinds = set(getattr(self.model_config.get_text_config(), "layer_types", None) or ())
        unknown = kinds - {"full_attention", "sliding_attention"}
        _, (_, window, sliding) = critic.flops.per_pair
        inputs = inspect.signature(backbone.forward).parameters
        marks_images = hasattr(backbone.config, "vision_config")
        marks_images = marks_images and inputs.keys() & {"token_type_ids", "mm_token_type_ids"}
        try:
            leak = common.influence(hidden_states, self.vocab_size, n)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            problem = f"does not run: {common.one_line(error)}"
        if not problem and leak > most_leak:
            problem = f"lets tokens see later ones or another row (hidden states move by {leak:.0e})"
        elif not problem and packed and unknown:
            problem = f"has layers of {', '.join(sorted(unknown))}, which packed rows might lose"
        elif not problem and packed and marks_images and not critic.reads_images:
            problem = "may let the tokens of an image see later ones, which packed rows would lose"
        elif not problem and packed and sliding and window not in common.Pack.windows:
            problem = f"does not tell its attention the sliding window of {window}, which packed rows would lose"
        elif not problem and packed:
            kernel, ids_T = common.Pack.used, torch.arange(2 * n) % self.vocab_size
            packed_TD = hidden_states(ids_T, [n, n])
            backbone.set_attn_implementation(of_decoder("eager", self.model_config))
            off = common.relative_error(packed_TD, hidden_states(ids_T, [n, n], packed=False))
            backbone.set_attn_implementation(of_decoder("packed", self.model_config))
            if off > most_off:
                problem = f"gives other hidden states for packed rows than for padded ones, by {off:.0e}"
        if problem:
            remedy = "; add --no-use-remove-padding" if packed else ""
            remedy = "; drop --compile" if self.config.compile else remedy
            raise UserError(f"--model {self.config.model}: {type(backbone).__name__} {problem}{remedy}")
        hook.remove()
        critic.free_gathered()
        if packed:
            print0(f"attention  packed rows, kernel {kernel}; leak between rows {leak:.0e}, off padded ones {off:.0e}")
        else:
            print0(f"attention  padded rows, {backbone.config._attn_implementation}; leak from later tokens {leak:.0e}")

    def check_batch(self, batch, training):
        """Raises UserError or ValueError for rows that this critic cannot take."""
        if len(batch) and self.config.ppo_max_token_len_per_gpu == "auto":
            self.find_budget(*common.longest_row(batch))
        check_budget(self.config, batch, training)
        if len(batch) and int(batch.input_ids.max()) >= self.vocab_size:
            raise ValueError(f"token id {int(batch.input_ids.max())} is outside the vocabulary of {self.vocab_size}")
        self.check_images(batch)

    def check_images(self, batch):
        """ValueError naming the first row whose images this critic cannot read or whose placeholders do not fit."""
        rows = batch.multi_modal_inputs
        if not self.critic.reads_images:
            if rows:
                row = int(batch.row_id[max(range(len(rows)), key=lambda b: bool(rows[b]))])
                raise ValueError(f"row {row}: multi_modal_inputs: this critic reads text only")
            return
        image_token_id, merge = self.model_config.image_token_id, self.model_config.vision_config.spatial_merge_size
        for b, ids in enumerate(batch.input_ids.split(batch.lengths)):
            images, row = rows[b] if rows else {}, int(batch.row_id[b])
            if unknown := images.keys() - {"images", "pixel_values", "image_grid_thw"}:
                raise ValueError(f"row {row}: multi_modal_inputs: this critic reads no {', '.join(sorted(unknown))}")
            if "images" in images and self.image_processor is None:
                raise ValueError(f"row {row}: there is no preprocessor_config.json to read its images with")
            if "images" not in images:  # read_jsonl has counted those
                try:
                    common.check_placeholders(ids.tolist(), image_token_id, common.image_tokens(images, merge))
                except UserError as error:
                    raise ValueError(f"row {row}: {error}") from None

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch):
        """Values of the caller's rows: (T,) float32, zero where response_mask is false."""
        self.check_batch(batch, training=False)
        return self.critic.compute_values(batch)

    @register(Dispatch.DP_COMPUTE_PROTO, needs=("values", "returns"))
    def update_critic(self, batch):
        """One PPO update on the rows of all ranks, with their old values and returns -> metrics, equal on all ranks."""
        self.check_batch(batch, training=True)
        epochs, half = self.config.ppo_epochs, compute_dtype(self.config, self.device) == torch.bfloat16
        peak = common.device_peak_flops(self.device) if half else None  # the table is of bfloat16
        frozen = self.config.freeze_layers / getattr(self.model_config.get_text_config(), "num_hidden_layers", 1)
        passes = 1 + (1 - frozen) * (1 if self.config.lora_rank else 2)  # forward, to inputs, to weights
        flops = passes * epochs * sum(self.critic.flops.forward_flops(n) for n in batch.lengths)
        return common.measured_update(self.critic.update_critic, batch, self.device, epochs, flops, peak)

    @register(Dispatch.ONE_TO_ALL)
    def offload(self):
        """Gives the device memory of weights and optimizer state to somebody else (a rollout engine)."""
        self.move(torch.device("cpu"))
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    @register(Dispatch.ONE_TO_ALL)
    def onload(self):
        """Takes it back."""
        self.move(self.device)

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

        Sharded safetensors through torch.distributed.checkpoint: no pickle, any world size and strategy can read it.
        """
        self.checkpoint_writer()(folder)

    def checkpoint_writer(self, copy=False):
        """write(folder, group): saves the state of now, which `copy` lets the training change meanwhile."""
        tensors, _, _ = checkpoint_tensors(self.critic.model, self.critic.optimizer)
        counters = self.critic.updates, self.critic.optimizer_steps
        return tensor_writer(tensors, copy, "fsdp", self.config, self.model_config, *counters)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder):
        """Restores what save_checkpoint wrote, on any world size and strategy. UserError: damaged or foreign."""
        saved = common.open_checkpoint(folder, "fsdp", self.config, self.model_config)
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
        or a label a bin for hl_gauss, whose value_range then stands in config.json. Adapters are merged in.

        An architecture without that class gets its backbone in the folder and the head in value_head.safetensors;
        --model reads both kinds.
        """
        state = {}
        for name, x in get_model_state_dict(self.critic.model).items():
            x = full_tensor(x)  # one tensor at a time; rank 0 keeps it on the host
            if RANK == 0:
                state[name] = x.detach().cpu().contiguous()
        if self.config.lora_rank:
            modules = {n.replace("_fsdp_wrapped_module.", ""): m for n, m in self.critic.model.named_modules()}
            transposed = {n.removesuffix(".base_layer") for n, m in modules.items() if isinstance(m, Conv1D)}
            state = merge_lora(state, self.config.lora_alpha / self.config.lora_rank, transposed)
        with common.complete_or_absent(folder) as tmp:
            if RANK == 0:
                save_hf(state, self.model_config, self.config.value_range, tmp)
                for reader in filter(None, (self.tokenizer, self.image_processor)):
                    reader.save_pretrained(tmp)


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


def save_hf(state, model_config, value_range, folder):
    """Writes a full state dict of a ValueModel ("model.*", "score.*") with transformers' own save_pretrained."""
    model_config = common.config_of_export(model_config, len(state["score.weight"]), value_range)
    backbone = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    if type(model_config) in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        with torch.device("meta"):
            skeleton = transformers.AutoModelForTokenClassification.from_config(model_config, dtype=torch.float32)
        prefix = skeleton.base_model_prefix
        head = next(n for n, m in skeleton.named_children() if n != prefix and isinstance(m, nn.Linear))
        full = {f"{prefix}.{k}": v for k, v in backbone.items()}
        full |= {f"{head}.{k}": state[f"score.{k}"] for k in ("weight", "bias")}
        skeleton.save_pretrained(folder, state_dict=full)
        return
    with torch.device("meta"):
        skeleton = AutoModel.from_config(model_config, dtype=torch.float32)
    skeleton.save_pretrained(folder, state_dict=backbone)
    from safetensors.torch import save_file

    head = {f"score.{k}": state[f"score.{k}"] for k in ("weight", "bias")}
    save_file(head, os.path.join(folder, "value_head.safetensors"), metadata={"format": "pt"})


# ---------------------------------------------------------------------------------------------------------------------
# Plan: what a layout takes, worked out without launching it
# ---------------------------------------------------------------------------------------------------------------------


def saved_bytes(config, model_config, lengths, dtype, device):
    """Bytes that autograd saves in a training forward over sequences of these lengths, weights not counted.

    Counted exactly, on fake tensors, which have shapes and devices but no memory.
    """
    model = build_skeleton(config, model_config, dtype).train()
    if dtype == torch.float32 and any(".experts." in name for name, _ in model.named_parameters()):
        return 2 * saved_bytes(config, model_config, lengths, torch.bfloat16, device)  # fakes know grouped products so
    with FakeTensorMode():
        fake = lambda x: torch.empty(x.shape, dtype=x.dtype, device=device)
        for module in model.modules():
            for name, x in module.named_parameters(recurse=False):
                module._parameters[name] = nn.Parameter(fake(x), x.requires_grad)
            for name, x in module.named_buffers(recurse=False):
                module._buffers[name] = fake(x)
        weights = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
        saved = {}

        def note(x):
            storage = x.untyped_storage()
            saved[storage._cdata] = (storage, storage.nbytes() if storage._cdata not in weights else 0)
            return x

        lengths = lengths if config.use_remove_padding else [max(lengths)] * len(lengths)
        shape = (1, -1) if config.use_remove_padding else (len(lengths), -1)
        position_ids = torch.cat([torch.arange(n, device=device) for n in lengths]).view(shape)
        common.set_pack(lengths, device, kernel=config.attn_implementation)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(input_ids=torch.zeros_like(position_ids), position_ids=position_ids)
        return sum(n for _, n in saved.values())


def plan(config, model_config, lengths, ranks):
    """What each of `ranks` ranks holds while it trains on rows of these lengths -> name -> (bytes, equation).

    The peak lies below the sum of it, in which every part is at its largest.
    """
    if config.ppo_max_token_len_per_gpu == "auto":
        raise UserError("--ppo-max-token-len-per-gpu auto: only a run can measure it; give --plan a number")
    config = dataclasses.replace(config, compile=False)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    dtype, tokens, rows = compute_dtype(config, device), *training_limits(config)
    model = build_skeleton(config, model_config)
    (count, trained), parts = count_parameters(model), [count_parameters(b) for b in transformer_blocks(model)]
    blocks, train = [n for n, _ in parts], [n for _, n in parts]
    shards = {"none": 1}.get(config.strategy, ranks if config.fsdp_size == -1 else config.fsdp_size)
    out = {
        "weights": (4 * count / shards, f"{count:,} x 4 bytes / {shards} shards"),
        "gradients": (4 * trained / shards, f"{trained:,} x 4 bytes / {shards} shards"),
        "optimizer": (8 * trained / shards, f"{trained:,} x 8 bytes / {shards} shards"),
    }
    if shards > 1:
        layers = f"the root and 2 of {len(blocks)} layers" if config.reshard_after_forward else "all layers"
        gathered = count - sum(blocks) + 2 * max(blocks) if config.reshard_after_forward else count
        out["gathered"] = gathered * dtype.itemsize, f"{gathered:,} x {dtype.itemsize} bytes ({layers})"
        whole, kept = (trained, "the whole") if config.defer_grad_sync else (max(train), "one layer")
        out["unreduced"] = 4 * whole, f"{whole:,} x 4 bytes (gradients of {kept} before reduction)"
    mini = min(config.ppo_mini_batch_size, len(lengths))
    share = sorted(lengths, reverse=True)[: math.ceil(mini * config.ulysses_size / ranks)]  # the longest a rank can get
    if rows is None:
        share = [n for n, total in zip(share, itertools.accumulate(share), strict=True) if total <= tokens]
    micro = [math.ceil(n / config.ulysses_size) for n in share[:rows]]
    used = f"{sum(micro):,} tokens" + (f" of {len(micro)} padded rows" if not config.use_remove_padding else "")
    held = saved_bytes(config, model_config, micro, dtype, device)
    out["activations"] = held, f"{used}, what autograd saves"
    if config.gradient_checkpointing:
        plain = dataclasses.replace(config, gradient_checkpointing=False)
        layer = saved_bytes(plain, model_config, micro, dtype, device) / len(blocks)
        where = "layer inputs on the host" if config.activation_offload else "layer inputs"
        held = 0 if config.activation_offload else held
        out["activations"] = held + layer, f"{used}: {where}, and one layer of {layer / 2**20:,.1f} MiB computed again"
    return out


def print_plan(run, model_config, lengths):
    """Prints the plan of --plan ranks as equations."""
    config, ranks = run.critic, run.plan
    parts, mean = plan(config, model_config, lengths, ranks), sum(lengths) / len(lengths)
    dp = ranks // config.ulysses_size
    print0(f"layout       {ranks} ranks = dp {dp} x sp {config.ulysses_size}, {config.strategy}")
    for name, (size, equation) in parts.items():
        print0(f"{name:12s} {size / 2**20:12,.1f} MiB = {equation}")
    print0(f"{'together':12s} {sum(size for size, _ in parts.values()) / 2**20:12,.1f} MiB a rank at most")
    mini = min(config.ppo_mini_batch_size, len(lengths))
    print0(f"{'step':12s} {mini} rows x {mean:,.0f} tokens / {ranks} ranks = {mini * mean / ranks:,.0f} tokens a rank")


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
    train, held_out = common.load_rows(
        run, model_config, check_budget, tokenizer=tokenizer,
        image_processor=load_image_processor(run.critic, model_config),
        image_token_id=model_config.image_token_id if model_config.model_type in VISION_MODELS else None,
    )  # fmt: skip
    if run.plan:
        return print_plan(run, model_config, train.lengths)
    files = ((train, run.rollouts), (held_out, run.eval_rollouts))
    longest, row = max(common.longest_row(*rows) for rows in files if rows[0] is not None)
    run = common.smaller_budgets(run, longest)
    run = common.find_resume(run, run.critic.timeout_minutes)
    config, first_step = common.settle(run, model_config, train)
    worker = CriticWorker(config)
    worker.init_model()
    if run.resume:
        worker.load_checkpoint(run.resume)
    worker.find_budget(longest, row)
    common.print_work(worker, run, train)
    common.print_data_check(run, train, held_out)
    logger = common.Logger(run.out_dir, dataclasses.asdict(run), first_step, run.wandb_project)
    common.listen_for_sigterm()
    start, stuck, batch = time.perf_counter(), 0, None
    for step in common.profiled(run, range(first_step, run.steps + 1)):
        last, stop = step == run.steps, common.told_to_stop()
        if held_out is not None and (step == 0 or last or (run.eval_every and step % run.eval_every == 0)):
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
        if not math.isfinite(metrics.get("critic/values_mean", 0.0)):
            raise UserError(f"step {step}: values are not finite, the training has diverged; lower --lr")
        stuck = stuck + 1 if math.isnan(metrics["critic/grad_norm"]) else 0
        common.stop_if_stuck(stuck, run, batch, step)
        metrics["perf/time_step"] = (time.perf_counter() - start) / (step + 1 - first_step)
        logger.log(step + 1, metrics)
        print0(common.step_line(step + 1, run.steps, metrics))
    worker.export_hf(os.path.join(run.out_dir, "hf"))
    logger.close()
    common.plot_curves(run.out_dir)
    common.write_report(run, tokenizer, held_out, batch)
    print0(f"saved      {run.out_dir}: checkpoints/step_{run.steps}, hf, curves.png, metrics.jsonl, tensorboard")


if __name__ == "__main__":
    common.run(lambda: main(tyro.cli(Run, description=__doc__, console_outputs=RANK == 0)))
