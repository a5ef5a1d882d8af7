"""What MkDocs asks for while it builds the site: the front page, generated parts, links."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
# MkDocs loads this file by its path.
sys.path.insert(0, str(ROOT))

from attn.bench.results.age import with_age  # noqa: E402
from docs.tools import blocks  # noqa: E402

PAGES: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "attn/kernels/README.md": "kernels.md",
    "builders/README.md": "builders.md",
}
"""Pages outside ``docs``, and what stands for them on the site."""


OPTIONAL: Final = ("cli-reports.md", "examples/README.md", "extending.md")
"""Pages of the navigation that a checkout may lack."""


def on_config(config: Any) -> Any:
    """Leave pages out of the navigation that are not there."""
    config.nav = [_present(entry) for entry in config.nav]
    return config


def _present(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    ((title, inside),) = entry.items()
    if not isinstance(inside, list):
        return entry
    return {title: [item for item in inside if not _is_missing(item)]}


def _is_missing(entry: Any) -> bool:
    page = next(iter(entry.values())) if isinstance(entry, dict) else entry
    return page in OPTIONAL and not (ROOT / "docs" / page).exists()


def on_files(files: Any, config: Any) -> Any:
    """Make the README the front page."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=front_page(text)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill generated parts in, and lead links to files outside ``docs`` somewhere.

    A table of benchmarks says how many commits since have touched what it measures.
    """
    where = page.file.src_uri
    if where.startswith("benchmarks/"):
        markdown = with_age(markdown, Path(where).name)
    return links_inside(blocks.filled(markdown), where)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that a browser would not show without a network."""
    found = loads(output)
    if found:
        raise ValueError(f"{page.file.src_uri} loads {', '.join(found)}")
    return output


def loads(html: str) -> list[str]:
    """Addresses of other machines that a browser asks when it shows a page.

    Args:
        html: the page.
    """
    tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", html)
    found = [re.search(r"""(?:src|href)=["']?((?:https?:)?//[^\s"'>]+)""", tag) for tag in tags]
    return [match[1] for match in found if match]


def front_page(readme: str) -> str:
    """The README as a page of ``docs``.

    Args:
        readme: its text, with links from the root of the repository.
    """
    return re.sub(r"(\]\(|src=\")docs/", r"\1", readme)


def links_inside(markdown: str, page: str) -> str:
    """A page whose links to files outside ``docs`` lead to the site's pages of these files.

    A link to a file without a page becomes the file's name: the site has no source code.

    Args:
        markdown: the page's text.
        page: its path inside ``docs``.
    """
    folder = (ROOT / "docs" / page).parent
    up = "../" * page.count("/")

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        # The front page stands in docs, and has the links of the root.
        start = ROOT if page == "index.md" and not (folder / target).exists() else folder
        path = (start / target).resolve()
        if not path.is_relative_to(ROOT):
            return match[0]
        inside = path.relative_to(ROOT).as_posix()
        if inside in PAGES:
            return f"[{text}]({up}{PAGES[inside]}{anchor})"
        if (
            path.is_relative_to(ROOT / "docs")
            and path.suffix in (".md", ".svg")
            and not (inside.startswith("docs/examples/") and inside.count("/") > 2)
        ):
            return f"[{text}]({os.path.relpath(path, folder)}{anchor})"
        return text if "`" in text else f"`{inside}`"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)", link, markdown)
