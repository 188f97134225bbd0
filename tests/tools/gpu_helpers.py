"""What gpu.py needs: the card, a report, critics and rows of real sizes, a bare loop, a clock."""

import contextlib
import datetime
import io
import json
import math
import statistics
import time
import traceback
from unittest import mock

import helpers
import pretend_device
import torch
import torch.nn as nn
import transformers
from torch.autograd import DeviceType
from torch.distributed.checkpoint.api import CheckpointException

import common
import critic_fsdp

GIB = 2**30
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
CARD = torch.cuda.get_device_name() if CUDA else "CPU"
PEAK = common.peak_flops(CARD)  # NaN: not known
MEMORY = torch.cuda.mem_get_info()[1] / GIB if CUDA else math.nan
PRETENDS = CUDA and not pretend_device.REAL
if PRETENDS:
    CARD = f"simulated {CARD}"


# ---- The report ----------------------------------------------------------------------------------


class Report:
    """The rows of a table, each of which is printed as soon as it is known, and the faults."""

    def __init__(self):
        self.rows = []  # dicts: column -> cell
        self.faults = []  # the names of rows that are not as they should be

    def add(self, name, good=True, **cells):
        """Adds a row. good: whether all is as it should be."""
        if not good:
            self.faults.append(name)
        row = {"verdict": "ok" if good else "FAULT", "what": name, **cells}
        self.rows.append(row)
        words = [f"{key} {shown(cell)}" for key, cell in cells.items()]
        print(f"{row['verdict']:5s} {name}: {'; '.join(words)}", flush=True)

    @contextlib.contextmanager
    def attempt(self, name):
        """An error within becomes a row; what follows goes on."""
        try:
            yield
        except (Exception, SystemExit, CheckpointException) as error:
            print(traceback.format_exc()[-4000:], flush=True)
            self.add(name, good=False, error=f"{type(error).__name__}: {error}"[:80])


def print_lines(rows):
    """Prints rows as those of a table in RESULTS.md, with date, card and version."""
    known = {"date": datetime.date.today(), "card": CARD, "torch": torch.__version__}
    rows = [known | row for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[shown(row.get(name, "")) for name in names] for row in rows]
    print("\nfor tests/experiments/RESULTS.md:\n")
    for line in (names, ["---"] * len(names), *lines):
        print(f"| {' | '.join(line)} |")


def shown(cell):
    """A cell as text."""
    if isinstance(cell, float):
        return "--" if math.isnan(cell) else f"{cell:.3g}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return " ".join(str(cell).split()).replace("|", "/")


# ---- Critics and rows ----------------------------------------------------------------------------


