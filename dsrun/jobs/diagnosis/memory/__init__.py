"""Memory that ran out: sizes in lines, a run's own record by owner, and torch's memory snapshots."""
