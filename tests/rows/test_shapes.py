"""Rows from elsewhere: files of each kind, and rows of other tools by a function.

The functions are in shapes.py, and a small file of each shape in the folder next to it."""

import gzip
import json
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from helpers import ROOT, refused, run, succeeded
from ppo_helpers import a_tokenizer, prompts_in

import common

SHAPES = ROOT / "tests" / "rows" / "shapes"
TEXTS = ["plain.jsonl", "plain.jsonl.gz", "plain.jsonl.zst", "array.json"]
TEXTS += ["responses.jsonl", "pair_text.jsonl"]
CHATS = ["verl.parquet", "saved", "pair_chat.jsonl", "pair_turns.jsonl", "trl_messages.jsonl"]
CHATS += ["sharegpt.jsonl", "ultrafeedback.jsonl"]
ROWS = [{"prompt": "1+1=", "response": text, "reward": 0.5} for text in "23456"]

datasets.disable_progress_bars()


def by(name):
    """The --rows of a function of tests/rows/shapes.py, or None."""
    known = name in (*common.SHAPES.values(), "steps")
    return f"{SHAPES}.py:{name}" if known else None


def read(name, convert=None, **options):
    """[(a row of this file as the start shows it, its rewards), ...]."""
    tokenizer = a_tokenizer()
    convert = convert or by(name.removesuffix(".jsonl"))
    rows = common.read_rows(str(SHAPES / name), tokenizer, convert=convert, **options)
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


# ---- Rows of other tools, by a function ----------------------------------------------------------


def texts_of(rows):
    """The text of each row, with special tokens."""
    return [a_tokenizer().decode(row.input_ids) for row in rows.split(1)]


def text_and_rewards(convert=None, **row):
    """A row's text, and its rewards that are not 0, by place."""
    rows = common.read_rows([json.dumps(row)], a_tokenizer(), convert=convert)
    (text,) = texts_of(rows)
    return text, {t: r for t, r in enumerate(rows.token_level_rewards.tolist()) if r}


@pytest.mark.parametrize("name", ["parts", "steps", "trl_steps", "prm800k", "math_shepherd"])
def test_a_step_is_judged_behind_its_end_and_nowhere_else(name):
    first, second = ("Step 1: ", "Step 2: ") if name == "math_shepherd" else ("", "")
    shown = f"'1+1={first}1 and 1' -> '\\n' <- '{second}is 2' -> '\\n'"
    assert read(f"{name}.jsonl") == [(shown, [1.0, 0.0])]


@pytest.mark.parametrize("name", ["prime_rl.jsonl", "nemo_rl.jsonl"])
def test_ids_with_a_mask_of_the_policys(name):
    assert read(name) == [("'2+2=' -> '3' <- '+' -> '2'", [0.0, 1.0])]


def test_parts_of_a_text_may_be_of_others():
    parts = {"response": ["add", "\n2\n", "2"], "response_mask": [1, 0, 1]}
    text, rewards = text_and_rewards(prompt="1+1=", rewards=[0.25, 1], **parts)
    assert text == "1+1=add\n2\n2<eos>" and rewards == {6: 0.25, 11: 1}
    with refused("response: a list of texts needs a response_mask; ", begin="toy:1: "):
        text_and_rewards(prompt="1+1=", reward=1, **parts | {"response_mask": [1, 0]})


def test_ids_win_over_texts():
    texts = {"prompt": [USER], "completion": ANSWERS[:1], "reward": 1.0}
    ids = {"prompt_ids": [22, 15], "completion_ids": [23]}
    assert text_and_rewards(by("prime_rl"), **texts, **ids) == ("2+3", {2: 1.0})
    ids = {"token_ids": [22, 15, 23], "token_loss_mask": [0, 0, 1]}
    assert text_and_rewards(by("nemo_rl"), **texts, **ids) == ("2+3", {2: 1.0})


