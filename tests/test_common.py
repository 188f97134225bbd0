"""common.py against verl's recorded numbers, plain loops in float64, and properties that must hold.

So are the policy's formulas in ppo_loop.py that verl has too, and how both critic scripts cut micro-batches.
"""

import dataclasses
import importlib
import inspect
import itertools
import json
import math
import random
import re
import time
import typing

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from helpers import ROOT, SHARED, needs_shared, random_batch, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import common
import critic_fsdp
import ppo_loop
from common import UserError


@pytest.fixture(scope="module")
def oracle():
    """What verl 0.6.1 computed, see ../shared/data/README.md."""
    return torch.load(SHARED / "oracle" / "verl_0.6.1_fp32.pt", weights_only=True)


def flatten(x_BR):
    """(B, R) responses -> flat float32 columns, each row behind one prompt token."""
    return F.pad(x_BR.float(), (1, 0)).flatten()


def flat(mask_BR, **columns):
    """A Batch of padded (B, R) columns."""
    n, length = mask_BR.shape
    return common.Batch(
        input_ids=torch.zeros(n * (length + 1), dtype=torch.int64),
        cu_seqlens=torch.arange(n + 1, dtype=torch.int32) * (length + 1),
        response_mask=flatten(mask_BR).bool(),
        row_id=torch.arange(n),
        truncated=torch.zeros(n, dtype=torch.bool),
        **{name: flatten(x_BR) for name, x_BR in columns.items()},
    )


def padded(x_T, like):
    """The inverse of flatten."""
    return x_T.view(len(like), -1)[:, 1:]


# ---- PPO maths ---------------------------------------------------------------------------------------------


