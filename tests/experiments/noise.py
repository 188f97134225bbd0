"""How noisy the actor's gradient is with each baseline: what a critic could save, and does save.

python tests/experiments/noise.py --policy out/ppo_loop/hf --critic out/ppo_loop/critic_hf \\
    --exact "{answer}"                  addition, after a run of ppo_loop.py: ten seconds

The flags are those of truth.py, which first makes the answers with their true values. An answer's
gradient is sum_t A_t grad log pi(a_t|s_t). Every advantage A that is a return minus a baseline of
the state leads to the same mean gradient, so the one with half the noise E|g|^2 needs half the
answers. `relative` is the noise over that of "minus the mean". Where the values of a critic replace
rewards (lambda below 1), `signal` is how much of the true gradient the mean gradient has.

Gradients are those of the output head: of an action, the outer product of what the head reads and
of onehot - p. --full takes all weights, for tiny models.
"""

import pathlib
import sys
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import numpy as np
import torch
import truth as truths
from helpers import common
from series import start
from truth import LAMBDAS, Table, Truth, advantages_of, ask, lines_of, told_number

import ppo_loop
from common import UserError

DRAWS = 200  # of the bootstrap over prompts


@dataclass(frozen=True)
class Noise(Truth):
    """What to measure. More flags are those of ppo_loop.py."""

    full: bool = False  # gradients of all weights, and not only of the output head


def main(noise, flags):
    """Prints the table, and writes it to noise.json."""
    if not noise.policy or noise.states:
        raise UserError("--policy, --states: the noise needs a policy, and values of all places")
    run, maker = truths.made(noise, flags)
    file = noise.out_dir / "truth.jsonl"
    lines = lines_of(file)
    batch = common.read_rows(str(file), None, flag="--out-dir")
    table = Table(lines, batch, run.gamma)

    read = Read(noise, maker, lines)
    found = advantages(table, batch, lines, read, run.gamma)
    wrong = {}
    for folder in noise.critic:
        _, guess, _ = ask(table, batch, lines, run, folder, file)
        for name, advantage_A, wrong_A in of_critic(table, folder, guess, read):
            found[name] = advantage_A
            wrong[name] = wrong_A
    told = measure(table, read.gram_AA, found, wrong)
    print(f"\n{len(lines)} answers, {len(table.row)} actions\n")
    print("| advantage | noise | relative | signal |\n|---|---|---|---|")
    for name, (x, *pairs) in told.items():
        print(f"| {name} | {x:.4g} | {' | '.join(map(told_number, pairs))} |")
    common.write_json(noise.out_dir / "noise.json", told)


# ---- What the policy says of its answers ---------------------------------------------------------


