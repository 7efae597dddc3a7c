"""The facts of files that people committed to public repositories (``data/corpus.json``), and their origins."""

import json
from pathlib import Path
from typing import Any

import pytest

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
"""What git leaves in place of a file of git-lfs."""

_CORPUS = json.loads((Path(__file__).parent / "data" / "corpus.json").read_text(encoding="utf-8"))


def entries(kind: str, *families: str) -> list[Any]:
    """One parameter for each entry of ``kind``, named by its origin; ``families`` selects checkpoints."""
    chosen = [one for one in _CORPUS[kind] if not families or one["family"] in families]
    return [pytest.param(one["facts"], id=f"{one['repository']}:{one['path']}") for one in chosen]
