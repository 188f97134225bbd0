"""Which model types run, and how exactly: writes the table of .github/models.md.

    python tests/tools/models.py                    all types of transformers: half an hour
    python tests/tools/models.py qwen3_5 lfm2       these again; the others stay as they are

Results are kept in out/models.jsonl, so that a run that was ended goes on; delete it to start anew.

Each type gets a tiny random model, and each cell one update of the same rows: as a critic packed
and padded, as an actor, and on Megatron. A cell is the larger of two numbers, against transformers
in float64 and one row at a time: the largest difference of a value (of a log-prob in nats, for an
actor), and that of the whole gradient relative to its norm.
"""

import contextlib
import datetime
import functools
import inspect
import io
import json
import multiprocessing
import pathlib
import re
import resource
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms

ROOT = pathlib.Path(__file__).resolve().parents[2]

import torch
import transformers
from helpers import actions_of, end_groups, one_update, random_batch, rows_of, worker
from ppo_helpers import batch_to_learn, policy
from reference import reference_of, save_model

import common
import ppo_loop

PAGE = ROOT / ".github" / "models.md"
KEPT = ROOT / "out" / "models.jsonl"
COLUMNS = ("packed", "padded", "actor", "Megatron")
LIMIT = 1e-5  # a larger error is a fault
SECONDS = 120  # for all cells of a type
MOST = 12 * 2**30  # bytes of its process; some types have sizes that this script does not know
ROWS = random_batch(10, seed=5, vocab_size=60, longest=24, prompts=3)


def sizes(names_of):
    """{size: names} -> {name: size}."""
    return {name: size for size, names in names_of.items() for name in names.split()}


# what a tiny config has, where the type knows the name
TINY = sizes({
    0: "pad_token_id bos_token_id eos_token_id",
    1: "n_group topk_group first_k_dense_replace num_dense_layers mamba_n_groups n_groups",
    2: "num_key_value_heads num_experts_per_tok moe_k index_n_heads linear_num_key_heads n_layer",
    4: """num_hidden_layers num_attention_heads n_head num_experts num_local_experts
        n_routed_experts moe_num_experts linear_num_value_heads mamba_n_heads mamba_num_heads
        mamba_dt_rank""",
    8: """head_dim sliding_window qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim
        linear_value_head_dim mamba_d_state mamba_chunk_size ssm_state_size chunk_size
        query_pre_attn_scalar hidden_size_per_layer_input""",
    16: "q_lora_rank kv_lora_rank index_head_dim mamba_d_head mamba_head_dim",
    32: """hidden_size n_embd word_embed_proj_dim moe_intermediate_size
        shared_expert_intermediate_size shared_intermediate_size
        moe_shared_expert_intermediate_size""",
    64: "intermediate_size intermediate_size_mlp ffn_dim ffn_hidden_size mamba_d_ssm",
    104: "vocab_size vocab_size_per_layer_input",
    128: "max_position_embeddings n_positions",
})  # fmt: skip
TOWER = sizes({
    1: "num_hidden_layers depth",
    2: "num_attention_heads num_heads",
    14: "patch_size",
    28: "image_size",
    32: "hidden_size out_hidden_size",
    64: "intermediate_size num_position_embeddings",
})  # fmt: skip
TOWER |= {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
ROTATED = ("glm4v", "glm46v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl")
LATENT = {"num_key_value_heads": 4}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2}
# type -> fields that fit none of the others
MORE = {name: LATENT for name in """axk1 axk2 deepseek_v3 deepseek_v32 glm4_moe_lite glm5_next
    glm_moe_dsa mistral4 youtu""".split()}  # fmt: skip
