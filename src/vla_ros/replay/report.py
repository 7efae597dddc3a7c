"""The HTML report of a replay: verdict, traces, errors, latency, and the moments at which it went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import to_yaml
from vla_ros.errors import VlaRosError
from vla_ros.replay import metrics
from vla_ros.replay import moments as moments_of
from vla_ros.replay.bag import Bag
from vla_ros.replay.moments import Moment
from vla_ros.replay.prepare import fit, pictures_at
from vla_ros.replay.result import Result
from vla_ros.replay.samples import Samples
from vla_ros.replay.topics import select
from vla_ros.report import charts, page
from vla_ros.report import images as embedded
from vla_ros.report.markup import Markup, significant, tag
from vla_ros.types import IntArray, UInt8Array

SHOWN_EPISODES = 8
WITHOUT_CHECKPOINT = ("expert", "hold")
POLICY, PALE = 1, 0


def write_report(result: Result, path: Path, overrides: Mapping[str, str] | None = None) -> None:
    """Write the report as one HTML file.

    Args:
        result: What was found.
        path: The file; its folder is made if need be.
        overrides: Role to topic, as given to the replay: the worst moments' pictures are read again.
    """
    page.save(path, render(result, overrides or {}))


def render(result: Result, overrides: Mapping[str, str]) -> str:
    """The report as HTML text."""
    figures = result.figures
    mode = "open loop" if figures["mode"] == "open_loop" else f"as it would have run, {figures['speed']:g} x"
    policy = figures["policy"]
    checkpoint = "" if policy["name"] in WITHOUT_CHECKPOINT else policy["checkpoint"]
    lead = (
        f"policy {policy['name']}{f' with {checkpoint}' if checkpoint else ''}, bags: {len(result.samples)}, {mode}"
    )
    compared = figures["frames"]["compared"] > 0
    worst = moments_of.worst(result.counted)
    body = [
        page.verdict(result.verdict.level, result.verdict.headline, result.verdict.reasons),
        page.tiles(tiles(figures)),
        page.section("What else it could be", tried(figures), TRIED) if "trials" in figures else "",
        page.section("Against guessing", against(figures), GUESSING) if compared else "",
        page.section("Predicted and recorded", traces(result), "Grey was recorded, blue is the policy's answer."),
        page.section("Where it errs", errors(result)) if compared else "",
        page.section("The worst moments", worst_moments(result, worst, overrides), MOMENTS) if worst else "",
        page.section("Gripper", gripper(figures)) if compared else "",
        page.section("Latency", latency(result)),
        page.section("Episodes", episodes(figures)),
        page.section("Frames, bags and losses", bags(figures)),
        page.section("Configuration and versions", configuration(result)),
    ]
    return page.document("vla_ros replay", lead, body, "Written by vla-ros replay --report.")


GUESSING = (
    "A figure alone says nothing. Zero does not move, mean gives the mean recorded action every time, hold last "
    "repeats the action that was recorded one step before: it is told the answer a moment later, so a policy that "
    "only sees pictures need not beat it. Skill is 1 - squared error / squared error of the guess: 1 is perfect, 0 "
    "is no better. Turns are frames at which the recorded motion sets off or turns by more than 30 degrees: hold "
    "last cannot know these. Lines are 95 % intervals over episodes."
)
TRIED = (
    "A few frames again with one thing changed. Skill is against the mean action; a change is named only where it "
    "at least halves the error and what comes out is good."
)
MOMENTS = "The picture is what the model saw, after orientation, crop and resize. Errors count in recorded spreads."


def tiles(figures: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Headline figures with their intervals."""

    def interval(key: str) -> str:
        ends = figures["intervals"][key]
        return f"{significant(ends[0])} to {significant(ends[1])}" if ends else "one episode: no interval"

    frames, total = figures["frames"], figures["latency_ms"].get("total", {})
    return [
        ("Direction cosine", significant(figures["direction_cosine"]), interval("direction_cosine")),
        ("Gripper F1", significant(figures["gripper_f1"]), interval("gripper_f1")),
        ("Mean absolute error", significant(figures["mae"]), interval("mae")),
        ("Latency", f"{significant(total.get('p50'))} ms", f"p50; p99 {significant(total.get('p99'))} ms"),
        ("Frames answered", str(frames["used"]), f"of {frames['received']}; {frames['compared']} compared"),
        ("Throughput", f"{significant(figures['throughput']['frames_per_second'])}/s", "frames, all in all"),
    ]


