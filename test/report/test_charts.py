import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from vla_ros_lab.report import charts
from vla_ros_lab.report.charts import padded, ticks


def parsed(markup):
    return ElementTree.fromstring(markup)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2.5, 5, 7.5, 10]), (-0.011, 0.021, [-0.01, 0, 0.01, 0.02]), (3, 4, [3, 3.25, 3.5, 3.75, 4])],
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_a_constant_still_has_a_range():
    low, high = padded(0.0, 0.0)
    assert low < 0 < high


def test_line_ends_where_the_data_end():
    figure = parsed(charts.lines([charts.Series("a", [0, 1, 2], [0.0, 5.0, 10.0])], title="t"))
    path = figure.find(".//path").get("d")
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
    xs, ys = numbers[::2], numbers[1::2]
    assert xs == sorted(xs)
    assert ys == sorted(ys, reverse=True)
    assert xs[1] == pytest.approx((xs[0] + xs[2]) / 2, abs=0.02)


def test_a_line_breaks_at_invalid_numbers():
    figure = parsed(charts.lines([charts.Series("a", [0, 1, 2, 3], [0.0, np.nan, 1.0, 2.0])]))
    assert figure.find(".//path").get("d").count("M") == 2


@pytest.mark.parametrize("values", [[], [np.nan, np.inf]])
def test_missing_data_are_reported(values):
    assert "No data" in charts.lines([charts.Series("a", list(range(len(values))), values)])
    assert "No data" in charts.histogram(values)
    assert "No data" in charts.bars([])


def test_histogram_counts_every_value_once_and_names_outliers():
    values = np.concatenate([np.linspace(0, 1, 999), [1000.0]])
    figure = parsed(charts.histogram(values, x_label="ms", bins=10))
    tips = [title.text for title in figure.iter("title")]
    assert sum(int(tip.rsplit(": ", 1)[1]) for tip in tips) == 1000
    assert any("in the last bin" in (text.text or "") for text in figure.iter("text"))


def test_bars_grow_from_zero_to_both_sides():
    figure = parsed(charts.bars([charts.Bar("up", 2.0, 1.0, 3.0), charts.Bar("down", -1.0)]))
    up, down = figure.findall(".//rect")
    assert float(up.get("width")) == pytest.approx(2 * float(down.get("width")), rel=0.01)
    assert float(down.get("x")) + float(down.get("width")) == pytest.approx(float(up.get("x")), abs=0.02)


def test_thinning_keeps_peaks_and_gaps():
    x = np.arange(100_000.0)
    y = np.zeros(100_000)
    y[54_321], y[77_777], y[20_000:20_500] = 9.0, -9.0, np.nan
    xs, ys = charts.thin(x, y)
    assert len(xs) < 2000
    assert np.nanmax(ys) == 9.0
    assert np.nanmin(ys) == -9.0
    assert np.isnan(ys).any()
    assert (np.diff(xs) > 0).all()
