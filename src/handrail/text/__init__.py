"""Texts for people and models: spelling, patterns, rendering, masked secrets."""
