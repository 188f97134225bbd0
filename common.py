"""What the scripts share: formulas, formats and tools. Nothing here imports a script.

To read the critics, you need not open this file if you trust its names. It has two floors, with a
line between them. The first is what a critic computes, and what a fork may change:

    The batch              flat and ragged from the file to the loss; padded tensors in and out
    PPO's maths            advantages, returns, the weights of losses, value losses, statistics
    Where a row goes       what all ranks know of a row, and how it gets to those that compute it
    Packed rows            attention without padding
    Recurrent layers       each row of a pack alone

The second is what a run needs. A fork opens it for another head (Model folders) or logger (Logs):

    Rows as JSON           a line of a file -> a row of a batch
    Text in its place      texts and chats -> token ids, as the policy read and wrote them
    Files of rows          JSONL, what `datasets` reads, and rows that a user's function makes
    Processes and ranks    start, errors, a run that is told to stop, exit
    Logs                   what the user sees, and what a run leaves
    Folders                that are complete or absent; the lock on a run's folder
    Checkpoints            when a run saves, what it keeps, where it continues
    Model folders          Hugging Face models, for actor and critic; value heads
    A check at every start whether a model keeps packed rows apart
    Speed and memory       of an update; tensors that leave the device for a while
    A model and a task     that need no download: presets, characters as tokens, sums
    Numbers                what rows say before training, and what values are worth
    The report             a page that every run leaves

Shapes are in the names: T tokens of all sequences, end to end; B sequences; A actions; L longest
sequence, or a padded row; R response places of a padded row; N value bins, or rows treated alike;
H query heads; K key and value heads; D features per head."""

import atexit
import base64
import codecs
import collections
import copy
import errno
import fcntl
import functools
import gc
import hashlib
import inspect
import io
import itertools
import json
import os
import pickle
import re
import runpy
import shlex
import signal
import sys
import traceback
import warnings
import zlib
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from math import ceil, inf, isfinite, isnan, log2, nan, sqrt
from os.path import dirname, exists, isdir, isfile, realpath
from pathlib import Path
from random import Random
from shutil import rmtree
from time import perf_counter, sleep, time, time_ns
from typing import Annotated, NamedTuple

import jinja2
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
import transformers
from huggingface_hub import logging as hub_logging
from huggingface_hub import snapshot_download
from huggingface_hub.utils import WeakFileLock
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import from_json, to_jsonable_python
from torch.distributed import fsdp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.attention.varlen import varlen_attn
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import HF_MODULES_CACHE, get_class_from_dynamic_module
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import load_state_dict
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file, find_adapter_config_file

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's start and stop messages
hub_logging.set_verbosity_error()  # a name that is not on the hub ends in one line, without retries

# ---- First names: ranks and mistakes -------------------------------------------------------------
# The few names of the second floor that the first one uses, too. torchrun sets the numbers of a
# rank; plain `python` is a world of one.

RANK = int(os.environ.get("RANK") or 0)
WORLD_SIZE = int(os.environ.get("WORLD_SIZE") or 1)
LOCAL_RANK = int(os.environ.get("LOCAL_RANK") or 0)


class UserError(ValueError):
    """A mistake that the user can fix. Its one line names the flag or the row; launch prints it."""


def print0(*args):
    """Prints on rank 0 only. The run outlives its reader, as of `| head`, and its terminal."""
    if RANK:
        return
    try:
        print(legible(" ".join(map(str, args))), flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def legible(text):
    """The text, with control characters and those that turn its direction written out: those of a
    user's file could change what a terminal shows."""
    controls = r"[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
    return re.sub(controls, lambda found: repr(found[0])[1:-1], text)


def of_all_ranks(mine, group=None):
    """A list with each rank's object, over `group` (a collective)."""
    everyones = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group)
    return everyones


def add_up(*numbers):
    """Sums over all ranks, in float64 (a collective)."""
    x = torch.tensor(numbers, dtype=torch.float64)
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
    return x.tolist()


# ---- The batch: flat and ragged from the file to the loss ----------------------------------------
# Rows are read, sent, trained on and scored as a Batch; what enters from outside is checked once.
# from_padded and to_padded are for other people's loops, whose rows are padded tensors.

Floats = torch.Tensor | None  # a (T,) float32 column; only rewards count outside response_mask


@dataclass
class Batch:
    """B sequences end to end, T tokens in all. Padding exists only inside a forward that needs it.

    token            p0   p1   a0   a1   o0   a2
    response_mask    0    0    1    1    0    1
    values           0    0    v1   v2   0    v4

    p: prompt. a: action. o: observation, such as a tool's output.
    v1 is what the head says after p1, before a0.

    An episode may have several rows, as that of an agent whose context is cut. One rank has them
    all, in the order of their row_ids, and credit runs along their actions."""

    input_ids: torch.Tensor  # (T,) int64
    cu_seqlens: torch.Tensor  # (B+1,) int64: sequence b is [cu_seqlens[b], cu_seqlens[b+1])
    response_mask: torch.Tensor  # (T,) bool: true on actions, which never begin a sequence
    row_id: torch.Tensor  # (B,) int64: global id, by which rows are ordered and shuffled
    truncated: torch.Tensor  # (B,) bool: the response hit the length limit
    episode: torch.Tensor | None = None  # (B,) int64: row_id of its episode's first row; None: own
    source: torch.Tensor | None = None  # (B,) int64: number of its object in a file, see raw_rows
    turns: torch.Tensor | None = None  # (T,) bool: where a turn begins; None: each action is one
    token_level_rewards: Floats = None
    values: Floats = None
    returns: Floats = None
    advantages: Floats = None
    weights: Floats = None  # the weight of each token's loss, see loss_weights
    old_log_probs: Floats = None
    ref_log_probs: Floats = None
    rollout_log_probs: Floats = None  # as reported by the rollout engine
    truth: Floats = None  # what the values should be, NaN where they are unknown; see against_truth
    truth_noise: Floats = None  # the variance of these numbers, 0 where they are exact
    multi_modal_inputs: list | None = None  # B dicts, {} for a row without images

    ROWS = ("row_id", "truncated", "episode", "source", "multi_modal_inputs")
    FLOATS = (
        "token_level_rewards",
        "values",
        "returns",
        "advantages",
        "weights",
        "old_log_probs",
        "ref_log_probs",
        "rollout_log_probs",
        "truth",
        "truth_noise",
    )

    @classmethod
    def blank(cls, length=1):
        """One row: its first token, then only actions. A rank without rows runs one of 1 token. Its
        row_id is -1, so it shares nothing with rows like it."""
        mask = torch.arange(length) > 0
        return cls(
            input_ids=mask.long(),
            cu_seqlens=cumulative([length]),
            response_mask=mask,
            row_id=torch.tensor([-1]),
            truncated=torch.tensor([False]),
            **{name: torch.zeros(length) for name in cls.FLOATS},
        )

    def __len__(self):
        return len(self.row_id)

    @property
    def lengths(self):
        """Tokens per sequence, as a list of B ints."""
        return self.cu_seqlens.diff().tolist()

    @property
    def longest(self):
        """(tokens, row_id) of the longest sequence; (0, -1) without any."""
        return max(zip(self.lengths, self.row_id.tolist()), default=(0, -1))

    @property
    def row_of_token(self):
        """(T,) int64: which sequence each token belongs to."""
        return torch.repeat_interleave(self.cu_seqlens.diff())

    @property
    def positions(self):
        """(T,) int64: the position of each token in its sequence."""
        return torch.cat([torch.arange(n) for n in self.lengths])

    @property
    def actions(self):
        """(B,) int64: actions per sequence."""
        return F.pad(self.response_mask.cumsum(0), (1, 0))[self.cu_seqlens].diff()

    def token_index(self, rows):
        """Indices of these rows' tokens in the (T,) columns, in the order of `rows`."""
        return tokens_in(self.cu_seqlens, rows)

    def select(self, rows):
        """A new Batch of the rows with these indices, in that order; a copy."""
        tokens = self.token_index(rows)
        columns = {"cu_seqlens": cumulative(self.cu_seqlens.diff()[rows])}
        for name, column in vars(self).items():
            if column is None or name == "cu_seqlens":
                continue
            if isinstance(column, list):
                columns[name] = [column[r] for r in rows]
            elif name in self.ROWS:
                columns[name] = column[rows]
            else:
                columns[name] = column[tokens]
        return Batch(**columns)

    def split(self, sizes):
        """Consecutive pieces of these sizes, in rows -> [Batch]. A number cuts equal pieces, of
        which the last may be shorter.

        They share memory with this batch: do not write into their columns, and pickle a `select`
        of them, not the pieces themselves."""
        if isinstance(sizes, int):
            sizes = [min(sizes, len(self) - first) for first in range(0, len(self), sizes)]
        ends = list(itertools.accumulate(sizes, initial=0))
        tokens = self.cu_seqlens[ends].diff().tolist()  # of each piece

        # name -> the column of each piece
        cu = self.cu_seqlens
        columns = {"cu_seqlens": [cu[i : j + 1] - cu[i] for i, j in itertools.pairwise(ends)]}
        for name, column in vars(self).items():
            if column is None or name == "cu_seqlens":
                continue
            if isinstance(column, list):
                columns[name] = [column[i:j] for i, j in itertools.pairwise(ends)]
            elif name in self.ROWS:
                columns[name] = column.split(list(sizes))
            else:
                columns[name] = column.split(tokens)
        return [Batch(**dict(zip(columns, piece))) for piece in zip(*columns.values())]

    def episodes(self):
        """The indices of the rows of each episode, as lists."""
        if self.episode is None:
            return [[row] for row in range(len(self))]
        episodes = {}
        for row, number in enumerate(self.episode.tolist()):
            episodes.setdefault(number, []).append(row)
        return list(episodes.values())

    def groups(self):
        """The same; those that begin with an equal prompt are in one list."""
        return groups_of(describe(self))

    def mean_return(self, gamma, by_noise=False):
        """(mean, standard deviation) of the returns over the actions of all ranks (a collective);
        NaN without an action. by_noise: weighted by noise_weights.

        UserError: the batch lacks its rewards, or its log-probs."""
        check(self, needs=("token_level_rewards",))
        returns_T = monte_carlo(self, gamma).double()
        weights_T = noise_weights(self) if by_noise else self.response_mask.double()
        sums = [weights_T, weights_T * returns_T, weights_T * returns_T.square()]
        weight, total, squares = add_up(*(float(x_T.sum()) for x_T in sums))
        mean = total / (weight or nan)
        return mean, max(squares / (weight or nan) - mean**2, 0.0) ** 0.5


def check_range(batch, gamma, value_range):
    """Says how many returns of all ranks' rows a head with this (LOW, HIGH) cannot reach (a
    collective); None: it has no ends."""
    if value_range:
        returns_A = monte_carlo(batch, gamma)[batch.response_mask]
        low, high = value_range
        outside, n = add_up(int((returns_A != returns_A.clamp(low, high)).sum()), len(returns_A))
        if outside:
            words = f"are outside the value range, {low:g} to {high:g}, and no value gets there"
            print0(f"note       {outside:,.0f} of {n:,.0f} returns {words}")


def cumulative(lengths):
    """B lengths (list or tensor) -> (B+1,) int64 [0, l0, l0+l1, ...]."""
    return F.pad(torch.as_tensor(lengths).cumsum(0, dtype=torch.int64), (1, 0))  # also of none


def tokens_in(cu_seqlens, rows):
    """Indices of the tokens of these rows, in the order of `rows`."""
    lengths = cu_seqlens.diff()[rows]
    cu = cumulative(lengths)
    return torch.arange(cu[-1]) + (cu_seqlens[rows] - cu[:-1]).repeat_interleave(lengths)


def concat(batches):
    """Joins batches, in order -> Batch. UserError: only some have a column; images may differ."""
    lengths = [batch.cu_seqlens.diff() for batch in batches]
    columns = {"cu_seqlens": cumulative(torch.cat(lengths))}
    for name in vars(batches[0]).keys() - columns.keys():
        parts = [getattr(batch, name) for batch in batches]

        # rows without images have an empty dict each
        if name == "multi_modal_inputs":
            if any(parts):
                images = [part or [{}] * len(batch) for batch, part in zip(batches, parts)]
                columns[name] = list(itertools.chain(*images))
            continue

        given = [part for part in parts if part is not None]
        if given and len(given) < len(parts):
            raise UserError(f"{name}: only some batches have it; all ranks must pass it, or none")
        if given:
            columns[name] = torch.cat(parts)
    return Batch(**columns)


COLUMNS = {  # the columns that every batch has -> their dtype and shape
    "input_ids": (torch.int64, "T"),
    "cu_seqlens": (torch.int64, "B+1"),
    "response_mask": (torch.bool, "T"),
    "row_id": (torch.int64, "B"),
    "truncated": (torch.bool, "B"),
}


def check(batch, needs=()):
    """Returns the batch. UserError names the first column that is not what it should be.

    needs: float columns that must be there; the others may be None."""
    # each column is a flat tensor of its type on the host
    columns = dict(COLUMNS)
    if batch.episode is not None:
        columns["episode"] = (torch.int64, "B")
    if batch.turns is not None:
        columns["turns"] = (torch.bool, "T")
    for name in Batch.FLOATS:
        if name in needs or getattr(batch, name) is not None:
            columns[name] = (torch.float32, "T")
    for name, (dtype, letter) in columns.items():
        wanted = f"a ({letter},) tensor of {dtype} on the host"
        column = getattr(batch, name)
        if column is None:
            raise UserError(f"{name}: is missing; it must be {wanted}")
        if not isinstance(column, torch.Tensor):
            raise UserError(f"{name}: must be {wanted}, not {type(column).__name__}")
        kind = (column.dtype, column.ndim, column.device.type, column.layout)
        if kind != (dtype, 1, "cpu", torch.strided):
            have = f"{column.dtype} of shape {tuple(column.shape)} on {column.device}"
            raise UserError(f"{name}: must be {wanted}, not {have}, {column.layout}")

    # all have as many rows as row_id, and as many tokens as input_ids
    sizes = {"B": len(batch), "T": len(batch.input_ids)}
    cu = batch.cu_seqlens
    if len(cu) != len(batch) + 1 or cu[0] != 0 or cu[-1] != sizes["T"] or (cu.diff() < 1).any():
        raise UserError(
            f"cu_seqlens: must begin at 0, grow, and end at {sizes['T']}, the number of tokens,"
            f" with {len(batch) + 1} entries for {len(batch)} rows; it is"
            f" {' '.join(map(str, cu.tolist())):.60}"
        )
    for name, (_, letter) in columns.items():
        size = len(getattr(batch, name))
        if size != sizes.get(letter, size):
            raise UserError(f"{name}: has {size} entries instead of {sizes[letter]}")

    images = batch.multi_modal_inputs
    if images is not None and len(images) != len(batch):
        raise UserError(f"multi_modal_inputs: has {len(images)} entries instead of {len(batch)}")

    # the value of an action is read before it
    early_B = batch.response_mask[cu[:-1]]
    if early_B.any():
        row = batch.row_id[early_B][0]
        words = f"the first token of row_id {row} cannot be an action"
        raise UserError(f"response_mask: {words}: no hidden state precedes it")
    return batch


def from_padded(
    input_ids, attention_mask, response_mask, rewards, values=None, truncated=None, row_id=None
):
    """This rank's rows as a Batch, from padded tensors, as TRL, OpenRLHF and verl have them.

    All are (B, L), but truncated and row_id (B,). response_mask, rewards and values may have only
    the last R places of each row, and rewards may be (B,), those of the last actions. The value of
    an action is what the critic says before it. What stands where nothing acts does not matter, not
    even NaN, but a reward behind an action goes to that action, see gae. Without row_id, the rows
    of rank 0 come first (a collective, for which the CriticWorker must exist)."""
    ids_BL = on_host(input_ids)
    tokens_BL = on_host(attention_mask) > 0
    acts_BR = on_host(response_mask) > 0
    rewards = on_host(rewards).float()
    rows, places = ids_BL.shape

    def flat(given):
        """(T,) of a column that may have only the last places."""
        x = on_host(given)
        if x.shape[1] not in (places, acts_BR.shape[1]):
            raise UserError(f"{tuple(x.shape)} is the shape of neither input_ids nor response_mask")
        return torch.cat([x.new_zeros(rows, places - x.shape[1]), x], 1)[tokens_BL]

    if row_id is None:
        counts = of_all_ranks(rows) if WORLD_SIZE > 1 else [rows]
        row_id = sum(counts[:RANK]) + torch.arange(rows)
    if truncated is None:
        truncated = torch.zeros(rows)
    acts_T = flat(acts_BR)
    batch = Batch(
        input_ids=ids_BL[tokens_BL],
        cu_seqlens=cumulative(tokens_BL.sum(1)),
        response_mask=acts_T,
        row_id=on_host(row_id),
        truncated=on_host(truncated) > 0,
    )
    if acts_T.sum() < acts_BR.sum():
        raise UserError("response_mask: a row has an action where attention_mask is 0")

    # the reward of a row is that of its last action
    if rewards.ndim == 1:
        acts_B = batch.actions > 0
        rewards_T = torch.zeros(len(acts_T))
        rewards_T[last_action(batch)[acts_B]] = rewards[acts_B]
    else:
        rewards_T = flat(rewards)
    batch.token_level_rewards = torch.where(acts_T, rewards_T, rewards_T.nan_to_num(0.0, 0.0, 0.0))
    if values is not None:
        batch.values = torch.where(acts_T, flat(values).float(), 0.0)

    for name in ("token_level_rewards", "values"):
        x_T = getattr(batch, name)
        if x_T is not None and not x_T.isfinite().all():
            raise UserError(f"{name}: that of an action is not finite")
    return check(batch)


def on_host(x):
    """A list or a tensor as a tensor on the host, without its graph."""
    return torch.as_tensor(x).detach().cpu()


def to_padded(x_T, attention_mask):
    """The inverse of from_padded, for (T,) numbers of its batch, such as the values -> (B, L) on
    the device of attention_mask, 0 where it is 0."""
    tokens_BL = torch.as_tensor(attention_mask) > 0
    x_BL = torch.zeros(tokens_BL.shape, dtype=x_T.dtype, device=tokens_BL.device)
    x_BL[tokens_BL] = x_T.to(tokens_BL.device)
    return x_BL


# ---- PPO's maths on flat data --------------------------------------------------------------------
# Formulas with their papers. Training, evaluation and the report all use these, and a fork of a
# critic changes them here. A column is (T,), with anything at all where response_mask is false.


def gae(rewards_T, values_T, response_mask_T, cu_seqlens, gamma, lam=1.0, bootstrap_B=None):
    """Generalised advantage estimation over the actions of each row (1506.02438, eq. 11-16)
    -> (advantages_T, returns_T), float32 and 0 where no action is.

        delta_k = r_k + gamma V_{k+1} - V_k
        A_k = delta_k + gamma lam A_{k+1}
        returns = A + V

    k counts actions. A reward on another token goes to the action before it, or to the first action
    if there is none. lam: a number, or a list of one for each row.
    bootstrap_B: the value of what would follow the last action. None: the episode ended there."""
    rewards = rewards_T.tolist()
    values = values_T.tolist()
    mask = response_mask_T.tolist()
    ends = cu_seqlens.tolist()
    lams = lam if isinstance(lam, list) else [lam] * len(ends)
    advantages = [0.0] * len(rewards)

    for b in range(len(ends) - 1):
        next_value = 0.0 if bootstrap_B is None else float(bootstrap_B[b])
        advantage = 0.0
        reward = 0.0  # since the action at or before the current token
        earliest = None

        for t in reversed(range(ends[b], ends[b + 1])):
            reward += rewards[t]
            if mask[t]:
                advantage = reward + gamma * next_value - values[t] + gamma * lams[b] * advantage
                advantages[t] = advantage
                next_value = values[t]
                reward = 0.0
                earliest = t

        # what was paid before the first action
        if earliest is not None:
            advantages[earliest] += reward

    advantages_T = torch.tensor(advantages, dtype=torch.float64)
    returns_T = torch.where(response_mask_T, advantages_T + values_T, 0.0)
    return advantages_T.float(), returns_T.float()


def gae_by_turns(batch, values_T, *options):
    """gae where a step is a turn of the batch, all that the policy wrote in one go: Turn-PPO
    (2512.17008), with AReaL's equations -> (advantages_T, returns_T), equal within a turn.

        R_k = the sum of the rewards in turn k,    V_k = the value of its first action
        delta_k = R_k + gamma V_{k+1} - V_k
        A_k = delta_k + gamma lam A_{k+1}
        returns = A + V

    options: gamma, lam and bootstrap_B of gae, which counts turns here. A batch without turns has
    gae's numbers: each action is a step."""
    # a turn's first action stands for it: what is paid later in the turn goes to that action
    mask_T = batch.response_mask
    first_T = mask_T if batch.turns is None else batch.turns & mask_T
    of_first = gae(batch.token_level_rewards, values_T, first_T, batch.cu_seqlens, *options)

    # the index of the first action of each token's turn
    index_T = torch.where(first_T, torch.arange(len(first_T)), 0).cummax(0).values
    advantages_T, returns_T = (torch.where(mask_T, x_T[index_T], 0.0) for x_T in of_first)
    return advantages_T, returns_T


def end_to_end(batch):
    """Episodes as rows, along which credit runs: each is its rows end to end, in the order of their
    row_ids -> (Batch of them, whose row_ids are the episodes' numbers; the index in this batch of
    each of its tokens)."""
    if batch.episode is None:
        return batch, torch.arange(len(batch.input_ids))
    order = np.lexsort((batch.row_id.numpy(), batch.episode.numpy())).tolist()
    rows = batch.select(order)

    # an episode ends where the next row is of another one, and is truncated if its last row is
    last = F.pad(rows.episode.diff() != 0, (0, 1), value=True)[: len(rows)].nonzero()[:, 0]
    images = rows.multi_modal_inputs
    first = F.pad(last + 1, (1, 0))[:-1]
    whole = replace(
        rows,
        cu_seqlens=F.pad(rows.cu_seqlens[last + 1], (1, 0)),
        row_id=rows.episode[last],
        truncated=rows.truncated[last],
        episode=None,
        multi_modal_inputs=images and [images[row] for row in first.tolist()],
    )
    return whole, batch.token_index(order)


def to_rows(x_T, index_T):
    """The inverse of end_to_end, for a column: of its rows' tokens."""
    return torch.zeros_like(x_T).index_copy(0, index_T, x_T)


def last_action(batch):
    """(B,) index of each sequence's last action in the (T,) columns, or -1."""
    index_T = torch.where(batch.response_mask, torch.arange(len(batch.response_mask)), -1)
    return torch.full((len(batch),), -1).scatter_reduce(0, batch.row_of_token, index_T, "amax")


def add_returns(batch, gamma, lam, bootstrap_truncated=False):
    """Fills in advantages and returns, along the actions of each episode, or its turns, see
    gae_by_turns. bootstrap_truncated: truncated episodes end with their last value. lam: a number,
    or a list of one for each episode, in the order of their numbers. UserError: the batch lacks its
    rewards or values.

    Returns need values if lam is not 1, or with bootstrap_truncated. Otherwise a batch may come
    without values: it gets returns, and no advantages."""
    needs_values = lam != 1 or bootstrap_truncated
    check(batch, needs=("token_level_rewards", *(["values"] if needs_values else [])))
    whole, index_T = end_to_end(batch)
    values_T = whole.values
    if values_T is None:
        values_T = torch.zeros_like(whole.token_level_rewards)

    tail_B = None
    if bootstrap_truncated:
        tail_B = torch.where(whole.truncated, values_T[last_action(whole)], 0.0)
    advantages_T, returns_T = gae_by_turns(whole, values_T, gamma, lam, tail_B)
    batch.returns = to_rows(returns_T, index_T)
    batch.advantages = None if batch.values is None else to_rows(advantages_T, index_T)


def monte_carlo(batch, gamma):
    """(T,) discounted sums of the rewards from each action, or each turn of a batch that has some,
    on to the end of its episode."""
    whole, index_T = end_to_end(batch)
    _, returns_T = gae_by_turns(whole, 0 * whole.token_level_rewards, gamma)
    return to_rows(returns_T, index_T)


def loss_weights(batch, mode, response_length_limit=None, rows=None):
    """(T,) weights of the token losses, by the counts of the whole *global* mini-batch, which must
    have an action.

        token-mean                1 / N_tokens
        token-sum                 1
        seq-mean-token-sum        1 / N_seqs
        seq-mean-token-mean       1 / (N_seqs len_i)
        seq-mean-token-sum-norm   1 / (N_seqs response_length_limit)

    N_seqs counts rows with an action (later versions of verl count all rows). len_i: actions in the
    token's row. The last one is Dr. GRPO's constant (2503.20783).

    rows: the Rows of the mini-batch, of which this batch is a part. None: this batch is the
    whole."""
    rows = describe(batch) if rows is None else rows
    mask_T = batch.response_mask
    if mode == "token-sum":
        return mask_T.float()
    if mode == "token-mean":
        return mask_T / torch.tensor(int(rows.actions.sum()))

    sequences = int((rows.actions > 0).sum())
    weights_T = mask_T / torch.tensor(sequences)
    if mode == "seq-mean-token-mean":
        weights_T /= batch.actions.clamp(min=1)[batch.row_of_token]
    elif mode == "seq-mean-token-sum-norm":
        weights_T /= response_length_limit
    return weights_T


