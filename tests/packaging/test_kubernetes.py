"""The manifests for Kubernetes: built by kubectl, held against its schemas, and against what they mean."""

from __future__ import annotations

import copy
import importlib
import json
import re
import subprocess

import jsonschema_rs
import pytest
import yaml
from install_checkers import checker
from kubernetes_kit import FOLDER, all_manifests, container_of, of_kind, pod_of, selects, workloads
from source_kit import ROOT

from flowctl.live.admin.metrics import COUNTERS, DELAY, GAUGES

COMPONENTS = ("origin", "edge", "server")
ADMIN_PORT = 8936
MONITORING = "monitoring.coreos.com/v1"
SIGTERM_S = 7
"""Longest that a server takes to end by SIGTERM (docs/operating.md)."""


def faults_of(manifest):
    """Return what the strict schema of its kind, in which unknown fields are faults, has against a manifest."""
    schemas = checker("kubernetes")
    if schemas is None:
        pytest.skip("the schemas of Kubernetes are not here (make checkers)")
    group, _, version = manifest["apiVersion"].rpartition("/")
    name = "-".join(filter(None, (manifest["kind"].lower(), group.split(".")[0], version)))
    definitions = json.loads((schemas / "_definitions.json").read_text())
    registry = jsonschema_rs.Registry([("http://schemas/api/_definitions.json", definitions)])
    schema = json.loads((schemas / f"{name}.json").read_text())
    validator = jsonschema_rs.validator_for(schema, registry=registry, base_uri=f"http://schemas/api/{name}.json")
    return [f"{'/'.join(map(str, fault.instance_path))}: {fault.message}" for fault in validator.iter_errors(manifest)]


def test_manifests_when_held_against_the_schemas_of_kubernetes_are_valid():
    found = {
        f"{item['kind']} {item['metadata']['name']}": faults_of(item)
        for item in all_manifests()
        if item["apiVersion"] != MONITORING
    }
    assert len(found) >= 12
    assert {name: faults for name, faults in found.items() if faults} == {}


def test_manifest_when_a_field_is_misspelled_or_of_another_type_is_refused():
    for change in ({"terminationGracePeriod": 5}, {"terminationGracePeriodSeconds": "5"}):
        broken = copy.deepcopy(workloads()["edge"])
        broken["spec"]["template"]["spec"] |= change
        (fault,) = faults_of(broken)
        assert "terminationGracePeriod" in fault


def test_manifests_when_held_against_the_models_of_the_operator_are_valid(monkeypatch):
    """The models leave out what they do not know: what comes back must be what was given."""
    if checker("prometheus-operator") is None or checker("cloudcoil") is None:
        pytest.skip("the models of the Prometheus operator are not here (make checkers)")
    monkeypatch.syspath_prepend(str(checker("cloudcoil").parent))
    models = importlib.import_module("cloudcoil.models.prometheus_operator.v1")
    found = of_kind("PodMonitor", "PrometheusRule")
    assert {item["kind"] for item in found} == {"PodMonitor", "PrometheusRule"}
    for item in found:
        model = getattr(models, item["kind"]).model_validate(item)
        assert json.loads(model.model_dump_json(by_alias=True, exclude_unset=True)) == item


@pytest.mark.parametrize("component", COMPONENTS)
def test_pods_when_read_are_no_root_and_write_nowhere_but_into_volumes(component):
    pod, container = pod_of(component)["spec"], container_of(component)
    user = re.search(r"USER (\d+)", (ROOT / "Dockerfile").read_text())[1]
    assert pod["securityContext"]["runAsNonRoot"]
    assert {str(pod["securityContext"][key]) for key in ("runAsUser", "runAsGroup", "fsGroup")} == {user}
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    claims = workloads()[component]["spec"].get("volumeClaimTemplates", [])
    there = {item["name"] for item in pod["volumes"]} | {item["metadata"]["name"] for item in claims}
    assert {item["name"] for item in container["volumeMounts"]} == there
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}


@pytest.mark.parametrize("component", COMPONENTS)
def test_pods_when_they_are_to_go_have_the_time_that_the_drain_takes(component):
    command = " ".join(container_of(component)["lifecycle"]["preStop"]["exec"]["command"])
    head_s, within_s, rest_s = map(int, re.findall(r"(\d+)s?\b", command))
    assert rest_s > within_s
    assert pod_of(component)["spec"]["terminationGracePeriodSeconds"] >= head_s + within_s + SIGTERM_S + 5


