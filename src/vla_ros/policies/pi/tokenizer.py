"""Finds PaliGemma's tokenizer and refuses any other."""

from __future__ import annotations

from pathlib import Path

from vla_ros.errors import CheckpointError
from vla_ros.policies.tokenizers import Tokenizer, find_file, read_tokenizer

PAD, EOS, BOS = 0, 1, 2
SPECIAL = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS}
_FILES = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model")


def find_tokenizer(folder: Path, chosen: str = "", stated: str = "") -> Path:
    """Find the tokenizer's file in the folder ``chosen``, or if empty, in the checkpoint.

    The subfolder ``tokenizer`` is searched, too; ``chosen`` may also be the file itself. ``stated`` is the name in
    the checkpoint: a folder in the checkpoint, or PaliGemma's name on the hub.
    """
    base = Path(chosen).expanduser() if chosen else folder
    if stated and not chosen and (folder / stated).is_dir():
        base = folder / stated
    elif stated and not chosen and "paligemma" not in stated.lower():
        raise CheckpointError(
            f"{folder}: tokenizer_name: found {stated!r}, expected a folder in the checkpoint or PaliGemma's "
            "tokenizer; set policy.tokenizer to the folder of the one used in training"
        )
    found = base if base.is_file() else find_file(base, _FILES) or find_file(base / "tokenizer", _FILES)
    if found is None:
        raise CheckpointError(
            f"{base}: no tokenizer ({', '.join(_FILES)}) here or in tokenizer/. Many checkpoints lack it: fetch "
            "tokenizer.json of google/paligemma-3b-pt-224 once and set policy.tokenizer to its path"
        )
    return found


def load_tokenizer(path: Path, vocabulary: int) -> Tokenizer:
    """Read a tokenizer.

    Raises CheckpointError unless it has ``vocabulary`` pieces and PaliGemma's control tokens.
    """
    tokenizer = read_tokenizer(path)
    if tokenizer.size != vocabulary or tokenizer.special != SPECIAL:
        raise CheckpointError(
            f"{path}: {tokenizer.size} pieces with {tokenizer.special}, but the checkpoint was trained with "
            f"{vocabulary} pieces and {SPECIAL}; the tokenizer belongs to another model (Gemma's own has 256000 "
            "pieces, PaliGemma's 257152)"
        )
    line_break = tokenizer.encode("\n")
    if len(line_break) != 1:
        raise CheckpointError(f"{path}: a line break is {line_break}, expected one piece as for PaliGemma")
    return tokenizer
