"""Folders as others save them: trained value heads, adapters, damaged files and other kinds."""

import copy
import itertools
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import torch.nn as nn
import transformers
from helpers import random_batch, refused, worker
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from torch.testing import assert_close

import common
import critic_fsdp
import critic_megatron
import ppo_loop

SCRIPTS = (critic_fsdp, critic_megatron)
CONFIG = transformers.Qwen2Config(**common.tiny_config("tiny-qwen2", 60), tie_word_embeddings=False)
NEW = "value head new, normal(0, 0.124)"


@pytest.fixture
def base():
    """name -> weight of a language model."""
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(CONFIG).state_dict()


def linear(stem, outputs=1, inputs=64):
    """A trained layer, as it would be stored."""
    return {f"{stem}.weight": torch.randn(outputs, inputs), f"{stem}.bias": torch.randn(outputs)}


def save(folder, weights, files=1, zipped=True):
    """Writes weights to .bin files, as older versions of transformers do, next to a config."""
    CONFIG.save_pretrained(folder)
    names = [f"pytorch_model-{i:05d}-of-{files:05d}.bin" for i in range(1, files + 1)]
    if files == 1:
        names = ["pytorch_model.bin"]

    # weights take turns at the files
    place = dict(zip(weights, itertools.cycle(names)))
    for name in names:
        part = {key: x for key, x in weights.items() if place[key] == name}
        torch.save(part, folder / name, _use_new_zipfile_serialization=zipped)
    if files > 1:
        index = {"metadata": {}, "weight_map": place}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))

    # a trainer leaves more files, which must not be opened
    for name in ("training_args.bin", "optimizer.bin", "scheduler.bin"):
        torch.save(print, folder / name)  # a function, which weights_only refuses to read


def save_safe(folder, weights):
    """Writes weights to a .safetensors file, next to a config."""
    CONFIG.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def read(script, folder, **fields):
    """What a critic reads from a folder: (name -> weight, words on it)."""
    config = script.Config(model=str(folder), **fields)
    _, model_config = common.load_config(config)
    common.configure_head(model_config, config, None)
    weights, words, _ = script.read_weights(config, model_config)
    return (weights.state_dict() if script is critic_fsdp else weights), words


def assert_both_read(folder, base, weight, bias, **fields):
    """Both critics have the base model's weights and this head."""
    for script in SCRIPTS:
        weights, words = read(script, folder, **fields)
        for name, x in base.items():
            assert name == "lm_head.weight" or torch.equal(weights[f"model.{name[6:]}"], x), name
        assert torch.equal(weights["score.weight"], weight.view(1, 64)), words
        assert torch.equal(weights["score.bias"], bias.view(1)), words


def trl(folder, base, head, **options):
    save(folder, base | head, **options)


def state_of_the_head_alone(folder, base, head):
    """As torch.save(model.v_head.state_dict()) writes it."""
    save_safe(folder, base)
    plain = {name.removeprefix("v_head.summary."): x for name, x in head.items()}
    torch.save(plain, folder / "value_head.bin")


def both_formats(folder, base, head):
    """What is left of an earlier save is not read."""
    save(folder, {name: x + 1 for name, x in (base | head).items()})
    torch.save({name: x + 1 for name, x in head.items()}, folder / "value_head.bin")
    save_safe(folder, base)
    save_file(head, folder / "value_head.safetensors")


def files_of_another_save(folder, base, head):
    """Transformers reads model.safetensors alone if there is one."""
    save_safe(folder, base | head)
    wrong = {name: x + 1 for name, x in (base | head).items()}
    save_file(wrong, folder / "model-00001-of-00001.safetensors")
    (folder / "cut.safetensors").write_bytes(b"{")


@pytest.mark.parametrize("store", [
    trl, partial(trl, zipped=False), partial(trl, files=3),
    state_of_the_head_alone, both_formats, files_of_another_save,
])  # fmt: skip
def test_a_trained_head_is_read_from_every_kind_of_file(store, base, tmp_path):
    head = linear("v_head.summary")
    store(tmp_path, base, head)
    assert_both_read(tmp_path, base, *head.values(), value_head_init="checkpoint")


