"""critic_fsdp.py as its users start it: flags, errors, resume, and the same numbers on any number of ranks."""

import dataclasses
import json
import math
import re
import sys

import pytest
import torch
from helpers import ROOT, random_batch, run, succeeded, torchrun
from test_common import GOOD

import common
import critic_fsdp
import critic_megatron
from common import UserError
from critic_fsdp import Config, Run

SCRIPT = ROOT / "critic_fsdp.py"


def metrics_of(out_dir):
    """(step, name) -> value of a run's metrics.jsonl."""
    rows = [json.loads(line) for line in open(out_dir / "metrics.jsonl")]
    return {(row["step"], key): x for row in rows for key, x in row.items() if key.startswith(("critic/", "eval/"))}


@pytest.mark.parametrize("script", [critic_fsdp, critic_megatron])
def test_help_explains_every_flag(script):
    text = re.sub(r"[│╭╮╰╯─\s]+", " ", succeeded(run(sys.executable, script.__file__, "--help", COLUMNS="200")))
    sections = ("model", "layout", "precision and kernels", "batches", "loss", "optimizer")
    for field in (*dataclasses.fields(script.Config), *dataclasses.fields(script.Run)):
        if field.name == "critic":
            continue
        flag = "--" + field.name.replace("_", "-")
        explained = re.search(rf"{flag}[ ,].*?(?=\(default)", text)
        assert explained, flag
        words = re.sub(r"^(--\S+,? )+(\{.*?\}\S*|[A-Z]+( [A-Z]+)*) ?", "", explained[0]).strip()
        assert len(words) > 7 and words not in sections, f"{flag}: {words!r}"
    assert "toy task, a tiny model, a laptop CPU" in text
    assert (script.KERNELS, script.LOSS_AGG_MODES) == (common.KERNELS, common.LOSS_AGG_MODES)


@pytest.mark.parametrize("script", [critic_fsdp, critic_megatron])
def test_help_waits_for_no_import(script):
    """Three seconds are promised, and torch alone takes them."""
    command = (sys.executable, "-X", "importtime", script.__file__, "--help")
    process = run(*command)
    imported = set(re.findall(r"\| +(\S+)$", process.stderr, flags=re.M))
    assert process.returncode == 0 and "tyro" in imported and not imported & {"torch", "transformers", "common"}


