"""A local page to try a model: text to images, zero-shot classes of an image, nearest captions."""
