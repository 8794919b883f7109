"""Erasing keys that a user names: asking for it, and looking for what holds a key."""
