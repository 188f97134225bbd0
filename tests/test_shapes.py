"""Rows from elsewhere: a small file of each shape that other tools write, in tests/shapes."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from helpers import ROOT, refused
from ppo_helpers import a_run_on_prompts, a_tokenizer

import common
import ppo_loop

SHAPES = ROOT / "tests" / "shapes"
TEXTS = ["plain.jsonl", "plain.jsonl.gz", "plain.jsonl.zst", "array.json"]
TEXTS += ["responses.jsonl", "pair_text.jsonl"]
CHATS = ["verl.parquet", "saved", "pair_chat.jsonl", "pair_turns.jsonl", "sharegpt.jsonl"]
CHATS += ["trl_messages.jsonl"]


def read(name, **options):
    """[(a row of this file as the start shows it, its rewards), ...]."""
    tokenizer = a_tokenizer()
    rows = common.read_rows(str(SHAPES / name), tokenizer, **options)
    shown = []
    for row in rows.split(1):
        text = common.row_as_read(row.input_ids.tolist(), row.response_mask.tolist(), tokenizer)
        shown.append((text, row.token_level_rewards[row.response_mask].tolist()))
    return shown


@pytest.mark.parametrize("name", TEXTS + CHATS)
def test_a_right_and_a_wrong_answer(name):
    prompt = "1+1=" if name in TEXTS else "<user>1+1?"
    right = (f"'{prompt}' -> '2<eos>'", [0.0, 1.0])
    wrong = (f"'{prompt}' -> '3<eos>'", [0.0, 0.0])
    assert read(name) == [right, wrong]


@pytest.mark.parametrize("name", ["steps.jsonl", "stepwise.jsonl"])
def test_a_step_is_judged_at_its_last_token_and_nowhere_else(name):
    shown = "'1+1=1 and 1' -> '\\n' <- 'is 2' -> '\\n'"
    assert read(name) == [(shown, [1.0, 0.0])]


@pytest.mark.parametrize("name", ["prime_rl.jsonl", "nemo_rl.jsonl"])
def test_ids_with_a_mask_of_the_policys(name):
    assert read(name) == [("'2+2=' -> '3' <- '+' -> '2'", [0.0, 1.0])]


@pytest.mark.parametrize("name", ["plain.jsonl.gz", "array.json", "verl.parquet", "saved"])
def test_the_loop_reads_prompts_of_these_kinds(name):
    run = a_run_on_prompts(answer_key="reward")
    prompts = ppo_loop.load_prompts(str(SHAPES / name), "--prompts", run, a_tokenizer())
    assert [prompt.answer for prompt in prompts] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["responses.jsonl", "pair_chat.jsonl", "verl.parquet"])
def test_scores_stand_next_to_each_row(name, tmp_path):
    rows = common.read_rows(str(SHAPES / name), a_tokenizer())
    rows.values = rows.token_level_rewards + 0.5 * rows.response_mask
    common.write_scores(str(SHAPES / name), str(tmp_path), rows, None, 1.0)
    scored = common.read_lines(tmp_path / "scored.jsonl")
    assert [row["values"] for row in scored] == [[0.5, 1.5], [0.5, 0.5]]
    assert [row["reward"] for row in scored] == [1.0, 0.0]


def test_scores_of_steps_say_which_they_are(tmp_path):
    rows = common.read_rows(str(SHAPES / "steps.jsonl"), a_tokenizer())
    rows.values = 0.5 * rows.response_mask
    common.write_scores(str(SHAPES / "steps.jsonl"), str(tmp_path), rows, None, 1.0)
    (row,) = common.read_lines(tmp_path / "scored.jsonl")
    assert row["step_values"] == [0.5, 0.5] and "values" not in row
    assert common.read_rows(str(tmp_path / "scored.jsonl"), a_tokenizer()).actions.sum() == 2


def test_the_response_that_the_user_names_is_the_only_one():
    keys = {"response": "chosen", "reward": "score"}
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "score": 0.5}
    rows = common.read_rows([json.dumps(row)], a_tokenizer(), keys=keys)
    assert a_tokenizer().decode(rows.input_ids) == "1+1=2<eos>"
    assert rows.token_level_rewards.sum() == 0.5


def test_a_named_prompt_wins_although_it_has_the_name_that_is_ours():
    row = {"prompt": "1+1=", "messages": [{"role": "user", "content": "?"}], "response": "2"}
    row["reward"] = 1
    rows = common.read_rows([json.dumps(row)], a_tokenizer(), keys={"prompt": "prompt"})
    assert a_tokenizer().decode(rows.input_ids) == "1+1=2<eos>"


def text_and_rewards(**row):
    """A row's text, and its rewards that are not 0, by place."""
    (rows,) = common.read_rows([json.dumps(row)], a_tokenizer()).split(1)
    rewards = {t: r for t, r in enumerate(rows.token_level_rewards.tolist()) if r}
    return a_tokenizer().decode(rows.input_ids), rewards


