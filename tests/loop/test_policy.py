"""The actor and the reference: log-probs, loss and step by plain transformers, and checkpoints."""

import dataclasses
import math
from functools import partial
from unittest import mock

import bpco
import models
import pytest
import sao
import torch
import transformers
from helpers import HALFWAY, captured_gradients, full_tensor, interrupted_in, refused
from ppo_helpers import (
    KINDS,
    TIED,
    TOKENIZER,
    batch_of,
    batch_to_learn,
    engine_of,
    plain,
    policy,
    same,
    save_with_corrections,
    some_prompts,
    tied,
)
from reference import loss_by_hand, loss_of_one_action

import common
import critic_fsdp
import ppo_loop
from common import UserError
from ppo_loop import ActorConfig


@pytest.mark.parametrize("low, high, dual", [(0.1, 0.5, None), (0.3, 0.2, 1.5), (1.0, 0.28, 3.0)])
def test_policy_loss_is_that_of_the_papers(low, high, dual):
    """Its value, gradient and counts equal a loop over the actions, some of which have a ratio of
    exactly 1. Masked entries may be NaN, and the policies may be 200 nats apart."""
    g = torch.Generator().manual_seed(3)
    new_T, step_T, a_T, weights_T = torch.randn(4, 400, generator=g, dtype=torch.float64)
    mask_T = torch.rand(400, generator=g) < 0.7
    step_T[:50] = 0
    old_T = new_T + step_T
    weights_T = weights_T.abs() * mask_T
    actions = torch.stack([new_T - old_T, a_T], 1)[mask_T].tolist()
    expected = [loss_of_one_action(math.exp(step), a, low, high, dual) for step, a in actions]
    loss, slope, clipped, cut = torch.tensor(expected, dtype=torch.float64).T
    assert clipped.sum() > 20 and (cut.sum() > 5) == (dual is not None)  # the cases occur
    for x_T in (new_T, old_T, a_T):
        x_T[~mask_T] = math.nan
    new_T.requires_grad_()
    ours, n_clipped, n_cut = ppo_loop.policy_loss(
        new_T, old_T, a_T, mask_T, weights_T, low, high, dual
    )
    ours.backward()
    assert ours.item() == pytest.approx((weights_T[mask_T] * loss).sum().item(), rel=1e-12)
    torch.testing.assert_close(
        new_T.grad[mask_T], weights_T[mask_T] * slope, rtol=1e-12, atol=1e-14
    )
    assert (new_T.grad[~mask_T] == 0).all()
    assert (n_clipped, n_cut) == (clipped.sum(), cut.sum())

    new_T = torch.tensor([-200.0, 0.0], requires_grad=True)
    ones_T = torch.ones(2)
    columns = (new_T.detach().flip(0), torch.tensor([1.0, -1.0]), ones_T > 0, ones_T)
    loss, _, _ = ppo_loop.policy_loss(new_T, *columns, low, high, dual)
    loss.backward()
    assert loss.isfinite() and new_T.grad.isfinite().all()


BANDS = {"ratio_band": sao, "probability_band": bpco}
ACTORS = [  # model, temperature, fields of ActorConfig
    ("tiny-qwen2", 1.0, dict(kl_loss_coef=0.1, kl_loss_type="abs", ratio_band=(0.8, 1.3))),
    ("tiny-qwen2", 0.7, dict(loss_agg_mode="seq-mean-token-sum", entropy_coeff=0.1,
      clip_ratio_c=None)),
    ("tiny-qwen2", 1.0, dict(loss_agg_mode="token-sum", probability_band=0.01)),
    ("tiny-llama", 0.7, dict(loss_agg_mode="seq-mean-token-mean", kl_loss_coef=0.3,
      clip_ratio_high=0.4)),
    ("tiny-gemma2", 0.7, dict(kl_loss_coef=0.3, kl_loss_type="k3", entropy_coeff=0.05,
      tis_cap=1.3)),
    ("tiny-gpt2", 0.7, dict(loss_agg_mode="seq-mean-token-sum-norm", kl_loss_coef=0.2,
      kl_loss_type="k1")),
    ("tiny-qwen3-moe", 0.7, dict(kl_loss_coef=0.2, kl_loss_type="abs", clip_ratio_c=1.2)),
]  # fmt: skip


