"""Rewards, reward models, and what becomes of them: accuracy, advantages, returns by a loop."""

import json
import math
import types

import numpy
import pytest
import torch
import transformers
from helpers import SHARED, actions_of, random_batch, rows_of, spans_of
from ppo_helpers import TOKENIZER, a_run, a_task, another_tokenizer, chat_tokenizer, ids_of, play
from reference import gae_by_hand, kl_of

import common
import ppo_loop
from common import UserError
from ppo_loop import Prompt, Reply


def test_addition_and_gsm8k_rewards():
    right = [ppo_loop.addition_reward([x], "3") for x in ("3", "4", "", "3 ", "03")]
    assert right == [1, 0, 0, 0, 0]

    wrongs = ["", "#### 5 no,\n#### 3", "the answer is 5", "#### ,", "####" + " " * 20_000]
    for answer, right, wrong in (
        ("#### 5", ["#### 3 no,\n#### 5", "#### 5 apples", "####5", "#### 5%"], wrongs),
        ("...\n#### 18", ["so it is\n#### 18", "#### 18.00", "#### 18."], ["#### 19"]),
        ("#### 1,234", ["#### 1234", "#### $1,234"], ["#### 1"]),
        ("#### 1234", ["#### 1,234"], ["#### 234"]),
        ("#### -7", ["#### -$7", "#### $-7"], ["#### 7"]),
        ("#### 0.5", ["#### .5"], ["#### 5"]),
    ):
        assert all(ppo_loop.gsm8k_reward([x], answer) == 1 for x in right), answer
        assert all(ppo_loop.gsm8k_reward([x], answer) == 0 for x in wrong), answer


@pytest.mark.parametrize("name, turns, earned", [
    ("gsm8k", ["", "#### 5", "no"], 0),
    ("gsm8k", ["#### 5", "#### 4", "so it is"], 1),
    ("gsm8k", ["#### 1", "go on", "2"], 0),
    ("addition", ["4", "5"], 0),
    ("addition", ["", "try again", "5"], 1),
])  # fmt: skip
def test_built_in_rewards_read_what_the_policy_wrote(name, turns, earned):
    """The answer is 5, or #### 5; what stands at odd places has the environment said."""
    reply = Reply(Prompt([1], answer={"gsm8k": "#### 5", "addition": "5"}[name]), 0, turns=turns)
    reply.text = "".join(turns)
    function = ppo_loop.load_function(name, "--reward", 1.0)
    assert ppo_loop.ask_all(function, [reply]) == [(float(earned), "")]


def test_a_drawn_pad_is_in_the_text():
    """5, pad, 5 is not 55."""
    tokenizer = common.char_tokenizer()
    said = [*ids_of("5"), tokenizer.pad_token_id, *ids_of("5"), tokenizer.eos_token_id]
    engine = types.SimpleNamespace(generate=lambda *_: [(said, [-1.0] * 4, True)])
    reply = Reply(Prompt([9], answer="55"), 0)
    task = a_task(tokenizer=tokenizer)
    ppo_loop.roll_out(engine, task, [reply], a_run(max_response_length=4), 1.0)
    assert reply.text == "5<pad>5" == reply.turns[0]
    assert ppo_loop.addition_reward(reply.turns, "55") == 0


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
            agrees.append(ppo_loop.gsm8k_reward([text], answer) == label)
    assert len(agrees) == 5 * 1319 and all(agrees)


