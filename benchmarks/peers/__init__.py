"""Other systems that run the job of `benchmarks.counting`, each in a separate process and environment.

This module imports nothing, because a peer's Python has the packages of that peer but not ours.
"""
