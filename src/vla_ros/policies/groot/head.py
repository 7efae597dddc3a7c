"""GR00T's diffusion transformer in the form that the engine's kernels for few rows take.

Those kernels know norms without a mean. A layer norm ignores the mean of its inputs, so it is taken out of all that
is added to the stream: the residual products, and the tokens of state and actions. The rows then have a mean of 0,
where a layer norm is an RMS norm.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros.engine.weights import DecoderWeights, Layer, Matrix
from vla_ros.policies.groot.network import GrootModel
from vla_ros.policies.groot.parts import Linear


@torch.no_grad()
def with_few_rows(model: GrootModel) -> GrootModel:
    """Return the model with weights for few rows; chunks change by rounding only.

    Sizes that are no multiples of 16 have no such kernels; the model is returned unchanged.
    """
    shape = model.head.shape
    if any(size % 16 for size in (shape.hidden_size, shape.intermediate_size, shape.head_dim)):
        return model
    layers = tuple(
        replace(layer, o_proj=_centered(layer.o_proj), down_proj=_centered(layer.down_proj))
        for layer in model.head.layers
    )
    head = replace(model.head, layers=layers)
    scale, shift = model.last
    weight, bias = model.action_out[0]
    return replace(
        model,
        head=head,
        few=_few_rows(head, scale, model.horizon + 1),
        few_bias=functional.linear(shift, weight, bias).contiguous(),
        state=(model.state[0], _without_mean(model.state[1])),
        action_mlp=_without_mean(model.action_mlp),
        positions=(model.positions - model.positions.mean(-1, keepdim=True))
        .expand(model.horizon, shape.hidden_size)
        .contiguous(),
    )


def _few_rows(head: DecoderWeights, last: Tensor, rows: int) -> DecoderWeights:
    """Return the head with kernels' norms; ``last`` [steps, N] is the scale of the norm after it."""
    steps = len(last)
    ones = torch.ones(steps, 1, head.shape.hidden_size, device=head.layers[0].qkv.data.device)
    final = torch.cat([last[:, None], 0 * ones, ones], dim=1)
    # One tensor: a kernel finds the gate of a norm, which is 1, before the scale of the next.
    norms = torch.stack(
        [torch.cat([norm.expand(steps, -1, -1), ones], dim=1) for norm in head.norms] + [final], dim=1
    ).contiguous()

    def finished(index: int, layer: Layer) -> Layer:
        first, second = norms[:, 2 * index, 1], norms[:, 2 * index + 1, 1]
        return replace(layer, shifts=(_shifted(layer.qkv, first), _shifted(layer.gate_up, second)))

    # Rotated by no angle, because the kernel that stores queries and keys rotates.
    angles = torch.zeros(rows, head.shape.head_dim // 2, dtype=head.dtype, device=norms.device)
    return DecoderWeights(
        replace(head.shape, norm="rms_float32", rotary=True),
        tuple(finished(index, layer) for index, layer in enumerate(head.layers)),
        norms.unbind(1),
        angles.cos(),
        angles.sin(),
    )


def _shifted(matrix: Matrix | None, shift: Tensor) -> Tensor:
    """Return the products of a norm's shift with a weight, and its bias: float32 [steps, outputs]."""
    assert matrix is not None
    bias = None if matrix.bias is None else matrix.bias.float()
    return functional.linear(shift, matrix.data.float(), bias)


def _without_mean(layer: Linear) -> Linear:
    """Take the mean over the outputs out of a linear layer, in float32."""
    weight, bias = (one.float() for one in layer)
    return weight - weight.mean(0), bias - bias.mean()


def _centered(matrix: Matrix | None) -> Matrix:
    assert matrix is not None
    bias = matrix.data.new_zeros(matrix.outputs) if matrix.bias is None else matrix.bias
    weight, bias = (one.to(matrix.data.dtype) for one in _without_mean((matrix.data, bias)))
    return replace(matrix, data=weight, bias=bias)
