"""Runs as pages that a browser shows: one file for a report, the same live on the board. Starts and changes nothing."""
