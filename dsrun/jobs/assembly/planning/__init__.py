"""From the user's options to plans: the model's shape, the room there is, every preset's division of it."""
