"""The command line: `vigpipe VERB`, or `python -m vigpipe VERB`."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict

import vigpipe
from vigpipe.bench.options import (
    FILES,
    CheckpointBench,
    CutsBench,
    EmulateBench,
    FeedBench,
    GnnBench,
    HalosBench,
    IntervalsBench,
    LearningBench,
    MicrobatchesBench,
    OpsBench,
    PipelineBench,
    PlanGraphBench,
    PredictBench,
    SamplersBench,
    SoakBench,
    SplitBench,
    StrategiesBench,
    StudyBench,
    SubnetworksBench,
    SyncBench,
    VigBench,
    WidthsBench,
)
from vigpipe.commands.arguments import check_values, with_negative_values, wrong_use
from vigpipe.commands.help import help_text, wants_help
from vigpipe.config.choices import Shell
from vigpipe.config.files import read_config_file
from vigpipe.config.options import TrainConfig, check_timed_steps
from vigpipe.config.verbs import (
    GraphConfig,
    PlanConfig,
    PredictConfig,
    PrepareConfig,
    SelftestConfig,
    TimeConfig,
)
from vigpipe.errors import DONE, INTERRUPTED, NOBODY_READS, WRONG_INPUT, InputError
from vigpipe.launch.environment import threads_per_rank
from vigpipe.launch.second_signal import SecondSignal
from vigpipe.messages import one_line, tell
from vigpipe.run.folder import RUN_FILES
from vigpipe.study.options import StudyConfig

Options = Annotated[TrainConfig, Parameter(name="*")]
PipelineOptions = Annotated[PipelineBench, Parameter(name="*")]
EmulateOptions = Annotated[EmulateBench, Parameter(name="*")]
MicrobatchesOptions = Annotated[MicrobatchesBench, Parameter(name="*")]
PredictBenchOptions = Annotated[PredictBench, Parameter(name="*")]
CheckpointOptions = Annotated[CheckpointBench, Parameter(name="*")]
CutsOptions = Annotated[CutsBench, Parameter(name="*")]
SyncOptions = Annotated[SyncBench, Parameter(name="*")]
OpsOptions = Annotated[OpsBench, Parameter(name="*")]
GnnOptions = Annotated[GnnBench, Parameter(name="*")]
StudyBenchOptions = Annotated[StudyBench, Parameter(name="*")]
LearningOptions = Annotated[LearningBench, Parameter(name="*")]
SamplersOptions = Annotated[SamplersBench, Parameter(name="*")]
IntervalsOptions = Annotated[IntervalsBench, Parameter(name="*")]
SubnetworksOptions = Annotated[SubnetworksBench, Parameter(name="*")]
HalosOptions = Annotated[HalosBench, Parameter(name="*")]
PlanGraphOptions = Annotated[PlanGraphBench, Parameter(name="*")]
SplitOptions = Annotated[SplitBench, Parameter(name="*")]
WidthsOptions = Annotated[WidthsBench, Parameter(name="*")]
StrategiesOptions = Annotated[StrategiesBench, Parameter(name="*")]
SoakOptions = Annotated[SoakBench, Parameter(name="*")]
FeedOptions = Annotated[FeedBench, Parameter(name="*")]
VigOptions = Annotated[VigBench, Parameter(name="*")]
GraphOptions = Annotated[GraphConfig, Parameter(name="*")]
PlanOptions = Annotated[PlanConfig, Parameter(name="*")]
StudyOptions = Annotated[StudyConfig, Parameter(name="*")]
SelftestOptions = Annotated[SelftestConfig, Parameter(name="*")]
TimeOptions = Annotated[TimeConfig, Parameter(name="*")]
PredictOptions = Annotated[PredictConfig, Parameter(name="*")]
PrepareOptions = Annotated[PrepareConfig, Parameter(name="*")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; wrong use is one sentence and code 2.

    Args:
        arguments: the command line without the program; by default that of this process.
    """
    try:
        with SecondSignal([signal.SIGINT]):
            code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, not when Python ends, a reader that has gone is an exit code
    except BrokenPipeError:  # `vigpipe report --help | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes there
        return NOBODY_READS
    return code


