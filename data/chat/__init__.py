"""Messages to token ids."""
