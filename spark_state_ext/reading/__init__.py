"""State read from its files: without the job, without its code, and without a JVM."""
