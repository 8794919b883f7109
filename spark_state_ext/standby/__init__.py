"""Hot standby: copies of buckets on other hosts, kept up to date with the checkpoint files (docs/design/009)."""
