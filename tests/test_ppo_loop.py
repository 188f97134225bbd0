"""ppo_loop.py on one process: policy loss, actor, rollout, environment, rewards, advantages, prompts, flags, phases.

What it computes is compared with plain loops over scalars, or with transformers one unpacked row after another.
"""

import collections
import copy
import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import time

import numpy
import pytest
import torch
import transformers
from helpers import SHARED, needs_shared, random_batch, rows_of
from torch.utils._python_dispatch import TorchDispatchMode

import common
import critic_fsdp
import ppo_loop
from common import UserError
from ppo_loop import ActorConfig, HFRollout, PolicyWorker, Prompt, Reply

KINDS = ("tiny-qwen2", "tiny-llama", "tiny-gemma2", "tiny-gpt2", "tiny-qwen3-moe")
SHARP = '{"initializer_range": 0.1}'  # the usual 0.02 makes every token as likely as the next, and hides mistakes

WINDOW = '{"initializer_range": 0.1, "sliding_window": 6}'


def policy(kind="tiny-qwen2", temperature=1.0, trains=True, override_config=SHARP, **fields):
    """A PolicyWorker on a group of one."""
    config = ActorConfig(model=kind, **{"lr": 1e-3, "override_config": override_config, **fields})
    tokenizer = common.load_tokenizer(config)
    model_config = common.load_model_config(config, tokenizer)
    return PolicyWorker(config, model_config, common.setup_distributed(), temperature, trains)


def plain(w, dtype=torch.float32):
    """The same weights in a model of transformers, which knows nothing of packs and shards."""
    kernel = "eager" if w.model_config.model_type == "gemma2" else "sdpa"  # sdpa has no cap on attention logits
    config = copy.deepcopy(w.model_config)
    config._experts_implementation = "eager"  # the grouped matrix product knows no float64
    lm = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kernel)
    weights, named = dict(w.weights()), dict(lm.named_parameters())
    assert weights.keys() == named.keys()
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(weights[name])
    return lm.to(dtype).eval()


def log_softmax_of(lm, ids, temperature):
    """(T, V) log-probs of a row alone: what position t says about token t + 1, in float64."""
    return (lm(input_ids=ids[None]).logits[0].double() / temperature).log_softmax(-1)


def log_probs_of_reply(lm, prompt, ids, temperature):
    """Of the tokens that follow a prompt, from one forward."""
    with torch.no_grad():
        log_p_LV = log_softmax_of(lm, torch.tensor(prompt + ids), temperature)
    return [log_p_LV[len(prompt) - 1 + k, token].item() for k, token in enumerate(ids)]


def assert_close(log_probs, others):
    """To 1e-4 -> the largest difference."""
    worst = max((abs(a - b) for a, b in zip(log_probs, others, strict=True)), default=0.0)
    assert worst < 1e-4, (log_probs, others)
    return worst


def batch_to_learn(w, n=9, seed=0, **options):
    """Rows with the columns of an update: old and reference log-probs near the actor's own, so that some clip."""
    batch, g = random_batch(n, seed, **options), torch.Generator().manual_seed(seed)
    noise = lambda scale: scale * torch.randn(len(batch.input_ids), generator=g) * batch.response_mask
    log_probs_T = w.compute_log_probs(batch)
    batch.old_log_probs, batch.ref_log_probs = log_probs_T + noise(0.6), log_probs_T + noise(0.5)
    batch.advantages, batch.rollout_log_probs = noise(1.0), batch.old_log_probs + noise(0.5)
    return batch


def a_run(backend="fsdp", **fields):
    """A Run as parse() would make it of these flags."""
    config = ppo_loop.critic_module(backend).Config
    critic = config(model="actor", ppo_mini_batch_size=ActorConfig.ppo_mini_batch_size)
    return ppo_loop.Run(critic=critic, backend=backend, **fields)


def a_task(**fields):
    """A Task with nothing in it but these fields."""
    return ppo_loop.Task(**dict.fromkeys(ppo_loop.Task._fields) | fields)


# ---------------------------------------------------------------------------------------------------------------------
# The policy loss
# ---------------------------------------------------------------------------------------------------------------------


def loss_of_one_action(ratio, advantage, low, high, dual):
    """(loss, its derivative by log ratio, clipped, dual-clipped), case by case from the papers' prose."""
    loss, slope, clipped, cut = -ratio * advantage, -ratio * advantage, False, False
    if advantage > 0 and ratio > 1 + high:  # a good action that is likelier already than it may become
        loss, slope, clipped = -(1 + high) * advantage, 0.0, True
    if advantage < 0 and ratio < 1 - low:  # a bad one that is rarer already
        loss, slope, clipped = -(1 - low) * advantage, 0.0, True
    if dual is not None and advantage < 0 and ratio > dual:
        loss, slope, cut = -dual * advantage, 0.0, True
    return loss, slope, clipped, cut


@pytest.mark.parametrize("low, high, dual", [(0.2, 0.2, None), (0.1, 0.5, None), (0.3, 0.2, 1.5), (1.0, 0.28, 3.0)])
def test_policy_loss_is_that_of_the_papers(low, high, dual):
    g = torch.Generator().manual_seed(3)
    n, draw = 400, lambda: torch.randn(400, generator=g, dtype=torch.float64)
    mask_T, new_T, weights_T = torch.rand(n, generator=g) < 0.7, draw(), draw().abs()
    old_T, a_T = new_T + draw(), draw()
    weights_T = weights_T * mask_T
    expected = [
        loss_of_one_action(math.exp(new - old), a, low, high, dual)
        for new, old, a in zip(new_T[mask_T].tolist(), old_T[mask_T].tolist(), a_T[mask_T].tolist(), strict=True)
    ]
    loss, slope, clipped, cut = (torch.tensor(x, dtype=torch.float64) for x in zip(*expected, strict=True))
    assert clipped.sum() > 20 and (cut.sum() > 5) == (dual is not None)  # the cases occur
    for x_T in (new_T, old_T, a_T):
        x_T[~mask_T] = math.nan
    new_T.requires_grad_()
    ours, n_clipped, n_cut = common.policy_loss(new_T, old_T, a_T, mask_T, weights_T, low, high, dual)
    ours.backward()
    assert ours.item() == pytest.approx((weights_T[mask_T] * loss).sum().item(), rel=1e-12)
    torch.testing.assert_close(new_T.grad[mask_T], weights_T[mask_T] * slope, rtol=1e-12, atol=1e-14)
    assert (new_T.grad[~mask_T] == 0).all()
    assert (n_clipped, n_cut) == (clipped.sum(), cut.sum())


def test_policy_loss_of_an_unmoved_policy_is_plain_policy_gradient():
    g = torch.Generator().manual_seed(4)
    log_probs_T, a_T, weights_T = (torch.randn(50, generator=g, dtype=torch.float64) for _ in range(3))
    mask_T = torch.ones(50, dtype=torch.bool)
    new_T = log_probs_T.clone().requires_grad_()
    loss, clipped, cut = common.policy_loss(new_T, log_probs_T, a_T, mask_T, weights_T, 0.2, 0.2, 3.0)
    loss.backward()
    assert loss.item() == pytest.approx(-(weights_T * a_T).sum().item(), rel=1e-12)
    torch.testing.assert_close(new_T.grad, -weights_T * a_T, rtol=1e-12, atol=0)
    assert clipped == cut == 0


def test_policy_loss_survives_log_probs_that_are_far_apart():
    new_T, old_T, mask_T = (
        torch.tensor([-200.0, 0.0]).requires_grad_(),
        torch.tensor([0.0, -200.0]),
        torch.ones(2).bool(),
    )
    loss, _, _ = common.policy_loss(new_T, old_T, torch.tensor([1.0, -1.0]), mask_T, torch.ones(2), 0.2, 0.2, None)
    loss.backward()
    assert loss.isfinite() and new_T.grad.isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Actor
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_entropies_equal_transformers_row_by_row(kind, temperature):
    w = policy(kind, temperature)
    embedding, head = w.model.lm.get_input_embeddings().weight, w.model.lm.get_output_embeddings().weight
    assert (embedding is head) == (kind in ("tiny-gemma2", "tiny-gpt2"))  # what was tied is one after sharding
    if kind == "tiny-gemma2":
        assert w.model.softcap == 30
    batch, lm = random_batch(7, seed=1), plain(w)
    expected_T, entropy_T = torch.zeros(2, len(batch.input_ids), dtype=torch.float64)
    with torch.no_grad():
        for start, end in rows_of(batch):
            log_p_LV = log_softmax_of(lm, batch.input_ids[start:end], temperature)
            for t in range(start + 1, end):
                if batch.response_mask[t]:
                    before_V = log_p_LV[t - start - 1]
                    expected_T[t] = before_V[batch.input_ids[t]]
                    entropy_T[t] = torch.distributions.Categorical(logits=before_V).entropy()
        assert entropy_T[batch.response_mask].std() > 0.05  # positions differ
        _, log_probs_T, ours_T = w.forward_micro_batch(batch, list(range(7)))
    for ours, theirs in ((w.compute_log_probs(batch), expected_T), (log_probs_T, expected_T), (ours_T, entropy_T)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)


