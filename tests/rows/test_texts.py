"""Text in its place: the ids that a critic reads are those that the policy read and wrote."""

import itertools
import json
from datetime import datetime
from functools import partial

import huggingface_hub
import pytest
import shapes
import tokenizers
from helpers import refused
from ppo_helpers import a_run, a_task, prompts_in
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

import common
import critic_fsdp
import ppo_loop

GOOD = {"response": "4", "reward": 1.0}
USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}

# ---- Tokenizers of many kinds --------------------------------------------------------------------

WORDS = "▁2 ▁4 44 == ▁is no \n\n ▁F or".split(" ")
LETTERS = [chr(i) for i in range(33, 127)] + ["▁", "\n", " "]


def sentence_piece(kind):
    """A tokenizer that puts a blank before a text: as Metaspace does ("first", "always"), or as
    Llama 2's normalizer ("legacy")."""
    pieces = ["<unk>", "<s>", "</s>", *LETTERS, *WORDS]
    merges = [(word[0], word[1]) for word in WORDS if len(word) == 2] + [("▁i", "s")]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, "▁i"]))}
    merges.insert(0, ("▁", "i"))
    core = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    if kind == "legacy":
        blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        core.normalizer = normalizers.Sequence(blanks)
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    strip = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(strip)
    return finished(core)


def bytes_level(add_prefix_space):
    """A byte-level tokenizer, such as GPT-2's or RoBERTa's."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    merges = [("Ġ", "4"), ("4", "4"), ("=", "="), ("Ċ", "Ċ"), ("Ġ", "2")]
    pieces = ["<s>", "</s>", *sorted(alphabet), *map("".join, merges)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    core.decoder = decoders.ByteLevel()
    return finished(core)


def finished(core):
    """A tokenizer of transformers with a BOS before each text."""
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


KINDS = {kind: sentence_piece(kind) for kind in ("first", "always", "legacy")}
KINDS |= {"bytes": bytes_level(False), "bytes, a blank first": bytes_level(True)}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def ids_of_row(tokenizer, **row):
    """A row's ids as the critic reads them."""
    options = row.pop("options", {})
    return common.read_rows([json.dumps({"reward": 1.0} | row)], tokenizer, **options)


@EACH_KIND
@pytest.mark.parametrize("prompt, response", [
    ("2+2=", "4"), ("2+2=", " 4"), ("2 + 2 =", " 4 is"), ("x\n", "4"), ("is", "44"), ("a", "\n4"),
    ("2</s>", "4"),  # where some put a blank before what follows, too
])  # fmt: skip
def test_a_response_has_the_ids_of_the_joined_text(kind, prompt, response):
    tokenizer = KINDS[kind]
    joined = [*tokenizer.encode(prompt + response), tokenizer.eos_token_id]
    assert joined[: len(tokenizer.encode(prompt))] == tokenizer.encode(prompt)

    rows = ids_of_row(tokenizer, prompt=prompt, response=response)
    assert rows.input_ids.tolist() == joined
    rows = ids_of_row(tokenizer, prompt_ids=tokenizer.encode(prompt), response=response)
    assert rows.input_ids.tolist() == joined


@EACH_KIND
@pytest.mark.parametrize("prompt, response", [("4", "4"), ("2+2=", "=4"), ("a\n", "\n4")])
def test_a_token_never_reaches_over_both(kind, prompt, response):
    """44, == and an empty line are tokens, but the policy has read the prompt's own ones."""
    tokenizer = KINDS[kind]
    letters = list(response.replace("\n", "Ċ") if kind.startswith("bytes") else response)
    expected = tokenizer.encode(prompt) + tokenizer.convert_tokens_to_ids(letters)
    rows = ids_of_row(tokenizer, prompt=prompt, response=response)
    assert rows.input_ids.tolist() == [*expected, tokenizer.eos_token_id]


@EACH_KIND
@pytest.mark.parametrize("end", ["", " ", "\n", "\n\n", " \n"])
def test_the_value_of_a_step_has_read_all_of_it_and_nothing_behind_it(kind, end):
    """A value is read before its token, which here begins behind the step's last letter."""
    tokenizer = KINDS[kind]
    steps = [f"2+2 is 4{end}", f"44 is no 4{end}", f"2 is 2{end}"]
    row = shapes.labelled("2+2=", steps, [1, 0, 1])
    rows = ids_of_row(tokenizer, **row, reward=None)
    ids = rows.input_ids.tolist()
    read = [tokenizer.decode(ids[1:t]) for t in rows.response_mask.nonzero()[:, 0].tolist()]
    steps = [step.strip() for step in steps]
    texts = ["2+2=" + "\n".join(steps[: n + 1]) for n in range(3)]
    assert [text.replace(" ", "") for text in read] == [text.replace(" ", "") for text in texts]
    assert rows.token_level_rewards[rows.response_mask].tolist() == [1, 0, 1]


