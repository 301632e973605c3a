"""Metrics by themselves: what they come to when processes end, and what labels peers can make."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from flowctl.live.admin.metrics import Metrics


def part(pid, sent, worker=1, stream="live/a"):
    """Return what one process tells."""
    row = {"stream": stream, "role": "viewer", "sent_bytes": sent, "received_bytes": 0, "delay_s": 0.0}
    row |= {"state_s": {"READY": 1.0}, "dropped": {"late": 2}, "closed": {}, "states": {"READY": 1}, "delays": [1] * 9}
    figures = {"rows": [row], "limit_hits": {}, "refused": {}, "flush_rounds": 3, "accepted": 1, "up_s": 1.0}
    figures |= {"streams": 1, "bans": 2, "draining": False}
    thread = {"busy": 0.5, "longest_turn_s": 0.1, "errors": 0}
    return {"pid": pid, "worker": worker, "threads": {"flowctl-0": thread}, **figures}


def values(metrics, *parts):
    """Return all samples by name, of those with the same name the sums."""
    found = {}
    for family in text_string_to_metric_families(metrics.text({"parts": list(parts)}).decode()):
        for item in family.samples:
            found[item.name] = found.get(item.name, 0) + item.value
    return found


def test_counters_when_a_worker_is_started_anew_never_go_down():
    metrics = Metrics("1")
    assert values(metrics, part(10, 100), part(20, 50, worker=2))["flowctl_sent_bytes_total"] == 150
    assert values(metrics, part(11, 5), part(20, 60, worker=2))["flowctl_sent_bytes_total"] == 165
    silent = values(metrics, part(11, 7))
    assert silent["flowctl_sent_bytes_total"] == 167
    assert (silent["flowctl_workers"], silent["flowctl_connections"], silent["flowctl_bans"]) == (1, 1, 2)
    assert values(metrics, part(11, 7), part(20, 70, worker=2))["flowctl_sent_bytes_total"] == 177


def test_labels_when_names_of_peers_are_hostile_stay_one_label():
    name = 'live/"} 1\\n# TYPE evil counter\\nevil'
    text = Metrics("1").text({"parts": [part(1, 1, stream=name)]}).decode()
    assert {family.name for family in text_string_to_metric_families(text)}.isdisjoint({"evil"})
    found = [item.labels.get("stream") for family in text_string_to_metric_families(text) for item in family.samples]
    assert name in found