def test_a_reference_is_the_actor_and_does_not_train():
    actor, reference, batch = policy(), policy(trains=False), random_batch(5)
    assert reference.optimizer is None and not any(p.requires_grad for p in reference.model.parameters())
    assert torch.equal(actor.compute_log_probs(batch), reference.compute_log_probs(batch))


def gradients(w, batch, monkeypatch):
    """name -> gradient of each optimizer step of an update before clipping, a list; and the metrics."""
    seen, clip = [], torch.nn.utils.clip_grad_norm_

    def note(*args, **kwargs):
        seen.append({n: critic_fsdp.full_tensor(p.grad).clone() for n, p in w.model.lm.named_parameters()})
        return clip(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", note)
        metrics = w.update_policy(batch)
    return seen, metrics


def kl_of(kind, log_ratio):
    """An estimate of KL from log p/q of one token, with its gradient, from Schulman's note."""
    if kind == "k3+":  # the value of k3, the gradient of k2
        return kl_of("k3", log_ratio).detach() + log_ratio**2 / 2 - (log_ratio**2 / 2).detach()
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "abs": abs(log_ratio)}.get(
        kind, torch.exp(-log_ratio) - 1 + log_ratio
    )


def loss_by_hand(lm, batch, config, temperature):
    """The loss of a mini-batch and its sums, one action after another."""
    rows = [(s, e, [t for t in range(s, e) if batch.response_mask[t]]) for s, e in rows_of(batch)]
    rows = [row for row in rows if row[2]]
    actions, loss, sums = sum(len(row[2]) for row in rows), 0.0, collections.Counter()
    for start, end, places in rows:
        log_p_LV = log_softmax_of(lm, batch.input_ids[start:end], temperature)
        for t in places:
            weight = {
                "token-mean": 1 / actions,
                "seq-mean-token-sum": 1 / len(rows),
                "seq-mean-token-mean": 1 / len(rows) / len(places),
                "seq-mean-token-sum-norm": 1 / len(rows) / (config.response_length_limit or 1),
            }[config.loss_agg_mode]
            before_V = log_p_LV[t - start - 1]
            log_p, old, ref = before_V[batch.input_ids[t]], batch.old_log_probs[t], batch.ref_log_probs[t]
            a, ratio = float(batch.advantages[t]), torch.exp(log_p - old)
            value, slope, clipped, cut = loss_of_one_action(
                ratio.item(), a, config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
            )
            pg = -ratio * a if slope else torch.tensor(value)  # clipped: a constant
            if config.tis_cap:
                pg = pg * min(config.tis_cap, math.exp(old - batch.rollout_log_probs[t]))
            kl, entropy = kl_of(config.kl_loss_type, log_p - ref), -(before_V.exp() * before_V).sum()
            loss = loss + weight * (pg + config.kl_loss_coef * kl - config.entropy_coeff * entropy)
            for key, x in (
                ("pg_loss", weight * actions * pg), ("pg_clipfrac", clipped), ("pg_clipfrac_lower", cut),
                ("ppo_kl", old - log_p), ("kl_loss", kl), ("entropy", entropy),
            ):  # fmt: skip
                sums[key] += float(torch.as_tensor(x).detach()) / actions
    return loss, sums


@pytest.mark.parametrize(
    "kind, temperature, fields",
    [
        ("tiny-qwen2", 1.0, dict(loss_agg_mode="token-mean")),
        ("tiny-qwen2", 0.7, dict(loss_agg_mode="seq-mean-token-sum", entropy_coeff=0.1, clip_ratio_c=None)),
        ("tiny-llama", 1.0, dict(loss_agg_mode="seq-mean-token-mean", kl_loss_coef=0.3, kl_loss_type="k3")),
        ("tiny-gemma2", 1.0, dict(kl_loss_coef=0.3, kl_loss_type="k3+", entropy_coeff=0.05, tis_cap=1.3)),
        ("tiny-gpt2", 1.3, dict(loss_agg_mode="seq-mean-token-sum-norm", response_length_limit=40, kl_loss_coef=0.2,
                                kl_loss_type="k1", clip_ratio_high=0.4)),
        ("tiny-qwen3-moe", 1.0, dict(kl_loss_coef=0.2, kl_loss_type="abs", clip_ratio_c=1.2)),
    ],
)  # fmt: skip
def test_the_actors_gradient_is_autograds_of_one_row_after_another(kind, temperature, fields, monkeypatch):
    w = policy(kind, temperature, ppo_max_token_len_per_gpu=90, **fields)
    batch = batch_to_learn(w)
    lm = plain(w, torch.float64)
    loss, sums = loss_by_hand(lm, batch, w.config, temperature)
    loss.backward()
    [ours], metrics = gradients(w, batch, monkeypatch)
    assert len(w.my_micro_batches(batch)) > 1  # what is compared was added up over some
    square = sum(float(p.grad.square().sum()) for p in lm.parameters())
    for name, p in lm.named_parameters():
        torch.testing.assert_close(
            ours[name].double(), p.grad, rtol=1e-4, atol=1e-5 * max(float(p.grad.abs().max()), 1e-3), msg=name
        )
    assert metrics["actor/grad_norm"] == pytest.approx(math.sqrt(square), rel=1e-5)
    assert metrics["actor/pg_clipfrac"] > 0.05  # the case occurs
    for key, x in sums.items():
        assert metrics[f"actor/{key}"] == pytest.approx(x, rel=1e-4, abs=1e-6), key


def test_the_gradient_does_not_depend_on_micro_batches_or_chunks(monkeypatch):
    seen = {}
    for budget, at_once in ((40, 2**25), (10_000, 2**25), (10_000, 99 * 7)):
        monkeypatch.setattr(ppo_loop, "LOGITS_AT_ONCE", at_once)
        w = policy(ppo_max_token_len_per_gpu=budget, kl_loss_coef=0.1, entropy_coeff=0.1)
        batch = batch_to_learn(w)
        assert (len(w.my_micro_batches(batch)) == 1) == (budget == 10_000)
        [seen[budget, at_once]], _ = gradients(w, batch, monkeypatch)
    whole = seen[10_000, 2**25]
    for other in ((40, 2**25), (10_000, 99 * 7)):
        for name, x in whole.items():
            error = (seen[other][name] - x).norm() / x.norm()
            assert error < 2e-6, (other, name)


class Shapes(TorchDispatchMode):
    """Notes the shapes of all results that have the vocabulary in the last place."""

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size, self.rows = vocab_size, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] == self.vocab_size:
                self.rows.add(x.numel() // self.vocab_size)
        return out


@pytest.mark.parametrize("chunk", [5, 10**6])
def test_logits_exist_a_chunk_at_a_time(chunk, monkeypatch):
    w = policy()
    vocab, batch = 99, batch_to_learn(w, 12)
    monkeypatch.setattr(ppo_loop, "LOGITS_AT_ONCE", chunk * vocab)
    held, actions = [], int(batch.response_mask.sum())
    assert actions > 100
    with (
        Shapes(vocab) as shapes,
        torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(tuple(x.shape)) or x, lambda x: x),
    ):
        w.update_policy(batch)
    rows = shapes.rows - {64}  # the transposed weight of the head
    assert max(rows) == min(chunk, actions)
    assert held and not [s for s in held if s[-1:] == (vocab,) and s != (64, vocab)]  # nothing is kept for the backward


# ---------------------------------------------------------------------------------------------------------------------
# Rollout engine
# ---------------------------------------------------------------------------------------------------------------------


def engine_of(w, stop=(1,), at_once=4, top_p=1.0):
    """The rollout engine with the actor's weights."""
    run = a_run(actor=w.config, top_p=top_p, rollout_batch_size=at_once)
    engine = HFRollout(run, a_task(model_config=w.model_config, stop_ids=list(stop)), w.device)
    engine.sync(w.weights(torch.float32))
    return engine


# windows shorter than the rows: the cache forgets, and left padding moves the window
ENGINES = [*((kind, SHARP) for kind in KINDS), ("tiny-gemma2", WINDOW), ("tiny-mistral", WINDOW)]


