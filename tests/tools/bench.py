"""How fast the critics are, compared with a loop without any framework and with verl 0.6.1.

    OMP_NUM_THREADS=1 python tests/tools/bench.py              10 million weights, answers to GSM8K
    OMP_NUM_THREADS=1 python tests/tools/bench.py --mix long-prompt --rows 32
    OMP_NUM_THREADS=1 python tests/tools/bench.py --mix episode --rows 24 --budget 16384 \
        --contestants "fsdp whole" fsdp "fsdp alone"
    OMP_NUM_THREADS=1 python tests/tools/bench.py --host --ranks 1024
                                                         what one of many ranks spends moving rows
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tests/tools/bench.py --host
                                                         the same on real ranks

All contestants have the same weights, rows, float32, token budget and AdamW. Each runs in its own
process on the CPU, and they take turns. The tables use CPU time, because it does not depend on
other jobs on the machine. Of GPUs see gpu.py.

    fsdp, megatron  the critics; "alone" means --no-share-prompts, "whole" each episode of --mix
                    episode in one long row
    bare            transformers' backbone, a linear head, the loss and AdamW, on ready packs
    verl padded     DataParallelPPOCritic of verl 0.6.1 with transformers' SDPA, if installed
    verl packed     the same with use_remove_padding and dynamic batches; SDPA masks other rows
    verl lent       the same with the packed attention of common.py, to compare the rest
"""

import collections
import contextlib
import ctypes
import datetime
import gc
import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import numpy as np
import torch
import tyro
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForTokenClassification, AutoTokenizer, Qwen2Config

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"

import common
import critic_fsdp

MODELS = {  # sizes of Qwen2
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, heads=4),
    "10m": dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=6, heads=6),
}
OURS = {"fsdp": "critic_fsdp", "megatron": "critic_megatron"}
ALONE = ("fsdp alone", "megatron alone")
WHOLE = ("fsdp whole", "megatron whole")  # only with --mix episode
CONTESTANTS = ("bare", *OURS, *ALONE, "verl padded", "verl packed", "verl lent", *WHOLE)


@dataclass(frozen=True)
class Run:
    """Measures the contestants in turns."""

    model: Literal[tuple(MODELS)] = "10m"  # number of weights
    # 4 answers per question; 250-token answers to 1,000-token prompts; 24 turns of an agent, each a
    # row whose prompt is all that came before
    mix: Literal["gsm8k", "long-prompt", "episode"] = "gsm8k"
    rows: int = 96  # rows of an update, which is one optimizer step
    answers: int = 8  # answers per prompt of --mix long-prompt
    budget: int = 4096  # most tokens of a micro-batch, for all contestants
    vocab_size: int = 2048  # the model's; GSM8K's tokenizer has 2,000 tokens
    flags: str = "{}"  # more flags of the critic's Config, as JSON
    # each is compared with the first
    contestants: tuple[Literal[CONTESTANTS], ...] = CONTESTANTS[: -len(WHOLE)]
    rounds: int = 5  # measured rounds (the medians count), after one warm-up
    # instead: the host's work of one PPO step on one of 1, 2, 4 ... up to this number of ranks,
    # without a model
    host: bool = False
    ranks: int = 1


# ---- The work: rows, and a folder with weights ---------------------------------------------------


TURNS = 24  # of an episode, each with 40 tokens of the agent and 40 of its tools


