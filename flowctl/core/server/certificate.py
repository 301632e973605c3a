"""A server's certificate: read from files, and again when they change; what is wrong with a new one changes nothing."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Final

from flowctl.core.loop.tls import LEAST_VERSION, TlsSocket, with_tls
from flowctl.core.text.private import check_private
from flowctl.core.text.userfiles import check_no_mark
from flowctl.errors import ConfigError

_State = tuple[tuple[int, int, int], ...]


class Certificate:
    """Certificate and key of a server, as files in PEM. Any thread."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.certificate: Final = certificate
        self.key: Final = key
        self.fault = ""  # what is wrong with the files as they are now, so that those of before are in force
        self._seen = self._state()
        self._context = self._load()

    def wrap(self, sock: socket.socket) -> TlsSocket:
        """Return a new connection's socket with TLS; `sock` must not be used any more."""
        return with_tls(sock, self._context)

    @property
    def context(self) -> ssl.SSLContext:
        """What newcomers speak TLS with."""
        return self._context

    def reload_if_changed(self) -> bool:
        """Read the files again if they have changed; return whether newcomers get another certificate from now on.

        Connections that are open keep theirs.
        """
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        try:
            self._context = self._load()
        except ConfigError as error:
            self.fault = str(error)
            raise
        self.fault = ""
        return True

    def _state(self) -> _State:
        states = []
        for path in (self.certificate, self.key):
            try:
                status = path.stat()
            except OSError:
                states.append((0, 0, 0))
            else:
                # The time of the change of the inode: who may read a key changes it too, and what is written.
                states.append((status.st_ino, status.st_ctime_ns, status.st_size))
        return tuple(states)

    def _load(self) -> ssl.SSLContext:
        try:
            check_private(self.key, "tls_key")
            check_no_mark(self.key.read_bytes(), f"tls_key: {self.key}")
        except OSError as error:
            why = f"cannot read {self.key}: {error.strerror}"
            raise ConfigError(f"tls_key: {why}", hint="name a file in PEM") from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = LEAST_VERSION
        # Peers that renegotiate would make us work at will; TLS 1.3 has no such thing.
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        try:
            text = self.certificate.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"tls_certificate: cannot read {self.certificate}: {error.strerror}", hint="name a file in PEM"
            ) from error
        check_no_mark(text, f"tls_certificate: {self.certificate}")
        if b"-----BEGIN CERTIFICATE-----" not in text:
            raise ConfigError(f"tls_certificate: there is no certificate in {self.certificate}", hint="it must be PEM")
        try:
            # Given no pass phrase OpenSSL would ask for one at the terminal.
            context.load_cert_chain(self.certificate, self.key, password=_no_pass_phrase)
        except _PassPhraseError as error:
            raise ConfigError(
                f"tls_key: {self.key} has a pass phrase", hint="write it without: openssl pkey -in KEY -out NEW"
            ) from error
        except ssl.SSLError as error:
            raise self._wrong(error) from error
        except OSError as error:
            raise ConfigError(
                f"tls_key: cannot read {self.key}: {error.strerror}",
                hint="it must belong to the user that the server runs as",
            ) from error
        return context

    def _wrong(self, error: ssl.SSLError) -> ConfigError:
        if error.reason == "KEY_VALUES_MISMATCH":
            return ConfigError(
                f"tls_key: {self.key} is not the key of {self.certificate}",
                hint="give the two files that were made together",
            )
        reason = (error.reason or "not readable as PEM").lower().replace("_", " ")
        return ConfigError(
            f"tls_certificate {self.certificate} and tls_key {self.key}: {reason}",
            hint="both must be PEM, and a renewal must have replaced both",
        )


class _PassPhraseError(Exception):
    """The key has a pass phrase."""


def _no_pass_phrase() -> str:
    raise _PassPhraseError
