"""Runs the three scripts on two to four hosts, injects faults, asserts how each run ends, and
prints a table.

    python tests/labs/hosts.py                  all cases, a quarter of an hour on two cores
    python tests/labs/hosts.py NAME...          some of CASES, below
    python tests/labs/hosts.py --short          two of them on one script, as in test_hosts.py

A host is a process with namespaces of its own: network (an address, and a link to a switch), mounts
(a disk of its own, and a folder that all share), processes (so all of a host can be killed at once)
and its name. Each runs its own torchrun, with c10d rendezvous on node0. Ranks are forks, so that a
launch takes a second, see forked.py; only `start` starts torchrun as a program. Needs
root on Linux, and `ip` of iproute2; what else a case needs is named where it is left out.

The end of a run must equal that of a run of as many ranks on one host without faults, bit for bit:
see end_of in faults.py."""

import contextlib
import ctypes
import datetime
import fcntl
import functools
import heapq
import math
import os
import pathlib
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import types
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import faults
import forked
from faults import folder
from forked import until

STEPS = 5
PIPELINE = ("--tensor-model-parallel-size", 1, "--pipeline-model-parallel-size", 2)
SCRIPTS = {"critic_fsdp": (), "critic_megatron": PIPELINE, "ppo_loop": ()}
LOST = "error(?: on rank 1)?: another rank died or hangs"
TIMEOUT = 15  # seconds: --timeout-minutes of the runs that lose a host, or a link for a while
SHORT_TIMEOUT = 8  # of those whose link does not come back
FEW = ("--steps", 1, "--save-every", 1, "--eval-every", 0)
libc = ctypes.CDLL(None, use_errno=True)


# ---- Namespaces ----------------------------------------------------------------------------------

NEW_MOUNTS, NEW_NAME, NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x4000000, 0x20000000, 0x40000000
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl


