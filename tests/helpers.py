"""What the tests share: where things are, random batches, and torchrun."""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"  # development data beside the repository, see its README
sys.path.insert(0, str(ROOT))

import common  # noqa: E402
import critic_fsdp  # noqa: E402

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs the development data in {SHARED}")


def run(*command, timeout=600, cwd=None, **env):
    """Runs a command -> CompletedProcess with its output as text. A Python script starts as a fork, see forked.py."""
    command = [str(c) for c in command]
    if command[0] == sys.executable and command[1].endswith(".py"):
        return launch(1, command[1:], timeout, cwd, env, alone=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, text=True, capture_output=True)


def torchrun(ranks, *command, really=False, timeout=600, cwd=None, **env):
    """Runs a script on `ranks` gloo processes: forks, or with `really` what torchrun starts."""
    if really:
        launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
        return run(*launcher, *command, timeout=timeout, cwd=cwd, **env)
    return launch(ranks, [str(c) for c in command], timeout, cwd, env)


@functools.cache
def forks():
    """The process that has imported the slow libraries, and forks."""
    server = (sys.executable, ROOT / "tests" / "forked.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(server, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(process.kill)
    return process


def launch(ranks, arguments, timeout, cwd, env, alone=False):
    """A script and its arguments on `ranks` forks -> CompletedProcess."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"ranks": ranks, "arguments": arguments, "timeout": timeout, "cwd": str(cwd or os.getcwd()), "env": env}
        out = pathlib.Path(folder, "out")
        forks().stdin.write(json.dumps({**job, "out": str(out), "alone": alone}) + "\n")
        forks().stdin.flush()
        failed = json.loads(forks().stdout.readline())
        said = [out.with_suffix(suffix).read_text() for suffix in (".stdout", ".stderr")]
    code = 0 if failed is None else int(failed.split()[-1]) if failed.startswith("exit status") else -9
    return subprocess.CompletedProcess(arguments, code, *said)


def succeeded(process):
    """The standard output of a process that must have ended well."""
    assert process.returncode == 0, f"exit code {process.returncode}\n{process.stdout}\n{process.stderr}"
    return process.stdout


def random_batch(n, seed=0, vocab_size=97, longest=40, idle=True):
    """n ragged multi-turn rows: prompts of 1 to 8 tokens, masks with holes; idle: some rows without any action."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=g))
    rows = []
    for i in range(n):
        prompt, response = draw(1, 9), draw(1, longest - 8)
        mask = torch.rand(response, generator=g) < 0.8
        mask[-1] = True
        mask = torch.cat([torch.zeros(prompt), mask * (not idle or i % 5 > 0)]).bool()
        noise = lambda mask=mask: torch.randn(len(mask), generator=g) * mask
        rows.append(
            common.Batch(
                input_ids=torch.randint(0, vocab_size, (prompt + response,), generator=g),
                cu_seqlens=torch.tensor([0, prompt + response], dtype=torch.int32),
                response_mask=mask,
                row_id=torch.tensor([i]),
                truncated=torch.rand(1, generator=g) < 0.3,
                token_level_rewards=noise(),
                values=noise(),
                returns=noise(),
            )
        )
    return common.concat(rows)


def rows_of(batch):
    """(start, end) of each sequence."""
    cu = batch.cu_seqlens.tolist()
    return list(zip(cu, cu[1:], strict=False))


@contextlib.contextmanager
def captured_gradients(critic):
    """Inside, the critic notes the whole gradient of every step before it is clipped, in the list this yields."""
    seen, model = [], critic.model
    owner = model if critic.config.strategy == "fsdp1" else torch.nn.utils  # whose clip_grad_norm_ the critic calls
    clip = owner.clip_grad_norm_

    def note(*args, **kwargs):
        whole = contextlib.nullcontext()
        if critic.config.strategy == "fsdp1":
            whole = critic_fsdp.FSDP1.summon_full_params(model, with_grads=True)
        with whole:
            named = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in model.named_parameters()]
            seen.append({n: critic_fsdp.full_tensor(p.grad).clone() for n, p in named if p.requires_grad})
        return clip(*args, **kwargs)

    owner.clip_grad_norm_ = note
    try:
        yield seen
    finally:
        owner.clip_grad_norm_ = clip


def full_weights(critic):
    """name -> whole tensor of every weight of the value model (a collective)."""
    state = critic_fsdp.get_model_state_dict(critic.model)
    return {n: critic_fsdp.full_tensor(x).detach().clone() for n, x in state.items()}
