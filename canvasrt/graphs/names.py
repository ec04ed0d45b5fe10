"""Names in exported and in lowered graphs."""

from canvasrt.checkpoints.weight_names import TABLE

# The domain of the functions in a lowered graph, and the name of the function that unpacks INT4 weights.
DOMAIN, UNPACK = "canvasrt", "UnpackInt4"
# Suffixes of an INT4 weight's two parts in a lowered graph.
CODES, SCALES = ".codes", ".scales"
# A body's inputs for expert slots.
SLOTS = ("slots", "gate_slots", "gate_queues")
TABLE_VALUES, TABLE_SCALE = f"{TABLE}.values", f"{TABLE}.scale"
# Prefixes of a body's inputs for cached keys and values.
PAST = ("past_key_", "past_value_")
