"""--rollout vllm against plain transformers and --rollout hf. Each scenario asserts by itself;
test_scenarios.py waits for it.

Several engines may live in one process, as long as none is deleted.
"""

import dataclasses
import http.server
import importlib.util
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import warnings

import ask_vllm
import forked
import ppo_scenarios
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

VLLM = ("--rollout", "vllm")
VLLM_TP_2 = (*VLLM, "--vllm.tensor-parallel-size", "2")
GOLDEN = {  # the same run on these ranks with these flags
    "vllm 1": (1, VLLM),
    "vllm 2": (2, VLLM),
    "vllm tp 2, megatron tp 2": (2, (*VLLM_TP_2, *ppo_scenarios.TP_2)),
}

# vLLM cannot do head_dim 16
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
STOP = list(range(1, 99, 5))  # one token in five ends a row


def policy(kind="tiny-qwen2", param_dtype="auto", **overrides):
    """A PolicyWorker with heads as wide as vLLM needs them."""
    heads = {"num_attention_heads": 2} if kind == "tiny-gpt2" else HEADS
    overrides = json.dumps({"initializer_range": 0.1, **heads, **overrides})
    return tests.policy(kind, override_config=overrides, param_dtype=param_dtype)


def engine_of(w, stop=STOP, at_once=16, size=1, offload=False, texts=(), **task):
    """A VLLMRollout with the actor's weights, on `size` ranks. task: more of its fields."""
    run = tests.a_run(
        rollout="vllm",
        actor=w.config,
        vllm=ppo_loop.VLLMConfig(tensor_parallel_size=size),
        rollout_batch_size=at_once,
        offload=offload,
        stop=tuple(texts),
    )
    usual = {"stop_ids": list(stop), "longest": 220, "known": 99, "prompts": [], "held_out": []}
    media = {"images": w.critic.task.images, "media_ids": w.model.task.media_ids}
    task = tests.a_task(model_config=w.model_config, **usual | media | task)
    engine = ppo_loop.VLLMRollout(run, task, w.device)
    engine.sync(w.weights(engine.dtype))
    return engine


def rows_of(room=(12, 1, 2, 12, 12, 3)):
    """(prompt, seed, most new tokens) of each row; some prompts are longer than a cache's block."""
    prompts = tests.some_prompts((140, 1, 30, 131, 5, 190))
    return list(zip(prompts, range(6), room, strict=True))


def many_prompts():
    return tests.some_prompts((3, 16, 29, 42, 5, 18, 31, 44, 7, 150, 129), seed=8)


@torch.no_grad()
def move(w, step, engine):
    """Changes the weights, in the same way on any number of ranks, also in the engine."""
    for p in w.model.parameters():
        p.add_(0.05 * torch.sin(100 * p + step))
    engine.sync(w.weights(engine.dtype))


def weights_arrive(folder):
    """Greedy tokens and log-probs equal those of transformers, also after a sync for prompts that
    were cached before."""
    # a mixture of experts comes first, because vLLM keeps the process groups of the first engine
    models = [
        ("tiny-qwen3-moe", {}),
        ("tiny-qwen2", {}),
        ("tiny-qwen3", {}),
        ("tiny-llama", {}),
        ("tiny-gpt2", {}),
        ("tiny-mistral", {"sliding_window": 50}),
        ("tiny-gemma2", {"sliding_window": 50}),
        ("tiny-qwen2", {"tie_word_embeddings": True}),
    ]
    for kind, overrides in models:
        w = policy(kind, **overrides)
        engine = engine_of(w)
        rows = rows_of()
        seen = set()
        worst = 0.0
        for step in range(3):
            move(w, step, engine)
            replies = engine.generate(rows, 0.0)
            worst = max(worst, tests.assert_greedy(replies, tests.plain(w), rows, STOP))
            seen.add(str([ids for ids, _, _ in replies]))

        assert len(seen) == 3, kind  # the weights did change the replies
        print(f"{kind} {overrides}: log-probs off by at most {worst:.1e}")


