"""Where else the rows of metrics.jsonl go while a run trains (--track).

A tracker's package is no dependency; only the rank that writes the run's files imports it.
"""

import contextlib
import csv
import os
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from vigpipe.config.choices import Track
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.job.rows import FULL_BATCH, PARTIAL_BATCH
from vigpipe.job.score import SHARES
from vigpipe.run.folder import METRICS_TABLE, MLFLOW_RUN, TENSORBOARD, WANDB_RUN

Table = Mapping[str, Any]  # a row of metrics.jsonl, or the options of a run

_PROJECT = "vigpipe"  # the name that W&B and MLflow group runs by, unless the environment has one
_SECONDS_BETWEEN_REQUESTS = 5
_MOST_SECONDS_AT_END = 60
_MOST_METRICS_IN_REQUEST = 1000  # A server takes no more.
_RATES = {"images": ("images_per_second",), "nodes": ("nodes_per_second", "training_nodes")}
# Numbers of a row that a chart does not show.
_COUNTED = ("step", "epoch", PARTIAL_BATCH, FULL_BATCH, *SHARES)


class Tracker(Protocol):
    """Something that is told what metrics.jsonl is told."""

    def add(self, row: Table, step: int) -> None:
        """Take a row of metrics.jsonl, written when `step` optimizer steps were done."""

    def close(self) -> None:
        """Write what is left."""


def check_tracker(name: Track | None) -> None:
    """Raise InputError if the package that --track needs is not installed; it is not imported."""
    if name not in (None, "csv") and find_spec(name) is None:
        raise InputError(
            f"--track {name}: the package {name} is not installed; install it beside vigpipe, or "
            "track with csv"
        )