def against(figures: Mapping[str, Any]) -> Markup:
    """The three headline figures beside those of the baselines."""
    base = figures["baselines"]
    titles = {
        "direction_cosine": "Direction cosine (more is better)",
        "gripper_f1": "Gripper F1 (more is better)",
        "motion_mae": "Motion error (less is better)",
    }
    skill, turns = figures["skill"], figures["turns"]
    shown = []
    for key, title in titles.items():
        low, high = figures["intervals"].get(key) or (None, None)
        bars = [charts.Bar("policy", figures[key], low, high, POLICY)]
        bars += [charts.Bar(name.replace("_", " "), values[key], colour=PALE) for name, values in base.items()]
        shown.append(charts.bars(bars, title=title))
    if turns and turns["count"]:
        bars = [charts.Bar("policy", turns["direction_cosine"], colour=POLICY)]
        bars += [charts.Bar(name.replace("_", " "), turns["baselines"][name], colour=PALE) for name in base]
        shown.append(charts.bars(bars, title=f"Direction cosine at {turns['count']} turns (more is better)"))
    bars = []
    for name in base:
        low, high = skill["intervals"][name] or (None, None)
        bars.append(charts.Bar(f"over {name.replace('_', ' ')}", skill[name], low, high, POLICY))
    shown.append(charts.bars(bars, title="Skill (1 is perfect, 0 no better)"))
    return page.cards(shown)


def tried(figures: Mapping[str, Any]) -> Markup:
    """What was changed, and what came of it."""
    rows = [
        [
            trial["name"],
            str(trial["frames"]),
            significant(trial["direction_cosine"]),
            significant(trial["skill"]),
            "far better" if trial["better"] else "",
        ]
        for trial in figures["trials"]
    ]
    return page.table(("change", "frames", "direction cosine", "skill", ""), rows, numeric=(1, 2, 3))


def traces(result: Result) -> list[Markup]:
    """Every number of the action over time, episode by episode: the first, then the worst."""
    names = [item["name"] for item in result.figures["dimensions"]]
    scale = moments_of.scale_of(result.counted)
    listed = []
    for index, bag in enumerate(result.samples):
        score = moments_of.scores(result.counted[index], scale)
        for episode in np.unique(bag.episodes):
            rows = np.flatnonzero(bag.episodes == episode)
            listed.append((index, rows, float(np.nan_to_num(metrics.mean(score[rows], axis=None)))))
    chosen = [*listed[:1], *sorted(listed[1:], key=lambda item: -item[2])[: SHOWN_EPISODES - 1]]
    parts = [
        _episode_traces(result, result.samples[index], rows, names, opened=number == 0)
        for number, (index, rows, _) in enumerate(chosen)
    ]
    if len(listed) > len(chosen):
        text = f"The first and the {len(chosen) - 1} worst of {len(listed)} episodes; all are in the table below."
        parts.append(tag("p", text, class_="note"))
    return parts or [tag("p", "No frame was answered.", class_="note")]


def _episode_traces(result: Result, bag: Samples, rows: IntArray, names: list[str], *, opened: bool) -> Markup:
    time = (bag.times[rows] - bag.times[rows[0]]) * 1e-9
    found = []
    for column, name in enumerate(names):
        is_gripper = column == result.spec.gripper_index
        series = [
            charts.Series("recorded", time, bag.recorded[rows, column], PALE, step=is_gripper),
            charts.Series("policy", time, bag.predicted[rows, column], POLICY, step=is_gripper),
        ]
        found.append(charts.lines(series, title=name, x_label="time [s]", show_legend=column == 0))
    episode = int(bag.episodes[rows[0]])
    summary = f"{Path(bag.bag).name}, episode {episode + 1}: {bag.instructions[episode] or 'no instruction'}"
    return tag("details", [tag("summary", summary), page.cards(found)], open=opened)


