"""Reads the network's sizes from a checkpoint's ``config.json``, without torch.

Published files name their vision towers by timm identifiers; this package knows the shapes of OpenVLA's two towers.
A checkpoint with other towers or another vocabulary has these entries, which published files lack:

``vision_towers``
    A list with one object per tower (first ``featurizer``, then ``fused_featurizer``) whose keys are the fields
    of :class:`TowerShape`. It replaces ``timm_model_ids``.
``empty_token_id``
    The token that closes every prompt: 29871 in Llama-2's vocabulary, another token in smaller vocabularies.
``prompt_version``
    ``v0.1`` or ``v0.2``, for checkpoints whose prompt version cannot be told from their language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from vla_ros.engine.shapes import TIMM_TOWERS, LlmShape, TowerShape
from vla_ros.errors import CheckpointError
from vla_ros.policies.base import policy_of
from vla_ros.policies.checkpoint_files import read_json, whole
from vla_ros.policies.openvla.preprocessor_config import normalization

LLAMA2_EMPTY_TOKEN = 29871
"""Llama-2's token for a lone space mark. OpenVLA was trained with this token between the prompt and the action."""

PROMPT_VERSIONS = ("v0.1", "v0.2")


_EXAMPLE = TIMM_TOWERS["vit_large_patch14_reg4_dinov2.lvd142m"]


@dataclass(frozen=True)
class Architecture:
    """The network as described by ``config.json``."""

    # One vision tower, or two whose features are concatenated (DINOv2 first, then SigLIP).
    towers: tuple[TowerShape, ...]
    llm: LlmShape  # the language model
    action_vocab_size: int  # vocabulary without padding (32000): action tokens count down from its end
    action_bins: int  # bin edges of one action dimension (256, thus 255 centres)
    empty_token: int  # token that closes the prompt
    prompt_version: str  # ``v0.1`` or ``v0.2``

    @property
    def vision_width(self) -> int:
        """Features per patch after concatenation (2176)."""
        return sum(tower.width for tower in self.towers)

    @property
    def patches(self) -> int:
        """Patch tokens in the language model's sequence (256)."""
        return self.towers[0].patches

    @property
    def image_size(self) -> int:
        """Side of the square input image in pixels (224)."""
        return self.towers[0].image_size


def read_architecture(folder: Path) -> Architecture:
    """Read and check ``folder/config.json``, and ``preprocessor_config.json`` if it exists.

    Raises CheckpointError if a file is missing or damaged, or describes a network or image processing that this
    package does not support.
    """
    path, adapter = folder / "config.json", folder / "adapter_config.json"
    if adapter.exists() and not path.exists():
        base = read_json(adapter).get("base_model_name_or_path") or "not named there"
        raise CheckpointError(
            f"{folder}: found a LoRA adapter (adapter_config.json) without its base model ({base}). "
            "Set policy.base to the base model's folder; the adapter is then merged while the weights are loaded"
        )
    architecture = parse_architecture(read_json(path), path, folder.name)
    images = folder / "preprocessor_config.json"
    if not images.exists():
        return architecture
    towers = architecture.towers
    own = normalization(read_json(images), images, architecture.image_size, len(towers)) or [{}] * len(towers)
    changed = (replace(tower, **values) for tower, values in zip(towers, own, strict=True))
    return replace(architecture, towers=tuple(changed))


def parse_architecture(config: Mapping[str, Any], path: Path, folder_name: str = "") -> Architecture:
    """Parse the content of a ``config.json``; raises the errors of :func:`read_architecture`.

    Messages name ``path``. The checkpoint's ``folder_name`` may contain the prompt version.
    """
    if config.get("model_type") != "openvla":
        other = policy_of(path.parent)
        hint = "" if other == "openvla" else f"; a checkpoint of policy.name:={other}"
        raise CheckpointError(f"{path}: model_type is {config.get('model_type')!r}, expected 'openvla'{hint}")
    strategy = config.get("image_resize_strategy", "resize-naive")
    if strategy != "resize-naive":
        raise CheckpointError(f"{path}: image_resize_strategy is {strategy!r}; only 'resize-naive' is supported")
    towers = _towers(config, path)
    llm = _llm(config, path)
    action_vocab = llm.vocab_size - whole(config, "pad_to_multiple_of", 64, path, least=0)
    bins = whole(config, "n_action_bins", 256, path)
    empty = whole(config, "empty_token_id", LLAMA2_EMPTY_TOKEN, path, least=0)
    if not 2 <= bins < action_vocab:
        raise CheckpointError(f"{path}: n_action_bins is {bins}; expected 2 to {action_vocab - 1} (the vocabulary)")
    if not 0 <= empty < action_vocab:
        raise CheckpointError(
            f"{path}: the token {empty} that closes a prompt is outside the vocabulary of {action_vocab}; "
            "a checkpoint with its own vocabulary must set empty_token_id"
        )
    return Architecture(
        towers=towers,
        llm=llm,
        action_vocab_size=action_vocab,
        action_bins=bins,
        empty_token=empty,
        prompt_version=_prompt_version(config, path, folder_name),
    )


