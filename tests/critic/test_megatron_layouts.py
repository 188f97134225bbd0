"""One update on Megatron: values, gradient and step of every layout equal a plain float64 loop."""

import dataclasses

import helpers
import pytest
import torch
import transformers
from forked import scenario
from helpers import part_of, ran
from megatron_helpers import assert_replicas_agree, computed, noted_gradients
from reference import GROUPED, MODES, ROWS, compare, references, save_results
from safetensors.torch import load_file

import critic_megatron as cm
from common import WORLD_SIZE

FOUR = {**GROUPED, "num_hidden_layers": 4}  # 4 query heads, 2 key and value heads
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {  # 6 of 8 features are turned, in 3 pairs
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "factor": 2.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 4.0],
}  # fmt: skip
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}  # 8 tokens matter in rows of up to 40
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
SIGMOID = {  # as in DeepSeek-V3, with a dense layer first
    "num_experts_per_tok": 4, "n_routed_experts": 8, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2,
}  # fmt: skip
MODELS = {
    "qwen2": transformers.Qwen2Config(**FOUR, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**FOUR, head_dim=16),
    "llama": transformers.LlamaConfig(**FOUR, rope_parameters=LLAMA3),
    "mistral": transformers.MistralConfig(**FOUR, head_dim=16, **WINDOW),  # in every layer
    "ministral": transformers.MinistralConfig(**FOUR, head_dim=16, **WINDOW, layer_types=MIXED),
    "qwen3-window": transformers.Qwen3Config(**FOUR, head_dim=16, **WINDOW, layer_types=MIXED),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **FOUR, head_dim=8, norm_topk_prob=True, shared_expert_intermediate_size=0, **MIXTURE
    ),  # the 0 is in the configs of Qwen3-Coder
    "mixtral": transformers.MixtralConfig(**FOUR, num_local_experts=4),
    "yarn": transformers.LlamaConfig(**FOUR, rope_parameters=YARN),
    "phi3": transformers.Phi3Config(
        **FOUR, sliding_window=8, original_max_position_embeddings=64, rope_parameters=LONG
    ),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **FOUR, shared_expert_intermediate_size=48, **MIXTURE, **WINDOW, layer_types=MIXED
    ),
    "glm4-moe": transformers.Glm4MoeConfig(
        **FOUR, **SIGMOID, n_shared_experts=2, head_dim=16, use_qk_norm=True, attention_bias=True
    ),  # half of the features are turned
    "dots1": transformers.Dots1Config(
        **FOUR, **SIGMOID, n_shared_experts=1, sliding_window=8, layer_types=MIXED
    ),
    "solar-open": transformers.SolarOpenConfig(**FOUR, **SIGMOID, head_dim=8),
    "gpt-oss": transformers.GptOssConfig(
        **FOUR,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        swiglu_limit=0.5,
        rope_parameters=YARN,
    ),  # a limit that many numbers reach
    "biased": transformers.LlamaConfig(**FOUR, attention_bias=True, mlp_bias=True),
    "seed-oss": transformers.SeedOssConfig(**FOUR, head_dim=16),
    "cwm": transformers.CwmConfig(**FOUR, head_dim=16, sliding_window=8, rope_parameters=LLAMA3),
}

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
    1: {
        "qwen2": "dp, padded, recompute",
        "qwen3": "dp",
        "llama": "dp",
        "qwen3-moe": "dp, recompute",
        "mistral": "dp, padded",
        "qwen3-window": "dp",
        "yarn": "dp",
        "phi3": "dp, padded",
        "glm4-moe": "dp, recompute",
        "gpt-oss": "dp, recompute",
    },
    2: {
        "qwen2": "dp, tp2, tp2 whole-rows, tp2 padded, cp2, pp2, pp2 padded, "
        "pp2 recompute, pp2 vpp2",
        "qwen3": "tp2 recompute, cp2 recompute",
        "llama": "tp2, pp2 vpp2",
        "qwen3-moe": "ep2, etp2, tp2 etp1, tp2 etp2, tp2 ep2 etp1",
        "mistral": "tp2, cp2, pp2",
        "qwen3-window": "tp2, cp2, pp2 vpp2",
        "yarn": "cp2",
        "phi3": "tp2, cp2, pp2",
        "glm4-moe": "tp2, cp2, pp2, ep2",
        "gpt-oss": "tp2 etp1, cp2, pp2, ep2",
        "biased": "tp2, tp2 whole-rows",
    },
    4: {
        "qwen2": "tp4, pp4, cp4, tp2 pp2, pp2 cp2, pp2 vpp2 dp, cp2 dp",
        "qwen3": "tp2 cp2",
        "llama": "tp2 dp",
        "mistral": "tp2 pp2, tp2 cp2",
        "ministral": "tp2 pp2",
        "phi3": "tp4, tp2 cp2",
        "glm4-moe": "pp2 ep2, tp2 ep2 etp1",
        "gpt-oss": "pp2 ep2, tp2 ep2 etp1, ep2 cp2, tp4 etp1",
        "dots1": "ep2 cp2",
        "solar-open": "tp2 pp2",
        "seed-oss": "tp2 pp2",
        "cwm": "tp2 cp2",
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

CASES = {  # name -> rows, and the budget of a micro-batch; None: the smallest
    "smallest budget": ("ragged", None),
    "one micro-batch": ("ragged", 1000),
    "rows on rank 0": ("ragged", 64),
    "fewer rows than ranks": ("two rows", 64),
    "shared": ("equal prompts", 64),
    "segments": ("segments", 64),
    **{mode: ("ragged", 64) for mode in MODES[1:]},
    "budget 64": ("ragged", 64),
}
MORE = {  # cases in addition to "budget 64" that could go wrong on a layout
    (1, "qwen2", "padded"): ("smallest budget", *MODES[1:]),
    (2, "qwen2", "dp"): ("rows on rank 0", "fewer rows than ranks"),
    (2, "qwen2", "tp2"): ("one micro-batch",),
    (2, "qwen2", "pp2 vpp2"): ("smallest budget", "fewer rows than ranks"),
    (2, "qwen2", "cp2"): ("smallest budget", *MODES[1:]),
    (2, "qwen3-moe", "ep2"): ("smallest budget", "fewer rows than ranks"),
    (4, "qwen2", "pp2 vpp2 dp"): ("rows on rank 0", "fewer rows than ranks"),
}


def fields_of(layout):
    """Config fields of a layout, e.g. "tp2 padded"."""
    fields = {}
    for word in layout.split():
        if word in OPTIONS:
            fields |= OPTIONS[word]
        else:
            fields[f"{SIZES[word[:-1]]}_parallel_size"] = int(word[-1])
    return fields


def results_of(model, layout, folder):
    """{(model, layout, case, rows, mode): result} for all cases of a layout."""
    helpers.end_groups()
    worker = helpers.worker(
        script=cm, model=str(folder / model), weight_decay=0.1, **fields_of(layout)
    )
    critic, config = worker.critic, worker.config
    # norms and biases decay too
    assert all(group["wd_mult"] == 1 for group in critic.optimizer.param_groups)

    seen = noted_gradients(worker)
    smallest = cm.check_budget(config, ROWS["ragged"].longest[0], "the longest row")
    results = {}

    # dense, mixtures, and windows
    shares = ("qwen2", "qwen3-moe", "mistral", "qwen3-window", "phi3", "glm4-moe", "gpt-oss")
    shared = ("shared",) if model in shares else ()
    if model == "qwen2":
        shared = ("shared", "segments")
    for case in (*MORE.get((WORLD_SIZE, model, layout), ()), *shared, "budget 64"):
        rows, budget = CASES[case]
        mode = case if case in MODES else "token-mean"
        changes = {
            "loss_agg_mode": mode,
            "ppo_max_token_len_per_gpu": budget or smallest,
            "response_length_limit": 50 if mode == MODES[-1] else None,
        }
        worker.config = critic.config = dataclasses.replace(config, **changes)
        worker.set_budget(ROWS[rows].longest[0], "the longest row")
        step = case == "budget 64"  # the other cases come first and leave the weights unchanged
        critic.peak_lr = 1e-2 * step
        for optimizer in critic.optimizers:
            optimizer.optimizer.state.clear()  # forget the moments of the previous case
        batch = part_of(case, ROWS[rows])
        values = worker.compute_values(batch)
        metrics = worker.update_critic(batch)
        assert metrics["critic/skipped_steps"] == 0 and len(seen) == 1
        whole = helpers.gather(dataclasses.replace(batch, values=values))
        result = {"gradients": seen.pop(), "metrics": metrics, "values": whole.values}
        if step:
            assert_replicas_agree(critic)
            result["weights"] = computed(worker)
        results[model, layout, case, rows, mode] = result

    critic.peak_lr = 0.0
    helpers.assert_old_values_come_along(worker, batch)
    return results


def every_layout(folder, model):
    """Results of one model on all its layouts of these ranks."""
    jobs = [(model, layout) for layout in LAYOUTS[WORLD_SIZE][model].split(", ")]
    save_results(folder, f"{model} on {WORLD_SIZE}.pt", MODELS, results_of, jobs)


ALL = [(ranks, model) for ranks, models in LAYOUTS.items() for model in models]
for ranks, model in ALL:
    scenario(ranks, f"{model} on {ranks}", args=(model,))(every_layout)


def stepped(weights, gradients, lr=1e-2, weight_decay=0.1, clip=1.0, eps=1e-8):
    """Weights after one step of AdamW from a fresh state, in float64 (1711.05101, algorithm 2)."""
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    scale = min(1.0, float(clip / (norm + 1e-6)))
    out = {}
    for n, g in gradients.items():
        up = g * scale / ((g * scale).abs() + eps)
        out[n] = weights[n].double() * (1 - lr * weight_decay) - lr * up
    return out


@pytest.mark.parametrize("ranks, model", ALL)
def test_every_layout_makes_the_same_values_gradient_and_step(ranks, model):
    out = ran(every_layout, name=f"{model} on {ranks}")
    results = torch.load(out / f"{model} on {ranks}.pt", weights_only=True)
    reference = references(out / model)
    print(f"\n{'largest difference':36s} gradient     step   of {ranks} ranks")

    for layout in LAYOUTS[ranks][model].split(", "):
        some = {key: x for key, x in results.items() if key[1] == layout}
        assert "budget 64" in {case for _, _, case, *_ in some}
        error = compare(some, reference)[layout]
        after = next(x["weights"] for x in some.values() if "weights" in x)
        gradients = reference("ragged", "token-mean")[2]
        before = weights_of(out / model)
        expected = before | stepped(before, gradients)  # a router's correction does not train
        assert after.keys() == expected.keys()
        # where the gradient is almost 0, AdamW divides rounding errors by each other
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        sizeable = {n: g.abs() > 1e-5 * norm for n, g in gradients.items()}
        errors = [(after[n] - x).abs() * sizeable.get(n, True) for n, x in expected.items()]
        step = max(float(x.max()) for x in errors)
        assert step < 1e-6, (model, layout, step)
        assert torch.cat([x.flatten() for x in sizeable.values()]).float().mean() > 0.7
        print(f"{model:10s} {layout:25s} {error:8.1e} {step:8.1e}")


def weights_of(folder):
    """All stored weights under the critic's names, with all experts of a layer in one tensor."""
    state = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).state_dict()
    head = load_file(folder / "value_head.safetensors")
    return {f"model.{n}": x for n, x in state.items()} | head
