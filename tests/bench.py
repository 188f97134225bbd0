"""How fast the critics are: against a loop without any framework, against verl 0.6.1, and as the work grows.

    OMP_NUM_THREADS=1 python tests/bench.py                    a model of 10 million weights, answers to GSM8K questions
    OMP_NUM_THREADS=1 python tests/bench.py --mix long-tail --model 100m --rows 16
    OMP_NUM_THREADS=1 python tests/bench.py --scaling          ranks, token budget, sequence length, sequence parallel
    OMP_NUM_THREADS=1 python tests/bench.py --growth growth.png  one rank, ever more work, and a plot

All have the same weights, rows, precision, token budget and AdamW, each in processes of its own, and take turns. On CPU
the table's seconds are seconds of CPU time, of all ranks together, for they do not tell of other jobs on the machine.

    bare            transformers' backbone, a linear head, the loss and AdamW over packs made before the clock starts
    verl padded     DataParallelPPOCritic of verl 0.6.1 with transformers' SDPA, where `import verl` works
    verl packed     the same with use_remove_padding and dynamic batches; on CPU SDPA masks the other rows of a pack
    verl lent       the same with the packed attention of common.py, lent to it: what remains is its own
"""

import contextlib
import ctypes
import datetime
import functools
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import pathlib
import re
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Literal

import tyro

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT))

MODELS = {  # of Qwen2
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, heads=4),
    "10m": dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=6, heads=6),
    "100m": dict(hidden_size=768, intermediate_size=2304, num_hidden_layers=12, heads=12),
    "1b": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, heads=32),
    "7b": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, heads=28),
}
OURS = {"fsdp": "critic_fsdp", "megatron": "critic_megatron"}
CONTESTANTS = ("bare", *OURS, "verl padded", "verl packed", "verl lent")


@dataclass(frozen=True)
class Work:
    """What is to be computed, and on what."""

    model: Literal[tuple(MODELS)] = "10m"  # how many weights
    mix: Literal["gsm8k", "long-tail", "equal"] = "gsm8k"  # lengths of rows
    rows: int = 64  # of one update, which is one optimizer step
    length: int = 256  # of --mix equal: tokens of a row; of long-tail: the median
    longest: int = 4096  # where long-tail is cut off
    budget: int = 4096  # most tokens of a micro-batch, of all contestants
    vocab_size: int = 2048  # of the model; GSM8K's tokenizer has 2,000
    ranks: int = 1  # processes of each contestant; only the critics take more than one
    flags: str = "{}"  # more flags of the critic's Config, as JSON
    seed: int = 0  # of weights and rows


@dataclass(frozen=True)
class Run:
    """Measures them in turns."""

    work: tyro.conf.OmitArgPrefixes[Work] = Work()  # its flags have no prefix
    contestants: tuple[Literal[CONTESTANTS], ...] = CONTESTANTS  # who takes part; all are compared with the first
    rounds: int = 5  # of which the medians count; one more goes before, to warm up
    scaling: bool = False  # instead, tables over ranks, token budget, length of rows, sequence parallelism
    growth: str | None = None  # instead, tables of the cost as the work grows, and a plot into this file
    profile: bool = False  # instead, the ten operations that take most time of an update of each contestant


# ---------------------------------------------------------------------------------------------------------------------
# The work: rows, and a folder with weights
# ---------------------------------------------------------------------------------------------------------------------


