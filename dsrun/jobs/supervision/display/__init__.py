"""What the user sees of a running job: its progress, and what a script prints."""
