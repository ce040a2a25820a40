"""Hold exported flags to the rules that their frameworks publish."""
