"""The short form of faults.py."""

import faults
from helpers import printed, ran

SCENARIO_FILES = ("faults",)


def test_nothing_is_lost():
    print("\n" + printed(ran(faults.shortest, 0))[0])
