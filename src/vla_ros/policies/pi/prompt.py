"""The prompt of pi0 and pi0.5, and PaliGemma's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.policies.pi.normalization import Array
from vla_ros.policies.tokenizers import Tokenizer, find_file, read_tokenizer
from vla_ros.types import IntArray

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


BINS = 256


@dataclass(frozen=True)
class PromptForm:
    """Format of a checkpoint's prompts in training."""

    length: int  # maximum tokens including BOS; longer prompts are truncated
    # ``none``: the instruction and a line break. ``as_is``: pi0.5's sentence with the state's numbers. ``padded``:
    # the same, with the state padded with zeros to ``padded_state``, as in LeRobot before 0.5.0.
    state: str = "none"
    clean: bool = True  # True strips the instruction and replaces underscores and line breaks with spaces
    padded_state: int = 32  # length of a padded state
    line_break: bool = True  # True ends a prompt without state with a line break


def state_bins(state: Array) -> IntArray:
    """Compute the bin of each normalised number: 0 to 255 over [-1, 1), -1 below, 255 above."""
    bins: IntArray = np.digitize(state, np.linspace(-1, 1, BINS + 1)[:-1]).astype(np.int64) - 1
    return bins


def prompt_parts(instruction: str, form: PromptForm, state: Array) -> tuple[str, ...]:
    """Compose the prompt from the instruction and the normalised state, as parts to tokenise separately."""
    text = instruction
    if form.clean or form.state != "none":
        text = instruction.strip().replace("_", " ").replace("\n", " ")
    if form.state == "none":
        if form.clean:
            return text, "\n"
        return (text if text.endswith("\n") or not form.line_break else f"{text}\n",)
    if form.state == "padded":
        state = np.pad(state, (0, max(0, form.padded_state - len(state))))
    numbers = " ".join(str(number) for number in state_bins(state))
    return (f"Task: {text}, State: {numbers};\nAction: ",)


def prompt_tokens(
    encode: Callable[[str], list[int]], instruction: str, form: PromptForm, state: Array
) -> NDArray[np.int64]:
    """Encode the prompt as int64 [L], beginning with BOS and truncated to ``form.length``."""
    if not instruction.strip():
        raise ConfigError("policy.instruction: empty; say what the robot should do")
    ids = [BOS]
    for part in prompt_parts(instruction, form, state):
        ids += encode(part)
    return np.asarray(ids[: form.length], dtype=np.int64)