MORE |= {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": LATENT | EXPERTS,
    "dots1": EXPERTS | {"n_shared_experts": 1, "norm_topk_prob": True},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 4},
    "gemma4_text": {"global_head_dim": 16, "num_kv_shared_layers": 0},
    "granite": {"logits_scaling": 4.0},
    "granitemoehybrid": {"layer_types": 2 * ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": LATENT | {"layer_types": 2 * ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": 2 * ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": 2 * ["conv", "full_attention"]},
    "longcat_flash": LATENT
    | sizes({1: "zero_expert_num", 2: "num_layers moe_topk", 32: "expert_ffn_hidden_size"}),
    "minicpm3": LATENT | {"dim_model_base": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    "zamba2": {"layers_block_type": 2 * ["mamba", "hybrid"], "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}


@functools.cache
def types_that_write():
    """type -> its config class, for all models that write text, but encoder-decoders."""
    found = {}
    mappings = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    for kind in [kind for mapping in mappings for kind in mapping]:
        with contextlib.suppress(Exception):
            if not kind().is_encoder_decoder:
                found[kind.model_type] = kind
    return found


def fields_of(kind, sizes):
    """The sizes that a config class knows, and has a default for."""
    known = set(inspect.signature(kind).parameters)
    default = vars(kind())
    fields = {}
    for name, x in sizes.items():
        if name in known and default.get(name) is not None:
            fields[name] = x
    return fields | MORE.get(kind.model_type, {})


def tiny_config(kind):
    """A tiny config of this class, with tiny configs for its text and its vision tower."""
    parts = getattr(kind, "sub_configs", {})
    if "text_config" not in parts:
        return kind(**fields_of(kind, TINY))

    default = kind()
    text = type(default.text_config)
    fields = {"text_config": {"model_type": text.model_type, **fields_of(text, TINY)}}
    if "mrope_section" in json.dumps(default.text_config.to_dict()) or kind.model_type in ROTATED:
        fields["text_config"]["rope_parameters"] = MROPE
    if getattr(default, "vision_config", None) is not None:
        tower = type(default.vision_config)
        fields["vision_config"] = {"model_type": tower.model_type, **fields_of(tower, TOWER)}
    for i, name in enumerate(vars(default)):
        if re.fullmatch(r"\w+_token_(id|index)", name) and vars(default)[name]:
            fields[name] = 96 - i % 30
    return kind(**fields)


# ---- The cells -----------------------------------------------------------------------------------


def error_of(result, exact):
    """The larger of the largest difference of values and the gradient's relative one."""
    values_T, _, gradients = exact
    scale = values_T.abs().max().clamp(min=1)
    value = float((result["values"] - values_T).abs().max() / scale)

    # a vision tower that sees no image has no gradient
    ours = result["gradients"]
    apart = [(ours[name] - g).norm() for name, g in gradients.items() if name in ours]
    whole = torch.stack([g.norm() for g in gradients.values()]).norm()
    return max(value, float(torch.stack(apart).norm() / whole))


def critic_cell(folder, exact, **fields):
    """The error of a critic's values and gradient."""
    w = worker(model=str(folder), weight_decay=0.0, **fields)
    w.critic.peak_lr = 0.0
    return error_of(one_update(w, ROWS), exact)


def megatron_cell(folder, exact):
    """The error of the values and the gradient of the critic on Megatron."""
    from megatron_helpers import noted_gradients

    import critic_megatron

    w = worker(script=critic_megatron, model=str(folder), weight_decay=0.0)
    seen = noted_gradients(w)
    values_T = w.compute_values(ROWS)
    w.update_critic(ROWS)
    return error_of({"values": values_T, "gradients": seen.pop()}, exact)


def actor_cell(folder, model_config):
    """The error of an actor's log-probs."""
    w = policy(folder, 0.7, override_config="{}")
    ours_T = w.compute_log_probs(ROWS)
    w.update_policy(batch_to_learn(w, seed=1))

    # one row at a time
    lm = ppo_loop.policy_class(model_config).from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    lm.set_experts_implementation("eager")
    worst = 0.0
    for (start, end), places in zip(rows_of(ROWS), actions_of(ROWS)):
        ids = ROWS.input_ids[start:end]
        with torch.no_grad():
            logits_LV = lm.eval()(input_ids=ids[None], use_cache=False).logits[0].double()
        log_p_LV = (logits_LV / 0.7).log_softmax(-1)
        for t in places:
            exact = float(log_p_LV[t - start - 1, ROWS.input_ids[t]])
            worst = max(worst, abs(exact - float(ours_T[t])))
    return worst


def cells_of(name, kind, send):
    """Computes the cells of a type, and sends each as (column, error or words)."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))
    torch.set_num_threads(1)
    common.setup_distributed()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        folder = pathlib.Path(folder)
        try:
            model_config = tiny_config(kind)
            save_model(model_config, folder / "critic")
            exact = reference_of(folder / "critic", ROWS)
        except Exception as error:
            send(("all", f"no tiny model: {type(error).__name__}: {error}"))
            return

        def lm():
            torch.manual_seed(0)
            model = ppo_loop.policy_class(model_config).from_config(model_config)
            for p in model.parameters():
                p.data += 0.05 * torch.randn_like(p)
            model.save_pretrained(folder / "actor")

        calls = {
            "packed": lambda: critic_cell(folder / "critic", exact),
            "padded": lambda: critic_cell(folder / "critic", exact, use_remove_padding=False),
            "actor": lambda: lm() or actor_cell(folder / "actor", model_config),
            "Megatron": lambda: megatron_cell(folder / "critic", exact),
        }
        for column, call in calls.items():
            try:
                send((column, call()))
            except common.UserError as error:
                send((column, str(error).replace(str(folder), "")))
            except Exception as error:
                send((column, f"FAULT {type(error).__name__}: {error}"))
            end_groups()


def row_of(name, kind):
    """{column: error, or words on why not}, from a process of its own."""
    context = multiprocessing.get_context("forkserver")  # this process may have threads
    context.set_forkserver_preload(["models"])
    ours, theirs = context.Pipe()
    process = context.Process(target=cells_of, args=(name, kind, theirs.send))
    process.start()
    theirs.close()
    cells = {}
    try:
        while ours.poll(SECONDS):
            column, x = ours.recv()
            cells[column] = x
        process.kill()
    except EOFError:
        pass
    process.join()
    return cells


# ---- The page ------------------------------------------------------------------------------------


def short(words):
    """The reason of a no in a few words."""
    words = re.sub(r"^--\S+ \S*?( \(\w+\))?: ", "", words)
    inner = re.search(r"\((.*)\)$", words)
    if inner and re.search("cannot be|does not run|must be packed", words):
        words = inner[1]
    if words == "KeyError: 'packed'":
        words = "has an attention of its own"
    return re.sub(r"; (try|use|give) .*", "", words)[:100]


def page_of(rows):
    """The text of .github/models.md."""
    lines = []
    refused = []
    unknown = []
    for row in sorted(rows, key=lambda row: row["type"]):
        cells = [row.get(column, "") for column in COLUMNS]
        if "all" in row or not any(cells):
            unknown.append(row["type"])
        elif not any(isinstance(x, float) for x in cells):
            refused.append(row["type"])
        else:
            shown = [f"{x:.0e}" if isinstance(x, float) else "no" for x in cells]
            why = dict.fromkeys(short(x) for x in cells[:3] if isinstance(x, str))
            lines.append(f"| {row['type']} | {' | '.join(shown)} | {'; '.join(why)} |")

    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    words = "**Refused**, because tokens see later ones, or it has no attention"
    lines += ["", f"{words}: {', '.join(refused)}.", ""]
    lines += [f"**Not tried**, for want of a tiny model: {', '.join(unknown)}.", ""]
    return PAGE_HEAD.format(versions=versions, date=datetime.date.today()) + "\n".join(lines)


PAGE_HEAD = """# Which models run

`python tests/tools/models.py` made this page ({date}, {versions}).
It builds a tiny random model of every type that transformers has. It compares a critic whose rows
are packed, one whose rows are padded, an actor, and the critic on Megatron with transformers in
float64, one row at a time. A number is the larger of two errors: the largest difference of a value
(for an actor, of a log-prob in nats), and that of the whole gradient divided by its norm. `no` is
refused at the start of a run, in one line. Types that end in `_text` are the text part of a model
that also reads images; of such a model, actor and critic read the text. In float32, the same loop
in transformers is off by 6e-06 for Gemma 4, more than for others.

| type | packed | padded | actor | Megatron | why not |
|---|---|---|---|---|---|
"""


def main(names):
    """Runs the types that have no result yet, or those that are named, and writes the page."""
    kinds = types_that_write()
    kept = {}
    if KEPT.exists():
        kept = {row["type"]: row for row in common.read_lines(KEPT)}
    for name in names:
        kept.pop(name, None)

    KEPT.parent.mkdir(exist_ok=True)
    for name in sorted(kinds.keys() - kept.keys()):
        kept[name] = {"type": name, **row_of(name, kinds[name])}
        print(kept[name], flush=True)
        KEPT.write_text("".join(json.dumps(row) + "\n" for row in kept.values()))
    PAGE.write_text(page_of(kept.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
