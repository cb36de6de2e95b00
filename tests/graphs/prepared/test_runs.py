"""Runs on a prepared folder: its options, and the same training as on what it was made of."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import vigpipe
from tests.graphs.prepared.folders import DENSE, OTHER, write
from tests.predicted import predicted
from tests.refusals import check_refusals
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.commands.check import trace
from vigpipe.commands.differences import differences
from vigpipe.config.options import TrainConfig
from vigpipe.config.verbs import PredictConfig
from vigpipe.errors import InputError
from vigpipe.graphs.job import GraphJob
from vigpipe.graphs.prepared.files import Files
from vigpipe.inference.samples import NodeSamples
from vigpipe.job.feed import Needs
from vigpipe.run.evaluation import evaluate_all
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

CPU = torch.device("cpu")
BASE = TrainConfig(model="sage", width=8, dropout=0.3, steps=3, dtype="float64", seed=2)
PARTS = replace(BASE, sampler="parts")


def prepared(config, folder, **options) -> Any:
    return prepare(replace(config, data=str(folder), **options), torch.float64)


def test_the_folder_decides_what_is_not_said(tmp_path):
    write(tmp_path / "f", method="random", parts=3)
    config = prepared(PARTS, tmp_path / "f").config
    found = config.features, config.symmetric, config.partition, config.parts
    assert found == ("raw", True, "random", 3)
    config = prepared(BASE, tmp_path / "f").config
    assert (config.features, config.symmetric, config.partition) == ("raw", True, None)
    assert prepared(PARTS, tmp_path / "f", features="raw", symmetric=True).config.parts == 3


def test_what_contradicts_it_is_refused_and_a_folder_without_a_manifest(tmp_path):
    write(tmp_path / "f")
    said = "was prepared with --"
    rows = [
        ("f", {"features": "row"}, f"{said}features raw, but --features row is asked for"),
        ("f", {"symmetric": False}, f"{said}symmetric, but --no-symmetric is asked for"),
    ]
    rows = [(*row, f"f: {why}; leave it out, or prepare another folder") for *row, why in rows]
    rows += [("", {}, "no such graph; give one of .* a prepared folder or sbm")]
    check_refusals(rows, lambda name, options: prepared(BASE, tmp_path / name, **options))


def test_other_parts_are_made_and_kept_beside_the_folder(tmp_path):
    write(tmp_path / "f")
    own = prepared(PARTS, tmp_path / "f").job
    other = prepared(PARTS, tmp_path / "f", parts=4).job
    assert isinstance(own, GraphJob)
    assert own.partition is own.graph.partition  # pyrefly: ignore[missing-attribute]
    assert other.partition.num_parts == 4
    assert [path.name[:8] for path in (tmp_path / "f.parts").iterdir()] == ["metis-4-"]


SAMPLERS: dict[str, dict[str, Any]] = {
    "full": {},
    "parts": {"partition": "metis", "parts": 6, "merge": 2},
    "saint-walk": {"roots": 30, "walk_length": 2, "coverage": 5},
    "neighbour": {"batch_nodes": 60, "fanout": "3"},
}


def traced(config, data):
    rank_state = make_rank_state(prepare(replace(config, data=data), torch.float64), 0, CPU)
    found = trace(rank_state, 3)
    assert found is not None
    return found, evaluate_all(rank_state)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_one_part_trains_as_the_graph_itself_bit_for_bit(sampler, tmp_path):
    write(tmp_path / "f", parts=1, method="random")
    config = replace(BASE, sampler=sampler, **SAMPLERS[sampler])
    ours, scores = traced(config, str(tmp_path / "f"))
    reference, its_scores = traced(config, "sbm:300,4,5,6")
    assert all(row.identical for row in differences(ours, reference))
    assert scores == its_scores


def take_all(run, items, has_first=True):
    """Let replica 1 of a run make batches."""
    feed = run.job.feed(Needs(run.layout, 1, CPU, torch.float32, has_first, has_last=True))
    for item in items:
        feed.batch(item)
    feed.close()


def test_a_replica_with_parts_of_its_own_reads_no_others(tmp_path, monkeypatch):
    write(tmp_path / "f")
    mapped, read = Files._mapped, set()

    def told(self, name):
        read.add(name)
        return mapped(self, name)

    monkeypatch.setattr(Files, "_mapped", told)
    options = {"strategy": "periodic", "average": 2, "dp": 2, "items": "own"}
    take_all(prepared(PARTS, tmp_path / "f", **options), (1, 3, 5))
    own = {f"{kind}/0000{part}.safetensors" for kind in ("edges", "features") for part in (1, 3, 5)}
    assert read == {"nodes.safetensors"} | own
    read.clear()
    take_all(prepared(PARTS, tmp_path / "f", **options, stages=2), (1, 3, 5), has_first=False)
    assert read == {"nodes.safetensors"} | {name for name in own if name.startswith("edges")}


def test_damage_ends_a_run_in_a_sentence_also_where_it_is_read_ahead(tmp_path):
    write(tmp_path / "f")
    (tmp_path / "f" / "features" / "00002.safetensors").unlink()
    run = prepared(PARTS, tmp_path / "f")
    feed = run.job.feed(Needs(run.layout, 0, CPU, torch.float32, has_first=True, has_last=True))

    def all_items():
        return [feed.batch(item, range(item + 1, 6)) for item in range(6)]

    with pytest.raises(InputError, match=r"features/00002\.safetensors: cannot be read"):
        all_items()
    feed.close()


def test_predictions_have_the_users_numbers(tmp_path):
    write(tmp_path / "f", OTHER)
    write(tmp_path / "one", OTHER, parts=1)
    run = prepared(replace(BASE, dtype="float32", width=4), tmp_path / "f")
    weights = tmp_path / "w.safetensors"
    save_weights(weights, run.build().float().state_dict(), run.weights_metadata())
    loaded = vigpipe.load_graph_model(weights)
    ours, reference = (
        loaded.model(*loaded.transform(str(tmp_path / name))) for name in ("f", "one")
    )
    torch.testing.assert_close(ours, reference)
    of_folders = []
    for name in ("f", "one"):
        config = PredictConfig(weights=weights, data=str(tmp_path / name))
        samples = NodeSamples.of(config, str(tmp_path / name), "test")
        of_folders.append(predicted(samples, make_rank_state(samples.run, 0, CPU)))
    ours, reference = of_folders
    nodes = [row.node for row in ours]
    assert nodes == [row.node for row in reference] == sorted(nodes)
    assert [(r.name, r.labels) for r in ours] == [(r.name, r.labels) for r in reference]
    assert ours[0].name == f"näme {nodes[0]}"
    assert DENSE.split[nodes[0]] == 2
