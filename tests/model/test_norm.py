"""BatchNorm against torch's, pooled statistics against those of the concatenation."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from vigpipe.model.norm import BatchNorm, GroupNorm, PooledStatistics, make_norm

many = settings(deadline=None, max_examples=25)


def rows(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return 3 * x + torch.arange(shape[-1])  # not what a norm would make of it anyway


def statistics(norm):
    return {name: value for name, value in norm.named_buffers() if value.is_floating_point()}


# ---- one micro-batch a step -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batchnorm_alone_equals_torchs_step_by_step(dtype):
    ours, theirs = BatchNorm(6).to(dtype), nn.BatchNorm1d(6).to(dtype)
    # The same kernel on the same rows; rounding differs in how the statistics move.
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    optimizers = [torch.optim.SGD(norm.parameters(), lr=0.1) for norm in (ours, theirs)]
    for step, train in enumerate([True, True, False, True, False]):
        x = rows(4, 5, 6, seed=step).to(dtype)
        outcomes = []
        for norm, optimizer in zip((ours, theirs), optimizers, strict=True):
            leaf = x.clone().requires_grad_()
            optimizer.zero_grad()
            y = norm.train(train)(leaf if norm is ours else leaf.flatten(0, 1)).view(x.shape)
            (y * x.cos()).sum().backward()
            optimizer.step()
            outcomes.append([y, leaf.grad, norm.weight.grad, norm.bias.grad, *norm.buffers()])
        for our, their in zip(*outcomes, strict=True):
            torch.testing.assert_close(our, their, rtol=tolerance, atol=tolerance)
    assert int(ours.num_batches_tracked) == 3
    dtypes = [{n: t.dtype for n, t in norm.state_dict().items()} for norm in (ours, theirs)]
    assert dtypes[0] == dtypes[1]


# ---- statistics over micro-batches and replicas ---------------------------------------------

replicas = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=3)


def pooled(sizes_of_replicas, nodes=3, channels=4):
    """Run the replicas' micro-batches through copies of a layer pair, as a trainer would.

    Returns:
        the layers of every replica, and what the two layers of replica 0 saw over all replicas.
    """
    num_microbatches = max(map(len, sizes_of_replicas))
    layers, stats, poolers, seen = [], [], [], []
    for r, sizes in enumerate(sizes_of_replicas):
        nodes_norm, readout_norm = BatchNorm(channels).double(), BatchNorm(2).double()
        pooler = PooledStatistics([nodes_norm, nn.Sequential(readout_norm)], num_microbatches)
        # Micro-batches without samples never reach a norm, and are a replica's last ones.
        for m, size in enumerate(sorted(sizes, reverse=True)):
            if size:
                x = rows(size, nodes, channels, seed=10 * r + m)
                nodes_norm(x)
                readout_norm(x.mean(1)[:, :2])
                seen.append(x)
        stats.append(pooler.take())
        layers.append((nodes_norm, readout_norm))
        poolers.append(pooler)
    for pooler in poolers:
        pooler.update(torch.cat(stats))
    return layers, torch.cat(seen)


@many
@example([[0, 0], [3]])  # nothing comes first
@given(replicas.filter(lambda r: sum(map(sum, r)) >= 1))
def test_pooled_statistics_are_those_of_the_concatenation_on_every_replica(sizes_of_replicas):
    layers, x = pooled(sizes_of_replicas)
    for norm, flat in zip(layers[0], (x.flatten(0, 1), x.mean(1)[:, :2]), strict=True):
        # Exact but for float64 rounding.
        variance = flat.var(0, unbiased=len(flat) > 1)
        expected = {"running_mean": 0.1 * flat.mean(0), "running_var": 0.9 + 0.1 * variance}
        torch.testing.assert_close(statistics(norm), expected, rtol=1e-12, atol=1e-12)
        assert int(norm.num_batches_tracked) == 1
    for others in layers[1:]:
        for norm, other in zip(layers[0], others, strict=True):
            for name, value in norm.named_buffers():
                assert torch.equal(value, other.get_buffer(name))


def test_means_far_from_zero_lose_no_digits():
    """The sum of squares minus the square of the sum would: 1e12 leaves no digit of a 1."""
    x = rows(40, 4) + 1e6
    norm = BatchNorm(4).double()
    pooler = PooledStatistics([norm], 6)
    for part in x.split(7):
        norm(part)
    pooler.update(pooler.take())
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * x.var(0), rtol=1e-9, atol=0)


def test_running_statistics_move_with_a_step_only_and_evaluation_enters_none():
    norm = BatchNorm(4).double()
    pooler = PooledStatistics([norm], 2)
    before = {name: value.clone() for name, value in norm.named_buffers()}
    norm(rows(5, 4))
    norm.eval()(rows(5, 4, seed=1))
    for name, value in norm.named_buffers():
        assert torch.equal(value, before[name])
    stats = pooler.take()
    assert stats[:, 0, 0].tolist() == [5, 0]
    pooler.update(stats)
    assert not torch.equal(norm.running_mean, before["running_mean"])
    assert not pooler.take().any()  # a step starts with nothing pending


# ---- the norms that know one sample only ----------------------------------------------------


def test_groupnorm_is_torchs_with_channels_last():
    ours, theirs = GroupNorm(2, 6).double(), nn.GroupNorm(2, 6).double()
    for norm in (ours, theirs):
        nn.init.constant_(norm.weight, 1.5)
        nn.init.constant_(norm.bias, 0.5)
    x = rows(4, 5, 6)
    expected = theirs(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(ours(x), expected, rtol=1e-12, atol=1e-12)


def test_groups_are_the_largest_divisor_up_to_eight():
    norms = [make_norm("group", channels) for channels in (3, 6, 7, 10, 11, 48, 1024)]
    groups = [norm.num_groups for norm in norms if isinstance(norm, GroupNorm)]
    assert groups == [3, 6, 7, 5, 1, 8, 8]
