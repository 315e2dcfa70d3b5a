"""Stands in for torchvision on a host whose torch has no matching build of it.

SGLang and transformers import the names in this package when they start, for models that see. A model of text
uses none: calling one raises.
"""

__version__ = "0.0.0"