def errors(result: Result) -> list[Markup]:
    """Error by dimension, over time, and as a table."""
    dimensions = result.figures["dimensions"]
    spread = [
        charts.Bar(item["name"], item["mae"] / item["recorded_std"] if item["recorded_std"] > 1e-6 else math.nan)
        for item in dimensions
    ]
    scale = moments_of.scale_of(result.counted)
    joined = np.concatenate([moments_of.scores(bag, scale) for bag in result.counted])
    over_time = charts.Series("error", result.frames.times, joined, 2)
    keys = ("mae", "rmse", "bias", "correlation", "saturated", "out_of_range")
    rows = [[item["name"], *(significant(item[key]) for key in keys)] for item in dimensions]
    header = ("number", "MAE", "RMSE", "bias", "correlation", "saturated", "out of range")
    motion = result.figures["motion"]
    conduct = [
        ("jerk, RMS", significant(motion["jerk_predicted"]), significant(motion["jerk_recorded"])),
        ("idle share", significant(motion["idle_predicted"]), significant(motion["idle_recorded"])),
    ]
    return [
        page.cards([charts.bars(spread, title="Error by number, in spreads of the recording")]),
        page.wide(
            charts.lines(
                [over_time],
                title="Error over time, in spreads",
                x_label="time [s], bags in a row",
                size=charts.WIDE,
            )
        ),
        page.table(header, rows, numeric=range(1, 7)),
        page.table(("motion", "policy", "recorded"), conduct, numeric=(1, 2)),
    ]


def worst_moments(result: Result, moments: list[Moment], overrides: Mapping[str, str]) -> Markup:
    """Ten cards: picture, what was predicted, what was recorded."""
    seen = _pictures(result, moments, overrides)
    names = [item["name"] for item in result.figures["dimensions"]]
    return page.cards([_moment(result.samples[m.bag], m, names, seen.get((m.bag, m.row), {})) for m in moments])


def _moment(bag: Samples, moment: Moment, names: list[str], images: Mapping[str, UInt8Array]) -> Markup:
    predicted, recorded = bag.predicted[moment.row], bag.recorded[moment.row]
    rows = [(name, significant(a), significant(b)) for name, a, b in zip(names, predicted, recorded, strict=True)]
    seconds = (bag.times[moment.row] - bag.times[0]) * 1e-9
    instruction = bag.instructions[int(bag.episodes[moment.row])]
    head = f"{Path(bag.bag).name} at {seconds:.2f} s, error {moment.score:.2f}"
    shown = [embedded.image(image, key if len(images) > 1 else "") for key, image in images.items()]
    side = tag("div", shown or [tag("p", "no picture", class_="note")])
    numbers = page.table(("", "policy", "recorded"), rows, numeric=(1, 2))
    return tag(
        "div", [tag("h3", head), tag("p", instruction, class_="note"), tag("div", [side, numbers], class_="moment")]
    )


def _pictures(
    result: Result, moments: list[Moment], overrides: Mapping[str, str]
) -> dict[tuple[int, int], dict[str, UInt8Array]]:
    """The prepared pictures of some moments, read from the bags once more; none for a bag that is gone."""
    found: dict[tuple[int, int], dict[str, UInt8Array]] = {}
    for index, samples in enumerate(result.samples):
        rows = {int(samples.times[m.row]): m.row for m in moments if m.bag == index}
        if not rows:
            continue
        try:
            with Bag(Path(samples.bag)) as bag:
                named = {"camera": samples.topics["camera"].replace(", ", ",")}
                selection = select(bag.topics, result.config, {**overrides, **named}, empty=bag.empty)
                config = fit(result.config, selection)
                prepared = pictures_at(bag, selection, config, result.spec, sorted(rows))
        except VlaRosError:
            continue
        found |= {(index, rows[time]): images for time, images in prepared.items()}
    return found


