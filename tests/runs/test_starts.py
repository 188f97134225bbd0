"""How a run begins: its environment, its numbers, the model's sizes, and the folder that it alone
writes.

Each start is a process of its own: it ends well, or in one line with status 2, before anything is
built."""

import contextlib
import errno
import importlib
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import types

import pytest
import torch
import transformers
import tyro
from forked import until
from helpers import (
    BINS,
    ROOT,
    random_batch,
    refused,
    refused_in_a_box,
    rows_after,
    run,
    succeeded,
    torchrun,
    worker,
)

import common
import critic_fsdp
import critic_megatron
import ppo_loop

FSDP, MEGATRON, PPO = (
    ROOT / f"{name}.py" for name in ("critic_fsdp", "critic_megatron", "ppo_loop")
)
ROWS = ROOT / "tests" / "rows.jsonl"
SHORT = f"--steps 1 --eval-every 0 --train-batch-size 8 --rollouts {ROWS}".split()


def ends_in_one_line(process, words):
    """Asserts that a run ended with status 2 and one line that begins with an error and holds these
    words."""
    said = process.stderr
    assert process.returncode == 2 and words in said, (process.returncode, said[-2000:])
    assert re.fullmatch(r"error( on rank \d)?: [^\n]+\n", said), said


# ---- The environment -----------------------------------------------------------------------------

SCRIPTS = (FSDP, MEGATRON, PPO)
BOTH = pytest.mark.parametrize("script", [critic_fsdp, critic_megatron], ids=["fsdp", "megatron"])


def test_a_rank_that_no_other_one_meets_ends(tmp_path):
    """Within the time-out of --timeout-minutes."""
    two = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    flags = (*SHORT, "--out-dir", tmp_path / "out", "--timeout-minutes", "0.02")
    process = run(sys.executable, FSDP, *flags, timeout=60, **two)
    words = "1/2 clients joined.\nerror: another rank died or hangs\n"
    assert process.returncode == 1 and words in process.stderr, process.stderr
    assert not (tmp_path / "out").exists()


RESTARTS = """
import os
import common

def main():
    common.setup_distributed()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and common.RANK == 1:
        os._exit(1)
    met, start = sum(common.of_all_ranks(1)), os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"met {met} at start {start}\\n".encode())  # at once, as two ranks write here

common.launch(main)
"""


def test_ranks_that_torchrun_starts_again_meet_again(tmp_path):
    """At the same store, which still holds the addresses of the first start."""
    (script := tmp_path / "restarts.py").write_text(RESTARTS)
    flags = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    command = (sys.executable, "-m", "torch.distributed.run", *flags, script)
    said = succeeded(run(*command, timeout=120))
    assert said.count("met 2 at start 1\n") == 2, said


@pytest.mark.parametrize("env", [
    {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "", "OMP_NUM_THREADS": ""},
    {"MASTER_ADDR": "node0", "MASTER_PORT": "1", "LOCAL_RANK": "0"},  # as clusters export them
    {"OMP_NUM_THREADS": " 2,1 "},  # for nested parallel regions
], ids=str)  # fmt: skip
def test_empty_and_harmless_variables_are_no_mistake(env, tmp_path):
    succeeded(run(sys.executable, FSDP, *SHORT, "--out-dir", tmp_path, timeout=120, **env))


RAISES = r"""
import common

def main():
    raise ValueError("\x1b]0;mine\x07 \x9b2J\ré 中\nnext\tline")

common.launch(main)
"""


def test_control_characters_do_not_reach_the_terminal(tmp_path, capsys):
    """Those of a file's name, of a user's exception, and of what a line quotes from a row."""
    flags = ("--rollouts", tmp_path / "\x1b[31mtwo\nlines", "--out-dir", tmp_path / "out")
    words = f"--rollouts {tmp_path}/\\x1b[31mtwo\\nlines (FileNotFoundError"
    ends_in_one_line(run(sys.executable, FSDP, *flags), words)

    (script := tmp_path / "raises.py").write_text(RAISES)
    process = run(sys.executable, script)
    assert process.returncode == 1 and "\x1b" not in process.stderr, process.stderr
    assert process.stderr.endswith("\nValueError: \\x1b]0;mine\\x07 \\x9b2J\\ré 中\nnext\tline\n")

    common.print0("\x1b[2J\r\0 é 中\nnext\tline\u202e\u2066", 1.5)
    assert capsys.readouterr().out == "\\x1b[2J\\r\\x00 é 中\nnext\tline\\u202e\\u2066 1.5\n"


