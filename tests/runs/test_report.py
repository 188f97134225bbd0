"""What the critic learned: numbers against plain loops, the page in a browser, the profiler."""

import collections
import dataclasses
import gzip
import json
import math
import random
import re
import statistics
import sys
import types

import browser
import matplotlib.pyplot as plt
import pytest
import tokenizers
import torch
import transformers
from browser import needs_browser, set_form
from helpers import (
    ROOT,
    actions_of,
    peak_bytes,
    random_batch,
    rows_after,
    rows_of,
    succeeded,
    torchrun,
)
from matplotlib.figure import Figure
from tokenizers import decoders, models, pre_tokenizers, trainers

import common
import ppo_loop

same = pytest.approx


def judged_rows(n, prompts, longest=12, gamma=1.0):
    """Rows that answer some prompts, rewarded with 0 or 1. Their returns and, as advantages, TD
    errors are made by hand."""
    rng = random.Random(0)
    rows = random_batch(n, longest=longest + 8, idle=False, prompts=prompts)
    columns = torch.zeros(3, len(rows.input_ids))
    rows.token_level_rewards, rows.returns, rows.advantages = columns

    for b, at in enumerate(actions_of(rows)):
        chance = (0.2, 0.7)[b % prompts % 2]
        reward = int(rng.random() < chance)
        rows.token_level_rewards[at[-1]] = reward
        ahead = reward
        tail = reward
        for t in reversed(at):
            rows.advantages[t] = ahead - float(rows.values[t])
            rows.returns[t] = tail
            ahead = gamma * float(rows.values[t])
            tail *= gamma
    return rows


def pairs_of(rows):
    """[(value, return) of each action] of each row."""
    acts = actions_of(rows)
    return [[(float(rows.values[t]), float(rows.returns[t])) for t in at] for at in acts]


def explained(pairs):
    """1 - Var(R - V) / Var(R) of (value, return) pairs."""
    returns = [r for _, r in pairs]
    return 1 - statistics.pvariance([r - v for v, r in pairs]) / statistics.pvariance(returns)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_every_number_equals_a_plain_loop(gamma, tmp_path):
    rows = judged_rows(150, 80, gamma=gamma)
    pairs = pairs_of(rows)
    groups = {}  # prompt -> (return at the first action, last value, reward) of its rows
    for (start, _), at, row in zip(rows_of(rows), actions_of(rows), pairs, strict=True):
        prompt = tuple(rows.input_ids[start : at[0]].tolist())
        groups.setdefault(prompt, []).append((row[0][1], *row[-1]))
    several = [group for group in groups.values() if len(group) > 1]

    within = [statistics.variance(x[0] for x in group) for group in several for _ in group]
    spread = statistics.variance(x[0] for x in sum(several, []))
    ones = [row[-1][0] for row in pairs if row[-1][1] == 1]
    zeros = [row[-1][0] for row in pairs if row[-1][1] == 0]
    expected = {
        "explained variance": explained(sum(pairs, [])),
        "at the first action": explained([row[0] for row in pairs]),
        "its ceiling": 1 - statistics.fmean(within) / spread,
        "AUC": statistics.fmean((a > b) + 0.5 * (a == b) for a in ones for b in zeros),
        "best of n": statistics.fmean(max(group, key=lambda x: x[1])[2] for group in several),
        "mean of n": statistics.fmean(statistics.fmean(x[2] for x in group) for group in several),
        "oracle of n": statistics.fmean(max(x[2] for x in group) for group in several),
    }
    _, numbers = write(tmp_path, rows, gamma=gamma)
    assert {name: float(x) for name, x in numbers.items()} == same(expected, abs=1e-3)

    # test_common.py compares these with a loop
    rows.truth = rows.returns + 0.25 * rows.values
    rows.truth_noise = torch.full_like(rows.values, 0.01)
    told = common.against_truth(rows, gamma)
    expected |= {
        "what can be known": told["eval/knowable"],
        "known of that": told["eval/truth_explained_var"],
        "flatness": told["eval/flatness"],
    }
    _, numbers = write(tmp_path, rows, gamma=gamma)
    assert {name: float(numbers[name]) for name in common.NUMBERS} == same(expected, abs=1e-3)


def test_the_ceiling_is_what_knowing_each_prompt_explains():
    """With known variances: returns are a number per prompt plus noise."""
    g = torch.Generator().manual_seed(0)
    prompts = torch.arange(2000).repeat_interleave(5)
    noise = torch.randn(10_000, generator=g)
    returns = 2 * torch.randn(2000, generator=g)[prompts] + noise
    rows = common.concat([common.Batch.blank(2)] * 10_000)
    rows.row_id = torch.arange(len(rows))

    def ceiling(prompts, returns):
        rows.input_ids[::2] = prompts
        rows.returns[1::2] = returns
        return common.ceiling(rows)

    assert ceiling(prompts, returns) == same(4 / 5, abs=0.02)
    assert ceiling(prompts, noise) == same(0, abs=0.03)

    # it is not defined for prompts with one row each, equal returns, and if it falls below 0
    assert math.isnan(ceiling(torch.arange(10_000), returns))
    assert math.isnan(ceiling(prompts, torch.ones(1)))
    assert math.isnan(ceiling(prompts, torch.arange(10_000) % 5))


def write(folder, rows, tokenizer=None, curves=common.CURVES, gamma=1.0, changed=None, noise=False):
    """(text of the page about some rows, its numbers). noise: with those of the actor's noise."""
    rows = dataclasses.replace(rows, returns=None, advantages=None)
    if not noise:
        rows.rollout_log_probs = None
    folder.mkdir(exist_ok=True)
    common.write_report(str(folder), rows, "rows of a test", tokenizer, gamma, curves, changed)

    text = (folder / "report.html").read_text()
    return text, {name: x for x, name in re.findall(r"<td><b>(.*?)</b><td>(.*?)<td>", text)}


