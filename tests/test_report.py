"""What the critic learned: statistics against plain loops, the page in a real browser, the data check, the profiler."""

import dataclasses
import gzip
import json
import math
import random
import re
import statistics
import sys
import time

import browser
import pytest
import torch
from helpers import ROOT, random_batch, rows_of, run, succeeded, torchrun

import common
from common import UserError
from critic_fsdp import Config, Run

needs_browser = pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium on this machine")


def judged_rows(n, prompts, seed=0, gamma=1.0, longest=12):
    """n rows that answer some prompts, rewarded with 0 or 1, and values that know a little of it."""
    rng, batches = random.Random(seed), []
    for i in range(n):
        prompt, length, reward = rng.randrange(prompts), rng.randrange(1, longest), float(rng.random() < 0.4)
        ids = [40 + prompt % 50, 40 + prompt // 50] + [rng.randrange(5, 90) for _ in range(length)]
        mask = [False, False] + [rng.random() < 0.8 for _ in range(length - 1)] + [True]
        values = [own * (rng.random() * 1.2 - 0.1 + 0.2 * reward) for own in mask]
        batches.append(common.Batch(
            input_ids=torch.tensor(ids), cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32),
            response_mask=torch.tensor(mask), row_id=torch.tensor([i]), truncated=torch.tensor([False]),
            token_level_rewards=torch.tensor([0.0] * (len(ids) - 1) + [reward]), values=torch.tensor(values),
        ))  # fmt: skip
    rows = common.concat(batches)
    nothing = torch.zeros(len(rows.input_ids))
    _, rows.returns = common.gae(rows.token_level_rewards, nothing, rows.response_mask, rows.cu_seqlens, gamma, lam=1.0)
    return rows


def td_errors(rows, gamma):
    """r + gamma v' - v of each action, by hand."""
    out = torch.zeros(len(rows.input_ids))
    for start, end in rows_of(rows):
        at = [t for t in range(start, end) if rows.response_mask[t]]
        for t, after in zip(at, at[1:] + [None], strict=True):
            ahead = 0.0 if after is None else gamma * float(rows.values[after])
            out[t] = float(rows.token_level_rewards[t]) + ahead - float(rows.values[t])
    return out


def explained(pairs):
    """1 - Var(R - V) / Var(R) of (value, return) pairs."""
    returns = [r for _, r in pairs]
    return 1 - statistics.pvariance([r - v for v, r in pairs]) / statistics.pvariance(returns)


