"""Random masks: which facts they depend on, and how they are spread."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.test_sparse_rows import sparse_rows
from tests.reference import GOLDEN, splitmix64
from vigpipe.model import keyed_dropout as noise
from vigpipe.model.keyed_dropout import (
    PADDING,
    ChannelDropout,
    Draws,
    DropPath,
    KeyedDropout,
    draw,
    fresh_keys,
    pair_keys,
    sample_keys,
    uniform,
)

many = settings(deadline=None, max_examples=100)
seeds, steps, places = (
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.integers(0, 2**31),
)


def draws_of(keys, *drop_paths):
    return draw(keys, drop_paths, torch.float64)


def kept_channels(keys, stream, num, rate):
    """Which of `num` channels are kept, and the probability of it, if there are any."""
    dropout = ChannelDropout(rate, stream)
    y = dropout(torch.ones(len(keys), num, dtype=torch.float64), Draws(keys, None, ()))
    kept = y != 0
    return kept, 1 / float(y[kept][0]) if kept.any() else None


def masked(drop, x, keys):
    """What is left of x; a drop-path gives the factors of the samples."""
    if isinstance(drop, KeyedDropout):
        return drop(x, draws_of(keys))
    return x * drop(x, draws_of(keys, drop)).view(-1, *[1] * (x.dim() - 1))


def key_of(seed, step, position):
    return int(sample_keys(seed, step, torch.tensor([position])))


def test_the_hash_gives_the_published_outputs_of_splitmix64():
    """The sequence of seed 1234567 that ports of the generator are tried with."""
    states = torch.tensor([noise._signed(1234567 + i * GOLDEN) for i in range(1, 6)])
    outputs = [output % 2**64 for output in noise._mixed(states).tolist()]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@many
@given(st.integers(0, 2**64 - 1))
def test_the_hash_equals_the_one_on_python_integers(z):
    assert int(noise._mixed(torch.tensor(noise._signed(z)))) % 2**64 == splitmix64(z)


@many
@given(seeds, steps, places)
def test_a_key_is_hashed_from_seed_step_and_position(seed, step, position):
    run = splitmix64(splitmix64(seed + GOLDEN) + step * GOLDEN)
    assert key_of(seed, step, position) == splitmix64(run + position * GOLDEN) >> 1


@many
@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(1, 5))
def test_a_number_is_hashed_from_key_and_stream(key, stream, num):
    inner = splitmix64(key + GOLDEN)
    counters = range(stream << 32, (stream << 32) + num)
    expected = [(splitmix64(inner ^ (c * GOLDEN)) >> 11) / 2**53 for c in counters]
    assert uniform(torch.tensor([key]), stream, num)[0].tolist() == expected


@many
@given(st.tuples(seeds, steps, places), st.tuples(seeds, steps, places))
def test_different_samples_have_different_keys(one, other):
    assert (key_of(*one) == key_of(*other)) == (one == other)


def test_neighbouring_seeds_steps_and_positions_have_different_keys():
    keys = [sample_keys(seed, step, torch.arange(20)) for seed in range(20) for step in range(20)]
    assert len(torch.cat(keys).unique()) == 20**3


@many
@given(seeds, steps, st.lists(st.integers(-3, 100), max_size=10))
def test_padding_alone_has_a_negative_key(seed, step, positions):
    keys = sample_keys(seed, step, torch.tensor(positions, dtype=torch.long))
    assert [key == PADDING for key in keys.tolist()] == [place < 0 for place in positions]
    assert [key < 0 for key in keys.tolist()] == [place < 0 for place in positions]


@many
@given(seeds, steps, st.permutations(range(8)), st.integers(0, 8))
def test_keys_follow_the_samples_through_any_order_and_cut(seed, step, order, cut):
    whole = sample_keys(seed, step, torch.arange(8))
    places = torch.tensor(order)
    pieces = [sample_keys(seed, step, piece) for piece in (places[:cut], places[cut:])]
    assert torch.equal(torch.cat(pieces), whole[places])


def test_fresh_keys_are_those_of_samples_and_differ():
    keys = fresh_keys(torch.empty(1000, 1))
    assert (keys >= 0).all()
    assert len(keys.unique()) == 1000


def test_numbers_are_uniform():
    numbers = uniform(sample_keys(0, 0, torch.arange(1000)), stream=3, num=1000).flatten()
    assert numbers.dtype == torch.float64
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # A million numbers: five standard errors of the mean, and of each of ten equal bins.
    assert abs(float(numbers.mean()) - 0.5) < 5 * (1 / 12) ** 0.5 / 1000
    bins = torch.histc(numbers, bins=10, min=0, max=1) / 1e6
    assert (bins - 0.1).abs().max() < 5 * 0.3 / 1000


@pytest.mark.parametrize("other", [(0, 0, 4), (1, 0, 3), (0, 1, 3)])
def test_masks_of_other_streams_seeds_and_steps_are_unrelated(other):
    seed, step, stream = other
    one = uniform(sample_keys(0, 0, torch.arange(10_000)), 3)[:, 0]
    two = uniform(sample_keys(seed, step, torch.arange(10_000)), stream)[:, 0]
    correlation = torch.corrcoef(torch.stack((one, two)))[0, 1]
    assert abs(float(correlation)) < 5 / 100  # five standard errors


@many
@given(st.permutations(range(6)), st.integers(0, 6), st.booleans())
def test_a_mask_does_not_depend_on_who_else_is_in_the_batch(order, cut, whole_sample):
    dropout = (DropPath if whole_sample else KeyedDropout)(0.5, stream=1)
    keys, x = sample_keys(7, 3, torch.arange(6)), torch.rand(6, 4, 3) + 1
    together = masked(dropout, x, keys)
    order = torch.tensor(order)
    pieces = [
        masked(dropout, x[part], keys[part]) for part in (order[:cut], order[cut:]) if len(part)
    ]
    assert torch.equal(torch.cat(pieces), together[order])


def test_the_same_keys_give_the_same_mask_again():
    dropout, keys = KeyedDropout(0.5, stream=1), sample_keys(0, 0, torch.arange(4))
    x = torch.ones(4, 100)
    first = masked(dropout, x, keys)
    torch.manual_seed(1)
    assert torch.equal(masked(dropout, x, keys), first)


@pytest.mark.parametrize("kind", [DropPath, KeyedDropout])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_the_rate_is_the_share_that_is_dropped(rate, kind):
    y = masked(kind(rate, 5), torch.ones(40_000, 1), sample_keys(0, 0, torch.arange(40_000)))
    dropped = float((y == 0).double().mean())
    assert abs(dropped - rate) < 5 * (rate * (1 - rate)) ** 0.5 / 200  # five standard errors


def test_drop_path_drops_whole_samples_and_scales_the_others():
    x = torch.rand(200, 4, 3, dtype=torch.float64) + 1
    y = masked(DropPath(0.2, stream=0), x, sample_keys(0, 0, torch.arange(200)))
    kept = y.flatten(1).any(1)
    assert 0 < kept.sum() < 200
    assert not y[~kept].any()
    torch.testing.assert_close(y[kept], x[kept] / 0.8)


def test_dropout_drops_single_numbers_and_scales_the_others():
    x = torch.rand(3, 40, 5, dtype=torch.float64) + 1
    y = masked(KeyedDropout(0.2, stream=0), x, sample_keys(0, 0, torch.arange(3)))
    kept = y != 0
    assert 0 < kept[0].sum() < kept[0].numel()
    assert not torch.equal(kept[0], kept[1])
    torch.testing.assert_close(y[kept], x[kept] / 0.8)


def test_the_gradient_goes_through_the_same_mask():
    x = torch.ones(3, 50, requires_grad=True)
    y = masked(KeyedDropout(0.5, stream=0), x, sample_keys(0, 0, torch.arange(3)))
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_nothing_is_dropped_in_evaluation_or_at_rate_0():
    x = torch.rand(3, 5)
    assert KeyedDropout(0.5, stream=0).eval()(x, None) is x
    assert KeyedDropout(0.0, stream=0)(x, None) is x
    assert DropPath(0.5, stream=0).eval()(x, None) is None
    assert DropPath(0.0, stream=0)(x, None) is None


@pytest.mark.parametrize("kind", [DropPath, KeyedDropout])
def test_training_without_keys_is_an_error(kind):
    with pytest.raises(ValueError, match=r"needs the samples' keys: model\(x, keys\)"):
        kind(0.5, stream=0)(torch.rand(3, 5), None)


# ---- all masks of a model at once ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masks_that_are_drawn_together_are_those_that_each_block_drew(dtype):
    """Every block hashed its own masks before: this is what it computed, in the features' type."""
    keys = sample_keys(3, 5, torch.arange(64))
    drop_paths = [DropPath(rate, stream) for stream, rate in enumerate((0.1, 0.25, 0.7), 4)]
    wide = torch.promote_types(dtype, torch.float32)
    draws = draw(keys, drop_paths, wide)
    x = torch.zeros(64, 2, dtype=dtype)
    for drop_path in drop_paths:
        kept = uniform(keys, drop_path.stream)[:, 0] >= drop_path.rate
        found = drop_path(x, draws)
        assert found is not None
        assert found.dtype == dtype
        assert torch.equal(found, kept.to(dtype) / (1.0 - drop_path.rate))


