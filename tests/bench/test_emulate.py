"""The emulated cluster: ranks that sleep, real tensors and transfers."""

import csv
import re
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.world import run_command, run_ranks
from vigpipe.bench.emulate import emulate, list_cases
from vigpipe.bench.emulated import write_page
from vigpipe.bench.options import EmulateBench
from vigpipe.bench.overhead import Step, by_case, fit_overhead, make_case
from vigpipe.bench.sleeping import NUM_CLASSES, SleepingModel, sleep_until
from vigpipe.cli import main
from vigpipe.errors import InputError
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import even_plan
from vigpipe.parallel.split import cut_stages
from vigpipe.planning.profile import Piece, Profile, read_profile, write_profile

KEYS = torch.zeros(4, dtype=torch.int64)
ms = 1e-3


def piece(name, forward, backward, boundary_bytes, parameter_bytes):
    """Costs at two and at four rows, in proportion."""

    def both(value):
        return (value / 2, value)

    return Piece(
        name, both(forward), both(backward), both(0), both(boundary_bytes), parameter_bytes
    )


def make_profile():
    """Four blocks; at four rows a boundary of 4, 8, 12, 16 numbers a sample, stem to last."""
    blocks = [piece(f"block {i}", 2 * ms, 3 * ms, 64 * (i + 2), 4000 + 40 * i) for i in range(4)]
    return Profile(
        "vig_digits", {}, (2, 4), piece("stem", 1 * ms, 1 * ms, 64, 400), tuple(blocks),
        piece("readout", 1 * ms, 2 * ms, 0, 80), (1.0,), 0.0, 0.0, 1e9, 0.0, 0.0, 3.0, 0, {},
    )  # fmt: skip


PROFILE = make_profile()


def options(tmp_path, **changed):
    write_profile(PROFILE, tmp_path / "profile.json")
    small = {"stages": "1,2", "microbatches": "2,4", "dp": "1,2", "repeats": 2}
    return EmulateBench(profile=tmp_path / "profile.json", **{**small, **changed})


# ---- the model ------------------------------------------------------------------------------


def test_a_sleep_ends_after_its_deadline_and_says_how_late():
    start = time.perf_counter()
    late = sleep_until(start + 3 * ms)
    assert time.perf_counter() - start >= 3 * ms
    assert 0 <= late <= time.perf_counter() - start - 3 * ms
    assert sleep_until(start) >= 3 * ms  # long past: at once


def test_the_whole_model_sleeps_as_profiled_and_keeps_the_shapes():
    model = SleepingModel(PROFILE, microbatch_size=4)
    images = torch.zeros(4, 3, 8, 8, requires_grad=True)
    start = time.perf_counter()
    logits = model(images, KEYS)
    middle = time.perf_counter()
    logits.sum().backward()
    end = time.perf_counter()
    assert logits.shape == (4, NUM_CLASSES)
    assert middle - start >= (1 + 4 * 2 + 1) * ms
    assert end - middle >= (1 + 4 * 3 + 2) * ms
    assert images.grad is not None
    assert images.grad.shape == images.shape
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(model.late_seconds) == 2


def test_images_that_want_no_gradient_still_have_a_backward():
    model = SleepingModel(PROFILE, microbatch_size=4)
    start = time.perf_counter()
    model(torch.zeros(4, 1), KEYS).sum().backward()
    assert time.perf_counter() - start >= (10 + 15) * ms


def test_half_the_rows_and_a_scale_take_less():
    model = SleepingModel(PROFILE, microbatch_size=4, scale=0.5)
    assert model.forward_seconds(4) == pytest.approx(5 * ms)
    assert model.forward_seconds(2) == pytest.approx(2.5 * ms)
    assert model.backward_seconds(4) == pytest.approx(7.5 * ms)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_parts_hand_on_what_the_next_one_takes_and_share_the_bytes(num_stages):
    plan = even_plan(4, num_stages)
    stage_modules = cut_stages(lambda: SleepingModel(PROFILE, 4), plan, tuple(range(num_stages)))
    sizes = [sum(p.numel() for p in stage_module.parameters()) for stage_module in stage_modules]
    assert 4 * sum(sizes) == PROFILE.parameter_bytes
    wanted = [sum(4000 + 40 * block for block in blocks) for blocks in plan.stages]
    wanted[0] += 400
    wanted[-1] += 80
    assert [4 * size for size in sizes] == wanted
    assert sum(stage_module.forward_seconds(4) for stage_module in stage_modules) == pytest.approx(
        10 * ms
    )
    x = torch.zeros(4, 1)
    for stage_module, blocks in zip(stage_modules, plan.stages, strict=True):
        if not stage_module.has_stem:
            assert x.shape[1:] == stage_module.boundary_shape(blocks[0])
        x = stage_module(x, KEYS)
    assert x.shape == (4, NUM_CLASSES)


