"""Intervals and tests for success rates."""

import math

_Z = 1.959963984540054  # 97.5th percentile of the normal distribution


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a success rate (Wilson 1927, not corrected); (0, 1) without trials.

    Unlike rate +- 1.96 standard errors, it stays within 0 and 1 and has a width at 0 and at ``trials`` successes.
    """
    if not trials:
        return 0.0, 1.0
    rate, square = successes / trials, _Z**2 / trials
    middle = (rate + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials))
    low = 0.0 if successes == 0 else middle - half
    return low, 1.0 if successes == trials else middle + half


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p of McNemar's exact test, given the pairs in which only one of the two succeeded."""
    changed = only_first + only_second
    tail: int = sum(math.comb(changed, count) for count in range(min(only_first, only_second) + 1))
    return min(1.0, float(2 * tail / 2**changed))


def paired(only_first: int, only_second: int, pairs: int) -> tuple[float, float]:
    """Return the 95 % interval of the second's success rate minus the first's (Bonett and Price 2012).

    Given are the pairs in which only one of the two succeeded, and the number of all ``pairs``.
    """
    first, second = ((count + 1) / (pairs + 2) for count in (only_first, only_second))
    half = _Z * math.sqrt((first + second - (second - first) ** 2) / (pairs + 2))
    return max(-1.0, second - first - half), min(1.0, second - first + half)
