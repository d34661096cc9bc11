"""What torch recorded of the collectives of each rank, and which rank is behind."""
