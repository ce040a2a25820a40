"""A step of one layer whose plans cut more than its optimizer, and which compiles in seconds."""

from benchmarks.zoo import Gemma

WIDE = Gemma(layers=1, model=128, heads=8, head=32, hidden=512, vocabulary=1024, batch=32, tokens=256)