def noise_weights(batch):
    """(T,) float64: how much noise each action brings to the actor's gradient, up to a factor of 2:
    (1 - p)^2 of its chance p when it was drawn; zero elsewhere. The squared norm of the gradient of
    log p by the logits lies between this and twice as much, whatever other tokens' chances are.

    A value loss with these weights leads to E[w G|s] / E[w|s], which is the baseline of the state s
    that leaves the least noise (Greensmith, Bartlett and Baxter 2004).

    UserError: the batch has no log-probs of the policy."""
    check(batch, needs=("rollout_log_probs",))
    less_T = batch.rollout_log_probs.double().expm1()
    return torch.where(batch.response_mask, less_T.square(), 0.0)


def value_loss(vpreds_T, values_T, returns_T, response_mask_T, weights_T, cliprange_value=None):
    """Clipped value loss, as in the code of 1707.06347 -> (loss, number of actions whose clipped
    term is larger), both 0-dim tensors.

        L_t = 0.5 max( (v_t - R_t)^2, (clip(v_t, v_old - eps, v_old + eps) - R_t)^2 )
        loss = sum_t w_t L_t

    cliprange_value: eps, or None for no clipping. Masked entries are ignored, even if NaN."""
    v_T = torch.where(response_mask_T, vpreds_T, 0.0)
    old_T = torch.where(response_mask_T, values_T, 0.0)
    returns_T = torch.where(response_mask_T, returns_T, 0.0)

    epsilon = inf if cliprange_value is None else cliprange_value
    error_T = (v_T - returns_T).square()
    clipped_T = (torch.clamp(v_T, old_T - epsilon, old_T + epsilon) - returns_T).square()
    loss = 0.5 * (weights_T * torch.maximum(error_T, clipped_T)).sum()
    return loss, (clipped_T > error_T).sum()


def moments(x_A, everywhere=False):
    """(how many, mean, variance) in float64, in two passes. Without entries, mean and variance are
    NaN. everywhere: over the entries of all ranks (a collective)."""

    def total(*numbers):
        return add_up(*numbers) if everywhere else numbers

    x_A = x_A.double()
    n, sums = total(len(x_A), float(x_A.sum()))
    mean = sums / (n or nan)
    (squares,) = total(float((x_A - mean).square().sum()))
    return int(n), mean, squares / (n or nan)


def explained_variance(values_A, returns_A, everywhere=False, noise=0.0):
    """1 - Var(R - V) / Var(R): 1 is perfect, 0 as good as a constant, NaN if all returns are equal.
    everywhere: of all ranks' entries (a collective). noise: the variance that the returns have only
    because they are estimates; it is taken out."""
    r_A = returns_A.double()
    _, mean, spread = moments(r_A, everywhere)
    _, bias, left = moments(r_A - values_A.double(), everywhere)
    if not spread - noise > 1e-9 * (mean**2 + spread + bias**2 + left):  # zero but for rounding
        return nan
    return 1 - (left - noise) / (spread - noise)


def auc(scores, labels):
    """Chance that a 1 scores above a 0; a tie counts half. NaN unless there are both labels, no
    others, and finite scores."""
    if set(labels.tolist()) != {0.0, 1.0} or not scores.isfinite().all():
        return nan
    ones = scores[labels == 1]
    zeros = scores[labels == 0].sort().values

    # for each 1: twice the zeros below it, and once those that are equal
    below = torch.searchsorted(zeros, ones)
    below += torch.searchsorted(zeros, ones, right=True)
    return float(below.double().mean() / (2 * len(zeros)))


def update_metrics(kind, loss, totals, norms, lr):
    """Metrics of an update, with "kind/" before each name (a collective).

    totals: name -> this rank's sum over the steps taken, a 0-dim tensor. The sum named `loss`,
    whose terms have weights, is divided by the number of steps, and the others by "actions", one of
    the sums. norms: the gradient norm of each step; one that is not finite was skipped."""
    sums = torch.stack([*totals.values()])
    dist.all_reduce(sums)
    sums = dict(zip(totals, sums.tolist()))

    # without a step or an action, averages are NaN
    taken = [norm for norm in norms if isfinite(norm)]
    steps = len(taken) or nan
    actions = sums.pop("actions") or nan

    metrics = {name: x / (steps if name == loss else actions) for name, x in sums.items()}
    metrics["grad_norm"] = sum(taken) / steps
    metrics["lr"] = lr
    metrics["skipped_steps"] = len(norms) - len(taken)
    return {f"{kind}/{name}": x for name, x in metrics.items()}


def evaluate(rows, gamma):
    """Metrics of rows with values, against Monte Carlo returns -> {"eval/...": number or NaN}. An
    episode of several rows counts as one."""
    rows, _ = end_to_end(rows)
    return_T = monte_carlo(rows, gamma)
    r_A = return_T[rows.response_mask].double()
    v_A = rows.values[rows.response_mask]

    # the reward of each row, and what the critic says before its last action
    acted_B = rows.actions > 0
    reward_B = torch.zeros(len(rows)).index_add(0, rows.row_of_token, rows.token_level_rewards)
    last_B = torch.where(acted_B, rows.values[last_action(rows)], 0.0)

    prompts, best, mean, oracle = best_of_n(rows, last_B, reward_B)
    v_10, r_10, n_10 = in_bins(v_A, r_A)
    metrics = by_tenth(rows, return_T, 0 * return_T, "eval/explained_var")
    if rows.truth is not None:
        metrics |= against_truth(rows, gamma)
    return metrics | {
        "eval/explained_var": explained_variance(v_A, r_A),
        "eval/calibration": (v_10 - r_10).abs().sum() / n_10.sum(),
        "eval/vf_loss": 0.5 * (v_A - r_A).square().mean(),
        "eval/constant_loss": 0.5 * r_A.var(correction=0),
        "eval/auc": auc(last_B[acted_B], reward_B[acted_B]),
        "eval/prompts_of_n": prompts,
        "eval/best_of_n": best,
        "eval/mean_of_n": mean,
        "eval/oracle_of_n": oracle,
    }


def by_tenth(rows, target_T, noise_T, name):
    """{name and the tenth of an answer, 1 to 10: explained variance of this column there, where it
    is known and differs}. Towards the end of an answer there is more to know. noise_T: see
    explained_variance."""
    first_B = rows.actions.cumsum(0) - rows.actions
    place_T = rows.response_mask.cumsum(0) - 1 - first_B[rows.row_of_token]
    tenth_T = 10 * place_T // rows.actions[rows.row_of_token].clamp(min=1)

    found = {}
    for k in range(10):
        here_T = rows.response_mask & target_T.isfinite() & (tenth_T == k)
        v_A, x_A, noise_A = (x_T[here_T].double() for x_T in (rows.values, target_T, noise_T))
        x = explained_variance(v_A, x_A, noise=float(noise_A.mean()))
        if not isnan(x):
            found[f"{name}_tenth_{k + 1}"] = x
    return found


def in_bins(v_A, r_A):
    """(3, 10) of ten bins of neighbouring values, each with as many actions if all values differ:
    sum of values, sum of returns, number of actions. Values are calibrated if both sums agree."""
    step = max(1, -(-len(v_A) // 10))
    bin_A = torch.bucketize(v_A, v_A.sort().values[step::step].clone(), right=True)
    columns = (v_A.double(), r_A.double(), torch.ones_like(r_A))
    return torch.stack([bin_A.bincount(x_A, 10) for x_A in columns])


def against_truth(rows, gamma):
    """Metrics of rows with values, whose true values are known at some actions; the noise of these
    is taken out -> {"eval/...": number or NaN}.

    The true value is the mean return of all ways in which the policy may go on. knowable is the
    explained variance of the true values themselves, which no critic exceeds; of the true values, a
    critic explains the share of it that it has reached. flatness: the mean variance of values
    within a row, relative to that of the true values, is 0 if a critic sees only prompts."""
    known_T = rows.response_mask & rows.truth.isfinite()
    columns = (rows.values, rows.truth, rows.truth_noise, monte_carlo(rows, gamma))
    v_A, truth_A, noise_A, r_A = (x_T[known_T].double() for x_T in columns)

    # an estimate differs from values and returns by its noise, too
    noise = float(noise_A.mean())
    luck = (r_A - truth_A).var(correction=0) - noise

    # rows with two or more of them
    row_A = rows.row_of_token[known_T]
    n_B = row_A.bincount()
    several = n_B > 1

    def within(x_A):
        left_A = x_A - (row_A.bincount(x_A) / n_B)[row_A]
        return (row_A.bincount(left_A**2) / (n_B - 1))[several].mean()

    def share(x, whole):
        return float(x / whole) if whole > 1e-9 * truth_A.square().mean() else nan

    noise_within = (row_A.bincount(noise_A) / n_B)[several].mean()
    name = "eval/truth_explained_var"
    return by_tenth(rows, rows.truth, rows.truth_noise, name) | {
        name: explained_variance(v_A, truth_A, noise=noise),
        "eval/knowable": 1 - share(luck, r_A.var(correction=0)),
        "eval/flatness": share(within(v_A), within(truth_A) - noise_within),
    }


def best_of_n(rows, last_B, reward_B):
    """Over prompts with several rows, (how many these are, the means of the reward of the row with
    the highest last value, of the mean reward, and of the highest one); means are NaN unless there
    are two such prompts. Rows with one last value have the same chance to be chosen."""
    of_prompts = []
    for same in by_prompt(describe(rows)):
        if len(same) > 1:
            reward_N = reward_B[same]
            last_N = last_B[same]
            best = reward_N[last_N == last_N.max()].mean()
            of_prompts.append((best, reward_N.mean(), reward_N.max()))
    if len(of_prompts) < 2:  # a single choice says nothing
        return len(of_prompts), nan, nan, nan
    return len(of_prompts), *torch.tensor(of_prompts).mean(0)


# ---- Where a row goes: all ranks know of it, and only those that compute it get it ---------------
# A worker's method is called with the rows that each rank owns. All ranks share a Row for each, and
# compute from those alone which rank computes what; fetch and give_back move rows and values.


def dp_compute_proto(needs=(), may_have=()):
    """Decorates a worker's method, which every rank calls with the rows it owns. The method gets
    this batch, with only the float columns in `needs` and `may_have`, and the Rows of all ranks.
    UserError: the batch is not what check wants, a row is passed twice, or only some ranks have a
    column that a batch may have."""

    def decorate(method):
        @functools.wraps(method)
        def call(self, batch):
            check_default_dtype()
            check(batch, needs)
            unused = dict.fromkeys(set(Batch.FLOATS).difference(needs, may_have))
            batch = replace(batch, **unused)

            # ranks that differ would wait for columns that others do not send
            for name in may_have:
                if len(set(of_all_ranks(getattr(batch, name) is None))) > 1:
                    raise UserError(f"{name}: only some ranks' batches have this column")

            # what the Rows say, or no rank needs, does not travel; only some ranks may have it
            rows = rows_of_all_ranks(batch)
            batch = replace(batch, episode=None, source=None, turns=None)

            # the caller's autocast is for its own models
            autocast = torch.autocast(self.device.type, enabled=False)
            with torch.profiler.record_function(method.__name__), autocast:
                return method(self, batch, rows)

        del call.__wrapped__  # or help would show an argument that callers do not pass
        return call

    return decorate


def check_default_dtype():
    """RuntimeError unless new tensors are float32 where nothing else is said."""
    dtype = torch.get_default_dtype()
    if dtype != torch.float32:
        raise RuntimeError(f"torch's default dtype is {dtype}, but must be float32 here")


# What every rank knows of a row, wherever it is. Mini-batches, micro-batches and the weights of
# losses follow from it, alike on all ranks. Rows are one np.recarray: rows.length are all lengths
Row = np.dtype([
    ("row_id", np.int64),
    ("owner", np.int32),  # the rank that has it
    ("index", np.int32),  # its place in the owner's batch
    ("length", np.int32),  # tokens
    ("actions", np.int32),
    ("episode", np.int64),  # row_id of its episode's first row
    ("segment", np.int32),  # its place in the episode, from 0
    ("shared", np.int32),  # tokens as in the row before in its episode; of a first row: its prompt
    ("prompt", "S16"),  # digest of the episode's prompt; empty: the row is alone
    ("images", bool),  # whether it has any
])  # fmt: skip


class Table(NamedTuple):
    """Which rows each data-parallel rank computes, alike on all ranks."""

    rows: np.recarray  # Rows
    wanted: list  # for each rank, the indices of its rows, micro-batch after micro-batch
    sizes: list  # for each rank, how many rows each of its micro-batches has


def table_of(rows, parts):
    """The Table of micro-batches (lists of indices of Rows) for each rank."""
    wanted = [np.array(list(itertools.chain(*micros)), dtype=int) for micros in parts]
    return Table(rows, wanted, [list(map(len, micros)) for micros in parts])


def describe(batch):
    """The Rows of this rank's batch, in its order."""
    ids = batch.input_ids.numpy()
    acts = batch.response_mask.numpy()
    images = batch.multi_modal_inputs or [{}] * len(batch)
    starts = batch.cu_seqlens.tolist()
    numbers = batch.row_id.tolist()
    episodes = numbers if batch.episode is None else batch.episode.tolist()

    newest = {}  # episode -> the index of the newest of its rows
    rows = np.recarray(len(batch), Row)
    for index in batch.row_id.argsort().tolist():
        ids_L = ids[starts[index] : starts[index + 1]]
        acts_L = acts[starts[index] : starts[index + 1]]
        prompt = int(acts_L.argmax())  # tokens before the first action; 0 without any
        episode = episodes[index]
        before = newest.get(episode)
        if batch.episode is not None:
            newest[episode] = index

        if before is None:
            # equal digests: equal prompts. Rows of an episode stay together in any case
            segment = 0
            shared = prompt
            digest = b""
            if prompt and numbers[index] >= 0 and not images[index]:
                digest = hashlib.blake2b(ids_L[:prompt].tobytes(), digest_size=16).digest()
            elif batch.episode is not None:
                digest = hashlib.blake2b(f"episode {episode}".encode(), digest_size=16).digest()
        else:
            segment = rows.segment[before] + 1
            digest = rows.prompt[before]
            shared = 0
            if numbers[index] >= 0 and not images[index] and not images[before]:
                shared = alike(ids[starts[before] : starts[before + 1]], ids_L)

        place = (numbers[index], RANK, index, len(ids_L), acts_L.sum())
        rows[index] = (*place, episode, segment, shared, digest, bool(images[index]))
    return rows


def alike(ids, others):
    """How many first tokens two rows have in common."""
    n = min(len(ids), len(others))
    return int(np.append(ids[:n] != others[:n], True).argmax())


def rows_of_all_ranks(batch):
    """The Rows of all ranks, in row_id order (a collective). UserError: a row is passed twice, or
    an episode by several ranks."""
    rows = describe(batch)
    if WORLD_SIZE > 1:  # bytes, because objects of thousands of ranks would take seconds
        rows = np.frombuffer(b"".join(of_all_ranks(rows.tobytes())), Row).view(np.recarray)
    rows = rows[rows.row_id.argsort()]

    twice = rows.row_id[1:][rows.row_id[1:] == rows.row_id[:-1]]
    if len(twice):
        words = "occurs more than once: a rank must pass only its own rows"
        raise UserError(f"row_id {twice[0]} {words}")

    by_episode = rows[rows.episode.argsort(kind="stable")]
    same = by_episode.episode[1:] == by_episode.episode[:-1]
    apart = by_episode.episode[1:][same & (by_episode.owner[1:] != by_episode.owner[:-1])]
    if len(apart):
        words = "are on several ranks: one must pass them all, because credit runs along them"
        raise UserError(f"episode {apart[0]}: its rows {words}")
    return rows


def in_groups(rows, share=True):
    """(order, first): the indices of rows, those of equal prompts together, the rows of an episode
    in their order; and for each, the index of the first row with its prompt. A row of an episode
    has that of the episode. Rows with images, without an action or blank are alone; without share,
    all are."""
    alone = np.arange(len(rows))
    _, first, number = np.unique(rows.prompt, return_index=True, return_inverse=True)
    first = np.where(share & (rows.prompt != b""), first[number], alone)
    order = np.lexsort((rows.segment, rows.episode, first))
    return order, first[order]


def by_prompt(rows, share=True):
    """[indices] of rows with equal prompts. share, and their order: see in_groups."""
    order, first = in_groups(rows, share)
    return np.split(order, np.diff(first).nonzero()[0] + 1)


def groups_of(rows):
    """The indices of the rows of each episode, as lists; episodes that begin with an equal prompt
    are in one list."""
    order, first = in_groups(rows)
    groups = {}
    for row, episode, group in zip(order.tolist(), rows.episode[order].tolist(), first.tolist()):
        groups.setdefault(group, {}).setdefault(episode, []).append(row)
    return [list(episodes.values()) for episodes in groups.values()]


def shared_tokens(rows, share=True):
    """(B,) how many of its first tokens each row is known to have in common with the row before,
    which are computed once: the prompt, or what an episode's rows share. share: if anything is."""
    shared = np.zeros(len(rows), dtype=int)
    now = rows[1:]
    before = rows[:-1]
    next_of_episode = (now.episode == before.episode) & (now.segment == before.segment + 1)
    same_prompt = (now.prompt == before.prompt) & (now.prompt != b"")
    begins_alike = same_prompt & (now.segment == 0) & (before.segment == 0)
    shared[1:] = np.where(share & (next_of_episode | begins_alike), now.shared, 0)
    return shared


def bundles(rows, most, ranks, share=True):
    """Rows with equal prompts, in bundles of one row, or of at most `most` tokens and a rank's
    share of all -> (indices of the rows of each bundle; its tokens). A shared token counts once,
    and a sixteenth for each other row that sees it. share: see in_groups."""
    order, first = in_groups(rows, share)
    alone = rows.length[order].astype(int)
    shared = shared_tokens(rows[order], share)

    # a row behind another one: its own tokens, and copies of the keys and values of shared ones,
    # which are small next to what a layer keeps for a token
    behind = alone - shared + shared // 16
    most = int(min(most, behind.sum() / ranks))

    # where a bundle ends that begins at a row: behind its last row, or that of its prompt
    total = behind.cumsum()
    ends = np.searchsorted(total, total - alone + most, side="right")
    ends = np.maximum(ends, np.arange(len(rows)) + 1)
    ends = np.minimum(ends, np.searchsorted(first, first, side="right")).tolist()

    # one bundle after the other
    places = [0]
    while places[-1] < len(rows):
        places.append(ends[places[-1]])
    begins = np.array(places[:-1], dtype=int)
    last = np.array(places[1:], dtype=int) - 1
    sizes = alone[begins] + total[last] - total[begins]
    order = order.tolist()
    return [order[begin:end] for begin, end in itertools.pairwise(places)], sizes


def cost_of(rows, share=True, cost=int):
    """What these Rows cost together; shared tokens count once. cost(n): what the first n tokens of
    a row cost; by default, tokens. share: see in_groups."""
    rows = rows[in_groups(rows, share)[0]]
    shared = shared_tokens(rows, share).tolist()
    return sum(cost(n) - cost(known) for n, known in zip(rows.length.tolist(), shared))


def shuffled(groups, most, *key):
    """The members of groups, such as those of groups_of, in an order that the key alone decides,
    such as seed, step and epoch. A group stays together, but one of more than `most` is taken
    apart: all episodes of a game may begin alike."""
    parts = []
    for same in groups:
        parts += [same] if len(same) <= most else [[one] for one in same]
    return list(itertools.chain(*Random(" ".join(map(str, key))).sample(parts, len(parts))))


def cut_evenly(things, pieces):
    """A list in this many pieces of equal sizes, give or take one; the larger ones come first."""
    ends = [ceil(len(things) * i / pieces) for i in range(1, pieces + 1)]
    return [things[i:j] for i, j in itertools.pairwise([0, *ends])]


def rows_of_step(step, groups, size, seed):
    """The members of groups for update `step`, at most `size`. Each pass over the groups is
    shuffled anew."""
    n = sum(map(len, groups))
    pieces = ceil(n / size)  # of equal sizes, give or take one
    i = step % pieces
    rows = shuffled(groups, size, seed, "rows", step // pieces)
    return rows[n * i // pieces : n * (i + 1) // pieces]


def fetch(batch, rows, wanted):
    """The rows that this rank computes, from the ranks that have them (a collective) -> Batch of
    the Rows wanted[RANK], in that order. wanted: indices of Rows for each rank, equal on all.

        rank 0 has A B, rank 1 has C D          wanted: C A for rank 0, D B for rank 1
        rank 0 sends A to itself, B to rank 1   and gets A from itself, C from rank 1: order C A"""
    mine = rows[wanted[RANK]]
    if WORLD_SIZE == 1:
        return batch.select(mine.index.tolist())

    # what leaves for each rank that wants it, and what comes from each rank that has it
    leaving, receiver = wanted_of_this_rank(rows, wanted)
    rows_sent, tokens_sent = sizes_by_rank(receiver, leaving)
    rows_got, tokens_got = sizes_by_rank(mine.owner, mine)

    # indices of what leaves, in the order of ranks
    row_out = leaving.index.tolist()
    token_out = batch.token_index(row_out)

    # where each wanted row is among those that come; the same for tokens
    by_owner = mine.owner.argsort(kind="stable")
    row_order = by_owner.argsort().tolist()
    token_order = tokens_in(cumulative(mine.length[by_owner].tolist()), row_order)

    # one column after another, which takes less memory
    columns = {"cu_seqlens": cumulative(mine.length.tolist())}
    for name, column in vars(batch).items():
        if not isinstance(column, torch.Tensor) or name == "cu_seqlens":
            continue
        if name in Batch.ROWS:
            columns[name] = all_to_all(column[row_out], rows_sent, rows_got)[row_order]
        else:
            columns[name] = all_to_all(column[token_out], tokens_sent, tokens_got)[token_order]

    if rows.images.any():
        images = batch.multi_modal_inputs or [{}] * len(batch)
        going = [leaving.index[receiver == rank] for rank in range(WORLD_SIZE)]
        parts = exchange([[images[i] for i in index] for index in going])
        parts = list(itertools.chain(*parts))
        columns["multi_modal_inputs"] = [parts[i] for i in row_order]
    return Batch(**columns)


def wanted_of_this_rank(rows, wanted):
    """(This rank's Rows that are wanted, in the order of the ranks that want them; these ranks)."""
    index = np.concatenate(wanted).astype(int)
    ranks = np.arange(WORLD_SIZE).repeat(list(map(len, wanted)))
    ours = rows.owner[index] == RANK
    return rows[index[ours]], ranks[ours]


def sizes_by_rank(ranks, rows):
    """(number of rows, their tokens) for each rank. ranks: one for each of the Rows."""
    tokens = np.bincount(ranks, rows.length, WORLD_SIZE).astype(int)
    return np.bincount(ranks, minlength=WORLD_SIZE).tolist(), tokens.tolist()


def give_back(x_T, local, rows, wanted, batch):
    """The inverse of fetch, for numbers of tokens (a collective) -> (T,) of this rank's batch.

    x_T: of `local`, which fetch gave. wanted: as in fetch, but empty for ranks that give nothing
    back. What several ranks give for one token is added up: Megatron's context-parallel ranks have
    0 for the tokens of others."""
    mine = rows[wanted[RANK]]
    by_owner = mine.owner.argsort(kind="stable")
    coming, giver = wanted_of_this_rank(rows, wanted)
    _, tokens_given = sizes_by_rank(mine.owner, mine)
    _, tokens_got = sizes_by_rank(giver, coming)

    x_T = x_T[local.token_index(by_owner.tolist())]
    got_T = all_to_all(x_T, tokens_given, tokens_got)
    index_T = batch.token_index(coming.index.tolist())
    return torch.zeros(len(batch.input_ids)).index_add(0, index_T, got_T)


def tokens_of(rows):
    """Tokens of these Rows."""
    return int(rows.length.sum())


def all_to_all(x, sent, got):
    """Sends x in parts of these sizes, one to each rank -> the parts that come, whose sizes are
    `got`, end to end (a collective)."""
    if WORLD_SIZE == 1:
        return x
    is_bool = x.dtype == torch.bool  # gloo sends numbers only
    x = x.view(torch.uint8) if is_bool else x.contiguous()
    out = x.new_empty(sum(got))
    dist.all_to_all_single(out, x, got, sent)
    return out.view(torch.bool) if is_bool else out


def exchange(parts):
    """Sends an object to each rank -> [the object that comes from each rank] (a collective)."""
    sent = [pickle.dumps(part) for part in parts]
    sizes = list(map(len, sent))
    one_each = [1] * WORLD_SIZE
    theirs = all_to_all(torch.tensor(sizes), one_each, one_each).tolist()

    data = torch.frombuffer(bytearray(b"".join(sent)), dtype=torch.uint8)
    came = all_to_all(data, sizes, theirs).split(theirs)
    return [pickle.loads(x.numpy().tobytes()) for x in came]


def compute_together(worker, batch):
    """(T,) values, on every rank, of a batch that every rank has read; each computes a part."""
    episodes = batch.episodes()
    ranks = range(WORLD_SIZE)
    parts = [list(itertools.chain(*episodes[rank::WORLD_SIZE])) for rank in ranks]
    values = of_all_ranks(worker.compute_values(batch.select(parts[RANK])))
    values_T = torch.zeros(len(batch.input_ids))
    for part, x_T in zip(parts, values):
        values_T[batch.token_index(part)] = x_T
    return values_T


# ---- Packed rows: attention without padding ------------------------------------------------------
# packed_attention is registered with transformers, for the actor and the critic on FSDP; that on
# Megatron calls attention itself.

# torch 2.11 lets queries share the heads of keys by itself; later versions must be asked to
VARLEN_OPTIONS = {}
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    VARLEN_OPTIONS = {"enable_gqa": True}


class Piece(NamedTuple):
    """Neighbours of equal length in a packed row."""

    count: int  # sequences
    queries: int  # of all of them
    keys: int


class Pack:
    """Where sequences of these lengths lie in a packed row.

    key_lengths: if a sequence has more keys than queries, its queries are its last tokens. None: it
    has equally many. keys: where the keys of all sequences are in the row, on the device. None:
    where the queries are."""

    def __init__(self, lengths, device, key_lengths=None, keys=None):
        key_lengths = key_lengths or lengths
        self.lengths = lengths
        self.key_lengths = key_lengths
        self.keys = keys
        self.row_blocks = None  # for recurrent layers, see row_by_row
        self.kernel = None  # what has computed attention

        # whether there are kernels for half precision
        self.has_kernels = False
        if torch.device(device).type == "cuda":
            self.has_kernels = torch.cuda.get_device_capability() >= (8, 0)

        # for attention by pieces
        self.pieces = []
        for (queries, seen), same in itertools.groupby(zip(lengths, key_lengths)):
            count = len(list(same))
            self.pieces.append(Piece(count, count * queries, count * seen))

        # for kernels, which take int32: where queries and keys of each sequence end, and the most
        # that one has, as the length of a tensor: a block that is compiled takes any length
        cu_queries = cumulative(lengths).int().to(device, non_blocking=True)
        cu_keys = cumulative(key_lengths).int().to(device, non_blocking=True)
        most = [torch.empty(max(x), 0) for x in (lengths, key_lengths)]
        self.varlen = (cu_queries, cu_keys, *most)


class CurrentPack:
    """What layers read, in packed_attention and row_by_row, until the backward ends: it may rerun
    them."""

    pack = None  # Pack of the whole row, before it is sliced over sequence-parallel ranks
    group = None  # ranks that share the row, or None
    kernel = None  # what computed attention in the pack that was checked last

    @classmethod
    def set(cls, pack, group=None):
        """The pack, and the ranks that share it, for the layers of the next forward."""
        cls.pack = pack
        cls.group = group

    @classmethod
    def check(cls, pack):
        """RuntimeError unless the layers have read this pack, which was set before them."""
        if cls.pack is not pack:
            raise RuntimeError("another model has run meanwhile: threads must take turns")
        if not pack:
            return
        cls.kernel = pack.kernel
        if not pack.kernel:
            words = "the model has another attn_implementation"
            raise RuntimeError(f"the attention of packed rows was not called: {words}")


def lay_out_once(batch, share=True):
    """Lays rows out so that what several of them begin with is there once -> (slots_S, index_T,
    sequences). Rows with images, and blank ones, share nothing; without `share`, no row does.

    slots_S: the token in each slot. index_T: the slot of each token. sequences: [queries, the row
    whose tokens they see] of each, in the order of the slots. A row that goes on from all of
    another one is one sequence with it.

        rows       p0 p1 a0    p0 p1 a0 o0 a1    p0 p1 b0
        slots      p0 p1 a0             o0 a1          b0
        index_T    0  1  2     0  1  2  3  4     0  1  5
        sequences  p0 p1 a0             o0 a1 |        b0"""
    tokens = torch.arange(len(batch.input_ids)).split(batch.lengths)  # of each row
    ids = [row.numpy() for row in batch.input_ids.split(batch.lengths)]
    images = batch.multi_modal_inputs or [{}] * len(batch)
    alone = [not share or bool(x) or i < 0 for x, i in zip(images, batch.row_id.tolist())]

    # rows that begin alike are neighbours in the order of their ids, which is that of their bytes
    order = [row for row in range(len(batch)) if not alone[row]]
    order.sort(key=lambda row: ids[row].astype(">i8").tobytes())
    order += [row for row in range(len(batch)) if alone[row]]

    # each row shares the most with the one before it, and gets slots for what is behind that
    slots = []
    index_T = torch.zeros(len(batch.input_ids), dtype=torch.int64)
    places = index_T.split(batch.lengths)
    sequences = []
    used = 0
    before = None
    for row in order:
        shared = 0
        if before is not None and not alone[row]:
            shared = alike(ids[before], ids[row])
            places[row][:shared] = places[before][:shared]
        own = len(ids[row]) - shared
        places[row][shared:] = torch.arange(used, used + own)
        slots.append(tokens[row][shared:])
        used += own

        if shared and shared == len(ids[before]):
            own += sequences.pop()[0]
        sequences.append((own, row))
        before = row
    return torch.cat(slots), index_T, sequences


def packed_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    sliding_window=0,
    softcap=None,
    is_causal=None,
    s_aux=None,
    **kwargs,
):
    """transformers' attention interface for a packed row, whose Pack is CurrentPack's: q (1,H,T,D),
    k v (1,K,T,D) -> ((1,T,H,D), None). UserError: this model needs another kind of attention."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal

    # a window that only the model's own mask has; it does nothing if no row can be longer
    window = getattr(module.config, "sliding_window", None) or inf
    longest = getattr(module.config, "max_position_embeddings", inf)
    window_in_mask = sliding_window == 0 and window < longest
    if attention_mask is not None or not causal or window_in_mask:
        name = type(module).__name__
        raise UserError(f"{name} asks for more than causal attention, so rows cannot be packed")

    query = query.to(value.dtype)  # float32 rotary tables turn queries and keys into float32
    key = key.to(value.dtype)
    options = (scaling, sliding_window, softcap, s_aux)
    out_1HTD = attention(CurrentPack.pack, query, key, value, *options)
    return out_1HTD.transpose(1, 2), None


transformers.AttentionInterface.register("packed", packed_attention)


def attention(pack, q, k, v, scale, window=None, softcap=None, sinks=None):
    """Causal attention within each sequence of the pack: q (1,H,T,D), k v (1,K,T,D) -> (1,H,T,D).

    With half precision on CUDA it runs flash-attn or torch's kernel for packed rows; else SDPA, or
    plain products for soft caps (Gemma 2) and sinks (gpt-oss)."""
    if pack.keys is not None:
        k = k[:, :, pack.keys]
        v = v[:, :, pack.keys]

    half = pack.has_kernels and q.dtype != torch.float32
    head_dim = q.shape[-1]
    fits = sinks is None and head_dim == v.shape[-1] <= 256 and head_dim % 8 == 0
    if half and fits and (flash_attn_varlen_func or not softcap):
        return kernel_attention(pack, q, k, v, scale, window, softcap)
    return attention_by_pieces(pack, q, k, v, scale, window, softcap, sinks)


@torch.compiler.disable  # the pieces of each row would be compiled anew
def attention_by_pieces(pack, q, k, v, scale, window, softcap, sinks):
    """attention of neighbours of equal length at a time."""
    # split, not slices: the backward of each slice would fill a whole row with zeros
    pack.kernel = "eager" if softcap or sinks is not None else "sdpa"
    queries = [piece.queries for piece in pack.pieces]
    keys = [piece.keys for piece in pack.pieces]
    parts = zip(pack.pieces, q[0].split(queries, 1), k[0].split(keys, 1), v[0].split(keys, 1))

    outs = []
    for piece, *qkv in parts:
        qkv_NHLD = [x.unflatten(1, (piece.count, -1)).transpose(0, 1) for x in qkv]
        out_NHLD = dense_attention(*qkv_NHLD, scale, window, softcap, sinks)
        outs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).transpose(0, 1)[None]


def kernel_attention(pack, q, k, v, scale, window, softcap):
    """attention by flash-attn, or by torch's kernel for packed rows, which knows no soft cap."""
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    cu_queries, cu_keys, most_queries, most_keys = pack.varlen
    inputs = (q_THD, k_THD, v_THD, cu_queries, cu_keys, len(most_queries), len(most_keys))
    size = (window - 1 if window else -1, 0)  # right window 0: causal

    if flash_attn_varlen_func:
        pack.kernel = "flash"
        cap = softcap or 0.0
        out_THD = flash_attn_varlen_func(
            *inputs, softmax_scale=scale, causal=True, window_size=size, softcap=cap
        )
    else:
        pack.kernel = "varlen"
        out_THD = varlen_attn(*inputs, scale=scale, window_size=size, **VARLEN_OPTIONS)
    return out_THD.transpose(0, 1)[None]


def dense_attention(q, k, v, scale, window, softcap, sinks):
    """(N,H,L,D) attention of N equally long sequences, by torch's fused kernel or written out."""
    queries = q.shape[2]
    keys = k.shape[2]
    written_out = softcap or sinks is not None

    # which keys a query sees; None: the plain causal mask of the fused kernel
    mask = None
    if written_out or queries < keys or (window and keys > window):
        j = torch.arange(keys, device=q.device)
        back = j[keys - queries :, None] - j  # queries are the last tokens
        mask = (back >= 0) & (back < (window or keys))

    if q.is_cuda or written_out:  # torch's float32 CUDA kernels cannot group heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if not written_out:
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=not q.is_cuda
        )

    scores_NHLL = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores_NHLL = softcap * torch.tanh(scores_NHLL / softcap)
    scores_NHLL = scores_NHLL.masked_fill(~mask, -inf)
    if sinks is not None:  # one more column per head: it takes probability but has no value
        column = sinks.view(1, -1, 1, 1).expand(*scores_NHLL.shape[:3], 1)
        scores_NHLL = torch.cat([scores_NHLL, column.to(scores_NHLL.dtype)], -1)
    weights_NHLL = scores_NHLL.softmax(-1, dtype=torch.float32)[..., :keys]
    return weights_NHLL.to(q.dtype) @ v


# ---- Recurrent layers in packed rows -------------------------------------------------------------
# Gated delta nets, Mamba layers and short convolutions (Qwen3.5, LFM2, Nemotron-H, ...) read a row
# from its start, so in a packed row they would carry what they remember into the next one. They
# are the modules that hold a convolution. Here each gets every row alone:
#
#     packed row       p0 p1 p2 a0 a1    p2 b0    c0 c1 c2    rows 0 and 1 have the same prompt
#     rows they read   p0 p1 p2 a0 a1                         rows of like length together
#                      p0 p1 p2 b0  -                         - comes after a row, and is dropped
#                      c0 c1 c2
#     packed row       p0 p1 p2 a0 a1    p2 b0    c0 c1 c2    p0 p1 are those of row 0

LAYERS_TO_PACK = {"full_attention", "sliding_attention", "moe", "mlp", "sparse", "dense"}
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid"}


def pack_recurrent(decoder, gather=None, add_up=None):
    """Lets the recurrent layers of a decoder read each row of a pack alone.

    gather, add_up: for ranks that share a row, see row_by_row. UserError: the decoder has layers
    of another kind, which cannot be packed."""
    mixers = []
    for module in decoder.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            mixers.append(module)

    packs = set(LAYERS_TO_PACK)
    if mixers:
        packs |= RECURRENT_LAYERS
    kinds = set(getattr(decoder.config, "layer_types", None) or ())
    if kinds - packs:
        names = ", ".join(sorted(kinds - packs))
        raise UserError(f"{type(decoder).__name__} has layers that cannot be packed: {names}")

    for mixer in mixers:
        mixer.forward = functools.partial(row_by_row, mixer.forward, gather, add_up)


@torch.compiler.disable  # the rows of each pack would be compiled anew
def row_by_row(mix, gather, add_up, hidden_states, *args, attention_mask=None, **options):
    """The forward `mix` of a recurrent layer, for hidden_states (1,S,D) of the current pack, or of
    padded rows -> the same shape.

    If ranks share the row, gather(slice, group) gives the whole row, of which each rank computes
    some rows, and add_up(whole, group) the sum over ranks of this rank's slice."""
    pack = CurrentPack.pack
    group = CurrentPack.group
    if pack is None:
        return mix(hidden_states, *args, attention_mask=attention_mask, **options)

    row_SD = hidden_states[0]
    share = (0, 1)  # this rank, of all that share the row
    if group:
        row_SD = gather(row_SD, group)
        share = (dist.get_rank(group), dist.get_world_size(group))
    if pack.row_blocks is None:
        pack.row_blocks = blocks_of_rows(pack, *share)  # equal in all layers

    # no mask: padding comes after a row's tokens, which do not see it
    sources, target_P = pack.row_blocks
    outs_PD = [mix(row_SD[slots_NL], *args, **options).flatten(0, 1) for slots_NL in sources]
    out_PD = torch.cat(outs_PD)

    # one slot more than the row has, for what is dropped
    out_SD = out_PD.new_zeros(len(row_SD) + 1, out_PD.shape[1])
    out_SD = out_SD.index_copy(0, target_P, out_PD)[:-1]
    if group:
        out_SD = add_up(out_SD, group)
    return out_SD[None]


def blocks_of_rows(pack, rank, ranks):
    """What one of the ranks that share a pack reads in a recurrent layer -> (sources, target_P).

    sources: for rows of like length, (N, L) the slot of each token. target_P: where the results of
    all of them go; the slot after the last one for those that are dropped."""
    total = sum(pack.lengths)
    keys_K = pack.keys
    if keys_K is None:
        keys_K = torch.arange(total, device=pack.varlen[0].device)

    # a row's own tokens are its last ones; those before them are in the first row with its prompt
    rows = []
    for own, keys_L in zip(pack.lengths, keys_K.split(pack.key_lengths)):
        target_L = keys_L.clone()
        target_L[: len(keys_L) - own] = total
        rows.append((keys_L, target_L))
    rows.sort(key=lambda row: len(row[0]))

    # ranks take turns; one that gets no row drops what it computes, because FSDP waits for the
    # gradients of its weights
    mine = rows[rank::ranks]
    if not mine:
        keys_L, target_L = rows[0]
        mine = [(keys_L, torch.full_like(target_L, total))]

    # a row is padded by a fifth at most
    sources = []
    targets = []
    for _, alike in itertools.groupby(mine, key=lambda row: ceil(4 * log2(len(row[0])))):
        keys, target = zip(*alike)
        sources.append(nn.utils.rnn.pad_sequence(keys, True))
        targets.append(nn.utils.rnn.pad_sequence(target, True, total).flatten())
    return sources, torch.cat(targets)


# ==================================================================================================
# The second floor: what a run needs. Above this line stands what a critic computes, and it names
# nothing of what stands below, but for the first names.
# ==================================================================================================

# ---- Rows as JSON, one per line ------------------------------------------------------------------
# read_rows makes a Batch of a user's file for a critic. What the critic reads must be what the
# policy read and wrote, and three thoughts see to it: text is encoded in its place, because many
# tokenizers read it in another way where a row begins; a turn of a chat stands behind the prompt
# that the template makes for it; and the user sees the first row as the model reads it.

# float32 can hold the square
Number = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)] | bool
Text = Annotated[str, Field(min_length=1)]
Id = Annotated[int, Field(ge=0, lt=2**63)]
Ids = Annotated[list[Id], Field(min_length=1)]
Chat = Annotated[list[dict], Field(min_length=1)]
Flag = Annotated[bool, Field(strict=False)]  # 0 and 1, too
ALTERNATIVES = (
    ("prompt", "messages", "prompt_ids"),
    ("response", "response_ids", "completion"),
    ("reward", "rewards"),
)


