"""PPO on the built-in addition, one recipe after another, from equal starts: a table and a picture.

python tests/ablations.py        20 minutes on two cores; runs that have ended are not repeated
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "ppo_loop.py"
RECIPES = {  # the same number of scored answers, for each seed a supervised actor and a critic of its own
    "no critic: less the batch's mean": "--critic.value-head-init zero --critic.lr 1e-30",  # values stay 0
    "critic, lambda 1": "",
    "the same, its head starts at 0": "--critic.value-head-init zero",
    "lambda 0.95": "--lam 0.95",
    "the first token gets half the credit": "--first-token-credit 0.5",
    "10 of 60 steps for the critic alone": "--critic-warmup 10",
    "bins (HL-Gauss)": "--critic.value-head hl_gauss --critic.value-range -0.1 1.1",
    "bounded values": "--critic.value-head bounded --critic.value-range -0.1 1.1",
    "value places 0.3, 0.6 and 0.9": "--critic.value-places 0.3 0.6 0.9",
    "4 answers to each of 64 prompts": "--train-batch-size 64 --rollout-n 4",
}


def run(job):
    """Rows of metrics.jsonl of a run, which is made if it is not there."""
    folder, flags = job
    if not (folder / "report.html").exists():
        command = [sys.executable, SCRIPT, "--out-dir", folder, *flags.split()]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    return [json.loads(line) for line in open(folder / "metrics.jsonl")]


def told(numbers):
    """Mean and standard error, as text."""
    return f"{statistics.fmean(numbers):.3f} +- {statistics.stdev(numbers) / len(numbers) ** 0.5:.3f}"


def ablations(out: pathlib.Path = pathlib.Path("out/ablations"), seeds: int = 5, steps: int = 60):
    """Prints the table for seeds 101, 102 and so on."""
    jobs = []
    for name, flags in RECIPES.items():
        for seed in range(101, 101 + seeds):
            flags_of_seed = f"{flags} --steps {steps} --seed {seed} --critic.seed {seed}"
            jobs.append((out / f"{name}, {seed}", flags_of_seed))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        runs = list(tqdm(threads.map(run, jobs), total=len(jobs)))
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    baseline = None
    print("| recipe | accuracy at the end | mean reward | more than the first row | explained variance |")
    print("|---|---|---|---|---|")
    for i, name in enumerate(RECIPES):
        mine = [[row for row in rows if "reward/mean" in row] for rows in runs[i * seeds : (i + 1) * seeds]]
        rewards = [[row["reward/mean"] for row in rows] for rows in mine]
        final = [rows[-1]["eval/accuracy"] for rows in runs[i * seeds : (i + 1) * seeds]]
        area = [statistics.fmean(x) for x in rewards]
        baseline = baseline or area
        more = [x - y for x, y in zip(area, baseline)]  # of the same seed
        ev = statistics.fmean(row["critic/explained_var"] or 0.0 for rows in mine for row in rows[-10:])
        print(f"| {name} | {told(final)} | {told(area)} | {told(more)} | {ev:.2f} |")
        panel.plot(range(1, steps + 1), [statistics.fmean(x) for x in zip(*rewards)], label=name)
    panel.set(xlabel="step", ylabel=f"reward of the answers, mean of {seeds} seeds")
    panel.legend(fontsize="small")
    figure.savefig(out / "ablations.png")


if __name__ == "__main__":
    tyro.cli(ablations)
