"""Whether a critic pays, from the rows of one policy, as the page says it of rows of your own.

python tests/experiments/pays.py --task digits     also notes, and sums of SmolLM2: 2 to 6 minutes

The commands for addition are those of the page. A policy answers each prompt four times, without
learning. A critic learns from the first half of the answers, in two passes, and is judged by the
others: the table of noise by baseline.
"""

import pathlib
import sys
from typing import Literal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import digits
import notes
import real_model
import tyro
from series import call

ASK = "--steps 2 --critic-warmup 2 --rollout-n 4 --dump-rollouts --eval-every 0"
FIT = {
    "digits": (
        "--ppo-mini-batch-size 16 --steps 128 --lr 1e-3 --value-head-init zero"
        " --cliprange-value None"
    ),
    "notes": "--ppo-mini-batch-size 128 --steps 16 --lr 1e-3",
    "sums": f"--ppo-mini-batch-size 32 --steps 64 --lr 5e-5 --freeze-modules {real_model.LOWEST}",
}


def pays(
    task: Literal["digits", "notes", "sums"] = "digits",
    out: pathlib.Path = pathlib.Path("out/pays"),
    prompts: int = 256,
    seed: int = 501,
):
    """prompts: of each half."""
    out = out / task
    if task == "sums":
        model = real_model.MODEL
        real_model.model()
        real_model.write_sums(out, real_model.line_of)
        flags = f"{real_model.COMMON} {real_model.LINE} {real_model.NONE}"
    else:
        module = {"digits": digits, "notes": notes}[task]
        model = out / "actor"
        module.prepare(out, seed)
        flags = module.FLAGS

    ask = f"ppo_loop.py {flags} {ASK} --train-batch-size {prompts} --seed {seed}"
    call(f"{ask} --out-dir {{task}}/asked", task=out, model=model)
    fit = "critic_fsdp.py --rollouts {rows}/step_1.jsonl --eval-rollouts {rows}/step_2.jsonl"
    fit += f" --model {{model}} {FIT[task]} --eval-every 0 --out-dir {{task}}/critic"
    call(fit, rows=out / "asked" / "rollouts", task=out, model=model)


if __name__ == "__main__":
    tyro.cli(pays)
