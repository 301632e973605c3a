"""The manifests of packaging/kustomize as `kubectl apply -k` would send them."""

from __future__ import annotations

import functools
import subprocess
from typing import Any

import pytest
import yaml
from install_checkers import checker
from source_kit import ROOT

FOLDER = ROOT / "packaging" / "kustomize"
APPLIED = ("cluster", "workers")
"""Folders that are applied; the others are parts of them."""


@functools.cache
def manifests(name: str) -> list[dict[str, Any]]:
    kubectl = checker("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not here (make checkers)")
    done = subprocess.run([kubectl, "kustomize", FOLDER / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


def all_manifests() -> list[dict[str, Any]]:
    return [item for name in APPLIED for item in manifests(name)]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [item for item in all_manifests() if item["kind"] in kinds]


def workloads() -> dict[str, dict[str, Any]]:
    """Return what has pods, by the component of its labels."""
    return {
        item["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: item
        for item in of_kind("Deployment", "StatefulSet")
    }


def pod_of(component: str) -> dict[str, Any]:
    pod: dict[str, Any] = workloads()[component]["spec"]["template"]
    return pod


def container_of(component: str) -> dict[str, Any]:
    (container,) = pod_of(component)["spec"]["containers"]
    return dict(container)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a selector is of pods with these labels; one that is empty is of all."""
    given = selector.get("matchLabels", {}) if "matchLabels" in selector or "matchExpressions" in selector else selector
    rules = selector.get("matchExpressions", [])
    assert all(rule["operator"] == "In" for rule in rules)
    return given.items() <= labels.items() and all(labels.get(rule["key"]) in rule["values"] for rule in rules)
