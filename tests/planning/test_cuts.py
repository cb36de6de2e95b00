"""Dynamic programming over cuts against all cuts."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vigpipe.planning.cuts import Terms, best_cuts, value


def all_bounds(num_blocks, num_stages):
    for inner in combinations(range(1, num_blocks), num_stages - 1):
        yield (0, *inner, num_blocks)


@st.composite
def terms(draw):
    """Any costs that grow with the blocks, and some stages that may not be."""
    num_blocks = draw(st.integers(1, 7))
    num_stages = draw(st.integers(1, num_blocks))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shape = (num_stages, num_blocks + 1, num_blocks + 1)
    arrays = []
    for levels in (5, 5, 50):  # few levels: many cuts are equally good in one of the three
        upto = np.cumsum(rng.integers(0, levels, num_blocks + 1))
        arrays.append(upto[None, None, :] - upto[None, :, None] + rng.integers(0, levels, shape))
    fits = np.triu(np.ones(shape[1:], dtype=bool), 1) & (rng.random(shape) > draw(st.floats(0, 1)))
    return Terms(*(np.where(fits, array, np.inf) for array in arrays))


@settings(deadline=None, max_examples=60)
@given(terms())
def test_the_best_cut_is_the_best_of_all(terms):
    num_stages, size, _ = terms.f.shape
    best = min(value(terms, bounds) for bounds in all_bounds(size - 1, num_stages))
    found = best_cuts(terms)
    if np.isinf(best):
        assert found == []
    else:
        values = [value(terms, bounds) for bounds in found]
        assert values[0] == pytest.approx(best)
        assert values == sorted(values)
        assert len({*found}) == len(found)
