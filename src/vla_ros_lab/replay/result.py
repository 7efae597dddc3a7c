"""The result of a replay: verdict, JSON file, and the lines on the terminal."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_ros.config import Config, flatten
from vla_ros.contract.spec import PolicySpec
from vla_ros.files import save_text
from vla_ros_lab.replay import figures as figures_of
from vla_ros_lab.replay.evaluate import Outcome
from vla_ros_lab.replay.play import ReplayOptions
from vla_ros_lab.replay.samples import Samples, commanded, gather
from vla_ros_lab.replay.storage import BagError
from vla_ros_lab.replay.verdict import Verdict, judge
from vla_ros_lab.report.markup import significant
from vla_ros_lab.report.versions import versions


@dataclass(frozen=True)
class Result:
    """Figures, and everything else that the report shows."""

    figures: dict[str, Any]  # content of the JSON file, with NaN for missing figures
    verdict: Verdict
    samples: tuple[Samples, ...]  # one per bag, with the policy's values
    counted: tuple[Samples, ...]  # the same with gripper values as sent to the fingers, for the figures
    frames: Samples  # ``counted`` of all bags joined
    spec: PolicySpec  # meaning of the policy's values
    config: Config  # the node's options
    options: ReplayOptions  # how the bags were played


def make_result(outcomes: Sequence[Outcome], config: Config, options: ReplayOptions) -> Result:
    """Compute figures and verdict of all bags; raises BagError with the reasons if no bag could be played."""
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    samples = tuple(outcome.samples for outcome in outcomes if outcome.samples is not None)
    spec = next((outcome.spec for outcome in outcomes if outcome.spec is not None), None)
    if spec is None or not samples:
        raise BagError("\n".join(problems) or "no bag was played")
    figures = figures_of.summarize(samples, spec, config, options)
    counted = tuple(commanded(bag, spec.grippers, config.gripper) for bag in samples)
    frames = gather(counted)
    verdict = judge(figures, frames.predicted[frames.compared], frames.recorded[frames.compared], spec)
    level = "warn" if problems and verdict.level == "good" else verdict.level
    notes = sorted({outcome.note for outcome in outcomes if outcome.note})
    extra = (*(f"not played: {problem}" for problem in problems), *notes)
    verdict = Verdict(level, verdict.headline, (*verdict.reasons, *extra))
    figures |= {
        "verdict": verdict.to_json(),
        "not_played": problems,
        "policy": {
            "name": config.policy.name,
            "checkpoint": getattr(config.policy, "checkpoint", ""),
            "view": spec.view,
        },
        "config": flatten(config),
        "versions": versions(),
    }
    return Result(figures, verdict, samples, counted, frames, spec, config, options)


def write_json(result: Result, path: Path) -> None:
    """Write the figures atomically; NaN and infinity become null."""
    save_text(path, json.dumps(for_json(result.figures), indent=2, allow_nan=False) + "\n")


def for_json(value: Any) -> Any:
    """Return figures for JSON, in which NaN and infinity are null."""
    if isinstance(value, Mapping):
        return {str(key): for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_HEADLINES = {"direction_cosine": "direction cosine", "gripper_f1": "gripper F1"}
_HEADLINES |= {"motion_mae": "motion MAE", "mae": "MAE"}


def comparisons(figures: Mapping[str, Any]) -> list[tuple[str, float, Mapping[str, float], Sequence[float] | None]]:
    """Return the headline figures of the policy and the baselines.

    Each has a name, the policy's value, the baselines' values, and the 95 % interval of the policy's value or None.
    """
    base, turns, ends = figures["baselines"], figures["turns"], figures["intervals"]
    rows: list[tuple[str, float, Mapping[str, float], Sequence[float] | None]] = []
    for key, name in _HEADLINES.items():
        rows.append((name, figures[key], {guess: values[key] for guess, values in base.items()}, ends.get(key)))
    if turns and turns["count"]:
        rows.append((f"cosine, {turns['count']} turns", turns["direction_cosine"], turns["baselines"], None))
    return rows


def summary_lines(figures: Mapping[str, Any]) -> list[str]:
    frames, latency, base = figures["frames"], figures["latency_ms"].get("total"), figures["baselines"]
    skill = {name: figures["skill"][name] for name in base}
    columns = ["policy", *(name.replace("_", " ") for name in base)]
    several = len(figures["episodes"]) > 1
    lines = [
        f"{figures['verdict']['level'].upper()}: {figures['verdict']['headline']}",
        *(f"  - {reason}" for reason in figures["verdict"]["reasons"]),
        f"frames: {frames['received']} received, {frames['used']} used, {frames['compared']} compared, "
        f"{frames['skipped']} skipped, {sum(frames['dropped'].values())} dropped",
        f"{'':18}{''.join(f'{name:>12}' for name in columns)}   {'95 % interval' if several else '(one episode)'}",
    ]
    for name, own, others, ends in [*comparisons(figures), ("skill against", math.nan, skill, None)]:
        shown = "".join(f"{significant(value):>12}" for value in (own, *others.values()))
        lines.append(f"{name:18}{shown}" + (f"   {significant(ends[0])} to {significant(ends[1])}" if ends else ""))
    if latency:
        p50, p90, p99 = (significant(latency[key]) for key in ("p50", "p90", "p99"))
        rate = significant(figures["throughput"]["frames_per_second"])
        lines.append(f"latency: p50 {p50} ms, p90 {p90} ms, p99 {p99} ms; {rate} frames/s")
    return lines


def exceeds(figures: Mapping[str, Any], max_mae: float | None) -> bool:
    return max_mae is not None and not figures["mae"] <= max_mae