def test_other_roles_of_a_sharegpt_chat():
    said = [("human", "1+1?"), ("function_call", "add"), ("observation", "2"), ("gpt", "2")]
    chat = [{"from": role, "value": text} for role, text in said]
    text, _ = text_and_rewards(by("sharegpt"), system="sum", conversations=chat, reward=1)
    assert text == "<system>sum<user>1+1?<assistant>add<tool>22<eos>"
    with refused("(KeyError: 'bot')", begin=f"toy:1: --rows {by('sharegpt')} "):
        chat = [{"from": "bot", "value": "2"}]
        text_and_rewards(by("sharegpt"), conversations=chat, reward=1)


@pytest.mark.parametrize("key", common.SHAPES)
def test_a_row_of_another_tool_names_the_function_that_reads_it(key):
    name = common.SHAPES[key]
    line = (SHAPES / f"{name}.jsonl").read_text().splitlines()[0]
    with refused(
        f"; with '{key}', --rows tests/rows/shapes.py:{name} may read it", begin="toy:1: "
    ):
        common.read_rows([line], a_tokenizer())


FUNCTIONS = """
from fractions import Fraction

def twice(row): return [row, row | {"reward": 0.25, "made": True}]
def none(row): return [] if row["response"] != "4" else row
def text(row): return "4"
def texts(row): return [row, "4"]
def key(row): return row["answer"]
def numbers(row): return row | {"reward": Fraction(1, 2)}
"""


