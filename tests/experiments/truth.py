"""What a critic's values should be, and how far they are from that.

python tests/experiments/truth.py --policy out/ppo_loop/hf --critic out/ppo_loop/critic_hf \\
    --exact "{answer}"                  addition, after a run of ppo_loop.py: ten seconds
python tests/experiments/truth.py --policy FOLDER --critic FOLDER \\
    --prompts FILE --reward FILE.py:FUNCTION
                                        any task, by 32 continuations of each place of each answer

The true value of a place in an answer is the mean return of all ways in which the policy goes on
from there. The policy answers prompts, and each place of each answer gets its true value: the mean
of --continuations more samples, as in VinePPO (2410.01679), or, where only one text is right, the
chance that the policy writes the rest of it (--exact). Then critics are compared with that, next to
simpler guesses. The task is told by the flags of ppo_loop.py; torchrun spreads prompts over ranks.

--out-dir gets the answers in truth.jsonl, as rows for critic_fsdp.py, the numbers in truth.json,
and a report of the first critic. A run that was stopped goes on.
"""

import json
import pathlib
import random
import sys
import zlib
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import log, nan, prod
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import numpy as np
import torch
import torch.distributed as dist
from helpers import common, critic_fsdp, forked_critic
from series import start
from torch.nn.utils.rnn import pad_sequence

import ppo_loop
from common import RANK, WORLD_SIZE, UserError, of_all_ranks, print0
from ppo_loop import Reply

AT_ONCE = 8  # prompts of a rank, between two writes


@dataclass(frozen=True)
class Truth:
    """What to make, and what to compare with it. More flags are those of ppo_loop.py."""

    policy: str | None = (
        None  # folder of the policy (None: the true values are in --out-dir already)
    )
    critic: tuple[str, ...] = ()  # folders of critics (none: only simpler guesses are compared)
    # folder of the policy's reference, to compare log(pi / pi_ref), too
    reference: str | None = None
    most: int = 128  # prompts: the first of --eval-prompts, or else of --prompts
    answers: int = 4  # to each prompt
    states: int | None = None  # places of an answer with a true value, evenly spread (None: all)
    continuations: int = 32  # samples of each place
    # the text of the only right response, where {answer} is that of the row: no samples
    exact: str | None = None
    out_dir: pathlib.Path = pathlib.Path("out/truth")


def main(truth, flags):
    """Makes the true values that are not there yet, and compares critics with them."""
    judge(truth, made(truth, flags)[0] if truth.policy else ppo_loop.parse(flags))


def made(truth, flags):
    """Makes the true values that are not there yet -> (the task's Run, the Maker)."""
    out = ["--out-dir", str(truth.out_dir)]
    run = ppo_loop.parse([*flags, "--actor.model", truth.policy, *out])
    run, task = ppo_loop.set_up(run)
    if truth.exact and (task.observe or run.reward_model):
        raise UserError("--exact: goes with a reward function, and without --environment")
    if truth.continuations < 2:
        raise UserError("--continuations: at least 2 tell how far off their mean may be")
    if run.kl_coef or (run.gae_level == "turn" and run.gamma < 1):
        flags = "--kl-coef, --gae-level turn with --gamma"
        raise UserError(f"{flags}: true values are of rewards alone, discounted by tokens")
    if task.images:
        raise UserError("--prompts: have images, but true values are made of texts only")

    maker = Maker(truth, run, task)
    truth.out_dir.mkdir(parents=True, exist_ok=True)
    claim(truth, run, maker.checksum)
    make(truth, task, maker)
    return run, maker


# ---- The file of true values ---------------------------------------------------------------------

TOLD = ("answers", "states", "continuations", "exact", "reference")
TOLD_BY_RUN = (
    *("prompts", "eval_prompts", "reward", "reward_model", "environment", "max_turns", "chat"),
    *("temperature", "top_p", "stop", "max_response_length", "gamma", "seed"),
)


def claim(truth, run, policy):
    """Writes down how the true values are made. UserError: those in the folder were made in
    another way, or of a policy with other weights, whose checksum this is."""
    made = {"policy": policy} | {name: getattr(truth, name) for name in TOLD}
    made |= {name: getattr(run, name) for name in TOLD_BY_RUN}
    made = json.loads(json.dumps(made))

    # all ranks have looked before rank 0 writes
    file = truth.out_dir / "made.json"
    if file.exists():
        before = json.loads(file.read_text())
        other = ", ".join(name for name in made if made[name] != before.get(name))
        if other:
            words = f"has true values of another {other}"
            raise UserError(f"--out-dir {truth.out_dir}: {words}; give another folder")
    if WORLD_SIZE > 1:
        dist.barrier()
    common.write_json(file, made)


