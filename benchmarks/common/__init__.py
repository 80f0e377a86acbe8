"""What benchmarks share: the registry and the table, timing, memory, ranks, plots, layers and models."""
