"""The keyword arguments of vigpipe.train are the options of the command, with the same types."""

from pathlib import Path
from typing import Any, get_args, get_type_hints

from docs import keywords as written
from vigpipe.config.keywords import TrainKeywords
from vigpipe.config.options import PLACES, TrainConfig


def test_the_file_is_what_the_options_say():
    assert written.FILE.read_text(encoding="utf-8") == written.text(), (
        "an option has changed: write the file again with python -m docs.keywords"
    )


def test_every_option_is_a_keyword_and_takes_what_the_command_takes():
    options, keywords = get_type_hints(TrainConfig), get_type_hints(TrainKeywords)
    assert keywords.keys() == options.keys()
    for name, hint in options.items():
        if name == "data":  # or a graph
            assert keywords[name] is Any
            continue
        has_path = Path in (hint, *get_args(hint)) or name in PLACES
        assert keywords[name] == (hint | str | Path if has_path else hint), name
    assert not TrainKeywords.__required_keys__
