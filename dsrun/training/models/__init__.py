"""Models in the ranks: loading, ChatGLM, adapters, export."""
