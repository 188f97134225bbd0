"""real_model.py on a tiny model: its prompts, runs that go on, its tables."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import real_model
import rewards
from helpers import ROOT, common, run, succeeded
from transformers import AutoModelForCausalLM

from ppo_loop import ActorConfig


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with a tiny model whose tokenizer has a chat template; runs are forks."""
    whole = subprocess.run

    def forked(command, **options):
        if command[0] != sys.executable:
            return whole(command, **options)
        return succeeded(run(*command))

    monkeypatch.setattr(subprocess, "run", forked)
    tokenizer, config = common.load_config(ActorConfig())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
    model, _ = common.load_model(AutoModelForCausalLM, ActorConfig(), config, 0)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("row_of", [real_model.line_of, real_model.chat_of])
def test_sums_are_right_and_held_out_ones_are_others(row_of, tmp_path):
    real_model.write_sums(tmp_path, row_of)
    sums = []
    for name in ("prompts", "held_out"):
        for row in map(json.loads, open(tmp_path / f"{name}.jsonl")):
            a, b = map(int, re.findall(r"(\d+) \+ (\d+)", str(row["prompt"]))[-1])
            assert 10 <= a < 100 and 10 <= b < 100 and row["answer"] == str(a + b)
            sums.append((a, b))

    assert len(set(sums)) == len(sums) == sum(real_model.SUMS)
    said = {"3 + 4 = 7": 1, "7.": 1, "7 + 1": 0, "77": 0, "": 0}
    assert {text: rewards.last_number("", text, "7") for text in said} == said


def test_a_run_of_ppo_is_made_once_and_its_answers_count(tiny, tmp_path, monkeypatch, capsys):
    """8 steps: no critic makes 8; a pretrained one 7, after answers that count as the first."""
    names = ("no critic: minus the batch's mean", "pretrained critic")
    recipes = {name: real_model.PPO[name] for name in names}
    monkeypatch.setattr(real_model, "PPO", recipes)
    monkeypatch.setattr(real_model, "SUMS", (40, 4))
    monkeypatch.setattr(real_model, "ANSWERS", 4)
    real_model.ppo(tmp_path, tiny, seeds=1, steps=8)
    table = capsys.readouterr().out
    assert re.findall(r"^\| (.+?) \| 0.000 \| 0.000 \| 0.000 \|", table, flags=re.M) == [*recipes]

    # nothing is repeated, and no weights are left but those of the pretrained critic
    real_model.ppo(tmp_path, tiny, seeds=1, steps=8)
    again = capsys.readouterr().out
    assert "step " not in again and re.findall(r"^\|.*", table, re.M) == [*again.splitlines()]
    out = tmp_path / "ppo"
    start = out / "task, 101" / "critic"
    assert [x.parent for x in out.rglob("*.safetensors")] == [start / "hf"]
    steps = [
        sum("reward/mean" in row for row in common.read_lines(folder / "metrics.jsonl"))
        for folder in (out / f"{names[0]}, 101", out / f"{names[1]}, 101", start.parent / "asked")
    ]
    assert steps == [8, 7, 1]


