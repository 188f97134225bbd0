"""nano_critic.py, the whole idea in one file, makes the updates of critic_fsdp.py, and its formulas
are those of common.py and ppo_loop.py.

That it runs, and that PPO's reward rises, is in test_readme.py."""

import ast
import sys
import types

import nano_critic
import pytest
import torch
import transformers
from helpers import ROOT, full_weights, random_batch, worker

import common
import ppo_loop


def near(expected):
    return pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_it_needs_nothing_of_this_repository_but_rows():
    """And nothing else but torch, transformers and the standard library."""
    names = []
    for node in ast.walk(ast.parse((ROOT / "tests" / "lessons" / "nano_critic.py").read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    found = {name.partition(".")[0] for name in names}
    assert found - sys.stdlib_module_names == {"torch", "transformers"}


@pytest.mark.parametrize("packed", [True, False])
def test_three_updates_equal_those_of_critic_fsdp(packed, monkeypatch):
    """On rows.jsonl, which each reads by itself: tokens, values, returns, losses, clipped shares,
    gradient norms and all weights, to 1e-6 (of numbers above 1: relative). Each update is two
    epochs of two optimizer steps. critic_fsdp.py cuts the 32 rows of a step into micro-batches, of
    other sizes in each update, and in packed rows it computes a prompt once for its four answers.

    Both compute in float32, and AdamW divides a gradient by its own size plus eps. Of a gradient
    that is only rounding it makes a step as long as any other, in a direction that rounding
    decides: with torch's own eps of 1e-8, weights of five seeds were up to 9e-7 apart, which is
    too near to 1e-6 for a test. With 1e-6 in both, which holds such steps back, below 2e-7."""
    monkeypatch.setattr(nano_critic, "MINI_BATCH", 32)
    monkeypatch.setattr(nano_critic, "CLIP_VALUE", 0.1)
    w = worker(
        value_head_init="zero",
        cliprange_value=0.1,
        shuffle=False,
        ppo_mini_batch_size=32,
        ppo_epochs=2,
        use_remove_padding=packed,
    )
    whole = common.read_rows(str(ROOT / "tests" / "rows.jsonl"), w.tokenizer)

    # the same weights, and but for eps torch's own AdamW
    critic = nano_critic.ValueModel(nano_critic.CONFIG)
    critic.load_state_dict(full_weights(w.critic))
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    [mine], [theirs] = optimizer.param_groups, w.critic.optimizer.param_groups
    for name in ("lr", "betas", "eps", "weight_decay"):
        assert mine[name] == theirs[name]
    mine["eps"] = theirs["eps"] = 1e-6

    rows = nano_critic.read_rows("rows.jsonl")
    shares = []  # of clipped actions
    for first, budget in ((0, 80), (64, 40), (128, 120)):
        some = nano_critic.select(rows, slice(first, first + 64))
        batch = whole.select(range(first, first + 64))
        w.critic.max_tokens = w.critic.max_tokens_forward = budget
        assert len(w.critic.mini_batch(batch, common.describe(batch)[:32])[1].sizes[0]) > 1

        # the same rows, values, advantages and returns
        nano_critic.assign_credit(some, critic)
        batch.values = w.compute_values(batch)
        common.add_returns(batch, nano_critic.GAMMA, nano_critic.LAMBDA)
        is_token_BL = torch.arange(some["ids"].shape[1]) < batch.cu_seqlens.diff()[:, None]
        flat = {name: x_BL[is_token_BL] for name, x_BL in some.items()}
        assert torch.equal(flat["ids"], batch.input_ids)
        assert torch.equal(flat["is_action"], batch.response_mask)
        assert torch.equal(flat["rewards"], batch.token_level_rewards)
        for name in ("values", "advantages", "returns"):
            ours, theirs = (x_T[batch.response_mask] for x_T in (flat[name], getattr(batch, name)))
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, msg=name)

        # the same update
        loss, clipped, norm = nano_critic.update(critic, optimizer, some, nano_critic.value_loss)
        metrics = w.update_critic(batch)
        for name, x in {"vf_loss": loss, "vf_clipfrac": clipped, "grad_norm": norm}.items():
            assert metrics[f"critic/{name}"] == near(x), name
        shares.append(clipped)
        weights = full_weights(w.critic)
        torch.testing.assert_close(weights, critic.state_dict(), rtol=1e-6, atol=1e-6)
    assert max(shares) > 0.1


def test_advantages_are_those_of_common(monkeypatch):
    """Of ragged rows with observations between their actions, and some without an action."""
    monkeypatch.setattr(nano_critic, "GAMMA", 0.9)
    monkeypatch.setattr(nano_critic, "LAMBDA", 0.7)
    batch = random_batch(11, seed=3)
    columns = (batch.token_level_rewards, batch.values, batch.response_mask)
    expected, _ = common.gae(*columns, batch.cu_seqlens, 0.9, 0.7)
    found = []
    for row in zip(*(x_T.split(batch.lengths) for x_T in columns)):
        found += nano_critic.gae(*(x_L.tolist() for x_L in row))
    assert found == near(expected.tolist()) and expected.count_nonzero() > 100

    whitened = nano_critic.whiten(expected, batch.response_mask)[batch.response_mask]
    theirs = ppo_loop.masked_whiten(expected, batch.response_mask)[batch.response_mask]
    assert whitened.tolist() == near(theirs.tolist())


def test_the_actors_loss_is_that_of_the_loop():
    """Of an actor that has moved so far that some actions are clipped."""
    torch.manual_seed(0)
    actor = transformers.AutoModelForCausalLM.from_config(nano_critic.CONFIG)
    rows = nano_critic.select(nano_critic.read_rows("rows.jsonl"), slice(64))
    mask = rows["is_action"]
    with torch.no_grad():
        log_probs = nano_critic.log_probs(actor, rows["ids"])
        rows["log_probs"] = log_probs + 0.3 * torch.randn(mask.shape)
        rows["advantages"] = torch.randn(mask.shape)
        loss, clipped = nano_critic.policy_loss(actor, rows)

        # the log-probs, and the loss of imitation, one token at a time
        imitation, none = nano_critic.imitation_loss(actor, rows)
        assert not none.any()
        for t in mask[0].nonzero()[:, 0].tolist():
            chances = actor(rows["ids"][:1, :t]).logits[0, -1].softmax(-1)
            expected = near(float(chances[rows["ids"][0, t]].log()))
            assert float(log_probs[0, t]) == -float(imitation[0, t]) == expected

    columns = [x[mask] for x in (log_probs, rows["log_probs"], rows["advantages"], mask)]
    theirs, count, _ = ppo_loop.policy_loss(*columns, torch.ones(len(columns[0])), 0.2, 0.2, None)
    assert float(loss[mask].sum()) == near(float(theirs))
    assert 30 < int(clipped[mask].sum()) == int(count)


def test_a_pad_that_the_actor_draws_is_no_right_answer():
    """9, PAD, 5, END is not 95."""
    row = nano_critic.read_rows("rows.jsonl")["ids"][0].tolist()
    assert nano_critic.text_of(row) == "70+25=95" and nano_critic.reward_of(row) == 1
    padded = [*row[:7], nano_critic.PAD, row[7], nano_critic.END]
    assert nano_critic.text_of(padded) == "70+25=9_5" and nano_critic.reward_of(padded) == 0


def test_an_answer_ends_with_its_end_which_is_paid_for():
    """Answers of an actor that writes what is given, whatever it is asked: those of the file are
    judged as the file says, and one that does not end earns nothing."""
    file = nano_critic.select(nano_critic.read_rows("rows.jsonl"), [0, 2])
    ids = torch.cat([file["ids"], file["ids"][:1]])
    ids[2, 8:] = nano_critic.PAD  # 95 without END
    written = ids.clone()
    written[:2, 9] = 30  # behind END

    def actor(ids_BL, use_cache):
        next_B = written[:, ids_BL.shape[1]]
        logits_BV = torch.nn.functional.one_hot(next_B, 99).double().log()
        return types.SimpleNamespace(logits=logits_BV[:, None])

    found = nano_critic.answer(actor, ids[:, :6])
    assert file["rewards"].sum(1).tolist() == [1, 0] and found["rewards"].sum(1).tolist() == [
        1,
        0,
        0,
    ]
    for name, x_BL in file.items():
        assert torch.equal(found[name][:2], x_BL), name
    assert torch.equal(found["ids"][2], ids[2]) and found["is_action"][2].sum() == 4
