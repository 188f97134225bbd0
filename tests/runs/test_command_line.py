"""The critics on the command line: flags, errors, resuming, the same numbers on any number of
ranks."""

import itertools
import json
import math
import re
import sys
import time

import pytest
import torch
import transformers
from helpers import (
    ROOT,
    explained,
    help_of,
    random_batch,
    refused,
    run,
    succeeded,
    torchrun,
    worker,
)
from ppo_scenarios import metrics_of
from torch.distributed.run import get_args_parser

import common
import critic_fsdp
import critic_megatron
import ppo_loop
from common import UserError
from critic_fsdp import Config, Run

SCRIPT = ROOT / "critic_fsdp.py"
ROWS = ROOT / "tests" / "rows.jsonl"
HELD_OUT = ROOT / "tests" / "rows_held_out.jsonl"
GOOD = {"prompt": "1+1=", "response": "2", "reward": 1.0}


def start(out_dir, flags, ranks=1, script=SCRIPT, **paths):
    """Runs a critic's script on this number of ranks. paths: flags whose values may contain
    blanks."""
    paths = {**paths, "out_dir": out_dir}.items()
    named = [(f"--{name.replace('_', '-')}", path) for name, path in paths]
    command = [script, *flags.split(), *itertools.chain(*named)]
    return torchrun(ranks, *command) if ranks > 1 else run(sys.executable, *command)


@pytest.mark.parametrize("script", [critic_fsdp, critic_megatron])
def test_help_explains_every_flag_without_importing_torch(script):
    process = run(sys.executable, "-X", "importtime", script.__file__, "--help", COLUMNS="100")
    imported = set(re.findall(r"\| +(\S+)$", process.stderr, flags=re.M))
    assert process.returncode == 0 and "tyro" in imported
    assert not imported & {"torch", "transformers", "common"}
    assert "toy task, a tiny model, a laptop CPU" in process.stdout

    boxes = help_of(process.stdout)
    assert [*boxes] == ["options", "critic options"]
    explained(boxes, script.Run, script.Config)
    words = "AdamW's decoupled decay, on every weight (default: 0.01) "
    assert boxes["critic options"]["--weight-decay"] == words


MegatronConfig = critic_megatron.Config


@pytest.mark.parametrize("words, kind, fields", [
    ("ppo_mini_batch_size\n  Input should be greater than 0", Config, {"ppo_mini_batch_size": 0}),
    ("lr\n  Input should be a finite number", Config, {"lr": math.inf}),
    ("seed\n  Input should be greater than or equal to 0", Config, {"seed": -1}),
    ("strategy\n  Input should be 'fsdp2', 'fsdp1' or 'none'", Config, {"strategy": "fsdp3"}),
    ("ppo_max_token_len_per_gpu.", Config, {"ppo_max_token_len_per_gpu": "auto:x"}),
    ("steps\n  Input should be greater than 0", Run, {"steps": 0}),
    ("out_dir\n  String should have at least 1 character", Run, {"out_dir": ""}),
    ("lam\n  Input should be less than or equal to 1", Run, {"lam": 1.5}),
    ("profile_step\n  Input should be greater", Run, {"profile_step": 0}),

    ("betas.1\n  Input should be less than 1", Config, {"betas": (0.9, 1.0)}),
    ("--response-length-limit None: belongs to", Config,
     {"loss_agg_mode": "seq-mean-token-sum-norm"}),
    ("--response-length-limit 9: belongs to", Config, {"response_length_limit": 9}),
    ("--value-range 1.0 0.0: LOW must be", Config,
     {"value_head": "bounded", "value_range": (1.0, 0.0)}),
    ("--value-range 1.0 1.0000001: too narrow", Config,
     {"value_head": "bounded", "value_range": (1.0, 1.0000001)}),
    ("--value-range 0.0 1e-40: too narrow", MegatronConfig,
     {"value_head": "bounded", "value_range": (0.0, 1e-40)}),
    ("--ulysses-size 2: needs packed rows", Config,
     {"ulysses_size": 2, "use_remove_padding": False}),
    ("--context-parallel-size 2: needs packed rows", MegatronConfig,
     {"context_parallel_size": 2, "use_remove_padding": False}),
    ("--strategy fsdp1: has no ", Config, {"strategy": "fsdp1", "defer_grad_sync": True}),

    ("--ulysses-size 3: must divide the 4 ranks", Config, {"ulysses_size": 3}),
    ("--fsdp-size 3: must divide the 4 ranks, or be -1", Config, {"fsdp_size": 3}),
    ("--fsdp-size 1: fsdp1 cannot keep whole replicas", Config,
     {"fsdp_size": 1, "strategy": "fsdp1"}),
    ("--*-parallel-size: tensor 3", MegatronConfig, {"tensor_model_parallel_size": 3}),
    ("--expert-*-parallel-size: expert 3", MegatronConfig, {"expert_model_parallel_size": 3}),

    ("--override-config {: ", Config, {"override_config": "{"}),
    ("--override-config: Qwen2Config has no 'hidden_sizes'", Config,
     {"override_config": '{"hidden_sizes": 3}'}),
    ("--model tiny-qwen9: no model there; presets are tiny-qwen2", Config,
     {"model": "tiny-qwen9"}),
    ("--tokenizer nowhere: no tokenizer there", Config, {"tokenizer": "nowhere"}),
])  # fmt: skip
def test_impossible_flags_and_missing_models_are_named(words, kind, fields):
    """As a Config or Run is made, as a worker sees the ranks, or as the model is looked for."""
    with pytest.raises(ValueError) as error:
        config = kind(**fields)
        sys.modules[kind.__module__].check_layout(config, 4)
        common.load_config(config)
    assert words in str(error.value)


