"""The command line: `vigpipe VERB`, or `python -m vigpipe VERB`."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import App, Parameter

from vigpipe.commands.comparable import check_comparable
from vigpipe.commands.program import run_program
from vigpipe.config.choices import Shell
from vigpipe.config.options import TrainConfig, check_numbers, check_timed_steps
from vigpipe.config.verbs import (
    MADE_BY_GRAPH,
    PICTURES,
    EvaluateConfig,
    ExplainConfig,
    GraphConfig,
    ImportConfig,
    PlanConfig,
    PredictConfig,
    PrepareConfig,
    SelftestConfig,
    TimeConfig,
)
from vigpipe.errors import WRONG_INPUT, InputError
from vigpipe.files.outputs import check_converted_file, check_new_file
from vigpipe.messages import one_line, tell
from vigpipe.run.folder import RUN_FILES
from vigpipe.start import run_on_ranks
from vigpipe.version import __version__

Config = TypeVar("Config")
Options = Annotated[Config, Parameter(name="*")]  # the options that the fields of a class declare

CONFIGURED = ("train", "check", "plan", "time")  # commands that take --config
# Commands that there were once, and where they are now.
MOVED = {"bench": "python -m benchmarks NAME", "study": "python -m benchmarks study"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of this process; return its exit code, 2 for wrong use."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in MOVED:
        tell(
            f"{words[0]}: has moved out of the package; run {MOVED[words[0]]} in a checkout of the "
            "project"
        )
        return WRONG_INPUT
    return run_program(make_app, CONFIGURED, words)


def make_app(arguments: list[str]) -> App:
    """Make the parser of all commands; the ranks that one starts are given the same arguments."""
    app = App(
        name="vigpipe",
        help="Train Vision GNNs across pipeline stages and data-parallel replicas.",
        version=__version__,
        help_format="plaintext",
    )

    @app.command
    def train(*, config: Options[TrainConfig] = TrainConfig()) -> int:  # noqa: B008
        """Train a model; `python -m vigpipe.train` is the same."""
        return run_on_ranks(config, arguments, "vigpipe.training:train", RUN_FILES, trains=True)

    @app.command
    def check(*, config: Options[TrainConfig] = TrainConfig(), compare_steps: int = 3) -> int:  # noqa: B008
        """Prove that a layout trains like unsplit models in one process.

        Replicas that take every step together are compared with one model. Those that take steps of
        their own are compared with as many models, which do in turn what the replicas have done.

        Args:
            config: as for train.
            compare_steps: optimizer steps to compare.
        """
        return run_on_ranks(
            config,
            arguments,
            "vigpipe.commands.check:check",
            ["check.txt"],
            {"num_steps": compare_steps},
            any_strategy=True,
            check=partial(check_comparable, num_steps=compare_steps),
        )

    @app.command(name="time")
    def time_(*, config: Options[TimeConfig] = TimeConfig()) -> int:  # noqa: B008
        """Time steps, stages, blocks and their parts, and account for the bubble.

        Of replicas that take steps of their own, it tells who worked, waited and averaged.
        """
        if not config.timing:
            raise InputError("--no-timing: is what vigpipe time is for; use vigpipe train")
        if config.test_batches < 1:
            raise InputError(f"--test-batches {config.test_batches}: must be at least 1")
        work = "vigpipe.commands.time:time_steps"
        if config.strategy != "synchronous":
            work = "vigpipe.commands.time_replicas:time_replicas"
            check_timed_steps(config)
            config = replace(config, timing=False, trace=False)
        batches = {"num_test_batches": config.test_batches}
        return run_on_ranks(config, arguments, work, RUN_FILES, batches, any_strategy=True)

    @app.command
    def plan(*, config: Options[PlanConfig] = PlanConfig()) -> int:  # noqa: B008
        """Measure the blocks, and find the cut, micro-batches and schedule of the fastest step."""
        check_numbers(config)
        from vigpipe.commands.start_plan import run_plan

        return run_plan(config, arguments)

    @app.command
    def report(*runs: Path, out: Path = Path("report.html")) -> None:
        """Make one page of runs, with charts to zoom, that opens from disk.

        Args:
            runs: folders of runs.
            out: the .html file to write; an earlier page is replaced, nothing else is.
        """
        from vigpipe.report.page import write_report

        write_report(runs, out)
        print(one_line(f"{out}: open it in a browser"))

    @app.command(name="doctor")
    def doctor_() -> None:
        """Tell what this machine offers, which operators serve here, and why."""
        from vigpipe.commands.doctor import doctor

        print(doctor())

    @app.command
    def selftest(*, config: Options[SelftestConfig] = SelftestConfig()) -> int:  # noqa: B008
        """Test and measure all that this machine can do, and write one page about it."""
        from vigpipe.selftest.asked import budget_seconds, part_names

        part_names(config.parts)
        budget_seconds(config.budget)
        from vigpipe.selftest.run import run_selftest  # imports torch

        return run_selftest(config)

    @app.command
    def graph(*, config: Options[GraphConfig]) -> None:
        """Draw which patches of an image a node is connected to."""
        check_new_file(config.out, "--out ", PICTURES, mark=MADE_BY_GRAPH, overwrite=None)
        from vigpipe.commands.graph import draw_graph  # imports torch

        draw_graph(config)

    @app.command
    def predict(*images: Path, config: Options[PredictConfig]) -> int | None:
        """Print the five most likely classes of images, or of the nodes of a graph.

        Args:
            images: image files, or folders of them.
            config: the options.
        """
        from vigpipe.commands.start_inference import run_inference

        return run_inference(config, arguments, images)

    @app.command
    def evaluate(*, config: Options[EvaluateConfig]) -> int | None:
        """Score trained weights: loss, accuracy, precision and recall by class, confusions."""
        from vigpipe.commands.start_inference import run_inference

        return run_inference(config, arguments)

    @app.command(name="explain")
    def explain_(*, config: Options[ExplainConfig]) -> None:
        """Tell which nodes and edges a prediction rests on, for an image or a node of a graph."""
        from vigpipe.commands.start_inference import check_explained

        check_explained(config)
        from vigpipe.commands.explain import explain  # imports torch

        explain(config)

    @app.command
    def completion(shell: Shell, /) -> None:
        """Print a script that lets a shell complete verbs, options and choices.

        Args:
            shell: the shell; docs/command-line.md says where the script goes.
        """
        from vigpipe.commands.completion import completion_script

        print(completion_script(app, shell))

    slurm = App(name="slurm", help="Run under Slurm.")
    app.command(slurm)

    @slurm.command(name="write")
    def write_(folder: Path, /, *, overwrite: bool = False) -> None:
        """Write the batch file train.sbatch, to be changed and submitted.

        Args:
            folder: where to; it is made if there is none.
            overwrite: replace a file of this name.
        """
        from vigpipe.commands.slurm import write_batch_file

        print(one_line(str(write_batch_file(folder, overwrite=overwrite))))

    dataset = App(name="dataset", help="Make graphs to train on.")
    app.command(dataset)

    @dataset.command
    def debian(out: Path, /, *, lists: Path | None = None) -> None:
        """Write the graph of Debian's packages from the lists that apt keeps on this machine.

        Args:
            out: the .npz file to write; an earlier one is replaced, nothing else is.
            lists: folder of the lists of packages; by default apt's own.
        """
        from vigpipe.commands.dataset import make_debian_graph

        make_debian_graph(out, lists)

    @dataset.command
    def prepare(
        source: str,
        out: Path,
        /,
        *,
        config: Options[PrepareConfig] = PrepareConfig(),  # noqa: B008
    ) -> None:
        """Cut a graph into parts, and write them as a folder that is read part by part.

        A run with --data FOLDER maps the files into memory, and reads what its sub-graphs need.

        Args:
            source: the graph: a file, a name or sbm:..., as --data of `vigpipe train` takes it.
            out: the folder to write, which must not be there yet.
            config: the options.
        """
        from vigpipe.commands.dataset import prepare_dataset

        prepare_dataset(source, out, config)

    @dataset.command(name="import")
    def import_(
        out: Path,
        /,
        *,
        config: Options[ImportConfig] = ImportConfig(),  # noqa: B008
    ) -> None:
        """Make a graph file of tables of nodes and edges, of a saved Data, or of a folder.

        Columns of numbers are standardised, and others become a feature for each of their values.

        Args:
            out: the .npz file to write, which must not be there yet.
            config: the options.
        """
        from vigpipe.commands.dataset import import_dataset

        import_dataset(out, config)

    @dataset.command(name="check")
    def check_(folder: Path, /) -> None:
        """Read every file of a prepared folder, and compare it with the manifest.

        Args:
            folder: the folder.
        """
        from vigpipe.commands.dataset import check_dataset

        check_dataset(folder)

    weights = App(name="weights", help="Turn weight files into others.")
    app.command(weights)

    @weights.command
    def convert(
        source: Path, target: Path, /, *, dist_head: bool = True, overwrite: bool = False
    ) -> None:
        """Write published weights anew as safetensors that say which model they are of.

        Args:
            source: a torch or safetensors file, of the authors' code, mmpretrain or vigpipe.
            target: the .safetensors file to write.
            dist_head: keep the second head of models without kNN, which learns from a teacher.
            overwrite: replace the target if it is there.
        """
        check_converted_file(source, target, overwrite=overwrite)
        from vigpipe.model.fit import convert as write  # imports torch
        from vigpipe.model.weights import read_weights

        name = write(source, target, dist_head=dist_head, overwrite=overwrite)
        print(one_line(f"{target}: {name}, {len(read_weights(target))} tensors"))

    checkpoint = App(name="checkpoint", help="Look at what a run has saved.")
    app.command(checkpoint)

    @checkpoint.command(name="list")
    def list_(run: Path, /) -> None:
        """List the checkpoints of a run, newest first.

        Args:
            run: its folder.
        """
        from vigpipe.commands.checkpoint import table_of

        print(table_of(run))

    @checkpoint.command
    def verify(*places: Path) -> int | None:
        """Read every byte, and say which checkpoints are whole; exit code 2 if one is not.

        Args:
            places: checkpoints, or folders of runs.
        """
        from vigpipe.commands.checkpoint import verify_all

        return verify_all(places, print) or None

    @checkpoint.command
    def export(
        place: Path,
        target: Path,
        /,
        *,
        ema: bool = False,
        best: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Write the weights of a checkpoint as one safetensors file.

        Args:
            place: a checkpoint, or a run, whose newest one is meant.
            target: the .safetensors file to write.
            ema: write the moving average of the weights, which a run with --ema keeps.
            best: take the checkpoint that --keep-best has kept instead of the newest one.
            overwrite: replace the target if it is there.
        """
        from vigpipe.commands.checkpoint import export as write

        print(one_line(write(place, target, ema=ema, best=best, overwrite=overwrite)))

    return app
