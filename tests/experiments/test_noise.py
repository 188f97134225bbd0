"""noise.py, oracle.py and what lowers the noise of the actor's gradient, against gradients and sums
over all tokens by plain transformers."""

import json
import math
import types

import noise
import numpy
import oracle
import pytest
import torch
import truth
from helpers import actions_of, random_batch, refused, rows_of, worker
from ppo_helpers import EOS, TOKENIZER, ids_of, policy
from reference import clipped_loss, log_probs_of_reply, whitened_by_hand
from transformers import AutoModelForCausalLM

import common
import critic_fsdp
import ppo_loop

ROWS = [("a=", "h"), ("bb=", "ht"), ("a=", "t")]


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(noise, "DRAWS", 10)
    monkeypatch.setattr(truth, "DRAWS", 10)


def task_flags(folder, rows=ROWS):
    """Saves a random policy and prompts -> flags of a run on them, without those of the model."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows))
    policy().export_hf(folder / "policy", TOKENIZER)
    return f"--prompts {file} --reward addition --max-response-length 3".split()


# ---- The meter -----------------------------------------------------------------------------------


def read_lines(folder, lines, more=(), **fields):
    """A Read of these answers to prompts, and transformers' model with the same weights."""
    flags = [*task_flags(folder), "--actor.model", str(folder / "policy"), "--temperature", "0.7"]
    flags += more
    run, task = ppo_loop.set_up(ppo_loop.parse(flags))
    given = noise.Noise(policy=str(folder / "policy"), **fields)
    lm = AutoModelForCausalLM.from_pretrained(folder / "policy")
    return noise.Read(given, truth.Maker(given, run, task), lines), lm


def line_of(prompt, ids, answer=""):
    mask = [True for _ in ids]
    row = {"prompt_ids": ids_of(prompt), "response_ids": ids, "response_mask": mask}
    return row | {"answer": answer}


@pytest.mark.parametrize("full", [False, True])
def test_the_dot_products_are_those_of_gradients(full, tmp_path):
    """Of the head's matrix, or of all weights, action by action; tokens of others have none."""
    lines = [line_of("a=", ids_of("ht")), line_of("bb=", [*ids_of("t?h"), EOS])]
    lines[1]["response_mask"][1] = False
    read, lm = read_lines(tmp_path, lines, full=full)
    weights = [*lm.parameters()] if full else [lm.get_output_embeddings().weight]
    rows = []
    p = []
    for line in lines:
        ids = torch.tensor([line["prompt_ids"] + line["response_ids"]])
        for i, acts in enumerate(line["response_mask"], len(line["prompt_ids"])):
            if acts:
                log_p = (lm(ids).logits[0, i - 1] / 0.7).log_softmax(-1)
                found = torch.autograd.grad(log_p[ids[0, i]], weights)
                # the temperature scales all gradients of the head
                scale = 1.0 if full else 0.7
                rows.append(scale * torch.cat([x.flatten() for x in found]))
                p.append(float(log_p[ids[0, i]].exp()))
    gradients = torch.stack(rows).double()
    gram_AA = (gradients @ gradients.T).numpy()
    assert len(p) == 5 and read.p == pytest.approx(p, rel=1e-4)
    assert read.gram_AA == pytest.approx(gram_AA, rel=1e-3, abs=1e-4 * gram_AA.max())


def test_true_b_is_the_mean_of_the_action_values_by_noise(tmp_path):
    """At each place of the right answer, a sum over all tokens; two of them end it."""
    lines = [line_of("a=", [*ids_of("hh"), EOS], "hh")]
    read, lm = read_lines(tmp_path, lines, ["--stop", "t"], exact="{answer}")
    ids = torch.tensor([lines[0]["prompt_ids"] + lines[0]["response_ids"]])
    with torch.no_grad():
        p_RV = (lm(ids).logits[0, 1:-1].double() / 0.7).softmax(-1)

    behind = 1.0
    right = [*([x] for x in ids_of("hh")), [EOS, *ids_of("t")]]
    for i in reversed(range(3)):
        p_V = p_RV[i].tolist()
        squares = math.fsum(p * p for p in p_V)
        w_V = [1 - 2 * p + squares for p in p_V]
        q_V = [behind if token in right[i] else 0.0 for token in range(len(p_V))]
        b = math.fsum(p * w * q for p, w, q in zip(p_V, w_V, q_V))
        b /= math.fsum(p * w for p, w in zip(p_V, w_V))
        behind *= sum(p_V[token] for token in right[i])
        ours = behind * read.right[i] / (1 - read.squares[i])
        assert ours == pytest.approx(b, rel=1e-4)


