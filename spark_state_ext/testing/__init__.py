"""What packages that extend this one test themselves with. Needs pytest."""
