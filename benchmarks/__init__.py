"""`python -m benchmarks NAME`: ratios that are measured side by side in one run."""
