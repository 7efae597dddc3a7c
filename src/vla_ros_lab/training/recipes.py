"""The published recipe of each family: what trains, and the optimiser, with its source.

Patterns are matched from the beginning of a tensor's name in the checkpoint, without LeRobot's leading ``model.``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from torch.nn import Parameter

from vla_ros.errors import ConfigError
from vla_ros_models.view import VIEW

Schedule = Callable[[int, int], float]
"""Takes a step, from 0, and the number of steps; returns a factor of the learning rate."""

Decays = Callable[[str, Parameter], bool]
"""Takes a parameter's name and itself; returns whether the weight decay acts on it."""

_ALL = r""
_NO_RANKS: Mapping[str, int] = MappingProxyType({})


def everything(name: str, parameter: Parameter) -> bool:
    return True


def constant(step: int, steps: int) -> float:
    return 1.0


def openpi_cosine(step: int, steps: int, warmup: int = 1000, decay: int = 30000, final: float = 0.1) -> float:
    """Rise from ``1 / (warmup + 1)``, then fall along a cosine that begins after the warm-up (openpi)."""
    if step < warmup:
        start = 1 / (warmup + 1)
        return start + (1 - start) * step / warmup
    share = min(1.0, (step - warmup) / max(1, decay - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share))


def lerobot_cosine(step: int, steps: int, warmup: int = 1000, decay: int = 30000, final: float = 0.1) -> float:
    """Like :func:`openpi_cosine`, but the cosine begins at step 0; shorter runs scale both (LeRobot)."""
    if steps < decay:
        warmup, decay = int(warmup * steps / decay), steps
    if step < warmup:
        start = 1 / (warmup + 1)
        return start + (1 - start) * step / warmup
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(step, decay) / decay))


