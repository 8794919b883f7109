"""Hot standby: copies of buckets' state that other hosts keep up to date, and the assignment of copies to hosts.

There is no coordinator. Each host writes a record of what it has, judges by its own clock which hosts are alive, and
computes the same assignment (`docs/design/009-standby.md`).
"""
