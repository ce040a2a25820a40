"""`python -m tuner` is the command `meshtune`."""

from tuner.cli.main import main

main()
