"""HTML report of episodes: rates with intervals, images with failures first, motion, every episode."""

import base64
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import Config, to_yaml
from vla_ros.contract.components import Component, parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros_lab.eval.results import Score, Summary, by_task, motion_of, summary_of
from vla_ros_lab.report import charts, images, page
from vla_ros_lab.report.markup import Markup, render, significant, tag
from vla_ros_lab.report.versions import versions
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.expert import ExpertPolicy

FEATURED = 24
"""Episodes shown with images and charts; a hundred would make a file that no phone opens."""

_COUNTS = ("episodes", "errors", "steps", "seconds", "held", "limited")
COLUMNS = ("task", "success", "95 % interval", *_COUNTS, "inference")
"""Headings of a summary."""

_TEXTS = {"wrong_object": "the wrong object was moved", "timeout": "time ran out", "no_command": "no command came"}
_DELTA = (("translation", "xyz"), ("rotation", ("roll", "pitch", "yaw")))


def task_rows(scores: Sequence[Score]) -> list[tuple[str, ...]]:
    """Return a row of :data:`COLUMNS` for each task and, if there are several, for all of them."""
    tasks = by_task(scores)
    tasks |= {"total": list(scores)} if len(tasks) > 1 else {}
    return [_row(task, summary_of(each)) for task, each in tasks.items()]


def _row(task: str, found: Summary) -> tuple[str, ...]:
    return (
        task,
        f"{100 * found.rate:.1f} %" if found.episodes > found.errors else "–",
        f"{100 * found.low:.1f} – {100 * found.high:.1f}",
        str(found.episodes),
        str(found.errors),
        significant(found.steps),
        significant(found.seconds),
        f"{100 * found.held:.1f} %",
        f"{100 * found.limited:.1f} %",
        f"{significant(found.inference_ms)} ms",
    )


def render_scores(
    scores: Sequence[Score], name: str, settings: Mapping[str, Any], published: str, config: Config | None
) -> str:
    """Return the report of an evaluation; ``config`` are the options of the node, if it ran in this process."""
    whole = summary_of(scores)
    limited, held, refused = (f"{100 * share:.2f} %" for share in (whole.limited, whole.held, whole.refused))
    counts = f"A limit changed {limited} of the steps, {held} were held and {refused} refused"
    reasons = [f"{whole.errors} episodes ended in an error and count neither way"] if whole.errors else []
    lead = f"{whole.episodes} episodes, {settings['mode'].replace('_', ' ')}"
    shown, *others = episodes(scores, [published, *reasons], config, counted=True)
    table = page.section("Tasks", page.table(COLUMNS, task_rows(scores)), f"{counts}; all others are the policy's.")
    body = [shown, table, *others, page.section("Settings and versions", page.facts({**settings, **versions()}))]
    return page.document(f"vla_ros eval: {name}", lead, body, "Written by vla-ros eval --report.")


def episodes(
    scores: Sequence[Score], reasons: Sequence[str], config: Config | None, *, counted: bool
) -> list[Markup]:
    """Return the sections on episodes: outcome and headline figures, images, every episode, motion.

    ``counted`` shows how many steps were held and limited, which only a node in this process tells.
    """
    shown = featured(scores)
    left_out = len(scores) - len(shown)
    note = f"{left_out} more are in the table below. " if left_out else ""
    sections = [
        render([banner(scores, reasons), page.tiles(headline(scores))]),
        page.section("Episodes", page.cards([card(score) for score in shown]), f"{note}Failures first."),
        page.section("All episodes", episode_table(scores, counted=counted)),
    ]
    moved = [score for score in shown if score.trace.actions.size]
    if config is not None and moved:
        details = [motion(score, config, opened=index == 0) for index, score in enumerate(moved)]
        about = "The policy's actions before limits and kinematics, and the paths of the tools."
        sections.append(page.section("Actions and motion", details, about))
    return sections


def banner(scores: Sequence[Score], reasons: Sequence[str]) -> Markup:
    whole = summary_of(scores)
    failures = Counter(score.reason for score in scores if score.success is False)
    texts = [f"{number} x {_TEXTS[reason]}" for reason, number in sorted(failures.items()) if reason in _TEXTS]
    level = "good" if whole.rate >= 0.9 else "warn" if whole.rate >= 0.5 else "bad"
    headline = f"{whole.successes} of {whole.episodes - whole.errors} episodes succeeded."
    return page.verdict(level, headline, list(filter(None, [*texts, *reasons])))


