"""Where servers listen on a machine: only what is the user's alone is used, and a server is found by its name."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from flowctl.control import place
from flowctl.control.listener import Clients, parse_clients
from flowctl.control.operations import Permission
from flowctl.errors import ConfigError

KEY, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "flowctl"


def listening(path):
    found = socket.socket(socket.AF_UNIX)
    found.bind(str(path))
    found.listen(64)
    return found


def test_socket_when_made_is_in_a_folder_of_the_user_alone(runtime):
    path = place.usual_socket("127.0.0.1", 1935)
    assert path == runtime / "live-127.0.0.1-1935.sock"
    assert runtime.stat().st_mode & 0o777 == 0o700
    place.make_way(path)
    assert place.usual_socket("../x", 1) == runtime / "live-..-x-1.sock"


def test_socket_when_there_is_no_runtime_folder_is_among_the_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(place.tempfile, "gettempdir", lambda: str(tmp_path))
    for value in ("", "relative", str(tmp_path / "absent")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert place.runtime_folder() == tmp_path / f"flowctl-{os.geteuid()}"


def test_folder_when_others_could_use_it_or_it_is_a_link_is_refused(tmp_path, runtime):
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    runtime.symlink_to(other)
    with pytest.raises(ConfigError, match="is no folder but a link"):
        place.make_way(place.usual_socket("x", 1))
    runtime.unlink()
    runtime.mkdir()
    runtime.chmod(0o755)
    with pytest.raises(ConfigError, match=r"others can use the folder .* \(mode 0755\)"):
        place.make_way(place.usual_socket("x", 1))


def test_folder_when_it_is_another_users_is_refused(runtime, monkeypatch):
    """Whose it is decides, not what may be done with it."""
    path = place.usual_socket("x", 1)
    uid = os.geteuid()
    monkeypatch.setattr(place.os, "geteuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        place.make_way(path)


def test_server_when_it_listens_in_a_folder_of_another_user_is_not_spoken_to(runtime, monkeypatch):
    path = place.usual_socket("x", 1)
    with listening(path):
        assert place.find_server(None) == f"ipc://{path}"
        uid = os.geteuid()
        monkeypatch.setattr(place, "runtime_folder", lambda: path.parent)
        monkeypatch.setattr(place.os, "geteuid", lambda: uid + 1)
        with pytest.raises(ConfigError, match=r"no server is looked for: the folder .* belongs to") as caught:
            place.find_server(None)
    assert "--server ADDRESS" in caught.value.hint


def test_socket_when_left_by_a_server_that_died_makes_way(runtime):
    path = place.usual_socket("x", 1)
    listening(path).close()
    place.make_way(path)
    assert not path.exists()
    with listening(path):
        with pytest.raises(ConfigError, match="another server listens"):
            place.make_way(path)
        link = runtime / "link.sock"
        link.symlink_to(path)
        with pytest.raises(ConfigError, match="is no socket of this user"):
            place.make_way(link)
    file = runtime / "file.sock"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket of this user"):
        place.make_way(file)
    assert file.read_text() == "precious"
    with pytest.raises(ConfigError, match="more than 107 bytes"):
        place.make_way(runtime / ("x" * 120))


def test_server_when_looked_for_is_the_one_that_is_meant(runtime):
    with pytest.raises(place.NotFoundError, match="no server of this user runs"):
        place.find_server(None)
    paths = [place.usual_socket("127.0.0.1", port) for port in (1935, 1936, 11935)]
    listening(paths[2]).close()
    with listening(paths[0]):
        assert place.find_server(None) == f"ipc://{paths[0]}"
        with listening(paths[1]):
            with pytest.raises(place.NotFoundError, match=r"2 servers run here: 127.0.0.1-1935, 127.0.0.1-1936"):
                place.find_server(None)
            assert place.find_server("1936") == place.find_server("127.0.0.1-1936") == f"ipc://{paths[1]}"
            with pytest.raises(place.NotFoundError, match="no server here is called '11935'"):
                place.find_server("11935")
    assert place.find_server("tcp://192.0.2.1:7000") == "tcp://192.0.2.1:7000"
    assert place.find_server("/run/x.sock") == "ipc:///run/x.sock"


@pytest.mark.skipif(os.geteuid() != 0, reason="it is about root")
def test_find_server_when_root_asks_finds_that_of_the_service(runtime, monkeypatch, tmp_path):
    """The service runs as another user, in a folder that systemd made: root needs no option to reach it."""
    monkeypatch.setattr(place, "SERVICE_FOLDER", tmp_path)
    path = tmp_path / "live-0.0.0.0-1935.sock"
    with listening(path):
        assert place.find_server(None) == f"ipc://{path}"
        monkeypatch.setattr(place.os, "geteuid", lambda: 4711)
        with pytest.raises(place.NotFoundError):
            place.find_server(None)


# -- who may speak from elsewhere


def test_clients_when_read_have_level_and_name():
    found = parse_clients(f"# who\n\n{KEY} admin  night shift # of us\n{OTHER}\tbasic\n", "f")
    assert found == {
        bytes.fromhex(KEY): (Permission.ADMIN, "night shift"),
        bytes.fromhex(OTHER): (Permission.BASIC, ""),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\nxyz admin", "f, line 2: the key is a text of 3 letters"),
        (f"{KEY}", "f, line 1: the level is ''"),
        (f"{KEY} root", "f, line 1: the level is 'root', it must be basic or admin"),
        (f"{KEY} admin\n{KEY} basic", "f, line 2: this key is in the file twice"),
    ],
)
def test_clients_when_a_line_is_wrong_name_it(text, said):
    """File, line and what is allowed; no key is shown, it may be a secret one put there by mistake."""
    with pytest.raises(ConfigError, match=said) as caught:
        parse_clients(text, "f")
    assert KEY not in str(caught.value)


def test_clients_when_the_file_changes_are_those_that_it_names(tmp_path):
    path = tmp_path / "clients"
    path.write_text(f"{KEY} admin\n")
    path.chmod(0o600)
    clients = Clients(path)
    assert clients.find(bytes.fromhex(KEY)).permission is Permission.ADMIN
    path.write_text(f"{OTHER} basic\n")
    assert clients.find(bytes.fromhex(KEY)) is None
    assert clients.find(bytes.fromhex(OTHER)).permission is Permission.BASIC
    path.write_text("nonsense here\n")
    for _ in range(2):
        with pytest.raises(ConfigError):
            clients.find(bytes.fromhex(OTHER))
    path.write_text(f"{OTHER} basic  \n")
    path.chmod(0o622)
    with pytest.raises(ConfigError, match="others than its owner can write"):
        clients.find(bytes.fromhex(OTHER))


def test_socket_when_its_queue_is_full_is_somebodys(tmp_path):
    """A server that is behind with its callers is there: its socket is neither passed over nor taken away."""
    path = tmp_path / "live.sock"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(path))
        server.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(8):
                caller = stack.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(str(path))
        path.chmod(0o600)
        tmp_path.chmod(0o700)
        assert place.server_answers(path)
        with pytest.raises(ConfigError, match="another server listens"):
            place.make_way(path)
        assert path.exists()
