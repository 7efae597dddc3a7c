"""Compare Gemma's kernels in Triton's interpreter with torch: prefix and flow steps."""

from dataclasses import replace
from unittest import mock

import torch
from interpret_kernels import close

from vla_ros_models.engine import kernel_check
from vla_ros_models.engine.flow import FlowModel, prefill_flow, sample
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.shapes import DecoderShape, TowerShape
from vla_ros_models.engine.stream import Guide, KVCache
from vla_ros_models.engine.tile_configs import Tile
from vla_ros_models.engine.triton_ops import TritonOps
from vla_ros_models.engine.weights import DecoderWeights, Layer, Matrix
from vla_ros_models.pi.architecture import PUBLISHED, gemma
from vla_ros_models.pi.network import PiNetwork, make_flow

HORIZON, CAMERAS, PATCHES = 5, 2, 4
SIZES = {
    "vision": TowerShape(width=16, blocks=1, heads=2, mlp_width=24, used_blocks=1, image_size=28),
    "prefix": gemma(48, 2, 96, heads=4, head_dim=16),
    "expert": gemma(64, 2, 128, heads=4, head_dim=16),
    "vocabulary": 50,
    "horizon": HORIZON,
}
SMALL = {
    "qkv": Tile(8, 32),
    "o_proj": Tile(16, 16, splits=2),
    "gate_up": Tile(16, 32),
    "down_proj": Tile(32, 32, splits=4),
    "": Tile(16, stages=1, block_m=16),
}
OPS = {
    "pi0": {"few rows": TritonOps()},
    "pi05": {
        "small tiles": TritonOps(lambda work: SMALL[work.role] if "flow" in work.kernel else None),
        "many rows": TritonOps(skinny=0),
    },
}
"""pi0.5 has all kernels of pi0, and norms that depend on the time."""


def make_model(kind: str, dtype: torch.dtype) -> FlowModel:
    """Random weights, every norm other than its neutral value."""
    torch.manual_seed(3)
    network = PiNetwork(replace(PUBLISHED[kind], **SIZES)).eval().requires_grad_(False)
    for name, value in network.named_parameters():
        value.normal_(std=0.3 if value.ndim == 1 or "norm" in name else value.shape[-1] ** -0.5)
    for stack in (network.prefix, network.expert, network.embed_tokens, network.projector):
        for name, value in stack.named_parameters():
            value.data = value.data if "norm" in name else value.data.to(dtype)
    return make_flow(network, steps=2)


@torch.inference_mode()
def run(kind: str, model: FlowModel, ops: Ops, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Two robots with prompts of different lengths: keys and values of the last prefix layer, and the chunks."""
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    patches, lengths = noise(2, CAMERAS * PATCHES, 48).to(dtype), torch.tensor([7, 3], dtype=torch.int32)
    tokens = torch.randint(3, 50, (2, 8), generator=generator)
    cache = KVCache.in_blocks(model.prefix, 2, CAMERAS * PATCHES + 8 + HORIZON + 1)
    for part in (*cache.keys, *cache.values):
        part.fill_(100.0)  # unwritten places show
    prefill_flow(model, ops, cache, patches, tokens, lengths)
    seen = CAMERAS * PATCHES + 3
    filled = [part[-1][:, :, :seen].clone() for part in (cache.keys, cache.values)]
    given = torch.zeros(2, HORIZON, dtype=torch.int32)
    given[1, : 2 if kind == "pi05" else 0] = 1
    guide = Guide(
        noise(2, HORIZON, 32), torch.rand(2, HORIZON, generator=generator), torch.tensor([10.0, 3.0]), given
    )
    start = lengths + CAMERAS * PATCHES
    chunk = sample(model, ops, cache, start, noise(2, HORIZON, 32), noise(2, 32), guide)
    # Nothing is left of the first; the second step only.
    again = sample(model, ops, cache, start, guide.previous, noise(2, 32), guide, first=1)
    return *filled, chunk, again


@torch.inference_mode()
def cross(dtype: torch.dtype, bound: float) -> None:
    """Keys and values of a model with 3 heads for a layer with 2 wider ones; there is room for fewer of them."""
    torch.manual_seed(4)
    key, value = (Matrix((torch.randn(64, 48) / 7).to(dtype), "dense", 48, "qkv") for _ in range(2))
    shape, none = DecoderShape(64, 64, 1, 2, 2, 32, norm="rms_float32"), torch.zeros(1, 16, dtype=dtype)
    weights = DecoderWeights(shape, (Layer(key, cross=(key, value)),), (), none, none)
    source = torch.randn(2, 2, 3, 192, 16).to(dtype)
    ours, theirs = (KVCache.in_blocks(weights, 2, 128, layers=1) for _ in range(2))
    TritonOps().write_cross(weights, ours, 0, *source)
    Ops().write_cross(weights, theirs, 0, *source)
    close("cross, keys", ours.keys[0], theirs.keys[0], bound)
    close("cross, values", ours.values[0], theirs.values[0], bound)


def main(name: str) -> None:
    dtype = getattr(torch, name)
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    cross(dtype, bound)
    for kind in PUBLISHED:
        model = make_model(kind, dtype)
        expected = run(kind, model, Ops(), dtype)
        for what, ops in OPS[kind].items():
            for part, ours, theirs in zip(
                ("keys", "values", "chunk", "again"), run(kind, model, ops, dtype), expected, strict=True
            ):
                close(f"{kind}, {what}, {part}", ours, theirs, bound)
        if kind == "pi05":
            with mock.patch.object(kernel_check, "SKINNY", 8):  # twice as many are many rows
                kernel_check.check_flow(TritonOps(skinny=8), model)
        print("equal", kind)
