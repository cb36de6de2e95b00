"""`vigpipe time`, and `train --timing --trace`: the files they leave and what they print."""

import csv
import json
import re
import sys
import tomllib
from pathlib import Path
from statistics import fmean, median

import pytest

from tests.commands.refusals import check_commands
from tests.small_digits import write_small_digits
from tests.world import run_command
from vigpipe.cli import main

FILES = {
    *("config.toml", ".lock", "metrics.jsonl", "summary.json", "trace.json"),
    *("timing.csv", "timing.md", "timeline.json", "timeline.png", "timeline.svg"),
}
SMALL = ["--data", "fake", "--image-size", "8", "--batch-size", "8", "--threads", "1"]
SHORT = ["--timing-warmup", "1", "--steps", "6"]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "timing.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def assert_written(folder: Path, num_ranks: int, num_timed: int) -> dict:
    """All files are whole; returns the summary."""
    summary = read_summary(folder)
    timing = summary["timing"]
    step = timing["step_seconds"]
    assert step["count"] == num_timed
    assert 0 < step["min"] <= step["median"] <= step["p95"] <= step["max"]
    assert 0 < timing["overhead"] < 1
    assert timing["warmup_steps"] == 1
    assert len(timing["accounting"]) == len(timing["peak_bytes"]) == num_ranks
    assert (timing["bubble"] is None) == (num_ranks == 1)

    found = rows(folder)
    assert {row["phase"] for row in found} == {"train", "test"}
    assert {int(row["rank"]) for row in found} == set(range(num_ranks))
    assert len({row["step"] for row in found if row["phase"] == "train"}) == num_timed
    names = {(row["name"], row["direction"]) for row in found}
    for part in ("stem", "block 0", "block 3/grapher/aggregation", "block 3/ffn", "readout"):
        assert {(part, "forward"), (part, "backward")} <= names
    assert {("block 0/grapher/knn", "forward"), ("loss", "backward"), ("optimizer", "")} <= names
    assert ("block 0/grapher/knn", "backward") not in names

    trace = json.loads((folder / "trace.json").read_text())
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in complete} == set(range(num_ranks))
    timeline = json.loads((folder / "timeline.json").read_text())
    assert {span[0] for span in timeline["measured"]} == set(range(num_ranks))
    markdown = (folder / "timing.md").read_text()
    assert ("## The bubble" in markdown) == (num_ranks > 1)
    assert "mini-batch" in markdown
    return summary