CLOSED = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable)
STREAMS = """
import os

def note(prompt, response, answer):
    links = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    open(f"{__file__}.txt", "w").write(" ".join(links))
    return 1.0
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for open files in /proc")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_run_without_open_streams_ends_well(script, tmp_path):
    """As a daemon. No file gets the number of a stream, in the user's processes neither."""
    (tmp_path / "mine.py").write_text(STREAMS)
    flags = ("--steps", "1", "--eval-every", "0", "--train-batch-size", "8")
    if script == PPO:
        flags += ("--supervised-steps", "0", "--reward", f"{tmp_path}/mine.py:note")
    else:
        flags += ("--rollouts", ROWS)
    process = run(*CLOSED, script, *flags, "--out-dir", tmp_path / "out")
    assert process.returncode == 0 and common.steps_in(f"{tmp_path}/out/checkpoints")
    if script == PPO:
        assert (tmp_path / "mine.py.txt").read_text() == "/dev/null /dev/null /dev/null"


def test_what_python_says_is_one_line_too():
    """A flag that it sets; letters that a terminal lacks, in the name of a file or a row."""
    program = "import common, critic_fsdp; common.launch(lambda: critic_fsdp.Config(lr=-1))"
    process = run(sys.executable, "-c", program, timeout=60)
    ends_in_one_line(process, "for Config lr Input should be greater than 0 [type=greater_than")

    say = "import common; common.launch(lambda: common.print0('prompts é 中.jsonl'))"
    process = run(sys.executable, "-c", say, timeout=120, PYTHONIOENCODING="ascii")
    assert succeeded(process) == "prompts \\xe9 \\u4e2d.jsonl\n" and not process.stderr


# ---- Numbers and sizes ---------------------------------------------------------------------------

HUGE = "9" * 30


@pytest.mark.parametrize("flags", [
    f"--seed {HUGE}", f"--steps {HUGE}", f"--keep {HUGE}", f"--train-batch-size {HUGE}",
    f"--save-every {HUGE}",
    f"--ppo-max-token-len-per-gpu {HUGE}", f"--ppo-max-token-len-per-gpu auto:{HUGE * 11}",
    "--lr 1e300", "--cliprange-value 1e39", "--value-range -1e39 1e39",
    f"--response-length-limit {HUGE}", f"--profile-step {HUGE}",
])  # fmt: skip
@BOTH
def test_numbers_have_an_upper_bound(script, flags, capfd):
    """The field is named by both critics, and with its group by the PPO loop."""
    name = flags.split()[0][2:].replace("-", "_")
    with refused_in_a_box(capfd, f" {name}", "Input should be "):
        tyro.cli(script.Run, args=flags.split())

    if hasattr(script.Config, name):
        backend = script.__name__.removeprefix("critic_")
        words = flags.replace("--", "--critic.")
        with refused_in_a_box(capfd, "Error parsing critic: ", f" for Config {name}"):
            ppo_loop.parse(["--critic", backend, *words.split()])


# on one script each, because they share load_config
@pytest.mark.parametrize("script, sizes, words", [
    (MEGATRON, '{"output_attentions": true}', "is no config that Qwen2Config takes (StrictDat"),
    (PPO, '{"hidden_size": "wide"}', "is no config that Qwen2Config takes"),
    (FSDP, "[1]", "must be a JSON object (ValueError: it is a list)"),
], ids=["megatron", "ppo", "fsdp"])  # fmt: skip
def test_a_config_that_cannot_be_built_is_named(script, sizes, words, tmp_path):
    """By the script's main, as the script itself begins."""
    module = importlib.import_module(script.stem)
    flag = "--actor.override-config" if script == PPO else "--override-config"
    args = [flag, sizes, "--out-dir", str(tmp_path / "out")]
    with refused(words, begin=f"{flag} "):
        if script == PPO:
            ppo_loop.main(ppo_loop.parse(args))
        else:
            module.main(tyro.cli(module.Run, args=args))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("sizes, words", [
    ({"pad_token_id": 1000}, "Padding_idx must be within num_embeddings"),
    ({"num_attention_heads": 3}, "must divide"),  # of 2 heads for keys and values
    ({"num_attention_heads": 0}, "ZeroDivisionError: "),
    ({"num_key_value_heads": 0}, "ZeroDivisionError: "),
    ({"hidden_size": -64}, "negative dimension -64"),
])  # fmt: skip
@BOTH
def test_sizes_that_a_library_refuses_are_one_line(script, sizes, words):
    with refused(words, begin="--model tiny-qwen2"):
        worker(script=script, override_config=json.dumps(sizes))