def of_rows(row, prompt, **columns):
    """A Table with these columns alone."""
    table = noise.Table.__new__(noise.Table)
    columns = {"row": row, "prompt": prompt} | columns
    for name, x in columns.items():
        setattr(table, name, torch.as_tensor(x).numpy())
    return table


def test_the_noise_is_a_mean_over_answers_and_the_signal_one_over_prompts():
    """By gradients of three numbers, of four answers to two prompts."""
    torch.manual_seed(0)
    gradient_A3 = torch.randn(7, 3).double()
    rows = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    prompts = [0, 0, 1, 1]
    usual, other, wrong, true = torch.randn(4, 7).double().numpy()
    table = of_rows(rows, torch.tensor(prompts)[rows], advantage=true)
    gram_AA = (gradient_A3 @ gradient_A3.T).numpy()
    told = noise.measure(table, gram_AA, {"usual": usual, "other": other}, {"other": wrong})

    def sums(x_A):
        rows_A3 = torch.as_tensor(x_A)[:, None] * gradient_A3
        return torch.zeros(4, 3).double().index_add(0, rows, rows_A3)

    def noise_of(x_A):
        return float(sums(x_A).square().sum(1).mean())

    def dot(x_A, y_A):
        pairs = [(i, k) for i in range(4) for k in range(4) if prompts[i] != prompts[k]]
        return sum(float(sums(x_A)[i] @ sums(y_A)[k]) for i, k in pairs)

    for name, x_A in (("usual", usual), ("other", other)):
        size, (relative, _), signal = told[name]
        assert size == pytest.approx(noise_of(x_A))
        assert relative == pytest.approx(noise_of(x_A) / noise_of(usual))
    assert told["usual"][2] is None
    assert signal[0] == pytest.approx(1 + dot(wrong, true) / dot(true, true))


def test_the_best_constant_leaves_the_least_noise(tmp_path):
    lines = [line_of("a=", ids_of(text)) for text in ("ht", "h", "tth")]
    read, _ = read_lines(tmp_path, lines)
    row = [0, 0, 1, 2, 2, 2]
    returns = torch.tensor([1.0, 1.0, 0.0, 0.5, 0.5, 0.5]).double()
    table = of_rows(row, row, returns=returns, advantage=returns)
    best = noise.best_constant(table, read.gram_AA)
    found = {x: table.returns - best - x for x in (0.0, -0.01, 0.01)}
    told = noise.measure(table, read.gram_AA, found, {})
    assert told[0.0][0] < min(told[-0.01][0], told[0.01][0])


def test_otb_weighs_a_prompts_answers_by_their_noise_so_far():
    """By hand: two answers of two and three tokens, which earn 1 and 3; one of another prompt."""
    columns = {"place": [0, 1, 0, 1, 2, 0], "returns": [1.0, 1, 3, 3, 3, 7]}
    table = of_rows([0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1], **columns)
    read = types.SimpleNamespace(w=numpy.array([0.5, 0.25, 1.0, 0.5, 0.5, 1.0]))
    found = noise.of_otb(table, read)
    b = [(0.5 * 1 + 1.0 * 3) / 1.5, (0.75 * 1 + 1.5 * 3) / 2.25]
    expected = [1 - b[0], 1 - b[1], 3 - b[0], 3 - b[1], 0, 0]
    assert found["OTB, which has the answer's own return"].tolist() == pytest.approx(expected)
    assert found["OTB without it"].tolist() == pytest.approx([-2, -2, 2, 2, 3, 7])


