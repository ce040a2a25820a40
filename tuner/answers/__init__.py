"""Answer questions about a study: its candidates, the best one, and what it gains."""
