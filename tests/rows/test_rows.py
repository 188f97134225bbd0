"""Rows as people write them: chats, special tokens, other people's files, batches made by hand."""

import codecs
import dataclasses
import json
import os
import re
from functools import partial

import pytest
import torch
from helpers import random_batch, refused, worker
from ppo_helpers import TURNS, a_tokenizer, prompts_in

import common
import critic_fsdp
import critic_megatron

SCRIPTS = pytest.mark.parametrize(
    "script", [critic_fsdp, critic_megatron], ids=["fsdp", "megatron"]
)
GOOD = {"response": "2", "reward": 1.0}
WITH_CALLS = TURNS.replace("{% endfor %}", "{{ m.tool_calls|length if m.tool_calls }}{% endfor %}")
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
USER = {"role": "user", "content": "1+1?"}


def text_of_row(tokenizer, **row):
    """One JSONL row as the critic reads it."""
    return tokenizer.decode(common.read_rows([json.dumps(GOOD | row)], tokenizer).input_ids)


def text_of_prompt(tokenizer, **row):
    """A prompt as PPO's actor reads it, and its text for reward functions."""
    (prompt,) = prompts_in([json.dumps(row)], tokenizer)
    return tokenizer.decode(prompt.ids), prompt.text


# ---- Chats ---------------------------------------------------------------------------------------


def parts(*texts):
    """The content of a message as parts of text."""
    return [{"type": "text", "text": text} for text in texts]


def test_parts_of_text_are_joined_in_every_message_by_both_scripts():
    chat = [
        {"role": "system", "content": parts("be ", "brief")},
        {"role": "user", "content": parts("1+", "1?")},
    ]
    shown = "<system>be brief<user>1+1?"
    assert text_of_row(a_tokenizer(), messages=chat) == f"{shown}2<eos>"
    assert text_of_prompt(a_tokenizer(), prompt=chat) == (shown, "1+1?")


@pytest.mark.parametrize("bad, words", [
    ({"content": "hi"}, "message 1: must be an object with a role and content"),
    ({"role": 1, "content": "hi"}, "message 1: must be an object with a role and content"),
    (USER | {"content": None}, "message 1: needs content; only one with tool_calls may lack it"),
    (USER | {"content": 7}, "message 1: its content must be text, not 7"),
    (USER | {"content": []}, "message 1: its content has parts that are not text: []"),
    (USER | {"content": [*parts("x"), {"type": "image"}]}, 'not text: [{"type": "image"}]'),
    (USER | {"content": [{"type": "text", "text": None}]}, "parts that are not text"),
    (USER | {"content": ["1+1?"]}, 'parts that are not text: ["1+1?"]'),
])  # fmt: skip
def test_a_bad_message_is_refused_by_both_scripts_with_its_place(bad, words):
    call = CALL | {"content": "x"}
    for chat, number in (([bad], 1), ([bad, USER], 1), ([USER, call, bad], 3)):
        said = words.replace("message 1", f"message {number}")
        with refused(said, begin="toy:1: message "):
            text_of_row(a_tokenizer(WITH_CALLS), messages=chat)
        with refused(said, begin="--prompts:1: unusable, with --prompt-key prompt"):
            text_of_prompt(a_tokenizer(WITH_CALLS), prompt=chat)