BAD_FLAGS = {
    "--ppo-mini-batch-size 0: must be above 0": Config(ppo_mini_batch_size=0),
    "--lr nan: must be above 0": Config(lr=math.nan),
    "--lr inf: must be finite": Config(lr=math.inf),
    "--seed -1: must be finite and not below 0": Config(seed=-1),
    "--strategy fsdp3: must be one of fsdp2, fsdp1, none": Config(strategy="fsdp3"),
    "--cliprange-value -1": Config(cliprange_value=-1),
    "--weight-decay -0.1: must be finite and not below 0": Config(weight_decay=-0.1),
    "--betas (0.9, 1.0)": Config(betas=(0.9, 1.0)),
    "--ulysses-size 3: must divide the 4 ranks": Config(ulysses_size=3),
    "--ulysses-size 2: needs packed rows; drop --no-use-remove-padding": Config(
        ulysses_size=2, use_remove_padding=False
    ),
    "--fsdp-size 3: must divide the 4 ranks, or be -1": Config(fsdp_size=3),
    "--fsdp-size 2: --strategy none shards nothing": Config(fsdp_size=2, strategy="none"),
    "--fsdp-size 1: fsdp1 cannot keep whole replicas": Config(fsdp_size=1, strategy="fsdp1"),
    "--offload-policy: --strategy fsdp1 has no such thing; use fsdp2": Config(strategy="fsdp1", offload_policy=True),
    "--reduce-dtype: --strategy none has no such thing; use fsdp2 or fsdp1": Config(
        strategy="none", reduce_dtype="bfloat16"
    ),
    "--activation-offload: without --gradient-checkpointing": Config(activation_offload=True),
    "--compile: needs packed rows; drop --no-use-remove-padding": Config(compile=True, use_remove_padding=False),
    "--attn-implementation varlen: is for packed rows": Config(attn_implementation="varlen", use_remove_padding=False),
    "--ppo-max-token-len-per-gpu auto: give --memory-limit-gib": Config(ppo_max_token_len_per_gpu="auto"),
    "--ppo-max-token-len-per-gpu auto: --ppo-micro-batch-size-per-gpu decides alone": Config(
        ppo_max_token_len_per_gpu="auto", memory_limit_gib=1, ppo_micro_batch_size_per_gpu=1
    ),
    "--memory-limit-gib: goes with --ppo-max-token-len-per-gpu auto": Config(memory_limit_gib=1),
    "--loss-agg-mode seq-mean-token-sum-norm: needs --response-length-limit": Config(
        loss_agg_mode="seq-mean-token-sum-norm"
    ),
    "--lr-warmup-steps and --lr-warmup-steps-ratio: give one": Config(lr_warmup_steps=3, lr_warmup_steps_ratio=0.1),
    "--min-lr-ratio 2: must be between 0 and 1": Config(min_lr_ratio=2),
    "--min-lr-ratio 0.1: is where cosine ends; add --lr-scheduler-type cosine": Config(min_lr_ratio=0.1),
    "--response-length-limit 9: is what --loss-agg-mode": Config(response_length_limit=9),
    "--lora-alpha: there are no adapters; add --lora-rank": Config(lora_alpha=2.0),
    "--lora-target-modules: there are no adapters; add --lora-rank": Config(lora_target_modules=("q_proj",)),
    "--override-config {: must be a JSON object": Config(override_config="{"),
    "--steps 0: must be at least 1": Run(steps=0),
    "--lam 1.5: must be between 0 and 1": Run(lam=1.5),
    "--eval-every -1: must not be below 0": Run(eval_every=-1),
    "--eval-rollouts x.jsonl: goes with --rollouts": Run(eval_rollouts="x.jsonl"),
    "--recorded-values: goes with --rollouts": Run(recorded_values=True),
    "--wandb-project p: wandb is not installed": Run(wandb_project="p"),
    "--out-dir /proc/nowhere": Run(out_dir="/proc/nowhere"),
}


@pytest.mark.parametrize("message", BAD_FLAGS)
def test_impossible_flags_are_named_before_anything_starts(message):
    config = BAD_FLAGS[message]
    with pytest.raises(UserError, match=re.escape(message)):
        critic_fsdp.validate(config, world_size=4) if isinstance(config, Config) else common.validate_run(config)


@pytest.mark.parametrize("flag", ["--ppo-max-token-len-per-gpu", "--forward-max-token-len-per-gpu"])
def test_a_budget_below_the_rows_of_the_toy_is_one_line_too(flag):
    fields = {flag.removeprefix("--").replace("-", "_"): 5}
    config = Config(**fields)
    tokenizer = common.load_tokenizer(config)
    with pytest.raises(UserError, match=f"^{flag} 5: toy:[0-9]+ has [0-9]+ tokens; give at least"):
        common.load_rows(
            Run(critic=config), common.load_model_config(config, tokenizer), tokenizer, critic_fsdp.check_budget
        )


