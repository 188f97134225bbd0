"""What takes several ranks of Megatron, see megatron_scenarios.py."""

import sys

import pytest
from helpers import ROOT, run
from megatron_scenarios import NAMES


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What all of them print, from one process: most of the time would go into importing Megatron again and again."""
    return run(sys.executable, ROOT / "tests" / "megatron_scenarios.py", tmp_path_factory.mktemp("out"), timeout=1200)


@pytest.mark.parametrize("name", NAMES)
def test_on_several_ranks(name, launched):
    assert f"ok {name}" in launched.stdout, launched.stderr
