"""Utilities that the scripts of this repository share. Nothing here knows FSDP, Megatron or who calls.

In this order: how a process starts and ends, the flat Batch, rows as JSON, dispatch over ranks, PPO maths,
attention over packed rows, FLOPs, logs, checkpoint folders, a model's folder, tiny models, the report.

Shapes are in the names:
    T tokens, sequences end to end   B sequences   A actions   L longest sequence   N bins of a value
    H query heads   K key and value heads   D features of a head
"""

import contextlib
import dataclasses
import datetime
import enum
import functools
import glob
import hashlib
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
from typing import Annotated, NamedTuple

import jinja2
import pydantic
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import transformers
from huggingface_hub import snapshot_download
from pydantic import Field
from safetensors import safe_open
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints when it starts and stops

# ---- How a process starts and ends -------------------------------------------------------------------

RANK = int(os.environ.get("RANK", 0))  # torchrun sets these; plain `python` is a world of one
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))


class UserError(ValueError):
    """A mistake that the user can fix; `launch` prints its one line, which names the flag or row.

    cause: an exception to quote in it, with its line breaks removed.
    """

    def __init__(self, text, cause=None):
        if cause is not None:
            text += f" ({type(cause).__name__}: {' '.join(str(cause).split())[:300]})"
        super().__init__(text)


def print0(*args):
    """Prints on rank 0 only."""
    if RANK == 0:
        print(*args, flush=True)


def setup_distributed(timeout_minutes=30.0):
    """Joins the process group (a group of one without torchrun) -> this rank's torch.device.

    Collectives on host tensors use gloo, those on device tensors the device's own backend (NCCL on CUDA). A
    peer that does not answer within timeout_minutes ends the run.
    """
    if ("RANK" in os.environ) != ("MASTER_ADDR" in os.environ) or (
        WORLD_SIZE > 1 and "RANK" not in os.environ
    ):
        raise UserError("RANK, WORLD_SIZE, MASTER_ADDR: only some are set; start several ranks with torchrun")
    device, backend = torch.device("cpu"), "gloo"
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else device
    if found.type not in ("cpu", "mps"):  # Apple's GPU has no collectives
        count = torch.accelerator.device_count()
        if LOCAL_RANK >= count:
            raise UserError(
                f"--nproc-per-node: this machine has {count} devices; start at most {count} ranks"
            )
        torch.accelerator.set_device_index(LOCAL_RANK)
        device = torch.device(found.type, LOCAL_RANK)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=timeout_minutes), **alone)
    return device


def of_all_ranks(mine, group=None):
    """What each rank of `group` (None: all) passes, as a list (a collective)."""
    everyones = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group)
    return everyones


def launch(main):
    """Runs main() and ends the process: 0 on success, 2 on a UserError (one line, no traceback), else 1.

    It ends by os._exit, because gloo's threads outlive destroy_process_group and abort about one exit in six
    while the interpreter shuts down. Other ranks report after rank 0, so a shared error is printed once.
    """
    code, message = 0, ""
    if (
        "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux"
    ):  # ranks would outlive a killed torchrun
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    try:
        main()
        if dist.is_initialized():
            dist.barrier()
    except UserError as error:
        code, message = 2, f"error: {error}\n"
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException as error:
        code, message = 1, traceback.format_exc()
        if is_out_of_memory(error):
            message += "error: out of memory; --resume auto continues with half the token budgets\n"
        elif "No space left on device" in message:
            message += "error: the disk is full (No space left on device); make room and use --resume auto\n"
        elif re.search("Timed out waiting|closed by peer|reset by peer|Broken pipe", message):  # gloo's words
            message += "error: another rank died or hangs; look for its own message, then use --resume\n"
    if code and RANK > 0:
        time.sleep(5)  # torchrun ends this process as soon as rank 0 is gone
        message = message.replace("error:", f"error on rank {RANK}:", 1)
    with contextlib.suppress(OSError):  # the streams may be files on a full disk
        sys.stdout.flush()
        sys.stderr.write(message)
        sys.stderr.flush()
    os._exit(code)


def is_out_of_memory(error):
    """Whether the device or the host ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def peak_memory_gib(device):
    """GiB at the highest point so far: of the device, or of the process on CPU."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return torch.accelerator.max_memory_allocated() / 2**30