def make_rows(work):
    """A common.Batch with old values and returns, the same in every process."""
    import torch
    from transformers import AutoTokenizer

    import common

    torch.manual_seed(work.seed)
    if work.mix == "gsm8k":
        tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizer")
        batch = common.read_jsonl(
            str(DATA / "gsm8k_rollouts" / "train.jsonl"), tokenizer=tokenizer, vocab_size=work.vocab_size,
            max_length=2**15,
        )  # fmt: skip
        batch = batch.select(common.permutation(len(batch), work.seed)[: work.rows])
    else:
        lengths = torch.full((work.rows,), work.length)
        if work.mix == "long-tail":  # log-normal: one row in six is three times as long as the median, or more
            lengths = (work.length * torch.randn(work.rows).mul(1.1).exp()).long().clamp(16, work.longest)
        prompts = (lengths // 4).tolist()
        batch = common.Batch(
            input_ids=torch.randint(work.vocab_size, (int(lengths.sum()),)),
            cu_seqlens=common.cumulative(lengths),
            response_mask=torch.cat([torch.arange(n) >= p for n, p in zip(lengths.tolist(), prompts, strict=True)]),
            row_id=torch.arange(work.rows),
            truncated=torch.zeros(work.rows, dtype=torch.bool),
        )
    batch.values, batch.returns = (torch.randn(len(batch.input_ids)) * batch.response_mask for _ in range(2))
    return batch


def model_config(work):
    from transformers import Qwen2Config

    fields = dict(MODELS[work.model])
    heads = fields.pop("heads")
    return Qwen2Config(
        **fields, num_attention_heads=heads, num_key_value_heads=heads // 2, vocab_size=work.vocab_size, num_labels=1,
        max_position_embeddings=2**15, tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip


def write_model(work, folder):
    """A token classifier with random weights, which all contestants load."""
    import torch
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(work.seed)
    AutoModelForTokenClassification.from_config(model_config(work)).save_pretrained(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Contestants: each gives (compute_values() -> (T,) values, update())
# ---------------------------------------------------------------------------------------------------------------------


def ours(script, work, folder, batch):
    module = importlib.import_module(OURS[script])
    flags = {"ppo_mini_batch_size": work.rows, "ppo_max_token_len_per_gpu": work.budget, **json.loads(work.flags)}
    worker = module.CriticWorker(module.Config(model=str(folder), lr=1e-5, **flags))
    worker.init_model()
    mine = batch.select(range(module.RANK, len(batch), module.WORLD_SIZE))
    return lambda: worker.compute_values(mine), lambda: worker.update_critic(mine)


def bare(work, folder, batch):
    import torch
    from transformers import AutoModelForTokenClassification

    import common

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")
    model = AutoModelForTokenClassification.from_pretrained(folder, attn_implementation="packed").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)
    [parts] = common.micro_batches([batch.lengths], work.budget)
    packs = [batch.select(rows).to(device) for rows in parts]
    places = [torch.arange(n, device=device) for pack in packs for n in pack.lengths]
    positions = torch.cat(places).split([len(pack.input_ids) for pack in packs])
    actions = batch.response_mask.sum()

    def forward(pack, positions_T):
        common.set_pack(pack.lengths, device)
        with half():
            v_T = model(input_ids=pack.input_ids[None], position_ids=positions_T[None], use_cache=False).logits
        return torch.where(pack.response_mask, v_T[0, :, 0].float().roll(1), 0.0)

    @torch.no_grad()
    def compute_values():
        model.eval()
        values_T = torch.zeros(len(batch.input_ids))
        for rows, pack, positions_T in zip(parts, packs, positions, strict=True):
            values_T[batch.token_index(rows)] = forward(pack, positions_T).cpu()
        return values_T

    def update():
        model.train()
        for pack, positions_T in zip(packs, positions, strict=True):
            v_T = forward(pack, positions_T)
            clipped = pack.values + (v_T - pack.values).clamp(-0.5, 0.5)
            losses = torch.maximum((v_T - pack.returns).square(), (clipped - pack.returns).square())
            (0.5 * (losses * pack.response_mask).sum() / actions).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return compute_values, update


def verl(kind, work, folder, batch):
    """kind: padded, packed or lent. Nothing of it is changed but what CPUs and this transformers lack."""
    import torch
    import transformers

    import common

    if not hasattr(transformers, "AutoModelForVision2Seq"):  # gone from transformers 5; it only has to be there
        transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl import DataProto
    from verl.workers.critic import dp_critic

    cuda, packed = torch.cuda.is_available(), kind != "padded"
    device = torch.device("cuda" if cuda else "cpu")
    if not cuda:
        torch.autocast = lambda *_, **__: contextlib.nullcontext()  # it asks for bfloat16; all others have float32
        dp_critic.unpad_input = unpad_input  # flash-attn's, which has no build for CPUs
        dp_critic.pad_input = pad_input
        dp_critic.index_first_axis = lambda x, index: x[index]
        dp_critic.rearrange = lambda x, _: x.flatten(0, 1)
    attention = "packed" if kind == "lent" else "flash_attention_2" if cuda and packed else "sdpa"
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder, attn_implementation=attention)
    model.to(device)

    def lend(module, args, kwargs):
        starts = (kwargs["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        ends = [*starts[1:], kwargs["position_ids"].shape[1]]
        common.set_pack([b - a for a, b in zip(starts, ends, strict=True)], device)

    if kind == "lent":
        model.register_forward_pre_hook(lend, with_kwargs=True)
    first = [int(mask.nonzero()[0]) for mask in batch.response_mask.split(batch.lengths)]
    lengths = batch.lengths
    P, R = max(first), max(n - p for n, p in zip(lengths, first, strict=True))

    def padded(x_T):
        """(T,) -> (B, P + R): prompts end at P, responses begin there."""
        rows = [
            torch.nn.functional.pad(x, (P - p, R - len(x) + p))
            for x, p in zip(x_T.split(lengths), first, strict=True)
        ]  # fmt: skip
        return torch.stack(rows)

    mask_BL = padded(torch.ones_like(batch.input_ids))
    ids_BL, response = padded(batch.input_ids), slice(P, P + R)
    columns = {
        "input_ids": ids_BL, "attention_mask": mask_BL, "position_ids": (mask_BL.cumsum(1) - 1).clamp(0),
        "responses": ids_BL[:, response], "response_mask": padded(batch.response_mask)[:, response],
        "values": padded(batch.values)[:, response], "returns": padded(batch.returns)[:, response],
    }  # fmt: skip
    size = max(n for n in range(1, work.rows + 1) if work.rows % n == 0 and (n == 1 or n * (P + R) <= work.budget))
    config = OmegaConf.create(
        {
            "model": {"use_remove_padding": packed}, "ulysses_sequence_parallel_size": 1, "ppo_epochs": 1,
            "ppo_mini_batch_size": work.rows, "ppo_micro_batch_size_per_gpu": size, "use_dynamic_bsz": packed,
            "ppo_max_token_len_per_gpu": work.budget, "cliprange_value": 0.5, "loss_agg_mode": "token-mean",
            "grad_clip": 1.0,
        }
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)
    critic = dp_critic.DataParallelPPOCritic(config, model, optimizer)
    info = {"micro_batch_size": size, "max_token_len": work.budget, "use_dynamic_bsz": packed}
    data = DataProto(batch=TensorDict(columns, batch_size=len(batch)), meta_info=info)

    def compute_values():
        values_BR = critic.compute_values(data).cpu()
        values_T = torch.zeros(len(batch.input_ids))
        values_T[batch.response_mask] = values_BR[columns["response_mask"]].float()
        return values_T

    return compute_values, lambda: critic.update_critic(data)


def unpad_input(x_BLD, mask_BL):
    """As flash_attn.bert_padding has it: rows without their padding, and where they came from."""
    index = mask_BL.flatten().nonzero()[:, 0]
    return x_BLD.flatten(0, 1)[index], index, None, None


def pad_input(x_TD, indices, batch, seqlen):
    out = x_TD.new_zeros(batch * seqlen, *x_TD.shape[1:])
    out[indices] = x_TD
    return out.unflatten(0, (batch, seqlen))


# ---------------------------------------------------------------------------------------------------------------------
# The clock
# ---------------------------------------------------------------------------------------------------------------------


def status_gib(name):
    """A line of /proc/self/status, in GiB: VmRSS what is held, VmHWM the most since it was reset."""
    [line] = [line for line in open("/proc/self/status") if line.startswith(f"{name}:")]
    return int(line.split()[1]) / 2**20


def measure(call, cuda):
    """{wall, cpu: seconds} of a call, and what it returned."""
    import torch

    wall, cpu = time.perf_counter(), time.process_time()
    out = call()
    if cuda:
        torch.cuda.synchronize()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}, out


def measure_peak(call, cuda):
    """{peak: GiB above what was held before} of a call."""
    import torch

    if cuda:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() / 2**30
    else:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else the allocator would take from what it has kept, unseen
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        held = status_gib("VmRSS")
    call()
    return {"peak": (torch.cuda.max_memory_allocated() / 2**30 if cuda else status_gib("VmHWM")) - held}


def contest(name, work, folder, environment, said):
    """A process of one contestant, one rank: does what it is told, until told None."""
    os.environ |= environment
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    import torch

    batch = make_rows(work)
    build = functools.partial(ours, name) if name in OURS else bare
    if name.startswith("verl "):
        build = functools.partial(verl, name.removeprefix("verl "))
    calls = dict(zip(("values", "update"), build(work, folder, batch), strict=True))
    cuda = torch.cuda.is_available()
    said.send("ready")
    while task := said.recv():
        if task == "profile":
            said.send(profile(calls["update"]))
            continue
        if task.endswith(" peak"):
            said.send(measure_peak(calls[task.removesuffix(" peak")], cuda))
            continue
        spent, out = measure(calls[task], cuda)
        if torch.is_tensor(out) and len(out) == len(batch.input_ids):
            spent["values"] = out[batch.response_mask].tolist()
        said.send(spent)
    os._exit(0)  # as common.run ends


def profile(call):
    """The ten operations of one call that take most time of their own, as lines."""
    import torch

    with torch.profiler.profile() as prof:
        call()
    rows = prof.key_averages()
    total = sum(row.self_cpu_time_total for row in rows)
    top = sorted(rows, key=lambda row: -row.self_cpu_time_total)[:10]
    return [
        f"{row.self_cpu_time_total / total:6.1%} {row.self_cpu_time_total / 1e3:9.1f} ms {row.count:7,} x  {row.key}"
        for row in top
    ]


class Contestant:
    """One of them: as many processes as it has ranks, which work only when asked."""

    def __init__(self, name, work, folder):
        self.name, self.work, self.ranks = name, work, []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        for rank in range(work.ranks):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(work.ranks),
                "LOCAL_WORLD_SIZE": str(work.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            here, there = context.Pipe()
            os.environ |= environment  # common reads it when it is imported
            context.Process(target=contest, args=(name, work, folder, environment, there), daemon=True).start()
            there.close()
            self.ranks.append(here)
        for rank in self.ranks:
            assert rank.recv() == "ready"

    def do(self, task):
        """What its ranks spent: seconds of the slowest by the clock, of all together by CPU, GiB of the fullest."""
        for rank in self.ranks:
            rank.send(task)
        spent = [rank.recv() for rank in self.ranks]
        if task == "profile":
            return spent[0]
        together = {"wall": max, "cpu": sum, "peak": max}
        return spent[0] | {key: f(s[key] for s in spent) for key, f in together.items() if key in spent[0]}

    def end(self):
        for rank in self.ranks:
            rank.send(None)


def product_flops():
    """FLOP/s of a large float32 product in this process: the limit that the MFU of a CPU refers to."""
    import torch

    import common

    if torch.cuda.is_available():
        return common.device_peak_flops(torch.device("cuda")) or float("nan")
    x, best = torch.randn(1024, 1024), 0.0
    for _ in range(10):
        start = time.process_time()
        x @ x
        best = max(best, 2 * 1024**3 / (time.process_time() - start))
    return best


def forward_flops(work, batch):
    """Of all rows."""
    import torch
    from transformers import AutoModel

    import common

    with torch.device("meta"):
        backbone = AutoModel.from_config(model_config(work))
    flops = common.flops_model(backbone, backbone.config)
    return sum(flops.forward_flops(n) for n in batch.lengths)


def compare(contestants, rounds):
    """[{values, update: what it spent, of each round}] of contestants that take turns; the first round warms up."""
    import torch

    clock = "wall" if torch.cuda.is_available() else "cpu"
    seen = [{"values": [], "update": []} for _ in contestants]
    for turn in range(rounds + 1):
        for task in ("values", "update"):
            for contestant, spent in zip(contestants, seen, strict=True):
                now = contestant.do(task)
                if turn:
                    spent[task].append(now[clock])
                elif task == "values":
                    spent["said"] = now.get("values")  # of several ranks each has its own rows
    for contestant, spent in zip(contestants, seen, strict=True):
        for task in ("values peak", "update peak"):
            spent[task] = contestant.do(task)["peak"]
    return seen


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def profiles(work, names):
    """What takes the time of an update of each."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(work, folder)
        for name in names:
            contestant = Contestant(name, work, folder)
            contestant.do("update")
            print("\n".join([f"\n{name}", *contestant.do("profile")]), flush=True)
            contestant.end()


def print_head(work, batch):
    import torch

    import common

    cuda, commit = torch.cuda.is_available(), common.describe_run()["commit"] or "none"
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    where = torch.cuda.get_device_name() if cuda else f"{model[1]}, {os.cpu_count()} cores"
    print(f"\n{where}; torch {torch.__version__}; {datetime.date.today()}; commit {commit[:7]}")
    lengths = sorted(batch.lengths)
    print(
        f"{work.model}, {work.mix}: {len(batch)} rows, {sum(lengths):,} tokens, median {lengths[len(lengths) // 2]}, "
        f"longest {lengths[-1]:,}; at most {work.budget:,} tokens a micro-batch; {torch.get_num_threads()} threads; "
        f"tokens a second of {'the clock' if cuda else 'CPU time'}\n"
    )


def table(work, names, rounds):
    """One line for each contestant."""
    batch = make_rows(work)
    print_head(work, batch)
    with tempfile.TemporaryDirectory() as folder:
        write_model(work, folder)
        contestants = [Contestant(name, work, folder) for name in names]
        seen = compare(contestants, rounds)
    flops, peak, tokens = forward_flops(work, batch), product_flops(), len(batch.input_ids)
    print("| | values tok/s | x bare | MFU | peak GiB | update tok/s | x bare | MFU | peak GiB | values off |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for contestant, spent in zip(contestants, seen, strict=True):
        cells = [contestant.name]
        for task, passes in (("values", 1), ("update", 3)):
            seconds = statistics.median(spent[task])
            ratio = statistics.median(a / b for a, b in zip(seen[0][task], spent[task], strict=True))
            cells += [f"{tokens / seconds:,.0f}", f"{ratio:.2f}", f"{passes * flops / seconds / peak:.0%}"]
            cells += [f"{spent[f'{task} peak']:.3f}"]
        off = max(abs(a - b) for a, b in zip(spent["said"], seen[0]["said"], strict=True))
        print(f"| {' | '.join(cells)} | {off:.0e} |", flush=True)
        contestant.end()
    print(f"\nthe limit: {peak / 1e9:,.0f} GFLOP/s, a product of 1024 x 1024 matrices in float32 on one thread\n")


def series(title, works, rounds, names=("fsdp",)):
    """A line for each of {label: Work}, all measured in turns -> {label: (tokens, seconds of values, of update)}."""
    print(f"\n| {title} | tokens | values s | tok/s | update s | tok/s | peak GiB |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        contestants = []
        for i, (label, work) in enumerate(works.items()):
            write_model(work, f"{folder}/{i}")
            contestants += [(f"{label}{f', {name}' if len(names) > 1 else ''}", Contestant(name, work, f"{folder}/{i}"))
                            for name in names]  # fmt: skip
        seen, out = compare([contestant for _, contestant in contestants], rounds), {}
    for (label, contestant), spent in zip(contestants, seen, strict=True):
        tokens = len(make_rows(contestant.work).input_ids)
        values, update = (statistics.median(spent[task]) for task in ("values", "update"))
        out[label] = tokens, values, update
        cells = (f"{values:.2f}", f"{tokens / values:,.0f}", f"{update:.2f}", f"{tokens / update:,.0f}")
        print(f"| {label} | {tokens:,} | {' | '.join(cells)} | {spent['update peak']:.3f} |", flush=True)
        contestant.end()
    return out


def scaling_tables(work, rounds):
    """Ranks, token budget, sequence length at equal tokens, sequence parallelism."""
    vary = lambda name, values: {f"{x:,}": replace(work, **{name: x}) for x in values}
    equal, sp = replace(work, mix="equal"), json.dumps({**json.loads(work.flags), "ulysses_size": 2})
    series("ranks", vary("ranks", (1, 2)), rounds, names=("fsdp", "megatron"))
    series("token budget", vary("budget", (2048, 4096, 8192, 16384)), rounds)
    lengths = (128, 512, 2048)
    rows = {f"{n:,}": replace(equal, length=n, rows=8192 // n, budget=max(n, work.budget)) for n in lengths}
    series("tokens of a row", rows, rounds)
    series("2 ranks as", {"dp 2": replace(work, ranks=2), "sp 2": replace(work, ranks=2, flags=sp)}, rounds)


def growth_tables(work, rounds, picture):
    """CPU time as one thing grows and all else stays, and a plot of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    work = replace(work, mix="equal", length=128, rows=32)
    grow = {
        "tokens, in more rows": {n * 128: replace(work, rows=n) for n in (16, 32, 64, 128)},
        "rows of equally many tokens": {n: replace(work, rows=n, length=4096 // n) for n in (8, 32, 128, 512)},
        "tokens of one row": {n: replace(work, rows=1, length=n) for n in (512, 1024, 2048, 4096)},
        "vocabulary": {n: replace(work, vocab_size=n) for n in (2048, 8192, 32768, 131072)},
        "ranks": {n: replace(work, ranks=n) for n in (1, 2, 4)},
    }
    figure, panels = pyplot.subplots(1, len(grow), figsize=(15, 3.2), layout="constrained", sharey=True)
    for panel, (title, works) in zip(panels, grow.items(), strict=True):
        out = series(title, {f"{n:,}": work for n, work in works.items()}, rounds)
        for name, column in (("compute_values", 1), ("update_critic", 2)):
            seconds = [row[column] for row in out.values()]
            panel.plot(list(works), seconds, "o-", label=name)
            powers = [math.log(b / a) / math.log(n / m) for a, b, m, n in
                      zip(seconds, seconds[1:], works, list(works)[1:], strict=False)]  # fmt: skip
            print(f"{title}, {name}: time grows with its power of " + ", ".join(f"{x:.2f}" for x in powers))
        panel.set(title=title, xscale="log", yscale="log")
        panel.set_xticks(list(works), [f"{n:,}" for n in works], fontsize=7)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panels[0].set_ylabel("seconds of CPU time")
        panels[0].legend()
        figure.savefig(picture, dpi=110)


def main(run):
    work, contestants = run.work, run.contestants
    if work.mix == "gsm8k" and not DATA.is_dir():
        sys.exit(f"--mix gsm8k: needs the development data in {DATA}; take long-tail or equal")
    if importlib.util.find_spec("verl") is None:
        contestants = [name for name in contestants if not name.startswith("verl")]
        print("verl is not installed, and left out")
    if run.profile:
        profiles(work, contestants)
    elif run.scaling:
        print_head(work, make_rows(work))
        scaling_tables(work, run.rounds)
    elif run.growth:
        print_head(work, make_rows(work))
        growth_tables(work, run.rounds, run.growth)
    else:
        table(work, contestants, run.rounds)


if __name__ == "__main__":
    main(tyro.cli(Run, description=__doc__))
    sys.stdout.flush()
    os._exit(0)
