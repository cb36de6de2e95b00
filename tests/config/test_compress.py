"""Values of --compress."""

import pytest

from vigpipe.config.compress import Compression, parse_compress
from vigpipe.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", Compression("none")),
        ("bfloat16", Compression("bfloat16")),
        ("top-k:0.01", Compression("top-k", ratio=0.01)),
        ("top-k:.5", Compression("top-k", ratio=0.5)),
        ("top-k:1", Compression("top-k", ratio=1.0)),
        ("powersgd:4", Compression("powersgd", rank=4)),
    ],
)
def test_a_method_and_its_number(text, expected):
    assert parse_compress(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("zip", "", "top-k", "top-k:", "top-k:0", "top-k:0.000", "top-k:1.5", "top-k:x"),
        *("top-k:-0.1", "top-k:nan", "top-k:1e-2", "top-k:\u0660.\u0661", "powersgd", "powersgd:0"),
        *("powersgd:x", "powersgd:1.5", "powersgd:99999", "bfloat16:2", "none:1", "TOP-K:0.1"),
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(InputError, match="must be none; bfloat16; top-k:RATIO"):
        parse_compress(text)