def test_a_boundary_is_as_large_as_profiled():
    model = SleepingModel(PROFILE, microbatch_size=4)
    assert [model.boundary_shape(block) for block in range(5)] == [(4,), (8,), (12,), (16,), (20,)]


def test_a_piece_without_weights_has_one_number_to_add_up():
    bare = replace(PROFILE, readout=replace(PROFILE.readout, parameter_bytes=0))
    assert SleepingModel(bare, 4).weights["readout"].numel() == 1


# ---- the ideal and the overhead -------------------------------------------------------------


def case(num_stages, num_microbatches, num_replicas=1):
    layout = Layout(num_stages, num_microbatches, num_replicas)
    return make_case(layout, even_plan(4, num_stages), PROFILE, 4, 1.0)


def step(of, excess, seconds=0.0):
    total = of.ideal_seconds + excess
    return Step(of, 0, total + seconds, total, seconds, 1e-4, 0.0, 100, 1000)


def test_the_ideal_step_follows_the_slowest_stage():
    # Stage 0: stem and two blocks, 5 + 7 ms; stage 1: two blocks and readout, 5 + 8 ms.
    two = case(2, 4)
    assert two.forward == pytest.approx((5 * ms, 5 * ms))
    assert two.backward == pytest.approx((7 * ms, 8 * ms))
    assert two.ideal_seconds == pytest.approx((3 * (5 + 8) + 10 + 15) * ms)
    assert two.bubble == pytest.approx(1 / 5)
    assert two.transfer_bytes == 64 * 3  # of block 1
    assert case(1, 4).ideal_seconds == pytest.approx(4 * 25 * ms)


def test_stages_cost_what_their_models_sleep():
    plan = even_plan(4, 3)
    whole = make_case(Layout(3, 1), plan, PROFILE, 3, 0.7)
    stage_modules = cut_stages(lambda: SleepingModel(PROFILE, 3, 0.7), plan, (0, 1, 2))
    assert whole.forward == pytest.approx(
        [stage_module.forward_seconds(3) for stage_module in stage_modules]
    )
    assert whole.backward == pytest.approx(
        [stage_module.backward_seconds(3) for stage_module in stage_modules]
    )


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
    assert fit.num_layouts == 6


def test_layouts_with_more_ranks_than_cores_have_no_say_if_the_others_are_enough(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    layouts = [case(s, m) for s in (2, 4) for m in (4, 8, 16)]
    seconds = [(100e-6 if m.layout.pipeline_size == 2 else 1.0) * m.waves for m in layouts]
    steps = [step(each, own) for each, own in zip(layouts, seconds, strict=True)]
    fit = fit_overhead(by_case(steps))
    assert fit is not None
    assert (fit.num_layouts, fit.most_ranks) == (3, 2)
    assert fit.microbatch_seconds == pytest.approx(100e-6)
    assert fit.transfer_seconds == pytest.approx(0, abs=1e-9)
    fit = fit_overhead(by_case(steps[1:]))  # two alone are too few
    assert fit is not None
    assert (fit.num_layouts, fit.most_ranks) == (5, 4)


def test_the_fit_tells_its_residual():
    noise = (1, -1, -1, 1)
    layouts = [case(s, m) for s in (2, 4) for m in (4, 8)]
    steps = [step(each, 10 * ms + n * ms) for each, n in zip(layouts, noise, strict=True)]
    fit = fit_overhead(by_case(steps))
    assert fit is not None
    assert 0.5 * ms < fit.residual_seconds
    assert fit.transfer_error > 0


@pytest.mark.parametrize("layouts", [[(1, 4), (1, 8), (1, 16)], [(2, 4), (4, 8)]])
def test_too_few_layouts_have_no_fit(layouts):
    assert fit_overhead(by_case([step(case(*degrees), ms) for degrees in layouts])) is None


# ---- real ranks -----------------------------------------------------------------------------


def emulate_on(rank, world_size, bench):
    profile = read_profile(bench.profile)
    return emulate(list_cases(bench, profile), bench, profile, timeout=60)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("sync", "schedule"), [("double", "gpipe"), ("drain", "1f1b")])
