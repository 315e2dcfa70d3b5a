"""Everything is declared in pyproject.toml."""

from setuptools import setup

setup()
