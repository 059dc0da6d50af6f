"""The process that runs the model."""
