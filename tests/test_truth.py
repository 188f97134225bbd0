"""tests/truth.py: true values against policies whose futures are listed by hand, and the numbers of
guesses against a plain loop."""

import dataclasses
import json
import math
import pathlib
import sys
import typing

import numpy as np
import pytest
import rewards
import torch
import truth
from helpers import ROOT, refused, run, succeeded, torchrun, worker
from ppo_helpers import EOS, KINDS, TOKENIZER, ids_of
from reference import nucleus
from transformers import AutoModelForCausalLM

import common
import ppo_loop
from ppo_loop import ActorConfig

# ---- Policies whose futures are known ------------------------------------------------------------

# the chances of the next letter behind each letter; "" ends a turn
COIN = {letter: {"h": 0.6, "t": 0.4} for letter in "=ht"}
CHAIN = {
    "=": {"h": 0.3, "t": 0.6, "": 0.1},
    "h": {"h": 0.5, "t": 0.2, "": 0.3},
    "t": {"h": 0.2, "t": 0.4, "": 0.4},
    "+": {"h": 0.8, "t": 0.1, "": 0.1},
    "-": {"h": 0.1, "t": 0.7, "": 0.2},
}
# two prompts have one text
PROMPTS = [("a=", "h"), ("b=", "t"), ("a=", "t")]


def save_policy(folder, chances):
    """A language model that draws each letter by the one before it: embeddings are unit vectors,
    layers add nothing, and the head has the log-probs."""
    tokenizer, config = common.load_config(ActorConfig())
    lm, _ = common.load_model(AutoModelForCausalLM, ActorConfig(), config, 0)
    for name, p in lm.named_parameters():
        p.data.fill_(1.0 if "norm" in name else 0.0)
    embedding_VD, head_VD = lm.get_input_embeddings().weight.data, lm.lm_head.weight.data
    embedding_VD[:, 0] = 100.0
    for n, (before, behind) in enumerate(chances.items(), 1):
        embedding_VD[ids_of(before)] = 100.0 * torch.eye(len(embedding_VD[0]))[n]
        head_VD[:, n] = -50.0
        for letter, p in behind.items():
            head_VD[ids_of(letter) or EOS, n] = math.log(p)

    # the last norm scales a unit vector by the root of its size
    head_VD /= math.sqrt(config.hidden_size)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(truth, "DRAWS", 10)


class Case(typing.NamedTuple):
    """A policy and a task, as flags of ppo_loop.py say it."""

    chances: dict = CHAIN
    reward: str = "tosses"
    environment: str | None = None
    stop: tuple = ()
    max_response_length: int = 4
    max_turns: int = 8
    gamma: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0


def drawn(case, before):
    """The chances behind a letter at the case's temperature, in its nucleus."""
    letters, p = zip(*case.chances[before].items())
    log_p = (torch.tensor(p, dtype=torch.float64).log() / case.temperature).log_softmax(0)
    return {letters[i]: math.exp(x) for i, x in nucleus(log_p, case.top_p).items()}


def futures(case, turns, room, before, acted=0, ends=()):
    """Yields all ways to go on: (chance, turns, ends). turns: texts of the policy and of the
    environment; the last one is what the policy is writing. ends: (how many actions from here are
    before it, what the environment gives for the turn) of the last action of each turn."""
    for letter, p in drawn(case, before).items():
        now = [*turns[:-1], turns[-1] + letter]
        over = not letter or any(text in now[-1] for text in case.stop)
        rest = []
        if room > 1 and not over:
            rest = futures(case, now, room - 1, letter, acted + 1, ends)
        else:
            says, bonus = None, 0.0
            if over and case.environment and (len(now) + 1) // 2 < case.max_turns:
                says, bonus = getattr(rewards, case.environment)("", "", "", now)
            mine = (*ends, (acted, bonus))
            left = room - 1 - len(says or "")
            rest = [(1.0, now, mine)]
            if says and left > 0:
                rest = futures(case, [*now, says, ""], left, says[-1], acted + 1, mine)
        for q, *told in rest:
            yield (p * q, *told)


