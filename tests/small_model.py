"""A small vig_digits, for what would be the same with the whole one."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from unittest import mock

VARIABLE = "VIGPIPE_TEST_BLOCKS"  # tells ranks and forked commands; a fresh Python has the whole


@contextlib.contextmanager
def small_model(num_blocks: int = 2) -> Iterator[None]:
    """Let vig_digits have so many blocks, of 16 channels, here and in ranks and commands."""
    from vigpipe.model.variants import VIG_SHAPES

    variables = {VARIABLE: str(num_blocks)}
    with mock.patch.dict(os.environ, variables), mock.patch.dict(VIG_SHAPES):
        take_model(variables)
        yield


@contextlib.contextmanager
def whole_model() -> Iterator[None]:
    """Let it have its four blocks of 48 channels again, as in a fresh Python."""
    from vigpipe.model.variants import VIG_SHAPES

    whole = replace(VIG_SHAPES["vig_digits"], blocks=(4,), channels=(48,))
    with mock.patch.dict(os.environ), mock.patch.dict(VIG_SHAPES, vig_digits=whole):
        os.environ.pop(VARIABLE, None)
        yield


def take_model(variables: Mapping[str, str]) -> None:
    """Have the vig_digits from here on that these environment variables ask for."""
    if VARIABLE in variables:
        from vigpipe.model.variants import VIG_SHAPES

        blocks = (int(variables[VARIABLE]),)
        VIG_SHAPES["vig_digits"] = replace(VIG_SHAPES["vig_digits"], blocks=blocks, channels=(16,))
