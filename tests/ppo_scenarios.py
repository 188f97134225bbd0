"""What takes several ranks of ppo_loop.py to try. Each scenario asserts on its own; a line "ok" says it passed.

    python tests/ppo_scenarios.py OUT_FOLDER [NAME...]        by default all

The runs are whole runs of main() from the flags up, in OUT_FOLDER; what compares them comes after them in LAUNCHES.
"""

import json
import math
import os
import pathlib
import time

import torch
import torch.distributed as dist
from compare_runs import off

# Every start is the same actor (learn_to_add makes it), every run draws the same prompts and numbers; 2 epochs of 2
# mini-batches, a KL in the reward whose coefficient adapts within these few rows, and one in the loss.
TOY = (
    "--supervised-steps", "0", "--steps", "4", "--train-batch-size", "32", "--rollout-n", "2", "--eval-every", "2",
    "--save-every", "2", "--critic-warmup", "1",
    "--kl-coef", "0.05", "--target-kl", "0.01", "--kl-horizon", "500", "--actor.kl-loss-coef", "0.01",
    "--lam-policy", "0.95", "--dump-rollouts", "--reward", f"{__file__}:right_digits",
    "--actor.lr", "3e-4", "--actor.ppo-epochs", "2", "--actor.ppo-mini-batch-size", "32",  # 1e-3: chaos by step 4
    "--critic.lr", "1e-3", "--critic.ppo-epochs", "2", "--critic.ppo-mini-batch-size", "32",
)  # fmt: skip
MEGATRON = ("--critic", "megatron")
TP_2 = (*MEGATRON, "--critic.tensor-model-parallel-size", "2")
TP_2_PP_2 = (*TP_2, "--critic.pipeline-model-parallel-size", "2")
GOLDEN = {  # the same run on these ranks with these flags
    "fsdp 1": (1, ()),
    "fsdp 2": (2, ()),
    "megatron tp 2": (2, TP_2),
    "megatron tp 2 pp 2": (4, TP_2_PP_2),
}
ON_TWO = {"fsdp 2": (), "megatron tp 2": TP_2}


def right_digits(prompt, response, answer):
    """The part of the digits that is right: of an actor that has learned next to nothing, most rows earn something."""
    return sum(a == b for a, b in zip(response, answer, strict=False)) / max(len(response), len(answer))


def ppo(out, *flags):
    """A whole run, as from the command line."""
    ppo_loop.main(ppo_loop.parse([*flags, "--out-dir", str(out)]))


def toy(folder, name, *flags):
    """A run of the toy; without its curves, a second of matplotlib."""
    common.plot_curves = common.write_report = lambda *_: None
    ppo(folder / name, "--actor.model", str(folder / "actor"), *TOY, *flags)


# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves
# ---------------------------------------------------------------------------------------------------------------------


def metrics_of(out):
    """(step, name) -> number, of all that does not depend on the machine."""
    own = ("perf/", "time/", "memory/", "sync/peak_memory_gib")
    rows = common.read_metrics(out / "metrics.jsonl")
    numbers = {(row["step"], key): x for row in rows for key, x in row.items() if key != "step"}
    return {key: x for key, x in numbers.items() if not key[1].startswith(own)}


def weights_of(out):
    """name -> tensor of the exports of actor and critic."""
    from safetensors.torch import load_file

    files = [(kind, path) for kind in ("hf", "critic_hf") for path in sorted((out / kind).glob("*.safetensors"))]
    assert {kind for kind, _ in files} == {"hf", "critic_hf"}, files
    return {f"{kind} {name}": x for kind, path in files for name, x in load_file(path).items()}


def assert_same_run(ours, theirs, what, steps=None):
    """Two runs made the same numbers and the same weights, bit for bit."""
    a, b = metrics_of(ours), metrics_of(theirs)
    shared = [key for key in b if steps is None or key[0] in steps]
    assert shared and not (other := [key for key in shared if a[key] != b[key]]), (what, other[:3])
    assert_same(weights_of(ours), weights_of(theirs), what)


