"""Environments of other packages in this protocol: a module for each, which imports its package."""
