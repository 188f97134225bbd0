"""ppo_loop.py on one process: policy loss, actor, rollout, environment, rewards, advantages,
prompts, flags.

Results are compared with plain loops over scalars, or with transformers on one unpacked row at a
time."""

import asyncio
import collections
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import threading
import time
import types
from functools import partial

import numpy
import pytest
import torch
import transformers
from helpers import (
    SHARED,
    actions_of,
    captured_gradients,
    full_tensor,
    help_of,
    random_batch,
    refused,
)
from ppo_helpers import (
    EOS,
    KINDS,
    SHARP,
    TIED,
    TOKENIZER,
    a_run,
    a_task,
    another_tokenizer,
    assert_close,
    assert_drawn_from_the_nucleus,
    assert_drawn_from_the_softmax,
    assert_greedy,
    assert_no_fillers,
    assert_samples_follow_their_seeds,
    assert_stops,
    batch_of,
    batch_to_learn,
    chat_tokenizer,
    engine_of,
    ids_of,
    plain,
    play,
    policy,
    rows_to_stop,
    some_prompts,
    stop_texts_of,
    tied,
)
from reference import WINDOW, kl_of, log_probs_of_reply, loss_by_hand, loss_of_one_action, nucleus
from safetensors.torch import load_file

import common
import critic_fsdp
import ppo_loop
from common import UserError
from ppo_loop import ActorConfig, PolicyWorker, Prompt, Reply

# ---- Actor ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("low, high, dual", [(0.1, 0.5, None), (0.3, 0.2, 1.5), (1.0, 0.28, 3.0)])
def test_policy_loss_is_that_of_the_papers(low, high, dual):
    """Its value, gradient and counts equal a loop over the actions, some of which have a ratio of
    exactly 1. Masked entries may be NaN, and the policies may be 200 nats apart."""
    g = torch.Generator().manual_seed(3)
    new_T, step_T, a_T, weights_T = torch.randn(4, 400, generator=g, dtype=torch.float64)
    mask_T = torch.rand(400, generator=g) < 0.7
    step_T[:50] = 0
    old_T = new_T + step_T
    weights_T = weights_T.abs() * mask_T
    actions = torch.stack([new_T - old_T, a_T], 1)[mask_T].tolist()
    expected = [loss_of_one_action(math.exp(step), a, low, high, dual) for step, a in actions]
    loss, slope, clipped, cut = torch.tensor(expected, dtype=torch.float64).T
    assert clipped.sum() > 20 and (cut.sum() > 5) == (dual is not None)  # the cases occur
    for x_T in (new_T, old_T, a_T):
        x_T[~mask_T] = math.nan
    new_T.requires_grad_()
    ours, n_clipped, n_cut = ppo_loop.policy_loss(
        new_T, old_T, a_T, mask_T, weights_T, low, high, dual
    )
    ours.backward()
    assert ours.item() == pytest.approx((weights_T[mask_T] * loss).sum().item(), rel=1e-12)
    torch.testing.assert_close(
        new_T.grad[mask_T], weights_T[mask_T] * slope, rtol=1e-12, atol=1e-14
    )
    assert (new_T.grad[~mask_T] == 0).all()
    assert (n_clipped, n_cut) == (clipped.sum(), cut.sum())

    new_T = torch.tensor([-200.0, 0.0], requires_grad=True)
    columns = (
        new_T,
        new_T.detach().flip(0),
        torch.tensor([1.0, -1.0]),
        torch.ones(2).bool(),
        torch.ones(2),
    )
    loss, _, _ = ppo_loop.policy_loss(*columns, low, high, dual)
    loss.backward()
    assert loss.isfinite() and new_T.grad.isfinite().all()


@pytest.mark.parametrize("kind, temperature, fields", [
    ("tiny-qwen2", 1.0, dict(kl_loss_coef=0.1, kl_loss_type="abs", ratio_band=(0.8, 1.3))),
    ("tiny-qwen2", 0.7, dict(loss_agg_mode="seq-mean-token-sum", entropy_coeff=0.1, clip_ratio_c=None)),
    ("tiny-llama", 0.7, dict(loss_agg_mode="seq-mean-token-mean", kl_loss_coef=0.3, clip_ratio_high=0.4)),
    ("tiny-gemma2", 0.7, dict(kl_loss_coef=0.3, kl_loss_type="k3", entropy_coeff=0.05, tis_cap=1.3)),
    ("tiny-gpt2", 0.7, dict(loss_agg_mode="seq-mean-token-sum-norm", kl_loss_coef=0.2, kl_loss_type="k1")),
    ("tiny-qwen3-moe", 0.7, dict(kl_loss_coef=0.2, kl_loss_type="abs", clip_ratio_c=1.2)),
])  # fmt: skip
def test_the_actor_does_what_transformers_does_row_by_row(kind, temperature, fields, monkeypatch):
    """Log-probs, entropies and a step over several micro-batches are those of autograd in float64.
    The head makes one chunk of logits at a time, and keeps none. A reference without optimizer has
    equal log-probs."""
    monkeypatch.setattr(ppo_loop, "LOGITS_AT_ONCE", 5 * 99)
    fields = {"ppo_max_token_len_per_gpu": 90, **fields}
    w = policy(kind, temperature, **fields)
    assert tied(w.model.lm) == (kind in TIED)  # also after sharding
    batch = batch_to_learn(w, seed=1)
    rows = common.describe(batch)
    assert len(w.plan_micro_batches(rows)[0]) > 1
    assert sum(common.costs(common.by_prompt(rows))) < len(batch.input_ids)
    lm = plain(w, torch.float64)
    loss, sums, expected_T, entropy_T = loss_by_hand(lm, batch, w.run)
    assert entropy_T[batch.response_mask].std() > 0.05  # positions differ
    log_probs_T = w.compute_log_probs(batch)
    with torch.no_grad():
        together_T, ours_T = w.model(w.micro_batch(batch), temperature)
    for ours, theirs in ((log_probs_T, expected_T), (together_T, expected_T), (ours_T, entropy_T)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)
    reference = policy(kind, temperature, trains=False, **fields)
    assert reference.optimizer is None and not any(
        p.requires_grad for p in reference.model.parameters()
    )
    assert torch.equal(log_probs_T, reference.compute_log_probs(batch))

    loss.backward()
    made, kept = set(), set()
    head = w.model.lm.get_output_embeddings()
    head.register_forward_hook(lambda head, args, out: made.add(tuple(out.shape)))
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.add(tuple(x.shape)) or x, lambda x: x
    )
    with hooks, captured_gradients(w) as seen:
        metrics = w.update_policy(batch)
    assert max(made) == (5, 99)
    # the head
    assert kept and not [shape for shape in kept if shape[-1:] == (99,) and shape != (64, 99)]
    [ours] = seen
    for name, p in lm.named_parameters():
        atol = 1e-5 * max(float(p.grad.abs().max()), 1e-3)
        torch.testing.assert_close(
            ours[f"lm.{name}"].double(), p.grad, rtol=1e-4, atol=atol, msg=name
        )
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in lm.parameters()))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["actor/pg_clipfrac"] > 0.05  # some actions are clipped
    assert ("ratio_band" in fields) == (metrics["actor/pg_outside"] > 0.05)
    for key, x in sums.items():
        assert metrics[f"actor/{key}"] == pytest.approx(x, rel=1e-4, abs=1e-6), key

    monkeypatch.setattr(ppo_loop, "LOGITS_AT_ONCE", 10**6)
    whole = policy(kind, temperature, **{**fields, "ppo_max_token_len_per_gpu": 10_000})
    assert len(whole.plan_micro_batches(rows)[0]) == 1
    with captured_gradients(whole) as seen:
        whole.update_policy(batch)
    for name, x in seen[0].items():
        if x.norm() > 1e-5 * norm:  # else all of it is rounding
            assert (ours[name] - x).norm() / x.norm() < 2e-6, name


# ---- Rollout: engine, turns with an environment --------------------------------------------------


# with a sliding window the cache drops old keys, and left padding shifts the window
ENGINES = dict.fromkeys((*KINDS, "tiny-gpt-oss"), SHARP)
ENGINES |= dict.fromkeys(("tiny-gemma2", "tiny-mistral"), WINDOW)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_rollout_equals_transformers_prompt_by_prompt(kind, monkeypatch):
    """Greedy tokens, and log-probs, also of sampled tokens and of the actor. A row ends only at a
    stop token or at its length limit, and its sample depends on nothing but its seed."""
    monkeypatch.setitem(
        common.TINY, "tiny-gpt-oss", {"num_local_experts": 4, "num_experts_per_tok": 2}
    )
    w = policy(kind, temperature=0.7, override_config=ENGINES[kind])
    lm = plain(w)
    stop = list(range(1, 99, 6))  # one token in six ends a row
    rows = [(prompt, i, 1 + i % 14) for i, prompt in enumerate(some_prompts())]
    engine = engine_of(w, stop)
    replies = engine.generate(rows, 0.0)
    assert_greedy(replies, lm, rows, stop)
    engine.offload()
    engine.onload()
    assert engine.generate(rows, 0.0) == replies
    assert len({(ended, len(ids) == row[2]) for row, (ids, _, ended) in zip(rows, replies)}) >= 2
    rows = [(prompt, seed, 10) for prompt, seed, _ in rows]
    replies = engine.generate(rows, 0.7)
    batch = batch_of([prompt for prompt, _, _ in rows], replies)
    ours_T = w.compute_log_probs(batch)
    torch.testing.assert_close(ours_T, batch.rollout_log_probs, rtol=1e-4, atol=1e-4)
    for (prompt, _, _), (ids, log_probs, _) in zip(rows, replies):
        assert_close(log_probs, log_probs_of_reply(lm, prompt, ids, 0.7))

    assert_samples_follow_their_seeds(engine_of(w, range(1, 99, 12)))
    endless = engine_of(w, ())
    assert [(len(ids), ended) for ids, _, ended in endless.generate(rows, 1.0)] == [(10, False)] * 9
    assert endless.generate([], 1.0) == []


@pytest.mark.parametrize("tokenizer", [TOKENIZER, "of several letters, or parts of one"])
def test_a_text_ends_a_turn(tokenizer):
    """Whatever its tokens are. What the prompt holds of it does not count, and other rows stay the
    same."""
    if tokenizer != TOKENIZER:
        tokenizer = another_tokenizer()
    known = len(tokenizer)
    w = policy(override_config=json.dumps({"initializer_range": 0.1, "vocab_size": known}))
    rows = rows_to_stop(tokenizer)
    engine, stops = (engine_of(w, known=known, at_once=16) for _ in range(2))
    texts = stop_texts_of(tokenizer, rows, engine.generate(rows, 0.9))
    stops.task = stops.task._replace(
        stop_texts=ppo_loop.stop_texts(a_run(stop=tuple(texts)), tokenizer)
    )
    assert_stops(engine, stops, tokenizer, texts, rows)


