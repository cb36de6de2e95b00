"""Worker processes read the bits that this one would, and hand its errors over."""

import os
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from tests.warm import server
from vigpipe.data import Augmentation, open_source
from vigpipe.data.reader import Reader
from vigpipe.errors import InputError

AUGMENT = Augmentation("box", "rand-m9-mstd0.5-inc1", 0.0, 0.25)


@pytest.fixture
def _server():
    """The one that ranks are forked from too; it is started once, with what those need."""
    server()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of four train images and two test images each."""
    root = tmp_path_factory.mktemp("pictures")
    noise = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 2)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = noise.integers(0, 256, (40, 36, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


BATCHES = [([0, 5, 2], None), ([7], [3]), ([], None), ([1, 1], [0, 1]), ([6, 3], None)]


@pytest.mark.multiprocess
@pytest.mark.usefixtures("_server")
def test_workers_read_the_same_bits_epoch_after_epoch(folder):
    source = open_source(str(folder), image_size=24, augment=AUGMENT, seed=3, mean=0.5, std=0.5)
    here, ahead = (Reader((source.train, source.test), n) for n in (0, 2))
    state = torch.random.get_rng_state()
    for epoch in (1, 2):
        pairs = zip(
            ahead.read(source.train, BATCHES, epoch),
            here.read(source.train, BATCHES, epoch),
            strict=True,
        )
        assert all([torch.equal(theirs, ours) for theirs, ours in pairs])
        (test,) = ahead.read(source.test, [([3, 0], None)], epoch)
        assert torch.equal(test, source.test.read([3, 0]))
    assert torch.equal(torch.random.get_rng_state(), state)
    ahead.close()


@pytest.mark.multiprocess
@pytest.mark.usefixtures("_server")
def test_an_unreadable_image_is_the_same_sentence_from_a_worker(folder, tmp_path):
    root = tmp_path / "pictures"
    shutil.copytree(folder, root)
    (root / "train" / "dog" / "1.png").write_bytes(b"no picture")
    split = open_source(str(root), image_size=8).train
    sentences = []
    for num_workers in (0, 1):
        batches = Reader([split], num_workers).read(split, [([0, 1], None), ([4, 5], None)], 0)
        assert next(batches).shape == (2, 3, 8, 8)
        with pytest.raises(InputError, match=r"dog/1\.png: cannot be read") as caught:
            next(batches)
        sentences.append(str(caught.value))
    assert sentences[0] == sentences[1]
    assert "\n" not in sentences[0]


class Odd:
    """A split that reads a batch of its own process's number, or does something else."""

    labels = np.zeros(100, dtype=np.int64)

    def __len__(self):
        return 100

    def read(self, indices, epoch=0, copies=None):
        if indices == [13]:
            raise ZeroDivisionError("thirteen")
        if indices == [14]:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((len(indices), 1, 1, 1), float(os.getpid()))


@pytest.mark.multiprocess
@pytest.mark.usefixtures("_server")
def test_workers_take_turns_and_go_on_after_a_sequence_that_was_given_up():
    split = Odd()
    reader = Reader([split], 3)
    pids = [int(x[0]) for x in reader.read(split, [([i], None) for i in range(7)], 0)]
    assert pids == [*pids[:3], *pids[:3], pids[0]]
    assert len({*pids, os.getpid()}) == 4
    given_up = reader.read(split, [([i], None) for i in range(7)], 0)
    next(given_up)
    given_up.close()  # pyright: ignore[reportAttributeAccessIssue]
    sizes = [len(x) for x in reader.read(split, [([1] * n, None) for n in (4, 0, 2)], 0)]
    assert sizes == [4, 0, 2]
    reader.close()


@pytest.mark.multiprocess
@pytest.mark.usefixtures("_server")
@pytest.mark.parametrize(
    ("index", "words"),
    [(13, r"ZeroDivisionError: thirteen"), (14, r"exit code -9; .*fewer --workers")],
)
def test_a_worker_that_fails_or_dies_is_an_error_here(index, words):
    split = Odd()
    batches = Reader([split], 2).read(split, [([1], None), ([index], None), ([2], None)], 0)
    assert next(batches).shape == (1, 1, 1, 1)
    with pytest.raises(RuntimeError, match=words):
        next(batches)


def test_without_workers_images_are_read_when_they_are_asked_for():
    split = open_source("digits").train
    asked = []

    def batches():
        for i in range(3):
            asked.append(i)
            yield [i], None

    images = Reader([split]).read(split, batches(), 0)
    assert asked == []
    next(images)
    assert asked == [0]
