"""What each release of the libraries changed: fetched, read (never run), and packed for dsrun/releases/."""
