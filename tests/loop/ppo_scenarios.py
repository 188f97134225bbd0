"""ppo_loop.py on several ranks. Each scenario asserts by itself; test_scenarios.py waits for it.

Runs are whole runs of main(), from the command line on. Comparisons come after their runs in
LAUNCHES."""

import dataclasses
import json
import math
import os
import pathlib
import re

import faults
import forked
import pytest
import rewards
import torch
import transformers
from safetensors.torch import load_file

REWARDS = pathlib.Path(rewards.__file__)

# Every run starts from the same actor (of learn_to_add) and draws the same prompts and random
# numbers. A step has 2 epochs of 2 mini-batches, a KL in the reward with an adaptive coefficient,
# and a KL in the loss. Tokens are sampled from the nucleus at a low temperature, and carry
# importance weights. With --actor.lr 1e-3, rounding errors would make the runs differ by step 4.
TOY = (
    "--supervised-steps", "0", "--steps", "4", "--train-batch-size", "32", "--rollout-n", "2",
    "--save-every", "2", "--eval-every", "2", "--critic-warmup", "1", "--lam-policy", "0.95",
    "--kl-coef", "0.05", "--target-kl", "0.01", "--actor.kl-loss-coef", "0.01",
    "--temperature", "0.8", "--top-p", "0.95", "--actor.tis-cap", "0.98",
    "--actor.lr", "3e-4", "--actor.ppo-epochs", "2", "--actor.ppo-mini-batch-size", "32",
    "--critic.lr", "1e-3", "--critic.ppo-epochs", "2", "--critic.ppo-mini-batch-size", "32",
    "--reward", f"{REWARDS}:right_digits", "--dump-rollouts",
)  # fmt: skip

TP_2 = ("--critic", "megatron", "--critic.tensor-model-parallel-size", "2")
GOLDEN = {  # the same run on these ranks with these flags
    "fsdp 1": (1, ()),
    "fsdp 2": (2, ()),
    "fsdp 2, actor ulysses 2": (2, ("--actor.ulysses-size", "2", "--critic.fsdp-size", "1")),
    "megatron tp 2": (2, TP_2),
    "megatron tp 2 pp 2": (4, (*TP_2, "--critic.pipeline-model-parallel-size", "2")),
}


def toy(folder, name, *flags):
    """A run on 128 prompts, and 32 to evaluate on, without a report: matplotlib takes a second."""
    common.write_report = lambda *_: None
    rows = ppo_loop.addition_rows

    def fewer_rows(_, seed, **held_out):
        n = 32 if held_out else 128
        return list(rows(256, seed, **held_out))[:n]

    ppo_loop.addition_rows = fewer_rows
    own = ("--actor.model", str(folder / "actor"), "--out-dir", str(folder / name))
    ppo_loop.main(ppo_loop.parse([*own, *TOY, *flags]))


def steps_of(out):
    """The metrics of each step, without evaluations."""
    return [row for row in common.read_lines(out / "metrics.jsonl") if "reward/mean" in row]


def metrics_of(out):
    """(step, name) -> number, for all metrics that do not depend on the machine."""
    import common  # here, because a process that starts ranks must not have read RANK before

    passing = ("perf/", "time/", "memory/")
    rows = common.read_lines(out / "metrics.jsonl")
    metrics = {(row["step"], name): x for row in rows for name, x in row.items() if name != "step"}
    return {key: x for key, x in metrics.items() if not key[1].startswith(passing)}


def off(x, y):
    """Relative difference; numbers below 1e-3 count as 1e-3: some are only rounding errors."""
    if x is None or y is None:  # null: not finite
        return 0.0 if x is y else math.inf
    return abs(x - y) / max(abs(x), abs(y), 1e-3)


def assert_same_run(ours, theirs, what):
    """All metrics of `theirs`, both exports and the last checkpoints are the same, bit for bit."""
    numbers = metrics_of(ours)
    other = [key for key, x in metrics_of(theirs).items() if numbers[key] != x]

    last = "checkpoints/step_4"
    for part in ("hf", "critic_hf", last, f"{last}/actor", f"{last}/critic"):
        a, b = (faults.state_of(out / part) for out in (ours, theirs))
        assert len(a) > 5 and a.keys() == b.keys(), (what, part)
        other += [name for name, x in a.items() if b[name] != x]
    assert not other, (what, other)


