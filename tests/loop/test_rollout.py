"""The rollout: an engine against plain transformers, sampling, texts to stop at, environments."""

import json
import math
import random
import re
import types

import pytest
import torch
import transformers
from helpers import random_batch, refused
from ppo_helpers import (
    EOS,
    KINDS,
    SHARP,
    TOKENIZER,
    a_run,
    a_task,
    another_tokenizer,
    assert_close,
    assert_drawn_by_its_numbers,
    assert_drawn_from_the_nucleus,
    assert_greedy,
    assert_never_drawn,
    assert_samples_follow_their_seeds,
    assert_stops,
    batch_of,
    chat_tokenizer,
    engine_of,
    ids_of,
    plain,
    play,
    policy,
    rows_to_stop,
    some_prompts,
    stop_texts_of,
)
from reference import MODELS, log_probs_of_reply, nucleus
from transformers.cache_utils import DynamicLayer

import common
import ppo_loop
from common import UserError
from ppo_loop import Prompt

WINDOW = '{"initializer_range": 0.1, "sliding_window": 6}'  # shorter than the rows
# with a sliding window the cache drops old keys, and left padding shifts the window
ENGINES = dict.fromkeys((*KINDS, "tiny-gpt-oss"), SHARP)
ENGINES |= dict.fromkeys(("tiny-gemma2", "tiny-mistral"), WINDOW)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_rollout_equals_transformers_prompt_by_prompt(kind, monkeypatch):
    """Greedy tokens, and log-probs, also of sampled tokens and of the actor. A row ends only at a
    stop token or at its length limit, and its sample depends on nothing but its seed. Some rows
    have equal prompts; prompts are read in parts, and keys move to larger buffers."""
    monkeypatch.setattr(ppo_loop, "TOKENS_AT_ONCE", {"cpu": 20})
    monkeypatch.setattr(ppo_loop.RoomyLayer, "room", 3)
    monkeypatch.setitem(
        common.TINY, "tiny-gpt-oss", {"num_local_experts": 4, "num_experts_per_tok": 2}
    )
    w = policy(kind, temperature=0.7, override_config=ENGINES[kind])
    lm = plain(w)
    stop = list(range(1, 99, 6))  # one token in six ends a row
    prompts = some_prompts() + some_prompts((6, 1, 12))
    rows = [(prompt, i, 1 + i % 14) for i, prompt in enumerate(prompts)]
    engine = engine_of(w, stop)
    replies = engine.generate(rows, 0.0)
    assert_greedy(replies, lm, rows, stop)
    engine.offload()
    engine.onload()
    assert engine.generate(rows, 0.0) == replies
    assert len({(ended, len(ids) == row[2]) for row, (ids, _, ended) in zip(rows, replies)}) >= 2
    rows = [(prompt, seed, 10) for prompt, seed, _ in rows]
    replies = engine.generate(rows, 0.7)
    batch = batch_of([prompt for prompt, _, _ in rows], replies)
    ours_T = w.compute_log_probs(batch)
    torch.testing.assert_close(ours_T, batch.rollout_log_probs, rtol=1e-4, atol=1e-4)
    for row, (ids, log_probs, _) in zip(rows, replies):
        assert_close(log_probs, log_probs_of_reply(lm, row[0], ids, 0.7))
        assert_drawn_by_its_numbers(row, ids, lm, 0.7)

    assert_samples_follow_their_seeds(engine_of(w, range(1, 99, 12)))
    endless = engine_of(w, ())
    assert all(len(ids) == 10 and not ended for ids, _, ended in endless.generate(rows, 1.0))
    assert endless.generate([], 1.0) == []


