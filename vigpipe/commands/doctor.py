"""The command `vigpipe doctor`: show the hardware, and which version of each operator is used."""

import os
import platform

import torch

from vigpipe import ops
from vigpipe.inference.prepack import has_kernels
from vigpipe.launch.device import hardware
from vigpipe.launch.environment import threads_per_rank
from vigpipe.run.provenance import format_versions, provenance


def doctor() -> str:
    """Write the report; operators that are not compiled yet are compiled for it."""
    facts = provenance()
    lines = [
        f"versions: {format_versions(facts['versions'])}",
        f"CPU: {hardware(torch.device('cpu'))}, {platform.machine()}; a lone rank takes "
        f"{threads_per_rank(None, 1, os.environ)} thread(s)",
        f"matrix products in bfloat16: {_bfloat16()}",
        f"inference on a CPU: {_inference()}",
        *_operators("cpu"),
    ]
    if not torch.cuda.is_available():
        return "\n".join([*lines, "GPU: torch sees none"])
    for index in range(torch.cuda.device_count()):
        lines.append(f"GPU {index}: {hardware(torch.device('cuda', index))}")
        lines += _operators(f"cuda:{index}")
    return "\n".join(lines)


def _operators(device: str) -> list[str]:
    return [f"{device} {name}: {served}" for name, served in ops.versions(device).items()]


def _inference() -> str:
    """Say in which types `predict` computes with prepacked weights."""
    types = [torch.float32, torch.bfloat16]
    names = [str(dtype).removeprefix("torch.") for dtype in types if has_kernels(dtype)]
    if not names:
        return "weights as they are, since this torch has no oneDNN"
    return f"prepacked weights in {' and '.join(names)}"


def _bfloat16() -> str:
    """Say whether `--dtype bfloat16` can be faster on this processor."""
    has_bf16 = torch.cpu._is_avx512_bf16_supported()  # torch offers no public name
    has_amx = torch.cpu._is_amx_tile_supported()
    if has_amx or has_bf16:
        return "in hardware (AMX)" if has_amx else "in hardware (AVX-512 BF16)"
    return "emulated by this processor, several times slower than float32"
