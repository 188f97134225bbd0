"""common.py against independent computations: verl's recorded numbers, plain loops in float64, and properties."""

import dataclasses
import inspect
import itertools
import json
import math
import random
import re

import pytest
import torch
import torch.nn as nn
import transformers
from helpers import ROOT, SHARED, needs_shared, random_batch, rows_of, write_manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import common
from common import UserError


@pytest.fixture(scope="module")
def algos():
    """What verl 0.6.1 computed, see ../shared/data/README.md."""
    return torch.load(SHARED / "oracle" / "verl_0.6.1_fp32.pt", weights_only=True)["algos"]


def flat(mask, *columns):
    """Padded (B, R) columns -> flat ones behind a prompt token, mask as bool, cu_seqlens."""
    length = mask.shape[1] + 1
    pad = lambda x: torch.cat([torch.zeros(len(x), 1), x.float()], 1).flatten()
    cu_seqlens = torch.arange(len(mask) + 1, dtype=torch.int32) * length
    return pad(mask).bool(), cu_seqlens, *(pad(c) for c in columns)


def padded(x_T, like):
    """Back to (B, R)."""
    return x_T.view(len(like), -1)[:, 1:]


# ---------------------------------------------------------------------------------------------------------------------
# PPO maths
# ---------------------------------------------------------------------------------------------------------------------


