"""A critic that answers lines one by one: tests/tools/serve.py."""

import json
import os
import sys

import pytest
import serve
from helpers import ROOT, begin, ended, run, succeeded, torchrun, worker

import common

SCRIPT = ROOT / "tests" / "tools" / "serve.py"
HELD_OUT = ROOT / "tests" / "rows_held_out.jsonl"
GOOD = {"prompt": "1+1=", "response": "2", "reward": 1.0}

# of the forks, standard input and output are taken
ON_PIPES = """
import os, runpy, sys

os.dup2(os.open("asks", os.O_RDONLY), 0)
os.dup2(os.open("answers", os.O_WRONLY), 1)
sys.stdin, sys.stdout = open(0), open(1, "w")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FAULTS = {  # lines that cannot be read -> how the answer begins
    "": "--score: no row has an action",
    "[]": "must be an object",
    '{"prompt': "is not JSON: ",
    json.dumps(GOOD | {"reward": "a"}): "reward: must be a valid number, not ",
    json.dumps(GOOD | {"response_mask": 1}): "response_mask: must be a valid array, not 1",
    f'{{"x": {"[" * 100_000}': "is not JSON: recursion limit exceeded",
    json.dumps(GOOD | {"response": "2" * 300}): "--ppo-max-token-len-per-gpu 250: ",
}


@pytest.mark.parametrize("critic, leaves", [("fsdp", "asks"), ("megatron", "answers")])
def test_lines_that_come_one_by_one_get_the_values_of_a_file(critic, leaves, tmp_path):
    """A client waits for each answer before it asks again; faults are answers, too. The service
    ends well when the client asks no more, or reads no more."""
    worker(model="tiny-qwen2", value_head_init="normal").export_hf(tmp_path / "judge")
    lines = HELD_OUT.read_text().splitlines()[:16:4]  # each of another prompt
    lines.append(json.dumps({"prompt": "9+9=", "responses": ["18", "19"], "rewards": [1, 0]}))
    (file := tmp_path / "rows.jsonl").write_text("\n".join(lines))
    flags = ("--model", tmp_path / "judge", "--ppo-max-token-len-per-gpu", 250, "--out-dir", "out")
    succeeded(
        run(sys.executable, ROOT / f"critic_{critic}.py", "--score", file, *flags, cwd=tmp_path)
    )
    rows = common.read_lines(tmp_path / "out" / "scored.jsonl")
    for row in rows:
        near = {key: pytest.approx(row[key], abs=1e-6) for key in ("values", "last_value")}
        row |= near

    (program := tmp_path / "served.py").write_text(ON_PIPES)
    paths = [tmp_path / name for name in ("asks", "answers")]
    for path in paths:
        os.mkfifo(path)
    service = begin(1, [program, SCRIPT, "--critic", critic, *flags], 60, tmp_path, alone=True)
    with open(paths[0], "w", buffering=1) as asks, open(paths[1]) as answers:

        def answer(line):
            asks.write(f"{line}\n")
            said = answers.readline()
            assert said, ended(service).stderr
            return json.loads(said)

        # a fault before each row, of which the last line has two
        for line, row, (fault, words) in zip(lines, rows, FAULTS.items(), strict=False):
            [(key, said)] = answer(fault).items()
            assert key == "error" and said.startswith(words)
            assert answer(line) == row
        assert json.loads(answers.readline()) == rows[-1]

        if leaves == "answers":
            answers.close()
            asks.write(f"{lines[0]}\n")
        else:
            asks.close()
        process = ended(service)
    assert succeeded(process) == "" and "\nprecision " in process.stderr
    assert "rror" not in process.stderr


def test_a_fault_of_our_own_is_an_answer_too(monkeypatch):
    """What no reader has thought of must not end the service."""

    def read(lines, flag):
        raise TypeError("unhashable")

    assert serve.answer(b"{}", None, read, None) == [{"error": "TypeError: unhashable"}]


def test_lines_are_answered_by_one_rank_with_the_weights_of_a_folder(tmp_path):
    for ranks, *flags in ((2,), (1, "--resume", "auto")):
        words = ("--out-dir", tmp_path / "out", *flags)
        process = torchrun(ranks, SCRIPT, *words)
        assert process.returncode == 2 and not (tmp_path / "out").exists()
        assert "serve.py: runs on one rank, and without --resume" in process.stderr
