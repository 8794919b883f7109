"""The events of the Nexmark benchmark: the published rules, and that a range may be cut at will."""

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
    """Events far from the beginning, so that all active people exist."""
    return events(Config(), FIRST, COUNT)


@pytest.fixture(scope="module")
def padded() -> Events:
    """Events with the column ``extra``."""
    return events(Config(extra=True), 0, 100_000)


def numbers(kind: str, first: int = FIRST, count: int = COUNT) -> np.ndarray[Any, Any]:
    """Event numbers of a kind's rows."""
    begin, end = {"person": (0, 1), "auction": (1, 4), "bid": (4, 50)}[kind]
    every = np.arange(first, first + count)
    return every[(every % 50 >= begin) & (every % 50 < end)]


def ints(table: Any, column: str) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = table[column].cast(pa.int64()).to_numpy()
    return values


def near(share: float, expected: float, n: int) -> bool:
    """Whether a share of n draws is within five standard deviations of its expectation."""
    return bool(abs(share - expected) <= 5 * (expected * (1 - expected) / n) ** 0.5)


def equal(one: Events, other: Events) -> bool:
    return all(a.equals(b) for a, b in zip(one, other, strict=True))


# Ranges and seeds.


@pytest.mark.parametrize("config", [Config(extra=True), Config(out_of_order_group=1000)])
@pytest.mark.parametrize("cuts", [[1], [50, 51, 53, 54], [7_001, 51_200, 51_201, 100_003]])
def test_pieces_make_up_the_whole(config: Config, cuts: list[int]) -> None:
    first, count = 12_345, 120_000
    edges = [0, *cuts, count]
    pieces = [events(config, first + a, b - a) for a, b in itertools.pairwise(edges)]
    whole = Events(*(pa.concat_tables([getattr(piece, kind) for piece in pieces]) for kind in KINDS))
    assert equal(whole, events(config, first, count))


def test_a_seed_decides_all() -> None:
    assert equal(events(Config(), FIRST, 1000), events(Config(), FIRST, 1000))
    # On all machines and for all time: results are comparable only if the stream stays what it is.
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


def test_other_seeds_give_other_draws(plain: Events) -> None:
    # Neighbours, and seeds whose bits are mostly alike.
    for seed in (0, 8, 7 + 2**63, 2**64 - 1):
        other = events(Config(seed=seed), FIRST, 50_000)
        assert other.bid["dateTime"].equals(plain.bid["dateTime"].slice(0, 46_000))
        assert other.person["id"].equals(plain.person["id"].slice(0, 1000))
        same = np.mean(ints(other.bid, "price") == ints(plain.bid, "price")[:46_000])
        assert same < 0.01
        assert not set(other.bid["url"].to_pylist()) & set(plain.bid["url"].slice(0, 1000).to_pylist())


def test_fields_are_independent(plain: Events) -> None:
    bid, auction = plain.bid, plain.auction
    draws = np.array(
        [
            np.log(ints(bid, "price")),
            ints(bid, "auction") % 100 == 0,
            ints(bid, "bidder") % 100 == 1,
            pc.starts_with(bid["channel"], "channel-").to_numpy(),
            numbers("bid") % 50,
        ],
        dtype=float,
    )
    fields = np.array(
        [
            np.log(ints(auction, "initialBid")),
            np.log(ints(auction, "reserve") - ints(auction, "initialBid") + 1),
            ints(auction, "expires") - ints(auction, "dateTime"),
            ints(auction, "category"),
            ints(auction, "seller") % 100 == 0,
        ],
        dtype=float,
    )
    for table in (draws, fields):
        related = np.corrcoef(table) - np.eye(len(table))
        assert np.abs(related).max() < 5 / table.shape[1] ** 0.5
        # Nor does an event tell of the next.
        for row in table[:4]:
            assert abs(np.corrcoef(row[1:], row[:-1])[0, 1]) < 5 / table.shape[1] ** 0.5


# Kinds, ids and times.


