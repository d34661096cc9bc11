"""Jobs: from what the user asked for to a value, and from the value to a run that is watched to its end."""
