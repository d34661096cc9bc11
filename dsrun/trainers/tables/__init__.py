"""A table for each trainer, and the rows that several of them share (hf)."""
