"""Critics of one policy's answers, one recipe after another, against the true values of truth.py.

python tests/experiments/recipes.py TASK
    addition    a tiny policy that adds, of ppo_loop.py: an hour on one core
    digits      one that draws lots, of digits.py
    sums        SmolLM2-135M, of real_model.py, which makes out/smollm2

All start from the policy's weights and learn from the same answers, in an order by seed. Runs that
have ended are not repeated; one that was stopped goes on from its last checkpoint.
"""

import json
import os
import pathlib
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import digits
import real_model
import tyro
from helpers import ROOT
from series import call, make, script_of, told
from tqdm import tqdm

MEAN = "--value-head-init mean"
RECIPES = {
    "verl's own: the head is random": "--value-head-init normal",
    "head at 0": "--value-head-init zero",
    "head at the mean return": MEAN,
    "at the mean: bounded values": f"{MEAN} --value-head bounded",
    "the head is random: bins (HL-Gauss)": "tests/forks/hl_gauss.py --value-head-init normal",
    "at the mean: value places 0.3, 0.6 and 0.9": f"tests/forks/sp3o.py {MEAN}",
    "at the mean: lambda 0.95": f"{MEAN} --lam 0.95",
    "at the mean: reads the right answer": f"{MEAN} --privileged-key answer",
    "at the mean: attention frozen": f"{MEAN} --freeze-modules {{frozen}}self_attn",
    "at the mean: LoRA of rank 16": f"{MEAN} --freeze-modules None --lora-rank 16 --lr {{lora}}",
    "at the mean: from random weights": (
        f"{MEAN} --model tiny-qwen2 --tokenizer {{policy}} --freeze-modules None --lr None"
    ),
    "at the mean: a quarter of the updates": f"{MEAN} --steps {{quarter}}",
    "at the mean: four times the updates": f"{MEAN} --steps {{four}}",
}
ASKED = 32  # steps of PPO, in which only the critic learns, for answers to sums
COLUMNS = ("explained", "later", "correlation", "flatness", "siblings", "samples", "lambda 1")


class Task(NamedTuple):
    """A policy, its answers with true values, and how critics learn from other answers."""

    policy: pathlib.Path
    train: pathlib.Path  # answers to learn from
    truth: str  # flags of truth.py
    flags: str  # of critic_fsdp.py
    steps: int  # updates
    lora: float = 1e-3  # the rate of LoRA
    frozen: str = ""  # weights that stay as they are, before another regular expression


def addition(data):
    """8,192 answers of the supervised actor of ppo_loop.py."""
    asked = data / "asked"
    flags = f"--steps {ASKED} --critic-warmup {ASKED} --dump-rollouts --eval-every 0"
    make(asked, f"ppo_loop.py {flags}")
    dumps = sorted((asked / "rollouts").glob("*.jsonl"))
    (data / "train.jsonl").write_text("".join(file.read_text() for file in dumps))
    truth = "--exact {{answer}}"
    return Task(asked / "hf", data / "train.jsonl", truth, "--lr 1e-3", steps=100)


def lots(data):
    """1,024 answers of the actor of digits.py."""
    digits.prepare(data, 101)
    digits.pretrain(data, 101, 1024)
    truth = digits.FLAGS.replace("--actor.model {task}/actor", "")
    truth = truth.format(task=data) + " --most 32 --answers 2 --continuations 16"
    train = data / "dump" / "rollouts" / "step_1.jsonl"
    return Task(data / "actor", train, truth, "--lr 1e-3 --ppo-mini-batch-size 64", steps=64)


def sums(data):
    """2,048 answers of a pretrained model to sums, of real_model.py; most layers stay as they are,
    and critics see each answer once."""
    model = real_model.MODEL
    real_model.write_sums(data, real_model.line_of)
    flags = f"--train-batch-size {real_model.SUMS[0]}"
    train, _ = real_model.ask(data, model, data / "asked", 101, flags)
    truth = f"--exact {{blank}}{{{{answer}}}} --prompts {data}/held_out.jsonl {real_model.LINE}"
    truth += f" --reward {ROOT}/tests/loop/rewards.py:last_number"
    frozen = real_model.LOWEST
    flags = f"--freeze-modules {frozen} --lr 5e-5 --ppo-mini-batch-size 32"
    return Task(model, train, truth, flags, 64, lora=1e-4, frozen=f"{frozen}|")


TASKS = {"addition": addition, "digits": lots, "sums": sums}


def run(job):
    """Trains and judges a critic, if that is not done -> its numbers in truth.json, and the last
    line of metrics.jsonl that is about held-out answers."""
    folder, truth, command = job
    metrics = make(folder, command)
    judged = folder / "truth"
    if not (judged / "truth.json").exists():
        judged.mkdir(exist_ok=True)
        shutil.copy(truth / "truth.jsonl", judged)
        judge = "tests/experiments/truth.py --critic {folder}/hf --out-dir {folder}/truth"
        judge += " --privileged-key answer" * ("--privileged-key" in command)
        call(judge, folder=folder)
        shutil.rmtree(folder / "hf")  # of a pretrained model, it takes half a gigabyte

    # the first of the guesses is the critic
    numbers = next(iter(json.loads((judged / "truth.json").read_text())["guesses"].values()))
    ends = [row for row in metrics if "eval/explained_var" in row]
    return {name: x for name, (x, _) in numbers.items()} | ends[-1]


def recipes(
    task: tyro.conf.Positional[Literal["addition", "digits", "sums"]],
    out: pathlib.Path = pathlib.Path("out/recipes"),
    seeds: int = 3,
    jobs: int = os.cpu_count(),
    only: tuple[str, ...] = (),
):
    """Prints the table for seeds 101, 102 and so on. A run keeps one core busy; `jobs` run at
    once. only: names of recipes."""
    out = (out / task).absolute()
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    task = TASKS[task](data)
    truth = f"tests/experiments/truth.py --policy {{policy}} {task.truth} --out-dir {{out}}/truth"
    call(truth, policy=task.policy, out=out)

    # one seed after another, so that a table of all recipes is there soon
    own = f"--rollouts {task.train} --eval-rollouts {out}/truth/truth.jsonl --eval-every 0"
    own += f" --save-every 20 --keep 1 {task.flags} --model {task.policy} --steps {task.steps}"
    blanks = {"policy": task.policy, "lora": task.lora, "frozen": task.frozen}
    blanks |= {"quarter": task.steps // 4, "four": 4 * task.steps}
    names = only or [*RECIPES]
    todo = []
    for seed in range(101, 101 + seeds):
        for name in names:
            script, flags = script_of(RECIPES[name].format(**blanks), "critic_fsdp.py")
            command = f"{script} {own} {flags} --seed {seed}"
            todo.append((out / f"{name}, {seed}", out / "truth", command))
    with ThreadPoolExecutor(jobs) as threads:
        runs = list(tqdm(threads.map(run, todo), total=len(todo)))
    tell({name: runs[i :: len(names)] for i, name in enumerate(names)})


def tell(runs):
    """Prints the table. +- is the standard error over seeds."""
    print(f"| recipe | explained variance of returns | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for name, mine in runs.items():
        cells = [
            told([row.get(x) or 0.0 for row in mine]) for x in ("eval/explained_var", *COLUMNS)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    tyro.cli(recipes)
