"""Reports about a job: an HTML page about its batches, buckets and files, and recommended numbers of buckets."""
