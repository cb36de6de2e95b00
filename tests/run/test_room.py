"""A run whose weights cannot fit into the memory of the host is refused at once."""

import gc
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tests.refusals import check_refusals
from tests.world import run_each
from vigpipe.checkpoint import saver
from vigpipe.config.options import TrainConfig
from vigpipe.run import room
from vigpipe.run.facts import prepare
from vigpipe.run.room import check_room
from vigpipe.training import train

WIDE = TrainConfig(model="sage", data="sbm:160,4,12,6", layers=3, width=32768)
SUBNETWORKS = replace(WIDE, strategy="subnetworks", dp=8)
IMAGES = TrainConfig(model="vig_b_224", data="fake", strategy="subnetworks", dp=4)


KEPT = TrainConfig(
    model="sage",
    data="sbm:160,4,12,6",
    layers=3,
    width=512,
    sampler="parts",
    parts=4,
    steps=3,
    evaluate_every=9,
    checkpoint_every=2,
    threads=1,
)
PERIODIC = replace(KEPT, strategy="periodic", average_every=2)


def bytes_of_tensors() -> int:
    """What all tensors of this process hold, each storage once; a compiler's are none."""
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    plain = [t for t in tensors if t.layout == torch.strided and not t.is_meta]
    storages = [tensor.untyped_storage() for tensor in plain]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Writing(threading.Thread):
    """Writes nothing, but looks what there is when it should begin to."""

    held: ClassVar[list[int]] = []

    def start(self) -> None:
        self.held.append(bytes_of_tensors())

    def join(self, timeout: float | None = None) -> None:
        pass


def held_and_counted(rank: int, world_size: int, config: TrainConfig, folder: Path) -> list[int]:
    """What tensors hold while a checkpoint is written, and what is counted for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "threading", SimpleNamespace(Thread=Writing))
        run = prepare(config, torch.float64 if config.dtype == "float64" else torch.float32)
        gc.collect()
        Writing.held.clear()
        before = bytes_of_tensors()
        train(run, rank, torch.device("cpu"), folder)
    return [max(Writing.held) - before, room.needed_bytes(run, 1)]


@pytest.mark.parametrize(
    "config",
    [
        KEPT,
        *(replace(KEPT, opt=opt) for opt in ("sgd", "adamw", "nadamw", "rmsprop", "lion")),
        replace(KEPT, microbatches=2, ema=0.9),
        replace(KEPT, microbatches=2, dtype="float64"),
        replace(PERIODIC, average="outer"),
    ],
)
def test_what_is_counted_is_what_tensors_hold_while_a_checkpoint_is_written(config, tmp_path):
    held, counted = held_and_counted(0, 1, config, tmp_path)
    assert held == pytest.approx(counted, rel=0.03)


@pytest.mark.multiprocess
def test_replicas_keep_more_and_share_the_writing(tmp_path):
    configs = [
        replace(KEPT, dp=2),
        replace(KEPT, dp=2, compress="top-k:0.1"),
        replace(PERIODIC, dp=2, overlap=1),
    ]
    folders = [tmp_path / str(number) for number in range(len(configs))]
    for folder in folders:
        folder.mkdir()
    found = run_each(held_and_counted, 2, configs, folders)
    for config, of_ranks in zip(configs, found, strict=True):
        for held, counted in of_ranks:
            assert held == pytest.approx(counted, rel=0.05), config


@pytest.fixture(autouse=True)
def _a_host_of_24_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 28 < room.memory_bytes() < 1 << 50
    monkeypatch.setattr(room, "memory_bytes", lambda: 24 * 10**9)


def test_what_cannot_fit_is_refused() -> None:
    rows = [
        (
            WIDE,
            1,
            "would keep 60.2 GB .* adam .* has 24.0 GB .* the largest weight, .*, is 32768×32768",
        ),
        (replace(WIDE, opt="sgd"), 1, "would keep 43.0 GB"),
        (replace(WIDE, stages=2), 2, "2 ranks on this host would keep 60.2 GB"),
        (replace(SUBNETWORKS, dp=1), 1, "among sub-networks with --strategy subnetworks --dp 8"),
        # 86 M weights, which each rank puts together, and 4 times 25 M of its sub-network.
        (IMAGES, 64, "64 ranks on this host would keep 67.6 GB"),
    ]
    check_refusals(rows, lambda config, ranks: check_room(prepare(config, torch.float32), ranks))


def test_what_fits_is_not() -> None:
    for config, ranks_here in (
        (SUBNETWORKS, 8),
        (replace(WIDE, stages=2, width=24576), 1),
        (replace(WIDE, width=1024), 1),
    ):
        check_room(prepare(config, torch.float32), ranks_here)
