"""A web server for HTTP hooks on loopback that answers as a test wants: rightly, slowly, badly, or not at all."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress


def http(body, status="200 OK", *more):
    """Return an answer of HTTP."""
    body = body.encode() if isinstance(body, str) else body
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *more])
    return head.encode() + b"\r\n\r\n" + body


def answer_of(ask, *asked):
    """Ask, wait, and return the refusal."""
    found, done = [], threading.Event()
    ask(*asked, lambda _, refusal: (found.append(refusal), done.set()))
    assert done.wait(20)
    return found[0]


class HookServer:
    """Takes POSTs, and GETs without a body, keeps their bodies, and answers with what `answer` makes of each.

    Attributes:
        bodies: of the requests, in the order in which they came.
        answer: called with a body, returns octets; more than one if it is a list, None: nothing is ever answered.
        release: set at the end; an answer may wait for it.
        tls: context of a server that speaks TLS. None: it speaks none.
    """

    def __init__(self, answer=lambda _: http("0")):
        self.bodies, self.paths, self.failures = [], [], []
        self.answer = answer
        self.release, self.tls = threading.Event(), None
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, path="/hook"):
        return f"http://127.0.0.1:{self.port}{path}"

    def close(self):
        self.release.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def actions(self):
        return [body["action"] for body in self.bodies]

    def _accept(self):
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        if self.tls is not None:  # the handshake is made when something is read
            client = self.tls.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        with client, suppress(OSError):
            client.settimeout(20)
            data = b""
            while b"\r\n\r\n" not in data:
                if not (more := client.recv(65536)):
                    return  # The hooks gave up before they had sent anything.
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            size = int(lengths[0].split(b":")[1]) if lengths else 0
            while len(body) < size:
                body += client.recv(65536)
            found = json.loads(body) if body else {}
            self.paths.append(head.split(b" ")[1].decode())
            self.bodies.append(found)
            answer = self.answer(found)
            if answer is None:
                self.release.wait(20)
                return
            for piece in answer if isinstance(answer, list) else [answer]:
                client.sendall(piece)
