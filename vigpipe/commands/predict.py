"""What a process of `vigpipe predict` does: print the most likely classes of images, or nodes."""

import os
from collections.abc import Sequence
from pathlib import Path

from vigpipe.config.verbs import PredictConfig
from vigpipe.data.images import read_image
from vigpipe.data.left_out import unreadable
from vigpipe.errors import DONE, InputError
from vigpipe.inference.graph_description import graph_model_in
from vigpipe.inference.predict import list_files, predict, prepare_prediction
from vigpipe.inference.predict_nodes import predict_nodes, prepare_node_prediction
from vigpipe.launch.environment import Launch, threads_per_rank
from vigpipe.launch.join import join
from vigpipe.launch.local import start_local
from vigpipe.messages import tell
from vigpipe.ranks import check_gpus, on_one_gpu, set_up_rank
from vigpipe.run.bad_images import find_bad_images_together
from vigpipe.run.rank import make_rank_state
from vigpipe.start import COMMAND_LINE


def start_or_predict(
    config: PredictConfig, given: Sequence[Path], arguments: Sequence[str], launch: Launch
) -> int:
    """Start ranks, or predict as one of them; return the exit code."""
    if config.data is None and (graph_model := graph_model_in(config.weights)) is not None:
        raise InputError(
            f"--weights {config.weights}: holds a {graph_model}, which is a model of a graph, "
            "not of images; name the graph with --data"
        )
    if config.download and launch.world_size > 1 and launch.launcher != "local":
        raise InputError(
            f"--download: all {launch.world_size} ranks would fetch at once; fetch before with one "
            "process, then leave --download out"
        )
    paths, graph = [], None
    if config.data is None:
        paths = list_files(given)
        run = prepare_prediction(config, paths)
    else:
        run, graph = prepare_node_prediction(config)
    world_size = run.layout.world_size
    if launch.launcher == "alone" and world_size > 1:
        check_gpus(config.device, launch, world_size)
        threads = threads_per_rank(config.threads, world_size, os.environ)
        return start_local(world_size, COMMAND_LINE, arguments, threads)
    gpu = set_up_rank(config, run.layout, launch)
    device = join(config.device, gpu, launch, config.timeout, on_one_gpu=on_one_gpu(run.layout))
    if config.skip_bad_images:
        share = range(len(paths))[launch.rank :: world_size]
        bad = find_bad_images_together(read_image, paths, share, world_size)
        left_out = [str(path) for path in paths if path in bad]
        paths = [path for path in paths if path not in bad]
        run = prepare_prediction(config, paths)
        if left_out and launch.rank == 0:
            tell(unreadable(left_out))
    for note in run.notes if launch.rank == 0 and graph is None else ():
        tell(f"note: {note}")
    rank_state = make_rank_state(run, launch.rank, device)
    predictions = (
        predict(rank_state, paths)
        if graph is None
        else predict_nodes(rank_state, graph, config.split)
    )
    is_json = config.format == "json"
    for prediction in predictions:
        if rank_state.is_writer:
            print(prediction.as_json() if is_json else prediction.as_text())
    return DONE
