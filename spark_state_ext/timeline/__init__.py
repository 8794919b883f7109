"""The timeline of a query: the epochs that its runs record, and which of a bucket's files are valid by them."""