def test_the_loop_checks_sizes_before_it_starts():
    args = ["--actor.override-config", '{"pad_token_id": 1000}']
    with refused("cannot be built", begin="--critic.model tiny-qwen2 (qwen2): "):
        ppo_loop.set_up(ppo_loop.parse(args))


def test_no_process_group_is_built_for_a_config_that_megatron_refuses():
    heads = '{"num_attention_heads": 3, "num_key_value_heads": 3}'
    config = critic_megatron.Config(override_config=heads, tensor_model_parallel_size=2)
    _, model_config = common.load_config(config)
    with refused("", begin="--model tiny-qwen2: cannot be built with these parallel sizes"):
        critic_megatron.check_model_flags(config, model_config)


def test_padding_is_advised_only_to_a_run_that_packs():
    """A sliding window that only the model's own mask knows cannot be packed."""
    fields = {"model": "tiny-qwen2", "override_config": '{"hidden_act": "none of these"}'}
    with refused("cannot be built; try --no-use-remove-padding"):
        worker(**fields)
    with pytest.raises(common.UserError) as error:
        worker(**fields, use_remove_padding=False)
    assert "--no-use-remove-padding" not in str(error.value)


# ---- Flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, backend", [
    ([], "fsdp"),
    (["--critic", "megatron"], "megatron"),
    (["--critic=megatron"], "megatron"),
    (["--critic", "megatron", "--critic", "fsdp"], "fsdp"),
    (["--actor.override-config", '{"a":\n"b"}', "--critic", "megatron"], "megatron"),
    (["--out-dir", "out of --critic megatron"], "fsdp"),
    (["--prompts", "a\n--critic megatron\nb", "--reward", "gsm8k"], "fsdp"),
])  # fmt: skip
def test_the_critic_is_the_value_of_its_own_flag(args, backend):
    run = ppo_loop.parse(args)
    assert run.backend == backend and type(run.critic) is ppo_loop.critic_flags(backend)


def test_the_users_own_text_is_left_as_it_is():
    """Only the flag at the start gets the critic's prefix, not a word of the user that looks like a
    flag."""
    with refused("tiny --lr model", begin="--critic.model tiny --lr model: no model there"):
        ppo_loop.set_up(ppo_loop.parse(["--critic.model", "tiny --lr model"]))
    with refused("has no '--lr' to override", begin="--actor.override-config: "):
        ppo_loop.set_up(ppo_loop.parse(["--actor.override-config", '{"--lr": 1}']))


# ---- The folder of a run -------------------------------------------------------------------------


def started(*flags, **env):
    """A run in a process of its own."""
    command = [sys.executable, *map(str, flags)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, **pipes)


def contents(folder):
    """path -> content of each file that two runs could take from one another."""
    files = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files if path.name != "metrics.jsonl"}


