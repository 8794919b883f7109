"""The snippets of docs/vectorised.md, each compared with plain Python over a few random batches.

They run twice: first a batch at a time with their state in a dict, then all batches by the code that executors run.
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
    """Return the text of a section, up to the next heading of the same or a higher level."""
    match = re.search(rf"^(##+) {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match, title
    return match[2]


def find_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def split_columns(text: str) -> list[str]:
    """Split a list of columns at the commas outside of angle brackets."""
    return [part.strip() for part in re.split(r",(?![^<]*>)", text)]


def parse_type(text: str) -> pa.DataType:
    if text.startswith("array<"):
        return pa.list_(parse_type(text[6:-1]))
    if text.startswith("struct<"):
        return pa.struct(
            [
                (name.strip(), parse_type(kind.strip()))
                for name, kind in (part.split(":") for part in split_struct(text))
            ]
        )
    return _FLAT[text]


def split_struct(struct: str) -> list[str]:
    return struct[7:-1].split(",")


def parse_schema(ddl: str) -> pa.Schema:
    return pa.schema([(name, parse_type(kind)) for name, kind in (part.split(" ", 1) for part in split_columns(ddl))])


class Idiom:
    """The schemas and the function of one section, whose code has run."""

    def __init__(self, title: str, name: str) -> None:
        text = section(title)
        schemas = dict(re.findall(r"(input|key|state|output|timeout)\s+`([^`]*)`", text.replace("Input", "input")))
        (code,) = find_blocks(text)
        names: dict[str, Any] = {}
        exec(find_blocks(section("Ten idioms"))[0] + "\n" + code, names)
        rows = parse_schema(schemas["input"])
        # The rows, watermark and output of each batch.
        self.batches: list[tuple[Rows, int, Rows]] = []
        IDIOMS.append(self)
        self.driver = Driver(
            names[name],
            [schemas["key"]],
            rows,
            parse_schema(schemas["state"]),
            parse_schema(schemas["output"]),
            schemas.get("timeout", "NoTimeout"),
        )

    def batch(self, rows: Rows, watermark_ms: int = 0) -> Rows:
        output = self.driver.batch(rows, watermark_ms=watermark_ms)
        self.batches.append((rows, watermark_ms, output))
        return output

    def run_again(self) -> None:
        """Run all batches by `run`, and compare the output and the size of the final state."""
        driver = self.driver
        result = run(
            driver.function,
            [rows for rows, _, _ in self.batches],
            driver.keys,
            driver.output,
            driver.state,
            api="arrow",
            input_schema=driver.rows,
            timeout_conf=driver.timeout_conf,
            watermarks_ms=[watermark_ms for _, watermark_ms, _ in self.batches],
            restart=range(0, len(self.batches), 3),
            buckets=2,
        )
        for output, (_, _, expected) in zip(result.outputs, self.batches, strict=True):
            assert_same_rows(output.to_pylist(), expected)
        assert result.state.num_rows == len(driver.stored)


IDIOMS: list[Idiom] = []


@pytest.fixture(autouse=True)
def idioms_run_again() -> Iterator[None]:
    IDIOMS.clear()
    yield
    for idiom in IDIOMS:
        idiom.run_again()


def group_by(rows: Rows, name: str) -> dict[Any, Rows]:
    """Group rows by a column, in their order."""
    groups: dict[Any, Rows] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def assert_same_rows(actual: Rows, expected: Rows) -> None:
    def round_floats(row: dict[str, Any]) -> Any:
        return {name: round(v, 9) if isinstance(v, float) else v for name, v in row.items()}

    assert sorted(map(round_floats, actual), key=repr) == sorted(map(round_floats, expected), key=repr)


def generate_batches(make: Callable[[random.Random], dict[str, Any]], count: int = 4) -> Iterator[Rows]:
    """Yield random batches; the first one is small, so that most keys are new in a later one."""
    chance = random.Random(5)
    for number in range(count):
        yield [make(chance) for _ in range(3 if number == 0 else 40)]


def choose_user(chance: random.Random) -> str | None:
    name: str | None = chance.choice([*"abcdef", None])
    return name


def choose_amount(chance: random.Random) -> float:
    return chance.randint(0, 200) / 4


# -- the ten idioms -------------------------------------------------------------------------------


def test_the_page_has_ten_idioms() -> None:
    ten = PAGE.split("## Ten idioms")[1].split("\n## ")[0]
    assert len(re.findall(r"^### ", ten, re.MULTILINE)) == 10


def test_the_count_equals_plain_python() -> None:
    idiom, counts = Idiom("Count", "count"), dict[Any, int]()
    for rows in generate_batches(lambda chance: {"user": choose_user(chance)}):
        output = idiom.batch(rows)
        for row in rows:
            counts[row["user"]] = counts.get(row["user"], 0) + 1
        assert_same_rows(output, [{"user": key, "n": counts[key]} for key in group_by(rows, "user")])


def test_the_sum_equals_plain_python() -> None:
    idiom, totals = Idiom("Sum", "total"), dict[Any, float]()
    for rows in generate_batches(
        lambda chance: {"user": choose_user(chance), "amount": chance.choice([None, choose_amount(chance)])}
    ):
        output = idiom.batch(rows)
        for row in rows:
            totals[row["user"]] = totals.get(row["user"], 0.0) + (row["amount"] or 0.0)
        assert_same_rows(output, [{"user": key, "total": totals[key]} for key in group_by(rows, "user")])


def test_the_rows_without_duplicates_equal_plain_python() -> None:
    idiom, seen = Idiom("Duplicates", "first_of_each"), set[Any]()
    for rows in generate_batches(
        lambda chance: {"id": chance.choice([None, *range(50)]), "text": str(chance.random())}
    ):
        expected = []
        for row in rows:
            if row["id"] not in seen:
                expected.append(row)
                seen.add(row["id"])
        assert_same_rows(idiom.batch(rows), expected)
    assert len(seen) > 30


UTC = dt.timezone.utc
START = dt.datetime(2024, 5, 6, tzinfo=UTC)
GAP = dt.timedelta(minutes=10)


def milliseconds(at: dt.datetime) -> int:
    return int(at.timestamp() * 1000)


def test_the_sessions_equal_plain_python() -> None:
    idiom, chance = Idiom("Sessions", "sessions"), random.Random(3)
    sessions: dict[Any, dict[str, Any]] = {}
    timeouts: dict[Any, dt.datetime] = {}
    ended = {"a row": 0, "the watermark": 0}
    now, watermark = START, START - GAP
    for _ in range(30):
        rows = [
            {"user": choose_user(chance), "at": now + dt.timedelta(minutes=chance.randint(-8, 8))}
            for _ in range(chance.choice([0, 1, 2, 6]))
        ]
        expected = []
        for key, key_rows in group_by(rows, "user").items():
            first, last = min(row["at"] for row in key_rows), max(row["at"] for row in key_rows)
            before = sessions.pop(key, None)
            if before is not None and first > before["until"] + GAP:
                expected.append({"user": key, **before})
                before = None
                ended["a row"] += 1
            before = before or {"since": first, "until": last, "n": 0}
            sessions[key] = {
                "since": min(before["since"], first),
                "until": max(before["until"], last),
                "n": before["n"] + len(key_rows),
            }
            timeouts[key] = max(sessions[key]["until"] + GAP, watermark)
        for key in [key for key in sessions if timeouts[key] < watermark and key not in group_by(rows, "user")]:
            expected.append({"user": key, **sessions.pop(key)})
            ended["the watermark"] += 1
        assert_same_rows(idiom.batch(rows, watermark_ms=milliseconds(watermark)), expected)
        now += dt.timedelta(minutes=chance.choice([2, 5, 30]))
        watermark = max(watermark, now - dt.timedelta(minutes=12))
    assert min(ended.values()) > 3


def test_the_largest_few_equal_plain_python() -> None:
    pytest.importorskip("polars")
    idiom, amounts = Idiom("The largest few", "top_three"), dict[Any, list[float]]()
    for rows in generate_batches(
        lambda chance: {"shop": choose_user(chance), "amount": chance.choice([None, choose_amount(chance)])}
    ):
        output = idiom.batch(rows)
        for row in rows:
            amounts.setdefault(row["shop"], []).extend([] if row["amount"] is None else [row["amount"]])
        assert_same_rows(
            output, [{"shop": key, "best": sorted(amounts[key])[::-1][:3]} for key in group_by(rows, "shop")]
        )


def test_the_latest_row_equals_plain_python() -> None:
    idiom, newest, passed_by = Idiom("The latest row", "latest"), dict[Any, dict[str, Any]](), 0
    minutes = iter(random.Random(9).sample(range(1_000), 1_000))  # all times differ
    for rows in generate_batches(
        lambda chance: {
            "symbol": choose_user(chance),
            "at": START + dt.timedelta(minutes=next(minutes)),
            "price": choose_amount(chance),
        },
        8,
    ):
        expected = []
        for key, key_rows in group_by(rows, "symbol").items():
            last = max(key_rows, key=lambda row: row["at"])
            if key not in newest or last["at"] > newest[key]["at"]:
                newest[key] = last
                expected.append(last)
            else:
                passed_by += 1
        assert_same_rows(idiom.batch(rows), expected)
    assert passed_by > 3


def test_the_join_of_two_streams_equals_plain_python() -> None:
    """Each order has one payment: in a batch before or after the order's, or in the same batch."""
    pytest.importorskip("duckdb")
    idiom, chance = Idiom("A join of two streams", "join"), random.Random(4)
    events: Rows = [
        {"id": at, "side": side, "amount": choose_amount(chance)} for at in range(60) for side in ("order", "payment")
    ]
    # Remove some payments, so that their orders are never joined.
    events = [event for event in events if event["id"] % 10 or event["side"] == "order"]
    chance.shuffle(events)
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
            order, payment = sorted((row, other), key=lambda row: row["side"])
            expected.append({"id": row["id"], "ordered": order["amount"], "paid": payment["amount"]})
        assert_same_rows(idiom.batch(rows), expected)
    assert met == 54
    assert sorted(key[0] for key in idiom.driver.stored) == list(range(0, 60, 10))


