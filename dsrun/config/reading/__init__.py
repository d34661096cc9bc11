"""The parts of document.py: places in a text, the tree of an object, the values without an inside."""
