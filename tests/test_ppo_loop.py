"""ppo_loop.py on one process: policy loss, actor, rollout, environment, rewards, advantages, prompts, flags, phases.

What it computes is compared with plain loops over scalars, or with transformers one unpacked row after another.
"""

import collections
import copy
import dataclasses
import math

import pytest
import torch
import transformers
from helpers import random_batch, rows_of
from torch.utils._python_dispatch import TorchDispatchMode

import common
import critic_fsdp
import ppo_loop
from ppo_loop import ActorConfig, PolicyWorker

KINDS = ("tiny-qwen2", "tiny-llama", "tiny-gemma2", "tiny-gpt2", "tiny-qwen3-moe")
SHARP = '{"initializer_range": 0.1}'  # the usual 0.02 makes every token as likely as the next, and hides mistakes


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


def batch_to_learn(w, n=9, seed=0, **options):
    """Rows with the columns of an update: old and reference log-probs near the actor's own, so that some clip."""
    batch, g = random_batch(n, seed, **options), torch.Generator().manual_seed(seed)
    noise = lambda scale: scale * torch.randn(len(batch.input_ids), generator=g) * batch.response_mask
    log_probs_T = w.compute_log_probs(batch)
    batch.old_log_probs, batch.ref_log_probs = log_probs_T + noise(0.6), log_probs_T + noise(0.5)
    batch.advantages = noise(1.0)
    return batch


def a_run(backend="fsdp", **fields):
    """A Run as parse() would make it of these flags."""
    config = ppo_loop.critic_module(backend).Config
    return ppo_loop.Run(critic=dataclasses.replace(config(), model="actor"), backend=backend, **fields)


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
        ("tiny-gemma2", 1.0, dict(kl_loss_coef=0.3, kl_loss_type="k3+", entropy_coeff=0.05)),
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
