"""Answer questions about a study from its trials: the best one, what it gains, and the trials themselves."""