def some_prompts(n=9, seed=5):
    """Ids of n prompts of 1 to 12 tokens."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (n,), generator=g).tolist()
    return [torch.randint(3, 99, (length,), generator=g).tolist() for length in lengths]


@pytest.mark.parametrize("kind, override_config", ENGINES)
def test_greedy_rollout_is_that_of_transformers(kind, override_config):
    w = policy(kind, override_config=override_config)
    lm, prompts, stop = plain(w), some_prompts(), list(range(1, 99, 6))  # a sixth of the tokens ends a row
    room = [1 + i % 14 for i in range(len(prompts))]
    replies = engine_of(w, stop).generate(prompts, list("abcdefghi"), room, 0.0)
    assert_greedy(replies, lm, prompts, room, stop)
    ends = {(ended, len(ids) == most) for most, (ids, _, ended) in zip(room, replies, strict=True)}
    assert len(ends) >= 2  # rows that ended and rows that were cut off


def assert_greedy(replies, lm, prompts, room, stop):
    """They are what transformers says to one prompt after another -> the largest difference of log-probs."""
    worst = 0.0
    for prompt, most, (ids, log_probs, ended) in zip(prompts, room, replies, strict=True):
        settings = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=most, eos_token_id=stop, pad_token_id=0, bos_token_id=None
        )
        ids_1L = torch.tensor([prompt])
        theirs = lm.generate(ids_1L, settings, attention_mask=torch.ones_like(ids_1L))[0, len(prompt) :]
        assert ids == theirs.tolist()
        assert ended == (ids[-1] in stop) and not any(i in stop for i in ids[:-1])  # a stop id is kept, and is the last
        assert len(ids) <= most and (ended or len(ids) == most)
        worst = max(worst, assert_close(log_probs, log_probs_of_reply(lm, prompt, ids, 1.0)))
    return worst


@pytest.mark.parametrize("kind, override_config", ENGINES[:1] + ENGINES[3:4] + ENGINES[5:])
def test_a_rows_sample_depends_on_nothing_but_its_key(kind, override_config):
    w = policy(kind, override_config=override_config)
    assert_samples_follow_their_keys(engine_of(w, range(1, 99, 12), at_once=100))


def assert_samples_follow_their_keys(engine):
    """Alone, in a crowd, in any order; others have others."""
    prompts = some_prompts()
    keys, room = [f"7 {i}" for i in range(9)], [3 + 2 * i for i in range(9)]
    together = engine.generate(prompts, keys, room, 0.9)
    assert len({len(ids) for ids, _, _ in together}) > 3  # rows leave at different times
    alone = [engine.generate([p], [k], [r], 0.9)[0] for p, k, r in zip(prompts, keys, room, strict=True)]
    crowd = engine.generate([*prompts, [5] * 60], [*keys, "long"], [*room, 40], 0.9)[:9]
    engine.rows = 4
    backwards = engine.generate(prompts[::-1], keys[::-1], room[::-1], 0.9)[::-1]
    engine.rows = 100
    for other in (alone, backwards, crowd):
        for (ids, log_probs, ended), (ids2, log_probs2, ended2) in zip(together, other, strict=True):
            assert (ids, ended) == (ids2, ended2)
            assert log_probs == pytest.approx(log_probs2, abs=1e-4)
    assert all(len(ids) <= r and (ended or len(ids) == r) for (ids, _, ended), r in zip(together, room, strict=True))
    others = engine.generate(prompts, [f"8 {i}" for i in range(9)], room, 0.9)
    assert sum(a[0] != b[0] for a, b in zip(together, others, strict=True)) >= 7
    shorter = engine.generate(prompts, keys, [2] * 9, 0.9)  # less room cuts a sample off and changes none
    assert [ids for ids, _, _ in shorter] == [ids[:2] for ids, _, _ in together]


@pytest.mark.parametrize("kind, override_config", ENGINES)
def test_log_probs_of_the_rollout_are_a_plain_forwards(kind, override_config):
    w = policy(kind, temperature=0.7, override_config=override_config)
    lm, prompts = plain(w), some_prompts()
    replies = engine_of(w).generate(prompts, list("abcdefghi"), [10] * 9, 0.7)
    asked = [Prompt(p, "", None) for p in prompts]
    batch = ppo_loop.to_batch(asked, [Reply(i, [True] * len(i), p, e) for i, p, e in replies], list(range(9)))
    ours_T = w.compute_log_probs(batch)
    torch.testing.assert_close(ours_T, batch.rollout_log_probs, rtol=1e-4, atol=1e-4)  # as check_engine asks
    for prompt, (ids, log_probs, _) in zip(prompts, replies, strict=True):
        assert_close(log_probs, log_probs_of_reply(lm, prompt, ids, 0.7))


def test_top_p_draws_from_the_nucleus_alone():
    logits_BV = torch.tensor([[3.0, 1.0, 2.0, 2.0, -1.0], [0.0, 0.0, 0.0, 0.0, 9.0]])
    for top_p in (1e-6, 0.3, 0.5, 0.6, 0.9, 0.999):
        log_p_BV = ppo_loop.nucleus(logits_BV.log_softmax(-1), top_p)
        for row_V, theirs_V in zip(log_p_BV.exp().tolist(), logits_BV.softmax(-1).tolist(), strict=True):
            kept, total = [], 0.0
            for i in sorted(range(5), key=lambda i: -theirs_V[i]):
                if total < top_p:
                    kept, total = [*kept, i], total + theirs_V[i]
            expected = [p / total if i in kept else 0.0 for i, p in enumerate(theirs_V)]
            assert row_V == pytest.approx(expected, abs=1e-6)
    w, n, prompt = policy(override_config=SHARP), 400, [20, 30, 40]
    replies = engine_of(w, at_once=n, top_p=0.7).generate([prompt] * n, [f"{i}" for i in range(n)], [1] * n, 0.8)
    log_p_V = ppo_loop.nucleus(log_softmax_of(plain(w), torch.tensor(prompt), 0.8)[None, -1], 0.7)[0].detach()
    for (token,), (log_p,), _ in replies:
        assert log_p == pytest.approx(log_p_V[token].item(), abs=1e-4)
    assert {ids[0] for ids, _, _ in replies} == set(log_p_V.isfinite().nonzero()[:, 0].tolist())


def test_samples_follow_the_softmax():
    w, n, prompt = policy(), 6000, [20, 30, 40]
    out = engine_of(w, at_once=2000).generate([prompt] * n, [f"{i}" for i in range(n)], [1] * n, 0.8)
    counts_V = torch.bincount(torch.tensor([ids[0] for ids, _, _ in out]), minlength=99).double()
    assert_drawn_from(counts_V, lambda t: log_softmax_of(plain(w), torch.tensor(prompt), t)[-1].exp())


def assert_drawn_from(counts_V, chances_of):
    """As often as the probabilities at temperature 0.8 say, not as those at 1."""

    def chi_square(temperature):
        """(statistic, degrees of freedom), tokens expected less than five times taken together."""
        with torch.no_grad():
            expected_V = counts_V.sum() * chances_of(temperature)
        rare_V = expected_V < 5
        pairs = [(counts_V[~rare_V], expected_V[~rare_V])]
        if expected_V[rare_V].sum() >= 5:
            pairs.append((counts_V[rare_V].sum()[None], expected_V[rare_V].sum()[None]))
        observed, expected = map(torch.cat, zip(*pairs, strict=True))
        return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1

    statistic, freedom = chi_square(0.8)
    assert freedom > 20
    assert abs(statistic - freedom) < 3.5 * math.sqrt(2 * freedom)  # too even is as wrong as too uneven
    statistic, freedom = chi_square(1.0)  # the test would see a temperature that is a little off
    assert statistic > freedom + 5 * math.sqrt(2 * freedom)


def test_an_engine_without_stop_ids_fills_the_room():
    out = engine_of(policy(), ()).generate(some_prompts(), list("abcdefghi"), [5] * 9, 1.0)
    assert [(len(ids), ended) for ids, _, ended in out] == [(5, False)] * 9
    assert engine_of(policy()).generate([], [], [], 1.0) == []


# ---------------------------------------------------------------------------------------------------------------------
# Turns with an environment
# ---------------------------------------------------------------------------------------------------------------------

EOS = 1  # of the tokenizer of characters


class Script:
    """An engine that says what it is told, turn by turn, each turn closed unless it ends in '...'."""

    def __init__(self, tokenizer, *turns):
        self.tokenizer, self.turns, self.seen = tokenizer, list(turns), []

    any_left = HFRollout.any_left

    def generate(self, prompts, keys, room, temperature):
        self.seen.append(([self.tokenizer.decode(p) for p in prompts], keys, room))
        out = []
        for said, most in zip(self.turns.pop(0), room, strict=True):
            ids = self.tokenizer(said.removesuffix("..."))["input_ids"] + [EOS] * (not said.endswith("..."))
            out.append((ids[:most], [-0.5] * len(ids[:most]), len(ids) <= most and ids[-1:] == [EOS]))
        return out


def play(turns, observe, n=1, **fields):
    """roll_out of n prompts q0=, q1= ... -> (replies, texts, faults, what the engine was asked)."""
    tokenizer = common.char_tokenizer()
    prompts = [Prompt(tokenizer(f"q{i}=")["input_ids"], f"q{i}=", f"answer {i}") for i in range(n)]
    run = a_run(**{"max_response_length": 30, "reward_timeout": 0.2, **fields})
    engine = Script(tokenizer, *turns)
    task = a_task(tokenizer=tokenizer, observe=observe)
    out = ppo_loop.roll_out(engine, task, prompts, [f"key {i}" for i in range(n)], run, 1.0)
    return *out, engine.seen


def test_turns_of_policy_and_environment_follow_each_other():
    heard = []

    def observe(prompt, response, answer):
        heard.append((prompt, response, answer))
        return {"ab": "[1]", "ab[1]cd": None, "x": None}[response]

    replies, texts, faults, asked = play([["ab", "x"], ["cd"]], observe, n=2)
    ids = common.char_tokenizer()
    a, b = replies
    assert a.ids == [*ids("ab")["input_ids"], EOS, *ids("[1]")["input_ids"], *ids("cd")["input_ids"], EOS]
    assert a.mask == [True] * 3 + [False] * 3 + [True] * 3
    assert a.log_probs == [-0.5] * 3 + [0.0] * 3 + [-0.5] * 3
    assert b.ids == [*ids("x")["input_ids"], EOS] and b.mask == [True] * 2
    assert a.finished and b.finished and texts == ["ab[1]cd", "x"] and faults == ["", ""]
    assert heard == [("q0=", "ab", "answer 0"), ("q1=", "x", "answer 1"), ("q0=", "ab[1]cd", "answer 0")]
    assert asked == [(["q0=", "q1="], ["key 0 0", "key 1 0"], [30, 30]), (["q0=ab<eos>[1]"], ["key 0 1"], [24])]
    batch = ppo_loop.to_batch([Prompt([7, 8, 9], "", None)] * 2, replies, [4, 6])
    batch.check()
    assert batch.response_mask.tolist() == [False] * 3 + a.mask + [False] * 3 + b.mask
    assert batch.rollout_log_probs.tolist() == [0.0] * 3 + a.log_probs + [0.0] * 3 + b.log_probs
    assert batch.input_ids.tolist() == [7, 8, 9, *a.ids, 7, 8, 9, *b.ids] and batch.lengths == [12, 5]
    assert batch.row_id.tolist() == [4, 6] and batch.truncated.tolist() == [False, False]


def test_a_row_is_cut_off_where_its_room_ends():
    say = lambda *_: "[1]"
    # the turn itself does not fit; the observation leaves no room for another turn; it leaves exactly one token
    for turns, length, text, finished, calls in (
        ([["abcdef"]], 4, "abcd", False, 1),
        ([["abc"]], 7, "abc", False, 1),
        ([["abc"], ["d..."]], 8, "abc[1]d", False, 2),
        ([["abc"], ["d"]], 9, "abc[1]d", True, 2),
    ):
        [reply], [said], faults, asked = play(turns, say, max_response_length=length, max_turns=2)
        assert (said, reply.finished, len(asked)) == (text, finished, calls) and faults == [""]
        assert len(reply.ids) == len(reply.mask) == len(reply.log_probs) <= length and reply.mask[-1]


def test_max_turns_ends_a_row_and_the_environment_is_not_asked_again():
    calls = []
    [reply], [text], _, asked = play([["a"], ["b"], ["c"]], lambda *x: calls.append(x) or "-", max_turns=3)
    assert text == "a-b-c" and reply.finished and len(asked) == 3 and len(calls) == 2


def test_an_environments_faults_end_the_row_and_are_told():
    def broken(prompt, response, answer):
        if prompt == "q0=":
            raise KeyError("tool")
        if prompt == "q1=":
            while True:
                pass
        return {"q2=": 5, "q3=": b"no", "q4=": None}[prompt]

    replies, texts, faults, asked = play([["a", "b", "c", "d", "e"]], broken, n=5)
    assert texts == list("abcde") and len(asked) == 1 and all(r.finished for r in replies)
    assert faults == [
        "KeyError: 'tool'",
        "timeout: took longer than 0.2 s",
        "an environment answers with text or None, not 5",
        "an environment answers with text or None, not b'no'",
        "",
    ]


def test_without_an_environment_there_is_one_turn():
    [a, b], texts, faults, asked = play([["ab", "cde..."]], None, n=2, max_response_length=3)
    assert (a.finished, b.finished, texts, faults, len(asked)) == (True, False, ["ab", "cde"], ["", ""], 1)


# ---------------------------------------------------------------------------------------------------------------------
# Rewards
# ---------------------------------------------------------------------------------------------------------------------


def test_addition_is_right_or_wrong():
    assert [ppo_loop.addition_reward("1+2=", x, "3") for x in ("3", "4", "", "3 ", "03")] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "response, answer, score",
    [
        ("so it is\n#### 18", "...\n#### 18", 1),
        ("#### 19", "#### 18", 0),
        ("#### $1,234", "#### 1234", 1),
        ("#### 1234", "#### 1,234", 1),
        ("#### 18.00", "#### 18", 1),
        ("#### 18.", "#### 18", 1),
        ("#### .5", "#### 0.5", 1),
        ("#### -7", "#### -7", 1),
        ("#### 7", "#### -7", 0),
        ("#### -$7", "#### -7", 1),
        ("#### $-7", "#### -7", 1),
        ("#### 3 no,\n#### 5", "#### 5", 1),
        ("#### 5 no,\n#### 3", "#### 5", 0),
        ("the answer is 5", "#### 5", 0),
        ("####", "#### 5", 0),
        ("", "#### 5", 0),
        ("#### 5 apples", "#### 5", 1),
        ("####5", "#### 5", 1),
        ("#### 5%", "#### 5", 1),
        ("#### five", "#### 5", 0),
        ("#### ,", "#### 5", 0),
        ("####" + " " * 20_000 + "x", "#### 5", 0),
    ],
)
def test_gsm8k_reads_the_last_number_after_the_hashes(response, answer, score):
    assert ppo_loop.gsm8k_reward("", response, answer) == score


@needs_shared
def test_gsm8k_knows_its_own_answers_and_agrees_with_its_authors():
    answers = [json.loads(line)["answer"] for line in open(SHARED / "data" / "gsm8k" / "test.jsonl")]
    assert len(answers) == 1319 and all(ppo_loop.gsm8k_reward("", a, a) == 1 for a in answers)
    agreed = total = 0
    for line in open(SHARED / "data" / "gsm8k" / "example_model_solutions.jsonl"):
        row = json.loads(line)
        for key, solution in row.items():
            if key not in ("question", "ground_truth"):
                texts = (solution["solution"].replace("A:", "####"), row["ground_truth"].replace("A:", "####"))
                agreed += ppo_loop.gsm8k_reward("", *texts) == solution["is_correct"]
                total += 1
    print(f"{agreed} of {total} labels agree")
    assert total == 4 * 1319 and agreed == total


def swallows_exceptions():
    end = time.perf_counter() + 5  # if it were not stopped, the test should fail and not hang
    while time.perf_counter() < end:
        try:
            time.sleep(0.01)
        except Exception:
            pass


def test_guarded_returns_what_a_function_returns_and_survives_what_it_does():
    def calls(seconds):
        time.sleep(seconds)

    def stop():
        raise SystemExit("enough")

    def spin():
        end = time.perf_counter() + 5
        while time.perf_counter() < end:
            pass

    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    try:
        mine = signal.getsignal(signal.SIGALRM)
        for function, args, expected in (
            (lambda a, b: a + b, (1, 2), (3, "")),
            (lambda: {}["x"], (), (None, "KeyError: 'x'")),
            (stop, (), (None, "SystemExit: enough")),
            (spin, (), (None, "timeout: took longer than 0.1 s")),
            (calls, (30,), (None, "timeout: took longer than 0.1 s")),
            (swallows_exceptions, (), (None, "timeout: took longer than 0.1 s")),
        ):
            start = time.perf_counter()
            assert ppo_loop.guarded(function, 0.1, *args) == expected
            assert time.perf_counter() - start < 2
            assert signal.getsignal(signal.SIGALRM) is mine and signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        with pytest.raises(KeyboardInterrupt):  # the user's own wish is no fault of the function
            ppo_loop.guarded(lambda: (_ for _ in ()).throw(KeyboardInterrupt), 0.1)
        assert signal.getsignal(signal.SIGALRM) is mine and not rang
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_reward_that_is_no_number_counts_as_a_fault_and_as_0():
    class Odd(float):
        def __repr__(self):
            raise ValueError

    says = [1, 0.25, numpy.True_, None, math.nan, math.inf, "1", [1], 10**5000, numpy.float16("inf"), Odd("nan")]
    prompts = [Prompt([1], f"p{i}", i) for i in range(len(says))]
    heard = []

    def function(prompt, response, answer):
        heard.append((prompt, response, answer))
        return says[answer]

    scores, faults = ppo_loop.rule_scores(function, prompts, [f"r{i}" for i in range(len(says))], 1.0)
    assert heard == [(f"p{i}", f"r{i}", i) for i in range(len(says))]
    assert scores == [1, 0.25, 1] + [0] * 8 and all(type(x) is float for x in scores)
    assert faults[:3] == ["", "", ""] and all("the reward must be a finite number, is " in f for f in faults[3:])


@pytest.mark.parametrize("flag", ["--reward", "--environment"])
def test_a_function_that_cannot_be_loaded_is_named_by_its_flag(flag, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("x = 3\n\ndef good(prompt, response, answer):\n    return len(response) * x\n")
    assert ppo_loop.load_function(f"{file}:good", flag)("", "abc", None) == 9
    for name, words in (
        (f"{file}:bad", "the file has no function bad"),
        (f"{file}:x", "the file has no function x"),
        (f"{file}", "there is no such file"),
        (f"{tmp_path}/none.py:good", "there is no such file"),
        ("math", "there is no such file"),
    ):
        with pytest.raises(UserError, match=re.escape(f"{flag} {name}: ") + ".*" + words):
            ppo_loop.load_function(name, flag)
    file.write_text("x = 3\nimport nothing_like_this\n")
    with pytest.raises(UserError, match=f"{flag} .*: line 2: ModuleNotFoundError"):
        ppo_loop.load_function(f"{file}:good", flag)
    file.write_text("x = 3\n\n\n" + 'import json; json.loads("[\\n}")\n')  # whose own error is in its line 2
    with pytest.raises(UserError, match=f"{flag} .*: line 4: JSONDecodeError"):
        ppo_loop.load_function(f"{file}:good", flag)
    file.write_text("x = 3\ndef good(:\n")
    with pytest.raises(UserError, match=f"{flag} .*: line .*SyntaxError"):
        ppo_loop.load_function(f"{file}:good", flag)
    if flag == "--reward":
        assert ppo_loop.load_function("gsm8k", flag) is ppo_loop.gsm8k_reward


def reward_model(folder, vocab_size=99, tokenizer=None):
    """A reward model as people have them, saved with a tokenizer."""
    config = transformers.AutoConfig.for_model(**common.tiny_config("tiny-llama", vocab_size))
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(2)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize("same_tokens", [True, False])
def test_a_reward_models_scores_are_transformers_own(same_tokens, tmp_path):
    common.setup_distributed()
    policys = common.char_tokenizer()
    tokenizer = common.char_tokenizer() if same_tokens else reversed_characters()
    model = reward_model(tmp_path, 99, tokenizer)
    prompts = [Prompt(policys(text)["input_ids"], text, None) for text in ("1+2=", "hello ", "x", "12+34=")]
    texts = ["3", "world", "y" * 20, ""]
    close = lambda text: [*policys(text)["input_ids"], EOS]
    replies = [Reply(close(t), [True] * len(close(t)), [0.0] * len(close(t)), True) for t in texts]
    batch = ppo_loop.to_batch(prompts, replies, [0, 1, 2, 3])
    longest = max(batch.lengths)  # rows as long as the budget fit
    run = a_run(reward_model=str(tmp_path), actor=ActorConfig(ppo_max_token_len_per_gpu=longest))
    ours = ppo_loop.RewardModel(run, policys)
    assert ours.same_tokens == same_tokens
    scores = ours.scores(prompts, texts, batch)
    for prompt, text, reply, score in zip(prompts, texts, replies, scores, strict=True):
        ids = prompt.ids + reply.ids if same_tokens else tokenizer(prompt.text + text)["input_ids"]
        with torch.no_grad():
            assert score == pytest.approx(model(input_ids=torch.tensor([ids])).logits.item(), abs=1e-5)
    assert max(scores) - min(scores) > 0.1
    assert ppo_loop.score(run, ours, prompts, texts, batch, [""] * 4) == (scores, [""] * 4)
    if not same_tokens:  # a text that is longer in the other tokens
        with pytest.raises(
            UserError, match=f"--reward-model, .*: --actor.ppo-max-token-len-per-gpu {longest + 1}: row 2"
        ):
            ours.scores(prompts, ["3", "world", "y" * (longest + 1), ""], batch)
    ours.worker.critic.model.score.bias.data.fill_(math.nan)  # a model that has no score is a fault of its rows
    scores, faults = ppo_loop.score(run, ours, prompts, texts, batch, ["late", "", "", ""])
    assert scores == [0.0] * 4 and faults == ["late"] + ["the reward must be a finite number, is nan"] * 3


def reversed_characters():
    """Another tokenizer: the same characters, numbered from the other end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = ["<pad>", "<eos>", "<unk>", *map(chr, range(126, 31, -1)), "\n"]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def test_a_chat_is_re_tokenised_with_the_reward_models_own_template(tmp_path):
    common.setup_distributed()
    tokenizer = reversed_characters()
    tokenizer.chat_template = "{% for m in messages %}({{ m['role'] }}){{ m['content'] }}{% endfor %}"
    model = reward_model(tmp_path, 99, tokenizer)
    prompts = [Prompt([5, 6], "hi", None, [{"role": "user", "content": "hi"}])]
    batch = ppo_loop.to_batch(prompts, [Reply([7, EOS], [True] * 2, [0.0] * 2, True)], [0])
    [score] = ppo_loop.RewardModel(a_run(reward_model=str(tmp_path)), common.char_tokenizer()).scores(
        prompts, ["yo"], batch
    )
    ids = tokenizer("(user)hi(assistant)yo")["input_ids"]
    with torch.no_grad():
        assert score == pytest.approx(model(input_ids=torch.tensor([ids])).logits.item(), abs=1e-5)


