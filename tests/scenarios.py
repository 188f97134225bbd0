"""Runs under torchrun: what takes several ranks to try. Each scenario asserts on its own and ends with a line "ok".

torchrun --nproc-per-node 2 tests/scenarios.py NAME[,NAME...] ARGUMENTS...
"""

import dataclasses
import json
import math
import pathlib
import sys

import torch
import torch.distributed as dist
from helpers import captured_gradients, full_weights, random_batch
from test_common import BAD_ROWS, GOOD
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import common
import critic_fsdp
from common import RANK, WORLD_SIZE, UserError
from critic_fsdp import Config, CriticWorker, Run

LAYOUTS = {
    "fsdp2": {},
    "fsdp1": {"strategy": "fsdp1"},
    "none": {"strategy": "none"},
    "replicas": {"fsdp_size": 1},
    "ulysses": {"ulysses_size": 2},
}


def make(**fields):
    worker = CriticWorker(Config(lr_warmup_steps=3, ppo_mini_batch_size=8, **fields))
    worker.init_model()
    return worker


def rows_come_back_in_the_callers_order():
    """Values and metrics do not depend on who owns which rows; every caller gets its own rows in its own order."""
    everything = random_batch(13, vocab_size=60)
    worker = make()
    whole = worker.compute_values(everything if RANK == 0 else everything.select([]))
    expected = common.gather(
        dataclasses.replace(everything, values=whole) if RANK == 0 else everything.select([])
    ).values
    order = common.permutation(13, "owners")
    for cut in (0, 5, 13):  # none, some and all of the rows on the last rank
        mine = order[cut:] if RANK == 0 else order[:cut] if RANK == WORLD_SIZE - 1 else []
        values = worker.compute_values(everything.select(mine))
        torch.testing.assert_close(values, expected[everything.token_index(mine)], rtol=0, atol=0)
    try:
        worker.compute_values(everything)
    except ValueError as error:
        assert "row_id 0 stands in the batch more than once" in str(error)
    else:
        raise AssertionError("two owners of a row went unnoticed")


def not_finite_on_one_rank():
    """An overflow among one rank's rows skips the step on every rank and leaves the weights as they were."""
    for fields in LAYOUTS.values():
        worker = make(**fields)
        batch = random_batch(8, vocab_size=60, idle=False)
        batch.returns[batch.response_mask.nonzero()[0]] = 1e30  # its square is not finite in float32
        before = full_weights(worker.critic)
        mine = batch.select(range(RANK, 8, WORLD_SIZE))
        metrics = worker.update_critic(mine)
        assert metrics["critic/skipped_steps"] == 1 and worker.critic.optimizer_steps == 0, fields
        assert all(torch.equal(x, before[n]) for n, x in full_weights(worker.critic).items()), fields