@needs_shared
def test_value_loss_equals_verl(oracle):
    """Four aggregation modes x four clip ranges: loss, clip fraction and gradient."""
    case, results = oracle["algos"]["vloss_in"], oracle["algos"]["vloss"]
    batch = flat(case["response_mask"], values=case["values"], returns=case["returns"])
    assert len(results) == 16
    for key, expected in results.items():
        mode, clip = key.split("|")
        vpreds = flatten(case["vpreds"]).requires_grad_()
        weights = common.loss_weights(batch, mode, case["vpreds"].shape[1])
        columns = (batch.values, batch.returns, batch.response_mask, weights)
        loss, clipped = common.value_loss(vpreds, *columns, float(clip) if float(clip) < 1e8 else None)
        loss.backward()
        rows = int((batch.actions > 0).sum())
        times = rows if mode == "seq-mean-token-sum-norm" else 1  # verl sums over sequences there
        share = clipped / batch.response_mask.sum()
        torch.testing.assert_close(loss * times, expected["loss"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(share, expected["clipfrac"], rtol=1e-6, atol=1e-7)
        gradient = padded(vpreds.grad, case["vpreds"]) * times
        torch.testing.assert_close(gradient, expected["grad"], rtol=1e-5, atol=1e-8)


@needs_shared
def test_gae_and_whitening_equal_verl(oracle):
    rewards, values, m = (
        oracle["algos"]["gae_in"][k] for k in ("token_level_rewards", "values", "response_mask")
    )
    batch = flat(m, token_level_rewards=rewards * m, values=values)  # verl drops a reward on a masked token
    columns = (batch.token_level_rewards, batch.values, batch.response_mask, batch.cu_seqlens)
    for case, expected in oracle["algos"]["gae"].items():
        advantages, returns = common.gae(*columns, *map(float, case.split("|")))
        white = ppo_loop.masked_whiten(advantages, batch.response_mask)  # as verl returns them
        for ours, theirs in ((returns, expected["returns"]), (white, expected["advantages"])):
            torch.testing.assert_close(padded(ours, m)[m.bool()], theirs[m.bool()], rtol=1e-5, atol=1e-6)
    given_ = oracle["algos"]["whiten"]
    mask = given_["mask"].bool()
    white = ppo_loop.masked_whiten(given_["in"].flatten(), mask.flatten()).view_as(mask)
    torch.testing.assert_close(white[mask], given_["shift"][mask], rtol=1e-5, atol=1e-6)
    assert (white[~mask] == 0).all()


def test_whitening_of_one_and_of_no_token():
    x = torch.tensor([3.0, 5.0])
    assert ppo_loop.masked_whiten(x, torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert ppo_loop.masked_whiten(x, torch.tensor([False, False])).tolist() == [0.0, 0.0]


@needs_shared
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_equals_verl(kind, oracle):
    case, expected = oracle["algos"]["kl_in"], oracle["algos"]["kl"][kind]
    log_probs, ref = case["logprob"], case["ref_logprob"]
    torch.testing.assert_close(ppo_loop.kl_penalty(log_probs, ref, kind), expected, rtol=1e-6, atol=1e-7)
    p = log_probs.clone().requires_grad_()
    straight = ppo_loop.kl_penalty(p, ref, f"{kind}+")
    torch.testing.assert_close(straight, expected, rtol=1e-5, atol=1e-6)
    straight.sum().backward()
    torch.testing.assert_close(p.grad, log_probs - ref, rtol=1e-5, atol=1e-6)  # d/dp of (p - q)^2 / 2


@needs_shared
def test_adaptive_kl_equals_verl(oracle):
    case, trace = oracle["algos"]["adaptive_kl"], []
    coef = case["init"]
    assert case["horizon"] == 10_000  # ours, as long as a step has fewer rows
    for kl, n in case["updates"]:
        coef = ppo_loop.next_kl_coef(coef, kl, n, case["target"])
        trace.append(coef)
    assert trace == pytest.approx(case["trace"], rel=1e-12)
    assert ppo_loop.next_kl_coef(0.3, 5.0, 64) == 0.3
    assert ppo_loop.next_kl_coef(1.0, 0.0, 10**6, 0.1) == pytest.approx(
        0.8
    )  # never negative, however many rows


def plain_gae(rewards, values, mask, gamma, lam, bootstrap):
    """One row by the textbook, token by token in float64; rewards on other tokens go to the action before them."""
    actions = [t for t, m in enumerate(mask) if m]
    carried = {t: 0.0 for t in actions}
    for t, r in enumerate(rewards):
        before = [a for a in actions if a <= t]
        if actions:
            carried[before[-1] if before else actions[0]] += r
    advantages, following, next_value = {}, 0.0, bootstrap
    for t in reversed(actions):
        following = carried[t] + gamma * next_value - values[t] + gamma * lam * following
        advantages[t], next_value = following, values[t]
    advantage = [advantages.get(t, 0.0) for t in range(len(mask))]
    return advantage, [advantages[t] + values[t] if t in advantages else 0.0 for t in range(len(mask))]


number = st.floats(-10, 10, width=32)
token = st.tuples(number, number, st.booleans())  # reward, value, is it an action
row = st.tuples(st.lists(token, max_size=20), number, st.floats(0, 1))  # tokens, bootstrap, lambda


@settings(max_examples=150, deadline=None)
@given(st.lists(row, min_size=1, max_size=5), st.floats(0, 1), st.booleans(), st.booleans())
def test_gae_equals_a_plain_loop(rows, gamma, shared, bootstrapped):
    """With one lambda for all rows or one for each, rewards anywhere, and rows without an action."""
    lam_B = [rows[0][2] if shared else lam for *_, lam in rows]
    columns, lengths, expected = [], [], []
    for (tokens, bootstrap, _), lam in zip(rows, lam_B):
        tokens = [(0.0, 0.0, False), *tokens]  # a prompt
        columns += tokens
        lengths.append(len(tokens))
        expected += zip(*plain_gae(*map(list, zip(*tokens)), gamma, lam, bootstrap * bootstrapped))
    rewards, values, mask = map(torch.tensor, zip(*columns))
    tail = torch.tensor([b for _, b, _ in rows]) if bootstrapped else None
    lam = lam_B[0] if shared else torch.tensor(lam_B, dtype=torch.float64)
    found = common.gae(rewards, values, mask, common.cumulative(torch.tensor(lengths)), gamma, lam, tail)
    expected = torch.tensor(expected, dtype=torch.float64).T
    torch.testing.assert_close(torch.stack(found).double(), expected, rtol=1e-6, atol=1e-5)


def test_value_loss_ignores_masked_nan_and_clip_can_be_off():
    v = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    bad = torch.tensor([0.0, math.nan, 0.0])
    mask = torch.tensor([True, False, True])
    loss, clipped = common.value_loss(v, bad, bad, mask, mask / 2, cliprange_value=None)
    loss.backward()
    assert loss.item() == 0.5 * (1 + 25) / 2 and int(clipped) == 0
    assert v.grad.tolist() == [0.5, 0.0, 2.5]
    common.value_loss(v, bad, bad, mask, mask / 2, cliprange_value=0.2)[0].backward()
    assert v.grad.isfinite().all()


@pytest.mark.parametrize("mode", typing.get_args(critic_fsdp.AggMode))
def test_loss_weights_and_counts_equal_a_plain_loop(mode):
    batch = random_batch(11, seed=5)
    rows = [[t for t in range(s, e) if batch.response_mask[t]] for s, e in rows_of(batch)]
    assert batch.actions.tolist() == [len(actions) for actions in rows]
    assert batch.last_action.tolist() == [max(actions, default=-1) for actions in rows] and [] in rows
    n_tokens, n_seqs = sum(map(len, rows)), sum(bool(r) for r in rows)
    expected = torch.zeros(len(batch.input_ids))
    for actions in rows:
        for t in actions:
            expected[t] = {
                "token-mean": 1 / n_tokens,
                "seq-mean-token-sum": 1 / n_seqs,
                "seq-mean-token-mean": 1 / n_seqs / len(actions),
                "seq-mean-token-sum-norm": 1 / n_seqs / 33,
            }[mode]
    torch.testing.assert_close(common.loss_weights(batch, mode, 33), expected, rtol=1e-6, atol=0)


def test_explained_variance_and_auc_equal_plain_formulas():
    g = torch.Generator().manual_seed(0)
    returns = torch.randn(200, generator=g)
    values = returns + 0.5 * torch.randn(200, generator=g) + 7
    expected = 1 - (returns - values).double().var() / returns.double().var()
    assert common.explained_variance(values, returns) == pytest.approx(float(expected), rel=1e-6)
    mask, cu = torch.arange(200) > 0, torch.tensor([0, 200], dtype=torch.int32)
    _, rounding = common.gae(
        torch.zeros(200), values, mask, cu, gamma=0.9, lam=1.0
    )  # of rewards that are all 0
    for constant in (torch.ones(200), rounding, 1 + 1e-6 * returns):
        assert math.isnan(common.explained_variance(values[mask], constant[mask]))
    assert math.isnan(common.explained_variance(values[:0], returns[:0]))

    labels, scores = (torch.rand(80, generator=g) < 0.4).float(), torch.randint(0, 9, (80,), generator=g)
    pairs = itertools.product(scores[labels == 1].tolist(), scores[labels == 0].tolist())
    wins = [(p > n) + 0.5 * (p == n) for p, n in pairs]
    assert common.auc(scores, labels) == pytest.approx(sum(wins) / len(wins))
    assert math.isnan(common.auc(scores, labels * 0)) and math.isnan(common.auc(scores / 0, labels))


# ---- Batch and JSONL ---------------------------------------------------------------------------------------


def same(a, b):
    for name in (
        "input_ids",
        "cu_seqlens",
        "response_mask",
        "row_id",
        "truncated",
        "token_level_rewards",
        "values",
    ):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None) and (x is None or torch.equal(x, y)), name


def test_select_split_and_concat_keep_rows_whole():
    batch = random_batch(9)
    batch.multi_modal_inputs = [{"pixels": torch.tensor([i])} for i in range(9)]
    same(common.concat(batch.split(4)), batch)
    assert [len(b) for b in batch.split(4)] == [4, 4, 1]
    order = [5, 0, 8]
    picked = batch.select(order)
    for b, (i, (start, end)) in enumerate(zip(order, rows_of(picked))):
        s, e = rows_of(batch)[i]
        assert torch.equal(picked.input_ids[start:end], batch.input_ids[s:e])
        assert torch.equal(picked.values[start:end], batch.values[s:e])
        assert int(picked.row_id[b]) == i and int(picked.multi_modal_inputs[b]["pixels"]) == i
    nothing = batch.select([])
    assert len(nothing) == 0 and nothing.cu_seqlens.tolist() == [0] and nothing.lengths == []
    same(common.concat([nothing, batch, nothing]), batch)
    same(batch.to("cpu"), batch)
    batch.values = None
    with pytest.raises(TypeError):  # a column is in every batch or in none
        common.concat([batch, random_batch(2)])


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"response_mask": torch.tensor([1, 1]).bool()}, "row 5: its first token cannot be an action"),
        (
            {"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)},
            "cu_seqlens must rise from 0 to the 2 tokens",
        ),
        (
            {"cu_seqlens": torch.tensor([1, 2], dtype=torch.int32)},
            "cu_seqlens must rise from 0 to the 2 tokens",
        ),
        ({"values": torch.zeros(3)}, "values has 3 entries"),
        ({"truncated": torch.zeros(2).bool()}, "truncated has 2 entries"),
    ],
)
def test_gather_refuses_a_batch_that_is_not_sound(change, fault):
    batch = dataclasses.replace(common.Batch.blank(2), row_id=torch.tensor([5]))
    assert common.gather(batch).row_id.tolist() == [5]
    with pytest.raises(ValueError, match=fault):
        common.gather(dataclasses.replace(batch, **change))


