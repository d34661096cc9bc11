"""job.json and the names in a run folder: what jobs and training share."""