def test_a_reward_model_that_cannot_take_the_rows_is_named_before_anything_starts(tmp_path):
    tokenizer = common.char_tokenizer()
    check = lambda longest, vocab_size=99, model=tmp_path: ppo_loop.check_reward_model(
        a_run(reward_model=str(model)), tokenizer, vocab_size, longest
    )
    most = reward_model(tmp_path, 99, tokenizer).config.max_position_embeddings
    check(most - 1)
    with pytest.raises(UserError, match=f"--reward-model {tmp_path}: takes {most} tokens, .* has {most}, and one more"):
        check(most)
    with pytest.raises(UserError, match=f"--reward-model {tmp_path}: knows 99 tokens, the actor 100"):
        check(20, 100)
    with pytest.raises(UserError, match=f"--reward-model {tmp_path}/none: (?!--model)"):
        check(20, model=tmp_path / "none")
    reversed_characters().save_pretrained(tmp_path)  # the text in tokens of its own, whose number nobody knows yet
    check(most, 100)


def test_a_critic_that_numbers_the_tokens_in_another_way_is_refused(tmp_path):
    reward_model(tmp_path, 99, reversed_characters())
    with pytest.raises(UserError, match=f"--critic.model {tmp_path}: its token .* is .* of the actor's"):
        up_to_the_models(["--critic.model", str(tmp_path), "--out-dir", str(tmp_path / "out")])
    common.char_tokenizer().save_pretrained(tmp_path)
    up_to_the_models(["--critic.model", str(tmp_path), "--out-dir", str(tmp_path / "out")])
    padded = ["--actor.override-config", '{"vocab_size": 128}']  # no token of its tokenizer is among the 29 more
    up_to_the_models(["--critic.model", str(tmp_path), *padded, "--out-dir", str(tmp_path / "out")])
    reward_model(tmp_path, 98)
    with pytest.raises(UserError, match=f"--critic.model {tmp_path}: knows 98 tokens, the actor 99"):
        up_to_the_models(["--critic.model", str(tmp_path), "--out-dir", str(tmp_path / "out")])