def test_a_text_that_the_tokenizer_cannot_write_is_refused():
    assert ppo_loop.stop_texts(a_run(), TOKENIZER) == []
    with refused("--stop a\u00e9: does not fit the tokenizer"):
        ppo_loop.stop_texts(a_run(stop=("b", "a\u00e9")), TOKENIZER)


def test_samples_follow_the_softmax_or_its_nucleus():
    """1,000 evenly spaced random numbers draw each token as often as a loop over the probabilities
    says. So does the engine, up to the sampling error of 6,000 samples."""
    u_BR = ((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)[:, None]
    for logits_V in (
        torch.tensor([3.0, 1.0, 2.0, 2.1, -1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0]),
    ):
        for top_p in (1e-6, 0.3, 0.5, 0.6, 0.9, 0.999):
            draw = ppo_loop.Draw(u_BR, 0.8, top_p, 5)
            out_BV = draw(torch.zeros(1000, 1, dtype=torch.int64), logits_V.expand(1000, 5))
            assert (out_BV.isfinite().sum(1) == 1).all()
            token_B = out_BV.argmax(1)
            expected = nucleus((logits_V / 0.8).log_softmax(0), top_p)
            for i in range(5):
                share = math.exp(expected[i]) if i in expected else 0.0
                assert abs(float((token_B == i).double().mean()) - share) <= 1e-3, (top_p, i)
            assert_close(draw.log_probs[0][:, 0].tolist(), [expected[i] for i in token_B.tolist()])
    w = policy()
    rows = [([20, 30, 40], i, 1) for i in range(6000)]
    replies = engine_of(w, at_once=400, top_p=0.7).generate(rows[:400], 0.8)
    assert_drawn_from_the_nucleus(replies, plain(w), [20, 30, 40], 0.8, 0.7)
    assert_drawn_from_the_softmax(
        engine_of(w, at_once=2000).generate(rows, 0.8), plain(w), [20, 30, 40]
    )


def test_policy_and_environment_take_turns():
    """Tokens, masks and log-probs of two rows, one with an observation, equal those written out
    here."""
    heard = []

    def observe(prompt, response, answer, turns):
        heard.append((prompt, response, answer, *turns))
        return {"ab": "[1]", "ab[1]cd": None, "x": None}[response]

    (a, b), asked = play([["ab", "x"], ["cd"]], observe)
    assert a.ids == [*ids_of("ab"), EOS, *ids_of("[1]cd"), EOS] and b.ids == [*ids_of("x"), EOS]
    assert a.log_probs == [-0.5] * 3 + [None] * 3 + [-0.5] * 3 and b.log_probs == [-0.5] * 2
    assert [(r.finished, r.text, r.fault) for r in (a, b)] == [
        (True, "ab[1]cd", ""),
        (True, "x", ""),
    ]
    assert sorted(heard[:2]) == [("q0=", "ab", "answer 0", "ab"), ("q1=", "x", "answer 1", "x")]
    assert heard[2:] == [("q0=", "ab[1]cd", "answer 0", "ab", "[1]", "cd")]
    first, second, third = (
        random.Random(f"key {x}").getrandbits(63) for x in ("4 0", "6 0", "4 1")
    )
    assert asked == [[("q0=", first, 30), ("q1=", second, 30)], [("q0=ab<eos>[1]", third, 24)]]
    batch = common.check(ppo_loop.to_batch([a, b]))
    mask = [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3 + [True] * 2
    assert batch.response_mask.tolist() == mask
    assert batch.rollout_log_probs.tolist() == [-0.5 if chosen else 0.0 for chosen in mask]
    assert batch.input_ids.tolist() == [*ids_of("q0="), *a.ids, *ids_of("q1="), *b.ids]
    assert batch.lengths == [12, 5]
    assert batch.row_id.tolist() == [4, 6] and batch.truncated.tolist() == [False, False]


@pytest.mark.parametrize("turns, fields, text, finished", [  # finished: not cut off
    ([["abcdef"]], dict(max_response_length=4), "abcd", False),  # the turn itself does not fit
    # the observation leaves no room for a turn
    ([["abc"]], dict(max_response_length=7), "abc", False),
    ([["abc"], ["d..."]], dict(max_response_length=8), "abc[1]d", False),  # it leaves one token
    ([["abc"], ["d"]], dict(max_response_length=9, max_turns=2), "abc[1]d", True),
    ([["a"], ["b"], ["c"]], dict(max_response_length=30, max_turns=3), "a[1]b[1]c", True),
])  # fmt: skip
def test_a_row_ends_at_the_limit_of_tokens_or_turns(turns, fields, text, finished):
    calls = []
    [reply], asked = play(turns, lambda *_: calls.append(1) or "[1]", **fields)
    assert (reply.text, reply.finished, reply.fault, len(asked)) == (text, finished, "", len(turns))
    assert len(calls) <= fields.get("max_turns", 9) - 1  # it is not asked after the last turn
    assert len(reply.ids) == len(reply.log_probs) <= fields["max_response_length"]
    [reply], asked = play(turns, None, **fields)  # without an environment there is one turn
    assert len(asked) == 1 and reply.text == turns[0][0][: fields["max_response_length"]]
    assert None not in reply.log_probs


@pytest.mark.parametrize("turns, says, fields, mean, most", [
    ([["ab...", "a"], ["b"]], "[1]", {"max_response_length": 9}, 1.5, None),
    ([["ab...", "cd...", "a"]], None, {"max_response_length": 2}, 1, "reached --max-response-length, but"),
    ([["ab", "ab", "a..."]], "[1]", {"max_response_length": 5}, 1, "left no room for the environment"),
    ([["ab", "ab", "a..."]], None, {}, 1, "were ended by the environment, or by --max-turns"),
])  # fmt: skip
def test_turns_are_counted_and_a_lack_of_them_is_explained_once(
    turns, says, fields, mean, most, capsys
):
    replies, _ = play(turns, lambda *_: says, **fields)
    run = a_run(**{"max_response_length": 30, **fields})
    ppo_loop.print_once.cache_clear()
    capsys.readouterr()
    for _ in range(2):
        assert ppo_loop.mean_turns(replies, run, a_task(observe=print)) == {"rollout/turns": mean}
    said = capsys.readouterr().out.splitlines()
    assert len(said) == (most is not None)
    assert most is None or said[0].startswith(
        f"hint       no row of a step had a second turn: most {most}"
    )
    assert ppo_loop.mean_turns(replies, run, a_task()) == {}


def test_an_environments_faults_end_the_row_and_are_reported():
    does = [lambda: {}["tool"], lambda: 5, lambda: b"no", lambda: None]
    replies, asked = play([list("abcd")], lambda prompt, *_: does[int(prompt[1])]())
    assert (
        [r.text for r in replies] == list("abcd")
        and len(asked) == 1
        and all(r.finished for r in replies)
    )
    words = ("KeyError: 'tool'", "not 5", "float: b'no'", "")
    assert (
        all(word in reply.fault for word, reply in zip(words, replies)) and replies[3].fault == ""
    )


@pytest.mark.parametrize("closes", (True, False))
def test_a_chat_with_an_environment_follows_the_template(closes):
    """All tokens of a dialogue of three turns are those of the chat template for its messages,
    whether or not the template begins the text between turns with the token that ended the policy's
    turn."""
    tokenizer = chat_tokenizer("<eos>" if closes else "")
    says = iter(("no 1", "no 2", None))
    user = [{"role": "user", "content": "hi"}]
    prompt = Prompt(common.chat_ids(tokenizer, user), "hi", "yes", user)
    turns = [["a?"], ["b?"], ["c?"]]
    [reply], _ = play(turns, lambda *_: next(says), [prompt], tokenizer, max_response_length=99)
    assert reply.turns == ["a?", "no 1", "b?", "no 2", "c?"]  # without the template's own text
    roles = zip(["assistant", "user"] * 3, reply.turns)
    chat = user + [{"role": role, "content": text} for role, text in roles]
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    text = tokenizer.decode(reply.prompt.ids + reply.ids)
    if not closes:  # the policy ends its turns with a token that is not in the template
        text = text.replace("<eos>", "")
        whole = whole.replace("?\n", "?")
    assert text == whole.removesuffix("\n") and [*says] == []  # all of them were asked for
    own = [i for i, x in zip(reply.ids, reply.log_probs) if x is not None]
    assert tokenizer.decode(own) == "a?<eos>b?<eos>c?<eos>"
    # it would lose what the environment says
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(UserError, match="--environment: needs a chat template"):
        play(turns, lambda *_: "no", [prompt], tokenizer, max_response_length=99)


# ---- Rewards, advantages -------------------------------------------------------------------------


def test_addition_and_gsm8k_rewards():
    assert [ppo_loop.addition_reward("1+2=", x, "3") for x in ("3", "4", "", "3 ", "03")] == [
        1,
        0,
        0,
        0,
        0,
    ]
    wrongs = [
        "#### 5 no,\n#### 3",
        "the answer is 5",
        "#### five",
        "#### ,",
        "####",
        "####" + " " * 20_000,
    ]
    for answer, right, wrong in (
        ("#### 5", ["#### 3 no,\n#### 5", "#### 5 apples", "####5", "#### 5%"], ["", *wrongs]),
        ("...\n#### 18", ["so it is\n#### 18", "#### 18.00", "#### 18."], ["#### 19"]),
        ("#### 1,234", ["#### 1234", "#### $1,234"], ["#### 1"]),
        ("#### 1234", ["#### 1,234"], ["#### 234"]),
        ("#### -7", ["#### -$7", "#### $-7"], ["#### 7"]),
        ("#### 0.5", ["#### .5"], ["#### 5"]),
    ):
        assert all(ppo_loop.gsm8k_reward("", x, answer) == 1 for x in right), answer
        assert all(ppo_loop.gsm8k_reward("", x, answer) == 0 for x in wrong), answer


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs the development data in {SHARED}")
def test_gsm8k_agrees_with_its_authors():
    """Its verdicts on published solutions equal the authors' labels; a reference answer matches
    itself."""
    agrees = []
    for line in open(SHARED / "data" / "gsm8k" / "example_model_solutions.jsonl"):
        row = json.loads(line)
        truth = row.pop("ground_truth")
        theirs = [(x["solution"], x["is_correct"]) for key, x in row.items() if key != "question"]
        for text, label in [(truth, True), *theirs]:
            text, answer = (x.replace("A:", "####") for x in (text, truth))
            agrees.append(ppo_loop.gsm8k_reward("", text, answer) == label)
    assert len(agrees) == 5 * 1319 and all(agrees)


FUNCTIONS = """
import contextlib, os, signal, sys, time

def odd(prompt, response, answer, turns):
    if prompt == "spins":  # it catches everything and switches alarms off
        signal.setitimer(signal.ITIMER_REAL, 0)
        while True:
            with contextlib.suppress(BaseException):
                sum(range(1000))
    return {"raises": lambda: {}["x"], "exits": lambda: sys.exit("enough"), "dies": lambda: os._exit(3),
            "sleeps": lambda: time.sleep(30), "program": lambda: os.system("sleep 30"), "pid": os.getpid,
            "modules": lambda: " ".join(sys.modules), "stdin": lambda: sys.stdin.read(),
            "turns": lambda: "/".join(turns)}.get(prompt, lambda: prompt + response + answer)()

def meets(prompt, response, answer):
    open(prompt, "w").close()
    while len(os.listdir(os.path.dirname(prompt))) < 8:
        time.sleep(0.01)
    return 8
"""


@pytest.fixture
def ask(tmp_path):
    """Runs ask_all with a function of FUNCTIONS on rows with these prompts and this answer."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)

    def go(name, prompts, answer=None, seconds=20.0):
        function = ppo_loop.load_function(f"{tmp_path}/mine.py:{name}", "--reward", seconds)
        rows = [Prompt([1], prompt, answer) for prompt in prompts]
        replies = [Reply(row, i, text="r", turns=["r", "o"]) for i, row in enumerate(rows)]
        return ppo_loop.ask_all(function, replies)

    return go


def test_a_users_function_runs_in_processes_that_are_killed_when_they_hang(ask):
    """Answers keep the order of the rows, also of those that wait for a new process. Nothing a
    function does switches the time-out off, workers import nothing slow, and child programs do not
    read the rows."""
    rows = [
        "raises",
        "spins",
        "pid",
        "sleeps",
        "dies",
        "exits",
        "program",
        "modules",
        "stdin",
        "turns",
    ]
    answers = ask("odd", rows := rows + ["pid"] * 9, seconds=1.5)
    late = (None, "no answer within 1.5 s, or its process has died")
    pids = {made for row, (made, fault) in zip(rows, answers) if row == "pid" and fault == ""}
    assert 1 <= len(pids) <= 16 and os.getpid() not in pids
    named = dict(zip(rows, answers))
    assert [named[row] for row in ("spins", "sleeps", "dies", "program")] == [late] * 4
    line = 1 + FUNCTIONS.partition("{}[")[0].count("\n")
    assert named["raises"] == (None, f"KeyError: 'x' at mine.py:{line} in <lambda>")
    assert named["exits"] == (None, f"SystemExit: enough at mine.py:{line} in <lambda>")
    assert named["stdin"] == ("", "") and named["turns"] == ("r/o", "")
    modules = named["modules"][0].split()
    assert "mine" in modules
    assert not {"torch", "numpy", "pydantic", "common", "ppo_loop"} & set(modules)
    assert ask("odd", [f"{n}" for n in range(40)], "!") == [(f"{n}r!", "") for n in range(40)]


def test_a_signal_interrupts_a_users_function(ask, monkeypatch):
    """Rows that would take half a minute each are abandoned; only their threads go on."""
    monkeypatch.setattr(ppo_loop, "THREADS", ppo_loop.ThreadPoolExecutor(8))
    monkeypatch.setattr(common.Stop, "signal", 0)
    threading.Timer(1.0, lambda: setattr(common.Stop, "signal", signal.SIGTERM)).start()
    began = time.monotonic()
    assert ask("odd", ["sleeps"] * 20, seconds=60.0) == [] and time.monotonic() - began < 20


def test_rows_run_at_once_in_processes_or_threads(ask, tmp_path, monkeypatch):
    """Eight rows that wait for each other run at once, on any number of cores; built-in rewards run
    here."""
    (tmp_path / "here").mkdir()
    assert ask("meets", [f"{tmp_path}/here/{n}" for n in range(8)]) == [(8, "")] * 8
    all_there = threading.Barrier(8)
    replies = [Reply(Prompt([1], f"{i}"), i) for i in range(8)]
    meets = lambda prompt, response, answer: (all_there.wait(60), prompt)[1]
    answers = ppo_loop.ask_all(partial(ppo_loop.attempt, meets), replies)
    assert answers == [(f"{i}", "") for i in range(8)]
    monkeypatch.setitem(ppo_loop.REWARDS, "thread", lambda *_: threading.current_thread().name)
    assert ppo_loop.ask_all(ppo_loop.REWARDS["thread"], replies) == [("MainThread", "")] * 8


def test_a_reward_that_is_not_a_number_is_a_fault_and_counts_as_0(capsys):
    """As does a fault of the environment before it. If all rows fail, the run ends."""
    says = [
        1,
        0.25,
        numpy.True_,
        8,
        None,
        math.nan,
        math.inf,
        "x",
        [1],
        10**5000,
        numpy.float16("inf"),
    ]
    replies = [Reply(Prompt([1], f"p{i}", i), i, text=f"r{i}") for i in range(len(says))]
    replies[3].fault = "died"
    heard = []
    function = partial(
        ppo_loop.attempt, lambda prompt, said, i: heard.append((prompt, said)) or says[i]
    )
    score = lambda some: ppo_loop.score(a_run(), function, ppo_loop.Phases(False), some)
    rewards, mean, faults = score(replies)
    assert sorted(heard) == sorted((f"p{i}", f"r{i}") for i in range(len(says)))
    scores = [reply.score for reply in replies]
    assert scores == rewards == [1, 0.25, 1] + [0] * 8
    assert (
        faults == 8 and mean == pytest.approx(2.25 / 11) and all(type(x) is float for x in scores)
    )
    assert not any(r.fault for r in replies[:3]) and all(r.fault for r in replies[3:])
    assert replies[3].fault == "died"
    assert "8 rows failed and count as 0: died" in capsys.readouterr().out
    with pytest.raises(UserError, match="--environment: all 8 rows failed: died"):
        score(replies[3:])


def test_a_function_that_cannot_be_loaded_is_named_by_its_flag(tmp_path):
    file = tmp_path / "mine.py"
    load = lambda name: ppo_loop.load_function(name, "--environment", 10.0)
    good = "from os import path\nx = 3\n\ndef helper(): pass\n\n"
    good += "def good(prompt, response, answer):\n    return len(response) * x\n"
    file.write_text(good)
    assert load(f"{file}:good")("", "abc", None) == (9, "")
    assert load("gsm8k") is ppo_loop.gsm8k_reward and load(None) is None
    unprintable = "class Mute(Exception):\n    __str__ = None\nraise Mute"
    for text, name, words in (
        (good, f"{file}:god", f"{file} has no function 'god'; it has good, helper"),
        (good, f"{file}:help", f"{file} has no function 'help'; it has helper, good"),
        (good, f"{file}:x", f"{file} has no function 'x'; it has "),
        ("", f"{file}:x", f"{file} has no function 'x'; it has none"),
        (good, f"{file}", "must be FILE.py:FUNCTION"),
        (good, f"{tmp_path}/none.py:good", "No such file"),
        (good, f"{tmp_path}:good", "is not a Python file"),
        (good, "math", "must be FILE.py:FUNCTION"),
        (
            "\nimport nothing_like_this",
            f"{file}:good",
            "'nothing_like_this' at mine.py:2 in <module>",
        ),
        ("def f():\n    1 / 0\nf()", f"{file}:good", "division by zero at mine.py:2 in f"),
        ("def good(:", f"{file}:good", "SyntaxError: invalid syntax (mine.py, line 1)"),
        ("import sys; sys.exit('no key')", f"{file}:good", "SystemExit: no key at mine.py:1"),
        ("import os; os._exit(0)", f"{file}:good", "its process has died"),
        (unprintable, f"{file}:good", "Mute: its text cannot be made"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=re.escape(f"--environment {name}: ")) as caught:
            load(name)
        assert words in str(caught.value) and "\n" not in str(caught.value)


FORKS = """
import asyncio, ctypes, os, signal, sys, threading, time

ENDS = {"returns": lambda: 7, "raises": lambda: {}["x"], "exits": lambda: sys.exit(3),
        "leaves": lambda: sys.exit(), "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL)}

def forks(prompt, response, answer, fork=os.fork):
    child = fork()
    if child == 0:
        return ENDS[answer]()
    return 100 * int(prompt) + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def forks_in_c(prompt, response, answer):
    return forks(prompt, response, answer, ctypes.PyDLL(None).fork)

async def forks_later(prompt, response, answer):
    await asyncio.sleep(0)
    return forks(prompt, response, answer)

def dies(prompt, response, answer):
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)

def dies_later(prompt, response, answer):
    threading.Timer(0.1, os._exit, [0]).start()
    return prompt
"""


@pytest.mark.parametrize("name", ["forks", "forks_in_c", "forks_later"])
@pytest.mark.parametrize("end, status", [
    ("returns", 0), ("raises", 1), ("exits", 3), ("leaves", 0), ("is killed", -9)
])  # fmt: skip
def test_a_child_that_a_function_forks_answers_no_row(name, end, status, ask, tmp_path):
    """However it ends: every row gets its own answer, and the function sees how its child ended."""
    (tmp_path / "mine.py").write_text(FORKS)
    answers = ask(name, [f"{n}" for n in range(24)], end)
    assert answers == [(100.0 * n + status, "") for n in range(24)]


def test_a_worker_that_dies_is_noticed_though_its_child_holds_the_pipe(ask, tmp_path):
    """At once and not after the time of a row, and while the file is imported as well."""
    (tmp_path / "mine.py").write_text(FORKS)
    began = time.monotonic()
    late = (None, "no answer within 50 s, or its process has died")
    assert ask("dies", ["x"], seconds=50.0) == [late]
    (tmp_path / "mine.py").write_text(f"{FORKS}\ndies(1, 2, 3)\n")
    with pytest.raises(UserError, match="its process has died"):
        ask("dies", ["x"])
    assert time.monotonic() - began < 30


def test_a_worker_that_dies_between_two_rows_fails_at_most_the_next_one(tmp_path):
    (tmp_path / "mine.py").write_text(FORKS)
    f = ppo_loop.load_function(f"{tmp_path}/mine.py:dies_later", "--reward", 20.0)
    late = (None, "no answer within 20 s, or its process has died")
    assert f("a", "", None) == ("a", "")
    time.sleep(2)
    assert [f(x, "", None) for x in "bc"] == [late, ("c", "")]


MEDDLES = """
import gc, os, time
from multiprocessing.connection import Connection

def meddles(prompt, response, answer):
    [pipe] = [x for x in gc.get_objects() if isinstance(x, Connection)]
    while prompt == "floods":
        pipe.send((-1, (7.0, "")))
        time.sleep(0.01)
    if prompt == "closes":
        os.closerange(3, 100)
    else:
        pipe.send((-1, (7.0, "")))
    return prompt
"""


def test_only_the_answer_to_a_row_counts_and_only_within_its_time(ask, tmp_path):
    """Other messages do not prolong a row. A worker whose pipe is closed has died."""
    (tmp_path / "mine.py").write_text(MEDDLES)
    late = "no answer within {} s, or its process has died"
    assert ask("meddles", ["floods"], seconds=1.5) == [(None, late.format(1.5))]
    answers = ask("meddles", ["a", "closes", *"bcdefghijklmnopqrstuvwxyz"])
    assert answers.pop(1) == (None, late.format(20))
    assert answers == [(x, "") for x in "abcdefghijklmnopqrstuvwxyz"]


MODULE = """
from __future__ import annotations
import multiprocessing, pickle, sys, time, typing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
import pydantic
from common import double

@dataclass
class Number:
    value: int
    after: Number | None = None

class Model(pydantic.BaseModel):
    number: Number

def slow_imports(number):
    return number.value, {"torch", "transformers", "ppo_loop"} & set(sys.modules)

def uses(prompt, response, answer):
    number = pickle.loads(pickle.dumps(Number(int(prompt))))
    assert Model(number={"value": 3}).number == Number(3)
    assert typing.get_type_hints(Number)["after"] == Number | None
    for method in ("fork", "spawn"):
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            assert list(pool.map(slow_imports, [number])) == [(number.value, set())], method
    return double(number.value)
"""


def test_a_users_file_is_a_module_whose_classes_reach_other_processes(ask, tmp_path):
    """Its neighbours come before the script's own common.py. Spawned processes import no torch."""
    (tmp_path / "common.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "mine.py").write_text(MODULE)
    assert ask("uses", ["5", "6"], seconds=60.0) == [(10.0, ""), (12.0, "")]


@pytest.mark.parametrize("stem", ["random", "json", "statistics"])  # loaded, and not loaded
def test_a_users_file_does_not_replace_pythons_module_of_that_name(stem, tmp_path):
    path = tmp_path / f"{stem}.py"
    path.write_text(
        "import importlib, pickle, sys\nclass Mine:\n    pass\n"
        "def told(prompt, response, answer):\n    pickle.loads(pickle.dumps(Mine()))\n"
        "    return importlib.import_module(answer).__file__ + ' ' + Mine.__module__\n"
    )
    told = ppo_loop.load_function(f"{path}:told", "--reward", 20.0)
    found = importlib.util.find_spec(stem).origin
    assert told("", "", stem) == (f"{found} user_{stem}", "")


ASYNC = """
import asyncio, os, sys

SHARED = asyncio.Barrier(1)

async def f(prompt, response, answer, turns=None):
    await SHARED.wait()  # is bound to the first loop that it meets
    await asyncio.sleep(0.05)
    if prompt == "exits":
        sys.exit("enough")
    if prompt == "cancels":
        raise asyncio.CancelledError
    if prompt == "hangs":
        await asyncio.sleep(60)
    return f"{os.getpid()} {id(asyncio.get_running_loop())}"

class Judge:
    async def __call__(self, *row):
        return await f(*row)

judge = Judge()
returns = lambda *row: f(*row)

def gathers(*row):
    async def first(made):
        return (await made)[0]
    return first(asyncio.gather(f(*row), asyncio.sleep(0)))
"""


@pytest.mark.parametrize("name", ["f", "judge", "returns", "gathers"])
def test_all_async_rows_of_a_worker_are_awaited_on_one_loop(name, ask, tmp_path):
    (tmp_path / "mine.py").write_text(ASYNC)
    late = (None, "no answer within 1.5 s, or its process has died")
    assert ask(name, ["hangs"], seconds=1.5) == [late]
    rows = [*"ab", "exits", "cancels", *"cdefghijklmnopqrstuvwxyz"]
    answers = dict(zip(rows, ask(name, rows)))
    assert answers.pop("exits") == (None, "SystemExit: enough at mine.py:10 in f")
    assert answers.pop("cancels") == (None, "CancelledError:  at mine.py:12 in f")
    assert all(fault == "" for _, fault in answers.values()), answers
    loops = collections.defaultdict(set)
    for made, _ in answers.values():
        loops[made.split()[0]].add(made.split()[1])
    assert len(loops) < len(answers) and all(len(ids) == 1 for ids in loops.values())


def test_async_rows_of_threads_wait_for_each_other_on_one_loop():
    """As in a fork of the script, whose task.reward is no file. A row that fails ends no other."""
    all_there = asyncio.Barrier(8)

    async def meets(prompt, response, answer):
        await asyncio.wait_for(all_there.wait(), 60)
        return {"3": lambda: {}["x"], "5": lambda: exit(1)}.get(prompt, lambda: prompt)()

    for _ in range(2):
        replies = [Reply(Prompt([1], f"{i}"), i) for i in range(8)]
        answers = ppo_loop.ask_all(partial(ppo_loop.attempt, meets), replies)
        assert answers.pop(5) == (None, "SystemExit: 1")
        assert answers.pop(3) == (None, "KeyError: 'x'")
        assert answers == [(x, "") for x in "012467"]


def test_a_function_gets_what_it_names():
    """The turns, whether the row was cut off, and its token ids, in any order."""
    replies = [Reply(Prompt([1], "q", "a"), 0, [7, 8], finished=True, text="r", turns=["r", "o"])]
    replies.append(dataclasses.replace(replies[0], ids=[7], finished=False))
    ask = lambda function: ppo_loop.ask_all(partial(ppo_loop.attempt, function), replies)
    shows = lambda *row: str(row)
    for function, expected in (
        (lambda *row: shows(*row), (("q", "r", "a"), ("q", "r", "a"))),
        (lambda *row, turns: shows(len(row), turns), ((3, ["r", "o"]), (3, ["r", "o"]))),
        (lambda p, r, a, turns: shows(p, r, a, turns), (("q", "r", "a", ["r", "o"]),) * 2),
        (
            lambda p, r, a, tokens, turns=None: shows(a, tokens, turns),
            (("a", [7, 8], ["r", "o"]), ("a", [7], ["r", "o"])),
        ),
        (lambda p, r, a, *, truncated: shows(a, truncated), (("a", False), ("a", True))),
    ):
        assert ask(function) == [(str(row), "") for row in expected]


def test_a_reward_may_return_its_parts(capsys):
    """Their means are over the rows that have them. A dict without a finite score is a fault of its
    row."""
    says = [{"score": 1, "format": 0.5}, {"score": 0.25, "format": 1, "length": 7}, 0.5, {"format": 9.0},
            {"score": math.nan, "format": 9.0}]  # fmt: skip
    replies = [Reply(Prompt([1], f"p{i}", i), i) for i in range(len(says))]
    function = partial(ppo_loop.attempt, lambda prompt, said, i: says[i])
    rewards, _, faults = ppo_loop.score(a_run(), function, ppo_loop.Phases(False), replies)
    assert rewards == [1, 0.25, 0.5, 0, 0] and faults == 2
    assert ppo_loop.part_means(replies) == {"reward/format": 0.75, "reward/length": 7}
    assert (
        "a dict of a reward must have a finite number as 'score', not {'format'"
        in capsys.readouterr().out
    )
    assert ppo_loop.part_means(replies[2:]) == {}


DEEP = """
import json, os

def parse(text):
    os.chdir("/")
    return json.loads(text)

def score(prompt, response, answer):
    return parse("{")["score"]
"""


def test_a_fault_names_the_deepest_line_of_the_users_file(ask, tmp_path):
    (tmp_path / "mine.py").write_text(DEEP)
    [(made, fault)] = ask("score", ["x"])
    assert (
        made is None
        and fault.startswith("JSONDecodeError: ")
        and fault.endswith(" at mine.py:6 in parse")
    )


TRIED = """
import os, sys, time

def notes(prompt, response, answer, turns, truncated, tokens):
    with open(os.path.dirname(__file__) + "/notes", "a") as file:
        print(prompt, response, answer, turns, truncated, len(tokens), file=file)
    return 0.5

def meets(prompt, response, answer):
    folder = os.path.dirname(__file__) + "/here"
    open(f"{folder}/{prompt}", "w").close()
    while len(os.listdir(folder)) < 4:
        time.sleep(0.01)
    return 1

def fails(prompt, response, answer):
    return {}["key"]

def some_fail(prompt, response, answer):
    return {}["key"] if prompt == "1+3=" else 1

def text(prompt, response, answer):
    return "more"
"""


@pytest.fixture
def tried(tmp_path):
    """set_up with these functions of TRIED, on a file of prompts, some of which are there twice."""
    (tmp_path / "tried.py").write_text(TRIED)
    (tmp_path / "here").mkdir()
    rows = [{"prompt": f"1+{i}=", "answer": str(1 + i)} for i in (3, 3, 4, 3, 5, 6, 7)]
    rows[2]["answer"] = 5
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def go(reward, environment=""):
        flags = ["--prompts", f"{tmp_path}/rows.jsonl", "--reward", f"{tmp_path}/tried.py:{reward}"]
        if environment:
            flags += ["--environment", f"{tmp_path}/tried.py:{environment}"]
        ppo_loop.set_up(ppo_loop.parse(flags))

    return go


def test_the_users_functions_are_tried_with_the_first_prompts(tried, tmp_path):
    """With the right answer as the response, if it is text."""
    tried("notes")
    rows = [("1+3=", "4"), ("1+4=", 5), ("1+5=", "6"), ("1+6=", "7")]
    said = [answer if isinstance(answer, str) else "" for _, answer in rows]
    expected = [f"{p} {r} {a} {[r]} False {len(r)}" for (p, a), r in zip(rows, said)]
    assert sorted((tmp_path / "notes").read_text().splitlines()) == expected


def test_trial_calls_run_at_once_and_some_may_fail(tried, tmp_path, capsys):
    tried("meets", "text")
    assert "failed" not in capsys.readouterr().out
    tried("some_fail")
    words = "failed for 1 of the first 4 prompts, with their answers as responses, which is fine if some rows may"
    fault = "KeyError: 'key' at tried.py:20 in some_fail"
    assert f"--reward {tmp_path}/tried.py:some_fail: {words}: {fault}\n" in capsys.readouterr().out


@pytest.mark.parametrize("functions, words", [
    (["fails"], "KeyError: 'key' at tried.py:17 in fails"),
    (["text"], "a reward must be a finite number, not 'more'"),
    (["meets", "notes"], "an environment must return text or None, not 0.5"),
])  # fmt: skip
def test_a_function_that_fails_on_all_trial_calls_ends_the_run(functions, words, tried, tmp_path):
    flag = "--environment" if len(functions) == 2 else "--reward"
    failed = "failed for 4 of the first 4 prompts, with their answers as responses"
    with refused(f"{flag} {tmp_path}/tried.py:{functions[-1]}: {failed}: {words}"):
        tried(*functions)


VALUES = """
import enum, os
from decimal import Decimal
from fractions import Fraction
import numpy

class Text(str):
    def __reduce__(self):
        raise TypeError("not for other processes")
    __str__ = __repr__ = lambda self: "another text"

class Verdict(str, enum.Enum):
    GOOD = "good"

class Score(float):
    __reduce__ = Text.__reduce__

class Mute(Exception):
    def __str__(self):
        raise self

def deep(n):
    return deep(n + 1)

def raises(error):
    raise error

def f(prompt, response, answer):
    return eval(prompt)

largest = max
"""


def test_a_value_of_any_class_reaches_the_rank_as_plain_text_or_number(ask, tmp_path):
    """Nothing that a row holds, returns or raises ends its worker, so that there are 16 at most."""
    (tmp_path / "mine.py").write_text(VALUES)
    cases = {
        "Text('text')": "text", "Verdict.GOOD": "good", "numpy.str_('s')": "s", "None": None,
        "Score(1.5)": 1.5, "numpy.float32(0.5)": 0.5, "numpy.array(2)": 2.0, "numpy.int64(3)": 3.0,
        "{'score': 1, Text('part'): numpy.float32(2)}": {"score": 1.0, "part": 2.0},
        "{Verdict.GOOD: True, '\\udc80': Score(3)}": {"good": 1.0, "?": 3.0},
        "Decimal('0.25')": 0.25, "Fraction(1, 4)": 0.25, "True": 1.0, "numpy.True_": 1.0, "7": 7.0,
        "'\\udc80'": "\udc80", "answer": "\ud800", "'x' * 2**24": "x" * 2**24,
    }  # fmt: skip
    for row, (made, fault) in zip(cases, ask("f", cases, "\ud800")):
        assert (made, type(made), fault) == (cases[row], type(cases[row]), ""), row[:40]
        if isinstance(made, dict):
            assert {*map(type, made)} == {str} and {*map(type, made.values())} == {float}
    faults = {
        "raises(Mute())": "Mute: its text cannot be made", "10**400": "OverflowError: ",
        "raises(ValueError('\\ud800'))": "ValueError: \ud800", "deep(0)": "RecursionError: maximum",
        "[1]": "TypeError: float() argument must be", "1j": "TypeError: float() argument must be",
        "raises(KeyboardInterrupt())": "KeyboardInterrupt: ", "{1: 2.0}": "TypeError: ",
        "{'score': 'much'}": "TypeError: 'score' must be a number, not 'much'",
        "{'note': [1]}": "TypeError: 'note' must be a number, not [1]",
    }  # fmt: skip
    for row, (made, fault) in zip(faults, ask("f", faults)):
        assert made is None and fault.startswith(faults[row]), (row, fault)
    assert ask("largest", ["a", "z"], "q") == [("r", ""), ("z", "")]  # max has no signature
    pids = {made for made, _ in ask("f", ["os.getpid()", "raises(Mute())", "Text('x')"] * 20)}
    assert len(pids - {None, "x"}) <= 16
    nested = "x"
    for _ in range(5000):
        nested = [nested]
    [(made, fault)] = ask("f", ["1"], nested)
    assert made is None and "recursion" in fault
    made, fault = ppo_loop.attempt(lambda *_: torch.tensor([0.5]))
    assert (made, type(made), fault) == (0.5, float, "")


def test_processes_of_a_pool_end_with_the_worker(tmp_path):
    """Those of a module's pool would wait for work for ever."""
    (tmp_path / "mine.py").write_text(
        "import os\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "POOL = ProcessPoolExecutor(2)\ndef f(*row):\n    return POOL.submit(os.getpid).result()\n"
    )
    f = ppo_loop.load_function(f"{tmp_path}/mine.py:f", "--reward", 20.0)
    stat = pathlib.Path(f"/proc/{f('', '', None)[0]:.0f}/stat")
    assert stat.read_text().split()[2] != "Z"
    del f  # closes the pipe
    until = time.monotonic() + 20
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("backend, same_tokens", [("fsdp", True), ("megatron", False)])
def test_a_reward_models_scores_are_transformers_own(backend, same_tokens, tmp_path):
    """Also with a tokenizer of its own, for texts and chats. Rows as long as the token budget
    fit."""
    tokenizer = chat_tokenizer(tokenizer=None if same_tokens else another_tokenizer())
    fields = common.tiny_config("tiny-llama", len(tokenizer)) | {"num_labels": 1, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(**fields)
    torch.manual_seed(2)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    chat = [{"role": "user", "content": "hi"}]
    rows = [("1+2=", "3"), ("hello ", "world"), ("x", "y" * 30), ("12+34=", ""), ("hi", "yo", chat)]
    replies = []
    for i, (asked, said, *messages) in enumerate(rows):
        prompt = Prompt(ids_of(asked), asked, None, *messages)
        replies.append(Reply(prompt, i, ids_of(f"{said}."), [0.0] * (len(said) + 1), True, said))
    longest = max(ppo_loop.to_batch(replies).lengths) + 1
    critic = ppo_loop.critic_flags(backend)(ppo_max_token_len_per_gpu=longest)
    run = a_run(backend, reward_model=str(tmp_path), critic=critic)
    ours = ppo_loop.RewardModel(run, TOKENIZER)
    assert ours.same_tokens == same_tokens
    ppo_loop.score(run, ours, ppo_loop.Phases(False), replies)
    scores = [reply.score for reply in replies]
    for reply, score in zip(replies, scores):
        ids = reply.prompt.ids + reply.ids
        if not same_tokens:
            whole = "<user>hi<eos>\n<assistant>yo<eos>\n"
            text = whole if reply.prompt.messages else reply.prompt.text + reply.text
            ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).logits.item()
        assert score == pytest.approx(theirs, abs=1e-5)
    assert max(scores) - min(scores) > 0.1
    if not same_tokens:  # a text that takes more tokens in the other tokenizer
        replies[2].text = "y" * (longest + 1)
        with pytest.raises(UserError, match=f"--critic.ppo-max-token-len-per-gpu {longest}: row 2"):
            ours.ask_all(replies)


@pytest.mark.parametrize("rewards, words", [
    ([1.0, 0.0, 1.0], "accuracy 0.667"), ([1.0, 0.5, 1.0], "reward 0.833"),
])  # fmt: skip
def test_accuracy_is_reported_only_for_rewards_of_0_and_1(rewards, words, tmp_path, capsys):
    logged = {}
    logger = types.SimpleNamespace(log=lambda step, metrics: logged.update(metrics))
    replies = ppo_loop.rows_of_rank([Prompt([1], f"{i}", i) for i in range(3)])
    reward = partial(ppo_loop.attempt, lambda prompt, response, i: rewards[i])
    run = a_run(out_dir=str(tmp_path))
    ppo_loop.evaluate(replies, run, reward, ppo_loop.Phases(False), 3, logger)
    assert f"held out   {words}\n" in capsys.readouterr().out
    assert logged["eval/reward"] == pytest.approx(sum(rewards) / 3) and logged["eval/errors"] == 0
    assert ("eval/accuracy" in logged) == ("accuracy" in words)
    rows = json.loads((tmp_path / "samples.json").read_text())
    assert [row["reward"] for row in rows] == rewards
    assert [(row["prompt"], row["fault"]) for row in rows] == [("0", ""), ("1", ""), ("2", "")]


def test_texts_of_rows_go_only_to_rank_0_which_alone_writes_them(tmp_path, monkeypatch):
    """On the second of two ranks, with a made-up message of the first."""
    told = []
    theirs = ([1.0, 0.5, 0.0], 1, ["the first rank's"])
    monkeypatch.setattr(ppo_loop, "of_all_ranks", lambda mine: told.append(mine) or [theirs, mine])
    monkeypatch.setattr(ppo_loop, "RANK", 1)
    monkeypatch.setattr(ppo_loop, "WORLD_SIZE", 2)
    sent = []
    send = lambda mine, parts: sent.append((mine, parts))
    monkeypatch.setattr(ppo_loop.dist, "gather_object", send)
    monkeypatch.setattr(ppo_loop, "poll", lambda: None)
    replies = [Reply(Prompt([1], f"p{i}", i), i, text=f"r{i}") for i in range(3)]
    reward = partial(ppo_loop.attempt, lambda prompt, response, i: [0.25, None, "x"][i])
    run = ppo_loop.Run(critic=None, out_dir=str(tmp_path))
    rewards, mean, faults = ppo_loop.score(run, reward, ppo_loop.Phases(False), replies)
    assert rewards == [1.0, 0.5, 0.0, 0.25, 0.0, 0.0] and mean == 1.75 / 6 and faults == 3
    assert "r1" not in str(told) and "p1" not in str(told) and len(told) == 1 and not sent
    ppo_loop.evaluate(replies, run, reward, ppo_loop.Phases(False), 3, logger=None)
    [(rows, parts)] = sent
    assert parts is None and [row["response"] for row in rows] == ["r0", "r1", "r2"]
    batch = random_batch(4)
    monkeypatch.setattr(common.Batch, "split", None)  # what would cut the rows
    ppo_loop.write_jsonl(batch, f"{tmp_path}/rows.jsonl")
    (few, _), parts = sent[1]
    assert parts is None and len(few) == 4 and few.old_log_probs is few.returns is None
    assert few.values.untyped_storage().nbytes() == 4 * len(batch.values)  # and not a view of more
    assert not [*tmp_path.iterdir()]


SAYS_THE_SAME = types.SimpleNamespace(start_at_mean=lambda *_: None)  # a critic
SAYS_THE_SAME.compute_values = lambda batch: batch.values


@pytest.mark.parametrize("kl_coef, fields", [
    (0.0, {}),
    (0.3, dict(kl_penalty="k1", gamma=0.9, lam=0.8)),
    (0.3, dict(kl_penalty="k3", lam=0.95, lam_policy=0.5, bootstrap_truncated=True)),
    (0.1, dict(kl_penalty="abs", lam_policy=0.3, gamma=0.97)),
    (0.1, dict(kl_penalty="k2", whiten_advantages=False, lam=0.0, lam_policy=1.0, bootstrap_truncated=True)),
    (0.1, dict(first_token_credit=0.3, lam=0.9)),
])  # fmt: skip
def test_rewards_advantages_and_returns_equal_a_loop(kl_coef, fields):
    """The loop goes action by action, backwards from the end of each row."""
    run = a_run(**fields)
    batch = random_batch(8, 6, idle=False)
    g = torch.Generator().manual_seed(1)
    # k3 stays < 10
    noise_2T = 0.5 * torch.randn(2, len(batch.input_ids), generator=g) * batch.response_mask
    kl_T = kl_of(run.kl_penalty, (noise_2T[0] - noise_2T[1]).double())
    # not used
    batch.old_log_probs, batch.ref_log_probs = noise_2T if kl_coef else noise_2T * math.nan
    batch.truncated = torch.arange(8) % 3 == 0
    scores = torch.randn(8, generator=g).tolist()
    assert ppo_loop.assign_credit(batch, batch, scores, kl_coef, run, SAYS_THE_SAME) == {}
    rewards_T, advantages_T, returns_T = torch.zeros(3, len(batch.input_ids), dtype=torch.float64)
    lam_policy = run.lam if run.lam_policy is None else run.lam_policy
    for b, places in enumerate(actions_of(batch)):
        after = (
            float(batch.values[places[-1]])
            if run.bootstrap_truncated and batch.truncated[b]
            else 0.0
        )
        for_policy = for_critic = 0.0
        if run.first_token_credit:
            lam_policy = math.exp(math.log(0.3) / (len(places) - 1)) if len(places) > 1 else 1.0
        for t in reversed(places):
            v = float(batch.values[t])
            rewards_T[t] = (scores[b] if t == places[-1] else 0.0) - kl_coef * kl_T[t]
            delta = float(rewards_T[t]) + run.gamma * after - v
            advantages_T[t] = for_policy = delta + run.gamma * lam_policy * for_policy
            for_critic = delta + run.gamma * run.lam * for_critic
            returns_T[t] = for_critic + v
            after = v
    if run.whiten_advantages:
        x = advantages_T[batch.response_mask].numpy()
        advantages_T[batch.response_mask] = torch.from_numpy((x - x.mean()) / x.std(ddof=1))
    ours = (batch.token_level_rewards, batch.advantages, batch.returns)
    for ours_T, theirs_T in zip(ours, (rewards_T, advantages_T, returns_T)):
        torch.testing.assert_close(ours_T.double(), theirs_T, rtol=1e-5, atol=1e-5)
        assert (ours_T[~batch.response_mask] == 0).all()


# ---- Prompts, flags ------------------------------------------------------------------------------


def prompts_of(tmp_path, *rows, tokenizer=None, **fields):
    """load_prompts on a file of these rows; text and bytes are written as they are."""
    file = tmp_path / "prompts.jsonl"
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    file.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    run = a_run(prompts=str(file), **fields)
    return ppo_loop.load_prompts(str(file), "--prompts", run, tokenizer or TOKENIZER)


def test_prompts_of_text_and_of_chats(tmp_path, capsys):
    load = lambda *rows, **fields: prompts_of(
        tmp_path, *rows, tokenizer=chat_tokenizer(""), **fields
    )
    user = [{"role": "user", "content": "hi"}]
    chat = [{"role": "system", "content": "S"}, *user]
    begun = [*user, {"role": "assistant", "content": "I think"}]
    ours = load({"prompt": "1+1=", "answer": "2"}, {"prompt": chat}, {"prompt": begun})
    assert ours[0] == Prompt(ids_of("1+1="), "1+1=", "2", None)
    assert ours[1] == Prompt(ids_of("<system>S\n<user>hi\n<assistant>"), "hi", None, chat)
    assert ours[2] == Prompt(ids_of("<user>hi\n<assistant>I think"), "I think", None, begun)
    ours = load({"question": "hi", "gold": 7}, chat=True, prompt_key="question", answer_key="gold")
    assert ours == [Prompt(ids_of("<user>hi\n<assistant>"), "hi", 7, user)]

    rows = [{"prompt": "a" * n, "n": n} for n in (3, 6, 5, 9)]
    assert [p.text for p in load(*rows, max_prompt_length=5)] == ["aaa", "aaaaa"]
    assert "left out 2 prompts longer than --max-prompt-length" in capsys.readouterr().out
    for fault, fields in (
        (": no usable", {"max_prompt_length": 2}),
        (":1: .*--reward addition cannot check the answer", {"reward": "addition"}),
        (":1: .*'why', which --privileged-key names", {"privileged_key": "why"}),
        (":1: .*must be text", {"chat": True, "prompt_key": "n"}),
    ):
        with pytest.raises(UserError, match=f"--prompts .*prompts.jsonl{fault}"):
            load(*rows, **fields)


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


def test_each_critic_brings_its_own_flags_and_all_are_explained(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # --help changes it
    parse = lambda flags: ppo_loop.parse(flags.split())
    own = {"--critic=fsdp": "ulysses-size", "--critic megatron": "tensor-model-parallel-size"}
    for critic, flag in own.items():
        backend = critic.removeprefix("--critic")[1:]
        run = parse(f"{critic} --critic.{flag} 2 --actor.lr 0.25 --no-whiten-advantages")
        fields = {"model": "actor", "ppo_mini_batch_size": 128, flag.replace("-", "_"): 2}
        critic = ppo_loop.critic_flags(backend)(**fields)
        assert run == a_run(
            backend, critic=critic, actor=ActorConfig(lr=0.25), whiten_advantages=False
        )
        with pytest.raises(SystemExit):
            parse(f"--critic {backend} --help")
        sections = help_of(capsys.readouterr().out)
        words = {flag: words for section in sections.values() for flag, words in section.items()}
        assert len(words) > 90 and all(
            len(x) > 7 and not x.startswith("(default") for x in words.values()
        )
        assert (
            f"--critic.{flag}" in sections["critic layout"]
            and "--actor.lr" in sections["actor optimizer"]
        )
        assert len(sections["vllm engine, for --rollout vllm"]) == 2
    assert parse("") == a_run()
    with pytest.raises(
        UserError, match="--critic.tensor-model-parallel-size: unknown with --critic fsdp"
    ):
        parse("--critic fsdp --critic.tensor-model-parallel-size 2")
    with pytest.raises(UserError, match="--critic fsdp2: must be fsdp or megatron"):
        parse("--critic fsdp2")


@pytest.mark.parametrize("flags, meant", [
    ("--tokenizer x", "perhaps you meant --critic.tokenizer or --actor.tokenizer"),
    ("--lr 1", "perhaps you meant --critic.lr or --actor.lr"),
    ("--tokeniser=x", "perhaps you meant --critic.tokenizer or --actor.tokenizer"),
    ("--kl-coeff 0.1", "perhaps you meant --kl-coef"),
    ("--no-ofload", "perhaps you meant --no-offload"),
    ("--actr.lr 1", "perhaps you meant --actor.lr"),
    ("--critic.clip_ratio_low 1", "perhaps you meant --actor.clip-ratio-low"),
    ("--critic.ulysses-size 2 --critic megatron", "it is a flag of --critic fsdp"),
    ("--ulyses-size 2 --critic megatron", "--critic.ulysses-size is a flag of --critic fsdp"),
    ("--critic.tensor-model-parallel-size 2", "it is a flag of --critic megatron"),
    ("--xyzzy 1", "--help explains all flags"),
    ("--offload True", "--help explains all flags"),
])  # fmt: skip
def test_an_unknown_flag_is_told_with_what_may_be_meant(flags, meant):
    words = flags.partition(" ")[0] if flags != "--offload True" else "True"
    critic = flags.partition("--critic ")[2] or "fsdp"
    with refused(
        f"{words}: unknown with --critic {critic}; {meant}", end="--help explains all flags"
    ):
        ppo_loop.parse(flags.split())


@pytest.mark.parametrize("named, flags", [
    ("--reward", "--prompts x.jsonl"), ("--critic.value-range", "--critic.value-head hl_gauss"),
    ("--prompts", "--privileged-key x"),
    ("--actor.model", "--actor.model tiny-qwen3-vl --supervised-steps 1"),
    *((flags.split()[0], flags) for flags in (  # prompts have 6 tokens and responses 8
    "--rollout-n 0", "--gamma 1.1", "--kl-coef nan", "--eval-every -1", "--top-p 0", "--reward-timeout inf",
    "--temperature 0", "--target-kl 0.1", "--eval-prompts x.jsonl", "--prompts x.jsonl --reward gsm8k",
    "--reward gsm8k --reward-model rm", "--reward nothing.py:f", "--environment nothing.py:f",
    "--vllm.tensor-parallel-size 2", "--vllm.gpu-memory-utilization 1.5", "--actor.clip-ratio-c 1",
    "--actor.override-config {", "--actor.model tiny-qwen7", "--actor.tokenizer /none",
    "--actor.ppo-max-token-len-per-gpu 13", "--critic.ulysses-size 3", "--critic.model tiny-qwen7",
    "--critic.ppo-max-token-len-per-gpu 13", "--critic.ppo-max-token-len-per-gpu auto",
    "--critic.ppo-mini-batch-size 0 --critic megatron", "--lam-policy 1 --first-token-credit 0.5",
    '--critic.model tiny-gpt2 --critic.override-config {"vocab_size":50}',
    '--critic.model tiny-gpt2 --critic.override-config {"n_positions":13}',
    '--actor.model tiny-llama --actor.override-config {"max_position_embeddings":13}',
    # it has no value head
    "--actor.model tiny-qwen2.5-vl", "--reward-model /none", "--reward-model lm",
    *([] if importlib.util.find_spec("vllm") else ["--rollout vllm"]),
    "--actor.ratio-band 2 1", "--prompts rows.jsonl --chat --reward mine.py:f", "--critic.tokenizer words",
))])  # fmt: skip
def test_a_bad_flag_is_one_line_that_names_it(named, flags, parse, tmp_path, monkeypatch):
    """This includes mistakes that are found only while models are built."""
    monkeypatch.chdir(tmp_path)
    if "--reward-model lm" in flags:
        policy().export_hf(tmp_path / "lm", TOKENIZER)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    (tmp_path / "mine.py").write_text("def f(prompt, response, answer):\n    return 1")
    another_tokenizer().save_pretrained(tmp_path / "words")
    with pytest.raises(UserError, match=rf"^{named}(?![\w-])[^\n]*\Z"):
        ppo_loop.main(parse(flags))


def test_valid_flags_are_accepted(parse, tmp_path, capsys):
    """Budgets that just fit, or are halved since memory ran out; what the critic inherits from the
    actor."""
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
    assert (
        run.critic.model == run.actor.model == "tiny-llama"
        and task.model_config.model_type == "llama"
    )
    assert (run.actor.lr, run.critic.lr, run.max_response_length, run.reward) == (
        5e-4,
        1e-3,
        8,
        "addition",
    )
    halved = types.SimpleNamespace(folder=None, halvings=9)
    actor, reference, critic, *_ = ppo_loop.build(run, task, common.setup_distributed(), halved)
    assert actor.max_tokens == reference.max_tokens == critic.critic.max_tokens == 16384 >> 9
    assert critic.critic.total_steps == 60 * 3
    (file := tmp_path / "x.jsonl").write_text('{"prompt": "1+1=", "answer": "#### 2"}')
    assert "answers " not in capsys.readouterr().out
    run, _ = set_up(
        f"--actor.model tiny-llama --prompts {file} --reward gsm8k --critic.model tiny-gpt2"
    )
    assert "answers " not in capsys.readouterr().out
    assert (run.actor.lr, run.max_response_length, run.reward) == (1e-6, 256, "gsm8k")
    assert run.critic.model == "tiny-gpt2" and run.critic.lr is None
    file.write_text('{"prompt": "1+1="}\n{"prompt": "1+2=", "answer": "3"}')
    set_up(f"--prompts {file} --reward-model tiny-llama")
    assert "\nanswers    1 of 2 prompts have no 'answer'\n" in capsys.readouterr().out


def test_a_resumed_run_continues_where_it_stopped(tmp_path):
    """With its step, its adapted KL coefficient and its supervised actor. In another --out-dir this
    actor is copied, so that --resume auto can continue the new run, too."""
    theirs, ours = (str(tmp_path / name) for name in ("theirs", "ours"))
    policy().export_hf(f"{theirs}/supervised", TOKENIZER)
    with common.published(f"{theirs}/checkpoints/step_2") as tmp:
        common.write_json(f"{tmp}/loop.json", {"step": 2, "kl_coef": 0.02})

    def go_on(critic="tiny-qwen2", folder=f"{theirs}/checkpoints/step_2", out_dir=theirs, **fields):
        run = a_run(
            kl_coef=0.01, critic=critic_fsdp.Config(model=critic), out_dir=out_dir, **fields
        )
        checkpoints = types.SimpleNamespace(folder=folder)
        task = a_task()._replace(
            tokenizer=TOKENIZER, model_config=common.load_config(ActorConfig())[1]
        )
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
    copied, original = (
        load_file(f"{folder}/supervised/model.safetensors") for folder in (ours, theirs)
    )
    assert all(torch.equal(copied[name], x) for name, x in original.items())
    shutil.copytree(f"{theirs}/checkpoints", f"{ours}/checkpoints")  # what the new run saved
    shutil.rmtree(theirs)
    assert go_on(folder=f"{ours}/checkpoints/step_2", out_dir=ours)[0] == f"{ours}/supervised"
    common.verify(f"{ours}/supervised")
    with (
        open(f"{ours}/supervised/config.json", "w"),
        pytest.raises(UserError, match="damaged, config.json"),
    ):
        go_on(folder=f"{ours}/checkpoints/step_2", out_dir=ours)
    shutil.rmtree(f"{ours}/supervised")
    made = go_on(folder=f"{ours}/checkpoints/step_2", out_dir=ours, supervised_steps=1)
    assert made == (f"{ours}/supervised", f"{ours}/supervised", 2, 0.01)


@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-3), (torch.bfloat16, 0.5)])
def test_an_engine_that_is_off_the_actor_ends_the_run(dtype, most):
    batch = random_batch(8)
    batch.old_log_probs = batch.ref_log_probs = batch.values
    batch.rollout_log_probs = batch.values - 0.9 * most * batch.response_mask
    ppo_loop.rollout_metrics(batch, a_run(), dtype)
    for off in (1.1 * most, math.nan):
        batch.rollout_log_probs = batch.values - off * batch.response_mask
        with pytest.raises(
            UserError, match="^--actor.model tiny-qwen2: the rollout is off the actor by"
        ):
            ppo_loop.rollout_metrics(batch, a_run(), dtype)


# ---- Whole runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_critic_alone_reads_the_hint(backend, whole_run, tmp_path):
    """Its values and its update are those for rows that begin with the hint, at any temperature;
    the actor's rows lack it."""
    flags = "--steps 1 --gamma 0.9 --lam 0.8 --rollout-n 2 --privileged-key response"
    whole_run(f"{flags} --temperature 0.6 --top-p 0.8 --critic {backend}")
    lines = []
    for row in common.read_lines(tmp_path / "out/rollouts/step_1.jsonl"):
        prompt = TOKENIZER.decode(row["prompt_ids"])  # this is what the actor has read
        hint = f"For the critic only: {sum(map(int, prompt[:-1].split('+')))}\n"
        lines.append(json.dumps(row | {"prompt_ids": ids_of(hint + prompt)}))
    batch = common.read_rows(lines, None)
    script = ppo_loop.critic_module(backend)
    critic = script.CriticWorker(
        script.Config(override_config=SHARP, lr=1e-3, ppo_mini_batch_size=8)
    )
    critic.init_model()
    torch.testing.assert_close(critic.compute_values(batch), batch.values, rtol=0, atol=1e-6)
    common.add_returns(batch, 0.9, 0.8)
    critic.update_critic(batch)
    critic.export_hf(tmp_path / "expected")
    files = (next((tmp_path / x).glob("*.safetensors")) for x in ("out/critic_hf", "expected"))
    torch.testing.assert_close(*map(load_file, files), rtol=0, atol=1e-5)


def test_terms_with_coefficient_0_are_left_out_of_the_graph():
    """Even a NaN in them changes neither loss nor gradients; with another coefficient they
    count."""
    for entropy_coeff, kl_coef in ((0.0, 0.0), (0.1, 0.0), (0.0, 0.1)):
        w = policy(entropy_coeff=entropy_coeff, kl_loss_coef=kl_coef)
        hidden_CD = torch.randn(5, 64, requires_grad=True)
        alone = ppo_loop.Policy(plain(w), None, w.model.entropy_learns)  # without shards
        _, entropy_C = alone.read(hidden_CD, torch.arange(5), 1.0)
        assert entropy_C.requires_grad or not entropy_coeff
        (slope_CD,) = torch.autograd.grad(entropy_C.sum(), hidden_CD)
        assert (slope_CD.norm() > 0) == (entropy_coeff > 0)
        batch = batch_to_learn(w)
        batch.weights = common.loss_weights(batch, "token-mean")
        log_probs_T = batch.old_log_probs.clone().requires_grad_()
        batch.ref_log_probs = batch.ref_log_probs * math.nan
        loss, _ = w.loss(batch, log_probs_T, log_probs_T * (math.nan if kl_coef == 0 else 1.0))
        assert loss.isfinite() == (entropy_coeff == kl_coef == 0)


def test_ids_without_a_token_are_never_drawn_and_have_no_probability(whole_run, tmp_path):
    """A model has more ids than its tokenizer, like Qwen's. Engine, actor and transformers agree on
    the log-probs of the others, and a critic without the extra ids works."""
    w = policy(override_config='{"initializer_range": 0.1, "vocab_size": 150}')
    w.model.known = 99
    engine = engine_of(w, at_once=400, known=99)
    rows = [([20, 30, 40], i, 4) for i in range(400)]
    replies = engine.generate(rows, 1.0)
    assert_no_fillers(replies, w, plain(w))
    assert max(i for ids, _, _ in engine.generate(rows[:1], 0.0) for i in ids) < 99
    flags = '--actor.override-config {"initializer_range":0.1,"vocab_size":150} --critic.model tiny-qwen2'
    whole_run(f"{flags} --top-p 0.9 --temperature 1.3 --kl-coef 0.1")
    steps = [common.read_lines(tmp_path / f"out/rollouts/step_{step}.jsonl") for step in (1, 2)]
    assert (
        len({i for rows in steps for row in rows for i in row["response_ids"]} - set(range(99)))
        == 0
    )


def test_a_row_of_a_run_ends_with_its_first_text_to_stop_at(whole_run, tmp_path):
    whole_run("--steps 1 --stop a b c 1 2 3 # --train-batch-size 40")
    rows = common.read_lines(tmp_path / "out/rollouts/step_1.jsonl")
    found = [row for row in rows if re.search("[abc123#]", row["response_text"])]
    assert 5 < len(found) < 40
    for row in found:
        assert (
            re.fullmatch("[^abc123#]*[abc123#]", row["response_text"]) and not row["truncated"]
        ), row
        # without an end of sequence
        assert TOKENIZER.decode(row["response_ids"]) == row["response_text"]


def test_equal_prompts_get_different_tokens_in_each_step(whole_run, tmp_path, monkeypatch):
    """With one prompt and an actor that does not learn yet, only the random numbers differ."""
    one = '{"prompt": "1+1=", "response": "2"}'
    monkeypatch.setattr(ppo_loop, "addition_rows", lambda *args, **more: [one])
    whole_run("--rollout-n 6 --critic-warmup 2")
    rows = [common.read_lines(tmp_path / f"out/rollouts/step_{step}.jsonl") for step in (1, 2)]
    first, second = ([row["response_ids"] for row in step] for step in rows)
    assert all(a != b for a, b in zip(first, second)) and len({*map(tuple, first + second)}) == 12


def test_each_epoch_of_each_update_has_its_own_order(monkeypatch):
    """An order that depends only on seed, update and epoch."""
    w = policy(ppo_epochs=3, ppo_mini_batch_size=4)
    seen = []
    note = lambda batch, mini, totals, done: seen.append([row.row_id for row in mini]) or 1.0
    monkeypatch.setattr(w, "step", note)
    batch = batch_to_learn(w)
    for _ in range(2):
        w.update_policy(batch)
    orders = [sum(seen[i : i + 3], []) for i in range(0, 18, 3)]
    keys = itertools.product((0, 1), (0, 1, 2))
    assert orders == [common.shuffled_rows(batch.groups(), 0, *key) for key in keys]
    assert len({*map(tuple, orders)}) == 6


def test_rollout_log_probs_and_update_show_how_far_they_are(monkeypatch, capsys):
    """Of a rollout that ends early, the rest counts as done."""
    w = policy(ppo_mini_batch_size=4, ppo_epochs=2)
    w.max_tokens = 64
    batch = batch_to_learn(w, n=8)
    monkeypatch.setattr(common, "LINE_EVERY", 0.0)
    lines = lambda: [
        re.sub(r"0:00:0\d", "0:00:00", line) for line in capsys.readouterr().out.splitlines()
    ]
    lines()
    w.compute_log_probs(batch)
    n = len(w.plan_micro_batches(common.describe(batch))[0])
    said = [f"log-probs  {i} of {n} micro-batches, 0:00:00 left" for i in range(1, n + 1)]
    assert n > 2 and lines() == said
    w.update_policy(batch)
    assert len(said := lines()) > 4 and said[-1] == "policy     16 of 16 rows, 0:00:00 left"
    engine_of(w, at_once=2).generate([([20, 30], 0, 5), ([20], 1, 7), ([40], 2, 4)], 0.0)
    assert lines()[-1] == "rollout    11 of 11 forwards, 0:00:00 left"


def test_a_run_prints_a_row_at_each_interval_also_without_an_evaluation(
    whole_run, tmp_path, capsys
):
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+1=", "answer": "3"}'
    )
    whole_run(
        f"--prompts {tmp_path}/rows.jsonl --reward addition --steps 3 --eval-every 2 --max-response-length 9"
    )
    said = capsys.readouterr().out.splitlines()
    steps = [common.read_lines(tmp_path / f"out/rollouts/step_{step}.jsonl") for step in (1, 3)]
    expected = [
        f"sample     {x['prompt_text']!r} -> {x['response_text']!r}  reward 0" for (x, *_) in steps
    ]
    assert [line for line in said if line.startswith("sample")] == expected
    assert [line[:8] for line in said if "step " in line or "sample " in line] == [
        "step 1/3", "sample  ", "step 2/3", "step 3/3", "sample  "
    ]  # fmt: skip


