"""Compile the Triton kernels for kinds of GPU, without one: `python -m docs.kernels`.

It compiles every specialisation that the models for ImageNet launch, and writes the table of
registers and shared memory into docs/operators.md.
"""

import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from math import prod
from pathlib import Path
from typing import Any

import torch
import triton
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vigpipe.model.blocks import make_block_specs, reduced, stem_strides
from vigpipe.model.graph import reduce_k
from vigpipe.model.shapes import VIG_SHAPES
from vigpipe.ops import gpu

PAGE = Path(__file__).with_name("operators.md")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MODELS = [name for name in VIG_SHAPES if name.endswith("_224")]
KINDS = (torch.float32, torch.bfloat16, torch.float16)
NUM_IMAGES = 64
# Shared memory that a block may have in KiB, by compute capability: CUDA C++ Programming Guide,
# "Technical specifications per compute capability". A multiprocessor of each has 64 Ki registers.
SHARED_KIB = {75: 64, 80: 163, 90: 227, 100: 227}
REGISTERS = 65536
MARKS = ("<!-- written by python -m docs.kernels -->", "<!-- end -->")


@dataclass(frozen=True)
class Launch:
    """What Triton compiles a kernel for.

    Attributes:
        kernel: name of the kernel.
        signature: types of the arguments, by name.
        constants: arguments that are constants, by index.
        multiples: indices of arguments that are multiples of 16.
        num_warps: warps per block.
    """

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    multiples: tuple[int, ...]
    num_warps: int


@dataclass(frozen=True)
class Usage:
    """What a block of a compiled kernel takes.

    Attributes:
        registers: registers per thread.
        local_bytes: local memory per thread, which spilled registers and the stack are in.
        shared_bytes: shared memory.
        blocks: how many blocks the registers of a multiprocessor allow.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    blocks: int


def launches(capability: int) -> dict[Launch, str]:
    """Find what training and evaluation of MODELS launch in every dtype: the dtype by launch.

    Args:
        capability: of the GPU, such as 90.
    """
    found: dict[Launch, str] = {}

    def note(
        kernel: Any,
        grid: object,
        tensors: tuple[Any, ...],
        sizes: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int = 4,
    ) -> None:
        signature: list[tuple[str, str]] = []
        fixed: list[tuple[int, Any]] = []
        multiples: list[int] = []
        values = (*tensors, *sizes, *constants)
        for i, (name, value) in enumerate(zip(kernel.arg_names, values, strict=True)):
            is_tensor = torch.is_tensor(value)
            is_size = i >= len(tensors) and i < len(tensors) + len(sizes)
            if not is_tensor and (not is_size or value == 1):
                signature.append((name, "constexpr"))
                fixed.append((i, value))
                continue
            signature.append((name, "*" + canonicalize_dtype(value.dtype) if is_tensor else "i32"))
            if is_tensor or value % 16 == 0:
                multiples.append(i)
        launch = Launch(
            kernel.__name__, tuple(signature), tuple(fixed), tuple(multiples), num_warps
        )
        found.setdefault(launch, str(kind).removeprefix("torch."))

    before, gpu.launch = gpu.launch, note  # pyrefly: ignore[bad-assignment]
    multiplies = gpu.multiplies_tf32
    gpu.multiplies_tf32 = lambda device: capability >= 80
    try:
        for kind in KINDS:
            for name in MODELS:
                _run(name, kind)
    finally:
        gpu.launch, gpu.multiplies_tf32 = before, multiplies
    return found


def _run(model: str, kind: torch.dtype) -> None:
    """Call the operators as the blocks of a model do, with tensors that have no data."""
    shape = VIG_SHAPES[model]
    grid = reduced(shape.img_size, stem_strides(len(shape.stem), shape.stem_stride))
    for spec in make_block_specs(shape, "knn", "max", 0.0, grid):
        if spec.rule is None:
            continue
        num_nodes, num_candidates = prod(spec.grid), spec.num_candidates
        x = torch.empty(NUM_IMAGES, num_nodes, spec.channels, dtype=kind, device="meta")
        y = None if spec.rule.reduction == 1 else x.new_empty(len(x), num_candidates, x.shape[2])
        bias = torch.empty(1, num_nodes, num_candidates, device="meta") if shape.relative else None
        k, dilation = reduce_k(spec.rule.k, spec.rule.dilation, num_candidates)
        graph = gpu.knn(x, y, bias, k, dilation, True)
        gpu.aggregate(x, y, graph, None, "max", True, has_backward=False)
        out, winners = gpu.aggregate(x, y, graph, None, "max", True, has_backward=True)
        gpu.aggregate_backward(out, x, y, graph, winners, None, "max", True)


def compile_for(launch: Launch, capability: int) -> Usage:
    """Compile a kernel for a compute capability, and return what it takes."""
    source = ASTSource(
        getattr(gpu, launch.kernel),
        dict(launch.signature),
        {(i,): value for i, value in launch.constants},
        {(i,): [["tt.divisibility", 16]] for i in launch.multiples},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.num_warps, "enable_fp_fusion": True},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    amounts = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Usage(
        amounts["REG"],
        amounts["STACK"] + amounts["LOCAL"],
        compiled.metadata.shared,
        REGISTERS // (amounts["REG"] * 32 * launch.num_warps),
    )


def compile_all() -> dict[tuple[str, str, int], list[Usage]]:
    """Compile every launch for every capability: what they take, by kernel, dtype, capability."""
    used: dict[tuple[str, str, int], list[Usage]] = {}
    with ProcessPoolExecutor() as processes:
        for capability in SHARED_KIB:
            found = launches(capability)
            usages = processes.map(compile_for, found, repeat(capability))
            for (launch, kind), usage in zip(found.items(), usages, strict=True):
                used.setdefault((launch.kernel, kind, capability), []).append(usage)
    return used


def table(used: dict[tuple[str, str, int], list[Usage]]) -> str:
    """Draw the table: of each kernel's specialisations the one that takes most."""
    head = ["kernel", "dtype", "specialisations", *(f"sm_{number}" for number in SHARED_KIB)]
    lines = [head, ["---"] * len(head)]
    for kernel, kind in dict.fromkeys((kernel, kind) for kernel, kind, _ in used):
        usages = [used[kernel, kind, capability] for capability in SHARED_KIB]
        cells = [
            f"{max(u.registers for u in group)} / {max(u.local_bytes for u in group)} / "
            f"{max(u.shared_bytes for u in group) / 1024:g} / {min(u.blocks for u in group)}"
            for group in usages
        ]
        name = kernel.removeprefix("_").removesuffix("_kernel")
        lines.append([name, kind, str(len(usages[0])), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Write the table between its marks in the page."""
    text = PAGE.read_text(encoding="utf-8")
    made = f"{MARKS[0]}\nTriton {triton.__version__}:\n\n{table(compile_all())}\n{MARKS[1]}"
    before, _, rest = text.partition(MARKS[0])
    PAGE.write_text(before + made + rest.partition(MARKS[1])[2], encoding="utf-8")


if __name__ == "__main__":
    main()
