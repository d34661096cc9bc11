"""Rules about the rest of a run: batch, checkpoints, activations, compiling, logging."""
