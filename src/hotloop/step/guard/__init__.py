"""What a recording froze of Python, checked before each replay."""
