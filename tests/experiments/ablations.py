"""One recipe after another from equal starts: a table and a picture.

python tests/experiments/ablations.py       PPO on the built-in addition: 20 minutes on two cores
    --task digits --steps 160               the task of digits.py: 40 minutes
    --task notes --steps 30                 the task of notes.py: 20 minutes

Runs that have ended are not repeated; one that was stopped goes on from its last checkpoint.
"""

import os
import pathlib
import sys
from typing import Literal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import digits
import notes
import tyro
from series import compare

ZERO = "--critic.value-head-init zero --critic.lr 1e-30"  # values stay 0
RANDOM = "--critic.value-head-init normal"
# the same number of scored answers, for each seed a supervised actor and a critic of its own
PPO = {
    "no critic: minus the batch's mean": ZERO,
    "no critic: minus the mean of least noise": f"{ZERO} --whiten noise",
    "4 answers to each of 64 prompts": (
        f"tests/forks/evpo.py {ZERO} --train-batch-size 64 --rollout-n 4"
    ),
    "critic with a random head, lambda 1": RANDOM,
    "the same, its head starts at 0": "--critic.value-head-init zero",
    "the same, at the mean return": "--critic.value-head-init mean",
    "at the mean return, less noise": "--critic.value-head-init mean --whiten noise",
    "the fitted baseline": "tests/forks/fitted.py --critic.value-head-init mean",
    "OTB, 4 answers to each of 64 prompts": (
        f"tests/forks/otb.py {ZERO} --train-batch-size 64 --rollout-n 4"
    ),
    "OTB, 8 answers to each of 32 prompts": (
        f"tests/forks/otb.py {ZERO} --train-batch-size 32 --rollout-n 8"
    ),
    "a critic of least noise": (
        "--critic.value-head-init mean --critic.value-weights noise --whiten noise"
    ),
    "the same, reads the right answer": (
        "--critic.value-head-init mean --critic.value-weights noise --whiten noise"
        " --privileged-key response"
    ),
    "oracle: true V(s), lambda 1": "tests/experiments/oracle.py --baseline V",
    "oracle: true V(s), lambda 0.95": "tests/experiments/oracle.py --baseline V --lam-policy 0.95",
    "oracle: true V(s), lambda 0": "tests/experiments/oracle.py --baseline V --lam-policy 0",
    "oracle: minus true b(s)": "tests/experiments/oracle.py --baseline b",
    "oracle: true Q(s,a) - b(s)": "tests/experiments/oracle.py --baseline Q-b",
    "adapters of rank 16 on one base": (
        "--share-base --actor.lora-rank 16 --critic.lora-rank 16 --actor.lora-alpha 32"
        " --critic.lora-alpha 32 --actor.lr 3e-3"
    ),
    "a head on the actor's weights": "--share-base --critic.lr 1e-2",
    "at 0, and the critic reads the right answer": (
        "--critic.value-head-init zero --privileged-key response"
    ),
    "lambda 0.95": f"{RANDOM} --lam 0.95",
    "the first token gets half the credit": f"tests/forks/first_token_credit.py {RANDOM}",
    "10 of 60 steps for the critic alone": f"{RANDOM} --critic-warmup 10",
    "bins (HL-Gauss)": "tests/forks/hl_gauss.py ppo_loop --critic.value-range -0.1 1.1",
    "bounded values": f"{RANDOM} --critic.value-head bounded --critic.value-range -0.1 1.1",
    "value places 0.3, 0.6 and 0.9": f"tests/forks/sp3o.py ppo_loop {RANDOM}",
    "the critic only where it helps": f"tests/forks/evpo.py {RANDOM}",
    "at the mean return, not whitened": "--critic.value-head-init mean --whiten none",
    "progress advantage of the first row's policy": (
        "tests/experiments/oracle.py --baseline progress --learned {first}"
    ),
    "SAO": "tests/forks/sao.py",
    "BPCO": "tests/forks/bpco.py",
}
SCRATCH = "--train-batch-size 8 --critic.value-head-init zero"
GROUPS = f"tests/forks/evpo.py {ZERO} --train-batch-size 2 --rollout-n 4"
PRETRAINED = "--train-batch-size 8 --critic.model {pretrained}"  # on an eighth of all answers
DIGITS = {  # with the best learning rate of a grid
    "no critic: minus the batch's mean": f"{ZERO} --train-batch-size 8",
    "no critic: minus the mean of least noise": f"{ZERO} --train-batch-size 8 --whiten noise",
    "OTB, 4 answers to each of 2 prompts": (
        f"tests/forks/otb.py {ZERO} --train-batch-size 2 --rollout-n 4"
    ),
    "4 answers to each of 2 prompts": GROUPS,
    "critic from scratch, lambda 1": SCRATCH,
    "pretrained critic, lambda 1": PRETRAINED,
    "pretrained critic, less noise": f"{PRETRAINED} --whiten noise",
    "pretrained critic, fitted": f"tests/forks/fitted.py {PRETRAINED}",
    "critic from scratch, fitted": f"tests/forks/fitted.py {SCRATCH}",
    "critic from scratch, by turns": f"{SCRATCH} --gae-level turn",
    "pretrained critic, by turns": f"{PRETRAINED} --gae-level turn",
    "pretrained critic, lambda 0.95": f"{PRETRAINED} --lam-policy 0.95",
    "from scratch, head at the mean return": "--train-batch-size 8 --critic.value-head-init mean",
    "from scratch, reads the right answer": f"{SCRATCH} --privileged-key answer",
    "from scratch, bins (HL-Gauss)": (
        f"tests/forks/hl_gauss.py ppo_loop {SCRATCH} --critic.value-range -5 5"
    ),
    "from scratch, bounded values": (
        f"{SCRATCH} --critic.value-head bounded --critic.value-range -5 5"
    ),
}
PER_ROW = "tests/forks/credit_per_row.py"
MEAN = "--critic.value-head-init mean"
SECRET = f"{MEAN} --privileged-key secret"
NOTES = {  # an episode has two rows, and its reward comes at the end of the second
    "across rows, no critic: minus the batch's mean": ZERO,
    "credit per row, no critic": f"{PER_ROW} {ZERO}",
    "credit per row, a critic": f"{PER_ROW} {MEAN}",
    "4 answers to each of 32 prompts": (
        f"tests/forks/evpo.py {ZERO} --train-batch-size 32 --rollout-n 4"
    ),
    "across rows, less noise, no critic": f"{ZERO} --whiten noise",
    "OTB, 4 answers to each of 32 prompts": (
        f"tests/forks/otb.py {ZERO} --train-batch-size 32 --rollout-n 4"
    ),
    "across rows, a critic, lambda 1": MEAN,
    "the same, lambda 0.95": f"{MEAN} --lam-policy 0.95",
    "the same, fitted": f"tests/forks/fitted.py {MEAN}",
    "it reads the secret, lambda 1": SECRET,
    "it reads the secret, lambda 0.95": f"{SECRET} --lam-policy 0.95",
    "it reads secret and question, lambda 1": f"{MEAN} --privileged-key secret_and_question",
}


