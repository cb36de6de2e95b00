"""The score over the test images, against one pass of the model over all of them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.oracle import shortened
from tests.test_cli import make_pictures
from vigpipe.config.options import TrainConfig
from vigpipe.run.evaluation import Score, evaluate
from vigpipe.run.facts import prepare
from vigpipe.run.rank import RankState, make_rank_state

CPU = torch.device("cpu")


def make(num_test: int | None = None, **options) -> RankState:
    """A worker of one process; the source shortened to that many test images."""
    run = prepare(TrainConfig(dtype="float64", **options), torch.float64)
    if num_test is not None:
        run = replace(run, source=shortened(run.source, 10, num_test))
    return make_rank_state(run, 0, CPU)


def in_one_pass(rank_state: RankState) -> Score:
    test = rank_state.run.source.test
    with torch.no_grad():
        model = rank_state.run.build().eval()
        logits = model(test.read(range(len(test))).double(), torch.arange(len(test)))
    labels = torch.from_numpy(test.labels)
    places = (logits > logits.gather(1, labels[:, None])).sum(1)  # 0: the right class is first
    loss = F.cross_entropy(logits, labels).item()
    counts = (places < 1).double().mean().item(), (places < 5).double().mean().item()
    return Score(loss, *counts, len(labels))


@pytest.mark.parametrize("num_test", [1, 7, 24, 50])
def test_every_image_counts_once_whatever_the_batches_are(num_test):
    rank_state = make(num_test, batch_size=8, microbatches=3)
    score, reference = evaluate(rank_state), in_one_pass(rank_state)
    assert score is not None
    assert score.images == reference.images == num_test
    assert score.loss == pytest.approx(reference.loss, rel=1e-12)
    assert score.top1 == pytest.approx(reference.top1, abs=1e-12)
    assert score.top5 == pytest.approx(reference.top5, abs=1e-12)


def test_with_two_classes_the_right_one_is_always_among_five(tmp_path):
    rank_state = make(data=str(make_pictures(tmp_path)), batch_size=4)
    score = evaluate(rank_state)
    assert score is not None
    assert (score.top5, score.images) == (1.0, 4)


def test_evaluation_changes_no_running_statistics():
    rank_state = make(20, batch_size=8)
    before = {name: tensor.clone() for name, tensor in rank_state.state().items()}
    evaluate(rank_state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in rank_state.state().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_and_no_score(value):
    rank_state = make(20, batch_size=8)
    weights = list(rank_state.parameters().values())[-1]
    with torch.no_grad():
        weights.fill_(value)
    with pytest.raises(FloatingPointError, match=r"evaluation after step 0: logits are NaN"):
        evaluate(rank_state)