class Rollout(BaseModel, strict=True):
    """One line of a JSONL file, with one key of each tuple in ALTERNATIVES; others are ignored."""

    prompt: Text | None = None
    messages: Chat | None = None
    tools: list[dict] | None = None  # that a chat may call, for the chat template
    prompt_ids: Ids | None = None
    response: str | list[str] | None = None  # empty: the policy stopped at once; or parts
    response_ids: Ids | None = None
    completion: Chat | None = None  # goes on with messages; the assistant's turns are actions
    reward: Number | None = None  # given to the last action
    rewards: list[Number] | None = None  # one per response token, or per turn, or part that acts
    response_mask: list[Flag] | None = None  # which response tokens, or which parts, act
    values: list[Number] | None = None  # of response tokens, from the critic at rollout time
    log_probs: list[Number] | None = None  # of response tokens, as the policy drew them
    truth: list[Number | None] | None = None  # what values should be, of response tokens
    truth_noise: list[Number | None] | None = None  # the variance of these, if they are estimates
    truncated: bool | None = None  # the response hit the length limit
    images: list[str] | None = None  # files, relative to the JSONL, or data URLs
    episode: str | int | float | None = None  # rows with the same one are its segments
    segment: int | float | None = None  # by which these are ordered; None: as in the file

    @model_validator(mode="after")
    def one_of_each(self):
        for names in ALTERNATIVES:
            given = [name for name in names if getattr(self, name) is not None]
            if not given and "reward" in names and self.episode is not None:
                continue  # another segment has the reward
            if len(given) != 1:
                has = " and ".join(given) or "none"
                raise ValueError(f"needs exactly one of {', '.join(names)}; has {has}")
        if self.completion and not self.messages:
            raise ValueError("a completion of messages needs a prompt of messages")
        if self.segment is not None and self.episode is None:
            raise ValueError("segment: needs an episode, the name of what it is a part of")
        return self


def read_rows(
    source,
    tokenizer,
    model_config=None,
    flag="--rollouts",
    place_images=None,
    hint_key=None,
    keys=None,
    chat=None,
    last_turn_only=False,
    convert=None,
):
    """Reads files of rows (or a list of JSON lines) as one Batch. row_id counts them, from 0; the
    segments of an episode follow each other, in their order.

    model_config: of the model that the rows must fit. flag: what to call the files in an error.
    place_images(rollout, folder) puts images into a Rollout. hint_key: see hint_of. keys: where
    prompt, response and reward are, see in_our_keys. chat: more arguments of the chat template.
    last_turn_only: a chat's earlier turns are no actions. convert: see raw_rows. UserError names
    the first bad row."""
    keys = keys or {}
    ends = turn_ends(tokenizer, model_config)
    fixed = (tokenizer, ends, hint_key, chat or {}, place_images is not None, last_turn_only)

    # row by row, so that a fault has its place
    found = []  # (place, number of its object, Rollout, Batch) of each row
    notes = collections.Counter()
    for index, (place, folder, row) in enumerate(raw_rows(source, flag, convert, keys)):
        try:
            rollouts, said = encode_rollout(parse_rollout(row, keys), row, *fixed)
            notes.update(said)
            for rollout in rollouts:
                if place_images:
                    place_images(rollout, folder)
                elif rollout.images:
                    raise UserError("it has images, but this model reads text only")
                one = batch_of_one(rollout, index)
                found.append((place, index, rollout, one))
                if model_config:
                    check_rows(one, model_config)
        except UserError as fault:
            raise UserError(f"{place}: {fault}") from None

    if not any(row.response_mask.any() for *_, row in found):
        raise UserError(f"{flag}: no row has an action")
    rows = in_order(found)
    if hint_key:
        print0(f"hint       {HINT!r} before each prompt, for the critic only")
    for words, count in notes.items():
        print0(f"note       {count:,} of {len(rows):,} rows: {words}")
    if rows.truth[rows.response_mask].isnan().all():
        rows = replace(rows, truth=None, truth_noise=None)
    if rows.rollout_log_probs[rows.response_mask].isnan().any():
        rows = replace(rows, rollout_log_probs=None)
    return rows


def in_order(found):
    """The rows that read_rows has found, as a Batch: episodes in the order of their first lines,
    and the rows of each in that of their segments. An episode lies in one file. UserError: its
    segments have no order, or nothing is said of its reward."""
    first = {}  # name of an episode -> number of its first object
    numbered = {}  # name of an episode -> whether its segments have numbers
    segments = {}  # (name of an episode, segment) -> number of its object
    silent = {}  # name of an episode -> where it is, until a segment says what it earns
    rows = []

    # an episode stands where its first row is
    for place, index, rollout, row in found:
        segment = rollout.segment
        name = index
        if rollout.episode is not None:
            name = (place.rpartition(":")[0], rollout.episode)
        if numbered.setdefault(name, segment is not None) != (segment is not None):
            words = "has segments with and without a number"
            raise UserError(f"{place}: episode {rollout.episode!r} {words}")
        if segment is not None and segments.setdefault((name, segment), index) != index:
            raise UserError(f"{place}: episode {rollout.episode!r} has two segments {segment}")

        silent.setdefault(name, place)
        if rollout.reward is not None or rollout.rewards is not None:
            silent[name] = ""
        rows.append((first.setdefault(name, index), segment or 0, index, row))

    for place in filter(None, silent.values()):
        raise UserError(f"{place}: no segment of this episode has a reward; it lies in one file")

    rows.sort(key=lambda row: row[:3])
    episode_B, _, source_B, rows = zip(*rows)
    rows = concat(rows)
    rows.row_id = torch.arange(len(rows))
    rows.source = torch.tensor(source_B)
    if len(first) < len(rows):
        episode_B = torch.tensor(episode_B)
        rows.episode = torch.searchsorted(episode_B, episode_B)  # the place of its first row
    return rows


def answers_of(row, keys, place):
    """The rows of an object: itself, the segments of an episode, or several answers to a prompt,
    which are a list of them with a list of rewards, or a pair: the chosen one has a reward of 1,
    the rejected one of 0.

    keys: see in_our_keys; a response that the user names is the only one. place: of the object.
    UserError: they do not fit together."""
    if row.get("segments") is not None:
        return segments_of_row(row, keys.get("reward") or "reward", place)
    if keys.get("response"):
        return [row]
    answers = row.get("responses") or row.get("completions")
    rewards = row.get("rewards")
    if row.get("chosen") is not None and row.get("rejected") is not None:
        row, answers = answers_of_pair(row)
        rewards = [1.0, 0.0]
    if not (isinstance(answers, list) and isinstance(rewards, list)):
        return [row]

    if len(answers) != len(rewards):
        raise UserError(f"it has {len(answers)} responses, but {len(rewards)} rewards")
    if row.get("episode") is not None:
        raise UserError("episode: several answers to a prompt are not parts of one")
    prompt = without(row, "responses", "completions", "rewards", "chosen", "rejected")
    return [prompt | {"response": x, "reward": r} for x, r in zip(answers, rewards)]


def answers_of_pair(row):
    """(a row with the prompt of a pair, its two answers). Both may be whole chats, which begin
    alike: there the answers begin where they differ. UserError: they are equal."""
    chats = [row["chosen"], row["rejected"]]
    if chats[0] == chats[1]:
        raise UserError("chosen and rejected are equal")
    messages = [x for chat in chats if isinstance(chat, list) for x in chat]
    if not messages or not all(isinstance(x, dict) for x in messages):
        return row, chats

    same = [x for x, y in itertools.takewhile(lambda xy: xy[0] == xy[1], zip(*chats))]
    asked = row.get("prompt") or row.get("messages") or []
    if not isinstance(asked, list):
        asked = [{"role": "user", "content": asked}]

    # chats that do not begin with an answer are whole, but may lack the system's message
    if same and same[0].get("role") != "assistant":
        asked = [x for x in asked if x.get("role") == "system" and x not in same]
    answers = [chat[len(same) :] for chat in chats]
    return without(row, "prompt") | {"messages": asked + same}, answers


def segments_of_row(row, reward_key, name):
    """The segments of an episode that stands in one line, each with what else the line has, but for
    its reward and whether it is truncated, which the last one gets. name: of the episode, if the
    line has none.

    UserError: they are no objects, the last one has two rewards, or a key stands in the wrong
    place."""
    if not row["segments"] or not are_objects(row["segments"]):
        raise UserError("segments: must be a list of objects, each with a prompt and a response")
    for key in PER_TOKEN:
        if row.get(key) is not None:
            raise UserError(f"{key}: must stand in each of the segments")
    if any(x.get("segment") is not None for x in row["segments"]):
        raise UserError("segment: the segments of a line have the order of their list")
    shared = {"episode": name} | without(row, "segments", "truncated")
    rows = [shared | x | {reward_key: look_up(x, reward_key)} for x in row["segments"]]
    whole = look_up(row, reward_key)
    if whole is not None:
        if rows[-1][reward_key] is not None:
            raise UserError("segments: the line has a reward, and its last segment; add them up")
        rows[-1][reward_key] = whole
    rows[-1].setdefault("truncated", row.get("truncated"))
    return rows


