"""Write checkpoints while training goes on; only complete checkpoints get their name.

Training waits only while every rank copies its share of the state. A thread then writes the share
into a hidden folder, with a note of its size and SHA-256 beside it. When all notes are there, the
writer's thread adds the manifest and renames the folder:

    ranks        .step-00000050-9f3c/stage0-replica0.safetensors, then .json, ...
    the writer   .step-00000050-9f3c/manifest.json, then .step-00000050-9f3c -> step-00000050

Everything is synced to disk before the rename, so a crash at any moment leaves complete checkpoints
and at most a hidden folder, which the next run removes. No collective is called, so none can hang.
"""

import contextlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from vigpipe.checkpoint.manifest import NAME, Manifest, file_facts, folder_name, list_checkpoints
from vigpipe.checkpoint.rescue import PREFIX
from vigpipe.checkpoint.weights_file import write_tensors
from vigpipe.files.atomic import sync, write_atomically
from vigpipe.run.folder import CHECKPOINTS

POLL_SECONDS = 0.02
# Folders that runs leave incomplete when they die; others' are none of our business.
_LEFT = re.compile(rf"\.(old-)?step-[0-9]+-\w+|{re.escape(PREFIX)}([0-9]+-)?\w+")


class Saver:
    """Writes one rank's file of every checkpoint; one rank, the writer, completes the checkpoint.

    All but the newest `keep` checkpoints and the best one are deleted. The token is the same on
    every rank, and differs from that of any other run.
    """

    def __init__(
        self,
        folder: Path,
        files: list[str],
        own_file: str,
        is_writer: bool,
        keep: int,
        token: str,
        log: Callable[[str], None],
        timeout_seconds: float = 600.0,
        is_lost: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.folder = folder / CHECKPOINTS
        self.files, self.own_file, self.is_writer = files, own_file, is_writer
        self.keep, self.token = keep, token
        self.log, self.timeout_seconds = log, timeout_seconds
        self.newest: int | None = None  # step of the newest checkpoint that this rank has completed
        self._is_lost, self._is_given_up = is_lost, False
        self._thread: threading.Thread | None = None
        if self.is_writer:
            self._sweep()

    def save(
        self,
        manifest: Manifest,
        state: Mapping[str, Tensor],
        stored: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copy this rank's share of the state, and begin to write it in a thread, after the last.

        Tensors that are `stored` are not copied: none may change before `finish` has returned.
        """
        self.finish()
        copies = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in state.items()}
        copies |= {name: tensor.detach().contiguous() for name, tensor in (stored or {}).items()}
        files = [name for name in self.files if not self._is_lost(name)]
        # Not a daemon, so that Python's exit waits for a checkpoint that has begun.
        self._thread = threading.Thread(target=self._write, args=(manifest, copies, files))
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk, or could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def give_up(self) -> None:
        """Wait no more for files of other ranks: the run ends, and has saved something newer."""
        self._is_given_up = True
        self.finish()

    def _write(self, manifest: Manifest, tensors: dict[str, Tensor], files: Sequence[str]) -> None:
        partial = self.folder / f".{folder_name(manifest.step)}-{self.token}"
        try:
            partial.mkdir(parents=True, exist_ok=True)
            try:
                if self.own_file in files:
                    self._write_file(partial / self.own_file, tensors)
            except OSError as error:
                _report_failure(partial / self.own_file, error)
            if self.is_writer:
                self._complete(partial, manifest, files)
        except OSError as error:
            if self.is_writer and not self._is_given_up:
                shutil.rmtree(partial, ignore_errors=True)
                left = f"the newest is {folder_name(self.newest)}" if self.newest else "none is yet"
                self.log(
                    f"checkpoint of step {manifest.step}: could not be written to {self.folder} "
                    f"({error.strerror or error}); the run goes on, {left}"
                )

    def _write_file(self, path: Path, tensors: dict[str, Tensor]) -> None:
        write_tensors(path, tensors)
        sync(path)
        # The note says that the file is complete, and is so itself once it appears.
        write_atomically(path.with_suffix(".json"), json.dumps(file_facts(path)))

    def _complete(self, partial: Path, manifest: Manifest, files: Sequence[str]) -> None:
        """Wait for the files of all ranks, add the manifest, and give the folder its name."""
        notes = {name: self._note(partial / name) for name in files}
        path = partial / NAME
        path.write_text(replace(manifest, files=notes).text(), encoding="utf-8")
        sync(path)
        for name in files:
            (partial / name).with_suffix(".json").unlink()
        sync(partial)
        target = self.folder / folder_name(manifest.step)
        if target.exists():  # damaged, or resumed from and found to be the best one
            target.rename(self.folder / f".old-{target.name}-{self.token}")
        partial.rename(target)
        sync(self.folder)
        self.newest = manifest.step
        best = folder_name(manifest.best["step"]) if manifest.best else None
        for old in list_checkpoints(self.folder)[self.keep :]:
            if old.name != best:
                old.rename(self.folder / f".old-{old.name}-{self.token}")
        for old in self.folder.glob(f".old-*-{self.token}"):
            shutil.rmtree(old, ignore_errors=True)

    def _note(self, path: Path) -> dict[str, object]:
        """Wait for the note of a rank's file; OSError if it does not come."""
        deadline = time.monotonic() + self.timeout_seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                return json.loads(path.with_suffix(".json").read_text())
            failed = path.with_suffix(".failed")
            if failed.exists():
                raise OSError(failed.read_text() or "a rank could not write its share")
            if self._is_given_up:
                raise OSError("given up")
            if self._is_lost(path.name):
                raise OSError("a replica was lost before it had written its share")
            time.sleep(POLL_SECONDS)
        raise OSError(f"{path.name} was not there after {self.timeout_seconds:g} s")

    def _sweep(self) -> None:
        """Remove what runs that died have left incomplete."""
        for folder in self.folder.glob(".*"):
            if _LEFT.fullmatch(folder.name) and not folder.name.endswith(self.token):
                shutil.rmtree(folder, ignore_errors=True)  # not through a link


def rank_file_name(pipeline_rank: int, replica_index: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"stage{pipeline_rank}-replica{replica_index}.safetensors"


def _report_failure(path: Path, error: OSError) -> None:
    """Tell the writer of a file that could not be written; make room first if the disk is full."""
    with contextlib.suppress(OSError):
        path.unlink()
    reason = path.with_suffix(".reason")
    reason.touch()
    with contextlib.suppress(OSError):  # a disk that is still full leaves it empty
        reason.write_text(error.strerror or str(error))
    reason.rename(path.with_suffix(".failed"))  # The writer never reads half of a reason.
