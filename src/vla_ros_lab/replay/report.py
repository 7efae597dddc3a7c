"""The HTML report of a replay: verdict, actions over time, errors, latency, and the worst moments."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vla_ros.config import to_yaml
from vla_ros.errors import ImageError
from vla_ros.files import save_text
from vla_ros.types import FloatArray, IntArray, UInt8Array
from vla_ros.vision.preprocess import Preprocessor, process
from vla_ros_lab.replay import metrics
from vla_ros_lab.replay.prepare import read_again
from vla_ros_lab.replay.result import Result, comparisons
from vla_ros_lab.replay.samples import Samples
from vla_ros_lab.report import charts, images, page
from vla_ros_lab.report.markup import Markup, significant, tag

SHOWN_EPISODES, SHOWN_MOMENTS = 8, 10
APART_NS = 500_000_000
_POLICY, GREY = 1, 0

BASELINES = (
    "zero does not move; mean action repeats the mean recorded action; hold last repeats the action recorded one "
    "step before, which a policy does not receive and need not beat. Skill is 1 - squared error / squared error of "
    "the baseline: 1 is perfect, 0 is no better. At a turn, the recorded motion starts or turns by more than 30 "
    "degrees, unknown to hold last. Except for errors, larger is better. Lines are 95 % intervals over episodes."
)
TRIED = (
    "One option changed, on a few frames. Skill is against the mean action; a change is recommended only if it at "
    "least halves the error and the result is good."
)
MOMENTS = "Images after orientation, crop and resize; errors in standard deviations of the recorded actions."


class WorstFrame(NamedTuple):
    """A frame: the index of its bag, its row in the samples, its error from :func:`frame_errors`."""

    bag: int
    row: int
    error: float


def frame_errors(bags: Sequence[Samples]) -> list[FloatArray]:
    """Return, for each bag, each frame's mean of |error| / standard deviation over the dimensions, [F].

    NaN without a recorded action; dimensions that hardly vary do not count.
    """
    spread = np.nan_to_num(metrics.std(np.concatenate([bag.recorded for bag in bags])))
    scale = np.where(spread > 1e-6, spread, np.inf)
    return [metrics.mean(np.abs(bag.predicted - bag.recorded) / scale, axis=1) for bag in bags]


def worst(bags: Sequence[Samples], errors: Sequence[FloatArray]) -> list[WorstFrame]:
    """Return the frames with the largest errors, worst first, at least half a second apart within a bag."""
    wrong = [np.flatnonzero(of_bag > 0).tolist() for of_bag in errors]
    moments = [WorstFrame(bag, row, errors[bag][row]) for bag, rows in enumerate(wrong) for row in rows]
    chosen: list[WorstFrame] = []
    for moment in sorted(moments, key=lambda each: -each.error):
        times = bags[moment.bag].times
        near = [other.row for other in chosen if other.bag == moment.bag]
        if (np.abs(times[near] - times[moment.row]) > APART_NS).all():
            chosen.append(moment)
        if len(chosen) == SHOWN_MOMENTS:
            break
    return chosen


def write_report(result: Result, path: Path) -> None:
    """Write the report as one HTML file, with images of the worst moments, which are read from the bags again."""
    save_text(path, _render(result))


def _render(result: Result) -> str:
    figures, verdict = result.figures, result.verdict
    mode = "open loop" if figures["mode"] == "open_loop" else f"as it would have run, {figures['speed']:g} x"
    name, checkpoint = figures["policy"]["name"], figures["policy"]["checkpoint"]
    name += f" with {checkpoint}" if checkpoint else ""
    name += f", view {figures['policy']['view']}" if figures["policy"]["view"] else ""
    errors = frame_errors(result.counted)
    moments = worst(result.counted, errors)
    body = [page.verdict(verdict.level, verdict.headline, verdict.reasons), page.tiles(_tiles(figures))]
    if "trials" in figures:
        body.append(page.section("Other settings", _tried(figures), TRIED))
    if figures["frames"]["compared"]:
        body.append(page.section("Compared with baselines", _against(figures), BASELINES))
    note = "Grey was recorded, blue is the policy's action."
    body.append(page.section("Predicted and recorded", _traces(result, errors), note))
    if figures["frames"]["compared"]:
        body.append(page.section("Errors", _error_charts(result, errors)))
        if moments:
            body.append(page.section("The worst moments", _worst_moments(result, moments), MOMENTS))
        body.append(page.section("Gripper", page.facts(figures["gripper"])))
    options = page.details("Options", tag("pre", tag("code", to_yaml(result.config, comments=False))))
    body += [
        page.section("Latency", _latency(result)),
        page.section("Episodes", _episodes(figures)),
        page.section("Frames, bags and losses", bags(figures)),
        page.section("Configuration and versions", [page.facts(figures["versions"]), options]),
    ]
    lead = f"policy {name}, bags: {len(result.samples)}, {mode}"
    return page.document("vla_ros replay", lead, body, "Written by vla-ros replay --report.")


def _tiles(figures: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    def headline(label: str, key: str) -> tuple[str, str, str]:
        ends = figures["intervals"][key]
        interval = f"{significant(ends[0])} to {significant(ends[1])}" if ends else "one episode: no interval"
        return label, significant(figures[key]), interval

    frames, total = figures["frames"], figures["latency_ms"].get("total", {})
    return [
        headline("Direction cosine", "direction_cosine"),
        headline("Gripper F1", "gripper_f1"),
        headline("Mean absolute error", "mae"),
        ("Latency", f"{significant(total.get('p50'))} ms", f"p50; p99 {significant(total.get('p99'))} ms"),
        ("Frames used", str(frames["used"]), f"of {frames['received']}; {frames['compared']} compared"),
        ("Throughput", f"{significant(figures['throughput']['frames_per_second'])}/s", "frames, by wall time"),
    ]


def _against(figures: Mapping[str, Any]) -> Markup:
    shown, skill = [], figures["skill"]
    for title, value, others, ends in comparisons(figures):
        guesses = [charts.Bar(name.replace("_", " "), other, colour=GREY) for name, other in others.items()]
        shown.append(charts.bars([charts.Bar("policy", value, *ends or (None, None)), *guesses], title=title))
    spans = {name: skill["intervals"][name] or (None, None) for name in figures["baselines"]}
    bars = [charts.Bar(f"over {name.replace('_', ' ')}", skill[name], *each) for name, each in spans.items()]
    return page.cards([*shown, charts.bars(bars, title="Skill (1 is perfect, 0 no better)")])


def _tried(figures: Mapping[str, Any]) -> Markup:
    trials = [{**trial, "better": "far better" if trial["better"] else ""} for trial in figures["trials"]]
    columns = {"change": "name", "frames": "frames", "direction cosine": "direction_cosine", "skill": "skill"}
    return page.mapped(trials, {**columns, "": "better"})


def _traces(result: Result, errors: Sequence[FloatArray]) -> list[Markup]:
    listed = [
        (bag, rows, float(np.nan_to_num(metrics.mean(error[rows], axis=None))))
        for bag, error in zip(result.samples, errors, strict=True)
        for rows in (np.flatnonzero(bag.episodes == episode) for episode in np.unique(bag.episodes))
    ]
    chosen = [*listed[:1], *sorted(listed[1:], key=lambda item: -item[2])[: SHOWN_EPISODES - 1]]
    parts = [_episode_traces(result, bag, rows, opened=n == 0) for n, (bag, rows, _) in enumerate(chosen)]
    if len(listed) > len(chosen):
        text = f"The first and the {len(chosen) - 1} worst of {len(listed)} episodes; all are in the table below."
        parts.append(tag("p", text, class_="note"))
    return parts or [tag("p", "No frame was used.", class_="note")]


def _episode_traces(result: Result, bag: Samples, rows: IntArray, *, opened: bool) -> Markup:
    time = bag.seconds[rows] - bag.seconds[rows[0]]
    plots = []
    for column, name in enumerate(_names(result)):
        step = column in result.spec.grippers
        series = [
            charts.Series("recorded", time, bag.recorded[rows, column], GREY, step),
            charts.Series("policy", time, bag.predicted[rows, column], _POLICY, step),
        ]
        plots.append(charts.lines(series, title=name, x_label="time [s]", show_legend=column == 0))
    episode = int(bag.episodes[rows[0]])
    summary = f"{Path(bag.bag).name}, episode {episode + 1}: {bag.instructions[episode] or 'no instruction'}"
    return tag("details", [tag("summary", summary), page.cards(plots)], open=opened)


def _names(result: Result) -> list[str]:
    return [item["name"] for item in result.figures["dimensions"]]


def _error_charts(result: Result, errors: Sequence[FloatArray]) -> list[Markup]:
    dimensions, motion = result.figures["dimensions"], result.figures["motion"]
    known = [(one["name"], one["mae"], max(one["recorded_std"], 0.0)) for one in dimensions]
    spread = [charts.Bar(name, mae / std if std > 1e-6 else math.nan) for name, mae, std in known]
    over_time = charts.Series("error", result.frames.seconds, np.concatenate(errors), _POLICY + 1)
    columns = {"number": "name", "MAE": "mae", "RMSE": "rmse", "bias": "bias", "correlation": "correlation"}
    columns |= {"saturated": "saturated", "out of range": "out_of_range"}
    return [
        page.cards([charts.bars(spread, title="Error by dimension, in recorded standard deviations")]),
        _wide(over_time, "Error over time, in standard deviations", "time [s], one bag after another"),
        page.mapped(dimensions, columns),
        page.facts(motion),
    ]


def _wide(series: charts.Series, title: str, x_label: str) -> Markup:
    lines = charts.lines([series], title=title, x_label=x_label, size=charts.WIDE)
    return tag("div", tag("div", lines, class_="wide"), class_="card")


def _worst_moments(result: Result, moments: Sequence[WorstFrame]) -> Markup:
    seen = images_of(result, moments)
    return page.cards([_moment(result, moment, seen.get((moment.bag, moment.row), {})) for moment in moments])


def _moment(result: Result, moment: WorstFrame, seen: Mapping[str, UInt8Array]) -> Markup:
    bag, row = result.samples[moment.bag], moment.row
    rows = list(zip(_names(result), bag.predicted[row].tolist(), bag.recorded[row].tolist(), strict=True))
    head = f"{Path(bag.bag).name} at {bag.seconds[row]:.2f} s, error {moment.error:.2f}"
    shown = [images.image(image, key if len(seen) > 1 else "") for key, image in seen.items()]
    side = tag("div", shown or [tag("p", "no image", class_="note")])
    numbers = page.table(("", "policy", "recorded"), rows)
    instruction = tag("p", bag.instructions[int(bag.episodes[row])], class_="note")
    return tag("div", [tag("h3", head), instruction, tag("div", [side, numbers], class_="moment")])


def images_of(result: Result, moments: Sequence[WorstFrame]) -> dict[tuple[int, int], dict[str, UInt8Array]]:
    """Map (bag, row) to the policy's input images, uint8 [H, W, 3], by key."""
    images = {}
    for index in {moment.bag for moment in moments}:
        rows = np.array([moment.row for moment in moments if moment.bag == index])
        for frame in read_again(result.samples[index], rows, result.config, result.options.topics):
            camera = frame.config.camera
            preprocess = Preprocessor(camera, result.spec)
            sources = {one.key: one.source for one in result.spec.images if one.source in camera.keys}
            cameras = {key: camera.keys.index(source) for key, source in sources.items()}
            with contextlib.suppress(ImageError):
                sent = {key: (at, frame.images[at]) for key, at in cameras.items()}
                shown = {key: process(preprocess(cdr, at)) for key, (at, cdr) in sent.items() if cdr}
                images[index, frame.row] = shown
    return images


