"""What a training run is refused for before its ranks start, or meet."""

import os
from pathlib import Path

from vigpipe.checkpoint.manifest import checkpoints_at, list_checkpoints, read_manifest
from vigpipe.checkpoint.resume import check_same_options, check_same_run
from vigpipe.config.replication import balances_parts
from vigpipe.errors import InputError
from vigpipe.run.events import read_events
from vigpipe.run.facts import Run
from vigpipe.run.stop_and_save import parse_stop_before


def check_training(run: Run, num_threads: int) -> None:
    """Check what the files of earlier runs, and the clock, say against a training run.

    The ranks look at them once more, each byte included.

    Args:
        run: the run.
        num_threads: that each rank will have.

    Raises:
        InputError: --stop-before, --replay or --resume cannot be followed.
    """
    parse_stop_before(run.config.stop_before, os.environ)
    if run.config.replay is not None:
        _check_replay(run, run.config.replay, num_threads)
    # Which images are left out is found out by the ranks together.
    if run.config.resume is not None and not run.config.skip_bad_images:
        _check_resumed(run, run.config.resume)


def _check_replay(run: Run, folder: Path, num_threads: int) -> None:
    check_same_options(folder, run)
    if balances_parts(run.config):
        read_manifest(checkpoints_at(folder, "--replay ")[0])
    else:
        read_events(folder, run, num_threads)


def _check_resumed(run: Run, option: str) -> None:
    """Check the newest checkpoint that can be read, of which the others do not differ in this."""
    place = run.config.out if option == "auto" else Path(option)
    assert place is not None  # `start` has refused to go on without a name
    if option == "auto" and not list_checkpoints(place):
        return
    for checkpoint in checkpoints_at(place, "--resume "):
        try:
            manifest = read_manifest(checkpoint)
        except InputError:  # `checkpoint.resume` passes it over, or says that none is whole
            continue
        check_same_run(manifest, run, checkpoint)
        return
