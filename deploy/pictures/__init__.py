"""Pictures of the documents, drawn by the product's own views from example values."""
