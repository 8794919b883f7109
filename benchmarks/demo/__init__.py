"""A year of real flights through a stateful stream that is killed half-way and must still be right.

``python -m benchmarks.demo`` runs it. The parts:

- `flights`: what is known about an aircraft, and the untouched ``applyInPandasWithState`` function;
- `dataset`: the 2013 New York flights as a folder of files in order of time;
- `server`: a Spark Connect server that the demo starts, and kills;
- `stream`: the query;
- `proof`: the same table computed by pandas alone, from the whole data at once.
"""

from __future__ import annotations