@pytest.mark.parametrize("seconds, words", [
    ({"generation": 7.24, "sync": 5.0, "reward": 11.8, "log_probs": 0.9, "reference": 1, "actor": 0.99996},
     "gen 7.2s reward 12s"),
    ({"generation": 0.087, "critic": 0.06, "actor": 0.9996, "checkpoint": 900.0}, "save 900s"),
    ({"generation": 0.087, "reward": 0.0001, "critic": 0.06}, "gen 87ms critic 60ms"),
    ({"log_probs": 9.96, "reference": 0.9996, "actor": 0.9994}, "log-probs 10s ref 1.0s actor 999ms"),
    ({}, ""),
])  # fmt: skip
def test_a_steps_line_ends_with_the_phases_that_took_most_of_it(seconds, words):
    times = {f"time/{name}": x for name, x in seconds.items()}
    assert ppo_loop.where_time_went({"perf/time_step": 99.0, **times}) == words


def test_every_phase_of_a_step_has_a_word(whole_run, tmp_path, capsys):
    whole_run("--kl-coef 0.1 --save-every 1")
    rows = common.read_lines(tmp_path / "out/metrics.jsonl")
    phases = {
        name.removeprefix("time/") for row in rows for name in row if name.startswith("time/")
    }
    assert phases == {*ppo_loop.WORDS, "sync"}
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("step 2/2"))
    assert re.search(r"  eta 0:00:00(  | )(\w[\w-]* \d+(\.\d)?(ms|s) ?)+$", line), line


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_critic_learns_from_raw_scores_or_shaped_rewards_of_a_dump(backend, whole_run, tmp_path):
    """With a KL in the reward. The texts of the dump are those that the reward has read."""
    (tmp_path / "mine.py").write_text(
        "def f(prompt, response, answer):\n"
        "    return {'score': len(response) % 2, 'length': len(response), 'echo': prompt[:1] in response}\n"
    )
    whole_run(f"--kl-coef 0.1 --reward {tmp_path}/mine.py:f")
    path = f"{tmp_path}/out/rollouts/step_2.jsonl"  # in step 1 the actor is its own reference
    rows = common.read_lines(path)
    for row in rows:
        ids, said = row["prompt_ids"], row["response_text"]
        assert row["prompt_text"] == TOKENIZER.decode(ids) and row["fault"] == ""
        assert said == TOKENIZER.decode(row["response_ids"], skip_special_tokens=True)
        assert row["score"] == len(said) % 2
        assert row["parts"] == {"length": len(said), "echo": row["prompt_text"][0] in said}
    # the last one is an evaluation
    *_, metrics, _ = common.read_lines(tmp_path / "out/metrics.jsonl")
    for name in ("length", "echo"):
        assert metrics[f"reward/{name}"] == pytest.approx(
            sum(row["parts"][name] for row in rows) / len(rows)
        )

    script = ppo_loop.critic_module(backend)
    critic = script.CriticWorker(script.Config())
    critic.tokenizer = None
    scores, shaped = (script.load_rows(script.Run(rollouts=path, **more), critic)[0] for more in (
        {"reward_key": "score"}, {}
    ))  # fmt: skip
    returns_A = common.monte_carlo(scores, 1.0)[scores.response_mask]
    assert returns_A.unique().tolist() == [0.0, 1.0]
    assert shaped.token_level_rewards.tolist() == pytest.approx(
        [x for row in rows for x in [0.0] * len(row["prompt_ids"]) + row["rewards"]]
    )
    assert len(common.monte_carlo(shaped, 1.0)[shaped.response_mask].unique()) > len(rows)
    length, _ = script.load_rows(script.Run(rollouts=path, reward_key="parts.length"), critic)
    assert length.token_level_rewards.sum() == sum(row["parts"]["length"] for row in rows)