def assert_close_runs(runs, reference, most=1e-4, steps=None):
    """The metrics of all runs agree with those of the reference; prints how far they are off."""
    # engine and actor differ only by rounding
    for run in (reference, *runs):
        for diff, largest in (("rollout/log_prob_diff", 1e-6), ("rollout/log_prob_diff_max", 5e-5)):
            diffs = [x for (_, name), x in metrics_of(run).items() if name == diff]
            assert diffs and max(diffs) < largest, (run, diff, diffs)

    expected = {}
    for (step, name), x in metrics_of(reference).items():
        if "log_prob_diff" not in name and (steps is None or step in steps):
            expected[step, name] = x

    for run in runs:
        numbers = metrics_of(run)
        errors = {key: off(numbers.get(key, math.inf), x) for key, x in expected.items()}
        worst = max(errors, key=errors.get)
        words = f"{worst} {numbers.get(worst)} instead of {expected[worst]}"
        print(f"{run.name}: off {reference.name} by at most {errors[worst]:.1e}: {words}")
        assert errors[worst] < most, (run, words)


def sampled(out):
    """(step, row) -> its tokens, of every step."""
    tokens = {}
    for path in (out / "rollouts").iterdir():
        for i, row in enumerate(common.read_lines(path)):
            tokens[path.name, i] = row["response_ids"]
    return tokens


def start(folder, *flags):
    """Trains the actor that all runs start from."""
    common.setup_distributed()
    run, task = ppo_loop.set_up(ppo_loop.parse(["--out-dir", str(folder / "start"), *flags]))
    ppo_loop.learn_to_add(run, task, str(folder / "actor"))


def samples_and_metrics_agree(folder, most):
    """Sampled tokens are equal, and metrics up to `most` -> the golden runs."""
    first, *others = (folder / name for name in GOLDEN)
    assert all(sampled(run) == sampled(first) for run in others)
    assert len({tuple(ids) for ids in sampled(first).values()}) > 50  # not all are the same

    assert_close_runs(others, first, most)
    return first, others


def one_step(folder):
    """A step of PPO, with one update of each model, on two ranks that share the actor's rows, with
    the critic in another layout, is that of one rank to 1e-6."""
    flags = ["--steps", "1", "--critic-warmup", "0"]
    for model in ("actor", "critic"):
        flags += [f"--{model}.ppo-epochs", "1", f"--{model}.ppo-mini-batch-size", "64"]
    ranks = common.WORLD_SIZE
    layout = ("--actor.ulysses-size", "2", "--critic.fsdp-size", "1") if ranks == 2 else ()
    toy(folder, f"one step on {ranks}", *flags, *layout)
    if ranks == 2 and common.RANK == 0:
        assert_close_runs([folder / "one step on 2"], folder / "one step on 1", 1e-6)


def golden_runs_agree(folder):
    """They agree to 1e-4, and values of the first step to 1e-5: both critics load the same folder
    and draw the same new value head. --dump-rollouts writes all rows in the order of one rank."""
    first, others = samples_and_metrics_agree(folder, 1e-4)

    # the rows of the first step
    dump = lambda run: common.read_rows(str(run / "rollouts/step_1.jsonl"), None)
    expected = dump(first)
    assert len(expected) == 64
    for run in others:
        rows = dump(run)
        for column in ("input_ids", "response_mask", "truncated", "token_level_rewards", "values"):
            pair = (getattr(rows, column), getattr(expected, column))
            torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)

    # the KL coefficient adapts as soon as the actor learns, by the KL of 64 rows
    coefs = [row["kl/coef"] for row in steps_of(first)]
    assert coefs[:2] == [0.05] * 2 and len(set(coefs)) == 3, coefs
    for row, after in zip(steps_of(first)[1:], coefs[2:]):
        assert after == ppo_loop.next_kl_coef(row["kl/coef"], row["kl/reference"], 64, 0.01), coefs

    # before it learns, the actor is its own reference
    for run in (first, *others):
        assert steps_of(run)[0]["kl/reference"] == 0
        replies_belong_to_their_prompts(folder, run)

    for row in steps_of(first):
        assert 0.05 < row["reward/mean"] < 0.95  # something is earned, not all
        assert row["reward/errors"] == 0
        of_gpus = {"perf/mfu", "perf/peak_memory_gib"}
        assert {key for key, x in row.items() if x is None} == of_gpus, row


