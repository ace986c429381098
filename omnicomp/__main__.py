"""`python -m omnicomp`."""

from omnicomp.cli import main

if __name__ == "__main__":
    main()
