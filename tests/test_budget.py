"""The size of the scripts: how much there is to read. Ceilings only go down, and floors only go up.

Code tokens are all tokens of Python's own tokenizer except comments, docstrings and line breaks."""

import ast
import difflib
import io
import subprocess
import token
import tokenize

import pytest
from helpers import ROOT

SCRIPTS = ("common", "critic_fsdp", "critic_megatron", "ppo_loop")
CRITICS = ("critic_fsdp", "critic_megatron")
TOP_LEVEL = {f"{name}.py" for name in SCRIPTS} | {"tests", "requirements.txt", "README.md", "LICENSE"}
TEXT = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
TREE = {name: ast.parse(text) for name, text in TEXT.items()}

LINES = {"common": 1450, "critic_fsdp": 1350, "critic_megatron": 1550, "ppo_loop": 1450}
LINES_IN_ALL = 5711
TOKENS_IN_ALL = 42000
TOKENS_A_LINE = {"common": 10, "critic_fsdp": 10, "critic_megatron": 10, "ppo_loop": 10}
TESTS = 9613
FLAGS = {"critic_fsdp": 52, "critic_megatron": 50, "ppo_loop": 101}
NAMES_OF_COMMON = {"critic_fsdp": 44, "critic_megatron": 41, "ppo_loop": 41}
REACHED = {"critic_fsdp": 27, "critic_megatron": 26}  # definitions that one update_critic reaches
SHARE = {"critic_fsdp": 55, "critic_megatron": 57}  # % of their lines that are in the script
SAME = 50  # % of the shorter critic's lines that are also in the other


def nodes(name, *kinds):
    """All nodes of these kinds in a script's syntax tree."""
    return [n for n in ast.walk(TREE[name]) if isinstance(n, kinds)]


def tokens_by_line(name):
    """Line number -> code tokens that begin there. An f-string is one token, as in Python 3.11."""
    skipped = {token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER, tokenize.NL, tokenize.COMMENT}
    documentation, found = set(), {}
    for node in nodes(name, ast.Module, ast.ClassDef, ast.FunctionDef):
        if ast.get_docstring(node) is not None:
            documentation.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    depth = 0  # of f-strings, which later Pythons split into tokens
    for t in tokenize.generate_tokens(io.StringIO(TEXT[name]).readline):
        kind = tokenize.tok_name[t.type]
        depth += kind == "FSTRING_START"
        first = depth == 0 or (depth == 1 and kind == "FSTRING_START")
        depth -= kind == "FSTRING_END"
        if first and t.type not in skipped and t.start[0] not in documentation:
            found[t.start[0]] = found.get(t.start[0], 0) + 1
    return found


def flags(name, *classes):
    """Number of annotated fields of the classes that hold flags, without fields that hold such a class."""
    holders = [n for n in TREE[name].body if isinstance(n, ast.ClassDef) and n.name in classes]
    fields = [x.target.id for node in holders for x in node.body if isinstance(x, ast.AnnAssign)]
    return len([field for field in fields if field not in ("critic", "actor", "vllm")])


def names_of_common(name):
    imports = [n for n in nodes(name, ast.ImportFrom) if n.module == "common"]
    used = {n.attr for n in nodes(name, ast.Attribute) if ast.unparse(n.value) == "common"}
    return used | {alias.name for n in imports for alias in n.names}


