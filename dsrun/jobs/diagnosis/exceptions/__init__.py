"""What an exception that no signature knows means: its type, its code, its message, and the releases of packages."""
