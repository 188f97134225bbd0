"""What takes several ranks of Megatron, or vLLM: see megatron_scenarios.py and vllm_scenarios.py."""

import megatron_scenarios
import pytest
import vllm_scenarios
from helpers import HAS_VLLM, ended, scenarios


@pytest.mark.parametrize("name", megatron_scenarios.NAMES)
def test_megatron(name):
    process = ended(scenarios(1, "megatron_scenarios.py")[0])
    assert f"ok {name}" in process.stdout, process.stderr


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
@pytest.mark.parametrize("name", vllm_scenarios.NAMES)
def test_vllm(name):
    process = ended(scenarios(1, "vllm_scenarios.py")[0])
    assert f"ok {name}:" in process.stdout, process.stdout[-5000:] + process.stderr