def make(truth, task, maker):
    """Appends answers with true values to truth.jsonl, in the order of prompts."""
    file = truth.out_dir / "truth.jsonl"
    prompts = task.held_out or task.prompts
    there = lines_of(file)
    asked = [(line["prompt_ids"], line["answer"]) for line in there[:: truth.answers]]
    if asked != [(prompt.ids, prompt.answer) for prompt in prompts[: len(asked)]]:
        raise UserError(
            f"--out-dir {truth.out_dir}: has true values of other prompts; give another folder"
        )

    prompts = prompts[: truth.most]
    whole = len(there) // truth.answers  # prompts; the last may have been cut off
    if WORLD_SIZE > 1:
        dist.barrier()
    if RANK == 0:
        common.replace_lines(file, there[: whole * truth.answers])

    done = common.progress_of(len(prompts), "true values", "prompts")
    done(whole)
    for first in range(whole, len(prompts), AT_ONCE * WORLD_SIZE):
        numbers = range(first, min(first + AT_ONCE * WORLD_SIZE, len(prompts)))
        mine = maker.rows([(i, prompts[i]) for i in numbers[RANK::WORLD_SIZE]])
        rows = sorted(chain(*of_all_ranks(mine)), key=lambda row: row["prompt_number"])
        if RANK == 0:
            with open(file, "a") as out:
                out.writelines(json.dumps(row) + "\n" for row in rows)
        done(len(numbers))
    missed = sum(of_all_ranks(maker.missed))
    if missed:
        print0(f"note       {missed} answers earn something in a way that --exact does not know")


def lines_of(file):
    """The JSON objects of a file of lines, without one that was cut off."""
    if not file.exists():
        return []
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


# ---- True values ---------------------------------------------------------------------------------


class State:
    """A place in an answer: what the policy has written when it chooses the next token."""

    def __init__(self, reply, i, token=None):
        """i: index of the next token in reply.ids. token: stands there instead, and the place is
        the one behind it."""
        self.reply = reply
        self.ids = reply.ids[:i] if token is None else [*reply.ids[:i], token]
        self.key = (str(reply.prompt.row), *self.ids)  # a reward may look at all of the row

        # the turn that it is in, and where this begins
        self.turn = sum(end < i for end in reply.ends)
        self.start = 0
        if self.turn:
            self.start = reply.ends[self.turn - 1] + 1
            while reply.log_probs[self.start] is None:
                self.start += 1


class Begun:
    """An engine for rows whose next turns have begun with these tokens."""

    def __init__(self, engine, begun, run, task):
        self.engine = engine
        self.begun = begun
        self.stop_texts = task.stop_texts
        self.longest = max((len(text.encode()) for text in run.stop), default=0)

    def generate(self, rows, temperature, images=None):
        """See HFRollout.generate. Nothing has begun in later turns."""
        begun = self.begun or [[]] * len(rows)
        self.begun = None
        pairs = list(zip(rows, begun, strict=True))
        rows = [(ids + head, seed, room - len(head)) for (ids, seed, room), head in pairs]
        replies = self.engine.generate(rows, temperature, images)

        # a text of --stop may lie across the border, where the engine does not see it
        whole = []
        for head, (ids, log_probs, ended) in zip(begun, replies):
            for n in range(1, min(self.longest, len(ids) + 1)):
                if head and self.stop_texts(torch.tensor([head + ids[:n]]), None):
                    ids, ended = ids[:n], True
                    break
            whole.append((head + ids, [0.0] * len(head) + log_probs[: len(ids)], ended))
        return whole


