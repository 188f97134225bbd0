"""Tests common.py against verl's recorded numbers, plain loops in float64, and properties that must
hold.

The same for the policy formulas that ppo_loop.py shares with verl, and for micro-batches, which
both critics cut by the same functions, as test_critic_megatron.py asserts."""

import collections
import dataclasses
import inspect
import itertools
import json
import math
import os
import pathlib
import re
import time
import types

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from helpers import (
    ROOT,
    actions_of,
    parts_of,
    random_batch,
    refused,
    rows_after,
    rows_of,
    spans_of,
    verl,
    worker,
    write_manifest,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import gae_by_hand
from safetensors.torch import save_file
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import common
import critic_fsdp
import critic_megatron
import ppo_loop
from common import UserError


def flatten(x_BR):
    """(B, R) responses -> a flat float32 column, in which each row follows one prompt token."""
    return F.pad(x_BR.float(), (1, 0)).flatten()


def flat(mask_BR, **columns):
    """A Batch of rows with one prompt token and these responses, of equal length."""
    batch = common.concat([common.Batch.blank(mask_BR.shape[1] + 1)] * len(mask_BR))
    columns = {name: flatten(x_BR) for name, x_BR in columns.items()}
    return dataclasses.replace(batch, response_mask=flatten(mask_BR).bool(), **columns)


def test_numbers_on_a_line_are_readable():
    assert [common.number(x, ".3f") for x in (-0.0001, 0.25, math.nan)] == ["0.000", "0.250", "--"]
    assert common.number(torch.tensor(-1e-9), ".1f") == "0.0"
    assert common.number(-0.0, ".3g") == "0"

    shown = [common.explained_number(x, ".2f") for x in (-79770.4, -98.5, -0.001, 1.0, math.nan)]
    assert shown == ["< -99", "-98.50", "0.00", "1.00", "--"]


# ---- Padded tensors ------------------------------------------------------------------------------

X = math.nan
# prompts padded on the left, responses on the right, and the second one in its middle, too
PADDED = {
    "input_ids": [[9, 9, 1, 2, 3, 4, 5, 9], [9, 1, 2, 3, 9, 4, 9, 9]],
    "attention_mask": [[0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 1, 0, 0]],
    "response_mask": [[0, 0, 0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 0, 0, 0, 0]],
    "rewards": [[X, X, X, X, 0.5, 2.0, 1.0, X], [X, X, X, 0.25, X, X, X, X]],
    "values": [[X, X, X, 7.0, 0.1, X, 0.3, 7.0], [X, X, X, 0.2, X, X, X, X]],
}


def test_padded_tensors_become_a_batch_and_its_columns_padded_tensors():
    padded = {name: torch.tensor(x) for name, x in PADDED.items()}
    batch = common.from_padded(**padded, truncated=torch.tensor([0, 1]))

    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert batch.lengths == [5, 4]
    assert batch.response_mask.int().tolist() == [0, 0, 1, 0, 1, 0, 0, 1, 0]
    assert_close(batch.token_level_rewards, torch.tensor([0, 0, 0.5, 2.0, 1.0, 0, 0, 0.25, 0]))
    assert_close(batch.values, torch.tensor([0, 0, 0.1, 0, 0.3, 0, 0, 0.2, 0]))
    assert batch.row_id.tolist() == [0, 1]
    assert batch.truncated.tolist() == [False, True]

    back = common.to_padded(batch.values, padded["attention_mask"])
    assert_close(back, torch.where(padded["response_mask"] > 0, padded["values"], 0.0))


@pytest.mark.parametrize("columns", [6, 7])
def test_columns_of_the_responses_alone_are_the_last_places_of_a_row(columns):
    """As verl's (B, R), and OpenRLHF's (B, L - 1)."""
    names = ("response_mask", "rewards", "values")
    narrow = {name: [row[-columns:] for row in PADDED[name]] for name in names}

    whole = common.from_padded(**PADDED)
    part = common.from_padded(**{**PADDED, **narrow})
    for name, x in vars(whole).items():
        assert x is None or torch.equal(x, getattr(part, name)), name


def test_a_reward_of_a_padded_row_is_that_of_its_last_action():
    mask = [PADDED["response_mask"][0], [0] * 8]  # the second row has no action
    last = {"rewards": [3.0, 4.0], "response_mask": mask, "row_id": [7, 5]}
    batch = common.from_padded(**{**PADDED, **last})
    assert batch.token_level_rewards.tolist() == [0, 0, 0, 0, 3.0, 0, 0, 0, 0]
    assert batch.row_id.tolist() == [7, 5]


def test_no_padded_rows_are_an_empty_batch():
    none = common.from_padded(torch.zeros(0, 8).long(), *[torch.zeros(0, 8)] * 3)
    assert len(none) == len(none.input_ids) == 0
    assert none.cu_seqlens.tolist() == [0]


def test_a_batch_has_more_tokens_than_int32_can_count():
    many = 2**31
    ids = torch.zeros(1, dtype=torch.int64).expand(many + 3)  # takes no memory
    batch = common.Batch(
        input_ids=ids,
        cu_seqlens=common.cumulative([many, 3]),
        response_mask=ids[:1].bool().expand(len(ids)),
        row_id=torch.tensor([0, 1]),
        truncated=torch.tensor([False, False]),
    )
    assert common.check(batch).longest == (many, 0)
    assert batch.token_index([1]).tolist() == [many, many + 1, many + 2]
    assert batch.select([1]).cu_seqlens.tolist() == batch.split(1)[1].cu_seqlens.tolist() == [0, 3]


NO_ACTION = [0] * 8
EARLY = [0, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("words, fields", [
    ("input_ids: must be a (T,) tensor of torch.int64 on the host, not torch.float32",
     {"input_ids": [[0.5] * 8] * 2}),
    ("response_mask: a row has an action where attention_mask is 0",
     {"response_mask": [[0], [1]], "rewards": [0, 1], "values": None}),
    ("response_mask: the first token of row_id 1 cannot be an action",
     {"response_mask": [NO_ACTION, EARLY], "rewards": [0, 0], "values": None}),
    ("(2, 1) is the shape of neither input_ids nor response_mask", {"rewards": [[1], [1]]}),
    ("token_level_rewards: that of an action is not finite", {"rewards": [1, X]}),
    ("values: that of an action is not finite", {"values": [[X] * 8] * 2}),
    ("cu_seqlens: must begin at 0, grow, and end at 9, the number of tokens, with 2 entries",
     {"row_id": [1]}),
    ("truncated: must be a (B,) tensor", {"truncated": 1}),
])  # fmt: skip
def test_padded_tensors_that_would_be_wrong_silently_are_named(words, fields):
    with refused(words, begin=words.split()[0], kind=ValueError):
        common.from_padded(**{**PADDED, **fields})


@pytest.mark.parametrize("fields", [
    {"attention_mask": [[1], [1]]},
    {"response_mask": [[0] * 9] * 2},
    {"response_mask": PADDED["response_mask"][:1]},
    {"rewards": [1]},
    {"rewards": 1},
    {"values": PADDED["values"][:1]},
    {"values": PADDED["values"][0]},
])  # fmt: skip
def test_shapes_that_do_not_fit_are_errors_of_torch(fields):
    """None of them is spread over the rows or cut."""
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        common.from_padded(**{**PADDED, **fields})


# ---- PPO maths -----------------------------------------------------------------------------------


def test_value_loss_and_its_clipping_equal_verl():
    """Four aggregation modes x four clip ranges: loss, clip fraction and gradient."""
    case, results = (verl()["value_loss"][name] for name in ("in", "out"))
    batch = flat(case["response_mask"], values=case["values"], returns=case["returns"])
    assert len(results) == 16

    for key, expected in results.items():
        mode, clip = key.split("|")
        cliprange = float(clip) if float(clip) < 1e8 else None
        vpreds = flatten(case["vpreds"]).requires_grad_()
        weights = common.loss_weights(batch, mode, case["vpreds"].shape[1])
        columns = (batch.values, batch.returns, batch.response_mask, weights)
        loss, clipped = common.value_loss(vpreds, *columns, cliprange)
        loss.backward()

        # verl sums over sequences in the last mode
        times = int((batch.actions > 0).sum()) if mode == "seq-mean-token-sum-norm" else 1
        fraction = clipped / batch.response_mask.sum()
        assert_close(loss * times, expected["loss"], rtol=1e-6, atol=1e-7)
        assert_close(fraction, expected["clipfrac"], rtol=1e-6, atol=1e-7)
        assert_close(vpreds.grad * times, flatten(expected["grad"]), rtol=1e-5, atol=1e-8)


def test_gae_equals_verl_and_so_do_whitened_advantages():
    common.setup_distributed()
    case, results = (verl()["gae"][name] for name in ("in", "out"))
    m = case["response_mask"]
    rewards = case["token_level_rewards"] * m  # verl drops a reward on a masked token
    batch = flat(m, token_level_rewards=rewards, values=case["values"])
    mask = batch.response_mask

    for key, expected in results.items():
        columns = (batch.token_level_rewards, batch.values, mask, batch.cu_seqlens)
        advantages, returns = common.gae(*columns, *map(float, key.split("|")))
        assert_close(returns[mask], expected["returns"][m], rtol=1e-5, atol=1e-6)
        white = ppo_loop.masked_whiten(advantages, mask)  # as verl returns them
        assert_close(white[mask], expected["advantages"][m], rtol=1e-5, atol=1e-6)


def test_whitening_equals_verl():
    common.setup_distributed()
    case = verl()["whiten"]
    mask = case["mask"]
    white = ppo_loop.masked_whiten(case["in"].flatten(), mask.flatten()).view_as(mask)
    assert_close(white[mask], case["out"][mask], rtol=1e-5, atol=1e-6)
    assert (white[~mask] == 0).all()


def test_kl_equals_verl():
    case, results = (verl()["kl"][name] for name in ("in", "out"))
    for kind, expected in results.items():
        found = ppo_loop.kl_penalty(case["logprob"], case["ref_logprob"], kind)
        assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_the_coefficient_of_kl_equals_verl():
    case = verl()["adaptive_kl"]
    assert case["horizon"] == 10_000  # the same as ours, unless a step has more rows
    coefs = [case["init"]]
    for kl, n in case["updates"]:
        coefs.append(ppo_loop.next_kl_coef(coefs[-1], kl, n, case["target"]))
    assert coefs[1:] == pytest.approx(case["trace"], rel=1e-12)

    assert ppo_loop.next_kl_coef(0.3, 5.0, 64, None) == 0.3
    assert ppo_loop.next_kl_coef(1.0, 0.0, 10**6, 0.1) == pytest.approx(0.8)  # still positive


number = st.floats(-10, 10, width=32)
token = st.tuples(number, number, st.booleans())  # reward, value, is it an action
row = st.tuples(st.lists(token, max_size=20), number)  # tokens, bootstrap


@pytest.mark.parametrize("level", ["token", "turn"])
@settings(max_examples=150, deadline=None)
@given(st.lists(row, min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_gae_equals_a_plain_loop(level, rows, gamma, lam, bootstrapped):
    """With rewards anywhere, turns of any length, and rows without an action."""
    tail_B = [bootstrap if bootstrapped else 0.0 for _, bootstrap in rows]
    rows = [[(0.0, 0.0, False), *tokens] for tokens, _ in rows]  # each begins with a prompt token
    expected = [gae_by_hand(row, gamma, lam, tail, level) for row, tail in zip(rows, tail_B)]
    expected = torch.tensor(sum(expected, []), dtype=torch.float64).T

    rewards_T, values_T, mask_T = map(torch.tensor, zip(*sum(rows, [])))
    cu_seqlens = common.cumulative(torch.tensor([*map(len, rows)]))
    bootstrap_B = torch.tensor(tail_B) if bootstrapped else None
    batch = common.Batch(
        input_ids=mask_T.long(),
        cu_seqlens=cu_seqlens,
        response_mask=mask_T,
        row_id=torch.arange(len(rows)),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        turns=spans_of(mask_T) if level == "turn" else None,
        token_level_rewards=rewards_T,
    )
    found = common.gae_by_turns(batch, values_T, gamma, lam, bootstrap_B)
    if level == "token":
        alone = common.gae(rewards_T, values_T, mask_T, cu_seqlens, gamma, lam, bootstrap_B)
        assert all(map(torch.equal, found, alone))
    assert_close(torch.stack(found).double(), expected, rtol=1e-6, atol=1e-5)


def test_statistics_are_not_defined_where_returns_are_equal_but_for_rounding():
    """Small returns are told from rounding. For the other cases test_critic_fsdp.py has plain
    formulas."""
    small = 1e-4 * torch.tensor([1.0, 2.0, 3.0])
    assert common.explained_variance(small / 2, small) == pytest.approx(0.75)
    assert math.isnan(common.explained_variance(torch.zeros(3), 5 + torch.tensor([0.0, 5e-7, 0.0])))

    # rounding: returns that are 0 but for it
    values, returns = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
    row = common.Batch.blank(200)
    columns = (row.token_level_rewards, values, row.response_mask, row.cu_seqlens)
    _, rounding = common.gae(*columns, 0.9)
    for constant in (torch.ones(200), rounding, 1 + 1e-6 * returns, returns[:1]):
        assert math.isnan(common.explained_variance(values[1 : len(constant)], constant[1:]))

    # nor is an AUC without both labels, or finite scores
    labels = (values > 0).float()
    assert math.isnan(common.auc(values, labels * 0))
    assert math.isnan(common.auc(values / 0, labels))


# ---- Batch and JSONL -----------------------------------------------------------------------------

COLUMNS = "input_ids cu_seqlens response_mask row_id truncated token_level_rewards values".split()


def assert_same(a, b):
    """Two batches are equal, in the columns of a JSONL file."""
    for name in COLUMNS:
        x, y = (getattr(batch, name) for batch in (a, b))
        assert x is y is None or torch.equal(x, y), name


def batch_with_images(n):
    """Rows whose images are their numbers."""
    batch = random_batch(n)
    batch.multi_modal_inputs = [{"pixels": torch.tensor([i])} for i in range(n)]
    return batch


def test_selected_rows_stay_whole():
    batch = batch_with_images(9)
    for ours, i in zip(batch.select([5, 0, 8]).split(1), (5, 0, 8)):
        ends = slice(*rows_of(batch)[i])
        assert torch.equal(ours.input_ids, batch.input_ids[ends])
        assert torch.equal(ours.values, batch.values[ends])
        assert int(ours.row_id) == i
        assert int(ours.multi_modal_inputs[0]["pixels"]) == i


@pytest.mark.parametrize("size", [1, 4, 50])
def test_pieces_of_a_batch_are_selections_of_it_and_together_the_batch(size):
    """They are views of its columns: copies would take minutes for a large file."""
    batch = batch_with_images(9)
    pieces = batch.split(size)
    assert_same(common.concat(pieces), batch)
    assert [len(piece) for piece in pieces] == [min(size, 9 - i) for i in range(0, 9, size)]

    where = lambda x: x.untyped_storage().data_ptr()
    for i, piece in enumerate(pieces):
        rows = list(range(9))[i * size : (i + 1) * size]
        assert_same(piece, batch.select(rows))
        assert piece.multi_modal_inputs == [batch.multi_modal_inputs[row] for row in rows]
        for name in ("input_ids", "response_mask", "row_id", "truncated", "values", "returns"):
            assert where(getattr(piece, name)) == where(getattr(batch, name)), name


def test_a_batch_without_rows():
    batch = batch_with_images(9)
    nothing = common.concat([batch.select([])])
    assert batch.select([]).split(3) == []
    assert len(nothing) == 0
    assert nothing.cu_seqlens.tolist() == [0]
    assert_same(common.concat([nothing, batch, nothing]), batch)


def test_actions_are_counted_and_the_last_one_is_found():
    batch = random_batch(9)
    acts = actions_of(batch)
    assert batch.actions.tolist() == [*map(len, acts)]
    assert 0 in batch.actions
    assert common.last_action(batch).tolist() == [max(places, default=-1) for places in acts]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_jsonl_round_trip_is_exact(tmp_path_factory, seed, n):
    path = str(tmp_path_factory.mktemp("jsonl") / "rows.jsonl")
    batch = random_batch(n, seed)
    ppo_loop.write_jsonl(batch, path)
    assert_same(common.read_rows(path, None), batch)


def test_a_folder_is_read_by_the_tokenizer_that_is_stored_in_it(tmp_path):
    """transformers would give a Qwen2 folder Qwen2's own rules, by which each digit is a word of
    its own."""
    words = {"1": 0, "2": 1, "12": 2, "$": 3}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("1", "2")]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
    stored = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="$")
    stored.save_pretrained(tmp_path)
    config = transformers.AutoConfig.for_model(**common.tiny_config("tiny-qwen2", 4))
    config.save_pretrained(tmp_path)

    assert transformers.AutoTokenizer.from_pretrained(tmp_path).encode("12") == [0, 1]
    tokenizer, _ = common.load_config(critic_fsdp.Config(model=str(tmp_path)))
    assert tokenizer.encode("12") == [2]


def test_text_and_chat_rows():
    tokenizer = common.char_tokenizer()
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}>{% endif %}"
    chat = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "1+1=", "response": "2", "reward": 1},
        {"messages": chat, "response": "ok\n", "rewards": [0, 0.5, 0, 1]},
        {"prompt": "a", "response": "bc", "reward": 2.0, "truncated": True, "extra": "ignored"},
        {"prompt": "a", "response": "bcd", "reward": 3, "response_mask": [1, 0, True, 0]},
        {"prompt": "a", "response": "b<eos>", "reward": True, "truncated": None},
    ]
    batch = common.read_rows([*map(json.dumps, rows), " "], tokenizer)

    # tokens: a response that was not cut off ends with <eos>, once
    texts = [tokenizer.decode(batch.input_ids[s:e]) for s, e in rows_of(batch)]
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id] * 2  # a character of two bytes
    assert texts == ["1+1=2<eos>", "<user>hi>ok\n<eos>", "abc", "abcd<eos>", "ab<eos>"]
    assert batch.lengths[-1] == 3
    assert batch.truncated.tolist() == [False, False, True, False, False]

    # actions and their rewards
    masks = [x.int().tolist() for x in batch.response_mask.split(batch.lengths)]
    rewards = [x.tolist() for x in batch.token_level_rewards.split(batch.lengths)]
    assert masks[0] == [0, 0, 0, 0, 1, 1]
    assert rewards[0] == [0, 0, 0, 0, 0, 1]
    assert rewards[1][-4:] == [0, 0.5, 0, 1]
    assert masks[3] == [0, 1, 0, 1, 0]
    assert rewards[3] == [0, 0, 0, 3, 0]  # on the last action


