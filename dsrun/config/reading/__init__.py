"""From a text to a document: its value, where every key stands, its syntax issues."""
