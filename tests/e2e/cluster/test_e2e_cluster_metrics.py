"""Metrics of a cluster of real processes: one sum is the truth, and what nodes send each other is apart.

The expressions are those of docs/cluster-metrics.md. Prometheus' own engine works them out where its promtool is here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from dns_kit import DnsServer
from e2e_kit import wait_until
from prometheus_client.parser import text_string_to_metric_families

from flowctl.demo.cluster.frames import Encoder, FrameViewer
from flowctl.demo.processes import ServerProcesses
from flowctl.pollgroup import PollGroup

STREAM = "live/cluster"
VIEWERS = {"workers": 2, "origin": 1, "follows": 2, "segments": 1, "of the edge": 3, "pulls": 2}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "cluster-metrics.md"
STEP_S = 15


@pytest.fixture
def group():
    found = PollGroup("e2e-metrics")
    found.start()
    yield found
    found.stop(2.0)


@pytest.fixture
def names():
    found = DnsServer()
    yield found
    found.close()


@pytest.fixture
def nodes(tmp_path):
    with ServerProcesses(tmp_path) as found:
        yield found


def expressions():
    """Return the expressions of the page by what they tell."""
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    return {what.strip(): expression for what, expression in rows}


def scraped(node):
    line = node.wait_line("where it is asked", lambda line: line.get("event") == "admin", 0, 10.0)
    url = line["address"].rstrip("/")
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return [
        (sample.name, dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def total(scrape, name, **labels):
    """Return one sum over all nodes, as ``sum(NAME{LABELS})``."""
    return sum(
        value
        for samples in scrape.values()
        for found, has, value in samples
        if found == name and labels.items() <= has.items()
    )


def promtool():
    cached = Path(os.environ.get("FLOWCTL_CACHE", Path(__file__).resolve().parents[3] / "bench" / ".cache"))
    return shutil.which("promtool", path=os.pathsep.join((os.environ["PATH"], str(cached / "checkers"))))


def got_all_that_was_sent(found, viewers):
    """Say whether viewers got as many bytes as the nodes sent, but for their handshakes."""
    sent = sum(total({name: scraped(node)}, "flowctl_sent_bytes_total", role="viewer") for name, node in found.items())
    return abs(sent - sum(viewer._player.connection.receiver.bytes_in for viewer in viewers)) < 0.05 * sent


def work_out(folder, first, last, wanted):
    """Have promtool work out expressions of two scrapes, `STEP_S` apart, and compare them with what is wanted."""
    program = promtool()
    if program is None:
        pytest.skip("promtool is not here: make checkers")
    ends = {
        (node, name, *sorted(labels.items())): value
        for node, samples in last.items()
        for name, labels, value in samples
    }
    series = []
    for node, samples in first.items():
        for name, labels, value in samples:
            grows = ends[(node, name, *sorted(labels.items()))] - value if name.endswith("_total") else 0
            shown = ",".join(f"{key}={json.dumps(text)}" for key, text in {**labels, "instance": node}.items())
            series.append({"series": f"{name}{{{shown}}}", "values": f"{value:f}+{grows:f}x8"})
    tests = [
        {
            "expr": expression,
            "eval_time": f"{8 * STEP_S}s",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
        }
        for expression, samples in wanted
    ]
    document = {"tests": [{"interval": f"{STEP_S}s", "input_series": series, "promql_expr_test": tests}]}
    (folder / "cluster.json").write_text(json.dumps(document))  # JSON is YAML
    words = [program, "test", "rules", "cluster.json"]
    done = subprocess.run(words, check=False, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cluster_when_its_metrics_are_summed_counts_each_viewer_once(nodes, names, group, tmp_path):
    """A server with workers, an origin that it pushes to, edges (one by DNS, one of an edge), a server that pulls."""
    admin = ("--admin", "127.0.0.1:0", "--log-json")
    found = {"origin": nodes.start("origin", "serve", "live", "--origin", "127.0.0.1:0", *admin)}
    ports = f"{found['origin'].segments_port}/{found['origin'].port}"
    names.put("origins.test", "A", "127.0.0.1")
    push = f"live/*=rtmp://127.0.0.1:{found['origin'].port}/{{app}}/{{stream}}"
    found |= nodes.start_all(
        {
            "workers": ("serve", "live", "--workers", "2", "--relay-push", push, *admin),
            "follows": ("edge", f"127.0.0.1:{ports}", "--follow", "--set", "origin=127.0.0.1:0", *admin),
            "segments": ("edge", f"dns+origins.test:{ports}", "--dns", names.where, *admin),
        }
    )
    edge = f"127.0.0.1:{found['follows'].segments_port}/{found['follows'].port}"
    pull = f"live/*=rtmp://127.0.0.1:{found['follows'].port}/{{app}}/{{stream}}"
    found |= nodes.start_all(
        {"of the edge": ("edge", edge, *admin), "pulls": ("serve", "live", "--relay-pull", pull, *admin)}
    )
    for node in found.values():
        scraped(node)  # sums are kept from the first one on
    encoder = Encoder(group, [found["workers"].url(STREAM)], bit_rate=400_000, duration_s=30.0)
    viewers = []
    for name, count in VIEWERS.items():
        for number in range(count):
            viewers.append(FrameViewer(f"{name} {number}", found[name].url(STREAM)))
            viewers[-1].start(group)
    encoder.start(lambda: True)
    wait_until(lambda: all(len(viewer.seen) > 30 for viewer in viewers), "frames at all viewers")
    first = {name: scraped(node) for name, node in found.items()}
    time.sleep(0.5)
    last = {name: scraped(node) for name, node in found.items()}

    count = sum(VIEWERS.values())
    for scrape in (first, last):
        assert total(scrape, "flowctl_connections", role="viewer") == count
        assert total(scrape, "flowctl_connections", role="publisher") == 1
    nodes_ = {name: total({name: last[name]}, "flowctl_connections", role="node") for name in last}
    assert nodes_ == {"workers": 1, "origin": 2, "follows": 1, "segments": 0, "of the edge": 0, "pulls": 0}
    kinds = {name: next(has["kind"] for what, has, _ in last[name] if what == "flowctl_node_info") for name in last}
    assert kinds == {
        **dict.fromkeys(("workers", "pulls"), "server"),
        **dict.fromkeys(("follows", "segments", "of the edge"), "edge"),
        "origin": "origin",
    }
    sent = {role: total(last, "flowctl_sent_bytes_total", role=role) for role in ("viewer", "node")}
    assert sent["node"] > total(last, "flowctl_received_bytes_total", role="publisher")  # three copies and segments
    for name in ("origin", "follows"):  # what edges were sent in segments is among it
        rtmp_alone = total({name: last[name]}, "flowctl_sent_bytes_total", role="node", stream=STREAM)
        assert total({name: last[name]}, "flowctl_sent_bytes_total", role="node") > rtmp_alone > 0

    page = expressions()
    grown = {
        (name, role): total(last, name, role=role) - total(first, name, role=role)
        for name in ("flowctl_sent_bytes_total", "flowctl_received_bytes_total")
        for role in ("viewer", "node", "publisher")
    }
    bits = {what: f"round({page[what]} * {STEP_S} / 8)" for what in page if what.startswith("bits")}
    encoder._publishers[0].connection.close()
    wait_until(lambda: got_all_that_was_sent(found, viewers), "as many bytes at viewers as were sent")
    work_out(
        tmp_path,
        first,
        last,
        [
            (page["viewers"], [("{}", count)]),
            (page["viewers of each stream"], [(f'{{stream="{STREAM}"}}', count)]),
            (
                page["viewers at edges, at origins, elsewhere"],
                [('{kind="edge"}', 6), ('{kind="origin"}', 1), ('{kind="server"}', 4)],
            ),
            (page["publishers"], [("{}", 1)]),
            (page["streams"], [("{}", 1)]),
            (page["edges and origins"], [('{kind="edge"}', 3), ('{kind="origin"}', 1), ('{kind="server"}', 2)]),
            (bits["bits to viewers per second"], [("{}", grown["flowctl_sent_bytes_total", "viewer"])]),
            (bits["bits between servers per second"], [("{}", grown["flowctl_sent_bytes_total", "node"])]),
            (bits["bits of publishers per second"], [("{}", grown["flowctl_received_bytes_total", "publisher"])]),
        ],
    )
