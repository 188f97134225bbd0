"""All three scripts through their CUDA branches, on a pretended device: pretend_device.py says what that shows.

As a script it runs everything on this many ranks, for the tests to compare with the host:

    python tests/test_device.py OUT_FOLDER [NAME...]
"""

import dataclasses
import gc
import pathlib
import sys

import pretend_device as device

if __name__ == "__main__":  # before anything asks for a device, or its number
    if not device.RUNS_HERE:
        sys.exit(device.REASON)
    device.install()

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from helpers import SCRATCH, ended, mine, random_batch, scenarios  # noqa: E402
from test_layouts import MODELS, save_model  # noqa: E402

import common  # noqa: E402
import critic_fsdp  # noqa: E402

pytestmark = pytest.mark.skipif(not device.RUNS_HERE, reason=device.REASON)
BATCH = random_batch(6, vocab_size=60)
SIZES = {"ppo_mini_batch_size": 3, "ppo_max_token_len_per_gpu": 60}
EXACT = {"param_dtype": "float32"}
MOE = {**EXACT, "model": "tiny-qwen3-moe"}
DEEPSEEK = f"{SCRATCH.name}/deepseek-v3"  # it has persistent buffers
PADDED = {**EXACT, "use_remove_padding": False}
ACTIVATIONS = {**EXACT, "gradient_checkpointing": True, "activation_offload": True}
TP = {"tensor_model_parallel_size": 2}
LAYOUTS = {  # ranks -> name -> what differs from the defaults
    1: {
        "fsdp2": {**EXACT}, "fsdp1": {**EXACT, "strategy": "fsdp1"}, "none": {**EXACT, "strategy": "none"},
        "bfloat16": {}, "padded": PADDED, "activation offload": ACTIVATIONS,
        "offload policy, experts": {**EXACT, "model": DEEPSEEK, "offload_policy": True},
        "megatron": EXACT, "megatron bfloat16": {}, "megatron padded": PADDED, "megatron experts": MOE,
    },
    2: {
        "fsdp2": {**EXACT}, "fsdp1": {**EXACT, "strategy": "fsdp1"}, "none": {**EXACT, "strategy": "none"},
        "ulysses": {**EXACT, "ulysses_size": 2}, "ulysses bfloat16": {"ulysses_size": 2},
        "megatron tensor": {**EXACT, **TP}, "megatron tensor bfloat16": TP,
        "megatron pipeline": {**EXACT, "pipeline_model_parallel_size": 2},
        "megatron experts, context": {**MOE, "expert_model_parallel_size": 2, "context_parallel_size": 2},
    },
}  # fmt: skip


def made(name, fields):
    """A critic with its model."""
    module = critic_fsdp
    if name.startswith("megatron"):
        import critic_megatron as module
    if fields.get("model") == DEEPSEEK:
        save_model(MODELS["deepseek-v3"], pathlib.Path(DEEPSEEK))
    worker = module.CriticWorker(module.Config(**SIZES, **fields))
    worker.init_model()
    worker.set_budget(BATCH.longest[0], "the longest row")
    return worker


def learned(worker, move=lambda: None):
    """Values of the batch before and after an update, its metrics, and where each call waited. move() comes
    before each."""
    rows, results, waits = mine(BATCH), [], []
    for call in (worker.compute_values, worker.update_critic, worker.compute_values):
        move()
        device.WAITS.clear()
        results.append(call(rows))
        waits.append(dict(device.WAITS))
    before, metrics, after = results
    values = [common.gather(dataclasses.replace(rows, values=x)).values for x in (before, after)]
    return {"values": values, "metrics": metrics, "waits": waits}


def layout(name, fields):
    """What a layout learns. Between phases it leaves the device, and takes nearly nothing there."""
    before = device.allocated()
    worker = made(name, fields)

    def move():
        whole = device.allocated() - before
        worker.offload()
        left = device.allocated() - before
        assert fields.get("offload_policy") or left < 0.1 * whole, (
            left,
            whole,
        )  # a stage keeps its last input
        worker.onload()

    return learned(worker, move)


