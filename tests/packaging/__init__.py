"""What is installed, and how it looks from outside."""
