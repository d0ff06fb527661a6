"""Export of trained models: open_clip folders, model cards, transformers models, ONNX."""