def headline(scores: Sequence[Score]) -> list[tuple[str, str, str]]:
    """Return the title, value and remark of each headline figure that is known."""
    whole, steps, moved = summary_of(scores), [score.steps for score in scores if score.success], motion_of(scores)
    interval = f"95 % interval {100 * whole.low:.1f} to {100 * whole.high:.1f} % (Wilson)"
    median = significant(float(np.median(steps)) if steps else None)
    found = [("Success", f"{100 * whole.rate:.0f} %", interval), ("Steps to success", median, "median")]
    if (stalled := moved["stalled_share"]) is not None:
        gap = f"longest gap {significant(moved['longest_gap_ms'])} ms"
        found.append(("Stalled", f"{100 * stalled:.1f} %", gap))
    if (ratio := moved["seam_ratio"]) is not None:
        found.append(("Seams", significant(ratio), "p99 acceleration relative to within chunks"))
    if whole.inference_ms == whole.inference_ms:
        found.append(("Inference", f"{significant(whole.inference_ms)} ms", "median"))
    return found


def featured(scores: Sequence[Score]) -> list[Score]:
    """Return the episodes to show, failures first: all with a video if any has one, at most :data:`FEATURED`."""
    filmed = [score for score in scores if score.video and Path(score.video).exists()]
    return sorted(filmed or scores, key=lambda score: (score.success is None, bool(score.success)))[:FEATURED]


def outcome(score: Score) -> Markup:
    name, level = (score.reason or "failure").replace("_", " "), "bad"
    if score.success is not False:
        name, level = ("error", "warn") if score.success is None else ("success", "good")
    return tag("span", name, class_=f"flag {level}")


def card(score: Score) -> Markup:
    """Return an episode's video or images, with its instruction and outcome."""
    trace = score.trace
    moved = f", moved {score.touched} instead of {trace.target}" if score.touched else ""
    caption = f"{score.task} {score.state}, {score.steps} steps{moved}"
    heading = tag("h3", [f"{score.instruction or score.task} ", outcome(score)])
    if not score.video:
        return tag("div", [heading, images.animation(trace.images, rate_hz=3.0, caption=caption)])
    data = base64.b64encode(Path(score.video).read_bytes()).decode()
    film = tag("video", "", src=f"data:video/mp4;base64,{data}", controls=True, preload="metadata", width=256)
    return tag("figure", [heading, film, tag("figcaption", caption)])


def episode_table(scores: Sequence[Score], *, counted: bool) -> Markup:
    header = ["task", "state", "instruction", "outcome", "steps", *(("held", "limited") if counted else ()), "note"]
    rows = []
    for score in scores:
        counts = (score.held, score.limited) if counted else ()
        note = score.error or (f"moved {score.touched} instead" if score.touched else "–")
        rows.append((score.task, score.state, score.instruction, outcome(score), score.steps, *counts, note))
    return page.table(header, rows)


def action_of(config: Config) -> tuple[Component, ...]:
    """Return the parts of the actions of ``config``'s policy, as far as its options state them."""
    if config.policy.name == "expert":
        return ExpertPolicy(config).spec.action
    stated = config.features.action
    return parse_components(" + ".join(stated), action=True) if stated else PolicySpec().action


def motion(score: Score, config: Config, *, opened: bool) -> Markup:
    """Return the charts of an episode: the parts of the actions, the tool positions and the fingers."""
    trace, parts = score.trace, list(_groups(action_of(config)))
    actions, arms = trace.actions.T, [one.name for one in config.arms]
    seconds = score.seconds / max(1, score.steps)
    if sum(len(names) for _, names in parts) != len(actions):  # the parts of another policy's actions are unknown
        parts = [("action", [str(index + 1) for index in range(len(actions))])]
    columns = iter(actions)
    shown = [(title, names, list(itertools.islice(columns, len(names)))) for title, names in parts if names]
    if len(trace.tips):
        tips = zip(arms, np.moveaxis(trace.tips, 1, 0), strict=True)
        shown += [(f"{name}: tool position [m]", "xyz", list(tip.T)) for name, tip in tips]
        shown.append(("finger opening [mm]", arms, list(1e3 * trace.fingers.T)))
    plots = []
    for title, names, rows in shown:
        series = [
            charts.Series(name, seconds * np.arange(len(row)), row, index + 1, step="gripper" in title)
            for index, (name, row) in enumerate(zip(names, rows, strict=True))
        ]
        plots.append(charts.lines(series, title=title, x_label="time [s]"))
    summary = tag("summary", f"{score.task} {score.state}: {score.instruction}")
    return tag("details", [summary, page.cards(plots)], open=opened)


def _groups(action: Sequence[Component]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield, for each chart of an action, its title and the names of the values it shows."""
    for part in action:
        if part.quantity == "tip_delta":
            yield from ((f"{part.arm}: {what} per step", names) for what, names in _DELTA)
        else:
            size = part.size(len(arm.JOINT_NAMES))
            yield str(part), "xyz" if size == 3 else [str(index + 1) for index in range(size)]


def options(config: Config) -> Markup:
    return page.details("Options of the policy node", tag("pre", tag("code", to_yaml(config, comments=False))))
