"""critic_megatron.py, and what both critics share, on several ranks. Each scenario asserts by
itself; test_scenarios.py waits for it.

They share a folder: for example, four ranks resume a checkpoint of two ranks."""

import dataclasses
import functools
import itertools
import json
import math

import helpers
import torch
import torch.distributed as dist
import transformers
from forked import scenario
from helpers import assert_rows_come_back, full_tensor, mine, of_critic, random_batch, refused
from megatron_helpers import computed, whole_of
from reference import check_export, difference
from safetensors.torch import load_file, save_file

import common
import critic_fsdp
import critic_megatron as cm

TP, PP, EP, CP = (
    f"{x}_parallel_size" for x in ("tensor_model", "pipeline_model", "expert_model", "context")
)
ETP = "expert_tensor_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
FOUR_LAYERS = {"override_config": '{"num_hidden_layers": 4}'}
FROZEN = {"gradient_checkpointing": True, "freeze_modules": "embed|self_attn|gate_|up_"}
WINDOW = {"override_config": '{"num_hidden_layers": 4, "sliding_window": 8}'}
MOE = {"model": "tiny-qwen3-moe"}
FOLDERS = {  # models without a preset, saved in models/ -> changes to tiny-qwen2
    "mixtral": {"num_local_experts": 4},
    "qwen2-moe": {
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "phi3": {"sliding_window": 8},
    "glm4-moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "use_qk_norm": True,
    },
    "gpt-oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}
CORRECTION = "layers.1.mlp.gate.e_score_correction_bias"  # of GLM's router
BFLOAT16 = {"param_dtype": "bfloat16"}
NOISE = {**FOUR_LAYERS, "value_weights": "noise"}
HL_GAUSS = {**helpers.BINS, "value_range": (-3.0, 3.0)}
BOUNDED = {"value_head": "bounded", "value_range": (-3.0, 3.0)}
LR = 1e-3
STEPS = 12  # of the whole schedule; every learning rate depends on it
SCHEDULE = {
    "lr": LR,
    "lr_scheduler_type": "cosine",
    "lr_warmup_steps": 3,
    "ppo_mini_batch_size": 16,
}


def make(**fields):
    """A worker of critic_fsdp.py if the fields have a strategy, else of critic_megatron.py."""
    return helpers.worker(STEPS, critic_fsdp if "strategy" in fields else cm, **fields)


def rows(seed, n=16):
    return mine(random_batch(n, seed))


def state_of(worker):
    """All that a step changes, whole: float32 weights, moments, and weights as the forward uses
    them (a collective)."""
    parts = wholes(worker)
    if isinstance(worker, cm.CriticWorker):
        parts["computed"] = computed(worker)
    return {f"{kind} {n}": x for kind, whole in parts.items() for n, x in whole.items()}


def wholes(worker):
    """kind -> name -> whole tensor, of float32 weights and moments, on any layout (a
    collective)."""
    if isinstance(worker, cm.CriticWorker):

        def part(adam, p, kind):
            return p if kind == "weight" else adam.state[p].get(kind, torch.zeros_like(p))

        return {kind: whole_of(worker, functools.partial(part, kind=kind)) for kind in cm.STATE}
    tensors, _, optimizer = critic_fsdp.checkpoint_tensors(
        worker.critic.model, worker.critic.optimizer
    )
    found = {}
    for kind, form in cm.STATE.items():
        trained = [n for n, state in optimizer["state"].items() if state]
        found[kind] = {n: full_tensor(tensors[form.format(n)]).detach().clone() for n in trained}
    return found


def assert_same(ours, theirs, what):
    """Asserts that two dicts of tensors are equal, bit for bit."""
    assert ours.keys() == theirs.keys(), what
    other = [n for n, x in ours.items() if not torch.equal(x, theirs[n])]
    assert not other, (what, other)


def counters(worker):
    return [worker.critic.updates, worker.critic.optimizer_steps, worker.critic.learning_rate()]


FSDP2 = {"strategy": "fsdp2"}
FSDP = {name: {"strategy": name} for name in ("fsdp2", "fsdp1", "none")}
FSDP["ulysses"] = {**FSDP2, "ulysses_size": 2}
SAVED = {  # name -> model, ranks and layout that save it, {ranks: Megatron layouts that resume it}
    "llama": ({"model": "tiny-llama", **NOISE}, 1, {"strategy": "none"}, {2: [{PP: 2, VPP: 2}]}),
    "qwen3, hl_gauss": ({"model": "tiny-qwen3", **HL_GAUSS}, 1, FSDP2, {2: [{TP: 2}, {CP: 2}]}),
    "qwen2, bounded": (BOUNDED, 2, FSDP2, {2: [{TP: 2}, {PP: 2}]}),
    "qwen2, fsdp1": ({}, 2, {"strategy": "fsdp1"}, {2: [{PP: 2}]}),
    "frozen": ({**FOUR_LAYERS, **FROZEN}, 2, FSDP2, {2: [{TP: 2}, {PP: 2}]}),
    "frozen router": ({**MOE, "freeze_modules": r"mlp\.gate\."}, 2, FSDP2, {2: [{EP: 2}]}),
    "mixtral": ({"model": "models/mixtral"}, 2, FSDP2, {2: [{EP: 2}]}),
    "qwen2-moe": ({"model": "models/qwen2-moe"}, 2, FSDP2, {2: [{TP: 2}]}),
    "phi3": ({"model": "models/phi3"}, 2, FSDP2, {2: [{TP: 2}]}),
    "glm4-moe": ({"model": "models/glm4-moe"}, 2, FSDP2, {2: [{PP: 2}]}),
    "gpt-oss": ({"model": "models/gpt-oss"}, 2, FSDP2, {2: [{EP: 2}]}),
    "dense": (FOUR_LAYERS, 2, {TP: 2}, {2: [{TP: 2}, {PP: 2}, {PP: 2, VPP: 2}], 4: [{}]}),
    "moe": (MOE, 2, {EP: 2}, {1: [{}], 2: [{EP: 2}, {TP: 2}], 4: [{EP: 4}]}),
    "dense, bfloat16": (BFLOAT16, 2, {TP: 2}, {2: [{TP: 2}, {}]}),
    "moe, bfloat16": ({**BFLOAT16, **MOE}, 2, {EP: 2}, {1: [{}], 2: [{EP: 2}]}),
    **{name: ({"ppo_max_token_len_per_gpu": 100}, 2, layout, {}) for name, layout in FSDP.items()},
}


@scenario(ranks=(1, 2))
def begin(folder):
    """An update of one step, one of two, a checkpoint, two more updates; stores the results."""
    torch.manual_seed(0)
    for name, fields in FOLDERS.items() if common.WORLD_SIZE == 1 else ():
        fields = (
            common.tiny_config("tiny-qwen2", 99) | {"model_type": name.replace("-", "_")} | fields
        )
        config = transformers.AutoConfig.for_model(**fields)
        model = transformers.AutoModel.from_config(config)
        for other, x in model.named_buffers():
            if other == CORRECTION:
                x.normal_(0, 0.3)
        model.save_pretrained(f"models/{name}")

    for name, (fields, ranks, layout, _) in SAVED.items():
        if ranks != common.WORLD_SIZE:
            continue
        helpers.end_groups()
        worker = make(**SCHEDULE, **fields, **layout)
        assert len(worker.compute_values(rows(0).select([]))) == 0
        worker.update_critic(rows(0))
        worker.update_critic(rows(1, 24))
        worker.save_checkpoint(folder / name)
        result = {"then": wholes(worker), "counters": counters(worker)}
        result |= {"metrics": two_updates(worker), "after": wholes(worker)}
        assert result["counters"][:2] == [2, 3] and counters(worker)[:2] == [4, 5]
        for kind, whole in result["then"].items():  # keys' bias has no gradient
            assert all(x.any() or "k_proj.bias" in n for n, x in whole.items()), (name, kind)
        if common.RANK == 0:
            torch.save(result, folder / f"{name}.pt")


EXPORTS = {  # ranks -> folder -> Config fields; the 99 token ids do not divide evenly over 2 ranks
    2: {
        "mixtral": {EP: 2, "model": "models/mixtral"},
        "qwen2-moe": {EP: 2, "model": "models/qwen2-moe"},
        "phi3": {TP: 2, "model": "models/phi3"},
        "glm4-moe": {EP: 2, "model": "models/glm4-moe"},
        "gpt-oss": {EP: 2, "model": "models/gpt-oss"},
        "tied": {TP: 2, "override_config": '{"tie_word_embeddings": true}'},
        "hl_gauss": {PP: 2, **HL_GAUSS},
    },
    4: {
        "tp 2 pp 2": {TP: 2, PP: 2, "model": "tiny-mistral", **WINDOW},
        "gpt-oss on 4": {TP: 2, EP: 2, ETP: 1, "model": "models/gpt-oss"},
    },
}


@scenario(ranks=(2, 4), needs=("begin on 1",))
def export(folder):
    """Plain transformers loads a trained model's Hugging Face folder and computes the same
    values."""
    for name, fields in EXPORTS[common.WORLD_SIZE].items():
        worker = make(lr=1e-2, **fields)
        worker.update_critic(rows(0))
        batch = random_batch(8, 5)
        values = common.compute_together(worker, batch)
        worker.export_hf(folder / "hf" / name)
        if common.RANK == 0:
            torch.save(values, folder / f"values of {name}.pt")
            head = (name, worker.config.value_range)
            model = check_export(folder / "hf" / name, batch, values, *head, rtol=1e-5)
            assert len(model.get_input_embeddings().weight) == model.config.vocab_size == 99


@scenario(ranks=(1, 2), needs=("export on",))
def exports_load_elsewhere(folder):
    """Exports work as --model of this critic on other layouts, and of critic_fsdp.py on one
    rank."""
    names = ["mixtral", "phi3", "glm4-moe", "tp 2 pp 2"]
    layouts = [{TP: 2}]
    if common.WORLD_SIZE == 1:
        names = [name for some in EXPORTS.values() for name in some]
        layouts = [FSDP2, {}]  # in this order, because Megatron's CUDA replacements stay
    for layout, name in itertools.product(layouts, names):
        head = HL_GAUSS if name == "hl_gauss" else {}
        worker = make(model=str(folder / "hf" / name), **head, **layout)
        worker.set_budget(40, "the longest row")
        values = common.compute_together(worker, random_batch(8, 5))
        torch.testing.assert_close(
            values, torch.load(folder / f"values of {name}.pt"), rtol=1e-5, atol=1e-5
        )


def two_updates(worker, move=lambda: None):
    """Metrics of two updates. move() runs before each."""
    found = []
    for seed in (2, 3):
        move()
        found.append(of_critic(worker.update_critic(rows(seed))))
    return found


def resume(folder, name, layout, path):
    """(worker that loaded a checkpoint, stored results). State and counters are the same, bit for
    bit."""
    helpers.end_groups()
    fields, *_ = SAVED[name]
    expected = torch.load(folder / f"{name}.pt")
    worker = make(**SCHEDULE, **fields, **layout)
    worker.update_critic(rows(9))  # loading must replace all of this
    worker.compute_values(rows(9))  # and free the gathered weights
    worker.load_checkpoint(str(folder / path))
    for kind, whole in wholes(worker).items():
        assert_same(whole, expected["then"][kind], (name, layout, kind))
    assert counters(worker) == expected["counters"], (name, layout)
    if "param_dtype" in fields:  # forwards use the float32 weights, rounded, except for the head
        weights = expected["then"]["weight"]
        rounded = {n: x if "score" in n else x.bfloat16().float() for n, x in weights.items()}
        assert_same(computed(worker), rounded, (name, layout))
    return worker, expected


def starts_from_the_weights(folder, path, layout, expected, name=None):
    """With a checkpoint as its --model, a worker loads only the weights."""
    fields, *_ = SAVED[name or path]
    warm = make(**SCHEDULE, **fields | {"model": str(folder / path)}, **layout)
    assert_same(wholes(warm)["weight"], expected["then"]["weight"], (path, layout))
    assert counters(warm)[:2] == [0, 0]


def go_on(worker, expected, what, exact):
    """Two more updates, each after offloading, give the same results, bit for bit or up to
    rounding."""
    metrics = two_updates(worker, lambda: (worker.offload(), worker.onload()))
    after = wholes(worker)
    if not exact:
        return agree(metrics, after, expected, what)
    assert metrics == expected["metrics"], what
    for kind, whole in after.items():
        assert_same(whole, expected["after"][kind], (what, kind, "after"))


@scenario(ranks=(2, 4, 1), needs=("begin",))
def megatron_goes_on(folder):
    """Resumes all of SAVED on every layout of this number of ranks, bit for bit on the original
    layout."""
    for name, (fields, ranks, home, layouts) in SAVED.items():
        for i, layout in enumerate(layouts.get(common.WORLD_SIZE, ())):
            worker, expected = resume(folder, name, layout, name)
            if i == 0:
                starts_from_the_weights(folder, name, layout, expected)
            if "strategy" in home:  # for fsdp_takes_back
                worker.save_checkpoint(folder / f"{name}, {i}")
            exact = (ranks, home) == (common.WORLD_SIZE, layout)
            if exact or "param_dtype" not in fields:
                go_on(worker, expected, (name, layout), exact)
                state = [
                    x["step"] for o in worker.critic.optimizers for x in o.optimizer.state.values()
                ]
                assert set(map(float, state)) == {5.0}, (name, layout)


@scenario(ranks=(2, 1), needs=("megatron_goes_on on 2",))
def fsdp_takes_back(folder):
    """critic_fsdp.py continues from checkpoints of critic_megatron.py. On the original number of
    ranks the results are those of a run without the detour, bit for bit."""
    for name, (_, ranks, home, layouts) in SAVED.items():
        if "strategy" not in home:
            continue
        exact = ranks == common.WORLD_SIZE
        for i, _ in enumerate(layouts.get(2, ())[: None if exact else 1]):
            worker, expected = resume(folder, name, home, f"{name}, {i}")
            if i == 0:
                starts_from_the_weights(folder, f"{name}, {i}", home, expected, name)
            go_on(worker, expected, (name, i), exact)


@scenario(ranks=(2, 4, 1), needs=("begin",))
def fsdp_goes_on(folder):
    """critic_fsdp.py resumes its own checkpoints of two ranks on every layout of this number of
    ranks: on the same layout bit for bit, also with offloading or recomputing."""
    fitting = [
        layout for layout in FSDP.values() if common.WORLD_SIZE % layout.get("ulysses_size", 1) == 0
    ]
    runs = [("fsdp1", layout, False) for layout in fitting]  # saved layout, new layout, exact
    if common.WORLD_SIZE == 4:
        runs.append(("fsdp1", {**FSDP2, "fsdp_size": 2}, False))
    elif common.WORLD_SIZE == 2:
        on_host = {"gradient_checkpointing": True, "activation_offload": True}
        runs += [(saved, FSDP2, False) for saved in ("none", "ulysses")]
        runs += [(saved, layout, True) for saved, layout in FSDP.items()]
        runs += [(saved, {**FSDP[saved], **on_host}, True) for saved in ("fsdp2", "fsdp1")]
        runs.append(("fsdp2", {**FSDP2, "offload_policy": True}, True))
    for saved, layout, exact in runs:
        worker, expected = resume(folder, saved, layout, saved)
        go_on(worker, expected, (saved, layout), exact)


def agree(metrics, after, expected, what):
    """Metrics agree to 1e-5, weights as far as AdamW lets them.

    AdamW divides a gradient by its size over time. Layouts differ by rounding, 1e-6 of a tensor's
    largest gradient. Where a gradient is at least 1e-3 of that, each of 2 steps differs by at most
    1e-3 of the rate.
    Where it is almost 0, AdamW divides rounding errors by each other: a step is at most the rate,
    up or down."""
    for ours, theirs in zip(metrics, expected["metrics"], strict=True):
        for key, x in theirs.items():
            assert math.isclose(ours[key], x, rel_tol=1e-5, abs_tol=1e-6), (what, key, ours[key], x)
    error = difference(after["exp_avg"], expected["after"]["exp_avg"])
    assert error < 1e-5, (what, error)
    some = count = 0
    for name, x in after["weight"].items():
        error = (x - expected["after"]["weight"][name]).abs()
        size = expected["after"]["exp_avg_sq"][name].sqrt()
        sizeable = size > 1e-3 * size.max()
        assert (error * sizeable).max() < 2 * LR * 1e-3 and error.max() < 2 * 2 * LR, (what, name)
        some += int(sizeable.sum())
        count += sizeable.numel()
    assert some > 0.8 * count, (what, some / count)


@scenario(ranks=2, needs=("begin",))
def a_checkpoint_that_is_saved_again_is_the_same(folder):
    """Also if it is saved right after loading, and if no step was taken at all."""
    name = "moe, bfloat16"
    worker, _ = resume(folder, name, {EP: 2}, name)
    worker.save_checkpoint(folder / "again")
    other, expected = resume(folder, name, {EP: 2}, "again")
    go_on(other, expected, name, exact=True)
    fresh = make(**SCHEDULE, **BFLOAT16, **MOE, **{EP: 2})
    fresh.save_checkpoint(folder / "fresh")
    other.load_checkpoint(str(folder / "fresh"))  # its moments are replaced by none
    assert of_critic(other.update_critic(rows(0))) == of_critic(fresh.update_critic(rows(0)))
    assert_same(state_of(other), state_of(fresh), name)


@scenario(ranks=1, fresh=True)
def saves_copy_little(folder):
    """On a CPU, where the shard is on the host. For a device see test_device.py."""
    for script in (critic_fsdp, cm):
        worker = helpers.worker(script=script, **helpers.LARGE)
        worker.set_budget(max(random_batch(4).lengths), "the longest row")
        worker.update_critic(random_batch(4))
        helpers.check_saves(worker, folder)


@scenario(ranks=2)
def damage_is_refused(folder):
    """Both critics refuse checkpoints of another model, and damage that the manifest does not
    show."""
    path = folder / "damaged"
    here = (make(**MOE, **{EP: 2}), make(**MOE, **FSDP2))
    for writer in here:
        writer.save_checkpoint(path)
        files = {x.name: x.read_bytes() for x in path.iterdir()}
        for name, (changes, *words) in damages(files, folder / f"part {common.RANK}").items():
            dist.barrier()
            if common.RANK == 0:
                for file, content in {**files, **changes}.items():
                    (path / file).write_bytes(content)
                    if not content:
                        (path / file).unlink()
                if name != "other bytes":
                    helpers.write_manifest(path)
            dist.barrier()
            for worker, some in zip(here, words * (3 - len(words)), strict=True):
                with refused(some, f"--resume {path}: "):
                    worker.load_checkpoint(str(path))


def damages(files, scratch):
    """name -> (changed files, words of Megatron's and FSDP's errors, or of both). Empty files are
    removed."""
    shard = "shard-00001-exp_avg.safetensors"  # of Megatron
    if shard not in files:
        _, shard = sorted(name for name in files if name.startswith("shard-"))
    content = files[shard]
    scratch.write_bytes(content)
    with helpers.safe_open(scratch, "pt") as whole:
        metadata = whole.metadata()
    tensors = load_file(scratch)
    del tensors["optimizer.model.layers.1.mlp.experts.gate_up_proj.exp_avg"]
    save_file(tensors, scratch, metadata=metadata)
    note = json.loads(files["trainer.json"])

    def shape(**fields):
        return {"trainer.json": json.dumps({**note, "shape": {**note["shape"], **fields}}).encode()}

    return {
        "other bytes": ({shard: content[:-9] + bytes(9 * [7])}, f"{shard} is missing or changed"),
        "no shard": ({shard: b""}, "weights do not fit, e.g. ", "does not fit this critic"),
        "half a shard": ({shard: content[:9000]}, "do not load (", "does not fit"),
        "some experts lack a moment": ({shard: scratch.read_bytes()}, "fit, e.g. ", "does not fit"),
        "no JSON": ({"trainer.json": b"{"}, "not a checkpoint of this script (JSONDecodeError"),
        "no shape": ({"trainer.json": b"{}"}, "not a checkpoint of this script (KeyError"),
        "other model": (shape(hidden_size=128), "another model: hidden_size 128 there, 64 here"),
    }


@scenario(ranks=2, needs=("begin on 1",))
def the_correction_of_a_router_is_kept(folder):
    """Updates do not change it, bfloat16 does not round it, and checkpoints of both critics have
    it."""
    correction = load_file("models/glm4-moe/model.safetensors")[CORRECTION]
    glm = {"model": "models/glm4-moe"}
    for i, (first, second) in enumerate([({EP: 2}, FSDP2), (FSDP2, {PP: 2})]):
        writer = make(**glm, **BFLOAT16, **first)
        writer.update_critic(rows(0))
        writer.save_checkpoint(folder / f"correction {i}")

        reader = make(**glm, **second)
        for name, x in [*reader.critic.model.named_buffers()]:
            if name.endswith(("expert_bias", CORRECTION)):
                x.zero_()
        reader.load_checkpoint(str(folder / f"correction {i}"))
        for worker in (writer, reader):
            if isinstance(worker, cm.CriticWorker):
                assert torch.equal(computed(worker)[f"model.{CORRECTION}"], correction)
            else:
                buffers = dict(worker.critic.model.named_buffers())
                assert torch.equal(buffers[f"model.{CORRECTION}"], correction)


@scenario(ranks=2)
def offload_changes_nothing(folder):
    """Offloading and onloading between updates, each twice, gives the same weights bit for bit.

    Gradients are not kept, so this fills them with NaN after onload: an update must not read them.
    On a CPU nothing else moves; for a device see test_device.py."""
    for fields in ({TP: 2}, {EP: 2, **BFLOAT16, **MOE}):
        stays = make(**fields)
        expected = [of_critic(stays.update_critic(rows(seed))) for seed in range(3)]
        state = state_of(stays)
        values = stays.compute_values(rows(0))
        moves = make(**fields)
        for seed in range(3):
            assert of_critic(moves.update_critic(rows(seed))) == expected[seed], fields
            moves.offload()
            moves.offload()
            weights = [p for module in moves.critic.modules for p in module.parameters()]
            assert all(p.main_grad.untyped_storage().nbytes() == 0 for p in weights)
            for method in (moves.compute_values, moves.update_critic):
                with refused("is offloaded", kind=RuntimeError):
                    method(rows(0))
            moves.onload()
            moves.onload()
            buffers = [b for c in moves.critic.model for b in c.buffers + c.expert_parallel_buffers]
            for buffer in buffers:
                buffer.grad_data.fill_(math.nan)
        assert torch.equal(moves.compute_values(rows(0)), values), fields
        assert_same(state_of(moves), state, fields)


@scenario(ranks=(1, 2))
def an_automatic_budget_fills_the_memory(folder):
    """On one rank with frozen weights; on two stages, of which the first holds two
    micro-batches."""
    layout = {1: {"freeze_modules": "mlp"}, 2: {PP: 2}}[common.WORLD_SIZE]
    auto = make(ppo_max_token_len_per_gpu="auto:0.03", **layout)
    metrics = auto.update_critic(rows(3))
    expected = make(ppo_max_token_len_per_gpu=64, **layout).update_critic(rows(3))
    for name, x in of_critic(expected).items():
        assert math.isclose(metrics[name], x, rel_tol=1e-6), (name, x)
    full = common.concat([common.Batch.blank(40)] * (auto.critic.max_tokens // 40))
    micro = lambda: auto.critic.micro_batch(full)
    auto.critic.forward_backward_all([micro()])  # creates what stays allocated
    peak = helpers.peak_bytes(lambda: auto.critic.forward_backward_all([micro()] * 4))
    weights = (
        (16.0 if p.requires_grad else 4.0) * p.numel() for p in auto.critic.modules[0].parameters()
    )
    # weights; of trained ones also gradients and both moments
    held = torch.tensor(peak + sum(weights))
    dist.all_reduce(held, dist.ReduceOp.MAX)
    assert 0.8 < held / (0.03 * 2**30) < 0.92, held


@scenario(ranks=(1, 2))
def what_is_not_finite_skips_the_step(folder):
    """If a return is NaN, the loss overflows, or one number of a gradient is not finite on one
    rank, no rank steps and the schedule does not advance. The next mini-batch is unaffected by the
    one before."""
    layouts = {"dp": {}, **FSDP, "tp 2": {TP: 2}, "pp 2": {PP: 2}, "ep 2": {EP: 2, **MOE}}
    for name in [*layouts][: 4 if common.WORLD_SIZE == 1 else None]:  # the others need two ranks
        options = {**SCHEDULE, "ppo_mini_batch_size": 8, "shuffle": False, **layouts[name]}
        worker, clean = make(**options), make(**options)
        whole = random_batch(16, 1, idle=False)
        for one in (worker, clean):  # so that there are moments
            one.update_critic(mine(whole.select(range(8))))
        before = state_of(worker)
        spoilt = dataclasses.replace(whole, returns=whole.returns.clone())
        last = spoilt.token_index([3])[-1]  # an action of rank 1
        faults = [("gradient", math.inf), ("gradient", math.nan)] * (name not in FSDP)
        faults = [("return", 1e30), *faults, ("return", math.nan)]
        for updates, (where, number) in enumerate(faults, 1):
            what = (name, where, number)
            # the square of 1e30 is infinite
            spoilt.returns[last] = number if where == "return" else 0.0
            if where == "gradient":
                worker.critic.run_schedule = spoiling_schedule(worker.critic, number)
            metrics = worker.update_critic(mine(spoilt.select(range(8))))
            vars(worker.critic).pop("run_schedule", None)
            assert metrics["critic/skipped_steps"] == 1, what
            assert math.isnan(metrics["critic/grad_norm"]) and math.isnan(
                metrics["critic/vf_loss"]
            ), what
            assert counters(worker)[:2] == [1 + updates, 1], what
            assert_same(state_of(worker), before, what)
        metrics = worker.update_critic(mine(spoilt))
        assert metrics["critic/skipped_steps"] == 1 and counters(worker)[1] == 2, name
        expected = clean.update_critic(mine(whole.select(range(8, 16))))
        for key in ("critic/vf_loss", "critic/grad_norm", "critic/lr"):
            assert metrics[key] == expected[key], (name, key)
        assert_same(state_of(worker), state_of(clean), name)
        # now the second mini-batch is bad, and the rate that of the first
        spoilt.row_id = 15 - spoilt.row_id
        assert worker.update_critic(mine(spoilt))["critic/lr"] == LR, name


def spoiling_schedule(critic, number):
    """Writes the number into a gradient that only the last rank has, that of its last expert or
    MLP."""
    schedule = critic.run_schedule

    def spoiling(*args):
        kept = schedule(*args)
        if common.RANK == common.WORLD_SIZE - 1:
            matrices = [p for p in critic.modules[-1].decoder.layers.parameters() if p.ndim == 2]
            p, place = [(p, critic.masters[p][2]) for p in matrices if p in critic.masters][-1]
            p.main_grad.view(-1)[place.start] = number
        return kept

    return spoiling


@scenario(ranks=2)
def a_padding_token_may_count_from_the_end(folder):
    """As in transformers, -1 is the last row of the embedding, which rank 1 holds. It does not
    train, although a row begins with it."""
    batch = rows(0)
    batch.input_ids[0] = 98
    for pad in (-1, 98, 97):
        options = {"override_config": json.dumps({"pad_token_id": pad}), "weight_decay": 0.0}
        worker = make(**options, **{TP: 2})
        embedding = lambda worker=worker: computed(worker)["model.embed_tokens.weight"][98]
        before = embedding()
        worker.update_critic(batch)
        assert torch.equal(embedding(), before) == (pad != 97), pad


@scenario(ranks=2)
def sizes_that_do_not_divide_are_named(folder):
    """Errors are Megatron's own words, in one line that begins with the flag."""
    for changes, fields, words in (
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, {TP: 2}, "num_attention_heads (3)"),
        ({"intermediate_size": 33}, {TP: 2}, "33 is not divisible by 2"),
        ({"num_hidden_layers": 3}, {PP: 2}, "num_layers should be divisible"),
        ({"num_hidden_layers": 6}, {PP: 2, VPP: 2}, "should be divisible by vp_size 2"),
        ({}, {EP: 2}, "num_moe_experts must be"),
        ({"num_experts": 3}, {EP: 2, **MOE}, "MoELayer"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, MOE, "topk is 1"),
    ):
        fields = {**fields, "override_config": json.dumps(changes)}
        with refused(words, "--model tiny-"):
            make(**fields)

    for pattern, words in {
        "q_proj": "all or none of",
        "lm_head": "some of the",
        ".": "not all of",
    }.items():
        with refused(words, f"--freeze-modules {pattern}"):
            make(freeze_modules=pattern)


@scenario(ranks=2)
def bfloat16_keeps_master_weights(folder):
    """Head and master weights are float32, exactly as drawn, and sum up steps too small for
    bfloat16. Values, losses and gradients are those of float32 up to rounding."""
    for fields in ({TP: 2}, {EP: 2, **MOE}, {PP: 2, VPP: 2, **FOUR_LAYERS}):
        half, full = make(lr=1e-6, **BFLOAT16, **fields), make(lr=1e-6, **fields)
        start = wholes(half)["weight"]
        assert_same(start, wholes(full)["weight"], fields)
        assert any(not torch.equal(x, x.bfloat16().float()) for x in start.values())
        ours, theirs = (common.compute_together(w, random_batch(16)) for w in (half, full))
        error = float((ours - theirs).norm() / theirs.norm())
        assert 1e-6 < error < 0.05, (fields, error)

        before = computed(half)
        heads = [{n: x for n, x in w.items() if "score" in n} for w in (before, computed(full))]
        assert_same(*heads, fields)
        for seed in range(5):
            ours, theirs = (w.update_critic(rows(seed)) for w in (half, full))
            assert ours["critic/skipped_steps"] == 0
            for name in ("critic/vf_loss", "critic/grad_norm"):
                assert math.isclose(ours[name], theirs[name], rel_tol=5e-2), (fields, name)

        after, now = wholes(half)["weight"], computed(half)
        body = [n for n in start if "score" not in n]
        moved = torch.cat([(after[n] - start[n]).abs().flatten() for n in body])
        changed = torch.cat([(now[n] != before[n]).flatten() for n in body]).float().mean()
        # embeddings of tokens that do not occur only decay, by a factor of 1 - 1e-8 a step
        assert moved.median() > 1e-6 and changed < 0.1, (fields, moved.median(), changed)
        assert (now["score.weight"] != before["score.weight"]).all(), fields


@scenario(ranks=2)
def rows_come_back_in_the_callers_order(folder):
    for fields in ({}, {TP: 2}, {PP: 2}, FSDP2):
        assert_rows_come_back(make(ppo_max_token_len_per_gpu=100, **fields), random_batch(13))