def run_fsdp(out):
    """A run with `auto`, a save in the background, and a resumed one; its export is a reward model below."""
    rows = common.toy_rows
    common.toy_rows = lambda n, *args, **options: rows(n // 64, *args, **options)
    for steps, resume in ((2, None), (3, "auto")):
        config = critic_fsdp.Config(ppo_max_token_len_per_gpu="auto:0.01", ppo_mini_batch_size=16)
        options = {"async_save": True, "save_every": 1, "resume": resume, "out_dir": str(out / "fsdp")}
        critic_fsdp.main(critic_fsdp.Run(config, steps=steps, **options))
    said = [row for row in common.read_lines(out / "fsdp" / "metrics.jsonl") if "critic/vf_loss" in row]
    assert [row["step"] for row in said] == [1, 2, 3]


def resume_in_megatron(out):
    """Megatron continues what critic_fsdp.py saved: it has the same values."""
    folder = str(out / "fsdp" / "checkpoints" / "step_3")
    values = []
    for name in ("fsdp2", "megatron"):
        worker = made(name, EXACT)
        worker.load_checkpoint(folder)
        values.append(worker.compute_values(BATCH))
        assert worker.critic.updates == 3
    torch.testing.assert_close(*values)


def run_ppo(out):
    """Steps of PPO with transformers' rollout, --offload, a KL penalty, and on one rank a reward model."""
    import ppo_loop

    flags = "--offload --kl-coef 0.01 --steps 2 --train-batch-size 8 --rollout-n 2 --supervised-steps 2"
    flags += f" --eval-every 0 --critic.ppo-mini-batch-size 8 --out-dir {out / 'ppo'}"
    if common.WORLD_SIZE == 1:
        flags += f" --reward-model {out / 'fsdp' / 'hf'}"
    prompts = ppo_loop.addition_prompts
    ppo_loop.addition_prompts = lambda n, *args, **options: prompts(n // 64, *args, **options)
    ppo_loop.main(ppo_loop.parse(flags.split()))


def main(out, *names):
    """Everything on this many ranks, or some of it; each part leaves a file of its name when it is done."""
    common.write_report = lambda *_: None  # takes a second of matplotlib
    parts = {name: (lambda name=name, x=x: layout(name, x)) for name, x in LAYOUTS[common.WORLD_SIZE].items()}
    for part in PARTS[common.WORLD_SIZE]:
        parts[part.__name__] = lambda part=part: part(out)
    for name, part in parts.items():
        if names and name not in names:
            continue
        gc.collect()
        result = part()
        dist.barrier()
        if common.RANK == 0:
            torch.save(result, out / name)


PARTS = {1: (run_fsdp, resume_in_megatron, run_ppo), 2: (run_ppo,)}


def of_device(ranks, name):
    """What a part left, once all of this number of ranks has ended."""
    job, out = scenarios(ranks, "test_device.py")
    process = ended(job)
    assert (out / name).exists(), process.stdout[-3000:] + process.stderr[-6000:]
    return torch.load(out / name)


@pytest.fixture(scope="module")
def host():
    """Model -> what FSDP on the host learns."""
    return {name: learned(made("", {"model": name})) for name in ("tiny-qwen2", "tiny-qwen3-moe", DEEPSEEK)}


@pytest.mark.parametrize("ranks, name", [(n, name) for n, names in LAYOUTS.items() for name in names])
def test_a_layout_learns_what_the_host_learns(ranks, name, host):
    """On every layout of both critics, with the model away between phases."""
    fields = LAYOUTS[ranks][name]
    expected, ours = host[fields.get("model", "tiny-qwen2")], of_device(ranks, name)
    exact = "param_dtype" in fields
    for x, y, most in zip(
        ours["values"], expected["values"], (2e-5, 1e-3) if exact else (0.1, 0.5), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=most)
    for key in ("critic/vf_loss", "critic/grad_norm"):
        assert ours["metrics"][key] == pytest.approx(expected["metrics"][key], rel=1e-4 if exact else 0.1)


@pytest.mark.parametrize("ranks, name", [(n, part.__name__) for n, parts in PARTS.items() for part in parts])
def test_a_run_on_the_device(ranks, name):
    """Whole runs of the scripts, see the function of this name."""
    of_device(ranks, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
