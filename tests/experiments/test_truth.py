"""truth.py: true values against policies whose futures are listed by hand, and the numbers of
guesses against a plain loop."""

import dataclasses
import json
import math
import typing

import numpy as np
import pytest
import rewards
import torch
import truth
from helpers import BINS, ROOT, refused, succeeded, torchrun, worker
from ppo_helpers import (
    EOS,
    KINDS,
    SHARP,
    TOKENIZER,
    another_tokenizer,
    ids_of,
    policy,
    some_prompts,
)
from reference import gae_by_hand, nucleus
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import common
import ppo_loop
from ppo_loop import ActorConfig

WINDOW = '{"initializer_range": 0.1, "sliding_window": 6}'

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
# each digit is a random one of three, and the end is likelier behind large ones
DIGITS = {letter: {"1": 0.4, "2": 0.2, "3": 0.2, "": 0.2} for letter in "=123"}
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
    lm.generation_config.eos_token_id = [0, EOS]  # 0 is never drawn
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
            if case.environment:  # it is asked after each turn, but the last one ends the answer
                says, bonus = getattr(rewards, case.environment)("", "".join(now), "", now)
            if not over or (len(now) + 1) // 2 == case.max_turns:
                says = None
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
        if case.reward == "addition":
            made = ppo_loop.addition_reward(whole, answer)
        else:
            more = [whole] if "turn" in case.reward else []
            made = getattr(rewards, case.reward)("", "".join(whole), answer, *more)
        made = made[-len(ends) :] if isinstance(made, list) else [0.0] * (len(ends) - 1) + [made]
        earned = [case.gamma**n * (x + bonus) for x, (n, bonus) in zip(made, ends, strict=True)]
        told.append((p, math.fsum(earned)))
    assert math.isclose(sum(p for p, _ in told), 1.0)
    mean = sum(p * x for p, x in told)
    return mean, sum(p * (x - mean) ** 2 for p, x in told)


def place_of(case, line, i):
    """(turns, room, last letter) in front of a token of an answer in truth.jsonl."""
    turns = [""]
    before = "="
    for token, acts in [*zip(line["response_ids"], line["response_mask"])][:i]:
        if acts != len(turns) % 2:
            turns.append("")
        letter = TOKENIZER.decode([token] if token != EOS else [])
        turns[-1] += letter
        before = letter or before

    # behind an observation, the policy begins a turn
    if len(turns) % 2 == 0:
        turns.append("")
    return turns, case.max_response_length - i, before


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
    fields = {"policy": f"{folder}/policy", "out_dir": folder / "truth", **fields}
    truth.main(truth.Truth(**fields), [*flags_of(case, folder, prompts), *flags])
    return truth.lines_of(fields["out_dir"] / "truth.jsonl")


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
        if place[1] == 1 and case.gamma == 1.0 and not case.environment:
            f = value % 1  # how often the last letter counts
            assert math.isclose(luck, f * (1 - f) * k / (k - 1), abs_tol=1e-9)
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
        for i, token, _, value, _ in line["siblings"]:
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


