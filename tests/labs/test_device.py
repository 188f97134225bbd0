"""Runs the CUDA branches of all three scripts on a pretended device; see pretend_device.py for what
it shows.

With a GPU, this file is a script, whose results the tests read with DEVICE_RESULTS=OUT_FOLDER:

    python tests/labs/test_device.py OUT_FOLDER [NAME...]
"""

import dataclasses
import functools
import gc
import itertools
import os
import pathlib
import re
import sys
import threading
import types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import forked
import pretend_device as device

if __name__ == "__main__" and not device.REAL:
    sys.exit("needs a GPU; without one, run pytest on this file")
if __name__ == "__main__" or forked.NUMBERS:  # before anything asks for a device or for LOCAL_RANK
    device.install()

import helpers
import pytest
import torch
import torch.distributed as dist
from helpers import SCRATCH, end_groups, gather, mine, ran, random_batch, refused
from reference import MODELS, save_model
from safetensors.torch import load_file

import common
import critic_fsdp

RESULTS = os.environ.get("DEVICE_RESULTS")  # of a real GPU
pytestmark = pytest.mark.skipif(not (RESULTS or device.RUNS_HERE), reason=device.REASON)
BATCH = random_batch(6, vocab_size=60)
SIZES = {"ppo_mini_batch_size": 3, "ppo_max_token_len_per_gpu": 60}
EXACT = {"param_dtype": "float32"}
MOE = {**EXACT, "model": "tiny-qwen3-moe"}
DEEPSEEK = f"{SCRATCH.name}/deepseek-v3"  # it has persistent buffers
PADDED = {**EXACT, "use_remove_padding": False}
ACTIVATIONS = {**EXACT, "gradient_checkpointing": True, "activation_offload": True}
TP = {"tensor_model_parallel_size": 2}
LAYOUTS = {  # ranks -> name -> changes to the defaults
    1: {
        "fsdp2": {**EXACT}, "fsdp1": {**EXACT, "strategy": "fsdp1"},
        "none": {**EXACT, "strategy": "none"},
        "bfloat16": {}, "padded": PADDED, "activation offload": ACTIVATIONS,
        "offload policy, experts": {**EXACT, "model": DEEPSEEK, "offload_policy": True},
        "megatron": EXACT, "megatron bfloat16": {}, "megatron padded": PADDED,
        "megatron experts": MOE,
        "megatron frozen": {**EXACT, "freeze_modules": "norm"},
    },
    2: {
        "fsdp2": {**EXACT}, "fsdp1": {**EXACT, "strategy": "fsdp1"},
        "none": {**EXACT, "strategy": "none"},
        "ulysses": {**EXACT, "ulysses_size": 2}, "ulysses bfloat16": {"ulysses_size": 2},
        "megatron tensor": {**EXACT, **TP}, "megatron tensor bfloat16": TP,
        "megatron pipeline": {**EXACT, "pipeline_model_parallel_size": 2},
        "megatron experts, context": {**MOE, "expert_model_parallel_size": 2,
            "context_parallel_size": 2},
    },
}  # fmt: skip


def made(name, fields):
    module = critic_fsdp
    if name.startswith("megatron"):
        import critic_megatron as module
    if fields.get("model") == DEEPSEEK:
        save_model(MODELS["deepseek-v3"], pathlib.Path(DEEPSEEK))
    worker = helpers.worker(script=module, **SIZES, **fields)
    worker.set_budget(BATCH.longest[0], "the longest row")
    return worker


def learned(worker, move=lambda: None):
    """Values of the batch before and after an update, its metrics, and where each call waited.
    move() runs before each call."""
    rows, results, waits = mine(BATCH), [], []
    for call in (worker.compute_values, worker.update_critic, worker.compute_values):
        move()
        device.WAITS.clear()
        results.append(call(rows))
        waits.append(dict(device.WAITS))
    before, metrics, after = results
    values = [gather(dataclasses.replace(rows, values=x)).values for x in (before, after)]
    return {"values": values, "metrics": metrics, "waits": waits}


