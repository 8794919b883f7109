"""The starting offsets of Spark's Kafka source for a new query: they come from a savepoint, as Spark wrote them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext import RetainedCheckpoint, Savepoint, starting_offsets
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, UsageError, VersionSkewError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.manifest_file import encode_manifest, read_manifest
from spark_state_ext.savepoints.offsets import kafka_offsets, kafka_partitions

GOLDEN = Path(__file__).parent.parent / "golden" / "savepoint-1" / "native"
METADATA = '{"batchWatermarkMs":208000,"batchTimestampMs":1795581478461,"conf":{"spark.sql.shuffle.partitions":"1"}}'
KAFKA = '{"orders":{"2":7,"0":42,"1":0},"refunds":{"0":9}}'
FILES = '{"logOffset":2}'
SORTED = '{"orders":{"0":42,"1":0,"2":7},"refunds":{"0":9}}'


def make_log(*sources: str, version: str = "v1") -> str:
    return "\n".join([version, METADATA, *sources])


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "savepoint")
    return tmp_path / "savepoint"


def set_offsets(savepoint: Path, offsets: str | None) -> None:
    manifest = read_manifest(Folder(str(savepoint)))
    changed = SavepointManifest(replace(manifest.header, offsets=offsets), manifest.buckets)
    (savepoint / MANIFEST_NAME).write_bytes(encode_manifest(changed))


def test_starting_offsets_returns_the_offsets_of_the_kafka_source(savepoint: Path) -> None:
    set_offsets(savepoint, make_log(KAFKA))
    offsets = starting_offsets(Savepoint(str(savepoint)))
    assert offsets == SORTED
    assert json.loads(offsets) == json.loads(KAFKA)


def test_starting_offsets_refuses_a_retained_checkpoint() -> None:
    with pytest.raises(UsageError, match="Take a savepoint, and start from that"):
        starting_offsets(RetainedCheckpoint("/root", "/checkpoint"))  # type: ignore[arg-type] # as a user may


def test_starting_offsets_needs_the_number_of_one_of_several_sources(savepoint: Path) -> None:
    set_offsets(savepoint, make_log(FILES, KAFKA, "-"))
    assert starting_offsets(savepoint, 1) == SORTED
    with pytest.raises(UsageError, match=r"the offsets of 3 sources: name one with source=0 to source=2"):
        starting_offsets(savepoint)
    with pytest.raises(
        UsageError, match=r"source 0 of the savepoint at .* is not Kafka, .* Its offsets are \{\"logOffset\":2\}"
    ):
        starting_offsets(savepoint, 0)
    with pytest.raises(UsageError, match=r"source 2 of .* had read nothing"):
        starting_offsets(savepoint, 2)
    for source in (3, -1, "orders"):
        with pytest.raises(UsageError, match=r"has no source .*; it has 0, 1, 2"):
            starting_offsets(savepoint, source)


def test_starting_offsets_accepts_the_name_of_a_source(savepoint: Path) -> None:
    """Spark 4.3 writes such a log with `spark.sql.streaming.offsetLog.formatVersion` 2."""
    set_offsets(savepoint, make_log(f"files:{FILES}", f"orders:{KAFKA}", version="v2"))
    assert starting_offsets(savepoint, "orders") == starting_offsets(savepoint, 1) == SORTED
    with pytest.raises(UsageError, match="has no source 'kafka'; it has files, orders"):
        starting_offsets(savepoint, "kafka")


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_kafka_partitions_counts_the_partitions_of_each_topic(version: str) -> None:
    """All Kafka sources of a query count; its other sources are ignored."""
    named = [f"{name}:" if version == "v2" else "" for name in ("files", "one", "other", "text")]
    sources = [FILES, KAFKA, '{"orders":{"0":1,"1":1,"2":1,"3":0}}', "no JSON"]
    log = make_log(*(name + text for name, text in zip(named, sources, strict=True)), version=version)
    assert kafka_partitions(log, "offsets/3") == ({"orders": 4, "refunds": 1}, False)
    assert kafka_partitions(make_log(FILES, "-"), "offsets/3") == ({}, True)
    with pytest.raises(UsageError, match=r"has the partitions 0, 2 of topic 't', .* option assign"):
        kafka_partitions(make_log('{"t":{"0":1,"2":1}}'), "offsets/3")


def test_starting_offsets_refuses_a_file_source(savepoint: Path) -> None:
    with pytest.raises(UsageError, match=r"source 0 of the savepoint at .* is not Kafka"):
        starting_offsets(savepoint)


def test_starting_offsets_refuses_a_savepoint_made_from_a_table(savepoint: Path) -> None:
    set_offsets(savepoint, None)
    with pytest.raises(UsageError, match="has no offsets, because it was made from a table"):
        starting_offsets(savepoint)
    with pytest.raises(MissingCheckpointError, match="there is no savepoint at"):
        starting_offsets(savepoint / "elsewhere")


@pytest.mark.parametrize(
    "line", ['{"orders":{"0":"42"}}', '{"orders":{}}', '{"orders":{"a":1}}', "{}", "[1]", "7", "{", "x"]
)
def test_offsets_that_are_not_of_kafka_are_refused(line: str) -> None:
    with pytest.raises(UsageError, match="is not Kafka"):
        kafka_offsets(make_log(line), None, "it")


def test_unreadable_offset_logs_and_newer_formats_are_refused(savepoint: Path) -> None:
    with pytest.raises(VersionSkewError, match="it has Spark's offsets in format v3"):
        kafka_offsets(make_log(KAFKA, version="v3"), None, "it")
    for log in ("", "v1", make_log(), KAFKA, "vx\n{}\n" + KAFKA):
        with pytest.raises(CorruptFileError, match="it has no readable log of Spark offsets"):
            kafka_offsets(log, None, "it")