def test_a_resumed_run_finds_the_actor_it_has_started_from_and_no_other(tmp_path):
    policy().export_hf(tmp_path / "a" / "supervised", common.char_tokenizer())
    began = str(tmp_path / "a" / "supervised")
    state = {"start": began, "start_weights": ppo_loop.same_weights(began)}
    run = lambda name: a_run(resume=str(tmp_path / name / "checkpoints" / "step_2"))
    assert ppo_loop.taught_before(run("a"), state) == began
    os.rename(tmp_path / "a", tmp_path / "b")
    assert ppo_loop.taught_before(run("b"), state) == str(tmp_path / "b" / "supervised")
    assert ppo_loop.taught_before(run("b"), {"start": "tiny-qwen2", "start_weights": None}) == "tiny-qwen2"
    for kind in ("tiny-llama", None):  # another run's, none
        shutil.rmtree(tmp_path / "b" / "supervised")
        if kind:
            policy(kind).export_hf(tmp_path / "b" / "supervised", common.char_tokenizer())
        with pytest.raises(UserError, match="--resume .*: .*/b/supervised is not, or no longer, the actor that"):
            ppo_loop.taught_before(run("b"), state)


def test_a_folder_that_is_no_reward_model_is_named(tmp_path):
    policy().export_hf(tmp_path / "lm", common.char_tokenizer())
    with pytest.raises(UserError, match="--reward-model .*value head"):
        ppo_loop.RewardModel(a_run(reward_model=str(tmp_path / "lm")), common.char_tokenizer())
    with pytest.raises(UserError, match="--reward-model .*/none: "):
        ppo_loop.RewardModel(a_run(reward_model=str(tmp_path / "none")), common.char_tokenizer())


# ---------------------------------------------------------------------------------------------------------------------
# Advantages
# ---------------------------------------------------------------------------------------------------------------------


def advantages_by_hand(batch, scores, kl_coef, run):
    """(rewards, advantages before whitening, returns), action by action backwards from each row's end."""
    rewards, advantages, returns = torch.zeros(3, len(batch.input_ids), dtype=torch.float64)
    for b, (start, end) in enumerate(rows_of(batch)):
        places = [t for t in range(start, end) if batch.response_mask[t]]
        lam_policy = run.lam if run.lam_policy is None else run.lam_policy
        if run.length_adaptive_alpha is not None:
            lam_policy = max(0.0, 1 - 1 / (run.length_adaptive_alpha * len(places)))
        after = float(batch.values[places[-1]]) if run.bootstrap_truncated and batch.truncated[b] else 0.0
        for_policy = for_critic = 0.0
        for t in reversed(places):
            d, v = float(batch.old_log_probs[t] - batch.ref_log_probs[t]), float(batch.values[t])
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}[run.kl_penalty]
            rewards[t] = (scores[b] if t == places[-1] else 0.0) - kl_coef * kl
            delta = float(rewards[t]) + run.gamma * after - v
            for_policy = delta + run.gamma * lam_policy * for_policy
            for_critic = delta + run.gamma * run.lam * for_critic
            advantages[t], returns[t], after = for_policy, for_critic + v, v
    return rewards, advantages, returns


