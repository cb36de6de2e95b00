"""`python -m benchmarks study`: start the runs in turn, read their folders, write the results."""

import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.child import run_child
from benchmarks.study.check import MODEL, Machine, check_numbers, check_with_torch, find_machine
from benchmarks.study.configs import parse_configs
from benchmarks.study.options import StudyConfig
from vigpipe.config.options import flag
from vigpipe.errors import DONE, InputError
from vigpipe.launch.child import stoppable
from vigpipe.launch.signals import Stopped
from vigpipe.parallel.layout import Layout
from vigpipe.run.folder import make_output_folder

FILES = ("README.md", "rows.csv", "profile.json", "loss.png")


class _Failed(Exception):
    """A run ended with an exit code other than 0, after it had printed the reason."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run_study(config: StudyConfig, arguments: Sequence[str]) -> int:
    """Start the runs in turn, and write the results.

    Args:
        config: the options.
        arguments: the command line after `python -m benchmarks`, for the page.

    Returns:
        The exit code: 0, that of a run that failed, or 128 + n if signal n ended the command.

    Raises:
        InputError: an option is wrong, or there are too few images.
    """
    layouts = parse_configs(config.configs)
    check_numbers(config, layouts)
    machine = find_machine(config)
    # This runs in a process of its own: a run that is started from here counts this process's
    # peak memory as its own, because on Linux the peak is inherited (exec keeps the larger one).
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        data, num_blocks = pool.submit(check_with_torch, config, layouts).result()
    name = f"{time.strftime('%Y-%m-%d')}-study-{machine.num_cores}core"
    folder = make_output_folder(config.out or Path("results") / name, FILES)
    try:
        with stoppable(), _runs_folder(config, folder) as runs:
            profile = config.profile or runs / "profile.json"
            if not profile.exists():
                most = max(layout.world_size for layout in layouts.values())
                _profile(config, min(max(most, 2), num_blocks), runs)
            _run_all(config, layouts, machine, runs)
            _write(config, arguments, layouts, machine, runs, profile, data, folder)
    except _Failed as failed:
        return failed.code
    except Stopped as stopped:
        return 128 + stopped.signum
    return DONE


@contextlib.contextmanager
def _runs_folder(config: StudyConfig, folder: Path) -> Iterator[Path]:
    if config.keep_runs is None:
        with tempfile.TemporaryDirectory(prefix=".study-", dir=folder.parent) as name:
            yield Path(name)
        return
    try:
        config.keep_runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--keep-runs {config.keep_runs}: cannot be written ({error.strerror}); choose another "
            "folder"
        ) from error
    yield config.keep_runs


# ---- the runs --------------------------------------------------------------------------------


def run_options(config: StudyConfig, layout: Layout) -> dict[str, Any]:
    """Return the options of `vigpipe time` for a run of a layout, by name."""
    num_steps = config.images // config.batch
    return {
        "model": MODEL,
        "data": config.data,
        "data_dir": str(config.data_dir),
        "stages": layout.pipeline_size,
        "microbatches": layout.num_microbatches,
        "dp": layout.num_replicas,
        "batch_size": config.batch,
        "steps": num_steps,
        "threads": config.threads,
        "device": config.device,
        "seed": config.seed,
        "timing_warmup": config.warmup,
        "timing_steps": max(num_steps, config.test_batches),
        "test_batches": config.test_batches,
    }


def command_line(
    config: StudyConfig, layout: Layout, machine: Machine, verb: str, options: Mapping[str, Any]
) -> list[str]:
    """Make the command line that starts the ranks of a layout.

    Args:
        config: options of the study.
        layout: the layout to run; with Slurm it gives the number of tasks.
        machine: says whether to start with srun.
        verb: command of `vigpipe`, such as `time`.
        options: options of that command, by name.

    Returns:
        The words of the command line.
    """
    words = [sys.executable, "-m", "vigpipe", verb]
    for name, value in options.items():
        words += [flag(name), str(value)]
    if not machine.has_slurm:
        return words
    step = [f"--ntasks={layout.world_size}", f"--cpus-per-task={config.threads}"]
    return ["srun", *step, "--kill-on-bad-exit=1", *words]


def _profile(config: StudyConfig, num_stages: int, runs: Path) -> None:
    """Measure the costs of the blocks with up to `num_stages` ranks side by side.

    This happens on this host, even if the runs use srun.
    """
    options = run_options(config, Layout(num_stages))
    for name in ("dp", "steps", "timing_warmup", "timing_steps", "test_batches"):
        del options[name]
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=runs) as folder:
        options |= {"microbatches": "auto", "out": Path(folder) / "plan.toml"}
        this_host = Machine(False, 0)
        _run("profile of the blocks", command_line(config, Layout(), this_host, "plan", options))
        os.replace(Path(folder) / "plan.profile.json", runs / "profile.json")
    print()


def _run_all(
    config: StudyConfig, layouts: Mapping[str, Layout], machine: Machine, runs: Path
) -> None:
    for number in range(1, config.rounds + 1):
        for name, layout in layouts.items():
            folder = _folder(runs, number, name)
            options = run_options(config, layout)
            title = f"round {number} of {config.rounds}, {name}"
            if folder.exists():
                _check_kept(folder, options)
                print(f"{title}: kept", end="")
            else:
                _run_into(folder, title, command_line(config, layout, machine, "time", options))
            seconds = _summary(folder)["timing"]["step_seconds"]["median"]
            print(f", {seconds:.4f} s a step", flush=True)


def _folder(runs: Path, number: int, name: str) -> Path:
    return runs / f"round-{number}-{name}"


def _run_into(folder: Path, title: str, words: Sequence[str]) -> None:
    """Run a command into a folder, which comes to exist only when the run has ended well."""
    with tempfile.TemporaryDirectory(prefix=".run-", dir=folder.parent) as name:
        begun = Path(name) / "run"
        _run(title, [*words, "--out", str(begun)])
        os.replace(begun, folder)


def _run(title: str, words: Sequence[str]) -> None:
    print(title, end=": ", flush=True)
    began = time.perf_counter()
    code = run_child(words)
    if code:
        print(f"ended with exit code {code}")
        raise _Failed(code)
    print(f"{time.perf_counter() - began:.0f} s", end="", flush=True)


def _check_kept(folder: Path, options: Mapping[str, Any]) -> None:
    """Raise InputError if the run in a kept folder had other options."""
    try:
        kept = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        num_tested = _summary(folder)["test"]["images"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: holds no finished run ({error}); delete it") from error
    kept["test_batches"] = (
        num_tested // options["batch_size"]
    )  # an option of `vigpipe time`, not in config.toml
    for name, value in options.items():
        if kept.get(name) != value:
            raise InputError(
                f"--keep-runs {folder.parent}: {folder.name} was run with {name} = "
                f"{kept.get(name)}, but now it is {value}; choose another folder or delete it"
            )


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


# ---- after the last --------------------------------------------------------------------------


def _write(
    config: StudyConfig,
    arguments: Sequence[str],
    layouts: Mapping[str, Layout],
    machine: Machine,
    runs: Path,
    profile: Path,
    data: str,
    folder: Path,
) -> None:
    from benchmarks.study.measured import read_measured
    from benchmarks.study.outcome import Outcome, predict_all, write_rows
    from benchmarks.study.page import speedup_table, step_table, write_page
    from benchmarks.study.plot import draw_losses
    from vigpipe.planning.profile import read_profile

    outcome = Outcome(
        layouts=layouts,
        runs={
            name: [
                read_measured(_folder(runs, number, name), name, layout, number)
                for number in range(1, config.rounds + 1)
            ]
            for name, layout in layouts.items()
        },
        predictions=predict_all(read_profile(profile), layouts, config.batch),
        batch_size=config.batch,
        num_warmup=config.warmup,
        num_cores=machine.num_cores,
        num_threads=config.threads,
    )
    shutil.copyfile(profile, folder / "profile.json")
    draw_losses(outcome, folder / "loss.png")
    options = run_options(config, Layout()) | {"stages": "S", "microbatches": "M", "dp": "D"}
    words = ["vigpipe", "time"]
    for name, value in options.items():
        words += [flag(name), str(value)]
    write_page(outcome, folder, arguments, shlex.join([*words, "--out", "FOLDER"]), data)
    write_rows(outcome, folder / "rows.csv")
    print(f"\n{step_table(outcome, 'simple')}\n\n{speedup_table(outcome, 'simple')}\n\n{folder}")
