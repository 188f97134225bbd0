"""Edge cases of the maths and the batching, worked out by hand, for faults that nothing else would show.

Where both critics have the same function, test_critic_megatron.py compares its text, and this tests one."""

import math
import types

import helpers  # noqa: F401  makes the scripts importable
import pytest
import torch

import common
import critic_fsdp
import ppo_loop
from critic_fsdp import micro_batches

TRUE = torch.ones(1, dtype=torch.bool)


def rows_of(*prompts, answer=2):
    """A batch of rows with these prompts, each followed by `answer` actions."""
    rows = [common.Batch.blank(len(prompt) + answer) for prompt in prompts]
    for number, (row, prompt) in enumerate(zip(rows, prompts)):
        row.row_id[0] = number
        row.input_ids[: len(prompt)] = torch.tensor(prompt)
        row.response_mask[: len(prompt)] = False
    return common.concat(rows)


def test_the_policy_ratio_stays_within_e_to_the_20():
    for log_ratio, ratio in ((19.5, 19.5), (30.0, 20.0), (-30.0, -20.0)):
        columns = (torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([-1.0]), TRUE, torch.ones(1))
        loss, *_ = ppo_loop.policy_loss(*columns, 1 - 1e-12, math.inf, None)
        assert float(loss) == pytest.approx(math.exp(ratio), rel=1e-5, abs=0)


def test_a_k3_of_one_token_is_at_most_10():
    for k1, k3 in ((-2.0, math.exp(2) - 1 - 2), (-2.7, 10.0), (10.0, 9 + math.exp(-10)), (11.5, 10.0)):
        x_T = ppo_loop.kl_penalty(torch.tensor([k1]), torch.zeros(1), "k3")
        assert float(x_T) == pytest.approx(k3)


def test_whitening_of_one_two_and_equal_numbers(monkeypatch):
    monkeypatch.setattr(ppo_loop, "of_all_ranks", lambda x: [x])
    half = math.sqrt(0.5)  # the sample deviation of 1 and 3 is the square root of 2
    for x, answer in (([7.0], [0.0]), ([1.0, 3.0], [-half, half]), ([5.0] * 3, [0.0] * 3)):
        x_T = torch.tensor(x)
        assert ppo_loop.masked_whiten(x_T, x_T > 0).tolist() == pytest.approx(answer, abs=1e-6)


def test_rows_that_were_cut_off_end_with_0_unless_asked_otherwise():
    rows = rows_of([3], answer=2)
    rows.truncated[0] = True
    rows.values = torch.tensor([0.0, 1.0, 2.0])
    for options, after in (((), 0.0), ((False,), 0.0), ((True,), 2.0)):
        common.add_returns(rows, 1.0, 1.0, *options)
        assert rows.returns.tolist() == [0.0, after, after]


def test_explained_variance_tells_small_returns_from_rounding():
    small = 1e-4 * torch.tensor([1.0, 2.0, 3.0])
    assert common.explained_variance(small / 2, small) == pytest.approx(0.75)
    assert math.isnan(common.explained_variance(torch.zeros(3), 5 + torch.tensor([0.0, 5e-7, 0.0])))


def of_answers(rewards, values, n=2, **fields):
    """(advantages, metrics) of rows with one prompt and n actions. values: one for all actions of a row."""
    rows = rows_of(*[[3]] * len(rewards), answer=n)
    rows.old_log_probs = rows.ref_log_probs = torch.zeros(len(rows.input_ids))
    rows.values = torch.tensor([[0.0, *[v] * n] for v in values]).flatten()
    defaults = {"lam_policy": None, "first_token_credit": None, "whiten_advantages": False, "rollout_n": 1}
    defaults |= {"kl_penalty": "k1", "gamma": 1.0, "lam": 1.0, "critic_where_it_helps": False}
    run = types.SimpleNamespace(bootstrap_truncated=False, **defaults | fields)
    critic = types.SimpleNamespace(compute_values=lambda rows: rows.values, start_at_mean=lambda *_: None)
    metrics = ppo_loop.assign_credit(rows, rows, rewards, 0.0, run, critic)
    return rows.advantages.view(-1, 1 + n).tolist(), metrics


