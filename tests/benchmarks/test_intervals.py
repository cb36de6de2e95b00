"""The experiment on averages now and then: its runs, and its tables; nothing is trained here."""

import json

import pytest

from benchmarks.intervals import PUBLISHED, QUESTION
from benchmarks.options import IntervalsBench
from benchmarks.trained import ask

pytestmark = pytest.mark.heavy


def summary_of(given, folder):
    """One process takes 24 s, D replicas 24 / D, gossip half of that."""
    replicas = int(given.get("--dp", 1))
    seconds = 24.0 / replicas / (1 + (given.get("--strategy") == "gossip"))
    row = {"step": 1, "step_seconds": seconds - 1.0, "data_seconds": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    each = [
        {"items": 10 + r, "busy_seconds": seconds, "waiting_seconds": 0, "averaging_seconds": 0}
        for r in range(replicas)
    ]
    return {
        "graph": {"partition": {"kept_edge_fraction": 0.025}},
        "test": {"micro_f1": 0.9},
        "replicas": {"each": each, "busy": {"efficiency": 1.0}},
    }


def test_every_way_is_run_with_every_interval_and_number_of_replicas(note_runs, tmp_path):
    commands = note_runs(summary_of)
    options = IntervalsBench(
        data="sbm:200,4", intervals="1,7", replicas="2,4", seeds=2, out=tmp_path / "a"
    )
    ask(QUESTION, options)
    assert len(commands) == 2 * 2 * (1 + 2 * 2 * 2)
    shared = (tmp_path / "a" / "config.toml").read_text()
    assert "epochs = 30" in shared
    for name in ("average", "evaluate_every", "partition", "seed"):
        assert f"{name} = " not in shared
    for command in commands:
        text = " ".join(command)
        assert "--evaluate-every 30" in text
        assert ("--final best" in text) == ("--average gradients" in text) == ("--dp" in text)
        assert ("--items pool" in text) == ("--strategy gossip" in text)
        assert ("--items fixed" in text) == ("--strategy periodic" in text)
    page = (tmp_path / "a" / "README.md").read_text()
    assert "metis parts, 2.5% of the edges kept; TAU = 1 / 7" in page
    assert "| 4          | gossip     | 3.0 / 3.0   | 0.9000 / 0.9000 | 8.00 / 8.00 " in page
    assert page.count("2.00 / 2.00") == 2 * (2 + 1)  # all-reduce twice, and two replicas' 24 / 12
    assert "10 11 12 13" in page
    assert all(seconds in page for seconds, _ in PUBLISHED.values())
