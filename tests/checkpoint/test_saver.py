"""A checkpoint appears whole or not at all, whatever happens while it is written."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_manifest import PLAIN
from vigpipe.checkpoint.manifest import NAME, list_checkpoints, read_tensors, tensor_names, verify
from vigpipe.checkpoint.saver import POLL_SECONDS, Saver, rank_file_name
from vigpipe.checkpoint.state import share_of
from vigpipe.model import mapped

RANK_FILES = [rank_file_name(stage, replica) for replica in (0, 1) for stage in (0, 1)]


def savers(folder, **options):
    """Make the savers of four ranks, the second of which is the writer, and a list of messages."""
    messages: list[str] = []
    ranks = [
        Saver(folder, RANK_FILES, name, name == RANK_FILES[1], 2, "aa", messages.append, **options)
        for name in RANK_FILES
    ]
    return ranks, messages


def alone(folder):
    """Make the saver of a rank that is alone, and a list of its messages."""
    messages: list[str] = []
    return Saver(folder, RANK_FILES[:1], RANK_FILES[0], True, 1, "aa", messages.append), messages


def manifest(step):
    return replace(PLAIN, step=step)


def save(ranks, step):
    for rank, saver in enumerate(ranks):
        saver.save(manifest(step), {f"model/{rank}": torch.full((64,), float(step))})


def finish(ranks):
    for saver in ranks:
        saver.finish()


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_every_rank_writes_a_share_and_the_newest_stay(tmp_path):
    ranks, messages = savers(tmp_path)
    for step in (1, 2, 3):
        save(ranks, step)
    finish(ranks)
    assert messages == []
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    newest = list_checkpoints(tmp_path)[0]
    whole = verify(newest)
    assert sorted(path.name for path in newest.iterdir()) == sorted([*RANK_FILES, "manifest.json"])
    where = tensor_names(newest, whole)
    assert set(where) == {f"model/{rank}" for rank in range(4)}
    assert all(t.eq(3).all() for _, t in read_tensors(newest, where, list(where)))
    assert ranks[1].newest == 3


def test_what_a_checkpoint_holds_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Without it, a checkpoint could be empty files after a power failure."""
    synced: list[Path] = []
    whole, rename = {NAME, *RANK_FILES[:1]}, Path.rename

    def spy(path, target):
        if target.name == "step-00000001":
            assert [*synced] == [path / RANK_FILES[0], path / NAME, path]
        return rename(path, target)

    monkeypatch.setattr("vigpipe.checkpoint.saver.sync", synced.append)
    monkeypatch.setattr(Path, "rename", spy)
    saver, messages = alone(tmp_path)
    saver.save(manifest(1), {"model/w": torch.zeros(3)})
    saver.finish()
    assert (messages, synced[3:]) == ([], [tmp_path / "checkpoints"])
    assert {path.name for path in list_checkpoints(tmp_path)[0].iterdir()} == whole


def test_what_is_written_is_the_state_of_the_call(tmp_path):
    weights = {"model/w": torch.zeros(1 << 20)}
    saver, _ = alone(tmp_path)
    saver.save(manifest(1), weights)
    weights["model/w"].fill_(9.0)  # the next step, while the thread writes
    saver.finish()
    newest = list_checkpoints(tmp_path)[0]
    where = tensor_names(newest, verify(newest))
    ((_, tensor),) = read_tensors(newest, where, ["model/w"])
    assert not tensor.any()


def test_stored_tensors_are_written_without_a_copy_of_them(tmp_path, monkeypatch):
    rows = mapped.create(tmp_path / "rows", {"rows/w": (torch.bfloat16, (300, 7))})
    rows["rows/w"].copy_(torch.arange(2100).view(300, 7))
    copied, to = [], torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, *a, **o: (copied.append(t), to(t, *a, **o))[1]
    )
    saver, _ = alone(tmp_path)
    saver.save(manifest(1), {"model/w": torch.ones(3)}, rows)
    saver.finish()
    assert [t.numel() for t in copied] == [3]
    newest = list_checkpoints(tmp_path)[0]
    where = tensor_names(newest, verify(newest))
    found = dict(read_tensors(newest, where, list(where)))
    assert found["model/w"].tolist() == [1, 1, 1]
    assert torch.equal(found["rows/w"], rows["rows/w"])