@needs_shared
def test_value_loss_equals_verl(algos):
    """Four aggregation modes x four clip ranges: loss, clip fraction and gradient."""
    given_, checked = algos["vloss_in"], 0
    mask, cu, vpreds, values, returns = flat(*(given_[k] for k in ("response_mask", "vpreds", "values", "returns")))
    counts = common.loss_counts(mask, cu)
    limit = given_["vpreds"].shape[1]
    for case, expected in algos["vloss"].items():
        mode, clip = case.split("|")
        v = vpreds.clone().requires_grad_()
        weights = common.loss_weights(mask, cu, mode, counts, limit)
        loss, clipped = common.value_loss(v, values, returns, mask, weights, float(clip) if float(clip) < 1e8 else None)
        loss.backward()
        times = (
            counts.seqs if mode == "seq-mean-token-sum-norm" else 1
        )  # verl sums over sequences there, ours is a mean
        torch.testing.assert_close(loss * times, expected["loss"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(clipped / counts.tokens, expected["clipfrac"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(padded(v.grad, given_["vpreds"]) * times, expected["grad"], rtol=1e-5, atol=1e-8)
        checked += 1
    assert checked == 16


@needs_shared
def test_gae_equals_verl(algos):
    rewards, values, m = (algos["gae_in"][k] for k in ("token_level_rewards", "values", "response_mask"))
    mask, cu, r, v = flat(m, rewards * m, values)  # verl drops a reward on a masked token, ours would carry it
    for case, expected in algos["gae"].items():
        gamma, lam = map(float, case.split("|"))
        advantages, returns = common.gae(r, v, mask, cu, gamma, lam)
        torch.testing.assert_close(padded(returns, m)[m.bool()], expected["returns"][m.bool()], rtol=1e-5, atol=1e-6)
        white = common.masked_whiten(advantages, mask)  # as verl returns them
        torch.testing.assert_close(padded(white, m)[m.bool()], expected["advantages"][m.bool()], rtol=1e-5, atol=1e-6)


@needs_shared
def test_whitening_equals_verl(algos):
    given_ = algos["whiten"]
    mask = given_["mask"].bool()
    for shift in (True, False):
        white = common.masked_whiten(given_["in"].flatten(), mask.flatten(), shift_mean=shift).view_as(mask)
        torch.testing.assert_close(white[mask], given_["shift" if shift else "noshift"][mask], rtol=1e-5, atol=1e-6)
        assert (white[~mask] == 0).all()


@needs_shared
def test_kl_equals_verl(algos):
    log_probs, ref = algos["kl_in"]["logprob"], algos["kl_in"]["ref_logprob"]
    assert set(algos["kl"]) == {"kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"}
    for kind, expected in algos["kl"].items():
        torch.testing.assert_close(common.kl_penalty(log_probs, ref, kind), expected, rtol=1e-6, atol=1e-7)
        p = log_probs.clone().requires_grad_()
        straight = common.kl_penalty(p, ref, f"{kind}+")
        torch.testing.assert_close(straight, expected, rtol=1e-5, atol=1e-6)
        straight.sum().backward()
        torch.testing.assert_close(p.grad, log_probs - ref, rtol=1e-5, atol=1e-6)  # d/dp of (p - q)^2 / 2


@needs_shared
def test_adaptive_kl_equals_verl(algos):
    given_, trace = algos["adaptive_kl"], []
    coef = given_["init"]
    for kl, n in given_["updates"]:
        coef = common.next_kl_coef(coef, kl, n, given_["target"], given_["horizon"])
        trace.append(coef)
    assert trace == pytest.approx(given_["trace"], rel=1e-12)
    assert common.next_kl_coef(0.3, 5.0, 64) == 0.3


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
row = st.tuples(st.lists(token, min_size=0, max_size=20), number)


@settings(max_examples=150, deadline=None)
@given(st.lists(row, min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_gae_equals_a_plain_loop(rows, gamma, lam, lam_policy, bootstrapped):
    rewards, values, mask, lengths, expected_a, expected_r = [], [], [], [], [], []
    for tokens, bootstrap in rows:
        tokens = [(0.0, 0.0, False), *tokens]  # a prompt
        r, v, m = (list(column) for column in zip(*tokens, strict=True))
        expected_r += plain_gae(r, v, m, gamma, lam, bootstrap * bootstrapped)[1]
        expected_a += plain_gae(r, v, m, gamma, lam_policy, bootstrap * bootstrapped)[0]
        rewards, values, mask, lengths = rewards + r, values + v, mask + m, [*lengths, len(tokens)]
    tail = torch.tensor([b for _, b in rows]) if bootstrapped else None
    cu, mask = common.cumulative(torch.tensor(lengths)), torch.tensor(mask)
    advantages, returns = common.gae(
        torch.tensor(rewards), torch.tensor(values), mask, cu, gamma, lam, lam_policy, bootstrap_B=tail
    )
    torch.testing.assert_close(advantages.double(), torch.tensor(expected_a).double(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(returns.double(), torch.tensor(expected_r).double(), rtol=1e-6, atol=1e-5)


def test_gae_with_one_lambda_a_row_and_length_adaptive_lambda():
    batch = random_batch(7, seed=3)
    lam_B = common.length_adaptive_lam(batch.response_mask, batch.cu_seqlens, alpha=0.2)
    for b, (start, end) in enumerate(rows_of(batch)):
        actions = int(batch.response_mask[start:end].sum())
        assert float(lam_B[b]) == pytest.approx(max(0.0, 1 - 1 / (0.2 * max(actions, 1))))
    args = (batch.token_level_rewards, batch.values, batch.response_mask, batch.cu_seqlens, 0.97, 1.0)
    advantages, returns = common.gae(*args, lam_policy=lam_B)
    for b, (start, end) in enumerate(rows_of(batch)):
        alone, _ = common.gae(*args[:-1], lam=float(lam_B[b]))
        torch.testing.assert_close(advantages[start:end], alone[start:end], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(returns, common.gae(*args)[1], rtol=0, atol=0)  # the critic's lambda is its own


def test_rewards_on_masked_tokens_are_carried_not_lost():
    mask = torch.tensor([0, 0, 1, 0, 1, 0, 0, 0, 0]).bool()
    rewards = torch.tensor([0, 1.0, 2.0, 4.0, 8.0, 16.0, 0, 32.0, 64.0])
    cu = torch.tensor([0, 6, 9], dtype=torch.int32)  # the second row has no action: nothing to carry to
    carried = common.carry_rewards(rewards, mask, cu)
    assert carried.tolist() == [0, 0, 1 + 2 + 4, 0, 8 + 16, 0, 0, 0, 0]


def test_whitening_of_one_and_of_no_token():
    x = torch.tensor([3.0, 5.0])
    assert common.masked_whiten(x, torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert common.masked_whiten(x, torch.tensor([False, False])).tolist() == [0.0, 0.0]


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


@pytest.mark.parametrize("mode", common.LOSS_AGG_MODES)
def test_loss_weights_equal_a_plain_loop(mode):
    batch = random_batch(11, seed=5)
    rows = [[t for t in range(s, e) if batch.response_mask[t]] for s, e in rows_of(batch)]
    n_tokens, n_seqs = sum(map(len, rows)), sum(bool(r) for r in rows)
    assert common.loss_counts(batch.response_mask, batch.cu_seqlens) == (n_tokens, n_seqs)
    expected = torch.zeros(len(batch.input_ids))
    for actions in rows:
        for t in actions:
            expected[t] = {
                "token-mean": 1 / n_tokens,
                "seq-mean-token-sum": 1 / n_seqs,
                "seq-mean-token-mean": 1 / n_seqs / len(actions),
                "seq-mean-token-sum-norm": 1 / n_seqs / 33,
            }[mode]
    weights = common.loss_weights(batch.response_mask, batch.cu_seqlens, mode, common.LossCounts(n_tokens, n_seqs), 33)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)


def test_explained_variance_and_auc_equal_plain_formulas():
    g = torch.Generator().manual_seed(0)
    returns, noise = torch.randn(200, generator=g), torch.randn(200, generator=g)
    values, mask = returns + 0.5 * noise + 7, torch.rand(200, generator=g) < 0.7
    halves = [common.moments(values[s], returns[s], mask[s]) for s in (slice(0, 90), slice(90, 200))]
    expected = 1 - (returns - values)[mask].double().var() / returns[mask].double().var()
    assert common.explained_variance(sum(halves)) == pytest.approx(float(expected), rel=1e-6)
    assert math.isnan(common.explained_variance(common.moments(values, torch.ones(200), mask)))
    assert math.isnan(common.explained_variance(common.moments(values, returns, mask & False)))
    cu = torch.tensor([0, 200], dtype=torch.int32)
    _, rounding = common.gae(torch.zeros(200), values, mask, cu, gamma=0.9, lam=1.0)  # of rewards that are all 0
    assert math.isnan(common.explained_variance(common.moments(values, rounding, mask)))
    nearly = 1 + 1e-6 * returns  # of 0 and 1 less a tiny penalty, say: the report and the metrics draw one line
    group = torch.zeros(int(mask.sum()), dtype=torch.int64)
    assert math.isnan(common.explained_variance(common.moments(values, nearly, mask)))
    assert common.explained_variance_by(values[mask], nearly[mask], group, 1).isnan().all()

    labels, scores = (torch.rand(80, generator=g) < 0.4).float(), torch.randint(0, 9, (80,), generator=g)
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels == 1].tolist() for n in scores[labels == 0].tolist()]
    assert common.auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))
    assert math.isnan(common.auc(scores, labels * 0))


def test_values_of_actions_are_read_one_token_earlier():
    v, mask = torch.arange(6.0) + 10, torch.tensor([0, 0, 1, 1, 0, 1]).bool()
    assert common.values_of_actions(v, mask).tolist() == [0, 0, 11, 12, 0, 14]
    cu = torch.tensor([0, 4, 5, 6], dtype=torch.int32)
    assert common.last_actions(mask, cu).tolist() == [3, -1, 5]


# ---------------------------------------------------------------------------------------------------------------------
# Batch and JSONL
# ---------------------------------------------------------------------------------------------------------------------


def same(a, b):
    for name in ("input_ids", "cu_seqlens", "response_mask", "row_id", "truncated", "token_level_rewards", "values"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None) and (x is None or torch.equal(x, y)), name


def test_select_split_and_concat_keep_rows_whole():
    batch = random_batch(9)
    batch.multi_modal_inputs = [{"pixels": torch.tensor([i])} for i in range(9)]
    same(common.concat(batch.split(4)), batch)
    assert [len(b) for b in batch.split(4)] == [4, 4, 1]
    order = [5, 0, 8]
    picked = batch.select(order)
    for b, (i, (start, end)) in enumerate(zip(order, rows_of(picked), strict=True)):
        s, e = rows_of(batch)[i]
        assert torch.equal(picked.input_ids[start:end], batch.input_ids[s:e])
        assert torch.equal(picked.values[start:end], batch.values[s:e])
        assert int(picked.row_id[b]) == i and int(picked.multi_modal_inputs[b]["pixels"]) == i
    nothing = batch.select([])
    assert len(nothing) == 0 and nothing.cu_seqlens.tolist() == [0] and nothing.lengths == []
    same(common.concat([nothing, batch, nothing]), batch)
    same(batch.to("cpu"), batch)
    batch.values = None
    with pytest.raises(ValueError, match="column values"):
        common.concat([batch, random_batch(2)])


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"response_mask": torch.tensor([1, 1]).bool()}, "row 5: its first token cannot be an action"),
        ({"response_mask": torch.tensor([0, 1])}, "response_mask must be bool"),
        ({"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)}, "cu_seqlens must rise from 0 to the 2 tokens"),
        ({"cu_seqlens": torch.tensor([1, 2], dtype=torch.int32)}, "cu_seqlens must rise from 0 to the 2 tokens"),
        ({"values": torch.zeros(3)}, "values has 3 entries for 2 tokens"),
        ({"truncated": torch.zeros(2).bool()}, "truncated has 2 entries for 1 rows"),
    ],
)
def test_gather_refuses_a_batch_that_is_not_sound(change, fault):
    batch = common.Batch(
        input_ids=torch.tensor([1, 2]),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        response_mask=torch.tensor([False, True]),
        row_id=torch.tensor([5]),
        truncated=torch.tensor([False]),
    )
    assert common.gather(batch).row_id.tolist() == [5]
    with pytest.raises(ValueError, match=fault):
        common.gather(dataclasses.replace(batch, **change))


def test_gather_refuses_a_row_of_two_owners():
    batch = random_batch(4)
    same(common.gather(batch.select([2, 0, 3, 1])), batch)
    with pytest.raises(ValueError, match="row_id 1 stands in the batch more than once"):
        common.gather(common.concat([batch, batch.select([1])]))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_jsonl_round_trip_is_exact(tmp_path_factory, seed, n):
    path = tmp_path_factory.mktemp("jsonl") / "rows.jsonl"
    batch = random_batch(n, seed)
    common.write_jsonl(batch, path)
    same(common.read_jsonl(path, with_values=True), batch)
    batch.values = None
    same(common.read_jsonl(path), batch)


def test_text_and_chat_rows(tmp_path):
    tokenizer = common.char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    rows = [
        {"prompt": "1+1=", "response": "2", "reward": 1},
        {"messages": [{"role": "user", "content": "hi"}], "response": "ok\n", "rewards": [0, 0.5, 0, 1]},
        {"prompt": "a", "response": "bc", "reward": 2.0, "truncated": True, "extra": "ignored"},
        {"prompt_ids": [5], "response": "bcd", "reward": 3, "response_mask": [1, 0, True, 0]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    batch = common.read_jsonl(path, tokenizer=tokenizer)
    texts = [tokenizer.decode(batch.input_ids[s:e]) for s, e in rows_of(batch)]
    assert texts[:3] == ["1+1=2<eos>", "<user>hi>ok\n<eos>", "abc"] and texts[3].endswith("bcd<eos>")
    assert batch.response_mask.int().split(batch.lengths)[0].tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.token_level_rewards.split(batch.lengths)[0].tolist() == [0, 0, 0, 0, 0, 1]
    assert batch.token_level_rewards.split(batch.lengths)[1][-4:].tolist() == [0, 0.5, 0, 1]
    assert batch.response_mask.int().split(batch.lengths)[3].tolist() == [0, 1, 0, 1, 0]
    assert batch.token_level_rewards.split(batch.lengths)[3].tolist() == [0, 0, 0, 3, 0]  # carried to the last action
    assert batch.truncated.tolist() == [False, False, True, False]


GOOD = {"prompt_ids": [1, 2], "response_ids": [3, 4], "reward": 1.0}
BAD_ROWS = {
    "not json": ("{", "not JSON"),
    "not utf-8": (b'{"prompt": "\xff"}', "not JSON"),
    "not an object": ("[1]", "a row is a JSON object"),
    "too deep": ("[" * 100_000, "not JSON"),
    "no reward": ({"reward": None}, "needs exactly one of reward, rewards; has none"),
    "two prompts": ({"prompt": "a"}, "needs exactly one of prompt, messages, prompt_ids; has prompt and prompt_ids"),
    "empty prompt": ({"prompt_ids": []}, "empty prompt"),
    "empty prompt text": ({"prompt_ids": None, "prompt": ""}, "empty prompt"),
    "empty response": ({"response_ids": []}, "empty response"),
    "empty response text": ({"response_ids": None, "response": ""}, "empty response"),
    "prompt of another type": ({"prompt_ids": None, "prompt": 7}, "prompt must be text, not 7"),
    "half a surrogate": ('{"prompt": "\\ud800", "response": "a", "reward": 1}', "surrogate"),
    "messages of another type": ({"prompt_ids": None, "messages": ["hi"]}, 'messages must be a list of {"role"'),
    "no messages": ({"prompt_ids": None, "messages": []}, 'messages must be a list of {"role"'),
    "a reward that nothing earned": ({"response_mask": [0, 0]}, "no action that could have earned it"),
    "no chat template": ({"prompt_ids": None, "messages": [{"role": "user", "content": "a"}]}, "chat template"),
    "NaN reward": ({"reward": math.nan}, "reward must be a finite number, not nan"),
    "infinite reward": ({"reward": math.inf}, "reward must be a finite number"),
    "huge reward": ({"reward": 10**400}, "reward must be a finite number"),
    "reward as text": ({"reward": "1"}, "reward must be a finite number, not '1'"),
    "NaN in rewards": ({"reward": None, "rewards": [0.0, math.nan]}, "rewards must hold finite numbers, not nan"),
    "rewards of another length": (
        {"reward": None, "rewards": [1.0]},
        "rewards has 1 entries, the response has 2 tokens",
    ),
    "mask of another length": ({"response_mask": [1]}, "response_mask has 1 entries, the response has 2 tokens"),
    "mask of other things": ({"response_mask": [1, 2]}, "response_mask must hold true and false"),
    "id out of the vocabulary": ({"response_ids": [3, 50]}, "token id 50 is outside the model's vocabulary of 50"),
    "negative id": ({"response_ids": [3, -1]}, "token id -1 is outside"),
    "ids of another type": ({"response_ids": [3, 1.5]}, "response_ids must be a list of whole numbers"),
    "too long": ({"prompt_ids": [1] * 30}, "32 tokens, longer than the model's max_position_embeddings, 20"),
    "truncated of another type": ({"truncated": "no"}, "truncated must be true or false"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_with_file_line_and_fault(name, tmp_path, capsys):
    change, fault = BAD_ROWS[name]
    bad = {k: v for k, v in {**GOOD, **change}.items()} if isinstance(change, dict) else change
    bad = json.dumps(bad).encode() if isinstance(bad, dict) else bad if isinstance(bad, bytes) else bad.encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + bad + b"\n" + json.dumps(GOOD).encode())
    options = dict(tokenizer=common.char_tokenizer(), vocab_size=50, max_length=20)
    with pytest.raises(UserError) as error:
        common.read_jsonl(path, **options)
    assert f"{path}:2: " in str(error.value) and fault in str(error.value) and "\n" not in str(error.value)
    batch = common.read_jsonl(path, **options, skip_bad_rows=True)
    assert batch.row_id.tolist() == [0, 2]
    assert "left out 1 bad rows of 3" in capsys.readouterr().out


def test_a_missing_an_empty_and_a_hopeless_file(tmp_path):
    with pytest.raises(UserError, match="--rollouts .*nowhere.jsonl: No such file"):
        common.read_jsonl(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="Is a directory"):
        common.read_jsonl(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(UserError, match="no usable row"):
        common.read_jsonl(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="no usable row"):
        common.read_jsonl(tmp_path / "rows.jsonl", skip_bad_rows=True)
    (tmp_path / "rows.jsonl").write_text(json.dumps({**GOOD, "reward": 0, "response_mask": [0, 0]}))
    with pytest.raises(UserError, match="no row has an action"):
        common.read_jsonl(tmp_path / "rows.jsonl")


def test_values_are_read_where_they_are_asked_for(tmp_path):
    path = tmp_path / "rows.jsonl"
    for values, fault in (
        (None, "no values, which are asked for"),
        ([1, 2, 3], "values has 3 entries, the response has 2 tokens"),
        ([1, math.nan], "values must hold finite numbers, not nan"),
    ):
        path.write_text(json.dumps({**GOOD, "values": [1, 2]}) + "\n" + json.dumps({**GOOD, "values": values}))
        with pytest.raises(UserError, match=f"rows.jsonl:2: {fault}"):
            common.read_jsonl(path, with_values=True)
        assert common.read_jsonl(path).values is None
    path.write_text(json.dumps({**GOOD, "values": [1, 2], "response_mask": [0, 1]}))
    assert common.read_jsonl(path, with_values=True).values.tolist() == [0, 0, 0, 2]


def test_a_response_is_closed_once(tmp_path):
    tokenizer, path = common.char_tokenizer(), tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b<eos>", "reward": 1, "truncated": None}))
    assert common.read_jsonl(path, tokenizer=tokenizer).input_ids.tolist() == tokenizer("ab<eos>")["input_ids"]
    assert len(tokenizer("ab<eos>")["input_ids"]) == 3


# ---------------------------------------------------------------------------------------------------------------------
# Partitioning
# ---------------------------------------------------------------------------------------------------------------------

lengths_ = st.lists(st.integers(1, 60), max_size=40)


@settings(deadline=None)
@given(lengths_, st.integers(1, 6))
def test_balance_is_a_partition_within_the_bound_of_any_greedy_one(costs, k):
    parts = common.balance(costs, k)
    assert len(parts) == k and sorted(i for p in parts for i in p) == list(range(len(costs)))
    fullest = max(sum(costs[i] for i in p) for p in parts)
    assert fullest <= sum(costs) / k + (1 - 1 / k) * max(costs, default=0) + 1e-9  # Graham 1966


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 3))
def test_balance_is_within_the_bound_of_longest_first(costs, k):
    """Graham 1969: 4/3 - 1/(3k) of the best partition, which a search through all of them finds."""
    choices = itertools.product(range(k), repeat=len(costs))
    best = min(
        max(sum(c for c, p in zip(costs, choice, strict=True) if p == j) for j in range(k)) for choice in choices
    )
    assert max(sum(costs[i] for i in p) for p in common.balance(costs, k)) <= best * (4 / 3 - 1 / (3 * k)) + 1e-9


@settings(deadline=None)
@given(lengths_, st.integers(60, 200), st.booleans(), st.integers(1, 8))
def test_token_budget_is_a_hard_cap(lengths, cap, pad, at_least):
    parts = common.split_by_tokens(lengths, cap, pad, at_least)
    assert sorted(i for p in parts for i in p) == list(range(len(lengths))) and len(parts) >= at_least
    for part in parts:
        rows = [lengths[i] for i in part]
        assert (len(rows) * max(rows, default=0) if pad else sum(rows)) <= cap
        assert rows == sorted(rows, reverse=True)
    if not pad:  # best fit leaves no two parts that would go into one
        assert len(parts) <= max(at_least, 2 * sum(lengths) / cap + 1)


@settings(deadline=None)
@given(
    st.lists(lengths_, min_size=1, max_size=5),
    st.integers(60, 200),
    st.one_of(st.none(), st.integers(1, 7)),
    st.booleans(),
    st.integers(1, 4),
)
def test_all_ranks_make_the_same_number_of_micro_batches(shares, cap, size, pad, multiple):
    plan = common.micro_batches(shares, cap, size, pad, multiple)
    assert len({len(parts) for parts in plan}) == 1 and len(plan) == len(shares)
    assert len(plan[0]) % multiple == 0
    assert len(plan[0]) - multiple < len(common.micro_batches(shares, cap, size, pad)[0])
    for lengths, parts in zip(shares, plan, strict=True):
        assert sorted(i for p in parts for i in p) == list(range(len(lengths)))
        for part in parts:
            rows = [lengths[i] for i in part]
            tokens = len(rows) * max(rows, default=0) if pad else sum(rows)
            assert len(part) <= size if size else tokens <= cap


def test_splitting_many_rows_that_fill_more_than_half_a_micro_batch_is_quick():
    rng = random.Random(0)
    lengths = [rng.randrange(51, 100) for _ in range(20_000)]
    assert len(common.split_by_tokens(lengths, 100)) == 20_000


def test_permutations_depend_on_their_key_alone():
    assert common.permutation(50, 0, 3, 1) == common.permutation(50, 0, 3, 1) != common.permutation(50, 0, 3, 2)
    assert sorted(common.permutation(50, 1, "rows", 0)) == list(range(50))


# ---------------------------------------------------------------------------------------------------------------------
# Attention over packed rows
# ---------------------------------------------------------------------------------------------------------------------


def plain_attention(q, k, v, scale, window, softcap, sinks):
    """One sequence in float64, query by query: q (H, L, D), k v (K, M, D); the queries stand at the last L places."""
    out, group = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=torch.float64), q.shape[0] // k.shape[0]
    for h in range(q.shape[0]):
        for i in range(q.shape[1]):
            place = i + k.shape[1] - q.shape[1]
            keys = [j for j in range(place + 1) if not window or place - j < window]
            scores = torch.stack([(q[h, i] * k[h // group, j]).sum() for j in keys]) * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            weights = torch.cat([scores, sinks[h : h + 1]]) if sinks is not None else scores
            weights = weights.softmax(0)[: len(keys)]
            out[h, i] = sum(w * v[h // group, j] for w, j in zip(weights, keys, strict=True))
    return out


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap, sinks", [(None, False), (2.0, False), (None, True)])
@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_packed_attention_equals_a_plain_loop(window, softcap, sinks, kernel):
    g = torch.Generator().manual_seed(0)
    lengths, heads, kv_heads = [4, 4, 1, 7, 3, 3, 3], 4, 2
    draw = lambda h: torch.randn(1, h, sum(lengths), 8, generator=g, dtype=torch.float64).requires_grad_()
    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    s_aux = torch.randn(heads, generator=g, dtype=torch.float64).requires_grad_() if sinks else None
    common.set_pack(lengths, "cpu", kernel=kernel)
    out, _ = common.packed_attention(nn.Module(), q, k, v, None, 0.3, 0.0, window, softcap, s_aux=s_aux)
    assert common.Pack.used == ("eager" if softcap or sinks or kernel == "eager" else "sdpa")
    pieces = [x[0].split(lengths, 1) for x in (q, k, v)]
    expected = torch.cat([plain_attention(*p, 0.3, window, softcap, s_aux) for p in zip(*pieces, strict=True)], 1)
    torch.testing.assert_close(out[0].transpose(0, 1), expected, rtol=1e-6, atol=1e-6)  # softmax is float32 in eager
    inputs = [q, k, v] + ([s_aux] if sinks else [])
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 3])
def test_queries_may_be_the_last_of_their_sequence(kernel, window):
    g, queries, keys = torch.Generator().manual_seed(0), [2, 2, 1, 4], [6, 6, 3, 4]
    draw = lambda h, t: torch.randn(1, h, t, 8, generator=g, dtype=torch.float64)
    q, k, v = draw(4, sum(queries)), draw(2, sum(keys)), draw(2, sum(keys))
    row = common.pack_row(queries, "cpu", key_lengths=keys)
    assert row.runs == [(0, 2, 0, 6, 2), (4, 1, 12, 3, 1), (5, 4, 15, 4, 1)]
    assert row.cu_k.tolist() == [0, 6, 12, 15, 19] and (row.longest_q, row.longest_k) == (4, 6)
    out = common.ATTENTION[kernel](row, q, k, v, 0.3, window)
    pieces = zip(q[0].split(queries, 1), k[0].split(keys, 1), v[0].split(keys, 1), strict=True)
    expected = torch.cat([plain_attention(*p, 0.3, window, None, None) for p in pieces], 1)
    torch.testing.assert_close(out[0], expected, rtol=1e-6, atol=1e-6)


def test_packed_attention_refuses_what_it_would_drop():
    common.set_pack([4], "cpu")
    q, module = torch.zeros(1, 2, 4, 8), nn.Module()
    for extra in ({"attention_mask": torch.ones(4, 4)}, {"is_causal": False}, {"position_bias": torch.ones(4, 4)}):
        with pytest.raises(UserError, match="--no-use-remove-padding"):
            common.packed_attention(module, q, q, q, **{"attention_mask": None, **extra})
    module.is_causal = False
    with pytest.raises(UserError, match="--no-use-remove-padding"):
        common.packed_attention(module, q, q, q, None)


def test_a_kernel_that_cannot_serve_is_refused(monkeypatch):
    q = torch.zeros(1, 2, 4, 8)
    monkeypatch.setattr(common, "flash_attn_varlen_func", lambda: None)
    sinks, softcap = {"s_aux": torch.zeros(2)}, {"softcap": 3.0}
    for kernel, extra in (("flash", {}), ("varlen", {}), ("sdpa", softcap), ("sdpa", sinks)):
        common.set_pack([4], "cpu", kernel=kernel)
        with pytest.raises(UserError, match=f"--attn-implementation {kernel}: cannot serve this model here"):
            common.packed_attention(nn.Module(), q, q, q, None, **extra)
    monkeypatch.setattr(common, "flash_attn_varlen_func", None)
    common.set_pack([4], "cpu", kernel="flash")
    with pytest.raises(UserError, match="flash: flash-attn is not installed; auto would take sdpa"):
        common.packed_attention(nn.Module(), q, q, q, None)


def by_sequence(q, k, v, cu_q, cu_k, **options):
    """What the variable-length kernels promise, in plain torch: (T,H,D) -> (T,H,D), causal within each sequence."""
    window = options.get("window_size", (-1, -1))
    assert window[1] == 0 or options.get("causal"), "not causal"
    scale = options.get("softmax_scale", options.get("scale"))
    cuts = zip((q, k, v), (cu_q, cu_k, cu_k), strict=True)
    pieces = [x.transpose(0, 1).split(cu.diff().tolist(), 1) for x, cu in cuts]
    back = window[0] + 1 if window[0] >= 0 else None
    outs = [plain_attention(*p, scale, back, options.get("softcap") or None, None) for p in zip(*pieces, strict=True)]
    return torch.cat(outs, 1).transpose(0, 1).to(q.dtype)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kernel, grouped", [("flash", True), ("varlen", True), ("varlen", False)])
def test_the_gpu_kernels_are_called_as_their_signatures_want(kernel, grouped, window, monkeypatch):
    """No GPU here: a plain function stands for the kernel and checks shapes, order and meaning of the arguments."""
    queries, keys, g = [4, 1, 5], [4, 3, 7], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, t, 8, generator=g, dtype=torch.float64) for h, t in ((4, 10), (2, 14), (2, 14)))

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p=0.0, softmax_scale=None, causal=False,
              window_size=(-1, -1), softcap=0.0):  # fmt: skip
        assert (max_q, max_k) == (5, 7) and q.is_contiguous() and q.shape == (10, 4, 8)
        return by_sequence(q, k, v, cu_q, cu_k, softmax_scale=softmax_scale, causal=causal, window_size=window_size)

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert k.shape[1] == (2 if enable_gqa else 4) and enable_gqa == grouped
        return by_sequence(q, k, v, cu_q, cu_k, scale=scale, window_size=window_size)

    monkeypatch.setattr(common, "flash_attn_varlen_func", flash)
    monkeypatch.setattr(common, "varlen_attn", varlen)
    monkeypatch.setattr(common, "VARLEN_GROUPS_HEADS", grouped)
    row = common.pack_row(queries, "cpu", key_lengths=keys)
    out = common.ATTENTION[kernel](row, q, k, v, 0.3, window)
    torch.testing.assert_close(out, common.ATTENTION["eager"](row, q, k, v, 0.3, window), rtol=1e-6, atol=1e-6)


def test_torchs_variable_length_attention_has_the_arguments_we_use():
    known = inspect.signature(pytest.importorskip("torch.nn.attention.varlen").varlen_attn).parameters
    assert {"scale", "window_size"} <= known.keys() and ("enable_gqa" in known) == common.VARLEN_GROUPS_HEADS


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835),
        ("NVIDIA H20", 148), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121), ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA T1000", None),
    ],
)  # fmt: skip
def test_peak_rates_are_those_of_the_device_and_no_others(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert common.device_peak_flops(torch.device("cuda")) == (tflops and tflops * 1e12)
    assert common.device_peak_flops(torch.device("cpu")) is None


# ---------------------------------------------------------------------------------------------------------------------
# FLOPs, folders, tokenizer, toy
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", common.TINY)
def test_flops_equal_torchs_counter(name):
    """Against FlopCounterMode on eager attention, which computes the full square: so the causal half is added back."""
    config = transformers.AutoConfig.for_model(**common.tiny_config(name, 50))
    model = transformers.AutoModel.from_config(config, attn_implementation="eager", dtype=torch.float32)
    if "moe" in name:
        model.set_experts_implementation("eager")  # the counter does not know grouped products
    flops, length = common.flops_model(model, config), 24
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None], use_cache=False)
    (pair, _, full), (_, _, sliding) = flops.per_pair
    square = flops.per_token * length + pair * (full + sliding) * length**2
    counted = counter.get_total_flops()
    axes = 0 if "gpt2" in name else 3 if "vl" in name else 1
    rotary = axes * length * 8 * 2  # the table of angles, once
    assert counted - square in (0, rotary), (counted, square)


