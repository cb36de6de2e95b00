"""Which text is kept as it is, and how the rest is printed."""

import os

import pytest

from vigpipe.files.names import escaped, is_plain


@pytest.mark.parametrize("text", ["", "Käse", "日本", "a b", "👩\u200d🔬", "नमस्ते"])
def test_text_of_any_language_is_kept(text):
    assert is_plain(text)
    assert escaped(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nERROR", r"a\nERROR"),
        ("\x9b1m", r"\x9b1m"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        (os.fsdecode(b"caf\xe9"), r"caf\xe9"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_a_terminal_acts_upon_is_escaped(text, shown):
    assert not is_plain(text)
    assert escaped(text) == shown
    assert is_plain(escaped(text))


def test_of_a_long_text_the_ends_are_shown():
    assert escaped("a" * 300 + "b" * 300) == "a" * 134 + "…" + "b" * 66
    assert escaped("\x00" * 5, most=3) == r"\x00\x00…\x00"
    assert escaped("\x00" * 3, most=3) == r"\x00\x00\x00"