def replies_belong_to_their_prompts(folder, run):
    """Samples of the last evaluation equal greedy ones of transformers, prompt by prompt, and have
    the reward of their own prompt. So have the rows of the first step."""
    from ppo_helpers import text_of_reply

    lm = transformers.AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    tokenizer, _ = common.load_config(ppo_loop.ActorConfig(model=str(folder / "actor")))
    answer_of = lambda text: str(sum(map(int, text[:-1].split("+"))))

    samples = json.loads((run / "samples.json").read_text())
    assert len(samples) == 32
    for row in samples[:8]:
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
        out = lm.generate(ids, max_new_tokens=8, **special)[0, ids.shape[1] :]
        assert row["response"] == text_of_reply(out.tolist()), row
        answer = answer_of(row["prompt"])
        assert row["reward"] == rewards.right_digits(None, row["response"], answer)

    for row in common.read_lines(run / "rollouts/step_1.jsonl"):
        reply = text_of_reply(row["response_ids"])
        assert row["score"] == rewards.right_digits(None, reply, answer_of(row["prompt_text"]))


def one_row(folder, name, *flags):
    """1 row a step, so the second rank has nothing to do. (With seed 0 the second row's KL is close
    to 0 by chance, and its rounding error above 1e-4.)"""
    own = "--train-batch-size 1 --rollout-n 1 --steps 2 --seed 1 --privileged-key response"
    toy(folder, name, *own.split(), *flags)
    if common.RANK == 0 and common.WORLD_SIZE == 2:
        assert_close_runs([folder / name], folder / "one row, fsdp 1")


def goes_on(folder, name, layout, *flags):
    """A golden run's checkpoint of step 2 continues with the same steps 3 and 4: to 1e-4 on another
    layout or with the other critic; bit for bit on its own layout, also with --offload."""
    whole = folder / name
    out = folder / f"{name}, on {layout}"
    _, layout_flags = GOLDEN[layout]
    resume = ("--resume", str(whole / "checkpoints" / "step_2"))
    toy(folder, out.name, *layout_flags, *flags, *resume)

    if common.RANK == 0:
        assert [row["step"] for row in steps_of(out)] == [3, 4]
        assert_close_runs([out], whole, steps=(3, 4))
        if layout == name:
            assert_same_run(whole, out, f"{name}, resumed")


def on_one_base(folder, kind, *flags):
    """Actor and critic on one set of weights: both train adapters, or the critic is a probe, a head
    on the actor. Two ranks sample what one does and make its metrics, and so do adapters apart.
    With --offload a resumed run is the same bit for bit."""
    ranks = common.WORLD_SIZE
    name = f"{kind}, fsdp {ranks}"
    alone = folder / f"{kind}, fsdp 1"
    runs = {name: ("--share-base",)}
    if kind == "adapters":
        runs[f"{name}, apart"] = ()
        if ranks == 2:
            runs[f"{name}, ulysses 2"] = ("--share-base", "--critic.ulysses-size", "2")
    for run, more in runs.items():
        toy(folder, run, *flags, *more)
    middle = folder / name / "checkpoints" / "step_2"
    toy(folder, f"{name}, resumed", *flags, *runs[name], "--offload", "--resume", str(middle))
    if common.RANK > 0:
        return

    # on a CPU with AVX2 alone, a KL of 0.001 is 2e-7 off
    others = [folder / run for run in runs if run != alone.name]
    most = {"adapters": 3e-4, "probe": 1e-4}[kind]
    assert_close_runs(others, alone, 1e-6 if ranks == 1 else most)
    assert all(sampled(run) == sampled(alone) for run in others)
    assert_same_run(folder / name, folder / f"{name}, resumed", name)

    # a checkpoint of the critic has nothing of the base
    names, _ = common.open_checkpoint_weights(f"{folder}/{name}/checkpoints/step_4/critic")
    assert len(names) > 5 and all(re.search(r"\.lora_|score\.|^rng$", x) for x in names), names

    # its export has: a probe's is the actor with a head, that of adapters is that of one rank
    exported = lambda run, part: load_file(run / part / "model.safetensors")
    if kind == "probe":
        critic, actor = (exported(folder / name, part) for part in ("critic_hf", "hf"))
        assert "score.weight" in critic and len(critic) == len(actor) + 1
        assert all(torch.equal(critic[key], actor[key]) for key in critic.keys() & actor.keys())
        return
    assert steps_of(alone)[-1]["kl/reference"] > 1e-3
    theirs = exported(alone, "critic_hf")
    for run in others:
        ours = exported(run, "critic_hf")
        assert ours.keys() == theirs.keys()
        for key, x in theirs.items():
            torch.testing.assert_close(ours[key], x, rtol=1e-4, atol=1e-5, msg=key)


