"""Ranks as forks of one process that has imported the slow libraries: a launch takes a second, not
twenty."""

import functools
import gc
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor

import pydantic.type_adapter
import pydantic.types  # noqa: F401
import torch
import torch.nn.attention.varlen  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
from torch.distributed import ProcessGroupGloo, TCPStore

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Apex is not installed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401

STORES = {}  # pid -> the store where it finds the other ranks: as long as this process lives
NUMBERS = {}  # of this rank, as torchrun tells them
device = functools.cache(lambda pid: ProcessGroupGloo.create_default_device())


def new_group(self, store, rank, size, timeout, init=ProcessGroupGloo.__init__):
    """All groups of a process share its device, because each has a thread that wakes up every 10
    ms."""
    options = ProcessGroupGloo._Options()
    options._devices, options._timeout = [device(os.getpid())], timeout
    init(self, store, rank, size, options)


if ProcessGroupGloo.__init__.__name__ != "new_group":  # this file may be imported twice
    ProcessGroupGloo.__init__ = new_group


def start(ranks, function, *args):
    """The pids of those processes, which the caller has to wait for."""
    # the system chooses a free port
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # or each child collects among a million objects that never go, and copies their pages
    gc.freeze()
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _child(rank, ranks, store.port, function, args)
        children.append(pid)
        STORES[pid] = store
    return children


def run(ranks, function, *args, timeout=300):
    """Calls function(*args) on `ranks` gloo processes; ends all if one fails. A module that reads
    RANK when imported must not be imported here, so `function` imports what it needs."""
    failed = wait(start(ranks, function, *args), timeout)
    if failed:
        raise SystemExit(f"{function.__name__} on {ranks} ranks: {failed}")


def wait(children, timeout):
    """Waits for processes, and ends all as soon as one fails -> what happened, or None."""
    deadline, failed = time.monotonic() + timeout, None
    while children and failed is None:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.remove(pid)
                failed = f"exit status {os.waitstatus_to_exitcode(status)}" if status else failed
        if time.monotonic() > deadline:
            failed = f"took more than {timeout} s"
        time.sleep(0.02)
    for pid in children:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return failed


def scenarios(launches, launch):
    """What a script of scenarios does with its command line, OUT_FOLDER [NAME...]: runs each of its
    (name, ranks, function, args) of that name or function, or all, as launch(name, function,
    folder, args), and on 0 ranks here, as function(folder). Ends with what failed."""
    warm_up()
    (folder, *names), failed = sys.argv[1:], []
    for name, ranks, function, args in launches:
        if names and not {name, function.__name__} & set(names):
            continue
        try:
            if ranks:
                run(ranks, launch, name, function, folder, args)
            else:
                function(folder)
        except (SystemExit, AssertionError) as error:
            failed.append(f"{name}: {error}")
    sys.exit("\n".join(failed) or None)


def _child(rank, ranks, port, function, args):
    code = 1
    try:
        NUMBERS.update({
            "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            # the store is there already
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        })  # fmt: skip
        os.environ |= NUMBERS
        torch.set_num_threads(1)
        function(*args)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        sys.stderr.write("" if isinstance(stop.code, int | None) else f"{stop.code}\n")
    except BaseException:
        sys.stderr.write(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


def script(arguments, env, cwd, out, alone):
    """Runs a script in a child as python does; out: where what it prints goes, .stdout and
    .stderr."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{out}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    for name in NUMBERS if alone else ():
        del os.environ[name]
    os.environ |= env
    os.chdir(cwd)
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


def serve():
    """Runs scripts for another process, several at a time: JSON lines come in, each folder gets
    what was printed, and last a file `ended`. A job with `after` waits for that file of another."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        job, failed = json.loads(line), "exit status 1"
        out = os.path.join(job["folder"], "out")
        try:
            while job["after"] and not os.path.exists(os.path.join(job["after"], "ended")):
                time.sleep(0.1)
            rest = (job["arguments"], job["env"], job["cwd"], out, job["alone"])
            failed = wait(start(job["ranks"], script, *rest), job["timeout"])
        finally:
            with open(f"{out}.tmp", "w") as file:
                json.dump(failed, file)
            os.rename(f"{out}.tmp", os.path.join(job["folder"], "ended"))
            os._exit(0)
    # who has asked is gone: all that goes on ends, its group from helpers.py
    os.killpg(0, signal.SIGKILL)


def warm_up():
    """What the first of its kind takes a second or two for."""
    import pytest  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    import tyro
    from matplotlib.figure import Figure
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    figure = Figure()
    panel = figure.subplots()
    panel.plot([1, 2], label="a")
    panel.legend()
    figure.savefig(io.StringIO(), format="svg")
    get_checkpoint_conversion_mapping("qwen2")  # hundreds of regular expressions
    tyro.cli(str, args=["a"])


if __name__ == "__main__":
    warm_up()
    # each thread of ppo_loop.py starts a process, so have few of them
    init = ThreadPoolExecutor.__init__
    few = lambda self, max_workers=None, *x, **y: init(
        self, max_workers and min(max_workers, 3), *x, **y
    )
    ThreadPoolExecutor.__init__ = few
    sys.dont_write_bytecode = False  # or each child would compile common.py anew
    sys.pycache_prefix = sys.argv[1]
    serve()
