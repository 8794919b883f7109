"""The snippets of docs/vectorised.md, read from there and run: each against plain Python over a few random batches.

They run twice: a batch at a time with their state in a dict, and then all batches by the code that executors run.
"""

from __future__ import annotations

import datetime as dt
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from batch_driver import Driver

from spark_state_ext import Agg, aggregate, deduplicate, top_k
from spark_state_ext.testing import run, run_operator

PAGE = (Path(__file__).parent.parent / "docs" / "vectorised.md").read_text()
Rows = list[dict[str, Any]]

_FLAT = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", "UTC"),
}


def section(title: str) -> str:
    """Text below a heading, down to the next of its kind or of a higher one."""
    found = re.search(rf"^(##+) {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[2]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def parts(text: str) -> list[str]:
    """A list at its commas, but those inside angle brackets."""
    return [part.strip() for part in re.split(r",(?![^<]*>)", text)]


def type_of(text: str) -> pa.DataType:
    if text.startswith("array<"):
        return pa.list_(type_of(text[6:-1]))
    if text.startswith("struct<"):
        return pa.struct(
            [(name.strip(), type_of(kind.strip())) for name, kind in (p.split(":") for p in parts_of(text))]
        )
    return _FLAT[text]


def parts_of(struct: str) -> list[str]:
    return struct[7:-1].split(",")


def schema_of(ddl: str) -> pa.Schema:
    return pa.schema([(name, type_of(kind)) for name, kind in (part.split(" ", 1) for part in parts(ddl))])


class Idiom:
    """One section: its schemas, and its function after the code has run."""

    def __init__(self, title: str, name: str) -> None:
        text = section(title)
        told = dict(re.findall(r"(input|key|state|output|timeout)\s+`([^`]*)`", text.replace("Input", "input")))
        (code,) = blocks(text)
        names: dict[str, Any] = {}
        exec(blocks(section("Ten idioms"))[0] + "\n" + code, names)
        rows = schema_of(told["input"])
        # Each batch, its watermark, and what came of it.
        self.ran: list[tuple[Rows, int, Rows]] = []
        IDIOMS.append(self)
        self.driver = Driver(
            names[name],
            [told["key"]],
            rows,
            schema_of(told["state"]),
            schema_of(told["output"]),
            told.get("timeout", "NoTimeout"),
        )

    def batch(self, rows: Rows, watermark_ms: int = 0) -> Rows:
        found = self.driver.batch(rows, watermark_ms=watermark_ms)
        self.ran.append((rows, watermark_ms, found))
        return found

    def run_again(self) -> None:
        """All batches by `run`, which gives the same, and has the same state in the end."""
        driver = self.driver
        result = run(
            driver.function,
            [rows for rows, _, _ in self.ran],
            driver.keys,
            driver.output,
            driver.state,
            api="arrow",
            input_schema=driver.rows,
            timeout_conf=driver.timeout_conf,
            watermarks_ms=[watermark_ms for _, watermark_ms, _ in self.ran],
            restart=range(0, len(self.ran), 3),
            buckets=2,
        )
        for output, (_, _, found) in zip(result.outputs, self.ran, strict=True):
            same(output.to_pylist(), found)
        assert result.state.num_rows == len(driver.stored)


IDIOMS: list[Idiom] = []


@pytest.fixture(autouse=True)
def idioms_run_again() -> Iterator[None]:
    IDIOMS.clear()
    yield
    for idiom in IDIOMS:
        idiom.run_again()


def by(rows: Rows, name: str) -> dict[Any, Rows]:
    """Rows by a column, in the order they came."""
    found: dict[Any, Rows] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


def same(found: Rows, expected: Rows) -> None:
    def flat(row: dict[str, Any]) -> Any:
        return {name: round(v, 9) if isinstance(v, float) else v for name, v in row.items()}

    assert sorted(map(flat, found), key=repr) == sorted(map(flat, expected), key=repr)


def batches(make: Callable[[random.Random], dict[str, Any]], count: int = 4) -> Iterator[Rows]:
    """Random batches: the first small, so that most keys are new in a later one."""
    chosen = random.Random(5)
    for number in range(count):
        yield [make(chosen) for _ in range(3 if number == 0 else 40)]


def user(chosen: random.Random) -> str | None:
    name: str | None = chosen.choice([*"abcdef", None])
    return name


def amount(chosen: random.Random) -> float:
    return chosen.randint(0, 200) / 4


# -- the ten --------------------------------------------------------------------------------------


def test_there_are_ten() -> None:
    ten = PAGE.split("## Ten idioms")[1].split("\n## ")[0]
    assert len(re.findall(r"^### ", ten, re.MULTILINE)) == 10


def test_count() -> None:
    idiom, counts = Idiom("Count", "count"), dict[Any, int]()
    for rows in batches(lambda chosen: {"user": user(chosen)}):
        found = idiom.batch(rows)
        for row in rows:
            counts[row["user"]] = counts.get(row["user"], 0) + 1
        same(found, [{"user": key, "n": counts[key]} for key in by(rows, "user")])


def test_sum() -> None:
    idiom, totals = Idiom("Sum", "total"), dict[Any, float]()
    for rows in batches(lambda chosen: {"user": user(chosen), "amount": chosen.choice([None, amount(chosen)])}):
        found = idiom.batch(rows)
        for row in rows:
            totals[row["user"]] = totals.get(row["user"], 0.0) + (row["amount"] or 0.0)
        same(found, [{"user": key, "total": totals[key]} for key in by(rows, "user")])


def test_duplicates() -> None:
    idiom, seen = Idiom("Duplicates", "first_of_each"), set[Any]()
    for rows in batches(lambda chosen: {"id": chosen.choice([None, *range(50)]), "text": str(chosen.random())}):
        expected = []
        for row in rows:
            if row["id"] not in seen:
                expected.append(row)
                seen.add(row["id"])
        same(idiom.batch(rows), expected)
    assert len(seen) > 30


UTC = dt.timezone.utc
START = dt.datetime(2024, 5, 6, tzinfo=UTC)
GAP = dt.timedelta(minutes=10)


def milliseconds(at: dt.datetime) -> int:
    return int(at.timestamp() * 1000)


def test_sessions() -> None:
    idiom, chosen = Idiom("Sessions", "sessions"), random.Random(3)
    sessions: dict[Any, dict[str, Any]] = {}
    timeouts: dict[Any, dt.datetime] = {}
    ended = {"a row": 0, "the watermark": 0}
    now, watermark = START, START - GAP
    for _ in range(30):
        rows = [
            {"user": user(chosen), "at": now + dt.timedelta(minutes=chosen.randint(-8, 8))}
            for _ in range(chosen.choice([0, 1, 2, 6]))
        ]
        expected = []
        for key, mine in by(rows, "user").items():
            first, last = min(row["at"] for row in mine), max(row["at"] for row in mine)
            before = sessions.pop(key, None)
            if before is not None and first > before["until"] + GAP:
                expected.append({"user": key, **before})
                before = None
                ended["a row"] += 1
            before = before or {"since": first, "until": last, "n": 0}
            sessions[key] = {
                "since": min(before["since"], first),
                "until": max(before["until"], last),
                "n": before["n"] + len(mine),
            }
            timeouts[key] = max(sessions[key]["until"] + GAP, watermark)
        for key in [key for key in sessions if timeouts[key] < watermark and key not in by(rows, "user")]:
            expected.append({"user": key, **sessions.pop(key)})
            ended["the watermark"] += 1
        same(idiom.batch(rows, watermark_ms=milliseconds(watermark)), expected)
        now += dt.timedelta(minutes=chosen.choice([2, 5, 30]))
        watermark = max(watermark, now - dt.timedelta(minutes=12))
    assert min(ended.values()) > 3


def test_the_largest_few() -> None:
    pytest.importorskip("polars")
    idiom, amounts = Idiom("The largest few", "top_three"), dict[Any, list[float]]()
    for rows in batches(lambda chosen: {"shop": user(chosen), "amount": chosen.choice([None, amount(chosen)])}):
        found = idiom.batch(rows)
        for row in rows:
            amounts.setdefault(row["shop"], []).extend([] if row["amount"] is None else [row["amount"]])
        same(found, [{"shop": key, "best": sorted(amounts[key])[::-1][:3]} for key in by(rows, "shop")])


def test_the_latest_row() -> None:
    idiom, newest, passed_by = Idiom("The latest row", "latest"), dict[Any, dict[str, Any]](), 0
    minutes = iter(random.Random(9).sample(range(1_000), 1_000))  # no two rows at one time
    for rows in batches(
        lambda chosen: {
            "symbol": user(chosen),
            "at": START + dt.timedelta(minutes=next(minutes)),
            "price": amount(chosen),
        },
        8,
    ):
        expected = []
        for key, mine in by(rows, "symbol").items():
            last = max(mine, key=lambda row: row["at"])
            if key not in newest or last["at"] > newest[key]["at"]:
                newest[key] = last
                expected.append(last)
            else:
                passed_by += 1
        same(idiom.batch(rows), expected)
    assert passed_by > 3


def test_a_join_of_two_streams() -> None:
    """Each order is paid once, before or after it comes, or in the same batch."""
    pytest.importorskip("duckdb")
    idiom, chosen = Idiom("A join of two streams", "join"), random.Random(4)
    events: Rows = [
        {"id": at, "side": side, "amount": amount(chosen)} for at in range(60) for side in ("order", "payment")
    ]
    # Some never meet.
    events = [event for event in events if event["id"] % 10 or event["side"] == "order"]
    chosen.shuffle(events)
    waiting: dict[int, dict[str, Any]] = {}
    met = 0
    for start in range(0, len(events), 20):
        rows = events[start : start + 20]
        expected = []
        for row in rows:
            other = waiting.pop(row["id"], None)
            if other is None:
                waiting[row["id"]] = row
                continue
            met += 1
            order, payment = sorted((row, other), key=lambda it: it["side"])
            expected.append({"id": row["id"], "ordered": order["amount"], "paid": payment["amount"]})
        same(idiom.batch(rows), expected)
    assert met == 54
    assert sorted(key[0] for key in idiom.driver.stored) == list(range(0, 60, 10))


def test_a_join_of_several_rows_a_side() -> None:
    """Whatever came together is joined as in SQL; rows of one side wait together."""
    pytest.importorskip("duckdb")
    idiom = Idiom("A join of two streams", "join")
    order, payment = {"side": "order", "amount": 1.0}, {"side": "payment"}
    assert idiom.batch([{"id": 1, **order}, {"id": 1, **order, "amount": 2.0}]) == []
    same(
        idiom.batch([{"id": 1, **payment, "amount": 3.0}]),
        [{"id": 1, "ordered": 1.0, "paid": 3.0}, {"id": 1, "ordered": 2.0, "paid": 3.0}],
    )


def test_outliers() -> None:
    idiom, before, far = Idiom("Outliers", "outliers"), dict[Any, list[float]](), 0
    for rows in batches(
        lambda chosen: {"sensor": user(chosen), "value": 1e6 + chosen.gauss(0, 1) + 50 * (chosen.random() < 0.05)}, 10
    ):
        expected = []
        for row in rows:
            values = before.get(row["sensor"], [])
            if len(values) >= 10 and abs(row["value"] - np.mean(values)) > 3 * np.std(values):
                expected.append(row)
        same(idiom.batch(rows), expected)
        for row in rows:
            before.setdefault(row["sensor"], []).append(row["value"])
        far += len(expected)
    assert far > 5
    for (sensor,), kept in idiom.driver.stored.items():
        assert kept.values is not None
        n, mean, m2 = kept.values
        assert n == len(before[sensor])
        assert math.isclose(mean, np.mean(before[sensor]))
        assert math.isclose(m2, np.var(before[sensor]) * n, rel_tol=1e-6)


def test_feature_vectors() -> None:
    idiom, amounts = Idiom("Feature vectors", "last_four"), dict[Any, list[float]]()
    for rows in batches(lambda chosen: {"user": user(chosen), "amount": amount(chosen)}, 5):
        rows = rows[: 2 + len(rows) // 3]
        found = idiom.batch(rows)
        for row in rows:
            amounts.setdefault(row["user"], [0.0] * 4).append(row["amount"])
        same(found, [{"user": key, "recent": amounts[key][-4:]} for key in by(rows, "user")])


def test_a_models_scores() -> None:
    idiom, before = Idiom("A model's scores", "score"), dict[Any, list[float]]()
    for rows in batches(lambda chosen: {"card": user(chosen), "amount": amount(chosen)}):
        expected = []
        for row in rows:
            known = before.get(row["card"], [])
            mean = sum(known) / len(known) if known else 0.0
            logit = 0.4 * math.log1p(row["amount"]) + 0.02 * (row["amount"] - mean) + (not known) - 3.0
            expected.append({**row, "chance": 1 / (1 + math.exp(-logit))})
        same(idiom.batch(rows), expected)
        for row in rows:
            before.setdefault(row["card"], []).append(row["amount"])


# -- the rest of the page -------------------------------------------------------------------------


def test_trying_a_function_without_spark() -> None:
    names: dict[str, Any] = {}
    exec(
        "\n".join(
            [
                *blocks(section("Ten idioms")),
                *blocks(section("Count")),
                *blocks(section("Testing a function without Spark")),
            ]
        ),
        names,
    )
    assert repr(names["batch"]) == "StateBatch(3 rows of 2 keys, 0 keys timed out, bucket 0, batch 0)"


@pytest.mark.parametrize("restart", [False, True])
def test_rows(restart: bool) -> None:
    names: dict[str, Any] = {}
    exec(blocks(section("Functions over rows"))[0], names)
    outcomes = "0110001000000110"
    logins = [
        {"user": "u", "at": START + at * dt.timedelta(minutes=1), "succeeded": it == "1"}
        for at, it in enumerate(outcomes)
    ]
    # A batch's rows come in no order.
    given = [logins[start : start + 4][::-1] for start in range(0, len(logins), 4)]
    schemas = "user string, at timestamp", "failures bigint"
    found = run(names["three_in_a_row"], given, "user", *schemas, api="rows", restart=restart)
    assert [row["at"] for row in found.output.to_pylist()] == [logins[at]["at"] for at in (5, 9)]
    assert found.state.select(["user", "failures"]).to_pylist() == [{"user": "u", "failures": 1}]


def test_time_to_live() -> None:
    """A day without a row, and the count begins anew; by event time with `refresh="read"` too."""
    names: dict[str, Any] = {}
    exec(blocks(section("Time to live"))[0], names)
    exec("\n".join([*blocks(section("Ten idioms")), *blocks(section("Count"))]), names)
    times = [START + day * dt.timedelta(days=1) for day in (0, 0.9, 1.8, 2.9)]
    given = [[{"user": "u", "at": time}] for time in times]
    schemas = "user", "user string, n bigint", "n bigint"
    processing = [milliseconds(time) for time in times]
    by_clock = run(names["count"], given, *schemas, api="arrow", ttl=names["a_day"], processing_times_ms=processing)
    assert [output["n"].to_pylist() for output in by_clock.outputs] == [[1], [2], [3], [1]]
    # A batch's watermark is that of the rows before it, and so no time is over until another user has come.
    later = START + dt.timedelta(days=5)
    given += [[{"user": "v", "at": later}], [{"user": "u", "at": later}]]
    by_rows = run(names["count"], given, *schemas, api="arrow", ttl=names["by_event_time"], event_time="at")
    assert [output["n"].to_pylist() for output in by_rows.outputs] == [[1], [2], [3], [4], [1], [1]]


def test_operators_do_as_the_idioms() -> None:
    """The table in docs/operators.md: where a row says no more than that an operator is faster, it gives the same."""
    chosen = random.Random(8)
    orders = [
        [{"id": chosen.randint(0, 30), "user": user(chosen), "amount": amount(chosen)} for _ in range(count)]
        for count in (3, 40, 40)
    ]

    def idiom(title: str, name: str, columns: list[tuple[str, str]]) -> list[Rows]:
        one = Idiom(title, name)
        return [one.batch([{new: row[old] for new, old in columns} for row in rows]) for rows in orders]

    def operator(function: Callable[..., Any], *arguments: Any) -> list[Rows]:
        found = run_operator(function, orders, *arguments, input_schema="id bigint, user string, amount double")
        return [output.to_pylist() for output in found.outputs]

    own = idiom("Count", "count", [("user", "user")])
    built_in = operator(aggregate, "user", {"n": Agg.count()})
    for mine, theirs in zip(own, built_in, strict=True):
        same(mine, theirs)
    own = idiom("Sum", "total", [("user", "user"), ("amount", "amount")])
    built_in = operator(aggregate, "user", {"total": Agg.sum("amount")})
    for mine, theirs in zip(own, built_in, strict=True):
        same(mine, theirs)
    own = idiom("Duplicates", "first_of_each", [("id", "id"), ("text", "user")])
    for mine, theirs in zip(own, operator(deduplicate, "id"), strict=True):
        same(mine, [{"id": row["id"], "text": row["user"]} for row in theirs])
    pytest.importorskip("polars")
    own = idiom("The largest few", "top_three", [("shop", "user"), ("amount", "amount")])
    best: dict[Any, list[float]] = {}
    for mine, theirs in zip(own, operator(top_k, "user", "amount", 3), strict=True):
        # Only those keys whose best rows changed.
        for key, ranked in by(theirs, "user").items():
            best[key] = [row["amount"] for row in sorted(ranked, key=lambda row: row["rank"])]
        same(mine, [{"shop": row["shop"], "best": best[row["shop"]]} for row in mine])


def test_the_page_names_what_there_is() -> None:
    """Every attribute and method of a batch is in the table, and nothing else."""
    from spark_state_ext import StateBatch

    table = section("The `StateBatch`")
    named = {name for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)", cell)}
    batch = StateBatch(
        rows=pa.table({"k": [1]}),
        keys=pa.table({"k": [1]}),
        state=pa.table({"n": [1]}),
        exists=pa.array([True]),
        starts=np.array([0]),
        watermark_ms=None,
        processing_time_ms=0,
    )
    there = {name for name in dir(batch) if not name.startswith("_")}
    assert named == there - {"outcome", "bucket", "batch_id"}


def test_lines_are_not_too_long() -> None:
    assert [line for line in PAGE.splitlines() if len(line) > 130 and not line.startswith("|")] == []
