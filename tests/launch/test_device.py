"""What this process sees of GPUs, with pretend ones."""

import pytest
import torch

from tests.launch.driver import pretend_four_gpus
from vigpipe.launch.device import count_gpus, gpu_uuid, hardware, peak_bytes, take_device

CPU = torch.device("cpu")


@pytest.fixture
def four_gpus(monkeypatch):
    """The driver's library tells of four GPUs; CUDA itself must be left alone."""
    pretend_four_gpus(monkeypatch)


def test_gpus_are_counted_without_cuda(four_gpus):
    assert count_gpus("auto") == count_gpus("cuda") == 4


@pytest.mark.parametrize(("visible", "count"), [("2", 1), ("1,3", 2), ("", 0)])
def test_the_user_can_narrow_which_gpus_are_seen(four_gpus, monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus("auto") == count


def test_gpus_that_cuda_cannot_use_do_not_count_for_a_rank(four_gpus, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 0)  # an old driver, for instance
    assert count_gpus("auto") == 4
    assert count_gpus("auto", can_compute=True) == 0


def test_a_rank_computes_on_the_gpu_that_it_takes(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert take_device(None) == CPU
    assert [take_device(3)] == taken == [torch.device("cuda", 3)]


def test_a_gpu_has_a_name_of_its_own(monkeypatch):
    gpus = {1: type("", (), {"uuid": 17})}  # torch has a class of its own for it
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    assert gpu_uuid(1) == "17"


def test_peak_memory_is_in_bytes():
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert len(held) < peak_bytes(CPU) < 1 << 40


def test_the_hardware_is_named_with_its_cores():
    assert hardware(CPU).endswith(" cores")
