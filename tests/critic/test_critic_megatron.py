"""What critic_megatron.py shares with critic_fsdp.py, and the parts of it that need only one
rank."""

import dataclasses
import inspect
import itertools
import math
import re
import sys
import types
from functools import partial
from unittest import mock

import pytest
import torch
import transformers
from helpers import HALFWAY, interrupted_in, of_critic, parts_of, random_batch, run, worker

import common
import critic_fsdp
import critic_megatron as cm
from common import UserError
from critic_megatron import Config


def sections(module):
    """The titles of a script's banners, up to the colon."""
    return re.findall(r"^# ---- ([^:\n]*?)(?::.*)? -+$", inspect.getsource(module), flags=re.M)


def test_both_scripts_have_the_same_sections_in_the_same_order():
    shared = [
        "Config",
        "Value model",
        "Parallelism",
        "Batching",
        "The critic",
        "The worker",
        "Checkpoints and export",
        "Main",
    ]
    fsdp, megatron = sections(critic_fsdp), sections(cm)
    assert fsdp[: len(shared)] == megatron[: len(shared)] == shared
    chapters = ["Ulysses", "LoRA and frozen weights", "Images", "Whole weights and compiled blocks"]
    chapters += ["Activations on the host", "FSDP1", "Packing"]
    assert fsdp[len(shared) :] == chapters
    chapters = ["Context parallelism", "Layers and process groups of Megatron", "Weights"]
    chapters += ["Megatron without CUDA, and without Transformer Engine"]
    assert megatron[len(shared) :] == chapters


# class in critic_fsdp.py, class in critic_megatron.py -> functions whose source is equal
SAME_CODE = {
    ("", ""):
        "count_parameters spread micro_batches pack_rows check_budget load_rows needs_values"
        " learn",
    ("DataParallelPPOCritic", "MegatronPPOCritic"):
        "fetch cut give_back mini_batch values loss learning_rate",
    ("CriticWorker", "CriticWorker"):
        "__init__ set_budget check_ready check_batch compute_values update_critic check_values"
        " offload onload on_device save_checkpoint",
}  # fmt: skip
SAME_SIGNATURE = {
    ("", ""):
        "check_layout build_skeleton read_weights make_layout build_value_model shift"
        " row_sharing what_trains check_model_flags build_optimizer main row_reader",
    ("DataParallelPPOCritic", "MegatronPPOCritic"):
        "__init__ plan_micro_batches micro_batch lay_out compute_values update_critic"
        " optimizer_step",
    ("CriticWorker", "CriticWorker"):
        "init_model state_bytes try_out start_at_mean move checkpoint_writer load_checkpoint shape"
        " export_hf",
}  # fmt: skip


@pytest.mark.parametrize(
    "form, names", [(inspect.getsource, SAME_CODE), (inspect.signature, SAME_SIGNATURE)]
)
def test_both_scripts_have_the_same_functions(form, names):
    for (ours, theirs), some in names.items():
        fsdp = vars(getattr(critic_fsdp, ours) if ours else critic_fsdp)
        megatron = vars(getattr(cm, theirs) if theirs else cm)
        for name in some.split():
            assert form(fsdp[name]) == form(megatron[name]), name
        # methods of both classes have the same order
        assert not ours or [n for n in fsdp if n in megatron] == [n for n in megatron if n in fsdp]


def flags(kind):
    """name -> (default, comment) of the fields of a dataclass, in order."""
    lines = inspect.getsource(kind).splitlines()
    found = {}
    for field in dataclasses.fields(kind):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: "))
        found[field.name] = (field.default, lines[at].partition("  # ")[2] or lines[at - 1].strip())
    return found


@pytest.mark.parametrize("kind, count", [("Config", 25), ("Run", 13)])
def test_flags_of_both_scripts_have_the_same_meaning_and_default(kind, count):
    fsdp, megatron = flags(getattr(critic_fsdp, kind)), flags(getattr(cm, kind))
    shared = [name for name in fsdp if name in megatron and name not in ("critic", "out_dir")]
    assert [name for name in megatron if name in shared] == shared and len(shared) >= count
    assert {n: fsdp[n] for n in shared} == {n: megatron[n] for n in shared}
    layout = "strategy fsdp_size ulysses_size offload_policy activation_offload".split()
    absent = "freeze_modules lora_rank lora_alpha defer_grad_sync keep_gathered compile".split()
    assert fsdp.keys() - megatron.keys() <= {*layout, *absent}


