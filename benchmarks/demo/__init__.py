"""The demo: a stateful stream over a year of real flights, killed half-way, whose result must still be right.

``python -m benchmarks.demo`` runs it. Its modules are:

- `flights`: the state of an aircraft, and the function for Spark's own ``applyInPandasWithState`` that updates it;
- `dataset`: the 2013 New York flights as a folder of files in order of time;
- `server`: the Spark Connect server that the demo starts and kills;
- `stream`: the query;
- `proof`: the computation of the same table by pandas alone, from all flights at once.
"""

from __future__ import annotations
