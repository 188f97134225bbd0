"""The page of the class, and the one on which it moves lambda and gamma, in a browser."""

import json
import re
import shlex
import sys
import types
from statistics import fmean

import browser
import pytest
from browser import needs_browser, set_form
from helpers import ROOT, run, succeeded
from reference import gae_by_hand

import common

CLASS = (ROOT / "tests" / "lessons" / "class.md").read_text()
SAID = " ".join(CLASS.split())  # on one line
PAGE = ROOT / "tests" / "lessons" / "gae.html"
ROWS = json.loads(re.search(r'id="rows">(.*?)</script>', PAGE.read_text(), flags=re.S)[1])
LINES = ["advantage", "reward", "value", "TD error", "return"]  # of each table


def numbers_of(row):
    """The two numbers that a row adds."""
    return map(int, row["prompt"].rstrip("=").split("+"))


def carries(row):
    return sum(x % 10 for x in numbers_of(row)) >= 10


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
        a, b = numbers_of(row)
        slip = 0.7 if carries(row) else 0.2
        true = common.toy_truth(row["response"], str(a + b), str(a), slip)
        assert row["truth"] == pytest.approx(true)
        kinds.add((carries(row), row["reward"]))
    assert {(True, 1), (True, 0), (False, 1)} <= kinds
    assert PAGE.read_text().count("http") == 0


def test_the_table_of_the_words_is_right():
    """And what its advantages are with lambda 0 and 1."""
    section = CLASS.partition("\n## The words")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| ([A-Za-z ]+) \| ([-\d. |]+) \|$", section, flags=re.M)
    table = {name: list(map(float, cells.split(" | "))) for name, cells in lines}
    assert list(table) == ["value", "reward", "TD error", "advantage"]
    assert table["reward"] == [0, 0, 1]

    row = {"reward": 1}
    right = {lam: expected(row, table["value"], 1.0, lam) for lam in (0.0, 0.5, 1.0)}
    for name, numbers in table.items():
        assert numbers == pytest.approx(right[0.5][name])
    assert right[0.0]["advantage"] == pytest.approx(table["TD error"])
    assert right[1.0]["advantage"] == pytest.approx([0.8, 0.5, 0.1])
    assert "With 1 they are 0.8, 0.5 and 0.1" in SAID


@pytest.mark.parametrize(
    ("answer", "token", "gamma", "lam", "words"),
    [
        (0, 0, 1, 1, "The first digit: {} and"),
        (1, 0, 1, 1, "The first digit: 0.656 and {}."),
        (0, 0, 1, 0, "With lambda 0 these are {} and"),
        (1, 0, 1, 0, "With lambda 0 these are 0.659 and {}:"),
        (2, 1, 1, 1, "it gets {} too much praise"),
        (2, 0, 1, 0, "`5` is blamed as well, by {},"),
    ],
)
def test_the_class_is_told_right_advantages(answer, token, gamma, lam, words):
    row = ROWS[answer]
    advantage = expected(row, row["critic"], gamma, lam)["advantage"][token]
    assert words.format(f"{advantage:.3f}") in SAID


def told_right(words, numbers, abs=0.05):
    """Asserts that the page has these words, with these numbers at {}, or nearly: on another
    machine, training ends a little elsewhere."""
    pattern = re.escape(words).replace(r"\{\}", r"(-?\d\.\d+)")
    shown = re.search(pattern, SAID).groups()
    assert list(map(float, shown)) == pytest.approx(numbers, abs=abs), words


def test_the_commands_of_the_class_say_what_its_page_says(tmp_path):
    """PPO has fewer steps here."""
    blocks = re.findall(r"^```bash \w+\n(.*?)^```", CLASS, flags=re.M | re.S)
    lines = [block.replace("\\\n", "").replace(".venv/bin/", "") for block in blocks]
    ready, ppo, critic, lam_0 = (line.split(" && ")[-1] for line in lines)
    score = re.search(r"^python .* --score [^<]*", PAGE.read_text(), flags=re.M)[0]

    def do(line):
        _, script, *flags = shlex.split(line)
        return succeeded(run(sys.executable, ROOT / script, *flags, cwd=tmp_path))

    assert do(ready).splitlines()[-1].startswith("saved ")
    table = do(ppo.replace("--steps 160", "--steps 8")).splitlines()[-2:]
    for line, recipe in zip(table, re.findall('"([^"]+)"', ppo), strict=True):
        assert line.startswith(f"| {recipe} |")
    assert (tmp_path / "out" / "class" / "ablations.png").is_file()

    for line in (critic, lam_0, score.replace("tests/", f"{ROOT}/tests/")):
        do(line)
    check_learning(*(evaluations(tmp_path / "out" / x) for x in ("critic_fsdp", "lam_0")))
    check_values(common.read_lines(tmp_path / "out" / "scored" / "scored.jsonl"))


def evaluations(folder):
    """Metrics of held-out rows before training, and then every 20 steps."""
    return [row for row in common.read_lines(folder / "metrics.jsonl") if "eval/auc" in row]


def check_learning(one, zero):
    """What the class is told of lambda 1 and 0, after 20 steps and at the end."""
    told_right("themselves explain {}", [one[-1]["eval/knowable"]])
    told_right("This one explains {},", [one[-1]["eval/explained_var"]])
    told_right("themselves it explains {}.", [one[-1]["eval/truth_explained_var"]])
    for name, at, words in (
        ("auc", 1, "(AUC {} with lambda 0, {} with 1)"),
        ("explained_var", 1, "explain {} instead of {} and are flatter"),
        ("flatness", 1, "(flatness {} instead of {})"),
        ("explained_var", -1, "caught up: {} and {}."),
    ):
        told_right(words, [zero[at][f"eval/{name}"], one[at][f"eval/{name}"]])