@EACH_KIND
def test_a_hint_and_its_prompt_have_the_ids_of_the_joined_text(kind):
    tokenizer = KINDS[kind]
    joined = tokenizer.encode("For the critic only: 4\n2+2=")
    row = {"prompt": "2+2=", "response": "4", "answer": 4}
    rows = ids_of_row(tokenizer, **row, options={"hint_key": "answer"})
    assert rows.input_ids.tolist()[: len(joined)] == joined

    (prompt,) = prompts_in([json.dumps(row)], tokenizer, privileged_key="answer")
    assert prompt.critic_ids == joined and prompt.ids == tokenizer.encode("2+2=")


@EACH_KIND
def test_a_reply_has_the_text_of_the_joined_ids(kind):
    """Also where the policy begins with a blank."""
    tokenizer = KINDS[kind]
    before = tokenizer.encode("2+2=")
    for text in (" 4", "4", "\n4"):
        ids = tokenizer.encode("2+2=" + text)[len(before) :]
        assert common.decode_behind(tokenizer, before, ids) == text


def test_blanks_that_a_special_token_would_swallow_stay():
    core = common.char_tokenizer().backend_tokenizer
    core.add_special_tokens([tokenizers.AddedToken("<|a|>", rstrip=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    assert read(tokenizer, prompt="<|a|>", response="\n\n4") == r"'<|a|>' -> '\n\n4<eos>'"


@EACH_KIND
def test_an_observation_has_the_ids_of_the_joined_text(kind):
    """The policy reads what an environment says right behind its own turn."""
    tokenizer = KINDS[kind]
    task = a_task(tokenizer=tokenizer, observe=lambda *_: "no: 4")
    prompt = ppo_loop.Prompt(tokenizer.encode("2+2="), "2+2=")
    turn = tokenizer.encode("2+2=44")[len(prompt.ids) :]
    reply = ppo_loop.Reply(prompt, 0, list(turn), [0.0] * len(turn), finished=True, text="44")
    ppo_loop.listen([reply], task, a_run(max_response_length=99))
    assert prompt.ids + reply.ids == tokenizer.encode("2+2=44no: 4")


# ---- Chats ---------------------------------------------------------------------------------------

BEGIN = "{% if add_generation_prompt %}<|a|>{% endif %}"
# each message is <|u|>...<|end|>, where the assistant's begins with <|a|>
PLAIN = "{% for m in messages %}<|{{ m.role[0] }}|>{{ m.content or '' }}CALLS<|end|>\n{% endfor %}"
SHOWN = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} ARGUMENTS]{% endfor %}"
OBJECTS = PLAIN.replace("CALLS", SHOWN.replace("ARGUMENTS", "{{ c.function.arguments|tojson }}"))
TEXTS = PLAIN.replace("CALLS", SHOWN.replace("ARGUMENTS", "{{ '' + c.function.arguments }}"))
PRINTS = PLAIN.replace("CALLS", SHOWN.replace("ARGUMENTS", "{{ c.function.arguments }}"))
FUNCTIONS = OBJECTS.replace("c.function.arguments|tojson", "c.function.arguments.items()|list")
STRICT = PLAIN.replace(  # as Llama 3's, which looks whether there is such a key
    "CALLS", "{% if 'tool_calls' in m %}[{{ m.tool_calls[0].function.name }}]{% endif %}"
)
PLAIN = PLAIN.replace("CALLS", "")
TRIMS = PLAIN.replace("m.content or ''", "m.content|trim")
FORGETS = PLAIN.replace(  # as Qwen3's, which leaves out thoughts of all turns but the last
    "m.content or ''",
    "m.content if loop.last or '</think>' not in m.content else m.content.split('</think>')[1]",
)
EMPTY = PLAIN.replace(  # and begins a last turn with an empty thought
    "{{ m.content",
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content",
)
OPENS = "<|a|><think>\n"  # as Qwen3.5's and DeepSeek R1's, which begin a thought for the policy


def chat_tokenizer(template, begin="<|a|>"):
    """Characters as tokens, in this chat template, whose turns end with <|end|>."""
    core = common.char_tokenizer().backend_tokenizer
    core.add_special_tokens(["<|u|>", "<|a|>", "<|t|>", "<|s|>", "<|end|>", "<think>", "</think>"])
    template += BEGIN.replace("<|a|>", begin)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", chat_template=template
    )


def read(tokenizer, **row):
    """A row as the start shows it: what the policy wrote stands behind ->."""
    rows = ids_of_row(tokenizer, **row)
    return common.row_as_read(rows.input_ids.tolist(), rows.response_mask.tolist(), tokenizer)


def call(arguments, **more):
    """A message that calls a tool."""
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]} | more


RESULT = {"role": "tool", "content": "4"}
FORMS = {"object": {"x": 1, "y": "é"}, "text": '{"x": 1, "y": "é"}'}


