"""Write the sections of the report, one to a module."""
