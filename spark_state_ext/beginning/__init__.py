"""What a bucket without a pointer begins with: saved buckets, in a savepoint or in a query folder."""
