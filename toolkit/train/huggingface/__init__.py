"""Models and chat data for transformers of Hugging Face."""
