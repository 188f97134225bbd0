"""Power cuts, for the part `power` of faults.py. After each one, this must hold:

- A checkpoint or an export is complete or absent.
- It stays once `published` has returned, until the run itself removes it.
- With the newest checkpoint there is all that a resumed run does not make again: the rows of
  metrics.jsonl and TensorBoard's events up to its step, dumped rollouts, samples_first.json.

There are two ways, because one kernel on one machine does not show all that a disk may lose.

`cuts`: --out-dir is on ext4 in an image file on a loop device. At random moments all processes of a
run are stopped, and the file is copied: what the kernel has not written to the device is not in the
copy. The copy is mounted, so that its journal is replayed, and judged by the functions that
--resume auto uses. Some copies are given to --resume auto itself, are cut again meanwhile, and must
reach the end of an uncut run.

`orders`: strace records what runs write, rename, remove and flush. Of each moment many states are
built that POSIX allows when the power fails there. The model:

- File: of what was written since its last fsync, any writes may be missing. In their place are
  zeros, if a later write or the size is on the disk, and the last one may be cut short.
- Folder: of the names made, renamed and removed since its last fsync, any of these changes may be
  missing; those that are there happened in the program's order. A rename is one change, so a file
  never has both names or none.
- No file or folder waits for another one: a name may come before its file's content.

So a disk chooses among all subsets of what was not flushed, in each file and folder by itself. Real
journals keep more order than that. What fsync has returned for is there: a disk that lies about it
is not in this model. Each kind of fsync is then taken out of the recording, one kind at a time, as
if common.py did not call it, and some state must show what is lost without it."""

import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import rooms  # noqa: F401  # finds modules of the other rooms
import faults
import forked

EXPORTS = ("hf", "critic_hf")


@functools.cache
def why_not():
    """Why power cuts cannot be tried here, or "": all that they need is there."""
    if os.geteuid():
        return "only root may mount"
    for tool in ("unshare", "mount", "findmnt", "mkfs.ext4", "strace"):
        if not shutil.which(tool):
            return f"there is no {tool}"

    tries = "truncate -s 4M disk && mkfs.ext4 -q -F disk && mkdir at && mount -o loop disk at"
    tries += " && umount at && strace -o calls true"
    with tempfile.TemporaryDirectory() as here:
        command = ("unshare", "--mount", "sh", "-c", tries)
        tried = subprocess.run(command, cwd=here, text=True, capture_output=True)
    return tried.stderr.strip().replace("\n", "; ") if tried.returncode else ""


# ---- What must be there: the judge of both parts -------------------------------------------------


