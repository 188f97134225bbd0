"""Prompts and flags of ppo_loop.py: what is read, what is refused, and in which words."""

import importlib.util
import json
import types

import pytest
from helpers import explained, help_of, refused_in_a_box
from ppo_helpers import EOS, TOKENIZER, a_run, another_tokenizer, chat_tokenizer, ids_of, policy

import common
import ppo_loop
from common import UserError
from ppo_loop import ActorConfig, Prompt


def prompts_of(tmp_path, *rows, tokenizer=None, **fields):
    """load_prompts on a file of these rows; text and bytes are written as they are."""
    file = tmp_path / "prompts.jsonl"
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    file.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    run = a_run(**{"prompts": str(file), "reward": "mine.py:f", **fields})
    return ppo_loop.load_prompts(str(file), "--prompts", run, tokenizer or TOKENIZER)


def test_prompts_of_text_and_of_chats(tmp_path, capsys):
    told = {"tokenizer": chat_tokenizer("")}
    load = lambda *rows, **fields: prompts_of(tmp_path, *rows, **told, **fields)
    user = [{"role": "user", "content": "hi"}]
    chat = [{"role": "system", "content": "S"}, *user]
    begun = [*user, {"role": "assistant", "content": "I think"}]
    ours = load({"prompt": "1+1=", "answer": "2"}, {"prompt": chat}, {"prompt": begun})
    rows = [x.row for x in ours]
    assert rows == [{"prompt": "1+1=", "answer": "2"}, {"prompt": chat}, {"prompt": begun}]
    ours = [x._replace(row=None) for x in ours]
    assert ours[0] == Prompt(ids_of("1+1="), "1+1=", "2", None)
    assert ours[1] == Prompt(ids_of("<system>S\n<user>hi\n<assistant>"), "hi", None, chat)
    assert ours[2] == Prompt(ids_of("<user>hi\n<assistant>I think"), "I think", None, begun)
    keys = {"prompt_key": "question", "answer_key": "gold"}
    [ours] = load({"question": "hi", "gold": 7}, chat=True, **keys)
    assert ours[:4] == (ids_of("<user>hi\n<assistant>"), "hi", 7, user)

    rows = [{"prompt": "a" * n, "n": n} for n in (3, 6, 5, 9)]
    assert [p.text for p in load(*rows, max_prompt_length=5)] == ["aaa", "aaaaa"]
    assert "left out 2 prompts longer than --max-prompt-length" in capsys.readouterr().out
    for fault, fields in (
        (":1: .*--reward addition cannot check the answer", {"reward": "addition"}),
        (":1: .*'why', which --privileged-key names", {"privileged_key": "why"}),
        (":1: .*must be text", {"chat": True, "prompt_key": "n"}),
    ):
        with pytest.raises(UserError, match=f"--prompts .*prompts.jsonl{fault}"):
            load(*rows, **fields)
    with pytest.raises(UserError, match="--prompts: no usable"):
        load(*rows, max_prompt_length=2)


@pytest.mark.parametrize("row", (
    "{", b'{"prompt": "\xff"}', "[1]", "null", {"question": "x"}, {"prompt": None}, {"prompt": 5},
    {"prompt": []}, {"prompt": [{"content": "x"}]}, {"prompt": ""}, '{"prompt": "\\ud800"}',
    {"prompt": [{"role": "user", "content": "x"}]},  # the tokenizer has no template
    {"prompt": "x", "answer": "five"},  # which the gsm8k reward cannot read
))  # fmt: skip
def test_a_bad_prompt_is_named_by_file_and_line(row, tmp_path):
    good = {"prompt": "good", "answer": "#### 5"}
    # blank lines count
    with pytest.raises(UserError, match=r"^--prompts .*prompts.jsonl:4\b[^\n]*\Z"):
        prompts_of(tmp_path, good, "", "  ", row, good, reward="gsm8k")


