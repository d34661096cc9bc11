"""Training files: reading them, conversations, sequence lengths, the cache. No torch."""