def test_gather_refuses_a_row_of_two_owners():
    batch = random_batch(4)
    same(common.gather(batch.select([2, 0, 3, 1])), batch)
    with pytest.raises(ValueError, match="row_id 1 occurs more than once"):
        common.gather(common.concat([batch, batch.select([1])]))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_jsonl_round_trip_is_exact(tmp_path_factory, seed, n):
    path = str(tmp_path_factory.mktemp("jsonl") / "rows.jsonl")
    batch = random_batch(n, seed)
    common.write_jsonl(batch, path)
    same(common.read_rows(path, None, with_values=True), batch)
    batch.values = None
    same(common.read_rows(path, None), batch)


def test_text_and_chat_rows():
    tokenizer = common.char_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    rows = [
        {"prompt": "1+1=", "response": "2", "reward": 1},
        {"messages": [{"role": "user", "content": "hi"}], "response": "ok\n", "rewards": [0, 0.5, 0, 1]},
        {"prompt": "a", "response": "bc", "reward": 2.0, "truncated": True, "extra": "ignored"},
        {"prompt": "a", "response": "bcd", "reward": 3, "response_mask": [1, 0, True, 0]},
        {"prompt": "a", "response": "b<eos>", "reward": True, "truncated": None},
    ]
    batch = common.read_rows([*map(json.dumps, rows), " "], tokenizer)
    texts = [tokenizer.decode(batch.input_ids[s:e]) for s, e in rows_of(batch)]
    assert texts == ["1+1=2<eos>", "<user>hi>ok\n<eos>", "abc", "abcd<eos>", "ab<eos>"]
    assert batch.lengths[-1] == 3 and batch.truncated.tolist() == [False, False, True, False, False]
    masks = [x.int().tolist() for x in batch.response_mask.split(batch.lengths)]
    rewards = [x.tolist() for x in batch.token_level_rewards.split(batch.lengths)]
    assert masks[0] == [0, 0, 0, 0, 1, 1] and rewards[0] == [0, 0, 0, 0, 0, 1]
    assert rewards[1][-4:] == [0, 0.5, 0, 1]
    assert masks[3] == [0, 1, 0, 1, 0] and rewards[3] == [0, 0, 0, 3, 0]  # on the last action