def still_critics(folder):
    """Without a critic's rate, actors move as in a run whose critic has weights of its own."""
    runs = {"still probe": "--share-base", "still critic": "--offload"}
    for name, flag in runs.items():
        toy(folder, name, "--critic.lr", "1e-30", "--critic.value-head-init", "zero", flag)
    ours, theirs = (folder / name for name in runs)
    assert sampled(ours) == sampled(theirs)
    ours, theirs = (load_file(x / "hf/model.safetensors") for x in (ours, theirs))
    assert all(torch.equal(ours[key], x) for key, x in theirs.items())


LAYOUTS_OF_ACTORS = {  # how two ranks may make the update of one
    "row by row, split by heads": {"ulysses_size": 2},
    "replicas": {"fsdp_size": 1},
    "a copy on each rank": {"strategy": "none"},
    "on the host": {"offload_policy": True},
    "activations on the host": {"activation_offload": True},
    "few gathers": {"keep_gathered": True, "defer_grad_sync": True},
    "padded": {"use_remove_padding": False},
    "prompts for each row": {"share_prompts": False},
    "a measured budget": {"ppo_max_token_len_per_gpu": "auto:0.02"},
}


def update_of_the_actor(folder):
    """Gradients before clipping, norm, metrics and weights of an update equal those of one rank, in
    every layout."""
    cut = {"ppo_max_token_len_per_gpu": 48, "loss_agg_mode": "seq-mean-token-mean"}
    whole = {"entropy_coeff": 0.01, "kl_loss_coef": 0.1}
    cases = [
        ("21 rows", 21, whole, {}),
        ("small micro-batches", 21, cut, {}),
        ("2 rows", 2, {"gradient_checkpointing": True}, {}),  # some of 4 ranks have none
        ("21 rows, adapters", 21, {"lora_rank": 8, "kl_loss_coef": 0.1}, {}),
        ("21 rows, some weights frozen", 21, {"freeze_modules": r"embed_tokens|0\.mlp"}, {}),
    ]
    if common.WORLD_SIZE == 2:
        cases += [("21 rows", 21, whole, layout) for layout in LAYOUTS_OF_ACTORS.values()]
        cases.append(("small micro-batches", 21, cut, {"ulysses_size": 2}))
        cases.append(("21 rows, adapters", 21, cases[3][2], {"ulysses_size": 2}))
    for name, n, fields, layout in cases:
        path = folder / f"update of {name}.pt"
        ours = one_update(path, n, fields | layout)
        norm = math.sqrt(sum(float(x.double().square().sum()) for x in ours["gradients"].values()))
        assert off(norm, ours["metrics"]["actor/grad_norm"]) < 1e-6
        if common.WORLD_SIZE == 1:
            torch.save(ours, path)
            assert norm > 0.11 and len(ours["gradients"]) > 20, name  # the gradient is clipped

        theirs = torch.load(path, weights_only=False)
        for key, x in theirs["metrics"].items():
            assert off(ours["metrics"][key], x) < (1e-6 if "norm" in key else 1e-5), (name, key)
        assert_same_step(ours, theirs, norm, name)


def assert_same_step(ours, theirs, norm, name):
    """Gradients and weights agree to 1e-6 of the largest of their tensor. But AdamW's first step is
    the learning rate times the sign of the gradient, which may be either where it is almost 0, as
    for keys' biases."""
    names = theirs["gradients"].keys()
    assert ours["gradients"].keys() == names == ours["weights"].keys(), name
    largest = max(x.abs().max() for x in theirs["gradients"].values())

    for key, g in theirs["gradients"].items():
        size = g.abs().max()
        if size > 1e-6 * largest:  # else the whole tensor is rounding
            assert (ours["gradients"][key] - g).abs().max() / size < 1e-6, (name, key)

        weight = theirs["weights"][key]
        moved = (ours["weights"][key] - weight).abs()
        assert moved.max() < 2.1e-3, (name, key)

        # a clipped gradient of 1e-6 is 100 times AdamW's eps
        sure = (g.abs() >= 1e-2 * size) & (g.abs() * 0.1 / norm >= 1e-6)
        assert (moved * sure).max() / weight.abs().max() < 1e-6, (name, key)


