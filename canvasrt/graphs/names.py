"""Names in exported graphs, in pieces of them, and in lowered graphs."""

from canvasrt.checkpoints.weight_names import TABLE

# The domain of the functions in a lowered graph, and the name of the function that unpacks INT4 weights.
DOMAIN, UNPACK = "canvasrt", "UnpackInt4"
# The name of a quantized weight's part is the weight's name, a dot, and one of these.
VALUES, BLOCK_SCALES, SCALE = "values", "block_scales", "scale"
FACTOR, INPUT_SCALE, SOFT_SCALE = "factor", "input_scale", "soft_scale"
# Suffixes of an INT4 weight's two parts in a lowered graph.
CODES, SCALES = ".codes", ".scales"
# A body's inputs for expert slots.
SLOTS = ("slots", "gate_slots", "gate_queues")
TABLE_VALUES, TABLE_SCALE = f"{TABLE}.{VALUES}", f"{TABLE}.{SCALE}"
# Prefixes of a body's inputs for cached keys and values.
PAST = ("past_key_", "past_value_")
# Values between the pieces of a body: the experts' input, the chosen experts, and the experts' result, which has one
# row per token and chosen expert.
EXPERT_INPUT, EXPERT_INDEX, EXPERT_ROWS = "own", "index", "expert_rows"
# Values that a piece passes to the next piece: the routing weights of a token's experts, and two values with the shape
# of hidden states.
SHARES, CARRIED = "shares", ("carried_0", "carried_1")
# The suffix of SHARES and CARRIED in the names of a piece's outputs.
OUT = "_out"
# The head's additional output that `observed.with_logits` adds.
LOGITS = "logits"
