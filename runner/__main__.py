"""`python -m runner`: the runner command."""

from runner.cli import main

if __name__ == "__main__":
    main()
