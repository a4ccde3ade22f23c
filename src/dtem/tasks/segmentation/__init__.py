"""Semantic segmentation: images with masks, cross-entropy by pixel, mean IoU."""
