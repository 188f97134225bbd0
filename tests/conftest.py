"""Which scenarios begin at once, in which order files run, and the fixtures of several files."""

import gc
import importlib.util
import io
import os
import sys
import types

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for a hub
# models are so small that threads would only wait for each other
os.environ["OMP_NUM_THREADS"] = "1"
# sums in one order on all kinds of CPUs: some numbers were recorded on one with AVX2
os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
# tests compare what a CPU computes; of a GPU see test_device.py
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import ring
from forked import SCENARIOS  # imports torch
from helpers import begin_scenarios, needs

import common
import ppo_loop

# without megatron-core, files that test both critics can still be read; what needs it is skipped
NO_MEGATRON = importlib.util.find_spec("megatron") is None
if NO_MEGATRON:
    absent = {"__name__": "critic_megatron", "Config": lambda **_: None}
    sys.modules["critic_megatron"] = types.SimpleNamespace(**absent)
    collect_ignore = ["critic/test_critic_megatron.py", "critic/test_megatron_layouts.py"]

# a rank without images, or without tokens for an expert, which FSDP2 can do since torch 2.13
SKIPPED_WEIGHTS = (
    "test_every_layout_makes_the_same_update",
    "test_a_frozen_decoder_waits_for_no_rank_without_images",
    "a_weight_may_be_used_on_one_rank_alone on 2",
    "ppo_scenarios-images on 2",
)


def pytest_addoption(parser):
    parser.addoption("--seconds", action="store_true", help="write tests/seconds.json anew")


def pytest_configure(config):
    config.pluginmanager.register(ring.Ring(config))


def scenarios_of(item):
    """What a test waits for: ["file-name", ...], by seconds.json, or a new one of
    test_scenarios.py."""
    if item.nodeid in ring.known()["tests"]:
        return ring.known()["tests"][item.nodeid][1]

    new = getattr(item, "callspec", None)
    if not new or item.originalname != "test_on_several_ranks":
        return []
    file, one = new.params["file"], new.params["one"]
    of_file = {x.name: x for x in SCENARIOS[file]}
    return [f"{file}-{x.name}" for x in SCENARIOS[file] if x is one or needs(one, x, of_file)]


def pytest_collection_modifyitems(items):
    """Skips what the installed packages cannot do. What waits for scenarios comes last."""
    for item in items:
        if NO_MEGATRON and ("megatron" in item.nodeid or item.get_closest_marker("megatron")):
            item.add_marker(pytest.mark.skip(reason="megatron-core is not installed"))
        if not common.SKIPS_UNUSED and any(name in item.nodeid for name in SKIPPED_WEIGHTS):
            item.add_marker(pytest.mark.skip(reason="FSDP2 skips no weights before torch 2.13"))
    items.sort(key=lambda item: bool(scenarios_of(item)))


def pytest_collection_finish(session):
    """Begins what tests of whole files wait for, file after file, while tests of one process run.
    What is not known to be waited for begins when a test asks for it."""
    # what is imported never goes: to look through it again and again takes a tenth of the time
    gc.freeze()
    option, before = session.config.option, None
    if option.collectonly or option.keyword or "::" in str(session.config.args):
        return

    asked = {name for item in session.items for name in scenarios_of(item)}
    for file, scenarios in SCENARIOS.items():
        chosen = [one for one in scenarios if f"{file}-{one.name}" in asked]
        if chosen:
            before = begin_scenarios(file, chosen, after=before)


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """Parses flags into a Run without supervised learning, with 40 prompts, and 12 of an
    evaluation."""
    addition_rows = ppo_loop.addition_rows
    few = lambda n, *args, **more: addition_rows(12 if more else 40, *args, **more)
    monkeypatch.setattr(ppo_loop, "addition_rows", few)
    more = ["--supervised-steps", "0", "--out-dir", str(tmp_path / "out")]
    return lambda flags: ppo_loop.parse([*more, *flags.split()])


@pytest.fixture
def whole_run(parse, monkeypatch):
    """Runs main with these flags on a small task, without a report."""
    monkeypatch.setattr(common, "write_report", lambda *_: None)
    monkeypatch.setattr(common.Stop, "signal", 0)
    small = "--train-batch-size 8 --critic.ppo-mini-batch-size 8 --eval-every 0 --steps 2"
    small += ' --dump-rollouts --actor.lr 1e-3 --actor.override-config {"initializer_range":0.1}'
    return lambda flags: ppo_loop.main(parse(f"{small} {flags}"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """What bars show, from the beginning."""
    bar = common.tqdm
    file = Terminal()
    now = {"file": file, "delay": 0, "mininterval": 0, "miniters": 1, "ncols": 80}
    monkeypatch.setattr(common, "tqdm", lambda *args, **more: bar(*args, **{**more, **now}))
    return file
