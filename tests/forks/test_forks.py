"""The files of tests/forks: each makes the numbers that its flag made before it was a file, and
works in both critics, in PPO, in resumed runs and in exports.

forks.json has the numbers of commit 5ae7757, the last one with these flags, on the CPU of that day:
`PYTHONPATH=tests python tests/forks/test_forks.py FOLDER` records them from a clone of it. There,
each number of the forks was the same to the bit, on one rank and on two; another CPU may sum in
another order.
"""

import json
import math
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from statistics import fmean

import credit_per_row
import evpo
import first_token_credit
import fitted
import hl_gauss
import numpy
import otb
import pytest
import quantiles
import torch
from helpers import (
    BINS,
    ROOT,
    captured_gradients,
    random_batch,
    rows_after,
    rows_of,
    run,
    spans_of,
    succeeded,
    torchrun,
    worker,
)
from reference import LOAD, gae_by_hand, plain_cross_entropy, plain_loop, plain_targets, plain_value

import common
import critic_fsdp
import critic_megatron
import ppo_loop
from common import UserError
from ppo_loop import Prompt, Reply

FORKS = ROOT / "tests" / "forks"
BOTH = pytest.mark.parametrize(
    "script",
    [critic_fsdp, pytest.param(critic_megatron, marks=pytest.mark.megatron)],
    ids=["fsdp", "megatron"],
)

# ---- The numbers of the flags --------------------------------------------------------------------

PRETRAIN = (
    f"--rollouts {ROOT}/tests/rows.jsonl --eval-rollouts {ROOT}/tests/rows_held_out.jsonl --steps 3"
    " --eval-every 3 --train-batch-size 256 --ppo-mini-batch-size 128"
)
PPO = (
    "--steps 3 --eval-every 3 --supervised-steps 120 --train-batch-size 64"
    " --actor.ppo-mini-batch-size 32 --critic.ppo-mini-batch-size 32"
)
SPLIT = "--tensor-model-parallel-size 2"
ON_MEGATRON = "--critic megatron --critic.tensor-model-parallel-size 2"
# one mini-batch, because 126 rows are no longer cut into 32, 32, 32 and 30
GROUPS = (
    "--rollout-n 2 --critic.lr 0.003 --critic.ppo-epochs 4 --actor.ppo-mini-batch-size 128"
    " --critic.ppo-mini-batch-size 128"
)
# a step so long that the bands leave actions out of the next one; later, rounding has grown
FAR = f"{PPO} --steps 2 --actor.lr 0.05 --critic-warmup 1"
UNCLIPPED = (
    "ppo_loop.py --old-log-probs engine --actor.clip-ratio-low 1 --actor.clip-ratio-high 1e30"
    " --actor.clip-ratio-c None"
)
SAO = (
    f"{UNCLIPPED} --critic.ppo-epochs 2 --critic.freeze-modules self_attn"
    " --first-token-credit 0.51 --actor.ratio-band 0.7 6"
)
BPCO = (
    f"{UNCLIPPED} --critic.value-head bounded --critic.value-range 0 1 --whiten none"
    " --first-token-credit 0.08 --actor.probability-band 0.2"
)

# name -> the command of 5ae7757, that of the fork, and the flags of both
PLACES = "--value-places 0.3 0.6 0.9"
ON_BOTH = {
    "sp3o": (f"critic_fsdp.py {PLACES}", "sp3o.py", PRETRAIN),
    "hl_gauss": ("critic_fsdp.py --value-head hl_gauss", "hl_gauss.py", PRETRAIN),
    "evpo": ("ppo_loop.py --critic-where-it-helps", "evpo.py", f"{PPO} {GROUPS}"),
    "first token": ("ppo_loop.py --first-token-credit 0.5", "first_token_credit.py", PPO),
    "sao": (SAO, "sao.py", FAR),
    "bpco": (BPCO, "bpco.py", FAR),
}
RUNS = {name: (1, *job) for name, job in ON_BOTH.items()}  # with the number of ranks
RUNS |= {f"{name}, 2 ranks": (2, *job) for name, job in ON_BOTH.items()}
RUNS["sp3o, PPO"] = (1, f"ppo_loop.py {PLACES.replace('--', '--critic.')}", "sp3o.py ppo_loop", PPO)
for fork, flag in (("sp3o", PLACES), ("hl_gauss", "--value-head hl_gauss")):
    job = (f"critic_megatron.py {flag}", f"{fork}.py critic_megatron", f"{PRETRAIN} {SPLIT}")
    RUNS[f"{fork}, Megatron"] = (2, *job)
