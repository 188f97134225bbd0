"""ppo_loop.py on one process: whole runs, resumed runs, and how a signal interrupts each phase."""

import functools
import json
import os
import re
import shutil
import signal
import time
import types

import pytest
import torch
from helpers import worker
from ppo_helpers import SHARP, TOKENIZER, a_run, a_task, ids_of, policy, same, text_of_reply
from ppo_scenarios import metrics_of
from safetensors.torch import load_file

import common
import critic_fsdp
import ppo_loop
from common import UserError
from ppo_loop import ActorConfig


def test_a_resumed_run_continues_where_it_stopped(tmp_path):
    """With its step, its adapted KL coefficient and its supervised actor. In another --out-dir this
    actor is copied, so that --resume auto can continue the new run, too."""
    theirs, ours = (str(tmp_path / name) for name in ("theirs", "ours"))
    policy().export_hf(f"{theirs}/supervised", TOKENIZER)
    with common.published(f"{theirs}/checkpoints/step_2") as tmp:
        common.write_json(f"{tmp}/loop.json", {"step": 2, "kl_coef": 0.02})

    def go_on(critic="tiny-qwen2", of=theirs, out_dir=theirs, **fields):
        fields = {"kl_coef": 0.01, "critic": critic_fsdp.Config(model=critic), **fields}
        run = a_run(out_dir=out_dir, **fields)
        checkpoints = types.SimpleNamespace(folder=f"{of}/checkpoints/step_2")
        task = a_task(tokenizer=TOKENIZER, model_config=common.load_config(ActorConfig())[1])
        run, step, kl_coef = ppo_loop.start_from(run, task, checkpoints)
        return run.actor.model, run.critic.model, step, kl_coef

    start = f"{theirs}/supervised"
    assert go_on(target_kl=0.1) == (start, start, 2, 0.02)
    assert go_on("tiny-llama") == (start, "tiny-llama", 2, 0.01)
    # it had no supervised actor
    assert go_on(actor=ActorConfig(model=ours)) == (ours, "tiny-qwen2", 2, 0.01)
    with pytest.raises(UserError, match="^--steps 1: .*step_2"):
        go_on(steps=1)

    assert go_on(out_dir=ours)[0] == f"{ours}/supervised"
    copied, original = (load_file(f"{x}/supervised/model.safetensors") for x in (ours, theirs))
    assert same(copied, original)
    shutil.copytree(f"{theirs}/checkpoints", f"{ours}/checkpoints")  # what the new run saved
    shutil.rmtree(theirs)
    assert go_on(of=ours, out_dir=ours)[0] == f"{ours}/supervised"
    common.verify(f"{ours}/supervised")
    open(f"{ours}/supervised/config.json", "w").close()
    with pytest.raises(UserError, match="damaged, config.json"):
        go_on(of=ours, out_dir=ours)
    shutil.rmtree(f"{ours}/supervised")
    made = go_on(of=ours, out_dir=ours, supervised_steps=1)
    assert made == (f"{ours}/supervised", f"{ours}/supervised", 2, 0.01)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_critic_alone_reads_the_hint(backend, whole_run, tmp_path):
    """Its values and its update are those for rows that begin with the hint, at any temperature;
    the actor's rows lack it."""
    flags = "--steps 1 --gamma 0.9 --lam 0.8 --rollout-n 2 --privileged-key response"
    flags += " --critic.value-head-init normal"
    whole_run(f"{flags} --temperature 0.6 --top-p 0.8 --critic {backend}")
    lines = []

    for row in common.read_lines(tmp_path / "out/rollouts/step_1.jsonl"):
        prompt = TOKENIZER.decode(row["prompt_ids"])  # this is what the actor has read
        hint = f"For the critic only: {sum(map(int, prompt[:-1].split('+')))}\n"
        lines.append(json.dumps(row | {"prompt_ids": ids_of(hint + prompt)}))

    batch = common.read_rows(lines, None)
    fields = {"override_config": SHARP, "lr": 1e-3, "ppo_mini_batch_size": 8}
    critic = worker(script=ppo_loop.critic_module(backend), **fields)
    torch.testing.assert_close(critic.compute_values(batch), batch.values, rtol=0, atol=1e-6)
    common.add_returns(batch, 0.9, 0.8)
    critic.update_critic(batch)
    critic.export_hf(tmp_path / "expected")
    files = (next((tmp_path / x).glob("*.safetensors")) for x in ("out/critic_hf", "expected"))
    torch.testing.assert_close(*map(load_file, files), rtol=0, atol=1e-5)