def test_the_join_combines_all_rows_of_each_side() -> None:
    """The rows of one side wait together, and the join combines all pairs, as in SQL."""
    pytest.importorskip("duckdb")
    idiom = Idiom("A join of two streams", "join")
    order, payment = {"side": "order", "amount": 1.0}, {"side": "payment"}
    assert idiom.batch([{"id": 1, **order}, {"id": 1, **order, "amount": 2.0}]) == []
    assert_same_rows(
        idiom.batch([{"id": 1, **payment, "amount": 3.0}]),
        [{"id": 1, "ordered": 1.0, "paid": 3.0}, {"id": 1, "ordered": 2.0, "paid": 3.0}],
    )


def test_the_outliers_equal_plain_python() -> None:
    idiom, before, far = Idiom("Outliers", "outliers"), dict[Any, list[float]](), 0
    for rows in generate_batches(
        lambda chance: {
            "sensor": choose_user(chance),
            "value": 1e6 + chance.gauss(0, 1) + 50 * (chance.random() < 0.05),
        },
        10,
    ):
        expected = []
        for row in rows:
            values = before.get(row["sensor"], [])
            if len(values) >= 10 and abs(row["value"] - np.mean(values)) > 3 * np.std(values):
                expected.append(row)
        assert_same_rows(idiom.batch(rows), expected)
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


