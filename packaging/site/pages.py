"""A hook of MkDocs: what the site has beside docs/, namely the documents of the top folder and the API reference.

The API reference has a page for each group of public names. Their texts come from the docstrings (mkdocstrings), which
names there are from `flowctl.__all__`: a new one that belongs to no group ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import flowctl

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT: Final = Path(__file__).resolve().parents[2]
BESIDE: Final = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md")
"""Documents outside of docs/ that pages of docs/ link to."""
GROUPS: Final = {
    "servers": ("Servers and connections", r"connection$|core\.server|pollgroups?$|deferred$|core\.loop|receiver$"),
    "sending": ("Senders, limits, policies", r"sender$|core\.(flow|sending)|core\.outgoing\.outbox|reasons$"),
    "streams": ("Streams to many viewers", r"core\.(fanout|outgoing\.streamlog)|streamset$|live\.judging"),
    "websocket": ("WebSocket", r"websocket$"),
    "rpc": ("RPC", r"nodes\.rpc|wire\.zmtp"),
    "messages": ("Messenger, scheduler, diffusion", r"nodes\.(messenger|scheduler|diffusion)"),
    "errors": ("Errors", r"errors$"),
}
"""Pages of the API reference: file, title, and the modules (behind ``flowctl.``) whose public names it has."""


def api_pages() -> dict[str, str]:
    """Return the text of each page of the API reference, by file."""
    homes: dict[str, str] = vars(flowctl)["_HOME_OF"]
    left, pages = dict(homes), {}
    for file, (title, modules) in GROUPS.items():
        names = sorted(name for name, home in left.items() if re.match(modules, home.removeprefix("flowctl.")))
        text = "\n".join(f"::: {left.pop(name)}.{name}\n" for name in names)
        pages[f"api/{file}.md"] = f"# {title}\n\nImported from `flowctl`: `from flowctl import {names[0]}`.\n\n{text}"
    if left:
        raise PluginError(f"public names without a page of the API reference: {', '.join(sorted(left))}")
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation of docs/index.md: a part for each heading, a page for each link."""
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    nav: list[Any] = [{"Start": "index.md"}]
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        links = re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", body)
        nav.append({title: [{name[:1].upper() + name[1:]: path.removeprefix("../")} for name, path in links]})
    nav[-1]["Look it up"].append({"API": list(api_pages())})
    config.nav = nav
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    for path in BESIDE:
        files.append(File.generated(config, path, content=(ROOT / path).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links between docs/ and what lies beside it to where both stand in the site."""
    path = page.file.src_uri
    if path in BESIDE:
        return re.sub(r"\]\((\.\./)?docs/", r"](\1", markdown)
    out = re.escape("../" * (path.count("/") + 1))
    return re.sub(rf"\]\({out}({'|'.join(map(re.escape, BESIDE))})", "](" + "../" * path.count("/") + r"\1", markdown)