RUNS["hl_gauss, PPO"] = (
    2,
    "ppo_loop.py --critic.value-head hl_gauss",
    "hl_gauss.py ppo_loop",
    f"{PPO} {ON_MEGATRON} --critic.value-range -0.1 1.1",
)
# what is compared, without what the clock or the rounding of a difference near 0 decides
KEPT = """critic/vf_loss critic/vf_clipfrac critic/grad_norm critic/values_mean critic/returns_mean
    critic/helps actor/pg_loss actor/pg_outside actor/grad_norm reward/mean eval/explained_var
    eval/vf_loss eval/accuracy""".split()


def numbers_of(folder):
    """For each line of a run's metrics, those of its numbers that are compared. Without a band, the
    share outside it was 0, and is no metric today."""
    lines = common.read_lines(folder / "metrics.jsonl")
    for line in lines:
        if not line.get("actor/pg_outside"):
            line.pop("actor/pg_outside", None)
    return [{name: line[name] for name in KEPT if name in line} for line in lines]


@pytest.mark.parametrize("name", RUNS)
def test_a_fork_makes_the_numbers_of_its_flag(name, tmp_path):
    ranks, _, fork, flags = RUNS[name]
    file, *script = fork.split()
    words = (FORKS / file, *script, *flags.split(), "--out-dir", tmp_path)
    succeeded(run(sys.executable, *words) if ranks == 1 else torchrun(ranks, *words))
    expected = json.loads((ROOT / "tests" / "forks" / "forks.json").read_text())[name]
    ours = numbers_of(tmp_path)
    assert len(ours) == len(expected)

    # without the first line, an evaluation: 5ae7757 judged a head that training then replaced
    for line, of_flag in zip(ours[1:], expected[1:]):
        assert line == {key: pytest.approx(x, rel=1e-5, abs=1e-6) for key, x in of_flag.items()}


