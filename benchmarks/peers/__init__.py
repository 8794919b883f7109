"""Other systems on the job of `benchmarks.counting`: each in an environment, and a process, of its own.

Nothing is imported here: a peer's Python has that peer's packages and not ours.
"""