GOOD = {"prompt_ids": [1, 2], "response_ids": [3, 4], "reward": 1.0}
BAD_ROWS = {  # what is wrong -> how the row differs from GOOD or reads, and words of the message
    "not json": ("{", "JSON"),
    "not utf-8": (b'{"prompt": "\xff"}', "JSON"),
    "not an object": ("[1]", "must be an object"),
    "too deep": ("[" * 100_000, "JSON"),
    "half a surrogate": ('{"prompt": "\\ud800", "response": "a", "reward": 1}', "JSON"),
    "no reward": ({"reward": None}, "one of reward, rewards; has none"),
    "two prompts": ({"prompt": "a"}, "one of prompt, messages, prompt_ids; has prompt and prompt_ids"),
    "empty prompt": ({"prompt_ids": []}, "prompt_ids: "),
    "empty prompt text": ({"prompt_ids": None, "prompt": ""}, "prompt: "),
    "empty response": ({"response_ids": []}, "response_ids: "),
    "empty response text": ({"response_ids": None, "response": ""}, "response: "),
    "prompt of another type": ({"prompt_ids": None, "prompt": 7}, "prompt: must be a valid string, not 7"),
    "messages of another type": ({"prompt_ids": None, "messages": ["hi"]}, "messages: must be"),
    "no messages": ({"prompt_ids": None, "messages": []}, "messages: "),
    "no chat template": (
        {"prompt_ids": None, "messages": [{"role": "user", "content": "a"}]},
        "chat template",
    ),
    "NaN reward": ({"reward": math.nan}, "reward: must be a finite number, not nan"),
    "infinite reward": ({"reward": math.inf}, "reward: must be a finite number"),
    "huge reward": ({"reward": 10**400}, "reward: must be a finite number"),
    "reward whose square is infinite": ({"reward": 1e30}, "reward: must be less"),
    "reward as text": ({"reward": "1"}, "reward: must be a valid number, not '1'"),
    "NaN in rewards": ({"reward": None, "rewards": [0.0, math.nan]}, "rewards: must be a finite number"),
    "rewards of another length": ({"reward": None, "rewards": [1.0]}, "rewards has 1 entries"),
    "mask of another length": ({"response_mask": [1]}, "response_mask has 1 entries"),
    "mask of other things": ({"response_mask": [1, 2]}, "response_mask: must be"),
    "id out of the vocabulary": (
        {"response_ids": [3, 50]},
        "token id 50 is outside the model's vocabulary of 50",
    ),
    "negative id": ({"response_ids": [3, -1]}, "response_ids: must be"),
    "id beyond 64 bits": ({"response_ids": [3, 2**63]}, "response_ids: must be"),
    "ids of another type": ({"response_ids": [3, 1.5]}, "response_ids: must be a valid integer"),
    "ids as text": ({"response_ids": [3, "4"]}, "response_ids: must be a valid integer"),
    "too long": ({"prompt_ids": [1] * 30}, "32 tokens, more than the model's max_position_embeddings, 20"),
    "truncated of another type": ({"truncated": "no"}, "truncated: must be"),
    "images": ({"images": ["a.png"]}, "images"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_with_file_line_and_fault(name, tmp_path, capsys):
    bad, fault = BAD_ROWS[name]
    bad = json.dumps({**GOOD, **bad}) if isinstance(bad, dict) else bad
    bad = bad if isinstance(bad, bytes) else bad.encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([json.dumps(GOOD).encode(), bad, json.dumps(GOOD).encode()]))
    fields = {**common.tiny_config("tiny-qwen2"), "vocab_size": 50, "max_position_embeddings": 20}
    reader = (str(path), common.char_tokenizer(), transformers.AutoConfig.for_model(**fields))
    with pytest.raises(UserError) as error:
        common.read_rows(*reader)
    assert f"--rollouts {path}:2: " in str(error.value) and fault in str(error.value)
    assert "\n" not in str(error.value)
    assert common.read_rows(*reader, skip_bad_rows=True).row_id.tolist() == [0, 2]
    said = capsys.readouterr().out
    assert "left out 1 bad rows" in said and fault in said


@pytest.mark.parametrize(
    "text, fault, options",
    [
        (None, "--rollouts .*No such file", {}),
        ("\n", "no usable row", {}),
        ("{}\n", "no usable row", {"skip_bad_rows": True}),
        (json.dumps({**GOOD, "reward": 0, "response_mask": [0, 0]}), "none with an action", {}),
    ],
)
def test_a_missing_an_empty_and_a_hopeless_file(text, fault, options, tmp_path):
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=fault):
        common.read_rows(str(path), None, **options)


