"""search.py: answers that a critic helps to choose while they are written, against a slow search by
transformers' models."""

import json
import re
import statistics

import pytest
import rewards
import search
import torch
from helpers import ROOT, refused, succeeded, torchrun, worker
from ppo_helpers import (
    EOS,
    SHARP,
    TOKENIZER,
    a_run,
    a_task,
    engine_of,
    ids_of,
    plain,
    policy,
    some_prompts,
    text_of_reply,
)
from reference import log_softmax_of, nucleus
from transformers import AutoModelForTokenClassification

import common
import ppo_loop

SCRIPT = ROOT / "tests" / "tools" / "search.py"
REWARDS = ROOT / "tests" / "loop" / "rewards.py"
FOUR = [EOS, *range(4, 100, 4)]  # ends of answers, which are likely then


def futures(lm, ids, size, ends):
    """Yields what a policy may say next in at most this many tokens, with its log-prob."""
    for token, log_p in nucleus(log_softmax_of(lm, torch.tensor(ids), 1.0)[-1], 0.12).items():
        if size == 1 or ends([*ids, token]):
            yield [token], log_p
            continue
        for rest, more in futures(lm, [*ids, token], size - 1, ends):
            yield [token, *rest], log_p + more


def by_hand(lm, critic, row, block, beta, ends):
    """The answer that each time goes on with the best of all blocks."""
    prompt, _, room = row
    said = []
    total = 0.0

    @torch.no_grad()
    def value(ids):
        return critic(torch.tensor([ids])).logits[0, -1, 0].item()

    while len(said) < room and not (said and ends(prompt + said)):
        heights = []
        for ids, log_p in futures(lm, prompt + said, min(block, room - len(said)), ends):
            whole = prompt + said + ids
            over = len(said + ids) == room or ends(whole)
            heights.append((value(whole[:-1] if over else whole) + log_p / beta, ids, log_p))
        _, ids, log_p = max(heights)
        said += ids
        total += log_p
    return said, total, ends(prompt + said)


@pytest.mark.parametrize("block, beta", [(1, 100.0), (1, 0.3), (2, 0.3)])
def test_the_best_of_all_blocks_goes_on(block, beta, tmp_path):
    """With candidates that are all that the policy may say. Some answers end, some have no room."""
    w = policy()
    engine = engine_of(w, FOUR, top_p=0.12)
    sure = worker(override_config=SHARP, value_head_init="normal")
    sure.export_hf(str(tmp_path / "critic"))
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()

    rows = [(ids, 7 * n, 1 + n % 5) for n, ids in enumerate(some_prompts((6, 1, 12, 3, 9)))]
    task = a_task(stop_texts=ppo_loop.stop_texts(a_run(), TOKENIZER))
    ours = search.generate(search.Search(150, block, beta), engine, sure, task, rows, 1.0)
    assert {ended for *_, ended in ours} == {True, False}
    ends = lambda ids: ids[-1] in FOUR
    for row, (ids, log_probs, ended) in zip(rows, ours, strict=True):
        theirs, total, its_end = by_hand(plain(w), critic, row, block, beta, ends)
        assert (ids, ended) == (theirs, its_end) and len(log_probs) == len(ids)
        assert sum(log_probs) == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("block", [1, 3])
def test_a_text_to_stop_at_may_lie_across_blocks(block):
    """The answer ends with its first one, wherever blocks begin."""
    engine = engine_of(policy())
    critic = worker(override_config=SHARP, value_head_init="normal")
    rows = [(ids_of("1+2="), n, 10) for n in range(8)]

    def said(*texts):
        task = a_task(stop_texts=ppo_loop.stop_texts(a_run(stop=texts), TOKENIZER))
        replies = search.generate(search.Search(1, block), engine, critic, task, rows, 1.0)
        assert all(len(ids) == len(log_probs) for ids, log_probs, _ in replies)
        return [(TOKENIZER.decode(ids), ended) for ids, _, ended in replies]

    free = said()
    pairs = re.findall("[0-9A-Z]{2}", " ".join(text for text, _ in free))[:4]
    cut = said(*pairs)
    for (text, ended), pair in zip(free, cut, strict=True):
        ends = [i + 2 for i in range(len(text)) if text[i : i + 2] in pairs]
        assert pair == ((text[: ends[0]], True) if ends else (text, ended))
    assert sum(ended for _, ended in cut) >= 2


