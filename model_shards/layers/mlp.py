"""The feed-forward layers over this rank's columns. Knows nothing of tokens or attention."""

from torch import Tensor, nn

from model_shards.layers import ops
from model_shards.layers.linear import Linear, RowParallelLinear
from model_shards.layers.placement import Placement
from model_shards.spec import ModelSpec


class GatedMlp(nn.Module):
    """`down(silu(gate(x)) * up(x))` with gate and up in one product."""

    def __init__(self, spec: ModelSpec, num_columns: int, placement: Placement) -> None:
        super().__init__()
        self.gate_up = Linear(2 * num_columns, spec.hidden_size, placement, bias=spec.mlp_bias)
        self.down = RowParallelLinear(spec.hidden_size, num_columns, placement, bias=spec.mlp_bias)

    def forward(
        self,
        hidden: Tensor,  # [tokens, hidden]
    ) -> Tensor:  # [tokens, hidden], equal on every rank
        output: Tensor = self.down(ops.silu_and_multiply(self.gate_up(hidden)))
        return output


class GeluMlp(nn.Module):
    """`down(gelu(up(x)))`, both with biases."""

    def __init__(self, spec: ModelSpec, num_columns: int, placement: Placement) -> None:
        super().__init__()
        self.up = Linear(num_columns, spec.hidden_size, placement, bias=spec.mlp_bias)
        self.down = RowParallelLinear(spec.hidden_size, num_columns, placement, bias=spec.mlp_bias)

    def forward(
        self,
        hidden: Tensor,  # [tokens, hidden]
    ) -> Tensor:  # [tokens, hidden], equal on every rank
        output: Tensor = self.down(ops.gelu_tanh(self.up(hidden)))
        return output
