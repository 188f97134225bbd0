"""One update on Megatron: values, gradient and step of every layout equal a plain float64 loop."""

import pytest
import torch
import transformers
from helpers import ended, scenarios, succeeded
from megatron_layouts import LAYOUTS, MODES, layouts
from safetensors.torch import load_file
from test_layouts import GROUPED, ROWS, compare, reference_of

SIZES = {**GROUPED, "num_hidden_layers": 4}  # 4 query heads, 2 key and value heads
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
FOUR_LAYERS = {
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "llama": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=None),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, norm_topk_prob=True, shared_expert_intermediate_size=0, **MIXTURE
    ),  # the 0 is in the configs of Qwen3-Coder
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen2-moe": transformers.Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=48, **MIXTURE),
}


@pytest.fixture(scope="module")
def launched():
    """(folder that megatron_layouts.py writes, model -> (rows, mode) -> results of the float64 loop)."""
    waits_for, out = scenarios(1, "megatron_layouts.py")
    succeeded(ended(waits_for))
    cases = {name: [(rows, "token-mean") for rows in ("ragged", "equal prompts")] for name in FOUR_LAYERS}
    cases["qwen2"] += [("two rows", "token-mean"), *(("ragged", mode) for mode in MODES)]
    cases["qwen3-moe"].append(("two rows", "token-mean"))
    references = {}
    for name, some in cases.items():
        of = lambda rows, mode, name=name: reference_of(out / "models" / name, ROWS[rows], mode)
        references[name] = {case: of(*case) for case in some}
    return out, references


def stepped(weights, gradients, lr=1e-2, weight_decay=0.1, clip=1.0, eps=1e-8):
    """Weights after one step of AdamW from a fresh state, in float64 (1711.05101, algorithm 2)."""
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    scale = min(1.0, float(clip / (norm + 1e-6)))
    out = {}
    for n, g in gradients.items():
        out[n] = weights[n].double() * (1 - lr * weight_decay) - lr * g * scale / ((g * scale).abs() + eps)
    return out


@pytest.mark.parametrize("ranks, cases", [(1, 18), (2, 47), (4, 34), (8, 8)])
def test_every_layout_makes_the_same_values_gradient_and_step(ranks, cases, launched):
    out, references = launched
    results = {}
    for path in out.glob(f"{ranks} *.pt"):
        results |= torch.load(path, weights_only=True)
    assert len(results) == cases and LAYOUTS.keys() == {1, 2, 4, 8}
    print(f"\n{'largest difference':36s} gradient     step   of {ranks} ranks")
    for model, layout in layouts(ranks):
        some = {key: x for key, x in results.items() if key[:2] == (model, layout)}
        error = compare(some, references[model])[layout]
        after = next(x["weights"] for x in some.values() if "weights" in x)
        gradients = references[model]["ragged", "token-mean"][2]
        expected = stepped(weights_of(out / "models" / model), gradients)
        assert after.keys() == expected.keys()
        # where the gradient is almost 0, AdamW divides rounding errors by each other
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        sizeable = {n: g.abs() > 1e-5 * norm for n, g in gradients.items()}
        step = max(float(((after[n] - expected[n]).abs() * sizeable[n]).max()) for n in after)
        assert step < 1e-6, (model, layout, step)
        assert sum(int(x.sum()) for x in sizeable.values()) > 0.7 * sum(x.numel() for x in sizeable.values())
        print(f"{model:10s} {layout:25s} {error:8.1e} {step:8.1e}")


def weights_of(folder):
    """All stored weights under the critic's names, with all experts of a layer in one tensor."""
    state = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).state_dict()
    return {f"model.{n}": x for n, x in state.items()} | load_file(folder / "value_head.safetensors")
