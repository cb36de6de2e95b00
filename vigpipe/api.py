"""`vigpipe.train`: train as the command does, from a script or a notebook."""

import contextlib
import difflib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Unpack, get_type_hints

from vigpipe.config.keywords import TrainKeywords
from vigpipe.config.options import PLACES, TrainConfig, flag
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.config.typed import checked, parts_of, typed
from vigpipe.errors import DONE, NOT_FINITE, SAVED, WRONG_INPUT, InputError, TrainingError
from vigpipe.files.untrusted import read_json
from vigpipe.launch.child import child_process, vigpipe_command
from vigpipe.launch.environment import from_environment
from vigpipe.launch.fork_server import marks
from vigpipe.launch.second_signal import SAME_SECONDS
from vigpipe.run.folder import AVERAGED_WEIGHTS, METRICS, SUMMARY, WEIGHTS, make_output_folder
from vigpipe.run.follow import RowFollower, parse_rows, step_rows
from vigpipe.run.stop_and_save import ASKED_VARIABLE

if TYPE_CHECKING:
    from vigpipe.model.staged import StagedModel

Row = dict[str, Any]  # of metrics.jsonl
Callback = Callable[[Row], bool | None]

POLL_SECONDS = 0.1  # between two looks at metrics.jsonl


@dataclass(frozen=True)
class Training:
    """What a training run has left; every file is explained in docs/start.md.

    Attributes:
        folder: of the run.
        is_done: whether it took its last step; else it was stopped, and has left a checkpoint.
        steps: rows of metrics.jsonl for its optimizer steps, in order: step, epoch, loss, ...;
            where replicas take steps of their own, each row has its replica and item, and those of
            other replicas than 0 come with the next checkpoint.
        evaluations: rows of metrics.jsonl for its evaluations: epoch, training_loss, loss, ...;
            with the option `validation`, each has the scores of those images under that name.
        summary: content of summary.json; empty for a run that was stopped.
    """

    folder: Path
    is_done: bool
    steps: list[Row] = field(repr=False)
    evaluations: list[Row] = field(repr=False)
    summary: Row = field(repr=False)

    @property
    def weights(self) -> Path:
        """The file of the trained weights."""
        return self.folder / WEIGHTS

    @property
    def averaged_weights(self) -> Path | None:
        """The file of their moving average; None if the run kept none."""
        path = self.folder / AVERAGED_WEIGHTS
        return path if path.exists() else None

    @cached_property
    def model(self) -> "StagedModel":
        """The trained model, on the CPU and in evaluation mode: an ordinary PyTorch module.

        Raises:
            InputError: the run was stopped before its end, so that there is none yet.
        """
        if not self.is_done:
            raise InputError(
                f"{self.folder}: the run was stopped before its end; go on with "
                f"vigpipe.train(out={str(self.folder)!r}, resume='auto', ...)"
            )
        if MODEL_DEFAULTS[self.summary["model"]].job == "graph":
            from vigpipe.inference.load_graph_model import load_graph_model

            return load_graph_model(self.weights).model
        from vigpipe.inference.load import load

        return load(self.weights).model


