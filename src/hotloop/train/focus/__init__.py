"""What the recipe `focus` is made of: its networks, the working context and its allocator, the losses, the texts."""
