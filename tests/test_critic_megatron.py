"""What critic_megatron.py shares with its sibling, and the parts of it that need no second rank."""

import dataclasses
import inspect
import itertools
import json
import re
import types

import pytest
import torch
import transformers
from helpers import ROOT, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

import common
import critic_fsdp
import critic_megatron as cm
from common import UserError
from critic_megatron import Config

# ---------------------------------------------------------------------------------------------------------------------
# Siblings: what a reader of one script finds in the other
# ---------------------------------------------------------------------------------------------------------------------


def banners(module):
    """The sections of a script, by what stands before a colon."""
    lines = inspect.getsource(module).splitlines()
    ruled = zip(lines, lines[1:], lines[2:], strict=False)
    return [b[2:].split(":")[0] for a, b, c in ruled if a == c == "# " + "-" * 117 and b.startswith("# ")]


def test_both_scripts_have_the_same_sections_in_the_same_order():
    shared = ["Config", "Value model", "Parallelism", "The critic", "The worker", "Main"]
    fsdp, megatron = banners(critic_fsdp), banners(cm)
    assert [x for x in fsdp if x in shared] == [x for x in megatron if x in shared] == shared
    assert set(fsdp) - set(shared) == {"Plan"}
    assert set(megatron) - set(shared) == {"Megatron without CUDA, and without Transformer Engine", "Weights"}


