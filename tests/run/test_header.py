"""What a run says before its first step."""

from pathlib import Path

import pytest
import torch

from vigpipe.config.options import TrainConfig
from vigpipe.model.variants import create_model
from vigpipe.run.facts import prepare
from vigpipe.run.header import crowded, header

CPU = torch.device("cpu")


def lines(**options):
    run = prepare(TrainConfig(**options), torch.float32)
    return [line for line in header(run, CPU, Path("out")) if not line.startswith("load ")]


@pytest.mark.parametrize(
    ("options", "course", "layout"),
    [
        ({}, "15 epochs of 15 steps of 100 images", "on cpu"),
        ({"epochs": 1, "batch_size": 5000}, "1 epoch of 1 step of 1,437 images", "on cpu"),
        ({"steps": 1000}, "1,000 steps of 100 images, 66.7 epochs", "on cpu"),
        ({"microbatches": 2}, "15 epochs of 15 steps of 100 images", "2 micro-batches, on cpu"),
        (
            {"dp": 2, "stages": 2, "microbatches": 2, "schedule": "1f1b"},
            "15 epochs of 15 steps of 100 images",
            "2 replicas × 2 stages, 2 micro-batches, 1f1b, on cpu",
        ),
        (
            {"dp": 2, "strategy": "server"},
            "15 epochs of 15 steps of 100 images",
            "(2 workers + a server), on cpu",
        ),
    ],
)
def test_images(options, course, layout):
    first, second, third = lines(**options)
    assert first == (
        "vig_digits on digits: 1,437 training and 360 test images in 10 classes (0, 1, 2, 3, 4, …)"
    )
    assert second == f"{course}; 46,042 parameters"
    assert third == f"{layout}; results in out"


def test_a_graph():
    options = {"model": "gcn", "data": "sbm:60,3,8", "epochs": 2}
    first, second, third = lines(**options, shards=2)
    assert first.startswith("gcn on sbm:60,3,8: 60 nodes, ")
    assert first.endswith(" directed edges, 8 features, 3 classes (0, 1, 2)")
    assert second == "2 epochs of 1 step of the whole graph; 1,539 parameters"
    assert third == "2 shards, on cpu; results in out"
    _, second, _ = lines(**options, sampler="parts", parts=4, microbatches=2)
    assert second.startswith("2 epochs of 2 steps of 2 sub-graphs; ")


def test_weights_and_how_many_classes_they_had(tmp_path):
    weights = tmp_path / "published.pth"  # which has no metadata
    for before, change in ((4, " (4 → 10 classes)"), (10, "")):
        state = create_model("vig_digits", num_classes=before, in_chans=1).state_dict()
        torch.save(state, weights)
        _, second, _ = lines(weights=weights, new_classifier=True)
        assert second.endswith(f"; weights from {weights}, except prediction.4{change}")


def test_a_crowded_machine_is_told_of():
    assert list(crowded(2.9, 2, 2)) == []
    assert list(crowded(12.0, 2, 2)) == ["load 12 on 2 cores: --threads 1 may be faster"]
    assert list(crowded(12.0, 2, 1)) == ["load 12 on 2 cores: steps take longer than alone"]
