"""Worker processes read the bits that this one would, and hand its errors over."""

import os
import signal
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_cli import make_pictures
from tests.warm import server
from tests.world import wait_until
from vigpipe.data import Augmentation, open_source
from vigpipe.data.pixels import Pixels
from vigpipe.data.reader import AHEAD, Reader, Request
from vigpipe.data.slots import Slots
from vigpipe.errors import InputError, WorkerError

AUGMENT = Augmentation("box", "rand-m9-mstd0.5-inc1", 0.0, 0.25)


@pytest.fixture
def folder(tmp_path):
    return make_pictures(tmp_path / "pictures", 4, 2, (40, 36))


def asked(*indices, split=0, epoch=0, copies=None):
    return Request(split, indices, epoch, copies)


def kept(pixels):
    """Copy images, which are valid only until the next are asked for."""
    return pixels._replace(images=pixels.images.clone())


@pytest.mark.multiprocess
def test_workers_read_the_same_bits_epoch_after_epoch(folder):
    source = open_source(str(folder), image_size=24, augment=AUGMENT, seed=3, mean=0.5, std=0.5)
    here, ahead = (Reader((source.train, source.test), n, (3, 24, 24), 3) for n in (0, 2))
    state = torch.random.get_rng_state()
    for epoch in (1, 2):
        requests = [
            asked(0, 5, 2, epoch=epoch),
            asked(7, epoch=epoch, copies=[3]),
            asked(1, 1, epoch=epoch, copies=[0, 1]),
            asked(1, 3, split=1),
            *(asked(i % 8, epoch=epoch) for i in range(9)),
        ]
        found = [kept(pixels) for pixels in ahead.read(requests)]
        for theirs, ours in zip(found, here.read(requests), strict=True):
            assert torch.equal(theirs.images, ours.images)
            assert len(theirs.erasures) == len(ours.erasures)
            for a, b in zip(theirs.erasures, ours.erasures, strict=True):
                assert a[:3] == b[:3]
                assert np.array_equal(a.noise, b.noise)
    assert torch.equal(torch.random.get_rng_state(), state)
    ahead.close()


@pytest.mark.multiprocess
def test_an_unreadable_image_is_the_same_sentence_from_a_worker(folder):
    (folder / "train" / "dog" / "1.png").write_bytes(b"no picture")
    split = open_source(str(folder), image_size=8).train
    sentences = []
    for num_workers in (0, 1):
        reader = Reader([split], num_workers, (3, 8, 8), 2)
        images = reader.read([asked(0, 1), asked(4, 5)])
        assert next(images).images.shape == (2, 3, 8, 8)
        with pytest.raises(InputError, match=r"dog/1\.png: cannot be read") as caught:
            next(images)
        sentences.append(str(caught.value))
        assert len(next(reader.read([asked(2)])).images) == 1  # nothing else is lost
        reader.close()
    assert sentences[0] == sentences[1]
    assert "\n" not in sentences[0]


class Odd:
    """A split that reads a batch of its own process's number, or does something else."""

    labels = np.zeros(100, dtype=np.int64)

    def __init__(self, hanging=Path()):
        self.hanging = hanging

    def __len__(self):
        return 100

    def decode(self, indices, epoch=0, copies=None, out=None):
        if 13 in indices:
            raise ZeroDivisionError("thirteen")
        if 14 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        if 15 in indices:
            self.hanging.write_text(str(os.getpid()))
            signal.pause()
        pid = np.array([os.getpid()], dtype=np.int64).view(np.uint8)
        assert out is not None
        out[:] = torch.from_numpy(pid)
        return Pixels(out)


def process_ids(images):
    return [int(x.images[0].clone().numpy().view(np.int64).item()) for x in images]


def odd_reader(num_workers, hang_seconds=None, hanging=Path()) -> Reader:
    splits: Any = [Odd(hanging)]
    return Reader(splits, num_workers, (1, 1, 8), 4, hang_seconds)