def test_the_table_is_of_all_baselines_and_of_critics(tmp_path, capsys):
    """A critic that says 0 everywhere is no baseline; less its weighted mean, it is that mean."""
    flags = [*task_flags(tmp_path, likely_rows(tmp_path)), "--max-response-length", "2"]
    where = {"policy": f"{tmp_path}/policy", "out_dir": tmp_path / "truth", "exact": "{answer}"}
    critic = worker(model=f"{tmp_path}/policy", value_head_init="zero")
    critic.export_hf(str(tmp_path / "critic"))
    noise.main(noise.Noise(**where, critic=(f"{tmp_path}/critic",), answers=64), flags)
    told = json.loads((tmp_path / "truth" / "noise.json").read_text())
    assert told["minus the mean"][1] == [1.0, 0.0]
    name = f"{tmp_path}/critic, lambda 1"
    assert told[name][0] == told["no baseline"][0] > 0
    weighted = told["minus the mean weighted by the noise"][0]
    assert told[f"{name}, minus its weighted mean"][0] == pytest.approx(weighted)
    assert f"| {name} |" in capsys.readouterr().out

    # without luck behind the action, there is less noise
    assert told["true Q(s,a) - b(s)"][0] < told["minus true b(s)"][0]
    assert told["true V(s), lambda 0"][0] < told["true V(s), lambda 1"][0]

    # values of 0 in place of rewards leave only the last action's
    signal, _ = told[f"{tmp_path}/critic, lambda 0"][2]
    assert signal != 1 and told[name][2] is None
    with refused("needs a policy, and values of all places"):
        noise.main(noise.Noise(), [])


def likely_rows(folder):
    """Prompts, each with the two letters that the policy writes most likely."""
    policy().export_hf(folder / "policy", TOKENIZER)
    lm = AutoModelForCausalLM.from_pretrained(folder / "policy")
    rows = []
    for prompt in ("a=", "b=", "cd="):
        ids = ids_of(prompt)
        for _ in range(2):
            with torch.no_grad():
                ids.append(int(lm(torch.tensor([ids])).logits[0, -1, EOS + 1 :].argmax()) + EOS + 1)
        rows.append((prompt, TOKENIZER.decode(ids[-2:])))
    return rows


# ---- The noise by baseline, from rows ------------------------------------------------------------


def noise_by_hand(batch, gamma):
    """{name: noise over that with the mean}, answer by answer and token by token, in float64."""
    answers = actions_of(batch)
    returns = common.monte_carlo(batch, gamma).double().tolist()
    w = batch.rollout_log_probs.double().exp().tolist()
    w = [(1 - p) ** 2 for p in w]
    prompts = {}  # prompt -> its answers
    for i, (start, places) in enumerate(zip(batch.cu_seqlens.tolist(), answers)):
        prompts.setdefault(tuple(batch.input_ids[start : places[0]].tolist()), []).append(i)
    same = {i: group for group in prompts.values() for i in group}

    def noise(b):
        return math.fsum(w[t] * (returns[t] - b[t]) ** 2 for t in sum(answers, []))

    def mean(some, weigh):
        places = [t for k in some for t in answers[k]]
        total = math.fsum(weigh(k, t) * returns[t] for k in some for t in answers[k])
        return total / math.fsum(weigh(k, t) for k in some for t in answers[k]) if places else 0

    def of_others(weigh, groups):
        b = {}
        for i, places in enumerate(answers):
            b |= dict.fromkeys(places, mean([k for k in groups[i] if k != i], weigh))
        return b

    everyone = dict.fromkeys(range(len(answers)), range(len(answers)))
    found = {
        "nothing": dict.fromkeys(sum(answers, []), 0.0),
        "mean": of_others(lambda k, t: 1.0, everyone),
        "least noise": of_others(lambda k, t: w[t], everyone),
        "group": of_others(lambda k, t: 1 / len(answers[k]), same),
        "critic": batch.values.double().tolist(),
    }

    # the fit to the prompts with odd and with even numbers, by numpy
    fitted = {}
    order = {i: n for n, group in enumerate(prompts.values()) for i in group}
    for half in (0, 1):
        learns = [t for i, places in enumerate(answers) if order[i] % 2 != half for t in places]
        X = numpy.array([[1.0, found["group"][t], found["critic"][t]] for t in learns])
        root = numpy.sqrt([w[t] for t in learns])
        G = numpy.array([returns[t] for t in learns])
        beta = numpy.linalg.lstsq(root[:, None] * X, root * G)[0]
        for i, places in enumerate(answers):
            if order[i] % 2 == half:
                for t in places:
                    fitted[t] = beta @ [1.0, found["group"][t], found["critic"][t]]
    found["fitted"] = fitted
    return {name: noise(b) / noise(found["mean"]) for name, b in found.items()}


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_noise_by_baseline_equals_a_loop(gamma):
    batch = random_batch(24, seed=3, prompts=6, idle=False)
    batch.response_mask = batch.positions > 7 * (batch.row_of_token % 6)  # behind the prompt
    g = torch.Generator().manual_seed(1)
    for name in ("token_level_rewards", "values"):
        setattr(batch, name, torch.randn(len(batch.input_ids), generator=g))
    batch.rollout_log_probs = torch.rand(len(batch.input_ids), generator=g).log()
    found = common.noise_by_baseline(batch, gamma)
    assert {name: x for name, (x, _) in found.items()} == pytest.approx(noise_by_hand(batch, gamma))
    assert found["mean"] == (1.0, 0.0)

    # prompts with one answer have no group, and one answer has no others
    single = batch.select([0, 1, 2, 3, 4, 5, 6])
    assert common.noise_by_baseline(single, gamma).keys() == found.keys() - {"group"}
    assert common.noise_by_baseline(batch.select([0]), gamma).keys() <= {"nothing", "critic"}


