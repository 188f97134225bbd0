"""A task of two contexts: the policy reads a secret of three digits and writes a note. Then it sees
only the note and a question, which digit is where? A right answer earns 1, and the note nothing.

A teacher shows the policy how, and knows how to read, but leaves most digits out of its notes. So
its answers are right in 0.34 of all cases: 0.3 (0.9 + 0.1 / 10) + 0.7 / 10. The likeliest note has
only dashes, and greedy answers are right in 0.1 to 0.3 at the start. A policy that learns to read
such notes without an error, and not to write, is right in 0.37; a perfect one is always right.
"""

import json
import random

import digits
from helpers import ROOT

LENGTH = 3  # digits of a secret
# an answer is the letter of a digit: answers in digits would teach to copy digits, in notes, too
LETTERS = "abcdefghij"
KEPT = 0.3  # how often the teacher writes a digit into the note, and not a dash
READ = 0.9  # how often the teacher reads a digit there; else, and for a dash, it guesses
STEPS = 400  # of the actor before PPO, on 64 notes or answers each


def rows(n, seed, name):
    """Yields n dicts with a secret's prompt, the question that comes later, and the answer."""
    rng = random.Random(f"{name} {seed}")
    for _ in range(n):
        secret = "".join(rng.choices("0123456789", k=LENGTH))
        place = rng.randrange(LENGTH)
        question = f"?{place + 1}="
        yield {
            "prompt": f"{secret}>",
            "question": question,
            "answer": LETTERS[int(secret[place])],
            "place": place,
            # what a critic may read
            "secret": secret,
            "secret_and_question": secret + question,
        }


def lessons(n, seed):
    """Yields n JSON lines of what the teacher writes: by turns a note, and an answer from it."""
    rng = random.Random(f"teacher {seed}")
    for row in rows(n // 2, seed, "taught"):
        note = "".join(digit if rng.random() < KEPT else "-" for digit in row["secret"])
        yield json.dumps({"prompt": row["prompt"], "response": note, "reward": 0})

        answer = row["answer"]
        if note[row["place"]] == "-" or rng.random() > READ:
            answer = rng.choice(LETTERS)
        yield json.dumps({"prompt": note + row["question"], "response": answer, "reward": 0})


# without a limit of time, the reward and the environment are called in the run's own process
FLAGS = f"""--prompts {{task}}/prompts.jsonl --eval-prompts {{task}}/held_out.jsonl --eval-every 0
    --reward {ROOT}/tests/loop/rewards.py:remembered
    --environment {ROOT}/tests/loop/rewards.py:asks_later
    --reward-timeout 0 --max-turns 2 --actor.model {{task}}/actor
    --max-response-length {LENGTH + 2} """


def prepare(folder, seed):
    """Makes prompts and an actor."""
    if not (folder / "actor" / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, n in (("prompts", 8192), ("held_out", 512)):
            lines = map(json.dumps, rows(n, seed, name))
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
        digits.learn(folder / "actor", seed, lessons(64 * STEPS, seed))
