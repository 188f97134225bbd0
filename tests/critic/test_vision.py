"""Vision-language models: the critic's layouts compared with one sequence at a time, images in
rows, frozen weights; then actors, rollouts and prompts with images."""

import base64
import dataclasses
import functools
import json
import pathlib
import types

import pytest
import torch
import torch.distributed as dist
import transformers
from forked import scenario
from helpers import (
    STRATEGIES,
    assert_same_weights,
    captured_gradients,
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
from ppo_helpers import (
    a_run,
    add_columns,
    assert_close,
    assert_same_replies,
    batch_of,
    engine_of,
    plain,
    play,
    policy,
)
from reference import DELTA, assert_agrees, loss_by_hand, reference_of
from safetensors.torch import save_file

import common
import critic_fsdp
import ppo_loop
from common import UserError
from critic_fsdp import Config, CriticWorker
from ppo_loop import Images

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

    text = {n: g for n, g in gradients.items() if ".visual." not in n}
    for (ranks, layout, tokens), result in results.items():
        expected = text if "frozen" in layout else gradients
        # its recurrent layers are 1.14e-5 off on a CPU with AVX2 alone
        most = 2e-5 if name == "qwen3.5" else 1e-5
        error = assert_agrees((layout, tokens), result, values, loss, expected, most)
        off = float((result["values"] - values).abs().max())
        print(f"  {ranks} ranks  {layout:16s} {tokens:5d} {error:.1e} {off:.1e}")
        assert off < 1e-5, (layout, tokens, off)


def test_a_frozen_decoder_waits_for_no_rank_without_images(folders, on_two_ranks):
    norms = lambda results: [x["metrics"]["critic/grad_norm"] for x in results.values()]
    expected = norms(results_of(folders[PRESETS[0]], PARTS))
    assert norms(on_two_ranks["parts"]) == pytest.approx(expected, rel=1e-5)


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
    whole = str(tmp_path / "pictures/a.png")
    rows = [
        {"prompt": f"{SEE}one", "response": "yes", "images": ["pictures/a.png"]},
        {"prompt": "none", "response": "no"},
        {"prompt": f"{SEE}and{SEE}two", "response": "no", "images": [url, whole]},
        {"prompt": "no list", "response": "maybe", "images": []},
    ]
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({**row, "reward": i % 2}) for i, row in enumerate(rows)]
    path.write_text("".join(f"{line}\n" for line in lines))
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
    of = lambda file: w.critic.image_processor(images=[Image.open(file)], return_tensors="pt")
    a, b = (dict(of(file)) for file in files)
    assert a["image_grid_thw"].tolist() == [[1, 6, 4]]
    assert b["image_grid_thw"].tolist() == [[1, 4, 8]]
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


BAD_IMAGES = (  # keys of a row, and what is wrong with them
    ({"images": ["c.png"]}, "c.png"),
    ({"images": ["rows.jsonl"]}, "UnidentifiedImageError"),
    ({"images": ["cut.jpg"]}, "truncated"),
    ({"images": ["strip.png"]}, "aspect ratio"),
    ({"images": ["data:image/png;base64,iVBORw0"]}, "data:image/png;base64,iVBORw0"),
    ({"images": [7]}, "images: must be a valid string"),
    ({"images": ["b.png"] * 2}, "runs of [8] tokens, but its images have [8, 8]"),
    ({}, "runs of [1] tokens, but its images have 0"),
)


def draw_bad_images(folder):
    draw(folder / "strip.png", (1, 300))
    draw(folder / "cut.jpg", (100, 100))
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:2000])


def test_a_bad_image_is_a_bad_row(rollouts):
    draw_bad_images(rollouts.parent)
    w = CriticWorker(Config(model="tiny-qwen3-vl"))
    good = rollouts.read_text()

    # token ids need a placeholder for each token of an image, and a token between images
    ids = lambda n: {"prompt": None, "prompt_ids": [5, *[IMAGE] * n, 6]}
    one, two = ({**ids(n), "images": ["b.png"] * k} for n, k in ((1, 1), (16, 2)))
    more = ((one, "runs of [1] tokens"), (two, "runs of [16] tokens"))
    for change, fault in (*BAD_IMAGES, *more):
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
    atol = 0.05 * float(exact.abs().max())
    torch.testing.assert_close(w.compute_values(ROWS), exact, rtol=0, atol=atol)
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
    again = worker(model=str(tmp_path / "hf"))
    assert torch.equal(again.compute_values(ROWS), w.compute_values(ROWS))