def test_a_rollout_reads_a_prompt_once_and_leaves_rows_that_have_ended(monkeypatch):
    """Prompts of like length are read together. For a token, the heads of a group share keys."""
    monkeypatch.setattr(ppo_loop, "TOKENS_AT_ONCE", {"cpu": 24})
    attend = torch.nn.functional.scaled_dot_product_attention
    heads = set()

    def noted(query, key, *args, **options):
        heads.add((query.shape[1], key.shape[1]))
        return attend(query, key, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    engine = engine_of(policy(), stop=())
    shapes = []
    note = lambda model, args, inputs: shapes.append((*inputs["input_ids"].shape, {*heads}))
    engine.model.register_forward_pre_hook(note, with_kwargs=True)

    prompts = 2 * some_prompts((9, 2, 12, 3))
    engine.generate([(prompt, i, 1 + i) for i, prompt in enumerate(prompts)], 1.0)
    read = [shape[:2] for shape in shapes]
    assert read == [(2, 3), (2, 12), *((n, 1) for n in (8, 6, 6, 4, 3, 2, 1))]
    assert heads - shapes[2][2] == {(2, 2)}  # of a token; the model has 4 heads


def test_a_new_token_copies_the_keys_only_where_their_buffer_is_full(monkeypatch):
    monkeypatch.setattr(ppo_loop.RoomyLayer, "room", 4)
    part = DynamicLayer()
    part.update(torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8))
    layer = ppo_loop.RoomyLayer([part], torch.tensor([1, 0, 1]))
    places = []
    for _ in range(11):
        keys, _ = layer.update(torch.randn(3, 2, 1, 8), torch.randn(3, 2, 1, 8))
        places.append(keys.data_ptr())
    assert [places.index(x) for x in dict.fromkeys(places)] == [0, 4, 9]  # the first of each buffer


@pytest.mark.parametrize("tokenizer", [TOKENIZER, "of several letters, or parts of one"])
def test_a_text_ends_a_turn(tokenizer):
    """Whatever its tokens are. What the prompt holds of it does not count, and other rows stay the
    same."""
    if tokenizer != TOKENIZER:
        tokenizer = another_tokenizer()
    known = len(tokenizer)
    w = policy(override_config=json.dumps({"initializer_range": 0.1, "vocab_size": known}))
    rows = rows_to_stop(tokenizer)
    engine, stops = (engine_of(w, known=known, at_once=16) for _ in range(2))
    texts = stop_texts_of(tokenizer, rows, engine.generate(rows, 0.9))
    stops.task = stops.task._replace(
        stop_texts=ppo_loop.stop_texts(a_run(stop=tuple(texts)), tokenizer)
    )
    assert_stops(engine, stops, tokenizer, texts, rows)


def test_a_text_that_the_tokenizer_cannot_write_is_refused():
    assert ppo_loop.stop_texts(a_run(), TOKENIZER) == []
    with refused("--stop a\u00e9: does not fit the tokenizer"):
        ppo_loop.stop_texts(a_run(stop=("b", "a\u00e9")), TOKENIZER)


