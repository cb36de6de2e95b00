"""Predicted steps beside measured ones, and every cut beside the planner's."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import cuts
from benchmarks.predict import bench_predict, compare_steps, list_cases
from benchmarks.side_by_side import Timings
from tests.planning.profiles import make_profile
from tests.profiling.quick import FEWEST
from tests.world import run_ranks
from vigpipe.config.options import TrainConfig
from vigpipe.parallel.layout import Layout
from vigpipe.run.facts import prepare

pytestmark = pytest.mark.heavy


def run(**options: Any):
    options = {"stages": 2, "microbatches": 2, "sync": "double", **options}
    return prepare(TrainConfig(**options), torch.float32)


def test_errors_are_shares_of_what_was_measured():
    # Blocks of one second a row: rows of 2 and S = 1 take M x 4 blocks x (2 + 4) s.
    steady = ((1.0,),) * 10
    profile = make_profile([1.0] * 4, rounds=steady)
    one = replace(run(batch_size=4), layout=Layout(1, 2))
    (case,) = [c for c in list_cases(4, 4) if c.layout == Layout(1, 2)]
    for measured, is_inside in ((60.0, 0), (49.0, 1)):
        timings = Timings({str(case): [measured]}, str(case))
        lines, errors, num_inside = compare_steps(profile, one, [case], timings)
        assert lines[0][1:3] == ("48000.0", "45688.9 – 50428.0")  # 3 % x 1.645, as logarithms
        assert errors == [pytest.approx(1 - 48 / measured)]
        assert num_inside == is_inside


def _bench(rank, world_size, folder):
    torch.set_num_threads(1)
    for module, name, value in FEWEST:
        setattr(module, name, value)
    one = run(batch_size=5, microbatches=5)
    for name, bench in (("predict", bench_predict), ("cuts", cuts.bench_cuts)):
        (folder / name).mkdir(exist_ok=True)
        bench(one, rank, torch.device("cpu"), folder / name, 1)


@pytest.mark.multiprocess
def test_both_write_what_they_found(tmp_path):
    run_ranks(_bench, 2, tmp_path)
    for name in ("predict", "cuts"):
        assert {"README.md", "rows.csv", "profile.json"} <= {
            path.name for path in (tmp_path / name).iterdir()
        }
    text = (tmp_path / "predict" / "README.md").read_text()
    assert f"median over {len(list_cases(4, batch_size=5))} layouts" in text
    text = (tmp_path / "cuts" / "README.md").read_text()
    assert "best of all 3 cuts" in text
