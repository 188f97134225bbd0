"""--compile and what stays whole over a mini-batch: faster, and the same update."""

import pytest
import torch
from helpers import end_groups, random_batch, worker

import common
import critic_fsdp

SIZES = {"ppo_mini_batch_size": 8, "ppo_max_token_len_per_gpu": 100, "lr": 1e-3}
counters = torch._dynamo.utils.counters  # "stats", "graph_break" -> name -> count


def learned(batches, **flags):
    """What a new critic learns: the values before each update, and its metrics."""
    critic = worker(**SIZES, **flags)
    found = [(critic.compute_values(x), critic.update_critic(x)) for x in batches]
    end_groups()
    return found


def assert_same(found, expected):
    for (values, metrics), (their_values, theirs) in zip(found, expected, strict=True):
        torch.testing.assert_close(values, their_values, rtol=1e-5, atol=1e-5)
        for name in ("critic/vf_loss", "critic/grad_norm"):
            assert metrics[name] == pytest.approx(theirs[name], rel=1e-5)


# ---- Weights and gradients that stay whole -------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_stay_gathered_give_the_same_bits(dtype, monkeypatch):
    batches = [random_batch(16, seed=i, vocab_size=60) for i in range(2)]
    whole = learned(batches, param_dtype=dtype)
    monkeypatch.setattr(critic_fsdp, "stays_whole", lambda config: (False, False))
    for (values, metrics), (theirs, others) in zip(whole, learned(batches, param_dtype=dtype)):
        assert torch.equal(values, theirs)
        assert metrics["critic/grad_norm"] == others["critic/grad_norm"]


def test_weights_are_gathered_once_for_each_mini_batch(monkeypatch):
    critic = worker(**SIZES)
    gathers = []
    group = torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup
    unshard = group.unshard

    def counted(self, *args):
        if not self.is_unsharded:
            gathers.append(self)
        return unshard(self, *args)

    monkeypatch.setattr(group, "unshard", counted)
    rows = random_batch(16, vocab_size=60)
    table = critic.critic.plan_micro_batches(common.describe(rows)[:8], 100)
    assert len(table.sizes[0]) > 1
    critic.update_critic(rows)
    assert len(gathers) == 2 * len(set(gathers))  # two mini-batches
    gathers.clear()
    critic.compute_values(rows)
    assert len(gathers) == len(set(gathers))
    end_groups()


def test_the_mean_return_is_the_head_s_start_after_an_interrupted_forward():
    rows = random_batch(32, vocab_size=60)
    critic = worker(value_head_init="mean", **SIZES)

    def stop():
        raise KeyboardInterrupt

    calls = iter([lambda: None, stop])
    critic.critic.between = lambda: next(calls)()
    with pytest.raises(KeyboardInterrupt):
        critic.compute_values(rows)
    del critic.critic.between
    critic.start_at_mean(rows, 1.0)
    critic.compute_values(rows)  # it frees gathered weights
    values_T = critic.compute_values(rows)[rows.response_mask]
    mean, spread = rows.mean_return(1.0)
    assert len(values_T.unique()) == 1 and abs(float(values_T[0]) - mean) < 0.1 * spread
    end_groups()


# ---- Compiled blocks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, device, steps, compiles",
    [
        ({}, "cuda", 21, True),
        ({}, "cuda", 20, False),
        ({}, "cuda", None, False),
        ({}, "cpu", 1000, False),
        ({"compile": "off"}, "cuda", 1000, False),
        ({"compile": "on"}, "cpu", None, True),
        ({"model": "tiny-qwen3-moe"}, "cuda", 1000, False),
        ({"model": "tiny-qwen2.5-vl"}, "cuda", 1000, False),
        ({"ulysses_size": 2}, "cuda", 1000, False),
    ],
)
def test_auto_compiles_where_it_pays(changes, device, steps, compiles, monkeypatch):
    config = critic_fsdp.Config(**changes)
    _, model_config = common.load_config(config)
    common.configure_head(model_config, config, None)
    model = critic_fsdp.build_skeleton(config, model_config)
    monkeypatch.setattr(common, "TINY", {})  # as if it were a model of a user
    monkeypatch.setattr(critic_fsdp, "has_triton", lambda: True)
    monkeypatch.setattr(critic_fsdp, "which", lambda name: name)
    device = torch.device(device)
    found = critic_fsdp.compile_blocks(model, config, model_config, device, steps)
    blocks = critic_fsdp.units_of(model)
    assert found == compiles == ("forward" in vars(blocks[0]))


