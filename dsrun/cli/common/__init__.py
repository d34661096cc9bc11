"""What several commands share: options from the table, running a job, texts of plans and tables."""
