"""Every key of LeRobot's configuration classes is obeyed, refused by name, or listed as unread.

``data/lerobot_keys.json`` has the names of the fields; ``pi/test_mutations.py`` and its like compare those that are
obeyed with LeRobot itself. A key is changed in a sound folder; what is read then differs, or the message has the
key's name, or the key is in the family's list of unread ones.
"""

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from vla_ros.errors import VlaRosError
from vla_ros_models.groot import GrootOptions
from vla_ros_models.groot.loading import LEROBOT_HARMLESS
from vla_ros_models.groot.loading import read_checkpoint as read_groot
from vla_ros_models.pi.checkpoint import HARMLESS
from vla_ros_models.pi.checkpoint import read_checkpoint as read_pi
from vla_ros_models.smolvla import SmolVlaOptions
from vla_ros_models.smolvla.loading import IGNORED_KEYS
from vla_ros_models.smolvla.loading import read_checkpoint as read_smolvla

DATA = Path(__file__).parents[1] / "data"
KEYS = json.loads((DATA / "lerobot_keys.json").read_text())["keys"]
FOLDERS = {
    "pi0": DATA / "pi" / "pi0" / "lerobot",
    "pi05": DATA / "pi" / "pi05" / "lerobot",
    "smolvla": DATA / "smolvla" / "default",
    "groot": DATA / "groot" / "lerobot_relative",
}
UNREAD: Mapping[str, Mapping[str, str]] = {
    "pi0": HARMLESS, "pi05": HARMLESS, "smolvla": IGNORED_KEYS, "groot": LEROBOT_HARMLESS,
}  # fmt: skip
OTHERS = ("another", 3, 7, 0.37, True, False, ["x"], {"another": 1})


def read(kind: str, folder: Path) -> str:
    """Return everything that is read of a folder, but its weights, as text."""
    found: Any
    if kind == "smolvla":
        found = read_smolvla(folder, SmolVlaOptions(vlm=str(DATA / "smolvla" / "vlm")))
    elif kind == "groot":
        options = GrootOptions(backbone=str(DATA / "groot" / "backbone"), base_model=str(DATA / "groot" / "two"))
        found = read_groot(folder, options)
    else:
        found = read_pi(folder)
    with np.printoptions(threshold=10_000):
        values = {name: value for name, value in vars(found).items() if name not in ("stored", "folder")}
        return repr({name: vars(value) if name == "processing" else value for name, value in values.items()})


@pytest.fixture
def folder(tmp_path: Path, kind: str) -> Path:
    copy = tmp_path / "one" / "two" / "checkpoint"
    shutil.copytree(FOLDERS[kind], copy)
    for path in (copy, *copy.iterdir()):
        path.chmod(0o755)
    if kind.startswith("pi"):
        for path in (DATA / "pi" / "architecture.json", DATA / "pi" / kind / "openpi" / "model.safetensors"):
            shutil.copy(path, copy / path.name)
    return copy


def fate(kind: str, folder: Path, key: str) -> str:
    """Return ``obeyed``, ``refused``, ``unread`` or what else became of a key."""
    path = folder / "config.json"
    text, usual = path.read_text(), read(kind, folder)
    patterns = " ".join(UNREAD[kind].values()).split()
    outcomes = set()
    for value in OTHERS:
        config = json.loads(text)
        if key in ("input_features", "output_features"):
            value = {}
        if config.get(key) == value:
            continue
        path.write_text(json.dumps({**config, key: value}))
        try:
            outcomes.add("same" if read(kind, folder) == usual else "obeyed")
        except VlaRosError as error:
            outcomes.add(
                "refused" if key in str(error) or key in BY_ANOTHER_NAME else f"refused without name: {error}"
            )
        finally:
            path.write_text(text)
    if outcomes == {"same"} and key not in REPLACED:
        return "unread" if any(fnmatchcase(key, pattern) for pattern in patterns) else "ignored in silence"
    return " and ".join(sorted(outcomes - {"same"}))


REPLACED = {"vlm_model_name": "policy.vlm", "base_model_path": "policy.base_model"}
"""Keys that an option of :func:`read` replaces."""

BY_ANOTHER_NAME = {
    "type": "the folder is no layout of the family, or has the weights of another model",
    "input_features": "its features are named", "output_features": "its features are named",
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_key_is_obeyed_refused_or_listed(kind: str, folder: Path) -> None:
    fates = {key: fate(kind, folder, key) for key in KEYS[kind]}
    wrong = {key: one for key, one in fates.items() if "silence" in one or "without name" in one}
    assert not wrong
    assert sum(one != "unread" for one in fates.values()) > 8
    listed = {
        key for key in KEYS[kind] if any(fnmatchcase(key, p) for p in " ".join(UNREAD[kind].values()).split())
    }
    assert {key for key, one in fates.items() if one == "unread"} == listed, "what is listed has no effect at all"