def test_a_rank_that_never_comes_costs_that_checkpoint_only(tmp_path):
    ranks, messages = savers(tmp_path, timeout_seconds=0.3)
    save(ranks, 1)
    save(ranks[:3], 2)
    finish(ranks)
    assert names(tmp_path) == ["step-00000001"]
    assert "stage1-replica1.safetensors was not there after 0.3 s" in messages[0]
    assert "the newest is step-00000001" in messages[0]
    save(ranks, 3)
    finish(ranks)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_who_gives_up_waits_no_more_for_the_files_of_others(tmp_path):
    """A rank that was lost writes none, and the run would end ten minutes later."""
    ranks, messages = savers(tmp_path)
    save(ranks[:2], 1)
    ranks[1].give_up()
    finish(ranks)
    assert list_checkpoints(tmp_path) == []
    assert messages == []


def test_a_rank_on_a_full_disk_tells_the_writer_at_once(tmp_path, monkeypatch):
    ranks, messages = savers(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    # Symptom: now and then the reason was missing. Cause: the writer looked while the file that
    # holds it had been made, but not written.
    write_text = Path.write_text

    def slow(path, text, **options):
        if "No space" in text:
            time.sleep(5 * POLL_SECONDS)
        return write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", slow)
    monkeypatch.setattr(ranks[3], "_write_file", full)
    save(ranks, 5)
    finish(ranks)
    assert "No space left on device" in messages[0]
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "checkpoints").touch()
    saver, messages = alone(tmp_path)
    saver.save(manifest(2), {"model/w": torch.zeros(1)})
    saver.finish()
    assert "none is yet" in messages[0]


def test_what_a_run_left_half_written_is_swept_away_by_the_next(tmp_path):
    for left in (".step-00000009-old", ".old-step-00000001-old", ".step-00000009-aa"):
        (tmp_path / "checkpoints" / left).mkdir(parents=True)
    savers(tmp_path)
    assert names(tmp_path) == [".step-00000009-aa"]  # its own


def test_a_checkpoint_of_the_same_step_is_replaced_at_the_end_only(tmp_path, monkeypatch):
    saver, _ = alone(tmp_path)
    saver.save(manifest(1), {"model/w": torch.zeros(3)})
    saver.finish()
    before = list_checkpoints(tmp_path)[0]
    seen: list[int] = []
    rename = type(before).rename

    def spy(path, target):
        if path.name.startswith("."):  # the new one, on its way to the name
            seen.append((before / "manifest.json").exists())
        elif path == before:
            seen.append(len(list((tmp_path / "checkpoints").glob(".step-*/manifest.json"))))
        return rename(path, target)

    monkeypatch.setattr(type(before), "rename", spy)
    saver.save(manifest(1), {"model/w": torch.ones(3)})
    saver.finish()
    assert seen == [1, False]  # the new one was whole before the old one gave up its name
    assert names(tmp_path) == ["step-00000001"]


def test_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    saver, _ = alone(tmp_path)
    first, second = gates = threading.Event(), threading.Event()
    waiting = iter(gates)
    write = saver._write_file
    monkeypatch.setattr(saver, "_write_file", lambda *a: (next(waiting).wait(10), write(*a)))
    saver.save(manifest(1), {"model/w": torch.zeros(3)})
    threading.Timer(0.2, first.set).start()
    saver.save(manifest(2), {"model/w": torch.ones(3)})
    assert names(tmp_path)[-1] == "step-00000001"  # before anything of the second
    second.set()
    saver.finish()


def test_files_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        saver, _ = alone(tmp_path)
        saver.save(manifest(1), {"model/w": torch.zeros(3)})
        saver.finish()
    finally:
        os.umask(before)
    for path in list_checkpoints(tmp_path)[0].iterdir():
        assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_replicas_share_the_work(num_replicas):
    tensors = {f"t{i}": torch.zeros(i * 100) for i in range(20)}
    shares = [share_of(tensors, replica, num_replicas) for replica in range(num_replicas)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    loads = [sum(t.nbytes for t in share.values()) for share in shares]
    assert max(loads) - min(loads) <= 4 * 1900