class Judge:
    """Compares folders after a power cut with the folder of a run without one, `truth`.

    It works in a process that has imported the scripts, with the functions of --resume auto."""

    def __init__(self, truth):
        import common

        self.common = common
        self.truth = truth
        self.rows = faults.rows_of(truth / "metrics.jsonl")
        self.board = faults.board_of(truth)
        self.state_of = functools.cache(
            lambda step: faults.state_of(faults.checkpoint(truth, step))
        )
        self.boards = {}  # content of the files -> what TensorBoard shows
        common.setup_distributed()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def wrong_in(self, out, owed):
        """-> (step of the newest checkpoint, words on what is lost or wrong). owed: the names of
        folders in out_dir that must be there."""
        step = self.newest(out)
        wrong = self.wrong_checkpoints(out, step, owed)
        wrong += self.wrong_exports(out, owed)
        wrong += self.wrong_logs(out, step)
        return step, wrong

    def is_complete(self, folder):
        """Whether a folder passes for complete."""
        try:
            self.common.verify(str(folder))
            return True
        except self.common.UserError:
            return False

    def newest(self, out):
        """The step that --resume auto continues from, or 0. The folder's lock must be free."""
        checkpoints = self.common.Checkpoints(str(out), resume="auto")
        checkpoints.lock.close()
        self.common.dist.destroy_process_group(checkpoints.group)
        return int(checkpoints.folder.rpartition("_")[2]) if checkpoints.folder else 0

    def wrong_checkpoints(self, out, newest, owed):
        """A step that is there must be complete, and what is owed must be there."""
        found = self.common.steps_in(f"{out}/checkpoints")
        complete = [step for step, path in found if self.is_complete(path)]
        wrong = []
        if newest != max(complete, default=0):
            wrong.append(f"step {newest} is taken, of {complete}")
        if len(complete) < len(found):
            wrong.append(f"of {found} only {complete} are complete")

        for step in complete:
            if faults.state_of(faults.checkpoint(out, step)) != self.state_of(step):
                wrong.append(f"step {step} passes for complete, and is not")

        for name in owed:
            if name.startswith("checkpoints/") and int(name.rpartition("_")[2]) not in complete:
                wrong.append(f"{name} is lost")
        return wrong

    def wrong_exports(self, out, owed):
        """The same for exports, which may have only their name between two renames, .was."""
        wrong = []
        for name in EXPORTS:
            there = [path for path in (out / name, out / f"{name}.was") if path.exists()]
            complete = [path for path in there if self.is_complete(path)]
            if name in owed and not complete:
                wrong.append(f"{name} is lost")
            if len(complete) < len(there):
                wrong.append(f"of {there} only {complete} are complete")
            for path in complete:
                if weights_in(path) != weights_in(self.truth / name):
                    wrong.append(f"{path.name} passes for complete, and is not")
        return wrong

    def wrong_logs(self, out, step):
        """What a run that continues after this step would not make again."""
        wrong = []

        # the rows that the run keeps; of rows that it makes again some may be missing
        own = lambda rows: [
            {key: x for key, x in row.items() if not key.startswith(faults.PASSING)}
            for row in rows
            if self.common.happened(row, step)
        ]
        kept = own(self.common.read_lines(f"{out}/metrics.jsonl"))
        if kept != own(self.rows):
            wrong.append(f"metrics.jsonl up to step {step} has only {len(kept)} rows")

        # what ppo_loop.py writes
        for number in range(1, step + 1):
            name = f"rollouts/step_{number}.jsonl"
            if not same(out, self.truth, name):
                wrong.append(f"{name} is lost, before step {step}")

        for name in ("samples.json", "samples_first.json", "run.json"):
            with contextlib.suppress(FileNotFoundError):
                if not is_json((out / name).read_text()):
                    wrong.append(f"{name} is not whole")
        evaluated = any("eval/reward" in row for row in kept)
        if evaluated and not same(out, self.truth, "samples_first.json"):
            wrong.append("samples_first.json is lost")

        # TensorBoard
        board = self.board_of(out) if step else {}
        lost = [
            (tag, at)
            for (tag, at), number in self.board.items()
            if at < steps_kept(tag, step) and board.get((tag, at)) != number
        ]
        if lost:
            wrong.append(f"TensorBoard lacks {lost[0]} before step {step}")
        return wrong

    def board_of(self, out):
        """What TensorBoard shows, which is read once for equal files."""
        files = sorted((out / "tensorboard").glob("*"))
        key = tuple((path.name, path.read_bytes()) for path in files)
        if key not in self.boards:
            self.boards[key] = faults.board_of(out) if files else {}
        return self.boards[key]


