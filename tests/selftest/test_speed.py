"""Which ways are timed, how they take turns, and the ratios between them."""

from typing import Any

import pytest
import torch

from tests.selftest.made_up import CPU, H200, machine, speed_rows
from tests.selftest.test_rows import Clock
from vigpipe.selftest import speed, way
from vigpipe.selftest.machine import Gpu, Machine
from vigpipe.selftest.rows import Budget
from vigpipe.selftest.speed import EAGER_AMP, Entry
from vigpipe.selftest.way import Contender, Prepared, Way
from vigpipe.selftest.worker import OutOfTime, WorkerError

OURS = Way("ours", False, "bfloat16")
EXACT = Way("reference", False, "float32")


class FakeWorker:
    """Stands for a process; its replies are given, errors among them."""

    def __init__(self, clock=None, replies=()):
        self.clock, self.replies, self.asked = clock, list(replies), []
        self.has_ended = False

    def send(self, method):
        self.asked.append(method)

    def receive(self, seconds):
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if self.clock is not None:
            self.clock.now += reply
        return reply

    def ask(self, method, seconds):
        self.send(method)
        return self.receive(seconds)

    def end(self):
        self.has_ended = True


def entry(some_way, worker) -> Any:
    return Entry(some_way, "training", worker)


def test_a_cpu_runs_a_small_model():
    assert list(speed.models(CPU)) == ["vig_cifar_ti"]


def test_a_batch_fits_into_the_memory():
    for gigabytes, batch_size in ((139, 128), (45, 64), (24, 32), (11, 16)):
        gpu = Gpu("some", int(gigabytes * 1e9), "8.0", 100)
        assert speed.batch_size_of(Machine("cuda", "some", 8, (gpu, H200), {})) == batch_size


def test_ways_take_turns_as_long_as_there_is_time():
    clock = Clock()
    entries = [entry(w, FakeWorker(clock, [2.0] * 9)) for w in (EAGER_AMP, OURS)]
    speed._take_turns(entries, Budget(15, clock))
    assert [e.seconds for e in entries] == [[2.0] * 3] * 2
    assert all(e.worker.has_ended for e in entries)
    entries = [entry(w, FakeWorker(clock, [2.0] * 9)) for w in (EAGER_AMP, OURS)]
    speed._take_turns(entries, Budget(1000, clock))
    assert [len(e.seconds) for e in entries] == [speed.MOST_REPEATS] * 2


def test_a_way_that_fails_does_not_end_the_others():
    clock = Clock()
    broken = entry(OURS, FakeWorker(clock, [1.0, WorkerError("CUDA error")]))
    others = [entry(w, FakeWorker(clock, [1.0] * 9)) for w in (EAGER_AMP, EXACT)]
    for each in (broken, *others):
        each.prepared = Prepared(1.0, 1.0, 1e9, [])
    speed._take_turns([others[0], broken, others[1]], Budget(1000, clock))
    rows = {row.what: row for row in speed.rows_of("m", 8, [others[0], broken, others[1]])}
    assert [row.outcome for row in rows.values()] == ["measured", "failed", "measured"]
    assert rows["m, training: ours, bfloat16"].note == "CUDA error"


def test_what_failed_beside_others_is_tried_alone():
    prepared = Prepared(1.0, 1.0, 1e9, [])
    crowded = entry(OURS, FakeWorker(replies=[WorkerError("out of memory"), prepared]))
    too_large = entry(EXACT, FakeWorker(replies=[WorkerError("out of memory")] * 2))
    fine = entry(EAGER_AMP, FakeWorker(replies=[prepared]))
    gone = entry(EXACT, FakeWorker(replies=[WorkerError("its process ended with SIGSEGV")]))
    gone.worker.has_ended = True
    speed._prepare([crowded, too_large, gone, fine], Budget(1000), 20.0)
    assert (gone.outcome, gone.note) == ("failed", "its process ended with SIGSEGV")
    assert (crowded.prepared, fine.prepared) == (prepared, prepared)
    assert (too_large.outcome, too_large.prepared) == ("failed", None)
    assert too_large.note == "out of memory"
    assert too_large.worker.has_ended


def test_compiling_that_never_ends_fails_but_a_short_budget_skips():
    for left, outcome in ((1000, "failed"), (100, "skipped")):
        slow = entry(OURS, FakeWorker(replies=[OutOfTime("no result")]))
        speed._prepare([slow], Budget(left), 20.0)
        assert slow.outcome == outcome


def test_compiling_is_not_begun_without_time_for_it():
    compiled, eager = (Entry(Way("ours", c, "bfloat16"), "training") for c in (True, False))
    assert not speed._has_time(compiled, Budget(70), 20.0)
    assert compiled.outcome == "skipped"
    assert speed._has_time(compiled, Budget(90), 20.0) is False  # it was given up
    assert speed._has_time(eager, Budget(70), 20.0)


def test_ratios_are_to_eager_amp_and_to_the_best_reference():
    seconds = {
        EXACT: [4.0, 4.4, 4.0],
        EAGER_AMP: [2.0, 2.2, 2.0],
        Way("reference", True, "bfloat16"): [1.0, 1.0, 9.0],
        OURS: [0.5, 0.5, 0.5],
    }
    entries = []
    for index, (name, values) in enumerate(seconds.items()):
        prepared = Prepared(1.0, 1.0, 1e9, [[1.0, 2.0 + index]])
        entries.append(Entry(name, "inference", None, prepared, values))
    rows = {
        entry.way: row for entry, row in zip(entries, speed.rows_of("m", 8, entries), strict=True)
    }
    ours = rows[OURS].values
    assert ours["images_per_second"] == 16
    assert ours["to_eager_amp"] == {"median": 4.0, "least": 4.0, "most": 4.4}
    assert ours["to_best_reference"]["median"] == 2.0
    assert [row.values["is_best_reference"] for row in rows.values()] == [False, False, True, False]
    assert [row.values["logits_off_by"] for row in rows.values()] == [0, 0.5, 1, 1.5]


def test_without_its_reference_a_way_has_no_ratio():
    alone = Entry(OURS, "training", None, Prepared(1.0, 1.0, 1e9, []), [1.0])
    (row,) = speed.rows_of("m", 8, [alone])
    assert (row.values["to_eager_amp"], row.values["to_best_reference"]) == (None, None)
    assert "m, training, batches of 8" in "\n".join(speed.section([row]))


def test_the_page_shows_every_model():
    text = "\n".join(speed.section(list(speed_rows())))
    for model in speed.models(machine(1)):
        assert f"<h3>{model}, training, batches of 128</h3>" in text
        assert f"<h3>{model}, inference, batches of 128</h3>" in text
    assert "2.90 (2.90 – 2.90)" in text
    assert "OutOfMemoryError: CUDA out of memory" in text


@pytest.fixture
def _unchanged(monkeypatch):
    monkeypatch.setattr(way, "keep_freed_memory", lambda: None)  # of the whole pytest process
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    yield
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True  # torch's default


@pytest.mark.usefixtures("_unchanged")
@pytest.mark.parametrize(
    ("name", "mode"), [(EXACT, "inference"), (Way("ours", False, "tf32"), "training")]
)
def test_a_contender_runs(name, mode):
    contender = Contender("vig_digits", name, mode, 2, "cpu", 1, 1)
    prepared = contender.prepare()
    allowed = name.precision == "tf32"
    assert torch.backends.cuda.matmul.allow_tf32 is allowed
    assert torch.backends.cudnn.allow_tf32 is allowed
    assert prepared.step_seconds > 0
    assert len(prepared.logits) == (2 if mode == "inference" else 0)
    assert contender.turn() > 0
