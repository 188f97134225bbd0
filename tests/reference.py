"""What results are compared with: plain loops in float64, one sequence and one action at a time.

Nothing here is packed, padded, sharded or split, and no formula is one of the scripts: values come
from plain transformers, losses from the papers, gradients from autograd.
"""

import collections
import dataclasses
import functools
import math
import typing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from helpers import actions_of, cut_into_segments, random_batch, rows_of
from safetensors.torch import load_file, save_file

import common
import critic_fsdp

# ---- Models and rows -----------------------------------------------------------------------------

SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
SIZES["max_position_embeddings"] = 128
ROPE = dict(**SIZES, intermediate_size=64, pad_token_id=0, bos_token_id=0, eos_token_id=0)
GROUPED = dict(**ROPE, num_key_value_heads=2)
WINDOW = dict(**GROUPED, sliding_window=8)  # 8 tokens matter in rows of up to 40
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8)
DELTA["linear_value_head_dim"] = 8
NEMOTRON = dict(mamba_num_heads=4, mamba_head_dim=16, n_groups=1, ssm_state_size=8, head_dim=8)
MODELS = {
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=8),
    "llama": transformers.LlamaConfig(**GROUPED),
    "mistral": transformers.MistralConfig(**WINDOW),
    "gemma2": transformers.Gemma2Config(**WINDOW, head_dim=8, query_pre_attn_scalar=8),
    "gemma3": transformers.Gemma3TextConfig(**WINDOW, head_dim=8, query_pre_attn_scalar=8),
    "phi3": transformers.Phi3Config(**GROUPED),
    "gpt2": transformers.GPT2Config(**SIZES),
    "gpt-neox": transformers.GPTNeoXConfig(**ROPE, rotary_pct=0.5),
    "opt": transformers.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
    "qwen3-moe": transformers.Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=8, num_experts=4),
    "mixtral": transformers.MixtralConfig(**WINDOW, num_local_experts=4),
    "deepseek-v3": transformers.DeepseekV3Config(
        **ROPE, **EXPERTS, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        first_k_dense_replace=1,
    ),
    "gpt-oss": transformers.GptOssConfig(**WINDOW, head_dim=8, num_local_experts=4,
        num_experts_per_tok=2),
    # the others have recurrent layers: gated delta nets, short convolutions and Mamba
    "qwen3.5": transformers.Qwen3_5TextConfig(**GROUPED, **DELTA, head_dim=16,
        layer_types=["linear_attention", "full_attention"]),
    "lfm2": transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
    "falcon-h1": transformers.FalconH1Config(**GROUPED, **MAMBA, mamba_d_ssm=64,
        mamba_chunk_size=8),
    "nemotron-h": transformers.NemotronHConfig(**GROUPED, **NEMOTRON, **EXPERTS, chunk_size=8,
        layers_block_type=["mamba", "attention", "mlp", "moe"], n_routed_experts=4,
        moe_shared_expert_intermediate_size=32),
}  # fmt: skip

# with two rows, some ranks have none
ROWS = {"ragged": random_batch(11, seed=3), "two rows": random_batch(2, seed=2)}
ROWS["equal prompts"] = random_batch(14, seed=5, longest=24, prompts=3)

# the same episodes as whole rows, whose returns are by hand below, and in segments, whose credit is
# that of the scripts
WHOLE = random_batch(9, seed=6, idle=False)
ROWS["segments"] = cut_into_segments(WHOLE)
common.add_returns(ROWS["segments"], gamma=0.9, lam=0.8, bootstrap_truncated=True)
MODES = typing.get_args(critic_fsdp.AggMode)


