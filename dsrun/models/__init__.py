"""The models there are, where their weights come from, ChatGLM's own formats, PEFT methods. No torch."""
