"""The short form of faults.py."""

import faults
import pytest
from helpers import printed, ran

pytestmark = pytest.mark.slow

SCENARIO_FILES = ("faults",)


def test_nothing_is_lost():
    print("\n" + printed(ran(faults.shortest, 0))[0])
