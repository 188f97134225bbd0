"""What the tests of ppo_loop.py share: small runs and actors, transformers' models with the same
weights, batches to learn from, and checks that any rollout engine must pass."""

import copy
import dataclasses
import math
import random
import types

import tokenizers
import torch
import transformers
from helpers import random_batch
from reference import log_probs_of_reply, log_softmax_of, nucleus
from transformers import PreTrainedTokenizerFast

import common
import critic_fsdp
import ppo_loop
from ppo_loop import ActorConfig, HFRollout, PolicyWorker, Prompt, Reply

KINDS = ("tiny-qwen2", "tiny-llama", "tiny-gemma2", "tiny-gpt2", "tiny-qwen3-moe")
TIED = ("tiny-gemma2", "tiny-gpt2")  # their head is the embedding
SHARP = '{"initializer_range": 0.1}'  # with the usual 0.02 all tokens are nearly equally likely
TOKENIZER = common.char_tokenizer()
EOS = TOKENIZER.eos_token_id
TURNS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def ids_of(text):
    """The text as token ids, one per character."""
    return TOKENIZER(text)["input_ids"]


def a_run(backend="fsdp", **fields):
    """The Run that parse() would make of these flags, and the process group of its only rank."""
    common.setup_distributed()
    config = ppo_loop.critic_flags(backend)
    critic = config(model="actor", ppo_mini_batch_size=ActorConfig.ppo_mini_batch_size)
    return ppo_loop.Run(**{"critic": critic, "backend": backend, **fields})


def a_tokenizer(template=TURNS, begins="", ends="", bos=None):
    """One token per character; it puts `begins` before each text and `ends` after it, as words."""
    core = common.char_tokenizer().backend_tokenizer
    words = [word for word in (*begins.split(), *ends.split(), bos) if word]

    core.add_special_tokens([*dict.fromkeys(words)])
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begins} $A {ends}".strip(),
        special_tokens=[(word, core.token_to_id(word)) for word in words],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", bos_token=bos, chat_template=template
    )


def prompts_in(source, tokenizer, **fields):
    """The prompts that ppo_loop.py reads of a file or of JSON lines, with these flags."""
    run = ppo_loop.Run(critic_fsdp.Config(), **{"prompts": "x", "reward": "mine.py:f", **fields})
    return ppo_loop.load_prompts(source, "--prompts", run, tokenizer)


def a_task(**fields):
    """A Task in which only these fields are set."""
    empty = dict.fromkeys(ppo_loop.Task._fields)
    usual = {"media_ids": (), "stop_ids": [EOS], "longest": math.inf}
    return ppo_loop.Task(**empty | usual | fields)


def text_of_reply(ids):
    """What a reward reads of a reply to the toy: no end of a turn."""
    return TOKENIZER.decode([i for i in ids if i != EOS])


def policy(
    kind="tiny-qwen2", temperature=1.0, trains=True, override_config=SHARP, images=False, **fields
):
    """A PolicyWorker on a single rank. images: whether prompts have some."""
    config = ActorConfig(
        model=str(kind), **{"lr": 1e-3, "override_config": override_config, **fields}
    )
    _, model_config = common.load_config(config)
    run = a_run(actor=config, temperature=temperature, max_response_length=40)
    reader = ppo_loop.images_of(run, config, model_config) if images else None
    known = model_config.get_text_config().vocab_size
    media = ppo_loop.media_ids(model_config, known) if images else ()
    task = a_task(model_config=model_config, images=reader, media_ids=media)
    return PolicyWorker(run, task, common.setup_distributed(), trains)


def plain(w, dtype=torch.float32):
    """The same weights in a plain transformers model, without packing and sharding."""
    config = copy.deepcopy(w.model_config)
    # has no softcap and no sinks
    kernel = "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"
    config._experts_implementation = "eager"  # the grouped matrix product does not support float64
    lm = ppo_loop.policy_class(config).from_config(config, attn_implementation=kernel)
    weights = dict(w.weights())
    assert weights.keys() == dict(lm.named_parameters()).keys()
    lm.load_state_dict(weights, strict=False)  # which also names a tied head, and buffers
    return lm.to(dtype).eval()


