"""A PPO critic for language models on PyTorch FSDP: one value model, one update, any layout.

    python critic_fsdp.py                                 toy task, a tiny model, a laptop CPU: a minute
    torchrun --nproc-per-node 2 critic_fsdp.py            the same on two ranks: the same numbers
    torchrun --nproc-per-node 8 critic_fsdp.py --model Qwen/Qwen2.5-7B --rollouts train.jsonl \\
        --eval-rollouts eval.jsonl --gradient-checkpointing --lr-warmup-steps 20 --out-dir out/7b
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 critic_fsdp.py ...
    python critic_fsdp.py --help                          every flag

It learns V(s) from rollouts with rewards: value pretraining for PPO (VC-PPO, 2503.01491), or a token-level
verifier. A PPO loop drives the same CriticWorker. Copy this file and common.py, and change them. It leaves out
rollout and policy. critic_megatron.py is the same function on Megatron-Core.

Shapes are in the names: T tokens, sequences end to end; B sequences; L longest sequence; D hidden features.
"""

import base64
import contextlib
import dataclasses
import datetime
import functools
import heapq
import importlib.util
import io
import itertools
import json
import math
import os
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import pydantic
import tyro
from pydantic import Field

RANK = int(os.environ.get("RANK", 0))  # torchrun sets these; plain `python` is a world of one
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# ---- Config ------------------------------------------------------------------------------------------

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Auto = Annotated[str, Field(pattern=r"^auto(:\d+(\.\d+)?)?$")]
AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class Config:
    """The critic: its model, its layout over ranks, its batches and its optimizer."""

    # model
    model: str = "tiny-qwen2"  # Hugging Face folder or hub name; tiny-qwen2, tiny-llama ...: random weights
    tokenizer: str | None = None  # Hugging Face folder or hub name (None: the model's own)
    override_config: str = "{}"  # JSON merged into the model's config, e.g. '{"num_hidden_layers": 4}'
    value_head_init: Literal["auto", "checkpoint", "normal", "zero"] = (
        "auto"  # auto: the checkpoint's, else normal
    )
    value_head: Literal["scalar", "hl_gauss"] = "scalar"  # a number, or the mean of a distribution over bins
    value_bins: Annotated[int, Field(ge=2)] = 51  # bins of hl_gauss
    value_range: tuple[float, float] | None = (
        None  # of the bins, LOW HIGH (None: the checkpoint's, else the data's)
    )
    freeze_layers: Count = (
        0  # keep the embeddings and this many of the lowest blocks as they are (0: train all)
    )
    freeze_vision_tower: bool = (
        False  # of a vision-language model, train only the language model and the head
    )
    lora_rank: Count = 0  # train only the value head and low-rank adapters of this rank (0: no adapters)
    lora_alpha: Rate = 16.0  # adapters are scaled by alpha / rank
    trust_remote_code: bool = False  # run model code that comes with the checkpoint
    seed: Count = 0  # of random weights, the value head and every shuffle

    # layout
    strategy: Literal["fsdp2", "fsdp1", "none"] = (
        "fsdp2"  # how weights are sharded (none: a copy on each rank)
    )
    fsdp_size: int = -1  # ranks that share one copy of the weights; others hold replicas (-1: all share one)
    ulysses_size: Positive = 1  # ranks that share one sequence, each with some of the attention heads
    reshard_after_forward: bool = True  # free a layer's gathered weights until its backward: saves memory
    offload_policy: bool = False  # fsdp2 keeps weights, gradients and optimizer state on the host
    timeout_minutes: Annotated[float, Field(gt=0, le=1e6)] = (
        30.0  # a collective that takes longer ends the run
    )

    # precision and kernels
    param_dtype: Literal["auto", "float32", "bfloat16"] = (
        "auto"  # of matrix products (auto: bfloat16; float32 on CPU)
    )
    use_remove_padding: bool = True  # pack sequences end to end; otherwise pad them to the longest
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    activation_offload: bool = False  # keep what gradient checkpointing saves on the host
    defer_grad_sync: bool = False  # reduce gradients once a mini-batch: less traffic, a whole gradient a rank

    # batches
    ppo_epochs: Positive = 1  # passes over the rows of one update
    ppo_mini_batch_size: Positive = 256  # rows of one optimizer step, over all ranks
    shuffle: bool = True  # cut mini-batches in random order (from seed, update, epoch) instead of row order
    ppo_max_token_len_per_gpu: Positive | Auto = (
        16384  # tokens of a rank's micro-batch (auto, auto:GIB: what fits)
    )

    # loss
    cliprange_value: Rate | None = (
        0.5  # PPO clip range around the old value (None: no clipping; hl_gauss: never)
    )
    loss_agg_mode: AggMode = "token-mean"  # how token losses become one loss of the mini-batch
    response_length_limit: Positive | None = None  # the constant that seq-mean-token-sum-norm divides by

    # optimizer
    lr: Rate | None = None  # peak learning rate of AdamW (None: 1e-3 for tiny-*, 1e-5 for a checkpoint)
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01  # decoupled, on every weight
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # decay of AdamW's two moving averages
    grad_clip: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the whole gradient (inf: no clipping)
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # after the warm-up; cosine ends at 0
    lr_warmup_steps: Count = 0  # optimizer steps of linear warm-up; the first is at lr / steps, not at 0


@dataclass(frozen=True)
class Run:
    """Learns a value function from rollouts, evaluates it, saves it as a checkpoint and a Hugging Face folder."""

    critic: Annotated[Config, tyro.conf.arg(name="")] = Config()  # its flags have no prefix
    rollouts: str | None = None  # JSONL to learn from (None: the built-in toy task)
    eval_rollouts: str | None = None  # JSONL to evaluate on (None: no evaluation; the toy has its own)
    skip_bad_rows: bool = False  # leave bad rows out and report them, instead of stopping at the first
    recorded_values: bool = False  # take old values from the file's "values" instead of computing them
    gamma: Fraction = 1.0  # discount of a reward per action
    lam: Fraction = 1.0  # GAE's lambda for the returns (1: Monte Carlo, the rewards alone)
    bootstrap_truncated: bool = False  # the last value stands for the future of a row that was cut off
    steps: Positive = 200  # updates of the critic, each on one train batch
    train_batch_size: Positive | None = None  # rows of one update, over all ranks (None: one mini-batch)
    eval_every: Count = 20  # updates between evaluations (0: only at the start and the end)
    save_every: Count = 0  # updates between checkpoints (0: only at the end)
    keep: Positive | None = None  # how many of the last checkpoints to keep (None: all)
    async_save: bool = False  # write checkpoints in the background, from a copy of the state on the host
    resume: str | None = None  # checkpoint folder to continue from; auto: the last complete one in out_dir
    plan: Positive | None = None  # print the memory that each of N ranks would need, then exit
    profile_steps: Annotated[str, Field(pattern=r"^\d+:\d+$")] | None = (
        None  # A:B, steps to record with torch.profiler
    )
    out_dir: str = "out/critic_fsdp"  # for checkpoints, the Hugging Face folder, metrics and the report

    def evaluates(self, step):
        """Whether the run evaluates after this many updates."""
        return step in (0, self.steps) or bool(self.eval_every and step % self.eval_every == 0)


