"""An actor that trains only LoRA adapters, and its reference, which is the same model without."""

import dataclasses
import types

import pytest
import torch
from helpers import HALFWAY, captured_gradients, full_tensor, interrupted_in, refused_in_a_box
from ppo_helpers import KINDS, batch_to_learn, plain, policy, same, tied
from reference import loss_by_hand

import common
import ppo_loop
from common import UserError

LORA = {"lora_rank": 4, "lora_alpha": 8.0}  # so adapters are scaled by 2


def weights_of(w, adapters):
    """name -> whole adapter of this actor, or whole weight of the model that they belong to."""
    found = {}
    for name, p in w.model.named_parameters():
        if (".lora_" in name) == adapters:
            found[name] = full_tensor(p.detach()).clone()
    return found


def an_adapted_actor(kind="tiny-qwen2", steps=2, **fields):
    """(an actor whose adapters have made these steps, the batch that it has learned)."""
    w = policy(kind, 0.7, **LORA | {"ppo_max_token_len_per_gpu": 90, "lr": 1e-2} | fields)
    batch = batch_to_learn(w, seed=1)
    for _ in range(steps):
        w.update_policy(batch)
    return w, batch


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapters_gradient_is_that_of_the_layers_weight_by_the_chain_rule(kind):
    """W + 2 B A: dA = 2 B^T dW and dB = 2 dW A^T, with dW of plain transformers in float64. The
    weights themselves stay as they are. Recomputed activations give the same."""
    seen = []
    for recomputes in (False, True):
        w, batch = an_adapted_actor(kind, kl_loss_coef=0.1, gradient_checkpointing=recomputes)
        assert tied(w.model.lm) == tied(plain(w))
        with captured_gradients(w) as gradients:
            lm = plain(w, torch.float64)
            adapters = weights_of(w, adapters=True)
            before = weights_of(w, adapters=False)
            w.update_policy(batch)
        seen += gradients
        assert same(before, weights_of(w, adapters=False))
        assert not same(adapters, weights_of(w, adapters=True))

    loss, *_ = loss_by_hand(lm, batch, w.run)
    loss.backward()
    slopes = {name: p.grad for name, p in lm.named_parameters()}
    largest = 0.0
    for ours in seen:
        assert ours.keys() == adapters.keys() and len(ours) > 10
        for name, x in ours.items():
            layer, _, factor = name.removesuffix(".default.weight").partition(".lora_")
            dW = slopes[f"{layer.removeprefix('lm.')}.weight"]
            if kind == "tiny-gpt2":  # stores its weights transposed
                dW = dW.T
            a, b = (adapters[f"{layer}.lora_{x}.default.weight"].double() for x in "AB")
            expected = 2 * b.T @ dW if factor == "A" else 2 * dW @ a.T
            atol = 1e-5 * max(float(expected.abs().max()), 1e-3)
            torch.testing.assert_close(x.double(), expected, rtol=1e-4, atol=atol, msg=name)
            largest = max(largest, float(expected.abs().max()))
    assert largest > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_model_without_adapters(kind):
    """Its log-probs are those of a second model, bit for bit, before and after the actor learns,
    and the actor's own go on to be those of its merged weights."""
    w, batch = an_adapted_actor(kind, steps=0)
    alone = policy(kind, 0.7, trains=False)
    base_T = alone.compute_log_probs(batch)
    for step in range(3):
        ours_T = w.compute_log_probs(batch)
        assert torch.equal(w.compute_log_probs_of_base(batch), base_T)
        assert torch.equal(ours_T, base_T) == (step == 0)
        assert torch.equal(alone.compute_log_probs_of_base(batch), base_T)
        w.update_policy(batch)

    _, _, expected_T, _ = loss_by_hand(plain(w, torch.float64), batch, w.run)
    log_probs_T = w.compute_log_probs(batch).double()
    torch.testing.assert_close(log_probs_T, expected_T, rtol=1e-5, atol=2e-5)