@pytest.fixture
def folders(tmp_path):
    """Flags for a policy and a critic with random weights."""
    policy().export_hf(str(tmp_path / "policy"), TOKENIZER)
    worker(override_config=SHARP, value_head_init="normal").export_hf(str(tmp_path / "critic"))
    return f"--actor.model {tmp_path}/policy --critic.model {tmp_path}/critic"


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("megatron", marks=pytest.mark.megatron)])
def test_a_search_answers_the_held_out_prompts_and_trains_nothing(
    backend, folders, parse, tmp_path, capsys
):
    """Its file has each prompt once, in their order, and the critic's values, and can be scored."""
    flags = f"--reward {REWARDS}:share_of_letters --critic {backend} {folders}"
    search.main(search.Search(3, block=2), parse(flags))
    said = capsys.readouterr().out
    out = tmp_path / "out"
    assert [file.name for file in out.iterdir()] == ["searched.jsonl"]

    rows = common.read_lines(out / "searched.jsonl")
    assert [row["prompt_text"] for row in rows] == [
        json.loads(line)["prompt"] for line in ppo_loop.addition_rows(512, 0, held_out=True)
    ]
    mean = statistics.fmean(row["score"] for row in rows)
    assert mean > 0 and f"searched   mean reward {mean:.3f}\n" in said

    asked = [(ids_of(row["prompt_text"]), 0, 8) for row in rows]
    greedy = [text_of_reply(ids) for ids, *_ in engine_of(policy()).generate(asked, 0.0)]
    mean = statistics.fmean(rewards.share_of_letters("", text, "") for text in greedy)
    assert f"greedy     mean reward {mean:.3f}\n" in said

    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    for row in rows:
        with torch.no_grad():
            ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
            values = critic(ids).logits[0, len(row["prompt_ids"]) - 1 : -1, 0]
        assert row["values"] == pytest.approx(values.tolist(), abs=1e-5)
        assert sum(row["rewards"]) == pytest.approx(row["score"])
    assert len(common.read_rows(str(out / "searched.jsonl"), TOKENIZER)) == len(rows)

    no_critic = folders.replace("/critic", "/policy")
    with refused("holds no trained value head", f"--critic.model {tmp_path}/policy: "):
        search.main(search.Search(3), parse(f"--critic {backend} {no_critic}"))


@pytest.mark.parametrize("flag", ["--resume auto", "--privileged-key a"])
def test_a_search_refuses_what_it_would_pass_over(flag, parse):
    """Flags that say which weights or texts the critic gets."""
    with refused("not for a search", begin=f"{flag}: "):
        search.main(search.Search(4), parse(f"--prompts x --reward gsm8k {flag}"))


def test_prompts_of_a_search_need_no_reward(folders, parse, tmp_path, capsys):
    (tmp_path / "one").write_text('{"prompt": "1+1="}\n')
    search.main(search.Search(2), parse(f"--prompts {tmp_path}/one --reward none {folders}"))
    assert "mean reward" not in capsys.readouterr().out
    [row] = common.read_lines(tmp_path / "out" / "searched.jsonl")
    assert row["score"] == 0 and row["response_text"] and any(row["values"])


def test_two_ranks_search_as_one(folders, tmp_path):
    """Up to rounding. Also where one of them has no prompts, in turns of an environment, and
    without a reward."""
    rows = ({"prompt": f"{n}+{n}=", "answer": "h"} for n in range(7))
    (tmp_path / "seven").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "one").write_text('{"prompt": "1+1=", "answer": "h"}\n')
    for file, more in (
        ("seven", f"--reward {REWARDS}:tosses --environment {REWARDS}:says_more"),
        ("one", "--reward none"),
    ):
        flags = f"--candidates 3 --beta 2 --prompts {tmp_path}/{file} {more} {folders}"
        flags += " --max-response-length 12"
        found = []
        for ranks in (1, 2):
            out = tmp_path / f"{file} on {ranks}"
            words = (*flags.split(), "--out-dir", out)
            said = succeeded(torchrun(ranks, SCRIPT, *words))
            assert ("searched   mean reward" in said) == ("none" not in more)
            found.append(common.read_lines(out / "searched.jsonl"))
        assert len(found[0]) == {"seven": 7, "one": 1}[file]
        for one, two in zip(*found, strict=True):
            # another batch rounds in another way, see HFRollout
            for name in ("values", "log_probs"):
                assert two.pop(name) == pytest.approx(one.pop(name), abs=1e-5)
            assert one == two
