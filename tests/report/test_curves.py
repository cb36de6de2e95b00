"""What the lines over the steps of a run hold."""

from dataclasses import replace

import pytest

from tests.report.runs import shared_run
from tests.report.test_charts import traces
from vigpipe.job.rows import Fill
from vigpipe.report import curves
from vigpipe.report.read import Evaluation, SplitScore, StepMetrics, read_runs

CHARTS = (
    curves.loss_chart,
    curves.accuracy_chart,
    curves.learning_rate_chart,
    curves.throughput_chart,
)


def step(number, epoch, images, loss=1.0, lr=0.1, seconds=0.5):
    return StepMetrics(number, epoch, loss, lr, seconds, images / seconds)


@pytest.fixture
def make():
    """Makes a run of the given steps and evaluations."""
    (run,) = read_runs([shared_run(timed=False)])
    return lambda *steps, evaluations=(): replace(run, steps=steps, evaluations=evaluations)


def test_runs_are_drawn_over_one_another_with_one_entry_each():
    runs = read_runs([shared_run("a<b>"), shared_run("b", timed=False)])
    for chart in CHARTS:
        drawn = traces(chart(runs))
        entries = [trace["name"] for trace in drawn if trace["showlegend"]]
        assert entries == ["a&lt;b&gt;", "b"]
        assert len({trace["line"]["color"] for trace in drawn}) == 2


def test_validation_images_have_lines_of_their_own():
    (run,) = read_runs([shared_run(timed=False, validated=True)])
    loss, accuracy = traces(curves.loss_chart([run])), traces(curves.accuracy_chart([run]))
    assert [trace["name"] for trace in loss[2:]] == ["test", "validation"]
    assert (loss[3]["x"], loss[3]["y"]) == ([15, 30], [0.5, 0.5])
    assert {trace["name"]: trace["y"] for trace in accuracy} == {
        "test top-1": pytest.approx([45, 90]),
        "test top-5": pytest.approx([99, 99]),
        "test top-1, moving average": pytest.approx([30, 60]),
        "validation top-1": pytest.approx([37.5, 75]),
        "validation top-1, moving average": pytest.approx([22.5, 45]),
    }
    assert len({trace["line"]["dash"] for trace in accuracy}) == 5


def test_the_scores_of_nodes_have_names_of_their_own():
    (run,) = read_runs([shared_run(timed=False, graph=True)])
    names = [trace["name"] for trace in traces(curves.accuracy_chart([run]))]
    assert names == ["test accuracy", "test macro-F1", "test accuracy, moving average"]
    shares = {"accuracy": 0.9, "micro_f1": 0.6, "macro_f1": 0.5}
    row = Evaluation(1, 1, None, "nodes", SplitScore(0.5, shares))  # of several classes a node
    several = traces(curves.accuracy_chart([replace(run, evaluations=(row,))]))
    assert [trace["name"] for trace in several] == [
        *("test accuracy", "test micro-F1", "test macro-F1")
    ]
    assert len({trace["line"]["dash"] for trace in several}) == 3


def test_the_last_sub_graphs_of_an_epoch_are_few_only_if_fewer_than_all_others(make):
    def nodes(number, epoch, training_nodes):
        return StepMetrics(number, epoch, 1.0, 0.1, 1.0, 500.0, None, "nodes", training_nodes)

    sizes = (90, 110, 100), (90, 110, 40)
    steps = [
        nodes(3 * epoch + i + 1, epoch + 1, size)
        for epoch, own in enumerate(sizes)
        for i, size in enumerate(own)
    ]
    assert curves.small_batches(steps) == {5}
    (loss,) = traces(curves.loss_chart([make(*steps)]))
    assert loss["x"] == [1, 2, 3, 4, 6]
    (throughput,) = traces(curves.throughput_chart([make(*steps)]))
    assert throughput["x"] == [1, 2, 3, 4, 5]


def test_partial_batches_that_a_run_tells_of_have_no_throughput(make):
    (run,) = read_runs([shared_run(timed=False, partial=28, graph=True)])
    (throughput,) = traces(curves.throughput_chart([run]))
    assert throughput["x"] == [n for n in range(1, 31) if n % 15]
    only = [step(n, n, 28)._replace(partial=Fill(28, 100)) for n in (1, 2)]
    (throughput,) = traces(curves.throughput_chart([make(*only)]))
    assert throughput["x"] == [1, 2]


def test_training_and_test_loss_of_an_epoch_stand_side_by_side():
    (run,) = read_runs([shared_run(timed=False)])
    drawn = traces(curves.loss_chart([run]))
    entries = [trace["name"] for trace in drawn if trace["showlegend"]]
    assert entries == ["training", "training, mean of the epoch", "test"]
    training, of_epochs, test = drawn
    assert training["y"] == [step.loss for step in run.steps]
    assert of_epochs["x"] == test["x"] == [15, 30]
    assert of_epochs["y"] == [0.25, 0.25]
    assert test["y"] == [row.test.loss for row in run.evaluations]


def test_runs_from_before_the_loss_of_epochs_was_written_have_no_such_line(make):
    row = Evaluation(1, 1, None, "images", SplitScore(0.5, {"top1": 0.9, "top5": 0.99}))
    drawn = traces(curves.loss_chart([make(step(1, 1, 100), evaluations=(row,))]))
    assert [trace["line"]["dash"] for trace in drawn] == ["solid", "dot"]


def test_a_small_last_batch_is_joined_by_images_and_has_no_throughput(make):
    run = make(
        *(step(1, 1, 100), step(2, 1, 100, loss=1.0), step(3, 1, 25, loss=6.0)),
        *(step(4, 2, 100), step(5, 2, 100, loss=0.5), step(6, 2, 25, loss=3.0)),
    )
    (loss,) = traces(curves.loss_chart([run]))
    assert loss["x"] == [1, 3, 4, 6]
    assert loss["y"] == pytest.approx([1.0, (100 * 1.0 + 25 * 6.0) / 125, 1.0, 1.0])
    (throughput,) = traces(curves.throughput_chart([run]))
    assert throughput["x"] == [1, 2, 4, 5]
    assert set(throughput["y"]) == {200.0}
    (rate,) = traces(curves.learning_rate_chart([run]))
    assert rate["x"] == [1, 2, 3, 4, 5, 6]


def test_only_a_batch_that_ends_an_epoch_counts_as_its_smaller_last_one(make):
    # An epoch of a single batch, a run that goes on with smaller batches, sizes that only rounding
    # tells apart, and a file that was forged.
    for steps in (
        (step(1, 1, 50), step(2, 2, 40), step(3, 3, 40)),
        (step(1, 1, 50), step(2, 1, 40), step(3, 1, 40)),
        (step(1, 1, 100), step(2, 1, 100 - 1e-9)),
        (step(1, 1, 5), step(2, 1, -5)),
    ):
        for chart in (curves.loss_chart, curves.throughput_chart):
            (line,) = traces(chart([make(*steps)]))
            assert line["x"] == [step.number for step in steps]


def test_a_long_run_is_thinned_to_means(make):
    steps = [step(i, 1, 10, loss=float(i), lr=float(i % 2)) for i in range(1, 10_001)]
    (line,) = traces(curves.learning_rate_chart([make(*steps)]))
    assert len(line["x"]) == curves.MOST_POINTS
    assert set(line["y"]) == {0.5}
    assert line["x"][0] == 5.5  # of steps 1 to 10
