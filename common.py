"""What every script of this repository repeats, and nothing that knows FSDP or Megatron.

Read it in this order: the flat Batch and its JSONL form, how rows travel between ranks (gather, register),
how they are cut into micro-batches, the PPO maths, attention over packed rows, then the plumbing: process group,
FLOPs, logging, the report on what the critic learned, profiles, crash-safe folders, tiny models and the toy task.

Shapes are in the names:
    T tokens, sequences end to end   B sequences   A actions (tokens the policy chose)   L longest sequence
    H query heads   K key/value heads   D features of a head
"""

import base64
import bisect
import contextlib
import dataclasses
import datetime
import enum
import functools
import glob
import hashlib
import heapq
import html
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import transformers
from huggingface_hub import snapshot_download
from PIL import Image, ImageOps
from safetensors import safe_open
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, Qwen2VLImageProcessorPil
from transformers.pytorch_utils import Conv1D

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says when it begins and ends

# ---------------------------------------------------------------------------------------------------------------------
# Ranks, devices, and how a process ends
# ---------------------------------------------------------------------------------------------------------------------

RANK = int(os.environ.get("RANK", 0))  # torchrun sets these; plain `python` is a world of one
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))


class UserError(ValueError):
    """A mistake the user can mend: `run` prints its one line, which names flag or row and remedy, and no traceback."""


def check_flag(config, name, rule, holds):
    """UserError naming the flag, its value and the rule, unless holds(value). NaN holds no rule."""
    value = getattr(config, name)
    if not holds(value):
        raise UserError(f"--{name.replace('_', '-')} {value}: {rule}")


def check_divides(flag, size, n, what):
    """UserError unless a kind of parallelism divides what the model has n of."""
    if n % size:
        fits = one_of([k for k in range(1, n + 1) if n % k == 0])
        raise UserError(f"--{flag} {size}: must divide the model's {n} {what}; it can be {fits}")


def one_of(numbers):
    """1, 2 or 4."""
    words = [str(n) for n in numbers]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else words[0]


def one_line(error):
    """An exception as a line to quote: its kind and text, without line breaks, not too long."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # of a user's own kind
        text = ""
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def check_choices(config):
    """UserError for a value that is none of a flag's Literal choices, or for one of several that is none."""
    for name, kind in get_type_hints(type(config)).items():
        many = get_origin(kind) is tuple
        if get_origin(kind := get_args(kind)[0] if many else kind) is Literal:
            choices = get_args(kind)
            chosen = lambda x, many=many, choices=choices: all(part in choices for part in (x if many else [x]))
            check_flag(config, name, f"must be {'of' if many else 'one of'} {', '.join(map(str, choices))}", chosen)


def check_trainable(config):
    """UserError for values that no model which is trained here can take, critic or actor."""
    check_choices(config)
    check_flag(config, "betas", "each must be at least 0 and below 1", lambda x: all(0 <= b < 1 for b in x))
    if config.loss_agg_mode == "seq-mean-token-sum-norm" and config.response_length_limit is None:
        raise UserError("--loss-agg-mode seq-mean-token-sum-norm: needs --response-length-limit, what to divide by")
    if config.loss_agg_mode != "seq-mean-token-sum-norm" and config.response_length_limit is not None:
        limit = f"--response-length-limit {config.response_length_limit}"
        raise UserError(f"{limit}: is what --loss-agg-mode seq-mean-token-sum-norm divides by; give both")
    try:
        if not isinstance(json.loads(config.override_config), dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise UserError(f"--override-config {config.override_config}: must be a JSON object ({error})") from None


def validate_config(config):
    """Raises UserError for values that no critic can take; each script adds what its layout asks for."""
    check_trainable(config)
    for name in (
        "ppo_epochs", "ppo_mini_batch_size", "ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu",
        "ppo_micro_batch_size_per_gpu", "forward_micro_batch_size_per_gpu", "response_length_limit", "cliprange_value",
        "lr", "grad_clip", "total_training_steps",
    ):  # fmt: skip
        check_flag(config, name, "must be above 0", lambda x: x in (None, "auto") or (not isinstance(x, str) and x > 0))
    auto = config.ppo_max_token_len_per_gpu == "auto"
    if config.memory_limit_gib is not None and not auto:
        raise UserError("--memory-limit-gib: goes with --ppo-max-token-len-per-gpu auto")
    if auto and config.ppo_micro_batch_size_per_gpu is not None:
        raise UserError("--ppo-max-token-len-per-gpu auto: --ppo-micro-batch-size-per-gpu decides alone; drop one")
    if auto and config.memory_limit_gib is None and not torch.cuda.is_available():
        raise UserError("--ppo-max-token-len-per-gpu auto: give --memory-limit-gib, what a rank may take on a CPU")
    check_flag(config, "value_bins", "must be at least 2", lambda x: x >= 2)
    check_flag(
        config, "value_range", "must be LOW below HIGH, both finite",
        lambda x: x is None or (math.isfinite(x[1] - x[0]) and x[0] < x[1]),
    )  # fmt: skip
    if config.value_range is not None and config.value_head == "scalar":
        raise UserError(f"--value-range {config.value_range}: a scalar has none; add --value-head hl_gauss")
    check_flag(config, "lr", "must be finite", lambda x: x is None or x < math.inf)
    for name in ("timeout_minutes", "memory_limit_gib"):
        check_flag(config, name, "must be above 0, and at most a million", lambda x: x is None or 0 < x <= 1e6)
    for name in ("weight_decay", "lr_warmup_steps", "seed"):
        check_flag(config, name, "must be finite and not below 0", lambda x: 0 <= x < 2**63)
    for name in ("lr_warmup_steps_ratio", "min_lr_ratio"):
        check_flag(config, name, "must be between 0 and 1", lambda x: 0 <= x <= 1)
    if config.min_lr_ratio and config.lr_scheduler_type == "constant":
        raise UserError(f"--min-lr-ratio {config.min_lr_ratio}: is where cosine ends; add --lr-scheduler-type cosine")
    if config.lr_warmup_steps and config.lr_warmup_steps_ratio:
        raise UserError("--lr-warmup-steps and --lr-warmup-steps-ratio: give one of them")


def print0(*args):
    """Prints on rank 0 only."""
    if RANK == 0:
        print(*args, flush=True)


def setup_distributed(timeout_minutes=30.0):
    """Joins the process group (a group of one without torchrun) -> this rank's torch.device.

    Collectives on host tensors go over gloo, on device tensors over the device's own backend (NCCL on CUDA). A peer
    that does not answer within timeout_minutes ends the run instead of hanging it.
    """
    if ("RANK" in os.environ) != ("MASTER_ADDR" in os.environ) or (WORLD_SIZE > 1 and "RANK" not in os.environ):
        raise UserError(
            "RANK, WORLD_SIZE and MASTER_ADDR: only some of them are set; start several ranks with torchrun"
        )
    device, backend = torch.device("cpu"), "gloo"
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else device
    if found.type not in ("cpu", "mps"):  # Apple's GPU has no collectives
        if LOCAL_RANK >= torch.accelerator.device_count():
            raise UserError(
                f"--nproc-per-node: local rank {LOCAL_RANK} has no device of its own; this machine has "
                f"{torch.accelerator.device_count()}, so start at most that many"
            )
        torch.accelerator.set_device_index(LOCAL_RANK)
        device = torch.device(found.type, LOCAL_RANK)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    if not dist.is_initialized():
        TIMEOUT[0] = datetime.timedelta(minutes=timeout_minutes)
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=TIMEOUT[0], **alone)
    return device


TIMEOUT = [datetime.timedelta(minutes=30)]  # of every process group


def device_mesh(device, **sizes):
    """DeviceMesh of these dimensions, whose groups have the time-out of the run: by itself it gives torch's own."""
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(TIMEOUT[0], group)
    return mesh


def sharding_mesh(device, fsdp_size):
    """DeviceMesh over which weights are spread: (world,), or (replicas, fsdp_size) for hybrid sharding."""
    if fsdp_size in (-1, WORLD_SIZE):
        return device_mesh(device, shard=WORLD_SIZE)
    return device_mesh(device, replicate=WORLD_SIZE // fsdp_size, shard=fsdp_size)


NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
OUT_OF_MEMORY, HALVINGS = [], [0]  # what to call then, and how often that has halved the budgets: smaller_budgets
DISK_FULL = ("No space left on device", "Disk quota exceeded")
LOST_RANK = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "Broken pipe")  # of gloo


def run(main):
    """Runs main() and ends the process: 0 on success, 2 on a UserError (one line, no traceback), 1 on anything else.

    Every end is os._exit: gloo's threads outlive destroy_process_group and abort about one exit in six when the
    interpreter shuts down under them. Rank 0 speaks for all; another rank waits a moment before it reports, so that
    an error all ranks share is printed once, and one that only this rank has is printed all the same.
    """
    code, message = 0, ""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":  # ranks would outlive a torchrun that is killed
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    try:
        main()
        if dist.is_initialized():
            dist.barrier()
    except UserError as error:
        code, message = 2, f"error: {error}\n"
    except SystemExit as stop:  # tyro: --help is 0, a bad flag is 2 and already explained on rank 0
        code, message = (stop.code or 0, "") if isinstance(stop.code, int | None) else (1, f"{stop.code}\n")
    except KeyboardInterrupt:
        code, message = 130, "interrupted\n"
    except BaseException as error:
        code, message = 1, traceback.format_exc()
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or NO_MEMORY in message:
            message = (
                f"error: {one_line(error)}: go on with --resume auto, which halves the token budgets, on which no "
                "update depends, or take more ranks\n"
            )
            for note in OUT_OF_MEMORY:
                note()
        if full := [line for line in message.splitlines() if any(words in line for words in DISK_FULL)]:
            code, message = 2, f"error: {full[-1].strip()}; make room and go on with --resume auto\n"
        if isinstance(error, RuntimeError) and any(words in message for words in LOST_RANK):
            message += (
                "error: another rank has died, or hung until the time-out; the cause is what it said itself, if it "
                "did; go on from a checkpoint with --resume\n"
            )
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from now on it ends the process
    for saving in SAVING:  # what was computed before this is not to be lost; a rank that is gone would let it wait
        with contextlib.suppress(Exception):
            saving.result(timeout=60)
    if code and RANK > 0:
        time.sleep(5)  # torchrun ends this process as soon as rank 0 is gone
        message = message.replace("error:", f"error on rank {RANK}:", 1)
    with contextlib.suppress(OSError):  # they may be files on a disk that is full
        sys.stdout.flush()
        sys.stderr.write(message)
        sys.stderr.flush()
    if message and "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun closes its own report with what is in there
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": message.strip(), "timestamp": int(time.time())}, file)
    os._exit(code)


class CommTimer:
    """Seconds this process stands blocked in collectives, while used as a context manager.

    Counts time inside Work.wait, where torch.distributed's own collectives block the host under gloo: parameter
    gathers, gradient reductions, metrics. The functional collectives of DTensor (the norm of FSDP2's gradient) pass it
    by, and on CUDA the host does not block: collectives run beside compute there. Nor does it count what waits in
    another thread, a checkpoint that is written beside the training.
    """

    def __enter__(self):
        self.seconds, self.wait = 0.0, dist.Work.wait

        def timed_wait(work, *args, **kwargs):
            start = time.perf_counter()
            result = self.wait(work, *args, **kwargs)
            if threading.current_thread() is threading.main_thread():
                self.seconds += time.perf_counter() - start
            return result

        dist.Work.wait = timed_wait
        return self

    def __exit__(self, *_):
        dist.Work.wait = self.wait


