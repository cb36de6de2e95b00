"""A driver that tells of GPUs, on a machine where CUDA must be left alone."""

import pytest
import torch


def pretend_four_gpus(patch: pytest.MonkeyPatch) -> None:
    """Let the driver's library tell of four GPUs, and whatever uses CUDA fail."""
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 4)
    for owner, name in (
        (torch._C, "_cuda_getDeviceCount"),
        (torch.cuda, "_lazy_init"),
        (torch.cuda, "set_device"),
    ):
        patch.setattr(owner, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
