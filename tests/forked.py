"""Ranks as forked children of one process that has imported the slow libraries: a launch costs a second, not twenty."""

import os
import socket
import sys
import time
import traceback

import megatron.core.models.gpt  # noqa: F401
import megatron.core.optimizer  # noqa: F401
import torch
import transformers  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401


def start(ranks, function, *args):
    """The pids of those processes, which the caller has to wait for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _child(rank, ranks, port, function, args)
        children.append(pid)
    return children


def run(ranks, function, *args, timeout=300):
    """Calls function(*args) on `ranks` gloo processes, which import common and the critics anew; ends all if one fails.

    A module that reads RANK when imported must not be imported here, so `function` imports what it needs.
    """
    children = start(ranks, function, *args)
    deadline, failed = time.monotonic() + timeout, None
    while children and failed is None:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.remove(pid)
                failed = f"exit status {status}" if status else failed
        if time.monotonic() > deadline:
            failed = f"took more than {timeout} s"
        time.sleep(0.02)
    for pid in children:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    if failed:
        raise SystemExit(f"{function.__name__} on {ranks} ranks: {failed}")


def _child(rank, ranks, port, function, args):
    code = 1
    try:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        torch.set_num_threads(1)
        function(*args)
        code = 0
    except BaseException:
        sys.stderr.write(f"rank {rank}:\n{traceback.format_exc()}")
        sys.stderr.flush()
    finally:
        sys.stdout.flush()
        os._exit(code)