def by_hand(case, answer, turns, room, before):
    """(mean, variance) of the return from a place on."""
    told = []
    for p, whole, ends in futures(case, turns, room, before):
        reward = getattr(rewards, case.reward, ppo_loop.addition_reward)
        made = reward("", "".join(whole), answer, *([whole] if "turn" in case.reward else []))
        made = made[-len(ends) :] if isinstance(made, list) else [0.0] * (len(ends) - 1) + [made]
        earned = [case.gamma**n * (x + bonus) for x, (n, bonus) in zip(made, ends, strict=True)]
        told.append((p, math.fsum(earned)))
    assert math.isclose(sum(p for p, _ in told), 1.0)
    mean = sum(p * x for p, x in told)
    return mean, sum(p * (x - mean) ** 2 for p, x in told)


def place_of(case, line, i):
    """(turns, room, last letter) in front of a token of an answer in truth.jsonl."""
    turns = [""]
    for token, acts in [*zip(line["response_ids"], line["response_mask"])][: i + 1]:
        if acts != len(turns) % 2:
            turns.append("")
        turns[-1] += TOKENIZER.decode([token] if token != EOS else [])
    last = line["response_ids"][i]
    if last != EOS:
        turns[-1] = turns[-1][:-1]
    return turns, case.max_response_length - i, ([*"=", *"".join(turns)])[-1]


