"""The tables that hold runs side by side."""

from dataclasses import replace
from statistics import median

import pytest

from tests.report.runs import COMMIT, NUM_WARMUP, going_on, shared_run, write_run
from vigpipe.job.rows import Fill
from vigpipe.report.comparison import differences, progress, ratios, run_table, settled_steps
from vigpipe.report.fields import Fields
from vigpipe.report.markup import Shortened
from vigpipe.report.read import read_runs


def test_the_table_tells_what_a_run_was_and_reached():
    timed = shared_run()
    dead = shared_run(timed=False, finished=False, replicas=1, stages=3)
    table = dict(run_table(read_runs([timed, dead])))
    assert table["state"] == ["finished", "unfinished"]
    assert table["model"] == ["vig_digits", "vig_digits"]
    assert table["layout"] == [
        "2 replicas × 2 stages, 4 micro-batches, gpipe",
        "1 replica × 3 stages, 4 micro-batches, gpipe",
    ]
    assert table["hardware"] == ["A processor, 4 cores", "–"]
    assert table["steps"] == ["30", "30"]
    assert table["epochs"] == ["2 of 2", "2 of 2"]
    assert table["training loss"] == ["0.2500, mean of epoch 2"] * 2
    assert table["test top-1"][0] == "90.00%, moving average 60.00%"
    assert table["peak memory"] == ["653.00 MB, most of 4 ranks", "–"]
    assert table["commit"] == [Shortened("0123456789+", COMMIT), "–"]
    assert table["versions"] == ["vigpipe 0.1.0, torch 2.15.0", "–"]


def test_runs_of_images_and_of_a_graph_have_lines_of_their_own_beside_one_another():
    images = shared_run(timed=False, validated=True)
    nodes = shared_run(timed=False, validated=True, graph=True, model="sage")
    runs = read_runs([images, nodes])
    table = dict(run_table(runs))
    assert table["graph"] == ["–", "1,200 nodes, 9,876 edges"]
    assert table["test top-1"] == ["90.00%, moving average 60.00%", "–"]
    assert table["test accuracy"] == ["–", "90.00%, moving average 60.00%"]
    assert table["validation top-1"] == ["75.00%, moving average 45.00%", "–"]
    assert table["validation accuracy"] == ["–", "75.00%, moving average 45.00%"]
    assert "test micro-F1" not in table  # it is the accuracy
    assert table["test macro-F1"] == ["–", "99.00%"]
    rates = [str(cell) for name in ("images/s, median", "nodes/s, median") for cell in table[name]]
    assert [rate == "–" for rate in rates] == [False, True, True, False]
    medians = dict(ratios(runs))
    assert (medians["images/s"][1], medians["nodes/s"][0]) == ("–", "–")
    assert medians["step, ms"][1].endswith("(1.00×)")
    assert not {"graph", "test accuracy", "nodes/s, median"} & set(dict(run_table(runs[:1])))


def test_only_a_whole_hash_is_shortened():
    (run,) = read_runs([shared_run(timed=False)])
    whole = "a" * 64
    for commit, cell in ((whole, Shortened("a" * 10, whole)), ("0123456789abcdef",) * 2):
        told = replace(run, summary=Fields({"commit": commit}, ""))
        assert dict(run_table([told]))["commit"] == [cell]


def test_facts_that_no_run_tells_have_no_line():
    dead = shared_run(timed=False, finished=False)
    table = dict(run_table(read_runs([dead])))
    assert "model" in table
    assert not {"hardware", "commit", "host", "versions", "peak memory"} & set(table)


def test_a_run_that_goes_on_tells_how_far_it_is(tmp_path):
    folder = write_run(tmp_path / "run", timed=False, finished=False)
    with going_on(folder):
        (run,) = read_runs([folder])
    assert progress(run) == "step 30 is done, of epoch 2 of 2"
    table = dict(run_table([run]))
    assert table["state"] == ["running"]
    run = replace(run, evaluations=(), options={"epochs": 9, "steps": 40})
    table = dict(run_table([run]))
    assert (table["steps"], table["epochs"]) == (["30 of 40"], ["2"])
    assert table["training loss"] == [f"{2.3 * 0.93**30:.4f}, step 30"]
    assert progress(replace(run, steps=())) == "it has not made its first step"


def test_warmup_is_left_out_of_medians():
    timed, untimed = read_runs([shared_run(), shared_run(timed=False)])
    assert settled_steps(timed)[0].number == NUM_WARMUP + 1
    assert settled_steps(untimed)[0].number == 2
    expected = median(step.seconds for step in timed.steps[NUM_WARMUP:])
    table = dict(run_table([timed]))
    assert table["step, median"] == [f"{expected:.4f} s"]
    assert table["waiting for data a step, median"] == [f"{expected / 8:.4f} s"]


@pytest.mark.parametrize(("timed", "told"), [(True, True), (False, False)])
def test_medians_are_of_full_batches_and_partial_ones_have_a_line(timed, told):
    run, whole = read_runs(
        [shared_run(timed=timed, partial=28, told=told), shared_run(timed=timed)]
    )
    first = NUM_WARMUP if timed else 1
    full = [step for step in run.steps[first:] if step.number % 15]
    assert list(settled_steps(run)) == full
    expected = median(step.seconds for step in full)
    partial = median(run.steps[i].seconds for i in (14, 29))
    table = dict(run_table([run, whole]))
    assert table["step, median"][0] == f"{expected:.4f} s"
    assert table["step with a partial batch, median"] == [
        f"{partial:.4f} s of 28 of 100 samples",
        "–",
    ]
    assert float(dict(ratios([run]))["step, ms"][0]) == pytest.approx(1e3 * expected, abs=1e-3)


def test_sub_graphs_count_whatever_their_size_unless_the_run_tells_of_missing_ones():
    old, told = read_runs([shared_run(graph=True, partial=28, told=t) for t in (False, True)])
    assert len(settled_steps(old)) == len(old.steps) - NUM_WARMUP
    assert len(settled_steps(told)) == len(told.steps) - NUM_WARMUP - 2
    table = dict(run_table([told]))
    (cell,) = table["step with a partial batch, median"]
    assert str(cell).endswith("s of 28 of 100 sub-graphs")


def test_a_run_of_partial_batches_only_is_told_by_these():
    (run,) = read_runs([shared_run(timed=False)])
    steps = tuple(step._replace(partial=Fill(28, 100)) for step in run.steps)
    run = replace(run, steps=steps)
    assert settled_steps(run) == steps[1:]
    assert settled_steps(replace(run, steps=steps[:1])) == steps[:1]
    assert settled_steps(replace(run, steps=())) == ()


def test_ratios_are_to_the_first_run():
    timed = [shared_run(replicas=1, slow=slow) for slow in (1.0, 2.0)]
    table = dict(ratios(read_runs([*timed, shared_run(timed=False)])))
    assert table["stage 0, forward, ms"][1].endswith("(1.00×)")
    assert table["stage 1, backward, ms"][1].endswith("(2.00×)")
    assert table["stage 1, backward, ms"][2] == "–"
    assert table["step, ms"][2].endswith("×)")
    assert float(table["images/s"][0]) > float(table["images/s"][1].split()[0])


def test_only_options_that_differ_are_listed():
    folders = [shared_run(), shared_run(microbatches=8)]
    assert differences(read_runs(folders)) == [("microbatches", ["4", "8"])]
    assert differences(read_runs(folders[:1])) == []
