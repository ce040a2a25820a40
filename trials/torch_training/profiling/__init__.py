"""Record and profile the steps of the torch trainer."""
