"""The evidence beside a trained checkpoint: what it was trained on, and how it compared with its base."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import read_json

FOLDER, FILE = "evidence", "evidence.json"

_SUFFIXES = (".safetensors", ".pt", ".json", ".model", ".jinja")
# What trainers write beside a checkpoint, and no policy reads: our demo, LeRobot and transformers.
_RECORDS = ("training.json", "train_config.json", "trainer_state.json")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hashes(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file, by its path in ``folder``."""
    return {path.relative_to(folder).as_posix(): sha256(path) for path in sorted(files)}


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint that determine what it does, those below it that are another's excepted."""
    return [path for path in folder.rglob("*") if path.is_file() and _determines(path.relative_to(folder))]


def _determines(path: PurePath) -> bool:
    elsewhere = path.parts[0] in (FOLDER, "adapter", "run") or path.parts[0].startswith(".")
    return path.suffix in _SUFFIXES and path.name not in _RECORDS and not elsewhere


def weight_hashes(folder: Path) -> dict[str, str]:
    return hashes(folder, weight_files(folder))


def digest_of(folder: Path) -> str:
    """Return one SHA-256 of all files that determine what a checkpoint does."""
    return hashlib.sha256(json.dumps(weight_hashes(folder), sort_keys=True).encode()).hexdigest()


def other_files(folder: Path, stated: Mapping[str, str]) -> list[str]:
    """Return the files that are others than ``stated`` by :func:`weight_hashes`, or are not there."""
    found = weight_hashes(folder)
    counted = {name: one for name, one in stated.items() if _determines(PurePath(name))}
    return sorted(name for name in {*counted, *found} if counted.get(name) != found.get(name))


def write_evidence(folder: Path, content: dict[str, Any]) -> None:
    """Write what :func:`require_evidence` reads: ``weights``, from :func:`hashes`, ``proof``, and more."""
    (folder / FOLDER).mkdir(exist_ok=True)
    text = json.dumps(content, indent=2, sort_keys=True)
    (folder / FOLDER / FILE).write_text(text + "\n", encoding="utf-8")


def require_evidence(folder: Path) -> None:
    """Raise CheckpointError unless the checkpoint is the one that was compared in closed loop, and not worse."""
    path = folder / FOLDER / FILE
    where = f"policy.evidence: require, but {path}"
    if not path.is_file():
        raise CheckpointError(
            f"{where} is missing; train with vla-ros finetune, then with --scores OLD.json NEW.json"
        )
    content = read_json(path)
    if names := other_files(folder, content.get("weights") or {}):
        raise CheckpointError(f"{where} is of other files: {names[:5]} differ; compare this checkpoint again")
    proof = content.get("proof") or {}
    if proof.get("basis") != "closed_loop" or proof.get("verdict") not in ("better", "no contradiction"):
        raise CheckpointError(
            f"{where} says '{proof.get('verdict')}' by {proof.get('basis')}, expected a comparison in closed loop "
            "that does not speak against it: vla-ros eval both checkpoints, then vla-ros finetune --scores"
        )