@pytest.mark.parametrize("arguments", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("template", [OBJECTS, TEXTS, PRINTS], ids=["objects", "texts", "prints"])
def test_arguments_of_a_call_are_shown_once_as_json(template, arguments):
    """Objects, or as OpenAI writes them, to templates of each kind: encoded as JSON (Qwen, Llama),
    joined to text (DeepSeek), or printed."""
    chat = [USER, call(arguments), RESULT]
    shown = json.dumps({"x": 1, "y": "é"}, ensure_ascii=False)
    expected = f"<|u|>2+2?<|end|>\n<|a|>[add {shown}]<|end|>\n<|t|>4<|end|>\n<|a|>"

    assert common.chat_text(chat_tokenizer(template), common.text_messages(chat)) == expected


def test_arguments_that_are_no_object_stay_as_they_are():
    said = read(chat_tokenizer(PRINTS), messages=[USER, call("x=1"), RESULT, ANSWER])
    assert "'[add x=1]<|end|>'" in said


@pytest.mark.parametrize("tools", [[{"name": "add"}], json.dumps([{"name": "add"}])])
def test_tools_may_be_json_text(tools):
    tokenizer = chat_tokenizer("{% for t in tools %}[{{ t.name }}]{% endfor %}" + PLAIN)
    said = read(tokenizer, messages=[USER], tools=tools, **GOOD)
    assert said == r"'[add]<|u|>2+2?<|end|>\n<|a|>' -> '4<|end|>'"

    (prompt,) = prompts_in([json.dumps({"prompt": [USER], "tools": tools})], tokenizer)
    assert tokenizer.decode(prompt.ids) == "[add]<|u|>2+2?<|end|>\n<|a|>"


def test_nulls_that_a_data_set_fills_in_are_dropped():
    """But an argument that is null is one, and content that is null next to a call stays."""
    empty = {"tool_calls": None, "name": None, "function_call": None}
    chat = [USER | empty, call({"x": None}, content=None), RESULT | empty]
    chat[1]["tool_calls"][0] |= {"index": None}
    chat[1]["tool_calls"][0]["function"] |= {"description": None}
    said = read(chat_tokenizer(STRICT), messages=chat, **GOOD)
    assert said.startswith(r"'<|u|>2+2?<|end|>\n<|a|>[add]<|end|>\n<|t|>4<|end|>\n<|a|>'")

    keys = "{% for m in messages %}{{ m.keys()|list }}CALLS{% endfor %}".replace(
        "CALLS",
        "{% for c in m.tool_calls %}{{ c.keys()|list }}{{ c.function.keys()|list }}"
        "{{ c.function.arguments|tojson }}{% endfor %}",
    )
    shown = common.chat_text(chat_tokenizer(keys), common.text_messages(chat), complete=True)
    assert "['role', 'tool_calls', 'content']['type', 'function']['name', 'arguments']" in shown
    assert shown.endswith("{\"x\": null}['role', 'content']")


# ---- Turns of a chat -----------------------------------------------------------------------------

AGENT = [
    {"role": "system", "content": "add"},
    USER,
    call({"x": 2}, content="I add."),
    RESULT,
    call({"x": 3}, content=""),
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]
PROMPT = r"'<|s|>add<|end|>\n<|u|>2+2?<|end|>\n<|a|>'"
FIRST = r"""-> 'I add.[add {"x": 2}]<|end|>' <- '\n<|t|>4<|end|>\n<|a|>'"""
SECOND = r"""-> '[add {"x": 3}]<|end|>' <- '\n<|t|>5<|end|>\n<|a|>'"""
LAST = "-> 'It is 5.<|end|>'"


def test_every_turn_of_an_agent_is_an_action():
    tokenizer = chat_tokenizer(OBJECTS)
    expected = f"{PROMPT} {FIRST} {SECOND} {LAST}"
    assert read(tokenizer, messages=AGENT) == expected
    assert read(tokenizer, prompt=AGENT[:2], completion=AGENT[2:]) == expected
    assert read(tokenizer, messages=AGENT[:2], response=AGENT[2:]) == expected

    # the ids are those of the whole chat, without what follows the last turn
    whole = tokenizer.apply_chat_template(AGENT, tokenize=False).removesuffix("\n")
    ids = tokenizer.encode(whole, add_special_tokens=False)
    assert ids_of_row(tokenizer, messages=AGENT).input_ids.tolist() == ids


def test_a_prompts_own_turns_are_no_actions():
    """Of a few examples, for instance, before a completion."""
    said = read(chat_tokenizer(OBJECTS), prompt=AGENT[:4], completion=AGENT[4:])
    assert said == f"{PROMPT} {FIRST} {SECOND} {LAST}".replace("->", "", 1).replace(
        r"<|a|>'  'I", "<|a|>I"
    ).replace(r"<|end|>' <- '\n<|t|>4", r"<|end|>\n<|t|>4")


@pytest.mark.parametrize("row", [
    {"messages": AGENT}, {"prompt": AGENT[:2], "completion": AGENT[2:]}, {"prompt": AGENT},
])  # fmt: skip
def test_last_turn_only_reads_earlier_turns_as_the_prompt(row):
    said = read(chat_tokenizer(OBJECTS), **row, options={"last_turn_only": True})
    assert said.count("->") == 1 and said.endswith(rf"<|t|>5<|end|>\n<|a|>' {LAST}")


def test_a_chat_may_end_with_the_result_of_a_call():
    tokenizer = chat_tokenizer(OBJECTS)
    assert read(tokenizer, messages=AGENT[:4]) == f"{PROMPT} {FIRST}".partition(" <-")[0]
    assert ids_of_row(tokenizer, messages=AGENT[:4]).token_level_rewards[-1] == 1.0

    cut_off = read(tokenizer, messages=AGENT, truncated=True)
    assert cut_off == f"{PROMPT} {FIRST} {SECOND} -> 'It is 5.'"


def test_a_greeting_at_the_start_is_no_answer():
    said = read(chat_tokenizer(PLAIN), messages=[ANSWER, USER, ANSWER])
    assert said == r"'<|a|>4<|end|>\n<|u|>2+2?<|end|>\n<|a|>' -> '4<|end|>'"
    system = {"role": "system", "content": "add"}
    assert read(chat_tokenizer(PLAIN), messages=[system, ANSWER, USER, ANSWER]).count("->") == 1


def test_a_call_that_ends_with_a_token_of_its_own_gets_no_second_end():
    """As gpt-oss's, where no config names it as an EOS."""
    said = read(chat_tokenizer(OBJECTS.replace("<|end|>", "<|t|>")), messages=[USER, call({})])
    assert said.endswith("-> '[add {}]<|t|>'")


HEADER = PLAIN.replace("{{ m.content", "{% if m.role == 'assistant' %}<|s|>{% endif %}{{ m.content")
LLAMA2 = PLAIN.replace("{{ m.content", "{{ ' ' if m.role == 'assistant' }}{{ m.content")
NEXT = "{% for m in messages %}<|{{ m.role[0] }}|>{{ m.content }}{% endfor %}"  # as GLM's


@pytest.mark.parametrize("template, ends, turn, last", [
    (HEADER, (), "<|s|>4<|end|>", "<|s|>4<|end|>"),  # as gpt-oss writes the name of a channel
    (LLAMA2, (), " 4<|end|>", " 4<|end|>"),
    (NEXT, ("<|u|>",), "4<|u|>", "4<|end|>"),  # the next role's token ends a turn
    (NEXT, (), "4", "4<|end|>"),
])  # fmt: skip
def test_a_last_turn_is_read_as_earlier_ones(template, ends, turn, last):
    tokenizer = chat_tokenizer(template)
    ids = tokenizer.convert_tokens_to_ids(["<|end|>", *ends])
    lines = [json.dumps({"messages": [USER, ANSWER, USER, ANSWER], "reward": 1.0})]
    rows = common.read_rows(lines, tokenizer, Qwen2Config(eos_token_id=ids))
    acts = rows.response_mask.tolist()
    groups = itertools.groupby(zip(acts, rows.input_ids.tolist()), lambda pair: pair[0])
    turns = [tokenizer.decode([i for _, i in same]) for acting, same in groups if acting]
    assert turns == [turn, last]


def test_words_of_others_that_look_like_a_call_change_nothing():
    words = str({"x": 1})
    chat = [USER | {"content": words}, call({"x": 1}), RESULT | {"content": words}]
    shown = common.chat_text(chat_tokenizer(OBJECTS), chat)
    assert shown == f'<|u|>{words}<|end|>\n<|a|>[add {{"x": 1}}]<|end|>\n<|t|>{words}<|end|>\n<|a|>'


def test_an_empty_list_of_calls_is_none():
    said = read(chat_tokenizer(STRICT), messages=[USER, ANSWER | {"tool_calls": []}])
    assert said == r"'<|u|>2+2?<|end|>\n<|a|>' -> '4<|end|>'"


def test_a_turn_may_say_again_what_its_thought_says():
    thinks = PLAIN.replace("{{ m.content", "{{ m.thinking }}{{ m.content")
    said = read(chat_tokenizer(thinks), messages=[USER, ANSWER | {"thinking": "4 is it"}])
    assert said.endswith("-> '4 is it4<|end|>'")


def test_a_question_at_the_end_is_no_answer():
    with refused("needs exactly one of response, response_ids, completion; has none"):
        read(chat_tokenizer(PLAIN), messages=[USER, ANSWER, USER])


def test_rewards_may_be_one_for_each_turn():
    tokenizer = chat_tokenizer(OBJECTS)
    rows = ids_of_row(tokenizer, messages=AGENT, rewards=[0.25, 0.5, 1.0], reward=None)
    expected = [0.0] * len(rows.input_ids)
    ends = [i for i, x in enumerate(rows.input_ids.tolist()) if x == tokenizer.eos_token_id]
    for place, reward in zip((ends[2], ends[4], ends[6]), (0.25, 0.5, 1.0)):
        expected[place] = reward
    assert rows.token_level_rewards.tolist() == expected


THOUGHT = {"role": "assistant", "content": "<think>a</think>4"}


def test_the_empty_thought_of_a_last_turn_is_no_rewriting():
    said = read(chat_tokenizer(EMPTY), messages=[USER, ANSWER, USER, ANSWER])
    assert said == (
        r"'<|u|>2+2?<|end|>\n<|a|>' -> '4<|end|>' <- '\n<|u|>2+2?<|end|>\n<|a|>' -> '4<|end|>'"
    )


@pytest.mark.parametrize("message, key", [
    (call({"x": 1}, content="I add."), "tool_calls"),
    (ANSWER | {"reasoning_content": "2 and 2"}, "reasoning_content"),
    (ANSWER | {"thinking": "2 and 2"}, "thinking"),
])  # fmt: skip
@pytest.mark.parametrize("more", [[], [RESULT, ANSWER]])
def test_what_a_template_leaves_out_of_a_turn_is_refused(message, key, more):
    with refused(f"message 2: the chat template leaves out its {key}; give response_ids"):
        read(chat_tokenizer(PLAIN), messages=[USER, message, *more])


# ---- Segments of a chat --------------------------------------------------------------------------

ASKED = (  # where the last question stands
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
)
SPLIT = (  # the text of an answer, and its thought, which may stand in its content
    "{% set says = m.content or '' %}{% set thinks = m.reasoning_content or '' %}"
    "{% if '</think>' in says %}"
    "{% set thinks = says.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set says = says.split('</think>')[1].lstrip() %}{% endif %}"
)
LATEST = ASKED + OBJECTS.replace("<|{{", SPLIT + "<|{{").replace(  # as Qwen3.5's
    "{{ m.content or '' }}",
    "{% if m.role == 'assistant' and loop.index0 > ns.asked %}"
    "<think>\n{{ thinks }}\n</think>\n\n{% endif %}{{ says }}",
)
CUTS = PLAIN.replace("m.content or ''", "(m.content or '').split('</think>')[-1]")  # as R1's
ANSWERED = ASKED.replace("m.role == 'user'", "m.role == 'assistant' and not m.tool_calls")
CHANNELS = ANSWERED + OBJECTS.replace(  # as gpt-oss's, where an answer hides the thoughts before it
    "{{ m.content or '' }}",
    "{% if m.tool_calls and loop.index0 > ns.asked %}{{ m.thinking }}{% endif %}"
    "{% if m.role == 'assistant' and not m.tool_calls %}<|s|>{% endif %}{{ m.content or '' }}",
)


def turns_of(tokenizer, chat):
    """([(all that stands before a turn in its row, what the policy wrote), ...], and how many of
    these each row has)."""
    turns = []
    counts = []
    for row in ids_of_row(tokenizer, messages=chat).split(1):
        ids = row.input_ids.tolist()
        acts = [*row.response_mask.tolist(), False]
        starts = [t for t, acting in enumerate(acts) if acting and not acts[t - 1]]
        ends = [acts.index(False, start) for start in starts]
        spans = zip(starts, ends)
        turns += [(tokenizer.decode(ids[:i]), tokenizer.decode(ids[i:j])) for i, j in spans]
        counts.append(len(starts))
    return turns, counts


def prompts_of(tokenizer, chat):
    """What the template itself shows before each turn of the assistant."""
    places = [n for n, message in enumerate(chat) if message["role"] == "assistant"]
    show = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
    return [show(chat[:n]) for n in places]


def behind(prompts, texts):
    """[(prompt, what the policy writes behind it), ...]: it writes no thought's begin again."""
    texts = [x.removeprefix("<think>\n") if p.endswith("<think>\n") else x for p, x in
             zip(prompts, texts)]  # fmt: skip
    return list(zip(prompts, texts))


@pytest.mark.parametrize("begin", ["<|a|>", OPENS], ids=["thinks", "thought begun"])
@pytest.mark.parametrize("key", ["reasoning_content", "content"])
def test_thoughts_that_a_next_question_drops(begin, key):
    """Those of an agent: calls and results go on in a row, and a question begins a segment."""
    answers = [call({"x": 2}, content="I add."), call({"x": 3}, content=""), ANSWER, ANSWER]
    for i, answer in enumerate(answers):
        thought = f"<think>\nt{i}\n</think>\n\n{answer['content']}"
        answers[i] = answer | {key: f"t{i}" if key == "reasoning_content" else thought}
    chat = [USER, answers[0], RESULT, answers[1], RESULT, answers[2], USER, answers[3]]

    tokenizer = chat_tokenizer(LATEST, begin)
    says = ['I add.[add {"x": 2}]', '[add {"x": 3}]', "4", "4"]
    texts = [f"<think>\nt{i}\n</think>\n\n{text}<|end|>" for i, text in enumerate(says)]
    expected = behind(prompts_of(tokenizer, chat), texts)
    assert turns_of(tokenizer, chat) == (expected, [3, 1])


@pytest.mark.parametrize("template, counts", [
    (LATEST, [1, 1, 1]), (CUTS, [1, 1, 1]), (FORGETS, [1, 1, 1]), (PLAIN, [3]),
])  # fmt: skip
@pytest.mark.parametrize("thought", ["<think>\nt\n</think>\n\n4", "<think>\nt</think> 4 "])
def test_thoughts_in_the_text_of_each_answer(template, counts, thought):
    """Whatever their blanks are, and whether or not the template cuts them off in the last turn."""
    chat = [USER, {"role": "assistant", "content": thought}] * 3
    for begin in ["<|a|>"] if template == PLAIN else ["<|a|>", OPENS]:
        tokenizer = chat_tokenizer(template, begin)
        expected = behind(prompts_of(tokenizer, chat), [f"{thought}<|end|>"] * 3)
        assert turns_of(tokenizer, chat) == (expected, counts)


def test_thoughts_that_an_answer_hides():
    """The text of the chat with the last answer does not begin with what the policy read."""
    chat = [USER, call({"x": 2}, thinking="t0"), RESULT, ANSWER, USER, ANSWER]
    tokenizer = chat_tokenizer(CHANNELS)
    texts = ['t0[add {"x": 2}]<|end|>', "<|s|>4<|end|>", "<|s|>4<|end|>"]
    turns, counts = turns_of(tokenizer, chat)
    assert turns == list(zip(prompts_of(tokenizer, chat), texts)) and counts == [2, 1]


def test_what_a_chat_has_is_shared_out_to_its_segments():
    """A reward of the whole, and that it was cut off, belong to the last one."""
    chat = [USER, THOUGHT, USER, THOUGHT]
    tokenizer = chat_tokenizer(FORGETS)
    first, last = ids_of_row(tokenizer, messages=chat, truncated=True, reward=2.0).split(1)
    assert first.episode.tolist() == last.episode.tolist() == [0]
    assert first.truncated.tolist() == [False] and last.truncated.tolist() == [True]
    assert first.token_level_rewards.sum() == 0 and last.token_level_rewards[-1] == 2

    rows = ids_of_row(tokenizer, messages=chat, rewards=[0.25, 0.5], reward=None)
    ends = rows.cu_seqlens[1:] - 1
    assert rows.token_level_rewards[ends].tolist() == [0.25, 0.5]
    assert rows.token_level_rewards.sum() == 0.75
    for rewards in ([0.25, 0.5, 1.0], [1.0]):  # which no segment gets whole
        with refused(f"rewards has {len(rewards)} entries, the chat has 2 turns that act"):
            ids_of_row(tokenizer, messages=chat, rewards=rewards, reward=None)
    with refused("rewards has 3 entries, the response has 2 turns or parts that act, and "):
        ids_of_row(chat_tokenizer(PLAIN), messages=chat, rewards=[0.25, 0.5, 1.0], reward=None)


HALF = "<think>\nhalf a thought"


@pytest.mark.parametrize("template, begin, key", [
    (EMPTY, "<|a|>", "content"), (FORGETS, "<|a|>", "content"), (LATEST, OPENS, "content"),
    (LATEST, OPENS, "reasoning_content"),
])  # fmt: skip
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_turn_that_was_cut_off_within_its_thought_is_as_it_was_written(
    template, begin, key, goes_on
):
    """The template may show an empty thought before it, or close it: the policy wrote neither."""
    text = HALF if key == "content" else HALF.removeprefix("<think>\n")
    chat = [USER, {"role": "assistant", "content": "", key: text}]
    if goes_on and key == "content":
        chat += [USER, ANSWER]
    tokenizer = chat_tokenizer(template, begin)
    row = ids_of_row(tokenizer, messages=chat, truncated=True).split(1)[0]
    told = tokenizer.decode(row.input_ids[row.response_mask])
    assert told.startswith(HALF.removeprefix("<think>\n" if begin == OPENS else ""))
    rest = told.partition("half a thought")[2]
    assert rest == "" if len(chat) == 2 else rest.startswith("<|end|>")


def test_a_content_that_is_null_is_not_printed_as_none():
    """As GLM's template would: the policy has not written the word. One that it wrote stays."""
    prints = OBJECTS.replace("m.content or ''", "m.content")
    chat = [USER, call({"x": None, "y": "None"}, content=None), RESULT, ANSWER]
    told = read(chat_tokenizer(prints), messages=chat, completion=None)
    assert """-> '[add {"x": null, "y": "None"}]<|end|>'""" in told
    assert told == read(chat_tokenizer(OBJECTS), messages=chat, completion=None)


CALLS_ONCE = OBJECTS.replace("<|{{", "{% if m.role != 'assistant' or loop.index < 4 %}<|{{")
CALLS_ONCE = CALLS_ONCE.replace("}}|>", "}}|>{% endif %}")


def test_a_turn_that_the_template_shows_without_its_header_is_not_read_as_another():
    """As R1's, which writes the assistant's token before the first calls alone."""
    chat = [USER, call({"x": 1}, content=""), RESULT, call({"x": 2}, content=""), RESULT, ANSWER]
    with refused("message 4: the chat template leaves out its tool_calls; give response_ids"):
        ids_of_row(chat_tokenizer(CALLS_ONCE), messages=chat)


def test_a_segment_has_the_images_of_its_messages():
    """Which are those before its last turn."""
    picture = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    chat = [picture, THOUGHT, picture, picture, THOUGHT, picture | {"role": "tool"}]
    shows = "{{ 'see' if x.type == 'image' else x.text if turn.last else x.text.split('>')[-1] }}"
    parts = "{% set turn = loop %}{% for x in m.content %}" + shows + "{% endfor %}"
    tokenizer = chat_tokenizer(PLAIN.replace("{{ m.content or '' }}", parts))

    placed = []
    place = lambda rollout, folder: placed.append(rollout.images)
    ids_of_row(
        tokenizer, messages=chat, images=["a", "b", "c", "d"], options={"place_images": place}
    )
    assert placed == [["a"], ["a", "b", "c"]]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"trainable": False}, {"loss": False}])