def test_a_run_on_images_and_another_from_its_export(rollouts, tmp_path):
    files = {"rollouts": str(rollouts), "eval_rollouts": str(rollouts), "steps": 2}
    for name, model in {"first": "tiny-qwen3-vl", "second": str(tmp_path / "first" / "hf")}.items():
        critic = Config(model=model, **FROZEN)
        critic_fsdp.main(critic_fsdp.Run(critic=critic, out_dir=str(tmp_path / name), **files))
        assert (tmp_path / name / "report.html").exists()


def test_another_vision_model_reads_text_only(tmp_path):
    """Gemma 3 gives the same values and makes the same update, packed and padded."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=2)
    text = {**sizes, "vocab_size": 97, "num_key_value_heads": 1, "head_dim": 8}
    tower = {**sizes, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    batch = random_batch(4)
    packed, padded = (worker(model=str(tmp_path), use_remove_padding=x) for x in (True, False))
    torch.testing.assert_close(packed.compute_values(batch), padded.compute_values(batch))
    one, other = (w.update_critic(batch)["critic/grad_norm"] for w in (packed, padded))
    assert one == pytest.approx(other, rel=1e-5)


def test_images_without_placeholders_are_refused():
    rows = ROWS.select([0, 1])
    rows.multi_modal_inputs[1] = rows.multi_modal_inputs[0]  # but its ids have no placeholder
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        worker(model="tiny-qwen3-vl").compute_values(rows)


# ---- PPO: actors, rollouts and prompts -----------------------------------------------------------

TOKENIZER = common.char_tokenizer(PRESETS[0])


def an_actor(model, images=True, **fields):
    """A PolicyWorker, for prompts with images."""
    return policy(model, override_config="{}", images=images, **fields)


def without_media(logits):
    """Ids of images are never sampled."""
    return logits.index_fill(-1, torch.tensor([START, IMAGE, END]), -1e9)


def reads_rows(lm):
    """The model as a function of one of ROWS, whose images it looks up."""
    rows = [ids.tolist() for ids in ROWS.input_ids.split(ROWS.lengths)]

    def forward(input_ids):
        images = images_of(rows.index(input_ids[0].tolist()), input_ids)
        out = lm(input_ids=input_ids, **images)
        return types.SimpleNamespace(logits=without_media(out.logits))

    return forward


@pytest.mark.parametrize("name", MODELS)
def test_an_actor_learns_from_images_as_transformers_in_float64(name, folders):
    """Log-probs of packed rows, also those of a reference, and the gradient of every weight, those
    of the tower too. Some micro-batches have no image."""
    w = an_actor(folders[name], temperature=0.7, entropy_coeff=0.1, ppo_max_token_len_per_gpu=60)
    assert len(w.critic.plan_micro_batches(common.describe(ROWS), 60).sizes[0]) > 2
    batch = add_columns(w, ROWS)
    lm = plain(w, torch.float64)
    loss, _, expected_T, _ = loss_by_hand(reads_rows(lm), batch, w.run)
    ours_T = w.compute_log_probs(batch)
    torch.testing.assert_close(ours_T.double(), expected_T, rtol=0, atol=1e-5)
    reference = an_actor(folders[name], temperature=0.7, trains=False)
    torch.testing.assert_close(reference.compute_log_probs(batch), ours_T, rtol=0, atol=1e-5)

    loss.backward()
    with captured_gradients(w) as seen:
        w.update_policy(batch)
    [ours] = seen
    largest = max(float(p.grad.abs().max()) for p in lm.parameters())
    for key, p in lm.named_parameters():
        size = float(p.grad.abs().max())
        assert size > 1e-6 * largest or ".visual." not in key, key  # all of the tower matters
        atol = 1e-5 * max(size, 1e-3 * largest)
        torch.testing.assert_close(ours[f"lm.{key}"].double(), p.grad, rtol=0, atol=atol, msg=key)


def load_prompts(path, w, **fields):
    run = a_run(actor=w.config, prompts=str(path), reward="mine.py:f", **fields)
    return ppo_loop.load_prompts(str(path), "--prompts", run, TOKENIZER, w.critic.task.images)


def with_pixels(ids, pixels):
    """transformers' arguments for a row alone."""
    ids = torch.tensor([ids])
    return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **pixels}


