"""Nexmark's q19, the ten highest bids on each auction, with the two Spark APIs that call Python once for each key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["BEST", "KEPT", "with_a_processor", "with_pandas"]

BEST = 10
KEPT = ["price", "dateTime", "bidder", "channel", "url", "extra"]
_OUTPUT = (
    "auction bigint, rank int, price bigint, dateTime timestamp, bidder bigint, channel string, url string, "
    "extra string"
)


def with_pandas(bids: DataFrame) -> DataFrame:
    """Return q19 as `applyInPandasWithState` computes it."""
    # The state is JSON text because Spark's workers cannot read the schema of a state with arrays.
    return bids.groupBy("auction").applyInPandasWithState(best_bids, _OUTPUT, "best string", "update", "NoTimeout")


def best_bids(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Yield the ten best bids on an auction, and keep them as its state."""
    best = _pick_best(json.loads(state.get[0]) if state.exists else [], pdfs)
    state.update((json.dumps(best),))
    yield _rank_bids(key[0], best)


def _pick_best(best: list[list[Any]], pdfs: Iterable[pd.DataFrame]) -> list[list[Any]]:
    for pdf in pdfs:
        times = pdf["dateTime"].astype("datetime64[us]").astype("int64")
        best += [list(row) for row in pdf.assign(dateTime=times)[KEPT].itertuples(index=False, name=None)]
    return sorted(best, reverse=True)[:BEST]


def _rank_bids(auction: int, best: list[list[Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(best, columns=KEPT)
    frame["dateTime"] = frame["dateTime"].astype("datetime64[us]")
    frame.insert(0, "rank", range(1, len(best) + 1))
    frame.insert(0, "auction", auction)
    return frame


def with_a_processor(bids: DataFrame) -> DataFrame:
    """Return q19 as `transformWithStateInPandas` computes it."""
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class BestBids(StatefulProcessor):
        """Does the same as `best_bids`."""

        def init(self, handle: Any) -> None:
            """Open the state."""
            self._best = handle.getValueState("best", "best string")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
            """Update the ten best bids on an auction with its new bids, and yield them."""
            best = _pick_best(json.loads(self._best.get()[0]) if self._best.exists() else [], rows)
            self._best.update((json.dumps(best),))
            yield _rank_bids(key[0], best)

        def close(self) -> None:
            """Do nothing, because there is nothing to release."""

    grouped: Any = bids.groupBy("auction")
    ranked: DataFrame = grouped.transformWithStateInPandas(BestBids(), _OUTPUT, "update", "None")
    return ranked
