"""critic_fsdp.py on one process: verl's recorded run, weights from anywhere, precision, schedule, checkpoints."""

import contextlib
import dataclasses
import gc
import json
import math
import statistics

import pytest
import torch
import transformers
from helpers import SHARED, captured_gradients, full_weights, needs_shared, random_batch, rows_of, write_manifest
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp._flat_param import FlatParameter

import common
import critic_fsdp
from common import UserError
from critic_fsdp import Config, CriticWorker

STRATEGIES = ("fsdp2", "fsdp1", "none")


def worker(**fields):
    """A critic with its model built."""
    w = CriticWorker(Config(**fields))
    w.init_model()
    return w


def batch_for(w, n=12, seed=0):
    return random_batch(n, seed, vocab_size=min(w.vocab_size, 99))  # above are the placeholders of images


# ---------------------------------------------------------------------------------------------------------------------
# verl's own run
# ---------------------------------------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("packed", [True, False])
def test_three_steps_equal_verl(strategy, packed, tmp_path):
    """Values, gradients before clipping, metrics, weights and Adam moments of three steps of verl 0.6.1 in float32."""
    oracle = torch.load(SHARED / "oracle" / "verl_0.6.1_fp32.pt", weights_only=True)
    case, padded, hf = oracle["cases"]["micro4"], oracle["batch"], oracle["hf_config"]
    hf = {k: v for k, v in hf.items() if k not in ("attn_implementation", "hidden_dropout", "summary_dropout_prob")}
    model = transformers.Qwen2ForTokenClassification(transformers.Qwen2Config(**hf))
    model.load_state_dict(oracle["init_state"])
    model.save_pretrained(tmp_path)

    is_token = padded["attention_mask"].bool()
    columns = {}  # responses take the last 9 of 16 positions
    for name, x in (
        ("response_mask", padded["response_mask"]),
        ("returns", padded["returns"]),
        ("values", case["old_values"]),
    ):
        whole = torch.zeros(12, 16, dtype=x.dtype)
        whole[:, -9:] = x
        columns[name] = whole[is_token]
    batch = common.Batch(
        input_ids=padded["input_ids"][is_token],
        cu_seqlens=common.cumulative(is_token.sum(1)),
        response_mask=columns["response_mask"].bool(),
        row_id=torch.arange(12),
        truncated=torch.zeros(12, dtype=torch.bool),
        returns=columns["returns"],
        values=columns["values"],
    )
    set_up = case["critic"]
    w = worker(
        model=str(tmp_path),
        strategy=strategy,
        use_remove_padding=packed,
        shuffle=False,
        **{
            k: set_up[k]
            for k in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "cliprange_value", "grad_clip")
        },
        **{
            k: set_up[k]
            for k in ("ppo_epochs", "loss_agg_mode", "lr", "weight_decay", "forward_micro_batch_size_per_gpu")
        },
        betas=tuple(set_up["betas"]),
    )
    expected_values = torch.zeros(12, 16)
    expected_values[:, -9:] = case["values"]
    torch.testing.assert_close(w.compute_values(batch), expected_values[is_token], rtol=1e-5, atol=2e-6)

    for step, rows in enumerate((range(0, 4), range(4, 8), range(8, 12))):
        with captured_gradients(w.critic) as seen:
            metrics = w.update_critic(batch.select(rows))
        for key, recorded in case["metrics"].items():
            assert metrics[key] == pytest.approx(recorded[step], rel=1e-5, abs=1e-6), (step, key)
        for name, gradient in case["pre_clip_grads"][step].items():
            torch.testing.assert_close(seen[0][name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))
    for name, weight in full_weights(w.critic).items():
        torch.testing.assert_close(weight, case["final_state"][name], rtol=1e-5, atol=1e-6, msg=name)
    tensors, _, _ = critic_fsdp.checkpoint_tensors(w.critic.model, w.critic.optimizer)
    for name, state in case["adam"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            ours = critic_fsdp.full_tensor(tensors[f"optimizer.{name}.{key}"])
            torch.testing.assert_close(ours, state[key], rtol=1e-4, atol=1e-6 * float(state[key].abs().max()), msg=name)


# ---------------------------------------------------------------------------------------------------------------------
# Weights from anywhere
# ---------------------------------------------------------------------------------------------------------------------


def tiny(kind="qwen2", **changes):
    return transformers.AutoConfig.for_model(**{**common.tiny_config(f"tiny-{kind}", 60), **changes})


def save_checkpoint_of(kind, folder):
    """A checkpoint as users have them -> (backbone, head weight or None, head bias or None)."""
    torch.manual_seed(7)
    if kind in ("base LM", "tied LM"):
        model = transformers.AutoModelForCausalLM.from_config(tiny(tie_word_embeddings=kind == "tied LM"))
        model.save_pretrained(folder)
        return model.model, None, None
    if kind == "token classification":
        model = transformers.AutoModelForTokenClassification.from_config(tiny(num_labels=1))
        model.score.bias.data.fill_(0.3)
        model.save_pretrained(folder)
        return model.model, model.score.weight, model.score.bias
    if kind == "reward model":
        model = transformers.AutoModelForSequenceClassification.from_config(tiny("llama", num_labels=1))
        model.save_pretrained(folder)
        return model.model, model.score.weight, None
    if kind == "two labels":
        model = transformers.AutoModelForTokenClassification.from_config(tiny(num_labels=2))
        model.save_pretrained(folder)
        return model.model, None, None
    model = transformers.AutoModelForCausalLM.from_config(tiny())  # TRL keeps a Linear named summary beside the LM
    model.save_pretrained(folder)
    head = {"v_head.summary.weight": torch.randn(1, 64), "v_head.summary.bias": torch.randn(1)}
    if kind == "TRL safetensors":
        save_file({**load_file(folder / "model.safetensors"), **head}, folder / "model.safetensors", {"format": "pt"})
    else:
        torch.save({**load_file(folder / "model.safetensors"), **head}, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return model.model, head["v_head.summary.weight"], head["v_head.summary.bias"]


@pytest.mark.parametrize(
    "kind, story",
    [
        ("base LM", "value head new, normal(0, 0.124)"),
        ("tied LM", "value head new, normal(0, 0.124)"),
        ("token classification", "value head from its score.weight"),
        ("reward model", "value head from its score.weight (no bias: 0)"),
        ("two labels", "value head new, normal(0, 0.124) (its score.weight is (2, 64), not (1, 64))"),
        ("TRL safetensors", "value head from its v_head.summary.weight"),
        ("TRL bin", "value head from its v_head.summary.weight"),
    ],
)
def test_checkpoints_of_every_kind_load_and_are_named(kind, story, tmp_path, capsys):
    backbone, head, bias = save_checkpoint_of(kind, tmp_path)
    w = worker(model=str(tmp_path))
    assert story in capsys.readouterr().out
    weights = full_weights(w.critic)
    for name, expected in backbone.state_dict().items():
        assert torch.equal(weights.pop(f"model.{name}"), expected), name
    if head is not None:
        assert torch.equal(weights["score.weight"], head)
    else:
        assert weights["score.weight"].std() == pytest.approx(1 / math.sqrt(65), rel=0.3)
    assert torch.equal(weights["score.bias"], bias if bias is not None else torch.zeros(1))
    assert set(weights) == {"score.weight", "score.bias"}


def test_value_head_choices(tmp_path):
    save_checkpoint_of("token classification", tmp_path)
    zero = full_weights(worker(model=str(tmp_path), value_head_init="zero").critic)
    assert (zero["score.weight"] == 0).all() and (zero["score.bias"] == 0).all()
    new = [full_weights(worker(model=str(tmp_path), value_head_init="normal", seed=s).critic) for s in (0, 0, 1)]
    assert torch.equal(new[0]["score.weight"], new[1]["score.weight"])
    assert not torch.equal(new[0]["score.weight"], new[2]["score.weight"])
    save_checkpoint_of("two labels", tmp_path)
    with pytest.raises(UserError, match="--value-head-init checkpoint.*holds no value head .its score.weight is"):
        worker(model=str(tmp_path), value_head_init="checkpoint")


def test_defaults_follow_what_the_weights_are(tmp_path):
    save_checkpoint_of("base LM", tmp_path)
    assert worker(model=str(tmp_path)).critic.peak_lr == 1e-5 and worker().critic.peak_lr == 1e-3
    assert worker(lr=0.1).critic.peak_lr == 0.1


def test_from_scratch_takes_the_architecture_alone(tmp_path, capsys):
    save_checkpoint_of("token classification", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    new = [full_weights(worker(model=str(tmp_path), from_scratch=True, seed=s).critic) for s in (0, 0, 1)]
    assert "random weights (seed 1); value head new" in capsys.readouterr().out
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(new[0][name], new[1][name]) and not torch.equal(new[0][name], new[2][name])
    with pytest.raises(UserError, match="--model .*: its weights do not load"):
        worker(model=str(tmp_path))


def test_weights_in_half_precision_become_float32_master_weights(tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(tiny()).bfloat16()
    model.save_pretrained(tmp_path)
    weights = full_weights(worker(model=str(tmp_path)).critic)
    for name, x in model.model.state_dict().items():
        assert weights[f"model.{name}"].dtype == torch.float32 and torch.equal(weights[f"model.{name}"], x.float())


def test_a_checkpoint_whose_files_are_broken_is_named(tmp_path):
    save_checkpoint_of("base LM", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match="--model .*: its weights do not load"):
        worker(model=str(tmp_path))
    with pytest.raises(UserError, match="--model tiny-qwen7: no such preset; there are tiny-qwen2, "):
        worker(model="tiny-qwen7")


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    save_checkpoint_of("base LM", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="1 weights are not in the checkpoint, e.g. layers.1.mlp.up_proj.weight"):
        worker(model=str(tmp_path))


def test_config_overrides_and_attention_choice_apply(capsys):
    changes = {"num_hidden_layers": 3, "hidden_size": 32}
    w = worker(override_config=json.dumps(changes))
    assert len(w.critic.model.model.layers) == 3 and w.critic.model.score.in_features == 32
    assert "kernel sdpa" in capsys.readouterr().out
    batch = batch_for(w)
    eager = worker(override_config=json.dumps(changes), attn_implementation="eager")
    assert "kernel eager" in capsys.readouterr().out
    torch.testing.assert_close(w.compute_values(batch), eager.compute_values(batch), rtol=1e-4, atol=1e-5)
    for choice, name in (("auto", "sdpa"), ("eager", "eager"), ("sdpa", "sdpa")):
        padded = worker(use_remove_padding=False, attn_implementation=choice)
        assert padded.critic.model.model.config._attn_implementation == name
    for key in ("layers", "model_type"):
        with pytest.raises(UserError, match=f"--override-config: Qwen2Config has no '{key}'"):
            worker(override_config=json.dumps({key: 3}))
    with pytest.raises(UserError, match="--override-config .*'hidden_size' expected int"):
        worker(override_config='{"hidden_size": "wide"}')
    with pytest.raises(UserError, match="must be a JSON object"):
        worker(override_config="[]")


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPT2Config(
            vocab_size=60, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5,
            summary_first_dropout=0.5, classifier_dropout=0.5,
        ),
        transformers.OPTConfig(
            vocab_size=60, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
            word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5, activation_dropout=0.5, layerdrop=0.5,
        ),
        transformers.GPTNeoXConfig(
            vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            hidden_dropout=0.5, attention_dropout=0.5, classifier_dropout=0.5,
        ),
        transformers.MixtralConfig(
            vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, attention_dropout=0.5, router_jitter_noise=0.5,
        ),
    ],
    ids=lambda c: c.model_type,
)  # fmt: skip
@pytest.mark.parametrize("packed", [True, False])
def test_dropout_is_off_everywhere(config, packed, tmp_path):
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    w = worker(model=str(tmp_path), use_remove_padding=packed)
    batch = batch_for(w, 6)
    w.critic.model.eval()
    micro = w.critic.micro_batch(batch, range(6))
    quiet = w.critic.forward(micro)
    w.critic.model.train()
    for _ in range(3):
        torch.testing.assert_close(w.critic.forward(micro), quiet, rtol=1e-5, atol=1e-6)


# a text model of Gemma 3 and OPT have no token-classification class in transformers
@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2", "qwen3-moe", "gemma3", "opt"])
def test_an_export_loads_and_gives_the_same_values(kind, tmp_path):
    common_sizes = dict(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    if kind == "gemma3":
        config = transformers.Gemma3TextConfig(**common_sizes, num_key_value_heads=1, head_dim=16, intermediate_size=64)
    elif kind == "opt":
        config = transformers.OPTConfig(**common_sizes, ffn_dim=64, word_embed_proj_dim=32)
    else:
        config = tiny(kind)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "base")
    w = worker(model=str(tmp_path / "base"), lr=1e-2)
    batch = batch_for(w)
    w.update_critic(batch)  # so that the head and the weights are no longer those of the folder
    values = w.compute_values(batch)
    w.export_hf(tmp_path / "hf")
    again = worker(model=str(tmp_path / "hf"), value_head_init="checkpoint")
    torch.testing.assert_close(again.compute_values(batch), values, rtol=0, atol=1e-6)
    if kind in ("gemma3", "opt"):
        assert (tmp_path / "hf" / "value_head.safetensors").exists()
        return
    model, info = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(info.values()), info
    theirs = torch.cat([model(input_ids=ids[None]).logits[0, :, 0] for ids in batch.input_ids.split(batch.lengths)])
    theirs = common.values_of_actions(theirs.detach(), batch.response_mask)
    torch.testing.assert_close(theirs, values, rtol=1e-5, atol=1e-5)


def test_an_export_overwrites_an_older_one_and_keeps_the_tokenizer(tmp_path):
    w = worker()
    w.export_hf(tmp_path / "hf")
    (tmp_path / "hf" / "stale").write_text("")
    w.export_hf(tmp_path / "hf")
    assert {p.name for p in tmp_path.iterdir()} == {"hf"} and not (tmp_path / "hf" / "stale").exists()
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("1+1=")["input_ids"]
        == w.tokenizer("1+1=")["input_ids"]
    )


# ---------------------------------------------------------------------------------------------------------------------
# Packing
# ---------------------------------------------------------------------------------------------------------------------


def hybrid():
    sizes = dict(vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, linear_num_key_heads=2, linear_num_value_heads=2)
    return transformers.Qwen3NextConfig(
        **sizes, **heads, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, decoder_sparse_step=1,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip


SMALL = dict(
    vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
REFUSED = {
    "hybrid linear attention": (hybrid(), "lets tokens see later ones or another row"),
    "state space": (
        transformers.BambaConfig(
            **SMALL, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, attn_layer_indices=[1]
        ),
        "lets tokens see later ones or another row",
    ),
    "attention of its own": (
        transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=2),
        "brings its own attention",
    ),
    "attention of its own, by class": (
        transformers.FalconConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
        "cannot be built",
    ),
    "chunked attention": (
        transformers.Llama4TextConfig(
            **{**SMALL, "num_hidden_layers": 4}, head_dim=16, num_local_experts=2, attention_chunk_size=8,
            intermediate_size_mlp=64,
        ),
        "layers of chunked_attention, which packed rows might lose",
    ),
    "a window it does not pass on": (
        transformers.PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=8),
        "does not tell its attention the sliding window of 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_packing_would_change_is_refused_and_runs_padded(name, tmp_path):
    config, reason = REFUSED[name]
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"--model .*{reason}.*; add --no-use-remove-padding"):
        worker(model=str(tmp_path), value_head_init="zero")  # zero: values alone would show no leak
    w = worker(model=str(tmp_path), use_remove_padding=False)
    batch = batch_for(w, 5)
    values = w.compute_values(batch)
    for i, (row, expected) in enumerate(zip(batch.split(1), values.split(batch.lengths), strict=True)):
        torch.testing.assert_close(w.compute_values(row), expected, rtol=1e-4, atol=1e-5, msg=f"row {i}")


def test_gradients_of_micro_batches_are_not_added_up_in_bfloat16():
    for fields in ({"strategy": "fsdp1", "param_dtype": "bfloat16"}, {"reduce_dtype": "bfloat16"}):
        with pytest.raises(UserError, match="--defer-grad-sync: .*would add gradients up in bfloat16"):
            worker(defer_grad_sync=True, **fields)


def test_a_model_with_weights_that_are_not_finite_is_refused(tmp_path):
    model = transformers.AutoModel.from_config(transformers.Qwen2Config(**SMALL))
    model.layers[0].mlp.up_proj.weight.data[3, 2] = math.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--model .*: gives hidden states that are not finite: are its weights\\?$"):
        worker(model=str(tmp_path))


def test_a_model_that_sees_the_future_is_refused_packed_and_padded(tmp_path):
    sizes = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    transformers.AutoModel.from_config(transformers.BertConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="BertSelfAttention asks for more than causal attention"):
        worker(model=str(tmp_path))
    with pytest.raises(UserError, match="BertModel lets tokens see later ones"):
        worker(model=str(tmp_path), use_remove_padding=False)


@pytest.mark.parametrize("name", common.TINY)
def test_packed_and_padded_values_are_the_same(name):
    """Rows longer than the sliding windows, cut to 8 here, of the presets that have one."""
    fields = dict(model=name, seed=5)
    if "sliding_window" in common.tiny_config(name, 60):
        fields["override_config"] = '{"sliding_window": 8}'
    packed, padded = worker(**fields), worker(**fields, use_remove_padding=False)
    batch = batch_for(packed, 9)
    torch.testing.assert_close(packed.compute_values(batch), padded.compute_values(batch), rtol=1e-4, atol=1e-5)


def test_a_soft_cap_is_not_dropped_in_padded_rows():
    with pytest.raises(UserError, match="--attn-implementation sdpa: would drop the soft cap of tiny-gemma2"):
        worker(model="tiny-gemma2", attn_implementation="sdpa", use_remove_padding=False)
    w = worker(model="tiny-gemma2", use_remove_padding=False)
    assert w.critic.model.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_above_the_token_budget_is_named_and_no_micro_batch_exceeds_it(packed, monkeypatch):
    w = worker(ppo_max_token_len_per_gpu=50, use_remove_padding=packed)
    batch = batch_for(w, 30)
    assert max(batch.lengths) < 50
    sizes, forward = [], critic_fsdp.ValueModel.forward
    monkeypatch.setattr(
        critic_fsdp.ValueModel,
        "forward",
        lambda self, **kw: (sizes.append(kw["input_ids"].numel()), forward(self, **kw))[1],
    )
    w.compute_values(batch)
    w.update_critic(batch)
    assert max(sizes) <= 50 and sum(sizes) >= 2 * len(batch.input_ids)
    if packed:
        assert sum(sizes) == 2 * len(batch.input_ids)  # not one token of padding
    long = random_batch(8, 1, vocab_size=60, longest=90)
    name = int(long.row_id[long.lengths.index(max(long.lengths))])
    for method in (w.compute_values, w.update_critic):
        with pytest.raises(UserError, match=f"-max-token-len-per-gpu 50: row {name} has {max(long.lengths)} tokens"):
            method(long)
    assert CriticWorker(dataclasses.replace(w.config, ppo_micro_batch_size_per_gpu=2))  # rows, not tokens, decide then


# ---------------------------------------------------------------------------------------------------------------------
# Precision
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_computes_in_bfloat16_but_keeps_weights_values_and_loss_in_float32(strategy):
    exact, w = worker(strategy=strategy), worker(strategy=strategy, param_dtype="bfloat16")
    batch, dtypes = batch_for(w, 40), []
    hook = w.critic.model.model.layers[0].register_forward_hook(
        lambda m, args, out: dtypes.append((out[0] if isinstance(out, tuple) else out).dtype)
    )
    values = w.compute_values(batch)
    hook.remove()
    projections = {m.weight.dtype for m in w.critic.model.modules() if isinstance(m, torch.nn.Linear)}
    assert projections == {torch.float32}  # the master weights
    assert values.dtype == torch.float32
    actions = values[batch.response_mask]
    assert (actions.bfloat16().float() != actions).float().mean() > 0.9  # not rounded to bfloat16 anywhere
    difference = (values - exact.compute_values(batch)).abs().max()
    assert 1e-4 < difference < 0.1, difference  # the products are in bfloat16
    before = full_weights(w.critic)
    metrics = w.update_critic(batch)
    after = full_weights(w.critic)
    assert all(x.dtype == torch.float32 for x in after.values()) and math.isfinite(metrics["critic/grad_norm"])
    assert all(not torch.equal(before[n], after[n]) for n in ("score.weight", "model.layers.0.mlp.up_proj.weight"))
    exact.update_critic(batch)
    moved = torch.cat([(after[n] - before[n]).flatten() for n in after])
    as_exact = torch.cat([(x - before[n]).flatten() for n, x in full_weights(exact.critic).items()])
    assert torch.nn.functional.cosine_similarity(moved, as_exact, dim=0) > 0.9


# ---------------------------------------------------------------------------------------------------------------------
# Schedule, skipped steps, mini-batches
# ---------------------------------------------------------------------------------------------------------------------


def rates(n, batch_rows=12, **fields):
    w = worker(lr=1.0, grad_clip=1e-6, **fields)
    batch = batch_for(w, batch_rows)
    return [w.update_critic(batch)["critic/lr"] for _ in range(n)], w


def test_learning_rate_schedules():
    assert rates(3)[0] == [1.0, 1.0, 1.0]
    assert rates(5, lr_warmup_steps=4)[0] == [0.25, 0.5, 0.75, 1.0, 1.0]  # the first step is not at 0
    assert rates(3, lr_warmup_steps_ratio=0.2, total_training_steps=10)[0] == [0.5, 1.0, 1.0]
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    fields = dict(lr_scheduler_type="cosine", min_lr_ratio=0.1, total_training_steps=5)
    assert rates(6, lr_warmup_steps=1, **fields)[0] == pytest.approx([1.0, *cosine], abs=1e-12)
    with pytest.raises(UserError, match="--total-training-steps"):
        worker(lr_scheduler_type="cosine")
    seen, w = rates(2, ppo_mini_batch_size=4, ppo_epochs=2, lr_warmup_steps=12)
    assert w.critic.optimizer_steps == 12 and seen == [6 / 12, 1.0]  # one step a mini-batch; the last rate is reported


@pytest.mark.parametrize("poison", [math.nan, 1e30])  # found in the batch; found in the gradient, which overflows
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_is_not_finite_is_skipped_counted_and_forgotten(strategy, poison):
    w, clean = (worker(strategy=strategy, lr_warmup_steps=9, ppo_mini_batch_size=6, shuffle=False) for _ in range(2))
    good, bad = batch_for(w), batch_for(w)
    in_row_1 = common.row_of_token(bad.cu_seqlens) == 1
    bad.returns = torch.where(bad.response_mask & in_row_1, poison, bad.returns)
    for one in (w, clean):
        one.update_critic(good)
    before = full_weights(w.critic)
    metrics = w.update_critic(bad.select(range(6)))
    assert metrics["critic/skipped_steps"] == 1 and math.isnan(metrics["critic/grad_norm"] + metrics["critic/lr"])
    assert all(torch.equal(x, before[n]) for n, x in full_weights(w.critic).items())
    metrics = w.update_critic(bad)  # two mini-batches: the second one is sound
    assert metrics["critic/skipped_steps"] == 1 and math.isfinite(metrics["critic/grad_norm"])
    clean.update_critic(good.select(range(6, 12)))
    assert w.critic.optimizer_steps == clean.critic.optimizer_steps == 3  # the schedule did not advance
    for n, x in full_weights(clean.critic).items():
        assert torch.equal(x, full_weights(w.critic)[n]), n
    good.row_id = bad.row_id = 11 - good.row_id  # now the second one is not
    assert w.update_critic(bad)["critic/lr"] == w.critic.optimizer.param_groups[0]["lr"] == w.critic.peak_lr * 4 / 9


def test_a_mini_batch_without_an_action_makes_no_step():
    w = worker()
    batch = batch_for(w)
    w.update_critic(batch)
    before = full_weights(w.critic)
    batch.response_mask = torch.zeros_like(batch.response_mask)
    metrics = w.update_critic(batch)
    assert metrics["critic/skipped_steps"] == 1 and math.isnan(metrics["critic/vf_loss"])
    assert all(torch.equal(x, before[n]) for n, x in full_weights(w.critic).items())


def test_nan_where_nothing_is_learned_does_no_harm():
    w, clean = worker(), worker()
    batch, dirty = batch_for(w), batch_for(w)
    for name in ("values", "returns"):
        setattr(dirty, name, torch.where(dirty.response_mask, getattr(dirty, name), math.nan))
    assert w.update_critic(dirty)["critic/vf_loss"] == clean.update_critic(batch)["critic/vf_loss"]
    assert all(torch.equal(x, full_weights(clean.critic)[n]) for n, x in full_weights(w.critic).items())


def test_mini_batches_are_global_complete_and_shuffled_by_seed_update_and_epoch(monkeypatch):
    seen, split = [], common.Batch.split
    monkeypatch.setattr(common.Batch, "split", lambda self, n: (seen.append(self.row_id.tolist()), split(self, n))[1])
    w = worker(ppo_mini_batch_size=5, ppo_epochs=2)
    batch = random_batch(12, vocab_size=60, idle=False)
    w.update_critic(batch.select(permuted := common.permutation(12, "any order")))
    w.update_critic(batch)
    assert w.critic.optimizer_steps == 12  # 5 + 5 + 2 rows, twice, twice
    assert all(sorted(order) == list(range(12)) for order in seen) and len({tuple(o) for o in seen}) == 4
    assert permuted != list(range(12))
    first = [list(o) for o in seen]
    seen.clear()
    again = worker(ppo_mini_batch_size=5, ppo_epochs=2)
    again.update_critic(batch)
    again.update_critic(batch)
    assert seen == first  # the order in which the caller holds its rows does not matter
    seen.clear()
    worker(ppo_mini_batch_size=5, shuffle=False).update_critic(batch)
    assert seen == [list(range(12))]


def test_evaluation_equals_plain_formulas():
    w, gamma = worker(), 0.9
    rows = batch_for(w, 20)
    rows.token_level_rewards = torch.zeros(len(rows.input_ids))
    last = common.last_actions(rows.response_mask, rows.cu_seqlens)
    right = torch.arange(20) % 3 == 0
    rows.token_level_rewards[last[(last >= 0) & right]] = 1.0
    values, seen, targets, scores = w.compute_values(rows), [], [], {True: [], False: []}
    for b, (start, end) in enumerate(rows_of(rows)):
        actions = [t for t in range(start, end) if rows.response_mask[t]]
        seen += [float(values[t]) for t in actions]
        targets += [gamma ** (len(actions) - 1 - k) * float(right[b]) for k in range(len(actions))]
        if actions:
            scores[bool(right[b])].append(float(values[actions[-1]]))
    errors, mean = [r - v for r, v in zip(targets, seen, strict=True)], statistics.fmean(targets)
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[True] for n in scores[False]]
    metrics = common.evaluate(w, rows, gamma)
    assert metrics["eval/vf_loss"] == pytest.approx(0.5 * statistics.fmean(x * x for x in errors), rel=1e-6)
    assert metrics["eval/constant_loss"] == pytest.approx(
        0.5 * statistics.fmean((r - mean) ** 2 for r in targets), rel=1e-6
    )
    assert metrics["eval/explained_var"] == pytest.approx(
        1 - statistics.pvariance(errors) / statistics.pvariance(targets), rel=1e-5
    )
    assert metrics["eval/auc"] == pytest.approx(statistics.fmean(pairs))
    rows.token_level_rewards *= 2
    assert math.isnan(common.evaluate(w, rows, gamma)["eval/auc"])  # rewards of 0 and 2 are no labels


def test_limits_of_compute_values_are_its_own(monkeypatch):
    seen, cut = [], common.micro_batches
    monkeypatch.setattr(common, "micro_batches", lambda shares, *limits: (seen.append(limits), cut(shares, *limits))[1])
    sizes = dict(ppo_max_token_len_per_gpu=100, ppo_micro_batch_size_per_gpu=None)
    for fields, training, forward in (
        ({}, (100, None), (100, None)),
        ({"forward_max_token_len_per_gpu": 300}, (100, None), (300, None)),
        ({"forward_micro_batch_size_per_gpu": 2}, (100, None), (None, 2)),
        ({"ppo_micro_batch_size_per_gpu": 3}, (100, 3), (100, 3)),
    ):
        w = worker(**{**sizes, **fields})
        batch = batch_for(w)
        seen.clear()
        w.compute_values(batch)
        w.update_critic(batch)
        assert [s[:2] for s in seen] == [forward, training], fields
    w = worker(ppo_max_token_len_per_gpu=50, forward_max_token_len_per_gpu=20)
    with pytest.raises(UserError, match="--forward-max-token-len-per-gpu 20: row"):
        w.compute_values(batch)
    assert w.update_critic(batch)["critic/skipped_steps"] == 0


AUTO = {"ppo_max_token_len_per_gpu": "auto", "memory_limit_gib": 0.02}
LARGE = {"override_config": '{"vocab_size": 200000}', "gradient_checkpointing": True, "memory_limit_gib": 0.5}


@pytest.mark.parametrize(
    "fields",
    [{}, {"use_remove_padding": False}, {"gradient_checkpointing": True}, LARGE],
    ids=["packed", "padded", "recompute", "a gradient larger than many tokens"],
)
def test_an_automatic_budget_fills_the_memory_and_changes_no_update(fields, capsys):
    auto, batch = worker(**AUTO | fields), random_batch(40)
    metrics, equation = auto.update_critic(batch), capsys.readouterr().out
    budget = auto.config.ppo_max_token_len_per_gpu
    assert f" = {budget:,} tokens a micro-batch" in equation and auto.critic.config is auto.config

    again = worker(**fields | {"ppo_max_token_len_per_gpu": 41, "memory_limit_gib": None})  # the default is roomy
    for name, x in again.update_critic(batch).items():
        assert name.startswith("perf/") or metrics[name] == pytest.approx(x, rel=1e-6), name

    longest = max(batch.lengths)
    full = common.probe_rows(budget // longest, longest)
    counts = common.loss_counts(full.response_mask, full.cu_seqlens)
    peak = common.peak_bytes(
        lambda: auto.critic.forward_backward(full, [range(len(full))], counts), torch.device("cpu")
    )  # fmt: skip
    state = 16 * sum(p.numel() for p in auto.critic.model.parameters())
    assert 0.8 < (peak + state) / (auto.config.memory_limit_gib * 2**30) < 0.91


def test_an_automatic_budget_names_the_row_that_does_not_fit():
    w = worker(**AUTO | {"memory_limit_gib": 0.002})
    with pytest.raises(UserError, match="auto: rows.jsonl:9 takes 40 tokens, too many for the memory; add --gradient-"):
        w.find_budget(40, "rows.jsonl:9")
    assert w.config.ppo_max_token_len_per_gpu == "auto"


def test_a_batch_without_rows_has_no_values():
    for fields in ({}, AUTO):
        w = worker(**fields)
        assert len(w.compute_values(batch_for(w).select([]))) == 0


def test_ids_and_images_that_the_model_cannot_take_are_refused():
    w = worker()
    batch = batch_for(w)
    batch.multi_modal_inputs = [{"images": ["x.png"]} if b == 2 else {} for b in range(len(batch))]
    with pytest.raises(ValueError, match="row 2: multi_modal_inputs: this critic reads text only"):
        w.compute_values(batch)
    batch.multi_modal_inputs = None
    batch.input_ids[3] = 10**6
    with pytest.raises(ValueError, match="row 0: token id 1000000 is outside the vocabulary of 99"):
        w.update_critic(batch)
    most = w.model_config.max_position_embeddings = max(batch.lengths) - 1
    with pytest.raises(ValueError, match=f"row .: {most + 1} tokens, longer than max_position_embeddings, {most}"):
        w.compute_values(batch)


def test_a_batch_without_a_needed_column_is_refused():
    w = worker()
    batch = batch_for(w)
    batch.returns = None
    w.compute_values(batch)
    with pytest.raises(ValueError, match="update_critic needs the columns returns of the batch"):
        w.update_critic(batch)


def test_metrics_are_means_over_tokens_and_steps_not_over_micro_batches():
    """verl 0.6.1 divides its loss metric twice by the number of micro-batches."""
    everything = worker(ppo_mini_batch_size=100)
    pieces = worker(ppo_mini_batch_size=100, ppo_micro_batch_size_per_gpu=1)
    batch = batch_for(everything, 24)
    whole, parts = everything.update_critic(batch), pieces.update_critic(batch)
    timing = {"perf/tokens_per_second", "perf/time_update", "perf/time_compute", "perf/time_comm_wait"}
    for key in whole.keys() - timing - {"perf/peak_memory_gib", "perf/mfu"}:
        assert whole[key] == pytest.approx(parts[key], rel=1e-5, abs=1e-6), key
    mask = batch.response_mask
    for name in ("values", "returns"):
        x = getattr(batch, name)[mask].double()
        expected = {"mean": x.mean(), "std": x.std(correction=0), "min": x.min(), "max": x.max()}
        for key, value in expected.items():
            assert whole[f"critic/{name}_{key}"] == pytest.approx(float(value), rel=1e-6)
    assert whole["perf/time_compute"] + whole["perf/time_comm_wait"] == pytest.approx(whole["perf/time_update"])
    assert math.isnan(whole["perf/mfu"])  # no peak rate for a CPU


# ---------------------------------------------------------------------------------------------------------------------
# Plan
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"use_remove_padding": False}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-gemma2", "tiny-gpt2"])
def test_planned_activations_are_what_autograd_saves(model, dtype, fields):
    """Fake tensors against real ones, in one training forward of the same rows."""
    config, lengths, saved = Config(model=model, **fields), [9, 30, 9, 17], {}
    model_config = common.load_model_config(config, common.char_tokenizer())
    dtype = getattr(torch, dtype)
    real = critic_fsdp.build_skeleton(config, model_config, dtype).to_empty(device="cpu").train()
    weights = {x.untyped_storage()._cdata for x in (*real.parameters(), *real.buffers())}

    def note(x):
        if x.untyped_storage()._cdata not in weights:
            saved[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    lengths_run = lengths if config.use_remove_padding else [30] * 4
    ids = torch.ones(sum(lengths_run), dtype=torch.int64)
    position_ids = torch.cat([torch.arange(n) for n in lengths_run])
    shape = (1, -1) if config.use_remove_padding else (4, 30)
    common.set_pack(lengths, "cpu")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        mask = (position_ids.view(shape) < torch.tensor(lengths)[:, None]).long()
        masked = {} if config.use_remove_padding else {"attention_mask": mask}
        real(input_ids=ids.view(shape), position_ids=position_ids.view(shape), **masked)
    planned = common.saved_bytes(critic_fsdp.build_skeleton(config, model_config, dtype), config, lengths, "cpu")
    assert planned == sum(s.nbytes() for s in saved.values()) > 1e4


def test_a_plan_is_printed_as_equations_that_hold(capsys, tmp_path):
    flags = dict(ulysses_size=2, fsdp_size=4, gradient_checkpointing=True)
    critic_fsdp.main(critic_fsdp.Run(critic=Config(**flags), plan=8, out_dir=str(tmp_path)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "layout       8 ranks = dp 4 x sp 2, fsdp2"
    assert lines[1].split(None, 1)[1] == "0.1 MiB = 105,281 x 4 bytes / 4 shards"
    sizes = [float(line.split()[1]) for line in lines[1:-2]]
    together = float(next(line for line in lines if line.startswith("together")).split()[1])
    assert together == pytest.approx(sum(sizes), abs=0.5) and not list(tmp_path.iterdir())
    offloaded = Config(**flags, offload_policy=True)
    critic_fsdp.main(critic_fsdp.Run(critic=offloaded, plan=8, out_dir=str(tmp_path)))
    there = capsys.readouterr().out.splitlines()
    assert there[1:4] == [f"{line}, on the host" for line in lines[1:4]] and there[4:-2] == lines[4:-2]
    less = sum(sizes) - sum(float(line.split()[1]) for line in there[4:-2])
    assert float(there[-2].split()[1]) == pytest.approx(together - less, abs=0.5) and less > 0.3


def a_plan(layers, **fields):
    """name -> bytes of the plan of one rank, of a tiny-qwen2 of so many layers."""
    config = Config(override_config=json.dumps({"num_hidden_layers": layers}), **fields)
    tokenizer = common.load_tokenizer(config)
    _, parts, _ = critic_fsdp.plan(config, common.load_model_config(config, tokenizer), [50] * 8, 1)
    return {name: size for name, (size, _) in parts.items()}


def test_a_plan_knows_which_layers_are_gathered_and_computed_again():
    one, two, four = (a_plan(n)["gathered"] for n in (1, 2, 4))
    assert 0 < two - one == a_plan(2)["unreduced"] and four == two  # the root and two layers at most, in float32
    assert "gathered" not in a_plan(2, strategy="none") and a_plan(2, strategy="none", param_dtype="bfloat16")["cast"]
    again = lambda **fields: a_plan(4, gradient_checkpointing=True, **fields)["activations"]
    assert again(freeze_layers=3) == pytest.approx(again(), rel=0.35)  # whichever trains, one is computed again
    padded = lambda tokens: a_plan(2, use_remove_padding=False, ppo_max_token_len_per_gpu=tokens)["activations"]
    assert padded(349) == padded(300) < padded(350) < padded(400) == padded(10_000)  # 6, 7 and all 8 rows of 50


def test_a_plan_puts_no_more_padded_rows_into_a_micro_batch_than_the_critic():
    config = Config(use_remove_padding=False, ppo_max_token_len_per_gpu=300)
    model_config = common.load_model_config(config, common.load_tokenizer(config))
    _, parts, _ = critic_fsdp.plan(config, model_config, [100, 50, 50, 50, 50], 1)
    assert " of 3 padded rows" in parts["activations"][1]


# ---------------------------------------------------------------------------------------------------------------------
# Memory and checkpoints
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offload_and_onload_between_phases_change_nothing(strategy):
    still, moved = worker(strategy=strategy), worker(strategy=strategy)
    batch = batch_for(still)
    for step in range(3):
        metrics = []
        for w, moves in ((still, False), (moved, True)):
            with contextlib.ExitStack() as stack:
                if moves:
                    w.onload()
                    stack.callback(w.offload)
                batch.values = w.compute_values(batch)
                metrics.append(w.update_critic(batch)["critic/vf_loss"])
        assert metrics[0] == metrics[1], step
    moved.onload()
    assert all(torch.equal(x, full_weights(moved.critic)[n]) for n, x in full_weights(still.critic).items())


def live_storages():
    """address -> storage, of every tensor that Python knows of."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter, FlatParameter)]
    return {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_move_leaves_nothing_in_the_old_memory(strategy, monkeypatch):
    """With `to` made to copy, as it does between devices, no tensor looks at the old weights and moments any more."""
    before = live_storages()
    w = worker(strategy=strategy)
    batch = batch_for(w)
    w.update_critic(batch)
    old = {p: s for p, s in live_storages().items() if p not in before and s.nbytes() > 4 * 90}
    count = sum(p.numel() for p in w.critic.model.parameters())
    assert sum(s.nbytes() for s in old.values()) > 2.9 * 4 * count  # weights and two moments
    weights = full_weights(w.critic)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_, **__: x.clone())
    w.move(torch.device("cpu"))
    monkeypatch.undo()
    left = {p: s.nbytes() for p, s in live_storages().items() if p in old}
    assert sum(left.values()) < 0.05 * 4 * count, left
    assert all(torch.equal(x, weights[n]) for n, x in full_weights(w.critic).items())
    assert math.isfinite(w.update_critic(batch)["critic/grad_norm"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_equals_going_on_bit_for_bit(strategy, tmp_path):
    fields = dict(strategy=strategy, ppo_mini_batch_size=6, ppo_epochs=2, lr_warmup_steps=9)
    w = worker(**fields)
    batches = [batch_for(w, seed=s) for s in range(4)]
    for batch in batches[:2]:
        w.update_critic(batch)
    w.save_checkpoint(tmp_path / "step_2")
    expected = [w.update_critic(batch) for batch in batches[2:]]
    again = worker(**{**fields, "seed": 0})
    again.compute_values(batches[0])  # a model in use must let go of its gathered weights
    again.load_checkpoint(tmp_path / "step_2")
    for batch, metrics in zip(batches[2:], expected, strict=True):
        resumed = again.update_critic(batch)
        assert {k: v for k, v in resumed.items() if k.startswith("critic")} == {
            k: v for k, v in metrics.items() if k.startswith("critic")
        }
    weights = full_weights(again.critic)
    assert all(torch.equal(x, weights[n]) for n, x in full_weights(w.critic).items())
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    w.save_checkpoint(tmp_path / "step_4")
    torch.rand(7)
    again.load_checkpoint(tmp_path / "step_4")
    assert torch.equal(torch.rand(3), expected)  # random numbers go on too
    assert torch.equal(w.compute_values(batches[0]), again.compute_values(batches[0]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_saving_before_the_first_step_changes_nothing(strategy, tmp_path):
    saved, untouched, resumed = (worker(strategy=strategy) for _ in range(3))
    batch = batch_for(saved)
    saved.save_checkpoint(tmp_path / "step_0")
    resumed.load_checkpoint(tmp_path / "step_0")
    for _ in range(2):
        norms = {w.update_critic(batch)["critic/grad_norm"] for w in (saved, untouched, resumed)}
        assert len(norms) == 1
    for name, x in full_weights(untouched.critic).items():
        assert torch.equal(x, full_weights(saved.critic)[name]) and torch.equal(x, full_weights(resumed.critic)[name])


def test_a_checkpoint_holds_no_pickle_and_what_is_damaged_or_foreign_is_named(tmp_path, capsys):
    w = worker()
    w.update_critic(batch_for(w))
    w.save_checkpoint(tmp_path / "c")
    names = {p.name for p in (tmp_path / "c").iterdir()}
    shards = [n for n in names if n.endswith(".safetensors")]
    assert names == {*shards, "trainer.json", common.MANIFEST} and shards
    assert {p.name for p in tmp_path.iterdir()} == {"c"}
    for key, value in (
        ("num_hidden_layers", 1),
        ("hidden_size", 32),
        ("num_key_value_heads", 4),
        ("rms_norm_eps", 0.5),
    ):
        other = worker(override_config=json.dumps({key: value}))
        with pytest.raises(UserError, match=f"is of another model: .*{key} .* there, {value}.* here"):
            other.load_checkpoint(tmp_path / "c")
    w.load_checkpoint(tmp_path / "c")
    capsys.readouterr()
    worker(seed=3, ppo_epochs=2).load_checkpoint(tmp_path / "c")
    assert "update 1, with seed 0 -> 3, ppo_epochs 1 -> 2" in capsys.readouterr().out
    for content, fault in (("{", "JSONDecodeError"), ("{}", "KeyError: 'updates'"), ("[]", "TypeError")):
        kept = (tmp_path / "c" / "trainer.json").read_text()
        (tmp_path / "c" / "trainer.json").write_text(content)
        write_manifest(tmp_path / "c")
        with pytest.raises(UserError, match=f"not a checkpoint of this script .{fault}"):
            w.load_checkpoint(tmp_path / "c")
        (tmp_path / "c" / "trainer.json").write_text(kept)
        write_manifest(tmp_path / "c")
    shard = tmp_path / "c" / shards[0]
    kept = shard.read_bytes()
    shard.write_bytes(kept[:-3] + bytes([kept[-3] ^ 4]) + kept[-2:])  # one bit
    with pytest.raises(UserError, match="damaged, shard.* is not what was written; use an earlier checkpoint"):
        w.load_checkpoint(tmp_path / "c")
    shard.write_bytes(kept[:-10])
    with pytest.raises(UserError, match="damaged, shard.* use an earlier checkpoint"):
        w.load_checkpoint(tmp_path / "c")
    with pytest.raises(UserError, match="no complete checkpoint here"):
        w.load_checkpoint(tmp_path / "nowhere")
