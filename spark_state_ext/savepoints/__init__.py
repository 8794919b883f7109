"""Takes, reads, claims and deletes savepoints, and records which query started from which one."""
