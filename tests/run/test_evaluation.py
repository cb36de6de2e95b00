"""The scores of test and validation images, against one pass of the model over all of them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.oracle import images_of, shortened, with_images
from tests.test_cli import make_pictures
from vigpipe.analysis.run_timing import make_recorder
from vigpipe.config.options import TrainConfig
from vigpipe.data import Split
from vigpipe.data.score import ImageScore
from vigpipe.job.score import Score, Scores
from vigpipe.run.evaluation import evaluate, evaluate_all
from vigpipe.run.facts import prepare
from vigpipe.run.rank import RankState, make_rank_state

CPU = torch.device("cpu")


def make(num_test: int | None = None, **options) -> RankState:
    """A worker of one process; the source shortened to that many test images."""
    run = prepare(TrainConfig(dtype="float64", **options), torch.float64)
    if num_test is not None:
        run = with_images(run, shortened(images_of(run), 10, num_test))
    return make_rank_state(run, 0, CPU)


def in_one_pass(rank_state: RankState, split: Split) -> ImageScore:
    with torch.no_grad():
        model = rank_state.run.build().eval()
        logits = model(split.read(range(len(split))).double(), torch.arange(len(split)))
    labels = torch.from_numpy(split.labels)
    places = (logits > logits.gather(1, labels[:, None])).sum(1)  # 0: the right class is first
    loss = F.cross_entropy(logits, labels).item()
    counts = (places < 1).double().mean().item(), (places < 5).double().mean().item()
    return ImageScore(loss, *counts, len(labels))


def assert_equal(score: Score | None, reference: ImageScore) -> None:
    assert isinstance(score, ImageScore)
    assert score.num_samples == reference.num_samples
    assert score.loss == pytest.approx(reference.loss, rel=1e-12)
    assert score.top1 == pytest.approx(reference.top1, abs=1e-12)
    assert score.top5 == pytest.approx(reference.top5, abs=1e-12)


@pytest.mark.parametrize("num_test", [1, 24, 50])
def test_every_image_counts_once_whatever_the_batches_are(num_test):
    rank_state = make(num_test, batch_size=8, microbatches=3)
    test = images_of(rank_state.run).test
    scores, reference = evaluate(rank_state, ("test",)), in_one_pass(rank_state, test)
    assert scores is not None
    assert_equal(scores["test"], reference)
    assert reference.num_samples == num_test


def test_validation_images_have_scores_of_their_own():
    rank_state = make(20, batch_size=8, microbatches=3, validation=0.02)
    scores, source = evaluate_all(rank_state), images_of(rank_state.run)
    assert source.validation is not None
    assert len(source.validation) == 30  # 3 of each class
    assert_equal(scores.test, in_one_pass(rank_state, source.test))
    assert_equal(scores.validation, in_one_pass(rank_state, source.validation))
    assert scores.average is None
    assert scores.validation_average is None


def test_both_scores_are_of_the_moving_average_too():
    rank_state = make(20, batch_size=8, validation=0.02, ema=0.5)
    assert rank_state.trained.ema is not None
    before = evaluate_all(rank_state)
    with torch.no_grad():
        for parameter in rank_state.trained.parameters().values():
            parameter.mul_(0.5)
    after = evaluate_all(rank_state)
    assert before == (before.test, before.test, before.validation, before.validation)
    assert (after.average, after.validation_average) == (before.test, before.validation)
    assert after.test != before.test
    assert after.validation != before.validation


def test_only_test_images_are_timed_as_test_batches():
    options = {"timing": True, "timing_warmup": 0, "batch_size": 8, "steps": 1}
    run = prepare(TrainConfig(validation=0.02, **options), torch.float32)
    run = with_images(run, shortened(images_of(run), 10, 20))
    recorder = make_recorder(run, 0, CPU)
    assert recorder is not None
    evaluate_all(make_rank_state(run, 0, CPU, recorder))
    assert [step.step for step in recorder.steps["test"]] == [1, 2, 3]  # of 20 images, not of 30
    of_batches = {row.step: (row.samples, row.full_batch) for row in recorder.take_rows()}
    assert of_batches == {1: (8, 8), 2: (8, 8), 3: (4, 8)}


def test_a_row_and_a_line_tell_which_images_a_score_is_of():
    test, average = ImageScore(0.5, 0.75, 1.0, 8), ImageScore(0.25, 0.5, 1.0, 8)
    validation = replace(test, top1=0.25, num_samples=4)
    of_validation = replace(average, top1=0.125)
    alone, scores = Scores(test, average), Scores(test, average, validation, of_validation)
    assert str(alone) == (
        "test loss 0.5000, top-1 75.00%, top-5 100.00% of 8 images; "
        "test with averaged weights: loss 0.2500, top-1 50.00% of 8 images"
    )
    assert str(scores) == (
        "validation loss 0.5000, top-1 25.00% of 4 images; test loss 0.5000, top-1 75.00%, "
        "top-5 100.00% of 8 images; validation with averaged weights: loss 0.2500, top-1 12.50% "
        "of 8 images; test with averaged weights: loss 0.2500, top-1 50.00% of 8 images"
    )
    table = {
        **{"loss": 0.5, "top1": 0.25, "top5": 1.0, "images": 4},
        "ema": {"loss": 0.25, "top1": 0.125, "top5": 1.0},
    }
    assert scores.as_row() == alone.as_row() | {"validation": table}
    assert scores.as_summary() == alone.as_summary() | {"validation": table}


def test_with_two_classes_the_right_one_is_always_among_five(tmp_path):
    rank_state = make(data=str(make_pictures(tmp_path)), batch_size=4)
    scores = evaluate(rank_state, ("test",))
    assert scores is not None
    assert scores["test"].numbers()["top5"] == 1.0
    assert scores["test"].num_samples == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_and_no_score(value):
    rank_state = make(20, batch_size=8)
    weights = list(rank_state.trained.parameters().values())[-1]
    with torch.no_grad():
        weights.fill_(value)
    with pytest.raises(FloatingPointError, match=r"evaluation after step 0: logits are NaN"):
        evaluate(rank_state, ("test",))
