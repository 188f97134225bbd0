"""What the tests share: where things are, random batches, and torchrun."""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib.util
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

import forked  # noqa: F401  # all groups share one device here, too
import pytest
import ring
import torch
import torch.distributed as dist
from safetensors import safe_open

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"  # development data next to the repository, see its README
import common
import critic_fsdp

# of a rank: inside that of the process that forks
SCRATCH = tempfile.TemporaryDirectory(dir=os.environ.get("SCRATCH"), ignore_cleanup_errors=True)


def run(*command, timeout=600, cwd=None, **env):
    """Runs a command -> CompletedProcess with its output as text. A Python script is a fork of
    forked.py."""
    command = [str(c) for c in command]
    if command[0] == sys.executable and command[1].endswith(".py"):
        return ended(begin(1, command[1:], timeout, cwd, env, alone=True))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        command, cwd=cwd, env=env, timeout=timeout, text=True, capture_output=True
    )


def torchrun(ranks, *command, timeout=600, cwd=None, **env):
    """Runs a script on `ranks` gloo processes, which are forks."""
    return ended(begin(ranks, command, timeout, cwd, env))


@functools.cache
def verl():
    """What verl 0.6.1 computed, see verl_0.6.1.md: nested dicts of tensors and numbers."""
    with safe_open(ROOT / "tests" / "critic" / "verl_0.6.1.safetensors", "pt") as file:
        found = json.loads(file.metadata()["numbers"])
        for key in file.keys():
            *path, name = key.split("/")
            place = functools.reduce(lambda at, part: at.setdefault(part, {}), path, found)
            place[name] = file.get_tensor(key)
    return found


