"""Vision-language critics: every layout makes the update of one sequence after another through the plain model."""

import base64
import dataclasses
import io
import json

import pytest
import torch
import transformers
from helpers import ROOT, random_batch, rows_of, succeeded, torchrun
from PIL import Image
from safetensors.torch import load_file, save_file
from vision_layouts import FROZEN, IMAGE, ROWS

import common
import critic_fsdp
from common import UserError
from critic_fsdp import Config, CriticWorker

MODELS = ("tiny-qwen2.5-vl", "tiny-qwen3-vl")


def worker(**fields):
    w = CriticWorker(Config(**fields))
    w.init_model()
    return w


def save_model(name, folder):
    """A checkpoint as users have them, a language model with its head, and a value head beside it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**common.tiny_config(name, len(common.char_tokenizer()) + 3))
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    model.save_pretrained(folder)
    save_file({"score.weight": 0.3 * torch.randn(1, 64), "score.bias": torch.randn(1)}, folder / "value_head.safetensors")
    return folder


@pytest.fixture(scope="module", params=MODELS)
def model_folder(request, tmp_path_factory):
    return save_model(request.param, tmp_path_factory.mktemp("model"))


def reference_of(folder):
    """Values, loss and gradients by one sequence after another, in float64, eager; positions are the model's own."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    head = {n: x.double().requires_grad_() for n, x in load_file(folder / "value_head.safetensors").items()}
    values, losses = torch.zeros(len(ROWS.input_ids)), []
    for (start, end), images in zip(rows_of(ROWS), ROWS.multi_modal_inputs, strict=True):
        ids, images = ROWS.input_ids[start:end][None], dict(images)
        if images:
            images["pixel_values"] = images["pixel_values"].double()
            images["mm_token_type_ids"] = (ids == IMAGE).int()
        model.rope_deltas = None
        hidden = model(input_ids=ids, **images).last_hidden_state[0]
        v = hidden @ head["score.weight"][0] + head["score.bias"]
        for t in range(start, end):
            if ROWS.response_mask[t]:
                before, old, target = v[t - start - 1], ROWS.values[t].double(), ROWS.returns[t].double()
                clipped = torch.minimum(torch.maximum(before, old - 0.5), old + 0.5)
                losses.append(0.5 * torch.maximum((before - target) ** 2, (clipped - target) ** 2))
                values[t] = before.detach()
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {f"model.{n}": p.grad for n, p in model.named_parameters()} | {n: x.grad for n, x in head.items()}
    return values, float(loss.detach()), gradients


def test_every_layout_makes_the_same_update(model_folder, tmp_path):
    values, loss, gradients = reference_of(model_folder)
    largest = max(float(g.abs().max()) for g in gradients.values())
    assert all(g is not None and g.abs().max() > 1e-6 * largest for n, g in gradients.items() if "k_proj.bias" not in n)
    results = {}
    for ranks in (1, 2):
        succeeded(torchrun(ranks, ROOT / "tests" / "vision_layouts.py", model_folder, tmp_path / "out.pt"))
        results |= {(ranks, *k): v for k, v in torch.load(tmp_path / "out.pt", weights_only=True).items()}
    print()
    for (ranks, layout, case), result in results.items():
        expected = {n: g for n, g in gradients.items() if layout not in FROZEN or ".visual." not in n}
        assert result["gradients"].keys() == expected.keys(), layout
        error = max(
            float((result["gradients"][n] - g).abs().max() / max(g.abs().max(), 1e-3 * largest))
            for n, g in expected.items()
        )
        off = float((result["values"] - values).abs().max())
        print(f"  {ranks} ranks, {layout:24s} {case:24s} gradients {error:.1e}, values {off:.1e}")
        assert error < 1e-5 and off < 1e-5, (layout, case, error, off)
        assert result["loss"] == pytest.approx(loss, rel=1e-5)
