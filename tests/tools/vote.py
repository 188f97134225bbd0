"""Chooses an answer to each prompt by a critic, by votes, and by both, and compares their rewards.

    python tests/tools/vote.py out/scored/scored.jsonl

The file is what --score has written, of rows with prompt, response and reward. Best of n takes the
answer with the highest last value, majority the most frequent one, and weighted the one whose
responses have the highest last values together. Answers that tie share the vote.
"""

import json
import sys
from collections import Counter, defaultdict
from statistics import fmean


def answer(row):
    """What responses agree on: here all of the text, or what stands after its last ####."""
    return row["response"].split("####")[-1].strip()


VOTES = {
    "best of n": lambda row: row["rank"] == 1,
    "majority": lambda row: 1,
    "weighted": lambda row: row["last_value"],
}


def main(file):
    """Prints the mean reward of what each way of voting chooses."""
    prompts = defaultdict(list)  # prompt -> its rows
    for line in open(file):
        row = json.loads(line)
        prompts[json.dumps(row["prompt"])].append(row)  # text or messages

    for name, vote in VOTES.items():
        rewards = []
        for rows in prompts.values():
            votes = Counter()
            for row in rows:
                votes[answer(row)] += vote(row)
            most = max(votes.values())
            rewards.append(fmean(row["reward"] for row in rows if votes[answer(row)] == most))
        print(name, fmean(rewards))


if __name__ == "__main__":
    main(sys.argv[1])