@functools.cache
def forks():
    """The process that has imported the slow libraries, and forks; all it has started ends with
    this one."""
    tests, bytecode = str(ROOT / "tests"), f"{SCRATCH.name}/bytecode"
    code = f"import sys; sys.path[0] = {tests!r}; import forked; forked.main({bytecode!r})"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SCRATCH": SCRATCH.name}
    process = subprocess.Popen(
        (sys.executable, "-c", code),
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(os.killpg, process.pid, signal.SIGKILL)
    return process


def ask(job):
    """Sends a job to the process that forks -> a folder, for ended()."""
    folder = tempfile.mkdtemp(dir=SCRATCH.name)
    forks().stdin.write(json.dumps({"folder": folder, "after": None, **job}) + "\n")
    forks().stdin.flush()
    return folder


def begin(ranks, arguments, timeout=600, cwd=None, env=None, alone=False):
    """A script and its arguments on some forks -> a folder, for ended()."""
    words = [str(x) for x in arguments]
    where = {"cwd": str(cwd or os.getcwd()), "env": env or {}}
    return ask({"ranks": ranks, "arguments": words, "timeout": timeout, "alone": alone, **where})


def ended(folder):
    """Waits for what has begun -> its CompletedProcess."""
    how = pathlib.Path(folder, "ended")
    while not how.exists():
        assert forks().poll() is None, "the process that forks has died"
        time.sleep(0.02)

    ring.spent(float(pathlib.Path(folder, "seconds").read_text()))
    failed = json.loads(how.read_text())
    code = 0
    if failed is not None:
        code = int(failed.split()[-1]) if failed.startswith("exit status") else -9
    return subprocess.CompletedProcess([], code, *printed(folder))


def printed(folder):
    """(standard output, standard error) so far of what has begun."""
    paths = [pathlib.Path(folder, name) for name in ("out.stdout", "out.stderr")]
    return [path.read_text() if path.exists() else "" for path in paths]


HAS_VLLM = importlib.util.find_spec("vllm") is not None
BEGUN = {}  # (file, name of a scenario) -> the folder where it runs


def begin_scenarios(file, chosen, after=None):
    """Begins these scenarios of a file, after the end of another folder -> their folder. A launch
    of ranks runs all that have these ranks and whose needs have run."""
    left, launches = list(chosen), []
    while left:
        first = left.pop(0)
        names = [first.name]
        for one in () if first.fresh else list(left):
            waits = [x for x in left if x.name.startswith(one.needs) and x is not one]
            if one.ranks == first.ranks and not one.fresh and not waits:
                names.append(one.name)
                left.remove(one)
        launches.append((first.ranks, names))

    folder = ask({"file": file, "launches": launches, "timeout": 1200, "after": after})
    BEGUN.update({(file, one.name): folder for one in chosen})
    return folder


def ran(function, ranks=None, name=None, file=None):
    """Waits for a scenario, and begins it, with those that it needs, if it has not begun -> the
    folder where it has left its results."""
    file = file or function.__module__
    of_file = {one.name: one for one in forked.SCENARIOS[file]}
    one = of_file[name or f"{function.__name__} on {ranks}"]
    if (file, one.name) not in BEGUN:
        begin_scenarios(file, [x for x in of_file.values() if x is one or needs(one, x, of_file)])

    folder = pathlib.Path(BEGUN[file, one.name])
    passed = folder / f"{one.name}.ok"
    while not passed.exists() and not (folder / "ended").exists():
        assert forks().poll() is None, "the process that forks has died"
        time.sleep(0.02)
    out, error = printed(folder)
    assert passed.exists(), f"{one.name}: {out[-5000:]}{error[-20000:]}"

    # what it needs is part of its price
    for x in (x for x in of_file.values() if x is one or needs(one, x, of_file)):
        seconds = [float(path.read_text()) for path in folder.glob(f"{x.name}.*.seconds")]
        ring.spent(sum(seconds), f"{file}-{x.name}")
    return folder


def needs(one, other, of_file):
    """Whether a scenario needs another one of its file, or what it needs does."""
    of_one = [x for x in of_file.values() if x.name.startswith(one.needs) and x is not one]
    return other in of_one or any(needs(x, other, of_file) for x in of_one)


def succeeded(process):
    """The standard output of a process that must have ended well."""
    assert process.returncode == 0, (
        f"exit code {process.returncode}\n{process.stdout}\n{process.stderr}"
    )
    return process.stdout


def help_of(page):
    """title of a box -> {flag: what it means}, from the page that --help prints."""
    boxes = {}
    for line in page.partition("╭")[2].splitlines():
        text = line.strip("│╭╮╰╯─ ")
        if line.startswith(("─", "╭")):
            boxes[text] = {}
        elif text.startswith("-"):
            flag = text.split()[0].rstrip(",")
            boxes[[*boxes][-1]][flag] = ""
        elif line.startswith("│      "):
            boxes[[*boxes][-1]][flag] += f"{text} "
    del boxes["options"]["-h"]
    return boxes


def explained(boxes, *kinds):
    """Asserts that help_of has the flags of these dataclasses, each with words and default."""
    ours = {flag: words for box in boxes.values() for flag, words in box.items()}
    names = []
    for kind in kinds:
        prefix = getattr(kind, "prefix", "--")
        names += [prefix + field.name.replace("_", "-") for field in dataclasses.fields(kind)]
    groups = {"--critic", "--actor", "--vllm", "--backend"}
    groups |= {"--actor.seed", "--actor.timeout-minutes"}  # are those of the run
    assert set(names) - groups == set(ours) - groups
    for words in ours.values():
        assert re.fullmatch(r".{8,} \(default: .*\) ", words) and "----" not in words, words


def write_manifest(folder):
    """The manifest of a folder as if what is in it now had been written so."""
    files = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    files = [path for path in files if path.name != common.MANIFEST]
    sums = {str(path.relative_to(folder)): common.checksum(path) for path in files}
    pathlib.Path(folder, common.MANIFEST).write_text(json.dumps(sums, indent=1, sort_keys=True))


def random_batch(n, seed=0, vocab_size=97, longest=40, idle=True, prompts=0):
    """n ragged multi-turn rows: prompts of 1 to 8 tokens, masks with holes; idle: some have no
    action.
    prompts: instead there are this many prompts, of 1, 8, 15 ... tokens, and rows take turns at
    them."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=g))
    rows = []

    for i in range(n):
        prompt, response = draw(1, 9), draw(1, longest - 8)
        mask = torch.rand(response, generator=g) < 0.8
        mask[-1] = True
        mask = torch.cat([torch.zeros(prompt), mask * (not idle or i % 5 > 0)]).bool()
        ids = torch.randint(0, vocab_size, (prompt + response,), generator=g)
        if prompts:
            more = torch.arange(7 * (i % prompts) + 1) * 13 % vocab_size
            ids, mask = torch.cat([more, ids[prompt:]]), torch.cat([more < 0, mask[prompt:]])
        noise = lambda mask=mask: torch.randn(len(mask), generator=g) * mask
        truncated = torch.rand(1, generator=g) < 0.3
        columns = {name: noise() for name in ("token_level_rewards", "values", "returns")}
        ends = torch.tensor([0, len(ids)])
        rows.append(common.Batch(ids, ends, mask, torch.tensor([i]), truncated, **columns))

    # log-probs have random numbers of their own
    batch = common.concat(rows)
    p_T = torch.rand(len(batch.input_ids), generator=torch.Generator().manual_seed(seed))
    batch.rollout_log_probs = p_T.clamp(min=1e-3).log() * batch.response_mask
    return batch


def spans_of(mask_T):
    """(T,) bool: where a span of actions begins. No row begins with an action."""
    return mask_T & ~mask_T.roll(1)


def cut_into_segments(whole, seed=0):
    """The same episodes in rows whose prompts are all that came before: each is cut behind some of
    its turns. A token belongs to one segment, and is in the prompts of the later ones."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for (start, end), number in zip(rows_of(whole), whole.row_id.tolist()):
        acts = whole.response_mask[start:end]
        turns = (acts[:-1] & ~acts[1:]).nonzero()[:, 0] + 1
        cuts = turns[torch.rand(len(turns), generator=g) < 0.7].tolist()
        for segment, (begin, stop) in enumerate(itertools.pairwise([0, *cuts, end - start])):
            mine = torch.arange(stop) >= begin
            columns = {}
            for name in (*whole.FLOATS, "response_mask"):
                x_T = getattr(whole, name)
                if x_T is not None:
                    columns[name] = x_T[start : start + stop] * mine
            rows.append(
                common.Batch(
                    input_ids=whole.input_ids[start : start + stop],
                    cu_seqlens=torch.tensor([0, stop]),
                    row_id=torch.tensor([100 * number + segment]),
                    truncated=torch.tensor([False]),
                    episode=torch.tensor([100 * number]),
                    **columns,
                )
            )
        rows[-1].truncated = whole.truncated[whole.row_id == number]
    return common.concat(rows)


def rows_of(batch):
    """(start, end) of each sequence."""
    cu = batch.cu_seqlens.tolist()
    return list(zip(cu, cu[1:], strict=False))


def actions_of(batch):
    """The indices of each row's actions."""
    return [[t for t in range(*ends) if batch.response_mask[t]] for ends in rows_of(batch)]


@contextlib.contextmanager
def refused(words, begin="", end="", kind=common.UserError):
    """What is done within must raise an error of this kind: one line with these words, and these
    ends."""
    with pytest.raises(kind) as error:
        yield
    said = str(error.value)
    assert words in said and said.startswith(begin) and said.endswith(end) and "\n" not in said, (
        said
    )


@contextlib.contextmanager
def refused_in_a_box(capfd, *words):
    """What is done within must end with status 2, and tyro's box must hold these words. Gives a
    list that gets its text."""
    told = []
    with pytest.raises(SystemExit) as stop:
        yield told
    said = in_one_line(capfd.readouterr().err)
    told.append(said)
    assert stop.value.code == 2 and all(x in said for x in words), said


def in_one_line(box):
    """The text in a box of tyro's."""
    assert box.startswith("╭"), box
    return " ".join(line.strip("│╭╮╰╯─ ") for line in box.splitlines())


@contextlib.contextmanager
def captured_gradients(critic):
    """A list where an FSDP critic or a PolicyWorker notes the whole gradient of each step, not
    clipped."""
    seen, model = [], critic.model
    fsdp1 = isinstance(model, critic_fsdp.fsdp.FullyShardedDataParallel)
    owner = model if fsdp1 else torch.nn.utils  # whose clip_grad_norm_ is called
    clip = owner.clip_grad_norm_

    def note(*args, **kwargs):
        whole = contextlib.nullcontext()
        if fsdp1:
            whole = critic_fsdp.fsdp.FullyShardedDataParallel.summon_full_params(
                model, with_grads=True
            )
        with whole:
            gradients = {}
            for name, p in model.named_parameters():
                if p.requires_grad and p.grad is not None:  # none: a layer that only images reach
                    name = name.replace("_fsdp_wrapped_module.", "")
                    gradients[name] = full_tensor(p.grad).clone()
            seen.append(gradients)
        return clip(*args, **kwargs)

    owner.clip_grad_norm_ = note
    try:
        yield seen
    finally:
        owner.clip_grad_norm_ = clip


HALFWAY = "^an earlier update failed halfway: build a new worker and load a checkpoint$"


@contextlib.contextmanager
def interrupted_in(owner, place, nth):
    """Ctrl-C in what is done within: deep in the nth forward of a critic or a PolicyWorker, in the
    backward of it, or after the optimizer has stepped."""
    calls = []

    def press(*_):
        raise KeyboardInterrupt

    def hook(layer, args, out):
        calls.append(1)
        if len(calls) == nth and place != "step":
            states = out[0] if isinstance(out, tuple) else out
            press() if place == "forward" else states.register_hook(press)

    names = ("Qwen2DecoderLayer", "TransformerLayer")
    layers = [m for m in owner.model.modules() if type(m).__name__.endswith(names)]
    step = "step_with_ready_grads" if hasattr(owner, "modules") else "step"
    with contextlib.ExitStack() as stack:
        stack.enter_context(layers[0].register_forward_hook(hook))
        if place == "step":
            stack.enter_context(mock.patch.object(owner.optimizer, step, press))
        stack.enter_context(pytest.raises(KeyboardInterrupt))
        yield
    assert len(calls) == nth


STRATEGIES = ("fsdp2", "fsdp1", "none")
LAYOUTS = {name: {"strategy": name} for name in ("fsdp2", "fsdp1", "none")} | {
    "ulysses": {"ulysses_size": 2}
}
BINS = {"fork": "hl_gauss", "value_head": "bounded"}
VARIANTS = {
    "lora": {"lora_rank": 3, "lora_alpha": 6.0},
    "freeze": {"freeze_modules": r"embed_tokens|layers\.0\.(self_attn|mlp\.up)"},
    "bounded": {"value_head": "bounded", "value_range": (-1.5, 2.0)},
    "noise": {"value_weights": "noise"},
}


def batch_for(w, n=12, seed=0):
    """Random rows for a tiny model. The ids above 98 are the placeholders of images."""
    return random_batch(n, seed, vocab_size=min(w.model_config.get_text_config().vocab_size, 99))


def assert_same_weights(ours, theirs):
    """Asserts that the weights of two critics are equal, bit for bit. theirs: a critic or its
    weights."""
    theirs = theirs if isinstance(theirs, dict) else full_weights(theirs.critic)
    torch.testing.assert_close(full_weights(ours.critic), theirs, rtol=0, atol=0)


def names_with_moments(critic):
    """Names of the weights for which AdamW has moments."""
    _, _, state = critic_fsdp.checkpoint_tensors(critic.model, critic.optimizer)
    return {name for name, moments in state["state"].items() if "exp_avg" in moments}


def worker(total_steps=None, script=critic_fsdp, fork=None, of_fork=None, **fields):
    """A critic with its model built. fork: of a file of tests/forks. of_fork: names -> what its
    class has instead of its own."""
    made = script.CriticWorker(script.Config(**fields))
    with forked_critic(script, fork, of_fork):
        made.init_model(total_steps)
    return made


def forked_critic(script, fork, of_fork=None):
    """Meanwhile the critic of this script is that of a fork; None: its own."""
    if not fork:
        return contextlib.nullcontext()
    start = importlib.import_module("fork")
    part = type("Part", (importlib.import_module(fork).Critic,), of_fork or {})
    return mock.patch.object(script, start.NAMES[script.__name__], start.forked(script, part))


def rows_after(*prompts, answer=2):
    """A batch of rows with these prompts, each followed by `answer` actions."""
    rows = [common.Batch.blank(len(prompt) + answer) for prompt in prompts]
    for number, (row, prompt) in enumerate(zip(rows, prompts)):
        row.row_id[0] = number
        row.input_ids[: len(prompt)] = torch.tensor(prompt)
        row.response_mask[: len(prompt)] = False
    return common.concat(rows)


def one_update(worker, batch):
    """Values of the whole batch; gradient and metrics of an update by this rank's rows, of one
    step."""
    values = gather(dataclasses.replace(batch, values=worker.compute_values(batch))).values
    with captured_gradients(worker.critic) as seen:
        metrics = worker.update_critic(batch)
    assert metrics["critic/skipped_steps"] == 0 and len(seen) == 1
    return {"gradients": seen[0], "values": values, "metrics": metrics}


def of_critic(metrics):
    """Those that equal updates have in common: no times, no memory."""
    return {name: x for name, x in metrics.items() if name.startswith("critic/")}


def gather(batch):
    """The rows of all ranks, in row_id order (a collective)."""
    whole = common.concat(common.of_all_ranks(batch))
    return whole.select(whole.row_id.argsort().tolist())


def parts_of(table):
    """The indices of the rows of each micro-batch, for each rank of a common.Table."""
    both = zip(table.wanted, table.sizes, strict=True)
    return [[x.tolist() for x in torch.tensor(index).split(sizes)] for index, sizes in both]


def mine(batch):
    """This rank's rows of a batch: whole episodes, in turn."""
    episodes = batch.episodes()[common.RANK :: common.WORLD_SIZE]
    return batch.select(list(itertools.chain(*episodes)))


def part_of(case, batch):
    if case == "rows on rank 0":
        return batch if common.RANK == 0 else batch.select([])
    return mine(batch)


def assert_rows_come_back(worker, batch):
    """Values do not depend on who owns which rows; every caller gets its own rows in its own
    order."""
    worker.set_budget(batch.longest[0], "the longest row")
    expected = common.compute_together(worker, batch)
    assert expected[batch.response_mask].unique().numel() > 50
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1)).tolist()
    for cut in (0, 5, len(batch)):  # none, some and all of the rows are on the last rank
        own = order[cut:] if common.RANK == 0 else order[:cut]
        values = worker.compute_values(batch.select(own))
        torch.testing.assert_close(values, expected[batch.token_index(own)], rtol=0, atol=0)
    with pytest.raises(ValueError, match="row_id 0 occurs more than once"):
        worker.compute_values(batch)


