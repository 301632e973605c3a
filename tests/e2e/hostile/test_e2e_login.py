"""FFmpeg logs in: each refusal on the way is read before the connection ends, so a login never fails by chance."""

from __future__ import annotations

import pytest
from e2e_kit import NAME

USER = {"bob": "hunter2"}
LOGINS = 8
"""Each is three connections, two of which are refused with what the client has to know for the next."""


@pytest.mark.parametrize("password", ["hunter2", "wrong"])
def test_ffmpeg_when_it_logs_in_many_times_succeeds_or_is_told_why_each_time(password, live, programs, sample):
    server = live(rtmp={"credentials": USER})
    url = f"rtmp://bob:{password}@127.0.0.1:{server.address[1]}/{NAME}"
    for number in range(LOGINS):
        run = programs.start(
            "-t",
            "0.2",
            "-i",
            sample("plain"),
            "-c",
            "copy",
            "-f",
            "flv",
            "-flvflags",
            "no_duration_filesize",
            f"{url}{number}",
        )
        status = run.wait()
        if password == "hunter2":
            assert (status, run.log) == (0, ""), number
        else:
            assert status != 0
            assert "Server error: [ AccessManager.Reject ]" in run.log or "authfailed" in run.log, run.log
