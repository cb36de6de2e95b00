"""The closed choices that options and modules share; without torch, so that `--help` is quick."""

from typing import Literal, get_args

Model = Literal["vig_digits", "vig_study", "vig_ti_224", "vig_s_224", "vig_b_224"]
Norm = Literal["batch", "layer", "group"]
Graph = Literal["grid", "knn"]
Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "loopedbfs"]
Sync = Literal["double", "drain", "ddp"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float64"]
# Optimizers that treat every parameter by itself; one with a norm over all of them would depend on
# the cut.
Optimizer = Literal["adam", "adamw", "nadamw", "sgd", "rmsprop", "lion"]
LrSchedule = Literal["cosine", "constant"]

MODELS: tuple[str, ...] = get_args(Model)
NORMS: tuple[str, ...] = get_args(Norm)
SCHEDULES: tuple[str, ...] = get_args(Schedule)
