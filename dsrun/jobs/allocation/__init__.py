"""Which hosts and devices a job gets, reserved until it ends."""
