"""Tests and their shared helpers. This is a package so that helpers have the same import name everywhere."""
