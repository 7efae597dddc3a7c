"""The parts of a report's page: frame, verdict banner, tiles, tables, sections. One file, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vla_ros.report.markup import Content, Markup, render, tag
from vla_ros.report.style import CSS, SCRIPT

LEVELS = {"good": "✓", "warn": "!", "bad": "✕"}
"""Level of a verdict and the sign that shows it to those who do not see its colour."""


def document(title: str, lead: Content, body: Content, footer: Content = "") -> str:
    """A complete HTML file.

    A content security policy forbids the page to fetch anything: it is as private as the file that it lies in.

    Args:
        title: Heading and window title.
        lead: One line below the heading.
        body: The parts, in order.
        footer: What made the report, at the end.
    """
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        Markup(f"<style>{CSS}</style>"),
    ]
    main = [tag("h1", title), tag("p", lead, class_="lead"), render(body)]
    if footer:
        main.append(tag("footer", footer))
    script = Markup(f"<script>{SCRIPT}</script>")
    page = tag("html", [tag("head", head), tag("body", [tag("main", main), script])], lang="en")
    return f"<!doctype html>\n{page}\n"


def save(path: Path, page: str) -> None:
    """Write a page, its folder too; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)


def verdict(level: str, headline: str, reasons: Sequence[str] = ()) -> Markup:
    """The banner at the top: what to think of all this, and why.

    Args:
        level: ``good``, ``warn`` or ``bad``.
        headline: The judgement in one sentence.
        reasons: What it rests on, one sentence each.
    """
    parts = [tag("strong", [tag("span", LEVELS[level] + " ", class_="mark"), headline])]
    if reasons:
        parts.append(tag("ul", [tag("li", reason) for reason in reasons]))
    return tag("div", parts, class_=f"verdict {level}", role="status")


def section(title: str, body: Content, note: Content = "") -> Markup:
    """A heading, an explanation and what belongs to it."""
    parts = [tag("h2", title)]
    if note:
        parts.append(tag("p", note, class_="note"))
    return tag("section", [*parts, render(body)])


def tiles(figures: Sequence[tuple[str, str, str]]) -> Markup:
    """Headline figures: (label, value, small print) each."""
    return tag(
        "div",
        [
            tag(
                "div",
                [
                    tag("div", label, class_="label"),
                    tag("div", value, class_="value"),
                    tag("div", under, class_="under"),
                ],
                class_="tile",
            )
            for label, value, under in figures
        ],
        class_="tiles",
    )


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Content]],
    *,
    numeric: Sequence[int] = (),
    caption: str = "",
    levels: Mapping[tuple[int, int], str] | None = None,
) -> Markup:
    """A table that scrolls sideways on a narrow screen.

    Args:
        header: Titles of the columns.
        rows: Cells; as many as there are titles.
        numeric: Columns that are aligned to the right.
        caption: One line above.
        levels: ``good``, ``warn`` or ``bad`` by (row, column).
    """
    levels = levels or {}

    def cell(name: str, content: Content, row: int, column: int) -> Markup:
        classes = [kind for kind in ("n" if column in numeric else "", levels.get((row, column), "")) if kind]
        return tag(name, content, class_=" ".join(classes) or None)

    head = tag("tr", [cell("th", text, -1, column) for column, text in enumerate(header)])
    body = [
        tag("tr", [cell("td", content, index, column) for column, content in enumerate(row)])
        for index, row in enumerate(rows)
    ]
    parts = [tag("caption", caption)] if caption else []
    return tag("div", tag("table", [*parts, tag("thead", head), tag("tbody", body)]), class_="scroll")


def cards(items: Sequence[Content]) -> Markup:
    """Boxes side by side where there is room, below one another where there is not."""
    return tag("div", [tag("div", item, class_="card") for item in items], class_="cards")


def wide(item: Content) -> Markup:
    """A box over the whole width; scrolls sideways rather than shrink below what can be read."""
    return tag("div", tag("div", item, class_="wide"), class_="card")


def details(summary: str, body: Content) -> Markup:
    """Something long that only some want to see."""
    return tag("details", [tag("summary", summary), render(body)])


def code(text: str) -> Markup:
    """Text in fixed width, as it is."""
    return tag("pre", tag("code", text))


def flag(level: str, text: str) -> Markup:
    """A word in a coloured pill: ``good``, ``warn`` or ``bad``."""
    return tag("span", text, class_=f"flag {level}")


def facts(items: Mapping[str, object]) -> Markup:
    """A table of names and values."""
    return table(("", ""), [(name, str(value)) for name, value in items.items()])
