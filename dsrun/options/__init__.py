"""The options of every command: names, types, defaults and where a value came from."""