def mistake_in(flags, world_size=WORLD_SIZE):
    """What is wrong with a Config or a Run, as one line that names the flag and the fix, or None."""
    try:
        pydantic.TypeAdapter(type(flags)).validate_python(dataclasses.asdict(flags))
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        name = next(part for part in fault["loc"] if part != "critic").replace("_", "-")
        return f"--{name} {fault['input']}: {fault['msg'].replace('Input should be', 'must be')}"
    if isinstance(flags, Run):
        rules = {
            "--eval-rollouts: needs --rollouts; the toy has its own": flags.rollouts
            or not flags.eval_rollouts,
            "--recorded-values: needs --rollouts": flags.rollouts or not flags.recorded_values,
        }
        broken = [words for words, holds in rules.items() if not holds]
        return broken[0] if broken else mistake_in(flags.critic, flags.plan or world_size)
    c, sp, shard = flags, flags.ulysses_size, flags.fsdp_size
    norm, low_high = c.loss_agg_mode == "seq-mean-token-sum-norm", c.value_range or (0.0, 1.0)
    rules = {  # between flags
        f"--value-range {c.value_range}: LOW must be below HIGH": 0 < low_high[1] - low_high[0] < math.inf,
        "--value-range: a scalar has none; add --value-head hl_gauss": c.value_head != "scalar" or not c.value_range,
        "--response-length-limit: goes with --loss-agg-mode seq-mean-token-sum-norm, which needs it":
            norm == (c.response_length_limit is not None),
        f"--ulysses-size {sp}: must divide the {world_size} ranks": world_size % sp == 0,
        f"--ulysses-size {sp}: needs packed rows; drop --no-use-remove-padding": sp == 1 or c.use_remove_padding,
        f"--fsdp-size {shard}: must divide the {world_size} ranks, or be -1 for all of them":
            shard == -1 or (shard > 0 and world_size % shard == 0),
        f"--fsdp-size {shard}: --strategy none shards nothing": shard == -1 or c.strategy != "none",
        "--fsdp-size 1: fsdp1 cannot keep whole replicas; use --strategy fsdp2 or none":
            shard != 1 or c.strategy != "fsdp1" or world_size == 1,  # it would not even average over the replicas
        "--offload-policy: needs --strategy fsdp2": not c.offload_policy or c.strategy == "fsdp2",
        "--activation-offload: needs --gradient-checkpointing": not c.activation_offload or c.gradient_checkpointing,
        "--freeze-layers: --lora-rank freezes all layers; drop one": not (c.lora_rank and c.freeze_layers),
        "--lora-rank: needs peft; pip install peft": not c.lora_rank or importlib.util.find_spec("peft"),
    }  # fmt: skip
    return next((words for words, holds in rules.items() if not holds), None)


if __name__ == "__main__":  # here, because the imports below take ten seconds
    RUN = tyro.cli(Run, description=__doc__, console_outputs=RANK == 0)
    if mistake := mistake_in(RUN):
        print(f"error: {mistake}" if RANK == 0 else "", file=sys.stderr)
        sys.exit(2)

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
import transformers
from PIL import Image, ImageOps
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as collectives
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
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
from common import Dispatch, UserError, print0, register

transformers.logging.set_verbosity_error()  # the run says in one line what matters of a load
transformers.logging.disable_progress_bar()
warnings.filterwarnings(
    "ignore", message="FSDP2-wrapped module .* returned a view"
)  # nothing here writes into one
warnings.filterwarnings("ignore", message=".*`NO_SHARD`")  # FSDP1 on a single rank
warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft sees by itself what GPT-2 needs

# ---- Value model: a decoder and a value head in float32 ----------------------------------------------


class ValueModel(nn.Module):
    """Backbone without its vocabulary head, and v = w . h + b on the hidden state of every token.

    With --value-head hl_gauss the head gives the N logits of a distribution, and common.hl_gauss_values its mean.
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


def read_weights(config, model_config, value_range):
    """A ValueModel on the host with its weights, and a sentence on where they come from. Runs on rank 0 alone."""
    torch.manual_seed(config.seed)
    if config.model in common.TINY:
        story = f"random weights (seed {config.seed})"
        backbone = AutoModel.from_config(model_config, dtype=torch.float32)
    else:
        options = {"trust_remote_code": config.trust_remote_code}
        backbone = common.load_pretrained(AutoModel, config.model, model_config, **options)
        story = f"{type(backbone).__name__} from {config.model}"
    model = ValueModel(backbone, config)
    head = common.init_value_head(model.score, config, value_range)
    if config.lora_rank:
        torch.manual_seed(config.seed)
        add_lora(backbone, config)
    return model, f"{story}; {head}"


def build_skeleton(config, model_config, dtype=torch.float32):
    """A ValueModel on meta: no weights yet, but all that is settled without them. UserError: it cannot be built."""
    attention = "ulysses" if config.ulysses_size > 1 else "packed" if config.use_remove_padding else None
    if not attention and getattr(model_config.get_text_config(), "attn_logit_softcapping", None):
        attention = "eager"  # sdpa would drop the soft cap
    padded = "; add --no-use-remove-padding" if config.use_remove_padding else ""
    options = {
        "attn_implementation": of_decoder(attention, model_config),
        "trust_remote_code": config.trust_remote_code,
    }
    with common.blame(f"--model {config.model}: cannot be built{padded}"), torch.device("meta"):
        backbone = AutoModel.from_config(model_config, dtype=dtype, **options)
        model = ValueModel(backbone, config)
        if config.lora_rank:
            add_lora(backbone, config)
    if padded and not backbone._can_set_attn_implementation():
        raise UserError(f"--model {config.model}: {type(backbone).__name__} brings its own attention{padded}")
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    frozen = [m for m in backbone.get_decoder().modules() if isinstance(m, nn.Embedding)]
    frozen += transformer_blocks(backbone.get_decoder())[: config.freeze_layers]
    for module in (frozen if config.freeze_layers else []) + (
        [backbone.visual] if config.freeze_vision_tower else []
    ):
        module.requires_grad_(False)
    if config.gradient_checkpointing:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def transformer_blocks(model):
    """The layers to shard one by one: classes that the model's authors say must not be split."""
    names = {n for m in model.modules() for n in (getattr(m, "_no_split_modules", None) or ())}
    return [m for m in model.modules() if type(m).__name__ in names]


def count_parameters(module):
    """(all, those that train)."""
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def add_lora(backbone, config):
    """Freezes the backbone and gives its linear layers adapters: W x + alpha / r B A x (LoRA, 2106.09685).

    A is random and B zero, so values start unchanged. Experts that a mixture keeps in one tensor get no adapter.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear = [n for n, m in backbone.named_modules() if isinstance(m, nn.Linear | Conv1D)]
    linear = [n for n in linear if not (config.freeze_vision_tower and n.startswith("visual."))]
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=linear)
    inject_adapter_in_model(lora, backbone)


def merge_lora(state, scale, transposed):
    """Full state dict with adapters -> that of the same function without them, W + scale B A.

    transposed: names of the layers that keep W as (in, out), as GPT-2's do.
    """
    merged = {}
    for name, x in state.items():
        layer = name.removesuffix(".base_layer.weight")
        if layer != name:
            delta = scale * state[f"{layer}.lora_B.default.weight"] @ state[f"{layer}.lora_A.default.weight"]
            x = x + (delta.T if layer in transposed else delta)
        if ".lora_" not in name:
            merged[name.replace(".base_layer.", ".")] = x
    return merged


def reads_images(model_config):
    """Whether this script reads images for this model; all others read text only."""
    return model_config.model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def of_decoder(attention, model_config):
    """The attention of the decoder, as transformers takes it: a vision tower keeps its own."""
    return {"": attention, "text_config": attention} if reads_images(model_config) else attention


def load_image_processor(config, model_config):
    """Pillow's processor, which all these models share (the same pixels on every machine), or None without one."""
    if not reads_images(model_config):
        return None
    if config.model in common.TINY:
        return Qwen2VLImageProcessorPil(patch_size=model_config.vision_config.patch_size)
    with contextlib.suppress(OSError):  # no preprocessor_config.json
        return Qwen2VLImageProcessorPil.from_pretrained(config.model)


def place_images(image_processor, image_token_id, rollout, folder):
    """Makes the image names of a row absolute and repeats each placeholder of a text prompt for every token of its
    image, after reading the images once. UserError: placeholders and images do not fit."""
    names = [
        os.path.abspath(os.path.join(folder, x)) if x[:5] != "data:" else x for x in rollout.images or ()
    ]
    rollout.images = names
    images = read_images({"images": names}, image_processor)
    sizes = tokens_of_images(images, image_processor.merge_size if names else 1)
    if (rollout.prompt or rollout.messages) and rollout.prompt_ids.count(image_token_id) == len(sizes):
        count = iter(sizes)
        rollout.prompt_ids = [
            i for i in rollout.prompt_ids for _ in range(next(count) if i == image_token_id else 1)
        ]
    check_placeholders(rollout.prompt_ids + rollout.response_ids, image_token_id, sizes)


