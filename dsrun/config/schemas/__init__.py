"""DeepSpeed's keys in each of its versions, a config's violations of them, and guesses at unknown keys."""
