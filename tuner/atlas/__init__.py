"""Atlas: a static site with the recommended layout of every model of the catalog on every cluster and size."""
