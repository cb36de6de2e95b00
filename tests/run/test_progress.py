"""What a user reads while a run goes on."""

import io
import time

import pytest
from rich.console import Console

from vigpipe.errors import InputError
from vigpipe.run.progress import RunProgress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def lines_of(clock, log_every, steps, terminal=False, pause_after=0):
    """What is printed by steps of 2 seconds, with 8 samples and a loss of 1 / step each."""
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True, highlight=False, force_terminal=terminal)
    with RunProgress(console, 100, 0, log_every, num_epochs=11) as progress:
        for step in range(1, steps + 1):
            clock[0] += 2.0
            progress.add(step, 1 + step // 10, 1 / step, 0.004, 8, 8)
            if step == pause_after:
                clock[0] += 1000.0
                progress.resume()
    return out.getvalue().splitlines()


def test_without_a_terminal_there_is_a_line_every_half_minute(clock):
    first, second = lines_of(clock, None, 31)
    # 85 steps of 2 s are left; the second epoch begins at step 10, and so does the mean of 1/step.
    assert first == (
        "step 15 of 100, epoch 2 of 11: loss 0.0815, lr 0.004, 4 images/s, 0:02:50 left"
    )
    assert second.startswith("step 30 of 100, epoch 4 of 11: loss 0.0333, lr 0.004, 4 images/s")


def test_lines_every_so_many_steps(clock):
    lines = lines_of(clock, 10, 35)
    assert [line.split(" of ")[0] for line in lines] == ["step 10", "step 20", "step 30"]


def test_never(clock):
    assert lines_of(clock, "never", 90) == []


def test_an_evaluation_does_not_lower_the_throughput(clock):
    lines = lines_of(clock, 10, 20, pause_after=12)
    assert ["4 images/s" in line for line in lines] == [True, True]
    assert "left" in lines[1]


def test_a_terminal_has_a_bar_with_the_same_facts_and_no_lines(clock):
    text = "\n".join(lines_of(clock, None, 31, terminal=True))
    assert "step 15 of 100" not in text
    assert "epoch 4 of 11: loss 0.0" in text
    assert "lr 0.004, 4 images/s" in text


def test_a_terminal_has_lines_too_if_they_are_asked_for(clock):
    assert "step 20 of 100" in "\n".join(lines_of(clock, 20, 31, terminal=True))


def test_without_samples_there_is_no_loss(clock):
    out = io.StringIO()
    with RunProgress(Console(file=out, soft_wrap=True), 100, 0, 1, "nodes") as progress:
        for step, num_samples in enumerate((0, 8, 0), 1):
            clock[0] += 2.0
            progress.add(step, 1, 0.5 if num_samples else 0.0, 0.004, num_samples, 60)
    assert out.getvalue().splitlines() == [
        "step 1 of 100, epoch 1 of 1: lr 0.004, 30 nodes/s",
        "step 2 of 100, epoch 1 of 1: loss 0.5000, lr 0.004, 30 nodes/s, 0:03:16 left",
        "step 3 of 100, epoch 1 of 1: lr 0.004, 30 nodes/s, 0:03:14 left",
    ]


def test_another_text_is_refused():
    with pytest.raises(InputError, match="--log-every often: must be a number of steps"):
        RunProgress(Console(), 10, 0, "often")
