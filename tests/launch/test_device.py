"""Which device a rank takes, with pretend GPUs."""

import pytest
import torch

from vigpipe.errors import InputError
from vigpipe.launch.device import backend, choose_device, hardware, peak_bytes, weight_dtype

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that this host has so many GPUs; returns those that ranks have taken."""
    taken = []

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        return taken

    return pretend


def test_auto_is_the_cpu_where_there_is_no_gpu(gpus):
    gpus(0)
    assert choose_device("auto", 3, 4) == CPU


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_every_rank_of_a_host_takes_a_gpu_of_its_own(gpus, requested):
    taken = gpus(4)
    devices = [choose_device(requested, rank, 4) for rank in range(4)]
    assert devices == taken == [torch.device("cuda", i) for i in range(4)]


def test_the_cpu_can_be_asked_for_beside_a_gpu(gpus):
    assert gpus(1) == []
    assert choose_device("cpu", 0, 8) == CPU


def test_cuda_without_a_gpu_is_refused(gpus):
    gpus(0)
    with pytest.raises(InputError, match="no GPU here; choose --device cpu"):
        choose_device("cuda", 0, 1)


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused(gpus, requested):
    taken = gpus(2)
    with pytest.raises(InputError, match=r"3 ranks on this host, but 2 GPUs.*--device cpu"):
        choose_device(requested, 0, 3)
    assert taken == []


def test_nccl_on_gpus_and_gloo_on_cpus():
    assert [backend(torch.device(name)) for name in ("cuda", "cpu")] == ["nccl", "gloo"]


def test_bfloat16_keeps_float32_weights():
    assert weight_dtype("bfloat16") == weight_dtype("float32") == torch.float32
    assert weight_dtype("float64") == torch.float64


def test_peak_memory_is_in_bytes():
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert len(held) < peak_bytes(CPU) < 1 << 40


def test_the_hardware_is_named_with_its_cores():
    assert hardware(CPU).endswith(" cores")