NEVER_STOPPED = {}  # flags -> how such a run ends, once for all phases


@pytest.mark.parametrize("phase, owner, name, nth, saved", [  # in the nth call of the second step
    ("rollout", ppo_loop.Draw, "__call__", 20, 1),
    ("evaluation", ppo_loop.Draw, "__call__", 3, 1),
    ("reward", ppo_loop, "addition_reward", 6, 1),
    ("reward of an evaluation", ppo_loop, "addition_reward", 4, 1),
    ("log-probs", ppo_loop.Policy, "forward", 2, 1),
    ("reference", ppo_loop.Policy, "forward", 6, 1),
    ("values", critic_fsdp.DataParallelPPOCritic, "forward", 2, 1),
    ("update of the critic", critic_fsdp.DataParallelPPOCritic, "forward_backward", 2, 2),
    ("update of the actor", PolicyWorker, "step", 1, 2),
])  # fmt: skip
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


# ---- Phases, checkpoints, export -----------------------------------------------------------------


def test_phases_onload_and_offload_their_workers():
    seen = []
    way = lambda words: lambda: seen.append(words)
    a, b = (types.SimpleNamespace(onload=way(f"{x} on"), offload=way(f"{x} off")) for x in "ab")
    for offload, expected in (
        (True, ["a on", "b on", "work", "b off", "a off"]),
        (False, ["work"]),
    ):
        phases = ppo_loop.Phases(offload)
        for _ in range(2):
            with phases("x", a, None, b):
                seen.append("work")
                time.sleep(0.02)
        assert seen == expected * 2
        seen.clear()
        # a new step
        assert 0.04 <= phases.take(100)["time/x"] < 5 and "time/x" not in phases.take(100)


