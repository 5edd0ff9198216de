"""Package of all communication of the operator with the API server and the workers; everything is async."""