def test_a_function_makes_the_rows_before_all_else_looks_at_them(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    lines = [*map(json.dumps, ROWS)]
    called = lambda name: {"convert": f"{tmp_path}/mine.py:{name}"}
    rows = common.read_rows(lines[:2], a_tokenizer(), **called("twice"))
    assert texts_of(rows) == ["1+1=2<eos>"] * 2 + ["1+1=3<eos>"] * 2
    assert rows.token_level_rewards[rows.response_mask].tolist()[1::2] == [0.5, 0.25] * 2
    assert texts_of(common.read_rows(lines, a_tokenizer(), **called("none"))) == ["1+1=4<eos>"]

    # scores stand next to the rows that it has made
    (tmp_path / "rows.jsonl").write_text("\n".join(lines[:2]))
    rows.values = rows.token_level_rewards
    source = str(tmp_path / "rows.jsonl")
    common.write_scores(source, str(tmp_path), rows, None, 1.0, **called("twice"))
    scored = common.read_lines(tmp_path / "scored.jsonl")
    assert [(row["last_value"], row.get("made")) for row in scored] == [
        (0.5, None),
        (0.25, True),
    ] * 2


@pytest.mark.parametrize("name, fault", [
    ("text", ': a row must be an object, not "4"'),
    ("texts", ': a row must be an object, not "4"'),
    ("key", " (KeyError: 'answer')"),
    ("other", " (KeyError: 'other')"),  # it is not there
    ("numbers", " (TypeError: Object of type Fraction is not JSON serializable"),
])  # fmt: skip
@pytest.mark.parametrize("flag", ["--rollouts", "--prompts"])
def test_a_fault_of_a_function_is_one_line_with_its_place(name, fault, flag, tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (file := tmp_path / "rows.jsonl").write_text(f"\n{json.dumps(ROWS[0])}\n")
    function = f"{tmp_path}/mine.py:{name}"
    with refused("", begin=f"{flag} {file}:2: --rows {function}{fault}"):
        if flag == "--prompts":
            prompts_in(str(file), a_tokenizer(), rows=function)
        else:
            common.read_rows(str(file), a_tokenizer(), convert=function)


@pytest.mark.parametrize("script", ["critic_fsdp", "critic_megatron", "ppo_loop"])
def test_each_script_takes_a_function_and_several_files(script, tmp_path):
    (tmp_path / "mine.py").write_text("def ours(row): return {**row, 'prompt': row['ask']}")
    files = [tmp_path / f"{n}.jsonl" for n in "ab"]
    for file in files:
        rows = [row | {"ask": "1+1=", "prompt": None, "answer": "2"} for row in ROWS]
        file.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--rollouts", *files, "--eval-rollouts", files[0]]
    if script == "ppo_loop":
        flags = ["--prompts", *files, "--eval-prompts", *files, "--supervised-steps", 0]
        flags += ["--reward", "addition"]
    flags += ["--rows", "mine.py:ours", "--steps", 1, "--out-dir", "out"]
    said = succeeded(run(sys.executable, ROOT / f"{script}.py", *flags, cwd=tmp_path))
    assert "first row  '1+1='" in said and ("prompts    10, 10 held" in said or " 10 rows" in said)


# ---- Lists of answers, and pairs -----------------------------------------------------------------


SYSTEM = {"role": "system", "content": "sum"}
USER = {"role": "user", "content": "1+1?"}
ANSWERS = [{"role": "assistant", "content": text} for text in "23"]


ASKED = "<user>1+1?"
AGAIN = [USER, ANSWERS[0], USER]


@pytest.mark.parametrize("prompt, begin, text", [
    # messages alone, and with turns that are not the whole chat, answer any prompt
    ("1+1?", [], ASKED), ([USER], [], ASKED), ([USER], AGAIN[1:], f"{ASKED}<assistant>2{ASKED}"),
    # whole chats stand for the prompt, which may have a system's message that they lack
    ("another text", [USER], ASKED), ([USER], [USER], ASKED),
    (AGAIN, AGAIN, f"{ASKED}<assistant>2{ASKED}"),
    ([SYSTEM, USER], [USER], f"<system>sum{ASKED}"),
    ([USER], [SYSTEM, USER], f"<system>sum{ASKED}"),
    ([SYSTEM, USER], [SYSTEM, USER], f"<system>sum{ASKED}"),
])  # fmt: skip
def test_a_pair_of_chats_has_its_prompt_once(prompt, begin, text):
    for key in ("prompt", "messages") if isinstance(prompt, list) else ("prompt",):
        row = {"chosen": begin + ANSWERS[:1], "rejected": begin + ANSWERS[1:], key: prompt}
        rows = common.read_rows([json.dumps(row)], a_tokenizer())
        assert texts_of(rows) == [f"{text}2<eos>", f"{text}3<eos>"]


@pytest.mark.parametrize("row, words", [
    ({"responses": ["2", "3"], "rewards": [1.0]}, "it has 2 responses, but 1 rewards"),
    ({"chosen": "2", "rejected": "2"}, "chosen and rejected are equal"),
    ({"chosen": AGAIN[:2], "rejected": AGAIN[:2]}, "chosen and rejected are equal"),
    ({"chosen": ["a", "b"], "rejected": ["a", "c"]}, "response: "),
    ({"chosen": 0, "rejected": 1}, "response: "),
])  # fmt: skip
def test_answers_that_do_not_fit_are_refused_with_the_line(row, words):
    with refused(words, begin="toy:1: "):
        text_and_rewards(prompt="1+1=", **row)


# ---- Scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["responses.jsonl", "pair_chat.jsonl", "verl.parquet"])
def test_scores_stand_next_to_each_row(name, tmp_path):
    rows = common.read_rows(str(SHAPES / name), a_tokenizer())
    rows.values = rows.token_level_rewards + 0.5 * rows.response_mask
    common.write_scores(str(SHAPES / name), str(tmp_path), rows, None, 1.0)
    scored = common.read_lines(tmp_path / "scored.jsonl")
    assert [row["values"] for row in scored] == [[0.5, 1.5], [0.5, 0.5]]
    assert [row["reward"] for row in scored] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["parts", "steps", "trl_steps"])
def test_scores_of_steps_say_which_they_are(name, tmp_path):
    source = str(SHAPES / f"{name}.jsonl")
    rows = common.read_rows(source, a_tokenizer(), convert=by(name))
    rows.values = 0.5 * rows.response_mask
    common.write_scores(source, str(tmp_path), rows, None, 1.0, convert=by(name))
    (row,) = common.read_lines(tmp_path / "scored.jsonl")
    assert row["step_values"] == [0.5, 0.5] and "values" not in row
    assert common.read_rows(str(tmp_path / "scored.jsonl"), a_tokenizer()).actions.sum() == 2


# ---- Files ---------------------------------------------------------------------------------------


def rows_in(source):
    """The rows of files, as objects."""
    return [row for _, _, row in common.raw_rows(source, "--prompts")]


def test_a_table_fills_in_nothing(tmp_path):
    """Rows of different keys, at any depth, as other files have them."""
    tools = [{"name": "add", "parameters": {"x": 1}}], [{"name": "add", "parameters": {"y": 2}}]
    rows = [{"prompt": [USER], "tools": x} for x in tools]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert rows_in(str(tmp_path / "rows.parquet")) == rows


def test_fields_of_mixed_types_are_no_json_text(tmp_path):
    """What load_dataset makes of them is a column of JSON, in which null is a value."""
    rows = [
        {"answer": "two", "tools": [{"x": {"type": ["null", "string"], "default": None}}]},
        {"answer": 3, "tools": [{"x": {"type": "string"}}]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"split": "train", "cache_dir": str(tmp_path)}
    made = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), **options)
    made.to_parquet(tmp_path / "rows.parquet")
    made.save_to_disk(tmp_path / "saved")
    assert "json" in str(pyarrow.parquet.read_schema(tmp_path / "rows.parquet").field("tools"))
    for name in ("rows.jsonl", "rows.parquet", "saved"):
        assert rows_in(str(tmp_path / name)) == rows


