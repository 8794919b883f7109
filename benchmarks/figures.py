"""The figures in the README and the documents, which come from the committed result files only.

``python -m benchmarks.figures`` writes them; a test checks that they agree with the result files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.buckets import BATCH, LOST, SPARKS, WARM, point_name, slope_name
from benchmarks.report import RESULTS

__all__ = ["DOCUMENTS", "main", "with_figures"]

_ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    _ROOT / "README.md",
    _ROOT / "docs" / "benchmarks.md",
    _ROOT / "docs" / "operating" / "choosing-settings.md",
    _ROOT / "docs" / "design" / "009-standby.md",
)
_PLACE = re.compile(r"(<!-- figures (\w+): begin -->\n).*?(<!-- figures \2: end -->)", re.DOTALL)


def with_figures(text: str) -> str:
    """Return a document with current figures between each ``<!-- figures NAME: begin -->`` and its ``end``."""
    return _PLACE.sub(lambda fields: fields[1] + _MAKERS[fields[2]]() + fields[3], text)


def _read_result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def _readme() -> str:
    """Return the part of the summary that the README shows."""
    machines = _list_origins([_read_result(name) for name in ("keyed_count", "vectorised", "nexmark", "peers")])
    return "\n".join([*_format_rows(_readme_rows()), "", *machines, ""])


def _summary() -> str:
    """Return the most important figures of several benchmarks."""
    names = ("keyed_count", "vectorised", "nexmark", "peers", "store", "async_commit")
    return "\n".join(
        [
            *_format_rows([*_readme_rows(), *_further_rows()]),
            "",
            *_list_origins([_read_result(name) for name in names]),
            "",
        ]
    )


def _format_rows(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | measured |", "| --- | --- |", *(f"| {label} | {figure} |" for label, figure in rows)]


def _readme_rows() -> list[tuple[str, str]]:
    """Return the figures against Spark: its operator, its aggregation in the JVM, and Spark SQL."""
    keyed = {bar["name"]: bar["value"] for bar in _read_result("keyed_count")["bars"]}
    # Two benchmarks measure some of these; their sessions run different other queries, so the figures differ.
    times_as_fast = _read_result("vectorised")["ratios"]
    return [
        (
            "an unchanged keyed count, against Spark's operator",
            f"{_format_range(keyed[_SPEED], times_as_fast[_UNCHANGED])} times the rows per second",
        ),
        ("the same over Arrow tables", f"{times_as_fast[_ARROW]:.0f} times"),
        (
            "over Arrow tables, against Spark's own aggregation in the JVM: 100,000 events of 50,000 keys",
            f"{_format_range(times_as_fast[_JVM_SMALL], _speedup_over(0, _JVM_PEER), places=2)} times",
        ),
        (
            "and 1,000,000 events of 1,000,000 keys",
            f"{_format_range(times_as_fast[_JVM_LARGE], _speedup_over(1, _JVM_PEER))} times",
        ),
        ("seven queries of Nexmark, against Spark SQL", _nexmark()),
    ]


def _further_rows() -> list[tuple[str, str]]:
    """Return the summary's figures that the README leaves out."""
    keyed, store, commit = _read_result("keyed_count"), _read_result("store"), _read_result("async_commit")
    bars = {bar["name"]: bar["value"] for bar in keyed["bars"] + store["bars"]}
    ratios, times, times_as_fast = keyed["ratios"], store["medians_s"], _read_result("vectorised")["ratios"]
    entry_get = 1000 * times["one entry a key, sorted first: get, 1 run"]
    entry_put = 1000 * times["one entry a key: put"]
    ours_get, ours_put = bars["get, 1 run"], bars["put"]
    return [
        ("the keyed count giving tuples, against Spark's operator", f"{times_as_fast[_TUPLES]:.0f} times"),
        ("the same over plain rows", f"{times_as_fast[_ROWS]:.0f} times"),
        ("100,000 events of 50,000 keys, against Flink with RocksDB and against Bytewax", _format_speedups(0)),
        ("and 1,000,000 events of 1,000,000 keys", _format_speedups(1)),
        ("time that workers add to the function's own", f"{bars[_ADDED]:.0f} %"),
        (
            "a whole batch, Spark's own work included, over the function alone",
            f"{ratios[_WHOLE]:.1f}; Spark's operator {ratios[_SPARKS_WHOLE]:.1f}",
        ),
        (
            "43,000 keys of 1,000,000, in each store's own order: read",
            f"{ours_get:.0f} ms; {entry_get:.0f} ms as one LMDB entry a key",
        ),
        ("the same: write", f"{ours_put:.0f} ms; {entry_put:.0f} ms as one LMDB entry a key"),
        (
            f"a batch on a store {commit['parameters']['put_ms']} ms a PUT away, over one on a local root",
            f"{commit['ratios'][_SLOW]:.2f}; {commit['ratios'][_SYNCHRONOUS]:.1f} when it waits",
        ),
        (
            "the same with 40 MB a batch",
            f"{commit['ratios'][_SLOW_LARGE]:.2f}; {commit['ratios'][_SYNCHRONOUS_LARGE]:.1f} when it waits",
        ),
    ]