def peak_bytes(call, device):
    """The most bytes of tensors that call() holds at a time, beyond those that exist before."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        call()
        return torch.accelerator.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as log:
        call()
    events = sorted(
        (e.start_ns(), e.nbytes()) for e in log.profiler.kineto_results.events() if e.name() == "[memory]"
    )
    return max(itertools.accumulate((n for _, n in events), initial=0))


def find_budget(probe, row_tokens, limit_gib, held, to_come, device):
    """Most tokens of a rank's micro-batch that fit into memory, equal on all ranks (a collective).

    probe(rows) trains, without a step, on this many rows, of which a rank computes row_tokens each. limit_gib:
    memory of a rank (None: what the device has free). held, to_come: bytes of weights, gradients and optimizer
    state on this rank that exist by then, and that do not exist yet.
    """
    rows, limit = math.ceil(512 / row_tokens), (limit_gib or math.inf) * 2**30
    probe(rows)  # creates what stays: gradients, workspaces
    if device.type != "cpu":
        unused = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
        limit = min(limit, torch.accelerator.get_memory_info()[0] + unused + held)
    room = torch.tensor(held + to_come - 0.9 * limit, dtype=torch.float64)  # the allocator loses a tenth
    dist.all_reduce(room, dist.ReduceOp.MAX)
    while (
        True
    ):  # more rows, until they take half of the room: what does not grow with them matters little then
        peak = torch.tensor(float(peak_bytes(functools.partial(probe, rows), device)))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        grow = -float(room) / float(peak)
        if grow < 2 or rows * row_tokens > 2**22:
            break
        rows = math.ceil(rows * min(grow / 1.5, 8))
    tokens = max(int(rows * row_tokens * grow), 0)
    bytes_ = f"{float(peak) / (rows * row_tokens):,.0f} bytes a token"
    print0(f"budget     {-float(room) / 2**30:.3g} GiB of room / {bytes_} = {tokens:,} tokens a micro-batch")
    return tokens


def probe_rows(n, length):
    """A Batch of n rows of this many tokens; every token but the first of a row is an action."""
    mask = torch.ones(n, length, dtype=torch.bool)
    mask[:, 0] = False
    zeros, ends = torch.zeros(n * length), cumulative(torch.full((n,), length))
    rows = torch.arange(n)
    return Batch(zeros.long(), ends, mask.flatten(), rows, rows < 0, values=zeros, returns=zeros)


# ---- The batch: flat and ragged from the file to the loss --------------------------------------------


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
    row_id: torch.Tensor  # (B,) int64: global id; order and shuffles depend on it, never on the layout
    truncated: torch.Tensor  # (B,) bool: the response hit the length limit
    token_level_rewards: torch.Tensor | None = (
        None  # from here (T,) float32, zero where response_mask is false
    )
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    ref_log_probs: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None  # as the rollout engine sampled them
    multi_modal_inputs: list | None = None  # B dicts, {} for a row without images

    ROWS = ("row_id", "truncated", "multi_modal_inputs")
    FLOATS = ("token_level_rewards", "values", "returns", "advantages", "old_log_probs", "ref_log_probs",
              "rollout_log_probs")  # fmt: skip

    def __len__(self):
        return len(self.row_id)

    @property
    def lengths(self):
        """Tokens of each sequence, as a list of B ints."""
        return self.cu_seqlens.diff().tolist()

    @property
    def longest(self):
        """(tokens, row_id) of the longest sequence; (0, -1) without any."""
        return max(zip(self.lengths, self.row_id.tolist(), strict=True), default=(0, -1))

    def token_index(self, rows):
        """Indices into the (T,) columns of the tokens of these rows, in the order of `rows`."""
        starts = self.cu_seqlens.tolist()
        pieces = [torch.arange(starts[r], starts[r + 1]) for r in rows]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)

    def select(self, rows):
        """A new Batch of these rows (a sequence of indices), in that order; it shares no memory with this one."""
        rows = list(rows)
        tokens, row_index = self.token_index(rows), torch.tensor(rows, dtype=torch.int64)
        columns = {"cu_seqlens": cumulative(self.cu_seqlens.diff()[row_index])}
        for name, column in vars(self).items():
            if isinstance(column, list):
                columns[name] = [column[r] for r in rows]
            elif column is not None and name != "cu_seqlens":
                columns[name] = column[row_index if name in self.ROWS else tokens]
        return Batch(**columns)

    def split(self, size):
        """Consecutive pieces of `size` rows; the last one may be shorter."""
        return [self.select(range(i, min(i + size, len(self)))) for i in range(0, len(self), size)]

    def check(self):
        """Raises ValueError if the columns do not fit together; -> self."""
        starts, tokens = self.cu_seqlens[:-1].long(), len(self.input_ids)
        if self.cu_seqlens[0] != 0 or self.cu_seqlens[-1] != tokens or (self.cu_seqlens.diff() < 1).any():
            raise ValueError(f"cu_seqlens must rise from 0 to the {tokens} tokens, is {self.cu_seqlens}")
        for name, column in vars(self).items():
            n = len(starts) if name in self.ROWS else tokens
            if column is not None and name != "cu_seqlens" and len(column) != n:
                raise ValueError(f"{name} has {len(column)} entries instead of {n}")
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
    """One Batch of the rows of all, in order. A column must exist in every batch or in none, but for images."""
    columns = {"cu_seqlens": cumulative(torch.cat([batch.cu_seqlens.diff() for batch in batches]))}
    for name in vars(batches[0]).keys() - columns.keys():
        parts = [getattr(batch, name) for batch in batches]
        if name == "multi_modal_inputs" and any(parts):
            parts = [part or [{}] * len(batch) for part, batch in zip(parts, batches, strict=True)]
        missing = sum(part is None for part in parts)
        if 0 < missing < len(parts):
            raise ValueError(f"column {name} is missing in some of the batches")
        if not missing:
            columns[name] = sum(parts, []) if isinstance(parts[0], list) else torch.cat(parts)
    return Batch(**columns)


def masked_token():
    """A Batch of one token that is not an action: what a rank without rows computes to keep in step."""
    zero, false = torch.zeros(1), torch.tensor([False])
    ends, row = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([-1])
    return Batch(zero.long(), ends, false, row, false, **dict.fromkeys(Batch.FLOATS, zero))


def gather(batch, group=None):
    """The rows of all ranks of `group` (None: all), on each of them, in row_id order (a collective).

    Raises ValueError if two ranks pass the same row, or if a batch is not sound.
    """
    parts = [batch.check()]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        parts = of_all_ranks(
            batch.select(range(len(batch))), group
        )  # pickle would send a view's whole storage
    whole = concat(parts)
    order = whole.row_id.argsort(stable=True)
    twice = whole.row_id[order][1:][whole.row_id[order].diff() == 0]
    if len(twice):
        raise ValueError(f"row_id {int(twice[0])} occurs more than once: each rank passes the rows it owns")
    return whole.select(order.tolist())


# ---- Rows as JSON, one a line ------------------------------------------------------------------------

Number = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)] | bool  # float32 can hold the square
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[int], Field(min_length=1)]


class Message(pydantic.BaseModel, extra="allow"):
    """One message of a chat."""

    role: str
    content: str | list | None = None


class Rollout(pydantic.BaseModel, strict=True):
    """One line of a JSONL file, with exactly one of each group; other keys are ignored."""

    prompt: Text | None = None  # text,
    messages: Annotated[list[Message], Field(min_length=1)] | None = None  # a chat, or token ids
    prompt_ids: Ids | None = None

    response: Text | None = None
    response_ids: Ids | None = None

    reward: Number | None = None  # for the last action, or one for each response token
    rewards: list[Number] | None = None

    response_mask: list[Annotated[bool, Field(strict=False)]] | None = (
        None  # which response tokens are actions
    )
    values: list[Number] | None = None  # of the response tokens, by the critic that was there
    truncated: bool | None = None  # the response hit the length limit
    images: list[str] | None = None  # files, relative to the JSONL, or data URLs

    @pydantic.model_validator(mode="after")
    def one_of_each(self):
        for names in (
            ("prompt", "messages", "prompt_ids"),
            ("response", "response_ids"),
            ("reward", "rewards"),
        ):
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) != 1:
                raise ValueError(
                    f"needs exactly one of {', '.join(names)}; has {' and '.join(given) or 'none'}"
                )
        return self


def read_rows(source, tokenizer, limits=(2**31, 2**31), flag="--rollouts", skip_bad_rows=False, with_values=False,
              place_images=None):  # fmt: skip
    """Rollouts of a JSONL file (or of its lines) as one Batch; row_id counts lines from 0.

    A scalar "reward" goes to the last action; one on a token that is not an action goes to the action before it
    (or to the first), which earned it. A text "response" is closed with the tokenizer's end-of-sequence token
    unless the row is truncated: choosing to stop is an action too. "values" are read only if with_values.
    limits: (vocab_size, most tokens of a row). place_images(rollout, folder) prepares a row's images.

    Raises UserError naming file, line and fault of the first bad row; with skip_bad_rows such rows are left
    out, counted and printed.
    """
    lines, folder, name = source, "", "toy"
    if isinstance(source, str | os.PathLike):
        folder, name = os.path.dirname(source), f"{flag} {source}"
        try:
            with open(source, "rb") as file:
                lines = list(file)
        except OSError as error:
            raise UserError(f"{name}: {error.strerror}") from None
    rows, faults = {}, {}  # by line number
    for number, line in enumerate(progress(lines, "rows"), 1):
        if line.strip():
            try:
                rollout = parse_rollout(line, tokenizer)
                if rollout.images and place_images is None:
                    raise UserError("it has images, this model reads text only")
                if place_images is not None:
                    place_images(rollout, folder)
                rows[number] = columns_of(rollout, limits, with_values)
            except UserError as fault:
                faults[number] = str(fault)[:500]
    report_faults(faults, len(rows) + len(faults), name, skip_bad_rows)
    if not any(any(row["mask"]) for row in rows.values()):
        raise UserError(f"{name}: no usable row, or none with an action")
    join = lambda key, dtype: torch.tensor([x for row in rows.values() for x in row[key]], dtype=dtype)
    images = [row["images"] for row in rows.values()]
    return Batch(
        input_ids=join("ids", torch.int64),
        cu_seqlens=cumulative(torch.tensor([len(row["ids"]) for row in rows.values()])),
        response_mask=join("mask", torch.bool),
        row_id=torch.tensor(list(rows)) - 1,
        truncated=torch.tensor([row["truncated"] for row in rows.values()]),
        token_level_rewards=join("rewards", torch.float32),
        values=join("values", torch.float32) if with_values else None,
        multi_modal_inputs=images if any(images) else None,
    )


def report_faults(faults, n, name, skip_bad_rows):
    """faults: line number -> fault, among n rows. UserError with the first, or prints those left out."""
    if faults and not skip_bad_rows:
        first, more = min(faults), f", and {len(faults) - 1} more bad rows" if len(faults) > 1 else ""
        raise UserError(f"{name}:{first}: {faults[first]}{more} (--skip-bad-rows leaves bad rows out)")
    if faults:
        print0(f"{name}: left out {len(faults)} bad rows of {n}")
        for number in sorted(faults)[:5]:
            print0(f"  line {number}: {faults[number]}")


def parse_rollout(line, tokenizer):
    """One JSON line -> Rollout with token ids. UserError says what is wrong."""
    try:
        row = Rollout.model_validate_json(line)
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        text = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        where, given = "".join(map(str, fault["loc"][:1])), f", not {fault['input']!r:.40}"
        raise UserError(f"{where}: {text}{given}" if where else text) from None
    if tokenizer is None and (row.prompt_ids is None or row.response_ids is None):
        raise UserError("it is text, and there is no tokenizer to read it with; give --tokenizer")
    if row.messages is not None:  # a chat template writes special tokens itself
        text = chat_text(tokenizer, [message.model_dump() for message in row.messages])
        row.prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif row.prompt is not None:
        row.prompt_ids = tokenizer(row.prompt)["input_ids"]
    if row.response is not None:
        row.response_ids = tokenizer(row.response, add_special_tokens=False)["input_ids"]
        end = tokenizer.eos_token_id
        if end is not None and not row.truncated and row.response_ids[-1:] != [end]:
            row.response_ids.append(end)
    return row


def chat_text(tokenizer, messages):
    """Messages through the tokenizer's chat template. UserError: they do not fit."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs and raise anything
        raise UserError("messages do not fit the tokenizer's chat template", error) from None


def columns_of(rollout, limits, with_values):
    """A Rollout -> its columns, lists over its tokens. UserError says what is wrong."""
    prompt, response, (vocab_size, longest) = rollout.prompt_ids, rollout.response_ids, limits
    ids, before = prompt + response, [0] * len(prompt)
    if not prompt or not response:
        raise UserError("empty prompt" if response else "empty response")
    if len(ids) > longest:
        raise UserError(f"{len(ids)} tokens, longer than the model's max_position_embeddings, {longest}")
    if odd := [i for i in ids if not 0 <= i < vocab_size]:
        raise UserError(f"token id {odd[0]} is outside the model's vocabulary of {vocab_size}")
    if with_values and rollout.values is None:
        raise UserError('it has no "values"')
    for name in ("rewards", "values", "response_mask"):
        column = getattr(rollout, name)
        if column is not None and len(column) != len(response):
            raise UserError(f"{name} has {len(column)} entries, the response has {len(response)} tokens")
    mask = before + (rollout.response_mask or [True] * len(response))
    given = before + (rollout.rewards or [0.0] * (len(response) - 1) + [rollout.reward])
    rewards, owner = [0.0] * len(ids), mask.index(True) if True in mask else None
    for t, reward in enumerate(given):
        owner = t if mask[t] else owner
        if reward and owner is None:
            raise UserError(
                "a reward, but no action that could have earned it: response_mask is 0 everywhere"
            )
        if reward:
            rewards[owner] += reward
    values = [x if own else 0.0 for x, own in zip(before + (rollout.values or []), mask, strict=False)]
    images = {"images": rollout.images} if rollout.images else {}
    return {"ids": ids, "mask": mask, "rewards": rewards, "values": values, "images": images,
            "truncated": bool(rollout.truncated)}  # fmt: skip