def state_of(w):
    """name -> full tensor, for all weights and optimizer state."""
    return {name: full_tensor(x).clone() for name, x in w.checkpoint_tensors().items()}


def same(a, b):
    """Whether two dicts of tensors are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_restores_every_bit_and_transformers_loads_an_export(kind, tmp_path):
    """The next update is the same, also after offloading. A checkpoint of another model is
    refused."""
    fields = dict(ppo_mini_batch_size=3, lr_warmup_steps=10)
    w, again = policy(kind, **fields), policy(kind, **fields)
    engine = engine_of(w)
    batch = batch_to_learn(w)
    w.update_policy(batch)
    saved = state_of(w)
    folder = str(tmp_path / "c")
    write = w.checkpoint_writer(copy=True)
    assert same(state_of(w), saved) and any("exp_avg_sq" in name for name in saved)
    metrics = w.update_policy(batch)
    with common.published(folder) as tmp:
        write(tmp)  # the state before this update
    for _ in range(2):
        again.update_policy(batch_to_learn(again, seed=1))
    assert not same(state_of(again), saved)
    again.load_checkpoint(folder)
    again.offload()
    again.onload()
    assert tied(again.model.lm) == (kind in TIED)
    assert (again.updates, again.optimizer_steps) == (1, 3) and same(state_of(again), saved)
    assert again.update_policy(batch) == metrics and same(state_of(w), state_of(again))
    assert metrics["actor/lr"] == pytest.approx(1e-3 * 6 / 10)  # the sixth step of the warm-up

    # of the same shape
    policy(kind, override_config='{"initializer_range": 0.5}').load_checkpoint(folder)
    with pytest.raises(UserError, match=f"--resume {folder}: is of another model: "):
        policy(kind, override_config='{"num_hidden_layers": 1}').load_checkpoint(folder)

    folder = str(tmp_path / "hf")
    w.export_hf(folder, TOKENIZER)
    lm, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    weights = dict(w.weights())
    assert same(weights, {n: p.detach() for n, p in lm.named_parameters()})
    assert tied(lm) == (kind in TIED)
    engine.sync(w.weights(torch.float32))
    assert same(dict(engine.model.state_dict()), dict(lm.state_dict()))
    # invalid without sampling
    common.write_json(f"{folder}/generation_config.json", {"temperature": 0.5})
    again = policy(folder, override_config="{}")
    again.export_hf(f"{folder} again", TOKENIZER)
    assert same(weights, dict(again.weights()))
    torch.testing.assert_close(
        again.compute_log_probs(batch), w.compute_log_probs(batch), rtol=0, atol=1e-6
    )
    for eos, ids in ((None, [1]), (7, [1, 7]), ([7, 9], [1, 7, 9])):  # both say what ends a turn
        transformers.GenerationConfig(eos_token_id=eos).save_pretrained(folder)
        assert ppo_loop.stop_tokens(ActorConfig(model=folder), TOKENIZER) == ids