def shown_of(rows, b, words):
    """(first token with numbers, text) of what the page must show of row b: 2,000 tokens around the
    largest error, and 2,000 characters before them."""
    start, end = rows_of(rows)[b]
    acts = actions_of(rows)[b]
    worst = max(acts, key=lambda t: float(rows.advantages[t].abs()))
    first = max(acts[0], worst - 1000)

    before = "".join(words[start:first])
    if len(before) > 2000:
        before = "…" + before[-2000:]
    response = "".join(words[first:end][:2000])
    if end > first + 2000:
        response += "…"
    return first, before + response


def sections_of(rows):
    """The rows that the page must show, by hand: 8 with the largest errors, and 4 from the middle
    on."""
    errors = [max(rows.advantages[at].abs().tolist()) for at in actions_of(rows)]
    order = sorted(range(len(rows)), key=lambda b: -errors[b])
    middle = len(order) // 2
    return order[:8], order[middle : middle + 4]


MEAN_WORDS = (  # tokens that a page must not run, nor change
    "<script>document.title = 'run'</script>",
    '<img src=x onerror="document.title = 1">',
    "&amp;",
)


def rows_of_mean_words():
    """(rows, of which one is long; a tokenizer whose tokens are MEAN_WORDS)."""
    rows = common.concat([judged_rows(60, 20), judged_rows(1, 1, longest=6000)])
    rows.row_id = torch.arange(61)
    decode = lambda ids, **_: "".join(MEAN_WORDS[i % 3] for i in ids)
    return rows, types.SimpleNamespace(decode=decode)


def test_the_page_cuts_a_long_row_but_its_numbers_are_for_all_tokens(tmp_path):
    """Rows that are equal are shown once."""
    rows, tokenizer = rows_of_mean_words()
    text, numbers = write(tmp_path, rows, tokenizer)
    expected = explained(sum(pairs_of(rows), []))
    assert float(numbers["explained variance"]) == same(expected, abs=1e-3)
    assert not re.search(r'(src|href)="[^#]', text)
    assert len(text) < 20e6
    twice, _ = write(tmp_path / "twice", common.concat([rows, rows]))
    assert twice.count("<article") == text.count("<article") == 12


@needs_browser
def test_a_mouse_on_a_token_shows_its_numbers_and_no_token_is_run(tmp_path):
    """Numbers equal TD errors by hand."""
    rows, tokenizer = rows_of_mean_words()
    words = [MEAN_WORDS[i % 3] for i in rows.input_ids.tolist()]
    shown = [shown_of(rows, b, words) for b in sum(sections_of(rows), [])]
    write(tmp_path, rows, tokenizer)
    with browser.page(tmp_path / "report.html") as call:
        ask = lambda expression: browser.evaluate(call, expression)
        assert ask("document.title") == str(tmp_path)
        assert ask("document.images.length") == 0

        # all texts
        texts = [text for _, text in shown]
        assert any("…" in text for text in texts)
        assert ask("Array.from(document.querySelectorAll('.text'), x => x.textContent)") == texts

        # the numbers of ten tokens
        text_and_told = "(x => [x.textContent, getComputedStyle(x, '::after').content])"
        start, _ = shown[0]
        for t in range(start, start + 10):
            browser.hover(call, f"[data-told]:nth-of-type({t - start + 2})")
            found, seen = ask(f"{text_and_told}(document.querySelector('[data-told]:hover'))")
            expected = [float(x[t]) for x in (rows.values, rows.returns, rows.advantages)]
            assert found == words[t]
            if rows.response_mask[t]:
                told = re.fullmatch('"value (.+), return (.+), TD error (.+)"', seen).groups()
                assert list(map(float, told)) == same(expected, rel=1e-2, abs=1e-6)
            else:
                assert seen == '"not an action"'


FORMS = [(width, scheme) for width in (390, 1280, 1920) for scheme in ("light", "dark")]


def log_of(folder, curves, steps=9):
    """Writes a log of these curves, in which 0 was not finite, as the logger does -> its rows."""
    names = [name for panel in curves.values() for name in panel.values()]
    rows = []
    for step in range(steps):
        numbers = {name: (7 * step + i) % 5 or None for i, name in enumerate(names)}
        rows.append({"step": step, **numbers})
    common.replace_lines(f"{folder}/metrics.jsonl", rows)
    return rows


@needs_browser
def test_the_page_fits_each_screen_and_the_curves_stay_in_view(tmp_path):
    """Light and dark. On a phone the curves are above the rows, elsewhere next to them."""
    log_of(tmp_path, ppo_loop.CURVES)
    sample = {"prompt": "x" * 3000, "response": "y" * 3000, "reward": 1.0}
    changed = {
        "numbers": {"accuracy": ("0.1", "of a test")},
        "samples": {"are long": [(sample, sample)]},
    }
    write(tmp_path, judged_rows(60, 20, longest=300), None, ppo_loop.CURVES, changed=changed)
    inks = {"light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"}
    color = "getComputedStyle(document.querySelector('{}')).{}"
    with browser.page(tmp_path / "report.html") as call:
        ask = lambda expression: browser.evaluate(call, expression)
        box = lambda name: ask(f"document.querySelector('{name}').getBoundingClientRect().toJSON()")
        ask("document.querySelectorAll('details').forEach(x => x.open = true)")
        for width, scheme in FORMS:
            set_form(call, width, scheme)
            ask("scrollTo(0, 0)")
            assert ask("document.documentElement.scrollWidth") <= width

            # ink on paper
            ink = ask(color.format("body", "color"))
            assert ink == inks[scheme]
            assert ink == ask(color.format("svg text", "fill"))

            # curves above the rows or next to them
            assert box("svg")["width"] > 300
            if width < 500:
                assert box("aside")["bottom"] <= box("article")["top"]
            else:
                assert box("aside")["left"] >= box("article")["right"]
                ask("scrollTo(0, document.documentElement.scrollHeight / 2)")
                assert box("svg")["top"] >= 0
                assert box("svg")["bottom"] <= 800