def an_actor(kind, temperature, fields, tokens=90):
    """(a PolicyWorker, a batch that it learns in one step, what loss_by_hand says of it, plain
    transformers in float64). A field in BANDS makes it the actor of this fork."""
    fields = {"ppo_max_token_len_per_gpu": tokens, **fields}
    bands = {name: fields.pop(name) for name in BANDS.keys() & fields.keys()}
    actor = ppo_loop.DataParallelPPOActor
    for name, band in bands.items():
        actor = type("Actor", (BANDS[name].Actor,), {"band": band})
    with mock.patch.object(ppo_loop, "DataParallelPPOActor", actor):
        w = policy(kind, temperature, **fields)
    batch = batch_to_learn(w, seed=1)
    lm = plain(w, torch.float64)
    return w, batch, partial(loss_by_hand, lm, batch, w.run, **bands), lm


@pytest.mark.parametrize("kind, temperature, fields", ACTORS)
def test_log_probs_and_a_step_are_those_of_transformers_in_float64(kind, temperature, fields):
    """Row by row, and over several micro-batches. So are log-probs of a reference, which has no
    optimizer."""
    w, batch, by_hand, lm = an_actor(kind, temperature, fields)
    assert tied(w.model.lm) == (kind in TIED)  # also after sharding
    rows = common.describe(batch)
    assert len(w.critic.plan_micro_batches(rows, w.critic.max_tokens).sizes[0]) > 1
    assert common.cost_of(rows) < len(batch.input_ids)
    loss, sums, expected_T, entropy_T = by_hand()
    assert entropy_T[batch.response_mask].std() > 0.05  # positions differ

    log_probs_T = w.compute_log_probs(batch)
    with torch.no_grad():
        together_T, ours_T = w.critic.forward(w.critic.micro_batch(batch)).unbind(1)
    for ours, theirs in ((log_probs_T, expected_T), (together_T, expected_T), (ours_T, entropy_T)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)

    reference = policy(kind, temperature, trains=False)
    assert reference.critic.optimizer is None
    assert not any(p.requires_grad for p in reference.model.parameters())
    assert torch.equal(log_probs_T, reference.compute_log_probs(batch))

    # every weight's gradient
    loss.backward()
    with captured_gradients(w) as seen:
        metrics = w.update_policy(batch)
    [ours] = seen
    for name, p in lm.named_parameters():
        atol = 1e-5 * max(float(p.grad.abs().max()), 1e-3)
        x = ours[f"lm.{name}"].double()
        torch.testing.assert_close(x, p.grad, rtol=1e-4, atol=atol, msg=name)

    # and the metrics
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in lm.parameters()))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["actor/pg_clipfrac"] > 0.05  # some actions are clipped
    has_band = bool(BANDS.keys() & fields.keys())
    assert has_band == (metrics.get("actor/pg_outside", 0.0) > 0.05)
    for key, x in sums.items():
        assert metrics[f"actor/{key}"] == pytest.approx(x, rel=1e-4, abs=1e-6), key


def test_without_old_log_probs_an_update_is_one_step():
    """Without those of a reference, the KL to it is 0."""
    w, batch, *_ = an_actor("tiny-qwen2", 1.0, dict(kl_loss_coef=0.1))
    few = dataclasses.replace(batch, old_log_probs=None, ref_log_probs=None)
    assert w.update_policy(few)["actor/kl_loss"] == 0
    w.update_policy(dataclasses.replace(few, response_mask=~few.response_mask & False))
    assert torch.equal(w.old_log_probs, 0 * batch.advantages)
    for fields in (dict(ppo_mini_batch_size=len(batch) - 1), dict(ppo_epochs=2)):
        words = "an update of 2 optimizer steps needs the log-probs from before it"
        with refused(words, begin="log-probs: is missing; "):
            policy(**fields).update_policy(few)


@pytest.mark.parametrize("kind, temperature, fields", ACTORS)
def test_the_head_makes_a_chunk_of_logits_at_a_time_and_keeps_none(
    kind, temperature, fields, monkeypatch
):
    """In one chunk and one micro-batch, the gradient is the same."""
    monkeypatch.setattr(ppo_loop, "LOGITS_AT_ONCE", 5 * 99)
    w, batch, *_ = an_actor(kind, temperature, fields)
    made, kept = set(), set()
    head = w.model.lm.get_output_embeddings()
    head.register_forward_hook(lambda head, args, out: made.add(tuple(out.shape)))
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.add(tuple(x.shape)) or x, lambda x: x
    )
    with hooks, captured_gradients(w) as seen:
        w.update_policy(batch)
    assert max(made) == (1, 5, 99)
    logits = [shape for shape in kept if shape[-1:] == (99,) and shape != (64, 99)]  # not the head
    assert kept and not logits

    monkeypatch.setattr(ppo_loop, "LOGITS_AT_ONCE", 10**6)
    whole, *_ = an_actor(kind, temperature, fields, tokens=10_000)
    assert len(whole.critic.plan_micro_batches(common.describe(batch), 10_000).sizes[0]) == 1
    with captured_gradients(whole) as seen_whole:
        whole.update_policy(batch)
    [ours], [theirs] = seen, seen_whole
    norm = math.sqrt(sum(float(x.square().sum()) for x in theirs.values()))
    for name, x in theirs.items():
        if x.norm() > 1e-5 * norm:  # else all of it is rounding
            assert (ours[name] - x).norm() / x.norm() < 2e-6, name