def test_samples_follow_the_softmax_or_its_nucleus():
    """1,000 evenly spaced random numbers draw each token as often as a loop over the probabilities
    says. So does the engine from the nucleus; for the softmax see the first test."""
    u_B1 = ((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)[:, None]
    for logits_V in torch.tensor([[3.0, 1.0, 2.0, 2.1, -1.0], [0.0, 0.0, 0.0, 0.0, 9.0]]):
        for top_p in (1e-6, 0.3, 0.5, 0.6, 0.9, 0.999):
            logits_BV = logits_V.expand(1000, 5)
            token_B1, log_p_B1 = ppo_loop.draw(logits_BV, u_B1, 0.8, top_p, a_task(known=5))
            expected = nucleus((logits_V / 0.8).log_softmax(0), top_p)
            for i in range(5):
                share = math.exp(expected[i]) if i in expected else 0.0
                assert abs(float((token_B1 == i).double().mean()) - share) <= 1e-3, (top_p, i)
            assert_close(log_p_B1[:, 0].tolist(), [expected[i] for i in token_B1[:, 0].tolist()])

    w = policy()
    rows = [([20, 30, 40], i, 1) for i in range(400)]
    replies = engine_of(w, at_once=400, top_p=0.7).generate(rows, 0.8)
    assert_drawn_from_the_nucleus(replies, plain(w), [20, 30, 40], 0.8, 0.7)


def test_policy_and_environment_take_turns():
    """Tokens, masks and log-probs of two rows, one with an observation, equal those written out
    here."""
    heard = []

    def observe(prompt, response, answer, turns):
        heard.append((prompt, response, answer, *turns))
        return {"ab": "[1]", "ab[1]cd": None, "x": None}[response]

    (a, b), asked = play([["ab", "x"], ["cd"]], observe)
    assert a.ids == [*ids_of("ab"), EOS, *ids_of("[1]cd"), EOS] and b.ids == [*ids_of("x"), EOS]
    assert a.log_probs == [-0.5] * 3 + [None] * 3 + [-0.5] * 3 and b.log_probs == [-0.5] * 2
    told = [(r.finished, r.text, r.fault) for r in (a, b)]
    assert told == [(True, "ab[1]cd", ""), (True, "x", "")]
    assert sorted(heard[:2]) == [("q0=", "ab", "answer 0", "ab"), ("q1=", "x", "answer 1", "x")]
    assert heard[2:] == [("q0=", "ab[1]cd", "answer 0", "ab", "[1]", "cd")]
    first, second, third = (
        random.Random(f"key {x}").getrandbits(63) for x in ("4 0", "6 0", "4 1")
    )
    assert asked == [[("q0=", first, 30), ("q1=", second, 30)], [("q0=ab<eos>[1]", third, 24)]]
    batch = common.check(ppo_loop.to_batch([a, b]))
    mask = [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3 + [True] * 2
    assert batch.response_mask.tolist() == mask
    assert batch.rollout_log_probs.tolist() == [-0.5 if chosen else 0.0 for chosen in mask]
    assert batch.input_ids.tolist() == [*ids_of("q0="), *a.ids, *ids_of("q1="), *b.ids]
    assert batch.lengths == [12, 5]
    assert batch.row_id.tolist() == [4, 6] and batch.truncated.tolist() == [False, False]


@pytest.mark.parametrize("turns, fields, text, finished", [  # finished: not cut off
    ([["abcdef"]], dict(max_response_length=4), "abcd", False),  # the turn itself does not fit
    # the observation leaves no room for a turn
    ([["abc"]], dict(max_response_length=7), "abc", False),
    ([["abc"], ["d..."]], dict(max_response_length=8), "abc[1]d", False),  # it leaves one token
    ([["abc"], ["d"]], dict(max_response_length=9, max_turns=2), "abc[1]d", True),
    ([["a"], ["b"], ["c"]], dict(max_response_length=30, max_turns=3), "a[1]b[1]c", True),
])  # fmt: skip
def test_a_row_ends_at_the_limit_of_tokens_or_turns(turns, fields, text, finished):
    calls = []
    [reply], asked = play(turns, lambda *_: calls.append(1) or "[1]", **fields)
    assert (reply.text, reply.finished, reply.fault, len(asked)) == (text, finished, "", len(turns))
    assert len(calls) == len(turns)  # also after the last one, and one that was cut off
    assert len(reply.ids) == len(reply.log_probs) <= fields["max_response_length"]
    [reply], asked = play(turns, None, **fields)  # without an environment there is one turn
    assert len(asked) == 1 and reply.text == turns[0][0][: fields["max_response_length"]]
    assert None not in reply.log_probs


@pytest.mark.parametrize("turns, fields, expected", [
    ([["ab"], ["cde"]], dict(max_turns=2), {2: 2.0, 8: 3.0}),  # by index of the turns' last tokens
    ([["abcdef"]], dict(max_response_length=4), {3: 4.0}),
])  # fmt: skip
def test_an_environment_rewards_each_turn_also_the_last(turns, fields, expected):
    """Equal answers earn the same, whatever ends them."""
    says = lambda prompt, response: ("[]", len(response.split("]")[-1]))
    [reply], _ = play(turns, says, **fields)
    assert reply.earned == expected and not reply.fault


def test_an_environments_faults_end_the_row_and_are_reported():
    does = [lambda: {}["tool"], lambda: b"no", lambda: None]
    replies, asked = play([list("abc")], lambda prompt, *_: does[int(prompt[1])]())
    assert [reply.text for reply in replies] == list("abc") and len(asked) == 1
    assert all(reply.finished for reply in replies)
    key, kind, none = (reply.fault for reply in replies)
    assert "KeyError: 'tool'" in key and "float: b'no'" in kind and none == ""


def talk(tokenizer, turns, says, row=None, **fields):
    """(the reply of a policy that says these turns to a user's "2+3", and whose environment says
    these things; the text of each of its rows)."""
    row = row or {}
    user = [{"role": "user", "content": "2+3"}]
    begin = common.chat_text(tokenizer, user, tools=row.get("tools"))
    prompt = Prompt(tokenizer.encode(begin), "2+3", "5", user, row=row)
    says = iter(says)
    observe = lambda *_: next(says)
    fields = {"max_response_length": 99} | fields
    [reply], _ = play([[turn] for turn in turns], observe, [prompt], tokenizer, **fields)
    assert reply.fault == "" and not [*says]  # all was heard
    rows = ppo_loop.to_batch([reply]).split(1)
    return reply, [tokenizer.decode(row.input_ids) for row in rows]


@pytest.mark.parametrize("closes", (True, False))
def test_a_chat_with_an_environment_follows_the_template(closes):
    """All tokens of a dialogue of three turns are those of the chat template for its messages,
    whether or not the template begins the text between turns with the token that ended the policy's
    turn."""
    tokenizer = chat_tokenizer("<eos>" if closes else "")
    reply, [text] = talk(tokenizer, ["a?", "b?", "c?"], ["no 1", "no 2", None])
    assert reply.turns == ["a?", "no 1", "b?", "no 2", "c?"]  # without the template's own text
    roles = zip(["user", "assistant"] * 3, ["2+3", *reply.turns])
    chat = [{"role": role, "content": said} for role, said in roles]
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    if not closes:  # the policy ends its turns with a token that is not in the template
        text = text.replace("<eos>", "")

    assert text == whole.removesuffix("\n")
    own = [i for i, x in zip(reply.ids, reply.log_probs) if x is not None]
    assert tokenizer.decode(own) == "a?<eos>b?<eos>c?<eos>"


def prompts_of(batch, tokenizer=TOKENIZER):
    """The text that stands before each row's first action."""
    texts = []
    for row in batch.split(1):
        first = int(row.response_mask.int().argmax())
        texts.append(tokenizer.decode(row.input_ids[:first]))
    return texts


def test_a_new_context_begins_a_new_row_of_the_episode():
    """An environment that compacts: texts, rows, rewards and the hint of each segment equal those
    written out here; the reply that goes on in its row has one row."""

    def observe(prompt, response, answer, turns):
        says = {"ab": ("[1]", 0.5), "ab[1]cd": ({"prompt": "sum:cd="}, 0.25), "x": "[2]"}
        return says.get(response)

    turns = [["ab", "x"], ["cd", "y"], ["ef"]]
    prompts = [Prompt(ids_of(f"q{i}="), f"q{i}=", row={"hint": i}, critic_ids=[9]) for i in (0, 1)]
    (a, b), asked = play(turns, observe, prompts, privileged_key="hint")
    assert a.turns == ["ab", "[1]", "cd", "sum:cd=", "ef"] and a.text == "ab[1]cdsum:cd=ef"
    assert [text for text, _, _ in asked[2]] == ["sum:cd="] and b.contexts == []
    assert asked[2][0][1] == random.Random("key 4 2").getrandbits(63)

    # rows: the reply of two segments has two, with numbers that follow each other
    batch = common.check(ppo_loop.to_batch([a, b]))
    assert batch.row_id.tolist() == [8, 9, 12] and batch.episode.tolist() == [8, 8, 12]
    assert prompts_of(batch) == ["q0=", "sum:cd=", "q1="]
    rows = [TOKENIZER.decode(row.input_ids) for row in batch.split(1)]
    assert rows == ["q0=ab<eos>[1]cd<eos>", "sum:cd=ef<eos>", "q1=x<eos>[2]y<eos>"]
    assert batch.actions.tolist() == [6, 3, 4] and not batch.truncated.any()

    # rewards: of the turns, and of the whole at the end of the last segment
    ppo_loop.give_credit(a, 4.0)
    earned = ppo_loop.rewards_of([a, b])
    places = earned.nonzero()[:, 0].tolist()
    ends = [row.input_ids.tolist().index(EOS) for row in batch.split(1)]
    assert places == [ends[0], batch.cu_seqlens[1] - 1, batch.cu_seqlens[2] - 1]
    assert earned[places].tolist() == [0.5, 0.25, 4.0]

    # the critic reads the hint before each prompt
    seen = ppo_loop.to_batch([a], hints=True)
    assert seen.input_ids[0] == 9 and seen.episode.tolist() == [8, 8]
    assert prompts_of(seen)[1] == "For the critic only: 0\nsum:cd="

    # one list of a reward is for all turns, or all tokens, of the episode
    assert ppo_loop.fault_of_reward([1.0] * 3, a) == ""
    assert ppo_loop.fault_of_reward([1.0] * len(a.ids), a) == ""
    assert "for 3 turns and 12 tokens" in ppo_loop.fault_of_reward([1.0] * 4, a)


def test_messages_are_a_new_context_of_a_chat():
    other = [{"role": "system", "content": "s"}, {"role": "user", "content": "go on\ud800"}]
    says = [{"messages": other}, {"prompt": "alone"}, {"role": "tool", "content": "7"}, None]
    reply, rows = talk(chat_tokenizer(), "abcd", says, chat=True)
    assert reply.turns == ["a", "go on?", "b", "alone", "c", "7", "d"]
    assert rows == [
        "<user>2+3<eos>\n<assistant>a<eos>",
        "<system>s<eos>\n<user>go on?<eos>\n<assistant>b<eos>",
        "<user>alone<eos>\n<assistant>c<eos>\n<tool>7<eos>\n<assistant>d<eos>",
    ]


def test_a_new_context_may_have_other_tools():
    """As a sub-agent's. They stay as long as the context; the first ones are the row's."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ tools | length if tools else 0 }}" + tokenizer.chat_template
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    more = {"messages": [{"role": "user", "content": "b"}], "tools": [tool] * 2}
    _, rows = talk(tokenizer, "xyz", [more, "c", None], row={"tools": [tool]})
    assert rows == [
        "1<user>2+3<eos>\n<assistant>x<eos>",
        "2<user>b<eos>\n<assistant>y<eos>\n<user>c<eos>\n<assistant>z<eos>",
    ]


# thoughts are dropped from all turns before the last user message, as by Qwen3's template
DROPS = """{% set ns = namespace(last=0) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<{{ m.role }}>
{%- if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last -%}
{{ m.content.split('</think>')[1] }}{% else %}{{ m.content }}{% endif %}<eos>
{% endfor %}{% if add_generation_prompt %}<assistant>BEGUN{% endif %}"""


@pytest.mark.parametrize("begun", ("", "<think>"))
def test_a_turn_whose_prompt_rewrites_earlier_ones_begins_a_new_row(begun):
    """A template that drops thoughts: each row's prompt is the template's text of the messages
    before it, and what was sampled stays as it was. A tool's result drops nothing, so the row goes
    on. The template may begin the thought itself, and a user may say nothing."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = DROPS.replace("BEGUN", begun)
    opens = "" if begun else "<think>"
    turns = [f"{opens}a</think>add", f"{opens}b</think>5", f"{opens}c</think>so"]
    says = [{"role": "tool", "content": "5"}, "", None]
    reply, [first, second] = talk(tokenizer, turns, says)
    batch = ppo_loop.to_batch([reply])
    before = "<user>2+3<eos>\n<assistant>add<eos>\n<tool>5<eos>\n<assistant>5<eos>\n<user><eos>\n"
    assert prompts_of(batch, tokenizer)[1] == f"{before}<assistant>{begun}"
    if begun:  # the template shows this beginning only as a part of a turn
        first = first.replace("<assistant><think>", "<assistant>")
        second = second.replace("<assistant><think>", "<assistant>")
    expected = f"<user>2+3<eos>\n<assistant>{opens}a</think>add<eos>\n<tool>5<eos>\n"
    assert first == f"{expected}<assistant>{opens}b</think>5<eos>"
    assert second.endswith(f"<assistant>{opens}c</think>so<eos>")
    acting = tokenizer.decode(batch.input_ids[batch.response_mask])
    assert acting == "".join(f"{said}<eos>" for said in turns)


@pytest.mark.parametrize("longest, rooms, finished", [
    (9, [6, 2], True),  # the context of seven letters leaves two, of which its answer needs two
    (8, [5, 1], False),  # it leaves one
    (7, [4], False),  # it leaves none, so there is no turn
])  # fmt: skip
def test_a_row_with_a_new_context_is_as_long_as_others_at_most(longest, rooms, finished):
    says = iter(({"prompt": "context"}, None))
    fields = {"task": {"longest": longest}, "max_response_length": longest - 3}
    [reply], asked = play([["ab"], ["c"]], lambda *_: next(says), **fields)
    assert [most for [(_, _, most)] in asked] == rooms
    assert (reply.fault, reply.finished) == ("", finished)
    batch = common.check(ppo_loop.to_batch([reply]))
    assert max(batch.lengths) <= longest
    assert batch.truncated.tolist() == [False] * (len(rooms) - 1) + [not finished]


@pytest.mark.parametrize("made, words", [
    ({"messages": []}, "an environment's {'messages': '[]'}"),
    ({"messages": "text", "role": "user"}, "goes with prompts that are chats"),
    ({"messages": [{"role": "user"}]}, "message 1: needs content"),
    ({"prompt": ""}, "must be text and not empty"), ({"prompt": 5}, "not {'prompt': 5.0}"),
    ({"role": "tool", "content": "5"}, "goes with prompts that are chats"),
    ({"role": 5}, "must return text, a message"), ({"text": "a"}, "not {'text': 'a'}"),
])  # fmt: skip
def test_faults_of_a_new_context_are_those_of_its_row(made, words):
    [reply], asked = play([["ab"]], lambda *_: made)
    assert words in reply.fault and len(asked) == 1 and reply.contexts == []


@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-3), (torch.bfloat16, 0.5)])
def test_an_engine_that_is_off_the_actor_ends_the_run(dtype, most):
    batch = random_batch(8)
    batch.old_log_probs = batch.ref_log_probs = batch.values
    batch.rollout_log_probs = batch.values - 0.9 * most * batch.response_mask
    ppo_loop.rollout_metrics(batch, a_run(), dtype)
    for off in (1.1 * most, math.nan):
        batch.rollout_log_probs = batch.values - off * batch.response_mask
        with pytest.raises(
            UserError, match="^--actor.model tiny-qwen2: the rollout is off the actor by"
        ):
            ppo_loop.rollout_metrics(batch, a_run(), dtype)


