"""The events of the Nexmark benchmark, made with NumPy: persons, auctions, and bids on them.

The rules are those of the two generators in common use: Apache Beam's (``sdks/java/testing/nexmark``, package
``sources.generator``) and nexmark-flink's (https://github.com/nexmark/nexmark, package ``generator``), which was
derived from it. Each class there has its function here: GeneratorConfig and NexmarkConfiguration are `Config`,
(Nexmark)Generator is `events`, and Person-, Auction-, Bid-, Price-, Long- and StringsGenerator are private functions.

What is the same: the kind, id and time of every event, and the distribution of every other field. What is not:

* The draws. Beam seeds Java's Random with the event's number, nexmark-flink does not seed at all. Here a draw is the
  SplitMix64 hash of seed, event number and field, so that an event is the same however a range is cut into batches.
  SplitMix64 is also what Java's SplittableRandom does. Letters in strings are drawn from 16 bits: each has its
  probability to within one part in a thousand.
* Where the two differ. Times follow nexmark-flink, with a real-valued distance of events: Beam rounds it to whole
  microseconds. Channel and URL of a bid are nexmark-flink's, Beam has none. Events are numbered from 0, and times
  begin at a fixed date, as with Beam: nexmark-flink begins at event 2 and at the time of its start. A bidder's id is a
  person's, as with Beam: nexmark-flink adds 1000 twice, and its bidders are other people.
* There is one generator, as in nexmark-flink: Beam's default is a hundred side by side, each on its own time line.
* Left out is what is off by default: a rate that changes, delayed events, other proportions of the three kinds. Mixed
  order is off by default too, but can be had. The column ``extra``, which both always have, is made when asked for, as
  the benchmark does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.nexmark.draws import I64, U8, Draws, join, lengths, one_of, strings, text

__all__ = ["KINDS", "SCHEMAS", "Config", "EventFeed", "Events", "events", "schema", "spark_schema"]

KINDS = ("person", "auction", "bid")

_TIME = pa.timestamp("us", "UTC")
# Names, order and types of columns as in nexmark-flink's tables (ddl_gen.sql).
SCHEMAS: dict[str, Any] = {
    "person": pa.schema(
        [
            ("id", pa.int64()),
            ("name", pa.string()),
            ("emailAddress", pa.string()),
            ("creditCard", pa.string()),
            ("city", pa.string()),
            ("state", pa.string()),
            ("dateTime", _TIME),
        ]
    ),
    "auction": pa.schema(
        [
            ("id", pa.int64()),
            ("itemName", pa.string()),
            ("description", pa.string()),
            ("initialBid", pa.int64()),
            ("reserve", pa.int64()),
            ("dateTime", _TIME),
            ("expires", _TIME),
            ("seller", pa.int64()),
            ("category", pa.int64()),
        ]
    ),
    "bid": pa.schema(
        [
            ("auction", pa.int64()),
            ("bidder", pa.int64()),
            ("price", pa.int64()),
            ("channel", pa.string()),
            ("url", pa.string()),
            ("dateTime", _TIME),
        ]
    ),
}

# Of 50 events the first is a person, the next 3 are auctions, and 46 are bids.
_PERSONS, _AUCTIONS, _BIDS = 1, 3, 46
_CYCLE = _PERSONS + _AUCTIONS + _BIDS
_FIRST_PERSON, _FIRST_AUCTION, _FIRST_CATEGORY, _CATEGORIES = 1000, 1000, 10, 5
# So many ids that do not exist yet may be drawn: an auction or a person then seems to come after what refers to it.
_LEAD = 10
# A hot seller, bidder or auction stays hot until so many more of them have come.
_HOT_SPAN = 100
_HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
_CHANNELS = 10_000
_POOL = 2**20

_STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
_CITIES = (
    *("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland"),
    *("Bend", "Redmond", "Seattle", "Kent", "Cheyenne"),
)
_FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
_LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")

# Rows are made in blocks of so many events, whose columns stay in the processor's cache.
_BLOCK = 1024 * _CYCLE


@dataclass(frozen=True)
class Config:
    """What a stream of events is like; the defaults are those of the reference, but for `extra`.

    Parameters
    ----------
    seed
        Decides all draws; from 0 to 2**64 - 1.
    rate
        Events per second of event time.
    base_ms
        Time of event 0, milliseconds since 1970; by default 2015-07-15, as with Beam.
    hot_auction_ratio
        All bids but one of so many go to the hot auction: the first of the latest hundred.
    hot_seller_ratio
        All auctions but one of so many are by the hot seller: the first of the latest hundred persons.
    hot_bidder_ratio
        All bids but one of so many are by the hot bidder: the second of the latest hundred persons.
    in_flight_auctions
        A bid that does not go to the hot auction goes to one of so many latest auctions. An auction is open, on
        average, until so many more have begun.
    active_people
        Other sellers and bidders are among so many latest persons.
    out_of_order_group
        Events come in mixed order within groups of so many; 1 leaves them in the order of their times.
    extra
        Whether rows are padded to the average sizes with a column ``extra``.
    person_size, auction_size, bid_size
        Average sizes of padded rows in bytes, by the reference's way of counting.
    """

    seed: int = 7
    rate: int = 10_000
    base_ms: int = 1_436_918_400_000
    hot_auction_ratio: int = 2
    hot_seller_ratio: int = 4
    hot_bidder_ratio: int = 4
    in_flight_auctions: int = 100
    active_people: int = 1000
    out_of_order_group: int = 1
    extra: bool = False
    person_size: int = 200
    auction_size: int = 500
    bid_size: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed {self.seed} is not in 0 .. 2**64 - 1")
        for name in ("rate", "hot_auction_ratio", "hot_seller_ratio", "hot_bidder_ratio", "out_of_order_group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")
        for name in ("in_flight_auctions", "active_people"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must not be negative")
        if self.out_of_order_group % _STRIDE == 0:
            raise ValueError(f"out_of_order_group must not be a multiple of {_STRIDE}: events would be lost")
        if max(self.person_size, self.auction_size, self.bid_size) > 10_000:
            raise ValueError("sizes of more than 10,000 bytes are not supported")
        if 2 * self.horizon * 1000 / self.rate >= 2**31:
            raise ValueError("auctions of more than 2**31 ms are not supported: raise rate or lower in_flight_auctions")

    @property
    def horizon(self) -> int:
        """Events until `in_flight_auctions` more auctions have begun."""
        return self.in_flight_auctions * _CYCLE // _AUCTIONS


class Events(NamedTuple):
    """Tables of the three kinds, each in the order of the events, with the columns of `schema`."""

    person: Any
    auction: Any
    bid: Any


def schema(kind: str, extra: bool = False) -> Any:
    """Arrow schema of a kind's table, with or without the column ``extra``."""
    plain = SCHEMAS[kind]
    return plain.append(pa.field("extra", pa.string())) if extra else plain


