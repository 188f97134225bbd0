"""What the experiments share: their command line, runs that are made once, and the table of recipes
of PPO."""

import itertools
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import tyro
from helpers import ROOT, common
from matplotlib.figure import Figure
from tqdm import tqdm

import ppo_loop


def start(kind, main, description):
    """Runs main(what is asked, flags of ppo_loop.py) with the command line, and leaves no worker
    process behind."""

    def run():
        asked, flags = tyro.cli(kind, description=description, return_unknown_args=True)
        try:
            main(asked, flags)
        finally:
            ppo_loop.end_workers()

    common.launch(run)


def script_of(flags, usual):
    """(what starts a recipe, its flags). It may begin with a file of tests/: a fork, and the name
    of the script that the fork changes."""
    script, dashes, rest = flags.partition("--")
    return script or usual, dashes + rest


def call(command, quiet=False, **blanks):
    """Runs a file of the project on one core, with these flags. What replaces {blanks} in a word
    may have spaces."""
    words = [word.format(newline="\n", blank=" ", **blanks) for word in command.split()]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    start = [sys.executable, ROOT / words[0], *words[1:]]
    subprocess.run([*map(str, start)], env=one_thread, check=True, capture_output=quiet)


def make(folder, command, quiet=False, drop=("checkpoints",), **blanks):
    """Rows of metrics.jsonl of a run. One that was stopped goes on from its last checkpoint, and
    one that has ended is not repeated. drop: what then is removed, because it may take
    gigabytes."""
    if not (folder / "report.html").exists():
        command += " --out-dir {folder} --resume auto"
        call(command, quiet, folder=folder, **blanks)
        for name in drop:
            shutil.rmtree(folder / name, ignore_errors=True)
    return common.read_lines(folder / "metrics.jsonl")


def told(numbers):
    """Mean and standard error, as text; of one number only itself."""
    mean = f"{statistics.fmean(numbers):z.3f}"
    if len(numbers) == 1:
        return mean
    return f"{mean} +- {statistics.stdev(numbers) / len(numbers) ** 0.5:.3f}"


def compare(out, recipes, flags, seeds, steps, pretrain=None, jobs=1, only=(), **options):
    """Runs recipes of PPO with each seed, `jobs` at once, and prints their table. flags: of all
    recipes. only: names of recipes. options: of make, with what replaces blanks.

    pretrain(seed, steps): a critic that has learned from this many steps of the first policy's
    answers -> (its folder, a row of metrics about these answers). They count as steps of its run,
    in which the policy stood still."""
    if unknown := {*only} - {*recipes}:
        sys.exit(f"--only: no recipe {', '.join(unknown)}; there is:\n" + "\n".join(recipes))
    first = next(iter(recipes))
    recipes = {name: recipes[name] for name in only or recipes}
    eighth = max(1, steps // 8)
    asked = {name: eighth * ("{pretrained}" in own) for name, own in recipes.items()}
    before = {}
    if any(asked.values()):
        before = {seed: pretrain(seed, eighth) for seed in seeds}

    def run(name, seed):
        script, own = script_of(recipes[name], "ppo_loop.py")
        command = f"{script} --seed {seed} --steps {steps - asked[name]} {flags} {own}"
        blanks = {"seed": seed, "task": out / f"task, {seed}", "first": out / f"{first}, {seed}"}
        blanks["pretrained"], row = before.get(seed, (None, None))
        made = make(out / f"{name}, {seed}", command, jobs > 1, **options, **blanks)
        return [row] * asked[name] + made

    todo = list(itertools.product(recipes, seeds))
    with ThreadPoolExecutor(jobs) as threads:
        made = list(tqdm(threads.map(run, *zip(*todo)), total=len(todo)))
    n = len(seeds)
    table_of_ppo({name: made[i * n : i * n + n] for i, name in enumerate(recipes)}, steps, out)


def table_of_ppo(runs, steps, out):
    """How well the policy ends, and what it has earned on the way, of {recipe: rows of metrics of
    each seed}."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    baseline = None
    block = 1 if steps < 100 else 10  # steps of a point
    print(
        "| recipe | at the end, held out | mean reward | more than the first row |"
        " explained variance |\n|---|---|---|---|---|"
    )

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
        print(f"| {name} | {told(final)} | {told(area)} | {told(more)} | {ev:z.2f} |", flush=True)

        # the mean over seeds, between its standard errors
        points = [
            [statistics.fmean(x[i : i + block]) for i in range(0, steps, block)] for x in rewards
        ]
        places = range(block, steps + block, block)
        mean = [statistics.fmean(x) for x in zip(*points)]
        line = "-" if number < 10 else "--"  # there are ten colours
        panel.plot(places, mean, line, label=name)
        if len(points) > 1:
            error = [statistics.stdev(x) / len(x) ** 0.5 for x in zip(*points)]
            low, high = ([m + sign * e for m, e in zip(mean, error)] for sign in (-1, 1))
            panel.fill_between(places, low, high, alpha=0.2)

    panel.set(xlabel="step", ylabel=f"reward of the answers, mean of {len(points)} seeds")
    panel.legend(fontsize="small")
    figure.savefig(out / "ablations.png")
