"""A trial that trains a real transformer with torch under exactly one configuration."""
