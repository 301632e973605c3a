"""How many viewers a node carries."""