def tokens_of_images(images, merge_size):
    """Tokens of each image of a row, a list: merge_size x merge_size patches are one token."""
    return (images["image_grid_thw"].prod(1) // merge_size**2).tolist() if images else []


def check_placeholders(ids, image_token_id, sizes):
    """UserError unless the runs of placeholders among the ids are as long as the images, in their order."""
    runs = [len(list(run)) for is_image, run in itertools.groupby(ids, image_token_id.__eq__) if is_image]
    if runs != sizes:
        raise UserError(f"placeholders come in runs of {runs or 0} tokens, its images have {sizes or 0}")


def read_images(row, image_processor):
    """One row's multi_modal_inputs -> {"pixel_values": (patches, features), "image_grid_thw": (images, 3)}.

    A JSONL row has {"images": [absolute file name or data URL]}, which is read just before a forward, because the
    pixels of all rows would fill the host. UserError names an image that cannot be read.
    """
    if not row.get("images"):
        return {key: x for key, x in row.items() if key != "images"}
    if image_processor is None:
        raise UserError("it has images, and the model's folder has no preprocessor_config.json")
    pictures = []
    for image in row["images"]:
        with common.blame(f"image {image:.80}"):
            data = io.BytesIO(base64.b64decode(image.partition(",")[2])) if image[:5] == "data:" else image
            with Image.open(data) as file:
                pictures.append(ImageOps.exif_transpose(file).convert("RGB"))
    with common.blame(f"images {', '.join(image[:80] for image in row['images'])}"):
        return dict(image_processor(images=pictures, return_tensors="pt"))


def with_images(backbone, ids_T, lengths, images):
    """(ids, lengths, inputs of the forward) of rows with these images, a list of B dicts.

    Ranks that share the weights of the vision tower must run it together, so rows without any image get a black
    one, whose one token ends the last row: no other token sees it, and its gradient is zero. It is the only token
    ever above the cap of a micro-batch.
    """
    image_token_id, tower = backbone.config.image_token_id, backbone.config.vision_config
    if not any(images):
        merge = tower.spatial_merge_size
        features = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        black = {"pixel_values": torch.zeros(merge**2, features, device=ids_T.device)}
        black["image_grid_thw"] = torch.tensor([[1, merge, merge]], device=ids_T.device)
        ids_T, lengths = F.pad(ids_T, (0, 1), value=image_token_id), [*lengths[:-1], lengths[-1] + 1]
        images = [*images[:-1], black]
    positions = []
    for ids, row in zip(ids_T.split(lengths), images, strict=True):
        is_image = (ids == image_token_id).int()[None]
        thw, _ = backbone.get_rope_index(ids[None], is_image, image_grid_thw=row.get("image_grid_thw"))
        positions.append(torch.cat([torch.arange(len(ids), device=ids.device)[None], thw[:, 0]]))
    inputs = {
        key: torch.cat([row[key] for row in images if row]) for key in ("pixel_values", "image_grid_thw")
    }
    return ids_T, lengths, {"position_ids": torch.cat(positions, 1), **inputs}


# ---- Parallelism: which ranks share what, and the model spread over them -----------------------------


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
    sp, shard = config.ulysses_size, WORLD_SIZE if config.fsdp_size == -1 else config.fsdp_size
    mesh = init_device_mesh(
        device.type, (WORLD_SIZE // sp, sp), mesh_dim_names=("dp", "sp")
    )  # rank = dp * sp_size + sp
    shape, names = (WORLD_SIZE // shard, shard), ("replicate", "shard")
    if shard == WORLD_SIZE:
        shape, names = shape[1:], names[1:]
    fsdp_mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for group in (
        *mesh.get_all_groups(),
        *fsdp_mesh.get_all_groups(),
    ):  # by themselves they have torch's time-out
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(minutes=config.timeout_minutes), group)
    return Layout(
        device=device,
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=WORLD_SIZE // sp,
        dp_group=mesh.get_group("dp"),
        sp_size=sp,
        sp_group=mesh.get_group("sp") if sp > 1 else None,
        fsdp_mesh=fsdp_mesh,
    )


def compute_dtype(config, device):
    """The dtype of matrix products; master weights, gradients, optimizer and value head are float32."""
    if config.param_dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, config.param_dtype)


def build_value_model(config, model_config, layout, value_range):
    """(the sharded ValueModel, its FlopsModel, words on its size and on where its weights come from).

    Every rank builds on meta; rank 0 alone reads the weights and sends each rank its shards.
    """
    model = build_skeleton(config, model_config)
    source, story = read_weights(config, model_config, value_range) if RANK == 0 else (None, None)
    flops, (count, trained) = common.flops_model(model, model_config), count_parameters(model)
    size = f"{count:,} parameters" + (f", {trained:,} of them train" if trained < count else "")
    model = {"fsdp2": shard_fsdp2, "fsdp1": shard_fsdp1, "none": replicate}[config.strategy](
        model, config, layout
    )
    full = source.state_dict() if RANK == 0 else {}
    set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    buffers = dict(source.named_buffers()) if RANK == 0 else {}
    for name, buffer in sorted(model.named_buffers()):  # rotary tables are in no state dict
        if RANK == 0:
            buffer.copy_(buffers[name.replace("_fsdp_wrapped_module.", "")])
        dist.broadcast(buffer, src=0)
    return model, flops, f"{size}: {story}"


def shard_fsdp2(model, config, layout):
    options = {"mesh": layout.fsdp_mesh, "reshard_after_forward": config.reshard_after_forward}
    if config.offload_policy:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=layout.device.type == "cuda")
    dtype = compute_dtype(config, layout.device)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in transformer_blocks(model):
        fully_shard(block, mp_policy=policy, **options)
    fully_shard(model.score, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32), **options)
    fully_shard(model, mp_policy=policy, **options)
    model.set_reduce_scatter_unused_params(
        True
    )  # an expert may have seen no token here, but some on another rank
    model.to_empty(device="cpu" if config.offload_policy else layout.device)
    for module in model.modules() if config.offload_policy else ():  # buffers stay on the device
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=layout.device)
    return model


def shard_fsdp1(model, config, layout):
    dtype, blocks = compute_dtype(config, layout.device), set(transformer_blocks(model))
    policy = functools.partial(MixedPrecision, reduce_dtype=torch.float32)
    # a unit of FSDP1 has a gradient or none: what is frozen gets units apart from what trains
    apart = set()
    if config.lora_rank:
        apart = {m for name, m in model.named_modules() if ".lora_" in name and isinstance(m, nn.Linear)}
    elif config.freeze_layers:
        apart = {m for m in model.modules() if isinstance(m, nn.Embedding)}

    def unit(module):
        if module is model.score:
            return {"mixed_precision": policy(param_dtype=torch.float32)}
        if module in apart:
            return {"mixed_precision": policy(param_dtype=dtype, cast_forward_inputs=True)}
        return module in blocks

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
        auto_wrap_policy=CustomPolicy(unit),
        mixed_precision=policy(param_dtype=dtype, buffer_dtype=torch.float32),
        use_orig_params=True,
        param_init_fn=lambda m: m.to_empty(device=layout.device, recurse=False),
    )


def replicate(model, config, layout):
    return model.to_empty(device=layout.device)


