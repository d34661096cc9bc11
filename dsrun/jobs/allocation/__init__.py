"""The hosts and devices of a job, reserved until it ends."""
