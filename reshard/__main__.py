"""`python -m reshard`: the reshard command."""

from reshard.cli import main

if __name__ == "__main__":
    main()
