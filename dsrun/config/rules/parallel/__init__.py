"""Rules about tensor, sequence, pipeline and expert parallelism."""
