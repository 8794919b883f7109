"""Reads state from its files, without the job, its code or a JVM."""
