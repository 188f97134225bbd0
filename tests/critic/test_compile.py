"""--compile and what stays whole over a mini-batch: faster, and the same update."""

import pytest
import torch
from helpers import end_groups, interrupted_in, random_batch, worker

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


def test_weights_are_gathered_once_for_each_mini_batch_and_let_go(monkeypatch):
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
    critic.compute_values(rows)
    assert len(gathers) == 2 * len(set(gathers)) > 0
    end_groups()


def test_the_mean_return_is_the_head_s_start_after_an_interrupted_forward():
    rows = random_batch(32, vocab_size=60)
    critic = worker(value_head_init="mean", **SIZES)
    with interrupted_in(critic.critic, "forward", 2):
        critic.compute_values(rows)
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


def flash_forward(q, k, v, cu_q, cu_k, *args, scale=None, **options):
    """torch's kernel for packed rows (T,H,D), by what a CPU computes."""
    pack = common.Pack(cu_q.diff().tolist(), "cpu", cu_k.diff().tolist())
    qkv = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = common.attention_by_pieces(pack, *qkv, scale, None, None, None)[0].transpose(0, 1)
    state = torch.zeros(2, dtype=torch.uint64)
    sums = torch.zeros(q.shape[1], len(q))
    return out.contiguous(), sums, state, torch.empty(0), torch.empty(0)


def flash_backward(grad, *qkv_and_more, **options):
    """No gradients: weights stay as they are."""
    return tuple(map(torch.zeros_like, qkv_and_more[:3]))


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

    # rows that share a prompt or not, with a backward or not; where a critic of Megatron has run in
    # this process, what makes "cuda" mean the CPU is compiled, too
    modes = len(torch.overrides._get_current_function_mode_stack())
    assert counts[-1] == counts[1] == 4 + 2 * modes
    assert common.CurrentPack.kernel == "varlen"
    end_groups()
