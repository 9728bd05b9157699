"""One script per table: `python -m benchmarks.NAME` from the project's root; results are in results/NAME.json."""
