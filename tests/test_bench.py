"""What faults.py injects, in its short form; bench.py runs, and its contestants compute the same values."""

import re
import sys

from helpers import ROOT, run, succeeded


def test_nothing_is_lost():
    print("\n" + succeeded(run(sys.executable, ROOT / "tests" / "faults.py", "--short", timeout=900)))


def test_contestants_say_the_same():
    """Both critics, with and without shared prompts, and the bare loop, each in a process of its own; verl
    where it is installed."""
    work = ("--model", "tiny", "--mix", "long-prompt", "--rows", "16", "--rounds", "1")
    out = succeeded(run(sys.executable, "-W", "ignore", ROOT / "tests" / "bench.py", *work))
    lines = dict(re.findall(r"^\| (\w+(?: \w+)?) \| .* \| (\S+) \|$", out, flags=re.M))
    assert lines.keys() >= {"bare", "fsdp", "megatron", "fsdp alone", "megatron alone"}, out
    assert all(float(off) < 1e-5 for off in lines.values()), out
