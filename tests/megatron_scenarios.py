"""What takes several ranks of critic_megatron.py to try. Each scenario asserts on its own; a line "ok" says it passed.

    python tests/megatron_scenarios.py OUT_FOLDER [NAME...]        by default all

What several scenarios share lies in OUT_FOLDER: a launch on 2 ranks saves what one on 4 resumes.
"""

import dataclasses
import gc
import json
import math
import pathlib
import time

import torch
import torch.distributed as dist

TP, PP, EP = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "expert_model"))
VPP, CP = "virtual_pipeline_model_parallel_size", "context_parallel_size"
FOUR_LAYERS = {"override_config": '{"num_hidden_layers": 4}'}
SCHEDULE = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 3, "total_training_steps": 12}
MOE, LR = {"model": "tiny-qwen3-moe"}, 1e-3
HL_GAUSS = {"value_head": "hl_gauss", "value_bins": 11, "value_range": (-3.0, 3.0)}


def make(model="tiny-qwen2", **fields):
    """A worker on some layout."""
    return build(model, **fields)


def mine(batch):
    """This rank's rows."""
    return batch.select(range(common.RANK, len(batch), common.WORLD_SIZE))


def rows(seed, n=16):
    """This rank's rows of a random batch."""
    return mine(random_batch(n, seed))


def shards(worker):
    """Copies of all that a step changes, as this rank holds it: weights, master weights, both moments, the steps."""
    critic = worker.critic
    critic.finish_gather()
    out = {f"{i} {n}": p for i, module in enumerate(critic.modules) for n, p in module.named_parameters()}
    for i, optimizer in enumerate(critic.optimizers()):
        for j, p in enumerate(optimizer.get_parameters()):
            out |= {f"{i} {j} {kind}": x for kind, x in optimizer.optimizer.state[p].items()} | {f"{i} {j} master": p}
    return {name: x.detach().clone() for name, x in out.items()}


def wholes(worker):
    """The same as whole tensors, of any layout the same: kind -> name -> tensor (a collective)."""
    moment = lambda kind: lambda optimizer, p: optimizer.state[p][kind]
    kinds = {"master": lambda _, p: p, "exp_avg": moment("exp_avg"), "exp_avg_sq": moment("exp_avg_sq")}
    return {kind: whole_of(worker.critic, part) for kind, part in kinds.items()}


def assert_same(ours, theirs, what):
    """Two dicts of tensors are equal, bit for bit."""
    assert ours.keys() == theirs.keys(), what
    assert not (other := [n for n, x in ours.items() if not torch.equal(x, theirs[n])]), (what, other)


def assert_refused(fault, kind, function, *args):
    """function(*args) raises an error of this kind and one line, which has the fault in it."""
    try:
        function(*args)
    except kind as error:
        assert fault in str(error) and "\n" not in str(error), str(error)
    else:
        raise AssertionError(f"went unnoticed: {fault}")


def counters(worker):
    critic = worker.critic
    return [critic.updates, critic.optimizer_steps, critic.learning_rate()]


def of_critic(metrics):
    return {name: x for name, x in metrics.items() if name.startswith("critic/")}


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------

SAVED = {  # what is saved, each on 2 ranks -> and where it goes on: ranks, then layouts
    "dense": ({TP: 2, **FOUR_LAYERS}, {2: [{TP: 2}, {PP: 2}, {PP: 2, VPP: 2}], 4: [{}]}),
    "moe": ({EP: 2, **MOE}, {1: [{}], 2: [{EP: 2}, {TP: 2}], 4: [{EP: 4}]}),
    "dense, bfloat16": ({TP: 2, "param_dtype": "bfloat16"}, {2: [{TP: 2}, {}]}),
    "moe, bfloat16": ({EP: 2, "param_dtype": "bfloat16", **MOE}, {1: [{}], 2: [{EP: 2}]}),
}


def fields_of(name, layout):
    """Config fields of what was saved, on another layout."""
    saved, _ = SAVED[name]
    return {k: x for k, x in saved.items() if "parallel" not in k} | layout


def save_and_go_on(folder):
    """Updates of one step and of two, a checkpoint, two more updates; what they came to lies beside the checkpoint."""
    for name, (fields, _) in SAVED.items():
        worker = make(lr=LR, ppo_mini_batch_size=16, **SCHEDULE, **fields)
        assert len(worker.compute_values(rows(0).select([]))) == 0
        worker.update_critic(rows(0))
        worker.update_critic(rows(1, 24))
        worker.save_checkpoint(folder / name)
        result = {"then": wholes(worker), "counters": counters(worker)}
        result["metrics"] = [of_critic(worker.update_critic(rows(seed))) for seed in (2, 3)]
        result["after"] = wholes(worker)
        assert result["counters"][:2] == [2, 3] and counters(worker)[:2] == [4, 5]
        torch.save(shards(worker), folder / f"{name}.{common.RANK}.pt")
        if common.RANK == 0:
            torch.save(result, folder / f"{name}.pt")