def test_the_feature_vectors_equal_plain_python() -> None:
    idiom, amounts = Idiom("Feature vectors", "last_four"), dict[Any, list[float]]()
    for rows in generate_batches(lambda chance: {"user": choose_user(chance), "amount": choose_amount(chance)}, 5):
        rows = rows[: 2 + len(rows) // 3]
        output = idiom.batch(rows)
        for row in rows:
            amounts.setdefault(row["user"], [0.0] * 4).append(row["amount"])
        assert_same_rows(output, [{"user": key, "recent": amounts[key][-4:]} for key in group_by(rows, "user")])


def test_the_scores_of_a_model_equal_plain_python() -> None:
    idiom, before = Idiom("A model's scores", "score"), dict[Any, list[float]]()
    for rows in generate_batches(lambda chance: {"card": choose_user(chance), "amount": choose_amount(chance)}):
        expected = []
        for row in rows:
            known = before.get(row["card"], [])
            mean = sum(known) / len(known) if known else 0.0
            logit = 0.4 * math.log1p(row["amount"]) + 0.02 * (row["amount"] - mean) + (not known) - 3.0
            expected.append({**row, "chance": 1 / (1 + math.exp(-logit))})
        assert_same_rows(idiom.batch(rows), expected)
        for row in rows:
            before.setdefault(row["card"], []).append(row["amount"])


# -- other sections of the page -------------------------------------------------------------------


def test_the_snippet_that_tries_a_function_without_spark_runs() -> None:
    names: dict[str, Any] = {}
    exec(
        "\n".join(
            [
                *find_blocks(section("Ten idioms")),
                *find_blocks(section("Count")),
                *find_blocks(section("Testing a function without Spark")),
            ]
        ),
        names,
    )
    assert repr(names["batch"]) == "StateBatch(3 rows of 2 keys, 0 keys timed out, bucket 0, batch 0)"


@pytest.mark.parametrize("restart", [False, True])
def test_the_function_over_rows_finds_three_failures_in_a_row(restart: bool) -> None:
    names: dict[str, Any] = {}
    exec(find_blocks(section("Functions over rows"))[0], names)
    outcomes = "0110001000000110"
    logins = [
        {"user": "u", "at": START + at * dt.timedelta(minutes=1), "succeeded": outcome == "1"}
        for at, outcome in enumerate(outcomes)
    ]
    # The rows of a batch are not in order.
    login_batches = [logins[start : start + 4][::-1] for start in range(0, len(logins), 4)]
    schemas = "user string, at timestamp", "failures bigint"
    result = run(names["three_in_a_row"], login_batches, "user", *schemas, api="rows", restart=restart)
    assert [row["at"] for row in result.output.to_pylist()] == [logins[at]["at"] for at in (5, 9)]
    assert result.state.select(["user", "failures"]).to_pylist() == [{"user": "u", "failures": 1}]


def test_a_count_begins_again_after_its_time_to_live() -> None:
    """After a day without a row the count begins again, by processing time and by event time."""
    names: dict[str, Any] = {}
    exec(find_blocks(section("Time to live"))[0], names)
    exec("\n".join([*find_blocks(section("Ten idioms")), *find_blocks(section("Count"))]), names)
    times = [START + day * dt.timedelta(days=1) for day in (0, 0.9, 1.8, 2.9)]
    user_batches = [[{"user": "u", "at": time}] for time in times]
    schemas = "user", "user string, n bigint", "n bigint"
    processing = [milliseconds(time) for time in times]
    by_clock = run(
        names["count"], user_batches, *schemas, api="arrow", ttl=names["a_day"], processing_times_ms=processing
    )
    assert [output["n"].to_pylist() for output in by_clock.outputs] == [[1], [2], [3], [1]]
    # A batch's watermark comes from the rows before it, so the count expires only after a row of another user.
    later = START + dt.timedelta(days=5)
    user_batches += [[{"user": "v", "at": later}], [{"user": "u", "at": later}]]
    by_rows = run(names["count"], user_batches, *schemas, api="arrow", ttl=names["by_event_time"], event_time="at")
    assert [output["n"].to_pylist() for output in by_rows.outputs] == [[1], [2], [3], [4], [1], [1]]


def test_operators_give_the_same_output_as_the_idioms() -> None:
    """The table in docs/operators.md: if a row only says that an operator is faster, its output must be the same."""
    chance = random.Random(8)
    orders = [
        [
            {"id": chance.randint(0, 30), "user": choose_user(chance), "amount": choose_amount(chance)}
            for _ in range(count)
        ]
        for count in (3, 40, 40)
    ]

    def run_idiom(title: str, name: str, columns: list[tuple[str, str]]) -> list[Rows]:
        idiom_of_title = Idiom(title, name)
        return [idiom_of_title.batch([{new: row[old] for new, old in columns} for row in rows]) for rows in orders]

    def run_built_in(function: Callable[..., Any], *arguments: Any) -> list[Rows]:
        result = run_operator(function, orders, *arguments, input_schema="id bigint, user string, amount double")
        return [output.to_pylist() for output in result.outputs]

    own = run_idiom("Count", "count", [("user", "user")])
    built_in = run_built_in(aggregate, "user", {"n": Agg.count()})
    for idiom_rows, operator_rows in zip(own, built_in, strict=True):
        assert_same_rows(idiom_rows, operator_rows)
    own = run_idiom("Sum", "total", [("user", "user"), ("amount", "amount")])
    built_in = run_built_in(aggregate, "user", {"total": Agg.sum("amount")})
    for idiom_rows, operator_rows in zip(own, built_in, strict=True):
        assert_same_rows(idiom_rows, operator_rows)
    own = run_idiom("Duplicates", "first_of_each", [("id", "id"), ("text", "user")])
    for idiom_rows, operator_rows in zip(own, run_built_in(deduplicate, "id"), strict=True):
        assert_same_rows(idiom_rows, [{"id": row["id"], "text": row["user"]} for row in operator_rows])
    pytest.importorskip("polars")
    own = run_idiom("The largest few", "top_three", [("shop", "user"), ("amount", "amount")])
    best_amounts: dict[Any, list[float]] = {}
    for idiom_rows, operator_rows in zip(own, run_built_in(top_k, "user", "amount", 3), strict=True):
        # The operator emits only keys whose best rows changed.
        for key, ranked in group_by(operator_rows, "user").items():
            best_amounts[key] = [row["amount"] for row in sorted(ranked, key=lambda row: row["rank"])]
        assert_same_rows(idiom_rows, [{"shop": row["shop"], "best": best_amounts[row["shop"]]} for row in idiom_rows])


def test_the_page_lists_all_attributes_and_methods_of_a_batch() -> None:
    """The table has every attribute and method of a batch and no other names."""
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
    attributes = {name for name in dir(batch) if not name.startswith("_")}
    assert named == attributes - {"outcome", "bucket", "batch_id"}


def test_lines_are_not_too_long() -> None:
    assert [line for line in PAGE.splitlines() if len(line) > 130 and not line.startswith("|")] == []
