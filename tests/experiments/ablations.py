"""One recipe after another from equal starts: a table and a picture.

python tests/experiments/ablations.py       PPO on the built-in addition: 20 minutes on two cores
    --task digits --steps 160               the task of digits.py: 40 minutes
    --task notes --steps 30                 the task of notes.py: 20 minutes

Runs that have ended are not repeated; one that was stopped goes on from its last checkpoint.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Literal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import digits
import notes
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

ROOT = pathlib.Path(__file__).resolve().parents[2]
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
    "at the mean return, lambda 0 for the policy": "--critic.value-head-init mean --lam-policy 0",
    "progress advantage of the first row's policy": (
        "tests/experiments/oracle.py --baseline progress --learned {first}"
    ),
    "SAO": "tests/forks/sao.py",
    "BPCO": "tests/forks/bpco.py",
}
SCRATCH = "--train-batch-size 8 --critic.value-head-init zero"
GROUPS = f"tests/forks/evpo.py {ZERO} --train-batch-size 2 --rollout-n 4"
PRETRAINED = "--train-batch-size 8 --critic.model {task}/critic/hf"  # on an eighth of all answers
DIGITS = {  # with the best learning rate of a grid, and some with the next lower one
    "no critic: minus the batch's mean": f"{ZERO} --train-batch-size 8",
    "no critic: minus the mean of least noise": f"{ZERO} --train-batch-size 8 --whiten noise",
    "no critic, actor's rate 1e-4": f"{ZERO} --train-batch-size 8 --actor.lr 1e-4",
    "OTB, 4 answers to each of 2 prompts": (
        f"tests/forks/otb.py {ZERO} --train-batch-size 2 --rollout-n 4"
    ),
    "4 answers to each of 2 prompts": GROUPS,
    "4 answers, actor's rate 1e-4": f"{GROUPS} --actor.lr 1e-4",
    "critic from scratch, lambda 1": SCRATCH,
    "pretrained critic, lambda 1": PRETRAINED,
    "pretrained critic, less noise": f"{PRETRAINED} --whiten noise",
    "pretrained critic, fitted": f"tests/forks/fitted.py {PRETRAINED}",
    "critic from scratch, fitted": f"tests/forks/fitted.py {SCRATCH}",
    "pretrained critic, rate 1e-4": f"{PRETRAINED} --actor.lr 1e-4",
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


def run(job):
    """Rows of metrics.jsonl of a run, which is made if it is not there."""
    folder, script, flags = job
    if not (folder / "report.html").exists():
        command = [sys.executable, *script, "--out-dir", folder, "--resume", "auto", *flags]
        subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True
        )
    return [json.loads(line) for line in open(folder / "metrics.jsonl")]


def script_of(flags, usual):
    """(words that start a script, a recipe's flags). It may begin with one of tests/: a fork, and
    the name of the script that the fork changes."""
    words = flags.split()
    script = [*takewhile(lambda word: not word.startswith("--"), words)]
    file, *name = script or [usual]
    return [ROOT / file, *name], words[len(script) :]


def told(numbers):
    """Mean and standard error, as text; of one number only itself."""
    mean = f"{statistics.fmean(numbers):.3f}"
    if len(numbers) == 1:
        return mean
    return f"{mean} +- {statistics.stdev(numbers) / len(numbers) ** 0.5:.3f}"


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
    mean = next(iter(recipes))
    recipes = {name: recipes[name] for name in only or recipes}
    own = "--critic.seed {seed}"
    of = range(first_seed, first_seed + seeds)
    pretrained = {name: steps // 8 * ("{task}/critic" in flags) for name, flags in recipes.items()}
    first = []  # for each seed, the metrics of the answers that its critic is pretrained on
    if task == "digits":
        own += f" {digits.FLAGS} --actor.lr 3e-4 --critic.lr 1e-3 --critic.cliprange-value None"
        for seed in of:
            digits.prepare(out / f"task, {seed}", seed)
        if any(pretrained.values()):
            answers = max(8, steps // 8 * 8)
            first = [digits.pretrain(out / f"task, {seed}", seed, answers) for seed in of]
    if task == "notes":
        own += f" {notes.FLAGS} --train-batch-size 128 --actor.lr 1e-3 --critic.lr 1e-3"
        for seed in of:
            notes.prepare(out / f"task, {seed}", seed)

    todo = []
    for name, flags in recipes.items():
        script, mine = script_of(flags, "ppo_loop.py")
        words = f"--steps {steps - pretrained[name]} --seed {{seed}} {own}".split() + mine
        for seed in of:
            blanks = {"seed": seed, "task": out / f"task, {seed}", "first": out / f"{mean}, {seed}"}
            filled = [word.format(**blanks) for word in words]
            todo.append((out / f"{name}, {seed}", script, filled))

    with ThreadPoolExecutor(jobs) as threads:
        runs = list(tqdm(threads.map(run, todo), total=len(todo)))
    runs = {name: runs[i * seeds : (i + 1) * seeds] for i, name in enumerate(recipes)}
    for name, n in pretrained.items():  # for these first n steps the policy does not change
        runs[name] = [[row] * n + rows for row, rows in zip(first, runs[name])] if n else runs[name]
    table_of_ppo(runs, seeds, steps, out)


def table_of_ppo(runs, seeds, steps, out):
    """How well the policy ends, and what it has earned on the way."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    baseline = None
    block = 1 if steps < 100 else 10  # steps of a point
    print(
        "| recipe | at the end, held out | mean reward | more than the first row |"
        " explained variance |"
    )
    print("|---|---|---|---|---|")

    for number, (name, of_recipe) in enumerate(runs.items()):
        mine = [[row for row in rows if "reward/mean" in row] for rows in of_recipe]
        rewards = [[row["reward/mean"] for row in rows] for rows in mine]
        final = [rows[-1].get("eval/accuracy", rows[-1].get("eval/reward")) for rows in of_recipe]
        area = [statistics.fmean(x) for x in rewards]
        baseline = baseline or area
        more = [x - y for x, y in zip(area, baseline)]  # of the same seed
        ev = statistics.fmean(
            row["critic/explained_var"] or 0.0 for rows in mine for row in rows[-10:]
        )
        print(f"| {name} | {told(final)} | {told(area)} | {told(more)} | {ev:.2f} |")
        line = "-" if number < 10 else "--"  # there are ten colours
        curve = [statistics.fmean(x) for x in zip(*rewards)]
        curve = [statistics.fmean(curve[i : i + block]) for i in range(0, steps, block)]
        panel.plot(range(block, steps + block, block), curve, line, label=name)

    panel.set(xlabel="step", ylabel=f"reward of the answers, mean of {seeds} seeds")
    panel.legend(fontsize="small")
    figure.savefig(out / "ablations.png")


if __name__ == "__main__":
    tyro.cli(ablations)