GOOD = {"prompt_ids": [1, 2], "response_ids": [3, 4], "reward": 1.0}
IDLE = {**GOOD, "response_mask": [0, 0]}
BAD_ROWS = [  # how a row differs from GOOD, or the whole line, and what is wrong
    ("{", "is not JSON: EOF while parsing an object at character 1"),
    (b'{"prompt": "\xff"}', "JSON"),
    ("[" * 100_000, "JSON"),
    ({"reward": None}, "one of reward, rewards; has none (null counts as none: reward)"),
    ({"prompt": "a"}, "one of prompt, messages, prompt_ids; has prompt and prompt_ids"),
    ({"response_ids": None, "response": "", "truncated": True}, "empty prompt or response"),
    ({"prompt_ids": None, "prompt": 7}, "prompt: must be a valid string, not 7"),
    ({"prompt_ids": None, "messages": [{"role": "user", "content": "a"}]}, "template"),
    ({"reward": 10**400}, "reward: must be a finite number"),
    ({"reward": 1e30}, "reward: must be less"),  # its square is infinite
    ({"reward": "1"}, 'reward: must be a valid number, not "1"'),
    ({"reward": None, "rewards": [0.0, math.nan]}, "rewards: must be a finite number"),
    ({"reward": None, "rewards": [1.0]}, "rewards has 1 entries"),
    ({"response_mask": [1, 2]}, "response_mask: must be"),
    ({"response_ids": [3, 50]}, "50 is outside the model's vocabulary of 50"),
    ({"response_ids": [3, -1]}, "response_ids: must be"),
    ({"response_ids": [3, 2**63]}, "response_ids: must be"),
    ({"prompt_ids": [1] * 30}, "32 tokens, more than the model's max_position_embeddings, 20"),
]


