"""How a state dict differs from that of a model, and the tables of positions it should have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from vigpipe.model.blocks import reduced
from vigpipe.model.grapher import Grapher
from vigpipe.model.position import Grid
from vigpipe.model.vig import VisionGnn
from vigpipe.model.weights import shape_text

MOST_NAMED = 10  # keys of each kind that an error lists


@dataclass(frozen=True)
class Differences:
    """The tensors that keep a model from loading a state dict."""

    missing: Sequence[str]
    unexpected: Sequence[str]  # the model lacks them
    misshapen: Sequence[str]  # with both shapes

    @classmethod
    def between(
        cls, state: Mapping[str, Tensor], model_state: Mapping[str, Tensor]
    ) -> "Differences":
        misshapen = [
            f"{name} ({shape_text(tensor)} in the file, "
            f"{shape_text(model_state[name])} in the model)"
            for name, tensor in state.items()
            if name in model_state
            and (
                tensor.shape != model_state[name].shape
                or tensor.is_floating_point() != model_state[name].is_floating_point()
                or tensor.is_complex()
            )
        ]
        return cls(
            [name for name in model_state if name not in state],
            [name for name in state if name not in model_state],
            misshapen,
        )

    @property
    def count(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.misshapen)

    def __str__(self) -> str:
        parts: list[str] = []
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.misshapen,
        }
        for kind, names in kinds.items():
            if names:
                more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
                parts.append(f"{len(names)} {kind}: {', '.join(names[:MOST_NAMED])}{more}")
        return "; ".join(parts)


def with_relative_positions(
    state: Mapping[str, Tensor], model_state: Mapping[str, Tensor], model: nn.Module
) -> dict[str, Tensor]:
    """Give a state dict the model's tables of relative positions; see `match_state`."""
    is_relative = isinstance(model, VisionGnn) and model.shape.relative
    tables = {name for name in {*state, *model_state} if name.endswith(".relative_pos")}
    matched = {name: tensor for name, tensor in state.items() if name not in tables}
    for name in sorted(tables):
        if name not in model_state:
            if not is_relative:
                matched[name] = state[name]  # `Differences` calls it unexpected
        elif name in state and not _is_table(state[name]):
            matched[name] = state[name]  # `Differences` says that it has another shape
        else:
            assert isinstance(model, VisionGnn)
            block = int(name.split(".")[1])
            grapher = model.get_submodule(name.removesuffix(".relative_pos"))
            assert isinstance(grapher, Grapher)
            grid = reduced(_grid_of(state, model), (2,) * model.specs[block].stage)
            matched[name] = grapher.table_from(state.get(name), grid)
    return matched


def _is_table(tensor: Tensor) -> bool:
    """Return whether this can be a `relative_pos`, (1, N, M)."""
    shape = tensor.shape
    return len(shape) == 3 and shape[0] == 1 and tensor.numel() > 0 and tensor.is_floating_point()


def _grid_of(state: Mapping[str, Tensor], model: VisionGnn) -> Grid:
    """Return the grid of nodes that a state dict is for, before the first downsampling."""
    embedding = state.get("pos_embed")
    if embedding is None or not is_embedding(embedding, model.pos_embed):
        return model.grid  # any grid will do: `match_state` refuses the state dict
    return embedding.shape[2], embedding.shape[3]


def is_embedding(tensor: Tensor, target: Tensor) -> bool:
    """Tell whether this can be a `pos_embed` of the same channels as another, on any grid."""
    return tensor.dim() == 4 and tensor.is_floating_point() and tensor.shape[:2] == target.shape[:2]
