"""Runs one mini-batch on every layout of critic_megatron.py; saves values, gradients and stepped weights.

    python tests/megatron_layouts.py OUT_FOLDER [RANKS...]        on 1, 2, 4 and 8 ranks by default

Models and results go to OUT_FOLDER; test_megatron_layouts.py compares the results with a float64 loop.
"""

import dataclasses
import pathlib
import sys

import forked
import torch
import torch.distributed as dist

if __name__ != "__main__":  # not in the process that forks ranks: these read RANK on import
    import test_layouts
    from helpers import end_groups
    from test_layouts import ROWS

    import common
    import critic_megatron as cm

SIZES = {  # short for the flags NAME_parallel_size
    "tp": "tensor_model", "pp": "pipeline_model", "vpp": "virtual_pipeline_model", "cp": "context",
    "ep": "expert_model", "etp": "expert_tensor",
}  # fmt: skip
OPTIONS = {
    "dp": {},  # the default for all other ranks
    "padded": {"use_remove_padding": False},
    "recompute": {"gradient_checkpointing": True},
    "whole-rows": {"sequence_parallel": False},
}
LAYOUTS = {  # ranks -> model -> layouts, for fields_of
    1: {"qwen2": "dp, padded, recompute", "qwen3": "dp", "llama": "dp", "qwen3-moe": "dp, recompute"},
    2: {
        "qwen2": "dp, tp2, tp2 whole-rows, tp2 padded, cp2, pp2, pp2 padded, pp2 recompute, pp2 vpp2",
        "qwen3": "tp2 recompute, cp2 recompute",
        "llama": "tp2, pp2 vpp2",
        "qwen3-moe": "ep2, etp2, tp2 etp1, tp2 etp2, tp2 ep2 etp1",
    },
    4: {
        "qwen2": "tp4, pp4, cp4, tp2 pp2, pp2 cp2, pp2 vpp2 dp, cp2 dp",
        "qwen3": "tp2 cp2",
        "llama": "tp2 dp",
        "mistral": "tp2 pp2",
        "qwen3-moe": "ep4, ep2 dp, ep2 cp2, pp2 ep2",
        "mixtral": "tp2 pp2 ep2 etp1",
        "qwen2-moe": "tp2 pp2 ep2 etp1",
    },
    8: {
        "qwen2": "tp2 pp2 cp2",
        "qwen3": "tp2 pp2 vpp2 dp",
        "qwen3-moe": "tp2 pp2 ep2 etp2, tp2 pp2 vpp2 cp2 ep2 etp1",
    },
}

MODES = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MORE = {  # cases in addition to "budget 64" that could go wrong on a layout
    (1, "qwen2", "padded"): ("smallest budget", *MODES),
    (2, "qwen2", "dp"): ("rows on rank 0", "fewer rows than ranks"),
    (2, "qwen2", "tp2"): ("one micro-batch",),
    (2, "qwen2", "pp2 vpp2"): ("smallest budget", "fewer rows than ranks"),
    (2, "qwen2", "cp2"): ("smallest budget", *MODES),
    (2, "qwen3-moe", "ep2"): ("smallest budget", "fewer rows than ranks"),
    (4, "qwen2", "pp2 vpp2 dp"): ("rows on rank 0", "fewer rows than ranks"),
}


def fields_of(layout):
    """Config fields of a layout, e.g. "tp2 padded"."""
    fields = {}
    for word in layout.split():
        fields |= OPTIONS[word] if word in OPTIONS else {f"{SIZES[word[:-1]]}_parallel_size": int(word[-1])}
    return fields


def layouts(ranks):
    """(model, layout) of all layouts of this number of ranks."""
    return [(model, layout) for model, words in LAYOUTS[ranks].items() for layout in words.split(", ")]


def whole_of(worker, part):
    """name -> whole tensor of part(AdamW, p), for every weight that trains (a collective). p is this rank's
    part of the float32 weight; part returns its gradient, a moment, or p itself."""

    def local(name, p):
        if not p.requires_grad:
            return None
        flat = torch.zeros(p.numel())
        if p in worker.critic.masters:
            adam, mine, place = worker.critic.masters[p]
            flat[place] = part(adam, mine).detach()
        dist.all_reduce(flat, group=cm.groups_of(name)[1])
        return flat.view_as(p)

    return union(worker, local)


def computed(worker):
    """name -> whole tensor, of every weight as the forward uses it."""
    return union(worker, lambda name, p: p.detach())


