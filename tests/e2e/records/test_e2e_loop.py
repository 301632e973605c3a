"""The closed loop on small data: load, records, analysis on Spark, files that the running server takes, load again."""

from __future__ import annotations

import json
import statistics

import pytest

from flowctl.core.flow.limitsfile import parse_limits_file
from flowctl.core.server.bans import BanList
from flowctl.demo.loop import LoopPlan, addresses, run_loop
from flowctl.reasons import CloseReason

pytestmark = pytest.mark.pipeline  # a program with a Java of its own

PLAN = LoopPlan(duration_s=12.0, healthy=4, slow=2)


@pytest.mark.timeout(1500)
def test_loop_when_closed_cuts_fewer_honest_viewers_and_refuses_abusers(tmp_path, capfd):
    (tmp_path / "kept").write_text("not ours", "utf-8")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("of an earlier run", "utf-8")
    passed, told = run_loop(PLAN, tmp_path, as_json=True), capfd.readouterr()
    assert passed is True, told.out
    assert "Exception" not in told.err  # of the analysis, which is a process of its own
    shown = json.loads(told.out)
    assert (shown["passed"], shown["faults"], shown["same_process"]) == (True, [], True)
    before, after = shown["before"], shown["after"]
    assert before["slow_cut"] >= PLAN.slow  # those whose link rests for longer than the first limits allow
    assert after["slow_cut"] * 2 <= before["slow_cut"]
    assert (before["abusers_refused"], after["abusers_refused"]) == (0, after["abusers"])
    assert after["refusals"] >= after["abusers"] == 4
    assert (after["honest_refused"], after["healthy_cut"]) == (0, 0)
    honest, abusers = addresses(PLAN)
    bans = BanList.parse((tmp_path / "out" / "bans.jsonl").read_text("utf-8"))
    assert {ban.cidr for ban in bans.bans} == {f"{address}/32" for address in abusers}
    assert not any(bans.match(address, 0.0) for address in honest)
    assert all(ban.expires is not None and ban.evidence for ban in bans.bans)
    limits = parse_limits_file((tmp_path / "out" / "limits.toml").read_text("utf-8"), "limits.toml")
    assert str(limits.limits) == after["limits"] != before["limits"]
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert min(abusers) in page
    ran = json.loads((tmp_path / "out" / "summary.json").read_text("utf-8"))["jobs"]
    assert ran["report"]["summary"]["figures"]["totals"]["connections"] == ran["sessions"]["summary"]["sessions"] > 20
    check_folder(tmp_path, shown)
    check_what_if(tmp_path / "out")


def check_folder(folder, shown):
    """What the loop leaves: its comparison, a page of each load, and nothing of an earlier run but what is not its."""
    assert json.loads((folder / "comparison.json").read_text("utf-8")) == shown
    assert ((folder / "kept").exists(), (folder / "out" / "old").exists()) == (True, False)
    assert (folder / "before.html").stat().st_size > 10_000
    assert (folder / "after.html").stat().st_size > 10_000


def check_what_if(out):
    """What-if against a real run: under the limits in force it cuts the very viewers that the server has cut.

    Of honest viewers, that is: there are abusers who play as well, never read and are cut for their age, once or twice,
    and limits are not chosen for them. One may differ either way: its age met the limit within the milliseconds by
    which a loop is late. That the recommended limits cut fewer was seen by the second run; what-if has to have said so.
    """
    pq = pytest.importorskip("pyarrow.parquet")
    choices = pq.read_table(out / "whatif_choices").to_pylist()
    (in_force,) = (row for row in choices if row["in_force"])
    (chosen,) = (row for row in choices if row["recommended"])
    honest = addresses(PLAN)[0]
    sessions = [row for row in pq.read_table(out / "sessions").to_pylist() if row["role"] == "play"]
    sessions = [row for row in sessions if row["peer_ip"] in honest]
    cut = {row["conn_id"] for row in sessions if row["close_reason"] == CloseReason.HARD_LIMIT.value}
    assert len(cut) >= PLAN.slow
    samples = pq.read_table(out.parent / "events" / "flow_samples", columns=["interval_ms"])["interval_ms"].to_pylist()
    # One a second, though all connections are recorded in full: flights are no reason to sample less often.
    assert statistics.median(samples) < 2_500
    assert abs(len(cut) - in_force["disconnected"]) <= 1
    assert chosen["honest_disconnected"] * 2 <= in_force["honest_disconnected"]
