"""Erases the keys that a user names: requests it, finds the files that have a key, and rewrites them."""
