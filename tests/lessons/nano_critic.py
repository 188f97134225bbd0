"""A critic for a language model, and PPO with it: the whole idea in one file and one process.

    python tests/lessons/nano_critic.py     half a minute on a core, with torch and transformers

A language model that answers prompts is a *policy*: it chooses one token after another, here one
character, and each token that it chooses is an *action*. When the answer has ended, a program gives
it a *reward*: 1 if a sum is right, else 0. The *critic* is a second model. Before each action it
says how much reward it still expects: the *value*. If it expects more after an action than before,
the action was better than expected. Then its *advantage* is positive, and PPO, proximal policy
optimization, makes the action likelier.

Read from top to bottom: rows, values, advantages, the critic's loss, the update. Then PPO, where
the policy learns, too, and is called the *actor*. critic_fsdp.py makes the same updates on many
GPUs, and ppo_loop.py the same steps of PPO; reading.md has a table of what they replace.

Shapes are in the names: B rows, L tokens of the longest row, A actions, D features, V vocabulary.
"""

import json
from itertools import takewhile
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoModelForCausalLM, Qwen2Config

# numbers to play with; each is explained where it is used
GAMMA = 1.0
LAMBDA = 0.95
CLIP_VALUE = 0.5
CLIP_RATIO = 0.2
GRAD_CLIP = 1.0
MINI_BATCH = 128
EPOCHS = 2


# ---- Rows: a prompt, an answer and a reward ------------------------------------------------------
#
# A line of rows.jsonl is {"prompt": "70+25=", "response": "95", "reward": 1.0}. A row is the tokens
# of a prompt and of the answer to it. Many rows are a dict of (B, L) tensors, which have one number
# for each token:
#
#     ids          7  0  +  2  5  =  9  5  END
#     is_action    0  0  0  0  0  0  1  1  1      the policy has chosen these, the end as well
#     rewards      0  0  0  0  0  0  0  0  1      the program has judged the whole answer

PROMPT_LENGTH = 6  # tokens of each sum; an answer has at most three digits and END
PAD = 0  # fills short rows up to L
END = 1  # ends an answer
OFFSET = 28  # a character's token is its number in ASCII minus this


def read_rows(name):
    """The rows of a file in tests/."""
    lines = Path(__file__).resolve().parents[1].joinpath(name).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    texts = [row["prompt"] + row["response"] for row in rows]
    ids = [torch.tensor([ord(c) - OFFSET for c in text] + [END]) for text in texts]
    return as_rows(pad_sequence(ids, batch_first=True), [row["reward"] for row in rows])


def as_rows(ids_BL, rewards):
    """(B, L) tokens and B rewards -> the dict above. An answer without END earns nothing."""
    is_end_BL = ids_BL == END
    is_action_BL = is_end_BL.cumsum(1) == is_end_BL  # where no END comes before this token
    is_action_BL[:, :PROMPT_LENGTH] = False
    rewards_BL = is_end_BL * torch.tensor(rewards)[:, None]
    return {"ids": ids_BL, "is_action": is_action_BL, "rewards": rewards_BL}


def select(rows, which):
    """Some of the rows: those of a slice, or those with these indices."""
    return {name: x_BL[which] for name, x_BL in rows.items()}


# ---- Values: a language model with another last layer --------------------------------------------

CONFIG = Qwen2Config(  # a language model of 100,000 weights, which start at random
    vocab_size=99,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.1,  # with the usual 0.02, so narrow a model hardly learns
)


class ValueModel(nn.Module):
    """The critic: a language model whose last layer gives one number after each token, the value,
    instead of the chances of the next token."""

    def __init__(self, config):
        super().__init__()
        self.model = AutoModel.from_config(config)
        self.score = nn.Linear(config.hidden_size, 1)

    def forward(self, ids_BL):
        """(B, L) tokens -> (B, L) values. The value of an action is what the critic says after the
        token *before* it, when the action is not chosen yet: all move one place to the right.

            token               7   0   +   2   5   =   9   5   END
            said after it       s0  s1  s2  s3  s4  s5  s6  s7  s8
            value before it     0   s0  s1  s2  s3  s4  s5  s6  s7

        The model reads from left to right, so that the PAD after a row changes nothing in it."""
        hidden_BLD = self.model(ids_BL, use_cache=False).last_hidden_state
        said_BL = self.score(hidden_BLD).squeeze(-1)
        return F.pad(said_BL[:, :-1], (1, 0))


