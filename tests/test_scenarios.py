"""Waits for what *_scenarios.py do on several ranks: both critics, ppo_loop.py, and vLLM."""

import importlib

import pytest
from forked import SCENARIOS
from helpers import HAS_VLLM, ran

SCENARIO_FILES = ["fsdp_scenarios", "megatron_scenarios", "ppo_scenarios"]
if HAS_VLLM:
    SCENARIO_FILES.append("vllm_scenarios")
for file in SCENARIO_FILES:
    importlib.import_module(file)
ALL = [(file, one) for file in SCENARIO_FILES for one in SCENARIOS[file]]


@pytest.mark.parametrize("file, one", ALL, ids=lambda x: getattr(x, "name", x))
def test_on_several_ranks(file, one):
    ran(one.function, name=one.name, file=file)


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
def test_vllm_is_installed():
    """Otherwise its scenarios are not among the tests, and this line says so."""
