"""The table of recipes, and the tasks of digits and notes."""

import json
import subprocess

import ablations
import digits
import notes
import pytest
import rewards
from helpers import run, succeeded

import common


def test_ablations_compare_runs_of_one_seed(tmp_path, capsys):
    """The table of finished runs: means, standard errors, differences from the first row by
    seed."""
    for name, means in zip(ablations.PPO, ([0.1, 0.3], [0.4, 0.7], *[[0.0, 0.0]] * 99)):
        for seed, x in zip((101, 102), means):
            (folder := tmp_path / f"{name}, {seed}").mkdir()
            (folder / "report.html").touch()
            rows = [{"reward/mean": x + step, "critic/explained_var": x} for step in (0, 1)]
            lines = [{"eval/accuracy": 9}, *rows, {"eval/accuracy": x}]
            common.replace_lines(folder / "metrics.jsonl", lines)

    ablations.ablations(tmp_path, seeds=2, steps=2)
    row = f"| {[*ablations.PPO][1]} | 0.550 +- 0.150 | 1.050 +- 0.150 | 0.350 +- 0.050 | 0.55 |\n"
    assert row in capsys.readouterr().out and (tmp_path / "ablations.png").exists()


@pytest.fixture
def one_recipe(tmp_path, capsys, monkeypatch):
    """Makes a short run of one recipe of a task, as forks, and expects its line."""

    def make(task, name, steps):
        monkeypatch.setattr(subprocess, "run", lambda command, **_: succeeded(run(*command)))
        recipes = getattr(ablations, task.upper())
        monkeypatch.setattr(ablations, task.upper(), {name: recipes[name]})
        ablations.ablations(tmp_path, task=task, seeds=1, steps=steps)
        assert f"| {name} |" in capsys.readouterr().out

    return make


def test_task_of_digits(one_recipe, monkeypatch):
    """The teacher errs at the stated rate, the reward is as documented, and a short run makes a
    table."""
    tokenizer = common.char_tokenizer()
    hits = []
    for row in map(json.loads, digits.rows(400, 7, "test", tokenizer)):
        turns = [tokenizer.decode(row["response_ids"][i:j]) for i, j in ((0, 3), (4, 5), (5, -1))]
        assert rewards.luck(row["prompt"], "", "", turns[:1]) == turns[1]
        right = sum(a == b for a, b in zip(row["answer"], turns[2], strict=True))
        less = 1 if turns[1] == "+" else 4
        assert rewards.points("", "", row["answer"], turns) == right / 4 - less
        hits.append(right / digits.LENGTH)

    assert abs(sum(hits) / len(hits) - (0.25 + 0.75 * digits.RIGHT)) < 0.03
    monkeypatch.setattr(digits, "STEPS", (2, 2))
    one_recipe("digits", "pretrained critic, lambda 1", steps=8)


def test_task_of_notes(one_recipe, monkeypatch):
    """The teacher notes and reads digits at the stated rates, the question comes with nothing but
    the note, only the answer to it earns, and a short run makes a table."""
    kept = []
    read = []
    lines = [json.loads(line) for line in notes.lessons(4000, 7)]
    for row, noted, said in zip(notes.rows(2000, 7, "taught"), lines[::2], lines[1::2]):
        note = noted["response"]
        kept += [x == digit for x, digit in zip(note, row["secret"], strict=True)]
        assert noted["prompt"] == f"{row['secret']}>" and set(note) <= {*row["secret"], "-"}

        # what an actor gets in the second context
        assert rewards.asks_later([note], row) == {"prompt": said["prompt"]}
        turns = [note, said["prompt"], said["response"]]
        assert rewards.asks_later(turns, row) is None
        assert rewards.remembered(turns, row["answer"]) == (said["response"] == row["answer"])
        if note[row["place"]] != "-":
            read.append(said["response"] == row["answer"])

    assert abs(sum(kept) / len(kept) - notes.KEPT) < 0.02
    assert abs(sum(read) / len(read) - (0.1 + 0.9 * notes.READ)) < 0.05
    assert rewards.remembered(["4"], "4") == 0
    monkeypatch.setattr(notes, "STEPS", 2)
    one_recipe("notes", "credit per row, no critic", steps=1)
