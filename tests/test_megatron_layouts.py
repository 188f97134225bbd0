"""One batch, one update, on Megatron: every layout's values, gradient and step are those of a plain float64 loop."""

import pytest
import torch
import transformers
from helpers import ended, scenarios, succeeded
from megatron_layouts import LAYOUTS, MODES
from safetensors.torch import load_file
from test_layouts import GROUPED, compare, reference_of

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FOUR_LAYERS = {  # so that there is something to share out; queries of 4 heads, keys and values of 2
    "qwen2": transformers.Qwen2Config(**{**GROUPED, "num_hidden_layers": 4}, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**{**GROUPED, "num_hidden_layers": 4}, head_dim=16),
    "llama": transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 4}, rope_parameters=LLAMA3),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **{**GROUPED, "num_hidden_layers": 4}, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, mlp_only_layers=[1], norm_topk_prob=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def launched():
    """The folder of what megatron_layouts.py makes."""
    waits_for, out = scenarios(1, "megatron_layouts.py")
    succeeded(ended(waits_for))
    return out


@pytest.fixture(scope="module")
def models(launched):
    return launched / "models"


@pytest.fixture(scope="module")
def references(models):
    out = {
        name: {("eleven", "token-mean"): reference_of(models / name, "eleven", "token-mean")} for name in FOUR_LAYERS
    }
    out["qwen2"] |= {("eleven", mode): reference_of(models / "qwen2", "eleven", mode) for mode in MODES}
    for name in ("qwen2", "qwen3-moe"):
        out[name]["two rows", "token-mean"] = reference_of(models / name, "two rows", "token-mean")
    return out


@pytest.fixture(scope="module")
def results(launched):
    """What megatron_layouts.py makes of every layout: ranks -> case -> result."""
    load = lambda ranks: [torch.load(path, weights_only=True) for path in sorted(launched.glob(f"{ranks} *.pt"))]
    return {ranks: {case: x for some in load(ranks) for case, x in some.items()} for ranks in LAYOUTS}


def stepped(weights, gradients, lr=1e-2, weight_decay=0.1, clip=1.0, eps=1e-8):
    """Weights after one step of AdamW from a fresh state, in float64 (Loshchilov & Hutter 1711.05101, alg. 2)."""
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    scale = min(1.0, float(clip / (norm + 1e-6)))
    return {
        n: w.double() * (1 - lr * weight_decay) - lr * g * scale / ((g * scale).abs() + eps)
        for (n, g), w in zip(gradients.items(), (weights[n] for n in gradients), strict=True)
    }


@pytest.mark.parametrize("ranks, cases", [(1, 12), (2, 31), (4, 15), (8, 4)])
def test_every_layout_makes_the_same_values_gradient_and_step(ranks, cases, models, references, results):
    results = results[ranks]
    print(f"\n{'layout':42s} {'values':>8s} {'gradient':>8s} {'step':>8s}   of {ranks} ranks")
    for name, (model, _) in LAYOUTS[ranks].items():
        some = {key: x for key, x in results.items() if key[:2] == (model, name)}
        gradient = compare(some, references[model])[name]
        values = max(float((x["values"] - references[model][rows, mode][0]).abs().max())
                     for (*_, rows, mode), x in some.items())  # fmt: skip
        after = next(x["weights"] for x in some.values() if "weights" in x)
        before = weights_of(models / model)
        gradients = references[model]["eleven", "token-mean"][2]
        expected = stepped(before, gradients)
        assert after.keys() == expected.keys()
        # where the gradient is next to nothing AdamW divides rounding by rounding
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        sizeable = {n: g.abs() > 1e-5 * norm for n, g in gradients.items()}
        step = max(float((after[n] - expected[n])[sizeable[n]].abs().max()) for n in after if sizeable[n].any())
        assert step < 1e-6, (name, step)
        assert sum(int(x.sum()) for x in sizeable.values()) > 0.7 * sum(x.numel() for x in sizeable.values())
        print(f"{name:42s} {values:8.1e} {gradient:8.1e} {step:8.1e}")
    assert len(results) == cases


def weights_of(folder):
    """All weights as stored, named as in the critic, experts of a layer in one tensor."""
    state = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).state_dict()
    return {f"model.{n}": x for n, x in state.items()} | load_file(folder / "value_head.safetensors")
