"""The extras of flowctl: what a part of it needs beyond the framework, and how to install that.

Which extra installs what is said in pyproject.toml alone, and read here from the metadata of what is installed. Entry
points there name the extra that they need as well: ``rpc = "flowctl.cli.control.rpc:add_to [rpc]"``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
import traceback
from itertools import islice
from typing import Final

from flowctl.errors import ConfigError

IMPORTED_AS: Final = {"dnspython": "dns", "opentelemetry_api": "opentelemetry", "pyjwt": "jwt", "pynacl": "nacl"}
"""Requirements that are imported by another name: what is not installed cannot tell."""
_NO_REQUIREMENT: Final = sys.stdlib_module_names | {"", "flowctl", "flowctl_servers"}
_OF_EXTRA: Final = re.compile(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]")


def _metadata() -> list[importlib.metadata.Distribution]:
    return list(islice(importlib.metadata.distributions(name="flowctl"), 1))  # none: it runs from a folder of source


@functools.cache
def packages_by_extra() -> dict[str, set[str]]:
    """Return the packages that each extra installs, by the names that they are imported by; smallest extra first."""
    packages: dict[str, set[str]] = {}
    for found in (_OF_EXTRA.match(text) for item in _metadata() for text in item.requires or ()):
        if found is not None:
            name = found[1].lower().replace("-", "_")
            packages.setdefault(found[2], set()).add(IMPORTED_AS.get(name, name))
    return dict(sorted(packages.items(), key=lambda item: len(item[1])))


def install_hint(extra: str) -> str:
    return f"in flowctl's source folder: pip install '.[{extra}]'"


def require_extra(extra: str, needs_it: str, *packages: str) -> None:
    """Raise `ConfigError` if one of these `packages` of an extra is not installed; none of them is imported."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        told = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise ConfigError(f"{needs_it} needs the extra {extra!r}: {told}", hint=install_hint(extra))


def missing_extra(error: ModuleNotFoundError, needs_it: str, extra: str = "") -> ConfigError | None:
    """Return what to tell a user who lacks a package; None if what lacks is a module of ours, or of Python.

    The extra is the one that is given, or that the innermost entry point in which the import failed needs; where that
    does not install the package, it is the smallest that does.
    """
    package = (error.name or "").partition(".")[0]
    if package in _NO_REQUIREMENT:
        return None
    needed = {point.module: point.extras[0] for item in _metadata() for point in item.entry_points if point.extras}
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    extra = extra or next((needed[name] for name in reversed(modules) if name in needed), "")
    extras = [name for name, packages in packages_by_extra().items() if package in packages]
    if extras and extra not in extras:
        extra = extras[0]
    if not extra:
        return ConfigError(f"{needs_it} needs {package}, which is not installed", hint="install what brings it again")
    return ConfigError(f"{needs_it} needs the extra {extra!r}: {package} is not installed", hint=install_hint(extra))
