"""Vision-language critics: every layout makes the update of one sequence after another through the plain model."""

import base64
import dataclasses
import json

import pytest
import torch
import transformers
from helpers import ROOT, full_weights, random_batch, rows_of, succeeded, torchrun
from PIL import Image
from safetensors.torch import load_file, save_file
from vision_layouts import END, IMAGE, LAYOUTS, ROWS, START, results_of

import common
import critic_fsdp
from common import UserError
from critic_fsdp import Config, CriticWorker

VOCABULARY = len(common.char_tokenizer(common.IMAGE_WORDS))
PRESETS = ("tiny-qwen2.5-vl", "tiny-qwen3-vl")
MODELS = {name: common.tiny_config(name, VOCABULARY) for name in PRESETS}
MODELS["qwen2-vl"] = {
    **MODELS["tiny-qwen2.5-vl"],
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, "patch_size": 14},
}
MODELS["qwen3-vl-moe"] = {
    **MODELS["tiny-qwen3-vl"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **MODELS["tiny-qwen3-vl"]["text_config"],
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    },
}


def worker(**fields):
    w = CriticWorker(Config(**fields))
    w.init_model()
    return w


def save_model(name, folder):
    """A checkpoint as users have them, a language model with its head, and a value head beside it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**MODELS[name])
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    model.save_pretrained(folder)
    save_file(
        {"score.weight": 0.3 * torch.randn(1, 64), "score.bias": torch.randn(1)}, folder / "value_head.safetensors"
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> checkpoint of each kind of model."""
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in MODELS}


@pytest.fixture(scope="module")
def on_two_ranks(folders, tmp_path_factory):
    """folder -> results of every layout on two ranks, the second of which owns no image."""
    out = tmp_path_factory.mktemp("out") / "out.pt"
    succeeded(torchrun(2, ROOT / "tests" / "vision_layouts.py", out, *(folders[name] for name in PRESETS)))
    return torch.load(out, weights_only=True)


