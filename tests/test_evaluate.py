"""The score over the test images, against one pass of the model over all of them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.oracle import shortened
from tests.test_cli import make_pictures
from vigpipe.config import TrainConfig
from vigpipe.evaluate import Score, evaluate
from vigpipe.job import prepare
from vigpipe.worker import Worker, make_worker

CPU = torch.device("cpu")


def make(num_test: int | None = None, **options) -> Worker:
    """A worker of one process; the source shortened to that many test images."""
    job = prepare(TrainConfig(dtype="float64", **options), torch.float64)
    if num_test is not None:
        job = replace(job, source=shortened(job.source, 10, num_test))
    return make_worker(job, 0, CPU)


def in_one_pass(worker: Worker) -> Score:
    test = worker.job.source.test
    with torch.no_grad():
        model = worker.job.build().eval()
        logits = model(test.read(range(len(test))).double(), torch.arange(len(test)))
    labels = torch.from_numpy(test.labels)
    places = (logits > logits.gather(1, labels[:, None])).sum(1)  # 0: the right class is first
    loss = F.cross_entropy(logits, labels).item()
    counts = (places < 1).double().mean().item(), (places < 5).double().mean().item()
    return Score(loss, *counts, len(labels))


@pytest.mark.parametrize("num_test", [1, 7, 24, 50])
def test_every_image_counts_once_whatever_the_batches_are(num_test):
    worker = make(num_test, batch_size=8, microbatches=3)
    score, reference = evaluate(worker), in_one_pass(worker)
    assert score is not None
    assert score.images == reference.images == num_test
    assert score.loss == pytest.approx(reference.loss, rel=1e-12)
    assert score.top1 == pytest.approx(reference.top1, abs=1e-12)
    assert score.top5 == pytest.approx(reference.top5, abs=1e-12)


def test_with_two_classes_the_right_one_is_always_among_five(tmp_path):
    worker = make(data=str(make_pictures(tmp_path)), batch_size=4)
    score = evaluate(worker)
    assert score is not None
    assert (score.top5, score.images) == (1.0, 4)


def test_evaluation_changes_no_running_statistics():
    worker = make(20, batch_size=8)
    before = {name: tensor.clone() for name, tensor in worker.state().items()}
    evaluate(worker)
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.state().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_and_no_score(value):
    worker = make(20, batch_size=8)
    weights = list(worker.parameters().values())[-1]
    with torch.no_grad():
        weights.fill_(value)
    with pytest.raises(FloatingPointError, match=r"evaluation after step 0: logits are NaN"):
        evaluate(worker)
