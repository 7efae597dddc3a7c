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

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import Fields, Harmless, read_fields, read_json, read_statistics
from vla_ros_models.engine.shapes import TIMM_TOWERS, DecoderShape, TowerShape

LLAMA2_EMPTY_TOKEN = 29871
"""Llama-2's token for a lone space mark. OpenVLA was trained with this token between the prompt and the action."""

_HARMLESS = {
    "about the files and their software": "architectures auto_map dtype torch_dtype transformers_version "
    "return_dict id2label label2id _*",
    "sampling and limits, unused by greedy decoding of a fixed number of tokens": "do_sample temperature top_* "
    "typical_p min_length max_length max_new_tokens num_return_sequences num_beam_groups length_penalty "
    "diversity_penalty use_cache pad_token_id eos_token_id llm_max_length",
    "training": "initializer_range chunk_size_feed_forward pretraining_tp",
    "repeated in other entries": "vision_backbone_id llm_backbone_id hf_llm_id arch_specifier image_sizes "
    "timm_model_ids output_projector_states",
    "read with the statistics": "norm_stats",
    "read with the weights": "quantization_config",
}
"""Keys of ``config.json``, its ``text_config`` and ``generation_config.json`` that do not change the actions."""

NEUTRAL = {
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
}
"""Settings of greedy decoding with the only supported value."""

_EXAMPLE = TIMM_TOWERS["vit_large_patch14_reg4_dinov2.lvd142m"]
_EXPECTED = {tuple: "three numbers", int: "an int, at least 0", bool: "true or false"}


@dataclass(frozen=True)
class Architecture:
    """The network as described by ``config.json``."""

    towers: tuple[TowerShape, ...]  # one, or two whose features are concatenated (DINOv2 first, then SigLIP)
    llm: DecoderShape
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


def read_architecture(folder: Path, more: Harmless | None = None) -> Architecture:
    """Read and check ``folder/config.json``, and ``preprocessor_config.json`` if it exists.

    ``more`` are keys of the former that the caller reads. Raises CheckpointError if a file is missing or damaged,
    or describes a network or image processing that this package does not support.
    """
    path = folder / "config.json"
    architecture = parse_architecture(read_json(path), path, more)
    decoding, images = folder / "generation_config.json", folder / "preprocessor_config.json"
    if decoding.exists():
        _finish(read_fields(decoding), {"the prompt's first token": "bos_token_id"})
    if not images.exists():
        return architecture
    towers = architecture.towers
    own = normalization(read_fields(images), architecture.image_size, len(towers)) or [{}] * len(towers)
    changed = (replace(tower, **values) for tower, values in zip(towers, own, strict=True))
    return replace(architecture, towers=tuple(changed))


def _finish(fields: Fields, more: Harmless | None = None) -> None:
    for key, value in NEUTRAL.items():
        fields.expect(key, value, None)
    fields.finish({**_HARMLESS, **(more or {})})


def parse_architecture(content: Mapping[str, Any], path: Path, more: Harmless | None = None) -> Architecture:
    """Parse the content of the ``config.json`` at ``path``; raises the errors of :func:`read_architecture`."""
    config = Fields(content, path)
    if config.get("model_type") != "openvla":
        raise CheckpointError(f"{path}: model_type is {config.get('model_type')!r}, expected 'openvla'")
    config.expect("image_resize_strategy", "resize-naive")
    towers = _towers(config, path)
    llm = _llm(config, path)
    action_vocab = llm.vocab_size - config.whole("pad_to_multiple_of", 64, least=0)
    bins = config.whole("n_action_bins", 256)
    empty = config.whole("empty_token_id", LLAMA2_EMPTY_TOKEN, least=0)
    version = _prompt_version(config, path)
    _finish(config, more)
    if not 2 <= bins < action_vocab:
        raise CheckpointError(f"{path}: n_action_bins is {bins}; expected 2 to {action_vocab - 1} (the vocabulary)")
    if not 0 <= empty < action_vocab:
        raise CheckpointError(
            f"{path}: the token {empty} that closes a prompt is outside the vocabulary of {action_vocab}; "
            "a checkpoint with its own vocabulary must set empty_token_id"
        )
    return Architecture(towers, llm, action_vocab, bins, empty, version)


def _towers(config: Fields, path: Path) -> tuple[TowerShape, ...]:
    if any(layer is not None for layer in config.get("timm_override_act_layers") or []):
        raise CheckpointError(f"{path}: timm_override_act_layers is set; only the towers' own GELU is supported")
    if "vision_towers" in config:
        if not isinstance(config["vision_towers"], list):
            raise CheckpointError(
                f"{path}: vision_towers is {config['vision_towers']!r}, expected a list of objects"
            )
        towers = tuple(_own_tower(entry, path) for entry in config["vision_towers"])
        config.expect("image_sizes", [tower.image_size for tower in towers], None)
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


def _timm_towers(config: Fields, path: Path) -> tuple[TowerShape, ...]:
    ids = config.get("timm_model_ids") or []
    unknown = [name for name in ids if name not in TIMM_TOWERS]
    if unknown or not ids:
        raise CheckpointError(
            f"{path}: timm_model_ids is {ids}; known towers are {list(TIMM_TOWERS)}. Other towers must be "
            "described by an entry vision_towers (see vla_ros_models.openvla.architecture)"
        )
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
        kind = type(usual[name])
        if kind is tuple:
            good = isinstance(value, list) and len(value) == 3 and {type(one) for one in value} <= {int, float}
        else:
            good = type(value) is kind and value >= 0
        if not good:
            expected = _EXPECTED[kind]
            raise CheckpointError(f"{path}: vision_towers: {name}: expected {expected}, got {value!r}")
        values[name] = tuple(map(float, value)) if isinstance(value, list) else value
    tower = TowerShape(**values)
    if not np.isfinite([tower.mean, tower.std]).all() or min(tower.std) <= 0:
        raise CheckpointError(
            f"{path}: vision_towers: found mean {tower.mean} and std {tower.std}, expected finite numbers, and std "
            "above 0"
        )
    return tower


