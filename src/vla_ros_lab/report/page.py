"""Lays out a report's page: document, verdict, tiles, tables, sections; one file that fetches nothing."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_ros.errors import ConfigError
from vla_ros.files import STANDARD_OUTPUT, check_output
from vla_ros_lab.report.markup import Content, Markup, render, significant, tag

Cell = Content | float | int | None
"""Content of a table cell; floats are shown with three significant digits, None as a dash."""

_STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")

LEVELS = {"good": "✓", "warn": "!", "bad": "✕"}
"""Symbol of each level, for readers who do not see its colour."""


def document(title: str, lead: Content, body: Content, footer: Content = "") -> str:
    """Return a complete HTML file; its content security policy lets it neither fetch nor run anything."""
    policy = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        Markup(f"<style>{_STYLE}</style>"),
    ]
    main = [tag("h1", title), tag("p", lead, class_="lead"), render(body)]
    if footer:
        main.append(tag("footer", footer))
    page = tag("html", [tag("head", head), tag("body", tag("main", main))], lang="en")
    return f"<!doctype html>\n{page}\n"


def to_stdout(**outputs: Path | None) -> bool:
    """Return whether an option's path is ``-``, standard output.

    Raises ConfigError if two paths are ``-``, a path is a folder, or its folder does not exist.
    """
    for name, path in outputs.items():
        check_output(f"--{name}", path)
    printed = [f"--{name} -" for name, path in outputs.items() if path == STANDARD_OUTPUT]
    if len(printed) > 1:
        raise ConfigError(f"{' and '.join(printed)}: only one can go to standard output; name a file for the other")
    return bool(printed)


def verdict(level: str, headline: str, reasons: Sequence[str] = ()) -> Markup:
    """Return the banner at the top; ``level`` is ``good``, ``warn`` or ``bad``."""
    parts = [tag("strong", [tag("span", LEVELS[level] + " ", class_="mark"), headline])]
    if reasons:
        parts.append(tag("ul", [tag("li", reason) for reason in reasons]))
    return tag("div", parts, class_=f"verdict {level}", role="status")


def section(title: str, body: Content, note: Content = "") -> Markup:
    parts = [tag("h2", title)]
    if note:
        parts.append(tag("p", note, class_="note"))
    return tag("section", [*parts, render(body)])


def tiles(figures: Sequence[tuple[str, str, str]]) -> Markup:
    """Return the headline figures, each from (label, value, small print)."""
    names = ("label", "value", "under")
    shown = [[tag("div", text, class_=name) for name, text in zip(names, each, strict=True)] for each in figures]
    return tag("div", [tag("div", parts, class_="tile") for parts in shown], class_="tiles")


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Markup:
    """Return a table that scrolls sideways on narrow screens, with numbers right-aligned; without rows, a note."""
    if not rows:
        return tag("p", "No data.", class_="note")

    def row(name: str, cells: Sequence[Cell], like: Sequence[Cell]) -> Markup:
        shown = [str(cell) if isinstance(cell, int) else cell for cell in cells]
        texts = [significant(cell) if cell is None or isinstance(cell, float) else cell for cell in shown]
        kinds = ["n" if each is None or isinstance(each, (int, float)) else None for each in like]
        return tag("tr", [tag(name, text, class_=kind) for text, kind in zip(texts, kinds, strict=True)])

    body = tag("tbody", [row("td", cells, cells) for cells in rows])
    head = tag("thead", row("th", header, rows[0]))
    return tag("div", tag("table", [head, body]), class_="scroll")


def mapped(items: Sequence[Mapping[str, Cell]], columns: Mapping[str, str]) -> Markup:
    """Return a table with a row per item; ``columns`` maps headings to keys of the items."""
    return table(list(columns), [[item[key] for key in columns.values()] for item in items])


def cards(items: Sequence[Content]) -> Markup:
    return tag("div", [tag("div", item, class_="card") for item in items], class_="cards")


def details(summary: str, body: Content) -> Markup:
    """Return content that is collapsed until the reader opens it."""
    return tag("details", [tag("summary", summary), render(body)])


def facts(items: Mapping[str, Any]) -> Markup:
    """Return a table of names and values; a value may itself be a mapping or a list."""
    return table(("", ""), list(_rows(items)))


def _rows(items: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in items.items():
        if isinstance(value, Mapping):
            yield from _rows(value, f"{before}{name} ")
        else:
            parts = value if isinstance(value, (list, tuple)) else [value]
            yield before + name, ", ".join(map(_plain, parts)) or "–"


def _plain(value: str | float | None) -> str:
    return str(value) if isinstance(value, (str, int)) else significant(value)
