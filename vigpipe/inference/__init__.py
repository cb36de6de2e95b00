"""Use a trained model: what its weights file says, its predictions, pictures of its graphs."""
