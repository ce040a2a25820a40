"""Rules that a configuration must obey: named, vectorised predicates, each with its own reason text."""