def record(folder):
    """Writes tests/forks/forks.json, with the flags of the clone of 5ae7757 in this folder."""
    found = {}
    for name, (ranks, command, _, flags) in RUNS.items():
        file, *words = command.split()
        start = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if ranks == 2 else []
        with tempfile.TemporaryDirectory() as out:
            words = [sys.executable, *start, file, *flags.split(), *words, "--out-dir", out]
            subprocess.run(words, cwd=folder, check=True)
            found[name] = numbers_of(Path(out))
    lines = [f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in found.items()]
    (ROOT / "tests" / "forks" / "forks.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


@BOTH
def test_a_plain_critic_does_not_go_on_from_a_forks_checkpoint(script, tmp_path):
    """It would go on with another loss. The fork does."""
    flags = ("--steps", "1", "--out-dir", tmp_path, "--eval-every", "0")
    name = script.__name__
    succeeded(run(sys.executable, FORKS / "sp3o.py", name, *flags))
    more = (*flags, "--steps", "2", "--resume", "auto")
    process = run(sys.executable, ROOT / f"{name}.py", *more)
    words = "is of another model: fork sp3o there, None here"
    assert process.returncode == 2 and words in process.stderr, process.stderr
    succeeded(run(sys.executable, FORKS / "sp3o.py", name, *more))


def test_a_script_that_is_not_there_is_named():
    process = run(sys.executable, FORKS / "sp3o.py", "critic_megatrom")
    assert process.returncode == 1 and "critic_megatrom: no script has this name" in process.stderr


def test_a_fork_needs_no_more_than_60_lines():
    """Otherwise a seam is missing in the scripts."""
    for file in FORKS.glob("*.py"):
        if file.name not in ("fork.py", "test_forks.py"):
            assert len(file.read_text().splitlines()) <= 60, file


# ---- Bins, HL-Gauss ------------------------------------------------------------------------------


class NoSums:
    """In place of a critic, whose loss the fork replaces."""

    def loss(self, outputs, micro):
        return None, {"vf_clipfrac": torch.ones(())}


class Bins(hl_gauss.Critic, NoSums):
    def __init__(self, low, high):
        self.value_range = (low, high)


@pytest.mark.parametrize("low, high, bins", [(-1.0, 3.0, 51), (0.0, 1.0, 2), (-200.0, -190.0, 255)])
def test_values_and_loss_equal_plain_loops(low, high, bins, monkeypatch):
    """Values, loss and gradient, also for returns outside the range, and with NaN outside the
    actions."""
    monkeypatch.setattr(hl_gauss, "BINS", bins)
    critic = Bins(low, high)
    g = torch.Generator().manual_seed(0)
    returns = low + (high - low) * (1.4 * torch.rand(40, generator=g) - 0.2)
    returns[:2] = torch.tensor([low, high])
    logits = torch.randn(40, bins, generator=g)
    values = torch.stack([plain_value(x, low, high) for x in logits.double()])
    ours = critic.values(logits, torch.ones(40) > 0).double()
    torch.testing.assert_close(ours, values, rtol=1e-6, atol=1e-5)
    mask = torch.rand(40, generator=g) < 0.7
    weights = torch.rand(40, generator=g) * mask
    exact = logits.double().requires_grad_()
    loss = sum(w * plain_cross_entropy(x, r, low, high) for w, x, r in zip(weights, exact, returns))
    loss.backward()
    ours = torch.where(mask[:, None], logits, math.nan).requires_grad_()
    micro = types.SimpleNamespace(response_mask=mask, weights=weights)
    micro.returns = torch.where(mask, returns, math.nan)
    our_loss, sums = critic.loss(ours, micro)
    our_loss.backward()

    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert sums["vf_loss"] == our_loss and sums["vf_clipfrac"] == 0
    atol = 1e-4 if low == -200 else 1e-6
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=atol)


def test_a_target_has_its_return_as_value_and_zeros_the_centre_of_the_range():
    """Logits that fit a target exactly give back its return, up to 1 % of a bin, away from the
    ends."""
    returns = torch.linspace(-0.9, 2.9, 100)
    targets = torch.stack([plain_targets(float(r), -1.2, 3.2, 51) for r in returns])
    logits = targets.clamp(min=1e-30).log().float()
    values = Bins(-1.2, 3.2).values(logits, torch.ones(100) > 0)
    torch.testing.assert_close(values, returns, rtol=0, atol=0.01 * 4.4 / 51)
    batch = random_batch(6, vocab_size=60)
    fields = {**BINS, "value_range": (-1.5, 2.0)}
    zero = worker(**fields, value_head_init="zero").compute_values(batch)
    torch.testing.assert_close(zero, 0.25 * batch.response_mask)


@BOTH
def test_bins_refuse_to_start_at_the_mean(script):
    """They refuse a scalar head, too, whose range they lack."""
    w = worker(script=script, **BINS, value_range=(0.0, 1.0), value_head_init="mean")
    with pytest.raises(UserError, match="--value-head-init mean: not for bins"):
        w.start_at_mean(random_batch(4, vocab_size=60), 1.0)
    with pytest.raises(TypeError):
        worker(script=script, fork="hl_gauss")