def one_update(path, n, fields):
    """Results of update_policy on random rows. All ranks load the rows that a run on one rank
    saved, whose log-probs they must reproduce."""
    from helpers import captured_gradients, full_tensor
    from ppo_helpers import batch_to_learn, policy

    fields = {"lr": 1e-3, "grad_clip": 0.1, "ppo_mini_batch_size": n, **fields}
    worker = policy(temperature=0.7, override_config="{}", **fields)
    if common.WORLD_SIZE > 1:
        saved = torch.load(path, weights_only=False)
        batch = saved["batch"]
        before = saved["before"]
    else:
        batch = batch_to_learn(worker, n, seed=4)
        batch.advantages = 5 * batch.advantages + 2.0 * batch.response_mask  # else almost no loss
        before = worker.compute_log_probs(batch)

    mine = list(range(common.RANK, n, common.WORLD_SIZE))
    log_probs = worker.compute_log_probs(batch.select(mine))
    torch.testing.assert_close(log_probs, before[batch.token_index(mine)], rtol=1e-6, atol=1e-6)

    with captured_gradients(worker) as seen:
        metrics = worker.update_policy(batch.select(mine))
    weights = worker.model.named_parameters()
    weights = {name: full_tensor(p.detach()).clone() for name, p in weights if p.requires_grad}

    # the log-probs that an update computes come back to the rows' ranks
    again = dataclasses.replace(batch.select(mine), old_log_probs=None)
    log_probs = worker.compute_log_probs(again)
    worker.update_policy(again)
    torch.testing.assert_close(worker.old_log_probs, log_probs, rtol=1e-6, atol=1e-6)
    found = {"gradients": seen[0], "metrics": metrics, "weights": weights}
    return found | {"batch": batch, "before": before}


FAMILIES = ("qwen3_5", "lfm2", "nemotron_h", "granitemoehybrid", "cohere2", "mistral3", "bloom")
PADDED = {"bloom": ("--actor.no-use-remove-padding", "--critic.no-use-remove-padding")}


def make_families(folder):
    """A folder with a tiny actor of each family and a tokenizer."""
    import models

    for kind in FAMILIES:
        model_config = models.tiny_config(transformers.CONFIG_MAPPING[kind])
        lm = ppo_loop.policy_class(model_config).from_config(model_config, dtype=torch.float32)
        lm.save_pretrained(folder / kind)
        common.char_tokenizer().save_pretrained(folder / kind)


def runs_with_a_family(folder, kind):
    """Three steps with an actor, a reference and a critic of a family with recurrent layers, a
    scale of its logits, a vision tower, or rows that cannot be packed. Rollout and actor agree."""
    out = folder / f"run of {kind}"
    flags = ("--supervised-steps", "0", "--steps", "3", "--kl-coef", "0.01", "--eval-every", "0")
    flags += ("--critic.value-head-init", "normal")  # else no answer is better than expected
    own = ("--actor.model", str(folder / kind), "--out-dir", str(out))
    flags += PADDED.get(kind, ())
    ppo_loop.main(ppo_loop.parse([*own, *flags, "--train-batch-size", "16"]))

    steps = steps_of(out)
    assert len(steps) == 3 and all(row["actor/grad_norm"] > 0 for row in steps)
    assert max(row["rollout/log_prob_diff_max"] for row in steps) < 1e-5


def recurrent_base(folder):
    """A critic whose two ranks share a row reads recurrent layers of the actor as it does alone:
    with adapters on one base, and as a probe."""
    own = ("--actor.model", str(folder / "lfm2"), "--supervised-steps", "0", "--steps", "2")
    own += ("--eval-every", "0", "--train-batch-size", "16", "--share-base")
    own += ("--critic.value-head-init", "normal")
    lora = ("--actor.lora-rank", "4", "--critic.lora-rank", "4")
    for kind, flags in (("adapters", lora), ("probe", ())):
        outs = {ranks: folder / f"recurrent {kind}, {ranks}" for ranks in (1, 2)}
        ranks = common.WORLD_SIZE
        more = ("--critic.ulysses-size", str(ranks), "--out-dir", str(outs[ranks]))
        ppo_loop.main(ppo_loop.parse([*own, *flags, *more]))
        if common.RANK == 0 and ranks == 2:
            assert_close_runs([outs[2]], outs[1])


