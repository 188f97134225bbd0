"""Rows of other tools as rows of ours: functions for --rows of the critics and of ppo_loop.py.

    python critic_fsdp.py --rollouts chats.jsonl --rows tests/rows/shapes.py:sharegpt

A function gets a row as a dict and returns one, or a list of them. A small file of each kind is in
the folder tests/rows/shapes."""

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
TEXTS = ("prompt", "messages", "response", "completion")  # next to ids, which say it exactly


def sharegpt(row):
    """A chat under other names."""
    chat = [{"role": ROLES[x["from"]], "content": x["value"]} for x in row["conversations"]]
    if row.get("system"):
        chat.insert(0, {"role": "system", "content": row["system"]})
    return row | {"messages": chat}


def prime_rl(row):
    """Ids of a prompt and of a completion, whose mask tells the policy's tokens."""
    ours = {key: x for key, x in row.items() if key not in TEXTS}
    ours["response_ids"] = row["completion_ids"]
    ours["response_mask"] = row.get("completion_mask")
    return ours


def nemo_rl(row):
    """Ids of a whole row, whose mask tells the policy's tokens."""
    ours = {key: x for key, x in row.items() if key not in TEXTS}
    first = row["token_loss_mask"].index(1)
    ours["prompt_ids"] = row["token_ids"][:first]
    ours["response_ids"] = row["token_ids"][first:]
    ours["response_mask"] = row["token_loss_mask"][first:]
    return ours


def labelled(prompt, steps, labels):
    """Steps with a label each. Behind each step stands a new line, which alone is an action: its
    value has read all of the step, and its reward is the label."""
    return {
        "prompt": prompt,
        "response": [text for step in steps for text in (step.strip(), "\n")],
        "response_mask": [0, 1] * len(steps),
        "rewards": labels,
        "truncated": True,  # no end stands behind the last label
    }


def steps(row):
    """A list of steps as the response, and a label for each in rewards."""
    return labelled(row["prompt"], row["response"], row["rewards"])


def trl_steps(row):
    """TRL's data sets of steps, such as trl-lib/prm800k."""
    return labelled(row["prompt"], row["completions"], row["labels"])


def prm800k(row):
    """OpenAI's own file of PRM800K, with the steps that were chosen, or else the first ones."""
    steps = [x["completions"][x["chosen_completion"] or 0] for x in row["label"]["steps"]]
    texts = [step["text"] for step in steps]
    return labelled(row["question"]["problem"], texts, [step["rating"] for step in steps])


def math_shepherd(row):
    """Math-Shepherd: where the input has a ки, the label has a + or a -."""
    prompt, start, answer = row["input"].partition("Step 1:")
    steps = (start + answer).split("ки")[:-1]
    place = len(prompt) - 1
    labels = []
    for step in steps:
        place += len(step) + 1
        labels.append(int(row["label"][place] == "+"))
    return labelled(prompt, steps, labels)


def ultrafeedback(row):
    """A question and several answers with a score each, as openbmb/UltraFeedback has them."""
    asked = {"messages": [{"role": "user", "content": row["instruction"]}]}
    answers = row["completions"]
    return [asked | {"response": x["response"], "reward": x["overall_score"]} for x in answers]