def test_the_noise_from_rows_is_that_of_gradients(tmp_path):
    """Of the policy's output head: within a tenth, and in the same order."""
    flags = [*task_flags(tmp_path, likely_rows(tmp_path)), "--max-response-length", "2"]
    where = {"policy": f"{tmp_path}/policy", "out_dir": tmp_path / "truth"}
    noise.main(noise.Noise(**where, answers=192), flags)
    told = json.loads((tmp_path / "truth" / "noise.json").read_text())
    file = tmp_path / "truth" / "truth.jsonl"
    batch = common.read_rows(str(file), None)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    log_p = []
    for line in common.read_lines(file):
        prompt = line["prompt_ids"]
        log_p += [0.0] * len(prompt) + log_probs_of_reply(lm, prompt, line["response_ids"], 1.0)
    batch.rollout_log_probs = torch.tensor(log_p)
    ours = common.noise_by_baseline(batch, 1.0)
    pairs = [
        ("least noise", "minus the mean weighted by (1 - p)^2"),
        ("group", "minus the mean of the prompt's other answers"),
        ("nothing", "no baseline"),
    ]
    exact = {name: told[theirs][1][0] for name, theirs in pairs}
    assert {name: ours[name][0] for name in exact} == pytest.approx(exact, rel=0.1)
    assert sorted(exact, key=exact.get) == sorted(exact, key=lambda name: ours[name][0])


# ---- The oracle ----------------------------------------------------------------------------------


class Seen(Exception):
    """Ends a run, because the test has seen enough."""


@pytest.fixture
def step_of(tmp_path, monkeypatch):
    """Runs PPO with an oracle up to the actor's first update -> its batch."""
    monkeypatch.setattr(ppo_loop, "update_critic", ppo_loop.update_critic)  # restored at the end

    def go(asked, *flags):
        found = []

        def update_actor(loop, step, batch, n):
            found.append(batch)
            raise Seen

        monkeypatch.setattr(ppo_loop, "update_actor", update_actor)
        where = ["--actor.model", f"{tmp_path}/policy", "--out-dir", f"{tmp_path}/out"]
        with pytest.raises(Seen):
            oracle.main(asked, [*task_flags(tmp_path), *where, "--eval-every", "0", *flags])
        return found[0]

    return go


# by the policy, in turn; 3 and 0 of 6 are on the right path
SAID = ["h", "ht", "t", "hh", "th", ""]


