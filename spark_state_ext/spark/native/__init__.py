"""Jobs on Spark's own `applyInPandasWithState`: their state comes in, and savepoints go out to Spark's operators."""