def test_a_critic_on_the_actors_base_does_not_compile_it(monkeypatch):
    """Blocks of its own are thrown away, so nothing is to be said of them."""
    actor = worker()
    monkeypatch.setattr(critic_fsdp, "compile_blocks", None)  # from here on it fails
    embedding = actor.critic.model.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda *_: actor.critic.model.unshard())  # as the actor's
    guest = critic_fsdp.CriticWorker(critic_fsdp.Config(freeze_modules=r"^model\."))
    guest.layout = guest.layout._replace(backbone=actor.critic.model.model)
    guest.init_model()
    assert not guest.critic.compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [{"gradient_checkpointing": True, "lora_rank": 4}, {"strategy": "fsdp1"}]
)
def test_compiled_blocks_learn_what_others_learn(flags):
    batches = [random_batch(12, seed=i, vocab_size=60, prompts=3 * (i % 2)) for i in range(3)]
    expected = learned(batches, **flags)
    torch._dynamo.reset()
    counters.clear()
    assert_same(learned(batches, compile="on", **flags), expected)
    assert counters["stats"]["unique_graphs"] > 2


class PackForKernels(common.Pack):
    """A pack of a device with kernels for half precision."""

    def __init__(self, *args):
        super().__init__(*args)
        self.has_kernels = True


def one_row(q_LHD, k_MKD, v_MKD, scale):
    """(probabilities, queries, keys, values), by heads, of one sequence's causal attention."""
    repeat = q_LHD.shape[1] // k_MKD.shape[1]
    q, k, v = (
        x.transpose(0, 1).float()
        for x in (q_LHD, k_MKD.repeat_interleave(repeat, 1), v_MKD.repeat_interleave(repeat, 1))
    )
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1), q, k, v


def rows_of_kernel(cu_queries, cu_keys, most_queries, most_keys, queries, keys):
    """Splits (queries, keys) tensors at the ends of sequences."""
    lengths = [cu.diff().tolist() for cu in (cu_queries, cu_keys)]
    assert [most_queries, most_keys] == list(map(max, lengths))
    return zip(*(x.split(lengths[0]) for x in queries), *(x.split(lengths[1]) for x in keys))


def flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, *args, scale=None, **options):
    """torch's kernel for packed rows, on a CPU."""
    outs = []
    for parts in rows_of_kernel(cu_q, cu_k, max_q, max_k, [q], [k, v]):
        weights, _, _, values = one_row(*parts, scale)
        outs.append((weights @ values).transpose(0, 1))
    lse = torch.zeros(q.shape[1], len(q))
    state = torch.zeros(2, dtype=torch.uint64)
    return torch.cat(outs).to(q.dtype).contiguous(), lse, state, torch.empty(0), torch.empty(0)


def flash_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, *args, scale=None, **more):
    """Its gradients."""
    grads = []
    for d_out, *parts in rows_of_kernel(cu_q, cu_k, max_q, max_k, [grad, q], [k, v]):
        weights, queries, keys, values = one_row(*parts, scale)
        d_out = d_out.transpose(0, 1).float()
        d_weights = d_out @ values.transpose(1, 2)
        d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * scale
        heads = (parts[1].shape[1], -1)
        d_k = (d_scores.transpose(1, 2) @ queries).unflatten(0, heads).sum(1)
        d_v = (weights.transpose(1, 2) @ d_out).unflatten(0, heads).sum(1)
        grads.append([x.transpose(0, 1).to(q.dtype) for x in (d_scores @ keys, d_k, d_v)])
    return tuple(torch.cat(x).contiguous() for x in zip(*grads))


@pytest.mark.slow
def test_batches_of_other_lengths_are_not_compiled_again(monkeypatch):
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    monkeypatch.setattr(critic_fsdp, "Pack", PackForKernels)
    monkeypatch.setattr(common, "flash_attn_varlen_func", None)

    batches = [
        random_batch(4 + i % 7, seed=i, vocab_size=60, longest=20 + 2 * i, prompts=2)
        for i in range(20)
    ]
    torch._dynamo.reset()
    counters.clear()
    flags = {"param_dtype": "bfloat16", "ppo_mini_batch_size": 100}
    flags |= {"ppo_max_token_len_per_gpu": 1000, "lr": 1e-12}  # values stay as they are
    eager = worker(**flags)
    expected = [eager.compute_values(x) for x in batches]
    end_groups()

    critic = worker(compile="on", **flags)
    counts = []
    for rows, theirs in zip(batches, expected, strict=True):
        off = (critic.compute_values(rows) - theirs).abs().max()
        assert off < 0.05  # in bfloat16
        critic.update_critic(rows)
        counts.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    assert counts[-1] == counts[1] == 4  # rows that share a prompt or not, with a backward or not
    assert common.CurrentPack.kernel == "varlen"
    end_groups()
