"""The benchmark of what ways to agree learn: its commands and its page; nothing is trained here."""

import pytest

from benchmarks.learning import QUESTION, WAYS
from benchmarks.options import LearningBench
from benchmarks.trained import ask

pytestmark = pytest.mark.heavy


def summary_of(given, folder):
    """The second seed does worse."""
    seed, is_synchronous = int(given["--seed"]), "--strategy" not in given
    test = {"top1": 0.75 - 0.25 * seed + 0.01 * is_synchronous, "loss": 1.0 + seed}
    return {"test": test, "wall_seconds": 30.0 if is_synchronous else 10.0}


def test_every_way_is_run_with_every_seed_and_the_same_options(note_runs, tmp_path):
    commands = note_runs(summary_of)
    options = LearningBench(data="digits", lr=0.5, average_every=7, seeds=2, out=tmp_path / "a")
    ask(QUESTION, options)
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