@needs_browser
def test_a_finger_and_the_keyboard_show_a_tokens_numbers_too(tmp_path):
    """A tap shows them at the bottom of the screen."""
    write(tmp_path, judged_rows(60, 20))
    with browser.page(tmp_path / "report.html") as call:
        ask = lambda expression: browser.evaluate(call, expression)
        told = "getComputedStyle(document.activeElement, '::after').content"
        nth = "[...document.querySelectorAll('[data-told]')].indexOf(document.activeElement)"

        set_form(call, 390, "light")
        browser.tap(call, "[data-told]:nth-of-type(3)")
        assert ask(nth) == 1
        assert "TD error" in ask(told)
        assert ask("getComputedStyle(document.activeElement, '::after').bottom") == "0px"

        # Tab goes to the next token
        set_form(call, 1280, "light")
        ask("document.querySelector('[data-told]').focus()")
        for expected in (1, 2):
            browser.press_tab(call)
            assert ask(nth) == expected
            assert ask(told) == ask("JSON.stringify(document.activeElement.dataset.told)")


@needs_browser
def test_bars_of_true_values_lie_between_the_lines(tmp_path):
    """Of a text that wraps, and ends below the last bar. The colour of the value ends above it."""
    rows = judged_rows(4, 2, longest=300)
    rows.truth = torch.where(rows.response_mask, rows.returns, math.nan)
    rows.truth_noise = torch.zeros_like(rows.truth)
    write(tmp_path, rows)
    with browser.page(tmp_path / "report.html") as call:
        set_form(call, 390, "light")
        ask = lambda expression: browser.evaluate(call, expression)
        boxes = ask(
            "[...document.querySelectorAll('article:first-of-type .true')]"
            ".flatMap(x => [...x.getClientRects()]).map(x => [x.top, x.bottom])"
        )
        end = ask("document.querySelector('.text').getBoundingClientRect().bottom")
        style = "getComputedStyle(document.querySelector('.true')).{}"
        assert ask(style.format("backgroundClip")) == "content-box"
        assert float(ask(style.format("borderBottomWidth")).removesuffix("px")) >= 5

    tops = sorted({top: bottom for top, bottom in boxes}.items())
    assert len(tops) > 8 and tops[-1][1] < end
    assert all(bottom <= top for (_, bottom), (top, _) in zip(tops, tops[1:]))


@needs_browser
def test_a_picture_shows_its_part_of_a_page(tmp_path):
    box = "position: absolute; left: 1000px; top: 1300px; width: 200px; height: 100px"
    (tmp_path / "page.html").write_text(f"<div style='background: red; {box}'>")
    browser.picture(tmp_path / "page.html", tmp_path / "page.png", 1000, 1300, 200, 100)
    pixels = plt.imread(tmp_path / "page.png")
    assert pixels.shape == (100, 200, 3)
    assert (pixels == (1, 0, 0)).all()


def test_one_value_far_off_leaves_the_other_colours_as_they_are():
    """The colours end at the 5% and 95% quantiles."""
    values = [i / 1000 for i in range(1000)]
    low, high = common.value_range(torch.tensor([*values, 1e6])[torch.randperm(1001)])
    assert (low, high) == same((0.05, 0.95), abs=0.002)
    # both quantiles are 1
    assert common.value_range(torch.tensor([1.0] * 99 + [2.0])) == (1.0, 2.0)


def test_equal_values_and_the_middle_one_have_no_colour():
    assert common.colour_of(1.0, 1.0, 1.0) == ""
    assert common.colour_of(0.5, 0.0, 1.0).removeprefix("#f97316")[2:] == ""


def luminance(color):
    """As in WCAG."""
    lights = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in color]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), lights)) + 0.05


@pytest.mark.parametrize("value", [-9.0, 0.0, 0.2, 0.8, 1e6])
def test_black_and_white_text_is_legible_on_all_colours(value):
    *color, alpha = (x / 255 for x in bytes.fromhex(common.colour_of(value, 0.0, 1.0)[1:]))
    pure = bytes.fromhex("f97316" if value < 0.5 else "2563eb")
    assert color == same([x / 255 for x in pure])
    assert alpha == same(0.65 * min(1, abs(2 * value - 1)), abs=0.005)

    for paper, ink in ((1.0, 0.0), (0x12 / 255, 1.0)):  # Chromium's
        mixed = luminance([alpha * x + (1 - alpha) * paper for x in color])
        text = luminance([ink] * 3)
        assert max(mixed, text) / min(mixed, text) > 4.5


TEXT = "The lady’s naïve café — 你好，世界！ 😀👩‍👩‍👧  Привет, мир \n مرحبا  x."


