"""The table of the flywheel: success on the same held-out scenes, each policy against the weak one."""

from collections.abc import Mapping
from typing import Any

from vla_ros_lab.eval.intervals import mcnemar, paired, wilson

_HEAD = "| policy | success | 95 % interval | against the weak policy | 95 % interval | only weak, only this | p |"


def compare(weak: Mapping[int, bool], other: Mapping[int, bool]) -> dict[str, Any]:
    """Return the figures of a policy, given success by seed of the weak one and of it; differences in points."""
    seeds = sorted(weak.keys() & other.keys())
    lost = sum(weak[seed] and not other[seed] for seed in seeds)
    gained = sum(other[seed] and not weak[seed] for seed in seeds)
    won = sum(other[seed] for seed in seeds)
    low, high = paired(lost, gained, len(seeds))
    return {
        "episodes": len(seeds),
        "successes": won,
        "success": won / len(seeds),
        "interval": wilson(won, len(seeds)),
        "points": 100 * (gained - lost) / len(seeds),
        "points_interval": (100 * low, 100 * high),
        "only_weak": lost,
        "only_this": gained,
        "p": mcnemar(lost, gained),
    }


def markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the rows of :func:`compare`, by the policy's name, as a table; the first is the weak policy."""
    lines = [_HEAD, "| --- " * 7 + "|"]
    for number, (name, row) in enumerate(rows.items()):
        low, high = (100 * bound for bound in row["interval"])
        start = f"| {name} | {row['successes']} of {row['episodes']}, {100 * row['success']:.1f} % | "
        start += f"{low:.1f} to {high:.1f} | "
        low, high = row["points_interval"]
        pairs = f"{row['only_weak']}, {row['only_this']} | {row['p']:.2g} |"
        lines.append(
            start + (f"{row['points']:+.1f} | {low:+.1f} to {high:+.1f} | {pairs}" if number else "| | | |")
        )
    return "\n".join(lines) + "\n"