def system(name, *args):
    """A system call by its name in libc. OSError: it fails."""
    if getattr(libc, name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def tool(*words, check=True):
    """Runs a command of the system quietly -> its exit status."""
    words = [str(word) for word in words]
    done = subprocess.run(words, text=True, capture_output=True)
    assert not (check and done.returncode), (words, done.stderr)
    return done.returncode


def enter_network(name):
    with open(f"/run/netns/{name}") as file:
        system("setns", file.fileno(), NEW_NETWORK)


@functools.cache
def why_not():
    """Why this machine cannot have hosts, or an empty text."""
    if sys.platform != "linux" or os.geteuid():
        return "needs root on Linux"
    if not shutil.which("ip"):
        return "needs ip of iproute2"

    # a container may forbid what root may do elsewhere
    name = f"hosts.{os.getpid()}.try"
    link = ("ip", "-n", name, "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
    mount = ("unshare", "--mount", "--uts", "--pid", "--fork", "mount", "-t", "tmpfs", "x", "/mnt")
    if tool("ip", "netns", "add", name, check=False):
        return "may not make a network namespace"
    try:
        return (
            "may make no links or mounts"
            if tool(*link, check=False) or tool(*mount, check=False)
            else ""
        )
    finally:
        tool("ip", "netns", "delete", name)


class Hosts:
    """Hosts node0, node1 ..., each with an address, joined by a switch. Use it as a context.

    far: seconds that a packet takes, and the part that is lost. None: links of the kernel."""

    def __init__(self, count, far=None):
        self.count = count
        self.far = far
        self.prefix = f"hosts.{os.getpid()}."
        self.pids = {}  # host -> the process that ends with it, and it with the host
        self.codes = {}  # host -> exit status, once its torchrun has ended
        self.said = {}  # host -> file of what its torchrun and its rank print
        self.relay = None

    def __enter__(self):
        try:
            self.connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        """Ends all processes and removes namespaces; their links and mounts go with them."""
        for host in range(self.count):
            self.kill(host)
        if self.relay:
            os.kill(self.relay, signal.SIGKILL)
            os.waitpid(self.relay, 0)
        for name in [*range(self.count), "switch"]:
            tool("ip", "netns", "delete", f"{self.prefix}{name}", check=False)

    def connect(self):
        """Makes the networks, and the links between them: veth and a bridge, or a relay."""
        switch = f"{self.prefix}switch"
        tool("ip", "netns", "add", switch)
        tool("ip", "-n", switch, "link", "add", "name", "bridge", "type", "bridge")
        tool("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in range(self.count):
            name = f"{self.prefix}{host}"
            tool("ip", "netns", "add", name)
            if self.far is None:
                ends = (
                    "name",
                    f"port{host}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    name,
                )
                tool("ip", "-n", switch, "link", "add", *ends)
                tool("ip", "-n", switch, "link", "set", f"port{host}", "master", "bridge", "up")

        if self.far is not None:
            self.relay = start_relay(
                [f"{self.prefix}{host}" for host in range(self.count)], *self.far
            )
        for host in range(self.count):
            name = f"{self.prefix}{host}"
            tool("ip", "-n", name, "address", "add", f"10.48.0.{host + 1}/24", "dev", "eth0")
            tool("ip", "-n", name, "link", "set", "eth0", "up")
            tool("ip", "-n", name, "link", "set", "lo", "up")

    def cut(self, host):
        """Pulls the plug of a host: its packets get lost, and no connection is told."""
        tool("ip", "-n", f"{self.prefix}switch", "link", "set", f"port{host}", "down")

    def join(self, host):
        tool("ip", "-n", f"{self.prefix}switch", "link", "set", f"port{host}", "up")

    def begin(self, host, function):
        """Starts a host: a process with this name, whose namespaces end with it, calls
        function()."""
        self.said[host] = f"{folder()}/said.{time.monotonic_ns()}.{host}"
        parent = os.fork()
        if parent:
            self.pids[host] = parent
            return

        # in a fork, because only children enter new namespaces of processes
        system("prctl", DIES_WITH_PARENT, signal.SIGKILL)
        forked.print_to(self.said[host])
        enter_network(f"{self.prefix}{host}")
        system("unshare", NEW_MOUNTS | NEW_NAME | NEW_PROCESSES)
        first = os.fork()
        if first:
            _, status = os.waitpid(first, 0)
            os._exit(abs(os.waitstatus_to_exitcode(status)))
        system("prctl", DIES_WITH_PARENT, signal.SIGKILL)
        forked._end_with(lambda: (self.furnish(host), function()))

    def furnish(self, host):
        """Its name, those of the others, its processes and its own disk, where it works."""
        socket.sethostname(f"node{host}")
        names = [f"10.48.0.{other + 1} node{other}\n" for other in range(self.count)]
        disk, shared = folder() / "disk", folder() / "shared"
        tool("mount", "--make-rprivate", "/")
        tool("mount", "-t", "proc", "proc", "/proc")
        tool("mount", "-t", "tmpfs", "tmpfs", disk)
        tool("mount", "--rbind", folder() / "store", shared)
        (disk / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
        tool("mount", "--bind", disk / "hosts", "/etc/hosts")
        os.chdir(disk)
        os.environ |= {"TMPDIR": str(disk), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(faults.ROOT)}

    def kill(self, host):
        """SIGKILL of all processes of a host."""
        if host in self.pids and host not in self.codes:
            os.kill(self.pids[host], signal.SIGKILL)
            os.waitpid(self.pids[host], 0)
        self.pids.pop(host, None)
        self.codes.pop(host, None)

    def poll(self):
        """Whether all hosts that were started, and not killed, have ended."""
        for host, pid in self.pids.items():
            if host not in self.codes and any(ended := os.waitpid(pid, os.WNOHANG)):
                self.codes[host] = os.waitstatus_to_exitcode(ended[1])
        return self.codes.keys() == self.pids.keys()

    def wait(self, timeout=240):
        """Exit statuses of the hosts that were not killed."""
        try:
            until(self.poll, f"the end; {self.codes}", timeout)
        except AssertionError:
            print(self.text())
            raise
        return list(self.codes.values())

    def text(self):
        """All that the hosts, as they were started last, have printed."""
        files = [f"{said}.{name}" for said in self.said.values() for name in ("stdout", "stderr")]
        return "".join(pathlib.Path(file).read_text() for file in files if os.path.exists(file))

    def succeed(self, timeout=240):
        """Asserts that all hosts end well -> what they printed."""
        codes = self.wait(timeout)
        assert not any(codes), (codes, re.findall(".*rror: .*", self.text()))
        return self.text()


def start_relay(names, delay, lost):
    """Gives each network a device eth0 whose packets a process carries to the others, `delay`
    seconds later; the part `lost` of them gets lost -> its pid. Each carries IPv4 packets."""
    begun, ready = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ready)
        assert os.read(begun, 1), "the relay has failed"
        os.close(begun)
        return pid

    # a device for each network, on the same machine
    system("prctl", DIES_WITH_PARENT, signal.SIGKILL)
    devices = []
    for name in names:
        enter_network(name)
        devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        # TUNSETIFF with IFF_TUN and IFF_NO_PI
        fcntl.ioctl(devices[-1], 0x400454CA, struct.pack("16sH22x", b"eth0", 0x1001))
    os.write(ready, b"1")

    rng, waiting = random.Random(0), []  # heap of (when it is due, its number, device, packet)
    number = 0
    while True:
        pause = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        for device in select.select(devices, [], [], pause)[0]:
            packet = os.read(device, 65536)
            # the last byte of the receiver's address
            if packet[0] >> 4 == 4 and 1 <= packet[19] <= len(devices) and rng.random() >= lost:
                number += 1
                due = time.monotonic() + delay
                heapq.heappush(waiting, (due, number, devices[packet[19] - 1], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the receiver's device is down
                os.write(device, packet)


# ---- torchrun on a host --------------------------------------------------------------------------


class Fork:
    """What torchrun has of a rank that it starts, a fork instead of a new program."""

    def __init__(self, arguments, environment, disturbance):
        self.pid = os.fork()
        self.returncode = None
        if self.pid:
            return

        # as a new program: its own session, no handlers of torchrun
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ |= environment
        forked._end_with(lambda: faults.run_script(arguments, **disturbance))

    def poll(self):
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=None):
        deadline = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return self.returncode


def torchrun(words, environment, before, disturbance):
    """torchrun in this process, which is a host's first one. before: called first."""
    import torch.distributed.run as launcher
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    before()
    os.environ |= environment
    if disturbance is None:  # the program itself, with ranks that are programs
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words])
    SubprocessHandler._popen = lambda _, args, env: Fork(list(args[2:]), env, disturbance)
    launcher.main(words)


def flags_of(script, out, *flags):
    """The command line of a run of five updates, with a checkpoint after each."""
    return faults.flags_of(script, *SCRIPTS[script], "--steps", STEPS, "--out-dir", out, *flags)


def timeout_of(script, seconds):
    return (
        "--critic.timeout-minutes" if script == "ppo_loop" else "--timeout-minutes",
        seconds / 60,
    )


def train(
    hosts,
    script,
    out,
    *flags,
    seconds=180,
    nodes=None,
    launcher=(),
    only=None,
    alone=False,
    static=False,
    environment=None,
    before=None,
    slow=0.05,
):
    """Starts a run, which resumes what there is, on all hosts.

    seconds: its time-out. nodes: torchrun's --nnodes. launcher: more of torchrun's flags. only:
    the hosts to start. alone: torchrun as a program. static: without c10d rendezvous. environment,
    before: host -> its variables, or what it does first. slow: seconds of delay before each save,
    flush and rename."""
    nodes = nodes or hosts.count
    for host in only or range(hosts.count):
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29500")
        if static:
            meet = ("--node-rank", host, "--master-addr", "node0", "--master-port", 29500)
        words = ["--nnodes", nodes, "--nproc-per-node", 1, *meet, *launcher]
        mine = (environment or {}).get(host, {})
        rest = flags_of(
            script,
            folder() / "shared" / out,
            "--resume",
            "auto",
            *timeout_of(script, seconds),
            *flags,
        )
        first = (before or {}).get(host, lambda: None)
        how = None if alone else {"slow": slow}
        command = [str(word) for word in (*words, *rest)]
        hosts.begin(host, functools.partial(torchrun, command, mine, first, how))


# ---- What a run leaves ---------------------------------------------------------------------------


def store(name):
    """Where the shared folder really is."""
    return folder() / "store" / name


@functools.cache
def golden(script, *flags):
    """The folder of a run of two ranks on one host, without faults."""
    out = folder() / f"{script}.golden.{len(flags)}"
    more = (*SCRIPTS[script], "--steps", STEPS, *flags)
    faults.Job(script, out, *more, ranks=2).succeeds()
    return out


def assert_same_end(out, script, *flags):
    """Asserts that a run has ended as one without faults, with nothing lost, twice or left over."""
    there = golden(script, *flags)
    ours, theirs = faults.end_of(out), faults.end_of(there)
    for part, expected in theirs.items():
        assert ours[part] == expected, (out, part, str(ours[part])[:2000], str(expected)[:2000])
    for find in (faults.updates_of, faults.steps_of):
        assert find(out) == find(there), (find(out), find(there))
    assert not (over := [path for path in out.rglob("*") if path.suffix in (".tmp", ".gone")]), over


def assert_same_schedule(out, script):
    """Asserts that a run on other numbers of ranks has made the same updates, up to rounding."""
    ours, theirs = faults.metrics_of(out), faults.metrics_of(golden(script))
    for row, expected in zip(ours, theirs, strict=True):
        assert row.keys() == expected.keys() and row["step"] == expected["step"], (row, expected)
        assert row.get("critic/lr") == expected.get("critic/lr"), (row, expected)
        for key, x in row.items():
            same = x == expected[key]  # None, where there is no number
            near = same or math.isclose(x, expected[key], rel_tol=1e-3, abs_tol=1e-4)
            assert near, (key, row, expected)


def goes_on(script, name):
    """Resumes a run on two hosts, and asserts that it reaches the same end."""
    at = faults.steps_of(store(name))
    with Hosts(2) as hosts:
        train(hosts, script, name, slow=0)
        said = hosts.succeed()
    assert not at or re.search(rf"resume .*/step_{at[0]}\b", said), said
    assert_same_end(store(name), script)


def some_updates(hosts, name, number=2):
    """Waits until a run has made some updates."""
    until(lambda: len(faults.updates_of(store(name))) >= number or hosts.poll(), name)
    assert not hosts.poll(), (hosts.codes, hosts.text()[-8000:])


def line_of(pattern, text):
    """The line of a text that holds the pattern: what the user sees."""
    found = re.search(rf"^.*(?:{pattern}).*$", text, flags=re.M)
    assert found, (pattern, text[-8000:])
    return found[0]


# ---- Cases: each function tries some on a script -> (how many, what happened) --------------------


def start(script):
    """Two hosts, each with torchrun itself, as in the reference."""
    name = f"{script}.start"
    with Hosts(2) as hosts:
        train(hosts, script, name, alone=True)
        said = hosts.succeed()
    assert line_of("^layout +ranks 2 = ", said)
    assert_same_end(store(name), script)
    return 1, "the same end as on one host"


def cut(script):
    """The link of a host is cut for five seconds."""
    name = f"{script}.cut"
    with Hosts(2) as hosts:
        train(hosts, script, name, seconds=TIMEOUT)
        some_updates(hosts, name)
        hosts.cut(1)
        time.sleep(5)
        assert not hosts.poll(), hosts.text()
        hosts.join(1)
        hosts.succeed()
    assert_same_end(store(name), script)
    return 1, "goes on; the same end"


def lost(script):
    """The link of a host stays cut. Its torchrun waits until the kernel gives up the connection to
    node0, which takes 16 minutes unless tcp_retries2 says less."""
    name = f"{script}.lost"
    sooner = functools.partial(pathlib.Path("/proc/sys/net/ipv4/tcp_retries2").write_text, "5")
    with Hosts(2) as hosts:
        train(hosts, script, name, seconds=SHORT_TIMEOUT, before={1: sooner})
        some_updates(hosts, name)
        hosts.cut(1)
        began = time.monotonic()
        until(lambda: len(re.findall(LOST, hosts.text())) == 2, name, SHORT_TIMEOUT + 15)
        took = time.monotonic() - began
        assert all(hosts.wait(60)), hosts.codes
        words = line_of(LOST, hosts.text())
    goes_on(script, name)
    return 1, f"all ranks end {took:.0f} s later: `{words}`; resumed, the same end"


def dies(script):
    """All processes of a host are killed: of one that has joined, and of the one where all meet."""
    found = []
    # without node0, torchrun ends its rank before the rank can say so
    cases = {1: "another rank died", 0: "The connection to the C10d store has failed"}
    for victim, what in cases.items():
        name = f"{script}.dies.{victim}"
        with Hosts(2) as hosts:
            train(hosts, script, name, seconds=TIMEOUT)
            some_updates(hosts, name)
            hosts.kill(victim)
            began = time.monotonic()
            assert all(hosts.wait(TIMEOUT + 30)), hosts.codes
            took = time.monotonic() - began
            assert line_of(what, hosts.text())
        goes_on(script, name)
        found.append(f"node{victim}: the other ends {took:.0f} s later, `{what}`")
    return 2, "; ".join(found) + "; resumed, the same end"


def returns(script):
    """A host is killed and started again, with --max-restarts."""
    name, again = f"{script}.returns", ("--max-restarts", 2)
    apart = dict.fromkeys(range(2), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    with Hosts(2) as hosts:
        train(hosts, script, name, seconds=TIMEOUT, launcher=again, environment=apart)
        some_updates(hosts, name)
        hosts.kill(1)
        began = time.monotonic()
        time.sleep(2)
        train(hosts, script, name, seconds=60, launcher=again, environment=apart, only=[1])
        said = hosts.succeed()
        took = time.monotonic() - began
    assert re.search("^resume .*step_", said, flags=re.M), said
    assert_same_end(store(name), script)
    return 1, f"goes on by itself, ends {took:.0f} s later; the same end"


def far(script):
    """Each packet takes 50 ms, and one of a hundred gets lost."""
    name = f"{script}.far"
    with Hosts(2, far=(0.05, 0.01)) as hosts:
        train(hosts, script, name, *FEW, slow=0)
        hosts.succeed(400)
    assert_same_end(store(name), script, *FEW)
    return 1, "slow; the same end"


def shift_clock(seconds):
    """Moves what Python reads as the time of day, in torchrun and its ranks. A namespace of time
    moves only the time since the start, and with Debian's libfaketime (0.9.10) sleep of Python 3.11
    fails, or lasts an hour."""
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous

    now, now_ns, delta = time.time, time.time_ns, datetime.timedelta(seconds=seconds)

    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + seconds * 10**9
    shifted = lambda zone=None: datetime.datetime.now(zone) + delta
    rendezvous.datetime = types.SimpleNamespace(now=shifted)


def clock(script):
    """The clock of a host is an hour fast, or slow. c10d rendezvous compares clocks: a host whose
    last sign of life seems old is dropped there, now and then after all have begun, so it is seen
    what they made of it. Static rendezvous compares none."""
    found = []
    for seconds, static in ((-3600, True), (-3600, False), (3600, False)):
        name = f"{script}.clock.{seconds}.{static}"
        wrong = {1: functools.partial(shift_clock, seconds)}
        with Hosts(2) as hosts:
            train(hosts, script, name, before=wrong, static=static)
            # agents that disagree may wait five minutes for each other at the end
            until(lambda hosts=hosts: hosts.poll() or "\nsaved   " in hosts.text(), name)
            time.sleep(1)
            said = hosts.text()

        ranks = re.findall("^layout +ranks (.) = ", said, flags=re.M)
        assert ranks == ["2"] or not static, said[-8000:]
        if ranks == ["2"]:
            found.append("ranks 2, the same end")
            assert_same_end(store(name), script)
        elif ranks == ["1"]:
            found.append("`layout ranks 1`, the same schedule")
            assert_same_schedule(store(name), script)
        else:
            found.append(f"`{line_of('error: ', said)}`")
            goes_on(script, name)
    return 3, "slow, static: {}; slow: {}; fast: {}".format(*found)


def at_host_1(*command):
    """What host 1 does at its start: a command of the shell."""
    return {1: lambda: subprocess.Popen(("sh", "-c", " ".join(map(str, command))))}


def late(script):
    """A host sees the shared folder five seconds late: at a start, and when a run is resumed."""
    name, shared = f"{script}.late", folder() / "shared"
    comes_back = at_host_1("sleep 5 && mount --bind", folder() / "store", shared)[1]

    def leaves():
        subprocess.run(("umount", shared), check=True)
        comes_back()

    for steps in (2, STEPS):
        with Hosts(2) as hosts:
            train(hosts, script, name, "--steps", steps, before={1: leaves})
            hosts.succeed()
    assert_same_end(store(name), script)
    return 2, "waits for it; the same end"


def read_only(script):
    """A host cannot write to the shared folder."""
    name, shared = f"{script}.read_only", folder() / "shared"
    with Hosts(2) as hosts:
        train(hosts, script, name, before=at_host_1("mount -o remount,ro,bind", shared))
        codes, said = hosts.wait(), hosts.text()
    words = line_of("error: --out-dir .*: host node1 cannot write there", said)
    assert all(codes) and not faults.steps_of(store(name)) and "step 1/" not in said, said
    goes_on(script, name)
    return 1, f"`{words.replace(str(folder()), '')}`; resumed, the same end"


RESERVED = 24  # CAP_SYS_RESOURCE, of capabilities(7): the right to what a disk keeps for root


def without_reserve():
    """From here on this process has only what the disk has for all."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: low words, then high ones
    system("capget", header, sets)
    for i in (0, 1):
        sets[i] &= ~(1 << RESERVED)
    system("capset", header, sets)


def full(script):
    """The shared disk is full for one host only: what is left is kept for the other."""
    name, image = f"{script}.full", folder() / "image"
    size = sum(path.stat().st_size for path in golden(script).rglob("*") if path.is_file())
    image.touch()
    os.truncate(image, 5 * size + 2**24)
    if not shutil.which("mkfs.ext4"):
        return 0, "left out: no mkfs.ext4 here"
    tool("mkfs.ext4", "-q", "-F", "-m", 40, image)
    (disk := store(name)).mkdir()
    # the reserve is for one user, and for those with a capability, which node1 gives up
    if tool("mount", "-o", "loop,resuid=1", image, disk, check=False):
        return 0, "left out: no loop devices here"

    try:
        room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        with open(disk / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, room - size // 2)
        with Hosts(2) as hosts:
            train(hosts, script, f"{name}/out", before={1: without_reserve})
            codes, said = hosts.wait(), hosts.text()
        words = line_of("error.*: the disk is full", said)
        at = faults.steps_of(store(f"{name}/out"))
        assert all(codes) and at and at[0] < STEPS, (at, said[-8000:])
        os.remove(disk / "ballast")
        goes_on(script, f"{name}/out")
    finally:
        tool("umount", disk)
    return 1, f"`{words}`, after step {at[0]}; resumed with more room, the same end"


def elastic(script):
    """Two of up to four hosts start, two more join, one is killed: torchrun's --nnodes 1:4."""
    name = f"{script}.elastic"
    flags = ("--max-restarts", 3, "--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1")
    apart = dict.fromkeys(range(4), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    how = {"nodes": "1:4", "launcher": flags, "environment": apart, "slow": 0.1, "seconds": 60}
    more = ()
    if script == "critic_megatron":
        more = ("--pipeline-model-parallel-size", 1)
    with Hosts(4) as hosts:
        train(hosts, script, name, *more, only=[0, 1], **how)
        some_updates(hosts, name, 1)
        train(hosts, script, name, *more, only=[2, 3], **how)
        until(lambda: "ranks 4 = " in hosts.text(), hosts)
        at = len(faults.updates_of(store(name)))
        some_updates(hosts, name, at + 1)
        hosts.kill(3)
        said = hosts.succeed()
    ranks = re.findall("^layout +ranks (.) = ", said, flags=re.M)
    assert ranks[0] == "2" and ranks[-1] == "3" and "4" in ranks, ranks
    assert_same_schedule(store(name), script)
    return 1, f"trains on {', '.join(ranks)} ranks, by itself; the same schedule and mini-batches"


CASES = (start, cut, lost, dies, returns, far, clock, late, read_only, full, elastic)
SHORT = (cut, read_only)


def main(names, short):
    forked.check_names(__doc__, names, [case.__name__ for case in CASES])
    if why_not():
        print(f"left out: {why_not()}")
        return
    warnings.filterwarnings("ignore")  # Megatron's, about packages that are not installed
    import torch.distributed.run  # noqa: F401

    forked.warm_up()
    for name in ("store", "shared", "disk"):
        (folder() / name).mkdir()
    total, began = 0, time.monotonic()

    try:
        for case in CASES:
            if names and case.__name__ not in names or short and case not in SHORT:
                continue
            for script in list(SCRIPTS)[: 1 if short else None]:
                since = time.monotonic()
                times, outcome = case(script)
                total += times
                seconds = f"{time.monotonic() - since:5.1f} s"
                print(
                    f"{case.__name__ + ', ' + script:30}{times:5}  {seconds}  {outcome}", flush=True
                )
    finally:
        shutil.rmtree(folder(), ignore_errors=True)
    print(f"{'all':30}{total:5}  {time.monotonic() - began:5.1f} s  nothing lost")


@forked.scenario(ranks=0)
def shortest(folder):
    """Two cases on one script, for test_hosts.py."""
    main(set(), short=True)


if __name__ == "__main__":
    main(set(sys.argv[1:]) - {"--short"}, "--short" in sys.argv)
