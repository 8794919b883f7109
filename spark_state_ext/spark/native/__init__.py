"""Importing jobs that ran on Spark's own `applyInPandasWithState`, and exporting savepoints to Spark's operators."""
