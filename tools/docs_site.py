"""Hooks of mkdocs (mkdocs.yml): the same pages as on a forge, with the forge's anchors.

A link that leaves docs/, for which a site has no page, becomes the path in the repository.
"""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*#*$", re.MULTILINE)
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)


def slug(title: str, separator: str = "-") -> str:
    """Return the anchor that a forge gives to a heading: lower case, no punctuation, a dash for each space."""
    shown = re.sub(r"[`*]", "", LINK.sub(r"\1", title))
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", separator)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings; a repeated one gets a number."""
    found: dict[str, int] = {}
    for title in HEADING.findall(FENCE.sub("", text)):
        found[slug(title)] = found.get(slug(title), 0) + 1
    return {f"{name}-{index}" if index else name for name, count in found.items() for index in range(count)}


def on_config(config: Any) -> Any:
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slug
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with its links out of docs/ as paths in the repository."""
    docs = Path(config["docs_dir"])
    here = (docs / page.file.src_uri).parent

    def adapt(found: re.Match[str]) -> str:
        text, target = found[1], found[2].partition("#")[0]
        path = (here / target).resolve()
        if "://" in found[2] or not target or path.is_relative_to(docs):
            return found[0]
        return f"{text} (`{path.relative_to(docs.parent)}` in the repository)"

    return LINK.sub(adapt, markdown)