def episodes(folder, *more):
    """Answers of several rows, as an environment gives new prompts: a step on two ranks is that on
    one to 1e-6, and a run goes on bit for bit. Engine and actor agree on log-probs, so the rows are
    what the engine has read and written."""
    ranks = common.WORLD_SIZE
    own = "--steps 2 --save-every 1 --critic-warmup 0 --max-turns 4 --max-response-length 40"
    own += f" --environment {REWARDS}:compacts --lam 0.9 --gamma 0.98 --privileged-key response"
    flags = [*own.split(), *more]
    for model in ("actor", "critic"):
        flags += [f"--{model}.ppo-epochs", "1", f"--{model}.ppo-mini-batch-size", "256"]
    out = folder / f"episodes on {ranks}"
    toy(folder, out.name, *flags)
    if ranks == 2:
        if common.RANK == 0:
            check_episodes(out)
            alone = folder / "episodes on 1"
            assert sampled(out) == sampled(alone)
            assert_close_runs([out], alone)
            numbers = metrics_of(out)
            expected = {key: x for key, x in metrics_of(alone).items() if key[0] == 1}
            # terms of both signs nearly cancel in these two, so their rounding counts as it is
            for name in ("actor/pg_loss", "actor/ppo_kl"):
                assert abs(numbers[1, name] - expected.pop((1, name))) < 1e-7
            for key, x in expected.items():
                assert "_diff" in key[1] or off(numbers[key], x) < 1e-6, (key, numbers[key], x)
        return

    # it goes on from its first step
    again = folder / "episodes, resumed"
    toy(folder, again.name, *flags, "--resume", str(out / "checkpoints/step_1"))
    numbers = metrics_of(out)
    for key, x in metrics_of(again).items():
        assert key[0] < 2 or numbers[key] == x, key


def check_episodes(out):
    """The dumps of a run: some answers have several rows, whose last one has what a person reads,
    and metrics count answers."""
    for metrics in steps_of(out):
        rows = common.read_lines(out / f"rollouts/step_{metrics['step']}.jsonl")
        lasts = [row for row, after in zip(rows, [*rows[1:], {}]) if after.get("segment", 0) == 0]
        assert len(lasts) == len({row["episode"] for row in rows}) == 64
        several = [row for row in lasts if row["segment"]]
        assert 8 < len(several) and len(rows) > 80, len(rows)
        for name, x in (
            ("reward/mean", sum(row["score"] for row in lasts)),
            ("rollout/segments", len(rows)),
            ("rollout/truncated", sum(row["truncated"] for row in lasts)),
            ("rollout/actions", sum(sum(row["response_mask"]) for row in rows)),
        ):
            assert metrics[name] == pytest.approx(x / 64), name
        earlier = [row for row in rows if row not in lasts]
        assert not any(row["score"] or row["response_text"] or row["truncated"] for row in earlier)
        assert any(sum(row["rewards"]) > 0.01 for row in earlier)  # turns earn where they stand

        # a critic reads the same episodes
        again = common.read_rows(str(out / f"rollouts/step_{metrics['step']}.jsonl"), None)
        read = [[rows[i]["segment"] for i in episode] for episode in again.episodes()]
        assert len(read) == 64 and all(x == [*range(len(x))] for x in read)
        ids = [row["prompt_ids"] + row["response_ids"] for row in rows]
        assert again.input_ids.tolist() == sum(ids, [])


