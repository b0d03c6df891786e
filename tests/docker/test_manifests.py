"""Dockerfile, compose files, Kubernetes, Prometheus, Grafana, nginx: held to the code that they
speak of. Each reader here has been given a broken file too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.settings import OTHER_KEYS, PREFIX, PROFILES, Settings, load
from server.app import create_app
from server.metrics import Metrics

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
KEYS = {PREFIX + name.upper() for name in Settings.model_fields} | OTHER_KEYS
COMPOSE = sorted(DOCKER.glob("compose.*.yaml"))
# What a service of a compose file may have; a misspelt key would be dropped or refused on the host.
SERVICE_KEYS = frozenset(
    "image build network_mode ports environment devices volumes tmpfs shm_size ulimits cap_drop "
    "security_opt init stop_grace_period restart deploy read_only profiles".split()
)


def unknown_keys(text: str) -> set[str]:
    """Names in a text that look like our settings and are none."""
    return set(re.findall(r"\bSAMEBITS_[A-Z0-9_]+\b", text)) - KEYS


def bytes_of(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([kmgKMG])i?b?", size).groups()  # type: ignore[union-attr]
    return int(number) << {"k": 10, "m": 20, "g": 30}[unit.lower()]


@pytest.mark.parametrize(
    "path",
    sorted(p for p in DOCKER.iterdir() if p.is_file() and p.name != "proof.py"),
    ids=lambda p: p.name,
)
def test_every_setting_that_is_named_exists(path: Path) -> None:
    assert unknown_keys(path.read_text()) == set()
    assert unknown_keys(path.read_text() + " SAMEBITS_MAX_NUM_SEQ") == {"SAMEBITS_MAX_NUM_SEQ"}


# --- Dockerfile


def instructions(text: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]  # type: ignore[misc]


def test_dockerfile() -> None:
    text = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    stages: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions(text):
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            assert base.startswith("${") or base in stages, base
            stages[name] = []
        elif stages:
            list(stages.values())[-1].append((word, rest))
        if word == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source.split('/')[0]}" in ignored, f"{source} is not sent to the build"
    assert {"cpu", "cuda", "ascend"} <= stages.keys()
    for name in ("cpu", "cuda", "ascend"):
        found = dict(stages[name])  # the last of each kind
        assert json.loads(found["ENTRYPOINT"])[-2:] == ["samebits", "serve"]
        assert found["STOPSIGNAL"] == "SIGTERM" and found["USER"] == "${UID}"
        assert found["VOLUME"] == found["WORKDIR"] == "/var/lib/samebits"
        assert "/usr/local/bin/healthy" in found["HEALTHCHECK"]
        env = dict(re.findall(r"(\w+)=(\S+)", " ".join(r for w, r in stages[name] if w == "ENV")))
        assert env["SAMEBITS_DEVICE"] == {"ascend": "npu"}.get(name, name)
        assert env["SAMEBITS_CACHE_DIR"] == found["VOLUME"] and env["PYTHONUNBUFFERED"] == "1"
    for kind in ("cpu", "cuda"):
        words = [w for w, _ in stages[kind]]
        assert words.index("COPY") < len(words) - 1 - words[::-1].index("RUN"), "locks come first"


# --- compose


@pytest.mark.parametrize("path", COMPOSE, ids=lambda p: p.name)
def test_compose(path: Path) -> None:
    whole: dict[str, Any] = yaml.safe_load(path.read_text())
    assert whole.keys() <= {"name", "services", "volumes"}
    service = whole["services"]["samebits"]
    assert service.keys() <= SERVICE_KEYS
    profile = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["environment"]["SAMEBITS_PROFILE"])
    settings = load(profile=profile)
    target = service["build"]["target"]
    assert service["image"] == f"samebits:{target}" and path.name == f"compose.{target}.yaml"
    assert settings.device == {"ascend": "npu"}.get(target, target)
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > settings.drain_s + 5, "killed before it has drained"
    assert bytes_of(service["shm_size"]) >= 256 << 20
    assert "no-new-privileges:true" in service["security_opt"]
    named = [v.split(":")[0] for v in service["volumes"] if not v.startswith(("/", "."))]
    assert {n for n in named if not n.startswith("$")} == whole["volumes"].keys()
    if target != "ascend":  # the driver's own files decide there
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert all(p.startswith("127.0.0.1:") for p in service["ports"]), "no key is set"


def test_ascend_compose_has_what_its_entry_point_wants() -> None:
    service = yaml.safe_load((DOCKER / "compose.ascend.yaml").read_text())["services"]["samebits"]
    entry = (DOCKER / "on_ascend.sh").read_text()
    nodes = re.search(r"for node in ([\w ]+);", entry)
    assert nodes is not None
    assert {f"/dev/{n}" for n in nodes[1].split()} < set(service["devices"])
    mounts = " ".join(service["volumes"])
    for file in re.findall(r"-v (/usr/local/Ascend\S+?):", entry):
        assert file in mounts
    assert service["ulimits"] == {"memlock": -1}


# --- Kubernetes


def manifests() -> dict[str, Any]:
    found = yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())
    return {each["kind"]: each for each in found}


def test_kubernetes() -> None:
    kinds = manifests()
    assert kinds.keys() == {"ConfigMap", "Deployment", "Service", "PodDisruptionBudget"}
    spec = kinds["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    labels = spec["template"]["metadata"]["labels"].items()
    for selector in (
        spec["selector"]["matchLabels"],
        kinds["Service"]["spec"]["selector"],
        kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    assert kinds["PodDisruptionBudget"]["spec"]["minAvailable"] < spec["replicas"]
    env = {each["name"]: each["value"] for each in container["env"]}
    profile = Path(env["SAMEBITS_PROFILE"])
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert mounts[str(profile.parent)] == "profiles"
    assert profile.name in kinds["ConfigMap"]["data"]
    assert set(mounts.values()) == {each["name"] for each in pod["volumes"]}
    assert {"/var/lib/samebits", "/tmp", "/dev/shm"} <= mounts.keys()
    assert env.keys() <= KEYS and env["SAMEBITS_HOST"] == "0.0.0.0"
    (port,) = container["ports"]
    assert port["containerPort"] == load(profile="cpu").port
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + load(profile="cpu").drain_s + 5
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}


def test_kubernetes_probes_ask_what_exists() -> None:
    container = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    routes = {getattr(r, "path", "") for r in create_app(Settings(), _no_engine).routes}
    wanted = {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    for probe, path in wanted.items():
        assert container[probe]["httpGet"] == {"path": path, "port": container["ports"][0]["name"]}
        assert path in routes
    annotations = manifests()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in routes


async def _no_engine(_: Settings) -> Any:
    raise AssertionError("never opened")


def test_kubernetes_profiles_are_the_shipped_ones() -> None:
    shipped = {path.name: path.read_text() for path in PROFILES.glob("*.env")}
    assert manifests()["ConfigMap"]["data"] == shipped


# --- watching


def test_prometheus() -> None:
    whole = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    (job,) = whole["scrape_configs"]
    assert whole.keys() == {"global", "scrape_configs", "rule_files"}
    assert job["static_configs"] == [{"targets": ["samebits:8000"]}]


def series(expression: str) -> set[str]:
    """Names of metrics in a PromQL expression."""
    bare = re.sub(r"\[[^\]]*\]|\{[^}]*\}|(?:by|without) \([^)]*\)", "", expression)
    return {n for n in re.findall(r"[a-z_]{4,}", bare) if "_" in n} - {"histogram_quantile"}


def exported() -> set[str]:
    """Names of samples that `Metrics` and its process collector give out."""
    metrics = Metrics()
    metrics.fingerprint.info({"fingerprint": "sb1"})
    found = {"process_resident_memory_bytes", "process_open_fds", "process_max_fds"}
    for family in metrics.registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"),
                    "info": ("_info",)}.get(family.type, ("",))  # fmt: skip
        found |= {family.name + suffix for suffix in suffixes}
    return found


def test_every_panel_shows_a_metric_that_exists() -> None:
    whole = json.loads((DOCKER / "grafana.json").read_text())
    known = exported()
    ids, boxes = set(), set()
    for panel in whole["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
        for target in panel["targets"]:
            names = series(target["expr"])
            assert names and names <= known, names - known
            assert target["expr"].count("(") == target["expr"].count(")")
        ids.add(panel["id"])
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"])
                 for y in range(box["y"], box["y"] + box["h"])}  # fmt: skip
        assert box["x"] + box["w"] <= 24 and not cells & boxes, panel["title"]
        boxes |= cells
    assert len(ids) == len(whole["panels"])
    assert series("sum(rate(samebits_nothing_total[5m]))") - known == {"samebits_nothing_total"}


def test_nginx_agrees_with_the_settings() -> None:
    text, settings = (DOCKER / "nginx.conf").read_text(), Settings()
    assert f"client_max_body_size {settings.max_body_bytes >> 20}m;" in text
    timeout = re.search(r"proxy_read_timeout (\d+)s;", text)
    assert timeout is not None and int(timeout[1]) > settings.request_timeout_s
    assert "proxy_buffering off;" in text and text.count("{") == text.count("}")
    retried = re.search(r"proxy_next_upstream ([^;]+);", text)
    assert retried is not None and {"error", "http_503", "non_idempotent"} <= set(
        retried[1].split()
    )
