"""Images a second of CPU time beside timm's loader, and how much of the reading workers hide."""

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.effort import Effort
from benchmarks.hidden import MEMORY, NUM_STEPS, RANK, WORKERS, Steps
from benchmarks.loaders import Reading, TimmLoader, VigpipeLoader
from benchmarks.photographs import make_pictures
from tests.world import run_command

pytestmark = pytest.mark.heavy

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("feed") / "pictures"
    make_pictures(folder, 16)
    return folder


def test_all_contenders_read_the_same_images_in_the_same_order(pictures):
    reading = Reading(pictures, False, 4, 0, CPU)
    ours = VigpipeLoader(reading)
    batches = list(ours.read(range(4)))
    assert [images.shape for images, _ in batches] == [(4, 3, 224, 224)] * 4
    timm = TimmLoader(replace(reading, num_workers=1), prefetcher=True)
    for (images, labels), (theirs, their_labels) in zip(batches, timm.read(range(4)), strict=True):
        assert torch.equal(labels, their_labels)
        torch.testing.assert_close(images, theirs, atol=1e-6, rtol=0)
    ours.close()
    timm.close()


def steps_of(in_memory, by_workers, by_rank):
    ways = zip((MEMORY, WORKERS, RANK), (in_memory, by_workers, by_rank), strict=True)
    efforts = {way: [Effort(NUM_STEPS * s, 0.1, 0.1) for s in seconds] for way, seconds in ways}
    return Steps(efforts, model="m", side=32, batch_size=4, num_workers=1, num_cores=2)


def test_the_hidden_share_is_that_of_the_time_that_the_rank_takes_to_read():
    steps = steps_of([1.0, 1.0, 1.0], [1.1, 1.1, 1.2], [1.4, 1.4, 1.4])
    assert steps.hidden_shares() == pytest.approx([0.75, 0.75, 0.5])
    assert "Reading adds 400 ms to a step of 1000 ms" in steps.explain()
    assert "75% of it (50% – 75%) is hidden" in steps.explain()
    steps = steps_of([1.0, 1.0], [1.0, 1.0], [1.1, 0.9])
    assert steps.hidden_shares() is None
    assert "lost in the noise" in steps.explain()


@pytest.mark.multiprocess
def test_the_command_writes_a_page_and_every_round(pictures, tmp_path):
    options = ["--pictures", str(pictures), "--images", "16", "--batch-size", "4"]
    options += ["--repeats", "1", "--out", str(tmp_path)]
    done = run_command([sys.executable, "-m", "benchmarks", "feed", *options])
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "README.md").read_text()
    for words in ("training: ", "evaluation: ", "read by workers", "cores were busy"):
        assert words in page
    with Path(tmp_path, "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    parts = [row["part"] for row in rows]
    assert parts == ["training"] * 3 + ["evaluation"] * 3 + ["steps"] * 3
