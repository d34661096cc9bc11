"""What a run says of itself: its console lines, metrics and events, the curve, the trackers."""
