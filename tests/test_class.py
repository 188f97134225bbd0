"""The page on which a class moves lambda and gamma, in a browser, and what it says of its rows."""

import json
import re
import sys

import browser
import pytest
from browser import needs_browser, set_form
from helpers import ROOT, run, succeeded
from reference import gae_by_hand

import common

PAGE = ROOT / ".github" / "assets" / "gae.html"
ROWS = json.loads(re.search(r'id="rows">(.*?)</script>', PAGE.read_text(), flags=re.S)[1])
LINES = ["advantage", "reward", "value", "TD error", "return"]  # of each table


def expected(row, values, gamma, lam):
    """{line of the table: numbers}, from the textbook."""
    tokens = [(0, v, True) for v in values]
    tokens[-1] = (row["reward"], values[-1], True)
    rewards = [reward for reward, _, _ in tokens]
    advantages, returns = zip(*gae_by_hand(tokens, gamma, lam, 0.0))
    errors, _ = zip(*gae_by_hand(tokens, gamma, 0.0, 0.0))
    return dict(zip(LINES, (advantages, rewards, values, errors, returns), strict=True))


def tables(ask):
    """[(texts of the head, {line: numbers}, colours of the tokens) of each answer] on the page."""
    cells = "row => [...row.cells].map(cell => cell.textContent)"
    paint = "cell => getComputedStyle(cell).backgroundColor"
    read = f"table => [[...table.rows].map({cells}), [...table.rows[0].cells].map({paint})]"
    found = ask(f"[...document.querySelectorAll('table')].map({read})")
    numbers = lambda lines: {name: list(map(float, texts)) for name, *texts in lines}
    return [(head, numbers(lines), colours[1:]) for (head, *lines), colours in found]


def press(call, key, times):
    """Presses a key, as fingers do."""
    codes = {"ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
    for kind in ("rawKeyDown", "keyUp") * times:
        call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key])


def check(ask, gamma, lam, values_of=lambda row: row["critic"]):
    """All numbers on the page are those of the textbook."""
    found = tables(ask)
    for row, (head, lines, _) in zip(ROWS, found, strict=True):
        assert head == [row["prompt"], *row["response"], "end"]
        right = expected(row, values_of(row), gamma, lam)
        assert lines == {name: pytest.approx(x, abs=5.1e-4) for name, x in right.items()}
    return found


@needs_browser
def test_keys_move_the_sliders_and_the_advantages_follow():
    """From lambda and gamma 1 in steps of 0.05, by the keyboard alone."""
    with browser.page(PAGE) as call:
        ask = lambda expression: browser.evaluate(call, expression)
        outputs = "[...document.querySelectorAll('output')].map(x => x.textContent)"
        check(ask, 1.0, 1.0)

        browser.press_tab(call)
        assert ask("document.activeElement.id") == "lambda"
        press(call, "ArrowLeft", 1)
        check(ask, 1.0, 0.95)
        press(call, "ArrowLeft", 9)
        assert ask(outputs) == ["0.50", "1.00"]
        check(ask, 1.0, 0.5)

        browser.press_tab(call)
        press(call, "ArrowLeft", 2)
        assert ask(outputs) == ["0.50", "0.90"]
        check(ask, 0.9, 0.5)
        ask("document.getElementById('lambda').focus()")
        press(call, "ArrowLeft", 10)
        assert ask(outputs) == ["0.00", "0.90"]
        check(ask, 0.9, 0.0)


@needs_browser
def test_values_are_the_critics_the_true_ones_or_none():
    """Colours are praise and blame, at most as strong as the report's."""
    with browser.page(PAGE) as call:
        ask = lambda expression: browser.evaluate(call, expression)
        ask("document.getElementById('values').focus()")
        press(call, "ArrowDown", 1)
        check(ask, 1.0, 1.0, lambda row: row["truth"])
        press(call, "ArrowDown", 1)
        found = check(ask, 1.0, 1.0, lambda row: [0.0] * len(row["critic"]))

        # without values, an answer's tokens earn its reward alike
        for row, (_, _, colours) in zip(ROWS, found, strict=True):
            paint = "rgba(37, 99, 235, 0.65)" if row["reward"] else "rgba(249, 115, 22, 0)"
            assert set(colours) == {paint}


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(scheme):
    inks = {"light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"}
    with browser.page(PAGE) as call:
        ask = lambda expression: browser.evaluate(call, expression)
        for width in (360, 1280):
            set_form(call, width, scheme)
            assert ask("document.documentElement.scrollWidth") <= width
            for name in ("body", "td", "th", "output"):
                ink = f"getComputedStyle(document.querySelector('{name}')).color"
                assert ask(ink) == inks[scheme]


def test_the_rows_are_held_out_ones_with_their_true_values():
    """Right answers and wrong ones, with a carry and without one."""
    held_out = common.read_lines(ROOT / "tests" / "rows_held_out.jsonl")
    kinds = set()
    for row in ROWS:
        given = {key: row[key] for key in ("prompt", "response", "reward")}
        assert given in held_out
        a, b = map(int, row["prompt"].rstrip("=").split("+"))
        carries = a % 10 + b % 10 >= 10
        true = common.toy_truth(row["response"], str(a + b), str(a), 0.7 if carries else 0.2)
        assert row["truth"] == pytest.approx(true)
        kinds.add((carries, row["reward"]))
    assert {(True, 1), (True, 0), (False, 1)} <= kinds
    assert PAGE.read_text().count("http") == 0


@pytest.mark.slow  # a minute
def test_the_values_are_those_of_the_commands_on_the_page(tmp_path):
    """On another machine, training ends a little elsewhere."""
    for file in ("common.py", "critic_fsdp.py", "tests/rows_held_out.jsonl"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    commands = re.findall(r"^(?:<pre[^>]*>)?python (.*?)(?:</pre>)?$", PAGE.read_text(), flags=re.M)
    for command in commands:
        succeeded(run(sys.executable, *command.split(), cwd=tmp_path))

    scored = common.read_lines(tmp_path / "out" / "scored" / "scored.jsonl")
    for row in ROWS:
        values = next(
            x["values"]
            for x in scored
            if (x["prompt"], x["response"]) == (row["prompt"], row["response"])
        )
        assert row["critic"] == pytest.approx(values, abs=0.1)
    assert len(commands) == 2
