"""The short form of power.py: power cuts, and the orders in which a disk may write."""

import power
import pytest
from helpers import printed, ran

SCENARIO_FILES = ("power",)


@pytest.mark.skipif(bool(power.why_not()), reason=f"power cuts: {power.why_not()}")
def test_power_cuts_lose_nothing():
    print("\n" + printed(ran(power.shortest, 0))[0])
