"""Builds the prompt: the instruction and, for pi0.5, the state, as in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vla_ros.errors import ConfigError
from vla_ros.policies.pi.normalization import Array
from vla_ros.policies.pi.tokenizer import BOS
from vla_ros.types import IntArray

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