USER = {"role": "user", "content": "1+1?"}
ANSWERS = [{"role": "assistant", "content": text} for text in "23"]


@pytest.mark.parametrize("row", [{"prompt": "1+1?"}, {"messages": [USER]}, {"prompt": [USER]}])
def test_a_pair_of_messages_answers_any_prompt(row):
    lines = [json.dumps(row | {"chosen": ANSWERS[:1], "rejected": ANSWERS[1:]})]
    rows = common.read_rows(lines, a_tokenizer())
    texts = [a_tokenizer().decode(row.input_ids) for row in rows.split(1)]
    assert texts == ["<user>1+1?2<eos>", "<user>1+1?3<eos>"]


def test_ids_win_over_texts():
    texts = {"prompt": [USER], "completion": ANSWERS[:1], "reward": 1.0}
    ids = {"prompt_ids": [22, 15], "completion_ids": [23]}
    assert text_and_rewards(**texts, **ids) == ("2+3", {2: 1.0})
    ids = {"token_ids": [22, 15, 23], "token_loss_mask": [0, 0, 1]}
    assert text_and_rewards(**texts, **ids) == ("2+3", {2: 1.0})


def test_other_roles_of_a_sharegpt_chat():
    said = [("human", "1+1?"), ("function_call", "add"), ("observation", "2"), ("gpt", "2")]
    chat = [{"from": role, "value": text} for role, text in said]
    text, _ = text_and_rewards(system="sum", conversations=chat, reward=1)
    assert text == "<system>sum<user>1+1?<assistant>add<tool>22<eos>"
    with refused("conversations: from 'bot' is none of system, human"):
        text_and_rewards(conversations=[{"from": "bot", "value": "2"}], reward=1)


def test_steps_end_where_the_joined_text_says():
    """Although tokens do not: a step may begin within one, but two may not end in one."""
    row = {"prompt": "1+1=", "response": ["2", "", "3"], "rewards": [1, 1, 0]}
    with refused("response: each step must end with a token of its own"):
        text_and_rewards(**row)
    text, rewards = text_and_rewards(prompt="1+1=", response=["1 and 1 ", "is 2"], rewards=[1, 2])
    assert text == "1+1=1 and 1 is 2" and rewards == {10: 1, 15: 2}
    row = {"prompt": "<user>?<think>\n", "response": ["<think>\na", "b", "c"], "rewards": [1, 2, 4]}
    text, rewards = text_and_rewards(**row)
    assert text == "<user>?<think>\nabc" and list(rewards.values()) == [1, 2, 4]
    assert [text.replace("<user>", "x" * 6).index(x) for x in "abc"] == list(rewards)


def test_a_table_fills_in_nothing(tmp_path):
    """Rows of different keys, at any depth, as other files have them."""
    tools = [{"name": "add", "parameters": {"x": 1}}], [{"name": "add", "parameters": {"y": 2}}]
    rows = [{"prompt": [USER], "tools": x} for x in tools]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    lines = common.read_file(str(tmp_path / "rows.parquet"), "--prompts")
    assert list(map(json.loads, lines)) == rows


def test_folders_that_hold_no_rows_are_told_apart(tmp_path):
    with refused("it is a folder, and not one that a data set's save_to_disk has written"):
        common.read_rows(str(tmp_path), a_tokenizer())
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with refused("several data sets; give the folder of one: train, test"):
        common.read_rows(str(tmp_path), a_tokenizer())


def test_lists_of_unequal_length_are_refused_with_the_line():
    row = {"prompt": "1+1=", "responses": ["2", "3"], "rewards": [1.0]}
    with refused("it has 2 responses, but 1 rewards", begin="toy:1: "):
        common.read_rows([json.dumps(row)], a_tokenizer())
