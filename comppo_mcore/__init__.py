"""CompPO on Megatron-Core: credit transport gated by the behaviour policy's own attention."""

__version__ = "0.1.0"
