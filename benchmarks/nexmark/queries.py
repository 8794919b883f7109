"""Queries of the Nexmark benchmark, each on Arrow state and in the forms that Spark offers for it.

They mean the same as nexmark-flink's SQL (``nexmark-flink/src/main/resources/queries``); q7, q18, q19 and q20 have all
of its output columns. If rows tie, further columns decide, so that the answers of two engines can be compared row by
row. This concerns queries whose SQL leaves the choice open, and also q5 and q7: their SQL returns all rows that tie,
but each form here returns one.

=====  ==============================================================================================
q5     hot items: the auction with the most bids in each window of 10 s; a window begins every 2 s
q7     the highest bid in each window of 10 s
q11    the number of bids in each session of a bidder; a session ends after 10 s without a bid
q12    the number of bids of each bidder in each window of 10 s of processing time
q18    the last bid of each bidder on each auction
q19    the ten highest bids on each auction
q20    the bids on auctions of category 10, joined with their auction
=====  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import GroupedData
from pyspark.sql import functions as F

from benchmarks.nexmark.per_key import BEST, KEPT, with_a_processor, with_pandas
from spark_state_ext import Agg, ArrowState, StateBatch, aggregate, sessionize, top_k

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["OURS", "QUERIES", "Query", "only_moved"]

OURS = "Arrow state"
_SQL, _PANDAS, _PROCESSOR = "Spark SQL", "Spark applyInPandasWithState", "Spark transformWithStateInPandas"
_DELAY = "4 seconds"
_WINDOW_US, _SLIDE_US, _WINDOW_MS = 10_000_000, 2_000_000, 10_000

Plan = Callable[["DataFrame", Path], "DataFrame"]


@dataclass(frozen=True)
class Query:
    """A query in all its forms.

    Parameters
    ----------
    name, title
        Its name, such as ``q5``, and a short title.
    plans
        For each contender, the function that makes the streaming query from all events and a folder for its state.
    output_mode
        The output mode, as in `DataStreamWriter.outputMode`.
    moved
        Selects the rows and columns that the Arrow form sends to Python.
    answer
        The columns that are compared between the outputs of the contenders.
    clocked
        Whether the answer depends on the time of day. If so, a compared batch starts at the beginning of a window.
    changes
        The columns of the key, if the Arrow form outputs the rows of a key only when they changed, but Spark whenever
        the key has input. Then, from the second batch on, only the keys that the Arrow form outputs are compared. If
        empty, all rows are compared.
    slow
        The contenders that take minutes per batch. They run only on request, and only on the first batches.
    """

    name: str
    title: str
    plans: Mapping[str, Plan]
    output_mode: str
    moved: Callable[[DataFrame], DataFrame]
    answer: tuple[str, ...]
    clocked: bool = False
    changes: tuple[str, ...] = ()
    slow: frozenset[str] = frozenset()


def only_moved(query: Query) -> Plan:
    """Return a plan that only sends a query's rows from the JVM to Python; no Arrow form of it can take less time."""
    return lambda events, folder: query.moved(events).mapInArrow(_count_rows, "n bigint")


def _count_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = sum(batch.num_rows for batch in batches)
    yield pa.record_batch([pa.array([rows], pa.int64())], names=["n"])


def _make_state(folder: Path, buckets: int = 4) -> ArrowState:
    return ArrowState(str(folder / "state"), "nexmark", buckets=buckets, local_dir=str(folder / "local"))


def _select_bids(events: DataFrame) -> DataFrame:
    return events.where("kind = 'bid'")


def _select_timed_bids(events: DataFrame) -> DataFrame:
    return _select_bids(events).withWatermark("dateTime", _DELAY)


# -- q5 ----------------------------------------------------------------------------------------------------------------


def _q5_sql(events: DataFrame, folder: Path) -> DataFrame:
    windows = F.window("dateTime", "10 seconds", "2 seconds")
    counted = _select_timed_bids(events).groupBy(windows, "auction").agg(F.count("*").alias("bids"))
    best = counted.groupBy("window").agg(F.max(F.struct("bids", "auction")).alias("best"))
    return best.select(F.col("window.start").alias("start"), "best.auction", "best.bids")


def _q5_ours(events: DataFrame, folder: Path) -> DataFrame:
    counted = (
        _select_bids(events)
        .select("dateTime", "auction")
        .mapInArrow(count_bids_by_pane, "dateTime timestamp, auction bigint, bids bigint")
    )
    return _make_state(folder, 1).apply_in_arrow_with_state(
        counted.withWatermark("dateTime", _DELAY).withColumn("all", F.lit(0)),
        "all",
        find_hot_items,
        "start timestamp, auction bigint, bids bigint",
        "next bigint, pane array<bigint>, auction array<bigint>, bids array<bigint>",
        "append",
        "EventTimeTimeout",
    )