# ---- Advantages: was an action better than expected? ---------------------------------------------


def gae(rewards, values, is_action):
    """Generalized advantage estimation (arXiv 1506.02438), from a row's last token to its first
    -> the advantage of each token, 0 where no action is.

    The surprise of an action is its reward and the value after it, minus the value before it. But
    the value after it may be wrong as well, and later surprises tell. So an advantage is a surprise
    plus LAMBDA times the next advantage: with 1, all rewards to come minus the value; with 0, the
    first surprise alone. With GAMMA below 1, what comes later is worth less."""
    advantages = [0.0] * len(rewards)
    next_value = 0.0  # nothing comes after the last action
    next_advantage = 0.0

    for t in reversed(range(len(rewards))):
        if is_action[t]:
            surprise = rewards[t] + GAMMA * next_value - values[t]
            advantages[t] = surprise + GAMMA * LAMBDA * next_advantage
            next_value = values[t]
            next_advantage = advantages[t]
    return advantages


@torch.no_grad()
def assign_credit(rows, critic):
    """Adds values, advantages and returns to rows. A return is what the value should have been,
    judging by what came after it: the critic learns it."""
    rows["values"] = critic(rows["ids"])
    columns = (rows[name].tolist() for name in ("rewards", "values", "is_action"))
    rows["advantages"] = torch.tensor([gae(*row) for row in zip(*columns)])
    rows["returns"] = rows["advantages"] + rows["values"]


# ---- The critic's loss ---------------------------------------------------------------------------


def value_loss(critic, rows):
    """-> (B, L) the loss of each action, and whether it is clipped.

    The loss is half the squared error of the value. But a few rows should not move a value far, so
    the error is taken twice: of the value, and of the value clipped to CLIP_VALUE around the old
    one, from before the update. The larger counts. If it is the clipped one, it does not depend on
    the weights, and nothing moves the value further."""
    values_BL = critic(rows["ids"])
    clipped_BL = values_BL.clamp(rows["values"] - CLIP_VALUE, rows["values"] + CLIP_VALUE)

    error_BL = (values_BL - rows["returns"]).square()
    clipped_error_BL = (clipped_BL - rows["returns"]).square()
    return 0.5 * torch.maximum(error_BL, clipped_error_BL), clipped_error_BL > error_BL


# ---- The update, of the critic and of the actor --------------------------------------------------


def update(model, optimizer, rows, loss_of):
    """Learns from rows -> (mean loss, share of the actions that were clipped, mean gradient norm).

    The rows are read EPOCHS times. Each time they are cut into mini-batches, and each mini-batch
    makes one step of the optimizer, against the gradient of its loss."""
    losses, norms, clipped = [], [], 0
    for _ in range(EPOCHS):
        for first in range(0, len(rows["ids"]), MINI_BATCH):
            mini = select(rows, slice(first, first + MINI_BATCH))
            loss_BL, clipped_BL = loss_of(model, mini)
            loss = loss_BL[mini["is_action"]].mean()  # each action counts alike
            loss.backward()

            # a gradient longer than GRAD_CLIP is shortened to it, so odd rows do less harm
            norm = nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad()

            losses.append(loss.item())
            norms.append(norm.item())
            clipped += int(clipped_BL[mini["is_action"]].sum())

    actions = EPOCHS * int(rows["is_action"].sum())
    return fmean(losses), clipped / actions, fmean(norms)


# ---- PPO: the actor learns what the critic calls better than expected ----------------------------


@torch.no_grad()
def answer(actor, ids_BL):
    """The actor answers prompts -> rows. It draws each token by its chance: to find out which
    actions are good, it has to try some."""
    for _ in range(4):
        chances_BV = actor(ids_BL, use_cache=False).logits[:, -1].softmax(-1)
        next_B1 = chances_BV.multinomial(1)
        has_ended_B1 = (ids_BL == END).any(1, keepdim=True)
        ids_BL = torch.cat([ids_BL, next_B1.where(~has_ended_B1, PAD)], 1)
    return as_rows(ids_BL, [reward_of(ids) for ids in ids_BL.tolist()])


def reward_of(ids):
    """The program that judges an answer: 1 if the sum is right, else 0."""
    prompt, _, response = text_of(ids).partition("=")
    return float(response == str(sum(map(int, prompt.split("+")))))