def area(scores):
    """Part of the pairs of a right and a wrong one in the right order: [(score, label)]."""
    ones, zeros = ([s for s, label in scores if label == x] for x in (1, 0))
    return statistics.fmean((a > b) + 0.5 * (a == b) for a in ones for b in zeros)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_every_number_and_curve_equals_a_plain_loop(gamma):
    rows = judged_rows(150, 40, gamma=gamma)
    actions, firsts, lasts = [], [], []  # (value, return, label, place, length, prompt)
    for start, end in rows_of(rows):
        at = [t for t in range(start, end) if rows.response_mask[t]]
        label, prompt = float(rows.token_level_rewards[start:end].sum()), tuple(rows.input_ids[start : at[0]].tolist())
        mine = [
            (float(rows.values[t]), label * gamma ** (len(at) - 1 - k), label, k / max(len(at) - 1, 1), len(at), prompt)
            for k, t in enumerate(at)
        ]
        actions, firsts, lasts = actions + mine, firsts + mine[:1], lasts + mine[-1:]
    same = pytest.approx
    numbers, curves = common.learned(rows, td_errors(rows, gamma), gamma)
    pairs = lambda rows: [row[:2] for row in rows]
    assert numbers["explained_var"] == same(explained(pairs(actions)), abs=1e-3)
    assert numbers["explained_var_first"] == same(explained(pairs(firsts)), abs=1e-3)
    assert numbers["explained_var_last"] == same(explained(pairs(lasts)), abs=1e-3)
    assert numbers["vf_loss"] == same(0.5 * statistics.fmean((v - r) ** 2 for v, r, *_ in actions), rel=1e-3)
    assert numbers["constant_loss"] == same(0.5 * statistics.pvariance([r for _, r, *_ in actions]), rel=1e-3)
    assert numbers["auc"] == same(area([(v, label) for v, _, label, *_ in lasts]), abs=1e-3)
    assert numbers["td_error_std"] == same(
        statistics.pstdev(td_errors(rows, gamma)[rows.response_mask].tolist()), rel=1e-3
    )

    judged = actions if gamma == 1 else lasts
    chance = lambda v: min(max(v, 0.0), 1.0)
    assert numbers["brier"] == same(statistics.fmean((chance(v) - y) ** 2 for v, _, y, *_ in judged), rel=1e-3)
    rate = statistics.fmean(y for _, _, y, *_ in judged)
    assert numbers["brier_constant"] == same(rate * (1 - rate), rel=1e-3)
    bins = [[(chance(v), y) for v, _, y, *_ in judged if min(int(chance(v) * 15), 14) == k] for k in range(15)]
    means = [[statistics.fmean(x) for x in zip(*part, strict=True)] + [len(part)] for part in bins if part]
    assert numbers["ece"] == same(sum(n * abs(p - y) for p, y, n in means) / len(judged), rel=1e-3)
    assert [x for point in curves["calibration"] for x in point] == same(
        [x for m in means for x in m], rel=1e-3, abs=1e-6
    )

    groups = {}
    for row in firsts:
        groups.setdefault(row[5], []).append(row[1])
    several = [group for group in groups.values() if len(group) > 1]
    total = [r for group in several for r in group]
    within = statistics.fmean(statistics.variance(group) for group in several for _ in group)
    assert numbers["ceiling"] == same(1 - within / statistics.variance(total), abs=1e-3)
    shifted = []
    for prompt in groups:
        mine = [row for row in lasts if row[5] == prompt]
        centre = [statistics.fmean(x) for x in zip(*pairs(mine), strict=True)]
        shifted += [(v - centre[0], r - centre[1]) for v, r, *_ in mine if len(mine) > 1]
    assert numbers["explained_var_within"] == same(explained(shifted), abs=1e-3)
    by_prompt = [pairs([row for row in actions if row[5] == p]) for p in groups if len(groups[p]) > 1]
    by_prompt = sorted(explained(x) for x in by_prompt if statistics.pvariance([r for _, r in x]) > 1e-12)
    assert curves["by prompt"] == same(by_prompt, rel=1e-3, abs=1e-3)
    dots = [(statistics.fmean(row[0] for row in firsts if row[5] == p), statistics.fmean(groups[p])) for p in groups]
    dots = sorted(dot for p, dot in zip(groups, dots, strict=True) if len(groups[p]) > 1)
    assert [x for dot in sorted(curves["value and return"]) for x in dot] == same(
        [x for dot in dots for x in dot], abs=1e-3
    )

    tenths = [[row for row in actions if min(int(row[3] * 10), 9) == k] for k in range(10)]
    tenths = [part for part in tenths if part]
    for k, part in enumerate(tenths):
        assert curves["by position"][k] == same(
            [statistics.fmean(r[3] for r in part), explained(pairs(part))], abs=1e-3
        )
        assert curves["auc by position"][k][1] == same(area([(v, y) for v, _, y, *_ in part]), abs=1e-3)
    assert len(tenths) == len(curves["by position"]) == 10
    for low, high, x in curves["by length"]:
        assert x == same(explained(pairs([row for row in actions if low <= row[4] <= high])), abs=1e-3)
    assert sum(1 for row in actions if curves["by length"][0][0] <= row[4] <= curves["by length"][-1][1]) == len(
        actions
    )
    for (_, edges, counts), label in zip(curves["values"], (1, 0), strict=True):
        assert sum(counts) == sum(row[2] == label for row in actions) and len(edges) == len(counts) + 1


