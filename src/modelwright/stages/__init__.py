"""Stages: what a person orders, in the order it happens, each leaving its result in the run folder."""