def test_a_second_run_leaves_the_folder_of_the_first_alone(tmp_path):
    """Whichever script it runs, it ends in one line, and the first goes on. When that is killed,
    the next one starts at once."""
    out = tmp_path / "out"
    own = ("--out-dir", out, "--rollouts", ROWS, "--train-batch-size", 8, "--keep", 1)
    often = ("--steps", 100000, "--save-every", 1, "--eval-every", 0)
    first = started(FSDP, *own, *often)
    try:
        until((out / "checkpoints" / "step_3").exists, "the third checkpoint", 120)
        for second in SCRIPTS:
            os.kill(first.pid, signal.SIGSTOP)  # nothing may change while the second tries
            before = contents(out)
            process = run(sys.executable, second, "--out-dir", out, "--steps", 1, timeout=120)
            ends_in_one_line(process, f"--out-dir {out}: another run, process {first.pid} on ")
            assert contents(out) == before
            os.kill(first.pid, signal.SIGCONT)
            assert first.poll() is None
    finally:
        first.kill()
        first.communicate()

    made = max(common.steps_in(f"{out}/checkpoints"))[0]
    succeeded(run(sys.executable, FSDP, *own, "--resume", "auto", "--steps", made + 1))


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, capsys):
    """Some network file systems have none; this one cannot be asked to, so its answer is made
    up."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    common.setup_distributed()
    monkeypatch.setattr(common.fcntl, "flock", refuse)
    assert common.claim(str(tmp_path)) is None
    assert "lock       none in" in capsys.readouterr().out


def test_what_earlier_runs_saved_is_never_replaced(tmp_path):
    """Checkpoints, rollouts, metrics and curves of four runs in one folder."""
    for number in range(1, 5):
        for name in ("checkpoints/step_2", "tensorboard"):
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "number").write_text(f"{number}")
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        (tmp_path / "rollouts/step_2.jsonl").write_text(f"{number}")
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
        common.Logger(str(tmp_path), {}, 0, None).board.close()  # it writes from a thread
        if number < 4:  # its own files make way for those of the next
            (tmp_path / "metrics.jsonl").unlink()
            for path in (tmp_path / "tensorboard").iterdir():
                path.unlink()
            (tmp_path / "tensorboard").rmdir()

    for number, ending in enumerate((".old1", ".old2", ".old3", ".old4"), 1):
        for name in (f"checkpoints/step_2{ending}/number", f"tensorboard{ending}/number"):
            assert (tmp_path / name).read_text() == f"{number}"
        assert (tmp_path / f"rollouts/step_2.jsonl{ending}").read_text() == f"{number}"
        assert json.loads((tmp_path / f"metrics.jsonl{ending}").read_text()) == {"step": number}


@BOTH
def test_a_run_never_replaces_the_model_that_it_loads(script, tmp_path):
    out = str(tmp_path / "out")
    words = f"--out-dir {out}: holds the --model, which the run would replace; give another"
    for name in ("hf", "checkpoints/step_9", "hf/"):
        critic = script.Config(model=f"{out}/{name}")
        with pytest.raises(ValueError, match=words):
            script.Run(critic=critic, out_dir=out)
        script.Run(critic=critic, out_dir=out, score=str(ROWS))
    script.Run(critic=script.Config(model=f"{out}/other"), out_dir=out)


@pytest.mark.parametrize("flag", ["--actor.model", "--critic.model", "--reward-model"])
@pytest.mark.parametrize("name", ["hf", "critic_hf", "checkpoints/step_3/critic"])
def test_the_loop_never_replaces_a_model_that_it_loads(flag, name, tmp_path, capfd):
    task = [] if flag == "--reward-model" else ["--reward", "gsm8k"]
    args = [flag, f"{tmp_path}/{name}", "--out-dir", str(tmp_path), "--prompts", str(ROWS), *task]
    with refused_in_a_box(capfd, "--out-dir", "the run would replace a model there that it loads"):
        ppo_loop.parse(args)


# ---- What an update may ruin ---------------------------------------------------------------------


@pytest.mark.parametrize("script", [FSDP, MEGATRON, PPO], ids=lambda x: x.stem)
def test_a_critic_that_an_update_has_ruined_is_not_saved_over_the_good_one(script, tmp_path):
    """faults.py does the same to an actor."""
    own, prefix = f"--rollouts {ROWS}", "--"
    if script == PPO:
        own, prefix = "--supervised-steps 0", "--critic."
    out = tmp_path / "out"
    flags = f"{own} --train-batch-size 8 --eval-every 0 --save-every 1 --keep 1 --resume auto"
    flags = [*flags.split(), "--out-dir", out]
    succeeded(run(sys.executable, script, *flags, "--steps", "2"))
    before = contents(out / "checkpoints")
    ruin = f"--steps 3 {prefix}lr 1e15 {prefix}grad-clip inf"
    process = run(sys.executable, script, *flags, *ruin.split())
    ends_in_one_line(process, "the critic's values are not finite")
    assert contents(out / "checkpoints") == before


def test_an_actor_that_was_ruined_before_is_not_blamed_on_the_learning_rate(tmp_path):
    tokenizer = common.char_tokenizer()
    fields = common.tiny_config("tiny-qwen2", len(tokenizer))
    config = transformers.Qwen2Config(**fields, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.lm_head.weight.data[7] = math.inf
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "actor")
    flags = ("--actor.model", tmp_path / "actor", "--out-dir", tmp_path / "out")
    few = "--train-batch-size 8 --steps 1 --eval-every 0".split()
    process = run(sys.executable, PPO, *flags, *few)
    words = f"--actor.model {tmp_path}/actor: its log-probs are not finite; check its"
    ends_in_one_line(process, words)


# ---- The mean, memory, groups --------------------------------------------------------------------


def start_of(returns_A):
    """The mean, to the second digit of the standard deviation."""
    places = 1 - math.floor(math.log10(returns_A.double().std(correction=0)))
    return round(float(returns_A.double().mean()), places)


@pytest.mark.parametrize("mean, spread", [(104.93, 0.5), (-0.0312, 0.0004), (5e6, 3e4), (7.0, 0.0)])
def test_a_head_starts_near_the_mean_as_the_returns_spread_measures_it(mean, spread):
    """So that lambda below 1 does not bias every advantage by a start that is many spreads off."""
    batch = random_batch(40, vocab_size=60, idle=False)
    rewards_B = mean + spread * torch.randn(40, generator=torch.Generator().manual_seed(0))
    batch.token_level_rewards = torch.zeros(len(batch.input_ids))
    batch.token_level_rewards[common.last_action(batch)] = rewards_B
    critic = worker(value_head_init="mean")
    critic.start_at_mean(batch, 1.0)
    [start] = critic.compute_values(batch)[batch.response_mask].unique().tolist()
    returns_A = torch.repeat_interleave(rewards_B, batch.actions).double()
    assert abs(start - float(returns_A.mean())) <= 0.1 * spread + 1e-6 * abs(mean)


@BOTH
@pytest.mark.parametrize("init", ["auto", "zero"])
@pytest.mark.parametrize("low, high, outside", [(0.0, 0.3, 3), (-1.0, 9.0, 0), (0.3, 0.5, 2)])
def test_returns_outside_the_value_range_are_told(low, high, outside, init, script, capfd):
    """Before the first update. Returns are twice -0.1 in the first row, 0.4 and 0.3 in the other;
    an end of the range is in it, also as float32."""
    fields = {"value_head": "bounded", "value_range": (low, high), "value_head_init": init}
    critic = worker(script=script, **fields)
    batch = rows_after([3], [5], answer=2)
    batch.token_level_rewards = torch.tensor([0.0, 0.0, -0.1, 0.0, 0.1, 0.3])
    capfd.readouterr()
    critic.start_at_mean(batch, 1.0)
    words = f"note       {outside} of 4 returns are outside the value range, {low:g} to {high:g}"
    assert capfd.readouterr().out.count(words) == (outside > 0)


@BOTH
def test_a_head_starts_at_the_mean_of_the_first_batch_that_has_an_action(script):
    critic = worker(script=script, value_head_init="mean", ppo_mini_batch_size=8)
    batch = random_batch(8, vocab_size=60, idle=False)
    idle = random_batch(8, vocab_size=60, idle=False)
    idle.response_mask[:] = False
    critic.set_budget(40, "row")
    for rows in (idle, batch):
        critic.start_at_mean(rows, 1.0)
        rows.values = critic.compute_values(rows)
        common.add_returns(rows, 1.0, 1.0)
        critic.update_critic(rows)
    mean = start_of(common.monte_carlo(batch, 1.0)[batch.response_mask])
    assert abs(mean) > 0.01
    [start] = batch.values[batch.response_mask].unique().tolist()
    assert start == pytest.approx(mean, rel=1e-5, abs=1e-6)


@BOTH
def test_by_default_a_new_head_starts_at_the_mean_but_no_trained_one_and_no_bins(script, tmp_path):
    worker(script=script, value_head_init="normal").export_hf(tmp_path / "trained")
    trained = {"model": str(tmp_path / "trained")}
    limits = {"value_range": (-9.0, 9.0)}
    batch = random_batch(8, vocab_size=60, idle=False)
    mean = torch.tensor(start_of(common.monte_carlo(batch, 0.9)[batch.response_mask]))
    for fields, starts in (
        ({}, True),
        ({"value_head": "bounded", **limits}, True),
        ({**BINS, **limits}, False),
        ({"value_head_init": "normal"}, False),
        ({"value_head_init": "zero"}, False),
        (trained, False),
        ({**trained, "value_head_init": "mean"}, True),
    ):
        critic = worker(script=script, **fields)
        critic.start_at_mean(batch, 0.9)
        values = critic.compute_values(batch)[batch.response_mask]
        assert torch.allclose(values, mean, atol=1e-5) == starts, fields


@BOTH
@pytest.mark.parametrize("score", [True, False])
def test_memory_that_runs_out_before_the_first_step_counts_too(
    script, score, tmp_path, monkeypatch
):
    """While the budget is measured, and while rows are scored; a run that starts anew forgets
    it."""
    judge = worker(model="tiny-qwen2", value_head_init="normal")
    judge.export_hf(tmp_path / "judge")
    critic = script.Config(model=str(tmp_path / "judge"))
    flags = {"score": str(ROWS)} if score else {"rollouts": str(ROWS), "steps": 1}
    run = script.Run(critic, out_dir=str(tmp_path / "out"), resume="auto", **flags)

    def fails(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    where = (script.CriticWorker, "set_budget")
    if score:
        kind = script.DataParallelPPOCritic if script is critic_fsdp else script.MegatronPPOCritic
        where = (kind, "compute_values")
    monkeypatch.setattr(*where, fails)
    for times in (1, 2):
        with pytest.raises(torch.OutOfMemoryError):
            script.main(run)
        assert (tmp_path / "out/out_of_memory").read_text() == f"{times}"
    monkeypatch.undo()
    anew = common.Checkpoints(run.out_dir)
    assert anew.halvings == 0 and not (tmp_path / "out/out_of_memory").exists()


@BOTH
def test_a_longer_row_does_not_undo_the_halving(script):
    critic = worker(script=script, ppo_max_token_len_per_gpu=1000)
    critic.set_budget(20, "the longest row", halvings=2)
    halved = {"max_tokens": 250, "max_tokens_forward": 500}
    for name in halved:
        assert getattr(critic.critic, name) == halved[name]
        setattr(critic.critic, name, 30)  # as if rows were longer than announced
        critic.compute_values(random_batch(4, longest=60, idle=False))
        assert {name: getattr(critic.critic, name) for name in halved} == halved


def test_everything_is_halved_after_memory_ran_out(tmp_path):
    """The budgets of actor, critic, reference and reward model, and the rows that are generated at
    once."""
    judge = worker(model="tiny-qwen2", value_head_init="normal")
    judge.export_hf(tmp_path / "judge")
    flags = f"--prompts {ROWS} --reward-model {tmp_path}/judge --rollout-batch-size 100"
    flags += " --kl-coef 0.1 --max-response-length 3"
    task = ppo_loop.set_up(ppo_loop.parse(flags.split()))
    halved = types.SimpleNamespace(folder=None, halvings=3)
    made = ppo_loop.build(*task, common.setup_distributed(), halved)
    actor, reference, critic, reward, engine = made
    assert actor.critic.max_tokens == critic.critic.max_tokens == 16384 >> 3
    assert engine.run.rollout_batch_size == 100 >> 3
    reward.worker.compute_values(random_batch(3, vocab_size=60))
    assert reward.worker.critic.max_tokens == 16384 >> 3
    for halved in (actor, reference, critic, reward.worker):
        assert halved.critic.max_tokens_forward == 2 * 16384 >> 3


def test_how_often_memory_ran_out_is_kept_as_a_number(tmp_path):
    common.setup_distributed()
    for expected in (0, 1, 2):
        checkpoints = common.Checkpoints(str(tmp_path), resume="auto")
        assert checkpoints.halvings == expected
        with contextlib.suppress(MemoryError), checkpoints:
            raise MemoryError("out of memory")
    fault = common.UserError("--rollouts out of memory.jsonl: No such file")
    with contextlib.suppress(common.UserError), common.Checkpoints(str(tmp_path), resume="auto"):
        raise fault
    assert (tmp_path / "out_of_memory").read_text() == "3"  # not for a user's file of that name


GROUPS = """
import os, sys
import torch.distributed as dist
import common, critic_fsdp, critic_megatron

counts = []
for turn in range(6):
    size = 1 + turn % 2
    critic_fsdp.CriticWorker(critic_fsdp.Config(ulysses_size=size))
    critic_megatron.CriticWorker(critic_megatron.Config(tensor_model_parallel_size=size))
    counts.append((len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))))
first, last = counts[1], counts[-1]
if last[0] > first[0] or last[1] > first[1] + 2:
    raise SystemExit(f"groups and threads grow: {counts}")
common.launch(lambda: None)
"""


def test_workers_that_are_built_again_leave_no_process_groups(tmp_path):
    (script := tmp_path / "groups.py").write_text(GROUPS)
    process = torchrun(2, script)
    assert process.returncode == 0, process.stderr[-3000:]
