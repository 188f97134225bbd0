"""Runs the scripts *_scenarios.py, for critic_megatron.py and ppo_loop.py on several ranks, and
vLLM."""

import re

import megatron_scenarios
import ppo_scenarios
import pytest
import vllm_scenarios
from helpers import HAS_VLLM, ended, scenarios

SCRIPTS = (megatron_scenarios, ppo_scenarios, vllm_scenarios)


@pytest.mark.parametrize("script, name", [(s.__name__, name) for s in SCRIPTS for name in s.NAMES])
def test_on_several_ranks(script, name):
    """All scenarios of a script run in one launch, because imports take most of the time."""
    if script == "vllm_scenarios" and not HAS_VLLM:
        pytest.skip("vllm is not installed")
    process = ended(scenarios(1, f"{script}.py")[0])
    ok = re.search(rf"^ok {re.escape(name)}(:|$)", process.stdout, flags=re.M)
    assert ok, process.stdout[-5000:] + process.stderr
