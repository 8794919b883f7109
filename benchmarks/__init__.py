"""The benchmarks; ``python -m benchmarks --help`` lists them."""