def ablations(
    out: pathlib.Path | None = None,
    task: Literal["addition", "digits", "notes"] = "addition",
    seeds: int = 5,
    first_seed: int = 101,
    steps: int = 60,
    jobs: int = os.cpu_count(),
    only: tuple[str, ...] = (),
):
    """Prints the table for as many seeds. A run keeps one core busy; `jobs` run at once. out: a
    folder for one task (None: out/ablations/TASK). only: names of recipes; that of progress
    advantage needs the first row."""
    out = out or pathlib.Path("out/ablations", task)
    recipes = {"addition": PPO, "digits": DIGITS, "notes": NOTES}[task]
    flags = "--critic.seed {seed}"
    all_seeds = range(first_seed, first_seed + seeds)
    if task == "digits":
        flags += f" {digits.FLAGS} --actor.lr 3e-4 --critic.lr 1e-3 --critic.cliprange-value None"
    if task == "notes":
        flags += f" {notes.FLAGS} --train-batch-size 128 --actor.lr 1e-3 --critic.lr 1e-3"
    if task != "addition":
        for seed in all_seeds:
            {"digits": digits, "notes": notes}[task].prepare(out / f"task, {seed}", seed)

    def pretrain(seed, asked):
        return digits.pretrain(out / f"task, {seed}", seed, 8 * asked)

    compare(out, recipes, flags, all_seeds, steps, pretrain, jobs, only)


if __name__ == "__main__":
    tyro.cli(ablations)
