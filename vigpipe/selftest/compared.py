"""What ways to compute are compared by, besides their time: peak memory and differences."""

import os
from contextlib import suppress

import torch

from vigpipe.launch.device import peak_bytes, synchronize


def begin_peak(device: torch.device) -> float:
    """Forget how much memory was used, and return the bytes that are in use now.

    Those of the tensors on a GPU, or those of this process in RAM.
    """
    synchronize(device)  # before its first use a GPU has no statistics to reset
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    _forget_peak()
    return float(_resident_bytes())


def end_peak(device: torch.device) -> float:
    """Return the most bytes that were in use since `begin_peak`."""
    return float(peak_bytes(device) if device.type == "cuda" else _resident_peak())


def _forget_peak() -> None:
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # resets the resident peak, see proc(5)


def _resident_bytes() -> int:
    return _status("VmRSS") or peak_bytes(torch.device("cpu"))


def _resident_peak() -> int:
    return _status("VmHWM") or peak_bytes(torch.device("cpu"))


def _status(name: str) -> int:
    if not os.path.exists("/proc/self/status"):
        return 0
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Compute the largest difference, divided by the largest expected number."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300))
