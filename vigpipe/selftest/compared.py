"""What ways to compute are compared by, besides their time: peak memory and differences."""

from contextlib import suppress

import torch

from vigpipe.launch.device import peak_bytes, synchronize


def begin_peak(device: torch.device) -> float:
    """Forget how much memory was used; return the bytes of tensors, or on a CPU of the process."""
    synchronize(device)  # A GPU has no statistics to reset before its first use.
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # This resets the resident peak, see proc(5).
    return float(_resident("VmRSS"))


def end_peak(device: torch.device) -> float:
    """Return the most bytes that were in use since `begin_peak`."""
    return float(peak_bytes(device) if device.type == "cuda" else _resident("VmHWM"))


def _resident(name: str) -> int:
    """Read the bytes of a line of /proc/self/status; without that file, return the peak so far."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
    return peak_bytes(torch.device("cpu"))


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Compute the largest difference, divided by the largest expected number."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300))
