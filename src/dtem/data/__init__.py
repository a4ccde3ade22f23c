"""Images: where they come from, how they are read and prepared, in batches. Shared by all tasks."""