def test_the_ceiling_is_what_knowing_each_prompt_explains():
    """Returns = a part of the prompt + noise, in known amounts; and where there is nothing to say."""
    g = torch.Generator().manual_seed(0)
    group = torch.arange(2000).repeat_interleave(5)
    returns = 2 * torch.randn(2000, generator=g)[group] + torch.randn(10000, generator=g)
    assert common.ceiling(returns, group) == pytest.approx(4 / 5, abs=0.02)
    assert common.ceiling(torch.randn(10000, generator=g), group) == pytest.approx(0, abs=0.03)
    assert math.isnan(common.ceiling(returns, torch.arange(10000))) and math.isnan(
        common.ceiling(torch.ones(4), group[:4])
    )


def test_a_calibrated_critic_lies_on_the_diagonal():
    g = torch.Generator().manual_seed(0)
    chance = torch.rand(200_000, generator=g)
    happened = (torch.rand(200_000, generator=g) < chance).float()
    bins = common.calibration(chance, happened)
    assert (bins[:, 0] - bins[:, 1]).abs().max() < 0.02 and common.calibration_error(bins) < 0.01
    assert common.calibration_error(common.calibration(chance.sqrt(), happened)) > 0.1
    assert common.brier(chance, happened) == pytest.approx(1 / 6, abs=0.003)


def test_prompts_are_told_apart_by_tokens_and_images():
    rows = judged_rows(30, 4)
    keys = [
        tuple(rows.input_ids[s : s + int(rows.response_mask[s:e].int().argmax())].tolist()) for s, e in rows_of(rows)
    ]
    groups = common.prompt_groups(rows).tolist()
    assert all((keys[a] == keys[b]) == (groups[a] == groups[b]) for a in range(30) for b in range(30))
    rows.multi_modal_inputs = [{"images": [f"{i}.png"]} for i in range(30)]
    assert common.prompt_groups(rows).tolist() == list(range(30))


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def write(tmp_path, rows, tokenizer=None, name="report.html", **flags):
    """The report on some rows as a run would write it -> its path and text."""
    config = Run(out_dir=str(tmp_path), report=str(tmp_path / name), **flags)
    common.check_report(config)
    common.write_report(config, tokenizer, rows, None)
    return tmp_path / name, (tmp_path / name).read_text()


def parts_of(text, name):
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, flags=re.S)[1])


class Mean:
    """A tokenizer whose tokens are what a page must not run."""

    words = [
        "<script>document.title = 'run'</script>",
        "<img src=x onerror=\"document.title = 'run'\">",
        "a&amp;b",
        "\n",
    ]

    def decode(self, ids):
        return self.words[ids[0] % 4]

    def convert_ids_to_tokens(self, i):
        return self.words[i % 4]


@needs_browser
def test_a_mouse_on_a_token_shows_its_numbers_and_no_token_runs(tmp_path):
    rows = judged_rows(60, 20)
    path, text = write(tmp_path, rows, Mean())
    assert "<script>document.title" not in text and "http" not in re.sub(r'"http://www.w3.org[^"]*"', "", text)
    shown, kinds = parts_of(text, "payload")["rows"], parts_of(text, "payload")["kinds"]
    first = shown[next(iter(kinds.values()))[0]]
    start, end = rows_of(rows)[first["row"]]
    columns = (rows.token_level_rewards, rows.values, rows.response_mask, rows.cu_seqlens)
    advantages, _ = common.gae(*columns)
    with browser.page(path) as call:
        assert browser.evaluate(call, "document.title") == "What the critic learned"
        assert browser.evaluate(call, "document.images.length") == len(common.SECTIONS)  # and none from a token
        assert browser.evaluate(call, "Array.from(document.images).every(x => x.naturalWidth > 500)")
        for t in range(start, end):
            browser.hover(call, f'#rows .row:first-child [data-at$=",{t - start}"]')
            tip = browser.evaluate(call, "getComputedStyle(tip).display + ' ' + tip.textContent")
            assert tip.startswith("block " + json.dumps(Mean.words[int(rows.input_ids[t]) % 4])), tip
            numbers = [float(x) for x in re.findall(r"^(?:value|return|TD error|advantage) +(\S+)$", tip, flags=re.M)]
            told = (rows.values, rows.returns, td_errors(rows, 1.0), advantages)
            expected = [float(x[t]) for x in told] if rows.response_mask[t] else []
            assert numbers == pytest.approx(expected, rel=1e-2, abs=1e-6)
        browser.hover(call, "h1")
        assert browser.evaluate(call, "tip.style.display") == "none"
        for kind in kinds:
            browser.evaluate(call, f"kind.value = {json.dumps(kind)}; kind.onchange()")
            assert browser.evaluate(call, "document.querySelectorAll('#rows .row').length") == len(kinds[kind])
        shades = "Array.from(document.querySelectorAll('.action')).map(x => x.style.background).join()"
        seen = {browser.evaluate(call, f"key.value = '{k}'; key.onchange(); {shades}") for k in "vrda"}
        assert len(seen) == 4  # coloured by each