@pytest.mark.parametrize("component", COMPONENTS)
def test_ports_when_they_are_named_are_those_of_the_pods(component):
    """Of probes, of services that select the pods, and of the monitoring."""
    container, labels = container_of(component), pod_of(component)["metadata"]["labels"]
    ports = {item["name"]: item["containerPort"] for item in container["ports"]}
    assert ports["admin"] == ADMIN_PORT
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert [(item["path"], item["port"]) for item in probes] == [
        ("/readyz", "admin"),
        ("/readyz", "admin"),
        ("/healthz", "admin"),
    ]
    services = [item["spec"] for item in of_kind("Service") if selects(item["spec"]["selector"], labels)]
    assert services
    assert {port["targetPort"] for spec in services for port in spec["ports"]} <= ports.keys() - {"admin"}
    # Limits and bans are for addresses: one that hides those of viewers would be limited for all of them.
    assert all(spec["externalTrafficPolicy"] == "Local" for spec in services if spec.get("type") == "LoadBalancer")
    monitors = [item["spec"] for item in of_kind("PodMonitor") if selects(item["spec"]["selector"], labels)]
    assert {end["port"] for spec in monitors for end in spec["podMetricsEndpoints"]} == {"admin"}


def who_may(component):
    """Return for each port of a component from where the policies of the network let in."""
    labels = pod_of(component)["metadata"]["labels"]
    (policy,) = [item["spec"] for item in of_kind("NetworkPolicy") if selects(item["spec"]["podSelector"], labels)]
    found = {}
    for rule in policy["ingress"]:
        peers = {"everywhere"} if "from" not in rule else set()
        for peer in rule.get("from", []):
            pods = {name for name in COMPONENTS if selects(peer.get("podSelector", {"no": ""}), labels_of(name))}
            peers |= pods or {peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]}
        found |= {port["port"]: peers for port in rule["ports"]}
    return found


def labels_of(component):
    return pod_of(component)["metadata"]["labels"]


def test_policies_of_the_network_when_read_let_in_who_needs_it_alone():
    both = {"rtmp": {"everywhere"}, "admin": {"monitoring"}}
    assert who_may("origin") == both | {"segments": {"edge"}}
    assert who_may("edge") == who_may("server") == both | {"http": {"everywhere"}}


def test_budgets_when_read_are_each_of_one_component():
    budgets = {item["metadata"]["name"]: item["spec"]["selector"] for item in of_kind("PodDisruptionBudget")}
    selected = {name: [part for part in COMPONENTS if selects(budgets[name], labels_of(part))] for name in budgets}
    assert selected == {"flowctl-origin": ["origin"], "flowctl-edge": ["edge"]}


def test_secret_when_it_is_read_by_pods_has_the_keys_that_the_documents_make():
    text = (ROOT / "docs" / "deploying.md").read_text()
    (command,) = re.findall(r"kubectl create secret generic flowctl ((?:.*\\\n)*.*)", text)
    made = set(re.findall(r"--from-(?:file|literal)=([\w-]+)", command))
    used = {item["valueFrom"]["secretKeyRef"]["key"] for item in container_of("edge")["env"] if "valueFrom" in item}
    for component in COMPONENTS:
        values = [item.get("value", "") for item in container_of(component)["env"]]
        used |= {name for value in values for name in re.findall(r"/etc/flowctl/secrets/(\S+)", value)}
    used |= {of_kind("PodMonitor")[0]["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"]["key"]}
    assert used == made


def rules():
    (text,) = {json.dumps(item["spec"]) for item in of_kind("PrometheusRule")}
    return json.loads(text)


def test_alerts_when_read_ask_for_metrics_that_there_are():
    samples = {f"{name}_total" for name in COUNTERS} | set(GAUGES) | {f"{DELAY}_bucket", "flowctl_build_info"}
    asked = [set(re.findall(r"\bflowctl_\w+", item["expr"])) for item in rules()["groups"][0]["rules"]]
    assert all(asked)
    assert set().union(*asked) <= samples


def promtool(folder, *words):
    program = checker("promtool")
    if program is None:
        pytest.skip("promtool is not here (make checkers)")
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules()))
    done = subprocess.run([program, *words], cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout + done.stderr


def test_alerts_when_checked_by_promtool_are_valid(tmp_path):
    status, said = promtool(tmp_path, "check", "rules", "--lint-fatal", "rules.yaml")
    assert status == 0, said
    assert f"{len(rules()['groups'][0]['rules'])} rules found" in said


def test_alerts_when_run_by_promtool_tell_of_trouble_and_of_nothing_else(tmp_path):
    (tmp_path / "cases.yaml").write_text((ROOT / "tests" / "packaging" / "alert_cases.yaml").read_text())
    status, said = promtool(tmp_path, "test", "rules", "cases.yaml")
    assert status == 0, said
    cases = yaml.safe_load((tmp_path / "cases.yaml").read_text())["tests"]
    told = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert told == {item["alert"] for item in rules()["groups"][0]["rules"]}


def test_folders_when_they_are_listed_are_applied_or_parts_of_what_is():
    assert {path.name for path in FOLDER.iterdir()} == {"cluster", "workers", "origins", "edges", "monitoring", "pod"}
