"""Full batches count; those of the end of an epoch, which have fewer samples, are told apart."""

import pytest

from tests.timing.test_tables import row
from vigpipe.analysis.account import make_accounts
from vigpipe.parallel.layout import Layout
from vigpipe.timing.partial import full_batches, partial_batches, partial_sentence
from vigpipe.timing.recorder import Row
from vigpipe.timing.tables import slowest, step_statistics, study_table, tables

FULL, PARTIAL = {"samples": 1000, "full_batch": 1000}, {"samples": 280, "full_batch": 1000}


def epochs(*names: str, full: float = 8.7, partial: float = 2.5, num: int = 3) -> list[Row]:
    """Epochs of 1,280 images in batches of 1,000: names that take as long as the whole step."""
    return [
        row(name, seconds + 0.1 * epoch, step=2 * epoch + i, stage=stage, **of_batch)
        for epoch in range(num)
        for i, (seconds, of_batch) in enumerate(((full, FULL), (partial, PARTIAL)))
        for name, stage in [("step", -1), *((name, 0) for name in names)]
    ]


def test_figures_are_those_of_full_batches():
    # Once the median of both kinds was told, 2.7 s where a full step took 8.7 s.
    rows = epochs("forward", "block 3")
    only_full = [row for row in rows if row.samples == 1000]
    assert full_batches(rows) == only_full
    found = step_statistics(rows, "train")
    assert found is not None
    assert (found.count, found.median) == (3, pytest.approx(8.8))
    assert slowest(rows, "train") == slowest(only_full, "train")
    assert make_accounts(rows, Layout()) == make_accounts(only_full, Layout())
    assert tables(rows) == tables(only_full)
    assert study_table(rows) == study_table(only_full)


def test_partial_batches_are_told_by_phase_and_size_on_their_slowest_rank():
    rows = [
        *epochs(),
        row("step", 9.0, step=1, rank=1, **PARTIAL),
        row("forward", 99.0, step=1, **PARTIAL),
        row("step", 0.5, phase="test", step=4, samples=28, full_batch=1000),
        row("step", 0.7, phase="test", step=3, **PARTIAL),
    ]
    train, larger, smaller = partial_batches(rows)
    assert (train.phase, train.samples, train.full_batch) == ("train", 280, 1000)
    assert train.seconds == pytest.approx([9.0, 2.6, 2.7])
    assert not train.are_counted
    assert [(b.phase, b.samples, b.seconds) for b in (larger, smaller)] == [
        *(("test", 280, [0.7]), ("test", 28, [0.5]))
    ]
    assert larger.are_counted


def test_the_sentence_has_its_numbers():
    rows = epochs()
    (batch,) = partial_batches(rows)
    assert partial_sentence(batch) == (
        "Partial batch of 280 of 1,000 samples: 3 training steps, median 2,600.000 ms, 2,500.000 "
        "to 2,700.000 ms; other figures leave it out."
    )
    (batch,) = partial_batches([row("step", 0.5, phase="test", **PARTIAL)])
    assert partial_sentence(batch, "sub-graphs") == (
        "Partial batch of 280 of 1,000 sub-graphs: 1 test batch, 500.000 ms; no full test batch "
        "was timed, so other figures are of this one."
    )
