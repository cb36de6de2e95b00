"""The one file that asks "cuda or cpu?"."""

import contextlib
import ctypes
import os
import resource
import sys

import torch

from vigpipe.config.choices import Device, Dtype
from vigpipe.errors import InputError


def choose_device(requested: Device, local_rank: int, local_world_size: int) -> torch.device:
    """This rank's device: on CUDA each rank of a host has a GPU of its own.

    Raises:
        InputError: CUDA is asked for and absent, or a host has more ranks than GPUs (NCCL refuses
            two on one).
    """
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(
            "--device cuda: torch sees no GPU here; choose --device cpu, or a host that has one"
        )
    num_gpus = torch.cuda.device_count()
    if local_world_size > num_gpus:
        raise InputError(
            f"{local_world_size} ranks on this host, but {num_gpus} GPUs; start at most one rank "
            "a GPU (fewer --stages or --dp, more hosts), or choose --device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """The process group's back end."""
    return "nccl" if device.type == "cuda" else "gloo"


def weight_dtype(dtype: Dtype) -> torch.dtype:
    """What weights and boundaries are kept in; bfloat16 lowers only the matrix products."""
    return torch.float64 if dtype == "float64" else torch.float32


def keep_freed_memory() -> None:
    """Let the C library keep the memory that tensors free, for the next ones (glibc only).

    By default it hands large pieces back to the kernel, which clears them again page by page a
    moment later. That costs 4 to 7 % of a step of vig_study, and most of all the blocks whose
    features are freed first, so that equal blocks take unequal times.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # names of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(mmap_max, 0)  # large pieces from the heap, too
        mallopt(trim_threshold, -1)  # whose end is never given back
        mallopt(top_pad, 1 << 26)  # bytes by which it grows


def uses_pinned_memory(device: torch.device) -> bool:
    """Whether images must be copied to it; from pinned pages it fetches them by itself."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    """Most memory this rank has used: on the GPU, or resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def hardware(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next(
                (line.split(":", 1)[1].strip() for line in file if "model name" in line), ""
            )
    except OSError:
        pass
    return f"{name or 'CPU'}, {os.cpu_count()} cores"