def weights_in(folder):
    """name -> content of the files with an export's weights."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def is_json(text):
    try:
        json.loads(text)
        return True
    except ValueError:
        return False


def steps_kept(tag, step):
    """The first step whose event of this tag is made again after a step: an evaluation at this step
    is, an update is not."""
    return step if tag.startswith("eval/") else step + 1


def same(out, truth, name):
    """Whether a file is as in the other folder, or in neither."""
    ours, theirs = out / name, truth / name
    if not theirs.exists():
        return not ours.exists()
    return ours.exists() and ours.read_bytes() == theirs.read_bytes()


# ---- Cuts of ext4 --------------------------------------------------------------------------------

MIB = 96  # of an image
DISKS = ("defaults", "data=writeback,noauto_da_alloc", "commit=1", "nodelalloc")
SAVES = (  # flags, one after another with one of DISKS
    (),
    ("--async-save",),
    ("--keep", 2),
    ("--async-save", "--save-every", "None"),  # each replaces the one before
)


class Disk:
    """An ext4 in an image file, mounted while the context lasts."""

    def __init__(self, image, options):
        self.image = image
        self.options = options
        self.at = pathlib.Path(f"{image}.at")

    def __enter__(self):
        self.at.mkdir(exist_ok=True)
        how = f"loop,{self.options}"
        subprocess.run(("mount", "-t", "ext4", "-o", how, self.image, self.at), check=True)
        source = subprocess.run(
            ("findmnt", "-n", "-o", "SOURCE", self.at), check=True, capture_output=True, text=True
        )
        name = source.stdout.strip().rpartition("/")[2]
        self.counters = pathlib.Path(f"/sys/block/{name}/stat")
        return self.at

    def __exit__(self, *_):
        subprocess.run(("umount", self.at), check=True)  # and the loop device is free again

    def copy(self, to):
        """Copies the image at one moment: again, if the device was written to meanwhile."""
        written = None
        while written != self.counters.read_text():
            written = self.counters.read_text()
            subprocess.run(("cp", "--sparse=always", "--reflink=never", self.image, to), check=True)


def new_image(name):
    image = disks() / name
    with open(image, "wb") as file:
        file.truncate(MIB * 2**20)
    options = "lazy_itable_init=0,lazy_journal_init=0"  # no writes later, in the background
    subprocess.run(("mkfs.ext4", "-q", "-F", "-m", "0", "-E", options, image), check=True)
    return image


def disks():
    """The folder of images, in memory."""
    return faults.folder() / "disks"


@contextlib.contextmanager
def memory_for_disks():
    """Makes disks(), in mounts of this process alone: a killed process leaves none behind."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(("mount", "--make-rprivate", "/"), check=True)
    disks().mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "tmpfs", disks()), check=True)
    try:
        yield
    finally:
        subprocess.run(("umount", "--lazy", disks()), check=True)
        disks().rmdir()


def note_published(path, stop=False):
    """Before a script starts: from now on, rank 0 adds the name of each folder to a file once it is
    published. stop: waits for SIGCONT first."""
    import common

    publish = common.published

    @contextlib.contextmanager
    def publish_and_note(folder, *args, **more):
        with publish(folder, *args, **more) as tmp:
            yield tmp
        if common.RANK == 0:
            with open(path, "a") as file:
                file.write(f"{folder}\n")

    common.published = publish_and_note
    if stop:
        os.kill(os.getpid(), signal.SIGSTOP)


class Cut(typing.NamedTuple):
    """A copy of a disk at one moment of a run."""

    image: pathlib.Path
    options: str  # of its mount
    owed: list  # what must be in it
    saving: bool  # whether the run was in a save
    sizes: dict  # file -> its size, as the run saw it


def cut_run(script, disk, flags, number, rng):
    """Runs a script on a mounted disk to its end -> its Cuts: at most a number of them at random
    moments, every second one in a save, and one just after the end."""
    out = disk.at / "out"
    notes = pathlib.Path(tempfile.mktemp(prefix="published.", dir=faults.folder()))
    notes.write_text("".join(f"{path}\n" for path in names_in(out)))
    prepare = functools.partial(note_published, notes)
    job = faults.Job(script, out, "--resume", "auto", *flags, slow=0.02, prepare=prepare)
    saves = lambda: [*out.glob("checkpoints/step_*.tmp"), *out.glob("*hf.tmp")]
    cuts = []

    # a rank that prints to its file has a session, by which it is stopped
    try:
        said = [pathlib.Path(f"{job.said}.{rank}.stdout") for rank in range(len(job.pids))]
        begun = lambda: (out / ".lock").exists() and all(path.exists() for path in said)
        forked.until(lambda: job.poll() or begun(), "the run has its folder")

        # at random moments, or within the first tenth of a second of a save that is still going on
        while len(cuts) < number and not job.poll():
            in_a_save = len(cuts) % 2
            if in_a_save:
                forked.until(lambda: job.poll() or saves(), "a save")
            time.sleep(rng.uniform(0, (0.5, 0.1)[in_a_save]))
            if not job.poll():
                with standing(job):
                    if saves() or not in_a_save:
                        cuts.append(cut(disk, out, notes, bool(saves())))

        # and after the end
        job.succeeds()
        cuts.append(cut(disk, out, notes, False))
    finally:
        job.send(signal.SIGKILL)
        forked.until(job.poll, "the ranks end")
    return cuts