def test_every_layout_runs_and_none_is_faster_than_its_ideal(tmp_path, capsys, sync, schedule):
    bench = options(tmp_path, sync=sync, schedule=schedule)
    by_rank = run_ranks(emulate_on, 5, bench)  # one rank too many: it only waits
    assert by_rank[4] == []
    assert {s.case.layout.world_size for s in by_rank[3]} == {4}
    steps = by_rank[0]
    degrees = [(d, s, m) for d in (1, 2) for s in (1, 2) for m in (2, 4)]
    ran = [(la.num_replicas, la.num_stages, la.num_microbatches)
           for la in (s.case.layout for s in steps)]  # fmt: skip
    assert ran == 2 * degrees
    for each in steps:
        assert each.schedule_seconds >= each.case.ideal_seconds
        assert each.seconds >= max(each.schedule_seconds, each.sync_seconds)
        assert each.late_seconds > 0
        assert each.cpu_seconds > 0
        assert each.memory_bytes > 1e7
        # The largest stage: everything, or the second half of the blocks and the readout.
        numbers = {1: PROFILE.parameter_bytes // 4, 2: (4080 + 4120 + 80) // 4}
        stages = each.case.layout.pipeline_size
        largest = max(numbers[stages], (400 + 4000 + 4040) // 4 if stages == 2 else 0)
        assert each.sync_bytes == largest * (8 if sync == "double" else 4)

    write_page(tmp_path, bench, PROFILE, steps, [50e-6, 60e-6, 70e-6])
    page, printed = (tmp_path / "README.md").read_text(), capsys.readouterr().out
    for text in (page, printed):
        assert "µs a micro-batch" not in text  # two layouts of several stages are no fit
        assert "A sleep of a lone rank ends 60 µs late" in text
        assert "bubble: (S−1)/(M+S−1)" in text
        assert "MB/s of a rank" in text
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert len(rows) == 16
    assert float(rows[0]["seconds"]) == steps[0].seconds
    pixels = np.asarray(Image.open(tmp_path / "overhead.png").convert("RGB"))
    assert pixels.std() > 10
    assert read_profile(tmp_path / "profile.json") == PROFILE


@pytest.mark.multiprocess
def test_the_command_starts_its_ranks_and_states_the_overhead(tmp_path):
    write_profile(PROFILE, tmp_path / "profile.json")
    out = tmp_path / "out"
    done = run_command(
        [sys.executable, "-m", "vigpipe", "bench", "emulate",
         "--profile", str(tmp_path / "profile.json"),
         "--stages", "2,3", "--microbatches", "2,3", "--dp", "1", "--repeats", "1",
         "--out", str(out)]
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 layouts, 3 ranks" in done.stdout
    assert "**Overhead: " in (out / "README.md").read_text()
    assert len((out / "rows.csv").read_text().splitlines()) == 5


# ---- wrong use ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"stages": "1,8"}, "8 stages for 4 blocks"),
        ({"stages": "1,x"}, "--stages 1,x: must be whole numbers above 0"),
        ({"dp": "0"}, "--dp 0: must be whole numbers above 0"),
        ({"microbatches": ""}, "--microbatches : must be whole numbers above 0"),
        ({"repeats": 0}, "--repeats 0: must be at least 1"),
        ({"batch_size": 6}, "--batch-size 6: 1 replicas x 4 micro-batches do not share it evenly"),
        ({"batch_size": -1}, "--batch-size -1: must be at least 1"),
        ({"scale": 0.0}, "--scale 0.0: must be a number above 0"),
        ({"scale": float("nan")}, "--scale nan: must be a number above 0"),
        ({"scale": 1e9}, "choose another --scale"),
        ({"schedule": "1f1b", "stages": "4"}, "at least as many micro-batches as stages"),
    ],
)
def test_wrong_options_are_one_sentence(tmp_path, changed, expected):
    with pytest.raises(InputError, match=re.escape(expected)) as caught:
        list_cases(options(tmp_path, **changed), PROFILE)
    assert "\n" not in str(caught.value)


def test_a_batch_is_cut_over_replicas_and_microbatches(tmp_path):
    cases = list_cases(options(tmp_path, batch_size=16), PROFILE)
    found = {(c.layout.num_microbatches, c.layout.num_replicas): c.microbatch_size for c in cases}
    assert found == {(2, 1): 8, (4, 1): 4, (2, 2): 4, (4, 2): 2}
    assert {c.microbatch_size for c in list_cases(options(tmp_path), PROFILE)} == {4}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--profile", "nowhere.json"], "--profile nowhere.json: cannot be read"),
        (["--profile", "p.json", "--sync", "ddp"], "ddp"),
        ([], "profile"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(capsys, arguments, expected):
    assert main(["bench", "emulate", *arguments]) == 2
    assert expected in capsys.readouterr().err.lower()