def layout(name, fields):
    """What a layout learns. Between phases the critic is offloaded and leaves almost nothing
    there."""
    before = device.allocated()
    worker = made(name, fields)
    # before onload, which would move weights that were left on the host
    worker.compute_values(mine(BATCH))

    def move():
        device.WAITS.clear()
        whole = device.allocated() - before
        worker.offload()
        assert device.WAITS.total() <= 1, device.WAITS  # for all weights and AdamW's state
        assert not device.late  # they have arrived
        left = device.allocated() - before
        # a stage keeps its last input
        assert fields.get("offload_policy") or left < 0.1 * whole, (left, whole)
        worker.onload()

    return learned(worker, move)


def state_of(worker):
    """Copies of a critic's weights and moments, on the host."""
    critic = worker.critic
    optimizers = [critic.optimizer]
    modules = [critic.model]
    if hasattr(critic, "masters"):  # Megatron's
        optimizers = [x.optimizer for x in critic.optimizers]
        modules = critic.modules
    tensors = [p for module in modules for p in module.parameters()]
    tensors += itertools.chain(*map(common.optimizer_moments, optimizers))
    return [getattr(x, "_local_tensor", x).detach().cpu().clone() for x in tensors]


def offloading(out):
    """Offloading changes no bit, allocates host memory once and no more than the tensors have, and
    a checkpoint of an offloaded critic is the same."""
    stats = lambda: torch.cuda.host_memory_stats()
    for name in ("fsdp2", "fsdp1", "none", "megatron", "megatron bfloat16", "megatron frozen"):
        worker = made(name, LAYOUTS[1][name])
        worker.update_critic(BATCH)
        worker.save_checkpoint(out / "here")
        state = state_of(worker)
        before, blocks = stats()["allocated_bytes.current"], []
        held = device.allocated()
        for _ in range(3):
            worker.offload()
            blocks.append(stats()["num_host_alloc"])
            moved = held - device.allocated()
            worker.onload()
        grown = stats()["allocated_bytes.current"] - before
        assert len(set(blocks)) == 1 and 0 <= grown <= moved, (name, blocks, grown, moved)

        worker.offload()
        worker.save_checkpoint(out / "away")
        worker.onload()
        assert all(map(torch.equal, state_of(worker), state)), name
        for path in (out / "here").glob("*.safetensors"):
            here, away = (load_file(out / folder / path.name) for folder in ("here", "away"))
            assert here.keys() == away.keys() and all(torch.equal(here[x], away[x]) for x in here)


def saves(out):
    """A save copies to the host a small part of the device's shard at a time, and one in the
    background all of it, once."""
    import ppo_loop

    for name in ("fsdp2", "megatron"):
        worker = made(name, helpers.LARGE)
        worker.update_critic(BATCH)
        helpers.check_saves(worker, out)
    flags = ["--out-dir", str(out / "large"), "--critic.model", "tiny-qwen2"]
    flags += ["--actor.override-config", helpers.LARGE["override_config"]]
    run, task = ppo_loop.set_up(ppo_loop.parse(flags))
    helpers.check_saves(ppo_loop.PolicyWorker(run, task, torch.device("cuda")), out)


def refusals(out):
    """Checks what the device refuses, and that data that has not arrived yet is NaN."""
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    with refused("on the same device", kind=RuntimeError):
        there + here
    with refused("generator", kind=RuntimeError):
        torch.randn(3, device="cuda", generator=torch.Generator())
    with pytest.raises(TypeError):
        there.numpy()
    assert torch.empty(3, device="cuda").isnan().all()
    early = there.to("cpu", non_blocking=True)
    assert early.isnan().all()
    torch.cuda.synchronize()
    assert (early == 1).all()
    there.untyped_storage().resize_(0)
    with refused("was freed", kind=RuntimeError):
        there.sum()


