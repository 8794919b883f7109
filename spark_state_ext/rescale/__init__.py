"""Rescaling to more or fewer buckets: a bucket begins with parts of others, and needs them until it has a snapshot."""
