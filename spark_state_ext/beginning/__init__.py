"""The initial state of a bucket without a pointer: saved buckets, in a savepoint or in a query folder."""
