"""Writes a checkpoint in the published layout: config.json, safetensors shards with index, tokenizer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from tools.checkpoints.vocabulary import write_tokenizer
from vla_ros_models.checkpoint_files import INDEX
from vla_ros_models.openvla.architecture import Architecture
from vla_ros_models.weights import write_shards

Statistics = Mapping[str, Mapping[str, Mapping[str, Sequence[float] | Sequence[bool]]]]
"""Maps a dataset to ``{"action": {"q01": [...], "q99": [...], "mask": [...]}}``."""


def config_json(architecture: Architecture, statistics: Statistics, dtype: str) -> dict[str, Any]:
    """Return a ``config.json`` that :func:`~.architecture.read_architecture` reads back unchanged."""
    llm = architecture.llm
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "use_fused_vision_backbone": len(architecture.towers) > 1,
        "vision_towers": [asdict(tower) for tower in architecture.towers],
        "image_sizes": [tower.image_size for tower in architecture.towers],
        "image_resize_strategy": "resize-naive",
        "prompt_version": architecture.prompt_version,
        "empty_token_id": architecture.empty_token,
        "n_action_bins": architecture.action_bins,
        "pad_token_id": architecture.action_vocab_size,
        "pad_to_multiple_of": llm.vocab_size - architecture.action_vocab_size,
        "norm_stats": statistics,
        "text_config": {
            "model_type": "llama",
            "vocab_size": llm.vocab_size,
            "hidden_size": llm.hidden_size,
            "intermediate_size": llm.intermediate_size,
            "num_hidden_layers": llm.layers,
            "num_attention_heads": llm.heads,
            "num_key_value_heads": llm.kv_heads,
            "head_dim": llm.head_dim,
            "rms_norm_eps": llm.rms_norm_eps,
            "rope_theta": llm.rope_theta,
            "max_position_embeddings": llm.max_positions,
            "bos_token_id": llm.bos_token,
            "pad_token_id": architecture.action_vocab_size,
            "hidden_act": "silu",
        },
        "torch_dtype": dtype,
    }


def write_checkpoint(
    folder: Path,
    architecture: Architecture,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    token_ids: dict[str, int],
    shards: int = 1,
) -> None:
    """Write a complete OpenVLA checkpoint to ``folder``, replacing an earlier checkpoint.

    ``weights`` have the names of the model's parameters and a single data type; ``token_ids`` come from
    :func:`~.vocabulary.word_ids`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*folder.glob("model*.safetensors"), folder / INDEX):
        stale.unlink(missing_ok=True)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    _write_json(folder / "config.json", config_json(architecture, statistics, dtype))
    _write_json(folder / "dataset_statistics.json", statistics)
    write_tokenizer(folder, token_ids)

    names = sorted(weights)
    count = max(1, min(shards, len(names)))
    parts = [names[number * len(names) // count : (number + 1) * len(names) // count] for number in range(count)]
    write_shards(folder, parts, lambda part: ((name, weights[name]) for name in part))


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