def test_values_are_read_where_they_are_asked_for():
    first = json.dumps({**GOOD, "values": [1, 2], "response_mask": [0, 1]})
    for values, fault in (
        (None, '"values"'),
        ([1, 2, 3], "values has 3 entries"),
        ([1, math.nan], "values: must"),
    ):
        with pytest.raises(UserError, match=f"toy:2: .*{fault}"):
            common.read_rows([first, json.dumps({**GOOD, "values": values})], None, with_values=True)
    assert common.read_rows([first], None).values is None
    assert common.read_rows([first], None, with_values=True).values.tolist() == [0, 0, 0, 2]


# ---- Partitioning ------------------------------------------------------------------------------------------

sizes = st.lists(st.integers(1, 60), max_size=40)


def loads(costs, parts):
    return [sum(costs[i] for i in part) for part in parts]


@settings(deadline=None)
@given(sizes, st.integers(1, 6))
def test_spread_is_a_partition_within_the_bound_of_any_greedy_one(costs, k):
    parts = critic_fsdp.spread(costs, k)
    assert len(parts) == k and sorted(itertools.chain(*parts)) == list(range(len(costs)))
    bound = sum(costs) / k + (1 - 1 / k) * max(costs, default=0)  # Graham 1966
    assert max(loads(costs, parts)) <= bound + 1e-9


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 3))
def test_spread_is_within_the_bound_of_longest_first(costs, k):
    """Graham 1969: 4/3 - 1/(3k) of the best partition, which a search through all of them finds."""
    choices = itertools.product(range(k), repeat=len(costs))
    ways = ([[i for i, p in enumerate(choice) if p == j] for j in range(k)] for choice in choices)
    best = min(max(loads(costs, way)) for way in ways)
    assert max(loads(costs, critic_fsdp.spread(costs, k))) <= best * (4 / 3 - 1 / (3 * k)) + 1e-9


@pytest.mark.parametrize("script, most", [("critic_fsdp", 1), ("critic_megatron", 4)])
@settings(deadline=None)
@given(data=st.data())
def test_ranks_make_equally_many_micro_batches_within_the_token_budget(script, most, data):
    """Every row is in one micro-batch, none is above the budget, and packed ones are half full on average."""
    lengths = data.draw(sizes)
    costs = data.draw(st.lists(st.integers(1, 999), min_size=len(lengths), max_size=len(lengths)))
    ranks, cap, multiple = (data.draw(st.integers(*ends)) for ends in ((1, 5), (60, 200), (1, most)))
    pad = data.draw(st.booleans())
    options = {"multiple": multiple} if most > 1 else {}
    table = importlib.import_module(script).micro_batches(lengths, costs, ranks, cap, pad, **options)
    counts = {len(parts) for parts in table}
    assert len(table) == ranks and len(counts) == 1 and max(counts) % multiple == 0
    assert sorted(i for parts in table for part in parts for i in part) == list(range(len(lengths)))
    for part in itertools.chain(*table):
        rows = [lengths[i] for i in part]
        assert (len(rows) * max(rows, default=0) if pad else sum(rows)) <= cap
    fullest = max(sum(loads(lengths, parts)) for parts in table)
    assert pad or max(counts) <= 1.05 * 2 * fullest / cap + 1 + multiple


def test_splitting_many_rows_that_fill_more_than_half_a_micro_batch_is_quick():
    rng = random.Random(0)
    lengths = [rng.randrange(51, 100) for _ in range(20_000)]
    [parts] = critic_fsdp.micro_batches(lengths, lengths, 1, 100)
    assert sum(map(bool, parts)) == 20_000 and len(parts) <= 1.05 * 20_000 + 1