class Maker:
    """The policy, what rates its answers, and what makes true values of both."""

    def __init__(self, truth, run, task):
        self.truth = truth
        self.run = run
        self.task = task
        self.device = common.setup_distributed(run.critic.timeout_minutes)
        self.phases = ppo_loop.Phases(offload=False)
        self.reward = task.reward
        if run.reward_model:
            self.reward = ppo_loop.RewardModel(run, task.tokenizer)

        # the engine that generates, and a model of transformers that reads
        self.policy = ppo_loop.PolicyWorker(run, task, self.device, trains=False)
        self.reader = self.engine = ppo_loop.HFRollout(run, task, self.device)
        if run.rollout == "vllm":
            self.engine = ppo_loop.VLLMRollout(run, task, self.device)
            self.engine.sync(self.policy.weights(self.engine.dtype))
        self.reader.sync(self.policy.weights(self.reader.dtype))
        self.reference = None
        if truth.reference:
            its = replace(run, actor=replace(run.actor, model=truth.reference))
            self.reference = ppo_loop.PolicyWorker(its, task, self.device, trains=False)

        # tokens that end a turn by themselves
        self.ends = list(task.stop_ids)
        if run.stop:
            texts = [common.decode(task.tokenizer, [i]) for i in range(task.known)]
            self.ends += [i for i, x in enumerate(texts) if any(stop in x for stop in run.stop)]
        self.missed = 0  # answers that earn something else than --exact says

        # of the bits of all weights
        checksum = 0
        for _, x in self.policy.weights():
            checksum = zlib.crc32(x.cpu().contiguous().numpy(), checksum)
        self.checksum = f"{checksum:08x}"

    def rows(self, numbered):
        """Answers to (number, Prompt) pairs, with true values, as lines of truth.jsonl (a
        collective)."""
        run = self.run
        n = self.truth.answers
        replies = [Reply(prompt, i * n + k) for i, prompt in numbered for k in range(n)]
        ppo_loop.roll_out(self.engine, self.task, replies, run, run.temperature, f"{run.seed}")
        ppo_loop.score(run, self.reward, self.phases, replies)
        if any(of_all_ranks(any(reply.contexts for reply in replies))):
            wrong = "true values are of answers of one row, but a turn has a new context"
            raise UserError(f"--environment: {wrong}")

        # the places to look at; answers to a prompt may have some in common
        answers = [[State(reply, i) for i in self.places(reply)] for reply in replies]
        states = {state.key: state for state in chain(*answers)}
        siblings = self.siblings(states, replies)
        states |= {child.key: child for pair in siblings.values() for child, _ in pair}
        value_of = self.exact(states, replies) if self.truth.exact else self.sampled(states)

        rows = [self.row(reply) for reply in replies]
        for row, places in zip(rows, answers):
            for state in places:
                i = len(state.ids)
                row["truth"][i], row["truth_noise"][i], row["luck"][i] = value_of[state.key]
                for child, log_p in siblings.get(state.key, ()):
                    value, noise, _ = value_of[child.key]
                    row["siblings"].append((i, child.ids[-1], log_p, value, noise))
        if self.reference:
            self.add_log_ratios(replies, rows)
        return rows

    def row(self, reply):
        """A Reply as a row that common.read_rows reads, and what people want to see of it."""
        n = len(reply.ids)
        row = {
            "prompt_number": reply.row_id // self.truth.answers,
            "prompt_text": reply.prompt.text,
            "response_text": reply.text,
            "answer": reply.prompt.answer,
            "score": reply.score,
            "prompt_ids": reply.prompt.ids,
            "response_ids": reply.ids,
            "response_mask": [log_prob is not None for log_prob in reply.log_probs],
            "rewards": [reply.earned[i] for i in range(n)],
            "truncated": not reply.finished,
            "truth": [None] * n,
            "truth_noise": [None] * n,
            "luck": [None] * n,
            "siblings": [],
        }
        if key := self.run.privileged_key:
            row[key] = common.look_up(reply.prompt.row, key)
        return row

    def places(self, reply):
        """Indices of the tokens at which the answer gets true values."""
        actions = [i for i, log_prob in enumerate(reply.log_probs) if log_prob is not None]
        most = min(self.truth.states or len(actions), len(actions))
        return [actions[len(actions) * k // most] for k in range(most)]

    def siblings(self, states, replies):
        """{key of a place: (the State behind, log-prob) of its two likeliest next tokens}, where
        both are likelier than 0.05 and do not end the turn, and there is room behind them."""
        rows = [reply.prompt.ids + reply.ids for reply in replies]
        firsts = [len(reply.prompt.ids) for reply in replies]
        read = zip(replies, next_log_probs(self.reader.model, self.run, self.task, rows, firsts))
        likeliest = {id(reply): log_p_RV.topk(2) for reply, log_p_RV in read}

        found = {}
        for key, state in states.items():
            i = len(state.ids)
            log_p, tokens = (x_R2[i].tolist() for x_R2 in likeliest[id(state.reply)])
            if log_p[1] > log(0.05) and i + 1 < self.run.max_response_length:
                behind = [State(state.reply, i, token) for token in tokens]
                if not any(map(self.ends_turn, behind)):
                    found[key] = list(zip(behind, log_p))
        return found

    def ends_turn(self, state):
        """Whether the last token in front of a place has ended its turn."""
        stop_texts = self.task.stop_texts
        said = torch.tensor([state.ids[state.start :]])
        return state.ids[-1] in self.ends or bool(stop_texts and stop_texts(said, None))

    def sampled(self, states):
        """{key: State} -> {key: (mean return of its continuations, the variance of this mean, the
        variance of a return)} (a collective). Random numbers depend on the place alone."""
        run = self.run
        value_of = {}
        turns = of_all_ranks({state.turn for state in states.values()})
        for turn in sorted(set().union(*turns)):
            some = [state for state in states.values() if state.turn == turn]
            pairs = [(state, k) for state in some for k in range(self.truth.continuations)]
            replies = [self.begin(state, k) for state, k in pairs]

            # the rest of this turn, and then as any rollout goes on
            begun = [state.ids[state.start :] for state, _ in pairs]
            engine = Begun(self.engine, begun, run, self.task)
            left = replace(run, max_turns=run.max_turns - turn)
            ppo_loop.roll_out(engine, self.task, replies, left, run.temperature, f"{run.seed}")
            ppo_loop.score(run, self.reward, self.phases, replies)

            returns = [
                return_from(reply, len(state.ids), run.gamma)
                for (state, _), reply in zip(pairs, replies)
            ]
            shape = (len(some), self.truth.continuations)
            for state, mine in zip(some, np.reshape(returns, shape)):
                luck = mine.var(ddof=1)
                value_of[state.key] = mine.mean(), luck / len(mine), luck
        return value_of

    def begin(self, state, k):
        """The k-th continuation of a place, at the start of its turn."""
        reply = state.reply
        ids = state.ids[: state.start]
        row_id = random.Random(f"{state.key} {k}").getrandbits(62)  # a number, for reward models
        new = Reply(reply.prompt, row_id, ids, reply.log_probs[: state.start])
        new.turns = reply.turns[: 2 * state.turn]
        new.ends = reply.ends[: state.turn]
        if reply.chat:  # it has two messages more for each turn
            new.chat = reply.chat[: len(reply.chat) - len(reply.turns) + 1 + 2 * state.turn]

        # as in roll_out, texts have no ends of the policy's turns
        for i, (token, log_prob) in enumerate(zip(ids, new.log_probs)):
            ends = i in new.ends and token in self.task.stop_ids
            if log_prob is None or not ends:
                new.shown.append(token)
        return new

    def exact(self, states, replies):
        """As sampled, for prompts with one right text each, that earn nothing else."""
        prompts = {id(reply.prompt): reply.prompt for reply in replies}
        tokenizer = self.task.tokenizer
        room = self.run.max_response_length

        # the right answers, and what they earn
        rights = {}
        for key, prompt in prompts.items():
            text, ids = right_answer(self.truth, tokenizer, prompt.ids, prompt.answer)
            rights[key] = Reply(prompt, 0, ids, finished=True, text=text, turns=[text])
            rights[key].ends.append(len(ids) - 1)
        ppo_loop.score(self.run, self.reward, self.phases, list(rights.values()))

        # the chances of their tokens, and of an end behind them, unless it is there, or has no room
        rows = [right.prompt.ids + right.ids + [0] for right in rights.values()]
        firsts = [len(prompt.ids) for prompt in prompts.values()]
        read = next_log_probs(self.reader.model, self.run, self.task, rows, firsts)
        chances = {}
        for (key, right), log_p_RV in zip(rights.items(), read):
            p = [float(log_p_V[x].exp()) for x, log_p_V in zip(right.ids, log_p_RV)]
            *early, last = [False, *(x in self.ends for x in right.ids)]
            if len(p) > room or any(early):
                p = [0.0] * len(p)
            elif len(p) < room and not last:
                p.append(float(log_p_RV[-1, self.ends].exp().sum()))
            chances[key] = p

        value_of = {}
        for key, state in states.items():
            k = len(state.ids)
            right = rights[id(state.reply.prompt)]
            left = chances[id(state.reply.prompt)][k:]
            p = earned = 0.0
            if state.ids == right.ids[:k]:
                p = prod(left)
                earned = right.score * self.run.gamma ** (len(left) - 1)
            value_of[key] = earned * p, 0.0, earned**2 * p * (1 - p)

        # an answer may be right in other tokens, or earn something although it is wrong
        for reply in replies:
            right = rights[id(reply.prompt)]
            known = reply.ids in (right.ids, *([*right.ids, end] for end in self.ends))
            self.missed += reply.score != (right.score if known else 0.0)
        return value_of

    def add_log_ratios(self, replies, rows):
        """Adds log(pi / pi_ref) of each token of the answers to their rows (a collective)."""
        batch = ppo_loop.to_batch(replies)
        ratio_T = self.policy.compute_log_probs(batch) - self.reference.compute_log_probs(batch)
        for row, ratio_R in zip(rows, ratio_T.split(batch.lengths)):
            row["log_ratio"] = ratio_R[len(row["prompt_ids"]) :].tolist()


@torch.no_grad()
def next_log_probs(lm, run, task, rows, firsts):
    """Yields, for the ids of each row from this index on, (R, V) log-probs of what this model of
    transformers draws in their place."""
    longest = max(map(len, rows), default=1)
    at_once = max(1, ppo_loop.LOGITS_AT_ONCE // (longest * task.known))
    for i in range(0, len(rows), at_once):
        some = [torch.tensor(ids, device=lm.device) for ids in rows[i : i + at_once]]
        inputs = {"attention_mask": pad_sequence([torch.ones_like(ids) for ids in some], True)}
        out = lm(pad_sequence(some, True), **inputs, use_cache=False)

        # a token is drawn from the logits of the one before it
        for ids, first, logits_LV in zip(some, firsts[i:], out.logits):
            logits_RV = logits_LV[first - 1 : len(ids) - 1]
            yield ppo_loop.to_draw_from(logits_RV, run.temperature, run.top_p, task)


def right_answer(truth, tokenizer, prompt_ids, answer):
    """The only right response of --exact -> (its text, its token ids)."""
    text = truth.exact.format(answer=answer)
    return text, common.encode_behind(tokenizer, common.decode(tokenizer, prompt_ids), text)


def return_from(reply, i, gamma):
    """What the answer earns from index i on, discounted by actions."""
    actions = [j for j, log_prob in enumerate(reply.log_probs) if log_prob is not None and j >= i]
    return sum(gamma**n * reply.earned[j] for n, j in enumerate(actions))


# ---- Critics against them ------------------------------------------------------------------------

LAMBDAS = (0.0, 0.95, 1.0)
DRAWS = 200  # of the bootstrap over prompts
NUMBERS = {  # column -> what it means, of a guess at the true values
    "explained": "explained variance of the true values: 1 is perfect, 0 as good as a constant",
    "later": "the same behind the first token, where it matters what the answer says",
    "correlation": "with the true values",
    "bias": "the mean of value minus true value",
    "slope": "of the true values over the values; below 1, the values lie too far apart",
    "flatness": "variance within an answer, over that of the true values; 1 is right",
    "siblings": "of two likely next tokens, how often the clearly better one gets more",
    **{f"lambda {lam:g}": "root mean square error of these advantages" for lam in LAMBDAS},
    "samples": "of each place, whose mean would err as much",
}


class Table:
    """The actions with a true value, as columns (A,), and pairs of sibling tokens."""

    def __init__(self, lines, batch, gamma):
        acts_T = batch.response_mask.numpy()
        row_A = batch.row_of_token.numpy()[acts_T]
        last_A = np.append(row_A[1:] != row_A[:-1], True)
        self.place_T = np.zeros(len(acts_T), dtype=int)  # how many actions are in front
        self.place_T[acts_T] = np.arange(len(row_A)) - np.searchsorted(row_A, row_A)

        # what is true of each action, and how far off that may be
        truth_A, noise_A, rewards_A, returns_A = (
            x_T.double().numpy()[acts_T]
            for x_T in (
                batch.truth,
                batch.truth_noise,
                batch.token_level_rewards,
                common.monte_carlo(batch, gamma),
            )
        )
        behind_A = np.where(last_A, 0.0, np.append(truth_A[1:], 0.0))
        noise_behind_A = np.where(last_A, 0.0, np.append(noise_A[1:], 0.0))
        luck_T = list(chain(*([nan] * len(x["prompt_ids"]) + x["luck"] for x in lines)))

        self.known = np.isfinite(truth_A)  # of all actions
        self.acts = acts_T
        columns = {
            "row": row_A,
            "prompt": np.array([line["prompt_number"] for line in lines])[row_A],
            "place": self.place_T[acts_T],
            "truth": truth_A,
            "noise": noise_A,
            "luck": np.array(luck_T, dtype=float)[acts_T],
            "returns": returns_A,
            "advantage": rewards_A + gamma * behind_A - truth_A,
            "advantage_noise": noise_A + gamma**2 * noise_behind_A,
        }
        for name, x_A in columns.items():
            setattr(self, name, x_A[self.known])

        # different pairs whose true values clearly differ
        least = 0.01 * self.truth.std()
        self.pairs = {}
        for line in lines:
            for one, two in zip(line["siblings"][::2], line["siblings"][1::2]):
                i, _, _, value, noise = one
                _, _, _, other, its_noise = two
                if abs(value - other) > max(least, 2 * (noise + its_noise) ** 0.5):
                    key = (line["prompt_number"], *line["response_ids"][:i])
                    self.pairs[key] = (line, one, two)
        self.pairs = list(self.pairs.values())

    def column(self, x_T):
        """(T,) numbers of the batch -> those of these actions."""
        return np.asarray(x_T, dtype=float)[self.acts][self.known]


class Guess(NamedTuple):
    """What a critic says of the Table, or anything else that costs less."""

    values: np.ndarray | None  # (A,)
    advantages: list | None  # (A,) for each of LAMBDAS
    siblings: list | None  # (more for the first, more for the second) of each pair


def numbers(table, guess, w_P, chosen=None):
    """{column: number} of a Guess. w_P: how often each prompt counts. chosen: which actions (None:
    all, which have more columns)."""
    truth_A = table.truth
    of_all_A = w_P[table.prompt].astype(float)
    w_A = of_all_A if chosen is None else of_all_A * chosen

    def mean(x_A, w_A=w_A):
        there = np.isfinite(x_A) & (w_A > 0)
        return np.average(x_A[there], weights=w_A[there]) if there.any() else nan

    def covariance(x_A, y_A, w_A=w_A):
        return mean(x_A * y_A, w_A) - mean(x_A, w_A) * mean(y_A, w_A)

    def spread(w_A=w_A):
        x = covariance(truth_A, truth_A, w_A) - mean(table.noise, w_A)
        return x if x > 1e-9 * mean(truth_A**2, w_A) else nan

    def explained(off_A, w_A=w_A):
        return 1 - (covariance(off_A, off_A, w_A) - mean(table.noise, w_A)) / spread(w_A)

    told = {}
    if guess.values is not None:
        v_A = guess.values
        off_A = v_A - truth_A
        told["explained"] = explained(off_A)
        if chosen is None:
            told["later"] = explained(off_A, of_all_A * (table.place > 0))
            told["flatness"] = flatness(table, v_A, w_P)
        its_spread = covariance(v_A, v_A)
        if its_spread > 1e-12 * mean(v_A**2):
            both = covariance(v_A, truth_A)
            told["correlation"] = both / (its_spread * spread()) ** 0.5
            told["slope"] = both / its_spread
        told["bias"] = mean(off_A)
        told["samples"] = mean(table.luck) / max(mean(off_A**2) - mean(table.noise), 1e-12)

    if guess.advantages:
        for lam, advantage_A in zip(LAMBDAS, guess.advantages):
            known = np.where(np.isfinite(table.advantage), table.advantage_noise, nan)
            error = mean((advantage_A - table.advantage) ** 2) - mean(known)
            told[f"lambda {lam:g}"] = max(error, 0.0) ** 0.5
    if guess.siblings and table.pairs and chosen is None:
        w = np.array([w_P[line["prompt_number"]] for line, _, _ in table.pairs], dtype=float)
        better = np.sign([one[3] - two[3] for _, one, two in table.pairs])
        said = np.sign([x - y for x, y in guess.siblings])
        told["siblings"] = mean((1 + said * better) / 2, w)
    return told


def flatness(table, v_A, w_P):
    """The mean variance of values within an answer over that of the true values."""
    n_B = np.bincount(table.row)
    first_B = np.searchsorted(table.row, np.arange(len(n_B)))
    w_B = np.where(n_B > 1, w_P[table.prompt[first_B]], 0)
    if not w_B.any():
        return nan

    def mean_of_rows(x_A):
        return np.bincount(table.row, x_A) / n_B

    def within(x_A):
        left_A = x_A - mean_of_rows(x_A)[table.row]
        var_B = np.bincount(table.row, left_A**2) / np.maximum(n_B - 1, 1)
        return np.average(var_B, weights=w_B)

    spread = within(table.truth) - np.average(mean_of_rows(table.noise), weights=w_B)
    return within(v_A) / spread if spread > 1e-9 * np.mean(table.truth**2) else nan


def with_errors(table, guess, chosen=None):
    """{column: (number, standard error)}: the second one by a bootstrap over prompts."""
    prompts = table.prompt.max() + 1
    rng = np.random.default_rng(0)
    draws = rng.multinomial(prompts, np.full(prompts, 1 / prompts), DRAWS)
    drawn = [numbers(table, guess, w_P, chosen) for w_P in draws]
    told = {}
    for name, x in numbers(table, guess, np.ones(prompts), chosen).items():
        others = np.array([other.get(name, nan) for other in drawn])
        others = others[np.isfinite(others)]
        told[name] = (x, others.std() if len(others) and prompts > 1 else nan)
    return told


def guesses(table, lines, batch, gamma):
    """{name: Guess} of what costs no critic."""
    prompt_B = np.array([line["prompt_number"] for line in lines])
    score_B = np.array([sum(line["rewards"]) for line in lines])
    row_T = batch.row_of_token.numpy()

    def guess(v_T):
        return Guess(table.column(v_T), advantages_of(table, batch, v_T, gamma), None)

    found = {"mean of all answers": guess(np.full(len(row_T), score_B.mean()))}

    # an answer is compared with the others to its prompt
    n_P = np.bincount(prompt_B)[prompt_B]
    if n_P.min() > 1:
        others_B = (np.bincount(prompt_B, score_B)[prompt_B] - score_B) / (n_P - 1)
        found["mean of the other answers"] = guess(others_B[row_T])

    # one place is like the same one of other answers
    returns_A = common.monte_carlo(batch, gamma).double().numpy()[table.acts]
    place_A = table.place_T[table.acts]
    means = np.bincount(place_A, returns_A) / np.bincount(place_A)
    found["mean of the place"] = guess(means[table.place_T])

    # an advantage up to a factor, which is the best one here; values are its sums
    if "log_ratio" in lines[0]:
        ratio_T = np.concatenate([[0.0] * len(x["prompt_ids"]) + x["log_ratio"] for x in lines])
        ratio_A = table.column(ratio_T)
        known = np.isfinite(table.advantage)
        beta = (ratio_A * table.advantage)[known].sum() / (ratio_A[known] ** 2).sum()
        before_T = np.cumsum(ratio_T) - ratio_T
        start_T = before_T[batch.cu_seqlens[:-1].numpy()][row_T]
        v_T = score_B.mean() + beta * (before_T - start_T)
        advantages = [beta * ratio_A for _ in LAMBDAS]
        found["log(pi / pi_ref)"] = Guess(table.column(v_T), advantages, None)

    # the policy's own order of what may come next
    order = [(one[2], two[2]) for _, one, two in table.pairs]
    found["the policy's own chances"] = Guess(None, None, order)
    return found


def advantages_of(table, batch, v_T, gamma):
    """GAE of these values, with each of LAMBDAS."""
    found = []
    values = torch.where(batch.response_mask, torch.as_tensor(v_T, dtype=torch.float32), 0.0)
    batch = replace(batch, values=values)
    for lam in LAMBDAS:
        common.add_returns(batch, gamma, lam)
        found.append(table.column(batch.advantages))
    return found


def critic_config(run, folder):
    """(the critic's flags, for an export with any kind of head; the name of its fork or None)."""
    described = common.config_of(common.local_folder(folder))
    head = "bounded" if described.get("value_range") else "scalar"
    bins = len(described.get("id2label", ())) > 1
    config = replace(run.critic, model=folder, tokenizer=None, override_config="{}")
    config = replace(config, value_head=head, value_head_init="checkpoint", value_range=None)
    return config, "hl_gauss" if bins else None


def ask(table, batch, lines, run, folder, file):
    """(rows of the file with a critic's values, its Guess, its tokenizer) (a collective)."""
    config, fork = critic_config(run, folder)
    worker = critic_fsdp.CriticWorker(config)
    with forked_critic(critic_fsdp, fork):
        worker.init_model(1)
    texts = [
        (line["prompt_text"].strip(), common.decode(worker.tokenizer, line["prompt_ids"]))
        for line in lines
    ]
    if not any(text in whole for text, whole in texts):
        raise UserError(f"--critic {folder}: has other token ids than the policy")
    read = partial(common.read_rows, tokenizer=worker.tokenizer, hint_key=run.privileged_key)

    # what the critic says behind each of two siblings, in front of any action
    children = []
    for line, *pair in table.pairs:
        for i, token, *_ in pair:
            ids = [*line["response_ids"][:i], token, token]
            child = {"response_ids": ids, "response_mask": [0] * (i + 1) + [1], "reward": 0.0}
            child |= {
                name: x for name, x in line.items() if name in ("prompt_ids", run.privileged_key)
            }
            children.append(json.dumps(child))

    rows = read(str(file), flag="--out-dir")
    behind = read(children) if children else rows
    worker.set_budget(max(rows.longest[0], behind.longest[0]), "the longest answer")
    rows.values = common.compute_together(worker, rows)
    siblings = None
    if children:
        values_T = common.compute_together(worker, behind)
        siblings = values_T[behind.response_mask].view(-1, 2).tolist()

    # with --privileged-key, the critic's prompts are longer
    values_T = ppo_loop.move_actions(rows.values, rows, batch)
    advantages = advantages_of(table, batch, values_T, run.gamma)
    return rows, Guess(table.column(values_T), advantages, siblings), worker.tokenizer


def judge(truth, run):
    """Prints what critics and simpler guesses know of the true values, adds it to truth.json, and
    writes a report of the first critic (a collective)."""
    made = truth.out_dir / "made.json"
    if made.exists() and json.loads(made.read_text())["gamma"] != run.gamma:
        raise UserError(f"--gamma {run.gamma}: the true values in {truth.out_dir} are of another")
    file = truth.out_dir / "truth.jsonl"
    lines = lines_of(file)
    batch = common.read_rows(str(file), None, flag="--out-dir")
    if batch.truth is None:
        raise UserError(f"--out-dir {truth.out_dir}: none of its answers has a true value")
    table = Table(lines, batch, run.gamma)
    found = {}
    report = None
    for folder in truth.critic:
        rows, found[folder], tokenizer = ask(table, batch, lines, run, folder, file)
        report = report or (rows, "answers with true values", tokenizer, run.gamma)
    found |= guesses(table, lines, batch, run.gamma)
    if RANK:
        return

    told = {name: with_errors(table, guess) for name, guess in found.items()}
    tell(table, told)
    for name in truth.critic:
        tell_places(table, name, found[name])

    # earlier critics of the same true values stay
    result = truth.out_dir / "truth.json"
    there = json.loads(result.read_text()) if result.exists() else {}
    if there.get("states") != len(table.truth):
        there = {"guesses": {}}
    states = {"states": len(table.truth)} | known_of(table)
    common.write_json(result, states | {"guesses": there["guesses"] | told})
    if report:
        common.write_report(str(truth.out_dir), *report)


def known_of(table):
    """What there is to know, whatever a critic does."""
    ones = np.ones(table.prompt.max() + 1)
    noise_A = table.noise
    off_A = table.returns - table.truth
    first_A = table.place == 0
    in_all, in_answers = (x.var() or nan for x in (table.returns, table.returns[first_A]))
    return {
        "knowable": 1 - (off_A.var() - noise_A.mean()) / in_all,
        "advantage": numbers(table, Guess(None, [0 * table.truth], None), ones)["lambda 0"],
        "inside": 1 - (table.truth[first_A].var() - noise_A[first_A].mean()) / in_answers,
    }


def spread_of(table, chosen):
    """The standard deviation of the true values of these actions."""
    return max(table.truth[chosen].var() - table.noise[chosen].mean(), 0.0) ** 0.5


def places_of(table):
    """{name: which actions stand there}: the first four places, and ranges that double."""
    low_A = np.where(
        table.place < 4, table.place, 2 ** np.log2(np.maximum(table.place, 1)).astype(int)
    )
    found = {}
    for low in np.unique(low_A):
        name = f"{low}" if low < 4 else f"{low} to {2 * low - 1}"
        found[name] = low_A == low
    return found


def told_number(pair):
    """A number and its standard error, as text."""
    if pair is None or not np.isfinite(pair[0]):
        return "--"
    form = "z.3f" if abs(pair[0]) < 10 else "z.0f"
    return f"{pair[0]:{form}} +- {pair[1]:{form}}"


def tell(table, told):
    """Prints the table of all guesses."""
    known = known_of(table)
    print(
        f"\n{table.row.max() + 1} answers with {len(table.truth)} true values, which explain"
        f" {known['knowable']:.3f} of the returns.\n{known['inside']:.2f} of the reward's variance"
        f" is decided within answers. True advantages are {known['advantage']:.3f} (root mean"
        " square).\n"
    )
    print(f"| | {' | '.join(NUMBERS)} |\n{'|---' * (len(NUMBERS) + 1)}|")
    for name, numbers in told.items():
        cells = [told_number(numbers.get(column)) for column in NUMBERS]
        print(f"| {name} | {' | '.join(cells)} |")


def tell_places(table, name, guess):
    """Prints the table of a critic, by place."""
    columns = ("explained", "correlation", "bias", "samples")
    print(f"\n{name}\n| place | actions | spread | {' | '.join(columns)} |\n{'|---' * 7}|")
    for place, chosen in places_of(table).items():
        told = with_errors(table, guess, chosen)
        cells = [told_number(told.get(column)) for column in columns]
        spread = f"{spread_of(table, chosen):.3f}"
        print(f"| {place} | {chosen.sum()} | {spread} | {' | '.join(cells)} |")


if __name__ == "__main__":
    start(Truth, main, __doc__)
