"""What the page tells of replicas with steps of their own."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import check_refusals
from tests.report.runs import shared_run, write_run
from tests.report.test_charts import traces
from vigpipe.errors import InputError
from vigpipe.replication.metrics import summarize_replicas
from vigpipe.replication.scaling import Reading, predict
from vigpipe.report import curves, replicas
from vigpipe.report.charts import replica_chart
from vigpipe.report.comparison import run_table
from vigpipe.report.page import page
from vigpipe.report.read import read_runs
from vigpipe.report.replica_files import Doing
from vigpipe.report.scaling import readings

ACCOUNT = {
    "items": 30.0,
    "samples": 480.0,
    "averages": 3.0,
    "busy_seconds": 6.0,
    "waiting_seconds": 3.0,
    "averaging_seconds": 1.0,
    "bytes_sent": 2.5e6,
    "peak_bytes": 600e6,
}
SLOW = {**ACCOUNT, "items": 10.0, "samples": 160.0, "busy_seconds": 10.0, "waiting_seconds": 0.0}
BEGAN = 1795590000.0  # in seconds since 1970


def row(replica: int, did: str, start: float, end: float) -> str:
    return json.dumps({"replica": replica, "did": did, "from": BEGAN + start, "to": BEGAN + end})


ROWS = [
    json.dumps({"start": {"replicas": 2}}),
    json.dumps({"replica": 0, "step": 1, "item": 0}),
    row(0, "worked", 1.0, 3.5),
    row(1, "worked", 0.5, 4.0),
    row(0, "waited", 3.5, 4.0),
]


def own_steps_run(
    folder: Path, lines: list[str], *, finished: bool = True, graph: bool = False
) -> Path:
    write_run(folder, timed=False, finished=finished, graph=graph)
    (folder / "events.jsonl").write_text("\n".join(lines))
    if finished:
        replicas = summarize_replicas([[ACCOUNT], [SLOW]])
        samples = "training nodes" if graph else "images"
        if prediction := predict(replicas["each"], samples=samples):
            replicas["scaling"] = prediction.as_table()
        with changed_summary(folder) as summary:
            summary["replicas"] = replicas
    return folder


@contextmanager
def changed_summary(folder: Path) -> Iterator[dict[str, Any]]:
    """Write what becomes of the summary."""
    summary = json.loads((folder / "summary.json").read_text())
    yield summary
    (folder / "summary.json").write_text(json.dumps(summary))


def test_spans_begin_with_the_first_one_and_a_line_that_was_cut_off_is_left_out(tmp_path):
    (run,) = read_runs([own_steps_run(tmp_path / "run", [*ROWS, '{"replica": 1, "di'])])
    assert run.replicas is not None
    assert run.replicas.doings == (
        Doing(0, "worked", 0.5, 3.0),
        Doing(1, "worked", 0.0, 3.5),
        Doing(0, "waited", 3.0, 3.5),
    )
    assert run.replicas.each == ({"replica": 0, **ACCOUNT}, {"replica": 1, **SLOW})
    assert run.replicas.balance["busy"]["efficiency"] == 0.8


def test_a_run_of_replicas_that_march_in_step_has_none_of_it():
    (run,) = read_runs([shared_run(timed=False)])
    assert run.replicas is None
    text = page([run])
    assert "Who did what when" not in text
    assert "efficiency" not in text
    (alone,) = read_runs([shared_run("alone", timed=False, replicas=1)])
    assert "Replicas of alone" not in page([alone])


def test_a_broken_row_is_named(tmp_path):
    def read(line):
        folder = own_steps_run(tmp_path / "run", [*ROWS, line, ""])
        try:
            read_runs([folder])
        finally:
            shutil.rmtree(folder)

    slept, endless = row(0, "slept", 0, 1), json.dumps({"replica": 0, "did": "worked", "from": 1})
    rows = [
        (slept, "line 6: did must be one of worked, waited, .* is slept"),
        (endless, "to must be a number, is missing"),
        ("{", "line 6: is not JSON"),
    ]
    check_refusals(rows, read)


def test_the_page_tells_who_worked_and_what_another_replica_would_bring(tmp_path):
    text = page(read_runs([own_steps_run(tmp_path / "run", ROWS)]))
    cells = ("30", "200.0", "480", "48.0", "60.0%", "30.0%", "10.0%", "3", "2.5 MB", "600 MB")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in text
    assert "<td>0.250</td><td>1.250</td><td>0.800</td>" in text  # of 6 and 10 seconds of work
    assert "steps of their own in run. Loss, accuracy" in text
    assert 'id="chart-replicas-0"' in text
    assert "partial batches" not in text.split("<h2>Replicas of run</h2>")[1]
    # 480 images in 10 s and 160 in 11 s; one more averages for 4 / 3 as long.
    assert (
        "One more replica would give about 91 images/s instead of 63 (+45.3%): it pays, for 25.0% "
        "is what it must bring. One fewer would give about 48 images/s (−23.3%): it pays"
    ) in text
    assert "start another run with another --dp" in text
    assert "rule" not in text[text.index("One more replica") :]  # items of replica 1 are missing


def test_the_page_tells_items_of_partial_batches_apart(tmp_path):
    folder = own_steps_run(tmp_path / "run", ROWS)
    with changed_summary(folder) as summary:
        summary["replicas"]["each"][0] |= {"partial_items": 10, "partial_busy_seconds": 1.0}
    text = page(read_runs([folder]))
    assert "<td>30</td><td>250.0</td>" in text  # 20 items in 5 seconds
    assert "Items of partial batches are told apart: 10 of replica 0 (100.0 ms each)." in text


def test_replicas_of_a_graph_train_on_nodes(tmp_path):
    folder = own_steps_run(tmp_path / "run", ROWS, graph=True)
    (run,) = read_runs([folder])
    text = page([run])
    assert "<th>training nodes</th><th>training nodes/s</th>" in text
    assert re.search(r"One more replica would give about [\d,]+ training nodes/s", text)
    assert "images" not in text.split("<h2>Replicas of run</h2>")[1].split("<dfn>worked")[0]


def test_rows_of_other_replicas_are_faint_lines_of_the_loss(tmp_path):
    folder = own_steps_run(tmp_path / "run", ROWS)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    late = [{**row, "step": row["step"] + 1, "replica": 1} for row in rows if "step" in row]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in late)
    (run,) = read_runs([folder])
    assert [step.number for step in run.steps] == list(range(1, 31))
    assert [step.number for step in run.steps_of_others[1]] == list(range(2, 32))
    names = {bar["name"]: bar["opacity"] for bar in traces(curves.loss_chart([run]))}
    assert (names["training"], names["training, replica 1"]) == (1, 0.45)
    table = dict(run_table([run]))
    assert table["steps"] == ["31"]
    assert ", replica 0" in str(table["images/s, median"][0])


def test_a_run_that_has_not_finished_has_the_picture_of_its_last_spans(tmp_path, monkeypatch):
    monkeypatch.setattr(replicas, "MOST_SPANS", 2)
    text = page(read_runs([own_steps_run(tmp_path / "run", [*ROWS, ""], finished=False)]))
    assert 'id="chart-replicas-0"' in text
    assert "efficiency" not in text
    assert "Who did what when, the last 2 of 3 spans." in text


def test_a_bar_lies_where_the_span_was():
    doings = [Doing(0, "worked", 0.0, 2.0), Doing(2, "averaged", 2.0, 2.5)]
    bars = traces(replica_chart(doings, 3))
    assert [bar["name"] for bar in bars] == ["worked", "averaged"]
    places = [(bar["y"], bar["base"], bar["x"]) for bar in bars]
    assert places == [([0], [0.0], [2.0]), ([2], [2.0], [0.5])]


# ---- more replicas or fewer -----------------------------------------------------------------


def add_rows(folder: Path, *rows: dict) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def steps(first: int, rates: list[float], **whose: int) -> list[dict]:
    """Rows of steps with so many images a second; a step has 100 images."""
    facts = {"epoch": 9, "loss": 1.0, "lr": 0.1}
    return [
        {"step": i, **facts, "step_seconds": 100 / r, "images_per_second": r, **whose}
        for i, r in enumerate(rates, first)
    ]


def resumed(step: int, **facts: int) -> dict:
    return {"event": "resumed", "step": step, "message": "from a checkpoint", **facts}


def test_of_a_run_without_a_prediction_none_is_told_and_one_of_nothing_is_refused(tmp_path):
    folder = own_steps_run(tmp_path / "run", ROWS)
    with changed_summary(folder) as summary:
        scaling = summary["replicas"].pop("scaling")
    assert "More replicas or fewer?" not in page(read_runs([folder]))
    with changed_summary(folder) as summary:
        summary["replicas"]["scaling"] = scaling | {"images_per_second": 0.0}
    with pytest.raises(InputError, match="scaling: images_per_second must be above 0, is 0"):
        read_runs([folder])


def test_replicas_that_march_in_step_are_told_what_the_rules_say(tmp_path):
    folder = write_run(tmp_path / "run", timed=False)
    add_rows(folder, *steps(31, [*[100.0] * 5, *[103.0] * 5]))
    (run,) = read_runs([folder])
    assert readings(run)[-10:] == [Reading(2, 100.0)] * 5 + [Reading(2, 103.0)] * 5
    assert len(readings(run)) == 39  # the first step is left out
    text = page([run])
    assert (
        "Published rule: 3 replicas instead of 2. The last 5 readings differ by +3.0% from the 5 "
        "before, less than 5.0%: one more replica."
    ) in text
    assert (
        "Safer rule: 3 replicas instead of 2. The number of replicas was never changed. Try 3"
    ) in text
    assert "go on from its checkpoint with another --dp" in text


def test_the_rows_of_a_run_that_went_on_tell_how_many_replicas_there_were(tmp_path):
    folder = write_run(tmp_path / "run", timed=False, replicas=3)
    add_rows(
        folder,
        resumed(30),  # by an earlier version, which does not tell it
        *steps(31, [100.0] * 8),
        resumed(38, replicas_before=2),
        resumed(38, replicas_before=2),  # got nowhere
        *steps(39, [50.0, *[120.0] * 5]),
    )
    (run,) = read_runs([folder])
    found = readings(run)
    assert {reading.num_replicas for reading in found[:29]} == {2}
    assert found[29:] == [Reading(2, 100.0)] * 7 + [Reading(3, 120.0)] * 5  # less each first step
    assert (
        "Safer rule: 2 replicas instead of 3. From 2 to 3 replicas throughput changed by +20.0%, "
        "less than +25.0%: go back to 2."
    ) in page([run])


def test_a_step_of_replicas_on_their_own_is_that_of_all_its_items(tmp_path):
    folder = own_steps_run(tmp_path / "run", ROWS)
    (folder / "metrics.jsonl").write_text("")
    quick, slow = [100.0] * 4, [50.0] * 3  # of step 4 one item is missing
    add_rows(folder, *steps(1, quick, replica=0, item=0), *steps(1, slow, replica=1, item=1))
    (run,) = read_runs([folder])
    # 200 images in the mean of 1 and 2 seconds.
    add_rows(folder, resumed(4, replicas_before=4))  # two on each of two hosts
    (run,) = read_runs([folder])
    assert [tuple(reading) for reading in readings(run)] == [(2, pytest.approx(200 / 1.5))] * 2
    assert "Published rule: 2 replicas. Readings so far: 2; the rule needs 10." in page([run])


def test_numbers_that_cannot_be_are_not_believed(tmp_path):
    folder = write_run(tmp_path / "run", timed=False)
    add_rows(
        folder, *steps(31, [-1.0]), resumed(31, replicas_before=10**400), *steps(32, [9.0] * 3)
    )
    with pytest.raises(InputError, match="replicas_before must be at most 9007199254740992"):
        read_runs([folder])


def test_a_server_has_a_table_of_its_own_and_its_accuracy(tmp_path):
    folder = own_steps_run(tmp_path / "run", [ROWS[0], row(2, "averaged", 0.0, 1.0), ""])
    server = {**ACCOUNT, "updates": 24, "staleness": {"0": 6, "1": 18}}
    with changed_summary(folder) as summary:
        summary["replicas"] = summarize_replicas([[ACCOUNT], [SLOW], [server]], has_server=True)
    (run,) = read_runs([folder])
    assert run.replicas is not None
    assert run.replicas.has_server
    assert len(run.replicas.each) == 2
    text = page([run])
    assert ">24</td><td>0.75</td><td>0:6 1:18</td>" in text
    assert "A server applied the gradients of replicas in run." in text
    (bar,) = traces(replica_chart(run.replicas.doings, run.replicas.num_replicas))
    assert bar["hovertext"][0].startswith("server averaged")
    with changed_summary(folder) as summary:
        summary["replicas"]["server"]["staleness"] = {"late": 1}
    with pytest.raises(InputError, match="expected whole numbers as names"):
        read_runs([folder])