def test_ten_thousand_responses_are_a_sample_below_twenty_megabytes(tmp_path):
    """Long ones, in values that compress badly; the numbers are still those of all."""
    n, length, g = 10_000, 300, torch.Generator().manual_seed(0)
    mask = torch.ones(n, length, dtype=torch.bool)
    mask[:, :20] = False
    ids = torch.randint(0, 2000, (n, length), generator=g)
    ids[:, :20] = ids[torch.arange(n) // 4, :20]
    rewards = torch.zeros(n, length)
    rewards[:, -1] = (torch.rand(n, generator=g) < 0.4).float()
    rows = common.Batch(
        input_ids=ids.flatten(), cu_seqlens=torch.arange(n + 1, dtype=torch.int32) * length,
        response_mask=mask.flatten(), row_id=torch.arange(n), truncated=torch.zeros(n, dtype=torch.bool),
        token_level_rewards=rewards.flatten(), values=torch.randn(n * length, generator=g) * mask.flatten(),
    )  # fmt: skip
    path, text = write(tmp_path, rows)
    report, shown = parts_of(text, "report"), parts_of(text, "payload")["rows"]
    print(f"\n  {path.stat().st_size / 2**20:.1f} MiB, {len(shown)} rows shown")
    assert path.stat().st_size < 20e6
    assert f"A sample: {len(shown)} of the 10,000 rows" in text and 40 < len(shown) <= 64
    assert report["rows"][0] == n
    assert sum(sum(counts) for *_, counts in report["curves"]["values"]) == pytest.approx(n * 280, rel=1e-2)


def test_the_rows_shown_are_the_same_in_any_order_and_worth_it():
    rows = judged_rows(200, 50)
    td = td_errors(rows, 1.0)
    kinds = common.rows_to_show(rows, td)
    inner = lambda b: max(
        [abs(x) for x in td[slice(*rows_of(rows)[b])][rows.response_mask[slice(*rows_of(rows)[b])]][:-1]], default=0.0
    )
    best = sorted(range(200), key=lambda b: -float(inner(b)))[:16]
    assert set(kinds["largest TD errors before the end"]) == set(best)
    wrong = lambda b: statistics.fmean(
        abs(float(rows.values[t] - rows.returns[t])) for t in range(*rows_of(rows)[b]) if rows.response_mask[t]
    )
    assert set(kinds["most wrong"]) == set(sorted(range(200), key=lambda b: -wrong(b))[:16])
    prompts = common.prompt_groups(rows).tolist()
    picked = [prompts[b] for b in kinds["several responses to a prompt"]]
    assert all(picked.count(p) > 1 for p in picked[:-4]) and len(picked) == 16
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1)).tolist()
    again = common.gather(rows.select(order))  # as ranks that own rows in any order would
    assert torch.equal(again.row_id, rows.row_id) and common.rows_to_show(again, td_errors(again, 1.0)) == kinds


