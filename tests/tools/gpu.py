"""What to run first on a machine with a GPU: is everything right there, how fast, and what fits?

    python tests/tools/gpu.py budget    what is worth most, in nine minutes
    python tests/tools/gpu.py equal     both critics against the CPU, kernels, checkpoints, runs
    python tests/tools/gpu.py speed     tokens/s, MFU, memory and kernels, next to a bare loop
    python tests/tools/gpu.py memory    what a formula, auto and --offload promise, and what happens
    python tests/tools/gpu.py ppo       some steps of ppo_loop.py

A part goes on after a fault and then ends with exit status 1. Each row is printed as soon as it is
known, and last the lines for RESULTS.md. NAMEs choose what begins with them; a wrong one lists
all. --budget: of a micro-batch in `speed`, unless a row is longer. --dry: tiny sizes, also on a
CPU. --pretend: the same on the simulated device of pretend_device.py.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import io
import itertools
import pathlib
import sys
import time
from functools import partial
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import forked  # noqa: F401  # imports torch and megatron, before a device is pretended
import pretend_device

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("part", choices=("budget", "equal", "speed", "memory", "ppo"))
parser.add_argument("names", nargs="*", metavar="NAME")
parser.add_argument("--budget", type=int, default=8192, metavar="TOKENS")
parser.add_argument("--dry", action="store_true")
parser.add_argument("--pretend", action="store_true")
ASKED = parser.parse_intermixed_args()
DRY = ASKED.dry or ASKED.pretend

if not pretend_device.REAL and not DRY:
    sys.exit("error: there is no GPU here; --dry tries everything with tiny sizes")
if ASKED.pretend:  # before anything asks for a device
    if not pretend_device.RUNS_HERE:
        sys.exit(f"error: --pretend: {pretend_device.REASON}")
    pretend_device.install()

import gpu_helpers as gpu
import torch
import torch.nn.functional as F
import transformers
from helpers import BINS, SCRATCH, random_batch
from reference import LOAD, plain_loop

import common
import critic_fsdp

SCRIPTS = {"fsdp": critic_fsdp}
if importlib.util.find_spec("megatron"):
    import critic_megatron

    SCRIPTS["megatron"] = critic_megatron

FOLDER = pathlib.Path(SCRATCH.name)
AUTO = "auto:0.01" if DRY else "auto"


# ---- equal: the device computes what the CPU computes --------------------------------------------

ROWS = random_batch(12, vocab_size=60, prompts=3)
SIZES = {"ppo_mini_batch_size": 6, "ppo_max_token_len_per_gpu": 100}  # an update has two steps
BOUNDED = {"value_head": "bounded", "value_range": (-5.0, 5.0)}
RECOMPUTED = {"gradient_checkpointing": True}
BOTH = {  # what both critics can do on one card -> flags
    "defaults": {},
    "rows alone": {"share_prompts": False},
    "padded": {"use_remove_padding": False},
    "checkpointing": RECOMPUTED,
    "bins": {**BINS, "value_range": (-5.0, 5.0)},
    "bounded": BOUNDED,
    "frozen": {"freeze_modules": "norm"},
    "experts": {"model": "tiny-qwen3-moe"},
}
FSDP = {  # what only critic_fsdp.py can do
    "fsdp1": {"strategy": "fsdp1"},
    "none": {"strategy": "none"},
    "offloads activations": {"activation_offload": True},
    "offloads padded": {"use_remove_padding": False, "activation_offload": True},
    "offloads inputs": {**RECOMPUTED, "activation_offload": True},
    "offload policy": {"offload_policy": True},
    "compiled": {"compile": "on"},
    "compiled, checkpointing": {"compile": "on", "gradient_checkpointing": True},
    "compiled, rows alone": {"compile": "on", "share_prompts": False},
    "lora": {"lora_rank": 4},
    "lora fsdp1": {"lora_rank": 4, "strategy": "fsdp1"},
    "window": {"model": "tiny-mistral", "override_config": '{"sliding_window": 8}'},
    "soft cap": {"model": "tiny-gemma2"},
    "gpt2": {"model": "tiny-gpt2"},
}
CASES = {f"fsdp {name}": flags for name, flags in (BOTH | FSDP).items()}
CASES |= {f"megatron {name}": flags for name, flags in BOTH.items()}

MOVERS = ("fsdp defaults", "fsdp fsdp1", "megatron defaults")  # read each other's checkpoints

# flags that change the function, not only how it is computed
FUNCTION = {"model", "override_config", "fork", "value_head", "value_range"}
FUNCTION |= {"lora_rank", "freeze_modules"}
LIMITS = {  # as in test_device.py; of losses and norms relative
    "float32": {"values": 2e-5, "loss": 1e-4, "norm": 1e-4, "values after": 1e-3},
    "bfloat16": {"values": 0.1, "loss": 0.1, "norm": 0.1, "values after": 0.5},
}
LIMITS_OF_KERNELS = {"out": 1e-2, "dq": 2e-2, "dk": 2e-2, "dv": 2e-2}  # relative, in bfloat16


class Heads(NamedTuple):
    queries: int
    keys: int
    features: int  # of one head


HEADS = (Heads(4, 2, 16), Heads(14, 2, 64), Heads(28, 4, 128), Heads(8, 8, 256))


def judge(report, name, off, most, **cells):
    """Adds a row about {what: how far it is off}, where nothing may exceed its limit."""
    good = all(x <= most[what] for what, x in off.items())
    words = ", ".join(f"{what} {x:.0e}" for what, x in off.items())
    closest = max(x / most[what] for what, x in off.items())
    report.add(name, good, **cells, off=words, **{"of its limit": closest})


def critic_of(case, **flags):
    """A new critic of one of the CASES."""
    script, _, _ = case.partition(" ")
    return gpu.new_critic(SCRIPTS[script], **SIZES, **CASES[case], **flags)


def learned(worker):
    """Values, loss and gradient norm of an update, and values after it."""
    before_T = worker.compute_values(ROWS)
    metrics = worker.update_critic(ROWS)
    after_T = worker.compute_values(ROWS)
    numbers = {"loss": metrics["critic/vf_loss"], "norm": metrics["critic/grad_norm"]}
    return {"values": before_T, **numbers, "values after": after_T}


@functools.cache
def learned_on_the_host(**flags):
    """The same by critic_fsdp.py on the CPU, in float32."""
    return learned(gpu.new_critic(critic_fsdp, torch.device("cpu"), **SIZES, **flags))


def compare(case, report):
    """A critic on the device, in float32 and bfloat16, against FSDP's in float32 on the CPU."""
    function = {name: x for name, x in CASES[case].items() if name in FUNCTION}
    for dtype, most in LIMITS.items():
        with report.attempt(f"{case} {dtype}"):
            theirs = learned_on_the_host(**function)
            worker = critic_of(case, param_dtype=dtype)
            common.CurrentPack.kernel = "padded"  # attention over packed rows changes it
            ours = learned(worker)

            off = {}
            for what, x in ours.items():
                if torch.is_tensor(x):
                    off[what] = float((x - theirs[what]).abs().max())
                else:
                    off[what] = abs(x / theirs[what] - 1)
            judge(report, case, off, most, dtype=dtype, kernel=common.CurrentPack.kernel)


