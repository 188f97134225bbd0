"""What faults.py injects, in its short form."""

import sys

from helpers import ROOT, run, succeeded


def test_nothing_is_lost():
    print("\n" + succeeded(run(sys.executable, ROOT / "tests" / "faults.py", "--short", timeout=900)))