@pytest.mark.parametrize(
    "kl_coef, fields",
    [
        (0.0, {}),
        (0.3, dict(kl_penalty="k1", gamma=0.9, lam=0.8)),
        (0.3, dict(kl_penalty="k3", lam=0.95, lam_policy=0.5, bootstrap_truncated=True)),
        (0.1, dict(kl_penalty="abs", length_adaptive_alpha=0.3, lam=1.0, gamma=0.97)),
        (0.1, dict(kl_penalty="k2", whiten_advantages=False, lam=0.0, lam_policy=1.0, bootstrap_truncated=True)),
    ],
)
def test_rewards_advantages_and_returns_equal_a_loop(kl_coef, fields):
    common.setup_distributed()
    run, batch, g = a_run(**fields), random_batch(8, 6, idle=False), torch.Generator().manual_seed(1)
    noise = lambda: 0.5 * torch.randn(len(batch.input_ids), generator=g) * batch.response_mask  # k3 is cut off at 10
    batch.old_log_probs, batch.ref_log_probs = noise(), noise()
    batch.token_level_rewards, batch.returns, batch.truncated = None, None, torch.arange(8) % 3 == 0
    scores = torch.randn(8, generator=g).tolist()
    ppo_loop.add_advantages(batch, scores, kl_coef, run)
    rewards_T, advantages_T, returns_T = advantages_by_hand(batch, scores, kl_coef, run)
    if run.whiten_advantages:
        x = advantages_T[batch.response_mask].numpy()
        advantages_T[batch.response_mask] = torch.from_numpy((x - x.mean()) / x.std(ddof=1))
    for ours, theirs in (
        (batch.token_level_rewards, rewards_T), (batch.advantages, advantages_T), (batch.returns, returns_T),
    ):  # fmt: skip
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
        assert (ours[~batch.response_mask] == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# Prompts
# ---------------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def prompts_of(tmp_path, *rows, tokenizer=None, **fields):
    """load_prompts of a file of these rows; text and bytes go in as they are."""
    file = tmp_path / "prompts.jsonl"
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in rows]
    file.write_bytes(b"\n".join(lines) + b"\n")
    run = a_run(prompts=str(file), **fields)
    return ppo_loop.load_prompts(str(file), "--prompts", run, tokenizer or common.char_tokenizer())


def test_prompts_of_text_and_of_chats(tmp_path):
    tokenizer = common.char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    load = lambda *rows, **fields: prompts_of(tmp_path, *rows, tokenizer=tokenizer, **fields)
    hi = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    assert load({"prompt": "1+1=", "answer": "2"}, {"prompt": hi}) == [
        Prompt(ids("1+1="), "1+1=", "2", None),
        Prompt(ids("<system>S<user>hiA:"), "hi", None, hi),
    ]
    user = [{"role": "user", "content": "Q: hi!"}]
    fields = dict(chat=True, prompt_key="question", answer_key="gold", prompt_template="Q: {prompt}!")
    assert load({"question": "hi", "gold": 7}, **fields) == [Prompt(ids("<user>Q: hi!A:"), "Q: hi!", 7, user)]
    assert load({"prompt": "{x} {prompt}"}, prompt_template="{prompt}{y}")[0].text == "{x} {prompt}{y}"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert load({"prompt": parts})[0].text == "ab"
    assert load({"prompt": [{"role": "user", "content": None}]})[0].text == ""


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, capsys):
    rows = [{"prompt": "a" * n} for n in (3, 6, 5, 9)]
    assert [p.text for p in prompts_of(tmp_path, *rows, max_prompt_length=5)] == ["aaa", "aaaaa"]
    assert "left out 2 prompts above --max-prompt-length" in capsys.readouterr().out
    with pytest.raises(UserError, match="prompts.jsonl: no usable prompt"):
        prompts_of(tmp_path, *rows, max_prompt_length=2)


@pytest.mark.parametrize(
    "row, words",
    [
        ("{", "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON: 'utf-8'"),
        ("[1]", "a row is a JSON object, this is a list"),
        ("null", "a row is a JSON object, this is a NoneType"),
        ({"question": "x", "a": 1}, "has no 'prompt', only a, question; see --prompt-key"),
        ({"prompt": None}, "has no 'prompt'"),
        ({"prompt": 5}, "'prompt' must be text or a list of chat messages, not 5"),
        ({"prompt": []}, "messages must be a list"),
        ({"prompt": [{"content": "x"}]}, "messages must be a list"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "does not fit the tokenizer's chat template"),  # it has none
        ({"prompt": ""}, "empty prompt"),
        ('{"prompt": "\\ud800"}', "holds half a surrogate pair"),
        ('{"prompt": [{"role": "user", "content": "\\ud800"}]}', "holds half a surrogate pair"),
    ],
)
def test_a_bad_prompt_is_named_by_file_and_line_or_left_out(row, words, tmp_path, capsys):
    rows = [{"prompt": "good"}, "", "  ", row, {"prompt": "too"}]  # line 4: blank lines count
    with pytest.raises(UserError, match=r"--prompts .*prompts.jsonl:4: " + re.escape(words)) as caught:
        prompts_of(tmp_path, *rows)
    assert "--skip-bad-rows" in str(caught.value) and "\n" not in str(caught.value)
    assert [p.text for p in prompts_of(tmp_path, *rows, skip_bad_rows=True)] == ["good", "too"]
    assert "left out 1 bad rows of 3\n  line 4: " in capsys.readouterr().out
    with pytest.raises(UserError, match=r"jsonl:4: .*, and 1 more bad rows"):
        prompts_of(tmp_path, *rows, row)


def test_prompts_that_are_nowhere_are_named(tmp_path):
    run, tokenizer = a_run(), common.char_tokenizer()
    for source in ("none.jsonl", str(tmp_path), "openai/gsm8k"):
        with pytest.raises(UserError, match=f"--eval-prompts {source}: no such file .a hub dataset is given as"):
            ppo_loop.load_prompts(source, "--eval-prompts", run, tokenizer)


@needs_shared
def test_gsm8k_loads_with_a_real_tokenizer():
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(SHARED / "data" / "tokenizer")
    path = str(SHARED / "data" / "gsm8k" / "train.jsonl")
    prompts = ppo_loop.load_prompts(path, "--prompts", a_run(prompt_key="question"), tokenizer)
    rows = [json.loads(line) for line in open(path)]
    assert [(p.text, p.answer) for p in prompts] == [(r["question"], r["answer"]) for r in rows]
    assert prompts[0].ids == tokenizer(rows[0]["question"])["input_ids"]


def test_additions_of_the_loop_are_those_of_the_toy_and_held_out_ones_are_others():
    tokenizer = common.char_tokenizer()
    prompts = ppo_loop.addition_prompts(2000, 0, tokenizer)
    held_out = ppo_loop.addition_prompts(500, 0, tokenizer, held_out=True)
    for p in prompts + held_out:
        a, b = re.fullmatch(r"(\d\d)\+(\d\d)=", p.text).groups()
        assert p.answer == str(int(a) + int(b)) and tokenizer.decode(p.ids) == p.text
    texts, others = {p.text for p in prompts}, {p.text for p in held_out}
    assert len(texts) == len(prompts) > 1000 and len(others) == len(held_out) > 200 and not texts & others


# ---------------------------------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------------------------------


def test_each_critic_brings_its_own_flags(capsys):
    run = ppo_loop.parse(["--critic", "megatron", "--critic.tensor-model-parallel-size", "2", "--critic.lr", "0.5"])
    assert run.backend == "megatron" and type(run.critic).__module__ == "critic_megatron"
    assert (run.critic.tensor_model_parallel_size, run.critic.lr, run.critic.model) == (2, 0.5, "actor")
    run = ppo_loop.parse(
        ["--critic=fsdp", "--critic.ulysses-size", "2", "--actor.lr", "0.25", "--no-whiten-advantages"]
    )
    assert run.backend == "fsdp" and type(run.critic) is critic_fsdp.Config and run.critic.ulysses_size == 2
    assert run.actor.lr == 0.25 and not run.whiten_advantages
    assert ppo_loop.parse([]) == a_run()
    for bad in (["--critic", "fsdp", "--critic.tensor-model-parallel-size", "2"], ["--critic", "verl"]):
        with pytest.raises(SystemExit) as stop:
            ppo_loop.parse(bad)
        assert stop.value.code == 2
    assert "--critic" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_help_explains_every_flag(backend, capsys):
    with pytest.raises(SystemExit):
        ppo_loop.parse(["--critic", backend, "--help"])
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    after = [(flag, words) for flag, words in zip(lines, lines[1:], strict=False) if flag.startswith("--")]
    assert len(after) > 120 and not (mute := [flag for flag, words in after if words.startswith("(default")]), mute