def flags_of(case, folder, prompts=PROMPTS):
    """The flags of a case, with a policy and prompts in this folder."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in prompts))
    if not (folder / "policy").exists():
        save_policy(folder / "policy", case.chances)
    words = ["--prompts", file, "--rollout-batch-size", 4096, "--reward", case.reward]
    if hasattr(rewards, case.reward):
        words[-1] = f"{rewards.__file__}:{case.reward}"
        words += ["--reward-timeout", 0]
    for name in ("max_response_length", "gamma", "temperature", "top_p"):
        words += [f"--{name.replace('_', '-')}", getattr(case, name)]
    if case.environment:
        words += ["--environment", f"{rewards.__file__}:{case.environment}"]
        words += ["--max-turns", case.max_turns]
    return [str(x) for x in words + (["--stop", *case.stop] if case.stop else [])]


def made(case, folder, flags=(), prompts=PROMPTS, **fields):
    """Makes true values of a case -> the lines of truth.jsonl."""
    fields = {"policy": f"{folder}/policy", "out": folder / "truth", **fields}
    truth.main(truth.Truth(**fields), [*flags_of(case, folder, prompts), *flags])
    return truth.lines_of(fields["out"] / "truth.jsonl")


TURNS = {"environment": "says_more", "max_response_length": 7}
CASES = {
    "a coin that is tossed three times": Case(COIN, max_response_length=3),
    "answers that end or fill the room": Case(),
    "gamma below 1": Case(gamma=0.8),
    "a temperature and a nucleus": Case(temperature=0.7, top_p=0.8),
    "a text of one token ends a turn": Case(stop=("t",)),
    "a text of two tokens ends a turn": Case(stop=("ht",), max_response_length=5),
    "turns, and rewards of an environment": Case(**TURNS),
    "the reward is told by turn": Case(**TURNS, reward="tosses_by_turn", gamma=0.9),
    "at most two turns, which a text ends": Case(**TURNS, max_turns=2, stop=("t",)),
}


@pytest.mark.parametrize("name", CASES)
def test_sampled_values_are_within_their_error_of_those_by_hand(name, tmp_path):
    """At each place of each answer, and behind likely next tokens; so is their noise."""
    case = CASES[name]
    k = 64
    found = {}
    for line in made(case, tmp_path, answers=8, continuations=k):
        ids = line["response_ids"]
        for i, value in enumerate(line["truth"]):
            assert (value is not None) == line["response_mask"][i]
            if value is not None:
                key = (line["answer"], line["prompt_text"], *ids[:i])
                place = place_of(case, line, i)
                found[key] = (value, line["truth_noise"][i], line["luck"][i], place)
        for i, token, log_p, value, noise in line["siblings"]:
            turns, room, before = place_of(case, line, i)
            letter = TOKENIZER.decode([token])
            assert math.isclose(math.exp(log_p), drawn(case, before)[letter], rel_tol=1e-5)
            place = [*turns[:-1], turns[-1] + letter], room - 1, letter
            key = (line["answer"], line["prompt_text"], *ids[:i], token)
            found[key] = (value, noise, noise * k, place)

    z = []
    lucks = []
    for (answer, *_), (value, noise, luck, place) in found.items():
        mean, variance = by_hand(case, answer, *place)
        assert math.isclose(luck, noise * k, rel_tol=1e-9)
        if variance < 1e-12:
            assert math.isclose(value, mean, abs_tol=1e-6) and luck < 1e-12
        else:
            z.append((value - mean) / math.sqrt(variance / k))
            lucks.append(luck / variance)

    # their squares are a chi-square; variances have a relative error of about a fifth each
    assert len(z) > 5 and abs(sum(z)) < 4 * len(z) ** 0.5
    assert abs(sum(x * x for x in z) - len(z)) < 4 * math.sqrt(2 * len(z))
    assert abs(np.mean(lucks) - 1) < 4 * 0.4 / len(z) ** 0.5


RIGHT = [("a=", "h"), ("b=", "ht"), ("c=", "tttt"), ("d=", "hhhhh"), ("e=", "th"), ("a=", "")]
PLAIN = Case(reward="addition")
EXACT = {
    "plain": (PLAIN, RIGHT),
    "a nucleus": (Case(reward="addition", gamma=0.8, temperature=0.7, top_p=0.8), RIGHT),
    "the answer ends in a text that ends a turn": (PLAIN._replace(stop=("t",)), RIGHT[1:3]),
    "such a text may follow": (Case(reward="right_but_for_t", stop=("t",)), RIGHT[::5]),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_values_are_those_by_hand(name, tmp_path, capsys):
    """Of answers that end, fill the room or do not fit in; also behind likely next tokens."""
    case, prompts = EXACT[name]
    found = 0
    for line in made(case, tmp_path, prompts=prompts, answers=12, exact="{answer}"):
        places = [place_of(case, line, i) for i in range(len(line["response_ids"]))]
        told = [*zip(line["truth"], line["luck"], places)]
        for i, token, _, value, noise in line["siblings"]:
            turns, room, _ = places[i]
            letter = TOKENIZER.decode([token])
            told.append((value, None, ([turns[0] + letter], room - 1, letter)))
        for value, luck, place in told:
            mean, variance = by_hand(case, line["answer"], *place)
            assert math.isclose(value, mean, abs_tol=1e-6)
            assert luck is None or math.isclose(luck, variance, abs_tol=1e-6)
            found += 0 < mean < 1
        assert set(line["truth_noise"]) == {0.0}
    assert found > 10 and "note       " not in capsys.readouterr().out


def test_answers_that_earn_something_in_another_way_are_counted(tmp_path, capsys):
    """--exact gives a lower bound where other texts earn something, too."""
    lines = made(Case(), tmp_path, exact="{answer}")
    off = sum(x["score"] != (x["response_text"] == x["answer"]) for x in lines)
    said = capsys.readouterr().out
    assert f"note       {off} answers earn something in a way that --exact does not know" in said


def values_of(lines):
    """{place: its value, noise and luck}, of all places that have some."""
    found = {}
    for line in lines:
        row = zip(line["truth"], line["truth_noise"], line["luck"])
        for i, numbers in enumerate(row):
            if numbers[0] is not None:
                found[line["prompt_number"], *line["response_ids"][:i]] = numbers
    return found


def assert_same_lines(some, others):
    """The same tokens and samples; log-probs are equal up to rounding."""
    for line, other in zip(some, others, strict=True):
        log_ps, its = ([x[2] for x in row["siblings"]] for row in (line, other))
        assert log_ps == pytest.approx(its, abs=1e-5)
        rest = [[*x[:2], 0.0, *x[3:]] for x in line["siblings"]]
        assert line | {"siblings": rest} == other | {"siblings": rest}
        assert rest == [[*x[:2], 0.0, *x[3:]] for x in other["siblings"]]


def test_the_samples_of_a_place_depend_on_nothing_else(tmp_path):
    """Neither on the rows of a batch, nor on the other answers and places."""
    case = CASES["turns, and rewards of an environment"]
    whole = values_of(made(case, tmp_path, answers=8, continuations=4))
    out = tmp_path / "other"
    more = ["--rollout-batch-size", "7"]
    few = values_of(made(case, tmp_path, more, answers=5, continuations=4, states=2, out=out))
    both = whole.keys() & few.keys()
    assert len(both) > 10 and all(whole[key] == few[key] for key in both)


def test_states_are_spread_evenly(tmp_path):
    case = CASES["turns, and rewards of an environment"]
    whole = made(case, tmp_path, continuations=2)
    some = made(case, tmp_path, continuations=2, states=3, out=tmp_path / "some")
    assert max(sum(x["response_mask"]) for x in whole) > 4
    for line, other in zip(whole, some, strict=True):
        actions = [i for i, acts in enumerate(line["response_mask"]) if acts]
        n = min(3, len(actions))
        picked = [actions[k * len(actions) // n] for k in range(n)]
        expected = [x if i in picked else None for i, x in enumerate(line["truth"])]
        assert other["truth"] == expected


@pytest.mark.parametrize("exact", [None, "{answer}"], ids=["sampled", "exact"])
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(exact, tmp_path, monkeypatch):
    """Wherever the file was cut; so does one with fewer prompts."""
    monkeypatch.setattr(truth, "AT_ONCE", 2)
    prompts = [*PROMPTS, ("c=", "h"), ("d=", "t")]
    asked = {"prompts": prompts, "continuations": 4, "answers": 2, "exact": exact}
    made(Case(), tmp_path, **asked)
    file = tmp_path / "truth" / "truth.jsonl"
    whole = file.read_bytes()
    line = whole.index(b"\n") + 1
    for cut in (line // 2, 5 * line, len(whole) - 1):
        file.write_bytes(whole[:cut])
        made(Case(), tmp_path, **asked)
        assert file.read_bytes() == whole

    out = tmp_path / "few"
    assert len(made(Case(), tmp_path, **asked, out=out, most=3)) == 6
    made(Case(), tmp_path, **asked, out=out)
    assert (out / "truth.jsonl").read_bytes() == whole

    # what is there already stays as it is
    monkeypatch.setattr(truth.Maker, "rows", None)
    made(Case(), tmp_path, **asked)
    assert len(made(Case(), tmp_path, **asked, most=3)) == 10


@pytest.mark.slow
def test_two_ranks_make_the_values_of_one(tmp_path):
    """Also where one of them has no prompts."""
    case = CASES["turns, and rewards of an environment"]
    asked = {"continuations": 4, "answers": 3}
    alone = made(case, tmp_path, **asked)
    flags = flags_of(case, tmp_path)
    words = ["--policy", tmp_path / "policy", "--out", tmp_path / "two"]
    words += [x for name, n in asked.items() for x in (f"--{name}", n)]
    for most in (1, 3):
        more = ["--most", most, *flags]
        succeeded(torchrun(2, ROOT / "tests" / "truth.py", *words, *more))
        assert_same_lines(alone[: 3 * most], truth.lines_of(tmp_path / "two" / "truth.jsonl"))


# ---- What is refused -----------------------------------------------------------------------------


def test_true_values_that_were_made_in_another_way_are_refused(tmp_path):
    """And those of a policy with other weights, or of other prompts."""
    asked = {"continuations": 2, "answers": 1}
    lines = made(Case(), tmp_path, **asked)
    save_policy(tmp_path / "other", CHAIN | {"h": {"h": 0.5, "t": 0.3, "": 0.2}})
    for words, flags, fields in (
        ("another policy;", "", {"policy": f"{tmp_path}/other"}),
        ("another answers;", "", {"answers": 2}),
        ("another states, exact;", "", {"states": 1, "exact": "{answer}"}),
        ("another temperature, top_p;", "--temperature 0.7 --top-p 0.9", {}),
        ("another stop, seed;", "--stop t --seed 1", {}),
        ("another max_response_length, gamma;", "--max-response-length 5 --gamma 0.9", {}),
    ):
        with refused(words):
            made(Case(), tmp_path, flags.split(), **asked | fields)
    with refused("has true values of other prompts"):
        made(Case(), tmp_path, **asked, prompts=[*PROMPTS[:2], ("a=", "h")])
    assert made(Case(), tmp_path, **asked) == lines

    # without --policy they are only judged, with the same discount
    flags = flags_of(Case(), tmp_path)
    truth.main(truth.Truth(out=tmp_path / "truth"), flags)
    with refused("--gamma 0.9: the true values in "):
        truth.main(truth.Truth(out=tmp_path / "truth"), [*flags, "--gamma", "0.9"])


@pytest.mark.parametrize("words, flags, fields", [
    ("--exact: goes with a reward function", ["--environment", f"{rewards.__file__}:luck"],
     {"exact": "{answer}"}),
    ("--continuations: at least 2", [], {"continuations": 1}),
    ("--kl-coef, ", ["--kl-coef", "0.1"], {}),
    ("--gae-level turn with --gamma", ["--gae-level", "turn", "--gamma", "0.9"], {}),
])  # fmt: skip
def test_what_cannot_be_right_is_refused(words, flags, fields, tmp_path):
    with refused(words):
        made(Case(), tmp_path, flags, **fields)
