"""Rollouts on SGLang servers, over HTTP; nothing of `sglang` is imported here."""
