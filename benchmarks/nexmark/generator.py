"""Generate the events of the Nexmark benchmark with NumPy: persons, auctions, and bids on the auctions.

The generator follows the two that are in common use: Apache Beam's (``sdks/java/testing/nexmark``, package
``sources.generator``) and nexmark-flink's (https://github.com/nexmark/nexmark, package ``generator``), which was
derived from Beam's. Each of their classes has a counterpart here: `Config` for GeneratorConfig and
NexmarkConfiguration, `events` for Generator and NexmarkGenerator, and private functions and `Draws` for the Person-,
Auction-, Bid-, Price-, Long- and StringsGenerator.

The kind, id and time of every event are the same as theirs, and so is the distribution of every other field. These
things differ:

* Random numbers: Beam seeds Java's Random with the number of the event, and nexmark-flink uses no seed. Here a random
  number is the SplitMix64 hash of seed, event number and field, so that an event does not depend on how a range is
  split into batches. (Java's SplittableRandom uses SplitMix64, too.) Each letter of a string is drawn with 16 random
  bits, so that its probability is exact to one part in a thousand.
* If the two generators differ, we follow one of them. As in nexmark-flink, the time between events is a real number
  (Beam rounds it to whole microseconds), and bids have a channel and a URL (Beam's have none). As in Beam, events are
  numbered from 0 and their times begin at a fixed date (nexmark-flink begins with event 2, at the time when it is
  started), and the id of a bidder is that of a person (nexmark-flink adds 1000 twice, so that its bidders are other
  people than its persons).
* There is one generator, as in nexmark-flink. By default Beam has a hundred of them side by side, each with its own
  time line.
* Features that are off by default in both are missing: a changing rate, delayed events, and other proportions of the
  three kinds. Only mixed order, which is off by default too, is available. The column ``extra``, which both always
  produce, is optional here; the benchmark turns it on.
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
# The columns have the names, order and types of nexmark-flink's tables (ddl_gen.sql).
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
# An event may refer to one of the next so many persons or auctions, which do not exist yet at its time.
_LEAD = 10
# A hot seller and a hot bidder stay hot for so many persons, and a hot auction for so many auctions.
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

# Rows are generated in blocks of so many events, so that the columns of a block stay in the processor's cache.
_BLOCK = 1024 * _CYCLE


@dataclass(frozen=True)
class Config:
    """Settings of a stream of events; the defaults are those of the two reference generators, except `extra`.

    Parameters
    ----------
    seed
        The seed of all random numbers, from 0 to 2**64 - 1.
    rate
        Events per second of event time.
    base_ms
        The time of event 0 in milliseconds since 1970; by default 2015-07-15, as in Beam.
    hot_auction_ratio
        On average, ``hot_auction_ratio - 1`` of ``hot_auction_ratio`` bids go to the hot auction: the first
        auction of the current hundred.
    hot_seller_ratio
        On average, ``hot_seller_ratio - 1`` of ``hot_seller_ratio`` auctions are by the hot seller: the first
        person of the current hundred.
    hot_bidder_ratio
        On average, ``hot_bidder_ratio - 1`` of ``hot_bidder_ratio`` bids are by the hot bidder: the second
        person of the current hundred.
    in_flight_auctions
        Other bids go to one of the latest ``in_flight_auctions + 1`` auctions or of the next ten. On average, an
        auction is open until `in_flight_auctions` more have begun.
    active_people
        Other sellers and bidders are among the latest `active_people` persons and the next ten.
    out_of_order_group
        The number of events in a group, within which their order is mixed; 1 keeps the order of their times.
    extra
        Whether to pad rows to the average sizes with a column ``extra``.
    person_size, auction_size, bid_size
        The average sizes of padded rows in bytes, counted as the reference generators do.
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
            raise ValueError(f"seed is {self.seed}, must be from 0 to 2**64 - 1")
        for name in ("rate", "hot_auction_ratio", "hot_seller_ratio", "hot_bidder_ratio", "out_of_order_group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")
        for name in ("in_flight_auctions", "active_people"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must not be negative")
        if self.out_of_order_group % _STRIDE == 0:
            raise ValueError(f"out_of_order_group must not be a multiple of {_STRIDE}, because events would be lost")
        if max(self.person_size, self.auction_size, self.bid_size) > 10_000:
            raise ValueError("person_size, auction_size and bid_size must be at most 10,000 bytes")
        if 2 * self.horizon * 1000 / self.rate >= 2**31:
            raise ValueError("auctions must be open for less than 2**31 ms: raise rate or lower in_flight_auctions")

    @property
    def horizon(self) -> int:
        """The number of events until `in_flight_auctions` more auctions have begun."""
        return self.in_flight_auctions * _CYCLE // _AUCTIONS


class Events(NamedTuple):
    """A table for each kind of events, with the columns of `schema` and the rows in the order of the events."""

    person: Any
    auction: Any
    bid: Any


def schema(kind: str, extra: bool = False) -> Any:
    """Return the Arrow schema of a kind's table, with or without the column ``extra``."""
    plain = SCHEMAS[kind]
    return plain.append(pa.field("extra", pa.string())) if extra else plain


def spark_schema(kind: str | None = None, extra: bool = False) -> str:
    """Return the schema for a reader of an `EventFeed` as Spark's DDL: ``"id bigint, name string, ..."``.

    Parameters
    ----------
    kind
        The kind of events. None means events of all kinds: then a column ``kind`` comes first, the columns of all
        kinds follow, and events have NULL in the columns that their kind does not have.
    extra
        Whether the events have the column ``extra``.
    """
    types = {pa.int64(): "bigint", pa.string(): "string", _TIME: "timestamp"}
    columns = {"kind": "string"} if kind is None else {}
    for each_kind in KINDS if kind is None else (kind,):
        columns |= {field.name: types[field.type] for field in schema(each_kind, extra)}
    return ", ".join(f"{name} {type_}" for name, type_ in columns.items())


def events(config: Config, first: int, count: int) -> Events:
    """Return the events `first` to ``first + count - 1``.

    The rows of a range are the same, whether it is generated at once or in pieces.

    Parameters
    ----------
    config
        The settings of the stream.
    first
        The number of the first event; the stream begins with 0.
    count
        The number of events.

    Returns
    -------
    Events
        Tables whose row counts add up to `count`. Times are in microseconds, but are whole milliseconds as in the
        reference generators: at more than 1,000 events per second, several have the same time.
    """
    if first < 0 or count < 0:
        raise ValueError(f"events {first} .. {first} + {count}: neither the first event nor the count may be negative")
    blocks: list[Events] = []
    for start in range(first, first + count, _BLOCK):
        numbers = _list_event_numbers(config, np.arange(start, min(start + _BLOCK, first + count), dtype=np.int64))
        position = numbers % _CYCLE
        persons, auctions = position < _PERSONS, position < _PERSONS + _AUCTIONS
        blocks.append(
            Events(
                _make_persons(config, numbers[persons]),
                _make_auctions(config, numbers[auctions & ~persons]),
                _make_bids(config, numbers[~auctions]),
            )
        )
    return Events(*(_concat(kind, config.extra, [getattr(block, kind) for block in blocks]) for kind in KINDS))


class EventFeed:
    """A folder that a file stream reads, in which all files of a batch become visible at once.

    Parameters
    ----------
    folder
        The folder, which is created if it does not exist; it must not contain another feed.
    """

    def __init__(self, folder: Path) -> None:
        self._hidden = folder / "hidden"
        self._shown = folder / "shown"
        self._hidden.mkdir(parents=True)
        self._shown.mkdir()
        self._count = 0

    def pattern(self, kind: str | None = None) -> str:
        """Return the path for the stream's reader, which needs the `spark_schema` of the same kind.

        Parameters
        ----------
        kind
            The kind of events; None for one stream of all events, in which no batch is split between micro-batches.
            If a query reads several streams of single kinds, a batch may be spread over several of the query's
            micro-batches: Spark lists the files of one stream after the other, and may do so while a batch is added.
        """
        if kind is not None and kind not in KINDS:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}: give one of these, or None for all events")
        return f"{self._shown}/*/{kind or '*'}"

    def add(self, batch: Events, files: int = 1) -> Path:
        """Make one batch visible to the stream, and return its folder.

        Parameters
        ----------
        batch
            The events. In the files, a column ``kind`` precedes the columns of the table.
        files
            The maximum number of Parquet files for each kind, with equally many rows each, except that the last may
            have fewer. A kind without rows has no file.
        """
        name = f"batch-{self._count:05d}"
        self._count += 1
        for kind, table in zip(KINDS, batch, strict=True):
            folder = self._hidden / name / kind
            folder.mkdir(parents=True)
            marked = table.add_column(0, "kind", pa.repeat(kind, table.num_rows))
            for i, part in enumerate(_split(marked, files)):
                pq.write_table(part, folder / f"part-{i:05d}.parquet", compression="none")
        # Renaming the folder is atomic: the stream sees all files of the batch or none.
        return (self._hidden / name).rename(self._shown / name)


