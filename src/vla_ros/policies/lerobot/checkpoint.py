"""LeRobot's checkpoints, loaded by its own code and offline; what is missing is named before it is looked for.

Calls read from LeRobot 0.6.1: ``PreTrainedConfig.from_pretrained``, ``get_policy_class``,
``make_pre_post_processors``, ``predict_action_chunk``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_ros.errors import CheckpointError, ConfigError, MissingDependencyError

_PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
_TOKENIZER = "tokenizer_processor"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        policy: LeRobot's ``PreTrainedPolicy``.
        before: Its preprocessor: observation to batch.
        after: Its postprocessor: normalised actions to actions.
    """

    policy: Any
    before: Any
    after: Any

    @property
    def config(self) -> Any:
        """LeRobot's ``PreTrainedConfig``."""
        return self.policy.config


def load(folder: Path, device: str, tokenizer: str) -> Checkpoint:
    """Load a checkpoint without asking the network.

    Args:
        folder: What LeRobot's ``save_pretrained`` wrote.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        tokenizer: Folder of the tokenizer; "" takes the one that the processors name, where it is a folder.

    Raises:
        CheckpointError: It is not there, is of an older format, or lacks something.
        MissingDependencyError: LeRobot, or the library of this family, is not installed.
    """
    kind = _kind(folder)
    _check_tokenizer(folder, tokenizer)
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
    try:
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    except ImportError as error:
        raise MissingDependencyError(
            f"policy.name: 'lerobot' needs LeRobot in this environment ({error}); install it with: pip install "
            "lerobot, or set policy.python to the Python of an environment that has it"
        ) from error
    try:
        found = get_policy_class(kind)
    except ValueError as error:
        raise CheckpointError(f"{folder}: type '{kind}' is no policy of the installed LeRobot ({error})") from None
    except ImportError as error:
        raise MissingDependencyError(
            f"{folder}: the policy '{kind}' needs a library that does not import ({error}); "
            f"install it with: pip install 'lerobot[{kind}]'"
        ) from error
    overrides: dict[str, Any] = {"device_processor": {"device": device}}
    if tokenizer:
        overrides[_TOKENIZER] = {"tokenizer_name": tokenizer}
    try:
        config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
        config.device = device
        policy = found.from_pretrained(folder, config=config, local_files_only=True)
        before, after = make_pre_post_processors(config, str(folder), preprocessor_overrides=overrides)
    except ImportError as error:
        raise MissingDependencyError(
            f"{folder}: {error}; install it with: pip install 'lerobot[{kind}]'"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: LeRobot cannot load it: {type(error).__name__}: {error}") from error
    policy.reset()
    return Checkpoint(policy.eval().to(device), before, after)


def _kind(folder: Path) -> str:
    """The checkpoint's family (``act``, ``smolvla``, ...), after a look at what must be there."""
    if not str(folder) or not folder.is_dir():
        raise ConfigError(f"policy.checkpoint: found '{folder}', expected a folder that LeRobot wrote")
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["type"]
    except FileNotFoundError:
        nested = folder / "pretrained_model"
        hint = f"; take {nested}" if nested.is_dir() else ""
        raise CheckpointError(f"{folder}: has no config.json, so LeRobot did not write it{hint}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/config.json: has no policy type ({error!r}), expected LeRobot's") from None
    missing = [name for name in _PROCESSORS if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder}: has no {missing[0]}, as before LeRobot 0.4; migrate it with: python -m "
            f"lerobot.processor.migrate_policy_normalization --pretrained-path {folder}"
        )
    return str(kind)


def _check_tokenizer(folder: Path, tokenizer: str) -> None:
    """Refuse a tokenizer that would be downloaded.

    Raises:
        CheckpointError: The processors name one on the hub and no folder was given, or the folder is missing.
    """
    if tokenizer:
        if not Path(tokenizer).is_dir():
            raise ConfigError(f"policy.tokenizer: found '{tokenizer}', expected the folder of a tokenizer")
        return
    steps = json.loads((folder / _PROCESSORS[0]).read_text(encoding="utf-8")).get("steps", ())
    for step in steps:
        name = step.get("config", {}).get("tokenizer_name")
        if step.get("registry_name") == _TOKENIZER and name and not Path(name).is_dir():
            raise CheckpointError(
                f"{folder}: its processors name the tokenizer '{name}' on the hub, and nothing is downloaded; "
                "download it once and set policy.tokenizer to its folder"
            )