def weights_are_cast(folder):
    """In bfloat16, log-probs are about as far off float32 as transformers', far off old weights."""
    w = policy(param_dtype="bfloat16")
    rows = rows_of(room=[16] * 6)
    engine = engine_of(w, stop=())
    assert engine.dtype == torch.bfloat16

    old = tests.plain(w)
    move(w, 1, engine)
    replies = engine.generate(rows, 1.0)
    now = tests.plain(w)
    half = tests.plain(w, torch.bfloat16)

    def log_probs_of(lm):
        """Log-probs of all replies, by a transformers model."""
        pairs = zip(rows, replies, strict=True)
        pieces = [tests.log_probs_of_reply(lm, row[0], reply[0], 1.0) for row, reply in pairs]
        return torch.tensor(pieces)

    log_probs = torch.tensor([log_probs for _, log_probs, _ in replies])
    exact = log_probs_of(now)
    ours = float((log_probs - exact).abs().mean())
    theirs = float((log_probs_of(half) - exact).abs().mean())
    stale = float((log_probs - log_probs_of(old)).abs().mean())
    print(f"bfloat16: off by {ours:.4f}, transformers {theirs:.4f}, old weights {stale:.4f}")
    assert 1e-4 < ours < 2 * theirs < 0.1 * stale, (ours, theirs, stale)


def the_correction_of_a_router_arrives(folder):
    """It is no parameter, but decides which experts a token gets."""
    model_config = models.tiny_config(transformers.CONFIG_MAPPING["glm4_moe"])
    for name, x in (HEADS | {"vocab_size": 99, "max_position_embeddings": 512}).items():
        setattr(model_config, name, x)
    tests.save_with_corrections(model_config, folder / "glm")
    w = tests.policy(folder / "glm", override_config="{}")
    rows = rows_of()
    batch = tests.batch_of([prompt for prompt, _, _ in rows], engine_of(w).generate(rows, 1.0))
    log_probs_T = w.compute_log_probs(batch)
    torch.testing.assert_close(log_probs_T, batch.rollout_log_probs, rtol=0, atol=1e-4)


def adapters(folder):
    """The engine gets merged weights of an actor that shares its base with the critic."""
    flags = "--actor.lora-rank 8 --actor.lr 1e-3 --critic.lora-rank 4 --share-base"
    ppo_scenarios.toy(folder, "adapters", *VLLM, *flags.split())
    ppo_scenarios.assert_close_runs([], folder / "adapters")
    steps = ppo_scenarios.steps_of(folder / "adapters")
    assert len(steps) == 4 and steps[-1]["kl/reference"] > 1e-3


def played(engine, mine):
    """Rows of a multi-turn roll_out, like replies of an engine, with log-probs of 1 for what the
    environment says; and how often it was asked. Row i gets i % 5 observations, unless it reaches
    its length limit."""
    heard = {}
    prompts = [ppo_loop.Prompt(ids, f"row {i}", i % 5) for i, ids in enumerate(many_prompts())]

    def observe(prompt, response, answer):
        heard[prompt] = heard.get(prompt, 0) + 1
        return "12+" if heard[prompt] <= answer else None

    run = tests.a_run(max_response_length=48, environment="mine.py:observe", max_turns=5)
    task = tests.a_task(tokenizer=common.char_tokenizer(), observe=observe)
    replies = [ppo_loop.Reply(prompts[i], i) for i in mine]
    ppo_loop.roll_out(engine, task, replies, run, 0.9)
    assert not any(reply.fault for reply in replies), replies
    whole = [(r.ids, [1 if x is None else x for x in r.log_probs], r.finished) for r in replies]
    return dict(zip(mine, whole, strict=True)), heard


def on_ranks(folder, size=1):
    """The tokens are those of one rank, with one engine per rank or a shared one, however rows are
    dealt."""
    w = policy(tie_word_embeddings=True)
    path = folder / "on one rank.pt"
    engine = engine_of(w, size=size)
    rank = common.RANK
    many = many_prompts()
    n = len(many)

    # which rows each of two ranks has
    deals = [(range(n), []), ([], range(n)), (range(0, n, 2), range(1, n, 2))]
    deals = [deal[rank] for deal in deals] if common.WORLD_SIZE == 2 else [range(n)]
    found = []
    for step in range(3):
        move(w, step, engine)
        for mine in deals if step == 2 else deals[-2:]:
            for temperature in (0.0, 0.9):
                rows = [(many[i], 100 * step + i, 4 + i) for i in mine]
                replies = engine.generate(rows, temperature)
                found += [((step, temperature, i), x) for i, x in zip(mine, replies, strict=True)]

    # all rows on each rank, in one turn and in several
    rows = [(prompt, i, 6) for i, prompt in enumerate(many)]
    tests.assert_greedy(engine.generate(rows, 0.0), tests.plain(w), rows, STOP)
    turns, heard = played(engine, range(n))
    if common.WORLD_SIZE == 1:
        torch.save({"replies": dict(found), "turns": turns}, path)
        assert len({len(ids) for _, (ids, _, _) in found}) > 5
        assert set(heard.values()) >= {1, 2, 3, 5}, heard
        return

    # as on one rank
    theirs = torch.load(path, weights_only=False)
    tests.assert_same_replies([x for _, x in found], [theirs["replies"][key] for key, _ in found])
    one_turn = [i for i in range(n) if i % 5 == 0]
    more_turns = [i for i in range(n) if i % 5]
    for deal in ([one_turn, more_turns], [range(n), []], [[], range(n)]):
        turns, heard = played(engine, deal[rank])
        tests.assert_same_replies(turns.values(), [theirs["turns"][i] for i in turns])
        most = 1 if deal[rank] is one_turn else 5
        assert max(heard.values(), default=most) == most, heard
    assert not shared_memory(), shared_memory()


