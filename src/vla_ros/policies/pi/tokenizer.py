"""Reads PaliGemma's tokenizer from ``tokenizer.json`` or a SentencePiece model; never downloads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vla_ros.errors import CheckpointError
from vla_ros.policies.tokenizer_files import open_sentencepiece, open_tokenizer_json

PAD, EOS, BOS = 0, 1, 2
SPECIAL = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS}
FILES = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model")
FOLDERS = (".", "tokenizer")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that fits the checkpoint."""

    encode: Callable[[str], list[int]]  # text to ids, without BOS; control tokens in the text are text
    path: Path  # its file


def find_tokenizer(folder: Path, chosen: str = "") -> Path:
    """Find the tokenizer: ``chosen`` (a file or folder), else in the checkpoint or its ``tokenizer/``."""
    base = Path(chosen).expanduser() if chosen else folder
    if base.is_file():
        return base
    for place in FOLDERS:
        for name in FILES:
            if (base / place / name).is_file():
                return base / place / name
    raise CheckpointError(
        f"{base}: no tokenizer ({', '.join(FILES)}) here or in tokenizer/. Many checkpoints lack it, nothing is "
        "downloaded at run time: fetch tokenizer.json of google/paligemma-3b-pt-224 once and name its path"
    )


def load_tokenizer(path: Path, vocabulary: int) -> Tokenizer:
    """Read a ``*.json`` (tokenizers) or ``*.model`` (SentencePiece).

    Raises CheckpointError if its vocabulary is not that of the checkpoint's embedding, ``vocabulary`` rows.
    """
    encode, size, special = _tokenizers(path) if path.suffix == ".json" else _sentencepiece(path)
    if size != vocabulary or special != SPECIAL:
        raise CheckpointError(
            f"{path}: {size} pieces with {special}, but the checkpoint was trained with {vocabulary} pieces and "
            f"{SPECIAL}; the tokenizer belongs to another model (Gemma's own has 256000 pieces, PaliGemma's 257152)"
        )
    if len(encode("\n")) != 1:
        raise CheckpointError(f"{path}: a line break is {encode(chr(10))}, expected one piece as in PaliGemma's")
    return Tokenizer(encode, path)


Read = tuple[Callable[[str], list[int]], int, dict[str, int | None]]


def _tokenizers(path: Path) -> Read:
    backend = open_tokenizer_json(path)
    image = backend.token_to_id("<image>")
    size = backend.get_vocab_size()
    # The processor of transformers adds <image> behind the vocabulary; the embedding has no row for it.
    size -= int(image is not None and image == size - 1)

    def encode(text: str) -> list[int]:
        return [int(token) for token in backend.encode(text, add_special_tokens=False).ids]

    return encode, size, {name: backend.token_to_id(name) for name in SPECIAL}


def _sentencepiece(path: Path) -> Read:
    processor = open_sentencepiece(path)

    def encode(text: str) -> list[int]:
        return [int(token) for token in processor.encode(text)]

    special: dict[str, int | None] = {
        "<pad>": processor.pad_id(),
        "<eos>": processor.eos_id(),
        "<bos>": processor.bos_id(),
    }
    return encode, int(processor.get_piece_size()), special