def full_tensor(x):
    """The whole of a sharded tensor (a collective), or the tensor itself."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def ulysses_attention(module, query, key, value, attention_mask, s_aux=None, **options):
    """common.packed_attention of ranks that share the row (DeepSpeed-Ulysses, 2309.14509).

    Each rank comes with its slice of the row and all heads, computes the whole row for its slice of the heads, and
    leaves as it came: q (1, H, T/p, D) -> (1, T/p, H, D). No model code knows of it.
    """
    group = common.Pack.group
    p = dist.get_world_size(group)
    repeat = p // math.gcd(key.shape[1], p)  # fewer key heads than ranks: several ranks hold each
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    query, key, value = (trade(x.to(value.dtype), group, 1, 2) for x in (query, key, value))
    s_aux = s_aux.chunk(p)[dist.get_rank(group)] if s_aux is not None else None
    out_1THD, _ = common.packed_attention(module, query, key, value, attention_mask, s_aux=s_aux, **options)
    return trade(out_1THD, group, 1, 2), None


transformers.AttentionInterface.register("ulysses", ulysses_attention)


def trade(x, group, scatter, gather):
    """Splits x along one axis over the ranks and joins their pieces along another; autograd goes the way back."""
    p = dist.get_world_size(group)
    pieces = torch.stack(x.chunk(p, scatter)).flatten(0, 1).contiguous()
    out = collectives.wait_tensor(collectives.all_to_all_single_autograd(pieces, None, None, group))
    return torch.cat(out.unflatten(0, (p, -1)).unbind(), gather)


def gather_slices(x, group):
    """(T/p, ...) slices of the ranks of a group -> (T, ...) on all of them; backward adds the ranks' gradients up."""
    return collectives.wait_tensor(collectives.all_gather_tensor_autograd(x.contiguous(), 0, group))


def slice_row(decoder, args, kwargs):
    """A forward pre-hook: each rank of a sequence-parallel group continues with its slice of the packed row.

    It runs where the decoder begins, after a vision tower, which all ranks of the group run on all images.
    """
    group = common.Pack.group
    if group is None:
        return None
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = {key: kwargs.get(key) for key in ("input_ids", "inputs_embeds", "visual_pos_masks")}
    sliced = {key: x.chunk(size, 1)[rank] for key, x in whole.items() if x is not None}
    sliced["position_ids"] = kwargs["position_ids"].chunk(size, -1)[rank]
    if "visual_pos_masks" in sliced:  # Qwen3-VL's deepstack: a row of features for each token of an image
        counts = [int(mask.sum()) for mask in kwargs["visual_pos_masks"].chunk(size, 1)]
        sliced["deepstack_visual_embeds"] = [x.split(counts)[rank] for x in kwargs["deepstack_visual_embeds"]]
    return args, {**kwargs, **sliced}


# ---- Batching: rows over ranks, a rank's rows over micro-batches -------------------------------------


