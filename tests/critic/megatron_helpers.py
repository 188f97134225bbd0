"""What the tests of critic_megatron.py share: whole weights and gradients of a critic in parts."""

import torch
import torch.distributed as dist

import common
import critic_megatron as cm


def whole_of(worker, part):
    """name -> whole tensor of part(AdamW, p), for every weight that trains (a collective). p is
    this rank's part of the float32 weight; part returns its gradient, a moment, or p itself."""

    def local(name, p):
        if not p.requires_grad:
            return None
        flat = torch.zeros(p.numel())
        if p in worker.critic.masters:
            adam, mine, place = worker.critic.masters[p]
            flat[place] = part(adam, mine).detach()
        dist.all_reduce(flat, group=cm.groups_of(name)[1])
        return flat.view_as(p)

    return union(worker, local)


def computed(worker):
    """name -> whole tensor, of every weight as the forward uses it."""
    return union(worker, lambda name, p: p.detach())


def union(worker, local):
    """All that the ranks would write, as one dict; no two ranks write the same rows of a weight."""
    mine = cm.whole_weights(worker.critic.modules, worker.model_config.vocab_size, local)
    # faster than tensors
    every = common.of_all_ranks({name: x.numpy() for name, x in mine.items()})
    whole = {name: torch.from_numpy(x) for some in every for name, x in some.items()}
    assert len(whole) == sum(map(len, every))
    return {name: x for name, (_, x) in cm.join_experts(whole).items()}


def assert_replicas_agree(critic):
    """Ranks that hold the same part of a weight, or all of an unsharded one, hold the same bits."""
    for name, p in cm.named_weights(critic.modules):
        groups = [cm.groups_of(name)[1]]
        if cm.hf_names(name, critic.modules[0].family)[0] == "whole":
            groups.append(cm.groups_of(name)[0])
        for group in groups:
            most, least = p.detach().clone(), p.detach().clone()
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
            assert torch.equal(most, least), (
                f"{name} differs between ranks by {(most - least).abs().max()}"
            )


def noted_gradients(worker):
    """A list to which every step from now on adds the whole gradient before clipping."""
    seen = []
    prepare = worker.critic.optimizer.prepare_grads

    def note():
        prepare()
        seen.append(whole_of(worker, lambda _, p: p.grad))

    worker.critic.optimizer.prepare_grads = note
    return seen
