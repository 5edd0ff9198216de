"""The only part of the operator that talks to the API server and to the workers; all of it async."""
