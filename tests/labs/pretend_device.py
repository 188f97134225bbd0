"""A CUDA device made of host memory: after install(), torch.zeros(3, device="cuda") works on a CPU
build.

A device tensor is a plain torch.Tensor whose storage says cuda:0 and whose bytes are in host
memory. As there is no CUDA kernel for it, torch calls `kernel`, below autograd like a real one. It
refuses what a device refuses, computes on the CPU and turns the result into a device tensor. What a
script sees:

- To mix device tensors with host tensors or a host generator is an error, and so is to use memory
  that was freed. Memory that has not been written yet is NaN.
- A non-blocking copy to pinned memory arrives when the host waits; until then the memory is NaN.
- WAITS counts where the host waits for the device: (what, line of a script) -> times.

A process has one device with one stream; collectives use gloo. It shows nothing about speed, the
order of several streams, real kernels, or NCCL. Indices into tables of C++ methods are those of
torch 2.13. On a real GPU install() pretends nothing; the same names then report what happens on
that GPU."""

import collections
import contextlib
import ctypes
import linecache
import mmap
import os
import platform
import sys
import threading
import types
import warnings
import weakref

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves, tree_map

REAL = torch.cuda.is_available()
HERE = (torch.__version__[:5], sys.platform, platform.machine())
# a CUDA build has kernels of its own, which would be called
RUNS_HERE = HERE == ("2.13.", "linux", "x86_64") and not torch.backends.cuda.is_built()
REASON = "the pretended device knows the inside of torch 2.13's CPU build on Linux, x86-64"
HOST = torch.device("cpu")
MEMORY = 2**28  # bytes of the device
RANDOM = torch.Generator()  # of the device
WAITS = collections.Counter()
used = {"now": 0, "peak": 0}  # bytes in use on the device
late = []  # copies to pinned memory that have not arrived: (target, future content)
pinned = set()  # addresses of pinned memory
blocks = collections.Counter()  # of pinned memory that was freed, which stays: bytes -> how many
pins = {"num_host_alloc": 0, "allocated_bytes.current": 0}  # blocks made so far
THREADS = set()  # threads that have chosen their device; each begins with the first one
freed = set()  # device storages that were resized to 0
works = []  # sends and receives in flight, and their tensors
kept = []  # keeps alive registrations, and objects that C++ points to
nbytes, resize = torch.UntypedStorage.nbytes, torch.UntypedStorage.resize_
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def use(size):
    used["now"] += size
    used["peak"] = max(used.values())


def allocated(*_):
    """Bytes of the device that tensors use, without those of finished sends."""
    if REAL:
        return torch.cuda.memory_allocated()
    works[:] = [work for work in works if not work[0].is_completed()]
    return used["now"]


def address(x):
    return x.untyped_storage().data_ptr()


def to_device(host):
    """A device tensor on the memory of a host tensor."""
    size = nbytes(host.untyped_storage())
    use(size)
    capsule = torch.utils.dlpack.to_dlpack(host)
    ctypes.c_int64.from_address(pointer(capsule, b"dltensor") + 8).value = 2  # CUDA, index 0
    x = torch._C._from_dlpack(capsule)
    it = x.untyped_storage()._cdata
    freed.discard(it)
    # the host tensor lives as long as the storage made here, which may be empty by then
    weakref.finalize(host, lambda: use(0 if it in freed else -size))
    return x


def to_host(x):
    """A host tensor on the memory of a device tensor."""
    storage = x.untyped_storage()
    if storage._cdata in freed and x.numel():
        raise RuntimeError(f"the memory of {tuple(x.shape)} {x.dtype} was freed")
    make = torch._C._construct_storage_from_data_pointer
    memory = make(storage.data_ptr(), HOST, nbytes(storage))
    return torch.empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.shape, x.stride())


