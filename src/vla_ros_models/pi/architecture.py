"""Infers the sizes of pi0 and pi0.5 from the shapes of a checkpoint's tensors, without torch.

No file states the sizes reliably. No tensor shape determines the vision tower's number of heads: the published
tower (So400m, 1152 wide) has 16 heads. A checkpoint with another tower states the number in ``architecture.json``
(``{"vision": {"heads": 4}}``), in its own folder or in one of the two folders above.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import read_fields
from vla_ros_models.engine.shapes import TIMM_TOWERS, DecoderShape, GeometryShape, TowerShape

PI0 = "pi0"
PI05 = "pi05"
PROMPT_TOKENS: Mapping[str, int] = {PI0: 48, PI05: 200}
"""Tokens to which each model's training truncated the prompt."""

SO400M = replace(TIMM_TOWERS["vit_so400m_patch14_siglip_224"], used_blocks=27)
"""The published vision tower. Unlike in OpenVLA's towers, all blocks and the final norm run."""

SIGLIP = "paligemma_with_expert.paligemma.model.vision_tower.vision_model."
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
PREFIX = "paligemma_with_expert.paligemma.model.language_model."
EXPERT = "paligemma_with_expert.gemma_expert.model."
EMBEDDINGS = (f"{PREFIX}embed_tokens.weight", "paligemma_with_expert.paligemma.lm_head.weight")
"""Two names of one tied tensor. Files written with safetensors' ``save_model`` contain only the second."""


def gemma(width: int, layers: int, mlp_width: int, heads: int = 8, head_dim: int = 256) -> DecoderShape:
    """Return the description of a Gemma with one key head."""
    return DecoderShape(width, mlp_width, layers, heads, 1, head_dim, norm="rms_float32", activation="gelu")


GEMMA_2B = gemma(2048, 18, 16384)
GEMMA_300M = gemma(1024, 18, 4096)


@dataclass(frozen=True)
class PiArchitecture:
    """Sizes of one model."""

    model: str  # ``pi0`` or ``pi05``
    vision: TowerShape = SO400M  # the vision tower
    prefix: DecoderShape = GEMMA_2B  # Gemma over images and prompt
    # Gemma over state and actions; layer i attends to the keys and values of prefix layer i.
    expert: DecoderShape = GEMMA_300M
    vocabulary: int = 257152  # rows of the embedding
    action_dim: int = 32  # length to which state and actions are padded (32)
    horizon: int = 50  # H, actions in one chunk
    periods: tuple[float, float] = (0.004, 4.0)  # shortest and longest period of the flow time's embedding
    crossing: tuple[int, ...] = ()  # layers of the expert that attend to projections of the prefix's keys
    geometry: GeometryShape | None = None  # of the tokens for where the patches' surfaces are; None without them
    targets: bool = False  # whether a flow step depends on the time at which it ends: a distilled flow

    @property
    def has_state_token(self) -> bool:
        """False for pi0.5, which has the state in its prompt."""
        return self.model != PI05

    @property
    def image_tokens(self) -> int:
        """Tokens of one image."""
        return self.vision.patches


PUBLISHED: Mapping[str, PiArchitecture] = {PI0: PiArchitecture(PI0), PI05: PiArchitecture(PI05)}
"""The published sizes, with which benchmarks build a model without a checkpoint."""


def infer_architecture(shapes: Mapping[str, tuple[int, ...]], horizon: int, folder: Path) -> PiArchitecture:
    """Infer the sizes from the shapes of the stored tensors.

    The names in ``shapes`` lack LeRobot's leading ``model.``. ``horizon`` is H, which no tensor determines.
    ``folder`` may contain an ``architecture.json``. Raises CheckpointError if the tensors belong to neither model,
    or if sizes are missing or contradict each other.
    """
    kinds = [kind for kind, mark in ((PI0, "state_proj.weight"), (PI05, "time_mlp_in.weight")) if mark in shapes]
    if len(kinds) != 1:
        raise CheckpointError(
            f"{folder}: found {'both' if kinds else 'neither'} of state_proj.weight (pi0) and time_mlp_in.weight "
            "(pi0.5), expected exactly one; the files belong to another model or are damaged"
        )

    def shape(name: str, axes: int = 2) -> tuple[int, ...]:
        found = shapes.get(name, ())
        if len(found) != axes or not all(found):
            raise CheckpointError(
                f"{folder}: the tensor {name} is {list(found) if name in shapes else 'missing'}, expected {axes} "
                "axes; download the checkpoint again, or convert it (LeRobot's files from before October 2025)"
            )
        return found

    embedding = next((name for name in EMBEDDINGS if name in shapes), EMBEDDINGS[1])
    patch = shape(f"{SIGLIP}embeddings.patch_embedding.weight", axes=4)
    grid = math.isqrt(shape(f"{SIGLIP}embeddings.position_embedding.weight")[0])
    blocks = _depth(shapes, f"{SIGLIP}encoder.layers.")
    vision = TowerShape(
        width=patch[0],
        blocks=blocks,
        heads=_vision_heads(patch[0], folder),
        mlp_width=shape(f"{SIGLIP}encoder.layers.0.mlp.fc1.weight")[0],
        used_blocks=blocks,
        patch_size=patch[-1],
        image_size=grid * patch[-1],
    )

    def stack(stem: str, width: int) -> DecoderShape:
        head_dim = shape(f"{stem}layers.0.self_attn.k_proj.weight")[0]  # Gemma-2B and its expert have one kv head
        return gemma(
            width,
            _depth(shapes, f"{stem}layers."),
            shape(f"{stem}layers.0.mlp.gate_proj.weight")[0],
            heads=shape(f"{stem}layers.0.self_attn.q_proj.weight")[0] // head_dim,
            head_dim=head_dim,
        )

    width, action_dim = shape("action_in_proj.weight")
    prefix, expert = stack(PREFIX, shape(embedding)[1]), stack(EXPERT, width)
    if (prefix.layers, prefix.heads, prefix.head_dim) != (expert.layers, expert.heads, expert.head_dim):
        raise CheckpointError(
            f"{folder}: action expert {expert} and prefix {prefix} differ in layers, heads or head size, but the "
            "expert attends to the prefix's keys"
        )
    return PiArchitecture(kinds[0], vision, prefix, expert, shape(embedding)[0], action_dim, horizon)


def _vision_heads(width: int, folder: Path) -> int:
    if width == SO400M.width:
        return SO400M.heads
    for path in (place / "architecture.json" for place in (folder, *folder.resolve().parents[:2])):
        if path.exists():
            vision = read_fields(path).object("vision")
            heads = vision.whole("heads", None)
            if width % heads:
                raise CheckpointError(f"{path}: vision.heads is {heads!r}, expected a divisor of the width {width}")
            return heads
    raise CheckpointError(
        f"{folder}: the vision tower is {width} wide, unlike So400m's {SO400M.width}, and no tensor shape "
        'determines its number of heads; state it in architecture.json: {"vision": {"heads": N}}'
    )


def _depth(shapes: Mapping[str, tuple[int, ...]], stem: str) -> int:
    return len({name[len(stem) :].partition(".")[0] for name in shapes if name.startswith(stem)})
