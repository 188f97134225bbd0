"""critic_fsdp.py on two ranks. Each scenario asserts by itself; test_scenarios.py waits for it."""

import itertools
import json
import math
import pathlib
from unittest import mock

import helpers
import pytest
import torch
import torch.distributed as dist
from forked import scenario
from helpers import (
    LAYOUTS,
    captured_gradients,
    full_weights,
    mine,
    of_critic,
    random_batch,
    refused,
)
from reference import plain_loop, whitened_by_hand
from transformers.models.qwen2 import modeling_qwen2

import common
import critic_fsdp
import ppo_loop
from common import RANK, WORLD_SIZE
from critic_fsdp import Config, Run


def make(**fields):
    return helpers.worker(**{"lr_warmup_steps": 3, "ppo_mini_batch_size": 8, **fields})


@scenario(ranks=2)
def a_weight_may_be_used_on_one_rank_alone(folder):
    """Each rank sends its tokens to one of two experts. Gradients are those of a plain loop over
    the rank's rows, all-reduced by hand; an expert that no rank uses still decays."""
    mlp = modeling_qwen2.Qwen2MLP
    expert = 0

    class Mixture(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.experts = torch.nn.ModuleList([mlp(config), mlp(config)])

        def forward(self, x):
            return self.experts[expert](x)

    modeling_qwen2.Qwen2MLP = Mixture
    batch = random_batch(8, vocab_size=60)
    for layout, of_rank in itertools.product(("fsdp2", "none"), ([0, 1], [0, 0])):
        expert = 0
        worker = make(lr=0.1, weight_decay=0.5, shuffle=False, **LAYOUTS[layout])
        plain, *_ = critic_fsdp.read_weights(worker.config, worker.model_config)
        expert = of_rank[RANK]
        with captured_gradients(worker.critic) as gradients:
            worker.update_critic(mine(batch))
        plain.model.set_attn_implementation("eager")
        most = worker.critic.max_tokens
        table = worker.critic.plan_micro_batches(common.describe(batch), most)
        rows = batch.select(table.wanted[RANK].tolist())
        _, losses = plain_loop(rows, lambda _, ids, plain=plain: plain(input_ids=ids)[0])
        (torch.cat(losses).sum() / batch.response_mask.sum()).backward()
        after = full_weights(worker.critic)
        for name, p in plain.named_parameters():
            what = f"{layout} {of_rank} {name}"
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            torch.testing.assert_close(gradients[0][name], p.grad, rtol=1e-4, atol=1e-6, msg=what)
            if ".experts.1." in name and 1 not in of_rank:
                decayed = p.detach() * (1 - 0.1 / 3 * 0.5)  # the first of three warm-up steps
                torch.testing.assert_close(after[name], decayed, msg=what)
            else:
                assert p.grad.any() and not torch.equal(after[name], p), what
    modeling_qwen2.Qwen2MLP = mlp


@scenario(ranks=2)
def it_does_not_matter_who_has_a_row(folder):
    """Values, weights and metrics of two updates are equal, also if one rank has all rows."""
    batch = random_batch(13, vocab_size=60, prompts=4)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1)).tolist()
    for fields in (
        {},
        {"ulysses_size": 2, "shuffle": False},
        {"strategy": "none", "value_weights": "noise"},
    ):
        seen = []
        for cut in (4, 0, 13):  # some, none and all of the rows are on the last rank
            worker = make(
                ppo_mini_batch_size=5, ppo_epochs=2, ppo_max_token_len_per_gpu=64, **fields
            )
            own = batch.select(order[cut:] if RANK == 0 else order[:cut])
            metrics = [worker.update_critic(own) for _ in range(2)]
            values = common.compute_together(worker, batch)
            returned = worker.compute_values(own)
            assert torch.equal(returned, values[batch.token_index(own.row_id.tolist())])
            seen.append((metrics, full_weights(worker.critic) | {"values": values}))

        (metrics, tensors), *others = seen
        for theirs, same in others:
            assert all(torch.equal(x, same[name]) for name, x in tensors.items())
            for ours, other in zip(metrics, theirs):
                assert of_critic(other) == pytest.approx(of_critic(ours), rel=1e-12)


