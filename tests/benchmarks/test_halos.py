"""What ranks learn whose halos are exact, late, or sampled."""

import csv
import sys

import pytest

from tests.world import run_command

pytestmark = pytest.mark.heavy


@pytest.mark.multiprocess
def test_every_halo_has_a_row_and_a_curve(tmp_path):
    folder = tmp_path / "page"
    options = "--data sbm:300,4,12,6 --width 8 --epochs 4 --shards 2 --seeds 1 --halos exact,stale"
    words = ["halos", *options.split(), "--out", str(folder)]
    done = run_command([sys.executable, "-m", "benchmarks", *words])
    assert done.returncode == 0, done.stderr
    assert "stale with seed 0: accuracy " in done.stdout
    with (folder / "rows.csv").open() as file:
        rows = {row["halo"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"exact", "stale"}
    assert rows["exact"]["halo_bytes"] == rows["stale"]["halo_bytes"] != "0"
    assert rows["exact"]["loss"] != rows["stale"]["loss"]
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "| exact    |" in (folder / "README.md").read_text()
