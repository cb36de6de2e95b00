"""Benchmarks in one process: memory, and the pages."""

import csv
import multiprocessing
import re

import pytest
import torch

from benchmarks import operators, throughput, vig_study
from benchmarks.alone import peaks
from benchmarks.cli import main
from tests.benchmarks.contender import allocate
from tests.warm import server
from vigpipe.model.variants import create_model

pytestmark = pytest.mark.heavy


@pytest.fixture
def page(tmp_path, monkeypatch, capsys):
    """Run a benchmark of something small without measuring memory; gives its page and its rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vig_study, "SIDE", 6)
    monkeypatch.setitem(throughput.SIDES, "cpu", 64)
    for module in (operators, vig_study):
        monkeypatch.setattr(module, "peaks", lambda *args, **kwargs: (2e6, 1e6))

    def run(*arguments):
        assert main([*arguments, "--threads", "1", "--out", "out"]) == 0
        text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
        with (tmp_path / "out" / "rows.csv").open(encoding="utf-8") as file:
            return text, list(csv.DictReader(file))

    return run


def test_the_study_s_reference_is_the_same_model():
    torch.manual_seed(0)
    model = create_model("vig_study", num_classes=10).double().train()
    reference = vig_study.ReferenceStudy().double()
    reference.load_state_dict(model.state_dict())
    images = torch.rand(2, 3, 6, 5, dtype=torch.float64)
    model = create_model("vig_study", num_classes=10, img_size=(6, 5)).double().train()
    model.load_state_dict(reference.state_dict())
    torch.testing.assert_close(reference(images), model(images), rtol=1e-9, atol=1e-9)


def test_memory_is_what_the_work_adds():
    peak, added = peaks(allocate, 200.0, device="cpu", threads=1)
    assert 195e6 < added < 230e6
    assert peak > added + 50e6  # torch itself


def test_operators(page, monkeypatch):
    monkeypatch.setattr(operators, "CASES", (operators.Case(2, 30, 16, 4, 2),))
    text, rows = page("ops", "--repeats", "2")
    assert len(rows) == 3 * 2
    fused = re.search(r"\| fused .*", text)
    assert fused is not None
    cells = [cell.strip() for cell in fused[0].split("|")]
    assert float(cells[-2]) < 1e-5  # the gradient, on the reference's graph
    assert "- command: `python -m benchmarks" in text


def test_the_study(page):
    sizes = ("--batch-sizes", "2,3", "--most-reference", "2", "--compared", "2")
    text, rows = page("vig-study", *sizes, "--repeats", "1")
    assert [row["contender"] for row in rows] == [
        "batch 2: reference", "batch 2: plain", "batch 2: fused", "batch 3: fused"
    ]  # fmt: skip
    assert "vig_study: forward, backward and Adam" in text


def test_throughput(page, monkeypatch):
    forks = server()  # memory is measured, but not compared
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks)
    sizes = ("--models", "vig_digits", "--batch-size", "2", "--repeats", "1")
    words = ("--modes", "inference", "--dtypes", "float32", "--no-compiled")
    text, rows = page("vig", *sizes, *words)
    assert [row["contender"] for row in rows] == [
        f"vig_digits inference: {way}, float32"
        for way in ("reference", "reference, channels last", "ours", "products")
    ]
    assert all(row["contender"].split(": ")[1] in text for row in rows)
    assert "of the matrix rate" in text
    assert "logits off by" in text