def open_tracker(name: Track, folder: Path, config: Table, rows: Sequence[Table]) -> Tracker:
    """Open the tracker of a run that goes on from some rows, if any, or raise InputError."""
    kinds = {"csv": _Csv, "tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow}
    try:
        return kinds[name](folder, config, rows)
    except Exception as error:  # A tracker has errors of its own: no login, no server.
        why = str(error).strip().partition("\n")[0]
        raise InputError(f"--track {name}: cannot begin ({escaped(why)})") from error


def _named(row: Table) -> dict[str, float]:
    """Return the numbers of a row with names such as train/loss, test/top1, validation/accuracy."""
    if "event" in row:
        return {}
    of = "train" if "step" in row else "test"
    tables = {of: {**row, "validation": {}}, "validation": row.get("validation", {})}
    return {
        "train/epoch_loss" if key == "training_loss" else f"{of}/{key}": value
        for of, table in tables.items()
        for key, value in _flat(table).items()
        if key not in _COUNTED
    }


def _flat(row: Table) -> dict[str, Any]:
    """Return a row with the names of its inner tables in front of theirs: validation_ema_top1."""
    flat = {key: value for key, value in row.items() if not isinstance(value, Mapping)}
    return flat | {
        f"{key}_{inner}": number
        for key, value in row.items()
        if isinstance(value, Mapping)
        for inner, number in _flat(value).items()
    }


def _columns(unit: str) -> tuple[str, ...]:
    """Return the names of the flat rows of a run that counts images or nodes."""
    shares = SHARES[unit]
    averages = [f"ema_{name}" for name in ("loss", *shares)]
    return (
        *("step", "epoch", "loss", "lr", "step_seconds", *_RATES[unit], "data_seconds"),
        *("training_loss", *shares, unit, *averages, "validation_loss"),
        *(f"validation_{name}" for name in (*shares, unit, *averages)),
        *("event", "message"),
    )


class _Csv:
    """metrics.csv in the run's folder: all rows, a column for every name."""

    def __init__(self, folder: Path, config: Table, rows: Sequence[Table]) -> None:
        self._file = (folder / METRICS_TABLE).open("w", encoding="utf-8", newline="")
        unit = "nodes" if MODEL_DEFAULTS[config["model"]].job == "graph" else "images"
        self._writer = csv.DictWriter(self._file, _columns(unit), extrasaction="ignore")
        self._writer.writeheader()
        step = 0
        for row in rows:
            step = row.get("step", step)
            self.add(row, step)

    def add(self, row: Table, step: int) -> None:
        self._writer.writerow({"step": step} | _flat(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    """Event files in the run's folder, for `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, config: Table, rows: Sequence[Table]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        done = max((row.get("step", 0) for row in rows), default=0)
        # What an earlier run wrote of later steps is not shown any more.
        self._writer = SummaryWriter(folder / TENSORBOARD, purge_step=done + 1, flush_secs=30)
        options = "\n".join(f"    {name} = {value!r}" for name, value in config.items())
        self._writer.add_text("options", options, done)

    def add(self, row: Table, step: int) -> None:
        for name, value in _named(row).items():
            self._writer.add_scalar(name, value, step)
        if "event" in row:
            self._writer.add_text(f"event/{row['event']}", row["message"], step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases; WANDB_PROJECT, WANDB_MODE and the like hold as anywhere."""

    def __init__(self, folder: Path, config: Table, rows: Sequence[Table]) -> None:
        import wandb  # pyrefly: ignore[missing-import]

        name = _kept(folder / WANDB_RUN, rows) or _keep(folder / WANDB_RUN, uuid4().hex[:8])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=folder.resolve().name,
            id=name,
            resume="allow",
            dir=folder,
            config=dict(config),
        )
        # As an axis, not as wandb's own step: that one refuses to go back after a resumption.
        self._run.define_metric("*", step_metric="step")

    def add(self, row: Table, step: int) -> None:
        if "event" in row:
            self._run.log({"step": step, f"event/{row['event']}": row["message"]})
        else:
            self._run.log({"step": step, "epoch": row["epoch"], **_named(row)})

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """A run on the server of MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, folder: Path, config: Table, rows: Sequence[Table]) -> None:
        from mlflow.entities import Metric, Param  # pyrefly: ignore[missing-import]
        from mlflow.tracking import MlflowClient  # pyrefly: ignore[missing-import]

        self._client, self._new_metric = MlflowClient(), Metric
        self._run = _kept(folder / MLFLOW_RUN, rows)
        if self._run:
            self._client.update_run(self._run, status="RUNNING")
        else:
            project = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            experiment = self._client.get_experiment_by_name(project)
            if experiment is None:
                number = self._client.create_experiment(project)
            else:
                number = experiment.experiment_id
            run = self._client.create_run(number, run_name=folder.resolve().name)
            self._run = _keep(folder / MLFLOW_RUN, run.info.run_id)
            params = [Param(name, str(value)) for name, value in config.items()]
            self._client.log_batch(self._run, params=params)
        # These are to be sent.
        self._metrics: list[Any] = []
        self._tags: dict[str, str] = {}
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._error: Exception | None = None
        # A request to a server that is gone is repeated for minutes, which no step may wait for.
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def add(self, row: Table, step: int) -> None:
        if self._error is not None:
            raise self._error
        now = time.time_ns() // 1_000_000
        metrics = [self._new_metric(name, float(x), now, step) for name, x in _named(row).items()]
        with self._lock:
            self._metrics += metrics
            if "event" in row:
                self._tags[f"{row['event']} at step {step}"] = row["message"]

    def close(self) -> None:
        self._ends.set()
        self._thread.join(_MOST_SECONDS_AT_END)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"no answer for {_MOST_SECONDS_AT_END} s")

    def _send(self) -> None:
        """Send what there is every few seconds, and the rest at the end; runs in a thread."""
        try:
            is_last = False
            while not is_last:
                is_last = self._ends.wait(_SECONDS_BETWEEN_REQUESTS)
                with self._lock:
                    metrics, tags = self._metrics, self._tags
                    self._metrics, self._tags = [], {}
                for first in range(0, len(metrics), _MOST_METRICS_IN_REQUEST):
                    some = metrics[first : first + _MOST_METRICS_IN_REQUEST]
                    self._client.log_batch(self._run, some)
                for name, message in tags.items():
                    self._client.set_tag(self._run, name, message)
            self._client.set_terminated(self._run)
        except Exception as error:  # told by the next `add`, or by `close`
            self._error = error


def _kept(path: Path, rows: Sequence[Table]) -> str:
    """Return the name under which the tracker knows an earlier run that goes on; empty if none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip() if rows else ""
    return ""


def _keep(path: Path, name: str) -> str:
    """Keep the name of the tracker's run in a file of the run's folder, and return it."""
    path.write_text(f"{name}\n", encoding="ascii")
    return name
