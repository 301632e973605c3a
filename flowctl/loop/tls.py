"""A socket with TLS that never blocks: to its connection it is like any other, and the handshake happens as it is read.

Three things set TLS apart from a plain socket, and all three end here:

- What OpenSSL has encrypted and the kernel did not take has to be offered again, the same bytes, before anything else.
  A Sender cannot promise that: what it offers next is what its peer is to have *then*. So such a record, of
  `RECORD_BYTES` at most, counts as taken and is kept here (`kept_bytes`); `push` offers it again when the socket is
  writable. It is like a little more of the kernel's buffer, and is counted with it.
- Reading may have to write and the other way round. `read_wants_write` tells the connection, which watches the socket.
  Writing never reads: it waits for the handshake, and renegotiation, which peers could ask for all day, is refused.
- Input may lie in the TLS object although the descriptor is not readable: `pending` says so.

All errors of TLS are the peer's: a `RemoteProtocolError`, of reading; an OSError, of writing. Either way EAGAIN is a
`BlockingIOError`, as of a plain socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from flowctl.errors import RemoteProtocolError
from flowctl.loop.locks import OwnedLock

if TYPE_CHECKING:
    from typing_extensions import Buffer

RECORD_BYTES: Final = 16 * 1024
"""Most that one record holds (RFC 8446, 5.1): what is encrypted at a time, and what may be left over."""
HANDSHAKE_S: Final = 10.0
"""How long a peer may take for the handshake of TLS. A phone on a bad line takes 2 s; the session's own limit, which
goes on meanwhile, may end it sooner."""
_HANDSHAKE_RECORD: Final = 0x16
_SSL2_HELLO: Final = 0x80
_RTMP_VERSION: Final = 0x03
_AGAIN: Final = "the socket is not ready"


class TlsSocket(ssl.SSLSocket):
    """One end of a connection with TLS; made by `with_tls`. Reading on one thread, writing on any.

    Attributes:
        established: the handshake is done. The reading thread.
        read_wants_write: reading goes on when the socket is writable. The reading thread.
        write_waits: somebody wants to write as soon as that goes; set by its connection.
        handshake_by: when the handshake has to be done; set by its connection.
        on_kept: called when something was kept that `push` has to offer again. Any thread, no lock of this is held.
    """

    established = False
    read_wants_write = False
    write_waits = False
    handshake_by = float("inf")
    on_kept: Callable[[], object] | None = None
    _looked = False  # at the first octet
    _kept: bytes = b""  # encrypted and not taken by the kernel; written under _tls_lock
    _closing = False  # our end of the stream is to be said; written under _tls_lock
    _raw = False  # what comes is not decrypted any more: it is thrown away
    _tls_lock: OwnedLock

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make one for `ssl`, which never calls ``__init__``."""
        made = super().__new__(cls, *args, **kwargs)
        made._tls_lock = OwnedLock()
        return made

    @classmethod
    def of(cls, sock: socket.socket) -> Self | None:
        """Return `sock` if it speaks TLS."""
        return sock if isinstance(sock, cls) else None

    @property
    def kept_bytes(self) -> int:
        """How much is kept here that counts as taken. Any thread."""
        return len(self._kept) + self._closing

    # -- reading

    def recv_into(self, buffer: Buffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Read, after the handshake where that is not done yet; 0 at the end of the stream.

        Raises:
            BlockingIOError: nothing more can be done now.
            RemoteProtocolError: what came is no TLS, or wrong.
            OSError: the connection is broken.
        """
        del flags
        if self._raw:  # thrown away
            if socket.socket.recv_into(self, buffer, nbytes or 0):
                raise BlockingIOError(_AGAIN)
            return 0
        self.read_wants_write = False
        try:
            with self._tls_lock:
                if not self.established:
                    if not self._looked and self.server_side and not self._look():
                        return 0
                    self.do_handshake()
                    self.established = True
                return super().recv_into(buffer, nbytes)
        except ssl.SSLWantReadError:
            raise BlockingIOError(_AGAIN) from None
        except ssl.SSLWantWriteError:
            self.read_wants_write = True
            raise BlockingIOError(_AGAIN) from None
        except ssl.SSLEOFError as error:
            if self.established:
                raise
            raise RemoteProtocolError("the peer left within the TLS handshake", code="tls") from error
        except ssl.SSLCertVerificationError as error:
            raise RemoteProtocolError(
                f"its certificate is not to be trusted: {error.verify_message}",
                code="tls-certificate",
                hint="name the file of the authority that signed it, or connect without verifying",
            ) from error
        except ssl.SSLError as error:
            what = (error.reason or str(error)).lower().replace("_", " ")
            raise RemoteProtocolError(f"TLS: {what}", code="tls") from error

    def _look(self) -> bool:
        """See by the first octet whether the peer speaks TLS at all; return False where it has ended its stream.

        Raises:
            RemoteProtocolError: it does not, and what it speaks instead.
        """
        first = socket.socket.recv(self, 1, socket.MSG_PEEK)
        self._looked = True
        if not first:
            return False
        if first[0] not in {_HANDSHAKE_RECORD, _SSL2_HELLO}:
            what = "plain RTMP" if first[0] == _RTMP_VERSION else f"first octet 0x{first[0]:02x}"
            what = "plain HTTP" if first.isalpha() else what
            raise RemoteProtocolError(f"this port speaks TLS, the peer does not: {what}", code="not-tls")
        return True

    def pending_input(self) -> bool:
        """Return whether there is input that the descriptor does not tell of."""
        return self.established and not self._raw and self.pending() > 0

    # -- writing

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Write as much as goes; what is kept here counts as written.

        Raises:
            BlockingIOError: nothing can be written now.
            OSError: the connection is broken, or our end of the stream has been said.
        """
        del flags
        with self._tls_lock:
            if self._raw:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            if (self._kept or not self.established) and not self._ready_locked():
                raise BlockingIOError(_AGAIN)
            written = self._write_locked(memoryview(data))
            kept = bool(self._kept)
        if kept and self.on_kept is not None:
            self.on_kept()
        return written

    def _write_locked(self, data: memoryview) -> int:
        """Write record by record until the kernel takes no more; the one that it did not take whole is kept."""
        self._tls_lock.assert_owned()
        written, total = 0, len(data)
        while written < total:
            part = data[written : written + RECORD_BYTES]
            try:
                written += super().send(part)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                self._kept = bytes(part)
                return written + len(part)
        return written

    def sendmsg(self, buffers: Sequence[Buffer], *_: Any) -> int:  # type: ignore[override]  # what a transport is asked for
        """Write as much of `buffers` as goes, one record at most: small messages share one."""
        first = memoryview(buffers[0])
        if len(buffers) == 1 or len(first) >= RECORD_BYTES:
            return self.send(first)
        joined, room = [], RECORD_BYTES
        for buffer in buffers:
            part = memoryview(buffer)[:room]
            joined.append(part)
            room -= len(part)
            if not room:
                break
        return self.send(b"".join(joined))

    def push(self) -> bool:
        """Offer what is kept again; return whether nothing is kept any more.

        Raises:
            OSError: the connection is broken.
        """
        with self._tls_lock:
            return self._ready_locked()

    def _ready_locked(self) -> bool:
        """Return whether something new may be written: nothing is kept, or the kernel takes it now."""
        self._tls_lock.assert_owned()
        if not self.established:
            return False
        while self._kept:
            try:
                count = super().send(self._kept)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return False
            self._kept = self._kept[count:]
        if self._closing:
            self._say_end_locked()
        return not self._closing

    # -- the end

    def shutdown(self, how: int) -> None:
        """End our stream: say so to the peer's TLS and to its kernel, or as soon as what is kept has gone (`push`).

        What comes from now on is not decrypted; it is for throwing away.
        """
        with self._tls_lock:
            if self._raw:
                if not self._closing:
                    socket.socket.shutdown(self, how)
                return
            self._raw = True
            self._closing = self.established
            if self.established:
                with contextlib.suppress(OSError):
                    self._ready_locked()
                    return
            self._closing, self._kept = False, b""
            socket.socket.shutdown(self, how)

    def _say_end_locked(self) -> None:
        """Send close_notify and end the stream; `_closing` stays where the kernel does not take it."""
        try:
            self.unwrap()
        except ssl.SSLWantWriteError:
            return
        except (OSError, ValueError):
            pass  # it is sent, and what this waits for, or has met, is of no interest any more
        self._closing = False
        socket.socket.shutdown(self, socket.SHUT_WR)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Read as `recv_into`; with flags, or after `shutdown`, what is there for looking at or throwing away."""
        if self._raw or flags:
            return socket.socket.recv(self, buflen, flags)
        data = bytearray(buflen)
        return bytes(data[: self.recv_into(data)])


def with_tls(sock: socket.socket, context: ssl.SSLContext, *, host: str | None = None) -> TlsSocket:
    """Return the socket with TLS that takes the place of `sock`; nothing is sent or read yet.

    Args:
        sock: connected; must not be used any more.
        context: a server's, or with `host` a client's.
        host: name that the server's certificate must have. None: this is the server's end.

    Raises:
        OSError: the peer has gone; `sock` is closed.
    """
    context.sslsocket_class = TlsSocket
    sock.setblocking(False)
    try:
        made = context.wrap_socket(sock, server_side=host is None, do_handshake_on_connect=False, server_hostname=host)
    except (OSError, ValueError) as error:
        sock.close()
        raise error if isinstance(error, OSError) else OSError(str(error)) from error
    assert isinstance(made, TlsSocket)  # noqa: S101 - for the type checker: the context makes these
    return made
