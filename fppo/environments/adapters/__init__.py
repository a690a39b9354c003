"""Adapters of other packages' environments to this protocol; each module imports its package."""