@pytest.mark.parametrize("case", ["one row", "equal rewards", "a row without actions", "not 0 or 1"])
def test_odd_rows_have_a_report_too(tmp_path, case, recwarn):
    rows = judged_rows(1 if case == "one row" else 12, 5)
    if case == "equal rewards":
        rows.token_level_rewards = torch.zeros_like(rows.token_level_rewards)
    if case == "not 0 or 1":
        rows.token_level_rewards = torch.randn(len(rows.input_ids)) * rows.response_mask
    if case == "a row without actions":
        rows.response_mask[slice(*rows_of(rows)[3])] = False
        rows.token_level_rewards[~rows.response_mask] = 0
    _, text = write(tmp_path, rows)
    numbers = parts_of(text, "report")["numbers"]
    assert parts_of(text, "report")["rows"][0] == len(rows) and not list(recwarn), [str(w.message) for w in recwarn]
    assert (numbers["brier"] is None) == (case != "a row without actions")
    assert (numbers["explained_var"] is None) == (case in ("one row", "equal rewards")), numbers


def test_two_reports_are_compared_and_what_is_none_is_refused(tmp_path, capsys):
    rows = judged_rows(80, 20)
    before, _ = write(tmp_path, rows, name="before.html")
    better = dataclasses.replace(rows, values=0.5 * (rows.values + rows.returns) * rows.response_mask)
    capsys.readouterr()
    path, text = write(tmp_path, better, name="after.html", report_against=str(before))
    old, new = (parts_of(p.read_text(), "report")["numbers"] for p in (before, path))
    assert new["explained_var"] > old["explained_var"]
    said, cells = capsys.readouterr().out, f'<td class="n">{new["brier"]:.3f}</td><td class="n">{old["brier"]:.3f}</td>'
    assert f"explained variance {new['explained_var']:.3f} / {old['explained_var']:.3f}," in said
    assert cells in text and "measured on the same rows" in text
    _, text = write(tmp_path, judged_rows(60, 20, seed=1), name="other.html", report_against=str(before))
    assert "measured on other rows" in text
    notes = tmp_path / "notes.html"
    notes.write_text("<html>mine</html>")
    refused = {
        f"--report {notes}: is not a report that these scripts wrote": {"report": str(notes)},
        f"--report {tmp_path / 'report.txt'}: must end in .html": {"report": str(tmp_path / "report.txt")},
        "--report /proc/x: ": {"report": "/proc/x/report.html"},
        f"--report-against {notes}: is not a report": {"report_against": str(notes)},
        f"--report-against {tmp_path / 'none.html'}: No such file": {"report_against": str(tmp_path / "none.html")},
        f"--report-against {tmp_path}: Is a directory": {"report_against": str(tmp_path)},
        "--report-against: compares reports; drop --report none": {"report": "none", "report_against": str(before)},
    }
    for message, flags in refused.items():
        with pytest.raises(UserError, match=re.escape(message)):
            common.validate_run(Run(out_dir=str(tmp_path), **flags))
    assert notes.read_text() == "<html>mine</html>"


def test_a_run_leaves_the_same_report_on_any_number_of_ranks(tmp_path):
    """Without held-out rows, on the rows of the last update, which have to be gathered; one rank of two is profiled."""
    flags = (ROOT / "critic_fsdp.py", "--rollouts", ROOT / "tests" / "rows.jsonl", "--steps", 2)
    flags += ("--ppo-mini-batch-size", 64, "--report", "some/report.html")
    out = succeeded(run(sys.executable, *flags, "--out-dir", "one", cwd=tmp_path))
    one = (tmp_path / "some" / "report.html").read_text()
    both = ("--report-against", "some/report.html", "--profile-steps", "2:2", "--profile-ranks", 1, "--out-dir", "two")
    said = succeeded(torchrun(2, *flags, *both, cwd=tmp_path))
    two = (tmp_path / "some" / "report.html").read_text()
    (one, numbers), (two, again) = ((x, x["numbers"]) for x in (parts_of(one, "report"), parts_of(two, "report")))
    assert one["rows"] == two["rows"] and one["rows"][0] == 64 and len(one["curves"]["training"]["critic/vf_loss"]) == 2
    assert numbers.keys() == again.keys() and numbers["auc"] is not None
    assert again == {name: x and pytest.approx(x, rel=2e-3, abs=2e-4) for name, x in numbers.items()}
    assert "measured on the same rows" in (tmp_path / "some" / "report.html").read_text()
    about = "report     some/report.html: 64 rows of the last update, with their values before it, "
    assert out.count(about) == said.count(about) == 1
    names = {"report.html", *(f"report_{name}.png" for name in common.SECTIONS)}
    assert {path.name for path in (tmp_path / "some").iterdir()} == names
    assert sum(line.startswith("check      ") for line in said.splitlines()) == 10
    assert [path.name for path in (tmp_path / "two" / "profile").iterdir()] == ["step_2_rank_1.json.gz"]