def samples(folder):
    """Samples depend only on a row's seed and follow the actor's distribution and its nucleus."""
    w = policy()
    lm = tests.plain(w)
    prompt = [20, 30, 40]
    some = engine_of(w, range(1, 99, 12), at_once=32)
    engine = engine_of(w, (), at_once=128)

    # torch's own random numbers stay as they are
    before = torch.get_rng_state()
    tests.assert_samples_follow_their_seeds(some)
    assert torch.equal(torch.get_rng_state(), before)
    assert some.generate([], 1.0) == []

    # log-probs of the sampling distribution
    for temperature in (0.7, 1.3):
        rows = [(prompt, seed, 9) for seed in range(4)]
        for ids, log_probs, ended in engine.generate(rows, temperature):
            assert len(ids) == 9 and not ended
            tests.assert_close(log_probs, tests.log_probs_of_reply(lm, prompt, ids, temperature))

    # the distribution, and its nucleus
    rows = [(prompt, i, 1) for i in range(2000)]
    tests.assert_drawn_from_the_softmax(engine.generate(rows, 0.8), lm, prompt)
    engine.run = dataclasses.replace(engine.run, top_p=0.7)
    tests.assert_drawn_from_the_nucleus(engine.generate(rows[:400], 0.8), lm, prompt, 0.8, 0.7)

    # greedy ignores the nucleus
    ((ids, log_probs, _),) = engine.generate([(prompt, 0, 5)], 0.0)
    tests.assert_close(log_probs, tests.log_probs_of_reply(lm, prompt, ids, 1.0))


def texts_end_turns(folder):
    """At the token that completes one, as with --rollout hf; without --stop no tokenizer is set."""
    for tokenizer in (tests.TOKENIZER, tests.another_tokenizer()):
        known = len(tokenizer)
        w = policy(vocab_size=known)
        rows = tests.rows_to_stop(tokenizer)
        engine = engine_of(w, (tests.EOS,), known=known)
        assert engine.llm.llm_engine.output_processor.tokenizer is None

        texts = tests.stop_texts_of(tokenizer, rows, engine.generate(rows, 0.9))
        stops = engine_of(w, (tests.EOS,), known=known, texts=texts, tokenizer=tokenizer)
        tests.assert_stops(engine, stops, tokenizer, texts, rows)

        # the engines draw other samples from equal seeds, so greedy tokens are compared
        theirs = tests.engine_of(w, known=known)
        theirs.task = theirs.task._replace(stop_texts=ppo_loop.stop_texts(stops.run, tokenizer))
        greedy = stops.generate(rows, 0.0)
        tests.assert_same_replies(greedy, theirs.generate(rows, 0.0))
        assert any(ended for _, _, ended in greedy)


def warms_up_asleep(folder):
    """Steps that update only the critic, with an engine that sleeps in between and loses its
    weights, as on a GPU: log-probs are the actor's, and those of an engine that never sleeps."""
    sleep = ppo_loop.VLLMRollout.offload

    def forget(model):
        for p in model.parameters():
            p.data.fill_(torch.nan)

    def loses(self):
        sleep(self)
        self.llm.apply_model(forget)

    flags = ("--critic-warmup", "2", "--steps", "3", *VLLM, "--eval-every", "0")
    ppo_loop.VLLMRollout.offload = loses
    ppo_scenarios.toy(folder, "asleep", *flags, "--offload")
    ppo_loop.VLLMRollout.offload = sleep
    ppo_scenarios.toy(folder, "awake", *flags)

    runs = [folder / "asleep", folder / "awake"]
    ppo_scenarios.assert_close_runs(runs[:1], runs[1], 1e-6)
    assert ppo_scenarios.sampled(runs[0]) == ppo_scenarios.sampled(runs[1])


