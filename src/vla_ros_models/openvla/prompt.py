"""Encodes an instruction as the prompt tokens that the checkpoint was trained on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.policies.base import Session
from vla_ros.types import IntArray
from vla_ros_models.openvla.architecture import Architecture
from vla_ros_models.tokenizers import find_file, read_tokenizer

_Encode = Callable[[str], list[int]]
"""Encodes text as token ids, without BOS."""

_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
TEMPLATES = {
    "v0.1": _VICUNA_SYSTEM + " USER: What action should the robot take to {}? ASSISTANT:",
    "v0.2": "In: What action should the robot take to {}?\nOut:",
}
"""Prompt templates by version; ``{}`` is the instruction. Spaces and line breaks are as in training."""


def format_prompt(instruction: str, version: str) -> str:
    """Return the prompt for ``instruction``, in lower case and stripped."""
    before, after = TEMPLATES[version].split("{}")
    return before + instruction.strip().lower() + after


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes instructions as prompt tokens of a checkpoint."""

    encode_text: _Encode
    version: str
    bos_token: int  # first token
    empty_token: int  # last token, appended if the prompt does not end with it (29871 for Llama-2)
    max_tokens: int  # longest prompt that leaves room for patches and actions

    def encode(self, instruction: str) -> IntArray:
        """Return the tokens, int64 [L]: BOS, prompt, empty token.

        Raises ConfigError if the instruction is empty or too long.
        """
        if not instruction.strip():
            raise ConfigError("policy.instruction: empty; say what the robot should do")
        ids = close_prompt(
            [self.bos_token, *self.encode_text(format_prompt(instruction, self.version))], self.empty_token
        )
        if len(ids) > self.max_tokens:
            raise ConfigError(
                f"policy.instruction: the prompt has {len(ids)} tokens, but the model has room for "
                f"{self.max_tokens}; shorten the instruction"
            )
        return np.asarray(ids, dtype=np.int64)


@dataclass
class PromptSession(Session):
    """One robot's encoded instruction."""

    instruction: str = ""
    tokens: IntArray | None = None  # the prompt's tokens, int64 [L], on the host

    def encode(self, encoder: PromptEncoder, instruction: str) -> IntArray:
        """Return the prompt's tokens; only a new instruction is encoded."""
        if self.tokens is None or self.instruction != instruction:
            self.tokens, self.instruction = encoder.encode(instruction), instruction
        return self.tokens


def close_prompt(ids: list[int], empty_token: int) -> list[int]:
    """Append ``empty_token`` unless ``ids`` already end with it.

    In training, the action follows a single space token, which the tokenizer omits at the end of a prompt.
    """
    return ids if ids and ids[-1] == empty_token else [*ids, empty_token]


def load_prompt_encoder(
    folder: Path, architecture: Architecture, version: str = "auto", reserved_tokens: int = 7
) -> PromptEncoder:
    """Return a checkpoint's prompt encoder; ``reserved_tokens`` are kept for the action."""
    return PromptEncoder(
        encode_text=load_tokenizer(folder, architecture),
        version=architecture.prompt_version if version == "auto" else version,
        bos_token=architecture.llm.bos_token,
        empty_token=architecture.empty_token,
        max_tokens=architecture.llm.max_positions - architecture.patches - reserved_tokens,
    )


def load_tokenizer(folder: Path, architecture: Architecture) -> _Encode:
    """Load the tokenizer in ``folder``; raises CheckpointError if it does not fit the model."""
    path = find_file(folder, ("tokenizer.json", "tokenizer.model"))
    if path is None:
        raise CheckpointError(f"{folder}: no tokenizer.json and no tokenizer.model; download the tokenizer's files")
    encode = read_tokenizer(path).encode
    probe = encode(format_prompt("pick up the cube", architecture.prompt_version))
    if not probe or max(probe) >= architecture.llm.vocab_size or min(probe) < 0:
        raise CheckpointError(
            f"{folder}: the tokenizer has token ids up to {max(probe, default=-1)}, but the model's vocabulary "
            f"has {architecture.llm.vocab_size} tokens; the tokenizer's files belong to another checkpoint"
        )
    return encode
