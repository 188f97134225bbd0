"""The dry form of gpu.py: on a CPU and on the simulated device all is well, and faults are seen."""

import importlib.util
import re
import sys

import gpu_helpers as gpu
import pretend_device
import pytest
import torch
from helpers import HAS_VLLM, ROOT, run, succeeded, worker
from reference import LOAD

import critic_fsdp

SCRIPT = ROOT / "tests" / "tools" / "gpu.py"
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
simulated = pytest.mark.skipif(not pretend_device.RUNS_HERE, reason=pretend_device.REASON)
CHANGED = """
import importlib.util
import runpy
import sys

sys.path[:0] = [{root!r}, {tests!r}]
import common

attention = common.attention
find_spec = importlib.util.find_spec
{change}
runpy.run_path({script!r}, run_name="__main__")
"""
WRONG_SCALE = """
def wrong(pack, q, k, v, scale, window=None, *options):
    return attention(pack, q, k, v, 1.1 * scale, window, *options)
common.attention = wrong
"""
NO_MEMORY = """
import torch
def without_memory(pack, q, k, v, scale, window=None, *options):
    if window:
        raise torch.OutOfMemoryError("out of memory")
    return attention(pack, q, k, v, scale, window, *options)
common.attention = without_memory
"""
NO_MEGATRON = """
def find(name, *rest):
    return None if name == "megatron" else find_spec(name, *rest)
importlib.util.find_spec = find
"""


def gpu_py(*words, change="", folder=None):
    """gpu.py as a person runs it, or in a process where some lines have changed what it finds."""
    script = SCRIPT
    if change:
        script = folder / "changed.py"
        places = {"root": str(ROOT), "tests": str(ROOT / "tests"), "script": str(SCRIPT)}
        script.write_text(CHANGED.format(**places, change=change))
    return run(sys.executable, script, *words)


def rows_in(out, card="CPU"):
    """{what: {column: cell}} of the lines for RESULTS.md, each with its date, card and torch."""
    table = out.partition("for tests/experiments/RESULTS.md:\n")[2].splitlines()
    names, _, *lines = [line[2:-2].split(" | ") for line in table if line.startswith("|")]
    rows = {}
    for line in lines:
        row = dict(zip(names, line, strict=True))
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert (row["card"], row["torch"]) == (card, torch.__version__)
        rows[f"{row['what']} {row.get('dtype', '')}".strip()] = row
    return rows


# ---- All is well ---------------------------------------------------------------------------------


def test_equal():
    """Critics, kernels, checkpoints and runs; each kind of check is a line for RESULTS.md."""
    chosen = ("fsdp lora", "megatron checkpointing", "kernels", "moves of megatron", "runs of fsdp")
    rows = rows_in(succeeded(gpu_py("equal", "--dry", *chosen)))
    expected = {"fsdp float32": 1, "fsdp bfloat16": 1, "kernel bfloat16": 16, "run float32": 1}
    if HAS_MEGATRON:
        expected |= {"megatron float32": 1, "megatron bfloat16": 1, "moved float32": 8}
    assert {name: int(row["checks"]) for name, row in rows.items()} == expected
    assert {row["faults"] for row in rows.values()} == {"0"}


def test_speed():
    """Both critics, with and without shared prompts, the bare loop, and ten kernels of each."""
    out = succeeded(gpu_py("speed", "--dry"))
    rows = rows_in(out)
    expected = {f"dry {name}" for name in ("fsdp", "fsdp, shared prompts", "bare")}
    if HAS_MEGATRON:
        expected |= {"dry megatron", "dry megatron, shared prompts"}
    assert rows.keys() == expected
    for row in rows.values():
        assert row["rows"] == "16 x 64" and row["update MFU"] == "--"  # no peak of a CPU is known
        assert int(row["values tokens/s"].replace(",", "")) > 0
    tens = re.findall(r"the ten largest kernels of an update of .*\n(?:.* calls .*\n){10}", out)
    assert len(tens) == (2 if HAS_MEGATRON else 1)


def test_budget():
    """Critics that are right, each way to compute packed rows, PPO on one set of weights, vLLM."""
    chosen = ("fsdp defaults", "7b", "0.5b", "1.5b", "toy", "share-base", "vllm")
    rows = rows_in(succeeded(gpu_py("budget", "--dry", *chosen)))
    expected = {"fsdp defaults float32", "fsdp defaults bfloat16", "share-base 7b", "toy"}
    expected |= {"7b fsdp", "7b fsdp, adapters", "0.5b bare", "0.5b fsdp", "1.5b fsdp"}
    expected |= {"1.5b megatron"} if HAS_MEGATRON else set()
    assert rows.keys() == expected | ({"vllm 1.5b"} if HAS_VLLM else set())


def test_ppo():
    rows = rows_in(succeeded(gpu_py("ppo", "--dry", "kl")))
    assert rows["kl"]["steps"] == "2" and "reference" in rows["kl"]["seconds of the last step"]


