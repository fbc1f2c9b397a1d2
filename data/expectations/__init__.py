"""What rows must satisfy before a stage reads them."""
