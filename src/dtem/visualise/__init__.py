"""Pictures of what merging does and what it costs."""