def without(row, *keys):
    """A copy of an object without these keys."""
    return {key: x for key, x in row.items() if key not in keys}


def parse_rollout(row, keys):
    """A JSON object -> Rollout, whose texts have no token ids. UserError says what is wrong."""
    line = json.dumps(in_our_keys(row, keys))
    try:
        return Rollout.model_validate_json(line)
    except ValidationError as error:
        raise UserError(fault_of_row(error, row)) from None


# keys with a number for each token or turn of a response
PER_TOKEN = ("rewards", "response_mask", "values", "log_probs", "truth", "truth_noise")
SHAPES = {  # a key that tells rows of other tools -> what in tests/rows/shapes.py makes them ours
    "conversations": "sharegpt",
    "completion_ids": "prime_rl",
    "token_ids": "nemo_rl",
    "labels": "trl_steps",
    "labeler": "prm800k",
    "task": "math_shepherd",
    "correct_answers": "ultrafeedback",
}


def fault_of_row(error, row):
    """What pydantic finds first in a row, in our words."""
    fault = error.errors()[0]
    text = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    text = re.sub("List should have at least 1 item .*", "must have an entry", text)
    if fault["loc"]:
        return f"{fault['loc'][0]}: {text}, not {json.dumps(fault['input'], default=str):.40}"

    empty = [key for key in row if row[key] is None]
    if empty:
        text += f" (null counts as none: {', '.join(empty)})"
    text += f"; its keys are {', '.join(row):.200}"
    for key in SHAPES.keys() & row.keys():
        text += f"; with {key!r}, --rows tests/rows/shapes.py:{SHAPES[key]} may read it"
    return text


def look_up(row, key, default=None):
    """row[key]; a key with dots leads to a nested one, as in reward_model.ground_truth."""
    if key in row:
        return row[key]
    for part in key.split("."):
        if not isinstance(row, dict) or part not in row:
            return default
        row = row[part]
    return row


def in_our_keys(row, keys):
    """A row as other tools write it, in the keys of Rollout. keys: {"prompt": "question"} and the
    like say where the user wants prompt, response and reward from. UserError: there is nothing."""
    keys = {name: key for name, key in keys.items() if key}
    named = {name: look_up(row, key, ...) for name, key in keys.items()}
    for name, found in named.items():
        if found is ...:
            there = f"among its keys {', '.join(row):.200}"
            raise UserError(f"no {keys[name]!r}, which --{name}-key names, {there}")

    # what the user names wins over other keys for the same thing
    unused = {other for names in ALTERNATIVES for other in names if named.keys() & names}
    row = without(row, *unused) | named

    # TRL: a prompt of messages, and a completion, which may be a text, or messages, too
    if isinstance(row.get("prompt"), list) and row.get("messages") is None:
        row["messages"] = row.pop("prompt")
    completion = row.pop("completion", None)
    if row.get("response") is None and row.get("response_ids") is None:
        row["response"] = completion
    row["tools"] = tools_of(row)
    return answers_in_chat(row)


def tools_of(row):
    """The tools of a row, which may stand there as JSON text."""
    tools = row.get("tools")
    with suppress(ValueError, TypeError):
        tools = json.loads(tools)
    return tools or None


def answers_in_chat(row):
    """The row with a `completion`, if the answer is messages: its own, or, of a chat without a
    response, all from the assistant's first one on."""
    answer = row.get("response")
    if isinstance(answer, dict):
        answer = [answer]
    if are_objects(answer):
        row = row | {"completion": answer, "response": None}
    messages = row.get("messages")
    if not are_objects(messages):
        return row

    # a chat that has its answers in it; a greeting before the first question is none
    roles = [message.get("role") for message in messages]
    asked = roles.index("user") if "user" in roles else 0
    has_answer = any(row.get(name) is not None for name in ALTERNATIVES[1])
    if not has_answer and "assistant" in roles[asked + 1 :] and roles[-1] not in ("user", "system"):
        first = roles.index("assistant", asked + 1)
        row = row | {"messages": messages[:first], "completion": messages[first:]}
    return row


def are_objects(x):
    """Whether it is a list of objects, such as a chat."""
    return isinstance(x, list) and all(isinstance(y, dict) for y in x)


def encode_rollout(rollout, row, tokenizer, ends, hint_key, chat, reads_images, last_turn_only):
    """Gives a Rollout the ids of its texts -> ([it, or, of a chat whose prompts do not go on from
    each other, one Rollout for each segment], a list of what the user should know of them).

    row: its JSON object. ends: see turn_ends. hint_key: see hint_of. chat: more arguments of the
    chat template. UserError: a text cannot be encoded."""
    hint = hint_of(row, hint_key)
    if tokenizer is None and (hint or not (rollout.prompt_ids and rollout.response_ids)):
        raise UserError("it is text, but there is no tokenizer to encode it; give --tokenizer")
    notes = []
    chat = chat | {"tools": rollout.tools}

    # the text of a prompt, and behind it what the policy wrote, and others
    prompt = rollout.prompt
    if rollout.messages and not rollout.completion:
        prompt = chat_text(tokenizer, text_messages(rollout.messages, reads_images), **chat)
    spans = [(rollout.response or "", True)]
    if isinstance(rollout.response, list):
        if len(rollout.response_mask or []) != len(rollout.response):
            words = "for labels of steps, give --rows tests/rows/shapes.py:steps"
            raise UserError(f"response: a list of texts needs a response_mask; {words}")
        spans = list(zip(rollout.response, rollout.response_mask))
        rollout.response_mask = None
    segments = [(rollout, prompt, spans)]
    if rollout.completion:
        segments = segments_of_chat(rollout, tokenizer, ends, chat, reads_images, last_turn_only)

    for segment, before, spans in segments:
        if before:
            is_chat = bool(rollout.messages)
            segment.prompt_ids = encode_prompt(tokenizer, before, hint, is_chat)
            if is_chat and writes_date(tokenizer):
                notes.append(DATED)
        elif tokenizer:
            before = decode(tokenizer, segment.prompt_ids[-16:])
            if hint:
                segment.prompt_ids = hint_before_ids(tokenizer, segment.prompt_ids, hint)
        if segment.response_ids:
            continue

        # a last turn may repeat how the prompt ends, and have a new line behind its own end
        *earlier, (text, acts) = spans
        if acts:
            if text.rstrip().endswith(tuple(ends.values())):
                text = text.rstrip()
            begun = before + "".join(text for text, _ in earlier)
            text, note = behind_thought(begun, text)
            notes += [note] if note else []
        encode_response(segment, tokenizer, before, [*earlier, (text, acts)], ends)
    return [segment for segment, *_ in segments], notes


def encode_response(rollout, tokenizer, before, spans, ends):
    """Gives a Rollout the ids of its response, what acts in it, and its rewards by token.

    before: the prompt's text. spans: [(text, whether the policy wrote it)]. ends: see turn_ends."""
    ids = []
    acts = []
    last = []  # place of each turn's last token, where the credit of a turn stands
    begun = before
    for text, acting in spans:
        span = encode_behind(tokenizer, begun, text)
        begun += text
        ids += span
        acts += [acting] * len(span)
        if acting:
            last.append(len(ids) - 1)

    # stopping is an action, too: a last turn that was not cut off ends with a token that says so
    if acting and not rollout.truncated:
        end = next(iter(ends), None) if rollout.messages else tokenizer.eos_token_id
        known = tokenizer.added_tokens_decoder if rollout.completion else {}
        ended = span and (span[-1] in ends or (span[-1] in known and known[span[-1]].special))
        if end is not None and not ended:
            ids.append(end)
            acts.append(True)
            last[-1] = len(ids) - 1

    given = rollout.rewards
    if given is not None and len(given) == len(last):
        rollout.rewards = [0.0] * len(ids)
        for place, reward in zip(last, given):
            rollout.rewards[place] += reward
    elif given is not None and len(given) != len(ids):
        kinds = f"{len(last)} turns or parts that act, and {len(ids)} tokens"
        raise UserError(f"rewards has {len(given)} entries, the response has {kinds}")
    if rollout.response_mask is None:
        rollout.response_mask = acts
    rollout.response_ids = ids


def batch_of_one(rollout, row_id):
    """Rollout with token ids -> Batch of one row. UserError: its columns do not fit together."""
    ids = rollout.prompt_ids + rollout.response_ids
    n = len(rollout.response_ids)
    if not 0 < n < len(ids):
        raise UserError("empty prompt or response")

    def column(name, default):
        """(T,) of what the row has for its n response tokens; 0 in the prompt."""
        given = getattr(rollout, name)
        if given is None:
            given = [default] * n
        if len(given) != n:
            raise UserError(f"{name} has {len(given)} entries, the response has {n} tokens")
        given = [nan if x is None else x for x in given]
        return torch.tensor([0.0] * (len(ids) - n) + given, dtype=torch.float32)

    # a reward of the row is that of its last action
    rewards = column("rewards", 0.0)
    mask = column("response_mask", True) > 0
    if rollout.reward is not None:
        rewards[mask.nonzero()[-1:]] = rollout.reward

    return Batch(
        input_ids=torch.tensor(ids),
        cu_seqlens=cumulative([len(ids)]),
        response_mask=mask,
        row_id=torch.tensor([row_id]),
        truncated=torch.tensor([bool(rollout.truncated)]),
        token_level_rewards=rewards,
        values=column("values", 0.0) * mask,
        rollout_log_probs=column("log_probs", nan),
        truth=column("truth", nan),
        truth_noise=column("truth_noise", 0.0),
        multi_modal_inputs=[{"images": rollout.images}] if rollout.images else None,
    )


def row_as_read(ids, acts, tokenizer):
    """A row as a model reads it, with special tokens: '1+1=' -> 'add<eos>' <- '2' -> 'two<eos>'. An
    arrow to the right stands before actions, one to the left before what others say."""
    spans = []
    start = 0
    for acting, same in itertools.groupby(acts):
        end = start + len(list(same))
        span = ids[start:end]  # shown as they are without a tokenizer
        if tokenizer is not None:
            span = tokenizer.decode(span, clean_up_tokenization_spaces=False)
        text = repr(span)
        if len(text) > 200:
            text = f"{text[:100]}…{text[-100:]}"
        arrow = "->" if acting else "<-"
        spans += [arrow, text]
        start = end
    return " ".join(spans[1:])


# ---- Text in its place: token ids of prompts, chats and responses --------------------------------

HINT = "For the critic only: {}\n"  # what the critic reads before the prompt, with --privileged-key
ACTS = ("weight", "trainable", "loss")  # keys of a message that is no action if one is 0 or false
BEYOND_TEXT = ("tool_calls", "function_call", "reasoning", "reasoning_content", "thinking")
OPENS = r"<[\w:|]*think[\w:|]*>|\[THINK\]"
CLOSES = OPENS.replace("<", "</").replace(r"\[", r"\[/")
THOUGHT = re.compile(rf"((?:(?:{OPENS})\s*)?(?:{CLOSES})|{OPENS})(\s*)$", re.IGNORECASE)
NO_THOUGHT = re.compile(r"^<think>\n*</think>\n*")
DATED = "the chat template writes today's date, which --chat-template-kwargs may set"


def encode_behind(tokenizer, before, text):
    """Token ids of a text that follows the text `before`.

    Tokenizers of the SentencePiece kind put a blank before a text that stands alone. So it is
    encoded with the end of `before`, or with a letter where a token would reach over both, or where
    a special token would swallow its first blanks, as Phi-3's do."""
    found = []
    for anchor in (before[-100:], "\n", "a", "="):
        head = tokenizer.encode(anchor, add_special_tokens=False)
        whole = tokenizer.encode(anchor + text, add_special_tokens=False)
        if head and whole[: len(head)] == head:
            found.append(whole[len(head) :])
            if not text[:1].isspace() or decode(tokenizer, found[-1]).strip(" ") == text.strip(" "):
                return found[-1]
    return found[0] if found else tokenizer.encode(text, add_special_tokens=False)


def decode(tokenizer, ids):
    """The text of token ids, with special tokens and as it is."""
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def decode_behind(tokenizer, before, ids):
    """The text of token ids that follow the ids `before`: alone, the first blank may be missing."""
    head = decode(tokenizer, before[-16:])
    whole = decode(tokenizer, before[-16:] + ids)
    return whole[len(head) :] if whole.startswith(head) else decode(tokenizer, ids)


def texts_of(ids, first, decode):
    """[text of ids[:first], text of each token after it]: together they are the text of all ids.
    A character of several tokens belongs to its last one."""
    whole = decode(ids)
    ends = [0]  # where in `whole` each piece ends
    start = 0  # a text that is complete lies between these two tokens
    middle = 0
    told = 0  # characters from `start` on that are in a piece

    for t in range(first, len(ids) + 1):
        # decode some tokens together: alone they would lose blanks, and all of them take too long
        text = decode(ids[start:t])
        complete = text
        if t - max(first, middle) < 16:  # a longer sequence of such bytes is no text
            complete = text.rstrip("\ufffd")  # the end is only a part of a character
        ends.append(ends[-1] + max(0, len(complete) - told))
        told = max(told, len(complete))

        # go on from the middle as soon as there is something to see after it
        if complete == text and ends[-1] > ends[-2]:
            start = middle
            middle = t
            told = len(decode(ids[start:t]))

    ends[-1] = len(whole)
    return [whole[i:j] for i, j in itertools.pairwise(ends)]


@functools.cache
def begin_of(tokenizer):
    """Ids of the special tokens that the tokenizer puts before a text, such as BOS."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    places = range(len(whole) - len(plain) + 1)
    first = [n for n in places if whole[n : n + len(plain)] == plain]
    return whole[: first[0]] if first else []


def encode_prompt(tokenizer, text, hint="", is_chat=False):
    """Token ids of a prompt. A chat template has written its special tokens itself. The hint goes
    between the special tokens that begin a row and the rest."""
    begin = begin_of(tokenizer)
    bos = tokenizer.bos_token
    if hint:
        starts = ["".join(tokenizer.convert_ids_to_tokens(begin)), bos or "", ""]
        start = max(filter(text.startswith, starts), key=len)
        text = start + hint + text.removeprefix(start)

    # a text that brings its own beginning gets no second one; nothing is put behind it
    ids = tokenizer.encode(text, add_special_tokens=False)
    if is_chat or ids[: len(begin)] == begin or (bos and ids[:1] == [tokenizer.bos_token_id]):
        return ids
    return begin + ids


def hint_of(row, key):
    """What only the critic reads of a row, before the prompt: the text at this key of its JSON
    object, or "" without a key. UserError: there is no text."""
    if not key:
        return ""
    flag = "--privileged-key"
    hint = look_up(row, key, default=...)
    if hint is ...:
        raise UserError(f"no {key!r}, which {flag} names, among its keys {', '.join(row):.200}")
    if isinstance(hint, bool) or not isinstance(hint, str | int | float):
        raise UserError(f"{key} of {flag} must be text or a number, not {json.dumps(hint):.40}")
    return HINT.format(hint)


def hint_before_ids(tokenizer, ids, hint):
    """A prompt of token ids with the hint before it, but behind what begins a row, such as BOS."""
    begin = begin_of(tokenizer)
    n = len(begin) if ids[: len(begin)] == begin else 0
    if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]:
        n = max(n, 1)
    return ids[:n] + tokenizer.encode(hint, add_special_tokens=False) + ids[n:]


def turn_ends(tokenizer, model_config=None):
    """{id: text} of the tokens that end a turn: EOS of the tokenizer, and those that the configs of
    model and generation name. In a chat, the first one ends a turn."""
    if tokenizer is None:
        return {}
    configs = [model_config.get_text_config()] if model_config else []
    with suppress(Exception):  # there may be none
        if tokenizer.name_or_path:
            configs.append(transformers.GenerationConfig.from_pretrained(tokenizer.name_or_path))
    ids = [tokenizer.eos_token_id]
    for named in (config.eos_token_id for config in configs):
        named = named if isinstance(named, list) else [named]
        known = tokenizer.added_tokens_decoder
        ids += [i for i in named if i in known and known[i].special]

    # what the chat template puts behind an answer comes first if the model stops there
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "an answer"}]
    with suppress(Exception):  # there may be no template, or one of another kind
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        behind = text.rpartition("an answer")[2].lstrip()
        first = tokenizer.encode(behind, add_special_tokens=False)[0]
        if first in ids:
            ids.insert(0, first)
        elif tokenizer.added_tokens_decoder[first].special:
            ids.append(first)
    ids = [i for i in dict.fromkeys(ids) if i is not None]
    return dict(zip(ids, tokenizer.convert_ids_to_tokens(ids)))


def behind_thought(before, text):
    """(the text without a <think>, or a thought that is closed, that `before`, such as a generation
    prompt, ends with already; what the user should know, or "")."""
    thought = THOUGHT.search(before)
    if not thought:
        return text, ""
    words, blanks = thought.groups()
    if text.lstrip().startswith(words):
        rest = text.lstrip().removeprefix(words)
        return rest[len(os.path.commonprefix([blanks, rest])) :], ""
    if re.search(CLOSES, words + text, re.IGNORECASE):
        return text, ""
    return text, f"they neither begin nor end the {words} that their prompt ends with"


def writes_date(tokenizer):
    """Whether the chat template writes today's date, as those of Llama 3.2 and gpt-oss do."""
    return "strftime_now" in str(tokenizer.chat_template)


def segments_of_chat(rollout, tokenizer, ends, options, images=False, last_turn_only=False):
    """A chat with its answers as segments of an episode: [(its Rollout, the text of its prompt,
    [(a text behind it, whether the policy wrote it), ...]), ...].

    Each turn of the assistant in the completion is an action, unless its message says otherwise. It
    stands behind the prompt that the template makes of the messages before it. ends: see turn_ends.
    options: of the template. UserError: what the policy wrote is not known."""
    messages = text_messages(rollout.messages + rollout.completion, images)
    first = len(rollout.messages)
    turns = [n for n in range(first, len(messages)) if messages[n]["role"] == "assistant"]
    if not turns:
        raise UserError("completion: it has no message of the assistant")
    acting = [n for n in turns if all(messages[n].get(key) != 0 for key in ACTS)]
    turns = acting or turns[-1:]
    if last_turn_only:
        turns = turns[-1:]
    is_per_turn = len(rollout.rewards or []) == len(turns)

    # what the policy read before each turn; its end begins an answer, where a template has that
    through = lambda n: chat_text(tokenizer, messages[:n], complete=True, **options)
    prompts = [chat_text(tokenizer, messages[:n], begin=n > first, **options) for n in turns]
    header = THOUGHT.sub("", prompts[0].removeprefix(through(turns[0])))

    # a turn goes on in the row of the one before, or begins a new segment
    segments = []
    so_far = None
    for i, (n, prompt, following) in enumerate(zip(turns, prompts, [*prompts[1:], ""])):
        turn = turn_as_written(messages[n], n + 1, prompt, through(n + 1), following, header, ends)
        if rollout.truncated and n == turns[-1]:
            turn = functools.reduce(str.removesuffix, ends.values(), turn)
            if not (content_of(messages[n]).strip() or calls_of([messages[n]])):  # in its thought
                turn = turn.rpartition("</think>")[0].rstrip("\n") or turn

        between = read_since(so_far, prompt)
        if between is None:
            segment = rollout.model_copy(update={"rewards": []} if is_per_turn else {})
            spans = []
            segments.append((segment, prompt, spans))
        else:
            spans.append((between, False))
        spans.append((turn, bool(acting)))
        so_far = prompt + turn

        # its own share of what the chat has
        if is_per_turn:
            segment.rewards.append(rollout.rewards[i])
        if rollout.images:
            later = sum(map(images_in, messages[n:]))
            segment.images = rollout.images[: len(rollout.images) - later]

    # numbers for each token of the whole cannot be shared out
    if rollout.rewards and not is_per_turn and len(segments) > 1:
        has = f"rewards has {len(rollout.rewards)} entries"
        raise UserError(f"{has}, the chat has {len(turns)} turns that act")

    # only the last segment ends the episode
    for segment, *_ in segments[:-1]:
        segment.truncated = False
        segment.reward = None
    return segments


def read_since(so_far, prompt):
    """The one rule by which turns become rows: the text that the policy has read since its last
    turn, or None if its next turn is a new segment of the episode.

    so_far: the text of the row, all that the policy has read and written; None: there is no row.
    prompt: what the policy reads next, as the chat template writes the messages so far, with its
    generation prompt. The next turn goes on in the row if the prompt begins with the row's text,
    which it does not where a template drops earlier thoughts, for instance."""
    if so_far is None or not prompt.startswith(so_far):
        return None
    return prompt[len(so_far) :]


def turn_as_written(message, number, prompt, through, following, header, ends):
    """The text that the policy wrote behind a prompt, with the token that ends it if it is shown.

    message: of the assistant, the chat's number-th. prompt, through: the template's texts up to it
    and with it. following: the prompt of the next turn, or "". header: what begins an answer in the
    template, or "". ends: see turn_ends. UserError: the template leaves out what it wrote."""
    # what the template shows of it; gpt-oss's rewrites what was before, so there a header is found
    start = THOUGHT.sub("", prompt)
    shown = ""
    if through.startswith(start):
        shown = through.removeprefix(start)
    elif header and start.endswith(header):
        earlier, _, answer = through.rpartition(header)
        if earlier.endswith(start.removesuffix(header)[-16:]):  # it stands where the prompt ends
            shown = answer

    # the policy stops behind the first token that ends a turn
    content = content_of(message)
    end = min(filter(shown.__contains__, ends.values()), key=shown.index, default="")
    if end:
        shown = shown.partition(end)[0] + end
    elif content == content.rstrip():
        shown = shown.rstrip()
    lost = left_out(message, prompt.removeprefix(start) + shown)

    # the prompt may have begun a thought; Qwen3 shows an empty one in a last turn without
    shown, _ = behind_thought(prompt, shown)
    content, _ = behind_thought(prompt, content)
    if "<think>" not in content:
        shown = NO_THOUGHT.sub("", shown)

    # a text is known as it stands, unless the next prompt goes on from what is shown of all of it;
    # a template may close a thought in which the policy was cut off
    behind = None if lost else read_since(prompt + shown, following)
    is_text = not any(map(message.get, BEYOND_TEXT))
    is_cut = "<think>" in content_of(message) and "</think>" not in content_of(message)
    if is_text and (is_cut or behind is None and not (header and content in shown)):
        return content + end
    if lost:
        words = f"the chat template leaves out its {lost}; give response_ids"
        raise UserError(f"message {number}: {words}, or all that the policy wrote as its content")

    # in some templates the next role's token ends a turn
    if not end and behind:
        shown += next(filter(behind.startswith, ends.values()), "")
    return shown


def left_out(message, shown):
    """The key of what the policy wrote in a message and a text does not show, up to blanks, or
    ""."""
    parts = [("content", content_of(message))]
    parts += [(key, str(message.get(key) or "")) for key in BEYOND_TEXT[2:]]
    parts += [("tool_calls", call.get("name", "")) for call in calls_of([message])]
    shown = "".join(shown.split())
    for key, text in sorted(parts, key=lambda part: -len(part[1])):
        text = "".join(text.split())
        if text not in shown:
            return key
        shown = shown.replace(text, "", 1)
    return ""


def chat_text(tokenizer, messages, complete=False, begin=False, **options):
    """The text of text_messages in the tokenizer's chat template, with its special tokens.

    Unless `complete`, the assistant is next: it begins a new message, or, unless `begin`, continues
    its last one. options: tools, and more arguments of the template. UserError: it fails, or is
    absent."""
    flaw = "messages do not fit the tokenizer's chat template, or it has none"
    with blame(f"{flaw}; give another tokenizer"):
        if complete or begin or messages[-1]["role"] != "assistant":
            return from_template(tokenizer, messages, not complete, **options)

        # a template may trim the message that goes on, or leave out an empty one
        begin = from_template(tokenizer, messages[:-1], True, **options)
        content = content_of(messages[-1])
        if not content.strip() or content.lstrip().startswith("<think>"):
            return begin + behind_thought(begin, content)[0]
        text = from_template(tokenizer, messages, continue_final_message=True, **options)
        start = begin if text.startswith(begin) else ""
        rest = text.removeprefix(start)
        for kept in (content, content.rstrip(), content.strip()):
            if rest.endswith(kept):
                return start + rest.removesuffix(kept) + content
        raise ValueError("it changes the last message, which the response continues")


