"""Network sizes, which policies read from a checkpoint's ``config.json``. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)

MOST_GPUS = 8
"""GPUs of one host over which a decoder is split."""


@dataclass(frozen=True)
class DecoderShape:
    """Description of a transformer decoder: sizes, and which variant of each operation its layers use."""

    hidden_size: int  # features per token
    intermediate_size: int  # hidden features of the MLP
    layers: int
    heads: int  # query heads
    kv_heads: int  # key and value heads
    head_dim: int  # features per head; not always ``hidden_size / heads``
    rms_norm_eps: float = 1e-6  # epsilon of every norm
    rope_theta: float = 10000.0  # base of the rotary embedding
    # ``rms``: as in Llama, Qwen and SmolLM, rounded to the model's type before it is multiplied by the weight.
    # ``rms_float32``: as in Gemma, rounded once, after scale and shift. ``layer``: a layer norm, rounded once.
    norm: str = "rms"
    activation: str = "silu"  # of the MLP: ``silu``, or ``gelu``, which is the tanh form
    gated: bool = True  # whether the activation of one projection is multiplied by a second projection
    rotary: bool = True  # whether queries and keys get a rotary embedding
    vocab_size: int = 0  # rows of embedding and head, with padding; 0 without them
    max_positions: int = 0  # longest sequence in tokens; 0 if the rotary tables determine it
    bos_token: int = 1  # first token of every sequence


@dataclass(frozen=True)
class TowerShape:
    """Sizes of one vision transformer."""

    width: int  # features per token
    blocks: int  # transformer blocks that the checkpoint stores
    heads: int  # attention heads
    mlp_width: int  # hidden features of each block's MLP
    # Blocks that run; features are the output of the last one that runs, without a final norm. OpenVLA takes the
    # output of the second-to-last block, so ``blocks - 1`` run.
    used_blocks: int
    patch_size: int = 14  # side of a patch in pixels
    image_size: int = 224  # side of the square input in pixels
    class_token: bool = False  # True if a class token precedes the patches
    register_tokens: int = 0  # number of register tokens between class token and patches
    layer_scale: bool = False  # True if each residual branch is multiplied by a learned vector
    # Subtracted from each RGB channel in [0, 1]; the checkpoint's ``preprocessor_config.json`` may override it.
    mean: tuple[float, float, float] = HALF
    std: tuple[float, float, float] = HALF  # each channel is then divided by it

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the patches; they are dropped from the features."""
        return int(self.class_token) + self.register_tokens

    @property
    def patches(self) -> int:
        """Number of output tokens."""
        return (self.image_size // self.patch_size) ** 2


TIMM_TOWERS: Mapping[str, TowerShape] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerShape(
        width=1024,
        blocks=24,
        heads=16,
        mlp_width=4096,
        used_blocks=23,
        class_token=True,
        register_tokens=4,
        layer_scale=True,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    "vit_so400m_patch14_siglip_224": TowerShape(width=1152, blocks=27, heads=16, mlp_width=4304, used_blocks=26),
}
"""The towers of the published checkpoints, by their timm identifier."""


@dataclass(frozen=True)
class GeometryShape:
    """Sizes of the network that turns positions into tokens."""

    bands: int = 4  # sines and cosines of each coordinate, each of half the wavelength of the one before
    longest: float = 4.0  # longest wavelength, metres
    hidden: int = 256  # numbers between the two layers
