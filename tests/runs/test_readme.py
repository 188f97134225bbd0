"""Every command of the README and its pages runs in a copy of the scripts, and what they say of
runs is true.

Commands run as they are written, except that those that train for minutes have fewer --steps, see
STEPS."""

import ast
import collections
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from xml.etree import ElementTree

import bench
import browser
import pytest
import serve
import torch
import torch.distributed as dist
import truth
import tyro
from browser import CHROMIUM
from helpers import ROOT, SHARED, begin, ended, run, succeeded, torchrun, worker
from ppo_scenarios import metrics_of

import common
import critic_fsdp
import ppo_loop

PATHS = [
    ROOT / "README.md",
    *sorted((ROOT / ".github").glob("*.md")),
    *sorted((ROOT / "tests" / "lessons").glob("[!R]*.md")),
    ROOT / "tests" / "experiments" / "RESULTS.md",
]
PAGES = {path.name: path.read_text() for path in PATHS}
README = PAGES["README.md"]
BLOCKS = re.findall(r"^```bash (\w+)\n(.*?)^```", "\n".join(PAGES.values()), flags=re.M | re.S)
COMMANDS = []  # (kind, command on one line, without .venv/bin/)
for kind, block in BLOCKS:
    lines = block.replace("\\\n    ", "").replace(".venv/bin/", "").strip().splitlines()
    COMMANDS += [(kind, line) for line in lines]
