"""What is read of a timed run's files, and what is refused."""

import json
from dataclasses import replace

import pytest

from tests.refusals import check_refusals
from tests.report.runs import NUM_STEPS, NUM_WARMUP, gpipe, shared_run, write_run
from vigpipe.errors import InputError
from vigpipe.report.fields import parse_object
from vigpipe.report.timing_files import COLUMNS, read_timing


def read(folder):
    path = folder / "summary.json"
    return read_timing(folder, parse_object(path.read_text(), str(path)))


def test_everything_that_was_written_is_read():
    timing = read(shared_run(microbatches=3, slow=1.5))
    assert timing is not None
    assert {row.step for row in timing.rows if row.phase == "train"} == set(
        range(NUM_WARMUP + 1, NUM_STEPS + 1)
    )
    assert timing.timeline is not None
    assert list(timing.timeline.measured) == gpipe(2, 2, 3, 1.5)
    assert list(timing.timeline.predicted) == gpipe(2, 2, 3, 1.0)
    assert [account.rank for account in timing.accounts] == [0, 1, 2, 3]
    for account in timing.accounts:
        assert sum(account.seconds.values()) == pytest.approx(account.step_seconds)
    assert timing.bubble is not None
    assert timing.bubble.measured == 0.262
    assert timing.bubble.imbalance == 0.041
    assert timing.peak_bytes[3] == 653_000_000
    assert timing.overhead == 0.0042


def test_files_from_before_batches_were_told_are_read_and_every_step_counts():
    told, old = (read(shared_run(partial=28, told=told)) for told in (True, False))
    assert told is not None
    assert old is not None
    assert {row.samples for row in told.rows} == {100, 28}
    assert [replace(row, samples=0, full_batch=0) for row in told.rows] == list(old.rows)
    assert all(row.is_full for row in old.rows)


def test_what_a_run_of_one_stage_cannot_tell_is_nothing(tmp_path):
    folder = write_run(tmp_path / "run", stages=1, replicas=1)
    summary = json.loads((folder / "summary.json").read_text())
    summary["timing"]["bubble"] = None
    (folder / "summary.json").write_text(json.dumps(summary))
    timing = read(folder)
    assert timing is not None
    assert timing.bubble is None


def test_a_last_row_cut_short_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run")
    whole = read(folder)
    table = folder / "timing.csv"
    table.write_text(table.read_text() + "train,31,0,0,-1,st")
    assert whole is not None
    assert read(folder) == whole


ROW = f"{COLUMNS}\ntrain,1,0,0,-1,step,"
BROKEN = [
    ("timing.csv", "", "the columns must be phase,.*, are missing"),
    ("timing.csv", "a,b\n", "are a,b"),
    ("timing.csv", f"{COLUMNS}\ntrain,1\n", "line 2: is not a row"),
    ("timing.csv", f"{COLUMNS}\nplay,1,0,0,-1,step,,1,0.5\n", "line 2: is not a row"),
    ("timing.csv", f"{ROW}up,1,0.5\n", "line 2: is not a row"),
    ("timing.csv", f"{ROW},1,inf\n", "line 2: is not a row"),
    ("timing.csv", f"{ROW},1,0.5,a,9\n\n", "line 2: is not a row"),
    ("timeline.json", "{", "is not JSON"),
    ("timeline.json", "{}", "step must be a whole number"),
    ("timeline.json", [[0, "forward", 0.0, 1.0]], r"measured\[0\] must be \[rank, kind"),
    ("timeline.json", [[0, "sleep", 0.0, 1.0, 0, 0]], "kind must be one of forward, .*'sleep'"),
    ("timeline.json", [[0, "send", 2.0, 1.0, 0, 0]], "ends at 1.0 before it starts at 2.0"),
    ("timeline.json", [["0", "send", 0.0, 1.0, 0, 0]], 'rank must be a whole .*, is "0"'),
]


def test_a_broken_file_is_named(tmp_path):
    folder = write_run(tmp_path / "run")

    def read_broken(file, content):
        if isinstance(content, list):
            known = {"step": 1, "microbatches": 1, "clock_error_seconds": 0.0, "predicted": []}
            content = json.dumps({**known, "measured": content})
        before = (folder / file).read_bytes()
        (folder / file).write_text(content)
        try:
            read(folder)
        finally:
            (folder / file).write_bytes(before)

    rows = [(file, content, f"{file}.*{words}") for file, content, words in BROKEN]
    check_refusals(rows, read_broken, where=folder)
    summary = json.loads((folder / "summary.json").read_text())
    del summary["timing"]["bubble"]["transfer"]
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(InputError, match="transfer must be a number, is missing"):
        read(folder)
