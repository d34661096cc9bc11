"""job.json and the names in a run folder: all of jobs that training may import."""