@pytest.mark.parametrize(
    "part", [{"type": "image"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
)
def test_parts_of_images_are_left_to_the_template_of_a_model_that_reads_them(part):
    chat = [{"role": "user", "content": [part, *parts("what?")]}]
    template = (
        "{% for m in messages %}{% for x in m.content %}"
        "{{ x.text if x.type == 'text' else '<image>' }}"
        "{% endfor %}{% endfor %}"
    )
    tokenizer = a_tokenizer(template)
    assert common.text_messages(chat, images=True) == chat
    assert common.chat_text(tokenizer, chat) == "<image>what?"


# ---- The first row, at the start -----------------------------------------------------------------


def shown(lines, tokenizer, capsys):
    """The line that shows the first of these rows."""
    rows = common.read_rows([json.dumps(line) for line in lines], tokenizer)
    common.describe_rows(rows, 1.0, "a test", tokenizer)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("first row  ")]
    return line.removeprefix("first row  ")


def test_the_first_row_is_shown_with_its_special_tokens_and_actions(capsys):
    """So what a template leaves out is missing there: it does not know the tool's role."""
    knows = TURNS.replace("<{{", "{% if m.role == 'user' %}<{{")
    knows = knows.replace("{% endfor", "{% endif %}{% endfor")
    tokenizer = a_tokenizer(knows, begins="<s>", bos="<s>")

    text = GOOD | {"prompt": "1+1="}
    chat = GOOD | {"messages": [USER, {"role": "tool", "content": "2"}]}
    assert shown([text, chat], tokenizer, capsys) == "'<s>1+1=' -> '2<eos>'"
    assert shown([chat, text], tokenizer, capsys) == "'<user>1+1?' -> '2<eos>'"

    # and what others say behind an action, here of a row without a tokenizer
    ids = {"prompt_ids": [5, 6], "response_ids": [7, 8], "response_mask": [1, 0], "reward": 1.0}
    assert shown([ids], None, capsys) == "[5, 6] -> [7] <- [8]"


def test_turns_are_counted(capsys):
    dialogue = {"prompt": "1+1=", "response": "add\n22", "reward": 1.0}
    rows = [json.dumps(dialogue | {"response_mask": [1, 1, 1, 0, 0, 1, 1]}), json.dumps(dialogue)]
    common.describe_rows(common.read_rows(rows, a_tokenizer()), 1.0, "a test", a_tokenizer())
    assert "12 of them actions in 3 turns; longest row 11\n" in capsys.readouterr().out


def test_of_a_long_text_the_ends_are_shown(capsys):
    long = GOOD | {"prompt": "a" * 150 + "b" * 150}
    ends = "'" + "a" * 99 + "…" + "b" * 99 + "'"
    assert shown([long], a_tokenizer(), capsys) == f"{ends} -> '2<eos>'"


# ---- Rows of other systems -----------------------------------------------------------------------

ANSWER = {"role": "assistant", "content": "2"}
OURS = {"prompt_ids": [5], "messages": [USER], "response": "3", "response_ids": [7]}
OURS |= {"rewards": [0.5], "reward": 9.0}
SHAPES = {  # who writes it -> the row, and where its prompt, response and reward are
    "TRL, text": ({"prompt": "<user>1+1?", "completion": "2", "reward": 1.0}, {}),
    "a whole chat as the prompt": (
        {"prompt": [USER, {"role": "assistant", "content": parts("2")}], "reward": 1},
        {},
    ),
    "nested keys": (
        {"prompt": [USER], "out": {"text": "2", "judge": {"score": 1}}},
        {"prompt": "prompt", "response": "out.text", "reward": "out.judge.score"},
    ),
    "a key that wins over ours": (
        OURS | {"q": [USER], "a": "2", "score": 1},
        {"prompt": "q", "response": "a", "reward": "score"},
    ),
    "a key that has the name of ours": (
        {"prompt": [USER], "messages": [ANSWER], "response": "2", "reward": 1},
        {"prompt": "prompt"},
    ),
    "one of a pair": (
        {"prompt": [USER], "chosen": "2", "rejected": "3", "score": 1.0},
        {"response": "chosen", "reward": "score"},
    ),
    "a key with a dot": (
        {"prompt": [USER], "response": "2", "a.b": 1.0, "a": {"b": 9}},
        {"reward": "a.b"},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_other_systems_are_read(shape):
    row, keys = SHAPES[shape]
    tokenizer = a_tokenizer()
    rows = common.read_rows([json.dumps(row)], tokenizer, keys=keys)
    assert tokenizer.decode(rows.input_ids) == "<user>1+1?2<eos>"
    assert rows.token_level_rewards.tolist() == [0.0] * (len(rows.input_ids) - 1) + [1.0]


@pytest.mark.parametrize("more, words", [
    ({}, "prompt, messages, prompt_ids"),
    ({"prompt": "1+1="}, "response, response_ids, completion"),
])  # fmt: skip
def test_a_row_that_fits_nothing_is_told_with_its_keys(more, words):
    row = {"question": "1+1=", "text": "2", "score": 1.0} | more
    shown = f"needs exactly one of {words}; has none; its keys are {', '.join(row)}"
    with refused(shown, begin="toy:1: "):
        common.read_rows([json.dumps(row)], a_tokenizer())


@pytest.mark.parametrize("name", ["prompt", "response", "reward"])
def test_a_named_key_that_a_row_lacks_is_told_although_others_would_do(name):
    row = {"prompt": "1+1=", "response": "2", "rewards": [1.0, 0.0]}
    shown = f"toy:1: no 'x.y', which --{name}-key names, among its keys prompt, response, rewards"
    with refused(shown):
        common.read_rows([json.dumps(row)], a_tokenizer(), keys={name: "x.y"})


@pytest.mark.parametrize("key, answer", [
    ("reward_model.ground_truth", "#### 2"), ("extra_info.answer", 3), ("x.y", None),
])  # fmt: skip
def test_the_loop_reads_nested_answers_as_verl_writes_them(key, answer):
    row = {
        "prompt": [USER],
        "reward_model": {"ground_truth": "#### 2"},
        "extra_info": {"answer": 3},
    }
    (prompt,) = prompts_in([json.dumps(row)], a_tokenizer(), answer_key=key)
    assert (prompt.text, prompt.answer) == ("1+1?", answer)


def test_keys_and_options_of_the_template_are_passed_on(tmp_path):
    tokenizer = a_tokenizer(TURNS + "{{ more }}")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"q": [USER], "a": {"text": "2"}, "points": 0.5}))
    keys = {"prompt_key": "q", "chat_template_kwargs": '{"more": "!"}'}
    of_rows = {"rollouts": str(path), "response_key": "a.text", "reward_key": "points"}
    run = critic_fsdp.Run(**keys, **of_rows)
    made = critic_fsdp.CriticWorker(critic_fsdp.Config())
    made.tokenizer = tokenizer

    rows, _ = critic_fsdp.load_rows(run, made)
    assert tokenizer.decode(rows.input_ids) == "<user>1+1?!2<eos>"
    assert rows.token_level_rewards.sum() == 0.5
    with refused("must be a JSON object", begin="--chat-template-kwargs [1]: "):
        critic_fsdp.load_rows(dataclasses.replace(run, chat_template_kwargs="[1]"), made)

    # and by the loop
    (prompt,) = prompts_in(str(path), tokenizer, **keys)
    assert tokenizer.decode(prompt.ids) == "<user>1+1?!"


