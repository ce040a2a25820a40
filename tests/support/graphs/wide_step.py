"""Step of one layer that compiles in seconds and whose plans shard more than its optimizer."""

from benchmarks.zoo import Gemma

WIDE = Gemma(layers=1, model=128, heads=8, head=32, hidden=512, vocabulary=1024, batch=32, tokens=256)
