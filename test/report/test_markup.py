import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros_lab.report.markup import Markup, render, significant, tag


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", ["<script>", tag("b", "x & y")]) == "<p>&lt;script&gt;<b>x &amp; y</b></p>"


def test_attributes_are_escaped_and_none_is_omitted():
    assert tag("img", src='"><script>', alt=None, class_="a") == '<img src="&quot;&gt;&lt;script&gt;" class="a"/>'


@given(st.text())
def test_no_text_can_open_an_element(text):
    shown = render(text)
    assert isinstance(shown, Markup)
    assert "<" not in shown
    assert '"' not in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0123456, "0.0123"),
        (1234.5, "1230"),
        (0.0, "0"),
        (None, "–"),
        (math.nan, "–"),
        (-math.inf, "-∞"),
        (52.34, "52.3"),
    ],
)
def test_significant_digits(value, shown):
    assert significant(value) == shown
