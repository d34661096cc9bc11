"""The board: a folder of runs live in a browser, read-only, on the loopback address."""