@pytest.mark.parametrize("stem", [
    "score", "classifier", "v_head", "value_head", "reward_head", "rm_head", "score.0",
    "value_head.mlp", "module.v_head", "pretrained_model.score",
])  # fmt: skip
def test_a_trained_head_is_read_under_every_name(stem, base, tmp_path):
    head = linear(stem)
    save_safe(tmp_path, base | head)
    assert_both_read(tmp_path, base, *head.values())

    # it may lack a bias
    del head[f"{stem}.bias"]
    save_safe(tmp_path, base | head)
    assert_both_read(tmp_path, base, *head.values(), torch.zeros(1))


@pytest.mark.parametrize("file", ["model.safetensors", "value_head.safetensors"])
def test_the_head_that_peft_has_trained_is_read_and_not_the_one_before(file, base, tmp_path):
    config = transformers.Qwen2Config(**CONFIG.to_dict() | {"num_labels": 1})
    model = transformers.AutoModelForTokenClassification.from_config(config)
    options = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["score"])
    wrapper = peft.get_peft_model(model, options).base_model.model.score
    nn.init.normal_(wrapper.modules_to_save["default"].weight)
    trained = wrapper.modules_to_save["default"].state_dict()

    # as it is called in a folder's weights, or in a file of its own
    stem = "base_model.model.score." if file == "model.safetensors" else ""
    head = {f"{stem}{name}": x for name, x in wrapper.state_dict().items()}
    save_safe(tmp_path, base)
    weights = base if file == "model.safetensors" else {}
    save_file(weights | head, tmp_path / file, {"format": "pt"})
    assert_both_read(tmp_path, base, trained["weight"], trained["bias"])


