"""Place single operators of several models on devices and links. Begin with `graph_file.py`."""
