"""The defaults of every setting, as commented YAML groups; documented in docs/settings.md, which is made of them."""