def public(kind):
    """name -> signature of the public methods of a class."""
    return {
        name: str(inspect.signature(method))
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def test_both_workers_have_the_same_public_methods():
    face = "init_model compute_values update_critic offload onload save_checkpoint load_checkpoint export_hf".split()
    fsdp, megatron = public(critic_fsdp.CriticWorker), public(cm.CriticWorker)
    assert {n: fsdp[n] for n in face} == {n: megatron[n] for n in face}
    assert [n for n in fsdp if n in face] == [n for n in megatron if n in face]
    fsdp, megatron = public(critic_fsdp.DataParallelPPOCritic), public(cm.MegatronPPOCritic)
    same = "my_micro_batches micro_batch values compute_values train update_critic loss forward_backward learning_rate"
    same = [*same.split(), "optimizer_step"]
    assert {n: fsdp[n] for n in same} == {n: megatron[n] for n in same}
    assert [n for n in fsdp if n in same] == [n for n in megatron if n in same] == same
    for ours, theirs, names in (
        (critic_fsdp.DataParallelPPOCritic, cm.MegatronPPOCritic, ("values", "loss", "learning_rate")),
        (critic_fsdp.CriticWorker, cm.CriticWorker, ("compute_values", "check_here", "save_checkpoint")),
        (critic_fsdp, cm, ("training_limits", "forward_limits", "compute_dtype")),
    ):
        for name in names:
            assert inspect.getsource(getattr(ours, name)) == inspect.getsource(getattr(theirs, name)), name


def flags(module, kind):
    """name -> (default, help) of the fields of a dataclass, in order."""
    source = inspect.getsource(getattr(module, kind))
    out = {}
    for field in dataclasses.fields(getattr(module, kind)):
        found = re.search(rf"^    {field.name}: .*?(?:  # (.*?))$", source, flags=re.M | re.S)
        out[field.name] = (field.default, found[1])
    return out


@pytest.mark.parametrize("kind", ["Config", "Run"])
def test_a_flag_that_both_have_means_and_defaults_to_the_same(kind):
    fsdp, megatron = flags(critic_fsdp, kind), flags(cm, kind)
    own = {"critic", "out_dir"}  # defaults that differ by nature
    shared = [name for name in fsdp if name in megatron and name not in own]
    assert shared == [name for name in megatron if name in fsdp and name not in own]
    assert {n: fsdp[n] for n in shared} == {n: megatron[n] for n in shared}
    layouts = "strategy fsdp_size ulysses_size reshard_after_forward forward_prefetch offload_policy reduce_dtype"
    absent = f"freeze_layers lora_rank lora_alpha lora_target_modules freeze_vision_tower {layouts}"
    absent = {*absent.split(), "activation_offload", "defer_grad_sync", "compile", "plan"}
    assert fsdp.keys() - megatron.keys() <= absent and len(shared) > (30 if kind == "Config" else 10)


# ---------------------------------------------------------------------------------------------------------------------
# Flags and models that cannot work
# ---------------------------------------------------------------------------------------------------------------------

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP, VPP = "expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
BAD_FLAGS = {  # on 8 ranks
    "--ppo-mini-batch-size 0: must be above 0": {"ppo_mini_batch_size": 0},
    "--param-dtype float8: must be one of auto, float32, bfloat16, float16": {"param_dtype": "float8"},
    "--tensor-model-parallel-size 0: must be at least 1": {TP: 0},
    "--tensor-model-parallel-size 3: tensor 3 x pipeline 1 x context 1 must divide the 8 ranks; here it can be 1, 2, 4 "
    "or 8": {TP: 3},
    "--pipeline-model-parallel-size 8: tensor 2 x pipeline 8 x context 1 must divide the 8 ranks; here it can be 1, 2 "
    "or 4": {TP: 2, PP: 8},
    "--context-parallel-size 3: tensor 2 x pipeline 2 x context 3 must divide the 8 ranks; here it can be 1 or 2": {
        TP: 2, PP: 2, CP: 3,
    },
    "--expert-model-parallel-size 3: expert tensor 2 x expert 3 x pipeline 1 must divide the 8 ranks; here it can be "
    "1, 2 or 4": {TP: 2, EP: 3},
    "--virtual-pipeline-model-parallel-size 2: needs --pipeline-model-parallel-size above 1": {VPP: 2},
    "--num-layers-in-first-pipeline-stage 1: needs --pipeline-model-parallel-size above 1": {FIRST: 1},
    "--context-parallel-size 2: needs packed rows": {CP: 2, "use_remove_padding": False},
    "--overlap-param-gather: goes with --overlap-grad-reduce only": {"overlap_param_gather": True},
    "--recompute-modules: --gradient-checkpointing recomputes whole layers": {
        "gradient_checkpointing": True, "recompute_modules": ("mlp",),
    },
    "--attn-implementation varlen: is for packed rows": {"attn_implementation": "varlen", "use_remove_padding": False},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_FLAGS)
def test_impossible_flags_are_named_before_anything_starts(message):
    with pytest.raises(UserError, match=re.escape(message)):
        cm.validate(Config(**BAD_FLAGS[message]), world_size=8)


SIZES = dict(
    vocab_size=99, hidden_size=64, intermediate_size=192, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2,
)  # fmt: skip
QWEN2 = transformers.Qwen2Config(**SIZES)
LLAMA = transformers.LlamaConfig(**SIZES)
MOE = transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=36)
BAD_MODELS = {
    "gemma2 is not mapped to Megatron; qwen2, qwen3, llama or qwen3_moe are": ({}, transformers.Gemma2Config(**SIZES)),
    "mlp_bias True is not mapped": ({}, transformers.LlamaConfig(**SIZES, mlp_bias=True)),
    "attention_bias True is not mapped": ({}, transformers.Qwen3Config(**SIZES, attention_bias=True)),
    "hidden_act gelu is not mapped": ({}, transformers.LlamaConfig(**SIZES, hidden_act="gelu")),
    "sliding windows is not mapped": (
        {}, transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=0),
    ),
    "sliding windows is not mapped to": (
        {}, transformers.Qwen3MoeConfig(**SIZES, num_experts=4, use_sliding_window=True, sliding_window=8),
    ),
    "norm_topk_prob with one expert a token is not mapped": (
        {}, transformers.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=1, norm_topk_prob=True),
    ),
    "quantized weights is not mapped": (
        {}, transformers.LlamaConfig(**SIZES, quantization_config={"quant_method": "fp8"}),
    ),
    "--pipeline-model-parallel-size 2: the first and the last stage ask for more than the model's 8 layers": (
        {PP: 2, FIRST: 8, LAST: 1}, QWEN2,
    ),
    "rope_type yarn is not mapped": (
        {}, transformers.LlamaConfig(**SIZES, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
    ),
    "--tensor-model-parallel-size 3: must divide the model's 8 attention heads; it can be 1, 2, 4 or 8": (
        {TP: 3}, QWEN2,
    ),
    "--tensor-model-parallel-size 6: must divide the model's 4 key-value heads, or they it": (
        {TP: 6}, transformers.Qwen2Config(**{**SIZES, "num_attention_heads": 12, "num_key_value_heads": 4}),
    ),
    "--pipeline-model-parallel-size 3: 8 layers do not make 3 equal stages": ({PP: 3}, QWEN2),
    "--pipeline-model-parallel-size 4: 5 layers that the first and last stage leave do not make 2 equal": (
        {PP: 4, FIRST: 1, LAST: 2}, QWEN2,
    ),
    "--virtual-pipeline-model-parallel-size 3: does not divide the 4 layers of a stage; it can be 1, 2 or 4": (
        {PP: 2, VPP: 3}, QWEN2,
    ),
    "--expert-model-parallel-size: tiny-qwen2 (qwen2) has no experts": ({EP: 2}, QWEN2),
    "--expert-tensor-parallel-size: tiny-qwen2 (llama) has no experts": ({ETP: 2}, LLAMA),
    "--recompute-modules moe: tiny-qwen2 (qwen2) has no experts": ({"recompute_modules": ("moe",)}, QWEN2),
    "--expert-model-parallel-size 3: must divide the model's 4 experts; it can be 1, 2 or 4": ({EP: 3}, MOE),
    "--expert-tensor-parallel-size 8: must divide the model's 36 features inside an expert": ({TP: 8}, MOE),
    "--no-sequence-parallel: a mixture of experts needs it": ({TP: 2, "sequence_parallel": False}, MOE),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_MODELS)
