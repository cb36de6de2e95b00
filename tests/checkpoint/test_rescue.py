"""What replicas save when they lose a peer becomes a checkpoint, if it is enough."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoint.test_manifest import PLAIN
from vigpipe import training
from vigpipe.checkpoint.manifest import list_checkpoints, tensor_names, verify
from vigpipe.checkpoint.rescue import rescue, salvage
from vigpipe.checkpoint.saver import Saver, rank_file_name
from vigpipe.parallel.layout import Layout
from vigpipe.replication.table import new_table

TWO_STAGES = replace(PLAIN, step=73, layout={"num_stages": 2})


def save(folder, stage, replica, step=73, loss=None):
    manifest = replace(TWO_STAGES, step=step, loss=loss)
    state = {f"model/{stage}": torch.full((4,), float(step))}
    rescue(folder / "checkpoints", "aa", rank_file_name(stage, replica), manifest, state)


def test_every_stage_is_enough_whichever_replica_it_is_from(tmp_path):
    save(tmp_path, 0, 1)
    save(tmp_path, 1, 0, loss=0.25)
    save(tmp_path, 0, 0)
    assert list_checkpoints(tmp_path) == []  # not before somebody has looked
    salvage(tmp_path)
    (checkpoint,) = list_checkpoints(tmp_path)
    manifest = verify(checkpoint)
    assert (checkpoint.name, manifest.step, manifest.loss) == ("step-00000073", 73, 0.25)
    assert set(tensor_names(checkpoint, manifest)) == {"model/0", "model/1"}
    assert len(list(checkpoint.iterdir())) == 3
    salvage(tmp_path)  # and again
    assert list_checkpoints(tmp_path) == [checkpoint]


def test_a_missing_stage_is_not_enough_and_is_swept_away(tmp_path):
    save(tmp_path, 0, 0)
    save(tmp_path, 0, 1)
    salvage(tmp_path)
    assert list_checkpoints(tmp_path) == []
    Saver(tmp_path, [rank_file_name(0, 0)], rank_file_name(0, 0), True, 2, "bb", print)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_more_stages_than_memory_has_room_for_are_not_counted_one_by_one(tmp_path):
    manifest = replace(TWO_STAGES, layout={"num_stages": 10**30})
    rescue(tmp_path / "checkpoints", "aa", rank_file_name(0, 0), manifest, {})
    salvage(tmp_path)
    assert list_checkpoints(tmp_path) == []


def test_stages_of_different_steps_are_not_mixed(tmp_path):
    save(tmp_path, 0, 0, step=73)
    save(tmp_path, 1, 0, step=74)
    save(tmp_path, 0, 1, step=74)
    salvage(tmp_path)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000074"]


def test_what_was_cut_off_counts_for_nothing(tmp_path):
    save(tmp_path, 0, 0)
    save(tmp_path, 1, 0)
    (note,) = tmp_path.rglob("stage1-replica0.json")
    note.write_text(note.read_text()[:-20])
    salvage(tmp_path)
    assert list_checkpoints(tmp_path) == []


def test_a_checkpoint_of_the_same_step_is_kept(tmp_path):
    (tmp_path / "checkpoints" / "step-00000073").mkdir(parents=True)
    save(tmp_path, 0, 0)
    save(tmp_path, 1, 0)
    salvage(tmp_path)
    assert list((tmp_path / "checkpoints" / "step-00000073").iterdir()) == []


def test_without_a_folder_to_write_to_it_is_silent(tmp_path):
    (tmp_path / "checkpoints").touch()
    save(tmp_path, 0, 0)
    salvage(tmp_path)


def save_replica(folder, stage, replica, version, **table):
    """What a rank of a replica with steps of its own saves: of three, at two stages each."""
    known = {**new_table(3).seen(), "version": version, **table}
    replicas = {"progress": known, "metrics_bytes": 0, "events_bytes": 0}
    manifest = replace(TWO_STAGES, step=table["drawn"] // 3, config={"dp": 3}, replicas=replicas)
    row = {"replica": replica, "step": 1, "item": stage}
    name, state = rank_file_name(stage, replica), {f"replica{replica}/{stage}": torch.zeros(1)}
    parcels = [{"events": [row], "metrics": []}]
    assert rescue(folder / "checkpoints", "aa", name, manifest, state, parcels)


def test_replicas_with_steps_of_their_own_are_put_together(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"start": {}}\n{"replica": 1, "step": 1, "item": 0}\n{')
    for stage in (0, 1):
        # Replica 1 has finished item 6, of which replica 2, which has seen more, knows nothing.
        save_replica(tmp_path, stage, 1, 20, drawn=9, taken=[2, 3, 2], last=[3, 6, 5])
        save_replica(tmp_path, stage, 2, 22, drawn=10, taken=[2, 2, 2], leases=[9, 6, 8])
    save_replica(tmp_path, 0, 0, 30, drawn=12, taken=[9, 9, 9])  # its other stage is lost
    salvage(tmp_path)
    (checkpoint,) = list_checkpoints(tmp_path)
    manifest = verify(checkpoint)
    progress = manifest.replicas["progress"]
    assert manifest.step == 3
    assert (progress["drawn"], progress["taken"]) == (10, [2, 3, 2])
    assert (progress["leases"], progress["returned"]) == ([-1, -1, 8], [9])
    assert len(manifest.files) == 4
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) == len(set(lines)) == 6
    assert manifest.replicas["events_bytes"] == (tmp_path / "events.jsonl").stat().st_size


@pytest.mark.parametrize(("compressor", "saves"), [(None, True), ("some", False)])
def test_replicas_that_have_left_out_different_numbers_are_not_rescued(compressor, saves):
    """What the lost one had left out is known to nobody."""
    state: Any = SimpleNamespace(
        own_steps=None,
        reducer=SimpleNamespace(compressor=compressor),
        run=SimpleNamespace(layout=Layout(num_replicas=2)),
    )
    assert training.has_copies(state) == saves
