"""What comes from files, and what goes to them: whole or not at all, and nothing on trust."""