@pytest.mark.parametrize("fields", [{}, {"freeze_modules": r"embed|layers\.0\.(self_attn|input)"}])
@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_both_scripts_count_the_weights_that_train(model, fields, capsys):
    for script in (critic_fsdp, cm):
        w = worker(script=script, model=model, **fields)
    shares = re.findall(
        r"([\d,]+) parameters, ([\d,]+) of them \((\S+)%\) train: ", capsys.readouterr().out
    )
    weights = list(w.critic.modules[0].parameters())
    counts = [sum(p.numel() for p in x) for x in (weights, [p for p in weights if p.requires_grad])]
    percent = f"{100 * counts[1] / counts[0]:.2f}"
    assert shares == [(f"{counts[0]:,}", f"{counts[1]:,}", percent)] * 2


@pytest.mark.parametrize("size, critic, flags, calls", [
    (32, {}, {}, 0), (32, {}, {"lam": 0.9}, 3), (32, {}, {"bootstrap_truncated": True}, 3),
    (32, {"ppo_epochs": 2}, {}, 3), (64, {}, {"train_batch_size": 64}, 3),  # two steps
])  # fmt: skip
def test_pretraining_computes_values_apart_only_where_an_update_needs_them(
    size, critic, flags, calls, tmp_path
):
    """In critic_fsdp.py; the other script has the same needs_values and learn."""
    method = critic_fsdp.CriticWorker.compute_values
    with mock.patch.object(critic_fsdp.CriticWorker, "compute_values", autospec=True) as seen:
        seen.side_effect = method
        config = critic_fsdp.Config(ppo_mini_batch_size=32, **critic)
        run = critic_fsdp.Run(config, steps=3, out_dir=str(tmp_path / "out"), **flags)
        critic_fsdp.main(run)
    assert [len(call.args[1]) for call in seen.call_args_list].count(size) == calls


@pytest.mark.parametrize("script", [critic_fsdp, cm])
def test_an_update_of_several_steps_needs_old_values(script):
    w = worker(script=script, ppo_mini_batch_size=16)
    batch = random_batch(24)
    batch.values = None
    with pytest.raises(UserError, match="values: is missing; an update of 2 optimizer"):
        w.update_critic(batch)

    # one step, which is skipped; then none
    batch = batch.select(range(16))
    values = w.compute_values(batch)[batch.response_mask]
    batch.returns[batch.response_mask] = math.inf
    metrics = w.update_critic(batch)
    assert metrics["critic/skipped_steps"] == 1
    assert metrics["critic/values_mean"] == pytest.approx(float(values.mean()), rel=1e-6)
    batch.response_mask[:] = False
    assert w.update_critic(batch)["critic/skipped_steps"] == 1