@pytest.mark.parametrize("kind, sense", [("k1", 0), ("k2", "policy"), ("k3", "reference")])
def test_what_the_gradient_of_a_kl_loss_is_on_average(kind, sense):
    """Over what the policy draws, in float64, against autograd of both KLs."""
    torch.manual_seed(0)
    logits_V = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref_V = torch.randn(6, dtype=torch.float64).log_softmax(0)
    log_p_V = logits_V.log_softmax(0)
    drawn_V = log_p_V.detach().exp()  # how often each token is drawn, which has no gradient
    loss = (drawn_V * ppo_loop.kl_penalty(log_p_V, ref_V, kind)).sum()
    [gradient_V] = torch.autograd.grad(loss, logits_V, retain_graph=True)

    kl = {
        0: 0 * log_p_V.sum(),
        "policy": (log_p_V.exp() * (log_p_V - ref_V)).sum(),
        "reference": (ref_V.exp() * (ref_V - log_p_V)).sum(),
    }
    [expected_V] = torch.autograd.grad(kl[sense], logits_V)
    torch.testing.assert_close(gradient_V, expected_V, rtol=1e-9, atol=1e-12)


LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lr": 1e-2}
ADAPTED = [(kind, fields) for kind in KINDS for fields in ({}, LORA)]


def state_of(w):
    """name -> full tensor, for all weights and optimizer state."""
    own = (w.critic.model, w.critic.optimizer, w.own_weights)
    tensors, _, _ = critic_fsdp.checkpoint_tensors(*own)
    return {name: full_tensor(x).clone() for name, x in tensors.items()}


@pytest.mark.parametrize("kind, lora", ADAPTED)
def test_a_checkpoint_restores_every_bit(kind, lora, tmp_path):
    """The next update is the same, also after offloading. A checkpoint of another model is
    refused."""
    fields = dict(ppo_mini_batch_size=3, lr_warmup_steps=10, **lora)
    w, again = policy(kind, **fields), policy(kind, **fields)
    batch = batch_to_learn(w)
    w.update_policy(batch)
    saved = state_of(w)
    folder = str(tmp_path / "c")

    # a copy, which is written after the next update
    write = w.checkpoint_writer(copy=True)
    assert same(state_of(w), saved) and any("exp_avg_sq" in name for name in saved)
    metrics = w.update_policy(batch)
    with common.published(folder) as tmp:
        write(tmp)

    # another worker with another state loads it
    for _ in range(2):
        again.update_policy(batch_to_learn(again, seed=1))
    assert not same(state_of(again), saved)
    again.load_checkpoint(folder)
    again.offload()
    again.onload()
    assert tied(again.model.lm) == (kind in TIED)
    assert (again.critic.updates, again.critic.optimizer_steps) == (1, 3)
    assert same(state_of(again), saved)
    assert again.update_policy(batch) == metrics and same(state_of(w), state_of(again))
    assert metrics["actor/lr"] == pytest.approx(w.config.lr * 6 / 10)  # the sixth of the warm-up

    # a model of the same shape, unless its weights are a base of adapters, and of another shape
    if not lora:
        policy(kind, override_config='{"initializer_range": 0.5}').load_checkpoint(folder)
    with pytest.raises(UserError, match=f"--resume {folder}: is of another model: "):
        policy(kind, override_config='{"num_hidden_layers": 1}', **lora).load_checkpoint(folder)


def test_an_actor_notices_another_model_meanwhile_and_other_attention(monkeypatch):
    """The other one runs before the backward, which may rerun layers."""
    w, again = policy(), policy()
    batch = batch_to_learn(w)
    loss = w.critic.loss

    def loss_after_another(*args):
        common.CurrentPack.set(common.Pack([1], "cpu"))
        return loss(*args)

    monkeypatch.setattr(w.critic, "loss", loss_after_another)
    with pytest.raises(RuntimeError, match="^another model has run meanwhile"):
        w.update_policy(batch)

    again.model.lm.base_model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="^the attention of packed rows was not called: "):
        again.compute_log_probs(batch)


