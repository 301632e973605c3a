"""TLS of clients: whose certificates are trusted, and the handshake, before anything else is done with a connection.

All clients of a process go by one rule (`trust`), which the processes that it starts inherit: the system's authorities,
or those of one file, and the name by which the server is called has to be in its certificate. What goes wrong is told
with the side that refused, why, and what to do about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import ssl
import time
from pathlib import Path
from typing import Final

from flowctl.core.loop.tls import HANDSHAKE_S, LEAST_VERSION, TlsSocket, alert_of, with_tls
from flowctl.core.text.userfiles import check_no_mark
from flowctl.errors import ConfigError, RemoteProtocolError

_log: Final = logging.getLogger("flowctl.tls")
_AUTHORITIES: Final = "SSL_CERT_FILE"
"""Environment variable with a file of certificate authorities; OpenSSL itself reads it."""
_INSECURE: Final = "FLOWCTL_TLS_INSECURE"
_EXPIRED, _NOT_YET, _OTHER_NAME, _OTHER_ADDRESS = 10, 9, 62, 64
"""Why OpenSSL does not verify a certificate: X509_V_ERR_* of x509_vfy.h."""
_HINTS: Final = {
    _EXPIRED: "have it renewed there",
    _NOT_YET: "compare the clocks of both machines",
    _OTHER_NAME: "call the server by a name that is in its certificate",
    _OTHER_ADDRESS: "call the server by a name or address that is in its certificate",
}
_UNKNOWN_AUTHORITY: Final = "name the authority that signed it: ca_file (--ca-file PEM)"
_OTHER_PORT: Final = "is this the port that speaks TLS there?"


def trust(*, authorities: Path | None = None, insecure: bool = False) -> None:
    """Set whose certificates are trusted by all clients of this process and of processes that it starts."""
    if authorities is not None:
        os.environ[_AUTHORITIES] = str(authorities)
        with contextlib.suppress(OSError):  # told by what comes next
            check_no_mark(authorities.read_bytes(), f"ca_file: {authorities}")
        client_context()  # a file that is no good is told now
    if insecure:
        os.environ[_INSECURE] = "1"
        _log.warning("certificates are not verified: a third party can read keys and change what is sent")


def client_context() -> ssl.SSLContext:
    """Return what a client's TLS goes by: the certificate and the name in it are verified; see `trust`."""
    file = os.environ.get(_AUTHORITIES) or None
    try:
        context = ssl.create_default_context(cafile=file)
    except OSError as error:
        raise ConfigError(
            f"cannot use the authorities in {file}: {error}", hint="ca_file (--ca-file) must be a file in PEM"
        ) from error
    context.minimum_version = LEAST_VERSION
    if os.environ.get(_INSECURE) == "1":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def secured(
    sock: socket.socket, host: str, *, timeout_s: float = HANDSHAKE_S, context: ssl.SSLContext | None = None
) -> TlsSocket:
    """Return a connected socket with TLS, its handshake done; blocks the caller. `host` is asked for and verified."""
    end = time.monotonic() + timeout_s
    made = with_tls(sock, context or client_context(), host=host)
    poll = select.poll()
    try:
        while events := step_of_handshake(made):
            poll.register(made, events)
            if not poll.poll(max(end - time.monotonic(), 0.0) * 1000):
                raise_late(timeout_s)
    except BaseException:
        made.close()
        raise
    return made


async def secured_later(sock: socket.socket, host: str, context: ssl.SSLContext) -> TlsSocket:
    """Do as `secured`, on the running loop; how long it may take is for the caller."""
    made = with_tls(sock, context, host=host)
    loop = asyncio.get_running_loop()
    try:
        while events := step_of_handshake(made):
            ready = loop.create_future()
            watch, unwatch = (
                (loop.add_writer, loop.remove_writer)
                if events == select.POLLOUT
                else (loop.add_reader, loop.remove_reader)
            )
            watch(made, _wake, ready)
            try:
                await ready
            finally:
                unwatch(made)
    except BaseException:
        made.close()
        raise
    return made


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def step_of_handshake(sock: TlsSocket) -> int:
    """Go on with a handshake as far as it goes; return the event of `select.poll` that it waits for, 0 when it is done.

    Raises:
        RemoteProtocolError: it failed; the text says which side refused.
    """
    try:
        sock.recv_into(bytearray())
    except BlockingIOError:
        return select.POLLOUT if sock.read_wants_write else select.POLLIN
    except RemoteProtocolError as error:
        raise _explained(error) from error
    except OSError as error:
        raise RemoteProtocolError(
            f"the server broke off the TLS handshake: {error.strerror}", code="tls", hint=_OTHER_PORT
        ) from error
    if not sock.established:
        raise RemoteProtocolError("the server left within the TLS handshake", code="tls", hint=_OTHER_PORT)
    return 0


def raise_late(timeout_s: float) -> None:
    raise RemoteProtocolError(
        f"the server did not finish the TLS handshake within {timeout_s:g} s", code="tls", hint=_OTHER_PORT
    )


def _explained(error: RemoteProtocolError) -> RemoteProtocolError:
    """Return an error of a handshake in words for people who connect: which side refused, and what to do."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        hint = _HINTS.get(cause.verify_code, _UNKNOWN_AUTHORITY)
        text = f"we do not trust the server's certificate: {cause.verify_message.rstrip('.')}"
        return RemoteProtocolError(text, code="tls-certificate", hint=hint)
    if said := alert_of(cause):
        return RemoteProtocolError(f"the server refused TLS: {said}", code="tls-alert")
    return RemoteProtocolError(f"{error}: the server speaks something else", code="tls", hint=_OTHER_PORT)
