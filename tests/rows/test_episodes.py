"""An agent's episode in several rows: credit runs along the actions of all of them.

A dialogue makes the same update wherever it is cut: see test_layouts.py and
test_megatron_layouts.py, whose references of segments are those of the whole rows."""

import dataclasses
import itertools
import math

import helpers
import pytest
import torch
from helpers import cut_into_segments, parts_of, random_batch, rows_after, rows_of, spans_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import gae_by_hand, whitened_by_hand

import common
import critic_fsdp
import ppo_loop


def shuffled(batch, seed):
    """The same rows in another order, as a caller may have them."""
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    return batch.select(order.tolist())


def numbers(rows):
    """Those of an evaluation."""
    return {name: float(x) for name, x in common.evaluate(rows, 0.9).items()}


def tokens_of_episodes(batch):
    """The indices of each episode's tokens, segment after segment."""
    rows = dict(zip(batch.row_id.tolist(), itertools.starmap(range, rows_of(batch)), strict=True))
    episodes = {}
    for row_id, episode in sorted(zip(batch.row_id.tolist(), batch.episode.tolist())):
        episodes.setdefault(episode, []).extend(rows[row_id])
    return list(episodes.values())


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 99), st.sampled_from([0.0, 0.8, 1.0]), st.floats(0.5, 1.0), st.booleans(),
    st.sampled_from(["token", "turn"]),
)  # fmt: skip
def test_credit_runs_along_all_actions_of_an_episode(seed, lam, gamma, bootstrap, level):
    """Rewards stand anywhere, also on tokens of a prompt; rows are in any order."""
    batch = shuffled(cut_into_segments(random_batch(6, seed=seed), seed), seed)
    mask = batch.response_mask
    batch.token_level_rewards = torch.randn(
        len(mask), generator=torch.Generator().manual_seed(seed)
    )
    batch.turns = spans_of(mask) if level == "turn" else None
    common.add_returns(batch, gamma, lam, bootstrap)
    sums_T = common.monte_carlo(batch, gamma)
    last_row = dict(zip(batch.row_id.tolist(), batch.truncated.tolist()))

    for places in tokens_of_episodes(batch):
        columns = (batch.token_level_rewards[places], batch.values[places], mask[places])
        tokens = list(zip(*(x.tolist() for x in columns)))
        acted = [value for _, value, acts in tokens if acts]
        row_of = batch.row_id[batch.row_of_token[places[-1]]]
        tail = acted[-1] if bootstrap and acted and last_row[int(row_of)] else 0.0
        expected = torch.tensor(gae_by_hand(tokens, gamma, lam, tail, level))
        ours = torch.stack([batch.advantages[places], batch.returns[places]], 1)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)

        without = [(reward, 0.0, acts) for reward, _, acts in tokens]
        sums = [target for _, target in gae_by_hand(without, gamma, 1.0, 0.0, level)]
        torch.testing.assert_close(sums_T[places], torch.tensor(sums), rtol=1e-5, atol=1e-5)


def test_whitening_by_noise_leaves_out_the_whole_episode_of_an_action():
    whole = random_batch(6, idle=False)
    whole.advantages = whole.values.clone()
    cut = shuffled(cut_into_segments(whole), 1)
    cut.advantages = ppo_loop.whiten_by_noise(cut)
    in_order = cut.select(cut.row_id.argsort().tolist())
    ours_A = in_order.advantages[in_order.response_mask]
    theirs_A = whitened_by_hand(whole)[whole.response_mask]
    torch.testing.assert_close(ours_A, theirs_A, rtol=1e-5, atol=1e-6)


def test_a_rank_may_have_no_rows_of_an_episode():
    none = cut_into_segments(random_batch(3)).select([])
    common.add_returns(none, 0.9, 0.8, bootstrap_truncated=True)
    assert len(none.advantages) == len(none.returns) == len(common.monte_carlo(none, 0.9)) == 0


def test_rows_without_an_episode_are_their_own():
    batch = random_batch(9)
    alone = dataclasses.replace(batch, episode=batch.row_id.clone())
    for rows in (batch, alone):
        common.add_returns(rows, 0.9, 0.8, bootstrap_truncated=True)
    assert torch.equal(batch.advantages, alone.advantages)
    ours, theirs = numbers(batch), numbers(alone)
    assert ours == pytest.approx(theirs, nan_ok=True)
    assert batch.groups() == alone.groups()


def test_a_sequence_is_a_row_for_modes_that_count_sequences():
    batch = cut_into_segments(random_batch(5, idle=False))
    weights_T = common.loss_weights(batch, "seq-mean-token-mean")
    of_row = torch.zeros(len(batch)).index_add(0, batch.row_of_token, weights_T)
    acted = batch.actions > 0
    assert len(batch) > 10
    torch.testing.assert_close(of_row[acted], torch.full((int(acted.sum()),), 1 / int(acted.sum())))


