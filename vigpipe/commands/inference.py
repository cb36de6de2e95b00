"""What a process of `vigpipe predict` and `vigpipe evaluate` does."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vigpipe.commands.bar import bar
from vigpipe.config.verbs import EvaluateConfig, InferenceConfig, PredictConfig
from vigpipe.data.picture import to_pil
from vigpipe.errors import DONE, InputError
from vigpipe.inference.arrays import write_arrays
from vigpipe.inference.judged import Judge
from vigpipe.inference.outputs import Output
from vigpipe.inference.predict import as_csv, head_of_rows, list_files
from vigpipe.inference.results import Results
from vigpipe.inference.samples import ImageSamples, NodeSamples, Samples
from vigpipe.launch.environment import Launch, threads_per_rank
from vigpipe.launch.join import join
from vigpipe.launch.local import start_local
from vigpipe.messages import tell
from vigpipe.ranks import check_gpus, on_one_gpu, set_up_rank
from vigpipe.report.mistakes import write_mistakes
from vigpipe.run.bad_images import find_bad_images_together
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.start import COMMAND_LINE


def start_or_infer(
    config: InferenceConfig,
    given: Sequence[Path],
    arguments: Sequence[str],
    launch: Launch,
    *,
    is_graph: bool,
) -> int:
    """Start ranks, or predict or evaluate as one of them; return the exit code."""
    if config.download and launch.world_size > 1 and launch.launcher != "local":
        raise InputError(
            f"--download: all {launch.world_size} ranks would fetch at once; fetch before with one "
            "process, then leave --download out"
        )
    samples = _samples(config, given, is_graph=is_graph)
    layout = samples.run.layout
    if launch.launcher == "alone" and layout.world_size > 1:
        check_gpus(config.device, launch, layout.world_size)
        threads = threads_per_rank(config.threads, layout.world_size, os.environ)
        return start_local(layout.world_size, COMMAND_LINE, arguments, threads)
    gpu = set_up_rank(config, layout, launch)
    device = join(config.device, gpu, launch, config.timeout, on_one_gpu=on_one_gpu(layout))
    if config.skip_bad_images:
        assert isinstance(samples, ImageSamples)
        numbers = range(len(samples.candidates))
        share, load = numbers[launch.rank :: layout.world_size], samples.candidates.load
        bad = find_bad_images_together(load, numbers, share, layout.world_size)
        samples = samples.without(sorted(bad))
    for note in samples.notes if launch.rank == 0 else ():
        tell(note)
    rank_state = make_rank_state(samples.run, launch.rank, device)
    if isinstance(config, PredictConfig):
        _predict(config, samples, rank_state)
    else:
        assert isinstance(config, EvaluateConfig)
        _evaluate(config, samples, rank_state)
    return DONE


def _samples(config: InferenceConfig, given: Sequence[Path], *, is_graph: bool) -> Samples:
    if isinstance(config, EvaluateConfig):
        if is_graph:
            return NodeSamples.of(config, config.data, config.split, with_classes=True)
        return ImageSamples.labelled(config)
    assert isinstance(config, PredictConfig)
    if config.data is not None:
        return NodeSamples.of(config, config.data, config.split)
    return ImageSamples.of_files(config, list_files(given))


def _predict(config: PredictConfig, samples: Samples, rank_state: RankState) -> None:
    """Print the prediction of each sample, and write what else is asked for."""
    wants_features = config.embeddings is not None
    judge = Judge(samples.labels, samples.is_known, samples.name_of)
    kept: dict[str, list[torch.Tensor]] = {"logits": [], "embeddings": []}
    is_writer, form, done = rank_state.is_writer, config.format, 0
    if form == "csv" and is_writer:
        print(as_csv(head_of_rows(*samples.columns, num_classes=len(samples.class_names))))
    for output in samples.outputs(rank_state, has_features=wants_features):
        for prediction in samples.predictions(done, output.logits):
            if is_writer:
                as_text = {"text": prediction.as_text, "json": prediction.as_json}
                print(as_csv(prediction.as_row()) if form == "csv" else as_text[form]())
        done += len(output.logits)
        judge.add(output)
        if is_writer and config.logits is not None:
            kept["logits"].append(output.logits)
        if is_writer and output.features is not None:
            kept["embeddings"].append(output.features)
    if not is_writer:
        return
    for name, parts in kept.items():
        if parts:
            arrays = {name: torch.cat(parts).numpy(), **samples.arrays()}
            write_arrays(getattr(config, name), f"--{name} ", arrays, samples.class_names)
    sys.stdout.flush()
    if samples.is_known.any():
        results = _results(config, samples, "all", judge)
        tell(f"score of {samples.known}: {results.summary}; vigpipe evaluate tells more")


def _evaluate(config: EvaluateConfig, samples: Samples, rank_state: RankState) -> None:
    """Print how good the model is, and write the page."""
    is_known = np.ones(len(samples.labels), dtype=bool)
    judge = Judge(samples.labels, is_known, samples.name_of)
    outputs = samples.outputs(rank_state, has_features=False)
    for output in _shown(outputs, len(samples.labels)) if rank_state.is_writer else outputs:
        judge.add(output)
    if not rank_state.is_writer:
        return
    results = _results(config, samples, config.split, judge)
    print(getattr(results, f"as_{config.format}")(), flush=True)
    if config.page is not None:
        picture_of = None
        if isinstance(samples, ImageSamples):
            load = samples.images.load

            def picture_of(index: int) -> Image.Image:
                return to_pil(load(index))

        write_mistakes(results, config.page, samples.name_of, picture_of)
        tell(f"{config.page}: open it in a browser")


def _results(config: InferenceConfig, samples: Samples, split: str, judge: Judge) -> Results:
    return Results(
        data=samples.data,
        split=split,
        weights=str(config.weights),
        model=samples.run.config.model,
        unit=samples.unit,
        class_names=samples.class_names,
        judged=judge.judged(),
    )


def _shown(outputs: Iterator[Output], num_samples: int) -> Iterator[Output]:
    """Show a bar on a terminal while outputs come, which goes when all have come."""
    with bar() as progress:
        task = progress.add_task("evaluating", total=num_samples)
        for output in outputs:
            yield output
            progress.advance(task, len(output.logits))
