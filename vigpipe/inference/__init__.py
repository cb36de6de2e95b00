"""Use a trained model: read its weights file, predict classes, draw its graphs."""
