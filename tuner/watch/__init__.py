"""Watch of the cluster of a running job: when to change its layout, and to which. Begin with `policy.py`."""
