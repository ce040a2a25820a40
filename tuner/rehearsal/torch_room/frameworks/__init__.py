"""Frameworks as far as they need something of their own: their loops, their kernels, what they ask of data."""