def make_rows(run, whole=False):
    """A common.Batch with old values and returns, the same in every process. whole: each episode is
    one row."""
    torch.manual_seed(0)
    if run.mix == "gsm8k":
        tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizer")
        file = str(DATA / "gsm8k_rollouts" / "train.jsonl")
        batch = common.read_rows(file, tokenizer, model_config(run))
        picked = common.shuffled(batch.groups(), len(batch), 0)[: run.rows]
        batch = batch.select(list(itertools.chain(*picked)))
    elif run.mix == "long-prompt":
        lengths = torch.randint(1125, 1375, (run.rows,)).tolist()
        sizes = torch.linspace(900, 1100, run.rows // run.answers).int()
        prompts = [torch.randint(run.vocab_size, (n,)) for n in sizes.tolist()]
        batch = common.concat(list(map(common.Batch.blank, lengths)))
        batch.row_id = torch.arange(run.rows)
        batch.input_ids = torch.randint(run.vocab_size, (len(batch.input_ids),))
        for row, (start, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
            prompt = prompts[row // run.answers]
            batch.input_ids[start : start + len(prompt)] = prompt
            batch.response_mask[start:end] = torch.arange(end - start) >= len(prompt)
    else:
        ids = torch.randint(run.vocab_size, (run.rows // TURNS, 80 * TURNS))
        ends = [80 * TURNS] if whole else range(80, 80 * TURNS + 1, 80)
        batch = common.concat([common.Batch.blank(end) for _ in ids for end in ends])
        batch.row_id = torch.arange(len(batch))
        batch.episode = batch.row_id // len(ends) * len(ends)
        batch.input_ids = torch.cat([row[:end] for row in ids for end in ends])
        batch.response_mask = batch.positions % 80 >= 40
        if not whole:
            length_T = batch.cu_seqlens.diff()[batch.row_of_token]
            batch.response_mask &= batch.positions >= length_T - 40

    g = torch.randn(2, len(batch.input_ids))
    batch.values, batch.returns = g * batch.response_mask
    return batch


def model_config(run):
    fields = dict(MODELS[run.model])
    heads = fields.pop("heads")
    fields |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "num_labels": 1}
    fields |= {"max_position_embeddings": 2**15, "pad_token_id": None}
    return Qwen2Config(**fields, vocab_size=run.vocab_size, tie_word_embeddings=False)


def write_model(run, folder):
    """Saves a token classifier with random weights, which all contestants load."""
    torch.manual_seed(0)
    AutoModelForTokenClassification.from_config(model_config(run)).save_pretrained(folder)


# ---- Contestants: each gives (compute_values() -> (T,) values, update()) -------------------------


def ours(name, run, folder, batch):
    module = importlib.import_module(OURS[name.split()[0]])
    flags = {"ppo_mini_batch_size": run.rows, "ppo_max_token_len_per_gpu": run.budget}
    flags |= {"share_prompts": name not in ALONE, "lr": 1e-5} | json.loads(run.flags)
    worker = module.CriticWorker(module.Config(model=str(folder), **flags))
    worker.init_model()
    return lambda: worker.compute_values(batch), lambda: worker.update_critic(batch)


def load_model(folder, attention):
    """(model, optimizer) of a contestant that is not ours."""
    options = {"attn_implementation": attention}
    model = AutoModelForTokenClassification.from_pretrained(folder, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)


def bare(_, run, folder, batch):
    model, optimizer = load_model(folder, "packed")
    table = critic_fsdp.micro_batches(common.describe(batch), 1, run.budget, share=False)
    [index], [sizes] = table.wanted, table.sizes
    parts = [x.tolist() for x in torch.from_numpy(index).split(sizes)]
    packs = [batch.select(rows) for rows in parts]
    positions = [pack.positions[None] for pack in packs]
    actions = batch.response_mask.sum()

    def forward(pack, positions_1T):
        common.CurrentPack.pack = common.Pack(pack.lengths, torch.device("cpu"))
        inputs = {"input_ids": pack.input_ids[None], "position_ids": positions_1T}
        v_T = model(**inputs, use_cache=False).logits[0, :, 0]
        return torch.where(pack.response_mask, v_T.roll(1), 0.0)

    @torch.no_grad()
    def compute_values():
        model.eval()
        values_T = torch.zeros(len(batch.input_ids))
        for rows, *ready in zip(parts, packs, positions):
            values_T[batch.token_index(rows)] = forward(*ready)
        return values_T

    def update():
        model.train()
        for pack, positions_1T in zip(packs, positions):
            v_T = forward(pack, positions_1T)
            clipped = pack.values + (v_T - pack.values).clamp(-0.5, 0.5)
            losses = torch.maximum((v_T - pack.returns).square(), (clipped - pack.returns).square())
            (0.5 * (losses * pack.response_mask).sum() / actions).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return compute_values, update


def verl(name, run, folder, batch):
    """Changes only what CPUs and this version of transformers lack."""
    import transformers

    # verl imports it; transformers 5 has removed it
    if not hasattr(transformers, "AutoModelForVision2Seq"):
        transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl import DataProto
    from verl.workers.critic import dp_critic

    lent = name == "verl lent"
    packed = name != "verl padded"
    torch.autocast = lambda *_, **__: contextlib.nullcontext()  # bfloat16, unlike the others
    # these are from flash-attn, which has no build for CPUs
    dp_critic.unpad_input = unpad_input
    dp_critic.pad_input = pad_input
    dp_critic.index_first_axis = lambda x, index: x[index]
    dp_critic.rearrange = lambda x, _: x.flatten(0, 1)
    model, optimizer = load_model(folder, "packed" if lent else "sdpa")

    def lend(module, args, kwargs):
        starts = (kwargs["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        ends = [*starts[1:], kwargs["position_ids"].shape[1]]
        lengths = [b - a for a, b in zip(starts, ends)]
        common.CurrentPack.pack = common.Pack(lengths, torch.device("cpu"))

    if lent:
        model.register_forward_pre_hook(lend, with_kwargs=True)
    lengths = batch.lengths
    first = [int(mask.nonzero()[0]) for mask in batch.response_mask.split(lengths)]
    P = max(first)
    R = max(n - p for n, p in zip(lengths, first))

    def padded(x_T):
        """(T,) -> (B, P + R), where prompts end and responses begin at P."""
        rows = zip(x_T.split(lengths), first)
        return torch.stack([F.pad(x, (P - p, R - len(x) + p)) for x, p in rows])

    mask_BL = padded(torch.ones_like(batch.input_ids))
    ids_BL = padded(batch.input_ids)
    columns = {"input_ids": ids_BL, "attention_mask": mask_BL, "responses": ids_BL[:, P:]}
    columns["position_ids"] = (mask_BL.cumsum(1) - 1).clamp(0)
    for name in ("response_mask", "values", "returns"):
        columns[name] = padded(getattr(batch, name))[:, P:]
    divisors = [n for n in range(1, run.rows + 1) if run.rows % n == 0]
    size = max(n for n in divisors if n == 1 or n * (P + R) <= run.budget)
    config = {
        "model": {"use_remove_padding": packed}, "ulysses_sequence_parallel_size": 1,
        "ppo_epochs": 1,
        "ppo_mini_batch_size": run.rows, "ppo_micro_batch_size_per_gpu": size,
        "use_dynamic_bsz": packed,
        "ppo_max_token_len_per_gpu": run.budget, "cliprange_value": 0.5,
        "loss_agg_mode": "token-mean",
        "grad_clip": 1.0,
    }  # fmt: skip
    critic = dp_critic.DataParallelPPOCritic(OmegaConf.create(config), model, optimizer)
    info = {"micro_batch_size": size, "max_token_len": run.budget, "use_dynamic_bsz": packed}
    data = DataProto(batch=TensorDict(columns, batch_size=len(batch)), meta_info=info)

    def compute_values():
        values_BR = critic.compute_values(data).cpu()
        values_T = torch.zeros(len(batch.input_ids))
        values_T[batch.response_mask] = values_BR[columns["response_mask"]].float()
        return values_T

    return compute_values, lambda: critic.update_critic(data)


def unpad_input(x_BLD, mask_BL):
    """Like flash_attn.bert_padding: rows without padding, and the indices they came from."""
    index = mask_BL.flatten().nonzero()[:, 0]
    return x_BLD.flatten(0, 1)[index], index, None, None


def pad_input(x_TD, indices, batch, seqlen):
    rows = x_TD.new_zeros(batch * seqlen, *x_TD.shape[1:]).index_copy(0, indices, x_TD)
    return rows.unflatten(0, (batch, seqlen))


# ---- The clock -----------------------------------------------------------------------------------


def measure(call):
    """(CPU seconds of a call, its result)."""
    start = time.process_time()
    out = call()
    return time.process_time() - start, out


def peak(call):
    """GiB that a call takes above the memory held before."""
    path = pathlib.Path("/proc/self/status")  # VmRSS: held now, VmHWM: peak since the reset
    status = lambda name: int(re.search(rf"{name}:\s*(\d+)", path.read_text())[1])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else the allocator would reuse memory that it kept
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    held = status("VmRSS")
    call()
    return (status("VmHWM") - held) / 2**20


def contest(name, run, folder, pipe):
    """A contestant: does the tasks it receives, until it receives None."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    batch = make_rows(run, whole=name in WHOLE)
    build = bare if name == "bare" else verl if name.startswith("verl ") else ours
    calls = dict(zip(("values", "update"), build(name, run, folder, batch)))
    pipe.send("ready")

    while task := pipe.recv():
        what, _, way = task.partition(" ")
        if way == "peak":
            pipe.send(peak(calls[what]))
        elif way == "told":
            pipe.send(calls[what]()[batch.response_mask].tolist())
        else:
            pipe.send(measure(calls[what])[0])
    os._exit(0)  # like common.launch


def compare(names, run, folder):
    """[{task: CPU seconds of each round, or GiB, or values}] of contestants, each a process that
    works only when asked; after a round to warm up they take turns."""
    # what one thread of one process has imported can be had for nothing
    context = multiprocessing.get_context("fork" if torch.get_num_threads() == 1 else "spawn")
    pipes = []
    for name in names:
        here, there = context.Pipe()
        context.Process(target=contest, args=(name, run, folder, there), daemon=True).start()
        there.close()
        pipes.append(here)
    assert all(pipe.recv() == "ready" for pipe in pipes)  # they start together

    def ask(pipe, task):
        pipe.send(task)
        return pipe.recv()

    seen = [{"values": [], "update": [], "values told": ask(pipe, "values told")} for pipe in pipes]
    for turn in range(run.rounds + 1):
        for task in ("values", "update"):
            for pipe, spent in zip(pipes, seen):
                seconds = ask(pipe, task)
                if turn:
                    spent[task].append(seconds)
    for pipe, spent in zip(pipes, seen):
        spent |= {task: ask(pipe, task) for task in ("values peak", "update peak")}
        pipe.send(None)
    return seen


# ---- The host's work: what one of many ranks does to get rows to where they are computed ---------

ROWS = 64  # of a rank
PROMPT = 500  # tokens
ANSWERS = 8  # to a prompt; they lie on neighbouring ranks


def rows_of_a_rank(rank, ranks):
    """(its Batch of 64 rows, the Rows that each rank tells). Rows have 4,500 tokens on average; row
    i is on rank i % ranks."""
    g = torch.Generator().manual_seed(0)
    lengths = PROMPT + torch.randint(1, 8000, (ROWS * ranks,), generator=g)
    prompts = torch.randint(2**15, (len(lengths) // ANSWERS, PROMPT), generator=g)

    # what the other ranks tell of their rows
    digests = [hashlib.blake2b(ids.numpy().tobytes(), digest_size=16).digest() for ids in prompts]
    told = np.zeros(len(lengths), common.Row).view(np.recarray)
    told.row_id = np.arange(len(lengths))
    told.index, told.owner = np.divmod(told.row_id, ranks)
    told.length = lengths
    told.actions = lengths - PROMPT
    told.episode = told.row_id
    told.shared = PROMPT
    told.prompt = np.repeat(digests, ANSWERS)
    told = [told[told.owner == owner] for owner in range(ranks)]

    # its own rows
    own = common.concat(list(map(common.Batch.blank, told[rank].length.tolist())))
    own.row_id = torch.tensor(told[rank].row_id.tolist())
    own.response_mask = own.positions >= PROMPT
    own.input_ids[~own.response_mask] = prompts[own.row_id // ANSWERS].flatten()
    own.values = torch.zeros(len(own.input_ids))
    own.returns = own.values.clone()
    return own, told


def step_of_a_rank(own, ranks, spent):
    """Two forwards and two updates of four mini-batches, without a model; adds to spent, {what:
    CPU seconds}."""
    critic = object.__new__(critic_fsdp.DataParallelPPOCritic)
    critic.config = critic_fsdp.Config()
    all_ranks = list(range(ranks))
    critic.layout = SimpleNamespace(
        dp_size=ranks, dp_rank=common.RANK, dp_ranks=all_ranks, gives_values=[True] * ranks
    )

    def timed(what, call, *args):
        seconds, out = measure(lambda: call(*args))
        spent[what] += seconds
        return out

    for number in range(4):
        rows = timed("told", common.rows_of_all_ranks, own)
        if number % 2 == 0:
            table = timed("plan", critic.plan_micro_batches, rows, 16384)
            local = timed("moved", critic.fetch, own, table)
            values = [torch.zeros(len(part.input_ids)) for part in critic.cut(local, table)]
            timed("moved", critic.give_back, values, local, table, own)
            continue

        groups = timed("plan", common.groups_of, rows)
        index = timed("plan", common.shuffled, groups, len(rows), number)
        ordered = timed("plan", rows.__getitem__, list(itertools.chain(*index)))
        quarter = len(ordered) // 4
        for first in range(0, len(ordered), quarter):
            mini = ordered[first : first + quarter]
            table = timed("plan", critic.plan_micro_batches, mini, 16384)
            local = timed("moved", critic.fetch, own, table)
            timed("weights", common.loss_weights, local, "token-mean", None, mini)


def counted(all_to_all, left):
    """The same function, which adds to left["bytes"] what leaves this rank."""

    def call(x, sent, got):
        left["bytes"] += (sum(sent) - sent[common.RANK]) * x.element_size()
        return all_to_all(x, sent, got)

    return call


def simulate(ranks):
    """[cells] of rank 0 of this many ranks. What others would send is made of zeros."""
    own, told = rows_of_a_rank(0, ranks)
    messages = [pickle.dumps(rows.tobytes()) for rows in told]
    tokens = sum(map(common.tokens_of, told))
    del told

    gc.freeze()  # as common.launch does
    common.WORLD_SIZE = ranks
    common.of_all_ranks = lambda mine: list(map(pickle.loads, messages))
    left = collections.Counter()
    common.all_to_all = counted(lambda x, sent, got: x.new_zeros(sum(got)), left)
    spent = collections.Counter()
    step_of_a_rank(own, ranks, spent)
    leaves = left["bytes"] / 2**20
    most = 1024 * peak(lambda: step_of_a_rank(own, ranks, collections.Counter()))
    hears = 4 * sum(map(len, messages[1:])) / 2**20
    return [tokens, *(spent[name] for name in WORK), sum(spent.values()), most, hears, leaves]


WORK = ("told", "plan", "moved", "weights")
COLUMNS = ("ranks", "tokens", *WORK, "CPU s", "peak MiB", "MiB told", "MiB of rows sent")


def host(ranks):
    """Prints what moving rows costs one of 1, 2, 4 ... ranks, and how that grows."""
    if common.WORLD_SIZE > 1:
        return host_for_real()
    print_line(*COLUMNS)
    print("|---" * len(COLUMNS) + "|")
    found = []
    while not found or 2 * found[-1][0] <= ranks:
        size = 2 ** len(found)
        # each in a process of its own, which simulate changes
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found.append([size, *pool.apply(simulate, (size,))])
        print_line(*(f"{cell:,}" if isinstance(cell, int) else f"{cell:.3g}" for cell in found[-1]))

    # powers of the number of ranks, from the last but two lines to the last
    if len(found) > 2:
        before = found[-3]
        powers = [math.log(max(x, 1e-9) / max(y, 1e-9), 4) for x, y in zip(found[-1], before)]
        print_line("power", *(f"{power:.2f}" for power in powers[1:]))


def host_for_real():
    """The same on real ranks, started by torchrun: rank 0 prints its line."""
    common.setup_distributed()
    left = collections.Counter()
    common.all_to_all = counted(common.all_to_all, left)
    own, _ = rows_of_a_rank(common.RANK, common.WORLD_SIZE)
    spent = collections.Counter()
    step_of_a_rank(own, common.WORLD_SIZE, spent)
    if common.RANK == 0:
        seconds = [f"{spent[name]:.3g}" for name in WORK]
        print_line(f"{common.WORLD_SIZE} real", *seconds, f"{left['bytes'] / 2**20:.3g}")
    torch.distributed.barrier()


# ---- Tables --------------------------------------------------------------------------------------


def print_head(run, batch):
    git = ("git", "-C", ROOT, "rev-parse", "--short", "HEAD")
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "none"
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    where = f"{model[1]}, {os.cpu_count()} cores"
    print(f"\n{where}; torch {torch.__version__}; {datetime.date.today()}; commit {commit}")
    n = sorted(batch.lengths)
    rows = f"{len(n)} rows, {sum(n):,} tokens, median {n[len(n) // 2]}, longest {n[-1]:,}"
    print(f"{run.model}, {run.mix}: {rows}; at most {run.budget:,} tokens a micro-batch")
    print(f"{torch.get_num_threads()} threads; tokens a second of CPU time\n")


def print_line(*cells):
    print(f"| {' | '.join(cells)} |", flush=True)


def table(run, batch, names):
    """Prints one line for each contestant."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(run, folder)
        seen = compare(names, run, folder)

    # MFU is relative to a large product in this process
    with torch.device("meta"):
        backbone = AutoModel.from_config(model_config(run))
    flops = sum(map(common.flops_model(backbone, backbone.config), batch.lengths))  # of one forward
    x = torch.randn(1024, 1024)
    limit = 2 * 1024**3 / min(measure(lambda: x @ x)[0] for _ in range(10))

    tokens = len(batch.input_ids)
    columns = ("tok/s", "x bare", "MFU", "peak GiB")
    heads = [f"{task} {columns[0]}" for task in ("values", "update")]
    print_line("", heads[0], *columns[1:], heads[1], *columns[1:], "values off")
    print("|---" * 10 + "|")
    for name, spent in zip(names, seen):
        cells = [name]
        for task, passes in (("values", 1), ("update", 3)):
            seconds = statistics.median(spent[task])
            ratio = statistics.median(a / b for a, b in zip(seen[0][task], spent[task]))
            cells += [f"{tokens / seconds:,.0f}", f"{ratio:.2f}"]
            cells += [f"{passes * flops / seconds / limit:.0%}", f"{spent[f'{task} peak']:.3f}"]
        off = max(abs(a - b) for a, b in zip(spent["values told"], seen[0]["values told"]))
        print_line(*cells, f"{off:.0e}")
    of = "a product of 1024 x 1024 matrices in float32 on one thread"
    print(f"\nthe limit: {limit / 1e9:,.0f} GFLOP/s, {of}\n")


def main(run):
    names = run.contestants
    if run.host:
        return host(run.ranks)
    if run.mix == "gsm8k" and not DATA.is_dir():
        sys.exit(f"--mix gsm8k: needs the development data in {DATA}; take long-prompt")
    if importlib.util.find_spec("verl") is None:
        names = [name for name in names if not name.startswith("verl")]
        print("verl is not installed, and left out")
    batch = make_rows(run)
    print_head(run, batch)
    table(run, batch, names)


if __name__ == "__main__":
    main(tyro.cli(Run, description=__doc__))
    sys.stdout.flush()
    os._exit(0)
