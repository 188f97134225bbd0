"""What takes several ranks of Megatron, see megatron_scenarios.py."""

import pytest
from helpers import ended, scenarios
from megatron_scenarios import LAUNCHES


@pytest.fixture(scope="module")
def launched():
    """What all of them print, from one process, because importing Megatron takes most of the time."""
    return ended(scenarios(1, "megatron_scenarios.py")[0])


@pytest.mark.parametrize("name", [name for name, *_ in LAUNCHES])
def test_on_several_ranks(name, launched):
    assert f"ok {name}" in launched.stdout, launched.stderr