def test_a_mistake_is_one_line_and_ends_every_rank(tmp_path):
    """In a row (on two ranks), a budget, a folder; if training diverges."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**GOOD, "reward": math.nan}))
    out = tmp_path / "out"
    row = rf"--rollouts {rows}:1: reward: must be a .*number.*"
    diverged = "the critic's values are not finite: take an earlier checkpoint and a lower --lr"
    budget = r"--ppo-max-token-len-per-gpu 5: row \d+ .* has 10 tokens; give 10"

    for process, said in (
        (start(out, "", 2, rollouts=rows), row),
        (start(out, "--ppo-max-token-len-per-gpu 5", rollouts=ROWS), budget),
        (start("/proc/nowhere", "", rollouts=ROWS), "--out-dir /proc/nowhere.*"),
        # attention scores overflow; at far larger rates values may be finite, depending on the CPU
        (start(out, "--lr 1e15 --grad-clip inf --steps 50", rollouts=ROWS), diverged),
    ):
        assert process.returncode == 2, process.stderr
        assert re.fullmatch(f"error: {said}\n", process.stderr), process.stderr


@pytest.mark.parametrize("script", ["critic_fsdp", "critic_megatron", "ppo_loop"])
@pytest.mark.parametrize("flags, words", [
    ("--lrr 3", "Unrecognized options: --"), ("--steps x", "Error parsing --steps: invalid"),
    ("--steps 0", "Input should be greater"), ("--betas 0 1", "less than 1"),
])  # fmt: skip
def test_one_rank_alone_says_what_is_wrong_with_a_flag(script, flags, words):
    if script == "ppo_loop":
        flags = flags.replace("--betas 0 1", "--target-kl 1")
        words = words.replace("less than 1", "adapts --kl-coef")
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for rank, said in (("0", 1), ("1", 0)):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        process = run(sys.executable, ROOT / f"{script}.py", *flags.split(), **numbers, **place)
        assert process.returncode == 2
        assert (process.stdout + process.stderr).count(words) == said


def test_the_toy_gives_the_same_numbers_on_any_layout(tmp_path):
    """Every metric of every step on 2 and 4 ranks equals one process to a relative 1e-5. Only three
    updates of two steps each, because rounding grows along a run: AdamW divides by numbers that may
    be almost 0."""
    few = "--lr 1e-4 --steps 3 --eval-every 3 --ppo-mini-batch-size 64 --train-batch-size 128"
    found = []
    for ranks, flags in (
        (1, ""),
        (2, "--strategy fsdp1 --no-use-remove-padding --ppo-max-token-len-per-gpu 300"),
        (4, "--ulysses-size 2 --fsdp-size 2"),
    ):
        out = tmp_path / f"on {ranks}"
        files = {"rollouts": ROWS, "eval_rollouts": HELD_OUT}
        succeeded(start(out, f"{few} {flags}", ranks, **files))
        found.append(metrics_of(out))

    # signed statistics of values of about 1 are compared on the scale of 1, the others relatively
    signed = re.compile("mean|min|max|explained|auc").search
    one, *others = found
    for other in others:
        assert other.keys() == one.keys()
        for key, x in one.items():
            least = 1e-5 if signed(key[1]) else 1e-17
            assert x is None or other[key] == pytest.approx(x, rel=1e-5, abs=least), key


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """In the same folder, metrics of later steps are written again, and their checkpoint is set
    aside."""

    def go(out_dir="out", steps=6, **paths):
        flags = f"--steps {steps} --eval-every 2 --save-every 4 --ppo-mini-batch-size 32"
        flags += " --train-batch-size 64 --lr-scheduler-type cosine --lr-warmup-steps 2"
        return start(tmp_path / out_dir, flags, rollouts=ROWS, eval_rollouts=HELD_OUT, **paths)

    succeeded(go())
    whole = metrics_of(tmp_path / "out")
    for name in ("run.json", "tensorboard", "hf/config.json"):
        assert (tmp_path / "out" / name).exists(), name
    folder = tmp_path / "out" / "checkpoints"
    out = succeeded(go(resume=folder / "step_4"))
    assert "step 5/6" in out and "step 4/6" not in out
    assert {p.name for p in folder.iterdir()} == {"step_4", "step_6", "step_6.old1"}
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert metrics_of(tmp_path / "out") == whole and sum("critic/vf_loss" in x for x in lines) == 6
    scored = {"score": HELD_OUT, "model": tmp_path / "out" / "hf", "resume": folder / "step_4"}
    said = succeeded(start(tmp_path / "scored", "", **scored))
    assert f"explained variance {whole[4, 'eval/explained_var']:.3f}" in said  # not that of step 6
    late = go("late", 3, resume=folder / "step_4")
    assert late.returncode == 2 and "has made 4 already" in late.stderr


def test_returns_from_lambda_and_truncation(tmp_path):
    """The script trains on GAE of the rows' rewards and the critic's values, according to its
    flags."""
    batch = random_batch(12, vocab_size=60, idle=False)
    rows = tmp_path / "rows.jsonl"
    ppo_loop.write_jsonl(batch, str(rows))
    flags = "--steps 1 --gamma 0.9 --lam 0.5 --bootstrap-truncated --value-head-init normal"
    out = succeeded(start(tmp_path / "out", flags, rollouts=rows))
    batch.values = worker().compute_values(batch)

    assert "steps      1 updates x 12 rows" in out
    tail = torch.where(batch.truncated, batch.values[common.last_action(batch)], 0.0)
    columns = (batch.token_level_rewards, batch.values, batch.response_mask, batch.cu_seqlens)
    _, returns = common.gae(*columns, 0.9, 0.5, bootstrap_B=tail)
    metrics = metrics_of(tmp_path / "out")

    for name, x_T in (("returns", returns), ("values", batch.values)):
        x_A = x_T[batch.response_mask].double()
        assert metrics[1, f"critic/{name}_mean"] == pytest.approx(float(x_A.mean()), rel=1e-5)
        ends = (metrics[1, f"critic/{name}_min"], metrics[1, f"critic/{name}_max"])
        assert ends == pytest.approx((float(x_A.min()), float(x_A.max())), rel=1e-5)
    assert batch.truncated.any() and not torch.equal(returns, common.gae(*columns, 0.9, 0.5)[1])


@pytest.mark.parametrize(
    "folder, left", [("step_2", [0, 1, 2, 4]), ("step_2/critic", [4]), (None, [4])]
)
def test_a_folder_holds_one_run(folder, left, tmp_path):
    """A run sets aside what it finds in its out_dir and does not continue; it never mixes runs. The
    critic of a PPO run counts as another run."""
    for step in range(1, 5):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        (tmp_path / "rollouts" / f"step_{step}.jsonl").touch()
    rows = [{"step": n, "eval/auc": 0.5} for n in (0, 2, 4)]
    rows += [{"step": n, "critic/lr": 0.1, "perf/time_step": 1.0} for n in (1, 2, 3, 4)]
    common.replace_lines(tmp_path / "metrics.jsonl", sorted(rows, key=lambda row: row["step"]))
    folder = folder and str(tmp_path / "checkpoints" / folder)
    logger = common.Logger(str(tmp_path), {"steps": 7}, 2, folder)
    logger.log(4, {"critic/vf_loss": 0.5, "critic/lr": math.nan})
    log = common.read_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in log] == left
    own = {name: x for name, x in log[-1].items() if not name.startswith("perf/")}
    assert own == {"step": 4, "critic/vf_loss": 0.5, "critic/lr": None}
    kept = {n for n in (1, 2) if n in left}
    for folder, ending in (("checkpoints", ""), ("rollouts", ".jsonl")):
        names = {f"step_{n}{ending}" + ".old1" * (n not in kept) for n in (1, 2, 3, 4)}
        assert {p.name for p in (tmp_path / folder).iterdir()} == names
    settings = json.loads((tmp_path / "run.json").read_text())
    assert settings["steps"] == 7 and settings["run"]["ranks"] == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert board.Tags()["scalars"] == ["critic/vf_loss"]
    assert board.Scalars("critic/vf_loss")[0].value == 0.5


def test_both_critics_score_rows_like_transformers(tmp_path):
    """Text, and token ids of two turns, on one rank and on two. The file has blank lines and extra
    keys."""
    tokenizer = common.char_tokenizer()
    sizes = common.tiny_config("tiny-qwen2", len(tokenizer))
    config = transformers.Qwen2Config(**sizes, num_labels=1)
    judge = transformers.AutoModelForTokenClassification.from_config(config).eval()
    for part in (judge, tokenizer):
        part.save_pretrained(tmp_path / "hf")

    # four answers to one prompt; the first of the others has no action
    rows = [GOOD | {"response": x, "reward": float(x == "2"), "my": [x]} for x in "2345"]
    ids = {"response_ids": [9, 8, 7], "reward": 0}
    rows.append(ids | {"prompt_ids": [3, 5], "response_mask": [0, 0, 0]})
    rows.append(ids | {"prompt_ids": [3, 4], "response_mask": [0, 1, 1]})
    (file := tmp_path / "my rows.jsonl").write_text("\n\n".join(map(json.dumps, rows)))

    near = lambda x: pytest.approx(x, abs=1e-5)
    lasts = []
    for row in rows:
        prompt = row.get("prompt_ids") or tokenizer.encode(row["prompt"])
        response = row.get("response_ids")
        if not response:
            response = [*tokenizer.encode(row["response"]), tokenizer.eos_token_id]
        logits_TN = judge(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        mask = row.get("response_mask", [1, 1])
        values = [v * acts for v, acts in zip(logits_TN[:, 0].tolist(), mask)]
        row |= {"values": near(values), "last_value": near(values[-1]), "rank": 1}
        lasts.append(values[-1])
    for row, last in zip(rows, lasts[:4]):
        row["rank"] += sum(other > last for other in lasts[:4])

    for words in ("fsdp", "fsdp --ulysses-size 2", "megatron --context-parallel-size 2"):
        kind, _, layout = words.partition(" ")
        asked = {"script": ROOT / f"critic_{kind}.py", "score": file}
        ranks = 2 if layout else 1
        said = succeeded(start(tmp_path / words, layout, ranks, model=tmp_path / "hf", **asked))
        assert common.read_lines(tmp_path / words / "scored.jsonl") == rows
        assert "best of n" not in said  # only one prompt has several rows
        refused = start(tmp_path / "none", "", **asked)
        assert refused.returncode == 2
        assert "--model tiny-qwen2: holds no trained value head" in refused.stderr


@pytest.mark.parametrize("kind", [Run, Config, critic_megatron.Config, ppo_loop.Run])
def test_torchrun_takes_no_flag_for_an_abbreviation_of_its_own(kind):
    theirs = get_args_parser()._option_string_actions
    for name in kind.__dataclass_fields__:
        flag = f"--{name.replace('_', '-')}"
        assert not [x for x in theirs if x.startswith(flag)], flag


TELLS = """
from pathlib import Path
from next_to_it import text_of

