"""The links of the pages, as links of the site. `make check` builds the site and stops at a dead one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError

from tools import site

PAGES = {"index.md", "routing.md", "api/answers.md", "project/RESULTS.md", "images/route.svg"}


@pytest.mark.parametrize(
    ("page", "link", "linked"),
    [
        ("routing.md", "[r](../benchmarks/RESULTS.md#route)", "[r](project/RESULTS.md#route)"),
        ("api/answers.md", "[r](../routing.md#sessions)", "[r](../routing.md#sessions)"),
        ("index.md", "[r](docs/routing.md)", "[r](routing.md)"),
        ("index.md", "[pages](docs/README.md)", "[pages](index.md)"),
        ("index.md", "![bars](docs/images/route.svg)", "![bars](images/route.svg)"),
        ("project/RESULTS.md", "[r](../docs/routing.md)", "[r](../routing.md)"),
        ("routing.md", "[code](../server/gateway.py)", "code"),
        ("routing.md", "[here](#cost)", "[here](#cost)"),
        ("routing.md", "[kind](https://kind.sigs.k8s.io)", "[kind](https://kind.sigs.k8s.io)"),
    ],
)
def test_links(page: str, link: str, linked: str) -> None:
    assert site.with_links(f"See {link}.", page, PAGES) == f"See {linked}."


@pytest.mark.parametrize(
    "element", ['<script src="https://cdn.example/x.js">', '<link rel="stylesheet" href="//fonts.example/x.css">']
)
def test_nothing_comes_from_another_host(element: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="routing.md"))
    with pytest.raises(PluginError, match="another host"):
        site.on_post_page(element, page, None)  # type: ignore[arg-type]
