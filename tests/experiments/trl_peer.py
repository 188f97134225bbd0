"""Steps of TRL's PPO on the prompts of real_model.py, in an environment that has trl==1.12.0:
`real_model.py trl` starts it. Writes what TRL computed in its first update, and the seconds of CPU
of each update by phase."""

import json
import pathlib
import sys
import time
from types import SimpleNamespace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import rewards
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

# tensors of its first update, as its code calls them
COLUMNS = (
    "query_responses responses scores sequence_lengths padding_mask padding_mask_p1 logprobs"
    " ref_logprobs values rewards advantages returns"
).split()


class Reward(torch.nn.Module):
    """A "reward model" whose output at each token is the row's score by rewards.last_number."""

    base_model_prefix = "backbone"

    def __init__(self, tokenizer, answers):
        super().__init__()
        self.tokenizer = tokenizer
        self.answers = answers

    def backbone(self, input_ids, attention_mask, **_):
        scores = []
        for ids, mask in zip(input_ids, attention_mask):
            text = self.tokenizer.decode(ids[mask.bool()])
            prompt, response = text.rsplit("assistant\n", 1)
            scores.append(rewards.last_number("", response, self.answers[prompt]))
        hidden_BL1 = torch.tensor(scores)[:, None, None].expand(*input_ids.shape, 1)
        return SimpleNamespace(hidden_states=[hidden_BL1])

    def score(self, hidden_BL1):
        return hidden_BL1


def watch(trainer, name, phase, clock):
    """Adds the CPU time of a function of TRL's module to a phase, outside the update."""
    call = getattr(ppo_trainer, name)

    def timed(*args, **kwargs):
        start = time.process_time()
        made = call(*args, **kwargs)
        if not torch.is_grad_enabled():
            clock[phase(trainer, args)] += time.process_time() - start
        return made

    setattr(ppo_trainer, name, timed)


def which_model(trainer, args):
    """The phase of a call of get_reward, by its model."""
    return "reward" if args[0] is trainer.reward_model else "values"


def trainer_of(folder, prompts, out, rows, length, updates, epochs, lr):
    """PPOTrainer for the first prompts of a file; policy, reference and critic have one start."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = "<|endoftext|>"  # it must differ from what ends a message

    # prompts as chats, and their right answers by the text before the response
    lines = [json.loads(line) for line in open(prompts)][: rows * updates]
    template = dict(add_generation_prompt=True, tokenize=False)
    texts = [tokenizer.apply_chat_template(line["prompt"], **template) for line in lines]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    starts = [text.rsplit("assistant\n", 1)[0] for text in texts]
    answers = {start: line["answer"] for start, line in zip(starts, lines)}

    # models with the same weights
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    value = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    for model in (policy, reference):
        model.generation_config.pad_token_id = tokenizer.pad_token_id

    config = PPOConfig(
        output_dir=f"{out}.run", report_to=[], save_strategy="no", use_cpu=True, seed=0, bf16=False,
        per_device_train_batch_size=rows, gradient_accumulation_steps=1, num_mini_batches=1,
        total_episodes=rows * updates, num_ppo_epochs=epochs, learning_rate=lr,
        lr_scheduler_type="constant", response_length=length, stop_token="eos", temperature=1.0,
        local_rollout_forward_batch_size=rows, num_sample_generations=0, kl_coef=0.05, lam=0.95,
        cliprange_value=0.2, vf_coef=1.0, gradient_checkpointing=False,
    )  # fmt: skip
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=Reward(tokenizer, answers),
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        eval_dataset=Dataset.from_dict({"input_ids": ids[:rows]}),
    )


def record_losses(first):
    """Fills in the first update: local variables of train(), at its calls of two functions."""
    first["losses"] = []
    whiten = ppo_trainer.masked_whiten
    mean = ppo_trainer.masked_mean

    def masked_whiten(advantages, *rest):
        there = sys._getframe(1).f_locals
        made = whiten(advantages, *rest)
        if "responses" in first:
            first["over"] = True  # a second update has begun
        else:
            first.update({name: there[name].clone() for name in COLUMNS}, whitened=made.clone())
            first["context"] = there["context_length"]
        return made

    def masked_mean(x, *rest):
        there = sys._getframe(1).f_locals
        made = mean(x, *rest)
        if x is there.get("pg_loss_max") and "over" not in first:
            names = ("new_logprobs", "vpred", "micro_batch_inds", "vf_loss")
            seen = {name: torch.as_tensor(there[name]).detach().clone() for name in names}
            first["losses"].append(seen | {"pg_loss": made.detach()})
        return made

    ppo_trainer.masked_whiten = masked_whiten
    ppo_trainer.masked_mean = masked_mean


def record_times(trainer, times):
    """Appends the seconds of CPU of each update by phase."""
    nothing = dict.fromkeys(("rollout", "reference", "values", "reward"), 0.0)
    clock = nothing | {"begin": time.process_time()}
    whiten = ppo_trainer.masked_whiten

    def masked_whiten(*args):  # the last thing before the epochs of an update
        made = whiten(*args)
        clock["update"] = time.process_time()
        return made

    def log(metrics, *_):  # the first thing after them
        if "objective/scores" in metrics:
            now = time.process_time()
            phases = {name: clock[name] for name in nothing}
            times.append(phases | {"update": now - clock["update"], "step": now - clock["begin"]})
            clock.update(nothing, begin=now)

    ppo_trainer.masked_whiten = masked_whiten
    trainer.log = log
    watch(trainer, "batch_generation", lambda *_: "rollout", clock)
    watch(trainer, "forward", lambda *_: "reference", clock)
    watch(trainer, "get_reward", which_model, clock)


def main(folder, prompts, out, rows, length, updates, epochs, lr):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    counts = map(int, (rows, length, updates, epochs))
    trainer = trainer_of(folder, prompts, out, *counts, float(lr))
    first = {}
    times = []
    record_times(trainer, times)
    record_losses(first)  # last, because it looks at who calls it
    trainer.train()
    torch.save(first | {"times": times}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
