"""`python -m tuner` is the command `meshtune`."""

from tuner.cli import main

main()
