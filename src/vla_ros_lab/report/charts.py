"""Charts as inline SVG: lines, histograms, bars with intervals. Colours follow the page's theme.

Sizes are in SVG units; a chart that is 360 wide is readable on a phone and fills a card on a desktop.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vla_ros.types import FloatArray
from vla_ros_lab.report.markup import Markup, number_text, significant, tag

Size = tuple[float, float]
Range = tuple[float, float]

SMALL: Size = (360.0, 170.0)
WIDE: Size = (1060.0, 200.0)
_COLOURS = 7
_BINS = 450  # two points each, for lines with more points than a screen shows


def colour(index: int) -> str:
    """Return the CSS value of a palette colour; 0 is the grey of reference data."""
    return f"var(--s{index % _COLOURS})"


class Series(NamedTuple):
    """A line through the points (x, y), both [N] with x ascending, with gaps where y is not finite.

    With ``step``, each value is held until the next (as for a gripper) instead of connecting the points.
    """

    name: str
    x: ArrayLike
    y: ArrayLike
    colour: int = 1
    step: bool = False


class Bar(NamedTuple):
    """A bar: a value with an optional interval [low, high]."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: int = 1


class Scale(NamedTuple):
    """A linear map from values [low, high] to SVG units [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def padded(low: float, high: float, share: float = 0.06) -> Range:
    """Widen [low, high] by a margin; the result never has zero width."""
    flat = high - low <= 1e-12 * max(1.0, abs(high))
    margin = abs(high) * 0.1 or 1.0 if flat else (high - low) * share
    return low - margin, high + margin


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round values (1, 2, 2.5 or 5 times a power of ten) inside [low, high].

    Example:
        >>> ticks(0.0, 10.0)
        [0.0, 2.5, 5.0, 7.5, 10.0]
    """
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) + 0.0 for index in range(first, last + 1)]


def _text(content: str, x: float, y: float, anchor: str | None = None, kind: str | None = None) -> Markup:
    return tag("text", content, x=x, y=y, text_anchor=anchor, class_=kind)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def _axes(x: Range, y: Range, size: Size, label: str) -> tuple[Scale, Scale, list[Markup]]:
    """Return the scales of both axes, and the grid with tick labels and the x axis's label."""
    left = 12.0 + 6.2 * max((len(significant(tick)) for tick in ticks(*y)), default=1)
    right, bottom = size[0] - 16.0, size[1] - (30.0 if label else 18.0)
    at_x, at_y = Scale(*x, left, right), Scale(*y, bottom, 8.0)
    grid = []
    for tick in ticks(*y):
        at = at_y(tick)
        grid += [_line(left, at, right, at, "grid"), _text(significant(tick), left - 5, at + 3.5, "end")]
    grid += [_text(significant(tick, 6), at_x(tick), bottom + 13, "middle") for tick in ticks(*x, 5)]
    grid.append(_line(left, bottom, right, bottom, "axis"))
    if label:
        grid.append(_text(label, (left + right) / 2, size[1] - 3, "middle"))
    return at_x, at_y, grid


def _chart(title: str, size: Size, drawn: Sequence[Markup], above: str = "") -> Markup:
    """Return the heading and the SVG, which scales with the page and is labelled for screen readers."""
    heading = tag("h3", title) if title else ""
    if not drawn:
        return tag("div", [heading, tag("p", "No data.", class_="note")])
    svg = tag("svg", drawn, viewBox=f"0 0 {size[0]:g} {size[1]:g}", role="img", aria_label=title)
    return tag("div", [heading, above, svg])