def same(a, b):
    """Whether two dicts of tensors are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save_with_corrections(model_config, folder):
    """Saves a new model of this config, whose routers add corrections that decide much. They are no
    parameters, but stored with them."""
    lm = ppo_loop.policy_class(model_config).from_config(model_config, dtype=torch.float32)
    corrections = [x for name, x in lm.named_buffers() if "correction" in name]
    assert corrections
    for x in corrections:
        x.normal_(0, 0.5)
    lm.save_pretrained(folder)


def tied(lm):
    """Whether its head is the embedding."""
    return lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


def assert_close(log_probs, others):
    """Asserts equality to 1e-4 -> the largest difference."""
    assert len(log_probs) == len(others)
    worst = max((abs(a - b) for a, b in zip(log_probs, others)), default=0.0)
    assert worst < 1e-4, (log_probs, others)
    return worst


def batch_to_learn(w, n=9, seed=0):
    """Rows with all columns of an update, see add_columns."""
    return add_columns(w, random_batch(n, seed, prompts=3), seed)


def add_columns(w, batch, seed=0):
    """Fills in all columns of an update. Old log-probs are near the actor's own, so some actions
    clip."""
    g = torch.Generator().manual_seed(seed)
    noise = lambda scale: (
        scale * torch.randn(len(batch.input_ids), generator=g) * batch.response_mask
    )
    log_probs_T = w.compute_log_probs(batch)
    batch.old_log_probs = log_probs_T + noise(0.6)
    batch.ref_log_probs = log_probs_T + noise(0.5)
    batch.advantages = noise(1.0)
    batch.rollout_log_probs = batch.old_log_probs + noise(0.5)
    return batch


def engine_of(w, stop=(EOS,), at_once=100, top_p=1.0, known=None):
    """The rollout engine with the actor's weights."""
    run = a_run(actor=w.config, top_p=top_p, rollout_batch_size=at_once)
    media = {"images": w.critic.task.images, "media_ids": w.model.task.media_ids}
    task = a_task(model_config=w.model_config, stop_ids=list(stop), known=known, **media)
    engine = HFRollout(run, task, w.device)
    engine.sync(w.weights(torch.float32))
    return engine


def some_prompts(lengths=(6, 1, 12, 3, 9, 2, 11, 5, 8), seed=5):
    """Prompts of these numbers of token ids."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 99, (n,), generator=g).tolist() for n in lengths]


def batch_of(prompts, said):
    """The Batch of prompts (token ids) and an engine's replies to them."""
    pairs = enumerate(zip(prompts, said))
    return ppo_loop.to_batch([Reply(Prompt(ids), i, *reply) for i, (ids, reply) in pairs])


def assert_greedy(replies, lm, rows, stop):
    """Replies equal transformers' greedy ones, prompt by prompt -> the largest difference of
    log-probs."""
    worst = 0.0
    assert len(replies) == len(rows)
    for (prompt, _, most), (ids, log_probs, ended) in zip(rows, replies):
        special = {"eos_token_id": stop, "pad_token_id": 0, "bos_token_id": None}
        settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=most, **special)
        theirs_1L = lm.generate(torch.tensor([prompt]), settings)
        assert ids == theirs_1L[0, len(prompt) :].tolist()
        # a stop id is kept
        assert ended == (ids[-1] in stop) and not any(i in stop for i in ids[:-1])
        assert len(ids) <= most and (ended or len(ids) == most)
        worst = max(worst, assert_close(log_probs, log_probs_of_reply(lm, prompt, ids, 1.0)))
    return worst


def assert_same_replies(some, others):
    """What an engine has said, and its log-probs up to rounding."""
    for (ids, log_probs, ended), (ids_2, log_probs_2, ended_2) in zip(some, others, strict=True):
        assert (ids, ended) == (ids_2, ended_2)
        assert_close(log_probs, log_probs_2)