UNFIT = {  # heads, of which no one is the one layer with one output that is needed
    "two layers": {**linear("score.0", 64), **linear("score.2")},
    "a layer of a fork": {**linear("score.hidden", 64), **linear("score")},
    "nine outputs": linear("classifier", 9),
    "two heads": {**linear("score"), **linear("v_head.summary")},
    "a norm": {"value_head.norm.weight": torch.ones(64), **linear("value_head.out")},
    "a wide input": linear("reward_head", 1, 128),
    "a wide bias": {"rm_head.weight": torch.randn(1, 64), "rm_head.bias": torch.randn(64)},
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_head_that_does_not_fit_is_named_and_replaced_on_demand(kind, base, tmp_path):
    head = UNFIT[kind]
    save_safe(tmp_path, base | head)
    begin = f"--model {tmp_path}: its head, "
    first, *_ = sorted(head)
    words = f"{first} {list(head[first].shape)}"
    for script in SCRIPTS:
        with refused(words, begin, "of 64 weights; --value-head-init normal starts a new head"):
            read(script, tmp_path)
        with refused(words, begin, "not one layer of 64 weights; give a model whose head is"):
            read(script, tmp_path, value_head_init="checkpoint")
        for start, story in {"normal": NEW, "zero": "head zero", "mean": "head mean"}.items():
            weights, said = read(script, tmp_path, value_head_init=start)
            assert said.endswith(story)
            assert not any(torch.equal(weights["score.weight"], x) for x in head.values())


def test_a_file_of_a_head_without_tensors_is_named(base, tmp_path):
    save_safe(tmp_path, base)
    torch.save({"value_head": linear("summary")}, tmp_path / "value_head.bin")
    for script in SCRIPTS:
        with refused("value_head.bin does not load (AttributeError: 'dict' object has no"):
            read(script, tmp_path)


def test_a_base_model_gets_a_new_head_whatever_else_is_in_its_files(base, tmp_path):
    others = (
        "mtp.head.weight",
        "model.mtp_layers.0.value_head.weight",
        "visual.head.weight",
        "model.layers.0.attention.self.value.weight",
        "model.layers.1.score.weight",
        "generator_lm_head.bias",
        "medusa_head.0.weight",
    )
    save_safe(tmp_path, base | {name: torch.randn(1, 64) for name in others})
    for script in SCRIPTS:
        assert NEW in read(script, tmp_path)[1]
        with refused(": holds no trained value head for --value-head scalar; give one that does"):
            read(script, tmp_path, value_head_init="checkpoint")


@pytest.mark.parametrize("model", common.TINY)
def test_no_preset_has_parts_that_are_called_like_a_head(model, tmp_path):
    """Also with a language model's head, and a vision tower."""
    auto = transformers.AutoModelForCausalLM
    if model.endswith("vl"):
        auto = transformers.AutoModelForImageTextToText
    config = transformers.AutoConfig.for_model(**common.tiny_config(model, 99))
    auto.from_config(config).save_pretrained(tmp_path)
    assert "value head new, " in read(critic_fsdp, tmp_path)[1]


def test_a_checkpoint_has_a_head_and_no_second_one_in_its_optimizer(base, tmp_path):
    head = {f"model.{name}": x for name, x in linear("score").items()}
    weights = {f"model.{name}": x for name, x in base.items() if name != "lm_head.weight"} | head
    moments = {f"optimizer.{name[6:]}.exp_avg": x + 1 for name, x in weights.items()}
    note = {"shape": CONFIG.to_dict()}
    (tmp_path / "trainer.json").write_text(json.dumps(note))
    save_file(weights | moments, tmp_path / "shard-00000.safetensors")
    assert_both_read(tmp_path, base, *head.values(), value_head_init="checkpoint")

    # with the names of a fork's second layer, it is refused like an export
    more = {"model.score.hidden.weight": torch.randn(64, 64)}
    save_file(weights | moments | more, tmp_path / "shard-00000.safetensors")
    for script in SCRIPTS:
        with refused("its head, model.score.bias [1], model.score.hidden.weight [64, 64], "):
            read(script, tmp_path)


@pytest.mark.parametrize("stores, files", [
    ((save_safe,), {"model.safetensors", "value_head.bin"}),
    ((save,), {"pytorch_model.bin", "value_head.bin"}),
    ((save, save_safe), {"model.safetensors", "value_head.bin"}),
])  # fmt: skip
def test_only_the_weights_of_one_format_are_fetched(stores, files, base, tmp_path, monkeypatch):
    """A folder stands for the hub; the library's own filter says what a pattern fetches."""
    hub = tmp_path / "hub"
    head = linear("v_head.summary")
    for store in stores:
        store(hub, base)
    torch.save(head, hub / "value_head.bin")
    cache = tmp_path / "cache"
    cache.mkdir()

    def download(name, allow_patterns):
        there = [path.name for path in hub.iterdir()]
        for file in filter_repo_objects(there, allow_patterns=allow_patterns):
            shutil.copy(hub / file, cache / file)
        return str(cache)

    monkeypatch.setattr(common, "snapshot_download", download)
    monkeypatch.setattr(common, "config_of", lambda _: CONFIG.to_dict())
    assert_both_read("some/critic", base, *head.values())
    assert {path.name for path in cache.iterdir() if path.suffix != ".json"} == files


def test_a_download_that_fails_is_named(monkeypatch):
    """Only the weights are absent from the cache; the tests have no hub."""
    monkeypatch.setattr(common, "config_of", lambda _: CONFIG.to_dict())
    for script in SCRIPTS:
        with refused("--model some/critic: its weights do not load (LocalEntryNotFoundError"):
            read(script, "some/critic")


# ---- What others read from an export -------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_export_is_a_regression_of_each_token_and_another_one_of_each_row(script, tmp_path):
    """Its token classifier has the critic's values, its sequence classifier what follows the row,
    without the bias. A pipeline makes 1 of everything."""
    critic = worker(script=script)
    for p in critic.critic.model.parameters():
        if p.numel() == 1:
            p.data.fill_(0.5)  # the bias of the head
    row = common.Batch.blank(7)
    row.input_ids = torch.arange(20, 27)
    values = critic.compute_values(row)
    critic.export_hf(str(tmp_path / "hf"))

    def logits_of(kind):
        model = kind.from_pretrained(tmp_path / "hf")
        assert model.config.problem_type == "regression" and model.config.id2label == {0: "value"}
        return model(row.input_ids[None]).logits.flatten()

    of_tokens = logits_of(transformers.AutoModelForTokenClassification)
    assert_close(of_tokens[:-1], values[1:])
    of_row = logits_of(transformers.AutoModelForSequenceClassification)
    assert_close(of_row, of_tokens[-1:] - 0.5)

    pipeline = transformers.pipeline("token-classification", str(tmp_path / "hf"))
    assert {(x["entity"], float(x["score"])) for x in pipeline("94+48=")} == {("value", 1.0)}


# ---- Folders that are no model, or a damaged one -------------------------------------------------


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_is_refused(has_config, base, tmp_path):
    """Also with a config.json next to it: transformers would load the base model and be silent."""
    plain = tmp_path / "plain"
    adapter = tmp_path / "adapter"
    save_safe(plain, base)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain)
    options = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(model, options).save_pretrained(adapter)
    if has_config:
        CONFIG.save_pretrained(adapter)

    words = f": holds a LoRA adapter of {plain}; merge it first (peft's merge_and_unload, "
    for flags in (critic_fsdp.Config, critic_megatron.Config, ppo_loop.ActorConfig):
        with refused(words, f"{flags.prefix}model {adapter}"):
            common.load_config(flags(model=str(adapter)))
    run = ppo_loop.Run(critic=critic_fsdp.Config(), reward_model=str(adapter))
    with refused(words, f"--reward-model {adapter}: "):
        ppo_loop.RewardModel(run, common.char_tokenizer())


