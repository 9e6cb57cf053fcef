"""Deciding: break-even arithmetic over tiers, pure and without torch."""
