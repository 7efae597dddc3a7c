"""The whole result of a replay: JSON file, exit status, and the lines on the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_ros.config import Config, flatten
from vla_ros.replay import figures as figures_of
from vla_ros.replay import samples as samples_of
from vla_ros.replay.evaluate import Outcome
from vla_ros.replay.frames import Frames, gather
from vla_ros.replay.play import Options
from vla_ros.replay.records import BagError
from vla_ros.replay.samples import Samples
from vla_ros.replay.verdict import Verdict, judge
from vla_ros.report.markup import significant
from vla_ros.report.versions import versions
from vla_ros.types import ActionSpec

GUESSES = ("zero", "hold_last", "mean_action")
"""The baselines in the order of tables."""


@dataclass(frozen=True)
class Result:
    """Figures and everything from which a report is made.

    Attributes:
        figures: Content of the JSON file; NaN where a figure does not exist.
        verdict: The judgement.
        samples: One per bag, as the policy answered.
        counted: The same with gripper numbers as they reach the fingers: what figures are made of.
        frames: All bags in one.
        spec: What the policy's numbers mean.
        config: The options.
        problems: Bags that gave nothing, and why.
    """

    figures: dict[str, Any]
    verdict: Verdict
    samples: tuple[Samples, ...]
    counted: tuple[Samples, ...]
    frames: Frames
    spec: ActionSpec
    config: Config
    problems: tuple[str, ...] = ()


def make_result(outcomes: Sequence[Outcome], config: Config, options: Options) -> Result:
    """Figures and verdict of all bags.

    Raises:
        BagError: No bag gave anything; the reasons are listed.
    """
    problems = tuple(outcome.problem for outcome in outcomes if outcome.problem)
    played = [(outcome.samples, outcome.spec) for outcome in outcomes if outcome.samples is not None]
    spec = next((spec for _, spec in played if spec is not None), None)
    if spec is None:
        raise BagError("\n".join(problems) or "no bag was played")
    samples = tuple(sample for sample, _ in played)
    summary = figures_of.summarize(
        samples, spec, config, speed=options.speed, every=options.every, tolerance_s=options.tolerance_s
    )
    counted = tuple(samples_of.commanded(bag, spec.gripper_index, config.gripper) for bag in samples)
    frames = gather(counted)
    rows = frames.compared
    verdict = judge(summary, frames.predicted[rows], frames.recorded[rows])
    notes = sorted({outcome.note for outcome in outcomes if outcome.note})
    if problems or notes:
        extra = (*(f"not played: {problem}" for problem in problems), *notes)
        level = "warn" if problems and verdict.level == "good" else verdict.level
        verdict = Verdict(level, verdict.headline, (*verdict.reasons, *extra))
    summary = {
        **summary,
        "verdict": verdict.to_json(),
        "not_played": list(problems),
        "policy": {"name": config.policy.name, "checkpoint": getattr(config.policy, "checkpoint", "")},
        "config": flatten(config),
        "versions": versions(),
    }
    return Result(summary, verdict, samples, counted, frames, spec, config, problems)


def write_json(result: Result, path: Path) -> None:
    """Write the figures; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    text = json.dumps(figures_of.jsonable(result.figures), indent=2, allow_nan=False)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def summary_lines(figures: Mapping[str, Any]) -> list[str]:
    """The result in a few lines for a terminal."""
    frames, latency = figures["frames"], figures["latency_ms"].get("total", {})
    base = figures["baselines"]
    intervals = "   95 % interval" if len(figures["episodes"]) > 1 else "   (one episode: no interval)"
    lines = [
        f"{figures['verdict']['level'].upper()}: {figures['verdict']['headline']}",
        *(f"  - {reason}" for reason in figures["verdict"]["reasons"]),
        f"frames: {frames['received']} received, {frames['used']} answered, {frames['compared']} compared, "
        f"{frames['skipped']} skipped, {sum(frames['dropped'].values())} dropped",
        f"{'':18}{'policy':>10}{'zero':>10}{'hold last':>11}{'mean':>10}{intervals}",
    ]
    table = (("direction_cosine", "direction cosine"), ("gripper_f1", "gripper F1"), ("motion_mae", "motion MAE"))
    for key, name in (*table, ("mae", "MAE")):
        values = [figures[key], *(base[kind][key] for kind in GUESSES)]
        lines.append(_line(name, values, figures["intervals"].get(key)))
    lines.append(_line("skill against", [math.nan, *(figures["skill"][kind] for kind in GUESSES)], None))
    turns = figures["turns"]
    if turns and turns["count"]:
        values = [turns["direction_cosine"], *(turns["baselines"][kind] for kind in GUESSES)]
        lines.append(_line("cosine at turns", values, None))
    if latency:
        lines.append(
            f"latency: p50 {significant(latency['p50'])} ms, p90 {significant(latency['p90'])} ms, "
            f"p99 {significant(latency['p99'])} ms; "
            f"{significant(figures['throughput']['frames_per_second'])} frames/s"
        )
    return lines


def _line(name: str, values: Sequence[float], ends: Sequence[float] | None) -> str:
    """One row of the table: the policy, then the three guesses."""
    shown = ["" if name == "skill against" and math.isnan(value) else significant(value) for value in values]
    interval = f"   {significant(ends[0])} to {significant(ends[1])}" if ends else ""
    return f"{name:18}{shown[0]:>10}{shown[1]:>10}{shown[2]:>11}{shown[3]:>10}{interval}"


def exceeds(figures: Mapping[str, Any], max_mae: float | None) -> bool:
    """True where ``--max-mae`` is not kept: the error is larger, or there is none to compare."""
    if max_mae is None:
        return False
    return math.isnan(figures["mae"]) or figures["mae"] > max_mae
