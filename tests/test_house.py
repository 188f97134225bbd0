"""The structure of the house: what the top level holds, who imports whom, what a fork must copy.

The sections and functions that both critics share are in test_critic_megatron.py."""

import ast
import subprocess

import pytest
from helpers import ROOT

SCRIPTS = ("common", "critic_fsdp", "critic_megatron", "ppo_loop")
TOP_LEVEL = {f"{name}.py" for name in SCRIPTS} | {
    "tests",
    "requirements.txt",
    "README.md",
    "LICENSE",
}
TREE = {name: ast.parse((ROOT / f"{name}.py").read_text()) for name in SCRIPTS}


def nodes(name, *kinds):
    """All nodes of these kinds in a script's syntax tree."""
    return [n for n in ast.walk(TREE[name]) if isinstance(n, kinds)]


def test_the_top_level_holds_what_it_should():
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    if not files:
        pytest.skip("not a clone")
    top = {file.split("/")[0] for file in files}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL


@pytest.mark.parametrize("name", SCRIPTS)
def test_who_imports_whom(name):
    """common.py imports no script, a critic no other critic, and the loop only the critic that is
    used."""
    found = {alias.name for n in nodes(name, ast.Import) for alias in n.names}
    found |= {n.module for n in nodes(name, ast.ImportFrom)}
    assert not found & {
        "critic_fsdp",
        "critic_megatron",
        "ppo_loop",
        "tests",
        "helpers",
        "conftest",
    }
    assert ("common" in found) == (name != "common")


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_runs_text_as_code(name):
    assert not {"exec", "eval"} & {ast.unparse(n.func) for n in nodes(name, ast.Call)}


def test_the_first_floor_of_common_names_nothing_of_the_second():
    """A fork may change what a critic computes without opening what a run needs."""
    lines = (ROOT / "common.py").read_text().splitlines()
    [line] = [n for n, text in enumerate(lines, 1) if text.startswith("# The second floor: ")]
    above = set()  # names that are read there, but for those of arguments and variables
    below = set()  # names that are defined there
    for node in TREE["common"].body:
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        if node.lineno < line:
            arguments = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
            above |= {n.id for n in names} - stored - arguments
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            below.add(node.name)
        else:
            below |= stored
    assert {"gae", "Batch", "attention"} <= above and {"Logger", "TINY"} <= below
    assert above & below == set()


def test_no_utility_takes_a_whole_run():
    """common.py does not know its callers: its functions take the values that they need."""
    taken = [function.args for function in nodes("common", ast.FunctionDef)]
    names = [arg.arg for args in taken for arg in (*args.args, *args.kwonlyargs)]
    assert names and "run" not in names