@pytest.mark.parametrize("bad, fault", BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_named_with_file_line_and_fault(bad, fault, tmp_path):
    if isinstance(bad, dict):
        bad = json.dumps({**GOOD, **bad})
    if isinstance(bad, str):
        bad = bad.encode()
    good = json.dumps({**GOOD, "values": [1, 2], "response_mask": [0, 1]}).encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([good, bad, good]))

    fields = common.tiny_config("tiny-qwen2", 50) | {"max_position_embeddings": 20}
    reader = (str(path), common.char_tokenizer(), transformers.AutoConfig.for_model(**fields))
    with refused(fault, f"--rollouts {path}:2: "):
        common.read_rows(*reader)


def test_a_hint_that_a_row_lacks_is_named():
    line = json.dumps({"prompt": "1+1=", "response": "2", "reward": 1.0})
    with refused("toy:1: no 'gold', which --privileged-key names, among its keys prompt, response"):
        common.read_rows([line], common.char_tokenizer(), hint_key="gold")


@pytest.mark.parametrize("text, fault", [
    (None, "No such file"), ("\n", "an action"), (json.dumps(IDLE), "an action")
])  # fmt: skip
def test_a_file_with_nothing_to_learn_is_refused(text, fault, tmp_path):
    path = tmp_path / "rows.jsonl"
    if text:
        path.write_text(text)
    with pytest.raises(UserError, match=f"--rollouts.*{fault}"):
        common.read_rows(str(path), None)


