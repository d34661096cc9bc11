"""What a job will need, before anything is started: plain functions on numbers, no torch."""
