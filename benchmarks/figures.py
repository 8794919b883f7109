"""The figures in README and docs, made from the committed result files and from nothing else.

``python -m benchmarks.figures`` writes them; a test checks that they are what the result files say.
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
    """A document with the figures in their places (``<!-- figures NAME: begin -->``, ``end``) as they are now."""
    return _PLACE.sub(lambda found: found[1] + _MAKERS[found[2]]() + found[3], text)


def _result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def _readme() -> str:
    """Return the summary's rows for the README."""
    machines = _machines([_result(name) for name in ("keyed_count", "vectorised", "nexmark", "peers")])
    return "\n".join([*_two_columns(_readme_rows()), "", *machines, ""])


def _summary() -> str:
    """Return the most important figures of several benchmarks."""
    names = ("keyed_count", "vectorised", "nexmark", "peers", "store", "async_commit")
    return "\n".join(
        [*_two_columns([*_readme_rows(), *_further_rows()]), "", *_machines([_result(name) for name in names]), ""]
    )


def _two_columns(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | measured |", "| --- | --- |", *(f"| {what} | {figure} |" for what, figure in rows)]


def _readme_rows() -> list[tuple[str, str]]:
    """Return the figures against Spark: its operator, its aggregation in the JVM, and Spark SQL."""
    keyed = {bar["name"]: bar["value"] for bar in _result("keyed_count")["bars"]}
    # Measured in two benchmarks, which differ in what else runs in their sessions.
    times_as_fast = _result("vectorised")["ratios"]
    return [
        (
            "an unchanged keyed count, against Spark's operator",
            f"{_between(keyed[_SPEED], times_as_fast[_UNCHANGED])} times the rows per second",
        ),
        ("the same over Arrow tables", f"{times_as_fast[_ARROW]:.0f} times"),
        (
            "over Arrow tables, against Spark's own aggregation in the JVM: 100,000 events of 50,000 keys",
            f"{_between(times_as_fast[_JVM_SMALL], _peer(0, _JVM_PEER), places=2)} times",
        ),
        (
            "and 1,000,000 events of 1,000,000 keys",
            f"{_between(times_as_fast[_JVM_LARGE], _peer(1, _JVM_PEER))} times",
        ),
        ("seven queries of Nexmark, against Spark SQL", _nexmark()),
    ]


def _further_rows() -> list[tuple[str, str]]:
    """Return the summary's figures that the README leaves out."""
    keyed, store, commit = _result("keyed_count"), _result("store"), _result("async_commit")
    bars = {bar["name"]: bar["value"] for bar in keyed["bars"] + store["bars"]}
    ratios, times, times_as_fast = keyed["ratios"], store["medians_s"], _result("vectorised")["ratios"]
    entry_get = 1000 * times["one entry a key, sorted first: get, 1 run"]
    entry_put = 1000 * times["one entry a key: put"]
    ours_get, ours_put = bars["get, 1 run"], bars["put"]
    return [
        ("the keyed count giving tuples, against Spark's operator", f"{times_as_fast[_TUPLES]:.0f} times"),
        ("the same over plain rows", f"{times_as_fast[_ROWS]:.0f} times"),
        ("100,000 events of 50,000 keys, against Flink with RocksDB and against Bytewax", _others(0)),
        ("and 1,000,000 events of 1,000,000 keys", _others(1)),
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


def _between(one: float, other: float, places: int = 1) -> str:
    """Both, the least first, or one where they look the same."""
    both = dict.fromkeys(f"{value:.{places}f}" for value in sorted((one, other)))
    return " to ".join(both)


def _peer(workload: int, program: str) -> float:
    """How many times as fast a function over Arrow tables is as the fastest of another system's programs."""
    result = _result("peers")
    measured = _by_program(result["medians_s"])
    name = result["parameters"]["workloads"][workload]
    medians = {program: found[name] for program, found in measured.items() if name in found}
    fastest: float = min(median for other, median in medians.items() if other.startswith(program))
    ours: float = medians["Arrow state, a function over Arrow tables"]
    return fastest / ours


def _others(workload: int) -> str:
    return " and ".join(f"{_peer(workload, program):.2g}" for program in ("Flink", "Bytewax")) + " times"


def _nexmark() -> str:
    """From the least to the most, and how many are slower."""
    values = [bar["value"] for bar in _result("nexmark")["bars"]]
    slower = sum(value < 1 for value in values)
    return f"{min(values):.2g} to {max(values):.2g} times; {slower} of {len(values)} are slower"


def _by_program(named: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is noted as ``<program>: <workload>``, by program and workload."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in named.items():
        program, workload = name.rsplit(": ", 1)
        found.setdefault(program, {})[workload] = value
    return found


def _table(name: str) -> str:
    result = _result(name)
    return "\n".join([_promised(result), _where(result), ""])


def _promised(result: dict[str, Any]) -> str:
    """Bars, and the ratios that there are."""
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
    found = _result("growth")["details"]
    counts = {name: found[name] for name in found if name.endswith(_PUBLISHED)}
    told = ", ".join(f"{count} at {name.partition(':')[0]}" for name, count in counts.items())
    return f"{_table('growth')}\nTimed batches in which snapshots were published: {told}.\n"


def _bucket_curves() -> str:
    """Median seconds by the number of buckets, and what one more adds: a table for each size of state."""
    result = _result("buckets")
    lines: list[str] = []
    for told, counts in result["parameters"]["counts by keys"].items():
        keys = int(told.replace(",", ""))
        lines += [
            f"{told} keys, {result['parameters']['events']:,} rows a batch, seconds:",
            "",
            f"| buckets | {BATCH} | {WARM} | {LOST} |",
            "| --- | --- | --- | --- |",
        ]
        for count in counts:
            cells = (result["medians_s"][f"{point_name(keys, count)}: {what}"] for what in (BATCH, WARM, LOST))
            lines.append(f"| {count:,} | {' | '.join(f'{seconds:.2f}' for seconds in cells)} |")
        slopes = (result["ratios"][slope_name(keys, what)] for what in (BATCH, WARM, LOST))
        added = " | ".join(f"{slope:.1f} ms" for slope in slopes)
        lines += [f"| one more adds, on one core | {added} |", ""]
    return "\n".join([*lines, _where(result), ""])


def _buckets() -> str:
    ratios = {name: value for name, value in _result("buckets")["ratios"].items() if SPARKS in name}
    lines = ["| ratio | |", "| --- | --- |", *(f"| {name} | {value:.2f} |" for name, value in ratios.items()), "", ""]
    return "\n".join(lines) + _bucket_curves()


def _peers() -> str:
    """Median seconds a batch: a row a program, a column a workload."""
    result = _result("peers")
    workloads = result["parameters"]["workloads"]
    shown = {name: f"{median:.3g} s" for name, median in result["medians_s"].items()}
    shown |= {name: f"left out: {why}" for name, why in result["details"].get("left out", {}).items()}
    lines = [f"| seconds a batch | {' | '.join(workloads)} |", "| --- |" + " --- |" * len(workloads)]
    for program, cells in _by_program(shown).items():
        lines.append(f"| {program} | {' | '.join(cells.get(workload, '') for workload in workloads)} |")
    return "\n".join([*lines, "", _where(result), ""])


def _where(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("pyspark", "pandas", "pyarrow", "lmdb"))
    day = result["finished"][:10]
    # Twelve digits, and a + where files differed from it; None where there was no clone.
    commit = result["commit"] or "unknown"
    place = f"{machine['cores']} cores of an {machine['cpu']}, Python {versions['python']}, {packages}"
    return f"{place}; {day}, commit {commit[:7]}{commit[12:]}."


def _machines(results: list[dict[str, Any]]) -> list[str]:
    """Where and when some results were measured, which may differ."""
    by_place: dict[str, list[str]] = {}
    for result in results:
        by_place.setdefault(_where(result), []).append(result["name"])
    return [f"* {', '.join(names)}: {where}" for where, names in by_place.items()]


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
    """Median seconds by mode and size: what the death of a host costs, and what of that is Spark's."""
    result = _result("failover")
    times = result["medians_s"]
    heads = list(dict.fromkeys(name.partition(": ")[2] for name in times))
    lines = [f"| median seconds | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    sizes = sorted({(it["mode"], it["gb"]) for it in result["details"]["kills"]})
    for name in (f"{mode}, {gb:g} GB" for mode, gb in sizes):
        cells = (f"{times[f'{name}: {what}']:.3g}" for what in heads)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    # Each mode and size is a run of its own.
    places = [{"name": f"{it['mode']} {it['gb']:g} GB", **it} for it in result["details"]["places"]]
    return "\n".join([*lines, "", _promised(result), *_machines(places), ""])


def _assignment() -> str:
    """With what all hosts together ask of the store, and how many replicas move."""
    result = _result("standby_assignment")
    details, parameters = result["details"], result["parameters"]
    asked = details["requests a second of the whole cluster"]
    replicas = parameters["buckets"] * parameters["replicas"]
    # Where a host goes, what it had has to be copied by others.
    came = max(
        it["moved"] / (replicas / it["hosts"]) for it in details["replicas moved by each change"] if not it["goes"]
    )
    rows = [
        ("requests a second, median, once all have read all records", f"{asked['warm: median']:.0f}"),
        (
            "requests a second, first two heartbeats",
            " and ".join(f"{it:.0f}" for it in asked["cold: first two heartbeats"]),
        ),
        ("requests a second, the most while a change spreads", f"{asked['while a change spreads: most']:.0f}"),
        ("replicas moved when a host comes, the most, in shares of one host", f"{came:.2f}"),
        ("a decision, median", f"{result['medians_s']['a decision']:.2f} s"),
        ("the largest record", f"{details['a record: most bytes'] / 1000:.0f} kB"),
        ("reading all records, the most", f"{max(result['timings_s']['reading all records']):.2f} s"),
    ]
    lines = ["| | |", "| --- | --- |", *(f"| {what} | {figure} |" for what, figure in rows), ""]
    return "\n".join([_promised(result), *lines, _where(result), ""])


def _locality() -> str:
    """Where buckets ran again, from the command that its file names, which is none of the benchmarks."""
    result = _result("locality")
    heads = ("setting", "partitions", "stayed, median batch", "worst batch", "hosts of a bucket", "on the fullest host")
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for it in result["settings"]:
        conf = ", ".join(f"`{name}={value}`" for name, value in it["conf"].items())
        name = f"{it['name']}, with {it['first_worker_share']:.0%} of the buckets" if it["loses"] else it["name"]
        name = f"{name}: {conf}" if conf else name
        figures = [it["partitions"], *(f"{it[share]:.0%}" for share in ("stayed", "stayed_min"))]
        cells = [name, *map(str, figures), f"{it['hosts_per_bucket']:g}", f"{it['largest_share']:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    place = f"{result['hosts']} hosts, {result['cores']} cores, {result['buckets']} buckets"
    told = f"`{result['command']}`: {place}, PySpark {result['versions']['pyspark']}."
    return "\n".join([*lines, "", told, ""])


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
    """Write them."""
    for path in DOCUMENTS:
        path.write_text(with_figures(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