def warm_cosine(step: int, steps: int, warmup: int, final: float) -> float:
    """Rise linearly over ``warmup`` steps, then fall along half a cosine to ``final`` at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share))


def groot_cosine(step: int, steps: int, share: float = 0.05) -> float:
    """Return the factor of the learning rate: a linear rise, then half a cosine to 0 (transformers' schedule).

    ``share`` is the part of ``steps`` in which it rises.
    """
    warmup = math.ceil(share * steps)
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def oft_steps(step: int, steps: int) -> float:
    """Fall to a tenth at step 100,000 (OpenVLA-_OFT)."""
    return 1.0 if step < 100_000 else 0.1


@dataclass(frozen=True)
class LoraRecipe:
    """An adapter."""

    targets: str  # pattern of the layers with an adapter
    rank: int
    alpha: float
    whole: str | None = None  # pattern of the parameters that train in full beside it
    gaussian: bool = False  # whether A starts normal with deviation 1 / rank, not uniform
    both: float = 0.0  # deviation of A and B at the start; 0: B starts at 0
    ranks: Mapping[str, int] = field(default_factory=lambda: _NO_RANKS)  # pattern to rank, which is also its alpha
    learning_rate: float = 0.0  # 0: that of the recipe


@dataclass(frozen=True)
class Recipe:
    """How a family is trained."""

    source: str
    learning_rate: float
    schedule: Schedule
    batch: int
    steps: int
    trained: str  # pattern of the parameters that ``--adapter full`` trains
    lora: LoraRecipe
    quantized: str = r"$."  # pattern of the layers that ``--adapter qlora`` quantises
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    decays: Decays = everything
    clip: float = 0.0  # largest norm of the gradient; 0: any
    augmentation: str = "none"  # one of :data:`vla_ros_lab.training.augmentation.AUGMENTATIONS`


_GEMMA = r"paligemma_with_expert\.(paligemma\.model\.language_model|gemma_expert\.model)\.layers\.\d+\."
_LINEARS = r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
_LEROBOT_HEADS = r"(state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out)"
_LLAMA = r"language_model\.model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"

_PI_OPENPI = Recipe(
    "openpi 15a9616, scripts/train_pytorch.py and src/openpi/training/config.py",
    2.5e-5, openpi_cosine, 32, 30_000, _ALL,
    LoraRecipe(
        _GEMMA + _LINEARS, 16, 16,
        whole=r"paligemma_with_expert\.paligemma\.model\.(vision_tower|multi_modal_projector)|"
        r"(state_proj|action_in_proj|action_out_proj|(action_)?time_mlp_(in|out))",
        both=0.01, ranks=MappingProxyType({r"paligemma_with_expert\.gemma_expert": 32}),
    ),
    _GEMMA.replace("|gemma_expert\\.model", "") + _LINEARS,
    weight_decay=1e-10, clip=1.0, augmentation="openpi",
)  # fmt: skip
_PI_LEROBOT = Recipe(
    "lerobot 0.6.1, policies/pi05/configuration_pi05.py",
    2.5e-5, lerobot_cosine, 8, 30_000, _ALL,
    LoraRecipe(
        rf"paligemma_with_expert\.gemma_expert\..*\.self_attn\.(q|v)_proj|{_LEROBOT_HEADS}", 16, 8,
        learning_rate=2.5e-4,
    ),
    _PI_OPENPI.quantized,
    clip=1.0,
)  # fmt: skip
_SMOLVLA = Recipe(
    "lerobot 0.6.1, policies/smolvla/configuration_smolvla.py",
    1e-4, lerobot_cosine, 64, 20_000, rf"vlm_with_expert\.lm_expert\.|{_LEROBOT_HEADS}",
    LoraRecipe(
        rf"vlm_with_expert\.lm_expert\..*\.(q|v)_proj|{_LEROBOT_HEADS}", 16, 8, learning_rate=1e-3
    ),
    rf"vlm_with_expert\.vlm\.model\.text_model\.layers\.\d+\.{_LINEARS}",
    weight_decay=1e-10, clip=10.0,
)  # fmt: skip
_GROOT = Recipe(
    "lerobot 0.6.1, policies/groot/configuration_groot.py; NVIDIA Isaac-GR00T",
    1e-4, groot_cosine, 32, 20_000, r"action_head\.",
    LoraRecipe(r"action_head\..*\.(to_q|to_v)", 32, 16),  # N1's: Isaac-GR00T 041c544, gr00t/utils/peft.py
    betas=(0.9, 0.999), weight_decay=1e-5, clip=1.0,
)  # fmt: skip
_OPENVLA = Recipe(
    "openvla c8f03f4, vla-scripts/finetune.py",
    5e-4, constant, 16, 50_000, _ALL,
    LoraRecipe(r"vision_backbone\.|projector\.|language_model\.", 32, 16, gaussian=True),
    _LLAMA,
    betas=(0.9, 0.999), augmentation="openvla",
)  # fmt: skip
_OFT = Recipe(
    "openvla-oft 213c5ff, vla-scripts/finetune.py",
    5e-4, oft_steps, 8, 150_000, _ALL,
    LoraRecipe(
        r"(?!.*\.(scale|shift)$)(vision_backbone\.|projector\.|language_model\.)", 32, 16, gaussian=True,
        whole=r"action_head\.|proprio_projector\.|geometry\.|vision_backbone\..*\.(scale|shift)\.",
    ),
    _LLAMA,
    betas=(0.9, 0.999), augmentation="openvla",
)  # fmt: skip

RECIPES: Mapping[tuple[str, str], Recipe] = {
    ("pi0", "openpi"): _PI_OPENPI,
    ("pi05", "openpi"): _PI_OPENPI,
    ("pi0", "lerobot"): _PI_LEROBOT,
    ("pi05", "lerobot"): _PI_LEROBOT,
    ("smolvla", ""): _SMOLVLA,
    ("groot", ""): _GROOT,
    ("openvla", ""): _OPENVLA,
    ("oft", "l1"): _OFT,
    ("oft", "none"): _OFT,
}
"""Recipes by :attr:`~vla_ros_models.training.Trainable.family` and ``layout``."""


def view_cosine(step: int, steps: int, usual: int, decay: int, final: float) -> float:
    """Rise for 500 steps, then fall until step ``decay``; runs of fewer than the ``usual`` steps scale both."""
    share = min(1.0, steps / usual)
    return openpi_cosine(step, steps, int(500 * share), int(decay * share), final)


def view_recipe(recipe: Recipe, adapter: str) -> Recipe:
    """Return a family's recipe with the published numbers of a viewpoint adapter, those of pi0.5."""
    usual, decay, final = (5000, 5000, 0.1) if adapter == VIEW else (1500, 2000, 0.01)
    schedule = partial(view_cosine, usual=usual, decay=decay, final=final)
    return replace(
        recipe, source="arXiv 2512.02902v2, table 7", learning_rate=5e-4, schedule=schedule, batch=32, steps=usual,
        betas=(0.9, 0.95), weight_decay=1e-10, clip=1.0,
    )  # fmt: skip


def recipe_of(family: str, layout: str) -> Recipe:
    if (family, layout) not in RECIPES:
        raise ConfigError(f"no recipe for {family} {layout}; there are {sorted({one for one, _ in RECIPES})}")
    return RECIPES[family, layout]