def write_jsonl(batch, path):
    """Writes ids, masks, rewards, values and `truncated` of a Batch as JSONL, complete or not at all.

    read_rows gives the same columns back, bit for bit, with rows numbered anew. Everything before the first
    action is the prompt. Images are left out.
    """
    rows = []
    columns = {"rewards": batch.token_level_rewards, "values": batch.values}
    for b, (start, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        mask = batch.response_mask[start:end]
        cut = start + (int(mask.int().argmax()) if mask.any() else end - start - 1)
        row = {
            "prompt_ids": batch.input_ids[start:cut].tolist(),
            "response_ids": batch.input_ids[cut:end].tolist(),
        }
        row |= {
            "response_mask": batch.response_mask[cut:end].int().tolist(),
            "truncated": bool(batch.truncated[b]),
        }
        rows.append(row | {name: x_T[cut:end].tolist() for name, x_T in columns.items() if x_T is not None})
    replace_lines(path, rows)


# ---- Dispatch: every rank runs the same program; a decorator says what the arguments mean ------------


class Dispatch(enum.Enum):
    ONE_TO_ALL = "every rank calls with the same arguments"
    DP_COMPUTE_PROTO = "every rank calls with the rows it owns and gets the results of those rows"


def register(dispatch, needs=()):
    """Decorates a worker's method with its Dispatch.

    Under DP_COMPUTE_PROTO the rows of all ranks are gathered in row_id order, with the optional columns in
    `needs` and no others, and the method sees the *global* batch: what it computes cannot depend on who owned
    which row. A (T,) result, one number per token of the global batch, is cut back to the caller's own rows in
    the caller's order; other results (metrics) are returned as they are. ValueError: a needed column is missing.
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


# ---- PPO maths on flat data --------------------------------------------------------------------------


def permutation(n, *key):
    """A permutation of range(n) drawn from the key alone (say seed, step, epoch), the same on every rank."""
    return random.Random(" ".join(map(str, key))).sample(range(n), n)


def rows_of_step(step, n, size, seed):
    """Indices of the rows of update `step` (from 0). Each pass over the n rows has its own order, cut into
    updates of at most `size` rows as evenly as possible. A function of the step, so resuming needs no state."""
    pieces = math.ceil(n / size)
    return permutation(n, seed, "rows", step // pieces)[step % pieces :: pieces]


def actions_per_row(response_mask_T, cu_seqlens):
    """(B,) int64: actions of each sequence."""
    return F.pad(response_mask_T.cumsum(0), (1, 0))[cu_seqlens.long()].diff()


def last_actions(response_mask_T, cu_seqlens):
    """(B,) index of each sequence's last action in the (T,) columns, -1 where it has none."""
    index_T = torch.where(response_mask_T, torch.arange(len(response_mask_T)), -1)
    last_B = torch.full((len(cu_seqlens) - 1,), -1)
    return last_B.scatter_reduce(0, row_of_token(cu_seqlens), index_T, "amax")


def gae(rewards_T, values_T, response_mask_T, cu_seqlens, gamma=1.0, lam=1.0, bootstrap_B=None):
    """Generalised advantage estimation over the actions of each row -> (advantages_T, returns_T) float32.

        delta_k = r_k + gamma V_{k+1} - V_k,    A_k = delta_k + gamma lam A_{k+1}    (1506.02438, eq. 11-16)
        returns = A + V

    k counts actions only. A reward on another token goes to the action before it, or to the first. lam: a
    number, or (B,) one for each row. bootstrap_B: (B,) stands for all that would follow the last action (None:
    every row ended). Zero where response_mask is false; float64 inside.
    """
    rewards, values = rewards_T.double().tolist(), values_T.double().tolist()
    lam_B = torch.as_tensor(lam, dtype=torch.float64).expand(len(cu_seqlens) - 1).tolist()
    next_B = [0.0] * len(lam_B) if bootstrap_B is None else bootstrap_B.tolist()
    advantages = [0.0] * len(rewards)
    mask = response_mask_T.tolist()
    for b, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        advantage = reward = 0.0
        first = None
        for t in reversed(range(start, end)):
            reward += rewards[t]
            if mask[t]:
                delta = reward + gamma * next_B[b] - values[t]
                advantage = advantages[t] = delta + gamma * lam_B[b] * advantage
                next_B[b] = values[t]
                reward = 0.0
                first = t
        if first is not None:
            advantages[first] += reward
    advantages_T = torch.tensor(advantages, dtype=torch.float64)
    return advantages_T.float(), torch.where(response_mask_T, advantages_T + values_T, 0.0).float()


def bootstrap_values(batch):
    """(B,) for gae: the last value of rows that were cut off, 0 for rows that ended or have no action. The
    state after the last action has no value of its own, because nothing was sampled from it."""
    last_B = last_actions(batch.response_mask, batch.cu_seqlens)
    return torch.where(batch.truncated & (last_B >= 0), batch.values[last_B], 0.0)


def add_returns(batch, gamma, lam, bootstrap_truncated):
    """Fills advantages and returns from rewards and old values."""
    tail_B = bootstrap_values(batch) if bootstrap_truncated else None
    columns = (batch.token_level_rewards, batch.values, batch.response_mask, batch.cu_seqlens)
    batch.advantages, batch.returns = gae(*columns, gamma, lam, tail_B)


def count_steps(n, steps, size, mini_batch_size, epochs):
    """Optimizer steps of a run of this many updates over n rows; skipped steps are not known yet."""
    sizes = [len(range(step % math.ceil(n / size), n, math.ceil(n / size))) for step in range(steps)]
    return epochs * sum(math.ceil(x / mini_batch_size) for x in sizes)


def return_range(batch, gamma):
    """(LOW, HIGH) of hl_gauss: what the returns span and a tenth of it on either side, so no Gaussian is cut off."""
    returns_A = monte_carlo(batch, gamma)[batch.response_mask]
    low, high = float(returns_A.min()), float(returns_A.max())
    margin = 0.1 * (high - low) or 1.0
    return low - margin, high + margin


def monte_carlo(batch, gamma):
    """(T,) discounted sums of the rewards from each action on."""
    zeros_T = torch.zeros(len(batch.input_ids))
    return gae(batch.token_level_rewards, zeros_T, batch.response_mask, batch.cu_seqlens, gamma)[1]


LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def loss_counts(response_mask_T, cu_seqlens):
    """(actions, rows that have any) of a *global* mini-batch: the only denominators of a loss."""
    actions_B = actions_per_row(response_mask_T, cu_seqlens)
    return int(actions_B.sum()), int((actions_B > 0).sum())


def loss_weights(response_mask_T, cu_seqlens, mode, counts, response_length_limit=None):
    """(T,) weights whose sum with the token losses is the loss, whatever part of the mini-batch these rows are.

        token-mean                1 / N_tokens
        seq-mean-token-sum        1 / N_seqs
        seq-mean-token-mean       1 / (N_seqs len_i)                    len_i: actions of the token's row
        seq-mean-token-sum-norm   1 / (N_seqs response_length_limit)    (Dr. GRPO's constant, 2503.20783)

    counts: (N_tokens, N_seqs) of the global mini-batch, see loss_counts; at least one each.
    """
    tokens, seqs = counts
    if mode == "token-mean":
        return response_mask_T / tokens
    weights_T = response_mask_T / seqs
    if mode == "seq-mean-token-mean":
        actions_B = actions_per_row(response_mask_T, cu_seqlens).clamp(min=1)
        weights_T = weights_T / actions_B[row_of_token(cu_seqlens)]
    elif mode == "seq-mean-token-sum-norm":
        weights_T = weights_T / response_length_limit
    return weights_T


def value_loss(vpreds_T, values_T, returns_T, response_mask_T, weights_T, cliprange_value=None):
    """Clipped value loss -> (loss, number of actions where clipping decided), both 0-dim tensors.

        L_t = 0.5 max( (v_t - R_t)^2, (clip(v_t, v_old - eps, v_old + eps) - R_t)^2 ),   loss = sum_t w_t L_t

    PPO's clipping carried over to values (Schulman et al.'s code for 1707.06347). cliprange_value None is plain
    squared error. What stands where response_mask is false never enters, not even a NaN.
    """
    clean = lambda x_T: torch.where(response_mask_T, x_T, 0.0)
    v_T, returns_T = clean(vpreds_T), clean(returns_T)
    error_T = (v_T - returns_T).square()
    clipped = torch.zeros((), dtype=torch.int64, device=v_T.device)
    if cliprange_value is not None:
        old_T = clean(values_T)
        clipped_T = (torch.clamp(v_T, old_T - cliprange_value, old_T + cliprange_value) - returns_T).square()
        clipped = (clipped_T > error_T).sum()
        error_T = torch.maximum(error_T, clipped_T)
    return 0.5 * (weights_T * error_T).sum(), clipped


def hl_gauss_targets(returns_T, low, high, bins):
    """(T,) returns -> (T, N) probabilities of the N bins that cut [low, high] evenly, with edges e_0 .. e_N.

        p_i = (Phi(e_i+1) - Phi(e_i)) / (Phi(e_N) - Phi(e_0)),    Phi: CDF of Normal(R, 0.75 bin widths)

    A return outside is moved to the end of the range. HL-Gauss, Imani & White 1806.04613; the width, and values
    of deep RL learned this way: Farebrother et al. 2403.03950.
    """
    edge_N = torch.linspace(low, high, bins + 1, device=returns_T.device)
    sigma = 0.75 * (high - low) / bins
    cdf_TN = torch.erf((edge_N - returns_T.clamp(low, high)[:, None]) / (sigma * math.sqrt(2)))
    return cdf_TN.diff() / (cdf_TN[:, -1:] - cdf_TN[:, :1])


def hl_gauss_values(logits_TN, low, high):
    """(T, N) logits of the bins -> (T,) values: the mean of the bins' centres, sum_i softmax(logits)_i c_i."""
    half = (high - low) / logits_TN.shape[1] / 2
    centre_N = torch.linspace(low + half, high - half, logits_TN.shape[1], device=logits_TN.device)
    return (logits_TN.softmax(1) * centre_N).sum(1)


def hl_gauss_loss(logits_TN, returns_T, response_mask_T, weights_T, low, high):
    """Cross-entropy of a categorical value with the Gaussian around the return -> loss, a 0-dim tensor.

        L_t = -sum_i p_i(R_t) log softmax(logits_t)_i,    loss = sum_t w_t L_t,    p: hl_gauss_targets

    Old values do not enter: clipping has no counterpart here. Masked entries never enter, not even a NaN.
    """
    returns_T = torch.where(response_mask_T, returns_T, 0.0)
    logits_TN = torch.where(response_mask_T[:, None], logits_TN, 0.0)
    p_TN = hl_gauss_targets(returns_T, low, high, logits_TN.shape[1])
    return -(weights_T * (p_TN * logits_TN.log_softmax(1)).sum(1)).sum()


def explained_variance(values_A, returns_A):
    """1 - Var(R - V) / Var(R): 1 is perfect, 0 as good as a constant, NaN if all returns are equal."""
    if len(returns_A) == 0:
        return math.nan
    error_A = returns_A.double() - values_A.double()
    variance = returns_A.double().var(correction=0)
    if variance <= 1e-9 * (returns_A.double().square().mean() + error_A.square().mean()):  # it is rounding
        return math.nan
    return float(1 - error_A.var(correction=0) / variance)


def auc(scores, labels):
    """Area under the ROC curve: the chance that a 1 scores above a 0, ties counting half (Mann & Whitney 1947).

    (N,) scores, (N,) labels of 0 and 1 -> float; NaN unless both labels occur and every score is finite.
    """
    positive = labels > 0.5
    ones = int(positive.sum())
    pairs = ones * (len(labels) - ones)
    if pairs == 0 or not scores.isfinite().all():
        return math.nan
    _, tie, count = scores.double().unique(return_inverse=True, return_counts=True)
    mean_rank = count.cumsum(0).double() - (count - 1) / 2  # ranks from 1, ties share theirs
    return float((mean_rank[tie][positive].sum() - ones * (ones + 1) / 2) / pairs)


def batch_metrics(batch):
    """Values and returns of a batch's actions before it is learned, and how far they agree."""
    mask = batch.response_mask
    metrics = {"critic/explained_var": explained_variance(batch.values[mask], batch.returns[mask])}
    for name in ("values", "returns") if mask.any() else ():
        x = getattr(batch, name)[mask].double()
        numbers = {"mean": x.mean(), "std": x.std(correction=0), "min": x.min(), "max": x.max()}
        metrics |= {f"critic/{name}_{key}": float(number) for key, number in numbers.items()}
    return metrics


def evaluate(rows, gamma):
    """Metrics of held-out rows with values, against the discounted sums of their rewards."""
    returns_T = monte_carlo(rows, gamma)
    r_A = returns_T[rows.response_mask].double()
    v_A = rows.values[rows.response_mask].double()
    last_B = last_actions(rows.response_mask, rows.cu_seqlens)
    reward_B = torch.zeros(len(rows)).index_add(0, row_of_token(rows.cu_seqlens), rows.token_level_rewards)
    binary = bool(((reward_B == 0) | (reward_B == 1)).all())
    acts_B = last_B >= 0
    return {
        "eval/explained_var": explained_variance(v_A, r_A),
        "eval/vf_loss": float(0.5 * (v_A - r_A).square().mean()),
        "eval/constant_loss": float(0.5 * r_A.var(correction=0)),
        "eval/auc": auc(rows.values[last_B[acts_B]], reward_B[acts_B]) if binary else math.nan,
    }


# ---- Attention over packed rows: one function for every model, known to transformers as "packed" -----

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None


class PackLayout(NamedTuple):
    """Where the sequences of a packed row lie, for queries and for the keys they see. With fewer queries than
    keys, the queries are the last of their sequence (causal attention aligned at the end)."""

    runs: list  # (queries, keys, count): neighbours of equal lengths are one dense call
    cu_q: torch.Tensor  # (B+1,) int32, on the device
    cu_k: torch.Tensor
    longest_q: int
    longest_k: int


def pack_layout(lengths, device, key_lengths=None):
    """PackLayout of sequences of these lengths end to end, with these numbers of keys (None: the same)."""
    key_lengths = key_lengths or lengths
    pairs = itertools.groupby(zip(lengths, key_lengths, strict=True))
    runs = [(n, m, len(list(run))) for (n, m), run in pairs]
    cu_q = cumulative(torch.tensor(lengths)).to(device, non_blocking=True)
    cu_k = cumulative(torch.tensor(key_lengths)).to(device, non_blocking=True)
    return PackLayout(runs, cu_q, cu_k, max(lengths), max(key_lengths))


class Pack:
    """The packed row that packed_attention reads in every layer. Set it before a forward and leave it until the
    backward is over, because activation checkpointing runs the forward again."""

    layout = None  # PackLayout of the whole row, before it is sliced over sequence-parallel ranks
    group = None  # ranks that share the row, or None
    kernel = None  # what the last call used
    windows = set()  # the sliding windows that the layers passed


def set_pack(lengths, device, group=None):
    """Declares the next forward's row: sequences of these lengths end to end."""
    Pack.layout = pack_layout(lengths, device)
    Pack.group = group
    Pack.windows = set()


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
                     softcap=None, is_causal=None, s_aux=None, **kwargs):  # fmt: skip
    """Causal attention within each sequence of the packed row: q (1,H,T,D), k v (1,K,T,D) -> (1,T,H,D), None.

    The signature is transformers' AttentionInterface.
    """
    assert not dropout, "a critic has no dropout: with it the same batch would not give the same update"
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is not None or not causal or kwargs.get("position_bias") is not None:
        raise UserError(f"--use-remove-padding: {type(module).__name__} asks for more than causal attention "
                        "(a mask, a bias, later tokens), which packing drops; add --no-use-remove-padding")  # fmt: skip
    Pack.windows.add(sliding_window)
    query, key = query.to(value.dtype), key.to(value.dtype)  # float32 rotary tables make them wider
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attention(Pack.layout, query, key, value, scale, sliding_window, softcap, s_aux).transpose(
        1, 2
    ), None