def functions_of_a_file(folder):
    """A reward and an environment that fail on some rows: the run goes on and counts them, the
    turns of all rows, and the parts of the rewards that are there."""
    own = "--steps 3 --train-batch-size 12 --max-response-length 24 --max-turns 3 --eval-every 0"
    own += " --kl-coef 0.01 --target-kl None --actor.lr 1e-3 --reward-timeout 0.3"
    own += f" --reward {REWARDS}:faulty_reward --environment {REWARDS}:faulty_environment"
    toy(folder, "functions", *own.split())
    if common.RANK > 0:
        return

    steps = steps_of(folder / "functions")
    tokenizer, _ = common.load_config(ppo_loop.ActorConfig(model=str(folder / "actor")))
    seen_turns = set()
    failed = set()
    for metrics in steps:
        path = folder / f"functions/rollouts/step_{metrics['step']}.jsonl"
        turns, lengths, failures = check_dumped_rows(path, tokenizer)
        assert metrics["reward/errors"] == len(failures), metrics
        assert metrics["rollout/turns"] == pytest.approx(sum(turns) / len(turns)), metrics
        assert metrics["reward/length"] == pytest.approx(sum(lengths) / len(lengths)), metrics
        seen_turns.update(turns)
        failed.update(failures)
    assert len(steps) == 3 and failed == {*"1234"} and seen_turns == {2, 3}, (failed, seen_turns)


def check_dumped_rows(path, tokenizer):
    """A dump of functions_of_a_file -> (each row's turns, lengths that the reward has told, first
    letters of prompts that failed)."""
    turns = []
    lengths = []
    failures = []
    for row in common.read_lines(path):
        first = tokenizer.decode(row["prompt_ids"])[0]
        mask = row["response_mask"]
        assert bool(row["parts"]) != bool(row["fault"]), row
        if first in "1234":
            failures.append(first)
        if row["fault"]:  # the row teaches nothing
            assert first in "1234" and not any(mask) and not any(row["rewards"]), row
            continue
        turns.append(1 + sum(not a and b for a, b in zip(mask, mask[1:])))
        lengths += row["parts"].values()

        # tokens of the environment stand between those of the policy
        seen = tokenizer.decode([t for t, own in zip(row["response_ids"], mask) if not own])
        assert set(seen) <= set("[]0123456789"), seen
        assert len(mask) <= 24 and mask[0] and mask[-1], mask
    return turns, lengths, failures


SEE = "<|vision_start|><|image_pad|><|vision_end|>"


def images(folder):
    """Three steps on prompts of which some have images, which actor, reference and critic read. Two
    ranks make the metrics and samples of one."""
    common.write_report = lambda *_: None  # matplotlib takes a second
    if common.WORLD_SIZE == 1:
        draw_prompts(folder)
    for every, model in ((3, "tiny-qwen2.5-vl"), (8, "tiny-qwen3-vl")):
        out = folder / f"images of {model} on {common.WORLD_SIZE}"
        flags = "--steps 3 --train-batch-size 8 --rollout-n 2 --max-response-length 10 --seed 3"
        flags += " --kl-coef 0.01 --actor.lr 3e-4 --actor.ppo-mini-batch-size 8 --dump-rollouts"
        flags += " --eval-every 0"
        flags += " --critic.ppo-max-token-len-per-gpu 80 --actor.ppo-max-token-len-per-gpu 80"
        flags += f" --actor.model {model} --reward {REWARDS}:share_of_letters"
        prompts = folder / f"images in one of {every}.jsonl"
        more = ("--prompts", str(prompts), "--eval-prompts", str(prompts), "--out-dir", str(out))
        ppo_loop.main(ppo_loop.parse([*flags.split(), *more]))

        if common.WORLD_SIZE == 2 and common.RANK == 0:
            alone = folder / f"images of {model} on 1"
            assert_close_runs([out], alone)
            assert sampled(out) == sampled(alone)


def draw_prompts(folder):
    """Files of 16 prompts, with images in one of three and in one of eight."""
    from PIL import Image

    g = torch.Generator().manual_seed(0)
    for i, size in enumerate(((60, 90), (112, 56))):
        pixels = torch.randint(0, 256, (*size, 3), generator=g).byte().numpy()
        Image.fromarray(pixels).save(folder / f"{i}.png")
    for every in (3, 8):
        rows = [{"prompt": f"{i} is"} for i in range(16)]
        for i in range(0, 16, every):
            rows[i] = {"prompt": f"{i} {SEE} and {SEE}", "images": ["0.png", "1.png"]}
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"images in one of {every}.jsonl").write_text(lines)