def assert_samples_follow_their_seeds(engine):
    """A row's sample is the same alone, among other rows and in any order; another seed gives
    another one."""
    rows = [(prompt, 70 + i, 3 + 2 * i) for i, prompt in enumerate(some_prompts())]
    together = engine.generate(rows, 0.9)
    assert len({len(ids) for ids, _, _ in together}) > 3  # rows end at different times
    for (_, _, most), (ids, _, ended) in zip(rows, together):
        assert len(ids) <= most and (ended or len(ids) == most)
    alone = [engine.generate([row], 0.9)[0] for row in rows]
    crowd = engine.generate([*rows, ([5] * 60, 99, 40)], 0.9)[:9]
    run = engine.run
    engine.run = dataclasses.replace(run, rollout_batch_size=4)
    backwards = engine.generate(rows[::-1], 0.9)[::-1]
    engine.run = run
    for other in (alone, backwards, crowd):
        assert_same_replies(together, other)
    others = engine.generate(
        [(prompt, 80 + i, most) for i, (prompt, _, most) in enumerate(rows)], 0.9
    )

    assert sum(a[0] != b[0] for a, b in zip(together, others)) >= 7
    shorter = engine.generate([(prompt, seed, 2) for prompt, seed, _ in rows], 0.9)  # only cut off
    assert [ids for ids, _, _ in shorter] == [ids[:2] for ids, _, _ in together]


def stop_texts_of(tokenizer, rows, replies):
    """Texts that replies of an engine hold: two letters, one letter, a part of a token or two
    tokens, one that a prompt begins, and a letter of several tokens, if there is one."""
    said = [
        (tokenizer.decode(row[0][-1:]), tokenizer.decode(ids))
        for row, (ids, _, _) in zip(rows, replies)
    ]
    (before, first), (_, second), *_ = [both for both in said if (both[0] + both[1][:2]).isascii()]
    wide = [letter for _, text in said for letter in text if letter > "\x7f" and letter != "\ufffd"]
    return [first[:2], second[1], "or", before + first[0], *wide[:1]]


def assert_stops(engine, stops, tokenizer, texts, rows):
    """With the same seeds, the engine that stops keeps the tokens of the other up to the first one
    with which the decoded text holds one of these texts, and their log-probs."""
    expected = []
    cut = 0
    for ids, log_probs, ended in engine.generate(rows, 0.9):
        whole = len(ids)
        for n in range(whole, 0, -1):
            if any(text in tokenizer.decode(ids[:n]) for text in texts):
                ids, ended = ids[:n], True
        cut += len(ids) < whole
        expected.append((ids, log_probs[: len(ids)], ended))
    assert_same_replies(stops.generate(rows, 0.9), expected)
    assert len(rows) // 8 < cut < len(rows), cut


def rows_to_stop(tokenizer):
    """Rows for an engine, whose prompts are whole letters."""
    whole = [i for i in tokenizer.get_vocab().values() if tokenizer.decode([i]).isascii()]
    draw = random.Random(3)
    return [(draw.choices(sorted(whole), k=n), n, 20 + n % 9) for n in range(1, 41)]


def assert_drawn_from_the_nucleus(replies, lm, prompt, temperature, top_p):
    """Sampled first tokens are exactly those of the nucleus, with their log-probs in it."""
    with torch.no_grad():
        expected = nucleus(log_softmax_of(lm, torch.tensor(prompt), temperature)[-1], top_p)
    assert {ids[0] for ids, _, _ in replies} == expected.keys()
    for (token,), log_probs, _ in replies:
        assert_close(log_probs, [expected[token]])


def assert_drawn_by_its_numbers(row, ids, lm, temperature):
    """Each token is where the row's next random number falls among its probabilities."""
    prompt, seed, most = row
    g = torch.Generator().manual_seed(seed)
    u_R = torch.rand(most, generator=g, dtype=torch.float64)
    with torch.no_grad():
        log_p_LV = log_softmax_of(lm, torch.tensor(prompt + ids), temperature)
    below_LV = log_p_LV[len(prompt) - 1 : -1].double().exp().cumsum(-1)
    for u, token, below_V in zip(u_R, ids, below_LV):
        assert below_V[token] > u - 1e-5 and (token == 0 or below_V[token - 1] < u + 1e-5)