def tokenizer_of(kind):
    """Of single characters; of bytes and some pairs; like Llama 2's, without a first blank."""
    if kind == "characters":
        return common.char_tokenizer()
    if kind == "bytes":
        core = tokenizers.Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        sizes = {"vocab_size": 275, "initial_alphabet": alphabet, "show_progress": False}
        core.train_from_iterator([TEXT], trainers.BpeTrainer(**sizes))
        return transformers.PreTrainedTokenizerFast(tokenizer_object=core)

    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", *every_byte, "▁", "▁▁", "▁The", "▁x", *"abcdefilnstvy,."]
    core = tokenizers.Tokenizer(models.Unigram([(x, -1.0) for x in words], 0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    blank = decoders.Replace("▁", " ")
    parts = [blank, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


def whole_prefixes(ids, first, decode):
    """What common.texts_of must return, from the text of every prefix: takes quadratic time."""
    seen = [""]  # the longest so far: half a character of Llama's bytes spoils those before it, too
    for n in range(first, len(ids) + 1):
        seen.append(max(decode(ids[:n]).rstrip("�"), seen[-1], key=len))
    return [b[len(a) :] for a, b in zip(seen, seen[1:])]


@pytest.mark.parametrize("kind", ["characters", "bytes", "llama"])
def test_texts_of_tokens_are_the_text_of_the_row(kind):
    """Wherever the response begins: blanks stay, and a character of several tokens is whole."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(TEXT)
    whole = tokenizer.decode(ids)
    assert (whole == TEXT) == (kind != "characters")
    assert len(ids) > 60
    for first in range(len(ids)):
        texts = common.texts_of(ids, first, tokenizer.decode)
        assert "".join(texts) == whole
        assert texts == whole_prefixes(ids, first, tokenizer.decode), first
        assert not any("�" in text for text in texts)
        assert len(texts) == len(ids) - first + 1

    cut = ids[: ids.index(tokenizer.encode("😀")[-1]) - 1]  # it ends within a character
    assert "".join(common.texts_of(cut, 5, tokenizer.decode)) == tokenizer.decode(cut)


@pytest.mark.parametrize("kind", ["bytes", "llama"])
def test_texts_of_long_rows_take_linear_time_even_if_bytes_are_no_text(kind):
    tokenizer = tokenizer_of(kind)
    rng = random.Random(0)
    noise = [rng.randrange(1, 257) for _ in range(3000)]
    for ids in (noise, tokenizer.encode(TEXT) * 40, [noise[0]] * 3000):
        seen = []
        decode = lambda some, seen=seen: seen.append(len(some)) or tokenizer.decode(some)
        assert "".join(common.texts_of(ids, 1000, decode)) == tokenizer.decode(ids)
        assert sum(seen) < 100_000 < len(ids) ** 2 / 50


def a_row(ids, first, errors, reward=0.0):
    """A row whose response begins at token `first`, with these TD errors and values as large."""
    mask = torch.arange(len(ids)) >= first
    x_T = torch.tensor([errors.get(i, 0.0) for i in range(len(ids))])
    return common.Batch(
        input_ids=torch.tensor(ids),
        cu_seqlens=common.cumulative([len(ids)]),
        response_mask=mask,
        row_id=torch.tensor([0]),
        truncated=torch.tensor([False]),
        token_level_rewards=reward * (torch.arange(len(ids)) == len(ids) - 1),
        values=x_T,
        returns=x_T,
        advantages=x_T,
    )


def test_long_rows_are_cut_around_their_largest_error_and_stay_apart():
    """Rows are one only if all their tokens are equal. The last action's error counts, too: there
    the value is far from the reward."""
    ids = list(range(9000))
    late = a_row(ids, 3000, {3100: 1.0, 6500: 4.0, 8999: 3.5}, reward=5.0)
    other = a_row([*ids[:-1], 7], 3000, {3100: 3.0}, reward=1.0)
    again = a_row(ids, 3000, {3100: 2.0})
    short = a_row(ids[:50], 20, {30: 0.5})
    end = a_row(ids[:4000], 1000, {1995: 0.25, 3999: 9.0})
    rows = common.concat([again, short, other, late, end])
    shown, typical = common.rows_to_show(rows, None)
    text = lambda start, end: "".join(f"{i} " for i in range(start, end))
    assert [row["before"] for row in shown] == [
        "…" + text(0, 2999)[-2000:],
        "…" + text(0, 5500)[-2000:],
        "…" + text(0, 3000)[-2000:],
        text(0, 20),
    ]
    told = ["".join(token["text"] for token in row["tokens"]) for row in shown]
    assert told == [text(2999, 4000), text(5500, 7500), text(3000, 5000), text(20, 50)]
    assert [row["rest"] for row in shown] == ["", "…", "…", ""]
    assert not typical

    # the head of a row tells of all its tokens, and the largest error is marked
    assert [row["reward"] for row in shown] == [0.0, 5.0, 1.0, 0.0]
    assert shown[0]["ends"] == (0.0, 9.0)
    assert shown[1]["ends"] == (0.0, 3.5)
    marked = [(t, token) for t, token in enumerate(shown[1]["tokens"]) if token["kind"]]
    told = "value 4, return 4, TD error 4"  # a bit below the middle of 0 and 9
    token = {"text": "6500 ", "told": told, "colour": "#f9731612", "kind": "worst"}
    assert marked == [(1000, token)]


def test_true_values_are_bars_on_the_scale_of_the_values():
    """Where they are known: a flat critic is pale next to bright bars, and the other way round."""
    orange, blue, middle = "#f97316a6", "#2563eba6", "#f9731600"
    truth = [50.0, 0.0, 1.0, 0.5, math.nan, -50.0]
    for values, colours, bars in (
        ([0.0, 0.4, 0.6, 0.4, 0.6, 0.4], ("#f9731621", "#2563eb21"), (orange, blue, middle)),
        ([0.0, -9.5, 10.5, -9.5, 10.5, -9.5], (orange, blue), ("#f9731608", "#2563eb08", middle)),
    ):
        row = a_row(range(6), 1, dict(enumerate(values)))
        row.response_mask[5] = False  # what is said of others' tokens does not count
        row.truth = torch.tensor(truth)
        [[shown], _] = common.rows_to_show(row, None)
        tokens = shown["tokens"]
        assert [token["colour"] for token in tokens] == [*colours * 2, ""]
        assert [token.get("truth") for token in tokens] == [*bars, None, None]
        assert ["true" in token["kind"].split() for token in tokens] == [True] * 3 + [False] * 2
        told = [token["told"].partition(", true value ")[2] for token in tokens]
        assert told == ["0", "1", "0.5", "", ""]


@pytest.mark.parametrize("known", [True, False])
def test_a_page_speaks_of_true_values_only_if_there_are_any(known, tmp_path):
    """Those of a file may be of rows that are not shown."""
    rows = judged_rows(60, 20)
    rows.truth = torch.where(rows.response_mask, math.nan, 0.5)
    rows.truth_noise = torch.zeros_like(rows.values)
    if known:
        rows.truth[rows.response_mask] = torch.arange(int(rows.response_mask.sum())) / 1000
    text, numbers = write(tmp_path, rows)
    words = ("The bar below a token", "border-color:", ", true value 0.")
    assert [word in text for word in words] == [known] * 3
    assert ("A good critic ends near the return" in text) != known
    assert ("flatness" in numbers) == known


def test_a_cut_through_a_character_shows_no_part_of_it():
    """Of a prompt and a response of over 4,000 tokens; the response is cut at both ends."""
    tokenizer = tokenizer_of("llama")
    ids = tokenizer.encode(TEXT) * 100
    whole = tokenizer.decode(ids)
    for shift in range(0, 24, 3):
        row = a_row(ids[shift:], 4000 - shift, {7000: 1.0})
        [[shown], _] = common.rows_to_show(row, tokenizer)
        text = "".join(token["text"] for token in shown["tokens"])
        before = shown["before"]
        assert before[0] == shown["rest"] == "…"
        assert "�" not in before + text
        assert before[1:] + text in whole
        assert min(len(before), len(text)) > 1000


@pytest.mark.parametrize("rewards, gamma, said", [
    ([0.5, 0.0, 1.0], 1.0, ", return 1.5 → 1"),
    ([0.0, 0.0, 1.0], 1.0, "value 0.25 → 0.75, reward"),
    ([0.0, 0.0, 1.0], 0.5, ", return 0.25 → 1"),
    ([0.5, 0.5, 0.5], 0.0, ", return 0.5 → 0.5"),
])  # fmt: skip
def test_of_several_rewards_a_row_says_what_is_left(rewards, gamma, said, tmp_path):
    """Next to its values, at the first and the last action."""
    row = common.Batch.blank(4)
    row.token_level_rewards[1:] = torch.tensor(rewards)
    row.values[1:] = torch.tensor([0.25, 0.5, 0.75])
    text, _ = write(tmp_path, row, gamma=gamma)
    shown = re.search("<article>(.*?)<div", text, flags=re.DOTALL)[1]
    assert said in shown and ("return" in shown) == ("return" in said)


def test_rows_that_tie_count_alike_and_it_is_said_of_how_many_prompts():
    """Whichever comes first. Of three prompts with two answers, the first has equal last values."""
    rows = rows_after([3], [3], [4], [4], [5], [5], [6], answer=1)
    last = common.last_action(rows)
    rows.values[last] = torch.tensor([0.5, 0.5, 0.9, 0.1, 0.2, 0.3, 0.0])
    rows.token_level_rewards[last] = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    for order in ([0, 1, 2, 3, 4, 5, 6], [1, 0, 3, 2, 5, 4, 6]):
        m = common.evaluate(rows.select(order), 1.0)
        assert float(m["eval/best_of_n"]) == pytest.approx((0.5 + 1 + 0) / 3)
        assert m["eval/prompts_of_n"] == 3


def test_the_noise_by_baseline_is_on_the_page_and_in_the_line(tmp_path, capsys):
    """Unless nothing is known of it: without log-probs, or where all returns are equal."""
    rows = random_batch(40, prompts=8, idle=False)
    common.add_returns(rows, 1.0, 1.0)
    for some, known in (
        (rows, True),
        (dataclasses.replace(rows, rollout_log_probs=None), False),
        (dataclasses.replace(rows, token_level_rewards=0 * rows.token_level_rewards), False),
    ):
        capsys.readouterr()
        _, numbers = write(tmp_path, some, noise=True)
        said = capsys.readouterr().out
        found = {x.removeprefix("noise, "): y for x, y in numbers.items() if "noise, " in x}
        assert bool(found) == known == ("of the actor's gradient" in said)
        assert ("told of rows with log_probs" in said) == (some.rollout_log_probs is None)
        if known:
            told = common.noise_by_baseline(rows, 1.0)
            assert found == {x: f"{y:.3f} +- {error:.3f}" for x, (y, error) in told.items()}
            assert all(number in said for number in found.values())
            assert f"with this critic needs {found['critic']} times" in said


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """Writes scored.jsonl about some rows, whose values are there -> its lines."""
    monkeypatch.setattr(common, "write_report", lambda *_: None)

    def write(rows):
        lines = [{"prompt_ids": [1], "response_ids": [2], "my": [math.nan]}] * len(rows)
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
        rows.source = torch.arange(len(rows))
        common.write_scores(str(tmp_path / "rows.jsonl"), str(tmp_path), rows, None, 1.0)
        return common.read_lines(tmp_path / "scored.jsonl")

    return write


def test_what_was_read_says_how_many_values_a_row_gets(tmp_path, monkeypatch):
    """A key that no one has asked for says nothing: here the text of a row is in another one."""
    monkeypatch.setattr(common, "write_report", lambda *_: None)
    row = {"prompt": "1+1=", "text": "12", "reward": 1.0}
    row |= {"response_mask": [0, 1, 1], "response": ["a", "b", "c"], "completion_mask": [1]}
    (file := tmp_path / "rows.jsonl").write_text(json.dumps(row))
    keys = {"response": "text"}
    tokenizer = common.char_tokenizer()
    rows = common.read_rows(str(file), tokenizer, keys=keys)
    rows.values = torch.arange(7.0)
    common.write_scores(str(file), str(tmp_path), rows, tokenizer, 1.0, keys)
    [line] = common.read_lines(tmp_path / "scored.jsonl")
    assert line["values"] == [4.0, 5.0, 6.0] and "step_values" not in line


def test_ranks_within_a_prompt_equal_a_plain_loop(scored):
    """Equal values share a rank. NaN is last, and null in the file, as in the keys of the user."""
    rows = common.concat([common.Batch.blank(2)] * 60)
    rows.row_id = torch.arange(60)
    rows.input_ids[::2] = torch.arange(60) % 3
    rng = random.Random(0)
    last = [rng.choice([0.0, -0.5, 0.25, 1.0, -math.inf, math.inf, math.nan]) for _ in range(60)]
    rows.values[1::2] = torch.tensor(last)
    lines = scored(rows)

    height = [-math.inf if math.isnan(x) else x for x in last]
    for row, line in enumerate(lines):
        higher = [other for other in range(row % 3, 60, 3) if height[other] > height[row]]
        assert line["rank"] == 1 + len(higher)
    assert len(lines) == 60

    told = [x if math.isfinite(x) else None for x in last]
    assert [line["last_value"] for line in lines] == told
    assert [line["values"] for line in lines] == [[x] for x in told]
    assert all(line["my"] == [None] for line in lines)


def answers_with(values):
    """Rows that answer one prompt, with these last values."""
    rows = common.Batch.blank(2).select([0] * len(values))
    rows.row_id = torch.arange(len(values))
    rows.values[1::2] = torch.tensor(values)
    return rows


def test_equal_answers_share_a_rank_in_spite_of_rounding(scored):
    lines = scored(answers_with([0.7, 0.9, 0.9 - 6e-8, 0.89]))
    assert [line["rank"] for line in lines] == [4, 1, 1, 3]


def test_many_answers_to_one_prompt_take_little_memory(scored, tmp_path):
    rows = answers_with([float(x) for x in range(4000)])
    peak = peak_bytes(lambda: scored(rows))
    assert peak < 4000 * 1000  # a table of pairs has 4000 * 4000
    ranks = [line["rank"] for line in common.read_lines(tmp_path / "scored.jsonl")]
    assert ranks == list(range(4000, 0, -1))


def test_only_rank_0_builds_what_only_rank_0_writes(tmp_path, monkeypatch):
    """Prompts are compared for the ceiling, ranks and best of n, which takes long."""
    rows = judged_rows(20, 5)
    ends = common.describe_rows(rows, 1.0, "a test")
    logger = common.Logger(str(tmp_path / "out"), {}, 0, None)

    # from here on it fails
    monkeypatch.setattr(common, "by_prompt", None)
    with pytest.raises(TypeError):
        common.describe_rows(rows, 1.0, "a test")

    monkeypatch.setattr(common, "RANK", 1)
    assert common.describe_rows(rows, 1.0, "a test") == ends
    logger.log_evaluation(1, rows, 1.0)
    common.write_scores("no such file", str(tmp_path / "none"), rows, None, 1.0)
    common.write_report(str(tmp_path / "none"), rows, "rows", None, 1.0)
    assert not (tmp_path / "none").exists()


def test_the_time_left_leaves_out_the_evaluation_before_the_first_update(tmp_path, capsys):
    logger = common.Logger(str(tmp_path / "out"), {}, 0, None)
    rows = judged_rows(20, 5)
    names = ("critic/vf_loss", "critic/explained_var", "critic/grad_norm", "critic/lr")
    names += ("critic/skipped_steps", "perf/tokens_per_second", "perf/mfu", "perf/peak_memory_gib")

    for step in range(2):
        logger.start -= 3600  # an evaluation takes an hour
        logger.log_evaluation(step, rows, 1.0)
        logger.log_update(step + 1, 3, dict.fromkeys(names, 1.0))

    left = re.findall(r"eta (\S+)", capsys.readouterr().out)
    assert left == ["0:00:00", "0:30:00"]  # the second evaluation is one of two steps


# of processes that other tests left running
@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    "case", ["one row", "equal rewards", "a row without actions", "not 0 or 1"]
)
def test_unusual_rows_have_a_report(tmp_path, case, capsys):
    rows = judged_rows(1 if case == "one row" else 12, 5)
    rows.token_level_rewards *= {"equal rewards": 0, "not 0 or 1": 2}.get(case, 1)
    if case == "a row without actions":
        rows.response_mask[slice(*rows_of(rows)[3])] = False
    text, numbers = write(tmp_path, rows)
    assert ("AUC" in numbers) == (case == "a row without actions")
    equal = case in ("one row", "equal rewards")
    assert (common.ALL_EQUAL in text) == equal == ("explained variance" not in numbers)

    # printed, too, if there is nothing else to say
    said = f"\n  {common.ALL_EQUAL}\n" in capsys.readouterr().out
    assert said == (case == "one row")


def test_numbers_that_do_not_exist_are_neither_on_the_page_nor_in_the_line(tmp_path, capsys):
    rows = judged_rows(60, 60)
    _, numbers = write(tmp_path, rows)
    common.Logger(str(tmp_path / "log"), {}, 0, None).log_evaluation(1, rows, 1.0)
    said = capsys.readouterr().out
    assert "best of n" not in numbers and "held out " in said and "--" not in said


def test_advice_stands_where_a_constant_is_better(tmp_path):
    """With the losses of both."""
    rows = judged_rows(60, 60)
    pairs = sum(pairs_of(rows), [])
    loss = 0.5 * statistics.fmean((v - r) ** 2 for v, r in pairs)
    constant = 0.5 * statistics.pvariance([r for _, r in pairs])
    assert loss > constant
    text, _ = write(tmp_path, rows)
    assert f"its loss is {loss:.4f}, that of their mean return {constant:.4f}" in text

    rows.values = rows.returns * 0.9
    text, _ = write(tmp_path, rows)
    assert 'class="advice"' not in text


def panels_of(monkeypatch):
    """A list that the panels of figures to come are added to."""
    panels = []
    add = Figure.add_subplot

    def add_and_note(*args, **options):
        panels.append(add(*args, **options))
        return panels[-1]

    monkeypatch.setattr(Figure, "add_subplot", add_and_note)
    return panels


@pytest.mark.parametrize("curves", [common.CURVES, ppo_loop.CURVES])
def test_the_figure_shows_the_metrics(tmp_path, curves, monkeypatch):
    """It draws the log, in which null was not finite."""
    panels = panels_of(monkeypatch)
    log = log_of(tmp_path, curves)
    rows = judged_rows(60, 20)
    rows.values /= 8  # so that no tenth is far off
    write(tmp_path, rows, curves=curves)
    titles = [panel.get_title(loc="left").removesuffix(" (log scale)") for panel in panels]
    assert titles == [*curves, *common.PLACES]
    for panel, names in zip(panels, curves.values()):
        drawn = {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
        points = lambda name: [[row["step"], row[name]] for row in log if row[name]]
        assert drawn == {words: points(name) for words, name in names.items()}
        assert (panel.get_legend() is None) == (len(names) == 1)

        # a legend is above the curves
        if len(names) > 1:
            legend = panel.get_legend().get_window_extent()
            assert legend.y0 >= panel.get_window_extent().y1


def test_without_finite_values_there_is_no_page(tmp_path):
    rows = judged_rows(60, 20)
    rows.values[rows.response_mask] = math.nan
    with pytest.raises(FileNotFoundError):
        write(tmp_path, rows)


def test_the_page_tells_what_the_run_was(tmp_path, monkeypatch):
    """A file that is scored in the folder of another run has its own command, and not that run's
    data."""
    monkeypatch.setattr(sys, "argv", ["ppo_loop.py", "--prompts", "my rows.jsonl"])
    models = {"actor": {"model": "a/b"}, "critic": {"model": "c"}}
    settings = {**models, "prompts": "my rows.jsonl"}
    common.Logger(str(tmp_path), settings, 0, None).board.close()
    text, _ = write(tmp_path, judged_rows(6, 2))
    told = dict(re.findall(r"(\w+): (.*?)<br>", text.partition("<details>")[2]))

    assert told["command"] == "ppo_loop.py --prompts &#39;my rows.jsonl&#39;"
    expected = {"actor": "a/b", "critic": "c", "data": "my rows.jsonl", "ranks": "1"}
    assert expected.items() <= told.items()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", told["date"])
    assert re.fullmatch(r"0:00:\d\d", told["duration"])

    monkeypatch.setattr(sys, "argv", ["critic_fsdp.py", "--score", "rows.jsonl"])
    text, _ = write(tmp_path, judged_rows(6, 2))
    assert "critic_fsdp.py --score rows.jsonl<br>" in text
    assert "my rows.jsonl" not in text


def test_the_figure_shows_what_the_critic_knows_by_place_and_by_value(tmp_path, monkeypatch):
    """By tenths of an answer and in bins of values, with and without true values, without a log."""
    for known in (False, True):
        panels = panels_of(monkeypatch)
        rows = judged_rows(60, 20)
        rows.values /= 8  # so that no tenth is far off
        if known:
            rows.truth = 2 * rows.returns
            rows.truth_noise = torch.zeros(len(rows.values))
        text, _ = write(tmp_path, rows)
        assert "What it knows" in text and "step by step" not in text
        places, bins = panels
        drawn = {line.get_label(): line.get_xydata().tolist() for line in places.lines}

        rows.returns = common.monte_carlo(rows, 1.0)
        m = common.evaluate(rows, 1.0)
        lines = {"returns": "eval/explained_var", "true values": "eval/truth_explained_var"}
        for words, name in [*lines.items()][: 1 + known]:
            assert drawn.pop(words) == [[k, m[f"{name}_tenth_{k}"]] for k in range(1, 11)]
        assert drawn == {}
        found, right = (line.get_xydata() for line in bins.lines)
        assert (found[:, 0] == right[:, 0]).all() and (right[:, 0] == right[:, 1]).all()

        # bins of six values: as many actions as there are, and their means
        pairs = sorted(sum(pairs_of(rows), []))
        step = -(-len(pairs) // 10)
        ends = [statistics.fmean(r for _, r in pairs[i : i + step]) for i in (0, 9 * step)]
        assert [found[0, 1], found[-1, 1]] == same(ends)


def test_panels_without_points_are_left_out(tmp_path, monkeypatch):
    """Here KL, which such a run does not have."""
    panels = panels_of(monkeypatch)
    log = [{"step": 1, "reward/mean": 0.5, "kl/reference": None}, {"step": 1, "actor/entropy": 1.0}]
    common.replace_lines(f"{tmp_path}/metrics.jsonl", log)
    text, _ = write(tmp_path, judged_rows(6, 2), curves=ppo_loop.CURVES)
    titles = [panel.get_title(loc="left") for panel in panels]
    assert titles == ["mean reward", "entropy of the policy", *common.PLACES]
    assert panels[0].get_legend() is None
    assert common.INK not in text
    assert "currentColor" in text


def test_the_page_of_a_long_run_is_small(tmp_path, monkeypatch):
    """Outliers at the start do not flatten explained variance."""
    panels = panels_of(monkeypatch)
    names = [name for panel in common.CURVES.values() for name in panel.values()]
    rng = random.Random(0)
    log = []
    for step in range(20_000):
        off = 9 if step < 40 else 0
        log.append({"step": step, **{name: rng.random() - off for name in names}})
    common.replace_lines(f"{tmp_path}/metrics.jsonl", log)
    text, _ = write(tmp_path, judged_rows(6, 2))
    assert panels[0].get_ylim()[0] == -1
    assert len(text) < 1e6


def a_sample(prompt, reward):
    """An answer with a tag and half a character."""
    return {"prompt": prompt, "response": f"<b>{prompt}</b>\ud83d", "reward": reward, "fault": ""}


LOG = [  # of two steps of PPO, with an evaluation before and after them
    {"step": 0, "eval/reward": 0.25, "eval/accuracy": 0.25},
    {"step": 1, "reward/mean": 0.125},
    {"step": 2, "reward/mean": 0.75},
    {"step": 2, "eval/reward": 0.5, "eval/accuracy": 0.5},
]
# answers row by row: two have one text, one is of another file, one failed
BEFORE = [a_sample(*x) for x in (("q", 0.0), ("q", 1.0), ("r", 1.0), ("s", 1.0), ("gone", 1.0))]
AFTER = [a_sample(*x) for x in (("q", 1.0), ("q", 1.0), ("r", 0.0), ("s", 1.5), ("new", 1.0))]
BEFORE.append(a_sample("t", 1.0))
AFTER.append(a_sample("t", 0.0) | {"fault": "KeyError"})


def write_log(folder, log):
    """The files of a run of PPO that the report reads."""
    common.replace_lines(f"{folder}/metrics.jsonl", log)
    common.write_json(folder / "samples_first.json", BEFORE)
    common.write_json(folder / "samples.json", AFTER)


def test_what_ppo_changed_is_told_prompt_by_prompt(tmp_path):
    """In the report, too, where texts of users stay texts."""
    write_log(tmp_path, LOG)
    changed = ppo_loop.what_changed(tmp_path)
    assert {name: x for name, (x, _) in changed["numbers"].items()} == {
        "accuracy": "0.250 → 0.500",
        "earn more than before": "2",
        "earn less": "1",
        "earn the same": "1",
    }
    assert changed["samples"] == {
        "earn more than before": [(BEFORE[0], AFTER[0]), (BEFORE[3], AFTER[3])],
        "earn less": [(BEFORE[2], AFTER[2])],
        "earn the same": [(BEFORE[1], AFTER[1])],
    }

    text, numbers = write(tmp_path, judged_rows(6, 2), curves=ppo_loop.CURVES, changed=changed)
    assert "<h1>What PPO changed</h1>" in text
    assert numbers["accuracy"] == "0.250 → 0.500"
    assert "&lt;b&gt;q&lt;/b&gt;?" in text
    assert "<b>q" not in text
    assert "of 4 held-out answers" in text
    order = ("0.250 → 0.500", "What the critic learned", "explained var")
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_without_evaluations_the_report_of_ppo_tells_of_the_steps(tmp_path):
    """Whatever samples an earlier run has left."""
    write_log(tmp_path, LOG[1:3])
    changed = ppo_loop.what_changed(tmp_path)
    words = "of the sampled responses, at step 1 and at step 2"
    assert changed == {"numbers": {"mean reward": ("0.125 → 0.750", words)}, "samples": {}}
    write(tmp_path, judged_rows(6, 2), curves=ppo_loop.CURVES, changed=changed)
    assert ppo_loop.what_changed(tmp_path / "none") is None


def test_the_first_samples_are_kept_when_a_run_goes_on(tmp_path, monkeypatch):
    """A resumed run keeps those of its first evaluation; a new run in this folder replaces them."""
    monkeypatch.chdir(tmp_path)
    addition_rows = ppo_loop.addition_rows
    few = lambda n, *args, **more: addition_rows(16, *args, **more)
    monkeypatch.setattr(ppo_loop, "addition_rows", few)
    flags = "--supervised-steps 0 --eval-every 1 --save-every 1 --actor.lr 0.1 --out-dir out"

    def samples_after(more):
        ppo_loop.main(ppo_loop.parse(f"{flags} {more}".split()))
        out = tmp_path / "out"
        return (out / "samples_first.json").read_text(), (out / "samples.json").read_text()

    first, then = samples_after("--steps 1")
    assert first != then
    assert len(json.loads(first)) == len(json.loads(then)) >= 16

    kept, _ = samples_after("--steps 2 --resume auto")
    assert kept == first
    log = common.read_lines(tmp_path / "out/metrics.jsonl")
    rated = [row for row in log if "eval/reward" in row]
    assert [row["step"] for row in rated] == [0, 1, 2]
    expected = f"<b>{rated[0]['eval/reward']:.3f} → {rated[-1]['eval/reward']:.3f}</b>"
    assert expected in (tmp_path / "out/report.html").read_text()

    replaced, _ = samples_after("--steps 1 --seed 1")
    assert replaced != first


def test_a_run_leaves_the_same_report_and_one_profile_on_any_number_of_ranks(tmp_path):
    """Without held-out rows it shows the rows of the last update, of which one of four ranks has
    none."""
    flags = ("--rollouts", ROOT / "tests" / "rows.jsonl", "--out-dir", "out")
    flags += ("--train-batch-size", 3, "--steps", 2, "--save-every", 1, "--profile-step", 2)
    command = (ROOT / "critic_fsdp.py", *flags)
    said = [succeeded(torchrun(ranks, *command, cwd=tmp_path)) for ranks in (1, 4)]
    alone, together = (re.findall(r"^report  .*\n.*$", words, flags=re.M) for words in said)
    assert alone == together, said
    assert len(alone) == 1, said
    assert "3 rows of the last update" in alone[0], said

    # the profile is from rank 0
    (trace,) = (tmp_path / "out" / "profile").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = collections.Counter(event["name"] for event in events)
    ranges = {"compute_values", "mini-batch", "micro-batch", "optimizer step", "save", "[memory]"}
    assert trace.name == "step_2.json.gz"
    assert ranges <= names.keys()
    assert names["update_critic"] == 1
    assert any("Input Dims" in event.get("args", {}) for event in events)  # shapes
