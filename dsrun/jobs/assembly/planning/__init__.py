"""From what the user says to plans: the model's shape, the room there is, every preset's division of it."""