def qwen(hidden, inner, layers, heads, key_heads, vocabulary=151936):
    """What a config.json of Qwen2.5 says about sizes."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2**17,
    }


SHAPES = {
    "0.5b": qwen(hidden=896, inner=4864, layers=24, heads=14, key_heads=2),
    "1.5b": qwen(hidden=1536, inner=8960, layers=28, heads=12, key_heads=2),
    "7b": qwen(3584, inner=18944, layers=28, heads=28, key_heads=4, vocabulary=152064),
    "dry": qwen(hidden=64, inner=192, layers=2, heads=4, key_heads=2, vocabulary=1000),
}


def flags_of_shape(name):
    """Flags of a critic with this shape and random weights, which makes one step of an update."""
    shape = json.dumps(SHAPES[name], separators=(",", ":"))
    return {"override_config": shape, "lr": 1e-5, "ppo_mini_batch_size": 10**6}


def clear_device():
    """Frees what earlier critics held -> GiB that tensors still take."""
    helpers.end_groups()
    torch.cuda.empty_cache()
    return held()


def held():
    """GiB that tensors take on the device; NaN on a CPU."""
    return torch.cuda.memory_allocated() / GIB if CUDA else math.nan


def new_critic(script, device=DEVICE, **flags):
    """A critic on this device, when earlier ones have left it. What it prints is dropped."""
    clear_device()
    on_device = mock.patch.object(common, "setup_distributed", lambda *_: device)
    with on_device, contextlib.redirect_stdout(io.StringIO()):
        return helpers.worker(script=script, **flags)


@contextlib.contextmanager
def quick_weights():
    """Large weights of new models repeat a few random numbers: drawing billions takes minutes."""
    numbers = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    normal_ = torch.Tensor.normal_

    def repeat_(x, mean=0.0, std=1.0, **options):
        if x.device.type != "cpu" or x.numel() < len(numbers):
            return normal_(x, mean, std, **options)
        for part in x.view(-1).split(len(numbers)):
            torch.add(mean, numbers[: len(part)], alpha=std, out=part)
        return x

    with mock.patch.object(torch.Tensor, "normal_", repeat_):
        yield


def rows_of(length, prompts):
    """Rows of at most this length, 8 to a prompt, which is half of it. Answers are an eighth to a
    half; the first of all is the longest."""
    g = torch.Generator().manual_seed(length)
    first = length // 2
    answers = torch.randint(length // 8, first + 1, (8 * prompts,), generator=g)
    answers[0] = length - first
    rows = common.concat([common.Batch.blank(first + n) for n in answers.tolist()])
    rows.row_id = torch.arange(len(rows))
    rows.response_mask = rows.positions >= first

    # ids, and what an update learns from
    total = len(rows.input_ids)
    rows.input_ids = torch.randint(1000, (total,), generator=g)
    ids = torch.randint(1000, (prompts, first), generator=g)
    rows.input_ids[~rows.response_mask] = ids.repeat_interleave(8, 0).flatten()
    rows.values, rows.returns = torch.randn(2, total, generator=g) * rows.response_mask
    return rows


def rows_that_fill(length, tokens):
    """Rows of this length that fill a micro-batch of this many tokens, and share nothing."""
    rows = common.Batch.blank(length).select([0] * (tokens // length))
    rows.row_id = torch.arange(len(rows))
    rows.input_ids = torch.randint(1000, rows.input_ids.shape)
    return rows


# ---- A loop without a framework ------------------------------------------------------------------


class BareLoop:
    """transformers' token classifier with SDPA, in padded micro-batches: float32 weights, autocast
    and AdamW. With LoRA, the backbone has our adapters."""

    def __init__(self, size, config):
        self.size = size  # rows of a micro-batch
        _, model_config = common.load_config(config)
        common.configure_head(model_config, config, None)
        kind = transformers.AutoModelForTokenClassification
        clear_device()
        with DEVICE:
            options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
            self.model = kind.from_config(model_config, **options)
            self.flops = common.flops_model(self.model.base_model, model_config)
            common.add_lora(self.model.base_model, config, config.seed)

        if config.gradient_checkpointing:
            options = {"use_reentrant": False}
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        count, trained = critic_fsdp.count_parameters(self.model)
        self.passes = 2 + trained / count  # what an update costs, in forwards
        self.optimizer = torch.optim.AdamW(self.weights, config.lr, weight_decay=0.01, fused=True)

    def forward(self, rows):
        """(B, L) values of padded rows, and the function that pads a column of theirs."""

        def pad(x_T):
            return nn.utils.rnn.pad_sequence(x_T.split(rows.lengths), True).to(DEVICE)

        ids_BL = pad(rows.input_ids)
        mask_BL = pad(torch.ones_like(rows.response_mask))
        with torch.autocast(DEVICE.type, torch.bfloat16):
            out = self.model(ids_BL, attention_mask=mask_BL, use_cache=False)
        v_BL = out.logits[..., 0].float().roll(1, 1)
        return torch.where(pad(rows.response_mask), v_BL, 0.0), pad

    @torch.no_grad()
    def compute_values(self, rows):
        self.model.eval()
        values = []
        for piece in rows.split(self.size):
            v_BL, _ = self.forward(piece)
            values.append(v_BL)
        return [v_BL.cpu() for v_BL in values]

    def update_critic(self, rows):
        self.model.train()
        actions = rows.response_mask.sum()
        for piece in rows.split(self.size):
            v_BL, pad = self.forward(piece)
            old_BL = pad(piece.values)
            returns_BL = pad(piece.returns)
            clipped_BL = old_BL + (v_BL - old_BL).clamp(-0.5, 0.5)
            errors = [(x_BL - returns_BL).square() for x_BL in (v_BL, clipped_BL)]
            (0.5 * torch.maximum(*errors).sum() / actions).backward()

        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


# ---- The clock -----------------------------------------------------------------------------------


def measure(call, *args):
    """(seconds of a call, the most GiB that tensors have taken meanwhile; NaN on a CPU)."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    call(*args)
    if CUDA:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, common.peak_memory(DEVICE) / GIB


def race(report, name, contestant, costs, rows, share):
    """Adds a row with speed and memory of values and of an update, after one of each to warm up.

    costs: has flops(length) of a forward, and passes, what an update costs in forwards. Products
    of a shared prompt count once, and those that are computed again do not count."""
    tokens = len(rows.input_ids)
    told = common.describe(rows)
    flops = common.cost_of(told, share, costs.flops)
    cells = {}
    for task, call, passes in (
        ("values", contestant.compute_values, 1),
        ("update", contestant.update_critic, costs.passes),
    ):
        measure(call, rows)
        spent = []
        while not spent or (len(spent) < 3 and sum(spent) < 10):
            seconds, peak = measure(call, rows)
            spent.append(seconds)

        seconds = statistics.median(spent)
        cells[f"{task} tokens/s"] = round(tokens / seconds)
        cells[f"{task} MFU"] = passes * flops / seconds / PEAK
        cells[f"{task} GiB"] = peak
    report.add(name, rows=f"{len(rows)} x {max(rows.lengths)}", **cells)


def print_kernels(name, call, *args):
    """Prints the ten kernels that take the most time of a call; without a GPU, operations."""
    with torch.profiler.profile() as trace:
        call(*args)

    kind = DeviceType.CUDA if CUDA and not PRETENDS else DeviceType.CPU
    spent = "self_device_time_total" if kind == DeviceType.CUDA else "self_cpu_time_total"
    events = [e for e in trace.key_averages() if e.device_type == kind and not e.is_user_annotation]
    events.sort(key=lambda e: -getattr(e, spent))
    total = sum(getattr(e, spent) for e in events)
    print(f"\nthe ten largest kernels of {name}, {total / 1e3:.1f} ms in all")
    for e in events[:10]:
        microseconds = getattr(e, spent)
        part = microseconds / total
        print(f"{microseconds / 1e3:10.2f} ms {part:4.0%} {e.count:7,} calls  {e.key:.60}")