def test_text_in_a_binary_column_is_text(tmp_path):
    columns = {"prompt": pyarrow.array(["2+2=é".encode()], pyarrow.binary())}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    assert rows_in(str(tmp_path / "rows.parquet")) == [{"prompt": "2+2=é"}]


@pytest.mark.parametrize("suffix, kind", [(".gz", "gzip"), (".zst", "zstd"), (".bz2", "bz2")])
def test_packed_files_may_be_joined(suffix, kind, tmp_path):
    path = tmp_path / f"rows.jsonl{suffix}"
    for part in (ROWS[:2], ROWS[2:]):
        with open(path, "ab") as file, pyarrow.CompressedOutputStream(file, kind) as packed:
            packed.write("".join(f"{json.dumps(row)}\n" for row in part).encode())
    assert rows_in(str(path)) == ROWS


@pytest.mark.parametrize("decodes", [True, False])
def test_an_image_is_a_file_or_a_data_url(decodes, tmp_path):
    """As verl's data sets have them: a struct, or a feature of images."""
    images = [{"bytes": b"abc", "path": "a.png"}, {"bytes": None, "path": "b.png"}]
    made = datasets.Dataset.from_list([{"images": images[:1]}, {"images": images[1:]}])
    if decodes:
        features = datasets.Features(images=datasets.List(datasets.Image()))
        made = made.select([0]).cast(features)
    made.to_parquet(tmp_path / "rows.parquet")
    rows = [["data:image/png;base64,YWJj"], ["b.png"]][: len(made)]
    assert rows_in(str(tmp_path / "rows.parquet")) == [{"images": row} for row in rows]


def test_several_files_are_one_after_another(tmp_path):
    """A fault has the name and the line of its file, and images stand next to their file."""
    made = datasets.Dataset.from_list(ROWS[2:])
    made.to_parquet(tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS[:2])))
    files = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet"))
    assert rows_in(files) == ROWS
    assert texts_of(common.read_rows(files, a_tokenizer())) == [f"1+1={x}<eos>" for x in "23456"]

    (tmp_path / "c.jsonl").write_text(f"\n{json.dumps(ROWS[0] | {'reward': 'x'})}")
    with refused("reward: must be", begin=f"--rollouts {tmp_path}/c.jsonl:2: "):
        common.read_rows((*files, f"{tmp_path}/c.jsonl"), a_tokenizer())


