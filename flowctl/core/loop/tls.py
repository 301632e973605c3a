"""A socket with TLS that never blocks: to its connection it is like any other, and the handshake happens as it is read.

Four things set TLS apart from a plain socket, and all of them end here:

- What OpenSSL has encrypted and the kernel did not take has to be offered again, the same bytes, before anything else.
  A Sender cannot promise that: what it offers next is what its peer is to have *then*. So such a record, of
  `RECORD_BYTES` at most, counts as taken and is kept here (`kept_bytes`); `push` offers it again when the socket is
  writable. It is like a little more of the kernel's buffer, and is counted with it.
- Reading may have to write and the other way round. `read_wants_write` tells the connection, which watches the socket.
  Writing never reads: it waits for the handshake, and renegotiation, which peers could ask for all day, is refused.
- Input may lie in the TLS object although the descriptor is not readable: `pending_input` says so.
- OpenSSL, where it has the descriptor, reads on for as long as records come that hold no data: a peer that sends new
  keys without end would keep the thread. So it is given what came in pieces, and never reads by itself.

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

from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import RemoteProtocolError

if TYPE_CHECKING:
    from typing_extensions import Buffer

LEAST_VERSION: Final = ssl.TLSVersion.TLSv1_2
"""Oldest version that is spoken, as a server and as a client: those before it must not be used (RFC 8996)."""
RECORD_BYTES: Final = 16 * 1024
"""Most bytes in one record (RFC 8446, 5.1): what is encrypted at a time, and what may be left over."""
HANDSHAKE_S: Final = 10.0
"""Longest time for the handshake of TLS. A phone on a bad line takes 2 s; the session's own limit, which goes on
meanwhile, may end it sooner."""
_PIECE_BYTES: Final = RECORD_BYTES + 256
"""Bytes read from the kernel at a time: a whole record, or 600 of the smallest, which take 7 ms."""
_MOST_ANSWERS_BYTES: Final = 4 * RECORD_BYTES
"""Most output kept for a peer that takes nothing; beyond it no more of its records are read: some want an answer."""
_HANDSHAKE_RECORD: Final = 0x16
_SSL2_HELLO: Final = 0x80
_RTMP_VERSION: Final = 0x03
_AGAIN: Final = "the socket is not ready"


class TlsSocket(socket.socket):
    """One end of a connection with TLS; made by `with_tls`. Reading on one thread, writing on any."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str | None) -> None:
        self.server_side: Final = host is None
        self._came: Final = ssl.MemoryBIO()  # encrypted, from the peer
        self._goes: Final = ssl.MemoryBIO()  # encrypted, for the peer; empty whenever `_tls_lock` is free
        self._tls: Final = context.wrap_bio(self._came, self._goes, server_side=host is None, server_hostname=host)
        self.established = False  # the handshake is done; the reading thread
        self.read_wants_write = False  # reading goes on when the socket is writable; the reading thread
        self.write_waits = False  # for the connection: its Sender wants to write as soon as that goes
        self.handshake_by = float("inf")  # for the connection: when the handshake has to be done
        # Called when something was kept that `push` has to offer again. Any thread, no lock of this is held.
        self.on_kept: Callable[[], object] | None = None
        self._looked = False  # at the first octet
        self._more = False  # there is more in TLS than was read
        self._fault: ssl.SSLError | None = None  # met behind what was read
        self._kept = b""  # encrypted and not taken by the kernel; written under _tls_lock
        self._closing = False  # our end of the stream is to be said; written under _tls_lock
        self._said = False  # it is among what is kept
        self._raw = False  # what comes is not decrypted any more: it is thrown away
        self._tls_lock: Final = OwnedLock()
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())

    @classmethod
    def of(cls, sock: socket.socket) -> Self | None:
        return sock if isinstance(sock, cls) else None

    @property
    def kept_bytes(self) -> int:
        """How much is kept here that counts as taken. Any thread."""
        return len(self._kept) + self._closing

    # -- reading

    def recv_into(self, buffer: Buffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Read, after the handshake where that is not done yet; 0 at the end of the stream."""
        del flags
        if self._raw:  # thrown away
            if socket.socket.recv_into(self, buffer, nbytes or 0):
                raise BlockingIOError(_AGAIN)
            return 0
        self.read_wants_write = False
        try:
            with self._tls_lock:
                count = self._read_locked(buffer, nbytes or len(memoryview(buffer)))
                kept = bool(self._kept)
        except ssl.SSLWantReadError:
            raise BlockingIOError(_AGAIN) from None
        except ssl.SSLEOFError as error:
            if self.established:
                return 0
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
        if kept and self.on_kept is not None:  # an answer to what TLS was told
            self.on_kept()
        return count

    def _read_locked(self, buffer: Buffer, size: int) -> int:
        """Decrypt what is there, after one read of the kernel's where there is nothing."""
        self._tls_lock.assert_owned()
        fed = False
        while True:
            try:
                self._flush_locked()
            except OSError:  # what the peer has sent counts all the same, once there can be any
                if not self.established:
                    raise
            if self._kept and (not self.established or len(self._kept) > _MOST_ANSWERS_BYTES):
                self.read_wants_write = True
                raise BlockingIOError(_AGAIN)
            try:
                if self._fault is not None:
                    raise self._fault
                if not self.established:
                    if not self._looked and self.server_side and not self._check_first_octet():
                        return 0
                    self._tls.do_handshake()
                    self.established = True
                if not size:  # the handshake alone was asked for
                    return self._rest_locked(memoryview(buffer))
                count: int = self._tls.read(size, buffer)  # type: ignore[assignment]  # a number where there is a buffer
            except ssl.SSLWantReadError:
                self._more = False
                if fed:
                    raise
            else:
                return count + self._rest_locked(memoryview(buffer)[count:size]) if count else 0
            finally:
                with contextlib.suppress(OSError):  # told by the next write; what was read counts
                    self._flush_locked()
            data = socket.socket.recv(self, _PIECE_BYTES)
            if data:
                self._came.write(data)
            else:
                self._came.write_eof()
            fed = True

    def _rest_locked(self, room: memoryview) -> int:
        """Decrypt what else is there, as far as there is room; an end or an error is for the next read."""
        self._tls_lock.assert_owned()
        count = 0
        self._more = False
        while self._tls.pending() or self._came.pending:
            if count == len(room):
                self._more = True
                break
            try:
                part: int = self._tls.read(len(room) - count, room[count:])  # type: ignore[assignment]  # as above
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as error:
                self._fault, part = error, 0
            if not part:
                self._more = True
                break
            count += part
        return count

    def _check_first_octet(self) -> bool:
        """See by the first octet whether the peer speaks TLS at all; return False where it has ended its stream."""
        first = socket.socket.recv(self, 1, socket.MSG_PEEK)
        self._looked = True
        if not first:
            return False
        if first[0] not in {_HANDSHAKE_RECORD, _SSL2_HELLO}:
            what = "plain RTMP" if first[0] == _RTMP_VERSION else f"first byte 0x{first[0]:02x}"
            what = "plain HTTP" if first.isalpha() else what
            raise RemoteProtocolError(f"this port speaks TLS, the peer does not: {what}", code="not-tls")
        return True

    def pending_input(self) -> bool:
        """Return whether there is input that the descriptor does not tell of."""
        return self.established and not self._raw and self._more

    def getpeercert(self, binary_form: bool = False) -> Any:  # noqa: FBT001, FBT002 - as the module has it
        return self._tls.getpeercert(binary_form)

    def version(self) -> str | None:
        return self._tls.version()

    # -- writing

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Write as much as goes; what is kept here counts as written."""
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
        """Write record by record until the kernel takes no more; what it did not take of one is kept."""
        self._tls_lock.assert_owned()
        written, total = 0, len(data)
        while written < total and not self._kept:
            written += self._tls.write(data[written : written + RECORD_BYTES])
            self._flush_locked()
        return written

    def _flush_locked(self) -> None:
        """Offer the kernel what is encrypted, and keep what it does not take."""
        self._tls_lock.assert_owned()
        data = self._goes.read()
        if self._kept:
            data = self._kept + data
        elif not data:
            return
        self._kept = data  # also where the connection is found to be broken
        with contextlib.suppress(BlockingIOError):
            while self._kept:
                self._kept = self._kept[socket.socket.send(self, self._kept) :]

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
        """Offer what is kept again; return whether nothing is kept any more."""
        with self._tls_lock:
            return self._ready_locked()

    def _ready_locked(self) -> bool:
        """Return whether something new may be written: nothing is kept, or the kernel takes it now."""
        self._tls_lock.assert_owned()
        if not self.established:
            return False
        self._flush_locked()
        if self._kept:
            return False
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
        if not self._said:
            self._said = True
            with contextlib.suppress(
                OSError, ValueError
            ):  # what this waits for, or has met, is of no interest any more
                self._tls.unwrap()
            with contextlib.suppress(ConnectionError):
                self._flush_locked()
        if self._kept:
            return
        self._closing = False
        socket.socket.shutdown(self, socket.SHUT_WR)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Read as `recv_into`; with flags, or after `shutdown`, what is there for looking at or throwing away."""
        if self._raw or flags:
            return socket.socket.recv(self, buflen, flags)
        data = bytearray(buflen)
        return bytes(data[: self.recv_into(data)])


def with_tls(sock: socket.socket, context: ssl.SSLContext, *, host: str | None = None) -> TlsSocket:
    """Return the socket with TLS that takes the place of `sock`; nothing is sent or read yet."""
    sock.setblocking(False)
    try:
        sock.getpeername()
        made = TlsSocket(sock, context, host)
    except (OSError, ValueError) as error:
        sock.close()
        raise error if isinstance(error, OSError) else OSError(str(error)) from error
    made.setblocking(False)
    return made
