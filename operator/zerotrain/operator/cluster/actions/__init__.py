"""One module per concern: how each kind of action is carried out at the API server and the workers."""