# ---- Special tokens ------------------------------------------------------------------------------

BEGINNINGS = pytest.mark.parametrize("kind, begin", [  # of a_tokenizer, and how its rows begin
    ({"ends": "<eos>"}, ""),
    ({"begins": "<s>", "ends": "<eos>", "bos": "<s>"}, "<s>"),
    ({"begins": "<s>", "bos": "<s>"}, "<s>"),
    ({"begins": "<b> <s>", "bos": "<s>"}, "<b><s>"),
    ({"begins": "[gMASK] <sop>"}, "[gMASK]<sop>"),
    ({"begins": "[CLS]", "ends": "[SEP]"}, "[CLS]"),
])  # fmt: skip


@pytest.mark.parametrize("key, source, shown", [
    ("prompt", "1+1=", "1+1="), ("messages", [USER], "<user>1+1?"),
])  # fmt: skip
@BEGINNINGS
def test_a_row_begins_once_and_never_ends_in_its_middle(kind, begin, key, source, shown):
    """With a hint and without, in the critic's rows and in PPO's."""
    tokenizer = a_tokenizer(begin + TURNS, **kind)
    hint = "For the critic only: 7\n"
    line = json.dumps(GOOD | {key: source, "answer": 7})
    for hint_key, text in ((None, f"{begin}{shown}"), ("answer", f"{begin}{hint}{shown}")):
        rows = common.read_rows([line], tokenizer, hint_key=hint_key)
        assert tokenizer.decode(rows.input_ids) == f"{text}2<eos>"

    # the actor reads no hint
    (prompt,) = prompts_in([line], tokenizer, prompt_key=key, privileged_key="answer")
    assert tokenizer.decode(prompt.critic_ids) == f"{begin}{hint}{shown}"
    assert tokenizer.decode(prompt.ids) == f"{begin}{shown}"