def test_what_a_model_does_not_go_with_is_named(message):
    fields, model_config = BAD_MODELS[message]
    with pytest.raises(UserError, match=re.escape(message)):
        cm.validate_for_model(Config(**fields), model_config)


def test_layers_are_shared_out_over_stages():
    stages = lambda **fields: cm.stage_layers(Config(**fields), QWEN2)
    assert stages() == [8] and stages(**{PP: 4}) == [2, 2, 2, 2] and stages(**{PP: 2, VPP: 2}) == [4, 4]
    assert stages(**{PP: 2, FIRST: 3}) == [3, 5] and stages(**{PP: 3, FIRST: 1, LAST: 3}) == [1, 4, 3]


@pytest.mark.parametrize("fields, least", [({}, 101), ({TP: 2}, 102), ({CP: 2}, 52), ({CP: 2, TP: 2}, 52)])
def test_budgets_that_were_halved_still_take_the_longest_row(fields, least, tmp_path):
    """A row of 101 tokens, after memory has run out three times with a budget of 200 and none since."""
    run = cm.Run(critic=Config(**fields, ppo_max_token_len_per_gpu=200), resume="auto", out_dir=str(tmp_path))
    note = {"given": {"critic.ppo_max_token_len_per_gpu": 200}, "halvings": 3}
    (tmp_path / "out_of_memory.json").write_text(json.dumps(note))
    config = common.smaller_budgets(run, critic=cm.least_budget(run.critic, 101)).critic
    assert config.ppo_max_token_len_per_gpu == least
    row = common.masked_token()
    row.input_ids, row.cu_seqlens = torch.zeros(101), torch.tensor([0, 101], dtype=torch.int32)
    cm.check_budget(config, row, training=True)
    with pytest.raises(UserError, match=f"give at least {least}$"):
        cm.check_budget(dataclasses.replace(config, ppo_max_token_len_per_gpu=least - 1), row, training=True)


