"""The Triton kernels, compiled as the published models launch them, for every kind of GPU."""

import importlib.util
from collections import Counter
from math import prod

import pytest

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton"),
]

MOST_SPILLED = 32  # bytes per thread: eight registers, which ptxas gives up to fit one more block


def test_the_largest_launches_of_the_models_fit_old_and_new_gpus(tmp_path, monkeypatch):
    """For every kernel, in float32, for an old GPU and a new one.

    `python -m docs.kernels` compiles all of them, for all GPUs.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from docs.kernels import SHARED_KIB, TOOLS, Launch, compile_for, launches

    if not (TOOLS / "cuobjdump").exists():
        pytest.skip(f"no cuobjdump in {TOOLS}")

    def size(launch: Launch) -> int:
        return prod(max(1, value) for _, value in launch.constants if type(value) is int)

    largest: dict[tuple[str, str, int], Launch] = {}
    for capability in (75, 90):
        for launch, kind in launches(capability).items():
            if kind != "float32":
                continue
            key = launch.kernel, kind, capability
            largest[key] = max(largest.get(key, launch), launch, key=size)
    names = ("lengths", "knn", "aggregate", "nodes", "candidates")
    assert {kernel for kernel, *_ in largest} == {f"_{name}_kernel" for name in names}
    for (kernel, kind, capability), launch in largest.items():
        usage = compile_for(launch, capability)
        where = f"{kernel} in {kind} for sm_{capability}: {usage}"
        assert usage.shared_bytes <= SHARED_KIB[capability] * 1024, where
        assert usage.local_bytes <= MOST_SPILLED, where
        assert usage.blocks >= 2, where


def test_the_page_has_every_launch():
    from docs.kernels import PAGE, launches

    counts = Counter((launch.kernel, kind) for launch, kind in launches(90).items())
    text = PAGE.read_text(encoding="utf-8")
    for (kernel, kind), count in counts.items():
        name = kernel.removeprefix("_").removesuffix("_kernel")
        assert f"| {name} | {kind} | {count} |" in text, "run python -m docs.kernels"