def test_a_checkpoint_holds_adapters_alone(tmp_path):
    """With another model, or other adapters, it is refused. That it restores every bit is in
    test_policy.py."""
    w, _ = an_adapted_actor(ppo_mini_batch_size=3)
    folder = str(tmp_path / "c")
    with common.published(folder) as tmp:
        w.checkpoint_writer(copy=True)(tmp)
    names, _ = common.open_checkpoint_weights(folder)
    names = [name for name in names if name != "rng"]
    adapters = weights_of(w, adapters=True)
    assert len(names) == 4 * len(adapters) and all(".lora_" in name for name in names)

    for words, fields in (
        ("weights of the reference", {"override_config": '{"initializer_range": 0.5}'}),
        ("lora_rank 4 there, 2 here", {"lora_rank": 2}),
        ("lora_alpha 8.0 there, None here; lora_rank 4 there, None", {"lora_rank": 0}),
    ):
        with pytest.raises(UserError, match=f"is of another model: .*{words}"):
            policy(temperature=0.7, **LORA | fields).load_checkpoint(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_held_in_the_dtype_of_products(kind, tmp_path):
    """bfloat16: neither it nor the weights of a second model as reference are float32. Log-probs
    are those of a policy whose frozen weights are float32, and so is the export."""
    w, batch = an_adapted_actor(kind, param_dtype="bfloat16")
    alone = policy(kind, 0.7, trains=False, param_dtype="bfloat16")
    for one in (w, alone):
        dtypes = {(p.requires_grad, p.dtype) for p in one.model.parameters()}
        assert dtypes - {(True, torch.float32)} == {(False, torch.bfloat16)}
    base_T = alone.compute_log_probs(batch)
    assert torch.equal(w.compute_log_probs_of_base(batch), base_T)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "hold_frozen", lambda *_: None)
        wide = policy(kind, 0.7, **LORA, param_dtype="bfloat16")
    assert torch.equal(wide.compute_log_probs(batch), base_T)
    assert {x.dtype for _, x in w.weights()} == {torch.float32}


@pytest.mark.parametrize("flags, words", [
    ("--critic megatron", "needs --critic fsdp and --critic.model actor"),
    ("--critic.model tiny-llama", "needs --critic fsdp and --critic.model actor"),
    ("--actor.lora-rank 4", "needs both --actor.lora-rank"),
    ("--critic.lora-rank 4", "needs both --actor.lora-rank"),
    ("--critic.strategy fsdp1", "--critic.strategy fsdp1: is about a base of its own"),
    ("--critic.freeze-modules embed", "--critic.freeze-modules embed: is about a base"),
])  # fmt: skip
def test_what_a_critic_on_the_actors_base_cannot_have_is_refused(flags, words, capfd):
    with refused_in_a_box(capfd, words):
        ppo_loop.parse(f"--share-base {flags}".split())


def on_one_base():
    """(actor, critic) with adapters on one base, and a batch that both can learn."""
    flags = "--share-base --actor.lora-rank 4 --critic.lora-rank 4 --supervised-steps 0"
    run, task = ppo_loop.set_up(ppo_loop.parse(flags.split()))
    new = types.SimpleNamespace(folder=None, halvings=0)
    actor, _, critic, *_ = ppo_loop.build(run, task, common.setup_distributed(), new)
    batch = batch_to_learn(actor)
    return actor, critic, dataclasses.replace(batch, values=None, returns=batch.advantages)


@pytest.mark.parametrize("place", ["backward", "step"])
def test_when_a_critic_on_the_actors_base_fails_halfway_both_go_on_no_more(place):
    """What it has left must not reach the actor's next step, nor a checkpoint."""
    actor, critic, batch = on_one_base()
    with interrupted_in(critic.critic, place, 1):
        critic.update_critic(batch)

    calls = [lambda: actor.update_policy(batch), lambda: actor.compute_log_probs(batch)]
    calls += [lambda: critic.update_critic(batch)]
    if place == "step":
        calls += [critic.checkpoint_writer, actor.checkpoint_writer]
    for call in calls:
        with pytest.raises(RuntimeError, match=HALFWAY):
            call()


def test_an_actor_clips_only_what_it_trains():
    """Gradients of a critic on its base, which an update has left, are not in its norm."""
    actor, critic, batch = on_one_base()
    fresh, _, _ = on_one_base()
    critic.compute_values(batch)  # it is the critic's turn
    for p in critic.critic.parameters:
        p.grad = torch.ones_like(p)
    assert actor.update_policy(batch) == fresh.update_policy(batch)
