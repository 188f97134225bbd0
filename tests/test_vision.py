"""Vision-language critics: layouts compared with one sequence at a time, images in rows, frozen
weights."""

import base64
import dataclasses
import functools
import json

import pytest
import torch
import torch.distributed as dist
import transformers
from forked import scenario
from helpers import (
    STRATEGIES,
    assert_same_weights,
    full_weights,
    mine,
    names_with_moments,
    one_update,
    ran,
    random_batch,
    refused,
    worker,
)
from PIL import Image
from reference import DELTA, assert_agrees, reference_of
from safetensors.torch import save_file

import common
import critic_fsdp
from common import UserError
from critic_fsdp import Config, CriticWorker

START, IMAGE, END = range(99, 102)  # token ids of the presets
SEE = "<|vision_start|><|image_pad|><|vision_end|>"


def image_rows(images):
    """A Batch with one row for each list of grids (t, h, w) of images in patches; row i has 24 + i
    tokens."""
    g = torch.Generator().manual_seed(1)
    rows = []
    for i, grids in enumerate(images):
        batch = common.Batch.blank(24 + i)
        ids = torch.randint(0, 99, (2 + i,), generator=g).tolist()
        for t, h, w in grids:
            ids += [START, *[IMAGE] * (t * h * w // 4), END]
        batch.row_id = torch.tensor([i])
        batch.response_mask = torch.arange(24 + i) >= len(ids)
        batch.input_ids = torch.randint(0, 99, (24 + i,), generator=g)
        batch.input_ids[: len(ids)] = torch.tensor(ids)
        batch.values, batch.returns = torch.randn(2, 24 + i, generator=g) * batch.response_mask
        pixels = torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 14 * 14, generator=g)
        row = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
        batch.multi_modal_inputs = [row if grids else {}]
        rows.append(batch)
    return common.concat(rows)


ROWS = image_rows([[(1, 4, 4)], [], [(1, 4, 8), (1, 6, 4)], [], [(1, 2, 2)]])
FROZEN = {"freeze_modules": "visual"}
LOWEST = {"freeze_modules": r"embed_tokens|language_model\.layers\.0\."}
LAYOUTS = {
    "fsdp2": {}, "fsdp2, frozen": FROZEN, "padded": {"use_remove_padding": False},
    "fsdp1": {"strategy": "fsdp1", "gradient_checkpointing": True},
    "fsdp1, frozen": {"strategy": "fsdp1", **FROZEN},
    "none": {"strategy": "none"}, "none, frozen": {"strategy": "none", **FROZEN},
    "ulysses": {"ulysses_size": 2, "gradient_checkpointing": True},
    "ulysses, frozen": {"ulysses_size": 2, **FROZEN},
}  # fmt: skip


PARTS = {  # only upper layers of the decoder train, but the tower below them trains, too
    "lora": {"lora_rank": 2},
    "freeze": {
        "freeze_modules": r"embed_tokens|language_model\.layers",
        "gradient_checkpointing": True,
    },
    "ulysses, freeze": {**LOWEST, "ulysses_size": 2},
    "fsdp1, lora": {"strategy": "fsdp1", "lora_rank": 2},
    "fsdp1, freeze": {"strategy": "fsdp1", **LOWEST},
    "none, lora": {"strategy": "none", "lora_rank": 2},
}


def results_of(model, layouts):
    """(layout, tokens of a micro-batch) -> gradients before clipping, values and metrics."""
    results = {}
    for name, fields in layouts.items():
        if common.WORLD_SIZE == 1:
            fields = {key: x for key, x in fields.items() if key != "ulysses_size"}
        w = worker(model=str(model), shuffle=False, weight_decay=0.0, **fields)
        # each case starts from the same weights, because steps do not move them
        w.critic.peak_lr = 0.0
        # 28: a micro-batch per row, and sometimes only one rank has an image; 1000: a single
        # micro-batch
        for tokens in (28, 1000) if name in ("fsdp2", "padded", "ulysses") else (28,):
            budget = tokens // w.config.ulysses_size
            w.config = dataclasses.replace(w.config, ppo_max_token_len_per_gpu=budget)
            w.critic.max_tokens = 0  # the worker then sets it again
            rows = mine(ROWS)
            if common.RANK == 1:  # rows 1 and 3: this rank owns no image and has no such column
                rows.multi_modal_inputs = None
            results[name, tokens] = one_update(w, rows)
    return results


PRESETS = ("tiny-qwen2.5-vl", "tiny-qwen3-vl")
MODELS = {name: common.tiny_config(name, END + 1) for name in PRESETS}
QWEN25, QWEN3 = MODELS.values()
TOWER = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2}
MODELS["qwen2-vl"] = {**QWEN25, "model_type": "qwen2_vl", "vision_config": TOWER}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TEXT = {**QWEN3["text_config"], **EXPERTS}
MODELS["qwen3-vl-moe"] = {**QWEN3, "model_type": "qwen3_vl_moe", "text_config": TEXT}
# these have gated delta nets in some layers of the decoder
DELTA = {**DELTA, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
TEXT = {**QWEN3["text_config"], **DELTA, "layer_types": ["linear_attention", "full_attention"]}
MODELS["qwen3.5"] = {**QWEN3, "model_type": "qwen3_5", "text_config": TEXT}
TEXT = {**TEXT, **EXPERTS, "shared_expert_intermediate_size": 64}
MODELS["qwen3.5-moe"] = {**QWEN3, "model_type": "qwen3_5_moe", "text_config": TEXT}
ON_TWO_RANKS = (*PRESETS, "qwen3.5")


def save_model(name, folder):
    """A checkpoint like those of users: a language model with its head, and a value head."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**MODELS[name])
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for name, p in model.named_parameters():
        p.data += 0.05 * torch.randn_like(p)
        if name.endswith("A_log"):  # else some states are forgotten at once
            p.data.clamp_(max=0.0)
    model.save_pretrained(folder)

    transformers.Qwen2VLImageProcessorPil(patch_size=14).save_pretrained(folder)
    head = {"score.weight": 0.3 * torch.randn(1, 64), "score.bias": torch.randn(1)}
    save_file(head, folder / "value_head.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> the folder of a model."""
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in made.items():
        save_model(name, folder)
    return made


@scenario(ranks=2)
def images_on_every_layout(folder):
    """Results of layouts on rows with images, of which the second rank has none. Models differ in
    how the tower's output is sliced."""
    if common.RANK == 0:
        for name in ON_TWO_RANKS:
            save_model(name, folder / name)
    common.setup_distributed()
    dist.barrier()

    first, second, third = ON_TWO_RANKS
    some = {name: LAYOUTS[name] for name in ("fsdp1", "ulysses", "ulysses, frozen")}
    results = {
        first: results_of(folder / first, LAYOUTS),
        second: results_of(folder / second, some),
        third: results_of(folder / third, some),
        "parts": results_of(folder / first, PARTS),
    }
    if common.RANK == 0:
        torch.save(results, folder / "out.pt")


@pytest.fixture(scope="module")
def on_two_ranks():
    """name of a model, or parts -> results of every layout on two ranks."""
    return torch.load(ran(images_on_every_layout, 2) / "out.pt", weights_only=True)


def images_of(row, ids):
    """The model's inputs for a row's images, in float64; it computes positions itself."""
    images = dict(ROWS.multi_modal_inputs[row])
    if images:
        images["pixel_values"] = images["pixel_values"].double()
        images["mm_token_type_ids"] = (ids == IMAGE).int()
    return images


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_makes_the_same_update(name, folders, on_two_ranks):
    values, loss, gradients = reference_of(folders[name], ROWS, images_of=images_of)
    largest = max(g.abs().max() for g in gradients.values())
    vision = [g.abs().max() for n, g in gradients.items() if ".visual." in n]
    assert len(vision) > 20 and min(vision) > 1e-6 * largest  # all of them matter
    names = ("fsdp2", "fsdp2, frozen", "padded") if name in PRESETS else ("fsdp2",)
    on_one = results_of(folders[name], {layout: LAYOUTS[layout] for layout in names})
    results = {(1, *key): x for key, x in on_one.items()}
    results |= {(2, *key): x for key, x in on_two_ranks.get(name, {}).items()}
    print(f"\n{name}: largest relative difference of a gradient, and of a value, to float64")

    for (ranks, layout, tokens), result in results.items():
        expected = {
            n: g for n, g in gradients.items() if not ("frozen" in layout and ".visual." in n)
        }
        error = assert_agrees((layout, tokens), result, values, loss, expected)
        off = float((result["values"] - values).abs().max())
        print(f"  {ranks} ranks  {layout:16s} {tokens:5d} {error:.1e} {off:.1e}")
        assert off < 1e-5, (layout, tokens, off)


def test_a_frozen_decoder_waits_for_no_rank_without_images(folders, on_two_ranks):
    norms = lambda results: {key: x["metrics"]["critic/grad_norm"] for key, x in results.items()}
    expected = norms(results_of(folders[PRESETS[0]], PARTS))
    assert norms(on_two_ranks["parts"]) == {
        key: pytest.approx(x, rel=1e-5) for key, x in expected.items()
    }


def test_positions_are_those_of_each_image_alone():
    """Worked out by hand: text counts up, an image spreads over rows and columns, then text
    continues."""
    backbone = worker(model="tiny-qwen3-vl").critic.model.model
    ids = torch.tensor([5, START, *[IMAGE] * 6, END, 7, 8, 9, 10])
    image = {"image_grid_thw": torch.tensor([[1, 4, 6]]), "pixel_values": torch.zeros(24, 1176)}
    rows = common.concat([common.Batch.blank(n) for n in (10, 3)])
    rows = dataclasses.replace(rows, input_ids=ids, multi_modal_inputs=[image, {}])
    places, pixels = critic_fsdp.with_images(backbone, rows, None)
    assert pixels["pixel_values"].shape == (24, 1176)
    assert critic_fsdp.with_images(backbone, rows.select([1]), None)[1] == {}
    columns = ("0123456789012", "0122222256012", "0122233356012", "0123423456012")
    assert places.tolist() == [[int(place) for place in column] for column in columns]


def draw(path, size, seed=0):
    g = torch.Generator().manual_seed(seed)
    Image.fromarray(torch.randint(0, 256, (size[1], size[0], 3), generator=g).byte().numpy()).save(
        path
    )


@pytest.fixture
def rollouts(tmp_path):
    """A file of rows with and without images, and its pictures."""
    (tmp_path / "pictures").mkdir()
    draw(tmp_path / "pictures" / "a.png", (60, 90), 1)
    draw(tmp_path / "b.png", (112, 56), 2)
    url = "data:image/png;base64," + base64.b64encode((tmp_path / "b.png").read_bytes()).decode()
    rows = [
        {"prompt": f"{SEE}one", "response": "yes", "images": ["pictures/a.png"]},
        {"prompt": "none", "response": "no"},
        {
            "prompt": f"{SEE}and{SEE}two",
            "response": "no",
            "images": [url, str(tmp_path / "pictures/a.png")],
        },
        {"prompt": "no list", "response": "maybe", "images": []},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({**row, "reward": i % 2}) + "\n" for i, row in enumerate(rows))
    )
    return path