transformers.AttentionInterface.register("packed", packed_attention)


def attention(layout, q, k, v, scale, window=None, softcap=None, sinks=None):
    """(1,H,T,D) causal attention within the sequences of the layout, by the fastest kernel for these inputs.

    flash-attn, else PyTorch's variable-length attention on CUDA in half precision, else one SDPA call for each
    run of equal lengths; written out for soft-capped scores (Gemma 2) and attention sinks (gpt-oss).
    """
    half = (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability() >= (8, 0)
    )
    half = half and q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and sinks is None
    if half and (flash_attn_varlen_func or (varlen_attn and not softcap)):
        Pack.kernel = "flash" if flash_attn_varlen_func else "varlen"
        kernel = flash_attention if flash_attn_varlen_func else varlen_attention
        flat = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]  # (T,H,D) each
        return kernel(layout, *flat, scale, window, softcap).transpose(0, 1)[None]
    Pack.kernel = "eager" if softcap or sinks is not None else "sdpa"
    pieces = []  # by split, because the backward of a slice would fill the whole row with zeros, each time
    for x, side in ((q, 0), (k, 1), (v, 1)):
        pieces.append(x[0].split([run[side] * run[2] for run in layout.runs], 1))
    outs = []
    for (*_, count), *q_k_v in zip(layout.runs, *pieces, strict=True):
        q_k_v = [x.unflatten(1, (count, -1)).transpose(0, 1) for x in q_k_v]
        if Pack.kernel == "eager":
            out_NHLD = eager_attention(*q_k_v, scale, window, softcap, sinks)
        else:
            out_NHLD = sdpa_attention(*q_k_v, scale, window)
        outs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).transpose(0, 1)[None]


def flash_attention(layout, q, k, v, scale, window=None, softcap=None):
    """(T,H,D) attention by flash-attn, which aligns queries and keys at the end."""
    options = {"softmax_scale": scale, "causal": True, "softcap": softcap or 0.0}
    window_size = (window - 1, 0) if window else (-1, -1)
    return flash_attn_varlen_func(q, k, v, *layout[1:], window_size=window_size, **options)


def varlen_attention(layout, q, k, v, scale, window=None, softcap=None):
    """The same by torch's own variable-length attention."""
    window_size = (window - 1 if window else -1, 0)  # the 0 makes it causal
    return varlen_attn(q, k, v, *layout[1:], scale=scale, window_size=window_size, enable_gqa=True)


def repeat_heads(x, heads):
    """(..., K, L, D) -> (..., heads, L, D): every key and value head as often as query heads share it."""
    return x.repeat_interleave(heads // x.shape[-3], -3)


def sdpa_attention(q, k, v, scale, window=None):
    """(N,H,L,D) attention of N sequences of one length by torch's fused kernel, with a mask only where a window
    is shorter than the sequence or there are fewer queries than keys."""
    mask = None
    if (window and k.shape[2] > window) or q.shape[2] < k.shape[2]:
        mask = causal_mask(q.shape[2], k.shape[2], window, q.device)
    if q.is_cuda:  # the kernels for float32 there know no grouped heads
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    options = {"is_causal": mask is None, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def eager_attention(q, k, v, scale, window=None, softcap=None, sinks=None):
    """(N,H,L,D) attention written out."""
    scores_NHLL = q @ repeat_heads(k, q.shape[1]).transpose(-1, -2) * scale
    if softcap:
        scores_NHLL = softcap * torch.tanh(scores_NHLL / softcap)
    scores_NHLL = scores_NHLL.masked_fill(~causal_mask(q.shape[2], k.shape[2], window, q.device), -math.inf)
    if sinks is not None:  # one more column a head, which takes probability and gives no value
        column = sinks.view(1, -1, 1, 1).expand(*scores_NHLL.shape[:3], 1).to(scores_NHLL.dtype)
        scores_NHLL = torch.cat([scores_NHLL, column], -1)
    probs_NHLL = scores_NHLL.softmax(-1, dtype=torch.float32)[..., : k.shape[2]].to(q.dtype)
    return probs_NHLL @ repeat_heads(v, q.shape[1])


def causal_mask(queries, keys, window, device):
    """(queries, keys) bool: the query at place i sees key j if j <= i and, with a window, i - j < window.
    Queries stand at the last places."""
    j = torch.arange(keys, device=device)
    back = j[keys - queries :, None] - j
    return (back >= 0) & (back < (window or keys))


# ---- FLOPs of a value model: no vocabulary head, causal attention, active experts only ---------------

# dense bf16 TFLOP/s from the vendors' data sheets; the first whose words are in the device's name counts
PEAK_TFLOPS = {
    "H100 PCIE": 756, "H100 NVL": 835, "H200 NVL": 835, "GB200": 2250, "B200": 2250, "H200": 989, "GH200": 989,
    "H800": 989, "H100": 989, "H20": 148, "A100": 312, "A800": 312, "MI300X": 1307, "L40S": 362, "L20": 119.5,
    "A40": 149.7, "RTX 4090": 165, "L4": 121, "A10": 125,
}  # fmt: skip


def device_peak_flops(device):
    """Dense bf16 FLOP/s of this device, NaN if the table does not know it (CPUs among them)."""
    if device.type != "cuda" or "MIG" in torch.cuda.get_device_name(device):
        return math.nan
    name = f" {' '.join(torch.cuda.get_device_name(device).upper().replace('-', ' ').split())} "
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS.items() if f" {key} " in name), math.nan)


