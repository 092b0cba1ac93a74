"""`python -m cflow.server` is the cflow command."""

from cflow.server.cli import main

if __name__ == "__main__":
    main()
