"""The readout: pool the nodes and classify them."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model.keyed_dropout import Draws, KeyedDropout
from vigpipe.model.norm import NORM_ROLES, fold_in_place, make_norm
from vigpipe.model.pointwise import Pointwise
from vigpipe.model.slicing import CONV_ROLES, Roles, within
from vigpipe.model.tokens import Tokens

WIDTH = 1024  # the hidden layer's channels


class Readout(nn.Sequential):
    """Average the nodes if `pool` is `avg`, widen, norm, GELU, dropout, logits of the classes.

    With two heads, the last layer is there twice. In training both give logits, a tuple of two, for
    the class and for the answer of a teacher (DeiT, arXiv:2012.12877); otherwise their mean does.
    """

    tokens: Tokens | None = None
    roles: ClassVar[Roles] = {
        **within("0.", CONV_ROLES, {"in": "trunk", "out": "hidden"}),
        **within("1.", NORM_ROLES, {"out": "hidden"}),
        **within("4.", CONV_ROLES, {"in": "hidden", "out": "classes"}),
    }

    def __init__(
        self,
        channels: int,
        num_classes: int,
        norm: Norm,
        dropout: float,
        stream: int,
        pool: Literal["avg", ""] = "avg",
        hidden: int = WIDTH,
        num_heads: int = 1,
    ) -> None:
        super().__init__(
            Pointwise(channels, hidden),
            make_norm(norm, hidden),
            nn.GELU(),
            KeyedDropout(dropout, stream),
        )
        self._most_heads = num_heads
        self.reset(num_classes, pool)

    @property
    def heads(self) -> tuple[nn.Module, ...]:
        """The layers that give logits; an Identity without classes."""
        return tuple(self)[4:]

    def reset(self, num_classes: int, pool: Literal["avg", ""]) -> None:
        """Replace the last layer by a new one with random weights, and set how nodes are pooled."""
        if pool not in ("avg", ""):
            raise ValueError(f"global_pool is 'avg' or '' (got {pool!r})")
        widen = self[0]
        assert isinstance(widen, Pointwise)
        self.pool = pool
        del self[4:]
        for _ in range(self._most_heads if num_classes else 1):
            head = Pointwise(len(widen.weight), num_classes) if num_classes else nn.Identity()
            self.append(head.to(widen.weight.device, widen.weight.dtype).train(self.training))

    @torch.no_grad()
    def merge_heads(self) -> None:
        """Replace several heads by one that gives the mean of their logits."""
        heads = [head for head in self.heads if isinstance(head, Pointwise)]
        if len(heads) > 1:
            first = heads[0]
            first.weight.copy_(torch.stack([head.weight for head in heads]).mean(0))
            first.bias.copy_(torch.stack([head.bias for head in heads]).mean(0))
            del self[5:]

    def fuse(self) -> "Readout":
        fold_in_place(self)
        return self

    def forward(self, x: Tensor, draws: Draws | None, pre_logits: bool = False) -> Any:  # pyrefly: ignore[bad-override]
        """Classify nodes, (B, H, W, C); with `pre_logits`, return the hidden layer."""
        widen, norm, act, dropout, *_ = self
        if self.pool:
            x = x.flatten(1, 2).mean(1) if self.tokens is None else self.tokens.mean(x)
        x = dropout(act(norm(widen(x))), draws)
        if pre_logits:
            return x
        logits = tuple(head(x) for head in self.heads)
        if len(logits) == 1:
            return logits[0]
        # A frozen readout evaluates in training too, where there are draws.
        is_training = self.training or draws is not None
        return logits if is_training else sum(logits) / len(logits)
