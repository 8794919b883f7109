"""The work of one bucket's call, without Spark: state, job, probes, deferred uploads, housekeeping."""

from __future__ import annotations
