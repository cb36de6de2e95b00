"""Choose a checkpoint, see that it is of this run, and go on from it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vigpipe.checkpoint.manifest import (
    Manifest,
    checkpoints_at,
    list_checkpoints,
    read_tensors,
    tensor_names,
    verify,
)
from vigpipe.checkpoint.rescue import salvage
from vigpipe.checkpoint.state import restore, wanted
from vigpipe.config.files import as_toml
from vigpipe.config.options import flag
from vigpipe.errors import InputError
from vigpipe.parallel.agreement import broadcast_value, run_with_heartbeats

if TYPE_CHECKING:
    from vigpipe.run.facts import Run
    from vigpipe.run.rank import RankState

# Options that may differ from the checkpoint's: where and how fast it runs, what is written, and
# how long. All others say what is computed.
MAY_DIFFER = {
    *("config", "weights", "new_classifier", "out"),
    *("data", "data_dir", "download", "workers", "skip_bad_images"),
    *("stages", "microbatches", "dp", "schedule", "virtual_stages", "sync", "elastic"),
    *("device", "threads", "timeout", "impl", "compile", "boundary", "recompute"),
    *("epochs", "steps", "evaluate_every", "detect_anomaly", "on_nan"),
    *("timing", "timing_warmup", "timing_steps", "trace"),
    *("checkpoint_every", "keep", "resume", "max_restarts", "stop_before"),
}


def choose(place: Path, log: Callable[[str], None]) -> tuple[Path, Manifest]:
    """The checkpoint itself, or the newest one of a run that verifies; and its manifest.

    Args:
        place: a checkpoint, or the folder of a run.
        log: is given a sentence for every checkpoint that is passed over.

    Raises:
        InputError: the one that was named is damaged, or the run has none that verifies.
    """
    found = checkpoints_at(place, "--resume ")
    if found == [place]:
        return place, verify(place)
    problems: list[str] = []
    for checkpoint in found:
        try:
            manifest = verify(checkpoint)
        except InputError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            log(f"passed over: {problem}")
        return checkpoint, manifest
    raise InputError(
        f"--resume: none of the {len(found)} checkpoints in {found[0].parent} is whole, the newest "
        f"for this reason: {problems[0]}; delete the folder to begin anew"
    )


def resume(rank_state: "RankState", folder: Path, log: Callable[[str], None]) -> Manifest | None:
    """Give a new worker the state that --resume asks for; all ranks call it together.

    Rank 0 reads and checks every byte, and the others believe it.

    Args:
        rank_state: this rank's share of the job.
        folder: of the run.
        log: is given what the user should know.

    Returns:
        What the checkpoint is of; None where the run begins anew.

    Raises:
        InputError: there is no checkpoint that is whole and of this run.
    """
    run = rank_state.run
    wish, world_size = run.config.resume, run.layout.world_size
    if wish is None:
        return None
    notes: list[str] = []
    place = folder if wish == "auto" else Path(wish)

    def look() -> tuple[Path, Manifest] | None:
        if rank_state.replica_index > 0 or rank_state.pipeline_rank > 0:
            return None
        if wish == "auto":
            salvage(folder)
            if not list_checkpoints(folder):
                return None
        checkpoint, manifest = choose(place, notes.append)
        notes.extend(check_same_run(manifest, run, checkpoint))
        return checkpoint, manifest

    found = run_with_heartbeats(look, world_size)  # it may take longer than --timeout
    found, notes = broadcast_value((found, notes), world_size)
    for note in notes:
        log(note)
    if found is None:
        return None
    checkpoint, manifest = found
    go_on(rank_state, checkpoint, manifest)
    log(f"going on after step {manifest.step}, from {checkpoint}")
    return manifest


def check_same_run(manifest: Manifest, run: "Run", where: Path) -> list[str]:
    """Compare a checkpoint with the run that is to go on from it.

    Returns:
        What the user should know.

    Raises:
        InputError: they compute different things.
    """
    now, before = as_toml(run.config), manifest.config
    for name in sorted((now.keys() | before.keys()) - MAY_DIFFER):
        if now.get(name) != before.get(name):
            raise InputError(
                f"--resume {where}: its {flag(name)} is {before.get(name, 'not set')}, this run's "
                f"is {now.get(name, 'not set')}; a run goes on as it began, so change the option, "
                "or start another run from its --weights"
            )
    for name, value in run.fingerprint.items():
        if manifest.data.get(name) != value:
            raise InputError(
                f"--resume {where}: its data differ from {run.config.data}: {name} was "
                f"{manifest.data.get(name)}, is {value}; give the same images"
            )
    notes: list[str] = []
    pieces = run.layout.num_replicas * run.layout.num_microbatches
    if manifest.layout.get("pieces") != pieces:
        notes.append(
            f"--microbatches x --dp was {manifest.layout.get('pieces')}, is {pieces}: the batch is "
            "cut otherwise from here on, which BatchNorm's statistics depend on"
        )
    if manifest.num_steps != run.num_steps:
        notes.append(
            f"the run has {run.num_steps} steps, not {manifest.num_steps}: the learning rate "
            "follows the new course from here on"
        )
    return notes


def go_on(rank_state: "RankState", checkpoint: Path, manifest: Manifest) -> None:
    """Give a new worker the state of a checkpoint, whatever layout wrote it.

    Raises:
        InputError: it is not of this model.
    """
    where = tensor_names(checkpoint, manifest)
    known = rank_state.run.tensor_names()
    for name in where:
        kind, _, rest = name.partition("/")
        of = rest.partition("/")[2] if kind == "optimizer" else rest
        if of not in known or kind not in ("model", "ema", "optimizer"):
            raise InputError(
                f"{checkpoint}: has {name}, which {rank_state.run.config.model} has not; give a "
                "checkpoint of this model"
            )
    tensors = dict(read_tensors(checkpoint, where, wanted(rank_state, where)))
    restore(rank_state, tensors, str(checkpoint))
    rank_state.start_at(manifest.step)
