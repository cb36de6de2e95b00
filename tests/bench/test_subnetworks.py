"""Sub-networks against a model as a whole: every case is a run, and the page compares them."""

import csv
import json
import sys
from pathlib import Path

import pytest

from tests.world import run_command
from vigpipe.bench import trained
from vigpipe.bench.options import SubnetworksBench
from vigpipe.bench.subnetworks import bench_subnetworks
from vigpipe.bench.subnetworks_outcome import Case, Outcome, read_outcome
from vigpipe.bench.subnetworks_page import PUBLISHED
from vigpipe.bench.trained import slowest_step
from vigpipe.cli import main
from vigpipe.errors import InputError

FLAGS = ("--branch-rescale", "--carry-moments")


def a_run(m, every, seed=0):
    """Files of a run: 8 epochs of one step are shared, and more sub-networks are a bit worse."""
    steps = 8 // m
    accuracy = 0.9 - 0.01 * (m - 1) + 0.001 * seed
    rows = [
        {"step": step, "replica": r, "step_seconds": 0.5 + r, "data_seconds": 0.25}
        for r in range(m)
        for step in range(1, steps + 1)
    ]
    rows = [{k: v for k, v in row.items() if m > 1 or k != "replica"} for row in rows]
    for epoch, share, of_validation in ((1, accuracy, 0.8), (steps, 0.99, 0.7)):
        scores, others = (dict.fromkeys(("accuracy", "top1"), v) for v in (share, of_validation))
        rows.append({"epoch": epoch, **scores, "validation": others})
    summary = {"steps": steps, "peak_bytes": 2**20}
    if m > 1:
        each = {"busy_seconds": 1.0, "waiting_seconds": 0.5, "averaging_seconds": 0.5}
        summary["replicas"] = {
            "each": [each | {"bytes_sent": 8e6, "peak_bytes": 2**20 * (r + 1)} for r in range(m)]
        }
        summary["subnetworks"] = [
            {"test": dict.fromkeys(("accuracy", "top1"), 0.5 + 0.1 * r)} for r in range(m)
        ]
    summary |= {"commit": "c", "hardware": "h", "threads_per_rank": 1, "versions": {"v": "1"}}
    return rows, summary


def write_run(folder, rows, summary):
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def commands(monkeypatch):
    """The options of runs that are not done."""
    noted: list[dict[str, str]] = []

    def run_child(command):
        words = [word for word in command[6:] if word not in FLAGS]
        given = dict(zip(words[::2], words[1::2], strict=True))
        given |= dict.fromkeys(set(FLAGS) & set(command), "")
        noted.append(given)
        m, every = int(given.get("--dp", 1)), int(given.get("--average-every", 0))
        write_run(Path(given["--out"]), *a_run(m, every, int(given["--seed"])))
        return 0

    monkeypatch.setattr(trained, "run_child", run_child)
    return noted


