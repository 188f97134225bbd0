"""The short form of faults.py; bench.py's contestants agree; the table of ablations.py."""

import json
import re
import sys

import ablations
import digits
import faults
import notes
import pytest
import rewards
from helpers import ROOT, printed, ran, run, succeeded

import common

pytestmark = pytest.mark.slow

SCENARIO_FILES = ("faults",)


def test_nothing_is_lost():
    print("\n" + printed(ran(faults.shortest, 0))[0])


def test_contestants_compute_the_same_values():
    """Both critics, with and without shared prompts, the bare loop, and verl where it is
    installed."""
    work = (
        "--model",
        "tiny",
        "--mix",
        "long-prompt",
        "--rows",
        "8",
        "--answers",
        "4",
        "--rounds",
        "1",
    )
    out = succeeded(run(sys.executable, ROOT / "tests" / "tools" / "bench.py", *work))
    lines = dict(re.findall(r"^\| (\w+(?: \w+)?) \| .* \| (\S+) \|$", out, flags=re.M))

    assert lines.keys() >= {"bare", "fsdp", "megatron", "fsdp alone", "megatron alone"}, out
    assert all(float(off) < 1e-5 for off in lines.values()), out


def test_an_episode_in_a_row_for_each_turn_has_the_values_of_the_one_long_row():
    work = ("--model", "tiny", "--mix", "episode", "--rows", "48", "--rounds", "1")
    names = ("fsdp whole", "fsdp", "fsdp alone", "megatron")
    out = succeeded(
        run(sys.executable, ROOT / "tests" / "tools" / "bench.py", *work, "--contestants", *names)
    )
    lines = dict(re.findall(r"^\| (\w+(?: \w+)?) \| .* \| (\S+) \|$", out, flags=re.M))
    assert lines.keys() == {*names}, out
    assert all(float(off) < 1e-5 for off in lines.values()), out


def test_the_simulated_rank_sends_what_a_real_one_sends():
    """Rank 0 of two: the bytes of rows that leave it, in the simulation and for real."""
    host = (ROOT / "tests" / "tools" / "bench.py", "--host")
    simulated = succeeded(run(sys.executable, *host, "--ranks", "2"))
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    real = succeeded(run(sys.executable, *torchrun, *host))
    [sent] = re.findall(r"^\| 2 \|.* (\S+) \|$", simulated, flags=re.M)
    assert re.findall(r"^\| 2 real \|.* (\S+) \|$", real, flags=re.M) == [sent]
    assert float(sent) > 10


def test_ablations_compare_runs_of_one_seed(tmp_path, capsys):
    """The table of finished runs: means, standard errors, differences from the first row by
    seed."""
    for name, means in zip(ablations.PPO, ([0.1, 0.3], [0.4, 0.7], *[[0.0, 0.0]] * 99)):
        for seed, x in zip((101, 102), means):
            (folder := tmp_path / f"{name}, {seed}").mkdir()
            (folder / "report.html").touch()
            rows = [{"reward/mean": x + step, "critic/explained_var": x} for step in (0, 1)]
            lines = [{"eval/accuracy": 9}, *rows, {"eval/accuracy": x}]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))

    ablations.ablations(tmp_path, seeds=2, steps=2)
    row = f"| {[*ablations.PPO][1]} | 0.550 +- 0.150 | 1.050 +- 0.150 | 0.350 +- 0.050 | 0.55 |\n"
    assert row in capsys.readouterr().out and (tmp_path / "ablations.png").exists()


def test_task_of_digits(tmp_path, capsys, monkeypatch):
    """The teacher errs at the stated rate, the reward is as documented, and a short run makes a
    table."""
    tokenizer = common.char_tokenizer()
    hits = []
    for row in map(json.loads, digits.rows(400, 7, "test", tokenizer)):
        turns = [tokenizer.decode(row["response_ids"][i:j]) for i, j in ((0, 3), (4, 5), (5, -1))]
        assert rewards.luck(row["prompt"], "", "", turns[:1]) == turns[1]
        right = sum(a == b for a, b in zip(row["answer"], turns[2], strict=True))
        assert rewards.points("", "", row["answer"], turns) == right / 4 - (
            1 if turns[1] == "+" else 4
        )
        hits.append(right / digits.LENGTH)

    assert abs(sum(hits) / len(hits) - (0.25 + 0.75 * digits.RIGHT)) < 0.03
    name = "pretrained critic, lambda 1"
    monkeypatch.setattr(ablations, "DIGITS", {name: ablations.DIGITS[name]})
    monkeypatch.setattr(digits, "STEPS", (2, 2))
    monkeypatch.setattr("subprocess.run", lambda command, **_: succeeded(run(*command)))  # as forks
    ablations.ablations(tmp_path, task="digits", seeds=1, steps=8)
    assert f"| {name} |" in capsys.readouterr().out


def test_task_of_notes(tmp_path, capsys, monkeypatch):
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

    name = "credit per row, no critic"
    monkeypatch.setattr(ablations, "NOTES", {name: ablations.NOTES[name]})
    monkeypatch.setattr(notes, "STEPS", 2)
    monkeypatch.setattr("subprocess.run", lambda command, **_: succeeded(run(*command)))  # as forks
    ablations.ablations(tmp_path, task="notes", seeds=1, steps=1)
    assert f"| {name} |" in capsys.readouterr().out
