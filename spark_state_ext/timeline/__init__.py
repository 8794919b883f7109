"""Which file of a bucket is in force after a batch: epochs, which runs write down, and what follows from them."""