def log(row):
    with open(Path(__file__).with_name("told"), "a") as file:
        file.write(text_of(row))
"""


@pytest.mark.parametrize("script", ["critic_fsdp", "critic_megatron", "ppo_loop"])
def test_a_users_function_gets_each_line_of_metrics(script, whole_run, tmp_path):
    (tmp_path / "tells.py").write_text(TELLS)
    text_of = "import json\n\ndef text_of(row):\n    return json.dumps(row) + '\\n'"
    (tmp_path / "next_to_it.py").write_text(text_of)
    if script == "ppo_loop":
        whole_run(f"--logger {tmp_path}/tells.py:log")
    else:
        (tmp_path / "rows.jsonl").write_text("\n".join(common.toy_rows(8, 0)))
        files = {name: f"{tmp_path}/rows.jsonl" for name in ("rollouts", "eval_rollouts")}
        files |= {"out_dir": f"{tmp_path}/out", "logger": f"{tmp_path}/tells.py:log"}
        module = sys.modules[script]
        module.main(module.Run(steps=2, eval_every=1, **files))

    told = (tmp_path / "told").read_text()
    assert told == (tmp_path / "out" / "metrics.jsonl").read_text() and len(told.splitlines()) > 2

    # each line tells when it was made
    rows = [json.loads(line) for line in told.splitlines()]
    of_run, unix = zip(*[(row["perf/run_time"], row["perf/unix_time"]) for row in rows])
    assert 0 <= of_run[0] < of_run[-1] < 600 and list(of_run) == sorted(of_run)
    assert 0 <= time.time() - unix[-1] < 600
    assert unix[-1] - unix[0] == pytest.approx(of_run[-1] - of_run[0], abs=0.1)


def test_a_users_function_that_fails_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "sends.py").write_text("def log(row):\n    raise ConnectionError('no network')\n")
    logger = common.Logger(str(tmp_path / "out"), {}, 0, None, f"{tmp_path}/sends.py:log")
    for step in (1, 2):
        logger.log(step, {"critic/vf_loss": 0.5})
    assert [row["step"] for row in common.read_lines(tmp_path / "out/metrics.jsonl")] == [1, 2]
    assert capsys.readouterr().out.count("--logger   failed: ConnectionError('no network')") == 2


def test_a_users_function_that_is_not_there_is_named_by_rank_0(tmp_path, monkeypatch):
    """Before anything that an earlier run has left is touched."""
    (tmp_path / "tells.py").write_text("")
    (tmp_path / "metrics.jsonl").write_text("kept")
    for name, words in (
        ("tells.py", "must be FILE.py:FUNCTION"),
        ("tells:log", "must be FILE.py:FUNCTION"),
        ("tells.py:log", "(KeyError: 'log')"),
        ("no.py:log", "(FileNotFoundError: "),
    ):
        log = f"{tmp_path}/{name}"
        monkeypatch.setattr(common, "RANK", 0)
        with refused(words, begin=f"--logger {log}"):
            common.Logger(str(tmp_path), {}, 0, None, log)
        monkeypatch.setattr(common, "RANK", 1)
        common.Logger(str(tmp_path), {}, 0, None, log)
    assert (tmp_path / "metrics.jsonl").read_text() == "kept"


def test_updates_that_are_skipped_are_counted_and_end_the_run(tmp_path):
    made = {"critic/values_mean": 0.1, "critic/grad_norm": 1.0}
    skipped = made | {"critic/grad_norm": math.nan}
    idle = {"critic/grad_norm": math.nan}  # no row had an action
    logger = common.Logger(str(tmp_path), {}, 0, None)
    counts = []
    for metrics in (skipped, made, idle, *[skipped] * 9):
        logger.check_progress(metrics)
        counts.append(logger.skipped)
    assert counts == [1, 0, 0, *range(1, 10)]
    with pytest.raises(UserError, match="10 updates in a row were skipped"):
        logger.check_progress(skipped)
