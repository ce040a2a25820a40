"""One trial: what runs, where it runs, what is measured, and how it can fail."""
