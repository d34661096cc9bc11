"""Reports of a run: its console lines, metrics and events, the curve, the trackers."""
