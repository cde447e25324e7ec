"""`python -m paceline`, as `torchrun -m paceline train ...` starts it."""

from paceline.cli.main import main

if __name__ == "__main__":
    main()
