"""Rules about the file itself: its text, its keys, and the versions that read it."""
