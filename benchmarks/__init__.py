"""Benchmarks, one script per section of docs/results.md.

Run `python -m benchmarks.NAME` from the root of the repository; it writes results/NAME.json and results/NAME.md.
"""
