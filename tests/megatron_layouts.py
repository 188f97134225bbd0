"""One mini-batch through every layout of critic_megatron.py -> values, gradients before clipping, weights after a step.

    python tests/megatron_layouts.py OUT_FOLDER [RANKS...]        by default on 1, 2, 4 and 8 ranks; models too go there

test_megatron_layouts.py compares them with a plain float64 loop.
"""

import contextlib
import dataclasses
import os
import pathlib
import sys

import forked
import torch

TP, PP, CP, EP, ETP = (
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
)
VPP = "virtual_pipeline_model_parallel_size"
SP_OFF, PADDED = {"sequence_parallel": False}, {"use_remove_padding": False}
RECOMPUTE, SELECTIVE = {"gradient_checkpointing": True}, {"recompute_modules": ("core_attn", "mlp")}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}

LAYOUTS = {  # ranks -> {name: (model, Config fields)}; what is left of the ranks is data-parallel
    1: {
        "one rank": ("qwen2", {}),
        "padded": ("qwen2", PADDED),
        "recompute": ("qwen2", RECOMPUTE),
        "recompute attention and MLP": ("qwen3", SELECTIVE),
        "qwen3": ("qwen3", {}),
        "llama": ("llama", {}),
        "qwen3-moe": ("qwen3-moe", {}),
        "qwen3-moe, recompute": ("qwen3-moe", RECOMPUTE),
    },
    2: {
        "dp 2": ("qwen2", {}),
        "dp 2, overlap": ("qwen2", OVERLAP),
        "tp 2": ("qwen2", {TP: 2, **SP_OFF}),
        "tp 2, sequence parallel": ("qwen2", {TP: 2}),
        "tp 2, sequence parallel, padded": ("qwen2", {TP: 2, **PADDED}),
        "tp 2, sequence parallel, recompute": ("qwen3", {TP: 2, **RECOMPUTE}),
        "pp 2": ("qwen2", {PP: 2}),
        "pp 2, uneven": ("qwen2", {PP: 2, **UNEVEN}),
        "pp 2, padded": ("qwen2", {PP: 2, **PADDED}),
        "pp 2, recompute": ("qwen2", {PP: 2, **RECOMPUTE}),
        "pp 2, vpp 2": ("qwen2", {PP: 2, VPP: 2}),
        "cp 2": ("qwen2", {CP: 2}),
        "cp 2, recompute": ("qwen3", {CP: 2, **RECOMPUTE}),
        "llama, tp 2": ("llama", {TP: 2}),
        "llama, pp 2, vpp 2": ("llama", {PP: 2, VPP: 2}),
        "qwen3-moe, ep 2": ("qwen3-moe", {EP: 2}),
        "qwen3-moe, etp 2": ("qwen3-moe", {TP: 2, ETP: 2}),
        "qwen3-moe, tp 2, ep 2": ("qwen3-moe", {TP: 2, EP: 2, ETP: 1}),
        "qwen3-moe, tp 2, etp 1": ("qwen3-moe", {TP: 2, ETP: 1}),
        "qwen3-moe, tp 1, etp 2": ("qwen3-moe", {ETP: 2}),
    },
    4: {
        "tp 4": ("qwen2", {TP: 4}),
        "pp 4": ("qwen2", {PP: 4}),
        "cp 4": ("qwen2", {CP: 4}),
        "tp 2, pp 2": ("qwen2", {TP: 2, PP: 2}),
        "tp 2, cp 2": ("qwen3", {TP: 2, CP: 2}),
        "pp 2, cp 2": ("qwen2", {PP: 2, CP: 2}),
        "pp 2, vpp 2, dp 2": ("qwen2", {PP: 2, VPP: 2}),
        "tp 2, dp 2, overlap": ("llama", {TP: 2, **OVERLAP}),
        "cp 2, dp 2": ("qwen2", {CP: 2}),
        "qwen3-moe, ep 4": ("qwen3-moe", {EP: 4}),
        "qwen3-moe, ep 2, dp 2": ("qwen3-moe", {EP: 2}),
        "qwen3-moe, ep 2, cp 2": ("qwen3-moe", {EP: 2, CP: 2}),
        "qwen3-moe, pp 2, ep 2": ("qwen3-moe", {PP: 2, EP: 2}),
    },
    8: {
        "tp 2, pp 2, cp 2": ("qwen2", {TP: 2, PP: 2, CP: 2}),
        "tp 2, pp 2, vpp 2, dp 2": ("qwen3", {TP: 2, PP: 2, VPP: 2}),
        "qwen3-moe, tp 2, pp 2, ep 2, etp 2": ("qwen3-moe", {TP: 2, PP: 2, EP: 2, ETP: 2}),
        "qwen3-moe, tp 2, pp 2, vpp 2, cp 2, ep 2": ("qwen3-moe", {TP: 2, PP: 2, VPP: 2, CP: 2, EP: 2, ETP: 1}),
    },
}