# ---- Partitioning --------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 40), st.integers(0, 3))
def test_each_pass_has_every_row_once_and_groups_stay_together(prompts, size, number):
    rows = common.concat([common.Batch.blank(3)] * len(prompts))
    rows.row_id = torch.arange(len(rows))
    rows.input_ids[::3] = torch.tensor(prompts)
    groups = rows.groups()
    prompts_of_groups = [{prompts[i] for [i] in group} for group in groups]
    assert prompts_of_groups == [{x} for x in dict.fromkeys(prompts)]

    pieces = math.ceil(len(prompts) / size)
    steps = range(number * pieces, (number + 1) * pieces)
    seen = [common.rows_of_step(step, groups, size, 0) for step in steps]
    order = [row for [row] in sum(seen, [])]
    assert sorted(order) == list(range(len(prompts)))
    assert max(map(len, seen)) <= size

    # but for groups that do not fit into a step
    times = collections.Counter(x for x, _ in itertools.groupby(prompts[i] for i in order))
    assert all(times[x] == 1 for x in prompts if prompts.count(x) <= size)


def plain_micro_batches(batch, ranks, cap, share, pad):
    """critic_fsdp.micro_batches the slow way: every count is tried, and every list looked at."""
    pieces = []  # (tokens shared, tokens behind these of each row, its index)
    groups = {}
    for i, row in enumerate(common.describe(batch)):
        groups.setdefault(row.prompt if share and not pad else i, []).append(i)
    prompts = batch.response_mask.split(batch.lengths)
    groups = [(int(prompts[same[0]].int().argmax()), same) for same in groups.values()]

    # a row behind another one has copies of the keys that they share: a sixteenth of a token each
    cost = lambda shared, behind: shared + sum(behind) + (len(behind) - 1) * (shared // 16)
    tokens = 0
    for shared, same in groups:
        tokens += cost(shared, [batch.lengths[i] - shared for i in same])
    for shared, same in groups:
        piece = (shared, [], [])
        for i in same:
            behind = batch.lengths[i] - shared
            if piece[1] and cost(shared, [*piece[1], behind]) > min(cap, tokens / ranks):
                pieces.append(piece)
                piece = (shared, [], [])
            piece[1].append(behind)
            piece[2].append(i)
        pieces.append(piece)
    sizes = [cost(shared, behind) for shared, behind, _ in pieces]

    count = 1
    while True:
        parts = [[] for _ in range(ranks * count)]
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            min(parts, key=lambda part: sum(sizes[j] for j in part)).append(i)
        rows = [[sizes[i] for i in part] for part in parts]
        if max(len(x) * max(x, default=0) if pad else sum(x) for x in rows) <= cap:
            break
        count += 1 + count // 20
    parts = [[i for piece in part for i in pieces[piece][2]] for part in parts]
    return [parts[rank::ranks] for rank in range(ranks)]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=30),
    st.integers(1, 5), st.integers(60, 150), st.booleans(), st.booleans(),
)  # fmt: skip
@example([(3, 32), (2, 41)], 1, 120, True, False)  # these fill a micro-batch, and so does
@example([(1, 2)] * 3, 1, 16, True, False)  # a prompt of 10 tokens with 2 more for each row
def test_the_table_of_micro_batches_is_that_of_the_slow_way(rows, ranks, cap, share, pad):
    """rows: the number of a prompt of 1, 10, 19 or 28 tokens, and actions."""
    parts = [rows_after([prompt] * (1 + 9 * prompt), answer=n) for prompt, n in (*rows, (0, 1))]
    batch = common.concat(parts).select(range(len(rows)))
    table = parts_of(critic_fsdp.micro_batches(common.describe(batch), ranks, cap, share, pad))
    assert table == plain_micro_batches(batch, ranks, cap, share, pad)


def test_many_rows_that_share_no_micro_batch_are_split_in_few_tries(monkeypatch):
    """Each row fills more than half of a micro-batch."""
    spread = critic_fsdp.spread
    tries = []
    monkeypatch.setattr(critic_fsdp, "spread", lambda *args: tries.append(args) or spread(*args))
    lengths = [51 + i % 49 for i in range(2000)]
    rows = common.concat([common.Batch.blank(n) for n in lengths])
    [parts] = parts_of(critic_fsdp.micro_batches(common.describe(rows), 1, 100, True))
    assert sum(map(bool, parts)) == 2000
    assert len(parts) <= 1.05 * 2000 + 1
    assert len(tries) < 10


# ---- Attention over packed rows, FLOPs -----------------------------------------------------------


