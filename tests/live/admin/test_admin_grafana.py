"""The Grafana dashboard against the metrics that there are: no panel asks for a name or a label that nothing has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from flowctl.live.admin.metrics import COUNTERS, DELAY, GAUGES

ROOT = Path(__file__).parents[3]
BOARD = json.loads((ROOT / "packaging" / "grafana" / "flowctl.json").read_text("utf-8"))
SAMPLES = {
    **{f"{name}_total": labels for name, (_, labels) in COUNTERS.items()},
    **{name: labels for name, (_, labels) in GAUGES.items()},
    f"{DELAY}_bucket": ("stream", "le"),
    "flowctl_build_info": ("version", "python"),
}
OF_PROMETHEUS = {"instance", "job"}


def expressions():
    """Return all expressions of the dashboard, those of its variables too."""
    found = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    queries = [item["query"] for item in BOARD["templating"]["list"]]
    return found + [item["query"] for item in queries if isinstance(item, dict)]


def test_dashboard_when_read_asks_for_metrics_and_labels_that_there_are():
    seen = set()
    for text in expressions():
        names = re.findall(r"\bflowctl_\w+", text)
        assert names, text
        assert set(names) <= SAMPLES.keys(), text
        known = OF_PROMETHEUS.union(*(SAMPLES[name] for name in names))
        used = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', text)
        used += [label.strip() for part in re.findall(r"\bby \(([^)]*)\)", text) for label in part.split(",")]
        assert set(used) <= known, text
        seen |= set(names)
    assert len(seen) >= 15


def test_dashboard_when_its_legends_are_read_names_labels_that_are_kept():
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            text, legend = target["expr"], target["legendFormat"]
            for label in re.findall(r"\{\{(\w+)\}\}", legend):
                kept = re.findall(r"\bby \(([^)]*)\)", text)
                labels = (
                    kept[0].split(", ") if kept else (*SAMPLES[re.findall(r"flowctl_\w+", text)[0]], *OF_PROMETHEUS)
                )
                assert label in labels, (panel["title"], label)


def test_documents_when_they_list_metrics_name_all_of_them():
    text = (ROOT / "docs" / "admin.md").read_text("utf-8")
    assert {name for name in SAMPLES if name.removesuffix("_bucket") not in text} == set()