def as_fp8(x, block=32):
    """A matrix -> (its numbers in blocks as FP8, the scale of each block, what these make)."""
    whole = x.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scales = whole.abs().amax((1, 3), keepdim=True) / 448  # the largest number
    fp8 = (whole / scales).to(torch.float8_e4m3fn)
    made = (fp8.float() * scales).flatten(2).flatten(0, 1)
    return fp8.flatten(2).flatten(0, 1), scales[:, 0, :, 0], made


def save_fp8(folder, base):
    """Writes a model whose attention is in FP8 -> its weights in float32."""
    stored = dict(base)
    plain = dict(base)
    for name, x in base.items():
        if "self_attn" in name and name.endswith("proj.weight"):
            stored[name], stored[f"{name}_scale_inv"], plain[name] = as_fp8(x)
    save_safe(folder, stored)
    others = ["lm_head", "mlp"]
    say_quantised(
        folder, quant_method="fp8", weight_block_size=[32, 32], modules_to_not_convert=others
    )
    return plain


def say_quantised(folder, **fields):
    """Adds to a folder's config how its weights are quantised."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": fields}))


def save_mxfp4(folder, base):
    """Writes a gpt-oss, whose experts are in FP4: two numbers a byte, each 32 with an exponent
    -> its weights in float32."""
    fields = common.tiny_config("tiny-qwen3", 60) | {"num_local_experts": 4, "head_dim": 16}
    config = transformers.GptOssConfig(**fields | {"model_type": "gpt_oss"})
    plain = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers])

    stored = {}
    for name, x in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = x.bfloat16()
            plain[name] = stored[name].float()
            continue

        # random bytes, as rows of matrices that are transposed
        experts, width, rows = x.shape
        bytes_ERGB = torch.randint(256, (experts, rows, width // 32, 16))
        exponents_ERG = torch.randint(115, 125, bytes_ERGB.shape[:3])
        pairs = torch.stack([numbers[bytes_ERGB % 16], numbers[bytes_ERGB // 16]], -1)
        made = pairs.flatten(3) * 2.0 ** (exponents_ERG[..., None] - 127)
        plain[name] = made.flatten(2).transpose(1, 2)
        stored[f"{name}_blocks"] = bytes_ERGB.byte()
        stored[f"{name}_scales"] = exponents_ERG.byte()
    config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    say_quantised(folder, quant_method="mxfp4")
    return plain


QUANTISED = {"fp8": save_fp8, "mxfp4": save_mxfp4}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_read_as_float32_and_saved_so(
    kind, base, tmp_path, capsys, monkeypatch
):
    """Also where a GPU could take them as they are."""
    plain = QUANTISED[kind](tmp_path / "model", base)
    critic = worker(model=str(tmp_path / "model"))
    assert f", {kind} read as float32 (no optimizer state)" in capsys.readouterr().out
    critic.export_hf(tmp_path / "hf")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())

    auto = transformers.AutoModelForTokenClassification
    saved = auto.from_pretrained(tmp_path / "hf")
    for name, x in saved.state_dict().items():
        assert x.dtype == torch.float32
        assert name.startswith("score") or torch.equal(x, plain[name]), name

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    weights, _ = read(critic_fsdp, tmp_path / "model")
    assert {x.dtype for x in weights.values()} == {torch.float32}
    for name, x in plain.items():
        assert name == "lm_head.weight" or torch.equal(weights[f"model.{name[6:]}"], x), name


@pytest.mark.parametrize("kind", QUANTISED)
def test_weights_whose_scales_nothing_reads_are_refused(kind, base, tmp_path):
    """Megatron reads none, nor does transformers if the config does not name them."""
    QUANTISED[kind](tmp_path, base)
    begin = f"--model {tmp_path}: its weights are quantised, and nothing here reads "
    with refused("_scale", begin):
        read(critic_megatron, tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["quantization_config"]
    path.write_text(json.dumps(fields))
    with refused("_scale", begin):
        read(critic_fsdp, tmp_path)


@pytest.mark.parametrize(
    "script", [critic_fsdp.Config, critic_megatron.Config, ppo_loop.ActorConfig]
)
def test_weights_that_nothing_turns_into_float32_are_refused(script, base, tmp_path):
    save_safe(tmp_path, base)
    say_quantised(tmp_path, quant_method="gptq", bits=4)
    begin = f"{script.prefix}model {tmp_path}: "
    with refused("is quantised (gptq); give it in bfloat16 or float32", begin):
        common.load_config(script(model=str(tmp_path)))


def cut(path):
    """Leaves the first half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def save_in_several(folder, base):
    model = transformers.AutoModelForCausalLM.from_config(CONFIG)
    model.save_pretrained(folder, max_shard_size="100KB")


