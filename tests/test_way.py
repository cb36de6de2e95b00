"""The way of one batch from disk to the optimizer is the one that docs/code.md tells."""

import inspect
import itertools
import re
import sys
from pathlib import Path
from types import CodeType

from tests.small_digits import SMALL_DIGITS, among_small_digits
from tests.small_model import whole_model
from tests.world import ROOT
from vigpipe import training
from vigpipe.cli import main

PACKAGE = ROOT / "vigpipe"


def trace(folder: Path, monkeypatch) -> dict[str, int]:
    """Lines of the package's functions that the second step of a default run enters, by file.

    The step is from the loop's head to the optimizer. What is inside of another function is counted
    once, with that.
    """
    entered: dict[CodeType, None] = {}
    read, take, num_read = training.read_batch, training.train_step, itertools.count(1)

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            entered[frame.f_code] = None

    def begin(*args):
        sys.setprofile(note if next(num_read) == 2 else None)
        return read(*args)

    def end(*args):
        step = take(*args)
        sys.setprofile(None)
        return step

    monkeypatch.setattr(training, "read_batch", begin)
    monkeypatch.setattr(training, "train_step", end)
    options = ["--steps", "3", "--epochs", "50", "--batch-size", "30", "--threads", "1"]
    assert main(["train", *SMALL_DIGITS, *options, "--out", str(folder)]) == 0
    spans: dict[str, set[int]] = {}
    for code in entered:
        lines, first = inspect.getsourcelines(code)
        file = str(Path(code.co_filename).relative_to(PACKAGE))
        spans.setdefault(file, set()).update(range(first, first + len(lines)))
    return {file: len(lines) for file, lines in spans.items()}


def test_a_batch_takes_the_way_that_the_page_tells(tmp_path, monkeypatch):
    with among_small_digits(tmp_path), whole_model():
        lines = trace(tmp_path / "run", monkeypatch)
    page = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    named = re.findall(r"^[0-9]\. `([a-z_]+/[a-z_]+\.py)`", page, re.MULTILINE)
    assert set(named) <= lines.keys()
    inside = {file: n for file, n in lines.items() if file.split("/")[0] not in ("model", "ops")}
    of_named = sum(inside[file] for file in named)
    assert (len(inside), sum(inside.values()), of_named) < (40, 1100, 1100), inside
    assert of_named >= sum(inside.values()) / 2
    assert sum(lines.values()) <= 2300
