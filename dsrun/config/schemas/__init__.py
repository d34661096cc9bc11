"""What each key is in each version of DeepSpeed, where a config violates that, what an unknown key may mean."""
