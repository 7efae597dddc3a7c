"""Opens tokenizer files as data, with the libraries that define their formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_ros.errors import CheckpointError, MissingDependencyError


def open_tokenizer_json(path: Path) -> Any:
    """Open a ``tokenizers.Tokenizer``; it does not truncate, pad, or read special tokens out of the text.

    Files saved after training may truncate or pad, and an instruction must not be able to write control tokens.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependencyError("tokenizers is not installed: pip install 'vla_ros[openvla]'") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: not a tokenizer ({error}); download the file again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def open_sentencepiece(path: Path) -> Any:
    """Open a ``sentencepiece.SentencePieceProcessor``."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise MissingDependencyError("sentencepiece is not installed: pip install 'vla_ros[openvla]'") from error
    try:
        return SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not a sentencepiece model ({error}); download the file again") from error
