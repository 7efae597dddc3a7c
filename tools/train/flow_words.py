"""Vocabulary and prompts of the small pi0.5: whole words, and one token per state value."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.checkpoints.vocabulary import TABLE_WORDS
from tools.train.flow_network import STATE_SIZE
from vla_ros_models.pi.processing import BINS, PromptForm, load_tokenizer, prompt_tokens

_PIECE = r"\n|-?[0-9]+|[A-Za-z]+|[^\sA-Za-z0-9]"
_WORDS = ("Task", "State", "Action", ":", ",", ";", ".", "the", "with", "arm", "and", "to", *TABLE_WORDS)
_NUMBERS = tuple(map(str, range(-1, BINS)))
VOCABULARY = tuple(dict.fromkeys(("<pad>", "<eos>", "<bos>", "<unk>", "\n", *_WORDS, *_NUMBERS)))
FORM = PromptForm(length=48, state="as_is", padded_state=STATE_SIZE)


def write_tokenizer(path: Path, vocabulary: Sequence[str] = VOCABULARY) -> None:
    """Write a vocabulary as a ``tokenizer.json``."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    ids = {piece: index for index, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), behavior="removed", invert=True)
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>"])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


class FlowPrompts:
    """Prompts of some instructions, with the state to be filled in.

    Attributes:
        ids: Int64 [instructions, L], padded, with the tokens of an all-zero state.
        lengths: Int64 [instructions], number of tokens of each prompt.
        padded: True if some prompts are shorter than others.
    """

    def __init__(
        self,
        tokenizer: Path,
        instructions: Sequence[str],
        device: torch.device,
        vocabulary: Sequence[str] = VOCABULARY,
        form: PromptForm = FORM,
    ) -> None:
        encode = load_tokenizer(tokenizer, len(vocabulary)).encode
        prompts = [prompt_tokens(encode, text, form, np.zeros(STATE_SIZE)) for text in instructions]
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        padded = [np.pad(prompt, (0, int(self.lengths.max()) - len(prompt))) for prompt in prompts]
        self.padded = int(self.lengths.min()) < int(self.lengths.max())
        self.ids = torch.from_numpy(np.stack(padded)).to(device)
        self._first = vocabulary.index("-1")
        begins = [int(np.flatnonzero(prompt >= self._first)[0]) for prompt in prompts]
        self._at = torch.tensor(begins, device=device)

    def fill(self, rows: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prompts ``rows`` [R] with the state's bins, int64 [R, 8], and their lengths."""
        at = self._at[rows][:, None] + torch.arange(STATE_SIZE, device=rows.device)
        return self.ids[rows].scatter(1, at, bins + self._first + 1), self.lengths[rows]