@scenario(ranks=2)
def whitening_is_over_all_ranks(folder):
    """masked_whiten on the ranks' parts equals the formula over the whole."""
    common.setup_distributed()
    batch = random_batch(16)
    mask = batch.response_mask
    # moments differ by rank; NaN does not count
    x = torch.where(mask, 5 + RANK * batch.returns, math.nan)
    parts = common.of_all_ranks(x[mask])
    whole = torch.cat(parts)
    expected = (parts[RANK] - whole.mean()) / (whole.var() + 1e-8).sqrt()
    torch.testing.assert_close(ppo_loop.masked_whiten(x, mask)[mask], expected)

    # minus the mean of least noise: each rank's part of what one rank makes of all
    both = random_batch(32)
    both.advantages = torch.where(both.response_mask, 5 + both.returns, math.nan)
    part = both.select(range(12) if RANK else range(12, 32))
    ours = ppo_loop.whiten_by_noise(part)
    theirs = whitened_by_hand(both)[both.token_index(part.row_id.tolist())]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@scenario(ranks=2)
def gradients_of_bfloat16_are_reduced_in_float32(folder):
    """Ranks send gradients in float32 and gathered weights in bfloat16."""
    names = "all_reduce reduce_scatter_tensor reduce_scatter_single "
    names += "all_gather all_gather_into_tensor all_gather_single"
    for layout, fields in LAYOUTS.items():
        worker = make(param_dtype="bfloat16", **fields)
        sent = {"reduce": set(), "gather": set()}
        with pytest.MonkeyPatch.context() as patch:
            for name in names.split():
                function = getattr(dist, name, None)
                dtypes = sent["gather" if "gather" in name else "reduce"]

                def noted(*args, function=function, dtypes=dtypes, **kwargs):
                    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
                    dtypes.update(x.dtype for x in tensors if x.numel() > 500)
                    return function(*args, **kwargs)

                patch.setattr(dist, name, noted, raising=False)  # some are new in torch 2.13
            worker.update_critic(mine(random_batch(16, vocab_size=60)))
        assert sent["reduce"] == {torch.float32}, (layout, sent)
        assert layout == "none" or torch.bfloat16 in sent["gather"], (layout, sent)


class Pair(torch.optim.Optimizer):
    """Two optimizers as one, which owns their state and their groups."""

    def __init__(self, *parts):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure=None):
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.step()


def muon_and_adamw(named):
    """Muon for the matrices of the layers and AdamW for the rest, at one learning rate."""
    matrices = {name: p for name, p in named.items() if ".layers." in name and p.ndim == 2}
    others = [p for name, p in named.items() if name not in matrices]
    muon = torch.optim.Muon(matrices.values(), 1e-3, adjust_lr_fn="match_rms_adamw")
    return Pair(muon, torch.optim.AdamW(others, 1e-3))


@scenario(ranks=2)
def an_optimizer_of_a_fork_steps_as_on_whole_weights(folder):
    """Ranks that shard the weights make the step of one rank that has them all, and a checkpoint
    holds the state. Muon multiplies in bfloat16, so that its steps differ in rounding."""
    kinds = {
        "sgd": (1e-4, lambda named: torch.optim.SGD(named.values(), 1e-3, momentum=0.9)),
        "rmsprop": (1e-3, lambda named: torch.optim.RMSprop(named.values(), 1e-3)),
        "muon": (0.2, muon_and_adamw),
    }
    batch = mine(random_batch(8, vocab_size=97))
    for kind, (near, build) in kinds.items():
        worker = make(lr=1e-3, lr_warmup_steps=0)
        worker.critic.optimizer = build(dict(worker.critic.model.named_parameters()))
        before = full_weights(worker.critic)
        with captured_gradients(worker.critic) as gradients:
            worker.update_critic(batch)
            worker.save_checkpoint(f"{folder}/{kind}")
            worker.update_critic(batch)
        after = full_weights(worker.critic)

        alone = {name: torch.nn.Parameter(x.clone()) for name, x in before.items()}
        optimizer = build(alone)
        for gradient in gradients:
            for name, p in alone.items():
                p.grad = gradient[name]
            torch.nn.utils.clip_grad_norm_(alone.values(), worker.config.grad_clip)
            optimizer.step()
        for name, p in alone.items():
            off = (after[name] - p).norm() / (p - before[name]).norm()
            assert off < (near if p.ndim == 2 and ".layers." in name else 1e-3), (kind, name, off)

        again = make(lr=1e-3, lr_warmup_steps=0)
        again.critic.optimizer = build(dict(again.critic.model.named_parameters()))
        again.load_checkpoint(f"{folder}/{kind}")
        again.update_critic(batch)
        helpers.assert_same_weights(again, after)


