import re
import time
from pathlib import Path

import pytest
import torch

from tests.oracle import images_of, shortened, with_images
from vigpipe.config.options import TrainConfig
from vigpipe.data.split import Split
from vigpipe.run.facts import prepare
from vigpipe.run.slow_data import LEAST_SECONDS, WINDOW, SlowData
from vigpipe.training import train


def told(watch: SlowData, *pairs: tuple[float, float]) -> list[str]:
    return [said for pair in pairs if (said := watch.add(*pair))]


def test_it_is_said_once_after_a_window():
    watch = SlowData(0, runs_ahead=False)
    assert told(watch, *[(0.12, 0.36)] * (WINDOW - 1)) == []
    assert told(watch, *[(0.12, 0.36)] * 100) == [
        "a step waits 120 ms for its images, and then takes 360 ms; let processes read them ahead, "
        "with --workers 2"
    ]


@pytest.mark.parametrize(
    ("num_workers", "unit", "advice"),
    [
        (3, "images", "choose more than --workers 3 if there are idle cores"),
        # The sentence spoke of images, and of --workers, which graphs refuse.
        (0, "nodes", "leave each rank a core for the thread that makes the next ones"),
    ],
)
def test_the_advice_is_one_that_can_be_followed(num_workers, unit, advice):
    watch = SlowData(num_workers, runs_ahead=False, unit=unit)
    (said,) = told(watch, *[(0.12, 0.36)] * WINDOW)
    assert said == f"a step waits 120 ms for its {unit}, and then takes 360 ms; {advice}"


@pytest.mark.parametrize(
    ("waited", "step"), [(0.04, 0.36), (0.0, 0.36), (0.9 * LEAST_SECONDS, LEAST_SECONDS / 10)]
)
def test_little_waiting_is_not_worth_a_sentence(waited, step):
    assert told(SlowData(0, runs_ahead=False), *[(waited, step)] * 100) == []


def test_single_slow_reads_are_not_either():
    steps = [(3.0 if number % 3 == 0 else 0.01, 0.3) for number in range(200)]
    assert told(SlowData(0, runs_ahead=False), *steps) == []


def test_beside_a_device_that_is_still_busy_only_the_rest_of_the_reading_is_waiting():
    assert told(SlowData(0, runs_ahead=True), *[(0.3, 0.3)] * 100) == []
    (said,) = told(SlowData(0, runs_ahead=True), *[(0.6, 0.3)] * 100)
    assert said.startswith("a step waits 300 ms for its images, and then takes 300 ms; ")


def test_a_run_that_waits_for_its_images_says_so(tmp_path: Path, monkeypatch, capsys):
    decode = Split.decode

    def slow_decode(self, indices, *rest):
        if len(indices) == 4:  # of training
            time.sleep(2 * LEAST_SECONDS)
        return decode(self, indices, *rest)

    monkeypatch.setattr(Split, "decode", slow_decode)
    monkeypatch.setattr("vigpipe.run.slow_data.WINDOW", 2)
    monkeypatch.setattr("vigpipe.run.slow_data.LARGEST_SHARE", 0.0)
    run = prepare(TrainConfig(steps=3, batch_size=4), torch.float32)
    run = with_images(run, shortened(images_of(run), 12, 3))
    assert train(run, 0, torch.device("cpu"), tmp_path) == 0
    (said,) = re.findall(r"^a step waits .*", capsys.readouterr().out, re.MULTILINE)
    assert re.search(r"waits [0-9]+ ms for its images, .*; let processes read them", said)
    assert '"event": "data"' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(("batch_size", "num_heard"), [(4, 3), (8, 5)])
def test_partial_batches_count_only_if_there_are_no_full_ones(
    batch_size, num_heard, tmp_path, monkeypatch
):
    heard = []
    monkeypatch.setattr(SlowData, "add", lambda *seconds: heard.append(seconds))
    run = prepare(TrainConfig(steps=5, batch_size=batch_size), torch.float32)
    run = with_images(run, shortened(images_of(run), 5, 4))  # 4 and 1, or 5 of 8
    assert train(run, 0, torch.device("cpu"), tmp_path) == 0
    assert len(heard) == num_heard