def test_a_bad_row_is_one_line_and_a_non_zero_exit(tmp_path):
    """On one process, and under torchrun, whose own report then closes with the line."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**GOOD, "reward": math.nan}))
    line = (
        f"error: --rollouts {rows}:1: reward must be a finite number, not nan (--skip-bad-rows leaves bad rows out)\n"
    )
    alone = run(sys.executable, SCRIPT, "--rollouts", rows, "--out-dir", tmp_path / "out")
    assert alone.returncode == 2 and alone.stderr == line and alone.stdout == ""
    together = torchrun(2, SCRIPT, "--rollouts", rows, "--out-dir", tmp_path / "out", really=True)
    assert together.returncode != 0 and together.stderr.splitlines().count(line.strip()) == 1
    assert f"traceback : {line}" in together.stderr and "Traceback" not in together.stdout


def test_a_wrong_flag_is_explained_by_rank_0_alone():
    for rank, said in (("0", 1), ("1", 0)):
        process = run(sys.executable, SCRIPT, "--lrr", "3", RANK=rank, WORLD_SIZE="2")
        assert process.returncode == 2 and (process.stdout + process.stderr).count("Unrecognized options:") == said


def test_bad_rows_are_left_out_and_counted_where_asked(tmp_path):
    rows = tmp_path / "rows.jsonl"
    good = [json.dumps({**GOOD, "reward": i % 2}) for i in range(4)]
    rows.write_text("\n".join([*good, json.dumps({**GOOD, "reward": math.nan}), "{"]))
    flags = ("--rollouts", rows, "--skip-bad-rows", "--steps", 2, "--report", "none", "--out-dir", tmp_path / "out")
    out = succeeded(run(sys.executable, SCRIPT, *flags))
    assert f"--rollouts {rows}: left out 2 bad rows of 6\n  line 5: reward must be a finite number" in out
    assert "steps      2 updates x 4 rows = 2 passes over the rows" in out


def test_a_run_that_diverges_stops_and_says_so(tmp_path):
    """1e15: attention scores overflow. Far above, the squares of norms do, to values that on some CPUs are finite."""
    flags = ("--rollouts", ROOT / "tests" / "rows.jsonl", "--lr", 1e15, "--grad-clip", "inf", "--steps", 50)
    process = run(sys.executable, SCRIPT, *flags, "--out-dir", tmp_path / "out")
    assert process.returncode == 2 and "values are not finite, the training has diverged; lower --lr" in process.stderr


def test_the_toy_gives_the_same_numbers_on_any_layout(tmp_path):
    """Every metric of every step, one process against 2 and 4 ranks, relative difference below 1e-5 (printed).

    Three updates of two steps each: rounding grows along a trajectory, since AdamW divides by what may be almost zero.
    """
    layouts = {
        "1 rank": (1, ()),
        "2 ranks, fsdp1, padded, small budget": (
            2,
            ("--strategy", "fsdp1", "--no-use-remove-padding", "--ppo-max-token-len-per-gpu", 300),
        ),
        "4 ranks, ulysses 2, 2 replicas": (4, ("--ulysses-size", 2, "--fsdp-size", 2)),
    }
    seen, rows = {}, ROOT / "tests" / "rows.jsonl"
    for name, (ranks, flags) in layouts.items():
        out = tmp_path / name.replace(" ", "_")
        flags = (
            *flags,
            "--lr",
            1e-4,
            "--steps",
            3,
            "--eval-every",
            3,
            "--out-dir",
            out,
            "--ppo-mini-batch-size",
            64,
            "--train-batch-size",
            128,
            "--report",
            "none",
            "--rollouts",
            rows,
            "--eval-rollouts",
            rows,
        )
        if ranks > 1:
            succeeded(torchrun(ranks, SCRIPT, *flags))
        else:
            succeeded(run(sys.executable, SCRIPT, *flags))
        seen[name] = metrics_of(out)
    print("\n  step by step, side by side: " + " | ".join(seen))
    for name in ("critic/vf_loss", "critic/grad_norm", "critic/explained_var", "eval/explained_var"):
        for step in sorted({step for step, key in seen["1 rank"] if key == name}):
            print(f"  {step}  {name:20s}", "  ".join(f"{metrics[step, name]:.9f}" for metrics in seen.values()))
    first = seen.pop("1 rank")
    for name, metrics in seen.items():
        assert metrics.keys() == first.keys()
        # signed statistics of values that are about 1 in size are compared on that scale, losses and norms on their own
        scale = lambda key: max(abs(first[key]), 1.0 if re.search("mean|min|max|explained|auc", key[1]) else 1e-12)
        differences = {k: abs(x - first[k]) / scale(k) for k, x in metrics.items() if first[k] is not None}
        worst = max(differences, key=differences.get)
        print(f"  {name:30s} {len(metrics)} metrics, largest relative difference {differences[worst]:.1e} in {worst}")
        assert differences[worst] < 1e-5, (name, worst)


def test_resume_gives_the_run_that_was_never_interrupted(tmp_path):
    rows = ROOT / "tests" / "rows.jsonl"
    flags = ["--steps", 6, "--eval-every", 2, "--ppo-mini-batch-size", 32, "--train-batch-size", 64, "--report", "none"]
    flags += ["--rollouts", rows, "--eval-rollouts", rows]
    flags += ["--lr-scheduler-type", "cosine", "--lr-warmup-steps-ratio", 0.2]
    succeeded(run(sys.executable, SCRIPT, *flags, "--save-every", 4, "--out-dir", tmp_path / "whole"))
    checkpoint = tmp_path / "whole" / "checkpoints" / "step_4"
    out = succeeded(run(sys.executable, SCRIPT, *flags, "--resume", checkpoint, "--out-dir", tmp_path / "resumed"))
    assert "step 5/6" in out and "step 4/6" not in out
    whole, resumed = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "resumed")
    assert {step for step, _ in resumed} == {4, 5, 6}
    assert {p.name for p in (tmp_path / "whole" / "checkpoints").iterdir()} == {"step_4", "step_6"}
    for name in ("curves.png", "run.json", "tensorboard", "hf/config.json"):
        assert (tmp_path / "whole" / name).exists(), name
    late = run(sys.executable, SCRIPT, "--steps", 3, "--resume", checkpoint, "--out-dir", tmp_path / "late")
    assert late.returncode == 2 and "--steps 3" in late.stderr and "has made 4 already" in late.stderr
    # another end, in the same folder: what stood there of later steps is gone, its checkpoint is put aside
    flags[1] = 5
    succeeded(run(sys.executable, SCRIPT, *flags, "--resume", checkpoint, "--out-dir", tmp_path / "whole"))
    again, lines = metrics_of(tmp_path / "whole"), (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert [
        sorted(p.name for p in (tmp_path / "whole" / name).iterdir()) for name in ("checkpoints", "checkpoints.old")
    ] == [["step_4", "step_5"], ["step_6"]]
    aside = tmp_path / "whole" / "checkpoints.old" / "step_6"
    late = run(sys.executable, SCRIPT, *flags, "--resume", aside, "--out-dir", tmp_path / "whole")
    assert late.returncode == 2 and "has made room for what is in" in late.stderr
    assert max(step for step, _ in again) == 5 and sum('"critic/vf_loss"' in line for line in lines) == 5
    assert all(x == whole[key] for key, x in resumed.items())


def test_returns_from_lambda_truncation_and_recorded_values(tmp_path):
    """What the script trains on is GAE of the rows' own rewards and values, with the flags it was given."""
    batch = random_batch(12, vocab_size=60, idle=False)
    common.write_jsonl(batch, tmp_path / "rows.jsonl")
    flags = ("--rollouts", tmp_path / "rows.jsonl", "--steps", 1, "--gamma", 0.9, "--lam", 0.5)
    flags += ("--recorded-values", "--bootstrap-truncated", "--out-dir", tmp_path / "out")
    succeeded(run(sys.executable, SCRIPT, *flags))
    last = common.last_actions(batch.response_mask, batch.cu_seqlens)
    tail = torch.where(batch.truncated, batch.values[last], 0.0)
    columns = (batch.token_level_rewards, batch.values, batch.response_mask, batch.cu_seqlens)
    _, returns = common.gae(*columns, 0.9, 0.5, bootstrap_B=tail)
    metrics = metrics_of(tmp_path / "out")
    mask = batch.response_mask
    assert metrics[1, "critic/returns_mean"] == pytest.approx(float(returns[mask].double().mean()), rel=1e-6)
    assert metrics[1, "critic/returns_std"] == pytest.approx(float(returns[mask].double().std(correction=0)), rel=1e-6)
    assert metrics[1, "critic/values_mean"] == pytest.approx(float(batch.values[mask].double().mean()), rel=1e-6)
    assert batch.truncated.any() and not torch.equal(returns, common.gae(*columns, 0.9, 0.5)[1])