def kernels(report):
    """Attention over packed rows in bfloat16 against SDPA in float32, one row after the other."""
    rows = gpu.rows_of(64 if DRY else 2048, prompts=1 if DRY else 2)
    some = 16 if DRY else 500
    for heads, window, share in itertools.product(HEADS, (None, some), (False, True)):
        name = f"kernel {heads.queries}/{heads.keys} x {heads.features}"
        if window:
            name += f", window {window}"
        if share:
            name += ", shared prompts"

        # torch's own, and flash-attn where it is installed
        for flash in {None, common.flash_attn_varlen_func}:
            chosen = mock.patch.object(common, "flash_attn_varlen_func", flash)
            with report.attempt(name), chosen:
                off = kernel_is_off(rows, heads, window, share)
                kernel = common.CurrentPack.kernel
                judge(report, name, off, LIMITS_OF_KERNELS, dtype="bfloat16", kernel=kernel)


def kernel_is_off(rows, heads, window, share):
    """{what: relative error} of attention and its gradients."""
    slots_S, index_T, pack = critic_fsdp.pack_rows(rows, gpu.DEVICE, share)
    index_T = index_T.to(gpu.DEVICE)
    sizes = [(1, n, len(slots_S), heads.features) for n in (heads.queries, heads.keys, heads.keys)]
    qkv = [torch.randn(size, device=gpu.DEVICE).bfloat16().requires_grad_() for size in sizes]
    grad_1HTD = torch.randn(1, heads.queries, len(index_T), heads.features, device=gpu.DEVICE)

    def with_gradients(out_1HTD):
        return out_1HTD.detach(), *torch.autograd.grad(out_1HTD, qkv, grad_1HTD)

    out_1HSD = common.attention(pack, *qkv, heads.features**-0.5, window)
    ours = with_gradients(out_1HSD[:, :, index_T].float())
    in_float32 = [x[:, :, index_T].float() for x in qkv]
    exact = with_gradients(attention_of_rows_alone(*in_float32, rows, window))

    off = {}
    for what, x, y in zip(LIMITS_OF_KERNELS, ours, exact):
        off[what] = float((x.float() - y.float()).norm() / y.float().norm())
    return off