@needs_shared
def test_flops_follow_verls_formula_but_for_the_head_and_causality():
    recorded = torch.load(SHARED / "oracle" / "verl_0.6.1_fp32.pt", weights_only=True)["flops"]
    case = recorded["qwen2"]
    c, seqlens = case["config"], case["seqlens"]
    config = transformers.Qwen2Config(**c)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    flops = common.flops_model(model, config)
    head = 2 * 2 * c["vocab_size"] * c["hidden_size"] * sum(seqlens)  # verl counts embedding and vocabulary head
    (pair, _, layers), _ = flops.per_pair
    noncausal = sum(pair * layers * (n * n - n * (n + 1) / 2) for n in seqlens)
    ours = 3 * (sum(map(flops.forward_flops, seqlens)) + head + noncausal)
    assert ours / 1e12 == pytest.approx(case["tflops"], rel=1e-3)


def test_sliding_windows_cost_less():
    flops = common.FlopsModel(0.0, ((1.0, None, 1), (1.0, 4, 1)))
    pairs = lambda n, w: sum(min(i + 1, w) for i in range(n))
    for n in (1, 3, 4, 5, 40):
        assert flops.forward_flops(n) == pairs(n, n) + pairs(n, 4)


def test_a_damaged_folder_is_named(tmp_path):
    folder = tmp_path / "checkpoint"
    with pytest.raises(UserError, match="--resume .*no complete checkpoint here"):
        common.check_complete(folder, "--resume")
    folder.mkdir()
    (folder / "weights").write_bytes(b"12345")
    write_manifest(folder)
    common.check_complete(folder, "--resume")
    (folder / "weights").write_bytes(b"123")
    with pytest.raises(UserError, match="weights has 3 bytes instead of 5"):
        common.check_complete(folder, "--resume")
    (folder / "weights").unlink()
    with pytest.raises(UserError, match="weights is missing"):
        common.check_complete(folder, "--resume")
    (folder / common.MANIFEST).write_text(json.dumps({"format": 2, "files": {}}, indent=1))
    with pytest.raises(UserError, match="has format 2, this code reads 1; use the code that wrote it"):
        common.check_complete(folder, "--resume")
    (folder / common.MANIFEST).write_text("{")
    with pytest.raises(UserError, match="no complete checkpoint here"):
        common.check_complete(folder, "--resume")
    (folder / common.MANIFEST).write_text("[1]")
    (tmp_path / "checkpoint.old").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint here .*checkpoint.old is the one before it"):
        common.check_complete(folder, "--resume")


