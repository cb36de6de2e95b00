"""The FFN half of a ViG block: a two-layer perceptron on every node separately."""

from typing import ClassVar

from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model.keyed_dropout import Draws, DropPath
from vigpipe.model.layer import Layer
from vigpipe.model.slicing import Roles, Side, Sides, bound, within


class FFN(nn.Module):
    """Pointwise to `hidden` channels, GELU, pointwise, residual: arXiv:2206.00272, equation 5."""

    roles: ClassVar[Roles] = {
        **within("fc1.", Layer.roles, {"in": "trunk", "out": "hidden"}),
        **within("fc2.", Layer.roles, {"in": "hidden", "out": "trunk"}),
    }

    def __init__(
        self,
        channels: int,
        hidden: int,
        norm: Norm,
        drop_path: float,
        stream: int,
        rescale: float = 1.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = Layer(channels, hidden, norm, gelu=True)
        self.fc2 = Layer(hidden, channels, norm, factor=rescale, scale=scale)
        self.drop_path = DropPath(drop_path, stream)

    def sides(self, prefix: str, trunk: Side | None) -> dict[str, Sides]:
        channels = {"trunk": trunk, "hidden": Side(f"{prefix}hidden")}
        return bound(self, prefix, self.roles, channels)

    def forward(self, x: Tensor, draws: Draws | None) -> Tensor:
        return self.fc2(self.fc1(x), x, self.drop_path(x, draws))