def names_in(out):
    """The checkpoints and exports in a folder."""
    steps = [faults.checkpoint(out, step) for step in faults.steps_of(out)]
    return [*steps, *(out / name for name in EXPORTS if (out / name).exists())]


@contextlib.contextmanager
def standing(job):
    """All processes of a job stand still in this context."""
    alive = [pid for rank, pid in enumerate(job.pids) if rank not in job.codes]

    def send(number):
        for pid in alive:
            os.killpg(pid, number)

    # a rank that starts a program waits in the kernel until that runs, which stands before it does;
    # then both go on for a moment, a longer one each time: on a busy machine it may take seconds
    for moment in (0.02, 0.1, 0.3, 1, 3, 10):
        send(signal.SIGSTOP)
        with contextlib.suppress(AssertionError):
            until_stopped(alive, 2)
            break
        send(signal.SIGCONT)
        time.sleep(moment)
    else:
        send(signal.SIGSTOP)
        until_stopped(alive)
    try:
        yield
    finally:
        send(signal.SIGCONT)


def until_stopped(pids, seconds=60):
    asked = lambda pid, name: pathlib.Path(f"/proc/{pid}/{name}").read_text()
    state = lambda pid: asked(pid, "stat").rpartition(") ")[2][0]
    try:
        forked.until(lambda: all(state(pid) in "TZ" for pid in pids), "all stand", seconds)
    except AssertionError as error:
        waits = {pid: (state(pid), asked(pid, "wchan")) for pid in pids}
        raise AssertionError(f"{error}; states, and what they wait for: {waits}") from None


def cut(disk, out, notes, saving):
    """The power fails now."""
    image = pathlib.Path(tempfile.mktemp(prefix="cut.", dir=disks()))
    disk.copy(image)
    there = lambda path: path.exists() or path.parent == out  # an export is there, or as .was
    published = [pathlib.Path(line) for line in notes.read_text().splitlines()]
    owed = sorted({str(path.relative_to(out)) for path in published if there(path)})
    return Cut(image, disk.options, owed, saving, sizes_in(out))