class Read:
    """Columns of all actions, (A,): chances of the token, sums of all squared chances (S), and for
    --exact the chance of the right token times its weight (right); and the (A, A) dot products of
    all gradients of log-probs."""

    def __init__(self, noise, maker, lines):
        self.noise = noise
        self.maker = maker
        self.lm = maker.reader.model.requires_grad_(noise.full)
        reads = []
        head = self.lm.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda module, given: reads.append(given[0]))

        columns = []  # of each answer
        gradients = []
        with torch.set_grad_enabled(noise.full):
            for line in lines:
                log_p_RV, ids_R, at_R = self.log_probs(line)
                columns.append(self.columns(line, log_p_RV.detach(), ids_R, at_R))
                if noise.full:
                    chosen_R = log_p_RV.gather(1, ids_R[:, None])[:, 0]
                    gradients.append((self.all_weights(chosen_R),))
                else:
                    error_RV = -log_p_RV.exp()
                    error_RV[range(len(ids_R)), ids_R] += 1
                    gradients.append((reads[-1][0, at_R - 1], error_RV))
                reads.clear()
        hook.remove()

        self.p, self.squares, self.right = np.concatenate(columns, 1)
        factors = (torch.cat(x).double() for x in zip(*gradients, strict=True))
        self.gram_AA = np.prod([(x_AX @ x_AX.T).cpu().numpy() for x_AX in factors], 0)

        # the squared norm of onehot - p
        self.w = 1 - 2 * self.p + self.squares

    def log_probs(self, line):
        """((R, V) log-probs that its actions are drawn from, their ids, where they stand)."""
        ids = torch.tensor([*line["prompt_ids"], *line["response_ids"]], device=self.maker.device)
        acts = torch.tensor([False] * len(line["prompt_ids"]) + line["response_mask"])
        [at_R] = acts.to(ids.device).nonzero(as_tuple=True)
        logits_RV = self.lm(ids[None], use_cache=False).logits[0, at_R - 1]
        run = self.maker.run
        log_p_RV = ppo_loop.to_draw_from(logits_RV, run.temperature, run.top_p, self.maker.task)
        return log_p_RV, ids[at_R], at_R

    def columns(self, line, log_p_RV, ids_R, at_R):
        """(3, R) float64: see Read."""
        p_RV = log_p_RV.double().exp()
        squares_R = p_RV.square().sum(-1)
        right_R = torch.full_like(squares_R, torch.nan)
        if self.noise.exact:
            _, right = truths.right_answer(
                self.noise, self.maker.task.tokenizer, line["prompt_ids"], line["answer"]
            )
            right_R = torch.zeros_like(squares_R)
            for i, p_V in enumerate(p_RV):
                if line["response_ids"][:i] == right[:i]:
                    # the next token, or any one that ends the answer
                    p_X = p_V[right[i : i + 1] or self.maker.ends]
                    w_X = 1 - 2 * p_X + squares_R[i]
                    right_R[i] = (p_X * w_X).sum() / p_X.sum().clamp(min=1e-30)
        return torch.stack([p_RV[range(len(ids_R)), ids_R], squares_R, right_R]).cpu().numpy()

    def all_weights(self, chosen_R):
        """(R, P) gradients of these log-probs by all weights."""
        ones_RR = torch.eye(len(chosen_R), device=chosen_R.device)
        weights = list(self.lm.parameters())
        found = torch.autograd.grad(chosen_R, weights, ones_RR, is_grads_batched=True)
        return torch.cat([x.flatten(1) for x in found], 1)


# ---- Advantages ----------------------------------------------------------------------------------


def advantages(table, batch, lines, read, gamma):
    """{name: (A,)} of all baselines that need no critic, the first of which is the usual one."""
    returns_A = table.returns
    truth_A = table.truth
    true_T = np.full(len(batch.input_ids), np.nan)
    true_T[table.acts] = truth_A

    def weighted(w_A):
        return returns_A - (w_A * returns_A).sum() / w_A.sum()

    found = {
        "minus the mean": weighted(np.ones(len(returns_A))),
        "minus the mean weighted by the noise": weighted(read.w),
        "minus the mean weighted by (1 - p)^2": weighted((1 - read.p) ** 2),
        "minus the best constant": returns_A - best_constant(table, read.gram_AA),
        "no baseline": returns_A,
    }

    # the other answers to the prompt, of which each has a first action
    first_A = table.place == 0
    n_P = np.bincount(table.prompt[first_A])
    if n_P.min() > 1:
        sum_P = np.bincount(table.prompt[first_A], returns_A[first_A])
        its_B = returns_A[first_A]
        others_A = (sum_P[table.prompt] - its_B[table.row]) / (n_P[table.prompt] - 1)
        found["minus the mean of the prompt's other answers"] = returns_A - others_A
        found |= of_otb(table, read)

    found["minus true V(prompt)"] = returns_A - truth_A[first_A][table.row]
    for lam, advantage_A in zip(LAMBDAS, advantages_of(table, batch, true_T, gamma)):
        found[f"true V(s), lambda {lam:g}"] = advantage_A

    # the baseline that leaves the least noise, E[w Q|s] / E[w|s]
    if np.isfinite(read.right).all():
        rest_A = 1 - read.squares
        b_A = np.where(rest_A > 1e-6, truth_A * read.right / np.maximum(rest_A, 1e-6), truth_A)
        found["minus true b(s)"] = returns_A - b_A
        found["true Q(s,a) - b(s)"] = table.advantage + truth_A - b_A
    return found


