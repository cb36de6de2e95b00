"""Random masks: which facts they depend on, and how they are spread."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.test_sparse_rows import sparse_rows
from tests.reference import GOLDEN, splitmix64
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

some = settings(deadline=None, max_examples=25)
keys_of_samples = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3)
KEYS_NEEDED = r"needs the samples' keys: model\(x, keys\)"


def test_the_hash_of_the_reference_gives_the_published_outputs_of_splitmix64():
    """The sequence of seed 1234567 that ports of the generator are tried with."""
    assert [splitmix64(1234567 + i * GOLDEN) for i in range(1, 6)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@some
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.lists(st.one_of(st.integers(-3, 3), st.integers(0, 2**31)), max_size=8),
)
def test_each_key_is_hashed_from_seed_step_and_position_and_that_of_padding_is_negative(
    seed, step, positions
):
    run = splitmix64(splitmix64(seed + GOLDEN) + step * GOLDEN)
    keys = sample_keys(seed, step, torch.tensor(positions, dtype=torch.long)).tolist()
    assert keys == [
        PADDING if place < 0 else splitmix64(run + place * GOLDEN) >> 1 for place in positions
    ]
    assert PADDING < 0


@some
@given(keys_of_samples, st.integers(0, 1000), st.integers(1, 5))
def test_each_number_is_hashed_from_key_and_stream(keys, stream, num):
    counters = range(stream << 32, (stream << 32) + num)
    expected = [
        [(splitmix64(splitmix64(key + GOLDEN) ^ (c * GOLDEN)) >> 11) / 2**53 for c in counters]
        for key in keys
    ]
    assert uniform(torch.tensor(keys), stream, num).tolist() == expected


def test_neighbouring_seeds_steps_positions_and_pairs_have_different_keys():
    keys = [sample_keys(seed, step, torch.arange(20)) for seed in range(20) for step in range(20)]
    assert len(torch.cat(keys).unique()) == 20**3
    one, other = torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100)
    assert len(pair_keys(one, other).unique()) == 10_000


def test_fresh_keys_are_those_of_samples_and_differ():
    keys = fresh_keys(torch.empty(1000, 1))
    assert (keys >= 0).all()
    assert len(keys.unique()) == 1000


def test_dropout_drops_the_numbers_below_the_rate_and_scales_the_others_and_their_gradients():
    x = (torch.rand(3, 40, 5, dtype=torch.float64) + 1).requires_grad_()
    keys = sample_keys(0, 0, torch.arange(3))
    y = KeyedDropout(0.2, stream=7)(x, draw(keys, (), torch.float64))
    factors = (uniform(keys, 7, 200) >= 0.2).double().view(3, 40, 5) / (1.0 - 0.2)
    assert torch.equal(y, x * factors)
    assert factors.mean() == pytest.approx(1, abs=0.1)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, factors)


@pytest.mark.parametrize("kind", [DropPath, KeyedDropout, ChannelDropout])
def test_nothing_is_dropped_in_evaluation_or_at_rate_0_and_training_needs_keys(kind):
    x = torch.rand(3, 5)
    expected = None if kind is DropPath else x
    assert kind(0.5, stream=0).eval()(x, None) is expected
    assert kind(0.0, stream=0)(x, None) is expected
    with pytest.raises(ValueError, match=KEYS_NEEDED):
        kind(0.5, stream=0)(x, None)


# ---- all masks of a model at once ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_draws_travel_as_one_message(dtype):
    drop_paths, messages = [DropPath(0.5, stream=2), DropPath(0.3, stream=7)], []
    draws = draw(sample_keys(0, 0, torch.arange(10)), drop_paths, dtype)
    sent = draws.sent(lambda tensor: messages.append(tensor) or tensor.clone())
    assert len(messages) == 1
    assert sent.streams == draws.streams
    torch.testing.assert_close((sent.keys, sent.scales), (draws.keys, draws.scales), rtol=0, atol=0)


# ---- wide rows ---------------------------------------------------------------------------------


@some
@given(
    keys_of_samples,
    st.integers(0, 1000),
    st.integers(1, 9),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
)
def test_four_channels_share_a_hash(keys, stream, num, rate):
    """Neither the width nor other rows matter."""
    draws = Draws(torch.tensor(keys), None, ())
    y = ChannelDropout(rate, stream)(torch.ones(len(keys), num, dtype=torch.float64), draws)
    rate = min(round(rate * 2**16), 2**16 - 1) / 2**16
    for row, key in zip(y, keys, strict=True):
        for channel, value in enumerate(row.tolist()):
            counter = ((stream << 32) + channel // 4) * GOLDEN
            lane = splitmix64(splitmix64(key + GOLDEN) ^ counter) >> 16 * (channel % 4)
            # Lanes are compared as signed numbers.
            kept = (lane + 2**15) % 2**16 >= round(rate * 2**16)
            assert value == (pytest.approx(1 / (1 - rate), rel=1e-15) if kept else 0)


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


@pytest.mark.parametrize("num_channels", [1, 300])
def test_sparse_rows_lose_what_dense_ones_lose(num_channels):
    generator = torch.Generator().manual_seed(num_channels)
    x = torch.randn(40, num_channels, generator=generator, dtype=torch.float64)
    x *= torch.rand(x.shape, generator=generator) < 0.3
    draws = Draws(sample_keys(0, 0, torch.arange(40)), None, ())
    dropout = ChannelDropout(0.4, stream=3)
    sparse = dropout(sparse_rows(x), draws)
    assert torch.equal(sparse.dense(), dropout(x, draws))
    assert (sparse.values == 0).any()
