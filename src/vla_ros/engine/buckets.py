"""Padded prompt lengths for which the engine keeps CUDA graphs ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vla_ros.errors import ConfigError


@dataclass(frozen=True)
class Buckets:
    """Padded text lengths, so that a new instruction rarely needs new graphs.

    A sequence is BOS, the patches, the rest of the prompt, the drafted tokens, and padding that no other token
    attends to. All but the patches form one row of text tokens.
    """

    patches: int  # patch tokens of one image
    answer: int  # tokens to decode (7 for OpenVLA)
    lengths: tuple[int, ...]  # sequence lengths, ascending, with the patches

    @classmethod
    def up_to(cls, patches: int, answer: int, max_positions: int, step: int = 32) -> Buckets:
        """Return multiples of ``step`` up to twice the patches, and every fourth multiple beyond."""
        room = max_positions - answer  # a verifying pass may write beyond the last token, but not beyond the tables
        lengths = []
        length = -(-(patches + answer + 1) // step) * step
        while length < room:
            lengths.append(length)
            length += step if length < 2 * patches + step else 4 * step
        if room >= patches + answer + 1:
            lengths.append(room)
        if not lengths:
            raise ConfigError(
                f"the decoder has {max_positions} positions, too few for {patches} patches and {answer} tokens"
            )
        return cls(patches, answer, tuple(lengths))

    def text(self, length: int) -> int:
        """Return the number of text tokens in a bucket of ``length``: all but the patches."""
        return length - self.patches

    def choose(self, prompt: int, among: Sequence[int] | None = None) -> int | None:
        """Return the shortest length (of ``among``, or of all) that holds a prompt and its draft, or None.

        ``prompt`` counts tokens with BOS, without patches.
        """
        need = self.patches + prompt + self.answer - 1
        fitting = [length for length in (self.lengths if among is None else among) if length >= need]
        return min(fitting, default=None)

    def require(self, prompt: int) -> int:
        """Like :meth:`choose`, but raise ConfigError if the prompt is longer than the decoder allows."""
        length = self.choose(prompt)
        if length is None:
            longest = self.lengths[-1] - self.patches - self.answer + 1
            raise ConfigError(
                f"policy.instruction: {prompt} tokens with the prompt template, the model has room for "
                f"{longest}; shorten it"
            )
        return length
