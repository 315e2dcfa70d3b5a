"""The training loop and the stages that it alone uses."""