def spark_schema(kind: str | None = None, extra: bool = False) -> str:
    """Schema for a reader of an `EventFeed`, as Spark wants it: ``"id bigint, name string, ..."``.

    Parameters
    ----------
    kind
        Of which events; None for all, with the columns of all kinds after a column ``kind``. Events have NULL in
        columns that their kind has not.
    extra
        Whether there is a column ``extra``.
    """
    types = {pa.int64(): "bigint", pa.string(): "string", _TIME: "timestamp"}
    columns = {"kind": "string"} if kind is None else {}
    for one in KINDS if kind is None else (kind,):
        columns |= {field.name: types[field.type] for field in schema(one, extra)}
    return ", ".join(f"{name} {type_}" for name, type_ in columns.items())


def events(config: Config, first: int, count: int) -> Events:
    """Make the events `first` to ``first + count - 1``.

    A range gives the same rows asked for at once or in pieces.

    Parameters
    ----------
    config
        What they are like.
    first
        Number of the first event; the stream begins at 0.
    count
        How many events.

    Returns
    -------
    Events
        Tables whose row counts add up to `count`. Times are in microseconds but fall on whole milliseconds, as the
        reference has it: at more than 1,000 events a second several have the same time.
    """
    if first < 0 or count < 0:
        raise ValueError(f"events {first} .. {first} + {count}: neither may be negative")
    blocks: list[Events] = []
    for start in range(first, first + count, _BLOCK):
        numbers = _emitted(config, np.arange(start, min(start + _BLOCK, first + count), dtype=np.int64))
        at = numbers % _CYCLE
        persons, auctions = at < _PERSONS, at < _PERSONS + _AUCTIONS
        blocks.append(
            Events(
                _persons(config, numbers[persons]),
                _auctions(config, numbers[auctions & ~persons]),
                _bids(config, numbers[~auctions]),
            )
        )
    return Events(*(_concat(kind, config.extra, [getattr(block, kind) for block in blocks]) for kind in KINDS))


