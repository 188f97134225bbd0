"""The critic as actors of Ray, next to the critic in this process."""

import json
import re
import sys

import pytest
from helpers import ROOT, common, run, succeeded, worker


def test_two_actors_of_ray_make_the_updates_of_one_process():
    """Of the same rows: both ranks tell the same loss, which is that of the whole batch."""
    pytest.importorskip("ray")
    said = succeeded(run("bash", "-c", f"{sys.executable} {ROOT}/tests/lessons/ray_actor.py"))
    losses = [json.loads(x) for x in re.findall(r"^loss (.*)$", said, flags=re.M)]

    alone = worker(model="tiny-qwen2", lr=1e-3)
    rows = common.read_rows(str(ROOT / "tests" / "rows.jsonl"), common.char_tokenizer())
    for batch, (first, second) in zip(rows.split(512), losses, strict=True):
        batch.values = alone.compute_values(batch)
        common.add_returns(batch, gamma=1.0, lam=0.95)
        loss = alone.update_critic(batch)["critic/vf_loss"]
        assert first == second == pytest.approx(loss, rel=1e-5)
