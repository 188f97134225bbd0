"""Waits for what *_scenarios.py do on several ranks: critic_fsdp.py, critic_megatron.py, ppo_loop.py,
and vLLM."""

import fsdp_scenarios  # noqa: F401
import megatron_scenarios  # noqa: F401
import pytest
from forked import SCENARIOS
from helpers import HAS_VLLM, ran

SCENARIO_FILES = ("fsdp_scenarios", "megatron_scenarios", "ppo_scenarios")
SCENARIO_FILES += ("vllm_scenarios",) * HAS_VLLM
ALL = [(file, one) for file in SCENARIO_FILES for one in SCENARIOS[file]]


@pytest.mark.parametrize("file, one", ALL, ids=lambda x: getattr(x, "name", x))
def test_on_several_ranks(file, one):
    ran(one.function, name=one.name, file=file)
