"""The price of content: code tokens of the four scripts, next to what tests/budget.json allows.

    python tests/budget.py           says what each script has and may have
    python tests/budget.py lower     lowers the numbers of the file to what the scripts have

Comments, docstrings and blank lines are free, and an f-string is one token: air costs nothing. To
raise a number, edit the file, and add a line to tests/budget.md that says why."""

import ast
import io
import json
import pathlib
import sys
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "tests/budget.json"
LAYOUT = ("NL", "NEWLINE", "INDENT", "DEDENT", "COMMENT", "ENDMARKER")


def docstring_lines(text):
    """Numbers of the lines of docstrings."""
    lines = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_tokens(text):
    """How many tokens of this Python text are code."""
    free = docstring_lines(text)
    count = 0
    depth = 0  # of f-strings, which are several tokens since Python 3.12
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_END":
            depth -= 1
            continue
        if depth == 0 and name not in LAYOUT and token.start[0] not in free:
            count += 1
        if name == "FSTRING_START":
            depth += 1
    return count


def tokens_now():
    """name of each script -> its code tokens."""
    names = json.loads(FILE.read_text())
    return {name: code_tokens((ROOT / name).read_text()) for name in names}


def main(words):
    allowed = json.loads(FILE.read_text())
    now = tokens_now()
    for name, most in allowed.items():
        print(f"{name:20} {now[name]:7,} of {most:7,}")
    print(f"{'together':20} {sum(now.values()):7,} of {sum(allowed.values()):7,}")
    if words == ["lower"]:
        lowest = {name: min(now[name], most) for name, most in allowed.items()}
        FILE.write_text(json.dumps(lowest, indent=4) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