def test_a_message_that_is_not_trained_on_is_no_action(mark):
    tokenizer = chat_tokenizer(OBJECTS)
    shown = f"{PROMPT} {FIRST} {SECOND} {LAST}"
    chat = [*AGENT[:4], AGENT[4] | mark, *AGENT[5:]]
    expected = shown.replace("' -> '[add", "[add").replace(
        """|end|>' <- '\\n<|t|>5""", "|end|>\\n<|t|>5"
    )
    assert read(tokenizer, messages=chat) == expected

    chat = [*AGENT[:2], AGENT[2] | mark, *AGENT[3:]]
    assert read(tokenizer, messages=chat).count("->") == 2
    one = [message | mark for message in AGENT]
    rows = common.read_rows(
        [json.dumps({"messages": x, "reward": 1.0}) for x in (one, AGENT)], tokenizer
    )
    assert rows.actions.tolist()[0] == 0 < rows.actions.tolist()[1]


# ---- Thoughts and beginnings ---------------------------------------------------------------------


@pytest.mark.parametrize("begin, response, expected", [
    ("<|a|><think>\n", "<think>\na</think>4", r"<|a|><think>\n' -> 'a</think>4"),
    ("<|a|><think>\n", "<think>a</think>4", r"<|a|><think>\n' -> 'a</think>4"),
    ("<|a|><think>\n", "<think>\n\na</think>4", r"<|a|><think>\n' -> '\na</think>4"),
    ("<|a|><think>", "<think>\na</think>4", r"<|a|><think>' -> '\na</think>4"),
    ("<|a|><think>\n", "\n<think>\na</think>4", r"<|a|><think>\n' -> 'a</think>4"),
    ("<|a|><think>\n", "a</think>4", r"<|a|><think>\n' -> 'a</think>4"),
    ("<|a|>", "<think>\na</think>4", r"<|a|>' -> '<think>\na</think>4"),
    ("<|a|></think>", "<think>a", "<|a|></think>' -> '<think>a"),
    ("<|a|></think>", "</think>4", "<|a|></think>' -> '4"),
    ("<|a|><think>\n\n</think>\n\n", "<think>\n\n</think>\n\n4",
     r"<|a|><think>\n\n</think>\n\n' -> '4"),
])  # fmt: skip
def test_a_thought_that_the_prompt_begins_is_not_begun_again(begin, response, expected, capsys):
    tokenizer = chat_tokenizer(PLAIN, begin)
    message = {"role": "assistant", "content": response}
    start = r"'<|u|>2+2?<|end|>\n"
    rows = (
        {"messages": [USER], "response": response},
        {"messages": [USER, message]},
        {"prompt": f"<|u|>2+2?<|end|>\n{begin}", "response": response},
        {"prompt_ids": tokenizer.encode(f"<|u|>2+2?<|end|>\n{begin}"), "response": response},
    )
    for row in rows:
        assert read(tokenizer, **row) == f"{start}{expected}<|end|>'"
    assert "note" not in capsys.readouterr().out


