"""A whole worker from its configuration: engine, memory and transport put together, and the threads that run it."""
