"""Questions about images, answered by vision-language models."""