@pytest.mark.parametrize(
    "n, size, mini, steps, epochs", [(10, 4, 4, 5, 1), (10, 4, 3, 7, 2), (3, 8, 8, 4, 1), (8, 8, 2, 3, 1)]
)
def test_every_pass_takes_every_row_once(n, size, mini, steps, epochs):
    config = Run(critic=Config(ppo_mini_batch_size=mini, ppo_epochs=epochs), train_batch_size=size, steps=steps)
    rows = [common.rows_of_step(step, n, config) for step in range(steps)]
    in_a_pass = math.ceil(n / size)
    for first in range(0, steps - in_a_pass + 1, in_a_pass):
        assert sorted(sum(rows[first : first + in_a_pass], [])) == list(range(n))
    expected = sum(math.ceil(len(r) / mini) * epochs for r in rows)
    assert common.count_work(n, config) == (sum(map(len, rows)), expected)
    assert max(map(len, rows)) <= size and max(map(len, rows)) - min(map(len, rows)) <= 1


@pytest.mark.parametrize(
    "source, eval_every, left",
    [
        ("out/checkpoints/step_2", 2, [0, 1, 2, 4]),  # the evaluation of step 2 is made again
        ("out/checkpoints/step_2", 5, [0, 1, 2, 2, 4]),  # and here it is not
        ("elsewhere/checkpoints/step_2", 2, [4]),
        (None, 2, [4]),
    ],
)
def test_a_folder_holds_one_run(source, eval_every, left, tmp_path):
    """What a run finds in its out_dir that it does not go on from is put aside, and never mixed with its own."""
    out = tmp_path / "out"
    for step in range(1, 5):
        (out / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (out / "rollouts").mkdir(exist_ok=True)
        (out / "rollouts" / f"step_{step}.jsonl").touch()
    rows = [{"step": n, "eval/auc": 0.5} for n in (0, 2, 4)] + [{"step": n, "critic/lr": 0.1} for n in (1, 2, 3, 4)]
    common.replace_lines(out / "metrics.jsonl", sorted(rows, key=lambda row: row["step"]))
    resume = source and str(tmp_path / source)
    logger = common.Logger(Run(out_dir=str(out), resume=resume, eval_every=eval_every, steps=9), 2 if source else 0)
    logger.log(4, {"eval/auc": 0.6})
    logger.close()
    assert [row["step"] for row in common.read_metrics(out / "metrics.jsonl")] == left
    kept = [1, 2] if len(left) > 1 else []
    for name, ending in (("checkpoints", ""), ("rollouts", ".jsonl")):
        there = lambda folder, ending=ending: {p.name for p in folder.iterdir()} if folder.exists() else set()
        assert there(out / name) == {f"step_{n}{ending}" for n in kept}
        assert there(out / f"{name}.old") == {f"step_{n}{ending}" for n in range(1, 5) if n not in kept}


def test_updates_that_are_skipped_are_counted_and_end_the_run(tmp_path):
    run, batch = Run(out_dir=str(tmp_path), max_skipped_updates=3, gamma=0.9), random_batch(4, idle=False)
    made, skipped = ({"critic/values_mean": 0.1, "critic/grad_norm": norm} for norm in (1.0, math.nan))
    idle = {"critic/grad_norm": math.nan}  # no row had an action
    stuck = 0
    for metrics, expected in ((skipped, 1), (made, 0), (idle, 0), (skipped, 1), (idle, 1), (skipped, 2)):
        stuck = common.count_stuck(stuck, metrics, run, batch, 6)
        assert stuck == expected
    (tmp_path / "checkpoints" / "step_5").mkdir(parents=True)
    again = f"--gamma 0.9 --lam 1.0 --max-skipped-updates 1 --steps 6 --resume {tmp_path}/checkpoints/step_5 "
    with pytest.raises(common.UserError, match=f"^step 7: 3 updates in a row were skipped.*{again}"):
        common.count_stuck(stuck, skipped, run, batch, 6)
    back = common.read_jsonl(tmp_path / "skipped_rows.jsonl", with_values=True)
    assert back.values.equal(torch.where(batch.response_mask, batch.values, 0.0))
    with pytest.raises(common.UserError, match="^step 7: values are not finite.* lower --lr$"):
        common.count_stuck(0, {**made, "critic/values_mean": math.nan}, run, batch, 6)


def test_a_run_is_described_where_it_is_kept(tmp_path):
    logger = common.Logger(Run(out_dir=str(tmp_path), steps=7))
    logger.log(3, {"critic/vf_loss": 0.5, "critic/lr": math.nan})
    logger.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "critic/vf_loss": 0.5, "critic/lr": None}
    kept = json.loads((tmp_path / "run.json").read_text())
    assert kept["steps"] == 7 and kept["run"]["torch"] == torch.__version__ and kept["run"]["command"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert board.Tags()["scalars"] == ["critic/vf_loss"] and board.Scalars("critic/vf_loss")[0].value == 0.5
