"""A run whose weights cannot fit into the memory of the host is refused at once."""

from dataclasses import replace

import pytest
import torch

from tests.refusals import check_refusals
from vigpipe.config.options import TrainConfig
from vigpipe.run import room
from vigpipe.run.facts import prepare
from vigpipe.run.room import check_room

WIDE = TrainConfig(model="sage", data="sbm:160,4,12,6", layers=3, width=32768)
SUBNETWORKS = replace(WIDE, strategy="subnetworks", dp=8)
IMAGES = TrainConfig(model="vig_b_224", data="fake", strategy="subnetworks", dp=4)


@pytest.fixture(autouse=True)
def _a_host_of_24_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 28 < room.memory_bytes() < 1 << 50
    monkeypatch.setattr(room, "memory_bytes", lambda: 24 * 10**9)


def test_what_cannot_fit_is_refused() -> None:
    rows = [
        (WIDE, 1, "one rank on this host would keep 34.4 GB .* adam, and it has 24.0 GB"),
        (replace(WIDE, opt="sgd"), 1, "would keep 25.8 GB"),
        (replace(WIDE, stages=2), 2, "2 ranks on this host would keep 34.4 GB"),
        (replace(SUBNETWORKS, dp=1), 1, "among sub-networks with --strategy subnetworks --dp 8"),
        # 86 M weights, which each rank puts together, and 4 times 25 M of its sub-network.
        (IMAGES, 64, "64 ranks on this host would keep 48.0 GB"),
    ]
    check_refusals(rows, lambda config, ranks: check_room(prepare(config, torch.float32), ranks))


def test_what_fits_is_not() -> None:
    for config, ranks_here in (
        (SUBNETWORKS, 8),
        (replace(WIDE, stages=2), 1),
        (replace(WIDE, width=1024), 1),
    ):
        check_room(prepare(config, torch.float32), ranks_here)
