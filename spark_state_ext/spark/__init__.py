"""The adapter: plans on the client, packing and per-key calls on the executors."""
