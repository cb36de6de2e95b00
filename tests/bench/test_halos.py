"""What ranks learn whose halos are exact, late, or sampled."""

import csv
from dataclasses import replace

import pytest

from vigpipe.bench.halos import bench_halos
from vigpipe.bench.options import HalosBench
from vigpipe.errors import InputError

OPTIONS = HalosBench(
    data="sbm:300,4,12,6", width=8, epochs=4, shards=2, seeds=1, halos="exact,stale"
)


@pytest.mark.multiprocess
@pytest.mark.heavy
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


def test_what_cannot_be_compared_is_refused(tmp_path):
    for options, message in (
        ({"model": "vig_digits"}, "is a model of images"),
        ({"shards": 1}, "--shards 1: ranks with parts need 2 or more"),
        ({"halos": "exact,late"}, "--halo late: must be exact, stale, or sampled:P"),
        ({"halo": "stale"}, "--halo stale: differs from run to run here"),
        ({"seeds": 0}, "--seeds 0: must be at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            bench_halos(replace(OPTIONS, out=tmp_path / "none", **options))
    assert not (tmp_path / "none").exists()