def fillers(folder):
    """Ids of the model that the tokenizer lacks are never drawn and have no part in log-probs."""
    w = policy(vocab_size=150)
    w.model.task = w.model.task._replace(known=99)
    engine = engine_of(w, stop=(), at_once=400)
    replies = engine.generate([([20, 30, 40], i, 4) for i in range(400)], 1.0)
    tests.assert_never_drawn(range(99, 150), replies, w, tests.plain(w), 0.15)


def sigterm_ends_generate(folder):
    """After SIGTERM to one rank, all ranks of its engine stop at one step, and it can sleep."""
    w = policy()
    engine = engine_of(w, (), offload=True, size=common.WORLD_SIZE)
    step = engine.llm.llm_engine.step
    steps = []

    def counted():
        steps.append(1)
        if len(steps) == 3 and common.RANK == 0:
            common.told(signal.SIGTERM)
        return step()

    engine.llm.llm_engine.step = counted
    with pytest.raises(SystemExit):
        engine.generate([(prompt, seed, 12) for prompt, seed, _ in rows_of()], 0.0)
    assert len(steps) == 3 and common.Stop.signal == signal.SIGTERM
    engine.offload()
    assert engine.llm.llm_engine.is_sleeping()


def images(folder, size=1):
    """Greedy replies to prompts of which some have images, also after the tower has changed, are
    those of transformers, and log-probs of samples are the actor's."""
    tokenizer = common.char_tokenizer()
    words = ["<|video_pad|>", *common.IMAGE_WORDS]  # vLLM looks for all of them
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    if common.WORLD_SIZE == 1:
        tokenizer.save_pretrained(folder / "tokenizer")
        ppo_scenarios.draw_prompts(folder)
    path = str(folder / "images in one of 3.jsonl")

    # as the checkpoints of both families say
    ropes = {
        "tiny-qwen2.5-vl": {"mrope_section": [4, 6, 6]},
        "tiny-qwen3-vl": {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
    }
    for kind, rope in ropes.items():
        rope |= {"rope_type": "default", "rope_theta": 1e4}
        text = {**HEADS, "rope_parameters": rope, "initializer_range": 0.1}
        overrides = json.dumps({"text_config": text, "video_token_id": 99})
        names = {"tokenizer": str(folder / "tokenizer"), "override_config": overrides}
        w = tests.policy(kind, images=True, **names)
        run = tests.a_run(actor=w.config)
        prompts = ppo_loop.load_prompts(path, "--prompts", run, tokenizer, w.critic.task.images)
        files = [prompt.images for prompt in prompts]
        rows = [(prompt.ids, seed, 8) for seed, prompt in enumerate(prompts)]

        more = {"tokenizer": tokenizer, "prompts": prompts, "known": len(tokenizer)}
        engine = engine_of(w, size=size, **more)
        theirs = tests.engine_of(w, STOP, known=len(tokenizer))
        for step in range(2):
            move(w, step, engine)
            theirs.sync(w.weights(theirs.dtype))
            greedy = engine.generate(rows, 0.0, files)
            tests.assert_same_replies(greedy, theirs.generate(rows, 0.0, files))
            assert len({str(ids) for ids, _, _ in greedy}) > 5

        batch = tests.batch_of(
            [prompt.ids for prompt in prompts], engine.generate(rows, 1.0, files)
        )
        batch.multi_modal_inputs = [{"images": x} if x else {} for x in files]
        batch.row_id += len(batch) * common.RANK
        ours_T = w.compute_log_probs(batch)
        torch.testing.assert_close(ours_T, batch.rollout_log_probs, rtol=0, atol=1e-5)


def shared_memory():
    """Files in /dev/shm that this process has mapped; they remain when os._exit ends it."""
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return {
        line.split()[-1] for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)")
    }


def state_of_the_process():
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD)
    return {
        "torch": torch.get_rng_state().tolist(),
        "warnings": list(warnings.filters),
        "threads": torch.get_num_threads(),
        "cores": os.sched_getaffinity(0),
        "signals": [signal.getsignal(s) for s in signals],
        "hook": sys.excepthook,
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "group": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
        "shared memory": shared_memory(),
    }


