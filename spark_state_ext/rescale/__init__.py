"""More or fewer buckets: a bucket begins with parts of others, and needs these until it has a snapshot of its own."""
