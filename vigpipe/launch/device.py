"""Choose between CPU and CUDA, and hide the difference: no other file asks for the device type."""

import contextlib
import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vigpipe.config.choices import Device, Dtype, Sync

POLL_SECONDS = 1e-4  # a rank that waits for its GPU asks it this often


def count_gpus(requested: Device, *, can_compute: bool = False) -> int:
    """Count the GPUs that this process sees; none if --device cpu leaves them alone.

    They are counted through NVML, which makes no CUDA context and so leaves forks of the process
    able to use CUDA. With `can_compute`, ranks ask CUDA, too.
    """
    if requested == "cpu" or (can_compute and not torch.cuda.is_available()):
        return 0
    return torch.cuda.device_count()


def gpu_uuid(index: int) -> str:
    """Return the name that no other GPU of any host has."""
    return str(torch.cuda.get_device_properties(index).uuid)


def take_device(gpu: int | None) -> torch.device:
    """Make a GPU, by its number among those seen, the one to compute on; None is the CPU."""
    if gpu is None:
        return torch.device("cpu")
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """Return the backend of the process group: what a tensor travels by, by the device it is on.

    Gloo also serves ranks on GPUs, for values of the host: a lost or silent peer ends its
    collectives with an exception, and nothing has to be copied to the GPU and back.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def weight_dtype(dtype: Dtype) -> torch.dtype:
    """Return the dtype of weights and boundaries; half precision is for matrix products only."""
    return torch.float64 if dtype == "float64" else torch.float32


def default_sync(
    device: torch.device,
    pipeline_size: int,
    num_ranks: int,
    is_graph: bool | None = False,
    num_shards: int = 1,
) -> Sync:
    """Return how gradients are added up over replicas where the user leaves it open.

    Sums in float64 cost a GPU a kernel for each parameter and micro-batch, and hide behind nothing.
    DDP's reductions hide behind the backward, but in a pipeline a stage's come before its last
    gradient leaves for the stage before it. A CUDA graph records neither, and a rank alone needs
    none. Ranks that share a batch exchange rows in the backward.
    """
    if device.type == "cpu":
        return "double"
    is_plain = pipeline_size == num_shards == 1 and num_ranks > 1
    return "ddp" if is_plain and not is_graph else "drain"


def allow_tf32(allowed: bool) -> None:
    """Let GPUs compute float32 matrix products and convolutions in TF32, or forbid it.

    By itself torch forbids it for products and allows it for convolutions. Its newer switches
    (`fp32_precision`) leave the older ones behind, which then raise for whoever reads them.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def repeat_convolutions() -> None:
    """Let cuDNN choose only convolutions whose results are the same in every run.

    Some of its gradients of weights are added up by whichever block comes first, as that of the
    stem's first convolution is on an H200. All else in a step has a fixed order.
    """
    torch.backends.cudnn.deterministic = True


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for the next ones (glibc only).

    By default the kernel gets large ones back, and has to clear them page by page when they are
    allocated again. That costs 4 to 7 % of a step of vig_study, more in some blocks.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # the parameters of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(mmap_max, 0)  # take large allocations from the heap, too
        mallopt(trim_threshold, -1)  # never return the end of the heap
        mallopt(top_pad, 1 << 26)  # grow the heap by this many bytes


def return_freed_memory() -> None:
    """Give what `keep_freed_memory` has kept back to the kernel, once (glibc only)."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device unless it is there; to a GPU without waiting for the copy."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def sender(device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """Return what copies tensors of the host to this device; None if it is the host itself."""
    return partial(send, device=device) if device.type == "cuda" else None


class SideStream:
    """Does work of a GPU beside what it computes; any other device does its work at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Hand out work to the side, and return its result to what is computed from now on."""
        if self._stream is None:
            return work()
        with torch.cuda.stream(self._stream):
            result = work()
        computing = torch.cuda.current_stream()
        computing.wait_stream(self._stream)
        result.record_stream(computing)  # or its memory could be used anew while it is read
        return result


def runs_ahead(device: torch.device) -> bool:
    """Whether this device does its work after the call that asks for it."""
    return device.type == "cuda"


def record_graph(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record what a function does as a CUDA graph, and do nothing; return its replay and result."""
    graph = torch.cuda.CUDAGraph()
    # Other threads read images and write checkpoints meanwhile, and may use the GPU.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()
    return graph.replay, result  # which each replay writes anew


class ToHost:
    """Numbers, (n,), on their way from a device to the host, which goes on meanwhile."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def has_come(self) -> bool:
        """Whether the numbers are there, which also means that the work before them is done."""
        return self._event is None or self._event.query()

    def read(self) -> list[float]:
        """Return the numbers, and wait for them if need be."""
        while not self.has_come():  # in Python, signals are seen, and the process is not busy
            time.sleep(POLL_SECONDS)
        return self._values.tolist()


def has_own_cores(device: torch.device) -> bool:
    """Whether nobody else computes on this device: a GPU is one rank's, a CPU serves all."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes this rank has used: on the GPU, or resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def hardware(device: torch.device) -> str:
    """Describe the device: the name of the GPU, or of the CPU with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        name = next((line.split(":", 1)[1].strip() for line in file if "model name" in line), "")
    return f"{name or 'CPU'}, {os.cpu_count()} cores"