def reference_of(folder):
    """Values, loss and gradients by one sequence after another, in float64, eager; positions are the model's own."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.set_experts_implementation("eager")  # grouped products know no float64
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


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_makes_the_same_update(name, folders, on_two_ranks):
    values, loss, gradients = reference_of(folders[name])
    largest = max(float(g.abs().max()) for g in gradients.values())
    vision = [g for n, g in gradients.items() if ".visual." in n]
    assert len(vision) > 20 and all(g.abs().max() > 1e-6 * largest for g in vision)  # none is idle
    layouts = LAYOUTS if name in PRESETS else {"fsdp2": LAYOUTS["fsdp2"]}
    results = {(1, *key): x for key, x in results_of(folders[name], layouts).items()}
    results |= {(2, *key): x for key, x in on_two_ranks.get(str(folders[name]), {}).items()}
    print(f"\n{name}: largest relative difference of a gradient, and of a value, to float64")
    for (ranks, layout, case), result in results.items():
        expected = {n: g for n, g in gradients.items() if not (layout.endswith("frozen") and ".visual." in n)}
        assert result["gradients"].keys() == expected.keys(), layout
        error = max(
            float((result["gradients"][n] - g).abs().max() / max(g.abs().max(), 1e-3 * largest))
            for n, g in expected.items()
        )
        off = float((result["values"] - values).abs().max())
        print(f"  {ranks} ranks  {layout:16s} {case:16s} {error:.1e} {off:.1e}")
        assert error < 1e-5 and off < 1e-5, (layout, case, error, off)
        assert result["loss"] == pytest.approx(loss, rel=1e-5)


def test_positions_are_those_of_each_image_alone():
    """Worked out by hand: text counts up, an image spreads over rows and columns, the text after it goes on."""
    w = worker(model="tiny-qwen3-vl")
    ids = [5, START, *[IMAGE] * 6, END, 7]
    rows = [{"image_grid_thw": torch.tensor([[1, 4, 6]]), "pixel_values": torch.zeros(24, 1176)}, {}]
    both = torch.tensor([*ids, 8, 9, 10])
    ids_T, lengths, inputs = common.with_images(w.critic.model.model, both, [10, 3], rows)
    assert ids_T is both and lengths == [10, 3] and inputs["pixel_values"].shape == (24, 1176)
    assert inputs["position_ids"].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2],
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 0, 1, 2],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 0, 1, 2],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 0, 1, 2],
    ]
    ids_T, lengths, inputs = common.with_images(w.critic.model.model, both[-3:], [3], [{}])  # a black one of one token
    assert ids_T.tolist() == [8, 9, 10, IMAGE] and lengths == [4] and inputs["image_grid_thw"].tolist() == [[1, 2, 2]]


# ---------------------------------------------------------------------------------------------------------------------
# Images in rows
# ---------------------------------------------------------------------------------------------------------------------

SEE = "<|vision_start|><|image_pad|><|vision_end|>"


def draw(path, size, seed=0, **options):
    """Saves a picture of noise -> the picture."""
    g = torch.Generator().manual_seed(seed)
    picture = Image.fromarray(torch.randint(0, 256, (size[1], size[0], 3), generator=g).byte().numpy())
    picture.save(path, **options)
    return picture


def data_url(path):
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


@pytest.fixture
def rollouts(tmp_path):
    """A file of rows with and without images, its pictures beside it."""
    (tmp_path / "pictures").mkdir()
    draw(tmp_path / "pictures" / "a.png", (60, 90), 1)
    draw(tmp_path / "b.png", (112, 56), 2)
    rows = [
        {"prompt": f"{SEE}one", "response": "yes", "images": ["pictures/a.png"]},
        {"prompt": "none", "response": "no"},
        {"prompt": f"{SEE}and{SEE}two", "response": "no", "images": [data_url(tmp_path / "b.png"), "pictures/a.png"]},
        {"prompt": "no list", "response": "maybe", "images": []},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "reward": i % 2}) + "\n" for i, row in enumerate(rows)))
    return path


def read(w, path, **options):
    return common.read_jsonl(
        path, tokenizer=w.tokenizer, image_processor=w.image_processor, image_token_id=IMAGE, **options
    )


@pytest.mark.parametrize("name", PRESETS)
def test_images_of_rows_are_those_of_the_processor(name, rollouts):
    w = worker(model=name)
    batch = read(w, rollouts)
    pictures = [Image.open(rollouts.parent / f) for f in ("pictures/a.png", "b.png", "pictures/a.png")]
    a, b, _ = (dict(w.image_processor(images=[p], return_tensors="pt")) for p in pictures)
    assert a["image_grid_thw"].tolist() == [[1, 6, 4]] and b["image_grid_thw"].tolist() == [[1, 4, 8]]
    two = {key: torch.cat([b[key], a[key]]) for key in a}
    placeholders = [(ids == IMAGE).sum().item() for ids in batch.input_ids.split(batch.lengths)]
    assert placeholders == [6, 0, 8 + 6, 0]
    tensors = dataclasses.replace(batch, multi_modal_inputs=[a, {}, two, {}])
    assert torch.equal(w.compute_values(batch), w.compute_values(tensors))
    blind = dataclasses.replace(batch, multi_modal_inputs=[{k: 0 * x for k, x in a.items()}, {}, two, {}])
    blind.multi_modal_inputs[0]["image_grid_thw"] = a["image_grid_thw"]
    differs = (w.compute_values(blind) != w.compute_values(batch)) & batch.response_mask
    assert torch.equal(differs.nonzero()[:, 0], batch.response_mask[: batch.lengths[0]].nonzero()[:, 0])


BAD = {
    "no such file": ({"images": ["c.png"]}, "c.png: FileNotFoundError"),
    "a folder": ({"images": ["pictures"]}, "pictures: IsADirectoryError"),
    "not an image": ({"images": ["rows.jsonl"]}, "rows.jsonl: UnidentifiedImageError"),
    "cut short": ({"images": ["cut.jpg"]}, "cut.jpg: OSError: image file is truncated"),
    "not base64": ({"images": ["data:image/png;base64,iVBORw0"]}, "image data:image/png;base64,iVBORw0: "),
    "a strip": ({"images": ["strip.png"]}, "strip.png: ValueError: absolute aspect ratio must be smaller than 200"),
    "not a list": ({"images": "b.png"}, "images must be a list of file names or data URLs"),
    "not text": ({"images": [7]}, "images must be a list of file names or data URLs"),
    "more images than placeholders": ({"images": ["b.png"] * 2}, "runs of [1] tokens, its images have [8, 8]"),
    "no image": ({}, "placeholders stand in runs of [1] tokens, its images have 0"),
    "no placeholder": ({"prompt": "hi", "images": ["b.png"]}, "runs of 0 tokens, its images have [8]"),
    "ids with one for all": (
        {"prompt": None, "prompt_ids": [5, IMAGE, 6], "images": ["b.png"]},
        "placeholders stand in runs of [1] tokens, its images have [8]",
    ),
    "images without a gap": (
        {"prompt": None, "prompt_ids": [5, *[IMAGE] * 16, 6], "images": ["b.png", "b.png"]},
        "placeholders stand in runs of [16] tokens, its images have [8, 8]",
    ),
}


def test_a_bad_image_is_a_bad_row(rollouts):
    draw(rollouts.parent / "strip.png", (1, 300))
    draw(rollouts.parent / "whole.jpg", (100, 100))
    (rollouts.parent / "cut.jpg").write_bytes((rollouts.parent / "whole.jpg").read_bytes()[:2000])
    w, good = CriticWorker(Config(model="tiny-qwen3-vl")), rollouts.read_text()
    for name, (change, fault) in BAD.items():
        bad = {"prompt": f"{SEE}?", "response": "a", "reward": 1, **change}
        rollouts.write_text(good + json.dumps(bad) + "\n")
        with pytest.raises(UserError) as error:
            read(w, rollouts)
        line = str(error.value)
        assert line.startswith(f"--rollouts {rollouts}:5: ") and fault in line and "\n" not in line, (name, line)
        assert read(w, rollouts, skip_bad_rows=True).row_id.tolist() == [0, 1, 2, 3], name
    rollouts.write_text(good)
    with pytest.raises(UserError, match=":1: it has images, this model reads text only"):
        common.read_jsonl(rollouts, tokenizer=w.tokenizer)
    with pytest.raises(UserError, match=":1: it has images, and .* no preprocessor_config.json"):
        common.read_jsonl(rollouts, tokenizer=w.tokenizer, image_token_id=IMAGE)


def test_images_that_do_not_fit_a_batch_are_refused_by_row():
    w = worker(model="tiny-qwen3-vl")
    for change, fault in (
        (lambda images: images.__setitem__(2, {}), "row 2: placeholders stand in runs of"),
        (lambda images: images.__setitem__(1, images[0]), "row 1: placeholders stand in runs of 0 tokens"),
        (
            lambda images: images[4].update(pixel_values_videos=0),
            "row 4: multi_modal_inputs: .* no pixel_values_videos",
        ),
    ):
        batch = ROWS.select(range(5))
        batch.multi_modal_inputs = [dict(images) for images in batch.multi_modal_inputs]
        change(batch.multi_modal_inputs)
        with pytest.raises(ValueError, match=fault):
            w.compute_values(batch)
    with pytest.raises(ValueError, match="row 2: multi_modal_inputs: this critic reads text only"):
        worker(override_config=json.dumps({"vocab_size": 120})).compute_values(ROWS.select([1, 2, 4]))


def test_rows_with_and_without_the_column_go_together():
    batch = common.concat([ROWS.select([1]), dataclasses.replace(ROWS.select([3]), multi_modal_inputs=None)])
    assert batch.multi_modal_inputs == [{}, {}]
    batch = common.concat([dataclasses.replace(ROWS.select([3, 1]), multi_modal_inputs=None), ROWS.select([0])])
    assert batch.multi_modal_inputs[:2] == [{}, {}] and len(batch.multi_modal_inputs) == len(batch) == 3
    pieces = common.gather(batch).split(2)
    assert [len(x.get("image_grid_thw", ())) for p in pieces for x in p.multi_modal_inputs] == [1, 0, 0]


# ---------------------------------------------------------------------------------------------------------------------
# A frozen tower, folders, and what is refused
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "none"])
def test_a_frozen_tower_stays_as_it_is_and_has_no_optimizer_state(strategy, tmp_path):
    w = worker(model="tiny-qwen2.5-vl", strategy=strategy, freeze_vision_tower=True, weight_decay=0.5)
    before = full_weights(w.critic)
    assert w.update_critic(ROWS)["critic/skipped_steps"] == 0
    after = full_weights(w.critic)
    for name, x in after.items():
        assert torch.equal(x, before[name]) == (".visual." in name), name
    tensors, _, _ = critic_fsdp.checkpoint_tensors(w.critic.model, w.critic.optimizer)
    trained = {n.split(".", 1)[1].rsplit(".", 1)[0] for n in tensors if n.startswith("optimizer.")}
    assert trained == {n for n in after if ".visual." not in n}
    w.save_checkpoint(tmp_path / "checkpoint")
    w.update_critic(ROWS)
    expected = w.compute_values(ROWS)
    again = worker(model="tiny-qwen2.5-vl", strategy=strategy, freeze_vision_tower=True, weight_decay=0.5)
    again.load_checkpoint(tmp_path / "checkpoint")
    again.update_critic(ROWS)
    assert torch.equal(again.compute_values(ROWS), expected)


def test_what_is_frozen_has_no_adapters_and_what_is_not_trains():
    w = worker(model="tiny-qwen3-vl", freeze_vision_tower=True, lora_rank=2)
    trains = {n for n, p in w.critic.model.named_parameters() if p.requires_grad}
    assert trains and not any(
        ".visual." in n for n in trains | {n for n, _ in w.critic.model.named_parameters() if "lora" in n}
    )
    w = worker(model="tiny-qwen3-vl", freeze_layers=1)
    still = {n for n, p in w.critic.model.named_parameters() if not p.requires_grad}
    assert still and not any(".visual." in n for n in still)


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_folder_gives_the_same_values(name, folders, rollouts, tmp_path):
    w = worker(model=str(folders[name]))
    w.update_critic(ROWS)
    w.image_processor = worker(model="tiny-qwen2.5-vl").image_processor
    w.export_hf(tmp_path / "hf")
    again = worker(model=str(tmp_path / "hf"), tokenizer=None)
    torch.testing.assert_close(again.compute_values(ROWS), w.compute_values(ROWS), rtol=0, atol=0)
    lines = [json.dumps({"prompt_ids": [3, *[IMAGE] * 8], "response_ids": [4], "reward": 1, "images": ["b.png"]})]
    batch = common.rows_to_batch(
        lines, "rows", image_processor=again.image_processor, image_token_id=IMAGE, folder=tmp_path
    )
    assert again.compute_values(batch)[-1] != 0


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "none"])
def test_bfloat16_is_close(strategy, folders):
    fields = dict(model=str(folders["tiny-qwen3-vl"]), strategy=strategy)
    exact = worker(**fields).compute_values(ROWS)
    w = worker(**fields, param_dtype="bfloat16")
    torch.testing.assert_close(w.compute_values(ROWS), exact, rtol=0, atol=0.05 * float(exact.abs().max()))
    assert w.update_critic(ROWS)["critic/skipped_steps"] == 0


def test_a_run_from_rows_with_images(rollouts, tmp_path, capsys):
    flags = dict(rollouts=str(rollouts), eval_rollouts=str(rollouts), steps=2, out_dir=str(tmp_path / "out"))
    critic_fsdp.main(critic_fsdp.Run(critic=Config(model="tiny-qwen3-vl", freeze_vision_tower=True), **flags))
    assert "saved " in capsys.readouterr().out
    worker(model=str(tmp_path / "out" / "hf"))


def test_flops_are_those_of_the_language_model():
    for name in PRESETS:
        config = transformers.AutoConfig.for_model(**MODELS[name])
        with torch.device("meta"):
            model, text = (
                transformers.AutoModel.from_config(config),
                transformers.AutoModel.from_config(config.text_config),
            )
        assert common.flops_model(model, config) == common.flops_model(text, config.text_config)


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(UserError, match="--freeze-vision-tower: tiny-qwen2 .* reads text only"):
        CriticWorker(Config(freeze_vision_tower=True))
    text = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="Gemma3Model may let the tokens of an image .*; add --no-use-remove-padding$"):
        worker(model=str(tmp_path))
    w = worker(model=str(tmp_path), use_remove_padding=False)
    w.update_critic(random_batch(4))
    with pytest.raises(ValueError, match="row 0: multi_modal_inputs: this critic reads text only"):
        w.compute_values(dataclasses.replace(random_batch(1), multi_modal_inputs=ROWS.multi_modal_inputs[:1]))
