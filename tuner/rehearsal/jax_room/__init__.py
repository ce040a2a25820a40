"""Room of a rehearsal of a JAX program: it runs in the program's own environment, with JAX and the standard library.

Nothing of Meshtune is there but this package and two modules of `costmodels.xla`.
"""
