"""Runs that a benchmark starts, and that are only noted down."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import trained

FACTS = {"commit": "c", "hardware": "h", "threads_per_rank": 1, "versions": {"v": "1"}}


@pytest.fixture
def note_runs(monkeypatch):
    """Let runs end at once with a summary that is made of their options; gives their commands."""

    def note(summary_of):
        commands = []

        def run_child(command):
            commands.append(command)
            given = dict(pairwise(command))
            folder = Path(given["--out"])
            folder.mkdir(parents=True)
            summary = {**FACTS, **summary_of(given, folder)}
            (folder / "summary.json").write_text(json.dumps(summary))
            return 0

        monkeypatch.setattr(trained, "run_child", run_child)
        return commands

    return note