@BEGINNINGS
def test_a_prompt_that_brings_its_own_beginning_gets_no_second_one(kind, begin):
    """As text that a chat template has made before."""
    tokenizer = a_tokenizer(**kind)
    assert text_of_row(tokenizer, prompt=f"{begin}1+1=") == f"{begin}1+1=2<eos>"
    assert text_of_prompt(tokenizer, prompt=f"{begin}1+1=")[0] == f"{begin}1+1="


def test_a_hint_before_token_ids_keeps_their_bos_in_front():
    tokenizer = a_tokenizer(bos="<s>")  # which this tokenizer does not add to a text
    bos = tokenizer.bos_token_id
    ids = [bos, *tokenizer.encode("1+1=")]
    line = json.dumps(GOOD | {"prompt_ids": ids, "response": "2", "answer": "two"})
    rows = common.read_rows([line], tokenizer, hint_key="answer")
    assert tokenizer.decode(rows.input_ids) == "<s>For the critic only: two\n1+1=2<eos>"


@pytest.mark.parametrize("hint", [None, True, ["x"], {"a": 1}])
def test_a_hint_is_text_or_a_number(hint):
    line = json.dumps(GOOD | {"prompt": "1+1=", "answer": hint})
    with refused("answer of --privileged-key must be text or a number", begin="toy:1: "):
        common.read_rows([line], a_tokenizer(), hint_key="answer")


def test_an_empty_response_is_a_policy_that_stopped_at_once():
    row = {"prompt": "1+1=", "response": "", "reward": 0.5}
    rows = common.read_rows([json.dumps(row)], a_tokenizer())
    assert a_tokenizer().decode(rows.input_ids) == "1+1=<eos>"
    assert rows.response_mask.tolist() == [False] * 4 + [True]
    assert rows.token_level_rewards[-1] == 0.5


# ---- Files ---------------------------------------------------------------------------------------


def test_files_with_byte_order_marks_may_be_joined(tmp_path):
    lines = [json.dumps(GOOD | {"prompt": prompt}, ensure_ascii=False) for prompt in ("1+1=", "é=")]
    tokenizer = a_tokenizer()
    expected = common.read_rows(lines, tokenizer)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(codecs.BOM_UTF8 + line.encode() for line in lines))

    # as rows, as prompts, and as lines to which scores are added
    assert torch.equal(common.read_rows(str(path), tokenizer).input_ids, expected.input_ids)
    assert [prompt.text for prompt in prompts_in(str(path), tokenizer)] == ["1+1=", "é="]
    expected.values = expected.token_level_rewards.clone()
    common.write_scores(str(path), str(tmp_path), expected, tokenizer, 1.0)
    scored = common.read_lines(tmp_path / "scored.jsonl")
    assert [(row["prompt"], row["last_value"]) for row in scored] == [("1+1=", 1.0), ("é=", 1.0)]