def scorer_of(w, folder, dtype="float32"):
    """vLLM with a critic's export, as `vllm serve --runner pooling` reads it."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **quiet}
    from vllm import LLM

    path = tempfile.mkdtemp(dir=folder)
    w.export_hf(path)
    small = {"max_model_len": 512, "kv_cache_memory_bytes": 2**28, "enforce_eager": True}
    llm = LLM(path, runner="pooling", dtype=dtype, skip_tokenizer_init=True, **small)
    ppo_loop.VLLMRollout.engines.append(llm)
    return llm


def scores_by_vllm(llm, batch):
    """(T, N) of what it says of the state before each token of a batch; 0 for the first."""
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in batch.input_ids.split(batch.lengths)]
    for _ in range(2):  # what it has cached of prompts changes nothing
        found = llm.encode(prompts, pooling_task="token_classify", use_tqdm=False)
    return torch.cat([F.pad(x.outputs.data[:-1], (0, 0, 1, 0)) for x in found])


def scores(folder):
    """An export served as it is: its values are the critic's, and the page says how to read those
    of other heads; in bfloat16 they are about as far off as the critic's own."""
    batch = helpers.random_batch(8, longest=300, prompts=3)
    acts = batch.response_mask
    centres = torch.tensor([-2 + 5 * (i + 0.5) / 51 for i in range(51)])
    kinds = "tiny-qwen3-moe tiny-qwen3 tiny-llama tiny-mistral tiny-gemma2"  # the mixture first
    only = lambda x_TN: x_TN[:, 0]
    cases = [
        *((kind, "scalar", only) for kind in kinds.split()),
        ("tiny-qwen2", "bounded", lambda x_TN: -2 + 5 * (0.5 + only(x_TN).atan() / torch.pi)),
        ("tiny-qwen2", "hl_gauss", lambda x_TN: x_TN @ centres),
        ("tiny-qwen2", "scalar", only),
    ]
    fields = {"override_config": json.dumps({**HEADS, "initializer_range": 0.1})}
    for kind, head, values_of in cases:
        ends = None if head == "scalar" else (-2.0, 3.0)
        fields |= {"model": kind, "value_head": head, "value_range": ends}
        more = helpers.BINS if head == "hl_gauss" else {}
        w = helpers.worker(value_head_init="normal", **fields | more)
        w.critic.model.score.bias.data.add_(0.3)
        values_T = w.compute_values(batch)
        ours_T = values_of(scores_by_vllm(scorer_of(w, folder), batch))
        off = float((ours_T - values_T)[acts].abs().max())
        print(f"{kind}, {head}: off by {off:.1e}, deviation {values_T[acts].std():.2f}")
        assert off < 1e-5 and values_T[acts].std() > 0.05, (kind, head, off)

    # the last one in bfloat16
    w.export_hf(folder / "critic")
    half = helpers.worker(model=str(folder / "critic"), param_dtype="bfloat16")
    theirs_T = half.compute_values(batch)
    ours_T = scores_by_vllm(scorer_of(w, folder, "bfloat16"), batch)[:, 0]
    ours, theirs = (float((x - values_T)[acts].square().mean().sqrt()) for x in (ours_T, theirs_T))
    print(f"bfloat16: off by {ours:.1e}, the critic by {theirs:.1e}")
    assert 1e-4 < ours < 1.5 * theirs, (ours, theirs)