def _run(arguments: list[str]) -> int:
    try:
        options, path = read_config_file(arguments)
        app = make_app(arguments)
        if wants_help(app, arguments):
            print(help_text(app, arguments))
            return DONE
        threads_per_rank(None, 1, os.environ)  # before torch, which OpenMP would end
        verbs = {"train": options, "check": options, "plan": options, "time": options}
        named = "pipeline", "sync", "microbatches", "predict", "cuts", "checkpoint"
        trained = "learning", "samplers", "intervals", "subnetworks", "widths", "split", "halos"
        benches = dict.fromkeys((*named, *trained, "plan-graph"), options)
        app.config = (Dict({**verbs, "bench": benches}, source=path), check_values)
        words = with_negative_values(arguments)
        code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        return DONE if code is None else code
    except CycloptsError as error:
        tell(wrong_use(error))
        return WRONG_INPUT
    except InputError as error:
        tell(str(error))
        return WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def make_app(arguments: list[str]) -> App:
    """Make the command line's parser, with every command and its options.

    Args:
        arguments: the command line without the program, for the ranks that a command starts.
    """
    app = App(
        name="vigpipe",
        help="Train Vision GNNs across pipeline stages and data-parallel replicas.",
        version=vigpipe.__version__,
        help_format="plaintext",
    )

    @app.command
    def train(*, config: Options = TrainConfig()) -> int:  # noqa: B008
        """Train a model; `python -m vigpipe.train` is the same."""
        from vigpipe.start import run_on_ranks

        return run_on_ranks(config, arguments, "vigpipe.training:train", RUN_FILES, trains=True)

    @app.command
    def check(*, config: Options = TrainConfig(), compare_steps: int = 3) -> int:  # noqa: B008
        """Prove that a layout trains like unsplit models in one process.

        Replicas that take every step together are compared with one model. Those that take steps of
        their own are compared with as many models, which do in turn what the replicas have done.

        Args:
            config: as for train.
            compare_steps: optimizer steps to compare.
        """
        from vigpipe.commands.comparable import check_comparable
        from vigpipe.start import run_on_ranks

        check_comparable(config, compare_steps)
        steps = {"num_steps": compare_steps}
        work, files = "vigpipe.commands.check:check", ["check.txt"]
        return run_on_ranks(config, arguments, work, files, steps, any_strategy=True)

    @app.command(name="time")
    def time_(*, config: TimeOptions = TimeConfig()) -> int:  # noqa: B008
        """Time steps, stages, blocks and their parts, and account for the bubble.

        Of replicas that take steps of their own, it tells who worked, waited and averaged.
        """
        from vigpipe.start import run_on_ranks

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
    def study(*, config: StudyOptions = StudyConfig()) -> int:  # noqa: B008
        """Run the study's experiment again, beside its published figures and two baselines."""
        from vigpipe.study.runs import run_study

        return run_study(config, arguments)

    @app.command
    def plan(*, config: PlanOptions = PlanConfig()) -> int:  # noqa: B008
        """Measure the blocks, and find the cut, micro-batches and schedule of the fastest step."""
        from vigpipe.commands.plan import run_plan

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
        print(one_line(str(out)))

    @app.command(name="doctor")
    def doctor_() -> None:
        """Tell what this machine offers, which operators serve here, and why."""
        from vigpipe.commands.doctor import doctor

        print(doctor())

    @app.command
    def selftest(*, config: SelftestOptions = SelftestConfig()) -> int:  # noqa: B008
        """Test and measure all that this machine can do, and write one page about it."""
        from vigpipe.selftest.run import run_selftest

        return run_selftest(config)

    @app.command
    def graph(*, config: GraphOptions) -> None:
        """Draw which patches of an image a node is connected to."""
        from vigpipe.commands.graph import draw_graph

        draw_graph(config)

    @app.command
    def predict(*images: Path, config: PredictOptions) -> int:
        """Print the five most likely classes of images, or of the nodes of a graph.

        Args:
            images: image files, or folders of them.
            config: the options.
        """
        from vigpipe.commands.predict import run_predict

        return run_predict(config, images, arguments)

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
        """Write the batch files train.sbatch and study.sbatch, to be changed and submitted.

        Args:
            folder: where to; it is made if there is none.
            overwrite: replace files of these names.
        """
        from vigpipe.commands.slurm import write_batch_files

        for path in write_batch_files(folder, overwrite=overwrite):
            print(one_line(str(path)))

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
        config: PrepareOptions = PrepareConfig(),  # noqa: B008
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
    def convert(source: Path, target: Path, /, *, overwrite: bool = False) -> None:
        """Write published weights anew as safetensors that say which model they are of.

        Args:
            source: a torch or safetensors file, of the reference code, mmpretrain or vigpipe.
            target: the .safetensors file to write.
            overwrite: replace the target if it is there.
        """
        from vigpipe.model.identify import convert as write
        from vigpipe.model.weights import read_weights

        name = write(source, target, overwrite=overwrite)
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
    def verify(*places: Path) -> int:
        """Read every byte, and say which checkpoints are whole; exit code 2 if one is not.

        Args:
            places: checkpoints, or folders of runs.
        """
        from vigpipe.commands.checkpoint import verify_all

        return verify_all(places, print)

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

    bench = App(name="bench", help="Measure ratios side by side in one run.")
    app.command(bench)

    def run_bench(config: PipelineBench, work: str, **more: object) -> int:
        from vigpipe.start import run_on_ranks

        if config.repeats < 1:
            raise InputError(f"--repeats {config.repeats}: must be at least 1")
        options = {"num_repeats": config.repeats, **more}
        return run_on_ranks(config, arguments, work, FILES, options)

    @bench.command
    def pipeline(*, config: PipelineOptions = PipelineBench()) -> int:  # noqa: B008
        """Time the stages of a pipeline against the same micro-batches on one stage."""
        return run_bench(config, "vigpipe.bench.pipeline:bench_pipeline")

    @bench.command
    def sync(*, config: SyncOptions = SyncBench()) -> int:  # noqa: B008
        """Time the ways to add gradients up over replicas: --sync ddp, drain and double."""
        return run_bench(config, "vigpipe.bench.sync:bench_sync")

    @bench.command
    def emulate(*, config: EmulateOptions) -> int:
        """Run many layouts on few cores: ranks sleep for profiled times, the rest is real."""
        from vigpipe.bench.emulate import run_emulation

        return run_emulation(config, arguments)

    @bench.command
    def strategies(*, config: StrategiesOptions = StrategiesBench()) -> int:  # noqa: B008
        """Compare ways in which replicas agree: replicas sleep, averages are real."""
        from vigpipe.bench.strategies import run_strategies

        return run_strategies(config, arguments)

    @bench.command
    def learning(*, config: LearningOptions = LearningBench()) -> None:  # noqa: B008
        """Compare what the ways in which replicas agree learn, over several seeds."""
        from vigpipe.bench.learning import bench_learning

        bench_learning(config)

    @bench.command
    def samplers(*, config: SamplersOptions = SamplersBench()) -> None:  # noqa: B008
        """Compare what the ways to sample a graph keep, learn and cost, over several seeds."""
        from vigpipe.bench.samplers import bench_samplers

        bench_samplers(config)

    @bench.command
    def intervals(*, config: IntervalsOptions = IntervalsBench()) -> None:  # noqa: B008
        """Compare all-reduce and gossip on the parts of a graph, with averages now and then."""
        from vigpipe.bench.intervals import bench_intervals

        bench_intervals(config)

    @bench.command
    def subnetworks(*, config: SubnetworksOptions = SubnetworksBench()) -> None:  # noqa: B008
        """Compare independent sub-networks with a model that is trained as a whole."""
        from vigpipe.bench.subnetworks import bench_subnetworks

        bench_subnetworks(config)

    @bench.command
    def widths(*, config: WidthsOptions = WidthsBench()) -> None:  # noqa: B008
        """Measure memory and steps of sub-networks by the width of the model they make up."""
        from vigpipe.bench.widths import bench_widths

        bench_widths(config)

    @bench.command
    def halos(*, config: HalosOptions = HalosBench()) -> None:  # noqa: B008
        """Compare what ranks learn whose halos are exact, late, or sampled."""
        from vigpipe.bench.halos import bench_halos

        bench_halos(config)

    @bench.command
    def split(*, config: SplitOptions = SplitBench()) -> None:  # noqa: B008
        """Count what ranks that share a graph send and hold, by their number."""
        from vigpipe.bench.split import bench_split

        bench_split(config)

    @bench.command(name="plan-graph")
    def plan_graph(*, config: PlanGraphOptions = PlanGraphBench()) -> int:  # noqa: B008
        """Predict and measure all ways to use ranks on one graph, and judge the choice."""
        from vigpipe.bench.plan_graph import NAMES, check
        from vigpipe.start import run_on_ranks

        check(config)
        if config.repeats < 1:
            raise InputError(f"--repeats {config.repeats}: must be at least 1")
        meeting = replace(config, shards=config.ranks)
        options = {"num_repeats": config.repeats, "options": config}
        work = "vigpipe.bench.plan_graph:bench_plan_graph"
        return run_on_ranks(meeting, arguments, work, NAMES, options)

    @bench.command
    def microbatches(*, config: MicrobatchesOptions = MicrobatchesBench()) -> int:  # noqa: B008
        """Cut a batch into more and more micro-batches, and account for what each costs."""
        return run_bench(
            config, "vigpipe.bench.microbatches:bench_microbatches", numbers=config.numbers
        )

    @bench.command(name="predict")
    def predict_(*, config: PredictBenchOptions = PredictBench()) -> int:  # noqa: B008
        """Compare predicted steps with measured ones, over layouts of one and two ranks."""
        return run_bench(config, "vigpipe.bench.predict:bench_predict")

    @bench.command
    def cuts(*, config: CutsOptions = CutsBench()) -> int:  # noqa: B008
        """Try every cut in two stages, and see how good the planner's is."""
        return run_bench(config, "vigpipe.bench.cuts:bench_cuts")

    @bench.command
    def ops(*, config: OpsOptions = OpsBench()) -> None:  # noqa: B008
        """Time kNN and max-relative aggregation against the formulation everyone uses."""
        from vigpipe.bench.operators import bench_ops

        bench_ops(config)

    @bench.command
    def gnn(*, config: GnnOptions = GnnBench()) -> None:  # noqa: B008
        """Time epochs on a whole graph against torch-geometric and torch.sparse."""
        from vigpipe.bench.gnn import bench_gnn

        bench_gnn(config)

    @bench.command(name="study")
    def study_(*, config: StudyBenchOptions = StudyBench()) -> None:  # noqa: B008
        """Time training steps of vig_study against torch-geometric's formulation."""
        from vigpipe.bench.study import bench_study

        bench_study(config)

    @bench.command
    def vig(*, config: VigOptions = VigBench()) -> None:  # noqa: B008
        """Time training and inference of ViGs against the formulation everyone uses."""
        from vigpipe.bench.throughput import bench_vig

        bench_vig(config)

    @bench.command
    def feed(*, config: FeedOptions = FeedBench()) -> None:  # noqa: B008
        """Time the way from JPEG files to batches on the device against timm's loader."""
        from vigpipe.bench.feed import bench_feed

        bench_feed(config)

    @bench.command(name="checkpoint")
    def checkpoint_(*, config: CheckpointOptions = CheckpointBench()) -> int:  # noqa: B008
        """Time steps with and without a checkpoint that is written beside them."""
        return run_bench(config, "vigpipe.bench.saving:bench_checkpoint")

    @bench.command
    def soak(*, config: SoakOptions = SoakBench()) -> None:  # noqa: B008
        """Kill, freeze and stop the ranks of a long run, and compare it with one left alone."""
        from vigpipe.bench.soak import bench_soak

        bench_soak(config)

    @bench.command
    def accuracy(*, run: Path, out: Path | None = None) -> None:
        """Show how well a run's model does, beside classifiers on raw pixels.

        Args:
            run: folder of a finished run of train.
            out: folder to write README.md, curve.png and rows.csv to; by default runs/<time>.
        """
        from vigpipe.bench.accuracy import bench_accuracy

        bench_accuracy(run, out)

    return app