def save_with_code(folder, base):
    save(folder, base | {"hook": print})


def save_with_head(folder, base):
    save_safe(folder, base)
    save_file(linear("v_head.summary"), folder / "value_head.safetensors")


@pytest.mark.parametrize("store, name, damage", [
    (save_in_several, "model-00002-*", cut), (save_in_several, "model-00002-*", Path.unlink),
    (save, "pytorch_model.bin", cut), (save_with_code, "pytorch_model.bin", repr),
    (save_with_head, "value_head.safetensors", cut),
])  # fmt: skip
def test_a_file_that_does_not_load_is_one_line(store, name, damage, base, tmp_path):
    """With its name, where transformers' own words may lack it."""
    store(tmp_path, base)
    (path,) = tmp_path.glob(name)
    damage(path)
    begin = f"--model {tmp_path}: its weights do not load ("
    with refused("Error: ", begin):
        read(critic_fsdp, tmp_path)
    with refused(f"{path.name} does not load (", begin):
        read(critic_megatron, tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    torch.save(linear("v_head.summary"), tmp_path / "training_args.bin")
    begin = f"--model {tmp_path}: its weights do not load ("
    for script, words in zip(SCRIPTS, ("no file named model.saf", "there is no model.saf")):
        with refused(words, begin):
            read(script, tmp_path)

    # with an index that is cut
    (tmp_path / "pytorch_model.bin.index.json").write_text("{")
    for script in SCRIPTS:
        with refused("its weights do not load (JSONDecodeError: "):
            read(script, tmp_path)


def test_a_model_without_a_tokenizer_says_so(base, tmp_path, capsys):
    save_safe(tmp_path, base)
    common.load_config(critic_fsdp.Config(model=str(tmp_path)))
    assert f"tokenizer  none in {tmp_path}, so rows must be token ids" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["model", "tokenizer"])
def test_a_tokenizer_that_is_there_but_does_not_load_is_named(flag, base, tmp_path):
    save_safe(tmp_path, base)
    common.char_tokenizer().save_pretrained(tmp_path)
    cut(tmp_path / "tokenizer.json")
    begin = f"--tokenizer: that of {tmp_path} does not load"
    with refused("; mend it or give another (", begin):
        common.load_config(critic_fsdp.Config(**{flag: str(tmp_path)}))


# ---- Models whose code comes with them -----------------------------------------------------------

CODE = {
    "configuration_own.py": """
from transformers import Qwen2Config


class OwnConfig(Qwen2Config):
    model_type = "own"
""",
    "modeling_own.py": """
from transformers import Qwen2ForCausalLM, Qwen2Model

from .configuration_own import OwnConfig


class OwnModel(Qwen2Model):
    config_class = OwnConfig

    def forward(self, *args, **options):
        out = super().forward(*args, **options)
        out.last_hidden_state = 2 * out.last_hidden_state
        return out


class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
""",
}


