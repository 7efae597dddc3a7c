"""Charts as inline SVG: lines, histograms, bars with intervals. Colours follow the page's theme.

Sizes are in SVG units; a chart 360 wide is readable on a phone and fills a card on a desktop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vla_ros.report.markup import Markup, number, significant, tag
from vla_ros.types import FloatArray

SMALL = (360.0, 170.0)
WIDE = (1060.0, 200.0)
COLOURS = 7


def colour(index: int) -> str:
    """CSS value of a palette colour; 0 is the grey of reference data."""
    return f"var(--s{index % COLOURS})"


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: For the legend.
        x: [N], ascending.
        y: [N]; the line breaks at values that are not finite.
        colour: Palette index; 0 is grey.
        step: Draw held values (a gripper) instead of straight connections.
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
class Scale:
    """A linear map from values [low, high] to SVG units [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Position of ``value``."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def padded(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """Widens [low, high] by a margin; never returns a range of zero width."""
    flat = high - low <= 1e-12 * max(1.0, abs(high))
    margin = abs(high) * 0.1 or 1.0 if flat else (high - low) * share
    return low - margin, high + margin


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values (1, 2, 2.5 or 5 times a power of ten) inside [low, high], about ``count`` of them.

    Example:
        >>> ticks(0.0, 10.0)
        [0.0, 2.5, 5.0, 7.5, 10.0]
    """
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) + 0.0 for index in range(first, last + 1)]


