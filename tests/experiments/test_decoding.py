"""The table of decoding.py."""

import re
import statistics

import decoding
import numpy as np
import pytest
import rewards
import torch
from helpers import worker
from ppo_helpers import SHARP, TOKENIZER, policy
from transformers import AutoModelForTokenClassification

import ppo_loop


@pytest.fixture
def flags(tmp_path):
    """Of a policy and a critic with random weights, and a reward."""
    policy().export_hf(str(tmp_path / "policy"), TOKENIZER)
    worker(override_config=SHARP, value_head_init="normal").export_hf(str(tmp_path / "critic"))
    folders = f"--actor.model {tmp_path}/policy --critic.model {tmp_path}/critic"
    return f"--reward {rewards.__file__}:share_of_letters {folders}"


def test_choices_among_whole_answers_by_hand(flags, parse, tmp_path):
    """What each way earns on average if ties are broken by lot, and which tokens it costs."""
    run, task = ppo_loop.set_up(parse(f"{flags} --temperature 0.4"))
    meter = decoding.Meter(run, task)
    prompts = task.held_out[:5]
    ways = decoding.chosen(meter, run, task, prompts, 3)

    replies = [ppo_loop.Reply(prompts[i // 3], i) for i in range(15)]
    ppo_loop.roll_out(meter.engine, task, replies, run, run.temperature, f"{run.seed}")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    expected = {name: [] for name in ways}
    for i in range(0, 15, 3):
        some = replies[i : i + 3]
        earns = [rewards.share_of_letters("", reply.text, "") for reply in some]
        ids = [torch.tensor([reply.prompt.ids + reply.ids[:-1]]) for reply in some]
        answers = [([*re.findall("[0-9]+", x.text)] or [x.text])[-1] for x in some]
        for mine, heights in zip(
            expected.values(),
            (
                [0, 0, 0],
                [answers.count(x) for x in answers],
                [sum(reply.log_probs) for reply in some],
                [critic(x).logits[0, -1, 0].item() for x in ids],
            ),
        ):
            mine.append(statistics.fmean(x for x, h in zip(earns, heights) if h == max(heights)))
    for name, mine in expected.items():
        np.testing.assert_allclose(ways[name].rewards, mine, atol=1e-6, err_msg=name)

    drawn = sum(len(reply.ids) for reply in replies)
    read = drawn + sum(len(reply.prompt.ids) for reply in replies)
    costs = [way.cost[:2].tolist() for way in ways.values()]
    assert costs == [[drawn / 3, 0], [drawn, 0], [drawn, 0], [drawn, read]]


def test_the_table_has_the_beta_that_is_best_for_other_prompts(flags, parse, capsys):
    """And the values alone."""
    asked = decoding.Decoding("", "", n=(2,), betas=(1e-3, 1.0), blocks=(8,), seeds=1, most=9)
    decoding.tell(decoding.compare(asked, parse(flags)))
    *said, table = capsys.readouterr().out.split("\n\n")
    betas = dict(re.findall(r"(\S+): (\d\.\d{3})", said[0].partition("by beta")[2]))
    assert [*betas] == ["0.001", "1", "inf"]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    names = [row[0].removeprefix("| ") for row in rows]
    assert names[:4] == ["greedy", "one sample", "majority of 2", "most likely of 2"]
    best = max(betas, key=betas.get)
    searched = [name.rpartition("beta ")[2] for name in names[5:]]
    assert set(searched) == {best, "inf"}
