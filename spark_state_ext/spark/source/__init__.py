"""State as tables of Spark: a data source from PySpark 4.0 on, and a function that does the same on every release."""
