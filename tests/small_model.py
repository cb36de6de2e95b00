"""A small vig_digits, for what would be the same with the whole one."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

VARIABLE = "VIGPIPE_TEST_BLOCKS"  # tells ranks and forked commands; a fresh Python has the whole


def small_model(num_blocks: int = 2):
    """Let vig_digits have so many blocks, of 16 channels, here and in ranks and commands."""
    return _asked_for(str(num_blocks))


def whole_model():
    """Let it be again as a fresh Python has it."""
    return _asked_for("")


@contextlib.contextmanager
def _asked_for(blocks: str) -> Iterator[None]:
    from vigpipe.model.shapes import VIG_SHAPES

    variables = {VARIABLE: blocks}
    with mock.patch.dict(os.environ, variables), mock.patch.dict(VIG_SHAPES):
        take_model(variables)
        yield


def take_model(variables: Mapping[str, str]) -> None:
    """Have the vig_digits from here on that these environment variables ask for."""
    if VARIABLE in variables:
        from vigpipe.model.shapes import VIG_SHAPES

        shape, blocks = _whole_shape(), variables[VARIABLE]
        if blocks:
            shape = replace(shape, blocks=(int(blocks),), channels=(16,))
        VIG_SHAPES["vig_digits"] = shape


@cache
def _whole_shape() -> Any:
    """What it is until somebody asks for another."""
    from vigpipe.model.shapes import VIG_SHAPES

    return VIG_SHAPES["vig_digits"]