def test_an_export_that_would_lose_a_layer_of_a_fork_says_so(tmp_path):
    state = {"model.norm.weight": torch.ones(4), "score.weight": torch.ones(1, 4), "score.bias": torch.ones(1)}
    for lost, head in (("mlp.0.weight", state), ("score.0.weight", {"model.norm.weight": torch.ones(4)})):
        with pytest.raises(UserError, match=f"no place for {lost}; change common.save_hf"):
            common.save_hf({**head, lost: torch.ones(1)}, None, None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(UserError, match=f"--out-dir {tmp_path}: holds something else"):
        with common.complete_or_absent(tmp_path):
            raise AssertionError("too late")
    assert (tmp_path / "thesis.tex").exists()
    common.check_replaceable(tmp_path / "new", "--out-dir")
    (tmp_path / "empty").mkdir()
    common.check_replaceable(tmp_path / "empty", "--out-dir")


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
    parse = lambda lines: [json.loads(line) for line in lines]
    assert not {r["prompt"] for r in parse(train)} & {r["prompt"] for r in parse(held_out)}
    right = {True: [], False: []}
    for r in parse(train):
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
    mask, cu = torch.tensor([0, 0, 1, 1, 1]).bool(), torch.tensor([0, 5], dtype=torch.int32)
    values = common.values_of_actions(said["hidden states say"], mask)
    rewards = said["token_level_rewards"]
    advantages, returns = common.gae(rewards, values, mask, cu, gamma=1.0, lam=0.5)
    vpreds = said["vpreds"].clone().requires_grad_()
    weights = common.loss_weights(mask, cu, "token-mean", common.loss_counts(mask, cu))
    loss, clipped = common.value_loss(vpreds, values, returns, mask, weights, cliprange_value=0.2)
    loss.backward()
    found = {
        "values": values, "advantage": advantages, "returns": returns, "its gradient": vpreds.grad,
        "TD error": common.gae(rewards, values, mask, cu, gamma=1.0, lam=0.0)[0],
        "whitened": common.masked_whiten(advantages, mask),
        "clipped to values +- 0.2": torch.clamp(vpreds, values - 0.2, values + 0.2).detach() * mask,
        "loss": torch.stack([
            common.value_loss(vpreds, values, returns, torch.arange(5) == t, torch.ones(5), cliprange_value=0.2)[0]
            for t in range(5)
        ]).detach() * mask,
    }  # fmt: skip
    assert said.keys() >= found.keys()
    for name, x in found.items():
        torch.testing.assert_close(x.float(), said[name], rtol=0, atol=6e-5)
    assert float(loss.detach()) == pytest.approx(0.0447, abs=6e-5) and int(clipped) == 1