def test_ids_without_a_token_are_never_drawn_and_have_no_probability(whole_run, tmp_path):
    """A model has more ids than its tokenizer, like Qwen's. Engine, actor and transformers agree on
    the log-probs of the others, and a critic without the extra ids works."""
    w = policy(override_config='{"initializer_range": 0.1, "vocab_size": 150}')
    w.model.task = w.model.task._replace(known=99)
    engine = engine_of(w, at_once=400, known=99)
    rows = [([20, 30, 40], i, 4) for i in range(400)]
    replies = engine.generate(rows, 1.0)
    assert_never_drawn(range(99, 150), replies, w, plain(w), 0.15)
    assert max(i for ids, _, _ in engine.generate(rows[:1], 0.0) for i in ids) < 99
    flags = '--actor.override-config {"initializer_range":0.1,"vocab_size":150}'
    flags += " --critic.model tiny-qwen2"
    whole_run(f"{flags} --top-p 0.9 --temperature 1.3 --kl-coef 0.1")
    for step in (1, 2):
        rows = common.read_lines(tmp_path / f"out/rollouts/step_{step}.jsonl")
        assert max(i for row in rows for i in row["response_ids"]) < 99


def test_a_router_adds_no_noise_while_it_generates(tmp_path):
    """A Mixtral with jitter, which acts while a model trains: engine and actor agree."""
    config = MODELS["mixtral"]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    w = policy(tmp_path, override_config='{"router_jitter_noise": 0.3}')
    replies = engine_of(w).generate([([20, 30, 40], i, 8) for i in range(9)], 1.0)
    batch = batch_of([[20, 30, 40]] * 9, replies)
    log_probs_T = w.compute_log_probs(batch)
    torch.testing.assert_close(log_probs_T, batch.rollout_log_probs, rtol=1e-5, atol=1e-5)