def test_an_evaluation_counts_episodes():
    """Of rows with equal prompts: explained variance, AUC, best of n, ceiling are those of the
    whole rows."""
    whole = random_batch(24, seed=4, prompts=5, idle=False)
    cut = shuffled(cut_into_segments(whole), 1)
    assert len(cut) > 2 * len(whole)
    cut.token_level_rewards = cut.token_level_rewards.sign()
    whole.token_level_rewards = whole.token_level_rewards.sign()
    ours, theirs = numbers(cut), numbers(whole)
    assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True)
    assert not math.isnan(theirs["eval/best_of_n"] + theirs["eval/explained_var"])
    for rows in (cut, whole):
        rows.returns = common.monte_carlo(rows, 0.9)
    assert common.ceiling(cut) == pytest.approx(common.ceiling(whole), nan_ok=True)
    assert common.numbers_of(cut, ours) == common.numbers_of(whole, theirs)


def test_rows_have_the_rank_of_their_episode():
    rows = rows_after([5], [5, 1, 2], [5], [5, 3, 4], [6])
    rows.episode = torch.tensor([0, 0, 2, 2, 4])
    last_B = torch.tensor([9.0, 1.0, 0.0, 2.0, 5.0])
    assert common.ranks_in_prompts(rows, last_B) == [2, 2, 1, 1, 1]


def test_the_plan_counts_what_segments_share_once_and_never_too_little():
    """An episode that is cut costs what the whole row costs; a budget that holds this takes all
    segments together, and what a micro-batch really computes is never more than planned."""
    whole = random_batch(7, seed=2, idle=False)
    cut = cut_into_segments(whole)
    told = common.describe(cut)
    assert common.cost_of(told) == len(whole.input_ids) < 0.6 * len(cut.input_ids)
    assert common.cost_of(told, share=False) == len(cut.input_ids)
    assert common.cost_of(told, cost=lambda n: n * n) == sum(n * n for n in whole.lengths)

    for budget in (40, 60, 100, 1000):
        [parts] = parts_of(critic_fsdp.micro_batches(told, 1, budget, True))
        computed = [len(critic_fsdp.pack_rows(cut.select(rows), "cpu", True)[0]) for rows in parts]
        assert max(computed) <= budget
        if budget >= 60:
            assert len(whole.input_ids) - 3 < sum(computed) <= len(whole.input_ids)


def test_a_shuffle_and_a_step_keep_an_episode_whole():
    cut = cut_into_segments(random_batch(9, seed=5, prompts=4))
    groups = cut.groups()
    assert sorted(map(len, groups)) == [1, 1, 1, 2, 2, 2]  # of episodes with equal prompts
    episodes = sorted(itertools.chain(*groups))
    assert episodes == cut.episodes() and sum(map(len, episodes)) == len(cut)

    steps = [common.rows_of_step(step, groups, 2, seed=0) for step in range(5)]
    assert [len(step) for step in steps] == [1, 2, 2, 2, 2]
    assert sorted(itertools.chain(*steps)) == episodes


def test_episodes_that_all_begin_alike_are_shuffled_one_by_one():
    """As those of a game; each stays whole, and so does what equal mini-batches take of them."""
    rows = rows_after([5], [5, 1, 2], [5], [5, 3, 4], [5], [5], [5, 6, 7])
    rows.episode = torch.tensor([0, 0, 2, 2, 4, 5, 5])
    rows.values = torch.zeros(len(rows.input_ids))
    rows.returns = rows.values + 1
    [group] = rows.groups()
    assert group == [[0, 1], [2, 3], [4], [5, 6]]
    passes = [common.rows_of_step(step, [group], 1, seed=0) for step in range(80)]
    assert len({str(passes[i : i + 4]) for i in range(0, 80, 4)}) > 5

    worker = helpers.worker(ppo_mini_batch_size=3, ppo_epochs=9, seed=1)
    seen = []
    cut = worker.critic.mini_batch
    note = lambda batch, mini: seen.append(sorted(mini.row_id.tolist())) or cut(batch, mini)
    worker.critic.mini_batch = note
    worker.update_critic(rows)
    assert len(seen) == worker.critic.optimizer_steps == 18
    whole = [sum(pair, []) for pair in itertools.combinations(group, 2)]
    assert all(mini in whole for mini in seen) and len({*map(str, seen)}) > 3
    assert [sorted(sum(seen[i : i + 2], [])) for i in range(0, 18, 2)] == [[*range(7)]] * 9


def test_rows_of_episodes_that_alternate_are_planned_as_they_are_computed():
    """Row ids of a caller's own, by turns of two episodes."""
    rows = rows_after([5], [5], [5, 1, 2, 3], [5, 6, 7, 8], [5, 1, 2, 3, 4], [5, 6, 7, 8, 9])
    rows.episode = torch.tensor([0, 1, 0, 1, 0, 1])
    told = common.describe(rows)
    slots, *_ = common.lay_out_once(rows)
    assert len(slots) == 18 and common.cost_of(told) == 21  # what two episodes share is not known
    assert common.by_prompt(told)[0].tolist() == [0, 2, 4, 1, 3, 5]


def test_what_segments_with_images_share_is_not_counted():
    """Their episode stays together all the same."""
    rows = rows_after([5], [5, 6, 7, 8], [9])
    rows.episode = torch.tensor([0, 0, 2])
    assert common.describe(rows).shared.tolist() == [1, 1, 1]
    rows.multi_modal_inputs = [{"images": ["a.png"]}, {}, {}]
    told = common.describe(rows)
    assert told.shared.tolist()[1] == 0
    assert [same.tolist() for same in common.by_prompt(told)] == [[0, 1], [2]]
