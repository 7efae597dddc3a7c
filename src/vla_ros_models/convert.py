"""Writes a checkpoint of any family as one safetensors file, with adapters merged and weights dequantised.

Merged and dequantised weights are stored in the type in which they are computed, float32 for merged ones, unless
``--dtype`` says otherwise; others keep their type. Tokenizer, statistics, processors and configuration are copied.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from vla_ros.config.checkpoints import base_folder, config_folder
from vla_ros.errors import ConfigError
from vla_ros.files import check_parent

_KINDS = (".json", ".model", ".txt", ".jinja", ".safetensors")
_WEIGHTS = ("model*.safetensors*", "distilled*.safetensors*", "teacher.safetensors", "*.index.json")
_NOT_COPIED = (*_WEIGHTS, "adapter_*", "train_config.json")
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must be empty or missing")
    parser.add_argument("--base", default="", help="base model into which the checkpoint's adapter is merged")
    parser.add_argument("--teacher", action="store_true", help="write the teacher of a distilled checkpoint")
    text = "add geometric tokens, to be trained, for an image whose points the robot will have; may be repeated; "
    text += "OpenVLA-OFT's images are 0 (the main one), 1 and 2"
    parser.add_argument("--points", action="append", default=[], metavar="IMAGE=KEY", help=text)
    parser.add_argument("--dtype", choices=_DTYPES, help="type of all weights; left out, as they are stored")


def run(arguments: argparse.Namespace) -> int:
    dtype = arguments.dtype or ""
    if wrong := [one for one in arguments.points if not all(one.partition("="))]:
        raise ConfigError(f"--points: found {wrong[0]!r}, expected IMAGE=KEY, as observation.images.front=points")
    points = dict(one.split("=", 1) for one in arguments.points)
    count, size = convert(arguments.folder, arguments.output, arguments.base, dtype, arguments.teacher, points)
    print(f"wrote {count} tensors, {size / 1e9:.2f} GB, to {arguments.output}")
    return 0


def convert(
    folder: Path,
    output: Path,
    base: str | Path = "",
    dtype: str = "",
    teacher: bool = False,
    points: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, int]:
    """Convert ``folder`` to ``output``, empty or missing; return the number of tensors and their bytes.

    ``base`` is ``policy.base``. With ``teacher``, the result is the checkpoint that was distilled into ``folder``.
    ``points`` are as for :func:`~vla_ros_models.geometry.new_tokens`.
    Needs the memory of three copies of the largest tensor in float32. Raises the errors of
    :func:`~vla_ros_models.adapters.read_merged`, and ConfigError if ``output`` cannot be written.
    """
    from vla_ros_models.adapters import read_merged
    from vla_ros_models.checkpoint_files import checkpoint_folder, from_files, read_fields
    from vla_ros_models.distilled import teachers_tensors, undistilled
    from vla_ros_models.geometry import GEOMETRY, new_tokens
    from vla_ros_models.weights import manifest_of, with_loaded, write_weights

    folder = checkpoint_folder(str(folder))
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output {output}: not empty; name another folder, so that nothing is overwritten")
    check_parent("--output", output)
    model = base_folder(folder, base)
    fields, steps = undistilled(read_fields(config_folder(folder, base) / "config.json"))
    config = dict(fields)
    if teacher != bool(steps):
        what = f"was distilled into {steps} flow steps: add" if steps else "was not distilled: leave out"
        raise ConfigError(f"{folder}: {what} --teacher, which restores what a checkpoint was distilled from")
    if config.get("model_type") == "openvla":
        from vla_ros_models.oft.loading import read_weights
        from vla_ros_models.openvla.architecture import read_architecture
        from vla_ros_models.openvla.loading import never_run

        architecture = read_architecture(model or folder, {"of OpenVLA-OFT": GEOMETRY})
        found = read_weights(folder, base)
        stored = {name: one for name, one in found.manifest.items() if not never_run(name, architecture)}
        produce = found.produce()
    else:
        stored = teachers_tensors(folder) if teacher else read_merged(folder, base)
        produce = from_files(stored)
    if points:
        added = new_tokens(config, stored, points)
        produce, config[GEOMETRY] = with_loaded(produce, added), {"points": dict(points)}
        stored = {**stored, **manifest_of(added, output)}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for place in (folder,) if model is None else (folder, model):
            _copy(place, output)
        config.pop("quantization_config", None)
        plain = {key: False if key == "use_peft" else value for key, value in config.items()}
        (output / "config.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        return write_weights(output, stored, produce, _DTYPES.get(dtype, ""))
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror or error}; the folder is incomplete") from error


def _copy(folder: Path, output: Path) -> None:
    """Copy what belongs to a checkpoint besides its weights; files that ``output`` has stay."""
    processors = (output / "policy_preprocessor.json").exists()  # with the files that they name
    for path in _files(folder):
        copy = output / path.relative_to(folder)
        if not copy.exists() and not (processors and path.name.startswith("policy_")):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint and of its folders, but no weights and no folder that has weights."""
    if any(folder.glob("adapter_model.*")) and folder.name == "lora_adapter":
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in ("run", "evidence"):  # of a fine-tuning
            continue
        if path.is_dir() and not any(path.glob("*model*.safetensors")):
            yield from _files(path)
        elif path.suffix in _KINDS and path.is_file() and not any(map(path.match, _NOT_COPIED)):
            yield path