OWN = (ROOT / "tests" / "lessons" / "own_loop.py").read_text()
VOTE = ROOT / "tests" / "tools" / "vote.py"
PIPE = textwrap.dedent(serve.__doc__.partition("A client in Python:\n\n")[2])
PAPERS = PAGES["reference.md"].partition("\n### Papers as commands\n")[2].partition("\n## ")[0]
IN_A_CELL = re.compile(r"^\| [^|]+ \| `\.venv/bin/(python [^`]+)` \|", re.M)
COMMANDS += [("paper", line) for line in IN_A_CELL.findall(PAPERS)]
START, TESTS = (line.split(" && ")[-1] for kind, line in COMMANDS if kind == "start")
COMMANDS.insert(0, ("run", START))
LONGEST = "python ppo_loop.py"
STEPS = {  # commands that take minutes -> number of steps here
    rf"{LONGEST}$": 20,
    r"torchrun \S+ 2 critic_fsdp.py .*gsm8k": 1,
    r"torchrun \S+ 2 ppo_loop.py .*gsm8k": 1,
    r"torchrun .* --steps (2|10) ": 1,  # several of one kind, which show that a layout runs
}
# torchrun, if no environment is activated
PATH = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The scripts, tools and forks alone in a folder, next to the development data."""
    folder = tmp_path_factory.mktemp("copy")
    for room in ("tools", "forks", "lessons"):
        (folder / "main" / "tests" / room).mkdir(parents=True)
    files = []
    for names in ("*.py", "tests/rows*.jsonl", "tests/tools/*.py", "tests/forks/*.py"):
        files += ROOT.glob(names)
    for file in files:
        shutil.copy(file, folder / "main" / file.relative_to(ROOT))
    (folder / "shared").symlink_to(SHARED)
    return folder / "main"


def test_every_command_is_of_a_kind_that_is_tested():
    kinds = "start extra run parts nodes gpu card vllm test convert diff truth search picture"
    kinds += " nano paper class pay agent"
    assert {kind for kind, _ in COMMANDS} == set(kinds.split())
    assert (START, TESTS) == ("python critic_fsdp.py", "python -m pytest -q tests")
    for text in PAGES.values():
        assert not re.search(r"^```(bash|sh|console)?$\n(pip|python|torchrun)", text, flags=re.M)


def test_words_are_spelled_right_and_none_is_retired():
    """By codespell and our own list, in prose and code; thw means time, height and width of
    images."""
    names = "*.py *.md tests/*.py tests/*/*.py tests/*.md tests/*/*.md .github/*.md".split()
    files = [path for name in names for path in ROOT.glob(name)]
    succeeded(run(sys.executable, "-m", "codespell_lib", "-L", "thw", *files))
    retired = re.compile(
        r"\b(beside|so many|as yet|somebody|nobody|without a word|there is no such)\b", re.I
    )
    found = [
        (path.name, retired.search(path.read_text()))
        for path in files
        if path.name != "test_readme.py"
    ]
    assert len(files) > 40 and [x for x in found if x[1]] == []


def test_the_readme_is_short_and_stands_alone():
    lines = README.splitlines()
    assert len(lines) <= 180 and len(README.split()) <= 2000 and max(map(len, lines)) <= 120
    assert sum(line.startswith("|") for line in lines) <= 45
    assert not any("../shared" in text for name, text in PAGES.items() if name != "RESULTS.md")


def test_every_link_leads_somewhere():
    for page in (*PATHS, *(ROOT / "tests").glob("*/README.md")):
        for file, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), (page, file)
            heads = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.M) if anchor else ()
            there = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert not anchor or anchor in there, (page, file, anchor)


def test_the_speeds_are_those_of_results():
    section = PAGES["RESULTS.md"].partition("\n## Shared prompts")[2].partition("\n## ")[0]
    bare, ours = (
        [int(x.replace(",", "")) for x in re.findall(rf"\| {name} \| \S+ \| \S+ \| (\S+)", section)]
        for name in ("bare loop", "`critic_fsdp.py`")
    )
    few, many = (f"{b / a:.2f} times" for a, b in zip(bare, ours, strict=True))
    words = README.replace("\n", " ")
    assert f"an update is {few} as fast as a bare loop of transformers with 4 answers" in words
    assert f"{many} with 8 answers to long ones" in words


def test_the_diff_of_the_critics_stays_a_lesson():
    [command] = [line for kind, line in COMMANDS if kind == "diff"]
    said = run("bash", "-c", command, cwd=ROOT).stdout
    assert 20 < len(re.findall("^@@", said, flags=re.M)) <= 75


def test_the_example_rows_are_the_toys():
    """Four answers to each prompt, as the scripts make them for themselves; held out are other
    prompts."""
    for name, n, held_out in (("rows", 1024, False), ("rows_held_out", 256, True)):
        lines = (ROOT / "tests" / f"{name}.jsonl").read_text().splitlines()
        assert lines == common.toy_rows(n, 0, held_out)
    words = README.replace("\n", " ")
    assert "1,024 answers to 256 sums. It is judged by 256 answers to other sums" in words


def test_what_the_readme_says_is_in_results():
    """What PPO earns by task, what a critic leaves of the noise, where an agent's policy ends."""
    words = README.replace("\n", " ")
    sections = {x.partition("\n")[0]: x for x in PAGES["RESULTS.md"].split("\n## ")}
    of_rows = sections["From rows alone"]

    # each number of the table is a difference of the same row for that task
    cells = lambda line: [cell.strip() for cell in line.split("|")[1:-1]]
    lines = [cells(line) for line in of_rows.splitlines() if line.count("|") == 11]
    found = {name: numbers for name, *numbers in lines}
    names = (
        "no critic: minus the mean of least noise", "no critic: 4 answers to each prompt",
        "a critic from scratch", "pretrained critic", "the fitted baseline, critic from scratch",
    )  # fmt: skip
    shown = README.partition("| subtracted from returns |")[2].partition("\n\n")[0]
    shown = [cells(line) for line in shown.replace("**", "").splitlines()[2:]]
    for name, (_, sums, model, notes, digits) in zip(names, shown, strict=True):
        assert [x.replace("not run", "") for x in (sums, notes, digits)] == found[name][2::3]
        assert f"| {model} |" in sections["A real model"]

    # noise from rows; the README prints that of addition
    noise = re.search(r"^\| the critic's values \|.*\| (\S+) \+- \S+ \| [^|]*\|$", of_rows, re.M)[1]
    assert f"the critic leaves {float(noise):.2f} of the noise" in words
    group = {name: x for name, _, x, _ in noise_told(README)}["group"]
    assert f"groups need {group:.1f} times the answers that the mean of all needs" in words

    # a step next to TRL's
    real = sections["A real model"].replace("\n", " ")
    theirs, ours = re.search(r"takes (\S+) s of CPU.* PPO takes (\S+) s", real).groups()
    assert f"takes {float(ours) / float(theirs):.2f} times the seconds of one of" in words

    # the agent, and sums of five other seeds
    task = sections["Does credit across rows matter?"]
    ends = [
        float(re.search(rf"^\| {name} \| (\S+)", task, re.M)[1])
        for name in ("across rows, a critic, lambda 1", "credit per row, a critic")
    ]
    across, alone = (f"{x:.2f}" for x in ends)
    model = task.partition("**SmolLM2 as an agent**")[2]
    ends = re.findall(r"^\| (?:across|credit).*? no critic.*? \| (\S+) ", model, flags=re.M)
    assert "(SmolLM2 on sums in two rows: {:.2f} and {:.2f})".format(*map(float, ends)) in words
    assert f"{across} of held-out answers are right with credit across rows, {alone} where" in words
    sums = sections["Does a critic matter on short sums?"]
    end = re.search(r"^\| the same, at the mean return \| (\S+) \+- (\S+)", sums, re.M).groups()
    assert "(five other seeds: {:.2f} +- {:.2f})".format(*map(float, end)) in words


def test_each_function_of_the_reading_path_is_in_its_file():
    """A link leads to a file, for the numbers of lines change, and has one name or several. A
    method stands there without its class if no other has one of this name."""
    links = re.findall(r"\[(`[^\]]*`)\]\(([\w./]+\.py)\)", PAGES["reading.md"])
    functions = [(name, file) for names, file in links for name in re.findall(r"[\w.]+", names)]
    for name, file in functions:
        here = ast.parse((ROOT / "tests" / "lessons" / file).read_text()).body
        classes = [x for x in here if isinstance(x, ast.ClassDef)]
        names = [x.name for x in here if hasattr(x, "name")]
        for kind in classes:
            methods = [x.name for x in kind.body if hasattr(x, "name")]
            names += [*methods, *(f"{kind.name}.{method}" for method in methods)]
        assert names.count(name) == 1, (file, name)
    assert len(functions) > 50