def test_ids_of_images_are_never_drawn_and_have_no_probability():
    """The config names them; entropies and gradients stay finite."""
    names = {"image_token_id": 50, "video_token_index": 60, "mm_tokens_per_image": 70}
    config = types.SimpleNamespace(**names, boi_token_id=98, audio_token_id=99, eos_token_id=1)
    ids = ppo_loop.media_ids(config, 99)
    assert ids == [50, 60, 98]

    w = policy(entropy_coeff=0.1)
    w.model.task = w.model.task._replace(media_ids=ids)
    engine = engine_of(w, at_once=400)
    engine.task = w.model.task._replace(stop_ids=[EOS])
    replies = engine.generate([([20, 30, 40], i, 4) for i in range(400)], 1.0)
    assert_never_drawn(ids, replies, w, plain(w), 0.01)

    micro = w.critic.micro_batch(batch_of([[20, 30, 40]] * 400, replies))
    _, entropy_T = w.critic.forward(micro).unbind(1)
    entropy_T.sum().backward()
    gradients = [p.grad.full_tensor() for p in w.model.parameters()]
    assert entropy_T.max() > 1 and all(g.isfinite().all() for g in gradients)


def test_a_rollout_shows_how_far_it_is(terminal):
    """If it ends early, the rest counts as done."""
    engine_of(policy(), at_once=2).generate([([20, 30], 0, 5), ([20], 1, 7), ([40], 2, 4)], 0.0)
    shown = re.findall(r"rollout: +\d+%\|.*?\| (\d+)/(\d+) ", terminal.getvalue())
    assert shown[-1] == ("11", "11")