@pytest.mark.parametrize("baseline, lam", [("V", 1.0), ("V", 0.5), ("b", 1.0), ("Q-b", 1.0)])
def test_an_oracle_knows_the_chances_of_the_right_answer(
    baseline, lam, step_of, tmp_path, monkeypatch
):
    """Values and advantages of a step, by sums over all tokens."""

    def generate(self, rows, temperature, images=None):
        said = [[*ids_of(SAID[i % len(SAID)]), EOS] for i in range(len(rows))]
        return [(ids, [-1.0] * len(ids), True) for ids in said]

    replies = []
    known = oracle.true_values
    monkeypatch.setattr(ppo_loop.HFRollout, "generate", generate)
    monkeypatch.setattr(
        oracle, "true_values", lambda *args: replies.extend(args[-1]) or known(*args)
    )
    monkeypatch.setattr(ppo_loop, "whiten_by_noise", lambda batch: batch.advantages)
    flags = f"--whiten none --lam-policy {lam} --rollout-n {len(SAID)} --temperature 0.7"
    batch = step_of(oracle.Oracle(baseline), *flags.split())

    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    right_ones = 0
    for reply, row in zip(replies, batch.split(1), strict=True):
        values, baselines = by_sums(lm, reply)
        reward = float(reply.text == reply.prompt.answer)
        right_ones += reward
        acts_T = row.response_mask
        assert row.values[acts_T].tolist() == pytest.approx(values, rel=1e-3, abs=1e-12)

        # of a state to the next one, of which the last earns the reward
        behind = [*values[1:], reward]
        expected = [reward - b for b in baselines]
        if baseline == "Q-b":
            expected = [q - b for q, b in zip(behind, baselines)]
        if baseline == "V":
            expected = [
                sum(lam ** (k - i) * (behind[k] - values[k]) for k in range(i, len(values)))
                for i in range(len(values))
            ]
        assert row.advantages[acts_T].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert right_ones == len(ROWS)


def by_sums(lm, reply):
    """(true values, baselines of least noise) of an answer's places, by sums over all tokens."""
    prompt = reply.prompt.ids
    right = [*ids_of(reply.prompt.answer), EOS]
    with torch.no_grad():
        logits_LV = lm(torch.tensor([prompt + right])).logits[0].double()
    p_RV = (logits_LV[len(prompt) - 1 : -1] / 0.7).softmax(-1).tolist()

    values = []
    baselines = []
    for i in range(len(reply.ids)):
        if reply.ids[:i] != right[:i]:
            values.append(0.0)
            baselines.append(0.0)
            continue
        behind = math.prod(p_V[token] for p_V, token in zip(p_RV[i + 1 :], right[i + 1 :]))
        squares = math.fsum(p * p for p in p_RV[i])
        w_V = [1 - 2 * p + squares for p in p_RV[i]]
        mean_w = math.fsum(p * w for p, w in zip(p_RV[i], w_V))
        values.append(behind * p_RV[i][right[i]])
        baselines.append(values[-1] * w_V[right[i]] / mean_w)
    return values, baselines


# ---- What lowers the noise -----------------------------------------------------------------------


def test_noise_weights_are_the_squared_gradient_up_to_a_factor_of_2():
    """Of log p by the logits. With two tokens, it is twice the weight."""
    g = torch.Generator().manual_seed(0)
    for size in (2, 3, 50):
        logits = (3 * torch.randn(500, size, generator=g).double()).requires_grad_()
        chosen = torch.randint(0, size, (500, 1), generator=g)
        log_p = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        [found] = torch.autograd.grad(log_p.sum(), logits)
        batch = common.Batch.blank(501)
        batch.rollout_log_probs = torch.cat([torch.tensor([math.nan]), log_p.detach().float()])
        first, *w = common.noise_weights(batch).tolist()
        ratio = found.square().sum(1) / torch.tensor(w)
        assert first == 0 and ratio.min() > 1 - 1e-3 and ratio.max() < 2 + 1e-3
        assert size > 2 or ratio.min() > 2 - 1e-3


@pytest.mark.parametrize("n, idle", [(9, True), (9, False), (1, False)])
def test_advantages_of_least_noise_equal_a_loop(n, idle):
    batch = random_batch(n, idle=idle)
    batch.advantages = torch.where(batch.response_mask, 2 + batch.returns, math.nan)
    expected = whitened_by_hand(batch)
    torch.testing.assert_close(ppo_loop.whiten_by_noise(batch), expected)


