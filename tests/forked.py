"""How a test starts ranks: as forks of one process that has imported the slow libraries, so that a
launch takes a second, not twenty.

    torchrun(2, script, *flags)     helpers.py: runs a script on two ranks
    run(sys.executable, script)     helpers.py: runs a script in one process, without torchrun
    begin(...), ended(...)          its halves: the script runs while the test does something else
    @scenario(ranks=2)              marks a function(folder) of tests/ to run on two ranks
    ran(function, 2)                helpers.py: waits for it -> the folder with its results

To add one: write `@scenario(ranks=2) def name(folder): ...` with asserts into a *_scenarios.py, and
test_scenarios.py waits for it. From a test of a test_*.py, wait for it with ran(name, 2).

The scenarios of a file share a folder and run in its order; neighbours on equal ranks share their
processes. A session of whole files begins those of its tests at once, next to the tests of one
process; with -k a scenario begins when a test asks for it, after those that it needs. faults.py,
which kills and stops ranks, forks them itself: start() and wait() below.
"""

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import pathlib
import runpy
import signal
import sys
import time
import traceback
import typing
import warnings
from concurrent.futures import ThreadPoolExecutor

import rooms  # noqa: F401  # finds modules of all rooms
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

# critic_megatron.py says why
os.environ["TORCHDYNAMO_DISABLE"] = "" if torch.cuda.is_available() else "1"
with warnings.catch_warnings(), contextlib.suppress(ImportError):  # there may be no megatron-core
    warnings.simplefilter("ignore")  # that Apex is not installed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
del os.environ["TORCHDYNAMO_DISABLE"]


class Scenario(typing.NamedTuple):
    name: str
    ranks: int
    function: typing.Callable
    args: tuple
    needs: tuple  # how the names of those begin that must run before it
    fresh: bool  # in processes of its own


HERE = os.path.dirname(os.path.abspath(__file__)) + "/"
STORES = {}  # pid -> the store where it finds the other ranks: as long as this process lives
NUMBERS = {}  # of this rank, as torchrun tells them
SCENARIOS = {}  # file of tests/ -> its scenarios
device = functools.cache(lambda pid: ProcessGroupGloo.create_default_device())


def new_group(self, store, rank, size, timeout, init=ProcessGroupGloo.__init__, **more):
    """All groups of a process share its device, because each has a thread that wakes up every 10
    ms. more: what torch 2.14 passes, and options hold."""
    options = ProcessGroupGloo._Options()
    options._devices, options._timeout = [device(os.getpid())], timeout
    init(self, store, rank, size, options)


ProcessGroupGloo.__init__ = new_group


def scenario(ranks, name=None, args=(), needs=(), fresh=False):
    """Marks a function(folder, *args) to run on this number of ranks, or on each of several. On 0
    ranks it runs in the process that forks, whose module must not import what reads RANK."""

    def mark(function):
        for n in ranks if isinstance(ranks, tuple) else (ranks,):
            named = name or f"{function.__name__} on {n}"
            of_file = SCENARIOS.setdefault(function.__module__, [])
            of_file.append(Scenario(named, n, function, args, needs, fresh))
        return function

    return mark


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


def _child(rank, ranks, port, function, args):
    """A rank: what torchrun would tell it, then its function."""

    def work():
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

    _end_with(work)


def _end_with(function, *args):
    """Ends this process after a function, with the status that Python would end with."""
    code = 1
    try:
        function(*args)
        code = 0
    except SystemExit as stop:
        known = stop.code is None or isinstance(stop.code, int)
        code = (stop.code or 0) if known else 1
        sys.stderr.write("" if known else f"{stop.code}\n")
    except BaseException:
        sys.stderr.write(f"rank {NUMBERS.get('RANK', '-')}:\n{traceback.format_exc()}")
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