def read(w, path, **options):
    image_processor = critic_fsdp.load_image_processor(w.config, w.model_config)
    place = functools.partial(critic_fsdp.place_images, image_processor, IMAGE)
    return common.read_rows(str(path), w.tokenizer, w.model_config, place_images=place, **options)


@pytest.mark.parametrize("name", PRESETS)
def test_images_of_rows_are_those_of_the_processor(name, rollouts):
    w = worker(model=name)
    batch = read(w, rollouts)
    files = (rollouts.parent / "pictures" / "a.png", rollouts.parent / "b.png")
    a, b = (
        dict(w.critic.image_processor(images=[Image.open(file)], return_tensors="pt"))
        for file in files
    )

    assert a["image_grid_thw"].tolist() == [[1, 6, 4]] and b["image_grid_thw"].tolist() == [
        [1, 4, 8]
    ]
    both = {key: torch.cat([b[key], a[key]]) for key in a}
    placeholders = [(ids == IMAGE).sum().item() for ids in batch.input_ids.split(batch.lengths)]
    assert placeholders == [6, 0, 8 + 6, 0]

    tensors = dataclasses.replace(batch, multi_modal_inputs=[a, {}, both, {}])
    assert torch.equal(w.compute_values(batch), w.compute_values(tensors))
    black = {**a, "pixel_values": 0 * a["pixel_values"]}
    blind = dataclasses.replace(batch, multi_modal_inputs=[black, {}, both, {}])
    # only in the first row, at every action
    differs = w.compute_values(blind) != w.compute_values(batch)
    assert torch.equal(differs, batch.response_mask & (batch.row_of_token == 0))


