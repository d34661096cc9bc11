"""Prompts, tokenized examples, packing and batches."""