def test_what_is_scored_is_no_pipe_because_it_is_read_twice():
    pipe, end = os.pipe()
    os.close(end)
    with refused("can read only a file, not a pipe", begin=f"--score /dev/fd/{pipe}"):
        common.read_rows(f"/dev/fd/{pipe}", a_tokenizer(), flag="--score")
    os.close(pipe)


# ---- True values ---------------------------------------------------------------------------------

SUM = {"prompt": "1+1=", "response": "02", "reward": 1.0}  # three tokens, with the end
TRUE = {"truth": [0.25, None, 1], "truth_noise": [0.125, None, 0]}


def columns_of(rows, name):
    """[what a column has for the actions] of each row; None is NaN."""
    x_B = getattr(rows, name).split(rows.lengths)
    acts_B = rows.response_mask.split(rows.lengths)
    columns = [x_T[acts_T].tolist() for x_T, acts_T in zip(x_B, acts_B)]
    return [[None if x != x else x for x in column] for column in columns]


@pytest.mark.parametrize("response", [
    {"response": "02"},
    {"response": None, "response_ids": [7, 8, 9]},
    {"response": "024", "truncated": True},
    {"response": "0+24", "response_mask": [1, 0, 1, 0, 1],
     "truth": [0.25, 7, None, None, 1], "truth_noise": [0.125, 7, None, None, 0]},
], ids=["text", "ids", "a text that was cut off", "text that does not act"])  # fmt: skip
def test_true_values_are_read_where_a_row_has_them(response):
    """Null is unknown, and so is all of a row that has none."""
    lines = [json.dumps(x) for x in (SUM, SUM | TRUE | response, SUM | TRUE)]
    rows = common.read_rows(lines, a_tokenizer())
    known = [0.25, None, 1.0]
    assert columns_of(rows, "truth") == [[None] * 3, known, known]
    assert columns_of(rows, "truth_noise")[0] == [0.0] * 3
    assert [noise[::2] for noise in columns_of(rows, "truth_noise")[1:]] == [[0.125, 0.0]] * 2

    # they are exact unless their noise is given
    rows = common.read_rows([json.dumps(SUM | {"truth": TRUE["truth"]})], a_tokenizer())
    assert columns_of(rows, "truth_noise") == [[0.0] * 3]


@pytest.mark.parametrize("row", [
    SUM, SUM | {"truth": [None] * 3},
    SUM | {"response": "0+2", "response_mask": [1, 0, 0, 0], "truth": [None, 1, 1, 1]},
], ids=["no truth", "all null", "only where nothing acts"])  # fmt: skip
def test_rows_without_true_values_have_no_column_of_them(row):
    rows = common.read_rows([json.dumps(row)] * 2, a_tokenizer())
    assert rows.truth is None and rows.truth_noise is None
    rows.values = rows.token_level_rewards.clone()
    assert "eval/knowable" not in common.evaluate(rows, 1.0)


def test_a_critic_without_flags_is_judged_by_true_values(capsys, tmp_path):
    """Its held-out rows have them at each action, and the line of an evaluation tells of them."""
    made = critic_fsdp.CriticWorker(critic_fsdp.Config())
    made.tokenizer = common.char_tokenizer()
    train, held_out = critic_fsdp.load_rows(critic_fsdp.Run(), made)
    assert train.truth is None

    # the chance of a right answer at first, and the reward at the end; a wrong answer with which
    # the right one begins tells nothing
    truth = columns_of(held_out, "truth")
    rewards = [sum(x) for x in columns_of(held_out, "token_level_rewards")]
    assert {round(true[0], 6) for true in truth} == {0.3, 0.8}
    assert all(true[-1] in (reward, true[0]) for true, reward in zip(truth, rewards))
    assert sum(true[-1] == reward for true, reward in zip(truth, rewards)) > 500

    held_out.values = held_out.truth * 0.5
    common.Logger(str(tmp_path / "out"), {}, 0, None).log_evaluation(1, held_out, 1.0)
    line = r"^  knows 0\.750 of what can be known \(0\.754 of returns\), flatness 0\.250 \("
    assert re.search(line, capsys.readouterr().out, flags=re.M)


