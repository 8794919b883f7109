"""The Grafana dashboard queries only metrics that workers export, and all exported metrics are documented."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_state_ext.worker.telemetry import INSTRUMENTS
from tests.helpers.waiting import WAIT_S

ROOT = Path(__file__).parent.parent.parent
OPERATING = ROOT / "docs" / "operating"
_SAMPLE = re.compile(r"^(spark_state_ext_\w+)\{(.*)\} ", re.MULTILINE)
# Suffixes that Prometheus adds to the names of metrics.
_SUFFIX = re.compile(r"_(bucket|sum|count|created)$")


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what Prometheus would scrape, written by its own client library, which applies its naming rules."""
    pytest.importorskip("opentelemetry.exporter.prometheus", reason="the exporter for Prometheus is not installed")
    folder = tmp_path_factory.mktemp("metrics")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "prometheus_names.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((OPERATING / "grafana-dashboard.json").read_text())
    return content


def _list_queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]] + [
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]


def test_every_metric_and_label_of_a_query_is_exported(exposed: str, dashboard: dict[str, Any]) -> None:
    exported = {match[1] for match in _SAMPLE.finditer(exposed)}
    labels = {label for match in _SAMPLE.finditer(exposed) for label in re.findall(r'(\w+)="', match[2])}
    queries = _list_queries(dashboard)
    queried = {name for query in queries for name in re.findall(r"\bspark_state_ext_\w+", query)}
    assert len(queried) > 15
    assert queried - exported == set()
    grouped = {
        label for query in queries for names in re.findall(r"by \(([^)]*)\)", query) for label in names.split(", ")
    }
    filtered = {label for query in queries for label in re.findall(r'(\w+)=~?"', query)}
    assert grouped == {"operator", "query_id", "le"}
    assert (grouped | filtered) - labels == set()


def test_every_panel_distinguishes_operators_and_has_a_description(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert panel["description"]
        assert all("operator" in target["legendFormat"] for target in panel["targets"])
    titles = " ".join(panel["title"].lower() for panel in dashboard["panels"])
    for word in ("size", "rows", "commit", "wait", "restore", "deleted", "lease", "failures"):
        assert word in titles


def test_every_exported_metric_is_documented(exposed: str) -> None:
    exported = {match[1] for match in _SAMPLE.finditer(exposed)}
    families = {_SUFFIX.sub("", name) if f"{_SUFFIX.sub('', name)}_bucket" in exported else name for name in exported}
    families = {name for name in families if not name.endswith("_created")}
    page = (OPERATING / "metrics.md").read_text()
    (block,) = re.findall(r"^```text\n((?:spark_state_ext_\w+\n)+)```$", page, re.MULTILINE)
    assert block.splitlines() == sorted(families)
    assert len(families) == len(INSTRUMENTS)