def of_otb(table, read):
    """The Optimal Token Baseline (2602.07078): at each place, the mean of the prompt's answers that
    come so far, weighted by the noise w of all their tokens up to there. As it is published, an
    answer's own return is in it; without that, the mean gradient is that of the other baselines."""
    place_A = table.prompt * (1 + table.place.max()) + table.place
    before_A = np.cumsum(read.w)
    first_A = np.flatnonzero(table.place == 0)[table.row]
    sum_A = before_A - before_A[first_A] + read.w[first_A]

    total_A = np.bincount(place_A, sum_A * table.returns)[place_A]
    weight_A = np.bincount(place_A, sum_A)[place_A]
    others_A = np.divide(
        total_A - sum_A * table.returns,
        weight_A - sum_A,
        out=np.zeros_like(sum_A),
        where=weight_A - sum_A > 1e-9,
    )
    return {
        "OTB, which has the answer's own return": table.returns - total_A / weight_A,
        "OTB without it": table.returns - others_A,
    }


def best_constant(table, gram_AA):
    """The baseline that leaves the least noise of all constants."""
    return_A = table.returns
    same_AA = table.row[:, None] == table.row
    ones_A = (gram_AA * same_AA).sum(1)
    return (ones_A * return_A).sum() / ones_A.sum()


def of_critic(table, folder, guess, read):
    """Yields (name, (A,) advantages, (A,) what is wrong with these in the mean) of a critic, with
    and without the weighted mean of its advantages."""
    true_A = table.truth + table.advantage - guess.values
    for lam, advantage_A in zip(LAMBDAS, guess.advantages):
        name = f"{folder}, lambda {lam:g}"
        wrong_A = None
        if lam < 1:
            wrong_A = advantage_A - true_A
        yield name, advantage_A, wrong_A
        mean = (read.w * advantage_A).sum() / read.w.sum()
        yield f"{name}, minus its weighted mean", advantage_A - mean, wrong_A


# ---- Their noise ---------------------------------------------------------------------------------


def measure(table, gram_AA, found, wrong):
    """{name of an advantage: (E|g|^2, (its ratio to the first one, standard error), (signal,
    standard error) or None)}. Standard errors are by a bootstrap over prompts.

    wrong: {name: what is wrong with it in the mean, or None}."""
    first_B = np.flatnonzero(np.diff(table.row, prepend=-1))
    prompt_B = table.prompt[first_B]
    other_BB = prompt_B[:, None] != prompt_B

    # how often a draw has each answer; the first one is all of them
    n = prompt_B.max() + 1
    w_DP = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), DRAWS)
    w_DB = np.concatenate([np.ones((1, n)), w_DP])[:, prompt_B]

    def dots(x_A, y_A):
        """(B, B) dot products of the answers' gradients."""
        of_pairs = x_A[:, None] * y_A * gram_AA
        return np.add.reduceat(np.add.reduceat(of_pairs, first_B, 0), first_B, 1)

    def mean_dot(x_A, y_A):
        """(D,) dot products of mean gradients, up to a factor: of answers to different prompts,
        whose luck has nothing in common."""
        return np.einsum("db,be,de->d", w_DB, dots(x_A, y_A) * other_BB, w_DB)

    def with_error(x_D):
        return float(x_D[0]), float(x_D[1:].std())

    # the true gradient, from what has no luck behind the action
    true_A = table.advantage
    size_D = mean_dot(true_A, true_A)
    usual_D = None
    told = {}
    for name, x_A in found.items():
        noise_D = w_DB @ dots(x_A, x_A).diagonal()
        if usual_D is None:
            usual_D = noise_D
        signal = None
        if wrong.get(name) is not None:
            signal = with_error(1 + mean_dot(wrong[name], true_A) / size_D)
        told[name] = (float(noise_D[0] / len(prompt_B)), with_error(noise_D / usual_D), signal)
    return told


if __name__ == "__main__":
    start(Noise, main, __doc__)