def _latency(result: Result) -> list[Markup]:
    """Return latency percentiles by stage, the distribution, and the latency over time.

    Includes the frames' age unless in open loop.
    """
    figures, deadline = result.figures, result.figures["deadline"]
    stages = [{"stage": stage, **values} for stage, values in figures["latency_ms"].items()]
    parts = [page.mapped(stages, {"stage": "stage", **{f"{p} [ms]": p for p in ("p50", "p90", "p99")}})]
    totals = result.frames.stages_ms.get("total")
    if totals is None:
        return parts
    period = deadline["period_ms"]
    marks = {"period": period} if period < 3 * np.nanpercentile(totals, 99) else {}
    shown = [charts.histogram(totals, title="One inference step", x_label="ms", references=marks)]
    if figures["frame_age_ms"]["count"]:
        title = "Age of each command's frame"
        shown.append(charts.histogram(result.frames.age_ms, title=title, x_label="ms"))
    missed = f"{deadline['missed']} of {len(totals)} inference steps took longer than the period, {period:.0f} ms."
    over_time = charts.Series("latency", result.frames.seconds, totals, _POLICY)
    parts += [page.cards(shown), _wide(over_time, "Latency over time [ms]", "time [s]")]
    note = f"{missed} The table leaves out each bag's first step, which warms up."
    return [*parts, tag("p", note, class_="note")]


def _episodes(figures: Mapping[str, Any]) -> Markup:
    shown = [(item, Path(item["bag"]).name, item["instruction"] or "–") for item in figures["episodes"]]
    rows = [{**item, "bag": bag, "instruction": instruction} for item, bag, instruction in shown]
    columns = {"bag": "bag", "instruction": "instruction", "from [s]": "start_s", "frames": "frames"}
    columns |= {"direction cosine": "direction_cosine", "gripper F1": "gripper_f1", "MAE": "mae"}
    return page.mapped(rows, columns)


def bags(figures: Mapping[str, Any]) -> list[Markup]:
    """Return counters and pairing rules, and each bag's topics, ignored messages and losses."""
    parts = [page.facts({key: figures[key] for key in ("frames", "commands", "truth")})]
    for bag in figures["bags"]:
        facts = page.facts({key: bag[key] for key in ("topics", "left_out", "execution")})
        parts.append(page.details(bag["path"], [facts, tag("ul", [tag("li", loss) for loss in bag["losses"]])]))
    return parts
