"""The frame of a chart: scales, readable ticks, grid and labels, in SVG units."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vla_ros.report.markup import Markup, significant, tag


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
    """A range that shows [low, high] with some air, never of zero width."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    if high - low <= 1e-12 * max(1.0, abs(high)):
        air = abs(high) * 0.1 or 1.0
        return low - air, high + air
    air = (high - low) * share
    return low - air, high + air


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values (1, 2, 2.5 or 5 times a power of ten) inside [low, high], about ``count`` of them.

    Example:
        >>> ticks(0.0, 10.0)
        [0.0, 2.5, 5.0, 7.5, 10.0]
    """
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) + 0.0 for index in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """A chart's drawing area: an SVG of ``width`` x ``height`` units around two scales."""

    width: float
    height: float
    x: Scale
    y: Scale
    x_label: str = ""
    y_label: str = ""

    @classmethod
    def around(
        cls,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        size: tuple[float, float],
        x_label: str = "",
        y_label: str = "",
    ) -> Frame:
        """A frame for these ranges, with room for tick labels to the left and below."""
        width, height = size
        widest = max((len(significant(tick)) for tick in ticks(*y_range)), default=1)
        left = 12.0 + 6.2 * widest
        bottom = height - (30.0 if x_label else 18.0)
        top = 18.0 if y_label else 8.0
        return cls(
            width, height, Scale(*x_range, left, width - 8.0), Scale(*y_range, bottom, top), x_label, y_label
        )

    def grid(self) -> Markup:
        """Grid lines, tick labels and axis labels."""
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
            parts.append(tag("text", self.x_label, x=(left + right) / 2, y=self.height - 3, text_anchor="middle"))
        if self.y_label:
            parts.append(tag("text", self.y_label, x=2, y=10))
        return Markup("".join(parts))


def svg(width: float, height: float, content: list[Markup], title: str) -> Markup:
    """The SVG element; scales with the page and tells screen readers what it shows."""
    return tag("svg", content, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=title)