def test_a_row_of_a_run_ends_with_its_first_text_to_stop_at(whole_run, tmp_path):
    whole_run("--steps 1 --stop x b c 1 2 3 # --train-batch-size 40")
    rows = common.read_lines(tmp_path / "out/rollouts/step_1.jsonl")
    found = [row for row in rows if re.search("[xbc123#]", row["response_text"])]
    assert 5 < len(found) < 40
    for row in found:
        said = row["response_text"]
        assert re.fullmatch("[^xbc123#]*[xbc123#]", said) and not row["truncated"], row
        assert TOKENIZER.decode(row["response_ids"]) == said  # without an end of sequence


@pytest.mark.parametrize("flags, steps", [
    ("", 3), ("--actor.kl-loss-coef 0.2", 3), ("--critic-warmup 1", 2),
    ("--actor.ppo-epochs 2", 0), ("--actor.ppo-mini-batch-size 4", 0),
    ("--old-log-probs engine --kl-coef 0.1 --critic.value-head-init normal", 3),
])  # fmt: skip
def test_one_step_saves_a_forward_pass(flags, steps, whole_run, monkeypatch, tmp_path):
    """The actor's step computes the old log-probs, or the engine has, with the same numbers up to
    rounding."""
    runs = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(ppo_loop, "add_log_probs", all_log_probs)
        whole_run(f"--steps 3 {flags}")
        runs.append(common.read_lines(tmp_path / "out/metrics.jsonl"))

    saved = 0
    passing = ("time/", "perf/", "rollout/log_prob_diff")
    for ours, theirs in zip(*runs, strict=True):
        for name in theirs.keys() | ours.keys():
            if not name.startswith(passing):
                near = pytest.approx(theirs[name] or 0.0, rel=1e-4, abs=1e-5)
                assert (ours[name] or 0.0) == near, name
        if "reward/mean" in ours:
            off = ours["rollout/log_prob_diff"]
            assert off is None if "engine" in flags else 0 < off < 1e-5
            assert "time/log_probs" in theirs
            saved += "time/log_probs" not in ours
    assert saved == steps


def all_log_probs(loop, step, batch):
    """Instead of add_log_probs: always by forward passes of their own."""
    with loop.phases("log_probs"):
        batch.old_log_probs = loop.actor.compute_log_probs(batch)
    batch.ref_log_probs = batch.old_log_probs
    if loop.reference:
        batch.ref_log_probs = loop.reference.compute_log_probs(batch)


def test_equal_prompts_get_different_tokens_in_each_step(whole_run, tmp_path, monkeypatch):
    """With one prompt and an actor that does not learn yet, only the random numbers differ."""
    one = '{"prompt": "1+1=", "response": "2"}'
    monkeypatch.setattr(ppo_loop, "addition_rows", lambda *args, **more: [one])
    whole_run("--rollout-n 6 --critic-warmup 2")
    rows = [common.read_lines(tmp_path / f"out/rollouts/step_{step}.jsonl") for step in (1, 2)]
    first, second = ([row["response_ids"] for row in step] for step in rows)
    assert all(a != b for a, b in zip(first, second)) and len({*map(tuple, first + second)}) == 12