def test_permutations_depend_on_their_key_alone():
    assert (
        common.permutation(50, 0, 3, 1) == common.permutation(50, 0, 3, 1) != common.permutation(50, 0, 3, 2)
    )
    assert sorted(common.permutation(50, 1, "rows", 0)) == list(range(50))


# ---- Attention over packed rows ----------------------------------------------------------------------------


def plain_attention(q, k, v, scale, window, softcap, sinks):
    """One sequence, query by query: q (H, L, D), k v (K, M, D); the queries stand at the last L places."""
    out, group = (
        torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=torch.float64),
        q.shape[0] // k.shape[0],
    )
    for h in range(q.shape[0]):
        for i in range(q.shape[1]):
            place = i + k.shape[1] - q.shape[1]
            keys = [j for j in range(place + 1) if not window or place - j < window]
            scores = torch.stack([(q[h, i] * k[h // group, j]).sum() for j in keys]) * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            weights = torch.cat([scores, sinks[h : h + 1]]) if sinks is not None else scores
            weights = weights.softmax(0)[: len(keys)]
            out[h, i] = sum(w * v[h // group, j] for w, j in zip(weights, keys))
    return out


def plain_packed(q, k, v, queries, keys, *options):
    """plain_attention of each sequence of a packed row: (H, T, D) -> (H, T, D)."""
    pieces = zip(q.split(queries, 1), k.split(keys, 1), v.split(keys, 1))
    return torch.cat([plain_attention(*piece, *options) for piece in pieces], 1)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap, sinks", [(None, False), (2.0, False), (None, True)])
@pytest.mark.parametrize(
    "queries, keys", [([4, 4, 1, 7, 3, 3, 3], [4, 4, 1, 7, 3, 3, 3]), ([2, 2, 1, 4], [6, 6, 3, 4])]
)
def test_packed_attention_equals_a_plain_loop(window, softcap, sinks, queries, keys):
    """Outputs and gradients; the queries of a sequence may be its last ones only."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()
    q, k, v = draw(1, 4, sum(queries), 8), draw(1, 2, sum(keys), 8), draw(1, 2, sum(keys), 8)
    s_aux = draw(4) if sinks else None
    common.Pack.layout = common.PackLayout(queries, "cpu", keys)
    out, _ = common.packed_attention(nn.Module(), q, k, v, None, 0.3, 0.0, window, softcap, s_aux=s_aux)
    assert common.Pack.kernel == ("eager" if softcap or sinks else "sdpa")
    expected = plain_packed(q[0], k[0], v[0], queries, keys, 0.3, window, softcap, s_aux)
    torch.testing.assert_close(out[0].transpose(0, 1), expected, rtol=1e-6, atol=1e-6)
    inputs = [q, k, v] + ([s_aux] if sinks else [])
    gradients = [torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected)]
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_packed_attention_refuses_what_it_would_drop():
    common.Pack.layout = common.PackLayout([4], "cpu")
    q, module = torch.zeros(1, 2, 4, 8), nn.Module()
    for extra in (
        {"attention_mask": torch.ones(4, 4)},
        {"is_causal": False},
        {"position_bias": torch.ones(4, 4)},
    ):
        with pytest.raises(UserError, match="--no-use-remove-padding"):
            common.packed_attention(module, q, q, q, **{"attention_mask": None, **extra})
    module.is_causal = False
    with pytest.raises(UserError, match="--no-use-remove-padding"):
        common.packed_attention(module, q, q, q, None)


class OnCuda(torch.Tensor):
    """A tensor on the host that says it is on CUDA."""

    is_cuda = True


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kernel, softcap", [("flash", None), ("flash", 2.0), ("varlen", None)])
def test_the_gpu_kernels_are_called_as_their_signatures_want(kernel, softcap, window, monkeypatch):
    """Without a GPU, a plain loop with the kernel's signature stands for it: shapes, order and meaning of the
    arguments give what the host computes from the same inputs."""
    queries, keys, g = [4, 1, 5], [4, 3, 7], torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, h, t, 8, generator=g, dtype=torch.float64) for h, t in ((4, 10), (2, 14), (2, 14))
    )

    def loop(q, k, v, cu_q, cu_k, scale, window_size, softcap=0.0):  # (T,H,D) each, as the kernels take them
        q, k, v = (x.as_subclass(torch.Tensor).transpose(0, 1) for x in (q, k, v))
        options = (scale, window_size[0] + 1, softcap, None)
        return plain_packed(q, k, v, cu_q.diff().tolist(), cu_k.diff().tolist(), *options).transpose(0, 1)

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p=0.0, softmax_scale=None, causal=False,
              window_size=(-1, -1), softcap=0.0):  # fmt: skip
        assert (max_q, max_k) == (5, 7) and q.is_contiguous() and q.shape == (10, 4, 8) and causal
        return loop(q, k, v, cu_q, cu_k, softmax_scale, window_size, softcap)

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert (max_q, max_k) == (5, 7) and k.shape == (14, 2, 8) and enable_gqa and window_size[1] == 0
        return loop(q, k, v, cu_q, cu_k, scale, window_size)

    monkeypatch.setattr(common, "flash_attn_varlen_func", flash if kernel == "flash" else None)
    monkeypatch.setattr(common, "varlen_attn", varlen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    layout = common.PackLayout(queries, "cpu", keys)
    expected = common.attention(layout, q, k, v, 0.3, window, softcap)
    out = common.attention(layout, *(x.as_subclass(OnCuda) for x in (q, k, v)), 0.3, window, softcap)
    assert common.Pack.kernel == kernel
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_torchs_variable_length_attention_has_the_arguments_we_use():
    known = inspect.signature(pytest.importorskip("torch.nn.attention.varlen").varlen_attn).parameters
    assert {"scale", "window_size", "enable_gqa"} <= known.keys()


# ---- FLOPs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835),
        ("NVIDIA H20", 148), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121), ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA T1000", None),
    ],
)  # fmt: skip
def test_mfu_is_of_the_devices_own_peak_or_not_known(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**31)
    host = common.setup_distributed()
    measure = lambda *where: common.performance(time.perf_counter() - 2, 10, 1e15, *where)
    found = measure(torch.device("cuda"), torch.bfloat16)
    rate = 1e15 / found["perf/time_update"] / (tflops * 1e12) if tflops else math.nan
    assert found["perf/mfu"] == pytest.approx(rate, nan_ok=True) and found["perf/peak_memory_gib"] == 2
    assert found["perf/tokens_per_second"] == pytest.approx(10 / found["perf/time_update"])
    for where in ((torch.device("cuda"), torch.float32), (host, torch.bfloat16)):
        assert math.isnan(measure(*where)["perf/mfu"])


def heads_cost(config):
    """FLOPs of one query and one key in all heads of a layer: scores and weighted sum."""
    config = config.get_text_config()
    return 4 * config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size // 4)


@pytest.mark.parametrize("name", common.TINY)
def test_flops_equal_torchs_counter(name):
    """Against FlopCounterMode on eager attention, which computes the full square: the upper half is added here."""
    config = transformers.AutoConfig.for_model(**common.tiny_config(name))
    model = transformers.AutoModel.from_config(config, attn_implementation="eager", dtype=torch.float32)
    if "moe" in name:
        model.set_experts_implementation("eager")  # the counter does not know grouped products
    length = 24
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None], use_cache=False)
    upper = 2 * heads_cost(config) * length * (length - 1) / 2
    rest = counter.get_total_flops() - common.flops_model(model, config)(length) - upper
    axes = 0 if "gpt2" in name else 3 if "vl" in name else 1
    assert rest in (0, axes * length * 8 * 2)  # the rotary table of angles, once


@needs_shared
def test_flops_follow_verls_formula_but_for_the_head_and_causality(oracle):
    case = oracle["flops"]["qwen2"]
    c, seqlens = case["config"], case["seqlens"]
    config = transformers.Qwen2Config(**c)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    head = (
        2 * 2 * c["vocab_size"] * c["hidden_size"] * sum(seqlens)
    )  # verl counts embedding and vocabulary head
    pair = 4 * c["hidden_size"] * c["num_hidden_layers"]
    noncausal = sum(pair * (n * n - n * (n + 1) / 2) for n in seqlens)
    ours = 3 * (sum(map(common.flops_model(model, config), seqlens)) + head + noncausal)
    assert ours / 1e12 == pytest.approx(case["tflops"], rel=1e-3)


def test_sliding_windows_cost_less():
    """Gemma 2 has one layer with a window and one without: against a count of the pairs in either."""
    config = transformers.AutoConfig.for_model(**{**common.tiny_config("tiny-gemma2"), "sliding_window": 4})
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    flops, cost = common.flops_model(model, config), heads_cost(config)
    pairs = lambda n, w: sum(min(i + 1, w) for i in range(n))
    for n in (1, 3, 4, 5, 40):
        assert flops(n) - n * flops(1) == cost * (pairs(n, n) + pairs(n, 4) - 2 * n)


# ---- Folders, tokenizer, toy -------------------------------------------------------------------------------


def test_a_folder_is_published_whole_and_damage_is_named(tmp_path):
    common.setup_distributed()
    folder = str(tmp_path / "step_3")
    weights, manifest = (tmp_path / "step_3" / name for name in ("actor/weights", common.MANIFEST))
    for text in ("12345", "54321"):  # the second time the folder is replaced
        with common.published(folder, keep=2) as tmp:
            (tmp_path / "step_3.tmp" / "actor").mkdir()
            (tmp_path / "step_3.tmp" / "actor" / "weights").write_text(text)
            assert tmp == f"{folder}.tmp" and (not weights.exists() or weights.read_text() == "12345")
        assert weights.read_text() == text
        common.verify(folder)
        common.verify(f"{folder}/actor")  # a part of a folder, by the manifest of the whole
    for n in (1, 2, 10):
        with common.published(str(tmp_path / f"step_{n}"), keep=2):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"step_3", "step_10"}
    with pytest.raises(RuntimeError), common.published(folder):
        raise RuntimeError("the disk is full")
    common.verify(folder)  # it is still the old one
    written = manifest.read_text()
    for damage, fault in (
        (lambda: weights.write_text("55321"), "actor/weights is not what was written"),
        (weights.unlink, "actor/weights is missing"),
        (lambda: manifest.write_text(written.replace("actor", "other")), "other/weights is missing"),
        (lambda: manifest.write_text("{}"), "no complete checkpoint here"),
        (lambda: manifest.write_text("[1]"), "no complete checkpoint here"),
        (lambda: manifest.write_text(written[:-1]), "no complete checkpoint here"),
        (manifest.unlink, "no complete checkpoint here"),
    ):
        damage()
        with pytest.raises(UserError, match=f"--resume {folder}.*{fault}"):
            common.verify(folder)


def test_a_foreign_folder_is_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(UserError, match=f"--out-dir: {tmp_path} holds something else"):
        with common.published(str(tmp_path)):
            raise AssertionError("too late")
    assert (tmp_path / "thesis.tex").exists()


def test_char_tokenizer_reads_back_what_it_wrote(tmp_path):
    tokenizer = common.char_tokenizer()
    text = "12+34=46 \n~"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]
    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == ids and again.eos_token_id == tokenizer.eos_token_id


def test_toy_rows_have_the_rule_they_promise():
    train, held_out = common.toy_rows(4000, 0), common.toy_rows(500, 0, held_out=True)
    assert train == common.toy_rows(4000, 0) != common.toy_rows(4000, 1)
    rows, others = ([json.loads(line) for line in lines] for lines in (train, held_out))
    assert not {r["prompt"] for r in rows} & {r["prompt"] for r in others}
    right = {True: [], False: []}
    for r in rows:
        a, b = map(int, r["prompt"][:-1].split("+"))
        assert r["reward"] == float(int(r["response"]) == a + b)
        right[a % 10 + b % 10 >= 10].append(r["reward"])
    mean = {carries: sum(x) / len(x) for carries, x in right.items()}
    assert mean[True] == pytest.approx(0.10, abs=0.03) and mean[False] == pytest.approx(0.95, abs=0.03)


def test_the_five_tokens_of_the_readme():
    """Its numbers, to the digits that it gives."""
    text = (ROOT / "README.md").read_text().partition("Five tokens by hand")[2].partition("\n\n| metric")[0]
    lines = re.findall(r"^\| *`?([^`|]+?)`? *\|((?: [-.\d]+ \|){5})", text, flags=re.M)
    said = {name: torch.tensor([float(x) for x in cells.split("|")[:-1]]) for name, cells in lines}
    batch = flat(torch.tensor([[0, 1, 1, 1]]))
    mask, cu = batch.response_mask, batch.cu_seqlens
    values = said["hidden states say"].roll(1) * mask  # what stands one to the left
    rewards = said["token_level_rewards"]
    advantages, returns = common.gae(rewards, values, mask, cu, gamma=1.0, lam=0.5)
    vpreds = said["vpreds"].clone().requires_grad_()
    loss_of = lambda *at: common.value_loss(vpreds, values, returns, *at, cliprange_value=0.2)
    loss, clipped = loss_of(mask, common.loss_weights(batch, "token-mean"))
    loss.backward()
    found = {
        "values": values, "advantage": advantages, "returns": returns, "its gradient": vpreds.grad,
        "TD error": common.gae(rewards, values, mask, cu, gamma=1.0, lam=0.0)[0],
        "whitened": ppo_loop.masked_whiten(advantages, mask),
        "clipped to values +- 0.2": torch.clamp(vpreds, values - 0.2, values + 0.2).detach() * mask,
        "loss": torch.stack([loss_of(torch.arange(5) == t, torch.ones(5))[0] for t in range(5)]).detach() * mask,
    }  # fmt: skip
    assert said.keys() >= found.keys()
    for name, x in found.items():
        torch.testing.assert_close(x.float(), said[name], rtol=0, atol=6e-5)
    assert float(loss.detach()) == pytest.approx(0.0447, abs=6e-5) and int(clipped) == 1
