"""What a plan is asked beside whether it fits: how sure it is, what would change it, over which lengths, and when."""
