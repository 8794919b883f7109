"""A report of a job as one page of HTML: what its metrics tell of its batches, and what files it has."""
