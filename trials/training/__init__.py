"""What trials that train with torch or JAX share, whatever the library: backends, work, messages, keys.

Begin at `backend.py`. A library is a `Framework` (`framework.py`); its ranks are in `trials/torch_training` or
`trials/jax_training`.
"""