def test_a_step_tells_of_rows_from_which_little_can_be_learned(whole_run, tmp_path, capsys):
    """What failed, the least and the greatest reward, and what was cut off, as in dumped rows."""
    (tmp_path / "unsure.py").write_text(
        "def f(prompt, response, answer):\n"
        "    return 1 / (int(prompt[0]) // 3)\n"  # fails for 1 and 2
    )
    whole_run(
        f"--reward {tmp_path}/unsure.py:f --reward-timeout 0 --steps 14 --train-batch-size 3"
        " --max-response-length 2 --stop a b c d e f 1 2 3"
    )
    steps = common.read_lines(tmp_path / "out/metrics.jsonl")[1:15]  # the first is an evaluation
    said = capsys.readouterr().out
    seen = set()
    for step, metrics in enumerate(steps, 1):
        rows = common.read_lines(tmp_path / f"out/rollouts/step_{step}.jsonl")
        failed = sum(row["fault"] != "" for row in rows)
        told = [row for row in rows if not row["fault"]]
        scores = [row["score"] for row in told]
        assert metrics["reward/errors"] == failed
        assert all(any(row["response_mask"]) != bool(row["fault"]) for row in rows)
        assert (metrics["reward/min"], metrics["reward/max"]) == (min(scores), max(scores))
        assert metrics["rollout/truncated"] == sum(row["truncated"] for row in told) / len(told)
        shown = f"{metrics['reward/mean']:.3f}" + (f"  failed {failed}" if failed else "")
        assert re.search(rf"^step +{step}/14  reward {shown}  length", said, re.M)
        seen.add(failed)
    assert {0, 1, 2} <= seen and "2 of 3 rows failed and are left out: ZeroDivisionError" in said


JUDGE = """import pathlib

def f(prompt, response, answer):
    here = pathlib.Path(__file__).parent
    if (here / "out/rollouts/step_2.jsonl").exists() and not (here / "up").exists():
        raise ConnectionError("the judge is down")
    return len(response) / 16
"""


def test_a_run_whose_judge_is_down_saves_its_state_and_goes_on(whole_run, tmp_path):
    """Bit for bit, as if nothing had happened."""
    (tmp_path / "judge.py").write_text(JUDGE)
    flags = f"--reward {tmp_path}/judge.py:f --reward-timeout 0 --steps 4"
    words = "all 8 rows failed: ConnectionError: the judge is down .*; step 2 is saved: --resume"
    with pytest.raises(UserError, match=words):
        whole_run(flags)
    assert [*common.steps_in(tmp_path / "out/checkpoints")][0][0] == 2
    (tmp_path / "up").touch()
    whole_run(f"{flags} --resume auto")
    resumed = metrics_of(tmp_path / "out")
    shutil.move(tmp_path / "out", tmp_path / "first")
    whole_run(flags)
    assert metrics_of(tmp_path / "out") == resumed and max(step for step, _ in resumed) == 4


def test_every_phase_of_a_step_is_timed(whole_run, tmp_path):
    whole_run("--kl-coef 0.1 --save-every 1")
    rows = common.read_lines(tmp_path / "out/metrics.jsonl")
    found = {name for row in rows for name in row if name.startswith("time/")}
    phases = "generation sync reward log_probs reference critic actor checkpoint"
    assert found == {f"time/{phase}" for phase in phases.split()}


def test_a_critic_learns_from_raw_scores_or_shaped_rewards_of_a_dump(whole_run, tmp_path):
    """With a KL in the reward. The texts of the dump are those that the reward has read."""
    (tmp_path / "unsure.py").write_text(
        "def f(prompt, response, answer):\n"
        "    length, echo = len(response), prompt[:1] in response\n"
        "    return {'score': length % 3, 'length': length, 'echo': echo}\n"
    )
    whole_run(f"--kl-coef 0.1 --reward {tmp_path}/unsure.py:f")
    path = f"{tmp_path}/out/rollouts/step_2.jsonl"  # in step 1 the actor is its own reference
    rows = common.read_lines(path)
    for row in rows:
        ids, said = row["prompt_ids"], row["response_text"]
        assert row["prompt_text"] == TOKENIZER.decode(ids) and row["fault"] == ""
        assert said == text_of_reply(row["response_ids"])
        assert row["score"] == len(said) % 3
        assert row["parts"] == {"length": len(said), "echo": row["prompt_text"][0] in said}
    # the last one is an evaluation
    *_, metrics, _ = common.read_lines(tmp_path / "out/metrics.jsonl")
    for name in ("length", "echo"):
        mean = sum(row["parts"][name] for row in rows) / len(rows)
        assert metrics[f"reward/{name}"] == pytest.approx(mean)

    critic = critic_fsdp.CriticWorker(critic_fsdp.Config())
    critic.tokenizer = None
    read = lambda **more: critic_fsdp.load_rows(critic_fsdp.Run(rollouts=path, **more), critic)[0]
    scores, shaped, length = read(reward_key="score"), read(), read(reward_key="parts.length")
    returns_A = common.monte_carlo(scores, 1.0)[scores.response_mask]
    assert 1 < len(returns_A.unique()) and set(returns_A.tolist()) == {x["score"] for x in rows}
    given = [x for row in rows for x in [0.0] * len(row["prompt_ids"]) + row["rewards"]]
    assert shaped.token_level_rewards.tolist() == pytest.approx(given)
    assert len(common.monte_carlo(shaped, 1.0)[shaped.response_mask].unique()) > len(rows)
    assert length.token_level_rewards.sum() == sum(row["parts"]["length"] for row in rows)


