"""A layer of a decoder from its parts, and the way through all of them: where what sub-layers add is summed.

Knows the order of norms, attention and feed-forward; knows nothing of what is inside them.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from model_shards.layers.attention import Attention
from model_shards.layers.norm import LayerNorm, RmsNorm
from model_shards.layers.rotary import Rotation
from model_shards.model import AttentionContext

Norm = RmsNorm | LayerNorm


class DecoderLayer(nn.Module):
    """Norm, attention, norm, feed-forward. What a sub-layer adds to the residual is added with the next norm."""

    def __init__(self, attention_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self,
        update: Tensor | None,  # [tokens, hidden] of the layer before; None for the first layer
        residual: Tensor,  # [tokens, hidden]
        rotation: Rotation | None,
        attention: AttentionContext,
    ) -> tuple[Tensor, Tensor]:  # both [tokens, hidden]: this layer's update and the residual it belongs to
        if update is None:
            normed = self.attention_norm(residual)
        else:
            normed, residual = self.attention_norm.add(update, residual)
        attended = self.attention(normed, rotation, attention)
        normed, residual = self.mlp_norm.add(attended, residual)
        return self.mlp(normed), residual


def run_layers(
    layers: Iterable[nn.Module],  # at least one `DecoderLayer`
    norm: Norm,
    hidden: Tensor,  # [tokens, hidden]
    rotation: Rotation | None,  # None where positions are in `hidden`
    attention: AttentionContext,
) -> Tensor:  # [tokens, hidden]
    """Through all layers and the last norm."""
    update: Tensor | None = None
    residual = hidden
    for layer in layers:
        update, residual = layer(update, residual, rotation, attention)
    assert update is not None, "a spec has at least one layer"
    normed, _ = norm.add(update, residual)
    return normed
