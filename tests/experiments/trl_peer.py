"""Steps of TRL's GRPO on the prompts of real_model.py, in an environment that has trl==1.16.0:
`real_model.py trl` starts it, with the arguments of the last lines."""

import sys

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def reward(completions, **_):
    """It costs nothing, and differs among the answers to a prompt."""
    return [float(len(completion[0]["content"]) % 5) for completion in completions]


if __name__ == "__main__":
    model, prompts, out, answers, group, length, steps = sys.argv[1:]
    config = GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=int(answers),
        num_generations=int(group),
        max_completion_length=int(length),
        max_steps=int(steps),
        learning_rate=5e-6,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": torch.float32},
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        seed=1,
    )
    rows = load_dataset("json", data_files=prompts, split="train").select_columns(["prompt"])
    GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=rows).train()