class EventFeed:
    """A folder that a file stream reads: each batch becomes visible as a whole, with its events of all kinds.

    Parameters
    ----------
    folder
        The folder; made when absent.
    """

    def __init__(self, folder: Path) -> None:
        self._hidden = folder / "hidden"
        self._shown = folder / "shown"
        self._hidden.mkdir(parents=True)
        self._shown.mkdir()
        self._count = 0

    def pattern(self, kind: str | None = None) -> str:
        """Path for the stream's reader, to be read with `spark_schema` of the same kind.

        Parameters
        ----------
        kind
            None for one stream of all events, which has each batch in one micro-batch. Streams of single kinds may
            see a batch in different micro-batches of the query that has them: Spark lists their files one after the
            other, and a batch may come in between.
        """
        if kind is not None and kind not in KINDS:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
        return f"{self._shown}/*/{kind or '*'}"

    def add(self, batch: Events, files: int = 1) -> Path:
        """Show one batch; returns its folder.

        Parameters
        ----------
        batch
            The events. Files have a column ``kind`` before the table's.
        files
            Parquet files a kind, equally large; a kind without rows has none.
        """
        name = f"batch-{self._count:05d}"
        self._count += 1
        for kind, table in zip(KINDS, batch, strict=True):
            folder = self._hidden / name / kind
            folder.mkdir(parents=True)
            marked = table.add_column(0, "kind", pa.repeat(kind, table.num_rows))
            for i, part in enumerate(_slices(marked, files)):
                pq.write_table(part, folder / f"part-{i:05d}.parquet", compression="none")
        # Renaming the folder is atomic: the stream sees all files of the batch or none.
        return (self._hidden / name).rename(self._shown / name)


