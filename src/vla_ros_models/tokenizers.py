"""Reads tokenizer files with the libraries that define their formats.

Nothing is downloaded, and the tokens depend neither on the version of transformers nor on code in the checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vla_ros.errors import CheckpointError, MissingDependencyError, install
from vla_ros.files import check_regular
from vla_ros_models.checkpoint_files import read_fields


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that encodes the names of control tokens, such as ``<bos>``, as plain text."""

    encode: Callable[[str], list[int]]  # text to ids, without BOS
    size: int  # number of pieces in the vocabulary
    special: Mapping[str, int | None]  # ids of ``<pad>``, ``<eos>`` and ``<bos>``; None if missing
    control: tuple[str, ...] = ()  # control tokens that ``encode`` recognises in text
    framed: tuple[int, ...] = ()  # ids that the file adds to a text, which ``encode`` does not


def find_file(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first file of ``names`` that exists in ``folder``, or None."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_tokenizer(path: Path, control: bool = False) -> Tokenizer:
    """Read a tokenizer from ``*.json`` (tokenizers) or ``*.model`` (SentencePiece).

    With ``control`` (``*.json`` only), text may have control tokens, as a chat template writes them. Raises
    CheckpointError if the file has neither format.
    """
    if not control:
        _check_config(path.with_name("tokenizer_config.json"))
    kind = "tokenizer" if path.suffix == ".json" else "sentencepiece model"
    try:
        with _reported(f"{path}: not a {kind}"):
            check_regular(path)
            return _json(path, control) if path.suffix == ".json" else _sentencepiece(path)
    except ImportError as error:
        raise MissingDependencyError(f"{error.name} is not installed: {install('openvla')}") from error


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Convert the libraries' errors to CheckpointError, but for a missing library.

    They raise plain Exception, OSError or RuntimeError; a panic of tokenizers, which a regular expression of the
    file can cause, is no Exception.
    """
    try:
        yield
    except (ImportError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what} ({error}); download the file again") from error


def _check_config(path: Path) -> None:
    """Refuse settings of transformers that change the tokens; other keys of the file do not change them."""
    if path.is_file():
        config = read_fields(path)
        for key, usual in {"add_bos_token": True, "add_eos_token": False, "do_lower_case": False}.items():
            config.expect(key, usual, None)


def _json(path: Path, control: bool) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(path))
    backend.no_truncation()  # files saved after training may truncate or pad
    backend.no_padding()
    backend.encode_special_tokens = not control  # an instruction must not be able to produce control tokens
    size, image = backend.get_vocab_size(), backend.token_to_id("<image>")
    # transformers' processor appends <image> to the vocabulary, but the embedding has no row for it.
    size -= int(image is not None and image == size - 1)

    def encode(text: str) -> list[int]:
        with _reported(f"{path}: cannot encode a text of {len(text)} characters"):
            return [int(token) for token in backend.encode(text, add_special_tokens=False).ids]

    found = [str(token) for token in backend.get_added_tokens_decoder().values()] if control else []
    special = {name: backend.token_to_id(name) for name in ("<pad>", "<eos>", "<bos>")}
    framed = tuple(int(token) for token in backend.encode("", add_special_tokens=True).ids)
    return Tokenizer(encode, size, special, tuple(found), framed)


def _sentencepiece(path: Path) -> Tokenizer:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(path))

    def encode(text: str) -> list[int]:
        return [int(token) for token in processor.encode(text)]

    special = {"<pad>": processor.pad_id(), "<eos>": processor.eos_id(), "<bos>": processor.bos_id()}
    return Tokenizer(encode, int(processor.get_piece_size()), special)