def assert_same(a, b, what):
    """Two dicts of tensors are equal, bit for bit."""
    assert a.keys() == b.keys() and not (other := [n for n in a if not torch.equal(a[n], b[n])]), (what, other[:3])


def assert_close_runs(runs, reference, most=1e-4, steps=None):
    """The metrics of all runs agree with those of the reference; prints them side by side."""
    expected = {key: x for key, x in metrics_of(reference).items() if steps is None or key[0] in steps}
    for run in (reference, *runs):  # how far the engine is off the actor is nothing but rounding: it has to be small
        for diff, largest in (("rollout/log_prob_diff", 1e-6), ("rollout/log_prob_diff_max", 5e-5)):
            diffs = [x for (_, name), x in metrics_of(run).items() if name == diff]
            assert diffs and max(diffs) < largest, (run, diff, diffs)
    expected = {key: x for key, x in expected.items() if not key[1].startswith("rollout/log_prob_diff")}
    found = {run: metrics_of(run) for run in runs}
    lines, worst = [], dict.fromkeys(found, (0.0, None))
    for key, x in expected.items():
        errors = {run: off(ours.get(key, math.inf), x) for run, ours in found.items()}
        worst = {run: max(worst[run], (error, key), key=lambda pair: pair[0]) for run, error in errors.items()}
        numbers = "".join(f"{number(ours.get(key)):>14}" for ours in found.values())
        lines.append(f"step {key[0]}  {key[1]:24s}{number(x):>14}{numbers}   {max(errors.values()):.0e}")
    print(f"{'':32s}" + "".join(f"{run.name[-13:]:>14}" for run in (reference, *found)))
    print("\n".join(lines))
    for run, (error, key) in worst.items():
        print(f"{run.name:24s} off by at most {error:.1e}, at {key}")
    assert all(error < most for error, _ in worst.values()), worst


def number(x):
    return "--" if x is None else f"{x:.7g}"


def sampled(out):
    """Tokens of every step's rows."""
    return {
        (path.name, i): json.loads(line)["response_ids"]
        for path in sorted((out / "rollouts").iterdir())
        for i, line in enumerate(open(path))
    }


# ---------------------------------------------------------------------------------------------------------------------
# The same run on every layout
# ---------------------------------------------------------------------------------------------------------------------


def start(folder, *flags):
    """The actor all runs start from."""
    device = common.setup_distributed()
    flags = ["--out-dir", str(folder / "start"), *flags]
    run, tokenizer, model_config = ppo_loop.settle(ppo_loop.parse(flags))
    made = ppo_loop.learn_to_add(run, model_config, tokenizer, device)
    os.rename(made, folder / "actor")


def golden(folder, name):
    """One of the runs; notes what each rank had as rows, beside what --dump-rollouts writes."""
    dump = ppo_loop.dump

    def note(batch, step, out_dir):
        torch.save(vars(batch), folder / f"{name}.rows of {common.RANK} of step {step + 1}.pt")
        dump(batch, step, out_dir)

    ppo_loop.dump = note
    toy(folder, name, *GOLDEN[name][1])


def golden_runs_agree(folder):
    """Sampled tokens are the same, and metrics to 1e-4; so are the values of the first step, which both critics
    compute from the same folder and the same new value head, to 1e-5."""
    first, *others = (folder / name for name in GOLDEN)
    assert all(sampled(run) == sampled(first) for run in others)
    assert len({tuple(ids) for ids in sampled(first).values()}) > 100  # they do differ from one another
    assert_close_runs(others, first)
    values = [common.read_jsonl(run / "rollouts" / "step_1.jsonl", with_values=True).values for run in (first, *others)]
    for ours in values[1:]:
        torch.testing.assert_close(ours, values[0], rtol=1e-5, atol=1e-5)
    coefs = [x for (_, key), x in metrics_of(first).items() if key == "kl/coef"]
    assert coefs[:2] == [0.05] * 2 and len(set(coefs)) == 3, coefs  # it adapts, as soon as the actor learns
    rewards = [x for (_, key), x in metrics_of(first).items() if key == "reward/mean"]
    assert all(0.05 < x < 0.95 for x in rewards), rewards  # something is earned, and something is not