def peak_memory_gib(device):
    """GiB at the highest point so far: device memory on an accelerator, resident memory of the process on CPU."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts in bytes, Linux in KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return torch.accelerator.max_memory_allocated() / 2**30


def peak_bytes(call, device):
    """The most bytes of tensors that a call holds at a time, beyond those that are there before."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        call()
        return torch.accelerator.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as log:
        call()
    events = [event for event in log.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def find_budget(config, probe, longest, row, held, to_come, share, device):
    """Most tokens of a micro-batch that the memory holds, per rank and equal on all (a collective), printed as an
    equation. UserError: not even one row.

    probe(n) trains on n rows as long as the longest that will come, `row`, without a step; `share` ranks share each.
    held, to_come: bytes of weights, gradients and optimizer state on this rank, there by then and not yet.
    """
    too_long = UserError(
        f"--ppo-max-token-len-per-gpu auto: {row} takes {longest} tokens, too many for the memory; add "
        "--gradient-checkpointing, more ranks, or memory"
    )
    rows, peaks, grown = math.ceil(512 * share / longest), [], 0
    limit = config.memory_limit_gib * 2**30 if config.memory_limit_gib else math.inf
    try:
        probe(rows)  # makes what stays: gradients, workspaces
        if device.type != "cpu":
            free, _ = torch.accelerator.get_memory_info()
            unused = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
            limit = min(limit, free + unused + held)
        fullest = torch.tensor([-limit, held + to_come], dtype=torch.float64, device=device)  # of all ranks
        dist.all_reduce(fullest, dist.ReduceOp.MAX)
        limit, kept = -float(fullest[0]), float(fullest[1])
        room = 0.9 * limit - kept  # a tenth is lost to the allocator
        while not peaks or (grown < 2 and 2 * peaks[-1][1] < room and len(peaks) < 12):
            # as long as rows are few the gradient of the largest weight makes the peak: twice as many, until it has
            # twice grown with them, or the next would not fit
            peak = torch.tensor(float(peak_bytes(lambda n=rows: probe(n), device)), device=device)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            grown = grown + 1 if peaks and float(peak) > 1.6 * peaks[-1][1] else 0
            peaks.append((rows * longest / share, float(peak)))
            rows *= 2
    except torch.OutOfMemoryError:
        raise too_long from None
    last, peak = peaks[-1]
    per_token = (peak - peaks[-2][1]) / (last - peaks[-2][0]) if grown == 2 else peak / last
    fixed = max(peak - per_token * last, 0)
    tokens = max(int((room - fixed) / per_token), 0)
    gib = lambda x: f"{x / 2**30:.3g}"
    print0(
        f"budget     (0.9 x {gib(limit)} GiB - {gib(kept)} weights, gradients, optimizer - {gib(fixed)} "
        f"at any length) / {per_token:,.0f} bytes a token = {tokens:,} tokens a micro-batch"
    )
    if tokens * share < longest:
        raise too_long
    return max(tokens >> HALVINGS[0], math.ceil(longest / share))


def probe_rows(n, length):
    """A Batch of n rows of so many tokens, all but the first of each an action."""
    mask = torch.ones(n, length, dtype=torch.bool)
    mask[:, 0] = False
    zeros = torch.zeros(n * length)
    return Batch(
        zeros.long(), cumulative(torch.full((n,), length)), mask.flatten(), torch.arange(n), torch.zeros(n).bool(),
        values=zeros, returns=zeros,
    )  # fmt: skip


def longest_row(batch, path=None):
    """(its tokens, where it stands) of the longest row."""
    row = int(batch.row_id[batch.lengths.index(max(batch.lengths))])
    return max(batch.lengths), f"{path}:{row + 1}" if path else f"row {row}"


# ---------------------------------------------------------------------------------------------------------------------
# The batch: flat and ragged from the file to the loss
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    """B sequences end to end, T tokens in all. Padding exists only inside a forward that asks for it.

    index            0    1    2    3    4    5
    token            p0   p1   a0   a1   o0   a2      p prompt . a action . o observation (tool output)
    response_mask    0    0    1    1    0    1
    hidden           h0   h1   h2   h3   h4   h5
    values           0    0    v(h1) v(h2) 0  v(h4)   the value of an action is read just before it
    """

    input_ids: torch.Tensor  # (T,) int64
    cu_seqlens: torch.Tensor  # (B+1,) int32: sequence b is [cu_seqlens[b], cu_seqlens[b+1])
    response_mask: torch.Tensor  # (T,) bool: true on actions; never on the first token of a sequence
    row_id: torch.Tensor  # (B,) int64: global id of the row; order and shuffles depend on it, never on the layout
    truncated: torch.Tensor  # (B,) bool: the response hit the length limit
    token_level_rewards: torch.Tensor | None = None  # from here (T,) float32, zero where response_mask is false
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    ref_log_probs: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None  # the engine's own, of what it sampled from
    multi_modal_inputs: list | None = None  # B dicts, {} for a row without images; see read_images for what is in them

    FLOATS = (
        "token_level_rewards", "values", "returns", "advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs",
    )  # fmt: skip

    def __len__(self):
        return len(self.row_id)

    @property
    def lengths(self):
        """Tokens of each sequence, as a list of B ints."""
        return self.cu_seqlens.diff().tolist()

    def token_index(self, rows):
        """Indices into the (T,) columns of the tokens of these rows, in the order of `rows`."""
        starts = self.cu_seqlens.tolist()
        pieces = [torch.arange(starts[r], starts[r + 1]) for r in rows]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)

    def select(self, rows):
        """A new Batch of these rows (a sequence of indices), in that order; nothing is shared with this one."""
        rows = list(rows)
        tokens, row_index = self.token_index(rows), torch.tensor(rows, dtype=torch.int64)
        columns = {}
        for field in dataclasses.fields(self):
            column = getattr(self, field.name)
            if field.name == "cu_seqlens":
                columns[field.name] = cumulative(self.cu_seqlens.diff()[row_index])
            elif isinstance(column, list):
                columns[field.name] = [column[r] for r in rows]
            elif column is not None:
                columns[field.name] = column[row_index if field.name in ("row_id", "truncated") else tokens]
        return Batch(**columns)

    def split(self, size):
        """Consecutive pieces of `size` rows; the last one may be shorter."""
        return [self.select(range(i, min(i + size, len(self)))) for i in range(0, len(self), size)]

    def to(self, device):
        """This batch with every tensor on `device`."""
        ahead = torch.device(device).type != "cpu"  # to the host a copy must be over before it is read

        def move(x):
            if isinstance(x, torch.Tensor):
                return x.to(device, non_blocking=ahead)
            if isinstance(x, dict):
                return {k: move(v) for k, v in x.items()}
            return [move(v) for v in x] if isinstance(x, list) else x

        return Batch(**{f.name: move(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def check(self):
        """Raises ValueError if the columns do not fit together; -> self."""
        starts, begin, end = self.cu_seqlens[:-1].long(), int(self.cu_seqlens[0]), int(self.cu_seqlens[-1])
        if begin != 0 or end != len(self.input_ids) or (self.cu_seqlens.diff() < 1).any():
            raise ValueError(
                f"cu_seqlens must rise from 0 to the {len(self.input_ids)} tokens there are, is {self.cu_seqlens}"
            )
        per_row = ("row_id", "truncated", "multi_modal_inputs")
        for name in (*per_row, "response_mask", *self.FLOATS):
            column, n = getattr(self, name), len(starts) if name in per_row else end
            if column is not None and len(column) != n:
                raise ValueError(f"{name} has {len(column)} entries for {n} {'rows' if name in per_row else 'tokens'}")
        if self.response_mask.dtype != torch.bool:
            raise ValueError(f"response_mask must be bool, is {self.response_mask.dtype}")
        if self.response_mask[starts].any():
            row = int(self.row_id[self.response_mask[starts].nonzero()[0]])
            raise ValueError(f"row {row}: its first token cannot be an action, there is no state before it")
        return self


def cumulative(lengths):
    """(B,) lengths -> (B+1,) int32 [0, l0, l0+l1, ...]."""
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def row_of_token(cu_seqlens):
    """(T,) int64: which sequence each token belongs to."""
    return torch.repeat_interleave(cu_seqlens.diff().long())


def concat(batches):
    """One Batch of the rows of all, in order. A column must be there in every batch or in none, but for images."""
    columns = {}
    for field in dataclasses.fields(Batch):
        parts = [getattr(b, field.name) for b in batches]
        if field.name == "multi_modal_inputs" and any(parts):
            parts = [p or [{} for _ in b.lengths] for p, b in zip(parts, batches, strict=True)]
        if field.name == "cu_seqlens":
            columns[field.name] = cumulative(torch.cat([p.diff() for p in parts]))
        elif any(p is None for p in parts):
            if not all(p is None for p in parts):
                raise ValueError(f"column {field.name} is missing in some of the batches")
        else:
            columns[field.name] = sum(parts, []) if isinstance(parts[0], list) else torch.cat(parts)
    return Batch(**columns)


def masked_token():
    """A Batch of one token that is no action: what a rank without rows computes to keep in step with the others."""
    return Batch(
        input_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        response_mask=torch.zeros(1, dtype=torch.bool),
        row_id=torch.tensor([-1]),
        truncated=torch.tensor([False]),
        **{name: torch.zeros(1) for name in Batch.FLOATS},
    )


def gather(batch, group=None):
    """The rows of all ranks of `group` (None: all), on every one of them, on the host, in row_id order (a collective).

    Raises ValueError if two ranks pass the same row, or a batch is not sound.
    """
    parts = [batch.check().to("cpu")]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        parts = of_all_ranks(parts[0].select(range(len(batch))), group)  # of a view, pickle would send all storage
    whole = concat(parts)
    order = whole.row_id.argsort(stable=True)
    twice = whole.row_id[order][1:][whole.row_id[order].diff() == 0]
    if len(twice):
        raise ValueError(
            f"row_id {int(twice[0])} stands in the batch more than once: each rank passes the rows it owns"
        )
    return whole.select(order.tolist())


# ---------------------------------------------------------------------------------------------------------------------
# JSONL: {"prompt" | "messages" | "prompt_ids", "response" | "response_ids", "reward" | "rewards",
#         optional "images", "values", "response_mask", "truncated"}, one row a line; other keys are ignored
# ---------------------------------------------------------------------------------------------------------------------


def read_jsonl(path, flag="--rollouts", **options):
    """Reads rollouts into one Batch; row_id counts the lines of the file from 0. For the options see rows_to_batch."""
    try:
        with open(path, "rb") as file:
            return rows_to_batch(file, f"{flag} {path}", folder=os.path.dirname(path), **options)
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}") from None


def rows_to_batch(
    lines,
    source,
    tokenizer=None,
    vocab_size=2**31,
    max_length=2**31,
    skip_bad_rows=False,
    with_values=False,
    image_processor=None,
    image_token_id=None,
    folder="",
):
    """JSON lines -> Batch. `source` names them in errors; "values" are read with_values only.

    A scalar "reward" lands on the last action; "rewards", "values" and "response_mask" have one entry per response
    token. A text "response" is closed with the tokenizer's end-of-sequence token, unless it has one or the row is
    truncated: choosing to stop is an action too. Ids must be below vocab_size, rows no longer than max_length.

    "images" are files, relative to `folder`, or data URLs ("data:image/png;base64,..."). A text prompt has one
    placeholder (image_token_id) for each, which is repeated for every token of the image; ids have them all already.

    Raises UserError naming file, line and fault of the first bad row; with skip_bad_rows such rows are left out,
    counted and printed instead.
    """
    lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    rows, faults = {}, {}  # line number -> checked row, line number -> what is wrong with it
    for number, line in lines:
        try:
            rows[number] = _parse_row(line, tokenizer)
        except UserError as fault:
            faults[number] = str(fault)[:500]  # which quotes what the row has
    _tokenize(rows.values(), tokenizer)
    for number, row in progress(list(rows.items()), "rows"):
        try:
            if image_token_id is not None:
                _place_images(row, image_processor, image_token_id, folder)
            elif row["images"]:
                raise UserError("it has images, this model reads text only")
            rows[number] = _finish_row(row, vocab_size, max_length, with_values)
        except UserError as fault:
            faults[number] = str(fault)[:500]  # which quotes what the row has
            del rows[number]
    report_faults(faults, len(lines), source, skip_bad_rows)
    if not rows:
        raise UserError(f"{source}: no usable row")
    numbers = sorted(rows)
    join = lambda key, dtype: torch.tensor([x for n in numbers for x in rows[n][key]], dtype=dtype)
    batch = Batch(
        input_ids=join("ids", torch.int64),
        cu_seqlens=cumulative(torch.tensor([len(rows[n]["ids"]) for n in numbers])),
        response_mask=join("mask", torch.bool),
        row_id=torch.tensor(numbers) - 1,
        truncated=torch.tensor([rows[n]["truncated"] for n in numbers]),
        token_level_rewards=join("rewards", torch.float32),
        values=join("values", torch.float32) if with_values else None,
        multi_modal_inputs=[{"images": rows[n]["images"]} if rows[n]["images"] else {} for n in numbers],
    )
    if not any(batch.multi_modal_inputs):
        batch.multi_modal_inputs = None
    if not batch.response_mask.any():
        raise UserError(f"{source}: no row has an action, response_mask is 0 everywhere")
    if stray := int((batch.token_level_rewards[~batch.response_mask] != 0).sum()):
        print0(f"{source}: {stray:,} rewards stand on tokens that are no actions; the action before gets them")
    batch.token_level_rewards = carry_rewards(batch.token_level_rewards, batch.response_mask, batch.cu_seqlens)
    if with_values:
        batch.values = torch.where(batch.response_mask, batch.values, 0.0)
    return batch


def report_faults(faults, n, source, skip_bad_rows):
    """faults: line number -> what is wrong with it, of n rows. UserError with the first, or prints some that are left
    out."""
    if faults and not skip_bad_rows:
        first = min(faults)
        more = f", and {len(faults) - 1} more bad rows" if len(faults) > 1 else ""
        raise UserError(f"{source}:{first}: {faults[first]}{more} (--skip-bad-rows leaves bad rows out)")
    if faults:
        print0(f"{source}: left out {len(faults)} bad rows of {n}")
        for number in sorted(faults)[:5]:
            print0(f"  line {number}: {faults[number]}")


def _parse_row(line, tokenizer):
    """One JSON line -> a dict of raw prompt and response (text or ids) and the rest; UserError says what is wrong."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"a row is a JSON object, this is a {type(row).__name__}")
    for keys in (("prompt", "messages", "prompt_ids"), ("response", "response_ids"), ("reward", "rewards")):
        given = [k for k in keys if row.get(k) is not None]
        if len(given) != 1:
            raise UserError(f"needs exactly one of {', '.join(keys)}; has {' and '.join(given) or 'none'}")
    truncated = row["truncated"] if row.get("truncated") is not None else False
    if not isinstance(truncated, bool):
        raise UserError(f"truncated must be true or false, not {truncated!r}")

    out = {key: row[key] for key in ("reward", "rewards", "values", "response_mask") if row.get(key) is not None}
    images = row["images"] if row.get("images") is not None else []
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise UserError("images must be a list of file names or data URLs")
    out |= {"truncated": truncated, "images": images}
    out |= {"texts": [], "close": []}  # texts: (with special tokens?, key) still to tokenize
    for key in ("prompt", "response"):
        if row.get(f"{key}_ids") is not None:
            out[key] = row[f"{key}_ids"]
            if not isinstance(out[key], list) or not all(type(i) is int for i in out[key]):
                raise UserError(f"{key}_ids must be a list of whole numbers")
            continue
        if tokenizer is None:
            raise UserError(f"{key} is text, and there is no tokenizer to read it with; give --tokenizer")
        chat = key == "prompt" and row.get("messages") is not None
        if chat:
            check_messages(row["messages"])
            try:
                out[key] = tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
            except Exception as error:  # templates are programs and raise what they like
                raise UserError(f"messages do not fit the tokenizer's chat template: {one_line(error)}") from None
        else:
            out[key] = row[key]
        if not isinstance(out[key], str) or not out[key]:
            raise UserError(f"empty {key}" if out[key] == "" else f"{key} must be text, not {out[key]!r:.40}")
        try:
            out[key].encode()
        except UnicodeEncodeError:
            raise UserError(f"{key} holds half a surrogate pair, which is not text") from None
        out["texts"].append((key == "prompt" and not chat, key))  # a chat template writes special tokens itself
        if key == "response" and not truncated and tokenizer.eos_token_id is not None:
            out["close"] = [tokenizer.eos_token_id]
    return out


def _tokenize(rows, tokenizer):
    """Texts of parsed rows -> ids, in place; a call or two, for the tokenizer runs the texts of one in parallel."""
    for special in (True, False):
        texts = [(row, key) for row in rows for key in ("prompt", "response") if (special, key) in row["texts"]]
        if texts:
            ids = tokenizer(
                [row[key] for row, key in texts], add_special_tokens=special, return_attention_mask=False, verbose=False
            )["input_ids"]
            for (row, key), tokens in zip(texts, ids, strict=True):
                row[key] = tokens


def check_messages(messages):
    """UserError unless messages are what chat templates expect: some templates render anything else as text."""
    fits = isinstance(messages, list) and bool(messages)
    for m in messages if fits else ():
        fits = fits and isinstance(m, dict) and isinstance(m.get("role"), str)
        fits = fits and isinstance(m.get("content"), str | list | None)
    if not fits:
        raise UserError('messages must be a list of {"role": ..., "content": ...}')


def _place_images(row, image_processor, image_token_id, folder):
    """Reads a row's images once to see that they fit, makes their names absolute and repeats their placeholders."""
    if row["images"] and image_processor is None:
        raise UserError("it has images, and the model's folder has no preprocessor_config.json to read them with")
    is_file = lambda image: not image.startswith("data:")
    row["images"] = [os.path.abspath(os.path.join(folder, i)) if is_file(i) else i for i in row["images"]]
    tokens = []
    if row["images"]:
        tokens = image_tokens(read_images({"images": row["images"]}, image_processor), image_processor.merge_size)
    if any(key == "prompt" for _, key in row["texts"]) and row["prompt"].count(image_token_id) == len(tokens):
        count = iter(tokens)
        row["prompt"] = [i for i in row["prompt"] for _ in range(next(count) if i == image_token_id else 1)]
    check_placeholders(row["prompt"] + row["response"], image_token_id, tokens)


def image_tokens(images, merge_size):
    """Tokens of each image of a row, a list: merge_size x merge_size patches are one token."""
    return (images["image_grid_thw"].prod(1) // merge_size**2).tolist() if images else []


def check_placeholders(ids, image_token_id, tokens):
    """UserError unless the runs of placeholders among the ids are as long as the images, in their order."""
    runs = [len(list(run)) for is_image, run in itertools.groupby(ids, image_token_id.__eq__) if is_image]
    if runs != tokens:
        raise UserError(f"placeholders stand in runs of {runs or 0} tokens, its images have {tokens or 0}")


def read_images(row, image_processor):
    """One row's multi_modal_inputs -> {"pixel_values": (patches, features), "image_grid_thw": (images, 3) in patches}.

    Those of a JSONL row are {"images": [absolute file name or data URL]}: they are read just before a forward, since
    the pixels of all rows would fill the host. UserError names an image that cannot be read.
    """
    if not row.get("images"):
        return {key: x for key, x in row.items() if key != "images"}
    pictures = []
    for image in row["images"]:
        try:
            data = io.BytesIO(base64.b64decode(image.partition(",")[2])) if image.startswith("data:") else image
            with Image.open(data) as file:
                pictures.append(ImageOps.exif_transpose(file).convert("RGB"))
        except Exception as error:  # decoders raise what they like
            raise UserError(f"image {image:.80}: {one_line(error)}") from None
    try:
        return dict(image_processor(images=pictures, return_tensors="pt"))
    except ValueError as error:  # say a strip of two hundred times its width
        raise UserError(f"images {', '.join(i[:80] for i in row['images'])}: {one_line(error)}") from None


def _finish_row(row, vocab_size, max_length, with_values):
    """A row with prompt and response as ids -> its (tokens,) columns as lists; UserError says what is wrong."""
    for key in ("prompt", "response"):
        if not row[key]:
            raise UserError(f"empty {key}")
    response = row["response"] + row["close"] * (row["response"][-1:] != row["close"])
    ids, before = row["prompt"] + response, len(row["prompt"])
    if len(ids) > max_length:
        raise UserError(
            f"{len(ids)} tokens, longer than the model's max_position_embeddings, {max_length} (--override-config)"
        )
    for i in ids:
        if not 0 <= i < vocab_size:
            raise UserError(f"token id {i} is outside the model's vocabulary of {vocab_size}")

    def per_token(key, convert, what, fits):
        column = row[key]
        if not isinstance(column, list):
            raise UserError(f"{key} must be a list, one entry per response token")
        if len(column) != len(response):
            closed = " (the end-of-sequence token among them)" if row["close"] else ""
            raise UserError(f"{key} has {len(column)} entries, the response has {len(response)} tokens{closed}")
        for x in column:
            if not fits(x):
                raise UserError(f"{key} must hold {what}, not {x!r:.40}")
        return [convert(x) for x in column]

    out = {"ids": ids, "images": row["images"], "truncated": row["truncated"], "mask": [True] * len(response)}
    if "response_mask" in row:
        out["mask"] = per_token("response_mask", bool, "true and false, or 1 and 0", lambda x: x in (0, 1))
    if "rewards" in row:
        out["rewards"] = per_token("rewards", float, "finite numbers", _is_number)
    elif _is_number(row["reward"]):
        out["rewards"] = [0.0] * (len(response) - 1) + [float(row["reward"])]
    else:
        raise UserError(f"reward must be a finite number, not {row['reward']!r:.40}")
    if with_values:
        if "values" not in row:
            raise UserError("no values, which are asked for")
        out["values"] = [0.0] * before + per_token("values", float, "finite numbers", _is_number)
    if any(out["rewards"]) and not any(out["mask"]):
        raise UserError("a reward, but no action that could have earned it: response_mask is 0 everywhere")
    out["mask"], out["rewards"] = [False] * before + out["mask"], [0.0] * before + out["rewards"]
    return out


LARGEST = 1e15  # reward or value that is taken


def _is_number(x):
    """A number whose square float32 can hold; JSON as Python reads it has NaN, Infinity and endless integers too."""
    return isinstance(x, int | float) and -LARGEST <= x <= LARGEST


def write_jsonl(batch, path):
    """Writes ids, masks, rewards, values and `truncated` of a Batch as JSONL, complete or not at all.

    read_jsonl gives the same columns back, bit for bit, with rows numbered anew. Everything before the first action is
    the prompt, so rewards are carried to actions first; what stands on other tokens is left out, and so are images.
    """
    starts = batch.cu_seqlens.tolist()
    columns = {"rewards": torch.zeros(len(batch.input_ids))}
    if batch.token_level_rewards is not None:
        columns["rewards"] = carry_rewards(batch.token_level_rewards, batch.response_mask, batch.cu_seqlens)
    if batch.values is not None:
        columns["values"] = torch.where(batch.response_mask, batch.values, 0.0)
    with open(f"{path}.tmp", "w") as file:
        for b, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
            mask = batch.response_mask[start:end]
            cut = start + (int(mask.int().argmax()) if mask.any() else end - start - 1)
            row = {
                "prompt_ids": batch.input_ids[start:cut].tolist(),
                "response_ids": batch.input_ids[cut:end].tolist(),
                "response_mask": batch.response_mask[cut:end].int().tolist(),
                "truncated": bool(batch.truncated[b]),
                **{name: x_T[cut:end].tolist() for name, x_T in columns.items()},
            }
            file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


# ---------------------------------------------------------------------------------------------------------------------
# Dispatch: every rank runs the same program; a decorator says what the arguments mean
# ---------------------------------------------------------------------------------------------------------------------


class Dispatch(enum.Enum):
    ONE_TO_ALL = "every rank calls with the same arguments"
    DP_COMPUTE_PROTO = "every rank calls with the rows it owns and gets the results of those rows"


def register(dispatch, needs=()):
    """Decorates a worker's method with its Dispatch.

    Under DP_COMPUTE_PROTO the rows of all ranks are gathered in row_id order, with the optional columns in `needs` and
    no others, and the method sees the *global* batch: what it computes cannot depend on who owned which row. A (T,)
    result, one number per token of the global batch, is cut back to the caller's own rows in the caller's order;
    anything else (a dict of metrics) is returned as it is. Raises ValueError if a needed column is missing.
    """

    def decorate(method):
        @functools.wraps(method)
        def call(self, batch):
            missing = [name for name in needs if getattr(batch, name) is None]
            if missing:
                raise ValueError(f"{method.__name__} needs the columns {', '.join(missing)} of the batch")
            unused = [name for name in Batch.FLOATS if name not in needs]
            whole = gather(dataclasses.replace(batch, **dict.fromkeys(unused)))
            result = method(self, whole)
            if not isinstance(result, torch.Tensor):
                return result
            return result[whole.token_index(torch.searchsorted(whole.row_id, batch.row_id).tolist())]

        return call if dispatch is Dispatch.DP_COMPUTE_PROTO else method

    return decorate


# ---------------------------------------------------------------------------------------------------------------------
# Who computes what: rows over ranks by cost, a rank's rows over micro-batches by tokens
# ---------------------------------------------------------------------------------------------------------------------


def balance(costs, k):
    """k lists of indices with sums as even as longest-first makes them (LPT, Graham 1969: within 4/3 of the best)."""
    parts, heap = [[] for _ in range(k)], [(0, j) for j in range(k)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, j = heapq.heappop(heap)
        parts[j].append(i)
        heapq.heappush(heap, (load + costs[i], j))
    return parts


def split_by_tokens(lengths, max_tokens, padded=False, at_least=1):
    """Lists of indices, each of at most max_tokens tokens (padded: rows x longest row), longest row first.

    There are at_least of them (the last ones may be empty), otherwise as few as best-fit decreasing needs. The cap is
    hard: max_tokens must be at least the longest row, which the caller checks.
    """
    assert max(lengths, default=0) <= max_tokens, "a row alone is above the cap"
    order, parts = sorted(range(len(lengths)), key=lambda i: -lengths[i]), []
    if padded:
        for i in order:
            if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= max_tokens:
                parts[-1].append(i)
            else:
                parts.append([i])
    else:
        free = []  # (tokens left, part), ascending: the first that is large enough is the best fit
        for i in order:
            slot = bisect.bisect_left(free, (lengths[i],))
            room, j = free.pop(slot) if slot < len(free) else (max_tokens, len(parts))
            if j == len(parts):
                parts.append([])
            parts[j].append(i)
            bisect.insort(free, (room - lengths[i], j))
        even = balance(lengths, max(len(parts), at_least))  # same count, no part fuller than need be
        if all(sum(lengths[i] for i in part) <= max_tokens for part in even):
            return even
    return parts + [[] for _ in range(at_least - len(parts))]


def split_by_rows(lengths, size, at_least=1):
    """Lists of `size` indices each, rows of like length together (at_least of them: the last ones may be empty)."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    return parts + [[] for _ in range(at_least - len(parts))]


def micro_batches(shares, max_tokens=None, size=None, padded=False, multiple=1):
    """Cuts each rank's share (a list of row lengths) into micro-batches, the same number on every rank, a multiple of
    `multiple`.

    By `size` rows where that is given, else by max_tokens. Equal counts keep collectives in step; a rank with less
    gets smaller or empty micro-batches. A pure function of all lengths, so ranks need not talk to agree.
    Returns, for each rank, a list of lists of indices into its share.
    """

    def split(lengths, at_least):
        if size is not None:
            return split_by_rows(lengths, size, at_least)
        return split_by_tokens(lengths, max_tokens, padded, at_least)

    count = max(len(split(lengths, 1)) for lengths in shares)
    count = -(-count // multiple) * multiple
    return [split(lengths, count) for lengths in shares]


@functools.lru_cache(maxsize=2)
def permutation(n, *key):
    """A permutation of range(n) drawn from the key alone (say seed, step, epoch), the same on every rank."""
    return random.Random(" ".join(map(str, key))).sample(range(n), n)


# ---------------------------------------------------------------------------------------------------------------------
# PPO maths on flat data
# ---------------------------------------------------------------------------------------------------------------------


def values_of_actions(v_T, response_mask_T):
    """Values read from each hidden state -> the value of each action: the state *before* the token, one to the left.

        hidden           h0   h1   h2   h3   h4   h5
        v_T              v0   v1   v2   v3   v4   v5
        response_mask    0    0    1    1    0    1
        result           0    0    v1   v2   0    v4

    The first token of a sequence is never an action, so nothing crosses from one sequence into the next. Logits of a
    categorical value, (T, N), go the same way.
    """
    return torch.where(response_mask_T, v_T.roll(1, 0).movedim(0, -1), 0.0).movedim(-1, 0)


def last_actions(response_mask_T, cu_seqlens):
    """(B,) index of each sequence's last action in the (T,) columns, -1 where it has none."""
    index_T = torch.where(response_mask_T, torch.arange(len(response_mask_T), device=response_mask_T.device), -1)
    last_B = torch.full((len(cu_seqlens) - 1,), -1, device=index_T.device)
    return last_B.scatter_reduce(0, row_of_token(cu_seqlens), index_T, "amax")


def first_actions(response_mask_T, cu_seqlens):
    """(B,) index of each sequence's first action in the (T,) columns, -1 where it has none."""
    last_B = last_actions(response_mask_T, cu_seqlens)
    index_T = torch.arange(len(response_mask_T), device=response_mask_T.device)
    index_T = torch.where(response_mask_T, index_T, len(index_T))
    return last_B.scatter_reduce(0, row_of_token(cu_seqlens), index_T, "amin", include_self=False).minimum(last_B)


def carry_rewards(rewards_T, response_mask_T, cu_seqlens):
    """Moves a reward on a token that is no action to the last action before it, or to the first if there is none.

    An outcome that arrives while a tool speaks was earned by the action that called it; dropped, it would be lost.
    """
    row_T, action_A = row_of_token(cu_seqlens), response_mask_T.nonzero().squeeze(1)
    actions_B = actions_per_row(response_mask_T, cu_seqlens)
    first_B = actions_B.cumsum(0) - actions_B  # index of the row's first action among all
    has_action_T = (actions_B > 0)[row_T]
    owner_T = torch.maximum(response_mask_T.cumsum(0) - 1, first_B[row_T])[has_action_T]
    out_T = torch.zeros_like(rewards_T)
    return out_T.index_add(0, action_A[owner_T], rewards_T[has_action_T])


def gae(rewards_T, values_T, response_mask_T, cu_seqlens, gamma=1.0, lam=1.0, lam_policy=None, bootstrap_B=None):
    """Generalised advantage estimation over the actions of each sequence -> (advantages_T, returns_T) float32.

        delta_k = r_k + gamma V_{k+1} - V_k,    A_k = delta_k + gamma lam A_{k+1}           (1506.02438, eq. 11-16)
        returns = A(lam) + V, advantages = A(lam_policy): decoupled GAE of VC-PPO           (2503.01491, sec. 4.2)

    k counts actions only: observations between them are skipped, their rewards carried. lam_policy: None (same as lam),
    a number, or (B,), see length_adaptive_lam. bootstrap_B: (B,) what stands for all that would come after the last
    action, see bootstrap_values (None: every row ended). Zero where response_mask is false; float64 inside.
    """
    action_A = response_mask_T.nonzero().squeeze(1)
    row_A = row_of_token(cu_seqlens)[action_A]
    last_A = F.pad(row_A.diff() != 0, (0, 1), value=True) if len(row_A) else row_A.bool()
    r_A = carry_rewards(rewards_T, response_mask_T, cu_seqlens)[action_A].double()
    v_A = values_T[action_A].double()
    after_A = bootstrap_B.double()[row_A] if bootstrap_B is not None else torch.zeros_like(v_A)
    delta_A = r_A + gamma * torch.where(last_A, after_A, v_A.roll(-1)) - v_A

    def discounted(lam):
        lam_A = lam.double()[row_A] if isinstance(lam, torch.Tensor) else torch.full_like(v_A, lam)
        return _suffix_sum(delta_A, torch.where(last_A, 0.0, gamma * lam_A))

    to_tokens = lambda x_A: torch.zeros_like(values_T, dtype=torch.float32).index_put((action_A,), x_A.float())
    returns_A = discounted(lam)
    advantages_A = returns_A if lam_policy is None else discounted(lam_policy)
    return to_tokens(advantages_A), to_tokens(returns_A + v_A)


def _suffix_sum(x, decay):
    """y_k = x_k + decay_k y_{k+1} for all k at once, by doubling the reach (Hillis & Steele 1986): log2(len) steps.

    After a round with reach s, x_k sums the terms k .. k+2s-1 and decay_k carries from k to k+2s; decay is 0 at the end
    of a sequence, so nothing crosses it.
    """
    reach = 1
    while reach < len(x) and decay.any():
        ahead_x, ahead_decay = (F.pad(z[reach:], (0, reach)) for z in (x, decay))
        x, decay = x + decay * ahead_x, decay * ahead_decay
        reach *= 2
    return x


def bootstrap_values(batch):
    """(B,) for gae: the last value of rows that were cut off rather than finished, 0 for others and for rows without an
    action. The state after the last action has no value of its own: nothing was sampled from it."""
    last_B = last_actions(batch.response_mask, batch.cu_seqlens)
    return torch.where(batch.truncated & (last_B >= 0), batch.values[last_B], 0.0)


def length_adaptive_lam(response_mask_T, cu_seqlens, alpha):
    """(B,) lam = 1 - 1/(alpha l) for a sequence of l actions, at least 0 (VAPO, 2504.05118, sec. 4.2)."""
    actions_B = actions_per_row(response_mask_T, cu_seqlens).double()
    return (1 - 1 / (alpha * actions_B.clamp(min=1))).clamp(min=0)


def masked_whiten(x_T, mask_T, shift_mean=True, over_ranks=False):
    """(x - mean) / std over the masked entries, of this process or of all ranks together; zero elsewhere.

    The variance is the unbiased one, of n - 1, and 1e-8 is added to it; a single entry has variance 0.
    shift_mean=False adds the mean back.
    """

    def total(x):
        if over_ranks:
            dist.all_reduce(x)
        return x

    x_T = torch.where(mask_T, x_T, 0.0)
    n, s = total(torch.stack([mask_T.sum().double(), x_T.double().sum()]))
    mean = s / n.clamp(min=1)
    var = total(torch.where(mask_T, x_T - mean, 0.0).double().square().sum()) / (n - 1).clamp(min=1)
    white_T = (x_T - mean) * torch.rsqrt(var + 1e-8) + (0.0 if shift_mean else mean)
    return torch.where(mask_T, white_T, 0.0).to(x_T.dtype)


LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def actions_per_row(response_mask_T, cu_seqlens):
    """(B,) int64: actions of each sequence."""
    return F.pad(response_mask_T.cumsum(0), (1, 0))[cu_seqlens.long()].diff()


class LossCounts(NamedTuple):
    """Of a *global* mini-batch: the only denominators of a loss."""

    tokens: int  # actions
    seqs: int  # sequences that have any


def loss_counts(response_mask_T, cu_seqlens):
    """LossCounts of these rows."""
    actions_B = actions_per_row(response_mask_T, cu_seqlens)
    return LossCounts(int(actions_B.sum()), int((actions_B > 0).sum()))


def loss_weights(response_mask_T, cu_seqlens, mode, counts, response_length_limit=None):
    """(T,) weights whose sum with the per-token losses is the loss, whatever part of the mini-batch these rows are.

        token-mean                1 / N_tokens
        seq-mean-token-sum        1 / N_seqs
        seq-mean-token-mean       1 / (N_seqs len_i)                        len_i: actions of the token's sequence
        seq-mean-token-sum-norm   1 / (N_seqs response_length_limit)        (Dr. GRPO's constant, 2503.20783)

    counts: N_tokens and N_seqs of the global mini-batch, at least one each.
    """
    if mode == "token-mean":
        return response_mask_T / counts.tokens
    weights_T = response_mask_T / counts.seqs
    if mode == "seq-mean-token-mean":
        actions_B = actions_per_row(response_mask_T, cu_seqlens).clamp(min=1)
        weights_T = weights_T / actions_B[row_of_token(cu_seqlens)]
    elif mode == "seq-mean-token-sum-norm":
        weights_T = weights_T / response_length_limit
    return weights_T


def value_loss(vpreds_T, values_T, returns_T, response_mask_T, weights_T, cliprange_value=None):
    """Clipped value loss -> (loss, number of actions where clipping decided), both 0-dim tensors.

        L_t = 0.5 max( (v_t - R_t)^2, (clip(v_t, v_old - eps, v_old + eps) - R_t)^2 ),    loss = sum_t w_t L_t

    PPO's clipping carried over to values (Schulman et al.'s code for 1707.06347). cliprange_value None is plain squared
    error. What stands where response_mask is false never enters, not even a NaN.
    """
    clean = lambda x_T: torch.where(response_mask_T, x_T, 0.0)
    v_T, returns_T = clean(vpreds_T), clean(returns_T)
    error_T, clipped = (v_T - returns_T).square(), torch.zeros((), dtype=torch.int64, device=v_T.device)
    if cliprange_value is not None:
        old_T = clean(values_T)
        clipped_T = (torch.clamp(v_T, old_T - cliprange_value, old_T + cliprange_value) - returns_T).square()
        clipped = (clipped_T > error_T).sum()
        error_T = torch.maximum(error_T, clipped_T)
    return 0.5 * (weights_T * error_T).sum(), clipped


def policy_loss(
    log_probs_T, old_log_probs_T, advantages_T, response_mask_T, weights_T, clip_low=0.2, clip_high=0.2, clip_dual=None
):
    """PPO's clipped objective -> (loss, actions where clipping decided, where the dual clip did), 0-dim tensors.

        r_t = pi(a_t) / pi_old(a_t),  L_t = max( -r_t A_t, -clip(r_t, 1 - low, 1 + high) A_t ),  loss = sum_t w_t L_t

    1707.06347, eq. 7; low and high apart: DAPO, 2503.14476, eq. 10. clip_dual c > 1 bounds what a bad action can cost:
    where A_t < 0, L_t is at most -c A_t (1912.09729, eq. 5). log r is kept within +-20. What stands where
    response_mask is false never enters, not even a NaN.
    """
    clean = lambda x_T: torch.where(response_mask_T, x_T, 0.0)
    ratio_T = (clean(log_probs_T) - clean(old_log_probs_T)).clamp(-20, 20).exp()
    a_T, dual = clean(advantages_T), torch.zeros((), dtype=torch.int64, device=ratio_T.device)
    free_T, clipped_T = -ratio_T * a_T, -ratio_T.clamp(1 - clip_low, 1 + clip_high) * a_T
    loss_T, clipped = torch.maximum(free_T, clipped_T), (clipped_T > free_T).sum()
    if clip_dual is not None:
        bound_T = torch.where(a_T < 0, -clip_dual * a_T, math.inf)
        dual = (loss_T > bound_T).sum()
        loss_T = torch.minimum(loss_T, bound_T)
    return (weights_T * loss_T).sum(), clipped, dual


def truncated_ratio(log_probs_T, rollout_log_probs_T, cap):
    """(T,) weights min(pi / mu, cap) of tokens that were drawn from mu, the rollout engine, and are learned as if from
    pi, the actor with the same weights (truncated importance sampling; rho of IMPALA, 1802.01561, section 4.1)."""
    return (log_probs_T - rollout_log_probs_T).clamp(-20, 20).exp().clamp(max=cap)


def hl_gauss_targets(returns_T, low, high, bins):
    """(T,) returns -> (T, N) probabilities of the N bins that cut [low, high] evenly, with edges e_0 .. e_N.

        p_i = (Phi(e_i+1) - Phi(e_i)) / (Phi(e_N) - Phi(e_0)),    Phi: CDF of Normal(R, sigma), sigma = 0.75 bin widths

    A return outside is moved to the end of the range. HL-Gauss, Imani & White 1806.04613; sigma, and values of deep RL
    learned this way: Farebrother et al. 2403.03950.
    """
    edge_N = torch.linspace(low, high, bins + 1, device=returns_T.device)
    sigma = 0.75 * (high - low) / bins
    cdf_TN = torch.erf((edge_N - returns_T.clamp(low, high)[:, None]) / (sigma * math.sqrt(2)))
    return cdf_TN.diff() / (cdf_TN[:, -1:] - cdf_TN[:, :1])


def hl_gauss_values(logits_TN, low, high):
    """(T, N) logits of the bins -> (T,) values: the mean of the bins' centres, v_t = sum_i softmax(logits)_i c_i."""
    half = (high - low) / logits_TN.shape[1] / 2
    centre_N = torch.linspace(low + half, high - half, logits_TN.shape[1], device=logits_TN.device)
    return (logits_TN.softmax(1) * centre_N).sum(1)


def hl_gauss_loss(logits_TN, returns_T, response_mask_T, weights_T, low, high):
    """Cross-entropy of a categorical value with the Gaussian around the return -> loss, a 0-dim tensor.

        L_t = -sum_i p_i(R_t) log softmax(logits_t)_i,    loss = sum_t w_t L_t

    p: hl_gauss_targets. Old values do not enter: clipping has no counterpart here. What stands where response_mask is
    false never enters, not even a NaN.
    """
    returns_T = torch.where(response_mask_T, returns_T, 0.0)
    logits_TN = torch.where(response_mask_T[:, None], logits_TN, 0.0)
    p_TN = hl_gauss_targets(returns_T, low, high, logits_TN.shape[1])
    return -(weights_T * (p_TN * logits_TN.log_softmax(1)).sum(1)).sum()


def kl_penalty(log_probs_T, ref_log_probs_T, kind):
    """Per-token estimate of KL(policy || reference) from the log-probs of the chosen tokens.

        k1 (kl)          log p - log q
        abs              |log p - log q|
        k2 (mse)         (log p - log q)^2 / 2
        k3 (low_var_kl)  q/p - 1 - log(q/p), with log(q/p) clamped to +-20 and the result to +-10
        <kind>+          that value, with the gradient of k2, which is the true gradient of the KL: straight-through

    Schulman, "Approximating KL divergence" (2020); names in brackets are verl's.
    """
    if kind.endswith("+"):
        k2_T = kl_penalty(log_probs_T, ref_log_probs_T, "k2")
        return kl_penalty(log_probs_T, ref_log_probs_T, kind[:-1]).detach() + k2_T - k2_T.detach()
    log_ratio_T = log_probs_T - ref_log_probs_T
    if kind in ("k1", "kl"):
        return log_ratio_T
    if kind == "abs":
        return log_ratio_T.abs()
    if kind in ("k2", "mse"):
        return 0.5 * log_ratio_T.square()
    if kind in ("k3", "low_var_kl"):
        log_inverse_T = (-log_ratio_T).clamp(-20, 20)
        return (log_inverse_T.exp() - log_inverse_T - 1).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator {kind!r}: k1, k2, k3 or abs, each also with a '+'")


def next_kl_coef(coef, kl, n, target=None, horizon=10_000):
    """The KL coefficient after a batch of n rows with mean divergence kl (Ziegler et al. 1909.08593, sec. 2.2).

    target None keeps it fixed; otherwise coef *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon.
    """
    if target is None:
        return coef
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * n / horizon)


def moments(values_T, returns_T, mask_T):
    """(5,) float64 sums over the masked tokens: n, R, R^2, (R - V), (R - V)^2. Add them up over ranks, then divide."""
    r, e = returns_T[mask_T].double(), (returns_T[mask_T].double() - values_T[mask_T].double())
    return torch.stack(
        [torch.tensor(float(len(r)), device=r.device, dtype=r.dtype), r.sum(), (r * r).sum(), e.sum(), (e * e).sum()]
    )


def batch_metrics(batch):
    """What a batch says before it is learned: values and returns of its actions, and how far they agree."""
    metrics, mask = {}, batch.response_mask
    for name in ("values", "returns") if mask.any() else ():
        x = getattr(batch, name)[mask].double()
        metrics |= {f"critic/{name}_mean": x.mean(), f"critic/{name}_std": x.std(correction=0)}
        metrics |= {f"critic/{name}_min": x.min(), f"critic/{name}_max": x.max()}
    return metrics | {"critic/explained_var": explained_variance(moments(batch.values, batch.returns, mask))}


ROUNDING = 1e-9  # a variance of so small a part of the mean square is that of numbers which are meant to be equal


def explained_variance(sums):
    """1 - Var(R - V) / Var(R) from `moments`: 1 is perfect, 0 as good as a constant, NaN if all returns are equal, up
    to rounding of them or, for gae adds and takes them away again, of the values."""
    n, r, rr, e, ee = (float(x) for x in sums)
    if n == 0 or (variance := rr / n - (r / n) ** 2) <= ROUNDING * (rr + ee) / n:
        return math.nan
    return 1 - (ee / n - (e / n) ** 2) / variance


def auc(scores, labels):
    """Area under the ROC curve: the chance that a 1 scores above a 0, ties counting half (Mann & Whitney 1947).

    (N,) scores, (N,) labels of 0 and 1 -> float; NaN unless both labels occur and every score is finite.
    """
    positive = labels > 0.5
    n1, n0 = int(positive.sum()), int((~positive).sum())
    if n1 == 0 or n0 == 0 or not scores.isfinite().all():
        return math.nan
    _, tie, count = scores.double().unique(return_inverse=True, return_counts=True)
    mean_rank = count.cumsum(0).double() - (count - 1) / 2  # ranks from 1, ties share theirs
    return float((mean_rank[tie][positive].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


# ---------------------------------------------------------------------------------------------------------------------
# Attention over packed rows: one function for every model, registered with transformers' attention interface
# ---------------------------------------------------------------------------------------------------------------------

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

VARLEN_GROUPS_HEADS = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
KERNELS = ("auto", "flash", "varlen", "sdpa", "eager")


class Row(NamedTuple):
    """Where the sequences of a packed row lie, for queries and for the keys they see. With fewer queries than keys the
    queries are the last of their sequence (causal attention aligned at the end)."""

    runs: list  # (first query, queries, first key, keys, count): neighbours of equal lengths are one dense call
    cu_q: torch.Tensor  # (B+1,) int32, on the device
    cu_k: torch.Tensor
    longest_q: int
    longest_k: int
    kernel: str  # what the user asks for, one of KERNELS


def pack_row(lengths, device, kernel="auto", key_lengths=None):
    """Row of sequences of these lengths end to end, and of these numbers of keys (None: the same)."""
    keys, runs, q, k = lengths if key_lengths is None else key_lengths, [], 0, 0
    for n, m in zip(lengths, keys, strict=True):
        if runs and runs[-1][1] == n and runs[-1][3] == m:
            runs[-1] = (*runs[-1][:4], runs[-1][4] + 1)
        else:
            runs.append((q, n, k, m, 1))
        q, k = q + n, k + m
    cu_q = cumulative(torch.tensor(lengths)).to(device, non_blocking=True)
    cu_k = cu_q if keys == lengths else cumulative(torch.tensor(keys)).to(device, non_blocking=True)
    return Row(runs, cu_q, cu_k, max(lengths), max(keys), kernel)


class Pack:
    """The packed row in work, read by packed_attention in every layer. Set before a forward and left alone until its
    backward is over, since activation checkpointing runs the forward again in there."""

    row = None  # a Row: the whole of it, before it is sliced over sequence-parallel ranks
    group = None  # sequence-parallel group, or None
    used = None  # what the last call took
    windows = set()  # the sliding windows this row's layers came with


def set_pack(lengths, device, group=None, kernel="auto"):
    """Declares the next forward's row: sequences of these lengths end to end."""
    Pack.row, Pack.group, Pack.windows = pack_row(lengths, device, kernel), group, set()


def packed_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    sliding_window=None,
    softcap=None,
    is_causal=None,
    s_aux=None,
    **kwargs,
):
    """Causal attention within each sequence of a packed row: q (1,H,T,D), k v (1,K,T,D) -> (1,T,H,D), None.

    The signature is transformers' AttentionInterface. With a sequence-parallel group each rank comes with its slice
    of the row and all heads, computes all of the row for its slice of the heads, and leaves as it came
    (DeepSpeed-Ulysses, 2309.14509); no model code knows of it.
    """
    assert not dropout, "a critic has no dropout: with it the same batch would not give the same update"
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is not None or not causal or kwargs.get("position_bias") is not None:
        raise UserError(
            f"--use-remove-padding: {type(module).__name__} asks for more than causal attention within a row "
            "(a mask, a bias or attention to later tokens), which packing would drop; add --no-use-remove-padding"
        )
    Pack.windows.add(sliding_window)
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary tables in float32 make them wider
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    p = dist.get_world_size(Pack.group) if Pack.group is not None else 1
    if p > 1:
        repeat = p // math.gcd(key.shape[1], p)  # fewer kv heads than ranks: each is held by several
        key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
        query, key, value = (SequenceToHeads.apply(x, Pack.group) for x in (query, key, value))
        s_aux = s_aux.chunk(p)[dist.get_rank(Pack.group)] if s_aux is not None else None
    Pack.used = choose_kernel(Pack.row.kernel, query, value, softcap, s_aux)
    out = ATTENTION[Pack.used](Pack.row, query, key, value, scale, sliding_window, softcap, s_aux)
    if p > 1:
        out = HeadsToSequence.apply(out, Pack.group)
    return out.transpose(1, 2), None


transformers.AttentionInterface.register("packed", packed_attention)


def choose_kernel(kernel, q, v, softcap=None, sinks=None):
    """The kernel of this call: the one asked for, or with "auto" the fastest that serves this model here."""
    half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability() >= (8, 0)
    half = half and q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    can = {
        "flash": half and flash_attn_varlen_func is not None and sinks is None,
        "varlen": half and varlen_attn is not None and sinks is None and not softcap,
        "sdpa": not softcap and sinks is None,
        "eager": True,
    }
    best = next(name for name in can if can[name])
    if kernel == "auto" or can[kernel]:
        return best if kernel == "auto" else kernel
    if kernel == "flash" and flash_attn_varlen_func is None:
        raise UserError(f"--attn-implementation flash: flash-attn is not installed; auto would take {best}")
    raise UserError(
        f"--attn-implementation {kernel}: cannot serve this model here ({q.dtype}, {q.device.type}, head size "
        f"{q.shape[-1]}, soft cap {softcap}, sinks {sinks is not None}); auto would take {best}"
    )


def flat(*tensors):
    """(1,H,T,D) -> (T,H,D) each, as the variable-length kernels want them."""
    return (x[0].transpose(0, 1).contiguous() for x in tensors)


def repeat_heads(x, heads):
    """(..., K, L, D) -> (..., heads, L, D): every key and value head as often as query heads share it."""
    return x.repeat_interleave(heads // x.shape[-3], -3)


def flash_attention(row, q, k, v, scale, window=None, softcap=None, sinks=None):
    """(1,H,T,D) attention within the sequences of the row by flash-attn, which aligns queries and keys at the end."""
    out_THD = flash_attn_varlen_func(
        *flat(q, k, v), row.cu_q, row.cu_k, row.longest_q, row.longest_k, softmax_scale=scale, causal=True,
        window_size=(window - 1, 0) if window else (-1, -1), softcap=softcap or 0.0,
    )  # fmt: skip
    return out_THD.transpose(0, 1)[None]


def varlen_attention(row, q, k, v, scale, window=None, softcap=None, sinks=None):
    """The same by torch's own variable-length attention."""
    grouped = {"enable_gqa": True}
    if not VARLEN_GROUPS_HEADS:  # torch 2.11
        k, v, grouped = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), {}
    out_THD = varlen_attn(
        *flat(q, k, v), row.cu_q, row.cu_k, row.longest_q, row.longest_k, scale=scale,
        window_size=(window - 1, 0) if window else (-1, 0), **grouped,  # (-1, 0) is its way to say causal
    )  # fmt: skip
    return out_THD.transpose(0, 1)[None]


def dense_attention(dense, row, q, k, v, *options):
    """The same by a function of (N,H,L,D): one call for each run of sequences of equal lengths."""
    queries, keys = ([run[i] * run[4] for run in row.runs] for i in (1, 3))  # of each run
    pieces = zip(q[0].split(queries, 1), k[0].split(keys, 1), v[0].split(keys, 1), strict=True)
    outs = []  # split: the backward of a slice would fill the whole row with zeros, each time
    for (*_, count), q_k_v in zip(row.runs, pieces, strict=True):
        q_k_v = (x.unflatten(1, (count, -1)).transpose(0, 1) for x in q_k_v)
        outs.append(dense(*q_k_v, *options).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).transpose(0, 1)[None]


def sdpa_attention(q, k, v, scale, window=None, softcap=None, sinks=None):
    """(N,H,L,D) attention of N sequences of one length by torch's fused kernel; a mask only where a window bites, or
    where the first queries are not there."""
    mask, length = None, k.shape[2]
    if (window and length > window) or q.shape[2] < length:
        mask = causal_mask(q.shape[2], length, window, q.device)
    if q.is_cuda:  # the kernels left to float32 there know no grouped heads
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def eager_attention(q, k, v, scale, window=None, softcap=None, sinks=None):
    """(N,H,L,D) attention written out, for soft-capped scores (Gemma 2) and attention sinks (gpt-oss)."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores_NHLL = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores_NHLL = softcap * torch.tanh(scores_NHLL / softcap)
    scores_NHLL = scores_NHLL.masked_fill(~causal_mask(q.shape[2], k.shape[2], window, q.device), -math.inf)
    if sinks is not None:  # one more column a head, which takes probability and gives no value
        column = sinks.view(1, -1, 1, 1).expand(*scores_NHLL.shape[:3], 1).to(scores_NHLL.dtype)
        scores_NHLL = torch.cat([scores_NHLL, column], -1)
    probs_NHLL = scores_NHLL.softmax(-1, dtype=torch.float32)[..., : k.shape[2]].to(q.dtype)
    return probs_NHLL @ v


ATTENTION = {
    "flash": flash_attention,
    "varlen": varlen_attention,
    "sdpa": functools.partial(dense_attention, sdpa_attention),
    "eager": functools.partial(dense_attention, eager_attention),
}


def causal_mask(queries, keys, window, device):
    """(queries, keys) bool: the query at place i sees key j if j <= i and, with a window, i - j < window. Queries stand
    at the last places."""
    j = torch.arange(keys, device=device)
    back = j[keys - queries :, None] - j
    return (back >= 0) & (back < (window or keys))


def _all_to_all(x, group, to_heads):
    """(1, H, T/p, D) <-> (1, H/p, T, D): trades a slice of the sequence for a slice of the heads, or back."""
    p, (_, h, t, d) = dist.get_world_size(group), x.shape
    if to_heads:
        send = x.reshape(p, h // p, t, d).contiguous()
    else:
        send = x.reshape(h, p, t // p, d).transpose(0, 1).contiguous()
    out = torch.empty_like(send)
    dist.all_to_all_single(out, send, group=group)
    return out.transpose(0, 1).reshape(1, h // p, p * t, d) if to_heads else out.reshape(1, p * h, t // p, d)


class SequenceToHeads(torch.autograd.Function):
    """(1, H, T/p, D) -> (1, H/p, T, D)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _all_to_all(x, group, to_heads=True)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, ctx.group, to_heads=False), None


class HeadsToSequence(torch.autograd.Function):
    """(1, H/p, T, D) -> (1, H, T/p, D)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _all_to_all(x, group, to_heads=False)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, ctx.group, to_heads=True), None


class GatherSlices(torch.autograd.Function):
    """(T/p,) slices of the ranks of a group -> (T,) on all of them. Every rank then computes the *same* loss from the
    whole, so backward hands each rank the gradient of its own slice and sums nothing."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, slices = group, [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(slices, x.contiguous(), group=group)
        return torch.cat(slices)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def slice_row(decoder, args, kwargs):
    """A forward pre-hook: each rank of a sequence-parallel group goes on with its slice of the packed row.

    It stands where the decoder begins, behind a vision tower, which all ranks of the group run on all images alike.
    """
    if Pack.group is None:
        return None
    size, rank = dist.get_world_size(Pack.group), dist.get_rank(Pack.group)
    whole = {key: kwargs.get(key) for key in ("input_ids", "inputs_embeds", "visual_pos_masks")}
    sliced = {key: x.chunk(size, 1)[rank] for key, x in whole.items() if x is not None}
    sliced["position_ids"] = kwargs["position_ids"].chunk(size, -1)[rank]
    if "visual_pos_masks" in sliced:  # Qwen3-VL's deepstack: a row of features for each token of an image
        counts = [int(mask.sum()) for mask in kwargs["visual_pos_masks"].chunk(size, 1)]
        sliced["deepstack_visual_embeds"] = [x.split(counts)[rank] for x in kwargs["deepstack_visual_embeds"]]
    return args, {**kwargs, **sliced}


def influence(forward, vocab_size, n):
    """How far tokens reach where they must not, relative to the size of the hidden states: 0.0 in a sound model, inf in
    one whose hidden states are not finite.

    forward(ids_T, lengths) -> (T, D) of two sequences of n tokens. The second half of the first one changes: neither
    the tokens before it may notice (they are causal) nor the other sequence. A model with state that runs through a
    packed row (linear attention, convolutions), or one that ignores the attention function, gives itself away here.
    """
    ids_T = torch.tensor([(5 * i * i + 7 * i + 1) % vocab_size for i in range(2 * n)])
    changed_T, others_T = ids_T.clone(), torch.ones(2 * n, dtype=torch.bool)
    changed_T[n // 2 : n] = (ids_T[n // 2 : n] + vocab_size // 2) % vocab_size
    others_T[n // 2 : n] = False
    before_TD, after_TD = (forward(x_T, [n, n]).cpu()[others_T].float() for x_T in (ids_T, changed_T))
    error = relative_error(after_TD, before_TD)
    return error if math.isfinite(error) else math.inf


def packing_problem(backbone, flops):
    """Why packed rows might lose what this model's own attention does, in words, or "": what only long rows show, and
    is therefore looked up. After a forward over packed rows."""
    inputs, config = inspect.signature(backbone.forward).parameters, backbone.config
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    marks_images = hasattr(config, "vision_config") and inputs.keys() & {"token_type_ids", "mm_token_type_ids"}
    _, (_, window, sliding) = flops.per_pair
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        return f"has layers of {', '.join(sorted(unknown))}, which packed rows might lose"
    if marks_images and not reads_images(config):
        return "may let the tokens of an image see later ones, which packed rows would lose"
    if sliding and window not in Pack.windows:
        return f"does not tell its attention the sliding window of {window}, which packed rows would lose"
    return ""


def relative_error(x_TD, reference_TD):
    """Difference of hidden states relative to their norm, mean over tokens: in half precision a mixture of experts may
    send single tokens elsewhere for no more than rounding."""
    return float(((x_TD - reference_TD).norm(dim=-1) / reference_TD.norm(dim=-1).clamp(min=1e-12)).mean())


# ---------------------------------------------------------------------------------------------------------------------
# FLOPs of a value model: no vocabulary head, causal attention, active experts only
# ---------------------------------------------------------------------------------------------------------------------

# dense bf16 TFLOP/s of one device, from the vendors' data sheets; the first whose words are in the device's name counts
PEAK_TFLOPS = {
    "H100 PCIE": 756, "H100 NVL": 835, "H200 NVL": 835,
    "GB200": 2250, "B200": 2250, "H200": 989, "GH200": 989, "H800": 989, "H100": 989, "H20": 148, "A100": 312,
    "A800": 312, "MI300X": 1307, "L40S": 362, "L20": 119.5, "A40": 149.7, "RTX 4090": 165, "L4": 121, "A10": 125,
}  # fmt: skip


def device_peak_flops(device):
    """Dense bf16 FLOP/s of this device, or None if the table does not know it (CPUs among them)."""
    if device.type != "cuda" or "MIG" in torch.cuda.get_device_name(device):
        return None
    words = torch.cuda.get_device_name(device).upper().replace("-", " ").split()
    name = f" {' '.join(words)} "
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS.items() if f" {key} " in name), None)


@dataclasses.dataclass(frozen=True)
class FlopsModel:
    """What one token and one pair of tokens cost, forward only."""

    per_token: float  # 2 FLOPs for each weight a token is multiplied with
    per_pair: tuple  # ((FLOPs of one query-key pair, window or None, layers), ...)

    def forward_flops(self, length):
        """FLOPs of one forward over a sequence of this many tokens; training costs three times that."""
        total = self.per_token * length
        for flops, window, layers in self.per_pair:
            w = min(window or length, length)  # query i sees min(i + 1, window) keys
            total += layers * flops * (w * (w + 1) / 2 + (length - w) * w)
        return total


def flops_model(model, config):
    """FlopsModel of a value model (meta tensors do) and its transformers config.

    Weights: every matrix but embeddings; experts count as top_k of the E there are. Attention: each pair costs
    2 H (D_qk + D_v) FLOPs, scores and weighted sum. A vision tower is left out: a row with images costs more than this
    says, and its MFU reads too low.
    """
    config = config.get_text_config()
    tower = {
        id(p)
        for name, module in model.named_modules()
        if name.endswith(("visual", "vision_tower"))
        for p in module.parameters()
    }
    attribute = lambda *names: next((getattr(config, n) for n in names if getattr(config, n, None)), None)
    experts, top_k = (
        attribute("num_experts", "num_local_experts", "n_routed_experts"),
        attribute("num_experts_per_tok", "moe_topk", "top_k_experts"),
    )
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = 0.0
    for name, p in model.named_parameters():
        if p.ndim > 1 and id(p) not in embeddings | tower:
            weights += p.numel() * (top_k / experts if experts and top_k and ".experts." in name else 1)
    layers, heads = attribute("num_hidden_layers") or 0, attribute("num_attention_heads") or 1
    head_dim = attribute("head_dim") or config.hidden_size // heads
    qk, v = attribute("qk_head_dim") or head_dim, attribute("v_head_dim") or head_dim
    if attribute("qk_nope_head_dim"):  # multi-head latent attention: the rotary part rides beside the other
        qk = config.qk_nope_head_dim + config.qk_rope_head_dim
    kinds = attribute("layer_types") or ["full_attention"] * layers
    window = attribute("sliding_window")
    if not attribute("layer_types") and window and getattr(config, "use_sliding_window", True):
        kinds = ["sliding_attention"] * layers
    sliding, full = (sum(word in kind for kind in kinds) for word in ("sliding", "full"))
    pair = 2 * heads * (qk + v)
    return FlopsModel(2 * weights, ((pair, None, full), (pair, window, sliding)))


# ---------------------------------------------------------------------------------------------------------------------
# What the user sees, and what is kept of a run
# ---------------------------------------------------------------------------------------------------------------------


class Logger:
    """metrics.jsonl, TensorBoard and, where asked for, wandb behind one log(); on ranks other than 0 it does nothing.

    Flags are kept in run.json, beside versions, machine, command and commit. A run that goes on at first_step from a
    checkpoint of this out_dir goes on in the same files; later steps are dropped from them, and an evaluation at
    first_step that is made again. Any other run starts anew, and puts aside checkpoints and rollouts that are there.
    """

    def __init__(self, run, first_step=0):
        self.sinks, self.closers = [], []
        if RANK != 0:
            return
        from torch.utils.tensorboard import SummaryWriter

        out_dir = run.out_dir
        os.makedirs(out_dir, exist_ok=True)
        own, source = os.path.realpath(os.path.join(out_dir, "checkpoints")), os.path.realpath(run.resume or "")
        if os.path.dirname(source) != own:
            first_step = 0  # as far as these files go
        put_aside(out_dir, first_step)
        settings = {**dataclasses.asdict(run), "run": describe_run()}
        with open(os.path.join(out_dir, "run.json"), "w") as file:
            json.dump(settings, file, indent=1, default=str)
        metrics_path, board_path = os.path.join(out_dir, "metrics.jsonl"), os.path.join(out_dir, "tensorboard")
        if not first_step:
            shutil.rmtree(board_path, ignore_errors=True)
        again = lambda row: evaluates(run, first_step) and any(key.startswith("eval/") for key in row)
        before = lambda row: row["step"] < first_step or (row["step"] == first_step and not again(row))
        replace_lines(metrics_path, [row for row in read_metrics(metrics_path) if before(row)] if first_step else [])
        metrics_file = open(metrics_path, "a", buffering=1)
        board = SummaryWriter(board_path, purge_step=first_step + 1 if first_step else None)
        self.sinks.append(lambda step, metrics: metrics_file.write(json.dumps({"step": step, **metrics}) + "\n"))
        self.sinks.append(
            lambda step, metrics: [board.add_scalar(k, v, step) for k, v in metrics.items() if v is not None]
        )
        self.sinks.append(lambda step, metrics: board.flush())  # by itself it keeps two minutes in memory
        self.closers += [metrics_file.close, board.close]
        if run.wandb_project:
            import wandb

            wandb_run = wandb.init(project=run.wandb_project, config=settings, dir=out_dir)
            self.sinks.append(lambda step, metrics: wandb_run.log(metrics, step=step))
            self.closers.append(wandb_run.finish)

    def log(self, step, metrics):
        """metrics: dict of name -> number; what is not finite is logged as null."""
        metrics = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        for sink in self.sinks:
            sink(step, metrics)

    def close(self):
        """Flushes everything, which the os._exit at the end of a run would not."""
        for close in self.closers:
            close()


def evaluates(run, step):
    """Whether a run evaluates when it has made so many steps."""
    return step in (0, run.steps) or bool(run.eval_every and step % run.eval_every == 0)


def read_metrics(path):
    """The rows of a metrics.jsonl, without a last line that a crash cut short; no file has no rows."""
    rows = []
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        for line in file:
            rows.append(json.loads(line))
    return rows


def replace_lines(path, rows):
    """Writes a JSONL file anew, at once: after a crash it is the old one or the new one."""
    with open(f"{path}.tmp", "w") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
    os.replace(f"{path}.tmp", path)


def describe_run():
    """Versions, machine, command and commit of this run, as a dict."""
    here, commit = os.path.dirname(os.path.abspath(__file__)), None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, no repository
        commit = subprocess.check_output(
            ["git", "-C", here, "rev-parse", "HEAD"], stderr=subprocess.DEVNULL, text=True
        ).strip()
    return {
        "command": sys.argv,
        "commit": commit,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "world_size": WORLD_SIZE,
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"cpu, {torch.get_num_threads()} threads",
        "time": datetime.datetime.now().isoformat(timespec="seconds"),
    }


def measured_update(update, batch, device, epochs, flops, peak):
    """metrics of update(batch), what it took and what the batch says, as floats equal on all ranks (a collective).

    flops: of all ranks together, for all epochs. peak: FLOP/s of one device, or None if that is not known.
    """
    start = time.perf_counter()
    with CommTimer() as comm:
        metrics = update(batch)
    spent = torch.tensor([time.perf_counter() - start, peak_memory_gib(device)])
    dist.all_reduce(spent, dist.ReduceOp.MAX)  # of the slowest, and of the fullest rank
    seconds, memory = spent.tolist()
    metrics |= batch_metrics(batch)
    metrics |= {
        "perf/tokens_per_second": epochs * len(batch.input_ids) / seconds,
        "perf/mfu": flops / (seconds * WORLD_SIZE * peak) if peak else math.nan,
        "perf/peak_memory_gib": memory,
        "perf/time_update": seconds,
    }
    if device.type == "cpu":
        wait = torch.tensor(comm.seconds / WORLD_SIZE)
        dist.all_reduce(wait)
        metrics |= {"perf/time_comm_wait": wait, "perf/time_compute": seconds - wait}
    return {name: float(value) for name, value in metrics.items()}


def number(x, form):
    """x in the given format, or -- where there is no number yet."""
    return "--" if x is None or math.isnan(x) else format(x, form)


def step_line(step, steps, metrics):
    """One aligned line that tells how a step went, in units a person reads."""
    m, mfu = metrics, metrics["perf/mfu"] * 100
    eta = datetime.timedelta(seconds=round(m["perf/time_step"] * (steps - step)))
    skipped = f"  skipped {m['critic/skipped_steps']:.0f}" if m["critic/skipped_steps"] else ""
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {number(m['critic/vf_loss'], '.4f')}"
        f"  explained var {number(m['critic/explained_var'], '.3f'):>6}  |g| {number(m['critic/grad_norm'], '.3g'):>7}"
        f"  lr {number(m['critic/lr'], '.1e')}  {m['perf/tokens_per_second']:>7,.0f} tok/s"
        f"  mfu {number(mfu, '.1f')} %  {m['perf/peak_memory_gib']:.1f} GiB  eta {eta}{skipped}"
    )


def eval_line(metrics):
    """One line on how good the values of held-out rows are."""
    m = metrics
    return (
        f"held out   explained var {number(m['eval/explained_var'], '.3f')}   loss {m['eval/vf_loss']:.4f} "
        f"(best constant {m['eval/constant_loss']:.4f})   AUC of the last value {number(m['eval/auc'], '.3f')}"
    )


CURVES = (  # of value pretraining: title, scale, lines as metric, label and style
    (
        "explained variance (1: perfect, 0: a constant)", "linear",
        (("critic/explained_var", "rows of the step", "-"), ("eval/explained_var", "held out", "o-")),
    ),
    (
        "value loss", "log",
        (
            ("critic/vf_loss", "rows of the step", "-"), ("eval/vf_loss", "held out", "o-"),
            ("eval/constant_loss", "best constant, held out", "k:"),
        ),
    ),
)  # fmt: skip


def plot_curves(out_dir, curves=CURVES):
    """curves.png from metrics.jsonl, a panel for each of `curves`."""
    if RANK != 0:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(os.path.join(out_dir, "metrics.jsonl"))
    figure, panels = pyplot.subplots(1, len(curves), figsize=(4.8 * len(curves), 3.6))
    figure.subplots_adjust(0.15 / len(curves), 0.14, 1 - 0.03 / len(curves), 0.91, 0.25)
    for panel, (title, scale, lines) in zip(panels, curves, strict=True):
        for name, label, style in lines:
            points = {row["step"]: row[name] for row in rows if row.get(name) is not None}
            if points:
                panel.plot(points.keys(), points.values(), style, label=label, alpha=0.6 if style == "-" else 1.0)
        panel.set(title=title, xlabel="step", yscale=scale)
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend()
        low, high = panel.get_ylim()
        if title.startswith("explained variance") and low < -0.5 < high:  # it may begin far below
            panel.set_ylim(bottom=-0.5)
    figure.savefig(os.path.join(out_dir, "curves.png"), dpi=120)


def saved_line(run, first_step, *files):
    """The last line of a run: what it leaves."""
    made = [f"checkpoints/step_{run.steps}"] * (run.steps > first_step)
    return f"saved      {run.out_dir}: {', '.join([*made, *files, 'curves.png', 'metrics.jsonl', 'tensorboard'])}"


def progress(items, what):
    """A bar over `items` on rank 0 of a terminal, shown only if the work takes longer than a few seconds."""
    return tqdm(items, desc=what, delay=3, leave=False, disable=True if RANK else None, dynamic_ncols=True)


# ---------------------------------------------------------------------------------------------------------------------
# What the critic learned: statistics of its values, a page to look at them, and a check of the rows before training
# ---------------------------------------------------------------------------------------------------------------------


def prompts_of(rows):
    """B keys: the tokens and images that stand before each row's first action."""
    ids, ends, images = rows.input_ids.numpy(), rows.cu_seqlens[1:].long(), rows.multi_modal_inputs or [{}] * len(rows)
    first_B = first_actions(rows.response_mask, rows.cu_seqlens)
    first_B = torch.where(first_B < 0, ends, first_B).tolist()
    starts = rows.cu_seqlens[:-1].tolist()
    return [(ids[a:b].tobytes(), str(x.get("images"))) for a, b, x in zip(starts, first_B, images, strict=True)]


def prompt_groups(rows):
    """(B,) int64: which prompt each row answers, numbered from 0 as they come."""
    numbers = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in prompts_of(rows)])


