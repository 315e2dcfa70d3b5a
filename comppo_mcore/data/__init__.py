"""Prompts and tasks, the held-out split, the tokenizer and its chat template."""