def test_the_samples_of_a_place_depend_on_nothing_else(tmp_path):
    """Neither on the rows of a batch, nor on the other answers and places, which are spread
    evenly."""
    case = CASES["turns, and rewards of an environment"]
    whole = values_of(made(case, tmp_path, answers=8, continuations=4))
    asked = {"answers": 5, "continuations": 4, "states": 3, "out_dir": tmp_path / "other"}
    few = made(case, tmp_path, ["--rollout-batch-size", "7"], **asked)
    found = values_of(few)
    both = whole.keys() & found.keys()
    assert len(both) > 10 and all(whole[key] == found[key] for key in both)

    assert max(sum(line["response_mask"]) for line in few) > 4
    for line in few:
        actions = [i for i, acts in enumerate(line["response_mask"]) if acts]
        n = min(3, len(actions))
        known = [i for i, x in enumerate(line["truth"]) if x is not None]
        assert known == [actions[k * len(actions) // n] for k in range(n)]


def test_log_ratios_are_those_of_both_policies(tmp_path):
    """At each action, at the temperature; observations have none."""
    case = Case(**TURNS, temperature=0.7)
    other = case._replace(chances=CHAIN | {"h": {"h": 0.2, "t": 0.3, "": 0.5}})
    save_policy(tmp_path / "reference", other.chances)
    different = 0
    for line in made(case, tmp_path, continuations=2, reference=f"{tmp_path}/reference"):
        for i, (token, acts) in enumerate(zip(line["response_ids"], line["response_mask"])):
            expected = 0.0
            if acts:
                _, _, before = place_of(case, line, i)
                letter = TOKENIZER.decode([token] if token != EOS else [])
                expected = math.log(drawn(case, before)[letter] / drawn(other, before)[letter])
            assert math.isclose(line["log_ratio"][i], expected, abs_tol=1e-4)
            different += expected != 0
    assert different > 5


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
    assert len(made(Case(), tmp_path, **asked, out_dir=out, most=3)) == 6
    made(Case(), tmp_path, **asked, out_dir=out)
    assert (out / "truth.jsonl").read_bytes() == whole

    # what is there already stays as it is
    monkeypatch.setattr(truth.Maker, "rows", None)
    made(Case(), tmp_path, **asked)
    assert len(made(Case(), tmp_path, **asked, most=3)) == 10


def test_two_ranks_make_the_values_of_one(tmp_path):
    """Also where one of them has no prompts."""
    case = CASES["turns, and rewards of an environment"]
    asked = {"continuations": 4, "answers": 3}
    alone = made(case, tmp_path, **asked)
    flags = flags_of(case, tmp_path)
    words = ["--policy", tmp_path / "policy", "--out-dir", tmp_path / "two"]
    words += [x for name, n in asked.items() for x in (f"--{name}", n)]
    for most in (1, 3):
        more = ["--most", most, *flags]
        succeeded(torchrun(2, ROOT / "tests" / "experiments" / "truth.py", *words, *more))

        # log-probs are equal up to rounding
        found = truth.lines_of(tmp_path / "two" / "truth.jsonl")
        for line, other in zip(alone[: 3 * most], found, strict=True):
            pairs, its = (np.reshape(row.pop("siblings"), (-1, 5)) for row in (dict(line), other))
            np.testing.assert_allclose(pairs, its, atol=1e-5)
            assert {**line, "siblings": None} == {**other, "siblings": None}


# ---- What is refused -----------------------------------------------------------------------------


def test_true_values_that_were_made_in_another_way_are_refused(tmp_path):
    """And those of a policy with other weights, or of other prompts."""
    asked = {"continuations": 2, "answers": 1}
    lines = made(Case(), tmp_path, **asked)
    save_policy(tmp_path / "other", CHAIN | {"h": {"h": 0.5, "t": 0.3, "": 0.2}})
    for words, flags, fields in (
        ("another policy;", "", {"policy": f"{tmp_path}/other"}),
        ("another answers, states, exact;", "", {"answers": 2, "states": 1, "exact": "{answer}"}),
        (
            "another temperature, top_p, stop, max_response_length, gamma, seed;",
            "--temperature 0.7 --top-p 0.9 --stop t --max-response-length 5 --gamma 0.9 --seed 1",
            {},
        ),
    ):
        with refused(words):
            made(Case(), tmp_path, flags.split(), **asked | fields)
    with refused("has true values of other prompts"):
        made(Case(), tmp_path, **asked, prompts=[*PROMPTS[:2], ("a=", "h")])
    assert made(Case(), tmp_path, **asked) == lines

    # without --policy they are only judged, with the same discount
    flags = flags_of(Case(), tmp_path)
    truth.main(truth.Truth(out_dir=tmp_path / "truth"), flags)
    with refused("--gamma 0.9: the true values in "):
        truth.main(truth.Truth(out_dir=tmp_path / "truth"), [*flags, "--gamma", "0.9"])


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


# ---- Critics and engines -------------------------------------------------------------------------


def maker_of(folder, flags, **fields):
    """A Maker of a policy's true values, and its run."""
    run, task = ppo_loop.set_up(ppo_loop.parse([*flags, "--actor.model", str(folder)]))
    return truth.Maker(truth.Truth(**fields), run, task), run


@pytest.mark.parametrize("kind", (*KINDS, "tiny-mistral"))
def test_a_forward_reads_the_chances_that_the_engine_draws_from(kind, tmp_path):
    """Rows of several lengths, longer than a sliding window; at a temperature, in a nucleus."""
    override = SHARP
    if kind in ("tiny-gemma2", "tiny-mistral"):
        override = WINDOW
    policy(kind, override_config=override).export_hf(tmp_path / "policy", TOKENIZER)
    flags = flags_of(Case(temperature=0.7, top_p=0.9, max_response_length=30), tmp_path)
    maker, _ = maker_of(tmp_path / "policy", flags)
    prompts = some_prompts((6, 1, 12, 3))
    replies = maker.engine.generate([(ids, i, 20) for i, ids in enumerate(prompts)], 0.7)
    rows = [ids + said for ids, (said, _, _) in zip(prompts, replies)]
    firsts = [len(ids) for ids in prompts]
    read = truth.next_log_probs(maker.reader.model, maker.run, maker.task, rows, firsts)
    for (ids, log_probs, _), log_p_RV in zip(replies, read, strict=True):
        found = log_p_RV[range(len(ids)), ids].tolist()
        assert found == pytest.approx(log_probs, abs=1e-4)


SURE = {"=": {"h": 1.0}, "h": {"t": 1.0}, "t": {"": 1.0}}


def test_a_reward_model_rates_continuations(tmp_path):
    """All of a policy without a choice are the answer itself."""
    judge = worker(model="tiny-qwen2", value_head_init="normal", seed=3)
    judge.export_hf(str(tmp_path / "judge"))
    flags = [*flags_of(Case(SURE), tmp_path), "--reward-model", f"{tmp_path}/judge"]
    at = flags.index("--reward")
    del flags[at : at + 4]
    where = {"policy": f"{tmp_path}/policy", "out_dir": tmp_path / "truth"}
    truth.main(truth.Truth(**where, continuations=2), flags)
    lm = AutoModelForTokenClassification.from_pretrained(tmp_path / "judge")
    for line in truth.lines_of(tmp_path / "truth" / "truth.jsonl"):
        with torch.no_grad():
            row = torch.tensor([line["prompt_ids"] + line["response_ids"]])
            expected = lm(row).logits[0, -1].item()
        assert abs(expected) > 1e-3 and line["response_text"] == "ht"
        assert line["truth"] == pytest.approx([expected] * 3, abs=1e-5)


HEADS = {
    "scalar": {},
    "bins": {**BINS, "value_range": (-1.5, 2.0)},
    "bounded": {"value_head": "bounded", "value_range": (-1.5, 2.0)},
    "LoRA": {"lora_rank": 3},
    "reads the answer": {},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_critic_is_asked_at_each_place_and_behind_both_siblings(name, tmp_path):
    """Its folder has the values that it had when it was exported."""
    key = "answer" if name == "reads the answer" else None
    flags = ["--privileged-key", key] if key else []
    case = Case(**TURNS)
    lines = made(case, tmp_path, flags, continuations=2, states=4)
    critic = worker(seed=5, value_head_init="normal", tokenizer="tiny-qwen2", **HEADS[name])
    critic.export_hf(str(tmp_path / "critic"))

    def values_of(ids, prompt, answer):
        row = {"prompt_ids": prompt, "response_ids": ids, "reward": 0.0, "answer": answer}
        batch = common.read_rows([json.dumps(row)], critic.tokenizer, hint_key=key)
        return critic.compute_values(batch)[batch.response_mask].tolist()

    file = tmp_path / "truth" / "truth.jsonl"
    run = ppo_loop.parse(flags_of(case, tmp_path) + flags)
    batch = common.read_rows(str(file), None)
    table = truth.Table(lines, batch, 1.0)
    _, guess, _ = truth.ask(table, batch, lines, run, str(tmp_path / "critic"), str(file))
    expected = []
    for line in lines:
        of_row = values_of(line["response_ids"], line["prompt_ids"], line["answer"])
        expected += [v for v, x in zip(of_row, line["truth"]) if x is not None]
    assert guess.values.tolist() == pytest.approx(expected, abs=1e-5)
    assert np.std(expected) > 1e-3 and table.pairs
    for (line, *pair), said in zip(table.pairs, guess.siblings, strict=True):
        rows = [[*line["response_ids"][:i], token, 5] for i, token, *_ in pair]
        last = [values_of(ids, line["prompt_ids"], line["answer"])[-1] for ids in rows]
        assert said == pytest.approx(last, abs=1e-5)

    # an unlike critic stays in truth.json, unless there are other true values
    where = truth.Truth(critic=(f"{tmp_path}/critic",), out_dir=tmp_path / "truth")
    truth.judge(where, run)
    truth.judge(dataclasses.replace(where, critic=()), run)
    told = json.loads((tmp_path / "truth" / "truth.json").read_text())["guesses"]
    assert f"{tmp_path}/critic" in told and "mean of the place" in told
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    truth.judge(dataclasses.replace(where, critic=()), run)
    told = json.loads((tmp_path / "truth" / "truth.json").read_text())["guesses"]
    assert f"{tmp_path}/critic" not in told and "mean of the place" in told


def test_a_critic_of_another_tokenizer_is_refused(tmp_path):
    made(Case(), tmp_path, continuations=2)
    another_tokenizer().save_pretrained(tmp_path / "words")
    config = {"tokenizer": str(tmp_path / "words"), "override_config": '{"vocab_size": 300}'}
    worker(**config).export_hf(str(tmp_path / "critic"))
    with refused("has other token ids than the policy", "--critic "):
        made(Case(), tmp_path, continuations=2, critic=(f"{tmp_path}/critic",))


# ---- The numbers ---------------------------------------------------------------------------------


def some_lines(seed=0, prompts=7):
    """Lines of truth.jsonl with random numbers: three answers to each prompt, with observations,
    places without a true value, answers of one action, and siblings."""
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(3 * prompts):
        n = 1 if i % 7 == 0 else int(rng.integers(2, 9))
        mask = rng.random(n) < 0.8
        mask[[0, -1]] = True
        known = mask & (rng.random(n) < 0.8)
        known[0] = True
        pairs = [
            (j, token, -token / 10, float(rng.normal()), float(rng.random() / 9))
            for j in np.flatnonzero(mask)[:2].tolist()
            for token in (5, 6)
        ]
        numbers = {
            "rewards": np.where(mask, rng.normal(size=n), 0.0).tolist(),
            "truth": [float(rng.normal()) if x else None for x in known],
            "truth_noise": [float(rng.random() / 9) if x else None for x in known],
            "luck": [float(rng.random()) if x else None for x in known],
        }
        ids = {"prompt_ids": [9, 9, 20 + i // 3], "response_ids": rng.integers(3, 99, n).tolist()}
        row = {"prompt_number": i // 3, "response_mask": mask.tolist(), "truncated": False}
        lines.append(
            ids | row | numbers | {"siblings": pairs, "log_ratio": rng.normal(size=n).tolist()}
        )
    return lines


def table_of(lines, gamma):
    """(Table, Batch) of these lines."""
    batch = common.read_rows([json.dumps(line) for line in lines], None)
    return truth.Table(lines, batch, gamma), batch


def actions_of(lines, values, gamma):
    """What a loop knows of each action with a true value, as dicts. values: those of all tokens of
    each answer."""
    found = []
    for row, (line, v) in enumerate(zip(lines, values)):
        columns = [*zip(line["rewards"], v, line["response_mask"])]
        gae = [gae_by_hand(columns, gamma, lam, 0.0) for lam in (0.0, 0.95, 1.0)]
        acts = [j for j, x in enumerate(line["response_mask"]) if x]
        for place, j in enumerate(acts):
            if line["truth"][j] is None:
                continue
            behind, its_noise = 0.0, 0.0
            if j != acts[-1]:
                after = acts[place + 1]
                behind, its_noise = line["truth"][after], line["truth_noise"][after]
            one = {"row": row, "prompt": line["prompt_number"], "place": place, "v": v[j]}
            one |= {name: line[name][j] for name in ("truth", "luck", "log_ratio")}
            one["before"] = sum(line["log_ratio"][:j])
            one["return"] = sum(gamma**n * line["rewards"][i] for n, i in enumerate(acts[place:]))
            one |= {"noise": line["truth_noise"][j], "gae": [x[j][0] for x in gae]}
            if behind is not None:
                one["advantage"] = line["rewards"][j] + gamma * behind - one["truth"]
                one["advantage_noise"] = one["noise"] + gamma**2 * its_noise
            found.append(one)
    return found


def of(actions, name):
    return np.array([one[name] for one in actions])


def numbers_by_hand(actions, pairs):
    """The numbers of a guess, of actions that each count once. pairs: (value of one, of the other,
    what the guess says of each)."""
    v, t, noise = (of(actions, name) for name in ("v", "truth", "noise"))
    later = [one for one in actions if one["place"] > 0]
    off = v - t
    explained = lambda off, t, noise: 1 - (off.var() - noise.mean()) / (t.var() - noise.mean())
    told = {"explained": explained(off, t, noise), "bias": off.mean()}
    told["later"] = explained(
        of(later, "v") - of(later, "truth"), of(later, "truth"), of(later, "noise")
    )
    told["slope"], _ = np.polyfit(v, t, 1)
    told["correlation"] = np.corrcoef(v, t)[0, 1] * t.std() / math.sqrt(t.var() - noise.mean())
    told["samples"] = of(actions, "luck").mean() / (np.mean(off**2) - noise.mean())

    rows = [[one for one in actions if one["row"] == row] for row in {x["row"] for x in actions}]
    rows = [row for row in rows if len(row) > 1]
    within = {name: np.mean([of(row, name).var(ddof=1) for row in rows]) for name in ("v", "truth")}
    spread = within["truth"] - np.mean([of(row, "noise").mean() for row in rows])
    told["flatness"] = within["v"] / spread

    known = [one for one in actions if "advantage" in one]
    for k, lam in enumerate(("0", "0.95", "1")):
        wrong = np.array([one["gae"][k] - one["advantage"] for one in known])
        error = np.mean(wrong**2) - of(known, "advantage_noise").mean()
        told[f"lambda {lam}"] = math.sqrt(max(error, 0.0))
    told["siblings"] = np.mean([(x - y) * (a - b) > 0 for x, y, a, b in pairs])
    return told


def clear_pairs(lines, actions):
    """[(prompt, one value, the other)] of siblings whose true values clearly differ."""
    least = 0.01 * of(actions, "truth").std()
    found = {}
    for line in lines:
        for one, two in zip(line["siblings"][::2], line["siblings"][1::2]):
            if abs(one[3] - two[3]) > max(least, 2 * math.sqrt(one[4] + two[4])):
                key = (line["prompt_number"], *line["response_ids"][: one[0]])
                found[key] = (line["prompt_number"], one[3], two[3])
    return list(found.values())


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_numbers_are_those_of_a_plain_loop(gamma):
    """Also where some prompts count several times, and others never; and at each place."""
    lines = some_lines()
    table, batch = table_of(lines, gamma)
    rng = np.random.default_rng(1)
    values = [rng.normal(size=len(line["rewards"])) for line in lines]
    v_T = np.concatenate([np.append(np.zeros(3), v) for v in values])
    actions = actions_of(lines, values, gamma)
    pairs = clear_pairs(lines, actions)
    said = rng.normal(size=(len(pairs), 2)).tolist()
    guess = truth.Guess(table.column(v_T), truth.advantages_of(table, batch, v_T, gamma), said)
    assert 3 < len(pairs) < 21

    for w_P in (np.ones(7), np.array([2, 0, 1, 3, 0, 1, 1])):
        # a row that counts twice is two rows
        copies = [
            one | {"row": (one["row"], k)}
            for one in actions
            for k in range(int(w_P[one["prompt"]]))
        ]
        both = [(x, y, *z) for (p, x, y), z in zip(pairs, said) for _ in range(int(w_P[p]))]
        expected = numbers_by_hand(copies, both)
        found = truth.numbers(table, guess, w_P)
        assert found.keys() == expected.keys() == truth.NUMBERS.keys()
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)

    for name, chosen in truth.places_of(table).items():
        low, _, high = name.partition(" to ")
        there = [one for one in actions if int(low) <= one["place"] <= int(high or low)]
        assert len(there) == chosen.sum()
        found = truth.numbers(table, guess, np.ones(7), chosen)
        off = of(there, "v") - of(there, "truth")
        assert found["bias"] == pytest.approx(off.mean()) and "flatness" not in found
        spread = of(there, "truth").var() - of(there, "noise").mean()
        if spread > 0:
            expected = 1 - (off.var() - of(there, "noise").mean()) / spread
            assert found["explained"] == pytest.approx(expected)
            assert truth.spread_of(table, chosen) == pytest.approx(math.sqrt(spread))


def test_simple_guesses_are_those_of_a_plain_loop():
    lines = some_lines()
    table, batch = table_of(lines, 0.9)
    found = truth.guesses(table, lines, batch, 0.9)
    score = [sum(line["rewards"]) for line in lines]
    zeros = [np.zeros(len(x["rewards"])) for x in lines]
    actions = actions_of(lines, zeros, 0.9)
    names = ("truth", "truth_noise", "luck")
    known = [line | dict.fromkeys(names, x) for line, x in zip(lines, zeros)]
    every = actions_of(known, zeros, 0.9)  # also those without a true value
    expected = {"mean of all answers": [np.mean(score)] * len(actions)}
    mine = [[3 * one["prompt"] + k for k in range(3)] for one in actions]
    expected["mean of the other answers"] = [
        np.mean([score[k] for k in some if k != one["row"]]) for some, one in zip(mine, actions)
    ]
    place, returns = of(every, "place"), of(every, "return")
    expected["mean of the place"] = [returns[place == one["place"]].mean() for one in actions]

    # log ratios are advantages up to a factor, and values are their sums
    ratio = of(actions, "log_ratio")
    known = np.isfinite(table.advantage)
    beta = np.linalg.lstsq(ratio[known, None], table.advantage[known], rcond=None)[0][0]
    expected["log(pi / pi_ref)"] = np.mean(score) + beta * of(actions, "before")
    for name, values in expected.items():
        assert found[name].values.tolist() == pytest.approx(list(values), abs=1e-4), name
    for x_A in found["log(pi / pi_ref)"].advantages:
        assert x_A.tolist() == pytest.approx(list(beta * ratio), abs=1e-4)
    order = found["the policy's own chances"].siblings
    assert len(order) == len(table.pairs) and all(pair == (-0.5, -0.6) for pair in order)


def test_what_there_is_to_know_is_that_of_a_plain_loop():
    lines = some_lines()
    table, _ = table_of(lines, 1.0)
    actions = actions_of(lines, [np.zeros(len(x["rewards"])) for x in lines], 1.0)
    t, noise, returns = (of(actions, name) for name in ("truth", "noise", "return"))
    expected = {"knowable": 1 - (np.var(returns - t) - noise.mean()) / returns.var()}
    first = of(actions, "place") == 0
    left = t[first].var() - noise[first].mean()
    expected["inside"] = 1 - left / returns[first].var()
    known = [one for one in actions if "advantage" in one]
    square = np.mean(of(known, "advantage") ** 2) - of(known, "advantage_noise").mean()
    expected["advantage"] = math.sqrt(square)
    assert truth.known_of(table) == pytest.approx(expected, abs=1e-5)


def test_errors_are_those_of_drawing_the_prompts_again(monkeypatch):
    monkeypatch.setattr(truth, "DRAWS", 500)
    lines = some_lines(prompts=12)
    table, _ = table_of(lines, 1.0)
    v_A = np.random.default_rng(2).normal(size=len(table.truth))
    off_A, rng = v_A - table.truth, np.random.default_rng(3)
    drawn = []
    for _ in range(500):
        picked = [off_A[table.prompt == i] for i in rng.integers(0, 12, 12)]
        drawn.append(np.concatenate(picked).mean())
    number, error = truth.with_errors(table, truth.Guess(v_A, None, None))["bias"]
    assert number == pytest.approx(off_A.mean()) and error == pytest.approx(np.std(drawn), rel=0.1)

    # a single prompt does not tell
    table, _ = table_of(some_lines(prompts=1), 1.0)
    _, error = truth.with_errors(table, truth.Guess(0 * table.truth, None, None))["bias"]
    assert math.isnan(error)


def test_numbers_of_estimates_are_on_average_those_of_exact_values():
    """Of four samples each: the noise of their means does not count."""
    rng = np.random.default_rng(0)
    lines = some_lines(prompts=40)
    masks = [np.array(line["response_mask"]) for line in lines]
    p = [np.where(mask, rng.random(len(mask)), 0) for mask in masks]
    values = [0.5 * x + 0.2 * rng.normal(size=len(x)) for x in p]
    v_T = np.concatenate([np.append(np.zeros(3), v) for v in values])

    def told(samples):
        for line, p_R, mask in zip(lines, p, masks):
            columns = {"truth": p_R, "truth_noise": 0 * p_R, "luck": p_R * (1 - p_R)}
            if samples:
                mine = rng.random((samples, len(p_R))) < p_R
                luck = mine.var(0, ddof=1)
                columns = {"truth": mine.mean(0), "truth_noise": luck / samples, "luck": luck}
            for name, x_R in columns.items():
                line[name] = [float(x) if acts else None for x, acts in zip(x_R, mask)]
            line |= {"rewards": [0.0] * len(p_R), "siblings": []}
        table, batch = table_of(lines, 1.0)
        advantages = truth.advantages_of(table, batch, v_T, 1.0)
        guess = truth.Guess(table.column(v_T), advantages, None)
        found = truth.numbers(table, guess, np.ones(40))
        return found | {"all advantages": truth.known_of(table)["advantage"]}

    exact = told(None)
    assert len(exact) == len(truth.NUMBERS)  # without siblings
    drawn = [told(4) for _ in range(16)]
    for key, expected in exact.items():
        x = np.array([one[key] for one in drawn])
        error = x.std(ddof=1) / math.sqrt(len(x))
        assert abs(x.mean() - expected) < 4 * error + 1e-6, (key, x.mean(), expected, error)
