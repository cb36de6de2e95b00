"""What ranks that share a graph send and hold, counted without them."""

import csv
from dataclasses import replace

import pytest
import torch

from benchmarks.options import SplitBench
from benchmarks.split import _count, bench_split
from tests.graphs.split.test_switch import GAT, GCN, SAGE, traffic
from vigpipe.config.choices import Split
from vigpipe.config.options import TrainConfig
from vigpipe.run.facts import prepare

pytestmark = pytest.mark.heavy

OPTIONS = SplitBench(
    model="sage", aggregator="max", data="sbm:800,4,16,6", width=128, numbers="2,4", threads=1
)


def test_the_page_has_a_row_for_every_way_and_number(tmp_path, capsys):
    bench_split(replace(OPTIONS, out=tmp_path / "page"))
    folder = tmp_path / "page"
    assert "mixed, m = 4: " in capsys.readouterr().out
    with (folder / "rows.csv").open() as file:
        rows = {(row["split"], int(row["shards"])): row for row in csv.DictReader(file)}
    assert set(rows) == {("mixed", 1), *((way, m) for way in ("mixed", "halo") for m in (2, 4))}
    sent = {key: int(row["sent_bytes"]) for key, row in rows.items()}
    # n (m - 1) / m (d_0 + 4 (d_1 + d_2)) numbers of four bytes
    assert sent == {
        ("mixed", 1): 0,
        ("mixed", 2): 4 * 800 // 2 * (16 + 4 * (128 + 128)),
        ("mixed", 4): 4 * 800 * 3 // 4 * (16 + 4 * (128 + 128)),
        **{("halo", m): sent["halo", m] for m in (2, 4)},
    }
    assert 0 < sent["halo", 2] < sent["halo", 4]
    held = {key: int(row["peak_bytes"]) for key, row in rows.items()}
    assert held["mixed", 2] < 0.6 * held["mixed", 1]
    assert held["mixed", 4] < 0.6 * held["mixed", 2]
    balance = {key: [float(row[name]) for name in ("rows", "sources")] for key, row in rows.items()}
    assert balance["mixed", 4] == [1.0, 1.0]
    assert 1.0 <= balance["halo", 4][0] < 1.1 < balance["halo", 4][1]
    assert (folder / "traffic.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "README.md").read_text()
    assert "| mixed    | 4   |" in page
    assert "- command: `vigpipe" in page


@pytest.mark.multiprocess
def test_counts_are_those_of_real_ranks():
    shared: list[tuple[Split, TrainConfig]] = [("mixed", SAGE), ("halo", GAT), ("halo", GCN)]
    configs = [replace(c, split=split, dropout=0.2, norm="batch") for split, c in shared]
    for (split, _), config, sent in zip(shared, configs, traffic(3, configs), strict=True):
        counted = _count(prepare(config, torch.float64), split, 3)
        assert counted.sent_bytes == sum(sent.values())