def a_weight_may_be_used_on_one_rank_alone():
    """As of a mixture whose experts are modules, which a user has written: each gradient reaches its own weight."""
    from transformers.models.qwen2 import modeling_qwen2

    mlp, expert = modeling_qwen2.Qwen2MLP, [0]

    class Mixture(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.experts = torch.nn.ModuleList([mlp(config), mlp(config)])

        def forward(self, x):
            return self.experts[expert[0]](x)

    modeling_qwen2.Qwen2MLP, batch = Mixture, random_batch(8, vocab_size=60)
    for of_rank in ([0, 1], [0, 0]):  # the second of no rank: then it decays alike
        steps = {}
        for name in ("none", "fsdp2"):
            expert[0] = 0
            worker = make(weight_decay=0.1, **LAYOUTS[name])
            expert[0] = of_rank[RANK]
            with captured_gradients(worker.critic) as gradients:
                worker.update_critic(batch.select(range(RANK, 8, WORLD_SIZE)))
            steps[name] = gradients[0] | {f"{n} after it": x for n, x in full_weights(worker.critic).items()}
        assert steps["none"].keys() == steps["fsdp2"].keys()
        for name, x in steps["none"].items():
            torch.testing.assert_close(steps["fsdp2"][name], x, rtol=1e-4, atol=1e-6, msg=f"{of_rank} {name}")
    modeling_qwen2.Qwen2MLP = mlp


def save_and_go_on(folder):
    """Two updates, a checkpoint of every layout, two more updates -> their metrics and weights beside it."""
    batches = [random_batch(16, seed, vocab_size=60) for seed in range(4)]
    for name, fields in LAYOUTS.items():
        worker = make(**fields)
        for batch in batches[:2]:
            worker.update_critic(batch.select(range(RANK, 16, WORLD_SIZE)))
        worker.save_checkpoint(pathlib.Path(folder) / name)
        metrics = [worker.update_critic(batch.select(range(RANK, 16, WORLD_SIZE))) for batch in batches[2:]]
        weights = full_weights(worker.critic)
        if RANK == 0:
            torch.save({"metrics": metrics, "weights": weights}, pathlib.Path(folder) / f"{name}.pt")


def resume_and_go_on(folder):
    """The same from the checkpoints on every layout of this world size: equal, bit for bit on the same layout.

    On two ranks every layout goes on with its own and with what fsdp1 has saved, and fsdp2 with what each has.
    """
    batches = [random_batch(16, seed, vocab_size=60) for seed in range(4)]
    for now, fields in LAYOUTS.items():
        if WORLD_SIZE % fields.get("ulysses_size", 1):
            continue
        worker = make(**fields)
        some = dict.fromkeys((now, "fsdp1")) if WORLD_SIZE == 2 else ("fsdp1",)
        for then in LAYOUTS if WORLD_SIZE == 2 and now == "fsdp2" else some:
            expected = torch.load(pathlib.Path(folder) / f"{then}.pt", weights_only=True)
            worker.compute_values(batches[0].select(range(RANK, 16, WORLD_SIZE)))  # must let go of gathered weights
            worker.load_checkpoint(pathlib.Path(folder) / then)
            metrics = [worker.update_critic(batch.select(range(RANK, 16, WORLD_SIZE))) for batch in batches[2:]]
            exact = now == then and WORLD_SIZE == 2
            for ours, theirs in zip(metrics, expected["metrics"], strict=True):
                for key in [k for k in ours if k.startswith("critic/")]:
                    close = ours[key] == theirs[key] if exact else math.isclose(ours[key], theirs[key], rel_tol=1e-4)
                    assert close, (then, now, key, ours[key], theirs[key])
            for name, x in full_weights(worker.critic).items():
                torch.testing.assert_close(
                    x, expected["weights"][name], rtol=0, atol=0 if exact else 2e-4, msg=f"{then} {now}"
                )


def whitening_is_over_all_ranks():
    """masked_whiten of the ranks' parts is that of the whole."""
    batch = random_batch(16)
    x, mask = batch.returns, batch.response_mask
    x = torch.where(mask, 5 + RANK * x, math.nan)  # unlike moments on the ranks; NaN where nothing counts
    whole_x, whole_mask = torch.zeros(WORLD_SIZE * len(x)), torch.zeros(WORLD_SIZE * len(x))
    dist.all_gather_into_tensor(whole_x, x)
    dist.all_gather_into_tensor(whole_mask, mask.float())
    for shift in (True, False):
        white = common.masked_whiten(x, mask, shift, over_ranks=True)
        expected = common.masked_whiten(whole_x, whole_mask.bool(), shift)
        torch.testing.assert_close(white, expected.view(WORLD_SIZE, -1)[RANK])


def gradients_of_bfloat16_are_reduced_in_float32():
    """What goes over the wire for gradients is float32, for gathered weights bfloat16."""
    for name, fields in LAYOUTS.items():
        worker, sent = make(param_dtype="bfloat16", **fields), {}
        batch = random_batch(16, vocab_size=60).select(range(RANK, 16, WORLD_SIZE))
        names = ("reduce_scatter_tensor", "reduce_scatter_single", "all_reduce")  # single: FSDP2's since torch 2.13
        names += ("all_gather_into_tensor", "all_gather_single", "all_gather")
        kept = {n: getattr(dist, n) for n in names if hasattr(dist, n)}
        for op, function in kept.items():

            def noted(*args, key_=op, function=function, sent=sent, **kwargs):
                tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.numel() > 500]
                sent.setdefault(key_, set()).update(x.dtype for x in tensors)
                return function(*args, **kwargs)

            setattr(dist, op, noted)
        worker.update_critic(batch)
        for op, function in kept.items():
            setattr(dist, op, function)
        assert set().union(*(sent.get(n, ()) for n in names[:3])) == {torch.float32}, (name, sent)
        if name in ("fsdp2", "fsdp1", "ulysses"):
            assert torch.bfloat16 in set().union(*(sent.get(n, ()) for n in names[3:])), (name, sent)


