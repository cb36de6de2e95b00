"""Tests of the models have the models themselves."""

import pytest

from tests.small_model import whole_model


@pytest.fixture(scope="module", autouse=True)
def _whole_model():
    with whole_model():
        yield