def from_template(tokenizer, messages, add_generation_prompt=False, **options):
    """The chat template's text of messages. Arguments of tool calls come as objects or as their
    JSON text, as in OpenAI's interface. Most templates want objects, some, as DeepSeek's, texts."""
    apply = partial(
        tokenizer.apply_chat_template,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **options,
    )
    if not calls_of(messages):
        return apply(messages)

    texts = partial(apply, with_arguments(messages, as_text=True))
    objects = with_arguments(messages)
    try:
        shown = apply(objects)
    except Exception:
        return texts()

    # an object that the template prints in Python's words was not expected
    words = [repr(call.get("arguments")) for call in calls_of(objects)]
    if any(word in shown for word in words):
        with suppress(Exception):
            other = texts()
            if any(shown.count(word) > other.count(word) for word in words if word[0] == "{"):
                return other

    # nor was a content that is null and printed as None
    if any(message.get("content", "") is None for message in messages):
        blank = [message | {"content": message.get("content") or ""} for message in messages]
        other = from_template(tokenizer, blank, add_generation_prompt, **options)
        if other.count("None") < shown.count("None"):
            return other
    return shown


def calls_of(messages):
    """The functions that messages call, as their dicts of name and arguments."""
    calls = []
    for message in messages:
        calls += message.get("tool_calls") or []
        calls += [message.get("function_call")]
    calls = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return [call for call in calls if isinstance(call, dict)]


def with_arguments(messages, as_text=False):
    """Copies of messages whose calls have their arguments as objects, or as JSON text. A text that
    is no object stays as it is."""
    messages = copy.deepcopy(messages)
    for call in calls_of(messages):
        made = call.get("arguments")
        if as_text and not isinstance(made, str | None):
            call["arguments"] = json.dumps(made, ensure_ascii=False)
        elif isinstance(made, str) and not as_text:
            with suppress(ValueError):
                made = json.loads(made)
            if isinstance(made, dict):
                call["arguments"] = made
    return messages


def text_messages(messages, images=False):
    """Chat messages with text as their content; parts of text are joined. Other keys that are null
    are dropped, as data sets fill them in. images: messages with parts of images stay as they are,
    and others next to them become lists of parts.

    UserError: a message has something else."""
    ours = []
    for number, message in enumerate(messages, 1):
        # chat templates read these two, and print nothing for what is missing
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"message {number}: must be an object with a role and content")
        message = without_nulls(message)
        content = message.get("content")
        words = ""

        # parts, as from OpenAI's interface
        if isinstance(content, list):
            texts = [text_of(part) for part in content]
            others = [part for part, text in zip(content, texts) if text is None]
            if not (images and others and all(map(is_image, others))):
                message["content"] = "".join(filter(None, texts))
                if others or not content:
                    not_text = json.dumps(others or content)
                    words = f"its content has parts that are not text: {not_text:.60}"
        elif content is None and not message.get("tool_calls"):
            words = "needs content; only one with tool_calls may lack it"
        elif not isinstance(content, str | None):
            words = f"its content must be text, not {json.dumps(content):.40}"
        if words:
            raise UserError(f"message {number}: {words}")
        ours.append(message)

    # templates that show images go through parts, and some leave out a text that comes without
    if any(isinstance(message.get("content"), list) for message in ours):
        for message in ours:
            text = message.get("content")
            if isinstance(text, str):
                message["content"] = [{"type": "text", "text": text}]
    return ours


def without_nulls(x):
    """A message without keys that are null, at any depth. Content may be null, which some templates
    ask for next to calls; an argument that is null is an argument."""
    if isinstance(x, list):
        return list(map(without_nulls, x))
    if not isinstance(x, dict):
        return x
    kept = {}
    for key, y in x.items():
        if key == "content" or y is not None and (key, y) != ("tool_calls", []):
            kept[key] = y if key == "arguments" else without_nulls(y)
    return kept


def content_of(message):
    """The text of a message's content, which may have parts."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(filter(None, map(text_of, content)))
    return content


def images_in(message):
    """The number of images in a message."""
    content = message.get("content")
    return sum(map(is_image, content)) if isinstance(content, list) else 0


def text_of(part):
    """The text of a part of a message's content, or None if it is something else."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    return None


def is_image(part):
    """Whether a part of a message's content stands for an image, which templates can show. OpenAI's
    kind names it; the key images, and not the part, says which file it is."""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


# ---- Files of rows: JSONL as it is, all else by `datasets`, other keys by a user's function ------

PACKED = (".gz", ".zst", ".bz2")  # JSONL in these
NUMBERED = re.compile(r"(\d+)\.jsonl(\.gz|\.zst|\.bz2)?$")
TABLES = (".parquet", ".arrow", ".csv")
HUB_NAME = re.compile(r"(?!.*\.(json|jsonl|gz|zst|bz2)$)[\w-]+/[\w.-]+")


def raw_rows(source, flag, convert=None, keys=None):
    """Yields (place, folder, row) for each row of files, or of a list of JSON lines: FILE:LINE for
    messages, the folder that the row's images are relative to, and an object as --rows makes it.

    source: the name of a file, a tuple of them, or lines. flag: what to call it. convert: the
    FILE.py:FUNCTION of --rows. keys: of answers_of, if rows may have several. UserError names the
    line."""
    for name, folder, lines in files_of(source, flag):
        # a fault is named by the line, counted from 1
        for number, line in enumerate(progress(lines, "rows", "lines"), 1):
            place = f"{name}:{number}"
            try:
                rows = rows_of_line(line, convert) if line.strip() else []
                if keys is not None:
                    rows = [one for row in rows for one in answers_of(row, keys, place)]
            except UserError as fault:
                raise UserError(f"{place}: {fault}") from None
            for row in rows:
                yield place, folder, row


def files_of(source, flag):
    """Yields (name for messages, folder, lines) for each file of a source, see raw_rows. A folder
    of JSONL that is numbered, such as a run's dumps, stands for its files, 2 before 10."""
    if not isinstance(source, str | tuple):
        yield "toy" if flag == "--rollouts" else flag, "", source
        return
    for path in [source] if isinstance(source, str) else source:
        numbered = []  # (number, name)
        other = ""
        for file in map(str, Path(path).glob("*.jsonl*")):
            number = NUMBERED.search(file)
            if number:
                numbered.append((int(number[1]), file))
            else:
                other = file
        if numbered and other:
            print0(f"note       {flag}: {other} is left out, because others have a number")
        for _, file in sorted(numbered) or [(0, path)]:
            yield f"{flag} {file}", dirname(file), read_file(file, flag)


def rows_of_line(line, convert=None):
    """The objects of a JSON line: itself, or what the FILE.py:FUNCTION of --rows makes of it, which
    is a row or a list of rows. UserError: something is no object."""
    try:
        rows = [from_json(line)]
    except ValueError as error:
        fault = str(error).replace("at line 1 column", "at character")
        raise UserError(f"is not JSON: {fault}") from None

    # what a function makes, as it would stand in a file
    words = ""
    if convert:
        words = f"--rows {convert}: a row "
        with blame(f"--rows {convert}"):
            made = json.loads(json.dumps(import_function("--rows", convert)(*rows)))
            rows = made if isinstance(made, list) else [made]
    for row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{words}must be an object, not {json.dumps(row):.40}")
    return rows


def read_file(path, flag):
    """The lines of a file of JSON, as UTF-8 bytes; it may be packed, or one array. Tables, other
    folders and names on the hub become such lines. UserError: it cannot be read."""
    with blame(f"{flag} {path}"):
        is_pipe = exists(path) and not isfile(path) and not isdir(path)
        if is_pipe and (WORLD_SIZE > 1 or flag == "--score"):
            raise ValueError("several ranks, and --score, can read only a file, not a pipe")

        name, *parts = [path] if exists(path) else path.split(":")
        is_on_hub = not exists(name) and HUB_NAME.fullmatch(name)
        if isdir(name) or is_on_hub or name.endswith(TABLES):
            return lines_of_dataset(name, *parts)
        if path.endswith(PACKED):
            import pyarrow

            text = pyarrow.input_stream(path).read()
        else:
            text = Path(path).read_bytes()

        # a byte order mark begins a file, or a line where files were joined
        text = text.removeprefix(codecs.BOM_UTF8)
        if text.lstrip().startswith(b"["):
            return list(map(json.dumps, json.loads(text)))
        return [line.removeprefix(codecs.BOM_UTF8) for line in text.splitlines()]


def lines_of_dataset(name, *parts):
    """The rows of a table, a folder, or a data set on the hub as JSON lines.

    parts: (split,) or (configuration, split). ValueError: it has other splits, or several."""
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(50)  # critical: what it raises is said once

    # of what is here already, nothing is copied to a cache
    if name.endswith(TABLES):
        data = datasets.load_dataset(Path(name).suffix[1:], data_files=name, streaming=True)
    elif exists(f"{name}/state.json") or exists(f"{name}/dataset_dict.json"):
        data = datasets.load_from_disk(name)
    else:
        data = datasets.load_dataset(name, *parts[:-1], streaming=isdir(name))

    if not isinstance(data, dict):
        data = {"train": data}
    split, *more = parts[-1:] or data
    if more or split not in data:
        words = f"it has the splits {', '.join(data)}; give one, as in {name}:{next(iter(data))}"
        raise ValueError(words)
    rows = data[split]
    if isinstance(rows, datasets.Dataset):
        rows = rows.to_iterable_dataset()
    if rows.features:  # CSV has none
        rows = rows.decode(False)  # images stay files, and JSON stays text
    return [json.dumps(plain(row, rows.features), default=str) for row in rows]


def plain(x, feature):
    """What a table holds -> the same as a JSON line would have it. Keys that are null are left out,
    because a table fills in those that other rows have; JSON text may have some. feature: its type,
    of `datasets`."""
    if x is None:
        return None
    if type(feature).__name__ == "Json":
        return json.loads(x)
    if isinstance(x, bytes):
        return x.decode()
    if isinstance(x, list):
        return [plain(y, getattr(feature, "feature", None)) for y in x]

    # an image is a file or a data URL
    if isinstance(x, dict) and x.keys() == {"bytes", "path"}:
        data = x["bytes"]
        return f"data:image/png;base64,{base64.b64encode(data).decode()}" if data else x["path"]
    if isinstance(feature, dict):
        return {key: plain(y, feature[key]) for key, y in x.items() if y is not None}
    return x


# ---- Processes and ranks: how they start, fail, stop and end -------------------------------------
# A script calls launch(main) last of all, and main calls setup_distributed. On the way a mistake of
# the user is a UserError, of one line; Ctrl-C and its like are noted in Stop for the loop to see.

# torch 2.14 gave it this name, and warns about the one before
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout

# as libraries say it
OUT_OF_MEMORY = "MemoryError|can't allocate memory|out of memory|ALLOC_FAILED"
LOST_RANK = "Timed out|(closed|reset) by peer|Broken pipe|likely closed|remote process"
HINTS = {  # pattern in a traceback -> advice
    OUT_OF_MEMORY: "out of memory; --resume auto continues with half the token budgets",
    "No space left": "the disk is full (No space left on device); make room and use --resume auto",
    LOST_RANK: "another rank died or hangs",
}


@contextmanager
def blame(words):
    """Turns an exception in its block into a UserError that begins with `words`, which name the
    flag. A UserError that names its flag already, and a lack of device memory, stay as they are."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # libraries raise a dozen types
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if isinstance(error, UserError) and str(error).startswith("--"):
            raise
        if isinstance(error, CheckpointException):  # a BaseException that holds one error per rank
            error, _ = next(iter(error.failures.values()))
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{words} ({kind}{' '.join(str(error).split()):.300})") from None


def json_object(flag, text):
    """The dict of a flag's JSON text. UserError: it is something else."""
    with blame(f"{flag} {text}: must be a JSON object"):
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__}")
    return found


def setup_distributed(timeout_minutes=30.0):
    """Joins the process group -> this rank's torch.device. A collective that takes longer ends the
    run. UserError: this machine's devices do not fit."""
    # each rank of a node has a GPU of its own
    check_default_dtype()
    device = torch.device("cpu")
    backend = "gloo"
    if torch.accelerator.is_available() and sys.platform != "darwin":  # do not use a Mac's GPU
        device = torch.device("cuda", LOCAL_RANK)
        backend = "cpu:gloo,cuda:nccl"
        with blame(f"--nproc-per-node: this machine has {torch.cuda.device_count()} CUDA devices"):
            torch.cuda.set_device(device)

    # all ranks meet
    if not dist.is_initialized():
        timeout = timedelta(minutes=timeout_minutes)
        store = dist.HashStore()  # for a world of one
        if WORLD_SIZE > 1:
            store, *_ = next(dist.rendezvous("env://", timeout=timeout))

        # torchrun's own store survives a restart, so each start uses fresh keys
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=RANK, world_size=WORLD_SIZE
        )
    return device


def compute_dtype(name, device):
    """Name -> torch.dtype; auto is float32 on CPU, else bfloat16."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


class Stop:
    """Whether one of SIGNALS has told this run to save its state and to end."""

    signal = 0  # its number if the loop is to stop, else 0
    first = 0  # the first one since listen, or 0
    time = 0.0  # when it came
    handlers = {}  # signal -> what handled it before


# Ctrl-C, the end of a job, a closed terminal, and what Slurm is asked to send before a time limit
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def listen():
    """From here on SIGNALS are noted in Stop, for a loop that can save its state. A second Ctrl-C
    does what the first one did before."""
    Stop.signal = 0
    Stop.first = 0
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # by nohup
            Stop.handlers.setdefault(number, signal.signal(number, heard))


def listen_no_more():
    """Undoes listen, if it was called: there is nothing left to save."""
    for number, handler in Stop.handlers.items():
        signal.signal(number, handler)
    Stop.handlers.clear()


def heard(number, frame):
    """Handles a signal of listen."""
    # a second one counts if it is Ctrl-C, or comes after one. torchrun passes Ctrl-C on to ranks
    # that may have it already, and a second one as SIGTERM; a scheduler may repeat SIGTERM
    again = Stop.first and perf_counter() - Stop.time > 1
    if again and signal.SIGINT in (number, Stop.first):
        Stop.handlers[signal.SIGINT](number, frame)
    if Stop.first:
        return

    told(number)
    if number == signal.SIGINT:
        second = "Ctrl-C again ends it at once"
        say(1, f"the run saves its state and ends within a step; {second}")


def told(number):
    """Notes in Stop that this rank, or another one, has received the signal."""
    if not Stop.first:
        Stop.time = perf_counter()  # before `first`, because a signal may come in between
        Stop.first = number
        Stop.signal = number


def interrupted(*_):
    """Ends the process with one line: Ctrl-C (SIGINT) finds nothing to save, or comes again."""
    say(2, "ended at once")
    os._exit(128 + signal.SIGINT)


def say(stream, words):
    """Writes a line about Ctrl-C from its handler, where print could be within a print. stream: 1
    for standard output, 2 for standard error."""
    start = "\n" if os.isatty(stream) else ""  # after ^C, or a bar
    with suppress(OSError):
        if RANK == 0:
            os.write(stream, f"{start}Ctrl-C     {words}\n".encode())


AT_EXIT = []  # what launch calls at the very end


def launch(main):
    """Runs main(), then exits: with 0, with 2 and one line on a UserError, else with 1 and a
    traceback."""
    signal.signal(signal.SIGINT, interrupted)
    gc.freeze()  # what the imports have made stays: a full collection need not look at it, 0.2 s

    # else ranks outlive a killed torchrun
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    # a terminal may lack the letters of a user's rows
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")

    # a mistake of the user is one line, anything else a traceback
    code = 1
    message = ""
    label = f"error on rank {RANK}" if RANK else "error"
    try:
        main()
        if dist.is_initialized():
            dist.barrier()
        code = 0
    except UserError as error:
        code = 2
        said = "\\n".join(str(error).splitlines())  # a flag or a variable may hold several lines
        message = f"{label}: {said}\n"
    except ValidationError as error:  # a flag of a Config that Python has made
        code = 2
        message = f"{label}: {' '.join(str(error).split())}\n"
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        message = traceback.format_exc()
        for pattern, hint in HINTS.items():
            if re.search(pattern, message):
                message += f"{label}: {hint}\n"

    # if rank 0 fails too, torchrun ends this process before it prints the same
    if code and RANK:
        sleep(5 if message else 1)
    with suppress(OSError):  # the streams may be files on a full disk
        sys.stdout.flush()
        sys.stderr.write(legible(message))
        sys.stderr.flush()
    for call in AT_EXIT:
        call()
    os._exit(code)  # gloo's threads outlive destroy_process_group and abort about one exit in six


# ---- Logs: what the user sees, and what a run leaves ---------------------------------------------
# Logger is for the loops of all three scripts; progress and progress_of are for any work that takes
# longer than a few seconds. A JSONL file of ours is replaced whole, and read as far as it goes.


class Logger:
    """Writes metrics.jsonl, TensorBoard and run.json in out_dir, and prints on rank 0.

    settings: what run.json says of the run. If `folder`, where the run starts, is a checkpoint in
    out_dir, the files continue, without entries after first_step. logger: FILE.py:FUNCTION of the
    user, which is called with each line of metrics.jsonl."""

    def __init__(self, out_dir, settings, first_step, folder, logger=None):
        self.out_dir = out_dir
        is_own = folder and dirname(folder) == realpath(f"{out_dir}/checkpoints")
        last_step = first_step if is_own else 0
        self.began = perf_counter()
        self.start = self.began  # of the steps of which the time left is told
        self.updates = 0  # since the start
        self.skipped = 0  # updates in a row, up to the last one
        if RANK:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.call = None
        if logger:
            self.call = import_function("--logger", logger)
            AT_EXIT.append(atexit._run_exitfuncs)  # loggers may send their last lines there

        # what belongs to the steps before
        self.set_aside(last_step)
        date = datetime.now().isoformat(" ", "seconds")
        settings["run"] = {"command": sys.argv, "ranks": WORLD_SIZE, "date": date}
        replace_lines(f"{out_dir}/run.json", [settings])
        log = f"{out_dir}/metrics.jsonl"
        replace_lines(log, [row for row in read_lines(log) if happened(row, last_step)])
        self.file = open(log, "a", buffering=1)
        self.board = SummaryWriter(f"{out_dir}/tensorboard", purge_step=last_step + 1)

    def set_aside(self, last_step):
        """Renames what another run saved after last_step, so that --resume auto does not find it,
        and removes what a killed run left unfinished."""
        later = []
        for folder in (f"{self.out_dir}/checkpoints", f"{self.out_dir}/rollouts"):
            later += [path for step, path in steps_in(folder) if step > last_step]
            for path in (*Path(folder).glob("*.tmp"), *Path(folder).glob("*.gone")):
                if path.is_dir():
                    rmtree(path)
                else:
                    path.unlink()

        # a run that starts anew has curves of its own
        if not last_step:
            curves = (f"{self.out_dir}/metrics.jsonl", f"{self.out_dir}/tensorboard")
            later += filter(exists, curves)
        if not later:
            return

        # all get the first number that is free; their names are on the disk before the log is cut
        number = 1
        while any(exists(f"{path}.old{number}") for path in later):
            number += 1
        for path in later:
            os.rename(path, f"{path}.old{number}")
            flush_to_disk(dirname(path))
        print0(f"set aside  what another run left in {self.out_dir}, as *.old{number}")

    def profiled(self, steps, chosen):
        """Yields the steps; rank 0 records step `chosen`, if any, with torch.profiler."""
        for step in steps:
            if RANK or step + 1 != chosen:
                yield step
                continue
            os.makedirs(f"{self.out_dir}/profile", exist_ok=True)
            with torch.profiler.profile(record_shapes=True, profile_memory=True) as trace:
                yield step
            trace.export_chrome_trace(f"{self.out_dir}/profile/step_{step + 1}.json.gz")

    def check_progress(self, metrics, lr="--lr"):
        """UserError if values are not finite, or if the gradients of ten updates in a row are not.
        lr: the flag to name."""
        if "critic/values_mean" not in metrics:  # no row had an action
            return
        if not isfinite(metrics["critic/values_mean"]):
            fix = f"take an earlier checkpoint and a lower {lr}"
            raise UserError(f"the critic's values are not finite: {fix}")
        self.skipped = self.skipped + 1 if isnan(metrics["critic/grad_norm"]) else 0
        if self.skipped == 10:
            fault = "gradients are not finite"
            raise UserError(f"10 updates in a row were skipped: {fault}; use a lower {lr}")

    def log(self, step, metrics):
        """Metrics: name -> number; logs null if it is not finite. A line also tells when it was
        made, which TensorBoard's entries always do."""
        if RANK:
            return
        metrics = {name: float(x) if isfinite(x) else None for name, x in metrics.items()}
        clock = {"perf/unix_time": time(), "perf/run_time": perf_counter() - self.began}
        row = {"step": step, **metrics, **clock}
        self.file.write(json.dumps(row) + "\n")
        for name, x in metrics.items():
            if x is not None:
                self.board.add_scalar(name, x, step)
        self.board.flush()  # otherwise it buffers for two minutes
        if self.call:
            try:
                self.call(row)
            except Exception as error:  # it must not cost the run, which may have days behind it
                print0(f"--logger   failed: {error!r:.200}")

    def flush(self):
        """Returns once all that was logged is on the disk: a run that continues from a checkpoint
        logs only what comes after it."""
        if RANK:
            return
        os.fsync(self.file.fileno())
        board = Path(f"{self.out_dir}/tensorboard")
        for path in (*board.iterdir(), board, self.out_dir):
            flush_to_disk(path)

    def log_update(self, step, steps, m):
        """Logs an update of the critic and prints one aligned line. m: its metrics."""
        self.updates += 1
        m["perf/time_step"] = (perf_counter() - self.start) / self.updates
        self.log(step, m)
        left = time_left(m["perf/time_step"], steps - step)
        mfu = number(100 * m["perf/mfu"], ".1f")
        print0(
            f"step {step:>{len(str(steps))}}/{steps}  loss {number(m['critic/vf_loss'], '.4f')}"
            f"  explained var {explained_number(m['critic/explained_var']):>6}"
            f"  |g| {number(m['critic/grad_norm'], '.3g'):>7}"
            f"  lr {number(m['critic/lr'], '.1e')}"
            f"  {m['perf/tokens_per_second']:>7,.0f} tok/s  mfu {mfu} %"
            f"  {number(m['perf/peak_memory_gib'], '.1f')} GiB  eta {left}"
            f"  skipped {m['critic/skipped_steps']:.0f}"
        )

    def log_evaluation(self, step, rows, gamma):
        """Evaluates rows with values, logs and prints the result."""
        if RANK:
            return
        m = evaluate(rows, gamma)
        self.log(step, m)
        if not self.updates:  # the time left is that of updates, with the evaluations among them
            self.start = perf_counter()
        print0(
            f"held out   explained var {explained_number(m['eval/explained_var'])}"
            f"   loss {m['eval/vf_loss']:.4f} (best constant {m['eval/constant_loss']:.4f})"
            f"   AUC of the last value {number(m['eval/auc'], '.3f')}"
        )

        # of rows that have more to compare with
        if not isnan(m["eval/best_of_n"]):
            print0(
                f"  best of n {number(m['eval/best_of_n'], '.3f')},"
                f" mean {number(m['eval/mean_of_n'], '.3f')},"
                f" oracle {number(m['eval/oracle_of_n'], '.3f')},"
                f" of {m['eval/prompts_of_n']:,} prompts"
            )
        if "eval/knowable" in m:
            print0(
                f"  knows {explained_number(m['eval/truth_explained_var'])} of what can be known"
                f" ({number(m['eval/knowable'], '.3f')} of returns), flatness"
                f" {number(m['eval/flatness'], '.3f')} (0 is flat, 1 is right)"
            )


@functools.cache
def import_function(flag, name):
    """FUNCTION of FILE.py, a user's file that runs in this process, next to its neighbours.
    UserError: the file or the name is wrong."""
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        raise UserError(f"{flag} {name}: must be FILE.py:FUNCTION")
    sys.path.insert(0, dirname(realpath(path)))
    with blame(f"{flag} {name}"):
        return runpy.run_path(path)[function]


def time_left(seconds, steps):
    """How long this many steps take, as a timedelta. seconds: of one step."""
    return timedelta(seconds=round(min(seconds * steps, 1e12)))  # it has an upper bound


def number(x, form):
    """X in the given format, or -- for NaN; what rounds to 0 has no sign."""
    return "--" if isnan(x) else format(x, f"z{form}")


def explained_number(x, form=".3f"):
    """An explained variance; all that are far below 0 say the same."""
    return "< -99" if x < -99 else number(x, form)


def happened(row, last_step):
    """Whether a row of metrics.jsonl is from before a run that goes on after last_step: an
    evaluation at this step will be made again, but its update will not."""
    step = row.get("step", inf)
    is_update = "perf/time_step" in row
    return step < last_step or (step == last_step and is_update)


