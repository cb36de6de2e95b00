"""The share of every kernel, from a real profile of the CPU and a made-up one of a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

from tests.selftest.made_up import CPU, machine, profile_rows
from vigpipe.selftest import profile
from vigpipe.selftest.rows import Budget, Row


def event(key, device, microseconds, *, annotation=False):
    return SimpleNamespace(
        key=key,
        count=6,
        device_type=device,
        is_user_annotation=annotation,
        self_device_time_total=microseconds,
        self_cpu_time_total=microseconds,
    )


def test_kernels_of_a_gpu_are_counted_without_what_calls_them():
    events = [
        event("aten::mm", DeviceType.CPU, 600),
        event("gemm", DeviceType.CUDA, 600),
        event("_knn_kernel", DeviceType.CUDA, 1200),
        event("Optimizer.step#AdamW.step", DeviceType.CUDA, 5000, annotation=True),
        event("cudaLaunchKernel", DeviceType.CPU, 0),
    ]
    made_up: EventList = events  # pyrefly: ignore[bad-assignment]
    assert profile.kernels_of(made_up, 2, True) == [
        {"name": "_knn_kernel", "calls": 3, "seconds": pytest.approx(600e-6)},
        {"name": "gemm", "calls": 3, "seconds": pytest.approx(300e-6)},
    ]
    assert [k["name"] for k in profile.kernels_of(made_up, 2, False)] == ["aten::mm"]


def test_operators_of_a_cpu_are_found_by_their_own_time():
    x = torch.ones(64, 64)
    with profiled(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(4):
            x = x @ x
    calls = {k["name"]: k["calls"] for k in profile.kernels_of(profiler.key_averages(), 2, False)}
    assert calls["aten::mm"] == 2


def test_shares_are_of_the_step(monkeypatch):
    def call(function, model, *shape, seconds):
        assert model == ("vig_ti_224" if shape[0] == 128 else "vig_cifar_ti")
        kernels = [{"name": "gemm", "calls": 3.0, "seconds": 0.01}]
        return {"step_seconds": 0.04, "peak_bytes": 5e9, "kernels": kernels}

    monkeypatch.setattr(profile, "call", call)
    for which in (CPU, machine(1)):
        step, kernel = profile.measure(which, Budget(100))
        assert (step.what, step.values["peak_bytes"]) == ("step", 5e9)
        assert (kernel.what, kernel.values["share"]) == ("gemm", 0.25)


def test_the_page_sums_up_what_it_folds_away():
    rows = list(profile_rows())
    text = "\n".join(profile.section(rows))
    shares = [row.values["share"] for row in rows[1:]]
    assert f"60 kinds of kernels take {sum(shares):.1%} of it" in text
    assert f"<td>{sum(shares[20:]):.1%}</td>" in text
    assert "<td>21.6%</td>" in text


def test_a_profile_that_failed_is_told():
    rows = [Row("step", "failed", note="CUPTI could not be loaded")]
    assert "CUPTI could not be loaded" in "\n".join(profile.section(rows))