def test_critics_of_its_own_answers_are_judged_by_four_to_each_other_sum(
    tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(real_model, "SUMS", (40, 4))
    monkeypatch.setattr(real_model, "BATCH", 20)
    names = [*real_model.CRITICS][::2]
    real_model.sums(tmp_path, tiny, seeds=1, epochs=1, recipes=names)
    rows = {}
    for name in ("train", "eval"):
        lines = map(json.loads, open(tmp_path / "sums" / f"{name}.jsonl"))
        rows[name] = [line["prompt_text"] for line in lines]

    assert len(set(rows["train"])) == len(rows["train"]) == 40
    assert len(rows["eval"]) == 16 and len(set(rows["eval"])) == 4
    assert not set(rows["train"]) & set(rows["eval"])
    rows = capsys.readouterr().out.splitlines()[-4:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in names for _ in "12"]
    for before, after in zip(rows[::2], rows[1::2]):
        assert before.endswith(" -- | -- | -- | -- |")
        assert after.endswith(" 0.000 | 0.000 | nan | nan |")  # no answer is right


def test_the_answer_with_most_votes_is_chosen_and_pairs_are_counted():
    rows = [
        dict(said=s, reward=r, v=v) for s, r, v in (("7", 1, 0.9), ("8", 0, 0.4), ("8", 0, 0.4))
    ]
    assert real_model.elected([rows], lambda row: 1) == 0
    assert real_model.elected([rows], lambda row: row["v"]) == 1
    assert real_model.elected([rows[:2]], lambda row: 1) == 0.5
    assert real_model.in_order([rows], lambda row: row["v"]) == 1
    assert real_model.in_order([rows], lambda row: -row["v"]) == 0
    assert real_model.in_order([rows], lambda row: 1) == 0.5


def test_commands_that_run_at_once_are_measured_each():
    """Seconds of CPU, without sleep, and memory; one that fails ends all."""
    python = lambda code: f"{sys.executable} -c {code.replace(' ', '')}"
    commands = {
        "sleeps": python("__import__('time').sleep(1)"),
        "adds": python("sum(range(4*10**7))"),
        "holds": python("len(b'x'*10**9)"),
    }
    made = real_model.measured(commands)
    assert [*made] == [*commands] and made["adds"][0] > 5 * made["sleeps"][0]
    assert made["holds"][1] > 0.93  # or what this process has, which a fork inherits
    with pytest.raises(SystemExit, match="failed: .*nowhere"):
        real_model.measured(commands | {"fails": python("nowhere")})


def test_the_afternoon_with_a_gpu_runs_on_a_tiny_model(tiny, tmp_path):
    """Every command of the page, one after another: each finds what the one before has written."""
    page = (ROOT / "tests" / "lessons" / "afternoon.md").read_text()
    blocks = re.findall(r"^```bash gpu\n(.*?)^```", page, flags=re.M | re.S)
    lines = "".join(blocks).replace("\\\n    ", "").replace(".venv/bin/", "").splitlines()
    assert len(lines) == 6 and "Qwen/Qwen2.5-1.5B-Instruct" in lines[-1]

    # sums as GSM8K writes them
    for name, held_out in (("train", False), ("test", True)):
        rows = [json.loads(line) for line in common.toy_rows(64, 0, held_out)]
        rows = [{"question": row["prompt"], "answer": "#### 7"} for row in rows]
        common.replace_lines(f"{tmp_path}/{name}.jsonl", rows)

    smaller = {
        "Qwen/Qwen2.5-1.5B-Instruct": str(tiny), "--rollout vllm": "",
        "--max-response-length 512": "--max-response-length 8", "--rollout-n 8": "--rollout-n 2",
        "--train-batch-size 1024": "--train-batch-size 16",
        "--train-batch-size 256": "--train-batch-size 16",
        "--steps 64 --eval-every 16": "--steps 1", "--steps 60": "--steps 1",
        "--ppo-max-token-len-per-gpu auto": "--ppo-max-token-len-per-gpu 4096",
    }  # fmt: skip
    for line in lines[1:]:  # the first is the README's
        for words, few in smaller.items():
            line = line.replace(words, few)
        command = shlex.split(line)
        succeeded(run(sys.executable, ROOT / command[1], *command[2:], cwd=tmp_path))
    assert (tmp_path / "out" / "scored" / "scored.jsonl").exists()


def test_the_noise_of_long_answers_is_told_in_three_ways(tiny, tmp_path, capsys, monkeypatch):
    """Of answers of one token, whole answers are their tokens; of longer ones they are not. Without
    a baseline, the first column is that of noise_by_baseline."""
    reward = tmp_path / "mine.py"
    reward.write_text("def distinct(prompt, response, answer):\n    return len({*response}) / 10\n")
    flags = real_model.LONG.replace(f"{ROOT}/tests/loop/rewards.py", str(reward))
    monkeypatch.setattr(real_model, "LONG", flags)
    told = {}
    for tokens in (1, 12):
        real_model.long(tmp_path / str(tokens), tiny, tokens)
        said = capsys.readouterr().out
        rows = re.findall(r"^\| (\w[\w ]*) \| (\S+) \S+ \S+ \| (\S+) \S+ \S+ \| (\S+)", said, re.M)
        told[tokens] = {name: tuple(map(float, cells)) for name, *cells in rows}
    assert [*told[12]] == ["mean", "nothing", "least noise", "group"]
    assert all(alone == whole for _, alone, whole in told[1].values())
    assert any(alone != whole for _, alone, whole in told[12].values())

    file = tmp_path / "12" / "long" / "asked" / "rollouts" / "step_1.jsonl"
    noise = common.noise_by_baseline(common.read_rows(str(file), None), 1.0)
    for name, (of_rows, *_) in told[12].items():
        assert of_rows == pytest.approx(noise[name][0], abs=2e-3)