@dataclass(frozen=True)
class Axes:
    """A drawing area of ``size`` SVG units with an x and a y scale."""

    size: tuple[float, float]
    x: Scale
    y: Scale
    x_label: str

    @classmethod
    def around(
        cls, x: tuple[float, float], y: tuple[float, float], size: tuple[float, float], x_label: str
    ) -> Axes:
        """Axes for these ranges, with room for tick labels to the left and below."""
        left = 12.0 + 6.2 * max((len(significant(tick)) for tick in ticks(*y)), default=1)
        bottom = size[1] - (30.0 if x_label else 18.0)
        return cls(size, Scale(*x, left, size[0] - 8.0), Scale(*y, bottom, 8.0), x_label)

    def grid(self) -> list[Markup]:
        """Grid lines, tick labels and the axis label."""
        left, right, bottom = self.x.start, self.x.end, self.y.start
        parts = []
        for value in ticks(self.y.low, self.y.high):
            at = self.y(value)
            parts.append(tag("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
            parts.append(tag("text", significant(value), x=left - 5, y=at + 3.5, text_anchor="end"))
        parts += [
            tag("text", significant(value, 6), x=self.x(value), y=bottom + 13, text_anchor="middle")
            for value in ticks(self.x.low, self.x.high, 5)
        ]
        parts.append(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
        if self.x_label:
            middle = (left + right) / 2
            parts.append(tag("text", self.x_label, x=middle, y=self.size[1] - 3, text_anchor="middle"))
        return parts


def _chart(title: str, size: tuple[float, float], drawn: Sequence[Markup], above: str = "") -> Markup:
    """Heading and SVG element; the SVG scales with the page and names itself to screen readers."""
    svg = tag("svg", drawn, viewBox=f"0 0 {size[0]:g} {size[1]:g}", role="img", aria_label=title)
    return tag("div", [_heading(title), above, svg])


def _heading(title: str) -> Markup:
    return tag("h3", title) if title else Markup()


def _no_data(title: str) -> Markup:
    return tag("div", [_heading(title), tag("p", "No data.", class_="note")])


def thin(x: FloatArray, y: FloatArray, most: int = 900) -> tuple[FloatArray, FloatArray]:
    """Reduces a line to about ``most`` points that look the same: each bin keeps its minimum and maximum."""
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


def _path(axes: Axes, x: FloatArray, y: FloatArray, step: bool) -> str:
    parts: list[str] = []
    pen_down = False
    for at, value in zip(x, y, strict=True):
        if not np.isfinite(value):
            pen_down = False
            continue
        px, py = number(axes.x(float(at))), number(axes.y(float(value)))
        if not pen_down:
            parts.append(f"M{px} {py}")
        else:
            parts.append(f"H{px}V{py}" if step else f"L{px} {py}")
        pen_down = True
    return "".join(parts)


def lines(
    series: Sequence[Series],
    *,
    title: str = "",
    x_label: str = "",
    size: tuple[float, float] = SMALL,
    show_legend: bool = True,
) -> Markup:
    """Lines over a common axis.

    Args:
        series: What is drawn, the first one lowest.
        title: Heading of the chart.
        x_label: Quantity and unit.
        size: Width and height in SVG units.
        show_legend: Show the names above the chart if there are several series.
    """
    data = [(item, np.asarray(item.x, float), np.asarray(item.y, float)) for item in series]
    finite = np.concatenate([y[np.isfinite(y)] for _, _, y in data])
    if not finite.size:
        return _no_data(title)
    xs = np.concatenate([x for _, x, _ in data])
    low, high = float(xs.min()), float(xs.max())
    y_range = padded(float(finite.min()), float(finite.max()))
    axes = Axes.around((low, high if high > low else low + 1.0), y_range, size, x_label)
    drawn = axes.grid()
    for item, x, y in data:
        style = "line back" if item.colour == 0 else "line"
        path = _path(axes, *thin(x, y), item.step)
        drawn.append(tag("path", d=path, class_=style, stroke=colour(item.colour)))
    keys = [tag("span", [tag("i", "", style=f"background:{colour(s.colour)}"), s.name]) for s in series]
    legend = tag("div", keys, class_="legend") if show_legend and len(series) > 1 else ""
    return _chart(title, size, drawn, legend)


def histogram(
    values: ArrayLike,
    *,
    title: str = "",
    x_label: str = "",
    bins: int = 40,
    references: Mapping[str, float] | None = None,
    size: tuple[float, float] = SMALL,
) -> Markup:
    """Distribution of ``values``.

    Values above the 99.5th percentile share the last bin, so that one outlier does not squeeze the rest; the axis
    label says how many.

    Args:
        values: [N]; values that are not finite are ignored.
        title: Heading.
        x_label: Quantity and unit.
        bins: Number of bins.
        references: Dashed vertical lines by name (p50, p99, a deadline).
        size: Width and height in SVG units.
    """
    data = np.asarray(values, float)
    data = data[np.isfinite(data)]
    if not data.size:
        return _no_data(title)
    marks = dict(references or {})
    first = float(min([data.min(), *marks.values()]))
    low, high = padded(first, max([float(np.percentile(data, 99.5)), *marks.values()]), 0.03)
    if first >= 0:
        low = max(0.0, low)
    beyond = int((data > high).sum())
    counts, edges = np.histogram(np.minimum(data, high), bins, (low, high))
    label = x_label + (f" ({beyond} above {significant(high)} in the last bin)" if beyond else "")
    axes = Axes.around((low, high), (0.0, float(counts.max()) * 1.12), size, label)
    drawn = axes.grid()
    for count, left, right in zip(counts, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if count:
            x, y = axes.x(left), axes.y(float(count))
            tip = tag("title", f"{significant(left)} to {significant(right)}: {count}")
            width, height = max(0.6, axes.x(right) - x - 1.0), axes.y.start - y
            drawn.append(tag("rect", tip, x=x + 0.5, y=y, width=width, height=height, fill=colour(1)))
    for index, (name, value) in enumerate(sorted(marks.items(), key=lambda item: item[1])):
        at, height = axes.x(value), 14.0 + 11 * (index % 4)
        drawn.append(tag("line", x1=at, x2=at, y1=axes.y.start, y2=axes.y.end, class_="ref"))
        if at > size[0] * 0.75:
            drawn.append(tag("text", name, x=at - 3, y=height, text_anchor="end"))
        else:
            drawn.append(tag("text", name, x=at + 3, y=height))
    return _chart(title, size, drawn)


def bars(items: Sequence[Bar], *, title: str = "") -> Markup:
    """Horizontal bars from zero, with intervals where they are known."""
    if not items:
        return _no_data(title)
    shown = [end for item in items for end in (item.value, item.low, item.high) if end is not None]
    low, high = min([0.0, *filter(math.isfinite, shown)]), max([0.0, *filter(math.isfinite, shown)])
    if high == low:
        high = 1.0
    margin = (high - low) * 0.04
    left, pitch = 14.0 + 6.2 * max(len(item.label) for item in items), 21.0
    scale = Scale(low - margin if low < 0 else 0.0, high + margin, left, SMALL[0] - 48.0)
    zero, height = scale(0.0), pitch * len(items)
    drawn = [tag("line", x1=zero, x2=zero, y1=2, y2=height + 2, class_="axis")]
    for row, item in enumerate(items):
        top = row * pitch + 4
        end = scale(item.value) if math.isfinite(item.value) else zero
        right = max(end, zero)
        drawn += [
            tag("text", item.label, x=left - 6, y=top + 11, text_anchor="end"),
            tag("rect", x=min(zero, end), y=top, width=abs(end - zero), height=14, rx=2, fill=colour(item.colour)),
        ]
        if item.low is not None and item.high is not None and math.isfinite(item.low + item.high):
            drawn.append(tag("line", x1=scale(item.low), x2=scale(item.high), y1=top + 7, y2=top + 7, class_="ci"))
            right = max(right, scale(item.high))
        drawn.append(tag("text", significant(item.value), x=right + 5, y=top + 11, class_="value"))
    return _chart(title, (SMALL[0], height + 6.0), drawn)
