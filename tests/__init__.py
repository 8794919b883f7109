"""Tests, and the helpers that they share: a package, so that these are imported by one name everywhere."""