def places_of_actions(response_mask_T, cu_seqlens):
    """(A,) float64: where each action stands among those of its row, from 0 (the first) to 1 (the last)."""
    count_B, row_A = actions_per_row(response_mask_T, cu_seqlens), row_of_token(cu_seqlens)[response_mask_T]
    index_A = torch.arange(len(row_A)) - (count_B.cumsum(0) - count_B)[row_A]
    return index_A.double() / (count_B[row_A] - 1).clamp(min=1)


def explained_variance_by(values_A, returns_A, group_A, n):
    """(n,) float64: 1 - Var(R - V) / Var(R) inside each of n groups; NaN where a group's returns are all equal."""
    r_A, e_A = returns_A.double(), returns_A.double() - values_A.double()
    sums = torch.stack([torch.ones_like(r_A), r_A, r_A * r_A, e_A, e_A * e_A], 1)
    sums = torch.zeros(n, 5, dtype=torch.float64).index_add(0, group_A, sums)
    return torch.tensor([explained_variance(of_group) for of_group in sums.tolist()], dtype=torch.float64)


def less_mean_of_group(x_N, group_N):
    """(N,) float64: each number less the mean of its group."""
    count_G = group_N.bincount()
    mean_G = torch.zeros(len(count_G), dtype=torch.float64).index_add(0, group_N, x_N.double()) / count_G
    return x_N.double() - mean_G[group_N]