@BOTH
def test_a_critic_without_the_fork_refuses_its_export(script, tmp_path):
    """And the fork refuses an export without bins: their heads have other sizes."""
    limits = {"value_range": (0.0, 1.0)}
    worker(script=script, **BINS, **limits).export_hf(tmp_path / "bins")
    worker(script=script, value_head="bounded", **limits).export_hf(tmp_path / "bounded")
    for model, fields in (("bins", {"value_head": "bounded"}), ("bounded", BINS)):
        with pytest.raises(UserError, match="its head, .* is not one layer of"):
            worker(script=script, model=str(tmp_path / model), **fields)
    with pytest.raises(UserError, match="--value-head: .*/bins has another"):
        worker(script=script, model=str(tmp_path / "bins"))


# ---- Credit and baselines of PPO -----------------------------------------------------------------


def credited(rows, rewards_T, **fields):
    """Gives rows with values their advantages, which are not whitened -> the flags."""
    run = ppo_loop.Run(critic_fsdp.Config(), whiten="none", **fields)
    says = {"compute_values": lambda rows: rows.values, "start_at_mean": lambda *_: None}
    ppo_loop.assign_credit(rows, rows, rewards_T, 0.0, run, types.SimpleNamespace(**says))
    return run


def of_answers(rewards, values, n=2, **fields):
    """Advantages of rows with one prompt and n actions. values: one for all actions of a row."""
    rows = rows_after(*[[3]] * len(rewards), answer=n)
    rows.old_log_probs = rows.ref_log_probs = torch.zeros(len(rows.input_ids))
    rows.values = torch.tensor([[0.0, *[v] * n] for v in values]).flatten()
    rows.turns = spans_of(rows.response_mask)
    rewards_T = torch.tensor([x for reward in rewards for x in [0.0] * n + [reward]])
    run = credited(rows, rewards_T, **fields)
    return rows.advantages.view(-1, 1 + n).tolist(), evpo.helps(rows, run)


def of_episodes(rewards, values, **fields):
    """Advantages of the rows of episodes, each of a note of two actions and an answer of one, which
    earns the reward. values: one for all notes, and one for all answers."""
    replies = []
    for number, reward in enumerate(rewards):
        reply = Reply(Prompt([3]), number, [4, 5, 6], [-1.0] * 3, finished=True)
        reply.contexts.append((2, Prompt([7, 8])))
        reply.earned[2] = reward
        replies.append(reply)

    batch = ppo_loop.to_batch(replies)
    note, answer = values
    batch.values = torch.tensor([0.0, note, note, 0.0, 0.0, answer] * len(rewards))
    credited(batch, ppo_loop.rewards_of(replies), **fields)
    return [row.advantages[row.response_mask].tolist() for row in batch.split(1)]


@pytest.fixture
def a_quarter(monkeypatch):
    credit = lambda batch, run: first_token_credit.with_credit(batch, run, 0.25)
    monkeypatch.setattr(ppo_loop, "advantages_of", credit)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_the_first_action_gets_its_share_of_the_credit(n, a_quarter):
    """With a reward of 1 and values of 0, the first action gets this share and the last action
    all."""
    [[_, *each]], _ = of_answers([1.0], [0.0], n)
    assert (each[0], each[-1]) == pytest.approx((0.25 if n > 1 else 1.0, 1.0))


@pytest.mark.parametrize("fields", [{"lam_policy": 1.0}, {"gae_level": "turn"}])
def test_the_first_tokens_credit_excludes_another_lambda_and_turns(fields, a_quarter):
    with pytest.raises(UserError, match="excludes --lam-policy and --gae-level turn"):
        of_answers([1.0], [0.0], **fields)


