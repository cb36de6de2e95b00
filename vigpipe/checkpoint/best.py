"""Which checkpoint of a run has the best score (--keep-best), and how to find it again."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from vigpipe.checkpoint.manifest import (
    MOST_STEPS,
    Manifest,
    checkpoints_at,
    folder_name,
    read_manifest,
)
from vigpipe.config.choices import KeepBest
from vigpipe.errors import InputError
from vigpipe.job.score import Scores, as_text


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run so far."""

    step: int  # number of optimizer steps done before it
    by: str  # what was compared: top1, of which more is better, or loss, of which less is
    value: float
    of: str  # what was scored: ema, the moving average, where the run has one; else weights
    images: str = "test"  # the samples that were scored; validation, where the run has such
    unit: str = "images"  # what these are, or nodes

    def __str__(self) -> str:
        what = "moving average" if self.of == "ema" else "weights"
        return f"{as_text(self.by, self.value)} of the {what} on the {self.images} {self.unit}"

    def as_table(self) -> dict[str, Any]:
        """Return the entry of a manifest, which `best_in` reads, and of summary.json."""
        return asdict(self)


def better(scores: Scores, step: int, by: KeepBest, best: Best | None) -> Best | None:
    """Return an evaluation after so many steps if it is better than the best so far; else None."""
    weights, average, images = scores.test, scores.average, "test"
    if scores.validation is not None:
        weights, average, images = scores.validation, scores.validation_average, "validation"
    score = average or weights
    assert score is not None
    value = score.numbers()[by]
    if best is not None and not (value < best.value if by == "loss" else value > best.value):
        return None
    return Best(step, by, value, "weights" if average is None else "ema", images, score.unit)


def best_in(manifest: Manifest, where: Path) -> Best | None:
    """Return a manifest's best evaluation, if any; InputError, from `where`, if it is malformed."""
    if not manifest.best:
        return None
    table: dict[str, Any] = {"unit": "images", **manifest.best}  # the oldest have no unit
    is_valid = (
        table.keys() == {"step", "by", "value", "of", "images", "unit"}
        and type(table["step"]) is int
        and 0 <= table["step"] <= MOST_STEPS
        and table["by"] in get_args(KeepBest)
        and type(table["value"]) in (float, int)
        and abs(table["value"]) <= 1e300  # NaN fails too
        and table["of"] in ("weights", "ema")
        and table["images"] in ("validation", "test")
        and table["unit"] in ("images", "nodes")
    )
    if not is_valid:
        raise InputError(f"{where}: its entry of the best checkpoint is malformed")
    return Best(**table)


def best_checkpoint(run: Path) -> tuple[Path, Best]:
    """Find the best checkpoint of a run, and what it was chosen by; InputError if it has none."""
    newest, *_ = checkpoints = checkpoints_at(run)
    if newest == run:
        raise InputError(f"{run}: is a checkpoint; --best wants the folder of a run")
    best = best_in(read_manifest(newest), newest)
    if best is None:
        raise InputError(
            f"{run}: has no best checkpoint; train with --keep-best top1 or loss to keep one"
        )
    for checkpoint in checkpoints:
        if checkpoint.name == folder_name(best.step):
            return checkpoint, best
    raise InputError(f"{run}: its best checkpoint, {folder_name(best.step)}, is gone; take another")
