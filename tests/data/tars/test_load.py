"""Images are read out of tars by any thread, with few files open, and never out of another tar."""

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.data.tars.writing import png, write_tar
from tests.launch.parrot import open_descriptors
from tests.refusals import check_refusals
from vigpipe.data.images import decode
from vigpipe.data.tars import load as loading
from vigpipe.data.tars.index import index_images
from vigpipe.data.tars.load import LoadFromTars, OpenTars
from vigpipe.data.texts import join
from vigpipe.errors import InputError

NUM_TARS = 6


@pytest.fixture
def tars(tmp_path):
    return [
        write_tar(tmp_path / f"{i}.tar", {f"{j}.png": png(10 * i + j) for j in range(2)})
        for i in range(NUM_TARS)
    ]


def loader(paths):
    """What reads the images of some tars; image i is in tar i // 2."""
    found, stamps = zip(*(index_images(path, None) for path in paths), strict=True)
    return LoadFromTars(
        OpenTars(paths, stamps),
        np.arange(2 * len(paths)) // 2,
        np.concatenate([images.offsets for images in found]),
        np.concatenate([images.sizes for images in found]),
        join([images.names for images in found]),
    )


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIGPIPE_CACHE", str(tmp_path / "cache"))


def expected(index):
    return decode(png(10 * (index // 2) + index % 2), "expected")


def test_few_files_stay_open_and_none_is_pickled(tars, monkeypatch):
    monkeypatch.setattr(loading, "MOST_OPEN", 2)
    load = loader(tars)
    for index in range(12):
        load(index)
    assert {name for name in open_descriptors() if name.endswith(".tar")} == set(map(str, tars[4:]))
    copy = pickle.loads(pickle.dumps(load))
    del load
    assert not any(name.endswith(".tar") for name in open_descriptors())
    np.testing.assert_array_equal(copy(5), expected(5))


def test_a_file_is_not_closed_while_a_thread_reads_from_it(tars, monkeypatch):
    """The second thread needs another file between the first one's opening and reading."""
    monkeypatch.setattr(loading, "MOST_OPEN", 1)
    load, pread = loader(tars), os.pread
    has_opened, has_evicted = threading.Event(), threading.Event()

    def slow_pread(descriptor, size, offset):
        if threading.current_thread() is not threading.main_thread():
            has_opened.set()
            assert has_evicted.wait(60)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", slow_pread)
    with ThreadPoolExecutor(1) as thread:
        pixels = thread.submit(load, 0)
        assert has_opened.wait(60)
        load(2)
        has_evicted.set()
        np.testing.assert_array_equal(pixels.result(), expected(0))


def shorten(path):
    with path.open("rb+") as file:
        file.truncate(700)


def overwrite(path):
    with path.open("rb+") as file:
        file.write(b"x")
    os.utime(path, ns=(0, 0))


def replace(path):
    write_tar(path.with_suffix(".new"), {"0.png": png(77), "1.png": png(78)}).replace(path)
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize("was_open", [False, True])
@pytest.mark.parametrize("change", [shorten, overwrite, replace])
def test_a_tar_that_has_changed_is_an_error_that_names_the_image(tars, change, was_open):
    load = loader(tars)
    if was_open:
        load(0)
    change(tars[0])
    if change is replace and was_open:  # the file that was indexed is still there for us
        np.testing.assert_array_equal(load(1), expected(1))
        return
    with pytest.raises(InputError, match=r"0\.tar: 1\.png: the tar has changed since its images"):
        load(1)


def test_what_is_not_there_or_no_image_is_named(tars, tmp_path):
    load = loader([*tars[:1], write_tar(tmp_path / "x.tar", {"0.png": b"", "1.png": png()[:60]})])
    tars[0].unlink()
    rows = [
        (1, r"0\.tar: 1\.png: cannot be read \(No such file"),
        (2, r"x\.tar: 0\.png: cannot be read as an image"),
        (3, r"x\.tar: 1\.png: cannot be read as an image"),
    ]
    check_refusals(rows, load)


def test_too_many_open_files_are_not_the_images_fault(tars, monkeypatch):
    load = loader(tars)

    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        load(1)


def test_a_huge_member_is_refused_before_it_is_read(tars, monkeypatch):
    load = loader(tars)
    monkeypatch.setattr(loading, "LARGEST_BYTES", 100)
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("it was read"))
    words = r"0\.tar: 1\.png: has \d+ bytes, but an image has at most"
    check_refusals([(1, words)], load)