def test_a_response_that_leaves_a_begun_thought_open_gets_a_line(capsys):
    lines = [{"messages": [USER], "response": text, "reward": 1} for text in ("4", "a</think>4")]
    common.read_rows(list(map(json.dumps, lines)), chat_tokenizer(PLAIN, OPENS))
    said = "1 of 2 rows: they neither begin nor end the <think> that their prompt ends with"
    assert f"note       {said}\n" in capsys.readouterr().out


@pytest.mark.parametrize("template, begun, expected", [
    (TRIMS, "The answer is ", "<|a|>The answer is "),
    (TRIMS, " It is", "<|a|> It is"),
    (TRIMS.replace("|trim", ".rstrip()"), " It is ", "<|a|> It is "),
    (PLAIN, " It is ", "<|a|> It is "),
    (TRIMS, "\n", "<|a|>\n"),
    (EMPTY, "<think>\nI", "<|a|><think>\nI"),
    (EMPTY, "It is", "<|a|><think>\n\n</think>\n\nIt is"),
])  # fmt: skip
def test_a_response_continues_a_last_message_as_it_stands(template, begun, expected):
    tokenizer = chat_tokenizer(template)
    chat = [USER, {"role": "assistant", "content": begun}]
    rows = ids_of_row(tokenizer, messages=chat, response="4")
    assert tokenizer.decode(rows.input_ids) == f"<|u|>2+2?<|end|>\n{expected}4<|end|>"

    (prompt,) = prompts_in([json.dumps({"prompt": chat})], tokenizer)
    assert tokenizer.decode(prompt.ids) == f"<|u|>2+2?<|end|>\n{expected}"


