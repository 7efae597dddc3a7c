"""Writes an OpenVLA or OpenVLA-OFT checkpoint as safetensors only, with adapters merged.

Merged weights are stored in float32; others keep their type. Tokenizer, statistics and configuration are copied.
"""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path

from vla_ros.errors import ConfigError
from vla_ros.files import check_parent

SHARD_BYTES = 4_000_000_000
_FILES = ("config.json", "generation_config.json", "preprocessor_config.json", "dataset_statistics.json")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must be empty or missing")
    parser.add_argument("--base", type=Path, help="base model into which the checkpoint's LoRA adapter is merged")


def run(arguments: argparse.Namespace) -> int:
    count, size = convert(arguments.folder, arguments.output, arguments.base)
    print(f"wrote {count} tensors, {size / 1e9:.2f} GB, to {arguments.output}")
    return 0


def convert(folder: Path, output: Path, base: Path | None = None) -> tuple[int, int]:
    """Convert ``folder`` to ``output``, empty or missing; return the number of tensors and their bytes."""
    from vla_ros_models.checkpoint_files import checkpoint_folder
    from vla_ros_models.oft.loading import read_weights
    from vla_ros_models.openvla.architecture import read_architecture
    from vla_ros_models.openvla.loading import never_run
    from vla_ros_models.weights import write_shards

    checkpoint_folder(str(folder))
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output {output}: not empty; name another folder, so that nothing is overwritten")
    check_parent("--output", output)
    architecture = read_architecture(base or folder)
    weights = read_weights(folder, base)
    output.mkdir(parents=True, exist_ok=True)
    for name in (*_FILES, *_TOKENIZER):
        for place in (folder, base):
            if place is not None and (place / name).exists():
                shutil.copyfile(place / name, output / name)
                break
    sizes = {name: _bytes(stored.shape, stored.dtype) for name, stored in weights.manifest.items()}
    names = sorted(name for name in sizes if not never_run(name, architecture))
    return write_shards(output, list(_shards({name: sizes[name] for name in names})), weights.produce())


def _shards(sizes: dict[str, int]) -> Iterator[list[str]]:
    part: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if part and filled + size > SHARD_BYTES:
            yield part
            part, filled = [], 0
        part.append(name)
        filled += size
    if part:
        yield part


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    from math import prod

    return prod(shape) * {"F64": 8, "F32": 4}.get(dtype, 2)
