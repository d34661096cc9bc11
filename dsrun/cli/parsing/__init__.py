"""A command's words: options from the table, names that a shell completes, run files, the hosts of a job."""