def resume_and_go_on(folder):
    """Goes on from those checkpoints on every layout of so many ranks: the same, on the same layout bit for bit."""
    for name, (saved, layouts) in SAVED.items():
        expected = torch.load(folder / f"{name}.pt")
        for layout in layouts.get(common.WORLD_SIZE, ()):
            fields = fields_of(name, layout)
            exact, half = common.WORLD_SIZE == 2 and fields == saved, "param_dtype" in fields
            worker, what = make(lr=LR, ppo_mini_batch_size=16, **SCHEDULE, **fields), (name, layout)
            worker.update_critic(rows(9))  # must leave nothing behind
            worker.load_checkpoint(folder / name)
            for kind, whole in wholes(worker).items():
                assert_same(whole, expected["then"][kind], (*what, kind))
            if half:  # what computes is the master rounded
                masters = union(dict(cm.whole_weights(worker.critic.modules, worker.vocab_size)))
                rounded = {n: x if n.startswith("score") else x.bfloat16().float() for n, x in
                           expected["then"]["master"].items()}  # fmt: skip
                assert_same(masters, rounded, what)
            assert counters(worker) == expected["counters"], what
            steps = [s["step"] for o in worker.critic.optimizers() for s in o.optimizer.state.values()]
            assert len({x.data_ptr() for x in steps}) == len(steps) and set(map(float, steps)) == {3.0}, what
            metrics = [of_critic(worker.update_critic(rows(seed))) for seed in (2, 3)]
            assert {float(s["step"]) for o in worker.critic.optimizers() for s in o.optimizer.state.values()} == {5.0}
            if exact:
                assert metrics == expected["metrics"], what
                assert_same(shards(worker), torch.load(folder / f"{name}.{common.RANK}.pt"), what)
            elif not half:
                agree(metrics, wholes(worker), expected, what)


def agree(metrics, after, expected, what):
    """Metrics to 1e-5, weights as close as AdamW lets them be.

    It divides a gradient by its size over time. Layouts differ by rounding, 1e-6 of a tensor's largest gradient. Where
    a gradient is at least 1e-3 of that, each of 2 steps differs by 1e-3 of the rate at most; where it is next to
    nothing AdamW divides rounding by rounding, and a step is at most of the rate's size either way.
    """
    for ours, theirs in zip(metrics, expected["metrics"], strict=True):
        for key in theirs:
            assert math.isclose(ours[key], theirs[key], rel_tol=1e-5, abs_tol=1e-6), (what, key, ours[key], theirs[key])
    some = count = 0
    worst = [0.0, 0.0]
    for name, x in after["master"].items():
        error, size = (x - expected["after"]["master"][name]).abs(), expected["after"]["exp_avg_sq"][name].sqrt()
        sizeable = size > 1e-3 * size.max()
        worst[0], worst[1] = max(worst[0], float(error[sizeable].max())), max(worst[1], float(error.max()))
        some, count = some + int(sizeable.sum()), count + sizeable.numel()
    assert worst[0] < 2 * LR * 1e-3 and worst[1] < 2 * 2 * LR and some > 0.8 * count, (what, worst, some / count)


def resume_in_two_stages(folder):
    """A checkpoint that was loaded and saved at once, before any step, is the same checkpoint; so is one of no step."""
    for name in ("moe, bfloat16",):
        expected = torch.load(folder / f"{name}.pt")
        fields = {"ppo_mini_batch_size": 16, **SCHEDULE, **SAVED[name][0]}
        worker = make(lr=LR, **fields)
        worker.load_checkpoint(folder / name)
        worker.save_checkpoint(folder / "again")
        other = make(lr=LR, **fields)
        other.load_checkpoint(folder / "again")
        for kind, whole in wholes(other).items():
            assert_same(whole, expected["then"][kind], (name, kind))
        assert counters(other) == expected["counters"]
        assert of_critic(other.update_critic(rows(2))) == expected["metrics"][0]
        fresh = make(lr=LR, **fields)
        fresh.save_checkpoint(folder / "fresh")
        other.load_checkpoint(folder / "fresh")  # its moments are forgotten
        assert of_critic(other.update_critic(rows(0))) == of_critic(fresh.update_critic(rows(0)))
        assert_same(shards(other), shards(fresh), name)