def spread(costs, k):
    """k lists of indices with nearly equal sums: longest first, each to the emptiest list (LPT, Graham 1969)."""
    heap, parts = [(0, j) for j in range(k)], [[] for _ in range(k)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, j = heap[0]
        heapq.heapreplace(heap, (load + costs[i], j))
        parts[j].append(i)
    return parts


def micro_batches(lengths, costs, dp_size, max_tokens, padded=False):
    """For each data-parallel rank a list of micro-batches (lists of rows), none above max_tokens.

    Every rank computes the same table from all lengths, so all run equally many forwards without communicating,
    as ranks that share weights must. A rank with less to do gets smaller or empty micro-batches.
    """
    ranks = spread(costs, dp_size)
    count = max(1, *[math.ceil(sum(lengths[i] for i in rows) / max_tokens) for rows in ranks])
    while True:
        table, most = [], 0
        for rows in ranks:
            parts = spread([lengths[i] for i in rows], count)
            table.append([[rows[j] for j in part] for part in parts])
            sizes = [[lengths[i] for i in part] for part in table[-1]]
            most = max(most, *[max(n, default=0) * len(n) if padded else sum(n) for n in sizes])
        if most <= max_tokens:
            return table
        count += 1 + count // 20


class MicroBatch(NamedTuple):
    """What this rank computes of a micro-batch. Columns are of its T tokens, and of the action that each of them is."""

    input_ids: torch.Tensor  # (T,)
    lengths: list  # of the sequences
    images: list  # B dicts, see read_images; empty for a model that reads text only
    mask: torch.Tensor  # bool: there is an action
    index: torch.Tensor | None = (
        None  # int64: its place in the flat columns of the whole batch; without a loss
    )
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    weights: torch.Tensor | None = None  # of the token losses


def check_model_flags(config, model_config):
    """UserError for flags that this model does not go with."""
    text = model_config.get_text_config()
    heads, layers = (
        getattr(text, "num_attention_heads", 1),
        getattr(text, "num_hidden_layers", config.freeze_layers),
    )
    if heads % config.ulysses_size:
        raise UserError(
            f"--ulysses-size {config.ulysses_size}: must divide the model's {heads} attention heads"
        )
    if config.freeze_layers > layers:
        raise UserError(f"--freeze-layers {config.freeze_layers}: the model has {layers} layers")
    if isinstance(config.ppo_max_token_len_per_gpu, str) and reads_images(model_config):
        raise UserError("--ppo-max-token-len-per-gpu auto: counts no images; give a number")
    if config.freeze_vision_tower and not reads_images(model_config):
        raise UserError(f"--freeze-vision-tower: {config.model} ({model_config.model_type}) reads text only")


def check_budget(config, longest, row):
    """UserError unless the longest row fits into a micro-batch. row: words that name it."""
    least, given = math.ceil(longest / config.ulysses_size), config.ppo_max_token_len_per_gpu
    if isinstance(given, int) and given < least:
        raise UserError(
            f"--ppo-max-token-len-per-gpu {given}: {row} has {longest} tokens; give at least {least}"
        )
    return least


# ---- The critic: forward, loss, step -----------------------------------------------------------------


class DataParallelPPOCritic:
    """Values and updates of a value model. compute_values and update_critic take the *global* batch, the same on
    every rank, and work on this rank's share of it."""

    def __init__(
        self, config, model, flops, layout, value_range=None, image_processor=None, total_steps=None
    ):
        self.config, self.flops, self.layout, self.value_range = config, flops, layout, value_range
        self.model, self.image_processor, backbone = model, image_processor, model.model
        self.reads_images = reads_images(backbone.config)
        decoder = backbone.language_model if self.reads_images else backbone
        decoder.register_forward_pre_hook(slice_row, with_kwargs=True)
        self.peak_lr = config.lr or (1e-3 if config.model in common.TINY else 1e-5)
        self.optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=self.peak_lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,  # one kernel: a fifth of the time on CPU
        )
        self.total_steps = total_steps  # optimizer steps of the whole run, for cosine
        self.max_tokens = None  # of a micro-batch of the ranks that share it, see CriticWorker.set_budget
        self.optimizer_steps = 0  # taken, skipped ones not counted: the position of the schedule
        self.updates = 0  # calls of update_critic: with seed and epoch the key of every shuffle

    def my_micro_batches(self, batch):
        """This rank's rows of a global batch as lists of row indices, one list a micro-batch."""
        costs = [self.flops.forward_flops(n) for n in batch.lengths]
        padded = not self.config.use_remove_padding
        table = micro_batches(batch.lengths, costs, self.layout.dp_size, self.max_tokens, padded)
        return table[self.layout.dp_rank]

    def micro_batch(self, batch, rows, counts=None):
        """These rows as a MicroBatch on the device; no rows are one masked token, to keep in step with other ranks.

        counts: common.loss_counts of the mini-batch, if there is a loss.
        """
        config, micro = self.config, batch.select(rows) if rows else common.masked_token()
        fields = {"input_ids": micro.input_ids, "mask": micro.response_mask}
        if counts is None:
            fields["index"] = batch.token_index(rows) if rows else torch.zeros(1, dtype=torch.int64)
        else:
            columns = (micro.response_mask, micro.cu_seqlens, config.loss_agg_mode, counts)
            fields["weights"] = common.loss_weights(*columns, config.response_length_limit)
            fields |= {"values": micro.values, "returns": micro.returns}
        to_device = lambda x: x.to(self.layout.device, non_blocking=True)
        images = []
        for row in (micro.multi_modal_inputs or [{}] * len(micro)) if self.reads_images else ():
            images.append({key: to_device(x) for key, x in read_images(row, self.image_processor).items()})
        fields = {name: to_device(x_T) for name, x_T in fields.items()}
        return MicroBatch(lengths=micro.lengths, images=images, **fields)

    def forward(self, micro):
        """What the head says of each action of a micro-batch: (T,) float32 values, or (T, N) logits; zero elsewhere.

        The value of an action is read *before* it, so what the head says moves one to the right:

            hidden           h0   h1   h2   h3   h4   h5
            v_T              v0   v1   v2   v3   v4   v5
            response_mask    0    0    1    1    0    1
            result           0    0    v1   v2   0    v4

        The first token of a sequence is never an action, so nothing crosses from one sequence into the next.
        """
        ids_T, lengths, inputs = micro.input_ids, micro.lengths, {}
        if self.reads_images:
            ids_T, lengths, inputs = with_images(self.model.model, ids_T, lengths, micro.images)
        forward = self.forward_packed if self.config.use_remove_padding else self.forward_padded
        v_T = forward(ids_T, lengths, **inputs)[: len(micro.mask)].roll(1, 0)
        return torch.where(micro.mask, v_T.movedim(0, -1), 0.0).movedim(-1, 0)

    def forward_packed(self, ids_T, lengths, position_ids=None, **images):
        """(T,) ids, sequences end to end -> (T,) values by position; no padding is computed.

        position_ids: (T,), or (4, T) with time, height and width (None: from 0 in each sequence).
        """
        layout = self.layout
        pad = -len(ids_T) % layout.sp_size  # up to a multiple, as a sequence of its own
        if position_ids is None:
            position_ids = torch.cat([torch.arange(n) for n in lengths]).to(ids_T.device, non_blocking=True)
        common.set_pack(lengths + [pad] * (pad > 0), ids_T.device, layout.sp_group)
        ids_T, position_ids = F.pad(ids_T, (0, pad)), F.pad(position_ids, (0, pad))
        # where the decoder begins, slice_row (a hook of __init__) leaves this rank its part of the row
        v_T = self.predict(input_ids=ids_T[None], position_ids=position_ids.unsqueeze(-2), **images)[0]
        if layout.sp_group is not None:
            v_T = gather_slices(v_T, layout.sp_group)
        return v_T[: len(v_T) - pad]

    def forward_padded(self, ids_T, lengths, position_ids=None, **images):
        """(T,) ids -> (T,) values by position, through a right-padded (B, L) batch."""
        common.Pack.group = None  # no rank takes a slice
        pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
        ids_BL = pad(ids_T.split(lengths))
        mask_BL = torch.arange(ids_BL.shape[1]) < torch.tensor(lengths)[:, None]
        mask_BL = mask_BL.to(ids_T.device, non_blocking=True)
        if position_ids is None:
            position_ids = torch.arange(ids_BL.shape[1], device=ids_T.device).expand_as(ids_BL)
        else:  # (4, T) -> (4, B, L)
            position_ids = pad([x.T for x in position_ids.split(lengths, 1)]).movedim(-1, 0)
        v_BL = self.predict(
            input_ids=ids_BL, attention_mask=mask_BL.long(), position_ids=position_ids, **images
        )
        return v_BL[mask_BL]

    def predict(self, **inputs):
        """The model's forward in the compute dtype: FSDP casts by itself, plain weights need autocast."""
        dtype = compute_dtype(self.config, self.layout.device)
        cast = self.config.strategy == "none" and dtype != torch.float32
        with torch.autocast(self.layout.device.type, dtype, enabled=cast):
            return self.model(**inputs)

    def values(self, outputs, mask):
        """Values of the actions from what the head says of them; zero elsewhere."""
        if self.config.value_head == "hl_gauss":
            outputs = common.hl_gauss_values(outputs, *self.value_range)
        return torch.where(mask, outputs, 0.0)

    @torch.no_grad()
    def compute_values(self, batch):
        """Values of the actions of the global batch: (T,) float32 on the host, zero elsewhere, equal on all ranks."""
        if not len(batch):
            return torch.zeros(0)
        self.model.eval()
        values_T = torch.zeros(len(batch.input_ids), device=self.layout.device)
        for rows in common.progress(self.my_micro_batches(batch), "values"):
            micro = self.micro_batch(batch, rows)
            values_T.index_add_(0, micro.index, self.values(self.forward(micro), micro.mask))
        self.free_gathered()
        dist.all_reduce(
            values_T, group=self.layout.dp_group
        )  # each token was computed by one group; others add 0
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
        config, lr, mini_batches, norms = self.config, math.nan, 0, []
        self.model.train()
        totals = torch.zeros(
            4, dtype=torch.float64, device=self.layout.device
        )  # loss, clipped, vpreds, actions
        for epoch in range(config.ppo_epochs):
            order = range(len(batch))
            if config.shuffle:
                order = common.permutation(len(batch), config.seed, self.updates, epoch)
            for mini in batch.select(order).split(config.ppo_mini_batch_size):
                mini_batches += 1
                counts = common.loss_counts(mini.response_mask, mini.cu_seqlens)
                finite = all(x_T[mini.response_mask].isfinite().all() for x_T in (mini.values, mini.returns))
                if counts[0] == 0 or not finite:
                    continue  # nothing to learn; without an action AdamW would move the weights all the same
                sums = torch.zeros_like(totals)
                micros = self.my_micro_batches(mini)
                for i, rows in enumerate(micros):
                    sums += self.forward_backward(
                        self.micro_batch(mini, rows, counts), last=i == len(micros) - 1
                    )
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

    def forward_backward(self, micro, last=True):
        """Adds the gradient of a micro-batch -> its sums (loss, clipped, vpreds, actions). last: of its mini-batch.

        The loss is a sum over all ranks, but FSDP (and optimizer_step without it) averages gradients over them: times
        dp x sp. Ranks that share a row all compute its loss, and gather_slices adds their gradients up: over sp.
        """
        sync = last or not self.config.defer_grad_sync
        if self.config.strategy == "fsdp2":
            self.model.set_requires_gradient_sync(sync)
        with contextlib.ExitStack() as stack:
            if self.config.strategy == "fsdp1" and not sync:
                stack.enter_context(self.model.no_sync())
            if self.config.activation_offload:
                pinned = self.layout.device.type == "cuda"
                stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=pinned))
            loss, sums = self.loss(self.forward(micro), micro)
            (loss * self.layout.dp_size).backward()
        if (
            self.config.strategy == "fsdp1" and WORLD_SIZE == 1
        ):  # there FSDP1 forgets units without a gradient
            self.free_gathered()
        return sums

    def loss(self, outputs, micro):
        """These actions' part of the mini-batch loss, and of its sums (loss, clipped, vpreds, actions)."""
        vpreds = self.values(outputs, micro.mask)
        if self.config.value_head == "hl_gauss":
            columns = (micro.returns, micro.mask, micro.weights)
            loss = common.hl_gauss_loss(outputs, *columns, *self.value_range)
            clipped = torch.zeros_like(loss)
        else:
            columns = (micro.values, micro.returns, micro.mask, micro.weights)
            loss, clipped = common.value_loss(vpreds, *columns, self.config.cliprange_value)
        return loss, torch.stack([loss, clipped, vpreds.sum(), micro.mask.sum()]).detach()

    def learning_rate(self):
        """The rate of the next step: linear warm-up, then constant or cosine. Skipped steps do not move it."""
        warmup = self.config.lr_warmup_steps
        if self.optimizer_steps < warmup:
            return self.peak_lr * (self.optimizer_steps + 1) / warmup
        if self.config.lr_scheduler_type == "constant":
            return self.peak_lr
        done = min((self.optimizer_steps - warmup) / max(self.total_steps - warmup, 1), 1.0)
        return self.peak_lr * 0.5 * (1 + math.cos(math.pi * done))

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
            norm = nn.utils.clip_grad_norm_(parameters, self.config.grad_clip)
        norm = float(full_tensor(norm))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step()
            self.optimizer_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm


# ---- The worker: life cycle, memory, metrics ---------------------------------------------------------