def a_lost_rank_is_reported(folder):
    """Two ranks without a launcher, which would end the other at once: rank 1 is killed in its
    first update, and rank 0 ends by itself with a line that says so. Runs outside the ranks."""
    rank_0, rank_1 = forked.start(2, dies, folder)
    ends = forked.wait([rank_1], 240), forked.wait([rank_0], 15)
    said = pathlib.Path(folder, "last words of 0").read_text()
    assert ends == ("exit status -9", "exit status 1"), (ends, said)
    assert said.splitlines()[-1].startswith("error: another rank died"), said
    assert said.count("error: ") == 1, said
    print("ok a lost rank is reported")


def dies(folder):
    import_scripts()
    os.dup2(os.open(f"{folder}/last words of {common.RANK}", os.O_WRONLY | os.O_CREAT), 2)
    if common.RANK == 1:
        ppo_loop.PolicyWorker.update_policy = lambda *_: os.kill(os.getpid(), 9)

    def main():
        try:
            toy(pathlib.Path(folder), "lost", "--critic.timeout-minutes", "0.2")
        finally:
            ppo_loop.end_workers()  # as the script does

    common.launch(main)


ON_ONE_BASE = {
    "adapters": ("--actor.lora-rank", "8", "--actor.lora-alpha", "32", "--actor.lr", "1e-3",
                 "--critic.lora-rank", "4", "--critic.lora-alpha", "8"),
    "probe": (),
}  # fmt: skip
# name, ranks, function, its arguments, and how the names of those begin that it reads results of
LAUNCHES = [
    ("start", 1, start, ("--supervised-steps", "100"), ()),
    *((f"golden {x}", n, toy, (x, *flags), ("start",)) for x, (n, flags) in GOLDEN.items()),
    ("golden runs agree", 1, golden_runs_agree, (), [f"golden {x}" for x in GOLDEN]),
    ("one step on 1", 1, one_step, (), ("start",)),
    ("one step on 2", 2, one_step, (), ("start", "one step on 1")),
    ("fsdp 2 goes on, offloaded", 2, goes_on, ("fsdp 2", "fsdp 2", "--offload"),
     ("golden fsdp 2",)),
    ("megatron tp 2 goes on", 2, goes_on, ("megatron tp 2",) * 2, ("golden megatron tp 2",)),
    ("fsdp 2 resumed on megatron tp 2", 2, goes_on, ("fsdp 2", "megatron tp 2"),
     ("golden fsdp 2",)),
    ("megatron tp 2 resumed on fsdp 1", 1, goes_on, ("megatron tp 2", "fsdp 1"),
     ("golden megatron tp 2",)),
    ("one row on 1", 1, one_row, ("one row, fsdp 1",), ("start",)),
    ("one row on 2", 2, one_row, ("one row, fsdp 2",), ("start", "one row on 1")),
    *((f"{kind} on 1", 1, on_one_base, (kind, *flags), ("start",))
      for kind, flags in ON_ONE_BASE.items()),
    *((f"{kind} on 2", 2, on_one_base, (kind, *flags), ("start", f"{kind} on 1"))
      for kind, flags in ON_ONE_BASE.items()),
    ("still critics", 1, still_critics, (), ("start",)),
    ("update of the actor on 1", 1, update_of_the_actor, (), ()),
    *((f"update of the actor on {n}", n, update_of_the_actor, (), ("update of the actor on 1",))
      for n in (2, 4)),
    ("families", 1, make_families, (), ()),
    *((f"a run of {kind}", 2, runs_with_a_family, (kind,), ("families",)) for kind in FAMILIES),
    ("recurrent base on 1", 1, recurrent_base, (), ("families",)),
    ("recurrent base on 2", 2, recurrent_base, (), ("families", "recurrent base on 1")),
    ("functions of a file", 2, functions_of_a_file, (), ("start",)),
    ("episodes on 1", 1, episodes, (), ("start",)),
    ("episodes on 2", 2, episodes, (), ("start", "episodes on 1")),
    ("images on 1", 1, images, (), ()),
    ("images on 2", 2, images, (), ("images on 1",)),
    ("a lost rank is reported", 0, a_lost_rank_is_reported, (), ("start",)),
]  # fmt: skip
for name, ranks, function, args, needs in LAUNCHES:
    forked.scenario(ranks, name, args, tuple(needs), fresh=True)(function)


def import_scripts():
    """Each rank imports them itself, because they read RANK on import."""
    global common, ppo_loop
    import helpers  # noqa: F401  # puts them on the path

    import common
    import ppo_loop


if forked.NUMBERS:
    import_scripts()