# ---- Episodes ------------------------------------------------------------------------------------

A = {"prompt": "1+1=", "response": "2", "episode": "a"}
B = {"prompt": "2+2=", "response": "4", "episode": 7}


def texts_of(rows, tokenizer):
    """The text of each row."""
    return [tokenizer.decode(ids) for ids in rows.input_ids.split(rows.lengths)]


def test_rows_of_an_episode_may_stand_anywhere_in_a_file():
    """Episodes in the order of their first lines, and their rows by segment, or as in the file."""
    lines = [
        A | {"segment": 3, "response": "x", "reward": 1.0},
        {"prompt": "3+3=", "response": "6", "reward": 0.5},
        B,
        A | {"segment": 1, "response": "y"},
        B | {"response": "z", "reward": 0.25},
        A | {"segment": 2.5, "response": "w"},
    ]
    tokenizer = a_tokenizer()
    rows = common.read_rows(list(map(json.dumps, lines)), tokenizer)
    ends = ["1+1=y", "1+1=w", "1+1=x", "3+3=6", "2+2=4", "2+2=z"]
    assert texts_of(rows, tokenizer) == [f"{text}<eos>" for text in ends]
    assert rows.row_id.tolist() == [0, 1, 2, 3, 4, 5] and rows.source.tolist() == [3, 5, 0, 1, 2, 4]
    assert rows.episode.tolist() == [0, 0, 0, 3, 4, 4]
    assert rows.token_level_rewards[rows.cu_seqlens[1:] - 1].tolist() == [0, 0, 1, 0.5, 0, 0.25]


def test_episodes_of_two_files_are_not_joined(tmp_path):
    """Dumps of two steps count their episodes from 0."""
    line = json.dumps(B | {"segment": 0, "reward": 1}), json.dumps(B | {"segment": 1})
    for name in "ab":
        (tmp_path / name).write_text("\n".join(line))
    rows = common.read_rows((f"{tmp_path}/a", f"{tmp_path}/b"), a_tokenizer())
    assert rows.episode.tolist() == [0, 0, 2, 2]


def test_only_the_last_segment_of_a_line_is_truncated():
    line = {"segments": [{"prompt": "1+1=", "response": "2"}] * 2, "truncated": True}
    rows = common.read_rows([json.dumps(line | {"reward": 1})], a_tokenizer())
    assert rows.truncated.tolist() == [False, True]
    assert rows.lengths[0] == rows.lengths[1] + 1  # the first one ends with a token that says so


def test_rows_without_episodes_of_several_rows_have_no_column_of_them():
    lines = [A | {"reward": 1}, B | {"reward": 0}, SUM, SUM | {"episode": None}]
    assert common.read_rows(list(map(json.dumps, lines)), a_tokenizer()).episode is None


@pytest.mark.parametrize("lines, words", [
    ([A | {"segment": 2}, SUM, A | {"segment": 2.0}], "toy:3: episode 'a' has two segments 2"),
    ([B | {"segment": 0}] * 2, "toy:2: episode 7 has two segments 0"),
    ([A | {"segment": "2"}], 'toy:1: segment: must be a valid '),
    ([A | {"episode": ["a"]}], "toy:1: episode: must be a valid string"),
    ([{"segments": [], "reward": 1}], "toy:1: segments: must be a list of objects"),
    ([{"segments": [A, 2]}], "toy:1: segments: must be a list of objects"),
    ([{"segments": [A, A | {"reward": 1}], "reward": 1}], "and its last segment; add them up"),
    ([{"segments": [A, {"prompt": "?"}]}], "toy:1: needs exactly one of response, response_ids"),
    ([SUM, B, A | {"reward": 1}, B], "toy:2: no segment of this episode has a reward"),
    ([B | {"reward": 1}, B | {"segment": 1}], "toy:2: episode 7 has segments with and without a"),
    # numbers for each turn or token stand in their segment, and a list has its own order
    ([{"segments": [A, A], "rewards": [0.5, 1]}], "rewards: must stand in each of the segments"),
    ([{"segments": [A], "reward": 1, "truth": [1]}], "truth: must stand in each of the segments"),
    ([{"segments": [A | {"segment": 2}, A | {"segment": 1}], "reward": 1}], "order of their list"),
    # what would be read as something else
    ([SUM | {"segment": 1}], "toy:1: segment: needs an episode"),
    ([A | {"response": None, "responses": ["2", "3"], "rewards": [1, 0]}], "episode: several"),
    ([A | {"response": None, "chosen": "2", "rejected": "3"}], "toy:1: episode: several answers"),
])  # fmt: skip
def test_episodes_that_do_not_fit_are_refused_with_the_line(lines, words):
    with refused(words, begin="toy:"):
        common.read_rows(list(map(json.dumps, lines)), a_tokenizer())


