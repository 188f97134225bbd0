"""The board and its rows, and the table of recipes, in a short form."""

import json
import math
import re
import statistics

import board
import notes
import pays
import recipes
from helpers import ROOT, common

ROWS = [json.loads(line) for line in open(ROOT / "tests" / "experiments" / "truth.jsonl")]


def test_true_values_of_the_board_are_means_of_rewards():
    """They must be martingales: on average, what an answer earns and each change on the way to it
    are as expected, whatever has been written so far."""
    luck = []
    for row in ROWS:
        path = [*row["truth"], row["score"]]
        luck += [(i, after - before) for i, (before, after) in enumerate(zip(path, path[1:]))]
    for place in range(4):
        some = [x for i, x in luck if i == place]
        error = statistics.stdev(some) / len(some) ** 0.5
        assert abs(statistics.fmean(some)) < 3 * error + 1e-3, place

    # where the answer is wrong already, nothing is left
    for row in ROWS:
        for i, x in enumerate(row["truth"]):
            right = row["answer"].startswith(
                common.char_tokenizer().decode(row["response_ids"][:i])
            )
            assert (x > 0) == right


def test_answers_of_the_board_are_rows_with_right_rewards():
    asked = set()
    lines = (ROOT / "tests" / "experiments" / "answers.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        a, b = row["prompt"].rstrip("=").split("+")
        assert row["answer"] == str(int(a) + int(b))
        assert row["reward"] == (row["response"] == row["answer"])
        asked.add(row["prompt"])
    assert len(lines) == 7838 and not asked & {row["prompt_text"] for row in ROWS}


def test_the_board_prints_a_line_to_paste(tmp_path, monkeypatch, capfd):
    """Flags change its critic; the number of a critic that has hardly learned is near 0."""
    monkeypatch.setattr(board, "OUT", tmp_path)
    monkeypatch.setattr(board, "SEEDS", (101,))
    board.main(["--steps", "3", "--lr", "1e-4"])
    line = capfd.readouterr().out.splitlines()[-1]
    later, explained, flatness, what, *_ = line.strip("| ").split(" | ")
    assert what == "--steps 3 --lr 1e-4" and all(abs(float(x)) < 0.1 for x in (later, explained))
    assert 0 <= float(flatness) < 0.1


def test_the_rows_of_a_policy_say_whether_a_critic_pays(tmp_path, monkeypatch, capfd):
    """Of 8 prompts in each half, after a short training. Rows of notes are parts of episodes."""
    monkeypatch.setattr(notes, "STEPS", 4)
    monkeypatch.setitem(pays.FIT, "notes", "--steps 2")
    pays.pays("notes", tmp_path, prompts=8)
    said = capfd.readouterr().out
    tables = re.findall(r"^  \d\.\d{3} \+- \d\.\d{3}  (\w+)", said, flags=re.M)
    assert tables == 2 * ["nothing", "mean", "least", "group", "critic", "fitted"]
    assert " of 32 episodes of " in said and " held-out rows, " in said


def test_recipes_are_compared_with_the_truth(tmp_path, monkeypatch, capfd):
    """The numbers of the table are those in each run's truth.json; what is there is not made
    again."""
    made = recipes.addition

    def short(data):
        monkeypatch.setattr(recipes, "ASKED", 2)
        return made(data)._replace(steps=2)

    monkeypatch.setitem(recipes.TASKS, "addition", short)
    names = [*recipes.RECIPES][1:3]
    for _ in range(2):
        recipes.recipes("addition", tmp_path, seeds=2, jobs=2, only=names)
        said = capfd.readouterr().out.splitlines()[-2:]
    assert not any(line.startswith("step ") for line in said)
    for name, line in zip(names, said):
        files = [tmp_path / "addition" / f"{name}, {seed}" / "truth" for seed in (101, 102)]
        told = [json.loads((file / "truth.json").read_text())["guesses"] for file in files]
        later = [next(iter(guesses.values()))["later"][0] for guesses in told]
        assert line.split(" | ")[:1] == [f"| {name}"]
        assert math.isclose(
            float(line.split(" | ")[3].split(" ")[0]), statistics.fmean(later), abs_tol=6e-4
        )