def plain_attention(q, k, v, scale, window, softcap, sinks):
    """One sequence, query by query: q (H, L, D), k v (K, M, D); the queries stand at the last L
    places."""
    out = torch.zeros_like(q)
    group = len(q) // len(k)
    for h, i in itertools.product(range(len(q)), range(q.shape[1])):
        place = i + k.shape[1] - q.shape[1]
        keys = [j for j in range(place + 1) if not window or place - j < window]
        scores = torch.stack([(q[h, i] * k[h // group, j]).sum() for j in keys]) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.cat([scores, sinks[h : h + 1]]) if sinks is not None else scores
        out[h, i] = sum(w * v[h // group, j] for w, j in zip(weights.softmax(0), keys))
    return out


def plain_packed(q, k, v, queries, keys, *options):
    """plain_attention of each sequence of a packed row: (H, T, D) -> (H, T, D)."""
    pieces = zip(q.split(queries, 1), k.split(keys, 1), v.split(keys, 1))
    return torch.cat([plain_attention(*piece, *options) for piece in pieces], 1)


QUERIES = [4, 4, 1, 7, 3, 3, 3]
KEYS = [6, 6, 3, 7, 3, 4, 4]  # queries belong to the last tokens of a sequence


def draw_qkv(keys):
    """Random (1,4,T,8) queries and (1,2,T,8) keys and values, in float64."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
    return [draw(1, 4, sum(QUERIES), 8), draw(1, 2, sum(keys), 8), draw(1, 2, sum(keys), 8)]


def a_layer():
    """A layer of a model whose config says nothing."""
    layer = nn.Module()
    layer.config = types.SimpleNamespace()
    return layer


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap, sinks", [(None, False), (2.0, False), (None, True)])
@pytest.mark.parametrize("keys", [QUERIES, KEYS])
def test_packed_attention_equals_a_plain_loop(window, softcap, sinks, keys):
    inputs = draw_qkv(keys)
    s_aux = torch.arange(4.0, dtype=torch.float64).requires_grad_() if sinks else None
    common.CurrentPack.pack = common.Pack(QUERIES, "cpu", keys)
    options = (0.3, 0.0, window, softcap)  # scale, dropout
    out, _ = common.packed_attention(a_layer(), *inputs, None, *options, s_aux=s_aux)
    assert common.CurrentPack.pack.kernel == ("eager" if softcap or sinks else "sdpa")

    expected = plain_packed(*(x[0] for x in inputs), QUERIES, keys, 0.3, window, softcap, s_aux)
    assert_close(out[0].transpose(0, 1), expected, rtol=1e-6, atol=1e-6)

    inputs += [s_aux] if sinks else []
    gradients = [torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected)]
    assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["a mask", "not causal", "an encoder"])
def test_packed_attention_refuses_options_that_it_would_ignore(case):
    common.CurrentPack.pack = common.Pack([4], "cpu")
    q = torch.zeros(1, 2, 4, 8)
    options = {"module": a_layer(), "attention_mask": None}
    if case == "a mask":
        options["attention_mask"] = torch.ones(4, 4)
    elif case == "not causal":
        options["is_causal"] = False
    else:
        options["module"] = a_layer()
        options["module"].is_causal = False

    with pytest.raises(UserError, match="cannot be packed"):
        common.packed_attention(query=q, key=q, value=q, **options)


@pytest.mark.parametrize("kind", ["indexed_attention", "hybrid_sliding", "chunked_attention"])
@pytest.mark.parametrize("mixer", [nn.Linear(1, 1), nn.Sequential(nn.Conv1d(1, 1, 1))], ids=str)
def test_layers_of_a_kind_that_nobody_has_packed_are_refused(kind, mixer):
    """Also next to recurrent ones."""
    decoder = nn.Sequential(mixer)
    decoder.config = types.SimpleNamespace(layer_types=["full_attention", kind])
    with refused(f"Sequential has layers that cannot be packed: {kind}"):
        common.pack_recurrent(decoder)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name, softcap", [("flash", None), ("flash", 2.0), ("varlen", None)])
def test_the_gpu_kernels_are_called_with_the_right_arguments(name, softcap, window, monkeypatch):
    """Without a GPU, a plain loop that takes the arguments of flash-attn or torch replaces the
    kernel."""
    qkv = [x.detach() for x in draw_qkv(KEYS)]
    signature = inspect.signature(common.varlen_attn)

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size, softcap=None):
        ends = (cu_q.diff().tolist(), cu_k.diff().tolist())
        assert ends == (QUERIES, KEYS)
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert (max_q, max_k) == (7, 7)
        assert q.is_contiguous()
        assert causal
        qkv = [x.transpose(0, 1) for x in (q, k, v)]  # they are (T,H,D)
        options = (softmax_scale, window_size[0] + 1, softcap, None)
        return plain_packed(*qkv, *ends, *options).transpose(0, 1)

    def varlen(*args, scale, window_size, **more):
        signature.bind(*args, scale=scale, window_size=window_size, **more)
        assert more == common.VARLEN_OPTIONS
        return flash(*args, scale, window_size[1] == 0, window_size)

    monkeypatch.setattr(common, "flash_attn_varlen_func", flash if name == "flash" else None)
    monkeypatch.setattr(common, "varlen_attn", varlen)
    pack = common.Pack(QUERIES, "cpu", KEYS)
    expected = common.attention(pack, *qkv, 0.3, window, softcap)
    pack.has_kernels = True
    found = common.attention(pack, *qkv, 0.3, window, softcap)
    assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert pack.kernel == name


def measure(device, dtype):
    """Metrics of an update of 2 seconds and 1e15 FLOPs, on ten tokens."""
    batch = common.Batch.blank(10)
    layout = types.SimpleNamespace(device=device, dtype=dtype)
    start = time.perf_counter() - 2
    return common.describe_update(batch, common.describe(batch), start, 1, 1e15, layout)


PEAKS = {  # the end of a device's name -> TFLOP/s, dense bf16
    "B200": 2250,
    "B300": 2250,
    "GB200": 2500,
    "H100 80GB HBM3": 989,
    "H100 PCIe": 756,
    "H200": 989,
    "H200 NVL": 835,
    "H20": 148,
    "A100-SXM4-80GB": 312,
    "AMD Instinct MI300X": 1307,
    "H100 80GB HBM3 MIG 1g.10gb": math.nan,
    "T1000": math.nan,
}


@pytest.mark.parametrize("name", PEAKS)
def test_mfu_uses_the_peak_of_the_device_or_is_unknown(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**31)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: f"NVIDIA {name}")
    host = common.setup_distributed()
    gpu = torch.device("cuda")

    found = measure(gpu, torch.bfloat16)
    rate = 1e15 / found["perf/time_update"] / (PEAKS[name] * 1e12)
    assert found["perf/mfu"] == pytest.approx(rate, nan_ok=True)
    assert found["perf/tokens_per_second"] == pytest.approx(10 / found["perf/time_update"])
    assert found["perf/peak_memory_gib"] == 2

    assert math.isnan(measure(gpu, torch.float32)["perf/mfu"])
    assert math.isnan(measure(host, torch.bfloat16)["perf/mfu"])


@pytest.mark.parametrize("name", common.TINY)
def test_flops_equal_torchs_counter(name):
    """FlopCounterMode counts all pairs of queries and keys, so this subtracts the keys after each
    query."""
    config = transformers.AutoConfig.for_model(**common.tiny_config(name, 97))
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model = transformers.AutoModel.from_config(config, **options)
    if "moe" in name:
        model.set_experts_implementation("eager")  # the counter does not support grouped products

    for length in (24, 300):
        with FlopCounterMode(display=False) as counter:
            model(input_ids=torch.arange(length)[None] % 90, use_cache=False)
        unseen = length * (length - 1)  # in two layers
        counted = counter.get_total_flops() - 4 * 4 * 16 * unseen
        rest = counted - common.flops_model(model, config)(length)

        # the rotary table of angles, once
        axes = 0 if "gpt2" in name else 3 if "vl" in name else 1
        assert rest in (0, axes * length * 8 * 2)


def test_flops_follow_verls_formula_but_for_the_head_and_causality():
    case = verl()["flops"]
    c = case["config"]
    config = transformers.Qwen2Config(**c)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    forward = sum(map(common.flops_model(model, config), case["seqlens"]))

    # verl counts the embedding, the vocabulary head, and keys that a query cannot see
    head = 2 * 2 * c["vocab_size"] * c["hidden_size"] * sum(case["seqlens"])
    unseen = sum(n * (n - 1) / 2 for n in case["seqlens"])
    extra = head + 4 * c["hidden_size"] * c["num_hidden_layers"] * unseen
    assert 3 * (forward + extra) / 1e12 == pytest.approx(case["tflops"], rel=1e-3)


# ---- What long work shows ------------------------------------------------------------------------


def test_a_terminal_gets_a_bar_that_leaves_no_trace(terminal, capsys):
    """Also if the work fails: then the message comes after it."""
    assert list(common.progress("abc", "rows", "lines")) == ["a", "b", "c"]
    with pytest.raises(UserError):
        for x in common.progress("abc", "prompts", "lines"):
            if x == "b":
                raise UserError("no")

    shown = terminal.getvalue()
    for words in ("rows:  67%", "| 2/3 [", "rows: 100%", "prompts:  33%"):
        assert words in shown
    *_, last = shown.rstrip("\r").split("\r")
    assert last.isspace()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("script", [critic_fsdp, critic_megatron], ids=["fsdp", "megatron"])
def test_values_and_updates_of_a_critic_show_how_far_they_are(script, terminal):
    """Micro-batch by micro-batch, to the end."""
    batch = random_batch(16, vocab_size=60, idle=False)
    w = worker(script=script, ppo_mini_batch_size=8, ppo_epochs=2)
    w.set_budget(batch.longest[0], "a row")
    w.critic.max_tokens = 64
    w.critic.max_tokens_forward = 50
    terminal.truncate(0)

    w.compute_values(batch)
    n = len(w.critic.plan_micro_batches(common.describe(batch), 50).sizes[0])
    said = re.findall(r"values: +\d+%\|.*?\| (\d+)/(\d+) ", terminal.getvalue())
    assert n > 4
    assert said == [(f"{i}", f"{n}") for i in range(n + 1)]

    w.update_critic(batch)
    made = [int(x) for x in re.findall(r"update: +\d+%\|.*?\| (\d+)/32 ", terminal.getvalue())]
    assert len(made) > 8
    assert made == sorted(made) and made[-1] == 32


# ---- Folders, toy, README ------------------------------------------------------------------------


def test_contents_are_on_the_disk_before_a_rename_and_the_rename_after_it(tmp_path, monkeypatch):
    """Also where the folder is there already, and the new one takes its place."""
    common.setup_distributed()
    flushed = set()
    fsync = os.fsync
    rename = os.rename
    inode = lambda path: os.stat(path).st_ino

    def rename_what_is_flushed(old, new):
        if not str(new).endswith(".gone"):
            assert {inode(path) for path in (old, *pathlib.Path(old).rglob("*"))} <= flushed
            flushed.discard(inode(tmp_path))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(inode(file)) or fsync(file))
    for name in ("rename", "replace"):  # they differ on Windows only
        monkeypatch.setattr(os, name, rename_what_is_flushed)

    common.replace_lines(tmp_path / "log", [{}])
    folder = tmp_path / "step_3"
    weights = folder / "actor" / "weights"
    for text, end in (("12345", ""), ("54321", "/")):
        with common.published(f"{folder}{end}", keep=2) as tmp:
            pathlib.Path(tmp, "actor").mkdir()
            pathlib.Path(tmp, "actor", "weights").write_text(text)
            assert not weights.exists() or weights.read_text() == "12345"
        assert weights.read_text() == text
        assert inode(tmp_path) in flushed
        for part in (folder, folder / "actor"):  # a part has no manifest of its own
            common.verify(str(part))


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_umask_decides_who_may_read_what_is_saved(mask, tmp_path):
    """safetensors writes files of mode 600."""
    common.setup_distributed()
    before = os.umask(mask)
    with common.published(str(tmp_path / "hf")) as tmp:
        pathlib.Path(tmp, "actor").mkdir()
        for name in ("model", "actor/model"):
            save_file({"x": torch.zeros(1)}, f"{tmp}/{name}.safetensors")
    os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    modes = {path.stat().st_mode & 0o777 for path in files}
    assert len(files) == 3 and modes == {0o666 & ~mask}


def published_folder(tmp_path):
    """A folder step_3 with a file actor/weights -> its path."""
    common.setup_distributed()
    folder = tmp_path / "step_3"
    with common.published(str(folder)) as tmp:
        pathlib.Path(tmp, "actor").mkdir()
        pathlib.Path(tmp, "actor", "weights").write_text("54321")
    return folder


def test_only_the_last_steps_stay(tmp_path):
    published_folder(tmp_path)
    (tmp_path / "log").touch()
    for n in (1, 2, 10):
        with common.published(f"{tmp_path}/step_{n}", keep=2):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"log", "step_3", "step_10"}


def test_what_is_not_saved_whole_leaves_the_old_folder(tmp_path, monkeypatch):
    folder = published_folder(tmp_path)
    with pytest.raises(RuntimeError), common.published(str(folder)):
        raise RuntimeError("the disk is full")
    with monkeypatch.context() as patch, refused("rank 0 does not see all of"):
        patch.setattr(common, "checksum", lambda path: None)  # a file that cannot be read
        with common.published(str(folder)) as tmp:
            pathlib.Path(tmp, "weights").touch()
    common.verify(str(folder))
    assert (folder / "actor" / "weights").read_text() == "54321"


def test_a_second_crash_keeps_what_the_first_one_left(tmp_path, monkeypatch):
    """After a crash between the two renames of a folder, the old one is there as .was alone."""
    folder = published_folder(tmp_path)
    was = folder.rename(f"{folder}.was")
    rename = os.rename

    def crash_at_the_folder(old, new):
        if new == str(folder):
            raise RuntimeError("a crash")
        rename(old, new)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a crash"):
        patch.setattr(os, "rename", crash_at_the_folder)
        with common.published(str(folder)):
            pass
    common.verify(str(was))
    with common.published(str(folder)) as tmp:
        pathlib.Path(tmp, "weights").touch()
    common.verify(str(folder))
    assert not was.exists()


def test_a_folder_without_a_manifest_is_not_one_of_ours_and_stays(tmp_path):
    folder = published_folder(tmp_path)
    (folder / common.MANIFEST).unlink()
    fault = pytest.raises(UserError, match="--out-dir: .* holds something else")
    with fault, common.published(str(folder)):
        raise AssertionError("nothing may be written")
    assert (folder / "actor").exists()


def strictly(text):
    """JSON as other programs read it: without the words that Python adds."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_files_have_null_for_a_number_that_is_not_finite(tmp_path):
    odd = [math.nan, math.inf, -math.inf]
    rows = [{"x": odd, "deep": {"a": [{"b": (1e-310, math.nan, "\ud800", 10**30)}]}}]
    rows.append({"path": tmp_path})
    plain = [{"x": [None] * 3, "deep": {"a": [{"b": [1e-310, None, "\ud800", 10**30]}]}}]
    plain.append({"path": str(tmp_path)})

    common.replace_lines(tmp_path / "rows.jsonl", iter(rows))
    assert [strictly(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == plain
    common.write_json(tmp_path / "state.json", rows)
    assert strictly((tmp_path / "state.json").read_text()) == plain

    # rollouts, and the settings of a run
    batch = random_batch(2, idle=False)
    batch.values[-1] = math.nan
    ppo_loop.write_jsonl(batch, f"{tmp_path}/dumped.jsonl")
    lines = (tmp_path / "dumped.jsonl").read_text().splitlines()
    assert strictly(lines[1])["values"][-1] is None
    common.Logger(str(tmp_path), {"actor": {"grad_clip": math.inf, "lr": 0.5}}, 0, None)
    assert strictly((tmp_path / "run.json").read_text())["actor"] == {"grad_clip": None, "lr": 0.5}


def test_a_config_with_an_infinite_number_is_stored_and_resumes(tmp_path):
    """Mamba's time steps have no upper limit. JSON has no infinity, but it must come back."""
    common.setup_distributed()
    config = transformers.Mamba2Config
    shape = lambda *limit: common.shape_of(config(time_step_limit=limit), {"more": (1, 2)})
    common.write_json(tmp_path / "trainer.json", {"updates": 3, "shape": shape(0.0, math.inf)})
    write_manifest(tmp_path)
    strictly((tmp_path / "trainer.json").read_text())

    assert common.open_checkpoint(tmp_path, shape(0.0, math.inf))["updates"] == 3
    with refused("is of another model: time_step_limit"):
        common.open_checkpoint(tmp_path, shape(0.0, 5.0))

    found = common.config_of(tmp_path)
    assert found["time_step_limit"] == [0.0, math.inf]
    assert found["more"] == [1, 2]
    assert config.from_dict(found).time_step_limit == [0.0, math.inf]


def test_a_row_that_would_change_the_rotary_angles_of_others_is_refused():
    """transformers chooses longrope's frequencies by the longest row of a forward, for all its
    rows. test_policy.py shows that such a rule changes the others."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
    sizes = {**common.tiny_config("tiny-llama", 99), "model_type": "phi3", "rope_parameters": rope}
    sizes |= {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    config = transformers.AutoConfig.for_model(**sizes)
    common.check_rows(common.Batch.blank(16), config)
    with refused("17 tokens, more than the model's original_max_position_embeddings, 16"):
        common.check_rows(common.Batch.blank(17), config)


def test_toy_rows_follow_their_rule():
    train = common.toy_rows(4000, 0)
    assert train == common.toy_rows(4000, 0) != common.toy_rows(4000, 1)

    held_out = {json.loads(line)["prompt"] for line in common.toy_rows(500, 0, held_out=True)}
    right = {True: [], False: []}  # whether the units carry -> rewards
    for row in map(json.loads, train):
        a, b = map(int, row["prompt"][:-1].split("+"))
        assert row["response"] == str(a + b if row["reward"] else a)
        assert row["prompt"] not in held_out
        right[a % 10 + b % 10 >= 10].append(row["reward"])
    for carries, share in ((True, 0.3), (False, 0.8)):
        assert sum(right[carries]) / len(right[carries]) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("gives_up", [True, False])
def test_true_values_of_the_toy_are_shares_of_its_right_answers(gives_up):
    """Of 2,000 answers to each of 8 prompts, those that begin alike are counted."""
    slips = (0.7, 0.2)
    fixed = (16_000, 0, False, slips, 2000, gives_up)
    lines = common.toy_rows(*fixed, tokenizer=common.char_tokenizer())
    rows = [json.loads(line) for line in lines]
    assert {row["truth"][0] for row in rows} == {1 - slip for slip in slips}
    for first in range(0, 16_000, 2000):
        answers = rows[first : first + 2000]
        texts = {row["response"]: row["truth"] for row in answers}
        assert len({row["prompt"] for row in answers}) == 1 and len(texts) == 2
        for text, truth in texts.items():
            assert len(truth) == len(text) + 1
            for k, true in enumerate(truth):
                alike = [row["reward"] for row in answers if row["response"].startswith(text[:k])]
                error = math.sqrt(true * (1 - true) / len(alike))
                assert sum(alike) / len(alike) == pytest.approx(true, abs=4 * error), (text, k)

    # one answer may go on where the other ends
    assert common.toy_truth("10", "102", "10", 0.25) == [0.75, 0.75, 0.75]
    assert common.toy_truth("102", "102", "10", 0.25) == [0.75, 0.75, 0.75, 1.0]


def tokenizer_of_digits(merges, **special):
    """It reads these pairs of digits as one token each."""
    words = [*"0123456789+=", *("".join(pair) for pair in merges), "<eos>"]
    core = tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges)
    core = tokenizers.Tokenizer(core)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


@pytest.mark.parametrize("merges, special, known", [
    ([], {"eos_token": "<eos>"}, True), ([], {}, False),
    ([("1", "0")], {"eos_token": "<eos>"}, False),
])  # fmt: skip
def test_the_toy_has_true_values_where_each_digit_and_the_end_is_a_token(merges, special, known):
    """The answers are the same for any tokenizer."""
    tokenizer = tokenizer_of_digits(merges, **special)
    lines = common.toy_rows(64, 0, tokenizer=tokenizer)
    rows = [json.loads(line) for line in lines]
    assert [row.pop("truth", None) is not None for row in rows] == [known] * 64
    assert [json.dumps(row) for row in rows] == common.toy_rows(64, 0)

    batch = common.read_rows(lines, tokenizer)
    assert (batch.truth is not None) == known
    if known:
        assert torch.equal(batch.truth.isfinite() & batch.response_mask, batch.response_mask)


# ---- Critics against the truth -------------------------------------------------------------------

AGAINST_TRUTH = ("eval/truth_explained_var", "eval/knowable", "eval/flatness")


def test_numbers_against_the_truth_equal_a_plain_loop():
    """Of the actions whose true value is known: a row has none, one or more of them. What stands at
    other places does not count."""
    rows, gamma = random_batch(60), 0.9
    g = torch.Generator().manual_seed(1)
    # far from 0: spreads are small next to squares
    rows.truth = 20 + 2 * torch.randn(len(rows.values), generator=g)
    rows.truth[torch.rand(len(rows.values), generator=g) < 0.8] = math.nan
    rows.truth_noise = torch.rand(len(rows.values), generator=g)
    rows.values = torch.randn(len(rows.values), generator=g)

    found = []  # of each row: (value, true value, noise, return) where it is known
    for actions in actions_of(rows):
        ahead = 0.0
        found.append([])
        for t in reversed(actions):
            ahead = float(rows.token_level_rewards[t]) + gamma * ahead
            if not math.isnan(rows.truth[t]):
                columns = (rows.values, rows.truth, rows.truth_noise)
                found[-1].append((*(float(x_T[t]) for x_T in columns), ahead))
    assert {0, 1, 2, 3} < {len(row) for row in found}

    v, truth, noise, r = (np.array(x) for x in zip(*itertools.chain(*found)))
    spread = truth.var() - noise.mean()
    several = [np.array(row).T for row in found if len(row) > 1]
    within = np.mean([truth.var(ddof=1) - noise.mean() for _, truth, noise, _ in several])
    expected = {
        "eval/truth_explained_var": 1 - ((truth - v).var() - noise.mean()) / spread,
        "eval/knowable": 1 - ((r - truth).var() - noise.mean()) / r.var(),
        "eval/flatness": np.mean([v.var(ddof=1) for v, *_ in several]) / within,
    }
    told = common.evaluate(rows, gamma)
    assert {name: told[name] for name in AGAINST_TRUTH} == pytest.approx(expected, rel=1e-5)

    # equal true values leave nothing to explain
    rows.truth = torch.full_like(rows.truth, 0.5)
    told = common.evaluate(rows, gamma)
    assert [math.isnan(told[name]) for name in AGAINST_TRUTH] == [True, False, True]
    rows.truth = None
    assert not set(AGAINST_TRUTH) & common.evaluate(rows, gamma).keys()


def test_tenths_and_bins_equal_plain_loops():
    """Of answers with fewer than ten actions, too; equal values share a bin. The noise of estimated
    true values is that of each tenth."""
    rows, gamma = random_batch(80, longest=50), 0.9
    g = torch.Generator().manual_seed(2)
    rows.values = (3 * torch.randn(len(rows.values), generator=g)).round()
    rows.truth = torch.randn(len(rows.values), generator=g)
    rows.truth[torch.rand(len(rows.values), generator=g) < 0.3] = math.nan
    rows.truth_noise = 0.1 * torch.rand(len(rows.values), generator=g)

    tenths = {k: [] for k in range(1, 11)}  # (value, return, true value, its noise)
    for actions in actions_of(rows):
        ahead = 0.0
        for i, t in reversed([*enumerate(actions)]):
            ahead = float(rows.token_level_rewards[t]) + gamma * ahead
            known = [float(x_T[t]) for x_T in (rows.truth, rows.truth_noise)]
            k = next(k for k in tenths if i < k * len(actions) / 10 - 1e-9)
            tenths[k].append((float(rows.values[t]), ahead, *known))

    told = common.evaluate(rows, gamma)
    for k, places in tenths.items():
        v, r, *_ = np.array(places).T
        assert told[f"eval/explained_var_tenth_{k}"] == pytest.approx(1 - (r - v).var() / r.var())
        v, _, true, noise = np.array([x for x in places if not math.isnan(x[2])]).T
        left = ((true - v).var() - noise.mean()) / (true.var() - noise.mean())
        assert told[f"eval/truth_explained_var_tenth_{k}"] == pytest.approx(1 - left)

    # bins: an action belongs to as many as there are ends at or below its value
    v, r, *_ = np.array([*itertools.chain(*tenths.values())]).T
    ends = sorted(v)[-(-len(v) // 10) :: -(-len(v) // 10)]
    bins = np.array([sum(end <= x for end in ends) for x in v])
    gaps = [abs((v - r)[bins == k].sum()) for k in set(bins.tolist())]
    assert told["eval/calibration"] == pytest.approx(sum(gaps) / len(v))
    assert len(gaps) < 10

    # a constant at the mean is calibrated, and another one is not
    rows.values = torch.full_like(rows.values, r.mean())
    assert common.evaluate(rows, gamma)["eval/calibration"] == pytest.approx(0, abs=1e-6)
    rows.values += 0.25
    assert common.evaluate(rows, gamma)["eval/calibration"] == pytest.approx(0.25)


def test_the_five_tokens_of_the_reading_path():
    """The table's numbers are right, to all digits that are shown."""
    common.setup_distributed()
    page = (ROOT / "tests" / "lessons" / "reading.md").read_text()
    text = page.partition("## Five tokens by hand")[2].partition("\n##")[0]
    lines = re.findall(r"^\| *`?([^`|]+?)`? *\|((?: [-.\d]+ \|){5})", text, flags=re.M)
    said = {name: torch.tensor([float(x) for x in cells.split("|")[:-1]]) for name, cells in lines}

    batch = flat(torch.tensor([[0, 1, 1, 1]]))
    mask = batch.response_mask
    values = said["output of the head"].roll(1) * mask  # from the position to the left
    columns = (said["token_level_rewards"], values, mask, batch.cu_seqlens)
    advantages, returns = common.gae(*columns, gamma=1.0, lam=0.5)
    td_errors, _ = common.gae(*columns, gamma=1.0, lam=0.0)

    # the loss of all actions, and of one token after another
    vpreds = said["vpreds"].clone().requires_grad_()
    loss_of = lambda *at: common.value_loss(vpreds, values, returns, *at, cliprange_value=0.2)
    loss, clipped = loss_of(mask, common.loss_weights(batch, "token-mean"))
    loss.backward()
    losses = [loss_of(torch.arange(5) == t, torch.ones(5))[0].detach() for t in range(5)]

    found = {
        "values": values,
        "advantage": advantages,
        "returns": returns,
        "gradient": vpreds.grad,
        "TD error": td_errors,
        "loss": torch.stack(losses) * mask,
        "whitened": ppo_loop.masked_whiten(advantages, mask),
        "clipped to values +- 0.2": torch.clamp(vpreds, values - 0.2, values + 0.2).detach() * mask,
    }
    assert said.keys() >= found.keys()
    for name, x in found.items():
        assert_close(x.float(), said[name], rtol=0, atol=6e-5)
    assert float(loss.detach()) == pytest.approx(0.0447, abs=6e-5)
    assert int(clipped) == 1


# ---- Edge cases, worked out by hand, for faults that nothing else would show ---------------------


@pytest.mark.parametrize("log_ratio, ratio", [(19.5, 19.5), (30.0, 20.0), (-30.0, -20.0)])
def test_the_policy_ratio_stays_within_e_to_the_20(log_ratio, ratio):
    one = torch.ones(1)
    columns = (log_ratio * one, 0 * one, -one, one.bool(), one)
    loss, *_ = ppo_loop.policy_loss(*columns, 1 - 1e-12, math.inf, None)
    assert float(loss) == pytest.approx(math.exp(ratio), rel=1e-5, abs=0)


@pytest.mark.parametrize("k1, k3", [
    (-2.0, math.exp(2) - 1 - 2), (-2.7, 10.0), (10.0, 9 + math.exp(-10)), (11.5, 10.0),
])  # fmt: skip
def test_a_k3_of_one_token_is_at_most_10(k1, k3):
    x_T = ppo_loop.kl_penalty(torch.tensor([k1]), torch.zeros(1), "k3")
    assert float(x_T) == pytest.approx(k3)


HALF = math.sqrt(0.5)  # the sample deviation of 1 and 3 is the square root of 2


@pytest.mark.parametrize("x, answer", [
    ([-1.0], [0.0]), ([7.0], [0.0]), ([1.0, 3.0], [-HALF, HALF]), ([5.0] * 3, [0.0] * 3),
])  # fmt: skip
def test_whitening_of_none_one_two_and_equal_numbers(x, answer, monkeypatch):
    monkeypatch.setattr(ppo_loop, "of_all_ranks", lambda x: [x])
    x_T = torch.tensor(x)
    assert ppo_loop.masked_whiten(x_T, x_T > 0).tolist() == pytest.approx(answer, abs=1e-6)


@pytest.mark.parametrize("options, after", [((), 0.0), ((False,), 0.0), ((True,), 2.0)])
def test_rows_that_were_cut_off_end_with_0_unless_asked_otherwise(options, after):
    rows = rows_after([3], answer=2)
    rows.truncated[0] = True
    rows.values = torch.tensor([0.0, 1.0, 2.0])
    common.add_returns(rows, 1.0, 1.0, *options)
    assert rows.returns.tolist() == [0.0, after, after]


def test_returns_of_lambda_1_need_no_values():
    batch = random_batch(12)
    batch.token_level_rewards = torch.randn(len(batch.input_ids)) * batch.response_mask
    common.add_returns(batch, 0.9, 1.0)
    plain = dataclasses.replace(batch, values=None, returns=None)
    common.add_returns(plain, 0.9, 1.0)
    torch.testing.assert_close(plain.returns, batch.returns, rtol=1e-5, atol=1e-6)
    assert plain.advantages is None

    for options in ((0.9, 0.5), (0.9, 1.0, True)):
        with refused("is missing", begin="values: "):
            common.add_returns(plain, *options)


def test_a_row_with_images_shares_with_no_prompt():
    rows = rows_after([0], [5], [5], [0], [5])
    rows.multi_modal_inputs = [{}, {"images": ["a.png"]}, {}, {}, {"images": ["a.png"]}]
    assert rows.groups() == [[[0], [3]], [[1]], [[2]], [[4]]]
    told = common.describe(rows)
    assert [same.tolist() for same in common.by_prompt(told, share=False)] == [
        *map(list, zip(range(5)))
    ]


@pytest.mark.parametrize("unit, pad", [((), 0), ((4,), 2), ((7,), 4)])
def test_a_pack_is_padded_at_its_end(unit, pad):
    rows = rows_after([5], [1, 2], [1, 1])  # 3, 4 and 4 tokens; the 4s share their first one
    slots, index, pack = critic_fsdp.pack_rows(rows, torch.device("cpu"), True, *unit)
    assert slots.tolist() == [*range(7, 11), 4, 5, 6, *range(3), *[11] * pad]
    assert index.tolist() == [7, 8, 9, 0, 4, 5, 6, *range(4)]
    assert pack.pieces == [(1, 4, 4), (1, 3, 4), (1, 3 + pad, 3 + pad)]
    assert pack.keys.tolist() == [*range(4), 0, 4, 5, 6, *range(7, 10 + pad)]


def test_what_rows_begin_with_has_one_slot_and_a_row_that_goes_on_is_one_sequence():
    """Rows 1, 4 and 2 go on from one another, 3 branches off, and 0 is equal to 4."""
    rows = rows_after([7, 8, 5, 6], [7], [7, 8, 5, 6, 4, 4, 4], [7, 8, 9], [7, 8, 5, 6], answer=1)
    rows.input_ids = torch.tensor([7, 8, 5, 6, 4, 7, 8, 7, 8, 5, 6, 4, 4, 4, 1, 7, 8, 9, 3])
    rows.input_ids = torch.cat([rows.input_ids, torch.tensor([7, 8, 5, 6, 4])])
    slots, index, pack = critic_fsdp.pack_rows(rows, "cpu", True)
    assert rows.input_ids[slots].tolist() == [7, 8, 5, 6, 4, 4, 4, 1, 9, 3]
    assert torch.equal(rows.input_ids[slots][index], rows.input_ids)
    assert pack.pieces == [(1, 8, 8), (1, 2, 4)]
    assert pack.keys.tolist() == [*range(8), 0, 1, 8, 9]
