"""Arguments of other trainers, read from their own classes: the data behind `dsrun import`."""