class CriticWorker:
    """What a PPO loop holds: every rank makes one and calls its methods in the same order."""

    def __init__(self, config):
        if mistake := mistake_in(config):
            raise UserError(mistake)
        self.config = config
        self.tokenizer, self.model_config = common.load_config(config, config.trust_remote_code)
        check_model_flags(config, self.model_config)
        self.image_processor = load_image_processor(config, self.model_config)
        self.vocab_size, _ = common.limits(self.model_config)
        self.value_range = config.value_range or getattr(self.model_config, "value_range", None)
        if config.value_head == "scalar":
            self.value_range = None
        elif not self.value_range:
            raise UserError(
                "--value-range: hl_gauss needs it, LOW and HIGH of the returns with a small margin"
            )
        self.device = common.setup_distributed(config.timeout_minutes)
        if config.ppo_max_token_len_per_gpu == "auto" and self.device.type == "cpu":
            raise UserError("--ppo-max-token-len-per-gpu auto: on a CPU give the memory of a rank, auto:GIB")
        half = compute_dtype(config, self.device) != torch.float32
        if config.defer_grad_sync and config.strategy == "fsdp1" and half:
            raise UserError("--defer-grad-sync: fsdp1 would add gradients up in bfloat16; use fsdp2")
        self.layout = make_layout(config, self.device)
        self.offloaded = False

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps=None):
        """Builds the model and its optimizer, and refuses a model that cannot work as a critic here.

        total_steps: optimizer steps of the whole run, which --lr-scheduler-type cosine needs.
        """
        config, layout = self.config, self.layout
        if config.lr_scheduler_type == "cosine" and not total_steps:
            raise UserError("--lr-scheduler-type cosine: init_model needs total_steps")
        model, flops, story = build_value_model(config, self.model_config, layout, self.value_range)
        options = (self.value_range, self.image_processor, total_steps)
        self.critic = DataParallelPPOCritic(config, model, flops, layout, *options)
        torch.manual_seed(config.seed)  # random weights were drawn
        print0(f"model      {config.model} ({self.model_config.model_type}), {story}")
        shard = layout.fsdp_mesh.shape[-1]
        weights = f"{config.strategy}, {shard} shards x {WORLD_SIZE // shard} replicas"
        weights = "a copy on each rank" if config.strategy == "none" else weights
        print0(
            f"layout     ranks {WORLD_SIZE} = dp {layout.dp_size} x sp {layout.sp_size}; weights: {weights}"
        )
        dtype = str(compute_dtype(config, self.device)).removeprefix("torch.")
        print0(
            f"precision  {dtype} products on {self.device.type}; master weights, gradients, value head float32"
        )
        self.check_model()

    @torch.no_grad()
    def check_model(self):
        """UserError unless two short rows together get the hidden states that a row, or its beginning, gets alone
        with the model's own attention. What only longer rows would show is looked up."""
        config, critic, backbone, seen = self.config, self.critic, self.critic.model.model, []
        packed, n = config.use_remove_padding, 8 * self.layout.sp_size
        name = f"--model {config.model}: {type(backbone).__name__}"
        padded = "; add --no-use-remove-padding" if packed else ""
        ids_T = torch.tensor(
            [(5 * i * i + 7 * i + 1) % self.vocab_size for i in range(2 * n)], device=self.device
        )
        hook = critic.model.score.register_forward_pre_hook(
            lambda module, args: seen.append(args[0].flatten(0, 1))
        )
        critic.model.eval()
        with hook, common.blame(f"{name} does not run{padded}"):
            (critic.forward_packed if packed else critic.forward_padded)(ids_T, [n, n])
            together_TD = seen.pop()
            if packed and self.layout.sp_group is not None:
                together_TD = gather_slices(together_TD, self.layout.sp_group)
            attention, kernel = backbone.config._attn_implementation, common.Pack.kernel
            backbone.set_attn_implementation(of_decoder("eager", self.model_config))
            for some in (ids_T[: n // 2], ids_T[n:]):
                critic.forward_padded(some, [len(some)])
            backbone.set_attn_implementation(of_decoder(attention, self.model_config))
        critic.free_gathered()
        alone_TD, together_TD = (
            torch.cat(seen).float(),
            torch.cat([together_TD[: n // 2], together_TD[n:]]).float(),
        )
        off = float(((together_TD - alone_TD).norm(dim=-1) / alone_TD.norm(dim=-1)).mean())
        if not math.isfinite(off):
            raise UserError(f"{name} gives hidden states that are not finite: are its weights?")
        if off > (1e-4 if compute_dtype(config, self.device) == torch.float32 else 1e-1):
            raise UserError(
                f"{name} lets tokens see later ones or other rows (they differ by {off:.0e}){padded}"
            )
        text = self.model_config.get_text_config()
        odd = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        (_, window, sliding) = critic.flops.per_pair[1]
        if packed and (odd or (sliding and window not in common.Pack.windows)):
            what = ", ".join(sorted(odd)) or f"the sliding window of {window}, which it does not pass on"
            raise UserError(f"{name} has {what}, which packed rows might lose{padded}")
        rows = f"packed rows, kernel {kernel}" if packed else f"padded rows, kernel {attention}"
        print0(f"attention  {rows}; off rows alone by {off:.0e}")

    @register(Dispatch.ONE_TO_ALL)
    def set_budget(self, longest, row, halvings=0):
        """Sets how many tokens a micro-batch may take; no update depends on it. UserError: the longest row is longer.

        longest: tokens of the longest row to come; row: words that name it. halvings: see common.Checkpoints.
        """
        config, critic, share = self.config, self.critic, self.layout.sp_size
        budget, least = config.ppo_max_token_len_per_gpu, check_budget(config, longest, row)
        if isinstance(budget, str):  # auto, or auto:GIB
            self.check_here()

            def probe(rows):
                batch = common.probe_rows(rows, longest)
                counts = common.loss_counts(batch.response_mask, batch.cu_seqlens)
                critic.forward_backward(critic.micro_batch(batch, range(rows), counts))

            critic.model.train()
            here = lambda x: 0 if config.offload_policy else getattr(x, "_local_tensor", x).nbytes
            learns = sum(here(p) for p in critic.model.parameters() if p.requires_grad)
            moments = sum(here(x) for state in critic.optimizer.state.values() for x in state.values())
            held = sum(here(p) for p in critic.model.parameters()) + learns + moments
            to_come = max(2 * learns - moments, 0)
            if config.defer_grad_sync:
                to_come += 4 * count_parameters(critic.model)[1]
            gib = float(budget[5:] or math.inf)
            budget = common.find_budget(probe, longest / share, gib, held, to_come, self.device)
            critic.optimizer.zero_grad(set_to_none=True)
            critic.free_gathered()
            if budget < least:
                raise UserError(
                    f"--ppo-max-token-len-per-gpu auto: {row} has {longest} tokens, too many for the memory"
                )
        if halvings:
            smaller = max(budget >> halvings, least)
            print0(f"memory     ran out before, so --ppo-max-token-len-per-gpu {budget} -> {smaller}")
            budget = smaller
        critic.max_tokens = budget * share

    def check_batch(self, batch):
        """Raises UserError, ValueError or RuntimeError for rows that this critic cannot take, or not now."""
        self.check_here()
        longest, row = batch.longest
        if self.critic.max_tokens is None or longest > self.critic.max_tokens:
            self.set_budget(max(longest, 1), f"row {row}")
        common.check_rows(batch, self.model_config)
        if not reads_images(self.model_config):
            if any(batch.multi_modal_inputs or ()):
                raise ValueError("multi_modal_inputs: this critic reads text only")
            return
        image_token_id, merge = (
            self.model_config.image_token_id,
            self.model_config.vision_config.spatial_merge_size,
        )
        for b, ids in enumerate(batch.input_ids.split(batch.lengths)):
            images = batch.multi_modal_inputs[b] if batch.multi_modal_inputs else {}
            if "images" not in images:  # place_images has checked those
                check_placeholders(ids.tolist(), image_token_id, tokens_of_images(images, merge))

    def check_here(self):
        if self.offloaded:
            raise RuntimeError("the critic is offloaded: call onload() first")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch):
        """Values of the caller's rows: (T,) float32, zero where response_mask is false."""
        self.check_batch(batch)
        return self.critic.compute_values(batch)

    @register(Dispatch.DP_COMPUTE_PROTO, needs=("values", "returns"))
    def update_critic(self, batch):
        """One PPO update on the rows of all ranks, with their old values and returns -> metrics, equal on all ranks."""
        self.check_batch(batch)
        config, start = self.config, time.perf_counter()
        metrics = self.critic.update_critic(batch)
        seconds = time.perf_counter() - start
        frozen = config.freeze_layers / getattr(self.model_config.get_text_config(), "num_hidden_layers", 1)
        passes = 1 + (1 - frozen) * (1 if config.lora_rank else 2)  # forward, to inputs, to weights
        flops = passes * config.ppo_epochs * sum(self.critic.flops.forward_flops(n) for n in batch.lengths)
        if compute_dtype(config, self.device) == torch.float32:
            flops = math.nan  # peak rates are of half precision
        tokens = config.ppo_epochs * len(batch.input_ids)
        return metrics | common.batch_metrics(batch) | common.performance(seconds, tokens, flops, self.device)

    @register(Dispatch.ONE_TO_ALL)
    def offload(self):
        """Gives the device memory of weights, gradients and optimizer state to others (a rollout engine)."""
        self.move(torch.device("cpu"))
        self.offloaded = True
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    @register(Dispatch.ONE_TO_ALL)
    def onload(self):
        """Takes it back."""
        self.move(self.device)
        self.offloaded = False

    def move(self, device):
        model, optimizer = self.critic.model, self.critic.optimizer
        if self.config.offload_policy:
            return  # everything is on the host already
        self.critic.free_gathered()
        if self.config.strategy == "fsdp1":
            for handle in model._all_handles:  # .to() would leave the local shard behind in the old memory
                handle.flat_param_to(device)
                handle.flat_param._local_shard = handle.flat_param.data
                handle.flat_param._tensors = [None] * len(
                    handle.flat_param._tensors
                )  # views of the last forward
        else:
            model.to(device)
        for state in optimizer.state.values():
            for name, value in state.items():
                if name != "step":  # a scalar, which stays
                    state[name] = value.to(device)

    # ---- Checkpoints and export ----------------------------------------------------------------------

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder):
        """Writes model, optimizer, schedule, RNG and counters; the folder appears complete or not at all.

        Sharded safetensors with the names of transformers: no pickle, any layout of either critic can read it.
        """
        tmp = common.start_folder(folder)
        self.checkpoint_writer()(tmp)
        common.publish(tmp, folder)

    def checkpoint_writer(self, copy=False):
        """write(tmp, group): writes the state of now into a folder; with `copy` training may change it meanwhile."""
        self.check_here()
        critic = self.critic
        tensors, _, _ = checkpoint_tensors(critic.model, critic.optimizer)
        if copy:
            tensors = DefaultStager(StagingOptions(False, False, False, False)).stage(tensors)
        state = {"backend": "fsdp", "updates": critic.updates, "optimizer_steps": critic.optimizer_steps}
        state |= {"config": dataclasses.asdict(self.config) | {"value_range": self.value_range}}
        state |= {"model_config": common.architecture(self.model_config)}

        def write(tmp, group=None):
            writer = HuggingFaceStorageWriter(tmp, save_distributed=True)
            dcp.save(tensors, storage_writer=writer, process_group=group)
            if RANK == 0:
                with open(os.path.join(tmp, "trainer.json"), "w") as file:
                    json.dump(state, file, indent=1)

        return write

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder):
        """Restores what save_checkpoint of either critic wrote, on any layout. UserError: damaged or foreign."""
        self.check_here()
        critic, config = self.critic, dataclasses.replace(self.config, value_range=self.value_range)
        saved = common.open_checkpoint(folder, ("fsdp", "megatron"), config, self.model_config)
        tensors, model_state, optimizer_state = checkpoint_tensors(critic.model, critic.optimizer)
        with common.blame(f"--resume {folder}: does not fit this critic"):
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(folder))
        states = {"model_state_dict": model_state, "optim_state_dict": optimizer_state}
        set_state_dict(critic.model, critic.optimizer, **states)
        torch.set_rng_state(tensors["rng"])
        critic.updates, critic.optimizer_steps = (saved[key] for key in ("updates", "optimizer_steps"))

    @register(Dispatch.ONE_TO_ALL)
    def export_hf(self, folder):
        """Writes the value model as a Hugging Face folder that AutoModelForTokenClassification loads: num_labels 1,
        or a label a bin for hl_gauss, whose value_range is then in config.json.

        Adapters are merged in. An architecture without that class gets its backbone in the folder and the head in
        value_head.safetensors; --model reads both kinds.
        """
        self.check_here()
        state, config = {}, self.config
        for name, x in get_model_state_dict(self.critic.model).items():
            x = full_tensor(x)  # one tensor at a time; rank 0 keeps it on the host
            if RANK == 0:
                state[name] = x.detach().cpu().contiguous()
        if config.lora_rank:
            names = [n for n, m in self.critic.model.named_modules() if isinstance(m, Conv1D)]
            transposed = {n.replace("_fsdp_wrapped_module.", "").removesuffix(".base_layer") for n in names}
            state = merge_lora(state, config.lora_alpha / config.lora_rank, transposed)
        tmp = common.start_folder(folder)
        if RANK == 0:
            save_hf(state, self.model_config, self.value_range, tmp)
            for part in (self.image_processor, self.tokenizer):
                if part is not None:
                    part.save_pretrained(tmp)
        common.publish(tmp, folder)


def checkpoint_tensors(model, optimizer):
    """All state as one flat dict of tensors, and the model's and optimizer's state dicts that share them."""
    fresh = not optimizer.state
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if fresh:  # get_state_dict took an empty step to create the state; undo its count
        for state in (*optimizer.state.values(), *optimizer_state["state"].values()):
            state["step"].zero_()
    tensors = {f"model.{name}": x for name, x in model_state.items()}
    for name, state in optimizer_state["state"].items():
        tensors |= {f"optimizer.{name}.{key}": x for key, x in state.items()}
    return {**tensors, "rng": torch.get_rng_state()}, model_state, optimizer_state


def save_hf(state, model_config, value_range, folder):
    """Writes a full state dict of a value model ("model.*", "score.*") with transformers' own save_pretrained."""
    head = {name: x for name, x in state.items() if name in ("score.weight", "score.bias")}
    backbone = {name.removeprefix("model."): x for name, x in state.items() if name.startswith("model.")}
    if len(head) < 2 or len(head) + len(backbone) < len(state):
        lost = [name for name in state if name not in head and not name.startswith("model.")]
        raise UserError(
            f"--out-dir: a Hugging Face folder has no place for {lost or 'this head'}; change save_hf"
        )
    model_config = common.config_of_export(model_config, len(state["score.weight"]), value_range)
    classifies = type(model_config) in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    kind = transformers.AutoModelForTokenClassification if classifies else AutoModel
    with torch.device("meta"):
        skeleton = kind.from_config(model_config, dtype=torch.float32)
    if not classifies:
        save_file(head, os.path.join(folder, "value_head.safetensors"), metadata={"format": "pt"})
        return skeleton.save_pretrained(folder, state_dict=backbone)
    prefix = skeleton.base_model_prefix
    theirs = next(n for n, m in skeleton.named_children() if n != prefix and isinstance(m, nn.Linear))
    full = {f"{prefix}.{name}": x for name, x in backbone.items()}
    full |= {name.replace("score", theirs): x for name, x in head.items()}
    skeleton.save_pretrained(folder, state_dict=full)


# ---- Plan: what a layout takes, worked out without launching it --------------------------------------


def saved_bytes(model, config, lengths, device):
    """Bytes that autograd saves in a training forward of a model on meta over rows of these lengths, without weights.

    Counted on fake tensors, which have shapes and devices but no memory; the model keeps them.
    """
    saved = {}
    with FakeTensorMode():
        model.train().to_empty(device=device)
        weights = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}

        def note(x):
            storage = x.untyped_storage()
            saved[storage._cdata] = (storage, storage.nbytes() if storage._cdata not in weights else 0)
            return x

        lengths = lengths if config.use_remove_padding else [max(lengths)] * len(lengths)
        position_ids = torch.cat([torch.arange(n, device=device) for n in lengths])
        position_ids = position_ids.view((1, -1) if config.use_remove_padding else (len(lengths), -1))
        common.set_pack(lengths, device)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(input_ids=torch.zeros_like(position_ids), position_ids=position_ids)
    return sum(n for _, n in saved.values())


