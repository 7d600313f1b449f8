"""Other instances: how they are reached, who each one is, and what both sides have agreed."""