def test_a_reward_that_is_not_a_number_is_a_fault_and_counts_as_0(capsys):
    """As does a fault of the environment before it. If all rows fail, the run ends."""
    says = [1, 0.25, numpy.True_, 8, None, math.nan, "x", [1], 10**5000, numpy.float16("inf")]
    replies = [Reply(Prompt([1], f"p{i}", i), i, text=f"r{i}") for i in range(len(says))]
    replies[3].fault = "died"
    heard = []
    function = lambda prompt, said, i: heard.append((prompt, said)) or says[i]
    score = lambda some: ppo_loop.score(a_run(), function, ppo_loop.Phases(False), some)
    rewards, mean, faults = score(replies)

    assert sorted(heard) == sorted((f"p{i}", f"r{i}") for i in range(len(says)))
    scores = [reply.score for reply in replies]
    assert rewards == [1, 0.25, 1] and scores == rewards + [0] * 7
    assert faults == 7 and mean == pytest.approx(0.75) and all(type(x) is float for x in scores)
    assert not any(r.fault for r in replies[:3]) and all(r.fault for r in replies[3:])
    assert replies[3].fault == "died"
    assert "7 of 10 rows failed and are left out: died" in capsys.readouterr().out
    with pytest.raises(UserError, match="--environment: all 7 rows failed: died"):
        score(replies[3:])


def test_a_reward_may_return_its_parts(capsys):
    """Their means are over the rows that have them. A part may be text, which is left out. A dict
    without a finite score is a fault of its row."""
    says = [
        {"score": 1, "format": 0.5, "pred": "3"},
        {"score": 0.25, "format": 1, "length": 7},
        0.5,
        {"format": 9.0},
        {"score": math.nan, "format": 9.0},
    ]
    replies = [Reply(Prompt([1], f"p{i}", i), i) for i in range(len(says))]
    function = lambda prompt, said, i: says[i]
    rewards, _, faults = ppo_loop.score(a_run(), function, ppo_loop.Phases(False), replies)
    assert rewards == [1, 0.25, 0.5] and faults == 2
    assert ppo_loop.part_means(replies) == {"reward/format": 0.75, "reward/length": 7}
    words = "the 'score' in a dict of a reward must be a finite number, or a list of them, not {'f"
    assert words in capsys.readouterr().out
    assert ppo_loop.part_means(replies[2:]) == {}


def rewarded(turns, observed, says):
    """A reply of these turns, with what the environment returns after each, and another row, after
    score with a reward that returns this, or 1 for the other row -> (reply, what score returns)."""
    observed = iter(observed)
    [reply], _ = play([[turn] for turn in turns], lambda *_: next(observed))
    other = Reply(Prompt([1], "other"), 1)
    reward = lambda prompt, *_: 1.0 if prompt == "other" else says
    return reply, ppo_loop.score(a_run(), reward, ppo_loop.Phases(False), [reply, other])


# the tokens are those of "ab", its end, the environment's "[1]", "cd" and its end
@pytest.mark.parametrize("observed, says, earned", [
    ("[1]", 1.5, {8: 1.5}),
    ("[1]", [0.5, -1], {2: 0.5, 8: -1}),
    ("[1]", (0.5, numpy.float32(-1)), {2: 0.5, 8: -1}),
    ("[1]", torch.tensor([0.5, -1]), {2: 0.5, 8: -1}),
    ("[1]", numpy.array([2]), {8: 2}),
    ("[1]", {"score": [0.5, -1], "format": 9}, {2: 0.5, 8: -1}),
    ("[1]", [1, 2, 3, 4, 5, 6, 7, 8, 9], {0: 1, 1: 2, 2: 3 + 4 + 5 + 6, 6: 7, 7: 8, 8: 9}),
    (("[1]", 0.25), 1.5, {2: 0.25, 8: 1.5}),
    (("[1]", 0.25), [0.5, -1], {2: 0.75, 8: -1}),
    ((None, 0.25), 1.5, {2: 1.75}),
])  # fmt: skip
def test_credit_stands_at_the_actions_that_earn_it(observed, says, earned):
    """A number at the last action, one per turn at the turn's last action, one per token at the
    token, or at the action before the environment's. The row's reward is the sum, and a KL is paid
    on top of it."""
    reply, (rewards, mean, faults) = rewarded(["ab", "cd"], [observed, None], says)
    assert (reply.fault, faults) == ("", 0)
    assert [reply.score, 1.0] == rewards == [sum(earned.values()), 1.0] and mean == sum(rewards) / 2
    ours_T = ppo_loop.rewards_of([reply, reply])
    expected = [0.0] * 3 + [float(earned.get(i, 0)) for i in range(len(reply.ids))]
    assert ours_T.tolist() == 2 * expected

    batch = ppo_loop.to_batch([reply])
    batch.old_log_probs, batch.ref_log_probs = torch.tensor([[-0.5], [-2.5]]) * batch.response_mask
    batch.values = 0 * batch.old_log_probs
    run = a_run(whiten="none")
    ppo_loop.assign_credit(batch, batch, ours_T[: len(expected)], 0.1, run, SAYS_THE_SAME)
    paid = [x - 0.1 * 2.0 * acts for x, acts in zip(expected, batch.response_mask.tolist())]
    assert batch.token_level_rewards.tolist() == pytest.approx(paid)


