"""HTML that is escaped by construction.

Every function here returns :class:`Markup`; plain ``str`` arguments are text and are escaped, so that an
instruction or a topic name from an untrusted bag never becomes part of the page's code.
"""

import html
from collections.abc import Iterable

from vla_ros.errors import printable


class Markup(str):
    """Text that already is HTML; every other string on a page is escaped."""

    __slots__ = ()


Content = str | Markup | Iterable["str | Markup"]
"""Content of an element: text (escaped), :class:`Markup`, or several of these."""

VOID = frozenset({"img", "meta", "line", "rect", "path"})


def render(content: Content) -> Markup:
    """Convert ``content`` to markup: escape text, keep markup, and join several items."""
    if isinstance(content, Markup):
        return content
    if isinstance(content, str):
        return Markup(html.escape(printable(content), quote=True))
    return Markup("".join(render(item) for item in content))


def tag(name: str, content: Content = "", /, **attributes: object) -> Markup:
    """Return one element with its attributes.

    ``class_`` means ``class``; underscores become dashes; attributes that are None or False are omitted.

    Example:
        >>> tag("p", "a < b", class_="note")
        '<p class="note">a &lt; b</p>'
    """
    head = name
    for key, value in attributes.items():
        if value is not None and value is not False:
            text = "" if value is True else f'="{html.escape(printable(number_text(value)), quote=True)}"'
            head += f" {key.rstrip('_').replace('_', '-')}{text}"
    if name in VOID and not content:
        return Markup(f"<{head}/>")
    return Markup(f"<{head}>{render(content)}</{name}>")


def number_text(value: object) -> str:
    """Format a coordinate with two decimals; anything else as text."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)


def significant(value: float | None, digits: int = 3) -> str:
    """Format a measured value with ``digits`` significant digits; a missing value becomes a dash.

    Example:
        >>> significant(0.012345), significant(1234.5), significant(float("nan"))
        ('0.0123', '1230', '–')
    """
    if value is None or value != value:
        return "–"
    if value in (float("inf"), float("-inf")):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    if "e" in text and 1e-5 < abs(value) < 1e9:
        text = f"{float(text):f}".rstrip("0").rstrip(".")
    return text
