"""Rules about the optimizer, its arguments, the scheduler and the learning rate."""