@scenario(ranks=2)
def bad_input_ends_every_rank(folder):
    """All ranks refuse bad rows and impossible flags, before a model is built. test_common.py has
    more bad rows, on one rank."""
    path = folder / "bad.jsonl"
    good = {"prompt_ids": [1, 2], "response_ids": [3, 4], "reward": 1.0}
    if RANK == 0:
        path.write_text("\n".join(map(json.dumps, (good, {**good, "reward": None}))))
    one_head = '{"num_attention_heads": 1, "num_key_value_heads": 1}'
    cases = [  # flags of the critic, of the run, words of the message
        ({}, {"rollouts": f"{folder}/none.jsonl"}, "--rollouts"),
        ({}, {"rollouts": str(path)}, "one of reward, rewards; has none"),
        ({"tokenizer": str(folder)}, {}, "--tokenizer"),
        ({"model": str(folder)}, {}, "--model"),
        ({"ulysses_size": 2, "override_config": one_head}, {}, "attention heads"),
        ({"fsdp_size": 5}, {}, "--fsdp-size 5: must divide the 2 ranks"),
    ]
    common.setup_distributed()
    dist.barrier()
    with mock.patch.object(critic_fsdp, "build_value_model") as build:
        for critic, fields, fault in cases:
            with refused(fault):
                critic_fsdp.main(Run(critic=Config(**critic), out_dir=f"{folder}/out", **fields))
    assert not build.called


@scenario(ranks=2)
def what_a_rank_does_not_see_is_an_error_on_all(folder):
    """A save without the files of another rank leaves no checkpoint, and a folder must exist on all
    ranks. Old values of only some ranks, and an episode in parts, are refused."""
    common.setup_distributed()
    exists = common.exists
    for blind in range(WORLD_SIZE):
        with refused(f"--out-dir: rank {blind} does not see all of {folder}/step_1.tmp"):
            with common.published(f"{folder}/step_1") as tmp:
                pathlib.Path(tmp, f"{RANK}").touch()
                if RANK == blind:
                    common.exists = lambda path: f"{path}" != f"{tmp}/{1 - RANK}" and exists(path)
        common.exists = exists
        assert not exists(f"{folder}/step_1")
    with common.published(f"{folder}/step_1"):
        pass
    with refused("no complete checkpoint here", f"--resume {folder}/step_"):
        common.verify(f"{folder}/step_{1 - RANK}")

    batch = mine(random_batch(8, vocab_size=97))
    batch.values = None if RANK else batch.values
    with refused("values: only some ranks' batches have this column"):
        make().update_critic(batch)

    segments = helpers.cut_into_segments(random_batch(3, vocab_size=97))
    own = segments.select(range(RANK, len(segments), WORLD_SIZE))
    for method in ("compute_values", "update_critic"):
        with refused("its rows are on several ranks: one must pass them all", begin="episode "):
            getattr(make(), method)(own)
    own = mine(segments)
    expected = make().update_critic(own)

    # a rank whose answers have one row each need not know of episodes
    flat = segments.select([i for i in range(len(segments)) if segments.row_id[i] % 100 == 0])
    flat.episode = flat.row_id if RANK else None
    assert make().update_critic(mine(flat))["critic/skipped_steps"] == 0
    assert expected["critic/skipped_steps"] == 0


@scenario(ranks=2)
def an_automatic_budget_is_that_of_the_rank_with_least_memory(folder):
    """Without Ulysses, whose exchange frees memory in a thread, now earlier and now later."""
    budgets = []
    for gib in (0.03, 0.02, 0.03 if RANK else 0.02):
        worker = make(ppo_max_token_len_per_gpu=f"auto:{gib}")
        worker.set_budget(64, "the longest row")
        budgets.append(worker.critic.max_tokens)
    roomy, small, mixed = budgets
    assert roomy > 1.3 * small and abs(mixed - small) < 0.02 * small, budgets
    assert common.of_all_ranks(budgets) == [budgets] * 2
