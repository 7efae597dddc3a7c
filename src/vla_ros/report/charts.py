"""Charts as inline SVG: traces, histograms, bars with intervals, timelines. Colours follow the page's theme.

Sizes are in SVG units; a chart 360 wide is readable on a phone and fills a card on a desk.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vla_ros.report.axes import Frame, Scale, padded, svg, ticks
from vla_ros.report.markup import Markup, number, significant, tag
from vla_ros.types import FloatArray

SMALL = (360.0, 170.0)
WIDE = (1060.0, 200.0)
COLOURS = 7


def colour(index: int) -> str:
    """Style of one of the palette's colours; 0 is the quiet grey of what is only compared with."""
    return f"var(--s{index % COLOURS})"


@dataclass(frozen=True)
class Series:
    """One trace.

    Attributes:
        name: For the legend.
        x: [N], ascending.
        y: [N]; the line breaks where a value is not finite.
        colour: Palette index; 0 is grey.
        step: True draws held values (a gripper), not straight connections.
    """

    name: str
    x: ArrayLike
    y: ArrayLike
    colour: int = 1
    step: bool = False


@dataclass(frozen=True)
class Bar:
    """One bar: a value with an optional interval [low, high] around it."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: int = 1


@dataclass(frozen=True)
class Span:
    """Something that lasted from ``start`` to ``end`` (seconds); ``tip`` is shown under the pointer."""

    start: float
    end: float
    colour: int = 1
    tip: str = ""


@dataclass(frozen=True)
class Lane:
    """One row of a timeline."""

    name: str
    spans: Sequence[Span]


def legend(items: Sequence[tuple[str, int]]) -> Markup:
    """Names beside their colours."""
    keys = [tag("span", [tag("i", "", style=f"background:{colour(index)}"), name]) for name, index in items]
    return tag("div", keys, class_="legend")


def nothing(title: str) -> Markup:
    """What stands in place of a chart that has no data."""
    return tag("div", [tag("h3", title) if title else "", tag("p", "No data.", class_="note")])


def thin(x: FloatArray, y: FloatArray, most: int = 900) -> tuple[FloatArray, FloatArray]:
    """At most about ``most`` points that look the same: each stretch keeps its smallest and largest value."""
    if len(x) <= most:
        return x, y
    edges = np.linspace(0, len(x), most // 2 + 1).astype(int)
    keep: set[int] = {0, len(x) - 1}
    for low, high in itertools.pairwise(map(int, edges)):
        part = y[low:high]
        if np.isfinite(part).any():
            keep.update((low + int(np.nanargmin(part)), low + int(np.nanargmax(part))))
        if not np.isfinite(part).all():
            keep.add(low + int(np.argmin(np.isfinite(part))))
    chosen = np.array(sorted(keep))
    return x[chosen], y[chosen]


def _path(frame: Frame, x: FloatArray, y: FloatArray, step: bool) -> str:
    parts: list[str] = []
    pen = False
    for at, value in zip(x, y, strict=True):
        if not np.isfinite(value):
            pen = False
            continue
        px, py = number(frame.x(float(at))), number(frame.y(float(value)))
        parts.append(
            f"{'L' if pen and not step else ('H' if pen else 'M')}{px}" + (f"V{py}" if pen and step else f" {py}")
        )
        pen = True
    return "".join(parts)


def lines(
    series: Sequence[Series],
    *,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    size: tuple[float, float] = SMALL,
    y_range: tuple[float, float] | None = None,
    references: Mapping[str, float] | None = None,
    show_legend: bool = True,
) -> Markup:
    """Traces over a common axis.

    Args:
        series: What is drawn, the first one lowest.
        title: Heading of the chart.
        x_label: Axis and unit.
        y_label: Axis and unit.
        size: Width and height in SVG units.
        y_range: Smallest range of values to show; grows where the data exceed it.
        references: Dashed horizontal lines by name.
        show_legend: Names above the chart where there are several series.
    """
    data = [(item, np.asarray(item.x, float), np.asarray(item.y, float)) for item in series]
    finite = [y[np.isfinite(y)] for _, _, y in data]
    points = np.concatenate([*finite, np.array(list((references or {}).values()), float)]) if data else np.zeros(0)
    if not points.size or not any(part.size for part in finite):
        return nothing(title)
    low, high = padded(float(points.min()), float(points.max()))
    if y_range is not None:
        low, high = min(low, y_range[0]), max(high, y_range[1])
    xs = np.concatenate([x for _, x, _ in data])
    x_low, x_high = float(xs.min()), float(xs.max())
    frame = Frame.around((x_low, x_high if x_high > x_low else x_low + 1.0), (low, high), size, x_label, y_label)
    drawn = [frame.grid()]
    for name, value in (references or {}).items():
        drawn.append(_horizontal(frame, name, value))
    for item, x, y in data:
        path = _path(frame, *thin(x, y), item.step)
        drawn.append(
            tag("path", d=path, class_="line back" if item.colour == 0 else "line", stroke=colour(item.colour))
        )
    parts = [tag("h3", title)] if title else []
    if show_legend and len(series) > 1:
        parts.append(legend([(item.name, item.colour) for item in series]))
    return tag("div", [*parts, svg(*size, drawn, title)])


def _horizontal(frame: Frame, name: str, value: float) -> Markup:
    at = frame.y(value)
    return Markup(
        tag("line", x1=frame.x.start, x2=frame.x.end, y1=at, y2=at, class_="ref")
        + tag("text", name, x=frame.x.end, y=at - 3, text_anchor="end")
    )


def histogram(
    values: ArrayLike,
    *,
    title: str = "",
    x_label: str = "",
    bins: int = 40,
    references: Mapping[str, float] | None = None,
    size: tuple[float, float] = SMALL,
) -> Markup:
    """How often each value occurred.

    Args:
        values: [N]; what is not finite is left out.
        title: Heading.
        x_label: Quantity and unit.
        bins: Number of bins.
        references: Dashed vertical lines by name (p50, p99, a deadline).
        size: Width and height in SVG units.

    Values beyond the 99.5th percentile share the last bin, so that one outlier does not squeeze the rest; the
    axis label says so.
    """
    data = np.asarray(values, float)
    data = data[np.isfinite(data)]
    if not data.size:
        return nothing(title)
    marks = dict(references or {})
    top = float(np.percentile(data, 99.5))
    last = max([top, *(value for value in marks.values() if np.isfinite(value))])
    first = float(min(data.min(), *marks.values())) if marks else float(data.min())
    low, high = padded(first, last, 0.03)
    if first >= 0:
        low = max(0.0, low)
    beyond = int((data > high).sum())
    counts, edges = np.histogram(np.minimum(data, high), bins, (low, high))
    label = x_label + (f" ({beyond} above {significant(high)} in the last bin)" if beyond else "")
    frame = Frame.around((low, high), (0.0, float(counts.max()) * 1.12), size, label)
    drawn = [frame.grid()]
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        if count:
            x, y = frame.x(float(left)), frame.y(float(count))
            tip = f"{significant(float(left))} to {significant(float(right))}: {count}"
            drawn.append(
                tag(
                    "rect",
                    tag("title", tip),
                    x=x + 0.5,
                    y=y,
                    width=max(0.6, frame.x(float(right)) - x - 1.0),
                    height=frame.y.start - y,
                    fill=colour(1),
                )
            )
    for index, (name, value) in enumerate(sorted(marks.items(), key=lambda item: item[1])):
        at = frame.x(value)
        anchor = "end" if at > frame.width * 0.75 else "start"
        drawn.append(tag("line", x1=at, x2=at, y1=frame.y.start, y2=frame.y.end, class_="ref"))
        drawn.append(
            tag("text", name, x=at + (-3 if anchor == "end" else 3), y=14.0 + 11 * (index % 4), text_anchor=anchor)
        )
    return tag("div", [tag("h3", title) if title else "", svg(*size, drawn, title)])


def bars(items: Sequence[Bar], *, title: str = "", x_label: str = "", width: float = 360.0) -> Markup:
    """Horizontal bars from zero, with intervals where they are known."""
    if not items:
        return nothing(title)
    ends = [
        end for item in items for end in (item.value, item.low, item.high) if end is not None and np.isfinite(end)
    ]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    if high == low:
        high = 1.0
    air = (high - low) * 0.04
    low, high = (low - air if low < 0 else 0.0), high + air
    left = 14.0 + 6.2 * max(len(item.label) for item in items)
    right, pitch = width - 48.0, 21.0
    height = pitch * len(items) + (20.0 if x_label else 6.0)
    scale = Scale(low, high, left, right)
    zero = scale(0.0)
    drawn = [tag("line", x1=zero, x2=zero, y1=2, y2=pitch * len(items) + 2, class_="axis")]
    for row, item in enumerate(items):
        top = row * pitch + 4
        drawn.append(tag("text", item.label, x=left - 6, y=top + 11, text_anchor="end"))
        value = item.value if np.isfinite(item.value) else 0.0
        end = scale(value)
        drawn.append(
            tag("rect", x=min(zero, end), y=top, width=abs(end - zero), height=14, rx=2, fill=colour(item.colour))
        )
        reach = max(end, zero)
        if item.low is not None and item.high is not None and np.isfinite(item.low) and np.isfinite(item.high):
            a, b = scale(item.low), scale(item.high)
            drawn.append(tag("line", x1=a, x2=b, y1=top + 7, y2=top + 7, class_="ci"))
            reach = max(reach, b)
        drawn.append(tag("text", significant(item.value), x=reach + 5, y=top + 11, class_="value"))
    if x_label:
        drawn.append(tag("text", x_label, x=(left + right) / 2, y=height - 4, text_anchor="middle"))
    return tag("div", [tag("h3", title) if title else "", svg(width, height, drawn, title)])


def timeline(
    lanes: Sequence[Lane],
    *,
    title: str = "",
    x_label: str = "time [s]",
    width: float = WIDE[0],
    names: Sequence[tuple[str, int]] = (),
) -> Markup:
    """What happened when: one row per lane, one mark per span; a span without length is a tick.

    Args:
        lanes: Rows, the first one on top.
        title: Heading.
        x_label: Axis and unit.
        width: SVG units.
        names: Legend: (name, colour) each.
    """
    ends = [edge for lane in lanes for span in lane.spans for edge in (span.start, span.end)]
    if not ends:
        return nothing(title)
    pitch = 24.0
    height = pitch * len(lanes) + 34.0
    x_low, x_high = min(ends), max(ends)
    left = 16.0 + 6.2 * max(len(lane.name) for lane in lanes)
    base = Frame.around((x_low, x_high if x_high > x_low else x_low + 1.0), (0.0, 1.0), (width, height), x_label)
    scale = Scale(base.x.low, base.x.high, left, width - 8.0)
    bottom = pitch * len(lanes) + 4
    axis = Frame(width, height, scale, Scale(0.0, 1.0, bottom, bottom), x_label)
    drawn = [axis_marks(axis)]
    for row, lane in enumerate(lanes):
        top = row * pitch + 4
        drawn.append(tag("text", lane.name, x=left - 6, y=top + 12, text_anchor="end"))
        drawn.append(tag("line", x1=left, x2=width - 8, y1=top + 18, y2=top + 18, class_="grid"))
        for span in lane.spans:
            a, b = scale(span.start), scale(span.end)
            tip = tag("title", span.tip) if span.tip else ""
            drawn.append(tag("rect", tip, x=a, y=top, width=max(1.2, b - a), height=16, fill=colour(span.colour)))
    parts = [tag("h3", title)] if title else []
    if names:
        parts.append(legend(names))
    return tag("div", [*parts, svg(width, height, drawn, title)])


def axis_marks(frame: Frame) -> Markup:
    """Tick labels of the x axis only."""
    parts = [
        tag("text", significant(value, 6), x=frame.x(value), y=frame.y.start + 13, text_anchor="middle")
        for value in ticks(frame.x.low, frame.x.high, 10)
    ]
    parts.append(
        tag("text", frame.x_label, x=(frame.x.start + frame.x.end) / 2, y=frame.height - 3, text_anchor="middle")
    )
    return Markup("".join(parts))