def one_row(folder, name, *flags):
    """1 row a step: the second rank has none, neither prompts nor rows nor micro-batches.

    The seed is one of those in which nothing is logged that is close to 0 by chance: with seed 0 the KL of the second
    row, a mean of three numbers of either sign, is -0.0015 and its rounding 2.6e-4 of that.
    """
    toy(folder, name, "--train-batch-size", "1", "--rollout-n", "1", "--steps", "2", "--seed", "1", *flags)


def one_row_agrees(folder):
    assert_close_runs([folder / "one row, fsdp 2"], folder / "one row, fsdp 1")


def dumps_are_the_batches(folder):
    """--dump-rollouts writes the rows of all ranks in the order of the batch, with the columns a critic learns from."""
    for name in ON_TWO:
        for step in (1, 4):
            files = [folder / f"{name}.rows of {rank} of step {step}.pt" for rank in (0, 1)]
            parts = [common.Batch(**torch.load(file, weights_only=True)) for file in files]
            read = common.read_jsonl(folder / name / "rollouts" / f"step_{step}.jsonl", with_values=True)
            assert len(read) == 64
            for i in range(64):  # row i is the i // 2-th of rank i % 2
                ours, theirs = parts[i % 2].select([i // 2]), read.select([i])
                assert int(ours.row_id) == i
                for column in ("input_ids", "response_mask", "truncated", "token_level_rewards", "values"):
                    assert torch.equal(getattr(ours, column), getattr(theirs, column)), (name, step, i, column)


def a_critic_trains_from_a_dump(folder):
    import critic_fsdp

    config = critic_fsdp.Config(model=str(folder / "actor"))
    rollouts = str(folder / "fsdp 2" / "rollouts" / "step_4.jsonl")
    critic_fsdp.main(
        critic_fsdp.Run(critic=config, rollouts=rollouts, steps=1, eval_every=0, out_dir=str(folder / "from a dump"))
    )
    (metrics,) = [row for row in common.read_metrics(folder / "from a dump" / "metrics.jsonl") if row["step"] == 1]
    assert math.isfinite(metrics["critic/vf_loss"]) and metrics["critic/grad_norm"] > 0


# ---------------------------------------------------------------------------------------------------------------------
# Resume, offload
# ---------------------------------------------------------------------------------------------------------------------


def goes_on(folder, name):
    """Steps 3 and 4 from the checkpoint that a golden run has left after its second are the golden run's own."""
    out, whole = folder / f"{name}, gone on", folder / name
    toy(folder, out.name, *ON_TWO[name], "--resume", str(whole / "checkpoints" / "step_2"))
    if common.RANK == 0:
        assert_same_run(whole, out, f"{name}, resumed")  # all that the second has
        assert_same(last_checkpoint(out), last_checkpoint(whole), name)
        steps = [row["step"] for row in common.read_metrics(out / "metrics.jsonl") if "reward/mean" in row]
        assert steps == [3, 4], steps


def last_checkpoint(out):
    """What both workers and the loop saved after step 4, optimizers included: name -> tensor."""
    from safetensors.torch import load_file

    last = out / "checkpoints" / "step_4"
    state = json.loads((last / "loop.json").read_text())
    tensors = {key: torch.tensor(state[key], dtype=torch.float64) for key in ("step", "kl_coef")}
    for path in last.rglob("*.safetensors"):  # not by their bytes: the order of tensors in a file is not determined
        tensors |= {f"{path.parent.name} {path.name} {name}": x for name, x in load_file(path).items()}
    assert {"actor", "critic"} <= {path.parent.name for path in last.rglob("manifest.json")}
    return tensors


def on_other_ranks(folder, name, flags):
    """Steps 3 and 4 from the checkpoint of two ranks, with the other critic, on its ranks: the same to 1e-4."""
    out = folder / f"{name}, on {common.WORLD_SIZE}"
    toy(folder, out.name, *flags, "--resume", str(folder / name / "checkpoints" / "step_2"))
    if common.RANK == 0:
        assert_close_runs([out], folder / name, steps=(3, 4))


def offloaded(folder, name):
    """Everything out of the way in the phases of others changes no bit."""
    out = folder / f"{name}, offloaded"
    toy(folder, out.name, *ON_TWO[name], "--offload")
    if common.RANK == 0:
        assert_same_run(out, folder / name, f"{name}, offloaded")
        (row,) = [row for row in common.read_metrics(out / "metrics.jsonl") if row["step"] == 3]
        assert {f"time/{phase}_{way}" for phase in ("rollout", "log_probs", "reference", "critic", "actor", "sync")
                for way in ("onload", "offload")} <= row.keys()  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The actor's update
# ---------------------------------------------------------------------------------------------------------------------

LR = 1e-3
UPDATES = {  # rows -> what is made of them; 2 rows leave ranks of 4 without any
    "21 rows": (21, {"entropy_coeff": 0.01, "kl_loss_coef": 0.1}),
    "21 rows, small micro-batches": (21, {"ppo_max_token_len_per_gpu": 30, "loss_agg_mode": "seq-mean-token-mean"}),
    "2 rows": (2, {"gradient_checkpointing": True}),
}


def update_of_the_actor(folder):
    """Gradients before clipping, their norm, metrics, and weights after one update, against those of one rank.

    Gradients to 1e-6 of the largest of their tensor. The first step of AdamW is the learning rate times the sign of a
    gradient: where that is more than 1e-2 of the largest, and far above AdamW's eps, weights too are the same to 1e-6
    of the largest; where it is next to nothing (keys' biases have none but rounding) the sign may be either.
    """
    layouts = {1: [-1], 2: [-1, 1], 4: [-1, 2, 1]}[common.WORLD_SIZE]
    worst = {"gradient": 0.0, "norm": 0.0, "weight": 0.0}
    common.setup_distributed()
    for name, (n, fields) in UPDATES.items():
        path = folder / f"update of {name}.pt"
        for fsdp_size in layouts:
            what = (name, fsdp_size)
            ours = one_update(path, n, {"fsdp_size": fsdp_size, **fields})
            if common.WORLD_SIZE == 1:
                torch.save(ours, path)
                assert ours["norm"] > 0.11 and len(ours["gradients"]) > 20, what  # clipping bites
            theirs = torch.load(path)
            for key, x in theirs["metrics"].items():
                assert off(ours["metrics"][key], x) < 1e-5, (what, key, ours["metrics"][key], x)
            worst["norm"] = max(worst["norm"], off(ours["norm"], theirs["norm"]))
            assert ours["gradients"].keys() == theirs["gradients"].keys() == ours["weights"].keys(), what
            largest = max(x.abs().max() for x in theirs["gradients"].values())
            for key, g in theirs["gradients"].items():
                size = g.abs().max()
                if size > 1e-6 * largest:  # else the whole tensor is rounding
                    worst["gradient"] = max(worst["gradient"], float((ours["gradients"][key] - g).abs().max() / size))
                moved = (ours["weights"][key] - theirs["weights"][key]).abs()
                assert moved.max() < 2.1 * LR, (what, key)
                clipped = g.abs() * 0.1 / theirs["norm"]  # 1e-6 of it is 100 times what AdamW adds to a denominator
                sizeable = (g.abs() > 1e-2 * size) & (clipped > 1e-6)
                if sizeable.any():
                    part = float(moved[sizeable].max() / theirs["weights"][key].abs().max())
                    worst["weight"] = max(worst["weight"], part)
    common.print0(f"update on {common.WORLD_SIZE} ranks: off by at most {worst}")
    assert all(x < 1e-6 for x in worst.values()), worst


def one_update(path, n, fields):
    """What update_policy makes of random rows, with random advantages and old log-probs near its own.

    The weights are random: no token is so unlikely that rounding of its log-prob, 1e-6 at -20, becomes that of a ratio.
    What one rank has as old log-probs, and saved, all others take: it is part of the batch.
    """
    config = ppo_loop.ActorConfig(model="tiny-qwen2", lr=LR, grad_clip=0.1, ppo_mini_batch_size=n, **fields)
    tokenizer = common.load_tokenizer(config)
    worker = ppo_loop.PolicyWorker(
        config, common.load_model_config(config, tokenizer), torch.device("cpu"), temperature=0.7
    )
    batch, g = random_batch(n, seed=1, longest=25), torch.Generator().manual_seed(0)
    noise = lambda size: torch.randn(len(batch.input_ids), generator=g) * size * batch.response_mask
    batch.old_log_probs = torch.zeros(len(batch.input_ids))
    mine = list(range(common.RANK, n, common.WORLD_SIZE))
    part = worker.compute_log_probs(batch.select(mine))
    batch.old_log_probs[batch.token_index(mine)] = part
    dist.all_reduce(batch.old_log_probs)
    if common.WORLD_SIZE > 1:
        expected = torch.load(path)["old_log_probs"]
        torch.testing.assert_close(batch.old_log_probs, expected, rtol=1e-6, atol=1e-6)
        batch.old_log_probs = expected.clone()
    before = batch.old_log_probs.clone()
    batch.old_log_probs += noise(0.1)  # ratios lie on both sides of the clip range
    batch.ref_log_probs, batch.advantages = batch.old_log_probs + noise(0.1), 5 * noise(1.0)
    batch.rollout_log_probs = batch.old_log_probs
    batch.advantages += 2.0 * batch.response_mask  # else the loss is next to nothing, and so are its first digits
    gradients, clip = {}, torch.nn.utils.clip_grad_norm_

    def note(parameters, most):
        named = worker.model.named_parameters()
        gradients.update({n: ppo_loop.critic_fsdp.full_tensor(p.grad).clone() for n, p in named})
        return clip(parameters, most)

    torch.nn.utils.clip_grad_norm_ = note
    try:
        metrics = worker.update_policy(batch.select(mine))
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in gradients.values()))
    assert off(norm, metrics["actor/grad_norm"]) < 1e-6
    weights = {f"lm.{name}": x.clone() for name, x in worker.weights()}
    return {
        "gradients": gradients,
        "norm": metrics["actor/grad_norm"],
        "metrics": metrics,
        "weights": weights,
        "old_log_probs": before,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Data of others: GSM8K, functions from files
# ---------------------------------------------------------------------------------------------------------------------

SMALL = (
    "--supervised-steps", "0", "--steps", "3", "--train-batch-size", "8", "--rollout-n", "2",
    "--max-response-length", "16",
    "--max-prompt-length", "200", "--actor.lr", "1e-3", "--critic.lr", "1e-3", "--kl-coef", "0.01",
)  # fmt: skip

FUNCTIONS = """
def reward(prompt, response, answer):
    # raises on some rows, gives nonsense on others, takes for ever on one kind: none of it may end the run
    if prompt.startswith("1"):
        raise KeyError(prompt)
    if prompt.startswith("2"):
        return "much"
    if prompt.startswith("3"):
        while True:
            pass
    return float(len(response)) / 16

def environment(prompt, response, answer):
    # the policy's turn ended: it is told its length and goes on, until it has had enough
    if prompt.startswith("4"):
        raise ValueError("no turn for this one")
    return f"[{len(response)}]" if response.count("[") < 2 - prompt.startswith("5") else None
"""


def gsm8k(folder):
    """Three steps on the real questions with a model of random weights."""
    from helpers import SHARED

    if not SHARED.is_dir():
        common.print0(f"skipped: needs the development data in {SHARED}")
        return
    data, out, some = SHARED / "data", folder / "gsm8k", folder / "gsm8k.jsonl"
    common.setup_distributed()
    if common.RANK == 0:  # to turn all 7,473 into tokens takes longer than the rest
        some.write_text("".join(open(data / "gsm8k" / "train.jsonl").readlines()[:500]))
    dist.barrier()
    ppo(
        out, *SMALL, "--prompts", str(some), "--prompt-key", "question", "--reward", "gsm8k",
        "--actor.tokenizer", str(data / "tokenizer"), *TP_2,
    )  # fmt: skip
    if common.RANK == 0:
        rows = common.read_metrics(out / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2, 3]
        # rewards are all 0 here, and the variance of the returns is only that of the KL, 0 in the first step
        null = {key for row in rows for key, x in row.items() if x is None} - {"perf/mfu", "critic/explained_var"}
        assert not null, null
        for row in rows:
            assert row["reward/errors"] == row["reward/timeouts"] == 0 and row["rollout/tokens"] > 16 * 20
            assert row["rollout/log_prob_diff"] < 1e-5 and row["actor/entropy"] > 1 and row["actor/grad_norm"] > 0
        assert {path.name for path in out.iterdir()} >= {"hf", "critic_hf", "checkpoints", "curves.png"}


def functions_of_a_file(folder):
    """A reward and an environment that fail on some rows: the run goes on, and counts them."""
    out, file = folder / "functions", folder / "functions.py"
    if common.RANK == 0:
        file.write_text(FUNCTIONS)
    common.setup_distributed()
    dist.barrier()
    actor = str(folder / "actor")
    ppo(
        out, *SMALL, "--actor.model", actor, "--reward", f"{file}:reward", "--environment", f"{file}:environment",
        "--reward-timeout", "0.05", "--max-turns", "3", "--max-response-length", "24", "--dump-rollouts",
        "--eval-every", "0", "--train-batch-size", "12",
    )  # fmt: skip
    if common.RANK > 0:
        return
    turns, expected, tokenizer = [], {}, common.load_tokenizer(ppo_loop.ActorConfig(model=actor))
    for step in (1, 2, 3):
        expected[step] = [0, 0]
        for line in open(out / "rollouts" / f"step_{step}.jsonl"):
            row = json.loads(line)
            first, mask = tokenizer.decode(row["prompt_ids"])[0], row["response_mask"]
            expected[step][0] += first in "12" or (first == "4" and not row["truncated"])
            expected[step][1] += first == "3"
            turns.append(1 + sum(not a and b for a, b in zip(mask, mask[1:], strict=False)))
            seen = tokenizer.decode([t for t, own in zip(row["response_ids"], mask, strict=True) if not own])
            assert all(c in "[]0123456789" for c in seen), seen
            assert len(mask) <= 24 and mask[0] and mask[-1], mask
            if first in "123":
                assert row["rewards"][-1] <= 0.01 * 20, row  # 0 for the row, but for the KL that actions pay
        (metrics,) = [
            row for row in common.read_metrics(out / "metrics.jsonl") if row["step"] == step and "reward/mean" in row
        ]
        assert [metrics["reward/errors"], metrics["reward/timeouts"]] == expected[step], (step, expected)
    assert set(turns) == {1, 2, 3}, set(turns)
    assert sum(x for x, _ in expected.values()) and sum(x for _, x in expected.values()), expected


# ---------------------------------------------------------------------------------------------------------------------
# A lost rank
# ---------------------------------------------------------------------------------------------------------------------


def a_lost_rank_is_reported(folder):
    """Two ranks without a launcher, which would end the other at once: rank 1 is killed in its second update, and
    rank 0 ends by itself, well within --timeout-minutes, with a line that says what happened. Runs in no rank."""
    import forked

    began = time.monotonic()
    pids = forked.start(2, dies, folder)
    statuses, deadline = {}, time.monotonic() + 240
    while len(statuses) < 2 and time.monotonic() < deadline:
        for pid in set(pids) - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.05)
    for pid in set(pids) - statuses.keys():
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert len(statuses) == 2, f"rank {pids.index(next(iter(set(pids) - statuses.keys())))} goes on for ever"
    (code, ended), (killed, lost) = (statuses[pid] for pid in pids)
    said = (pathlib.Path(folder) / "last words of 0").read_text()
    assert killed == -9 and code == 1, (killed, code, said)
    assert said.splitlines()[-1].startswith("error: another rank has died, or hung until the time-out"), said
    assert said.count("error: ") == 1 and ended - lost < 15, (ended - lost, said)
    print(f"ok a lost rank is reported: {time.monotonic() - began:.1f} s, {ended - lost:.1f} s after it was lost")