def damage_is_refused(folder):
    """A checkpoint that is damaged or not of this model ends in a line that names it, on either critic."""
    from safetensors.torch import load_file, save_file

    path, notes = folder / "damaged", {}
    here = {"megatron": make(**MOE, **{EP: 2}), "fsdp": make_fsdp(**MOE)}
    before = {}
    for name, worker in here.items():
        worker.save_checkpoint(path)
        before[name] = {x.name: x.read_bytes() for x in path.iterdir()}
        notes[name] = json.loads(before[name]["trainer.json"])
    shards = {name: [file for file in sorted(files) if file.startswith("shard-")] for name, files in before.items()}
    assert [len(files) for files in shards.values()] == [2, 2]

    def without(there, lost):
        """The second shard without a tensor."""
        file, some = shards[there][1], folder / f"some {common.RANK}"
        some.write_bytes(before[there][file])
        tensors = load_file(some)
        del tensors[lost]
        with cm.safe_open(some, "pt") as whole:
            metadata = whole.metadata()
        save_file(tensors, some, metadata=metadata)
        return {file: some.read_bytes()}

    def trainer(there, **changes):
        return {"trainer.json": json.dumps({**notes[there], **changes}).encode()}

    with_flag = lambda there, **flags: trainer(there, config={**notes[there]["config"], **flags})
    for there, (_, shard) in shards.items():
        content, gate_up = before[there][shard], "optimizer.model.layers.1.mlp.experts.gate_up_proj.exp_avg"
        cases = {  # files changed (None: removed), whether the manifest knows, what the line says
            "missing shard": ({shard: None}, False, f"{shard} is missing"),
            "truncated shard": ({shard: content[:-9]}, False, f"{shard} has "),
            "other bytes": ({shard: content[:-9] + bytes(9 * [7])}, False, f"{shard} is not what was written"),
            "no manifest": ({"manifest.json": None}, False, "no complete checkpoint"),
            "missing shard, noted": ({shard: None}, True, ("weights do not fit, e.g. ", "does not fit this critic")),
            "truncated shard, noted": ({shard: content[: len(content) // 2]}, True, ("do not load (", "does not fit")),
            "empty shard, noted": ({shard: b""}, True, ("do not load (", "does not fit")),
            "some experts without a moment": (without(there, gate_up), True, ("fit, e.g. ", "does not fit")),
            "no trainer.json": ({"trainer.json": None}, True, "not a checkpoint of this script"),
            "no counters": ({"trainer.json": b'{"updates": 1}'}, True, "not a checkpoint of this script (KeyError"),
            "other script": (trainer(there, backend="actor"), True, "is of another script (actor, not "),
            "other model": (
                trainer(there, model_config={**notes[there]["model_config"], "hidden_size": 128}), True,
                "is of another model: hidden_size 128 there, 64 here",
            ),
            "adapters": (
                with_flag(there, lora_rank=3), True,
                ("has lora_rank 3, and this script trains all weights; to go on from its weights alone give the hf "
                 "folder of that run as --model", "lora_rank 3 there, 0 here"),
            ),
            "frozen": (with_flag(there, freeze_layers=1), True, ("has freeze_layers 1, and this script trains", None)),
            "other head": (with_flag(there, value_head="hl_gauss"), True, "value_head hl_gauss there, scalar here"),
        }  # fmt: skip
        for name, (changes, noted, fault) in cases.items():
            dist.barrier()
            if common.RANK == 0:
                for file in path.iterdir():
                    file.unlink()
                for file, bytes_ in {**before[there], **changes}.items():
                    if bytes_ is not None:
                        (path / file).write_bytes(bytes_)
                if noted:
                    write_manifest(path)
            dist.barrier()
            for words, worker in zip((fault, fault) if isinstance(fault, str) else fault, here.values(), strict=True):
                try:
                    for part in (words, f"--resume {path}: ") if words else ():
                        assert_refused(part, common.UserError, worker.load_checkpoint, path)
                except BaseException as error:
                    raise AssertionError(f"{name}, saved by {there}: {error}") from error
    assert_refused("model: model_type qwen3_moe there, qwen2 here", common.UserError, make().load_checkpoint, path)


# ---------------------------------------------------------------------------------------------------------------------
# From one critic to the other
# ---------------------------------------------------------------------------------------------------------------------

TO_AND_FRO = {  # ranks of critic_fsdp.py -> name -> (model, its layout there, layouts here, on 2 ranks)
    1: {
        "llama": ({"model": "tiny-llama", **FOUR_LAYERS}, {"strategy": "none"}, [{PP: 2, VPP: 2}]),
        "qwen3, hl_gauss": ({"model": "tiny-qwen3", **HL_GAUSS}, {}, [{TP: 2}]),
    },
    2: {
        "qwen2": ({}, {}, [{TP: 2}, {}]),
        "qwen2, fsdp1": (HL_GAUSS, {"strategy": "fsdp1"}, [{PP: 2}]),
        "mixture": (MOE, {}, [{EP: 2}, {TP: 2}]),
    },
}


def make_fsdp(load=None, **fields):
    """A worker of critic_fsdp.py, from a checkpoint or not."""
    import critic_fsdp

    worker = critic_fsdp.CriticWorker(critic_fsdp.Config(lr=LR, ppo_mini_batch_size=16, **SCHEDULE, **fields))
    worker.init_model()
    if load:
        worker.update_critic(rows(9))  # must leave nothing behind
        worker.load_checkpoint(load)
    return worker


def wholes_of_fsdp(worker):
    """What wholes() gives, of a worker of critic_fsdp.py."""
    import critic_fsdp

    tensors, _, optimizer_state = critic_fsdp.checkpoint_tensors(worker.critic.model, worker.critic.optimizer)
    whole = lambda name: critic_fsdp.full_tensor(tensors[name]).detach().clone()
    steps = {float(state["step"]) for state in optimizer_state["state"].values()}
    assert steps == {float(worker.critic.optimizer_steps)}, steps
    names, forms = list(optimizer_state["state"]), {"master": "model.{}", **{k: f"optimizer.{{}}.{k}" for k in MOMENTS}}
    return {kind: {name: whole(form.format(name)) for name in names} for kind, form in forms.items()}


MOMENTS = ("exp_avg", "exp_avg_sq")


def two_more(worker, expected, what, whole_of_it, exact=False):
    """The state is the one expected, bit for bit; so are two more updates, or but for rounding."""
    for kind, whole in whole_of_it(worker).items():
        assert_same(whole, expected["then"][kind], (*what, kind))
    assert counters(worker) == expected["counters"], what
    metrics = [of_critic(worker.update_critic(rows(seed))) for seed in (2, 3)]
    if exact:
        assert metrics == expected["metrics"], what
        for kind, whole in whole_of_it(worker).items():
            assert_same(whole, expected["after"][kind], (*what, kind, "after"))
    else:
        agree(metrics, whole_of_it(worker), expected, what)


def fsdp_begins(folder):
    """critic_fsdp.py: updates of one step and of two, a checkpoint, two more updates."""
    for name, (fields, layout, _) in TO_AND_FRO[common.WORLD_SIZE].items():
        worker = make_fsdp(**fields, **layout)
        worker.update_critic(rows(0))
        worker.update_critic(rows(1, 24))
        worker.save_checkpoint(folder / f"{name}, fsdp")
        result = {"then": wholes_of_fsdp(worker), "counters": counters(worker)}
        assert result["counters"][:2] == [2, 3]
        assert all(x.any() for kind in MOMENTS for n, x in result["then"][kind].items() if "k_proj.bias" not in n), name
        result["metrics"] = [of_critic(worker.update_critic(rows(seed))) for seed in (2, 3)]
        result["after"] = wholes_of_fsdp(worker)
        if common.RANK == 0:
            torch.save(result, folder / f"{name}, fsdp.pt")


def megatron_takes_over(folder):
    """critic_megatron.py goes on from it on any layout, and saves what it took over."""
    for name, (fields, _, layouts) in [case for some in TO_AND_FRO.values() for case in some.items()]:
        expected = torch.load(folder / f"{name}, fsdp.pt")
        for i, layout in enumerate(layouts):
            worker = make(lr=LR, ppo_mini_batch_size=16, **SCHEDULE, **fields, **layout)
            worker.update_critic(rows(9))  # must leave nothing behind
            worker.load_checkpoint(folder / f"{name}, fsdp")
            worker.save_checkpoint(folder / f"{name}, megatron {i}")
            two_more(worker, expected, (name, layout), wholes)


def fsdp_takes_back(folder):
    """critic_fsdp.py goes on from what critic_megatron.py saved; on as many ranks as at first as if it had never been
    away, bit for bit."""
    for ranks, some in TO_AND_FRO.items():
        for name, (fields, layout, layouts) in some.items():
            expected = torch.load(folder / f"{name}, fsdp.pt")
            home = ranks == common.WORLD_SIZE
            for i in range(len(layouts) if home else 1):
                worker = make_fsdp(folder / f"{name}, megatron {i}", **fields, **layout)
                two_more(worker, expected, (name, i), wholes_of_fsdp, exact=home)


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


def offload_changes_nothing(folder):
    """Off the device and back between updates, twice for good measure: the same weights bit for bit, and nothing stays.

    Gradients are not kept, so what comes back is made NaN here: an update must not read it.
    """
    for fields in ({TP: 2}, {EP: 2, "param_dtype": "bfloat16", **MOE}):
        results = []
        for moves in (False, True):
            gc.collect()
            gc.freeze()  # what lives so far is not looked at below
            worker, metrics = make(**fields), []
            for seed in range(3):
                metrics.append(of_critic(worker.update_critic(rows(seed))))
                if moves:
                    worker.offload()
                    worker.offload()
                    assert_nothing_left(worker)
                    for refused in (worker.compute_values, worker.update_critic):
                        assert_refused("is offloaded: call onload()", RuntimeError, refused, rows(0))
                    for refused in (worker.save_checkpoint, worker.load_checkpoint, worker.export_hf):
                        assert_refused("is offloaded: call onload()", RuntimeError, refused, folder / "offloaded")
                    worker.onload()
                    worker.onload()
                    for chunk in worker.critic.model:
                        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                            buffer.grad_data.fill_(math.nan)
            results.append((metrics, shards(worker), worker.compute_values(rows(0))))
        (metrics, state, values), (moved_metrics, moved_state, moved_values) = results
        assert metrics == moved_metrics and torch.equal(values, moved_values), fields
        assert_same(moved_state, state, fields)


def assert_nothing_left(worker):
    """Weights, gradients and optimizer state take 0 bytes; nor does any other large tensor live that is not frozen."""
    held = [p for chunk in worker.critic.model for p in chunk.parameters()]
    held += [p.main_grad for p in held]
    for optimizer in worker.critic.optimizers():
        masters = optimizer.get_parameters()
        held += masters + [p.grad for p in masters if p.grad is not None]
        held += [x for state in optimizer.optimizer.state.values() for x in state.values() if x.ndim]
        assert len(optimizer.optimizer.state) == len(masters)
    assert len(held) > 40 and all(x.untyped_storage().nbytes() == 0 for x in held)
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    assert not (large := [x.shape for x in tensors if x.untyped_storage().nbytes() > 4096]), large


# ---------------------------------------------------------------------------------------------------------------------
# What is not finite
# ---------------------------------------------------------------------------------------------------------------------

TWO_WAYS = {"tp 2": {TP: 2}, "pp 2": {PP: 2}, "dp 2": {}, "ep 2": {EP: 2, **MOE}}


def counted(function, calls):
    """The function, which notes each call in the list."""
    return lambda *args, **kwargs: (calls.append(1), function(*args, **kwargs))[1]


def a_nan_return_skips_its_mini_batch(folder):
    """One NaN among one rank's rows: no forward of that mini-batch on any rank; the next one is stepped as ever."""
    options = {"ppo_mini_batch_size": 8, "shuffle": False, **SCHEDULE}
    for name, fields in {"pp 2": {PP: 2}, "dp 2": {}}.items():
        whole = random_batch(16, 1, idle=False)
        spoilt = dataclasses.replace(whole, returns=whole.returns.clone())
        spoilt.returns[spoilt.token_index([3])[-1]] = math.nan  # row 3 is rank 1's; its last token is an action
        worker, forwards = make(**options, **fields), []
        before, schedule = shards(worker), worker.critic.run_schedule
        worker.critic.run_schedule = counted(schedule, forwards)
        metrics = worker.update_critic(mine(spoilt.select(range(8))))
        assert not forwards and metrics["critic/skipped_steps"] == 1 and math.isnan(metrics["critic/grad_norm"]), name
        assert_same(shards(worker), before, name)
        assert counters(worker)[:2] == [1, 0], name
        metrics = worker.update_critic(mine(spoilt))
        assert len(forwards) == 1 and metrics["critic/skipped_steps"] == 1 and counters(worker)[:2] == [2, 1], name
        fresh = make(**options, **fields)
        expected = fresh.update_critic(mine(whole.select(range(8, 16))))
        assert metrics["critic/vf_loss"] == expected["critic/vf_loss"], name
        assert metrics["critic/grad_norm"] == expected["critic/grad_norm"], name
        assert_same(shards(worker), shards(fresh), name)


def a_gradient_that_is_not_finite_skips_the_step(folder):
    """Whether the loss overflows, or one number on one rank: nobody steps, the schedule stays; then all goes on."""
    for name, fields in TWO_WAYS.items():
        worker = make(**SCHEDULE, **fields)
        before, schedule = shards(worker), worker.critic.run_schedule
        overflow = random_batch(16, 1, idle=False)
        overflow.returns[overflow.response_mask.nonzero()[0]] = 1e30  # its square is not finite in float32
        metrics = worker.update_critic(mine(overflow))
        assert metrics["critic/skipped_steps"] == 1 and counters(worker)[:2] == [1, 0], name
        assert_same(shards(worker), before, name)
        for number in (math.inf, math.nan):

            def spoilt(*args, schedule=schedule, worker=worker, number=number, **kwargs):
                kept = schedule(*args, **kwargs)
                if common.RANK == 1:
                    spoil(worker.critic, number)
                return kept

            worker.critic.run_schedule = spoilt
            metrics = worker.update_critic(rows(0))
            assert metrics["critic/skipped_steps"] == 1 and math.isnan(metrics["critic/vf_loss"]), (name, number)
            assert worker.critic.optimizer_steps == 0, (name, number)
            assert_same(shards(worker), before, (name, number))
        worker.critic.run_schedule = schedule
        fresh = make(**SCHEDULE, **fields)
        fresh.critic.updates = 3  # the key of the shuffle
        ours, theirs = worker.update_critic(rows(0)), fresh.update_critic(rows(0))
        assert of_critic(ours) == of_critic(theirs) and ours["critic/skipped_steps"] == 0, name
        assert_same(shards(worker), shards(fresh), name)


def a_padding_token_may_count_from_the_end(folder):
    """As transformers has it: the last row of the embedding, which rank 1 has."""
    size = make().vocab_size
    row = lambda pad: make(override_config=json.dumps({"pad_token_id": pad}), **{TP: 2}).critic.padding_row
    assert row(-1) == row(size - 1) and (row(-1) is None) == (common.RANK == 0)


def spoil(critic, number):
    """Puts the number into the gradient of a weight that only this rank has: of its last expert, or of its last MLP."""
    matrices = [p for p in critic.modules[-1].decoder.layers.parameters() if p.ndim == 2]
    places = [(p, x) for p in matrices for x in critic.optimizers() if p in x.model_param_group_index_map]
    p, optimizer = places[-1]
    p.main_grad.view(-1)[optimizer._get_model_param_range_map(p)["param"].start] = number


# ---------------------------------------------------------------------------------------------------------------------
# Half precision
# ---------------------------------------------------------------------------------------------------------------------


def set_loss_scale(worker, scale):
    for optimizer in worker.critic.optimizers():
        optimizer.grad_scaler._scale.fill_(scale)


def float16_finds_its_loss_scale(folder):
    """A scale too large is halved and the mini-batch tried again until its step fits: none is lost, whatever the size
    of a micro-batch. One that fits at no scale is skipped, and leaves it alone. A checkpoint keeps the scale."""
    for name, fields in {"ep 2": {EP: 2, **MOE}}.items():
        worker, cut, fitting = (
            make(param_dtype="float16", **fields, **x) for x in ({}, {"ppo_micro_batch_size_per_gpu": 1}, {})
        )
        scales = lambda worker=worker: {float(x.grad_scaler.scale) for x in worker.critic.optimizers()}
        assert scales() == {2.0**16}
        for one in (worker, cut):
            set_loss_scale(one, 2.0**24)
        metrics = worker.update_critic(rows(0))
        assert metrics["critic/skipped_steps"] == 0 and worker.critic.optimizer_steps == 1, name
        (scale,) = scales()  # else the experts' gradient would be of another size
        assert 1 < scale < 2.0**22, (name, scale)
        set_loss_scale(fitting, scale)
        assert of_critic(fitting.update_critic(rows(0))) == of_critic(metrics), name
        assert_same(shards(fitting), shards(worker), name)
        other = cut.update_critic(rows(0))
        assert other["critic/skipped_steps"] == 0, name
        assert math.isclose(other["critic/grad_norm"], metrics["critic/grad_norm"], rel_tol=1e-2), (
            name,
            other,
            metrics,
        )
        before, overflow = shards(worker), random_batch(16, 1, idle=False)
        overflow.returns[overflow.response_mask.nonzero()[0]] = 1e30  # its square is not finite in float32
        assert worker.update_critic(mine(overflow))["critic/skipped_steps"] == 1 and scales() == {scale}, name
        assert_same(shards(worker), before, name)
        twin = make(param_dtype="float16", **fields)
        worker.save_checkpoint(folder / "float16")
        twin.load_checkpoint(folder / "float16")
        assert scales(twin) == scales(), (name, scales(twin), scales())
        trackers = [x.grad_scaler._growth_tracker for x in twin.critic.optimizers()]
        assert trackers == [x.grad_scaler._growth_tracker for x in worker.critic.optimizers()], trackers
        for seed in range(1, 4):
            assert of_critic(worker.update_critic(rows(seed))) == of_critic(twin.update_critic(rows(seed))), name
        assert_same(shards(twin), shards(worker), name)


def float16_is_float32_but_for_rounding(folder):
    """Once the scale fits, norm and loss of the first step are those of float32 to 1 %."""
    for fields in ({EP: 2, **MOE},):
        half, full = make(param_dtype="float16", **fields), make(**fields)
        set_loss_scale(half, 2.0**6)
        ours, theirs = half.update_critic(rows(0)), full.update_critic(rows(0))
        for key in ("critic/vf_loss", "critic/grad_norm", "critic/vpred_mean"):
            assert math.isclose(ours[key], theirs[key], rel_tol=1e-2, abs_tol=1e-3), (fields, key, ours, theirs)


def bfloat16_learns_alike_on_every_layout(folder):
    """Losses of three updates are one rank's but for rounding: weights that come back wrong from a step show there."""
    layouts = {
        "dense": {2: ({}, {TP: 2}, {PP: 2, VPP: 2}), 4: ()},
        "mixture": {2: ({EP: 2},), 4: ({PP: 2, VPP: 2, EP: 2}, {PP: 2, VPP: 2, "overlap_grad_reduce": True})},
    }
    for name, fields in {"dense": FOUR_LAYERS, "mixture": {**FOUR_LAYERS, **MOE}}.items():
        for layout in ({},) if common.WORLD_SIZE == 1 else layouts[name][common.WORLD_SIZE]:
            worker = make(param_dtype="bfloat16", lr=1e-2, **fields, **layout)
            losses = [worker.update_critic(rows(seed))["critic/vf_loss"] for seed in range(3)]
            if common.WORLD_SIZE == 1:
                (folder / f"{name}.json").write_text(json.dumps(losses))
            expected = json.loads((folder / f"{name}.json").read_text())
            assert max(expected) > 1.5 * min(expected), expected  # it does move
            for ours, theirs in zip(losses, expected, strict=True):
                assert math.isclose(ours, theirs, rel_tol=5e-2), (name, layout, losses, expected)


def bfloat16_keeps_master_weights(folder):
    """The head and the master weights are float32, exactly as drawn; steps too small for bfloat16 add up there."""
    for fields in ({TP: 2}, {EP: 2, **MOE}):
        half, full = make(param_dtype="bfloat16", lr=1e-6, **fields), make(lr=1e-6, **fields)
        masters = lambda worker: whole_of(worker.critic, lambda _, p: p)
        start, exact = masters(half), masters(full)
        assert_same(start, exact, fields)
        assert any(not torch.equal(x, x.bfloat16().float()) for x in exact.values())
        heads = [w.critic.modules[-1].output_layer for w in (half, full) if w.critic.modules[-1].post_process]
        for ours, theirs in zip(*(head.named_parameters() for head in heads), strict=True) if heads else ():
            assert ours[1].dtype == torch.float32 and torch.equal(ours[1], theirs[1]), (fields, ours[0])
        batch = random_batch(16, 0)
        ours, theirs = half.compute_values(mine(batch)), full.compute_values(mine(batch))
        error = common.relative_error(ours[None], theirs[None])
        assert 1e-6 < error < 0.05, (fields, error)
        computed = union(dict(cm.whole_weights(half.critic.modules, half.vocab_size)))
        for seed in range(5):
            assert half.update_critic(rows(seed))["critic/skipped_steps"] == 0
        after, now = masters(half), union(dict(cm.whole_weights(half.critic.modules, half.vocab_size)))
        moved = torch.cat([(after[n] - x).abs().flatten() for n, x in start.items() if "score" not in n])
        changed = torch.cat([(now[n] != x).flatten() for n, x in computed.items() if "score" not in n])
        # rows of the embedding that no token has asked for only decay, by 1e-8 of themselves a step
        assert moved.median() > 1e-6 and changed.float().mean() < 0.1, (fields, moved.median(), changed.float().mean())
        assert not heads or heads[0].weight.dtype == torch.float32
        assert (now["score.weight"] != computed["score.weight"]).all(), fields


# ---------------------------------------------------------------------------------------------------------------------
# Heads, rows and folders
# ---------------------------------------------------------------------------------------------------------------------

HEADS = {"scalar": {}, "hl_gauss": HL_GAUSS}


def heads(folder):
    """Values and the gradient of one mini-batch with either head; on one rank kept, elsewhere equal."""
    layouts = {1: [{}], 2: [{TP: 2}, {CP: 2}]}
    for name, fields in HEADS.items():
        for layout in layouts[common.WORLD_SIZE]:
            worker, batch = make(ppo_max_token_len_per_gpu=100, **fields, **layout), random_batch(12, 1)
            values = common.gather(dataclasses.replace(mine(batch), values=worker.compute_values(mine(batch)))).values
            with captured_gradients(worker.critic) as seen:
                metrics = worker.update_critic(mine(batch))
            result = {"values": values, "loss": metrics["critic/vf_loss"], "gradients": seen[0]}
            if common.WORLD_SIZE == 1:
                torch.save(result, folder / f"{name}.pt")
                continue
            expected = torch.load(folder / f"{name}.pt")
            assert math.isclose(result["loss"], expected["loss"], rel_tol=1e-5), (name, layout)
            torch.testing.assert_close(values, expected["values"], rtol=1e-5, atol=1e-5)
            assert result["gradients"].keys() == expected["gradients"].keys()
            floor = 1e-3 * max(g.abs().max() for g in expected["gradients"].values())
            for n, g in expected["gradients"].items():
                error = float((result["gradients"][n] - g).abs().max() / torch.maximum(g.abs().max(), floor))
                assert error < 1e-5, (name, layout, n, error)


def rows_come_back_in_the_callers_order(folder):
    """Values do not depend on who owns which rows; every caller gets its own rows in its own order."""
    everything = random_batch(13)
    for fields in ({}, {TP: 2}, {PP: 2}):
        worker = make(ppo_max_token_len_per_gpu=100, **fields)
        whole = worker.compute_values(everything if common.RANK == 0 else everything.select([]))
        owned = dataclasses.replace(everything, values=whole) if common.RANK == 0 else everything.select([])
        expected = common.gather(owned).values
        assert expected[everything.response_mask].unique().numel() > 50
        order = common.permutation(13, "owners")
        for cut in (0, 5, 13):  # none, some and all of the rows on the last rank
            some = order[cut:] if common.RANK == 0 else order[:cut] if common.RANK == common.WORLD_SIZE - 1 else []
            values = worker.compute_values(everything.select(some))
            torch.testing.assert_close(values, expected[everything.token_index(some)], rtol=0, atol=0)
        twice = "row_id 0 stands in the batch more than once"
        assert_refused(twice, ValueError, worker.compute_values, everything)


EXPORTS = {  # ranks -> name of the folder -> Config fields; 99 characters do not go evenly over 2 ranks
    2: {
        "ep 2": {EP: 2, **MOE},
        "tied": {TP: 2, "override_config": '{"tie_word_embeddings": true}'},
        "hl_gauss": {PP: 2, **HL_GAUSS},
    },
    4: {"tp 2 pp 2": {TP: 2, PP: 2, "override_config": '{"num_hidden_layers": 4}'}},
}


def export(folder):
    """A trained model as a Hugging Face folder: transformers finds all of it and nothing else, and the same values."""
    for name, fields in EXPORTS[common.WORLD_SIZE].items():
        worker, batch = make(lr=1e-2, **fields), random_batch(8, 5)
        worker.update_critic(rows(0))
        values = worker.critic.compute_values(batch)
        worker.export_hf(folder / "hf" / name)
        if common.RANK == 0:
            torch.save(values, folder / f"values of {name}.pt")
            check_export(folder / "hf" / name, batch, values, worker.config)


def check_export(path, batch, values, config):
    """Plain transformers, one sequence after another."""
    import transformers

    kind = transformers.AutoModelForTokenClassification
    model, info = kind.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), (path, info)
    assert len(model.get_input_embeddings().weight) == model.config.vocab_size == 99
    assert model.config.num_labels == (config.value_bins if config.value_head == "hl_gauss" else 1)
    expected = torch.zeros_like(values)
    for start, end in rows_of(batch):
        with torch.no_grad():
            out = model(input_ids=batch.input_ids[start:end][None]).logits[0]
        if config.value_head == "hl_gauss":  # the mean over the middles of the bins
            low, high = model.config.value_range
            middles = low + (torch.arange(config.value_bins) + 0.5) * (high - low) / config.value_bins
            out = out.softmax(-1) @ middles[:, None]
        expected[start + 1 : end] = out[:-1, 0]
    expected = torch.where(batch.response_mask, expected, 0.0)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)


def exports_load_elsewhere(folder):
    """The folders as --model of this critic on another layout; on one rank of critic_fsdp.py too."""
    import critic_fsdp

    names = [name for some in EXPORTS.values() for name in some]
    if common.WORLD_SIZE == 1:  # first, for Megatron's stand-ins for CUDA stay
        for name in names:
            head = HL_GAUSS if name == "hl_gauss" else {}
            worker = critic_fsdp.CriticWorker(critic_fsdp.Config(model=str(folder / "hf" / name), **head))
            worker.init_model()
            values = worker.compute_values(random_batch(8, 5))
            torch.testing.assert_close(values, torch.load(folder / f"values of {name}.pt"), rtol=1e-5, atol=1e-5)
    for name in names if common.WORLD_SIZE == 1 else ("ep 2", "tp 2 pp 2"):
        layout = {1: {}, 2: {TP: 2}}[common.WORLD_SIZE]
        head = HL_GAUSS if name == "hl_gauss" else {}
        worker = make(str(folder / "hf" / name), **layout, **head)
        values = worker.critic.compute_values(random_batch(8, 5))
        torch.testing.assert_close(values, torch.load(folder / f"values of {name}.pt"), rtol=1e-5, atol=1e-5)


def an_automatic_budget_fills_the_memory(folder):
    """On one rank; and on two stages, of which the first holds what two micro-batches save."""
    layout, limit = {1: {}, 2: {PP: 2}}[common.WORLD_SIZE], 0.03
    auto = make(ppo_max_token_len_per_gpu="auto", memory_limit_gib=limit, **layout)
    batch = rows(3)
    metrics, budget = auto.update_critic(batch), auto.config.ppo_max_token_len_per_gpu
    for name, x in make(ppo_max_token_len_per_gpu=64, **layout).update_critic(batch).items():
        assert name.startswith("perf/") or abs(metrics[name] - x) <= 1e-6 * abs(x), (name, metrics[name], x)
    full = common.probe_rows(budget // 40, 40)
    counts = common.loss_counts(full.response_mask, full.cu_seqlens)
    train = lambda: auto.critic.forward_backward(full, [range(len(full))] * 4, counts)
    held = torch.tensor(
        common.peak_bytes(train, auto.device) + 16.0 * sum(p.numel() for p in auto.critic.modules[0].parameters())
    )
    dist.all_reduce(held, dist.ReduceOp.MAX)
    assert 0.8 < held / (limit * 2**30) < 0.92, held


LAUNCHES = [  # ranks and scenarios, in this order: some read what others before them leave in the folder
    *((1, f) for f in (heads, bfloat16_learns_alike_on_every_layout, an_automatic_budget_fills_the_memory)),
    *((2, f) for f in (save_and_go_on, resume_and_go_on, resume_in_two_stages, damage_is_refused)),
    *((2, f) for f in (heads, rows_come_back_in_the_callers_order, export, offload_changes_nothing)),
    *((2, f) for f in (an_automatic_budget_fills_the_memory, a_padding_token_may_count_from_the_end)),
    *((2, f) for f in (a_nan_return_skips_its_mini_batch, a_gradient_that_is_not_finite_skips_the_step)),
    *((2, f) for f in (float16_finds_its_loss_scale, float16_is_float32_but_for_rounding)),
    *((2, f) for f in (bfloat16_keeps_master_weights, bfloat16_learns_alike_on_every_layout)),
    *((4, f) for f in (resume_and_go_on, export, bfloat16_learns_alike_on_every_layout)),
    *((1, f) for f in (exports_load_elsewhere, resume_and_go_on)),
    (2, exports_load_elsewhere),
    *((1, f) for f in (fsdp_begins,)),
    *((2, f) for f in (fsdp_begins, megatron_takes_over, fsdp_takes_back)),
    (1, fsdp_takes_back),
]
NAMES = [f"{function.__name__} on {ranks}" for ranks, function in LAUNCHES]


def launch(name, function, folder, args):
    """On every rank: one scenario."""
    global build, captured_gradients, cm, common, random_batch, rows_of, union, whole_of, write_manifest
    from helpers import random_batch, rows_of, write_manifest  # these read RANK when imported
    from megatron_layouts import build, captured_gradients, union, whole_of

    import common
    import critic_megatron as cm

    start = time.perf_counter()
    function(pathlib.Path(folder))
    dist.barrier()
    common.print0(f"ok {name} ranks, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    import forked

    forked.scenarios([(name, *item, ()) for name, item in zip(NAMES, LAUNCHES, strict=True)], launch)