BUDGET, ONE_ROW = {"ppo_max_token_len_per_gpu": 64}, {"ppo_micro_batch_size_per_gpu": 1}
MODES = {
    f"{mode}": {**BUDGET, "loss_agg_mode": mode, "response_length_limit": 50}
    for mode in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
}
MORE = {  # what else a layout is put through, where it could matter: names of cases
    "padded": ("1 row", *MODES),
    "dp 2": ("rows on rank 0", "fewer rows than ranks"),
    "tp 2, sequence parallel": ("one micro-batch",),
    "pp 2, vpp 2": ("1 row", "fewer rows than ranks"),
    "cp 2": ("1 row", *MODES),
    "qwen3-moe, ep 2": ("1 row", "fewer rows than ranks"),
    "pp 2, vpp 2, dp 2": ("rows on rank 0", "fewer rows than ranks"),
}


def whole_gradients(critic):
    """name -> whole gradient of every weight. Call it between prepare_grads and the step."""
    return whole_of(critic, lambda optimizer, p: p.grad)


def whole_of(critic, part):
    """name -> whole of what part(optimizer, shard) gives of each shard of a weight that the optimizer steps with: its
    gradient, a moment, the master weight itself (a collective)."""
    import critic_megatron as cm

    local = lambda name, p: critic.master(name, p, part)
    return union(dict(cm.whole_weights(critic.modules, critic.vocab_size, local)))


def assert_replicas_agree(critic):
    """What ranks hold in common they hold alike, bit for bit: replicas, and what tensor parallelism does not cut."""
    import torch.distributed as dist

    import critic_megatron as cm

    head = critic.modules[-1]
    named = head.output_layer.named_parameters() if head.post_process else ()
    for name, p in (*cm.named_weights(critic.modules), *named):
        whole = "." not in name or cm.hf_names(name)[0] == "whole"
        for group in (cm.replicas(name), *([cm.tensor_group(name)[0]] if whole else [])):
            most, least = p.detach().clone(), p.detach().clone()
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
            assert torch.equal(most, least), f"{name} differs between ranks by {(most - least).abs().max()}"


def union(tensors):
    """The dicts of all ranks as one; what several ranks hold must be equal."""
    import torch.distributed as dist

    everywhere, whole = [None] * dist.get_world_size(), {}
    dist.all_gather_object(everywhere, {name: x.numpy() for name, x in tensors.items()})  # faster than tensors
    for some in everywhere:
        for name, x in some.items():
            x = torch.from_numpy(x)
            if not torch.equal(whole.setdefault(name, x), x):
                torch.testing.assert_close(whole[name], x, rtol=1e-6, atol=1e-7, msg=f"{name} differs by rank")
    return fused(whole)


def fused(tensors):
    """Experts one by one -> as transformers holds them, in one tensor a layer."""
    out = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        n = len({name.split(".experts.")[1].split(".")[0] for name in tensors if name.startswith(f"{layer}.experts.")})
        part = lambda i, kind, layer=layer: tensors[f"{layer}.experts.{i}.{kind}_proj.weight"]
        out[f"{layer}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([part(i, "gate"), part(i, "up")]) for i in range(n)]
        )
        out[f"{layer}.experts.down_proj"] = torch.stack([part(i, "down") for i in range(n)])
    return out