NEVER_STOPPED = {}  # flags -> how such a run ends, once for all phases
PHASES = [  # a call of the second step, of this number
    ("rollout", ppo_loop, "draw", 20, 1),
    ("evaluation", ppo_loop, "draw", 3, 1),
    ("reward", ppo_loop, "addition_reward", 6, 1),
    ("reward of an evaluation", ppo_loop, "addition_reward", 4, 1),
    ("log-probs", ppo_loop.Policy, "forward", 2, 1),
    ("reference", ppo_loop.Policy, "forward", 4, 1),
    ("values", critic_fsdp.DataParallelPPOCritic, "forward", 2, 1),
    ("update of the critic", critic_fsdp.DataParallelPPOCritic, "forward_backward", 2, 2),
    ("update of the actor", ppo_loop.DataParallelPPOActor, "optimizer_step", 1, 2),
]


@pytest.mark.parametrize("phase, owner, name, nth, saved", PHASES)
def test_sigterm_interrupts_a_phase(
    phase, owner, name, nth, saved, whole_run, monkeypatch, tmp_path
):
    """At most one more call begins, except in an update, which is completed. The state between two
    steps is saved, and the resumed run ends exactly like one without interruption and without
    --offload."""
    work = getattr(owner, name)
    flags = f"--kl-coef 0.1 --steps 3 --eval-every {int('evaluation' in phase)}"
    flags += " --rollout-batch-size 3 --actor.ppo-mini-batch-size 4 --critic.ppo-mini-batch-size 4"
    flags += " --actor.ppo-max-token-len-per-gpu 28 --critic.ppo-max-token-len-per-gpu 28"
    out = tmp_path / "out"
    end = lambda: ((out / "hf/model.safetensors").read_bytes(), (out / "samples.json").read_bytes())
    if flags not in NEVER_STOPPED:
        whole_run(flags)
        NEVER_STOPPED[flags] = end()
        shutil.rmtree(out)
    done = []
    begun = lambda: any("reward/mean" in row for row in common.read_lines(out / "metrics.jsonl"))

    @functools.wraps(work)
    def told(*args, **more):
        if begun():  # the second step
            done.append(1)
            if len(done) == nth:
                signal.raise_signal(signal.SIGTERM)
        return work(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, told)
        if name == "addition_reward":
            patch.setitem(ppo_loop.REWARDS, "addition", told)
        with pytest.raises(SystemExit) as stop:
            whole_run(f"{flags} --offload")
    assert stop.value.code == 143 and os.listdir(out / "checkpoints") == [f"step_{saved}"]
    if "evaluation" in phase:  # it is abandoned and leaves no numbers
        rows = common.read_lines(out / "metrics.jsonl")
        assert {row["step"] for row in rows if "eval/reward" in row} == {0}
    assert len(done) <= nth + 1 if saved == 1 else len(done) > nth, len(done)
    whole_run(f"{flags} --resume auto")
    assert end() == NEVER_STOPPED[flags]


def test_phases_onload_and_offload_their_workers():
    seen = []
    way = lambda words: lambda: seen.append(words)
    a, b = (types.SimpleNamespace(onload=way(f"{x} on"), offload=way(f"{x} off")) for x in "ab")

    moved = ["a on", "b on", "work", "b off", "a off"]
    for offload, expected in ((True, moved), (False, ["work"])):
        phases = ppo_loop.Phases(offload)
        for _ in range(2):
            with phases("x", a, None, b):
                seen.append("work")
                time.sleep(0.02)
        assert seen == expected * 2
        seen.clear()
        # a new step
        assert 0.04 <= phases.take(100)["time/x"] < 5 and "time/x" not in phases.take(100)
