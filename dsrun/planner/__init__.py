"""The needs of a job, before anything is started: plain functions on numbers, no torch."""