@pytest.mark.parametrize("n", [2, 3, 9])
def test_the_first_action_gets_the_credit_of_the_flag(n):
    """With a reward of 1 and values of 0, the first action gets the flag's share and the last action all."""
    [[_, first, *_, last]], _ = of_answers([1.0], [0.0], n, first_token_credit=0.25)
    assert (first, last) == pytest.approx((0.25, 1.0))
    assert of_answers([1.0], [0.0], 1, first_token_credit=0.25) == ([[0.0, 1.0]], {})


@pytest.mark.parametrize("n, less", [(1, [2.5] * 4), (2, [1.5, 1.5, 3.5, 3.5])])
def test_the_mean_return_replaces_a_critic_that_explains_nothing(n, less):
    rewards = [1.0, 2.0, 3.0, 4.0]
    for values, helps in (([1.1, 2.1, 2.9, 3.9], 1), ([7.0] * 4, 0), ([4.0, 3.0, 2.0, 1.0], 0)):
        found, metrics = of_answers(rewards, values, critic_where_it_helps=True, rollout_n=n)
        assert metrics == {"critic/helps": helps}
        for row, reward, mean, value in zip(found, rewards, less, values):
            assert row == pytest.approx([0, *[reward - (value if helps else mean)] * 2])


def test_value_places_of_four_actions():
    rows = rows_of([3], answer=4)
    assert common.loss_weights(rows, "token-mean", places=(0.5,)).tolist() == [0, 0, 0, 1, 0]
    assert common.loss_weights(rows, "token-mean", places=(0.0, 0.2, 1.0)).tolist() == [0, 0.5, 0, 0, 0.5]


def test_a_row_with_images_shares_with_no_prompt():
    rows = rows_of([0], [5], [5], [0], [5])
    rows.multi_modal_inputs = [{}, {"images": ["a.png"]}, {}, {}, {"images": ["a.png"]}]
    assert [group for _, group in rows.groups()] == [[0, 3], [1], [2], [4]]
    assert rows.groups(share=False) == [(0, [row]) for row in range(5)]


def test_no_more_micro_batches_than_needed():
    two = rows_of([1] * 58, [2] * 58)  # of 60 tokens each
    assert micro_batches(two, 1, 120, True) == [[[0, 1]]]
    assert sorted(micro_batches(two, 1, 119, True)[0]) == [[0], [1]]
    group = rows_of([1] * 10, [1] * 10, [1] * 10)  # 9 shared tokens, and 3 more for each row
    assert micro_batches(group, 1, 18, True) == [[[0, 1, 2]]]
    parts = micro_batches(group, 1, 17, True)[0]
    assert sorted(map(len, parts)) == [1, 2]
    ranks = micro_batches(group, 2, 99, True)  # each rank gets some, although one could take all
    assert sorted(len(rows) for [rows] in ranks) == [1, 2]


def test_a_pack_is_padded_at_its_end():
    rows = rows_of([5], [1, 1], [1, 1])  # 3, 4 and 4 tokens; the 4s share their first one
    host = torch.device("cpu")
    for unit, pad in (((), 0), ((4,), 2), ((7,), 4)):
        slots, index, layout = critic_fsdp.pack_rows(rows, host, True, *unit)
        assert slots.tolist() == [*range(7), 8, 9, 10, *[11] * pad]
        assert index.tolist() == [*range(7), 3, 7, 8, 9]
        assert layout.pieces == [(1, 3, 3), (1, 4, 4), (1, 3 + pad, 4 + pad)]
        assert layout.keys.tolist() == [*range(7), 3, *range(7, 10 + pad)]


def test_a_cosine_of_one_step_after_the_warm_up():
    config = critic_fsdp.Config(lr_warmup_steps=2, lr_scheduler_type="cosine")
    critic = types.SimpleNamespace(config=config, peak_lr=1.0, total_steps=3)
    for critic.optimizer_steps, rate in enumerate((0.5, 1.0, 1.0, 0.0, 0.0)):
        assert critic_fsdp.DataParallelPPOCritic.learning_rate(critic) == pytest.approx(rate, abs=1e-9)
