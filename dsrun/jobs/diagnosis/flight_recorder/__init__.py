"""Dumps of torch's flight recorder: the collectives of each rank, and the rank that is behind."""
