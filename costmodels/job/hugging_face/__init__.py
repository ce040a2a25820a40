"""Read the sizes of a model from a Hugging Face config.json.

Begin with `reader.py`, which chooses the reader of a model type. A size is never guessed: a missing key is an error,
unless transformers' configuration class of that model type gives it a default that published files rely on. Such a
default stands as `default=` where the key is read (transformers 5.24). A key that nothing reads and that may change the
model is refused by name (`config.py`).
"""
