"""Read the options of a TOML file given with --config, and write those of a run."""

import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from vigpipe.config.options import TrainConfig
from vigpipe.errors import InputError
from vigpipe.files.untrusted import read_toml


def as_toml(config: TrainConfig) -> dict[str, Any]:
    """Turn options into a TOML table that `--config` can read: no `None`, and paths as text."""
    # Options that only one verb has are left out, and so are those of this one run: its folder, and
    # the earlier runs that it goes on with or does again.
    written = {f.name for f in fields(TrainConfig)} - {"config", "resume", "replay", "out"}
    table = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()}
    return {k: v for k, v in table.items() if v is not None and k in written}


def read_config_file(arguments: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Find `--config FILE` among the arguments; return its options by flag name, and its path.

    Both are empty without the flag. InputError if it is no file of options and values.
    """
    path = None
    for i, argument in enumerate(arguments):
        if argument == "--config" and i + 1 < len(arguments):
            path = Path(arguments[i + 1])
        elif argument.startswith("--config="):
            path = Path(argument.removeprefix("--config="))
    if path is None:
        return {}, ""
    try:
        table = read_toml(path)
    except InputError as error:
        raise InputError(f"--config {error}") from error
    known = {f.name for f in fields(TrainConfig)} - {"config"}
    for key, value in table.items():
        if key not in known:
            raise InputError(
                f"{path}: unknown key {key!r}; the keys are {', '.join(sorted(known))}"
            )
        if isinstance(value, list | dict):
            raise InputError(f"{path}: {key} = {value}: must be a single value")
        if isinstance(value, str) and re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", value):
            raise InputError(f"{path}: {key} = {value!r}: has a control character; leave it out")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:  # the range of TOML
            raise InputError(
                f"{path}: {key}: a whole number has at most 64 bits; give a smaller one"
            )
    return {key.replace("_", "-"): value for key, value in table.items()}, str(path)