def save_model(config, folder):
    """A backbone with weights large enough that no gradient is negligible, and a value head next to
    it."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32)
    for name, p in model.named_parameters():
        p.data += 0.05 * torch.randn_like(p)
        if name.endswith("A_log"):  # else some states are forgotten at once
            p.data.clamp_(max=0.0)
    for name, x in model.named_buffers():
        if "correction_bias" in name:  # of a router: large enough to choose other experts
            x += 0.3 * torch.randn_like(x)
    model.save_pretrained(folder)
    head = {"score.weight": torch.randn(1, 32), "score.bias": torch.randn(1)}
    save_file(head, folder / "value_head.safetensors")


def save_results(folder, name, models, results_of, jobs):
    """Saves the models that jobs begin with, and after that results_of(*job, folder) of all jobs (a
    collective)."""
    common.setup_distributed()
    if common.RANK == 0:
        for model in {model for model, *_ in jobs}:
            if not (folder / model).exists():  # a scenario on other ranks has the same
                save_model(models[model], folder / model)
    dist.barrier()

    results = {}
    for job in jobs:
        results |= results_of(*job, folder)
    if common.RANK == 0:
        torch.save(results, folder / name)


# ---- Advantages ----------------------------------------------------------------------------------


def gae_by_hand(tokens, gamma, lam, bootstrap, level="token"):
    """(advantage, return) of each (reward, value, is an action) token of a row, by the textbook, in
    float64. level: what takes a step, a "token" or a "turn", a span of actions."""
    steps = []  # the actions of each
    for t, (_, _, acts) in enumerate(tokens):
        if acts and level == "turn" and t > 0 and tokens[t - 1][2]:
            steps[-1].append(t)
        elif acts:
            steps.append([t])

    # a step earns the rewards up to the next one, and the first one also those before itself
    out = [(0.0, 0.0)] * len(tokens)
    advantage, end = 0.0, len(tokens)
    for i, places in reversed([*enumerate(steps)]):
        start, value = places[0] if i else 0, tokens[places[0]][1]
        reward = math.fsum(r for r, _, _ in tokens[start:end])
        advantage = reward + gamma * bootstrap - value + gamma * lam * advantage
        for t in places:
            out[t] = (advantage, advantage + value)
        bootstrap, end = value, start
    return out


def with_returns_by_hand(batch, gamma, lam):
    """The batch with returns of gae_by_hand; truncated rows end with their last value."""
    returns = []
    columns = (batch.token_level_rewards, batch.values, batch.response_mask)
    for (start, end), truncated in zip(rows_of(batch), batch.truncated.tolist()):
        tokens = list(zip(*(x_T[start:end].tolist() for x_T in columns)))
        last = [value for _, value, acts in tokens if acts][-1]
        returns += [x for _, x in gae_by_hand(tokens, gamma, lam, last * truncated)]
    return dataclasses.replace(batch, returns=torch.tensor(returns))


def whitened_by_hand(batch):
    """(T,) advantages minus a mean of the other answers' ones, weighted by (1 - p)^2, over the root
    of their mean square; action by action, in float64."""
    left = {}
    answers = actions_of(batch)
    for i, mine in enumerate(answers):
        others = [t for k, places in enumerate(answers) if k != i for t in places]
        w = [(1 - math.exp(batch.rollout_log_probs[t])) ** 2 for t in others]
        total = math.fsum(w_t * float(batch.advantages[t]) for w_t, t in zip(w, others))
        mean = total / math.fsum(w) if others else 0.0
        left |= {t: float(batch.advantages[t]) - mean for t in mine}
    size = math.sqrt(math.fsum(x * x for x in left.values()) / len(left) + 1e-8)
    return torch.tensor([left.get(t, 0.0) / size for t in range(len(batch.input_ids))])


# ---- The critic: values, loss and gradient of an update ------------------------------------------


def clipped_loss(before, old, target):
    """PPO's value loss of one action: `before` is its value now, `old` its value before the
    update."""
    clipped = torch.minimum(torch.maximum(before, old - 0.5), old + 0.5)
    return 0.5 * torch.maximum((before - target) ** 2, (clipped - target) ** 2)


def plain_loop(batch, outputs_of, value_of=lambda x: x, loss_of=clipped_loss):
    """(values, token losses of each row that has an action), action by action in float64.

    outputs_of(row, ids): the value head's outputs at each position of a row. value_of, loss_of: per
    action."""
    values, losses = torch.zeros(len(batch.input_ids)), []
    for row, (start, end) in enumerate(rows_of(batch)):
        outputs = outputs_of(row, batch.input_ids[start:end][None])
        of_row = []
        for t in range(start, end):
            if batch.response_mask[t]:
                before = outputs[t - start - 1]
                values[t] = value_of(before).detach()
                of_row.append(loss_of(before, batch.values[t].double(), batch.returns[t].double()))
        if of_row:
            losses.append(torch.stack(of_row))
    return values, losses


def reference_of(folder, batch, mode="token-mean", images_of=lambda row, ids: {}):
    """Values, loss and gradients by plain transformers, one sequence at a time, in float64."""
    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    model.set_experts_implementation("eager")  # grouped products do not support float64
    head = load_file(folder / "value_head.safetensors")
    head = {name: x.double().requires_grad_() for name, x in head.items()}

    def outputs_of(row, ids):
        model.rope_deltas = None  # forget the images of the previous row
        hidden = model(input_ids=ids, use_cache=False, **images_of(row, ids)).last_hidden_state[0]
        return hidden @ head["score.weight"][0] + head["score.bias"]

    values, losses = plain_loop(batch, outputs_of)
    if mode == "token-mean":
        loss = torch.cat(losses).mean()
    elif mode == "token-sum":
        loss = torch.cat(losses).sum()
    else:  # mean over rows of a row's sum, mean, or sum divided by a constant
        of_row = {"seq-mean-token-mean": torch.mean, "seq-mean-token-sum": torch.sum}
        of_row["seq-mean-token-sum-norm"] = lambda x: x.sum() / 50
        loss = torch.stack([of_row[mode](x) for x in losses]).mean()
    loss.backward()
    named = {f"model.{n}": p for n, p in model.named_parameters()} | head
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    return values, float(loss.detach()), gradients


def difference(ours, exact):
    """Largest difference of two dicts of gradients, relative to the largest entry of its tensor (or
    a thousandth of the largest of all, because the gradient of keys' biases is only rounding). The
    head's bias is one number, a sum that may cancel: it counts as part of the head's weight."""
    assert ours.keys() == exact.keys()
    floor = 1e-3 * max(g.abs().max() for g in exact.values())
    scale = {n: torch.maximum(g.abs().max(), floor) for n, g in exact.items()}
    for n in scale:
        if n.endswith("score.bias"):
            scale[n] = torch.maximum(scale[n], scale[n.replace("bias", "weight")])
    return max(float((ours[n] - g).abs().max() / scale[n]) for n, g in exact.items())


def assert_agrees(what, result, values, loss, gradients, most=1e-5):
    """Asserts that a result of one_update equals the reference to 1e-5, and gradients to `most` ->
    largest gradient difference."""
    error = difference(result["gradients"], gradients)
    what = (what, error)
    assert error < most, what
    torch.testing.assert_close(result["values"], values, rtol=1e-5, atol=1e-5, msg=str(what))
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    for name, x in {"vf_loss": loss, "grad_norm": norm}.items():
        assert result["metrics"][f"critic/{name}"] == pytest.approx(x, rel=1e-5), what
    return error


@functools.cache
def references(folder):
    """(rows, mode) -> reference_of this model, computed when asked for. That of segments is what
    the whole rows make."""

    def reference(rows, mode):
        if rows != "segments":
            return reference_of(folder, ROWS[rows], mode)
        values, *others = reference_of(folder, with_returns_by_hand(WHOLE, 0.9, 0.8), mode)
        mask = ROWS[rows].response_mask
        values = torch.zeros(len(mask)).masked_scatter(mask, values[WHOLE.response_mask])
        return values, *others

    return functools.cache(reference)


def compare(results, reference):
    """Asserts that results of layouts agree with the reference -> {layout: largest difference}."""
    worst = {}
    for (_, layout, case, *of), result in results.items():
        error = assert_agrees((layout, case, *of), result, *reference(*of))
        worst[layout] = max(worst.get(layout, 0.0), error)
    return worst


# ---- Other value heads, and their exports --------------------------------------------------------

LOAD = transformers.AutoModelForTokenClassification.from_pretrained


def plain_targets(target, low, high, bins):
    """Gaussian mass of each bin divided by that of the range, by math.erf."""
    width = (high - low) / bins
    sigma = 0.75 * width
    target = min(max(target, low), high)
    edges = [low + i * width for i in range(bins + 1)]
    cdf = [0.5 * (1 + math.erf((edge - target) / (sigma * math.sqrt(2)))) for edge in edges]
    return torch.tensor(
        [(b - a) / (cdf[-1] - cdf[0]) for a, b in zip(cdf, cdf[1:])], dtype=torch.float64
    )


def plain_value(logits, low, high):
    width = (high - low) / len(logits)
    return sum(p * (low + (i + 0.5) * width) for i, p in enumerate(logits.softmax(0)))


def plain_cross_entropy(logits, target, low, high):
    return -(plain_targets(float(target), low, high, len(logits)) * logits.log_softmax(0)).sum()


def values_by_hand(head, span):
    """A function of a head's outputs for an action."""
    if head == "hl_gauss":
        return lambda logits: plain_value(logits, *span)
    if head == "bounded":
        assert span == (-1.5, 2.0)
        return lambda output: 0.25 + 3.5 / math.pi * torch.atan(output[0])
    return lambda output: output[0]


def check_export(path, batch, values, head, span, rtol=0):
    """transformers finds all weights and no others, and computes the values one sequence at a
    time."""
    options = {"output_loading_info": True, "dtype": torch.float32}
    if (path / "value_head.safetensors").exists():  # a backbone without a class for the head
        model, info = transformers.AutoModel.from_pretrained(path, **options)
        score = load_file(path / "value_head.safetensors")

        def outputs_of(_, ids):
            hidden = model(input_ids=ids).last_hidden_state[0]
            return F.linear(hidden, score["score.weight"], score["score.bias"])
    else:
        model, info = LOAD(path, **options)
        outputs_of = lambda _, ids: model(input_ids=ids).logits[0]

    assert not any(info.values()), (path, info)
    assert model.config.value_range == (span and list(span))
    assert model.config.num_labels == (51 if head == "hl_gauss" else 1)
    if head != "hl_gauss":
        assert model.config.problem_type == "regression"
        assert model.config.id2label == {0: "logit" if span else "value"}
    expected, _ = plain_loop(batch, outputs_of, values_by_hand(head, span))
    torch.testing.assert_close(values, expected, rtol=rtol, atol=1e-5)
    return model


# ---- The actor: log-probs, loss, nucleus ---------------------------------------------------------


def log_softmax_of(lm, ids, temperature):
    """(T, V) log-probs of one row alone, in float64; position t predicts token t + 1."""
    return (lm(input_ids=ids[None]).logits[0].double() / temperature).log_softmax(-1)


def log_probs_of_reply(lm, prompt, ids, temperature):
    """Log-probs of the tokens that follow a prompt, from one forward."""
    with torch.no_grad():
        log_p_LV = log_softmax_of(lm, torch.tensor(prompt + ids), temperature)[len(prompt) - 1 : -1]
    return log_p_LV.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def loss_of_one_action(ratio, advantage, low, high, dual):
    """(loss, its derivative by the log ratio, clipped, dual-clipped), case by case as in the
    papers."""
    if dual is not None and advantage < 0 and ratio > dual:
        return -dual * advantage, 0.0, False, True
    # a good action that is already more likely than it may become
    if advantage > 0 and ratio > 1 + high:
        return -(1 + high) * advantage, 0.0, True, False
    if advantage < 0 and ratio < 1 - low:  # a bad one that is already less likely
        return -(1 - low) * advantage, 0.0, True, False
    return -ratio * advantage, -ratio * advantage, False, False


def kl_of(kind, log_ratio):
    """A KL estimate from log p/q of one token, differentiable, as in Schulman's note."""
    k3 = torch.exp(-log_ratio) - 1 + log_ratio
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "abs": abs(log_ratio), "k3": k3}[kind]