# ---------------------------------------------------------------------------------------------------------------------
# The data check, and the profiler
# ---------------------------------------------------------------------------------------------------------------------


def checked(rows, held_out=None, **flags):
    """name -> what data_check says of it."""
    config = {key: flags.pop(key) for key in ("cliprange_value", "value_head", "value_range") if key in flags}
    lines = common.data_check(rows, held_out, Run(critic=Config(**config), **flags))
    assert len(lines) == 10
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def test_the_data_check_counts_what_is_there():
    rows = dataclasses.replace(judged_rows(90, 30), values=None)
    said, held_out = checked(rows), judged_rows(40, 30, seed=5)
    texts, prompts = [], []
    for start, end in rows_of(rows):
        first = next(t for t in range(start, end) if rows.response_mask[t])
        texts.append(tuple(rows.input_ids[start:end].tolist()))
        prompts.append(tuple(rows.input_ids[start:first].tolist()))
    assert said["rows"] == f"90, {90 - len(set(texts))} of them copies of others"
    assert said["prompts"] == f"{len(set(prompts))}, with {90 / len(set(prompts)):.3g} responses each"
    lengths = sorted(map(len, texts))
    assert said["tokens"] == f"{lengths[44]} a row at the median, {lengths[-1]} at most"
    rewards = [float(rows.token_level_rewards[s:e].sum()) for s, e in rows_of(rows)]
    assert said["rewards"] == f"1 for {statistics.fmean(rewards):.1%} of the rows, 0 for the others"
    returns = [r for (s, e), r in zip(rows_of(rows), rewards, strict=True) for own in rows.response_mask[s:e] if own]
    assert said["returns"] == f"{statistics.fmean(returns):.3g} +- {statistics.pstdev(returns):.3g} over the actions"
    assert not [line for line in said.values() if " - " in line], said
    shared = {
        tuple(held_out.input_ids[s : s + int(held_out.response_mask[s:e].int().argmax())].tolist())
        for s, e in rows_of(held_out)
    } & set(prompts)
    assert f" - {len(shared)} are held-out ones too" in checked(rows, held_out)["prompts"] and shared