def _towers(config: Mapping[str, Any], path: Path) -> tuple[TowerShape, ...]:
    if "vision_towers" in config:
        towers = tuple(_own_tower(entry, path) for entry in config["vision_towers"])
    else:
        towers = _timm_towers(config, path)
    expected = 2 if config.get("use_fused_vision_backbone") else 1
    if len(towers) != expected:
        raise CheckpointError(
            f"{path}: {len(towers)} vision towers, but use_fused_vision_backbone="
            f"{config.get('use_fused_vision_backbone')!r} requires {expected}"
        )
    for tower in towers:
        if tower.image_size % tower.patch_size or tower.width % tower.heads:
            raise CheckpointError(f"{path}: vision tower {tower}: image/patch and width/heads must divide evenly")
        if not 1 <= tower.used_blocks <= tower.blocks:
            raise CheckpointError(f"{path}: vision tower: used_blocks must be 1 to {tower.blocks}")
    if len({(tower.patches, tower.image_size) for tower in towers}) != 1:
        raise CheckpointError(f"{path}: the vision towers differ in image size or number of patches")
    return towers


def _timm_towers(config: Mapping[str, Any], path: Path) -> tuple[TowerShape, ...]:
    ids = config.get("timm_model_ids") or []
    unknown = [name for name in ids if name not in TIMM_TOWERS]
    if unknown or not ids:
        raise CheckpointError(
            f"{path}: timm_model_ids is {ids}; known towers are {list(TIMM_TOWERS)}. Other towers must be "
            "described by an entry vision_towers (see vla_ros.policies.openvla.architecture)"
        )
    if any(layer is not None for layer in config.get("timm_override_act_layers") or []):
        raise CheckpointError(f"{path}: timm_override_act_layers is set; only the towers' own GELU is supported")
    sizes = config.get("image_sizes") or [TIMM_TOWERS[name].image_size for name in ids]
    if len(sizes) != len(ids):
        raise CheckpointError(f"{path}: image_sizes has {len(sizes)} entries for {len(ids)} towers")
    return tuple(replace(TIMM_TOWERS[name], image_size=int(size)) for name, size in zip(ids, sizes, strict=True))


def _own_tower(entry: Any, path: Path) -> TowerShape:
    usual, required = asdict(_EXAMPLE), {one.name for one in fields(TowerShape) if one.default is MISSING}
    if not isinstance(entry, dict) or not required <= entry.keys() <= usual.keys():
        raise CheckpointError(
            f"{path}: an entry of vision_towers is {entry!r}, expected an object with the keys {sorted(required)} "
            f"and optionally {sorted(usual.keys() - required)}"
        )
    values: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(usual[name], tuple):
            good = isinstance(value, list) and len(value) == 3 and {type(one) for one in value} <= {int, float}
        else:
            good = type(value) is type(usual[name]) and value >= 0
        if not good:
            raise CheckpointError(
                f"{path}: vision_towers: {name} is {value!r}, expected something like {usual[name]!r}"
            )
        values[name] = tuple(map(float, value)) if isinstance(value, list) else value
    return TowerShape(**values)


def _llm(config: Mapping[str, Any], path: Path) -> LlmShape:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"{path}: text_config is {text!r}, expected an object")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    unsupported = {
        "model_type": text.get("model_type", "llama") != "llama",
        "hidden_act": text.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(text.get("attention_bias")),
        "mlp_bias": bool(text.get("mlp_bias")),
        "tie_word_embeddings": bool(text.get("tie_word_embeddings")),
        "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
    }
    for name, bad in unsupported.items():
        if bad:
            raise CheckpointError(f"{path}: text_config.{name} is {text.get(name, rope)!r}, which is not supported")
    # Absent entries have transformers' defaults for Llama: published files store little more than the vocabulary.
    hidden = whole(text, "hidden_size", 4096, path)
    heads = whole(text, "num_attention_heads", 32, path)
    if hidden % heads:
        raise CheckpointError(f"{path}: text_config: hidden_size {hidden} is not a multiple of {heads} heads")
    return LlmShape(
        vocab_size=whole(text, "vocab_size", 32000, path),
        hidden_size=hidden,
        intermediate_size=whole(text, "intermediate_size", 11008, path),
        layers=whole(text, "num_hidden_layers", 32, path),
        heads=heads,
        kv_heads=whole(text, "num_key_value_heads", heads, path),
        head_dim=whole(text, "head_dim", hidden // heads, path),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope_theta=float(text.get("rope_theta", rope.get("rope_theta", 10000.0))),
        max_positions=whole(text, "max_position_embeddings", 2048, path),
        bos_token=whole(text, "bos_token_id", 1, path, least=0),
    )


def _prompt_version(config: Mapping[str, Any], path: Path, folder_name: str) -> str:
    stated = config.get("prompt_version")
    if stated is not None:
        if stated not in PROMPT_VERSIONS:
            raise CheckpointError(f"{path}: prompt_version is {stated!r}, expected one of {PROMPT_VERSIONS}")
        return str(stated)
    # v0.1 was trained from Vicuna and uses its chat prompt; all later checkpoints were trained from Llama-2.
    backbone = f"{config.get('llm_backbone_id', '')} {config.get('hf_llm_id', '')}".lower()
    return "v0.1" if "vicuna" in backbone or "v01" in folder_name.lower() else "v0.2"