def test_advantages_with_credit_equal_a_loop():
    batch = random_batch(8, 6, idle=False)
    batch.token_level_rewards = torch.randn(len(batch.input_ids)) * batch.response_mask
    run = ppo_loop.Run(critic_fsdp.Config(), gamma=0.9)
    advantages_T = first_token_credit.with_credit(batch, run, 0.3)
    columns = (batch.token_level_rewards, batch.values, batch.response_mask)
    for start, end in rows_of(batch):
        actions = int(batch.response_mask[start:end].sum())
        lam = math.exp(math.log(0.3) / (actions - 1)) if actions > 1 else 1.0
        tokens = [*zip(*(x_T[start:end].tolist() for x_T in columns))]
        expected = [a for a, _ in gae_by_hand(tokens, 0.9, lam, 0.0, "token")]
        assert advantages_T[start:end].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("values, helps", [
    ([1.1, 2.1, 2.9, 3.9], 1), ([7.0] * 4, 0), ([4.0, 3.0, 2.0, 1.0], 0),
])  # fmt: skip
@pytest.mark.parametrize("n, less", [(1, [2.5] * 4), (2, [1.5, 1.5, 3.5, 3.5])])
@pytest.mark.parametrize("gamma, level", [(1.0, "token"), (0.5, "turn")])
def test_the_mean_return_replaces_a_critic_that_explains_nothing(
    n, less, values, helps, gamma, level, monkeypatch
):
    """Nothing comes after the only turn of a row, so a gamma that counts turns changes nothing."""
    common.setup_distributed()
    monkeypatch.setattr(ppo_loop, "advantages_of", evpo.advantages_of)
    rewards = [1.0, 2.0, 3.0, 4.0]
    found, helped = of_answers(rewards, values, rollout_n=n, gamma=gamma, gae_level=level)
    assert helped == helps
    for row, reward, mean, value in zip(found, rewards, less, values):
        baseline = value if helps else mean
        assert row == pytest.approx([0, reward - baseline, reward - baseline])


def test_credit_per_row_ends_with_the_row(monkeypatch):
    """A note earns what comes of it in the next row; with the fork it earns nothing, and its
    advantages are the same whatever the answer earns."""
    values = (0.25, 0.5)
    across = of_episodes([1.0, 3.0], values)
    assert across == [[0.75, 0.75], [0.5], [2.75, 2.75], [2.5]]
    monkeypatch.setattr(ppo_loop, "to_batch", credit_per_row.to_batch)
    assert of_episodes([1.0, 3.0], values) == [[-0.25, -0.25], [0.5], [-0.25, -0.25], [2.5]]


def test_the_mean_return_of_answers_to_a_prompt_is_one_for_all_rows_of_their_episodes(monkeypatch):
    """So is the advantage."""
    common.setup_distributed()
    monkeypatch.setattr(ppo_loop, "advantages_of", evpo.advantages_of)
    found = of_episodes([1.0, 2.0, 3.0, 5.0], (0.0, 0.0), rollout_n=2)
    assert found == [[x] * n for x in (-0.5, 0.5, -1.0, 1.0) for n in (2, 1)]


# ---- A fitted baseline ---------------------------------------------------------------------------


def test_a_baseline_is_fitted_to_earlier_steps(monkeypatch):
    """By numpy, from the weights (1 - p)^2 of three steps, whose values are good, then noise."""
    common.setup_distributed()
    monkeypatch.setattr(fitted, "sums", [])
    steps = []
    for seed in range(3):
        batch = random_batch(12, seed=seed, idle=False)
        batch.values = batch.values + (seed == 0) * common.monte_carlo(batch, 0.9)
        steps.append(batch)

    flags = ppo_loop.Run(critic_fsdp.Config(), gamma=0.9)
    left, right = numpy.zeros((2, 2)), numpy.zeros(2)
    for number, batch in enumerate(steps):
        found_T = fitted.advantages_of(batch, flags)
        mask_T = batch.response_mask
        columns = (batch.rollout_log_probs, batch.values, common.monte_carlo(batch, 0.9))
        log_p, v, G = (x_T[mask_T].double().numpy() for x_T in columns)
        X = numpy.stack([numpy.ones_like(v), v], 1)
        w = (1 - numpy.exp(log_p)) ** 2
        mine = X.T @ (w[:, None] * X), X.T @ (w * G)
        if number == 0:
            beta = numpy.linalg.solve(*mine)
        else:
            beta = numpy.linalg.solve(left, right)
        left, right = 0.9 * left + mine[0], 0.9 * right + mine[1]
        assert found_T[mask_T].numpy() == pytest.approx(G - X @ beta, abs=1e-4)
        assert not found_T[~mask_T].any()

    with pytest.raises(UserError, match="excludes a lambda below 1"):
        fitted.advantages_of(steps[0], ppo_loop.Run(critic_fsdp.Config(), lam=0.9))


