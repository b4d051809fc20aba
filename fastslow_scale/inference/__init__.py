"""Using a trained model: sampling, evaluation."""
