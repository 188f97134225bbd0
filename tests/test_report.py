"""What the critic learned: numbers against plain loops, and the page in a real browser. Also the profiler."""

import collections
import dataclasses
import gzip
import json
import math
import random
import re
import statistics
import types

import browser
import pytest
import torch
from helpers import ROOT, actions_of, random_batch, rows_of, succeeded, torchrun
from matplotlib.figure import Figure

import common
import ppo_loop

same = pytest.approx


def judged_rows(n, prompts, longest=12, gamma=1.0):
    """Rows that answer some prompts, rewarded with 0 or 1; returns and TD errors (as advantages) by hand."""
    rng = random.Random(0)
    rows = random_batch(n, longest=longest + 8, idle=False, prompts=prompts)
    columns = torch.zeros(3, len(rows.input_ids))
    rows.token_level_rewards, rows.returns, rows.advantages = columns
    for b, at in enumerate(actions_of(rows)):
        reward = int(rng.random() < (0.2, 0.7)[b % prompts % 2])
        rows.token_level_rewards[at[-1]] = ahead = tail = reward
        for t in reversed(at):
            rows.advantages[t] = ahead - float(rows.values[t])
            rows.returns[t] = tail
            ahead = gamma * float(rows.values[t])
            tail *= gamma
    return rows


