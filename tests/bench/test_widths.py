"""Sub-networks by the width of their model: what runs, what is refused, and one of them alone."""

import csv
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.world import run_command
from vigpipe.bench import trained, widths
from vigpipe.bench.narrow import time_narrow
from vigpipe.bench.options import WidthsBench
from vigpipe.bench.trained import Failure, try_to_train
from vigpipe.bench.widths import bench_widths
from vigpipe.cli import main
from vigpipe.errors import InputError


@pytest.fixture
def commands(monkeypatch):
    """The options of runs that are not done; those of width 32 are refused, or killed."""
    noted: list[dict[str, str]] = []

    def run_child(command, stderr):
        given = dict(zip(command[6::2], command[7::2], strict=True))
        noted.append(given)
        if given["--width"] == "32":
            stderr.write(b"a warning\nvigpipe: it has 24.0 GB of memory; take less\n")
            return 137 if "--dp" in given else 2
        folder = Path(given["--out"])
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "model.safetensors").touch()
        summary = {"steps": 4, "peak_bytes": 3 * 2**20}
        summary |= {"commit": "c", "hardware": "h", "threads_per_rank": 1, "versions": {"v": "1"}}
        (folder / "summary.json").write_text(json.dumps(summary))
        row = {"step": 1, "step_seconds": 0.5, "data_seconds": 0.25}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return 0

    monkeypatch.setattr(trained, "run_child", run_child)
    return noted


def test_a_run_that_fails_is_a_row(commands, tmp_path):
    options = WidthsBench(
        data="sbm:200,4", widths="16,32", replicas="1,2", alone_width=0, out=tmp_path / "a"
    )
    bench_widths(options)
    assert [given["--width"] for given in commands] == ["16", "16", "32", "32"]
    assert [given.get("--dp") for given in commands] == [None, "2"] * 2
    assert all(given["--evaluate-every"] == "10" for given in commands)
    page = (tmp_path / "a" / "README.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    rows = [row for row in cells if row and row[0] in ("16", "32")]
    assert rows[:2] == [["16", m, "3 MiB", "0.750", ""] for m in ("1", "2")]
    assert rows[2] == ["32", "1", "–", "–", "refused: it has 24.0 GB of memory; take less"]
    assert rows[3][-1] == "exit code 137: it has 24.0 GB of memory; take less"
    assert not [*(tmp_path / "a").glob("runs/*/checkpoints")]
    assert not [*(tmp_path / "a").glob("runs/*/model.safetensors")]


def test_a_page_without_any_run_is_not_written(commands, tmp_path):
    options = WidthsBench(data="sbm:200,4", widths="32", alone_width=0, out=tmp_path / "a")
    with pytest.raises(InputError, match="every run has failed, the first one with: it has 24"):
        bench_widths(options)
    assert not (tmp_path / "a" / "README.md").exists()


def test_a_failure_names_no_folder_of_this_machine(monkeypatch, tmp_path):
    def run_child(command, stderr):
        stderr.write(f"vigpipe: {tmp_path}/x: cannot hold it\n\n".encode())
        return 2

    monkeypatch.setattr(trained, "run_child", run_child)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = try_to_train(tmp_path, tmp_path / "run", {})
    assert found == Failure(2, "$TMPDIR/x: cannot hold it")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("model", ["sage", "gat", "gcn2"])
def test_a_sub_model_alone_has_an_mth_of_the_channels(model):
    options = WidthsBench(model=model, data="sbm:60,4", alone_width=32, repeats=2, heads=None)
    one, two, four = time_narrow(options, [1, 2, 4])
    assert (one.m, two.m, four.m) == (1, 2, 4)
    assert all(len(step) == 2 for narrow in (one, two) for step in narrow[2:])
    assert 2 < one.flops / two.flops < 4
    assert 2 < two.flops / four.flops < one.flops / two.flops


@pytest.mark.multiprocess
def test_real_runs_end_in_a_table(tmp_path):
    out = tmp_path / "out"
    options = "--data sbm:200,4 --widths 8,9 --replicas 1,2 --steps 2 --average-every 1"
    words = ["bench", "widths", *options.split(), "--alone-width", "8", "--repeats", "1"]
    done = run_command([sys.executable, "-m", "vigpipe", *words, "--out", str(out)])
    assert done.returncode == 0, done.stderr
    with (out / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    runs, steps = rows[:4], rows[4:]
    assert [row["exit_code"] for row in runs] == ["0", "0", "0", "2"]
    assert all(float(row["peak_bytes"]) > 1e6 for row in runs[:3])
    assert [row["what"] for row in steps] == ["step alone", "without optimizer"] * 2
    page = (out / "README.md").read_text()
    assert "refused: --dp 2: --strategy subnetworks divides 9 channels" in page
    assert "One sub-model of width 8 / m alone" in page
    assert "width 8, m = 2: " in done.stdout


def test_wrong_use_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(widths, "try_to_train", None)
    for words, message in (
        (["--model", "vig_digits"], "--model vig_digits: is a model of images"),
        (["--width", "8"], "--width 8: is chosen for every run here; leave it out"),
        (["--widths", "8,x"], "--widths 8,x: must be numbers from 1"),
        (["--repeats", "0"], "--alone-width 4096 --repeats 0: must be at least 0 and 1"),
        (["--alone-width", "9"], "--alone-width 9: must be a multiple of every number in"),
    ):
        assert main(["bench", "widths", "--data", "sbm:200,4", *words]) == 2
        assert message in capsys.readouterr().err