class FlopsModel(NamedTuple):
    """What one token and one pair of tokens cost, forward only."""

    per_token: float  # 2 FLOPs for each weight that a token is multiplied with
    per_pair: tuple  # ((FLOPs of one query-key pair, window or None, layers), ...)

    def forward_flops(self, length):
        """FLOPs of one forward over a sequence of this many tokens; training costs three times that."""
        total = self.per_token * length
        for flops, window, layers in self.per_pair:
            w = min(window or length, length)  # query i sees min(i + 1, window) keys
            total += layers * flops * (w * (w + 1) / 2 + (length - w) * w)
        return total


def flops_model(model, config):
    """FlopsModel of a value model (on meta is enough) and its transformers config.

    Weights: every matrix but embeddings; of E experts top_k count. Attention: a pair costs 2 H (D_qk + D_v)
    FLOPs, scores and weighted sum. A vision tower is left out, so MFU reads too low for rows with images.
    """
    config = config.get_text_config()
    get = lambda *names: next((getattr(config, name) for name in names if getattr(config, name, None)), 0)
    experts = get("num_experts", "num_local_experts", "n_routed_experts")
    active = get("num_experts_per_tok", "moe_topk", "top_k_experts") / experts if experts else 1
    left_out = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    left_out += [
        module for name, module in model.named_modules() if name.endswith(("visual", "vision_tower"))
    ]
    left_out = {id(p) for module in left_out for p in module.parameters()}
    weights = 0.0
    for name, p in model.named_parameters():
        if p.ndim > 1 and id(p) not in left_out:
            weights += p.numel() * (active if ".experts." in name else 1)
    heads = get("num_attention_heads") or 1
    head_dim = get("head_dim") or config.hidden_size // heads
    qk = (
        get("qk_nope_head_dim") + get("qk_rope_head_dim") or head_dim
    )  # multi-head latent attention has two parts
    pair = 2 * heads * (qk + (get("v_head_dim") or head_dim))
    window = get("sliding_window") or None
    kinds = get("layer_types")
    if not kinds:
        slides = window and getattr(config, "use_sliding_window", True)
        kinds = ["sliding" if slides else "full"] * get("num_hidden_layers")
    sliding, full = (sum(word in kind for kind in kinds) for word in ("sliding", "full"))
    return FlopsModel(2 * weights, ((pair, None, full), (pair, window, sliding)))


