"""Hot standby: copies of buckets' state that other hosts keep up to date, and who keeps which.

There is no coordinator. Hosts write records of what they have, each judges by its own clock who lives, and computes the
same assignment (`docs/design/009-standby.md`).
"""