def union(worker, local):
    """All that the ranks would write, as one dict; no two ranks write the same rows of a weight."""
    mine = cm.whole_weights(worker.critic.modules, worker.model_config.vocab_size, local)
    every = common.of_all_ranks({name: x.numpy() for name, x in mine.items()})  # faster than tensors
    whole = {name: torch.from_numpy(x) for some in every for name, x in some.items()}
    assert len(whole) == sum(map(len, every))
    return {name: x for name, (_, x) in cm.join_experts(whole).items()}


def assert_replicas_agree(critic):
    """Ranks that hold the same part of a weight, or all of an unsharded one, hold the same bits."""
    for name, p in cm.named_weights(critic.modules):
        groups = [cm.groups_of(name)[1]]
        if cm.hf_names(name)[0] == "whole":
            groups.append(cm.groups_of(name)[0])
        for group in groups:
            most, least = p.detach().clone(), p.detach().clone()
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
            assert torch.equal(most, least), f"{name} differs between ranks by {(most - least).abs().max()}"


def noted_gradients(worker):
    """A list to which every step from now on adds the whole gradient before clipping."""
    seen = []
    prepare = worker.critic.optimizer.prepare_grads

    def note():
        prepare()
        seen.append(whole_of(worker, lambda _, p: p.grad))

    worker.critic.optimizer.prepare_grads = note
    return seen


def results_of(model, layout, folder):
    """{(model, layout, case, rows, mode): result} for all cases of a layout."""
    end_groups()
    worker = cm.CriticWorker(cm.Config(model=str(folder / model), weight_decay=0.1, **fields_of(layout)))
    worker.init_model()
    critic, config = worker.critic, worker.config
    assert all(group["wd_mult"] == 1 for group in critic.optimizer.param_groups)  # norms and biases decay too
    seen = noted_gradients(worker)
    smallest = cm.check_budget(config, ROWS["ragged"].longest[0], "the longest row")
    ranks = common.WORLD_SIZE
    spread = range(common.RANK, 11, ranks)
    cases = {  # case -> (rows, this rank's rows, token budget)
        "budget 64": ("ragged", spread, 64),
        "one micro-batch": ("ragged", spread, 1000),
        "smallest budget": ("ragged", spread, smallest),
        "shared": ("equal prompts", range(common.RANK, 14, ranks), 64),
        "rows on rank 0": ("ragged", range(0 if common.RANK else 11), 64),
        "fewer rows than ranks": ("two rows", range(common.RANK, 2, ranks), 64),
        **dict.fromkeys(MODES, ("ragged", spread, 64)),
    }
    results = {}
    for case in (*MORE.get((ranks, model, layout), ()), "shared", "budget 64"):
        rows, mine, budget = cases[case]
        mode = case if case in MODES else "token-mean"
        changes = {"loss_agg_mode": mode, "ppo_max_token_len_per_gpu": budget, "response_length_limit": 50}
        worker.config = critic.config = dataclasses.replace(config, **changes)
        worker.set_budget(ROWS[rows].longest[0], "the longest row")
        step = case == "budget 64"  # the other cases come first and leave the weights unchanged
        critic.peak_lr = 1e-2 * step
        for optimizer in critic.optimizers:
            optimizer.optimizer.state.clear()  # forget the moments of the previous case
        batch = ROWS[rows].select(mine)
        values = worker.compute_values(batch)
        metrics = worker.update_critic(batch)
        assert metrics["critic/skipped_steps"] == 0 and len(seen) == 1
        whole = common.gather(dataclasses.replace(batch, values=values))
        result = {"gradients": seen.pop(), "metrics": metrics, "values": whole.values}
        if step:
            assert_replicas_agree(critic)
            result["weights"] = computed(worker)
        results[model, layout, case, rows, mode] = result
    return results


def some_layouts(out, some):
    """Saves the results of some layouts of this number of ranks."""
    results = {}
    for model, layout in some:
        results |= results_of(model, layout, out / "models")
    if common.RANK == 0:
        torch.save(results, f"{out}/{common.WORLD_SIZE} {some[0]}.pt")


def save_models(folder):
    """Saves the models of all layouts."""
    import test_megatron_layouts

    for name, config in test_megatron_layouts.FOUR_LAYERS.items():
        test_layouts.save_model(config, folder / name)


def on_ranks(name, *args):
    """Calls one of these functions on this rank."""
    import megatron_layouts

    getattr(megatron_layouts, name)(*args)


if __name__ == "__main__":
    out = pathlib.Path(sys.argv[1])
    forked.run(1, on_ranks, "save_models", out / "models")
    for ranks in map(int, sys.argv[2:] or LAYOUTS):
        some = layouts(ranks)
        forked.run(ranks, on_ranks, "some_layouts", out, some)