def test_a_row_above_the_budget_is_refused():
    batch = batch_to_learn(policy(), 4)
    longest, row = batch.longest
    for budget in ("ppo", "forward"):
        w = policy(**{f"{budget}_max_token_len_per_gpu": longest - 1})
        flag = f"--actor.{budget}-max-token-len-per-gpu {longest - 1}"
        for call in (w.compute_log_probs, w.update_policy):
            with refused(f"{flag}: row {row} has {longest} tokens; give {longest}"):
                call(batch)

        # it has not begun an update
        w.update_policy(batch.select([i for i, n in enumerate(batch.lengths) if n < longest]))


@pytest.mark.parametrize("place", ["forward", "backward", "step"])
def test_after_an_update_that_fails_an_actor_saves_only_what_was_before_it(place, tmp_path):
    """A new actor that loads the checkpoint goes on as one that has never failed."""
    w, whole, new = (policy(ppo_max_token_len_per_gpu=90) for _ in range(3))
    batch = batch_to_learn(w)
    for one in (w, whole):
        one.update_policy(batch)
    count = len(w.critic.plan_micro_batches(common.describe(batch), w.critic.max_tokens).sizes[0])
    assert count > 1
    with interrupted_in(w.critic, place, count):
        w.update_policy(batch)

    refused = [lambda: w.update_policy(batch), lambda: w.compute_log_probs(batch)]
    refused += [lambda: w.load_checkpoint(tmp_path)]
    if place == "step":
        refused += [w.checkpoint_writer, lambda: w.export_hf(tmp_path / "hf", TOKENIZER)]
    for call in refused:
        with pytest.raises(RuntimeError, match=HALFWAY):
            call()

    if place != "step":
        assert same(dict(w.weights()), dict(whole.weights()))
        with common.published(str(tmp_path / "c")) as tmp:
            w.checkpoint_writer()(tmp)
        new.load_checkpoint(str(tmp_path / "c"))
        assert new.update_policy(batch) == whole.update_policy(batch)
        assert same(state_of(new), state_of(whole))


@pytest.mark.parametrize("kind, lora", ADAPTED)
def test_transformers_and_the_engine_read_an_export(kind, lora, tmp_path):
    """Adapters are merged into the weights."""
    w = policy(kind, **lora)
    engine = engine_of(w)
    batch = batch_to_learn(w)
    w.update_policy(batch)
    folder = str(tmp_path / "hf")
    w.export_hf(folder, TOKENIZER)

    lm, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    weights = dict(w.weights())
    assert same(weights, {n: p.detach() for n, p in lm.named_parameters()})
    assert tied(lm) == (kind in TIED)
    engine.sync(w.weights(torch.float32))
    assert same(dict(engine.model.state_dict()), dict(lm.state_dict()))

    # so does an actor, although these settings are invalid without sampling
    common.write_json(f"{folder}/generation_config.json", {"temperature": 0.5})
    again = policy(folder, override_config="{}")
    again.export_hf(f"{folder} again", TOKENIZER)
    assert same(weights, dict(again.weights()))
    ours, theirs = (x.compute_log_probs(batch) for x in (again, w))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 if lora else 1e-6)


@pytest.mark.parametrize("kind", ["glm4_moe", "nemotron_h", "deepseek_v3"])
def test_the_correction_of_a_router_reaches_the_engine_and_the_export(kind, tmp_path):
    """It is no parameter, but stored with them, and decides which experts a token gets."""
    save_with_corrections(models.tiny_config(transformers.CONFIG_MAPPING[kind]), tmp_path)
    w = policy(tmp_path, override_config="{}")
    rows = [(prompt, 7 + i, 12) for i, prompt in enumerate(some_prompts())]
    batch = batch_of([prompt for prompt, _, _ in rows], engine_of(w).generate(rows, 1.0))
    log_probs_T = w.compute_log_probs(batch)
    torch.testing.assert_close(log_probs_T, batch.rollout_log_probs, rtol=0, atol=1e-5)
    w.export_hf(f"{tmp_path}/hf", TOKENIZER)
    again = policy(f"{tmp_path}/hf", override_config="{}")
    assert torch.equal(again.compute_log_probs(batch), log_probs_T)


def test_what_ends_a_turn_is_said_by_tokenizer_and_generation_config(tmp_path):
    for eos, ids in ((None, [1]), (7, [1, 7]), ([7, 9], [1, 7, 9])):
        transformers.GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path)
        assert ppo_loop.stop_tokens(ActorConfig(model=str(tmp_path)), TOKENIZER) == ids
