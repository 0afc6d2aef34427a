"""Questions of users, typed into the search of the site: the first result is a page that answers them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
ANSWERED_BY: Final = {
    "getting started": "tutorial",
    "run in front of vLLM": "vllm",
    "vllm data parallel ranks": "vllm_deployments",
    "claude code": "agents",
    "codex config.toml": "agents",
    "429": "under_load",
    "why was my request refused": "under_load",
    "why is it slow": "troubleshooting",
    "worker refused": "troubleshooting",
    "api key limits per tenant": "security",
    "tls certificate": "security",
    "litellm": "tenants_of_a_front",
    "nginx buffering": "behind-a-front",
    "helm install": "kubernetes",
    "keda autoscale": "kubernetes/scaling kubernetes",
    "prometheus alerts": "kubernetes/metrics kubernetes/runbook",
    "grafana dashboard": "kubernetes/metrics",
    "usage log billing": "usage",
    "tool calls parser": "api/tools api/formats",
    "json schema strict": "api/tools",
    "anthropic messages api": "api/messages",
    "embeddings rerank": "api/embeddings",
    "image url": "api/images",
    "turn off thinking": "api/thoughts",
    "chat template": "api/templates",
    "maximum prompt length limit": "api/limits",
    "x-headstart-cached-tokens header": "api/answers",
    "why was my prompt not cached": "routing",
    "how much memory does redis need": "sizing",
    "upgrade without downtime": "upgrades kubernetes",
    "compare dynamo": "compared",
    "worker died during stream": "reliability under_load troubleshooting",
    "block hash": "architecture/blocks",
    "add routing policy": "project/CONTRIBUTING",
    "report vulnerability": "project/SECURITY",
    "no workers alert": "kubernetes/runbook",
}
FIRST: Final = """() => {
    const found = document.querySelector(".md-search-result__item a");
    return found === null ? "" : new URL(found.href).pathname.slice(1).replace(".html", "");
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site, served: a browser gives a file no search."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder], cwd=ROOT, check=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def first_page(page: Any, question: str) -> str:
    """Ask a question at once, as a slow search shows what it found for its beginning; return the first result."""
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.wait_for_function("() => document.querySelector('.md-search-result__item') === null")
    page.keyboard.insert_text(question)
    page.keyboard.press("End")
    page.wait_for_selector(".md-search-result__item a")
    return str(page.evaluate(FIRST))


def test_the_first_result_answers_the_question(browser: Any, site: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{site}/index.html")
    page.locator("input.md-search__input").click()
    wrong = {q: first for q, pages in ANSWERED_BY.items() if (first := first_page(page, q)) not in pages.split()}
    assert wrong == {}
