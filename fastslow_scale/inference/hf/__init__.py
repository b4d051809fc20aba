"""What an export carries with it: code for torch, transformers and sentencepiece that needs nothing of this package."""
