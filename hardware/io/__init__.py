"""Read the files that users name, and report their mistakes as `ConfigError`."""