@pytest.mark.parametrize("script", [critic_fsdp, cm])
def test_what_the_caller_has_set_for_other_models_changes_nothing(script):
    """Autocast is off within; a default dtype, in which weights would be drawn, is refused."""
    w, same = (worker(script=script) for _ in range(2))
    batch = random_batch(12)
    values = same.compute_values(batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(w.compute_values(batch), values)
        ours = w.update_critic(batch)["critic/grad_norm"]
    assert ours == same.update_critic(batch)["critic/grad_norm"]

    torch.set_default_dtype(torch.float64)
    try:
        for call in (partial(w.compute_values, batch), partial(worker, script=script)):
            with pytest.raises(RuntimeError, match="default dtype is torch.float64, but must be"):
                call()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mini, place", [
    (12, "forward"), (12, "backward"), (12, "step"), (6, "forward"),
])  # fmt: skip
@pytest.mark.parametrize("script, fields", [
    (critic_fsdp, {}), (critic_fsdp, {"defer_grad_sync": True}), (cm, {}),
])  # fmt: skip
def test_after_an_update_that_fails_a_worker_saves_only_what_was_before_it(
    script, fields, mini, place, tmp_path
):
    """It fails in the last of the micro-batches, two for each mini-batch. A new worker that loads
    the checkpoint goes on as one that has never failed."""
    batch = random_batch(12, 3)
    tokens = sum(batch.lengths[:mini])
    fields |= {"ppo_mini_batch_size": mini, "ppo_max_token_len_per_gpu": 1 + tokens * 2 // 3}
    w, same, new = (worker(script=script, shuffle=False, **fields) for _ in range(3))
    for one in (w, same):
        one.update_critic(batch)
    with interrupted_in(w.critic, place, 2 * 12 // mini):
        w.update_critic(batch)

    refused = [partial(w.update_critic, batch), partial(w.compute_values, batch)]
    refused += [partial(w.load_checkpoint, tmp_path)]
    has_made_no_step = mini == 12 and place != "step"
    if not has_made_no_step:
        refused += [partial(w.save_checkpoint, tmp_path / "c"), partial(w.export_hf, tmp_path)]
    for call in refused:
        with pytest.raises(RuntimeError, match=HALFWAY):
            call()

    if has_made_no_step:
        w.save_checkpoint(tmp_path / "c")
        new.load_checkpoint(tmp_path / "c")
        for _ in range(2):
            ours, theirs = (of_critic(one.update_critic(batch)) for one in (new, same))
            assert ours == theirs


TP, PP, CP = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
SIZES = dict(
    vocab_size=99, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
)  # fmt: skip
BAD_MODELS = {  # words of the error -> a model that causes it
    "gemma2 is not among qwen2, .*, llama, mistral, mixtral, ": transformers.Gemma2Config(**SIZES),
    "a bias in some": transformers.LlamaConfig(**SIZES, mlp_bias=True),
    "a bias in some matrices only": transformers.SeedOssConfig(
        **SIZES, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
    "only supported when ETP==1": transformers.GptOssConfig(**SIZES, num_local_experts=4),
    "norm_topk_prob True": transformers.Glm4MoeConfig(**SIZES, num_experts_per_tok=1),
    "norm_topk_prob False": transformers.Glm4MoeConfig(**SIZES, norm_topk_prob=False),
    "topk_group 2 of n_group 4": transformers.Glm4MoeConfig(**SIZES, n_group=4, topk_group=2),
    "hidden_act gelu": transformers.LlamaConfig(**SIZES, hidden_act="gelu"),
    "--no-sequence-parallel": transformers.MixtralConfig(**SIZES, num_local_experts=4),
}


@pytest.mark.parametrize("words", BAD_MODELS)
def test_flags_that_do_not_fit_a_model_are_named(words):
    """megatron_scenarios.py tests the sizes that Megatron itself refuses."""
    config = Config(tensor_model_parallel_size=2, sequence_parallel=not words.startswith("--no"))
    with pytest.raises(UserError, match=words):
        cm.check_model_flags(config, BAD_MODELS[words])
    cm.check_model_flags(config, transformers.Qwen2Config(**SIZES))


WINDOW = {"sliding_window": 8, "use_sliding_window": True}  # of 8 tokens, in rows of up to 40
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
MANY = {"num_hidden_layers": 11, "num_experts": 12}  # their numbers have two digits
FOLDERS = {  # test_megatron_layouts.py has more windows and mixtures
    "qwen2": transformers.Qwen2Config(**SIZES, **WINDOW, max_window_layers=1),
    "qwen3, window off": transformers.Qwen3Config(**SIZES, sliding_window=8),
    "qwen2-moe, window off": transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=48
    ),
    # transformers' Mistral does not read layer_types, which some folders have, nor Llama a window
    "mixed mistral": transformers.MistralConfig(
        **SIZES, sliding_window=8, layer_types=["full_attention"] * 2
    ),
    "llama": transformers.LlamaConfig(**SIZES, sliding_window=8),
    "qwen3-moe": transformers.Qwen3MoeConfig(**{**SIZES, **EXPERTS, **MANY}),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_both_scripts_compute_the_same_values_from_a_language_model(kind, tmp_path):
    """It is in several files. critic_fsdp.py leaves reading and attention to transformers."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FOLDERS[kind])
    for p in model.parameters():
        p.data *= 2  # so that each layer matters
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    batch = random_batch(6)
    plain = worker(model=str(tmp_path), use_remove_padding=False)
    ours = worker(script=cm, model=str(tmp_path))
    values = [w.compute_values(batch) for w in (ours, plain)]
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
    assert values[0].std() > 0.1


def critic_of(dp_size=1, **fields):
    """A critic without a model, as one of several ranks; it can lay out rows."""
    config = Config(**fields)
    critic = object.__new__(cm.MegatronPPOCritic)
    critic.config = config
    critic.layout = types.SimpleNamespace(device="cpu", cp_rank=0, dp_size=dp_size, dp_rank=0)
    critic.model = [None] * config.virtual_pipeline_model_parallel_size
    critic.computed = 0
    critic.steps_before = None
    return critic


@pytest.mark.parametrize("fields, least", [
    ({}, 101), ({TP: 2}, 102), ({TP: 2, "use_remove_padding": False}, 102),
    ({CP: 2}, 52), ({CP: 2, TP: 2}, 52),  # four pieces of 26, two for each rank
])  # fmt: skip
def test_the_longest_row_fits_with_its_padding_and_after_every_halving(fields, least):
    """A row of 101 tokens, after memory has run out three times with a budget of 200."""
    config = Config(**fields, ppo_max_token_len_per_gpu=200)
    worker = object.__new__(cm.CriticWorker)
    worker.config, worker.critic = config, critic_of(**fields)
    worker.layout = worker.critic.layout
    worker.offloaded = False
    worker.set_budget(101, "row 7", halvings=3)
    worker.critic.flops = lambda n: n
    assert worker.critic.max_tokens == least * config.context_parallel_size
    row = common.Batch.blank(101)
    rows = common.describe(row)
    assert parts_of(worker.critic.plan_micro_batches(rows, worker.critic.max_tokens)) == [[[0]]]
    for name in ("ppo", "forward"):
        tight = dataclasses.replace(config, **{f"{name}_max_token_len_per_gpu": least - 1})
        flag = f"--{name}-max-token-len-per-gpu {least - 1}"
        with pytest.raises(UserError, match=f"{flag}: row 7 .* 101 tokens; .* {least}$"):
            cm.check_budget(tight, 101, "row 7")


@pytest.mark.parametrize("vpp", [1, 2])
def test_micro_batches_keep_the_budget_and_the_number_that_the_schedule_needs(vpp):
    critic = critic_of(
        dp_size=3, **{PP: 2, "virtual_pipeline_model_parallel_size": vpp, TP: 2, CP: 2}
    )
    critic.flops = lambda n: n
    batch = random_batch(23, seed=4, prompts=3)
    table = parts_of(critic.plan_micro_batches(common.describe(batch), 2 * 44))
    for rows in itertools.chain(*table):
        micro = batch.select(rows) if rows else common.Batch.blank()
        slots, _, _ = critic.lay_out(micro)
        assert slots.numel() <= 44  # on each rank
    [count] = set(map(len, table))
    assert len(table) == 3 and count % vpp == 0


COMPILES = """
import torch
import common, critic_megatron
from megatron.core.fusions import fused_bias_swiglu

def compiled_by(function):
    graphs = []
    def backend(graph, _):
        graphs.append(graph)
        return graph.forward
    torch.compile(function, backend=backend)(torch.ones(2, 4))
    return len(graphs)

assert compiled_by(lambda x: x.sin()) == 1
worker = critic_megatron.CriticWorker(critic_megatron.Config(model="tiny-qwen3-moe"))
worker.init_model()
worker.compute_values(common.Batch.blank(12))
assert compiled_by(lambda x: x.cos()) == 1

before = dict(torch._dynamo.utils.counters["frames"])
fused_bias_swiglu.swiglu(torch.ones(2, 4))
assert torch._dynamo.utils.counters["frames"] == before == {"total": 2, "ok": 2}, before
"""


@pytest.mark.parametrize("fresh", [False, True])
def test_on_a_cpu_only_megatrons_own_functions_are_not_compiled(tmp_path, fresh):
    (script := tmp_path / "compiles.py").write_text(COMPILES)
    # a script would be a fork of a process that has imported Megatron already
    process = run(sys.executable, *(["-c", COMPILES] if fresh else [script]))
    assert process.returncode == 0, process.stderr[-3000:]