def test_a_part_of_the_draws_is_that_of_the_part():
    keys = sample_keys(0, 0, torch.arange(10))
    drop_paths = [DropPath(0.5, stream=2), DropPath(0.3, stream=7)]
    part, own = draws_of(keys, *drop_paths).part(3, 8), draws_of(keys[3:8], *drop_paths)
    assert part.streams == own.streams == (2, 7)
    assert torch.equal(part.keys, own.keys)
    assert part.scales is not None
    assert own.scales is not None
    assert torch.equal(part.scales, own.scales)


@pytest.mark.parametrize("drop_paths", [(), (DropPath(0.5, stream=2), DropPath(0.3, stream=7))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_draws_travel_as_one_message(drop_paths, dtype):
    draws, messages = draw(sample_keys(0, 0, torch.arange(10)), drop_paths, dtype), []

    def send(tensor):
        messages.append(tensor)
        return tensor.clone()

    sent = draws.sent(send)
    assert len(messages) == 1
    assert isinstance(sent, Draws)
    assert torch.equal(sent.keys, draws.keys)
    assert sent.streams == draws.streams
    if draws.scales is None:
        assert sent.scales is None
    else:
        assert sent.scales is not None
        assert sent.scales.dtype == dtype
        assert torch.equal(sent.scales, draws.scales)


# ---- wide rows ---------------------------------------------------------------------------------


def kept_by_python(key, stream, channel, rate):
    bits = splitmix64(splitmix64(key + GOLDEN) ^ (((stream << 32) + channel // 4) * GOLDEN))
    lane = (bits >> 16 * (channel % 4)) % 2**16
    return (lane + 2**15) % 2**16 >= round(rate * 2**16)  # lanes are compared as signed numbers


@many
@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 1000),
    st.integers(1, 9),
    st.floats(0, 1, exclude_max=True),
)
def test_four_channels_share_a_hash(key, stream, num, rate):
    kept, probability = kept_channels(torch.tensor([key]), stream, num, rate)
    expected_rate = min(round(rate * 2**16), 2**16 - 1) / 2**16
    assert kept[0].tolist() == [
        kept_by_python(key, stream, channel, expected_rate) for channel in range(num)
    ]
    assert probability is None or probability == pytest.approx(1 - expected_rate, rel=1e-15)


def test_a_channel_does_not_depend_on_the_width_or_on_other_rows():
    keys = sample_keys(0, 0, torch.arange(50))
    wide, _ = kept_channels(keys, 3, 11, 0.5)
    for num in range(11):
        assert torch.equal(kept_channels(keys, 3, num, 0.5)[0], wide[:, :num])
    assert torch.equal(kept_channels(keys[7:9], 3, 11, 0.5)[0], wide[7:9])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_channels_are_dropped_at_the_rate_and_independently(rate):
    x = torch.ones(10_000, 16, dtype=torch.float64)
    dropout = ChannelDropout(rate, stream=5)
    y = dropout(x, Draws(sample_keys(0, 0, torch.arange(10_000)), None, ()))
    dropped = (y == 0).double()
    spread = (rate * (1 - rate)) ** 0.5
    assert (dropped.mean(0) - rate).abs().max() < 5 * spread / 100  # five standard errors
    between = torch.corrcoef(dropped.T).fill_diagonal_(0)  # channels 0 to 3 share a hash
    assert between.abs().max() < 5 / 100
    assert abs(float(y.mean()) - 1) < 5 * spread / (1 - rate) / 400


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_channels_that_remain_are_scaled_and_so_are_gradients(dtype):
    x = (torch.rand(30, 13) + 1).to(dtype).requires_grad_()
    dropout, draws = ChannelDropout(0.5, stream=0), Draws(torch.arange(30), None, ())
    y = dropout(x, draws)
    assert y.dtype == dtype
    kept = y != 0
    assert torch.equal(y[kept], 2 * x[kept])
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * kept.to(dtype))


@pytest.mark.parametrize("num_channels", [1, 3, 13, 300])
def test_sparse_rows_lose_what_dense_ones_lose(num_channels):
    generator = torch.Generator().manual_seed(num_channels)
    x = torch.randn(40, num_channels, generator=generator, dtype=torch.float64)
    x *= torch.rand(x.shape, generator=generator) < 0.3
    draws = Draws(sample_keys(0, 0, torch.arange(40)), None, ())
    dropout = ChannelDropout(0.4, stream=3)
    sparse = dropout(sparse_rows(x), draws)
    assert torch.equal(sparse.dense(), dropout(x, draws))
    assert (sparse.values == 0).any()


def test_channels_need_keys_in_training_and_nothing_is_dropped_elsewhere():
    x = torch.rand(3, 5)
    assert ChannelDropout(0.5, stream=0).eval()(x, None) is x
    assert ChannelDropout(0.0, stream=0)(x, None) is x
    with pytest.raises(ValueError, match=r"needs the samples' keys: model\(x, keys\)"):
        ChannelDropout(0.5, stream=0)(x, None)


def test_ordered_pairs_have_keys_of_their_own():
    one, other = torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100)
    assert len(pair_keys(one, other).unique()) == 10_000
