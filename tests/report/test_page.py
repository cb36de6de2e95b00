"""The page as text, and as a reader sees it in a real browser that has no network."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.browser import Visit, need_browser, share_of, visit
from tests.report.runs import going_on, shared_run, write_run
from vigpipe.errors import InputError
from vigpipe.report.page import write_report
from vigpipe.timing.boxes import COLOURS

HOSTILE = "<script>document.title='broken'</script><img src=http://example.invalid/x.png>"
CHARTS = (
    "loss",
    "accuracy",
    "learning-rate",
    "throughput",
    "account-0",
    "timeline-0",
    "pieces-train-0",
)


COUNT_WIDE = """<script>addEventListener("load", () => {
    const boxes = [document.documentElement, ...document.querySelectorAll(".wide")];
    const wide = boxes.filter(box => box.scrollWidth > box.clientWidth);
    document.body.dataset.wide = wide.length;
})</script>"""


@pytest.fixture(scope="session")
def browser():
    need_browser()


def shown(text: str) -> str:
    """The page without its scripts and styles."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)


def seen_in_browser(page: Path, *, add: str = "", **window: Any) -> Visit:
    """What a browser shows of a page with something added at its end."""
    page.write_text(page.read_text(encoding="utf-8") + add, encoding="utf-8")
    folder = page.with_name("browser")
    folder.mkdir()
    return visit(page, folder, **window)


def lacks(text: str, *words: str) -> list[str]:
    return [each for each in words if each not in text]