def test_files_of_a_folder_are_in_the_order_of_their_numbers(tmp_path, capsys):
    """As verl's rollout_data_dir and our --dump-rollouts write them; some may be packed. Others are
    not read, which is said."""
    for names in (("1", "2", "9", "10", "100"), [f"step_{n}" for n in (1, 2, 9, 10, 100)]):
        folder = tmp_path / names[0]
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("{}")
        for name, row in zip(names, ROWS, strict=True):
            (folder / f"{name}.jsonl").write_text(json.dumps(row))
        packed = folder / f"{names[1]}.jsonl"
        text = packed.read_bytes()
        packed.rename(f"{packed}.gz").write_bytes(gzip.compress(text))
        assert rows_in(str(folder)) == ROWS
        assert f"{folder}/metrics.jsonl is left out, because" in capsys.readouterr().out


def test_a_folder_of_shards_is_read_whole_and_one_of_splits_in_part(tmp_path):
    for n in (0, 1):
        made = datasets.Dataset.from_list([ROWS[:2], ROWS[2:]][n])
        for folder, name in (("shards", f"train-{n}-of-2"), ("splits", ["train", "test"][n])):
            made.to_parquet(tmp_path / folder / f"{name}.parquet")
    assert rows_in(str(tmp_path / "shards")) == ROWS

    splits = str(tmp_path / "splits")
    assert rows_in(f"{splits}:train") == ROWS[:2] and rows_in(f"{splits}:test") == ROWS[2:]
    for name in (splits, f"{splits}:other"):
        words = f"it has the splits train, test; give one, as in {splits}:train"
        with refused(words, begin=f"--prompts {name} "):
            rows_in(name)


def test_folders_of_save_to_disk(tmp_path):
    parts = {"train": ROWS[:2], "test": ROWS[2:]}
    parts = {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "two")
    assert rows_in(f"{tmp_path}/two/test") == rows_in(f"{tmp_path}/two:test") == ROWS[2:]
    with refused("it has the splits train, test; give one, as in"):
        rows_in(str(tmp_path / "two"))


def test_csv(tmp_path):
    text = "prompt,response,reward\n1+1=,x,0.5\n"
    (tmp_path / "rows.csv").write_text(text)
    assert rows_in(str(tmp_path / "rows.csv")) == [ROWS[0] | {"response": "x"}]


def test_what_cannot_be_read_is_named(tmp_path):
    for name in ("none.jsonl", "none.parquet", "none/none.jsonl.gz", "none/none.json", "none"):
        with refused("FileNotFoundError", begin=f"--prompts {name} "):
            rows_in(name)
    with refused("doesn't contain any data files", begin=f"--prompts {tmp_path} "):
        rows_in(str(tmp_path))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with refused("", begin=f"--prompts {tmp_path}/rows.parquet "):
        rows_in(str(tmp_path / "rows.parquet"))


# ---- The hub -------------------------------------------------------------------------------------


def test_names_on_the_hub(monkeypatch):
    """A configuration and a split stand behind a name; one split needs no name."""
    with refused("", begin="--prompts org/other (ConnectionError: "):  # the tests have no hub
        rows_in("org/other")

    # what `datasets` is asked for, and which rows are taken of what it gives
    asked = []
    train, test = (datasets.Dataset.from_list(rows) for rows in (ROWS[:2], ROWS[2:]))
    hub = {"org/name": {"train": train, "test": test}, "org/one": {"train": train}}
    load = lambda name, *more, streaming: asked.append((*more, streaming)) or hub[name]
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert rows_in("org/name:test") == ROWS[2:] and rows_in("org/one") == ROWS[:2]
    assert rows_in("org/name:default:train") == ROWS[:2]
    assert asked == [(False,), (False,), ("default", False)]
    words = "(ValueError: it has the splits train, test; give one, as in org/name:train)"
    with refused(words, begin="--prompts org/name "):
        rows_in("org/name")