def count_bids_by_pane(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Before the shuffle, count the bids by pane of 2 s and auction; a count has the time of its latest bid."""
    for batch in batches:
        if batch.num_rows:
            time, auction = batch.column(0).cast(pa.int64()).to_numpy(), batch.column(1).to_numpy()
            order = np.lexsort((time, auction, time // _SLIDE_US))
            time, auction = time[order], auction[order]
            last = np.flatnonzero(np.append((np.diff(time // _SLIDE_US) != 0) | (np.diff(auction) != 0), True))
            times = pa.array(time[last]).cast(batch.schema.field(0).type)
            yield pa.record_batch(
                [times, pa.array(auction[last]), pa.array(np.diff(last, prepend=-1))],
                names=["dateTime", "auction", "bids"],
            )


_Q5_LISTS = ("pane", "auction", "bids")


def find_hot_items(batch: StateBatch) -> pa.Table | None:
    """Keep counts by pane of 2 s and auction, all under one key; return the hot items of windows that have ended."""
    state, rows = batch.state, batch.rows
    old = [np.asarray(pc.list_flatten(state[name])) for name in _Q5_LISTS]
    new_pane = rows["dateTime"].cast(pa.int64()).to_numpy() // _SLIDE_US
    new = [new_pane, rows["auction"].to_numpy(), rows["bids"].to_numpy()]
    pane, auction, bids = _add_counts(*(np.concatenate(pair) for pair in zip(old, new, strict=True)))
    # A window has ended when the watermark has reached its end.
    panes = _WINDOW_US // _SLIDE_US
    first_open = 1000 * max(batch.watermark_ms or 0, 0) // _SLIDE_US
    first = state["next"][0].as_py()
    if first is None:
        first = (int(pane[0]) if len(pane) else first_open) - panes + 1
    next_start = max(first, first_open - panes + 1)
    hottest = [_find_hottest(start, pane, auction, bids) for start in range(first, next_start)]
    keep = pane >= next_start
    lists = (pa.array([column[keep]], pa.list_(pa.int64())) for column in (pane, auction, bids))
    batch.update({"next": pa.array([next_start]), **dict(zip(_Q5_LISTS, lists, strict=True))})
    batch.set_timeout(timestamp_ms=(first_open + 1) * _SLIDE_US // 1000)
    winners = [row for row in hottest if row is not None]
    if not winners:
        return None
    start, auction, bids = (np.array(column) for column in zip(*winners, strict=True))
    return pa.table({"start": pa.array(start * _SLIDE_US, pa.timestamp("us", "UTC")), "auction": auction, "bids": bids})


def _add_counts(pane: Any, auction: Any, bids: Any) -> tuple[Any, Any, Any]:
    """Add up the counts of equal panes and auctions; return them sorted by pane and auction."""
    order = np.lexsort((auction, pane))
    pane, auction, bids = pane[order], auction[order], bids[order]
    if not len(pane):
        return pane, auction, bids
    starts = np.flatnonzero(np.append(True, (np.diff(pane) != 0) | (np.diff(auction) != 0)))
    return pane[starts], auction[starts], np.add.reduceat(bids, starts)


def _find_hottest(start: int, pane: Any, auction: Any, bids: Any) -> tuple[int, int, int] | None:
    begin, end = np.searchsorted(pane, [start, start + _WINDOW_US // _SLIDE_US])
    if begin == end:
        return None
    _, item, count = _add_counts(np.zeros(end - begin, dtype=np.int64), auction[begin:end], bids[begin:end])
    best = np.lexsort((item, count))[-1]
    return start, int(item[best]), int(count[best])


# -- q7 ----------------------------------------------------------------------------------------------------------------


def _q7_sql(events: DataFrame, folder: Path) -> DataFrame:
    bid = F.struct("price", "auction", "bidder", "dateTime", "extra")
    best = _select_timed_bids(events).groupBy(F.window("dateTime", "10 seconds")).agg(F.max(bid).alias("best"))
    return best.select(F.col("window.start").alias("start"), "best.*")


def _q7_ours(events: DataFrame, folder: Path) -> DataFrame:
    bids = _select_bids(events).select("dateTime", "price", "auction", "bidder", "extra")
    best = bids.mapInArrow(keep_possible_winners, bids.schema).withWatermark("dateTime", _DELAY)
    fields = "price array<bigint>, auction array<bigint>, bidder array<bigint>, time array<bigint>, extra array<string>"
    output = "start timestamp, price bigint, auction bigint, bidder bigint, dateTime timestamp, extra string"
    return _make_state(folder, 1).apply_in_arrow_with_state(
        best.withColumn("all", F.lit(0)),
        "all",
        find_highest_bids,
        output,
        f"window array<bigint>, {fields}",
        "append",
        "EventTimeTimeout",
    )


def keep_possible_winners(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Before the shuffle, keep a batch's highest bids in each window, and its latest bid, which sets the watermark."""
    for batch in batches:
        if batch.num_rows:
            time, price = batch.column(0).cast(pa.int64()).to_numpy(), batch.column(1).to_numpy()
            window = time // _WINDOW_US
            best = np.zeros(int(np.ptp(window)) + 1, dtype=np.int64)
            np.maximum.at(best, window - window.min(), price)
            is_kept = price == best[window - window.min()]
            is_kept[np.argmax(time)] = True
            yield batch.filter(pa.array(is_kept))


def find_highest_bids(batch: StateBatch) -> pa.Table | None:
    """Keep the best bid of each open window, all under one key; return those of windows that have ended."""
    state, rows = batch.state, batch.rows
    time = rows["dateTime"].cast(pa.int64()).to_numpy()
    new = [time // _WINDOW_US, *(rows[name].to_numpy() for name in ("price", "auction", "bidder")), time]
    *numbers, text = state.column_names
    old = [np.asarray(pc.list_flatten(state[name])) for name in numbers]
    columns = [np.concatenate(pair) for pair in zip(old, new, strict=True)]
    extra = pa.concat_arrays([*pc.list_flatten(state[text]).chunks, *rows[text].chunks])
    # Find the highest price of each window first, so that only bids with that price are compared further.
    window, price = columns[:2]
    if len(window):
        lowest = int(window.min())
        best = np.zeros(int(window.max()) - lowest + 1, dtype=np.int64)
        np.maximum.at(best, window - lowest, price)
        highest = np.flatnonzero(price == best[window - lowest])
        by_text = np.asarray(pc.rank(extra.take(pa.array(highest)), tiebreaker="dense"))
        highest = highest[np.lexsort([by_text, *(column[highest] for column in columns[::-1])])]
        highest = highest[np.append(np.diff(window[highest]) != 0, True)]
        columns, extra = [column[highest] for column in columns], extra.take(pa.array(highest))
    first_open = 1000 * max(batch.watermark_ms or 0, 0) // _WINDOW_US
    has_ended = columns[0] < first_open
    lists = [pa.array([column[~has_ended]], pa.list_(pa.int64())) for column in columns]
    remaining = pa.array([extra.filter(pa.array(~has_ended)).to_pylist()], pa.list_(pa.string()))
    batch.update({**dict(zip(numbers, lists, strict=True)), text: remaining})
    batch.set_timeout(timestamp_ms=(first_open + 1) * _WINDOW_MS)
    if not has_ended.any():
        return None
    window, price, auction, bidder, time = (column[has_ended] for column in columns)
    times = (pa.array(us, pa.timestamp("us", "UTC")) for us in (window * _WINDOW_US, time))
    names = ["start", "dateTime"]
    table = pa.table(dict(zip(names, times, strict=True)))
    for name, column in (("price", price), ("auction", auction), ("bidder", bidder)):
        table = table.append_column(name, pa.array(column))
    return table.append_column("extra", extra.filter(pa.array(has_ended)))


# -- q11, q12 ----------------------------------------------------------------------------------------------------------


def _q11_sql(events: DataFrame, folder: Path) -> DataFrame:
    sessions = F.session_window("dateTime", "10 seconds")
    counted = _select_timed_bids(events).groupBy(sessions, "bidder").agg(F.count("*").alias("bids"))
    return counted.select("bidder", "bids", "session_window.start", "session_window.end")


def _q11_ours(events: DataFrame, folder: Path) -> DataFrame:
    counted = sessionize(
        _make_state(folder), _select_timed_bids(events), "bidder", "dateTime", _WINDOW_MS, {"bids": Agg.count()}
    )
    return counted.select("bidder", "bids", "session_window.start", "session_window.end")


def _select_clock_windows(events: DataFrame) -> DataFrame:
    return _select_bids(events).select("bidder", F.window(F.current_timestamp(), "10 seconds").alias("window"))


def _q12_sql(events: DataFrame, folder: Path) -> DataFrame:
    counted = _select_clock_windows(events).groupBy("bidder", "window").agg(F.count("*").alias("bids"))
    return counted.select("bidder", "bids")


def _q12_ours(events: DataFrame, folder: Path) -> DataFrame:
    counted = aggregate(_make_state(folder), _select_clock_windows(events), ["bidder", "window"], {"bids": Agg.count()})
    return counted.select("bidder", "bids")


# -- q18, q19 ----------------------------------------------------------------------------------------------------------

_BID = ["auction", "bidder", "price", "channel", "url", "dateTime", "extra"]


def _q18_sql(events: DataFrame, folder: Path) -> DataFrame:
    bid = F.struct("dateTime", "price", "channel", "url", "extra")
    return (
        _select_bids(events)
        .groupBy("bidder", "auction")
        .agg(F.max(bid).alias("last"))
        .select("bidder", "auction", "last.*")
    )


def _q18_ours(events: DataFrame, folder: Path) -> DataFrame:
    bids = _select_bids(events).select(*_BID)
    return top_k(_make_state(folder), bids, ["bidder", "auction"], ["dateTime", "price", "channel", "url", "extra"], 1)


def _q19_collected(events: DataFrame, folder: Path) -> DataFrame:
    bid = F.struct(*KEPT)
    best = F.slice(F.sort_array(F.collect_list(bid), asc=False), 1, BEST)
    ranked = _select_bids(events).groupBy("auction").agg(best.alias("best"))
    return ranked.select("auction", F.posexplode("best").alias("at", "bid")).selectExpr(
        "auction", "at + 1 AS rank", "bid.*"
    )


def _q19_pandas(events: DataFrame, folder: Path) -> DataFrame:
    return with_pandas(_select_bids(events).select(*_BID))


def _q19_processor(events: DataFrame, folder: Path) -> DataFrame:
    return with_a_processor(_select_bids(events).select(*_BID))


def _q19_ours(events: DataFrame, folder: Path) -> DataFrame:
    bids = _select_bids(events).select(*_BID)
    return top_k(_make_state(folder), bids, "auction", KEPT, BEST)


# -- q20 ---------------------------------------------------------------------------------------------------------------

# An auction's columns: their names in the output and in the events. In the events, bids also have two of these names.
_AUCTION = {
    **{name: name for name in ("itemName", "description", "initialBid", "reserve")},
    "auctionTime": "dateTime",
    **{name: name for name in ("expires", "seller", "category")},
    "auctionExtra": "extra",
}
_TEXT = frozenset({"channel", "url", "extra", "itemName", "description", "auctionExtra"})
_TIMES = frozenset({"dateTime", "auctionTime", "expires"})


def _get_types(names: Iterable[str]) -> dict[str, str]:
    return {name: "string" if name in _TEXT else "timestamp" if name in _TIMES else "bigint" for name in names}


def _q20_sql(events: DataFrame, folder: Path) -> DataFrame:
    auction = (F.col(source).alias(name) for name, source in _AUCTION.items())
    auctions = events.where("kind = 'auction' AND category = 10").select("id", *auction)
    bids = _select_bids(events).select(*_BID)
    return bids.join(auctions, F.expr("auction = id")).select(*_BID, *_AUCTION)


def _select_bids_and_auctions(events: DataFrame) -> DataFrame:
    """Select bids and auctions, keyed by the auction's id; of auctions outside category 10, send only the category."""
    bid = F.col("kind") == "bid"
    key = F.when(bid, F.col("auction")).otherwise(F.col("id")).alias("key")
    wanted = bid | (F.col("category") == 10)
    names = [name for name in dict.fromkeys([*_BID, *_AUCTION.values()]) if name != "category"]
    columns = (F.when(wanted, F.col(name)).alias(name) for name in names)
    return events.where("kind IN ('bid', 'auction')").select(key, "kind", "category", *columns)


def _q20_ours(events: DataFrame, folder: Path) -> DataFrame:
    rows = _select_bids_and_auctions(events)
    columns, auction = _get_types(_BID), _get_types(_AUCTION)
    output = ", ".join(f"{name} {kind}" for name, kind in {**columns, **auction}.items())
    waiting = ", ".join(f"{name}: {kind}" for name, kind in columns.items())
    kept = ", ".join(f"{name} {kind}" for name, kind in auction.items())
    state = f"{kept}, waiting array<struct<{waiting}>>"
    return _make_state(folder).apply_in_arrow_with_state(rows, "key", join_bids_with_auctions, output, state, "append")


def join_bids_with_auctions(batch: StateBatch) -> pa.Table:
    """Join bids with their auction; bids that come before their auction wait in the state."""
    rows, state = batch.rows, batch.state
    ids = np.asarray(batch.group_ids)
    is_auction = np.asarray(pc.equal(rows["kind"], "auction"))
    auctions = np.flatnonzero(is_auction)
    # A key's auction is the one in this batch if there is one, otherwise the one in the state.
    known = np.asarray(pc.is_valid(state["category"]))
    source = np.where(known, np.arange(len(batch)), -1)
    source[ids[auctions]] = len(batch) + np.arange(len(auctions))
    new_auctions = rows.select(list(_AUCTION.values())).take(pa.array(auctions)).rename_columns(list(_AUCTION))
    both = pa.concat_tables([state.select(list(_AUCTION)), new_auctions])
    auction = both.combine_chunks().take(pa.array(source, mask=source < 0))
    waiting = state["waiting"].combine_chunks()
    lengths = np.asarray(pc.fill_null(pc.list_value_length(waiting), 0))
    fields = list(waiting.type.value_type)
    old = pa.table(waiting.flatten().flatten(), schema=pa.schema(fields))
    bids = np.flatnonzero(~is_auction)
    old_keys, new_keys = np.repeat(np.arange(len(batch)), lengths), ids[bids]

    def take_bids(keys: Any) -> tuple[pa.Table, Any]:
        """Return the bids of these keys, first from the state, then from this batch, and the key of each bid."""
        before, now = np.flatnonzero(keys[old_keys]), np.flatnonzero(keys[new_keys])
        new = rows.select(_BID).take(pa.array(bids[now])).cast(old.schema)
        return pa.concat_tables([old.take(pa.array(before)), new]), np.concatenate([old_keys[before], new_keys[now]])

    remaining, owners = take_bids(source < 0)
    remaining = remaining.take(pa.array(np.argsort(owners, kind="stable"))).combine_chunks()
    structs = pa.StructArray.from_arrays(
        [column.chunk(0) if column.num_chunks else pa.array([], column.type) for column in remaining.columns],
        fields=fields,
    )
    ends = np.cumsum(np.bincount(owners, minlength=len(batch)))
    lists = pa.ListArray.from_arrays(pa.array(np.append(0, ends), pa.int32()), structs, type=waiting.type)
    batch.update(pa.table([*auction.columns, lists], names=state.column_names))
    joined, owners = take_bids(np.asarray(pc.fill_null(pc.equal(auction["category"], 10), False)))
    return pa.table([*joined.columns, *auction.take(pa.array(owners)).columns], names=[*_BID, *_AUCTION])


QUERIES = {
    query.name: query
    for query in (
        Query(
            "q5",
            "hot items",
            {OURS: _q5_ours, _SQL: _q5_sql},
            "append",
            lambda events: _select_bids(events).select("dateTime", "auction"),
            ("start", "auction", "bids"),
        ),
        Query(
            "q7",
            "highest bid",
            {OURS: _q7_ours, _SQL: _q7_sql},
            "append",
            lambda events: _select_bids(events).select("dateTime", "price", "auction", "bidder", "extra"),
            ("start", "price", "auction", "bidder", "dateTime", "extra"),
        ),
        Query(
            "q11",
            "user sessions",
            {OURS: _q11_ours, _SQL: _q11_sql},
            "append",
            lambda events: _select_bids(events).select("bidder", "dateTime"),
            ("bidder", "bids", "start", "end"),
        ),
        Query(
            "q12",
            "processing-time windows",
            {OURS: _q12_ours, _SQL: _q12_sql},
            "update",
            _select_clock_windows,
            ("bidder", "bids"),
            True,
        ),
        Query(
            "q18",
            "last bid",
            {OURS: _q18_ours, _SQL: _q18_sql},
            "update",
            lambda events: _select_bids(events).select(*_BID),
            ("bidder", "auction", "dateTime", "price", "channel", "url", "extra"),
            changes=("bidder", "auction"),
        ),
        Query(
            "q19",
            "ten best bids",
            # Spark 3.5 does not have transformWithState.
            {OURS: _q19_ours, _SQL: _q19_collected, _PANDAS: _q19_pandas}
            | ({_PROCESSOR: _q19_processor} if hasattr(GroupedData, "transformWithStateInPandas") else {}),
            "update",
            lambda events: _select_bids(events).select(*_BID),
            ("auction", "rank", *KEPT),
            changes=("auction",),
            slow=frozenset({_PANDAS, _PROCESSOR}),
        ),
        Query(
            "q20",
            "bids with their auction",
            {OURS: _q20_ours, _SQL: _q20_sql},
            "append",
            _select_bids_and_auctions,
            (*_BID, *_AUCTION),
        ),
    )
}
