"""The defaults of every setting, as commented YAML groups. docs/reference/settings.md is made of them."""
