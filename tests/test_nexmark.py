"""The events of the Nexmark benchmark follow the published rules, and do not depend on how a range is split."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchmarks.nexmark.generator import KINDS, Config, EventFeed, Events, events, schema, spark_schema

# Benchmarks and the demo are not part of the package, so the suite leaves their tests to `make soak`.
pytestmark = pytest.mark.soak

FIRST, COUNT = 1_000_000, 500_000


@pytest.fixture(scope="module")
def plain() -> Events:
    """Return events far from the beginning, so that all active people exist."""
    return events(Config(), FIRST, COUNT)


@pytest.fixture(scope="module")
def padded() -> Events:
    """Return events with the column ``extra``."""
    return events(Config(extra=True), 0, 100_000)


def list_numbers(kind: str, first: int = FIRST, count: int = COUNT) -> np.ndarray[Any, Any]:
    """Return the event numbers of a kind's rows."""
    begin, end = {"person": (0, 1), "auction": (1, 4), "bid": (4, 50)}[kind]
    all_numbers = np.arange(first, first + count)
    return all_numbers[(all_numbers % 50 >= begin) & (all_numbers % 50 < end)]


def to_ints(table: Any, column: str) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = table[column].cast(pa.int64()).to_numpy()
    return values


def is_near(share: float, expected: float, n: int) -> bool:
    """Return whether a share of n draws is within five standard deviations of its expectation."""
    return bool(abs(share - expected) <= 5 * (expected * (1 - expected) / n) ** 0.5)


def are_equal(one: Events, other: Events) -> bool:
    return all(a.equals(b) for a, b in zip(one, other, strict=True))


# Ranges and seeds.


@pytest.mark.parametrize("config", [Config(extra=True), Config(out_of_order_group=1000)])
@pytest.mark.parametrize("cuts", [[1], [50, 51, 53, 54], [7_001, 51_200, 51_201, 100_003]])
def test_the_events_of_pieces_equal_those_of_the_whole_range(config: Config, cuts: list[int]) -> None:
    first, count = 12_345, 120_000
    edges = [0, *cuts, count]
    pieces = [events(config, first + a, b - a) for a, b in itertools.pairwise(edges)]
    whole = Events(*(pa.concat_tables([getattr(piece, kind) for piece in pieces]) for kind in KINDS))
    assert are_equal(whole, events(config, first, count))


def test_the_same_seed_gives_the_same_events() -> None:
    assert are_equal(events(Config(), FIRST, 1000), events(Config(), FIRST, 1000))
    # These values must never change on any machine: otherwise results would not be comparable.
    person, auction, bid = events(Config(extra=True), 10_000, 50)
    assert bid["auction"].to_pylist()[:6] == [1600, 1603, 1600, 1600, 1502, 1600]
    assert bid["bidder"].to_pylist()[:6] == [1201, 1201, 1086, 1051, 1201, 1076]
    assert bid["price"].to_pylist()[:5] == pytest.approx([184, 27157788, 489938, 2194771, 1813985], abs=1)
    assert bid["channel"].to_pylist()[:4] == ["Apple", "Google", "channel-6666", "Apple"]
    assert auction["itemName"].to_pylist() == ["aong", "xfvr", "bmw ljjiqkzao"]
    assert person.select(["id", "name", "emailAddress", "creditCard", "city", "state"]).to_pylist() == [
        {
            "id": 1200,
            "name": "Luke Walton",
            "emailAddress": "brzz@iwi.com",
            "creditCard": "6400 6519 1539 9454",
            "city": "Bend",
            "state": "CA",
        }
    ]
    assert person["extra"].to_pylist()[0].startswith("\\LRXN[JVOTSniwqzpMQYLZ")


def test_other_seeds_give_other_random_values(plain: Events) -> None:
    # Use adjacent seeds, and seeds whose bits are mostly equal.
    for seed in (0, 8, 7 + 2**63, 2**64 - 1):
        other = events(Config(seed=seed), FIRST, 50_000)
        assert other.bid["dateTime"].equals(plain.bid["dateTime"].slice(0, 46_000))
        assert other.person["id"].equals(plain.person["id"].slice(0, 1000))
        same = np.mean(to_ints(other.bid, "price") == to_ints(plain.bid, "price")[:46_000])
        assert same < 0.01
        assert not set(other.bid["url"].to_pylist()) & set(plain.bid["url"].slice(0, 1000).to_pylist())