def _llm(config: Fields, path: Path) -> DecoderShape:
    text = Fields(config.get("text_config"), f"{path}: text_config")
    text.expect("model_type", "llama")
    text.expect("hidden_act", "silu")
    theta = 10000.0
    for rope in (text.object("rope_scaling"), text.object("rope_parameters")):  # old and new files
        rope.expect("rope_type", "default")
        rope.expect("type", "default")
        theta = rope.number("rope_theta", theta)
        rope.finish()
    # Absent entries have transformers' defaults for Llama: published files store little more than the vocabulary.
    hidden = text.whole("hidden_size", 4096)
    heads = text.whole("num_attention_heads", 32)
    if hidden % heads:
        raise CheckpointError(f"{path}: text_config: hidden_size {hidden} is not a multiple of {heads} heads")
    found = DecoderShape(
        vocab_size=text.whole("vocab_size", 32000),
        hidden_size=hidden,
        intermediate_size=text.whole("intermediate_size", 11008),
        layers=text.whole("num_hidden_layers", 32),
        heads=heads,
        kv_heads=text.whole("num_key_value_heads", heads),
        head_dim=text.whole("head_dim", hidden // heads),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        rope_theta=text.number("rope_theta", theta),
        max_positions=text.whole("max_position_embeddings", 2048),
        bos_token=text.whole("bos_token_id", 1, least=0),
    )
    _finish(text, {"inference has no dropout": "attention_dropout"})
    return found


def _prompt_version(config: Fields, path: Path) -> str:
    if stated := config.expect("prompt_version", None, "v0.1", "v0.2"):
        return str(stated)
    # v0.1 was trained from Vicuna and uses its chat prompt; all later checkpoints were trained from Llama-2.
    llm = str(config.get("llm_backbone_id") or "llama2")
    if not llm.startswith(("llama2", "vicuna")):
        raise CheckpointError(f"{path}: llm_backbone_id is {llm!r}, expected Llama-2 or Vicuna")
    backbone = f"{llm} {config.get('hf_llm_id', '')}".lower()
    return "v0.1" if "vicuna" in backbone or "v01" in path.parent.name.lower() else "v0.2"


_HARMLESS_IMAGES = {
    "which code reads the file": "image_processor_type feature_extractor_type processor_class auto_map _*",
    "replaced by the entries that begin with tvf_": "input_sizes interpolations means stds",
    "the fill of letterboxing, which is off": "tvf_letterbox_fill",
    "stored, but not used": "use_fused_vision_backbone",
}
"""Keys that do not change the images."""

_ADVICE = "this package cannot process images as in the checkpoint's training"


def normalization(config: Fields, side: int, towers: int) -> list[dict[str, Any]]:
    """Return each tower's ``mean`` and ``std``, if stated; raises CheckpointError for what is not supported."""
    config.advice = _ADVICE
    config.expect("image_resize_strategy", "resize-naive")
    config.expect("tvf_do_letterbox", False, None)
    size = [side, side]
    resizes = list(_entries(config, "tvf_resize_params", towers))
    for params in resizes:
        params.expect("size", size)
        params.expect("interpolation", 3, "bicubic")  # Pillow's number, or torchvision's name
        params.expect("antialias", True)
        params.expect("max_size", None)
        params.finish()
    if not resizes:
        config.expect("interpolations", ["bicubic"] * towers, None)
        config.expect("input_sizes", [[3, side, side]] * towers, None)
    for params in _entries(config, "tvf_crop_params", towers):
        params.expect("output_size", size, side)
        params.finish()
    stated = list(_entries(config, "tvf_normalize_params", towers))
    if not stated and config.get("means") is not None:
        pairs = zip(config["means"], config.get("stds") or (), strict=False)
        stated = [Fields({"mean": mean, "std": std}, f"{config.where}: means and stds") for mean, std in pairs]
        if len(stated) != towers:
            raise CheckpointError(f"{config.where}: means and stds: expected {towers} of each, one per tower")
    config.finish(_HARMLESS_IMAGES)
    return [_constants(params) for params in stated]


def _entries(config: Fields, key: str, count: int) -> Iterator[Fields]:
    """Yield each tower's entry in the list ``key``; nothing if the file has no such list."""
    value = config.get(key)
    if value is None:
        return
    if not isinstance(value, list) or len(value) != count or not all(isinstance(one, dict) for one in value):
        raise CheckpointError(
            f"{config.where}: {key}: found {value!r}, expected a list of {count} objects, one per tower"
        )
    yield from (Fields(one, f"{config.where}: {key}[{index}]", _ADVICE) for index, one in enumerate(value))


def _constants(params: Fields) -> dict[str, tuple[float, ...]]:
    mean, std = read_statistics(params, ("mean", "std"), str(params.where))
    if len(mean) != 3 or not std.all():
        raise CheckpointError(f"{params.where}: found mean {mean} and std {std}, expected three, and std above 0")
    params.finish({"the same values": "inplace"})
    return {"mean": tuple(map(float, mean)), "std": tuple(map(float, std))}
