"""The images of a tar are found once; a cache that is old, damaged or missing changes nothing."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.data.tars.writing import write_tar
from tests.refusals import check_refusals
from vigpipe.data.tars import index
from vigpipe.data.tars.index import index_images
from vigpipe.errors import InputError

FILES = {"cat/1.png": b"1", "dog/2.png": b"22", "dog/3.png": b""}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of the entries."""
    monkeypatch.setenv("VIGPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tars"


@pytest.fixture
def tar(tmp_path):
    return write_tar(tmp_path / "x.tar", FILES)


@pytest.fixture
def scans(monkeypatch):
    """The tars whose headers are read."""
    paths, find_images = [], index.find_images
    monkeypatch.setattr(
        index, "find_images", lambda *given: paths.append(given[2]) or find_images(*given)
    )
    return paths


def facts(images):
    texts = [[text[i] for i in range(len(text))] for text in (images.names, images.folders)]
    arrays = [array.tolist() for array in (images.offsets, images.sizes, images.labels)]
    return [*texts, *arrays, images.num_samples]


def test_a_tar_is_scanned_once_whatever_leads_to_it(tar, scans, tmp_path):
    first, stamp = index_images(tar, None)
    places = [512, 1536, 2560], [1, 2, 0], [0, 1, 1]
    assert facts(first) == [list(FILES), ["/cat", "/dog"], *places, 0]
    (tmp_path / "link.tar").symlink_to(tar)
    for path in (tar, tmp_path / "." / "x.tar", tmp_path / "link.tar"):
        again, stamp_again = index_images(path, None)
        assert facts(again) == facts(first)
        assert stamp_again == stamp
    assert scans == [str(tar)]


def test_samples_are_kept_for_each_field_of_their_labels(tmp_path, scans):
    tar = write_tar(tmp_path / "x.tar", {"1.png": b"", "1.json": b'{"label": 1, "other": 2}'})
    for _ in range(2):
        for field, label in ((None, 1), ("label", 1), ("other", 2)):
            images, _stamp = index_images(tar, field)
            assert facts(images) == [["1.png"], [], [512], [0], [label], 1]
    assert len(scans) == 3


def test_another_tar_in_its_place_is_scanned_again(tar, scans):
    index_images(tar, None)
    before = tar.stat()
    write_tar(tar, {"bat/1.png": b"1", "dog/2.png": b"22", "dog/3.png": b""})  # of the same size
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `rsync -t` does
    images, _ = index_images(tar, None)
    assert images.names[0] == "bat/1.png"
    assert len(scans) == 2


def entry_with(cache, **changed):
    """Write the only entry again with other arrays."""
    (path,) = cache.iterdir()
    with np.load(path) as entry:
        arrays = {**entry, **changed}
    np.savez(path, **arrays)


def pickled(path):
    np.savez(path, names=np.array([{}], dtype=object), allow_pickle=True)


def bomb(path):
    """Nothing is wrong with it but eight megabytes of zeros, which a few kilobytes stand for."""
    with np.load(path) as entry:
        arrays = dict(entry)
    np.savez_compressed(path, **arrays, zeros=np.zeros(1 << 20))


def of_samples(path):
    with np.load(path) as entry:
        facts = entry["facts"]
    entry_with(path.parent, facts=np.array([*facts[:-1], 3]))


def flipped(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"cat/1.png")] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        flipped,
        pickled,
        bomb,
        of_samples,
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: entry_with(path.parent, offsets=np.array([512, 1536])),
        lambda path: entry_with(path.parent, offsets=np.array([512, 1536, 1 << 62])),
        lambda path: entry_with(path.parent, sizes=np.array([1, 2, 1e4])),
        lambda path: entry_with(path.parent, labels=np.array([0, 1, 2])),
        lambda path: entry_with(path.parent, labels=np.array([0, 1, -1])),
        lambda path: entry_with(path.parent, name_ends=np.array([9, 8, 27])),
        lambda path: entry_with(path.parent, folders=np.empty(0, dtype=np.uint8)),
        lambda path: entry_with(path.parent, facts=np.array([0])),
    ],
)
def test_a_damaged_entry_is_made_again(tar, cache, scans, damage):
    images, _ = index_images(tar, None)
    (path,) = cache.iterdir()
    damage(path)
    assert facts(index_images(tar, None)[0]) == facts(images)
    assert len(scans) == 2
    if path.is_file():
        index_images(tar, None)
        assert len(scans) == 2


def test_without_a_cache_tars_are_scanned_every_time(tar, scans, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIGPIPE_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        assert len(index_images(tar, None)[0]) == 3
    assert len(scans) == 2


def test_a_cache_that_others_may_write_to_is_not_believed(tar, scans, cache):
    index_images(tar, None)
    cache.parent.chmod(0o777)
    index_images(tar, None)
    assert len(scans) == 2


def test_many_may_index_the_same_tar_at_once(tar, cache, scans):
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: facts(index_images(tar, None)[0]), range(40)))
    assert found == [found[0]] * 40
    num_scans = len(scans)
    assert facts(index_images(tar, None)[0]) == found[0]
    assert len(scans) == num_scans
    assert len(list(cache.iterdir())) == 1  # nothing half written is left


def test_a_tar_that_changes_while_it_is_read_is_refused(tar, monkeypatch):
    find_images = index.find_images

    def grow(*given):
        with tar.open("ab") as file:
            file.write(b"\0")
        return find_images(*given)

    monkeypatch.setattr(index, "find_images", grow)
    with pytest.raises(InputError, match=r"x\.tar: was changed while it was read"):
        index_images(tar, None)


def test_what_cannot_be_read_is_one_sentence(tar, tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    (tmp_path / "folder.tar").mkdir()
    rows = [
        ("pipe.tar", "pipe.tar: .*is not a regular file"),
        ("folder.tar", "folder.tar: .*(is not a regular file|Is a directory)"),
        ("nothing.tar", "nothing.tar: .*No such file"),
    ]
    check_refusals(rows, lambda name: index_images(tmp_path / name, None))