@contextlib.contextmanager
def captured_gradients(critic):
    """Inside, the critic notes the whole gradient of every step before it is clipped, in the list this yields."""
    seen, norm = [], critic.optimizer.get_grad_norm

    def note():
        seen.append(whole_gradients(critic))
        return norm()

    critic.optimizer.get_grad_norm = note
    try:
        yield seen
    finally:
        critic.optimizer.get_grad_norm = norm


def build(model, **fields):
    """A CriticWorker with its model."""
    import critic_megatron as cm

    worker = cm.CriticWorker(cm.Config(model=model, **fields))
    worker.init_model()
    worker.critic.vocab_size = worker.vocab_size
    return worker


def some_layouts(out, models, names):
    """Some of the layouts of this number of ranks."""
    from layouts import ROWS

    import common
    import critic_megatron as cm

    results, ranks = {}, common.WORLD_SIZE
    for name in names:
        model, fields = LAYOUTS[ranks][name]
        worker = build(os.path.join(models, model), weight_decay=0.1, lr=1e-2, **fields)
        critic, config = worker.critic, worker.config

        def run(case, rows, mine, worker=worker, critic=critic, config=config, model=model, name=name, step=False,
                **changes):  # fmt: skip
            batch = ROWS[rows].select(mine)
            worker.config = critic.config = dataclasses.replace(config, **changes)
            critic.peak_lr, weight_decay = (1e-2, 0.1) if step else (0.0, 0.0)
            for optimizer in critic.optimizers():
                optimizer.optimizer.state.clear()  # the steps before, with a rate of 0, have left their moments
            for group in critic.optimizer.param_groups:
                group["weight_decay"] = weight_decay
            values = worker.compute_values(batch)
            with captured_gradients(critic) as seen:
                metrics = worker.update_critic(batch)
            assert metrics["critic/skipped_steps"] == 0 and len(seen) == 1
            result = {"gradients": seen.pop(), "metrics": metrics}
            result["values"] = common.gather(dataclasses.replace(batch, values=values)).values
            if step:
                critic.finish_gather()
                assert_replicas_agree(critic)
                result["weights"] = union(dict(cm.whole_weights(critic.modules, worker.vocab_size)))
            results[model, name, case, rows, changes.get("loss_agg_mode", "token-mean")] = result

        spread, rank0 = range(common.RANK, 11, ranks), range(11) if common.RANK == 0 else []
        cases = {  # rows, the ones of this rank, flags
            "one micro-batch": ("eleven", spread, {}),
            "1 row": ("eleven", spread, ONE_ROW),
            "rows on rank 0": ("eleven", rank0, BUDGET),
            "fewer rows than ranks": ("two rows", range(common.RANK, 2, ranks), {}),
            **{mode: ("eleven", spread, flags) for mode, flags in MODES.items()},
        }
        for case in MORE.get(name, ()):
            rows, mine, flags = cases[case]
            run(case, rows, mine, **flags)
        run("budget 64", "eleven", spread, step=True, **BUDGET)
    if common.RANK == 0:
        torch.save(results, os.path.join(out, f"{ranks} {names[0]}.pt"))


def save_models(folder):
    """The models of all layouts."""
    from test_layouts import save_model
    from test_megatron_layouts import FOUR_LAYERS

    for name, config in FOUR_LAYERS.items():
        save_model(config, pathlib.Path(folder) / name)


if __name__ == "__main__":
    out, *sizes = sys.argv[1:]
    models = os.path.join(out, "models")
    forked.run(1, save_models, models)
    for ranks in map(int, sizes or LAYOUTS):
        names = list(LAYOUTS[ranks])
        for i in range(0, len(names), 6):  # dozens of process groups for each layout slow a process down
            forked.run(ranks, some_layouts, out, models, names[i : i + 6])
