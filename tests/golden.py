"""Eight runs whose numbers must not change while the house gets smaller.

    git worktree add /tmp/before d5e540a
    python tests/golden.py /tmp/before before.json      # what the scripts there print and export
    python tests/golden.py . now.json before.json       # exit status 1 if a number has changed

It compares all numbers of metrics.jsonl but times, and SHA-256 of the exports."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROWS = str(pathlib.Path(__file__).parent / "rows.jsonl")
CHATS = [
    {"messages": [{"role": "user", "content": f"{a}+{b}"}], "response": str(a + b), "reward": 1.0}
    for a in range(4)
    for b in range(4)
]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}>"
SMALL = "--steps 2 --ppo-mini-batch-size 16 --train-batch-size 32".split()
FILE = [*SMALL, "--rollouts", ROWS]
PPO = "--steps 2 --train-batch-size 16 --critic.ppo-mini-batch-size 8 --supervised-steps 20".split()
RUNS = {  # name -> [(ranks, script, flags) of each start]
    "fsdp": [(1, "critic_fsdp.py", SMALL)],
    "ulysses": [
        (2, "critic_fsdp.py", [*FILE, "--ulysses-size", "2", "--lam", "0.9"]),
        (2, "critic_fsdp.py", [*FILE, *"--ulysses-size 2 --lam 0.9 --steps 4".split()]),
    ],
    "padded": [(1, "critic_fsdp.py", [*FILE, "--no-use-remove-padding"])],
    "lora": [(1, "critic_fsdp.py", [*FILE, *"--lora-rank 4 --lr 1e-2".split()])],
    "megatron": [
        (
            4,
            "critic_megatron.py",
            [*FILE, *"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()],
        )
    ],
    "ppo": [(2, "ppo_loop.py", PPO)],
    "ppo-megatron": [(1, "ppo_loop.py", [*PPO, "--critic", "megatron"])],
    "chats": [(1, "critic_fsdp.py", SMALL)],
}


def tokenizer_with_template(root, folder):
    """The toy's tokenizer, with a chat template."""
    sys.path.insert(0, root)
    import common

    tokenizer = common.char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def run(root, name, folder):
    """The numbers and the checksums of a run, as {name: text}."""
    out = f"{folder}/{name}"
    more = []
    if name == "chats":
        pathlib.Path(f"{folder}/chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
        tokenizer_with_template(root, f"{folder}/tokenizer")
        more = ["--rollouts", f"{folder}/chats.jsonl", "--tokenizer", f"{folder}/tokenizer"]

    for start, (ranks, script, flags) in enumerate(RUNS[name]):
        command = ["torchrun", "--nproc-per-node", str(ranks), f"{root}/{script}"]
        if ranks == 1:
            command = ["python", f"{root}/{script}"]
        command[0] = str(pathlib.Path(sys.executable).parent / command[0])
        resume = ["--resume", "auto"] if start else []
        command += [*flags, *more, *resume, "--out-dir", out]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)

    found = {}
    for line in pathlib.Path(out, "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key, x in row.items():
            if not key.startswith(("perf/", "time/")):
                found[f"{name} {row['step']} {key}"] = repr(x)
    for path in pathlib.Path(out).glob("*hf/*.safetensors"):
        key = f"{name} {path.parent.name}/{path.name}"
        found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


root, target, *before = sys.argv[1:]
found = {}
with tempfile.TemporaryDirectory() as folder:
    for name in RUNS:
        found |= run(os.path.realpath(root), name, folder)
        print(name, len(found), flush=True)
pathlib.Path(target).write_text(json.dumps(found, indent=1))
if before:
    then = json.loads(pathlib.Path(before[0]).read_text())
    off = [key for key in sorted(then | found) if then.get(key) != found.get(key)]
    print(f"{len(then)} numbers before, {len(off)} differ: {off[:8]}")
    sys.exit(bool(off))
