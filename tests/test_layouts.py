"""One batch, one update: the gradient before clipping is the same on every layout, and it is that of a plain loop."""

import pytest
import torch
import transformers
from helpers import ROOT, rows_of, succeeded, torchrun
from layouts import ROWS

import common

CLIP, LIMIT = 0.5, 50


SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, num_labels=1, classifier_dropout=0.0,
    tie_word_embeddings=False,
)  # fmt: skip
MODELS = {
    "qwen2": transformers.Qwen2Config(**SIZES),
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),  # soft caps
    "gpt-oss": transformers.GptOssConfig(  # attention sinks
        **SIZES, head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


def save_model(name, folder):
    """A small value model with weights large enough that no gradient is negligible."""
    torch.manual_seed(0)
    model = transformers.AutoModelForTokenClassification.from_config(MODELS[name])
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


def reference_of(folder):
    """A function (rows, mode) -> values, loss and gradients by one sequence after another, in float64."""
    model = transformers.AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    model.set_experts_implementation("eager")  # grouped products know no float64

    def compute(rows, mode):
        batch, values, losses = ROWS[rows], torch.zeros(len(ROWS[rows].input_ids)), []
        model.zero_grad()
        for start, end in rows_of(batch):
            v = model(input_ids=batch.input_ids[start:end][None]).logits[0, :, 0]
            of_row = []
            for t in range(start, end):
                if batch.response_mask[t]:
                    before, old, target = v[t - start - 1], batch.values[t].double(), batch.returns[t].double()
                    clipped = torch.minimum(torch.maximum(before, old - CLIP), old + CLIP)
                    of_row.append(0.5 * torch.maximum((before - target) ** 2, (clipped - target) ** 2))
                    values[t] = before.detach()
            if of_row:
                losses.append(torch.stack(of_row))
        loss = {
            "token-mean": lambda: torch.cat(losses).mean(),
            "seq-mean-token-sum": lambda: torch.stack([x.sum() for x in losses]).mean(),
            "seq-mean-token-mean": lambda: torch.stack([x.mean() for x in losses]).mean(),
            "seq-mean-token-sum-norm": lambda: torch.stack([x.sum() / LIMIT for x in losses]).mean(),
        }[mode]()
        loss.backward()
        return values, float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters()}

    return compute


@pytest.fixture(scope="module")
def reference(model_folder):
    compute = reference_of(model_folder)
    return {(r, m): compute(r, m) for r in ROWS for m in common.LOSS_AGG_MODES if r == "ragged" or m == "token-mean"}


@pytest.mark.parametrize("ranks, cases", [(1, 120), (2, 155), (4, 160)])
def test_every_layout_makes_the_same_gradient(ranks, cases, model_folder, reference, tmp_path):
    succeeded(torchrun(ranks, ROOT / "tests" / "layouts.py", model_folder, tmp_path / "out.pt"))
    worst = compare(tmp_path / "out.pt", reference, cases)
    print(f"\nlargest relative difference of a gradient to float64, {ranks} ranks, {cases} cases")
    for layout, error in worst.items():
        print(f"  {layout:42s} {error:.1e}")


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen2"])
def test_windows_soft_caps_sinks_and_experts_make_it_too(name, tmp_path):
    folder = save_model(name, tmp_path / "model")
    layouts = ("fsdp2, packed", "fsdp2, padded", "none, packed, recompute", "fsdp1, ulysses 2")
    succeeded(torchrun(2, ROOT / "tests" / "layouts.py", folder, tmp_path / "out.pt", *layouts))
    compare(tmp_path / "out.pt", {("ragged", "token-mean"): reference_of(folder)("ragged", "token-mean")}, 4)


def compare(path, reference, cases):
    """Asserts that every result equals its reference to 1e-5 -> worst relative difference of each layout."""
    results, worst = torch.load(path, weights_only=True), {}
    assert len(results) == cases
    for (layout, case, rows, mode), result in results.items():
        values, loss, gradients = reference[rows, mode]
        assert result["gradients"].keys() == gradients.keys()
        floor = 1e-3 * max(g.abs().max() for g in gradients.values())  # a key's bias has no gradient but rounding
        error = max(
            float((result["gradients"][n] - g).abs().max() / torch.maximum(g.abs().max(), floor))
            for n, g in gradients.items()
        )
        norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
        what = (layout, case, mode, error)
        assert error < 1e-5, what
        torch.testing.assert_close(result["values"], values, rtol=1e-5, atol=1e-5, msg=str(what))
        assert result["metrics"]["critic/vf_loss"] == pytest.approx(loss, rel=1e-5), what
        assert result["metrics"]["critic/grad_norm"] == pytest.approx(norm, rel=1e-5), what
        worst[layout] = max(worst.get(layout, 0.0), error)
    return worst
