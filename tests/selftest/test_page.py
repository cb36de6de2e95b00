"""The page and the JSON of a self-test of eight GPUs, from made-up measurements."""

import json
from dataclasses import replace

import pytest

from tests.report.browser import need_browser, share_of, visit
from tests.selftest.made_up import result
from vigpipe.selftest.page import as_json, page, summary
from vigpipe.selftest.rows import Row


def test_the_summary_counts_and_names_what_failed():
    text = summary(result())
    assert text.startswith(
        "On 8 × NVIDIA H200; Some processor, 16 cores: 18 passed, 5 failed, 152 measured, "
        "1 skipped, in 571 s. Failed: operators: knn: ties, 37 nodes (Triton) ("
    )
    assert "; check: 4 stages × 1 replica, float64 (differs" in text
    assert "it ended with 134 instead of 70" in text


def test_the_page_has_every_part_and_where_it_comes_from():
    text = page(result())
    headings = ("Operators", "Layouts against", "Messages between GPUs", "Killed and", "Kernel")
    for heading in headings:
        assert f"<h2>{heading}" in text
    assert "8 × NVIDIA H200, 150.11 GB, 132 multiprocessors, compute capability 9.0" in text
    assert "torch 2.11.0, CUDA 13.2, cuDNN 91500, NCCL 2.29.1, Triton 3.9.0" in text


def test_text_is_escaped():
    whole = result()
    rows = [Row("<script>alert(1)</script>", "failed", note="<b>")]
    text = page(replace(whole, parts=[replace(whole.parts[0], rows=rows)]))
    assert "&lt;script&gt;alert(1)" in text
    assert "<script>alert(1)" not in text


def test_the_json_is_strict_and_has_every_row():
    whole = result()
    rows = [Row("x", "failed", {"forward": float("nan"), "seconds": [1.0, float("inf")]})]
    whole = replace(whole, parts=[replace(whole.parts[0], rows=rows), *whole.parts[1:]])
    read = json.loads(as_json(whole), parse_constant=pytest.fail)
    assert read["parts"][0]["rows"][0]["values"] == {"forward": "nan", "seconds": [1.0, "inf"]}
    assert [len(part["rows"]) for part in read["parts"]] == [len(p.rows) for p in whole.parts]
    assert read["machine"]["gpus"][7]["name"] == "NVIDIA H200"
    assert (read["commit"], read["seconds"]) == ("0" * 40, 571.2)


@pytest.mark.browser
@pytest.mark.heavy
def test_the_page_draws_without_a_network(tmp_path):
    need_browser()
    path = tmp_path / "page.html"
    path.write_text(page(result()), encoding="utf-8")
    folder = tmp_path / "browser"
    folder.mkdir()
    seen = visit(path, folder, width=1300, height=6000)
    assert (seen.console, seen.requests) == ([], [])
    assert seen.dom.count("js-plotly-plot") >= 7  # messages, and three models twice
    assert share_of(seen.pixels, "#0072b2") > 0.01  # bars