def text_of(ids):
    """The characters of a row up to END; "_" for a PAD, which the actor may have drawn."""
    before_end = takewhile(lambda i: i != END, ids)
    return "".join("_" if i == PAD else chr(i + OFFSET) for i in before_end)


def log_probs(actor, ids_BL):
    """(B, L) the logarithm of each token's chance, as the actor gives it after those before it."""
    log_probs_BLV = actor(ids_BL, use_cache=False).logits.log_softmax(-1)
    chosen_BL = log_probs_BLV[:, :-1].gather(2, ids_BL[:, 1:, None])[..., 0]
    return F.pad(chosen_BL, (1, 0))


def imitation_loss(actor, rows):
    """-> (B, L) a loss that falls as the actor learns to write these rows; nothing is clipped."""
    return -log_probs(actor, rows["ids"]), torch.zeros_like(rows["is_action"])


def policy_loss(actor, rows):
    """PPO's loss (arXiv 1707.06347, eq. 7) -> (B, L) of each action, and whether it is clipped.

    The ratio is how much likelier an action is now than when it was drawn. Ratio times advantage
    should grow. But rows say little about an actor far from the one that wrote them: moving the
    ratio out of 1 - CLIP_RATIO to 1 + CLIP_RATIO gains nothing."""
    ratio_BL = (log_probs(actor, rows["ids"]) - rows["log_probs"]).exp()
    gain_BL = ratio_BL * rows["advantages"]
    clipped_gain_BL = ratio_BL.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO) * rows["advantages"]
    return -torch.minimum(gain_BL, clipped_gain_BL), clipped_gain_BL < gain_BL


def whiten(x_BL, is_action_BL):
    """Shifts and scales x to mean 0 and variance 1 over the actions: the size of the actor's steps
    then depends neither on that of the rewards nor on how sure the critic is."""
    x_A = x_BL[is_action_BL]
    return (x_BL - x_A.mean()) * (x_A.var() + 1e-8).rsqrt()


# ---- Main: the critic learns alone, then PPO -----------------------------------------------------


def main():
    """Prints a line for each update of the critic, and for each step of PPO."""
    torch.manual_seed(0)
    rows = read_rows("rows.jsonl")
    some = lambda: select(rows, torch.randperm(len(rows["ids"]))[:256])

    # a critic learns what to expect of the policy that has written the rows
    critic = ValueModel(CONFIG)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    for n in range(1, 21):
        batch = some()
        assign_credit(batch, critic)
        loss, clipped, norm = update(critic, critic_optimizer, batch, value_loss)
        print(f"critic {n:>2}   loss {loss:.4f}   clipped {clipped:5.1%}   gradient {norm:.2f}")

    # what it says of a wrong and a right answer to a new sum, before each digit and before END
    new = read_rows("rows_held_out.jsonl")
    assign_credit(new, critic)
    for b in range(2):
        values = [f"{value:.2f}" for value in new["values"][b][new["is_action"][b]]]
        print(f"{text_of(new['ids'][b].tolist()):9}   values", *values)

    # an actor learns to answer as this policy does: PPO needs one that is sometimes right
    actor = AutoModelForCausalLM.from_config(CONFIG)
    actor_optimizer = torch.optim.AdamW(actor.parameters(), lr=3e-3)
    for _ in range(50):
        update(actor, actor_optimizer, some(), imitation_loss)

    # PPO: the actor answers the prompts, then both learn from its answers
    actor_optimizer = torch.optim.AdamW(actor.parameters(), lr=5e-4)
    prompts_BL = rows["ids"][::4, :PROMPT_LENGTH]  # the file has four answers to each
    for n in range(1, 16):
        batch = answer(actor, prompts_BL[torch.randperm(len(prompts_BL))])
        assign_credit(batch, critic)
        batch["advantages"] = whiten(batch["advantages"], batch["is_action"])
        batch["log_probs"] = log_probs(actor, batch["ids"]).detach()

        loss, *_ = update(critic, critic_optimizer, batch, value_loss)
        _, clipped, _ = update(actor, actor_optimizer, batch, policy_loss)
        reward = batch["rewards"].sum(1).mean().item()
        print(f"ppo {n:>2}   reward {reward:.3f}   value loss {loss:.4f}   clipped {clipped:5.1%}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # in so small a model, threads would only wait for each other
    main()