def up_to_the_models(args, longest=20):
    """What main() checks before there is a process group."""
    run = ppo_loop.parse(args)
    ppo_loop.validate(run)
    run, tokenizer, model_config = ppo_loop.settle(run)
    ppo_loop.check_lengths(run, model_config, longest)
    ppo_loop.check_critic(run, model_config, tokenizer, longest)


BAD_FLAGS = {
    "--rollout-n 0": "--rollout-n 0: must be at least 1",
    "--steps 0": "--steps 0: must be at least 1",
    "--train-batch-size -1": "--train-batch-size -1: must be at least 1",
    "--max-response-length 0": "--max-response-length 0: must be at least 1",
    "--temperature 0": "--temperature 0.0: must be above 0 and finite",
    "--temperature nan": "--temperature nan: must be above 0",
    "--gamma 1.1": "--gamma 1.1: must be between 0 and 1",
    "--lam-policy -0.1": "--lam-policy -0.1: must be between 0 and 1",
    "--kl-coef nan": "--kl-coef nan: must be finite",
    "--eval-every -1": "--eval-every -1: must be finite and not below 0",
    "--reward-timeout inf": "--reward-timeout inf: must be above 0 and finite",
    "--lam-policy 0.5 --length-adaptive-alpha 0.1": "--lam-policy and --length-adaptive-alpha: give one",
    "--target-kl 0.1": "--target-kl 0.1: adapts --kl-coef, which is 0",
    "--kl-coef 1 --target-kl 0.1 --kl-horizon 255": "--kl-horizon 255: must be at least the 256 rows of a step",
    "--eval-prompts x.jsonl": "--eval-prompts x.jsonl: goes with --prompts",
    "--prompts x.jsonl": "--reward: is needed with --prompts",
    "--prompts x.jsonl --reward gsm8k --reward-model rm": "--reward and --reward-model: give one",
    "--prompt-template hello": "--prompt-template hello: has no {prompt} in it",
    "--top-p 0": "--top-p 0.0: must be above 0, and at most 1",
    "--top-p 1.1": "--top-p 1.1: must be above 0, and at most 1",
    "--vllm.tensor-parallel-size 2": "--vllm.tensor-parallel-size 2: must divide the 1 ranks",
    "--vllm.tensor-parallel-size 0": "--vllm.tensor-parallel-size 0: must divide the 1 ranks",
    "--vllm.kv-cache-gib 0": "--vllm.kv-cache-gib 0.0: must be above 0 and finite",
    "--vllm.gpu-memory-utilization 1.5": "--vllm.gpu-memory-utilization 1.5: must be above 0, and at most 1",
    "--actor.tis-cap 0": "--actor.tis-cap 0.0: must be above 0 and finite",
    "--actor.lr nan": "--actor.lr nan: must be above 0 and finite",
    "--actor.ppo-epochs 0": "--actor.ppo-epochs 0: must be above 0",
    "--actor.clip-ratio-low 1.5": "--actor.clip-ratio-low 1.5: must be above 0, and at most 1",
    "--actor.clip-ratio-c 1": "--actor.clip-ratio-c 1.0: must be above 1",
    "--actor.betas 0.9 1": "--actor.betas (0.9, 1.0): each must be",
    "--actor.grad-clip nan": "--actor.grad-clip nan: must be above 0",
    "--actor.seed -1": "--actor.seed -1: must be finite and not below 0",
    "--actor.fsdp-size 3": "--actor.fsdp-size 3: must divide the 1 ranks",
    "--actor.loss-agg-mode seq-mean-token-sum-norm": "--actor.loss-agg-mode seq-mean-token-sum-norm: needs",
    "--actor.override-config {": "--actor.override-config {: must be a JSON object",
    "--actor.override-config []": "--actor.override-config []: must be a JSON object",
    "--actor.model tiny-qwen7": "--actor.model tiny-qwen7: no such preset",
    "--actor.tokenizer /none": "--actor.tokenizer /none: no tokenizer there",
    "--actor.ppo-max-token-len-per-gpu 19": "--actor.ppo-max-token-len-per-gpu 19: the longest prompt",
    '--actor.override-config {"max_position_embeddings":19}': "--max-response-length: the longest prompt",
    "--critic.lr nan": "--critic.lr nan: must be above 0",
    "--critic.ppo-mini-batch-size 0": "--critic.ppo-mini-batch-size 0: must be above 0",
    "--critic.ulysses-size 3": "--critic.ulysses-size 3: must divide the 1 ranks",
    "--critic.activation-offload": "--critic.activation-offload: without --critic.gradient-checkpointing",
    "--critic.freeze-layers 9": "--critic.freeze-layers 9: the model has 2 layers",
    "--critic.model tiny-qwen7": "--critic.model tiny-qwen7: no such preset",
    "--critic.ppo-max-token-len-per-gpu 19": "--critic.ppo-max-token-len-per-gpu 19: the longest prompt with its",
    "--critic.forward-max-token-len-per-gpu 19": "--critic.forward-max-token-len-per-gpu 19: the longest prompt",
    '--critic.model tiny-gpt2 --critic.override-config {"vocab_size":50}': "--critic.model tiny-gpt2: knows 50 tokens",
    "--critic.value-head hl_gauss": "--critic.value-range: hl_gauss needs it",
    '--critic.model tiny-gpt2 --critic.override-config {"n_positions":19}': "--critic.model tiny-gpt2: takes 19 tokens",
    "--critic megatron --critic.tensor-model-parallel-size 3": "--critic.tensor-model-parallel-size 3: ",
    "--critic megatron --critic.ppo-mini-batch-size 0": "--critic.ppo-mini-batch-size 0: must be above 0",
}