def test_one_person_three_auctions_forty_six_bids(plain: Events) -> None:
    assert [table.num_rows for table in plain] == [COUNT // 50, COUNT * 3 // 50, COUNT * 46 // 50]
    assert [table.num_rows for table in events(Config(), 0, 5)] == [1, 3, 1]
    assert [table.num_rows for table in events(Config(), 53, 2)] == [0, 1, 1]
    assert [table.num_rows for table in events(Config(), 9, 0)] == [0, 0, 0]


def test_schemas(plain: Events, padded: Events) -> None:
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


def test_padding_changes_nothing_else(padded: Events) -> None:
    bare = events(Config(), 0, 100_000)
    assert equal(bare, Events(*(table.drop_columns(["extra"]) for table in padded)))


def test_ids_count_up_from_a_thousand() -> None:
    made = events(Config(), 0, 1000)
    assert ints(made.person, "id").tolist() == list(range(1000, 1020))
    assert ints(made.auction, "id").tolist() == list(range(1000, 1060))


def test_times_follow_from_number_and_rate(plain: Events) -> None:
    for kind, table in zip(KINDS, plain, strict=True):
        times = ints(table, "dateTime")
        assert np.all(np.diff(times) >= 0)
        # 10,000 a second: one in 100 µs, cut off to milliseconds, from 2015-07-15.
        assert np.array_equal(times, 1_436_918_400_000_000 + numbers(kind) // 10 * 1000)
    # A distance of events that is no whole number of microseconds.
    fast = events(Config(rate=30_000_000, base_ms=0), 30_000_000, 90_000)
    assert ints(fast.person, "dateTime").min() == 1_000_000
    assert ints(fast.person, "dateTime").max() == 1_002_000


def test_mixed_order_is_a_permutation_of_each_group() -> None:
    config = Config(out_of_order_group=1000)
    ordered, mixed = events(Config(), 3000, 2000), events(config, 3000, 2000)
    for a, b, column in zip(ordered, mixed, ("id", "id", "dateTime"), strict=True):
        assert not a.equals(b)
        assert a[column].equals(b[column].take(pc.sort_indices(b[column])))
    assert ints(mixed.bid, "dateTime")[:920].max() < ints(mixed.bid, "dateTime")[920:].min()


def test_every_reference_obeys_the_rules_read_event_by_event() -> None:
    """The rules written down once more, as loops, against all that the draws may choose from."""
    made = events(Config(), 0, 10_000)
    rows = [iter(table.to_pylist()) for table in made]
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


def test_what_is_referred_to_exists(plain: Events) -> None:
    made = events(Config(), 0, 200_000)
    # But for those that are to come soon: ten of each, and the first hot bidder.
    assert ints(made.bid, "auction").max() <= ints(made.auction, "id").max() + 10
    assert ints(made.bid, "bidder").max() <= ints(made.person, "id").max() + 10
    assert ints(made.auction, "seller").max() <= ints(made.person, "id").max() + 10
    assert min(ints(made.bid, "auction").min(), ints(made.bid, "bidder").min()) >= 1000
    latest = numbers("bid") // 50
    ahead = ints(plain.bid, "bidder") - 1000 - latest
    assert (ahead.min(), ahead.max()) == (-999, 10)
    ahead = ints(plain.bid, "auction") - 1000 - (latest * 3 + 2)
    assert (ahead.min(), ahead.max()) == (-100, 10)


# Distributions.


def test_hot_ratios(plain: Events) -> None:
    last_person, last_auction = numbers("bid") // 50, numbers("bid") // 50 * 3 + 2
    hot = ints(plain.bid, "auction") - 1000 == last_auction // 100 * 100
    # The hot one is also among those that the others choose from: 111 auctions, 1,010 people.
    assert near(hot.mean(), 1 / 2 + 1 / 2 / 111, len(hot))
    hot = ints(plain.bid, "bidder") - 1000 == last_person // 100 * 100 + 1
    assert near(hot.mean(), 3 / 4 + 1 / 4 / 1010, len(hot))
    hot = ints(plain.auction, "seller") - 1000 == numbers("auction") // 50 // 100 * 100
    assert near(hot.mean(), 3 / 4 + 1 / 4 / 1010, len(hot))

    other = events(Config(hot_auction_ratio=1, hot_bidder_ratio=10), FIRST, 100_000).bid
    within = 92_000
    hot = ints(other, "auction") - 1000 == last_auction[:within] // 100 * 100
    assert near(hot.mean(), 1 / 111, within)
    hot = ints(other, "bidder") - 1000 == last_person[:within] // 100 * 100 + 1
    assert near(hot.mean(), 9 / 10 + 1 / 10 / 1010, within)


def test_other_references_are_uniform() -> None:
    config = Config(hot_auction_ratio=1, hot_bidder_ratio=1, hot_seller_ratio=1)
    made = events(config, FIRST, 200_000)
    last = numbers("bid", FIRST, 200_000) // 50
    auctions = np.bincount(ints(made.bid, "auction") - 1000 - (last * 3 + 2) + 100, minlength=111)
    bidders = np.bincount(ints(made.bid, "bidder") - 1000 - last + 999, minlength=1010)
    for counts in (auctions, bidders):
        mean = len(last) / len(counts)
        assert np.all(np.abs(counts - mean) < 6 * mean**0.5)


def test_quantiles_of_prices(plain: Events) -> None:
    auction = plain.auction
    for prices in (
        ints(plain.bid, "price"),
        ints(auction, "initialBid"),
        ints(auction, "reserve") - ints(auction, "initialBid"),
    ):
        assert prices.min() >= 100
        assert prices.max() <= 100_000_000
        for q in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
            # round(10 ** (6 u) * 100) is at most this for a share q of all u.
            assert near(float(np.mean(prices <= 10 ** (6 * q) * 100)), q, len(prices))


def test_length_of_auctions(plain: Events) -> None:
    length = (ints(plain.auction, "expires") - ints(plain.auction, "dateTime")) // 1000
    # 100 more auctions take 1,666 events: 166 ms, as no auction is late enough in its millisecond to make it 167.
    counts = np.bincount(length, minlength=333)
    assert (length.min(), length.max()) == (1, 332)
    assert np.all(np.abs(counts[1:] - len(length) / 332) < 6 * (len(length) / 332) ** 0.5)
    slow = events(Config(rate=100, in_flight_auctions=30), FIRST, COUNT).auction
    length = (ints(slow, "expires") - ints(slow, "dateTime")) // 1000
    assert (length.min(), length.max()) == (1, 10_000)
    # With so many events a millisecond that the next auctions come at once, an auction lasts one.
    fast = events(Config(rate=10**9, in_flight_auctions=1), 0, 5000).auction
    assert np.all(ints(fast, "expires") - ints(fast, "dateTime") == 1000)


def test_categories_states_cities_names(plain: Events) -> None:
    for column, expected in (
        (plain.auction["category"], 5),
        (plain.person["state"], 6),
        (plain.person["city"], 10),
        (plain.person["name"], 11 * 9),
    ):
        counts = pc.value_counts(column).to_pylist()
        assert len(counts) == expected
        for entry in counts:
            assert near(entry["counts"] / len(column), 1 / expected, len(column))
    assert set(plain.auction["category"].to_pylist()) == {10, 11, 12, 13, 14}
    assert set(plain.person["state"].to_pylist()) == {"AZ", "CA", "ID", "OR", "WA", "WY"}
    assert "San Francisco" in set(plain.person["city"].to_pylist())


def test_cards_and_addresses(plain: Events) -> None:
    cards, addresses = plain.person["creditCard"].to_pylist(), plain.person["emailAddress"].to_pylist()
    assert all(re.fullmatch(r"\d{4}( \d{4}){3}", card) for card in cards)
    assert len(set(cards)) == len(cards)
    # The ends of a part are trimmed, so that it may be shorter than three characters.
    assert all(re.fullmatch(r"[a-z ]{0,6}@[a-z ]{0,4}\.com", address) for address in addresses)


def test_names_and_descriptions(plain: Events) -> None:
    for column, most in (("itemName", 20), ("description", 100)):
        texts = plain.auction[column].to_pylist()
        assert all(text == text.strip() for text in texts)
        lengths = np.array([len(text) for text in texts])
        assert lengths.max() == most - 1
        # Lengths are uniform from 3 before trimming, which takes 1 character of 6 texts away.
        assert abs(lengths.mean() - (2 + most) / 2) < 0.5
        letters = "".join(text[1:-1] for text in texts)
        assert near(letters.count(" ") / len(letters), 1 / 13, len(letters))
        assert near(letters.count("e") / len(letters), 12 / 13 / 26, len(letters))
        assert set(letters) == set("abcdefghijklmnopqrstuvwxyz ")


def test_channels_and_urls(plain: Events) -> None:
    bid = plain.bid
    counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(bid["channel"]).to_pylist()}
    hot = {name: counts.pop(name) for name in ("Google", "Facebook", "Baidu", "Apple")}
    assert all(near(count / bid.num_rows, 1 / 8, bid.num_rows) for count in hot.values())
    assert set(counts) == {f"channel-{i}" for i in range(10_000)}
    urls = dict(zip(bid["channel"].to_pylist(), bid["url"].to_pylist(), strict=True))
    # A channel always comes with the same URL.
    assert len(set(zip(bid["channel"].to_pylist(), bid["url"].to_pylist(), strict=True))) == 10_004
    form = re.compile(r"https://www\.nexmark\.com/[a-z_]{3,4}/[a-z_]{3,4}/[a-z_]{3,4}/item\.htm\?query=1(.*)")
    with_id = 0
    for channel, url in urls.items():
        found = form.fullmatch(url)
        assert found
        if found[1]:
            number = int(channel.removeprefix("channel-"))
            turned = int(f"{number:032b}"[::-1], 2)
            # Java's Math.abs of an int, which leaves the least one as it is.
            expected = turned if turned < 2**31 else -(2**31) if turned == 2**31 else 2**32 - turned
            assert found[1] == f"&channel_id={expected}"
            with_id += 1
    assert near(with_id / 10_000, 9 / 10, 10_000)


def test_sizes_of_padded_rows(padded: Events) -> None:
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
        # The greatest length is left out, as in the reference: half a byte less than the average.
        assert abs((size + padding).mean() - (average - 0.5)) < 5 * 0.12 * missing.mean() / len(size) ** 0.5
    assert lengths(bid["extra"]).min() == 54
    assert lengths(bid["extra"]).max() == 81
    letters = "".join(bid["extra"].to_pylist())
    assert set(letters) == {chr(c) for c in range(ord("a") - 25, ord("z") + 1)}
    # Digits of a negative number, not only 0, are half of the cases.
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
def test_a_configuration_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(Config(), **wrong)  # type: ignore[arg-type]


def test_a_range_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="negative"):
        events(Config(), -1, 5)
    with pytest.raises(ValueError, match="negative"):
        events(Config(), 1, -5)


def test_batches_as_files(tmp_path: Path) -> None:
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
