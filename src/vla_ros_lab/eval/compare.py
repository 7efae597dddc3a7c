"""Compares two results, paired by task and initial state."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from vla_ros.errors import ConfigError, printable
from vla_ros_lab.eval.intervals import mcnemar, wilson
from vla_ros_lab.eval.results import read_results

_LISTED = 50


def compare_results(first: Path, second: Path, console: Console) -> int:
    """Print both rates over the pairs, McNemar's exact p and the episodes that changed; return 0.

    Pairs of which one ended in an error are left out. Raises ConfigError if there is no pair.
    """
    a, b = read_results(first), read_results(second)
    both = sorted(a.keys() & b.keys())
    pairs = [(key, one, other) for key in both if (one := a[key]) is not None and (other := b[key]) is not None]
    if not pairs:
        raise ConfigError(f"{first} and {second} have no episode in common (task and initial state)")
    for path, won in ((first, sum(one for _, one, _ in pairs)), (second, sum(other for _, _, other in pairs))):
        low, high = wilson(won, len(pairs))
        rate = f"{100 * won / len(pairs):.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        console.print(f"{path}: {won} of {len(pairs)}, {rate}", markup=False, soft_wrap=True)
    lost = [key for key, one, other in pairs if one and not other]
    gained = [key for key, one, other in pairs if other and not one]
    left_out = len(a.keys() | b.keys()) - len(pairs)
    p = mcnemar(len(lost), len(gained))
    verdict = "a difference" if p < 0.05 else "no evidence of a difference"
    changed = f"changed: {len(lost)} only in the first, {len(gained)} only in the second"
    rest = f"{left_out} episodes without a pair or with an error"
    console.print(f"{changed}; McNemar's exact p = {p:.4g}: {verdict}; {rest}", soft_wrap=True)
    for mark, keys in (("lost", lost), ("gained", gained)):
        for task, state in keys[:_LISTED]:
            console.print(f"  {mark}: {escape(printable(task))}, state {state}", soft_wrap=True)
    return 0
