"""Choices of a way to use ranks beside what all ways take."""

import csv
from dataclasses import replace

import pytest
import torch

from benchmarks import plan_graph
from benchmarks.options import PlanGraphBench
from benchmarks.plan_graph import bench_plan_graph
from tests.profiling.test_ways import AS_FEW
from tests.world import run_ranks
from vigpipe.run.facts import prepare

pytestmark = pytest.mark.heavy

CPU = torch.device("cpu")
SMALL = "gcn:8x3@sbm:400,4,12,6"


def _bench(rank, world_size, folder):
    torch.set_num_threads(1)
    options = PlanGraphBench(cases=SMALL, data="sbm:400,4,12,6", shards=1)
    run = prepare(replace(options, shards=world_size), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (*AS_FEW, (plan_graph, "_MOST_STEPS", 1)):
            patch.setattr(module, name, value)
        bench_plan_graph(run, rank, CPU, folder, 1, options)


@pytest.mark.multiprocess
def test_every_way_is_predicted_and_measured(tmp_path):
    run_ranks(_bench, 2, tmp_path)
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    ways = {(row["case"][:4], row["way"]): row for row in rows}
    assert {way for case, way in ways if case == "gcn:"} == {
        *("one rank", "mixed", "halo", "layers", "replicas of parts", "layers, many parts")
    }
    for way in ("mixed", "halo"):
        found = ways["gcn:", way]
        assert 0 < int(found["sent_bytes"]) == int(found["predicted_bytes"])
    assert all(float(row["measured"]) > 0 for row in rows)
    assert "Of 1 cases" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "predicted.png").read_bytes().startswith(b"\x89PNG")