def check_values(scored):
    """The values on the page of lambda are those of its commands, and their means those that the
    class is told."""
    values = {(row["prompt"], row["response"]): row["values"] for row in scored}
    for row in ROWS:
        assert row["critic"] == pytest.approx(values[row["prompt"], row["response"]], abs=0.1)

    mean = lambda place, wanted: fmean(row["values"][place] for row in scored if wanted(row))
    easy = lambda row: not carries(row)
    right = lambda row: row["reward"] == 1
    wrong = lambda row: row["reward"] == 0
    told_right("says {} with a carry and {} without one", [mean(0, carries), mean(0, easy)])
    told_right("{} before the second digit of right", [mean(1, right)])
    told_right("right answers, and {} of wrong ones", [mean(1, wrong)])


NANO = ROOT / "tests" / "lessons" / "nano_critic.py"
SHIFT = "return F.pad(said_BL[:, :-1], (1, 0))"
ADVANTAGES = 'whiten(batch["advantages"], batch["is_action"])'
REWARDS = 'batch["rewards"].sum(1, keepdim=True).expand_as(batch["values"])'
CHANGES = {  # first cell of the page's table -> what nano_critic.py has, and what a student writes
    "none": (SHIFT, SHIFT),
    "`LAMBDA = 0.0`": ("LAMBDA = 0.95", "LAMBDA = 0.0"),
    "`return said_BL`": (SHIFT, "return said_BL"),
    "without a critic": (ADVANTAGES, f'whiten({REWARDS}, batch["is_action"])'),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_nano_does_what_the_class_is_told(change, capsys):
    """The loss and the reward of the page's table, and the numbers of its reasons."""
    old, new = CHANGES[change]
    source = NANO.read_text()
    assert source.count(old) == 1 and (new == SHIFT or new in SAID)
    nano = types.ModuleType("nano")
    nano.__file__ = str(NANO)
    exec(source.replace(old, new), vars(nano))

    # keeps the rows of each update and their advantages, which main whitens
    seen = []
    assign_credit = nano.assign_credit

    def assign_and_keep(rows, critic):
        assign_credit(rows, critic)
        seen.append((rows, rows["advantages"]))

    nano.assign_credit = assign_and_keep
    nano.main()
    said = capsys.readouterr().out

    cells = re.search(rf"^\| {re.escape(change)} \| (\S+) \| (\S+) \| (\S+)", CLASS, flags=re.M)
    loss, reward, mean = map(float, cells.groups())
    [last] = re.findall(r"^critic 20 +loss (\S+)", said, flags=re.M)
    [end] = re.findall(r"^ppo 15 +reward (\S+)", said, flags=re.M)
    assert float(last) == pytest.approx(loss, abs=0.008)
    assert float(end) == pytest.approx(reward, abs=0.1) and mean == pytest.approx(reward, abs=0.1)

    # after the critic's 20 updates come the held-out rows, then PPO's 15 steps
    held_out, ppo = seen[20], seen[21:]
    assert len(ppo) == 15
    if change == "none":
        told_right("where it was {} and {}. A baseline", firsts(*held_out), abs=0.1)
        told_right("gives {} and {}.", firsts(*ppo[4])[::-1], abs=0.1)
        check_noise(ppo)
    elif change == "`return said_BL`":
        told_right("it is {} in right answers and {} in wrong ones,", firsts(*held_out), abs=0.1)
    elif change == "`LAMBDA = 0.0`":
        rows, _ = ppo[4]
        told_right("of the first digit is {} and {}, where", firsts(*ppo[4])[::-1], abs=0.1)
        second = firsts(rows, rows["values"], 7)[::-1]
        told_right("{} before the second digit of wrong answers, and {} of right", second, abs=0.1)


def firsts(rows, x_BL, place=6):
    """Means at a place, the first digit of the answer, over right answers and over wrong ones."""
    right_B = rows["rewards"].sum(1) == 1
    acted_B = rows["is_action"][:, place]
    return [float(x_BL[which_B & acted_B, place].mean()) for which_B in (right_B, ~right_B)]


def noise_of(rows):
    """(B, L) the noise (1 - p)^2 (G - b)^2 that tokens bring to the actor's gradient, with the mean
    of all returns as b, and with the critic's values."""
    mask_BL = rows["is_action"]
    return_BL = rows["rewards"].sum(1, keepdim=True).expand_as(rows["values"])
    weight_BL = (1 - rows["log_probs"].exp()).square() * mask_BL
    baselines = (return_BL[mask_BL].mean(), rows["values"])
    return [weight_BL * (return_BL - b).square() for b in baselines]


def check_noise(ppo):
    """What the class is told of it, in steps 1 and 10 of PPO."""
    first, tenth = ppo[0][0], ppo[9][0]
    mean_BL, _ = noise_of(first)
    told_right(
        "In step 1, {} of the [noise]", [float(mean_BL[:, 6].sum() / mean_BL.sum())], abs=0.1
    )
    expected, earned = first["values"][:, 6].mean(), first["rewards"].sum(1).mean()
    told_right("where it expects {} and {} is earned", [float(expected), float(earned)], abs=0.1)

    ratios = []
    for rows in (first, tenth):
        mean_BL, critic_BL = noise_of(rows)
        ratios.append(float(critic_BL.sum() / mean_BL.sum()))
    assert ratios[0] > 1.2 and ratios[1] < 1
    told_right("leaves {} times the mean's noise", ratios[:1], abs=0.3)
    told_right("is earned, and {} times in step 10", ratios[1:], abs=0.2)