def test_an_episode_may_stand_in_one_line():
    """With what all of its segments have, and a reward of the whole."""
    segments = [
        {"prompt": "1+1=", "response": "2"},
        {"messages": [USER], "response": "3", "reward": 0.5},
        {"prompt": "?", "response": "4"},
    ]
    line = {"segments": segments, "reward": 1.0, "answer": 5}
    tokenizer = a_tokenizer()
    rows = common.read_rows([json.dumps(line)] * 2, tokenizer, hint_key="answer")
    texts = [f"For the critic only: 5\n{x}<eos>" for x in ("1+1=2", "<user>1+1?3", "?4")]
    assert texts_of(rows, tokenizer) == texts * 2
    assert rows.episode.tolist() == [0, 0, 0, 3, 3, 3]
    assert rows.token_level_rewards[rows.cu_seqlens[1:] - 1].tolist() == [0, 0.5, 1] * 2

    # keys that the user names
    named = [{"q": "1+1=", "a": "2", "out": {"score": 0.25}}, {"q": "?", "a": "4"}]
    keys = {"prompt": "q", "response": "a", "reward": "out.score"}
    line = {"segments": named, "out": {"score": 1.0}}
    rows = common.read_rows([json.dumps(line)], tokenizer, keys=keys)
    assert texts_of(rows, tokenizer) == ["1+1=2<eos>", "?4<eos>"]
    assert rows.token_level_rewards[rows.cu_seqlens[1:] - 1].tolist() == [0.25, 1]