def assert_old_values_come_along(worker, batch):
    """An update of one step makes the same of rows without old values as of rows that have those
    from before it. The learning rate must be 0."""
    worker.critic.max_tokens_forward = worker.critic.max_tokens  # other micro-batches round apart
    known = dataclasses.replace(batch, values=worker.compute_values(batch))
    expected = worker.update_critic(known)
    metrics = worker.update_critic(dataclasses.replace(batch, values=None))
    assert metrics.keys() == expected.keys()
    for name, x in of_critic(expected).items():
        # a mean of values of both signs, whose forwards with and without a graph round apart on a
        # CPU with AVX2 alone
        most = 1e-6 if name == "critic/vpred_mean" else 1e-7
        assert metrics[name] == pytest.approx(x, rel=1e-6, abs=most, nan_ok=True), name


def end_groups():
    """Ends all groups, their threads and sockets, but that of all ranks, which must be done with
    them."""
    if dist.is_initialized():
        dist.barrier()
    for group in set(dist.distributed_c10d._world.pg_map).difference([dist.group.WORLD]):
        dist.destroy_process_group(group)
    critic_fsdp.make_groups.cache_clear()  # what it remembers has ended
    gc.collect()  # a worker that nothing needs any more may hold them in a cycle


def peak_bytes(call):
    """The most memory that tensors of a call take at once."""
    with torch.profiler.profile(profile_memory=True) as log:
        call()
    events = [e for e in log.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


LARGE = {  # 17 million weights: 200 MB with AdamW's moments
    "override_config": json.dumps({
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 8000
    }),
}  # fmt: skip


def check_saves(worker, folder):
    """A save adds less than 90 % of what it writes to this process's memory; a copy for a save in
    the background adds 100 %, and writing it little more. Only Linux counts this."""
    status = pathlib.Path("/proc/self/status")
    kib = lambda name: int(re.search(rf"{name}:\s+(\d+)", status.read_text())[1])
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    whole = common.FILE_BYTES
    common.FILE_BYTES = 2**24  # as small a part of this shard as 128 MiB are of a large one
    found = {}
    for copy in (False, True):
        gc.collect()
        libc.malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = kib("VmRSS")
        write = worker.checkpoint_writer(copy=copy)
        found[copy, "begin"] = kib("VmHWM") - before
        with common.published(folder / "large") as tmp:
            write(tmp)
        found[copy, "end"] = kib("VmHWM") - before
        del write
    common.FILE_BYTES = whole
    size = sum(path.stat().st_size for path in (folder / "large").iterdir()) / 1024
    found = {key: x / size for key, x in found.items()}
    assert size > 180_000 and found[False, "end"] < 0.9, (size, found)
    # what Megatron gathers of some weights, on a simulated device, is in this process, too: 1.13 to
    # 1.18, and once 1.32 on a busy machine; a second copy would make it 2
    assert 0.95 < found[True, "begin"] <= found[True, "end"] < 1.5, found


def full_weights(critic):
    """name -> whole tensor of every weight of the value model (a collective)."""
    state = critic_fsdp.state_dict.get_model_state_dict(critic.model)
    return {n: full_tensor(x).detach().clone() for n, x in state.items()}


def full_tensor(x):
    """The whole of a sharded tensor (a collective), or the tensor itself."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