def test_the_longest_row_must_fit_with_its_padding():
    batch = random_batch(6)
    longest = max(batch.lengths)
    batch.row_id += 7
    roomy = -(-longest // 8) * 8 // 2  # in units of two pieces a rank and of tensor-parallel slots
    fields = {TP: 2, CP: 2}
    cm.check_budget(Config(**fields, ppo_max_token_len_per_gpu=roomy), batch, training=True)
    with pytest.raises(UserError, match=f"--ppo-max-token-len-per-gpu {roomy - 1}: .* give at least {roomy}$"):
        cm.check_budget(Config(**fields, ppo_max_token_len_per_gpu=roomy - 1), batch, training=True)
    row = 7 + batch.lengths.index(longest)
    with pytest.raises(
        UserError, match=f"--forward-max-token-len-per-gpu 1: rows.jsonl:{row + 1} has {longest} tokens"
    ):
        config = Config(forward_max_token_len_per_gpu=1)
        cm.check_budget(config, batch, training=False, path="rows.jsonl")
    cm.check_budget(Config(ppo_max_token_len_per_gpu=1, ppo_micro_batch_size_per_gpu=1), batch, training=True)


# ---------------------------------------------------------------------------------------------------------------------
# Weights, slots, micro-batches
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut, parts", [
    ("whole", [(7,)]), ("inputs", [(6, 16)]), ("outputs", [(24, 5), (24, 5)]), ("vocabulary", [(97, 5)]),
    ("heads", [(32, 5), (8, 5), (8, 5)]), ("heads", [(32,), (8,), (8,)]),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_cut_for_tensor_parallel_ranks_goes_together_again(cut, parts, size):
    wholes = [torch.randn(shape) for shape in parts]  # heads: 8 of queries, 2 of keys and values, 4 features each
    shards = [cm.shard(cut, wholes, 2, rank, size) for rank in range(size)]
    assert len({tuple(x.shape) for x in shards}) == 1
    again = cm.unshard(cut, shards, 2, 4, 97)
    assert all(torch.equal(a, b) for a, b in zip(wholes, again, strict=True))


def test_names_of_weights():
    assert cm.hf_names("decoder.layers.11.self_attention.linear_proj.weight") == (
        "inputs", ["layers.11.self_attn.o_proj.weight"],
    )  # fmt: skip
    assert cm.hf_names("decoder.layers.2.mlp.experts.local_experts.13.linear_fc1.weight") == (
        "outputs", [f"layers.2.mlp.experts.13.{x}_proj.weight" for x in ("gate", "up")],
    )  # fmt: skip


def critic_of(rank, **fields):
    """A critic without a model, as far as it lays rows out."""
    config = Config(**fields)
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size
    layout = types.SimpleNamespace(device=torch.device("cpu"), cp_size=cp, cp_rank=rank, tp_size=tp)
    critic = object.__new__(cm.MegatronPPOCritic)
    critic.config, critic.layout = config, layout
    return critic


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]))
def test_context_parallel_ranks_have_every_token_once_and_see_what_is_before_it(lengths, cp, tp):
    ranks = [critic_of(r, **{CP: cp, TP: tp}).lay_out(lengths) for r in range(cp)]
    total, slots = sum(lengths), [slots[0].tolist() for slots, _ in ranks]
    assert len({len(x) for x in slots}) == 1 and len(slots[0]) % tp == 0
    assert sorted(i for x in slots for i in x if i < total) == list(range(total))
    row_of = [b for b, n in enumerate(lengths) for _ in range(n)]
    start_of = [0, *itertools.accumulate(lengths)]
    gathered, pairs = [i for x in slots for i in x], []
    for (_, packed), own in zip(ranks, slots, strict=True):
        keys = gathered if packed.key_index is None else [gathered[i] for i in packed.key_index.tolist()]
        row, seen = packed.row, 0
        for q, n, k, m, count in row.runs:
            for c, i in itertools.product(range(count), range(n)):
                token = own[q + c * n + i]
                before = keys[k + c * m : k + c * m + m - n + i + 1]  # queries are the last of their piece's keys
                seen += len(before)
                if token < total:
                    assert before == list(range(start_of[row_of[token]], token + 1))
        pairs.append(seen)
    assert max(pairs) == min(pairs) or cp == 1  # equal work