def explained(pairs):
    """1 - Var(R - V) / Var(R) of (value, return) pairs."""
    returns = [r for _, r in pairs]
    return 1 - statistics.pvariance([r - v for v, r in pairs]) / statistics.pvariance(returns)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_every_number_equals_a_plain_loop(gamma, tmp_path):
    rows = judged_rows(150, 80, gamma=gamma)
    pairs = [[(float(rows.values[t]), float(rows.returns[t])) for t in at] for at in actions_of(rows)]
    groups = {}  # prompt -> (return at the first action, last value, reward) of its rows
    for (start, _), at, row in zip(rows_of(rows), actions_of(rows), pairs, strict=True):
        prompt = tuple(rows.input_ids[start : at[0]].tolist())
        groups.setdefault(prompt, []).append((row[0][1], *row[-1]))
    several = [group for group in groups.values() if len(group) > 1]
    within = statistics.fmean(statistics.variance(x[0] for x in group) for group in several for _ in group)
    ones, zeros = ([row[-1][0] for row in pairs if row[-1][1] == reward] for reward in (1, 0))
    expected = {
        "explained variance": explained(sum(pairs, [])),
        "at the first action": explained([row[0] for row in pairs]),
        "ceiling": 1 - within / statistics.variance(x[0] for x in sum(several, [])),
        "AUC": statistics.fmean((a > b) + 0.5 * (a == b) for a in ones for b in zeros),
        "best of n": statistics.fmean(max(group, key=lambda x: x[1])[2] for group in several),
        "mean of n": statistics.fmean(statistics.fmean(x[2] for x in group) for group in several),
        "oracle of n": statistics.fmean(max(x[2] for x in group) for group in several),
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

    def ceiling(prompts, returns):
        rows.input_ids[::2] = prompts
        rows.returns[1::2] = returns
        return common.ceiling(rows)

    assert ceiling(prompts, returns) == same(4 / 5, abs=0.02)
    assert ceiling(prompts, noise) == same(0, abs=0.03)
    assert math.isnan(ceiling(torch.arange(10_000), returns)) and math.isnan(ceiling(prompts, torch.ones(1)))
    assert math.isnan(ceiling(prompts, torch.arange(10_000) % 5))  # it falls below 0 by chance


def write(folder, rows, tokenizer=None, curves=common.CURVES, gamma=1.0):
    """(text of the page about some rows, its numbers)."""
    rows = dataclasses.replace(rows, returns=None, advantages=None)
    folder.mkdir(exist_ok=True)
    common.write_report(str(folder), rows, "rows of a test", tokenizer, gamma, curves)
    text = (folder / "report.html").read_text()
    return text, {name: x for x, name in re.findall(r"<td><b>(.*?)</b><td>(.*?)<td>", text)}


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium on this machine")
def test_a_mouse_on_a_token_shows_its_numbers_and_no_token_is_run(tmp_path):
    """Numbers equal TD errors by hand. The rows shown are those with the largest ones before the last action.
    The page cuts a long row and stays below 20 megabytes, but its numbers are for all tokens."""
    rows = common.concat([judged_rows(60, 20), judged_rows(1, 1, longest=6000)])
    rows.row_id = torch.arange(61)
    jumps = [max(rows.advantages[at[:-1]].abs().tolist(), default=0.0) for at in actions_of(rows)]
    worst = sorted(range(61), key=lambda b: -jumps[b])[:24]
    mean = ("<script>document.title = 'run'</script>", '<img src=x onerror="document.title = 1">', "&amp;")
    words = [mean[i % 3] for i in rows.input_ids.tolist()]
    text, numbers = write(tmp_path, rows, types.SimpleNamespace(decode=lambda ids: mean[ids[0] % 3]))
    pairs = [(float(rows.values[t]), float(rows.returns[t])) for at in actions_of(rows) for t in at]
    assert float(numbers["explained variance"]) == same(explained(pairs), abs=1e-3)
    twice, _ = write(tmp_path / "twice", common.concat([rows, rows]))
    assert twice.count("<pre ") == text.count("<pre ") == 24  # equal rows are shown once
    assert not re.search(r'(src|href)="[^#]', text) and 24 * len(text.split("<pre ")[1]) < 20e6
    ends = re.search(r"(\S+) \(orange\) to\s+(\S+) \(blue\)", text).groups()
    middle = statistics.fmean(map(float, ends))
    with browser.page(tmp_path / "report.html") as call:
        ask = lambda expression: browser.evaluate(call, expression)
        assert ask("document.title") == str(tmp_path) and ask("document.images.length") == 0
        assert ask("document.querySelector('svg').getBoundingClientRect().width") > 500
        shown = ask("Array.from(document.querySelectorAll('pre'), x => x.textContent)")
        texts = ["".join(words[start:end][:2000]) for start, end in rows_of(rows)]
        assert rows.longest[0] > 2000 and shown == [texts[b] for b in worst]
        start = actions_of(rows)[worst[0]][0]
        for t in range(start, start + 10):
            browser.hover(call, f"pre span:nth-child({t - start + 1})")
            style = "getComputedStyle(x).backgroundColor"
            found = ask(f"(x => [x.textContent, x.title, {style}])(document.querySelector('span:hover'))")
            told = re.fullmatch(r"value (.+)\nreturn (.+)\nTD error (.+)", found[1]).groups()
            expected = [float(x[t]) for x in (rows.values, rows.returns, rows.advantages)]
            assert found[0] == words[t] and list(map(float, told)) == same(expected, rel=1e-2, abs=1e-6)
            color = "(37, 99, 235" if rows.values[t] > middle else "(249, 115, 22"
            assert color in found[2] or not rows.response_mask[t]


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of processes that other tests left running
@pytest.mark.parametrize("case", ["one row", "equal rewards", "a row without actions", "not 0 or 1"])
def test_unusual_rows_have_a_report(tmp_path, case):
    rows = judged_rows(1 if case == "one row" else 12, 5)
    rows.token_level_rewards *= {"equal rewards": 0, "not 0 or 1": 2}.get(case, 1)
    if case == "a row without actions":
        rows.response_mask[slice(*rows_of(rows)[3])] = False
    _, numbers = write(tmp_path, rows)
    assert (numbers["AUC"] == "--") == (case != "a row without actions")
    assert (numbers["explained variance"] == "--") == (case in ("one row", "equal rewards"))


@pytest.mark.parametrize("curves", [common.CURVES, ppo_loop.CURVES])
def test_the_figure_shows_the_metrics(tmp_path, curves, monkeypatch):
    """It draws the log, in which null was not finite. Without finite values there is no page."""
    panels = []
    add = Figure.add_subplot
    note = lambda *args, **options: panels.append(add(*args, **options)) or panels[-1]
    monkeypatch.setattr(Figure, "add_subplot", note)
    names = sum(curves.values(), ())
    log = [{name: (7 * step + i) % 5 or None for i, name in enumerate(names)} for step in range(9)]
    common.replace_lines(tmp_path / "metrics.jsonl", [{"step": s, **row} for s, row in enumerate(log)])
    rows = judged_rows(60, 20)
    write(tmp_path, rows, curves=curves)
    assert [panel.get_ylabel() for panel in panels] == list(curves)
    for panel, names in zip(panels, curves.values()):
        drawn = {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
        assert drawn == {name: [[s, row[name]] for s, row in enumerate(log) if row[name]] for name in names}
    (tmp_path / "report.html").unlink()
    rows.values[rows.response_mask] = math.nan
    with pytest.raises(FileNotFoundError):
        write(tmp_path, rows)


def test_a_run_leaves_the_same_report_on_any_number_of_ranks(tmp_path):
    """Without held-out rows it shows the rows of the last update, of which one of four ranks has none."""
    flags = (ROOT / "critic_fsdp.py", "--rollouts", ROOT / "tests" / "rows.jsonl", "--out-dir", "out")
    flags += ("--train-batch-size", 3, "--steps", 2, "--save-every", 1, "--profile-step", 2)
    said = [succeeded(torchrun(ranks, *flags, cwd=tmp_path)) for ranks in (1, 4)]
    alone, together = (re.findall(r"^report  .*\n.*$", words, flags=re.M) for words in said)
    assert alone == together and len(alone) == 1 and "3 rows of the last update" in alone[0], said
    (trace,) = (tmp_path / "out" / "profile").iterdir()  # from rank 0
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = collections.Counter(event["name"] for event in events)
    ranges = {"compute_values", "mini-batch", "micro-batch", "optimizer step", "save", "[memory]"}
    assert trace.name == "step_2.json.gz" and ranges <= names.keys() and names["update_critic"] == 1
    assert any("Input Dims" in event.get("args", {}) for event in events)  # shapes
