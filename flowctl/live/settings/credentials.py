"""The file of users and passwords for Adobe authentication."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from flowctl.core.text.private import check_private
from flowctl.errors import ConfigError

_USERS: Final = "one user:password per line; chmod 600"


def read_credentials(path: Path) -> dict[str, str]:
    """Return the passwords by user of a file with one ``user:password`` per line; ``#`` begins a comment line."""
    try:
        check_private(path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the credentials file {path}: {error}", hint=_USERS) from error
    credentials = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        user, colon, password = line.partition(":")
        if not (user and colon and password):
            raise ConfigError(f"{path}, line {number}: it must be user:password", hint=_USERS)
        credentials[user] = password
    if not credentials:
        raise ConfigError(f"{path} holds no user", hint="without credentials_file there is no authentication")
    return credentials