def _split(table: Any, files: int) -> Iterator[Any]:
    step = max(1, -(-table.num_rows // files))
    return (table.slice(position, step) for position in range(0, table.num_rows, step))


def _concat(kind: str, extra: bool, tables: list[Any]) -> Any:
    return pa.concat_tables(tables) if tables else schema(kind, extra).empty_table()


# The numbers and the times of events.

_STRIDE = 953


def _list_event_numbers(config: Config, numbers: I64) -> I64:
    """Return the numbers of the events at these places of the stream."""
    group = config.out_of_order_group
    if group == 1:
        return numbers
    # The stride is prime, so that its multiples visit each place of a group whose size is not a multiple of it.
    return numbers // group * group + numbers * _STRIDE % group


def _compute_ms(config: Config, numbers: I64) -> I64:
    # Use floating point and truncate twice, as nexmark-flink does, to have the same milliseconds.
    return config.base_ms + (numbers * (1e6 / config.rate)).astype(np.int64) // 1000


def _find_last_person(numbers: I64) -> I64:
    """Return the latest person at each of these events, counted from 0; for a person, that is the person itself."""
    return numbers // _CYCLE * _PERSONS + np.minimum(numbers % _CYCLE, _PERSONS - 1)


def _find_last_auction(numbers: I64) -> I64:
    """Return the latest auction at each of these auctions and bids, counted from 0; for an auction, that is itself."""
    return numbers // _CYCLE * _AUCTIONS + np.minimum(numbers % _CYCLE - _PERSONS, _AUCTIONS - 1)


def _to_times(milliseconds: I64) -> Any:
    return pa.array(milliseconds * 1000).view(_TIME)


_NAMES = pa.array([f"{first} {last}" for first, last in itertools.product(_FIRST_NAMES, _LAST_NAMES)])
_CITY_NAMES, _STATE_NAMES = pa.array(_CITIES), pa.array(_STATES)
_FOUR_DIGITS = pa.array([f"{i:04d}" for i in range(10_000)])


@functools.lru_cache(maxsize=4)
def _make_channels(seed: int) -> tuple[Any, Any]:
    """Return the names of all channels, the hot ones first, and for each channel the URL of its bids."""
    others = np.arange(_CHANNELS)
    draws = Draws(seed, 1, np.arange(len(_HOT_CHANNELS) + _CHANNELS))
    folders = [text(draws, field, 5, "_") for field in (0, 2, 4)]
    urls = pc.binary_join_element_wise("https://www.nexmark.com", *folders, "item.htm?query=1", "/")
    bit = np.arange(32, dtype=np.uint32)
    reversed_bits = ((others[:, np.newaxis] >> bit & 1) << (31 - bit)).sum(axis=1).astype(np.uint32).view(np.int32)
    # As in Java, the absolute value of the smallest integer is negative, and so one channel has a negative id.
    ids = join("&channel_id=", pa.array(np.abs(reversed_bits)).cast(pa.string()))
    with_id = draws.below(6, 10)[len(_HOT_CHANNELS) :] > 0
    tails = pc.if_else(pa.array(with_id), ids, "")
    hot, others_urls = urls.slice(0, len(_HOT_CHANNELS)), urls.slice(len(_HOT_CHANNELS))
    names = join("channel-", pa.array(others).cast(pa.string()))
    return pa.concat_arrays([pa.array(_HOT_CHANNELS), names]), pa.concat_arrays([hot, join(others_urls, tails)])


@functools.lru_cache(maxsize=4)
def _make_pool(seed: int) -> U8:
    """Return the characters from which paddings are cut.

    Every six characters are the base-26 digits of a signed integer of 32 bits. The digits of a negative integer are
    characters before ``a``, from ``H`` on. This is a mistake in the reference generators, which we keep.
    """
    bits = Draws(seed, 2, np.arange(-(-_POOL // 6))).bits(0)
    integers = (bits >> np.uint64(32)).astype(np.uint32).view(np.int32).astype(np.int64)
    digits = np.abs(integers)[:, np.newaxis] // 26 ** np.arange(6) % 26
    return (ord("a") + digits * np.sign(integers)[:, np.newaxis]).astype(np.uint8).ravel()[:_POOL]


def _make_extra(config: Config, draws: Draws, field: int, size: int | I64, average: int) -> Any:
    """Return padding for rows of the given sizes in bytes, to make their average size `average`; it uses two fields."""
    missing = np.broadcast_to(np.maximum(average - size, 0), len(draws)).astype(np.int64)
    spread = np.floor(missing * 0.2 + 0.5).astype(np.int64)
    lengths = missing - spread + draws.below(field, 2 * spread)
    longest = int(lengths.max(initial=0))
    starts = draws.below(field + 1, _POOL - lengths)
    # A window begins at each place of the pool. The last ones extend beyond the pool, but no row's padding does.
    padded = np.concatenate([_make_pool(config.seed), np.zeros(longest, np.uint8)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, longest or 1)
    return strings(windows[starts], lengths)


# The three kinds. Each of them uses a field of `Draws` only once.


def _make_table(config: Config, kind: str, columns: list[Any], padding: Callable[[], Any]) -> Any:
    if config.extra:
        columns = [*columns, padding()]
    return pa.Table.from_arrays(columns, schema=schema(kind, config.extra))


def _make_persons(config: Config, numbers: I64) -> Any:
    draws = Draws(config.seed, 0, numbers)
    name = one_of(_NAMES, draws, 0)
    email = join(text(draws, 10, 7), "@", text(draws, 20, 5), ".com")
    card = pc.binary_join_element_wise(*(one_of(_FOUR_DIGITS, draws, field) for field in (1, 2, 3, 4)), " ")
    city, state = one_of(_CITY_NAMES, draws, 5), one_of(_STATE_NAMES, draws, 6)
    ids = pa.array(_FIRST_PERSON + _find_last_person(numbers))
    texts = [name, email, card, city, state]
    return _make_table(
        config,
        "person",
        [ids, *texts, _to_times(_compute_ms(config, numbers))],
        lambda: _make_extra(config, draws, 7, 8 + sum(map(lengths, texts)), config.person_size),
    )


def _make_auctions(config: Config, numbers: I64) -> Any:
    draws = Draws(config.seed, 0, numbers)
    last_person = _find_last_person(numbers)
    hot = draws.below(0, config.hot_seller_ratio) > 0
    seller = np.where(hot, last_person // _HOT_SPAN * _HOT_SPAN, _draw_person(config, draws, 1, last_person))
    initial = draws.price(3)
    begins = _compute_ms(config, numbers)
    # An auction is open for at least 1 ms, and at most twice the time in which `in_flight_auctions` more begin.
    length = np.maximum(2 * (_compute_ms(config, numbers + config.horizon) - begins), 1)
    name, description = text(draws, 10, 20), text(draws, 20, 100)
    return _make_table(
        config,
        "auction",
        [
            pa.array(_FIRST_AUCTION + _find_last_auction(numbers)),
            name,
            description,
            pa.array(initial),
            pa.array(initial + draws.price(5)),
            _to_times(begins),
            _to_times(begins + 1 + draws.below(4, length)),
            pa.array(_FIRST_PERSON + seller),
            pa.array(_FIRST_CATEGORY + draws.below(2, _CATEGORIES)),
        ],
        lambda: _make_extra(config, draws, 6, 48 + lengths(name) + lengths(description), config.auction_size),
    )


def _make_bids(config: Config, numbers: I64) -> Any:
    draws = Draws(config.seed, 0, numbers)
    last_person, last_auction = _find_last_person(numbers), _find_last_auction(numbers)
    hot = draws.below(0, config.hot_auction_ratio) > 0
    least = np.maximum(last_auction - config.in_flight_auctions, 0)
    some = least + draws.below(1, last_auction - least + 1 + _LEAD)
    auction = np.where(hot, last_auction // _HOT_SPAN * _HOT_SPAN, some)
    hot = draws.below(2, config.hot_bidder_ratio) > 0
    # The hot bidder is the second person of the hundred, because the first is the hot seller.
    second = last_person // _HOT_SPAN * _HOT_SPAN + 1
    bidder = np.where(hot, second, _draw_person(config, draws, 3, last_person))
    hot = draws.below(5, 2) > 0
    hot_channel, other_channel = draws.below(6, len(_HOT_CHANNELS)), draws.below(7, _CHANNELS)
    channel = pa.array(np.where(hot, hot_channel, len(_HOT_CHANNELS) + other_channel))
    names, urls = _make_channels(config.seed)
    return _make_table(
        config,
        "bid",
        [
            pa.array(_FIRST_AUCTION + auction),
            pa.array(_FIRST_PERSON + bidder),
            pa.array(draws.price(4)),
            names.take(channel),
            urls.take(channel),
            _to_times(_compute_ms(config, numbers)),
        ],
        lambda: _make_extra(config, draws, 8, 32, config.bid_size),
    )


def _draw_person(config: Config, draws: Draws, field: int, last_person: I64) -> I64:
    """Return for each event a random person, counted from 0: one of the active people or of the next ten."""
    active = np.minimum(last_person + 1, config.active_people)
    return last_person + 1 - active + draws.below(field, active + _LEAD)
