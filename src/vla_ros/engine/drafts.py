"""Temporal drafts: the previous action's tokens, verified many at once instead of decoded one by one.

Consecutive actions of a robot are alike, and a pass over seven rows costs what a pass over one costs: reading the
weights. So the previous answer is appended to the prompt as a draft. Greedy decoding picks, at each position, what
the network answers to the tokens before it; where the draft has these tokens, the answers to all of them are known
after one pass. The first answer that differs from the draft is still right (only the tokens before it matter), so
every pass yields one token at least: in the worst case as many passes as without drafts.

What a prefill says of drafted rows comes out of other kernels than decoding uses, with other rounding. Such an
answer counts only where its logit margin is at least ``guard``; below, the token is computed again by the decoding
kernels. Answers of a verifying pass need no guard: their rows have the bits of decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

Predictions = tuple[Sequence[int], Sequence[float]]
"""Tokens and their logit margins, one per row."""

PATIENCE = 4
"""Drafted actions in a row of which nothing was accepted, after which a session stops drafting for a while."""

REST = 16
"""Actions for which it does."""


@dataclass(frozen=True)
class DraftState:
    """What one session drafts from, and whether drafting pays at the moment.

    A drafted prefill costs nothing more than a plain one, but a pass that is verified needs the host between passes
    where plain decoding runs through: hence the back-off. A new instruction or episode begins with a new state.

    Attributes:
        tokens: The previous answer; empty before the first.
        failures: Drafted actions in a row of which nothing was accepted.
        resting: Actions for which nothing will be drafted.
    """

    tokens: tuple[int, ...] = ()
    failures: int = 0
    resting: int = 0

    def offer(self) -> tuple[int, ...] | None:
        """The draft of the next action; None where there is none."""
        return self.tokens if self.tokens and not self.resting else None

    def after(self, tokens: Sequence[int], accepted: int | None) -> DraftState:
        """The state behind an answer, of which a draft saved ``accepted`` tokens (None: nothing was drafted)."""
        if accepted is None:
            return DraftState(tuple(tokens), self.failures, max(0, self.resting - 1))
        failures = 0 if accepted else self.failures + 1
        if failures >= PATIENCE:
            return DraftState(tuple(tokens), PATIENCE - 1, REST)  # one try, then it rests again
        return DraftState(tuple(tokens), failures)


@dataclass(frozen=True)
class Decoded:
    """A greedy answer and how it came about.

    Attributes:
        tokens: The answer.
        margins: Logit margin of each token.
        accepted: Tokens after the first that were taken from the draft without a pass of their own.
        passes: Passes after the prefill.
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    accepted: int
    passes: int


def accept_prefix(guesses: Sequence[int], answers: Predictions, guard: float = 0.0) -> int:
    """How many of ``answers`` are certain.

    Answer 0 follows what is known. Answer i + 1 follows guess i, so it counts if guess i was answer i and answer i
    counted. An answer whose margin is below ``guard`` (or no number) ends the prefix; the first is exempt, it comes
    from the kernels that answer without drafts, too.

    Args:
        guesses: Tokens that were fed.
        answers: One more than there are guesses, or as many as wanted.
        guard: Least margin.
    """
    tokens, margins = answers
    count = 1
    while count < len(tokens) and count <= len(guesses) and guesses[count - 1] == tokens[count - 1]:
        if not margins[count] >= guard:
            break
        count += 1
    return count


Fed = tuple[list[int], int]
"""Tokens of a verifying pass, and how many certain tokens stand before the first of them."""


def verify_draft(draft: Sequence[int], first: Predictions, guard: float) -> Generator[Fed, Predictions, Decoded]:
    """The greedy answer, from what the prefill said and as few verifying passes as possible.

    A generator, so that several observations can share their passes: it yields what to verify (the newest certain
    token, then guesses), takes one answer for each token of that, and returns the result.

    Args:
        draft: Tokens that were appended to the prompt; one fewer than the answer has.
        first: What the prefill answered, as many as the answer has tokens.
        guard: Least margin for a drafted row of the prefill; infinity accepts none.
    """
    total = len(first[0])
    count = accept_prefix(draft, first, guard)
    tokens, margins = list(first[0][:count]), list(first[1][:count])
    # Beyond the first difference the answers follow a wrong token; they still guess better than an old action.
    guesses = list(first[0])
    saved, passes = count - 1, 0
    while len(tokens) < total:
        start = len(tokens)
        fed = [tokens[-1], *guesses[start : total - 1]]
        answers = yield fed, start - 1
        passes += 1
        good = accept_prefix(fed[1:], answers)
        tokens += answers[0][:good]
        margins += answers[1][:good]
        saved += good - 1
        guesses[start:] = answers[0]
    return Decoded(tuple(tokens), tuple(margins), saved, passes)


def verify_all(
    waiting: Sequence[Generator[Fed, Predictions, Decoded]],
    verify: Callable[[Sequence[Fed | None]], Sequence[Predictions]],
) -> list[Decoded]:
    """Run the generators of B observations to their ends, one ``verify`` for all that still wait.

    Args:
        waiting: From :func:`verify_draft`.
        verify: Given what each observation wants verified (None for those that are done), returns an answer for
            each; answers beyond what was fed are ignored.
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