def test_a_bad_image_is_a_bad_row(rollouts):
    draw(rollouts.parent / "strip.png", (1, 300))
    draw(rollouts.parent / "cut.jpg", (100, 100))
    (rollouts.parent / "cut.jpg").write_bytes((rollouts.parent / "cut.jpg").read_bytes()[:2000])
    w = CriticWorker(Config(model="tiny-qwen3-vl"))
    good = rollouts.read_text()

    for change, fault in (
        ({"images": ["c.png"]}, "c.png"),
        ({"images": ["rows.jsonl"]}, "UnidentifiedImageError"),
        ({"images": ["cut.jpg"]}, "truncated"),
        ({"images": ["strip.png"]}, "aspect ratio"),
        ({"images": ["data:image/png;base64,iVBORw0"]}, "data:image/png;base64,iVBORw0"),
        ({"images": [7]}, "images: must be a valid string"),
        ({"images": ["b.png"] * 2}, "runs of [8] tokens, but its images have [8, 8]"),
        ({}, "runs of [1] tokens, but its images have 0"),
        # token ids need a placeholder for each token of an image, and a token between images
        ({"prompt": None, "prompt_ids": [5, IMAGE, 6], "images": ["b.png"]}, "runs of [1] tokens"),
        (
            {"prompt": None, "prompt_ids": [5, *[IMAGE] * 16, 6], "images": ["b.png"] * 2},
            "runs of [16] tokens",
        ),
    ):
        bad = {"prompt": f"{SEE}?", "response": "a", "reward": 1, **change}
        rollouts.write_text(good + json.dumps(bad) + "\n")
        with refused(fault, f"--rollouts {rollouts}:5: "):
            read(w, rollouts)

    with pytest.raises(UserError, match=":1: it has images, but this model reads text only"):
        common.read_rows(str(rollouts), w.tokenizer)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_is_close(strategy, folders):
    folder = str(folders["tiny-qwen3-vl"])
    exact = worker(model=folder).compute_values(ROWS)
    w = worker(model=folder, strategy=strategy, param_dtype="bfloat16")
    torch.testing.assert_close(
        w.compute_values(ROWS), exact, rtol=0, atol=0.05 * float(exact.abs().max())
    )
    assert w.update_critic(ROWS)["critic/skipped_steps"] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_tower_stays_as_it_is_and_has_no_optimizer_state(strategy, tmp_path):
    fields = dict(model="tiny-qwen2.5-vl", strategy=strategy, **FROZEN, weight_decay=0.5)
    w = worker(**fields)
    before = full_weights(w.critic)
    w.update_critic(ROWS)
    after = full_weights(w.critic)
    for name, x in after.items():
        assert torch.equal(x, before[name]) == (".visual." in name), name
    assert names_with_moments(w.critic) == {name for name in after if ".visual." not in name}
    w.save_checkpoint(tmp_path / "checkpoint")
    again = worker(**fields)
    again.load_checkpoint(tmp_path / "checkpoint")
    w.update_critic(ROWS)
    again.update_critic(ROWS)
    assert_same_weights(again, w)