def run_fsdp(out):
    """A run with `auto` and saves in the background, and a resumed one, whose export is the reward
    model."""
    write = critic_fsdp.dcp.save

    def save(*args, **options):
        """Checks that it runs in a background thread, which has chosen its device (by default the
        first)."""
        assert threading.get_ident() in device.THREADS
        assert threading.current_thread() is not threading.main_thread()
        write(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(critic_fsdp.dcp, "save", save)
        fields = {"ppo_max_token_len_per_gpu": "auto:0.01", "ppo_mini_batch_size": 16}
        options = {"async_save": True, "save_every": 1, "out_dir": str(out / "fsdp")}
        for steps, resume in ((2, None), (3, "auto")):
            config = critic_fsdp.Config(**fields)
            critic_fsdp.main(critic_fsdp.Run(config, steps=steps, resume=resume, **options))
    rows = common.read_lines(out / "fsdp" / "metrics.jsonl")
    assert [row["step"] for row in rows if "critic/vf_loss" in row] == [1, 2, 3]


def resume_in_megatron(out):
    """Megatron loads a checkpoint of critic_fsdp.py and computes the same values."""
    folder = str(out / "fsdp" / "checkpoints" / "step_3")
    values = []
    for name in ("fsdp2", "megatron"):
        worker = made(name, EXACT)
        worker.load_checkpoint(folder)
        values.append(worker.compute_values(BATCH))
        assert worker.critic.updates == 3
    torch.testing.assert_close(*values)


def run_ppo(out):
    """PPO steps with transformers' rollout, --offload, a KL penalty and, on one rank, a reward
    model."""
    import ppo_loop

    flags = "--offload --kl-coef 0.01 --steps 2 --train-batch-size 8 --rollout-n 2 --eval-every 0"
    flags += f" --supervised-steps 2 --critic.ppo-mini-batch-size 8 --out-dir {out / 'ppo'}"
    if common.WORLD_SIZE == 1:
        flags += f" --reward-model {out / 'fsdp' / 'hf'}"
    ppo_loop.main(ppo_loop.parse(flags.split()))


def offloaded_vllm(out):
    """Events of a run with --offload --rollout vllm, as (name, bytes on the device at that time).
    VLLMRollout is the real one; its engine is transformers', with a cache of 4 MiB that sleeps and
    wakes separately."""
    import ppo_loop

    events = []
    note = lambda name: events.append((name, device.allocated()))

    class Engine:
        """What VLLMRollout needs of vllm.LLM."""

        def __init__(self, *args):
            self.inner = ppo_loop.HFRollout(*args)
            self.cache = torch.zeros(2**20, device="cuda")
            self.llm_engine = types.SimpleNamespace(
                is_sleeping=lambda: self.cache is None, reset_encoder_cache=lambda: None
            )

        def wake_up(self, tags):
            if tags == ["weights"]:
                self.inner.onload()
            else:
                note("cache wakes")
                self.cache = torch.zeros(2**20, device="cuda")

        def sleep(self, level):
            self.cache = None
            self.inner.offload()
            note("engine sleeps")

        def collective_rpc(self, name, kwargs):
            note("sync")
            self.inner.sync(kwargs["weights_iterator"])

        def generate(self, asked, params, use_tqdm):
            rows = [(x["prompt_token_ids"], p.seed, p.max_tokens) for x, p in zip(asked, params)]
            replies = self.inner.generate(rows, params[0].temperature) if rows else []
            for (prompt, _, _), (ids, log_probs, stops) in zip(rows, replies):
                seen = [{i: types.SimpleNamespace(logprob=x)} for i, x in zip(ids, log_probs)]
                why = "stop" if stops else "length"
                reply = types.SimpleNamespace(token_ids=ids, logprobs=seen, finish_reason=why)
                yield types.SimpleNamespace(prompt_token_ids=prompt, outputs=[reply])

        apply_model = reset_prefix_cache = lambda *_: None

    class Rollout(ppo_loop.VLLMRollout):
        def __init__(self, run, task, where):
            self.run, self.task, self.on_cpu = run, task, False
            self.llm = Engine(run, task, where)
            self.skeleton, self.dtype, self.group = self.llm.inner.model, self.llm.inner.dtype, None
            self.llm.generate = lambda *args, **more: list(Engine.generate(self.llm, *args, **more))

    def noted(owner, name, words):
        work = getattr(owner, name)
        patch.setattr(owner, name, lambda *args: (note(words(args)), work(*args))[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_loop, "VLLMRollout", Rollout)
        vllm = types.SimpleNamespace(SamplingParams=types.SimpleNamespace, __spec__=True)
        patch.setitem(sys.modules, "vllm", vllm)
        noted(ppo_loop.RewardModel, "ask_all", lambda args: f"score {len(args[1])}")
        noted(ppo_loop.Policy, "forward", lambda args: f"forward {torch.is_grad_enabled()}")
        flags = "--offload --rollout vllm --kl-coef 0.01 --steps 2 --train-batch-size 8"
        flags += f" --supervised-steps 2 --critic.ppo-mini-batch-size 8 --out-dir {out / 'vllm'}"
        flags += f" --reward-model {out / 'fsdp' / 'hf'}"
        flags += ' --actor.override-config {"num_hidden_layers":1}'
        ppo_loop.main(ppo_loop.parse(flags.split()))
    saved = load_file(out / "vllm" / "hf" / "model.safetensors")
    return {"events": events, "weights": 4 * sum(x.numel() for x in saved.values())}


def actor_and_rollout(out):
    """How often the actor waits in both of its calls, and a rollout at two response
    lengths."""
    import ppo_loop

    flags = f"--critic.model tiny-qwen2 --actor.ppo-mini-batch-size 3 --out-dir {out / 'actor'}"
    flags += " --actor.ppo-max-token-len-per-gpu 60"
    run, task = ppo_loop.set_up(ppo_loop.parse(flags.split()))
    actor = ppo_loop.PolicyWorker(run, task, torch.device("cuda"))
    rows = dataclasses.replace(BATCH, advantages=BATCH.returns, rollout_log_probs=BATCH.values)

    def waits(function, *args):
        device.WAITS.clear()
        result = function(*args)
        return result, device.WAITS.total()

    old, log_probs = waits(actor.compute_log_probs, rows)
    rows.old_log_probs = rows.ref_log_probs = old
    _, update = waits(actor.update_policy, rows)
    found = {"log-probs": log_probs, "update": update}
    engine = ppo_loop.HFRollout(run, task, torch.device("cuda"))
    for length in (4, 8):
        asked = [(prompt.ids, 0, length) for prompt in task.prompts[:3]]
        _, found[length] = waits(engine.generate, asked, 0.0)
    return found


def one_base(out):
    """With --share-base, PPO's metrics are the same with --offload, with adapters and without."""
    import ppo_loop

    for way in ("a head on the actor's", "adapters on one base"):
        metrics = []
        for offload in ("", "--offload"):
            folder = out / f"{way}{offload}"
            flags = f"{WAYS[way]} {offload} --kl-coef 0.01 --steps 3 --train-batch-size 16"
            flags += " --save-every 2 --supervised-steps 2 --actor.param-dtype float32"
            flags += f" --reward {helpers.ROOT}/tests/loop/rewards.py:right_digits"
            ppo_loop.main(ppo_loop.parse([*flags.split(), "--out-dir", str(folder)]))
            rows = common.read_lines(folder / "metrics.jsonl")
            lasting = lambda row: {k: x for k, x in row.items() if not k.startswith(PASSING)}
            metrics.append([*map(lasting, rows)])
        assert metrics[0] == metrics[1], way
        assert metrics[0][-1]["step"] == 3 and metrics[0][-2]["critic/grad_norm"] > 0


PASSING = ("time/", "perf/", "memory/")  # metrics that differ between equal runs
LORA = "--actor.lora-rank 2 --critic.lora-rank 2"
WAYS = {
    "all weights": "",
    "a head on the actor's": "--share-base",
    "adapters": LORA,
    "adapters on one base": f"{LORA} --share-base",
}


def ways_to_run_ppo(out):
    """Way -> (bytes on the device of actor, reference, engine and critic, and of what their
    optimizers keep; weights of the actor, of the critic, and of all adapters)."""
    import ppo_loop

    found = {}
    for way, flags in WAYS.items():
        wide = '{"hidden_size":256,"intermediate_size":1024,"num_hidden_layers":4}'
        flags += f" --out-dir {out}/way --supervised-steps 0 --kl-coef 0.01"
        flags += f" --actor.override-config {wide}"
        run, task = ppo_loop.set_up(ppo_loop.parse(flags.split()))
        fresh = types.SimpleNamespace(folder=None, halvings=0)

        before = device.allocated()
        models = ppo_loop.build(run, task, torch.device("cuda"), fresh)
        models.critic.checkpoint_writer()  # which makes the optimizer's state
        models.actor.critic.free_gathered()
        held = device.allocated() - before

        # the same weight in two models counts once
        both = [*models.actor.model.named_parameters()]
        both += models.critic.critic.model.named_parameters()
        adapters = {p: p.numel() for name, p in both if ".lora_" in name}
        sizes = [sum(adapters.values())]
        for model in (models.critic.critic.model, models.actor.model):
            weights = [p.numel() for name, p in model.named_parameters() if ".lora_" not in name]
            sizes.insert(0, sum(weights))
        found[way] = (held, *sizes)
        del models, model, both, adapters
        gc.collect()
    return found


ONE_RANK = (offloading, actor_and_rollout, run_fsdp, resume_in_megatron, run_ppo, offloaded_vllm)
ONE_RANK += (ways_to_run_ppo, one_base)
ONE_RANK = ONE_RANK if device.REAL else (refusals, saves, *ONE_RANK)
PARTS = {1: ONE_RANK, 2: (run_ppo,)}
EXPORTED = ("resume_in_megatron", "run_ppo", "offloaded_vllm")  # read what run_fsdp leaves
NAMES = {n: [*LAYOUTS[n], *(part.__name__ for part in PARTS[n])] for n in LAYOUTS}


@functools.cache
def prepare():
    """Runs here are short, and write no report, because matplotlib takes a second."""
    common.setup_distributed()
    common.write_report = lambda *_: None
    rows = common.toy_rows
    common.toy_rows = lambda n, *args, **options: rows(min(n, 32), *args, **options)


def on_the_device(folder, name):
    """A layout or a part on these ranks, which leaves a file of its name."""
    prepare()
    out = folder / str(common.WORLD_SIZE)
    out.mkdir(exist_ok=True)
    if name in LAYOUTS[common.WORLD_SIZE]:
        result = layout(name, LAYOUTS[common.WORLD_SIZE][name])
    else:
        result = globals()[name](out)

    dist.barrier()
    if common.RANK == 0:
        waits = [sum(where.values()) for where in (result or {}).get("waits", [])]
        print(name, *waits, flush=True)
        torch.save(result, out / name)


for n, names in NAMES.items():
    for name in names if device.RUNS_HERE else ():
        needs = ("run_fsdp on 1",) if name in EXPORTED else ()
        forked.scenario(n, f"{name} on {n}", (name,), needs)(on_the_device)


def of_device(ranks, name):
    """The result of a part on this number of ranks."""
    folder = pathlib.Path(RESULTS) if RESULTS else ran(on_the_device, name=f"{name} on {ranks}")
    path = folder / str(ranks) / name
    if RESULTS and ranks > 1 and not path.exists():
        pytest.skip("needs two GPUs")
    return torch.load(path)


@pytest.fixture(scope="module")
def host():
    """(model, frozen weights) -> what FSDP learns on the host."""
    cases = [("tiny-qwen2", "norm"), *((x, None) for x in ("tiny-qwen2", MOE["model"], DEEPSEEK))]
    return {case: learned(made("", dict(zip(("model", "freeze_modules"), case)))) for case in cases}


ALL = [(n, name) for n, names in LAYOUTS.items() for name in names]


@pytest.mark.parametrize("ranks, name", ALL)
def test_a_layout_learns_what_the_host_learns(ranks, name, host):
    """On every layout of both critics, with the model offloaded between phases."""
    fields = LAYOUTS[ranks][name]
    expected = host[fields.get("model", "tiny-qwen2"), fields.get("freeze_modules")]
    ours = of_device(ranks, name)
    exact = "param_dtype" in fields
    largest = (2e-5, 1e-3) if exact else (0.1, 0.5)
    for x, y, most in zip(ours["values"], expected["values"], largest, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=most)
    for key in ("critic/vf_loss", "critic/grad_norm"):
        theirs = pytest.approx(expected["metrics"][key], rel=1e-4 if exact else 0.1)
        assert ours["metrics"][key] == theirs


THEIRS = {  # layout -> where a library waits: what for, part of the script's line
    "padded": ("_local_scalar_dense", "self.model("),  # is there any padding?
    "fsdp1": ("synchronize", ""),  # before each gather
    "offload policy, experts": ("", ""),
    "megatron experts": ("", "return chunk("),
    "megatron experts, context": ("", "return chunk("),
    "megatron pipeline": ("", "get_forward_backward_func()("),  # stages send each other shapes
    "megatron tensor": ("_index_put_impl_", ""),  # masks the tokens of other ranks
    "megatron tensor bfloat16": ("_index_put_impl_", ""),
}


@pytest.mark.parametrize("ranks, name", ALL)
def test_the_host_does_not_wait_for_micro_batches(ranks, name):
    """It waits once for all values, once for each mini-batch's norm (of two), and once for the
    metrics."""
    what, part = THEIRS.get(name, (None, None))
    counts = []
    for waits in of_device(ranks, name)["waits"][:2]:
        theirs = lambda key: name in THEIRS and what in key[0] and part in key[1]
        counts.append(sum(n for key, n in waits.items() if not theirs(key)))
    moved = name == "fsdp1"  # clip_grad_norm_ makes a number on the host, once
    values = int(name != "megatron pipeline")  # the first stage has none
    assert counts == ([0, 0] if THEIRS.get(name) == ("", "") else [values, 3 + moved])


def test_the_actor_waits_as_the_critic_does_and_a_rollout_once_a_token():
    """The loop of tokens asks after each one which rows have ended."""
    waits = of_device(1, "actor_and_rollout")
    assert (waits["log-probs"], waits["update"]) == (1, 3)
    assert waits[8] - waits[4] == 4


def test_a_device_that_is_not_cuda_is_refused(monkeypatch):
    """A one-line error if torch has an accelerator that the scripts do not support; a Mac uses its
    CPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(sys, "platform", "linux")
    with refused("this machine has 0 CUDA devices"):
        common.setup_distributed()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert common.setup_distributed().type == "cpu"


def test_the_error_of_nccl_for_a_lost_rank_is_explained():
    """If it is raised in Python at all: after a time-out, a thread of NCCL ends the process."""
    text = "A call failed possibly due to a network error or a remote process exiting prematurely."
    found = [hint for words, hint in common.HINTS.items() if re.search(words, text)]
    assert found == ["another rank died or hangs"]


def test_the_device_holds_what_a_phase_needs():
    """With --offload --rollout vllm, the actor is gone when the engine's cache wakes, rewards (also
    those of evaluations) are computed while the engine sleeps, and AdamW's state is there only
    during updates."""
    found = of_device(1, "offloaded_vllm")
    # the actor is checked first; then the engine goes to sleep, before the critic is built
    is_check = lambda event: event[0].startswith("forward False")
    assert is_check(found["events"][0])
    events = list(itertools.dropwhile(is_check, found["events"]))
    _, none = events[0]
    events = [(re.sub(r" \d+$", "", name), (n - none) / found["weights"]) for name, n in events]
    events = [next(same) for _, same in itertools.groupby(events, lambda event: event[0])]
    step = ["sync", "cache wakes", "engine sleeps", "score", "forward False", "forward True"]
    # before the last save the actor's log-probs are checked; then there is an evaluation
    names = ["engine sleeps", *step, *step, "forward False", *step[:4]]

    assert [name for name, _ in events] == names
    held = {name: [x for other, x in events if other == name] for name in step}
    print(held)  # in float32 copies of the actor; the engine's copy is bfloat16
    most = {"sync": 1.6, "cache wakes": 0.6, "engine sleeps": 0.1, "score": 2, "forward False": 1.2}
    assert all(max(held[name]) < x for name, x in most.items()), held
    assert min(held["forward True"]) > 3, held


def test_adapters_take_the_memory_that_the_reference_says():
    """A weight that trains has 12 bytes with its moments, a frozen one 2 in bfloat16; the engine,
    and a reference of its own, have 2 for each of the actor's."""
    found = of_device(1, "ways_to_run_ppo")
    held = {}
    expected = {}
    for way, (n, actor, critic, adapters) in found.items():
        held[way] = n
        engine = 2 * actor
        expected[way] = {
            "all weights": 12 * actor + 2 * actor + engine + 12 * critic,
            "a head on the actor's": 12 * actor + 2 * actor + engine,
            "adapters": 2 * actor + engine + 2 * critic + 12 * adapters,
            "adapters on one base": 2 * actor + engine + 12 * adapters,
        }[way]
        print(f"{way}: {n / actor:.2f} bytes a weight of the actor")
    assert held == pytest.approx(expected, rel=0.01)


RUNS = [(n, part.__name__) for n, parts in PARTS.items() for part in parts]


@pytest.mark.parametrize("ranks, name", RUNS)
def test_a_run_on_the_device(ranks, name):
    """Runs the function of this name above, a whole run of a script."""
    of_device(ranks, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or NAMES[common.WORLD_SIZE]:
        on_the_device(pathlib.Path(sys.argv[1]), name)
        end_groups()