def view(x, like):
    """A view of x's storage with the dtype, shape, strides and offset of a host tensor."""
    out = x.detach()
    if x.dtype != like.dtype:
        whole = out.as_strided_((nbytes(x.untyped_storage()) // x.itemsize,), (1,), 0)
        out = whole.view(like.dtype)
    return out.as_strided_(like.shape, like.stride(), like.storage_offset())


def unwritten(x):
    """Fills x with the content of unwritten memory: NaN, or 2**29 in integers."""
    if x.is_floating_point():
        return x.fill_(torch.nan)
    return x.fill_(2**29) if x.dtype in (torch.int32, torch.int64) else x


def wait(what):
    """Counts a wait of the host for the device; copies arrive."""
    frame = sys._getframe()
    while frame and (frame.f_code.co_filename == __file__ or "/lib/" in frame.f_code.co_filename):
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame else "backward"
    WAITS[what, line.strip()] += 1
    arrive()


def arrive(place=None):
    """Completes copies, or only those to this place in pinned memory, which the device is about to
    read."""
    for pair in [pair for pair in late if place in (None, address(pair[0]))]:
        late[:] = [other for other in late if other is not pair]
        pair[0].copy_(pair[1])


def pin(x):
    """Makes a tensor's memory pinned. Like torch, it rounds up to powers of two, and never gives
    back what is freed, but to the next that asks."""
    size = 1 << (nbytes(x.untyped_storage()) - 1).bit_length() if x.numel() else 0
    if blocks[size]:
        blocks[size] -= 1
    else:
        pins["num_host_alloc"] += 1
        pins["allocated_bytes.current"] += size

    def free(place):
        pinned.discard(place)
        blocks[size] += 1

    pinned.add(address(x))
    weakref.finalize(x, free, address(x))
    return x


def pinning(make):
    """A tensor factory of torch with a pin_memory argument."""
    return lambda *x, pin_memory=False, **y: pin(make(*x, **y)) if pin_memory else make(*x, **y)


# ---- Operations ----------------------------------------------------------------------------------

# operations whose result the host must know; with indices; that accept numbers (0-dim tensors) on
# the host
ASKS = "_local_scalar_dense nonzero masked_select equal _unique2 unique_dim unique_consecutive"
ASKS = ASKS.split()
INDEXES = "index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put".split()
NUMBERS = ("_foreach", "_fused", "index_put", "_index_put", "fill_", "masked_fill", "where")


def kernel(op, *args, **kwargs):
    """Runs any operation that is not written out below."""
    name = op._schema.name.removeprefix("aten::")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    indices = [x for x in args[1] if x is not None] if name in INDEXES and args[0].is_cuda else []
    numbers = torch.Tag.pointwise in op.tags or name.startswith(NUMBERS)
    for x in tensors:
        if not (x.is_cuda or any(x is i for i in indices) or (numbers and x.dim() == 0)):
            words = f"Expected all tensors to be on the same device, cuda:0, but {op} got"
            raise RuntimeError(f"{words} {tuple(x.shape)} {x.dtype} on the host")
    counted = name == "repeat_interleave" and kwargs.get("output_size") is None
    if name in ASKS or counted or any(x.dtype == torch.bool or not x.is_cuda for x in indices):
        wait(name)
    if kwargs.get("generator") not in (None, RANDOM):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    hosts = {id(x): to_host(x) for x in tensors if x.is_cuda}
    outs = [kwargs.get(a.name) for a in op._schema.arguments if a.is_out]
    # out= without a size yet
    grow = [x for x in tree_leaves(outs) if x is not None and not x.numel()]
    hosts |= {id(x): torch.empty(x.shape, dtype=x.dtype) for x in grow}
    on_host = lambda x: hosts.get(id(x), HOST if isinstance(x, torch.device) else x)
    given, named = tree_map(on_host, (args, kwargs))
    named.pop("pin_memory", None)
    named |= {a.name: RANDOM for a in op._schema.arguments if a.name == "generator"}
    kinds = zip(op._schema.arguments, args, strict=False)
    if any(str(a.type) == "Tensor" and isinstance(x, int | float) for a, x in kinds):
        op = op.overloadpacket  # it accepts numbers as tensors
    if name == "histc":  # CUDA has it for integers, too
        out = op(given[0].float(), *given[1:], **named).to(args[0].dtype)
    else:
        out = op(*given, **named)
    for x in grow:
        x.data = to_device(hosts[id(x)])
    same = {id(hosts[id(x)]): x for x in tensors if x.is_cuda}
    memory = {address(hosts[id(x)]): x for x in tensors if x.is_cuda and x.numel()}

    def back(y):
        if not isinstance(y, torch.Tensor) or id(y) in same:
            return same.get(id(y), y)
        if y.numel() and address(y) in memory:
            return view(memory[address(y)], y)
        return to_device(unwritten(y) if name.startswith(("empty", "new_empty")) else y)

    return tree_map(back, out)


def copy_(target, source, non_blocking=False):
    if target.is_cuda and source.is_cuda:
        to_host(target).copy_(to_host(source))
    elif target.is_cuda:
        if not non_blocking:
            wait("copy from the host")
        arrive(address(source))
        to_host(target).copy_(source)
    elif non_blocking and address(target) in pinned:
        late.append((target.detach(), to_host(source).to(target.dtype, copy=True)))
        unwritten(target.detach())
    else:
        wait("copy to the host")
        target.copy_(to_host(source))
    return target


def to_copy(
    x,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
    non_blocking=False,
    memory_format=None,
):
    device = torch.device(device or x.device)
    if device.type == "meta":
        return torch.empty_like(x, dtype=dtype, device=device)
    like = to_host(x) if x.is_cuda else x
    out = torch.empty_like(like, dtype=dtype, memory_format=memory_format or torch.preserve_format)
    out = to_device(out) if device.type == "cuda" else pin(out) if non_blocking else out
    return copy_(out, x, non_blocking)


def set_(x, source):
    x.data = view(source, to_host(source))
    return x


def storage_resize(storage, size):
    """Resizes to 0 and back, as FSDP does to free memory."""
    if not storage.is_cuda:
        return resize(storage, size)
    whole, it = nbytes(storage), storage._cdata
    assert size in (0, whole), f"a storage of {whole} bytes cannot become {size}"
    if whole and (it in freed) == (size > 0):
        use(whole if size else -whole)
        (freed.discard if size else freed.add)(it)
        ctypes.memset(storage.data_ptr(), 0xFF, whole)  # NaN
    return storage


def sdpa(q, k, v, mask=None, dropout=0.0, causal=False, *, scale=None, enable_gqa=False):
    # it adds the mask to the scores
    written_out = torch.ops.aten._scaled_dot_product_attention_math
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    return written_out(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)[0]


def flash(grad, q, k, v, cu_q, cu_k, longest_q, longest_k, causal, scale, left, right):
    """Attention of packed rows (T,H,D), aligned at the end -> [out, logsumexp], or the
    gradients."""
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert all(x.is_cuda and x.stride(-1) == 1 for x in (q, k, v, cu_q, cu_k))
    assert q.shape[-1] % 8 == 0
    assert isinstance(longest_q, int) and isinstance(longest_k, int) and (causal or right == 0)

    q, k, v, cu_q, cu_k = map(to_host, (q, k, v, cu_q, cu_k))
    assert (len(q), len(k)) == (cu_q[-1], cu_k[-1]) and cu_q.diff().max() <= longest_q

    def rows_of(cu):
        """(row, distance to its end) of each token."""
        place = torch.arange(cu[-1])
        row = torch.searchsorted(cu[1:], place, right=True)
        return row, cu[1:][row] - place

    (row_q, to_end_q), (row_k, to_end_k) = rows_of(cu_q), rows_of(cu_k)
    back = to_end_k - to_end_q[:, None]  # distance from a query back to a key
    seen = (row_q[:, None] == row_k) & (back >= 0) & ((back <= left) | (left is None or left < 0))
    groups = q.shape[1] // k.shape[1]
    q_, k_, v_ = (x.transpose(0, 1).float() for x in (q, k, v))
    k_, v_ = (x.repeat_interleave(groups, 0) for x in (k_, v_))
    scale = scale or q.shape[-1] ** -0.5
    scores = (q_ @ k_.mT * scale).masked_fill(~seen, -torch.inf)
    p = scores.softmax(-1)

    back_there = lambda x: to_device(x.transpose(0, 1).to(q.dtype).contiguous())
    if grad is None:
        return back_there(p @ v_), to_device(scores.logsumexp(-1))

    g = to_host(grad).transpose(0, 1).float()
    of_scores = p * (g @ v_.mT - (g * (p @ v_)).sum(-1, keepdim=True)) * scale
    of_heads = lambda x: x.unflatten(0, (-1, groups)).sum(1)
    return [*map(back_there, (of_scores @ k_, of_heads(of_scores.mT @ q_), of_heads(p.mT @ g)))]


def flash_forward(*args, scale=None, window_size_left=None, window_size_right=None, **_):
    *given, _dropout, causal, _mask = args
    out = flash(None, *given, causal, scale, window_size_left, window_size_right)
    seed, unused = (to_device(torch.zeros(2, dtype=torch.uint64)) for _ in range(2))
    return *out, seed, unused, to_device(torch.zeros(0))


def flash_backward(*args, scale=None, window_size_left=None, window_size_right=None):
    grad, q, k, v, _out, _sums, *sizes, _dropout, causal, _seed, _unused = args
    return tuple(flash(grad, q, k, v, *sizes, causal, scale, window_size_left, window_size_right))


def collective(op):
    """A collective by gloo on the same memory. A sender does not wait for the receiver."""

    def call(*args):
        allocated()
        hosts = {id(x): (to_host(x), x) for x in tree_leaves(args) if getattr(x, "is_cuda", False)}
        out = op(*tree_map(lambda x: hosts[id(x)][0] if id(x) in hosts else x, args))
        work = dist.Work.unbox(out[-1] if isinstance(out, tuple | list) else out)
        if op.name().startswith(("c10d::send", "c10d::recv")):
            works.append((work, hosts))
        else:
            work.wait()
        back = {id(host): x for host, x in hosts.values()}
        return tree_map(lambda y: back.get(id(y), y), out)

    return call


class Nccl(dist.ProcessGroupGloo):
    """The process groups' backend for the device."""

    Options = types.SimpleNamespace

    def __init__(self, store, rank, size, options):
        super().__init__(store, rank, size, timeout=options._timeout)


# ---- What torch believes -------------------------------------------------------------------------


class Stream:
    """The one stream, and its events."""

    device, device_type, device_index, stream_id, cuda_stream = torch.device("cuda", 0), 1, 0, 0, 0

    def __init__(self, *_, **__):
        pass

    def nothing(self, *_, **__):
        return self

    __enter__ = __exit__ = wait_stream = wait_event = record = wait = nothing
    record_event = lambda self, event=None: event or Stream()
    synchronize = lambda self: wait("synchronize")
    query = lambda self: arrive() or True
    is_capturing = lambda self: False


def answering(thing, answers):
    """Address of a copy of a C++ object's method table; some methods in it (by index) return a
    constant."""
    table = ctypes.c_void_p.from_address(thing).value
    table = (ctypes.c_void_p * 60)(*(ctypes.c_void_p * 60).from_address(table))
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    for method, x in answers.items():
        table[method] = ctypes.addressof(ctypes.c_char.from_buffer(code, code.tell()))
        # mov eax, x; xor edx, edx; ret
        code.write(b"\xb8" + x.to_bytes(4, "little") + b"\x31\xd2\xc3")
    kept.append([table, code])
    return ctypes.addressof(table)


def believe():
    """Tells torch's C++ that there is CUDA. A "device guard" knows the current device and stream (a
    CPU build has none for CUDA, so this changes a copy of Meta's), and "hooks" say what there
    is."""
    library = lambda name: ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", name))
    guards = (ctypes.c_void_p * 20).in_dll(
        library("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    ones, zeros = dict.fromkeys((0, 1, 2, *range(5, 10), 14, 15), 1), dict.fromkeys((11, 12, 13), 0)
    guard = (ctypes.c_void_p * 2)(answering(guards[14], ones | zeros))
    guards[1] = ctypes.addressof(guard)
    find = library("libtorch_cpu.so")["_ZN2at6detail12getCUDAHooksEv"]
    find.restype = ctypes.c_void_p
    hooks = find()
    table = answering(hooks, dict.fromkeys((2, 3, 4, 6, 16), 1) | {8: 0})
    ctypes.c_void_p.from_address(hooks).value = table
    kept.append(guard)


def warm_up():
    """Makes cuBLAS allocate its workspaces, which stay: one for each thread that computes products,
    those of the forward and of the backward."""
    x = torch.ones(64, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.nn.Linear(64, 64, device=x.device)(x).sum().backward()


def watch():
    """On a real GPU, counts waits like the pretended device, from torch's warnings about
    synchronization."""

    def warned(message, *rest, **more):
        if "synchronizing CUDA operation" in str(message):
            wait("synchronize")

    warnings.simplefilter("always")
    warnings.showwarning = warned
    warm_up()
    torch.cuda.set_sync_debug_mode("warn")
    choose = torch.cuda.set_device
    torch.cuda.set_device = lambda x: choose(x) or THREADS.add(threading.get_ident())


def install():
    """From now on this process has a CUDA device. Call it before anything reads LOCAL_RANK."""
    if REAL:
        return watch()
    os.environ["LOCAL_RANK"] = "0"
    believe()
    aten, _, c10d = libraries = [torch.library.Library(x, "IMPL") for x in ("aten", "_", "c10d")]
    kept.append(libraries)
    own = {"copy_": copy_, "_to_copy": to_copy, "scaled_dot_product_attention": sdpa}
    own |= {"_flash_attention_forward": flash_forward, "_flash_attention_backward": flash_backward}
    own["set_.source_Tensor"] = set_
    with warnings.catch_warnings(action="ignore"):  # warnings about replaced kernels
        libraries[1].fallback(kernel, "CUDA")
        for name, function in own.items():
            aten.impl(name, function, "CUDA")
        aten.impl("scaled_dot_product_attention", sdpa, "AutogradCUDA")
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("c10d::") and torch._C._dispatch_has_kernel_for_dispatch_key(
                name, "CUDA"
            ):
                op = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
                c10d.impl(name.removeprefix("c10d::"), collective(op), "CUDA", allow_override=True)
    distributed_c10d.is_nccl_available, distributed_c10d.ProcessGroupNCCL = (lambda: True), Nccl

    storage, tensor, cuda, stream = torch.UntypedStorage, torch.Tensor, torch.cuda, Stream()
    storage.nbytes = storage.size = lambda s: 0 if s.is_cuda and s._cdata in freed else nbytes(s)
    storage.resize_, tensor.record_stream = storage_resize, lambda *_: None
    tensor.pin_memory = lambda x, *_: x if x.is_pinned() else pin(x.detach().clone())
    tensor.is_pinned = lambda x, *_: address(x) in pinned
    torch.utils._device._device_constructors()  # `with device:` needs the original functions
    for name in ("empty", "empty_like", "zeros", "zeros_like"):
        setattr(torch, name, pinning(getattr(torch, name)))
    says = {  # what functions of torch.cuda and torch.accelerator return
        "is_available": True, "is_initialized": True, "_lazy_init": None, "init": None,
        "device_count": 1,
        "current_device": 0, "current_device_index": 0, "set_device_index": None,
        "current_accelerator": torch.device("cuda"), "device": contextlib.nullcontext(),
        "empty_cache": None,
        "current_stream": stream, "default_stream": stream, "set_stream": None,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False, "get_device_capability": (9, 0),
        "get_device_name": "H100",
    }  # fmt: skip
    answers = {name: lambda *_, x=x, **__: x for name, x in says.items()}
    answers |= {
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": lambda *_: used["peak"],
        "host_memory_stats": lambda: dict(pins),
        "mem_get_info": lambda *_: (MEMORY - allocated(), MEMORY),
        "reset_peak_memory_stats": lambda *_: used.update(peak=used["now"]),
        "get_rng_state": lambda *_, **__: RANDOM.get_state(),
        "set_rng_state": lambda x, *_, **__: RANDOM.set_state(x),
        "manual_seed": RANDOM.manual_seed,
        "manual_seed_all": RANDOM.manual_seed,
        "default_generators": (RANDOM,),
        "set_device": lambda _: THREADS.add(threading.get_ident()),
        "stream": lambda s: s or stream,
        "synchronize": stream.synchronize,
        "Stream": Stream,
        "Event": Stream,
    }
    for module in (cuda, cuda.memory, cuda.random, torch.accelerator, torch.accelerator.memory):
        for name, x in answers.items():
            if hasattr(module, name):
                setattr(module, name, x)
    torch._dynamo.config.disable = True  # there is no compiler for it
