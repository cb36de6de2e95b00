"""Replicas with parts of their own (--items own): averaging them is federated averaging.

McMahan et al. 2017 (arXiv:1602.05629), algorithm 1: each client trains on its own data, and the
weights of all are averaged, each by the number of samples that it has trained on.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.graphs.test_exactness import part_by_hand
from tests.graphs.test_training import refused, run_rank
from tests.model.gnn.graphs import PygModel
from tests.world import run_ranks
from vigpipe.config.options import TrainConfig
from vigpipe.graphs.job import GraphJob
from vigpipe.job.order import epoch_order
from vigpipe.run.facts import prepare

EVERY, EPOCHS = 3, 2
OWN = TrainConfig(
    model="sage",
    data="sbm:400,4,12,6",
    width=8,
    sampler="parts",
    partition="random",
    parts=9,  # replica 0 has five of them, replica 1 four
    dp=2,
    strategy="periodic",
    items="own",
    average_every=EVERY,
    epochs=EPOCHS,
    opt="sgd",
    lr=0.1,
    dtype="float64",
    checkpoint_every=4,
    seed=3,
)


def by_hand() -> dict[str, torch.Tensor]:
    """Average two models of torch-geometric that take steps on their own parts."""
    run = prepare(OWN, torch.float64)
    job = run.job
    assert isinstance(job, GraphJob)
    assert job.partition is not None
    graph, parts = job.graph, job.partition.parts
    sizes = graph.num_features, graph.num_classes
    models = [PygModel("sage", *sizes, num_layers=2, width=8).double() for _ in range(2)]
    start = run.build().state_dict()
    for model in models:
        model.load_state_dict(start)
    # timm's "sgd" is SGD with Nesterov momentum.
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9, nesterov=True) for m in models]
    samples, step = [0, 0], 0

    def average() -> None:
        states = [model.state_dict() for model in models]
        for name in states[0]:
            mean = sum(n * state[name] for n, state in zip(samples, states, strict=True))
            for state in states:
                state[name].copy_(mean / sum(samples))
        samples[:] = 0, 0

    for epoch in range(1, EPOCHS + 1):
        order = epoch_order(OWN.seed, epoch, 9)
        for turn in range(5):
            for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                own = order[order % 2 == replica]
                if turn == len(own):
                    continue  # its epoch has no more
                x, edges, is_train, labels = part_by_hand(graph, parts, own[turn])
                optimizer.zero_grad()
                F.cross_entropy(model(x, edges)[is_train], labels).backward()
                optimizer.step()
                samples[replica] += len(labels)
            step += 1
            if step % EVERY == 0:
                average()
    if any(samples):
        average()
    return {name: p.detach() for name, p in models[0].named_parameters()}


@pytest.mark.multiprocess
@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_weights_are_those_of_federated_averaging(stages, tmp_path):
    folder, expected = tmp_path / "run", by_hand()
    config = replace(OWN, stages=stages)
    assert run_ranks(run_rank, 2 * stages, config, folder) == [0] * (2 * stages)
    found = load_file(folder / "model.safetensors")
    assert max((found[name] - weight).abs().max() for name, weight in expected.items()) < 1e-10


def test_wrong_use_is_one_sentence():
    no_parts: dict[str, Any] = {"partition": None, "parts": None}
    images = {"model": "vig_digits", "data": "digits", "width": None, "sampler": None, **no_parts}
    few = "takes 5 sub-graphs, but --sampler parts with --parts 9 and --merge 1 and --dp 2 has 4 of"
    rows = [
        ({"sampler": "full", **no_parts}, "--items own: is for a graph that"),
        (images, "--items own: is for a graph that is cut into"),
        ({"strategy": "synchronous", "average_every": None}, "--items own: is for --strategy peri"),
        (
            {"microbatches": 5},
            f"--microbatches 5: a step of a replica {few} its own an epoch; choo",
        ),
        (
            {"dp": 10},
            "each of 10 replicas has its own; choose fewer replicas, or --parts 10",
        ),
    ]
    refused(rows, OWN)