@simulated
def test_equal_on_the_simulated_device():
    """There, attention in bfloat16 calls torch's kernel for packed rows."""
    out = succeeded(gpu_py("equal", "--pretend", "megatron defaults", "fsdp defaults", "kernels"))
    rows = rows_in(out, "simulated H100")
    assert {row["faults"] for row in rows.values()} == {"0"}
    assert len(re.findall("^ok +kernel .* kernel varlen;", out, flags=re.M)) == 16


@simulated
def test_memory_on_the_simulated_device():
    """Its promises are kept there, and are no looser than they need be."""
    rows = rows_in(succeeded(gpu_py("memory", "--pretend", "dry fsdp")), "simulated H100")
    part = {name: float(row["GiB"]) / float(row["at most"]) for name, row in rows.items()}
    assert len(part) == 3
    assert 0.5 < part["dry fsdp: the formula and a third"] < 1
    assert 0.7 < part["dry fsdp: auto"] < 1
    assert part["dry fsdp: a tenth of the formula after offload"] < 0.1


# ---- Faults --------------------------------------------------------------------------------------


def test_a_wrong_scale_is_seen(tmp_path):
    """By all kernels; and a critic refuses to run when it compares itself with eager attention."""
    chosen = ("kernels", "fsdp defaults")
    process = gpu_py("equal", "--dry", *chosen, change=WRONG_SCALE, folder=tmp_path)
    out = process.stdout
    assert process.returncode == 1 and "\n18 faults\n" in out, out
    assert rows_in(out)["kernel bfloat16"]["faults"] == "16"
    assert re.search("^FAULT kernel 4/2 x 16: .* dq 1e-01, ", out, flags=re.M)


def test_after_an_error_the_rest_goes_on(tmp_path):
    """Kernels with a window run out of memory, and those without are still compared."""
    process = gpu_py("equal", "--dry", "kernels", change=NO_MEMORY, folder=tmp_path)
    out = process.stdout
    assert process.returncode == 1 and "\n8 faults\n" in out, out
    assert rows_in(out)["kernel bfloat16"]["checks"] == "8"
    last = (
        "FAULT kernel 8/8 x 256, window 16, shared prompts: error OutOfMemoryError: out of memory"
    )
    assert f"\n{last}\n" in out and out.count("Traceback") == 8


def test_without_megatron_its_checks_are_left_out(tmp_path):
    process = gpu_py("equal", "--dry", "megatron defaults", change=NO_MEGATRON, folder=tmp_path)
    out = succeeded(process)
    assert "\nmegatron defaults: left out, because megatron-core is not installed\n" in out
    assert not rows_in(out)


def test_mistakes_are_one_line():
    without_gpu = gpu_py("equal")
    assert without_gpu.returncode == 1 and "there is no GPU here; --dry" in without_gpu.stderr
    unknown = gpu_py("memory", "--dry", "8b")
    assert unknown.returncode == 2 and "8b: begins none of dry fsdp, " in unknown.stderr
    assert [len(process.stderr.splitlines()) for process in (without_gpu, unknown)] == [1, 1]


def test_the_commands_of_the_contributing_page_are_the_parts():
    page = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    block = page.partition("```bash card\n")[2].partition("```")[0]
    parts = re.search(r"{(.*)}", succeeded(gpu_py("--help")))[1].split(",")
    assert block.splitlines() == [f".venv/bin/python tests/tools/gpu.py {part}" for part in parts]


# ---- Tools ---------------------------------------------------------------------------------------


def test_the_bare_loop_does_the_critics_work(tmp_path):
    """From equal weights, values before and after an update agree as far as bfloat16 allows."""
    flags = gpu.flags_of_shape("dry") | {"lr": 1e-2, "ppo_max_token_len_per_gpu": 256}
    critic = worker(**flags, param_dtype="bfloat16")
    critic.export_hf(tmp_path / "hf")
    loop = gpu.BareLoop(4, critic_fsdp.Config(**flags))
    loop.model.load_state_dict(LOAD(tmp_path / "hf").state_dict())
    rows = gpu.rows_of(64, prompts=2)

    def values_of_both():
        padded = [v_L for v_BL in loop.compute_values(rows) for v_L in v_BL]
        return critic.compute_values(rows), torch.cat([v[:n] for v, n in zip(padded, rows.lengths)])

    ours_T, theirs_T = values_of_both()
    torch.testing.assert_close(theirs_T, ours_T, rtol=0, atol=0.05)
    critic.update_critic(rows)
    loop.update_critic(rows)
    after_T, also_T = values_of_both()
    moved = float((after_T - ours_T).abs().max())
    assert moved > 1
    torch.testing.assert_close(also_T, after_T, rtol=0, atol=0.1 * moved)


def test_rows_of_real_sizes():
    """Eight answers to each prompt of half the length; the longest row has the length."""
    rows = gpu.rows_of(64, prompts=3)
    assert [len(same) for same in rows.groups()] == [8] * 3
    assert rows.actions.tolist() == [n - 32 for n in rows.lengths]
    assert max(rows.lengths) == 64 and min(rows.lengths) >= 40
    full = gpu.rows_that_fill(16, 100)
    assert full.lengths == [16] * 6 and len(full.groups()) == 6
