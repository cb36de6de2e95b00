"""What a micro-batch costs: fitted to steps of one batch that is cut into more and more of them."""

from typing import Any

import pytest
import torch

from benchmarks.microbatches import account, bench_microbatches
from vigpipe.config.options import TrainConfig
from vigpipe.run.facts import prepare
from vigpipe.timing.recorder import Row

pytestmark = pytest.mark.heavy

CPU = torch.device("cpu")


def run(**options: Any):
    options = {"microbatches": 1, "batch_size": 20, **options}
    return prepare(TrainConfig(**options), torch.float32)


def recorded(number):
    """Rows of two equal steps: 2 ms a micro-batch and 3 ms a sample of 20, and more around it."""
    return [
        of_step
        for step in (1, 2)
        for of_step in (
            make_row(step, "forward", "", 0.003 * number + 0.060),
            make_row(step, "stem", "forward", 0.0005 * number + 0.020),
            make_row(step, "block 0", "forward", 0.001 * number + 0.020),
            make_row(step, "block 0/grapher", "forward", 0.5),  # inside a block, which counts it
            make_row(step, "block 1", "forward", 0.001 * number + 0.020),
            make_row(step, "block 1", "recompute", 0.5),  # part of a backward
            make_row(step, "optimizer", "", 0.004),
            make_row(step, "other", "", 0.001),
            make_row(step, "step", "", 9.0),
            make_row(step, "between steps", "", 9.0),
        )
    ]


def make_row(step, name, direction, seconds):
    count, rank, replica, stage = 1, 0, 0, 0
    return Row("train", step, rank, replica, stage, name, direction, count, seconds)


def test_every_part_is_fitted():
    lines = account({m: recorded(m) for m in (1, 2, 10)}, 20).splitlines()
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines[2:]}
    fitted = {name: tuple(cell.strip() for cell in own[-2:]) for name, own in cells.items()}
    assert fitted == {
        "stem, forward": ("0.50", "1.00"),
        "blocks, forward": ("2.00", "2.00"),
        "between the pieces, forward": ("0.50", "0.00"),
        "once a step": ("0.00", "5.00 a step"),
    }
    assert list(cells)[-1] == "once a step"
    assert [cell.strip() for cell in cells["blocks, forward"][:3]] == ["42.0", "44.0", "60.0"]


def test_a_page_is_written(tmp_path):
    bench_microbatches(run(), 0, CPU, tmp_path, 1, "2")
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    for part in ("stem, backward", "blocks, forward", "readout and loss, backward", "once a step"):
        assert f"| {part} " in page
    assert "vig_digits on digits, steps of 20 on one rank, float32" in page
    assert (tmp_path / "rows.csv").read_text(encoding="utf-8").startswith("repeat,1,2\n")