def test_scores_stand_next_to_the_lines_of_their_rows(tmp_path):
    """In the file's order, although the rows are in that of their episodes. Of a chat that becomes
    several rows, each segment has its values; a line of segments becomes a line for each."""
    forgets = TURNS.replace("m['content']", "m.content[-1] if loop.revindex0 > 1 else m.content")
    chat = [USER, {"role": "assistant", "content": "a2"}] * 2
    lines = [
        A | {"segment": 2},
        {"messages": chat, "reward": 1.0},
        A | {"segment": 1, "response": "33"},
        {"messages": chat, "reward": 1.0, "episode": "a", "segment": 3},
        {"segments": [{"prompt": x, "response": y} for x, y in ("15", "26")], "reward": 1},
        SUM,
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    tokenizer = a_tokenizer(forgets)
    rows = common.read_rows(str(path), tokenizer)
    rows.values = rows.input_ids.float() * rows.response_mask
    common.write_scores(str(path), str(tmp_path), rows, None, 1.0)

    ids = lambda text: [float(i) for i in tokenizer.encode(text)]
    a, chats, b, more, one, two, last = common.read_lines(tmp_path / "scored.jsonl")
    assert (a["values"], b["values"]) == (ids("2<eos>"), ids("33<eos>"))
    assert chats["segment_values"] == more["segment_values"]
    assert [len(x) for x in chats["segment_values"]] == [3, 3] and "values" not in chats
    assert chats["messages"] == chat and chats["last_value"] == ids("<eos>")[0]
    assert (one["values"], two["values"]) == (ids("5<eos>"), ids("6<eos>"))
    assert last["values"][-1:] == ids("<eos>")

    # and the file is read as the same episodes again
    again = common.read_rows(str(tmp_path / "scored.jsonl"), tokenizer)
    assert again.episode.tolist() == rows.episode.tolist()
    assert torch.equal(again.input_ids, rows.input_ids)


# ---- Batches made by hand ------------------------------------------------------------------------

FAULTS = [  # column, what a user might put there, and words of the answer
    ("input_ids", lambda x: x[None], "of shape (1, "),
    ("input_ids", lambda x: x.tolist(), "not list"),
    ("input_ids", lambda x: x.to("meta"), "on meta"),
    ("response_mask", lambda x: x.int(), "must be a (T,) tensor of torch.bool on the host, not"),
    ("response_mask", lambda x: x[:-1], "has"),
    ("cu_seqlens", lambda x: x[:-1], "must begin at 0, grow, and end at"),
    ("cu_seqlens", lambda x: x + 1, "must begin at 0"),
    ("row_id", lambda x: None, "is missing"),
    ("returns", lambda x: x.to_sparse(), "torch.sparse_coo"),
    ("returns", lambda x: None, "is missing"),
    ("multi_modal_inputs", lambda x: [{}] * 3, "has 3 entries instead of 4"),
    ("episode", lambda x: torch.zeros(4), "must be a (B,) tensor of torch.int64"),
    ("episode", lambda x: torch.tensor([0, 0]), "has 2 entries instead of 4"),
]


def test_a_batch_made_by_hand_is_told_which_column_is_wrong():
    critic = worker()
    batch = random_batch(4, idle=False)
    batch.returns = batch.values.clone()
    critic.set_budget(batch.longest[0], "the longest row")
    critic.update_critic(batch)

    for name, spoil, words in FAULTS:
        spoiled = dataclasses.replace(batch, **{name: spoil(getattr(batch, name))})
        with refused(words, begin=f"{name}: ", kind=ValueError):
            critic.update_critic(spoiled)


@SCRIPTS
def test_rows_without_images_may_say_so_to_a_critic_that_reads_text(script):
    """As verl's rows do, which have an empty dict each."""
    critic = worker(script=script)
    batch = random_batch(2, idle=False)
    critic.set_budget(batch.longest[0], "the longest row")
    values = critic.compute_values(batch)

    for none in ([{}, {}], [None, None]):
        batch.multi_modal_inputs = none
        assert torch.equal(critic.compute_values(batch), values)

    batch.multi_modal_inputs = [{}, {"pixel_values": torch.zeros(1)}]
    with refused("reads text only", begin="multi_modal_inputs: ", kind=ValueError):
        critic.compute_values(batch)


def test_returns_and_the_mean_need_rewards():
    batch = random_batch(4, idle=False)
    batch.token_level_rewards = None
    words = "is missing; it must be a (T,) tensor"
    with refused(words, begin="token_level_rewards: ", kind=ValueError):
        common.add_returns(batch, 1.0, 1.0)
    with refused("is missing", begin="token_level_rewards: ", kind=ValueError):
        worker(value_head_init="mean").start_at_mean(batch, 1.0)


@SCRIPTS
def test_a_worker_without_a_model_says_so(script, tmp_path):
    critic = script.CriticWorker(script.Config())
    batch = random_batch(2)
    calls = (
        partial(critic.compute_values, batch),
        partial(critic.set_budget, 9, "row"),
        partial(critic.start_at_mean, batch, 1.0),
        partial(critic.save_checkpoint, tmp_path / "x"),
        partial(critic.load_checkpoint, tmp_path / "x"),
        partial(critic.export_hf, tmp_path / "x"),
        critic.offload,
    )
    for call in calls:
        with refused("call init_model() first", kind=RuntimeError):
            call()
