"""Finds the policy that runs a checkpoint: what ``policy.name`` means if it is :data:`AUTO`, the default."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vla_ros.config.options import AUTO
from vla_ros.config.registry import available, claims, options_class, refined
from vla_ros.errors import CheckpointError, ConfigError, MissingDependencyError, lfs_pointer
from vla_ros.files import read_json_value

SHIPPED = {"demo": "openvla", "demo-pi": "pi"}
"""Checkpoints that come with the package: maps ``policy.checkpoint`` to ``policy.name``."""

_CONFIG = "config.json"
_TELLING = ("type", "model_type", "architectures", "action_horizon")
_EXPECTED = (
    "'type' with 'input_features' (LeRobot), 'model_type' openvla or Gr00tN1d7, or 'action_horizon' (openpi's "
    "PyTorch export)"
)


class Identified(NamedTuple):
    """The policy that claims a checkpoint."""

    name: str
    why: str  # what says so


def identify(checkpoint: str, base: str = "") -> Identified:
    """Return the policy that claims a checkpoint, by its ``config.json``, or that of ``base`` for an adapter.

    Raises CheckpointError if the folder is missing or no policy claims it, ConfigError if several claim it alike.
    """
    if checkpoint in SHIPPED:
        return Identified(SHIPPED[checkpoint], "it comes with the package")
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        raise CheckpointError(no_folder(folder))
    path = next((place / _CONFIG for place in _places(folder, base) if (place / _CONFIG).is_file()), None)
    if path is None:
        raise CheckpointError(f"policy.checkpoint: {folder} has no {_CONFIG}{_other_layout(folder)}")
    config = _read(path)
    said = {key: config[key] for key in _TELLING if key in config}
    found = {name: claim for name in available() if (claim := claims(name, config)) > 0}
    best = [name for name, claim in found.items() if claim == max(found.values())]
    if not best:
        raise CheckpointError(
            f"policy.checkpoint: no policy runs {folder}; {path} has {said or sorted(config)[:8]}, expected "
            f"{_EXPECTED}. Set policy.name if one of {', '.join(available())} can"
        )
    if len(best) > 1:
        raise ConfigError(
            f"policy.name: {' and '.join(best)} can both run {folder} ({path} has {said}); set policy.name "
            "to one of them"
        )
    name = refined(best[0], folder)
    key, value = next(iter(said.items()))
    return Identified(name, f"{path} has {key} {value!r}")


def chosen(name: str, checkpoint: str, base: str = "") -> str:
    """Return the policy that ``policy.name`` means for a checkpoint: for :data:`AUTO`, the one that claims it.

    Raises ConfigError for a policy that cannot run the checkpoint while another can.
    """
    if name == AUTO:
        return identify(checkpoint, base).name if checkpoint else AUTO
    if not checkpoint or name not in available() or checkpoint_options_of(name) is None:
        return name
    try:
        right, why = identify(checkpoint, base)
    except (CheckpointError, ConfigError):
        return name  # the policy says what is wrong, as it knows its own files
    config = {} if checkpoint in SHIPPED else _read(next(_configs(Path(checkpoint).expanduser(), base)))
    own = name == SHIPPED[checkpoint] if checkpoint in SHIPPED else claims(name, config)
    if own == 0:
        raise ConfigError(
            f"policy.name: {name} cannot run {checkpoint}, a checkpoint of {right} ({why}); set "
            f"policy.name:={right} or leave it out"
        )
    return name


def runs_no_checkpoint(name: str, checkpoint: Any) -> str:
    """Describe a ``policy.checkpoint`` of a policy without that option, and say which policy runs it."""
    owners = [one for one in available() if checkpoint_options_of(one) is not None]
    try:
        right, why = identify(str(checkpoint))
        advice = f"{checkpoint} is a checkpoint of {right} ({why}): set policy.name:={right}, or auto"
    except (CheckpointError, ConfigError):
        advice = f"set policy.name to auto or one of {', '.join(owners)}, or leave the checkpoint out"
    return f"policy.checkpoint: the policy '{name}' (policy.name) runs no checkpoint; {advice}"


def no_checkpoint() -> str:
    """Describe :data:`AUTO` without a checkpoint."""
    others = [name for name in available() if checkpoint_options_of(name) is None]
    return (
        "policy.name: found auto without policy.checkpoint, whose config.json would name the policy; set "
        f"policy.checkpoint to a folder, or policy.name to one of {', '.join(others)}, which need none"
    )


def no_folder(folder: Path) -> str:
    return (
        f"policy.checkpoint: {folder} is neither a folder nor one of {', '.join(SHIPPED)}. Nothing is downloaded "
        "at run time: fetch the checkpoint first (for example: hf download openvla/openvla-7b --local-dir DIR)"
    )


def checkpoint_options_of(name: str) -> Any:
    """Return the option ``checkpoint`` of a policy; None if it has none or its library is missing."""
    try:
        return options_class(name).__dataclass_fields__.get("checkpoint")
    except (ConfigError, MissingDependencyError):
        return None


def _places(folder: Path, base: str) -> Iterator[Path]:
    yield folder
    if base:
        yield Path(base).expanduser()


def _configs(folder: Path, base: str) -> Iterator[Path]:
    yield from (place / _CONFIG for place in _places(folder, base) if (place / _CONFIG).is_file())


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = read_json_value(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        advice = lfs_pointer(path) or "download the file again"
        raise CheckpointError(f"{path}: not readable as JSON ({why}); {advice}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: found {type(config).__name__}, expected a JSON object")
    return config


def _other_layout(folder: Path) -> str:
    """Say what a folder without ``config.json`` is, and what to do."""
    nested = [folder / name for name in ("pretrained_model", "checkpoints/last/pretrained_model")]
    if here := next((place for place in nested if (place / _CONFIG).is_file()), None):
        return f": LeRobot's training output; set policy.checkpoint to {here}"
    if (adapter := folder / "adapter_config.json").is_file():
        if "peft_type" not in (found := _read(adapter)):
            return (
                f": its adapter_config.json has {sorted(found)[:8]} and no peft_type, so it is no adapter of peft's"
            )
        return ": a LoRA adapter; set policy.base to the folder of the model that its adapter_config.json names"
    if (folder / "params").is_dir():
        return ": openpi's JAX format (params/); convert it with openpi's examples/convert_jax_model_to_pytorch.py"
    if (folder / "assets").is_dir():
        return (
            ": openpi's training output; copy its converter's config.json (action_dim, action_horizon, "
            "paligemma_variant, action_expert_variant, precision) there"
        )
    inside = sorted(path.name for path in folder.iterdir())
    return f", which names the policy; found {', '.join(inside[:8]) or 'nothing'}. Download the whole folder again"
