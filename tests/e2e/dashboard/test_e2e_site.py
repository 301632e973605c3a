"""The documents as a site: every page and public name is in it, found by its search, and kept by version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import generate_docs
import pytest
from dashboard_kit import Browser
from install_browser import no_browser
from source_kit import ROOT

import flowctl

VERSION = "1.2"

pytestmark = pytest.mark.timeout(200)  # the build takes 10 s alone, and a minute beside others


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of this checkout, made by the tool that keeps its versions, out of the branch where that puts it."""
    folder = tmp_path_factory.mktemp("site")
    work = folder / "work"
    for path in ("docs", "packaging/site"):
        shutil.copytree(ROOT / path, work / path)
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "bench/README.md"):
        (work / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(path, work / path.relative_to(ROOT))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "NO_MKDOCS_2_WARNING": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }

    def run(*command):
        done = subprocess.run(
            command, check=False, cwd=work, env=environment, timeout=150, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    run("git", "init", "-q")
    run("git", "config", "user.name", "maintainers")
    run("git", "config", "user.email", "maintainers@example.invalid")
    run("git", "commit", "-q", "--allow-empty", "-m", "Documents")
    run("mike", "deploy", VERSION, "latest")
    run("git", "clone", "-q", "--branch", "gh-pages", ".", folder / "branch")
    return folder / "branch"


def test_site_when_built_keeps_versions_apart(site):
    (version,) = json.loads((site / "versions.json").read_text())
    assert (version["version"], version["aliases"]) == (VERSION, ["latest"])
    assert (site / "latest" / "index.html").read_text() == (site / VERSION / "index.html").read_text()


def test_site_when_built_has_every_document_and_public_name(site):
    texts = {path.relative_to(site / VERSION): path.read_text("utf-8") for path in (site / VERSION).rglob("*.html")}
    pages = {str(path.with_suffix("")) for path in texts}
    documents = {str(path.relative_to(ROOT).with_suffix("")) for path in generate_docs.DOCUMENTS}
    assert {name.removeprefix("docs/") for name in documents - {"README"}} <= pages
    api = "".join(text for path, text in texts.items() if path.parts[0] == "api")
    assert [name for name in flowctl.__all__ if f'id="{flowctl._HOME_OF[name]}.{name}"' not in api] == []
    assert "Put <code>limits</code> in force at once" in api  # of a docstring


def test_site_when_built_loads_nothing_from_elsewhere(site):
    for page in (site / VERSION).rglob("*.html"):
        text = page.read_text("utf-8")
        assert 'src="http' not in text
        assert 'rel="stylesheet" href="http' not in text


@pytest.mark.realtime
@pytest.mark.skipif(bool(no_browser()), reason=no_browser())
def test_search_when_asked_in_a_browser_finds_a_setting_and_a_class(site, tmp_path):
    handler = partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Browser(tmp_path)
        try:
            for words, page in (("players_may_wait", "reference.html"), ("DeferredProcessor", "api/servers.html")):
                browser.open(f"http://127.0.0.1:{server.server_port}/{VERSION}/index.html")
                browser.fill("input.md-search__input", words)
                script = "return [...document.querySelectorAll('a.md-search-result__link')].map((item) => item.href)"
                links = browser.wait(lambda script=script: browser.run(script), f"results for {words}")
                assert any(f"/{VERSION}/{page}" in link for link in links), links
        finally:
            browser.close()
            server.shutdown()
