"""Temporal drafts: verify the previous action's tokens at once instead of decoding one by one.

Consecutive actions of a robot are similar, and a pass over seven rows costs as much as a pass over one row, because
both read all weights once. So the previous tokens are appended to the prompt as a draft, and the prefill predicts
the next token at every position.

A prefill computes drafted rows with different kernels from decoding, which round differently. It therefore accepts
a draft only as a whole, and only if every logit margin is at least ``guard``. Otherwise the decoding kernels run
all drafted rows again, so that tokens and KV cache are bit-identical to plain decoding. The longest prefix of the
guesses that matches the predictions is accepted, and the prediction after this prefix is correct as well. So every
pass yields at least one token, and drafts never need more passes than plain decoding.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

Predictions = tuple[Sequence[int], Sequence[float]]
"""Tokens and their logit margins, one per row."""

PATIENCE = 4
"""Consecutive drafts without an accepted token after which a session stops drafting for a while."""

REST = 16
"""Number of actions for which a session then stops drafting."""


@dataclass(frozen=True)
class DraftState:
    """The draft of one session, and its back-off.

    A drafted prefill costs no more than a plain one, but unlike plain decoding, verification needs the host between
    passes, hence the back-off. A new instruction or episode starts with a new state.
    """

    tokens: tuple[int, ...] = ()  # the previous answer; empty before the first
    failures: int = 0  # consecutive drafts of which no token was accepted
    resting: int = 0  # remaining actions without a draft

    def offer(self) -> tuple[int, ...] | None:
        """Return the draft for the next action, or None."""
        return self.tokens if self.tokens and not self.resting else None

    def after(self, tokens: Sequence[int], accepted: int | None) -> "DraftState":
        """Return the state after an action of which the draft saved ``accepted`` tokens (None: no draft)."""
        if accepted is None:
            return DraftState(tuple(tokens), self.failures, max(0, self.resting - 1))
        failures = 0 if accepted else self.failures + 1
        if failures >= PATIENCE:
            return DraftState(tuple(tokens), PATIENCE - 1, REST)  # one more failure stops drafting again
        return DraftState(tuple(tokens), failures)


@dataclass(frozen=True)
class Decoded:
    """Greedily decoded tokens and the number of passes."""

    tokens: tuple[int, ...]  # the answer
    margins: tuple[float, ...]  # logit margin of each token
    accepted: int  # tokens after the first that needed no separate pass
    passes: int  # passes after the prefill


Fed = tuple[list[int], int]
"""Tokens of a verifying pass, and the number of certain tokens before the first of these."""


def verify_draft(draft: Sequence[int], first: Predictions, guard: float) -> Generator[Fed, Predictions, Decoded]:
    """Complete the greedy tokens from the prefill's predictions in as few passes as possible.

    A generator, so that several observations share passes: it yields tokens to verify (the newest certain token,
    then guesses), receives one prediction per token, and returns the result. ``draft`` was appended to the prompt
    and has one token fewer than the answer; ``first`` has one prediction per token of the answer; an infinite
    ``guard`` accepts no drafted row of the prefill.
    """
    predicted, ahead = first
    total = len(predicted)
    sure = [margin >= guard for margin in ahead]  # False for NaN
    if all(sure[1:]) and list(predicted[:-1]) == list(draft):
        return Decoded(tuple(predicted), tuple(ahead), total - 1, 0)
    # After the first difference, predictions follow a wrong token, but are better guesses than the old tokens.
    guesses = [new if certain else old for new, old, certain in zip(predicted, draft, sure, strict=False)]
    tokens, margins, passes = [predicted[0]], [ahead[0]], 0
    while len(tokens) < total:
        start = len(tokens)
        fed = [tokens[-1], *guesses[start:]]
        answers = yield fed, start - 1
        passes += 1
        good = 1
        while good < len(fed) and fed[good] == answers[0][good - 1]:
            good += 1
        tokens += answers[0][:good]
        margins += answers[1][:good]
        guesses[start:] = answers[0][:-1]
    return Decoded(tuple(tokens), tuple(margins), total - 1 - passes, passes)


def verify_all(
    waiting: Sequence[Generator[Fed, Predictions, Decoded]],
    verify: Callable[[Sequence[Fed | None]], Sequence[Predictions]],
) -> list[Decoded]:
    """Run the generators of B observations to completion, with one ``verify`` call per round.

    ``verify`` takes each observation's tokens to verify (None if it is finished) and returns predictions for
    each; surplus predictions are ignored.
    """
    done: list[Decoded | None] = [None] * len(waiting)
    wants: list[Fed | None] = [None] * len(waiting)

    def advance(index: int, answer: Predictions | None) -> None:
        try:
            wants[index] = waiting[index].send(answer)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            done[index], wants[index] = end.value, None

    for index in range(len(waiting)):
        advance(index, None)
    while any(want is not None for want in wants):
        asked = tuple(wants)
        for index, (want, (tokens, margins)) in enumerate(zip(asked, verify(asked), strict=True)):
            if want is not None:
                count = len(want[0])
                advance(index, (list(tokens[:count]), list(margins[:count])))
    return [result for result in done if result is not None]