def test_the_reading_path_counts_right():
    """Two hours an evening, the bytes of a row; an exercise has a station."""
    page = PAGES["reading.md"]
    stations = re.findall(r"^(\d)\. \*\*(.*)\*\* \((\d+) minutes\)", page, flags=re.M)
    minutes = [int(x) for _, _, x in stations]
    first = page.partition("## Second evening")[0].count(" minutes). ")
    assert all(100 < total < 140 for total in (20 + sum(minutes[:first]), sum(minutes[first:])))
    assert [int(number) for number, _, _ in stations] == [*range(1, len(stations) + 1)]
    asked = re.findall(r"^\d\. \((.*?)\) ", page, flags=re.M)
    order = [[name for _, name, _ in stations].index(name) for name in asked]
    assert order == sorted(order) and len(order) == 9
    assert f"{common.Row.itemsize} bytes" in page


def drawn(name):
    """The texts of a drawing, line by line from left to right: [[(x, text), ...], ...]."""
    root = ElementTree.parse(ROOT / "tests" / "lessons" / f"{name}.svg").getroot()
    lines = collections.defaultdict(list)
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        lines[float(text.get("y"))].append((float(text.get("x")), text.text))
    return [sorted(line) for _, line in sorted(lines.items())]


def test_the_drawing_of_the_shift_shows_what_shift_does():
    _, tokens, outputs, _, values, _ = drawn("shift")
    assert [x for x, _ in tokens] == [x for x, _ in outputs]
    places = critic_fsdp.shift(torch.arange(len(tokens))).tolist()
    acts = [t for t, (_, token) in enumerate(tokens) if token.startswith("a")]
    assert values == [(tokens[t][0], outputs[places[t]][1]) for t in acts] and len(acts) == 3


def test_the_drawing_of_gae_has_the_numbers_of_the_table():
    """Those are computed anew in test_common.py."""
    lines = re.findall(r"^\| `?([^`|]+?)`? (\|(?: [-.\d]+ \|){5})", PAGES["reading.md"], flags=re.M)
    table = {name: re.findall(r"[-.\d]+", cells)[2:] for name, cells in lines}  # of actions
    shown = {label: [text for _, text in numbers] for (_, label), *numbers in drawn("gae")}
    names = {"reward": "token_level_rewards", "value": "values", "return": "returns"}
    for name in ("reward", "value", "TD error", "advantage", "return"):
        assert shown[name][:3] == table[names.get(name, name)]
    assert shown["value"][3:] == ["0"] and shown["action"] == ["a0", "a1", "a2", "end"]


def test_the_drawing_of_a_pack_shows_what_pack_rows_does():
    """Where rows and slots end, and which slot attends to which."""
    rows = common.concat([common.Batch.blank(5), common.Batch.blank(4)])
    rows.row_id = torch.tensor([0, 1])
    rows.input_ids = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5])
    rows.response_mask = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 1]).bool()
    slots, _, pack = critic_fsdp.pack_rows(rows, "cpu", share=True)
    names = ["p0", "p1", "p2", "a0", "a1", "b0"]
    named = lambda ids: [names[i] for i in ids.tolist()]
    texts = [[text for _, text in line] for line in drawn("pack")]
    assert texts[1] == named(rows.input_ids)
    assert list(map(int, texts[2])) == rows.cu_seqlens.tolist()
    assert texts[5] == named(rows.input_ids[slots])
    assert list(map(int, texts[6])) == pack.varlen[0].tolist()

    sees = []  # of each query, the slots of its keys
    keys = pack.keys.split(pack.key_lengths)
    for queries, row in zip(pack.lengths, keys, strict=True):
        sees += [row[: len(row) - behind].tolist() for behind in reversed(range(queries))]
    code = (ROOT / "tests" / "lessons" / "pack.svg").read_text()
    squares = [
        [(int(x) - 102) // 40 for x in re.findall(r"M(\d+) ", path)]
        for path in re.findall(r'd="(M[^"]*h36v28h-36z)"', code)
    ]
    assert squares == sees and texts[8:] == [[name] for name in texts[5]]


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", ["shift", "gae", "pack", "rows", "episode"])
def test_a_drawing_can_be_read_on_a_phone_in_both_colour_schemes(name):
    """Its texts are large, lie inside, and do not overlap; it says in words what it shows."""
    path = ROOT / "tests" / "lessons" / f"{name}.svg"
    assert len(path.read_text().splitlines()) < 80 and "href" not in path.read_text()
    colours = []
    with browser.page(path) as call:
        box = "(b => [b.x, b.y, b.x + b.width, b.y + b.height])(x.getBBox())"
        found = browser.evaluate(call, f"[...document.querySelectorAll('text')].map(x => {box})")
        width, height = browser.evaluate(
            call, "(b => [b.width, b.height])(document.documentElement.viewBox.baseVal)"
        )
        size = browser.evaluate(call, "getComputedStyle(document.querySelector('text')).fontSize")
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            call("Emulation.setEmulatedMedia", features=[feature])
            for kind in ("text", ".back", ".act"):
                style = f"getComputedStyle(document.querySelector('{kind}')).fill"
                colours.append(browser.evaluate(call, style))
        words = browser.evaluate(call, "document.querySelector('desc').textContent")

    assert width <= 420 and float(size.removesuffix("px")) >= 15 and len(words) > 100
    for left, top, right, bottom in found:
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
    for one, two in itertools.combinations(found, 2):
        apart = one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1]
        assert apart, (one, two)
    bright = [sum(map(int, re.findall(r"\d+", colour))) for colour in colours]
    assert bright[0] + 500 < min(bright[1:3]) and bright[3] - 500 > max(bright[4:])


