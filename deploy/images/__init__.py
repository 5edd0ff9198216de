"""Builder of the images of operator and workers; see README.md."""
