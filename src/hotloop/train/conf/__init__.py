"""The defaults of every setting, as commented YAML groups. The settings page is made of them."""
