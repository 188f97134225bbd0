"""Answers to the exercises of reading.md: each test states the answer and asserts it."""

import itertools
import json
import statistics
import types

import evpo
import pytest
import torch
import torch.nn.functional as F
from forked import scenario
from helpers import ran, random_batch, worker

import common
import ppo_loop
from critic_fsdp import Config, gather_slices, trade


def test_1_a_value_is_read_before_its_action():
    """The values of the actions after it. Its own value is read from the state before it, which has
    not seen the token. A critic that read it from the token's own position would know how the story
    continues, and could not be a baseline for that action."""
    w = worker()
    batch = random_batch(1, idle=False)
    changed = batch.select([0])
    actions = batch.response_mask.nonzero().flatten().tolist()
    t = actions[len(actions) // 2]
    changed.input_ids[t] = (changed.input_ids[t] + 1) % 97
    moved = (w.compute_values(batch) != w.compute_values(changed)).nonzero().flatten().tolist()
    assert moved == [i for i in actions if i > t] != []


def test_2_with_lambda_1_the_returns_do_not_depend_on_the_critic():
    """For lambda 1: then they are the sum of all later rewards. With 0 they are one reward plus the
    critic's value of the rest. With --bootstrap-truncated the critic estimates the missing part of
    rows that were cut off, whatever lambda is."""
    mask = torch.tensor([0, 1, 1, 1]).bool()
    ends = torch.tensor([0, 4])
    rewards = torch.tensor([0.0, 1.0, 2.0, 4.0])
    values = torch.tensor([0.0, 0.5, -3.0, 0.25])
    for lam, answer in ((1.0, [0, 7, 6, 4]), (0.0, [0, 1 - 3, 2 + 0.25, 4])):
        _, returns = common.gae(rewards, values, mask, ends, gamma=1.0, lam=lam)
        assert returns.tolist() == pytest.approx(answer)


def test_3_a_critic_learns_what_goes_wrong():
    """Before any digit: how likely this policy is to be right, which is less where the sum needs a
    carry, so that a right answer there has a large advantage. Before <eos>: whether the policy gave
    up; only this can choose among answers to one prompt."""
    w = worker(lr=1e-3)
    rows = common.read_rows(common.toy_rows(2048, seed=0), w.tokenizer)
    groups = rows.groups()

    for step in range(40):
        batch = rows.select(sum(common.rows_of_step(step, groups, 256, seed=0), []))
        batch.values = w.compute_values(batch)
        common.add_returns(batch, gamma=1.0, lam=1.0)
        w.update_critic(batch)

    before, end = {True: [], False: []}, {True: [], False: []}  # key: the units carry; it gave up
    cases = list(itertools.product(range(11, 90, 7), range(12, 90, 7), end))
    row = lambda a, b, x: {"prompt": f"{a}+{b}=", "response": str(a if x else a + b), "reward": 1}
    batch = common.read_rows([json.dumps(row(*case)) for case in cases], w.tokenizer)
    values = w.compute_values(batch)[batch.response_mask].split(batch.actions.tolist())
    for (a, b, gave_up), (first, *_, last) in zip(cases, values, strict=True):
        before[a % 10 + b % 10 >= 10].append(first)
        end[gave_up].append(last)

    assert statistics.fmean(before[True]) < statistics.fmean(before[False]) - 0.1
    assert statistics.fmean(end[True]) < statistics.fmean(end[False]) - 0.2


def test_4_a_mean_of_means_depends_on_the_cut():
    """1 over the mini-batch, 2 as a mean of means. loss_weights gives the first: a token's weight
    comes from the counts of the whole mini-batch and stays with the token, so each micro-batch adds
    a plain sum."""
    batch = common.concat([common.Batch.blank(2), common.Batch.blank(4)])
    losses = torch.tensor([0.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    batch.weights = common.loss_weights(batch, "token-mean")
    assert float((losses * batch.weights).sum()) == 1
    parts = list(zip(losses.split([2, 4]), batch.split(1)))
    assert sum(float((part * micro.weights).sum()) for part, micro in parts) == 1
    means = [
        float((part * common.loss_weights(micro, "token-mean")).sum()) for part, micro in parts
    ]
    assert sum(means) / 2 == 2


def test_5_a_huber_loss(monkeypatch):
    """Because of the weights, which come from counts of the whole mini-batch: the loss stays a
    weighted sum over tokens. Far outliers now pull no harder than near ones. (With clipping it
    would be the larger one of two Huber losses.)"""

    def huber_loss(vpreds_T, values_T, returns_T, response_mask_T, weights_T, *_, delta=1.0):
        v_T, r_T = (torch.where(response_mask_T, x_T, 0.0) for x_T in (vpreds_T, returns_T))
        loss_T = F.huber_loss(v_T, r_T, reduction="none", delta=delta)
        return (weights_T * loss_T).sum(), torch.zeros((), dtype=torch.int64)

    batch = random_batch(8, idle=False)
    batch.returns[batch.response_mask.nonzero()[0]] = 1000.0
    norms = {}
    for name in ("squared", "huber"):
        if name == "huber":
            monkeypatch.setattr(common, "value_loss", huber_loss)
        whole = worker(cliprange_value=None)
        cut = worker(cliprange_value=None, ppo_max_token_len_per_gpu=max(batch.lengths))
        norms[name] = whole.update_critic(batch)["critic/grad_norm"]
        assert cut.update_critic(batch)["critic/grad_norm"] == pytest.approx(norms[name], rel=1e-5)
    assert norms["huber"] < 0.1 * norms["squared"]


@pytest.mark.parametrize("lam", [1.0, 0.95])
def test_6_a_critic_that_always_says_7(lam, monkeypatch):
    """With lambda 1, nothing: each advantage is the return minus 7, and whitening removes any
    constant. With lambda 0.95 the last TD error, return minus 7, fades towards the start of the
    row, so the place of an action decides. With EVPO's fork, advantages are returns minus their
    mean, because 7 explains nothing."""
    common.setup_distributed()
    found = []
    for value, helps in ((0.0, False), (7.0, False), (7.0, True)):
        batch = random_batch(8, idle=False)
        batch.old_log_probs = batch.ref_log_probs = 0 * batch.values
        says = lambda batch: value * batch.response_mask  # noqa: B023
        critic = types.SimpleNamespace(start_at_mean=lambda *_: None, compute_values=says)
        run = ppo_loop.Run(Config(), lam=lam)
        if helps:
            monkeypatch.setattr(ppo_loop, "advantages_of", evpo.advantages_of)
        rewards_T = torch.zeros(len(batch.input_ids))
        rewards_T[common.last_action(batch)] = torch.tensor([0.0, 1.0] * 4)
        ppo_loop.assign_credit(batch, batch, rewards_T, 0.0, run, critic)
        found.append(batch.advantages)
    returns, sevens, with_the_fork = found
    assert torch.allclose(returns, sevens, atol=1e-4) == (lam == 1.0)
    assert torch.allclose(returns, with_the_fork, atol=1e-4) == (lam == 1.0)
    assert with_the_fork.sign().equal(sevens.sign()) == (lam == 1.0)


def test_7_adamw_does_not_see_the_size_of_a_gradient():
    """AdamW divides the mean gradient by the root of the mean square, so a factor common to all
    steps cancels, up to epsilon. And --grad-clip scales all larger norms down to it. So two ranks
    learn differently from one as soon as one norm is clipped and the same norm, halved, is not. The
    metric critic/grad_norm shows the error at once, and so do the tests of layouts, which compare
    gradients before clipping."""

    def trained(norms, factor):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([p], lr=0.1)
        for norm in norms:
            p.grad = factor * norm * F.normalize(torch.tensor([0.3, -0.01, 2.0]), dim=0)
            torch.nn.utils.clip_grad_norm_([p], 1.0)
            optimizer.step()
        return p.detach()

    off = lambda *norms: float((trained(norms, 1.0) - trained(norms, 0.5)).abs().max())
    assert off(29, 20) < 1e-6 and off(0.8, 0.4) < 1e-6  # all are clipped; none is
    assert off(29, 0.4) > 1e-3 and off(29, 1.5) > 1e-3


@scenario(ranks=2)
def ulysses(folder):
    """What each of the two ranks finds in the next exercise."""
    common.setup_distributed()
    group, rank = torch.distributed.group.WORLD, common.RANK
    x = torch.arange(4 * 10 * 3.0).view(1, 4, 10, 3)  # (1, H, T, D)
    mine = x.chunk(2, 2)[rank]
    heads = trade(mine, group, 1, 2)
    assert (
        mine.shape == (1, 4, 5, 3)
        and heads.shape == (1, 2, 10, 3)
        and heads.equal(x.chunk(2, 1)[rank])
    )
    assert trade(heads, group, 2, 1).equal(mine)
    assert gather_slices(mine[0, 0, :, 0], group).equal(x[0, 0, :, 0])


def test_8_ulysses_trades_tokens_for_heads():
    """In norms, projections and MLPs each rank has five tokens of the row and all heads; inside the
    attention function it has two heads of all ten tokens, by one all-to-all before and one after.
    gather_slices then gives the ten values to both, and both compute the same loss."""
    ran(ulysses, 2)


@pytest.mark.megatron
def test_9_context_parallel_ranks_have_a_piece_of_either_end():
    """Rank 0 has 0 1 10 11, rank 1 has 2 3 8 9, rank 2 has 4 5 6 7. Token t sees t + 1 keys: thirds
    would give the ranks 10, 26 and 42 pairs, these pieces give 26 to each."""
    import critic_megatron

    for rank, answer in enumerate(([0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7])):
        layout = types.SimpleNamespace(cp_rank=rank, device=torch.device("cpu"))
        config = critic_megatron.Config(context_parallel_size=3)
        slots, _, _ = critic_megatron.share_context(common.Batch.blank(12), config, layout)
        assert slots.tolist() == answer and sum(t + 1 for t in answer) == 26
