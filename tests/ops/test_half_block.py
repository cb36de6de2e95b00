"""Half a block of vig_study in one call: the bits of its operators, one after the other."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vigpipe import ops
from vigpipe.model.keyed_dropout import Draws
from vigpipe.model.norm import BatchNorm, PooledStatistics
from vigpipe.model.study import StudyHalf
from vigpipe.ops import half_block
from vigpipe.parallel.gradients import DoubleGradients

GRID = (6, 5)
GRAPHER, FFN = "grapher", "ffn"


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert ops.versions("cpu")["hidden"].startswith("C++")


@pytest.fixture
def runs(monkeypatch) -> list[bool]:
    """Whether each half-block that ran could run in one call."""
    found, can_run = [], half_block.can_run

    def told(*arguments):
        found.append(can_run(*arguments))
        return found[-1]

    monkeypatch.setattr(half_block, "can_run", told)
    return found


def make(which, drop_path=0.0, dtype=torch.float32, rescale=1.0):
    torch.manual_seed(0)
    if which == FFN:
        return StudyHalf(3, 48, "batch", drop_path, 0, rescale).to(dtype)
    return StudyHalf(3, 32, "batch", drop_path, 0, rescale, ("grid", GRID)).to(dtype)


def drawn(num, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 30, 3, generator=generator).to(dtype) for _ in range(num)]


def scales(drop_path):
    if not drop_path:
        return None
    return Draws(torch.arange(4), torch.tensor([[0.0, 1.25, 1.25, 0.0]]), (0,))


def take_step(model, gradients, inputs, draws=None) -> list[torch.Tensor]:
    """Sum gradients over micro-batches; return the results and the gradients of the inputs."""
    gradients.clear()
    results = []
    for x in inputs:
        x = x.clone().requires_grad_()
        y = model(x, draws)
        (y * y.detach()).sum().backward()
        assert x.grad is not None
        results += [y.detach(), x.grad]
    gradients.reduce()
    return results


def statistics(model):
    return [b for m in model.modules() if isinstance(m, BatchNorm) for b in m.buffers()]


@pytest.mark.parametrize(
    ("which", "drop_path", "threads"),
    [(GRAPHER, 0.0, 1), (GRAPHER, 0.2, 3), (FFN, 0.0, 3), (FFN, 0.2, 1)],
)
def test_results_sums_and_statistics(which, drop_path, threads, runs, monkeypatch):
    one, other = make(which, drop_path), make(which, drop_path)
    sums = [DoubleGradients(model.parameters(), None) for model in (one, other)]
    torch.set_num_threads(threads)
    monkeypatch.setattr("vigpipe.ops.call._GRAIN", 1)
    for num in (3, 1):  # the second step over the first
        ours = take_step(one, sums[0], drawn(num), scales(drop_path))
        with monkeypatch.context() as patch:
            patch.setattr(half_block, "can_run", lambda *_: False)
            theirs = take_step(other, sums[1], drawn(num), scales(drop_path))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # inputs' gradients add up anew
        assert all(map(torch.equal, ours[::2], theirs[::2]))
        assert torch.equal(sums[0].high, sums[1].high)
        assert torch.equal(sums[0].rounded, sums[1].rounded)
        assert all(map(torch.equal, statistics(one), statistics(other)))
        with torch.no_grad():
            for model in (one, other):
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.01 * parameter.grad
    assert runs == [True] * 4


@pytest.mark.parametrize(("which", "rescale"), [(GRAPHER, 2.0), (FFN, 1.0), (FFN, 2.0)])
def test_gradients_that_nobody_sums(which, rescale, runs, monkeypatch):
    one, other = make(which, rescale=rescale), make(which, rescale=rescale)
    (x,) = drawn(1)
    one(x, None).square().sum().backward()
    monkeypatch.setattr(half_block, "can_run", lambda *_: False)
    other(x, None).square().sum().backward()
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name
    assert runs == [True]


def test_moments_go_where_they_are_pooled(runs):
    one, other = make(GRAPHER), make(GRAPHER)
    pools = [PooledStatistics([model], 2) for model in (one, other)]
    moments = []
    for model, pool, fused in zip((one, other), pools, (True, False), strict=True):
        model.fused = fused
        for x in drawn(2):
            model(x, None)
        moments.append(pool.take())
    torch.testing.assert_close(*moments, rtol=1e-5, atol=1e-5)
    assert runs == [True, True]


def test_more_micro_batches_than_there_is_room_for_are_refused():
    model = make(FFN)
    pool = PooledStatistics([model], 2)
    for x in drawn(2):
        model(x, None)
    with pytest.raises(IndexError, match="more than its 2 micro-batches"):
        model(drawn(1)[0], None)
    assert pool.take().shape == (2, 3, 48 + 3)


def test_a_gradient_that_came_whole_is_added_too(runs):
    """As of a micro-batch without samples, whose zeros depend on every parameter."""
    one, other = make(GRAPHER), make(GRAPHER)
    sums = [DoubleGradients(model.parameters(), None) for model in (one, other)]
    take_step(one, sums[0], drawn(2))
    sums[1].clear()
    for parameter in other.parameters():
        (0.5 * parameter.sum()).backward()
    for x in drawn(2):
        y = other(x, None)
        (y * y.detach()).sum().backward()
    sums[1].reduce()
    torch.testing.assert_close(sums[1].high, sums[0].high + 0.5)
    assert runs == [True] * 4


def test_what_it_is_not_made_for_runs_one_after_the_other(runs):
    double = make(GRAPHER, dtype=torch.float64)
    double(drawn(1, torch.float64)[0], None)
    model, (x,) = make(GRAPHER), drawn(1)
    model(x.transpose(0, 1).contiguous().transpose(0, 1), None)
    with torch.no_grad():
        model(x, None)
    with FlopCounterMode(display=False) as counter:
        model(x, None)
    assert runs == [False] * 4
    assert counter.get_total_flops() == 2 * 4 * 30 * 32 * (7 + 3)


def test_a_compiler_gets_the_operators(runs):
    model, (x,) = make(GRAPHER), drawn(1)
    expected = model(x, None)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, None), expected, rtol=0, atol=1e-6)
    assert runs == [True, False]
