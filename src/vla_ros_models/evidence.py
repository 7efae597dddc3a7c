"""The evidence beside a trained checkpoint: what it was trained on, and how it compared with its base."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import read_json

FOLDER, FILE = "evidence", "evidence.json"


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
    suffixes = (".safetensors", ".pt", ".json", ".model", ".jinja")
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes]
    return [path for path in found if path.relative_to(folder).parts[0] not in (FOLDER, "adapter", "run")]


def weight_hashes(folder: Path) -> dict[str, str]:
    return hashes(folder, weight_files(folder))


def digest_of(folder: Path) -> str:
    """Return one SHA-256 of all files that determine what a checkpoint does."""
    return hashlib.sha256(json.dumps(weight_hashes(folder), sort_keys=True).encode()).hexdigest()


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
    stated, found = content.get("weights"), weight_hashes(folder)
    if stated != found:
        names = sorted(name for name in {*(stated or {}), *found} if (stated or {}).get(name) != found.get(name))
        raise CheckpointError(f"{where} is of other files: {names[:5]} differ; compare this checkpoint again")
    proof = content.get("proof") or {}
    if proof.get("basis") != "closed_loop" or proof.get("verdict") not in ("better", "no contradiction"):
        raise CheckpointError(
            f"{where} says '{proof.get('verdict')}' by {proof.get('basis')}, expected a comparison in closed loop "
            "that does not speak against it: vla-ros eval both checkpoints, then vla-ros finetune --scores"
        )