@pytest.mark.parametrize("name", ["hf", "critic_hf"])
def test_a_folder_of_somebody_else_stops_the_run_before_it_begins(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("all of it")
    with pytest.raises(UserError, match=f"--out-dir {tmp_path}/{name}: holds something else"):
        ppo_loop.validate(ppo_loop.parse(["--out-dir", str(tmp_path)]))


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_a_bad_flag_is_one_line_that_names_it(flags, tmp_path):
    with pytest.raises(UserError) as caught:
        up_to_the_models([*flags.split(" "), "--out-dir", str(tmp_path)] if flags else [])
    assert str(caught.value).startswith(BAD_FLAGS[flags]) and "\n" not in str(caught.value)


def test_a_resumed_run_goes_on_with_the_kl_coef_it_had_adapted_unless_told(tmp_path):
    run, state = a_run(kl_coef=0.01, target_kl=0.1), {"kl_coef": 0.02, "run": {"kl_coef": 0.01}}
    assert ppo_loop.adapted_kl_coef(run, state) == 0.02
    assert ppo_loop.adapted_kl_coef(dataclasses.replace(run, target_kl=0.2), state) == 0.02
    assert ppo_loop.adapted_kl_coef(dataclasses.replace(run, kl_coef=0.03), state) == 0.03
    assert ppo_loop.adapted_kl_coef(dataclasses.replace(run, target_kl=None), state) == 0.01


def test_flags_that_can_work_are_taken(tmp_path):
    for backend in ("fsdp", "megatron"):
        up_to_the_models(["--critic", backend, "--out-dir", str(tmp_path), "--kl-coef", "0.1", "--target-kl", "0.1"])
    up_to_the_models(["--out-dir", str(tmp_path), "--actor.ppo-max-token-len-per-gpu", "20"])


def test_an_actor_that_cannot_be_built_is_named_by_its_flag():
    with pytest.raises(UserError, match="--actor.model tiny-qwen2.5-vl: "):
        policy("tiny-qwen2.5-vl", override_config="{}")


def test_an_actor_whose_tokens_see_later_ones_is_named_by_its_flag(tmp_path):
    transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    w = policy(str(tmp_path), from_scratch=True, override_config="{}")
    with pytest.raises(UserError, match=f"^--actor.model {tmp_path}: BertSelfAttention asks for more than causal"):
        w.compute_log_probs(batch_to_learn(w))


def test_settled_the_critic_is_like_the_actor_unless_told(tmp_path):
    base = ["--out-dir", str(tmp_path), "--actor.model", "tiny-llama", "--train-batch-size", "8", "--rollout-n", "3"]
    base += ["--steps", "5", "--critic.ppo-mini-batch-size", "10", "--critic.ppo-epochs", "2"]
    run, tokenizer, model_config = ppo_loop.settle(ppo_loop.parse(base))
    assert run.critic.model == run.actor.model == "tiny-llama" and model_config.model_type == "llama"
    assert (run.actor.lr, run.critic.lr, run.max_response_length, run.reward) == (5e-4, 1e-3, 8, "addition")
    assert run.critic.total_training_steps == 5 * 2 * 3  # 24 rows are 3 mini-batches of 10
    file = ["--prompts", "x.jsonl", "--reward", "gsm8k", "--critic.model", "tiny-gpt2"]
    run, _, _ = ppo_loop.settle(ppo_loop.parse(base + file))
    assert (run.actor.lr, run.max_response_length, run.reward) == (1e-6, 256, "gsm8k")
    assert run.critic.model == "tiny-gpt2" and run.critic.lr is None


def test_without_vllm_transformers_generates_and_a_line_says_so(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    run, _, model_config = ppo_loop.settle(ppo_loop.parse(["--rollout", "vllm"]))
    assert run.rollout == "hf" and run.actor.override_config == "{}" and model_config.num_attention_heads == 4
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "vllm is not installed (pip install vllm==" in said, said
    assert "so transformers generates" in said
    ppo_loop.settle(ppo_loop.parse([]))
    assert capsys.readouterr().out == ""


def test_heads_of_tiny_actors_are_as_wide_as_vllm_wants_them(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name if name == "vllm" else find(name, *rest))
    for kind in ("tiny-qwen2", "tiny-gpt2", "tiny-gemma2"):
        run, _, c = ppo_loop.settle(ppo_loop.parse(["--rollout", "vllm", "--actor.model", kind]))
        width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        assert (run.rollout, c.num_attention_heads, width) == ("vllm", 2, 32), kind
        assert run.critic.override_config == run.actor.override_config  # it starts as the actor does
        assert f"{kind} with 2 heads of 32 features" in capsys.readouterr().out
    for flags in ('{"head_dim": 64}', '{"num_attention_heads": 1}'):  # the user's own
        run, _, _ = ppo_loop.settle(ppo_loop.parse(["--rollout", "vllm", "--actor.override-config", flags]))
        assert run.actor.override_config == flags and capsys.readouterr().out == ""


def test_ranks_that_share_an_engine_share_its_heads():
    config = ActorConfig(model="tiny-qwen2")
    model_config = common.load_model_config(config, common.load_tokenizer(config))
    for size in (1, 2, 3, 4, 8):
        run = a_run(actor=config, rollout="vllm", vllm=ppo_loop.VLLMConfig(tensor_parallel_size=size))
        if size in (3, 8):
            with pytest.raises(UserError, match=f"--vllm.tensor-parallel-size {size}: tiny-qwen2 has 4 heads, which"):
                ppo_loop.check_vllm(run, model_config)
        else:
            ppo_loop.check_vllm(run, model_config)
        ppo_loop.check_vllm(dataclasses.replace(run, rollout="hf"), model_config)


def test_every_pass_visits_every_prompt_once_and_a_step_knows_its_own():
    pick = lambda step, size=7, n=23, seed=0: ppo_loop.indices_of_step(step, size, n, seed, "prompts")
    stream = [i for step in range(23) for i in pick(step)]  # 7 passes of 23
    passes = [stream[i : i + 23] for i in range(0, len(stream), 23)]
    assert all(sorted(p) == list(range(23)) for p in passes)
    assert len(set(map(tuple, passes))) == 7 and list(range(23)) not in passes
    assert pick(9) == stream[63:70] and pick(9, seed=1) != pick(9)
    assert len(pick(3, size=50, n=4)) == 50 and collections.Counter(pick(3, size=48, n=4)) == dict.fromkeys(
        range(4), 12
    )


# ---------------------------------------------------------------------------------------------------------------------
# Phases, checkpoints, export
# ---------------------------------------------------------------------------------------------------------------------


def test_phases_bring_their_workers_and_send_them_home():
    class Worker:
        def __init__(self, name):
            self.name = name

        def onload(self):
            time.sleep(0.02)
            seen.append(f"{self.name} on")

        def offload(self):
            seen.append(f"{self.name} off")

    seen, a, b = [], Worker("a"), Worker("b")
    phases = ppo_loop.Phases(True, torch.device("cpu"))
    with phases("x", a, None, b):
        seen.append("work")
        time.sleep(0.05)
    assert seen == ["a on", "b on", "work", "b off", "a off"]
    with phases("x", a):
        pass
    metrics = phases.take()
    assert 0.11 <= metrics["time/x"] < 5 and 0.06 <= metrics["time/x_onload"] < metrics["time/x"] - 0.05
    assert metrics["memory/x_onload_gib"] == 0 and "time/x_offload" in metrics and phases.take() == {}
    seen.clear()
    phases.add("time/critic", 3.0)
    phases.add("time/values", 1.0)
    assert phases.line() == "seconds    values 1.0  critic 2.0"  # of the whole run, and no second counted twice
    with ppo_loop.Phases(False, torch.device("cpu"))("x", a, b):
        seen.append("work")
    assert seen == ["work"]


def state_of(w):
    """name -> every tensor of weights and optimizer, whole."""
    tensors, _, _ = critic_fsdp.checkpoint_tensors(w.model, w.optimizer)
    return {name: critic_fsdp.full_tensor(x).clone() for name, x in tensors.items()}


def same(a, b):
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["tiny-qwen2", "tiny-gemma2"])
def test_offload_and_onload_change_no_bit(kind):
    stays, goes = policy(kind), policy(kind)
    batch = batch_to_learn(stays)
    for _ in range(2):
        stays.update_policy(batch)
        goes.offload()
        goes.onload()
        goes.update_policy(batch)
    assert same(state_of(stays), state_of(goes))
    goes.offload()
    goes.onload()
    assert torch.equal(stays.compute_log_probs(batch), goes.compute_log_probs(batch))
    head, embedding = goes.model.lm.get_output_embeddings().weight, goes.model.lm.get_input_embeddings().weight
    assert (head is embedding) == (kind == "tiny-gemma2")
    engine, prompts = engine_of(goes), some_prompts()
    before = engine.generate(prompts, list("abcdefghi"), [5] * 9, 1.0)
    engine.offload()
    engine.onload()
    engine.sync(goes.weights(torch.float32))
    assert engine.generate(prompts, list("abcdefghi"), [5] * 9, 1.0) == before


def test_a_synced_engine_has_the_actors_weights_after_an_update():
    w = policy("tiny-gpt2")
    engine = engine_of(w)
    before = {name: x.clone() for name, x in engine.model.state_dict().items()}
    w.update_policy(batch_to_learn(w))
    engine.sync(w.weights(torch.float32))
    lm = plain(w)
    for name, x in lm.state_dict().items():
        assert torch.equal(engine.model.state_dict()[name], x), name
    assert not same(before, dict(engine.model.state_dict()))


@pytest.mark.parametrize("kind", ["tiny-qwen2", "tiny-gpt2"])
def test_a_checkpoint_restores_every_bit_and_the_next_update(kind, tmp_path):
    fields = dict(ppo_mini_batch_size=3, lr_warmup_steps=10)
    w, again = policy(kind, **fields), policy(kind, **fields)
    batch = batch_to_learn(w)
    w.update_policy(batch)
    saved = state_of(w)
    w.save_checkpoint(tmp_path / "c")
    assert same(state_of(w), saved) and any("exp_avg_sq" in name for name in saved)
    for _ in range(2):
        again.update_policy(batch_to_learn(again, seed=1))
    assert not same(state_of(again), saved)
    again.load_checkpoint(tmp_path / "c")
    assert (again.updates, again.optimizer_steps) == (1, 3) and same(state_of(again), saved)
    assert torch.equal(again.compute_log_probs(batch), w.compute_log_probs(batch))
    metrics = w.update_policy(batch)
    assert again.update_policy(batch) == metrics and same(state_of(w), state_of(again))
    assert metrics["actor/lr"] == pytest.approx(1e-3 * 6 / 10)  # the warm-up went on: the sixth step


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    policy().save_checkpoint(tmp_path / "c")
    policy(override_config='{"initializer_range": 0.5}').load_checkpoint(tmp_path / "c")  # of weights, which are there
    with pytest.raises(UserError, match=f"--resume {tmp_path}/c: is of another model: "):
        policy(override_config='{"num_hidden_layers": 1}').load_checkpoint(tmp_path / "c")
    (tmp_path / "c" / "trainer.json").unlink()
    with pytest.raises(UserError, match=f"--resume {tmp_path}/c: damaged, trainer.json is missing"):
        policy().load_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_a_model_of_transformers_with_the_same_weights(kind, tmp_path):
    w = policy(kind, lr=1e-2)
    batch = batch_to_learn(w)
    w.update_policy(batch)
    w.export_hf(tmp_path / "hf", common.char_tokenizer())
    lm, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
    weights = dict(w.weights())
    assert same(weights, {n: p.detach() for n, p in lm.named_parameters()})
    tied = lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    assert tied == (kind in ("tiny-gemma2", "tiny-gpt2"))
    again = policy(str(tmp_path / "hf"), override_config="{}")
    assert same(weights, dict(again.weights()))
    torch.testing.assert_close(again.compute_log_probs(batch), w.compute_log_probs(batch), rtol=0, atol=1e-6)
    assert ppo_loop.stop_tokens(again.config, common.load_tokenizer(again.config)) == [EOS]


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(tmp_path):
    common.char_tokenizer().save_pretrained(tmp_path)
    tokenizer = common.char_tokenizer()
    for eos, ids in ((None, [1]), (7, [1, 7]), ([7, 9], [1, 7, 9])):
        transformers.GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path)
        assert ppo_loop.stop_tokens(ActorConfig(model=str(tmp_path)), tokenizer) == ids
    assert ppo_loop.stop_tokens(ActorConfig(model="tiny-qwen2"), tokenizer) == [1]