def equal_parts(x_N, k):
    """Numbers cut into k groups of about equal size, fewer where many are equal, for those stay together
    -> ((N,) int64 group, [(least, most)] of each)."""
    edges = x_N.sort().values[[i * len(x_N) // k for i in range(1, k)]]
    _, group_N = torch.bucketize(x_N, edges, right=True).unique(return_inverse=True)
    parts = [x_N[group_N == g] for g in range(int(group_N.max()) + 1)]
    return group_N, [(part.min().item(), part.max().item()) for part in parts]


def calibration(values_N, labels_N, bins=15):
    """(bins, 3) float64: mean value, part of ones and count, of what falls into each of `bins` equal parts of [0, 1].

    Values are taken for chances, those outside for 0 or 1. Fifteen parts of equal width: Guo et al. 1706.04599.
    """
    p_N, ones_N = values_N.double().clamp(0, 1), torch.ones(len(values_N), dtype=torch.float64)
    part_N = (p_N * bins).long().clamp(max=bins - 1)
    sums = torch.zeros(bins, 3, dtype=torch.float64)
    sums.index_add_(0, part_N, torch.stack([p_N, labels_N.double(), ones_N], 1))
    return torch.cat([sums[:, :2] / sums[:, 2:], sums[:, 2:]], 1)


def calibration_error(bins_M3):
    """Expected calibration error from `calibration`: mean distance of chance and frequency, weighted by count."""
    chance, frequency, count = bins_M3[bins_M3[:, 2] > 0].unbind(1)
    return float((count * (chance - frequency).abs()).sum() / count.sum())


def brier(values_N, labels_N):
    """Mean squared distance of the chance and what happened, 0 or 1 (Brier 1950, for one of the two classes)."""
    return float((values_N.double().clamp(0, 1) - labels_N.double()).square().mean())


def ceiling(returns_B, group_B):
    """1 - within-prompt variance / variance: the explained variance of knowing each prompt's mean return.

    The most that any critic can reach before the first action; later ones have seen some of the answer. Over prompts
    with several rows. The variance inside a prompt is the unbiased one, of n - 1, and its rows weigh alike. NaN if no
    prompt has two rows or all returns are equal; by chance it can lie below 0.
    """
    several_B = group_B.bincount()[group_B] > 1
    x_B, group_B = returns_B[several_B].double(), group_B[several_B]
    if not len(x_B) or (x_B == x_B[0]).all():
        return math.nan
    count_B = group_B.bincount()[group_B]
    within = (less_mean_of_group(x_B, group_B).square() * count_B / (count_B - 1)).mean()
    return float(1 - within / x_B.var())


NUMBERS = {  # of a report -> what they say
    "explained_var": "explained variance over all actions: 1 is perfect, 0 as good as a constant",
    "explained_var_first": "explained variance at the first action, where only the prompt is known",
    "ceiling": "the most that any critic can explain there: 1 - within-prompt variance / variance",
    "explained_var_last": "explained variance at the last action, where the whole response is known",
    "explained_var_within": "the same among responses to one prompt: right from wrong, not hard from easy",
    "vf_loss": "half the mean squared error",
    "constant_loss": "half the mean squared error of the best constant",
    "auc": "chance that the last value of a right response is above that of a wrong one",
    "brier": "Brier score: mean squared error of the value as the chance of being right",
    "brier_constant": "Brier score of the best constant",
    "ece": "expected calibration error: mean distance of chance and frequency, 15 bins of equal width",
    "td_error_std": "standard deviation of the TD errors",
}


def learned(rows, td_error_T, gamma):
    """What the values of these rows are worth -> (numbers: each of NUMBERS, curves: name -> lists that are drawn).

    rows has values and returns (discounted sums of the rewards). Plain Python: numbers that do not exist are None.
    """
    mask, cu, group_B = rows.response_mask, rows.cu_seqlens, prompt_groups(rows)
    v_A, r_A, td_A, row_A = rows.values[mask], rows.returns[mask], td_error_T[mask], row_of_token(cu)[mask]
    reward_B = torch.zeros(len(rows)).index_add(0, row_of_token(cu), rows.token_level_rewards)
    acts_B, place_A = actions_per_row(mask, cu) > 0, places_of_actions(mask, cu)
    first, last, group = first_actions(mask, cu)[acts_B], last_actions(mask, cu)[acts_B], group_B[acts_B]
    label_A, label = reward_B[row_A], reward_B[acts_B]
    binary = bool(((label == 0) | (label == 1)).all()) and len(label.unique()) == 2
    several = group.bincount()[group] > 1
    within = [less_mean_of_group(x[last][several], group[several]) for x in (rows.values, rows.returns)]
    ev = lambda v, r: explained_variance_by(v, r, torch.zeros(len(v), dtype=torch.int64), 1)[0]
    numbers = {
        "explained_var": ev(v_A, r_A),
        "explained_var_first": ev(rows.values[first], rows.returns[first]),
        "ceiling": ceiling(rows.returns[first], group),
        "explained_var_last": ev(rows.values[last], rows.returns[last]),
        "explained_var_within": ev(*within),
        "vf_loss": 0.5 * (v_A - r_A).double().square().mean(),
        "constant_loss": 0.5 * r_A.double().var(correction=0),
        "td_error_std": td_A.double().std(correction=0),
    }
    tenth_A, (part_A, lengths) = (place_A * 10).long().clamp(max=9), equal_parts(actions_per_row(mask, cu)[row_A], 6)
    tenths = [(t, tenth_A == t) for t in range(10) if (tenth_A == t).any()]
    by_prompt = explained_variance_by(v_A, r_A, group_B[row_A], int(group_B.max()) + 1)
    by_prompt = by_prompt[(group.bincount(minlength=len(by_prompt)) > 1) & by_prompt.isfinite()].sort().values
    pairs = torch.stack([rows.values[first], rows.returns[first], torch.ones(len(first))], 1).double()
    pairs = torch.zeros(len(group_B), 3, dtype=torch.float64).index_add(0, group, pairs)
    pairs = (pairs / pairs[:, 2:])[pairs[:, 2] > 1, :2]  # of each prompt with several responses
    curves = {
        "by position": [[place_A[at].mean(), ev(v_A[at], r_A[at])] for _, at in tenths],
        "by length": [[*part, x] for part, x in zip(lengths, explained_variance_by(v_A, r_A, part_A, 6), strict=False)],
        "by prompt": evenly(by_prompt.tolist(), 500),
        "value and return": evenly(pairs.tolist(), 1000),
        "change by position": [[place_A[at].mean(), td_A[at].abs().mean()] for _, at in tenths],
        "td errors": [["", *histogram(td_A, -float(td_A.abs().max()), float(td_A.abs().max()))]],
    }
    shown = {"values": v_A, "returns": r_A}
    if binary:
        p_A, y_A = (v_A, label_A) if gamma == 1 else (rows.values[last], label)  # discounted returns are no chances
        bins = calibration(p_A, y_A)
        numbers["auc"] = auc(rows.values[last], label)
        numbers |= {"brier": brier(p_A, y_A), "brier_constant": y_A.double().var(correction=0)}
        numbers["ece"] = calibration_error(bins)
        curves["calibration"] = bins[bins[:, 2] > 0].tolist()
        curves["auc by position"] = [[place_A[at].mean(), auc(v_A[at], label_A[at])] for _, at in tenths]
        shown = {"right": v_A[label_A == 1], "wrong": v_A[label_A == 0]}
    low, high = min(x.min().item() for x in shown.values()), max(x.max().item() for x in shown.values())
    curves["values"] = [[name, *histogram(x, low, high)] for name, x in shown.items()]
    return plain({name: numbers.get(name) for name in NUMBERS}), plain(curves)


def histogram(x_N, low, high, bins=50):
    """[edges, counts] of numbers from low to high."""
    counts, edges = x_N.double().histogram(bins, range=(low, high) if low < high else (low - 0.5, low + 0.5))
    return [edges.tolist(), counts.tolist()]


def evenly(items, n):
    """At most n of a list, at even distances."""
    return items if len(items) <= n else [items[i * (len(items) - 1) // (n - 1)] for i in range(n)]


def plain(x):
    """Tensors, tuples and dicts as what JSON has; four digits of each number, None for one that is not finite."""
    if isinstance(x, str):
        return x
    if isinstance(x, dict):
        return {key: plain(y) for key, y in x.items()}
    if isinstance(x, list | tuple):
        return [plain(y) for y in x]
    return float(f"{float(x):.4g}") if x is not None and math.isfinite(x) else None


def rows_to_show(rows, td_error_T, n=16):
    """kind -> at most n rows (indices) that are worth a look; the same on any layout, up to rounding of the values."""
    mask, cu, group_B = rows.response_mask, rows.cu_seqlens, prompt_groups(rows)
    row_T, acts_B = row_of_token(cu), actions_per_row(mask, cu) > 0
    jump_T = torch.where(mask, td_error_T.abs(), 0.0)
    jump_T[last_actions(mask, cu)[acts_B]] = 0.0  # the last one is how wrong it was in the end
    jump_B = torch.zeros(len(rows)).scatter_reduce(0, row_T, jump_T, "amax")
    error_B = torch.zeros(len(rows)).index_add(0, row_T, torch.where(mask, (rows.values - rows.returns).abs(), 0.0))
    error_B /= actions_per_row(mask, cu).clamp(min=1)
    largest = lambda x_B: [b for b in (-x_B.double()).round(decimals=4).argsort(stable=True).tolist() if acts_B[b]][:n]
    first_B = first_actions(mask, cu)
    return_B = torch.where(acts_B, rows.returns[first_B], 0.0)
    spread_G = torch.zeros(len(rows), dtype=torch.float64)
    spread_G.index_add_(0, group_B, less_mean_of_group(return_B, group_B).square())
    groups = [g for g in (-spread_G).round(decimals=4).argsort(stable=True).tolist() if spread_G[g] > 1e-9]
    same = [b for g in groups[: n // 2] for b in (group_B == g).nonzero().squeeze(1).tolist()]
    kinds = {
        "largest TD errors before the end": largest(jump_B),
        "most wrong": largest(error_B),
        "several responses to a prompt": same[:n],
        "drawn at random": sorted(permutation(len(rows), "report")[:n]),
    }
    return {kind: chosen for kind, chosen in kinds.items() if chosen}


def tokens_to_show(rows, td_error_T, chosen, tokenizer, before=200, after=1000):
    """One dict a row of `chosen`: texts of its tokens and what stands beside them, from the last `before` tokens of the
    prompt to `after` of the response."""
    texts, shown, starts, first_B = {}, [], rows.cu_seqlens.tolist(), first_actions(rows.response_mask, rows.cu_seqlens)
    for b in chosen:
        start, end, first = starts[b], starts[b + 1], max(int(first_B[b]), starts[b])
        low, high = max(start, first - before), min(end, first + after)
        ids, mask = rows.input_ids[low:high].tolist(), rows.response_mask[low:high].tolist()
        for i in ids:
            texts[i] = texts[i] if i in texts else text_of_token(i, tokenizer)
        at_actions = lambda x_T, low=low, high=high, mask=mask: [
            float(f"{x:.3g}") if own else None for x, own in zip(x_T[low:high].tolist(), mask, strict=True)
        ]
        columns = {"v": rows.values, "r": rows.returns, "d": td_error_T, "a": rows.advantages}
        shown.append({
            "row": int(rows.row_id[b]), "reward": plain(rows.token_level_rewards[start:end].sum()),
            "first": low - start, "tokens": end - start, "t": [texts[i] for i in ids],
            **{key: at_actions(x_T) for key, x_T in columns.items()},
        })  # fmt: skip
    return shown


def text_of_token(i, tokenizer):
    """How a token reads, its number where there is no tokenizer."""
    if tokenizer is None:
        return f"{i} "
    text = tokenizer.decode([i])
    starts_word = str(tokenizer.convert_ids_to_tokens(i)).startswith("\u2581")  # decoding one token drops such a space
    return " " + text if starts_word and not text.startswith(" ") else text


def training_curves(out_dir):
    """metric -> [[step, number]] of a run's metrics.jsonl, at most 400 of each."""
    names = ("vf_loss", "explained_var", "vf_clipfrac", "grad_norm", "lr")
    rows, curves = read_metrics(os.path.join(out_dir, "metrics.jsonl")), {}
    for name in [f"critic/{x}" for x in names] + ["perf/tokens_per_second", "eval/vf_loss", "eval/explained_var"]:
        curves[name] = evenly([[row["step"], row[name]] for row in rows if row.get(name) is not None], 400)
    return curves


def report_figures(reports):
    """name -> matplotlib Figure, of {label: report}: this run's in colour, then another's, if there is one, in grey."""
    from matplotlib import rc_context

    style = {
        "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titley": 1.0, "axes.grid": True,
        "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.25,
        "legend.frameon": False, "lines.markersize": 4,
    }  # fmt: skip
    one = len(reports) == 1
    drawn = [
        (
            report["curves"],
            report["numbers"],
            {"color": color, "label": None if one else name[-30:].replace("$", r"\$")},
        )
        for (name, report), color in zip(reports.items(), (BLUE, GREY), strict=False)
    ][::-1]  # this run's above the other's
    with rc_context(style):
        return {
            "where": figure_of_places(drawn),
            "calibration": figure_of_calibration(drawn),
            "histograms": figure_of_histograms(drawn, one),
            "training": figure_of_training(drawn, one),
        }


def three_panels(titles, rows=1, height=3.0):
    """A matplotlib Figure of three panels a row, with these (title, x label, y label)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, height * rows))
    figure.subplots_adjust(0.055, 0.46 / height / rows, 0.99, 1 - 0.26 / height / rows, 0.22, 0.45)
    for panel, (title, xlabel, ylabel) in zip(figure.subplots(rows, 3).flat, titles, strict=True):
        panel.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure


def draw_line(panel, points, style="o-", **more):
    """Draws (x, y or None) points, if there are any."""
    if points:
        x, y = zip(*[(x, math.nan if y is None else y) for x, y in points], strict=True)
        panel.plot(x, y, style, **more)


def finish_panels(figure, explained=()):
    """Legends, words in empty panels, and the range of those that show explained variance -> the figure."""
    for panel in figure.axes:
        if not panel.has_data():
            panel.text(0.5, 0.5, "nothing to show", ha="center", transform=panel.transAxes, color="#6b7280")
        elif panel.get_legend_handles_labels()[0]:
            panel.legend()
    for panel in explained:  # where one point far below would flatten all others
        panel.set_ylim(max(min(panel.get_ylim()[0], -0.03), -1.03), 1.03)
    return figure


def figure_of_places(drawn):
    figure = three_panels([
        ("explained variance by position", "first action ... last action", ""),
        ("explained variance by length", "actions of the response", ""),
        ("explained variance inside each prompt", "prompts with several responses, sorted", ""),
    ])  # fmt: skip
    position, length, prompt = figure.axes
    for curves, numbers, named in drawn:
        draw_line(position, curves["by position"], **named)
        if (top := numbers["ceiling"]) is not None:
            words = f"ceiling without the response: {top:.2f}"
            position.plot(0, top, "_", color=named["color"], ms=16, mew=3, label=words)
        draw_line(length, [((low + high) / 2, x) for low, high, x in curves["by length"]], **named)
        many = curves["by prompt"]
        draw_line(prompt, [((i + 0.5) / len(many), x) for i, x in enumerate(many)], "-", **named)
    return finish_panels(figure, explained=figure.axes)


def figure_of_calibration(drawn):
    figure = three_panels([
        ("calibration", "value", "part of the responses that were right"),
        ("AUC by position", "first action ... last action", ""),
        ("value and return of each prompt", "mean value of the first action", "mean return of its responses"),
    ])  # fmt: skip
    trust, rank, pairs = figure.axes
    for curves, _, named in drawn:
        bins = curves.get("calibration", [])
        most = max((count for *_, count in bins), default=1)
        draw_line(trust, [(x, y) for x, y, _ in bins], "-", alpha=0.35, lw=1, **named)  # small dots are mostly chance
        for x, y, count in bins:
            trust.plot(x, y, "o", color=named["color"], alpha=0.6, mew=0, ms=2 + 12 * math.sqrt(count / most))
        draw_line(rank, curves.get("auc by position"), **named)
        draw_line(pairs, curves["value and return"], "o", alpha=0.4, mew=0, **named)
    finish_panels(figure)
    for panel in (trust, pairs):
        panel.axline((0, 0), slope=1, color="#6b7280", lw=0.8, ls="--")
    rank.set_ylim(min(rank.get_ylim()[0], 0.47), 1.02)
    return figure


def figure_of_histograms(drawn, one):
    figure = three_panels([
        ("values", "value", "actions"), ("TD errors", "r + gamma v' - v", "actions"),
        ("mean size of a TD error", "first action ... last action", ""),
    ])  # fmt: skip
    spread, jumps, change = figure.axes
    for curves, _, named in drawn:
        color = named["color"]
        for panel, name in ((spread, "values"), (jumps, "td errors")):
            for (what, edges, counts), kind in zip(curves[name], (color, "#f97316"), strict=False):
                if one or color != GREY:
                    panel.stairs(counts, edges, fill=True, alpha=0.55, color=kind, label=what)
                else:
                    of_other = f"{what} ({named['label']})"
                    panel.stairs(counts, edges, color=kind, ls="-" if kind == GREY else ":", label=of_other)
        draw_line(change, curves["change by position"], **named)
    jumps.set_yscale("symlog", linthresh=1)
    return finish_panels(figure)


def figure_of_training(drawn, one):
    figure = three_panels([(title, "step", "") for title in TRAINING.values()], rows=2, height=2.3)
    for curves, _, named in drawn:
        for panel, name in zip(figure.axes, TRAINING, strict=True):
            draw_line(panel, curves["training"].get(name), "-", lw=1, **named)
            held_out = curves["training"].get(name.replace("critic/", "eval/")) if name.startswith("critic/") else None
            draw_line(panel, held_out, "o-", color=named["color"], alpha=0.6, label="held out" if one else None)
    loss, explained, _, norm, *others = figure.axes
    for panel in (loss, norm):
        panel.set_yscale("log")
    for panel in others:
        panel.ticklabel_format(axis="y", scilimits=(-2, 4), useOffset=False)
    return finish_panels(figure, explained=[explained])


REPORT_FORMAT = 1  # of the numbers in a report, which another report reads
BLUE, GREY = "#2563eb", "#9ca3af"
TRAINING = {
    "critic/vf_loss": "value loss",
    "critic/explained_var": "explained variance",
    "critic/vf_clipfrac": "clip fraction",
    "critic/grad_norm": "gradient norm",
    "critic/lr": "learning rate",
    "perf/tokens_per_second": "tokens per second",
}
SECTIONS = {  # of a report: figure -> title, what to look for
    "calibration": (
        "Do its numbers mean what they say",
        "Where it says 0.8, four in five should end well: points on the diagonal, larger where there are more actions "
        "(rewards of 0 and 1 only). AUC is the chance that a right response has a higher value than a wrong one. "
        "In the third picture a point is a prompt: its value beforehand, and what came of its responses.",
    ),
    "where": (
        "Where it is right",
        "1 is perfect, 0 as good as a constant, less is worse than that. It should rise along the response. At the "
        "first action only the prompt is known, and there no critic comes above the ceiling, but by chance. The third "
        "picture takes each prompt by itself: above 0 the critic tells good from bad responses to it, not only hard "
        "prompts from easy ones.",
    ),
    "histograms": (
        "How they are spread",
        "Values of right and wrong responses should part. TD errors are small where nothing is decided: most should be "
        "near 0.",
    ),
    "training": (
        "How it learned",
        "Dots are held-out rows. If their loss rises while the other falls, the rows are being learned by heart.",
    ),
}
REPORT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>What the critic learned</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #111827; background: #f3f4f6; margin: 0 }
main { max-width: 1160px; margin: 0 auto; padding: 18px }
h1 { font-size: 23px; margin: 0 } h2 { font-size: 17px; margin: 0 } p { margin: 2px 0 8px; color: #4b5563 }
section { background: #fff; border: 1px solid #e5e7eb; border-radius: 8px; padding: 12px 18px; margin-top: 12px }
img { width: 100%; display: block } pre { overflow: auto; font-size: 12px }
table { border-collapse: collapse } td, th { padding: 2px 18px 2px 0; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin-top: 10px }
.tiles div { background: #fff; border: 1px solid #e5e7eb; border-radius: 8px; padding: 6px 14px; flex: 1 }
.tiles b { display: block; font-size: 20px } .small { color: #6b7280; font-size: 12px }
#rows { max-height: 420px; overflow-y: auto; border-top: 1px solid #e5e7eb; margin-top: 8px }
#rows { display: flex; flex-wrap: wrap; column-gap: 30px }
.row { padding: 5px 0; border-bottom: 1px solid #e5e7eb; flex: 1 1 auto; min-width: 46%; max-width: 100% }
.row { display: flex; flex-wrap: wrap; align-items: center; gap: 2px 20px }
.row svg { height: 34px; max-width: 100%; order: 1 }
.tokens { font: 13px/1.8 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.tokens span { border-radius: 3px; padding: 2px 0; color: #9ca3af } .tokens .action { color: #111827 }
.tokens span:hover { outline: 2px solid #111827 }
#scale { display: inline-block; width: 130px; height: 10px; border-radius: 3px; margin: 0 6px }
#tip { position: fixed; display: none; background: #111827; color: #fff; border-radius: 6px; padding: 6px 10px;
  pointer-events: none; white-space: pre; font: 12px/1.5 ui-monospace, monospace }
</style></head>
<body><main>
<h1>What the critic learned</h1><p>{{about}}</p>
<div class="tiles">{{tiles}}</div>
<section><h2>Where it changes its mind</h2>
<p>Each action is coloured by its value, which is read just before it; point at one for its numbers. The line beside a
row is its values, the dashes are its returns: a good critic moves where the response is decided. {{sample}}</p>
show <select id="kind"></select> &nbsp; coloured by <select id="key"></select> &nbsp;
<span class="small"><span id="low"></span><span id="scale"></span><span id="high"></span></span>
<div id="rows"></div></section>
{{sections}}
<section><h2>Numbers</h2><table>{{table}}</table></section>
<section><details><summary>Settings of the run</summary><pre>{{settings}}</pre></details></section>
</main><div id="tip"></div>
<script type="application/json" id="report">{{report}}</script>
<script type="application/json" id="payload">{{payload}}</script>
<script>
const at = id => document.getElementById(id), {rows, kinds} = JSON.parse(at("payload").textContent);
const names = {v: "value", r: "return", d: "TD error", a: "advantage"}, orange = [249, 115, 22], blue = [37, 99, 235];
const make = (tag, text, kind) => Object.assign(document.createElement(tag), {textContent: text, className: kind});
for (const kind in kinds) at("kind").append(new Option(`${kind} (${kinds[kind].length})`, kind));
for (const key in names) at("key").append(new Option(names[key], key));

function range(key) {  // of the colours: the middle 98 % of the numbers, around 0 where that is the point
  const x = rows.flatMap(row => row[key].filter(x => x !== null)).sort((x, y) => x - y);
  const low = x[Math.floor(.01 * (x.length - 1))], high = x[Math.ceil(.99 * (x.length - 1))];
  const far = Math.max(Math.abs(low), Math.abs(high));
  return key == "d" || key == "a" ? [-far, far] : [low, high];
}
const ranges = Object.fromEntries(Object.keys(names).map(key => [key, range(key)]));

function colour(x, [low, high]) {
  const t = high > low ? Math.min(Math.max(2 * (x - low) / (high - low) - 1, -1), 1) : 0;
  return `rgb(${(t < 0 ? orange : blue).map(c => Math.round(255 + (c - 255) * Math.abs(t) * (t < 0 ? .85 : .65)))})`;
}

function lines(row) {  // values, and dashed returns, of the actions
  const [v, r] = ["v", "r"].map(key => row[key].map((x, i) => [i, x]).filter(([i, x]) => x !== null));
  const y = [...v, ...r].map(p => p[1]), low = Math.min(...y), span = Math.max(...y) - low || 1;
  const first = v[0][0], n = v.at(-1)[0] - first || 1;
  const line = (p, look) => `<polyline fill="none" vector-effect="non-scaling-stroke" ${look}
    points="${p.map(([i, y]) => [100 * (i - first) / n, 37 - 34 * (y - low) / span]).join(" ")}"/>`;
  return `<svg viewBox="0 0 100 40" preserveAspectRatio="none" width="${Math.max(150, 7 * n)}">
    ${line(r, 'stroke="#9ca3af" stroke-dasharray="4 3"')}${line(v, 'stroke="#2563eb" stroke-width="1.6"')}</svg>`;
}

function show() {
  const key = at("key").value, [low, high] = ranges[key];
  at("low").textContent = +low.toPrecision(2), at("high").textContent = +high.toPrecision(2);
  const scale = [0, .5, 1].map(t => colour(low + t * (high - low), [low, high]));
  at("scale").style.background = `linear-gradient(90deg, ${scale})`;
  at("rows").replaceChildren(...kinds[at("kind").value].map(b => {
    const row = rows[b], block = make("div", "", "row"), tokens = make("div", row.first ? "… " : "", "tokens");
    block.append(make("div", `row ${row.row} · reward ${row.reward} · ${row.tokens} tokens`, "small"));
    if (row.v.some(x => x !== null)) block.insertAdjacentHTML("beforeend", lines(row));
    tokens.append(...row.t.map((text, i) => {
      const span = make("span", text.replaceAll("\\n", "⏎\\n"), row.v[i] === null ? "" : "action");
      if (row.v[i] !== null) span.style.background = colour(row[key][i], [low, high]);
      span.dataset.at = [b, i];
      return span;
    }), row.first + row.t.length < row.tokens ? " …" : "");
    block.append(tokens);
    return block;
  }));
}
at("kind").onchange = at("key").onchange = show;
show();

at("rows").onmousemove = event => {
  const tip = at("tip"), where = event.target.dataset.at;
  tip.style.display = where ? "block" : "none";
  if (!where) return;
  const [b, i] = where.split(","), row = rows[b];
  const numbers = Object.keys(names).map(key => names[key].padEnd(10) + String(row[key][i]).padStart(9));
  const what = `${JSON.stringify(row.t[i])}, token ${row.first + +i} of row ${row.row}`;
  tip.textContent = [what, ...(row.v[i] === null ? ["not an action"] : numbers)].join("\\n");
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  const below = event.clientY + 18;
  tip.style.top = (below + tip.offsetHeight < innerHeight ? below : event.clientY - tip.offsetHeight - 10) + "px";
};
at("rows").onmouseleave = () => at("tip").style.display = "none";
</script></body></html>
"""


def report_path(run):
    """Where the report goes, or None."""
    return {"auto": os.path.join(run.out_dir, "report.html"), "none": None}.get(run.report, run.report)


def read_report(path, flag="--report-against"):
    """What another report says: name, rows, numbers, curves. UserError: it is not there, or something else."""
    try:
        with open(path, encoding="utf-8") as file:
            found = re.search(r'<script type="application/json" id="report">(.*?)</script>', file.read(), flags=re.S)
        report = json.loads(found[1] if found else "")
        if report["format"] == REPORT_FORMAT:
            return report
        raise UserError(f"{flag} {path}: is of another version of these scripts; make it anew")
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from None
    except (TypeError, KeyError, json.JSONDecodeError, UnicodeDecodeError):
        raise UserError(f"{flag} {path}: is not a report that these scripts wrote") from None


def check_report(run):
    """UserError if the report cannot be where it should, or there is none to compare it with."""
    path = report_path(run)
    if path and run.report != "auto":
        if not path.endswith(".html"):
            raise UserError(f"--report {path}: must end in .html, or be auto or none")
        check_writable(os.path.dirname(path) or ".", "--report")
        if os.path.exists(path):
            read_report(path, "--report")  # what is something else is not overwritten
    if run.report_against:
        read_report(run.report_against)
        if path is None:
            raise UserError("--report-against: compares reports; drop --report none")


def write_report(run, tokenizer, held_out, batch):
    """Writes the page on what the critic learned, pictures of its curves beside it, and prints its numbers (a
    collective).

    held_out: the rows that `evaluate` has seen last, the same on every rank. Where there are none (None) the report is
    about `batch`, this rank's rows of the last update.
    """
    path, rows, about = report_path(run), held_out, "held-out rows"
    if path is None or (held_out is None and batch is None):
        return
    if held_out is None:
        rows, about = gather(batch), "rows of the last update, with their values before it"
        if vars(run).get("recorded_values"):  # not a flag of ppo_loop.py
            about = "rows of the last update, with their recorded values, not this critic's"
    if RANK != 0:
        return
    if not rows.response_mask.any() or not rows.values[rows.response_mask].isfinite().all():
        return print0("report     none: no row has an action, or values are not finite")
    rows, errors = dataclasses.replace(rows), dataclasses.replace(rows)
    add_returns(errors, dataclasses.replace(run, lam=0.0))  # with a lambda of 0 an advantage is a TD error
    if rows.advantages is None:
        add_returns(rows, run)
    mask, cu, td_error_T = rows.response_mask, rows.cu_seqlens, errors.advantages
    _, rows.returns = gae(rows.token_level_rewards, torch.zeros(len(mask)), mask, cu, run.gamma, lam=1.0)
    numbers, curves = learned(rows, td_error_T, run.gamma)
    curves["training"] = training_curves(run.out_dir)
    seen = hashlib.sha256(rows.input_ids.numpy().tobytes() + mask.numpy().tobytes()).hexdigest()[:16]
    report = {"format": REPORT_FORMAT, "name": run.out_dir, "rows": [len(rows), seen]}
    report |= {"numbers": numbers, "curves": curves}
    reports, stem = {"this run": report}, path.removesuffix(".html")
    if run.report_against:
        other = read_report(run.report_against)
        reports[other["name"]] = other
    pictures = {}
    for name, figure in report_figures(reports).items():
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=130)
        pictures[name] = base64.b64encode(drawn.getvalue()).decode()
        with open(f"{stem}_{name}.png.tmp", "wb") as file:
            file.write(drawn.getvalue())
        os.replace(f"{stem}_{name}.png.tmp", f"{stem}_{name}.png")
    kinds = rows_to_show(rows, td_error_T)
    chosen = sorted({b for some in kinds.values() for b in some})
    payload = {
        "kinds": {kind: [chosen.index(b) for b in some] for kind, some in kinds.items()},
        "rows": tokens_to_show(rows, td_error_T, chosen, tokenizer),
    }
    prompts = len(set(prompt_groups(rows).tolist()))
    about = f"{len(rows):,} {about}, {prompts:,} prompts, {int(mask.sum()):,} actions"
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.write(report_page(run, about, reports, pictures, payload))
    os.replace(f"{path}.tmp", path)
    print_report(path, about, reports)


def report_page(run, about, reports, pictures, payload):
    """The HTML of a report, complete in itself."""
    escape, (report, *others) = html.escape, reports.values()
    safe = lambda x: json.dumps(x).replace("<", "\\u003c")  # so that no text ends its script
    tell = lambda report, name: number(report["numbers"].get(name), ".3f")
    names = [name for name in NUMBERS if report["numbers"][name] is not None]
    tiles = {
        "explained_var": "explained variance",
        "explained_var_first": "at the first action",
        "ceiling": "ceiling there",
        "explained_var_last": "at the last action",
        "auc": "AUC of the last value",
        "brier": "Brier score",
        "brier_constant": "of the best constant",
        "ece": "calibration error",
    }
    tiles = [f'<div><b>{tell(report, x)}</b><span class="small">{tiles[x]}</span></div>' for x in tiles if x in names]
    heads = "".join(f'<th class="n">{escape(name)}</th>' for name in reports)
    if others:
        heads += f"<th>measured on {'the same' if others[0]['rows'] == report['rows'] else 'other'} rows</th>"
    cells = lambda name: "".join(f'<td class="n">{tell(x, name)}</td>' for x in reports.values())
    table = [heads, *(f"{cells(name)}<td>{NUMBERS[name]}</td>" for name in names)]
    shown, n = len(payload["rows"]), report["rows"][0]
    picture = '<img src="data:image/png;base64,{}" alt="{}">'
    sections = [
        f"<section><h2>{title}</h2><p>{words}</p>{picture.format(pictures[name], title)}</section>"
        for name, (title, words) in SECTIONS.items()
    ]
    settings = {}
    with contextlib.suppress(OSError), open(os.path.join(run.out_dir, "run.json")) as file:
        settings = json.load(file)
    parts = {
        "about": escape(f"{run.out_dir}: {run.critic.model} after {run.steps} steps, on {about}"),
        "tiles": "".join(tiles),
        "sample": f"A sample: {shown} of the {n:,} rows. All else on this page is of all." if shown < n else "",
        "sections": "\n".join(sections),
        "table": "\n".join(f"<tr>{line}</tr>" for line in table),
        "settings": escape(json.dumps(settings, indent=1)),
        "report": safe(report),
        "payload": safe(payload),
    }
    return re.sub(r"{{(\w+)}}", lambda mark: parts[mark[1]], REPORT)


def print_report(path, about, reports):
    """The numbers of a report as a few lines, of two reports side by side."""
    tell = lambda name: " / ".join(number(report["numbers"].get(name), ".3f") for report in reports.values())
    print0(f"report     {path}: {about}" + "".join(f"; / {name}" for name in list(reports)[1:]))
    print0(
        f"  explained variance {tell('explained_var')}, at the first action {tell('explained_var_first')} of at most "
        f"{tell('ceiling')}, at the last {tell('explained_var_last')}, inside prompts {tell('explained_var_within')}"
    )
    print0(
        f"  calibration error {tell('ece')}, Brier score {tell('brier')} (best constant {tell('brier_constant')}), "
        f"TD errors of {tell('td_error_std')}"
    )


def data_check(train, held_out, run):
    """Ten lines on what there is to learn from; behind a dash what looks wrong with it, and what helps.

    train, held_out (or None): rows as load_rows has them; train with values if such were recorded.
    """
    mask, cu, config, out = train.response_mask, train.cu_seqlens, run.critic, []
    lengths_B, actions_B, prompts = cu.diff().double(), actions_per_row(mask, cu), prompts_of(train)
    reward_B = torch.zeros(len(train)).index_add(0, row_of_token(cu), train.token_level_rewards)
    _, returns_T = gae(train.token_level_rewards, torch.zeros(len(mask)), mask, cu, run.gamma, lam=1.0)
    mean, std = returns_T[mask].double().mean().item(), returns_T[mask].double().std(correction=0).item()

    def say(name, facts, wrong=None):
        out.append(f"{name:10s} {facts}" + (f" - {wrong}" if wrong else ""))

    copies = len(train) - len({ids.numpy().tobytes() for ids in train.input_ids.split(train.lengths)})
    say("rows", f"{len(train):,}, {copies:,} of them copies of others")
    shared = len(set(prompts) & set(prompts_of(held_out))) if held_out is not None else 0
    say(
        "prompts", f"{len(set(prompts)):,}, with {len(train) / len(set(prompts)):.3g} responses each",
        shared and f"{shared:,} are held-out ones too, whose values will look too good; split the rows by prompt",
    )  # fmt: skip
    middle, most = lengths_B.median().item(), lengths_B.max().item()
    say(
        "tokens", f"{middle:,.0f} a row at the median, {most:,.0f} at most",
        most > 20 * middle and "few rows are far longer than the rest; are they meant to be there?",
    )  # fmt: skip
    turns, part = (mask & ~mask.roll(1)).sum() / len(train), mask.double().mean()
    say("actions", f"{actions_B.double().mean():.4g} a row in {turns:.3g} turns; {part:.0%} of the tokens")
    idle = int((actions_B == 0).sum())
    ends = int((~mask[cu[1:].long() - 1]).sum()) - idle
    wrong = idle and "rows without an action teach nothing; leave them out"
    if ends > len(train) / 2:
        wrong = "most rows end in a token that was not chosen; is response_mask off by one?"
    say("masks", f"{idle:,} rows without an action; {ends:,} that end in another token", wrong)
    cut = int(train.truncated.sum())
    say(
        "truncated", f"{cut:,} rows",
        cut > len(train) / 10 and not run.bootstrap_truncated
        and "what they would have earned is missing; --bootstrap-truncated puts a value there",
    )  # fmt: skip
    kind = f"from {reward_B.min():.3g} to {reward_B.max():.3g} a row, {reward_B.mean():.3g} at the mean"
    if ((reward_B == 0) | (reward_B == 1)).all():
        kind = f"1 for {reward_B.mean():.1%} of the rows, 0 for the others"
    say("rewards", kind)
    clip, wrong = config.cliprange_value if config.value_head == "scalar" else None, None
    if std == 0:
        wrong = "all are equal: there is nothing to learn"
    elif clip is not None and max(std, abs(mean)) > 10 * clip:
        wrong = f"--cliprange-value {clip:g} lets values creep only; scale the rewards down, or give None"
    elif config.value_range and not config.value_range[0] <= mean <= config.value_range[1]:
        wrong = f"--value-range {config.value_range} does not hold them; widen it"
    say("returns", f"{mean:.3g} +- {std:.3g} over the actions", wrong)
    if train.values is None:
        say("values", "none recorded, the critic's own are taken")
    else:
        v_mean, v_std = train.values[mask].double().mean().item(), train.values[mask].double().std(correction=0).item()
        say(
            "values", f"{v_mean:.3g} +- {v_std:.3g} recorded",
            (abs(v_mean - mean) > 3 * max(std, v_std) or v_std > 10 * std or std > 10 * v_std)
            and "another scale than the returns; are they of these rewards?",
        )  # fmt: skip
    acts_B, first_B = actions_B > 0, first_actions(mask, cu)
    top = ceiling(returns_T[first_B[acts_B]], prompt_groups(train)[acts_B])
    known = f"{top:.3f} is the most that a prompt alone can explain of these returns"
    say("ceiling", "unknown, no prompt has two responses, or their returns are all equal" if math.isnan(top) else known)
    return out


def print_data_check(run, train, held_out):
    """Prints what data_check says."""
    if RANK == 0:
        for line in data_check(train, held_out, run):
            print0(f"check      {line}")


# ---------------------------------------------------------------------------------------------------------------------
# Profile: what chosen steps of chosen ranks do, and hold
# ---------------------------------------------------------------------------------------------------------------------


def profile_range(run):
    """(first, last) of --profile-steps A:B, (0, 0) without it."""
    return tuple(map(int, run.profile_steps.split(":"))) if run.profile_steps else (0, 0)


def check_profile(run):
    """UserError unless --profile-steps is a range of this run's steps, and --profile-ranks are ranks."""
    if run.profile_steps:
        flag = f"--profile-steps {run.profile_steps}"
        if not re.fullmatch(r"\d{1,9}:\d{1,9}", run.profile_steps):
            raise UserError(f"{flag}: must be A:B, the first step and the last, say 3:5")
        first, last = profile_range(run)
        if not 1 <= first <= last <= run.steps:
            raise UserError(f"{flag}: must be steps from 1 to --steps {run.steps}, A not above B")
    check_flag(
        run, "profile_ranks", f"must be below the {WORLD_SIZE} ranks", lambda x: all(0 <= r < WORLD_SIZE for r in x)
    )


def profiled(run, steps):
    """The same steps; those of --profile-steps run under torch.profiler on --profile-ranks, each with its own file.

    out_dir/profile/step_N_rank_R.json.gz opens in ui.perfetto.dev or chrome://tracing, with an evaluation or checkpoint
    that comes before the step's work. On CUDA step_N_rank_R_memory.pickle, for pytorch.org/memory_viz, has every
    allocation.
    """
    first, last = profile_range(run) if RANK in run.profile_ranks else (0, 0)
    for step in steps:
        if first <= step + 1 <= last:
            with profiler(os.path.join(run.out_dir, "profile", f"step_{step + 1}_rank_{RANK}")):
                yield step
        else:
            yield step


@contextlib.contextmanager
def profiler(stem):
    """Writes what happens inside as files that begin with `stem`."""
    from torch.profiler import ProfilerActivity, profile

    os.makedirs(os.path.dirname(stem), exist_ok=True)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with profile(activities=activities, record_shapes=True, profile_memory=True) as trace:
        yield
    trace.export_chrome_trace(f"{stem}.tmp.json.gz")
    os.replace(f"{stem}.tmp.json.gz", f"{stem}.json.gz")
    if cuda:
        torch.cuda.memory._dump_snapshot(f"{stem}_memory.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
    print(f"profile    {stem}.json.gz" + ", _memory.pickle" * cuda, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Folders that are complete or absent
# ---------------------------------------------------------------------------------------------------------------------

MANIFEST = "manifest.json"
FORMAT = 1  # of the manifest and what it lists; a reader refuses newer ones


def check_writable(folder, flag):
    """Makes the folder; UserError if that or writing into it is not allowed."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"{flag} {folder}: not writable")


def check_replaceable(path, flag):
    """UserError unless the folder is absent, empty or one that complete_or_absent made."""
    if os.path.exists(path) and not os.path.exists(os.path.join(path, MANIFEST)):
        if not os.path.isdir(path) or os.listdir(path):
            raise UserError(f"{flag} {path}: holds something else (no {MANIFEST}), which is not overwritten; move it")


@contextlib.contextmanager
def complete_or_absent(path, flag="--out-dir", group=None):
    """`with complete_or_absent(path) as tmp`: all ranks write into tmp, which becomes path when all are done.

    Files are flushed to disk, a manifest of their sizes and checksums is added and the folder renamed, so a crash at
    any moment leaves either the old state or the new one. An older folder of its own kind is replaced, any other is a
    UserError. Needs a file system that all ranks share. In a thread, `group` is one that no other thread uses.
    """
    check_replaceable(path, flag)
    path = os.path.abspath(path)
    tmp = f"{path}.tmp"
    if RANK == 0:
        shutil.rmtree(tmp, ignore_errors=True)
        os.makedirs(tmp)
    dist.barrier(group)
    yield tmp
    dist.barrier(group)
    mine = {name: checksum(os.path.join(tmp, name)) for name in files_of(tmp)[RANK::WORLD_SIZE]}
    files = {name: x for part in of_all_ranks(mine, group) for name, x in part.items()}
    if RANK == 0:
        with open(os.path.join(tmp, MANIFEST), "w") as file:
            json.dump({"format": FORMAT, "files": dict(sorted(files.items()))}, file, indent=1)
        for name in [os.path.join(tmp, name) for name in (*files, MANIFEST, "")]:
            flush_to_disk(name)
        if os.path.exists(path):  # two renames: between them the old folder is whole under the name .old
            shutil.rmtree(f"{path}.old", ignore_errors=True)
            os.rename(path, f"{path}.old")
        os.rename(tmp, path)
        flush_to_disk(os.path.dirname(path))
        shutil.rmtree(f"{path}.old", ignore_errors=True)
    dist.barrier(group)


def of_all_ranks(mine, group=None):
    """What each rank of `group` (None: all) has, a list (a collective)."""
    everyones = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group)
    return everyones


def flush_to_disk(path):
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def files_of(folder):
    """Names of all files below a folder, sorted. One with a manifest of its own is there by its manifest alone."""
    names = []
    for root, folders, files in os.walk(folder):
        if not os.path.samefile(root, folder) and MANIFEST in files:
            folders.clear()
            files = [MANIFEST]
        names += [os.path.relpath(os.path.join(root, name), folder) for name in files]
    return sorted(names)


def checksum(path):
    """[bytes, SHA-256] of a file."""
    with open(path, "rb") as file:
        return [os.path.getsize(path), hashlib.file_digest(file, "sha256").hexdigest()]


def read_manifest(path, flag):
    """name -> [bytes, SHA-256] of the files of a complete folder. UserError: it is not one."""
    try:
        with open(os.path.join(path, MANIFEST)) as file:
            written = file.read()
        manifest = json.loads(written)
        if written != json.dumps(manifest, indent=1):  # as we write it, to the byte
            raise ValueError
        version, files = (
            manifest["format"],
            {name: (int(size), str(sha)) for name, (size, sha) in manifest["files"].items()},
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        old = f"; {path}.old is the one before it" if os.path.exists(f"{path}.old") else ""
        raise UserError(
            f"{flag} {path}: no complete checkpoint here (no readable {MANIFEST}); use another, or auto{old}"
        ) from None
    if version != FORMAT:
        raise UserError(f"{flag} {path}: has format {version}, this code reads {FORMAT}; use the code that wrote it")
    return files


def check_complete(path, flag):
    """Raises UserError unless every file that the manifest of `path` lists is there in its full size; what is JSON is
    about to be read, and must be as it was written."""
    for name, (size, sha) in read_manifest(path, flag).items():
        file = os.path.join(path, name)
        found = os.path.getsize(file) if os.path.exists(file) else None
        if found != size:
            state = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            raise UserError(f"{flag} {path}: damaged, {name} {state}; use an earlier checkpoint")
        if name.endswith(".json") and checksum(file) != [size, sha]:
            raise UserError(f"{flag} {path}: damaged, {name} is not what was written; use an earlier checkpoint")
        if os.path.basename(name) == MANIFEST:
            check_complete(os.path.dirname(file), flag)


def check_contents(path, flag):
    """Raises UserError on all ranks unless every file below `path` is as it was written, by its checksum (a collective:
    each rank reads its share)."""
    check_complete(path, flag)
    expected = {}
    for folder, _, names in os.walk(path):
        if MANIFEST in names:
            expected |= {os.path.join(folder, name): list(x) for name, x in read_manifest(folder, flag).items()}
    mine = sorted(expected)[RANK::WORLD_SIZE]
    damaged = [
        name for part in of_all_ranks([name for name in mine if checksum(name) != expected[name]]) for name in part
    ]
    if damaged:
        name = os.path.relpath(min(damaged), path)
        raise UserError(f"{flag} {path}: damaged, {name} is not what was written; use an earlier checkpoint")


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints of a run
# ---------------------------------------------------------------------------------------------------------------------


def checkpoint_folder(out_dir, step):
    return os.path.join(out_dir, "checkpoints", f"step_{step}")


def checkpoints_of(out_dir):
    """[(step, folder)] of a run, the last step first; whether they are complete is another question."""
    folder, found = os.path.join(out_dir, "checkpoints"), []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if match := re.fullmatch(r"step_(\d+)(\.old)?", name):
            found.append((int(match[1]), not match[2], os.path.join(folder, name)))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def newest_checkpoint(out_dir):
    """Folder of the last complete and undamaged checkpoint of a run, None if there is none; prints which it passed over
    and why (a collective)."""
    for _, path in of_all_ranks(checkpoints_of(out_dir))[0]:
        try:
            check_contents(path, "--resume")
            return path
        except UserError as error:
            print0(f"resume     auto passes over {str(error).removeprefix('--resume ')}")
    return None


def smaller_budgets(run, **least):
    """run, or with --resume auto and what a run before it noted when memory ran out: the same with its budgets halved
    as many times as that has happened with these flags. No update depends on them. least: the smallest token budgets
    of run.actor and run.critic that take the longest row."""
    path, given = os.path.join(run.out_dir, "out_of_memory.json"), {}
    for part, config in {"": run, **vars(run)}.items():
        for name in BUDGETS if dataclasses.is_dataclass(config) else ():
            if getattr(config, name, None) is not None:
                given[f"{part}.{name}"] = getattr(config, name)
    HALVINGS[0] = 0
    if run.resume == "auto" and os.path.exists(path):
        with contextlib.suppress(ValueError, KeyError, TypeError), open(path) as file:  # a crash may have cut it short
            note = json.load(file)
            HALVINGS[0] = int(note["halvings"]) if note["given"] == given else 0
    if run.resume is None and RANK == 0:
        with contextlib.suppress(OSError):
            os.remove(path)

    def note():
        with contextlib.suppress(OSError):
            os.makedirs(run.out_dir, exist_ok=True)
            with open(f"{path}.{RANK}.tmp", "w") as file:
                json.dump({"given": given, "halvings": HALVINGS[0] + 1}, file)
            os.replace(f"{path}.{RANK}.tmp", path)

    OUT_OF_MEMORY[:] = [note]
    for key, x in given.items() if HALVINGS[0] else ():
        part, name = key.split(".")
        smallest = min(x, least[part]) if isinstance(x, int) and "token" in name else 1
        smaller = max(x >> HALVINGS[0], smallest) if x != "auto" else "auto"  # there find_budget halves what it finds
        config = dataclasses.replace(getattr(run, part) if part else run, **{name: smaller})
        run = dataclasses.replace(run, **{part: config}) if part else config
        flag = (f"{part}." if part and hasattr(run, "actor") else "") + name.replace("_", "-")
        by = f"{smaller}, its number halved {HALVINGS[0]} times" if x == "auto" else smaller
        print0(f"memory     ran out in the run before, so --{flag} {x} -> {by}")
    return run


BUDGETS = [f"{of}_{what}_per_gpu" for of in ("ppo", "forward") for what in ("max_token_len", "micro_batch_size")]
BUDGETS += ["rollout_batch_size"]  # of ppo_loop.py


def find_resume(run, timeout_minutes):
    """run with the folder that --resume auto stands for; None if there is nothing to go on from yet."""
    if run.resume == "auto":
        setup_distributed(timeout_minutes)
        run = dataclasses.replace(run, resume=newest_checkpoint(run.out_dir))
        if run.resume is None:
            print0(f"resume     auto: {run.out_dir} has no checkpoint to go on from, so this is a start")
    aside = os.path.realpath(os.path.join(run.out_dir, "checkpoints.old"))
    if run.resume and os.path.dirname(os.path.realpath(run.resume)) == aside:
        raise UserError(f"--resume {run.resume}: has made room for what is in {run.out_dir}; give another --out-dir")
    return run


def put_aside(out_dir, first_step):
    """Moves checkpoints and dumped rollouts of another run in the same folder, or of later steps than this one goes on
    from, to checkpoints.old and rollouts.old, where nobody looks; removes what killed runs have left half done."""
    for path in glob.glob(os.path.join(glob.escape(out_dir), "checkpoints", "step_*")):
        if path.endswith((".tmp", ".gone")):
            shutil.rmtree(path)
    for kind in ("checkpoints", "rollouts"):
        folder = os.path.join(out_dir, kind)
        aside = f"{folder}.old"
        if not first_step and os.path.isdir(folder):
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)
            print0(f"set aside  {folder} of an earlier run: {aside} has them until the next start without --resume")
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if (step := re.match(r"step_(\d+)", name)) and int(step[1]) > first_step:
                shutil.rmtree(os.path.join(aside, name), ignore_errors=True)
                os.renames(os.path.join(folder, name), os.path.join(aside, name))


SAVING, GROUP_FOR_SAVING = [], []  # the save that goes on beside the training, a Future, and what its collectives use


def save(run, step, checkpoint_writer):
    """Saves a step by checkpoint_writer(copy)(folder, group), then removes what --keep does not (a collective): now, or
    with --async-save in a thread beside the training. One at a time: it waits for the one before."""
    join_saving()
    write = checkpoint_writer(run.async_save)

    def write_and_keep(group=None):
        write(checkpoint_folder(run.out_dir, step), group)
        keep_last(run.out_dir, run.keep)

    if not run.async_save:
        return write_and_keep()
    if not GROUP_FOR_SAVING:
        GROUP_FOR_SAVING.append(dist.new_group(backend="gloo", timeout=TIMEOUT[0]))
    SAVING.append(ThreadPoolExecutor(1).submit(write_and_keep, *GROUP_FOR_SAVING))


def join_saving(wait=True):
    """Waits for the save beside the training, or looks whether it has ended; raises what went wrong in it."""
    if SAVING and (wait or SAVING[0].done()):
        SAVING.pop().result()


def host_copy(tensors):
    """Tensors of any kind in dicts and tuples, copied to the host: what the training goes on to change."""
    return DefaultStager(StagingOptions(False, False, False, False)).stage(tensors)


def keep_last(out_dir, keep):
    """Removes all but the last `keep` checkpoints of a run (None: none), each at once: a crash leaves whole ones."""
    if RANK == 0 and keep is not None:
        for _, path in checkpoints_of(out_dir)[keep:]:
            os.rename(path, f"{path}.gone")
            shutil.rmtree(f"{path}.gone", ignore_errors=True)


TOLD_TO_STOP = []  # signals that have come


def listen_for_sigterm():
    """From now on SIGTERM, by which schedulers and torchrun announce the end, is noted and waits for told_to_stop()."""
    signal.signal(signal.SIGTERM, lambda number, _: TOLD_TO_STOP.append(number))


def told_to_stop():
    """Whether any rank has got SIGTERM (a collective)."""
    told = torch.tensor(float(len(TOLD_TO_STOP)))
    dist.all_reduce(told)
    return told.item() > 0


def leave(out_dir, step):
    """Ends a run that was told to stop, with the exit status of a process that SIGTERM has ended."""
    print0(f"SIGTERM    stopped after step {step} of {out_dir}; go on with --resume auto")
    raise SystemExit(128 + signal.SIGTERM)


def count_stuck(stuck, metrics, run, batch, step):
    """How many updates in a row were skipped, with this one, `step` from 0; those without an action do not count.

    UserError if values are not finite, or if there are --max-skipped-updates: then the rows of the last one are left as
    JSONL, from which it can be made again (a collective).
    """
    ppo = hasattr(run, "actor")
    if "critic/values_mean" not in metrics:  # no row has an action
        return stuck
    if not math.isfinite(metrics["critic/values_mean"]):
        lr = "--critic.lr" if ppo else "--lr"
        raise UserError(f"step {step + 1}: values are not finite, the training has diverged; lower {lr}")
    stuck = stuck + 1 if math.isnan(metrics["critic/grad_norm"]) else 0
    if not run.max_skipped_updates or stuck < run.max_skipped_updates:
        return stuck
    join_saving()
    path, whole = os.path.join(run.out_dir, "skipped_rows.jsonl"), gather(batch)
    if RANK == 0:
        write_jsonl(whole, path)
    script = os.path.basename(sys.modules[type(run.critic).__module__].__file__)
    (made, folder), *_ = [*checkpoints_of(run.out_dir), (0, None)]
    resume = f" --resume {os.path.join(folder, 'critic') if ppo else folder}" if folder else ""
    returns = f"--gamma {run.gamma} --lam {run.lam}" + " --bootstrap-truncated" * run.bootstrap_truncated
    raise UserError(
        f"step {step + 1}: {stuck} updates in a row were skipped, their gradients are not finite; the rows of the last "
        f"are in {path}, to be looked at, or to make that update again: {script} with the flags of the critic and "
        f"--rollouts {path} --recorded-values --train-batch-size {len(whole)} {returns} --max-skipped-updates 1 "
        f"--steps {made + 1}{resume} --out-dir ELSEWHERE"
    )


def write_trainer_state(folder, backend, config, model_config, updates, optimizer_steps, **more):
    """Counters and settings of a checkpoint beside its tensors, by rank 0."""
    if RANK == 0:
        state = {"updates": updates, "optimizer_steps": optimizer_steps, "backend": backend}
        state |= {"config": dataclasses.asdict(config), "model_config": architecture(model_config), **more}
        with open(os.path.join(folder, "trainer.json"), "w") as file:
            json.dump(state, file, indent=1)


def open_checkpoint(folder, backend, config, model_config):
    """What write_trainer_state wrote. UserError on all ranks: damaged, or of another script or model (a collective)."""
    check_contents(folder, "--resume")
    saved = read_trainer_state(folder)
    check_same_model(folder, saved, config, model_config, backend)
    return saved


def read_trainer_state(folder):
    """Counters and settings of a checkpoint. UserError: damaged, or not a checkpoint of this script."""
    check_complete(folder, "--resume")
    try:
        with open(os.path.join(folder, "trainer.json")) as file:
            state = json.load(file)
        return {**state, **{key: state[key] for key in ("updates", "optimizer_steps", "config", "model_config")}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--resume {folder}: not a checkpoint of this script ({one_line(error)})") from None


CRITICS = {"fsdp", "megatron"}  # either goes on from checkpoints of the other


def check_same_model(folder, saved, config, model_config, backend):
    """UserError if the checkpoint is of another model than this run's, or of a script whose checkpoints this one does
    not read; prints which flags changed since."""
    there, remedy = saved.get("backend"), "to go on from its weights alone give the hf folder of that run as --model"
    if there != backend and not {there, backend} <= CRITICS:
        raise UserError(f"--resume {folder}: is of another script ({there}, not {backend}); {remedy}")
    model_now, now = architecture(model_config), json.loads(json.dumps(dataclasses.asdict(config)))  # tuples as lists
    for k in ("lora_rank", "freeze_layers"):  # what does not train has no optimizer state
        if saved["config"].get(k) and k not in now:
            raise UserError(
                f"--resume {folder}: has {k} {saved['config'][k]}, and this script trains all weights; {remedy}"
            )
    then = {"lora_rank": 0, **saved["config"]}
    model_then, kind = saved["model_config"], "model_type"
    fields = model_then if model_then[kind] == model_now[kind] else [kind]  # others do not say the same of themselves
    other = [f"{k} {model_then[k]} there, {model_now.get(k)} here" for k in fields if model_now.get(k) != model_then[k]]
    for k in {"value_head", "value_range", "lora_rank", "lora_alpha"} & now.keys() & then.keys():  # shapes do not tell
        other += [f"{k} {then[k]} there, {now[k]} here"] * (then[k] != now[k])
    if other:
        raise UserError(f"--resume {folder}: is of another model: {'; '.join(sorted(other))}")
    whose = "" if there == backend else f" of critic_{there}.py"
    print0(f"resume     {folder}, update {saved['updates']}{whose}{changes(saved['config'], now)}")


def changes(then, now):
    """Words on the flags that both have and that differ, or ""."""
    changed = [f"{key} {x} -> {now[key]}" for key, x in then.items() if key in now and now[key] != x]
    return ", with " * bool(changed) + ", ".join(changed)


# ---------------------------------------------------------------------------------------------------------------------
# What a model's folder holds: tokenizer, config, value head
# ---------------------------------------------------------------------------------------------------------------------


def load_tokenizer(config):
    """The tokenizer of the rows: characters for a preset, None if the model has none (rows of token ids need none)."""
    if config.tokenizer is None and config.model in TINY:
        return char_tokenizer(IMAGE_WORDS if config.model.endswith("-vl") else ())
    try:
        name = config.tokenizer or config.model
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError("it knows no token")  # transformers makes one up where there are no files
        return tokenizer
    except Exception as error:  # half a dozen kinds, if there is none
        if config.tokenizer is None:
            print0(f"tokenizer  none, rows must be token ids ({config.model}: {one_line(error)})")
            return None
        raise UserError(f"--tokenizer {config.tokenizer}: no tokenizer there ({one_line(error)})") from None


def load_model_config(config, tokenizer):
    """transformers config of the backbone with --override-config laid over it, every dropout set to 0."""
    overrides = json.loads(config.override_config)
    if config.model.startswith("tiny-") and config.model not in TINY and not os.path.isdir(config.model):
        raise UserError(f"--model {config.model}: no such preset; there are {', '.join(TINY)}")
    try:
        if config.model in TINY:
            fields = tiny_config(config.model, len(tokenizer))
            model_config = AutoConfig.for_model(**fields)
        else:
            model_config = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
            fields, _ = type(model_config).get_config_dict(config.model)
    except Exception as error:
        raise UserError(f"--model {config.model}: no model there ({one_line(error)})") from None
    for key in overrides:
        if key == "model_type" or not hasattr(model_config, key):
            raise UserError(f"--override-config: {type(model_config).__name__} has no {key!r} to override")
    if overrides:
        names = {model_config.attribute_map.get(key, key): value for key, value in overrides.items()}
        try:
            model_config = type(model_config).from_dict(lay_over(fields, names))
        except Exception as error:
            raise UserError(f"--override-config {config.override_config}: {one_line(error)}") from None
    for key, value in overrides.items():
        if not isinstance(value, dict) and getattr(model_config, key) != value:
            raise UserError(f"--override-config: {type(model_config).__name__} does not let {key!r} be {value!r}")
    drop_no_more(model_config)
    return model_config


def max_length(model_config):
    """Most tokens of a row that the model can take."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None) or 2**31


def with_value_range(config, model_config):
    """config with the range of hl_gauss, the model's own where none is given. UserError: it has none either."""
    if config.value_head != "hl_gauss" or config.value_range is not None:
        return config
    if not getattr(model_config, "value_range", None):
        raise UserError("--value-range: hl_gauss needs it, LOW and HIGH of the returns with a small margin")
    return dataclasses.replace(config, value_range=tuple(model_config.value_range))


def lay_over(fields, overrides):
    """A config.json with overrides laid over it, nested ones too. A layer pattern goes where what it follows from is
    overridden: the model then works out its own."""
    if overrides.keys() & {"num_hidden_layers", "sliding_window", "use_sliding_window", "max_window_layers"}:
        fields = {key: value for key, value in fields.items() if key != "layer_types"}
    nested = {key for key, value in overrides.items() if isinstance(value, dict) and isinstance(fields.get(key), dict)}
    return {**fields, **overrides, **{key: lay_over(fields[key], overrides[key]) for key in nested}}


def drop_no_more(model_config):
    """Sets attention_dropout, resid_pdrop, layerdrop, router jitter ... to 0, in nested configs too."""
    for key, value in list(vars(model_config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            drop_no_more(value)
        elif ("drop" in key or "jitter" in key) and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(model_config, key, type(value)(0))


def local_folder(name):
    """The folder of a model: a hub's is downloaded, its config is there already. UserError: it cannot be."""
    if os.path.isdir(name):
        return name
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.py"])
    except Exception as error:  # of the network, the hub, the disk
        raise UserError(f"--model {name}: its weights do not load ({one_line(error)})") from None


def load_pretrained(kind, folder, config, model_config, **options):
    """A model of this AutoModel kind with a folder's weights. UserError: they do not load, or some are missing."""
    try:
        model, info = kind.from_pretrained(
            folder, config=model_config, trust_remote_code=config.trust_remote_code,
            output_loading_info=True, **options,
        )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UserError(f"--model {config.model}: its weights do not load ({one_line(error)})") from None
    absent = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if absent:
        raise UserError(f"--model {config.model}: {len(absent)} weights are not in the checkpoint, e.g. {absent[0]}")
    return model


def init_value_head(score, folder, config):
    """Fills the head, an nn.Linear, by --value-head-init -> words on what happened. folder: the checkpoint, if any."""
    shape = tuple(score.weight.shape)
    stored, remark = stored_value_head(folder, shape, config.value_range) if folder else (None, "")
    init = config.value_head_init
    if init == "auto":
        init = "checkpoint" if stored else "normal"
    nn.init.zeros_(score.weight)
    nn.init.zeros_(score.bias)
    if init == "checkpoint":
        if stored is None:
            raise UserError(f"--value-head-init checkpoint: {config.model} holds no value head{remark}")
        name, weight, bias = stored
        score.weight.data.copy_(weight)
        if bias is not None:
            score.bias.data.copy_(bias)
        return f"value head from its {name}.weight" + ("" if bias is not None else " (no bias: 0)")
    if init == "normal":
        std = 1 / math.sqrt(score.in_features + 1)  # 2403.17031, and the code of 2009.01325 before it
        nn.init.normal_(score.weight, std=std, generator=torch.Generator().manual_seed(config.seed))
        return f"value head new, normal(0, {std:.3f}){remark}"
    return "value head zero"


VALUE_HEADS = ("score", "classifier", "v_head.summary", "v_head", "value_head.summary", "value_head")


def stored_value_head(folder, shape, value_range):
    """Looks through a checkpoint for a head of this (N, D) shape and range -> ((name, weight, bias or None) or None,
    remark).

    score and classifier are transformers' token-classification and reward models, v_head is TRL's. A scalar head has
    no range; a classifier that is no categorical value has none either.
    """
    found, remark = {}, ""
    is_head = lambda key: key.rpartition(".")[0] in VALUE_HEADS
    safetensors = glob.glob(os.path.join(folder, "*.safetensors"))
    for path in sorted(safetensors):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in filter(is_head, file.keys())}
    for path in [] if safetensors else sorted(glob.glob(os.path.join(folder, "pytorch_model*.bin"))):
        state = torch.load(path, map_location="cpu", weights_only=True)
        found |= {key: state[key] for key in filter(is_head, state)}
    with open(os.path.join(folder, "config.json")) as file:
        stored_range = json.load(file).get("value_range")
    describe = lambda shape, over: f"{shape} over {tuple(over)}" if over else str(shape)
    wanted = describe(shape, value_range)
    for name in VALUE_HEADS:
        weight = found.get(f"{name}.weight")
        if weight is not None and describe(tuple(weight.shape), stored_range) == wanted:
            return (name, weight, found.get(f"{name}.bias")), ""
        if weight is not None:
            remark = f" (its {name}.weight is {describe(tuple(weight.shape), stored_range)}, not {wanted})"
    return None, remark


def config_of_export(model_config, outputs, value_range):
    """transformers config of a value model with so many outputs, for its Hugging Face folder."""
    model_config = type(model_config).from_dict(model_config.to_dict())
    model_config.num_labels, model_config.classifier_dropout = outputs, 0.0
    model_config.dtype, model_config.value_range = torch.float32, value_range
    model_config.value_head = "hl_gauss" if value_range else "scalar"
    return model_config


def architecture(model_config):
    """What makes two models the same, of a transformers config, as plain JSON."""
    fields = json.loads(model_config.to_json_string(use_diff=False))
    passing = ("transformers_version", "_name_or_path", "architectures", "dtype", "_attn_implementation", "use_cache")
    passing += ("value_head", "value_range", "initializer_range")  # of the head, and of weights that are there
    return {key: value for key, value in fields.items() if key not in passing}


# ---------------------------------------------------------------------------------------------------------------------
# Models of transformers: their blocks, what of them trains, adapters, images, export
# ---------------------------------------------------------------------------------------------------------------------


def count_parameters(module):
    """(all, those that train)."""
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def transformer_blocks(model):
    """The layers to shard one by one: classes the model's authors say must not be split."""
    names = {n for m in model.modules() for n in (getattr(m, "_no_split_modules", None) or ())}
    return [m for m in model.modules() if type(m).__name__ in names]


def freeze(backbone, layers):
    """Takes the embeddings and the lowest blocks out of training: they get no gradient and no optimizer state."""
    blocks = transformer_blocks(backbone.get_decoder())
    if len(blocks) < layers:
        raise UserError(f"--freeze-layers {layers}: {type(backbone).__name__} shows {len(blocks)} layers")
    for module in [m for m in backbone.get_decoder().modules() if isinstance(m, nn.Embedding)] + blocks[:layers]:
        module.requires_grad_(False)


def add_lora(backbone, config):
    """Freezes the backbone and gives its linear layers adapters: W x + alpha / r B A x (LoRA, 2106.09685).

    A is random, B zero: values are at first those without. Experts that a mixture keeps in one tensor get no adapter.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear, targets = [n for n, m in backbone.named_modules() if isinstance(m, nn.Linear | Conv1D)], []
    if config.freeze_vision_tower:
        linear = [n for n in linear if not n.startswith("visual.")]
    for target in config.lora_target_modules:
        named = [n for n in linear if target == "all-linear" or f".{n}".endswith(f".{target}")]
        if not named:
            there = ", ".join(sorted({n.rpartition(".")[2] for n in linear}))
            raise UserError(f"--lora-target-modules {target}: is no linear layer of {config.model}; there are {there}")
        targets += named
    inject_adapter_in_model(
        LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets), backbone
    )


def merge_lora(state, scale, modules):
    """Full state dict with adapters -> that of the same function without them, W + scale B A.

    modules: the model's by their names in the state dict; GPT-2's layers keep W as (in, out).
    """
    transposed = {name.removesuffix(".base_layer") for name, m in modules.items() if isinstance(m, Conv1D)}
    merged = {}
    for name, x in state.items():
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            delta = scale * state[f"{layer}.lora_B.default.weight"] @ state[f"{layer}.lora_A.default.weight"]
            x = x + (delta.T if layer in transposed else delta)
        if ".lora_" not in name:
            merged[name.replace(".base_layer.", ".")] = x
    return merged


def saved_bytes(model, config, lengths, device):
    """Bytes that autograd saves in a training forward of a model on meta over sequences of these lengths, weights not
    counted.

    Counted exactly, on fake tensors, which have shapes and devices but no memory; the model keeps them.
    """
    with FakeTensorMode():
        fake = lambda x: torch.empty(x.shape, dtype=x.dtype, device=device)
        for module in model.train().modules():
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
        set_pack(lengths, device, kernel=config.attn_implementation)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(input_ids=torch.zeros_like(position_ids), position_ids=position_ids)
        return sum(n for _, n in saved.values())


VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # images are read; all others read text only


def reads_images(model_config):
    return model_config.model_type in VISION_MODELS


def decoder_attention(config, model_config):
    """The name under which transformers finds the attention of the decoder: "packed", or its own for padded rows."""
    if config.use_remove_padding:
        return "packed"
    capped = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    if capped and config.attn_implementation == "sdpa":
        raise UserError(f"--attn-implementation sdpa: would drop the soft cap of {config.model}; auto takes eager")
    names = {"flash": "flash_attention_2", "auto": "eager" if capped else None}
    return names.get(config.attn_implementation, config.attn_implementation)


def of_decoder(attention, model_config):
    """The attention of the decoder, as transformers takes it: a vision tower keeps its own."""
    return {"": attention, "text_config": attention} if reads_images(model_config) else attention


def load_image_processor(config, model_config):
    """What makes patches of images, or None: the model reads text only, or came without one.

    Pillow's, which all these models share: the same pixels on every machine, with torchvision or without.
    """
    if not reads_images(model_config):
        return None
    if config.model in TINY:
        return Qwen2VLImageProcessorPil(patch_size=model_config.vision_config.patch_size)
    for name in filter(None, (config.model, config.tokenizer)):
        with contextlib.suppress(OSError):  # no preprocessor_config.json
            return Qwen2VLImageProcessorPil.from_pretrained(name)
    print0(f"images     cannot be read from rows: no preprocessor_config.json in {config.model}")
    return None


def with_images(backbone, ids_T, lengths, images):
    """(ids, lengths, inputs of the forward) of rows with these images, a list of B dicts.

    Ranks that share the weights of the vision tower must run it together, so rows without any image get a black
    one, whose one token ends the last row: no other token sees it, no value is read there, its gradient is zero.
    It is the only token ever above the cap of a micro-batch.
    """
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


def check_rows(batch, model_config, image_processor=None):
    """ValueError naming the first row with tokens or images that the model cannot read, or unfitting placeholders."""
    most = max_length(model_config)
    if max(batch.lengths, default=0) > most:
        tokens, where = longest_row(batch)
        raise ValueError(f"{where}: {tokens} tokens, longer than max_position_embeddings, {most}")
    vocab_size, rows = model_config.get_text_config().vocab_size, batch.multi_modal_inputs
    odd = ((batch.input_ids < 0) | (batch.input_ids >= vocab_size)).nonzero().flatten()
    if len(odd):
        row, token = int(batch.row_id[row_of_token(batch.cu_seqlens)[odd[0]]]), int(batch.input_ids[odd[0]])
        raise ValueError(f"row {row}: token id {token} is outside the vocabulary of {vocab_size}")
    if not reads_images(model_config):
        if any(rows or ()):
            row = int(batch.row_id[next(b for b, images in enumerate(rows) if images)])
            raise ValueError(f"row {row}: multi_modal_inputs: this critic reads text only")
        return
    image_token_id, merge = model_config.image_token_id, model_config.vision_config.spatial_merge_size
    for b, ids in enumerate(batch.input_ids.split(batch.lengths)):
        images, row = rows[b] if rows else {}, int(batch.row_id[b])
        if unknown := images.keys() - {"images", "pixel_values", "image_grid_thw"}:
            raise ValueError(f"row {row}: multi_modal_inputs: this critic reads no {', '.join(sorted(unknown))}")
        if "images" in images and image_processor is None:
            raise ValueError(f"row {row}: there is no preprocessor_config.json to read its images with")
        if "images" not in images:  # read_jsonl has counted those
            try:
                check_placeholders(ids.tolist(), image_token_id, image_tokens(images, merge))
            except UserError as error:
                raise ValueError(f"row {row}: {error}") from None


def save_hf(state, model_config, value_range, folder):
    """Writes a full state dict of a value model ("model.*", "score.*") with transformers' own save_pretrained."""
    head = {f"score.{k}": state[f"score.{k}"] for k in ("weight", "bias") if f"score.{k}" in state}
    lost = [name for name in state if not name.startswith("model.") and name not in head]
    if lost or len(head) < 2:
        raise UserError(
            f"--out-dir: a Hugging Face folder has no place for {', '.join(lost) or 'such a head'}; change "
            "common.save_hf and common.stored_value_head (the checkpoints have it all)"
        )
    model_config = config_of_export(model_config, len(state["score.weight"]), value_range)
    backbone = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    if type(model_config) in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        with torch.device("meta"):
            skeleton = transformers.AutoModelForTokenClassification.from_config(model_config, dtype=torch.float32)
        prefix = skeleton.base_model_prefix
        theirs = next(n for n, m in skeleton.named_children() if n != prefix and isinstance(m, nn.Linear))
        full = {f"{prefix}.{k}": v for k, v in backbone.items()}
        full |= {name.replace("score", theirs): x for name, x in head.items()}
        skeleton.save_pretrained(folder, state_dict=full)
        return
    with torch.device("meta"):
        skeleton = transformers.AutoModel.from_config(model_config, dtype=torch.float32)
    skeleton.save_pretrained(folder, state_dict=backbone)
    save_file(head, os.path.join(folder, "value_head.safetensors"), metadata={"format": "pt"})


# ---------------------------------------------------------------------------------------------------------------------
# Tiny models, a tokenizer built in code, and the toy task: everything runs without a hub
# ---------------------------------------------------------------------------------------------------------------------

TINY = {  # real architectures with random weights; sizes change with --override-config
    "tiny-qwen2": "qwen2",
    "tiny-qwen3": "qwen3",
    "tiny-llama": "llama",
    "tiny-mistral": "mistral",
    "tiny-gemma2": "gemma2",
    "tiny-gpt2": "gpt2",
    "tiny-qwen3-moe": "qwen3_moe",
    "tiny-qwen2.5-vl": "qwen2_5_vl",
    "tiny-qwen3-vl": "qwen3_vl",
}
IMAGE_WORDS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]  # the last ids of a vision-language preset


def tiny_config(name, vocab_size):
    """A preset as the fields of a config.json: two layers of 64 features, four heads, two of keys and values."""
    sizes = {
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    extra = {
        "mistral": {"sliding_window": 256},
        "gemma2": {"sliding_window": 256, "query_pre_attn_scalar": 16},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        "gpt2": {"n_positions": 8192},
    }
    kind = TINY[name]
    if kind == "gpt2":  # has its own words for these and takes no others
        sizes = {
            "vocab_size": vocab_size,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    if "vl" in kind:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        if kind == "qwen3_vl":
            rope["mrope_interleaved"] = True
        tower = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14,
            "out_hidden_size": 64,
        }  # fmt: skip
        tower |= {
            "qwen2_5_vl": {"window_size": 56, "fullatt_block_indexes": [1]},
            "qwen3_vl": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        }[kind]
        start, image, end = range(vocab_size - 3, vocab_size)
        return {
            "model_type": kind,
            "text_config": {**sizes, "rope_parameters": rope},
            "vision_config": tower,
            "image_token_id": image,
            "vision_start_token_id": start,
            "vision_end_token_id": end,
        }
    return {"model_type": kind, **sizes, **extra.get(kind, {})}


def char_tokenizer(words=()):
    """One token a printable ASCII character, plus <pad>, <eos>, <unk> and these words; built in code."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = ["<pad>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=list(words),
    )  # fmt: skip


def toy_rows(n, seed, held_out=False, slips=(0.9, 0.05)):
    """n JSON lines: rollouts of a policy that adds two-digit numbers column by column and mostly forgets to carry.

    There is a rule to find: whether the units carry tells before the first digit how this will probably end, and the
    digits then tell how it did. The prompts of held_out rows never occur in the others. slips: how often it errs where
    the units carry, and where they do not.
    """
    rng, lines = random.Random(f"toy {seed} {held_out}"), []
    while len(lines) < n:
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        if (zlib.crc32(b"%d+%d" % (a, b)) % 5 == 0) != held_out:  # a fifth of the prompts, without a pattern
            continue
        carries = a % 10 + b % 10 >= 10
        slip = rng.random() < slips[not carries]
        answer = a + b - 10 * (slip and carries) + (slip and not carries)
        lines.append(json.dumps({"prompt": f"{a}+{b}=", "response": str(answer), "reward": float(answer == a + b)}))
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Value pretraining: what the scripts' main does before there is a worker, and with it
# ---------------------------------------------------------------------------------------------------------------------


def validate_run(run):
    """Raises UserError for flags of a script, other than the critic's, that cannot work."""
    for name in ("steps", "train_batch_size"):
        check_flag(run, name, "must be at least 1", lambda x: x is None or x >= 1)
    for name in ("eval_every", "save_every", "max_skipped_updates"):
        check_flag(run, name, "must not be below 0", lambda x: x >= 0)
    check_flag(run, "keep", "must be at least 1", lambda x: x is None or x >= 1)
    for name in ("gamma", "lam"):
        check_flag(run, name, "must be between 0 and 1", lambda x: 0 <= x <= 1)
    if run.eval_rollouts and not run.rollouts:
        raise UserError(f"--eval-rollouts {run.eval_rollouts}: goes with --rollouts; the toy has its own")
    if run.recorded_values and not run.rollouts:
        raise UserError("--recorded-values: goes with --rollouts")
    check_outputs(run, "hf")


def check_outputs(run, *folders):
    """UserError unless a run can write all that it writes; folders: what it exports to."""
    if run.wandb_project and importlib.util.find_spec("wandb") is None:
        raise UserError(f"--wandb-project {run.wandb_project}: wandb is not installed; pip install wandb")
    check_writable(run.out_dir, "--out-dir")
    for name in folders:
        check_replaceable(os.path.join(run.out_dir, name), "--out-dir")
    check_report(run)
    check_profile(run)


def rows_of_step(step, n, run):
    """Indices of the rows of update `step` (from 0). Each pass over the n rows has its own order, cut into updates as
    evenly as can be. A function of the step alone: a resumed run needs to know nothing else."""
    pieces = math.ceil(n / (run.train_batch_size or run.critic.ppo_mini_batch_size))
    a_pass, piece = divmod(step, pieces)
    return permutation(n, run.critic.seed, "rows", a_pass)[piece::pieces]


def count_work(n, run):
    """(rows, optimizer steps) of the whole run over n rows, skipped steps not known yet."""
    pieces = math.ceil(n / (run.train_batch_size or run.critic.ppo_mini_batch_size))
    sizes = [len(range(step % pieces, n, pieces)) for step in range(run.steps)]
    mini_batches = sum(math.ceil(size / run.critic.ppo_mini_batch_size) for size in sizes)
    return sum(sizes), mini_batches * run.critic.ppo_epochs


def find_value_range(run, model_config, rows):
    """(LOW, HIGH) of --value-head hl_gauss: as given, as it was in what the run goes on from, or what the returns of
    these rows span and a tenth of that on either side, so that no Gaussian is cut off."""
    if run.critic.value_head == "scalar" or run.critic.value_range is not None:
        return run.critic.value_range
    before = read_trainer_state(run.resume)["config"].get("value_range") if run.resume else None
    before = before or getattr(model_config, "value_range", None)
    if before:
        return tuple(before)
    zeros, mask = torch.zeros_like(rows.token_level_rewards), rows.response_mask
    _, returns = gae(rows.token_level_rewards, zeros, mask, rows.cu_seqlens, run.gamma, lam=1.0)
    low, high = returns[mask].min().item(), returns[mask].max().item()
    margin = 0.1 * (high - low) or 1.0
    return low - margin, high + margin


def add_returns(batch, run):
    """Fills advantages and returns from rewards and old values."""
    bootstrap = bootstrap_values(batch) if run.bootstrap_truncated else None
    batch.advantages, batch.returns = gae(
        batch.token_level_rewards, batch.values, batch.response_mask, batch.cu_seqlens, run.gamma, run.lam,
        bootstrap_B=bootstrap,
    )  # fmt: skip


def evaluate(worker, rows, gamma):
    """Held-out metrics against Monte-Carlo returns; loss stands beside that of the best constant. The rows keep their
    values."""
    values, mask = worker.critic.compute_values(rows), rows.response_mask
    _, returns = gae(rows.token_level_rewards, values, mask, rows.cu_seqlens, gamma, lam=1.0)
    rows.values = values
    reward_B = torch.zeros(len(rows))
    reward_B.index_add_(0, row_of_token(rows.cu_seqlens), rows.token_level_rewards)
    last = last_actions(mask, rows.cu_seqlens)
    binary = bool(((reward_B == 0) | (reward_B == 1)).all())
    return {
        "eval/explained_var": explained_variance(moments(values, returns, mask)),
        "eval/vf_loss": float(0.5 * (values - returns)[mask].double().square().mean()),
        "eval/constant_loss": float(0.5 * returns[mask].double().var(correction=0)),
        "eval/auc": auc(values[last][last >= 0], reward_B[last >= 0]) if binary else math.nan,
    }


def load_rows(run, model_config, tokenizer, check_budget):
    """(rows to learn from, rows to evaluate on or None), each one Batch, the same on every rank.

    check_budget: the script's own.
    """
    config, text = run.critic, model_config.get_text_config()
    options = {
        "tokenizer": tokenizer,
        "image_processor": load_image_processor(config, model_config),
        "image_token_id": model_config.image_token_id if reads_images(model_config) else None,
        "vocab_size": text.vocab_size,
        "max_length": max_length(model_config),
        "skip_bad_rows": run.skip_bad_rows,
    }
    if not run.rollouts:
        train = rows_to_batch(toy_rows(8192, config.seed), "toy", **options)
        held_out = rows_to_batch(toy_rows(512, config.seed, held_out=True), "toy", **options)
    else:
        train, held_out = read_jsonl(run.rollouts, "--rollouts", with_values=run.recorded_values, **options), None
        if run.eval_rollouts:
            held_out = read_jsonl(run.eval_rollouts, "--eval-rollouts", **options)
    check_budget(config, train, training=True, path=run.rollouts or "toy")
    if not run.recorded_values:
        check_budget(config, train, training=False, path=run.rollouts or "toy")
    if held_out is not None:
        check_budget(config, held_out, training=False, path=run.eval_rollouts or "toy")
    return train, held_out


def settle(run, model_config, rows):
    """(the critic's config with what follows from the rows, the update to begin with). UserError: none is left."""
    _, optimizer_steps = count_work(len(rows), run)
    config = dataclasses.replace(
        run.critic,
        total_training_steps=run.critic.total_training_steps or optimizer_steps,
        value_range=find_value_range(run, model_config, rows),
    )
    first_step = read_trainer_state(run.resume)["updates"] if run.resume else 0
    if run.resume and first_step > run.steps:
        raise UserError(f"--steps {run.steps}: {run.resume} has made {first_step} already; give more")
    return config, first_step


def print_plan(run, lengths, layout, parts, host):
    """Prints what each of --plan ranks holds, as equations. parts: name -> (bytes, equation), and on the host."""
    print0(f"layout       {layout}")
    for name, (size, equation) in host.items():
        print0(f"{name:12s} {size / 2**20:12,.1f} MiB = {equation}, on the host")
    for name, (size, equation) in parts.items():
        print0(f"{name:12s} {size / 2**20:12,.1f} MiB = {equation}")
    print0(f"{'together':12s} {sum(size for size, _ in parts.values()) / 2**20:12,.1f} MiB a rank at most")
    mini, mean, ranks = min(run.critic.ppo_mini_batch_size, len(lengths)), sum(lengths) / len(lengths), run.plan
    print0(f"{'step':12s} {mini} rows x {mean:,.0f} tokens / {ranks} ranks = {mini * mean / ranks:,.0f} tokens a rank")


def print_work(worker, run, rows):
    """Prints what value pretraining on these rows comes to, as equations."""
    config, (rows_seen, optimizer_steps) = worker.config, count_work(len(rows), run)
    if config.value_range:
        low, high = config.value_range
        print0(f"value head {config.value_bins} bins x {(high - low) / config.value_bins:.3g} = [{low:g}, {high:g}]")
    tokens, actions = len(rows.input_ids), int(rows.response_mask.sum())
    print0(f"rows       {len(rows):,} rows, {tokens:,} tokens, {actions:,} actions, longest row {max(rows.lengths):,}")
    passes, minis = rows_seen / len(rows), optimizer_steps / run.steps / config.ppo_epochs
    print0(f"steps      {run.steps} updates x {rows_seen / run.steps:.6g} rows = {passes:.3g} passes over the rows")
    print0(
        f"optimizer  {run.steps} updates x {config.ppo_epochs} epochs x {minis:.6g} mini-batches = {optimizer_steps} "
        f"steps, lr {worker.critic.peak_lr:g}"
    )
