"""HTML report of ``vla-ros demo``: images and motion of the episodes, latency, frames and configuration."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vla_ros.config import to_yaml
from vla_ros.config.checkpoints import SHIPPED
from vla_ros.contract.components import Component
from vla_ros.files import save_text
from vla_ros.types import FloatArray
from vla_ros_lab.report import charts, images, page
from vla_ros_lab.report.markup import Markup, significant, tag
from vla_ros_lab.report.versions import versions
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.results import DemoResult, EpisodeResult

EPISODES_WITH_IMAGES = 24
"""Episodes shown with images; a hundred would make a file that no phone opens."""

_LATENCY_NOTES = (
    "Measured in the policy node, without warm-up.",
    "wait, frame_age and total are in simulated time; the other stages were measured on this machine, and inference"
    " includes the added delay.",
)
_DELTA = (("translation", "xyz"), ("rotation", ("roll", "pitch", "yaw")))


def write(result: DemoResult, path: Path) -> None:
    save_text(path, render_report(result))


def render_report(result: DemoResult) -> str:
    policy = result.config.policy.name
    # The names of checkpoints that ship with the package say little in a heading.
    name = policy if result.checkpoint in ("", *SHIPPED) else result.checkpoint
    lead = f"{len(result.episodes)} episodes, policy {policy}, {result.mode.replace('_', ' ')}"
    chosen = featured(result.episodes)
    left_out = len(result.episodes) - len(chosen)
    note = f"{left_out} more are in the table below; failures are shown first." if left_out else ""
    body = [
        banner(result),
        page.tiles(headline(result)),
        page.section("Episodes", page.cards([episode_card(episode) for episode in chosen]), note),
        page.section("All episodes", episode_table(result.episodes)),
        page.section(
            "Actions and motion",
            [motion(episode, result, opened=index == 0) for index, episode in enumerate(chosen)],
            "The policy's actions before limits and kinematics, and the paths of the tools.",
        ),
        page.section("Latency", latency(result), _LATENCY_NOTES[result.mode != "real_time"]),
        page.section("Frames", page.facts(result.frames)),
        page.section("Plan", page.facts(result.execution), "Counted by the policy node, also between episodes."),
        page.section("Configuration and versions", configuration(result)),
    ]
    return page.document(f"vla_ros demo: {name}", lead, body, "Written by vla-ros demo --report.")


def banner(result: DemoResult) -> Markup:
    won = sum(episode.success for episode in result.episodes)
    failures = Counter(episode.reason for episode in result.episodes if not episode.success)
    texts = {
        "wrong_object": "the wrong object was moved",
        "timeout": "time ran out",
        "no_command": "the policy node sent no command",
    }
    reasons = [f"{number} x {texts.get(reason, reason)}" for reason, number in sorted(failures.items())]
    reasons += [f"{name} = {value}: a control experiment" for name, value in result.controls.items()]
    level = "good" if result.success_rate >= 0.9 else ("warn" if result.success_rate >= 0.5 else "bad")
    return page.verdict(level, f"{won} of {len(result.episodes)} episodes succeeded.", reasons)


def headline(result: DemoResult) -> list[tuple[str, str, str]]:
    steps = [episode.steps for episode in result.episodes if episode.success]
    # In simulated time, only what was measured on this machine says something.
    name, stage = ("Latency", "total") if result.mode == "real_time" else ("Inference", "inference")
    motion, frames, spent = result.motion, result.frames, result.latency_ms.get(stage, {})
    tiles = [
        ("Success", f"{100 * result.success_rate:.0f} %", f"wrong object {100 * result.wrong_object_rate:.0f} %"),
        ("Steps to success", significant(float(np.median(steps)) if steps else None), "median"),
    ]
    if motion["stalled_share"] is not None:
        gap = f"longest gap {significant(motion['longest_gap_ms'])} ms"
        tiles.append(("Stalled", f"{100 * motion['stalled_share']:.1f} %", gap))
    if motion["seam_ratio"] is not None:
        tiles.append(("Seams", significant(motion["seam_ratio"]), "p99 acceleration relative to within chunks"))
    if spent:
        tiles.append((name, f"{significant(spent['p50'])} ms", f"p50; p99 {significant(spent['p99'])} ms"))
    if frames:
        dropped = ", ".join(f"{reason} {count}" for reason, count in frames["dropped"].items()) or "none"
        tiles.append(("Frames used", str(frames["used"]), f"of {frames['received']} received, dropped: {dropped}"))
    return [*tiles, ("Wall time", f"{significant(result.wall_s)} s", f"camera {significant(result.rate_hz)} Hz")]


def featured(episodes: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """Return the episodes to show with images: all, or :data:`EPISODES_WITH_IMAGES` with failures first."""
    if len(episodes) <= EPISODES_WITH_IMAGES:
        return list(episodes)
    return sorted(episodes, key=lambda episode: episode.success)[:EPISODES_WITH_IMAGES]


def outcome(episode: EpisodeResult) -> Markup:
    return tag("span", episode.reason.replace("_", " "), class_=f"flag {'good' if episode.success else 'bad'}")


def episode_card(episode: EpisodeResult) -> Markup:
    """Return the images of an episode as an animation, with its instruction and outcome."""
    moved = f", moved {episode.touched} instead of {episode.target}" if episode.touched else ""
    caption = f"seed {episode.seed}, {episode.steps} steps{moved}"
    shown = images.animation(episode.images, rate_hz=3.0, caption=caption)
    return tag("div", [tag("h3", [f"{episode.instruction} ", outcome(episode)]), shown])


def episode_table(episodes: Sequence[EpisodeResult]) -> Markup:
    rows = [(one.seed, one.instruction, outcome(one), one.steps, one.touched or "–") for one in episodes]
    return page.table(("seed", "instruction", "outcome", "steps", "moved instead"), rows)


def motion(episode: EpisodeResult, result: DemoResult, *, opened: bool) -> Markup:
    """Return the charts of an episode: the parts of the actions, the tool positions and the fingers."""
    actions = episode.actions.T
    known = groups(result.action)
    if sum(len(names) for _, names in known) != len(actions):  # the parts of another policy's actions are unknown
        known = [("action", [str(index + 1) for index in range(len(actions))])]
    columns = iter(actions)
    parts = [
        _chart(title, names, list(itertools.islice(columns, len(names))), result) for title, names in known if names
    ]
    for name, tip in zip(result.arms, np.moveaxis(episode.tips, 1, 0), strict=True):
        parts.append(_chart(f"{name}: tool position [m]", "xyz", tip.T, result))
    parts.append(_chart("finger opening [mm]", result.arms, 1e3 * episode.fingers.T, result))
    summary = tag("summary", f"seed {episode.seed}: {episode.instruction}")
    return tag("details", [summary, page.cards(parts)], open=opened)


def groups(action: Sequence[Component]) -> list[tuple[str, Sequence[str]]]:
    """Return, for each chart of an action, its title and the names of the values it shows."""
    groups: list[tuple[str, Sequence[str]]] = []
    for part in action:
        if part.quantity == "tip_delta":
            groups += [(f"{part.arm}: {what} per step", names) for what, names in _DELTA]
        else:
            size = part.size(len(arm.JOINT_NAMES))
            groups.append((str(part), "xyz" if size == 3 else [str(index + 1) for index in range(size)]))
    return groups


def _chart(title: str, names: Sequence[str], rows: Sequence[FloatArray] | FloatArray, result: DemoResult) -> Markup:
    series = [
        charts.Series(name, np.arange(len(row)) / result.rate_hz, row, index + 1, step="gripper" in title)
        for index, (name, row) in enumerate(zip(names, rows, strict=True))
    ]
    return charts.lines(series, title=title, x_label="time [s]")


def latency(result: DemoResult) -> list[Markup]:
    """Return the table of percentiles, and a histogram for each stage with individual measurements."""
    rows = [(stage, values.get("p50"), values.get("p99")) for stage, values in result.latency_ms.items()]
    histograms = [
        charts.histogram(samples, title=stage, x_label="ms") for stage, samples in result.latency_samples_ms.items()
    ]
    return [page.table(("stage", "p50 [ms]", "p99 [ms]"), rows), page.cards(histograms)]


def configuration(result: DemoResult) -> list[Markup]:
    run = {
        "policy": result.config.policy.name,
        "arms": ", ".join(result.arms),
        "actions": " + ".join(map(str, result.action)),
        "checkpoint": result.checkpoint or "–",
        "mode": result.mode,
        "schedule": result.config.control.schedule,
        "delay": f"{result.config.control.inject_delay_ms:g} ms",
        "first seed": result.seed,
    }
    options = tag("pre", tag("code", to_yaml(result.config, comments=False)))
    return [page.facts({**run, **versions()}), page.details("Options of the policy node", options)]
