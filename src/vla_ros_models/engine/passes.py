"""The passes of a model over noise, which ``vla-ros tune`` times and compares with torch's."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vla_ros_models.engine.decoder import parallel, prefill, verify
from vla_ros_models.engine.flow import FlowModel, fill_cross, prefill_flow, sample
from vla_ros_models.engine.kernel_check import random_numbers
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.stream import Guide, KVCache
from vla_ros_models.engine.weights import DecoderWeights

Passes = dict[str, Callable[[], Tensor]]
"""Functions by name; their results show whether all kernels are correct. They may run any number of times."""


def decoding_passes(weights: DecoderWeights, ops: Ops, length: int, layers: int) -> Passes:
    """Return decoding of a token behind a cache, and a prompt of ``length`` positions, in the first layers."""
    weights, noise, device = weights.first(layers), random_numbers(0, weights.device), weights.device
    cache = KVCache.allocate(weights, 1, length + 8)
    for part in (*cache.keys, *cache.values):
        part.copy_(noise(*part.shape))
    token, text = (torch.zeros(1, count, dtype=torch.int64, device=device) for count in (1, 32))
    patches = noise(1, length - 32, weights.shape.hidden_size).to(weights.dtype)
    last = torch.tensor([length - 1], dtype=torch.int32, device=device)
    return {
        "decode": lambda: verify(weights, ops, cache, token, last),
        "prompt": lambda: prefill(weights, ops, cache, patches, text, last, 1),
    }


def bidirectional_passes(weights: DecoderWeights, ops: Ops, length: int, layers: int) -> Passes:
    """Return a bidirectional prompt of ``length`` positions, eight of which are padding, in the first layers."""
    weights, noise, device = weights.first(layers), random_numbers(0, weights.device), weights.device
    cache = KVCache.allocate(weights, 1, length, 1)
    sequence = noise(1, length, weights.shape.hidden_size).to(weights.dtype)
    wanted = torch.arange(56, device=device)[None]
    count = torch.tensor([length - 8], dtype=torch.int32, device=device)
    return {"pass": lambda: parallel(weights, ops, cache, sequence, wanted, count)}


def flow_passes(model: FlowModel, ops: Ops, length: int, layers: int) -> Passes:
    """Return the prefix of three images and ``length`` tokens, and two flow steps, in the first layers.

    If layers cross, the passes have twice as many, of both kinds.
    """
    noise, device, layers = random_numbers(0, model.device), model.device, layers * (1 + model.crosses)
    reads = model.reads[:layers]
    deepest = 1 + max(reads) if reads else layers
    model = replace(model, prefix=model.prefix.first(deepest), expert=model.expert.first(layers), reads=reads)
    patches = noise(1, 3 * model.patches, model.prefix.shape.hidden_size).to(model.prefix.dtype)
    start = 3 * model.patches + length
    cache = KVCache.in_blocks(model.prefix, 1, start + model.suffix)
    cross = KVCache.in_blocks(model.expert, 1, start) if model.crosses else None
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    actions, steps = noise(1, model.horizon, model.action_dim), len(model.times)
    guide, state = Guide.free(actions), noise(1, model.state_dim)

    def prefix() -> Tensor:
        prefill_flow(
            model, ops, cache, patches, tokens, lengths, lambda layer: fill_cross(model, ops, cache, cross, layer)
        )
        return torch.stack([cache.keys[-1], cache.values[-1]])[..., :start, :]

    def flow() -> Tensor:
        return sample(
            model, ops, cache, lengths + 3 * model.patches, actions, state, guide, max(0, steps - 2), cross
        )

    prefix()  # fills the cache
    return {"prefix": prefix, "flow": flow}