def test_the_data_check_says_what_looks_wrong():
    rows = judged_rows(60, 20)
    wrong = lambda name, rows, **flags: checked(rows, **flags)[name].partition(" - ")[2]
    with_ = lambda **columns: dataclasses.replace(rows, **columns)
    shifted = rows.response_mask.roll(-1)  # a mask that is off by one
    shifted[rows.cu_seqlens[:-1].long()] = False
    assert "is response_mask off by one?" in wrong("masks", with_(response_mask=shifted))
    idle = rows.response_mask.clone()
    idle[slice(*rows_of(rows)[7])] = False
    stray = with_(response_mask=idle, token_level_rewards=torch.ones(len(idle)))
    assert "1 rows without an action;" in checked(stray)["masks"] and "leave them out" in wrong("masks", stray)
    assert "--cliprange-value 0.5" in wrong("returns", with_(token_level_rewards=rows.token_level_rewards * 100))
    assert not wrong("returns", with_(token_level_rewards=rows.token_level_rewards * 100), cliprange_value=None)
    last = common.last_actions(rows.response_mask, rows.cu_seqlens)
    high = rows.token_level_rewards.index_add(0, last, torch.full((60,), 20.0))  # of little spread, but far from 0
    assert "--cliprange-value 0.5" in wrong("returns", with_(token_level_rewards=high))
    assert "nothing to learn" in wrong("returns", with_(token_level_rewards=torch.zeros(len(idle))))
    far = {"value_head": "hl_gauss", "value_range": (5.0, 6.0)}
    assert "--value-range" in wrong("returns", rows, **far)
    assert "another scale" in wrong("values", with_(values=rows.values * 50)) and not wrong("values", rows)
    assert "another scale" in wrong("values", with_(values=rows.values + 9))
    cut = with_(truncated=torch.ones(60, dtype=torch.bool))
    assert "--bootstrap-truncated" in wrong("truncated", cut) and not wrong("truncated", cut, bootstrap_truncated=True)
    long = judged_rows(1, 1, longest=12)
    long = common.concat([rows, dataclasses.replace(
        long, input_ids=long.input_ids.repeat(60), cu_seqlens=long.cu_seqlens * 60, row_id=torch.tensor([60]),
        response_mask=long.response_mask.repeat(60), token_level_rewards=long.token_level_rewards.repeat(60),
        values=long.values.repeat(60), returns=long.returns.repeat(60),
    )])  # fmt: skip
    assert "far longer" in wrong("tokens", long) and not wrong("tokens", rows)


def test_rewards_that_are_carried_are_counted(capsys):
    row = {"prompt_ids": [5], "response_ids": [6, 7, 8], "response_mask": [1, 0, 0], "rewards": [0, 1, 2]}
    common.rows_to_batch([json.dumps(row)], "rows")
    assert (
        capsys.readouterr().out == "rows: 2 rewards stand on tokens that are no actions; the action before gets them\n"
    )


def test_five_thousand_rows_are_checked_in_a_moment():
    rows = random_batch(5000, idle=False)
    rows.values = None
    start = time.process_time()
    checked(rows)
    assert time.process_time() - start < 1  # measured: 0.11 s


def test_chosen_steps_are_profiled_and_no_others(tmp_path):
    steps = common.profiled(Run(steps=4, profile_steps="2:3", out_dir=str(tmp_path)), range(5))
    seen = []
    for step in steps:
        seen.append(step)
        torch.ones(2 + step, 2) @ torch.ones(2, 2)
    assert seen == [0, 1, 2, 3, 4]
    files = sorted((tmp_path / "profile").iterdir())
    assert [file.name for file in files] == ["step_2_rank_0.json.gz", "step_3_rank_0.json.gz"]
    for step, file in zip((1, 2), files, strict=True):
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        shapes = [event["args"].get("Input Dims") for event in events if event.get("name") == "aten::mm"]
        assert shapes == [[[2 + step, 2], [2, 2]]], shapes
        assert any(event.get("name") == "[memory]" for event in events)
    bad = {
        "--profile-steps 3: must be A:B": {"profile_steps": "3"},
        "--profile-steps 0:2: must be steps from 1 to --steps 200": {"profile_steps": "0:2"},
        "--profile-steps 3:2: must be steps": {"profile_steps": "3:2"},
        "--profile-steps 9:201: must be steps": {"profile_steps": "9:201"},
        "--profile-ranks (1,): must be below the 1 ranks": {"profile_ranks": (1,)},
    }
    for message, flags in bad.items():
        with pytest.raises(UserError, match=re.escape(message)):
            common.validate_run(Run(out_dir=str(tmp_path), **flags))


def test_no_profile_costs_nothing(tmp_path):
    """Nothing is made or called but the loop itself: measured 0.4 microseconds a step, here at most ten."""
    quiet = Run(out_dir=str(tmp_path))
    start = time.process_time()
    assert sum(common.profiled(quiet, range(100_000))) == sum(range(100_000))
    assert time.process_time() - start < 1 and not list(tmp_path.iterdir())
