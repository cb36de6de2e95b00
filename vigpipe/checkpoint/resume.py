"""Choose a checkpoint, check that it belongs to this run, and continue from it."""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vigpipe.checkpoint.best import best_in
from vigpipe.checkpoint.manifest import (
    Manifest,
    checkpoints_at,
    folder_name,
    list_checkpoints,
    read_manifest,
    read_tensors,
    tensor_names,
    verify,
)
from vigpipe.checkpoint.rescue import salvage
from vigpipe.checkpoint.state import check_fits, needed_tensors, replica_prefix, restore
from vigpipe.config.files import as_toml
from vigpipe.config.options import OPTIONS, TrainConfig, flag
from vigpipe.errors import InputError
from vigpipe.files.untrusted import read_toml
from vigpipe.model import mapped
from vigpipe.parallel.agreement import run_with_heartbeats
from vigpipe.parallel.values import broadcast_value
from vigpipe.replication.subnetworks.moments import is_moment

if TYPE_CHECKING:
    from vigpipe.job.feed import Feed
    from vigpipe.run.facts import Run
    from vigpipe.run.rank import RankState

# Options that may differ from those of the checkpoint that a run goes on from, and of the run that
# it does again.
_RESUMED = {name for name, facts in OPTIONS.items() if facts.differs != "never"}
_REPLAYED = {name for name, facts in OPTIONS.items() if facts.differs == "always"}

# What the names of tensors begin with.
_KINDS = (
    *("model", "ema", "optimizer", "outer_old", "outer_velocity", "given", "given_mean"),
    *("residual", "powersgd_q", "rows"),
)
_OTHER_REPLICA = re.compile("replica[0-9]+/")  # see `state.replica_prefix`


def check_same_options(folder: Path, run: "Run") -> None:
    """Check that a run has the options of the one in a folder that it does again (--replay)."""
    path = folder / "config.toml"
    advice = f"give the same options, as --config {path} does"
    _check_options(f"--replay {folder}", read_toml(path), run, _REPLAYED, advice)


def _check_options(
    where: str, before: Mapping[str, Any], run: "Run", may_differ: Set[str], advice: str
) -> None:
    """Raise InputError if an option of a run is not that of an earlier one and may not differ."""
    # An older vigpipe lacked options that now have a default; what it did is that default.
    now, before = as_toml(run.config), as_toml(TrainConfig()) | dict(before)
    for options in (now, before):
        # A run without --halo is exact too, and a single rank may not give the option.
        if options.get("halo") == "exact":
            del options["halo"]
        options.setdefault("exif", False)  # versions without the option; graphs have none either
    for name in sorted((now.keys() | before.keys()) - may_differ):
        if now.get(name) != before.get(name):
            raise InputError(
                f"{where}: its {flag(name)} is {before.get(name, 'not set')}, this run's is "
                f"{now.get(name, 'not set')}; {advice}"
            )


def choose_checkpoint(place: Path, log: Callable[[str], None]) -> tuple[Path, Manifest]:
    """Verify the named checkpoint or find a run's newest whole one; `log` what is passed over."""
    checkpoints = checkpoints_at(place, "--resume ")
    if checkpoints == [place]:
        return place, verify(place)
    problems: list[str] = []
    for checkpoint in checkpoints:
        try:
            manifest = verify(checkpoint)
        except InputError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            log(f"passed over: {problem}")
        return checkpoint, manifest
    raise InputError(
        f"--resume: none of the {len(checkpoints)} checkpoints in {checkpoints[0].parent} is "
        f"whole, the newest for this reason: {problems[0]}; delete the folder to begin anew"
    )


def resume(rank_state: "RankState", folder: Path, log: Callable[[str], None]) -> Manifest | None:
    """Put the checkpoint of --resume into a rank's newly made state; return its manifest, if any.

    All ranks call this: rank 0 chooses the checkpoint and verifies every byte, and the other ranks
    read the same files and trust its verdict.
    """
    run = rank_state.run
    option, world_size = run.config.resume, run.layout.world_size
    if option is None:
        return None
    notes: list[str] = []
    place = folder if option == "auto" else Path(option)

    def choose_on_rank_0() -> tuple[Path, Manifest] | None:
        if rank_state.mesh.rank > 0:
            return None
        if option == "auto":
            salvage(folder)
            if not list_checkpoints(folder):
                return None
        checkpoint, manifest = choose_checkpoint(place, notes.append)
        notes.extend(check_same_run(manifest, run, checkpoint))
        best = best_in(manifest, checkpoint)
        if best is not None and not (
            best.by == run.config.keep_best
            and (folder / "checkpoints" / folder_name(best.step)).is_dir()
        ):
            # The best one was chosen by another score, or is in another run's folder.
            manifest = replace(manifest, best={})
        return checkpoint, manifest

    # Verifying may take longer than --timeout.
    chosen = run_with_heartbeats(choose_on_rank_0, world_size)
    told = [notes, chosen and str(chosen[0]), chosen and asdict(chosen[1])]
    notes, place_chosen, facts = broadcast_value(told, world_size)
    for note in notes:
        log(note)
    if place_chosen is None:
        log(f"--resume auto: {folder} holds no checkpoint: starting anew")
        return None
    checkpoint, manifest = Path(place_chosen), Manifest(**facts)
    load_checkpoint(rank_state, checkpoint, manifest)
    log(f"going on after step {manifest.step}, from {checkpoint}")
    return manifest


def read_same_data(feed: "Feed", folder: Path) -> None:
    """Let the feed read what an earlier run had read up to its newest checkpoint (--replay)."""
    checkpoint = checkpoints_at(folder, "--replay ")[0]
    manifest = read_manifest(checkpoint)
    with _entry("data", checkpoint):
        feed.restore(manifest.data)