@pytest.mark.parametrize("name", MODELS)
def test_a_rollout_with_images_is_that_of_transformers_row_by_row(name, folders, rollouts):
    """Greedy tokens, log-probs of samples, and the actor's. Prompts of a batch have other lengths
    and some have no image."""
    w = an_actor(folders[name])
    prompts = load_prompts(rollouts, w)
    images = [prompt.images for prompt in prompts]
    rows = [(prompt.ids, seed, 9) for seed, prompt in enumerate(prompts)]
    engine = engine_of(w, stop=())
    lm = plain(w)
    processor = w.critic.task.images.processor

    greedy = engine.generate(rows, 0.0, images)
    sampled = engine.generate(rows, 1.0, images)
    assert_same_replies(engine.generate(rows[2:], 1.0, images[2:]), sampled[2:])
    settings = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
    settings["suppress_tokens"] = [START, IMAGE, END]
    for (ids, _, _), files, *replies in zip(rows, images, greedy, sampled):
        pixels = critic_fsdp.read_images({"images": files} if files else {}, processor)
        said = lm.generate(**with_pixels(ids, pixels), **settings)
        assert said[0, len(ids) :].tolist() == replies[0][0]

        for said, log_probs, _ in replies:
            lm.model.rope_deltas = None  # forget the images of the previous row
            logits_LV = lm(**with_pixels(ids + said, pixels)).logits[0, len(ids) - 1 : -1]
            log_p_LV = without_media(logits_LV).log_softmax(-1)
            assert_close(log_probs, log_p_LV[range(9), said].tolist())

    batch = batch_of([ids for ids, _, _ in rows], sampled)
    batch.multi_modal_inputs = [{"images": files} if files else {} for files in images]
    ours_T = w.compute_log_probs(batch)
    torch.testing.assert_close(ours_T, batch.rollout_log_probs, rtol=0, atol=1e-5)
    blind = dataclasses.replace(batch, multi_modal_inputs=batch.multi_modal_inputs[:])
    blind.multi_modal_inputs[0] = {"images": [str(rollouts.parent / "c.png")]}
    draw(rollouts.parent / "c.png", (60, 90), 3)  # another image of this size
    assert (w.compute_log_probs(blind) != ours_T).nonzero().max() < batch.lengths[0]


def test_a_prompt_with_images_is_a_row_of_the_critic(rollouts, tmp_path):
    """Its ids, its images and its line in a dump of rollouts, from a text and from a chat."""
    w = an_actor("tiny-qwen3-vl")
    rows = read(worker(model="tiny-qwen3-vl"), rollouts)
    prompts = load_prompts(rollouts, w)
    replies = []
    for i, prompt in enumerate(prompts):
        own = rows.select([i])
        said = own.input_ids[own.response_mask].tolist()
        assert prompt.ids + said == own.input_ids.tolist()
        replies.append(ppo_loop.Reply(prompt, i, said, [-0.5] * len(said), True))
    batch = ppo_loop.to_batch(replies)
    assert batch.multi_modal_inputs == [{"images": x} if x else {} for x in rows_images(rows)]

    # what is dumped is read again
    batch.token_level_rewards = batch.values = torch.zeros(len(batch.input_ids))
    ppo_loop.write_jsonl(batch, f"{tmp_path}/dumped.jsonl", replies)
    again = read(worker(model="tiny-qwen3-vl"), tmp_path / "dumped.jsonl")
    assert torch.equal(again.input_ids, rows.input_ids)
    assert rows_images(again) == rows_images(rows)


