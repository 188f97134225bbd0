"""A task with luck inside an answer: the policy draws a lot, and an environment replies + or -,
which moves the reward by 1.5. Then each right digit earns a quarter. A prompt is a row of signs
with secret digits."""

import json
import random
import string

import rewards
import torch
from helpers import ROOT, common
from series import make
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from ppo_loop import ActorConfig

SIGNS = string.ascii_letters + "!#$%&()*,./:;<=>?@[]^_{|}~"
LENGTH = 20  # signs of a prompt, and so digits of an answer
# how often the teacher is right about a sign that it does not know; its wrong digit is fixed
RIGHT = 0.2
# before PPO: the actor's, on 64 answers of the teacher; the critic's, on 16 of the actor
STEPS = (200, 100)


def rows(n, seed, name, tokenizer):
    """Yields n lines with a prompt, its right digits, and the teacher's lot of three digits and
    answer."""
    rng = random.Random(f"{name} {seed}")
    secret = random.Random(f"secret {seed}")
    known = set(secret.sample(SIGNS, len(SIGNS) // 4 + 1))  # to the teacher
    digits = {sign: secret.sample("0123456789", 2) for sign in SIGNS}  # right and wrong

    for _ in range(n):
        signs = rng.choices(SIGNS, k=LENGTH)
        slips = [sign not in known and rng.random() >= RIGHT for sign in signs]
        lot = f"{rng.randrange(1000):03}"
        said = lot, "".join(digits[sign][slip] for sign, slip in zip(signs, slips))
        lot_ids, said_ids = (
            [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in said
        )
        chance = tokenizer(rewards.luck("".join(signs), "", "", [lot]))["input_ids"]
        row = {
            "prompt": "".join(signs),
            "answer": "".join(digits[sign][0] for sign in signs),
            "reward": 0,
        }
        mask = [1] * len(lot_ids) + [0] + [1] * len(said_ids)
        yield json.dumps(row | {"response_ids": lot_ids + chance + said_ids, "response_mask": mask})


def learn(folder, seed, lines):
    """Trains the actor that PPO starts from on the answers of a teacher, JSON lines, 64 at once, as
    ppo_loop.py does for addition."""
    tokenizer, config = common.load_config(ActorConfig())
    config.initializer_range = 0.1
    lm, _ = common.load_model(AutoModelForCausalLM, ActorConfig(), config, seed)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)

    # padded rows, whose loss counts on the answers alone
    taught = common.read_rows(list(lines), tokenizer)
    labels_T = torch.where(taught.response_mask, taught.input_ids, -100)
    ids_BL = pad_sequence(taught.input_ids.split(taught.lengths), True)
    labels_BL = pad_sequence(labels_T.split(taught.lengths), True)

    for first in range(0, len(taught), 64):
        some = slice(first, first + 64)
        lm(ids_BL[some], labels=labels_BL[some]).loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


FLAGS = f"""--prompts {{task}}/prompts.jsonl --eval-prompts {{task}}/held_out.jsonl --eval-every 0
    --reward {ROOT}/tests/loop/rewards.py:points --environment {ROOT}/tests/loop/rewards.py:luck
    --actor.model {{task}}/actor --max-response-length {LENGTH + 6} """


def prepare(folder, seed):
    """Makes prompts and an actor."""
    if not (folder / "actor" / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, n in (("prompts", 8192), ("held_out", 256)):
            (folder / f"{name}.jsonl").write_text(
                "\n".join(rows(n, seed, name, common.char_tokenizer()))
            )
        taught = rows(64 * STEPS[0], seed, "taught", common.char_tokenizer())
        learn(folder / "actor", seed, taught)


def pretrain(folder, seed, answers):
    """Trains a critic on the actor's answers -> (its folder, metrics of these answers)."""
    ask = f"ppo_loop.py {FLAGS} --steps 1 --critic-warmup 1 --train-batch-size {answers}"
    ask += f" --dump-rollouts --seed {1000 + seed}"
    asked = make(folder / "dump", ask, quiet=True, task=folder)
    fit = "critic_fsdp.py --rollouts {task}/dump/rollouts/step_1.jsonl --model {task}/actor"
    fit += " --value-head-init zero --ppo-mini-batch-size 16 --lr 1e-3 --cliprange-value None"
    fit += f" --steps {STEPS[1]} --seed {seed}"
    make(folder / "critic", fit, quiet=True, task=folder)
    return folder / "critic" / "hf", next(row for row in asked if "reward/mean" in row)
