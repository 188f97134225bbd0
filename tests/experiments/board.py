"""The board: whose critic knows most of what can be known?

python tests/experiments/board.py               critic_fsdp.py as it is here: five minutes
    --lr 3e-4                                   the same with other flags of critic_fsdp.py
    tests/forks/quantiles.py                    a fork of it, and its flags

To play, change what you like in critic_fsdp.py or in a fork, such as `loss`, run this, and put the
line that it prints on top of the board in RESULTS.md. Every critic learns from answers.jsonl, 7,838
answers of one tiny policy to sums of two numbers, in at most 400 updates, and must not see
truth.jsonl before it is judged. The number is the explained variance of the true values behind the
first token, where a critic must follow the answer, of 512 answers to 128 other sums; the mean of
three seeds and its standard error.
"""

import datetime
import pathlib
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import recipes
from series import script_of, told

TESTS = pathlib.Path(__file__).resolve().parent
OUT = pathlib.Path("out/board").absolute()
SEEDS = (101, 102, 103)


def main(words):
    shutil.rmtree(OUT, ignore_errors=True)
    truth = OUT / "truth"
    truth.mkdir(parents=True)
    shutil.copy(TESTS / "truth.jsonl", truth)
    script, flags = script_of(" ".join(words), "critic_fsdp.py")
    own = f"--rollouts {TESTS}/answers.jsonl --eval-rollouts {TESTS}/truth.jsonl --steps 400"
    command = f"{script} {own} --eval-every 0 --save-every 0 {flags}"
    jobs = [(OUT / f"{seed}", truth, f"{command} --seed {seed}") for seed in SEEDS]
    runs = list(map(recipes.run, jobs))

    columns = [told([run[name] for run in runs]) for name in ("later", "explained", "flatness")]
    commit = ["git", "-C", TESTS, "describe", "--always", "--dirty"]
    commit = subprocess.run(commit, capture_output=True, text=True).stdout.strip()
    what = " ".join(words) or "as it is"
    print("\n| later | explained | flatness | what | date | commit |\n|---|---|---|---|---|---|")
    print(f"| {' | '.join(columns)} | {what} | {datetime.date.today()} | {commit} |")


if __name__ == "__main__":
    main(sys.argv[1:])
