"""bench.py's contestants agree, and its simulated rank sends what a real one sends."""

import re
import sys

import pytest
from helpers import ROOT, run, succeeded

BENCH = ROOT / "tests" / "tools" / "bench.py"


@pytest.mark.parametrize("work, names", [
    ("--mix long-prompt --rows 8 --answers 4", ["bare", "fsdp", "megatron", "fsdp alone",
                                                "megatron alone"]),
    ("--mix episode --rows 48", ["fsdp whole", "fsdp", "fsdp alone", "megatron"]),
])  # fmt: skip
def test_contestants_compute_the_same_values(work, names):
    """Both critics, with and without shared prompts, the bare loop; an episode in a row for each
    turn, and in one long row."""
    flags = ("--model", "tiny", "--rounds", "1", *work.split(), "--contestants", *names)
    out = succeeded(run(sys.executable, BENCH, *flags))
    lines = dict(re.findall(r"^\| (\w+(?: \w+)?) \| .* \| (\S+) \|$", out, flags=re.M))
    assert [*lines] == names, out
    assert all(float(off) < 1e-5 for off in lines.values()), out


def test_the_simulated_rank_sends_what_a_real_one_sends():
    """Rank 0 of two: the bytes of rows that leave it, in the simulation and for real."""
    simulated = succeeded(run(sys.executable, BENCH, "--host", "--ranks", "2"))
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    real = succeeded(run(sys.executable, *torchrun, BENCH, "--host"))
    [sent] = re.findall(r"^\| 2 \|.* (\S+) \|$", simulated, flags=re.M)
    assert re.findall(r"^\| 2 real \|.* (\S+) \|$", real, flags=re.M) == [sent]
    assert float(sent) > 10