def gripper(figures: Mapping[str, Any]) -> Markup:
    """Accuracy, F1 and the timing of events."""
    item = figures["gripper"]
    events = item["events"]
    rows = [
        ("accuracy", significant(item["accuracy"])),
        ("F1 of closed", significant(item["f1"])),
        ("share of time closed: policy", significant(item["closed_predicted"])),
        ("share of time closed: recorded", significant(item["closed_recorded"])),
        ("openings and closings recorded", str(events["recorded"])),
        ("of these found within a second", str(events["matched"])),
        ("openings and closings predicted", str(events["predicted"])),
        ("delay, median [s]", significant(events["delay_s"]["p50"])),
    ]
    return page.table(("gripper", ""), rows, numeric=(1,))


def latency(result: Result) -> list[Markup]:
    """Percentiles by stage, histogram, course over time and, as it would have run, the frames' age."""
    figures = result.figures
    rows = [
        [stage, *(significant(values[key]) for key in ("p50", "p90", "p99"))]
        for stage, values in figures["latency_ms"].items()
    ]
    totals = [bag.stages_ms["total"] for bag in result.samples if "total" in bag.stages_ms]
    parts = [page.table(("stage", "p50 [ms]", "p90 [ms]", "p99 [ms]"), rows, numeric=(1, 2, 3))]
    if not totals:
        return parts
    joined = np.concatenate(totals)
    deadline = figures["deadline"]
    marks = {f"p{q}": float(np.nanpercentile(joined, q)) for q in (50, 99)}
    if deadline["period_ms"] < 3 * marks["p99"]:
        marks["period"] = deadline["period_ms"]
    shown = [charts.histogram(joined, title="One answer", x_label="ms", references=marks)]
    if figures["frame_age_ms"]["count"]:
        ages = np.concatenate([bag.age_ms for bag in result.samples])
        shown.append(charts.histogram(ages, title="Age of the frame behind each command", x_label="ms"))
    course = [charts.Series("latency", result.frames.times, joined, POLICY)]
    period = f"{deadline['period_ms']:.0f} ms"
    missed = f"{deadline['missed']} of {len(joined)} answers took longer than the period of {period}"
    return [
        *parts,
        page.cards(shown),
        page.wide(charts.lines(course, title="Latency over time [ms]", x_label="time [s]", size=charts.WIDE)),
        tag("p", f"{missed}. Each bag's first answer, which warms up, is left out of the table.", class_="note"),
    ]


def episodes(figures: Mapping[str, Any]) -> Markup:
    """Every episode with its figures."""
    header = ("bag", "instruction", "from [s]", "frames", "direction cosine", "gripper F1", "MAE")
    rows = [
        [
            Path(item["bag"]).name,
            item["instruction"] or "–",
            significant(item["start_s"]),
            str(item["frames"]),
            *(significant(item[key]) for key in ("direction_cosine", "gripper_f1", "mae")),
        ]
        for item in figures["episodes"]
    ]
    return page.table(header, rows, numeric=range(2, 7))


def bags(figures: Mapping[str, Any]) -> list[Markup]:
    """Topics, rule of time, counters and everything that was lost."""
    frames, truth = figures["frames"], figures["truth"]
    counters = {
        "received": frames["received"],
        "answered": frames["used"],
        "compared": frames["compared"],
        "skipped": frames["skipped"],
        "pictures prepared": frames["pictures_prepared"],
        **{f"dropped: {reason}": count for reason, count in frames["dropped"].items()},
        **{f"command refused: {reason}": count for reason, count in figures["commands"]["refused"].items()},
        **{f"command limited: {reason}": count for reason, count in figures["commands"]["limited"].items()},
        "compared with": ", ".join(truth["source"]),
        "rule of time": "; ".join(truth["meaning"]),
    }
    parts = [page.facts(counters)]
    for bag in figures["bags"]:
        lines = {**bag["topics"], **bag["left_out"]}
        lost = [tag("li", loss) for loss in bag["losses"]]
        parts.append(page.details(bag["path"], [page.facts(lines), tag("ul", lost)]))
        if lost:
            parts.append(page.verdict("warn", f"{bag['path']}: not everything could be read.", bag["losses"][:10]))
    return parts


def configuration(result: Result) -> list[Markup]:
    """Versions and options."""
    return [
        page.facts(result.figures["versions"]),
        page.details("Options", page.code(to_yaml(result.config, comments=False))),
    ]
