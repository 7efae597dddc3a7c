"""Compare the fused vision towers in Triton's interpreter with the reference path."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from tools.checkpoints.tiny import random_weights, tiny_architecture
from vla_ros.types import JpegRoundTrip
from vla_ros.vision.processors import (
    LiberoResize,
    LinearResize,
    ResizeNaive,
    crop_center,
    jpeg_round_trip,
    resize_lanczos3,
    resize_with_pad_linear,
)
from vla_ros.vision.resample import bilinear_crop, lanczos3_steps
from vla_ros_models.engine import resample
from vla_ros_models.engine.kernels import resample as kernels
from vla_ros_models.engine.tower_ops import TowerOps
from vla_ros_models.engine.triton_ops import TritonTowerOps
from vla_ros_models.oft.processing import OFTResize
from vla_ros_models.openvla.loading import build_empty
from vla_ros_models.openvla.network import VisionEncoder


def make_model(dtype: torch.dtype) -> torch.nn.Module:
    """Both kinds of tower; a width that is no power of two, and every parameter other than its neutral value."""
    base = tiny_architecture(vision_width=48, vision_blocks=3, vocabulary=768, empty_token=500)
    model = build_empty(replace(base, towers=tuple(replace(tower, image_size=42) for tower in base.towers)))
    weights = random_weights(model.architecture)
    generator = torch.Generator().manual_seed(1)
    for name, value in weights.items():
        if "norm" in name or "scale_factor" in name:
            value += 0.3 * torch.randn(value.shape, generator=generator)
    model.load_state_dict(weights, assign=True)
    return model.to(dtype)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def resampling() -> None:
    """The kernels of JPEG, resizes and crop have the bits of the host."""
    generator, device = np.random.default_rng(0), torch.device("cpu")
    resample._kernels = lambda device: kernels
    ramp = np.broadcast_to(np.linspace(0, 255, 60, dtype=np.uint8)[:, None], (60, 60, 3))
    for source, size, count in (((17, 33), (15, 30), 1), ((9, 22), (6, 24), 2)):
        images = generator.integers(0, 256, (count, *source, 3), dtype=np.uint8)
        images[-1, 4:] = ramp[4 : source[0], : source[1]]
        for (step,), host in (
            ([JpegRoundTrip(source)], jpeg_round_trip),
            (lanczos3_steps(source, size), partial(resize_lanczos3, size=size)),
            (bilinear_crop(source, size, 0.9), partial(crop_center, area=0.9, size=size)),
        ):
            found = resample.make_step(step, device)(torch.from_numpy(images)).numpy()
            assert np.array_equal(found, np.stack([host(image) for image in images])), (source, step)
    alone = LiberoResize((14, 14)), OFTResize((14, 14), camera_side=17), ResizeNaive((14, 10))
    linear = LinearResize((14, 14), centred=False)
    for processor, host in (
        *((one, one) for one in alone),
        (linear, lambda image: resize_with_pad_linear(image, (14, 14), centred=False)),
    ):
        found = resample.make_pipeline(processor, (18, 21), device)
        image = generator.integers(0, 256, (18, 21, 3), dtype=np.uint8)
        assert np.array_equal(found(torch.from_numpy(image)[None])[0].numpy(), host(image)), processor


@torch.inference_mode()
def main(name: str) -> None:
    dtype = getattr(torch, name)
    if dtype == torch.float32:
        resampling()
    ours, theirs, generator = TritonTowerOps(), TowerOps(), torch.Generator().manual_seed(2)
    exact = 1e-6 if dtype == torch.float32 else 1e-3  # of a norm, whose sums are in another order

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    # Step by step: all but the norms to the bit.
    images = torch.randint(0, 256, (2, 42, 42, 3), generator=generator).to(torch.uint8)
    table = noise(2, 3, 256)
    expected = torch.nn.functional.pad(theirs.patchify(images, table, 14), (0, 4))
    assert torch.equal(ours.patchify(images, table, 14), expected), "patches"
    for width, prefix, scale in ((48, 5, noise(48)), (64, 0, None)):
        norm = torch.nn.LayerNorm(width, eps=1e-6, dtype=dtype)
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
        begun = [
            one.embed(patches, positions, first, norm)
            for patches, positions, first in [(noise(2, 9, width), noise(9, width), noise(prefix, width))]
            for one in (ours, theirs)
        ]
        assert torch.equal(begun[0][0], begun[1][0]), "tokens"
        assert error(begun[0][1], begun[1][1]) < exact, "first norm"
        branch = noise(2, prefix + 9, width)
        tokens = [begun[0][0].clone(), begun[0][0].clone()]
        film = noise(2, width) if scale is None else None
        added = [one.add_norm(x, branch, scale, norm, film) for one, x in zip((ours, theirs), tokens, strict=True)]
        tokens = [total for total, _ in added]
        assert torch.equal(*tokens), "sum"
        assert error(*(normed for _, normed in added)) < exact, "norm"
        wide = [torch.zeros(2, 9, width + 80, dtype=dtype) for _ in range(2)]
        for one, x, out in zip((ours, theirs), tokens, wide, strict=True):
            one.add(x, branch, scale, out[..., 16 : 16 + width])
        assert torch.equal(*wide), "features"

    # All of it.
    model = make_model(dtype)
    found = error(VisionEncoder(model, ours)(images), model.embed_image(model.normalize(images)))
    assert found < (1e-5 if dtype == torch.float32 else 1e-2), found
    print("equal towers")