def loss_by_hand(lm, batch, run, ratio_band=None, probability_band=None):
    """(loss of a mini-batch, its sums, log-probs (T,), entropies (T,)), action by action. The bands
    are those of tests/forks/sao.py and bpco.py."""
    config = run.actor
    rows = [(*ends, at) for ends, at in zip(rows_of(batch), actions_of(batch)) if at]
    actions = int(batch.response_mask.sum())
    log_probs_T, entropy_T = torch.zeros(2, len(batch.input_ids), dtype=torch.float64)
    loss = 0.0
    sums = collections.Counter()

    for start, end, places in rows:
        log_p_LV = log_softmax_of(lm, batch.input_ids[start:end], run.temperature)
        weight = {
            "token-mean": 1 / actions, "token-sum": 1, "seq-mean-token-sum": 1 / len(rows),
            "seq-mean-token-mean": 1 / len(rows) / len(places),
            "seq-mean-token-sum-norm": 1 / len(rows) / run.max_response_length,
        }[config.loss_agg_mode]  # fmt: skip
        for t in places:
            before_V = log_p_LV[t - start - 1]
            log_p = before_V[batch.input_ids[t]]
            old = batch.old_log_probs[t]
            a = float(batch.advantages[t])
            ratio = torch.exp(log_p - old)
            clips = (config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c)
            value, slope, clipped, cut = loss_of_one_action(ratio.item(), a, *clips)
            pg = -ratio * a if slope else torch.tensor(value)  # clipped: a constant
            if config.tis_cap:
                pg = pg * min(config.tis_cap, math.exp(old - batch.rollout_log_probs[t]))
            low, high = ratio_band or (0.0, math.inf)
            now, then = math.exp(log_p.item()), math.exp(batch.rollout_log_probs[t])
            outside = not low <= now / then <= high
            if probability_band and abs(now - then) > probability_band:
                outside = outside or (now > then and a > 0) or (now < then and a < 0)
            pg = pg * (not outside)
            kl = kl_of(config.kl_loss_type, log_p - batch.ref_log_probs[t])
            entropy = -(before_V.exp() * before_V).sum()
            loss = loss + weight * (pg + config.kl_loss_coef * kl - config.entropy_coeff * entropy)
            log_probs_T[t], entropy_T[t] = log_p.item(), entropy.item()
            means = {
                "pg_clipfrac": clipped,
                "pg_clipfrac_lower": cut,
                "ppo_kl": (old - log_p).item(),
            }
            means |= {"kl_loss": kl.item(), "entropy": entropy.item()}
            if ratio_band or probability_band:
                means["pg_outside"] = outside
            sums["pg_loss"] += weight * pg.item()
            sums.update({key: x / actions for key, x in means.items()})
    return loss, sums, log_probs_T, entropy_T


def nucleus(log_p_V, top_p):
    """Token -> its log-prob among the likeliest tokens that together reach top_p, by a plain
    loop."""
    kept = {}
    for i in log_p_V.argsort(descending=True).tolist():
        if sum(kept.values()) < top_p:
            kept[i] = log_p_V[i].exp().item()
    return {i: math.log(p / sum(kept.values())) for i, p in kept.items()}