def test_a_last_message_that_the_template_changes_is_refused():
    upper = PLAIN.replace("m.content or ''", "m.content|upper")
    with refused("messages do not fit the tokenizer's chat template"):
        read(chat_tokenizer(upper), messages=[USER, ANSWER | {"content": "it"}], **GOOD)


@pytest.mark.parametrize("response", ["4", "4<|end|>", "4<|end|>\n"])
@pytest.mark.parametrize("eos", ["<|end|>", "<eos>"])
def test_a_response_that_ends_itself_gets_no_second_end(response, eos):
    """Whether it ends with EOS or, where the model names another one, as the template's turns."""
    tokenizer = chat_tokenizer(PLAIN)
    tokenizer.eos_token = eos
    said = read(tokenizer, messages=[USER], response=response)
    end = "<|end|>" if "end" in response else eos
    assert said.endswith(f"-> '4{end}'")


@pytest.mark.parametrize("named, end", [("<|end|>", "<|end|>"), ("<eos>", "<eos>")])
def test_a_response_in_a_chat_ends_as_the_model_stops(named, end):
    """Gemma's chats end a turn with another token than the tokenizer's EOS, but the model's."""
    tokenizer = chat_tokenizer(PLAIN)
    tokenizer.eos_token = "<eos>"
    ids = tokenizer.convert_tokens_to_ids(["<eos>", named])
    config = Qwen2Config(eos_token_id=ids)
    lines = [{"messages": [USER], "response": "4"}, {"prompt": "2+2=", "response": "4"}]
    lines = [json.dumps(line | {"reward": 1.0}) for line in lines]
    chat, text = common.read_rows(lines, tokenizer, config).split(1)
    assert tokenizer.decode(chat.input_ids).endswith(f"<|a|>4{end}")
    assert tokenizer.decode(text.input_ids) == "2+2=4<eos>"


