"""What models are trained for and judged by: data, losses and metrics of each task."""
