"""The models by name."""

from vigpipe.choices import MODELS, Graph, Norm
from vigpipe.errors import InputError
from vigpipe.model.staged import StagedModel
from vigpipe.model.study import VigStudy
from vigpipe.model.vig import Vig, VigShape

VIG_SHAPES = {
    "vig_digits": VigShape(num_blocks=4, channels=48, k=(9, 9), stem="pixel"),
    "vig_ti_224": VigShape(num_blocks=12, channels=192),
    "vig_s_224": VigShape(num_blocks=16, channels=320),
    "vig_b_224": VigShape(num_blocks=16, channels=640),
}


def create_model(
    name: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: tuple[int, int],
    norm: Norm = "batch",
    drop_path: float = 0.0,
    dropout: float = 0.0,
    graph: Graph | None = None,
) -> StagedModel:
    """Build a model, with weights drawn from torch's global generator.

    Args:
        name: one of MODELS.
        num_classes: width of the logits.
        in_channels: channels of the images.
        image_size: height and width of the images.
        norm: batch, layer or group.
        drop_path: rate in the last block, rising linearly from 0 in the first.
        dropout: rate in the readout.
        graph: `grid` (the default) or `knn` for vig_study; the others are kNN always.

    Raises:
        InputError: unknown name, a graph the model does not have, or images that give too few
            nodes.
    """
    common = {
        "num_classes": num_classes,
        "in_channels": in_channels,
        "image_size": image_size,
        "norm": norm,
        "drop_path": drop_path,
        "dropout": dropout,
    }
    if name == "vig_study":
        return VigStudy(**common, graph=graph or "grid")
    if name not in VIG_SHAPES:
        raise InputError(f"--model {name}: no such model; choose one of {', '.join(MODELS)}")
    if graph not in (None, "knn"):
        raise InputError(
            f"--graph {graph}: {name} is kNN in every block; only vig_study also has a grid"
        )
    return Vig(VIG_SHAPES[name], **common)
