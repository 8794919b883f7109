"""A report of a job as one page of HTML: what its metrics tell of its batches and its buckets, and what files it has.
And what buckets cost, which a recommendation goes by."""