@contextmanager
def _entry(of: str, where: Path) -> Iterator[None]:
    """Say of which entry of a manifest a ValueError in this context is."""
    try:
        yield
    except ValueError as error:
        raise InputError(
            f"{where}: its entry of the {of} is malformed: {error}; give another checkpoint"
        ) from error


def check_belongs(manifest: Manifest, run: "Run", where: Path) -> None:
    """Check that a checkpoint is one of this run, or of one that it may go on with."""
    _check_options(
        f"--resume {where}",
        manifest.config,
        run,
        _RESUMED,
        "a run goes on as it began, so change the option, or start another run from its --weights",
    )
    if (name := run.differs_in_data(manifest.data)) is not None:
        raise InputError(
            f"--resume {where}: its data differ from {run.config.data}: {name} was "
            f"{manifest.data.get(name)}, is {run.fingerprint[name]}; give the same data"
        )
    _check_replicas(manifest, run, where)


def check_same_run(manifest: Manifest, run: "Run", where: Path) -> list[str]:
    """Check that a run may continue from a checkpoint; return sentences on allowed differences."""
    check_belongs(manifest, run, where)
    if manifest.step > run.num_steps:
        raise InputError(
            f"--resume {where}: {manifest.step} steps are done already, but the run has "
            f"{run.num_steps}; give a larger --steps or --epochs"
        )
    notes = [
        f"{where} is of an older vigpipe and does not keep the {name}: give the same data"
        for name in run.unknown_of_data(manifest.data)
    ]
    total_microbatches = run.layout.num_replicas * run.layout.num_microbatches
    if manifest.layout.get("pieces") != total_microbatches:
        notes.append(
            f"--microbatches x --dp was {manifest.layout.get('pieces')}, is {total_microbatches}: "
            "the batch is cut otherwise from here on, which BatchNorm's statistics depend on"
        )
    is_alone = run.layout.num_replicas == 1
    if run.config.compress != "none" and is_alone and manifest.config.get("dp", 1) != 1:
        notes.append(
            f"--compress {run.config.compress}: one replica sends nothing, and what several had "
            "left out before is lost"
        )
    if manifest.step == run.num_steps:
        notes.append(
            f"all {run.num_steps} steps are done; a larger --steps or --epochs makes the run longer"
        )
    if manifest.num_steps != run.num_steps:
        notes.append(
            f"the run has {run.num_steps} steps, not {manifest.num_steps}: the learning rate "
            "follows the new course from here on"
        )
    return notes


def _check_replicas(manifest: Manifest, run: "Run", where: Path) -> None:
    """Check that replicas with states of their own are as many as the checkpoint has."""
    if not manifest.replicas:
        return
    taken = manifest.replicas["progress"].get("taken")
    num_before = len(taken) if isinstance(taken, list) else 0
    if num_before != run.layout.num_teams:
        each = "replicas" if run.layout.team_size == 1 else "hosts with replicas"
        each = "workers" if run.layout.has_server else each
        raise InputError(
            f"--resume {where}: is a checkpoint of {num_before} {each}, and this run has "
            f"{run.layout.num_teams}; start as many"
        )


def _restore_stored(
    stored: Mapping[str, Tensor], checkpoint: Path, prefix: str, file_of: Mapping[str, str]
) -> None:
    """Copy what this rank stores of a wide model, block by block."""
    opened = cache(partial(mapped.open, writes_file=False))
    for name, target in stored.items():
        full_name = f"{prefix}rows/{name}"
        if full_name not in file_of:
            raise InputError(f"{checkpoint}: has no {full_name}; give a checkpoint of this model")
        source = opened(checkpoint / file_of[full_name])[full_name]
        check_fits(full_name, source, target, str(checkpoint))
        mapped.copy_blocks(target, source)


def load_checkpoint(rank_state: "RankState", checkpoint: Path, manifest: Manifest) -> None:
    """Put a checkpoint, written by any layout of this model, into a rank's newly made state."""
    file_of = tensor_names(checkpoint, manifest)
    model_names = rank_state.run.wide_model.state_dict().keys()
    for name in file_of:
        own = _OTHER_REPLICA.sub("", name)
        if is_moment(stored := own.removeprefix("rows/")):
            own = stored
        kind, _, rest = own.partition("/")
        model_name = rest.partition("/")[2] if kind == "optimizer" else rest
        if not (kind in _KINDS and model_name in model_names) and kind != "loss_scale":
            raise InputError(
                f"{checkpoint}: has {name}, which {rank_state.run.config.model} has not; give a "
                "checkpoint of this model"
            )
    layout = rank_state.run.layout
    own_state = layout.state_of(rank_state.mesh.replica_index)
    states = range(1 if layout.has_server or not manifest.replicas else layout.num_teams)
    kept = [s for s in states if f"{replica_prefix(s)}model/{next(iter(model_names))}" in file_of]
    if own_state not in kept and kept:
        own_state = kept[0]  # this replica was lost, and comes back as a copy
    prefix = replica_prefix(own_state)
    available = {name.removeprefix(prefix) for name in file_of if name.startswith(prefix)}
    needed = [f"{prefix}{name}" for name in needed_tensors(rank_state, available)]
    found = read_tensors(checkpoint, file_of, needed)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in found}
    restore(rank_state, tensors, str(checkpoint))
    if (own_steps := rank_state.own_steps) is not None:
        _restore_stored(own_steps.stored(), checkpoint, prefix, file_of)
        if manifest.replicas:
            with _entry("replicas", checkpoint):
                own_steps.restore(manifest.replicas["progress"], kept)
    with _entry("data", checkpoint):
        rank_state.feed.restore(manifest.data)
    rank_state.step = manifest.step