def performance(seconds, tokens, flops, device):
    """perf/* metrics of an update that took `seconds` on this rank, equal on all ranks (a collective).

    tokens, flops: of all ranks together.
    """
    slowest = torch.tensor([seconds, peak_memory_gib(device)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds, memory = slowest.tolist()
    return {
        "perf/tokens_per_second": tokens / seconds,
        "perf/mfu": flops / (seconds * WORLD_SIZE * device_peak_flops(device)),
        "perf/peak_memory_gib": memory,
        "perf/time_update": seconds,
    }


# ---- Logs: what the user sees, and what a run leaves -------------------------------------------------


class Logger:
    """metrics.jsonl and TensorBoard in out_dir, and the lines that rank 0 prints; other ranks do nothing.

    settings: what run.json records. last_step: the step from which this run continues in the same files (0: a
    new run). Later steps are dropped from them, and so is an evaluation at last_step that is made again.
    """

    def __init__(self, out_dir, settings, last_step=0, evaluates_again=True):
        self.board = None
        if RANK != 0:
            return
        from torch.utils.tensorboard import SummaryWriter

        archive_old_run(out_dir, last_step)
        git = subprocess.run(
            ["git", "-C", os.path.dirname(__file__) or ".", "rev-parse", "HEAD"], capture_output=True
        )
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        about = {"command": sys.argv, "commit": git.stdout.decode().strip(), "ranks": WORLD_SIZE, **versions}
        replace_lines(os.path.join(out_dir, "run.json"), [{**settings, "run": about}])
        log = os.path.join(out_dir, "metrics.jsonl")
        rows = [row for row in read_lines(log) if row["step"] <= last_step] if last_step else []
        if evaluates_again:
            rows = [row for row in rows if row["step"] < last_step or "perf/time_step" in row]
        replace_lines(log, rows)
        self.file = open(log, "a", buffering=1)
        board = os.path.join(out_dir, "tensorboard")
        if not last_step:
            shutil.rmtree(board, ignore_errors=True)
        self.board = SummaryWriter(board, purge_step=last_step + 1 if last_step else None)

    def log(self, step, metrics):
        """metrics: dict of name -> number; one that is not finite is logged as null."""
        if self.board is None:
            return
        metrics = {name: float(x) if math.isfinite(x) else None for name, x in metrics.items()}
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, x in metrics.items():
            if x is not None:
                self.board.add_scalar(name, x, step)
        self.board.flush()  # by itself it keeps two minutes in memory

    def log_update(self, step, steps, m):
        """Logs an update of the critic and prints one aligned line about it."""
        self.log(step, m)
        eta = datetime.timedelta(seconds=round(m["perf/time_step"] * (steps - step)))
        skipped = f"  skipped {m['critic/skipped_steps']:.0f}" if m["critic/skipped_steps"] else ""
        print0(
            f"step {step:>{len(str(steps))}}/{steps}  loss {number(m['critic/vf_loss'], '.4f')}"
            f"  explained var {number(m['critic/explained_var'], '.3f'):>6}"
            f"  |g| {number(m['critic/grad_norm'], '.3g'):>7}  lr {number(m['critic/lr'], '.1e')}"
            f"  {m['perf/tokens_per_second']:>7,.0f} tok/s  mfu {number(100 * m['perf/mfu'], '.1f')} %"
            f"  {m['perf/peak_memory_gib']:.1f} GiB  eta {eta}{skipped}"
        )

    def log_evaluation(self, step, m):
        """Logs an evaluation of the critic and prints one line about it."""
        self.log(step, m)
        print0(
            f"held out   explained var {number(m['eval/explained_var'], '.3f')}   loss {m['eval/vf_loss']:.4f} "
            f"(best constant {m['eval/constant_loss']:.4f})   AUC of the last value {number(m['eval/auc'], '.3f')}"
        )

    def close(self):
        """Flushes everything, which the os._exit at the end of a run would not."""
        if self.board is not None:
            self.file.close()
            self.board.close()


def number(x, form):
    """x in the given format, or -- where there is no number yet."""
    return "--" if x is None or math.isnan(x) else format(x, form)


def read_lines(path):
    """The rows of one of our JSONL files, without a last line that a crash cut short; no file has no rows."""
    rows = []
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        for line in file:
            rows.append(json.loads(line))
    return rows


def replace_lines(path, rows):
    """Replaces a JSONL file at once: after a crash it is the old one or the new one."""
    with open(f"{path}.tmp", "w") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def dump(batch, out_dir, step):
    """The rows of all ranks as out_dir/rollouts/step_N.jsonl (a collective)."""
    whole = gather(batch)
    if RANK == 0:
        os.makedirs(os.path.join(out_dir, "rollouts"), exist_ok=True)
        write_jsonl(whole, os.path.join(out_dir, "rollouts", f"step_{step}.jsonl"))


def progress(items, what):
    """A bar over `items` on rank 0 of a terminal, shown only if the work takes longer than a few seconds."""
    return tqdm(items, desc=what, delay=3, leave=False, disable=True if RANK else None, dynamic_ncols=True)


def print_rows(rows, gamma):
    """Prints what there is to learn from: rows, returns, and how much of them a prompt alone can explain."""
    returns_T = monte_carlo(rows, gamma)
    x = returns_T[rows.response_mask].double()
    sizes = f"{len(rows):,} rows, {len(rows.input_ids):,} tokens, {len(x):,} actions"
    print0(f"rows       {sizes}, longest row {rows.longest[0]:,}")
    print0(f"returns    {x.mean():.3g} +- {x.std(correction=0):.3g}, from {x.min():.3g} to {x.max():.3g}")
    print0(
        f"ceiling    {number(ceiling(rows, returns_T), '.3f')} is what the prompt alone can explain of them"
    )


def profiled(steps, given, out_dir):
    """The same steps; rank 0 records steps A to B of given "A:B" with torch.profiler, into out_dir/profile."""
    first, last = map(int, given.split(":")) if given and RANK == 0 else (0, -1)
    for step in steps:
        if first <= step + 1 <= last:
            os.makedirs(os.path.join(out_dir, "profile"), exist_ok=True)
            with torch.profiler.profile(record_shapes=True, profile_memory=True) as trace:
                yield step
            trace.export_chrome_trace(os.path.join(out_dir, "profile", f"step_{step + 1}.json.gz"))
        else:
            yield step


def count_skipped(skipped, metrics, batch, out_dir):
    """How many updates in a row were skipped, with this one. UserError: values are not finite, or it is the tenth;
    then the rows of the last one are left as JSONL (a collective)."""
    if not math.isfinite(metrics.get("critic/values_mean", 0.0)):
        raise UserError("the critic's values are not finite, the training has diverged; use a lower --lr")
    skipped = (
        skipped + 1 if math.isnan(metrics["critic/grad_norm"]) and "critic/values_mean" in metrics else 0
    )
    if skipped == 10:
        path, whole = os.path.join(out_dir, "skipped_rows.jsonl"), gather(batch)
        if RANK == 0:
            write_jsonl(whole, path)
        raise UserError(
            f"{skipped} updates in a row were skipped, because their gradients are not finite; the rows of the last are "
            f"in {path}, for --rollouts with --recorded-values"
        )
    return skipped


# ---- Checkpoints: folders that are complete or absent ------------------------------------------------

MANIFEST = "manifest.json"  # in a complete folder: file name -> SHA-256


def start_folder(folder, group=None):
    """An empty folder next to `folder` for all ranks to write into (a collective); `publish` renames it."""
    if os.path.exists(folder) and os.listdir(folder) and not os.path.exists(os.path.join(folder, MANIFEST)):
        raise UserError(f"--out-dir: {folder} holds something else, which is not overwritten; move it")
    tmp = f"{os.path.abspath(folder)}.tmp"
    if RANK == 0:
        shutil.rmtree(tmp, ignore_errors=True)
        os.makedirs(tmp)
    dist.barrier(group)
    return tmp


def publish(tmp, folder, group=None):
    """Turns what all ranks wrote into tmp into the folder (a collective): checksums, flush, one rename.

    A crash at any moment leaves either the old folder or the new one. Needs a file system that all ranks
    share. In a thread, `group` is one that no other thread uses.
    """
    dist.barrier(group)
    paths = sorted(
        path for path in glob.glob(f"{glob.escape(tmp)}/**", recursive=True) if os.path.isfile(path)
    )
    mine = {os.path.relpath(path, tmp): checksum(path) for path in paths[RANK::WORLD_SIZE]}
    sums = {name: x for part in of_all_ranks(mine, group) for name, x in part.items()}
    if RANK == 0:
        with open(os.path.join(tmp, MANIFEST), "w") as file:
            json.dump(dict(sorted(sums.items())), file, indent=1)
        for path in (tmp, *glob.glob(f"{glob.escape(tmp)}/**", recursive=True)):
            flush_to_disk(path)
        if os.path.exists(folder):  # between these two renames the old folder is whole under the name .old
            shutil.rmtree(f"{folder}.old", ignore_errors=True)
            os.rename(folder, f"{folder}.old")
        os.rename(tmp, folder)
        flush_to_disk(os.path.dirname(tmp))
        shutil.rmtree(f"{folder}.old", ignore_errors=True)
    dist.barrier(group)


def checksum(path):
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path):
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def verify(folder):
    """UserError on all ranks unless a published folder, or a part of one, is as it was written (a collective)."""
    root = folder if os.path.exists(os.path.join(folder, MANIFEST)) else os.path.dirname(folder)
    try:
        with open(os.path.join(root, MANIFEST)) as file:
            text = file.read()
        sums = json.loads(text)
        names = sorted(name for name in sums if os.path.join(root, name).startswith(folder))
        if text != json.dumps(sums, indent=1) or not names:  # as publish wrote it, to the byte
            raise ValueError
    except (OSError, ValueError, TypeError):
        raise UserError(f"--resume {folder}: no complete checkpoint here (no readable {MANIFEST})") from None
    faults = []
    for name in names[RANK::WORLD_SIZE]:
        path = os.path.join(root, name)
        if not os.path.exists(path) or checksum(path) != sums[name]:
            faults.append(f"{name} is {'not what was written' if os.path.exists(path) else 'missing'}")
    if faults := sorted(sum(of_all_ranks(faults), [])):
        raise UserError(f"--resume {folder}: damaged, {faults[0]}; use an earlier checkpoint")


class Checkpoints:
    """The checkpoints of one run, as a context manager around it.

    resume: a folder to continue from, "auto" for the newest undamaged one of out_dir (if any), or None.
    `folder` is that folder or None. `halvings`: how often this run ran out of memory before, which --resume
    auto answers by halving token budgets as often. SIGTERM, by which schedulers announce the end, is noted.
    """

    def __init__(self, out_dir, resume, keep, in_background, timeout_minutes):
        self.out_dir, self.folder, self.keep = (
            os.path.abspath(out_dir),
            resume and os.path.abspath(resume),
            keep,
        )
        self.in_background = in_background
        self.timeout = datetime.timedelta(minutes=timeout_minutes)
        self.saving = self.group = None
        self.halvings = 0
        self.sigterm = threading.Event()
        if resume == "auto":
            self.folder = newest_checkpoint(self.out_dir)
            for halvings in read_lines(os.path.join(out_dir, "out_of_memory.jsonl")):
                self.halvings = halvings
        where = os.path.dirname(os.path.realpath(self.folder or "/"))
        if where == os.path.realpath(os.path.join(out_dir, "checkpoints.old")):
            raise UserError(
                f"--resume {resume}: was set aside for the run in {out_dir}; give another --out-dir"
            )
        self.is_own = where == os.path.realpath(os.path.join(out_dir, "checkpoints"))  # out_dir's files go on

    def __enter__(self):
        signal.signal(signal.SIGTERM, lambda *_: self.sigterm.set())
        return self

    def __exit__(self, kind, error, trace):
        """Notes that memory ran out; after an error it waits up to a minute for a save in the background."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(Exception):
            if error is not None and is_out_of_memory(error):
                replace_lines(os.path.join(self.out_dir, "out_of_memory.jsonl"), [self.halvings + 1])
            if self.saving is not None:
                self.saving.result(timeout=60)

    def sigterm_received(self):
        """Whether any rank has received SIGTERM (a collective)."""
        received = torch.tensor(float(self.sigterm.is_set()))
        dist.all_reduce(received)
        return received.item() > 0

    def save(self, step, write):
        """Saves a step by write(tmp, group), then removes all but the last `keep` (a collective), in turn."""
        self.wait()
        if not self.in_background:
            return self.save_now(step, write)
        self.group = self.group or dist.new_group(backend="gloo", timeout=self.timeout)
        self.saving = ThreadPoolExecutor(1).submit(self.save_now, step, write)

    def save_now(self, step, write):
        folder = os.path.join(self.out_dir, "checkpoints", f"step_{step}")
        tmp = start_folder(folder, self.group)
        write(tmp, self.group)
        publish(tmp, folder, self.group)
        for _, path in checkpoints_of(self.out_dir)[self.keep :] if self.keep and RANK == 0 else ():
            os.rename(path, f"{path}.gone")  # at once: a crash leaves no half of it
            shutil.rmtree(f"{path}.gone", ignore_errors=True)

    def wait(self, block=True):
        """Waits for the save in the background, or looks whether it has ended; raises its error."""
        if self.saving is not None and (block or self.saving.done()):
            saving = self.saving
            self.saving = None
            saving.result()

    def leave(self, step):
        """Ends a run that SIGTERM stopped, with the exit status of a process that SIGTERM has ended."""
        print0(f"SIGTERM    stopped after step {step} of {self.out_dir}; continue with --resume auto")
        raise SystemExit(128 + signal.SIGTERM)


def checkpoints_of(out_dir, kind="checkpoints"):
    """[(step, path)] of a run, the last step first, complete or not."""
    found = []
    for path in glob.glob(os.path.join(glob.escape(out_dir), kind, "step_*")):
        if match := re.fullmatch(r"step_(\d+)(\.old|\.jsonl)?", os.path.basename(path)):
            found.append((int(match[1]), path))
    return sorted(found, key=lambda x: (-x[0], len(x[1])))


def newest_checkpoint(out_dir):
    """Folder of the last undamaged checkpoint of a run, or None; prints which it passes over (a collective)."""
    for _, path in of_all_ranks(checkpoints_of(out_dir))[0]:
        try:
            verify(path)
            return path
        except UserError as error:
            print0(f"resume     auto passes over {str(error).removeprefix('--resume ')}")
    print0(f"resume     auto: {out_dir} has no checkpoint to continue from, so this is a start")
    return None


def archive_old_run(out_dir, last_step):
    """Moves checkpoints and rollouts after last_step (0: all) to checkpoints.old and rollouts.old, and removes
    what a killed run left half done."""
    os.makedirs(out_dir, exist_ok=True)
    for kind in ("checkpoints", "rollouts"):
        folder = os.path.join(out_dir, kind)
        for path in glob.glob(os.path.join(glob.escape(folder), "*.tmp")) + glob.glob(
            f"{glob.escape(folder)}/*.gone"
        ):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.remove(path)
        later = [path for step, path in checkpoints_of(out_dir, kind) if step > last_step]
        if later and not last_step:
            shutil.rmtree(f"{folder}.old", ignore_errors=True)
            print0(f"set aside  {folder} of an earlier run, to {folder}.old")
        for path in later:
            target = os.path.join(f"{folder}.old", os.path.basename(path))
            shutil.rmtree(target, ignore_errors=True)
            os.renames(path, target)
    if not last_step:
        with contextlib.suppress(OSError):
            os.remove(os.path.join(out_dir, "out_of_memory.jsonl"))


def open_checkpoint(folder, backends, config, model_config):
    """trainer.json of a checkpoint that one of `backends` wrote for this model (a collective).

    UserError on all ranks: damaged, or of another script or model.
    """
    verify(folder)
    try:
        with open(os.path.join(folder, "trainer.json")) as file:
            saved = json.load(file)
        there, flags, updates = (saved[key] for key in ("backend", "config", "updates"))
        fields = architecture(model_config)
        changed = {key: x for key, x in saved["model_config"].items() if fields.get(key) != x}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--resume {folder}: not a checkpoint of this script", error) from None
    if there not in backends:
        raise UserError(f"--resume {folder}: is of another script ({there}); give its hf folder as --model")
    mine = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples as lists
    for key in (
        "value_head",
        "value_range",
        "lora_rank",
        "lora_alpha",
        "freeze_layers",
    ):  # shapes do not show these
        if (flags.get(key) or 0) != (mine.get(key) or 0) and (key in mine or flags[key]):
            changed[key] = flags.get(key)
            fields[key] = mine.get(key)
    if changed:
        differ = [f"{key} {x} there, {fields.get(key)} here" for key, x in sorted(changed.items())]
        raise UserError(f"--resume {folder}: is of another model: {'; '.join(differ)[:500]}")
    differ = "".join(f", {k} {x} -> {mine[k]}" for k, x in flags.items() if k in mine and mine[k] != x)
    print0(f"resume     {folder}, update {updates}{differ}")
    return saved


def architecture(model_config):
    """The fields of a transformers config that make two models the same, as plain JSON."""
    fields = json.loads(model_config.to_json_string(use_diff=False))
    for key in ("transformers_version", "_name_or_path", "architectures", "dtype", "_attn_implementation",
                "use_cache", "value_head", "value_range", "initializer_range"):  # fmt: skip
        fields.pop(key, None)
    return fields


# ---- A model's folder: tokenizer, config, weights, value head ----------------------------------------


@contextlib.contextmanager
def blame(words):
    """Turns an exception from in here into a UserError that begins with these words, the flag at fault first."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # libraries raise a dozen kinds
        raise UserError(words, error) from None


def load_config(config, trust_remote_code=False):
    """(tokenizer or None, transformers config) of config.model, with --override-config applied, dropout off."""
    model, name = config.model, config.tokenizer
    if model.startswith("tiny-") and model not in TINY and not os.path.isdir(model):
        raise UserError(f"--model {model}: no such preset; there are {', '.join(TINY)}")
    with blame(f"--override-config {config.override_config}: must be a JSON object"):
        overrides = dict(json.loads(config.override_config))
    tokenizer = char_tokenizer(IMAGE_WORDS if model.endswith("-vl") else ()) if model in TINY else None
    if name or not tokenizer:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name or model, trust_remote_code=trust_remote_code)
            if len(tokenizer) <= len(tokenizer.all_special_ids):
                raise ValueError("it knows no token")  # transformers makes one up where there are no files
        except Exception as error:  # half a dozen kinds
            if name:
                raise UserError(f"--tokenizer {name}: no tokenizer there", error) from None
            print0(f"tokenizer  none in {model}, so rows must be token ids")
            tokenizer = None
    with blame(f"--model {model}: no model there"):
        if model in TINY:
            fields = tiny_config(model, len(tokenizer))
            kind = type(AutoConfig.for_model(**fields))
        else:
            kind = type(AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code))
            fields, _ = kind.get_config_dict(model)
    if overrides.keys() & {"num_hidden_layers", "sliding_window", "use_sliding_window", "max_window_layers"}:
        fields.pop("layer_types", None)  # the model derives its own
    for key, value in overrides.items():
        if key == "model_type" or not hasattr(kind(), key):
            raise UserError(f"--override-config: {kind.__name__} has no {key!r} to override")
        both = isinstance(value, dict) and isinstance(fields.get(key), dict)
        fields[kind.attribute_map.get(key, key)] = fields[key] | value if both else value
    with blame(f"--override-config {config.override_config}"):
        model_config = kind.from_dict(fields)
    disable_dropout(model_config)
    return tokenizer, model_config