def print_to(prefix):
    """From now on, what this process prints goes to two files."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{prefix}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)


def script(arguments, env, cwd, out, alone):
    """Runs a script in a child as python does, which prints to files that begin with `out`."""
    print_to(out)
    for name in NUMBERS if alone else ():
        del os.environ[name]

    os.environ |= env
    os.chdir(cwd)
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


def play(file, names, folder, out):
    """Runs scenarios of a file on this rank, one after another; each leaves a file NAME.ok."""
    print_to(out)
    os.chdir(folder)
    importlib.import_module(file)
    chosen = {one.name: one for one in SCENARIOS[file]}

    before = 0.0  # to the first one belongs what has been imported
    for name in names:
        began = time.monotonic()
        chosen[name].function(pathlib.Path(folder), *chosen[name].args)
        rank, spent = NUMBERS.get("RANK", "0"), sum(os.times()[:4])
        pathlib.Path(folder, f"{name}.{rank}.seconds").write_text(f"{spent - before}")
        before = spent
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if name != names[-1]:
            importlib.import_module("helpers").end_groups()
        if NUMBERS.get("RANK", "0") == "0":
            print(f"ok {name}: {time.monotonic() - began:.1f} s", flush=True)
            pathlib.Path(folder, f"{name}.ok").touch()


def play_here(file, names, folder, out):
    """Runs scenarios on 0 ranks in this process -> what failed, or None. Ranks forked later import
    the modules of tests/ anew, because these look at NUMBERS."""
    known = set(sys.modules)
    try:
        play(file, names, folder, out)
    except (Exception, SystemExit):
        traceback.print_exc()
        return f"{names} failed"
    finally:
        for name in set(sys.modules) - known:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(HERE):
                del sys.modules[name]


def play_all(job, out):
    """Runs the scenarios of a job, and those of a launch that come after one that has failed in
    another launch -> what failed, or None."""
    failed = []
    for ranks, names in job["launches"]:
        while names:
            what = (job["file"], names, job["folder"], out)
            if ranks:
                failed.append(wait(start(ranks, play, *what), job["timeout"]))
            else:
                failed.append(play_here(*what))
            passed = [os.path.exists(f"{job['folder']}/{name}.ok") for name in names]
            names = names[passed.index(False) + 1 :] if False in passed else []
    return next(filter(None, failed), None)


def serve():
    """Runs scripts and scenarios for another process, several at a time: JSON lines come in, each
    folder gets what was printed, and last a file `ended`. A job with `after` waits for that file of
    another."""
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
            if "launches" in job:
                failed = play_all(job, out)
            else:
                rest = (job["arguments"], job["env"], job["cwd"], out, job["alone"])
                failed = wait(start(job["ranks"], script, *rest), job["timeout"])
        finally:
            pathlib.Path(job["folder"], "seconds").write_text(f"{sum(os.times()[:4])}")
            with open(f"{out}.tmp", "w") as file:
                json.dump(failed, file)
            os.rename(f"{out}.tmp", os.path.join(job["folder"], "ended"))
            os._exit(0)

    # who has asked is gone: all that goes on ends, its group from helpers.py
    os.killpg(0, signal.SIGKILL)


def processes():
    """Yields (pid, session, words of its command line and environment) for each running process."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if words := (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                pid = int(path.name)
                yield pid, os.getsid(pid), words.decode(errors="replace").split("\0")


def until(happens, what, timeout=240):
    """Waits until happens() is true."""
    deadline = time.monotonic() + timeout
    while not happens():
        assert time.monotonic() < deadline, f"does not happen: {what}"
        time.sleep(0.005)


def check_names(said, names, known):
    """Ends a lab that was asked for --help, or for what it does not have. said: its docstring."""
    if names & {"-h", "--help"}:
        print(f"{said}\nIt has: {', '.join(known)}.")
        sys.exit()
    if unknown := names - {*known}:
        sys.exit(f"it has no {', '.join(sorted(unknown))}; it has: {', '.join(known)}")


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


def main(bytecode):
    """What the process of helpers.forks() does; bytecode: a folder for compiled modules."""
    warm_up()
    # each thread of ppo_loop.py starts a process, so have few of them
    init = ThreadPoolExecutor.__init__
    few = lambda self, max_workers=None, *x, **y: init(
        self, max_workers and min(max_workers, 3), *x, **y
    )
    ThreadPoolExecutor.__init__ = few
    sys.dont_write_bytecode = False  # or each child would compile common.py anew
    sys.pycache_prefix = bytecode
    serve()