def thin(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Thin a line to about two points per bin, keeping each bin's minimum, maximum and gaps."""
    if len(x) <= 2 * _BINS:
        return x, y
    edges = np.linspace(0, len(x), _BINS + 1).astype(int)
    keep: set[int] = {0, len(x) - 1}
    for low, high in itertools.pairwise(map(int, edges)):
        finite = np.isfinite(part := y[low:high])
        if finite.any():
            keep.update((low + int(np.nanargmin(part)), low + int(np.nanargmax(part))))
        if not finite.all():
            keep.add(low + int(np.argmin(finite)))
    chosen = np.array(sorted(keep))
    return x[chosen], y[chosen]


def _path(xs: Sequence[float], ys: Sequence[float], step: bool) -> str:
    """Return the SVG path through positions in SVG units, with gaps where y is not finite."""
    parts, pen_down = [], False
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            px, py = number_text(x), number_text(y)
            drawn = f"H{px}V{py}" if step else f"L{px} {py}"
            parts.append(drawn if pen_down else f"M{px} {py}")
        pen_down = math.isfinite(y)
    return "".join(parts)


def lines(
    series: Sequence[Series], *, title: str = "", x_label: str = "", size: Size = SMALL, show_legend: bool = True
) -> Markup:
    """Draw lines over a common axis, the first series at the bottom; several series have a legend."""
    data = [(item, np.asarray(item.x, float), np.asarray(item.y, float)) for item in series]
    finite = np.concatenate([y[np.isfinite(y)] for _, _, y in data])
    if not finite.size:
        return _chart(title, size, [])
    xs = np.concatenate([x for _, x, _ in data])
    low, high = float(xs.min()), float(xs.max())
    y_range = padded(float(finite.min()), float(finite.max()))
    at_x, at_y, drawn = _axes((low, high if high > low else low + 1.0), y_range, size, x_label)
    for item, x, y in data:
        x, y = thin(x, y)
        path = _path([at_x(each) for each in x.tolist()], [at_y(each) for each in y.tolist()], item.step)
        style = "line back" if item.colour == 0 else "line"
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
) -> Markup:
    """Draw the distribution of the finite ``values``, with dashed lines at p50, p99 and named ``references``.

    Values above the 99.5th percentile share the last bin, so that one outlier does not squeeze the rest; the axis
    label counts them.
    """
    data = np.asarray(values, float)
    data = data[np.isfinite(data)]
    if not data.size:
        return _chart(title, SMALL, [])
    marks = {f"p{share}": float(np.percentile(data, share)) for share in (50, 99)} | dict(references or {})
    first = float(min([data.min(), *marks.values()]))
    low, high = padded(first, max([float(np.percentile(data, 99.5)), *marks.values()]), 0.03)
    if first >= 0:
        low = max(0.0, low)
    beyond = int((data > high).sum())
    counts, edges = np.histogram(np.minimum(data, high), bins, (low, high))
    label = x_label + (f" ({beyond} above {significant(high)} in the last bin)" if beyond else "")
    at_x, at_y, drawn = _axes((low, high), (0.0, float(counts.max()) * 1.12), SMALL, label)
    for count, left, right in zip(counts, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if count:
            x, y = at_x(left), at_y(float(count))
            tip = tag("title", f"{significant(left)} to {significant(right)}: {count}")
            width = max(0.6, at_x(right) - x - 1.0)
            drawn.append(tag("rect", tip, x=x + 0.5, y=y, width=width, height=at_y.start - y, fill=colour(1)))
    for index, (name, value) in enumerate(sorted(marks.items(), key=lambda item: item[1])):
        at, height = at_x(value), 14.0 + 11 * (index % 4)
        near_edge = at > SMALL[0] * 0.75
        drawn.append(_line(at, at_y.start, at, at_y.end, "ref"))
        drawn.append(_text(name, at - 3 if near_edge else at + 3, height, "end" if near_edge else None))
    return _chart(title, SMALL, drawn)


def bars(items: Sequence[Bar], *, title: str = "") -> Markup:
    """Draw horizontal bars that start at zero, with intervals if known."""
    if not items:
        return _chart(title, SMALL, [])
    ends = [end for item in items for end in item[1:4] if end is not None and math.isfinite(end)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    if high == low:
        high = 1.0
    margin, pitch = (high - low) * 0.04, 21.0
    left = 14.0 + 6.2 * max(len(item.label) for item in items)
    scale = Scale(low - margin if low < 0 else 0.0, high + margin, left, SMALL[0] - 48.0)
    zero, height = scale(0.0), pitch * len(items)
    drawn = [_line(zero, 2, zero, height + 2, "axis")]
    for row, item in enumerate(items):
        top = row * pitch + 4
        end = scale(item.value) if math.isfinite(item.value) else zero
        x, width = min(zero, end), abs(end - zero)
        right = max(end, zero)
        drawn.append(_text(item.label, left - 6, top + 11, "end"))
        drawn.append(tag("rect", x=x, y=top, width=width, height=14, rx=2, fill=colour(item.colour)))
        if item.low is not None and item.high is not None and math.isfinite(item.low + item.high):
            drawn.append(_line(scale(item.low), top + 7, scale(item.high), top + 7, "ci"))
            right = max(right, scale(item.high))
        drawn.append(_text(significant(item.value), right + 5, top + 11, None, "value"))
    return _chart(title, (SMALL[0], height + 6.0), drawn)
