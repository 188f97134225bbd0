"""The short form of hosts.py: a link that is cut, and a host that cannot write."""

import hosts
import pytest
from helpers import printed, ran

SCENARIO_FILES = ("hosts",)


@pytest.mark.skipif(bool(hosts.why_not()), reason=f"{hosts.why_not()}, see hosts.py")
def test_several_hosts():
    said = printed(ran(hosts.shortest, 0))[0]
    print("\n" + said)
    assert "nothing lost" in said, said