def dies(folder):
    global common, ppo_loop
    import helpers  # noqa: F401  # which lets them be found

    import common
    import ppo_loop

    folder = pathlib.Path(folder)
    os.dup2(os.open(folder / f"last words of {common.RANK}", os.O_WRONLY | os.O_CREAT), 2)
    update = ppo_loop.PolicyWorker.update_policy

    def dying(self, batch):
        if common.RANK == 1 and self.updates == 1:
            os.kill(os.getpid(), 9)
        return update(self, batch)

    ppo_loop.PolicyWorker.update_policy = dying
    common.run(lambda: toy(folder, "lost", "--critic.timeout-minutes", "0.2"))


LAUNCHES = [  # name -> ranks, function, its arguments; in this order: some read what others before them leave
    ("start", 1, start, ()),
    *((f"golden {name}", ranks, golden, (name,)) for name, (ranks, _) in GOLDEN.items()),
    ("golden runs agree", 1, golden_runs_agree, ()),
    ("dumps are the batches", 1, dumps_are_the_batches, ()),
    ("a critic trains from a dump", 1, a_critic_trains_from_a_dump, ()),
    *((f"{name} goes on", 2, goes_on, (name,)) for name in ON_TWO),
    ("fsdp 2 resumed on megatron tp 2", 2, on_other_ranks, ("fsdp 2", TP_2)),
    ("megatron tp 2 resumed on fsdp 1", 1, on_other_ranks, ("megatron tp 2", ())),
    ("offloaded, fsdp 2", 2, offloaded, ("fsdp 2",)),
    ("one row on 1", 1, one_row, ("one row, fsdp 1",)),
    ("one row on 2", 2, one_row, ("one row, fsdp 2",)),
    ("one row agrees", 1, one_row_agrees, ()),
    *((f"update of the actor on {ranks}", ranks, update_of_the_actor, ()) for ranks in (1, 2, 4)),
    ("gsm8k, megatron", 2, gsm8k, ()),  # with the critic of critic_fsdp.py it is a command of the README
    ("functions of a file", 2, functions_of_a_file, ()),
    ("a lost rank is reported", 0, a_lost_rank_is_reported, ()),
]
NAMES = [name for name, *_ in LAUNCHES]


def launch(name, function, folder, args):
    """On every rank: one scenario."""
    global common, ppo_loop, random_batch
    from helpers import random_batch  # these read RANK when imported

    import common
    import ppo_loop

    began = time.perf_counter()
    function(pathlib.Path(folder), *args)
    if dist.is_initialized():
        dist.barrier()
    common.print0(f"ok {name}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    import forked

    forked.scenarios(LAUNCHES, launch)