@pytest.mark.parametrize("said", ["", "[1]"])
def test_a_turn_is_what_the_policy_wrote_in_one_go(said):
    """Also where the environment has said nothing in between. Three turns earn 1, 2 and 4, and
    gamma counts them."""
    reply, _ = rewarded(["ab", "cd", "e"], [said, said, None], [1, 2, 4])
    batch = ppo_loop.to_batch([reply])
    batch.token_level_rewards = ppo_loop.rewards_of([reply])

    # three tokens in the first turn, three in the second, two in the last one
    expected = [3.0] * 3 + [4.0] * 3 + [4.0] * 2
    assert common.monte_carlo(batch, 0.5)[batch.response_mask].tolist() == expected
    assert batch.mean_return(0.5)[0] == pytest.approx(sum(expected) / 8)


@pytest.mark.parametrize("turns, says, words", [
    (["", "", ""], [1, 2, 3], "3 numbers for 3 turns and 3 tokens"),
    (["a", "b"], [1, 2, 3], "3 numbers for 2 turns and 4 tokens"),
    (["a", "b"], {"score": [], "format": 1}, "0 numbers for 2 turns and 4 tokens"),
    (["a", "b"], [1, math.nan], "must be a finite number, or a list of them, not [1.0, nan]"),
    (["a", "b"], [[1, 2]], "must be a finite number, or a list of them, not [[1.0, 2.0]]"),
])  # fmt: skip
def test_a_list_whose_length_says_neither_turns_nor_tokens_is_a_fault(turns, says, words):
    """The row has no reward, also not what the environment has given."""
    reply, (rewards, _, faults) = rewarded(turns, [*[("", 0.5)] * (len(turns) - 1), None], says)
    assert rewards == [1.0] and faults == 1 and words in reply.fault
    assert not ppo_loop.rewards_of([reply]).any()


@pytest.mark.parametrize("says", [
    ("x", math.nan), ("x", "y"), (1, 2), ["x"], ("x", 1, 2),
    # keys that would be lost
    {"prompt": "x", "reward": 1.0}, {"role": "tool", "content": "x", "reward": 1.0},
    {"prompt": "x", "messages": []}, {"tools": []}, {}, {"content": "x"}, {"role": 5},
])  # fmt: skip
def test_an_environment_returns_nothing_else_than_text_or_none_and_a_reward(says):
    reply, (rewards, _, faults) = rewarded(["a"], [says], 1)
    assert rewards == [1.0] and faults == 1
    kinds = "text, a message, a new context or None, or (one of these, a reward)"
    assert f"an environment must return {kinds}, not " in reply.fault


def test_one_number_for_a_turn_of_one_token_is_not_ambiguous():
    """And turns are turns even if the environment writes nothing between them."""
    reply, _ = rewarded([""], [None], [2])
    assert (reply.fault, dict(reply.earned)) == ("", {0: 2.0})
    reply, _ = rewarded(["a", "b"], ["", None], [2, 3])
    assert (reply.fault, dict(reply.earned)) == ("", {1: 2.0, 3: 3.0})


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
    reward = lambda prompt, response, i: rewards[i]
    run = a_run(out_dir=str(tmp_path))
    ppo_loop.evaluate(replies[::-1], run, reward, ppo_loop.Phases(False), 3, logger)
    assert f"held out   {words}\n" in capsys.readouterr().out
    assert logged["eval/reward"] == pytest.approx(sum(rewards) / 3) and logged["eval/errors"] == 0
    assert ("eval/accuracy" in logged) == ("accuracy" in words)
    rows = json.loads((tmp_path / "samples.json").read_text())
    assert [row["reward"] for row in rows] == rewards
    assert [(row["prompt"], row["fault"]) for row in rows] == [("0", ""), ("1", ""), ("2", "")]


