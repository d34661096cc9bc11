"""Answers of a trained model: chat, and the held-out prompts of an evaluation."""