@typed
def train(
    *,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    quiet: bool = False,
    **options: Unpack[TrainKeywords],
) -> Training:
    """Train a model; the options are those of `vigpipe train`, as keyword arguments.

    The training runs in processes of its own, as the command does, and ends with this process. The
    caller therefore needs no `if __name__ == "__main__":`, may be a notebook, and keeps its own
    memory, signals and random numbers. An exception in a callback stops the run with a checkpoint,
    as does Ctrl-C (in a notebook: to interrupt the kernel), and is raised once that is done. Ctrl-C
    two seconds later or more ends the run at once.

    Args:
        on_step: is given the row of each optimizer step (step, epoch, loss, lr, step_seconds,
            images_per_second, data_seconds) soon after it; the run does not wait. It stops the
            run, with a checkpoint, by returning True.
        on_evaluation: is given the row of each evaluation in the same way (epoch, training_loss,
            loss, top1, top5, images; with the option `validation` also a dictionary of that name).
        quiet: print nothing.
        options: see `vigpipe.config.options.TrainConfig`; None is as if the option was left out.
            `data` may be torch-geometric's Data, a NetworkX graph, or a table of arrays as in a
            graph file (docs/graph-data.md), of which the run gets a file for as long as it lasts.

    Returns:
        The run's rows, paths and model.

    Raises:
        InputError: options or data are wrong; nothing was trained.
        FloatingPointError: the loss is NaN or infinite.
        KeyboardInterrupt: Ctrl-C; the run has saved if it had taken a step.
        TrainingError: the run ended in another way.
        TypeError: there is no such option.
    """
    data = options.get("data")
    if data is not None and not isinstance(data, str | os.PathLike):
        from vigpipe.graphs.imports.objects import graph_file_of  # imports torch

        given: dict[str, Any] = {"on_step": on_step, "on_evaluation": on_evaluation, "quiet": quiet}
        with graph_file_of(data, "data", trains=True) as path:
            return train(**given, **{**options, "data": path})  # pyrefly: ignore[bad-argument-type]
    arguments = as_arguments(options)
    out = options.pop("out", None)
    launch = from_environment(os.environ)
    if launch.world_size > 1:
        raise InputError(
            "vigpipe.train: starts its ranks itself, but this process is one of "
            f"{launch.world_size} of {launch.launcher}; start one process, or let "
            f"{launch.launcher} start python -m vigpipe.train"
        )
    if out is None and options.get("resume") == "auto":
        raise InputError("resume='auto': goes on with the run in out; name that folder")
    if out is None:
        folder = make_output_folder(None, ())
        arguments.append(f"{flag('out')}={folder}")
    else:
        folder = Path(out)

    callbacks = {"on_step": on_step, "on_evaluation": on_evaluation}
    code, last_line = _run(arguments, RowFollower(folder / METRICS), callbacks, quiet)
    if code in (DONE, SAVED):
        return read_training(folder, is_done=code == DONE)
    if out is None:
        with contextlib.suppress(OSError):  # it stays if the run has written something
            folder.rmdir()
    message = last_line.removeprefix("vigpipe: ")
    if code == WRONG_INPUT:
        raise InputError(message)
    if code == NOT_FINITE:
        raise FloatingPointError(message)
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    raise TrainingError(f"the training in {folder} {how}{': ' * bool(message)}{message}", code)


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the words of the command line for keyword arguments; TypeError if one is no option."""
    hints = get_type_hints(TrainConfig)
    words: list[str] = []
    for name, value in options.items():
        if name not in hints:
            similar = difflib.get_close_matches(name, hints, 1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise TypeError(f"vigpipe.train has no option {name!r}{hint}")
        if value is None:
            continue
        types = parts_of(hints[name])
        is_whole = type(value) is int and abs(value) < 1 << 63
        if (name in PLACES and isinstance(value, Path)) or (is_whole and types[0] is str):
            value = str(value)  # as fanout=10 is
        value = checked(name, value, hints[name])
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        else:
            words.append(f"{flag(name)}={value}")
    return words


def _run(
    arguments: list[str],
    rows: RowFollower,
    callbacks: Mapping[str, Callback | None],
    quiet: bool,
) -> tuple[int, str]:
    """Run the command; return its exit code, and the last line of its stderr if it has failed.

    What a callback has raised, or Ctrl-C, is raised when the run has ended.
    """
    command = vigpipe_command("train", *arguments)
    stdout = _Printer(sys.stdout, quiet=quiet)
    stderr = _Printer(sys.stderr, quiet=quiet, keep_last=True)
    error: BaseException | None = None
    pressed: list[float] = []  # when Ctrl-C was handed on

    def tell_new_rows() -> None:
        nonlocal error
        for row in rows.read_new():
            name = "on_step" if "step" in row else "on_evaluation"
            callback = None if "event" in row else callbacks[name]
            if callback is None or error is not None:
                continue
            try:
                if callback(row) is True:
                    ask_to_stop(f"{name} returned True")
            except KeyboardInterrupt:
                raise
            except BaseException as raised:
                error = raised
                ask_to_stop(f"{name} raised {type(raised).__name__}")

    def ask_to_stop(why: str) -> None:
        if not asked.exists():  # once: a second signal would not let it save
            asked.write_text(why, encoding="utf-8")
            child.terminate()

    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="vigpipe-"))
        asked = Path(temporary, "why")
        variables = {**os.environ, **marks(temporary), ASKED_VARIABLE: str(asked)}
        pipe = subprocess.PIPE
        child = stack.enter_context(child_process(command, stdout=pipe, stderr=pipe, env=variables))
        selector = stack.enter_context(selectors.DefaultSelector())
        for stream, printer in ((child.stdout, stdout), (child.stderr, stderr)):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, printer)
        while True:
            try:
                _print_until_end(child, selector, tell_new_rows)
                break
            except KeyboardInterrupt as interrupt:
                if len(pressed) > 1:
                    raise  # the run does not even end
                if not pressed or time.monotonic() - pressed[0] > SAME_SECONDS:
                    error = interrupt
                    stderr.end()  # it answers in sentences
                    pressed.append(time.monotonic())
                    child.send_signal(signal.SIGINT)
        code = child.wait()
    stdout.end()
    if error is not None or code in (DONE, SAVED):
        stderr.end()
    if error is not None:
        raise error
    return code, stderr.last_line


def _print_until_end(
    child: subprocess.Popen[bytes],
    selector: selectors.BaseSelector,
    tell_new_rows: Callable[[], None],
) -> None:
    """Print what a process prints, and tell the rows that it writes, until it ends."""
    while selector.get_map():
        ready = selector.select(POLL_SECONDS)
        for key, _ in ready:
            content = os.read(key.fd, 1 << 16)
            if content:
                key.data.add(content)
            else:
                selector.unregister(key.fileobj)
        tell_new_rows()
        if not ready and child.poll() is not None:
            break  # it was killed, and something of it still holds its pipes
    child.wait()
    tell_new_rows()


class _Printer:
    """Prints a process's lines; `keep_last` holds one back, which may be that of an exception."""

    def __init__(self, stream: IO[str], *, quiet: bool, keep_last: bool = False) -> None:
        self._stream, self._quiet = stream, quiet
        self._last = -1 if keep_last else None  # where the search for the last line's start ends
        self._kept = b""

    def add(self, content: bytes) -> None:
        content = self._kept + content
        start = content.rfind(b"\n", 0, self._last) + 1
        self._print(content[:start])
        self._kept = content[start:]

    def end(self) -> None:
        """Print what is held back, and hold nothing back from now on."""
        self._print(self._kept)
        self._last, self._kept = None, b""

    @property
    def last_line(self) -> str:
        return self._kept.decode("utf-8", "replace").strip()

    def _print(self, content: bytes) -> None:
        if content and not self._quiet:
            self._stream.write(content.decode("utf-8", "replace"))
            self._stream.flush()


def read_training(folder: Path, *, is_done: bool) -> Training:
    """Read what a run has left in its folder; there is no summary before its last step."""
    rows = parse_rows((folder / METRICS).read_bytes())
    evaluations = [row for row in rows if "step" not in row]
    summary = read_json(folder / SUMMARY) if is_done else {}
    return Training(folder, is_done, step_rows(rows), evaluations, summary)
