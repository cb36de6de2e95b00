"""What a compressed sum leaves out is added to the next one."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from tests.replication.together import SHAPES, flat, run_together, tensors_of
from vigpipe.config.compress import parse_compress
from vigpipe.config.options import TrainConfig
from vigpipe.replication.compression import TopK, bytes_of_sum
from vigpipe.replication.decisions import ALL
from vigpipe.replication.feedback import (
    Compressor,
    make_compressor,
    make_method,
    notes_on_compression,
)
from vigpipe.replication.powersgd import PowerSgd

METHODS = ["bfloat16", "top-k:0.1", "top-k:1", "powersgd:2"]
YES, NO = torch.tensor(True), torch.tensor(False)


def compressor_of(exchange, compress: str, seed: int = 3, dtype=torch.float64) -> Compressor:
    parameters = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    return Compressor(make_method(parse_compress(compress)), exchange, parameters, seed)


@pytest.mark.parametrize("compress", METHODS)
@pytest.mark.parametrize("in_pair", [False, True])
def test_what_was_sent_and_what_is_left_are_all_that_there_was(compress, in_pair):
    """In float64 up to rounding: 5e-15 of the largest number."""
    num_steps = 4

    def work(exchange, replica):
        compressor = compressor_of(exchange, compress)
        partner = 1 - replica if in_pair else ALL
        weight = torch.tensor([3.0, 2.0][replica], dtype=torch.float64)
        arrived = torch.zeros(sum(map(math.prod, SHAPES.values())), dtype=torch.float64)
        for step in range(num_steps):
            means, total = compressor.mean(tensors_of(replica, step), weight, partner)
            assert total == 5
            arrived += flat(means) * total
        left = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        left |= {n.removeprefix("residual/"): t for n, t in compressor.residuals().items()}
        return arrived, flat(left.values())

    (arrived, left), (same, other_left) = run_together(2, work)
    assert torch.equal(arrived, same)
    steps = range(num_steps)
    expected = sum(
        (3 * flat(tensors_of(0, s)) + 2 * flat(tensors_of(1, s)) for s in steps), left * 0
    )
    # Over all replicas, the sum in bfloat16 is rounded once more, which nobody keeps.
    is_rounded = compress == "bfloat16" and not in_pair
    bound = 2**-8 * num_steps * 20 if is_rounded else 5e-15 * float(expected.abs().max())
    assert float((arrived + left + other_left - expected).abs().max()) <= bound
    assert (float(left.abs().max()) < 1e-12) == (compress == "top-k:1")


def test_top_k_of_all_numbers_is_the_mean():
    def work(exchange, replica):
        weight = torch.tensor([3.0, 2.0, 0.0][replica], dtype=torch.float64)
        return compressor_of(exchange, "top-k:1").mean(tensors_of(replica), weight)

    for means, _ in run_together(3, work):
        expected = (3 * flat(tensors_of(0)) + 2 * flat(tensors_of(1))) / 5
        torch.testing.assert_close(flat(means), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("compress", METHODS)
def test_a_step_that_is_not_taken_changes_no_state(compress):
    def work(exchange, replica):
        compressor = compressor_of(exchange, compress)

        def state():
            named = compressor.residuals() | compressor.memory()
            return {name: tensor.clone() for name, tensor in named.items()}

        compressor.add_up(tensors_of(replica))
        compressor.commit(YES)
        before = state()
        bad = [torch.full_like(tensor, torch.nan) for tensor in tensors_of(replica)]
        assert all(total.isnan().any() for total in compressor.add_up(bad))
        compressor.commit(NO)
        _, total = compressor.mean(tensors_of(replica, 1), torch.zeros((), dtype=torch.float64))
        assert total == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in state().items())
        compressor.add_up(tensors_of(replica, 1))
        compressor.commit(YES)
        after = state()
        lossless = compress == "top-k:1"
        assert lossless or any(not torch.equal(t, before[name]) for name, t in after.items())

    run_together(2, work)


@pytest.mark.parametrize("compress", METHODS)
def test_how_tensors_are_put_together_does_not_show(compress):
    """So the cut into stages does not either."""

    def work(exchange, replica):
        whole = compressor_of(exchange, compress, dtype=torch.float32)
        values = dict(zip(SHAPES, tensors_of(replica, dtype=torch.float32), strict=True))
        means = dict(zip(SHAPES, whole.add_up(list(values.values())), strict=True))
        method = make_method(parse_compress(compress))
        for names in (["matrix", "one"], ["conv", "bias", "row"]):
            part = Compressor(method, exchange, {n: values[n] for n in names}, 3)
            for name, total in zip(names, part.add_up([values[n] for n in names]), strict=True):
                assert torch.equal(total, means[name])

    run_together(2, work)


def test_zeros_and_dependent_columns_leave_numbers_finite_and_are_overcome():
    def work(exchange, replica):
        shapes = {"m": torch.zeros(20, 30)}
        compressor = Compressor(PowerSgd(2), exchange, shapes, 0)
        arrived = torch.zeros(20, 30)
        # The first sum leaves zeros to begin the second with, which finds where to look.
        for matrix in (torch.zeros(20, 30), torch.ones(20, 30), torch.ones(20, 30)):
            (total,) = compressor.add_up([matrix])
            compressor.commit(YES)
            arrived += total
        return arrived

    for arrived in run_together(2, work):
        torch.testing.assert_close(arrived, torch.full((20, 30), 4.0))


@pytest.mark.parametrize("num_replicas", [2, 4, 10])
def test_top_k_pays_below_one_over_the_number_of_replicas(num_replicas):
    shapes = {"m": (1000, 100)}
    ring = bytes_of_sum(100_000, 4, num_replicas)
    assert TopK(1 / num_replicas).bytes_sent(shapes, 4, num_replicas, ALL) == ring
    config = TrainConfig(dp=num_replicas)
    for ratio, num_notes in ((0.9 / num_replicas, 0), (1.1 / num_replicas, 1)):
        config = replace(config, compress=f"top-k:{ratio:.4f}")
        notes = notes_on_compression(config, shapes, 4, 1)
        assert len(notes) == num_notes
        assert all("compression costs more than it saves" in note for note in notes)
    config = replace(config, strategy="gossip", average="gradients")
    for ratio, num_notes in ((0.49, 0), (0.5, 1)):
        pair = replace(config, compress=f"top-k:{ratio}")
        assert len(notes_on_compression(pair, shapes, 4, num_replicas)) == num_notes


def test_one_replica_is_told_that_nothing_is_compressed():
    def work(exchange, replica):
        config = TrainConfig(compress="top-k:0.1")
        assert make_compressor(config, exchange, {"v": torch.zeros(3)}) is None
        return notes_on_compression(config, SHAPES, 4, 1)

    assert run_together(1, work) == [
        [
            "--compress top-k:0.1: there is one replica, which sends nothing, so nothing is "
            "compressed"
        ]
    ]


def final_loss(keeps: bool) -> float:
    """Train on digits, with 1 % of the gradients of two replicas, each with every second image."""
    pixels, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes)

    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def work(exchange, replica):
        model = deepcopy(start)
        parameters = dict(model.named_parameters())
        method = make_method(parse_compress("top-k:0.01"))
        compressor = Compressor(method, exchange, parameters, 0)
        for step in range(200):
            rows = torch.arange(replica, 128, 2).add(128 * step) % len(images)
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            totals = compressor.add_up(gradients)
            compressor.commit(torch.tensor(keeps))
            with torch.no_grad():
                for parameter, total in zip(parameters.values(), totals, strict=True):
                    parameter -= 0.1 * total / 2
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(images), labels))

    first, second = run_together(2, work)
    assert first == second
    return first


def test_what_is_kept_lets_a_model_learn_from_one_number_in_a_hundred():
    assert final_loss(keeps=True) < 0.5 * final_loss(keeps=False)  # 0.61 and 2.05