def the_client_of_a_served_critic(folder):
    """It gets the values of a row, from what vLLM makes of a request; the packages of vLLM's server
    are not installed."""
    from vllm.entrypoints.pooling.pooling.protocol import PoolingCompletionRequest, PoolingResponse

    w = helpers.worker(override_config=json.dumps(HEADS), value_head_init="normal")
    llm = scorer_of(w, folder)
    w.export_hf(folder / "out" / "my" / "hf")

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            text = self.rfile.read(int(self.headers["Content-Length"]))
            asked = PoolingCompletionRequest.model_validate_json(text)
            prompt = {"prompt_token_ids": asked.input}
            [found] = llm.encode(prompt, asked.to_pooling_params(), pooling_task=asked.task)
            data = [{"index": 0, "data": found.outputs.data.tolist()}]
            answer = PoolingResponse(model=asked.model, data=data, usage={})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.model_dump_json().encode())

    server = http.server.HTTPServer(("localhost", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert "//localhost:8000/pooling" in ask_vllm.URL
    ask_vllm.URL = ask_vllm.URL.replace("8000", str(server.server_port))
    said = ask_vllm.values("94+48=", "94")

    row = json.dumps({"prompt": "94+48=", "response": "94", "reward": 0})
    batch = common.read_rows([row], w.tokenizer)
    values = w.compute_values(batch)[batch.response_mask].tolist()
    assert said == pytest.approx(values, abs=1e-5) and len(values) == 3


def the_process_is_as_it_was(folder):
    """vLLM's changes to it, on import and at work, are undone; the process group still works."""
    assert "vllm" not in sys.modules
    w = policy()

    # a state that differs from what a process begins with
    torch.manual_seed(100 + common.RANK)
    warnings.filterwarnings("error", "only of this test")
    torch.set_num_threads(2)
    before = state_of_the_process()

    engine = engine_of(w, offload=True)
    assert state_of_the_process() == before

    torch.set_num_threads(1)
    before["threads"] = 1
    engine.offload()
    engine.onload()
    engine.sync(w.weights(engine.dtype))
    engine.generate(rows_of(), 1.0)
    assert state_of_the_process() == before

    total = torch.tensor([common.RANK + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3.0


def errors(folder):
    """A model that vLLM does not support gives a one-line error that names it."""
    w = policy()
    w.model_config = tests.transformers.AutoConfig.for_model(
        "gpt_neo", hidden_size=64, num_layers=2, num_heads=2, attention_types=[[["global"], 2]]
    )
    words = "--rollout vllm: cannot run tiny-qwen2 .*GPTNeoForCausalLM"
    with pytest.raises(common.UserError, match=words):
        engine_of(w)


def vllm_is_imported(folder):
    """Once, by the process that forks all later ranks; the first scenario tests what it changes."""
    from vllm import LLM  # noqa: F401


def start(folder):
    ppo_scenarios.start(folder, "--actor.override-config", json.dumps(HEADS))


def golden(folder, name, *flags):
    ppo_scenarios.toy(folder, name, *flags)


def golden_runs_agree(folder):
    """A loss is the mean of many numbers that nearly cancel."""
    ppo_scenarios.samples_and_metrics_agree(folder, 1e-3)


def episodes(folder):
    """An environment gives new contexts: engine and actor agree on the log-probs of all rows."""
    ppo_scenarios.episodes(folder, *VLLM)
    ppo_scenarios.check_episodes(folder / "episodes on 1")


def goes_on(folder):
    ppo_scenarios.goes_on(folder, "vllm 1", "vllm 1", "--offload")


# vLLM reads images with torchvision; the registry's is built for CUDA and not for CPUs
IMAGES = [
    ("images", 1, images, (), ()),
    ("images on two ranks that share an engine", 2, images, (2,), ("images",)),
]
if not importlib.util.find_spec("torchvision"):
    IMAGES = []

# name, ranks, function, its arguments, and how the names of those begin that must run before it
LAUNCHES = [
    ("the process is as it was", 2, the_process_is_as_it_was, (), ()),
    ("vllm is imported", 0, vllm_is_imported, (), ()),
    ("weights arrive", 1, weights_arrive, (), ()),
    ("weights are cast", 1, weights_are_cast, (), ()),
    ("a router's correction", 1, the_correction_of_a_router_arrives, (), ()),
    ("on one rank", 1, on_ranks, (), ()),
    ("on two ranks", 2, on_ranks, (), ("on one rank",)),
    ("on two ranks that share an engine", 2, on_ranks, (2,), ("on one rank",)),
    ("samples", 1, samples, (), ()),
    ("texts end turns", 1, texts_end_turns, (), ()),
    ("fillers", 1, fillers, (), ()),
    *IMAGES,
    ("sigterm ends generate", 2, sigterm_ends_generate, (), ()),
    ("errors", 1, errors, (), ()),
    ("scores", 1, scores, (), ()),
    ("the client of a served critic", 1, the_client_of_a_served_critic, (), ()),
    ("start", 1, start, (), ()),
    *((f"golden {x}", n, golden, (x, *flags), ("start",)) for x, (n, flags) in GOLDEN.items()),
    ("golden runs agree", 1, golden_runs_agree, (), [f"golden {x}" for x in GOLDEN]),
    ("adapters with vllm", 1, adapters, (), ("start",)),
    ("warms up asleep", 1, warms_up_asleep, (), ("start",)),
    ("episodes with vllm", 1, episodes, (), ("start",)),
    ("goes on, offloaded", 1, goes_on, (), ("golden vllm 1",)),
]
for name, ranks, function, args, needs in LAUNCHES:
    forked.scenario(ranks, name, args, tuple(needs), fresh=True)(function)

if forked.NUMBERS:  # a rank: these read RANK when imported
    import helpers
    import models
    import ppo_helpers as tests

    import common
    import ppo_loop

    ppo_scenarios.GOLDEN = GOLDEN
