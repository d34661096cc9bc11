"""Results of commands for people and machines: columns, JSON, texts, pictures."""
