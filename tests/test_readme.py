"""Every command of the README runs as written, in a copy of the scripts; what it says of a run, the run still says."""

import re
import shlex
import shutil
import sys

import pytest
import tyro
from helpers import ROOT, SHARED, run, succeeded, torchrun

import critic_fsdp
import critic_megatron
import ppo_loop

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```bash (\w+)\n(.*?)^```", README, flags=re.M | re.S)
COMMANDS = [(kind, line) for kind, block in BLOCKS for line in block.strip().splitlines()]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The scripts alone, in a folder of their own beside the development data."""
    folder = tmp_path_factory.mktemp("copy")
    (folder / "main").mkdir()
    for file in (*ROOT.glob("*.py"), *(ROOT / "tests" / name for name in ("rows.jsonl", "compare_runs.py"))):
        (folder / "main" / file.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(file, folder / "main" / file.relative_to(ROOT))
    (folder / "shared").symlink_to(SHARED)
    return folder / "main"


def test_every_command_is_of_a_kind_that_is_tested():
    assert {kind for kind, _ in COMMANDS} == {"install", "run", "long", "gpu", "test"}
    assert not re.search(r"^```(bash|sh|console)?$\n(pip|python|torchrun)", README, flags=re.M)


def typed(line, folder):
    """A command in a folder. The first of torchrun, and the last, are typed into a shell, the rest start as forks."""
    words, launched = shlex.split(line), [x for kind, x in COMMANDS if kind == "run" and x.startswith("torchrun")]
    if line in (launched[0], launched[-1]):
        return run("bash", "-c", line, cwd=folder)
    if words[0] == "torchrun":
        assert words[1] == "--nproc-per-node"
        return torchrun(int(words[2]), *words[3:], cwd=folder)
    assert words[0] == "python"
    return run(sys.executable, *words[1:], cwd=folder)


def held_out(log):
    """Explained variances of the evaluations in a log."""
    return [float(x) for x in re.findall(r"^held out   explained var (\S+)", log, flags=re.M)]


@pytest.mark.parametrize("line", [line for kind, line in COMMANDS if kind == "run"])
def test_command_runs_as_written(line, copy):
    if "../shared" in line and not SHARED.is_dir():
        pytest.skip(f"needs the development data in {SHARED}")
    if (
        "out/critic_fsdp/hf" in line and not (copy / "out" / "critic_fsdp" / "hf").is_dir()
    ):  # this test alone: without the command above it
        succeeded(run(sys.executable, "critic_fsdp.py", "--steps", 50, cwd=copy))
    out = succeeded(typed(line, copy))
    ends = {"--plan": "step ", "compare_runs": "weights "}
    assert out.splitlines()[-1].startswith(next((end for words, end in ends.items() if words in line), "saved "))
    shown = README[README.index(line) :].split("```\n")[2]  # the log that follows the command, if one does
    if line == "python critic_fsdp.py":
        rising = held_out(out)
        assert rising[-1] > 0.5 and rising[-1] > rising[1] > rising[0], rising
    if line == "python ppo_loop.py":
        first, *_, last = (float(x) for x in re.findall(r"^held out   accuracy (\S+)", out, flags=re.M))
        assert first < 0.45 and last > 0.8, (first, last)
        assert (copy / "out" / "ppo_loop" / "curves.png").is_file()
    elif line == "python critic_fsdp.py" or "gsm8k" in line and "critic_fsdp.py" in line:
        assert held_out(shown)[-1] == pytest.approx(held_out(out)[-1], abs=0.03)


@pytest.mark.parametrize("line", [line for kind, line in COMMANDS if kind in ("gpu", "long")])
def test_command_for_gpus_or_with_patience_has_flags_that_exist(line):
    words = shlex.split(line)
    ranks = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1
    ranks *= int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
    script = next(s for s in (critic_fsdp, critic_megatron, ppo_loop) if f"{s.__name__}.py" in words)
    args = words[words.index(f"{script.__name__}.py") + 1 :]
    if script is ppo_loop:
        run_ = ppo_loop.parse(args)
        ppo_loop.validate_actor(run_.actor)
        script = ppo_loop.critic_module(run_.backend)
    else:
        run_ = tyro.cli(script.Run, args=args)
    script.validate(run_.critic, ranks)