def read_lines(path):
    """The rows of our JSONL file, up to a line that a crash cut short; [] without a file."""
    rows = []
    with suppress(OSError, ValueError), open(path) as file:
        rows += map(json.loads, file)  # rows before a bad line are kept
    return rows


def as_json(state, indent=None):
    """The JSON text of plain data. It has no NaN and no infinity: they are null."""
    plain = to_jsonable_python(state, inf_nan_mode="null", fallback=str)
    return json.dumps(plain, allow_nan=False, indent=indent)


def replace_lines(path, rows):
    """Replaces a JSONL file, which is on the disk then; a crash leaves the old or the new one,
    whole."""
    make_folder(dirname(path))
    with open(f"{path}.tmp", "w") as file:
        file.writelines(f"{as_json(row)}\n" for row in rows)  # `rows` may be made one at a time
    flush_to_disk(f"{path}.tmp")
    os.replace(f"{path}.tmp", path)
    flush_to_disk(dirname(path))


def write_json(path, state):
    """Writes a JSON file on rank 0."""
    if RANK == 0:
        Path(path).write_text(as_json(state, indent=1))


def progress_of(total, what, unit):
    """-> done(n), to be called after n of `total` units of work, or a fraction of one.

    In a terminal rank 0 shows a bar if the work takes longer than three seconds, until the caller
    drops `done`."""
    off = True if RANK else None  # None: on in a terminal
    bar = tqdm(total=total, desc=what, unit=f" {unit}", delay=3, leave=False, disable=off)
    finished = 0.0

    def done(n=1):
        nonlocal finished
        finished += n
        bar.update(round(finished) - bar.n)

    return done


def progress(items, what, unit):
    """Yields the items, and shows how far they are; see progress_of."""
    items = list(items)
    done = progress_of(len(items), what, unit)
    for item in items:
        yield item
        done()


# ---- Folders that are complete or absent ---------------------------------------------------------
# Checkpoints and exports are written under another name, checked, flushed and renamed. claim makes
# the run's folder, which all ranks must see and no other run may use.

MANIFEST = "manifest.json"  # in a complete folder: file name -> SHA-256


@contextmanager
def published(folder, group=None, keep=None):
    """`with published(folder) as tmp:` all ranks write into tmp, which becomes the folder; a crash
    leaves the old or the new one complete (a collective of `group`). keep: how many of the last
    step_N stay.

    UserError: the folder holds something else, or a rank does not see the files of all."""
    if torch.cuda.is_available():
        torch.cuda.set_device(LOCAL_RANK)  # a new thread starts on device 0
    if exists(folder) and os.listdir(folder) and not exists(f"{folder}/{MANIFEST}"):
        fix = "which we do not overwrite; move it"
        raise UserError(f"--out-dir: {folder} holds something else, {fix}")

    # an empty folder next to it
    folder = realpath(folder)  # without a slash at its end, and where a link leads
    tmp = f"{folder}.tmp"
    if RANK == 0:
        rmtree(tmp, ignore_errors=True)
        make_folder(dirname(tmp))
        os.mkdir(tmp)
    dist.barrier(group)

    yield tmp

    # once all have written, it takes the folder's name
    dist.barrier(group)
    sums = checksums_of_all_ranks(tmp, group)
    if RANK == 0:
        write_json(f"{tmp}/{MANIFEST}", sums)

        # the umask decides who may read: safetensors, unlike the manifest, keeps others out
        mode = os.stat(f"{tmp}/{MANIFEST}").st_mode
        for name in sums:
            with suppress(PermissionError):  # some file systems have no modes
                os.chmod(f"{tmp}/{name}", mode)

        for path in (*Path(tmp).rglob("*"), tmp):
            flush_to_disk(path)
        swap(tmp, folder)

        if keep:
            for _, path in steps_in(dirname(folder))[keep:]:
                remove(path)
    dist.barrier(group)


def checksums_of_all_ranks(tmp, group):
    """File name -> checksum of all files that any rank has written into tmp (a collective).
    UserError: a rank does not see one of them, or cannot read it."""
    found = {str(path.relative_to(tmp)) for path in Path(tmp).rglob("*") if path.is_file()}
    names = sorted(set().union(*of_all_ranks(found, group)))

    # each rank reads its share of the files
    sums = {name: checksum(f"{tmp}/{name}") for name in names[RANK::WORLD_SIZE]}
    is_blind = None in sums.values() or not all(exists(f"{tmp}/{name}") for name in names)
    blind = of_all_ranks(is_blind, group)
    if any(blind):
        raise UserError(
            f"--out-dir: rank {blind.index(True)} does not see all of {tmp}; use shared storage"
        )
    return dict(collections.ChainMap(*of_all_ranks(sums, group)))


FILE_BYTES = 2**27  # of a file that write_tensors writes; one that holds a large tensor has more


def write_tensors(folder, tensors, group=None):
    """Writes a flat dict of tensors as safetensors, each rank its shards (a collective of `group`).

    The writer copies a file to the host and serializes it before it writes: several small files
    take little memory, where one would take another two or three copies of a rank's shard."""
    files = {}  # name -> number of the file
    size = 0
    for name, x in tensors.items():
        size += getattr(x, "_local_tensor", x).nbytes  # this rank's part
        files[name] = 1 + size // FILE_BYTES

    writer = HuggingFaceStorageWriter(folder, files, save_distributed=True)
    dcp.save(tensors, storage_writer=writer, process_group=group)


def swap(tmp, folder):
    """Gives tmp the folder's name. Between the two renames the old folder is complete as .was."""
    if exists(folder):
        remove(f"{folder}.was")
        os.rename(folder, f"{folder}.was")
    os.rename(tmp, folder)
    flush_to_disk(dirname(folder))
    remove(f"{folder}.was")


def remove(folder):
    """Deletes a folder, if it exists; a crash never leaves half of it under its name."""
    if isdir(folder):
        rmtree(f"{folder}.gone", ignore_errors=True)  # a leftover of a crash
        os.rename(folder, f"{folder}.gone")
        flush_to_disk(dirname(folder))  # else files may be gone before the name is
        rmtree(f"{folder}.gone", ignore_errors=True)


def checksum(path):
    """SHA-256 of a file, or None if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path):
    """Returns once a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path):
    """Makes a folder and those above it, if they are not there. Their names are on the disk."""
    if isdir(path):
        return
    above = dirname(realpath(path))
    make_folder(above)
    os.makedirs(path, exist_ok=True)
    with suppress(PermissionError):  # a folder of others, which may be written but not read
        flush_to_disk(above)


def verify(folder):
    """UserError on all ranks unless a published folder, or a file in one, is intact. It is a
    collective."""
    root = folder if exists(f"{folder}/{MANIFEST}") else dirname(folder)
    manifests = of_all_ranks(checksum(f"{root}/{MANIFEST}"))
    with blame(f"--resume {folder}: no complete checkpoint here, no readable {MANIFEST}"):
        sums = dict(json.loads(Path(root, MANIFEST).read_text()))
        names = [name for name in sums if f"{root}/{name}".startswith(str(folder))]
        if not names or len(set(manifests)) > 1:
            raise ValueError("it names none of these files, or differs between ranks")

    # each rank reads its share of the files
    damaged = [name for name in names[RANK::WORLD_SIZE] if checksum(f"{root}/{name}") != sums[name]]
    damaged = list(itertools.chain(*of_all_ranks(damaged)))
    if damaged:
        fault = f"damaged, {damaged[0]} is missing or changed; use an earlier one"
        raise UserError(f"--resume {folder}: {fault}")


def claim(out_dir):
    """Creates out_dir and locks it -> the lock, an open file that the caller keeps, or None (a
    collective). UserError: out_dir cannot be written, or is in use, or hosts do not share it."""
    # rank 0 tells the others what went wrong
    lock = None
    fault = ""
    probe = f"{out_dir}/checkpoints/{time_ns()}.tmp"
    if RANK == 0:
        try:
            with blame(f"--out-dir {out_dir}: cannot be written"):
                make_folder(f"{out_dir}/checkpoints")
                lock = locked(out_dir)
                os.mkdir(probe)
        except UserError as error:
            fault = str(error)
    fault, probe = of_all_ranks((fault, probe))[0]
    if fault:
        raise UserError(fault)

    # all write into a folder that rank 0 has just made; network file systems may show it late
    for _ in range(300):
        if not exists(probe):
            sleep(0.1)
    try:
        os.mkdir(f"{probe}/{RANK}")
    except OSError as error:
        fault = f"host {os.uname().nodename} cannot write there ({error.strerror})"
    fault = max(of_all_ranks(fault))
    if RANK == 0:
        rmtree(probe, ignore_errors=True)
    if fault:
        raise UserError(f"--out-dir {out_dir}: {fault}; use storage that all hosts share")
    return lock


def locked(out_dir):
    """The open file out_dir/.lock with an exclusive lock, which ends with this process, even if it
    is killed. None, with a line, where the file system has no locks.

    UserError: another run has it."""
    file = open(f"{out_dir}/.lock", "a+")

    # try for five seconds: the ranks of a run that was just killed may still be ending
    for attempt in range(50):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if attempt < 49:
                sleep(0.1)
                continue
            file.seek(0)
            owner = file.read(200) or "another process"
            fault = f"another run, {owner}, is writing there; give another folder or end it"
            raise UserError(f"--out-dir {out_dir}: {fault}") from None
        except OSError as error:
            print0(f"lock       none in {out_dir} ({error.strerror}), so start no second run there")
            return None

    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file


def steps_in(folder):
    """[(step, path)] of each step_N and step_N.jsonl in a folder, latest first."""
    paths = Path(folder).glob("step_*")
    found = [re.fullmatch(r"step_(\d+)(\.jsonl)?", path.name) for path in paths]
    steps = [(int(match[1]), f"{folder}/{match[0]}") for match in found if match]
    return sorted(steps, reverse=True)


# ---- Checkpoints: when a run saves, what it keeps, where it continues ----------------------------
# What a checkpoint holds is the business of a worker; see its checkpoint_writer.


class Checkpoints:
    """The checkpoints of a run, as a context manager around it: when to save, what to keep, where
    to continue. The arguments are flags of the run, and timeout_minutes is the critic's.

    folder: the one to continue from, if any. every: steps between saves, or 0. halvings: how often
    the run has run out of memory; --resume auto halves the token budgets for each."""

    def __init__(
        self,
        out_dir,
        resume=None,
        eval_every=0,
        save_every=None,
        keep=None,
        async_save=False,
        timeout_minutes=30.0,
    ):
        self.out_dir = out_dir
        self.at_evaluations = save_every is None
        self.every = eval_every if save_every is None else save_every
        self.keep = keep
        self.newest = None  # the folder of this run's last checkpoint
        self.background = ThreadPoolExecutor(1) if async_save else None
        self.saving = None  # the Future of a save in the background
        timeout = timedelta(minutes=timeout_minutes)
        self.group = dist.new_group(backend="gloo", timeout=timeout)  # a thread needs its own
        self.lock = claim(out_dir)  # the run holds it until it ends, even by a kill

        self.out_of_memory = Path(out_dir, "out_of_memory")  # holds how often
        self.halvings = 0
        self.folder = resume and realpath(resume)
        if resume == "auto":
            self.find_newest()
        elif RANK == 0:
            self.out_of_memory.unlink(missing_ok=True)  # a new run may have other flags

    def find_newest(self):
        """Sets `folder` to the newest undamaged checkpoint, and `halvings` (a collective)."""
        halvings = 0
        with suppress(OSError, ValueError):
            halvings = int(self.out_of_memory.read_text())
        steps = steps_in(f"{self.out_dir}/checkpoints")

        # network file systems may show ranks different files: what rank 0 sees counts
        found, self.halvings = of_all_ranks((steps, halvings))[0]
        self.folder = None
        for _, path in found:
            try:
                verify(path)
                self.folder = realpath(path)
                return
            except UserError as error:
                print0(f"resume     auto passes over {str(error).removeprefix('--resume ')}")
        words = f"no checkpoint to continue from in {self.out_dir}; starting anew"
        print0(f"resume     auto: {words}")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """Records that memory ran out; after an error, waits a minute for a save in progress."""
        listen_no_more()
        with suppress(Exception):
            if re.search(OUT_OF_MEMORY, repr(error)) and not isinstance(error, UserError):
                self.out_of_memory.write_text(f"{self.halvings + 1}")
        if self.saving:
            with suppress(Exception):
                self.saving.result(timeout=60)
        if self.lock:
            self.lock.close()

    def begin(self):
        """Prints what the loop will save, and lets SIGNALS end it after a step."""
        keep = self.keep
        when = f"every {self.every} steps"
        if self.at_evaluations:
            keep = self.keep or 1
            when = "at each evaluation"

        if not self.every:
            when = "at the end"
        elif keep == 1:
            when += ", the newest is kept"
        elif keep:
            when += f", the last {keep} are kept"
        print0(f"saving     {self.out_dir}/checkpoints {when}; Ctrl-C saves, too")
        listen()

    def save(self, step, write):
        """Saves a step with write(tmp, group), after earlier saves; keeps the last `keep` of them.

        A collective."""

        def save():
            folder = f"{self.out_dir}/checkpoints/step_{step}"
            with (
                torch.profiler.record_function("save"),
                published(folder, self.group, self.keep) as tmp,
            ):
                write(tmp, self.group)

            # what the user has asked for, in this run or an earlier one, stays
            if self.newest and self.at_evaluations and self.keep is None and RANK == 0:
                remove(self.newest)
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
        """Ends the run after the signal of this number, with exit status 128 + number."""
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        words = f"stopped after step {step} of {self.out_dir}; continue with --resume auto"
        print0(f"{name:10s} {words}")
        raise SystemExit(128 + number)


def open_checkpoint(folder, shape):
    """trainer.json of a checkpoint whose model has this `shape`, see shape_of.

    A collective; UserError on all ranks: damaged, or of another model."""
    verify(folder)
    with blame(f"--resume {folder}: not a checkpoint of this script"):
        saved = json.loads(Path(folder, "trainer.json").read_text())
        there = saved["shape"]

    words = []
    for key in sorted(there | shape):
        if there.get(key) != shape.get(key):
            words.append(f"{key} {there.get(key)} there, {shape.get(key)} here")
    if words:
        raise UserError(f"--resume {folder}: is of another model: {'; '.join(words):.500}")
    print0(f"resume     {folder}, update {saved['updates']}")
    return saved


NOT_SHAPE = (  # fields of a config that may differ between two runs of one model
    "transformers_version",
    "_name_or_path",
    "architectures",
    "dtype",
    "use_cache",
    "initializer_range",
)


def shape_of(model_config, more):
    """What two runs must have in common for one to resume the other, as plain JSON: the fields of a
    transformers config, and `more`."""
    # transformers' own JSON, in which an infinity is {"__float__": "Infinity"}
    fields = json.loads(model_config.to_json_string(use_diff=False)) | more
    fields = {key: x for key, x in fields.items() if key not in NOT_SHAPE}
    return json.loads(json.dumps(fields))


# ---- Model folders: Hugging Face models, for actor and critic ------------------------------------
# Configs, tokenizers, weights and value heads as transformers and other trainers store them. All
# scripts read configs and heads here; load_model, transformer_blocks and send_weights, at the end,
# are for models on FSDP, so critic_megatron.py does without them.


DEQUANTISED = ("fp8", "mxfp4")  # methods whose weights transformers turns into numbers


def load_config(config):
    """(tokenizer or None, transformers config) of config.model, with --override-config and dropout
    off. UserError names the flag: there is no model, or none that can be built."""
    flag = f"{config.prefix}model {config.model}"
    with blame(f"{flag}: no model there; presets are {', '.join(TINY)}"):
        tokenizer, fields = stored_config(config)
        kind = type(AutoConfig.for_model(**fields))

    # what trains and is saved is float32, of which this would not be true
    method = (fields.pop("quantization_config", None) or {}).get("quant_method")
    if method not in (None, *DEQUANTISED):
        raise UserError(f"{flag}: is quantised ({method}); give it in bfloat16 or float32")

    overrides = json_object(f"{config.prefix}override-config", config.override_config)
    if overrides:
        flag = f"{config.prefix}override-config {config.override_config}"
        fields = overridden(fields, overrides, kind, config)

    with blame(f"{flag}: is no config that {kind.__name__} takes"):
        model_config = kind.from_dict(fields)
        if model_config.is_encoder_decoder:
            raise ValueError("an encoder-decoder writes no rows of prompt and response")

        # the export checks the config in this way, when all the work is done
        as_exported = copy.deepcopy(model_config)
        as_exported._attn_implementation = "sdpa"
        as_exported.validate()

    disable_dropout(model_config)
    return tokenizer, model_config


def stored_config(config):
    """(tokenizer or None, fields of config.json) of a preset, a folder or a name on the hub."""
    model = config.model
    if model in TINY:
        if not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(1)  # more would only wait for each other
        tokenizer = load_tokenizer(config)
        return tokenizer, tiny_config(model, len(tokenizer or char_tokenizer(model)))
    refuse_adapter(config)
    fields = config_of(model)
    if "auto_map" in fields:
        fields["model_type"] = own_code(model, config.prefix, config.trust_remote_code)
    return load_tokenizer(config), fields


@functools.cache
def own_code(model, prefix, trusted):
    """Registers the classes that come with a model, in files of Python that its config's auto_map
    names, if --trust-remote-code says so -> its model_type. UserError: it needs them, and may not
    run them."""
    fields = config_of(model)
    kind = fields.get("model_type")
    flag = f"{prefix}trust-remote-code"
    if not trusted:
        if kind not in transformers.CONFIG_MAPPING:
            words = f"comes with code of its own; read it, then {flag} runs it"
            raise UserError(f"{prefix}model {model}: {words}")
        return kind

    classes = {}
    with WeakFileLock(f"{HF_MODULES_CACHE}.lock"):  # all ranks copy the files to one place
        for name, place in fields["auto_map"].items():
            if name == "AutoConfig" or name.startswith("AutoModel"):
                classes[name] = get_class_from_dynamic_module(place, model)
                classes[name].register_for_auto_class(name)  # exports have the files, too
    print0(f"code       {flag}: {model} runs {', '.join(classes)}")

    # transformers finds them like its own
    made = classes.pop("AutoConfig", None) or transformers.CONFIG_MAPPING[kind]
    AutoConfig.register(made.model_type, made, exist_ok=True)
    for name, cls in classes.items():
        getattr(transformers, name).register(made, cls, exist_ok=True)
    return made.model_type


def config_of(model):
    """The config of a model's folder or of either critic's checkpoint, as a dict."""
    if exists(f"{model}/trainer.json"):
        note, _ = transformers.PreTrainedConfig.get_config_dict(f"{model}/trainer.json")
        return note["shape"]
    fields, _ = transformers.PreTrainedConfig.get_config_dict(model)
    return fields


def refuse_adapter(config):
    """UserError if the model's folder holds an adapter: transformers would load its base model."""
    adapter = find_adapter_config_file(config.model)
    if adapter:
        base = json.loads(Path(adapter).read_text()).get("base_model_name_or_path")
        raise UserError(
            f"{config.prefix}model {config.model}: holds a LoRA adapter of {base}; merge it first"
            " (peft's merge_and_unload, save_pretrained) and give the merged folder, without"
            " adapter_config.json"
        )


def load_tokenizer(config):
    """The tokenizer of --tokenizer or of the model, or None with a line that says so."""
    flag = f"{config.prefix}tokenizer"
    name = config.tokenizer or config.model
    if name in TINY:
        return char_tokenizer(name)

    # a model may do without, but what the user names must load, and so must what is stored
    reader = AutoTokenizer
    guard = suppress(Exception)
    if config.tokenizer:
        guard = blame(f"{flag} {name}: no tokenizer there")
    stored = None
    with suppress(Exception):  # a hub that is out of reach
        stored = cached_file(name, "tokenizer.json")
    if (
        stored
    ):  # in a folder or on the hub, as stored: AutoTokenizer would use some models' own rules
        reader = PreTrainedTokenizerFast
        guard = blame(f"{flag}: that of {name} does not load; mend it or give another")
    tokenizer = None
    with guard:
        tokenizer = reader.from_pretrained(name, trust_remote_code=config.trust_remote_code)

    # transformers makes up a tokenizer where there is none
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        own = "auto_map" in get_tokenizer_config(name) and not config.trust_remote_code
        words = f" without {config.prefix}trust-remote-code" if own else ""
        print0(f"tokenizer  none in {name}{words}, so rows must be token ids")
        return None

    # of BOS its config may say something else than tokenizer.json; then the config counts
    adds_bos = get_tokenizer_config(name).get("add_bos_token")
    bos = tokenizer.bos_token_id
    if bos is not None and adds_bos not in (None, tokenizer.encode("a")[:1] == [bos]):
        tokenizer.add_bos_token = adds_bos
    return tokenizer


def overridden(fields, overrides, kind, config):
    """Fields of config.json with those of --override-config; kind: its class of transformers.
    UserError: it has no such field."""
    fields = dict(fields)
    windows = {"num_hidden_layers", "sliding_window", "use_sliding_window", "max_window_layers"}
    if windows & overrides.keys():
        fields.pop("layer_types", None)  # lets the config derive them again
    for key, value in overrides.items():
        if key == "model_type" or not (key in fields or hasattr(kind(), key)):
            flag = f"{config.prefix}override-config"
            raise UserError(f"{flag}: {kind.__name__} has no {key!r} to override")
        if isinstance(value, dict) and isinstance(fields.get(key), dict):
            value = fields[key] | value
        fields[kind.attribute_map.get(key, key)] = value
    return fields


def disable_dropout(model_config):
    """Zeroes attention_dropout, layerdrop ..., in nested configs too."""
    for key, value in vars(model_config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            disable_dropout(value)
        elif "drop" in key and isinstance(value, float):
            setattr(model_config, key, 0.0)


def train_quietly(model):
    """Training mode for the layers that may recompute activations, and eval mode for what is in
    them: some routers draw experts at random, or add noise, while they train."""
    model.eval()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def freeze_towers(model):
    """Freezes the weights that text does not reach, as those of a vision tower -> whether there
    are some."""
    reached = set(model.get_decoder().parameters())
    head = model.get_output_embeddings()
    if head is not None:
        reached |= set(head.parameters())

    others = [p for p in model.parameters() if p not in reached]
    for p in others:
        p.requires_grad_(False)
    return bool(others)


def check_rows(batch, model_config):
    """UserError: a row is too long for the model, or has ids outside its vocabulary."""
    length, row = batch.longest
    check_length(length, f"row_id {row}", model_config)
    size = model_config.get_text_config().vocab_size
    odd = batch.input_ids[batch.input_ids // size != 0]  # negative or too large
    if len(odd):
        raise UserError(f"token id {odd[0]} is outside the model's vocabulary of {size}")


def check_length(length, row, model_config):
    """UserError: this many tokens are too many for the model. row: words that name the row."""
    text = model_config.get_text_config()
    limit = "max_position_embeddings"
    most = getattr(text, limit, None) or inf

    # a longer row would change the angles of all rows around it
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limit = "original_max_position_embeddings"
        most = rope[limit]
    if length > most:
        raise UserError(f"{row}: {length} tokens, more than the model's {limit}, {most}")


HEAD_FILES = ("value_head.safetensors", "value_head.bin")  # a value head in a file of its own

# names of a value head, of one layer such as score.weight or more, as v_head.summary
HEADS = ("score", "classifier", "v_head", "value_head", "reward_head", "rm_head")
WRAPPERS = ("model", "module", "base_model", "pretrained_model")  # names that may stand before it


def is_head(name):
    """Whether a weight of a model belongs to a value head, by its name."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return parts[0] in HEADS and "original_module" not in parts  # peft's copy from before training


def local_folder(name):
    """A model's folder, downloaded if it is on the hub."""
    if isdir(name):
        return name
    folder = snapshot_download(name, allow_patterns=["*.json", "*.safetensors", *HEAD_FILES])
    if not list(Path(folder).glob("model*.safetensors")):
        snapshot_download(name, allow_patterns=["pytorch_model.bin", "pytorch_model-*.bin"])
    return folder


def open_weights(folder):
    """(names of the weights in a model's folder or a checkpoint, function that reads one).

    Opens the files that transformers would, and a value head's own; no other pickle, such as
    training_args.bin, is ever opened. UserError names a file that does not load."""
    if exists(f"{folder}/trainer.json"):
        return open_checkpoint_weights(folder)

    # a head in a file of its own, as from LLaMA-Factory and export_hf, goes before one of that name
    own = [name for name in HEAD_FILES if exists(f"{folder}/{name}")][:1]
    tensors = {}
    for file in weight_files(folder) + own:
        with blame(f"{file} does not load"):
            # the files are mapped into memory, so only what is used is read
            for name, x in load_state_dict(f"{folder}/{file}", weights_only=True).items():
                if file in own and not is_head(name):
                    name = f"value_head.{name}"
                tensors[name] = x.detach()  # an error if it is no tensor
    return tensors, tensors.__getitem__


def open_checkpoint_weights(folder):
    """open_weights of either critic's checkpoint: the files of several ranks may each have a piece
    of a weight."""
    reader = HuggingFaceStorageReader(folder)
    metadata = reader.read_metadata()
    reader.read_metadata = lambda: metadata  # else each read opens every file
    stored = metadata.state_dict_metadata

    def read(name):
        tensors = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype)}
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        return tensors[name]

    return stored, read


