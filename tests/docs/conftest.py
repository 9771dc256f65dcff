"""The fixture that documents and examples share."""

from small_world import place as place