def sizes_in(out):
    return {
        str(path.relative_to(out)): path.stat().st_size
        for path in out.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def judge_cuts(script, cuts, to):
    """In a rank of its own: judges cuts -> writes a JSON file, for each [the step to continue from,
    words on what is wrong, whether the disk was behind what the run saw]."""
    judge = Judge(faults.golden(script))
    judged = []
    for one in cuts:
        with Disk(one.image, one.options) as at:
            behind = sizes_in(at / "out") != one.sizes
            judged.append((*judge.wrong_in(at / "out", one.owed), behind))
    to.write_text(json.dumps(judged))


def cut_to_the_end(script, disk, flags, number, rng):
    """A run on a disk, which must reach the end of an uncut run -> [(Cut, the step to continue
    from, whether the disk was behind)], of cuts that have lost nothing."""
    with disk as at:
        some = cut_run(script, disk, flags, number, rng)
        out = at / "out"
        absent = set(range(1, faults.STEPS)).difference(faults.steps_of(out))
        faults.assert_same_end(out, script, absent)
    disk.image.unlink()

    # a process of its own judges, because this one must not import the scripts
    to = faults.folder() / "judged.json"
    forked.run(1, judge_cuts, script, some, to)
    seen = []
    for one, (step, wrong, behind) in zip(some, json.loads(to.read_text()), strict=True):
        assert not wrong, (script, flags, one, wrong)
        seen.append((one, step, behind))
    return seen


def cuts(script, rng, kinds, first, second, again):
    """Cuts runs of a script, and runs that continue from a cut -> as cut_to_the_end, of all.

    kinds: how many pairs of SAVES and DISKS. first: cuts of a run. second: how many of them are
    given to --resume auto. again: cuts of each of these runs."""
    all_seen = []
    for i, (flags, options) in enumerate(list(zip(SAVES, DISKS, strict=True))[:kinds]):
        disk = Disk(new_image(f"{script}.{i}"), options)
        seen = cut_to_the_end(script, disk, flags, first, rng)
        all_seen += seen

        # a resumed run makes steps, if the cut came before the last one
        early = [one for one, step, _ in seen if step < faults.STEPS]
        for one in rng.sample(early, min(second, len(early))):
            all_seen += cut_to_the_end(script, Disk(one.image, options), flags, again, rng)
        for one, _, _ in seen:
            one.image.unlink(missing_ok=True)
    return all_seen


# ---- Orders that a disk may choose ---------------------------------------------------------------

SMALL = '{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}'
CALLS = (  # that change names, contents or what is on the disk
    "openat,creat,write,pwrite64,pwritev,pwritev2,lseek,ftruncate,truncate,fallocate,sendfile,"
    "copy_file_range,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,link,linkat,"
    "symlink,symlinkat,fsync,fdatasync,sync,syncfs"
)


def small_flags(script, *flags):
    """Three steps of a tiny model."""
    parts = ("--actor.", "--critic.") if script == "ppo_loop" else ("--",)
    tiny = [word for part in parts for word in (f"{part}override-config", SMALL)]
    return ("--steps", 3, "--eval-every", 1, *tiny, *flags)


def record(script, base):
    """Records two runs -> the text of strace. The second goes on after step 2, so it sets step 3
    aside, saves it again, in the background, and replaces the exports."""
    out = base / "new" / "out"
    base.mkdir()
    (base / "published").touch()
    prepare = functools.partial(note_published, base / "published", stop=True)
    log = faults.folder() / "strace"
    text = ""

    for more in ((), ("--resume", out / "checkpoints" / "step_2", "--async-save")):
        # a rank stops before the script begins, and goes on when strace sees it
        flags = small_flags(script, "--keep", 2, *more)
        job = faults.Job(script, out, *flags, prepare=prepare)
        until_stopped(job.pids)
        command = ["strace", "-f", "-y", "-z", "-xx", "-s", "100000000", "-e", f"trace={CALLS}"]
        command += ["-o", log, *(word for pid in job.pids for word in ("-p", str(pid)))]

        # both must end, whatever happens
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            for _ in job.pids:
                assert "attached" in (said := tracer.stderr.readline()), said
            job.send(signal.SIGCONT)
            job.succeeds()
        finally:
            job.send(signal.SIGKILL)
            tracer.communicate()
        text += log.read_text()
    return text


class Node:
    """A file or a folder of a recording: its changes, and when it was flushed."""

    def __init__(self, is_folder):
        self.is_folder = is_folder
        self.changes = []  # (moment, what, ...)
        self.flushed = []  # (moment, kind of fsync)


class Recording:
    """What runs did with the files in the folder `base`, from the text of strace. Moments number
    the calls that change something; published: (moment, path, Node) of each published folder."""

    def __init__(self, text, base):
        self.base = str(base)
        self.root = Node(is_folder=True)
        self.published = []
        self.kinds = {}  # of fsyncs -> what was flushed
        self.at = {}  # file -> where it is written next; None: at its end
        self.moment = 0
        self.minor = set()  # moments of writes that are much like others

        # a call that waits for something is told on two lines
        inside = "".join(f"\\x{byte:02x}" for byte in self.base.encode())
        begun = {}  # process -> a call that has not returned
        for line in text.splitlines():
            pid, _, call = line.partition(" ")
            call = call.strip()
            if call.endswith("<unfinished ...>"):
                begun[pid] = call.removesuffix("<unfinished ...>")
                continue
            if call.startswith("<... "):
                call = begun.pop(pid, "") + call.partition(" resumed>")[2]
            if inside in call:
                self.read(call)

    def read(self, line):
        """Notes one call, unless it has failed or is about another place."""
        call = re.match(r"(\w+)\((.*)\) += (\d+)(<.*>)?$", line)
        if not call:
            return
        name, words, result = call[1], call[2].split(", "), int(call[3])
        named = words[:1] if name == "write" else words
        paths = [plain(word) for word in named if "\\x" in word]
        if not any(path.startswith(self.base) for path in paths):
            return

        change = getattr(self, f"on_{name}", None)
        assert change, f"{name} is not in the model"
        before = self.moment
        change(words, paths, result)
        if "/tensorboard/" in paths[-1]:
            self.minor.update(range(before + 1, self.moment + 1))

    def find(self, path, moment=math.inf):
        """-> (the folder in which a name is, the name, what it names or None) after a moment."""
        names = lambda node: names_after([one for one in node.changes if one[0] <= moment])
        words = os.path.relpath(path, self.base).split("/")
        node = self.root
        for word in words[:-1]:
            node = names(node)[word]
        return node, words[-1], names(node).get(words[-1])

    def moments(self, removed=None):
        """The moments of which states are built: of TensorBoard's many writes only a few. With a
        kind of fsync removed, those at which a disk has less without it."""
        chosen = {at for at in range(self.moment + 1) if at not in self.minor or at % 10 == 0}
        if removed is None:
            return sorted(chosen)

        has_less = set()
        for node in self.kinds[removed]:
            later = [at for at, _ in node.flushed[1:]] + [self.moment + 1]
            for (at, kind), end in zip(node.flushed, later, strict=True):
                if kind == removed:
                    has_less.update(range(at, end))
        return sorted(chosen & has_less)

    def owed(self, moment):
        """The names of folders that are published at a moment, and that the run has not removed or
        renamed; an export stays, if only as .was."""
        owed = set()
        for at, path, node in self.published:
            name = os.path.relpath(path, f"{self.base}/new/out")
            if at <= moment and (name in EXPORTS or self.find(path, moment)[-1] is node):
                owed.add(name)
        return owed

    def note(self, node, *change):
        self.moment += 1
        node.changes.append((self.moment, *change))

    def on_openat(self, words, paths, result):
        if "O_CREAT" not in words[2] or paths[-1] == self.base:
            return
        folder, name, node = self.find(paths[-1])
        if node is None:
            node = Node(is_folder=False)
            self.note(folder, "add", name, node)
        if "O_TRUNC" in words[2]:
            self.note(node, "size", 0)
        self.at[node] = None if "O_APPEND" in words[2] else 0

    def on_write(self, words, paths, result):
        if paths[0] == f"{self.base}/published":
            path = bytes.fromhex(words[1].strip('"').replace("\\x", "")).decode().strip()
            self.moment += 1
            self.published.append((self.moment, path, self.find(path)[-1]))
            return
        node = self.find(paths[0])[-1]
        data = bytes.fromhex(words[1].strip('"').replace("\\x", ""))[:result]
        at = self.at[node]
        if at is None:
            at = len(content(node.changes))
        else:
            self.at[node] = at + len(data)
        self.note(node, "write", at, data)

    def on_lseek(self, words, paths, result):
        node = self.find(paths[0])[-1]
        if node and self.at.get(node) is not None:
            self.at[node] = result

    def on_ftruncate(self, words, paths, result):
        self.note(self.find(paths[0])[-1], "size", int(words[1]))

    def on_mkdir(self, words, paths, result):
        folder, name, _ = self.find(paths[-1])
        self.note(folder, "add", name, Node(is_folder=True))

    def on_unlink(self, words, paths, result):
        # unlinkat names the folder and the file
        path = paths[0] if len(paths) == 1 else os.path.join(*paths[-2:])
        folder, name, _ = self.find(path)
        self.note(folder, "drop", name)

    on_unlinkat = on_rmdir = on_unlink

    def on_rename(self, words, paths, result):
        # renameat names both folders, or the one where relative names begin
        old, new = [path for path in paths if path.startswith(self.base)][-2:]
        folder, name, node = self.find(old)
        to, new_name, _ = self.find(new)
        assert folder is to, (old, new)
        self.note(folder, "move", name, new_name, node)

    on_renameat = on_rename

    def on_fsync(self, words, paths, result):
        self.moment += 1
        node = self.root if paths[0] == self.base else self.find(paths[0])[-1]
        before = max((moment for moment, _ in node.flushed), default=0)
        new = [change for change in node.changes if change[0] > before]
        kind = kind_of(os.path.relpath(paths[0], self.base), node, new) if new else None
        node.flushed.append((self.moment, kind))
        if new:
            self.kinds.setdefault(kind, set()).add(node)


def plain(word):
    """The path in a word of strace: a string, or that of a descriptor."""
    return bytes.fromhex("".join(re.findall(r"\\x(..)", word))).decode(errors="replace")


def kind_of(path, node, new):
    """In words, what is flushed. new: changes since the last time."""
    name = path.removeprefix("new/out").strip("/")
    if re.match(r"(checkpoints/step_\d+|hf|critic_hf)\.tmp", name):
        return "names in a folder.tmp" if node.is_folder else "a file in a folder.tmp"
    if not node.is_folder:
        name = "a file.tmp" if name.endswith(".tmp") else name
        return "a file of TensorBoard" if name.startswith("tensorboard/") else name

    _, what, *words = new[-1]
    how = {"add": "a new name", "drop": "a removed name"}.get(what)
    if what == "move":
        how = f"a rename to *{pathlib.PurePath(words[1]).suffix}"
    above = {".": "the folder above all", "new": "the folder above out_dir", "new/out": "out_dir"}
    return f"{how} in {above.get(path, name)}"


def names_after(changes):
    """name -> Node, after changes of a folder."""
    names = {}
    for _, what, name, *more in changes:
        if what == "drop":
            names.pop(name, None)
        elif what == "add":
            names[name] = more[0]
        else:
            new, node = more
            there = names.get(new)
            if there and there.is_folder and there is not node:
                continue  # the folder that has the name has not gone
            names = {old: x for old, x in names.items() if x is not node and old != name}
            names[new] = node
    return names


def content(changes):
    """The bytes of a file after changes."""
    data = bytearray()
    for _, what, at, *more in changes:
        if what == "size":
            del data[at:]
            data += bytes(at - len(data))
        else:
            data += bytes(max(0, at - len(data)))
            data[at : at + len(more[0])] = more[0]
    return bytes(data)


# what a disk may have of the changes of a file or a folder that were not flushed
def nothing(rng, node, loose):
    return []


def everything(rng, node, loose):
    return loose


def the_first(rng, node, loose):
    """Some that came first; of a file, the last one may be cut short."""
    kept = loose[: rng.randint(0, len(loose))]
    if kept and not node.is_folder and kept[-1][1] == "write":
        moment, what, at, data = kept[-1]
        kept = [*kept[:-1], (moment, what, at, data[: rng.randint(0, len(data))])]
    return kept


def any_of_them(rng, node, loose):
    return [one for one in loose if rng.random() < 0.5]


def only_names(rng, node, loose):
    return loose if node.is_folder else []


def names_and_sizes(rng, node, loose):
    """All names, and files of the right length that hold zeros."""
    if node.is_folder:
        return loose
    sizes = []
    for moment, _, at, *data in loose:
        sizes.append((moment, "size", at + len(data[0]) if data else at))
    return sizes


def only_contents(rng, node, loose):
    return [] if node.is_folder else loose


def each_its_own(rng, node, loose):
    return rng.choice((nothing, everything, everything, the_first, any_of_them))(rng, node, loose)


SPARE = {  # kind of fsync -> scripts that lose nothing without it
    "a rename to *.json in out_dir": faults.SCRIPTS,  # another fsync of out_dir comes before a save
    "a rename to *.jsonl in out_dir": faults.SCRIPTS,
    "a new name in out_dir": ("ppo_loop",),
    "a rename to *.old1 in rollouts": ("ppo_loop",),  # these rows will be replaced
}
DISKS_MAY = (nothing, only_names, names_and_sizes, only_contents, the_first, any_of_them)


def tree_of(node, moment, choose, rng, removed=None, path=""):
    """path -> bytes of each file, None for each folder, in a state after a power cut at a moment.
    removed: a kind of fsync that does not happen."""
    flushed = max((at for at, kind in node.flushed if at <= moment and kind != removed), default=0)
    kept = [change for change in node.changes if change[0] <= flushed]
    loose = [change for change in node.changes if flushed < change[0] <= moment]
    kept += choose(rng, node, loose)
    if not node.is_folder:
        return {path: content(kept)}

    tree = {path: None}
    for name, child in names_after(kept).items():
        tree |= tree_of(child, moment, choose, rng, removed, f"{path}/{name}")
    return tree


def states(recording, rng, each, removed=None):
    """Yields (moment, tree, names of folders that must be in it), all different.

    each: how many are drawn at random for each moment, after those that DISKS_MAY lists."""
    seen = set()
    moments = recording.moments(removed)
    for moment in rng.sample(moments, len(moments)):
        owed = recording.owed(moment)
        for choose in (*DISKS_MAY, *([each_its_own] * each)):
            tree = tree_of(recording.root, moment, choose, rng, removed)
            key = hash((frozenset(tree.items()), frozenset(owed)))
            if key not in seen:
                seen.add(key)
                yield moment, tree, owed


def build(tree, folder):
    """Writes what a tree has in out_dir into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for path, data in tree.items():
        if path == "/new/out" or path.startswith("/new/out/"):
            place = folder / path.removeprefix("/new/out").strip("/")
            if data is None:
                place.mkdir()
            else:
                place.write_bytes(data)


def judge_orders(script, text, base, truth, each, to):
    """In a rank of its own: judges states of a recording, then of the same with each kind of fsync
    removed, until one shows a loss -> writes a JSON file."""
    judge = Judge(truth)
    recording = Recording(text, base)
    tree = tree_of(recording.root, recording.moment, everything, None)
    assert_recorded(tree, base)
    folder = disks() / "state"
    rng = random.Random(script)

    def wrong(each, removed=None):
        for moment, tree, owed in states(recording, rng, each, removed):
            build(tree, folder)
            yield moment, *judge.wrong_in(folder, owed)

    # as it was recorded
    every = list(wrong(each))
    found = {"states": len(every), "wrong": [one for one in every if one[-1]], "removed": {}}

    # the first state that shows what a kind of fsync is for
    for kind in sorted(recording.kinds):
        if script in SPARE.get(kind, ()):
            continue
        some = itertools.islice(wrong(20, kind), 1000)
        found["removed"][kind] = next((words[0] for _, _, words in some if words), None)
    to.write_text(json.dumps(found, indent=1))


def assert_recorded(tree, base):
    """Asserts that the recording made of all calls what the folder holds: nothing was written in
    another way, as through mmap."""
    ours = {path: data for path, data in tree.items() if path.startswith("/new/")}
    there = {}
    for path in (base / "new").rglob("*"):
        there[f"/{path.relative_to(base)}"] = None if path.is_dir() else path.read_bytes()
    assert ours == there, [path for path in ours | there if ours.get(path) != there.get(path)]


def orders(script, each):
    """Records a script and judges its states -> what judge_orders found."""
    truth = faults.folder() / f"{script}.small"
    faults.Job(script, truth, *small_flags(script)).succeeds()
    base = disks() / f"{script}.recorded"
    text = record(script, base)
    to = faults.folder() / "orders.json"
    forked.run(1, judge_orders, script, text, base, truth, each, to, timeout=900)
    found = json.loads(to.read_text())
    assert not found["wrong"], (script, found["wrong"][:10])
    unnoticed = [kind for kind, words in found["removed"].items() if words is None]
    assert not unnoticed, f"{script}: no state needs the fsync of {unnoticed}"
    return found


def try_all(script, short):
    """Cuts and orders of a script -> (how many copies and states were judged, words)."""
    if why := why_not():
        return 0, f"left out: {why}"
    rng = random.Random(script)
    faults.golden(script)

    # chance decides whether a cut comes while the disk is behind, so a few are tried again
    with memory_for_disks():
        seen = []
        for _ in range(5):
            seen += cuts(script, rng, *((1, 6, 1, 2) if short else (len(SAVES), 15, 2, 6)))
            saving = sum(one.saving for one, _, _ in seen)
            behind = sum(was_behind for _, _, was_behind in seen)
            if saving and behind:
                break
        assert saving and behind, "no cut was in a save, or with the disk behind: nothing is tested"
        found = orders(script, each=0 if short else 1)

    words = f"{len(seen)} cuts, {saving} in a save, {behind} with the disk behind the run;"
    words += f" {found['states']:,} orders, {len(found['removed'])} kinds of fsync, all needed"
    return len(seen) + found["states"], words


@forked.scenario(ranks=0)
def shortest(folder):
    """Fewer of each, on one script, for test_power.py."""
    if why_not():
        return
    try:
        forked.warm_up()
        print(*try_all("critic_fsdp", short=True))
    finally:
        shutil.rmtree(faults.folder(), ignore_errors=True)
