"""The emulated cluster: ranks that sleep, real tensors and transfers."""

import csv

import pytest

from benchmarks.emulate import emulate, list_cases
from benchmarks.emulated import write_page
from benchmarks.options import EmulateBench
from benchmarks.overhead import TimedStep, by_case, fit_overhead, make_case
from tests.world import run_ranks
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import even_plan
from vigpipe.planning.profile import Piece, Profile, read_profile, write_profile

pytestmark = pytest.mark.heavy

ms = 1e-3


def piece(name, forward, backward, boundary_bytes, parameter_bytes):
    """Costs at two and at four rows, in proportion."""
    forward, backward, both = ((value / 2, value) for value in (forward, backward, boundary_bytes))
    return Piece(name, forward, backward, (0, 0), both, parameter_bytes)


# Of four blocks; at four rows a boundary of 4, 8, 12, 16 numbers a sample, stem to last.
BLOCKS = tuple(piece(f"block {i}", 2 * ms, 3 * ms, 64 * (i + 2), 4000 + 40 * i) for i in range(4))
PROFILE = Profile(
    "vig_digits", {}, (2, 4), piece("stem", 1 * ms, 1 * ms, 64, 400), BLOCKS,
    piece("readout", 1 * ms, 2 * ms, 0, 80), (1.0,), 0.0, 0.0, 1e9, 0.0, 0.0, 3.0, 0, {},
)  # fmt: skip


def case(num_stages, num_microbatches, num_replicas=1):
    layout = Layout(num_stages, num_microbatches, num_replicas)
    return make_case(layout, even_plan(4, num_stages), PROFILE, 4, 1.0)


def step(of, excess, seconds=0.0):
    total = of.ideal_seconds + excess
    return TimedStep(of, 0, total + seconds, total, seconds, 1e-4, 0.0, 100, 1000)


def test_the_fit_finds_what_was_put_in_and_looks_at_the_fastest_repeat(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    layouts = [case(s, m, d) for d in (1, 2) for s in (1, 2, 4) for m in (4, 8, 16)]
    steps = []
    for each in layouts:
        known = 300e-6 * each.waves + 70e-6 * each.transfers
        if each.layout.pipeline_size == 1 or each.layout.num_replicas == 2:
            known = 1.0  # must not count
        steps += [step(each, known, seconds=0.5), step(each, 3 * known)]
    fit = fit_overhead(by_case(steps))
    assert fit is not None
    assert fit.microbatch_seconds == pytest.approx(300e-6)
    assert fit.transfer_seconds == pytest.approx(70e-6)
    assert fit.residual_seconds == pytest.approx(0, abs=1e-9)
    assert fit.microbatch_error == pytest.approx(0, abs=1e-9)
    assert (fit.num_layouts, fit.most_ranks) == (6, 4)
    too_few = [step(case(*degrees), ms) for degrees in ((2, 4), (4, 8))]
    assert fit_overhead(by_case(too_few)) is None


def emulate_on(rank, world_size, bench):
    profile = read_profile(bench.profile)
    return emulate(list_cases(bench, profile), bench, profile, timeout=60)


@pytest.mark.multiprocess
def test_every_layout_runs_and_none_is_faster_than_its_ideal(tmp_path, capsys):
    write_profile(PROFILE, tmp_path / "profile.json")
    small = {"stages": "1,2", "microbatches": "2,4", "dp": "1,2", "repeats": 1}
    bench = EmulateBench(profile=tmp_path / "profile.json", sync="double", schedule="1f1b", **small)
    by_rank = run_ranks(emulate_on, 5, bench)  # the fifth rank only waits
    assert by_rank[4] == []
    assert {s.case.layout.world_size for s in by_rank[3]} == {4}
    steps = by_rank[0]
    degrees = [(d, s, m) for d in (1, 2) for s in (1, 2) for m in (2, 4)]
    ran = [(la.num_replicas, la.num_stages, la.num_microbatches)
           for la in (s.case.layout for s in steps)]  # fmt: skip
    assert ran == degrees
    for each in steps:
        assert each.schedule_seconds >= each.case.ideal_seconds
        assert each.seconds >= max(each.schedule_seconds, each.sync_seconds)
        assert min(each.late_seconds, each.cpu_seconds) > 0
        # Of the largest stage: everything, or the first half of the blocks and the stem.
        whole = each.case.layout.pipeline_size == 1
        numbers = PROFILE.trained_bytes // 4 if whole else (400 + 4000 + 4040) // 4
        assert each.sync_bytes == numbers * 8
    write_page(tmp_path, bench, PROFILE, steps, [50e-6, 60e-6, 70e-6])
    for text in ((tmp_path / "README.md").read_text(), capsys.readouterr().out):
        assert "µs a micro-batch" not in text  # two layouts of several stages are no fit
        assert "A sleep of a lone rank ends 60 µs late" in text
        assert "bubble: (S−1)/(M+S−1)" in text
        assert "MB/s of a rank" in text
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert len(rows) == 8
    assert float(rows[0]["seconds"]) == steps[0].seconds
    assert (tmp_path / "overhead.png").read_bytes().startswith(b"\x89PNG")
