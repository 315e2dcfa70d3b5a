"""The Megatron layer. Importing it first makes `megatron.core` importable on hosts without CUDA."""

from comppo_mcore.model import shims as _shims  # noqa: F401  (must run before any megatron import)