def _slices(table: Any, files: int) -> Iterator[Any]:
    step = max(1, -(-table.num_rows // files))
    return (table.slice(at, step) for at in range(0, table.num_rows, step))


def _concat(kind: str, extra: bool, tables: list[Any]) -> Any:
    return pa.concat_tables(tables) if tables else schema(kind, extra).empty_table()


# Which event, and when.

_STRIDE = 953


def _emitted(config: Config, numbers: I64) -> I64:
    """Numbers of the events that come at these places of the stream."""
    group = config.out_of_order_group
    if group == 1:
        return numbers
    # The stride is prime, so that it steps through all of a group that is no multiple of it.
    return numbers // group * group + numbers * _STRIDE % group


def _milliseconds(config: Config, numbers: I64) -> I64:
    # In floating point, and cut off twice, because the reference does so: equal to the millisecond.
    return config.base_ms + (numbers * (1e6 / config.rate)).astype(np.int64) // 1000


def _last_person(numbers: I64) -> I64:
    """Latest person at these events, counted from 0; its own at the event of a person."""
    return numbers // _CYCLE * _PERSONS + np.minimum(numbers % _CYCLE, _PERSONS - 1)


def _last_auction(numbers: I64) -> I64:
    """Latest auction at these events, none of which is a person's; its own at the event of an auction."""
    return numbers // _CYCLE * _AUCTIONS + np.minimum(numbers % _CYCLE - _PERSONS, _AUCTIONS - 1)


def _times(milliseconds: I64) -> Any:
    return pa.array(milliseconds * 1000).view(_TIME)


_NAMES = pa.array([f"{first} {last}" for first, last in itertools.product(_FIRST_NAMES, _LAST_NAMES)])
_CITY_NAMES, _STATE_NAMES = pa.array(_CITIES), pa.array(_STATES)
_FOUR_DIGITS = pa.array([f"{i:04d}" for i in range(10_000)])


@functools.lru_cache(maxsize=4)
def _channels(seed: int) -> tuple[Any, Any]:
    """Names of all channels, the hot ones first, and the URL that bids of each come with."""
    others = np.arange(_CHANNELS)
    draws = Draws(seed, 1, np.arange(len(_HOT_CHANNELS) + _CHANNELS))
    folders = [text(draws, field, 5, "_") for field in (0, 2, 4)]
    urls = pc.binary_join_element_wise("https://www.nexmark.com", *folders, "item.htm?query=1", "/")
    bit = np.arange(32, dtype=np.uint32)
    turned = ((others[:, np.newaxis] >> bit & 1) << (31 - bit)).sum(axis=1).astype(np.uint32).view(np.int32)
    # As in Java, the absolute value of the least integer is itself: one channel has a negative id.
    ids = join("&channel_id=", pa.array(np.abs(turned)).cast(pa.string()))
    with_id = draws.below(6, 10)[len(_HOT_CHANNELS) :] > 0
    tails = pc.if_else(pa.array(with_id), ids, "")
    hot, others_urls = urls.slice(0, len(_HOT_CHANNELS)), urls.slice(len(_HOT_CHANNELS))
    names = join("channel-", pa.array(others).cast(pa.string()))
    return pa.concat_arrays([pa.array(_HOT_CHANNELS), names]), pa.concat_arrays([hot, join(others_urls, tails)])


@functools.lru_cache(maxsize=4)
def _pool(seed: int) -> U8:
    """Characters that paddings are cut from.

    Six at a time are the digits, to base 26, of a signed integer of 32 bits. Those of a negative one lie before ``a``,
    from ``H`` on: by mistake, but the reference's paddings are such.
    """
    bits = Draws(seed, 2, np.arange(-(-_POOL // 6))).bits(0)
    integers = (bits >> np.uint64(32)).astype(np.uint32).view(np.int32).astype(np.int64)
    digits = np.abs(integers)[:, np.newaxis] // 26 ** np.arange(6) % 26
    return (ord("a") + digits * np.sign(integers)[:, np.newaxis]).astype(np.uint8).ravel()[:_POOL]


def _extra(config: Config, draws: Draws, field: int, size: int | I64, average: int) -> Any:
    """Padding for rows of a size in bytes, so that they have an average size; two fields are used."""
    missing = np.broadcast_to(np.maximum(average - size, 0), len(draws)).astype(np.int64)
    spread = np.floor(missing * 0.2 + 0.5).astype(np.int64)
    lengths = missing - spread + draws.below(field, 2 * spread)
    longest = int(lengths.max(initial=0))
    starts = draws.below(field + 1, _POOL - lengths)
    # A window for each place of the pool; the last ones reach over its end, but only with what is not taken.
    padded = np.concatenate([_pool(config.seed), np.zeros(longest, np.uint8)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, longest or 1)
    return strings(windows[starts], lengths)


# The three kinds. Each field of `Draws` is used once.


def _table(config: Config, kind: str, columns: list[Any], padding: Callable[[], Any]) -> Any:
    if config.extra:
        columns = [*columns, padding()]
    return pa.Table.from_arrays(columns, schema=schema(kind, config.extra))


def _persons(config: Config, numbers: I64) -> Any:
    draws = Draws(config.seed, 0, numbers)
    name = one_of(_NAMES, draws, 0)
    email = join(text(draws, 10, 7), "@", text(draws, 20, 5), ".com")
    card = pc.binary_join_element_wise(*(one_of(_FOUR_DIGITS, draws, field) for field in (1, 2, 3, 4)), " ")
    city, state = one_of(_CITY_NAMES, draws, 5), one_of(_STATE_NAMES, draws, 6)
    ids = pa.array(_FIRST_PERSON + _last_person(numbers))
    texts = [name, email, card, city, state]
    return _table(
        config,
        "person",
        [ids, *texts, _times(_milliseconds(config, numbers))],
        lambda: _extra(config, draws, 7, 8 + sum(map(lengths, texts)), config.person_size),
    )


def _auctions(config: Config, numbers: I64) -> Any:
    draws = Draws(config.seed, 0, numbers)
    last_person = _last_person(numbers)
    hot = draws.below(0, config.hot_seller_ratio) > 0
    seller = np.where(hot, last_person // _HOT_SPAN * _HOT_SPAN, _some_person(config, draws, 1, last_person))
    initial = draws.price(3)
    begins = _milliseconds(config, numbers)
    # An auction is open for 1 ms to twice the time that it takes until `in_flight_auctions` more have begun.
    length = np.maximum(2 * (_milliseconds(config, numbers + config.horizon) - begins), 1)
    name, description = text(draws, 10, 20), text(draws, 20, 100)
    return _table(
        config,
        "auction",
        [
            pa.array(_FIRST_AUCTION + _last_auction(numbers)),
            name,
            description,
            pa.array(initial),
            pa.array(initial + draws.price(5)),
            _times(begins),
            _times(begins + 1 + draws.below(4, length)),
            pa.array(_FIRST_PERSON + seller),
            pa.array(_FIRST_CATEGORY + draws.below(2, _CATEGORIES)),
        ],
        lambda: _extra(config, draws, 6, 48 + lengths(name) + lengths(description), config.auction_size),
    )


def _bids(config: Config, numbers: I64) -> Any:
    draws = Draws(config.seed, 0, numbers)
    last_person, last_auction = _last_person(numbers), _last_auction(numbers)
    hot = draws.below(0, config.hot_auction_ratio) > 0
    least = np.maximum(last_auction - config.in_flight_auctions, 0)
    some = least + draws.below(1, last_auction - least + 1 + _LEAD)
    auction = np.where(hot, last_auction // _HOT_SPAN * _HOT_SPAN, some)
    hot = draws.below(2, config.hot_bidder_ratio) > 0
    # The second person: the first is the hot seller.
    second = last_person // _HOT_SPAN * _HOT_SPAN + 1
    bidder = np.where(hot, second, _some_person(config, draws, 3, last_person))
    hot = draws.below(5, 2) > 0
    hot_channel, other_channel = draws.below(6, len(_HOT_CHANNELS)), draws.below(7, _CHANNELS)
    channel = pa.array(np.where(hot, hot_channel, len(_HOT_CHANNELS) + other_channel))
    names, urls = _channels(config.seed)
    return _table(
        config,
        "bid",
        [
            pa.array(_FIRST_AUCTION + auction),
            pa.array(_FIRST_PERSON + bidder),
            pa.array(draws.price(4)),
            names.take(channel),
            urls.take(channel),
            _times(_milliseconds(config, numbers)),
        ],
        lambda: _extra(config, draws, 8, 32, config.bid_size),
    )


def _some_person(config: Config, draws: Draws, field: int, last_person: I64) -> I64:
    """Any of the active people, counted from 0."""
    active = np.minimum(last_person + 1, config.active_people)
    return last_person + 1 - active + draws.below(field, active + _LEAD)
