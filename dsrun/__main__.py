"""`python -m dsrun` is `dsrun`."""

from dsrun.cli import main

if __name__ == "__main__":
    main()
