"""What earlier runs say of a training run, and refuse it for, before its ranks start, or meet."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from vigpipe.checkpoint.manifest import checkpoints_at, list_checkpoints, read_manifest
from vigpipe.checkpoint.resume import check_belongs, check_same_options
from vigpipe.config.options import TrainConfig
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.config.replication import balances_parts
from vigpipe.errors import InputError
from vigpipe.files.untrusted import read_toml
from vigpipe.run.events import read_events
from vigpipe.run.facts import Run


def check_training(run: Run, num_threads: int) -> None:
    """Raise InputError if the files of earlier runs do not let --replay or --resume be followed."""
    # The ranks, each of which will have so many threads, look at the files once more, each byte.
    replay = run.config.replay
    if replay is not None:
        check_same_options(replay, run)
    if run.config.skip_bad_images:
        return  # the ranks find out together which images these are, and so what the data are
    if replay is not None:
        if balances_parts(run.config):
            read_manifest(checkpoints_at(replay, "--replay ")[0])
        else:
            read_events(replay, run, num_threads)
    if run.config.resume is not None:
        _check_resumed(run, run.config.resume)


def as_before(config: TrainConfig) -> TrainConfig:
    """Leave images as a run of an earlier version did, which this one goes on with or does again.

    Such a run did not turn them as the EXIF of their files says.
    """
    if config.exif is not None or MODEL_DEFAULTS[config.model].job != "images":
        return config
    for before in _options_before(config):
        return config if "exif" in before else replace(config, exif=False)
    return config


def _options_before(config: TrainConfig) -> Iterator[Mapping[str, object]]:
    """Yield the options of earlier starts, newest first; whoever goes on tells of damaged ones."""
    with contextlib.suppress(InputError):
        if config.replay is not None:
            yield read_toml(config.replay / "config.toml")
        place = config.out if config.resume == "auto" else config.resume and Path(config.resume)
        for checkpoint in checkpoints_at(place) if place else ():
            with contextlib.suppress(InputError):
                yield read_manifest(checkpoint).config


def _check_resumed(run: Run, option: str) -> None:
    """Check the newest checkpoint that can be read: whichever is taken has the same options."""
    place = run.config.out if option == "auto" else Path(option)
    assert place is not None  # `start` has refused to go on without a name
    if option == "auto" and not list_checkpoints(place):
        return
    for checkpoint in checkpoints_at(place, "--resume "):
        try:
            manifest = read_manifest(checkpoint)
        except InputError:  # `checkpoint.resume` passes it over, or says that none is whole
            continue
        check_belongs(manifest, run, checkpoint)
        return