def test_padded_rows_are_laid_out_in_rows():
    slots, packed = critic_of(0, **{TP: 4}, use_remove_padding=False).lay_out([3, 5])
    assert packed is None and slots.tolist() == [[0, 1, 2, 8, 8, 8, 8, 8], [3, 4, 5, 6, 7, 8, 8, 8]]


@pytest.mark.parametrize("vpp, multiple", [(1, 1), (2, 2)])
def test_micro_batches_keep_the_cap_and_the_number_that_the_schedule_wants(vpp, multiple):
    critic = critic_of(0, **{PP: 2, VPP: vpp, TP: 2, CP: 2}, ppo_max_token_len_per_gpu=41)
    critic.flops = types.SimpleNamespace(forward_flops=lambda n: n)
    batch, counts = random_batch(23, seed=4), []
    for dp_rank in range(3):
        critic.layout.dp_rank, critic.layout.dp_size, critic.layout.pp_size = dp_rank, 3, 2
        parts = critic.my_micro_batches(batch, *cm.training_limits(critic.config))
        counts.append(len(parts))
        for rows in parts:
            slots, _ = critic.lay_out([batch.lengths[i] for i in rows] or [1])
            assert slots.numel() <= 41  # of each rank
    assert len(set(counts)) == 1 and counts[0] % multiple == 0


def test_the_idle_part_of_a_pipeline():
    critic = critic_of(0, **{PP: 4, VPP: 2})
    critic.layout.pp_size = 4
    assert critic.bubble(4) == 3 / (3 + 8)
    critic.layout.pp_size = 1
    assert critic.bubble(4) == 0


def test_stored_tensors_are_found_under_every_name_they_go_by(tmp_path):
    """Base models and models with a head, in one file or several, experts one by one or together, and .bin files."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": 1}, num_experts=4, moe_intermediate_size=36)
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = model.model.state_dict()
    model.save_pretrained(tmp_path / "causal", max_shard_size="50KB")
    model.model.save_pretrained(tmp_path / "base")
    (tmp_path / "bin").mkdir()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    assert len(list((tmp_path / "causal").glob("*.safetensors"))) > 1
    for folder in ("causal", "base", "bin"):
        stored = cm.StoredTensors(str(tmp_path / folder), f"--model {folder}")
        assert torch.equal(stored["layers.0.self_attn.q_proj.weight"], expected["layers.0.self_attn.q_proj.weight"])
        for i, kind in itertools.product(range(4), ("gate", "up", "down")):
            x = cm.take(stored, f"layers.0.mlp.experts.{i}.{kind}_proj.weight")
            y = cm.take(expected, f"layers.0.mlp.experts.{i}.{kind}_proj.weight")
            assert torch.equal(x, y)
    gate_up = expected["layers.0.mlp.experts.gate_up_proj"]
    halves = [cm.take(expected, f"layers.0.mlp.experts.2.{kind}_proj.weight") for kind in ("gate", "up")]
    assert torch.equal(torch.cat(halves), gate_up[2])
    with pytest.raises(KeyError):
        cm.take(stored, "layers.0.mlp.experts.4.gate_proj.bias")
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(UserError, match="--model bin: its weights do not load"):
        cm.StoredTensors(str(tmp_path / "bin"), "--model bin")


def test_rotary_frequencies_are_those_of_transformers():
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 512}  # fmt: skip
    for rope in (None, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, llama3):
        config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, rope_parameters=rope)
        theirs = transformers.AutoModel.from_config(config).rotary_emb.inv_freq
        torch.testing.assert_close(cm.rotary_frequencies(config), theirs, rtol=1e-6, atol=0)


def test_importing_the_script_leaves_torch_as_it_was():
    assert torch.cuda.manual_seed is not torch.manual_seed and common.RANK == 0
    assert (ROOT / "critic_megatron.py").read_text().count("megatron_without_cuda()") == 2  # its def and one call
