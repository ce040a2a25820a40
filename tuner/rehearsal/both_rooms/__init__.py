"""What both rooms do alike: the program as `python` starts it, what it printed, and places in it."""