def print_plan(config, model_config, lengths, ranks):
    """Prints, as equations, what each of `ranks` ranks holds while it learns rows of these lengths, at its largest."""
    device = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    )
    dtype, tokens = compute_dtype(config, device), config.ppo_max_token_len_per_gpu
    if isinstance(tokens, str):
        raise UserError("--ppo-max-token-len-per-gpu auto: only a run can measure it; give --plan a number")
    model = build_skeleton(config, model_config)
    (count, trained), blocks = (
        count_parameters(model),
        [count_parameters(b)[0] for b in transformer_blocks(model)],
    )
    shards = 1 if config.strategy == "none" else ranks if config.fsdp_size == -1 else config.fsdp_size
    where = ", on the host" if config.offload_policy else ""
    parts = {  # name -> (bytes, equation)
        "weights": (4 * count / shards, f"{count:,} x 4 bytes / {shards} shards{where}"),
        "gradients": (4 * trained / shards, f"{trained:,} x 4 bytes / {shards} shards{where}"),
        "optimizer": (8 * trained / shards, f"{trained:,} x 8 bytes / {shards} shards{where}"),
    }
    if config.strategy != "none":
        n = min(2, len(blocks)) if config.reshard_after_forward else len(blocks)
        gathered = count - sum(blocks) + sum(sorted(blocks)[-n:])
        words = f"{gathered:,} x {dtype.itemsize} bytes (the root and {n} of {len(blocks)} layers)"
        parts["gathered"] = gathered * dtype.itemsize, words
    budget = tokens * config.ulysses_size
    micro = list(
        itertools.takewhile(lambda n: n <= budget, itertools.accumulate(sorted(lengths, reverse=True)))
    )
    rows = sorted(lengths, reverse=True)[: len(micro)]
    rows = [math.ceil(n / config.ulysses_size) for n in rows[: math.ceil(config.ppo_mini_batch_size / ranks)]]
    held = saved_bytes(build_skeleton(config, model_config, dtype), config, rows, device)
    words = f"{sum(rows):,} tokens, what autograd saves"
    if config.gradient_checkpointing:
        plain = dataclasses.replace(config, gradient_checkpointing=False)
        layer = saved_bytes(build_skeleton(plain, model_config, dtype), plain, rows, device) / len(blocks)
        held = layer + (0 if config.activation_offload else held)
        words += f", of layers their inputs, and {layer / 2**20:,.1f} MiB of one that is computed again"
    parts["activations"] = held, words
    print0(
        f"layout       {ranks} ranks = dp {ranks // config.ulysses_size} x sp {config.ulysses_size}, {config.strategy}"
    )
    for name, (size, equation) in parts.items():
        print0(f"{name:12s} {size / 2**20:12,.1f} MiB = {equation}")
    total = sum(size for size, equation in parts.values() if "on the host" not in equation)
    print0(f"together     {total / 2**20:12,.1f} MiB a rank at most")