def test_a_new_context_shows_the_images_of_its_prompt(rollouts):
    """It has the same files, with their placeholders; one without the images is a fault."""
    w = an_actor("tiny-qwen3-vl")
    rollouts.write_text(json.dumps({"prompt": f"{SEE}?", "images": ["b.png"]}))
    (prompt,) = load_prompts(rollouts, w)
    run = a_run(actor=w.config, prompts=str(rollouts), reward="mine.py:f")
    task = w.critic.task._replace(tokenizer=TOKENIZER, stop_ids=[])
    reply = ppo_loop.Reply(prompt, 0, [5, 6], [-0.5] * 2, turns=["a"])
    text, ids, _, new = ppo_loop.hear({"prompt": f"and {SEE} now?"}, reply, task, run)
    assert (ids, new.images, new.ids.count(IMAGE)) == ([], prompt.images, 8)

    reply.contexts.append((2, new))
    reply.ids.append(7)
    reply.log_probs.append(-0.5)
    batch = ppo_loop.to_batch([reply])
    assert batch.multi_modal_inputs == [{"images": prompt.images}] * 2
    with refused("placeholders come in runs of 0 tokens, but its images have [8]"):
        ppo_loop.hear({"prompt": "none"}, reply, task, run)


def rows_images(rows):
    """The image files of each row, None for a row without."""
    return [row.get("images") for row in rows.multi_modal_inputs]


def test_a_chat_shows_images_where_its_template_puts_them(rollouts):
    w = an_actor("tiny-qwen3-vl")
    tokenizer = common.char_tokenizer("tiny-qwen3-vl")
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
        f"{SEE}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}};{{% endfor %}}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    row = {"prompt": chat, "images": ["b.png"]}
    rollouts.write_text(json.dumps(row))
    run = a_run(prompts=str(rollouts), reward="mine.py:f", actor=w.config)
    images = w.critic.task.images
    (prompt,) = ppo_loop.load_prompts(str(rollouts), "--prompts", run, tokenizer, images)
    expected = tokenizer.encode("s;a") + [START, *[IMAGE] * 8, END] + tokenizer.encode("b;")
    assert (prompt.ids, prompt.text) == (expected, "ab")
    assert prompt.images == [str(rollouts.parent / "b.png")]


def test_a_prompt_with_a_bad_image_is_refused(rollouts):
    draw_bad_images(rollouts.parent)
    good = rollouts.read_text()
    w = an_actor("tiny-qwen3-vl")
    for change, fault in BAD_IMAGES:
        rollouts.write_text(good + json.dumps({"prompt": f"{SEE}?", **change}) + "\n")
        with refused(fault, f"--prompts {rollouts}:5: "):
            load_prompts(rollouts, w)

    # the critic's hint has an image's placeholder, but no image
    rollouts.write_text(json.dumps({"prompt": f"{SEE}?", "images": ["b.png"], "hint": SEE}))
    with refused("placeholders come in runs of [8, 1] tokens, but its images have [8]"):
        load_prompts(rollouts, w, privileged_key="hint")


@pytest.fixture(scope="module")
def readers(folders, tmp_path_factory):
    """name -> flags of a run whose models do not all read the actor's images."""
    blind, other = (tmp_path_factory.mktemp(name) for name in ("blind", "other"))
    for folder in (blind, other):
        save_model("tiny-qwen3-vl", folder)
    (blind / "preprocessor_config.json").unlink()
    # not min_pixels, which in transformers 5.17 changes later processors, too
    size = {"shortest_edge": 784, "longest_edge": 1003520}
    transformers.Qwen2VLImageProcessorPil(patch_size=14, size=size).save_pretrained(other)
    return {"blind": str(blind), "other": str(other), "same": str(folders["tiny-qwen3-vl"])}


