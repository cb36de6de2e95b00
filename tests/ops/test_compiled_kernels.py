"""The Triton kernels, compiled as the published models launch them, for every kind of GPU."""

import importlib.util
from collections import Counter

import pytest

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton"),
]

MOST_SPILLED = 32  # bytes per thread: eight registers, which ptxas gives up to fit one more block


def test_every_launch_of_the_models_fits_every_kind_of_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from docs.kernels import SHARED_KIB, TOOLS, compile_all

    if not (TOOLS / "cuobjdump").exists():
        pytest.skip(f"no cuobjdump in {TOOLS}")
    used = compile_all()
    kernels = {"_unit_kernel", "_knn_kernel", "_aggregate_kernel", "_backward_kernel"}
    assert {kernel for kernel, _, _ in used} == kernels
    for (kernel, kind, capability), usages in used.items():
        for usage in usages:
            where = f"{kernel} in {kind} for sm_{capability}: {usage}"
            assert usage.shared_bytes <= SHARED_KIB[capability] * 1024, where
            assert usage.local_bytes <= MOST_SPILLED, where
            assert usage.blocks >= 2, where


def test_the_page_has_every_launch():
    from docs.kernels import PAGE, launches

    counts = Counter((launch.kernel, kind) for launch, kind in launches().items())
    text = PAGE.read_text(encoding="utf-8")
    for (kernel, kind), count in counts.items():
        name = kernel.removeprefix("_").removesuffix("_kernel")
        assert f"| {name} | {kind} | {count} |" in text, "run python -m docs.kernels"