def test_fields_are_independent(plain: Events) -> None:
    bid, auction = plain.bid, plain.auction
    draws = np.array(
        [
            np.log(to_ints(bid, "price")),
            to_ints(bid, "auction") % 100 == 0,
            to_ints(bid, "bidder") % 100 == 1,
            pc.starts_with(bid["channel"], "channel-").to_numpy(),
            list_numbers("bid") % 50,
        ],
        dtype=float,
    )
    fields = np.array(
        [
            np.log(to_ints(auction, "initialBid")),
            np.log(to_ints(auction, "reserve") - to_ints(auction, "initialBid") + 1),
            to_ints(auction, "expires") - to_ints(auction, "dateTime"),
            to_ints(auction, "category"),
            to_ints(auction, "seller") % 100 == 0,
        ],
        dtype=float,
    )
    for table in (draws, fields):
        related = np.corrcoef(table) - np.eye(len(table))
        assert np.abs(related).max() < 5 / table.shape[1] ** 0.5
        # The values of an event do not predict those of the next one either.
        for row in table[:4]:
            assert abs(np.corrcoef(row[1:], row[:-1])[0, 1]) < 5 / table.shape[1] ** 0.5


# Kinds, ids and times.


def test_fifty_events_are_one_person_three_auctions_and_forty_six_bids(plain: Events) -> None:
    assert [table.num_rows for table in plain] == [COUNT // 50, COUNT * 3 // 50, COUNT * 46 // 50]
    assert [table.num_rows for table in events(Config(), 0, 5)] == [1, 3, 1]
    assert [table.num_rows for table in events(Config(), 53, 2)] == [0, 1, 1]
    assert [table.num_rows for table in events(Config(), 9, 0)] == [0, 0, 0]


def test_tables_have_the_documented_schemas(plain: Events, padded: Events) -> None:
    for kind, table in zip(KINDS, plain, strict=True):
        assert table.schema.equals(schema(kind))
        table.validate(full=True)
        assert sum(column.null_count for column in table.columns) == 0
    for kind, table in zip(KINDS, padded, strict=True):
        assert table.schema.equals(schema(kind, extra=True))
        table.validate(full=True)
    for kind, table in zip(KINDS, events(Config(extra=True), 0, 0), strict=True):
        assert table.schema.equals(schema(kind, extra=True))
    together = spark_schema(extra=True).split(", ")
    assert together[:2] == ["kind string", "id bigint"]
    assert len(together) == len({column.split()[0] for column in together})
    for kind in KINDS:
        assert set(spark_schema(kind, extra=True).split(", ")) < set(together)
    assert spark_schema("bid", extra=True) == (
        "auction bigint, bidder bigint, price bigint, channel string, url string, dateTime timestamp, extra string"
    )


def test_padding_does_not_change_other_columns(padded: Events) -> None:
    bare = events(Config(), 0, 100_000)
    assert are_equal(bare, Events(*(table.drop_columns(["extra"]) for table in padded)))


def test_ids_count_up_from_a_thousand() -> None:
    generated = events(Config(), 0, 1000)
    assert to_ints(generated.person, "id").tolist() == list(range(1000, 1020))
    assert to_ints(generated.auction, "id").tolist() == list(range(1000, 1060))


def test_times_are_computed_from_event_number_and_rate(plain: Events) -> None:
    for kind, table in zip(KINDS, plain, strict=True):
        times = to_ints(table, "dateTime")
        assert np.all(np.diff(times) >= 0)
        # 10,000 events a second are one each 100 µs, truncated to milliseconds, from 2015-07-15.
        assert np.array_equal(times, 1_436_918_400_000_000 + list_numbers(kind) // 10 * 1000)
    # Here the distance of events is not a whole number of microseconds.
    fast = events(Config(rate=30_000_000, base_ms=0), 30_000_000, 90_000)
    assert to_ints(fast.person, "dateTime").min() == 1_000_000
    assert to_ints(fast.person, "dateTime").max() == 1_002_000


def test_mixed_order_is_a_permutation_of_each_group() -> None:
    config = Config(out_of_order_group=1000)
    ordered, mixed = events(Config(), 3000, 2000), events(config, 3000, 2000)
    for a, b, column in zip(ordered, mixed, ("id", "id", "dateTime"), strict=True):
        assert not a.equals(b)
        assert a[column].equals(b[column].take(pc.sort_indices(b[column])))
    assert to_ints(mixed.bid, "dateTime")[:920].max() < to_ints(mixed.bid, "dateTime")[920:].min()


def test_every_reference_follows_the_rules_event_by_event() -> None:
    """The rules are written as loops here, and compared with all values that the generator may choose."""
    generated = events(Config(), 0, 10_000)
    rows = [iter(table.to_pylist()) for table in generated]
    persons = auctions = 0
    for number in range(10_000):
        if number % 50 == 0:
            assert next(rows[0])["id"] == 1000 + persons
            persons += 1
            continue
        people = {*range(max(persons - 1000, 0), persons + 10), (persons - 1) // 100 * 100 + 1}
        if number % 50 < 4:
            row = next(rows[1])
            assert row["id"] == 1000 + auctions
            auctions += 1
            assert row["seller"] - 1000 in people | {(persons - 1) // 100 * 100}
            assert 10 <= row["category"] < 15
            assert row["reserve"] >= row["initialBid"] + 100
            continue
        row = next(rows[2])
        last = auctions - 1
        assert row["auction"] - 1000 in {*range(max(last - 100, 0), last + 11), last // 100 * 100}
        assert row["bidder"] - 1000 in people
    assert (persons, auctions) == (200, 600)
    assert not any(list(rest) for rest in rows)


def test_references_are_to_existing_events(plain: Events) -> None:
    generated = events(Config(), 0, 200_000)
    # Exceptions are the next ten of each kind, and the first hot bidder.
    assert to_ints(generated.bid, "auction").max() <= to_ints(generated.auction, "id").max() + 10
    assert to_ints(generated.bid, "bidder").max() <= to_ints(generated.person, "id").max() + 10
    assert to_ints(generated.auction, "seller").max() <= to_ints(generated.person, "id").max() + 10
    assert min(to_ints(generated.bid, "auction").min(), to_ints(generated.bid, "bidder").min()) >= 1000
    latest = list_numbers("bid") // 50
    ahead = to_ints(plain.bid, "bidder") - 1000 - latest
    assert (ahead.min(), ahead.max()) == (-999, 10)
    ahead = to_ints(plain.bid, "auction") - 1000 - (latest * 3 + 2)
    assert (ahead.min(), ahead.max()) == (-100, 10)


# Distributions.


def test_hot_references_have_their_ratios(plain: Events) -> None:
    last_person, last_auction = list_numbers("bid") // 50, list_numbers("bid") // 50 * 3 + 2
    hot = to_ints(plain.bid, "auction") - 1000 == last_auction // 100 * 100
    # The other references choose from 111 auctions or 1,010 people, among them the hot one.
    assert is_near(hot.mean(), 1 / 2 + 1 / 2 / 111, len(hot))
    hot = to_ints(plain.bid, "bidder") - 1000 == last_person // 100 * 100 + 1
    assert is_near(hot.mean(), 3 / 4 + 1 / 4 / 1010, len(hot))
    hot = to_ints(plain.auction, "seller") - 1000 == list_numbers("auction") // 50 // 100 * 100
    assert is_near(hot.mean(), 3 / 4 + 1 / 4 / 1010, len(hot))

    other = events(Config(hot_auction_ratio=1, hot_bidder_ratio=10), FIRST, 100_000).bid
    within = 92_000
    hot = to_ints(other, "auction") - 1000 == last_auction[:within] // 100 * 100
    assert is_near(hot.mean(), 1 / 111, within)
    hot = to_ints(other, "bidder") - 1000 == last_person[:within] // 100 * 100 + 1
    assert is_near(hot.mean(), 9 / 10 + 1 / 10 / 1010, within)


def test_other_references_are_uniform() -> None:
    config = Config(hot_auction_ratio=1, hot_bidder_ratio=1, hot_seller_ratio=1)
    generated = events(config, FIRST, 200_000)
    last = list_numbers("bid", FIRST, 200_000) // 50
    auctions = np.bincount(to_ints(generated.bid, "auction") - 1000 - (last * 3 + 2) + 100, minlength=111)
    bidders = np.bincount(to_ints(generated.bid, "bidder") - 1000 - last + 999, minlength=1010)
    for counts in (auctions, bidders):
        mean = len(last) / len(counts)
        assert np.all(np.abs(counts - mean) < 6 * mean**0.5)


def test_prices_have_the_expected_quantiles(plain: Events) -> None:
    auction = plain.auction
    for prices in (
        to_ints(plain.bid, "price"),
        to_ints(auction, "initialBid"),
        to_ints(auction, "reserve") - to_ints(auction, "initialBid"),
    ):
        assert prices.min() >= 100
        assert prices.max() <= 100_000_000
        for q in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
            # round(10 ** (6 u) * 100) is at most this for a share q of all u.
            assert is_near(float(np.mean(prices <= 10 ** (6 * q) * 100)), q, len(prices))


def test_auctions_have_the_expected_lengths(plain: Events) -> None:
    length = (to_ints(plain.auction, "expires") - to_ints(plain.auction, "dateTime")) // 1000
    # 100 more auctions take 1,666 events: 166 ms, as no auction is late enough in its millisecond to make it 167.
    counts = np.bincount(length, minlength=333)
    assert (length.min(), length.max()) == (1, 332)
    assert np.all(np.abs(counts[1:] - len(length) / 332) < 6 * (len(length) / 332) ** 0.5)
    slow = events(Config(rate=100, in_flight_auctions=30), FIRST, COUNT).auction
    length = (to_ints(slow, "expires") - to_ints(slow, "dateTime")) // 1000
    assert (length.min(), length.max()) == (1, 10_000)
    # The minimum length of an auction applies if the next auctions are within the same millisecond.
    fast = events(Config(rate=10**9, in_flight_auctions=1), 0, 5000).auction
    assert np.all(to_ints(fast, "expires") - to_ints(fast, "dateTime") == 1000)


def test_categories_states_cities_and_names_are_uniform(plain: Events) -> None:
    for column, expected in (
        (plain.auction["category"], 5),
        (plain.person["state"], 6),
        (plain.person["city"], 10),
        (plain.person["name"], 11 * 9),
    ):
        counts = pc.value_counts(column).to_pylist()
        assert len(counts) == expected
        for entry in counts:
            assert is_near(entry["counts"] / len(column), 1 / expected, len(column))
    assert set(plain.auction["category"].to_pylist()) == {10, 11, 12, 13, 14}
    assert set(plain.person["state"].to_pylist()) == {"AZ", "CA", "ID", "OR", "WA", "WY"}
    assert "San Francisco" in set(plain.person["city"].to_pylist())


def test_cards_and_addresses_have_their_form(plain: Events) -> None:
    cards, addresses = plain.person["creditCard"].to_pylist(), plain.person["emailAddress"].to_pylist()
    assert all(re.fullmatch(r"\d{4}( \d{4}){3}", card) for card in cards)
    assert len(set(cards)) == len(cards)
    # The ends of a part are trimmed, so that it may be shorter than three characters.
    assert all(re.fullmatch(r"[a-z ]{0,6}@[a-z ]{0,4}\.com", address) for address in addresses)


def test_names_and_descriptions_have_their_lengths_and_letters(plain: Events) -> None:
    for column, most in (("itemName", 20), ("description", 100)):
        texts = plain.auction[column].to_pylist()
        assert all(text == text.strip() for text in texts)
        lengths = np.array([len(text) for text in texts])
        assert lengths.max() == most - 1
        # Lengths are uniform from 3 on, before trimming removes one character from every sixth text.
        assert abs(lengths.mean() - (2 + most) / 2) < 0.5
        letters = "".join(text[1:-1] for text in texts)
        assert is_near(letters.count(" ") / len(letters), 1 / 13, len(letters))
        assert is_near(letters.count("e") / len(letters), 12 / 13 / 26, len(letters))
        assert set(letters) == set("abcdefghijklmnopqrstuvwxyz ")


def test_channels_and_urls_follow_the_rules(plain: Events) -> None:
    bid = plain.bid
    counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(bid["channel"]).to_pylist()}
    hot = {name: counts.pop(name) for name in ("Google", "Facebook", "Baidu", "Apple")}
    assert all(is_near(count / bid.num_rows, 1 / 8, bid.num_rows) for count in hot.values())
    assert set(counts) == {f"channel-{i}" for i in range(10_000)}
    urls = dict(zip(bid["channel"].to_pylist(), bid["url"].to_pylist(), strict=True))
    # A channel always comes with the same URL.
    assert len(set(zip(bid["channel"].to_pylist(), bid["url"].to_pylist(), strict=True))) == 10_004
    form = re.compile(r"https://www\.nexmark\.com/[a-z_]{3,4}/[a-z_]{3,4}/[a-z_]{3,4}/item\.htm\?query=1(.*)")
    with_id = 0
    for channel, url in urls.items():
        match = form.fullmatch(url)
        assert match
        if match[1]:
            number = int(channel.removeprefix("channel-"))
            turned = int(f"{number:032b}"[::-1], 2)
            # This is Java's Math.abs of an int, which does not change the smallest int.
            expected = turned if turned < 2**31 else -(2**31) if turned == 2**31 else 2**32 - turned
            assert match[1] == f"&channel_id={expected}"
            with_id += 1
    assert is_near(with_id / 10_000, 9 / 10, 10_000)


def test_padded_rows_have_their_average_sizes(padded: Events) -> None:
    def lengths(column: Any) -> np.ndarray[Any, Any]:
        sizes: np.ndarray[Any, Any] = pc.binary_length(column).to_numpy().astype(np.int64)
        return sizes

    person, auction, bid = padded
    texts = ("name", "emailAddress", "creditCard", "city", "state")
    fixed = {
        "person": (8 + sum(lengths(person[column]) for column in texts), 200),
        "auction": (48 + lengths(auction["itemName"]) + lengths(auction["description"]), 500),
        "bid": (np.full(bid.num_rows, 32), 100),
    }
    for kind, table in zip(KINDS, padded, strict=True):
        size, average = fixed[kind]
        padding, missing = lengths(table["extra"]), average - size
        assert np.all(np.abs(padding - missing) <= missing * 0.2 + 1)
        # As in the reference, the greatest length is excluded, so the mean is half a byte less than the average.
        assert abs((size + padding).mean() - (average - 0.5)) < 5 * 0.12 * missing.mean() / len(size) ** 0.5
    assert lengths(bid["extra"]).min() == 54
    assert lengths(bid["extra"]).max() == 81
    letters = "".join(bid["extra"].to_pylist())
    assert set(letters) == {chr(c) for c in range(ord("a") - 25, ord("z") + 1)}
    # Half of the letters come from negative digits.
    assert abs(sum(letter < "a" for letter in letters) / len(letters) - 25 / 52) < 0.01
    none = events(Config(extra=True, bid_size=31), 0, 1000).bid
    assert lengths(none["extra"]).max() == 0


# Errors and files.


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": -1},
        {"seed": 2**64},
        {"rate": 0},
        {"hot_auction_ratio": 0},
        {"active_people": -1},
        {"out_of_order_group": 953},
        {"bid_size": 2**20},
        {"rate": 1, "in_flight_auctions": 100_000},
    ],
)
def test_an_impossible_configuration_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(Config(), **wrong)  # type: ignore[arg-type]


def test_an_impossible_range_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        events(Config(), -1, 5)
    with pytest.raises(ValueError, match="negative"):
        events(Config(), 1, -5)


def test_the_feed_writes_batches_as_files(tmp_path: Path) -> None:
    feed = EventFeed(tmp_path / "feed")
    assert feed.pattern() == f"{tmp_path}/feed/shown/*/*"
    batches = [events(Config(), 0, 5000), events(Config(), 5000, 54)]
    folders = [feed.add(batch, files=3) for batch in batches]
    assert [folder.name for folder in folders] == ["batch-00000", "batch-00001"]
    for kind in KINDS:
        assert feed.pattern(kind) == f"{tmp_path}/feed/shown/*/{kind}"
        for folder, batch in zip(folders, batches, strict=True):
            files = sorted((folder / kind).iterdir())
            assert len(files) == min(3, getattr(batch, kind).num_rows)
            read = pa.concat_tables([pq.read_table(file) for file in files])
            assert set(read["kind"].to_pylist()) == {kind}
            assert read.drop_columns(["kind"]).equals(getattr(batch, kind))
    only_bids = feed.add(events(Config(), 10, 10))
    assert [len(list((only_bids / kind).iterdir())) for kind in KINDS] == [0, 0, 1]
    with pytest.raises(ValueError, match="none of"):
        feed.pattern("bids")