def gathered_weights_are_let_go():
    """After compute_values no rank holds more than its shards."""
    batch = random_batch(16, vocab_size=60).select(range(RANK, 16, WORLD_SIZE))
    worker = make()
    groups = [m._get_fsdp_state()._fsdp_param_group for m in worker.critic.model.modules() if isinstance(m, FSDPModule)]
    worker.compute_values(batch)
    assert len(groups) == 4 and all(g.is_sharded for g in groups)
    worker = make(strategy="fsdp1")
    worker.compute_values(batch)
    handles = worker.critic.model._all_handles
    assert len(handles) == 4
    assert all(h.flat_param._full_param_padded.untyped_storage().size() == 0 for h in handles)
    assert all(p.numel() <= h.flat_param.numel() for h in handles for p in [h.flat_param.data])


def memory_options_change_no_bit():
    """What only moves or recomputes: two updates on two ranks give the same weights, bit for bit."""
    batches = [random_batch(16, seed, vocab_size=60).select(range(RANK, 16, WORLD_SIZE)) for seed in range(2)]
    cases = {
        "fsdp2": [
            {"reshard_after_forward": False},
            {"forward_prefetch": True},
            {"offload_policy": True},
            {"gradient_checkpointing": True},
            {"gradient_checkpointing": True, "activation_offload": True},
        ],
        "fsdp1": [
            {"reshard_after_forward": False},
            {"forward_prefetch": True},
            {"gradient_checkpointing": True, "activation_offload": True},
        ],
        "none": [{"gradient_checkpointing": True}, {"gradient_checkpointing": True, "activation_offload": True}],
    }
    for strategy, options in cases.items():
        plain = None
        for fields in [{}, *options]:
            worker, seen = make(strategy=strategy, ppo_max_token_len_per_gpu=100, **fields), []
            for batch in batches:
                batch.values = worker.compute_values(batch)
                seen.append(worker.update_critic(batch)["critic/grad_norm"])
                worker.offload()
                worker.onload()
            weights = full_weights(worker.critic)
            plain = plain or (seen, weights)
            assert seen == plain[0], (strategy, fields, seen, plain[0])
            assert all(torch.equal(x.cpu(), plain[1][n]) for n, x in weights.items()), (strategy, fields)


def the_plan_is_what_a_rank_holds():
    """--plan's weights, gradients and optimizer state against the bytes of this rank's own tensors."""
    batch = random_batch(16, vocab_size=60)
    local = lambda x: x.to_local() if isinstance(x, DTensor) else x
    for name, fields in LAYOUTS.items():
        worker = make(**fields)
        worker.update_critic(batch.select(range(RANK, 16, WORLD_SIZE)))
        _, planned, _ = critic_fsdp.plan(worker.config, worker.model_config, batch.lengths, WORLD_SIZE)
        model, optimizer, noted = worker.critic.model, worker.critic.optimizer, {}
        step = optimizer.step
        optimizer.step = lambda step=step, model=model, noted=noted: (
            noted.update(gradients=sum(local(p.grad).nbytes for p in model.parameters() if p.grad is not None)),
            step(),
        )
        worker.update_critic(batch.select(range(RANK, 16, WORLD_SIZE)))
        noted["weights"] = sum(local(p).nbytes for p in model.parameters())
        states = optimizer.state.values()
        noted["optimizer"] = sum(local(x).nbytes for s in states for k, x in s.items() if k != "step")
        for part, measured in noted.items():
            mean = torch.tensor(float(measured))
            dist.all_reduce(mean)  # FSDP1 cuts a flat tensor, FSDP2 each one: the ranks' shares differ a little
            assert math.isclose(mean / WORLD_SIZE, planned[part][0], rel_tol=1e-3), (name, part, mean, planned[part])


VARIANTS = {
    "lora": {"lora_rank": 3, "lora_alpha": 6.0},
    "hl_gauss": {"value_head": "hl_gauss", "value_bins": 11, "value_range": (-1.5, 2.0)},
    "freeze": {"freeze_layers": 1},
}


def one_gradient(model, folder=None, **fields):
    """Weights, values, metrics and the gradient of one mini-batch; folder: a checkpoint to start from."""
    fields = {"lr": 0.01, "ppo_max_token_len_per_gpu": 60, **fields}
    worker = CriticWorker(Config(model=str(model), **fields))
    worker.init_model()
    if folder:
        worker.load_checkpoint(folder)
    weights, batch = full_weights(worker.critic), random_batch(12, seed=1)
    mine = batch.select(range(RANK, 12, WORLD_SIZE))
    mine.values = worker.compute_values(mine)
    with captured_gradients(worker.critic) as seen:
        metrics = worker.update_critic(mine)
    assert len(seen) == 1
    whole = {"values": common.gather(mine).values, "metrics": metrics, "gradients": seen[0], "weights": weights}
    return worker, {**whole, "after": full_weights(worker.critic)}


