"""The structure of the house: what the top level holds, who imports whom, what a fork must copy.

The sections and functions that both critics share are in test_critic_megatron.py."""

import ast
import json
import subprocess

import budget
import pytest
import ring
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
    """common.py imports no script, a critic no other critic, and the loop the critic whose worker
    its actor is, and the other one only if it is used. None imports from tests/."""
    others = {file.stem for file in (ROOT / "tests").rglob("*.py")} | {"tests"}
    others |= {"critic_fsdp", "critic_megatron", "ppo_loop"}
    if name == "ppo_loop":
        others.remove("critic_fsdp")
    found = {alias.name for n in nodes(name, ast.Import) for alias in n.names}
    found |= {n.module for n in nodes(name, ast.ImportFrom)}
    assert not found & others
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


@pytest.mark.parametrize("name", json.loads(budget.FILE.read_text()))
def test_a_script_has_the_code_that_its_budget_allows(name):
    """Fewer code tokens lower the budget, so that it stays what the scripts have."""
    most = json.loads(budget.FILE.read_text())[name]
    now = budget.tokens_now()[name]
    more = "see tests/budget.md on how to raise it"
    assert now <= most, f"{name} has {now:,} code tokens of {most:,}: {more}"
    fewer = "run `python tests/budget.py lower`, and commit tests/budget.json"
    assert now >= most - 50, f"{name} has {now:,} code tokens of {most:,}: {fewer}"


def test_an_f_string_is_one_token_and_words_for_people_are_none():
    text = '''"""What it is."""
x = f"{1 + 1} and {2:>{3}}"  # a comment

def f():
    """What it
    does."""
    return x
'''
    assert budget.code_tokens(text) == len("x = f def f ( ) : return x".split())


def test_the_default_ring_takes_what_must_run_and_then_what_is_cheapest(monkeypatch):
    """A scenario is paid for once, with a launch, so a test that shares it becomes cheap."""
    monkeypatch.setattr(ring, "LAUNCH", 3)
    tests = {"a": [3, []], "b": [1, ["x"]], "c": [1, ["x"]], "d": [9, []], "e": [4, []]}
    found = {"cheap": {"x.py": 2}, "tests": tests, "scenarios": {"x": 1}}
    assert ring.choose(found, must=["d"], budget=21) == ({"d", "a", "e"}, 18, 9)
    assert ring.choose(found, must=["b"], budget=16) == ({"b", "c", "a", "e"}, 15, 5)
    assert ring.choose(found, must=[], budget=1) == (set(), 2, 0)


def test_the_default_ring_has_room_for_what_must_run():
    found = ring.known()
    _, seconds, of_must = ring.choose(found)
    assert of_must <= ring.MUST_BUDGET and seconds <= ring.BUDGET
    for name in ring.ids_of_must().values():
        assert any(test.startswith(name) for test in found["tests"]), name