def weight_files(folder):
    """Names of the files with a model's weights, in the order of transformers: safetensors first,
    and one file before those that an index names."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if exists(f"{folder}/{name}"):
            return [name]
        if exists(f"{folder}/{name}.index.json"):
            index = json.loads(Path(f"{folder}/{name}.index.json").read_text())
            return sorted(set(index["weight_map"].values()))
    raise UserError("there is no model.safetensors or pytorch_model.bin, nor an index of several")


def configure_head(model_config, config, value_range):
    """Records the value head in a transformers config: one output, over value_range or None.
    UserError: the head needs a range."""
    stored = getattr(model_config, "value_range", None)
    model_config.id2label = None  # an export gives its output a name, see exported_config
    model_config.num_labels = 1
    model_config.problem_type = None
    model_config.value_range = None
    model_config.classifier_dropout = 0.0
    model_config.dtype = torch.float32
    if config.value_head != "scalar":
        model_config.value_range = config.value_range or stored or value_range
        if not model_config.value_range:
            needs = "this head needs it: LOW and HIGH of the returns, with a margin"
            raise UserError(f"{config.prefix}value-range: {needs}")


def exported_config(model_config):
    """A copy of a critic's config that says what the head's outputs are, for programs that would
    make probabilities of them."""
    exported = copy.deepcopy(model_config)
    if exported.num_labels == 1:
        label = "logit" if exported.value_range else "value"
        exported.problem_type = "regression"
        exported.id2label = {0: label}
        exported.label2id = {label: 0}
    return exported


def init_value_head(score, config, model_config):
    """Initializes the head, an nn.Linear, by --value-head-init -> (words on where it comes from,
    whether the first batch sets it to the mean return). By default that is so for a new head.
    UserError: the model has no head that fits."""
    nn.init.zeros_(score.weight)
    nn.init.zeros_(score.bias)
    start = config.value_head_init
    if start in ("zero", "mean"):
        return f"value head {start}", start == "mean"

    # a trained one, if the model has it
    if config.model not in TINY and start != "normal":
        name = load_value_head(score, config, model_config.value_range)
        if name:
            return f"value head from its {name}", False
    if start == "checkpoint":
        kind = f"for {config.prefix}value-head {config.value_head}"
        name = f"{config.prefix}model {config.model}"
        raise UserError(
            f"{name}: holds no trained value head {kind}; give one that does. A critic's --rollouts"
            " with --eval-rollouts trains one, and tells what it is worth on the others"
        )

    std = 1 / sqrt(score.in_features + 1)  # 2403.17031, and the code of 2009.01325 before it
    nn.init.normal_(score.weight, std=std, generator=torch.Generator().manual_seed(config.seed))
    later = ", then at the mean" if start == "auto" else ""
    return f"value head new, normal(0, {std:.3f}){later}", start == "auto"


def load_value_head(score, config, value_range):
    """Copies the value head of a model's folder, whatever its name, to `score` -> its name, or None
    without one. UserError if it does not fit: only --value-head-init replaces a head."""
    to = config.prefix
    flag = f"{to}model {config.model}"
    folder = local_folder(config.model)
    described = config_of(folder)
    stored = described.get("value_range")
    asked = list(value_range) if value_range else None
    if stored and stored != asked:
        low, high = stored
        fix = f"{to}value-head bounded {to}value-range {low} {high}"
        fix += f", or {to}value-head-init normal"
        raise UserError(f"{to}value-head: {config.model} has another; give {fix}")
    if asked and not stored:  # --value-head asks for a head that this folder cannot have
        return None

    with blame(f"{flag}: its weights do not load"):
        names, read = open_weights(folder)
        head = {name: read(name) for name in names if is_head(name)}
    if not head:
        return None

    # one layer of as many elements fits; some have its weight as (8, D / 8)
    weight = max(head)
    ours = {weight: score.weight, f"{weight.removesuffix('weight')}bias": score.bias}
    if any(name not in ours or x.numel() != ours[name].numel() for name, x in head.items()):
        shown = ", ".join(f"{name} {list(head[name].shape)}" for name in sorted(head))
        needed = f"one layer of {score.weight.numel()} weights"
        fix = "give a model whose head is"
        if config.value_head_init == "auto":
            fix = f"{to}value-head-init normal starts a new head"
        raise UserError(f"{flag}: its head, {shown:.200}, is not {needed}; {fix}")

    for name, x in head.items():
        ours[name].data.copy_(x.reshape(ours[name].shape))
    return weight


def load_model(kind, config, model_config, seed):
    """(float32 model of this AutoModel class on the host, words on where its weights come from).
    UserError: its weights do not load, or some are missing."""
    name = config.model
    flag = f"{config.prefix}model {name}"
    torch.manual_seed(seed)
    with blame(f"{flag}: its weights do not load"):
        if name in TINY:
            model = kind.from_config(model_config, dtype=torch.float32)
            return model, f"random weights (seed {seed})"
        folder = local_folder(name)
        stored = copy.deepcopy(model_config)  # with what load_config has dropped
        quantised = config_of(folder).get("quantization_config")
        if quantised:
            stored.quantization_config = quantised | {"dequantize": True}  # on a GPU, too
        model, info = kind.from_pretrained(
            folder, config=stored, output_loading_info=True, dtype=torch.float32
        )

    refuse_scales(info["unexpected_keys"], flag)
    absent = sorted(info["missing_keys"])  # transformers itself raises on a wrong shape
    if absent:
        fault = f"{len(absent)} weights are not in the checkpoint, e.g. {absent[0]}"
        raise UserError(f"{flag}: {fault}")
    words = f"{type(model).__name__} from {name}"
    if quantised:
        words += f", {quantised['quant_method']} read as float32"
    return model.float(), f"{words} (no optimizer state)"


def add_lora(backbone, config, seed, adapter="default"):
    """With --lora-rank r, freezes the backbone and gives its linear layers adapters, by peft. It
    may have others already, of another name. Seeds torch.

    A layer then computes W x + alpha / r B A x (LoRA, 2106.09685). A is random, B zero: values
    start unchanged. Experts stored as one tensor get none."""
    rank = config.lora_rank
    if not rank:
        return
    from peft import LoraConfig, inject_adapter_in_model

    backbone = nn.ModuleList([backbone])  # peft would choose by its config
    linear = [n for n, m in backbone.named_modules() if isinstance(m, nn.Linear | Conv1D)]
    linear = {re.sub(r"\.(base_layer|lora_.*)$", "", name) for name in linear}
    lora = LoraConfig(r=rank, lora_alpha=config.lora_alpha, target_modules=linear)
    torch.manual_seed(seed)
    with warnings.catch_warnings(action="ignore"):  # peft says that it adapts itself to GPT-2
        inject_adapter_in_model(lora, backbone, adapter)


def use_adapter(backbone, adapter):
    """From now on, a backbone's layers add this adapter, which trains, and no other one. None: of
    the backbone nothing trains."""
    if adapter is None:
        backbone.requires_grad_(False)
        return
    for module in backbone.modules():
        if hasattr(module, "lora_A"):
            module.set_adapter(adapter)


def hold_frozen(model, dtype):
    """Holds what does not train in the dtype of products, to which FSDP2 would cast it for each
    forward. Before it is spread. A value head computes in float32."""
    for name, p in model.named_parameters():
        may_train = p.requires_grad or ".lora_" in name  # adapters may train later
        if not may_train and not is_head(name):
            p.data = p.data.to(dtype)


def refuse_scales(names, flag):
    """UserError if these stored weights, which a model does not take, are scales of others."""
    for name in sorted(names):
        if re.search(r"weight_scale(_inv)?$|_scales$", name):
            words = f"its weights are quantised, and nothing here reads {name}"
            raise UserError(f"{flag}: {words}; give it in bfloat16 or float32")


def transformer_blocks(model):
    """The layers to shard one by one: those in transformers' _no_split_modules."""
    names = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    return [m for m in model.modules() if type(m).__name__ in names]


def send_weights(model, source):
    """Fills a model spread over all ranks from `source`, the whole model on rank 0's host and None
    on the others (a collective)."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, source.state_dict() if source else {}, options=options)

    # state dicts lack rotary tables
    for buffer, x in zip(model.buffers(), (source or model).buffers()):
        buffer.copy_(x)
        dist.broadcast(buffer, 0)


# with FSDP2 of torch 2.11, ranks wait forever for the gradient of a weight that one did not use
SKIPS_UNUSED = hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params")


def let_ranks_skip_weights(model):
    """For a model that FSDP2 shards: an expert may get tokens, or a vision tower images, on some
    ranks only. See check_skipped_weights."""
    if SKIPS_UNUSED:
        model.set_reduce_scatter_unused_params(True)


def check_skipped_weights(model, flag):
    """UserError, which begins with `flag`, if ranks may skip weights and FSDP2 would hang."""
    if SKIPS_UNUSED or WORLD_SIZE == 1:
        return
    for name, p in model.named_parameters():
        if p.requires_grad and re.search(r"\.experts\.\d|visual", name):
            words = f"FSDP2 of torch {torch.__version__} hangs where one rank does not use {name}"
            raise UserError(f"{flag}: {words}; use torch 2.13 or newer")


# ---- A check at every start: rows stay apart -----------------------------------------------------
# transformers has hundreds of models, and no list of those whose rows can be packed. So a few
# tokens show it, of the critic and of the actor, before anything expensive starts.


@torch.no_grad()
def check_rows_apart(name, states_of, dtype, vocab_size, advice="", unit=1):
    """How far the hidden states of a row together with another one are from those that it has
    alone, relative to their norm. UserError, which begins with `name`: they see each other.

    states_of(rows, alone): (T, D) float32 states of all tokens; alone: of one row, computed as
    transformers does. advice: what to do instead. unit: ranks that share a row.

    The rows have equal prompts of n tokens, and different answers. Four tokens of an answer are
    computed three times: with all that they must not see, with it changed, and with it cut off:

        together    row 0: 0 .. n-1 | n .. 2n-1     row 1: 0 .. n-1 | n+1 .. n+4 | n+5 .. 2n
        changed     row 0: 0 .. n-1 | others        row 1: 0 .. n-1 | n+1 .. n+4 | others
        alone                                       row 1: 0 .. n-1 | n+1 .. n+4
        compared                                                      n+1 .. n+4"""
    n = 8 * unit
    rows = Batch.blank(2 * n).select([0, 0])
    place_T = torch.arange(4 * n)
    rows.input_ids = (rows.positions + (place_T >= 3 * n).long()) % vocab_size
    rows.response_mask = rows.positions >= n

    answer_0 = (place_T >= n) & (place_T < 2 * n)
    later = place_T >= 3 * n + 4
    others_T = (rows.input_ids + 7) % vocab_size
    changed = replace(rows, input_ids=others_T.where(answer_0 | later, rows.input_ids))
    alone = Batch.blank(n + 4)
    alone.input_ids = rows.input_ids[2 * n : 3 * n + 4]

    CurrentPack.kernel = None  # check sets it
    with blame(f"{name} does not run{advice}"):
        together_LD = states_of(rows)[3 * n : 3 * n + 4]
        changed_LD = states_of(changed)[3 * n : 3 * n + 4]
        alone_LD = states_of(alone, alone=True)[n:]
    if not (together_LD.isfinite().all() and alone_LD.isfinite().all()):
        words = "has hidden states that are not finite: check its weights and its config"
        raise UserError(f"{name} {words}")

    # rounding differs between kernels, but hardly between two rows of the same shape
    exact = dtype == torch.float32
    size = alone_LD.norm()
    leaked = float((together_LD - changed_LD).norm() / size)
    off = float((together_LD - alone_LD).norm() / size)
    if leaked > (1e-4 if exact else 1e-2) or off > (1e-4 if exact else 1e-1):
        words = f"lets tokens see later ones or other rows{advice}"
        raise UserError(f"{name} {words} (hidden states differ by {max(leaked, off):.0e})")
    return off


# ---- Speed and memory of an update ---------------------------------------------------------------
# How fast it was, what fits into memory, and how tensors leave the device for a while.

# pattern in a device's name -> dense bf16, from data sheets; the first match counts
PEAK_TFLOPS = {
    "GB[23]00": 2500,
    "B[23]00": 2250,
    "H100 PCIe": 756,
    "H[12]00 NVL": 835,
    "(H|GH)[128]00": 989,
    "H20": 148,
    "A[18]00": 312,
    "MI300X": 1307,
}


def peak_flops(name):
    """The most bf16 FLOP/s of a CUDA device of this name; NaN: it is not in PEAK_TFLOPS."""
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{pattern}\b", name):
            return 1e12 * tflops
    return nan


def flops_model(model, config):
    """f(length) -> FLOPs of a forward over a row: 2 per token and weight of a matrix (only active
    experts), and 4 per causal query-key pair and feature of the query heads. It leaves vision
    towers out."""
    config = config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", 1)
    free = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}

    weights = 0.0
    for name, p in model.named_parameters():
        if p.ndim < 2 or p in free or "visual" in name:
            continue
        active = 1
        if ".experts." in name:
            active = chosen / len(p)  # it has one matrix per expert
        weights += p.numel() * active

    heads = config.num_attention_heads
    head_dim = vars(config).get("head_dim")  # Gemma 4 has one for each layer
    head_dim = head_dim or config.hidden_size // heads
    pairs = 2 * config.num_hidden_layers * heads * head_dim
    return lambda length: 2 * weights * length + pairs * length * (length + 1)


def describe_update(batch, rows, start, epochs, flops, layout):
    """Metrics of an update's rows, with values from before it, and of its speed since `start` (a
    collective). rows: the Rows of all ranks. flops: of one epoch, shared prompts once. layout: has
    the device and its dtype. MFU is NaN where peak_of knows no peak."""
    seconds = max(of_all_ranks(perf_counter() - start))
    memory = max(of_all_ranks(peak_memory(layout.device)))
    metrics = {
        "perf/tokens_per_second": epochs * tokens_of(rows) / seconds,
        "perf/mfu": epochs * flops / (seconds * WORLD_SIZE * peak_of(layout)),
        "perf/peak_memory_gib": memory / 2**30,
        "perf/time_update": seconds,
    }
    return metrics | value_statistics(batch)


def peak_of(layout):
    """The most FLOP/s of this rank's device; NaN on a CPU, in float32 and on a part of a GPU."""
    if layout.device.type != "cuda" or layout.dtype == torch.float32:
        return nan
    name = torch.cuda.get_device_name()
    return nan if " MIG " in name else peak_flops(name)


def peak_memory(device):
    """The most bytes that tensors have taken on this rank's device; NaN on a CPU."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else nan


def value_statistics(batch):
    """Explained variance, and mean, minimum and maximum of values and returns, over the actions of
    all ranks (a collective). Without an action there are no means and ends."""
    columns = {
        "values": batch.values[batch.response_mask].double(),
        "returns": batch.returns[batch.response_mask].double(),
    }
    explained = explained_variance(columns["values"], columns["returns"], everywhere=True)
    metrics = {"critic/explained_var": explained}

    for name, x_A in columns.items():
        n, mean, _ = moments(x_A, everywhere=True)
        mine = (inf, -inf)
        if len(x_A):
            mine = (float(x_A.min()), float(x_A.max()))
        ends = of_all_ranks(mine)
        if n:
            metrics[f"critic/{name}_mean"] = mean
            metrics[f"critic/{name}_min"] = min(low for low, _ in ends)
            metrics[f"critic/{name}_max"] = max(high for _, high in ends)
    return metrics


def measure_budget(try_out, given, longest, ranks_per_row, state_bytes):
    """The most tokens per rank that fit into a micro-batch, equal on all ranks (a collective).
    Measured by running try_out(batch) on ever more rows.

    given: auto, or auto:GIB for at most this much memory. longest: tokens of the longest row.
    ranks_per_row: ranks that share a row. state_bytes: what an optimizer step will add."""
    _, _, gib = given.partition(":")
    limit = float(gib or "inf") * 2**30
    row = Batch.blank(longest)
    try_out(row)  # creates gradients and workspaces

    # double the rows until twice as many would not fit
    rows = ceil(512 * ranks_per_row / longest)
    for doubling in range(6):
        batch = row.select([0] * (rows * 2**doubling))
        peak = bytes_taken(try_out, batch)
        if torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info()
            limit = min(limit, free + torch.cuda.memory_reserved())
        peak = max(of_all_ranks(peak))
        room = min(of_all_ranks(0.9 * limit - state_bytes))  # the allocator wastes a tenth
        if 2 * peak > room:
            break

    cost = peak * ranks_per_row / len(batch.input_ids)  # too high: a part does not grow with rows
    tokens = max(int(room / cost), 0)
    print0(f"budget     {room / 2**30:.3g} GiB / {cost:,.0f} bytes per token = {tokens:,} tokens")
    return tokens


def bytes_taken(call, batch):
    """The most bytes that tensors of call(batch) take at once, on top of those from before."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(batch)
        return torch.cuda.max_memory_allocated() - before

    # the profiler notes what each event takes or frees: 0 for all but memory events
    with torch.profiler.profile(profile_memory=True) as log:
        call(batch)
    events = sorted(log.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    return max(itertools.accumulate(e.nbytes() for e in events))


def optimizer_moments(optimizer):
    """The tensors of a torch optimizer's state, but its step counts, which are scalars. None: of a
    model that does not train."""
    states = optimizer.state.values() if optimizer else ()
    return [x for state in states for name, x in state.items() if name != "step"]


def offload(tensors):
    """Copies tensors to page-locked host memory and frees their device memory -> for `onload`.

    They stay the same tensors, without memory until then, so views of them and optimizers need not
    know. Tensors on the host, or without memory, are left alone."""
    away = []
    memory = {}  # each storage once: tensors may be views of the same
    for x in tensors:
        x = getattr(x, "_local_tensor", x).detach()  # this rank's part
        if x.is_cuda and x.untyped_storage().nbytes():
            memory[x.untyped_storage()] = x

    # torch rounds page-locked memory up to a power of two, and keeps what is freed for the next
    # time: pieces of such sizes waste nothing, and from the second time on they are there
    for storage, x in memory.items():
        size = storage.nbytes() // x.itemsize
        sizes = [1 << bit for bit in range(size.bit_length()) if size >> bit & 1]
        pairs = []
        for part in x.as_strided((size,), (1,), 0).split(sizes):
            piece = torch.empty(len(part), dtype=x.dtype, pin_memory=True)
            pairs.append((part, piece.copy_(part, non_blocking=True)))
        away.append((storage, storage.nbytes(), pairs))

    # the copies are complete after one wait
    if away:
        torch.cuda.synchronize()
    for storage in memory:
        storage.resize_(0)
    torch.cuda.empty_cache()
    return away


def onload(away):
    """Undoes `offload`, whose results the list holds, and empties the list."""
    for storage, size, pairs in away:
        storage.resize_(size)
        for part, piece in pairs:
            part.copy_(piece, non_blocking=True)
    away.clear()


# ---- A model and a task that need no download ----------------------------------------------------
# Every script starts with these when it is given nothing else, and the tests use little more: real
# architectures with random weights, a tokenizer of single characters, and sums of two numbers.

TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 64,
}
TINY = {  # preset -> what it adds to tiny_config, or its vision tower
    "tiny-qwen2": {},
    "tiny-qwen3": {},
    "tiny-llama": {},
    "tiny-mistral": {"sliding_window": 256},
    "tiny-gemma2": {"sliding_window": 256, "query_pre_attn_scalar": 16},
    "tiny-gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "tiny-qwen3-moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "tiny-qwen2.5-vl": {**TOWER, "window_size": 56, "fullatt_block_indexes": [1]},
    "tiny-qwen3-vl": {**TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
}
IMAGE_WORDS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


def tiny_config(name, vocab_size):
    """A preset's fields of config.json: 2 layers, 64 hidden features, 4 query and 2 key heads."""
    kind = re.sub("[-.]", "_", name.removeprefix("tiny-"))  # tiny-qwen2.5-vl -> qwen2_5_vl
    text = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None}
    if kind != "gpt2":  # GPT-2 names these differently
        text |= {
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 8192,
            "pad_token_id": None,
        }
    if not kind.endswith("vl"):
        return {"model_type": kind, **text, **TINY[name]}

    # with images: IMAGE_WORDS are the last of the vocabulary
    sections = [2, 3, 3]  # rotary features for time, height and width
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    return {
        "model_type": kind,
        "text_config": text,
        "vision_config": dict(TINY[name]),
        "vision_start_token_id": vocab_size - 3,
        "image_token_id": vocab_size - 2,
        "vision_end_token_id": vocab_size - 1,
    }