def save_own(folder, base, monkeypatch, model_config=CONFIG):
    """A Qwen2 whose hidden states are twice as large, by code that lies next to its weights."""
    modules = folder / "modules"  # transformers copies the code there
    for owner in (common, transformers.dynamic_module_utils):
        monkeypatch.setattr(owner, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    common.own_code.cache_clear()

    for name in ("plain", "own"):
        model_config.save_pretrained(folder / name)
        save_file(base, folder / name / "model.safetensors", metadata={"format": "pt"})
    for name, text in CODE.items():
        (folder / "own" / name).write_text(text)
    config = json.loads((folder / "own/config.json").read_text()) | {"model_type": "own"}
    places = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    places["AutoModelForCausalLM"] = "modeling_own.OwnForCausalLM"
    (folder / "own/config.json").write_text(json.dumps(config | {"auto_map": places}))
    return str(folder / "own")


def test_code_that_comes_with_a_model_runs_only_if_asked(base, tmp_path, monkeypatch, capfd):
    """Values are those of transformers' class with what the code does; one line says that it runs,
    and an export brings it along."""
    own = save_own(tmp_path, base, monkeypatch)
    for prefix, parse in (
        ("--", lambda: critic_fsdp.CriticWorker(critic_fsdp.Config(model=own))),
        ("--", lambda: critic_megatron.CriticWorker(critic_megatron.Config(model=own))),
        ("--actor.", lambda: ppo_loop.set_up(ppo_loop.parse(["--actor.model", own]))),
        ("--critic.", lambda: ppo_loop.set_up(ppo_loop.parse(["--critic.model", own]))),
    ):
        with refused(f"then {prefix}trust-remote-code runs it", begin=f"{prefix}model {own}: "):
            parse()

    capfd.readouterr()
    worker = critic_fsdp.CriticWorker(critic_fsdp.Config(model=own, trust_remote_code=True))
    said = f"code       --trust-remote-code: {own} runs AutoConfig, AutoModel, AutoModelForCausalLM"
    assert capfd.readouterr().out.count(said) == 1
    worker.init_model()
    batch = random_batch(4, vocab_size=60, idle=False)
    values = worker.compute_values(batch)

    plain = critic_fsdp.CriticWorker(critic_fsdp.Config(model=str(tmp_path / "plain")))
    plain.init_model()
    head = plain.critic.model.score
    with torch.no_grad():
        head.weight.mul_(2)
    expected = plain.compute_values(batch)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
    assert expected.abs().max() > 0.1

    worker.export_hf(tmp_path / "hf")
    assert CODE.keys() <= {path.name for path in (tmp_path / "hf").iterdir()}
    fields = {"model": str(tmp_path / "hf"), "trust_remote_code": True}
    again = critic_fsdp.CriticWorker(critic_fsdp.Config(**fields))
    again.init_model()
    assert torch.equal(again.compute_values(batch), values)


def test_an_actor_and_a_reward_model_bring_their_code(tmp_path, monkeypatch):
    """PPO with both, and with a critic that starts as the actor; rollout and actor agree."""
    tokenizer = common.char_tokenizer()
    model_config = copy.deepcopy(CONFIG)
    model_config.vocab_size = len(tokenizer)
    base = transformers.AutoModelForCausalLM.from_config(model_config).state_dict()
    own = save_own(tmp_path, base, monkeypatch, model_config)
    tokenizer.save_pretrained(own)
    judge = critic_fsdp.CriticWorker(critic_fsdp.Config(model=own, trust_remote_code=True))
    judge.init_model()
    judge.export_hf(tmp_path / "judge")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    words = f"--actor.model {own} --actor.trust-remote-code --steps 1"
    words += f" --prompts {tmp_path}/rows.jsonl --reward-model {tmp_path}/judge"
    words += f" --out-dir {tmp_path}/out"
    words += " --max-response-length 6 --train-batch-size 2"
    ppo_loop.main(ppo_loop.parse(words.split()))
    [step] = [x for x in common.read_lines(tmp_path / "out/metrics.jsonl") if "reward/mean" in x]
    assert step["rollout/log_prob_diff_max"] < 1e-5
    for name in ("hf", "critic_hf"):
        assert CODE.keys() <= {path.name for path in (tmp_path / "out" / name).iterdir()}