def disable_dropout(model_config):
    """Sets attention_dropout, resid_pdrop, layerdrop, router jitter ... to 0, in nested configs too."""
    for key, value in list(vars(model_config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            disable_dropout(value)
        elif ("drop" in key or "jitter" in key) and type(value) in (int, float):
            setattr(model_config, key, type(value)(0))


def limits(model_config):
    """(vocab_size, most tokens of a row) of a model."""
    text = model_config.get_text_config()
    return text.vocab_size, getattr(text, "max_position_embeddings", None) or 2**31


def check_rows(batch, model_config):
    """ValueError naming the first row that is too long for the model, or has ids outside its vocabulary."""
    vocab_size, most = limits(model_config)
    if batch.longest[0] > most:
        raise ValueError(
            f"row {batch.longest[1]}: {batch.longest[0]} tokens, more than the model's positions, {most}"
        )
    odd = ((batch.input_ids < 0) | (batch.input_ids >= vocab_size)).nonzero().flatten()
    if len(odd):
        row = int(batch.row_id[row_of_token(batch.cu_seqlens)[odd[0]]])
        raise ValueError(
            f"row {row}: token id {batch.input_ids[odd[0]]} is outside the vocabulary of {vocab_size}"
        )


def local_folder(name):
    """The folder of a model; one on the hub is downloaded."""
    with blame(f"--model {name}: its weights do not load"):
        patterns = ["*.json", "*.safetensors", "*.py"]
        return name if os.path.isdir(name) else snapshot_download(name, allow_patterns=patterns)


def load_pretrained(kind, name, model_config, **options):
    """A model of this AutoModel kind with a folder's weights. UserError: they do not load, or some are missing."""
    with blame(f"--model {name}: its weights do not load"):
        model, info = kind.from_pretrained(
            local_folder(name), config=model_config, output_loading_info=True, **options
        )
    absent = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if absent:
        raise UserError(f"--model {name}: {len(absent)} weights are not in the checkpoint, e.g. {absent[0]}")
    return model


def init_value_head(score, config, value_range):
    """Fills the head, an nn.Linear, by --value-head-init -> words on what happened."""
    nn.init.zeros_(score.weight)
    nn.init.zeros_(score.bias)
    remark = ""
    if config.model not in TINY and config.value_head_init in ("auto", "checkpoint"):
        stored, remark = stored_value_head(local_folder(config.model), score, value_range)
        if stored:
            name, weight, bias = stored
            score.weight.data.copy_(weight)
            if bias is not None:
                score.bias.data.copy_(bias)
            return f"value head from its {name}.weight" + ("" if bias is not None else " (no bias: 0)")
    if config.value_head_init == "checkpoint":
        raise UserError(f"--value-head-init checkpoint: {config.model} holds no value head{remark}")
    if config.value_head_init == "zero":
        return "value head zero"
    std = 1 / math.sqrt(score.in_features + 1)  # 2403.17031, and the code of 2009.01325 before it
    nn.init.normal_(score.weight, std=std, generator=torch.Generator().manual_seed(config.seed))
    return f"value head new, normal(0, {std:.3f}){remark}"


def stored_value_head(folder, score, value_range):
    """Looks in a model's folder for a head like `score`, over this range -> ((name, weight, bias or None) or
    None, remark). score and classifier are transformers' token-classification and reward models, v_head TRL's."""
    heads = ("score", "classifier", "v_head.summary", "v_head", "value_head.summary", "value_head")
    found, remark = {}, ""
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors"))):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys() if key.rpartition(".")[0] in heads}
    with open(os.path.join(folder, "config.json")) as file:
        stored_range = json.load(file).get("value_range")
    describe = lambda weight, over: f"{tuple(weight.shape)}" + (f" over {tuple(over)}" if over else "")
    wanted = describe(score.weight, value_range)
    for name in heads:
        weight = found.get(f"{name}.weight")
        if weight is not None and describe(weight, stored_range) == wanted:
            return (name, weight, found.get(f"{name}.bias")), ""
        if weight is not None:
            remark = f" (its {name}.weight is {describe(weight, stored_range)}, not {wanted})"
    return None, remark


def config_of_export(model_config, outputs, value_range):
    """transformers config of a value model with this many outputs, for its Hugging Face folder."""
    model_config = type(model_config).from_dict(model_config.to_dict())
    model_config.num_labels = outputs
    model_config.classifier_dropout = 0.0
    model_config.dtype = torch.float32
    model_config.value_range = value_range
    model_config.value_head = "hl_gauss" if value_range else "scalar"
    return model_config


# ---- Tiny models, a tokenizer built in code, and the toy task: everything runs without a hub ---------

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
IMAGE_WORDS = [
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
]  # the last ids of a vision-language preset


def tiny_config(name, vocab_size):
    """A preset as the fields of a config.json: two layers of 64 features, four heads, two of keys and values."""
    kind = TINY[name]
    none = {"model_type": kind, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":  # it names these differently
        return {"vocab_size": vocab_size, "n_embd": 64, "n_layer": 2, "n_head": 4, **none}
    sizes = {
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192,
        "pad_token_id": None,
    }  # fmt: skip
    extra = {
        "mistral": {"sliding_window": 256},
        "gemma2": {"sliding_window": 256, "query_pre_attn_scalar": 16},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        "qwen2_5_vl": {
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },  # this and the next: the vision tower's
        "qwen3_vl": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    }.get(kind, {})
    if "vl" not in kind:
        return {**sizes, **extra, **none}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    rope |= {"mrope_interleaved": True} if kind == "qwen3_vl" else {}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14}
    ids = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    return {
        "model_type": kind,
        "text_config": {**sizes, "bos_token_id": None, "eos_token_id": None, "rope_parameters": rope},
        "vision_config": {**tower, "out_hidden_size": 64, **extra},
        **{name: vocab_size - 3 + i for i, name in enumerate(ids)},
    }


def char_tokenizer(words=()):
    """One token a printable ASCII character, plus <pad>, <eos>, <unk> and these words; built in code."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = ["<pad>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    special["additional_special_tokens"] = list(words)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def toy_rows(n, seed, held_out=False, slips=(0.9, 0.05)):
    """n JSON lines: rollouts of a policy that adds two-digit numbers by column and mostly forgets to carry.

    There is a rule to find: whether the units carry tells before the first digit how this will probably end,
    and the digits then tell how it did. The prompts of held_out rows never occur in the others. slips: how
    often it errs where the units carry, and where they do not.
    """
    rng = random.Random(f"toy {seed} {held_out}")
    lines = []
    while len(lines) < n:
        a = rng.randrange(10, 100)
        b = rng.randrange(10, 100)
        if (zlib.crc32(b"%d+%d" % (a, b)) % 5 == 0) != held_out:  # a fifth of the prompts, without a pattern
            continue
        carries = a % 10 + b % 10 >= 10
        slip = rng.random() < slips[not carries]
        answer = a + b - 10 * (slip and carries) + (slip and not carries)
        row = {"prompt": f"{a}+{b}=", "response": str(answer), "reward": float(answer == a + b)}
        lines.append(json.dumps(row))
    return lines


# ---- The report: what the critic learned -------------------------------------------------------------

CURVES = {  # of a critic: panel -> metrics
    "explained variance": ("critic/explained_var", "eval/explained_var"),
    "value loss": ("critic/vf_loss", "eval/vf_loss", "eval/constant_loss"),
    "gradient norm": ("critic/grad_norm",),
}
NUMBERS = {  # of a report -> what they say
    "explained variance": "over all actions: 1 is perfect, 0 as good as a constant",
    "at the first action": "explained variance where only the prompt is known",
    "ceiling": "the most that any critic can explain there: 1 - within-prompt variance / variance",
    "at the last action": "explained variance where the whole response is known",
    "TD error": "standard deviation",
    "AUC": "chance that the last value of a right response is above that of a wrong one",
    "Brier score": "mean squared error of the value as the chance of being right",
    "of a constant": "Brier score of the best constant",
    "calibration error": "mean distance of chance and frequency, 15 bins of equal width (1706.04599)",
}
PAGE = jinja2.Template(autoescape=True, source="""<!doctype html><meta charset="utf-8"><title>{{ title }}</title>
<style>body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; color: #111827 }
td { padding: 2px 16px 2px 0 } svg { width: 100%; height: auto } span { color: #111827; border-radius: 3px }
pre { white-space: pre-wrap; margin: 6px 0; color: #6b7280 }</style>
<h1>What the critic learned</h1><p>{{ title }}: {{ about }}</p><table>
{% for name, x in numbers %}<tr><td><b>{{ x }}</b><td>{{ name }}<td>{{ words[name] }}{% endfor %}</table>
<h2>Where it changes its mind</h2><p>Each action is coloured by its value, read just before it, from
{{ "%.2f" % low }} (orange) to {{ "%.2f" % high }} (blue); point at one for its numbers. These are the rows with
the largest TD errors before their last action.</p>
{% for prompt, actions, reward in rows %}<pre>{{ prompt }}{% for text, color, title in actions -%}
<span style="background: {{ color }}" title="{{ title }}">{{ text }}</span>
{%- endfor %}   reward {{ reward }}</pre>{% endfor %}<h2>Is it right, and when</h2>{{ figure|safe }}""")  # fmt: skip


def first_actions(rows):
    """(B,) index of each row's first action in the (T,) columns, -1 where it has none."""
    index_T = torch.where(rows.response_mask, torch.arange(len(rows.input_ids)), len(rows.input_ids))
    last_B = last_actions(rows.response_mask, rows.cu_seqlens)
    row_T = row_of_token(rows.cu_seqlens)
    return last_B.scatter_reduce(0, row_T, index_T, "amin", include_self=False).minimum(last_B)


def ceiling(rows, returns_T):
    """1 - within-prompt variance / variance of returns at the first action: what the prompt's mean explains.

    Over prompts (equal tokens before the first action) with several rows; both variances are the unbiased
    ones. NaN if there are none, if all returns are equal, or if chance puts it below 0.
    """
    ids, groups = rows.input_ids.numpy(), {}
    for start, first in zip(rows.cu_seqlens.tolist(), first_actions(rows).tolist(), strict=False):
        if first >= 0:
            groups.setdefault(ids[start:first].tobytes(), []).append(first)
    groups = [returns_T[some].double() for some in groups.values() if len(some) > 1]
    every = torch.cat([torch.zeros(0), *groups])
    within = sum(len(x) * x.var() for x in groups) / max(len(every), 1)
    return float(1 - within / every.var()) if groups and 0 < every.var() >= within else math.nan


def report_numbers(rows, returns_T, td_T, gamma):
    """({each of NUMBERS: float}, panel -> [(x, y)]) of rows with values."""
    mask = rows.response_mask
    v_A, r_A, row_A = rows.values[mask], returns_T[mask], row_of_token(rows.cu_seqlens)[mask]
    first = first_actions(rows)
    first = first[first >= 0]
    last = last_actions(mask, rows.cu_seqlens)[row_A.unique()]
    reward_B = torch.zeros(len(rows)).index_add(0, row_of_token(rows.cu_seqlens), rows.token_level_rewards)
    label = reward_B[row_A.unique()]
    numbers = {
        "explained variance": explained_variance(v_A, r_A),
        "at the first action": explained_variance(rows.values[first], returns_T[first]),
        "ceiling": ceiling(rows, returns_T),
        "at the last action": explained_variance(rows.values[last], returns_T[last]),
        "TD error": float(td_T[mask].double().std(correction=0)),
    }
    count_B = actions_per_row(mask, rows.cu_seqlens)
    place_A = torch.arange(len(row_A)) - (count_B.cumsum(0) - count_B)[row_A]
    tenth_A = (place_A * 10 / (count_B[row_A] - 1).clamp(min=1)).long().clamp(max=9)
    tenths = [(int(t) / 9, tenth_A == t) for t in tenth_A.unique()]
    points = {
        "explained variance by position": [(x, explained_variance(v_A[at], r_A[at])) for x, at in tenths]
    }
    if (
        gamma == 1 and ((label == 0) | (label == 1)).all() and label.var(correction=0) > 0
    ):  # values are chances
        p_A = v_A.double().clamp(0, 1)
        y_A = reward_B[row_A].double()
        bins = [at for at in ((p_A * 15).long().clamp(max=14) == i for i in range(15)) if at.any()]
        points["calibration"] = [(float(p_A[at].mean()), float(y_A[at].mean())) for at in bins]
        points["AUC by position"] = [(x, auc(v_A[at], y_A[at])) for x, at in tenths]
        numbers |= {
            "AUC": auc(rows.values[last], label),
            "Brier score": float((p_A - y_A).square().mean()),
            "of a constant": float(y_A.var(correction=0)),
            "calibration error": float(sum((p_A[at] - y_A[at]).sum().abs() for at in bins) / len(p_A)),
        }
    return {name: numbers.get(name, math.nan) for name in NUMBERS}, points


def rows_to_show(rows, returns_T, td_T, tokenizer, low, high, n=24):
    """(prompt, actions, reward) of the n rows whose TD errors before their last action are largest, for PAGE."""
    decode = tokenizer.decode if tokenizer else lambda ids: "".join(f"{int(i)} " for i in ids)
    first, shown = first_actions(rows).tolist(), []
    last_B = last_actions(rows.response_mask, rows.cu_seqlens)
    jump_T = td_T.abs().index_fill(0, last_B[last_B >= 0], 0.0)  # the last one is how wrong it was in the end
    jump_B = torch.zeros(len(rows)).scatter_reduce(0, row_of_token(rows.cu_seqlens), jump_T, "amax")
    for b in (-jump_B).double().round(decimals=4).argsort(stable=True).tolist()[:n]:
        start, end = rows.cu_seqlens[b : b + 2].tolist()
        actions = []
        for t in range(first[b], min(end, first[b] + 1000)) if first[b] >= 0 else ():
            color, title = "none", "not an action"
            if rows.response_mask[t]:
                shade = float((2 * (rows.values[t] - low) / max(high - low, 1e-9) - 1).clamp(-1, 1))
                color = f"rgba({'37,99,235' if shade > 0 else '249,115,22'},{abs(shade):.2f})"
                title = f"value {rows.values[t]:.3g}\nreturn {returns_T[t]:.3g}\nTD error {td_T[t]:.3g}"
            actions.append((decode([rows.input_ids[t]]), color, title))
        prompt = decode(rows.input_ids[max(start, first[b] - 200) : first[b]])
        shown.append((prompt, actions, f"{float(rows.token_level_rewards[start:end].sum()):.3g}"))
    return shown


def draw(panels):
    """A matplotlib Figure of panel -> {label: [(x, y)]}, three panels a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6 * math.ceil(len(panels) / 3)), layout="constrained")
    axes = figure.subplots(math.ceil(len(panels) / 3), 3).flat
    for panel, (title, lines) in zip(axes, panels.items(), strict=False):
        for label, points in lines.items():
            if points:
                panel.plot(*zip(*points, strict=True), ".-", label=label)
                panel.legend()
        panel.set(title=title, yscale="log" if title in ("value loss", "gradient norm") else "linear")
        panel.grid(alpha=0.3)
    return figure


def write_report(out_dir, rows, about, tokenizer, gamma, curves=CURVES):
    """curves.png and report.html, a page on what the critic learned; prints its numbers (rank 0 alone).

    rows: with values. about: words on which rows they are. curves: panels of metrics, like CURVES.
    """
    if RANK != 0:
        return
    log = read_lines(os.path.join(out_dir, "metrics.jsonl"))
    points_of = lambda name: [(row["step"], row[name]) for row in log if row.get(name) is not None]
    panels = {title: {name: points_of(name) for name in names} for title, names in curves.items()}
    draw(panels).savefig(os.path.join(out_dir, "curves.png"), dpi=120)
    v_A = rows.values[rows.response_mask]
    if not len(v_A) or not v_A.isfinite().all():
        return print0("report     none: no row has an action, or values are not finite")
    returns_T = monte_carlo(rows, gamma)
    columns = (rows.token_level_rewards, rows.values, rows.response_mask, rows.cu_seqlens)
    td_T, _ = gae(*columns, gamma, lam=0.0)  # with lambda 0, advantages are TD errors
    numbers, points = report_numbers(rows, returns_T, td_T, gamma)
    svg = io.StringIO()
    draw({title: {"": some} for title, some in points.items()} | panels).savefig(svg, format="svg")
    low, high = v_A.sort().values[[len(v_A) // 100, -1 - len(v_A) // 100]].tolist()
    shown = rows_to_show(rows, returns_T, td_T, tokenizer, low, high)
    about = f"{len(rows):,} {about}, {len(v_A):,} actions"
    said = {name: number(x, ".3f") for name, x in numbers.items()}
    page = {
        "title": out_dir,
        "about": about,
        "numbers": said.items(),
        "words": NUMBERS,
        "low": low,
        "high": high,
    }
    page |= {"rows": shown, "figure": svg.getvalue().partition("<svg")[2].join(("<svg", ""))}
    path = os.path.join(out_dir, "report.html")
    with open(path, "w", encoding="utf-8") as file:
        file.write(PAGE.render(page))
    print0(f"report     {path}: {about}")
    print0("  " + ", ".join(f"{name} {x}" for name, x in said.items()))