# ---- Main: value pretraining from rollouts -----------------------------------------------------------


def load_rows(run, tokenizer, model_config):
    """(rows to learn from, rows to evaluate on or None), each one Batch, the same on every rank."""
    options = {"limits": common.limits(model_config), "skip_bad_rows": run.skip_bad_rows}
    if reads_images(model_config):
        image_processor = load_image_processor(run.critic, model_config)
        options["place_images"] = functools.partial(
            place_images, image_processor, model_config.image_token_id
        )
    files, seed = (run.rollouts or "toy", run.eval_rollouts or "toy"), run.critic.seed
    if run.rollouts:
        train = common.read_rows(run.rollouts, tokenizer, with_values=run.recorded_values, **options)
        held_out = None
        if run.eval_rollouts:
            held_out = common.read_rows(run.eval_rollouts, tokenizer, flag="--eval-rollouts", **options)
    else:
        train = common.read_rows(common.toy_rows(8192, seed), tokenizer, **options)
        held_out = common.read_rows(common.toy_rows(512, seed, held_out=True), tokenizer, **options)
    for rows, file in zip((train, held_out), files, strict=True):
        if rows is not None:
            check_budget(run.critic, rows.longest[0], f"{file}:{rows.longest[1] + 1}")
    return train, held_out


def main(run):
    config = run.critic
    tokenizer, model_config = common.load_config(config, config.trust_remote_code)
    check_model_flags(config, model_config)
    train, held_out = load_rows(run, tokenizer, model_config)
    if run.plan:
        return print_plan(config, model_config, train.lengths, run.plan)
    if config.value_head == "hl_gauss" and not (
        config.value_range or getattr(model_config, "value_range", None)
    ):
        config = dataclasses.replace(config, value_range=common.return_range(train, run.gamma))
    size = run.train_batch_size or config.ppo_mini_batch_size
    total = common.count_steps(len(train), run.steps, size, config.ppo_mini_batch_size, config.ppo_epochs)
    common.setup_distributed(config.timeout_minutes)
    with common.Checkpoints(
        run.out_dir, run.resume, run.keep, run.async_save, config.timeout_minutes
    ) as checkpoints:
        worker = CriticWorker(config)
        worker.init_model(total)
        if checkpoints.folder:
            worker.load_checkpoint(checkpoints.folder)
        longest = max(rows.longest[0] for rows in (train, held_out) if rows is not None)
        worker.set_budget(longest, "the longest row", checkpoints.halvings)
        common.print_rows(train, run.gamma)
        print0(
            f"steps      {run.steps} updates x {size} rows, {total} optimizer steps, lr {worker.critic.peak_lr:g}"
        )
        first_step = worker.critic.updates
        if first_step > run.steps:
            raise UserError(
                f"--steps {run.steps}: {checkpoints.folder} has made {first_step} already; give more"
            )
        last_step = first_step if checkpoints.is_own else 0
        logger = common.Logger(run.out_dir, dataclasses.asdict(run), last_step, run.evaluates(first_step))
        start, skipped = time.perf_counter(), 0
        for step in common.profiled(range(first_step, run.steps + 1), run.profile_steps, run.out_dir):
            last, stop = step == run.steps, checkpoints.sigterm_received()
            if held_out is not None and run.evaluates(step):
                held_out.values = worker.critic.compute_values(held_out)
                logger.log_evaluation(step, common.evaluate(held_out, run.gamma))
            if step > first_step and (last or stop or (run.save_every and step % run.save_every == 0)):
                checkpoints.save(step, worker.checkpoint_writer(copy=run.async_save))
            checkpoints.wait(block=last or stop)
            if last:
                break
            if stop:
                logger.close()
                checkpoints.leave(step)
            rows = common.rows_of_step(step, len(train), size, config.seed)
            batch = train.select(rows[RANK::WORLD_SIZE])
            if not run.recorded_values:
                batch.values = worker.compute_values(batch)
            common.add_returns(batch, run.gamma, run.lam, run.bootstrap_truncated)
            metrics = worker.update_critic(batch)
            skipped = common.count_skipped(skipped, metrics, batch, run.out_dir)
            metrics["perf/time_step"] = (time.perf_counter() - start) / (step + 1 - first_step)
            logger.log_update(step + 1, run.steps, metrics)
        worker.export_hf(os.path.join(run.out_dir, "hf"))
    logger.close()
    if held_out is not None:
        common.write_report(run.out_dir, held_out, "held-out rows", tokenizer, run.gamma)
    elif first_step < run.steps:
        about = "rows of the last update, with their values before it"
        common.write_report(run.out_dir, common.gather(batch), about, tokenizer, run.gamma)
    print0(
        f"saved      {run.out_dir}: checkpoints/step_{run.steps}, hf, report.html, curves.png, metrics.jsonl, tensorboard"
    )


if __name__ == "__main__":
    common.launch(lambda: main(RUN))
