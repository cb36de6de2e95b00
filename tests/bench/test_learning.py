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

pytestmark = pytest.mark.heavy


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