def heads_and_adapters(model, folder, out):
    """What every layout makes of every variant, from a checkpoint of one rank -> out; and checkpoints of this one."""
    results, folder = {}, pathlib.Path(folder)
    for variant, fields in VARIANTS.items():
        for layout in ("fsdp2", "fsdp1", "none", "ulysses"):
            recompute = layout in ("fsdp1", "ulysses")
            worker, results[variant, layout] = one_gradient(
                model, folder / variant, gradient_checkpointing=recompute, **fields, **LAYOUTS[layout]
            )
        worker.save_checkpoint(folder / f"{variant} of {WORLD_SIZE}")
    if RANK == 0:
        torch.save(results, out)


def waiting_is_measured():
    """Two ranks wait for each other: time in collectives is above zero and within the step."""
    for name, fields in LAYOUTS.items():
        worker = make(**fields)
        metrics = worker.update_critic(random_batch(16, vocab_size=60).select(range(RANK, 16, WORLD_SIZE)))
        assert 0 < metrics["perf/time_comm_wait"] < metrics["perf/time_update"], (name, metrics)


def bad_input_ends_every_rank(folder):
    """Every bad row and impossible flag is refused on all ranks alike, before a model is built."""
    folder, built = pathlib.Path(folder), []
    run = lambda critic=Config(), **fields: Run(critic=critic, out_dir=str(folder / "out"), **fields)  # noqa: B008
    critic_fsdp.build_value_model = lambda *_: built.append(1)
    cases = {}
    for name, (change, fault) in BAD_ROWS.items():
        path = folder / f"{name}.jsonl"
        if isinstance(change, dict) and RANK == 0:
            path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **change}))
        if isinstance(change, dict):
            vocabulary = json.dumps({"vocab_size": 50, "max_position_embeddings": 20})
            cases[name] = run(Config(override_config=vocabulary), rollouts=str(path)), fault
    cases |= {
        "no such file": (run(rollouts=str(folder / "none.jsonl")), "--rollouts"),
        "no such tokenizer": (run(Config(tokenizer=str(folder))), "--tokenizer"),
        "no such model": (run(Config(model=str(folder))), "--model"),
        "ulysses": (run(Config(ulysses_size=3)), "--ulysses-size 3: must divide the 2 ranks"),
        "heads": (
            run(Config(ulysses_size=2, override_config='{"num_attention_heads": 1, "num_key_value_heads": 1}')),
            "attention heads",
        ),
        "replicas": (run(Config(fsdp_size=5)), "--fsdp-size 5: must divide the 2 ranks"),
    }
    dist.barrier()
    for name, (flags, fault) in cases.items():
        try:
            critic_fsdp.main(flags)
        except UserError as error:
            assert fault in str(error) and "\n" not in str(error), (name, str(error))
        else:
            raise AssertionError(f"{name} went unnoticed")
    assert not built


def an_automatic_budget_is_that_of_the_rank_with_least_memory():
    auto = lambda **fields: make(ppo_max_token_len_per_gpu="auto", ulysses_size=2, **fields)
    roomy, small = auto(memory_limit_gib=0.03), auto(memory_limit_gib=0.02)
    mixed = auto(memory_limit_gib=0.03 if RANK else 0.02)
    for worker in (roomy, small, mixed):
        worker.find_budget(64, "the longest row")
    budgets = [worker.config.ppo_max_token_len_per_gpu for worker in (roomy, small, mixed)]
    assert budgets[0] > 1.3 * budgets[1] and abs(budgets[2] - budgets[1]) < 0.1 * budgets[1], budgets
    assert common.of_all_ranks(budgets) == [budgets] * 2


def compiled_blocks_make_the_same_update():
    one_layer = {"override_config": '{"num_hidden_layers": 1}', "ppo_max_token_len_per_gpu": 100}
    plain, compiled = make(**one_layer), make(**one_layer, compile=True)
    batch = random_batch(12, vocab_size=60)
    torch.testing.assert_close(compiled.compute_values(batch), plain.compute_values(batch), rtol=1e-5, atol=1e-6)
    theirs, ours = plain.update_critic(batch), compiled.update_critic(batch)
    for name in ("critic/vf_loss", "critic/grad_norm"):
        assert abs(ours[name] - theirs[name]) <= 1e-6 * abs(theirs[name]), (name, ours[name], theirs[name])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1  # it was not left out


if __name__ == "__main__":
    common.setup_distributed()
    names, *arguments = sys.argv[1:]
    common.run(lambda: [(globals()[name](*arguments), common.print0("ok", name)) for name in names.split(",")])
