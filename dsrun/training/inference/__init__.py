"""A trained model asked: chat, and the held-out prompts of an evaluation."""
