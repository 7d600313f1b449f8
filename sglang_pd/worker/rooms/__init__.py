"""Rooms in their control: the tables' events and effects, claims on indices, verification before admission."""
