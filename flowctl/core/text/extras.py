"""The extras of flowctl: what a part of it needs beyond the framework, and how to install that."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from flowctl.errors import ConfigError

_EXTRA_OF: Final = {
    **dict.fromkeys(("rich", "typer"), "cli"),
    **dict.fromkeys(("cbor2", "zmq"), "rpc"),
    **dict.fromkeys(("dns", "httpx", "jinja2", "jwt", "pydantic"), "live"),
    **dict.fromkeys(("h11", "wsproto"), "websocket"),
    **dict.fromkeys(("fastapi", "prometheus_client", "uvicorn"), "admin"),
    "av": "media",
    "pyarrow": "telemetry",
    **dict.fromkeys(("duckdb", "pandas", "pyspark"), "pipeline"),
}
"""The smallest extra that installs a package, by the name under which it is imported."""


def install_hint(extra: str) -> str:
    return f"in flowctl's source folder: pip install '.[{extra}]'"


def missing_extra(error: ModuleNotFoundError, needs_it: str) -> ConfigError | None:
    """Return what to tell a user who lacks the extra that installs the missing package; None if no extra does."""
    package = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF.get(package)
    if extra is None:
        return None
    return ConfigError(f"{needs_it} needs the extra {extra!r}: {package} is not installed", hint=install_hint(extra))


def check_pyav() -> None:
    if find_spec("av") is None:
        raise ConfigError("PyAV is not installed", hint=install_hint("media"))