def attention_of_rows_alone(q, k, v, rows, window):
    """(1, H, T, D) attention by SDPA with a mask for each row; keys may have fewer heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outs = []
    for part in zip(*(x.split(rows.lengths, 2) for x in (q, k, v))):
        places = torch.arange(part[0].shape[2], device=gpu.DEVICE)
        back = places[:, None] - places
        seen = (back >= 0) & (back < (window or len(places)))
        outs.append(F.scaled_dot_product_attention(*part, seen))
    return torch.cat(outs, 2)


def moves(case, report):
    """What must leave a critic as it is: offload, an export, a checkpoint for each critic."""
    most = {"values": 2e-5, "values after": 1e-3, "left": 0.1}
    before = gpu.clear_device()
    worker = critic_of(case, param_dtype="float32")
    worker.update_critic(ROWS)
    values_T = worker.compute_values(ROWS)

    def same(name, found_T, expected_T=values_T, what="values"):
        off = {what: float((found_T - expected_T).abs().max())}
        judge(report, f"moved {case}: {name}", off, most, dtype="float32")

    # offload leaves almost nothing on the device
    whole = gpu.held() - before
    worker.offload()
    left = {"left": (gpu.held() - before) / whole}
    if gpu.CUDA:
        judge(report, f"moved {case}: offloaded", left, most)
    worker.onload()
    same("back from offload", worker.compute_values(ROWS))

    # transformers reads an export, and computes one row at a time
    worker.export_hf(FOLDER / "hf")
    model = LOAD(FOLDER / "hf", dtype=torch.float32)
    exported_T, _ = plain_loop(ROWS, lambda _, ids: model(input_ids=ids).logits[0])
    same("exported", exported_T)

    # each critic continues from a checkpoint, with the same moments
    worker.save_checkpoint(FOLDER / "checkpoint")
    worker.update_critic(ROWS)
    after_T = worker.compute_values(ROWS)
    for other in MOVERS:
        if missing(other):
            continue
        worker = critic_of(other, param_dtype="float32")
        worker.load_checkpoint(FOLDER / "checkpoint")
        same(f"resumed by {other}", worker.compute_values(ROWS))
        worker.update_critic(ROWS)
        same(f"updated by {other}", worker.compute_values(ROWS), after_T, "values after")


def run_and_resume(name, report):
    """A run that is stopped, saves in the background and uses auto learns as one that does not."""
    script = SCRIPTS[name]
    rows = FOLDER / "rows.jsonl"
    rows.write_text("\n".join(common.toy_rows(64, 0)))
    whole = FOLDER / f"{name} whole"
    parts = FOLDER / f"{name} parts"
    runs = (  # folder, steps, budget, whether it resumes
        (whole, 4, 4096, None),
        (parts, 2, AUTO, None),
        (parts, 4, AUTO, "auto"),
    )
    for out, steps, budget, resume in runs:
        gpu.clear_device()
        config = script.Config(ppo_max_token_len_per_gpu=budget, param_dtype="float32")
        files = {"rollouts": str(rows), "out_dir": str(out), "resume": resume}
        saves = {"save_every": 1, "async_save": out == parts, "eval_every": 0}
        with contextlib.redirect_stdout(io.StringIO()):
            script.main(script.Run(config, steps=steps, **files, **saves))

    # the losses of four steps
    losses = []
    for out in (whole, parts):
        lines = common.read_lines(out / "metrics.jsonl")
        losses.append(torch.tensor([x["critic/vf_loss"] for x in lines if "critic/vf_loss" in x]))
    off = {"loss": float((losses[1] / losses[0] - 1).abs().max())}
    judge(report, f"run of {name}, resumed", off, {"loss": 1e-3}, dtype="float32")


# ---- speed and memory: models and rows of real sizes ---------------------------------------------


LENGTHS = {2048: 2, 8192: 1, 32768: 1}  # of the longest row -> prompts, of 8 answers each


def speed(name, report):
    """A shape of Qwen2.5, computed by fsdp, megatron or the bare loop, at rows of one length. 7
    billion weights train with LoRA; they and the longest rows compute activations twice."""
    shape, by, length = name.split()
    if shape == "7b" and by == "megatron":
        print(f"{name}: left out, because it needs LoRA, which critic_megatron.py has not")
        return

    length = int(length)
    rows = gpu.rows_of(length, LENGTHS.get(length, 2))
    flags = gpu.flags_of_shape(shape)
    flags["ppo_max_token_len_per_gpu"] = budget = max(length, ASKED.budget)
    flags["gradient_checkpointing"] = length > 8192 or shape == "7b"
    if shape == "7b":
        flags["lora_rank"] = 16

    # transformers alone
    if by == "bare":
        loop = gpu.BareLoop(budget // length, critic_fsdp.Config(**flags))
        gpu.race(report, f"{shape} {by}", loop, loop, rows, share=False)
        return

    # a critic
    with gpu.quick_weights():
        worker = gpu.new_critic(SCRIPTS[by], **flags)
    for share in (True, False):
        words = ", shared prompts" if share else ""
        worker.config = dataclasses.replace(worker.config, share_prompts=share)
        worker.critic.config = worker.config
        gpu.race(report, f"{shape} {by}{words}", worker, worker.critic, rows, share)
    if length == 8192 or DRY:
        gpu.print_kernels(f"an update of {name}", worker.update_critic, rows)


def memory(name, report):
    """What a formula, auto and --offload promise of this shape, and what happens, in GiB."""
    shape, by, *policy = name.split()
    flags = gpu.flags_of_shape(shape)
    flags["ppo_max_token_len_per_gpu"] = AUTO
    if policy:
        flags["offload_policy"] = True
    before = gpu.clear_device()
    with gpu.quick_weights():
        worker = gpu.new_critic(SCRIPTS[by], **flags)

    def add(promise, most, found, **cells):
        found -= before
        report.add(f"{name}: {promise}", not found > most, **{"at most": most}, GiB=found, **cells)

    # auto tries how many tokens fit
    length = 64 if DRY else 2048
    seconds, _ = gpu.measure(worker.set_budget, length, "the longest row")
    tokens = worker.critic.max_tokens

    # the formula leaves activations out, so few tokens; the first update creates the optimizer's
    # state
    formula = formula_of(worker.critic.model)
    few = gpu.rows_that_fill(16, 32)
    worker.update_critic(few)
    _, peak = gpu.measure(worker.update_critic, few)
    if not policy:
        add("the formula and a third", formula * 4 / 3, peak)

    # a micro-batch as large as the budget
    spent, peak = gpu.measure(worker.update_critic, gpu.rows_that_fill(length, tokens))
    most = 0.01 if DRY else gpu.MEMORY
    words = f"found in {seconds:.1f}, updated in {spent:.1f}"
    add("auto", most, peak, tokens=tokens, seconds=words)

    # weights, gradients and optimizer state leave; the second time, memory is pinned already
    away, _ = gpu.measure(worker.offload)
    left = gpu.held()
    back, _ = gpu.measure(worker.onload)
    again, _ = gpu.measure(worker.offload)
    words = f"away in {away:.1f}, back in {back:.1f}, away again in {again:.1f}"
    add("a tenth of the formula after offload", formula / 10, left, seconds=words)


def formula_of(model):
    """GiB that one rank needs before activations, by the reference's formula for one shard."""
    weights = sum(p.numel() for p in model.parameters())
    layers = common.transformer_blocks(model)
    root = weights - sum(p.numel() for layer in layers for p in layer.parameters())
    return (18 * weights + 8 * root) / gpu.GIB