def test_an_end_that_the_tokenizer_lacks_is_none():
    """As the default of GPT-2's config for a smaller vocabulary."""
    ends = common.turn_ends(common.char_tokenizer(), Qwen2Config(eos_token_id=50256))
    assert list(ends.values()) == ["<eos>"]


def test_a_template_that_writes_the_date_is_told(capsys):
    template = "{{ strftime_now('%d %b %Y') }}" + PLAIN
    tokenizer = chat_tokenizer(template)
    today = datetime.now().strftime("%d %b %Y")
    assert read(tokenizer, messages=[USER], **GOOD).startswith(f"'{today}<|u|>")
    said = "the chat template writes today's date, which --chat-template-kwargs may set\n"
    assert f"note       1 of 1 rows: {said}" in capsys.readouterr().out
    read(tokenizer, prompt="2+2=", **GOOD)
    assert "note" not in capsys.readouterr().out


# ---- One tokenizer, by folder and by name --------------------------------------------------------


def test_a_name_on_the_hub_is_read_as_the_folder_of_its_files(tmp_path, monkeypatch):
    """Of class Llama with a byte-level vocabulary, as DeepSeek's. The cache stands for the hub."""
    cache = tmp_path / "models--owner--name"
    folder = cache / "snapshots" / "0"
    KINDS["bytes"].save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "LlamaTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("owner/name", str(folder)):
        tokenizer = common.load_tokenizer(critic_fsdp.Config(tokenizer=name))
        assert tokenizer.encode("hello big world") == KINDS["bytes"].encode("hello big world")


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("config", [True, False, None])
def test_whether_a_text_begins_with_bos_is_what_the_config_says(stored, config, tmp_path):
    tokenizer = sentence_piece("first")
    if not stored:
        tokenizer.backend_tokenizer.post_processor = tokenizers.processors.ByteLevel()
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    fields = {} if config is None else {"add_bos_token": config}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    read = common.load_tokenizer(critic_fsdp.Config(tokenizer=str(tmp_path)))
    adds = stored if config is None else config
    assert (read.encode("2+2=")[:1] == [read.bos_token_id]) == adds