def test_adapters_of_a_frozen_tower_do_not_train():
    lora = worker(model="tiny-qwen3-vl", **FROZEN, lora_rank=2).critic.model
    trained = [name for name, p in lora.named_parameters() if p.requires_grad]
    assert trained and not any(".visual." in name for name in trained)


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_folder_gives_the_same_values(name, folders, tmp_path):
    w = worker(model=str(folders[name]))
    # which transformers chooses
    assert w.critic.model.model.visual.config._attn_implementation == "sdpa"
    w.update_critic(ROWS)
    w.export_hf(tmp_path / "hf")
    assert torch.equal(
        worker(model=str(tmp_path / "hf")).compute_values(ROWS), w.compute_values(ROWS)
    )


def test_a_run_on_images_and_another_from_its_export(rollouts, tmp_path):
    files = {"rollouts": str(rollouts), "eval_rollouts": str(rollouts), "steps": 2}
    for name, model in {"first": "tiny-qwen3-vl", "second": str(tmp_path / "first" / "hf")}.items():
        critic = Config(model=model, **FROZEN)
        critic_fsdp.main(critic_fsdp.Run(critic=critic, out_dir=str(tmp_path / name), **files))
        assert (tmp_path / name / "report.html").exists()


def test_another_vision_model_reads_text_only(tmp_path):
    """Gemma 3 gives the same values and makes the same update, packed and padded."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    text = {**sizes, "vocab_size": 97, "num_key_value_heads": 1, "head_dim": 8}
    tower = {**sizes, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    batch = random_batch(4)
    packed, padded = (worker(model=str(tmp_path), use_remove_padding=x) for x in (True, False))
    torch.testing.assert_close(packed.compute_values(batch), padded.compute_values(batch))
    one, other = (w.update_critic(batch)["critic/grad_norm"] for w in (packed, padded))

    assert one == pytest.approx(other, rel=1e-5)
    batch = dataclasses.replace(random_batch(1), multi_modal_inputs=ROWS.multi_modal_inputs[:1])
    with pytest.raises(ValueError, match="multi_modal_inputs: this critic reads text only"):
        packed.compute_values(batch)


def test_images_without_placeholders_are_refused():
    rows = ROWS.select([0, 1])
    rows.multi_modal_inputs[1] = rows.multi_modal_inputs[0]  # but its ids have no placeholder
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        worker(model="tiny-qwen3-vl").compute_values(rows)
