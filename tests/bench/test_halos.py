"""What ranks learn whose halos are exact, late, or sampled."""

import csv
from dataclasses import replace

import pytest

from vigpipe.bench.halos import bench_halos
from vigpipe.bench.options import HalosBench

pytestmark = pytest.mark.heavy

OPTIONS = HalosBench(
    data="sbm:300,4,12,6", width=8, epochs=4, shards=2, seeds=1, halos="exact,stale"
)


@pytest.mark.multiprocess
def test_every_halo_has_a_row_and_a_curve(tmp_path, capsys):
    folder = tmp_path / "page"
    bench_halos(replace(OPTIONS, out=folder))
    assert "stale, seed 0: accuracy " in capsys.readouterr().out
    with (folder / "rows.csv").open() as file:
        rows = {row["halo"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"exact", "stale"}
    assert rows["exact"]["halo_bytes"] == rows["stale"]["halo_bytes"] != "0"
    assert rows["exact"]["loss"] != rows["stale"]["loss"]
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "| exact    |" in (folder / "README.md").read_text()
