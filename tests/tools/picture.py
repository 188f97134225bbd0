"""The README's picture: where an answer goes wrong, by the critic of `python critic_fsdp.py`.

python tests/tools/picture.py out/critic_fsdp/hf .github/assets/answers.svg

It shows the first held-out sum of the toy with a carry and the first one without, of those with a
right and a wrong answer. Colours and numbers are what the critic expects just before a token, as in
a report; bars are true values.
"""

import collections
import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
from helpers import ROOT, common

PROMPT, CELL, ROW, TOP = 96, 64, 66, 30  # widths, heights
END = "end"  # what an answer ends with
STYLE = f"""<style>
text {{ font: 19px ui-monospace, monospace; text-anchor: middle; fill: #1f2328 }}
.small {{ font: 13px system-ui, sans-serif }}
.low {{ fill: {common.LOW} }} .high {{ fill: {common.HIGH} }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} }}
</style>"""


def chosen():
    """Rows of the toy: a right and a wrong answer to two sums."""
    lines = common.toy_rows(512, 0, held_out=True, tokenizer=common.char_tokenizer())
    answers = collections.defaultdict(dict)  # prompt -> {reward: its first row}
    for row in map(json.loads, lines):
        answers[row["prompt"]].setdefault(row["reward"], row)

    picked = {}  # with a carry -> the rows of the first sum
    for prompt, of_sum in answers.items():
        a, b = map(int, prompt.rstrip("=").split("+"))
        if len(of_sum) == 2:
            picked.setdefault(a % 10 + b % 10 >= 10, [of_sum[1.0], of_sum[0.0]])
    return [*picked[True], *picked[False]]


def scored(rows, critic):
    """The rows with the critic's values."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "rows.jsonl")
        file.write_text("\n".join(map(json.dumps, rows)))
        command = [sys.executable, ROOT / "critic_fsdp.py", "--score", file, "--model", critic]
        subprocess.run([*command, "--out-dir", folder], check=True, stdout=sys.stderr)
        return common.read_lines(f"{folder}/scored.jsonl")


def box(x, y, width, height, value):
    """A rectangle in the colour of a value: strongest at 0 and 1, none in the middle."""
    kind = "high" if value > 0.5 else "low"
    alpha = min(1.0, 2 * abs(value - 0.5)) * 0.75
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect class="{kind}" {place} fill-opacity="{alpha:.2f}"/>'


def text(x, y, said, kind=""):
    return f'<text x="{x}" y="{y}"{kind and f" class={kind!r}"}>{said}</text>'


def drawn(rows):
    """The SVG, a line for each row."""
    out = []
    for i, row in enumerate(rows):
        y = TOP + i * ROW
        out += [text(PROMPT / 2, y + 28, row["prompt"])]
        tokens = [*row["response"], END]
        x = 4 + PROMPT
        for token, value, true in zip(tokens, row["values"], row["truth"], strict=True):
            out += [box(x, y, CELL - 2, 44, value), box(x, y + 46, CELL - 2, 7, true)]
            out += [text(x + CELL / 2, y + 20, token, "small" if token == END else "")]
            out += [text(x + CELL / 2, y + 38, f"{value:z.2f}", "small")]
            x += CELL
        verdict = "right: 1 point" if row["reward"] else "wrong: 0 points"
        out += [text(PROMPT + 4 * CELL + 64, y + 28, verdict, "small")]

    width = PROMPT + 4 * CELL + 124
    height = TOP + len(rows) * ROW
    said = "Two sums with a right and a wrong answer. What the critic expects falls after the first"
    said += " wrong digit, and rises after the first right one."
    size = f'width="{round(1.5 * width)}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{said}</title>'
    title = text(
        width / 2,
        18,
        "points expected before a token: 1 is blue, 0 orange; bars: the truth",
        "small",
    )
    return "\n".join([head, STYLE, title, *out, "</svg>"]) + "\n"


if __name__ == "__main__":
    critic, file = sys.argv[1:]
    rows = scored(chosen(), critic)
    pathlib.Path(file).write_text(drawn(rows))