def test_the_mean_leaves_out_sure_actions():
    """They count for nothing; without any other answer, it is 0."""
    for p, rewards in (
        ((1.0, 0.5, 0.5), (1.0, 0.0, 0.0)),
        ((1.0, 1.0), (0.0, 0.0)),
        ((0.3,), (1.0,)),
    ):
        batch = common.concat([common.Batch.blank(2) for _ in p])
        batch.row_id = torch.arange(len(p))
        batch.rollout_log_probs[1::2] = torch.tensor(p).log()
        batch.advantages[1::2] = torch.tensor(rewards)
        expected = math.sqrt(len(p)) * torch.tensor(rewards)
        torch.testing.assert_close(ppo_loop.whiten_by_noise(batch)[1::2], expected)


def test_a_critic_of_least_noise_weighs_its_loss_and_starts_at_that_mean():
    """By a loop over the actions, of values that the critic says before its update."""
    batch = random_batch(11)
    w = worker(model="tiny-qwen2", value_weights="noise", value_head_init="mean")
    chance = lambda t: math.exp(batch.rollout_log_probs[t])
    acts = [t for places in actions_of(batch) for t in places]
    weights = [(1 - chance(t)) ** 2 for t in acts]
    returns_T = common.monte_carlo(batch, 0.9)
    weigh = lambda numbers: math.fsum(map(math.prod, zip(weights, numbers))) / math.fsum(weights)
    returns = returns_T[acts].double().tolist()
    mean = weigh(returns)
    spread = weigh([(x - mean) ** 2 for x in returns]) ** 0.5
    w.start_at_mean(batch, 0.9)
    batch.values = w.compute_values(batch)
    start = round(mean, 1 - math.floor(math.log10(spread)))
    assert batch.values[acts].tolist() == pytest.approx([start] * len(acts))

    metrics = w.update_critic(batch)
    columns = zip(*(x_T[acts].double() for x_T in (batch.values, batch.values, batch.returns)))
    losses = [float(clipped_loss(*numbers)) for numbers in columns]
    loss = math.fsum(x * loss for x, loss in zip(weights, losses)) / len(acts)
    assert metrics["critic/vf_loss"] == pytest.approx(loss, rel=1e-5)

    batch.rollout_log_probs = None
    with refused("rollout_log_probs: is missing"):
        w.update_critic(batch)


def test_a_file_has_the_chances_of_its_tokens_or_a_critic_of_least_noise_refuses_it(tmp_path):
    """Those that ppo_loop.py dumps come back."""
    batch = random_batch(6, vocab_size=40)
    batch.token_level_rewards *= batch.response_mask
    files = [f"{tmp_path}/{name}.jsonl" for name in ("rows", "some")]
    ppo_loop.write_jsonl(batch, files[0])
    lines = common.read_lines(files[0])
    del lines[3]["log_probs"]
    common.replace_lines(files[1], lines)
    again, without = (common.read_rows(file, None).rollout_log_probs for file in files)
    assert torch.equal(again, batch.rollout_log_probs) and without is None

    critic = worker(model="tiny-qwen2")
    config = critic_fsdp.Config(value_weights="noise")
    critic_fsdp.load_rows(critic_fsdp.Run(critic=config, rollouts=files[0]), critic)
    with refused("some rows of --rollouts have no log_probs"):
        critic_fsdp.load_rows(critic_fsdp.Run(critic=config, rollouts=files[1]), critic)


def test_progress_advantage_is_the_log_ratio_of_two_policies(step_of, tmp_path):
    """Whitened, and whatever the answers earn."""
    learned = tmp_path / "learned"
    for name, scale in (("hf", 0.2), ("supervised", 0.1)):
        other = policy(override_config=json.dumps({"initializer_range": scale}))
        other.export_hf(learned / name, TOKENIZER)
    batch = step_of(oracle.Oracle("progress", learned=str(learned)), "--rollout-n", "8")

    gains = 0.0
    for name, sign in (("hf", 1), ("supervised", -1)):
        lm = AutoModelForCausalLM.from_pretrained(learned / name)
        found = []
        for (start, end), places in zip(rows_of(batch), actions_of(batch)):
            ids = batch.input_ids[start:end].tolist()
            n = places[0] - start
            found += log_probs_of_reply(lm, ids[:n], ids[n:], 1.0)
        gains = gains + sign * torch.tensor(found, dtype=torch.float64)
    expected = (gains - gains.mean()) / gains.std()
    ours = batch.advantages[batch.response_mask].double()
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
