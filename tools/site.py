"""Hooks of MkDocs: the pages at the top of the repository become pages of the site, and links follow them.

A link to a file that is no page keeps only its text, as the site has no sources. A drawing gets its number of columns,
by which docs/images/site.css fits it into any width; other code wraps.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parent.parent
ADDED: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/CHANGELOG.md",
    "CONTRIBUTING.md": "project/CONTRIBUTING.md",
    "SECURITY.md": "project/SECURITY.md",
    "benchmarks/RESULTS.md": "project/RESULTS.md",
}
"""Pages outside docs/, and where they are in the site. README.md takes the place of docs/README.md."""
LISTS: Final = {
    *("project/CHANGELOG.md", "project/RESULTS.md", "kubernetes/values.md", "kubernetes/all_metrics.md"),
    "api/refused.md",
}
"""Long lists, which the search shows after the pages that explain."""
PLACES: Final = {page: source for source, page in ADDED.items()}
LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE: Final = re.compile(r"<pre>(.*?)</pre>", re.DOTALL)
LINES_OF_DRAWINGS: Final = re.compile(r"-->|<--|\+--|--\+|^ *[|v^]( +[|v^])* *$", re.MULTILINE)
COLUMNS: Final = re.compile(r"\S {3,}\S.*\S {3,}\S")
OUTSIDE: Final = re.compile(r'<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    if (listed := files.get_file_from_path("README.md")) is not None:
        files.remove(listed)
    for source, page in ADDED.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri in LISTS:
        page.meta["search"] = {"boost": 0.1}
    return with_links(markdown, page.file.src_uri, {file.src_uri for file in files})


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark the code blocks that are drawings."""
    return CODE.sub(marked, content)


def marked(found: re.Match[str]) -> str:
    text = html.unescape(re.sub(r"<[^>]*>", "", found[1]))
    if not LINES_OF_DRAWINGS.search(text) and len(COLUMNS.findall(text)) < 3:
        return found[0]
    return f'<pre class="drawing" style="--columns: {max(map(len, text.splitlines()))}">{found[1]}</pre>'


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse what a reader's browser would fetch from another host."""
    if (found := OUTSIDE.search(output)) is not None:
        raise PluginError(f"{page.file.src_uri} loads from another host: {found[0]}")
    return output


def with_links(markdown: str, page: str, pages: set[str]) -> str:
    """Return the text of a page, with its links of the repository made links of the site."""
    source = PLACES.get(page, f"docs/{page}")

    def linked(found: re.Match[str]) -> str:
        mark, text, (path, hash_, anchor) = found[1], found[2], found[3].partition("#")
        if not path or "://" in path:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = ADDED.get(target, target.removeprefix("docs/"))
        if target == "docs/README.md":
            place, hash_ = "index.md", ""
        if place not in pages:
            return text
        moved = posixpath.relpath(place, posixpath.dirname(page) or ".")
        return f"{mark}[{text}]({moved}{hash_}{anchor if hash_ else ''})"

    return LINK.sub(linked, markdown)
