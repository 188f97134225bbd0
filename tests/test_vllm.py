"""What takes vLLM, see vllm_scenarios.py."""

import importlib.util
import sys

import pytest
from helpers import ROOT, run
from vllm_scenarios import NAMES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What all of them print, from one process."""
    return run(sys.executable, ROOT / "tests" / "vllm_scenarios.py", tmp_path_factory.mktemp("out"), timeout=1200)


@pytest.mark.parametrize("name", NAMES)
def test_vllm(name, launched):
    assert f"ok {name}:" in launched.stdout, launched.stdout[-5000:] + launched.stderr