def test_the_optimal_token_baseline_of_two_answers():
    """By hand. The first has chances 0.5 and 0.9 and earns 1; the second 0.5 and earns 0; in other
    columns, two answers to another prompt are the same."""
    common.setup_distributed()
    batch = rows_after([3], [3], [4], [4], answer=2)
    batch.response_mask[[5, 11]] = False  # the second answers have one action
    batch.rollout_log_probs = torch.tensor([1.0, 0.5, 0.9] * 4).log()
    batch.token_level_rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0] * 2)
    found = otb.advantages_of(batch, ppo_loop.Run(critic_fsdp.Config(), rollout_n=2))
    first = 0.25 * 1 / (0.25 + 0.25)  # both answers come to the first token, one to the second
    expected = [0, 1 - first, 1 - 1, 0, -first, 0] * 2
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


# ---- Places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("places, weights", [
    ((0.5,), [0, 0, 0, 1, 0]), ((0.0, 0.2, 1.0), [0, 0.5, 0, 0, 0.5]),
])  # fmt: skip
def test_value_places_of_four_actions(places, weights):
    rows = rows_after([3], answer=4)
    w = worker(fork="sp3o", of_fork={"places": places})
    assert w.critic.weights_of(rows, common.describe(rows)).tolist() == weights


# ---- Forks of a newcomer: quantiles, and a second output -----------------------------------------


@BOTH
def test_both_critics_learn_quantiles(script):
    """See the next test for what they learn."""
    w = worker(script=script, fork="quantiles", lr=0.02, value_head_init="normal")
    batch = random_batch(8, vocab_size=60, idle=False)
    assert w.model_config.num_labels == quantiles.QUANTILES == 16
    before_T = w.compute_values(batch)
    metrics = w.update_critic(batch)
    assert metrics["critic/vf_clipfrac"] == 0
    assert (w.compute_values(batch) - before_T).abs().max() > 1e-3


def pinball(quantiles_N, target):
    """The mean loss of 16 quantiles of one number, by hand."""
    losses = []
    for i, q in enumerate(quantiles_N):
        tau = (i + 0.5) / 16
        losses.append(tau * (target - q) if target > q else (1 - tau) * (q - target))
    return sum(losses) / 16