@pytest.mark.megatron
def test_each_critic_brings_its_own_flags_and_all_are_explained(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    parse = lambda flags: ppo_loop.parse(flags.split())
    own = {"--critic=fsdp": "ulysses-size", "--critic megatron": "tensor-model-parallel-size"}

    for critic, flag in own.items():
        backend = critic.removeprefix("--critic")[1:]
        run = parse(f"{critic} --critic.{flag} 2 --actor.lr 0.25 --whiten none")
        config = ppo_loop.critic_flags(backend)
        critic = config(model="actor", ppo_mini_batch_size=128, **{flag.replace("-", "_"): 2})
        actor = ActorConfig(lr=0.25)
        assert run == a_run(backend, critic=critic, actor=actor, whiten="none")

        with pytest.raises(SystemExit):
            parse(f"--critic {backend} --help")
        boxes = help_of(capfd.readouterr().out)
        assert f"--critic.{flag}" in boxes["critic options"] and len(boxes["vllm options"]) == 2
        assert [*boxes] == ["options", "critic options", "actor options", "vllm options"]
        explained(boxes, ppo_loop.Run, ActorConfig, config, ppo_loop.VLLMConfig)

    assert parse("") == a_run()


@pytest.mark.parametrize("flags, words", [
    ("--critic fsdp2", "'fsdp2' for argument '--critic'. Expected one of ('fsdp', 'megatron')"),
    ("--critic.tensor-model-parallel-size 2", "options: --critic.tensor-model-parallel-size"),
    ("--critic.ulysses-size 2 --critic megatron", "Unrecognized options: --critic.ulysses-size"),
    ("--lr 1", "Perhaps you meant: --actor.lr"),
    ("--kl-coeff 0.1", "Perhaps you meant: --kl-coef FLOAT"),
    ("--offload True", "Unrecognized options: True"),
    ("--steps x", "--steps: invalid literal for int() with base 10: 'x'"),
    ("--critic", "argument '--critic'"), ("--critic --steps 3", "argument '--critic'"),
])  # fmt: skip
def test_a_flag_that_cannot_be_read_is_named(flags, words, capfd):
    with refused_in_a_box(capfd, words):
        ppo_loop.parse(flags.split())


HUGE = "9" * 30


@pytest.mark.parametrize("flags", [
    "--rollout-n 0", "--gamma 1.1", "--kl-coef nan", "--eval-every -1", "--top-p 0",
    "--reward-timeout inf", "--temperature 0", "--vllm.gpu-memory-utilization 1.5",
    "--actor.clip-ratio-c 1", "--critic.lr 0", "--critic.ppo-mini-batch-size 0 --critic megatron",
    f"--seed {HUGE}", f"--steps {HUGE}", "--reward-timeout 1e9", "--kl-coef 1e300",
    "--temperature 1e-9", f"--rollout-batch-size {HUGE}", f"--max-response-length {HUGE}",
    f"--max-turns {HUGE}", "--rollout-n 1000000", "--actor.lr 1e300", "--actor.tis-cap 1e300",
    f"--actor.ppo-epochs {HUGE}",
])  # fmt: skip
def test_a_number_out_of_range_is_named(flags, capfd):
    """By its group, its field and its range."""
    flag, *_ = flags.split()
    group, _, name = flag.removeprefix("--").rpartition(".")
    field = f" {name.replace('-', '_')} Input should be "
    with refused_in_a_box(capfd, group or "Run", field):
        ppo_loop.parse(flags.split())


BASE = "--share-base --critic.model actor"
LORA = "--actor.lora-rank 2 --critic.lora-rank 2"


@pytest.mark.parametrize("flags, words", [
    ("--critic.value-head bounded --critic.value-range 2 1", "--critic.value-range 2.0 1.0: LOW"),
    ("--critic.ppo-max-token-len-per-gpu auto", "auto: leaves the actor no memory"),
    ("--prompts x.jsonl", "--prompts x.jsonl: needs --reward or --reward-model"),
    ("--eval-prompts x.jsonl", "--eval-prompts x.jsonl: needs --prompts"),
    ("--reward gsm8k --reward-model rm", "--reward gsm8k: excludes --reward-model rm"),
    ("--target-kl 0.1", "--target-kl 0.1: adapts --kl-coef"),
    (f"{BASE} --critic.freeze-modules embed", "--critic.freeze-modules embed: is about a base"),
    (f"{BASE} {LORA} --critic.freeze-modules ^model", "--critic.freeze-modules ^model: is about a"),
    ("--old-log-probs engine --top-p 0.9", "--old-log-probs engine: with --top-p 0.9"),
    ("--whiten noise --top-p 0.9", "--whiten noise: with --top-p 0.9"),
    ("--critic.value-weights noise --top-p 0.5", "--critic.value-weights noise: with --top-p 0.5"),
])  # fmt: skip
def test_flags_that_do_not_go_together_are_named(flags, words, capfd):
    with refused_in_a_box(capfd, words) as told:
        ppo_loop.parse(flags.split())
    assert "input_value" not in told[0] and "http" not in told[0]  # pydantic's own words


def test_ranks_of_an_actor_share_packed_rows_only():
    run = ppo_loop.parse("--actor.ulysses-size 2 --actor.no-use-remove-padding".split())
    with pytest.raises(UserError, match="--actor.ulysses-size 2: needs packed rows; drop --actor"):
        ppo_loop.check_layout(run)


@pytest.mark.parametrize("flags", [
    "--max-turns 9 --environment x.py:f --reward-timeout 0", "--kl-penalty k3 --kl-coef 0.1",
    "--kl-penalty k3 --actor.kl-loss-coef 0.1 --actor.kl-loss-type k1", "--max-turns 8",
    "--reward x.py:f --reward-timeout 0", "--rollout vllm --vllm.tensor-parallel-size 2",
    "--critic.lora-rank 2 --critic.lora-alpha 8", "--critic.fsdp-size 1",
    "--prompts x --reward-model x --chat-template-kwargs {}{}",
    "--reward-model x --critic.lora-rank 2 --critic.lora-alpha 8",
])  # fmt: skip
def test_flags_that_need_others_are_taken_with_them(flags):
    run = ppo_loop.parse(flags.split())
    if run.reward_model:
        ppo_loop.reward_config(run)  # it has no LoRA, whatever the critic has


@pytest.mark.parametrize("named, flags", [
    ("--critic.value-range", "--critic.value-head bounded"), ("--prompts", "--privileged-key x"),
    *((flags.split()[0], flags) for flags in (  # prompts have 6 tokens and responses 8
    "--prompts x.jsonl --reward gsm8k", "--reward nothing.py:f", "--environment nothing.py:f",
    "--actor.override-config {", "--actor.model tiny-qwen7", "--actor.tokenizer /none",
    "--actor.ppo-max-token-len-per-gpu 13", "--critic.ulysses-size 3", "--critic.model tiny-qwen7",
    "--critic.ppo-max-token-len-per-gpu 13", "--critic.forward-max-token-len-per-gpu 13",
    "--actor.forward-max-token-len-per-gpu 13",
    '--critic.model tiny-gpt2 --critic.override-config {"vocab_size":50}',
    '--critic.model tiny-gpt2 --critic.override-config {"n_positions":13}',
    '--actor.model tiny-llama --actor.override-config {"max_position_embeddings":13}',
    # it has no value head
    "--reward-model /none", "--reward-model lm",
    *(["--vllm.tensor-parallel-size 2 --rollout vllm"] if importlib.util.find_spec("vllm") else
      ["--rollout vllm --vllm.tensor-parallel-size 2"]),
    "--prompts rows.jsonl --chat --reward mine.py:f",
    "--critic.tokenizer words",
))])  # fmt: skip
def test_a_bad_flag_is_one_line_that_names_it(named, flags, parse, tmp_path, monkeypatch):
    """These are found only with the models, the ranks or the files at hand."""
    monkeypatch.chdir(tmp_path)
    if "--reward-model lm" in flags:
        policy().export_hf(tmp_path / "lm", TOKENIZER)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    (tmp_path / "mine.py").write_text("def f(prompt, response, answer):\n    return 1")
    another_tokenizer().save_pretrained(tmp_path / "words")
    with pytest.raises(UserError, match=rf"^{named}(?![\w-])[^\n]*\Z"):
        ppo_loop.main(parse(flags))


@pytest.mark.megatron
def test_valid_flags_are_accepted(parse, tmp_path, capsys):
    """Budgets that just fit; what the critic inherits from the actor."""
    set_up = lambda flags: ppo_loop.set_up(parse(flags))
    for backend in ("fsdp", "megatron"):
        budgets = "--actor.ppo-max-token-len-per-gpu 14 --critic.ppo-max-token-len-per-gpu 14"
        run, task = set_up(f"--critic {backend} {budgets} --kl-coef 0.1 --target-kl 0.1")
        assert (task.longest, task.stop_ids) == (14, [EOS])

    # steps of 20 prompts, 3 mini-batches
    sizes = "--train-batch-size 32 --critic.ppo-mini-batch-size 8"
    run, task = set_up(f"--actor.model tiny-llama --kl-coef 0.1 {sizes}")
    for p in task.prompts + task.held_out:
        assert sum(map(int, p.text[:-1].split("+"))) == int(p.answer) and p.ids == ids_of(p.text)
    assert not {p.text for p in task.prompts} & {p.text for p in task.held_out}
    assert run.critic.model == run.actor.model == "tiny-llama"
    assert task.model_config.model_type == "llama"
    told = (run.actor.lr, run.critic.lr, run.max_response_length, run.reward)
    assert told == (5e-4, 1e-3, 8, "addition")
    start = types.SimpleNamespace(folder=None, halvings=0)
    _, _, critic, *_ = ppo_loop.build(run, task, common.setup_distributed(), start)
    assert critic.critic.total_steps == 60 * 3
    (file := tmp_path / "x.jsonl").write_text('{"prompt": "1+1=", "answer": "#### 2"}')
    assert "answers " not in capsys.readouterr().out

    models = "--actor.model tiny-llama --critic.model tiny-gpt2"
    run, _ = set_up(f"{models} --prompts {file} --reward gsm8k")
    assert "answers " not in capsys.readouterr().out
    assert (run.actor.lr, run.max_response_length, run.reward) == (1e-6, 256, "gsm8k")
    assert run.critic.model == "tiny-gpt2" and run.critic.lr is None

    file.write_text('{"prompt": "1+1="}\n{"prompt": "1+2=", "answer": "3"}')
    set_up(f"--prompts {file} --reward-model tiny-llama")
    assert "\nanswers    1 of 2 prompts have no 'answer'\n" in capsys.readouterr().out
