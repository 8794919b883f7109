"""Approximate distinct counts with Apache DataSketches (the optional package ``datasketches``).

The library accepts one value at a time, so each distinct value of a key in a batch costs a Python call. The state is
the library's compact form of an HLL sketch, which its versions for other languages and Spark's ``hll_union`` and
``hll_sketch_estimate`` can read; integers and text have the same hashes there.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from arrow_schemas.columns import combine_chunks
from spark_state_ext.errors import ExecutorPackageError, StateValueError
from spark_state_ext.operators.arrays import Segments, to_integers, to_numbers
from spark_state_ext.operators.functions import Buffers

__all__ = ["LG_K_MAX", "LG_K_MIN", "DistinctSketch", "describe_kind"]

LG_K_MIN, LG_K_MAX = 7, 21
# Stands for empty text, which the library ignores.
_EMPTY = "\0spark_state_ext: empty"


@dataclass(frozen=True)
class DistinctSketch:
    """The approximate number of distinct values, without NULLs.

    Parameters
    ----------
    lg_k
        Binary logarithm of the number of registers, 7 to 21; the relative standard error is about
        1.04 / sqrt(2 ** lg_k).
    """

    lg_k: int

    buffers = (("", pa.binary()),)
    result = pa.int64()

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        library = _import_library()
        ids = pa.array(segments.ids)
        if values.null_count:
            valid = values.is_valid()
            ids, values = ids.filter(valid), values.filter(valid)
        table = pa.table([ids, _to_hashable(values)], names=["id", "value"])
        distinct = pa.TableGroupBy(table, ["id", "value"], use_threads=False).aggregate([])
        # Arrow returns groups in any order.
        distinct = distinct.sort_by("id")
        owners, items = combine_chunks(distinct.column("id")).to_numpy(), _to_items(distinct.column("value"))
        sketches: list[bytes | None] = [None] * len(segments)
        borders = np.flatnonzero(np.append(True, owners[1:] != owners[:-1])) if len(owners) else owners
        bounds = pairwise(np.append(borders, len(owners)).tolist())
        for segment, (start, stop) in zip(owners[borders].tolist(), bounds, strict=True):
            sketch = library.hll_sketch(self.lg_k, library.tgt_hll_type.HLL_8)
            for item in items[start:stop]:
                sketch.update(item if item != "" else _EMPTY)
            sketches[segment] = sketch.serialize_compact()
        return [pa.array(sketches, pa.binary())]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        in_both = left[0].is_valid().to_numpy(zero_copy_only=False) & right[0].is_valid().to_numpy(zero_copy_only=False)
        # If only one side has a sketch, copy it.
        merged: list[bytes | None] = left[0].fill_null(right[0]).to_pylist()
        if in_both.any():
            library = _import_library()
            for position in np.flatnonzero(in_both).tolist():
                union = library.hll_union(self.lg_k)
                for side in (left, right):
                    union.update(self._check_size(library.hll_sketch.deserialize(side[0][position].as_py())))
                merged[position] = union.get_result(library.tgt_hll_type.HLL_8).serialize_compact()
        return [pa.array(merged, pa.binary())]

    def _check_size(self, sketch: Any) -> Any:
        if sketch.lg_config_k != self.lg_k:
            # The library's union loses its content if a smaller sketch is added.
            raise StateValueError(
                f"a sketch in the state of approx_count_distinct has lg_k {sketch.lg_config_k}, but the job has "
                f"{self.lg_k}: set lg_k={sketch.lg_config_k}, or start from a new checkpoint location"
            )
        return sketch

    def finish(self, buffers: Buffers) -> pa.Array:
        estimates = np.zeros(len(buffers[0]), dtype=np.int64)
        if buffers[0].null_count < len(buffers[0]):
            sketch = _import_library().hll_sketch
            for position, serialized in enumerate(buffers[0].to_pylist()):
                if serialized is not None:
                    estimates[position] = round(sketch.deserialize(serialized).get_estimate())
        return pa.array(estimates)


def describe_kind(data_type: pa.DataType) -> str:
    """Return the kind of a type's values in a sketch; equal values of different kinds are counted separately."""
    types = pa.types
    if types.is_decimal(data_type):
        return f"decimals of scale {data_type.scale}"
    kinds = {
        "floats": types.is_floating,
        "text": types.is_string,
        "bytes": types.is_binary,
        "dates": types.is_date32,
        "timestamps": types.is_timestamp,
    }
    return next((name for name, has in kinds.items() if has(data_type)), "integers")


def _to_hashable(values: pa.Array) -> pa.Array:
    """Return values as numbers or text, which the library accepts, and which Spark's own sketches hash too."""
    types = pa.types
    if types.is_floating(values.type):
        # Map -0.0 to 0.0, and all NaNs to one.
        floats = to_numbers(values, 0.0).astype(np.float64) + 0.0
        floats[np.isnan(floats)] = np.nan
        return pa.array(floats)
    if types.is_binary(values.type):
        return pa.array([value.decode("latin-1") for value in values.to_pylist()], pa.string())
    if types.is_decimal(values.type):
        return values.cast(pa.string())
    return to_integers(values)


def _import_library() -> Any:
    try:
        return importlib.import_module("datasketches")
    except ImportError as error:
        raise ExecutorPackageError(
            f"approx_count_distinct needs the package 'datasketches', which is missing in the Python {sys.executable}: "
            f"{sys.executable} -m pip install 'spark_state_ext[sketches]'"
        ) from error


def _to_items(values: pa.ChunkedArray) -> list[Any]:
    try:
        items: list[Any] = values.to_pylist()
    except UnicodeDecodeError:
        items = [_to_text(item) for item in values.cast(pa.binary()).to_pylist()]
    return items


def _to_text(item: bytes) -> str:
    """Return bytes as text, or a distinct text if they are not valid UTF-8; the library only accepts text."""
    try:
        return item.decode()
    except UnicodeDecodeError:
        return "\0" + item.decode("latin-1")
