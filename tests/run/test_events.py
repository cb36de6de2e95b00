"""A record is refused before anything trains if a run with these options cannot have left it."""

import json

import pytest
import torch

from tests.refusals import check_refusals
from vigpipe.config.options import TrainConfig
from vigpipe.run.events import read_events, start_facts
from vigpipe.run.facts import prepare

OPTIONS = TrainConfig(
    model="gcn",
    data="sbm:60,2,4",
    sampler="parts",
    partition="random",
    parts=4,
    dp=2,
    steps=4,
    strategy="periodic",
    average_every=2,
)


@pytest.fixture(scope="module")
def run():
    return prepare(OPTIONS, torch.float32)


def test_a_record_is_checked_as_a_whole(run, tmp_path):
    steps = [{"replica": r, "step": s + 1, "item": 2 * s + r} for s in range(4) for r in range(2)]
    met = [{"replica": r, "step": 2 * n, "average": n} for n in (1, 2) for r in range(2)]
    rows = [*steps[:4], *met[:2], *steps[4:], *met[2:]]

    def read(rows, is_whole=True, start=None):
        lines = [json.dumps(row) for row in ({"start": start or start_facts(run)}, *rows)]
        (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
        (tmp_path / "summary.json").unlink(missing_ok=True)
        if is_whole:
            (tmp_path / "summary.json").write_text("{}")
        return read_events(tmp_path, run)

    assert [of.items for of in read(rows)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert read(rows[:6], is_whole=False)  # of a run that was stopped
    older = start_facts(run)
    older["images"] = older.pop("data")
    assert read(rows, start=older)
    table = [
        (rows[:-1], "replica 1 has come to 1 averages, and replica 0 to 2, which would wait"),
        (rows[:6], "4 of the run's 8 items are not there; give a run whose record is whole"),
        ([*rows[:7], {**rows[7], "item": 10**17}, *rows[8:]], "taken item 10+, .* 0 … 7; give"),
        ([{**row, "item": 0} if "item" in row else row for row in rows], "item 0, expected 2"),
    ]
    check_refusals(table, read, where=f"{tmp_path / 'events.jsonl'}: ")
    (tmp_path / "events.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match="is no event; give a run whose record is whole"):
        read_events(tmp_path, run)