def test_an_export_of_quantiles_has_its_values_and_the_loss_is_that_of_a_loop(tmp_path):
    batch = random_batch(8, vocab_size=60, idle=False)
    w = worker(fork="quantiles", lr=0.02, value_head_init="normal")
    w.update_critic(batch)
    w.export_hf(tmp_path / "hf")
    model = LOAD(tmp_path / "hf", dtype=torch.float64, attn_implementation="eager")
    outputs_of = lambda _, ids: model(input_ids=ids).logits[0]
    loss_of = lambda outputs, old, target: pinball(outputs, target)
    values, losses = plain_loop(batch, outputs_of, lambda outputs: outputs.mean(), loss_of)
    torch.testing.assert_close(w.compute_values(batch), values.float(), rtol=0, atol=1e-5)

    # the gradient of the next update, of the weights that the loop shares
    again = worker(fork="quantiles", model=str(tmp_path / "hf"), value_head_init="checkpoint")
    with captured_gradients(again.critic) as seen:
        metrics = again.update_critic(batch)
    loss = torch.cat(losses).mean()
    loss.backward()
    assert metrics["critic/vf_loss"] == pytest.approx(float(loss), rel=1e-5)
    for name in ("weight", "bias"):
        theirs = getattr(model.score, name).grad.float()
        torch.testing.assert_close(seen[0][f"score.{name}"], theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fork", ["quantiles", "second_output"])
@pytest.mark.parametrize("script", ["critic_fsdp", "critic_megatron"])
def test_a_fork_goes_on_with_two_ranks_and_its_export_has_its_values(script, fork, tmp_path):
    """A run that is resumed on two ranks makes the updates of the whole run on one. --score with
    the export gives the values of the run's end, and the README's lines read the export."""
    rows = ROOT / "tests" / "rows.jsonl"
    words = [FORKS / f"{fork}.py", script, "--rollouts", rows, "--ppo-mini-batch-size", 1024]
    words += ["--eval-rollouts", ROOT / "tests" / "rows_held_out.jsonl", "--out-dir"]
    whole, two, scored = (tmp_path / name for name in ("whole", "two", "scored"))
    succeeded(run(sys.executable, *words, whole, "--steps", 4))
    succeeded(run(sys.executable, *words, two, "--steps", 2))
    succeeded(torchrun(2, *words, two, "--steps", 4, "--resume", "auto"))
    ours, theirs = (common.read_lines(path / "metrics.jsonl") for path in (whole, two))
    by_step = lambda lines: {(x["step"], key): y for x in lines for key, y in x.items()}
    ours = {key: x for key, x in by_step(ours).items() if not key[1].startswith("perf/")}
    theirs = by_step(theirs)
    for key, x in ours.items():
        assert theirs[key] == pytest.approx(x, rel=1e-5, abs=1e-6), key
    loss = "critic/vf_loss"
    assert ours[4, loss] < ours[1, loss]

    # the export
    score = [FORKS / f"{fork}.py", script, "--score", ROOT / "tests" / "rows_held_out.jsonl"]
    succeeded(run(sys.executable, *score, "--model", whole / "hf", "--out-dir", scored))
    model = LOAD(whole / "hf", dtype=torch.float32)
    for row in common.read_lines(scored / "scored.jsonl")[:4]:
        prompt, answer = (common.char_tokenizer().encode(row[x]) for x in ("prompt", "response"))
        ids = torch.tensor([[*prompt, *answer, 0]])
        outputs = model(ids).logits[0, len(prompt) - 1 : -1].detach()
        values = outputs.mean(1) if fork == "quantiles" else outputs[:, 0]
        assert row["values"] == pytest.approx(values[: len(row["values"])].tolist(), abs=1e-5)


@pytest.mark.parametrize("script", ["critic_fsdp", "critic_megatron"])
def test_a_critic_with_a_second_output_learns_both(script, tmp_path):
    """The first losses are those of a constant, by hand; then both go down."""
    rows = ROOT / "tests" / "rows.jsonl"
    words = (script, "--rollouts", rows, "--ppo-mini-batch-size", 1024, "--steps", 4)
    succeeded(run(sys.executable, FORKS / "second_output.py", *words, "--out-dir", tmp_path))
    lines = common.read_lines(tmp_path / "metrics.jsonl")
    first, last = (next(x for x in lines if x["step"] == step) for step in (1, 4))

    # the start, for each action: (its row's reward, how many actions are left)
    told = []
    for row in common.read_lines(rows):
        lefts = range(len(row["response"]) + 1, 0, -1)  # <eos> is the last action
        told += [(row["reward"], left) for left in lefts]
    start = float(f"{fmean(reward for reward, _ in told):.2g}")
    losses = [0.5 * (start - reward) ** 2 for reward, _ in told]
    assert first["critic/vf_loss"] == pytest.approx(fmean(losses), rel=1e-5)
    errors = [(start - left) ** 2 for _, left in told]
    assert first["critic/left_error"] == pytest.approx(fmean(errors), rel=1e-5)
    for name in ("vf_loss", "left_error"):
        assert last[f"critic/{name}"] < 0.99 * first[f"critic/{name}"]


if __name__ == "__main__":
    record(sys.argv[1])