def text_of(*runs: Path) -> str:
    """What a reader sees of the page of some runs, as it is on the disk."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "new", "report.html")
        write_report(runs, out)
        return shown(out.read_text(encoding="utf-8"))


def test_the_page_holds_every_table():
    text = text_of(shared_run())
    wanted = (
        "<h1>vigpipe report: run</h1>",
        "2 replicas × 2 stages, 4 micro-batches, gpipe",
        "The bubble is 26.2% of the step; the formula for equal stages says 20.0%.",
        "<th>fill and drain</th><th>imbalance</th><th>variation</th><th>transfer</th>",
        "<td>26.2%</td><td>20.0%</td><td>20.0%</td><td>4.1%</td><td>1.3%</td><td>0.8%</td>",
        "Timing itself costs 0.42% of a step.",
        "The number in a box is the micro-batch",
        "clocks agree within 0.020 ms",
        '<td title="0123456789abcdef0123456789abcdef01234567+">0123456789+</td>',
        "<dfn>bubble</dfn>: the share of a step",
        *(f"<dfn>{term}</dfn>" for term in ("imbalance", "wait gradient", "p95")),
        "<h3>Training steps</h3>",
        "<h3>Test batches</h3>",
        '<td class="name">kNN</td><td class="name">forward</td>',
        '<td class="name">block 3, aggregation</td>',
    )
    assert lacks(text, *wanted) == []
    unwanted = ("Comparison", "not timed", *PARTIAL, *VALIDATION)
    assert lacks(text, *unwanted) == [*unwanted]


PARTIAL = ("Partial batches", "Full batches only", "partial batch, median")
VALIDATION = (
    "dashes and dots: of the validation images",
    "top-1 of the validation images",
    "<dfn>validation image</dfn>",
    ">validation top-1<",
)


def test_partial_batches_stand_apart_in_the_page():
    wanted = (
        *PARTIAL,
        "Partial batch of 28 of 100 samples: 2 training steps, median ",
        "Partial batch of 28 of 100 samples: 1 test batch, ",
        "on the rank that took longest. Full batches only.",
        '<td class="name">step with a partial batch, median</td>',
        "at the end of an epoch, are left out if there are others",
    )
    assert lacks(text_of(shared_run(partial=28)), *wanted) == []


def test_the_page_explains_the_lines_that_its_charts_have():
    assert lacks(text_of(shared_run(timed=False, validated=True)), *VALIDATION) == []


def test_the_page_speaks_of_nodes_where_a_run_is_on_a_graph():
    images = shared_run("images", timed=False, validated=True)
    nodes = shared_run("nodes", validated=True, graph=True, replicas=1)
    of_nodes = (
        "an epoch's training nodes; dotted: of the test nodes; dashes and dots: of the validation",
        "Solid: accuracy of the test nodes; dotted: macro-F1",
        "Nodes a second; evaluations",
        *(f"<dfn>{term}</dfn>" for term in ("epoch of a graph", "validation node", "macro-F1")),
        *(f"<dfn>{term}</dfn>" for term in ("block of a graph model", "update")),
    )
    text = text_of(nodes)
    assert lacks(text, *of_nodes) == []
    assert lacks(text, "top-", "image", "kNN", "FFN") == ["top-", "image", "kNN", "FFN"]
    of_both = (
        "an epoch's training images or nodes",
        "Solid: top-1 of the test images; dotted: top-5;",
        of_nodes[1],
        "Images or nodes a second",
        "<dfn>validation image</dfn>",
        "<dfn>validation node</dfn>",
    )
    assert lacks(text_of(images, nodes), *of_both) == []


def test_runs_without_timing_and_without_end_are_shown_with_what_they_have(tmp_path):
    runs = shared_run("untimed", timed=False), shared_run("dead", finished=False)
    write_report(runs, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("* plotly.js v") == 1
    text = shown(page)
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=(?!\"data:)", text)
    wanted = (
        "untimed was not timed: there is no bubble",
        "which vigpipe train --timing records",
        "dead has not finished: it ended after step 30",
        "This run has no bubble accounting; a run of vigpipe train --timing",
        'id="chart-timeline-1"',
        "<h2>Comparison</h2>",
    )
    assert lacks(text, *wanted) == []
    assert "Time of untimed" not in text
    assert 'id="chart-timeline-0"' not in text


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(tmp_path):
    begun, going = tmp_path / "begun", write_run(tmp_path / "going", timed=False, finished=False)
    with going_on(begun), going_on(going):
        text, of_begun = text_of(going), text_of(begun)
    assert "going is still running: step 30 is done, of epoch 2 of 2." in text
    assert "has not finished" not in text
    assert 'id="chart-learning-rate"' in text
    assert "begun is still running: it has not made its first step." in of_begun
    assert "<h2>Loss" not in of_begun


def test_no_section_is_empty(tmp_path):
    begun, late = tmp_path / "begun", write_run(tmp_path / "late", timed=False, finished=False)
    (late / "config.toml").write_text("timing = true\n")
    timed = write_run(tmp_path / "timed", finished=False)
    rows = timed / "timing.csv"
    rows.write_text(rows.read_text().splitlines(keepends=True)[0])
    timeline = {"step": 1, "microbatches": 1, "clock_error_seconds": 0.0}
    timeline |= {"measured": [], "predicted": []}
    (timed / "timeline.json").write_text(json.dumps(timeline))
    with going_on(begun), going_on(late):
        text = text_of(begun, timed, late)
    headings = re.split(r"<h[2-4]>", text)
    assert all(re.search(r"<table|<div|<li>|<p>", part) for part in headings[2:])
    assert "Time of" not in text
    assert "no tables of stages and blocks of late until the run ends" in text
    assert "begun, timed were not timed" in text


def test_a_page_that_cannot_be_written_is_refused(tmp_path):
    run = write_run(tmp_path / "run", timed=False)
    folder, theirs = tmp_path / "folder.html", tmp_path / "theirs.html"
    folder.mkdir()
    theirs.write_text("<p>precious</p>")
    for out, reason in (
        (tmp_path / "page", r"must end in \.html"),
        (folder, "is a folder"),
        (theirs, "is there already, and this command did not write it"),
        (run / "config.toml" / "report.html", "cannot be written"),
    ):
        with pytest.raises(InputError, match=rf"--out .*: {reason}") as caught:
            write_report([run], out)
        assert str(out) in str(caught.value)
    assert theirs.read_text() == "<p>precious</p>"
    for _ in range(2):  # its own page is made again
        write_report([run], tmp_path / "report.html")


def test_text_of_files_never_becomes_markup(tmp_path):
    write_report([write_run(tmp_path / "<b>run", model=HOSTILE)], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;document.title=" in text
    assert "<script>document" not in text
    assert "<img" not in shown(text)
    assert "<b>" not in text.split("* plotly.js v")[0]
    assert "<b>" not in shown(text)


@pytest.mark.browser
@pytest.mark.heavy
def test_a_reader_without_network_sees_tables_and_charts(browser, tmp_path):
    # Steps of the second run take seconds, which makes wide tables.
    runs = [write_run(tmp_path / "timed", model=HOSTILE), write_run(tmp_path / "b", slow=300)]
    write_report(runs, tmp_path / "report.html")
    seen = seen_in_browser(tmp_path / "report.html", add=COUNT_WIDE, width=1400, height=6500)
    assert seen.console == []
    assert 'data-wide="0"' in seen.dom, "something scrolls sideways"
    assert seen.requests == []
    assert "<title>vigpipe report: timed, b</title>" in seen.dom
    for name in CHARTS:
        chart = seen.dom.split(f'id="chart-{name}"')[1].split("</script>")[0]
        assert '<svg class="main-svg"' in chart
        assert re.search(r'<g class="trace (bars|scatter)', chart), name
    assert len(re.findall(r'<g class="point"', seen.dom)) > 100
    assert seen.dom.count("<table") >= 9
    assert seen.pixels.shape == (6500, 1400, 3)
    colours = np.unique(seen.pixels.reshape(-1, 3)[::7], axis=0)
    assert len(colours) > 100
    for kind in ("forward", "backward", "wait gradient", "all-reduce", "optimizer"):
        assert share_of(seen.pixels, COLOURS[kind]) > 0.0003, kind
    assert share_of(seen.pixels, "#ffffff") > 0.5


@pytest.mark.browser
@pytest.mark.heavy
def test_the_page_follows_the_reader_into_the_dark(browser, tmp_path):
    write_report([shared_run()], tmp_path / "report.html")
    seen = seen_in_browser(tmp_path / "report.html", height=4000, dark=True)
    assert share_of(seen.pixels, "#ffffff") < 0.001
    assert share_of(seen.pixels, "#16181c") > 0.5
    assert share_of(seen.pixels, COLOURS["forward"]) > 0.01


@pytest.mark.browser
@pytest.mark.heavy
def test_zooming_makes_room_for_the_numbers_of_micro_batches(browser, tmp_path):
    page = tmp_path / "report.html"
    write_report([shared_run(stages=8, replicas=1, microbatches=64)], page)
    zoom = """<script>addEventListener("load", async () => {
        const chart = document.getElementById("chart-timeline-0");
        const count = () => [...chart.querySelectorAll("text.bartext")]
            .filter(text => text.style.display != "none").length;
        const before = count();
        await Plotly.relayout(chart, {"xaxis.range": [100, 150]});
        const ranges = JSON.stringify([chart.layout.xaxis.range, chart.layout.xaxis2.range]);
        document.title = `${before} numbers, then ${count() > 0}, ${ranges}`;
    })</script>"""
    seen = seen_in_browser(page, add=zoom, height=600)
    assert "<title>0 numbers, then true, [[100,150],[100,150]]</title>" in seen.dom
    assert seen.console == []


@pytest.mark.browser
@pytest.mark.heavy
def test_a_page_that_asks_the_network_or_fails_is_caught(browser, tmp_path):
    # Else the tests above could not fail.
    page = tmp_path / "bad.html"
    page.write_text(
        "<!DOCTYPE html><img src='http://example.invalid/x.png'><script>undefined_name()</script>"
    )
    seen = seen_in_browser(page, height=400)
    assert seen.requests == ["http://example.invalid/x.png"]
    assert any("undefined_name is not defined" in line for line in seen.console)
    assert share_of(seen.pixels, COLOURS["forward"]) == 0


@pytest.mark.browser
@pytest.mark.heavy
def test_the_page_s_policy_forbids_requests_even_to_what_slipped_in(browser, tmp_path):
    page = tmp_path / "report.html"
    write_report([shared_run(timed=False)], page)
    image = "<img src='http://example.invalid/x.png'>"
    seen = seen_in_browser(page, add=image, height=400)
    assert seen.requests == []
    assert any("Content Security Policy" in line for line in seen.console)
