"""What takes vLLM, see vllm_scenarios.py."""

import importlib.util

import pytest
from helpers import ended, scenarios
from vllm_scenarios import NAMES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(scope="module")
def launched():
    """What all of them print, from one process."""
    return ended(scenarios(1, "vllm_scenarios.py")[0])


@pytest.mark.parametrize("name", NAMES)
def test_vllm(name, launched):
    assert f"ok {name}:" in launched.stdout, launched.stdout[-5000:] + launched.stderr