def _format_range(one: float, other: float, places: int = 1) -> str:
    """Format two numbers as a range, or as one number if they are equal when rounded."""
    both = dict.fromkeys(f"{value:.{places}f}" for value in sorted((one, other)))
    return " to ".join(both)


def _speedup_over(workload: int, program: str) -> float:
    """Return the speed of a function over Arrow tables as a multiple of that of another system's fastest program."""
    result = _read_result("peers")
    measured = _group_by_program(result["medians_s"])
    name = result["parameters"]["workloads"][workload]
    medians = {program: fields[name] for program, fields in measured.items() if name in fields}
    fastest: float = min(median for other, median in medians.items() if other.startswith(program))
    ours: float = medians["Arrow state, a function over Arrow tables"]
    return fastest / ours


def _format_speedups(workload: int) -> str:
    return " and ".join(f"{_speedup_over(workload, program):.2g}" for program in ("Flink", "Bytewax")) + " times"


def _nexmark() -> str:
    """Return the range of the speeds against Spark SQL, and how many of the queries are slower than it."""
    values = [bar["value"] for bar in _read_result("nexmark")["bars"]]
    slower = sum(value < 1 for value in values)
    return f"{min(values):.2g} to {max(values):.2g} times; {slower} of {len(values)} are slower"


def _group_by_program(named: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return values named ``<program>: <workload>`` by program and then by workload."""
    fields: dict[str, dict[str, Any]] = {}
    for name, value in named.items():
        program, workload = name.rsplit(": ", 1)
        fields.setdefault(program, {})[workload] = value
    return fields


def _table(name: str) -> str:
    result = _read_result(name)
    return "\n".join([_format_bars(result), _describe_origin(result), ""])


def _format_bars(result: dict[str, Any]) -> str:
    """Return a table of the bars and, if there are ratios, a table of them."""
    lines = ["| bar | measured | promised | |", "| --- | --- | --- | --- |"]
    for bar in result["bars"]:
        unit = bar["unit"]
        met = "met" if bar["met"] else "**not met**"
        lines.append(
            f"| {bar['name']} | {bar['value']:.3g} {unit} | {bar['sense']} {bar['limit']:.3g} {unit} | {met} |"
        )
    if result["ratios"]:
        lines += ["", "| ratio | |", "| --- | --- |"]
        lines += [f"| {ratio} | {value:.2f} |" for ratio, value in result["ratios"].items()]
    return "\n".join([*lines, ""])


def _growth() -> str:
    fields = _read_result("growth")["details"]
    counts = {name: fields[name] for name in fields if name.endswith(_PUBLISHED)}
    formatted = ", ".join(f"{count} at {name.partition(':')[0]}" for name, count in counts.items())
    return f"{_table('growth')}\nTimed batches in which snapshots were published: {formatted}.\n"


def _bucket_curves() -> str:
    """Return a table for each size of state: median seconds by number of buckets, and what one more bucket adds."""
    result = _read_result("buckets")
    lines: list[str] = []
    for formatted, counts in result["parameters"]["counts by keys"].items():
        keys = int(formatted.replace(",", ""))
        lines += [
            f"{formatted} keys, {result['parameters']['events']:,} rows a batch, seconds:",
            "",
            f"| buckets | {BATCH} | {WARM} | {LOST} |",
            "| --- | --- | --- | --- |",
        ]
        for count in counts:
            cells = (result["medians_s"][f"{point_name(keys, count)}: {label}"] for label in (BATCH, WARM, LOST))
            lines.append(f"| {count:,} | {' | '.join(f'{seconds:.2f}' for seconds in cells)} |")
        slopes = (result["ratios"][slope_name(keys, label)] for label in (BATCH, WARM, LOST))
        added = " | ".join(f"{slope:.1f} ms" for slope in slopes)
        lines += [f"| one more adds, on one core | {added} |", ""]
    return "\n".join([*lines, _describe_origin(result), ""])


def _buckets() -> str:
    ratios = {name: value for name, value in _read_result("buckets")["ratios"].items() if SPARKS in name}
    lines = ["| ratio | |", "| --- | --- |", *(f"| {name} | {value:.2f} |" for name, value in ratios.items()), "", ""]
    return "\n".join(lines) + _bucket_curves()


def _peers() -> str:
    """Return a table of the median seconds of a batch, with a row for each program and a column for each workload."""
    result = _read_result("peers")
    workloads = result["parameters"]["workloads"]
    shown = {name: f"{median:.3g} s" for name, median in result["medians_s"].items()}
    shown |= {name: f"left out: {why}" for name, why in result["details"].get("left out", {}).items()}
    lines = [f"| seconds a batch | {' | '.join(workloads)} |", "| --- |" + " --- |" * len(workloads)]
    for program, cells in _group_by_program(shown).items():
        lines.append(f"| {program} | {' | '.join(cells.get(workload, '') for workload in workloads)} |")
    return "\n".join([*lines, "", _describe_origin(result), ""])


def _describe_origin(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("pyspark", "pandas", "pyarrow", "lmdb"))
    day = result["finished"][:10]
    # `report.commit` gives twelve digits, followed by a + if files differed from the commit; None outside a clone.
    commit = result["commit"] or "unknown"
    place = f"{machine['cores']} cores of an {machine['cpu']}, Python {versions['python']}, {packages}"
    return f"{place}; {day}, commit {commit[:7]}{commit[12:]}."


def _list_origins(results: list[dict[str, Any]]) -> list[str]:
    """Return a line for each machine, day, commit and set of versions, with the names of the results measured there."""
    by_place: dict[str, list[str]] = {}
    for result in results:
        by_place.setdefault(_describe_origin(result), []).append(result["name"])
    return [f"* {', '.join(names)}: {origin}" for origin, names in by_place.items()]


_SMALL = "100,000 events, 50,000 keys"
_TUPLES = f"{_SMALL}: pandas function, tuples out / the same on Spark's own state, rows per second"
_UNCHANGED = f"{_SMALL}: pandas function, unchanged / the same on Spark's own state, rows per second"
_ROWS = f"{_SMALL}: function over rows / the same on Spark's own state, rows per second"
_ARROW = f"{_SMALL}: function over Arrow tables / the same on Spark's own state, rows per second"
_JVM = "function over Arrow tables / Spark's own aggregation (JVM), rows per second"
_JVM_SMALL, _JVM_LARGE = f"{_SMALL}: {_JVM}", f"1,000,000 events, 1,000,000 keys: {_JVM}"
_SPEED = "rows per second against Spark's own"
_ADDED = "added in the workers to the function's own time"
_WHOLE, _SPARKS_WHOLE = "Arrow state / function alone, time", "Spark's own state / function alone, time"
_JVM_PEER = "Spark's own aggregation (JVM)"
_PUBLISHED = "batches in which snapshots were published"
_SLOW = "1 KB a batch: slow store / local root"
_SLOW_LARGE = "40 MB a batch: slow store / local root"
_SYNCHRONOUS_LARGE = "40 MB a batch: slow store, synchronous / local root"
_SYNCHRONOUS = "1 KB a batch: slow store, synchronous / local root"


def _failover() -> str:
    """Return the median seconds that the death of a host costs, by mode and size, and how much of that is Spark's."""
    result = _read_result("failover")
    times = result["medians_s"]
    heads = list(dict.fromkeys(name.partition(": ")[2] for name in times))
    lines = [f"| median seconds | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    sizes = sorted({(entry["mode"], entry["gb"]) for entry in result["details"]["kills"]})
    for name in (f"{mode}, {gb:g} GB" for mode, gb in sizes):
        cells = (f"{times[f'{name}: {label}']:.3g}" for label in heads)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    # Each mode and size was measured separately, perhaps on another day.
    places = [{"name": f"{entry['mode']} {entry['gb']:g} GB", **entry} for entry in result["details"]["places"]]
    return "\n".join([*lines, "", _format_bars(result), *_list_origins(places), ""])


def _assignment() -> str:
    """Return the bars with the requests that all hosts together send to the store, and the replicas that move."""
    result = _read_result("standby_assignment")
    details, parameters = result["details"], result["parameters"]
    requests_per_s = details["requests a second of the whole cluster"]
    replicas = parameters["buckets"] * parameters["replicas"]
    # If a host goes, other hosts must copy its replicas in any case, so only hosts that come count here.
    most_moved = max(
        entry["moved"] / (replicas / entry["hosts"])
        for entry in details["replicas moved by each change"]
        if not entry["goes"]
    )
    rows = [
        ("requests a second, median, once all have read all records", f"{requests_per_s['warm: median']:.0f}"),
        (
            "requests a second, first two heartbeats",
            " and ".join(f"{entry:.0f}" for entry in requests_per_s["cold: first two heartbeats"]),
        ),
        ("requests a second, the most while a change spreads", f"{requests_per_s['while a change spreads: most']:.0f}"),
        ("replicas moved when a host comes, the most, in shares of one host", f"{most_moved:.2f}"),
        ("a decision, median", f"{result['medians_s']['a decision']:.2f} s"),
        ("the largest record", f"{details['a record: most bytes'] / 1000:.0f} kB"),
        ("reading all records, the most", f"{max(result['timings_s']['reading all records']):.2f} s"),
    ]
    lines = ["| | |", "| --- | --- |", *(f"| {label} | {figure} |" for label, figure in rows), ""]
    return "\n".join([_format_bars(result), *lines, _describe_origin(result), ""])


def _locality() -> str:
    """Return how often buckets ran on the same host again, as the command that the result file names measured it."""
    result = _read_result("locality")
    heads = ("setting", "partitions", "stayed, median batch", "worst batch", "hosts of a bucket", "on the fullest host")
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for entry in result["settings"]:
        conf = ", ".join(f"`{name}={value}`" for name, value in entry["conf"].items())
        name = (
            f"{entry['name']}, with {entry['first_worker_share']:.0%} of the buckets"
            if entry["loses"]
            else entry["name"]
        )
        name = f"{name}: {conf}" if conf else name
        figures = [entry["partitions"], *(f"{entry[share]:.0%}" for share in ("stayed", "stayed_min"))]
        cells = [name, *map(str, figures), f"{entry['hosts_per_bucket']:g}", f"{entry['largest_share']:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    place = f"{result['hosts']} hosts, {result['cores']} cores, {result['buckets']} buckets"
    formatted = f"`{result['command']}`: {place}, PySpark {result['versions']['pyspark']}."
    return "\n".join([*lines, "", formatted, ""])


_MAKERS: dict[str, Callable[[], str]] = {
    "readme": _readme,
    "summary": _summary,
    "keyed_count": lambda: _table("keyed_count"),
    "store": lambda: _table("store"),
    "async_commit": lambda: _table("async_commit"),
    "big_bucket": lambda: _table("big_bucket"),
    "restore": lambda: _table("restore"),
    "savepoint": lambda: _table("savepoint"),
    "initial_state": lambda: _table("initial_state"),
    "rescale": lambda: _table("rescale"),
    "lazy_restore": lambda: _table("lazy_restore"),
    "failover": _failover,
    "standby_assignment": _assignment,
    "standby_following": lambda: _table("standby_following"),
    "reading": lambda: _table("reading"),
    "live": lambda: _table("live"),
    "import_native": lambda: _table("import_native"),
    "vectorised": lambda: _table("vectorised"),
    "nexmark": lambda: _table("nexmark"),
    "growth": _growth,
    "buckets": _buckets,
    "bucket_curves": _bucket_curves,
    "peers": _peers,
    "locality": _locality,
}


def main() -> int:
    """Write the current figures into all documents."""
    for path in DOCUMENTS:
        path.write_text(with_figures(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