def char_tokenizer(model="tiny-qwen2"):
    """One token per printable ASCII character; <pad>, <eos>, <unk>; for images, IMAGE_WORDS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Ċ: newline, Ġ: space
    characters = ["<pad>", "<eos>", "<unk>", "Ċ", "Ġ", *map(chr, range(33, 127))]
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    core.decoder = decoders.ByteLevel()

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    if model.endswith("vl"):
        special["additional_special_tokens"] = IMAGE_WORDS
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def toy_rows(n, seed, held_out=False, slips=(0.7, 0.2), answers=4, gives_up=True, tokenizer=None):
    """At least n JSON lines of a policy that adds numbers of two digits, with `answers` rows to
    each prompt; held_out rows have prompts of their own.

    slips: the chance of a wrong answer, with and without a carry. A wrong answer is the first
    number, or without gives_up it forgets the carry, or is off by one. tokenizer: if it has a token
    for each digit and one for the end, rows have the true value of each token."""
    by_digit = tokenizer is not None and tokenizer.eos_token_id is not None
    for number in map(str, range(10, 200)):
        ids = tokenizer.encode(number, add_special_tokens=False) if by_digit else []
        by_digit = len(ids) == len(number)
    with_carry, without_carry = slips
    rng = Random(f"toy {seed} {held_out}")
    lines = []
    while len(lines) < n:
        a = rng.randrange(10, 100)
        b = rng.randrange(10, 100)
        is_held_out = zlib.crc32(b"%d+%d" % (a, b)) % 5 == 0  # a fifth of the prompts, by a hash
        if is_held_out != held_out:
            continue

        # some answers to this prompt
        carries = a % 10 + b % 10 >= 10
        error_rate = with_carry if carries else without_carry
        right = str(a + b)
        wrong = str(a)
        if not gives_up:
            wrong = str(a + b - 10) if carries else str(a + b + 1)
        for _ in range(answers):
            answer = wrong if rng.random() < error_rate else right
            row = {"prompt": f"{a}+{b}=", "response": answer, "reward": float(answer == right)}
            if by_digit:
                row["truth"] = toy_truth(answer, right, wrong, error_rate)
            lines.append(json.dumps(row))
    return lines


def toy_truth(answer, right, wrong, error_rate):
    """The true value before each character of a toy's answer, and before its end: the chance that
    the policy, which writes one of two answers, is writing the right one."""
    truth = []
    for k in range(len(answer) + 1):
        goes_right = (1 - error_rate) * right.startswith(answer[:k])
        goes_wrong = error_rate * wrong.startswith(answer[:k])
        truth.append(goes_right / (goes_right + goes_wrong))
    return truth


# ---- Numbers: what rows say before training, and what values are worth ---------------------------
# describe_rows is printed before training; --score adds values to a file of rows; the numbers of a
# critic are printed at the end, and stand on the report.

NUMBERS = {  # numbers in a report -> what they mean
    "explained variance": "over all actions: 1 is perfect, 0 as good as a constant",
    "what can be known": "explained variance if all values were the true ones: no critic has more",
    "known of that": "the critic's share of it: explained variance of the true values",
    "flatness": "variance of values within an answer, over the true one: 0 is flat, 1 is right",
    "at the first action": "explained variance where only the prompt is known",
    "its ceiling": "an estimate of the most that can be explained at the first action",
    "AUC": "chance that the last value of a right response is above that of a wrong one",
    "best of n": "mean reward of each prompt's response with the highest last value",
    "mean of n": "mean reward of all responses to these prompts, which have two or more",
    "oracle of n": "mean reward of the best response to each",
}
BASELINES = {  # what an actor may subtract from its returns -> what that is
    "nothing": "the returns as they are",
    "mean": "the mean of all other answers, as PPO whitens: 1 by definition",
    "least noise": "the same, but unlikely tokens count more: whiten noise",
    "group": "the mean of the prompt's other answers, as RLOO; GRPO's has this answer, too",
    "critic": "the values of this critic",
    "fitted": "the best mix of 1, group and critic, by the other half of the prompts",
}
SAVED = (
    "  For equal noise, an update with this critic needs {critic} times the answers that it needs"
    " minus the mean; with the mean of least noise, which is free, {least} times."
)
NO_LOG_PROBS = (
    "noise      whether a critic pays is told of rows with log_probs, those of each token of the"
    " response when the policy drew it"
)
WORSE = (
    "On these rows the critic is worse than a constant: its loss is {:.4f}, that of their mean"
    " return {:.4f}. A head that began with random weights may need more updates: train longer, or"
    " start at the mean (value-head-init). After many, try another learning rate; if only held-out"
    " rows are bad, it overfits: make fewer passes, or use more rows or a pretrained model."
)
ALL_EQUAL = "All returns of these rows are equal, so there is nothing that a critic could explain."


def describe_rows(rows, gamma, source, tokenizer=None):
    """Prints statistics of the rows and the first one -> (LOW, HIGH) of a value head: returns, a
    tenth wider at each end. source: words on where the rows come from."""
    # the ends of the returns, with a margin
    rows = replace(rows, returns=monte_carlo(rows, gamma))
    x_A = rows.returns[rows.response_mask].double()
    low, high = map(float, x_A.aminmax())
    margin = 0.1 * (high - low) or 1.0
    margin = max(margin, 1e-4 * max(abs(low), abs(high)))  # float32 must tell the two ends apart
    ends = (low - margin, high + margin)
    if RANK:  # the ceiling takes longer than all the rest
        return ends

    # the first row as the model reads it, and how much there is of all
    truncated = int(rows.truncated.sum())
    longest, _ = rows.longest
    turns = int((rows.response_mask[1:] & ~rows.response_mask[:-1]).sum())
    in_turns = f" in {turns:,} turns" if turns > len(rows) else ""
    episodes = len(rows.episodes())
    of_episodes = f" of {episodes:,} episodes" if episodes < len(rows) else ""
    ids = rows.input_ids[: rows.lengths[0]].tolist()
    acts = rows.response_mask[: rows.lengths[0]].tolist()
    print0(
        f"rows       {len(rows):,}{of_episodes} of {source}, {truncated:,} truncated\n"
        f"tokens     {len(rows.input_ids):,}, {len(x_A):,} of them actions{in_turns};"
        f" longest row {longest:,}\n"
        f"returns    {x_A.mean():z.3g} +- {x_A.std(correction=0):.3g},"
        f" from {low:z.3g} to {high:z.3g}\n"
        f"ceiling    {number(ceiling(rows), '.3f')} is what the prompt can explain at the first"
        " action\n"
        f"first row  {row_as_read(ids, acts, tokenizer)}"
    )
    return ends


def write_scores(source, out_dir, rows, tokenizer, gamma, keys=None, convert=None):
    """Writes the rows of files, with their values, to out_dir/scored.jsonl; adds a report. rows:
    what read_rows has made of the files with these keys and --rows, with values."""
    if RANK:
        return
    lines = (row for *_, row in raw_rows(source, "--score", convert, keys or {}))
    replace_lines(f"{out_dir}/scored.jsonl", scored(lines, rows, keys or {}))
    write_report(out_dir, rows, "scored rows", tokenizer, gamma)
    print0(f"saved      {out_dir}: scored.jsonl, report.html")


def scored(lines, rows, keys):
    """Yields JSON rows with what the critic says of them, one at a time, because values take more
    memory as Python's floats. rows: what read_rows has made of them with these keys, with
    values."""
    # what each row is worth at its end
    last_B = torch.where(rows.actions > 0, rows.values[last_action(rows)], 0.0)
    ranks = ranks_in_prompts(rows, last_B)
    values_B = rows.values.split(rows.lengths)
    mask_B = rows.response_mask.split(rows.lengths)

    # in the order of the lines
    source_of = rows.source.tolist().__getitem__
    groups = itertools.groupby(sorted(range(len(rows)), key=source_of), source_of)
    for line, (_, own) in zip(lines, groups):
        own = list(own)
        row = own[-1]
        values = values_B[row]
        mask = mask_B[row]
        line |= {"last_value": float(last_B[row]), "rank": ranks[row]}
        if len(own) > 1:
            yield line | {"segment_values": [values_B[i][mask_B[i]].tolist() for i in own]}
            continue
        read = in_our_keys(line, keys)
        acts = read.get("response_mask")
        if acts and isinstance(read.get("response"), list):
            yield line | {"step_values": values[mask].tolist()}
            continue

        # of the response's tokens, the first of which acts if nothing else is said
        n = len(acts or mask[int(mask.int().argmax()) :])
        line["values"] = values[-n:].tolist()
        if not acts and not mask[-n:].all():
            line["response_mask"] = mask[-n:].int().tolist()
        yield line


def ranks_in_prompts(rows, last_B):
    """[rank of each row among those of its prompt], where 1 is the highest last value, equal ones
    share a rank, and NaN comes last. Rows of an episode have the rank of its last one."""
    # the same answer in another micro-batch may be off by rounding
    height = last_B.nan_to_num(nan=-inf, posinf=inf, neginf=-inf).tolist()
    height = [float(f"{x:.5g}") for x in height]

    rank = [1] * len(rows)
    for same in rows.groups():
        ascending = sorted(height[episode[-1]] for episode in same)
        for episode in same:
            above = len(same) - bisect_right(ascending, height[episode[-1]])
            for row in episode:
                rank[row] += above
    return rank


def numbers_of(rows, m):
    """({name in NUMBERS: text of a number that exists}, advice or "") of rows with returns. m: what
    evaluate says of them."""
    rows, _ = end_to_end(rows)
    v_A = rows.values[rows.response_mask]
    r_A = rows.returns[rows.response_mask]

    # index of each row's first action among all actions
    actions = rows.actions[rows.actions > 0]
    first = actions.cumsum(0) - actions

    values = {
        "explained variance": m["eval/explained_var"],
        "what can be known": m.get("eval/knowable", nan),
        "known of that": m.get("eval/truth_explained_var", nan),
        "flatness": m.get("eval/flatness", nan),
        "at the first action": explained_variance(v_A[first], r_A[first]),
        "its ceiling": ceiling(rows),
        "AUC": m["eval/auc"],
        "best of n": m["eval/best_of_n"],
        "mean of n": m["eval/mean_of_n"],
        "oracle of n": m["eval/oracle_of_n"],
    }
    numbers = {name: number(x, ".3f") for name, x in values.items() if not isnan(x)}
    for name in ("explained variance", "known of that", "at the first action"):
        if name in numbers:
            numbers[name] = explained_number(values[name])

    advice = ""
    if isnan(m["eval/explained_var"]):
        advice = ALL_EQUAL
    elif m["eval/vf_loss"] > m["eval/constant_loss"]:
        advice = WORSE.format(m["eval/vf_loss"], m["eval/constant_loss"])
    return numbers, advice


def noise_by_baseline(rows, gamma):
    """How noisy the actor's gradient is -> {name in BASELINES: (noise over that with the mean, its
    standard error over prompts)}. rows: with rewards, values and log-probs.

    The noise of an answer is sum_t w_t (G_t - b_t)^2: G the return, w of noise_weights. Tokens are
    taken as uncorrelated. No baseline here knows the action or the luck of its own answer, so all
    lead to one mean gradient, and one with half the noise needs half the answers."""
    rows, _ = end_to_end(rows)
    mask_T = rows.response_mask
    row_A = rows.row_of_token[mask_T]
    w_A = noise_weights(rows)[mask_T]
    return_A = monte_carlo(rows, gamma)[mask_T].double()

    # a number for each prompt
    prompt_B = torch.zeros_like(rows.row_id)
    for number, same in enumerate(by_prompt(describe(rows))):
        prompt_B[same] = number
    prompt_A = prompt_B[row_A]

    def of_others(weight_A, kind_B):
        """(A,) the weighted mean of the returns of the other answers of this kind."""
        sums = (row_A.bincount(x_A, len(rows)) for x_A in (weight_A * return_A, weight_A))
        total_B, weight_B = (kind_B.bincount(x_B)[kind_B] - x_B for x_B in sums)
        return (total_B / weight_B)[row_A]

    one_A = torch.ones_like(w_A)
    baselines = {
        "nothing": 0 * one_A,
        "mean": of_others(one_A, 0 * prompt_B),
        "least noise": of_others(w_A, 0 * prompt_B),
        "group": of_others(one_A / rows.actions[row_A], prompt_B),  # NaN for a single answer
        "critic": rows.values[mask_T].double(),
    }

    # least squares with these weights, fitted to half of the prompts for the other half
    known = [baselines[name] for name in ("group", "critic")]
    X_AF = torch.stack([one_A, *(x_A for x_A in known if x_A.isfinite().all())], 1)
    baselines["fitted"] = 0 * one_A
    for half in (0, 1):
        learns_A = prompt_A % 2 != half
        root_A1 = w_A[learns_A, None].sqrt()
        fit = torch.linalg.lstsq(root_A1 * X_AF[learns_A], root_A1 * return_A[learns_A, None])
        baselines["fitted"] += ~learns_A * (X_AF @ fit.solution)[:, 0]

    # ratios of sums over prompts
    noise = {x: prompt_A.bincount(w_A * (return_A - b).square()) for x, b in baselines.items()}
    base = noise["mean"].sum()
    told = {}
    for name, noise_P in noise.items():
        ratio = noise_P.sum() / base
        error = (noise_P - ratio * noise["mean"]).std() * len(noise_P) ** 0.5 / base
        if ratio.isfinite():
            told[name] = (float(ratio), float(error))
    return told


def tell_noise(rows, gamma):
    """Prints noise_by_baseline -> {name: (its number as text, what it is)}. Of rows without
    log-probs, or whose returns do not differ, nothing is known."""
    if rows.rollout_log_probs is None:
        print0(NO_LOG_PROBS)
        return {}
    noise = noise_by_baseline(rows, gamma)
    if not BASELINES.keys() - {"group"} <= noise.keys():
        return {}
    print0("noise      of the actor's gradient, by what is subtracted from its returns")
    told = {}
    for name, (x, error) in noise.items():
        number = f"{x:.3f} +- {error:.3f}"
        told[f"noise, {name}"] = (number, BASELINES[name])
        print0(f"  {number}  {name:11}  {BASELINES[name]}")
    print0(SAVED.format(critic=told["noise, critic"][0], least=told["noise, least noise"][0]))
    return told


def ceiling(rows):
    """1 - variance within prompts / variance of first-action returns, over prompts with several
    rows; NaN without any, or where it would fall below 0 by chance."""
    rows, _ = end_to_end(rows)
    told = describe(rows)
    first_B = rows.cu_seqlens[:-1] + torch.tensor(told.shared.tolist())  # behind the prompt
    several = [same for same in by_prompt(told) if len(same) > 1]
    if not several:
        return nan
    returns = [rows.returns[first_B[same]].double() for same in several]
    every = torch.cat(returns)
    within = sum(len(x) * x.var() for x in returns) / len(every)
    spread = every.var()
    return 1 - within / spread if 0 < spread >= within else nan


def by_place_and_value(rows, m):
    """Lines of a log for PLACES, of rows with returns. Their step is the tenth of an answer, or the
    mean value of a bin. m: what evaluate says of the rows."""
    lines = []
    for name, x in m.items():
        of, tenth, k = name.partition("_tenth_")
        if tenth and x > -1:  # one that is far off would flatten the others
            lines.append({"step": int(k), of: x})

    rows, _ = end_to_end(rows)
    sums = in_bins(rows.values[rows.response_mask], rows.returns[rows.response_mask])
    for v, r, _ in (sums / sums[2]).T.tolist():
        if isfinite(v):
            lines.append({"step": v, "value": v, "return": r})
    return lines


# ---- The report: a page that every run leaves ----------------------------------------------------
# One HTML file without links: numbers, curves, and rows whose tokens are coloured by value.

CURVES = {  # panels of a critic's report -> {words: metric}
    "explained variance": {"training": "critic/explained_var", "held out": "eval/explained_var"},
    "value loss": {"training": "critic/vf_loss", "held out": "eval/vf_loss"},
    "gradient norm": {"training": "critic/grad_norm"},
}
PLACES = {
    "explained by tenths": {
        "returns": "eval/explained_var",
        "true values": "eval/truth_explained_var",
    },
    "mean return by value": {"found": "return", "right": "value"},
}
LOGARITHMIC = ("value loss", "gradient norm")  # panels with a logarithmic axis

LOW = "#f97316"  # the colour of low values
HIGH = "#2563eb"
INK = "#000000"  # of the axes of a figure: it becomes the page's text colour, light or dark
MOST_SHOWN = 2000  # tokens of a row that have a colour, and characters before them
ROWS_SHOWN = (8, 4)  # with the largest errors, and typical ones

# the numbers of a token appear on hover, tap and focus by CSS alone
PAGE = jinja2.Template(
    autoescape=True,
    source="""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 84em; margin: auto; padding: 1em 1em 4em; }
td { padding-right: 1em; vertical-align: top; }
article { border-top: 1px solid #8888; padding: 0.5em 0; overflow-wrap: anywhere; }
.text { font-family: monospace; white-space: pre-wrap; max-height: 60vh; overflow: auto; }
.quiet { opacity: 0.65; }
.worst { text-decoration: underline 2px; }
.true {
  border-bottom: 0.5em solid #0000; box-shadow: 0 1px #8888;
  padding-bottom: 2px; background-clip: content-box;
}
.text:has(.true) { line-height: 2; padding-bottom: 0.5em; }
[data-told]:is(:hover, :focus) { outline: 2px solid; }
[data-told]:is(:hover, :focus)::after {
  content: attr(data-told); position: fixed; inset: auto 0 0; z-index: 1; padding: 1em;
  background: CanvasText; color: Canvas; text-align: center;
}
svg { width: 100%; height: auto; max-height: 80vh; }
svg text { fill: currentColor; font-family: inherit !important; }
@media (min-width: 60em) {
  main { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: 3em; }
  aside { order: 1; align-self: start; position: sticky; top: 1em; }
}
</style>
{% macro coloured(x) -%}
<b style="background:{{ colour(x) }}">{{ "{:z.3g}".format(x) }}</b>
{%- endmacro %}
{% macro chapter(title, words, numbers) %}
<h1>{{ title }}</h1>
<p>{{ words }}</p>
<table>
{% for name, (x, meaning) in numbers.items() %}
<tr><td><b>{{ x }}</b><td>{{ name }}<td>{{ meaning }}
{% endfor %}
</table>
{% endmacro %}
{% if changed %}{{ chapter("What PPO changed", title, changed.numbers) }}{% endif %}
{{ chapter("What the critic learned", title ~ ": " ~ about, numbers) }}
{% if advice %}<p class="advice">{{ advice }}</p>{% endif %}
<details><summary>The run</summary>
{% for name, x in facts.items() %}{{ name }}: {{ x }}<br>{% endfor %}
</details>
<main>
<aside>
{% if figure %}<h2>How it learned, step by step</h2>{{ figure|safe }}{% endif %}
<h2>What it knows</h2>
<p>In each tenth of the answers, and in ten bins of values: those of a calibrated critic are right.
{% for place in places %}{{ place|safe }}{% endfor %}
</aside>
<section>
{% for kind, pairs in (changed.samples if changed else {}).items() %}
<h2>Held-out answers that {{ kind }}</h2>
{% for before, after in pairs %}
<article>reward {{ coloured(before.reward) }} → {{ coloured(after.reward) }}
<div class="text"><span class="quiet">{{ after.prompt }}</span>
before: {{ before.response }}
after: {{ after.response }}</div>
</article>
{% endfor %}
{% endfor %}
<h2>Where the critic changes its mind</h2>
<p>The colour of a token is the value just before it, from {{ coloured(ends[0]) }} or less to
{{ coloured(ends[1]) }} or more. Point at it or tap it for its numbers. The error is largest at the
underlined token: the value is far from the next one, or at the end from the reward.</p>
{% if truth %}
<p>The bar below a token is the true value at its place, in the same colours: the mean reward of all
ways in which the policy goes on from there. Both rows should agree. Where values keep one colour
while the bars change, the critic is flat: it follows the prompt, but not the answer.</p>
{% else %}
<p>A good critic ends near the return, and changes its mind where the answer turns right or wrong.
Look for values that jump where nothing is decided, or stay the same whatever is written.</p>
{% endif %}
{% for title, some in sections if some %}
<h3>{{ title }}</h3>
{% for row in some %}
<article>value {{ "{:z.2f} → {:z.2f}".format(*row.ends) }}, reward {{ coloured(row.reward) }}
{{- ", return {:z.3g} → {:z.3g}".format(*row.left) if row.left != (row.reward, row.reward) }}
<div class="text"><span class="quiet">{{ row.before }}</span>
{%- for token in row.tokens -%}
<span tabindex="0" class="{{ token.kind }}" style="background-color:{{ token.colour }}
{%- if token.truth %};border-color:{{ token.truth }}{% endif %}"
 data-told="{{ token.told }}">{{ token.text }}</span>
{%- endfor %}{{ row.rest }}</div>
</article>
{% endfor %}
{% endfor %}
</section></main>
""",
)


def write_report(out_dir, rows, about, tokenizer, gamma, curves=CURVES, changed=None):
    """Writes report.html and prints its numbers, on rank 0.

    rows: with values. about: what they are. curves: like CURVES, drawn from metrics.jsonl.
    changed: what training made of the policy, {"numbers": {name: (text, words)}, "samples":
    {words: pairs of answers}}."""
    v_A = rows.values[rows.response_mask]
    if RANK or not len(v_A) or not v_A.isfinite().all():
        print0("report     none: there are no rows with actions and finite values")
        return

    rows = replace(rows)
    add_returns(rows, gamma, lam=0.0)  # with lambda 0 advantages are TD errors
    rows.returns = monte_carlo(rows, gamma)
    if rows.truth is not None and not rows.truth[rows.response_mask].isfinite().any():
        rows.truth = None  # others of the file have true values

    # what stands on the page
    about = f"{len(rows):,} {about}, {len(v_A):,} actions"
    m = evaluate(rows, gamma)
    numbers, advice = numbers_of(rows, m)
    lines = by_place_and_value(rows, m)
    ends = ends_of_colours(rows)
    page = PAGE.stream(
        title=out_dir,
        about=about,
        changed=changed,
        numbers={name: (x, NUMBERS[name]) for name, x in numbers.items()} | tell_noise(rows, gamma),
        advice=advice,
        facts=facts_of(out_dir),
        figure=draw(read_lines(f"{out_dir}/metrics.jsonl"), curves),
        places=[draw(lines, {title: names}) for title, names in PLACES.items()],
        ends=ends,
        colour=lambda x: colour_of(x, *ends),
        truth=rows.truth is not None,
        sections=zip(("The largest errors", "Typical rows"), rows_to_show(rows, tokenizer)),
    )
    page.dump(f"{out_dir}/report.html", "utf-8", "replace")  # a text may hold half a character

    told = ", ".join(f"{name} {x}" for name, x in numbers.items())
    print0(f"report     {out_dir}/report.html: {about}\n  {told or advice}")


def facts_of(out_dir):
    """{name: what it is} of the run that writes a report, for people who find its page later."""
    now = datetime.now().replace(microsecond=0)
    facts = {"command": shlex.join(sys.argv), "ranks": WORLD_SIZE, "date": now}

    # rows may be scored in the folder of another run
    for run in read_lines(f"{out_dir}/run.json"):
        if run["run"]["command"] == sys.argv:
            facts |= {part: run[part]["model"] for part in ("actor", "critic") if part in run}
            facts["data"] = run.get("rollouts") or run.get("prompts") or "made by the script"
            facts["duration"] = now - datetime.fromisoformat(run["run"]["date"])
    return facts


def draw(log, curves):
    """The panels of `curves` that have points in the log, as SVG for the page; "" without any."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # title of a panel -> {words: its points}
    panels = {}
    for title, names in curves.items():
        for words, name in names.items():
            points = [(row["step"], row[name]) for row in log if row.get(name) is not None]
            if points:
                panels.setdefault(title, {})[words] = points
    if not panels:
        return ""

    # texts stay texts, in the page's font
    with rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(5, 2 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for panel, (title, lines) in zip(axes, panels.items()):
            draw_panel(panel, title, lines)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True)
    text = svg.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def draw_panel(panel, title, lines):
    """Draws lines, {words: points}, with a legend above them."""
    for words, points in lines.items():
        panel.plot(*zip(*points), label=words, marker="." if len(points) < 50 else "")
    panel.set_title(title, loc="left")
    panel.grid(alpha=0.3)

    if title in LOGARITHMIC and panel.dataLim.y1 > 0:
        panel.set_yscale("log")
    if title == "explained variance" and panel.dataLim.y1 > -1:  # the first are often far off
        panel.set_ylim(bottom=max(-1, panel.get_ylim()[0]))
    if len(lines) > 1:
        panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)


def ends_of_colours(rows):
    """(low, high), of values and true values alike: on a scale of its own, a flat critic would have
    as much colour as the truth."""
    ends = [value_range(rows.values[rows.response_mask])]
    if rows.truth is not None:
        ends.append(value_range(rows.truth[rows.response_mask & rows.truth.isfinite()]))
    lows, highs = zip(*ends)
    return min(lows), max(highs)


def value_range(v_A):
    """(low, high), the 5% and the 95% quantile, so that one outlier does not make all other values
    pale."""
    last = len(v_A) - 1
    low = float(v_A.kthvalue(1 + round(0.05 * last)).values)
    high = float(v_A.kthvalue(1 + round(0.95 * last)).values)
    if low == high:  # nearly all values are equal
        low, high = map(float, v_A.aminmax())
    return low, high


def colour_of(value, low, high):
    """A CSS colour that fades out halfway between low and high. Light and dark text stays legible
    on it."""
    if low == high:
        return ""
    shade = max(-1.0, min((2 * value - low - high) / (high - low), 1.0))
    colour = HIGH if shade > 0 else LOW
    return f"{colour}{round(166 * abs(shade)):02x}"


def rows_to_show(rows, tokenizer):
    """[rows with the largest TD errors, typical rows], each as row_to_show makes it. Rows of equal
    tokens are one. rows: with TD errors as advantages."""
    decode = lambda ids: "".join(f"{i} " for i in ids)
    if tokenizer:
        decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    ends = ends_of_colours(rows)

    # rows with an action, those with the largest errors first; the typical ones begin in the middle
    errors = [float(x_T.abs().max()) for x_T in rows.advantages.split(rows.lengths)]
    acted = rows.actions.nonzero()[:, 0].tolist()
    order = sorted(acted, key=errors.__getitem__, reverse=True)

    seen = set()
    sections = []
    for some, most in zip((order, order[len(order) // 2 :]), ROWS_SHOWN):
        section = []
        for b in some[:96]:
            row = rows.select([b])
            ids = tuple(row.input_ids.tolist())
            if ids not in seen and len(section) < most:
                seen.add(ids)
                section.append(row_to_show(row, decode, ends))
        sections.append(section)
    return sections


def row_to_show(row, decode, ends):
    """What the page shows of a row, a Batch of one, as a dict. Of a long row, only tokens around
    the largest TD error have a colour, and "…" stands for what is far away. ends: of colours."""
    ids = row.input_ids.tolist()
    values, returns = (x_T[row.response_mask].tolist() for x_T in (row.values, row.returns))
    worst = int(row.advantages.abs().argmax())
    start = max(int(row.response_mask.int().argmax()), worst - MOST_SHOWN // 2)
    end = start + MOST_SHOWN

    # decode a bit more than is shown, because the cut may lie within a character
    before, *texts = texts_of(ids[: end + 64], start, decode)
    if len(before) > MOST_SHOWN:
        before = "…" + before[-MOST_SHOWN:]

    truth_T = torch.full_like(row.values, nan) if row.truth is None else row.truth
    columns = (row.response_mask, row.values, row.returns, row.advantages, truth_T)
    columns = [x_T[start:end].tolist() for x_T in columns]
    tokens = []
    for t, (text, acts, v, r, error, true) in enumerate(zip(texts, *columns), start):
        token = {"text": text, "told": "not an action", "colour": "", "kind": "quiet"}
        if acts:
            token["told"] = f"value {v:z.3g}, return {r:z.3g}, TD error {error:z.3g}"
            token["colour"] = colour_of(v, *ends)
            token["kind"] = "worst" if t == worst else ""
        if acts and isfinite(true):
            token["told"] += f", true value {true:z.3g}"
            token["truth"] = colour_of(true, *ends)
            token["kind"] += " true"
        tokens.append(token)

    return {
        "ends": (values[0], values[-1]),
        "left": (returns[0], returns[-1]),
        "reward": float(row.token_level_rewards.sum()),
        "before": before,
        "tokens": tokens,
        "rest": "…" if end < len(ids) else "",
    }
