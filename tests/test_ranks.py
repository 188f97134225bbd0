"""What takes several processes, see scenarios.py; and how a run ends when one of them fails."""

import inspect

import pytest
import scenarios
from helpers import ROOT, succeeded, torchrun

SCENARIOS = ROOT / "tests" / "scenarios.py"
OF_FILE = [f for _, f in inspect.getmembers(scenarios, inspect.isfunction) if f.__module__ == "scenarios"]
ON_TWO_RANKS = [f.__name__ for f in OF_FILE if not inspect.signature(f).parameters]  # others take arguments


@pytest.fixture(scope="module")
def two_ranks():
    """One launch for all of them, because starting the processes takes most of the time of each."""
    return torchrun(2, SCENARIOS, ",".join(ON_TWO_RANKS))


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_on_two_ranks(name, two_ranks):
    assert f"ok {name}" in two_ranks.stdout, two_ranks.stderr


def test_bad_input_ends_every_rank(tmp_path):
    assert "ok" in succeeded(torchrun(2, SCENARIOS, "bad_input_ends_every_rank", tmp_path))


def test_checkpoints_go_from_any_layout_to_any_other(tmp_path):
    assert "ok" in succeeded(torchrun(2, SCENARIOS, "save_and_go_on", tmp_path))
    for ranks in (1, 2, 4):
        assert "ok" in succeeded(torchrun(ranks, SCENARIOS, "resume_and_go_on", tmp_path)), ranks


FAILS = """
import os, sys, time; sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
import common, {module}
critic, layout = {module}.{critic}
step = critic.update_critic
def fails(self, batch):
    if common.RANK == 1 and self.updates == 1:
        {act}
    return step(self, batch)
critic.update_critic = fails
config = {module}.Config(timeout_minutes=0.1, **layout)
run = {module}.Run(critic=config, rollouts={rows!r}, steps=9, eval_every=0, out_dir={out!r})
common.launch(lambda: {module}.main(run))
"""
FSDP = "DataParallelPPOCritic, {}"
MEGATRON = "MegatronPPOCritic, {'%s_model_parallel_size': 2}"


@pytest.mark.parametrize("module, critic, act, line", [
    ("critic_fsdp", FSDP, "raise common.UserError('--x 1: no')", "error on rank 1: --x 1: no"),
    ("critic_megatron", MEGATRON % "pipeline", "raise KeyError('oops')", "'oops'"),
    ("critic_megatron", MEGATRON % "tensor", "time.sleep(1000)", "error: another rank died or hangs"),
])  # fmt: skip
def test_when_one_rank_fails_all_end_and_a_message_is_seen(module, critic, act, line, tmp_path):
    script = tmp_path / "fails.py"
    rows = str(ROOT / "tests" / "rows.jsonl")
    words = {"module": module, "critic": critic, "act": act, "rows": rows, "out": str(tmp_path / "out")}
    script.write_text(FAILS.format(root=str(ROOT), **words))
    process = torchrun(2, script, timeout=120)
    assert process.returncode in (1, 2) and line in process.stderr, process.stderr
