"""The closed sets of choices that options and modules share; does not import torch."""

from collections.abc import Sequence
from typing import Literal, get_args

from vigpipe.errors import InputError

VigModel = Literal[
    "vig_digits",
    "vig_study",
    "vig_ti_224",
    "vig_s_224",
    "vig_b_224",
    "pvig_ti_224",
    "pvig_s_224",
    "pvig_m_224",
    "pvig_b_224",
    "vig_cifar_ti",
    "pvig_cifar_ti",
]
MobileModel = Literal[
    "mobilevig_ti",
    "mobilevig_s",
    "mobilevig_m",
    "mobilevig_b",
    "mobilevigv2_ti",
    "mobilevigv2_s",
    "mobilevigv2_m",
    "mobilevigv2_b",
    "greedyvig_s",
    "greedyvig_m",
    "greedyvig_b",
    "adaptvig_s",
    "adaptvig_m",
    "adaptvig_b",
    "logvig_ti",
    "logvig_s",
    "logvig_b",
    "mobilevigv2_cifar_ti",
    "greedyvig_cifar_ti",
]
ImageModel = Literal[VigModel, MobileModel]
GnnModel = Literal["gcn", "sage", "gat", "gin", "gcn2"]
Model = Literal[ImageModel, GnnModel]
JobName = Literal["images", "graph"]  # what a model is for
Norm = Literal["batch", "layer", "group"]
GraphNorm = Literal["none", "batch", "layer"]
Graph = Literal["grid", "knn"]
# Where the neighbours of a node come from:
# knn        the nearest nodes in the whole image, found by the block itself
# window     the nearest nodes in the node's window of the image
# grid       the 3x3 window around the node
# pattern    every second node of the node's row and column
# reuse      the graph that the previous block used or made
# lookahead  as for reuse; the block also makes a kNN graph of its own features for the next block,
#            so that making it can overlap with the convolution (GraphLeap, arXiv:2604.21290)
Policy = Literal["knn", "window", "grid", "pattern", "reuse", "lookahead"]
# Which widths of a ViG the sub-networks share:
# inner  the hidden ones of Grapher and FFN; what is between blocks, stem and readout stay whole
# tied   all of them, with the same channels wherever a residual is added
Divided = Literal["inner", "tied"]
Sampler = Literal["full", "parts", "saint-node", "saint-edge", "saint-walk", "fastgcn", "neighbour"]
Partition = Literal["random", "metis", "metis-train", "spectral", "walks"]
Features = Literal["raw", "row", "tfidf"]
Decay = Literal["all", "first"]
Aggregator = Literal["max", "edge", "sage", "gin", "maxmean"]
Sync = Literal["double", "drain", "ddp"]
Split = Literal["mixed", "halo"]
Edging = Literal["whole", "split"]
Strategy = Literal["synchronous", "periodic", "gossip", "server", "subnetworks"]
Average = Literal["gradients", "weights", "outer"]
Pairs = Literal["any", "sets"]
Answer = Literal["item", "interval"]
Between = Literal["replicas", "hosts"]
Items = Literal["fixed", "pool", "own"]
Final = Literal["mean", "best"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
# These update each parameter independently. An optimizer that takes a norm over all parameters
# would depend on how the model is cut into stages.
Optimizer = Literal["adam", "adamw", "nadamw", "sgd", "rmsprop", "lion"]
LrSchedule = Literal["cosine", "constant"]
Recipe = Literal["imagenet", "cifar", "finetune"]
RandomCrop = Literal["box", "shift"]
OnNan = Literal["stop", "skip"]
Compat = Literal["reference"]
Impl = Literal["fused", "plain"]
Shell = Literal["bash", "zsh", "fish"]
Track = Literal["tensorboard", "wandb", "mlflow", "csv"]
KeepBest = Literal["top1", "loss", "accuracy", "micro_f1", "macro_f1"]
Boundary = Literal["full", "bfloat16"]
Recompute = Literal["never", "except-last", "always"]

AGGREGATORS: tuple[str, ...] = get_args(Aggregator)
MODELS: tuple[str, ...] = get_args(ImageModel)
MOBILE_MODELS: tuple[str, ...] = get_args(MobileModel)
GRAPH_MODELS: tuple[str, ...] = get_args(GnnModel)
NORMS: tuple[str, ...] = get_args(Norm)
PARTITIONS: tuple[str, ...] = get_args(Partition)
POLICIES: tuple[str, ...] = get_args(Policy)
GRAPH_AGGREGATORS = {"sage": ("mean", "max", "pool"), "gat": ("v1", "v2")}
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
OF_LAYERS = ("fastgcn", "neighbour")  # samplers that give every layer nodes of its own


def parse_names(text: str, choices: Sequence[str], flag: str) -> list[str]:
    """Split a comma-separated list of names; raise InputError if one is not among the choices."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in choices]
    if unknown:
        raise InputError(f"{flag} {text}: {unknown[0]!r} is not one of {', '.join(choices)}")
    return names
