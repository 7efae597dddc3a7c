"""Encodes images and an instruction as Qwen3-VL's tokens, with their positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.errors import CheckpointError, ConfigError, MissingDependencyError
from vla_ros.types import IntArray
from vla_ros_models.checkpoint_files import read_fields
from vla_ros_models.tokenizers import Tokenizer, find_file, read_tokenizer

DEFAULT_INSTRUCTION = "Perform the task."
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def formalize(instruction: str, formal: bool) -> str:
    """Return the instruction as in training; ``formal`` lowers its case and drops punctuation."""
    text = instruction or DEFAULT_INSTRUCTION
    if not formal:
        return text
    return "".join(one for one in text.lower() if one.isalnum() or one.isspace() or one == "_")


@dataclass(frozen=True, eq=False)
class Prompt:
    """The language model's input."""

    tokens: IntArray  # int64 [L]; each image has one token for each of its features
    positions: IntArray  # int64 [3, L], of time, height and width


@dataclass(frozen=True, eq=False)
class PromptEncoder:
    """Writes the chat template of the backbone's folder and encodes it."""

    tokenizer: Tokenizer
    template: Any  # the compiled template
    names: Mapping[str, str]  # control tokens that a template may name
    image_token: int  # id that stands for image tokens
    formal: bool  # as for :func:`formalize`

    def encode(self, instruction: str, grids: Sequence[tuple[int, int]]) -> Prompt:
        """Encode an instruction for images with ``grids`` (rows, columns) of tokens.

        Raises ConfigError if the instruction has control tokens, CheckpointError if the template drops an image.
        """
        return _encode(self, instruction, tuple(grids))

    def _written(self, instruction: str, grids: Sequence[tuple[int, int]]) -> Prompt:
        text = formalize(instruction, self.formal)
        if control := [token for token in self.tokenizer.control if token in text]:
            raise ConfigError(f"policy.instruction: has the control tokens {control}; remove them")
        content = [{"type": "image", "image": ""} for _ in grids]
        message = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
        written = self.template.render(messages=[message], add_generation_prompt=False, **self.names)
        return self._expand(self.tokenizer.encode(written), grids)

    def _expand(self, ids: Sequence[int], grids: Sequence[tuple[int, int]]) -> Prompt:
        """Repeat the token of each image, and count positions: those of an image start at the next free one."""
        if ids.count(self.image_token) != len(grids):
            raise CheckpointError(
                f"the chat template writes {ids.count(self.image_token)} image tokens for {len(grids)} images"
            )
        left, tokens, positions, free = iter(grids), [], [], 0
        for one in ids:
            if one != self.image_token:
                tokens.append(np.array([one]))
                positions.append(np.full((3, 1), free))
                free += 1
                continue
            rows, columns = next(left)
            tokens.append(np.full(rows * columns, one))
            down, across = np.divmod(np.arange(rows * columns), columns)
            positions.append(free + np.stack([np.zeros_like(down), down, across]))
            free += max(rows, columns)
        return Prompt(np.concatenate(tokens).astype(np.int64), np.concatenate(positions, axis=1).astype(np.int64))


@lru_cache(maxsize=16)
def _encode(encoder: PromptEncoder, instruction: str, grids: tuple[tuple[int, int], ...]) -> Prompt:
    return encoder._written(instruction, grids)  # a robot repeats its instruction


def read_prompt_encoder(folder: Path, image_token: int, vocabulary: int, formal: bool) -> PromptEncoder:
    """Read tokenizer and chat template from the backbone's folder.

    Raises CheckpointError if a file is missing or the tokenizer has more pieces than ``vocabulary``.
    """
    path = find_file(folder, (_TOKENIZER,))
    if path is None:
        raise CheckpointError(
            f"{folder}: no {_TOKENIZER}; copy the backbone's tokenizer and chat template there (nvidia/"
            "Cosmos-Reason2-2B), or set policy.backbone to their folder"
        )
    tokenizer = read_tokenizer(path, control=True)
    if tokenizer.size > vocabulary:
        raise CheckpointError(
            f"{path}: {tokenizer.size} pieces, but the language model has {vocabulary}; it belongs to another model"
        )
    stated = read_fields(folder / _TOKENIZER_CONFIG) if (folder / _TOKENIZER_CONFIG).is_file() else {}
    names = {key: _content(value) for key, value in stated.items() if key.endswith("_token") and _content(value)}
    return PromptEncoder(tokenizer, _template(folder, stated.get("chat_template")), names, image_token, formal)


def _content(value: Any) -> str:
    found = value.get("content") if isinstance(value, Mapping) else value
    return found if isinstance(found, str) else ""


def _template(folder: Path, stated: Any) -> Any:
    """Compile the template as transformers does: ``chat_template.jinja``, ``.json``, or the tokenizer's own."""
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingDependencyError("jinja2 is not installed: pip install jinja2") from error
    path = find_file(folder, ("chat_template.jinja", "chat_template.json"))
    if path is not None:
        stated = path.read_text("utf-8") if path.suffix == ".jinja" else read_fields(path).get("chat_template")
    if not isinstance(stated, str):
        raise CheckpointError(
            f"{folder}: no chat_template.jinja, chat_template.json or entry chat_template in {_TOKENIZER_CONFIG}; "
            "copy it from the backbone (nvidia/Cosmos-Reason2-2B)"
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        return environment.from_string(stated)
    except TemplateError as error:
        raise CheckpointError(f"{path or folder}: not a chat template ({error}); download it again") from error
