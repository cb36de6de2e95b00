"""The benchmark of what ways to agree learn: its commands and its page; nothing is trained here."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vigpipe import training
from vigpipe.bench import slowed, trained
from vigpipe.bench.learning import WAYS, bench_learning
from vigpipe.bench.options import LearningBench
from vigpipe.errors import InputError


@pytest.fixture
def commands(monkeypatch):
    """Runs that are only noted down, and end with a summary; the second seed does worse."""
    noted: list[list[str]] = []

    def run_child(command):
        noted.append(command)
        folder = Path(command[command.index("--out") + 1])
        seed = int(command[command.index("--seed") + 1])
        is_synchronous = "--strategy" not in command
        folder.mkdir(parents=True)
        test = {"top1": 0.75 - 0.25 * seed + 0.01 * is_synchronous, "loss": 1.0 + seed}
        facts = {"commit": "c", "hardware": "h", "threads_per_rank": 1, "versions": {"v": "1"}}
        summary = {"test": test, "wall_seconds": 30.0 if is_synchronous else 10.0, **facts}
        (folder / "summary.json").write_text(json.dumps(summary))
        return 0

    monkeypatch.setattr(trained, "run_child", run_child)
    return noted


def test_every_way_is_run_with_every_seed_and_the_same_options(commands, tmp_path, capsys):
    options = LearningBench(data="digits", lr=0.5, average_every=7, seeds=2, out=tmp_path / "a")
    bench_learning(options)
    assert len(commands) == 2 * len(WAYS)
    shared = (tmp_path / "a" / "config.toml").read_text()
    assert "lr = 0.5" in shared
    assert "dp = 4" in shared
    assert "average_every" not in shared  # a synchronous run has no such option
    for command in commands:
        assert command[3:6] == ["train", "--config", str(tmp_path / "a" / "config.toml")]
        text = " ".join(command)
        assert ("--average-every 7" in text) == ("--average " in text)
        assert ("--items fixed" in text) == ("--strategy" in text)
        assert ("--overlap 2" in text) == ("overlap-" in text)
        assert "--final" not in text
    page = (tmp_path / "a" / "README.md").read_text()
    assert "| synchronous " in page
    assert "63.50% ± 17.68%" in page  # 76 and 51 %
    assert "| gossip, gradients          | 62.50% ± 17.68% | 50.00% – 75.00% | 1.00 1.00" in page
    assert "Kept at the end is the mean of the replicas, or what the server has. Seeds" in page
    assert len((tmp_path / "a" / "rows.csv").read_text().splitlines()) == 1 + 2 * len(WAYS)


def test_with_validation_images_the_best_replica_is_kept_of_those_that_drift(commands, tmp_path):
    bench_learning(LearningBench(validation=0.1, seeds=1, out=tmp_path / "a"))
    for command in commands:
        assert ("--final best" in " ".join(command)) == ("gradients" in command)
    page = (tmp_path / "a" / "README.md").read_text()
    assert "where gradients were averaged, the best one on the validation images, or what" in page


def test_a_run_that_fails_ends_the_benchmark(monkeypatch, tmp_path):
    monkeypatch.setattr(trained, "run_child", lambda command: 2)
    with pytest.raises(InputError, match="synchronous with seed 0 ended with exit code 2"):
        bench_learning(LearningBench(out=tmp_path / "a"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "--seeds 0: must be at least 1"),
        ({"ways": "server,nobody"}, "--ways server,nobody: 'nobody' is part of no name: synchr"),
        ({"strategy": "gossip"}, "--strategy gossip: every strategy is run here"),
        ({"sleep": 61.0}, "--sleep 61 --slow 1: must be from 0 to 60, and from 1 to 1000"),
        ({"slow": 4.0}, "--slow 4: is a multiple of --sleep, which is not given"),
        ({"sleep": 0.1, "stages": 2}, "--sleep 0.1: is for --stages 1, not 2"),
    ],
)
def test_wrong_options_are_refused(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        bench_learning(LearningBench(**options, out=tmp_path / "a"))


def test_words_choose_ways_to_run_beside_the_synchronous_one(commands, tmp_path):
    bench_learning(LearningBench(ways="server,outer", seeds=1, out=tmp_path / "a"))
    strategies = [c[c.index("--strategy") + 1] for c in commands if "--strategy" in c]
    assert len(commands) == 1 + len(strategies)
    assert strategies == ["periodic", "periodic", "periodic", "server"]


def test_with_a_slow_replica_the_runs_are_started_otherwise_and_their_time_is_told(
    commands, tmp_path
):
    options = LearningBench(ways="server", seeds=1, sleep=0.2, slow=4.0, out=tmp_path / "a")
    bench_learning(options)
    starts = [command[2 : command.index("train")] for command in commands]
    slowed = ["vigpipe.bench.slowed"]
    assert starts == [[*slowed, "4", "0.2", "4.0", "4"], [*slowed, "5", "0.2", "4.0", "4"]]
    page = (tmp_path / "a" / "README.md").read_text()
    assert "Each replica sleeps 0.2 s before an item, and the last one 0.8 s." in page
    assert "| 10.0      | 3.00 " in page


@pytest.mark.parametrize(("num_replicas", "slept"), [(1, [0.8]), (2, [0.2])])
def test_the_last_replica_sleeps_longer_before_an_item(num_replicas, slept, monkeypatch):
    """This process is rank 0: of one replica the last one, of two it is not."""
    naps: list[float] = []
    monkeypatch.setattr(slowed, "time", SimpleNamespace(sleep=naps.append))
    monkeypatch.setattr(training, "train_step", lambda *given: given)
    taken: list[Any] = []

    def command(arguments):
        taken.append((arguments, vars(training)["train_step"]("rank", "batch")))
        return 0

    monkeypatch.setattr(slowed, "resolve_name", lambda name: command)
    assert slowed.rank(["0.2", "4.0", str(num_replicas), "train", "--dp", "1"]) == 0
    assert taken == [(["train", "--dp", "1"], ("rank", "batch"))]
    assert naps == pytest.approx(slept)