def reached(name, start="update_critic"):
    """(file, definition) -> its lines, for all that the critic's update calls, found by name."""
    places = {}
    for file in (name, "common"):
        for node in TREE[file].body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                places.setdefault(node.name, []).append((file, node.name, node))
            if isinstance(node, ast.ClassDef) and file == name:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
                        found = (file, f"{node.name}.{method.name}", method)
                        places.setdefault(f".{method.name}", []).append(found)
    todo = [place for place in places[f".{start}"] if "Critic." in place[1]]
    seen = {}
    while todo:
        file, definition, node = todo.pop()
        if (file, definition) in seen:
            continue
        seen[file, definition] = node.end_lineno - node.lineno + 1
        for n in ast.walk(node) if isinstance(node, ast.FunctionDef) else ():
            if isinstance(n, ast.Name):
                todo += [place for place in places.get(n.id, []) if place[0] in (file, "common")]
            elif isinstance(n, ast.Attribute) and ast.unparse(n.value) == "common":
                todo += [place for place in places.get(n.attr, []) if place[0] == "common"]
            elif isinstance(n, ast.Attribute) and file == name:
                if ast.unparse(n.value) in ("self", "critic") or ast.unparse(n.value).endswith(".critic"):
                    todo += places.get(f".{n.attr}", [])
    return seen


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_keeps_its_budget_of_lines_and_tokens(name):
    lines = TEXT[name].splitlines()
    code = tokens_by_line(name)
    assert len(lines) <= LINES[name]
    assert max(map(len, lines)) <= 110
    assert sum(len(line) > 100 for line in lines) <= 0.15 * sum(bool(line.strip()) for line in lines)
    assert sum(code.values()) <= TOKENS_A_LINE[name] * len(code)
    assert max(f.end_lineno - f.lineno + 1 for f in nodes(name, ast.FunctionDef)) <= 65


def test_all_scripts_together():
    assert sum(len(text.splitlines()) for text in TEXT.values()) <= LINES_IN_ALL
    codes = [tokens_by_line(name) for name in SCRIPTS]
    assert sum(sum(code.values()) for code in codes) <= TOKENS_IN_ALL
    assigned = [(n.targets[0], n.value) for name in SCRIPTS for n in nodes(name, ast.Assign)]
    pairs = [pair for pair in assigned if all(isinstance(side, ast.Tuple) for side in pair)]
    assert len(pairs) <= 0.01 * sum(map(len, codes))


def test_flags():
    counts = {name: flags(name, "Config", "Run") for name in CRITICS}
    counts["ppo_loop"] = flags("ppo_loop", "Run", "ActorConfig", "VLLMConfig")
    counts["ppo_loop"] += flags("critic_fsdp", "Config")
    assert all(counts[name] <= FLAGS[name] for name in FLAGS), counts


@pytest.mark.parametrize("name", CRITICS)
def test_an_update_is_read_in_the_script(name):
    seen = reached(name)
    share = sum(lines for (file, _), lines in seen.items() if file == name) / sum(seen.values())
    assert len(seen) <= REACHED[name] and 100 * share >= SHARE[name], (len(seen), share)


def test_the_critics_stand_side_by_side():
    """Many non-blank lines of the shorter one are also in the other, in the same order."""
    a, b = ([line.rstrip() for line in TEXT[name].splitlines() if line.strip()] for name in CRITICS)
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    assert 100 * sum(block.size for block in blocks) >= SAME * min(len(a), len(b))


def test_who_imports_what():
    """common.py imports no script, a critic no other critic, and the loop only the critic that is used."""
    for name, most in NAMES_OF_COMMON.items():
        assert len(names_of_common(name)) <= most, sorted(names_of_common(name))
    taken = [f.args for f in nodes("common", ast.FunctionDef)]
    assert not any(arg.arg == "run" for args in taken for arg in (*args.args, *args.kwonlyargs))
    for name in SCRIPTS:
        found = {alias.name for n in nodes(name, ast.Import) for alias in n.names}
        found |= {n.module for n in nodes(name, ast.ImportFrom)}
        assert not found & {*CRITICS, "ppo_loop", "tests", "helpers", "conftest"}, name
        assert not {"exec", "eval"} & {ast.unparse(n.func) for n in nodes(name, ast.Call)}, name


def test_the_top_level_holds_what_it_should():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not files:
        pytest.skip("not a clone")
    top = {file.split("/")[0] for file in files}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL
    tests = [file for file in files if file.startswith("tests/") and file.endswith(".py")]
    assert sum(len((ROOT / file).read_text().splitlines()) for file in tests) <= TESTS