def assert_drawn_from_the_softmax(replies, lm, prompt):
    """First tokens are as frequent as their probabilities at temperature 0.8, not as those at 1."""
    counts_V = torch.bincount(
        torch.tensor([ids[0] for ids, _, _ in replies]), minlength=99
    ).double()
    # chi-square above its mean, in standard deviations, over tokens expected at least five times
    excess = {}

    for temperature in (0.8, 1.0):
        with torch.no_grad():
            expected_V = (
                len(replies) * log_softmax_of(lm, torch.tensor(prompt), temperature)[-1].exp()
            )
        often_V = expected_V >= 5
        freedom = int(often_V.sum()) - 1
        assert freedom > 20
        chi_square = ((counts_V - expected_V) ** 2 / expected_V)[often_V].sum()
        excess[temperature] = float(chi_square - freedom) / math.sqrt(2 * freedom)
    assert abs(excess[0.8]) < 3.5 and excess[1.0] > 5  # a fit that is too good is wrong as well


def play(turns, observe, prompts=(), tokenizer=TOKENIZER, images=None, task=None, **fields):
    """roll_out on prompts (q0=, q1= ... by default) with an engine that answers these turns (with
    EOS, unless one ends in "...") and observe(...) as environment -> (replies, what the engine was
    asked)."""
    asked = []

    def generate(rows, temperature, images):
        asked.append([(tokenizer.decode(prompt), seed, most) for prompt, seed, most in rows])
        out = []
        for said, (_, _, most) in zip(turns[len(asked) - 1], rows):
            ids = ids_of(said.removesuffix("...")) + [EOS] * (not said.endswith("..."))
            out.append((ids[:most], [-0.5] * len(ids[:most]), len(ids) <= most and ids[-1] == EOS))
        return out

    n = len(turns[0])
    prompts = prompts or [Prompt(ids_of(f"q{i}="), f"q{i}=", f"answer {i}") for i in range(n)]
    replies = [Reply(prompt, 4 + 2 * i) for i, prompt in enumerate(prompts)]
    run = a_run(**{"max_response_length": 30, "environment": "mine.py:observe", **fields})
    task = a_task(tokenizer=tokenizer, observe=observe, images=images, **task or {})
    engine = types.SimpleNamespace(generate=generate)
    ppo_loop.roll_out(engine, task, replies, run, 1.0, "key")
    return replies, asked


def chat_tokenizer(end="<eos>", tokenizer=None):
    """A tokenizer with a chat template in which this text and a newline end each message."""
    tokenizer = tokenizer or common.char_tokenizer()
    turns = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}END\n{% endfor %}"
    turns += "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer.chat_template = turns.replace("END", end)
    return tokenizer


def another_tokenizer():
    """With other ids of the same characters, and tokens of more than one."""
    return TOKENIZER.train_new_from_iterator(["hello world, 12+34"], 270)


def assert_never_drawn(ids, replies, w, lm, share):
    """Replies to [20, 30, 40] have none of these ids, which would be drawn more often than `share`.
    Their log-probs equal the actor's and those of plain transformers whose logits of the ids are
    -inf."""
    said = {i for reply, _, _ in replies for i in reply}
    others = {*range(lm.config.vocab_size)} - {*ids}
    assert said <= others and max(said) == max(others) and len(said) > 90
    batch = batch_of([[20, 30, 40]] * len(replies), replies)
    log_probs_T = w.compute_log_probs(batch)
    torch.testing.assert_close(log_probs_T, batch.rollout_log_probs, rtol=1e-4, atol=1e-4)

    reply, log_probs, _ = replies[0]
    with torch.no_grad():
        logits_LV = lm(torch.tensor([[20, 30, 40, *reply]])).logits[0, 2:-1]
    assert logits_LV.softmax(-1)[:, list(ids)].sum(-1).min() > share
    logits_LV[:, list(ids)] = -math.inf
    assert_close(log_probs, logits_LV.log_softmax(-1)[range(len(reply)), reply].tolist())
