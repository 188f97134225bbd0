"""How well the tests notice faults: one small fault at a time in the maths, the batching and the loss.

    python tests/mutants.py      tries 150 random faults; a line for each that no test sees

A fault is another operator, another number, or a reversed condition. Each runs in its own process, with the
single-process tests of its script, until the first test fails."""

import ast
import copy
import io
import os
import random
import signal
import sys
import types
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401  loaded once, before the forks
import pytest
import torch
import transformers  # noqa: F401
import tyro

TESTS = Path(__file__).resolve().parent
FUNCTIONS = {
    "common": "gae add_returns last_action monte_carlo loss_weights value_loss hl_gauss_values hl_gauss_loss "
              "explained_variance auc update_metrics evaluate shuffled_rows rows_of_step groups computed",
    "critic_fsdp": "spread micro_batches pack_rows values loss learning_rate",
    "ppo_loop": "policy_loss kl_penalty next_kl_coef masked_whiten assign_credit prefer_the_mean",
}  # fmt: skip
SEEN_BY = {  # script -> its tests
    "common": (
        "test_edges.py", "test_common.py", "test_critic_fsdp.py -k 'verl or plain or means or no_action'",
        "test_heads_and_lora.py -k loops", "test_ppo_loop.py -k 'row_by_row or equal_a_loop'",
    ),
    "critic_fsdp": (
        "test_edges.py", "test_common.py -k 'spread or micro'",
        "test_critic_fsdp.py -k 'shared or schedules or verl'",
        "test_heads_and_lora.py -k 'one_rank and fsdp2'",
    ),
    "ppo_loop": (
        "test_edges.py", "test_common.py -k verl",
        "test_ppo_loop.py -k 'papers or equal_a_loop or row_by'",
    ),
}  # fmt: skip
OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add, ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or,
    ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.Not: ast.UAdd, ast.USub: ast.UAdd,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    faults: int = 150  # number of faults to try
    seed: int = 0  # for drawing them


def changes(node):
    """Yields functions that put one fault into a syntax node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield lambda x: setattr(x, "value", x.value + 1 if type(x.value) is not bool else not x.value)
    if type(getattr(node, "op", None)) in OTHER:
        yield lambda x: setattr(x, "op", OTHER[type(x.op)]())
    if type(getattr(node, "ops", [None])[0]) in OTHER:
        yield lambda x: x.ops.__setitem__(0, OTHER[type(x.ops[0])]())


def all_faults():
    """Yields (script, function, line, old code, new code, syntax tree of the script) for each fault."""
    for script, names in FUNCTIONS.items():
        original = ast.parse((TESTS.parent / f"{script}.py").read_text())
        for i, function in enumerate(ast.walk(original)):
            if isinstance(function, ast.FunctionDef) and function.name in names.split():
                for j, node in enumerate(ast.walk(function)):
                    for change in changes(node):
                        tree = copy.deepcopy(original)
                        there = list(ast.walk(list(ast.walk(tree))[i]))[j]
                        change(there)
                        yield script, function.name, node.lineno, ast.unparse(node), ast.unparse(there), tree


def run_tests(script, *_, tree):
    """Runs the tests with this tree of the script and exits, with 0 if all pass."""
    signal.alarm(300)  # a process that takes longer hangs
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    module = sys.modules[script] = types.ModuleType(script)
    module.__file__ = str(TESTS.parent / f"{script}.py")
    code = 1
    try:
        exec(compile(tree, module.__file__, "exec"), vars(module))
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            for tests in SEEN_BY[script]:
                file, _, words = tests.partition(" -k ")
                options = ("-x", "-q", "-p", "no:cacheprovider", "-k", words.strip("'"))
                code = int(pytest.main([*options, str(TESTS / file)]))
                if code:
                    break
    finally:
        os._exit(code)


def main(run):
    torch.set_num_threads(1)
    faults = list(all_faults())
    drawn = random.Random(run.seed).sample(faults, min(run.faults, len(faults)))
    print(f"{len(faults)} faults, {len(drawn)} of them drawn", flush=True)
    texts = {script: (TESTS.parent / f"{script}.py").read_text() for script in FUNCTIONS}
    controls = [(script, "", 0, "", "", ast.parse(text)) for script, text in texts.items()]
    waiting, running, seen = controls + drawn, {}, 0
    while waiting or running:
        if waiting and len(running) < os.cpu_count():
            fault = waiting.pop(0)
            pid = os.fork()
            if not pid:
                run_tests(*fault[:-1], tree=fault[-1])
            running[pid] = fault
            continue
        pid, status = os.wait()
        fault = running.pop(pid)
        seen += status != 0 and fault not in controls
        if fault in controls:
            assert status == 0, f"the tests fail without a fault in {fault[0]}"
        elif not status:
            print("not seen: {}.{}, line {}: {} -> {}".format(*fault), flush=True)
    print(f"{seen} of {len(drawn)} are seen, {seen / len(drawn):.0%}")


if __name__ == "__main__":
    main(tyro.cli(Run, description=__doc__))