def said_by_python_of(page, copy):
    (copy / "snippet.py").write_text(
        re.search(r"^```python\n(.*?)^```", page, flags=re.M | re.S)[1]
    )
    return json.loads(succeeded(run(sys.executable, "snippet.py", cwd=copy)).splitlines()[-1])


@pytest.mark.parametrize("script", ["critic_fsdp", "critic_megatron"])
def test_a_loop_of_your_own_prints_the_same_on_any_ranks(script, copy):
    file = copy / "tests" / "lessons" / f"own_{script}.py"
    file.write_text(OWN.replace("import critic_fsdp as", f"import {script} as"))
    found = []
    for ranks in (1, 2):
        said = succeeded(torchrun(ranks, file, cwd=copy))
        lines = re.findall(r"^({.*}) \((\d+), 10\)$", said, flags=re.M)
        assert [int(rows) for _, rows in lines] == [16 // ranks] * 3
        steps = [json.loads(metrics) for metrics, _ in lines]
        found.append(
            [{name: x for name, x in m.items() if name.startswith("critic/")} for m in steps]
        )
    one, two = found
    near = lambda m: {name: pytest.approx(x, rel=1e-6, abs=1e-6) for name, x in m.items()}
    assert two == [near(m) for m in one] and len(one[0]) > 10
    assert len({m["critic/vf_loss"] for m in one}) == 3


@pytest.mark.parametrize("script", ["critic_fsdp.py", "critic_megatron.py"])
def test_a_critic_needs_nothing_but_common_and_rows(script, tmp_path):
    """With these alone, a critic trains, saves, resumes and exports, and loads its export."""
    for file in (script, "common.py", "tests/rows.jsonl"):
        shutil.copy(ROOT / file, tmp_path)
    train = (sys.executable, script, "--rollouts", "rows.jsonl", "--keep", 1, "--out-dir")
    succeeded(run(*train, "out", "--steps", 1, cwd=tmp_path, PYTHONPATH=""))
    more = succeeded(
        run(*train, "out", "--steps", 2, "--resume", "auto", cwd=tmp_path, PYTHONPATH="")
    )
    assert "step_1, update 1\n" in more and "\nsaved      out: checkpoints/step_2, hf" in more
    assert os.listdir(tmp_path / "out" / "checkpoints") == ["step_2"]
    again = run(*train, "again", "--steps", 1, "--model", "out/hf", cwd=tmp_path, PYTHONPATH="")
    assert "value head from its " in succeeded(again)
    assert len(list(tmp_path.glob("*.py"))) == 2


@pytest.mark.parametrize("script", ["critic_fsdp", "critic_megatron"])
def test_the_fork_of_the_reading_path_learns(script, copy, tmp_path):
    """With Huber's loss, the first loss of errors below 1 is that of the squared error."""
    code = re.search(r"^```python fork\n(.*?)^```", PAGES["reading.md"], flags=re.M | re.S)[1]
    (copy / "tests" / "forks" / "huber.py").write_text(code)
    assert 15 <= len(code.splitlines()) <= 25
    losses = []
    for words in (["tests/forks/huber.py", script], [f"{script}.py"]):
        out = tmp_path / words[0].rpartition("/")[2]
        flags = ("--rollouts", "tests/rows.jsonl", "--steps", 2, "--out-dir", out)
        succeeded(run(sys.executable, *words, *flags, cwd=copy))
        losses.append(metrics_of(out)[1, "critic/vf_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def started(line, folder):
    """Starts a command in a folder, as forks -> what ended() waits for."""
    fewer = [n for pattern, n in STEPS.items() if re.match(pattern, line)]
    # the last --steps counts
    words = shlex.split(line) + [x for n in fewer for x in ("--steps", n)]
    if words[0] == "torchrun":
        assert words[1] == "--nproc-per-node"
        return begin(int(words[2]), words[3:], cwd=folder)
    assert words[0] == "python"
    return begin(1, words[1:], cwd=folder, alone=True)


@pytest.fixture(scope="module")
def ppo(copy):
    """Starts the longest command."""
    return started(LONGEST, copy)


def held_out(log, name="explained var"):
    """A number from each evaluation in a log."""
    return [float(x) for x in re.findall(rf"^held out   {name} (\S+)", log, flags=re.M)]


def check_scores(copy):
    """Python reads what --score has written, and the votes are those that the page shows."""
    page = PAGES["reference.md"]
    first = common.read_lines(copy / "out" / "scored" / "scored.jsonl")[0]
    assert said_by_python_of(page, copy) == pytest.approx(first["values"], abs=1e-5)

    shown = page.replace("\n", " ").partition("With the critic of the README")[2]
    scored = "out/scored/scored.jsonl"
    for said in succeeded(run(sys.executable, VOTE, scored, cwd=copy)).splitlines():
        name, reward = said.rsplit(" ", 1)
        claimed = float(re.search(rf"{name} ([\d.]+\d)", shown)[1])
        assert claimed == pytest.approx(float(reward), abs=0.05)


def check_two_backends(copy):
    """Both critics have made the same updates."""
    ours, theirs = (metrics_of(copy / "out" / "two" / x) for x in ("fsdp", "megatron"))
    signed = re.compile("mean|min|max|explained|auc").search  # about 1 in size

    def near(name, x):
        return None if x is None else pytest.approx(x, rel=1e-6, abs=1e-6 if signed(name) else 0)

    assert ours == {key: near(key[1], x) for key, x in theirs.items()} and len(ours) > 30


def check_start(out):
    """The first command learns as much as the README shows."""
    rising = held_out(out)
    assert rising[-1] > 0.4 and rising[-1] > rising[1] > rising[0], rising
    assert held_out(README)[0] == pytest.approx(rising[-1], abs=0.03)

    # what the true values say at the end
    line = r"^  knows (\S+) of what can be known \((\S+) of returns\), flatness (\S+) \("
    numbers = [re.findall(line, text, flags=re.M)[-1] for text in (README, out)]
    shown, found = (list(map(float, some)) for some in numbers)
    assert shown == pytest.approx(found, abs=0.05)

    # what the README explains of it
    words = README.replace("\n", " ")
    assert f"the critic predicts **{100 * shown[0]:.0f} %** of what is" in words
    [shown, found] = (
        re.findall(r"^  best of n (\S+), mean (\S+),", text, re.M)[-1] for text in (README, out)
    )
    assert [*map(float, shown)] == pytest.approx([*map(float, found)], abs=0.02)
    best, mean = shown
    assert f"choice is right **{best}** of the time, a random one **{mean}**" in words


def check_pictures(copy):
    """The same critic gives the first picture again: its texts and bars, and nearly its numbers.
    The others are parts of its report."""
    for line in [line for kind, line in COMMANDS if kind == "picture"]:
        if "browser.py" in line and not CHROMIUM:
            continue
        _, script, source, file, *rest = line.split()
        made = copy / os.path.basename(file)
        succeeded(run(sys.executable, ROOT / script, source, made, *rest, cwd=copy))
        assert made.stat().st_size > 1000
    shown, again = (
        x.read_text() for x in (ROOT / ".github/assets/answers.svg", copy / "answers.svg")
    )
    bars = re.compile(r'height="7" fill-opacity="(.*)"/>')
    assert bars.findall(again) == bars.findall(shown) and len(bars.findall(shown)) == 14

    numbers = re.compile(r">(\d\.\d\d)<")
    assert numbers.sub("", again) != again
    assert re.findall(">([^<]*)</text>", numbers.sub("><", again)) == re.findall(
        ">([^<]*)</text>", numbers.sub("><", shown)
    )
    expected = [pytest.approx(float(x), abs=0.2) for x in numbers.findall(shown)]
    assert list(map(float, numbers.findall(again))) == expected


def check_longest(out):
    """Before PPO the accuracy is that of the README, and after 20 steps not above its end."""
    first, then = held_out(out, "accuracy")
    assert first < 0.45 and then > first + 0.2, (first, then)
    claim = re.search(r"held-out accuracy rises from (\S+) to (\d\.\d+)", README).groups()
    before, after = map(float, claim)
    assert before == pytest.approx(first, abs=0.1) and after >= then


def check_ppo_on_gsm8k(copy):
    """Random weights are never right, and a new critic says so: there is nothing to learn."""
    rows = common.read_lines(copy / "out" / "ppo_gsm8k" / "metrics.jsonl")
    [row] = [row for row in rows if "reward/mean" in row]  # the others are evaluations
    assert row["reward/errors"] == 0 and row["rollout/log_prob_diff"] < 1e-5
    assert row["rollout/tokens"] > 32 * 32
    assert row["actor/entropy"] > 1
    assert row["reward/mean"] == row["critic/values_mean"] == row["actor/grad_norm"] == 0


def check_critic_on_gsm8k(copy, out):
    """Its first numbers, before any step, are those of RESULTS.md."""
    shown = PAGES["RESULTS.md"].partition("\n## Commands that need")[2]
    assert held_out(shown)[0] == pytest.approx(held_out(out)[0], abs=0.01)
    losses = [re.search(r"^step +1/\d+ +loss (\S+)", log, re.M)[1] for log in (shown, out)]
    first, then = map(float, losses)
    assert first == pytest.approx(then, abs=0.001)
    report = (copy / "out" / "gsm8k" / "report.html").read_text()
    assert "800 held-out rows, 131,365 actions" in report


@pytest.mark.parametrize("line", [line for kind, line in COMMANDS if kind in ("run", "vllm")])
def test_command_runs(line, copy, request):
    """And what the pages say of its results is so."""
    if ("vllm", line) in COMMANDS and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    if "../shared" in line and not SHARED.is_dir():
        pytest.skip(f"needs the development data in {SHARED}")

    # the command that makes its model, if that has not run
    for folder in re.findall(r"--model (out/\S+)/hf", line):
        if not (copy / folder).is_dir():
            makers = [x for _, x in COMMANDS if x.endswith(f"--out-dir {folder}")]
            [maker] = makers or [f"{START} --steps 9"]
            succeeded(ended(started(maker, copy)))

    # the longest one runs while others do
    longest = None if line == START else request.getfixturevalue("ppo")
    out = succeeded(ended(longest if line == LONGEST else started(line, copy)))
    assert out.splitlines()[-1].startswith("saved ")

    if "--score" in line:
        check_scores(copy)
    if line.endswith("out/two/megatron"):
        check_two_backends(copy)
    if line == START:
        check_start(out)
        check_pictures(copy)
    if line == LONGEST:
        check_longest(out)
    if re.match(r".* ppo_loop.py .*gsm8k", line):
        check_ppo_on_gsm8k(copy)
    if re.match(r".* critic_fsdp.py .*gsm8k", line):
        check_critic_on_gsm8k(copy, out)


def test_the_whole_idea_in_one_file_learns_as_the_page_shows():
    """The critic tells a right answer from a wrong one by its first digit, and PPO's reward
    rises."""
    [line] = [line for kind, line in COMMANDS if kind == "nano"]
    said = succeeded(ended(started(line, ROOT)))
    page = PAGES["reading.md"]

    answers = [
        re.findall(r"^(\d+\+\d+=\d+) +values (.*)$", text, flags=re.M) for text in (page, said)
    ]
    shown, found = ([(text, *map(float, values.split())) for text, values in x] for x in answers)
    assert found == [(text, *(pytest.approx(x, abs=0.2) for x in xs)) for text, *xs in shown]
    assert len(shown) == 2

    rewards = [float(x) for x in re.findall(r"^ppo +\d+   reward (\S+)", said, flags=re.M)]
    words = r"mean reward rises from (\S+) to (\d\.\d+)"
    claim = re.search(words, page.replace("\n", " ")).groups()
    first, last = map(float, claim)
    assert rewards[0] == pytest.approx(first, abs=0.1) and last > first + 0.2
    assert rewards[-1] == pytest.approx(last, abs=0.1)


@pytest.mark.parametrize("line", [line for kind, line in COMMANDS if kind == "paper"])
def test_the_command_of_a_paper_trains_both_models(line, copy):
    """The actor in the second step of two, for the first one is the critic's alone."""
    fewer = "--steps 2 --critic-warmup 1 --supervised-steps 30 --eval-every 0"
    succeeded(ended(started(f"{line} {fewer}", copy)))
    metrics = metrics_of(copy / line.split()[-1])
    assert (1, "actor/grad_norm") not in metrics
    for name in ("actor", "critic"):
        assert metrics[2, f"{name}/grad_norm"] > 0


def test_the_loops_critic_helps_to_answer_held_out_prompts(copy, ppo):
    """The page's command, after the loop, which makes fewer steps here."""
    [line] = [line for kind, line in COMMANDS if kind == "search"]
    succeeded(ended(ppo))
    said = succeeded(ended(started(line, copy)))
    assert re.search(r"^searched   mean reward 0\.\d{3}$", said, flags=re.M)
    assert len(common.read_lines(copy / "out" / "searched" / "searched.jsonl")) == 446


def noise_told(text):
    """[(baseline, what it is, its noise, standard error)] of a printed table."""
    lines = re.findall(r"^  (\d\.\d{3}) \+- (\d\.\d{3})  (.{11})  (.*)$", text, flags=re.M)
    return [(name.strip(), words, float(x), float(error)) for x, error, name, words in lines]


def test_ones_own_rollouts_say_whether_a_critic_pays(copy):
    """The page's table, within three standard errors on another CPU, and what is said of it."""
    for line in [line for kind, line in COMMANDS if kind == "pay"]:
        said = succeeded(ended(started(line, copy)))
    page = noise_told(README)
    assert len(page) == 6
    assert noise_told(said) == [
        (name, words, pytest.approx(x, abs=max(0.01, 3 * error)), pytest.approx(error, rel=0.5))
        for name, words, x, error in page
    ]
    noise = {name: x for name, _, x, _ in noise_told(said)}

    # verl's dumps say the same, if log-probs are added to them
    rows = common.read_lines(copy / "out" / "grpo" / "rollouts" / "step_2.jsonl")
    for row in rows:
        row |= {"input": row.pop("prompt_text"), "output": row.pop("response_text")}
    kept = ("input", "output", "score", "log_probs")
    dump = [{key: row[key] for key in kept} for row in rows]
    common.replace_lines(f"{copy}/out/verl/7.jsonl", dump)
    flags = "--score out/verl --model out/pays/hf --out-dir out/scored_verl --prompt-key input"
    flags = [*flags.split(), "--response-key", "output", "--reward-key", "score"]
    again = succeeded(run(sys.executable, "critic_fsdp.py", *flags, cwd=copy))
    assert noise_told(again) == noise_told(said)

    assert noise["group"] > 1.2 and 0.9 < noise["critic"] < 1.15
    assert noise["fitted"] < noise["least noise"] + 0.05 < 1.05


def test_the_command_of_an_agent_draws_its_curves(tmp_path):
    """With two steps."""
    [line] = [line for kind, line in COMMANDS if kind == "agent"]
    words = [ROOT / x if x.startswith("tests/") else x for x in shlex.split(line)[1:]]
    said = succeeded(run(sys.executable, *words, "--steps", 2, cwd=tmp_path))
    assert len(re.findall(r"^\| (?:across rows|credit per row), .* \|$", said, flags=re.M)) == 3
    assert (tmp_path / "out" / "ablations" / "notes" / "ablations.png").stat().st_size > 1000


def test_a_policy_and_its_critic_are_compared_with_true_values(copy, ppo):
    """The page's commands, after the loop, which makes fewer steps here: so does its checkpoint."""
    [meter, first, export] = [line for kind, line in COMMANDS if kind == "truth"]
    said_of_ppo = succeeded(ended(ppo))
    steps = str(STEPS[rf"{LONGEST}$"])
    saved = succeeded(ended(started(re.sub(r"(step_|--steps )60", rf"\g<1>{steps}", export), copy)))
    assert saved.splitlines()[-1].startswith(f"saved      out/step_{steps}: ")

    told = []
    for folder in ("ppo_loop", f"step_{steps}"):
        line = first.replace("ppo_loop", folder)
        line = line.replace(
            "tests/experiments/truth.py", str(ROOT / "tests" / "experiments" / "truth.py")
        )
        said = succeeded(ended(started(f"{line} --out-dir out/truth_{folder} --most 16", copy)))
        told.append(re.search(rf"^\| out/{folder}/critic_hf (\|.*)$", said, flags=re.M)[1])
    assert told[0] == told[1]

    # the run has ended with the page's table of noise, but for the mean of several answers
    names = [name for name, *_ in noise_told(README) if name != "group"]
    assert [name for name, *_ in noise_told(said_of_ppo)] == names

    # the true values are there
    meter = meter.replace(
        "tests/experiments/noise.py", str(ROOT / "tests" / "experiments" / "noise.py")
    )
    words = f"{meter} --out-dir out/truth_ppo_loop --most 16"
    assert "| out/ppo_loop/critic_hf, lambda 1 |" in succeeded(ended(started(words, copy)))

    # each column of the table is on the page
    columns = re.search(r"^\| \|(.*)\|$", said, flags=re.M)[1].replace("lambda ", "").split("|")
    shown = PAGES["pays.md"].partition("| column | what it tells |")[2].partition("\n\n")[0]
    names = ", ".join(re.findall(r"^\| ([^|-]+) \|", shown, flags=re.M)).replace("lambda ", "")
    assert [name.strip() for name in columns] == names.split(", ")


def test_a_file_is_scored_in_parts_and_its_answers_are_put_to_the_vote(tmp_path):
    """The shell says what to score, which forks do; after one part it is asked again, as after a
    kill."""
    rows = [json.loads(line) for line in common.toy_rows(192, 0)]
    common.replace_lines(f"{tmp_path}/tests/rows_held_out.jsonl", rows)
    block = next(block for kind, block in BLOCKS if kind == "parts").replace(".venv/bin/", "echo ")
    shell = lambda: run("bash", "-c", block, cwd=tmp_path).stdout.splitlines()
    critic = lambda *words: succeeded(
        run(sys.executable, ROOT / "critic_fsdp.py", *words, cwd=tmp_path)
    )
    critic("--rollouts", "tests/rows_held_out.jsonl", "--steps", 1, "--out-dir", "out/my")

    for part in ("aa", "ab"):
        first, *_, vote = map(str.split, shell())
        assert first[1:4] == ["critic_fsdp.py", "--score", f"out/parts/{part}"]
        critic(*first[2:])

    assert shell() == [" ".join(vote)]
    scored = common.read_lines(tmp_path / "out" / "scored" / "scored.jsonl")
    assert vote[:2] == ["python", "tests/tools/vote.py"]
    said = succeeded(run(sys.executable, VOTE, *vote[2:], cwd=tmp_path)).splitlines()

    for k, name in enumerate(("best of n", "majority", "weighted")):
        rewards = 0.0
        for four in zip(*[iter(scored)] * 4):
            votes = [(row["response"], (row["rank"] == 1, 1, row["last_value"])[k]) for row in four]
            total = [sum(vote for word, vote in votes if word == row["response"]) for row in four]
            rewards += fmean(row["reward"] for row, x in zip(four, total) if x == max(total))
        assert said[k].startswith(name) and float(said[k].split()[-1]) == pytest.approx(
            rewards / 48
        )


def test_a_pipe_to_a_critic_gives_the_values_of_transformers(tmp_path):
    (tmp_path / "tests" / "tools").mkdir(parents=True)
    for file in ("critic_fsdp.py", "common.py", "tests/tools/serve.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    worker(model="tiny-qwen2", value_head_init="normal").export_hf(tmp_path / "out" / "my" / "hf")
    (tmp_path / "pipe.py").write_text(PIPE.replace(".venv/bin/python", sys.executable))
    said = succeeded(run(sys.executable, "pipe.py", cwd=tmp_path)).splitlines()
    theirs = said_by_python_of(PAGES["reference.md"], tmp_path)
    assert json.loads(said[0]) == pytest.approx(theirs, abs=1e-5)
    assert len(json.loads(said[1])) == 4


@pytest.mark.parametrize("line", [line for kind, line in COMMANDS if kind == "convert"])
def test_rows_of_other_tools_are_trained_on(line, tmp_path):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    words = shlex.split(line)
    said = succeeded(run(sys.executable, ROOT / words[1], *words[2:], cwd=tmp_path))
    assert "'1+1=Step 1: 1 and 1' -> '\\n' <- 'Step 2: is 2' -> '\\n'" in said


LOGGERS = ROOT / "tests" / "tools" / "loggers.py"
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
HOLDS_BACK = """import atexit

rows = []
log = rows.append
atexit.register(lambda: open("held_back", "w").write(str(rows)))
"""


@pytest.mark.parametrize("package", [None, "wandb", "trackio", "mlflow"])
def test_a_logger_of_another_package_gets_the_last_line(package, tmp_path):
    """Also one that it holds back until the process ends."""
    logger = "mine.py:log"
    (tmp_path / "mine.py").write_text(HOLDS_BACK)
    if package:
        pytest.importorskip(package)
        logger = f"{LOGGERS}:{package}"
    (tmp_path / "logs.py").write_text(
        "import common\n\n"
        "def main():\n"
        f"    logger = common.Logger('out', {{}}, 0, None, {logger!r})\n"
        "    logger.log(1, {'critic/vf_loss': 0.5, 'perf/mfu': float('nan')})\n"
        "    logger.log(2, {'eval/the_last_one': 0.25})\n\n"
        "common.launch(main)\n"
    )
    command = f"{sys.executable} logs.py"
    succeeded(run("bash", "-c", command, cwd=tmp_path, **OFFLINE, TRACKIO_DIR=str(tmp_path)))
    theirs = [path for path in tmp_path.glob("**/*") if path.is_file() and "out" not in path.parts]
    theirs = [path.read_bytes() for path in theirs if path.suffix != ".py"]
    assert any(b"eval/the_last_one" in x and b"critic/vf_loss" in x for x in theirs)


@pytest.mark.parametrize("package", ["wandb", "trackio", "mlflow"])
def test_another_package_reads_the_curves_of_a_run_that_has_ended(package, tmp_path):
    pytest.importorskip(package)
    logger = common.Logger(str(tmp_path / "out" / "my"), {}, 0, None)
    for step in (1, 2):
        logger.log(step, {"critic/vf_loss": 0.5 / step, "perf/mfu": math.nan})
    command = f"{sys.executable} {LOGGERS} {package} out/my/metrics.jsonl"
    succeeded(run("bash", "-c", command, cwd=tmp_path, **OFFLINE, TRACKIO_DIR=str(tmp_path)))
    theirs = [path for path in tmp_path.glob("**/*") if path.is_file() and "out" not in path.parts]
    assert any(b"critic/vf_loss" in path.read_bytes() for path in theirs), theirs


@pytest.mark.parametrize("line", [line for kind, line in COMMANDS if kind == "nodes"])
def test_command_for_two_machines_runs_as_two_agents_on_one(line, copy):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # on a free port
    line = line.replace("node0:29500", f"localhost:{store.port} --rdzv-conf is_host=0")
    with ThreadPoolExecutor() as machines:
        first, second = machines.map(
            lambda _: run("bash", "-c", line, cwd=copy, PATH=PATH), range(2)
        )
    said = sorted([succeeded(first), succeeded(second)], key=len)
    assert "saved " not in said[0] and said[1].splitlines()[-1].startswith("saved ")
    assert re.search(r"^layout     ranks 2 = ", said[1], flags=re.M)


def test_commands_of_the_benchmark_have_flags_that_exist():
    """test_bench.py runs it on less work."""
    commands = set(re.findall(r"`python tests/tools/bench.py( [^`]*)`", PAGES["RESULTS.md"]))
    assert commands
    for args in commands:
        tyro.cli(bench.Run, args=shlex.split(args))


@pytest.mark.parametrize("line", [line for kind, line in COMMANDS if kind == "gpu"])
def test_command_for_gpus_has_flags_that_exist(line, monkeypatch):
    ranks = math.prod(map(int, re.findall(r"--(?:nproc-per-node|nnodes) (\d+)", line)))
    name, args = re.search(r"(\w+)\.py\b(.*)", line).groups()
    script, args = importlib.import_module(name), shlex.split(args)
    if script is ppo_loop:
        flags = ppo_loop.parse(args)
        monkeypatch.setattr(ppo_loop, "WORLD_SIZE", ranks)
        # those GPUs have vLLM, if not this machine
        monkeypatch.setattr(importlib.util, "find_spec", bool)
        ppo_loop.check_layout(flags)
    elif script is truth:
        _, rest = tyro.cli(truth.Truth, args=args, return_unknown_args=True)
        assert ppo_loop.parse(rest).prompts
    else:
        script.check_layout(tyro.cli(script.Run, args=args).critic, ranks)
