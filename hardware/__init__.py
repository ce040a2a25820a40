"""What the machines are: devices, links, clusters, and the time of a collective on them."""