@pytest.mark.parametrize("flags, words", [
    ("--actor.model tiny-qwen2", ":1: unusable, with --prompt-key prompt (it has images,"
     " but this model reads text only)"),
    ("--critic megatron", "(it has images, but --critic megatron reads text only)"),
    ("--share-base", "--share-base: reads text only, but prompts have images"),
    ("--critic.model {blind}", "--critic.model {blind}: reads text only, but prompts have images"),
    ("--critic.model {other}", "--critic.model {other}: reads images in another way than the actor;"
     " both need one preprocessor_config.json"),
    ("--reward-model {blind}", "--reward-model {blind}: reads text only, but prompts have images"),
    ("--reward-model {other}", "--reward-model {other}: reads images in another way than the"
     " actor; both need one preprocessor_config.json"),
])  # fmt: skip
def test_models_that_cannot_read_the_images_are_refused_at_the_start(
    flags, words, readers, rollouts
):
    common.setup_distributed()
    reward = "" if "reward-model" in flags else "--reward gsm8k"
    every = f"--actor.model tiny-qwen3-vl --prompts {rollouts} {reward} {flags.format(**readers)}"
    rows = [{**json.loads(x), "answer": "#### 1"} for x in rollouts.read_text().splitlines()]
    rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with refused(words.format(**readers)):
        ppo_loop.set_up(ppo_loop.parse(every.split()))


def test_a_critic_and_a_reward_model_of_the_same_images_are_taken(readers, rollouts):
    common.setup_distributed()
    same = readers["same"]
    every = f"--actor.model tiny-qwen3-vl --critic.model {same} --reward-model {same}"
    run, task = ppo_loop.set_up(ppo_loop.parse([*every.split(), "--prompts", str(rollouts)]))
    assert [bool(prompt.images) for prompt in task.prompts] == [True, False, True, False]

    # the reward is the label at a row's last token: the value of an action that would follow
    reward = ppo_loop.RewardModel(run, task.tokenizer)
    reward.worker.set_budget(100, "the longest row")
    replies = [ppo_loop.Reply(prompt, i, [5, 6]) for i, prompt in enumerate(task.prompts)]
    scores = [score for score, _ in reward.ask_all(replies)]
    later = [dataclasses.replace(x, ids=[5, 6, 7], log_probs=[None, None, -1.0]) for x in replies]
    batch = ppo_loop.to_batch(later)
    processor = task.images.processor

    def pixels_of(row, ids):
        pixels = critic_fsdp.read_images(batch.multi_modal_inputs[row], processor)
        if pixels:
            pixels["pixel_values"] = pixels["pixel_values"].double()
            pixels["mm_token_type_ids"] = (ids == IMAGE).int()
        return pixels

    batch.values = batch.returns = torch.zeros(len(batch.input_ids))
    values_T, _, _ = reference_of(pathlib.Path(same), batch, images_of=pixels_of)
    assert scores == pytest.approx(values_T[common.last_action(batch)].tolist(), abs=1e-5)


def test_without_images_in_prompts_the_tower_of_an_actor_stays_frozen(rollouts):
    common.setup_distributed()
    rollouts.write_text('{"prompt": "1+1=", "answer": "#### 2"}')
    flags = f"--actor.model tiny-qwen3-vl --reward gsm8k --prompts {rollouts}"
    _, task = ppo_loop.set_up(ppo_loop.parse(flags.split()))
    assert task.images is None
    rollouts.write_text(json.dumps({"prompt": f"{SEE}?", "answer": "#### 2"}))
    with refused("runs of [1] tokens, but its images have 0"):
        ppo_loop.set_up(ppo_loop.parse(flags.split()))
    for images in (False, True):
        named = an_actor("tiny-qwen3-vl", images=images).model.named_parameters()
        assert all(p.requires_grad == (images or ".visual." not in key) for key, p in named)


def test_an_environment_must_not_return_a_placeholder():
    replies, _ = play([["a", "b"]], lambda *_: SEE, tokenizer=TOKENIZER, images=Images(None, IMAGE))
    fault = "an environment must not return the placeholder of an image"
    assert [reply.fault for reply in replies] == [fault] * 2
    assert [reply.turns for reply in replies] == [["a"], ["b"]]