# ---- budget: what is worth most, in one call of nine minutes -------------------------------------

TWICE = {"compile": "on", "gradient_checkpointing": True}
PACKED = {  # a shape of Qwen2.5 and who computes it -> flags, tokens of a micro-batch
    "7b fsdp": (TWICE, 16384),
    "7b fsdp, adapters": (TWICE | {"lora_rank": 16}, 16384),
    "0.5b bare": ({}, 8192),
    "0.5b fsdp": ({"compile": "on"}, 8192),
    "1.5b megatron": ({}, 16384),
    "1.5b fsdp": ({"compile": "on"}, 16384),
}


def packed(name, report):
    """Values and an update of packed rows, without shared prompts, and the update's kernels."""
    shape, by, *_ = name.replace(",", "").split()
    own, size = PACKED[name]
    shape, size = ("dry", 64) if DRY else (shape, size)
    rows = gpu.rows_of(min(size, 8192), 1)
    flags = gpu.flags_of_shape(shape) | own | {"ppo_max_token_len_per_gpu": size}
    if by == "bare":
        loop = gpu.BareLoop(size // max(rows.lengths), critic_fsdp.Config(**flags))
        gpu.race(report, name, loop, loop, rows, share=False)
        return

    start = time.perf_counter()
    with gpu.quick_weights():
        worker = gpu.new_critic(SCRIPTS[by], share_prompts=False, **flags)
    print(f"{name}: built in {time.perf_counter() - start:.0f} s", flush=True)
    gpu.race(report, name, worker, worker.critic, rows, share=False)
    gpu.print_kernels(f"an update of {name}", worker.update_critic, rows)


# ---- ppo: some steps of the loop -----------------------------------------------------------------


LARGE = "--critic.lr 1e-5 --supervised-steps 0 --max-response-length 256 --train-batch-size 32"
LARGE += " --rollout-n 8"


@contextlib.contextmanager
def nothing_is_saved(ppo_loop):
    """To write billions of weights takes minutes."""
    owners = [(ppo_loop, "save"), (ppo_loop.PolicyWorker, "export_hf")]
    owners += [(script.CriticWorker, "export_hf") for script in SCRIPTS.values()]
    with contextlib.ExitStack() as patches:
        for owner, function in owners:
            patches.enter_context(mock.patch.object(owner, function, lambda *_: None))
        yield


def ppo(name, flags, report):
    """A run of ppo_loop.py. The toy's rewards must rise, unless it is dry."""
    import ppo_loop

    gpu.clear_device()
    out = FOLDER / name.replace(" ", "_")
    flags = f"{flags} --out-dir {out}"
    if DRY:
        flags += " --supervised-steps 3 --steps 2 --train-batch-size 8 --max-response-length 6"
    with nothing_is_saved(ppo_loop) if LARGE in flags else contextlib.nullcontext():
        seconds, peak = gpu.measure(lambda: ppo_loop.main(ppo_loop.parse(flags.split())))

    # what it has learned, and where the last step's time went
    log = common.read_lines(out / "metrics.jsonl")
    rewards = [row["eval/reward"] for row in log if "eval/reward" in row]
    last = [row for row in log if "perf/time_step" in row][-1]
    times = [f"{key[5:]} {x:.2f}" for key, x in last.items() if key.startswith("time/")]
    cells = {"steps": last["step"], "seconds": seconds, "GiB": peak}
    cells["rewards"] = ", ".join(f"{x:.2f}" for x in rewards)
    cells["seconds of the last step"] = ", ".join(times)
    rises = rewards[-1] > rewards[0]
    report.add(name, rises or DRY or name != "toy", **cells)


# ---- Main ----------------------------------------------------------------------------------------


def missing(name):
    """The package that what has this name needs and that is not installed, or None."""
    for word, package in (("megatron", "megatron-core"), ("vllm", "vllm")):
        if word in name and not importlib.util.find_spec(word):
            return package
    return None


def functions_of(part):
    """{name: function(report)} of what a part consists of."""
    shapes = ["dry"] if DRY else ["0.5b", "1.5b", "7b"]
    if part == "equal":
        found = {case: partial(compare, case) for case in CASES}
        found["kernels"] = kernels
        for case in MOVERS:
            found[f"moves of {case}"] = partial(moves, case)
        for script in ("fsdp", "megatron"):
            found[f"runs of {script}"] = partial(run_and_resume, script)
        return found

    # in the order of their worth, because a call may end before them
    if part == "budget":
        cases = ("fsdp defaults", "fsdp compiled", "megatron defaults")
        found = {case: partial(compare, case) for case in cases}
        found |= {name: partial(packed, name) for name in PACKED}

        # the loop, with the table of noise at its end; one set of weights with adapters; an engine
        found["toy"] = partial(ppo, "toy", "")
        runs = {
            "share-base 7b": "--share-base --actor.lora-rank 16 --critic.lora-rank 16 --steps 2",
            "vllm 1.5b": "--rollout vllm --offload --steps 10 --actor.lr 1e-6",
        }
        for name, flags in runs.items():
            shape = gpu.flags_of_shape("dry" if DRY else name.split()[1])["override_config"]
            if DRY and "vllm" in name:  # on a CPU it has no attention with smaller heads
                shape = '{"num_attention_heads":2,"num_key_value_heads":2,"head_dim":32}'
            flags += f" --actor.override-config {shape} {LARGE}"
            found[name] = partial(ppo, name, flags)
        return found

    # a shape, who computes it, and how long the rows are
    if part == "speed":
        lengths = [64] if DRY else LENGTHS
        who = ("fsdp", "megatron", "bare")
        names = [f"{shape} {by} {n}" for shape, by, n in itertools.product(shapes, who, lengths)]
        return {name: partial(speed, name) for name in names}
    if part == "memory":
        kinds = ("fsdp", "fsdp policy", "megatron")
        names = [f"{shape} {kind}" for shape in shapes[:2] for kind in kinds]
        return {name: partial(memory, name) for name in names}

    # runs of ppo_loop.py; the large ones have the smallest shape
    shape = gpu.flags_of_shape(shapes[0])["override_config"]
    large = f"--actor.override-config {shape} --actor.lr 1e-6 --offload --steps 3 {LARGE}"
    runs = {
        "toy": "",
        "megatron": "--critic megatron --steps 20",
        "kl": "--offload --kl-coef 0.01 --steps 10",
        "large": large,
        "large megatron": f"{large} --critic megatron",
    }
    return {name: partial(ppo, name, flags) for name, flags in runs.items()}


def summary(rows):
    """A row for the checks of each kind and dtype: how many, and the one closest to its limit."""
    kinds = {}
    for row in rows:
        kind, *_ = row["what"].split()
        kinds.setdefault((kind, row.get("dtype", "")), []).append(row)

    found = []
    for (kind, dtype), same in kinds.items():
        faults = [row for row in same if row["verdict"] != "ok"]
        closest = max(faults or same, key=lambda row: row.get("of its limit", 0.0))
        row = {"what": kind, "dtype": dtype, "checks": len(same), "faults": len(faults)}
        row["closest to its limit"] = closest["what"]
        row |= {name: closest.get(name, "") for name in ("off", "of its limit")}
        found.append(row)
    return found


def main():
    """Runs the part, prints its table, and exits with 1 if there was a fault."""
    # what a NAME begins, unless it is one of the names
    functions = functions_of(ASKED.part)
    chosen = {}
    for word in ASKED.names or [""]:
        found = [name for name in functions if name.startswith(word)]
        if word in functions:
            found = [word]
        if not found:
            raise common.UserError(f"{word}: begins none of {', '.join(functions)}")
        chosen |= {name: functions[name] for name in found}

    # one after the other
    print(f"{gpu.CARD}; torch {torch.__version__}, transformers {transformers.__version__}")
    common.setup_distributed()
    pretend_device.warm_up()
    report = gpu.Report()
    with SCRATCH:
        for name, function in chosen.items():
            if package := missing(name):
                print(f"{name}: left out, because {package} is not installed")
                continue
            with report.attempt(name):
                function(report)

    # what was found
    gpu.print_lines(summary(report.rows) if ASKED.part == "equal" else report.rows)
    print(f"\n{len(report.faults)} faults")
    if report.faults:
        sys.exit(1)


if __name__ == "__main__":
    common.launch(main)
