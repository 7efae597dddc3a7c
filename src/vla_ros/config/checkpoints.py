"""Finds the policy that runs a checkpoint: what ``policy.name`` means if it is :data:`AUTO`, the default."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from vla_ros.config.options import AUTO
from vla_ros.config.registry import available, claims, module_of, options_class, refined
from vla_ros.errors import CheckpointError, ConfigError, MissingDependencyError, lfs_pointer
from vla_ros.files import read_json_value

SHIPPED = {"demo": "openvla", "demo-pi": "pi"}
"""Checkpoints that come with the package: maps ``policy.checkpoint`` to ``policy.name``."""

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
ADAPTER_FILE, LORA_FOLDER = "adapter_model.safetensors", "lora_adapter"
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
DISTILLED = "vla_ros_distilled"
"""``type`` of a checkpoint whose flow was distilled into few steps: other programs would run it with more."""
DISTILLED_FILES = ("distilled.safetensors", "distilled.safetensors.index.json")
"""Names of its weights, under which no other program looks for any."""
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
    path = next(_configs(folder, base), None)
    if path is None:
        raise CheckpointError(f"policy.checkpoint: {folder} has no {_CONFIG}{_other_layout(folder)}")
    config = _read(path)
    identifying = {key: config[key] for key in _TELLING if key in config}
    found = {name: claim for name in available() if (claim := claims(name, config)) > 0}
    best = [name for name, claim in found.items() if claim == max(found.values())]
    if not best:
        raise CheckpointError(
            f"policy.checkpoint: no policy runs {folder}; {path} has {identifying or sorted(config)[:8]}, expected "
            f"{_EXPECTED}. Set policy.name if one of {', '.join(available())} can"
        )
    if len(best) > 1:
        raise ConfigError(
            f"policy.name: {' and '.join(best)} can both run {folder} ({path} has {identifying}); set policy.name "
            "to one of them"
        )
    name = best[0]
    for place in _places(folder, base):
        name = refined(name, place)
    key, value = next(iter(identifying.items()))
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


def folder_of(name: str) -> Path:
    """Return a checkpoint's folder; those in :data:`SHIPPED` were trained on the simulated table."""
    if name not in SHIPPED:
        return Path(name).expanduser()
    package = find_spec(module_of(SHIPPED[name]))
    return Path(str(package and package.origin)).resolve().with_name("demo_checkpoint")


def adapter_folder(folder: Path) -> Path | None:
    """Return the folder of a PEFT adapter, ``lora_adapter`` (OpenVLA-OFT's) or ``folder``; None without."""
    places = (folder / LORA_FOLDER, folder)
    return next((place for place in places if (place / ADAPTER_FILE).is_file()), None)


def base_folder(folder: Path, base: str | Path = "") -> Path | None:
    """Return the folder of the base model into which a folder's adapter is merged; None if there is none to merge.

    ``base`` is ``policy.base``. If empty, the adapter's ``base_model_name_or_path`` counts if it is a folder with
    weights, relative to the adapter or, as in peft, to the working directory. Weights beside ``lora_adapter`` are
    merged already, as OpenVLA-OFT saves them. Raises CheckpointError if the base model is no folder here, or if
    nothing says whether weights beside an adapter are merged.
    """
    if base:
        chosen = folder_of(str(base))
        if not chosen.is_dir():
            raise CheckpointError(
                f"policy.base: {chosen} is no folder; name the folder of the adapter's base model"
            )
        return chosen
    adapter, own = adapter_folder(folder), _has_weights(folder)
    if adapter is None or (adapter != folder and own):
        return None
    name = base_name(adapter)
    places = (adapter / name, Path(name).expanduser()) if name else ()
    found = next((place for place in places if _has_weights(place)), None)
    if own and (found is None or found.resolve() != folder.resolve()):
        raise CheckpointError(
            f"{folder}: found weights and the adapter {ADAPTER_FILE} in one folder; if the weights are the base "
            f"model's, set policy.base to this folder, and if they are merged, move {ADAPTER_FILE} elsewhere"
        )
    if found is None:
        raise CheckpointError(f"{folder}: found {_adapter_alone(name)}")
    return found


def _adapter_alone(name: str) -> str:
    return (
        "a LoRA adapter; set policy.base (vla-ros convert: --base) to the folder of its base model: "
        f"adapter_config.json names {f'{name}, which is no folder with weights here' if name else 'none'}"
    )


def base_name(adapter: Path) -> str:
    """Return the base model that ``adapter_config.json`` names; "" if it names none."""
    path = adapter / _ADAPTER
    return str(_read(path).get("base_model_name_or_path") or "") if path.is_file() else ""


def config_folder(folder: Path, base: str | Path = "") -> Path:
    """Return the folder of ``config.json`` and what belongs to it: the checkpoint's, else its base model's."""
    return folder if (folder / _CONFIG).is_file() else base_folder(folder, base) or folder


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in WEIGHT_FILES)


def _places(folder: Path, base: str) -> Iterator[Path]:
    """Yield the folder and its base model's; what is wrong with the latter, the policy says, unless it is set."""
    yield folder
    with suppress(*() if base else (CheckpointError,)):
        if (found := base_folder(folder, base)) is not None:
            yield found


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
    teacher = config.get("teacher") if config.get("type") == DISTILLED else None
    return teacher if isinstance(teacher, dict) else config


def _other_layout(folder: Path) -> str:
    """Say what a folder without ``config.json`` is, and what to do."""
    nested = [folder / name for name in ("pretrained_model", "checkpoints/last/pretrained_model")]
    if here := next((place for place in nested if (place / _CONFIG).is_file()), None):
        return f": LeRobot's training output; set policy.checkpoint to {here}"
    if (adapter := (adapter_folder(folder) or folder) / _ADAPTER).is_file():
        if "peft_type" not in (found := _read(adapter)):
            return (
                f": its adapter_config.json has {sorted(found)[:8]} and no peft_type, so it is no adapter of peft's"
            )
        return f": {_adapter_alone(base_name(adapter.parent))}"
    if (folder / "params").is_dir():
        return ": openpi's JAX format (params/); convert it with openpi's examples/convert_jax_model_to_pytorch.py"
    if (folder / "assets").is_dir():
        return (
            ": openpi's training output; copy its converter's config.json (action_dim, action_horizon, "
            "paligemma_variant, action_expert_variant, precision) there"
        )
    inside = sorted(path.name for path in folder.iterdir())
    return f", which names the policy; found {', '.join(inside[:8]) or 'nothing'}. Download the whole folder again"