@pytest.mark.multiprocess
def test_workers_take_turns_and_go_on_after_sequences_that_were_given_up():
    reader = odd_reader(3)
    pids = process_ids(reader.read([asked(i) for i in range(7)]))
    assert len({*pids, os.getpid()}) == 4
    assert pids == [*pids[:3], *pids[:3], pids[0]]
    for num_taken in (1, 5, 0):
        given_up = reader.read([asked(i % 10) for i in range(20)])
        for _ in range(num_taken):
            next(given_up)
    sizes = [len(x.images) for x in reader.read([asked(*[1] * n) for n in (4, 1, 2)])]
    assert sizes == [4, 1, 2]
    assert list(reader.read([])) == []
    assert set(process_ids(reader.read([asked(1)] * 9))) == set(pids)
    reader.close()


@pytest.mark.multiprocess
def test_a_sequence_may_grow_while_it_is_read():
    reader, coming = odd_reader(2), deque([asked(1)])
    begun = []

    def requests():
        while True:
            if coming:
                begun.append(coming[0])
            yield coming.popleft() if coming else None

    images = reader.read(requests())
    for size in (2, 3, 1, 4):
        coming.append(asked(*[1] * size))
        next(images)
        assert len(begun[-1].indices) == size  # it is read while this process is busy
    assert len(next(images).images) == 4
    assert [len(x.images) for x in reader.read([asked(1), asked(1, 1)])] == [1, 2]
    reader.close()


@pytest.mark.multiprocess
def test_a_worker_reads_no_further_ahead_than_it_is_told():
    reader, given = odd_reader(2), []

    def requests():
        for i in range(20):
            given.append(i)
            yield asked(i % 10)

    images = reader.read(requests())
    for num_read in range(1, 20 - 2 * AHEAD):
        next(images)
        assert len(given) == num_read + 2 * AHEAD
    reader.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("index", "kind", "words"),
    [
        (13, ZeroDivisionError, "thirteen"),
        (14, WorkerError, r"exit code -9; .*fewer --workers"),
        (15, WorkerError, r"given any for 0\.5 s; if the storage is slow, raise --timeout"),
    ],
)
def test_a_worker_that_fails_dies_or_hangs_is_an_error_here(index, kind, words, tmp_path):
    hanging = tmp_path / "hanging"
    reader = odd_reader(2, hang_seconds=0.5 if index == 15 else None, hanging=hanging)
    with pytest.raises(kind, match=words):
        list(reader.read([asked(1), asked(index), asked(2)]))
    if index == 15:
        os.kill(int(hanging.read_text()), signal.SIGKILL)  # its end would be waited for
    reader.close()


def rank_with_a_worker(_rank, _world_size, folder: Path):
    """Start a worker, tell its process id, and end at once as by `kill -9`."""
    (pid,) = process_ids(odd_reader(1).read([asked(1)]))
    (folder / "worker").write_text(str(pid))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.multiprocess
def test_workers_end_with_a_rank_that_is_killed(tmp_path):
    """Their parent is the fork server, which lives on."""
    context = server()
    rank = context.Process(target=rank_with_a_worker, args=(0, 1, tmp_path))
    rank.start()
    rank.join()
    assert rank.exitcode == -signal.SIGKILL
    worker = int((tmp_path / "worker").read_text())
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), "the end of the worker")


def test_many_images_are_cut_into_a_part_for_each_worker_and_few_are_not():
    large, small = (3, 224, 224), (1, 28, 28)
    assert [len(range(32)[part]) for part in Reader([], 4, large, 32).cut(32)] == [8, 8, 8, 8]
    assert [len(range(30)[part]) for part in Reader([], 4, large, 32).cut(30)] == [8, 8, 8, 6]
    assert Reader([], 4, large, 32).cut(0) == []
    assert Reader([], 4, small, 256).cut(256) == [slice(0, 256)]
    assert Reader([], 0, large, 32).cut(32) == [slice(0, 32)]


def test_too_many_slots_are_one_sentence():
    with pytest.raises(InputError, match=r"--workers: .* 1,073,741,824 MiB .* choose fewer"):
        Slots(1 << 30, (1 << 20,))