def test_time_in_one_process(tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = ["time", *SMALL, *SHORT, "--microbatches", "2", "--test-batches", "3"]
    assert main([*arguments, "--out", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == FILES
    summary = assert_written(folder, num_ranks=1, num_timed=3)  # steps 2, 4 and 6 of 6
    assert {int(row["step"]) for row in rows(folder) if row["phase"] == "train"} == {2, 4, 6}
    assert {int(row["step"]) for row in rows(folder) if row["phase"] == "test"} == {2, 3}
    assert summary["timing"]["median_seconds"].keys() == {"timed", "untimed"}
    assert summary["test"]["images"] == 3 * 8
    printed = capsys.readouterr().out
    assert printed.startswith("vig_digits on fake: 1 replica × 1 stage, 2 micro-batches, gpipe")
    for words in ("3 steps after a warm-up of 1: median", "Too few steps to see"):
        assert words in printed
    assert "block 1/grapher" not in printed  # the first tables, and where the rest is
    assert "block 1/grapher" in (folder / "timing.md").read_text()
    assert printed.splitlines()[-1].startswith(f"{folder}/timing.md has the tables of every stage")

    # Its configuration is read back by every verb, what time adds to train's options left out.
    config = tomllib.loads((folder / "config.toml").read_text())
    assert "test_batches" not in config
    again = ["train", "--config", str(folder / "config.toml"), "--steps", "2"]
    assert main([*again, "--no-timing", "--no-trace", "--out", str(tmp_path / "again")]) == 0
    assert "timing" not in read_summary(tmp_path / "again")


def test_a_single_step_after_the_warm_up_is_timed(tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = ["time", *SMALL, "--timing-warmup", "2", "--steps", "3", "--test-batches", "1"]
    assert main([*arguments, "--no-trace", "--out", str(folder)]) == 0
    timing = read_summary(folder)["timing"]
    assert timing["step_seconds"]["count"] == 1
    assert timing["median_seconds"].keys() == {"timed"}
    assert "Every other step" not in capsys.readouterr().out
    assert not (folder / "trace.json").exists()


def of_small_digits(tmp_path: Path) -> list[str]:
    """Options of 144 images in batches of 100."""
    write_small_digits(tmp_path)
    data = ["--data", str(tmp_path / "digits.npz"), "--batch-size", "100", "--threads", "1"]
    return [*data, "--timing-warmup", "1", "--out", str(tmp_path / "run")]


def test_time_tells_full_and_partial_batches_apart(tmp_path, capsys):
    # Once the median was over both kinds, here of 100 and 44 images, and so that of neither.
    folder = tmp_path / "run"
    assert main(["time", *of_small_digits(tmp_path), "--steps", "7"]) == 0
    steps = [row for row in rows(folder) if (row["phase"], row["name"]) == ("train", "step")]
    full, few = ([float(r["seconds"]) for r in steps if r["samples"] == n] for n in ("100", "44"))
    assert (len(full), len(few)) == (3, 3)
    # 6 full batches after the warm-up, every other one timed; the partial ones are in addition.
    assert read_summary(folder)["steps"] == 13
    timing = read_summary(folder)["timing"]
    assert timing["step_seconds"]["median"] == pytest.approx(median(full), abs=1e-8)
    (partial,) = timing["partial_batches"]
    assert partial["step_seconds"]["median"] == pytest.approx(median(few), abs=1e-8)
    (account,) = timing["accounting"]
    assert account["step_seconds"] == pytest.approx(fmean(full), abs=1e-8)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    untimed = [row["step_seconds"] for row in metrics if row["step"] in (5, 9, 13)]
    assert timing["median_seconds"]["untimed"] == pytest.approx(median(untimed))
    assert json.loads((folder / "timeline.json").read_text())["step"] == 11
    for printed in (capsys.readouterr().out, (folder / "timing.md").read_text()):
        assert "3 steps with full batches after a warm-up of 1: median" in printed
        assert "Partial batch of 44 of 100 samples: 3 training steps, median " in printed


def test_train_with_timing_and_trace(tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = ["train", *SMALL, "--timing-warmup", "1", "--steps", "3", "--timing", "--trace"]
    assert main([*arguments, "--out", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == FILES | {"model.safetensors", "checkpoints"}
    assert_written(folder, num_ranks=1, num_timed=2)
    assert "Where a step goes" in capsys.readouterr().out
    between = [row for row in rows(folder) if row["name"] == "between steps"]
    assert ("train", "3") in {(row["phase"], row["step"]) for row in between}


@pytest.mark.multiprocess
def test_time_two_stages(tmp_path):
    folder = tmp_path / "run"
    layout = ["--stages", "2", "--microbatches", "2", "--schedule", "1f1b"]
    options = [*SMALL, *SHORT, *layout, "--test-batches", "2", "--out", str(folder)]
    ended = run_command([sys.executable, "-m", "vigpipe", "time", *options])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert {path.name for path in folder.iterdir()} == FILES
    bubble = assert_written(folder, num_ranks=2, num_timed=3)["timing"]["bubble"]
    assert bubble["formula"] == pytest.approx(1 / 3)
    assert "(S - 1) / (V M + S - 1) gives 33.3%" in ended.stdout
    assert "- command: `vigpipe time --data fake" in (folder / "timing.md").read_text()
    module = [*SMALL, "--timing", "--timing-warmup", "1", "--steps", "2", "--out", f"{folder}-2"]
    ended = run_command([sys.executable, "-m", "vigpipe.train", *module])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "- command: `vigpipe train --data fake" in Path(f"{folder}-2", "timing.md").read_text()


WRONG = [
    ("time --no-timing", "--no-timing: is what vigpipe time is for"),
    ("time --test-batches 0", "--test-batches 0: must be at least 1"),
    ("time --timing-steps 0", "--timing-steps 0: must be a number from 1"),
    ("time --timing-steps 2.5", "--timing-steps 2.5: must be a whole number"),
    ("time --steps 3", "no step is left to be timed after --timing-warmup 3; take"),
    ("time --steps 3 --strategy gossip", "no step is left to be timed after"),
    ("train --trace --steps 2", "no step is left to be timed after --timing-warmup"),
]


@pytest.mark.usefixtures("here")
def test_wrong_options_are_one_sentence(capsys):
    check_commands(capsys, "", [(f"{line} {' '.join(SMALL)}", words) for line, words in WRONG])


def test_replicas_with_steps_of_their_own_are_told_who_worked_and_waited(capsys, tmp_path):
    options = ["--strategy", "gossip", "--average-every", "2", "--items", "pool"]
    assert main(["time", *SMALL, *SHORT, *options, "--out", str(tmp_path / "run")]) == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("config.toml", ".lock", "metrics.jsonl", "summary.json", "events.jsonl")
    }
    (account,) = read_summary(tmp_path / "run")["replicas"]["each"]
    assert (account["items"], account["samples"]) == (5, 40)  # without the warm-up
    out = capsys.readouterr().out
    assert out.splitlines()[2].split()[:4] == ["replica", "items", "ms", "an"]
    assert "images/s of all replicas; the first 1 items of each are left out" in out


def test_replicas_of_a_graph_are_told_the_nodes_that_they_train_on(capsys, tmp_path):
    graph = ["--model", "gcn", "--data", "sbm:200,4", "--sampler", "parts", "--parts", "4"]
    options = ["--strategy", "gossip", "--threads", "1", "--steps", "3", "--timing-warmup", "1"]
    assert main(["time", *graph, *options, "--out", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"items +ms an item +training nodes +training nodes/s +worked", out)
    assert re.search(r"^[\d,.]+ training nodes/s of all replicas; the first 1 items", out, re.M)


def test_items_of_partial_batches_are_told_apart(capsys, tmp_path):
    # Of 144 images in batches of 100, every other item has 44.
    gossip = ["--strategy", "gossip", "--average-every", "2", "--items", "pool", "--steps", "7"]
    assert main(["time", *of_small_digits(tmp_path), *gossip]) == 0
    (account,) = read_summary(tmp_path / "run")["replicas"]["each"]
    assert (account["items"], account["partial_items"]) == (6, 3)
    partial = account["partial_busy_seconds"] / 3
    full = account["busy_seconds"] / 3 - partial
    assert full > 0 < partial
    out = capsys.readouterr().out
    assert out.splitlines()[4].split()[:3] == ["0", "6", f"{1e3 * full:,.1f}"]
    told = f"3 of replica 0 ({1e3 * partial:,.1f} ms each)."
    assert f"Items of partial batches are told apart: {told}" in out
