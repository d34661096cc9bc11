"""A job while it runs: the coordinator, the agents on its hosts, the ranks."""