def test_every_case_is_a_run_and_has_the_model_as_a_whole_beside_it(commands, tmp_path):
    options = SubnetworksBench(
        data="sbm:200,4",
        depths="2,3",
        samplers="full@8,metis:4@2",
        replicas="2,4",
        intervals="1,3",
        seeds=2,
        out=tmp_path / "a",
    )
    bench_subnetworks(options)
    assert len(commands) == 2 * 2 * 2 * (1 + 2 * 2)
    shared = (tmp_path / "a" / "config.toml").read_text()
    for name in ("layers", "dp", "strategy", "average_every", "seed", "sampler", "depths"):
        assert f"{name} = " not in shared
    of_three = [given for given in commands if given["--layers"] == "3" and given["--seed"] == "1"]
    assert [given.get("--strategy") for given in of_three] == 2 * [None, *(4 * ["subnetworks"])]
    assert [given["--epochs"] for given in of_three] == [*(5 * ["8"]), *(5 * ["2"])]
    assert of_three[5]["--parts"] == "4"
    pairs = [(given.get("--dp"), given.get("--average-every")) for given in of_three[:5]]
    assert pairs == [(None, None), ("2", "1"), ("2", "3"), ("4", "1"), ("4", "3")]
    page = (tmp_path / "a" / "README.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    first, second = (rows.index(row) for row in rows if row[:2] == ["layers", "sampler"])
    assert rows[first + 2][2:7] == ["1", "", "90.05 ± 0.07 %", "", ""]
    assert rows[first + 4][2:7] == ["4", "plain", "87.05 ± 0.07 %", "-3.00 ± 0.00", "yes"]
    assert rows[first + 4][7:10] == ["65.00 ± 0.00 %", "3.7500 ± 0.0000", "2.00 ± 0.00"]
    assert rows[first + 4][10:] == ["4.000", "4 ± 0 MiB", "2", "–"]  # two layers
    assert rows[first + 9][:4] == ["3", "full@8", "2", "plain"]
    assert rows[first + 9][12:] == ["4", "6.25%"]
    assert rows[second + 3][2:7] == ["2", "plain", "3", "2", "–"]
    assert "Steps of a round: 1" in page
    assert all(claim in page for claim in PUBLISHED.values())
    assert "m = 4: -3.00 to -3.00 points, 8 of 8 cases within 3; 3.00 to 3.00 times as fast" in page
    assert "smallest share: 6.25%, -1.00 ± 0.00 points; largest: 75.00%, -3.00 ± 0.00" in page


def test_a_model_of_images_is_divided_in_several_ways(commands, tmp_path):
    options = SubnetworksBench(
        model="vig_digits",
        data="digits",
        validation=0.1,
        replicas="2",
        variants="inner,tied+branch-rescale+carry-moments",
        intervals="3",
        seeds=1,
        out=tmp_path / "a",
    )
    bench_subnetworks(options)
    whole, inner, tied = commands
    assert ("--dp" in whole, "--branch-rescale" in whole, "--divided" in whole) == (False,) * 3
    assert (inner["--divided"], "--branch-rescale" in inner) == ("inner", False)
    assert (tied["--divided"], "--branch-rescale" in tied, "--carry-moments" in tied) == (
        *("tied", True, True),
    )


def test_one_model_as_a_whole_makes_a_page(commands, tmp_path):
    options = SubnetworksBench(
        data="sbm:200,4", depths="2", samplers="full", replicas="1", seeds=1, out=tmp_path / "a"
    )
    bench_subnetworks(options)
    assert len(commands) == 1
    assert "| 90.00 %" in (tmp_path / "a" / "README.md").read_text()


def test_what_counts_of_a_run(tmp_path):
    case = Case(3, "full", 2, "plain", 3, 0)
    rows, summary = a_run(2, 3)
    write_run(tmp_path / "a", rows, summary)
    assert read_outcome(tmp_path / "a", summary, case, "accuracy", False) == Outcome(
        **case._asdict(),
        accuracy=0.89,
        epoch=1,
        own_accuracy=0.55,
        rounds=2,
        round_bytes=4e6,
        untrained=0.25,
        steps=4,
        step_seconds=1.75,
        seconds=2.0,
        peak_bytes=2**21,
    )
    two = case._replace(layers=2)
    assert read_outcome(tmp_path / "a", summary, two, "accuracy", False).untrained is None
    assert read_outcome(tmp_path / "a", summary, two, "accuracy", True).untrained == 0.25
    assert slowest_step(rows) == 1.75
    for row in rows:
        row.pop("validation", None)
    write_run(tmp_path / "b", rows, summary)
    with pytest.raises(InputError, match="has no validation nodes, which choose the epoch"):
        read_outcome(tmp_path / "b", summary, case, "accuracy", False)


@pytest.mark.multiprocess
def test_real_runs_end_in_a_table(tmp_path):
    out = tmp_path / "out"
    options = "--data sbm:200,4 --depths 3 --samplers full@4 --replicas 2 --intervals 1 --seeds 1"
    words = ["bench", "subnetworks", *options.split(), "--width", "8", "--out", str(out)]
    done = run_command([sys.executable, "-m", "vigpipe", *words])
    assert done.returncode == 0, done.stderr
    with (out / "rows.csv").open(newline="") as file:
        whole, halves = csv.DictReader(file)
    assert (whole["steps"], halves["steps"]) == ("4", "2")
    assert whole["round_bytes"] == whole["own_accuracy"] == ""
    assert float(halves["round_bytes"]) > 0 < float(halves["own_accuracy"]) < 1
    assert (halves["rounds"], halves["untrained"]) == ("2", "0.25")
    assert "3 layers, full@4, m = 2, rounds of 1 steps, seed 0: test accuracy" in done.stdout


def test_wrong_use_is_one_sentence(capsys):
    for words, message in (
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--dp", "2"], "--dp 2: differs from run to run here; leave it out"),
        (["--sampler", "full"], "--sampler full: is what --samplers is for"),
        (["--samplers", "louvain"], "--samplers louvain: 'louvain' is not full, another sampler"),
        (["--divided", "tied"], "--divided tied: differs from run to run here; leave it out"),
        (
            ["--variants", "plain,shallow"],
            "--variants plain,shallow: 'shallow' is not plain, carry",
        ),
        (
            ["--variants", "plain,carry-moments+inner"],
            "--variants plain,carry-moments+inner: inner is for images, and --model is sage; leav",
        ),
        (
            ["--model", "vig_digits", "--validation", "0.1", "--variants", "partition-input"],
            "--variants partition-input: partition-input is for graphs, and --model is vig_digits",
        ),
        (["--depths", "x"], "--depths x: must be numbers from 1 with commas between them"),
        (["--model", "vig_digits", "--depths", "2"], "--depths 2: is for graph models"),
        (["--model", "vig_digits"], "--validation 0: validation images choose the epoch"),
    ):
        assert main(["bench", "subnetworks", "--data", "sbm:200,4", *words]) == 2
        assert message in capsys.readouterr().err