SAYS_THE_SAME = types.SimpleNamespace(start_at_mean=lambda *_: None)  # a critic
SAYS_THE_SAME.compute_values = lambda batch: batch.values


@pytest.mark.parametrize("kl_coef, fields", [
    (0.0, {}),
    (0.3, dict(kl_penalty="k1", gamma=0.9, lam=0.8)),
    (0.3, dict(kl_penalty="k3", lam=0.95, lam_policy=0.5, bootstrap_truncated=True)),
    (0.1, dict(kl_penalty="abs", lam_policy=0.3, gamma=0.97)),
    (0.1, dict(kl_penalty="k2", whiten="none", lam=0.0, lam_policy=1.0,
      bootstrap_truncated=True)),
    (0.1, dict(gae_level="turn", gamma=0.9, lam=0.8, lam_policy=0.4, bootstrap_truncated=True)),
])  # fmt: skip
def test_rewards_advantages_and_returns_equal_a_loop(kl_coef, fields):
    """The loop goes step by step, backwards from the end of each row. Not only the last action
    earns something."""
    run = a_run(kl_coef=kl_coef, **fields)
    batch = random_batch(8, 6, idle=False)
    g = torch.Generator().manual_seed(1)
    # k3 stays < 10
    noise_2T = 0.5 * torch.randn(2, len(batch.input_ids), generator=g) * batch.response_mask
    kl_T = kl_of(run.kl_penalty, (noise_2T[0] - noise_2T[1]).double())
    # not used
    batch.old_log_probs, batch.ref_log_probs = noise_2T if kl_coef else noise_2T * math.nan
    batch.truncated = torch.arange(8) % 3 == 0
    earned_T = torch.randn(len(batch.input_ids), generator=g) * batch.response_mask
    earned_T *= torch.rand(len(batch.input_ids), generator=g) < 0.3
    earned_T[common.last_action(batch)] = torch.randn(8, generator=g)

    batch.turns = spans_of(batch.response_mask)
    ppo_loop.assign_credit(batch, batch, earned_T, kl_coef, run, SAYS_THE_SAME)
    rewards_T, advantages_T, returns_T = torch.zeros(3, len(batch.input_ids), dtype=torch.float64)
    lam_policy = run.lam if run.lam_policy is None else run.lam_policy

    for b, ((start, end), places) in enumerate(zip(rows_of(batch), actions_of(batch))):
        paid_T = kl_coef * kl_T[start:end] if kl_coef else 0.0
        rewards_T[start:end] = earned_T[start:end] - paid_T
        bootstraps = run.bootstrap_truncated and batch.truncated[b]
        after = float(batch.values[places[-1]]) if bootstraps else 0.0

        columns = (rewards_T, batch.values, batch.response_mask)
        tokens = [*zip(*(x_T[start:end].tolist() for x_T in columns))]
        steps = (tokens, run.gamma, lam_policy, after, run.gae_level)
        advantages_T[start:end] = torch.tensor([a for a, _ in gae_by_hand(*steps)])
        steps = (tokens, run.gamma, run.lam, after, run.gae_level)
        returns_T[start:end] = torch.tensor([target for _, target in gae_by_hand(*steps)])

    if run.whiten == "mean":
        x = advantages_T[batch.response_mask].numpy()
        advantages_T[batch.response_mask] = torch.from_numpy((x - x.mean()) / x.std(ddof=1))

    ours = (batch.token_level_rewards, batch.advantages, batch.returns)
    for ours_T, theirs_T in zip(ours, (rewards_T, advantages_T, returns_T)):
        torch.testing.assert_close(ours_T.double(), theirs_T, rtol=1e-5, atol=1e-5)
        assert (ours_T[~batch.response_mask] == 0).all()
